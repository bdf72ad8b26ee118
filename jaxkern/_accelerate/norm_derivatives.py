"""Derivatives of the primitives of norms in plain programs. Higher orders differentiate the references in jnp.

The residuals are x and scale: the backward pass computes the statistics again, in the read that it needs anyway.
"""

import functools

import jax
from jax.interpreters import ad

from jaxkern._accelerate import norm_reference as reference
from jaxkern._core import validate
from jaxkern._core.autodiff import defmultilinear, defvjp
from jaxkern._core.primitive import bind


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _norm(operands, primitives, active, params):
    return bind(primitives.forward, *operands, **dict(params))


def _forward(operands, primitives, active, params):
    named = dict(zip(dict(params)["extras"].split(), operands[1:]))
    return bind(primitives.forward, *operands, **dict(params)), (operands[0], named)


def _backward(primitives, active, params, kept, cotangents):
    (x, named), params = kept, dict(params)
    names = [None, *params["extras"].split()]
    wanted = [names[k] for k in active]
    sums = tuple(named[name].dtype if name in wanted else None for name in ("scale", "bias"))
    scale = [named["scale"]] if "scale" in named else []
    of = {k: params[k] for k in ("operation", "eps", "algorithm")}
    dx, *rest = bind(primitives.grad, x, *cotangents, *scale, extras="scale" if scale else "", sums=sums, **of)
    found = {None: dx, **dict(zip([k for k, d in zip(("scale", "bias"), sums) if d is not None], rest))}
    split = lambda name: validate.split_like(found[name], jax.typeof(named[name])) if name else dx
    return (tuple(split(name) if name in found else None for name in names),)


_norm.defvjp(_forward, _backward)


def _grad_transpose(primitives, operands, cotangents, params):
    dtype = (operands[1].aval if ad.is_undefined_primal(operands[1]) else operands[1]).dtype
    return bind(primitives.jvp, operands[0], *operands[2:], *cotangents, dtype=dtype, **params)


def _jvp_linear(params):
    first = 1 + params["extras"].split().count("scale")
    return range(first, first + 1 + sum(d is not None for d in params["sums"]))


def _jvp_transpose(primitives, operands, cotangents, params):
    scale = operands[1 : _jvp_linear(params)[0]]
    params = {k: v for k, v in params.items() if k != "dtype"}
    return bind(primitives.grad, operands[0], *cotangents, *scale, **params)


def define(primitives) -> None:
    """Defines the derivatives of the primitives of an operation."""
    defvjp(
        primitives.forward,
        lambda *operands, active, **params: _norm(operands, primitives, active, tuple(params.items())),
        differentiable=(0, 1, 2),
        tell_active=True,
    )
    transpose = functools.partial(_grad_transpose, primitives)
    defmultilinear(primitives.grad, reference.norm_grad, lambda _: (1,), transpose)
    defmultilinear(primitives.jvp, reference.norm_jvp, _jvp_linear, functools.partial(_jvp_transpose, primitives))
