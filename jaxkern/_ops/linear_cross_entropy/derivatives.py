"""Derivatives of the linear cross-entropy.

If the cotangent is a single number, as of a sum or a mean, the forward pass computes the gradients too, and the backward
pass multiplies them by it. The loss per row computes its logits again in the backward pass. Derivatives of higher order come
from the plain composition, which has all logits at once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from jaxkern._core import compat
from jaxkern._core.arrays import of_some
from jaxkern._core.primitive import bind, has_tangent, set_jvp, set_transpose
from jaxkern._ops.linear_cross_entropy import reference
from jaxkern._ops.linear_cross_entropy.primitive import (
    linear_cross_entropy_both_p,
    linear_cross_entropy_grad_p,
    linear_cross_entropy_jvp_p,
    linear_cross_entropy_p,
    linear_cross_entropy_sum_p,
)


def _along(tangents, of):
    """The tangents of h, weight and bias, None where there is none; of: the positions of these."""
    return [tangents[k] if has_tangent(tangents[k]) else None for k in of]


def _present(values):
    return tuple(v is not None for v in values)


def _loss_jvp(primals, tangents, *, spec):
    along = _along(tangents, (0, 1, 3))
    value = bind(linear_cross_entropy_p, *primals, spec=spec)
    if not any(_present(along)):
        return value, compat.zero_tangent(value)
    return value, bind(linear_cross_entropy_jvp_p, *primals, *along, spec=spec)


set_jvp(linear_cross_entropy_p, _loss_jvp)


def _sum_jvp(primals, tangents, *, spec):
    h, weight, labels, c, bias = primals
    along = _along(tangents, (0, 1, 4))
    if any(_present(along)):
        scale = _scale(c) if h.dtype == jnp.float16 else None
        weights = c if scale is None else c / scale
        params = {"spec": spec, "wanted": _present(along)}
        loss, *gradients = bind(linear_cross_entropy_both_p, h, weight, labels, weights, bias, **params)
        terms = [_inner(g, t, loss.dtype) for g, t in zip(gradients, (t for t in along if t is not None))]
        if scale is not None:
            terms = [scale * t for t in terms]
    else:
        loss, terms = bind(linear_cross_entropy_p, h, weight, labels, bias, spec=spec), []
    value = jnp.sum(c * loss)
    if has_tangent(tangents[3]):
        terms.append(jnp.sum(loss * tangents[3]))
    return value, sum(terms[1:], start=terms[0]) if terms else compat.zero_tangent(value)


def _inner(gradient, t, dtype):
    """The inner product of a gradient with a tangent. Transposed, it multiplies the gradient with one rounding."""
    return jnp.sum(gradient.astype(dtype) * t.astype(dtype))


def _scale(c):
    """What weights are divided by before gradients are rounded to float16.

    Weights such as 1 / rows would make them subnormal, and a scale that the loss is multiplied with later, to prevent that,
    comes after the rounding. The scale is a power of
    two, so that it rounds nothing, and the sum of the divided weights at most 1024.
    """
    c = lax.stop_gradient(jnp.abs(c))
    scale = jnp.maximum(jnp.max(c, initial=0), jnp.sum(c) / 1024)
    return jnp.where((scale > 0) & jnp.isfinite(scale), jnp.exp2(jnp.ceil(jnp.log2(scale))), 1)


set_jvp(linear_cross_entropy_sum_p, _sum_jvp)

# ---- derivatives of the gradients


def _jvp(f, primals, tangents, at):
    """The derivative of f(*primals) along the tangents at these positions, a list; [] if all are zero."""
    at = [k for k in at if has_tangent(tangents[k])]
    along = [tangents[k] for k in at]
    return jax.jvp(of_some(f, primals, at), [primals[k] for k in at], along)[1] if at else []


def _summed(found, *terms):
    """(the results, the sum of the terms of their tangents); terms: lists, which may be empty."""
    terms = [term for term in terms if term]
    return found, [sum(ts[1:], start=ts[0]) for ts in zip(*terms)] if terms else list(map(compat.zero_tangent, found))


def _grad_jvp(primals, tangents, **params):
    """Linear in c; along the others, the derivative of the composition."""
    h, weight, labels, c, bias = primals
    found, linear = bind(linear_cross_entropy_grad_p, *primals, **params), []
    if has_tangent(tangents[3]):
        linear = bind(linear_cross_entropy_grad_p, h, weight, labels, tangents[3], bias, **params)
    f = functools.partial(reference.plain_gradient, **params)
    return _summed(found, linear, _jvp(f, primals, tangents, (0, 1, 4)))


def _grad_transpose(cts, h, weight, labels, c, bias, *, spec, wanted):
    if any(ad.is_undefined_primal(x) for x in (h, weight, labels, bias)):
        raise NotImplementedError("jaxkern_linear_cross_entropy_grad is linear in its fourth operand only")
    given = iter(cts)
    along = _along([next(given) if w else None for w in wanted], range(3))
    ct = ad.Zero(c.aval)
    if any(_present(along)):
        ct = bind(linear_cross_entropy_jvp_p, h, weight, labels, bias, *along, spec=spec)
    return [None, None, None, ct, None]


set_jvp(linear_cross_entropy_grad_p, _grad_jvp)
set_transpose(linear_cross_entropy_grad_p, _grad_transpose)


def _both_jvp(primals, tangents, *, spec, wanted):
    """Differentiates the two results, one after the other."""

    def f(h, weight, labels, c, bias):
        value = bind(linear_cross_entropy_p, h, weight, labels, bias, spec=spec)
        return [value, *bind(linear_cross_entropy_grad_p, h, weight, labels, c, bias, spec=spec, wanted=wanted)]

    at = [k for k in (0, 1, 3, 4) if has_tangent(tangents[k])]
    return jax.jvp(of_some(f, primals, at), [primals[k] for k in at], [tangents[k] for k in at])


set_jvp(linear_cross_entropy_both_p, _both_jvp)


def _tangent_jvp(primals, tangents, *, spec):
    """Linear in the tangents; along the others, the derivative of the composition."""
    operands, along = primals[:4], primals[4:]
    found, linear = bind(linear_cross_entropy_jvp_p, *primals, spec=spec), []
    more = _along(tangents, (4, 5, 6))
    if any(_present(more)):
        linear = [bind(linear_cross_entropy_jvp_p, *operands, *more, spec=spec)]

    def f(*operands):
        at = [k for k, t in zip((0, 1, 3), along) if t is not None]
        g = of_some(functools.partial(reference.plain, spec=spec), operands, at)
        return [jax.jvp(g, [operands[k] for k in at], [t for t in along if t is not None])[1]]

    found, (tangent,) = _summed([found], linear, _jvp(f, operands, tangents, (0, 1, 3)))
    return found[0], tangent


def _tangent_transpose(ct, h, weight, labels, bias, *along, spec):
    if any(ad.is_undefined_primal(x) for x in (h, weight, labels, bias)):
        raise NotImplementedError("jaxkern_linear_cross_entropy_jvp is linear in the tangents only")
    linear = tuple(ad.is_undefined_primal(t) for t in along)
    if type(ct) is ad.Zero:
        found = (ad.Zero(t.aval) for t in along if ad.is_undefined_primal(t))
    else:
        found = iter(bind(linear_cross_entropy_grad_p, h, weight, labels, ct, bias, spec=spec, wanted=linear))
    return [None] * 4 + [next(found) if lin else None for lin in linear]


set_jvp(linear_cross_entropy_jvp_p, _tangent_jvp)
set_transpose(linear_cross_entropy_jvp_p, _tangent_transpose)
