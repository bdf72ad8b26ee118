"""Sums, means, extremes and logsumexp of rows: their definitions, and the primitives that run them.

    reduce_sum_p              sum(x)
    reduce_mean_p             sum(x) / count
    reduce_max_p              max(x)
    reduce_min_p              min(x)
    logsumexp_p               log(sum(exp(x)))
    logsumexp_statistics_p    logsumexp, the largest element and the sum of exp(x - largest)

along one axis, which the result lacks. Operands: x, and perhaps a boolean mask of the rank of x: the elements to reduce. `dtype` is
the type of the result, or the types of several.

Where the rows are split over devices, each reduces its part, and they exchange a few numbers.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkern._core import algorithms, partition
from jaxkern._core.dtypes import computing
from jaxkern._core.launch import Plan
from jaxkern._core.primitive import bind
from jaxkern._core.rows import largest_of, row_primitive
from jaxkern._definitions.traced import row_function
from jaxkern._engines.rows import plan, queries
from jaxkern._ops.logsumexp import by_hand as masked_logsumexp

FLOATS = ("float16", "bfloat16", "float32", "float64")
NUMBERS = tuple(dtype for dtype in queries.DTYPES if dtype != "bool")


def count(shape, mask, axis, dtype):
    """The number of unmasked elements of each row, with a dimension of size 1 for the axis."""
    if not mask:
        return jnp.asarray(shape[axis], dtype)
    return jnp.sum(jnp.broadcast_to(mask[0], shape), axis, keepdims=True, dtype=dtype)


def _where(mask):
    return mask[0] if mask else None


# ---- definitions


def reduce_sum(x, *mask, axis, dtype, algorithm=None):
    wide = computing(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype
    return jnp.sum(x, axis, dtype=wide, where=_where(mask)).astype(dtype)


def reduce_mean(x, *mask, axis, dtype, algorithm=None):
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


def _extreme(method, end, x, *mask, axis, dtype, algorithm=None):
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


def statistics(x, *mask, axis, dtype, algorithm=None):
    largest = largest_of(x, mask, axis, least=-jnp.inf)
    return _of_largest(_kept(x, mask), axis, largest, _plus, dtype)


def _plus(total, base):
    return jnp.log(total) + base


def _of_largest(x, axis, largest, plus_log, dtype):
    base = finite(largest)
    total = jnp.sum(jnp.exp(x - base), axis)
    base, largest = (jnp.squeeze(a, axis) for a in (base, largest))
    return [_in(plus_log(total, base), dtype[0]), largest, total]


def _kept(x, mask):
    x = x.astype(computing(x.dtype))
    return jnp.where(mask[0], x, -jnp.inf) if mask else x


def _in(y, dtype):
    least, _ = bounds(dtype)
    return (y if math.isinf(least) else jnp.maximum(y, least)).astype(dtype)


def logsumexp(x, *mask, axis, dtype, algorithm=None):
    return statistics(x, *mask, axis=axis, dtype=(dtype,))[0]


def _statistics_in_kernels(x, *mask, axis, dtype):
    """The same, with the maximum of the numbers that are subtracted from it, so that both take one pass, and a precise logarithm."""
    x = _kept(x, mask)
    largest = jnp.max(x, axis, keepdims=True, initial=-jnp.inf)
    y, most, total = _of_largest(x, axis, largest, _plus_log if dtype[0] == jnp.float32 else _plus, dtype)
    return [jnp.where(jnp.isfinite(most), y, most.astype(y.dtype)), most, total]


def _logsumexp_in_kernels(x, *mask, axis, dtype):
    return _statistics_in_kernels(x, *mask, axis=axis, dtype=(dtype,))[0]


def _plus_log(total, base):
    """log(total) + base in float32, for finite and positive totals.

    The error of a logarithm is relative to it, and the logarithm may be larger than the result. So total = m * 2^k with m near 1,
    whose logarithm and error are small. The high part of k * log(2) is exact, and the rounding error of its sum with base
    is added to the rest.
    """
    bits = lax.bitcast_convert_type(total, jnp.int32)
    k = (bits - 0x3F3504F3) >> 23  # the bits of sqrt(1/2)
    m = lax.bitcast_convert_type(bits - (k << 23), jnp.float32)
    k = k.astype(jnp.float32)
    high = k * float.fromhex("0x1.62e4p-1")  # the upper 16 bits of log(2)
    rest = k * float.fromhex("0x1.7f7d1cp-20") + jnp.log(m)
    y = base + high
    of_high = y - base
    return y + ((base - (y - of_high)) + (high - of_high) + rest)


# ---- rows that are split over devices: `over` are the axes of the mesh


def _sum_of_parts(prim, x, *mask, over, axis, dtype, algorithm):
    wide = computing(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype
    return lax.psum(bind(prim, x, *mask, axis=axis, dtype=wide, algorithm=algorithm), over).astype(dtype)


def _mean_of_parts(prim, x, *mask, over, axis, dtype, algorithm):
    wide = computing(dtype)
    total = bind(reduce_sum_p, x, *mask, axis=axis, dtype=wide, algorithm=algorithm)
    n = count(x.shape, mask, axis, wide)
    if mask:
        total, n = lax.psum(jnp.stack([total, jnp.broadcast_to(jnp.squeeze(n, axis), total.shape)]), over)
    else:  # parts are equal
        total, n = lax.psum(total, over), n * lax.axis_size(over)
    return (total / n).astype(dtype)


def _extreme_of_parts(over_devices, prim, x, *mask, over, axis, dtype, algorithm):
    return over_devices(bind(prim, x, *mask, axis=axis, dtype=dtype, algorithm=algorithm), over)


def _logsumexp_of_parts(prim, *operands, dtype, **params):
    return _statistics_of_parts(prim, *operands, dtype=(dtype,), **params)[0]


def _statistics_of_parts(prim, x, *mask, over, axis, dtype, algorithm):
    _, largest, total = statistics_of(x, *mask, axis=axis, algorithm=algorithm)
    largest, total = partition.gathered([largest, total], over)
    whole = jnp.max(largest, 0)
    base = finite(whole)
    # Where a part is empty, or its largest element infinite or NaN, its total needs no rescaling.
    total = jnp.sum(total * jnp.where(jnp.isfinite(largest), jnp.exp(largest - base), 1), 0)
    whole = jnp.where(jnp.isnan(total), jnp.nan, whole)
    return [_in(jnp.log(total) + base, dtype[0]), whole, total]


# ---- primitives

# The definitions that kernels are generated from.
IN_KERNELS = {
    "reduce_sum": reduce_sum,
    "reduce_mean": reduce_mean,
    "reduce_max": reduce_max,
    "reduce_min": reduce_min,
    "logsumexp": _logsumexp_in_kernels,
    "logsumexp_statistics": _statistics_in_kernels,
}


def _planned(name, device, operands, results, *, axis, dtype, algorithm):
    operation, by_hand = name.removesuffix("_statistics"), None
    if operation == "logsumexp":
        by_hand = masked_logsumexp.launches(device, operands, results, axis=axis, algorithm=algorithm)
    static = {"row": axis - operands[0].ndim, "axis": axis, "dtype": dtype}
    make = functools.partial(row_function, operation, IN_KERNELS[name], operands, **static)
    generated = functools.partial(plan.plan, device, operands, results, alone=True)
    if by_hand is None:
        return generated(function=make(algorithm))
    with algorithms.force({operation: "auto"}):
        found = generated(function=make("auto"))
    return found and Plan(masked_logsumexp.BY_HAND, by_hand, found.scratch, found.unaligned or found.launches)


def _primitive(name, definition, split, dtypes=FLOATS, **options):
    launches = functools.partial(_planned, name)
    return row_primitive(f"jaxkern_{name}", 1, definition, launches, split, dtypes=dtypes, **options)


algorithms.register(queries, "reduce_sum", "reduce_mean", "reduce_max", "reduce_min")
algorithms.register(masked_logsumexp, "logsumexp")
_largest, _smallest = (functools.partial(_extreme_of_parts, of) for of in (partition.largest, partition.smallest))
reduce_sum_p = _primitive("reduce_sum", reduce_sum, _sum_of_parts, queries.DTYPES)
reduce_mean_p = _primitive("reduce_mean", reduce_mean, _mean_of_parts)
reduce_max_p = _primitive("reduce_max", reduce_max, _largest, NUMBERS)
reduce_min_p = _primitive("reduce_min", reduce_min, _smallest, NUMBERS)
logsumexp_p = _primitive("logsumexp", logsumexp, _logsumexp_of_parts)
logsumexp_statistics_p = _primitive("logsumexp_statistics", statistics, _statistics_of_parts, several=True)


def statistics_of(x, *mask, axis, algorithm, dtype=None):
    """logsumexp of each row in `dtype` (default: of x), the row's largest element, and the sum of exp(x - largest).

    The sum is 0 where the largest element is -inf, and equals it where it is inf or NaN.
    """
    wide = computing(x.dtype)
    return bind(logsumexp_statistics_p, x, *mask, axis=axis, algorithm=algorithm, dtype=(dtype or x.dtype, wide, wide))
