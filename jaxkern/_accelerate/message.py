"""A chain as a message kernel: what it reads, whether the kernel has a plan for it, and the scatter that calls it.

chains.py finds chains in programs.
"""

import math
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxkern._accelerate import layout as layouts
from jaxkern._accelerate import unordered
from jaxkern._core import compat, functor
from jaxkern._core.dtypes import computing
from jaxkern._ops.indexing import sort
from jaxkern._ops.indexing.reference import added
from jaxkern._ops.messages import plan
from jaxkern._ops.messages.edges import EDGE, features_of
from jaxkern._ops.messages.primitive import ordered_reduce_p

JOIN = {"sum": added, "max": jnp.maximum, "min": jnp.minimum}


class Operand(typing.NamedTuple):
    """What the kernel reads: the value `Chain.values[at]` of the program, as an array of shape [rows, *features].

    dims: for each of its dimensions, the same dimension of the updates, ROWS for rows that an index names, or None where its
        size is 1.
    """

    end: str
    at: int
    dims: tuple
    rows: int


class Chain(typing.NamedTuple):
    """A chain that was found. values: the values of the program that it reads, besides the scatter's operand and indices.

    full: the shape of the updates. Its first `counts` dimensions are the dimensions of the indices.
    other: which nodes are at the edges' other ends. An int is the place of their indices among `values`. A tuple belongs to
        a value that is repeated along some dimensions of the indices: it has the other dimensions, which number its rows.
    """

    values: tuple
    operands: tuple
    other: int | tuple | None
    others: int  # how many nodes there are at the edges' other ends
    function: functor.Function
    reduction: str
    full: tuple
    counts: int
    text: str
    bytes: int
    free: unordered.Free | None = None  # where the order of the sums is free


class Cut(typing.NamedTuple):
    """A contiguous slice of an array, from element `first` on, in the shape of the value that it is."""

    first: int
    shape: tuple

    def of(self, x):
        x = x.reshape(-1)
        return lax.slice(x, (self.first,), (self.first + math.prod(self.shape),)).reshape(self.shape)


def with_whole_arrays(chain: Chain, onto) -> tuple:
    """(the chain with the arguments of the program that its values are slices of in place of these, for each value a Cut or None).

    XLA would copy a slice for a kernel, such as a row of `edges[2, count]`. Kernels with a free order read it where it is.
    onto: the value that the sums are added to; None for zeros. Where it is the argument, or an update of it, XLA would copy all of it.
    """

    def whole(value):
        found = value.whole if chain.free is not None else None
        return None if found is None or (onto is not None and onto.updates(found[0])) else found

    found = list(map(whole, chain.values))
    cuts = tuple(whole and Cut(whole[1], value.type[0]) for whole, value in zip(found, chain.values))
    values = tuple(whole[0] if whole else value for whole, value in zip(found, chain.values))
    return chain._replace(values=values), cuts


def arranged(o: Operand, chain: Chain) -> tuple:
    """The shape of an operand as the primitive takes it: [rows, *features]."""
    features = chain.full[chain.counts :]
    return (o.rows, *(n if chain.counts + d in o.dims else 1 for d, n in enumerate(features)))


def _arrange(x, o: Operand, chain: Chain):
    named = sorted((d, k) for k, d in enumerate(o.dims) if d is not None)
    ones = [k for k, d in enumerate(o.dims) if d is None]
    x = x.transpose([k for _, k in named] + ones)
    if o.end == EDGE:
        dims = {d for d, _ in named}
        x = x.reshape([n if d in dims else 1 for d, n in enumerate(chain.full)])
        x = jnp.broadcast_to(x, (*chain.full[: chain.counts], *x.shape[chain.counts :]))
    return x.reshape(arranged(o, chain))


def _other(values, order, chain: Chain):
    """The node at the other end of the edge at each position of the order."""
    if chain.other is None:
        return order
    if isinstance(chain.other, int):
        index = values[chain.other].reshape(-1)
        last = min(chain.others - 1, int(jnp.iinfo(index.dtype).max))
        return jnp.clip(index, 0, last).astype(jnp.uint32).at[order].get(mode="promise_in_bounds")
    row, counts = jnp.zeros_like(order), chain.full[: chain.counts]
    for d in chain.other:
        row = row * counts[d] + order // math.prod(counts[d + 1 :]) % counts[d]
    return row


def has_plan(chain, operand, shapes, dtypes) -> bool:
    edges, rows = math.prod(chain.full[: chain.counts]), operand.shape[0]
    if chain.free is not None:
        return unordered.has_plan(chain, edges, shapes, dtypes, operand)
    order = jax.core.ShapedArray((edges,), jnp.uint32)
    offsets = jax.core.ShapedArray((rows + 1,), jnp.uint32)
    arrays = [jax.core.ShapedArray(s, d) for s, d in zip(shapes, dtypes)]
    results = [jax.core.ShapedArray((rows, *features_of(arrays)), operand.dtype)]
    ends = tuple(o.end for o in chain.operands)
    params = dict(function=chain.function, ends=ends, reduction=chain.reduction, dtypes=(operand.dtype,))
    return plan.reduce_plan(None, [order, order, order, offsets, *arrays], results, **params) is not None


def run(operand, indices, *values, chain: Chain, cuts, layout, clip, onto_identity):
    """The scatter: its operand reduced with the messages. cuts: see `with_whole_arrays`."""
    rows = operand.shape[0]
    values = [x if cut is None else cut.of(x) for x, cut in zip(values, cuts)]
    if chain.free is not None:
        arrays = [_arrange(values[o.at], o, chain) for o in chain.operands]
        return unordered.run(operand, values, arrays, chain=chain, clip=clip, onto_identity=onto_identity)
    index = layouts.canonical_indices(layout, indices, operand.shape, clip)
    keys, order = sort.sort_indices(index[None], rows=rows, wrap=False, clip=clip)
    arrays = [_arrange(values[o.at], o, chain) for o in chain.operands]
    dtype = operand.dtype if onto_identity else computing(operand.dtype)
    (y,) = ordered_reduce_p.bind(
        keys,
        order,
        _other(values, order, chain),
        sort.row_offsets(keys, rows),
        *arrays,
        function=chain.function,
        ends=tuple(o.end for o in chain.operands),
        reduction=chain.reduction,
        dtypes=(jnp.dtype(dtype),),
    )
    y = jnp.broadcast_to(y, (rows, *chain.full[chain.counts :])).reshape(operand.shape)
    return y if onto_identity else JOIN[chain.reduction](operand.astype(dtype), y).astype(operand.dtype)


def types(ctx, chain: Chain) -> list:
    """The types of the scatter's operand and indices, and of the values of a chain."""
    operand, indices, _ = map(compat.not_varying, ctx.avals_in)
    found = [operand, indices]
    for value in chain.values:
        shape, dtype = value.type
        more = {}
        if not operand.sharding.mesh.empty:
            more["sharding"] = NamedSharding(operand.sharding.mesh, PartitionSpec(*[None] * len(shape)))
        found.append(operand.update(shape=shape, dtype=dtype, weak_type=False, **more))
    return found
