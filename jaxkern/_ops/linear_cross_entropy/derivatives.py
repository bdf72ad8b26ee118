"""Derivatives of the linear cross-entropy.

If the cotangent is a single number, as of a sum or a mean, the forward pass computes the gradients too, and the backward
pass multiplies them by it. The loss per row computes its logits again in the backward pass. Derivatives of higher order come
from the plain composition, which has all logits at once.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from jaxkern._core import compat
from jaxkern._core.primitive import bind, set_jvp, set_transpose
from jaxkern._ops.linear_cross_entropy import reference
from jaxkern._ops.linear_cross_entropy.primitive import (
    linear_cross_entropy_both_p,
    linear_cross_entropy_grad_p,
    linear_cross_entropy_jvp_p,
    linear_cross_entropy_p,
    linear_cross_entropy_sum_p,
)


def _active(*tangents):
    return tuple(t is not None and type(t) is not ad.Zero for t in (*tangents, None)[:3])


def _some(values, wanted):
    return [v for v, w in zip(values, wanted) if w]


def _loss_jvp(primals, tangents, *, spec):
    h, weight, labels, *bias = primals
    along = tangents[0], tangents[1], *tangents[3:]
    wanted = _active(*along)
    value = bind(linear_cross_entropy_p, *primals, spec=spec)
    if not any(wanted):
        return value, compat.zero_tangent(value)
    facts = {"spec": spec, "wanted": wanted, "biased": bool(bias)}
    return value, bind(linear_cross_entropy_jvp_p, h, weight, labels, *bias, *_some(along, wanted), **facts)


set_jvp(linear_cross_entropy_p, _loss_jvp)


def _sum_jvp(primals, tangents, *, spec):
    h, weight, labels, c, *bias = primals
    along = tangents[0], tangents[1], *tangents[4:]
    wanted = _active(*along)
    if any(wanted):
        scale = _scale(c) if h.dtype == jnp.float16 else None
        weights = c if scale is None else c / scale
        loss, *gradients = bind(
            linear_cross_entropy_both_p, h, weight, labels, weights, *bias, spec=spec, wanted=wanted
        )
        terms = [_inner(g, t, loss.dtype) for g, t in zip(gradients, _some(along, wanted))]
        if scale is not None:
            terms = [scale * t for t in terms]
    else:
        loss, terms = bind(linear_cross_entropy_p, h, weight, labels, *bias, spec=spec), []
    value = jnp.sum(c * loss)
    if type(tangents[3]) is not ad.Zero:
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


def _along(f, operands, tangents, indices):
    """The derivative of f(*operands) along the tangents at these indices; None if all are zero."""
    at = [k for k in indices if k < len(operands) and type(tangents[k]) is not ad.Zero]
    if not at:
        return None

    def g(*xs):
        given = list(operands)
        for k, x in zip(at, xs):
            given[k] = x
        return f(*given)

    return jax.jvp(g, [operands[k] for k in at], [tangents[k] for k in at])[1]


def _plus(a, b):
    return b if a is None else a if b is None else [x + y for x, y in zip(a, b)]


def _grad_jvp(primals, tangents, *, spec, wanted):
    """Linear in c; along the others, the derivative of the composition."""
    h, weight, labels, c, *bias = primals
    found = bind(linear_cross_entropy_grad_p, *primals, spec=spec, wanted=wanted)
    linear = None
    if type(tangents[3]) is not ad.Zero:
        linear = bind(linear_cross_entropy_grad_p, h, weight, labels, tangents[3], *bias, spec=spec, wanted=wanted)
    f = lambda *operands: reference.plain_gradient(*operands, spec=spec, wanted=wanted)
    total = _plus(linear, _along(f, primals, tangents, (0, 1, 4)))
    return found, [compat.zero_tangent(x) for x in found] if total is None else total


def _grad_transpose(cts, h, weight, labels, c, *bias, spec, wanted):
    if any(ad.is_undefined_primal(x) for x in (h, weight, labels, *bias)):
        raise NotImplementedError("jaxkern_linear_cross_entropy_grad is linear in its fourth operand only")
    active = [type(ct) is not ad.Zero for ct in cts]
    remaining = iter(active)
    kept = tuple(w and next(remaining) for w in wanted)
    if any(kept):
        facts = {"spec": spec, "wanted": kept, "biased": bool(bias)}
        ct = bind(linear_cross_entropy_jvp_p, h, weight, labels, *bias, *_some(cts, active), **facts)
    else:
        ct = ad.Zero(c.aval)
    return [None, None, None, ct, *[None] * len(bias)]


set_jvp(linear_cross_entropy_grad_p, _grad_jvp)
set_transpose(linear_cross_entropy_grad_p, _grad_transpose)


def _both_jvp(primals, tangents, *, spec, wanted):
    """Differentiates the two results, one after the other."""
    h, weight, labels, c, *bias = primals
    at = [k for k in (0, 1, 3, 4) if k < len(primals) and type(tangents[k]) is not ad.Zero]

    def f(*xs):
        given = list(primals)
        for k, x in zip(at, xs):
            given[k] = x
        h, weight, labels, c, *bias = given
        value = bind(linear_cross_entropy_p, h, weight, labels, *bias, spec=spec)
        return [value, *bind(linear_cross_entropy_grad_p, *given, spec=spec, wanted=wanted)]

    return jax.jvp(f, [primals[k] for k in at], [tangents[k] for k in at])


set_jvp(linear_cross_entropy_both_p, _both_jvp)


def _tangent_jvp(primals, tangents, *, spec, wanted, biased):
    """Linear in the tangents; along the others, the derivative of the composition."""
    params = {"spec": spec, "wanted": wanted, "biased": biased}
    first = 3 + biased
    found = bind(linear_cross_entropy_jvp_p, *primals, **params)
    terms = []
    active = [type(t) is not ad.Zero for t in tangents[first:]]
    if any(active):
        remaining = iter(active)
        kept = tuple(w and next(remaining) for w in wanted)
        operands = [*primals[:first], *_some(tangents[first:], active)]
        terms.append([bind(linear_cross_entropy_jvp_p, *operands, **params | {"wanted": kept})])

    def f(h, weight, labels, *rest):
        bias, along = rest[:biased], rest[biased:]
        operands = [h, weight, *bias]
        at = [k for k, w in enumerate(wanted) if w]

        def g(*xs):
            given = list(operands)
            for k, x in zip(at, xs):
                given[k] = x
            return reference.plain(given[0], given[1], labels, *given[2:], spec=spec)

        return [jax.jvp(g, [operands[k] for k in at], list(along))[1]]

    terms.append(_along(f, primals, tangents, (0, 1, 3) if biased else (0, 1)))
    total = None
    for term in terms:
        total = _plus(total, term)
    return found, compat.zero_tangent(found) if total is None else total[0]


def _tangent_transpose(ct, h, weight, labels, *rest, spec, wanted, biased):
    bias = rest[:biased]
    along = rest[biased:]
    if any(ad.is_undefined_primal(x) for x in (h, weight, labels, *bias)):
        raise NotImplementedError("jaxkern_linear_cross_entropy_jvp is linear in the tangents only")
    linear = [ad.is_undefined_primal(t) for t in along]
    if type(ct) is ad.Zero:
        cts = [ad.Zero(t.aval) if lin else None for t, lin in zip(along, linear)]
    else:
        remaining = iter(linear)
        kept = tuple(w and next(remaining) for w in wanted)
        found = iter(bind(linear_cross_entropy_grad_p, h, weight, labels, ct, *bias, spec=spec, wanted=kept))
        cts = [next(found) if lin else None for lin in linear]
    return [None] * (3 + biased) + cts


set_jvp(linear_cross_entropy_jvp_p, _tangent_jvp)
set_transpose(linear_cross_entropy_jvp_p, _tangent_transpose)
