"""Messages on graphs: one kernel gathers, applies a user function and sums over edges.

`edge_sum(f, graph, senders=x, edges=w)` is `jax.ops.segment_sum(f(x[graph.senders], w), graph.receivers)`, without the
array of messages in between. Their primitives are in _ops/messages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxkern._core import validate
from jaxkern._core.dtypes import computing
from jaxkern._core.partition import largest, smallest
from jaxkern._ops.indexing.arguments import safe_index
from jaxkern._ops.messages import derivatives as _derivatives  # noqa: F401
from jaxkern._ops.messages.graphs import Call, axis_names, mapped, node_count, sorted_edges
from jaxkern._ops.messages.primitive import edge_reduce

PyTree = Any  # of arrays, or one array


@jax.tree_util.register_pytree_with_keys_class
class Graph:
    """The edges of a graph in both of the orders that messages need; made once for any number of layers. A pytree.

    Args:
        senders, receivers: arrays of any integer dtype and of shape (num_edges,): the nodes at the ends of each edge, in
            any order. Self loops and several edges between two nodes are allowed. An edge with an end out of range, such as
            -1 or the number of nodes, is padding: it contributes nothing and has zero gradients.
        num_nodes: the number of nodes, an int. None: the largest index plus 1, which is possible only if the indices are
            known while tracing. Required under jit.
        num_senders, num_receivers: instead of num_nodes, where senders and receivers are two sets of nodes.
        axis_name: for edges that are split over devices, inside `jax.shard_map`: the mesh axis, or a tuple of axes, that
            splits them. `senders` and `receivers` are the edges on one device, whose ends may be any nodes, and the result at a
            node combines the edges of all devices.

    Raises:
        TypeError: `senders` or `receivers` is not an array of integers; a number of nodes is not an int, or is missing
            under jit; `axis_name` is not a name or a tuple of names.
        ValueError: shapes differ; a number of nodes or of edges is 2**31 or more; a number of nodes is negative;
            `num_nodes` is given with another.

    >>> import jax.numpy as jnp, jaxkern
    >>> graph = jaxkern.Graph(jnp.array([0, 1, 1]), jnp.array([2, 2, 0]), num_nodes=3)
    >>> jaxkern.edge_sum(lambda x: 2 * x, graph, senders=jnp.array([1.0, 10.0, 100.0])).tolist()
    [20.0, 0.0, 22.0]

    If the graph is fixed, build it once, outside the training step: building it sorts its edges, on the GPU by the radix
    sort of `sort_indices`. It takes 32 bytes per edge. Under `vmap` the graphs of a batch become one, their disjoint union,
    and arrays that all of them share are copied for each.

    Edges that are split over devices are sorted where they are, and so is the graph: it is made in one `shard_map` and read
    in others. Each reduction reduces the edges on a device and sends one message, the sum (the maximum) of the results; a
    gradient by nodes sends one, a gradient by edges none. A mean and a maximum's gradient send numbers of edges or of
    devices, too. For `senders`, `receivers` and weights that are split over a mesh:

        mesh = jax.make_mesh((8,), ("edges",))
        split = jax.P("edges")  # jax.sharding.PartitionSpec

        @jax.jit
        @jax.shard_map(mesh=mesh, in_specs=split, out_specs=split)
        def make(senders, receivers):
            return jaxkern.Graph(senders, receivers, num_nodes=1000, axis_name="edges")

        @jax.shard_map(mesh=mesh, in_specs=(split, jax.P(), split), out_specs=jax.P())
        def layer(graph, x, w):
            return jaxkern.edge_sum(lambda x, w: x * w, graph, senders=x, edges=w)
    """

    def __init__(
        self,
        senders: ArrayLike,
        receivers: ArrayLike,
        *,
        num_nodes: int | None = None,
        num_senders: int | None = None,
        num_receivers: int | None = None,
        axis_name: str | tuple[str, ...] | None = None,
    ):
        self.axis_name = axis_names(axis_name)
        for argument, index in (("senders", senders), ("receivers", receivers)):
            validate.check_array("Graph", argument, "an array of integers", index)
        senders, receivers = safe_index(senders), safe_index(receivers)
        if num_nodes is not None and (num_senders is not None or num_receivers is not None):
            raise ValueError("jaxkern.Graph: num_nodes excludes num_senders and num_receivers")
        if num_nodes is None and num_senders is None and num_receivers is None:
            num_nodes = max(
                node_count(None, "num_nodes", senders, "senders"), node_count(None, "num_nodes", receivers, "receivers")
            )
        if num_nodes is not None:
            self.num_senders = self.num_receivers = node_count(num_nodes, "num_nodes")
        else:
            self.num_senders = node_count(num_senders, "num_senders", senders, "senders")
            self.num_receivers = node_count(num_receivers, "num_receivers", receivers, "receivers")
        self.senders, self.receivers, self.into, self.out_of = sorted_edges(
            senders, receivers, num_senders=self.num_senders, num_receivers=self.num_receivers
        )

    @property
    def num_edges(self) -> int:
        """The number of edges, padding included."""
        return self.senders.shape[-1]

    def __repr__(self):
        # A tree of the structure of a graph may have anything in place of its arrays, such as shardings.
        edges = f"{self.num_edges} edges" if getattr(self.senders, "shape", ()) else f"senders={self.senders}"
        return f"Graph({edges}, {self.num_senders} senders, {self.num_receivers} receivers)"

    def tree_flatten_with_keys(self):
        keys = map(jax.tree_util.GetAttrKey, ("senders", "receivers", "into", "out_of"))
        children = (self.senders, self.receivers, self.into, self.out_of)
        return tuple(zip(keys, children)), (self.num_senders, self.num_receivers, self.axis_name)

    def tree_flatten(self):
        children = (self.senders, self.receivers, self.into, self.out_of)
        return children, (self.num_senders, self.num_receivers, self.axis_name)

    @classmethod
    def tree_unflatten(cls, facts, children):
        graph = object.__new__(cls)
        graph.num_senders, graph.num_receivers, graph.axis_name = facts
        graph.senders, graph.receivers, graph.into, graph.out_of = children
        return graph


# ---- operations


def edge_sum(
    f: Callable, graph: Graph, *, senders: PyTree = None, receivers: PyTree = None, edges: PyTree = None
) -> PyTree:
    """y[i] = sum of f(senders[s], receivers[i], edges[e]) over the edges e from s to i.

    Args:
        f: a function of scalars in JAX. Its arguments are one element each of `senders`, `receivers` and `edges`, as far as
            they are given; a pytree of arrays becomes a pytree of elements. It returns a scalar or a pytree of scalars. It
            may use elementwise operations only, and traced scalars from outside, which have gradients too. f sees the dtypes
            of its operands, and is computed in float32 where these are float16 or bfloat16.
        graph: a `Graph`.
        senders, receivers, edges: arrays, or pytrees of arrays, of shapes (graph.num_senders, ...),
            (graph.num_receivers, ...) and (graph.num_edges, ...). Their features, the trailing dimensions, broadcast as
            in NumPy: an edge weight of shape (num_edges,) or (num_edges, 1), one per head of shape (num_edges, heads, 1).

    Returns:
        An array (or a pytree as f returns it) of shape (graph.num_receivers, ...), 0 where no edge ends. 16-bit and
        float32 messages are computed and summed in float32, and rounded once; the bits are the same every time.

    Raises:
        TypeError: `graph` is not a Graph; an array has a type that kernels cannot compute with; f contains an operation that
            a kernel cannot run (the error names it).
        ValueError: shapes do not fit the graph, or features do not broadcast.

    Derivatives: forward and reverse mode, of any order, by `senders`, `receivers`, `edges` and scalars that `f` closes
    over. They are sums of messages too: by senders over the edges that leave a node, by receivers over the edges that end
    there, by edges one message for each.

    Cost: for each edge, the rows that `f` reads are gathered once, beside 8 bytes for the edge, and each row of the result
    is written once. No array of the size edges x features is written, nor for the gradients, except for a gradient by
    `edges` that has features.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> graph = jaxkern.Graph(jnp.array([0, 1, 2]), jnp.array([1, 1, 0]), num_nodes=3)
    >>> x, w = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), jnp.array([1.0, 0.5, 2.0])
    >>> jaxkern.edge_sum(lambda x, w: x * w, graph, senders=x, edges=w).tolist()
    [[10.0, 12.0], [2.5, 4.0], [0.0, 0.0]]

    Source: the generalised sparse products of Wang et al., "Deep Graph Library", 2019, and Hu et al., "FeatGraph", 2020.
    """
    return _reduce("edge_sum", "sum", f, graph, senders, receivers, edges)


def edge_mean(
    f: Callable, graph: Graph, *, senders: PyTree = None, receivers: PyTree = None, edges: PyTree = None
) -> PyTree:
    """y[i] = mean of f(senders[s], receivers[i], edges[e]) over the edges e from s to i.

    Args:
        f: a function of one element each of `senders`, `receivers` and `edges`, as far as they are given, as for `edge_sum`.
        graph: a `Graph`.
        senders, receivers, edges: arrays, or pytrees of arrays, of shapes (graph.num_senders, ...),
            (graph.num_receivers, ...) and (graph.num_edges, ...), whose features broadcast.

    Returns:
        An array (or a pytree as f returns it) of shape (graph.num_receivers, ...); 0 where no edge ends. Integers give float32.
        16-bit messages are summed in float32, divided, and rounded once.

    Raises:
        TypeError: `graph` is not a Graph; an array has a type that kernels cannot compute with; f returns booleans, or contains
            an operation that a kernel cannot run (the error names it).
        ValueError: shapes do not fit the graph, or features do not broadcast.

    Derivatives: forward and reverse mode, of any order, by the same arguments as `edge_sum`. A mean is the sum divided by
    the number of edges.

    Cost: as for `edge_sum`.

    >>> import jax.numpy as jnp, jaxkern
    >>> graph = jaxkern.Graph(jnp.array([0, 1, 2]), jnp.array([1, 1, 0]), num_nodes=3)
    >>> jaxkern.edge_mean(lambda x: x, graph, senders=jnp.array([1.0, 3.0, 5.0])).tolist()
    [5.0, 2.0, 0.0]

    Source: Wang et al., "Deep Graph Library", 2019.
    """
    return _reduce("edge_mean", "mean", f, graph, senders, receivers, edges)


def edge_max(
    f: Callable, graph: Graph, *, senders: PyTree = None, receivers: PyTree = None, edges: PyTree = None
) -> PyTree:
    """y[i] = max of f(senders[s], receivers[i], edges[e]) over the edges e from s to i, feature by feature.

    Args:
        f: a function of one element each of `senders`, `receivers` and `edges`, as far as they are given, as for `edge_sum`.
        graph: a `Graph`.
        senders, receivers, edges: arrays, or pytrees of arrays, of shapes (graph.num_senders, ...),
            (graph.num_receivers, ...) and (graph.num_edges, ...), whose features broadcast.

    Returns:
        An array (or a pytree as f returns it) of shape (graph.num_receivers, ...); -inf, or the least integer, where no
        edge ends. NaN wins.

    Raises:
        TypeError: `graph` is not a Graph; an array has a type that kernels cannot compute with; f returns booleans, or contains
            an operation that a kernel cannot run (the error names it).
        ValueError: shapes do not fit the graph, or features do not broadcast.

    Derivatives: forward and reverse mode, of any order, by the same arguments as `edge_sum`. The gradient goes to the first
    of the edges that attain the maximum, because only that edge is kept. `jax.ops.segment_max` divides it evenly among all
    of them; each message would have to be kept for that, or computed again to the last bit. If edges are split over
    devices, the first edge on each device that has the maximum gets an equal share.

    Cost: as for `edge_sum`. If it is differentiated, 4 bytes for each element of the result say which edge attains it.

    >>> import jax.numpy as jnp, jaxkern
    >>> graph = jaxkern.Graph(jnp.array([0, 1, 2]), jnp.array([1, 1, 0]), num_nodes=3)
    >>> jaxkern.edge_max(lambda x: x, graph, senders=jnp.array([1.0, 3.0, 5.0])).tolist()
    [5.0, 3.0, -inf]

    Source: Wang et al., "Deep Graph Library", 2019.
    """
    return _reduce("edge_max", "max", f, graph, senders, receivers, edges)


def edge_min(
    f: Callable, graph: Graph, *, senders: PyTree = None, receivers: PyTree = None, edges: PyTree = None
) -> PyTree:
    """y[i] = min of f(senders[s], receivers[i], edges[e]) over the edges e from s to i, feature by feature.

    Args:
        f: a function of one element each of `senders`, `receivers` and `edges`, as far as they are given, as for `edge_sum`.
        graph: a `Graph`.
        senders, receivers, edges: arrays, or pytrees of arrays, of shapes (graph.num_senders, ...),
            (graph.num_receivers, ...) and (graph.num_edges, ...), whose features broadcast.

    Returns:
        An array (or a pytree as f returns it) of shape (graph.num_receivers, ...); inf, or the greatest integer, where no
        edge ends. NaN wins.

    Raises:
        TypeError: `graph` is not a Graph; an array has a type that kernels cannot compute with; f returns booleans, or contains
            an operation that a kernel cannot run (the error names it).
        ValueError: shapes do not fit the graph, or features do not broadcast.

    Derivatives: forward and reverse mode, of any order, by the same arguments as `edge_sum`. The gradient goes to the first
    of the edges that attain the minimum, as in `edge_max`.

    Cost: as for `edge_max`.

    >>> import jax.numpy as jnp, jaxkern
    >>> graph = jaxkern.Graph(jnp.array([0, 1, 2]), jnp.array([1, 1, 0]), num_nodes=3)
    >>> jaxkern.edge_min(lambda x: x, graph, senders=jnp.array([1.0, 3.0, 5.0])).tolist()
    [5.0, 1.0, inf]

    Source: Wang et al., "Deep Graph Library", 2019.
    """
    return _reduce("edge_min", "min", f, graph, senders, receivers, edges)


def edge_map(
    f: Callable,
    graph: Graph,
    *,
    senders: PyTree = None,
    receivers: PyTree = None,
    edges: PyTree = None,
    reduce_features: int | tuple[int, ...] | None = None,
) -> PyTree:
    """y[e] = f(senders[s], receivers[r], edges[e]) for each edge e from s to r, or its sum over features.

    Args:
        f: a function of one element each of `senders`, `receivers` and `edges`, as far as they are given, as for `edge_sum`.
        graph: a `Graph`.
        senders, receivers, edges: arrays, or pytrees of arrays, of shapes (graph.num_senders, ...),
            (graph.num_receivers, ...) and (graph.num_edges, ...), whose features broadcast.
        reduce_features: axes of the features, counted without the first dimension, to sum messages over.

    Returns:
        An array (or a pytree as f returns it) of shape (graph.num_edges, ...) in the order of the graph's edges; 0 for
        an edge that is padding.

    Raises:
        TypeError: `graph` is not a Graph; an array has a type that kernels cannot compute with; `f` contains an operation that
            a kernel cannot run; `reduce_features` is not an int or a tuple of ints.
        ValueError: shapes do not fit the graph, or features do not broadcast; `reduce_features` is out of bounds, or repeats an
            axis.

    Derivatives: forward and reverse mode, of any order, by the same arguments as `edge_sum`. The gradients by nodes are
    `edge_sum`s.

    Cost: for each edge, the rows that `f` reads are gathered once, and the result is written once: with `reduce_features`,
    a dot product of two rows writes one number.

    >>> import jax.numpy as jnp, jaxkern
    >>> graph = jaxkern.Graph(jnp.array([0, 1, -1]), jnp.array([1, 1, 0]), num_nodes=2)
    >>> q = k = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    >>> jaxkern.edge_map(lambda k, q: k * q, graph, senders=k, receivers=q, reduce_features=0).tolist()
    [11.0, 25.0, 0.0]

    Source: sampled products of a dense and a sparse matrix, Wang et al., "Deep Graph Library", 2019.
    """
    return mapped("edge_map", "f", f, graph, senders, receivers, edges, reduce_features)


def _reduce(name, reduction, f, graph, senders=None, receivers=None, edges=None):
    call = Call(name, f, graph, senders, receivers, edges, mean=reduction == "mean")
    out = call.function.out_dtypes
    if any(d == jnp.bool_ for d in out):
        raise TypeError(f"jaxkern.{name}: messages must be numbers, got bool")
    reduce = functools.partial(edge_reduce, *call.orders, call.arrays, function=call.function, ends=call.ends)
    if graph.axis_name is None:
        return call.tree(reduce(reduction=reduction, dtypes=out))
    # Of the edges of all devices. Partial sums are rounded once, when they have been added up.
    axis = graph.axis_name
    if reduction in ("max", "min"):
        ys = reduce(reduction=reduction, dtypes=out)
        return call.tree([(smallest if reduction == "min" else largest)(y, axis) for y in ys])
    ys = jax.lax.psum(reduce(reduction="sum", dtypes=tuple(map(computing, out))), axis)
    if reduction == "mean":
        offsets = graph.into.offsets
        count = jax.lax.psum(offsets[1:] - offsets[:-1], axis)
        ys = [y / jnp.maximum(count, 1).astype(y.dtype).reshape(-1, *[1] * (y.ndim - 1)) for y in ys]
    return call.tree([y.astype(d) for y, d in zip(ys, out)])
