"""The fused softmax and its gradient in jnp: where there is no kernel, for higher derivatives, and for parts of an array.

`parts` are the operands that the parameter `extras` names, in its order; see _fused.py. `at` says where in the whole
array x lies, if x is a part of it.
"""

import typing

import jax
import jax.numpy as jnp

from jaxkern import _random
from jaxkern._core import partition
from jaxkern._core.rows import computed, lowest_for_infinity, row_sum, shifted


class Place(typing.NamedTuple):
    """Where a part begins, and the size of the whole array, along the row and along the dimension before, the queries."""

    query: int | jax.Array
    queries: int | None
    key: int | jax.Array
    keys: int


def _place(x, axis) -> Place:
    return Place(0, x.shape[axis - 1] if axis else None, 0, x.shape[axis])


def named(parts, extras):
    return dict(zip(extras.split(), parts))


def participants(x, axis, extra, causal, at=None):
    """Which elements take part, in a shape that broadcasts to that of x; None: all."""
    part = extra.get("mask")
    if not causal:
        return part
    at = at or _place(x, axis)
    queries, keys = (jax.lax.broadcasted_iota(jnp.int32, x.shape[axis - 1 :], d) for d in (0, 1))
    below = keys - queries <= at.keys - at.queries + at.query - at.key
    return below if part is None else part & below


def _logits(x, extra, part):
    # Zero where nothing takes part, so that no derivative meets what lies there.
    s = computed(x) if part is None else jnp.where(part, computed(x), 0)
    s = s * extra["scale"] if "scale" in extra else s
    return s + extra["bias"].astype(s.dtype) if "bias" in extra else s


def _dropout(y, axis, extra, threshold, at=None):
    if not threshold:
        return y
    kept = _random.kept(y.shape, axis, extra["key"], threshold, at.key if at else 0)
    return jnp.where(kept, y * (65536 / (65536 - threshold)), 0)


def _scaled(ds, extra, unscaled):
    return ds if unscaled or "scale" not in extra else ds * extra["scale"]


# ---- whole rows


def forward(x, *parts, axis, tier, log, extras, causal, threshold, unscaled):
    extra = named(parts, extras)
    part = participants(x, axis, extra, causal)
    below, exponential, total = shifted(_logits(x, extra, part), () if part is None else (part,), axis)
    if log:
        y = jnp.where(total == 0, -jnp.inf, below - jnp.log(total))
        return lowest_for_infinity(y if part is None else jnp.where(part, y, -jnp.inf), x.dtype)
    y = exponential / jnp.where(total == 0, 1, total)
    y = _dropout(y if part is None else jnp.where(part, y, 0), axis, extra, threshold)
    return y.astype(x.dtype)


def _probabilities(x, axis, extra, causal):
    """softmax(s), and which elements take part in a row that has one whose s is not -inf."""
    part = participants(x, axis, extra, causal)
    _, exponential, total = shifted(_logits(x, extra, part), () if part is None else (part,), axis)
    kept = jnp.broadcast_to(total != 0, x.shape) if part is None else (total != 0) & part
    return exponential / jnp.where(total == 0, 1, total), jnp.broadcast_to(kept, x.shape)


def gradient(x, g, *parts, axis, tier, log, extras, causal, threshold, unscaled):
    extra = named(parts, extras)
    p, kept = _probabilities(x, axis, extra, causal)
    h = _dropout(computed(g, kept), axis, extra, threshold)
    ds = h - p * row_sum(h, axis) if log else p * (h - row_sum(p * h, axis))
    return computed(_scaled(ds, extra, unscaled), kept).astype(x.dtype)


def output_gradient(y, g, *parts, axis, tier, log, extras, causal, threshold, unscaled, over=()):
    # Where y is 0, masked ones among them, nothing is known of g.
    p = computed(y)
    h = computed(g, p != 0)
    (dot,) = partition.row_sums(axis, over, p * h)
    return computed(_scaled(p * (h - dot), named(parts, extras), unscaled), p != 0).astype(y.dtype)


def jvp(x, t, *parts, axis, tier, log, extras, causal, threshold, unscaled):
    extra = named(parts, extras)
    p, kept = _probabilities(x, axis, extra, causal)
    t = _scaled(computed(t, kept), extra, unscaled)
    t = t - row_sum(p * t, axis) if log else p * (t - row_sum(p * t, axis))
    return _dropout(computed(t, kept), axis, extra, threshold).astype(x.dtype)


# ---- parts, of which each device has one: with messages over the axes `over` of the mesh, if rows are split


def part_forward(at, over, x, *parts, axis, tier, log, extras, causal, threshold, unscaled):
    extra = named(parts, extras)
    part = participants(x, axis, extra, causal, at)
    s = _logits(x, extra, part)
    s = s if part is None else jnp.where(part, s, -jnp.inf)
    largest, (total,) = partition.row_exponentials(s, axis, over)
    if log:
        y = jnp.where(total == 0, -jnp.inf, s - largest - jnp.log(total))
        return lowest_for_infinity(y if part is None else jnp.where(part, y, -jnp.inf), x.dtype)
    y = jnp.exp(s - largest) / jnp.where(total == 0, 1, total)
    return _dropout(y if part is None else jnp.where(part, y, 0), axis, extra, threshold, at).astype(x.dtype)


def part_gradient(at, over, x, g, *parts, axis, tier, log, extras, causal, threshold, unscaled):
    extra = named(parts, extras)
    part = participants(x, axis, extra, causal, at)
    s = _logits(x, extra, part)
    s = s if part is None else jnp.where(part, s, -jnp.inf)
    h = _dropout(computed(g) if part is None else computed(g, part), axis, extra, threshold, at)
    # What the cotangents hold in rows where nothing takes part, NaN included, is in sums that are not used.
    largest, (total, of_h) = partition.row_exponentials(s, axis, over, **({"others": [h]} if log else {"weights": [h]}))
    alive = total != 0
    total = jnp.where(alive, total, 1)
    p = jnp.exp(s - largest) / total
    ds = h - p * of_h if log else p * (h - of_h / total)
    return jnp.where(alive if part is None else alive & part, _scaled(ds, extra, unscaled), 0).astype(x.dtype)
