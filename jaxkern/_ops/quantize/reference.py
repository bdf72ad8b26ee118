"""Quantisation in jnp: what the kernel computes.

`mark`, here and below: as XLA:CPU runs it fastest, with maxima of floats, which lose NaN there, and without selects. Scales are
then NaN for rows that are not finite, and 8-bit numbers of such rows are anything: see `on_cpu`. An array holds 0 for finite
rows and NaN for others; with True it is computed.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkern._core.rows import MANY


def limit(dtype) -> float:
    """The largest number of a type of 8 bits; of int8 the same on both sides of 0."""
    return 127.0 if jnp.dtype(dtype) == jnp.int8 else float(jnp.finfo(dtype).max)


def rounded(x, dtype, mark=None, within=False):
    """float32 numbers rounded to a type of 8 bits, saturated; NaN becomes 0 in int8. within: none exceeds the limit."""
    most = limit(dtype)
    x = x if within and mark is not None else jnp.clip(x, -most, most)
    if jnp.dtype(dtype) == jnp.int8:
        x = jnp.round(x) if mark is not None else jnp.where(jnp.isnan(x), 0, jnp.round(x))
    return x.astype(dtype)


def _largest(x, axes, over=(), mark=None):
    """max|x| along axes that stay, as dimensions of size 1; NaN is the largest."""
    if mark is not None:
        mark = 0 * jnp.sum(x, axes, keepdims=True) if mark is True else mark
        return jnp.max(jnp.abs(x), axes, keepdims=True) + mark
    # In the order of the bits of magnitudes NaN is the largest; XLA:CPU's maximum of floats may lose it.
    bits = jnp.max(lax.bitcast_convert_type(jnp.abs(x), jnp.uint32), axes, initial=0, keepdims=True)
    return lax.bitcast_convert_type(lax.pmax(bits, over) if over else bits, jnp.float32)


def _factor(most, dtype):
    return jnp.where(most == 0, 1, jnp.minimum(limit(dtype) / most, np.finfo(np.float32).max))


def _scale(most, dtype):
    return jnp.where(most == 0, 1, most / limit(dtype))


def _given_factor(scale):
    return jnp.minimum(1 / scale, np.finfo(np.float32).max)


def largest(x):
    """max|x| of all elements, in float32; NaN if there is one."""
    return _largest(x.astype(jnp.float32), tuple(range(x.ndim))).reshape(())


def quantize(x, *given, dtype, over=(), mark=None):
    """(q, scale) of rows along the last dimension; `over`: the mesh axes that split it.

    given: a scale for all, float32 []; then the second result is max|x| of each row.
    """
    wide = x.astype(jnp.float32)
    most = _largest(wide, -1, over, mark)
    if given:
        return [rounded(wide * _given_factor(given[0]), dtype, mark), most[..., 0]]
    return [rounded(wide * _factor(most, dtype), dtype, mark, within=True), _scale(most, dtype)[..., 0]]


def quantize_tiles(x, *given, dtype, mark=None):
    """(q, q_t, scale, scale_t) of x [..., M, 128, N, 128], matrices of M by N tiles.

    q like x, q_t [..., N, 128, M, 128], its transpose; scale [..., M, 128, N], one for 128 neighbours of a row, and scale_t
    [..., N, 128, M]. given: a scale for all, float32 []; then (q, q_t, max|x| of each tile [..., M, N]).
    """
    wide = x.astype(jnp.float32)
    turned = lambda a: jnp.moveaxis(a, (-4, -3), (-2, -1))
    if given:
        q = rounded(wide * _given_factor(given[0]), dtype, mark)
        return [q, turned(q), _largest(wide, (-3, -1), mark=mark)[..., 0, :, 0]]
    of_rows, of_columns = (_largest(wide, axis, mark=mark) for axis in (-1, -3))
    q, turned_q = (rounded(wide * _factor(most, dtype), dtype, mark, True) for most in (of_rows, of_columns))
    scale_t = turned(_scale(of_columns, dtype))
    return [q, turned(turned_q), _scale(of_rows, dtype)[..., 0], scale_t[..., 0]]


def on_cpu(f, marks, x, *rest, **params):
    """What XLA:CPU runs for `f`: with a mark, which its result number `marks` shows for rows that are not finite; then f itself."""
    exact = functools.partial(f, x, *rest, **params)
    if x.size < MANY:
        return exact()
    found = f(x, *rest, **params, mark=True)
    return lax.cond(jnp.isnan(jnp.sum(found[marks])), exact, lambda: found)
