"""The hand-written kernels of softmax with scale, bias, mask, causal limit or dropout, and of its gradients, on CUDA.

    warp        rows up to 2 KB: a warp for each row, in registers
    block       rows up to 32 KB: a block for each row, in registers
    streaming   any row: a block reads it twice

The softmax of scores (_ops/score/plan.py) runs in the same kernels.
"""

import math
import typing

from jaxkern._core.define import CUDA_TYPES, EMPTY_VIEW, broadcast_view, ceil_div, cpp_bool
from jaxkern._core.launch import Launch, Plan, null, operand
from jaxkern._core.params import Params
from jaxkern._ops.softmax import tuning
from jaxkern._ops.softmax.plan import PARAMS, Problem, arguments, exceeds_l2, problem_of, rows_grid, warps

FUSED_PARAMS = Params("softmax/fused_row.cuh", "FusedParams", PARAMS)
ALGORITHMS = ("warp", "block", "streaming")
_HAS_BIAS, _HAS_WIDE_BIAS, HAS_MASK, _HAS_CAUSAL, _HAS_DROPOUT = 1, 2, 4, 8, 16
RUN = 32  # FusedParams::kRun


def fits(algorithm: str, p: Problem, causal: bool = False) -> bool:
    """Whether the algorithm can run the problem. causal: a causal limit, beside which at most a scale is fused."""
    if algorithm == "streaming":
        return p.inner == 1
    long = causal and p.dtype == "float32" and not p.backward and p.whole
    warp = tuning.CAUSAL_WARP_VECTORS if long else tuning.FUSED_WARP_VECTORS
    most = {"warp": warp, "block": tuning.FUSED_BLOCK_VECTORS}.get(algorithm, 0)
    return p.inner == 1 and p.dtype != "float64" and p.vectors <= most


def choose(p: Problem, causal: bool = False) -> str:
    """The algorithm that runs the problem by default; every problem of rows has one."""
    return next(a for a in ALGORITHMS if fits(a, p, causal))


def reads(shape, axis: int) -> bool:
    """Whether there is a kernel for the rows of an array of this shape."""
    return math.prod(shape[axis + 1 :]) == 1 and math.prod(shape[:axis]) < 1 << 31


class Order(typing.NamedTuple):
    """The order in which the rows of matrices are taken."""

    matrix_rows: int
    matrices: int
    by_runs: bool

    def members(self) -> dict:
        turn = self.matrices * RUN if self.by_runs else 1
        return dict(matrix=self.matrix_rows, turn=turn, by_runs=self.by_runs)


def order_of(p: Problem, shape, axis, parts, device) -> Order:
    """By runs, if an operand that broadcasts over matrices, of one of these shapes, then stays in L2."""

    def repeats(part):
        broadcast = [b == 1 for n, b in zip(shape[:axis], part[:axis]) if n != 1]
        return part[axis] != 1 and any(broadcast) and not broadcast[-1]

    rows = shape[axis - 1] if axis else 1
    by_runs = exceeds_l2(p, device) and axis > 0 and rows % RUN == 0 and any(map(repeats, parts))
    return Order(rows, p.rows // rows, by_runs)


def op_of(p: Problem, out: str, from_output: bool = False) -> str:
    """The C++ type of the operation. out: the dtype of the result."""
    cpp = CUDA_TYPES[p.dtype]
    if from_output:
        return f"jaxkern::FusedFromOutput<{cpp}>"
    narrower = "" if out == p.dtype else f", {CUDA_TYPES[out]}"
    return f"jaxkern::{'FusedBackward' if p.backward else 'FusedForward'}<{cpp}, {cpp_bool(p.log)}{narrower}>"


def row_launch(
    p: Problem,
    algorithm: str,
    op: str,
    row,
    params,
    header="softmax/fused.cuh",
    source="",
    streaming="SoftmaxStreaming",
    held=tuning.FUSED_VECTORS,
) -> Launch:
    """The launch of a kernel with rows of its own.

    row(index, ragged, full): the C++ type of a row. full: every thread holds `held` whole vectors of it.
    streaming: the kernel for rows that are not held in registers.
    """
    if algorithm == "streaming":
        name = f"{streaming}<{op}, {row('int64_t', True, False)}>"
        return Launch(header, name, [params], rows_grid(p.rows), tuning.STREAM_THREADS, source=source)
    vectors = p.width // p.vector if p.whole else p.vectors
    held = held if vectors <= held * (32 if algorithm == "warp" else tuning.BLOCK_THREADS) else tuning.FUSED_VECTORS
    held = 8 if algorithm == "warp" and vectors > tuning.FUSED_WARP_VECTORS else held
    lanes, grid, threads = "jaxkern::kBlockLanes", p.rows, warps(ceil_div(vectors, held))
    if algorithm == "warp":
        # Two short rows per warp: half the steps to reduce a row, and a causal row ends nearer to its limit.
        lanes = 16 if p.whole and vectors <= 16 * held else 32
        grid, threads = ceil_div(p.rows, tuning.WARP_THREADS // lanes), tuning.WARP_THREADS
    full = p.whole and vectors == held * (lanes if algorithm == "warp" else threads)
    name = f"SoftmaxRegisters<{op}, {row('int', not p.whole, full)}, {lanes}, {held}, 1>"
    return Launch(header, name, [params], grid, threads, source=source)


def fused(
    device, operands, *, axis, log, extras=(), causal=False, threshold=0, dtype=None, backward=False, from_output=False
) -> Plan | None:
    """The plan for arrays of these types: x, or for a gradient y or x, and g; then the extras by their names.

    threshold: as for dropout in FusedParams. dtype: of the result. from_output: the gradient starts from the result of softmax.
    """
    x = operands[0]
    at = {name: k for k, name in enumerate(extras, 2 if backward else 1)}
    p = problem_of(x, axis, log=log, backward=backward)
    if not reads(x.shape, axis):
        return None
    algorithm = choose(p, causal and set(extras) <= {"scale"})
    pointer = {name: operand(at[name]) if name in at else null for name in ("bias", "scale", "mask", "key0", "key1")}
    view = {
        name: broadcast_view(x.shape, operands[at[name]].shape, axis) if name in at else EMPTY_VIEW
        for name in ("bias", "scale", "mask")
    }
    wide = "bias" in at and operands[at["bias"]].dtype != x.dtype
    has = ("bias" in at) * (_HAS_WIDE_BIAS if wide else _HAS_BIAS) + ("mask" in at) * HAS_MASK
    has += causal * _HAS_CAUSAL + ("key0" in at) * _HAS_DROPOUT
    order = order_of(p, x.shape, axis, [operands[at[e]].shape for e in ("mask", "bias") if e in at], device)

    def params(aligned):
        return FUSED_PARAMS(
            **arguments(p, device, aligned, (pointer["mask"], view["mask"])),
            **{name: pointer[name] for name in ("bias", "scale", "key0", "key1")},
            bias_view=view["bias"],
            scale_view=view["scale"],
            kept_inverse=65536 / (65536 - threshold),
            threshold=threshold,
            unscaled=False,
            **order.members(),
        )

    op = op_of(p, dtype or p.dtype, from_output)

    def row(vector):
        return lambda index, ragged, _: f"jaxkern::FusedRow<{op}, {vector}, {has}, {index}, {cpp_bool(ragged)}>"

    return Plan(
        algorithm,
        (row_launch(p, algorithm, op, row(p.vector), params(True)),),
        unaligned=(row_launch(p, "streaming", op, row(1), params(False)),),
    )
