"""Cross-entropy of logits whose classes are split over devices, as a vocabulary often is.

    loss        a kernel reads each part once; one message of a few numbers per row; the device that holds the label's
                logit contributes it
    gradient    a kernel reads and writes each part once, without a message, because residuals describe whole rows
    both        one after the other
    tangent     XLA's operations, and a message

If only rows are split, the kernels run on each part without a message. Classes that do not divide evenly are gathered.
"""

import jax.numpy as jnp
from jax import lax

from jaxkern._core import partition
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind
from jaxkern._definitions.reductions import statistics_of
from jaxkern._ops.cross_entropy import reference
from jaxkern._ops.cross_entropy.reference import Options


def _place(over, width):
    """The first class of this device's part, and the number of all classes."""
    return lax.axis_index(over) * width, lax.psum(1, over) * width


def _statistics(loss_p, logits, mask, axis, smoothing, algorithm):
    """Per row of a part, in one read: the largest logit, the sum of exponentials, the number of participants, and with
    smoothing the sum of logit - largest. They have a dimension for the axis."""
    if not smoothing:
        given = () if mask is None else (mask,)
        _, largest, total = (
            jnp.expand_dims(a, axis) for a in statistics_of(logits, *given, axis=axis, algorithm="auto")
        )
        return largest, total, reference.participants(logits, mask, axis), None
    # With smoothing 1 the loss is log(total) less the mean of that sum, whatever the label is.
    anything = jnp.zeros(logits.shape[:axis] + logits.shape[axis + 1 :], jnp.int32)
    found = bind(loss_p, logits, anything, mask, axis=axis, algorithm=algorithm, options=Options(1.0))
    spread, largest, total, *counted = (jnp.expand_dims(a, axis) for a in found)
    count = counted[0] if counted else reference.participants(logits, mask, axis)
    nothing = total == 0
    below = jnp.where(
        nothing, jnp.where(count > 0, -jnp.inf, 0), count * (jnp.log(jnp.where(nothing, 1, total)) - spread)
    )
    return jnp.where(nothing, -jnp.inf, largest), total, count, below


def loss(loss_p, over, logits, labels, mask=None, *, axis, algorithm, options):
    first, classes = _place(over, logits.shape[axis])
    label, bad, ignored = reference.classes_of(labels, classes, axis, options)
    here = label.astype(jnp.int32) - first
    own = (here >= 0) & (here < logits.shape[axis])
    here = jnp.where(own, here, 0)
    logit = jnp.take_along_axis(logits, here, axis, mode="clip").astype(computing(logits.dtype))
    if mask is not None:
        own_mask = jnp.take_along_axis(jnp.broadcast_to(mask, logits.shape), here, axis, mode="clip")
        logit = jnp.where(own_mask, logit, -jnp.inf)

    largest, total, count, below = _statistics(loss_p, logits, mask, axis, options.smoothing, algorithm)
    numbers = [largest, total, jnp.where(own, logit, 0)]
    if options.smoothing:
        numbers += [below, jnp.broadcast_to(count, below.shape)]
    elif mask is not None:
        numbers.append(count)
    largest, total, logit, *rest = partition.gathered(numbers, over)
    whole = jnp.max(largest, 0)
    whole = jnp.where(whole == -jnp.inf, 0, whole)
    total = jnp.sum(total * jnp.exp(largest - whole), 0)
    logit = jnp.sum(logit, 0) - whole
    count = jnp.full_like(total, classes) if mask is None else jnp.sum(rest[-1], 0)

    log_total = jnp.log(total)
    value = log_total
    if options.smoothing != 1:
        value = value - (1 - options.smoothing) * logit
    if options.smoothing:
        base = jnp.where(largest == -jnp.inf, 0, largest)
        below = jnp.sum(rest[0] + rest[1] * (base - whole), 0)
        value = value - options.smoothing * below / count
    if options.z_loss:
        value = value + options.z_loss * (whole + log_total) ** 2
    value = reference.settled(value, whole, total, logit, bad, ignored, options)
    total = reference.kept_total(whole, total, options)
    return [jnp.squeeze(a, axis) for a in (value, whole, total, *([] if mask is None else [count]))]


_ELSEWHERE, _NOTHING = -1, -2  # labels of a part: the class of another device, and a row whose gradient is 0


def gradient(grad_p, over, logits, labels, largest, total, g, count=None, mask=None, *, axis, algorithm, options):
    """The gradient kernel on the part. What it must know of the whole row is in the label, the weight and the residuals."""
    first, classes = _place(over, logits.shape[axis])
    label, bad, ignored = (jnp.squeeze(a, axis) for a in reference.classes_of(labels, classes, axis, options))
    here = label.astype(jnp.int32) - first
    here = jnp.where((here >= 0) & (here < logits.shape[axis]) & ~bad, here, _ELSEWHERE)
    nothing = ignored
    if not options.as_written:
        nothing |= (total == 0) & ~bad
        g = jnp.where(bad, jnp.nan, g)
    here = jnp.where(nothing, _NOTHING, here)
    options = options._replace(ignore=_NOTHING, as_written=False, classes=classes)
    given = logits, here, largest, total, g, count, mask
    return bind(grad_p, *given, axis=axis, algorithm=algorithm, options=options)


def both(loss_p, grad_p, over, logits, labels, g, mask=None, **params):
    found = value, largest, total, *count = loss(loss_p, over, logits, labels, mask, **params)
    return [*found, gradient(grad_p, over, logits, labels, largest, total, g, *(count or [None]), mask, **params)]


def shard(part, prim, over, *operands, **params):
    """The part of one device, which `part` computes if classes are split."""
    return part(over["classes"], *operands, **params) if over["classes"] else bind(prim, *operands, **params)
