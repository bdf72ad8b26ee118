"""Derivatives of segment_softmax. The gradient is a primitive of its own, linear in g and its own transpose."""

import functools

import jax
import jax.numpy as jnp

from jaxkern._core.autodiff import deflinear, defvjp
from jaxkern._core.primitive import bind
from jaxkern._core.rows import computed
from jaxkern._ops.segment_softmax.primitive import segment_softmax_grad_p, segment_softmax_p
from jaxkern._ops.segment_softmax.reference import totals


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _vjp(data, index, order, rows, rules):
    return bind(segment_softmax_p, data, index, *order, rows=rows, rules=rules)


def _forward(data, index, order, rows, rules):
    y = bind(segment_softmax_p, data, index, *order, rows=rows, rules=rules)  # not _vjp, which has no derivative itself
    return y, (y, index, order)


def _backward(rows, rules, residuals, g):
    y, index, order = residuals
    return bind(segment_softmax_grad_p, y, g, index, *order, rows=rows, rules=rules), None, None


_vjp.defvjp(_forward, _backward)


def _grad_jvp(y, g, index, keys, order, dy, *, rows, rules):
    """dy * (g - sum(y * g)) - y * sum(dy * g); elements with y = 0, and their dy, do not contribute."""
    dtype, takes_part = y.dtype, y != 0
    y, g, dy = (jnp.where(takes_part, computed(a), 0) for a in (y, g, dy))
    of_segment = totals(index, rows, rules)
    slope = dy * (g - of_segment(y * g)) - y * of_segment(dy * g)
    return jnp.where(takes_part, slope, 0).astype(dtype)


defvjp(
    segment_softmax_p,
    lambda data, index, *order, rows, rules: _vjp(data, index, order, rows, rules),
    differentiable=(0,),
)
deflinear(segment_softmax_grad_p, 1, _grad_jvp, transpose=segment_softmax_grad_p)
