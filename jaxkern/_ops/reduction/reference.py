"""Row reductions in jnp: the definition of what the kernels compute.

Operands: x and perhaps a boolean mask of the rank of x. `dtype` is the type of the result, or the types of several.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np

from jaxkern._core.dtypes import computing
from jaxkern._core.rows import largest_of


def count(shape, mask, axis, dtype):
    """The number of unmasked elements of each row, with a dimension of size 1 for the axis."""
    if not mask:
        return jnp.asarray(shape[axis], dtype)
    return jnp.sum(jnp.broadcast_to(mask[0], shape), axis, keepdims=True, dtype=dtype)


def _where(mask):
    return mask[0] if mask else None


def reduce_sum(x, *mask, axis, dtype, algorithm):
    wide = computing(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype
    return jnp.sum(x, axis, dtype=wide, where=_where(mask)).astype(dtype)


def reduce_mean(x, *mask, axis, dtype, algorithm):
    total = jnp.sum(x, axis, dtype=computing(dtype), where=_where(mask))
    n = count(x.shape, mask, axis, total.dtype)
    return (total / (jnp.squeeze(n, axis) if mask else n)).astype(dtype)


def bounds(dtype):
    """The least and the greatest value of a type."""
    if dtype == jnp.bool_:
        return False, True
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    if np.isinf(np.float32(-np.inf).astype(dtype).astype(np.float32)):
        return -jnp.inf, jnp.inf
    return float(jnp.finfo(dtype).min), float(jnp.finfo(dtype).max)


def _extreme(method, end, x, *mask, axis, dtype, algorithm):
    # Only a mask or an empty axis needs an initial value; jax.experimental.jet has no rule for reductions with one.
    rest = {"where": mask[0]} if mask else {}
    if mask or x.shape[axis] == 0:
        rest["initial"] = np.asarray(bounds(dtype)[end], dtype)
    return method(x, axis, **rest).astype(dtype)


reduce_max = functools.partial(_extreme, jnp.max, 0)
reduce_min = functools.partial(_extreme, jnp.min, 1)


def finite(largest):
    """The base of sums of exponentials: 0 instead of an infinity."""
    return jnp.where(jnp.isfinite(largest), largest, 0)


def logsumexp_of(base, total, dtype):
    y, (least, _) = jnp.log(total) + base, bounds(dtype)
    return (y if math.isinf(least) else jnp.maximum(y, least)).astype(dtype)


def logsumexp(x, *mask, axis, dtype, algorithm):
    return statistics(x, *mask, axis=axis, dtype=(dtype,), algorithm=algorithm)[0]


def statistics(x, *mask, axis, dtype, algorithm):
    largest = largest_of(x, mask, axis, least=-jnp.inf)
    base = finite(largest)
    x = x.astype(base.dtype)
    if mask:
        x = jnp.where(mask[0], x, -jnp.inf)
    total = jnp.sum(jnp.exp(x - base), axis)
    base, largest = (jnp.squeeze(a, axis) for a in (base, largest))
    return [logsumexp_of(base, total, dtype[0]), largest, total]
