"""Launch lists of segment_softmax and its gradient on CUDA (ffi/kernels/segment_softmax/).

There are two algorithms, which differ in how rows get into the order of their segments:

    sort     a stable sort of the ids, an operation of its own (indexing/sort.py), then the kernels
    sorted   ascending ids (a hint): the kernels alone

and two kernels. The shapes alone determine the kernel, and with it the order of every sum:

    walk     one warp per tile of positions and strip of columns, one segment at a time in registers: for segments that
             fill most of a warp on average (3 rows of 128 bytes, say)
    tiles    one block per tile in shared memory: for shorter segments, and rows of less than 16 bytes
"""

import typing

from jaxkern._core import launch
from jaxkern._core.define import FLOAT_BYTES, ceil_div, cuda_type, size_of
from jaxkern._core.params import Params
from jaxkern._ops.segment_softmax import tuning

ALGORITHMS = ("sorted", "sort")
DTYPES = tuple(FLOAT_BYTES)
# Keys and positions of a call are 32-bit numbers; a key identifies the slice of the batch and the segment.
MOST_KEYS, MOST_POSITIONS = 2**31 - 2, 2**30
RUN = Params("segment_softmax/run.cuh", "SegmentRun")
WALK_SHAPE, TILE_SHAPE = (
    Params("segment_softmax/walk.cuh", "WalkShape"),
    Params("segment_softmax/staged.cuh", "TileShape"),
)


class Problem(typing.NamedTuple):
    """Arrays [batch, outer, count, inner] with ids [batch, count] of `rows` segments."""

    rows: int
    count: int
    inner: int = 1
    dtype: str = "float32"
    batch: int = 1
    outer: int = 1
    sorted: bool = False

    @property
    def itemsize(self) -> int:
        return FLOAT_BYTES[self.dtype]


def fits(algorithm: str, problem: Problem, device=None) -> bool:
    """Whether the algorithm can run the problem; `sorted` needs its hint."""
    if problem.rows >= MOST_KEYS or problem.count > MOST_POSITIONS or problem.inner >= 2**31:
        return False
    if _most_blocks(problem) >= 2**31:
        return False
    return algorithm == "sort" or (algorithm == "sorted" and problem.sorted)


def choose(problem: Problem, device=None) -> str:
    """The algorithm that runs the problem by default."""
    return "sorted" if problem.sorted else "sort"


def problem_of(x, rows: int, axis: int, batch_dims: int, is_sorted: bool = False) -> Problem:
    """The problem of an array of this type."""
    shape, inner = x.shape, size_of(x.shape[axis + 1 :])
    batch, outer = size_of(shape[:batch_dims]), size_of(shape[batch_dims:axis])
    return Problem(rows, shape[axis], inner, x.dtype.name, batch, outer, is_sorted)


def most_slices(problem: Problem) -> int:
    """How many slices of the batch one call of the kernels can number."""
    return max(1, min(MOST_KEYS // problem.rows, MOST_POSITIONS // (problem.count * problem.outer)))


# ---- how places are cut


class Cut(typing.NamedTuple):
    """Tiles of `places` that follow a run for up to `lookahead` places after them: a run that ends later is long."""

    walk: bool
    places: int
    lookahead: int


class Tile(typing.NamedTuple):
    columns: int  # of a column tile: whole rows of up to 16 elements, else vectors of 16 bytes
    column_tiles: int
    spans: int  # side by side in a block


def _tile(inner, itemsize) -> Tile:
    columns = inner
    if inner > tuning.TILE_COLUMNS:
        vector = 16 // itemsize
        columns = ceil_div(ceil_div(inner, ceil_div(inner, tuning.TILE_COLUMNS)), vector) * vector
    return Tile(columns, ceil_div(inner, columns), tuning.TILE_THREADS // columns)


def _span(itemsize):
    """TileSpan() of tiles.cuh."""
    return 15 if itemsize == 8 else 31


def _lanes(wanted):
    """Lanes side by side in a row: a power of two."""
    return min(tuning.WALK_LANES, 1 << max(wanted - 1, 0).bit_length())


def cut_of(p: Problem) -> Cut:
    """The same for each slice of a batch, however many of them a call has."""
    row_bytes = p.inner * p.itemsize
    rows_at_once = 32 // _lanes(ceil_div(row_bytes, 16))
    # A segment costs a warp as much as its rows do if they are taken in fewer than two steps.
    if row_bytes < 16 or p.count < 2 * rows_at_once * p.rows:
        spans = _tile(p.inner, p.itemsize).spans
        places = spans - spans // 3
        return Cut(False, places * _span(p.itemsize), (spans - places) * _span(p.itemsize))
    # One segment may keep a warp busy half as long as all work takes.
    work = p.count * p.outer * ceil_div(row_bytes, 128)
    (places, most), (lookahead, farthest) = tuning.WALK_PLACES, tuning.WALK_LOOKAHEAD
    while places < most and places * 2 * tuning.WALK_WARPS_ALL <= work:
        places *= 2
    while lookahead < farthest and lookahead * tuning.WALK_WARPS_ALL <= work:
        lookahead *= 2
    # Not a power of two: tiles that are walked side by side must not all lie in the same memory channels.
    return Cut(True, places + 16, lookahead)


def _most_blocks(p: Problem) -> int:
    """An upper bound of the blocks of a launch: a block takes at least tuning.JOIN_COLUMNS columns of a tile, or all of them."""
    positions = min(p.batch, most_slices(p)) * p.count
    return p.outer * ceil_div(positions, cut_of(p).places) * ceil_div(p.inner, tuning.JOIN_COLUMNS)


# ---- launches


class Ordered(typing.NamedTuple):
    """The operands of kernels: data, or y and g, the ascending keys, among which keys of no segment may be anywhere, and
    the order: see run.cuh."""

    arrays: tuple
    keys: typing.Any
    order: typing.Any = None


def forward(device, operands, results, *, rows, rules) -> launch.Plan | None:
    """The plan of y; None if the operands are not `Ordered`."""
    return _plan("SegmentForward", 2, device, operands, rows, rules)


def backward(device, operands, results, *, rows, rules) -> launch.Plan | None:
    """The plan of the gradient, likewise."""
    return _plan("SegmentBackward", 1, device, operands, rows, rules)


def _plan(op, numbers, device, operands, rows, rules):
    """numbers: the count of numbers in a Stat."""
    if not isinstance(operands, Ordered):
        return None
    inputs, x, ordered = len(operands.arrays), operands.arrays[0], operands.order is not None
    itemsize = x.dtype.itemsize
    p = problem_of(x, rows, rules.axis, rules.batch_dims)
    op = f"jaxkern::{op}<{cuda_type(x.dtype)}>"
    cut, positions = cut_of(p), p.batch * p.count
    tiles, long = ceil_div(positions, cut.places), positions > cut.places + cut.lookahead
    scratch = 2 * tiles * p.outer * p.inner * numbers * max(itemsize, 4) if long else 0
    extra = (p.outer - 1) * p.count if p.batch > 1 else 0
    run = RUN(
        keys=launch.operand(inputs),
        order=launch.operand(inputs + 1) if ordered else launch.null,
        input=[launch.operand(0), launch.operand(1) if inputs == 2 else launch.null],
        out=launch.result(0),
        slots=launch.scratch() if long else launch.null,
        inner=p.inner,
        count=p.count,
        extra=extra,
        positions=positions,
        dropped=p.batch * p.rows,
        places=cut.places,
        lookahead=cut.lookahead,
        tiles=tiles,
        by_count=p.count,
    )

    column_tiles, groups = ceil_div(p.inner, tuning.JOIN_COLUMNS), ceil_div(tiles, tuning.JOIN_TILES)
    join = launch.Launch(
        "segment_softmax/join.cuh",
        f"SegmentJoin<{op}>",
        [run, launch.i64(column_tiles), launch.i64(groups)],
        grid=p.outer * groups * column_tiles,
        block=tuning.JOIN_THREADS,
    )
    kernels = _walk if cut.walk else _tiles
    whole = p.inner * itemsize % 16 == 0
    contiguous = not ordered and not extra
    launches = lambda aligned: kernels(
        op, inputs, p, run, tiles, join if long else None, aligned and whole, contiguous, device
    )
    found = launches(True)
    unaligned = launches(False)
    return launch.Plan("walk" if cut.walk else "tiles", found, scratch, None if unaligned == found else unaligned)


def _walk(op, inputs, p, run, tiles, join, whole, contiguous, device):
    vectors = whole and p.itemsize < 8
    n, parts = (16 // p.itemsize, 1) if vectors else (1, 4)
    lanes = ceil_div(p.inner, n * parts)
    side, slots = _lanes(lanes), lambda side: ceil_div(lanes, side) * side
    if side == tuning.WALK_LANES and slots(tuning.WALK_LANES // 2) < slots(tuning.WALK_LANES):
        side //= 2  # leaves fewer lanes idle
    strips = slots(side) // side

    def walk(each, rewrites):
        groups = ceil_div(tiles, each)
        warps = p.outer * groups * strips
        shape = WALK_SHAPE(
            warps=warps,
            by_strips=strips,
            by_groups=groups,
            log_lanes=side.bit_length() - 1,
            strips=strips,
            tiles=each,
            rewrites=rewrites,
        )
        return launch.Launch(
            "segment_softmax/walk.cuh",
            f"SegmentWalk<{op}, {n}, {parts}>",
            [run, shape],
            grid=ceil_div(warps, tuning.WALK_WARPS),
            block=32 * tuning.WALK_WARPS,
        )

    if join is None:
        return (walk(1, False),)
    # The warps of one wave look through all tiles for long runs.
    each = ceil_div(p.outer * tiles * strips, 20 * device.sm_count)
    return walk(1, False), join, walk(min(each, 32), True)


def _tiles(op, inputs, p, run, tiles, join, whole, contiguous, device):
    tile, n, span = _tile(p.inner, p.itemsize), 16 // p.itemsize, _span(p.itemsize)
    vectors = whole and tile.columns % n == 0
    contiguous = contiguous and tile.column_tiles == 1  # whose kernel copes with any alignment
    rows = "kContiguous" if contiguous else "kVectors" if vectors else "kElements"
    held = (tile.spans * span * tile.columns + 2 * n) // n * n
    shape = TILE_SHAPE(
        columns=tile.columns,
        column_tiles=tile.column_tiles,
        spans=tile.spans,
        held=held,
        by_column_tiles=tile.column_tiles,
        by_tiles=tiles,
        by_columns=tile.columns,
        by_spans=tile.spans,
        by_parts=tile.columns // n if rows == "kVectors" else tile.columns,
    )
    blocks, shared = p.outer * tiles * tile.column_tiles, inputs * held * max(p.itemsize, 4)

    def kernel(name, grid, *args):
        return launch.Launch(
            "segment_softmax/tiles.cuh",
            f"{name}<{op}, jaxkern::Rows::{rows}>",
            [run, shape, *args],
            grid=grid,
            block=tuning.TILE_THREADS,
            shared=shared,
        )

    first = kernel("SegmentTiles", blocks)
    if join is None:
        return (first,)
    # One wave of blocks, but no more than tuning.TILE_THREADS tiles per block.
    few = min(blocks, max(512, ceil_div(blocks, tuning.TILE_THREADS)))
    return first, join, kernel("SegmentRewrite", few, launch.i64(blocks))
