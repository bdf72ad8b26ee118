"""lax.scatter as an operation on rows: which scatters are one, and their operands in the shapes that kernels take.

A scatter is one of rows if it indexes dimensions one position at a time and takes all others whole. Its operand becomes
(*batch, *lead, rows, *trail), where `rows` merges the indexed dimensions, its updates (*batch, *lead, count, *trail), where
`count` merges the dimensions of the indices, and its indices (*batch, count), numbers of rows. Indices that name no row
become -1, or are clipped.
"""

import math
import typing

import jax
import jax.numpy as jnp


class Layout(typing.NamedTuple):
    """Dimensions of the operand, the indices and the updates of a scatter of rows."""

    batch: tuple  # of the operand: operand_batching_dims
    lead: tuple  # taken whole, before the indexed dimensions
    indexed: tuple  # in ascending order
    trail: tuple  # taken whole, after them
    columns: tuple  # of the indices: the component of the index vector for each indexed dimension
    index_batch: tuple  # of the indices, for each of `batch`
    index_count: tuple  # of the indices: the others, without the last one
    update_batch: tuple  # of the updates, for each of `batch`
    update_count: tuple  # of the updates, for each of `index_count`
    update_window: tuple  # pairs (dimension of the operand, dimension of the updates)

    @property
    def permutation(self) -> tuple:
        return (*self.batch, *self.lead, *self.indexed, *self.trail)

    @property
    def axis(self) -> int:
        """The axis of the rows."""
        return len(self.batch) + len(self.lead)


def of(numbers, operand, indices, updates) -> Layout | str:
    """The layout of a scatter with these dimension numbers and shapes, or why it is not one of rows."""
    if not all(isinstance(d, int) for shape in (operand, indices, updates) for d in shape):
        return "symbolic shape"
    if 0 in (*operand, *indices, *updates):
        return "empty array"
    batch = tuple(numbers.operand_batching_dims)
    inserted, targets = tuple(numbers.inserted_window_dims), tuple(numbers.scatter_dims_to_operand_dims)
    if not targets:
        return "no indexed dimension"
    kept = [d for d in range(len(operand)) if d not in inserted and d not in batch]
    window = dict(zip(kept, numbers.update_window_dims))
    for d, u in window.items():
        if updates[u] != (1 if d in targets else operand[d]):
            return f"windows of {updates[u]} along dimension {d} of size {operand[d]} are not rows"
    if any(operand[d] != 1 for d in inserted if d not in targets):
        return "one position of a dimension that has no index"
    indexed = tuple(sorted(targets))
    whole = [d for d in range(len(operand)) if d not in indexed and d not in batch]
    scattered = [u for u in range(len(updates)) if u not in numbers.update_window_dims]
    index_batch = tuple(numbers.scatter_indices_batching_dims)
    index_count = tuple(d for d in range(len(indices) - 1) if d not in index_batch)
    return Layout(
        batch,
        tuple(d for d in whole if d < indexed[0]),
        indexed,
        tuple(d for d in whole if d > indexed[0]),
        tuple(targets.index(d) for d in indexed),
        index_batch,
        index_count,
        tuple(scattered[d] for d in index_batch),
        tuple(scattered[d] for d in index_count),
        tuple(window.items()),
    )


def without_whole(numbers, operand, updates):
    """A scatter that does not drop, without indices of dimensions that it takes whole; None if it has none.

    Returns its dimension numbers, the columns of the indices that remain, and the dimensions of the updates that are dropped.
    `jax.vmap(lambda i: x[i])` slices x along all dimensions, as does its gradient. A window as large as a dimension is the whole of it,
    to which other indices are clipped, and a window of one position need not be a dimension of the updates.
    """
    kept = [d for d in range(len(operand)) if d not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)]
    window = dict(zip(kept, numbers.update_window_dims))
    targets = numbers.scatter_dims_to_operand_dims
    whole = {d for d in targets if d in window and updates[window[d]] == operand[d] > 1}
    single = {d for d in targets if d in window and d not in whole and updates[window[d]] == 1}
    if not whole or len(whole) == len(targets):
        return None
    dropped = [window[d] for d in single]
    renumbered = [u - sum(v < u for v in dropped) for d, u in window.items() if d not in single]
    numbers = numbers._replace(
        update_window_dims=tuple(renumbered),
        inserted_window_dims=tuple(sorted((*numbers.inserted_window_dims, *single))),
        scatter_dims_to_operand_dims=tuple(d for d in targets if d not in whole),
    )
    return numbers, [k for k, d in enumerate(targets) if d not in whole], dropped


def moves_operand(layout: Layout, operand) -> bool:
    """Whether bringing the operand to the shape above moves its elements."""
    order = [d for d in layout.permutation if operand[d] != 1]
    return order != sorted(order)


def sizes(layout: Layout, operand, indices):
    """(batch, lead, rows, count, trail): how many elements each group of dimensions has."""
    of_operand = lambda dims: math.prod(operand[d] for d in dims)
    count = math.prod(indices[d] for d in layout.index_count)
    return (
        *(of_operand(dims) for dims in (layout.batch, layout.lead, layout.indexed)),
        count,
        of_operand(layout.trail),
    )


def canonical_operand(layout: Layout, operand):
    rows = math.prod(operand.shape[d] for d in layout.indexed)
    shape = lambda dims: tuple(operand.shape[d] for d in dims)
    x = operand.transpose(layout.permutation)
    return x.reshape(*shape(layout.batch), *shape(layout.lead), rows, *shape(layout.trail))


def original(layout: Layout, x, shape):
    """The result in the shape of the operand."""
    x = x.reshape(tuple(shape[d] for d in layout.permutation))
    back = sorted(range(len(shape)), key=layout.permutation.__getitem__)
    return x.transpose(back)


def canonical_updates(layout: Layout, updates):
    window = dict(layout.update_window)
    present = lambda dims: [window[d] for d in dims if d in window]
    order = [*layout.update_batch, *present(layout.lead), *layout.update_count, *present(layout.trail)]
    order += present(layout.indexed)  # of size 1
    count = math.prod(updates.shape[u] for u in layout.update_count)
    sizes = lambda dims: [updates.shape[window[d]] if d in window else 1 for d in dims]
    shape = [updates.shape[u] for u in layout.update_batch] + sizes(layout.lead) + [count] + sizes(layout.trail)
    return updates.transpose(order).reshape(shape)


def canonical_indices(layout: Layout, indices, operand_shape, clip: bool):
    """Rows of the whole operand, whose shape this is; with one indexed dimension, the indices as they are."""
    order = (*layout.index_batch, *layout.index_count, indices.ndim - 1)
    count = math.prod(indices.shape[d] for d in layout.index_count)
    vectors = indices.transpose(order).reshape(*(indices.shape[d] for d in layout.index_batch), count, -1)
    if len(layout.indexed) == 1:
        return vectors[..., 0]
    row, valid = 0, True
    for d, column in zip(layout.indexed, layout.columns):
        size, at = operand_shape[d], vectors[..., column]
        if at.dtype.itemsize < 4:
            at = at.astype(jnp.int32)
        most = min(size - 1, int(jnp.iinfo(at.dtype).max))
        inside = jnp.clip(at, 0, most)
        valid &= inside == at
        row = row * size + inside.astype(jnp.int64 if _wide(layout, operand_shape) else jnp.int32)
    return row if clip else jnp.where(valid, row, -1)


def numbers_rows(layout: Layout, operand) -> bool:
    """Whether there is a type that numbers the rows."""
    return not _wide(layout, operand) or bool(jax.config.jax_enable_x64)


def _wide(layout, operand) -> bool:
    return math.prod(operand[d] for d in layout.indexed) >= 2**31
