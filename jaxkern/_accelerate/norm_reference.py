"""RMSNorm, LayerNorm and their gradients in jnp, for the primitives of norms in plain programs.

Rows lie along the last axis. `over`: the mesh axes that split the rows; each device has a part, and they exchange one or
two numbers per row.
"""

import functools

import jax.numpy as jnp
from jax import lax

from jaxkern._definitions.traced import computing


def _mean(x, over):
    total = jnp.sum(x, -1, keepdims=True)
    width = x.shape[-1] * (lax.psum(1, over) if over else 1)
    total = lax.psum(total, over) if over else total
    # As a float: JAX reads a Python int as an int32, which a width may exceed.
    return total / (float(max(width, 1)) if isinstance(width, int) else jnp.asarray(width, x.dtype))


def statistics(s, operation, eps, over=()):
    """(s - mean, rstd) of rows, in their computing type."""
    s = s.astype(computing(s.dtype))
    mean_of = functools.partial(_mean, over=over)
    if operation == "rms_norm":
        return s, lax.rsqrt(mean_of(s * s) + eps)
    mean = mean_of(s)
    return s - mean, lax.rsqrt(mean_of(jnp.square(s - mean)) + eps)


def norm(x, *rest, operation, extras, eps, dtype, algorithm, over=()):
    """[y]. rest: the operands that `extras` names."""
    del algorithm
    named = dict(zip(extras.split(), rest, strict=True))
    deviation, rstd = statistics(x, operation, eps, over)
    y = deviation * (rstd * named["scale"].astype(rstd.dtype) if "scale" in named else rstd)
    if "bias" in named:
        y = y + named["bias"].astype(y.dtype)
    return [y.astype(dtype)]


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
    rows = tuple(range(g.ndim - 1))
    found = [jnp.sum(part, rows).astype(d) for part, d in zip((g * z, g), sums) if d is not None]
    return [ds.astype(s.dtype), *found]


def norm_jvp(s, *rest, operation, extras, eps, dtype, sums, algorithm, over=()):
    """[dy], the tangent of the result of `norm`.

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
    return [dy.astype(dtype)]
