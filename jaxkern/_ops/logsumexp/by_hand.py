"""The hand-written kernel of logsumexp, where it is faster than what the engine generates: 16-bit rows with a mask.

It is one algorithm of logsumexp, `by_hand`.
"""

import math

from jaxkern._core import algorithms
from jaxkern._core.define import CUDA_TYPES, broadcast_view, ceil_div, cpp_bool
from jaxkern._core.launch import Launch, null, operand, result
from jaxkern._core.params import Params
from jaxkern._engines.rows import queries

BY_HAND = "by_hand"
ALGORITHMS = (*queries.ALGORITHMS, BY_HAND)
DTYPES, Problem = queries.DTYPES, queries.Problem
PARAMS = Params("logsumexp/masked.cuh", "MaskedLogSumExpParams")

PACK, MOST = 8, 512  # elements of a pack, and of a row
# Elements of a row, at least [H100; bfloat16 32 x 16 x 512 x 512 with a mask without heads: 92 us, generated 112].
FEWEST = 129
ROWS = 16  # of a block
THREADS = 128


def fits(algorithm, problem, device=None) -> bool:
    """Whether an algorithm runs a problem without a mask."""
    return algorithm != BY_HAND and queries.fits(algorithm, problem, device)


choose = queries.choose


def launches(device, operands, results, *, axis, algorithm) -> tuple[Launch] | None:
    """The launch of the kernel on aligned arrays, or None if the engine's kernels run the problem."""
    x, *mask = operands
    forced = algorithms.forced("logsumexp") if algorithm == "auto" else algorithm
    if forced not in ("auto", BY_HAND) or not mask or x.dtype.name not in ("float16", "bfloat16"):
        return None
    view, (*outer, width) = broadcast_view(x.shape, mask[0].shape, axis), x.shape
    rows = math.prod(outer)
    whole = axis == x.ndim - 1 and mask[0].shape[axis] == width and width % PACK == 0 and width <= MOST
    if not whole or view is None or rows >= 1 << 32 or results[0].dtype != x.dtype:
        return None
    if width < FEWEST and forced != BY_HAND:
        return None
    largest, total = (result(1), result(2)) if len(results) > 1 else (null, null)
    args = PARAMS(
        x=operand(0),
        mask=operand(1),
        y=result(0),
        largest=largest,
        total=total,
        mask_map=view.members[0],
        rows=rows,
        packs=width // PACK,
        exceeds_l2=x.size * x.dtype.itemsize > device.l2_bytes,
    )
    name = f"MaskedLogSumExp<{CUDA_TYPES[x.dtype.name]}, {cpp_bool(len(results) > 1)}>"
    return (Launch(PARAMS.header, name, [args], ceil_div(rows, ROWS), THREADS),)
