"""Derivatives of softmax and log_softmax. Higher orders differentiate the references in jnp.

Without dropout, the residual of the fused softmax is y. The gradient then needs neither bias nor mask nor exponentials, and
the caller usually keeps y anyway. With dropout, the residuals are the operands, and the gradient draws the same random
bits again: y lacks the dropped elements, and p would be one more array. The gradients of bias and scale are sums of ds.
"""

import functools

import jax
import jax.numpy as jnp

from jaxkern._core import define, validate
from jaxkern._core.autodiff import deflinear, deftranspose, defvjp, linear_jvp
from jaxkern._core.primitive import bind, set_jvp
from jaxkern._core.rows import computed, row_sum
from jaxkern._ops.softmax import reference
from jaxkern._ops.softmax.primitive import (
    log_softmax_grad_p,
    log_softmax_jvp_p,
    log_softmax_p,
    softmax_fused_grad_p,
    softmax_fused_jvp_p,
    softmax_fused_output_grad_p,
    softmax_fused_p,
    softmax_grad_p,
    softmax_p,
)


def _custom_vjp(forward_p, backward_p, keep):
    """The custom_vjp behind all derivatives of `forward_p`; keep(x, y) returns the residual of the backward pass."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
    def f(x, mask, axis, algorithm):
        return bind(forward_p, x, *mask, axis=axis, algorithm=algorithm)

    def forward(x, mask, axis, algorithm):
        y = bind(forward_p, x, *mask, axis=axis, algorithm=algorithm)  # not f, which has no derivative itself
        return y, (keep(x, y), mask)

    def backward(axis, algorithm, residuals, g):
        kept, mask = residuals
        return bind(backward_p, kept, g, *mask, axis=axis, algorithm=algorithm), (None,) * len(mask)

    f.defvjp(forward, backward)
    return lambda x, *mask, axis, algorithm: f(x, mask, axis, algorithm)


def _precise(x, y):
    """The residual of log_softmax: x, because the gradient would magnify the rounding error of y by |y|.

    For 16-bit dtypes it is y: their results hide that error, and kernels are faster from y. x and y have the same softmax.
    """
    return y if x.dtype.itemsize <= 2 else x


softmax_vjp = _custom_vjp(softmax_p, softmax_grad_p, keep=lambda x, y: y)
log_softmax_vjp = _custom_vjp(log_softmax_p, log_softmax_grad_p, keep=_precise)
defvjp(softmax_p, softmax_vjp, differentiable=(0,))
defvjp(log_softmax_p, log_softmax_vjp, differentiable=(0,))


def softmax_grad_jvp(y, g, *rest, axis, algorithm):
    *mask, dy = rest
    kept = reference.participants(y, 0, axis, *mask)
    dtype = y.dtype
    y, g, dy = (computed(a, kept) for a in (y, g, dy))
    return (dy * (g - row_sum(y * g, axis)) - y * row_sum(dy * g, axis)).astype(dtype)


def _softmax_tangent(x, dx, axis, kept):
    p, dx = reference.probabilities(x, axis, kept), computed(dx, kept)
    return p * (dx - row_sum(p * dx, axis))


def log_softmax_grad_jvp(x, g, *rest, axis, algorithm):
    *mask, dx = rest
    kept = reference.participants(x, -jnp.inf, axis, *mask)
    return (-_softmax_tangent(x, dx, axis, kept) * row_sum(computed(g, kept), axis)).astype(x.dtype)


def log_softmax_jvp_jvp(x, t, *rest, axis, algorithm):
    *mask, dx = rest
    kept = reference.participants(x, -jnp.inf, axis, *mask)
    dot = row_sum(_softmax_tangent(x, dx, axis, kept) * computed(t, kept), axis)
    return computed(jnp.broadcast_to(-dot, x.shape), kept).astype(x.dtype)


deflinear(softmax_grad_p, 1, softmax_grad_jvp, transpose=softmax_grad_p)  # self-adjoint
deflinear(log_softmax_grad_p, 1, log_softmax_grad_jvp, transpose=log_softmax_jvp_p)
deflinear(log_softmax_jvp_p, 1, log_softmax_jvp_jvp, transpose=log_softmax_grad_p)


# ---- fused


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _fused(operands, active, params):
    return bind(softmax_fused_p, *operands, **dict(params))


def _fused_forward(operands, active, params):
    y, params = bind(softmax_fused_p, *operands, **dict(params)), dict(params)
    if params["log"] or params["threshold"]:
        return y, (operands, None)
    names = [None] + params["extras"].split()
    of_scale = "scale" in names and names.index("scale") in active
    return y, ((operands[0] if of_scale else None, *operands[1:]), y)


def _fused_backward(active, params, kept, g):
    params, ((x, *parts), y) = dict(params), kept
    named = reference.named(parts, params["extras"])
    dtype = jnp.float32 if params.pop("dtype", "") else g.dtype  # of x
    if y is None:
        gradient = functools.partial(bind, softmax_fused_grad_p, x, g.astype(dtype), *parts)
    else:
        gradient = functools.partial(
            bind, softmax_fused_output_grad_p, y, g, *([named["scale"]] if "scale" in named else [])
        )
        params["extras"] = "scale" if "scale" in named else ""
    dx = gradient(**params)
    cotangents = dict.fromkeys(named)
    if "scale" in named:  # XLA removes it if it is not used
        ds = gradient(**(params | {"unscaled": True}))
        if x is not None:
            part = reference.fused_participants(x, params["axis"], named, params["causal"])
            products = computed(ds) * (computed(x) if part is None else computed(x, part))
            cotangents["scale"] = _summed(products, named["scale"])
    if "bias" in named:
        cotangents["bias"] = _summed(computed(ds if "scale" in named else dx), named["bias"])
    return ((dx.astype(dtype), *cotangents.values()),)


def _summed(a, part):
    """The sum of `a` over the dimensions that `part` broadcasts over."""
    over = [d for d in range(a.ndim) if part.shape[d] == 1 and a.shape[d] != 1]
    return validate.split_like(jnp.sum(a, over, keepdims=True).astype(part.dtype), jax.typeof(part))


_fused.defvjp(_fused_forward, _fused_backward)
# x, bias and scale; the other operands have no derivative.
defvjp(
    softmax_fused_p,
    lambda *operands, active, **params: _fused(operands, active, tuple(params.items())),
    differentiable=(0, 1, 2),
    tell_active=True,
)


for _prim, _other in (
    (softmax_fused_grad_p, softmax_fused_jvp_p),
    (softmax_fused_jvp_p, softmax_fused_grad_p),
    (softmax_fused_output_grad_p, softmax_fused_output_grad_p),
):
    set_jvp(_prim, functools.partial(linear_jvp, _prim, define.references[_prim], (1,)))
    deftranspose(_prim, 1, _other)
