"""RMSNorm, LayerNorm and their gradients in jnp: the definition of what the kernels compute.

Rows lie along the last axis. `over`: the mesh axes that split the rows; each device has a part, and they exchange one or
two numbers per row. Kernels divide squares by the width before they add them; here that would cost a third more time on
a CPU, and a row's sum of squares may overflow.
"""

import functools

import jax.numpy as jnp
from jax import lax

from jaxkern._core.rows import MANY


def computing(dtype):
    """The dtype in which rows of `dtype` are normalised."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def _mean(x, over):
    total = jnp.sum(x, -1, keepdims=True)
    width = x.shape[-1] * (lax.psum(1, over) if over else 1)
    total = lax.psum(total, over) if over else total
    # As a float: JAX reads a Python int as an int32, which a width may exceed.
    return total / (float(max(width, 1)) if isinstance(width, int) else jnp.asarray(width, x.dtype))


def variance(x, mean, mean_of, quick):
    """The mean of (x - mean)^2; `mean_of` computes means.

    quick: what XLA:CPU runs fastest, the mean of squares minus the square of the mean, for rows whose mean is at most a quarter
    of a standard deviation from 0. There the difference loses nothing. Other rows do not change what a row gets.
    """
    of_deviations = lambda: mean_of(jnp.square(x - mean))
    # XLA:CPU compiles all of a short row to one loop.
    if not quick or not isinstance(x.size, int) or x.size < max(MANY, 513 * mean.size):
        return of_deviations()
    var = mean_of(x * x) - mean * mean
    near = 16 * mean * mean <= var
    return lax.cond(jnp.all(near), lambda: var, lambda: jnp.where(near, var, of_deviations()))


def statistics(s, operation, eps, over=(), quick=False):
    """(s - mean, rstd) of rows, in their computing type. quick: see `variance`."""
    s = s.astype(computing(s.dtype))
    mean_of = functools.partial(_mean, over=over)
    if operation == "rms_norm":
        return s, lax.rsqrt(mean_of(s * s) + eps)
    mean = mean_of(s)
    return s - mean, lax.rsqrt(variance(s, mean, mean_of, quick) + eps)


def norm(x, *rest, operation, extras, eps, dtype, algorithm, over=(), function=None, quick=False):
    """[y], or [y, x + residual]. rest: the operands that `extras` names, and arguments of `function`."""
    del algorithm
    named = dict(zip(extras.split(), rest))
    s = summed(x, named.get("residual"))
    deviation, rstd = statistics(s, operation, eps, over, quick)
    y = deviation * (rstd * named["scale"].astype(rstd.dtype) if "scale" in named else rstd)
    if "bias" in named:
        y = y + named["bias"].astype(y.dtype)
    if function is not None:
        (y,) = function.unrounded(y, *rest[len(named) :])
        y = jnp.broadcast_to(y, x.shape)
    return [y.astype(dtype), *([s] if "residual" in named else [])]


def summed(x, residual):
    """x + residual, rounded to the type of x."""
    if residual is None:
        return x
    wide = computing(x.dtype)
    return (x.astype(wide) + residual.astype(wide)).astype(x.dtype)


def norm_grad(s, g, *rest, operation, extras, eps, sums, algorithm, over=()):
    """[ds], then the gradients of scale and bias where `sums` has a dtype for them."""
    del algorithm
    named = dict(zip(extras.split(), rest, strict=True))
    deviation, rstd = statistics(s, operation, eps, over)
    z = deviation * rstd
    g = g.astype(z.dtype)
    h = g * named["scale"].astype(z.dtype) if "scale" in named else g
    ds = h - z * (rstd * _mean(h * deviation, over))  # which XLA can add in the pass that adds squares
    if operation == "layer_norm":
        ds = ds - _mean(h, over)
    ds = ds * rstd
    if "residual" in named:
        ds = ds + named["residual"].astype(z.dtype)
    rows = tuple(range(g.ndim - 1))
    found = [jnp.sum(part, rows).astype(d) for part, d in zip((g * z, g), sums) if d is not None]
    return [ds.astype(s.dtype), *found]


def norm_jvp(s, *rest, operation, extras, eps, dtype, sums, algorithm, over=()):
    """[dy], or with a residual [dy, ds]: the tangents of the results of `norm`.

    rest: scale if `extras` names it; then ds, and the tangents of scale and bias where `sums` has a dtype for them.
    """
    del algorithm
    names, rest = extras.split(), list(rest)
    scale = rest.pop(0) if "scale" in names else None
    ds, *tangents = rest
    of_scale, of_bias = (tangents.pop(0) if d is not None else None for d in sums)
    deviation, rstd = statistics(s, operation, eps, over)
    z = deviation * rstd
    t = ds.astype(z.dtype)
    dy = t - z * (rstd * _mean(t * deviation, over))
    if operation == "layer_norm":
        dy = dy - _mean(t, over)
    dy = dy * rstd
    if scale is not None:
        dy = dy * scale.astype(z.dtype)
    if of_scale is not None:
        dy = dy + z * of_scale.astype(z.dtype)
    if of_bias is not None:
        dy = dy + of_bias.astype(z.dtype)
    return [dy.astype(dtype), *([ds] if "residual" in names else [])]


def masked(x, where, args, *, residual, scale, bias, operation, eps, dtype, function):
    """`norm` with statistics of the elements where `where`, of the rank of x, is True; left to XLA.

    A row without such elements is 0 before bias is added.
    """
    s = wide = summed(x, residual).astype(computing(x.dtype))  # cotangents of both results are added in this type
    count = jnp.sum(jnp.broadcast_to(where, x.shape), -1, keepdims=True, dtype=wide.dtype)
    each = 1 / jnp.maximum(count, 1)
    total = lambda a: jnp.sum(jnp.where(where, a, 0), -1, keepdims=True)
    if operation == "layer_norm":
        wide = wide - total(wide) * each
    y = wide * jnp.where(count == 0, 0, lax.rsqrt(total(wide * each * wide) + eps))
    if scale is not None:
        y = y * scale.astype(y.dtype)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    if function is not None:
        (y,) = function.unrounded(y, *args)
    return [y.astype(dtype), *([] if residual is None else [s.astype(x.dtype)])]
