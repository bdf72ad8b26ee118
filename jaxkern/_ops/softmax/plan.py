"""The hand-written kernels of plain softmax, log_softmax and their gradients on CUDA, and how they are launched.

    sub_warp    short rows of 2 to 8 vectors: as many lanes for each row, in registers
    cluster     sm_90, few long rows: a row in the registers of 2 to 16 blocks, which exchange their partial results
    column      the axis is not the last one: threads along the inner dimension hold a column in registers

They run only where they are faster than generated kernels; tuning.py has the measurements. Arrays that are not aligned to 16 bytes are
read element by element. fused_plan.py has the kernels with scale, bias, mask, causal limit or dropout.
"""

import math
import typing

from jaxkern._core.define import CUDA_TYPES, EMPTY_VIEW, FLOAT_BYTES, ceil_div, cpp_bool, per_thread
from jaxkern._core.launch import MOST_BLOCKS, Launch, Plan, i32, i64, null, operand, planned, result
from jaxkern._core.params import Params
from jaxkern._ops.softmax import tuning

PARAMS = Params("softmax/row.cuh", "SoftmaxParams")
COLUMN_PLAN = Params("softmax/column.cuh", "ColumnPlan")


class Problem(typing.NamedTuple):
    """A softmax over the middle dimension of [rows, width, inner]."""

    rows: int
    width: int
    inner: int = 1
    dtype: str = "float32"
    log: bool = False
    backward: bool = False

    @property
    def itemsize(self) -> int:
        return FLOAT_BYTES[self.dtype]

    @property
    def vector(self) -> int:
        """Elements in 16 bytes."""
        return 16 // self.itemsize

    @property
    def inputs(self) -> int:
        return 2 if self.backward else 1

    @property
    def whole(self) -> bool:
        """Rows begin and end with whole 16-byte vectors."""
        return self.width % self.vector == 0

    @property
    def grain(self) -> int:
        """The vectors of a row begin at a boundary of this many bytes at or before its first element."""
        long = self.width * self.itemsize >= tuning.LINE_ROW_BYTES
        return tuning.LINE_BYTES if long else tuning.SECTOR_BYTES

    @property
    def vectors(self) -> int:
        """16-byte vectors from that boundary to the end of a row, at most."""
        size = self.width * self.itemsize
        return ceil_div(size + self.grain - math.gcd(size, self.grain), 16)


def problem_of(aval, axis: int, **flags) -> Problem:
    shape = aval.shape
    return Problem(math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]), aval.dtype.name, **flags)


def choose(p: Problem, device) -> str | None:
    """The kernel that is faster than the generated one, or None."""
    if p.inner != 1:
        return "column" if p.inner % p.vector == 0 and p.width <= tuning.COLUMN_WIDTH else None
    size = p.width * p.itemsize
    short = size <= tuning.SHORT_BYTES if p.backward else size == tuning.SHORT_BYTES and not p.log
    if short and p.whole and p.width > p.vector and p.itemsize < 8:
        return "sub_warp"
    clusters = device.compute_capability >= 90 and device.shared_memory >= 227 * 1024  # a data-centre GPU's
    least, most = tuning.CLUSTER_VECTORS
    plain = not p.backward and not p.log
    few = tuning.CLUSTER_MULTIPROCESSORS if plain else tuning.OTHER_CLUSTER_MULTIPROCESSORS
    fits = clusters and p.rows * few <= device.sm_count and p.vectors >= least and p.vectors * p.inputs <= most
    held = tuning.MOST_CLUSTER_BLOCKS * tuning.BLOCK_THREADS * (8 if p.whole else 4)
    return "cluster" if fits and p.vectors <= held else None


# ---- the kernels: names, parameters and launch shapes


def _op(p: Problem) -> str:
    return f"jaxkern::{'Backward' if p.backward else 'Forward'}<{CUDA_TYPES[p.dtype]}, {cpp_bool(p.log)}>"


def _row(p: Problem, vector: int, index="int", ragged=True) -> str:
    return f"jaxkern::SoftmaxRow<{_op(p)}, {vector}, {index}, {cpp_bool(ragged)}>"


def _stat_bytes(p: Problem) -> int:
    """sizeof(Op::Stat), of partial results of columns."""
    if p.itemsize == 2:
        return 8
    if p.backward and p.log:
        return 16 if p.itemsize == 4 else 24
    return 8 if p.itemsize == 4 else 16


def exceeds_l2(p: Problem, device) -> bool:
    return p.rows * p.width * p.inner * p.itemsize * (p.inputs + 1) > device.l2_bytes


def arguments(p: Problem, device, aligned=True, mask=(null, EMPTY_VIEW)) -> dict:
    """The members of SoftmaxParams. Operands: x, or for a gradient y or x, and g. mask: its pointer and its BroadcastView."""
    return dict(
        input=[operand(0), operand(1) if p.backward else null],
        out=result(0),
        rows=p.rows,
        width=p.width,
        grain=p.grain // p.itemsize if aligned else 1,
        exceeds_l2=exceeds_l2(p, device),
        inner=p.inner,
        mask=mask[0],
        mask_view=mask[1],
    )


def _power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def warps(threads: int) -> int:
    """The threads of whole warps."""
    return 32 * ceil_div(threads, 32)


def _sub_warp(p, params, device):
    lanes = _power_of_two(p.width // p.vector)
    name = f"SoftmaxRegisters<{_op(p)}, {_row(p, p.vector, ragged=False)}, {lanes}, 1, 2>"
    grid = ceil_div(p.rows, tuning.WARP_THREADS // lanes * 2)
    return Launch("softmax/registers.cuh", name, [params], grid, tuning.WARP_THREADS)


def _cluster(p, params, device):
    vectors = p.width // p.vector if p.whole else p.vectors
    blocks, most = 2, tuning.MOST_CLUSTER_BLOCKS
    while blocks < most and ceil_div(vectors, blocks) > tuning.CLUSTER_BLOCK_VECTORS:
        blocks *= 2
    while (
        blocks < most and p.rows * blocks <= device.sm_count and ceil_div(vectors, blocks) > tuning.FEWEST_BLOCK_VECTORS
    ):
        blocks *= 2
    each = ceil_div(vectors, blocks)
    held, threads = per_thread(each, tuning.BLOCK_THREADS) if p.whole else (4, warps(ceil_div(each, 4)))
    row = _row(p, p.vector, ragged=not p.whole)
    name = f"SoftmaxRegisters<{_op(p)}, {row}, jaxkern::kClusterLanes, {held}, 1>"
    return Launch("softmax/registers.cuh", name, [params], p.rows * blocks, threads, cluster=blocks)


def rows_grid(rows: int) -> tuple[int, int]:
    return min(rows, MOST_BLOCKS), ceil_div(rows, MOST_BLOCKS)


def _column(p, params, device):
    alone = tuning.GRADIENT_COLUMN_ALONE if p.backward else tuning.COLUMN_ALONE
    if p.width <= alone:
        held, lanes, count = alone, 32, 1
    elif p.width <= tuning.WARP_COLUMN_ROWS * 8:
        held, lanes, count = tuning.WARP_COLUMN_ROWS, tuning.COLUMN_LANES, 1
    else:
        held, lanes, count = tuning.COLUMN_ROWS, tuning.COLUMN_LANES, ceil_div(p.width, 8 * tuning.COLUMN_ROWS)
    tiles = ceil_div(p.inner, lanes * p.vector)
    name = f"SoftmaxColumnRegisters<{_op(p)}::ForColumns, {held}, {cpp_bool(p.width <= alone)}>"
    grid = ceil_div(p.rows * tiles, 4) if count == 1 else p.rows * tiles
    threads = 32 * (4 if count == 1 else count)
    return Launch("softmax/column.cuh", name, [params, i32(count), i64(tiles)], grid, threads)


def _row_by_element(p, params, device):
    name = f"SoftmaxStreaming<{_op(p)}, {_row(p, 1, 'int64_t')}>"
    return Launch("softmax/stream.cuh", name, [params], rows_grid(p.rows), tuning.STREAM_THREADS)


def _column_by_element(p, params, device):
    """Wide tiles for long runs of memory, but three or more tiles per multiprocessor; a tile too tall is read twice."""
    stat, element = _stat_bytes(p), max(4, p.itemsize)  # sizeof(Pack)
    stats = lambda lanes: (tuning.COLUMN_THREADS + lanes) * stat
    size = lambda lanes: stats(lanes) + p.width * element * p.inputs * lanes
    narrowest = min(p.inner, ceil_div(tuning.SECTOR_BYTES, element))
    lanes = tuning.COLUMN_THREADS
    while lanes > 1 and (
        lanes // 2 >= p.inner or (size(lanes) > device.shared_memory // 3 and lanes // 2 >= narrowest)
    ):
        lanes //= 2
    resident = size(lanes) <= device.shared_memory
    if not resident:
        lanes = min(32, _power_of_two(p.inner))
    tiles = ceil_div(p.inner, lanes)
    return Launch(
        "softmax/column.cuh",
        f"SoftmaxColumn<{_op(p)}::ForColumns, 1>",
        [params, COLUMN_PLAN(lanes_x=lanes, resident=resident, tiles=tiles)],
        p.rows * tiles,
        tuning.COLUMN_THREADS,
        shared=size(lanes) if resident else stats(lanes),
    )


_LAUNCHES = {"sub_warp": _sub_warp, "cluster": _cluster, "column": _column}


def plain(kernel: str, p: Problem, device) -> Plan | None:
    """The plan of a kernel that was chosen; None if a grid would be too large."""
    by_element = _row_by_element if p.inner == 1 else _column_by_element
    launches, unaligned = (
        (make(p, PARAMS(**arguments(p, device, aligned)), device),)
        for make, aligned in ((_LAUNCHES[kernel], True), (by_element, False))
    )
    return planned(kernel, launches, unaligned=unaligned)
