"""Derivatives of the softmax of scores. Higher orders differentiate the references in jnp.

The residuals are the operands: the gradient by x computes the scores again, in one kernel. The gradients of the other
arguments of the function need ds, which the same kernel writes beside it, and are sums over what each argument broadcasts over of
ds times the derivative of the function: an elementwise kernel with sums (_ops/function).
"""

import functools

import jax
from jax.interpreters import ad

from jaxkern._core import validate
from jaxkern._core.autodiff import deftranspose, defvjp, linear_jvp
from jaxkern._core.primitive import bind, set_jvp, set_transpose
from jaxkern._ops.function.primitive import apply
from jaxkern._ops.score import reference
from jaxkern._ops.score.primitive import (
    softmax_score_grad_p,
    softmax_score_grads_p,
    softmax_score_jvp_p,
    softmax_score_jvps_p,
    softmax_score_p,
)

MOST = 256  # operands


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _score(operands, active, params):
    return bind(softmax_score_p, *operands, **dict(params))


def _forward(operands, active, params):
    return bind(softmax_score_p, *operands, **dict(params)), operands


def _backward(active, params, operands, g):
    params = dict(params)
    function, indexed = params["function"], params["indexed"]
    x, *parts = operands
    cotangents = [None] * len(operands)
    by_args = [k for k in active if k > 0]
    if 0 in active and by_args:
        cotangents[0], ds = bind(softmax_score_grads_p, x, g, *parts, **params)
    elif by_args:
        ds = bind(softmax_score_grad_p, x, g, *parts, **(params | {"unscored": True}))
    else:
        cotangents[0] = bind(softmax_score_grad_p, x, g, *parts, **params)
    if by_args:
        arguments, mask = reference.operands(x, parts, indexed)
        arguments[0] = x  # the function below masks it
        wrt = tuple(k + len(indexed) for k in by_args)
        pullback = reference.argument_gradient(function, wrt, ds.dtype, mask is not None)
        arrays = [*arguments, *([] if mask is None else [mask]), ds]
        over = [tuple(d for d in range(x.ndim) if operands[k].shape[d] == 1 != x.shape[d]) for k in by_args]
        for k, d in zip(by_args, apply(pullback, arrays, over, x.shape)):
            cotangents[k] = validate.split_like(d, jax.typeof(operands[k]))
    return (tuple(cotangents),)


_score.defvjp(_forward, _backward)
defvjp(
    softmax_score_p,
    lambda *operands, active, **params: _score(operands, active, tuple(params.items())),
    differentiable=range(MOST),
    tell_active=True,
)


def _grads_transpose(cts, x, g, *parts, **params):
    if any(map(ad.is_undefined_primal, (x, *parts))):
        raise NotImplementedError(f"{softmax_score_grads_p.name} is linear in operand 1 only")
    given = [k for k, ct in enumerate(cts) if type(ct) is not ad.Zero]
    if not given:
        dg = ad.Zero(g.aval)
    elif len(given) == 2:
        dg = bind(softmax_score_jvps_p, x, *cts, *parts, **params)
    else:
        dg = bind(softmax_score_jvp_p, x, cts[given[0]], *parts, **(params | {"unscored": given == [1]}))
    return [None, dg, *(None for _ in parts)]


def _jvps_transpose(ct, x, *rest, **params):
    ts, parts = rest[:2], rest[2:]
    if any(map(ad.is_undefined_primal, (x, *parts))):
        raise NotImplementedError(f"{softmax_score_jvps_p.name} is linear in operands 1 and 2 only")
    linear = [k for k, t in enumerate(ts) if ad.is_undefined_primal(t)]
    cts = [None, None]
    if type(ct) is ad.Zero:
        for k in linear:
            cts[k] = ad.Zero(ts[k].aval)
    elif len(linear) == 2:
        cts = bind(softmax_score_grads_p, x, ct, *parts, **params)
    else:
        cts[linear[0]] = bind(softmax_score_grad_p, x, ct, *parts, **(params | {"unscored": linear == [1]}))
    return [None, *cts, *(None for _ in parts)]


for _prim, _linear, _of in (
    (softmax_score_grad_p, (1,), reference.score_grad),
    (softmax_score_jvp_p, (1,), reference.score_jvp),
    (softmax_score_grads_p, (1,), reference.score_grads),
    (softmax_score_jvps_p, (1, 2), reference.score_jvps),
):
    set_jvp(_prim, functools.partial(linear_jvp, _prim, _of, _linear))
deftranspose(softmax_score_grad_p, 1, softmax_score_jvp_p)
deftranspose(softmax_score_jvp_p, 1, softmax_score_grad_p)
set_transpose(softmax_score_grads_p, _grads_transpose)
set_transpose(softmax_score_jvps_p, _jvps_transpose)
