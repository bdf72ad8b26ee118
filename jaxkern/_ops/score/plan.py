"""The kernels of softmax of a user function, and how they are launched: fused kernels (_ops/softmax/fused_plan.py) on rows of scores."""

import functools
import math

from jaxkern._core.define import CUDA_TYPES, EMPTY_VIEW, FLOAT_BYTES, broadcast_view, cpp_bool
from jaxkern._core.launch import Plan, null, operand, result
from jaxkern._core.lowest import where_lowest
from jaxkern._core.params import Params
from jaxkern._ops.softmax import tuning
from jaxkern._ops.softmax.fused_plan import (
    ALGORITHMS,
    FUSED_PARAMS,
    HAS_MASK,
    choose,
    fits,
    op_of,
    order_of,
    reads,
    row_launch,
)
from jaxkern._ops.softmax.plan import Problem, arguments, problem_of

SCORE_PARAMS = Params("softmax/score.cuh", "ScoreParams", FUSED_PARAMS)
DTYPES = tuple(FLOAT_BYTES)
MOST_OPERANDS = 16


def _picked(p: Problem, algorithm: str) -> str:
    if algorithm == "auto":
        return choose(p)
    if algorithm not in ALGORITHMS or not fits(algorithm, p):
        fitting = ", ".join(a for a in ALGORITHMS if fits(a, p))
        name = "log_softmax" if p.log else "softmax"
        raise ValueError(f"jaxkern.{name}: the algorithm '{algorithm}' cannot run {p}; {fitting} can")
    return algorithm


def score(
    device, operands, results, *, axis, algorithm, log, function, indexed, extras, unscored, backward=False, sums=False
) -> Plan | None:
    """The plan for arrays of these types.

    sums: the results are the largest score of each row and the logarithm of the sum.
    """
    x = operands[0]
    first = 2 if backward else 1
    args = operands[first : len(operands) - len(extras.split())]
    at = {name: k for k, name in enumerate(extras.split(), first + len(args))}
    p = problem_of(x, axis, log=log, backward=backward)
    if not reads(x.shape, axis) or len(args) > MOST_OPERANDS:
        return None
    pullback = function.vjp((0,)) if backward and not unscored else None
    if not function.fits() or (pullback is not None and not pullback.fits()):
        return None
    algorithm = _picked(p, algorithm)
    views = [broadcast_view(x.shape, a.shape, axis) for a in args]
    masked, mask = "mask" in at, (null, EMPTY_VIEW)
    if masked:
        mask = (operand(at["mask"]), broadcast_view(x.shape, operands[at["mask"]].shape, axis))
    if mask[1] is None or None in views:
        return None
    shapes = [a.shape for a in (*args, *(operands[k] for k in at.values() if operands[k].ndim == x.ndim))]
    order = order_of(p, x.shape, axis, shapes, device)

    def params(aligned):
        # An array in C++ has at least one element.
        return SCORE_PARAMS(
            **arguments(p, device, aligned, mask),
            **dict.fromkeys(("bias", "scale", "key0", "key1"), null),
            **dict.fromkeys(("bias_view", "scale_view"), EMPTY_VIEW),
            kept_inverse=1,
            threshold=0,
            unscaled=True,
            **order.members(),
            arg=[operand(first + k) for k in range(len(args))] or [null],
            arg_map=[view.members[0] for view in views] or [EMPTY_VIEW.members[0]],
            below=[math.prod(x.shape[d + 1 : axis]) for d in indexed] or [1],
            extent=[1 if d == axis else x.shape[d] for d in indexed] or [1],
            origin=operand(at["origin"]) if "origin" in at else null,
            ds=result(1) if len(results) > 1 else null,
        )

    op = op_of(p, p.dtype)
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
    has = masked * HAS_MASK
    row_type, streaming, header = "ScoreRow", "SoftmaxStreaming", "softmax/score.cuh"
    if sums:
        row_type, streaming, header = "ScoreSumsRow", "ScoreSumsStreaming", "softmax/score_sums.cuh"

    def row(vector):
        return lambda index, ragged, full: (
            f"jaxkern::{row_type}<{op}, {vector}, {has}, {index}, {cpp_bool(ragged)}, {cpp_bool(full)}, {call}>"
        )

    # A derivative is held beside each element: 16 elements per thread leave registers for them.
    held = tuning.SCORE_GRADIENT_VECTORS if p.itemsize == 2 and backward else tuning.FUSED_VECTORS

    def launches(algorithm, vector, aligned):
        return (row_launch(p, algorithm, op, row(vector), params(aligned), header, source, streaming, held),)

    return Plan(algorithm, launches(algorithm, p.vector, True), unaligned=launches("streaming", 1, False))


score_grad = functools.partial(score, backward=True)
score_sums = functools.partial(score, sums=True)
