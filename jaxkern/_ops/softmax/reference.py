"""softmax, log_softmax, the fused softmax and their derivatives in jnp.

They are the fallback, define higher derivatives, and compute the parts of rows that are split over devices: `over` names
the mesh axes that split the rows.
"""

import typing

import jax
import jax.numpy as jnp

from jaxkern._core import partition
from jaxkern._core.rows import (
    computed,
    gradient_without_selects,
    largest_of,
    lowest_for_infinity,
    row_sum,
    shifted,
    unless_nan,
    worthwhile,
)
from jaxkern._definitions.reductions import statistics_of
from jaxkern._ops.cross_entropy.primitive import probabilities_of_part
from jaxkern._ops.softmax import dropout

# ---- plain


def participants(x, nothing, axis, *mask):
    """The unmasked elements of rows that are not empty. A row is empty if all its unmasked elements equal `nothing`.

    Sums exclude the tangents and cotangents of all other elements, even NaN.
    """
    takes_part = x != nothing
    alive = jnp.any(takes_part & mask[0] if mask else takes_part, axis, keepdims=True)
    return jnp.broadcast_to(alive & mask[0] if mask else alive, x.shape)


def probabilities(x, axis, kept):
    """softmax(x) in the computing type; 0 for elements that are not `kept`."""
    wide = _unmasked(x, kept)
    largest, (total,) = partition.row_exponentials(wide, axis, ())
    return jnp.exp(wide - largest) / _nonzero(total)


def _unmasked(x, *mask):
    """`x` in the computing type, with -inf where it is masked out."""
    x = computed(x)
    return jnp.where(mask[0], x, -jnp.inf) if mask else x


def _nonzero(total):
    """A sum of exponentials to divide by; the sum is 0 where nothing takes part."""
    return jnp.where(total == 0, 1, total)


def _lifted(total):
    """The same without a condition: the smallest normal number is lost in any sum but 0."""
    return total + jnp.finfo(total.dtype).tiny


def _exponentials(x, mask, axis, over, others=()):
    """(x in the computing type, the largest element of each row, [sum of exponentials, sums of the others]).

    Where rows are split, a kernel reads each part once.
    """
    wide = _unmasked(x, *mask)
    if not over:
        return wide, *partition.row_exponentials(wide, axis, (), others=others)
    _, largest, total = (jnp.expand_dims(a, axis) for a in statistics_of(x, *mask, axis=axis, algorithm="auto"))
    sums = [total, *(jnp.sum(a, axis, keepdims=True) for a in others)]
    return wide, *partition.merge_exponentials(largest, sums, over)


def _stable(x, mask, axis):
    """(x - the largest element of its row, exponentials, their sum) in the computing type.

    In an empty row the exponentials and their sum are 0. There are no conditions, so that XLA compiles a single loop over
    rows for the CPU.
    """
    wide = _unmasked(x, *mask)
    below = wide - largest_of(x, mask, axis)
    e = jnp.exp(below)
    return below, e, row_sum(e, axis)


def softmax(x, *mask, axis, algorithm, over=()):
    if over:
        # The gradient of logsumexp: a kernel that reads x once more and writes the result.
        _, largest, (total,) = _exponentials(x, mask, axis, over)
        return probabilities_of_part(x, largest, total, *mask, axis=axis)
    _, e, total = _stable(x, mask, axis)
    return computed(e / _lifted(total), *mask).astype(x.dtype)


def log_softmax(x, *mask, axis, algorithm, over=()):
    if over:
        wide, largest, (total,) = _exponentials(x, mask, axis, over)
        y = jnp.where(total == 0, -jnp.inf, wide - largest - jnp.log(total))
    else:
        below, _, total = _stable(x, mask, axis)
        y = below - jnp.log(_lifted(total))
    return lowest_for_infinity(jnp.where(mask[0], y, -jnp.inf) if mask else y, x.dtype)


# Sums of tangents and cotangents include empty rows, where they may be NaN and are not used: to know beforehand which rows
# are empty would take another message between devices.


def _kept(dx, alive, mask, dtype):
    """`dx`, and 0 where it is masked out or the row is not alive."""
    return jnp.where(alive & mask[0] if mask else alive, dx, 0).astype(dtype)


def softmax_grad(y, g, *mask, axis, algorithm, over=()):
    p, g = computed(y, *mask), computed(g, *mask)
    (dot,) = partition.row_sums(axis, over, p * g)
    # Changes nothing, but ends XLA:CPU's loop over sums and products, which would store p * (g - dot) for the select.
    dot = jnp.where(jnp.isnan(dot), jnp.nan, dot)
    return jnp.where(p == 0, 0, p * (g - dot)).astype(y.dtype)


def log_softmax_grad(x, g, *mask, axis, algorithm, over=()):
    g = computed(g, *mask)
    if not (over or mask) and x.dtype.itemsize > 2:
        _, e, total = _stable(x, mask, axis)
        each = jnp.where(total == 0, 0, row_sum(g, axis) / _lifted(total))  # ends the loop, too
        return _kept(g - e * each, total != 0, mask, x.dtype)
    if x.dtype.itemsize <= 2:  # x is the result, whose exponentials sum to 1, or to 0 in an empty row
        p = jnp.exp(_unmasked(x, *mask))
        total, of_g = partition.row_sums(axis, over, p, g) if over else (row_sum(p, axis), row_sum(g, axis))
    else:
        wide, largest, (total, of_g) = _exponentials(x, mask, axis, over, others=[g])
        p = jnp.exp(wide - largest) / _nonzero(total)
    of_g = jnp.where(total == 0, 0, of_g)
    return _kept(g - p * of_g, total != 0, mask, x.dtype)


def log_softmax_jvp(x, t, *mask, axis, algorithm, over=()):
    t = computed(t, *mask)
    _, (total, dot) = partition.row_exponentials(_unmasked(x, *mask), axis, over, weights=[t])
    return _kept(t - dot / _nonzero(total), total != 0, mask, x.dtype)


# ---- what XLA:CPU runs at 1.2 times the speed of the above and more
#
# Gradients without selects: see `unless_nan`. A row whose cotangent is not finite is at first NaN even where the cotangent
# must not count.


FEW, SHORT = 1 << 14, 32  # elements, and of a row: below, the condition takes longer than it saves


def _is_wide(x, axis, mask):
    """Whether `_unless_empty` pays for x: in float32 and float64, without a mask."""
    static = all(isinstance(n, int) for n in x.shape)
    return not mask and x.dtype.itemsize > 2 and static and x.size >= FEW and x.shape[axis] >= SHORT


def _unless_empty(x, axis, fast, exact):
    """`fast()`, which is NaN in rows of -inf, or exact() if a row begins with -inf."""
    first = jax.lax.slice_in_dim(x, 0, 1, axis=axis)
    return jax.lax.cond(jnp.any(first == -jnp.inf), exact, fast)


def softmax_on_cpu(x, *mask, axis, algorithm):
    """`jax.nn.softmax` unless a row begins with -inf, as every row of -inf does.

    XLA:CPU computes maxima and exponentials in one loop only if nothing is done to the maxima in between. 1.2 to 1.5 times
    as fast for float32.
    """
    if not _is_wide(x, axis, mask):
        return softmax(x, *mask, axis=axis, algorithm=algorithm)

    def exact():
        # XLA:CPU would store maxima that both branches share, so these are maxima of finite numbers.
        e = jnp.exp(x - jnp.max(jnp.maximum(x, jnp.finfo(x.dtype).min), axis, keepdims=True))
        return e / _lifted(row_sum(e, axis))

    return _unless_empty(x, axis, lambda: jax.nn.softmax(x, axis), exact)


def log_softmax_on_cpu(x, *mask, axis, algorithm):
    """The same, of `jax.nn.log_softmax`."""
    exact = lambda: log_softmax(x, *mask, axis=axis, algorithm=algorithm)
    if not (_is_wide(x, axis, mask) and worthwhile(x)):
        return exact()
    return _unless_empty(x, axis, lambda: jax.nn.log_softmax(x, axis), exact)


def softmax_grad_on_cpu(y, g, *mask, axis, algorithm):
    """This is 1.3 to 5 times as fast with masks, and 1.6 to 5 times in 16 bits; float32 without a mask needs no variant."""
    exact = lambda: softmax_grad(y, g, *mask, axis=axis, algorithm=algorithm)
    if not mask and y.dtype.itemsize > 2:
        return exact()
    return unless_nan(gradient_without_selects(y, g, axis).astype(y.dtype), axis, exact, finite=True)


def log_softmax_grad_on_cpu(x, g, *mask, axis, algorithm):
    """Without a mask this is 1.2 to 1.6 times as fast for 16 bits, and 1.1 to 1.3 times for float32, as fast as JAX's."""
    exact = lambda: log_softmax_grad(x, g, *mask, axis=axis, algorithm=algorithm)
    if _is_wide(x, axis, mask):

        def fast():
            e = jnp.exp(x - jnp.max(x, axis, keepdims=True))
            return g - e * (row_sum(g, axis) / row_sum(e, axis))

        return _unless_empty(x, axis, fast, exact)
    if mask or x.dtype.itemsize > 2 or not worthwhile(x):
        return exact()
    h, p = computed(g), jnp.exp(computed(x))
    empty = jnp.any(jnp.max(x, axis) == -jnp.inf)
    return unless_nan((h - p * row_sum(h, axis)).astype(x.dtype), axis, exact, also=empty)


# ---- fused: operands as in primitive.py; `parts` are those that the parameter `extras` names, in its order


class Place(typing.NamedTuple):
    """The start of a part, and the size of the whole array, along the row and along the queries before it."""

    query: int | jax.Array
    queries: int | None
    key: int | jax.Array
    keys: int


def named(parts, extras):
    return dict(zip(extras.split(), parts))


def fused_participants(x, axis, extra, causal, at=None):
    """Which elements take part, in a shape that broadcasts to the shape of x; None: all.

    at: the `Place` of x in the whole array, if x is a part of it.
    """
    part = extra.get("mask")
    if not causal:
        return part
    at = at or Place(0, x.shape[axis - 1] if axis else None, 0, x.shape[axis])
    queries, keys = (jax.lax.broadcasted_iota(jnp.int32, x.shape[axis - 1 :], d) for d in (0, 1))
    below = keys - queries <= at.keys - at.queries + at.query - at.key
    return below if part is None else part & below


def _logits(x, extra, part):
    # Zero where nothing takes part, so that no derivative depends on what lies there.
    s = computed(x) if part is None else jnp.where(part, computed(x), 0)
    s = s * extra["scale"] if "scale" in extra else s
    return s + extra["bias"].astype(s.dtype) if "bias" in extra else s


def _dropout(y, axis, extra, threshold, at=None):
    if not threshold:
        return y
    kept = dropout.kept(y.shape, axis, extra["key"], threshold, at.key if at else 0)
    return jnp.where(kept, y * (65536 / (65536 - threshold)), 0)


def _scaled(ds, extra, unscaled):
    return ds if unscaled or "scale" not in extra else ds * extra["scale"]


def fused(x, *parts, axis, algorithm, log, extras, causal, threshold, unscaled, dtype=""):
    extra = named(parts, extras)
    part = fused_participants(x, axis, extra, causal)
    below, exponential, total = shifted(_logits(x, extra, part), () if part is None else (part,), axis)
    if log:
        y = jnp.where(total == 0, -jnp.inf, below - jnp.log(total))
        return lowest_for_infinity(y if part is None else jnp.where(part, y, -jnp.inf), x.dtype)
    y = exponential / _nonzero(total)
    y = _dropout(y if part is None else jnp.where(part, y, 0), axis, extra, threshold)
    return y.astype(dtype or x.dtype)


def fused_output_grad_on_cpu(y, g, *parts, axis, extras, unscaled, **params):
    """`fused_output_grad`, 2 to 4.6 times as fast for rows of 512 and 1024; see `unless_nan`."""
    dx = _scaled(gradient_without_selects(y, g, axis), named(parts, extras), unscaled).astype(y.dtype)
    exact = lambda: fused_output_grad(y, g, *parts, axis=axis, extras=extras, unscaled=unscaled, **params)
    return unless_nan(dx, axis, exact, finite=True)


def _fused_probabilities(x, axis, extra, causal):
    """softmax(s), and which elements take part in a row that is not empty."""
    part = fused_participants(x, axis, extra, causal)
    _, exponential, total = shifted(_logits(x, extra, part), () if part is None else (part,), axis)
    kept = jnp.broadcast_to(total != 0, x.shape) if part is None else (total != 0) & part
    return exponential / _nonzero(total), jnp.broadcast_to(kept, x.shape)


def fused_grad(x, g, *parts, axis, algorithm, log, extras, causal, threshold, unscaled):
    extra = named(parts, extras)
    p, kept = _fused_probabilities(x, axis, extra, causal)
    h = _dropout(computed(g, kept), axis, extra, threshold)
    ds = h - p * row_sum(h, axis) if log else p * (h - row_sum(p * h, axis))
    return computed(_scaled(ds, extra, unscaled), kept).astype(x.dtype)


def fused_output_grad(y, g, *parts, axis, algorithm, log, extras, causal, threshold, unscaled, over=()):
    # Where y is 0, as it is where it is masked, g may hold anything.
    p = computed(y)
    h = computed(g, p != 0)
    (dot,) = partition.row_sums(axis, over, p * h)
    return computed(_scaled(p * (h - dot), named(parts, extras), unscaled), p != 0).astype(y.dtype)


def fused_jvp(x, t, *parts, axis, algorithm, log, extras, causal, threshold, unscaled):
    extra = named(parts, extras)
    p, kept = _fused_probabilities(x, axis, extra, causal)
    t = _scaled(computed(t, kept), extra, unscaled)
    t = t - row_sum(p * t, axis) if log else p * (t - row_sum(p * t, axis))
    return _dropout(computed(t, kept), axis, extra, threshold).astype(x.dtype)


def part_of_fused(at, over, x, *parts, axis, algorithm, log, extras, causal, threshold, unscaled, dtype=""):
    """`fused` of a part of an array, which lies at `at`; rows are split over the mesh axes `over`."""
    extra = named(parts, extras)
    part = fused_participants(x, axis, extra, causal, at)
    s = _logits(x, extra, part)
    s = s if part is None else jnp.where(part, s, -jnp.inf)
    largest, (total,) = partition.row_exponentials(s, axis, over)
    if log:
        y = jnp.where(total == 0, -jnp.inf, s - largest - jnp.log(total))
        return lowest_for_infinity(y if part is None else jnp.where(part, y, -jnp.inf), x.dtype)
    y = jnp.exp(s - largest) / _nonzero(total)
    y = _dropout(y if part is None else jnp.where(part, y, 0), axis, extra, threshold, at)
    return y.astype(dtype or x.dtype)


def part_of_fused_grad(at, over, x, g, *parts, axis, algorithm, log, extras, causal, threshold, unscaled):
    extra = named(parts, extras)
    part = fused_participants(x, axis, extra, causal, at)
    s = _logits(x, extra, part)
    s = s if part is None else jnp.where(part, s, -jnp.inf)
    h = _dropout(computed(g) if part is None else computed(g, part), axis, extra, threshold, at)
    largest, (total, of_h) = partition.row_exponentials(s, axis, over, **({"others": [h]} if log else {"weights": [h]}))
    alive = total != 0
    total = _nonzero(total)
    p = jnp.exp(s - largest) / total
    ds = h - p * of_h if log else p * (h - of_h / total)
    return jnp.where(alive if part is None else alive & part, _scaled(ds, extra, unscaled), 0).astype(x.dtype)
