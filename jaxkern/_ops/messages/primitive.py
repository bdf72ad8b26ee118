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

import functools

import jax
import jax.numpy as jnp

from jaxkern._core import compat, validate
from jaxkern._core.arrays import of_some
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind
from jaxkern._core.signature import Layout, Signature, primitive
from jaxkern._ops.messages import plan, reference
from jaxkern._ops.messages.edges import EDGE, LOCATED, OTHER, ROW, SHARED, WIDTH, Edges, joinable, union


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


# ---- signatures

# Names of their own, so that XLA does not split the graph as it does what is on the edges.
EDGES = {n: f"uint32 {n}" for n in Edges._fields}
BACK = {f"back_{n}": f"uint32 back_{n}" for n in EDGES}
FIRST = {ROW: "rows", OTHER: "others", EDGE: "count", SHARED: "one"}  # dimension of an array
# A batch of arrays becomes their first feature.
FEATURES = Layout(lambda params: {"summed": params.get("summed", 0)}, grows=("feature",), first=True)


def declared(graph, function, ends, **params) -> dict:
    """The declarations of the arrays behind these ones."""
    del params
    arrays = enumerate(zip(function.in_dtypes, ends, strict=True))
    return graph | {f"x{k}": f"{dtype} {FIRST[end]} *feature? *summed?" for k, (dtype, end) in arrays}


def _reduced(operands, params):
    dtypes = [*params["dtypes"], *["uint32"] * (len(params["dtypes"]) * (params["reduction"] in LOCATED))]
    return [f"{dtype} rows *feature" for dtype in dtypes]


def _mapped(operands, params):
    return [f"{dtype} count *feature" for dtype in params["dtypes"]]


def _sizes(operands, params):
    return {"rows": operands.offsets.shape[0] - 1, "count": operands.keys.shape[0], "one": 1}


def _shard(prim, over, *parts, dtypes, **params):
    """Features may be split. Devices add up their sums over features that are."""
    if not over["summed"]:
        return bind(prim, *parts, dtypes=dtypes, **params)
    wide = tuple(map(computing, dtypes))
    sums = jax.lax.psum(bind(prim, *parts, dtypes=wide, **params), over["summed"])
    return [s.astype(d) for s, d in zip(sums, dtypes)]


# ---- vmap of graphs


def _batch(prim, operands, dims, params):
    if all(d is None for d in dims[: 2 * WIDTH]):
        return None
    size = next(x.shape[d] for x, d in zip(operands, dims) if d is not None)
    if joinable(size, operands, dims):
        return _of_union(prim, size, operands, dims, **params)
    # One after the other.
    at = [k for k, d in enumerate(dims) if d is not None]
    one = of_some(functools.partial(bind, prim, **params), operands, at)
    ys = jax.lax.map(lambda xs: one(*xs), [jnp.moveaxis(operands[k], dims[k], 0) for k in at])
    return ys, [0] * len(ys)


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
    ys = bind(prim, *union(edges, others), *union(back, rows), *arrays, ends=tuple(new_ends), **params)
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


# ---- primitives


def _primitives(name, results, in_jnp, launches) -> tuple:
    """(The primitive, the primitive of one order). Programs call both by this name; the second is bound only where the first is
    lowered."""
    one_order = lambda operands: (*operands[:WIDTH], *operands[2 * WIDTH :])
    of = lambda graph: Signature(
        lambda params: declared(graph, **params),
        results,
        FEATURES,
        sizes=_sizes,
        exact={"summed"},
        whole={*Edges._fields, *FIRST.values()},
        gathered=True,  # rows: another split would be exchanged back in the gradient
    )
    ordered = primitive(name, of(EDGES), in_jnp, plan=launches, shard=_shard, makes_nan=False)
    prim = primitive(
        name,
        of(EDGES | BACK),
        lambda *operands, **params: ordered.bind(*one_order(operands), **params),
        batch=_batch,
        taylor=lambda *operands, **params: in_jnp(*one_order(operands), **params),
    )
    compat.needs_devices(prim)
    return prim, ordered


edge_reduce_p, ordered_reduce_p = _primitives(
    "jaxkern_edge_reduce", _reduced, reference.reduce_messages, plan.reduce_plan
)
edge_map_p, ordered_map_p = _primitives("jaxkern_edge_map", _mapped, reference.map_messages, plan.map_plan)
