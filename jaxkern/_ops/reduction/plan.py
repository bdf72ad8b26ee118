"""Which kernels run a row reduction on CUDA, and how they are launched.

    sub_warp    rows up to 512 bytes, or up to 128 elements: 4 to 32 lanes per row, four rows per group of lanes
    warp        rows of any width: a warp per row, or up to four in turn; several short rows of whole vectors at once
    block       rows of any width: a block per row
    split       few long rows: each is spread over many blocks, in two launches with partial results in scratch
    column      the axis is not the last one: threads along the inner dimension; if that leaves too few blocks, each
                column is spread over several, in two launches with partial results in scratch

The limits come from the kernels (ffi/kernels/reduction), the preferences from measurements (benchmarks/NOTES.md,
benchmarks/results).
"""

import math
import typing

import numpy as np

from jaxkern._core.algorithms import pick
from jaxkern._core.define import CUDA_TYPES, EMPTY_VIEW, broadcast_view, busy_parts, ceil_div, cpp_bool
from jaxkern._core.launch import (
    MOST_BLOCKS_Y,
    Launch,
    Plan,
    i32,
    i64,
    null,
    operand,
    planned,
    result,
    scratch,
)
from jaxkern._core.params import Params

ALGORITHMS = ("sub_warp", "warp", "block", "split", "column")

_HEADER = "reduction/reduction.cuh"
DTYPES = tuple(CUDA_TYPES)
PARAMS = Params("reduction/ops.cuh", "ReduceParams")

# Of the kernels.
_NARROW_THREADS = 128
_NARROW_ELEMENTS = 128  # of a row that a group of lanes reads element by element
_ROWS_TOGETHER = 4
_WARP_PACKS = 4  # per lane, of a row that a warp reads together with others
_WARPS_OF_ROWS = 4
_ROW_THREADS, _PART_THREADS = 256, 128  # threads of a block per row, and of a block per part of a row; at most
_MERGE_THREADS = 256
_PARTIAL_BYTES = 16  # of a partial result, at most

_BLOCKS_WANTED = 8  # per multiprocessor, where rows are split to make them
_PART_PACKS = 4096  # vectors of a row that is split
_PART_ROWS = 64  # rows of a column that occupy a block
_TILE_BYTES = 512  # width of a block's tile of columns
_COLUMN_BLOCKS = 4  # per multiprocessor, at a time
_MOST_COLUMN_BLOCKS = 1280  # where columns are split


class Problem(typing.NamedTuple):
    """A reduction over the middle dimension of [rows, width, inner]."""

    rows: int
    width: int
    inner: int = 1
    dtype: str = "float32"
    masked: bool = False

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def floating(self) -> bool:
        return "float" in self.dtype

    @property
    def vector(self) -> int:
        """Elements in 16 bytes."""
        return 16 // self.itemsize

    @property
    def vectors(self) -> int:
        """Vectors of a row."""
        return ceil_div(self.width, self.vector)

    @property
    def whole(self) -> bool:
        """Rows are whole vectors."""
        return self.width % self.vector == 0


def parts_of(p: Problem, device) -> int:
    """How many blocks share a row or, if the axis is not the last one, a tile of columns; 1: they are not split."""
    if p.inner == 1:
        return max(1, min(_BLOCKS_WANTED * device.sm_count // p.rows, p.vectors // (_PART_PACKS // 4), MOST_BLOCKS_Y))
    tiles = p.rows * ceil_div(p.inner * p.itemsize, _TILE_BYTES)
    most = min(p.width // _PART_ROWS, _MOST_COLUMN_BLOCKS // tiles, MOST_BLOCKS_Y)
    slots = _COLUMN_BLOCKS * device.sm_count
    return busy_parts(tiles, slots, most)


def _counts_fit(p: Problem, parts: int) -> bool:
    """A thread counts the vectors of a row, and rows with a mask, in 32 bits."""
    return p.vectors // parts < 2**31 - _PART_PACKS and (not p.masked or p.rows < 2**32)


def fits(algorithm: str, p: Problem, device) -> bool:
    """Whether the algorithm can run the problem."""
    if algorithm == "column":
        return True  # a last axis is a column of width 1
    if p.inner != 1:
        return False
    if algorithm == "sub_warp":
        return p.width <= _NARROW_ELEMENTS or (p.floating and not p.masked and p.whole and p.vectors <= 32)
    if algorithm == "split":
        return parts_of(p, device) > 1 and _counts_fit(p, parts_of(p, device))
    return _counts_fit(p, 1)


def choose(p: Problem, device) -> str:
    """The algorithm that runs the problem by default; every problem has one."""
    if p.inner != 1:
        return "column"
    if fits("sub_warp", p, device):
        return "sub_warp"
    # Rows that do not give every multiprocessor two blocks, or not evenly.
    if p.rows <= _BLOCKS_WANTED * device.sm_count and p.vectors >= _PART_PACKS and fits("split", p, device):
        return "split"
    # A warp has at most 8 vectors per lane in flight.
    algorithm = "warp" if p.vectors <= (256 if p.rows >= 32 * device.sm_count else 64) else "block"
    return algorithm if fits(algorithm, p, device) else "column"


# ---- the kernels: names, parameters and launch shapes


class _Reduction(typing.NamedTuple):
    """A problem with all other inputs of the kernels' parameters."""

    p: Problem
    device: typing.Any
    op: str  # "sum", "mean", "max", "min" or "logsumexp"
    wide: bool  # see ReduceParams
    statistics: bool  # of logsumexp: results 1 and 2 are the largest element and the sum
    mask_view: typing.Any = None
    mask_contiguous: bool = False  # the mask has a byte for each element of a row, side by side

    def functor(self, counting=False, short=False) -> str:
        """counting: where there may be a mask. short: for rows of a few elements per lane."""
        kind = cuda_type(self.p.dtype)
        if self.op in ("sum", "mean"):
            flags = (counting and self.p.floating, short and self.p.floating and self.p.itemsize == 2)
            return f"jaxkern::Sum_<{kind}, {', '.join(map(cpp_bool, flags))}>"
        return f"jaxkern::{'LogSumExp_' if self.op == 'logsumexp' else 'Max_'}<{kind}>"

    def params(self, parts=1, each=None, rows=None, out=None, aligned=True):
        """ReduceParams."""
        p = self.p
        flip, neutral = _flip_and_neutral(self.op, p)
        largest, total = (result(1), result(2)) if self.statistics else (null, null)
        return PARAMS(
            x=operand(0),
            out=out or (scratch() if parts > 1 else result(0)),
            largest=largest,
            total=total,
            rows=rows or p.rows,
            width=p.width,
            inner=p.inner,
            parts=parts,
            each=each or p.width,
            flip=flip,
            neutral=neutral,
            scale=1 / p.width if self.op == "mean" else 1,
            mean=self.op == "mean",
            wide=self.wide,
            whole=aligned and p.whole,
            exceeds_l2=p.rows * p.width * p.inner * p.itemsize > self.device.l2_bytes,
            mask=operand(1) if self.mask_view else null,
            mask_view=self.mask_view or EMPTY_VIEW,
        )


def cuda_type(dtype: str) -> str:
    return "uint8_t" if dtype == "bool" else CUDA_TYPES[dtype]


def _log2_ceil(n: int) -> int:
    return (n - 1).bit_length()


def _flip_and_neutral(op: str, p: Problem) -> tuple[int, int]:
    """ReduceParams::flip and ::neutral."""
    bits, signed = 8 * p.itemsize, not p.dtype.startswith(("u", "bool"))
    sign, ones = 1 << (bits - 1), (1 << bits) - 1
    extreme = op in ("max", "min")
    if p.floating:
        infinity = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF << 52}[p.dtype]
        # Values are flipped in the type that they are computed in.
        flip = 1 << (63 if p.itemsize == 8 else 31) if op == "min" else 0
        neutral = infinity | (0 if flip else sign) if extreme or op == "logsumexp" else 0
    else:
        # A signed minimum is computed in 32 or 64 bits; all of these bits are flipped.
        flip = ((1 << 64) - 1 if signed else ones) if op == "min" else 0
        neutral = ((sign if signed else 0) ^ flip) & ones if extreme else 0
    return flip, int.from_bytes(neutral.to_bytes(p.itemsize, "little") * (8 // p.itemsize), "little")


def _narrow(
    r: _Reduction, functor: str, vector: int, packs: int, rows: int, masked: bool, log_lanes: int
) -> list[Launch]:
    """packs: per lane, at most. rows: per group of lanes."""
    name = f"ReduceNarrow<{functor}, {vector}, {packs}, {rows}, {cpp_bool(masked)}>"
    return [
        Launch(
            _HEADER,
            name,
            [r.params(), i32(log_lanes), i32(r.p.width // vector)],
            ceil_div(r.p.rows, (_NARROW_THREADS >> log_lanes) * rows),
            _NARROW_THREADS,
        )
    ]


def _sub_warp(r):
    p, vector = r.p, 0
    # Half vectors where whole ones would leave most of four lanes without any.
    if p.floating and not p.masked and p.whole and p.vectors <= 32 and (p.itemsize != 2 or p.vectors > 2):
        vector = p.vector
    elif p.floating and not p.masked and p.itemsize == 2 and p.width % 4 == 0 and p.width <= 32 * 4:
        vector = 4
    if vector:
        log_lanes = max(2, _log2_ceil(p.width // vector))
        return _narrow(r, r.functor(short=True), vector, 1, _ROWS_TOGETHER, False, log_lanes)
    packs = _NARROW_ELEMENTS // 32
    return _narrow(
        r, r.functor(counting=True), 1, packs, _ROWS_TOGETHER, False, max(2, _log2_ceil(ceil_div(p.width, packs)))
    )


def _rows(r: _Reduction, params, rows_each: int, grid, threads: int) -> list[Launch]:
    functor = r.functor(counting=r.op == "mean" and r.p.masked)
    name = f"ReduceRows<{functor}, {r.p.vector}, {cpp_bool(r.p.masked)}>"
    return [Launch(_HEADER, name, [params, i32(rows_each)], grid, threads)]


def _warp(r):
    p = r.p
    if p.floating and p.itemsize <= 4 and p.whole and p.vectors <= 32 * _WARP_PACKS:
        packs = _WARP_PACKS // 2 if p.itemsize == 2 else _WARP_PACKS
        if p.masked and r.mask_contiguous and p.vectors <= 32 * packs:
            functor = r.functor(counting=r.op == "mean", short=True)
            return _narrow(r, functor, p.vector, packs, 2 * _WARP_PACKS // packs, True, 5)
        if not p.masked and p.itemsize == 2:
            return _narrow(r, r.functor(short=True), p.vector, _WARP_PACKS, 2, False, 5)
    # Several rows per warp share the steps of merging, where that leaves enough warps.
    most = _ROWS_TOGETHER if p.masked or p.itemsize <= 2 else 1
    rows_each = min(max(1, p.rows // (32 * r.device.sm_count)), most)
    return _rows(r, r.params(), rows_each, ceil_div(p.rows, _WARPS_OF_ROWS * rows_each), 32 * _WARPS_OF_ROWS)


def _block(r, parts=1):
    p = r.p
    # Few threads with two or more turns each, because the warps of large blocks run through their phases in lockstep. One
    # turn if there are few rows, which take as long as one block; the parts of a row all run at once.
    turns = 1 if parts == 1 and p.rows <= 2 * r.device.sm_count else 2
    in_flight = {1: 2, 4: 8}.get(p.itemsize, 4)
    warps = ceil_div(p.width // p.vector, parts * turns * in_flight * 32)
    threads = 32 * min(max(2, warps), (_ROW_THREADS if parts == 1 else _PART_THREADS) // 32)
    grain = 128 // p.itemsize
    each = ceil_div(p.width, parts * grain) * grain
    params, grid = r.params(parts, each), (p.rows, parts)
    if p.floating and p.itemsize <= 4 and p.whole and not p.masked:
        functor = r.functor()
        launches = [
            Launch(_HEADER, f"ReduceWhole<{functor}, {p.vector}>", [params, i32(each // p.vector)], grid, threads)
        ]
    else:
        functor = r.functor(counting=r.op == "mean" and p.masked)
        launches = _rows(r, params, 0, grid, threads)
    return launches + _merge(r, functor, parts)


def _split(r):
    return _block(r, parts_of(r.p, r.device))


def _column(r, parts=None, aligned=True):
    p = r.p
    parts = parts or parts_of(p, r.device)
    packs = aligned and p.floating and not p.masked and p.inner % p.vector == 0
    across = p.inner // p.vector if packs else p.inner
    # 32 threads across, or more where there are too few rows for the others: 16 rows per thread, of parts 8.
    each = ceil_div(p.width, parts)
    log_y = 3 if parts > 1 else 0 if each < 32 else 1 if each < 64 else 2 if each < 128 else 3
    # Small blocks where threads have few rows, and the beginning and end of each block count.
    log_threads = 7 if log_y == 0 else 8
    log_x = min(log_threads - log_y, _log2_ceil(across))
    tiles = ceil_div(across, 1 << log_x)
    functor = r.functor(counting=not packs)
    name = f"ReduceColumns<{functor}, {p.vector if packs else 1}>"
    launch = Launch(
        _HEADER,
        name,
        [r.params(parts, each, aligned=aligned), i32(log_x), i64(tiles)],
        (p.rows * tiles, parts),
        1 << log_threads,
    )
    return [launch] + _merge(r, functor, parts)


def _merge(r, functor, parts) -> list[Launch]:
    """One lane per part, up to a warp; a block for more than 128 parts."""
    if parts == 1:
        return []
    rows = r.p.rows * r.p.inner
    log_lanes = _log2_ceil(_MERGE_THREADS if parts > 128 else min(parts, 32))
    return [
        Launch(
            _HEADER,
            f"ReduceMerge<{functor}>",
            [r.params(parts, rows=rows, out=result(0)), scratch(), i32(log_lanes)],
            ceil_div(rows, _MERGE_THREADS >> log_lanes),
            _MERGE_THREADS,
        )
    ]


_LAUNCHES = {"sub_warp": _sub_warp, "warp": _warp, "block": _block, "split": _split, "column": _column}


def reduce(op: str, device, operands, results, *, axis: int, dtype, algorithm: str) -> Plan | None:
    """The plan of a primitive for arrays of these types; None where there is no kernel.

    Operands: x and perhaps a mask. Results: one, or of logsumexp three.
    """
    del dtype  # the results have it
    x, mask, out = operands[0], operands[1:], results[0].dtype
    shape = x.shape
    view = broadcast_view(shape, mask[0].shape, axis) if mask else None
    p = Problem(math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]), x.dtype.name, bool(mask))
    wide = p.itemsize == 2 and out.name == "float32" if p.floating else op == "sum" and out.itemsize == 8
    if (mask and view is None) or (p.floating and out != x.dtype and not wide):
        return None
    r = _Reduction(p, device, op, wide, len(results) > 1, view, bool(mask) and mask[0].shape[axis] != 1)
    algorithm = pick(op if op == "logsumexp" else f"reduce_{op}", algorithm, p, device)
    parts = parts_of(p, device) if algorithm in ("split", "column") else 1
    launches = tuple(_LAUNCHES[algorithm](r))
    # Element by element, for arrays that are not aligned.
    unaligned = tuple(_column(r, parts, aligned=False))
    size = p.rows * p.inner * parts * _PARTIAL_BYTES if parts > 1 else 0
    return planned(algorithm, launches, size, unaligned)
