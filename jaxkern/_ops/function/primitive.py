"""The primitive of user functions: `jaxkern_elementwise_kernel`.

It takes arrays of equal rank, each dimension 1 or the common size, one for each argument of `function`, a Function of
_core/functor.py, and returns an array for each result. `sums` says for each result over which dimensions it is summed;
those have size 1 in it. Derivatives are the same primitive with a derivative of the function: a gradient is summed over
the dimensions in which its operand has size 1.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from jaxkern._core import compat
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind, set_jvp, set_transpose
from jaxkern._core.signature import Layout, Signature, primitive
from jaxkern._ops.function import plan


def apply(function, operands, sums=None, shape=None):
    """The results of `function` on arrays of equal rank that broadcast, summed over the dimensions `sums` of each.

    shape: what the operands stand for, which may be more than they broadcast to.
    """
    sums = sums or ((),) * len(function.out_dtypes)
    shape = shape or _broadcast([jnp.shape(x) for x in operands])
    used = function.used or tuple(range(len(operands)))[-1:]
    operands = [operands[k] for k in used]
    own = _broadcast([jnp.shape(x) for x in operands])
    if own != shape:  # the last is a cotangent, if there is one
        operands[-1] = jnp.broadcast_to(operands[-1], shape)
    return bind(elementwise_kernel_p, *operands, function=function.select(used), sums=tuple(sums))


def _is_one(n):
    return isinstance(n, int) and n == 1


def _broadcast(shapes):
    return tuple(next((n for n in sizes if not _is_one(n)), 1) for sizes in zip(*shapes))


def _reference(*operands, function, sums):
    ys = function.unrounded(*operands)
    ys = [jnp.sum(y, dims, keepdims=True) if dims else y for y, dims in zip(ys, sums)]
    return [y.astype(d) for y, d in zip(ys, function.out_dtypes)]


def _jvp(primals, tangents, *, function, sums):
    ys = bind(elementwise_kernel_p, *primals, function=function, sums=sums)
    active = tuple(k for k, t in enumerate(tangents) if type(t) is not ad.Zero)
    dys = list(map(compat.zero_tangent, ys))
    inexact = function.inexact_results
    if active and inexact:
        shape = _broadcast([jnp.shape(x) for x in primals])  # a literal has no shape
        operands = [*primals, *(tangents[k] for k in active)]
        found = apply(function.jvp(active), operands, [sums[k] for k in inexact], shape)
        for k, dy in zip(inexact, found):
            dys[k] = dy
    return ys, dys


def _transpose(cts, *operands, function, sums):
    linear = tuple(k for k, x in enumerate(operands) if ad.is_undefined_primal(x))
    avals = [x.aval if k in linear else jax.typeof(x) for k, x in enumerate(operands)]
    result = [None] * len(operands)
    if all(type(ct) is ad.Zero for ct in cts):
        for k in linear:
            result[k] = ad.Zero(avals[k])
        return result
    cts = [ad.zeros_like_aval(ct.aval) if type(ct) is ad.Zero else ct for ct in cts]
    pullback = function.vjp(linear)
    if set(linear) & set(pullback.used):
        raise NotImplementedError(f"{function.label}: a derivative that is not linear cannot be transposed")
    shape = _broadcast([a.shape for a in avals])
    over = [tuple(d for d, n in enumerate(avals[k].shape) if _is_one(n) and not _is_one(shape[d])) for k in linear]
    known = [jnp.zeros((1,) * len(shape), a.dtype) if k in linear else operands[k] for k, a in enumerate(avals)]
    inexact = [cts[k] for k in function.inexact_results]
    for k, d in zip(linear, apply(pullback, [*known, *inexact], over, shape)):
        result[k] = d
    return result


def _shard(prim, over, *parts, function, sums):
    """Every dimension may be split. Devices sum their parts of what is summed over dimensions that are."""
    axes = [tuple(a for d in own for a in over.get(f"all{d}", ())) for own in sums]
    wide = [computing(d) if a else d for d, a in zip(function.out_dtypes, axes)]
    ys = apply(function.with_results(wide), parts, sums)
    return [lax.psum(y, a).astype(d) if a else y for y, a, d in zip(ys, axes, function.out_dtypes)]


def _results(operands, params):
    dims = [f"all{d}" for d in range(operands[0].ndim)]
    shapes = (" ".join(f"{n}-" if d in own else n for d, n in enumerate(dims)) for own in params["sums"])
    return [f"{dtype} {shape}" for dtype, shape in zip(params["function"].out_dtypes, shapes, strict=True)]


def _grown(params, group, at):
    return params | {"sums": tuple(tuple(d + (d >= at) for d in own) for own in params["sums"])}


elementwise_kernel_p = primitive(
    "jaxkern_elementwise_kernel",
    Signature(
        lambda params: {f"x{k}": f"{dtype} *all?" for k, dtype in enumerate(params["function"].in_dtypes)},
        _results,
        Layout(lambda params: {}, _grown, first=True),
        exact=lambda operands, params: {f"all{d}" for own in params["sums"] for d in own},
    ),
    _reference,
    plan=plan.plan,
    shard=_shard,
)
set_jvp(elementwise_kernel_p, _jvp)
set_transpose(elementwise_kernel_p, _transpose)
