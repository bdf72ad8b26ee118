"""The primitives of softmax and log_softmax.

    softmax_p            y  = exp(x - max) / sum(exp(x - max))
    log_softmax_p        y  = x - max - log(sum(exp(x - max)))
    softmax_grad_p       dx = y * (g - sum(y * g))
    log_softmax_grad_p   dx = g - softmax(x) * sum(g)      or from y, which has the same softmax up to rounding
    log_softmax_jvp_p    dy = t - sum(softmax(x) * t)      the transpose of log_softmax_grad_p; left to XLA

along one axis, each with an optional mask. The output of a masked element is 0 (log_softmax: -inf), and its gradient is 0
whatever the cotangent is. All elements of a row that is entirely masked or -inf count as masked.

With scale, bias, mask, causal limit and dropout in one kernel:

    softmax_fused_p               y = dropout(softmax(s)), or log_softmax(s), where s = scale * x + bias
    softmax_fused_grad_p          dx = scale * ds from x and g: ds = p * (h - sum(p * h)), where h = dropout(g) and
                                  p = softmax(s), or for log_softmax ds = g - p * sum(g)
    softmax_fused_jvp_p           the transpose of softmax_fused_grad_p; left to XLA
    softmax_fused_output_grad_p   dx of softmax without dropout from y, which is p, and g

The result of softmax_fused_p may have a dtype of 16 bits (`dtype`) where x is float32; its gradient is computed from it,
in its dtype.

`replaced` marks a call that stands for operations of a plain program: see `accelerate`. Such a program is exported plain.

Operands: x, for a gradient g, then bias, scale, mask and key as far as the parameter `extras` names them, in this order.
Each has the rank of x, with dimensions of size 1 or as in x. The key has one more dimension, for its two
words. If the key has a dimension that is not 1, each index has its own key and numbers its rows separately.
"""

import functools

import jax.numpy as jnp
from jax.interpreters import mlir

from jaxkern._core import algorithms, define, partition, switch
from jaxkern._core.primitive import bind
from jaxkern._core.rows import mask_shape, row_primitive
from jaxkern._ops.softmax import dropout, plan, reference, sharding

EXTRAS = ("bias", "scale", "mask", "key")

algorithms.register(plan, "softmax", log=False)
algorithms.register(plan, "log_softmax", log=True)


def _plain(name, log, backward):
    launches = functools.partial(plan.plain, log, backward)
    return row_primitive(
        f"jaxkern_{name}",
        1 + backward,
        getattr(reference, name),
        launches,
        split=True,
        dtypes=plan.DTYPES,
        on_cpu=getattr(reference, f"{name}_on_cpu", None),
    )


softmax_p = _plain("softmax", False, False)
log_softmax_p = _plain("log_softmax", True, False)
PLAIN = {"softmax": softmax_p, "log_softmax": log_softmax_p}
softmax_grad_p = _plain("softmax_grad", False, True)
log_softmax_grad_p = _plain("log_softmax_grad", True, True)
log_softmax_jvp_p = row_primitive("jaxkern_log_softmax_jvp", 2, reference.log_softmax_jvp)


# ---- the fused primitives


def _abstract_eval(
    name, arrays, x, *rest, axis, algorithm, log, extras, causal, threshold, unscaled, dtype="", replaced=False
):
    del algorithm, unscaled, replaced
    if not causal <= axis < x.ndim:
        raise ValueError(f"{name}: axis {axis} is out of bounds for shape {x.shape}")
    names, others, parts = extras.split(), rest[: arrays - 1], rest[arrays - 1 :]
    if len(names) != len(parts) or names != [e for e in EXTRAS if e in names] or ("key" in names) != (threshold > 0):
        raise ValueError(f"{name}: {len(parts)} operands for {extras!r} and a threshold of {threshold}")
    if log and (causal or threshold):
        raise ValueError(f"{name}: log_softmax is not causal and has no dropout")
    for y in others:
        if y.shape != x.shape or y.dtype != x.dtype:
            raise ValueError(f"{name}: operands differ: {x.str_short()} and {y.str_short()}")
    wide = jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    dtypes = {"bias": (x.dtype, wide), "scale": (wide,), "mask": (jnp.bool_,), "key": (jnp.uint32,)}
    for e, part in zip(names, parts):
        shape = part.shape
        if e == "key":
            fits, shape = shape[-1:] in ((2,), (4,)), shape[:-1]  # (4,): see _key_per_row
        else:
            fits = True
        fits = fits and len(shape) == x.ndim and all(b in (1, a) for a, b in zip(x.shape, shape))
        if not fits or part.dtype not in dtypes[e] or (e in ("scale", "key") and shape[axis] != 1):
            raise ValueError(f"{name}: the {e} {part.str_short()} does not fit {x.str_short()}")
    # Updating keeps the sharding and the varying axes that x came with.
    return x.update(weak_type=False, dtype=jnp.dtype(dtype or x.dtype))


def _batch(arrays, prim, operands, dims, *, axis, causal, extras, **params):
    """The batch becomes one more dimension before the axis, and before the queries of a causal softmax."""
    at = next(d for d in dims if d is not None)
    size = next(x.shape[d] for x, d in zip(operands, dims) if d is not None)
    at = at if at <= axis - causal else 0
    names = [None] * arrays + extras.split()

    def place(x, d, name):
        if d is not None:
            return jnp.moveaxis(x, d, at)
        x = jnp.expand_dims(x, at)
        # A key is broadcast, so that each example numbers its own rows. Kernels read the other extras in place.
        return jnp.broadcast_to(x, (*x.shape[:at], size, *x.shape[at + 1 :])) if name in (None, "key") else x

    operands = [place(x, d, name) for x, d, name in zip(operands, dims, names)]
    return bind(prim, *operands, axis=axis + 1, causal=causal, extras=extras, **params), at


def _key_per_row(key, shape, axis: int):
    """Key, row number and an unused word for each row, of shape (*shape[:axis], 1, 4).

    Kernels need it for a part of the rows, and if keys differ.
    """
    full = (*shape[:axis], *(1,) * (len(shape) - axis))
    numbers = dropout.row_numbers(shape, axis, key.shape)[..., None]
    words = [
        jnp.broadcast_to(key, (*full, 2)),
        jnp.broadcast_to(numbers, (*full, 1)),
        jnp.zeros((*full, 1), jnp.uint32),
    ]
    return jnp.concatenate(words, -1)


def _readable(name, shape, part, axis: int, key_per_row: bool):
    """The shape that an extra operand must be broadcast to before a kernel can read it; mostly its own."""
    lead = (*shape[:axis], *(1,) * (len(shape) - axis))
    if name == "key":
        return (*lead, 4) if key_per_row or any(d != 1 for d in part[:-1]) else part
    wanted = mask_shape(shape, part, axis)
    return lead if name == "scale" and wanted != part else wanted


def _adapt(prim, x, *avals, axis, extras, key_per_row=False, **params):
    """None if kernels can read these operands; else a function that binds `prim` on operands that they can read."""
    names = extras.split()
    arrays = 1 + len(avals) - len(names)
    parts = [a.shape for a in avals[arrays - 1 :]]
    wanted = [_readable(e, x.shape, part, axis, key_per_row) for e, part in zip(names, parts)]
    if wanted == parts:
        return None

    def adapted(*args, **params):
        brought = [
            p if p.shape == w else _key_per_row(p, x.shape, axis) if e == "key" else jnp.broadcast_to(p, w)
            for e, p, w in zip(names, args[arrays:], wanted)
        ]
        return prim.bind(*args[:arrays], *brought, **params)

    return adapted


def _partition(prim, ctx, operands, params):
    """Each device computes its part. The key is expanded to one per row, with the row's number in the whole array."""
    avals, axis = ctx.avals_in, params["axis"]
    if not plan.fused_fits(avals[0].shape, axis):
        return None
    extras = params["extras"].split()
    arrays = len(avals) - len(extras)
    adapted = _adapt(prim, *avals, key_per_row=True, **params)
    if adapted is not None:
        return mlir.lower_fun(adapted, multiple_results=False)(ctx, *operands, **params)
    dims = sharding.dims(avals[0].ndim, axis, params["causal"], arrays, extras)
    return partition.lower(ctx, prim, operands, params, dims, functools.partial(sharding.shard, prim), sharding.EXACT)


def _left(prim, ctx, operands, params) -> bool:
    """Whether a call that replaced operations of a plain program is left to XLA."""
    del prim, operands
    return params.get("replaced", False) and bool(switch.refusal(ctx, switch.current()))


def _unmarked(f):
    """`f` without the parameter `replaced`."""

    @functools.wraps(f)
    def unmarked(*args, replaced=False, **params):
        del replaced
        return f(*args, **params)

    return unmarked


def _primitive(name, arrays, reference, launches=None, on_cpu=None):
    reference, launches, on_cpu = (f and _unmarked(f) for f in (reference, launches, on_cpu))
    return define.primitive(
        name,
        functools.partial(_abstract_eval, name, arrays),
        functools.partial(_batch, arrays),
        reference,
        plan=launches,
        partition=_partition,
        adapt=_adapt,
        dtypes=plan.DTYPES,
        on_cpu=on_cpu,
        **({"left": _left} if launches else {}),
    )


softmax_fused_p = _primitive("jaxkern_softmax_fused", 1, reference.fused, plan.fused)
softmax_fused_grad_p = _primitive("jaxkern_softmax_fused_grad", 2, reference.fused_grad, plan.fused_grad)
softmax_fused_jvp_p = _primitive("jaxkern_softmax_fused_jvp", 2, reference.fused_jvp)
softmax_fused_output_grad_p = _primitive(
    "jaxkern_softmax_fused_output_grad",
    2,
    reference.fused_output_grad,
    plan.fused_output_grad,
    reference.fused_output_grad_on_cpu,
)
