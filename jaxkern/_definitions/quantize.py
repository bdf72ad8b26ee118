"""Quantisation of rows to 8 bits, with a scale for each row or with one that is given.

`mark`, here and below: as XLA:CPU runs it fastest, with maxima of floats, which lose NaN there, and without selects. Scales are
then NaN for rows that are not finite, and 8-bit numbers of such rows are anything: see `on_cpu`. An array holds 0 for finite
rows and NaN for others; with True it is computed. False: on XLA:CPU, but exact for all rows.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkern._core.algorithms import forced
from jaxkern._core.rows import worthwhile
from jaxkern._definitions.traced import row_function, runner
from jaxkern._engines.rows.primitive import apply, define

define("quantize_rows", makes_nan=False, narrow=True)


def quantized_rows(x, *given, dtype):
    """[q, scale] of rows along the last dimension, as `quantize`; without derivatives."""
    operands = [lax.stop_gradient(x), *given]
    return apply(row_function("quantize_rows", definition, operands, forced("quantize_rows"), dtype=dtype), operands)


def definition(x, *given, dtype):
    if runner() == "cpu":
        return on_cpu(quantize, -1, x, *given, dtype=dtype)
    return quantize(x, *given, dtype=dtype)


def limit(dtype) -> float:
    """The largest number of a type of 8 bits; of int8 the same on both sides of 0."""
    return 127.0 if jnp.dtype(dtype) == jnp.int8 else float(jnp.finfo(dtype).max)


def rounded(x, dtype, mark=None, finite=None):
    """float32 numbers rounded to a type of 8 bits, saturated; NaN becomes 0 in int8.

    finite: which rows have no infinity and no NaN; none of their numbers rounds to more than the limit. None: not known.
    """
    most, whole = limit(dtype), jnp.dtype(dtype) == jnp.int8
    if finite is None or (not fast(mark) and not whole):  # kernels clamp by the conversion to an 8-bit float
        x = lax.clamp(np.float32(-most), x, np.float32(most))
    if not whole:
        return x.astype(dtype)
    if mark is None:
        # The sum is rounded to the nearest integer, which is in its low bits: kernels have few units that round and convert.
        # x is rounded before, as elsewhere: halves of the largest number are ties.
        q = lax.bitcast_convert_type(lax.reduce_precision(x, 8, 23) + np.float32(1.5 * 2**23), jnp.int32)
    else:  # XLA:CPU would contract a product and the sum here and not there: the same number could round to either side
        q = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    return (q if fast(mark) else jnp.where(x == x if finite is None else finite, q, 0)).astype(jnp.int8)


def fast(mark) -> bool:
    """Whether results may be anything in rows that are not finite."""
    return mark is not None and mark is not False


def largest_of(x, axes, over=(), mark=None):
    """max|x| along axes that stay, as dimensions of size 1; NaN is the largest."""
    if fast(mark):
        mark = 0 * jnp.sum(x, axes, keepdims=True) if mark is True else mark
        return jnp.max(jnp.abs(x), axes, keepdims=True) + mark
    # In the order of the bits of magnitudes NaN is the largest; XLA:CPU's maximum of floats may lose it.
    bits = jnp.max(lax.bitcast_convert_type(jnp.abs(x), jnp.uint32), axes, initial=0, keepdims=True)
    return lax.bitcast_convert_type(lax.pmax(bits, over) if over else bits, jnp.float32)


def scaled(x, most, dtype, mark=None):
    """x in rows whose largest magnitude is `most`, rounded to a type of 8 bits whose largest number that becomes."""
    factor = jnp.where(most == 0, 1, jnp.minimum(limit(dtype) / most, np.finfo(np.float32).max))
    return rounded(x * factor, dtype, mark, finite=factor > 0)


def scale_of(most, dtype):
    """max|x| over the largest number of a type, as a product with its inverse: XLA divides by a constant that way, but not always."""
    return jnp.where(most == 0, 1, most * np.float32(1 / limit(dtype)))


def given_factor(scale):
    return jnp.minimum(1 / scale, np.finfo(np.float32).max)


def largest(x):
    """max|x| of all elements, in float32; NaN if there is one."""
    return largest_of(x.astype(jnp.float32), tuple(range(x.ndim))).reshape(())


def quantize(x, *given, dtype, over=(), mark=None):
    """[q, scale] of rows along the last dimension, which are split over the mesh axes `over`.

        scale = max|x| * (1 / most),  q = round(x * (most / max|x|))

    where `most` is the largest number of `dtype`. The scale of a row of zeros is 1. The scale of a row with NaN or infinity is NaN
    or infinite. given: a scale for all, float32 []; then q = round(x * (1 / given)), saturated, and the second result is max|x|.
    """
    wide = x.astype(jnp.float32)
    most = largest_of(wide, -1, over, mark)
    if given:
        return [rounded(wide * given_factor(given[0]), dtype, mark), most[..., 0]]
    return [scaled(wide, most, dtype, mark), scale_of(most, dtype)[..., 0]]


def on_cpu(f, marks, x, *rest, **params):
    """What XLA:CPU runs for `f`: with a mark, which its result number `marks` shows for rows that are not finite; then f itself."""
    exact = functools.partial(f, x, *rest, **params, mark=False)
    if not worthwhile(x):
        return exact()
    found = f(x, *rest, **params, mark=True)
    return lax.cond(jnp.isnan(jnp.sum(found[marks])), exact, lambda: found)
