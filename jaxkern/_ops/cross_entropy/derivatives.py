"""Derivatives of the loss and of its gradient."""

import functools

import jax
import jax.numpy as jnp

from jaxkern._core.autodiff import deflinear, defvjp
from jaxkern._core.primitive import bind, has_tangent, set_jvp
from jaxkern._ops.cross_entropy import reference
from jaxkern._ops.cross_entropy.primitive import (
    cross_entropy_both_p,
    cross_entropy_grad_p,
    cross_entropy_jvp_p,
    cross_entropy_p,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _cross_entropy(logits, labels, mask, params):
    """The loss as a function that defines its derivatives. The residuals are the logits and two numbers per row."""
    return bind(cross_entropy_p, logits, labels, mask, **dict(params))


def _forward(logits, labels, mask, params):
    found = bind(cross_entropy_p, logits, labels, mask, **dict(params))
    return found, (logits, labels, mask, found[1:])


def _backward(params, kept, cotangents):
    logits, labels, mask, residuals = kept
    return _gradient(logits, labels, mask, residuals, cotangents[0], **dict(params)), None, None


def _gradient(logits, labels, mask, residuals, weight, **params):
    largest, total, *count = residuals
    return bind(cross_entropy_grad_p, logits, labels, largest, total, weight, *(count or [None]), mask, **params)


_cross_entropy.defvjp(_forward, _backward)
defvjp(
    cross_entropy_p,
    lambda logits, labels, mask, **params: _cross_entropy(logits, labels, mask, tuple(params.items())),
    differentiable=(0,),
)


def _both_jvp(primals, tangents, **params):
    """Differentiates the two passes, one after the other."""
    _, labels, _, mask = primals

    def f(logits, weight):
        loss, *residuals = bind(cross_entropy_p, logits, labels, mask, **params)
        return [loss, *residuals, _gradient(logits, labels, mask, residuals, weight, **params)]

    along = [t if has_tangent(t) else jnp.zeros_like(x) for x, t in zip(primals[::2], tangents[::2])]
    return jax.jvp(f, primals[::2], tuple(along))


set_jvp(cross_entropy_both_p, _both_jvp)


def _along_logits(f):
    """The derivative of f along the logits; its last operand is their tangent."""

    def jvp(logits, *rest, **params):
        return jax.jvp(lambda x: f(x, *rest[:-1], **params), (logits,), (rest[-1],))[1]

    return jvp


deflinear(cross_entropy_grad_p, 4, _along_logits(reference.gradient), transpose=cross_entropy_jvp_p)
deflinear(cross_entropy_jvp_p, 4, _along_logits(reference.transpose), transpose=cross_entropy_grad_p)
