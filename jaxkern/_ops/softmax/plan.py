"""The hand-written kernels of softmax, log_softmax and their gradients on CUDA, and how they are launched.

    sub_warp    rows of whole vectors up to 512 bytes: 2 to 32 lanes per row, in registers
    warp        rows up to 1 KB (fused: 2 KB): a warp per row, in registers
    block       rows up to 64 KB (fused: 32 KB): a block per row, in registers
    cluster     sm_90: a row in the registers of 2 to 16 blocks, which exchange their partial results
    streaming   any row: a block reads it twice
    column      the axis is not the last one: threads along the inner dimension

Sizes and limits come from the kernels (ffi/kernels/softmax), the preferences from measurements (benchmarks/NOTES.md,
benchmarks/results); by_hand.py says where these kernels run. The fused kernels, with scale, bias, causal limit or dropout, and those
with a score function are warp, block and streaming.
"""

import functools
import math
import typing

from jaxkern._core.define import CUDA_TYPES, EMPTY_VIEW, broadcast_view, ceil_div, cpp_bool, fast_divmod, per_thread
from jaxkern._core.launch import (
    MOST_BLOCKS,
    Launch,
    Plan,
    boolean,
    f64,
    i32,
    i64,
    null,
    operand,
    planned,
    result,
    struct,
    u32,
)
from jaxkern._core.lowest import where_lowest
from jaxkern._core.params import Params

PARAMS = Params("softmax/row.cuh", "SoftmaxParams")
ALGORITHMS = ("sub_warp", "warp", "block", "cluster", "streaming", "column")

_TYPES = {"float16": ("__half", 2), "bfloat16": ("__nv_bfloat16", 2), "float32": ("float", 4), "float64": ("double", 8)}
DTYPES = tuple(_TYPES)

# Vectors of a row that an algorithm can hold.
_SUB_WARP_VECTORS = 32  # one per lane
_WARP_VECTORS = 64  # two per lane
_BLOCK_VECTORS = 512 * 8  # eight per thread
_FUSED_WARP_VECTORS, _FUSED_BLOCK_VECTORS = 32 * 4, 512 * 4  # four per thread
_CAUSAL_WARP_VECTORS = 32 * 8  # of float32, forward: 8x12x1024x1024 to bfloat16 takes 103 us, a block 128
_CLUSTER_BLOCKS = 16
_CLUSTER_VECTORS = 512 * 4  # per block, four per thread; eight if rows are whole vectors

_WARP_THREADS, _BLOCK_THREADS, _STREAM_THREADS, _COLUMN_THREADS = 128, 512, 512, 256


class Problem(typing.NamedTuple):
    """A softmax over the middle dimension of [rows, width, inner]. causal: a causal limit, beside which at most a scale is
    fused."""

    rows: int
    width: int
    inner: int = 1
    dtype: str = "float32"
    log: bool = False
    backward: bool = False
    masked: bool = False
    fused: bool = False
    causal: bool = False

    @property
    def itemsize(self) -> int:
        return _TYPES[self.dtype][1]

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
        return 128 if self.width * self.itemsize >= 8192 else 32

    @property
    def vectors(self) -> int:
        """16-byte vectors from that boundary to the end of a row, at most."""
        size = self.width * self.itemsize
        return ceil_div(size + self.grain - math.gcd(size, self.grain), 16)


def _has_clusters(device) -> bool:
    """Clusters, and the shared memory of a data-centre GPU."""
    return device.compute_capability >= 90 and device.shared_memory >= 227 * 1024


def fits(algorithm: str, p: Problem, device) -> bool:
    """Whether the algorithm can run the problem."""
    if p.fused:
        if algorithm == "streaming":
            return p.inner == 1
        long = p.causal and p.dtype == "float32" and not p.backward and p.whole
        warp = _CAUSAL_WARP_VECTORS if long else _FUSED_WARP_VECTORS
        most = {"warp": warp, "block": _FUSED_BLOCK_VECTORS}.get(algorithm, 0)
        return p.inner == 1 and p.dtype != "float64" and p.vectors <= most
    if algorithm == "column":
        return True  # a last axis is a column tile of width 1
    if p.inner != 1:
        return False
    clusters = _has_clusters(device) and not p.masked
    return {
        "sub_warp": _sub_warp_vector(p) is not None,
        "warp": p.vectors <= _WARP_VECTORS,
        "block": p.vectors <= _BLOCK_VECTORS,
        "cluster": clusters
        and _CLUSTER_BLOCKS < p.vectors <= _CLUSTER_BLOCKS * _CLUSTER_VECTORS * (2 if p.whole else 1),
        "streaming": True,
    }[algorithm]


def choose(p: Problem, device) -> str:
    """The algorithm that runs the problem by default; every problem has one."""
    can = functools.partial(fits, p=p, device=device)
    if p.fused:
        return next(a for a in ("warp", "block", "streaming") if can(a))
    if p.inner != 1:
        return "column"
    for a in ("sub_warp", "warp"):
        if can(a):
            return a
    # Few long rows: all multiprocessors work on each.
    if p.rows * 2 <= device.sm_count and p.vectors >= 256:
        if p.vectors * p.inputs <= 65536 and can("cluster"):
            return "cluster"
    # Exponentials per byte: twice as many in 16 bit, none in the gradient of softmax. Where there are many, threads
    # that hold the vectors as they were read are faster than a cluster, which holds floats.
    many_powers = p.itemsize == 2 and (not p.backward or p.log)
    if p.vectors <= _BLOCK_VECTORS // (1 if p.backward and many_powers else 2):
        return "block"
    # The gradient of log_softmax, with a power and two sums, wants more registers than a cluster's blocks have.
    if not p.backward:
        longest = 49152
    elif p.itemsize == 2:
        longest = 8192
    elif not p.log:
        longest = 32768
    else:
        longest = 8192 if p.dtype == "float64" else 0
    if p.whole and not many_powers and p.vectors <= longest and can("cluster"):
        return "cluster"
    return next(a for a in ("block", "streaming") if can(a))


# ---- the kernels: names, parameters and launch shapes


def _op(p: Problem) -> str:
    return f"jaxkern::{'Backward' if p.backward else 'Forward'}<{_TYPES[p.dtype][0]}, {cpp_bool(p.log)}>"


def _row(p: Problem, vector: int, index="int", ragged=True) -> str:
    return f"jaxkern::SoftmaxRow<{_op(p)}, {vector}, {cpp_bool(p.masked)}, {index}, {cpp_bool(ragged)}>"


def _stat_bytes(p: Problem, columns=False) -> int:
    """sizeof(Op::Stat), of partial results."""
    if p.itemsize == 2:
        return 8
    if p.backward and p.log:
        return 16 if columns and p.itemsize == 4 else 24
    return 8 if columns and p.itemsize == 4 else 16


def _exceeds_l2(p: Problem, device) -> bool:
    return p.rows * p.width * p.inner * p.itemsize * (p.inputs + 1) > device.l2_bytes


def _params(p: Problem, device, mask=(null, EMPTY_VIEW), aligned=True):
    """SoftmaxParams. Operands: x, or for a gradient y or x, and g. mask: its pointer and its BroadcastView."""
    pointer, view = mask
    return PARAMS(
        input=[operand(0), operand(1) if p.backward else null],
        out=result(0),
        rows=p.rows,
        width=p.width,
        grain=p.grain // p.itemsize if aligned else 1,
        exceeds_l2=_exceeds_l2(p, device),
        inner=p.inner,
        mask=pointer,
        mask_view=view,
    )


def _power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def _warps(threads: int) -> int:
    return 32 * ceil_div(threads, 32)


def _sub_warp_vector(p) -> int | None:
    """Elements that a lane loads at once of a row that a part of a warp holds, or None."""
    for vector, least, most in ((p.vector, p.vector, 32 * p.vector), (p.vector // 2, 4 * p.vector, 16 * p.vector)):
        if not p.masked and vector and p.width % vector == 0 and least < p.width <= most:
            return vector
    return None


def _sub_warp(p, params, device):
    vector = _sub_warp_vector(p)
    lanes = max(2, _power_of_two(p.width // vector))
    name = f"SoftmaxRegisters<{_op(p)}, {_row(p, vector, ragged=False)}, {lanes}, 1, 2>"
    grid = ceil_div(p.rows, _WARP_THREADS // lanes * 2)
    return [Launch("softmax/registers.cuh", name, [params], grid, _WARP_THREADS)]


def _registers(p, lanes, held, rows=1):
    return f"SoftmaxRegisters<{_op(p)}, {_row(p, p.vector, ragged=not p.whole)}, {lanes}, {held}, {rows}>"


def _warp(p, params, device):
    return [Launch("softmax/registers.cuh", _registers(p, 32, 2, 2), [params], ceil_div(p.rows, 8), _WARP_THREADS)]


def _block(p, params, device):
    held, threads = per_thread(p.width // p.vector if p.whole else p.vectors, _BLOCK_THREADS)
    return [Launch("softmax/registers.cuh", _registers(p, "jaxkern::kBlockLanes", held), [params], p.rows, threads)]


def _cluster(p, params, device):
    """About 1024 vectors per block, or fewer if there are few rows."""
    vectors = p.width // p.vector if p.whole else p.vectors
    blocks = 2
    while blocks < _CLUSTER_BLOCKS and ceil_div(vectors, blocks) > 1024:
        blocks *= 2
    while blocks < _CLUSTER_BLOCKS and p.rows * 2 * blocks <= 2 * device.sm_count and ceil_div(vectors, blocks) > 256:
        blocks *= 2
    each = ceil_div(vectors, blocks)
    held, threads = per_thread(each, _BLOCK_THREADS) if p.whole else (4, _warps(ceil_div(each, 4)))
    return [
        Launch(
            "softmax/registers.cuh",
            _registers(p, "jaxkern::kClusterLanes", held),
            [params],
            p.rows * blocks,
            threads,
            cluster=blocks,
        )
    ]


def _rows_grid(rows: int) -> tuple[int, int]:
    return min(rows, MOST_BLOCKS), ceil_div(rows, MOST_BLOCKS)


def _streaming(p, params, device, vector=None):
    name = f"SoftmaxStreaming<{_op(p)}, {_row(p, vector or p.vector, 'int64_t')}>"
    return [Launch("softmax/stream.cuh", name, [params], _rows_grid(p.rows), _STREAM_THREADS)]


def _column(p, params, device, vector=None):
    vector = vector or (p.vector if p.inner % p.vector == 0 else 1)
    if vector == 1 or p.masked or p.width > 1024:
        return [_column_in_shared_memory(p, params, device, vector)]
    alone = 8 if p.backward else 24  # rows in the registers of one thread
    if p.width <= alone:
        held, lanes, warps = alone, 32, 1
    elif p.width <= 4 * 8:
        held, lanes, warps = 4, 4, 1
    else:
        held, lanes, warps = 8, 4, ceil_div(p.width, 8 * 8)
    tiles = ceil_div(p.inner, lanes * vector)
    name = f"SoftmaxColumnRegisters<{_op(p)}::ForColumns, {held}, {cpp_bool(p.width <= alone)}>"
    grid = ceil_div(p.rows * tiles, 4) if warps == 1 else p.rows * tiles
    return [
        Launch("softmax/column.cuh", name, [params, i32(warps), i64(tiles)], grid, 32 * (4 if warps == 1 else warps))
    ]


def _column_in_shared_memory(p, params, device, vector):
    """Wide tiles for long runs of memory, but three or more tiles per multiprocessor; a tile too tall is read twice."""
    stat = _stat_bytes(p, columns=True)
    element = 16 if vector > 1 else max(4, p.itemsize)  # sizeof(Pack)
    across = ceil_div(p.inner, vector)
    stats = lambda lanes: (_COLUMN_THREADS + lanes) * vector * stat
    size = lambda lanes: stats(lanes) + p.width * element * p.inputs * lanes
    narrowest = min(across, ceil_div(32, element))
    lanes = _COLUMN_THREADS
    while lanes > 1 and (lanes // 2 >= across or (size(lanes) > device.shared_memory // 3 and lanes // 2 >= narrowest)):
        lanes //= 2
    resident = size(lanes) <= device.shared_memory
    if not resident:
        lanes = min(32, _power_of_two(across))
    tiles = ceil_div(across, lanes)
    return Launch(
        "softmax/column.cuh",
        f"SoftmaxColumn<{_op(p)}::ForColumns, {vector}, {cpp_bool(p.masked)}>",
        [params, struct(i32(lanes), boolean(resident), i64(tiles))],
        p.rows * tiles,
        _COLUMN_THREADS,
        shared=size(lanes) if resident else stats(lanes),
    )


_LAUNCHES = {
    "sub_warp": _sub_warp,
    "warp": _warp,
    "block": _block,
    "cluster": _cluster,
    "streaming": _streaming,
    "column": _column,
}


# ---- plans


def _algorithm(p: Problem, device, algorithm: str) -> str:
    if algorithm == "auto":
        return choose(p, device)
    if algorithm not in ALGORITHMS or not fits(algorithm, p, device):
        fitting = ", ".join(a for a in ALGORITHMS if fits(a, p, device))
        name = "log_softmax" if p.log else "softmax"
        raise ValueError(f"jaxkern.{name}: the algorithm '{algorithm}' cannot run {p}; {fitting} can")
    return algorithm


def plan(p: Problem, device, mask=(null, EMPTY_VIEW), algorithm="auto") -> Plan | None:
    """The launches of a plain softmax; None if a grid would be too large. mask: its pointer and its BroadcastView."""
    algorithm = _algorithm(p, device, algorithm)
    launches = tuple(_LAUNCHES[algorithm](p, _params(p, device, mask), device))
    # Element by element, for arrays that are not aligned.
    generic = _streaming if p.inner == 1 else _column
    unaligned = tuple(generic(p, _params(p, device, mask, aligned=False), device, 1))
    return planned(algorithm, launches, unaligned=unaligned)


def problem_of(aval, axis: int, **flags) -> Problem:
    shape = aval.shape
    return Problem(math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]), aval.dtype.name, **flags)


def plain(log: bool, backward: bool, device, operands, results, *, axis: int, algorithm: str) -> Plan | None:
    """The plan of a plain primitive for arrays of these types. Operands as in `_params`, then the mask if there is one.

    None if a grid would be too large, or the mask has too many groups of dimensions.
    """
    p = problem_of(operands[0], axis, log=log, backward=backward, masked=len(operands) > 1 + backward)
    if not p.masked:
        return plan(p, device, algorithm=algorithm)
    view = broadcast_view(operands[0].shape, operands[p.inputs].shape, axis)
    return plan(p, device, (operand(p.inputs), view), algorithm) if view else None


# ---- fused

_HAS_BIAS, _HAS_WIDE_BIAS, _HAS_MASK, _HAS_CAUSAL, _HAS_DROPOUT = 1, 2, 4, 8, 16
_RUN = 32  # FusedParams::kRun


def _fused_op(p: Problem, from_output: bool, out: str) -> str:
    """out: the dtype of the result."""
    cpp = _TYPES[p.dtype][0]
    if from_output:
        return f"jaxkern::FusedFromOutput<{cpp}>"
    narrower = "" if out == p.dtype else f", {_TYPES[out][0]}"
    return f"jaxkern::{'FusedBackward' if p.backward else 'FusedForward'}<{cpp}, {cpp_bool(p.log)}{narrower}>"


def _row_launch(
    p: Problem,
    algorithm: str,
    op: str,
    row,
    params,
    header="softmax/fused.cuh",
    source="",
    streaming="SoftmaxStreaming",
    held=4,
) -> Launch:
    """The launch of a kernel with rows of its own.

    row(index, ragged, full): the C++ type of a row. full: every thread holds `held` whole vectors of it.
    streaming: the kernel for rows that are not held in registers.
    """
    if algorithm == "streaming":
        name = f"{streaming}<{op}, {row('int64_t', True, False)}>"
        return Launch(header, name, [params], _rows_grid(p.rows), _STREAM_THREADS, source=source)
    vectors = p.width // p.vector if p.whole else p.vectors
    held = held if vectors <= held * (32 if algorithm == "warp" else _BLOCK_THREADS) else 4
    held = 8 if algorithm == "warp" and vectors > _FUSED_WARP_VECTORS else held
    lanes, grid, threads = "jaxkern::kBlockLanes", p.rows, _warps(ceil_div(vectors, held))
    if algorithm == "warp":
        # Two short rows per warp: half the steps to reduce a row, and a causal row ends nearer to its limit.
        lanes = 16 if p.whole and vectors <= 16 * held else 32
        grid, threads = ceil_div(p.rows, _WARP_THREADS // lanes), _WARP_THREADS
    full = p.whole and vectors == held * (lanes if algorithm == "warp" else threads)
    name = f"SoftmaxRegisters<{op}, {row('int', not p.whole, full)}, {lanes}, {held}, 1>"
    return Launch(header, name, [params], grid, threads, source=source)


def _by_runs(p: Problem, shape, axis, parts, device) -> bool:
    """Whether taking rows by runs lets an operand that broadcasts over matrices stay in L2."""

    def repeats(part):
        broadcast = [b == 1 for n, b in zip(shape[:axis], part[:axis]) if n != 1]
        return part[axis] != 1 and any(broadcast) and not broadcast[-1]

    return _exceeds_l2(p, device) and axis > 0 and shape[axis - 1] % _RUN == 0 and any(map(repeats, parts))


def fused_fits(shape, axis: int) -> bool:
    """Whether there is a kernel for the rows of an array of this shape."""
    return math.prod(shape[axis + 1 :]) == 1 and math.prod(shape[:axis]) < 1 << 31


def fused(
    device,
    operands,
    results,
    *,
    axis,
    algorithm,
    log,
    extras,
    causal,
    threshold,
    unscaled,
    dtype="",
    backward=False,
    from_output=False,
) -> Plan | None:
    """The plan of a fused primitive for arrays of these types."""
    x = operands[0]
    at = {name: k for k, name in enumerate(extras.split(), 2 if backward else 1)}
    p = problem_of(x, axis, log=log, backward=backward, masked="mask" in at, fused=True)
    p = p._replace(causal=causal and extras in ("", "scale"))
    if not fused_fits(x.shape, axis):
        return None
    algorithm = _algorithm(p, device, algorithm)
    pointer = {name: operand(k) for name, k in at.items()}
    view = {
        name: broadcast_view(x.shape, operands[k].shape, axis) for name, k in at.items() if not name.startswith("key")
    }
    wide = "bias" in at and operands[at["bias"]].dtype != x.dtype
    has = ("bias" in at) * (_HAS_WIDE_BIAS if wide else _HAS_BIAS) + p.masked * _HAS_MASK
    has += causal * _HAS_CAUSAL + ("key0" in at) * _HAS_DROPOUT
    matrix_rows = x.shape[axis - 1] if axis else 1
    by_runs = _by_runs(p, x.shape, axis, [operands[at[e]].shape for e in ("mask", "bias") if e in at], device)

    def params(aligned):
        return struct(
            _params(p, device, (pointer.get("mask", null), view.get("mask", EMPTY_VIEW)), aligned),
            *(pointer.get(e, null) for e in ("bias", "scale", "key0", "key1")),
            *(view.get(e, EMPTY_VIEW) for e in ("bias", "scale")),
            f64(65536 / (65536 - threshold)),
            u32(threshold),
            fast_divmod(matrix_rows),
            fast_divmod(p.rows // matrix_rows * _RUN if by_runs else 1),
            boolean(unscaled),
            boolean(by_runs),
        )

    op = _fused_op(p, from_output, dtype or p.dtype)

    def row(vector):
        return lambda index, ragged, _: f"jaxkern::FusedRow<{op}, {vector}, {has}, {index}, {cpp_bool(ragged)}>"

    return Plan(
        algorithm,
        (_row_launch(p, algorithm, op, row(p.vector), params(True)),),
        unaligned=(_row_launch(p, "streaming", op, row(1), params(False)),),
    )


fused_grad = functools.partial(fused, backward=True)
fused_output_grad = functools.partial(fused, backward=True, from_output=True)


# ---- scores

MOST_SCORE_OPERANDS = 16


def score(
    device, operands, results, *, axis, algorithm, log, function, indexed, extras, unscored, backward=False, sums=False
) -> Plan | None:
    """The plan of a softmax of a user function, for arrays of these types.

    sums: the results are the largest score of each row and the logarithm of the sum.
    """
    x = operands[0]
    first = 2 if backward else 1
    args = operands[first : len(operands) - len(extras.split())]
    at = {name: k for k, name in enumerate(extras.split(), first + len(args))}
    p = problem_of(x, axis, log=log, backward=backward, masked="mask" in at, fused=True)
    if not fused_fits(x.shape, axis) or len(args) > MOST_SCORE_OPERANDS:
        return None
    pullback = function.vjp((0,)) if backward and not unscored else None
    if not function.fits() or (pullback is not None and not pullback.fits()):
        return None
    algorithm = _algorithm(p, device, algorithm)
    views = [broadcast_view(x.shape, a.shape, axis) for a in args]
    mask = (null, EMPTY_VIEW)
    if p.masked:
        mask = (operand(at["mask"]), broadcast_view(x.shape, operands[at["mask"]].shape, axis))
    if mask[1] is None or None in views:
        return None
    matrix_rows = x.shape[axis - 1] if axis else 1
    shapes = [a.shape for a in (*args, *(operands[k] for k in at.values() if operands[k].ndim == x.ndim))]
    by_runs = _by_runs(p, x.shape, axis, shapes, device)

    def params(aligned):
        fused = struct(
            _params(p, device, mask, aligned),
            *(null,) * 4,
            *(EMPTY_VIEW,) * 2,
            f64(1),
            u32(0),
            fast_divmod(matrix_rows),
            fast_divmod(p.rows // matrix_rows * _RUN if by_runs else 1),
            boolean(True),
            boolean(by_runs),
        )
        # An array in C++ has at least one element.
        return struct(
            fused,
            *([operand(first + k) for k in range(len(args))] or [null]),
            *([view.members[0] for view in views] or [EMPTY_VIEW.members[0]]),
            *([fast_divmod(math.prod(x.shape[d + 1 : axis])) for d in indexed] or [fast_divmod(1)]),
            *([fast_divmod(1 if d == axis else x.shape[d]) for d in indexed] or [fast_divmod(1)]),
            operand(at["origin"]) if "origin" in at else null,
            result(1) if len(results) > 1 else null,
        )

    op = _fused_op(p, False, p.dtype)
    source, gradient = function.source("Score"), "void"
    if pullback is not None:
        source, gradient = source + pullback.source("ScoreGradient"), "ScoreGradient"
    # What is read before x to know which of x to read: operands that stay in L2.
    behind = 1 + len(indexed)
    small = [behind + k for k, a in enumerate(args) if math.prod(a.shape) < math.prod(x.shape)]
    masks, mask_name, after = where_lowest(function, frozenset((*range(1, behind), *small))), "void", False
    if masks:
        masks, mask_name = masks.select(range(1, len(function.in_dtypes))), "ScoreMask"
        source += masks.source(mask_name)
        after = any(args[k - len(indexed)].shape[axis] != 1 for k in masks.used if k >= len(indexed))
    column = indexed.index(axis) if axis in indexed else -1
    splat = sum((a.shape[axis] == 1) << k for k, a in enumerate(args))
    call = ["Score", gradient, mask_name, cpp_bool(after), len(indexed), column, splat]
    call += [CUDA_TYPES[a.dtype.name] for a in args]
    call = f"jaxkern::ScoreCall<{', '.join(map(str, call))}>"
    has = p.masked * _HAS_MASK
    row_type, streaming, header = "ScoreRow", "SoftmaxStreaming", "softmax/score.cuh"
    if sums:
        row_type, streaming, header = "ScoreSumsRow", "ScoreSumsStreaming", "softmax/score_sums.cuh"

    def row(vector):
        return lambda index, ragged, full: (
            f"jaxkern::{row_type}<{op}, {vector}, {has}, {index}, {cpp_bool(ragged)}, {cpp_bool(full)}, {call}>"
        )

    # A derivative is held beside each element: 16 elements per thread leave registers for them.
    held = 2 if p.itemsize == 2 and backward else 4

    def launches(algorithm, vector, aligned):
        return (_row_launch(p, algorithm, op, row(vector), params(aligned), header, source, streaming, held),)

    return Plan(algorithm, launches(algorithm, p.vector, True), unaligned=launches("streaming", 1, False))


score_grad = functools.partial(score, backward=True)
score_sums = functools.partial(score, sums=True)
