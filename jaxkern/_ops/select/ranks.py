"""ranks: the elements at given places of the sorted rows. The kernels are in ffi/kernels/select/ranks.cuh.

    ranked_p  (x [..., columns], ranks int32 [count])  ->  like x [..., count]

NaN is the greatest number, and a row with NaN has no other result. A zero may have either sign.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern._core import launch
from jaxkern._core.define import ceil_div
from jaxkern._core.params import Params
from jaxkern._core.primitive import bind, set_jvp
from jaxkern._core.signature import FLAT, Signature, local, primitive
from jaxkern._ops.select import tuning
from jaxkern._ops.select.sort_rows import sort_rows_p

HEADER = "select/ranks.cuh"
ARGS = Params(HEADER, "RankArgs")
DTYPES = ("float16", "bfloat16", "float32")
THREADS, RESIDENT, DIGIT, BINS, MOST = 256, 4, 11, 2048, 4


def plan(device, operands, results) -> launch.Plan | None:
    """The plan for x [..., columns]; None if a sort of the rows is as fast, or there is no kernel."""
    del results
    x, ranks = operands
    *batch, columns = x.shape
    rows, (count,), size = math.prod(batch), ranks.shape, x.dtype.itemsize
    shifts = [*range(8 * size - DIGIT, 0, -DIGIT), 0]
    states = 8 * rows * count
    scratch = len(shifts) * (4 * BINS * rows * count + states)
    if (
        not rows
        or count > MOST
        or tuning.RANKS_SHARE * scratch > rows * columns * size
        or columns >= 2**31
        or rows * count >= 2**31
    ):
        return None
    parts = max(1, min(RESIDENT * device.sm_count // rows, columns // (16 * BINS)))
    part = ceil_div(ceil_div(columns, parts), 16) * 16
    parts = ceil_div(columns, part)
    if rows * parts >= 2**31:
        return None
    largest = int(np.array(np.inf, x.dtype).view(f"uint{8 * size}"))
    state = lambda n: launch.scratch(4 * BINS * rows * count * len(shifts) + n * states)

    def steps(vectors):
        vector = 16 // size if vectors and columns * size % 16 == 0 else 1
        found, above = [], 8 * size
        for n, shift in enumerate(shifts):
            args = ARGS(
                x=launch.operand(0),
                ranks=launch.operand(1),
                values=launch.result(0),
                counts=launch.scratch(4 * BINS * rows * count * n),
                before=state(n - 1) if n else launch.null,
                found=state(n),
                width=columns,
                count=count,
                parts=parts,
                part=part,
                shift=shift,
                bits=above - shift,
                largest=largest,
                first=n == 0,
                last=shift == 0,
            )
            above, bits = shift, f"uint{8 * size}_t"
            counting = f"RankCount<{bits}, {vector}, {16 // vector if vector > 1 else 8}>"
            found.append(launch.Launch(HEADER, counting, [args], rows * parts, THREADS))
            found.append(launch.Launch(HEADER, f"RankDigit<{bits}>", [args], rows * count, THREADS))
        return (launch.Memset(launch.scratch(), 4 * BINS * rows * count * len(shifts)), *found)

    return launch.Plan("digits", steps(True), scratch, steps(False))


# ---- the primitive


def reference(x, ranks):
    (ordered,) = bind(sort_rows_p, x, None, descending=False, wanted=("values",))
    found = jnp.take(ordered, ranks, -1, mode="clip")
    return jnp.where(jnp.isnan(ordered[..., -1:]), jnp.nan, found)


def _batch(prim, operands, dims, params):
    del prim, params
    if dims.ranks is None:
        return None
    return jax.vmap(reference, tuple(dims))(*operands), 0


ranked_p = primitive(
    "jaxkern_ranked",
    Signature({"x": "any *batch columns", "ranks": "int32 count"}, "x *batch count", layout=FLAT, whole={"columns"}),
    reference,
    batch=_batch,
    shard=local,
    plan=plan,
    dtypes=DTYPES,
)


def _jvp(primals, tangents):
    """That of the sort."""
    x, ranks = primals
    _, slope = jax.jvp(functools.partial(reference, ranks=ranks), (x,), tangents[:1])
    return bind(ranked_p, x, ranks), slope


set_jvp(ranked_p, _jvp)
