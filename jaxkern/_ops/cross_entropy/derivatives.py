"""Derivatives of the loss and of its gradient."""

import functools

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxkern._core.autodiff import deflinear, defvjp
from jaxkern._core.primitive import bind, set_jvp
from jaxkern._ops.cross_entropy import reference
from jaxkern._ops.cross_entropy.primitive import (
    cross_entropy_both_p,
    cross_entropy_grad_p,
    cross_entropy_jvp_p,
    cross_entropy_p,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _cross_entropy(logits, rest, params):
    """The loss as a function that defines its derivatives. The residuals are the logits and two numbers per row."""
    return bind(cross_entropy_p, logits, *rest, **dict(params))


def _forward(logits, rest, params):
    found = bind(cross_entropy_p, logits, *rest, **dict(params))
    return found, (logits, rest, found[1:])


def _backward(params, kept, cotangents):
    logits, (labels, *mask), (largest, total, *count) = kept
    dx = bind(cross_entropy_grad_p, logits, labels, largest, total, cotangents[0], *count, *mask, **dict(params))
    return dx, (None,) * (1 + len(mask))


_cross_entropy.defvjp(_forward, _backward)
defvjp(
    cross_entropy_p,
    lambda logits, *rest, **params: _cross_entropy(logits, rest, tuple(params.items())),
    differentiable=(0,),
)


def _both_jvp(primals, tangents, **params):
    """Differentiates the two passes, one after the other."""
    _, labels, _, *mask = primals

    def f(logits, weight):
        loss, largest, total, *count = bind(cross_entropy_p, logits, labels, *mask, **params)
        dx = bind(cross_entropy_grad_p, logits, labels, largest, total, weight, *count, *mask, **params)
        return [loss, largest, total, *count, dx]

    along = [jnp.zeros_like(x) if type(t) is ad.Zero else t for x, t in zip(primals, tangents)]
    return jax.jvp(f, (primals[0], primals[2]), (along[0], along[2]))


set_jvp(cross_entropy_both_p, _both_jvp)


def _along_logits(f):
    """The derivative of f along the logits; its last operand is their tangent."""

    def jvp(logits, *rest, **params):
        return jax.jvp(lambda x: f(x, *rest[:-1], **params), (logits,), (rest[-1],))[1]

    return jvp


deflinear(cross_entropy_grad_p, 4, _along_logits(reference.gradient), transpose=cross_entropy_jvp_p)
deflinear(cross_entropy_jvp_p, 4, _along_logits(reference.transpose), transpose=cross_entropy_grad_p)
