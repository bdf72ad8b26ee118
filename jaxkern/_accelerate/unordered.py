"""Scatter-adds of narrow rows in no fixed order: the messages of a chain, added by atomics, without a sort.

XLA's own scatter adds in no fixed order, too. What it costs depends on the indices, which nobody knows when a program is lowered;
the kernel (ffi/kernels/messages/scatter.cuh) looks at a sample of them. It reads indices as they are in the program, before they are
wrapped around zero, so that no pass over them is needed. Sums of 16-bit numbers are made in float32 and rounded once.
"""

import math
import typing

import jax
import jax.numpy as jnp

from jaxkern._core.dtypes import computing
from jaxkern._ops.indexing.reference import added
from jaxkern._ops.messages.edges import features_of
from jaxkern._ops.messages.scatter import edge_scatter
from jaxkern._ops.messages.scatter_plan import Other, scatter_plan


class Free(typing.NamedTuple):
    """What a chain's scatter needs besides the chain. index: the place of the indices among its values.

    wrap: whether negative indices count from the end. other: which nodes are at the other ends.
    """

    index: int
    wrap: bool
    other: Other | None


def raw(value, rows: int):
    """(indices as they are before they are wrapped around zero, whether they were)."""
    found = value.before_wrapping(rows)
    return (value, False) if found is None else (found, True)


def repeated(dims, full, counts) -> Other | None:
    """The nodes of a value that has these dimensions of the indices, if they are next to each other."""
    if dims != tuple(range(dims[0], dims[-1] + 1)):
        return None
    return Other(math.prod(full[d] for d in dims), math.prod(full[dims[-1] + 1 : counts]))


def has_plan(chain, edges, shapes, dtypes, operand) -> bool:
    """Whether there is a kernel. shapes, dtypes: of the arrays of a message."""
    other, index = chain.free.other, jax.core.ShapedArray((edges,), jnp.int32)
    arrays = [jax.core.ShapedArray(s, d) for s, d in zip(shapes, dtypes)]
    dtype = jnp.dtype(computing(operand.dtype))
    results = [jax.core.ShapedArray((operand.shape[0], *features_of(arrays)), dtype)]
    indices = [None, index, index if other is not None and other.stride == 0 else None]
    params = dict(
        function=chain.function, ends=tuple(o.end for o in chain.operands), rows=operand.shape[0], other=other
    )
    params |= dict(wrap=chain.free.wrap, clip=False, dtype=dtype)
    return scatter_plan(None, [*indices, *arrays], results, **params) is not None


def run(operand, values, arrays, *, chain, clip, onto_identity):
    """The scatter: its operand and the sums of the messages. arrays: the operands of the message."""
    own, features = chain.free, features_of(arrays)
    dtype = jnp.dtype(computing(operand.dtype))
    whole = math.prod(features) == operand.size // operand.shape[0] and dtype == operand.dtype
    indexed = own.other is not None and own.other.stride == 0
    y = edge_scatter(
        operand.reshape(-1, *features) if whole and not onto_identity else None,
        values[own.index].reshape(-1),
        values[chain.other].reshape(-1) if indexed else None,
        arrays,
        function=chain.function,
        ends=tuple(o.end for o in chain.operands),
        rows=operand.shape[0],
        other=own.other,
        wrap=own.wrap,
        clip=clip,
        dtype=dtype,
    )
    if not whole:
        y = jnp.broadcast_to(y, (operand.shape[0], *chain.full[chain.counts :]))
    y = y.reshape(operand.shape)
    y = y if onto_identity or whole else added(operand.astype(dtype), y)
    return y.astype(operand.dtype)
