"""The index_add family on several devices: the messages, by the dimension that is split.

    split along        index_add, segments                            index_select
    batch, inner       nothing                                        nothing
    rows               nothing: a device drops the others' indices    a sum of the selected rows
    count (indices)    a sum of the rows                              nothing
    both, by one axis  a reduce-scatter of the rows, or source and    indices are gathered, then a reduce-scatter
                       indices are gathered if they are smaller

Sums and products of floating-point numbers are sent in float32 or wider, and rounded once. A product gathers the parts.
"""

import functools
import typing

import jax.numpy as jnp
from jax import lax

from jaxkern._core import partition
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind
from jaxkern._ops.indexing.reference import added, fill_value

LIMIT = 2**31 - 2  # the most rows that may be split: int32 numbers them


class Join(typing.NamedTuple):
    """How devices join the results for their parts of the indices."""

    across: typing.Callable  # (y, mesh axes of the indices, those of them that split rows too, axis of the rows)
    wide: bool  # results are sent in the computing dtype


def summed(y, axes, shared, axis):
    """The sum of y over devices along `axes`; each keeps its part of the rows, as `shared` axes split them."""
    y = lax.psum_scatter(y, shared, scatter_dimension=axis, tiled=True) if shared else y
    rest = tuple(a for a in axes if a not in shared)
    return lax.psum(y, rest) if rest else y


def _joined(join, y, axes, shared, axis):
    y = join(y, axes)
    if not shared:
        return y
    here, parts = _place(shared)
    return lax.dynamic_slice_in_dim(y, here * (y.shape[axis] // parts), y.shape[axis] // parts, axis)


SUM = Join(summed, True)
PRODUCT = Join(functools.partial(_joined, lambda y, axes: jnp.prod(lax.all_gather(y, axes), 0)), True)
MAXIMUM, MINIMUM = (Join(functools.partial(_joined, join), False) for join in (partition.largest, partition.smallest))


def keeps_order(over):
    """Whether the order of the whole index is valid for the part of one device."""
    return not (over.get("rows") or over["count"] or over["batch"])


def _place(axes):
    """(number of this device's part, number of parts) along `axes`, the first axis being the slowest."""
    return lax.axis_index(axes), lax.psum(1, axes)


def _resolved(index, rows, rules):
    """The row of each index in int32; negative or >= rows if there is none. Keeps ascending indices ascending."""
    unsigned = jnp.issubdtype(index.dtype, jnp.unsignedinteger)
    if index.dtype.itemsize < 4:
        index = index.astype(jnp.int32)
    if rules.wrap and not unsigned:
        index = jnp.where(index < 0, index + rows, index)
    if not unsigned:
        index = jnp.maximum(index, -1)
    index = jnp.minimum(index, rows).astype(jnp.int32)
    return jnp.clip(index, 0, rows - 1) if rules.clip else index


def local_indices(index, rows, axes, shared, rules):
    """The indices relative to the rows of one device; indices of rows of other devices name no row.

    rows: the number of rows of the whole array, which `axes` split. The device holds all parts along the `shared` axes, one
    after the other.
    Returns the indices, the number of rows that they refer to, and rules for them.
    """
    index = _resolved(index, rows, rules)
    here, parts = _place(axes)
    height = rows // parts
    rules = rules._replace(wrap=False, clip=False)
    if not shared:
        return index - here * height, height, rules
    part, row = index // height, index % height
    mine, kept, unit = (index >= 0) & (index < rows), jnp.zeros_like(index), 1
    for axis in reversed(axes):
        at, size = _place((axis,))
        part, digit = part // size, part % size
        if axis in shared:
            kept, unit = kept + digit * unit, unit * size
        else:
            mine &= digit == at
    return jnp.where(mine, kept * height + row, unit * height), unit * height, rules._replace(sorted=False)


# ---- index_select


def select(prim, over, x, index, keys, order, *, rules):
    across, along = over["rows"], over["count"]
    if not across:
        return bind(prim, x, index, rules=rules)
    axis = rules.axis
    rows = x.shape[axis] * lax.psum(1, across)
    own = _resolved(index, rows, rules)
    shared = tuple(a for a in along if a in across)
    everyone = lax.all_gather(index, shared, axis=index.ndim - 1, tiled=True) if shared else index
    everyone, _, local = local_indices(everyone, rows, across, (), rules)
    y = bind(prim, x, everyone, rules=local._replace(fill_nan=False, sorted=False, unique=False))
    y = summed(y, across, shared, axis)  # one device has the row, the others have zeros
    if not rules.fill_nan or rules.clip:
        return y
    exists = jnp.expand_dims(
        (own >= 0) & (own < rows), [d for d in range(y.ndim) if not (d < rules.batch_dims or d == axis)]
    )
    return jnp.where(exists, y, jnp.asarray(fill_value(y.dtype), y.dtype))


# ---- segments


class Part(typing.NamedTuple):
    """What a device reduces: `source` at `index`, for so many rows; results are then joined along the axes `along` of the mesh, of
    which `shared` split the rows, too."""

    source: typing.Any
    index: typing.Any
    rows: int
    rules: typing.Any
    along: tuple
    shared: tuple


def of_part(over, source, index, rows, rules, dtype) -> Part:
    """rows: of the whole array. dtype: of the results that devices join."""
    across, along = over["rows"], over["count"]
    shared = tuple(a for a in across if a in along)
    if shared and _are_smaller(source, index, rows, across, shared, rules, dtype):
        by = tuple(a for a in along if a in shared)
        source = lax.all_gather(source, by, axis=rules.axis, tiled=True)
        index = lax.all_gather(index, by, axis=index.ndim - 1, tiled=True)
        along, shared = tuple(a for a in along if a not in shared), ()
    if across:
        index, rows, rules = local_indices(index, rows, across, shared, rules)
    return Part(source, index, rows, rules, along, shared)


def _are_smaller(source, index, rows, across, shared, rules, dtype):
    """Whether the updates of all devices along `shared` are smaller than the rows that these devices would join."""
    devices = lax.axis_size(shared)
    kept = rows * devices // lax.axis_size(across)
    updates = source.size * source.dtype.itemsize + index.size * index.dtype.itemsize
    return updates * devices < source.size // source.shape[rules.axis] * kept * jnp.dtype(dtype).itemsize


def segments(join, prim, over, source, index, keys=None, order=None, *, rows, rules):
    if keeps_order(over):
        return bind(prim, source, index, keys, order, rows=rows, rules=rules)
    wide = computing(source.dtype) if join.wide else source.dtype
    part = of_part(over, source, index, rows, rules, wide)
    if not part.along:
        return bind(prim, part.source, part.index, rows=part.rows, rules=part.rules)
    y = bind(prim, part.source.astype(wide), part.index, rows=part.rows, rules=part.rules)
    return join.across(y, part.along, part.shared, rules.axis).astype(source.dtype)


# ---- index_add


def add(segment_sum_p, prim, over, x, index, source, alpha=None, keys=None, order=None, *, rules):
    if rules.copies is None:
        rules = rules._replace(copies=False)  # the program of a part does not show what the whole array is used for
    if keeps_order(over):
        return bind(prim, x, index, source, alpha, keys, order, rules=rules)
    whole = x.shape[rules.axis] * (lax.axis_size(over["rows"]) if over["rows"] else 1)
    wide = computing(x.dtype)
    part = of_part(over, source, index, whole, rules, wide)
    if not part.along:
        return bind(prim, x, part.index, part.source, alpha, rules=part.rules)
    total = bind(segment_sum_p, part.source.astype(wide), part.index, rows=part.rows, rules=part.rules)
    total = summed(total, part.along, part.shared, rules.axis)
    y = added(x.astype(wide), total)
    if alpha is not None:
        # 0 * inf is NaN, but a row without updates must not change. To know these rows would take another message; so
        # rows whose sum is 0 are left as they are.
        y = jnp.where(jnp.isfinite(alpha) | (total != 0), x.astype(wide) + alpha * total, x.astype(wide))
    return y.astype(x.dtype)
