"""The primitive of messages that are summed in no fixed order: unchanged programs alone use it, where XLA's order is free too.

    edge_scatter_p   ([x,] index [edges][, other [edges]], *arrays)   y[r, ...] = sum of f(operands of e) over e with index[e] == r

index names a row of the result for each edge. With `wrap` negative ones count from the end, with `clip` the nearest row counts;
other edges that name no row are dropped. `other` says which node is at an edge's other end; see scatter_plan.py. With x the sums are
added to it; it shares its memory with the result. The arrays, their ends and the function are the ones of messages (primitive.py).
The order of the sums, and so their rounding, is free.
"""

import jax.numpy as jnp

from jaxkern._core.primitive import bind
from jaxkern._core.signature import Signature, primitive
from jaxkern._ops.indexing.reference import Rules
from jaxkern._ops.indexing.sort import rows_of
from jaxkern._ops.messages.primitive import FEATURES, declared
from jaxkern._ops.messages.reference import messages
from jaxkern._ops.messages.scatter_plan import scatter_plan


def edge_scatter(x, index, other_index, arrays, **params):
    """The sums, [rows, *features]. x, other_index: None if there is none."""
    return bind(edge_scatter_p, x, index, other_index, *arrays, **params)


def _reference(x, index, other_index, *arrays, function, ends, rows, other, wrap, clip, dtype):
    edges = jnp.arange(index.shape[0])
    row = rows_of(index, rows, Rules(0, wrap=wrap, clip=clip))
    places = {"row": row, "edge": edges}
    if other is not None and other.stride:
        places["other"] = edges // other.stride % other.nodes
    elif other is not None:
        places["other"] = rows_of(other_index, other.nodes, Rules(0, wrap=other.wrap, clip=True))
    (y,) = messages(places, arrays, function, ends)
    x = jnp.zeros((rows, *y.shape[1:]), dtype) if x is None else x
    return x.at[row].add(y.astype(dtype), mode="drop", wrap_negative_indices=False)


_INDICES = {"x?": "sum rows *feature", "index": "integer count", "other_index?": "integer count"}
# Bound only where a chain is lowered, below derivatives and vmap.
edge_scatter_p = primitive(
    "jaxkern_edge_scatter",
    Signature(
        lambda params: declared(_INDICES, **params),
        "sum rows *feature",
        FEATURES,
        dtypes=lambda params: {"sum": params["dtype"]},
        sizes=lambda operands, params: {"rows": params["rows"], "count": operands.index.shape[0], "one": 1},
    ),
    _reference,
    plan=scatter_plan,
    cached=False,
    whole=True,
    aliases=lambda prim, operands, params: {0: 0} if "x" in params.get("given", "").split() else {},
)
