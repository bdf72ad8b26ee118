"""reduce_sum, reduce_mean, reduce_max, reduce_min and logsumexp along an axis, with an optional mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxkern._core import validate
from jaxkern._core.algorithms import forced
from jaxkern._core.primitive import bind
from jaxkern._core.validate import Axis
from jaxkern._ops.reduction import derivatives, primitive  # noqa: F401  derivatives are registered
from jaxkern._ops.reduction.primitive import statistics  # noqa: F401  for softmax and the loss

_PRIMITIVES = {
    "reduce_sum": primitive.reduce_sum_p,
    "reduce_mean": primitive.reduce_mean_p,
    "reduce_max": primitive.reduce_max_p,
    "reduce_min": primitive.reduce_min_p,
    "logsumexp": primitive.logsumexp_p,
}


def reduce_sum(x: ArrayLike, axis: Axis = -1, keepdims: bool = False, where: ArrayLike | None = None) -> jax.Array:
    """Sum along `axis`, as `jnp.sum`.

    Args:
        x: array of any shape. float16, bfloat16 and float32 are summed in float32 within a few vectors and in float64
            across them, float64 in float64; the result is rounded once. Integers and booleans are summed exactly,
            modulo the 32 or 64 bits that `jnp.sum` promotes them to. Other floating-point types (float8) use XLA, in
            float32.
        axis: an int, a tuple of ints, or None for all axes. Any single axis, and neighbouring ones, are read in place.
            Axes with other dimensions between them are first made neighbours, which costs a copy.
        keepdims: whether the result keeps the axes, with size 1.
        where: boolean array that broadcasts to the shape of `x`; the kernel reads it without materialising it. Elements
            where it is False are masked: they do not enter the sum.

    Returns:
        Array of the shape of `x` without the axes; 0 for rows that are entirely masked. Bitwise reproducible.

    Raises:
        TypeError: `x` is complex or not an array; `where` is not boolean; `keepdims` is not a bool.
        ValueError: `axis` is out of bounds or repeats a dimension; `where` does not broadcast to `x`.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.reduce_sum(jnp.arange(6).reshape(2, 3), where=jnp.array([True, True, False])).tolist()
    [1, 7]
    """
    return _call("reduce_sum", x, axis, keepdims, where)


def reduce_mean(x: ArrayLike, axis: Axis = -1, keepdims: bool = False, where: ArrayLike | None = None) -> jax.Array:
    """Mean along `axis`, as `jnp.mean`.

    Arguments and errors as for `reduce_sum`. Integers and booleans give float32, 64-bit integers float64. The sum is
    divided before it is rounded, so that a float16 mean is finite even if the sum would overflow. With `where`, the
    mean of the unmasked elements; NaN for rows that are entirely masked.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.reduce_mean(jnp.array([[1.0, 3.0], [5.0, 6.0]]), keepdims=True).tolist()
    [[2.0], [5.5]]
    """
    return _call("reduce_mean", x, axis, keepdims, where)


def reduce_max(x: ArrayLike, axis: Axis = -1, keepdims: bool = False, where: ArrayLike | None = None) -> jax.Array:
    """Maximum along `axis`, as `jnp.max`: NaN if an element is NaN (on the CPU, XLA computes it and may lose the NaN).

    Arguments and errors as for `reduce_sum`. A ValueError if the axis is empty and `where` is None. The maximum of a row
    that is entirely masked is -inf, or the lowest number of a dtype without infinity: the `initial` that `jnp.max`
    requires. Elements that equal the maximum share its gradient equally.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> jax.grad(lambda x: jaxkern.reduce_max(x))(jnp.array([2.0, 1.0, 2.0])).tolist()
    [0.5, 0.0, 0.5]
    """
    return _call("reduce_max", x, axis, keepdims, where)


def reduce_min(x: ArrayLike, axis: Axis = -1, keepdims: bool = False, where: ArrayLike | None = None) -> jax.Array:
    """Minimum along `axis`, as `jnp.min`: NaN if an element is NaN (on the CPU, XLA computes it and may lose the NaN).

    Arguments, errors and gradient as for `reduce_max`. The minimum of a row that is entirely masked is inf, or the
    greatest number of a dtype without infinity.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.reduce_min(jnp.array([[3, 1, 2], [7, 9, 8]])).tolist()
    [1, 7]
    """
    return _call("reduce_min", x, axis, keepdims, where)


def logsumexp(x: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, keepdims: bool = False) -> jax.Array:
    """log(sum(exp(x))) along `axis`, as `jax.nn.logsumexp`, in one read of `x` of any size.

    Args:
        x: array of any shape. float16, bfloat16 and float32 are computed in float32, float64 in float64, and
            rounded once. Integers promote as in `jax.nn`. float8 uses XLA.
        axis, where, keepdims: as for `reduce_sum`.

    Returns:
        Array of the shape of `x` without the axes. A row that is entirely masked or -inf gives -inf with zero
        gradients. +inf makes the result of its row inf, NaN makes it NaN.

    Raises:
        TypeError: `x` is boolean, complex or not an array; `where` is not boolean; `keepdims` is not a bool.
        ValueError: `axis` is out of bounds or repeats a dimension; `where` does not broadcast to `x`.

    >>> import jax.numpy as jnp, jaxkern
    >>> y = jaxkern.logsumexp(jnp.array([[1000.0, 1000.0], [-1.0, 0.0]]), where=jnp.array([[True], [False]]))
    >>> [round(v, 3) for v in y.tolist()]
    [1000.693, -inf]

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    return _call("logsumexp", x, axis, keepdims, where)


def _call(name, x, axis, keepdims, where):
    validate.check_array(name, "x", "an array or a number", x)
    if where is not None:
        validate.check_array(name, "where", "a boolean array", where)
    if not isinstance(keepdims, (bool, np.bool_)):
        raise TypeError(f"jaxkern.{name}: keepdims must be True or False, got {keepdims!r}")
    return _reduce(
        x,
        where,
        name=name,
        axis=validate.static_axis(name, axis),
        keepdims=bool(keepdims),
        algorithm=forced(name),
    )


# Inlined, so that a jaxpr holds the primitive alone. Jitted, so that an eager call costs no more than a jnp function.
@functools.partial(jax.jit, static_argnames=("name", "axis", "keepdims", "algorithm"), inline=True)
def _reduce(x, where, *, name, axis, keepdims, algorithm):
    prim = _PRIMITIVES[name]
    x = _operand(name, x)
    mask = validate.full_rank_mask(name, x, where)
    axes = validate.sorted_axes(name, axis, x.shape)
    if name in ("reduce_max", "reduce_min") and mask is None and any(x.shape[a] == 0 for a in axes):
        raise ValueError(
            f"jaxkern.{name}: x of shape {x.shape} has no elements along axis {axis}, and nothing has no "
            f"{'maximum' if name == 'reduce_max' else 'minimum'}"
        )
    shape = tuple(1 if a in axes else d for a, d in enumerate(x.shape) if keepdims or a not in axes)
    x, (mask,), axis = validate.one_axis(x, [mask], axes)
    dtype = _sum_dtype(x.dtype) if name == "reduce_sum" else x.dtype
    y = bind(prim, x, *(() if mask is None else (mask,)), axis=axis, dtype=dtype, algorithm=algorithm)
    return y if y.shape == shape else y.reshape(shape)


def _operand(name, x):
    """Converts `x` to a dtype that the operation is defined for."""
    if name == "reduce_mean" and x.dtype == jnp.bool_:
        return x.astype(jax.eval_shape(jnp.mean, x).dtype)
    if name in ("reduce_mean", "logsumexp") or not (x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.integer)):
        return validate.floating(name, x)
    return x


def _sum_dtype(dtype):
    """The dtype of `jnp.sum` of an array of this dtype."""
    if jnp.issubdtype(dtype, jnp.floating):
        return dtype
    sums = jax.dtypes.canonicalize_dtype(np.uint64 if jnp.issubdtype(dtype, jnp.unsignedinteger) else np.int64)
    return sums if dtype.itemsize < sums.itemsize else dtype
