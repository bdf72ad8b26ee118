"""The primitive of quantisation: quantize_p (x [..., width]) -> q like x, scale [...] in float32. Its derivative is zero."""

import jax.numpy as jnp
from jax.interpreters import ad

from jaxkern._core import algorithms, compat, define, partition
from jaxkern._core.primitive import bind
from jaxkern._core.rows import without_axis
from jaxkern._ops.quantize import plan, reference

algorithms.register(plan, "quantize_rows")


def _shape(x, *, dtype):
    return [
        x.update(dtype=jnp.dtype(dtype), weak_type=False),
        without_axis(x, x.ndim - 1).update(dtype=jnp.dtype("float32")),
    ]


def _batch(prim, operands, dims, **params):
    return bind(prim, jnp.moveaxis(operands[0], dims[0], 0), **params), [0, 0]


def _partition(prim, ctx, operands, params):
    names = [*(f"d{d}" for d in range(ctx.avals_in[0].ndim - 1)), "row"]

    def shard(over, x, **params):
        return reference.quantize(x, over=over["row"], **params) if over["row"] else prim.bind(x, **params)

    return partition.lower(ctx, prim, operands, params, [names, names, names[:-1]], shard, exact={"row"})


quantize_p = define.primitive(
    "jaxkern_quantize_rows",
    _shape,
    _batch,
    reference.quantize,
    several=True,
    makes_nan=False,
    plan=plan.quantize,
    partition=_partition,
    dtypes=plan.DTYPES,
)


def _jvp(primals, tangents, **params):
    del tangents
    found = bind(quantize_p, *primals, **params)
    return found, [compat.zero_tangent(y) for y in found]


ad.primitive_jvps[quantize_p] = _jvp
