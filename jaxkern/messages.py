"""Messages on graphs: one kernel gathers, applies a user function and sums over edges.

`edge_sum(f, graph, senders=x, edges=w)` is `jax.ops.segment_sum(f(x[graph.senders], w), graph.receivers)`, without the
array of messages in between. Their primitives are in _ops/messages.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxkern._core import compat, functor, validate
from jaxkern._core.dtypes import computing
from jaxkern._core.partition import largest, smallest
from jaxkern._ops.indexing import sort
from jaxkern._ops.messages import derivatives as _derivatives  # noqa: F401
from jaxkern._ops.messages import lowering as _lowering  # noqa: F401  registers the primitives' lowerings
from jaxkern._ops.messages.primitive import EDGE, OTHER, ROW, SHARED, Edges, edge_reduce, features_of
from jaxkern._ops.messages.primitive import edge_map as bind_map
from jaxkern.index_add import integers, safe_index

PyTree = Any  # of arrays, or one array


@jax.tree_util.register_pytree_with_keys_class
class Graph:
    """The edges of a graph in both of the orders that messages need; made once for any number of layers. A pytree.

    Args:
        senders, receivers: integer arrays of shape (num_edges,): the nodes at the ends of each edge, in any order.
            Self loops and several edges between two nodes are allowed. An edge with an end out of range, such as -1 or
            the number of nodes, is padding: it contributes nothing and has zero gradients.
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
        self.axis_name = _axis_name(axis_name)
        for argument, index in (("senders", senders), ("receivers", receivers)):
            validate.check_array("Graph", argument, "an array of integers", index)
        senders, receivers = safe_index(senders), safe_index(receivers)
        if num_nodes is not None and (num_senders is not None or num_receivers is not None):
            raise ValueError("jaxkern.Graph: num_nodes excludes num_senders and num_receivers")
        if num_nodes is None and num_senders is None and num_receivers is None:
            num_nodes = max(
                _count(None, "num_nodes", senders, "senders"), _count(None, "num_nodes", receivers, "receivers")
            )
        if num_nodes is not None:
            self.num_senders = self.num_receivers = _count(num_nodes, "num_nodes")
        else:
            self.num_senders = _count(num_senders, "num_senders", senders, "senders")
            self.num_receivers = _count(num_receivers, "num_receivers", receivers, "receivers")
        self.senders, self.receivers, self.into, self.out_of = _sorted_edges(
            senders, receivers, num_senders=self.num_senders, num_receivers=self.num_receivers
        )

    @property
    def num_edges(self) -> int:
        return self.senders.shape[-1]

    def __repr__(self):
        return f"Graph({self.num_edges} edges, {self.num_senders} senders, {self.num_receivers} receivers)"

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


def _axis_name(value):
    """`axis_name` of a Graph, hashable."""
    names = (value,) if isinstance(value, str) else value
    if value is not None and not (isinstance(names, (tuple, list)) and all(isinstance(n, str) for n in names)):
        raise TypeError(
            f"jaxkern.Graph: axis_name must be a name of a mesh axis, a tuple of names or None, got {validate.shown(value)}"
        )
    return tuple(value) if isinstance(value, list) else value


def _count(n, argument, index=None, indices="", name="Graph") -> int:
    """A number of nodes; if `n` is None, one more than the largest `index`, an array that errors call `indices`."""
    if n is None and index is not None:
        if isinstance(index, jax.core.Tracer):
            raise TypeError(f"jaxkern.{name}: {argument} must be given where {indices} is traced")
        index = np.asarray(index)
        if not jnp.issubdtype(index.dtype, jnp.integer):
            raise TypeError(
                f"jaxkern.{name}: {indices} must be of an integer type, got {index.dtype}{list(index.shape)}"
            )
        n = max(int(index.max()) + 1, 0) if index.size else 0
    n = validate.integer(name, argument, n)
    if not 0 <= n < 1 << 31:
        raise ValueError(f"jaxkern.{name}: {argument} must be from 0 to 2**31 - 1, got {n}")
    return n


@functools.partial(jax.jit, static_argnames=("num_senders", "num_receivers"), inline=True)
def _sorted_edges(senders, receivers, *, num_senders, num_receivers):
    senders, receivers = integers("Graph", "senders", senders), integers("Graph", "receivers", receivers)
    if senders.ndim != 1 or senders.shape != receivers.shape:
        raise ValueError(
            f"jaxkern.Graph: senders and receivers must have one dimension and one size, got shapes {senders.shape} and "
            f"{receivers.shape}"
        )
    sort.check_ordered("Graph", "edges can be sorted", senders.size)
    senders, receivers = validate.whole(senders, 0), validate.whole(receivers, 0)
    valid = _in_range(senders, num_senders) & _in_range(receivers, num_receivers)
    s = jnp.where(valid, senders, 0).astype(jnp.uint32)
    r = jnp.where(valid, receivers, 0).astype(jnp.uint32)
    return senders, receivers, _ordered(valid, r, s, num_receivers), _ordered(valid, s, r, num_senders)


def _in_range(index, n):
    most = jnp.iinfo(index.dtype).max
    return (index >= 0) & ((index < jnp.asarray(min(n, most), index.dtype)) | (n > most))


def _ordered(valid, rows, others, n) -> Edges:
    """The edges sorted by `rows`, with padding last."""
    if rows.shape[0] == 0 or n == 0:
        order = jnp.arange(rows.shape[0], dtype=jnp.uint32)
        return Edges(jnp.full(rows.shape, n, jnp.uint32), order, others, jnp.zeros((n + 1,), jnp.uint32))
    index = jnp.where(valid, rows.astype(jnp.int32), -1)
    keys, order = sort.sort_indices(index[None], rows=n, wrap=False, clip=False)
    return Edges(keys, order, others[order], sort.row_offsets(keys, n))


# ---- operations


def edge_sum(
    f: Callable, graph: Graph, *, senders: PyTree = None, receivers: PyTree = None, edges: PyTree = None
) -> PyTree:
    """Sums of messages at their receivers: `y[i]` is the sum of `f(senders[s], receivers[i], edges[e])` over the edges
    e from s to i.

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
        No array of the size edges x features is written; the gradients are sums of messages too.

    Raises:
        TypeError: `graph` is not a Graph; an array has a type that kernels cannot compute with; f contains an operation that
            a kernel cannot run (the error names it).
        ValueError: shapes do not fit the graph, or features do not broadcast.

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
    """Means of messages at their receivers; 0 where no edge ends.

    Arguments and errors as for `edge_sum`; integers give float32.

    >>> import jax.numpy as jnp, jaxkern
    >>> graph = jaxkern.Graph(jnp.array([0, 1, 2]), jnp.array([1, 1, 0]), num_nodes=3)
    >>> jaxkern.edge_mean(lambda x: x, graph, senders=jnp.array([1.0, 3.0, 5.0])).tolist()
    [5.0, 2.0, 0.0]
    """
    return _reduce("edge_mean", "mean", f, graph, senders, receivers, edges)


def edge_max(
    f: Callable, graph: Graph, *, senders: PyTree = None, receivers: PyTree = None, edges: PyTree = None
) -> PyTree:
    """Maxima of messages at their receivers, feature by feature; -inf, or the least integer, where no edge ends.

    Arguments and errors as for `edge_sum`. NaN wins. The gradient goes to the first of the edges that attain the maximum,
    because only that edge is kept. `jax.ops.segment_max` divides it evenly among all of them; each message would have to be
    kept for that, or computed again to the last bit. If edges are split over devices, the first edge on each device that
    has the maximum gets an equal share.

    >>> import jax.numpy as jnp, jaxkern
    >>> graph = jaxkern.Graph(jnp.array([0, 1, 2]), jnp.array([1, 1, 0]), num_nodes=3)
    >>> jaxkern.edge_max(lambda x: x, graph, senders=jnp.array([1.0, 3.0, 5.0])).tolist()
    [5.0, 3.0, -inf]
    """
    return _reduce("edge_max", "max", f, graph, senders, receivers, edges)


def edge_min(
    f: Callable, graph: Graph, *, senders: PyTree = None, receivers: PyTree = None, edges: PyTree = None
) -> PyTree:
    """Minima of messages at their receivers, feature by feature; inf, or the greatest integer, where no edge ends.

    Arguments and errors as for `edge_sum`. NaN wins. The gradient goes to the first of the edges that attain the minimum, as
    in `edge_max`.

    >>> import jax.numpy as jnp, jaxkern
    >>> graph = jaxkern.Graph(jnp.array([0, 1, 2]), jnp.array([1, 1, 0]), num_nodes=3)
    >>> jaxkern.edge_min(lambda x: x, graph, senders=jnp.array([1.0, 3.0, 5.0])).tolist()
    [5.0, 1.0, inf]
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
    """A message for each edge, or sums of it over features.

    Args:
        f, graph, senders, receivers, edges: as for `edge_sum`.
        reduce_features: axes of the features, counted without the first dimension, to sum messages over.

    Returns:
        An array (or a pytree as f returns it) of shape (graph.num_edges, ...) in the order of the graph's edges; 0 for
        an edge that is padding.

    Raises:
        TypeError, ValueError: as for `edge_sum`. ValueError: `reduce_features` is out of bounds, or repeats an axis.

    >>> import jax.numpy as jnp, jaxkern
    >>> graph = jaxkern.Graph(jnp.array([0, 1, -1]), jnp.array([1, 1, 0]), num_nodes=2)
    >>> q = k = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    >>> jaxkern.edge_map(lambda k, q: k * q, graph, senders=k, receivers=q, reduce_features=0).tolist()
    [11.0, 25.0, 0.0]
    """
    return _edge_map("edge_map", "f", f, graph, senders, receivers, edges, reduce_features)


def _edge_map(name, function, f, graph, senders, receivers, edges, reduce_features):
    """`edge_map` for the public function `name`, whose argument called `function` is f."""
    call = _Call(name, f, graph, senders, receivers, edges, function=function)
    rank = len(call.features)
    axes = validate.static_axis(name, reduce_features, "reduce_features")
    axes = [] if axes is None else validate.sorted_axes(name, axes, call.features, "features", "reduce_features")
    arrays, order = call.arrays, [d for d in range(rank) if d not in axes] + axes
    if order != list(range(rank)):
        arrays = [x.transpose(0, *(d + 1 for d in order)) for x in arrays]
    ys = bind_map(
        *call.orders, arrays, function=call.function, ends=call.ends, summed=len(axes), dtypes=call.function.out_dtypes
    )
    # What f does not read is not among the arrays' features alone: those are in call.features.
    return call.tree(ys)


def _reduce(name, reduction, f, graph, senders=None, receivers=None, edges=None):
    call = _Call(name, f, graph, senders, receivers, edges, mean=reduction == "mean")
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


class _Call:
    """The arguments of a public function as a primitive takes them."""

    def __init__(self, name, f, graph, senders, receivers, edges, mean=False, function="f"):
        validate.function(name, function, f)
        if not isinstance(graph, Graph):
            raise TypeError(f"jaxkern.{name}: graph must be a jaxkern.Graph, got {type(graph).__name__}")
        groups = [
            ("senders", senders, OTHER, graph.num_senders),
            ("receivers", receivers, ROW, graph.num_receivers),
            ("edges", edges, EDGE, graph.num_edges),
        ]
        groups = [g for g in groups if g[1] is not None]
        leaves, self.ends, trees = [], [], []
        for argument, value, end, count in groups:
            own, tree = jax.tree.flatten(value)
            own = [_leaf(name, argument, x, count) for x in own]
            leaves += own
            self.ends += [end] * len(own)
            trees.append((len(own), tree))
        validate.check_call(
            name, function, f, len(groups), f"an element of {', '.join(g[0] for g in groups) or 'nothing'}"
        )
        if not leaves:
            raise TypeError(f"jaxkern.{name}: one of senders, receivers and edges must be given")
        rank = max(x.ndim for x in leaves)
        if graph.axis_name is not None:
            # Once for each array, so that there is one sum of its gradients over devices.
            varying = {id(x): _varying(x, graph.axis_name) for x in leaves}
            leaves = [varying[id(x)] for x in leaves]
        self.arrays = [x.reshape(x.shape[0], *[1] * (rank - x.ndim), *x.shape[1:]) for x in leaves]
        try:
            self.features = features_of(self.arrays)
        except ValueError:
            shapes = ", ".join(str(x.shape[1:]) for x in leaves)
            raise ValueError(f"jaxkern.{name}: features {shapes} do not broadcast") from None

        def scalar(*xs):
            arguments, at = [], 0
            for n, tree in trees:
                arguments.append(jax.tree.unflatten(tree, xs[at : at + n]))
                at += n
            narrow = lambda y: mean and not jnp.issubdtype(y.dtype, jnp.inexact)
            return jax.tree.map(
                lambda y: y.astype(jnp.float32) if narrow(y) else y, jax.tree.map(jnp.asarray, f(*arguments))
            )

        scalar.__name__ = getattr(f, "__name__", type(f).__name__)
        self.function, captured = functor.trace(scalar, [x.dtype for x in leaves], name=name)
        self.arrays += [jnp.asarray(x).reshape((1,) * rank) for x in captured]
        self.ends += [SHARED] * len(captured)
        self.orders = (graph.into, graph.out_of)

    def tree(self, ys):
        return jax.tree.unflatten(self.function.out_tree, ys)


def _varying(x, axes):
    missing = {axes} if isinstance(axes, str) else set(axes)
    missing -= set(compat.varying_axes(x))
    return compat.cast_varying(x, missing) if missing else x


def _leaf(name, argument, x, count):
    validate.check_array(name, argument, "an array or a pytree of arrays", x)
    x = jnp.asarray(x)
    functor.check_dtype(f"jaxkern.{name}: {argument}", x.dtype)
    if x.ndim == 0 or x.shape[0] != count:
        raise ValueError(
            f"jaxkern.{name}: {argument} of shape {x.shape} must have {count} rows, one for each of the graph's"
        )
    return x
