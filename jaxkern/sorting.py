"""sort, argsort, sort_pairs, searchsorted and unique. Their primitives are in _ops/select."""

from __future__ import annotations

import functools
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxkern._core import switch, validate
from jaxkern._core.primitive import bind
from jaxkern._definitions.cumulative import cumsum
from jaxkern._ops.select.elements import taken_along
from jaxkern._ops.select.search import search_p
from jaxkern._ops.select.sort_rows import CARRIED, sort_rows_p

PyTree = typing.Any


def sort(x: ArrayLike, axis: int | None = -1, *, descending: bool = False) -> jax.Array:
    """Sorts along `axis`, as `jnp.sort`: stably, with NaN last, or first if descending, and -0 equal to 0.

    Args:
        x: array of any type. Kernels sort all types but complex numbers and those of fewer than 8 bits.
        axis: an int, or None to sort the flattened array. Any axis but the last one costs a transpose.
        descending: whether the largest come first.

    Returns:
        Array of the shape and type of `x`; of its size if `axis` is None.

    Raises:
        TypeError: `x` is not an array; `axis` is not an int or None; `descending` is not a bool.
        ValueError: `axis` is out of bounds.

    Derivatives: forward and reverse mode, of any order, by `x`. Tangents are gathered in the sorted order.

    Cost: for n elements of e bytes, 2 n e bytes move if a block holds a row: up to 8192 elements, or 4096 of 8 bytes. For
    longer rows, n e bytes move once, and 2 n e for each byte of an element. Rows of 2- or 4-byte elements that hold one
    number everywhere but in up to 4096 places, such as logits that are -inf except for the largest, cost 2 n e bytes as well,
    if there are at most 1000 rows.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.sort(jnp.array([[3, 1, 2], [4, 6, 5]]), descending=True).tolist()
    [[3, 2, 1], [6, 5, 4]]

    Source: the bitonic network of Batcher, "Sorting networks and their applications", 1968. For longer rows the radix sort of
    Adinets and Merrill, "Onesweep: a faster least significant digit radix sort for GPUs", 2022.
    """
    x, axis, descending = _checked("sort", "x", x, axis, descending)
    return _sorted(x, axis, descending, ("values",))[0]


def argsort(x: ArrayLike, axis: int | None = -1, *, descending: bool = False) -> jax.Array:
    """The indices that sort along `axis`, as `jnp.argsort`; those of equal elements ascend.

    Args:
        x, axis, descending: as for `sort`.

    Returns:
        int32 array of the shape of `x`; of its size if `axis` is None.

    Raises:
        TypeError: as for `sort`.
        ValueError: as for `sort`, or there are 2**31 elements or more along `axis`.

    Derivatives: none.

    Cost: for n elements of e bytes, n (e + 4) bytes move if a block holds a row. For longer rows, n e bytes move once, and
    2 n (e + 4) for each byte of an element.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.argsort(jnp.array([2.0, 1.0, 2.0, 0.0])).tolist()
    [3, 1, 0, 2]

    Source: as for `sort`.
    """
    x, axis, descending = _checked("argsort", "x", x, axis, descending)
    validate.positions("argsort", "x", x.shape, range(x.ndim) if axis is None else [axis])
    return _sorted(x, axis, descending, ("indices",))[0]


def sort_pairs(
    keys: ArrayLike, values: PyTree, axis: int | None = -1, *, descending: bool = False
) -> tuple[jax.Array, PyTree]:
    """Sorts `keys` along `axis`, and puts `values` into the same order.

    Args:
        keys, axis, descending: as `x`, `axis` and `descending` of `sort`.
        values: an array of the shape of `keys`, or a pytree of such arrays.

    Returns:
        (keys, values), in sorted order; values of equal keys stay in theirs.

    Raises:
        TypeError: as for `sort`, or a value is not an array.
        ValueError: as for `argsort`, or a value does not have the shape of `keys`.

    Derivatives: forward and reverse mode, of any order, by `keys` and `values`.

    Cost: the bytes of `sort`; if a block holds a row, values are also read and written once. For longer rows, one array of
    4-byte values moves with the keys, as indices do for `argsort`. XLA gathers values of other sizes, and several arrays.

    >>> import jax.numpy as jnp, jaxkern
    >>> keys, values = jaxkern.sort_pairs(jnp.array([3, 1, 2]), {"a": jnp.array([30.0, 10.0, 20.0])})
    >>> keys.tolist(), values["a"].tolist()
    ([1, 2, 3], [10.0, 20.0, 30.0])

    Source: as for `sort`.
    """
    name = "sort_pairs"
    keys, axis, descending = _checked(name, "keys", keys, axis, descending)
    validate.positions(name, "keys", keys.shape, range(keys.ndim) if axis is None else [axis])
    leaves, tree = jax.tree.flatten(values, is_leaf=lambda leaf: leaf is None)
    for leaf in leaves:
        validate.check_array(name, "values", "an array, or a pytree of arrays", leaf)
        if jnp.shape(leaf) != keys.shape:
            raise ValueError(f"jaxkern.{name}: values of shape {jnp.shape(leaf)} and keys of shape {keys.shape} differ")
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    if len(leaves) == 1 and leaves[0].dtype.name in CARRIED:
        found, value = _sorted(keys, axis, descending, ("values", "carried"), leaves[0])
        return found, jax.tree.unflatten(tree, [value])
    found, order = _sorted(keys, axis, descending, ("values", "indices"))
    if axis is None:
        leaves, axis = [validate.mergeable(leaf, leaf.ndim).reshape(-1) for leaf in leaves], 0
    return found, jax.tree.unflatten(tree, [taken_along(leaf, order, axis) for leaf in leaves])


def _checked(name, argument, x, axis, descending):
    validate.check_array(name, argument, "an array", x)
    x, descending = jnp.asarray(x), validate.flag(name, "descending", descending)
    if axis is not None:
        (axis,) = validate.sorted_axes(name, validate.integer(name, "axis", axis, or_none=True), x.shape, argument)
    return x, axis, descending


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _sorted(x, axis, descending, wanted, carried=None):
    flat = lambda a: validate.mergeable(a, a.ndim).reshape(-1)
    operands = [a if a is None else flat(a) if axis is None else jnp.moveaxis(a, axis, -1) for a in (x, carried)]
    found = bind(sort_rows_p, *operands, descending=descending, wanted=wanted)
    return [jnp.moveaxis(a, -1, axis or 0) for a in found]


def searchsorted(array: ArrayLike, x: ArrayLike, side: str = "left") -> jax.Array:
    """Where elements of `x` would be inserted into an ascending array, as `jnp.searchsorted`.

        side = "left": how many elements of array are < x;  "right": how many are <= x

    Args:
        array: array of one dimension, ascending, of real numbers; NaN comes last, and -0 equals 0.
        x: array of any shape, or a number. Both have one type after promotion.
        side: "left" or "right".

    Returns:
        int32 array of the shape of `x`.

    Raises:
        TypeError: `array` or `x` is not an array of real numbers.
        ValueError: `array` does not have one dimension, or has 2**31 elements or more; `side` is unknown.

    Derivatives: none.

    Cost: for n elements of e bytes in `x`, n (e + 4) bytes, and reads of `array`, from shared memory and L2.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.searchsorted(jnp.array([1.0, 2.0, 2.0, 4.0]), jnp.array([2.0, 3.0]), "right").tolist()
    [3, 3]

    Source: binary search, as in Knuth, "The Art of Computer Programming", volume 3, 1998.
    """
    name = "searchsorted"
    validate.choice(name, "side", side, ("left", "right"))
    given = {}
    for argument, value in (("array", array), ("x", x)):
        validate.check_array(name, argument, "an array or a number", value)
        given[argument] = jnp.asarray(value)
        if given[argument].dtype != bool:
            validate.real(name, argument, given[argument])
    if given["array"].ndim != 1:
        raise ValueError(f"jaxkern.{name}: array must have one dimension, got shape {given['array'].shape}")
    validate.positions(name, "array", given["array"].shape, [0])
    return _search(given["array"], given["x"], side == "right")


@functools.partial(jax.jit, static_argnums=2)
@switch.own_promotion
def _search(array, x, right):
    dtype = jnp.promote_types(array.dtype, x.dtype)
    if dtype.itemsize < 4:  # in the same order
        dtype = jnp.dtype(jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32)
    return bind(search_p, *(lax.stop_gradient(a.astype(dtype)) for a in (x, array)), right=right)


def unique(
    x: ArrayLike,
    size: int,
    fill_value: ArrayLike | None = None,
    *,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> jax.Array | tuple[jax.Array, ...]:
    """The different elements of `x` in ascending order, as `jnp.unique` with a size.

    Args:
        x: array of any shape and type. NaN is one element, and so are -0 and 0.
        size: an int, the number of elements of the result. If there are more different elements, the greatest are left out.
        fill_value: a number, what stands behind the last of fewer different elements. None: the least element.
        return_index: whether to return the first index of each element in the flattened `x`.
        return_inverse: whether to return the number of each element of `x` in the result, or `size` or more if it is left out.
        return_counts: whether to return how often each element occurs, 0 behind the last one.

    Returns:
        Array of shape (size,) and of the type of `x`. With other results: a tuple of this one and int32 arrays, the index of shape
        (size,), the inverse of the shape of `x`, and the counts of shape (size,), in this order. Indices behind the last element
        are the index of the least one.

    Raises:
        TypeError: `x` is not an array, `size` not an int, `fill_value` not a number, or a flag is not a bool.
        ValueError: `size` is negative; `x` has 2**31 elements or more, or no elements, and `fill_value` is None.

    Derivatives: forward and reverse mode, of any order, by `x`.

    Cost: a sort of `x`, of its elements alone if neither index nor inverse is returned, and a cumulative sum.

    >>> import jax.numpy as jnp, jaxkern
    >>> values, counts = jaxkern.unique(jnp.array([3, 1, 3, 7]), 4, 0, return_counts=True)
    >>> values.tolist(), counts.tolist()
    ([1, 3, 7, 0], [1, 2, 1, 0])

    Source: as for `sort`.
    """
    name = "unique"
    validate.check_array(name, "x", "an array", x)
    x, size = jnp.asarray(x), validate.integer(name, "size", size)
    flags = {"return_index": return_index, "return_inverse": return_inverse, "return_counts": return_counts}
    flags = tuple(validate.flag(name, argument, value) for argument, value in flags.items())
    if size < 0:
        raise ValueError(f"jaxkern.{name}: size must be 0 or more, got {size}")
    validate.positions(name, "x", x.shape, range(x.ndim))
    if fill_value is not None:
        validate.check_array(name, "fill_value", "a number", fill_value)
        fill_value = jnp.asarray(fill_value)
        if not jnp.issubdtype(x.dtype, jnp.complexfloating) and fill_value.dtype != bool:
            validate.real(name, "fill_value", fill_value)
        if fill_value.ndim:
            raise ValueError(f"jaxkern.{name}: fill_value must be a number, got shape {fill_value.shape}")
    elif x.size == 0 and size:
        raise ValueError(f"jaxkern.{name}: x of shape {x.shape} has no elements, and fill_value is None")
    found = _unique(x, fill_value, size, *flags)
    return found[0] if len(found) == 1 else tuple(found)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
@switch.own_promotion
def _unique(x, fill_value, size, return_index, return_inverse, return_counts):
    flat, shape = validate.mergeable(x, x.ndim).reshape(-1), x.shape
    if not flat.size:
        none = jnp.zeros(size, jnp.int32)
        values = jnp.full(size, 0 if fill_value is None else fill_value, x.dtype)
        return (
            [values] + [none] * return_index + [jnp.zeros(shape, jnp.int32)] * return_inverse + [none] * return_counts
        )
    if jnp.issubdtype(x.dtype, jnp.complexfloating):  # NaN in either part is the same NaN
        flat = jnp.where(jnp.isnan(flat), jnp.asarray(jnp.nan, x.dtype), flat)
    wanted = ("values", "indices") if return_index or return_inverse else ("values",)
    ordered, *order = bind(sort_rows_p, flat, None, descending=False, wanted=wanted)
    differs = ordered[1:] != ordered[:-1]
    if jnp.issubdtype(x.dtype, jnp.inexact):
        differs &= ~(jnp.isnan(ordered[1:]) & jnp.isnan(ordered[:-1]))
    # The number of each element in the result, counted from 1; elements of a number begin where it is reached first.
    number = cumsum(jnp.concatenate([jnp.ones(1, jnp.int32), differs.astype(jnp.int32)]))
    begin = searchsorted(number, jnp.arange(1, size + 2, dtype=jnp.int32))
    exists = begin[:-1] < flat.size
    at = jnp.where(exists, begin[:-1], 0)
    values = ordered[at]
    found = [values if fill_value is None else jnp.where(exists, values, fill_value.astype(x.dtype))]
    if return_index:
        found.append(order[0][at])
    if return_inverse:
        inverse = jnp.zeros(flat.shape, jnp.int32).at[order[0]].set(number - 1, unique_indices=True)
        found.append(inverse.reshape(shape))
    return found + [jnp.diff(begin)] * return_counts
