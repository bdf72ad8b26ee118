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
    ((x, scale, bias), mean, var), params = kept, dict(params)
    sums = tuple(a.dtype if k in active else None for k, a in ((1, scale), (2, bias)))
    if params["function"] is not None:
        cotangents = [_through(params, x, mean, var, scale, bias, cotangents[0]), *cotangents[1:]]
    of = {k: params[k] for k in ("operation", "batch", "keep", "channel", "eps", "algorithm")}
    dx, *rest = bind(PRIMITIVES[params["operation"]].grad, x, mean, var, scale, *cotangents, sums=sums, **of)
    rest = iter(rest)
    found = [dx, *(None if d is None else next(rest) for d in sums)]
    return (tuple(d if d is None else validate.split_like(d, jax.typeof(a)) for d, a in zip(found, kept[0])),)


def _through(params, x, mean, var, scale, bias, g):
    """The cotangent of what `function` was applied to, as the next operation would round it."""
    inner = {**params, "function": None, "dtype": mean.dtype}
    v = reference.applied(x, mean, var, scale, bias, **inner)
    apply = lambda v: jnp.broadcast_to(params["function"].unrounded(v)[0], v.shape).astype(params["dtype"])
    return jax.vjp(apply, v)[1](g)[0].astype(g.dtype)


_norm.defvjp(_forward, _backward)


def _type(x):
    return x.aval if ad.is_undefined_primal(x) else x


def _grad_transpose(primitives, operands, cotangents, *, sums, **params):
    x, mean, var, scale, g, *_ = operands
    dx, *rest = cotangents
    rest = iter(rest)
    along = [dx, *(None if d is None else next(rest) for d in sums)]
    return bind(primitives.jvp, x, mean, var, scale, *along, dtype=_type(g).dtype, **params)


def _jvp_transpose(primitives, operands, cotangents, *, dtype, **params):
    x, mean, var, scale, _, *along = operands
    sums = tuple(None if a is None else _type(a).dtype for a in along)
    dx, *found = bind(primitives.grad, x, mean, var, scale, *cotangents, sums=sums, **params)
    found = iter(found)
    return [dx, *(None if a is None else next(found) for a in along)]


for _primitives in PRIMITIVES.values():
    defvjp(
        _primitives.forward,
        lambda *operands, active, **params: _norm(operands, active, tuple(params.items())),
        differentiable=(0, 1, 2),
        tell_active=True,
    )
    defmultilinear(_primitives.grad, reference.norm_grad, (4, 5, 6), functools.partial(_grad_transpose, _primitives))
    defmultilinear(_primitives.jvp, reference.norm_jvp, (4, 5, 6), functools.partial(_jvp_transpose, _primitives))
