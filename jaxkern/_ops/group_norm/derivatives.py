"""Derivatives of GroupNorm and BatchNorm. Higher orders differentiate the references in jnp.

The residuals are the operands and the statistics, which are small. The derivative of a function before the store is left to
XLA, which computes the function's argument again from them.
"""

import functools

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxkern._core import validate
from jaxkern._core.autodiff import defmultilinear, defvjp
from jaxkern._core.primitive import bind
from jaxkern._ops.group_norm import reference
from jaxkern._ops.group_norm.primitive import PRIMITIVES


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _norm(operands, active, params):
    return _forward(operands, active, params)[0]


def _forward(operands, active, params):
    params = dict(params)
    y, mean, var = bind(PRIMITIVES[params["operation"]].forward, *operands, **params)
    return [y, mean, var], (operands, mean, var)


def _backward(active, params, kept, cotangents):
    (operands, mean, var), params = kept, dict(params)
    names = [None, *params["extras"].split()]
    named = dict(zip(names, operands))
    wanted = [names[k] for k in active]
    sums = tuple(named[name].dtype if name in wanted else None for name in ("scale", "bias"))
    scale = [named["scale"]] if "scale" in named else []
    if params["function"] is not None:
        cotangents = [_through(params, operands, mean, var, cotangents[0]), *cotangents[1:]]
    of = {k: params[k] for k in ("operation", "batch", "keep", "channel", "eps", "algorithm")}
    grad = PRIMITIVES[params["operation"]].grad
    dx, *rest = bind(grad, operands[0], mean, var, *scale, *cotangents, extras="scale" * len(scale), sums=sums, **of)
    found = {None: dx, **dict(zip([k for k, d in zip(("scale", "bias"), sums) if d is not None], rest))}
    split = lambda name: validate.split_like(found[name], jax.typeof(named[name]))
    return (tuple(split(name) if name in found else None for name in names),)


def _through(params, operands, mean, var, g):
    """The cotangent of what `function` was applied to, as the next operation would round it."""
    inner = {**params, "function": None, "dtype": mean.dtype}
    v = reference.applied(operands[0], mean, var, *operands[1:], **inner)
    apply = lambda v: jnp.broadcast_to(params["function"].unrounded(v)[0], v.shape).astype(params["dtype"])
    return jax.vjp(apply, v)[1](g)[0].astype(g.dtype)


_norm.defvjp(_forward, _backward)


def _grad_linear(params):
    first = 3 + bool(params["extras"])
    return range(first, first + 3)


def _grad_transpose(primitives, operands, cotangents, params):
    g = operands[_grad_linear(params)[0]]
    dtype = (g.aval if ad.is_undefined_primal(g) else g).dtype
    return bind(primitives.jvp, *operands[: _grad_linear(params)[0]], *cotangents, dtype=dtype, **params)


def _jvp_linear(params):
    first = 3 + bool(params["extras"])
    return range(first, first + 1 + sum(d is not None for d in params["sums"]))


def _jvp_transpose(primitives, operands, cotangents, params):
    params = {k: v for k, v in params.items() if k != "dtype"}
    return bind(primitives.grad, *operands[: _jvp_linear(params)[0]], *cotangents, **params)


for _primitives in PRIMITIVES.values():
    defvjp(
        _primitives.forward,
        lambda *operands, active, **params: _norm(operands, active, tuple(params.items())),
        differentiable=(0, 1, 2),
        tell_active=True,
    )
    defmultilinear(_primitives.grad, reference.norm_grad, _grad_linear, functools.partial(_grad_transpose, _primitives))
    defmultilinear(_primitives.jvp, reference.norm_jvp, _jvp_linear, functools.partial(_jvp_transpose, _primitives))
