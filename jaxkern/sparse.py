"""Operations built on messages: embedding_bag, spmm, graph_attention, moe_combine and moe_dispatch.

Each is one or a few calls of the primitives of `jaxkern.messages`, which compute the gradients as well.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import sparse
from jax.typing import ArrayLike

from jaxkern._core import cpp, validate
from jaxkern._core.define import CUDA_TYPES
from jaxkern._core.dtypes import computing
from jaxkern._definitions.bags import even_bags, in_bags, reduced_bags, row_of, sorted_graph, weighted
from jaxkern._ops.indexing.arguments import integers, safe_index
from jaxkern._ops.indexing.order import Order
from jaxkern._ops.messages.graphs import in_range, mapped, node_count
from jaxkern.messages import Graph, PyTree, edge_max, edge_sum
from jaxkern.segment import segment_softmax

MODES = ("sum", "mean", "max")
SHORT_BAG = 64  # ids, at most: XLA gathers and adds the rows of such a bag in one loop, at the speed of a copy


def embedding_bag(
    table: ArrayLike,
    ids: ArrayLike,
    segment_ids: ArrayLike | None = None,
    *,
    num_bags: int | None = None,
    offsets: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    mode: str = "sum",
    indices_are_sorted: bool = False,
) -> jax.Array:
    """y[b] = sum, mean or max of weights[k] * table[ids[k]] over the ids k of bag b.

    Args:
        table: array of shape (rows, ...), of real numbers.
        ids: integer array: of shape (bags, ids of a bag), or of shape (count,) with segment_ids or offsets. An id outside
            [0, rows), such as -1, is padding: it contributes nothing to its bag.
        segment_ids: integer array of shape (count,): the bag of each id. An id whose bag is out of range is left out.
        num_bags: the number of bags, an int, with segment_ids. None: the largest segment id plus 1, which must be known
            while tracing.
        offsets: integer array of shape (bags,): where each bag begins in `ids`, ascending from 0; the last one ends with
            `ids`, as in `torch.nn.functional.embedding_bag`.
        weights: array of the shape of ids, by which rows are multiplied; for mode "sum".
        mode: "sum", "mean" or "max".
        indices_are_sorted: a promise that segment_ids ascend, which saves sorting them.

    Returns:
        Array of shape (bags, *table.shape[1:]) and the type of table, or of table and weights; 0 for a bag without ids. Rows
        are added in float32 or wider, and rounded once.

    Raises:
        TypeError: `table` or `weights` is not an array of numbers; `ids`, `segment_ids` or `offsets` is not an array of
            integers; `num_bags` is not an int, or is missing under jit.
        ValueError: shapes do not match; flat ids come with neither or both of `segment_ids` and `offsets`; `mode` is
            unknown; `weights` are given with a mode other than "sum".

    Derivatives: forward and reverse mode, of any order, by `table` and `weights`. The gradient by `table` sorts the ids,
    and is bitwise reproducible; in mode "max" it goes to the first row that attains the maximum.

    Cost: one kernel gathers each row that is named once, and writes each bag once; if `ids` is an array of bags of up to 64
    ids, one XLA loop does. The array of gathered rows is never written. The gradient reads each bag's cotangent for its
    ids, and writes an array of the size of `table`.

    >>> import jax.numpy as jnp, jaxkern
    >>> table = jnp.array([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    >>> jaxkern.embedding_bag(table, jnp.array([[0, 1], [2, -1]])).tolist()
    [[11.0, 22.0], [100.0, 200.0]]
    >>> jaxkern.embedding_bag(table, jnp.array([0, 1, 2]), offsets=jnp.array([0, 2, 2]), mode="mean").tolist()
    [[5.5, 11.0], [0.0, 0.0], [100.0, 200.0]]

    Source: `torch.nn.EmbeddingBag`.
    """
    name = "embedding_bag"
    table, ids = _numbers(name, "table", table), _indices(name, "ids", ids)
    if not isinstance(mode, str) or mode not in MODES:
        raise ValueError(f"jaxkern.{name}: mode must be one of {', '.join(MODES)}, got {validate.shown(mode)}")
    indices_are_sorted = validate.flag(name, "indices_are_sorted", indices_are_sorted)
    weights = None if weights is None else _numbers(name, "weights", weights)
    if weights is not None and mode != "sum":
        raise ValueError(f"jaxkern.{name}: weights are for mode 'sum', not {mode!r}")
    if table.ndim < 1:
        raise ValueError(f"jaxkern.{name}: table must have rows, got shape {table.shape}")
    given = [k for k, v in (("segment_ids", segment_ids), ("offsets", offsets)) if v is not None]
    if (ids.ndim == 2 and given) or (ids.ndim == 1 and len(given) != 1) or ids.ndim not in (1, 2):
        raise ValueError(
            f"jaxkern.{name}: ids of shape (bags, ids of a bag), or of shape (count,) with either segment_ids or offsets "
            f"are needed, got shape {ids.shape} with {' and '.join(given) or 'neither'}"
        )
    if weights is not None and weights.shape != ids.shape:
        raise ValueError(f"jaxkern.{name}: weights of shape {weights.shape} and ids of shape {ids.shape} differ")
    rows = table.shape[0]
    if ids.ndim == 2:
        bags, length = ids.shape
        starts = jnp.arange(bags + 1, dtype=jnp.uint32) * jnp.uint32(length)
        bag_of = jnp.arange(bags * length, dtype=jnp.uint32) // jnp.uint32(max(length, 1))
        graph, valid = in_bags(ids.reshape(-1), bag_of, starts, rows)
        computable = {a.dtype.name for a in (table, weights) if a is not None} <= CUDA_TYPES.keys() - {"bool"}
        if mode != "max" and computable and 0 < length <= SHORT_BAG and 0 not in (rows, bags):
            return even_bags(table, weights, graph, valid, ids.shape, mode)
    elif offsets is not None:
        offsets = _indices(name, "offsets", offsets)
        if offsets.ndim != 1:
            raise ValueError(f"jaxkern.{name}: offsets must have one dimension, got shape {offsets.shape}")
        count = ids.shape[0]
        starts = jnp.clip(offsets, 0, count).astype(jnp.uint32)
        starts = jnp.concatenate([starts, jnp.full((1,), count, jnp.uint32)])
        position = jnp.arange(count, dtype=jnp.uint32)
        bag_of = row_of(starts, position)
        graph, valid = in_bags(ids, bag_of, starts, rows)
    else:
        validate.check_array(name, "segment_ids", "an array of integers", segment_ids)
        # Counted before they become an array of JAX, which is a tracer under jit.
        bags = node_count(num_bags, "num_bags", safe_index(segment_ids), "segment_ids", name)
        segment_ids = _indices(name, "segment_ids", segment_ids)
        if segment_ids.shape != ids.shape:
            raise ValueError(
                f"jaxkern.{name}: segment_ids of shape {segment_ids.shape} and ids of shape {ids.shape} differ"
            )
        if indices_are_sorted:
            graph, valid = sorted_graph(ids, segment_ids, rows, bags)
        else:
            graph = Graph(ids, segment_ids, num_senders=rows, num_receivers=bags)
            valid = jnp.ones(ids.shape, bool)
    return reduced_bags(table, graph, valid, None if weights is None else weights.reshape(-1), mode)


def _numbers(name, argument, x):
    """`x` as an array of a type that kernels have."""
    validate.check_array(name, argument, "an array", x)
    x = jnp.asarray(x)
    cpp.check_dtype(f"jaxkern.{name}: {argument}", x.dtype)
    if x.dtype == jnp.bool_:
        raise TypeError(f"jaxkern.{name}: {argument} must be numbers, got bool{list(x.shape)}")
    return x


def _indices(name, argument, index):
    validate.check_array(name, argument, "an array of integers", index)
    return integers(name, argument, jnp.asarray(safe_index(index)))


def spmm(a: sparse.BCOO | sparse.BCSR, b: ArrayLike, *, graph: Graph | None = None) -> jax.Array:
    """`a @ b` for a sparse matrix a and a dense array b.

    Args:
        a: `jax.experimental.sparse.BCOO` or `BCSR` of shape (m, n), without batch or dense dimensions.
        b: array of shape (n, ...), of real numbers.
        graph: the result of `spmm_graph` for a matrix whose elements are at the same positions. Then nothing is sorted.

    Returns:
        Array of shape (m, *b.shape[1:]). Products are summed in float32 or wider and rounded once, with the same bits in
        every run.

    Raises:
        TypeError: `a` is not a sparse matrix of numbers, or `b` is not an array of numbers; `graph` is not a Graph.
        ValueError: shapes do not match, or `graph` belongs to another matrix.

    Derivatives: forward and reverse mode, of any order, by `b` and the elements of `a`. One kernel computes the gradient by
    `b`, one the gradient by the elements, and only at their positions.

    Cost: for each element of `a`, a row of `b` is gathered; each row of the result is written once. Without `graph`,
    elements are sorted for the gradient, and for the product unless they are in order.

    >>> import jax.numpy as jnp, jaxkern
    >>> from jax.experimental import sparse
    >>> a = sparse.BCOO.fromdense(jnp.array([[0.0, 2.0], [3.0, 0.0], [0.0, 0.0]]))
    >>> jaxkern.spmm(a, jnp.array([[1.0, 10.0], [2.0, 20.0]])).tolist()
    [[4.0, 40.0], [3.0, 30.0], [0.0, 0.0]]

    Source: Wang et al., "Deep Graph Library", 2019, which writes messages as sparse products.
    """
    _check_matrix("spmm", a)
    b = _numbers("spmm", "b", b)
    graph = spmm_graph(a) if graph is None else graph
    if b.ndim < 1 or b.shape[0] != a.shape[1]:
        raise ValueError(f"jaxkern.spmm: a of shape {a.shape} and b of shape {b.shape} do not match")
    if not isinstance(graph, Graph):
        raise TypeError(f"jaxkern.spmm: graph must be what jaxkern.spmm_graph returns, got {type(graph).__name__}")
    if (graph.num_receivers, graph.num_senders) != a.shape or graph.num_edges != a.nse:
        raise ValueError(
            f"jaxkern.spmm: graph is {graph!r}, which is not the graph of a matrix of shape {a.shape} with {a.nse} elements"
        )
    on = in_range(graph.senders, a.shape[1])
    return edge_sum(weighted, graph, senders=b, edges=(a.data, on))


def spmm_graph(a: sparse.BCOO | sparse.BCSR) -> Graph:
    """The graph of a sparse matrix: an edge from column to row for each element, for `spmm` to take.

    Args:
        a: `jax.experimental.sparse.BCOO` or `BCSR` of shape (m, n), without batch or dense dimensions. Rows that are in
            order (a BCSR, or a BCOO whose `indices_sorted` is set) are not sorted again.

    Returns:
        A `Graph` with n senders and m receivers.

    Raises:
        TypeError: `a` is not a sparse matrix of numbers.
        ValueError: `a` has batch or dense dimensions.

    >>> import jax.numpy as jnp, jaxkern
    >>> from jax.experimental import sparse
    >>> jaxkern.spmm_graph(sparse.BCOO.fromdense(jnp.eye(3)))
    Graph(3 edges, 3 senders, 3 receivers)
    """
    _check_matrix("spmm_graph", a)
    rows, columns = a.shape
    if isinstance(a, sparse.BCSR):
        starts = a.indptr.astype(jnp.uint32)
        position = jnp.arange(a.nse, dtype=jnp.uint32)
        graph, valid = in_bags(a.indices, row_of(starts, position), starts, columns)
    elif a.indices_sorted:
        graph, valid = sorted_graph(a.indices[:, 1], a.indices[:, 0], columns, rows)
    else:
        return Graph(a.indices[:, 1], a.indices[:, 0], num_senders=columns, num_receivers=rows)
    # Elements that are padding have no column; `spmm` finds them by the graph.
    senders = jnp.where(valid, graph.senders.astype(jnp.int32), -1)
    return Graph.tree_unflatten((columns, rows, None), (senders, graph.receivers, graph.into, graph.out_of))


# How a matrix of another type of jax.experimental.sparse becomes one that `spmm` takes.
_CONVERSIONS = {
    "COO": "BCOO((a.data, jnp.stack([a.row, a.col], 1)), shape=a.shape)",
    "CSR": "BCSR((a.data, a.indices, a.indptr), shape=a.shape)",
}


def _check_matrix(name, a):
    if not isinstance(a, (sparse.BCOO, sparse.BCSR)):
        make = _CONVERSIONS.get(type(a).__name__ if type(a).__module__.startswith("jax.") else "", "BCOO.fromdense(a)")
        if type(a).__module__.startswith("scipy."):
            make = "BCOO.from_scipy_sparse(a)"
        raise TypeError(
            f"jaxkern.{name}: a must be a BCOO or a BCSR of jax.experimental.sparse, got {type(a).__name__}; {make} makes one"
        )
    if a.n_batch or a.n_dense or len(a.shape) != 2:
        raise ValueError(
            f"jaxkern.{name}: a must be a matrix without batch and dense dimensions, got shape {a.shape} with "
            f"{a.n_batch} and {a.n_dense}"
        )
    _numbers(name, "a", a.data)


def graph_attention(
    score: Callable,
    graph: Graph,
    values: ArrayLike,
    *,
    senders: PyTree = None,
    receivers: PyTree = None,
    edges: PyTree = None,
    reduce_features: int | tuple[int, ...] | None = None,
) -> jax.Array:
    """y[i] = sum of softmax(score)[e] * values[s] over the edges e from s to i: attention along the edges of a graph.

    Args:
        score: a function of scalars in JAX, called as f in `edge_sum` with one element of `senders`, `receivers` and
            `edges`; it returns the score of an edge.
        graph: a `Graph`.
        values: array of shape (graph.num_senders, *heads, ...), of real numbers; *heads is the shape of a score.
        senders, receivers, edges: arrays or pytrees of arrays, as for `edge_sum`, from which scores are computed.
        reduce_features: axes of their features to sum scores over, as in `edge_map`: the last one for dot products.

    Returns:
        Array of shape (graph.num_receivers, *values.shape[1:]), 0 where no edge ends.

    Raises:
        TypeError: `graph` is not a Graph; `values` is not an array of numbers; `score` does not return one number, or
            contains an operation that a kernel cannot run; `reduce_features` is not an int or a tuple of ints.
        ValueError: shapes do not fit the graph; `values` do not fit the scores; `reduce_features` is out of bounds.

    Derivatives: forward and reverse mode, of any order, by `values`, `senders`, `receivers`, `edges` and scalars that
    `score` closes over.

    Cost: one kernel computes the scores, one the softmax, and one the weighted sum, which gathers a row of `values` for
    each edge. The only arrays of the size of the edges that they write are the scores and the weights, one number for each
    edge and head.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> graph = jaxkern.Graph(jnp.array([0, 1, 2]), jnp.array([1, 1, 0]), num_nodes=3)
    >>> a, x = jnp.zeros(3), jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> score = lambda s, r: jax.nn.leaky_relu(s + r, 0.2)
    >>> jaxkern.graph_attention(score, graph, x, senders=a, receivers=a).tolist()
    [[5.0, 6.0], [2.0, 3.0], [0.0, 0.0]]

    Source: Velickovic et al., "Graph Attention Networks", 2018.
    """
    name = "graph_attention"
    values = _numbers(name, "values", values)
    scores = mapped(name, "score", score, graph, senders, receivers, edges, reduce_features)
    if not isinstance(scores, jax.Array):
        raise ValueError(f"jaxkern.{name}: score must return one scalar, got {jax.tree.structure(scores)}")
    validate.real(name, "the result of score", scores)
    heads = scores.shape[1:]
    fits = values.ndim > len(heads) and values.shape[0] == graph.num_senders
    if not fits or any(v not in (1, h) for v, h in zip(values.shape[1:], heads)):
        raise ValueError(
            f"jaxkern.{name}: values of shape {values.shape} do not fit {graph.num_senders} senders and scores of shape "
            f"{scores.shape}"
        )
    if graph.axis_name is not None:
        return _attention_over_devices(graph, scores, values)
    valid = in_range(graph.senders, graph.num_senders) & in_range(graph.receivers, graph.num_receivers)
    ids = jnp.where(valid, graph.receivers, -1).astype(jnp.int32)
    order = Order(ids, graph.into.keys, graph.into.order, graph.num_receivers, False, False)
    weights = segment_softmax(scores, None, order=order)
    weights = weights.reshape(*weights.shape, *[1] * (values.ndim - weights.ndim))
    return edge_sum(lambda v, w: v * w, graph, senders=values, edges=weights)


def _attention_over_devices(graph, scores, values):
    """The attention of edges that are split over devices, by one maximum and two sums over all devices."""
    top = jax.lax.stop_gradient(edge_max(lambda s: s, graph, edges=jax.lax.stop_gradient(scores)))
    wide = lambda array: array.reshape(*array.shape, *[1] * (values.ndim - array.ndim))
    dtype, scores = jnp.result_type(values, scores), scores.astype(computing(scores.dtype))
    exponential = lambda top, s: jnp.exp(jnp.where(s == -jnp.inf, s, s - top.astype(s.dtype)))
    total = edge_sum(exponential, graph, receivers=top, edges=scores)
    weighted = lambda v, top, s: v.astype(s.dtype) * exponential(top, s)
    y = edge_sum(weighted, graph, senders=values, receivers=wide(top), edges=wide(scores))
    return (y / wide(jnp.where(total == 0, 1, total))).astype(dtype)


def moe_combine(x: ArrayLike, indices: ArrayLike, weights: ArrayLike | None = None) -> jax.Array:
    """y[t] = sum of weights[t, j] * x[indices[t, j]] over j: from the slots of experts back to tokens.

    Args:
        x: array of shape (slots, ...), the results of all experts.
        indices: integer array of shape (tokens, k): the slot of each of a token's k experts. An index out of range, such as
            -1, means that the expert dropped the token.
        weights: array of shape (tokens, k), or None for 1.

    Returns:
        Array of shape (tokens, *x.shape[1:]), summed in float32 or wider and rounded once.

    Raises:
        TypeError: `x` or `weights` is not an array of numbers, or `indices` is not an array of integers.
        ValueError: shapes do not match.

    Derivatives: forward and reverse mode, of any order, by `x` and `weights`. The gradient by `x` sorts the indices; the
    gradient by `weights` does not.

    Cost: a row of `x` is read for each token and expert, and each token is written once. No array of the size tokens * k *
    features is written.

    >>> import jax.numpy as jnp, jaxkern
    >>> x = jnp.array([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    >>> jaxkern.moe_combine(x, jnp.array([[0, 2], [1, -1]]), jnp.array([[0.5, 0.25], [1.0, 9.0]])).tolist()
    [[25.5, 51.0], [10.0, 20.0]]

    Source: Shazeer et al., "Outrageously Large Neural Networks", 2017.
    """
    name = "moe_combine"
    x, indices = _numbers(name, "x", x), _slots(name, indices)
    if x.ndim < 1:
        raise ValueError(f"jaxkern.{name}: x must have rows, got shape {x.shape}")
    weights = None if weights is None else _numbers(name, "weights", weights)
    if weights is not None and weights.shape != indices.shape:
        raise ValueError(
            f"jaxkern.{name}: weights of shape {weights.shape} and indices of shape {indices.shape} differ"
        )
    return embedding_bag(x, indices, weights=weights)


def moe_dispatch(x: ArrayLike, indices: ArrayLike, num_slots: int) -> jax.Array:
    """y[s] = sum of the tokens x[t] with indices[t, j] = s: the transpose of `moe_combine` without weights.

    Args:
        x: array of shape (tokens, ...), of real numbers.
        indices: integer array of shape (tokens, k), as for `moe_combine`. A slot that several tokens name gets the sum of
            these tokens.
        num_slots: the number of slots, an int.

    Returns:
        Array of shape (num_slots, *x.shape[1:]), 0 in slots that no token is in.

    Raises:
        TypeError: `x` is not an array of numbers, `indices` is not an array of integers, or `num_slots` is not an int.
        ValueError: shapes do not match, or `num_slots` is negative.

    Derivatives: forward and reverse mode, of any order. The gradient is `moe_combine`, and sorts nothing.

    Cost: each token is read for each of its slots, and each slot is written once. The indices are sorted first.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.moe_dispatch(jnp.array([1.0, 2.0]), jnp.array([[2, 0], [3, -1]]), 5).tolist()
    [1.0, 0.0, 1.0, 2.0, 0.0]

    Source: Shazeer et al., "Outrageously Large Neural Networks", 2017.
    """
    name = "moe_dispatch"
    x, indices = _numbers(name, "x", x), _slots(name, indices)
    tokens, k = indices.shape
    if x.ndim < 1 or x.shape[0] != tokens:
        raise ValueError(f"jaxkern.{name}: x of shape {x.shape} and indices of shape {indices.shape} do not match")
    num_slots = node_count(num_slots, "num_slots", name=name)
    # Tokens are in order, so that the gradient needs no sort.
    starts = jnp.arange(tokens + 1, dtype=jnp.uint32) * jnp.uint32(k)
    token = jnp.arange(tokens * k, dtype=jnp.uint32) // jnp.uint32(max(k, 1))
    back, valid = in_bags(indices.reshape(-1), token, starts, num_slots)
    graph = Graph.tree_unflatten((tokens, num_slots, None), (token, back.senders, back.out_of, back.into))
    if 0 in (tokens, k, num_slots):
        return jnp.zeros((num_slots, *x.shape[1:]), x.dtype)
    return edge_sum(lambda x, on: jnp.where(on, x, jnp.zeros_like(x)), graph, senders=x, edges=valid)


def _slots(name, indices):
    indices = _indices(name, "indices", indices)
    if indices.ndim != 2:
        raise ValueError(f"jaxkern.{name}: indices must have shape (tokens, k), got {indices.shape}")
    return indices
