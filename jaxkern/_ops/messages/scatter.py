"""The primitive of messages that are summed in no fixed order: unchanged programs alone use it, where XLA's order is free too.

    edge_scatter_p   ([x,] index [edges][, other [edges]], *arrays)   y[r, ...] = sum of f(operands of e) over e with index[e] == r

index names a row of the result for each edge. With `wrap` negative ones count from the end, with `clip` the nearest row counts;
other edges that name no row are dropped. `other` says which node is at an edge's other end; see scatter_plan.py. With x the sums are
added to it; it shares its memory with the result. The arrays, their ends and the function are the ones of messages (primitive.py).
The order of the sums, and so their rounding, is free.
"""

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxkern._core.define import lower_to_kernels
from jaxkern._ops.indexing.reference import Rules
from jaxkern._ops.indexing.sort import rows_of
from jaxkern._ops.messages.primitive import checked, type_of
from jaxkern._ops.messages.reference import messages
from jaxkern._ops.messages.scatter_plan import parted, scatter_plan


def edge_scatter(x, index, other_index, arrays, **params):
    """The sums, [rows, *features]. x, other_index: None if there is none."""
    operands = [a for a in (x, index, other_index) if a is not None]
    return edge_scatter_p.bind(*operands, *arrays, onto=x is not None, **params)


def _shape(*operands, function, ends, rows, other, wrap, clip, dtype, onto):
    del wrap, clip
    _, _, _, arrays = parted(operands, other, onto)
    features = checked("jaxkern_edge_scatter", arrays, function, ends)
    return type_of(arrays, (rows, *features), dtype, len(features))


def _reference(*operands, function, ends, rows, other, wrap, clip, dtype, onto):
    x, index, other_index, arrays = parted(operands, other, onto)
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


# Bound only where a chain is lowered, below derivatives and vmap.
edge_scatter_p = Primitive("jaxkern_edge_scatter")
edge_scatter_p.def_abstract_eval(_shape)
mlir.register_lowering(edge_scatter_p, mlir.lower_fun(_reference, multiple_results=False))
lower_to_kernels(
    edge_scatter_p, scatter_plan, _reference, aliases=lambda operands, params: {0: 0} if params["onto"] else {}
)
