"""Derivatives of the softmax of scores. Higher orders differentiate the references in jnp.

The residuals are the operands: the gradient by x computes the scores again, in one kernel. The gradients of the other
arguments of the function need ds, which the same kernel writes, and are sums over what each argument broadcasts over of
ds times the derivative of the function: an elementwise kernel with sums (_ops/function).
"""

import functools

import jax
from jax.interpreters import ad

from jaxkern._core import validate
from jaxkern._core.autodiff import deftranspose, defvjp
from jaxkern._core.primitive import bind
from jaxkern._ops.function.primitive import apply
from jaxkern._ops.score import reference
from jaxkern._ops.score.primitive import softmax_score_grad_p, softmax_score_jvp_p, softmax_score_p
from jaxkern._ops.softmax.derivatives import linear_jvp

_MOST = 256  # operands


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _score(operands, active, params):
    return bind(softmax_score_p, *operands, **dict(params))


def _forward(operands, active, params):
    return bind(softmax_score_p, *operands, **dict(params)), operands


def _backward(active, params, operands, g):
    params = dict(params)
    function, indexed, extras = params["function"], params["indexed"], params["extras"]
    x, *parts = operands
    cotangents = [None] * len(operands)
    if 0 in active:
        cotangents[0] = bind(softmax_score_grad_p, x, g, *parts, **params)
    by_args = [k for k in active if k > 0]
    if by_args:
        ds = bind(softmax_score_grad_p, x, g, *parts, **(params | {"unscored": True}))
        arguments, mask = reference.operands(x, parts, function, indexed, extras)
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
    differentiable=range(_MOST),
    tell_active=True,
)

for _prim, _other, _of in (
    (softmax_score_grad_p, softmax_score_jvp_p, reference.score_grad),
    (softmax_score_jvp_p, softmax_score_grad_p, reference.score_jvp),
):
    ad.primitive_jvps[_prim] = functools.partial(linear_jvp, _prim, _of)
    deftranspose(_prim, 1, _other)
