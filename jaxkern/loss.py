"""softmax_cross_entropy: what a user calls, the primitives, their rules and references.

    cross_entropy_p        (logits, labels[, mask])                         loss, and what its gradient keeps
    cross_entropy_grad_p   (logits, labels, *kept, g[, mask])               the gradient
    cross_entropy_jvp_p    (logits, labels, *kept, t[, mask])               its transpose; left to XLA
    cross_entropy_both_p   (logits, labels, g[, mask])                      loss and gradient in one read

What is kept is two numbers a row, the largest logit and the sum of exp(logit - largest), whose logarithms
make logsumexp, and with a mask the count of participants. They are functions of the logits, and the
derivatives below treat them so: only those along logits and g are there.
"""

import functools
import math
import numbers
import operator
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.sharding import NamedSharding, PartitionSpec

from jaxkern import tiers
from jaxkern._core import compat, validate
from jaxkern._core.autodiff import deflinear, defvjp
from jaxkern._core.primitive import bind, evaluate
from jaxkern.index_add import integers, safe_index


class Options(typing.NamedTuple):
    """The numbers of a cross-entropy, which a compiled program has built in."""

    smoothing: float = 0.0
    z_loss: float = 0.0
    ignore: int | None = None
    overwrites: bool = False  # the logits by their gradient: of a part of an array, whose program does not show that it may


# ---- what a user calls


def softmax_cross_entropy(logits, labels, *, axis=-1, where=None, label_smoothing=0.0, z_loss=0.0, ignore_index=None):
    """Cross-entropy of softmax(logits) and integer labels, as `optax.softmax_cross_entropy_with_integer_labels`.

    For a row of logits x with the label y

        lse = log(sum(exp(x)))
        loss = lse - (1 - label_smoothing) * x[y] - label_smoothing * mean(x) + z_loss * lse**2

    The logits are read once, and once more for the gradient, which is written to their own memory if they are
    donated or an intermediate result; besides, memory is a few numbers a row. Where a gradient does not depend
    on the loss itself, as that of a mean or a weighted sum, one compiled with `jit(value_and_grad(...))` takes
    both in one read.

    Args:
        logits: array of any shape. float16, bfloat16 and float32 are computed in float32, float64 in float64.
        labels: classes, of any integer dtype (64 bits with x64 off, too), of the shape of `logits` without `axis`.
            Negative ones do not count from the end.
        axis: the dimension of the classes, an int.
        where: boolean array that broadcasts to the shape of `logits`, read in place. Classes where it is False
            take no part: not in lse, not in the mean, and as the label they make the loss infinite.
        label_smoothing: a Python number from 0 to 1: how much of the target is spread over the classes.
        z_loss: a Python number: weight of the square of lse, which keeps it near 0.
        ignore_index: an int that is no class: rows with this label have loss 0 and gradient 0.

    Returns:
        Array of the shape of `labels`: the loss of each row, in nats; float32, for float64 float64. NaN, with NaN
        gradient, where the label is no class and not `ignore_index`, or NaN or +inf is among the logits. 0, with
        gradient 0, where no class takes part or all logits are -inf.

    Raises:
        TypeError: `logits`, `labels` or `where` is of the wrong type; a number is not a Python number.
        ValueError: shapes or `axis` do not fit; `label_smoothing` is not in [0, 1], `ignore_index` is a class.

    >>> import jax.numpy as jnp, jaxkern
    >>> logits = jnp.array([[1.0, 1.0], [0.0, 50.0], [3.0, 4.0]])
    >>> [round(x, 4) for x in jaxkern.softmax_cross_entropy(logits, jnp.array([0, 1, -1]), ignore_index=-1).tolist()]
    [0.6931, 0.0, 0.0]

    Source: label smoothing, Szegedy et al., "Rethinking the Inception Architecture", 2016; z loss, de Brébisson and
    Vincent, "The Z-loss: a shift and scale invariant classification loss", 2016, as in PaLM (2022).
    """
    name = "softmax_cross_entropy"
    options = _checked(name, logits, labels, where, label_smoothing, z_loss, ignore_index)
    return _call(_loss, logits, safe_index(labels), where, axis=validate.static_axis(name, axis), tier=tiers.forced(tiers.LOSS_TIERS), options=options)


def softmax_cross_entropy_and_grad(logits, labels, weights=None, *, axis=-1, where=None, label_smoothing=0.0, z_loss=0.0,
                                   ignore_index=None):
    """The losses of `softmax_cross_entropy` and, in the same read of the logits, the gradient of their weighted sum.

    Args:
        weights: a number for each row, broadcast to the shape of `labels`; ones by default. For a mean: 1 / rows.
        The others: as for `softmax_cross_entropy`.

    Returns:
        (loss, gradient): the losses themselves, not weighted, and the derivative of sum(weights * loss) by the
        logits, in their dtype and, if they are donated or an intermediate result, in their memory.

    Raises:
        As `softmax_cross_entropy`; ValueError if `weights` do not broadcast, TypeError if they are not real.

    >>> import jax.numpy as jnp, jaxkern
    >>> loss, gradient = jaxkern.softmax_cross_entropy_and_grad(jnp.zeros((1, 4)), jnp.array([1]), 2.0)
    >>> gradient.tolist()
    [[0.5, -1.5, 0.5, 0.5]]
    """
    name = "softmax_cross_entropy_and_grad"
    options = _checked(name, logits, labels, where, label_smoothing, z_loss, ignore_index)
    if weights is not None:
        validate.check_array(name, "weights", "an array or a number", weights)
    return _call(_both, logits, safe_index(labels), weights, where, axis=validate.static_axis(name, axis),
                 tier=tiers.forced(tiers.LOSS_TIERS), options=options)


def _call(f, *arrays, **static):
    """f, compiled where it is called eagerly. Under a transformation its primitives become part of the program around
    them, where _loss_lowering.py looks about; a jit of their own would hide that."""
    if not any(isinstance(a, jax.core.Tracer) for a in arrays):
        return _compiled(f, *arrays, **static)
    return f(*(None if a is None else jnp.asarray(a) for a in arrays), **static)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("axis", "tier", "options"))
def _compiled(f, *arrays, **static):
    return f(*arrays, **static)


def _checked(name, logits, labels, where, label_smoothing, z_loss, ignore_index) -> Options:
    """The options, once everything that jit would not let see has been looked at."""
    validate.check_array(name, "logits", "an array", logits)
    validate.check_array(name, "labels", "an array of integers", labels)
    if where is not None:
        validate.check_array(name, "where", "a boolean array", where)
    values = {}
    for argument, value in (("label_smoothing", label_smoothing), ("z_loss", z_loss)):
        if isinstance(value, bool) or not isinstance(value, (numbers.Real, np.floating, np.integer)):
            raise TypeError(f"jaxkern.{name}: {argument} must be a Python number, which is known while tracing, got "
                            f"{type(value).__name__}")
        values[argument] = float(value)
        if not math.isfinite(values[argument]):
            raise ValueError(f"jaxkern.{name}: {argument} must be finite, got {value}")
    if not 0 <= values["label_smoothing"] <= 1:
        raise ValueError(f"jaxkern.{name}: label_smoothing must be from 0 to 1, got {label_smoothing}")
    if ignore_index is not None:
        try:
            if isinstance(ignore_index, (bool, np.bool_)):
                raise TypeError
            ignore_index = operator.index(ignore_index)
        except TypeError:
            raise TypeError(f"jaxkern.{name}: ignore_index must be an int or None, got {ignore_index!r}") from None
    return Options(values["label_smoothing"], values["z_loss"], ignore_index)


def _prepared(name, logits, labels, where, axis, options):
    """(logits, labels, *mask), the axis and the options as the primitives take them."""
    logits = validate.floating(name, logits, "logits")
    labels = integers(name, "labels", labels)
    if not isinstance(axis, int):
        raise TypeError(f"jaxkern.{name}: axis must be an int, got {axis!r}")
    (axis,) = validate.sorted_axes(name, axis, logits.shape, "logits")
    rows = logits.shape[:axis] + logits.shape[axis + 1 :]
    if labels.shape != rows:
        raise ValueError(f"jaxkern.{name}: labels of shape {labels.shape} for logits of shape {logits.shape} and axis {axis}, "
                         f"which take labels of shape {rows}")
    classes = logits.shape[axis]
    if options.ignore is not None:
        if options.ignore >= 0 and not (isinstance(classes, int) and options.ignore >= classes):
            raise ValueError(f"jaxkern.{name}: ignore_index {options.ignore} is a class of logits of shape {logits.shape} "
                             f"along axis {axis}")
        info = jnp.iinfo(labels.dtype)
        if not int(info.min) <= options.ignore <= int(info.max):
            options = options._replace(ignore=None)  # no label says so
    mask = validate.full_rank_mask(name, logits, where, "logits")
    return (logits, labels, *(() if mask is None else (mask,))), axis, options


def _loss(logits, labels, where, *, axis, tier, options):
    operands, axis, options = _prepared("softmax_cross_entropy", logits, labels, where, axis, options)
    return bind(cross_entropy_p, *operands, axis=axis, tier=tier, options=options)[0]


def _both(logits, labels, weights, where, *, axis, tier, options):
    name = "softmax_cross_entropy_and_grad"
    (logits, labels, *mask), axis, options = _prepared(name, logits, labels, where, axis, options)
    dtype = computing(logits.dtype)
    weights = jnp.ones((), dtype) if weights is None else jnp.asarray(weights)
    if not (jnp.issubdtype(weights.dtype, jnp.floating) or jnp.issubdtype(weights.dtype, jnp.integer)):
        raise TypeError(f"jaxkern.{name}: weights must be real, got {weights.dtype}{list(weights.shape)}")
    try:
        broadcasts = np.broadcast_shapes(weights.shape, labels.shape) == labels.shape
    except ValueError:
        broadcasts = False
    if not broadcasts:
        raise ValueError(f"jaxkern.{name}: weights of shape {weights.shape} do not broadcast to labels of shape {labels.shape}")
    weights = jnp.broadcast_to(weights.astype(dtype), labels.shape)
    loss, *_, gradient = bind(cross_entropy_both_p, logits, labels, weights, *mask, axis=axis, tier=tier, options=options)
    return loss, gradient


def computing(dtype):
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


# ---- the primitives: shapes and batches

# Of each, whether an operand is an array of logits (x), a number a row (r) or a mask (m): without a mask, and
# with one; and the results.
KINDS = {
    "cross_entropy": ("xr", "xrm", "rrr", "rrrr"),
    "cross_entropy_grad": ("xrrrr", "xrrrrrm", "x", "x"),
    "cross_entropy_jvp": ("xrrrx", "xrrrxrm", "r", "r"),
    "cross_entropy_both": ("xrr", "xrrm", "rrrx", "rrrrx"),
}


def kinds(prim, operands):
    """The kinds of the operands and of the results."""
    plain, masked, results, masked_results = KINDS[prim.name.removeprefix("jaxkern_")]
    return (masked, masked_results) if len(operands) == len(masked) else (plain, results)


def _abstract_eval(prim, x, *rest, axis, tier, options):
    del tier, options
    operands, results = kinds(prim, (x, *rest))
    rows = x.shape[:axis] + x.shape[axis + 1 :]
    for kind, a in zip(operands, (x, *rest), strict=True):
        fits = {"x": a.shape == x.shape and a.dtype == x.dtype, "r": a.shape == rows,
                "m": a.dtype == jnp.bool_ and a.ndim == x.ndim and all(b in (1, d) for d, b in zip(x.shape, a.shape))}
        if not fits[kind]:
            raise ValueError(f"{prim.name}: {a.str_short()} does not fit {x.str_short()} along axis {axis}")
    # Updating keeps the sharding and the varying axes that x came with.
    sharding = {}
    if not x.sharding.mesh.empty:
        spec = [*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec))]
        sharding = {"sharding": NamedSharding(x.sharding.mesh, PartitionSpec(*spec[:axis], *spec[axis + 1 :]))}
    row = x.update(shape=rows, dtype=computing(x.dtype), weak_type=False, **sharding)
    found = [x.update(weak_type=False) if kind == "x" else row for kind in results]
    return found if prim.multiple_results else found[0]


def _batch(prim, operands, dims, *, axis, tier, options):
    """The batch becomes one more dimension of the logits, where they have it, or their first."""
    operand_kinds, results = kinds(prim, operands)
    size = next(x.shape[d] for x, d in zip(operands, dims) if d is not None)
    at = dims[0] if dims[0] is not None else 0
    new_axis = axis + (at <= axis)
    of_rows = at - (at > new_axis)

    def place(x, d, kind):
        where = of_rows if kind == "r" else at
        if d is not None:
            return jnp.moveaxis(x, d, where)  # nothing at all when they are equal
        x = jnp.expand_dims(x, where)
        # A mask keeps a dimension of size 1: kernels read it in place.
        return x if kind == "m" else jnp.broadcast_to(x, (*x.shape[:where], size, *x.shape[where + 1 :]))

    operands = [place(*args) for args in zip(operands, dims, operand_kinds)]
    out = bind(prim, *operands, axis=new_axis, tier=tier, options=options)
    places = [at if kind == "x" else of_rows for kind in results]
    return (out, places) if prim.multiple_results else (out, places[0])


def _primitive(name):
    prim = Primitive(f"jaxkern_{name}")
    prim.multiple_results = len(KINDS[name][2]) > 1
    prim.def_abstract_eval(functools.partial(_abstract_eval, prim))
    prim.def_impl(functools.partial(evaluate, prim))
    batching.primitive_batchers[prim] = functools.partial(_batch, prim)
    compat.check_nans(prim)
    return prim


cross_entropy_p = _primitive("cross_entropy")
cross_entropy_grad_p = _primitive("cross_entropy_grad")
cross_entropy_jvp_p = _primitive("cross_entropy_jvp")
cross_entropy_both_p = _primitive("cross_entropy_both")


# ---- derivatives


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def cross_entropy_vjp(logits, rest, params):
    """The rule that every derivative of the loss comes from: the logits, and two numbers a row, are kept."""
    return bind(cross_entropy_p, logits, *rest, **dict(params))


def _forward(logits, rest, params):
    found = bind(cross_entropy_p, logits, *rest, **dict(params))
    return found, (logits, rest, found[1:])


def _backward(params, kept, cotangents):
    logits, (labels, *mask), (largest, total, *count) = kept
    dx = bind(cross_entropy_grad_p, logits, labels, largest, total, cotangents[0], *count, *mask, **dict(params))
    return dx, (None,) * (1 + len(mask))


cross_entropy_vjp.defvjp(_forward, _backward)
defvjp(cross_entropy_p, lambda logits, *rest, **params: cross_entropy_vjp(logits, rest, tuple(params.items())),
       differentiable=(0,))


def _both_jvp(primals, tangents, **params):
    """Through the two passes, one after the other."""
    _, labels, _, *mask = primals

    def f(logits, weight):
        loss, largest, total, *count = bind(cross_entropy_p, logits, labels, *mask, **params)
        dx = bind(cross_entropy_grad_p, logits, labels, largest, total, weight, *count, *mask, **params)
        return [loss, largest, total, *count, dx]

    along = [jnp.zeros_like(x) if type(t) is ad.Zero else t for x, t in zip(primals, tangents)]
    return jax.jvp(f, (primals[0], primals[2]), (along[0], along[2]))


ad.primitive_jvps[cross_entropy_both_p] = _both_jvp


def _shifted(x, mask, axis):
    """Logits in the computing type, -inf where masked, less the largest; that one; the exponentials; their sum."""
    x = x.astype(computing(x.dtype))
    if mask:
        x = jnp.where(mask[0], x, -jnp.inf)
    largest = jax.lax.stop_gradient(jnp.max(x, axis, keepdims=True, initial=-jnp.inf))
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    e = jnp.exp(x - largest)
    return x - largest, largest, e, jnp.sum(e, axis, keepdims=True)


def classes_of(labels, classes, axis, options):
    """(which class, 0 for none; is none and must not be; is ignored), with a dimension for the axis."""
    labels = jnp.expand_dims(labels, axis)
    labels = labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels
    within = labels >= 0
    if not isinstance(classes, int) or classes <= jnp.iinfo(labels.dtype).max:
        within &= labels < jnp.asarray(classes, labels.dtype)
    ignored = jnp.zeros_like(within) if options.ignore is None else labels == jnp.asarray(options.ignore, labels.dtype)
    return jnp.where(within, labels, 0), ~within & ~ignored, ignored


def participants(x, mask, axis):
    """How many elements of each row take part."""
    if not mask:
        return jnp.full([1 if d == axis else s for d, s in enumerate(x.shape)], x.shape[axis], computing(x.dtype))
    return jnp.sum(jnp.broadcast_to(mask[0], x.shape), axis, keepdims=True, dtype=computing(x.dtype))


def slopes(logits, labels, largest, total, count, mask, axis, options, first=0, classes=None):
    """The derivative of each row's loss by its logits, and where it is not 0 whatever it is multiplied with.

    largest, total, count: numbers of each row, with a dimension for the axis.
    first, classes: the number of the first class, and of them all, where logits are a part of an array.
    """
    x = logits.astype(total.dtype)
    e = jnp.exp((jnp.where(mask[0], x, -jnp.inf) if mask else x) - largest)
    label, bad, ignored = classes_of(labels, classes or logits.shape[axis], axis, options)
    dead = total == 0
    total = jnp.where(dead, 1, total)
    factor = 1 / total
    if options.z_loss:
        factor = factor * (1 + 2 * options.z_loss * (largest + jnp.log(total)))
    hot = jax.lax.broadcasted_iota(label.dtype, logits.shape, axis) == label - jnp.asarray(first).astype(label.dtype)
    slope = e * factor - jnp.where(hot, 1 - options.smoothing, 0).astype(e.dtype)
    if options.smoothing:
        slope = slope - options.smoothing / count
    slope = jnp.where(bad, jnp.nan, slope)
    live = jnp.broadcast_to(~ignored & (~dead | bad), logits.shape)
    return slope, live & mask[0] if mask else live


def _slopes(logits, labels, mask, axis, options):
    """The same as a function of the logits alone, which it is differentiated as."""
    _, largest, _, total = _shifted(logits, mask, axis)
    return slopes(logits, labels, largest, total, participants(logits, mask, axis), mask, axis, options)


def _grad_reference(logits, labels, largest, total, g, *rest, axis, tier, options):
    slope, live = _slopes(logits, labels, rest[1:], axis, options)
    return jnp.where(live, slope * jnp.expand_dims(g, axis), 0).astype(logits.dtype)


def _jvp_reference(logits, labels, largest, total, t, *rest, axis, tier, options):
    slope, live = _slopes(logits, labels, rest[1:], axis, options)
    return jnp.sum(jnp.where(live, slope * t.astype(slope.dtype), 0), axis)


def tangent(logits, labels, largest, total, t, *rest, axis, tier, options):
    """The same from what is kept: in one read of logits and t."""
    count = jnp.expand_dims(rest[0], axis) if rest else logits.shape[axis]
    slope, live = slopes(logits, labels, *(jnp.expand_dims(a, axis) for a in (largest, total)), count, rest[1:], axis, options)
    return jnp.sum(jnp.where(live, slope * t.astype(slope.dtype), 0), axis)


def _along_logits(reference):
    """The derivative of `reference` along its first operand, the last one given."""

    def jvp(logits, *rest, **params):
        return jax.jvp(lambda x: reference(x, *rest[:-1], **params), (logits,), (rest[-1],))[1]

    return jvp


deflinear(cross_entropy_grad_p, 4, _along_logits(_grad_reference), transpose=cross_entropy_jvp_p)
deflinear(cross_entropy_jvp_p, 4, _along_logits(_jvp_reference), transpose=cross_entropy_grad_p)


# ---- the same in jnp, where there is no kernel


def settled(loss, total, bad, ignored):
    """The loss, where nothing takes part or the label is no class as well."""
    return jnp.where(ignored, 0, jnp.where(bad, jnp.nan, jnp.where(total == 0, 0, loss)))


def _loss_reference(logits, labels, *mask, axis, tier, options):
    shifted, largest, _, total = _shifted(logits, mask, axis)
    label, bad, ignored = classes_of(labels, logits.shape[axis], axis, options)
    count = participants(logits, mask, axis)
    log_total = jnp.log(total)
    loss = log_total
    if logits.shape[axis] == 0:
        loss = jnp.zeros_like(total)
    elif options.smoothing != 1:
        loss = loss - (1 - options.smoothing) * jnp.take_along_axis(shifted, label, axis)
    if options.smoothing:
        loss = loss - options.smoothing * jnp.sum(jnp.where(mask[0], shifted, 0) if mask else shifted, axis, keepdims=True) / count
    if options.z_loss:
        loss = loss + options.z_loss * (largest + log_total) ** 2
    loss = settled(loss, total, bad, ignored)
    found = [loss, largest, total, *([count] if mask else [])]
    return [jnp.squeeze(a, axis) for a in found]


def _both_reference(logits, labels, g, *mask, **params):
    loss, largest, total, *count = _loss_reference(logits, labels, *mask, **params)
    return [loss, largest, total, *count, _grad_reference(logits, labels, largest, total, g, *count, *mask, **params)]


REFERENCES = {
    cross_entropy_p: _loss_reference,
    cross_entropy_grad_p: _grad_reference,
    cross_entropy_jvp_p: _jvp_reference,
    cross_entropy_both_p: _both_reference,
}

from jaxkern import _loss_lowering  # noqa: E402, F401  (registers what runs the primitives)
