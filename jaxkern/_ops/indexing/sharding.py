"""The index_add family on several devices: the messages, by the dimension that is split.

    split along        index_add, segments                            index_select
    batch, inner       nothing                                        nothing
    rows               nothing: a device drops the others' indices    a sum of the selected rows
    count (indices)    a sum of the rows                              nothing
    both, by one axis  a reduce-scatter of the rows                   indices are gathered, then a reduce-scatter

Sums and products of floating-point numbers are sent in float32 or wider, and rounded once. A product gathers the parts.
"""

import jax.numpy as jnp
from jax import lax

from jaxkern._core.dtypes import computing
from jaxkern._core.partition import largest, smallest
from jaxkern._ops.indexing.reference import fill_value, parted

LIMIT = 2**31 - 2  # the most rows that may be split: int32 numbers them
SHARDS = {}  # for each primitive, the function that computes the part of one device; primitive.py fills it


def dims(prim, avals, rules):
    """Names for the dimensions of each operand and of the result, for partition.lower."""
    axis, k, ranks = rules.axis, rules.batch_dims, [a.ndim for a in avals]
    full = [f"d{d}" for d in range(max(ranks))]
    along = lambda name: [*full[:axis], name, *full[axis + 1 :]]
    rows, source, index = along("rows"), along("count"), [*full[:k], "count"]
    if prim.name == "jaxkern_index_add":
        alpha, order = parted(ranks[3:])
        return [rows, index, source, *(full[:rank] for rank in alpha), *[["ordered"]] * len(order), rows]
    order = [["ordered"]] * len(ranks[2:])
    return [rows, index, *order, source] if prim.name == "jaxkern_index_select" else [source, index, *order, rows]


def _keeps_order(over, rules):
    """Whether the order of the whole index is valid for the part of one device."""
    return not (over["rows"] or over["count"] or any(over[f"d{d}"] for d in range(rules.batch_dims)))


def summed(prim):
    """The names of `dims` that the result lacks."""
    return ("rows",) if prim.name == "jaxkern_index_select" else ("count",)


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


def _without(axes, others):
    return tuple(a for a in axes if a not in others)


# ---- index_select


def select(prim, over, x, index, *order, rules):
    del order
    across, along = over["rows"], over["count"]
    if not across:
        return prim.bind(x, index, rules=rules)
    axis = rules.axis
    rows = x.shape[axis] * lax.psum(1, across)
    own = _resolved(index, rows, rules)
    shared = tuple(a for a in along if a in across)
    everyone = lax.all_gather(index, shared, axis=index.ndim - 1, tiled=True) if shared else index
    everyone, _, local = local_indices(everyone, rows, across, (), rules)
    y = prim.bind(x, everyone, rules=local._replace(fill_nan=False, sorted=False, unique=False))
    if shared:  # one device has the row, the others have zeros
        y = lax.psum_scatter(y, shared, scatter_dimension=axis, tiled=True)
    if _without(across, shared):
        y = lax.psum(y, _without(across, shared))
    if not rules.fill_nan or rules.clip:
        return y
    exists = jnp.expand_dims(
        (own >= 0) & (own < rows), [d for d in range(y.ndim) if not (d < rules.batch_dims or d == axis)]
    )
    return jnp.where(exists, y, jnp.asarray(fill_value(y.dtype), y.dtype))


# ---- segments


def segments(prim, over, source, index, *order, rows, rules):
    if _keeps_order(over, rules):
        return prim.bind(source, index, *order, rows=rows, rules=rules)
    across, along = over["rows"], over["count"]
    shared = tuple(a for a in across if a in along)
    whole = rows
    if across:
        index, rows, rules = local_indices(index, whole, across, shared, rules)
    if not along:
        return prim.bind(source, index, rows=rows, rules=rules)
    if prim.name == "jaxkern_segment_sum":
        y = prim.bind(source.astype(computing(source.dtype)), index, rows=rows, rules=rules)
        if shared:
            y = lax.psum_scatter(y, shared, scatter_dimension=rules.axis, tiled=True)
        rest = _without(along, shared)
        return (lax.psum(y, rest) if rest else y).astype(source.dtype)
    if prim.name == "jaxkern_segment_prod":
        y = prim.bind(source.astype(computing(source.dtype)), index, rows=rows, rules=rules)
        y = jnp.prod(lax.all_gather(y, along), 0).astype(source.dtype)
    else:
        y = prim.bind(source, index, rows=rows, rules=rules)
        y = largest(y, along) if prim.name == "jaxkern_segment_max" else smallest(y, along)
    if shared:
        here, parts = _place(shared)
        y = lax.dynamic_slice_in_dim(y, here * (rows // parts), rows // parts, rules.axis)
    return y


# ---- index_add


def add(prim, segment_sum_p, over, x, index, source, *rest, rules):
    if _keeps_order(over, rules):
        return prim.bind(x, index, source, *rest, rules=rules)
    alpha, _ = parted(rest)
    across, along, axis = over["rows"], over["count"], rules.axis
    if along:
        rows = x.shape[axis] * (lax.psum(1, across) if across else 1)
        wide = computing(x.dtype)
        total = segments(segment_sum_p, over, source.astype(wide), index, rows=rows, rules=rules)
        y = x.astype(wide) + total
        if alpha:
            factor = jnp.expand_dims(alpha[0], range(alpha[0].ndim, x.ndim))
            # 0 * inf is NaN, but a row without updates must not change. To know these rows would take another message; so
            # rows whose sum is 0 are left as they are.
            y = jnp.where(jnp.isfinite(factor) | (total != 0), x.astype(wide) + factor * total, x.astype(wide))
        return y.astype(x.dtype)
    if across:
        index, _, rules = local_indices(index, x.shape[axis] * lax.psum(1, across), across, (), rules)
    return prim.bind(x, index, source, *alpha, rules=rules)
