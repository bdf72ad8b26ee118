"""reduce_sum, reduce_mean, reduce_max, reduce_min and logsumexp along axes, by default all, with an optional mask."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxkern._core import validate
from jaxkern._core.algorithms import forced
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind
from jaxkern._core.validate import Axis
from jaxkern._definitions import reduction_derivatives  # noqa: F401  derivatives are registered
from jaxkern._definitions import reductions as definitions

_PRIMITIVES = {
    "reduce_sum": definitions.reduce_sum_p,
    "reduce_mean": definitions.reduce_mean_p,
    "reduce_max": definitions.reduce_max_p,
    "reduce_min": definitions.reduce_min_p,
    "logsumexp": definitions.logsumexp_p,
}


def reduce_sum(
    x: ArrayLike,
    axis: Axis = None,
    dtype: DTypeLike | None = None,
    *,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike | None = None,
    promote_integers: bool = True,
) -> jax.Array:
    """sum(x) along `axis`, as `jnp.sum`.

    Args:
        x: array of any shape. Kernels sum float16, bfloat16 and float32 in float32 within a few vectors and in float64 across
            them, or in float32 throughout if the result has 16 bits; float64 in float64. The result is rounded once. Integers
            and booleans are summed exactly, modulo the 32 or 64 bits that `jnp.sum` promotes them to. Other floating-point
            types (float8), and axes with 2^31 elements or more, use XLA, in float32.
        axis: an int, a tuple of ints, or None (the default) for all axes. Any single axis, and neighbouring ones, are
            read in place. Axes with other dimensions between them are first made neighbours, which costs a copy.
        dtype: the type of the result, floating-point or integer; by default the type of `x`, with integers promoted. The kernel
            writes float32 sums of 16-bit numbers. float64 sums of other types, and sums across integer and
            floating-point types, first convert `x`, which costs a copy.
        keepdims: whether the result keeps the axes, with size 1.
        initial: a scalar that is added to the sum.
        where: boolean array that broadcasts to the shape of `x`; the kernel reads it without materialising it. Elements
            where it is False are masked: they do not enter the sum.
        promote_integers: False gives sums of integers the type of `x`, modulo its bits, unless `dtype` is given.

    Returns:
        Array of the shape of `x` without the axes; 0, or `initial`, for rows that are entirely masked. Bitwise
        reproducible.

    Raises:
        TypeError: `x` is complex or not an array; `where` is not boolean; `dtype` is not real, or boolean; `initial` is
            not real; `keepdims` or `promote_integers` is not a bool.
        ValueError: `axis` is out of bounds or repeats a dimension; `where` does not broadcast to `x`; `initial` is not a
            scalar.

    Derivatives: forward and reverse mode, of any order. The sum is linear: its gradient spreads the cotangent over the row,
    which XLA fuses with the operations that read it.

    Cost: n e bytes are read, for n elements of e bytes, and one element for each row is written. The gradient reads these
    and writes n e bytes, unless XLA fuses it.

    >>> import jax.numpy as jnp, jaxkern
    >>> x = jnp.arange(6).reshape(2, 3)
    >>> jaxkern.reduce_sum(x).tolist(), jaxkern.reduce_sum(x, 1, where=jnp.array([True, True, False])).tolist()
    (15, [1, 7])
    """
    return _call("reduce_sum", x, axis, keepdims, where, dtype, initial, promote_integers)


def reduce_mean(
    x: ArrayLike,
    axis: Axis = None,
    dtype: DTypeLike | None = None,
    *,
    keepdims: bool = False,
    where: ArrayLike | None = None,
) -> jax.Array:
    """sum(x) / n along `axis`, as `jnp.mean`.

    Args:
        x: array of any shape and real dtype, summed as in `reduce_sum`. Integers and booleans give float32, 64-bit integers
            float64.
        axis: an int, a tuple of ints, or None (the default) for all axes, as for `reduce_sum`.
        dtype: the type of the result, floating-point.
        keepdims: whether the result keeps the axes, with size 1.
        where: boolean array that broadcasts to the shape of `x`: n counts the elements where it is True, and the others do
            not enter the sum.

    Returns:
        Array of the shape of `x` without the axes; NaN for rows that are entirely masked. The sum is divided before it is
        rounded, so that a float16 mean is finite even if the sum would overflow. Bitwise reproducible.

    Raises:
        TypeError: `x` is complex or not an array; `where` is not boolean; `dtype` is not floating-point; `keepdims` is not a
            bool.
        ValueError: `axis` is out of bounds or repeats a dimension; `where` does not broadcast to `x`.

    Derivatives: forward and reverse mode, of any order. The mean is linear, as the sum is.

    Cost: as for `reduce_sum`.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.reduce_mean(jnp.array([[1.0, 3.0], [5.0, 6.0]]), axis=-1, keepdims=True).tolist()
    [[2.0], [5.5]]
    """
    return _call("reduce_mean", x, axis, keepdims, where, dtype)


def reduce_max(
    x: ArrayLike,
    axis: Axis = None,
    *,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike | None = None,
) -> jax.Array:
    """max(x) along `axis`, as `jnp.max`.

    Args:
        x: array of any shape and real dtype.
        axis: an int, a tuple of ints, or None (the default) for all axes, as for `reduce_sum`.
        keepdims: whether the result keeps the axes, with size 1.
        initial: a scalar; the result is no less.
        where: boolean array that broadcasts to the shape of `x`. Elements where it is False do not count.

    Returns:
        Array of the shape of `x` without the axes, and of its dtype. It is NaN if an element is NaN (on a CPU, XLA computes it
        and may lose the NaN). The maximum of a row that is entirely masked is `initial`, by default -inf, or the lowest
        number of a dtype without infinity; `jnp.max` requires `initial` there.

    Raises:
        TypeError: `x` is complex or not an array; `where` is not boolean; `initial` is not real; `keepdims` is not a bool.
        ValueError: the axes hold no element and neither `where` nor `initial` is given; `axis` is out of bounds or repeats
            a dimension; `where` does not broadcast to `x`; `initial` is not a scalar.

    Derivatives: forward and reverse mode, of any order. Elements that equal the maximum share its gradient equally.

    Cost: n e bytes are read, for n elements of e bytes, and one element for each row is written. The gradient reads `x`
    twice, once to count the elements that share it, and writes n e bytes.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> jax.grad(lambda x: jaxkern.reduce_max(x))(jnp.array([2.0, 1.0, 2.0])).tolist()
    [0.5, 0.0, 0.5]
    """
    return _call("reduce_max", x, axis, keepdims, where, initial=initial)


def reduce_min(
    x: ArrayLike,
    axis: Axis = None,
    *,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike | None = None,
) -> jax.Array:
    """min(x) along `axis`, as `jnp.min`.

    Args:
        x: array of any shape and real dtype.
        axis: an int, a tuple of ints, or None (the default) for all axes, as for `reduce_sum`.
        keepdims: whether the result keeps the axes, with size 1.
        initial: a scalar; the result is no greater.
        where: boolean array that broadcasts to the shape of `x`. Elements where it is False do not count.

    Returns:
        Array of the shape of `x` without the axes, and of its dtype; NaN as in `reduce_max`. The minimum of a row that is
        entirely masked is `initial`, by default inf, or the greatest number of a dtype without infinity.

    Raises:
        TypeError: `x` is complex or not an array; `where` is not boolean; `initial` is not real; `keepdims` is not a bool.
        ValueError: the axes hold no element and neither `where` nor `initial` is given; `axis` is out of bounds or repeats
            a dimension; `where` does not broadcast to `x`; `initial` is not a scalar.

    Derivatives: forward and reverse mode, of any order. Elements that equal the minimum share its gradient equally.

    Cost: as for `reduce_max`.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.reduce_min(jnp.array([[3, 1, 2], [7, 9, 8]]), axis=1).tolist()
    [1, 7]
    """
    return _call("reduce_min", x, axis, keepdims, where, initial=initial)


def logsumexp(
    x: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: ArrayLike | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """log(sum(b * exp(x))) along `axis`, as `jax.nn.logsumexp`.

    Args:
        x: array of any shape. float16, bfloat16 and float32 are computed in float32, float64 in float64, and
            rounded once. Integers promote as in `jax.nn`. float8 uses XLA.
        axis, keepdims, where: as for `reduce_sum`.
        b: real factors; `b` and `x` broadcast together and promote to one type. None: 1. Elements with a factor of 0
            count as masked. Factors use XLA.
        return_sign: return the pair (log|sum|, sign of the sum). If it is False, a negative sum gives NaN.

    Returns:
        Array of the shape of `x` without the axes, or a pair of them. A row that is entirely masked or -inf gives -inf
        (and the sign 0) with zero gradients. +inf makes the result of its row inf, NaN makes it NaN.

    Raises:
        TypeError: `x` is boolean, complex or not an array; `b` is complex or not an array; `where` is not boolean;
            `keepdims` or `return_sign` is not a bool.
        ValueError: `axis` is out of bounds or repeats a dimension; `where` does not broadcast to `x`, or `x` and `b` not
            together.

    Derivatives: forward and reverse mode, of any order. The gradient is b exp(x - largest) / total, from two numbers for
    each row that the forward kernel also computes; XLA fuses it with the operations that read it.

    Cost: n e bytes are read once, for n elements of e bytes and rows of any length, and one element for each row is
    written. The gradient reads `x` again and writes n e bytes.

    >>> import jax.numpy as jnp, jaxkern
    >>> x = jnp.array([[1000.0, 1000.0], [-1.0, 0.0]])
    >>> [round(v, 3) for v in jaxkern.logsumexp(x, axis=1, where=jnp.array([[True], [False]])).tolist()]
    [1000.693, -inf]
    >>> y, sign = jaxkern.logsumexp(x, b=jnp.array([1.0, -3.0]), return_sign=True)
    >>> round(float(y), 3), float(sign)
    (1000.693, -1.0)

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    name = "logsumexp"
    keepdims = validate.flag(name, "keepdims", keepdims)
    return_sign = validate.flag(name, "return_sign", return_sign)
    if b is None:
        y = _call(name, x, axis, keepdims, where)
        return (y, jnp.where(y == -jnp.inf, 0, jnp.where(y == y, 1, y)).astype(y.dtype)) if return_sign else y
    validate.check_array(name, "b", "an array or a number", b)
    _check_arrays(name, x, where)
    static = {"axis": validate.static_axis(name, axis), "keepdims": keepdims, "return_sign": return_sign}
    return _weighted_logsumexp(x, b, where, **static)


def _check_arrays(name, x, where):
    validate.check_array(name, "x", "an array or a number", x)
    if where is not None:
        validate.check_array(name, "where", "a boolean array", where)


def _call(name, x, axis, keepdims, where, dtype=None, initial=None, promote_integers=True):
    _check_arrays(name, x, where)
    if initial is not None:
        validate.check_array(name, "initial", "a number", initial)
    return _reduce(
        x,
        where,
        initial,
        name=name,
        axis=validate.static_axis(name, axis),
        dtype=None if dtype is None else _result_type(name, dtype),
        promote=validate.flag(name, "promote_integers", promote_integers),
        keepdims=validate.flag(name, "keepdims", keepdims),
        algorithm=forced(name),
    )


def _result_type(name, dtype):
    """The dtype that the user asks for, as JAX has it."""
    found = validate.dtype_of(name, "dtype", dtype)
    kinds = (jnp.floating,) if name == "reduce_mean" else (jnp.floating, jnp.integer)
    if not any(jnp.issubdtype(found, kind) for kind in kinds):
        wanted = "floating-point" if len(kinds) == 1 else "floating-point or integer"
        raise TypeError(f"jaxkern.{name}: dtype must be {wanted}, got {found}")
    return found


# Inlined, so that a jaxpr holds the primitive alone. Jitted, so that an eager call costs no more than a jnp function.
@functools.partial(jax.jit, static_argnames=("name", "axis", "dtype", "promote", "keepdims", "algorithm"), inline=True)
def _reduce(x, where, initial, *, name, axis, dtype, promote, keepdims, algorithm):
    prim = _PRIMITIVES[name]
    x, of_primitive, dtype = _types(name, x, dtype, promote, initial is not None)
    mask = validate.full_rank_mask(name, x, where)
    axes = validate.sorted_axes(name, axis, x.shape)
    extreme = name in ("reduce_max", "reduce_min")
    if extreme and mask is None and initial is None and any(x.shape[a] == 0 for a in axes):
        raise ValueError(
            f"jaxkern.{name}: x of shape {x.shape} has no elements along axis {axis}, and nothing has no "
            f"{'maximum' if name == 'reduce_max' else 'minimum'}"
        )
    shape = tuple(1 if a in axes else d for a, d in enumerate(x.shape) if keepdims or a not in axes)
    x, (mask,), axis = validate.one_axis(x, [mask], axes)
    y = bind(prim, x, *(() if mask is None else (mask,)), axis=axis, dtype=of_primitive, algorithm=algorithm)
    if initial is not None:
        y = _JOIN[name](y, _initial(name, initial, y.dtype))
    y = y if y.dtype == dtype else y.astype(dtype)
    return y if y.shape == shape else y.reshape(shape)


_JOIN = {"reduce_sum": jnp.add, "reduce_max": jnp.maximum, "reduce_min": jnp.minimum}


def _initial(name, initial, dtype):
    if initial.shape != ():
        raise ValueError(f"jaxkern.{name}: initial must be a scalar, got shape {initial.shape}")
    if not any(jnp.issubdtype(initial.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
        raise TypeError(f"jaxkern.{name}: initial must be real, got {initial.dtype}")
    return initial.astype(dtype)


def _types(name, x, dtype, promote, joined):
    """(x in a dtype that the operation is defined for, the dtype that the primitive returns, the dtype of the result).

    joined: the primitive's result is added to an initial value before it is rounded.
    """
    x = _operand(name, x) if dtype is None or not _integral(x.dtype) else x
    if name not in ("reduce_sum", "reduce_mean"):
        return x, x.dtype, x.dtype
    if dtype is None:
        keep = lambda x: jnp.sum(x, promote_integers=False)
        dtype = _sum_dtype(x.dtype) if promote else jax.eval_shape(keep, x).dtype
    if _integral(x.dtype) != _integral(dtype):
        x = x.astype(dtype if _integral(dtype) else computing(dtype))
    elif dtype == jnp.float64:
        x = x.astype(dtype)
    if _integral(x.dtype):
        return x, _sum_dtype(x.dtype), dtype
    return x, x.dtype if dtype == x.dtype and not joined else computing(x.dtype), dtype


def _integral(dtype) -> bool:
    return dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer)


def _operand(name, x):
    """Converts `x` to a dtype that the operation is defined for."""
    if name == "reduce_mean" and x.dtype == jnp.bool_:
        return x.astype(jax.eval_shape(jnp.mean, x).dtype)
    if name in ("reduce_mean", "logsumexp") or not _integral(x.dtype):
        return validate.floating(name, x)
    return x


def _sum_dtype(dtype):
    """The dtype of `jnp.sum` of an array of this dtype."""
    if jnp.issubdtype(dtype, jnp.floating):
        return dtype
    sums = jax.dtypes.canonicalize_dtype(np.uint64 if jnp.issubdtype(dtype, jnp.unsignedinteger) else np.int64)
    return sums if dtype.itemsize < sums.itemsize else dtype


@functools.partial(jax.jit, static_argnames=("axis", "keepdims", "return_sign"), inline=True)
def _weighted_logsumexp(x, b, where, *, axis, keepdims, return_sign):
    name = "logsumexp"
    x, b = validate.floating(name, x), b.astype(jnp.int8) if b.dtype == jnp.bool_ else b
    b = validate.floating(name, b, "b")
    try:
        shape = jnp.broadcast_shapes(x.shape, b.shape)
    except ValueError:
        raise ValueError(f"jaxkern.{name}: x of shape {x.shape} and b of shape {b.shape} do not broadcast") from None
    dtype = jnp.promote_types(x.dtype, b.dtype)
    x, b = (jnp.broadcast_to(a, shape).astype(computing(dtype)) for a in (x, b))
    mask = validate.full_rank_mask(name, x, where)
    axes = tuple(validate.sorted_axes(name, axis, shape))
    kept = b != 0 if mask is None else (b != 0) & mask
    x = jnp.where(kept, x, -jnp.inf)
    base = definitions.finite(jax.lax.stop_gradient(jnp.max(x, axes, keepdims=True, initial=-jnp.inf)))
    total = jnp.sum(jnp.where(kept, b, 0) * jnp.exp(x - base), axes, keepdims=True)
    empty = total == 0
    y = jnp.where(empty, -jnp.inf, jnp.log(jnp.where(empty, 1, jnp.abs(total))) + base)
    sign = jnp.sign(total)
    y, sign = (a if keepdims else jnp.squeeze(a, axes) for a in (y, sign))
    if return_sign:
        return y.astype(dtype), sign.astype(dtype)
    return jnp.where(sign < 0, jnp.nan, y).astype(dtype)
