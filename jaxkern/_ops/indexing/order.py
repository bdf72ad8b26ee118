"""Order: the result of `jaxkern.sort_indices`, which operations at indices take instead of sorting."""

from __future__ import annotations

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Order:
    """Indices sorted by the row that they name; made by `jaxkern.sort_indices`. A pytree.

    Attributes:
        ids: the indices as given, of any shape and integer dtype.
        keys: uint32 array of shape (ids.size,): the rows that the indices name, ascending, then num_segments for each
            index that names no row.
        order: uint32 array of shape (ids.size,): the position of each key in the flattened `ids`.
        num_segments: the number of rows.
        wrap: whether negative indices count from the end.
        clip: whether an index that is out of range names the nearest row.
    """

    ids: jax.Array
    keys: jax.Array
    order: jax.Array
    num_segments: int = dataclasses.field(metadata=dict(static=True))
    wrap: bool = dataclasses.field(metadata=dict(static=True))
    clip: bool = dataclasses.field(metadata=dict(static=True))


def with_order(name, argument, index, order, rules, mode, rows):
    """Returns (index, operands of the primitive, rules); an order, if given, determines the index and its rules.

    rows: the number of rows of the operation, or None to take it from the order.
    """
    if order is None:
        if index is None:
            raise TypeError(f"jaxkern.{name}: {argument} must be an array, got None, unless order is given")
        return index, (), rules
    if not isinstance(order, Order):
        raise TypeError(f"jaxkern.{name}: order must be what jaxkern.sort_indices returns, got {type(order).__name__}")
    if rows is not None and rows != order.num_segments:
        raise ValueError(f"jaxkern.{name}: the order is of indices into {order.num_segments} rows, not {rows}")
    if index is not None and getattr(index, "shape", None) != order.ids.shape:
        raise ValueError(
            f"jaxkern.{name}: {argument} of shape {getattr(index, 'shape', ())} and the order of indices of "
            f"shape {order.ids.shape} differ"
        )
    if mode is not None and rules.clip != order.clip:
        raise ValueError(f"jaxkern.{name}: mode {mode!r} is not the one that the order was made with")
    return order.ids, (order.keys, order.order), rules._replace(wrap=order.wrap, clip=order.clip)
