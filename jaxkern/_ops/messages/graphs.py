"""Graphs, and the arguments of public functions of messages as their primitives take them."""

import functools

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxkern._core import compat, cpp, functor, validate
from jaxkern._ops.indexing import sort
from jaxkern._ops.indexing.arguments import integers
from jaxkern._ops.messages.edges import EDGE, OTHER, ROW, SHARED, Edges, features_of
from jaxkern._ops.messages.primitive import edge_map


def axis_names(value):
    """`axis_name` of a Graph, hashable."""
    names = (value,) if isinstance(value, str) else value
    if value is not None and not (isinstance(names, (tuple, list)) and all(isinstance(n, str) for n in names)):
        raise TypeError(
            f"jaxkern.Graph: axis_name must be a name of a mesh axis, a tuple of names or None, got {validate.shown(value)}"
        )
    return tuple(value) if isinstance(value, list) else value


def node_count(n, argument, index=None, indices="", name="Graph") -> int:
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
def sorted_edges(senders, receivers, *, num_senders, num_receivers):
    senders, receivers = integers("Graph", "senders", senders), integers("Graph", "receivers", receivers)
    if senders.ndim != 1 or senders.shape != receivers.shape:
        raise ValueError(
            f"jaxkern.Graph: senders and receivers must have one dimension and one size, got shapes {senders.shape} and "
            f"{receivers.shape}"
        )
    sort.check_ordered("Graph", "edges can be sorted", senders.size)
    senders, receivers = validate.whole(senders, 0), validate.whole(receivers, 0)
    valid = in_range(senders, num_senders) & in_range(receivers, num_receivers)
    s = jnp.where(valid, senders, 0).astype(jnp.uint32)
    r = jnp.where(valid, receivers, 0).astype(jnp.uint32)
    return senders, receivers, ordered_edges(valid, r, s, num_receivers), ordered_edges(valid, s, r, num_senders)


def in_range(index, n):
    most = jnp.iinfo(index.dtype).max
    return (index >= 0) & ((index < jnp.asarray(min(n, most), index.dtype)) | (n > most))


def ordered_edges(valid, rows, others, n) -> Edges:
    """The edges sorted by `rows`, with padding last."""
    if rows.shape[0] == 0 or n == 0:
        order = jnp.arange(rows.shape[0], dtype=jnp.uint32)
        return Edges(jnp.full(rows.shape, n, jnp.uint32), order, others, jnp.zeros((n + 1,), jnp.uint32))
    index = jnp.where(valid, rows.astype(jnp.int32), -1)
    keys, order = sort.sort_indices(index[None], rows=n, wrap=False, clip=False)
    return Edges(keys, order, others[order], sort.row_offsets(keys, n))


def mapped(name, function, f, graph, senders, receivers, edges, reduce_features):
    """`edge_map` for the public function `name`, whose argument called `function` is f."""
    call = Call(name, f, graph, senders, receivers, edges, function=function)
    rank = len(call.features)
    axes = validate.static_axis(name, reduce_features, "reduce_features")
    axes = [] if axes is None else validate.sorted_axes(name, axes, call.features, "features", "reduce_features")
    arrays, order = call.arrays, [d for d in range(rank) if d not in axes] + axes
    if order != list(range(rank)):
        arrays = [x.transpose(0, *(d + 1 for d in order)) for x in arrays]
    ys = edge_map(
        *call.orders, arrays, function=call.function, ends=call.ends, summed=len(axes), dtypes=call.function.out_dtypes
    )
    # What f does not read is not among the arrays' features alone: those are in call.features.
    return call.tree(ys)


class Call:
    """The arguments of a public function as a primitive takes them."""

    def __init__(self, name, f, graph, senders, receivers, edges, mean=False, function="f"):
        validate.function(name, function, f)
        if not isinstance(getattr(graph, "into", None), Edges):
            raise TypeError(
                f"jaxkern.{name}: graph must be a jaxkern.Graph, got {type(graph).__name__}: make one "
                "with jaxkern.Graph(senders, receivers, num_nodes=...), outside the training step"
            )
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

        scalar.__name__, scalar.__wrapped__ = getattr(f, "__name__", type(f).__name__), f  # for JAX's errors
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
    cpp.check_dtype(f"jaxkern.{name}: {argument}", x.dtype)
    if x.ndim == 0 or x.shape[0] != count:
        raise ValueError(
            f"jaxkern.{name}: {argument} of shape {x.shape} must have {count} rows, one for each {argument[:-1]} of the graph"
        )
    return x
