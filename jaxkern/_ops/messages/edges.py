"""Edges of a graph, in the order of their rows, and the arrays that messages read with them."""

import typing

import jax
import jax.numpy as jnp

ROW, OTHER, EDGE, SHARED = ENDS = ("row", "other", "edge", "shared")
LOCATED = ("max_at", "min_at")
REDUCTIONS = ("sum", "mean", "max", "min", *LOCATED)
SWAPPED = {ROW: OTHER, OTHER: ROW, EDGE: EDGE, SHARED: SHARED}


class Edges(typing.NamedTuple):
    """Edges in the order of their rows; see above."""

    keys: jax.Array
    order: jax.Array
    other: jax.Array
    offsets: jax.Array


WIDTH = len(Edges._fields)


def features_of(arrays):
    """What the features of arrays of equal rank broadcast to; sizes may be symbolic."""
    sizes = []
    for column in zip(*(a.shape[1:] for a in arrays)):
        longer = [n for n in column if not (isinstance(n, int) and n == 1)]
        if any(n != longer[0] for n in longer):
            raise ValueError(f"features {', '.join(str(a.shape[1:]) for a in arrays)} do not broadcast")
        sizes.append(longer[0] if longer else 1)
    return tuple(sizes)


# ---- graphs of a batch: their disjoint union is one graph

MAX_UNION = 1 << 30  # edges, and nodes of a kind: what kernels number


def joinable(size, operands, dims):
    """Whether the union of a batch of graphs has a kernel; sizes may be symbolic, and graphs empty."""
    sizes = [size]
    for k in (0, WIDTH - 1, 2 * WIDTH - 1):  # edges, and rows in both orders
        x, d = operands[k], dims[k]
        n = [m for axis, m in enumerate(x.shape) if axis != d][0]
        sizes.append(n if k == 0 else n - 1)
    return all(isinstance(n, int) and n > 0 for n in sizes) and size * max(sizes[1:]) < MAX_UNION


def union(edges, others) -> Edges:
    """The edges of a batch of graphs, sorted by the rows of all graphs; padding is last again.

    others: how many nodes there are at the other ends.
    """
    size, count = edges.keys.shape
    rows = edges.offsets.shape[1] - 1
    begin, end = edges.offsets[:, 0], edges.offsets[:, -1]
    kept = end - begin
    base = jnp.cumsum(kept, dtype=jnp.uint32) - kept  # the first kept edge of each graph, in the union
    rest = count - kept
    base_of_rest = jnp.cumsum(rest, dtype=jnp.uint32) - rest
    total = jnp.sum(kept, dtype=jnp.uint32)

    # Where the edge at each position of the union lies in its graph.
    position = jnp.arange(size * count, dtype=jnp.uint32)
    valid = position < total
    among = jnp.where(valid, position, position - total)
    find = lambda starts: jnp.searchsorted(starts, among, side="right", method="scan_unrolled").astype(jnp.int32) - 1
    graph = jnp.where(valid, find(base), find(base_of_rest))
    graph = jnp.clip(graph, 0, size - 1)
    nth = among - jnp.where(valid, base[graph], base_of_rest[graph])
    nth = jnp.where(valid, begin[graph] + nth, jnp.where(nth < begin[graph], nth, nth + kept[graph]))
    graph = graph.astype(jnp.uint32)
    at = (graph * jnp.uint32(count) + nth).astype(jnp.int32)

    take = lambda x: x.reshape(-1)[at]
    keys = jnp.where(valid, graph * jnp.uint32(rows) + take(edges.keys), jnp.uint32(size * rows))
    order = graph * jnp.uint32(count) + take(edges.order)
    other = graph * jnp.uint32(others) + jnp.minimum(take(edges.other), jnp.uint32(others - 1))
    offsets = (base[:, None] + edges.offsets[:, :-1] - begin[:, None]).reshape(-1)
    return Edges(keys, order, other, jnp.concatenate([offsets, total[None]]))
