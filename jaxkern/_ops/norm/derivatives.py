"""Derivatives of RMSNorm and LayerNorm. Higher orders differentiate the references in jnp.

The residuals are s = x + residual and scale: the backward pass computes the statistics again, in the read that it needs
anyway. With a function before the store they are the operands, and the backward pass is that of the norm, whose result it
computes again, and of the function as XLA has it.
"""

import functools

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxkern._core import validate
from jaxkern._core.autodiff import defmultilinear, defvjp
from jaxkern._core.primitive import bind
from jaxkern._ops.norm import reference
from jaxkern._ops.norm.primitive import PRIMITIVES

_MOST = 256  # operands


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _norm(operands, primitives, active, params):
    return bind(primitives.forward, *operands, **dict(params))


def _forward(operands, primitives, active, params):
    params = dict(params)
    named = dict(zip(params["extras"].split(), operands[1:]))
    results = bind(primitives.forward, *operands, **params)
    return results, (results[-1] if "residual" in named else operands[0], named)


def _backward(primitives, active, params, kept, cotangents):
    (s, named), params = kept, dict(params)
    names = [None, *params["extras"].split()]
    wanted = [names[k] for k in active]
    sums = tuple(named[name].dtype if name in wanted else None for name in ("scale", "bias"))
    extras = " ".join(name for name in ("residual", "scale") if name in named)
    scale = [named["scale"]] if "scale" in named else []
    of = {k: params[k] for k in ("operation", "eps", "algorithm")}
    ds, *rest = bind(primitives.grad, s, *cotangents, *scale, extras=extras, sums=sums, **of)
    found = {None: ds, "residual": ds, **dict(zip([k for k, d in zip(("scale", "bias"), sums) if d is not None], rest))}
    split = lambda name: validate.split_like(found[name], jax.typeof(named[name])) if name else ds
    return (tuple(split(name) if name in found else None for name in names),)


_norm.defvjp(_forward, _backward)


def _grad_linear(params):
    return range(1, 2 + params["extras"].split().count("residual"))


def _grad_transpose(primitives, operands, cotangents, params):
    scale = operands[len(_grad_linear(params)) + 1 :]
    dtype = (operands[1].aval if ad.is_undefined_primal(operands[1]) else operands[1]).dtype
    return bind(primitives.jvp, operands[0], *scale, *cotangents, dtype=dtype, **params)


def _jvp_linear(params):
    first = 1 + params["extras"].split().count("scale")
    return range(first, first + 1 + sum(d is not None for d in params["sums"]))


def _jvp_transpose(primitives, operands, cotangents, params):
    scale = operands[1 : _jvp_linear(params)[0]]
    params = {k: v for k, v in params.items() if k != "dtype"}
    return bind(primitives.grad, operands[0], *cotangents, *scale, **params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _epilogue(operands, active, params):
    return _epilogue_forward(operands, active, params)[0]


def _unfused(operands, params):
    """The norm in its computing type, then the function, which XLA computes."""
    params = dict(params)
    function, dtype, count = params.pop("function"), params["dtype"], 1 + len(params["extras"].split())
    params["dtype"] = reference.computing(operands[0].dtype)
    y, *s = bind(PRIMITIVES[params["operation"]].forward, *operands[:count], **params)
    (y,) = function.unrounded(y, *operands[count:])
    return [jnp.broadcast_to(y, operands[0].shape).astype(dtype), *s]


def _epilogue_backward(active, params, operands, cotangents):
    def f(*xs):
        given = list(operands)
        for k, x in zip(active, xs):
            given[k] = x
        return _unfused(given, params)

    found = dict(zip(active, jax.vjp(f, *(operands[k] for k in active))[1](cotangents)))
    return (tuple(found.get(k) for k in range(len(operands))),)


def _epilogue_forward(operands, active, params):
    params = dict(params)
    return bind(PRIMITIVES[params["operation"]].epilogue, *operands, **params), operands


_epilogue.defvjp(_epilogue_forward, _epilogue_backward)


def define(primitives) -> None:
    """Defines the derivatives of the primitives of an operation."""
    defvjp(
        primitives.forward,
        lambda *operands, active, **params: _norm(operands, primitives, active, tuple(params.items())),
        differentiable=(0, 1, 2, 3),
        tell_active=True,
    )
    defmultilinear(primitives.grad, reference.norm_grad, _grad_linear, functools.partial(_grad_transpose, primitives))
    defmultilinear(primitives.jvp, reference.norm_jvp, _jvp_linear, functools.partial(_jvp_transpose, primitives))


for _primitives in PRIMITIVES.values():
    define(_primitives)
    defvjp(
        _primitives.epilogue,
        lambda *operands, active, **params: _epilogue(operands, active, tuple(params.items())),
        differentiable=range(_MOST),
        tell_active=True,
    )
