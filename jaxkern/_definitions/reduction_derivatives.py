"""Derivatives of the row reductions.

    reduce_sum     linear; its transpose spreads the cotangent over the row
    reduce_mean    likewise, divided by the count
    reduce_max     dx = g / ties where x is the maximum; reduce_min likewise
    logsumexp      dx = g * exp(x - largest) / total

The gradient of a masked element is 0, whatever the cotangent is. Gradients are an elementwise pass (and for ties another
read of x) that XLA fuses with its neighbours. The gradient of logsumexp does not use y, because exp(x - y) would magnify
the rounding error of y by |y|.
"""

import functools

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxkern._core import compat, validate
from jaxkern._core.autodiff import defvjp
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind, set_jvp, set_transpose
from jaxkern._definitions.reductions import (
    count,
    finite,
    logsumexp_p,
    logsumexp_statistics_p,
    reduce_max_p,
    reduce_mean_p,
    reduce_min_p,
    reduce_sum_p,
)


def _masked(x, mask):
    return jnp.where(mask[0], x, 0) if mask else x


def _deflinear(prim, spread):
    """Derivatives of a linear reduction, whose transpose is `spread(ct, shape, mask, axis)`."""

    def jvp(primals, tangents, **params):
        y = bind(prim, *primals, **params)
        if type(tangents[0]) is ad.Zero:
            return y, compat.zero_tangent(y)
        return y, bind(prim, tangents[0], *primals[1:], **params)

    def transpose(ct, x, *mask, axis, dtype, algorithm):
        if any(map(ad.is_undefined_primal, mask)):
            raise NotImplementedError(f"{prim.name} is linear in its first operand only")
        none = [None] * len(mask)
        if type(ct) is ad.Zero:
            return [ad.Zero(x.aval), *none]
        dx = spread(jnp.expand_dims(ct.astype(computing(x.aval.dtype)), axis), x.aval.shape, mask, axis)
        return [validate.split_like(dx.astype(x.aval.dtype), x.aval), *none]

    set_jvp(prim, jvp)
    set_transpose(prim, transpose)


_deflinear(reduce_sum_p, lambda ct, shape, mask, axis: _masked(jnp.broadcast_to(ct, shape), mask))
_deflinear(
    reduce_mean_p,
    lambda ct, shape, mask, axis: _masked(jnp.broadcast_to(ct / count(shape, mask, axis, ct.dtype), shape), mask),
)


def _defextreme(prim):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
    def f(x, mask, axis, dtype, algorithm):
        return bind(prim, x, *mask, axis=axis, dtype=dtype, algorithm=algorithm)

    def forward(x, mask, axis, dtype, algorithm):
        y = bind(prim, x, *mask, axis=axis, dtype=dtype, algorithm=algorithm)
        return y, (x, y, mask)

    def backward(axis, dtype, algorithm, residuals, g):
        x, y, mask = residuals
        y, g = (jnp.expand_dims(a, axis) for a in (y, g.astype(computing(x.dtype))))
        hits = (x == y) & mask[0] if mask else x == y
        ties = jnp.sum(hits, axis, keepdims=True, dtype=g.dtype)
        # A maximum that is NaN equals no element; its gradient is NaN. Without any element there is no gradient.
        ties = jnp.where((ties == 0) & (y == y), 1, ties)
        return _masked(hits * (g / ties), mask).astype(x.dtype), (None,) * len(mask)

    f.defvjp(forward, backward)
    defvjp(prim, lambda x, *mask, axis, dtype, algorithm: f(x, mask, axis, dtype, algorithm), differentiable=(0,))


_defextreme(reduce_max_p)
_defextreme(reduce_min_p)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _statistics(x, mask, params):
    return bind(logsumexp_statistics_p, x, *mask, **dict(params))


def _statistics_forward(x, mask, params):
    y, largest, total = bind(logsumexp_statistics_p, x, *mask, **dict(params))
    return [y, largest, total], (x, largest, total, mask)


def _statistics_backward(params, kept, cotangents):
    # The largest element is only the base of the sum; it has no gradient.
    x, *numbers, mask = kept
    of_y, _, of_total = cotangents
    g = of_y.astype(computing(x.dtype)) + jnp.where(jnp.isfinite(numbers[1]), of_total * numbers[1], 0)
    largest, total, g = (jnp.expand_dims(a, dict(params)["axis"]) for a in (*numbers, g))
    x = x.astype(g.dtype)
    if mask:  # a masked-out element may be infinite
        x = jnp.where(mask[0], x, -jnp.inf)
    alive = total != 0
    dx = jnp.exp(x - finite(largest)) * jnp.where(alive, g / jnp.where(alive, total, 1), 0)
    return _masked(dx, mask).astype(kept[0].dtype), (None,) * len(mask)


_statistics.defvjp(_statistics_forward, _statistics_backward)
defvjp(
    logsumexp_statistics_p, lambda x, *mask, **params: _statistics(x, mask, tuple(params.items())), differentiable=(0,)
)
defvjp(
    logsumexp_p,
    lambda x, *mask, axis, dtype, algorithm: _statistics(
        x, mask, (("axis", axis), ("algorithm", algorithm), ("dtype", (dtype, *[computing(x.dtype)] * 2)))
    )[0],
    differentiable=(0,),
)
