"""Which algorithm runs a row function, and how many threads hold a row.

thread               a thread holds short rows, which a block reads and writes as one span of memory
lanes, warp, block   threads of a part of a warp, of a warp, or of a block hold a row in registers
cluster              sm_90 and newer: 2 to 16 blocks hold a row in registers
streaming            a block reads a row again in each stage: any length
split                blocks reduce parts of a row, in a launch for each stage: any length, also with sums over rows
strided              the row is not the last dimension: threads take adjacent rows, and the threads of a block share their elements; if
                     rows are long and few, blocks do (split)
"""

import math
import typing

from jaxkern._core.define import CUDA_TYPES, busy_parts, ceil_div
from jaxkern._engines.rows import tuning

ALGORITHMS = ("thread", "lanes", "warp", "block", "cluster", "streaming", "split", "strided")
DTYPES = tuple(CUDA_TYPES)
IN_REGISTERS = ("lanes", "warp", "block", "cluster")


class Problem(typing.NamedTuple):
    """rows: their number. width: their length. bytes: the bytes of one element of all arrays of rows. pack: elements per load.

    sums: bytes of what a thread adds up over rows, for each element. kept: words of an element that are computed once if
    there are registers for them. stages: reductions along the row that wait for each other. narrow: results are rows of 8 bits.
    inner: rows that lie side by side, if the row is not the last dimension; pack counts rows then. For such problems, numbers:
    words of the numbers of a row. partial: bytes of what a thread reduces of it. stores: whether results have elements of rows.
    guarded: whether some elements need not be read, by masks of places.
    shifts: if rows side by side are no whole packs, elements so far apart start at the same place of a pack; 1 otherwise.
    pivots: whether a maximum and exponentials relative to it take one stage. columns: whether arrays of columns are read.
    vector: elements of 16 bytes of the narrowest array of rows; `pack` if 0. staged: bytes of an element of all arrays that are read, or
    of all that are written; `bytes` if 0. apart: whether the rows of some array do not lie side by side in the order of the rows.
    """

    rows: int
    width: int
    bytes: int = 4
    pack: int = 4
    sums: int = 0
    kept: int = 0
    stages: int = 1
    narrow: bool = False
    inner: int = 1
    itemsize: int = 4
    numbers: int = 2
    partial: int = 8
    stores: bool = True
    shifts: int = 1
    pivots: bool = False
    guarded: bool = False
    columns: bool = False
    vector: int = 0
    staged: int = 0
    apart: bool = False

    @property
    def strided(self) -> bool:
        return self.inner > 1

    @property
    def shifted(self) -> bool:
        return self.shifts > 1


class Layout(typing.NamedTuple):
    """How threads hold a row, as the kernel is told: lanes of a warp, 0 for a block, -b for a cluster of b blocks."""

    lanes: int
    packs: int
    threads: int
    keeps: bool = False  # dear values, whatever their number

    @property
    def cluster(self) -> int:
        return max(1, -self.lanes)

    @property
    def group(self) -> int:
        """Threads of a row."""
        return self.lanes if self.lanes > 0 else self.threads * self.cluster

    @property
    def groups(self) -> int:
        """Rows of a block or a cluster at a time."""
        return self.threads // self.lanes if self.lanes > 0 else 1


def fits(algorithm, problem, device=None) -> bool:
    if problem.strided or algorithm == "strided":
        return problem.strided and algorithm in ("strided", "split")
    if algorithm == "thread":
        return held_alone(problem) is not None
    if algorithm == "streaming":
        return not problem.sums
    return algorithm == "split" or layout(algorithm, problem, device) is not None


def choose(problem, device=None) -> str:
    if problem.strided:
        return "split" if parts_of(problem, device) > 1 else "strided"
    vector = problem.vector or problem.pack
    short = not problem.apart or problem.width <= tuning.THREAD_APART
    if short and (problem.width % vector or problem.width == 2 * vector) and fits("thread", problem, device):
        return "thread"
    keep = (a for a in IN_REGISTERS if problem.kept and _layout(a, problem, tuning.KEPT_WORDS, device))
    found = next(keep, None) or next(a for a in ALGORITHMS[1:] if fits(a, problem, device))
    if found in ("block", "cluster") and not problem.sums and problem.width * problem.bytes >= tuning.SPREAD_BYTES:
        idle = lambda a: _idle(layout(a, problem, device), problem, device)
        found = next(a for a in (found, "cluster", "split") if fits(a, problem, device) and not idle(a))
    if found == "streaming" and (device is None or problem.rows < tuning.SPLIT_ROWS * device.sm_count):
        return "split"
    if found == "cluster" and problem.stages == 1 and not problem.stores:
        # Nothing is read again. Clusters need several blocks on a multiprocessor to read while others wait.
        how = layout(found, problem, device)
        if resident(how, problem, 0, False, device) < tuning.REDUCING_BLOCKS:
            return "split"
    return found


def _idle(how, problem, device) -> bool:
    """Whether less than half of a GPU has blocks in a layout of few rows; None: rows are split."""
    return how is not None and device is not None and 2 * problem.rows * how.cluster <= device.sm_count


def shares(how, problem) -> bool:
    """Whether sums over rows of a layout are in shared memory, which leaves the registers to more blocks.

    Clusters whose threads have no registers for them do, and those that wait for each other often.
    """
    words = how.packs * problem.pack * (problem.bytes + problem.sums) / 4
    return (
        problem.sums > 0 and how.cluster > 1 and (words > tuning.BLOCK_WORDS or problem.stages > tuning.SHARED_STAGES)
    )


def resident(how, problem, shared, stays, device) -> int:
    """Blocks of a multiprocessor that leave enough registers for the packs of each thread.

    shared: bytes of a block for sums over rows. stays: blocks stay for many rows.
    """
    sums = 0 if shared else problem.sums
    packs = how.packs + (problem.width % problem.pack != 0)  # room for elements in no pack, and to shift columns
    kept = problem.kept * (how.keeps or how.packs * problem.pack * problem.kept <= tuning.KEPT_WORDS)
    words = packs * problem.pack * max((problem.bytes + sums) / 4, kept)
    few = shared or not stays  # registers are enough
    registers = next(r for most, r in (tuning.FEW_REGISTERS if few else tuning.REGISTERS) if words <= most)
    at_once = problem.rows * how.cluster <= tuning.AT_ONCE_BLOCKS * device.sm_count
    if (
        how.cluster > 1
        and not stays
        and at_once
        and words <= tuning.AT_ONCE_WORDS
        and problem.width % problem.pack == 0
    ):
        registers = min(registers, 64)
    if packs > how.packs:
        registers = max(registers, tuning.RAGGED_REGISTERS)
    if packs > how.packs and how.packs * problem.pack * kept > tuning.RAGGED_WORDS and not problem.sums:
        registers = 168
    if packs > how.packs and problem.pack == 8 and problem.columns and how.group < 32 and words > tuning.LANE_WORDS:
        registers = max(registers, tuning.LANE_REGISTERS)
    blocks = min(2048, 65536 // registers) // how.threads
    if shared:
        blocks = min(blocks, device.shared_memory // (shared + tuning.COLUMN_BYTES))
    return max(1, blocks)


def layout(algorithm, problem, device=None) -> Layout | None:
    """The layout of an algorithm that holds rows in registers; None if the rows are too long for it.

    Rows are spread over enough threads to keep dear values, if there is such a layout.
    """
    keeps = problem.kept and _layout(algorithm, problem, tuning.KEPT_WORDS, device)
    return keeps or _layout(algorithm, problem, None, device)


def _layout(algorithm, problem, most_kept, device) -> Layout | None:
    """most_kept: words of kept values in a thread, at most; None if values are computed again."""
    make = {"block": _block, "cluster": _cluster}.get(algorithm, _lanes)
    return make(algorithm, problem, most_kept, device)


def _lanes(algorithm, problem, most_kept, device) -> Layout | None:
    pack = problem.pack
    if problem.sums and problem.width % pack:  # rows of a block begin at different places of a pack
        return None
    bytes_of = 4 if problem.narrow else problem.bytes
    most = tuning.LANE_PACKS
    if problem.stages == 1 and not problem.stores and pack * bytes_of < tuning.PACK_BYTES:
        most = tuning.REDUCED_HALF_PACKS
    each = min(most, max(1, tuning.LANE_BYTES // max(1, pack * bytes_of)))
    few = most_kept is not None and problem.width % pack == 0
    for lanes in (32,) if algorithm == "warp" else (1, 2, 4, 8, 16):
        how = Layout(lanes, _packs(problem, lanes), tuning.GROUP_THREADS)
        leaves_out = problem.guarded and how.packs * pack * problem.bytes <= 4 * tuning.GUARDED_WORDS
        if few and how.packs * pack > tuning.KEPT_ELEMENTS and not leaves_out:
            continue
        if _holds(how, problem, tuning.WARP_WORDS, most_kept) and (how.packs <= each or lanes >= 16):
            return how
    return None


def _block(_, problem, most_kept, device) -> Layout | None:
    for threads in (64, 128, 256, 512, 1024):
        if most_kept is not None and threads > tuning.KEPT_THREADS and _has_clusters(device):
            return None
        how = Layout(0, _packs(problem, threads), threads)
        most = tuning.NARROW_WORDS if problem.narrow and _has_clusters(device) else tuning.BLOCK_WORDS
        most = most if threads < 1024 else most / 2
        elements = how.packs * problem.pack
        if threads > tuning.FEW_THREADS and elements > tuning.BLOCK_ELEMENTS and _has_clusters(device):
            return None
        wide = threads >= tuning.FEW_THREADS or elements <= 16 or _holds(how, problem, 16, most_kept)
        if wide and _holds(how, problem, most, most_kept):
            return how
    return None


def _cluster(_, problem, most_kept, device) -> Layout | None:
    if not _has_clusters(device):
        return None
    own = tuning.PIVOT_CLUSTERS if problem.pivots and problem.stores else tuning.CLUSTERS
    sizes = tuning.KEPT_CLUSTERS if most_kept is not None else [(w, None, b, t) for w, b, t in own]
    for words, kept, blocks, threads in sizes:
        if device is not None and blocks > device.sm_count:
            continue
        how = Layout(-blocks, _packs(problem, blocks * threads), threads, kept is not None)
        if blocks < max(b for _, _, b, t in sizes if t == threads) and not problem.sums and _idle(how, problem, device):
            continue
        room = how.packs * problem.pack * threads * problem.sums if shares(how, problem) else 0
        if _holds(how, problem._replace(sums=0), words, kept) and room <= tuning.SHARED_BYTES:
            return how
    return None


def _packs(problem, group) -> int:
    """Packs of each thread of a group. Rows that are not whole packs have elements in no pack, a few for each thread."""
    elements, pack = problem.width, problem.pack
    if elements % pack:
        elements -= group * edges(pack, group)
    return max(1, ceil_div(elements, group * pack))


def edges(pack, group) -> int:
    """The most elements of a thread before and after the whole packs of a row (kEdges in packs.cuh)."""
    return ceil_div(2 * pack - 2, group)


def _holds(how, problem, most, most_kept) -> bool:
    """Whether a thread has at most so many words of rows and sums, and of kept values."""
    elements = how.packs * problem.pack
    if most_kept is not None:
        wide = how.threads >= tuning.WIDE_THREADS and elements > tuning.WIDE_ELEMENTS
        if wide or elements * problem.kept > most_kept:
            return False
    return elements * (problem.bytes + problem.sums) / 4 <= most


def _has_clusters(device) -> bool:
    """Whether a device runs clusters of 16 blocks, as GPUs of data centres do."""
    return device is None or device.compute_capability >= 90 and device.shared_memory >= 227 * 1024


# ---- short rows


class Alone(typing.NamedTuple):
    """How threads hold short rows: rows of a thread, threads of a block, blocks of a multiprocessor."""

    rows: int
    threads: int
    blocks: int


def held_alone(problem) -> Alone | None:
    """The layout of rows that threads hold alone; None if they are too long for it."""
    width, vector = problem.width, problem.vector or problem.pack
    words = lambda each: width * (each * problem.bytes + 2 * problem.sums) / 4
    halves = width % 2 and vector >= 8 and words(2) <= tuning.THREAD_TWO  # two rows are whole words
    # More of very short rows, while the vectors of threads have no bank conflicts.
    few = lambda each: each * width <= tuning.THREAD_ELEMENTS and each * (width & -width) <= vector
    each = next((n for n in (8, 4, 2) if few(n)), 2 if halves else 1)
    bytes_of = width * max(each * max(problem.staged, problem.bytes), problem.sums)
    threads = next((n for n in (128, 64, 32) if n * bytes_of <= tuning.THREAD_ROOM), None)
    spills = vector <= 2 and width * problem.kept > tuning.KEPT_WORDS  # dear values in float64
    if width > tuning.THREAD_WIDTH or words(each) > tuning.THREAD_WORDS or threads is None or spills:
        return None
    registers = next(r for most, r in tuning.THREAD_REGISTERS if words(each) <= most)
    return Alone(each, threads, max(1, 65536 // registers // threads))


# ---- rows that are not the last dimension


class Across(typing.NamedTuple):
    """How such rows are computed: threads side by side, packs of each thread at a time, threads of a block, whether it reads
    rows again, and blocks of a cluster.
    """

    lanes: int
    packs: int
    threads: int
    streams: bool
    cluster: int = 1


def strided_pack(inner, itemsize, numbers) -> int:
    """Adjacent rows of a thread. itemsize: of the widest array of rows. numbers: words of the numbers of a row."""
    pack = max(1, tuning.PACK_BYTES // itemsize)
    if pack * itemsize > 8 and pack * numbers > tuning.STRIDED_NUMBERS:
        pack = max(1, 8 // itemsize)
    return math.gcd(inner, pack)


def shifted(problem, adjacent, numbers) -> Problem:
    """The problem with packs that start before its tiles (kShifted in strided.cuh), if rows side by side are no whole packs and fill
    most of such tiles; otherwise the problem itself. adjacent: rows that lie side by side in all arrays, or 0.
    """
    pack = strided_pack(0, problem.itemsize, numbers)
    found = problem._replace(pack=pack, inner=adjacent, shifts=pack // math.gcd(adjacent, pack))
    lanes = adjacent and problem.pack < pack and _shifted_lanes(found)
    fits = lanes and _room(Across(lanes, 1, tuning.STRIDED_THREADS, True), found) <= tuning.STRIDED_ROOM
    return found if fits else problem


def _shifted_lanes(problem) -> int:
    """The most threads side by side whose tiles rows fill, or 0. Elements of a thread start at the same place of a pack."""
    alike = lambda n: tuning.STRIDED_THREADS // n % problem.shifts == 0
    filled = lambda n: tuning.SHIFTED_FILLED * n * problem.pack * _tiles_of_row(n, problem) <= problem.inner
    return next((n for n in (32, 16, 8) if alike(n) and filled(n)), 0)


def _tiles_of_row(lanes, problem) -> int:
    """Tiles of shifted packs side by side."""
    return ceil_div(problem.inner, (lanes - 2) * problem.pack if lanes == 32 else (lanes - 1) * problem.pack + 1)


def across(problem, device, holds=True) -> Across:
    """holds: whether a thread may hold its elements of rows, so that they are read once."""
    pack, width = problem.pack, problem.width
    words = _words(problem)
    again = problem.stages + problem.stores > 1
    side_by_side = power_of_2(ceil_div(problem.inner, pack))
    narrow = power_of_2(ceil_div(tuning.STRIDED_BYTES, pack * problem.itemsize))
    packs = max(1, int(tuning.STRIDED_WORDS / words))
    # Of short rows, several that are not adjacent are in a block, too.
    widest = lambda threads, packs: min(32, max(side_by_side, threads // power_of_2(ceil_div(width, packs))))
    if problem.shifted:
        narrow, most_lanes = max(8, narrow), _shifted_lanes(problem)
        widest = lambda threads, packs: most_lanes
    few = lambda lanes: device is not None and problem.rows < tuning.STRIDED_BLOCKS * device.sm_count * lanes * pack
    for most, cluster, blocks in tuning.STRIDED_HELD if holds and again else ():
        lanes, own = widest(128, packs), ceil_div(width, cluster)
        groups = ceil_div(own, packs)
        while lanes > narrow and (groups * lanes > most or few(lanes)):
            lanes //= 2
        unit = max(32, problem.shifts * lanes)
        threads = max(128, unit * ceil_div(groups * lanes, unit))
        how = Across(lanes, ceil_div(own * lanes, threads), threads, False, cluster)
        fits = (
            threads <= most and (cluster == 1 or _has_clusters(device)) and _room(how, problem) <= tuning.STRIDED_ROOM
        )
        if fits and strided_blocks(how, problem) >= blocks:
            return how
    threads, packs = tuning.STRIDED_THREADS, max(1, int(tuning.STRIDED_FLIGHT / words))
    lanes = widest(threads, packs)
    if width < tuning.STRIDED_SHORT and not problem.shifted and not few(tuning.STRIDED_ALONE):
        return Across(tuning.STRIDED_ALONE, packs, tuning.STRIDED_ALONE, True)
    while (
        lanes > 1 and not problem.shifted and _room(Across(lanes, packs, threads, True), problem) > tuning.STRIDED_ROOM
    ):
        lanes //= 2
    return Across(lanes, packs, threads, True)


def _words(problem) -> float:
    """Words of a pack of all rows; one of 16 bits takes a word."""
    return max(problem.pack * problem.bytes / 4, problem.bytes / problem.itemsize)


def keeps_across(how, problem) -> bool:
    """Whether threads keep dear values from one stage to the next."""
    most = tuning.STRIDED_KEPT[max(2, problem.itemsize)]
    return not how.streams and how.packs * (_words(problem) + problem.pack * problem.kept) <= most


def _room(how, problem) -> int:
    """Bytes of shared memory in which the threads of a block join what they reduced (JoinGroups in groups.cuh)."""
    if how.lanes == how.threads and how.cluster == 1:  # nothing is joined
        return 0
    columns, blocks = how.lanes * problem.pack, 2 * how.cluster if how.cluster > 1 else 0
    parts = how.threads // (how.lanes if problem.shifted else 32)
    return (columns * problem.partial + 16) * (parts + 1 + blocks)


def joining(parts, problem, most) -> tuple[int, int]:
    """(rows, threads) of a block that joins the parts of rows. most: bytes of its shared memory."""
    rows = 32 if parts <= 32 else 8
    groups = lambda rows: max(4, min(512 // rows, power_of_2(ceil_div(parts, 4))))
    sizes = [(n, n * groups(n)) for n in (32, 16, 8) if n <= rows]
    sizes += [(8, threads) for threads in (256, 128, 64, 32) if threads < sizes[-1][1]]
    room = lambda size: _room(Across(size[0], 1, size[1], True), problem._replace(pack=1))
    return next((size for size in sizes if room(size) <= most), sizes[-1])


def strided_blocks(how, problem) -> int:
    """Blocks of a multiprocessor that leave enough registers to each thread; compare `resident`."""
    kept = problem.kept if keeps_across(how, problem) else 0
    words = how.packs * (_words(problem) + problem.pack * kept) + problem.pack * (problem.numbers + problem.partial / 4)
    registers = next(r for most, r in tuning.STRIDED_REGISTERS if words <= most)
    return max(1, min(65536 // registers // how.threads, 200 * 1024 // (_room(how, problem) + 1024)))


def tiles_of(how, problem) -> int:
    """Blocks side by side."""
    if problem.shifted:
        return problem.rows // problem.inner * _tiles_of_row(how.lanes, problem)
    return ceil_div(problem.rows, how.lanes * problem.pack)


def parts_of(problem, device, forced=False) -> int:
    """Blocks that share rows: the fewest that keep nine tenths of the GPU busy until the end, or else the busiest.

    forced: though one block could hold its rows.
    """
    how = across(problem, device, holds=not forced)
    if device is None or not how.streams:
        return 1
    tiles, slots = tiles_of(how, problem), tuning.STRIDED_BLOCKS * device.sm_count
    most = min(problem.width // tuning.STRIDED_ELEMENTS, tuning.STRIDED_MOST // tiles)
    return busy_parts(tiles, slots, most)


def power_of_2(n) -> int:
    """The least power of two that is not less than n."""
    return 1 << (n - 1).bit_length()
