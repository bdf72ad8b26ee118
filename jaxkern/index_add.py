"""index_add, index_select and embedding_lookup: add onto rows of an array, or gather them.

Their primitives are in _ops/indexing.
"""

from __future__ import annotations

import functools
import numbers

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxkern._core import validate
from jaxkern._core.dtypes import computing
from jaxkern._ops.indexing import primitive
from jaxkern._ops.indexing.arguments import Mode, integers, rules_of, safe_index, scatter_mode
from jaxkern._ops.indexing.order import Order, with_order
from jaxkern._ops.indexing.primitive import Rules
from jaxkern._ops.indexing.sort import rows_of


def index_add(
    x: ArrayLike,
    axis: int,
    index: ArrayLike | None,
    source: ArrayLike,
    *,
    alpha: ArrayLike = 1,
    mode: Mode = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    deterministic: bool = True,
    order: Order | None = None,
) -> jax.Array:
    """x[index[e]] += alpha * source[e] along `axis`, as `x.at[index].add`; several updates of a row are all added.

    Like `torch.index_add(x, axis, index, source, alpha=alpha)`, with the index rules of `x.at[..., index, ...].add(source)`.

    Args:
        x: array of one dimension or more, updated in place if it is donated. float16, bfloat16 and float32 are summed in
            float32 or wider, float64 in float64, and rounded once; int32, int64 and uint32 wrap. Other dtypes use XLA.
        axis: an int, the dimension of `x` that is indexed.
        index: array of one dimension and any integer dtype, with x64 on or off. Negative indices count from the end.
        source: array of the shape of `x`, except that it has the size of `index` along `axis`, or an array or a number that
            broadcasts to this shape, which costs a copy. If the dtypes differ, both are promoted, and the sum is rounded to
            the dtype of `x`. Adding floating-point numbers to integers is an error.
        alpha: a factor: a number, or a scalar array, which may be traced.
        mode: how to treat indices that are still out of range: None, "drop" and "fill" drop them, "clip" uses the nearest
            row, "promise_in_bounds" promises that no index is (such indices are dropped; nothing is written out of bounds).
            A `jax.lax.GatherScatterMode` is accepted too.
        indices_are_sorted: a promise that the indices ascend, after negative ones are resolved.
        unique_indices: a promise that no row is named twice.
        deterministic: False allows atomics where they are faster, whose sums may differ in the last bits from run to
            run. By default the result is bitwise reproducible.
        order: the result of `jaxkern.sort_indices(index, x.shape[axis], wrap=True)`, which saves sorting the indices
            again. Its `mode` and `wrap` apply, and `index` may be None.

    Returns:
        Array of the shape and type of `x`.

    Raises:
        TypeError: `index` is not of an integer dtype; `x`, `index` or `source` is not an array; `source` or `alpha` is
            floating-point for integer `x`, or complex for real `x`; `axis` is not an int.
        ValueError: `axis` is out of bounds; shapes do not match; `mode` is unknown; `order` belongs to other indices.

    Derivatives: forward and reverse mode, of any order, by `x`, `source` and `alpha`. The gradient of `x` is the cotangent,
    and the gradient of `source` is an `index_select`.

    Cost: each row of `source` is read once, and each row of `x` that is named is read and written once. If the program must
    keep `x`, as it must an argument that is not donated, every row of `x` is: rows of 256 bytes and more in the same pass, if they
    are a multiple of 16 bytes and their indices are sorted here; otherwise `x` is copied first. Indices that do not ascend are
    sorted first, once in a program and its gradient.

    >>> import jax.numpy as jnp, jaxkern
    >>> x = jnp.zeros((3, 2))
    >>> jaxkern.index_add(x, 0, jnp.array([2, 0, -1, 7]), jnp.ones((4, 2)), alpha=0.5).tolist()
    [[0.5, 0.5], [0.0, 0.0], [1.0, 1.0]]

    Source: sorting before adding and the segmented reduction after Bell and Garland, "Implementing sparse matrix-vector
    multiplication on throughput-oriented processors", 2009.
    """
    name = "index_add"
    rules = rules_of(
        name,
        axis,
        mode,
        wrap=True,
        sorted=validate.flag(name, "indices_are_sorted", indices_are_sorted),
        unique=validate.flag(name, "unique_indices", unique_indices),
        deterministic=validate.flag(name, "deterministic", deterministic),
    )
    _check_arrays(name, x=x, index=index, source=source, alpha=alpha)
    index, order_operands, rules = with_order(name, "index", index, order, rules, mode, _rows_of(x, rules, order))
    factor = None if _is_one(alpha, x) else alpha
    return _index_add(x, safe_index(index), source, factor, *order_operands, rules=rules)


def index_select(
    x: ArrayLike,
    axis: int,
    index: ArrayLike | None,
    *,
    mode: Mode = None,
    fill_value: ArrayLike | None = None,
    order: Order | None = None,
) -> jax.Array:
    """y[e] = x[index[e]] along `axis`, as `x.at[index].get` does along the first axis.

    `jnp.take` differs only in negative indices under "clip", which do not count from the end there.

    Args:
        x: array of one dimension or more, of any dtype except typed PRNG keys.
        axis: an int, the dimension of `x` that is indexed.
        index: array of one dimension and any integer dtype. Negative indices count from the end.
        mode: how to treat indices that are still out of range: None, "fill" and "drop" give `fill_value`; "clip" uses the
            nearest row; "promise_in_bounds" promises that no index is (such indices are clipped). A
            `jax.lax.GatherScatterMode` is accepted too.
        fill_value: a number, or a scalar array, which may be traced; converted to the dtype of `x`. None: NaN, the lowest
            value of a signed or the greatest of an unsigned dtype.
        order: as for `index_add`; the gradient uses it.

    Returns:
        Array of the shape of `x`, except that it has the size of `index` along `axis`, and of its dtype.

    Raises:
        TypeError: `index` is not of an integer dtype; `x` or `index` is not an array; `axis` is not an int; `fill_value` is
            not a number.
        ValueError: `axis` is out of bounds; `index` does not have one dimension; `mode` is unknown; `fill_value` is not a
            scalar.

    Derivatives: forward and reverse mode, of any order. The gradient is a `segment_sum`, which writes every row once, sums
    in float32 or wider, and is bitwise reproducible.

    Cost: each row that is named is read, and each row of the result is written once. The gradient reads the cotangent once,
    writes an array of the size of `x`, and sorts the indices, which `order` saves.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.index_select(jnp.array([[1.0, 2.0], [3.0, 4.0]]), 1, jnp.array([1, -2, 1])).tolist()
    [[2.0, 1.0, 2.0], [4.0, 3.0, 4.0]]
    """
    _check_arrays("index_select", x=x, index=index, fill_value=fill_value)
    rules = rules_of("index_select", axis, mode, wrap=True, fill_nan=fill_value is None)
    promised = scatter_mode("index_select", mode) == jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    index, order_operands, rules = with_order(
        "index_select", "index", index, order, rules, mode, _rows_of(x, rules, order)
    )
    rules = rules._replace(clip=rules.clip or (promised and order is None))
    return _index_select(x, safe_index(index), fill_value, *order_operands, rules=rules)


def embedding_lookup(
    table: ArrayLike, ids: ArrayLike | None, *, fill_value: ArrayLike | None = None, order: Order | None = None
) -> jax.Array:
    """y[...] = table[ids[...]], as `jnp.take(table, ids, axis=0)`.

    Args:
        table: array of shape (rows, ...), of any dtype except typed PRNG keys.
        ids: array of any shape and integer dtype. Negative ids count from the end; ids that are out of range give
            `fill_value`, as in `jnp.take`.
        fill_value: as for `index_select`. None: NaN, or for integers a limit of the dtype.
        order: the result of `jaxkern.sort_indices(ids, rows, wrap=True)`, for the gradient. `ids` may then be None.

    Returns:
        Array of shape (*ids.shape, *table.shape[1:]) and of the dtype of `table`.

    Raises:
        TypeError: `ids` is not of an integer dtype; `table` or `ids` is not an array; `fill_value` is not a number.
        ValueError: `table` is a scalar; `fill_value` is not a scalar; `order` belongs to other ids.

    Derivatives: forward and reverse mode, of any order. The gradient by `table` is a `segment_sum`: it writes each row
    once, sums in float32 or wider, and is bitwise reproducible.

    Cost: as for `index_select`: the rows that are named are read, and the result is written once; the gradient reads the
    cotangent once, writes an array of the size of `table`, and sorts the ids, which `order` saves.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> table, ids = jnp.eye(3), jnp.array([[0, 2], [2, -1]])
    >>> jaxkern.embedding_lookup(table, ids).shape
    (2, 2, 3)
    >>> jax.grad(lambda t: jaxkern.embedding_lookup(t, ids).sum())(table)[:, 0].tolist()
    [1.0, 0.0, 3.0]
    """
    _check_arrays("embedding_lookup", table=table, ids=ids, fill_value=fill_value)
    rules = Rules(0, wrap=True, fill_nan=fill_value is None)
    ids, order_operands, rules = with_order(
        "embedding_lookup", "ids", ids, order, rules, None, _rows_of(table, rules, order)
    )
    return _embedding_lookup(table, safe_index(ids), fill_value, *order_operands, rules=rules)


# Inlined, so that a jaxpr holds the primitive alone. Jitted, so that an eager call costs no more than a jnp function.
@functools.partial(jax.jit, static_argnames="rules", inline=True)
def _index_add(x, index, source, alpha, *order, rules):
    name = "index_add"
    if x.dtype == jnp.bool_:
        raise TypeError(f"jaxkern.{name}: x must not be boolean, got bool{list(x.shape)}")
    index, rules = _along(name, x, index, rules)
    wanted = (*x.shape[: rules.axis], *index.shape, *x.shape[rules.axis + 1 :])
    if source.shape != wanted:
        try:
            source = jnp.broadcast_to(source, wanted)
        except ValueError:
            raise ValueError(
                f"jaxkern.{name}: source must broadcast to {wanted}, for x of shape {x.shape} and index of "
                f"shape {index.shape} along axis {rules.axis}, got shape {source.shape}"
            ) from None
    if _kind(source.dtype) > _kind(x.dtype):
        raise TypeError(f"jaxkern.{name}: source of type {source.dtype} cannot be added to x of type {x.dtype}")
    weak = jax.typeof(source).weak_type  # as of a Python scalar: it takes the dtype of x if it can
    dtype = jnp.result_type(x, source) if weak else jnp.promote_types(x.dtype, source.dtype)
    alpha = None if alpha is None else _factor(name, alpha, dtype)
    y = primitive.index_add(x.astype(dtype), index, source.astype(dtype), alpha, *order, rules=rules)
    return y.astype(x.dtype)


@functools.partial(jax.jit, static_argnames="rules", inline=True)
def _index_select(x, index, fill_value, *order, rules):
    index, rules = _along("index_select", x, index, rules)
    return _selected("index_select", x, index, fill_value, order, rules)


def _selected(name, x, index, fill_value, order, rules):
    y = primitive.index_select(x, index, *order, rules=rules)
    if fill_value is None:
        return y
    if fill_value.shape != ():
        raise ValueError(f"jaxkern.{name}: fill_value must be a scalar, got shape {fill_value.shape}")
    rows, row = x.shape[rules.axis], rows_of(index, x.shape[rules.axis], rules)
    exists = row < (min(rows, int(jnp.iinfo(row.dtype).max)) if isinstance(rows, int) else rows)
    return jnp.where(jnp.expand_dims(exists, range(1, x.ndim - rules.axis)), y, fill_value.astype(x.dtype))


@functools.partial(jax.jit, static_argnames="rules", inline=True)
def _embedding_lookup(table, ids, fill_value, *order, rules):
    name = "embedding_lookup"
    ids = integers(name, "ids", ids)
    if table.ndim == 0:
        raise ValueError(f"jaxkern.{name}: table must have at least one dimension, got shape ()")
    flat = ids if ids.ndim == 1 else validate.mergeable(ids, ids.ndim).reshape(-1)
    y = _selected(name, table, flat, fill_value, order, rules)
    return y if ids.ndim == 1 else y.reshape(*ids.shape, *table.shape[1:])


# ---- arguments


def _check_arrays(name, **arrays):
    """Raises unless each is an array, or None where that is allowed: `with_order` wants an order for an index of None."""
    for argument, value in arrays.items():
        if value is not None or argument not in ("index", "ids", "fill_value"):
            wanted = "a number" if argument in ("alpha", "fill_value") else "an array"
            validate.check_array(name, argument, wanted, value)


def _rows_of(x, rules, order):
    """The size of x along the axis, to compare an order with; None if there is nothing to compare."""
    shape = getattr(x, "shape", ())
    return shape[rules.axis] if order is not None and -len(shape) <= rules.axis < len(shape) else None


def _along(name, x, index, rules):
    """Checks the index and the axis; returns the index, and rules with a non-negative axis."""
    index = integers(name, "index", index)
    if index.ndim != 1:
        raise ValueError(f"jaxkern.{name}: index must have one dimension, got shape {index.shape}")
    if not -x.ndim <= rules.axis < x.ndim:
        raise ValueError(f"jaxkern.{name}: axis {rules.axis} is out of bounds for x of shape {x.shape}")
    return index, rules._replace(axis=rules.axis % x.ndim)


def _is_one(alpha, x):
    """Whether alpha can be left out: it is 1, and x may be scaled by its type."""
    if not isinstance(alpha, numbers.Number) or alpha != 1:
        return False
    kind = jnp.inexact if isinstance(alpha, numbers.Real) else jnp.complexfloating
    return isinstance(alpha, numbers.Integral) or jnp.issubdtype(getattr(x, "dtype", jnp.int32), kind)


def _kind(dtype):
    """The rank of a dtype: booleans, integers, real numbers, complex numbers."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next(k for k, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind))


def _factor(name, alpha, dtype):
    if alpha.shape != ():
        raise ValueError(f"jaxkern.{name}: alpha must be a scalar, got shape {alpha.shape}")
    if _kind(alpha.dtype) > _kind(dtype):
        raise TypeError(f"jaxkern.{name}: alpha of type {alpha.dtype} cannot scale x of type {dtype}")
    return alpha.astype(computing(dtype))
