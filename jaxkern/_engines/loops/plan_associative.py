"""How the steps of a scan by an associative operation map to the GPU, and its launch list.

Arrays are seen as [outer, length, inner]. If inner is 1, the steps of a lane are adjacent:

warp, block   a warp or a block walks through the steps of a lane
tiles         blocks share the steps of a lane, and look back at the states that earlier ones publish; if there is one lane, and it
              is long, blocks stay and take tiles in turn

Otherwise lanes are adjacent, and a block takes some of them:

lanes         a thread runs all steps of its lanes
columns       the threads of a block share the steps of a lane, and walk through them
column_tiles  blocks share them too
"""

import math
import typing

import numpy as np

from jaxkern._core import algorithms, compat, define, functor, launch
from jaxkern._core.define import ceil_div
from jaxkern._core.launch import Launch, Memset, Plan, i64, struct
from jaxkern._engines.loops import generate_associative, tuning

NAME = "Body"
ROWS, COLUMNS = ("warp", "block", "tiles"), ("lanes", "columns", "column_tiles")
ALGORITHMS = (*ROWS, *COLUMNS)
DTYPES = tuple(define.CUDA_TYPES)
MOST_ARRAYS = 20
MOST_WORDS = 32  # of a state, whose copies for a block fit shared memory
SHARED = 36 * 1024  # bytes of them at most, of 48 KiB: members of 8 bytes may need padding


class Problem(typing.NamedTuple):
    """itemsize: bytes of the largest element. arrays: the number of arrays that are read. words: 32-bit words of a state.

    alike: whether all arrays have elements of this size, and no more arrays are written than read.
    """

    outer: int
    length: int
    inner: int
    itemsize: int = 4
    arrays: int = 1
    words: int = 1
    alike: bool = False


class RowLayout(typing.NamedTuple):
    """pack: elements of a vector. items: elements of a thread in a tile, a multiple of pack. lanes: lanes of a warp in a row."""

    pack: int
    items: int
    lanes: int
    threads: int
    blocks: int  # per multiprocessor, at least; registers must suffice for them
    ahead: bool  # whether a block loads its next tile while it finishes one, or keeps its only one in shared memory

    def tile(self, algorithm) -> int:
        return self.items * (self.lanes if algorithm == "warp" else self.threads)


class RingLayout(typing.NamedTuple):
    """As RowLayout, of blocks that stay and keep several tiles in shared memory."""

    pack: int
    items: int
    threads: int
    blocks: int

    @property
    def tile(self) -> int:
        return self.items * self.threads


class ColumnLayout(typing.NamedTuple):
    """pack: lanes of a thread. lanes: threads side by side. parts: parts of the steps in a block. items: steps of a thread.

    ahead: as in RowLayout; of `column_tiles`, whether a block keeps the elements of its only tile in shared memory.
    """

    pack: int
    lanes: int
    parts: int
    items: int
    blocks: int
    ahead: bool

    @property
    def tile(self) -> int:
        return self.parts * self.items


def fits(algorithm, problem, device=None) -> bool:
    if algorithm not in (ROWS if problem.inner == 1 else COLUMNS):
        return False
    return blocks_of(algorithm, problem, layout(algorithm, problem)) < 1 << 31


def choose(problem, device=None) -> str:
    sms = device.sm_count if device is not None else 132
    lanes = problem.outer * problem.inner
    if problem.inner == 1:
        if problem.length <= tuning.WARP_STEPS:
            return "warp"
        tile = layout("block", problem).tile("block")
        return "block" if problem.length <= tile or lanes >= tuning.ROW_BLOCKS * sms else "tiles"
    vectors = lanes * problem.itemsize * problem.arrays / 16
    if vectors >= tuning.LANE_VECTORS * sms or problem.length < 8:
        return "lanes"
    cut = layout("columns", problem)
    blocks = blocks_of("columns", problem, cut)
    return "columns" if problem.length <= cut.tile or blocks >= tuning.COLUMN_BLOCKS * sms else "column_tiles"


def layout(algorithm, problem, vectors=True, reverse=True, device=None):
    """RowLayout or ColumnLayout. vectors: the arrays are aligned to 16 bytes."""
    length, inner = problem.length, problem.inner
    most = max(1, 16 // problem.itemsize)
    if inner == 1:
        pack = min(most, 16) if vectors else 1
        while length % pack and (
            reverse or problem.outer > 1
        ):  # rows, or tiles from the end, start in the middle of a vector
            pack //= 2
        items = min(tuning.MOST_ITEMS, tuning.ROW_BYTES // problem.itemsize // max(1, problem.arrays - 1))
        items = max(pack, 1 << items.bit_length() >> 1)  # a power of two
        lanes, threads = 32, tuning.SCAN_THREADS
        if algorithm == "warp":
            whole = 1 << (length - 1).bit_length()
            items = max(pack, min(items, whole // tuning.ROW_LANES))
            lanes = max(1, min(32, whole // items))
        elif algorithm == "block":
            while items > max(pack, 4) and threads * items >= 2 * length:
                items //= 2
            while threads > tuning.FEW_THREADS and threads * items >= 2 * length:
                threads //= 2
        resident = tuning.SCAN_BLOCKS
        if algorithm == "tiles":  # the larger a tile, the fewer blocks wait for each other
            items, resident = min(tuning.MOST_ITEMS, 2 * items), tuning.SCAN_BLOCKS // 2
            staged = tuning.STAGED_BYTES // (threads * problem.itemsize * problem.arrays) // pack * pack
            if problem.alike and pack * problem.itemsize >= 4 and staged:
                return RowLayout(pack, staged, lanes, threads, tuning.STAGED_BLOCKS, True)
        elif items * problem.words > tuning.MOST_ITEMS:
            resident -= 1  # 64 registers would spill: cumlogsumexp of bfloat16 0.60 -> 0.76 of a copy
        blocks = max(1, resident * tuning.SCAN_THREADS // threads)
        return RowLayout(pack, items, lanes, threads, blocks, problem.arrays == 1 and algorithm != "tiles")
    pack = most if algorithm == "lanes" else max(1, tuning.COLUMN_BYTES // problem.itemsize)
    while pack > 1 and (not vectors or inner % pack or pack * problem.words > tuning.COLUMN_WORDS):
        pack //= 2
    if algorithm == "lanes":
        return ColumnLayout(pack, 64, 1, max(1, min(tuning.LANE_ITEMS // pack, length)), 4, True)
    lanes = 32
    while lanes > 1 and lanes * pack >= 2 * inner * problem.outer:
        lanes //= 2
    items = max(4, tuning.COLUMN_STEPS // max(1, problem.arrays - 1))
    parts, smaller = tuning.SCAN_THREADS // lanes, 1
    while algorithm == "columns" and parts > 1 and parts * items >= 2 * length:  # no more parts than have steps
        parts, smaller = parts // 2, 2 * smaller
    copies = 2 * parts + 2 * tuning.COLUMN_RADIX + 1  # `Shared` of ColumnScan
    while lanes > 1 and 4 * problem.words * pack * lanes * copies > SHARED:
        lanes //= 2
    if algorithm == "column_tiles" and problem.words > 1 and problem.alike:
        states = 4 * problem.words * pack * lanes * copies
        each = lanes * parts * problem.arrays * max(4, pack * problem.itemsize)
        across = ceil_div(problem.outer * inner, lanes * pack)
        items = staged_steps(states, each, parts, across, length, device)
        if items:
            return ColumnLayout(pack, lanes, parts, items, tuning.STAGED_COLUMNS, True)
    if problem.arrays == 1 and algorithm == "column_tiles":
        steps, resident = (3, 2) if pack > 1 else (2, 3)  # two lanes of a thread need more registers
        return ColumnLayout(pack, lanes, parts, steps * tuning.COLUMN_STEPS, resident, False)
    resident = tuning.SCAN_BLOCKS if problem.words == 1 else 3 if pack * problem.words == 2 else 2  # without spills
    return ColumnLayout(pack, lanes, parts, items, min(32, smaller * resident), problem.arrays == 1)


def ring_layout(problem, cut, device) -> RingLayout | None:
    """Of one row whose tiles blocks keep in shared memory, if there are several for each block. cut: its RowLayout."""
    if problem.outer > 1 or not cut.ahead or problem.words > tuning.RING_WORDS:
        return None
    blocks, threads = tuning.RING_BLOCKS, tuning.RING_THREADS
    static = 4 * problem.words * threads // 32 * 3 + 64  # bytes: `Shared` of ring_scan.cuh
    room = ((device.shared_memory + 1024) // blocks - 1024 - static) // tuning.RING_TILES
    packs = min(room, tuning.RING_BYTES) // (threads * cut.pack * problem.itemsize * problem.arrays)
    packs -= 1 - packs % 2  # an odd number has no bank conflicts without free places
    found = RingLayout(cut.pack, packs * cut.pack, threads, blocks)
    if packs < 1 or problem.length < tuning.RING_TURNS * found.tile * blocks * device.sm_count:
        return None
    return found


def staged_steps(states, each, parts, across, length, device, blocks=tuning.STAGED_COLUMNS) -> int:
    """Steps of a thread in a tile of columns that a block keeps in shared memory; 0 if there is no room.

    states: bytes that a block has besides. each: bytes of a step of all threads. parts: of a tile. across: blocks side by side. blocks: of
    a multiprocessor.
    """
    shared, sms = (tuning.MOST_SHARED, 132) if device is None else (device.shared_memory, device.sm_count)
    free = (shared + 1024) // blocks - 1024 - states  # the GPU takes 1 KiB for each block
    tiles = ceil_div(4 * blocks * sms, across)  # the last blocks of each multiprocessor leave it partly idle
    of_least = length // (parts * tuning.STAGED_LEAST) * across >= tuning.STAGED_WAVE * sms
    wanted = max(tuning.STAGED_LEAST if of_least else tuning.COLUMN_STEPS, length // (parts * tiles))
    return max(0, min(tuning.STAGED_STEPS, wanted, free // each) // 8 * 8)


def blocks_of(algorithm, problem, cut) -> int:
    lanes = problem.outer * problem.inner
    if problem.inner == 1:
        tiles = ceil_div(problem.length, cut.tile(algorithm))
        each = cut.threads // cut.lanes if algorithm == "warp" else 1
        return ceil_div(lanes, each) * (tiles if algorithm == "tiles" else 1)
    tiles = ceil_div(problem.length, cut.tile)
    return ceil_div(lanes, cut.lanes * cut.pack) * (tiles if algorithm == "column_tiles" else 1)


def slots(tiles, radix, rows) -> int:
    """States that the tiles of a lane publish: row_scan.cuh if `rows`, else column_scan.cuh."""
    return tiles + (2 * (tiles // radix + 1) if rows else tiles // radix + tiles // radix**2)


def words_of(states) -> int:
    """The 32-bit words of a state of these dtypes."""
    return sum(2 if np.dtype(d).itemsize == 8 else 1 for d in states)


def too_large(arrays, words, size) -> str:
    """What of a scan is beyond the limits of a kernel; empty if nothing is. size: of its functions, in statements."""
    if arrays > MOST_ARRAYS:
        return f"reads and writes {arrays} arrays, above the limit of {MOST_ARRAYS}"
    if words > MOST_WORDS:
        return f"combines {words} numbers of 32 bits, above the limit of {MOST_WORDS}"
    return f"has a size of {size} statements, above the limit of {functor.MOST}" if size > functor.MOST else ""


def plan(device, operands, results, *, spec, axis, reverse, dims=None):
    """The launches of a scan, or None where there is no kernel. dims: see `associative.repeated_p`."""
    shape = results[0].shape
    dims = dims or (None,) * len(operands)
    outer, length, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    arrays = [*operands, *results]
    if not operands or (inner >= 1 << 32 and outer > 1):
        return None
    words = words_of(spec.states)
    beyond = too_large(len(arrays), words, generate_associative.size(spec))
    if beyond:
        if not spec.replaced:
            compat.warn_once(f"{spec.combine.label} {beyond}: XLA runs it")
        return None
    itemsize = max(a.dtype.itemsize for a in arrays)
    reading = sum(d is None for d in dims)  # arrays of all steps
    alike = all(a.dtype.itemsize == itemsize for a in arrays) and len(results) <= reading
    problem = Problem(outer, length, inner, itemsize, len(operands), words, alike)
    algorithm = algorithms.pick("associative_scan", algorithms.forced("associative_scan"), problem, device)
    lanes = generate_associative.Lanes(shape, axis, dims)
    if any(len(groups) > define.MAP_RANK for groups in lanes.maps):
        return None
    carries = len(spec.states)
    reads, writes = range(len(operands)), range(len(results))

    def launches(vectors):
        cut = layout(algorithm, problem, vectors, reverse, device)
        shared, staged = algorithm in ("tiles", "column_tiles"), 0
        ahead, backwards = (str(bool(flag)).lower() for flag in (cut.ahead, reverse))
        if inner == 1:
            tiles, over = ceil_div(length, cut.tile(algorithm)), f"kOver{algorithm.capitalize()}"
            kernel, threads, radix, width = "Row", cut.threads, tuning.ROW_RADIX, outer
            values = (cut.pack, cut.items, cut.lanes, threads, cut.blocks, radix, ahead, over, backwards)
            ring = ring_layout(problem, cut, device) if shared else None
            if ring:
                kernel, tiles, threads = "Ring", ceil_div(length, ring.tile), ring.threads
                values = (ring.pack, ring.items, threads, ring.blocks, backwards)
                staged = tuning.RING_TILES * ring.tile * itemsize * len(operands)
        else:
            ring, tiles, over = None, ceil_div(length, cut.tile), "kOverTiles" if shared else "kOverBlock"
            kernel, threads, radix = "Column", cut.lanes * cut.parts, tuning.COLUMN_RADIX
            width = ceil_div(outer * inner, cut.lanes * cut.pack) * cut.lanes * cut.pack
            if shared and cut.ahead:
                staged = threads * cut.items * len(operands) * max(4, cut.pack * itemsize)
            values = (cut.pack, cut.lanes, cut.parts, cut.items, cut.blocks, radix, ahead, over, backwards)
        published = slots(tiles, radix, inner == 1)
        scratch = 8 * words * width * published if shared else 0
        blocks, waves = blocks_of(algorithm, problem, cut), 0
        if ring:
            scratch, blocks, waves = 8 * (words * tiles + 1), ring.blocks * device.sm_count, 1
        source = generate_associative.source(NAME, spec, lanes, 1 if inner == 1 else cut.pack)
        args = struct(
            struct(
                *[launch.null] * (1 + carries + 1),
                *map(launch.operand, reads),
                *[launch.null] * (1 + carries + 1),
                *map(launch.result, writes),
                launch.null,
                *map(define.index_map, lanes.maps),
                define.index_map([]),
                i64(outer * inner),
                i64(length),
            ),
            launch.scratch() if scratch else launch.null,
            i64(tiles),
        )
        step = Launch(
            f"loops/{kernel.lower()}_scan.cuh",
            f"{kernel}ScanKernel<{NAME}, {', '.join(map(str, values))}>",
            [args],
            blocks,
            threads,
            shared=staged,
            waves=waves,
            source=source,
        )
        return ((Memset(launch.scratch(), scratch), step) if shared else (step,)), scratch

    aligned, scratch = launches(True)
    if layout(algorithm, problem, False, reverse, device) == layout(algorithm, problem, True, reverse, device):
        return Plan(algorithm, aligned, scratch)
    unaligned, more = launches(False)
    return Plan(algorithm, aligned, max(scratch, more), unaligned)
