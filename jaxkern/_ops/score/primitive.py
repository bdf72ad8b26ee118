"""The primitives of softmax and log_softmax of a user function.

    softmax_score_p          y = softmax(s) or log_softmax(s), where s = function(x, *indices, *args)
    softmax_score_grad_p     dx from x and g: ds of the softmax, times the derivative of the function by x;
                             `unscored`: ds itself
    softmax_score_grads_p    both of these
    softmax_score_jvp_p      the transpose of softmax_score_grad_p; left to XLA
    softmax_score_jvps_p     the transpose of softmax_score_grads_p, which takes two tangents; left to XLA
    softmax_score_sums_p     the largest s of each row, and log(sum(exp(s - largest))), -inf for a row without participants;
                             both in the computing type, with size 1 along the axis. It has the derivatives of the loss
                             (loss.py)

Operands: x, for a gradient g, the arguments of `function` after the indices, then those that the parameter `extras`
names, in this order: the mask, and the origin, an int32 for each index, which says where a part of an array begins. All
except the origin have the rank of x, with dimensions of size 1 or as in x.

function: a Function (_core/functor.py) of an element of x, of int32 indices and of `args`, that returns the score in the
computing type. indexed: the dimensions of x that the indices count along.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jaxkern._core import define, partition, validate
from jaxkern._core.primitive import bind
from jaxkern._core.rows import mask_shape
from jaxkern._ops.score import reference
from jaxkern._ops.softmax import plan

EXTRAS = ("mask", "origin")


def _abstract_eval(name, arrays, several, x, *rest, axis, algorithm, log, function, indexed, extras, unscored):
    del algorithm, log, unscored
    names = extras.split()
    others, args = rest[: arrays - 1], rest[arrays - 1 : len(rest) - len(names)]
    extra = dict(zip(names, rest[len(rest) - len(names) :]))
    if not 0 <= axis < x.ndim or not all(0 <= d < x.ndim for d in indexed):
        raise ValueError(f"{name}: axis {axis} or one of {indexed} is out of bounds for shape {x.shape}")
    if names != [e for e in EXTRAS if e in names] or len(function.in_dtypes) != 1 + len(indexed) + len(args):
        raise ValueError(f"{name}: {len(args)} arguments and {extras!r} for {function.label}")
    for y in others:
        if y.shape != x.shape or y.dtype != x.dtype:
            raise ValueError(f"{name}: operands differ: {x.str_short()} and {y.str_short()}")
    dtypes = [*function.in_dtypes[1 + len(indexed) :], *([jnp.dtype(bool)] if "mask" in extra else [])]
    parts = [*args, *([extra["mask"]] if "mask" in extra else [])]
    for part, dtype in zip(parts, dtypes):
        fits = part.ndim == x.ndim and all(b in (1, a) for a, b in zip(x.shape, part.shape))
        if not fits or part.dtype != dtype:
            raise ValueError(f"{name}: the operand {part.str_short()} does not fit {x.str_short()} and {dtype}")
    if "origin" in extra and extra["origin"].shape != (len(indexed),):
        raise ValueError(f"{name}: the origin {extra['origin'].str_short()} for {len(indexed)} indices")
    if several == "sums":
        row = keeping_axis(x, axis)
        return [row, row]
    # Updating keeps the sharding and the varying axes that x came with.
    y = x.update(weak_type=False)
    return [y, y] if several else y


def keeping_axis(x, axis):
    """The type of a number for each row of x, with a dimension of size 1 for the axis."""
    shape = {"shape": tuple(1 if d == axis else n for d, n in enumerate(x.shape)), "weak_type": False}
    if not x.sharding.mesh.empty:
        spec = [None if d == axis else s for d, s in enumerate(validate.explicit_spec(x))]
        shape["sharding"] = NamedSharding(x.sharding.mesh, PartitionSpec(*spec))
    return x.update(dtype=jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32), **shape)


def batch(arrays, prim, operands, dims, *, axis, indexed, extras, **params):
    """The batch becomes one more dimension before the axis, which indices do not count along.

    arrays: how many of the first operands have the rows of x.
    """
    if "origin" in extras:
        raise NotImplementedError(f"{prim.name}: a part of an array has no batching rule")
    at = next(d for d in dims if d is not None)
    size = next(x.shape[d] for x, d in zip(operands, dims) if d is not None)
    at = at if at <= axis else 0

    def place(k, x, d):
        if d is not None:
            return jnp.moveaxis(x, d, at)
        x = jnp.expand_dims(x, at)
        return jnp.broadcast_to(x, (*x.shape[:at], size, *x.shape[at + 1 :])) if k < arrays else x

    operands = [place(k, x, d) for k, (x, d) in enumerate(zip(operands, dims))]
    indexed = tuple(d + (d >= at) for d in indexed)
    y = bind(prim, *operands, axis=axis + 1, indexed=indexed, extras=extras, **params)
    return (y, [at] * len(y)) if prim.multiple_results else (y, at)


def _adapt(prim, x, *avals, axis, extras, **params):
    """None if kernels can read these operands; else a function that binds `prim` on operands that they can read."""
    full = [a.shape if a.ndim != x.ndim else mask_shape(x.shape, a.shape, axis) for a in avals]
    if full == [a.shape for a in avals]:
        return None
    return lambda x, *parts, **params: prim.bind(x, *map(jnp.broadcast_to, parts, full), **params)


def _partition(prim, ctx, operands, params):
    """Each device computes its part. Rows that are split exchange a few numbers."""
    x, axis = ctx.avals_in[0], params["axis"]
    if not plan.fused_fits(x.shape, axis):
        return None
    adapted = _adapt(prim, *ctx.avals_in, **params)
    if adapted is not None:
        return mlir.lower_fun(adapted, multiple_results=prim.multiple_results)(ctx, *operands, **params)
    names = [f"d{d}" for d in range(x.ndim)]
    names[axis] = "row"
    dims = [names if a.ndim == x.ndim else ["origin"] for a in (*ctx.avals_in, *ctx.avals_out)]
    if "origin" in params["extras"]:
        return None
    return partition.lower(ctx, prim, operands, params, dims, functools.partial(_shard, prim, names), exact={"row"})


def _shard(prim, names, over, x, *parts, indexed, extras, **params):
    if any(over[names[d]] for d in indexed):
        begins = [lax.axis_index(over[names[d]]) * x.shape[d] if over[names[d]] else 0 for d in indexed]
        parts = (*parts, jnp.stack([jnp.asarray(b, jnp.int32) for b in begins]))
        extras = f"{extras} origin".strip()
    params |= {"indexed": indexed, "extras": extras}
    if over["row"]:
        return getattr(reference, prim.name.removeprefix("jaxkern_softmax_"))(x, *parts, over=over["row"], **params)
    return prim.bind(x, *parts, **params)


def _primitive(name, arrays, in_jnp, launches=None, several=False):
    return define.primitive(
        name,
        functools.partial(_abstract_eval, name, arrays, several),
        functools.partial(batch, arrays),
        in_jnp,
        several=bool(several),
        plan=launches,
        partition=_partition,
        adapt=_adapt,
        dtypes=plan.DTYPES,
        on_cpu=getattr(reference, f"{in_jnp.__name__}_on_cpu", None),
    )


softmax_score_p = _primitive("jaxkern_softmax_score", 1, reference.score, plan.score)
softmax_score_grad_p = _primitive("jaxkern_softmax_score_grad", 2, reference.score_grad, plan.score_grad)
softmax_score_grads_p = _primitive("jaxkern_softmax_score_grads", 2, reference.score_grads, plan.score_grad, True)
softmax_score_jvp_p = _primitive("jaxkern_softmax_score_jvp", 2, reference.score_jvp)
softmax_score_jvps_p = _primitive("jaxkern_softmax_score_jvps", 3, reference.score_jvps)
softmax_score_sums_p = _primitive("jaxkern_softmax_score_sums", 1, reference.score_sums, plan.score_sums, "sums")
