"""GroupNorm, BatchNorm and their gradients in jnp: the definition of what the kernels compute.

x is [*samples, *rows, groups, channels of a group, *inner]: `batch` dimensions of samples, and `channel` is the position of
the groups. A sample and a group have one mean and one variance, over all other dimensions; BatchNorm has no samples and
groups of one channel. Statistics are [*samples, groups]. scale, bias and their gradients are [*kept, groups, channels],
where kept are the first `keep` dimensions of the samples: those that vmap adds.
"""

import math

import jax.numpy as jnp
from jax import lax

from jaxkern._core.dtypes import computing


def reduced(ndim, batch, channel) -> tuple:
    """The dimensions that statistics are computed over."""
    return tuple(d for d in range(batch, ndim) if d != channel)


def spread(stat, ndim, batch, channel):
    """Statistics in the rank of x."""
    return jnp.expand_dims(stat, reduced(ndim, batch, channel))


def _parameters(scale, ndim, keep, channel, dtype):
    """scale or bias in the rank of x."""
    return jnp.expand_dims(scale.astype(dtype), (*range(keep, channel), *range(channel + 2, ndim)))


def _over_channels(x, batch, keep, channel, dtype):
    """The sum of x in the shape of scale."""
    return jnp.sum(x, (*range(keep, channel), *range(channel + 2, x.ndim))).astype(dtype)


def _count(x, batch, channel, dtype):
    """How many elements a statistic is of: a float, since JAX reads a Python int as an int32, or an array."""
    n = math.prod(x.shape[d] for d in reduced(x.ndim, batch, channel))
    return float(max(n, 1)) if isinstance(n, int) else jnp.asarray(n, dtype)


def moments(x, *, batch, channel, **_):
    """[mean, variance] of each sample and group."""
    wide, axes = x.astype(computing(x.dtype)), reduced(x.ndim, batch, channel)
    n = _count(x, batch, channel, wide.dtype)
    mean_of = lambda a: jnp.sum(a, axes, keepdims=True) / n
    mean = mean_of(wide)
    return [jnp.squeeze(a, axes) for a in (mean, mean_of(jnp.square(wide - mean)))]


def merged(mean, var, over):
    """The same of samples that are split evenly over mesh axes, with one message of two numbers per sample and group.

    Every device adds in the same order, and nothing cancels, as it would in a sum of squares.
    """
    means, variances = jnp.moveaxis(lax.all_gather(jnp.stack([mean, var]), over), 1, 0)
    first = means[0]
    mean = first + jnp.mean(means - first, 0)
    return [mean, jnp.mean(variances + (means - mean) ** 2, 0)]


def applied(x, mean, var, scale, bias, *, batch, keep, channel, eps, dtype, function=None, **_):
    """y, with these statistics. function: applied to it before it is rounded."""
    of = lambda stat: spread(stat, x.ndim, batch, channel)
    a = of(lax.rsqrt(var + eps))
    if scale is not None:
        a = a * _parameters(scale, x.ndim, keep, channel, a.dtype)
    y = (x.astype(a.dtype) - of(mean)) * a
    if bias is not None:
        y = y + _parameters(bias, x.ndim, keep, channel, a.dtype)
    if function is not None:
        (y,) = function.unrounded(y)
        y = jnp.broadcast_to(y, x.shape)
    return y.astype(dtype)


def norm(x, scale, bias, *, batch, channel, **params):
    """[y, mean, variance]"""
    mean, var = moments(x, batch=batch, channel=channel)
    return [applied(x, mean, var, scale, bias, batch=batch, channel=channel, **params), mean, var]


def sums(x, mean, var, g, *, batch, channel, eps, **_):
    """[sum of g, sum of g * z] over rows and inner, per sample and channel; z is x, normalised."""
    of = lambda stat: spread(stat, x.ndim, batch, channel)
    z = (x.astype(mean.dtype) - of(mean)) * of(lax.rsqrt(var + eps))
    g = g.astype(z.dtype)
    over = (*range(batch, channel), *range(channel + 2, x.ndim))
    return [jnp.sum(g, over), jnp.sum(g * z, over)]


def norm_grad(x, mean, var, scale, g, of_mean, of_var, *, batch, keep, channel, eps, sums, whole=None, split=1, **_):
    """[dx], then the gradients of scale and bias where `sums` has a dtype for them.

    whole: the result of `sums` for all devices; `split` devices share a sample.
    """
    of = lambda stat: spread(stat, x.ndim, batch, channel)
    rstd = lax.rsqrt(var + eps)
    z = (x.astype(mean.dtype) - of(mean)) * of(rstd)
    g = g.astype(z.dtype)
    n, axes = _count(x, batch, channel, z.dtype) * split, reduced(x.ndim, batch, channel)
    wide = None if scale is None else _parameters(scale, x.ndim, keep, channel, z.dtype)
    if whole is None:
        h = g if wide is None else g * wide
        shift, slope = jnp.sum(h, axes), jnp.sum(h * z, axes)
    else:
        h = [jnp.expand_dims(a, (*range(batch, channel), *range(channel + 2, x.ndim))) for a in whole]
        shift, slope = (jnp.sum(a if wide is None else a * wide, axes) for a in h)
        h = g if wide is None else g * wide
    shift, slope = shift / n - of_mean / (n * rstd), slope / n - 2 * of_var / (n * rstd * rstd)
    dx = of(rstd) * (h - of(shift) - z * of(slope))
    if whole is None:
        parts = [_over_channels(a, batch, keep, channel, d) for a, d in zip((g * z, g), sums) if d is not None]
    else:
        kept = tuple(range(keep, batch))
        parts = [jnp.sum(a, kept).astype(d) for a, d in zip(whole[::-1], sums) if d is not None]
    return [dx.astype(x.dtype), *parts]


def norm_jvp(x, mean, var, scale, t, of_scale, of_bias, *, batch, keep, channel, eps, dtype, **_):
    """[dy, dmean, dvariance]: the tangents of the results of `norm`, from tangents of x, scale and bias."""
    t = t.astype(mean.dtype)
    of = lambda stat: spread(stat, x.ndim, batch, channel)
    rstd = lax.rsqrt(var + eps)
    deviation = x.astype(mean.dtype) - of(mean)
    z = deviation * of(rstd)
    n, axes = _count(x, batch, channel, z.dtype), reduced(x.ndim, batch, channel)
    dmean, dvar = jnp.sum(t, axes) / n, 2 * jnp.sum(t * deviation, axes) / n
    dy = of(rstd) * (t - of(dmean) - z * of(0.5 * dvar * rstd))
    wide = lambda a: _parameters(a, x.ndim, keep, channel, z.dtype)
    if scale is not None:
        dy = dy * wide(scale)
    if of_scale is not None:
        dy = dy + z * wide(of_scale)
    if of_bias is not None:
        dy = dy + wide(of_bias)
    return [dy.astype(dtype), dmean, dvar]
