"""Every derivative of a primitive from one `jax.custom_vjp`.

JAX refuses to apply forward mode to a `jax.custom_vjp` function. Users do not call that function here: it is the source
of the primitive's JVP rule. The forward derivative is the transpose of the backward rule. Reverse mode transposes it once
more, which gives the backward rule itself.
"""

import functools

import jax
from jax.interpreters import ad

from jaxkern._core import compat, validate
from jaxkern._core.arrays import of_some
from jaxkern._core.primitive import bind, has_tangent, set_jvp, set_transpose


def defvjp(prim, f_vjp, differentiable, tell_active=False):
    """Defines the derivatives of `prim` as the derivatives of `f_vjp`.

    f_vjp(*operands, **params): returns the same as `prim`, one array or several. A `jax.custom_vjp` inside it binds
        `prim`, and its backward rule is linear in the cotangent.
    differentiable: positions of the operands that have a derivative; some may be absent.
    tell_active: also pass `active`, the positions of the operands with a nonzero tangent.
    """

    def rule(primals, tangents, **params):
        active = [k for k in differentiable if k < len(tangents) and has_tangent(tangents[k])]

        told = {"active": tuple(active)} if tell_active else {}

        f = of_some(functools.partial(f_vjp, **told, **params), primals, active)
        if not active:
            y = f()
            return y, jax.tree.map(compat.zero_tangent, y)
        y, pull = jax.vjp(f, *(primals[k] for k in active))
        (dy,) = jax.linear_transpose(pull, y)(tuple(tangents[k] for k in active))
        return y, dy

    set_jvp(prim, rule)


def deflinear(prim, position, jvp, transpose):
    """Derivatives of `prim`, which is linear in the operand at `position` but not in the first.

    jvp(*operands, tangent of the first, **params): the derivative along the first operand.
    transpose: the primitive that is the transpose of `prim`; it takes the cotangent at the same position.
    """

    def jvp_rule(primals, tangents, **params):
        out = bind(prim, *primals, **params)
        terms = []
        if has_tangent(tangents[position]):
            operands = list(primals)
            operands[position] = tangents[position]
            terms.append(bind(prim, *operands, **params))
        if has_tangent(tangents[0]):
            terms.append(jvp(*primals, tangents[0], **params))
        if not terms:
            return out, compat.zero_tangent(out)
        return out, sum(terms[1:], start=terms[0])

    set_jvp(prim, jvp_rule)
    deftranspose(prim, position, transpose)


def deftranspose(prim, position, transpose):
    """Defines the primitive `transpose` as the transpose of `prim`, which is linear in the operand at `position`."""

    def rule(ct, *operands, **params):
        linear = operands[position]
        if any(ad.is_undefined_primal(x) for k, x in enumerate(operands) if k != position):
            raise NotImplementedError(f"{prim.name} is linear in operand {position} only")
        cts = [None] * len(operands)
        if type(ct) is ad.Zero:
            cts[position] = ad.Zero(linear.aval)
        else:
            cts[position] = bind(transpose, *operands[:position], ct, *operands[position + 1 :], **params)
        return cts

    set_transpose(prim, rule)


def linear_jvp(prim, reference, linear, primals, tangents, **params):
    """The JVP of a primitive that is linear in the operands at the positions `linear`, together, and in no other."""
    out = bind(prim, *primals, **params)
    terms = []
    if any(has_tangent(tangents[k]) for k in linear):
        operands = list(primals)
        for k in linear:
            operands[k] = None if tangents[k] is None else ad.instantiate_zeros(tangents[k])
        terms.append(bind(prim, *operands, **params))
    active = [k for k, t in enumerate(tangents) if k not in linear and has_tangent(t)]
    if active:
        f = of_some(functools.partial(reference, **params), primals, active)
        terms.append(jax.jvp(f, [primals[k] for k in active], [tangents[k] for k in active])[1])
    if not terms:
        return out, jax.tree.map(compat.zero_tangent, out)
    if not prim.multiple_results:
        return out, sum(terms[1:], start=terms[0])
    return out, [sum(ts[1:], start=ts[0]) for ts in zip(*terms)]


def defmultilinear(prim, f, linear, transpose):
    """Derivatives of `prim`, which is linear in its operands at the positions `linear`, together, and whose reference is f.

    transpose(operands, cotangents, **params): the cotangents of those operands; None for one that is absent.
    """

    def jvp(primals, tangents, **params):
        return linear_jvp(prim, f, linear, primals, tangents, **params)

    def rule(cotangents, *operands, **params):
        if any(ad.is_undefined_primal(x) for k, x in enumerate(operands) if k not in linear):
            raise NotImplementedError(f"{prim.name} is linear in operands {linear} only")
        found = [None] * len(operands)
        if all(type(ct) is ad.Zero for ct in cotangents):
            parts = [None] * len(linear)
        else:
            cotangents = [ad.instantiate_zeros(ct) for ct in cotangents]
            parts = transpose(operands, cotangents, **params)
        for k, part in zip(linear, parts, strict=True):
            if ad.is_undefined_primal(operands[k]):
                aval = operands[k].aval
                found[k] = ad.Zero(aval) if part is None else validate.split_like(part, aval)
        return found

    set_jvp(prim, jvp)
    set_transpose(prim, rule)
