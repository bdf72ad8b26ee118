"""Reductions of rows that are split over devices: a kernel reduces each part, then the devices exchange a few numbers.

over: the axes of the mesh that split the rows. The first argument is the primitive that reduces the parts.
"""

import jax.numpy as jnp
from jax import lax

from jaxkern._core import partition
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind
from jaxkern._ops.reduction.reference import count, finite, logsumexp_of


def reduce_sum(sum_p, x, *mask, over, axis, dtype, algorithm):
    wide = computing(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype
    return lax.psum(bind(sum_p, x, *mask, axis=axis, dtype=wide, algorithm=algorithm), over).astype(dtype)


def reduce_mean(sum_p):
    def split(prim, x, *mask, over, axis, dtype, algorithm):
        wide = computing(dtype)
        total = bind(sum_p, x, *mask, axis=axis, dtype=wide, algorithm=algorithm)
        n = count(x.shape, mask, axis, wide)
        n = jnp.broadcast_to(jnp.squeeze(n, axis) if mask else n, total.shape)
        total, n = lax.psum(jnp.stack([total, n]), over)
        return (total / n).astype(dtype)

    return split


def extreme(over_devices, prim, x, *mask, over, axis, dtype, algorithm):
    return over_devices(bind(prim, x, *mask, axis=axis, dtype=dtype, algorithm=algorithm), over)


def logsumexp(statistics_p):
    return lambda prim, *operands, dtype, **params: statistics(statistics_p, *operands, dtype=(dtype,), **params)[0]


def statistics(statistics_p, x, *mask, over, axis, dtype, algorithm):
    wide = computing(x.dtype)
    _, largest, total = bind(statistics_p, x, *mask, axis=axis, dtype=(x.dtype, wide, wide), algorithm=algorithm)
    largest, total = partition.gathered([largest, total], over)
    whole = jnp.max(largest, 0)
    base = finite(whole)
    # Where a part is empty, or its largest element infinite or NaN, its total needs no rescaling.
    total = jnp.sum(total * jnp.where(jnp.isfinite(largest), jnp.exp(largest - base), 1), 0)
    return [logsumexp_of(base, total, dtype[0]), jnp.where(jnp.isnan(total), jnp.nan, whole), total]
