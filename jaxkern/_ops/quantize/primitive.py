"""The primitive of the quantisation of a matrix and its transpose; its derivative is zero.

    quantize_tiles_p  (x [..., M, 128, N, 128], given [])   -> q like x, q_t [..., N, 128, M, 128], scale [..., M, 128, N],
                                                               scale_t [..., N, 128, M]

in float32 except for x, q and q_t. `given` is an optional scale. With it the scales are replaced by the largest magnitude of
each tile, [..., M, N].
"""

import functools

import jax

from jaxkern._core.primitive import set_zero_jvp
from jaxkern._core.signature import FLAT, Signature, local, primitive
from jaxkern._definitions.quantize import on_cpu
from jaxkern._ops.quantize import plan, reference


def _results(operands, params):
    scales = (
        ["float32 *batch m row n", "float32 *batch n column m"] if operands.given is None else ["float32 *batch m n"]
    )
    return ["dtype *batch m row n column", "dtype *batch n column m row", *scales]


def _batch(prim, operands, dims, params):
    if dims.given is None:
        return None
    # Each example has a scale of its own: left to XLA.
    ys = jax.vmap(functools.partial(reference.quantize_tiles, **params), tuple(dims))(*operands)
    return ys, [0] * len(ys)


quantize_tiles_p = primitive(
    "jaxkern_quantize_tiles",
    Signature({"x": "T *batch m row n column", "given?": "float32"}, _results, layout=FLAT, whole={"row", "column"}),
    reference.quantize_tiles,
    batch=_batch,
    shard=local,
    on_cpu=functools.partial(on_cpu, reference.quantize_tiles, -1),
    makes_nan=False,
    plan=plan.tiles,
    dtypes=plan.DTYPES,
)

set_zero_jvp(quantize_tiles_p)
