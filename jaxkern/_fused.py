"""softmax and log_softmax with scale, bias, mask, causal limit and dropout in one kernel: the primitives.

    softmax_fused_p        y = dropout(softmax(s)), or log_softmax(s), of s = scale * x + bias
    softmax_fused_grad_p   dx = scale * ds from x and g: ds = p * (h - sum(p * h)) of h = dropout(g) and
                           p = softmax(s), or of log_softmax ds = g - p * sum(g)
    softmax_fused_jvp_p    the transpose of the last one; left to XLA
    softmax_fused_output_grad_p   dx of softmax without dropout from y, which is p, and g

Softmax without dropout keeps y for the gradient, which then needs neither bias nor mask nor an exponential; y is what
the caller has anyway. Dropout keeps the operands, and its gradient draws the same elements to drop: y lacks those, and
p would be one more array. The gradients of bias and scale are sums of ds; higher derivatives are those of the
references in jnp.

Operands: x, of the gradient g, then those of bias, scale, mask and key that the parameter `extras` names, in
this order. Each has the rank of x and dimensions of 1 or of its size; the key has one more, its two words.
Where the key has a size that is not 1, each index has a key and numbers its rows by itself.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxkern import _fused_jnp, _fused_parts, _random
from jaxkern._core import compat, lowering, partition, registry, validate
from jaxkern._core.autodiff import deftranspose, defvjp
from jaxkern._core.primitive import bind, evaluate
from jaxkern._core.rows import computed

EXTRAS = ("bias", "scale", "mask", "key")


# ---- from the arguments of the public functions to operands


def extras(name: str, scale, bias, causal=None, rate=0.0, key=None):
    """(arrays, flags) for the jitted functions, or None for a call that has nothing fused; `causal` None: log_softmax."""
    numbers = (int, float, np.integer, np.floating)
    if isinstance(scale, bool) or not isinstance(scale, numbers):
        validate.check_array(name, "scale", "a real number or a scalar array", scale)
    else:
        scale = None if scale == 1 else float(scale)
    if bias is not None:
        validate.check_array(name, "bias", "an array of floating-point type", bias)
    if causal is None:
        return None if scale is None and bias is None else ((scale, bias), {})
    if not isinstance(causal, (bool, np.bool_)):
        raise TypeError(f"jaxkern.{name}: causal must be True or False, got {type(causal).__name__}")
    threshold = _random.threshold(name, rate)
    if rate != 0 and key is None:
        raise ValueError(f"jaxkern.{name}: dropout_rate of {rate} needs a dropout_key")
    if key is not None:
        validate.check_array(name, "dropout_key", "a key of jax.random", key)
    if scale is None and bias is None and not causal and threshold == 0:
        return None
    return (scale, bias, key if threshold else None), {"causal": bool(causal), "threshold": threshold}


def along_axis(name: str, x, where, scale, bias, key, axis, tier, causal, threshold):
    x = validate.floating(name, x)
    wide = computed(x).dtype
    mask = validate.full_rank_mask(name, x, where)
    bias = validate.full_rank(name, "bias", x, _bias(name, bias, x.dtype, wide))
    scale = _scale(name, scale, wide)
    axes = validate.sorted_axes(name, axis, x.shape)
    if causal and (x.ndim < 2 or axes != [x.ndim - 1]):
        raise ValueError(f"jaxkern.{name}: causal needs axis to be the last of two or more dimensions, got axis {axis} "
                         f"for x of shape {x.shape}")
    key = None if key is None else _random.key_words(name, key)

    def row_operation(x, parts, axis):
        ones = (1,) * x.ndim
        operands = {"bias": parts[0], "scale": None if scale is None else scale.reshape(ones), "mask": parts[1],
                    "key": None if key is None else key.reshape(*ones, 2)}
        names = [e for e in EXTRAS if operands[e] is not None]
        return bind(softmax_fused_p, x, *(operands[e] for e in names), axis=axis, tier=tier, log=name == "log_softmax",
                    extras=" ".join(names), causal=causal, threshold=threshold, unscaled=False)

    if causal:  # a dimension of size 1 may be the last one
        return row_operation(x, [bias, mask], x.ndim - 1)
    return validate.along_axes(row_operation, x, [bias, mask], axes)


def _bias(name, bias, dtype, wide):
    if bias is None:
        return None
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"jaxkern.{name}: bias must be of floating-point type, got {bias.dtype}{list(bias.shape)}")
    return bias if bias.dtype in (dtype, wide) else bias.astype(wide)


def _scale(name, scale, wide):
    if scale is None:
        return None
    scale = jnp.asarray(scale)  # a Python number still, where jit is disabled
    if scale.ndim:
        raise ValueError(f"jaxkern.{name}: scale must be a scalar, got shape {scale.shape}")
    if not jnp.issubdtype(scale.dtype, jnp.floating) and not jnp.issubdtype(scale.dtype, jnp.integer):
        raise TypeError(f"jaxkern.{name}: scale must be a real number, got {scale.dtype}")
    return scale.astype(wide)


# ---- the primitives


def _primitive(name: str, arrays: int) -> Primitive:
    prim = Primitive(name)
    prim.def_abstract_eval(functools.partial(_abstract_eval, name, arrays))
    prim.def_impl(functools.partial(evaluate, prim))
    batching.primitive_batchers[prim] = functools.partial(_batch, prim, arrays)
    compat.check_nans(prim)
    return prim


def _abstract_eval(name, arrays, x, *rest, axis, tier, log, extras, causal, threshold, unscaled):
    del tier, unscaled
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
            fits, shape = shape[-1:] in ((2,), (4,)), shape[:-1]  # (4,): see _per_row
        else:
            fits = True
        fits = fits and len(shape) == x.ndim and all(b in (1, a) for a, b in zip(x.shape, shape))
        if not fits or part.dtype not in dtypes[e] or (e in ("scale", "key") and shape[axis] != 1):
            raise ValueError(f"{name}: the {e} {part.str_short()} does not fit {x.str_short()}")
    # Updating keeps the sharding and the varying axes that x came with.
    return x.update(weak_type=False)


def _batch(prim, arrays, operands, dims, *, axis, causal, extras, **params):
    """The batch becomes one more dimension, before the axis, and before the queries if it is causal."""
    at = next(d for d in dims if d is not None)
    size = next(x.shape[d] for x, d in zip(operands, dims) if d is not None)
    at = at if at <= axis - causal else 0
    names = [None] * arrays + extras.split()

    def place(x, d, name):
        if d is not None:
            return jnp.moveaxis(x, d, at)
        x = jnp.expand_dims(x, at)
        # A key is repeated, so that each example numbers its rows by itself; the other extras are read in place.
        return jnp.broadcast_to(x, (*x.shape[:at], size, *x.shape[at + 1 :])) if name in (None, "key") else x

    operands = [place(x, d, name) for x, d, name in zip(operands, dims, names)]
    return bind(prim, *operands, axis=axis + 1, causal=causal, extras=extras, **params), at


softmax_fused_p = _primitive("jaxkern_softmax_fused", 1)
softmax_fused_grad_p = _primitive("jaxkern_softmax_fused_grad", 2)
softmax_fused_jvp_p = _primitive("jaxkern_softmax_fused_jvp", 2)
softmax_fused_output_grad_p = _primitive("jaxkern_softmax_fused_output_grad", 2)


# ---- derivatives


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _fused(operands, active, params):
    return bind(softmax_fused_p, *operands, **dict(params))


def _forward(operands, active, params):
    y, params = bind(softmax_fused_p, *operands, **dict(params)), dict(params)
    if params["log"] or params["threshold"]:
        return y, (operands, None)
    names = [None] + params["extras"].split()
    of_scale = "scale" in names and names.index("scale") in active
    return y, ((operands[0] if of_scale else None, *operands[1:]), y)


def _backward(active, params, kept, g):
    params, ((x, *parts), y) = dict(params), kept
    named = _fused_jnp.named(parts, params["extras"])
    if y is None:
        gradient = functools.partial(bind, softmax_fused_grad_p, x, g, *parts)
    else:
        gradient = functools.partial(bind, softmax_fused_output_grad_p, y, g, *([named["scale"]] if "scale" in named else []))
        params["extras"] = "scale" if "scale" in named else ""
    dx = gradient(**params)
    cotangents = dict.fromkeys(named)
    if "scale" in named:  # what nobody asks for is dropped when it is compiled
        ds = gradient(**(params | {"unscaled": True}))
        if x is not None:
            part = _fused_jnp.participants(x, params["axis"], named, params["causal"])
            products = computed(ds) * (computed(x) if part is None else computed(x, part))
            cotangents["scale"] = _summed(products, named["scale"])
    if "bias" in named:
        cotangents["bias"] = _summed(computed(ds if "scale" in named else dx), named["bias"])
    return ((dx, *cotangents.values()),)


def _summed(a, part):
    """The sum of `a` over the dimensions that `part` broadcasts over."""
    over = [d for d in range(a.ndim) if part.shape[d] == 1 and a.shape[d] != 1]
    return validate.split_like(jnp.sum(a, over, keepdims=True).astype(part.dtype), jax.typeof(part))


_fused.defvjp(_forward, _backward)
# x, bias and scale: what else there is has no derivative.
defvjp(softmax_fused_p, lambda *operands, active, **params: _fused(operands, active, tuple(params.items())),
       differentiable=(0, 1, 2), tell_active=True)


def _linear_jvp(prim, reference, primals, tangents, **params):
    """Of a primitive that is linear in the operand after the first."""

    def bound(g):
        return bind(prim, primals[0], g, *primals[2:], **params)

    out = bound(primals[1])
    terms = [] if type(tangents[1]) is ad.Zero else [bound(tangents[1])]
    active = [k for k, t in enumerate(tangents) if k != 1 and type(t) is not ad.Zero]
    if active:

        def f(*xs):
            operands = list(primals)
            for k, x in zip(active, xs):
                operands[k] = x
            return reference(*operands, **params)

        terms.append(jax.jvp(f, [primals[k] for k in active], [tangents[k] for k in active])[1])
    return out, sum(terms[1:], start=terms[0]) if terms else ad.Zero.from_primal_value(out)


for _prim, _other, _of in ((softmax_fused_grad_p, softmax_fused_jvp_p, _fused_jnp.gradient),
                           (softmax_fused_jvp_p, softmax_fused_grad_p, _fused_jnp.jvp),
                           (softmax_fused_output_grad_p, softmax_fused_output_grad_p, _fused_jnp.output_gradient)):
    ad.primitive_jvps[_prim] = functools.partial(_linear_jvp, _prim, _of)
    deftranspose(_prim, 1, _other)


# ---- lowering


def _per_row(key, shape, axis: int):
    """Key, row number and an unused word for each row, of shape (*shape[:axis], 1, 4).

    For what runs on a part of the rows, and where keys differ.
    """
    full = (*shape[:axis], *(1,) * (len(shape) - axis))
    numbers = _random.row_numbers(shape, axis, key.shape)[..., None]
    words = [jnp.broadcast_to(key, (*full, 2)), jnp.broadcast_to(numbers, (*full, 1)), jnp.zeros((*full, 1), jnp.uint32)]
    return jnp.concatenate(words, -1)


def _readable(name, shape, part, axis: int, sharded: bool):
    """The shape that an extra operand must be brought to before a kernel can read it; mostly its own."""
    lead = (*shape[:axis], *(1,) * (len(shape) - axis))
    if name == "key":
        return (*lead, 4) if sharded or any(d != 1 for d in part[:-1]) else part
    wanted = lowering.mask_shape(shape, part, axis, sharded)
    return lead if name == "scale" and wanted != part else wanted


def _lower(prim, arrays, reference, platform, ctx, *operands, **params):
    avals, axis = ctx.avals_in, params["axis"]
    shape = avals[0].shape
    through = functools.partial(mlir.lower_fun, multiple_results=False)
    known = all(isinstance(d, int) for a in avals for d in a.shape)
    if avals[0].dtype not in lowering.KERNEL_DTYPES or not known or 0 in shape or math.prod(
            shape[axis + 1 :]) != 1 or math.prod(shape[:axis]) >= 1 << 31:
        return through(reference)(ctx, *operands, **params)
    names, sharded = params["extras"].split(), compat.partitioned_devices(ctx) > 1
    itself = compat.may_partition_itself(ctx)  # and so may keep dimensions of size 1, but for those of the key
    wanted = [_readable(e, shape, a.shape, axis, sharded and (e == "key" or not itself)) for e, a in zip(names, avals[arrays:])]
    if wanted != [a.shape for a in avals[arrays:]]:

        def brought(*args):
            parts = [p if p.shape == w else _per_row(p, shape, axis) if e == "key" else jnp.broadcast_to(p, w)
                     for e, p, w in zip(names, args[arrays:], wanted)]
            return prim.bind(*args[:arrays], *parts, **params)

        return through(brought)(ctx, *operands)
    if itself:
        dims = _fused_parts.dims(len(shape), axis, params["causal"], arrays, names)
        shard = functools.partial(_fused_parts.shard, prim)
        return partition.lower(ctx, prim, operands, params, dims, shard, _fused_parts.EXACT)
    # A causal kernel needs whole matrices.
    attributes = partition.attributes([a.shape for a in avals], [a.shape for a in ctx.avals_out], axis - params["causal"])
    rule = jax.ffi.ffi_lowering(prim.name, **({"extra_attributes": attributes} if attributes else {}))
    return rule(ctx, *operands, **params)


def _register(prim, arrays, reference):
    mlir.register_lowering(prim, mlir.lower_fun(reference, multiple_results=False))
    compat.taylor_rule(prim, reference)
    for platform, module in registry.status.items():
        if prim.name in module.targets:
            rule = functools.partial(_lower, prim, arrays, reference, platform)
            compat.needs_devices(prim)
            mlir.register_lowering(prim, rule, platform=platform)


_register(softmax_fused_p, 1, _fused_jnp.forward)
_register(softmax_fused_grad_p, 2, _fused_jnp.gradient)
_register(softmax_fused_jvp_p, 2, _fused_jnp.jvp)
_register(softmax_fused_output_grad_p, 2, _fused_jnp.output_gradient)
