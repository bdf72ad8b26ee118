"""index_add, the segment operations and index_select in jnp; they ignore an order."""

import functools
import typing

import jax
import jax.numpy as jnp

from jaxkern._core import compat
from jaxkern._core.dtypes import computing
from jaxkern._ops.indexing.sort import rows_of


class Rules(typing.NamedTuple):
    """Parameters that all primitives at indices share."""

    axis: int
    batch_dims: int = 0
    wrap: bool = False  # negative indices count from the end
    clip: bool = False  # an index out of range names the nearest row; else no row
    sorted: bool = False
    unique: bool = False
    deterministic: bool = True
    fill_nan: bool = False  # index_select: an index out of range gives NaN or a limit of the integer dtype; else 0
    plan: str = "auto"
    # index_add: whether the result is an array of its own (True) or takes the memory of x (False). None: as the program
    # shows where the call is lowered; see `primitive.py`.
    copies: bool | None = None


def least(dtype):
    if jnp.issubdtype(dtype, jnp.inexact):
        return -jnp.inf
    return False if dtype == jnp.bool_ else jnp.iinfo(dtype).min


def greatest(dtype):
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.inf
    return True if dtype == jnp.bool_ else jnp.iinfo(dtype).max


def added(x, total):
    """x + total. Where the total is 0, x as it is: a row to which nothing is added keeps -0.0."""
    return jnp.where(total == 0, x, x + total)


def fill_value(dtype):
    """The element that `jnp.take` returns for an index out of range."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    return least(dtype) if jnp.issubdtype(dtype, jnp.signedinteger) else greatest(dtype)


def _for_each_batch(f, rules):
    """Maps f, for arrays without batch dimensions, over the batch dimensions of the operands."""
    flat = rules._replace(axis=rules.axis - rules.batch_dims, batch_dims=0)
    f = functools.partial(f, rules=flat)
    for _ in range(rules.batch_dims):
        f = jax.vmap(f)
    return f


def _whole(source, index, rules):
    k = rules.batch_dims
    if source.shape[:k] == index.shape[:k]:
        return source
    return jnp.broadcast_to(source, (*index.shape[:k], *source.shape[k:]))


def _at(x, index, rules, method, *args, **how):
    """`x.at[index].method(...)` along the axis."""
    rows = x.shape[rules.axis]
    if _is_large(rows) and index.dtype.itemsize < 8:
        with compat.enable_x64():  # without it JAX truncates indices to 32 bits
            return _at(x, index.astype(jnp.int64), rules, method, *args, **how)
    # JAX checks and wraps indices itself. It does not clip where it scatters, nor are its checks right beyond 31 bits.
    checked = rules.clip and method != "get" or jnp.iinfo(index.dtype).max >= 2**31
    index = rows_of(index, rows, rules) if checked else index.astype(jnp.int32)
    at = x.at[(slice(None),) * rules.axis + (index,)]
    return getattr(at, method)(*args, wrap_negative_indices=rules.wrap and not checked, **how)


def _is_large(rows) -> bool:
    return isinstance(rows, int) and rows >= 2**31


def add(x, index, source, alpha=None, keys=None, order=None, *, rules):
    wide = computing(x.dtype)

    def one(x, index, source, rules):
        if alpha is None:
            return _at(x.astype(wide), index, rules, "add", source.astype(wide), mode="drop").astype(x.dtype)
        total = _at(jnp.zeros_like(x, wide), index, rules, "add", source.astype(wide), mode="drop")
        # 0 * inf is NaN, where nothing is added.
        touched = _at(jnp.zeros_like(x, bool), index, rules, "set", True, mode="drop")
        return jnp.where(touched, (x.astype(wide) + alpha * total).astype(x.dtype), x)

    return _for_each_batch(one, rules)(x, index, _whole(source, index, rules))


def select(x, index, keys=None, order=None, *, rules):
    value = fill_value(x.dtype) if rules.fill_nan else 0

    def one(x, index, rules):
        axis = rules.axis
        if x.shape[axis] == 0:  # JAX refuses to gather from an empty array
            return jnp.full((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]), value, x.dtype)
        if rules.clip:
            return _at(x, index, rules, "get", mode="clip")
        if not _is_large(x.shape[axis]):
            return _at(x, index, rules, "get", mode="fill", fill_value=value)
        # JAX lowers mode="fill" outside of the context in which indices are 64 bits.
        y = _at(x, index, rules._replace(clip=True), "get", mode="clip")
        with compat.enable_x64():
            row = rows_of(index.astype(jnp.int64), x.shape[axis], rules)
            exists = (row >= 0) & (row < x.shape[axis])
        return jnp.where(jnp.expand_dims(exists, range(1, x.ndim - axis)), y, jnp.asarray(value, x.dtype))

    return _for_each_batch(one, rules)(x, index)


def total(source, index, keys=None, order=None, *, rows, rules):
    k, axis = rules.batch_dims, rules.axis
    zeros = jnp.zeros((*index.shape[:k], *source.shape[k:axis], rows, *source.shape[axis + 1 :]), source.dtype)
    return add(zeros, index, source, rules=rules)


def _extreme(method, identity, source, index, keys=None, order=None, *, rows, rules):

    def one(source, index, rules):
        shape = (*source.shape[: rules.axis], rows, *source.shape[rules.axis + 1 :])
        start = jnp.full(shape, identity(source.dtype), source.dtype)
        return _at(start, index, rules, method, source, mode="drop")

    return _for_each_batch(one, rules)(_whole(source, index, rules), index)


largest = functools.partial(_extreme, "max", least)
smallest = functools.partial(_extreme, "min", greatest)


def product(source, index, keys=None, order=None, *, rows, rules):
    one = lambda dtype: 1
    found = _extreme("multiply", one, source.astype(computing(source.dtype)), index, rows=rows, rules=rules)
    return found.astype(source.dtype)


def product_by_scan(source, index, rows, rules):
    """`product` in operations whose derivatives of any order hold for zeros too: a scan over the rows in sorted order.

    A scatter that multiplies has no derivative in JAX, and dividing a product by its factors fails for zeros.
    """

    def joined(a, b):
        (_, before), (first, value) = a, b  # first: whether a segment begins in b
        return a[0] | first, jnp.where(_beside(first, value), value, before * value)

    def one(source, index, rules):
        if index.shape[0] == 0:  # nothing to gather from
            return product(source, index, rows=rows, rules=rules)
        source, row = jnp.moveaxis(source, rules.axis, 0), rows_of(index, rows, rules)
        order = jnp.argsort(row)
        row, values = row[order], source.astype(computing(source.dtype))[order]
        first = jnp.concatenate([jnp.ones(1, bool), row[1:] != row[:-1]])
        _, values = jax.lax.associative_scan(joined, (first, values))
        last = jnp.searchsorted(row, jnp.arange(rows, dtype=row.dtype), side="right") - 1
        there = (last >= 0) & (row[last] == jnp.arange(rows, dtype=row.dtype))
        found = jnp.where(_beside(there, values), values[last], 1).astype(source.dtype)
        return jnp.moveaxis(found, 0, rules.axis)

    return _for_each_batch(one, rules)(_whole(source, index, rules), index)


def _beside(flags, values):
    """`flags`, one for each row of `values`, with the rank of `values`."""
    return jnp.expand_dims(flags, range(flags.ndim, values.ndim))
