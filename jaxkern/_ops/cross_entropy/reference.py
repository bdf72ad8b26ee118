"""Cross-entropy in jnp: what the kernels compute. See primitive.py for the operands and results."""

import typing

import jax
import jax.numpy as jnp

from jaxkern._core.dtypes import computing
from jaxkern._core.rows import largest_of


class Options(typing.NamedTuple):
    """The numbers of a cross-entropy, constants of a compiled program."""

    smoothing: float = 0.0
    z_loss: float = 0.0
    ignore: int | None = None
    # The gradient may overwrite the logits: for the part of an array on one device, whose program does not show it.
    overwrites: bool = False
    # For calls that `jaxkern.accelerate` puts into a program. Infinite logits, and labels that are not a class, have the
    # results that JAX has in logsumexp(x) - x[label]. If arithmetic makes the logits, the call is left to XLA.
    as_written: bool = False
    # The number of all classes, if the gradient is that of the part of an array on one device: 0 for a whole array. Labels
    # that are not a class of the part have no entry in its gradient. See sharding.py.
    classes: int = 0


def _shifted(logits, mask, axis):
    """(logits - largest, largest, exponentials, their sum) in the computing type; masked-out logits are -inf.

    The largest of an empty row is the least finite number.
    """
    x = logits.astype(computing(logits.dtype))
    if mask is not None:
        x = jnp.where(mask, x, -jnp.inf)
    # With this initial value an empty row needs no condition, and XLA compiles a single loop over rows for the CPU.
    largest = largest_of(logits, () if mask is None else (mask,), axis)
    e = jnp.exp(x - largest)
    total = jnp.sum(e, axis, keepdims=True)
    return x - largest, largest, e, total


def _of_label(x, largest, label, mask, axis):
    """The label's logit - largest. Reads the logits as they are, so that nothing else of their size is stored."""
    found = jnp.take_along_axis(x, label, axis).astype(largest.dtype)
    if mask is not None:
        within = jnp.take_along_axis(jnp.broadcast_to(mask, x.shape), label, axis)
        found = jnp.where(within, found, -jnp.inf)
    return found - largest


def classes_of(labels, classes, axis, options):
    """(class, or 0 if there is none; whether it is bad; whether it is ignored), with a dimension for the axis."""
    labels = jnp.expand_dims(labels, axis)
    labels = labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels
    within = labels >= 0
    if not isinstance(classes, int) or classes <= jnp.iinfo(labels.dtype).max:
        within &= labels < jnp.asarray(classes, labels.dtype)
    ignored = jnp.zeros_like(within) if options.ignore is None else labels == jnp.asarray(options.ignore, labels.dtype)
    return jnp.where(within, labels, 0), ~within & ~ignored, ignored


def participants(x, mask, axis):
    """How many elements of each row take part."""
    if mask is None:
        return jnp.full([1 if d == axis else s for d, s in enumerate(x.shape)], x.shape[axis], computing(x.dtype))
    return jnp.sum(jnp.broadcast_to(mask, x.shape), axis, keepdims=True, dtype=computing(x.dtype))


def slopes(logits, labels, largest, total, count, mask, axis, options, first=0, classes=None, weight=None):
    """d(loss)/d(logits), and a mask of the entries where it may be nonzero.

    largest, total, count: numbers per row, with a dimension for the axis.
    weight: the cotangent of the loss, likewise, or None for 1. It multiplies each term, as in JAX's derivative and in the
    kernels: where it is infinite, the label's entry is the difference of two infinities, NaN.
    first, classes: the first class and the number of all classes, if the logits are a part of an array.
    """
    as_written = options.as_written or options.classes > 0
    x = logits.astype(total.dtype)
    e = jnp.exp((x if mask is None else jnp.where(mask, x, -jnp.inf)) - largest)
    label, bad, ignored = classes_of(labels, classes or logits.shape[axis], axis, options)
    dead = total == 0
    total = jnp.where(dead, 1, total)
    factor = 1 / total
    if options.z_loss:
        factor = factor * (1 + 2 * options.z_loss * (jnp.where(dead, 0, largest) + jnp.log(total)))
    # Of a row, not of each of its elements.
    factor = jnp.where(dead if as_written else bad, jnp.nan, factor)
    height = 1 - options.smoothing
    smooth = options.smoothing
    if weight is not None:
        factor, height, smooth = factor * weight, height * weight, smooth * weight
    if as_written:
        dead, height = jnp.zeros_like(dead), jnp.where(bad, 0, jnp.asarray(height, e.dtype))
    hot = jax.lax.broadcasted_iota(label.dtype, logits.shape, axis) == label - jnp.asarray(first).astype(label.dtype)
    slope = e * factor - jnp.where(hot, height, 0).astype(e.dtype)
    if options.smoothing and logits.shape[axis] != 0:
        slope = slope - smooth / count
    live = jnp.broadcast_to(~ignored & (~dead | bad), logits.shape)
    return slope, live if mask is None else live & mask


def _slopes(logits, labels, mask, axis, options, weight=None):
    """The same as a function of the logits alone, for differentiation."""
    _, largest, _, total = _shifted(logits, mask, axis)
    count = participants(logits, mask, axis)
    return slopes(logits, labels, largest, total, count, mask, axis, options, weight=weight)


def _slopes_by_residuals(logits, labels, largest, total, count, mask, axis, options, weight=None):
    """The same from the residuals, which saves a read of the logits."""
    largest, total = (jnp.expand_dims(a, axis) for a in (largest, total))
    count = options.classes or logits.shape[axis] if count is None else jnp.expand_dims(count, axis)
    return slopes(logits, labels, largest, total, count, mask, axis, options, weight=weight)


def gradient(logits, labels, largest, total, g, count=None, mask=None, *, axis, algorithm, options):
    return _weighed(logits, *_slopes(logits, labels, mask, axis, options, jnp.expand_dims(g, axis)))


def gradient_by_residuals(logits, labels, largest, total, g, count=None, mask=None, *, axis, algorithm, options):
    g = jnp.expand_dims(g, axis)
    return _weighed(logits, *_slopes_by_residuals(logits, labels, largest, total, count, mask, axis, options, g))


def _weighed(logits, slope, live):
    return jnp.where(live, slope, 0).astype(logits.dtype)


def transpose(logits, labels, largest, total, t, count=None, mask=None, *, axis, algorithm, options):
    return _along(t, *_slopes(logits, labels, mask, axis, options), axis)


def transpose_by_residuals(logits, labels, largest, total, t, count=None, mask=None, *, axis, algorithm, options):
    return _along(t, *_slopes_by_residuals(logits, labels, largest, total, count, mask, axis, options), axis)


def _along(t, slope, live, axis):
    return jnp.sum(jnp.where(live, slope * t.astype(slope.dtype), 0), axis)


def settled(loss, largest, total, of_label, bad, ignored, options):
    """The loss, with the values of ignored, bad and empty rows. of_label: the label's logit - largest."""
    if options.as_written:  # nothing is finite beside +inf
        return jnp.where(bad, jnp.nan, jnp.where(largest == jnp.inf, -of_label, loss))
    return jnp.where(ignored, 0, jnp.where(bad, jnp.nan, jnp.where(total == 0, 0, loss)))


def kept_total(largest, total, options):
    """The total to return as a residual. In rows that hold +inf the sum is NaN, which `jax.debug_nans` would report; they get inf."""
    return jnp.where(largest == jnp.inf, jnp.inf, total) if options.as_written else total


def loss(logits, labels, mask=None, *, axis, algorithm, options):
    shifted, largest, _, total = _shifted(logits, mask, axis)
    label, bad, ignored = classes_of(labels, logits.shape[axis], axis, options)
    count = participants(logits, mask, axis)
    log_total = jnp.log(total)
    value = log_total
    of_label = 0
    if logits.shape[axis] == 0:
        value = jnp.zeros_like(total)
    elif options.smoothing != 1:
        of_label = _of_label(logits, largest, label, mask, axis)
        value = value - (1 - options.smoothing) * of_label
    if options.smoothing:
        shifted = shifted if mask is None else jnp.where(mask, shifted, 0)
        value = value - options.smoothing * jnp.sum(shifted, axis, keepdims=True) / count
    if options.z_loss:
        value = value + options.z_loss * (jnp.where(total == 0, 0, largest) + log_total) ** 2
    value = settled(value, largest, total, of_label, bad, ignored, options)
    total = kept_total(largest, total, options)
    found = [value, largest, total, *([] if mask is None else [count])]
    return [jnp.squeeze(a, axis) for a in found]


def both(logits, labels, g, mask=None, **params):
    found = value, largest, total, *count = loss(logits, labels, mask, **params)
    return [*found, gradient_by_residuals(logits, labels, largest, total, g, *(count or [None]), mask, **params)]
