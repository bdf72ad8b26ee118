"""The primitives of messages: shapes, batching, binding.

    edge_reduce_p   (edges, back, *arrays)    y[r, ...] = reduction of f(operands of e) over the edges e of row r
    edge_map_p      (edges, back, *arrays)    y[e, ...] = f(operands of e), summed over the last `summed` features

`edges` and `back` are four uint32 arrays each, the edges in the order of their rows and in the order of the nodes at
their other ends:

    keys [count]        row of the edge at each position, ascending; `rows` for padding, which may be at either end
    order [count]       the edge at each position
    other [count]       the node at its other end; any node for padding
    offsets [rows + 1]  the first position of each row; the last one ends the last row

An array has the shape [n, *features]. All arrays have the same number of feature dimensions, and each dimension has size 1 or one
common size. `ends` says for each array which row a message reads: the row of the edge's row, of the node at its other end, of the
edge itself, or the only row. `function` is a `functor.Function` of scalars. A primitive has a result of dtype `dtypes[k]` for each result of it.
The reductions max_at and min_at have as many results of type uint32 after these: the edge that attains the maximum, the
first one in the order, or 2**32 - 1.
`back` is read by derivatives alone: kernels get what they read (`ordered_reduce_p`, `ordered_map_p`), so that an order
that nothing else needs is not made.
"""

import typing

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxkern._core import compat, define, validate
from jaxkern._core.primitive import bind

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


def edge_reduce(edges, back, arrays, *, function, ends, reduction, dtypes):
    """A list of arrays [rows, *features]: messages reduced by row."""
    params = dict(function=function, ends=tuple(ends), reduction=reduction, dtypes=tuple(map(jnp.dtype, dtypes)))
    return bind(edge_reduce_p, *edges, *back, *map(_whole, arrays), **params)


def edge_map(edges, back, arrays, *, function, ends, summed, dtypes):
    """A list of arrays [edges, *features], without the last `summed` features: messages, or sums over these."""
    params = dict(function=function, ends=tuple(ends), summed=summed, dtypes=tuple(map(jnp.dtype, dtypes)))
    return bind(edge_map_p, *edges, *back, *map(_whole, arrays), **params)


def _whole(x):
    return validate.whole(x, 0)


def features_of(arrays):
    """What the features of arrays of equal rank broadcast to; sizes may be symbolic."""
    sizes = []
    for column in zip(*(a.shape[1:] for a in arrays)):
        longer = [n for n in column if not (isinstance(n, int) and n == 1)]
        if any(n != longer[0] for n in longer):
            raise ValueError(f"features {', '.join(str(a.shape[1:]) for a in arrays)} do not broadcast")
        sizes.append(longer[0] if longer else 1)
    return tuple(sizes)


def checked(prim, arrays, function, ends):
    types = ", ".join(a.str_short() for a in arrays)
    if not arrays or len(ends) != len(arrays) or len({a.ndim for a in arrays}) > 1 or arrays[0].ndim < 1:
        raise ValueError(f"{prim}: ends {ends} do not fit operands {types}")
    if tuple(a.dtype for a in arrays) != tuple(map(jnp.dtype, function.in_dtypes)):
        raise ValueError(f"{prim}: a function of {function.in_dtypes} does not take {types}")
    return features_of(arrays)


def type_of(arrays, shape, dtype, features):
    """The type of a result: its `features` are split like the features of the arrays."""
    more = {}
    mesh = next((a.sharding.mesh for a in arrays if not a.sharding.mesh.empty), None)
    if mesh is not None:
        specs = [validate.explicit_spec(a)[1:] for a in arrays]
        spec = [next((s for s in column if s), None) for column in zip(*specs)][:features]
        more["sharding"] = NamedSharding(mesh, PartitionSpec(None, *spec))
    return arrays[0].update(shape=shape, dtype=dtype, weak_type=False, **more)


def _reduced(keys, order, other, offsets, *arrays, function, ends, reduction, dtypes):
    if reduction not in REDUCTIONS or len(dtypes) != len(function.out_dtypes):
        raise ValueError(f"jaxkern_edge_reduce: {reduction} of {len(function.out_dtypes)} results to {dtypes}")
    features = checked("jaxkern_edge_reduce", arrays, function, ends)
    if reduction in LOCATED:
        dtypes = (*dtypes, *[jnp.dtype(jnp.uint32)] * len(dtypes))
    return [type_of(arrays, (offsets.shape[0] - 1, *features), d, len(features)) for d in dtypes]


def _mapped(keys, order, other, offsets, *arrays, function, ends, summed, dtypes):
    features = checked("jaxkern_edge_map", arrays, function, ends)
    if not 0 <= summed <= len(features) or len(dtypes) != len(function.out_dtypes):
        raise ValueError(f"jaxkern_edge_map: cannot sum {summed} of the features {features}")
    kept = features[: len(features) - summed]
    return [type_of(arrays, (keys.shape[0], *kept), d, len(kept)) for d in dtypes]


# ---- batching


def _batch(prim, operands, dims, **params):
    graph, arrays = operands[: 2 * WIDTH], operands[2 * WIDTH :]
    if any(d is not None for d in dims[: 2 * WIDTH]):
        size = next(x.shape[d] for x, d in zip(operands, dims) if d is not None)
        if _joinable(size, operands, dims):
            return _of_union(prim, size, operands, dims, **params)
        # One after the other.
        batched = [jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims) if d is not None]

        def one(own):
            own = iter(own)
            return bind(prim, *(x if d is None else next(own) for x, d in zip(operands, dims)), **params)

        ys = jax.lax.map(one, batched)
        return ys, [0] * len(ys)
    # The batch becomes the first feature.
    arrays = [jnp.expand_dims(x, 1) if d is None else jnp.moveaxis(x, d, 1) for x, d in zip(arrays, dims[2 * WIDTH :])]
    ys = bind(prim, *graph, *arrays, **params)
    return ys, [1] * len(ys)


# ---- graphs of a batch: their disjoint union is one graph

MAX_UNION = 1 << 30  # edges, and nodes of a kind: what kernels number


def _joinable(size, operands, dims):
    """Whether the union of a batch of graphs has a kernel; sizes may be symbolic, and graphs empty."""
    sizes = [size]
    for k in (0, WIDTH - 1, 2 * WIDTH - 1):  # edges, and rows in both orders
        x, d = operands[k], dims[k]
        n = [m for axis, m in enumerate(x.shape) if axis != d][0]
        sizes.append(n if k == 0 else n - 1)
    return all(isinstance(n, int) and n > 0 for n in sizes) and size * max(sizes[1:]) < MAX_UNION


def _of_union(prim, size, operands, dims, *, ends, **params):
    """The results for the union of `size` graphs: node n and edge e of graph b are number b * nodes + n and b * edges + e.

    Arrays that all graphs share are copied for each, since results and gradients have a row for each node of the union.
    """
    operands = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else validate.whole(jnp.moveaxis(x, d, 0), 0)
        for x, d in zip(operands, dims)
    ]
    edges, back = Edges(*operands[:WIDTH]), Edges(*operands[WIDTH : 2 * WIDTH])
    rows, others, count = edges.offsets.shape[1] - 1, back.offsets.shape[1] - 1, edges.keys.shape[1]
    arrays, new_ends = [], []
    for x, end, d in zip(operands[2 * WIDTH :], ends, dims[2 * WIDTH :]):
        if end == SHARED and d is not None:  # a row for each graph, which each of its rows reads
            x, end = jnp.broadcast_to(x, (size, rows, *x.shape[2:])), ROW
        arrays.append(x[0] if end == SHARED else _merged(x))
        new_ends.append(end)
    ys = bind(prim, *_union(edges, others), *_union(back, rows), *arrays, ends=tuple(new_ends), **params)
    ys = [y.reshape(size, -1, *y.shape[1:]) for y in ys]
    if params.get("reduction") in LOCATED:
        results = len(params["dtypes"])
        first = jnp.arange(size, dtype=jnp.uint32) * jnp.uint32(count)
        nowhere = jnp.uint32(2**32 - 1)
        located = [jnp.where(y == nowhere, y, y - first.reshape(-1, *[1] * (y.ndim - 1))) for y in ys[results:]]
        ys = ys[:results] + located
    return ys, [0] * len(ys)


def _merged(x):
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _union(edges, others) -> Edges:
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


def _primitives(name, shape) -> tuple:
    """(The primitive, the primitive of one order). Programs call both by this name; the second is bound only where the first is
    lowered."""
    one_order = lambda operands: (*operands[:WIDTH], *operands[2 * WIDTH :])
    ordered = define.primitive(name, shape, several=True, makes_nan=False)
    prim = define.primitive(
        name,
        lambda *operands, **params: shape(*one_order(operands), **params),
        _batch,
        lambda *operands, **params: ordered.bind(*one_order(operands), **params),
        several=True,
    )
    compat.needs_devices(prim)
    return prim, ordered


edge_reduce_p, ordered_reduce_p = _primitives("jaxkern_edge_reduce", _reduced)
edge_map_p, ordered_map_p = _primitives("jaxkern_edge_map", _mapped)
