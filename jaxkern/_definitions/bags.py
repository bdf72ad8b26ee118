"""Bags of rows of a table as graphs, and their sums, means and maxima."""

import functools

import jax
import jax.numpy as jnp

from jaxkern._core import validate
from jaxkern._core.dtypes import computing
from jaxkern._ops.messages.edges import Edges
from jaxkern._ops.messages.graphs import in_range, ordered_edges
from jaxkern.messages import Graph, edge_max, edge_sum


def in_bags(ids, bag_of, starts, rows):
    """(graph, valid) of ids that lie bag by bag. They are sorted for the gradient alone. An id that is padding is an edge
    from row 0 for which `valid` is False."""
    position = jnp.arange(ids.shape[0], dtype=jnp.uint32)
    valid = in_range(ids, rows) & (position >= starts[0])
    other = jnp.where(valid, ids, 0).astype(jnp.uint32)
    bags = starts.shape[0] - 1
    into = Edges(bag_of, position, other, starts)
    known = valid & (bag_of < bags)
    back = ordered_edges(known, other, jnp.where(known, bag_of, 0), rows)
    return Graph.tree_unflatten((rows, bags, None), (other, bag_of, into, back)), valid


def row_of(starts, position):
    """The row that contains each position; 0 before the first row, the number of rows after the last."""
    after = jnp.searchsorted(starts, position, side="right", method="scan_unrolled").astype(jnp.uint32)
    return jnp.maximum(after, 1) - 1


def sorted_graph(senders, receivers, num_senders, num_receivers):
    """The graph of these edges, whose receivers ascend; receivers out of range may be at either end."""
    wide = receivers if receivers.dtype.itemsize >= 4 else receivers.astype(jnp.int32)
    # Offsets of rows, and edges that belong to no row, before and after them.
    starts = jnp.searchsorted(wide, jnp.arange(num_receivers + 1, dtype=wide.dtype), method="scan_unrolled")
    row = jnp.where(wide < 0, 0, jnp.where(in_range(wide, num_receivers), wide, num_receivers)).astype(jnp.uint32)
    return in_bags(senders, row, starts.astype(jnp.uint32), num_senders)


def reduced_bags(table, graph, valid, weights, mode):
    if table.shape[0] == 0 or graph.num_edges == 0 or graph.num_receivers == 0:
        dtype = table.dtype if weights is None else jnp.promote_types(table.dtype, weights.dtype)
        dtype = dtype if mode != "mean" or jnp.issubdtype(dtype, jnp.inexact) else jnp.float32
        return jnp.zeros((graph.num_receivers, *table.shape[1:]), dtype)
    if mode == "max":
        lowest = _lowest(table.dtype)
        y = edge_max(lambda x, on: jnp.where(on, x, jnp.asarray(lowest, x.dtype)), graph, senders=table, edges=valid)
        filled = edge_sum(lambda on: on.astype(jnp.int32), graph, edges=valid) > 0
        return jnp.where(filled.reshape(-1, *[1] * (table.ndim - 1)), y, 0)
    if mode == "sum":
        return _total(table, weights, graph, valid)
    count = edge_sum(lambda on: on.astype(jnp.float32), graph, edges=valid)
    return _mean(functools.partial(_total, table, weights, graph, valid), table, count)


def _mean(total, table, count):
    """Means of bags, from their sizes `count` and from total(dtype), which returns their sums in that dtype."""
    dtype = table.dtype if jnp.issubdtype(table.dtype, jnp.inexact) else jnp.dtype(jnp.float32)
    wide = computing(dtype)
    return (total(wide) / jnp.maximum(count, 1).astype(wide).reshape(-1, *[1] * (table.ndim - 1))).astype(dtype)


def _total(table, weights, graph, valid, dtype=None):
    """The sum of each bag; its dtype is `dtype`, by default the common dtype of table and weights."""
    if weights is not None:
        return edge_sum(weighted, graph, senders=table, edges=(weights.reshape(-1), valid))
    take = lambda x, on: jnp.where(on, x, jnp.zeros_like(x))
    return edge_sum(lambda x, on: take(x, on).astype(dtype or x.dtype), graph, senders=table, edges=valid)


def even_bags(table, weights, graph, valid, shape, mode):
    """Sums or means of bags that all have the same number of ids. shape: (bags, ids of a bag).

    XLA computes the result. Derivatives come from `_total`.
    """
    table = validate.whole(table, 0)
    if mode == "sum":
        weights = weights if weights is None else validate.whole(validate.whole(weights, 0), 1)
        dtype = table.dtype if weights is None else jnp.promote_types(table.dtype, weights.dtype)
        return _even_total(table, weights, graph, valid, shape, dtype)
    count = jnp.sum(valid.reshape(shape), 1)
    return _mean(lambda dtype: _even_total(table, weights, graph, valid, shape, dtype), table, count)


@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5))
def _even_total(table, weights, graph, valid, shape, dtype):
    wide, on = computing(dtype), valid.reshape(*shape, *[1] * (table.ndim - 1))
    x = table.at[graph.senders.reshape(shape)].get(mode="promise_in_bounds")
    x = jnp.where(on, x, jnp.zeros_like(x)).astype(wide)
    if weights is not None:
        x = x * jnp.where(on, weights.reshape(on.shape), 0).astype(wide)
    return jnp.sum(x, 1, dtype=wide).astype(dtype)


@functools.partial(_even_total.defjvp, symbolic_zeros=True)
def _even_total_jvp(shape, dtype, primals, tangents):
    """Tangents come from `_total`, which is linear in table and in weights."""
    table, weights, graph, valid = primals
    varied = [
        k for k in (0, 1) if primals[k] is not None and type(tangents[k]) is not jax.custom_derivatives.SymbolicZero
    ]

    def total(*numbers):
        given = dict(zip(varied, numbers))
        return _total(given.get(0, table), given.get(1, weights), graph, valid, dtype)

    y = _even_total(table, weights, graph, valid, shape, dtype)
    if not varied:
        return y, jax.custom_derivatives.zero_from_primal(y)
    return y, jax.jvp(total, [primals[k] for k in varied], [tangents[k] for k in varied])[1]


def weighted(x, edge):
    """x times a weight, or 0 for padding, also in derivatives and if the row or weight of the padding is NaN."""
    weight, on = edge
    return jnp.where(on, x, jnp.zeros_like(x)) * jnp.where(on, weight, jnp.zeros_like(weight))


def _lowest(dtype):
    return -jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min
