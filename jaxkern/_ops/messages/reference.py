"""Messages in jnp, which run where there is no kernel. The arguments are the arguments of the ordered primitives."""

import jax
import jax.numpy as jnp

from jaxkern._core.dtypes import computing
from jaxkern._ops.messages.edges import LOCATED, features_of

_REDUCTIONS = {
    "sum": jax.ops.segment_sum,
    "mean": jax.ops.segment_sum,
    "max": jax.ops.segment_max,
    "min": jax.ops.segment_min,
}


def messages(places, arrays, function, ends):
    """The results of `function` for each of the edges whose operands lie at `places`, by end."""

    def rows(x, end):
        if end == "shared":
            return x
        if isinstance(x.shape[0], int) and x.shape[0] == 0:  # no node there: no edge is valid, and nothing is read
            x = jnp.zeros((1, *x.shape[1:]), x.dtype)
        return x.at[places[end]].get(mode="clip")

    operands = [rows(x, end) for x, end in zip(arrays, ends)]
    shape = (places["edge"].shape[0], *features_of(operands))
    return [jnp.broadcast_to(y.astype(computing(y.dtype)), shape) for y in function.unrounded(*operands)]


def reduce_messages(keys, order, other, offsets, *arrays, function, ends, reduction, dtypes):
    rows = offsets.shape[0] - 1
    places = {"row": keys, "other": other, "edge": order}
    located, reduction = reduction in LOCATED, reduction.removesuffix("_at")
    out, edges = [], []
    for y, dtype in zip(messages(places, arrays, function, ends), dtypes):
        if located:
            y = _stored(y)
        total = _REDUCTIONS[reduction](y, keys, rows, indices_are_sorted=True)
        if located:
            edges.append(_first(y, total, keys, order, rows))
        if reduction == "mean":
            count = (offsets[1:] - offsets[:-1]).reshape(-1, *[1] * (total.ndim - 1))
            total = jnp.where(count == 0, 0, total / jnp.maximum(count, 1).astype(total.dtype))
        out.append(total.astype(dtype))
    return out + edges


def _stored(y):
    """`y`, in memory. Without this, XLA could compute messages again where they are compared, and round them differently.

    XLA:CPU removes optimization barriers and conditions before it fuses loops, but no scatter.
    """
    return jnp.zeros_like(y).at[jnp.arange(y.shape[0])].set(y, unique_indices=True, indices_are_sorted=True)


def _first(y, total, keys, order, rows):
    """The first edge of each row whose message is `total`."""
    nowhere = jnp.asarray(2**32 - 1, jnp.uint32)
    if any(isinstance(n, int) and n == 0 for n in (rows, y.shape[0])):
        return jnp.full(total.shape, nowhere)
    own = total.at[keys].get(mode="clip")
    attains = (y == own) | ((y != y) & (own != own))
    position = jnp.arange(y.shape[0], dtype=jnp.uint32).reshape(-1, *[1] * (y.ndim - 1))
    first = jax.ops.segment_min(jnp.where(attains, position, nowhere), keys, rows, indices_are_sorted=True)
    return jnp.where(first == nowhere, nowhere, order.at[first].get(mode="fill", fill_value=2**32 - 1))


def map_messages(keys, order, other, offsets, *arrays, function, ends, summed, dtypes):
    places = {"row": keys, "other": other, "edge": order}
    valid = keys < jnp.asarray(offsets.shape[0] - 1, keys.dtype)
    out = []
    for y, dtype in zip(messages(places, arrays, function, ends), dtypes):
        y = jnp.sum(y, tuple(range(y.ndim - summed, y.ndim))) if summed else y
        y = jnp.where(valid.reshape(-1, *[1] * (y.ndim - 1)), y, 0).astype(dtype)
        out.append(jnp.zeros_like(y).at[order].set(y, unique_indices=True))
    return out
