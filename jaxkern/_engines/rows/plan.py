"""The launch list of a row function, for the algorithm and the layout that `layout.py` chooses."""

import functools
import math
import typing

from jaxkern._core import algorithms, define, functor, launch, memo
from jaxkern._core.cpp import Unsupported, cpp_type
from jaxkern._core.define import ceil_div, fast_divmod
from jaxkern._core.jaxprs import computing
from jaxkern._core.launch import Launch, Plan, boolean, i64, struct
from jaxkern._engines.jaxpr import Value
from jaxkern._engines.rows import tuning
from jaxkern._engines.rows.generate import source
from jaxkern._engines.rows.guards import guards
from jaxkern._engines.rows.in_place import last_of, views_of
from jaxkern._engines.rows.layout import (
    ALGORITHMS,
    Layout,
    Problem,
    across,
    choose,
    fits,
    held_alone,
    joining,
    keeps_across,
    layout,
    parts_of,
    resident,
    shares,
    shifted,
    strided_blocks,
    strided_pack,
    tiles_of,
)
from jaxkern._engines.rows.program import adjacent, groups_of_index

HEADER = "rows/rows.cuh"
NAME = "Function"
MOST_ARRAYS = 20
MOST_SIZE = (1 << 31) - (1 << 20)  # of a dimension: the columns of the last tile of a row are numbers of 32 bits
SOURCES = 1024  # structs that are kept
SHARED = 48 * 1024  # bytes of static shared memory, which functions of a kernel do not share

# Modules of hand-written kernels, by the name of the operation. by_hand(device, operands, results, function) returns the plan of
# one, None if XLA is faster than any kernel, or GENERATED.
BY_HAND: dict = {}
GENERATED = "generated"


def outputs(function) -> list:
    """(shape, dtype) of each output of the kernel."""
    size = lambda v: tuple(1 if d is None else d.size for d in v.dims)
    return [(size(o.result), o.dtype) for o in function.core.outputs]


def _picked(function, problem, device) -> str:
    """The algorithm that the caller of the function forced, that is forced here, or that is chosen."""
    own = BY_HAND.get(function.name)
    if own is not None and not set(ALGORITHMS) <= set(own.ALGORITHMS):  # its algorithms are hand-written kernels alone
        return choose(problem, device)
    forced = algorithms.forced(function.name) if function.algorithm == "auto" else function.algorithm
    return algorithms.pick(function.name, forced, problem, device)


def plan(device, operands, results, *, function, alone=False):
    """The launches of a row function, or None where there is no kernel, or if it must be `alone` and something follows it."""
    try:
        if alone and not function.core.trivial:
            return None
    except Unsupported:
        return None
    if function.name in BY_HAND:
        found = BY_HAND[function.name].by_hand(device, operands, results, function)
        if found != GENERATED:
            return found
    core, program = function.core, function.program
    arrays = [*(operands[k] for k in program.used), *results]
    if not program.has_full:
        return None
    if len(arrays) > MOST_ARRAYS or any(d.size >= MOST_SIZE for d in (program.row, *program.others)):
        return None
    mapped = [*(program.operands[k] for k in program.used), *(o.result for o in core.outputs)]
    if any(isinstance(v, Value) and len(program.groups(v)) > define.MAP_RANK for v in mapped):
        return None
    rows, width = math.prod(d.size for d in program.others), program.row.size
    views = views_of(core)
    if any(last_of(v) is not program.row for v in views):
        return _strided(device, operands, arrays, function, views)
    columns = [o for o in core.outputs if o.kind == "columns"]
    row_types = [*(operands[k].dtype for k in core.rows), *(o.dtype for o in core.of_kind("row"))]
    # A single row counts as a column.
    row_bytes = [d.itemsize for d in row_types] or [operands[k].dtype.itemsize for k in core.columns] or [4]
    pack = vector = tuning.PACK_BYTES // max(2, min(row_bytes))
    same = all([d for d in v.dims if d is not None] == [*program.others, program.row] for v in views)
    summed = sum(computing(o.value.aval.dtype).itemsize for o in columns)
    divisor = math.gcd(width, pack)  # packs of so many elements start where rows do
    half = 2 * divisor == pack and width * min(row_bytes) <= tuning.HALF_PACK_BYTES
    ragged, more = tuning.RAGGED_PACKS[pack]
    short = divisor >= tuning.SUMMED_PACK or width < (ragged + more * summed) * pack
    if half or not same or (summed and short):
        pack = divisor
    held = sum(operands[k].dtype.itemsize for k in core.rows) or row_bytes[0]
    stored = [o.dtype.itemsize for o in core.of_kind("row")]
    more = {"pivots": bool(core.pivots), "guarded": bool(guards(core)), "columns": bool(core.columns)}
    more |= {"narrow": 1 in stored, "stores": bool(stored or columns)}
    more |= {"vector": vector, "staged": max(held, sum(stored)), "apart": not same}
    problem = Problem(rows, width, held, pack, summed, core.kept_words, len(core.stages), **more)
    algorithm = _picked(function, problem, device)
    own = _Rows(device, function, arrays, rows, width)
    launches = own.split if algorithm == "split" else functools.partial(own.launches, algorithm)
    unaligned, single = algorithm, launches
    if algorithm == "thread":
        launches, problem = functools.partial(own.threads, views), problem._replace(pack=vector)
        unaligned, single = "lanes", functools.partial(own.launches, "lanes")
    single = single if fits(unaligned, problem._replace(pack=1), device) else own.split
    return _at_any_alignment(algorithm, problem, launches, single)


@memo.remembered(SOURCES)
def _source(function, keeps):
    """The struct of a function: of launches for arrays that are aligned, for others, and of the next program."""
    return source(function.core, NAME, keeps)


def _at_any_alignment(algorithm, problem, launches, single):
    """The plan. launches, single: the methods of `_Rows` for arrays whose rows start on packs, and for others."""
    aligned = launches(problem)
    if problem.pack == 1:
        return aligned and Plan(algorithm, *aligned)
    unaligned = single(problem._replace(pack=1, shifts=1))
    aligned = aligned or unaligned
    if aligned is None or unaligned is None:
        return None
    return Plan(algorithm, aligned[0], max(aligned[1], unaligned[1]), unaligned[0])


class _Rows(typing.NamedTuple):
    """A function and its arrays. The methods return (launches, bytes of scratch), or None where there is no kernel."""

    device: typing.Any
    function: typing.Any
    arrays: list
    rows: int
    width: int

    @property
    def core(self):
        return self.function.core

    def code(self, keeps) -> str | None:
        found = _source(self.function, keeps and bool(self.core.kept_values))
        if found.size > functor.MOST:
            functor.warn_of_size(self.function.label, found.size)
            return None
        return found.text

    def arguments(self, walkers, sums):
        return _arguments(
            self.core, self.function.program, self.rows, self.width, walkers, sums, self.arrays, self.device
        )

    def ends(self, problem, how, tiles) -> str:
        """How rows end that are not the packs of all threads (RowEnds in packs.cuh). tiles: whether they are cut into tiles."""
        core, pack = self.core, problem.pack
        read = [self.function.program.operands[k].dtype for k in core.rows]
        least = min((d.itemsize for d in (*read, *(o.dtype for o in core.of_kind("row")))), default=8)
        sector, name = tuning.SECTOR_BYTES // (pack * least), "kRagged" if self.width % pack else "kPart"
        # Rows that are read element by element may begin anywhere. Sums over rows belong to the same columns in all rows.
        apart = pack == 1 or how.group < 32 or core.of_kind("columns")
        if apart or sector < 2 or self.width * least % tuning.SECTOR_BYTES == 0:
            return name
        room = tiles or self.width // pack + sector - 1 <= how.group * how.packs
        return f"{name}OfSectors" if room else name

    def launches(self, algorithm, problem):
        core, pack = self.core, problem.pack
        streams = algorithm == "streaming"
        how = (
            Layout(0, tuning.STREAM_PACKS, tuning.STREAM_THREADS)
            if streams
            else layout(algorithm, problem, self.device)
        )
        elements, cluster = how.packs * pack, how.cluster
        shared = how.threads * elements * problem.sums if shares(how, problem) else 0
        stays = bool(core.of_kind("columns") or core.of_kind("total"))
        blocks = resident(how, problem, shared, stays, self.device)
        walkers, waves = ceil_div(self.rows, how.groups), 0  # blocks or clusters
        if stays and cluster > 1:
            # Parts of a GPU have different numbers of multiprocessors, so that it may run fewer clusters at once.
            walkers, waves = max(1, min(walkers, self.device.sm_count * blocks // cluster)), 1
        elif stays:
            walkers = min(walkers, tuning.SUM_BLOCKS * self.device.sm_count * max(1, 512 // how.threads))
        if problem.sums and self.width % pack and walkers < min(self.rows, 2 * pack):
            return None  # see Walk in engine.cuh
        room = how.threads * elements * problem.sums if how.groups > 1 else 0
        partials = 2 * how.threads // 32 * cluster * (max if cluster > 1 else sum)([0, *core.partial_bytes])
        code = self.code(keeps=how.keeps or (not streams and elements * problem.kept <= tuning.KEPT_WORDS))
        if code is None or walkers * cluster >= 1 << 31 or room + partials + how.threads * core.total_bytes > SHARED:
            return None
        sums, scratch, after = _sums(core, walkers, self.width)
        ends = "kWhole" if self.width == how.group * elements else self.ends(problem, how, streams)
        by_runs = _by_runs(core, self.function.program, self.rows, _moved(self.arrays), self.device)
        flags = ", ".join(str(f).lower() for f in (stays, streams, shared > 0, by_runs))
        name = f"RowsKernel<{NAME}, {pack}, {how.lanes}, {how.packs}, {how.threads}, {blocks}, {ends}, {flags}>"
        args, grid = [self.arguments(walkers, sums)], walkers * cluster
        launch = Launch(HEADER, name, args, grid, how.threads, cluster=cluster, shared=shared, waves=waves, source=code)
        return (launch, *after), scratch

    def threads(self, views, problem):
        """views: the arrays of rows."""
        core, how = self.core, held_alone(problem)
        code = self.code(keeps=self.width * problem.kept <= tuning.KEPT_WORDS)
        walkers = ceil_div(self.rows, how.rows * how.threads)
        stays = bool(core.of_kind("columns") or core.of_kind("total"))
        if stays:
            walkers = min(walkers, tuning.SUM_BLOCKS * self.device.sm_count * (512 // how.threads))
        if code is None or walkers >= 1 << 31:
            return None
        sums, scratch, after = _sums(core, walkers, self.width)
        dims = [*self.function.program.others, self.function.program.row]
        apart = sum(1 << k for k, v in enumerate(views) if [d for d in v.dims if d is not None] != dims)
        sizes = f"{self.width}, {how.rows}, {how.threads}, {how.blocks}, {apart}, {str(stays).lower()}"
        args, name = [self.arguments(walkers, sums)], f"ThreadRowsKernel<{NAME}, {sizes}>"
        return (Launch("rows/thread.cuh", name, args, walkers, how.threads, source=code), *after), scratch

    def split(self, problem):
        core, pack, threads = self.core, problem.pack, tuning.SPLIT_THREADS
        words = lambda packs: packs * pack * (problem.bytes + problem.sums) / 4
        busy = lambda packs: self.rows * ceil_div(self.width, threads * packs * pack) >= self.device.sm_count
        packs = next(p for p in (4, 2, 1) if p == 1 or words(p) <= tuning.SPLIT_WORDS and busy(p))
        tile = threads * packs * pack
        parts = ceil_div(self.width, tile)
        walkers, most = self.rows, tuning.SPLIT_BLOCKS * self.device.sm_count
        if not core.of_kind("columns"):
            parts = min(parts, ceil_div(most, self.rows))
        if core.of_kind("columns") or core.of_kind("total"):
            walkers = min(walkers, max(pack, ceil_div(most, parts)))
        code, stages = self.code(keeps=False), len(core.stages)
        used = threads // 32 * 2 * sum(core.partial_bytes) + threads * core.total_bytes
        if code is None or walkers * parts >= 1 << 31 or used > SHARED:
            return None
        partials, scratch = [], 0
        for size in core.partial_bytes:
            partials.append(launch.scratch(scratch))
            scratch += ceil_div(size * self.rows * parts, 256) * 256
        sums, scratch, after = _sums(core, walkers, self.width, scratch)
        args = struct(self.arguments(walkers, sums), *partials, launch.null, i64(parts))
        ends = "kWhole" if self.width % tile == 0 else self.ends(problem, Layout(0, packs, threads), True)
        blocks = resident(Layout(0, packs, threads), problem, 0, False, self.device)
        name = f"SplitRowsKernel<{NAME}, {pack}, {packs}, {threads}, {blocks}, {{}}, {ends}>"
        last = walkers * (parts if core.of_kind("row") or core.of_kind("columns") else 1)
        launches = [
            Launch(
                "rows/split.cuh",
                name.format(stage),
                [args],
                last if stage == stages else walkers * parts,
                threads,
                source=code,
            )
            for stage in range(stages + 1)
        ]
        return (*launches, *after), scratch

    def strided(self, algorithm, problem):
        core, stages, splits = self.core, len(self.core.stages), algorithm == "split"
        how = across(problem, self.device, holds=not splits)
        lanes, pack, tiles = how.lanes, problem.pack, tiles_of(how, problem)
        parts = parts_of(problem, self.device, forced=True) if splits else how.cluster
        code = self.code(keeps=keeps_across(how, problem))
        joined, threads = joining(parts, problem, SHARED - 512 * core.total_bytes)
        join_blocks = ceil_div(self.rows, joined)
        used = tuning.STRIDED_ROOM + 512 * core.total_bytes
        if code is None or max(tiles * parts, join_blocks) >= 1 << 31 or used > SHARED:
            return None
        partials, scratch = [], 0
        for size in core.partial_bytes if splits else ():
            partials.append(launch.scratch(scratch))
            scratch += ceil_div(size * self.rows * (parts + 1), 256) * 256
        partials += [launch.null] * (stages + 1 - len(partials))
        blocks = tiles if stages == 0 or not splits else join_blocks  # that store numbers
        sums, scratch, after = _sums(core, tiles, self.width, scratch, blocks)
        strides = lambda values: [*(i64(_stride(v, self.function.program.row)) for v in values), i64(0)]
        args = struct(
            self.arguments(tiles, sums),
            *strides(self.function.program.operands[k] for k in core.rows),
            *strides(o.result for o in core.of_kind("row")),
            *partials,
            i64(tiles),
            i64(parts),
            i64(ceil_div(self.width, parts)),
            i64(problem.inner),
        )
        most, inner = strided_blocks(how, problem), self.function.program.others[-1]
        same = sum(1 << k for k, at in enumerate(core.rows) if inner not in self.function.program.operands[at].dims)
        sizes = f"{pack}, {lanes}, {how.packs}, {how.threads}, {most}, {how.cluster}"
        flags = f"{str(how.streams).lower()}, {same}" + ", true" * problem.shifted
        name = f"StridedRowsKernel<{NAME}, {sizes}, {{}}, {flags}>"
        header = "rows/strided.cuh"
        run = lambda stage: Launch(
            header, name.format(stage), [args], tiles * parts, how.threads, cluster=how.cluster, source=code
        )
        join = lambda stage: Launch(
            header,
            f"JoinPartsKernel<{NAME}, {stage}, {joined}, {threads}>",
            [args],
            join_blocks,
            threads,
            source=code,
        )
        if not splits:
            return (run(-1), *after), scratch
        launches = [step for stage in range(stages) for step in (run(stage), join(stage))]
        if problem.stores or stages == 0:
            launches.append(run(stages))
        return (*launches, *after), scratch


def _place(core, output) -> int:
    return core.outputs.index(output)


def _sums(core, walkers, width, scratch=0, of_numbers=None):
    """(buffers for the sums over rows of each block or cluster, bytes of scratch, launches that add them).

    scratch: the bytes that are in use already. of_numbers: the blocks that sum numbers, if they are others.
    """
    buffers, after = [], []
    for o in (*core.of_kind("columns"), *core.of_kind("total")):
        dtype = computing(o.value.aval.dtype)
        count, blocks = (width, walkers) if o.kind == "columns" else (1, of_numbers or walkers)
        buffers.append(launch.scratch(scratch))
        size = lambda blocks: ceil_div(blocks * count * dtype.itemsize, 256) * 256
        # Many blocks in two steps; the first has more threads.
        for groups in (tuning.SUM_GROUPS, 1) if blocks >= tuning.GROUPED_BLOCKS else (1,):
            each = ceil_div(blocks, groups)
            groups = ceil_div(blocks, each)
            here, scratch = launch.scratch(scratch), scratch + size(blocks)
            out, result = (launch.result(_place(core, o)), o.dtype) if groups == 1 else (launch.scratch(scratch), dtype)
            split = min(16, max(1, 1 << (each // 8).bit_length() >> 1))  # warps of 32 columns, of 16 in a block
            name = f"SumOverBlocks<{cpp_type(dtype)}, {cpp_type(result)}, {split}>"
            args = [struct(here, out, i64(blocks), i64(count), i64(each))]
            after.append(Launch(HEADER, name, args, (ceil_div(count, 512 // split), groups), 512))
            blocks = groups
    return buffers, scratch, after


def _arguments(core, program, rows, width, walkers, sums, arrays, device):
    """RowEngine::Args (engine.cuh)."""
    moved = _moved(arrays)
    by_runs = _by_runs(core, program, rows, moved, device)
    matrix_rows = program.others[-1].size if by_runs else 1
    pointers = lambda buffers: (*buffers, launch.null)
    outs = lambda kind: [launch.result(_place(core, o)) for o in core.of_kind(kind)]
    maps = lambda values: [*(_map(program, v) for v in values), EMPTY_MAP]
    return struct(
        *pointers(launch.operand(k) for k in core.rows),
        *pointers(launch.operand(k) for k in core.columns),
        *pointers(launch.operand(k) for k in core.numbers),
        *pointers(outs("row")),
        *pointers(outs("number")),
        *pointers(sums),
        *maps(program.operands[k] for k in core.rows),
        *maps(program.operands[k] for k in core.numbers),
        *maps(o.result for o in core.of_kind("row")),
        *maps(o.result for o in core.of_kind("number")),
        *(define.index_map(groups_of_index(program, index)) for index in core.indices),
        EMPTY_MAP,
        i64(rows),
        i64(width),
        i64(walkers),
        fast_divmod(matrix_rows),
        fast_divmod(rows // matrix_rows * tuning.RUN if by_runs else 1),
        boolean(moved > device.l2_bytes),
    )


def _moved(arrays) -> int:
    """The bytes of arrays."""
    return sum(a.size * a.dtype.itemsize for a in arrays)


def _by_runs(core, program, rows, moved, device) -> bool:
    """Whether rows are taken by runs, so that what broadcasts over matrices is read again while it is in L2.

    Matrices are the last dimension of rows.
    """
    if core.of_kind("columns") or len(program.others) < 2 or program.others[-1].size % tuning.RUN or rows >= 1 << 31:
        return False
    far = device.l2_bytes * rows // (4 * moved)  # rows whose arrays fill a quarter of L2
    for k in core.rows:
        dims, apart = program.operands[k].dims, 1
        for d in reversed(program.others):
            if d not in dims and apart > far and program.others[-1] in dims:
                return True
            apart *= d.size
    return False


def _strided(device, operands, arrays, function, views):
    """The plan where the row is not the last dimension of its arrays. All that have the innermost of the others have it last."""
    core, program = function.core, function.program
    inner = program.others[-1] if program.others else None
    if inner is None or any(inner in v.dims and last_of(v) is not inner for v in views):
        return None
    rows, width = math.prod(d.size for d in program.others), program.row.size
    own = [k for k in core.rows if inner in program.operands[k].dims]
    types = [*(operands[k].dtype for k in own), *(o.dtype for o in core.of_kind("row"))]
    if not types or any(inner not in o.result.dims for o in core.of_kind("row")):
        return None
    numbers = len(core.members) + len(core.inverses) + len(core.scales)
    itemsize = max(d.itemsize for d in types)
    pack = strided_pack(inner.size, itemsize, numbers)
    held = max(1, sum(operands[k].dtype.itemsize for k in own))
    problem = Problem(
        rows,
        width,
        held,
        pack,
        kept=core.kept_words,
        stages=len(core.stages),
        inner=inner.size,
        itemsize=itemsize,
        numbers=numbers,
        partial=max(core.partial_bytes, default=0),
        stores=bool(core.of_kind("row") or core.of_kind("columns")),
    )
    problem = shifted(problem, adjacent(program, inner, views), numbers)
    algorithm = _picked(function, problem, device)
    launches = functools.partial(_Rows(device, function, arrays, rows, width).strided, algorithm)
    return _at_any_alignment(algorithm, problem, launches, launches)


def _stride(value, dim) -> int:
    """The distance of adjacent elements along a dimension."""
    after = value.dims[value.dims.index(dim) + 1 :]
    return math.prod(d.size for d in after if d is not None)


def _map(program, value):
    """IndexMap from the index of a row to the offset of an array's row."""
    return define.index_map(program.groups(value))


EMPTY_MAP = define.index_map([])
