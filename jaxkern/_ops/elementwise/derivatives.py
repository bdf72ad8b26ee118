"""Derivatives of the elementwise operations, forward and reverse, to any order.

The first derivative is a kernel if all gradients that the kernel writes are needed. Higher derivatives use jnp.
"""

import functools

import jax
from jax.interpreters import ad

from jaxkern._core import compat
from jaxkern._core.arrays import of_some
from jaxkern._core.autodiff import defvjp
from jaxkern._core.primitive import bind, set_jvp, set_transpose
from jaxkern._ops.elementwise import reference


def differentiate(row, forward_p, gradient_p):
    """Defines all derivatives of `forward_p` by a custom_vjp whose residuals are the operands."""
    count = len(row.arrays) + len(row.parameters)

    @functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
    def f(operands, wanted, split, algorithm):
        return bind(forward_p, *operands, split=split, algorithm=algorithm)

    def forward(operands, wanted, split, algorithm):
        return bind(forward_p, *operands, split=split, algorithm=algorithm), operands

    def backward(wanted, split, algorithm, operands, g):
        ds = [None] * len(operands)
        parameters = operands[len(operands) - len(row.parameters) :]
        if split >= 0:
            (ds[0],) = bind(gradient_p, operands[0], g, *parameters, split=split, algorithm=algorithm)
            return (tuple(ds),)
        # One kernel, unless it would write a gradient that is not needed. XLA sums over broadcast dimensions.
        if gradient_p is not None and all(k in wanted and operands[k].shape == g.shape for k in row.gradient):
            used = [operands[k] for k in reference.used(row)]
            for k, d in zip(row.gradient, bind(gradient_p, *used, g, *parameters, split=-1, algorithm=algorithm)):
                ds[k] = d
        rest = [k for k in wanted if ds[k] is None]
        for k, d in zip(rest, reference.pullback(row, operands, rest, g)):
            ds[k] = d
        return (tuple(ds),)

    f.defvjp(forward, backward)

    def call(*operands, active=(), split, algorithm="auto"):
        return f(operands, active, split, algorithm)

    defvjp(forward_p, call, differentiable=tuple(range(count)), tell_active=True)
    return f


def gradient_rules(row, gradient_p, tangent_p):
    """Derivatives of `gradient_p`, which is linear in the cotangent, and of its transpose `tangent_p`."""

    def jvp_rule(prim, reference, linear):
        def rule(primals, tangents, *, split, algorithm="auto"):
            out = bind(prim, *primals, split=split, algorithm=algorithm)
            active = [k for k, t in enumerate(tangents) if type(t) is not ad.Zero]
            if active == linear(split):
                operands = list(primals)
                for k in active:
                    operands[k] = tangents[k]
                return out, bind(prim, *operands, split=split, algorithm=algorithm)

            f = of_some(functools.partial(reference, row, split=split), primals, active)
            return out, jax.jvp(f, [primals[k] for k in active], [tangents[k] for k in active])[1]

        return rule

    def transpose_gradient(cts, *operands, split, algorithm="auto"):
        k, _ = reference.operand_counts(row, split)
        result = [None] * len(operands)
        g = operands[k].aval
        if all(type(ct) is ad.Zero for ct in cts):
            result[k] = ad.Zero(g)
            return result
        cts = [ad.zeros_like_aval(ct.aval) if type(ct) is ad.Zero else ct for ct in cts]
        transposed = [*operands[:k], *cts, *operands[k + 1 :]]
        y = bind(tangent_p, *transposed, split=split, algorithm=algorithm)
        result[k] = y[0] if tangent_p.multiple_results else y
        return result

    def transpose_tangent(ct, *operands, split, algorithm="auto"):
        k, n = reference.operand_counts(row, split)
        result = [None] * len(operands)
        linear = [i for i in range(k, k + n) if ad.is_undefined_primal(operands[i])]
        if type(ct) is ad.Zero:
            ds = [ad.Zero(x.aval) if i in linear else None for i, x in enumerate(operands)][k : k + n]
        else:
            ds = bind(gradient_p, *operands[:k], ct, *operands[k + n :], split=split, algorithm=algorithm)
        for i in linear:
            result[i] = ds[i - k]
        return result

    second = lambda split: [reference.operand_counts(row, split)[0]]
    set_jvp(gradient_p, jvp_rule(gradient_p, reference.gradient, second))
    set_transpose(gradient_p, transpose_gradient)
    if tangent_p is not gradient_p:
        between = lambda split: list(
            range(reference.operand_counts(row, split)[0], sum(reference.operand_counts(row, split)))
        )
        set_jvp(tangent_p, jvp_rule(tangent_p, reference.tangent, between))
        set_transpose(tangent_p, transpose_tangent)


def no_derivative(prim):
    def rule(primals, tangents, **params):
        y = bind(prim, *primals, **params)
        return y, compat.zero_tangent(y)

    set_jvp(prim, rule)
