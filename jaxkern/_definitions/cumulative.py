"""cumsum, cumprod, cummax, cummin and cumlogsumexp: results for all elements so far along an axis."""

from __future__ import annotations

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxkern._core import validate
from jaxkern._core.jaxprs import computing, held
from jaxkern._engines.loops.associative import associative_scan
from jaxkern._ops.indexing.arguments import integers, safe_index


def cumsum(
    x: ArrayLike,
    axis: int | None = None,
    dtype: DTypeLike | None = None,
    *,
    reverse: bool = False,
    exclusive: bool = False,
    segment_ids: ArrayLike | None = None,
) -> jax.Array:
    """y[t] = x[0] + ... + x[t] along `axis`, as `jnp.cumsum`.

    Args:
        x: array of any shape and real dtype. float16, bfloat16 and float32 are summed in float32, float64 in float64, and each
            element is rounded once. Integers wrap; booleans are counted.
        axis: an int, negative from the end, or None (the default) for the flattened array.
        dtype: the type of the result, floating-point or integer; by default the type of `x`, for booleans as in `jnp.sum`.
        reverse: sums of the elements from `t` to the end.
        exclusive: leaves element t out of sum t. The first sum, or the last one if `reverse`, is 0.
        segment_ids: integer array of the shape of `x`, or of the shape of its axis: sums start again where the id differs
            from the id of the previous element.

    Returns:
        Array of the shape of `x`, or of (x.size,) if `axis` is None. Bitwise reproducible.

    Raises:
        TypeError: `x` is complex or not an array; `dtype` is not real, or boolean; `segment_ids` is not of an integer dtype;
            `reverse` or `exclusive` is not a bool.
        ValueError: `axis` is out of bounds; `segment_ids` has another shape.

    Derivatives: forward and reverse mode, of any order. The gradient is a cumulative sum in the other direction.

    Cost: for n elements of e bytes, the call moves 2 n e bytes, and so does the gradient. `segment_ids` are read too.

    >>> import jax.numpy as jnp, jaxkern
    >>> x = jnp.array([1, 2, 3, 4])
    >>> jaxkern.cumsum(x).tolist(), jaxkern.cumsum(x, exclusive=True).tolist()
    ([1, 3, 6, 10], [0, 1, 3, 6])
    >>> jaxkern.cumsum(x, reverse=True, segment_ids=jnp.array([0, 0, 0, 1])).tolist()
    [6, 5, 3, 4]

    Source: Blelloch, "Prefix sums and their applications", 1990, for segments too.
    """
    return _call("cumsum", x, axis, reverse, exclusive, dtype, segment_ids)


def cumprod(
    x: ArrayLike,
    axis: int | None = None,
    dtype: DTypeLike | None = None,
    *,
    reverse: bool = False,
    exclusive: bool = False,
    segment_ids: ArrayLike | None = None,
) -> jax.Array:
    """y[t] = x[0] * ... * x[t] along `axis`, as `jnp.cumprod`.

    Args:
        x: array of any shape and real dtype. float16 and bfloat16 are computed in float32, and each element is rounded once.
            Integers wrap; booleans are counted as 0 and 1.
        axis: an int, negative from the end, or None (the default) for the flattened array.
        reverse: products of the elements from `t` to the end.
        exclusive: leaves element t out of result t. The first product, or the last one if `reverse`, is 1.
        dtype: the type of the result, floating-point or integer; by default the type of `x`.
        segment_ids: integer array of the shape of `x`, or of the shape of its axis: results start again where the id differs
            from the id of the previous element.

    Returns:
        Array of the shape of `x`, or of (x.size,) if `axis` is None. Bitwise reproducible.

    Raises:
        TypeError: `x` is complex or not an array; `dtype` is not real, or boolean; `segment_ids` is not of an integer dtype;
            `reverse` or `exclusive` is not a bool.
        ValueError: `axis` is out of bounds; `segment_ids` has another shape.

    Derivatives: forward and reverse mode, of any order. It is right where elements are 0, too.

    Cost: for n elements of e bytes, the call moves 2 n e bytes. The gradient is a recurrence, which reads `x`, the result
    and the cotangent.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> jaxkern.cumprod(jnp.array([1.0, 2.0, 3.0]), reverse=True).tolist()
    [6.0, 6.0, 3.0]
    >>> jax.grad(lambda x: jaxkern.cumprod(x).sum())(jnp.array([2.0, 0.0, 3.0])).tolist()
    [1.0, 8.0, 0.0]
    """
    return _call("cumprod", x, axis, reverse, exclusive, dtype, segment_ids)


def cummax(
    x: ArrayLike,
    axis: int | None = 0,
    reverse: bool = False,
    *,
    exclusive: bool = False,
    dtype: DTypeLike | None = None,
    segment_ids: ArrayLike | None = None,
) -> jax.Array:
    """y[t] = max(x[0], ..., x[t]) along `axis`, as `jax.lax.cummax`.

    Args:
        x: array of any shape and real dtype, not boolean.
        axis: an int, negative from the end, or None for the flattened array.
        reverse: maxima of the elements from `t` to the end.
        exclusive: leaves element t out of result t. The first maximum, or the last one if
            `reverse`, is -inf, or the lowest number of a dtype without infinity.
        dtype: the type of the result, floating-point or integer; by default the type of `x`.
        segment_ids: integer array of the shape of `x`, or of the shape of its axis: results start again where the id differs
            from the id of the previous element.

    Returns:
        Array of the shape of `x`, or of (x.size,) if `axis` is None. NaN from the first NaN on. Bitwise reproducible.

    Raises:
        TypeError: `x` is complex, boolean or not an array; `dtype` is not real, or boolean; `segment_ids` is not of an
            integer dtype; `reverse` or `exclusive` is not a bool.
        ValueError: `axis` is out of bounds; `segment_ids` has another shape.

    Derivatives: forward and reverse mode, of any order. Where an element equals the maximum of the elements before it, each
    of the two has half of the gradient.

    Cost: for n elements of e bytes, the call moves 2 n e bytes. The gradient is a recurrence, which reads `x`, the result
    and the cotangent.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> jaxkern.cummax(jnp.array([[2, 5], [3, 1]])).tolist()
    [[2, 5], [3, 5]]
    >>> jax.grad(lambda x: jaxkern.cummax(x)[-1])(jnp.array([1.0, 2.0, 2.0])).tolist()
    [0.0, 0.5, 0.5]
    """
    return _call("cummax", x, axis, reverse, exclusive, dtype, segment_ids)


def cummin(
    x: ArrayLike,
    axis: int | None = 0,
    reverse: bool = False,
    *,
    exclusive: bool = False,
    dtype: DTypeLike | None = None,
    segment_ids: ArrayLike | None = None,
) -> jax.Array:
    """y[t] = min(x[0], ..., x[t]) along `axis`, as `jax.lax.cummin`.

    Args:
        x: array of any shape and real dtype, not boolean.
        axis: an int, negative from the end, or None for the flattened array.
        reverse: minima of the elements from `t` to the end.
        exclusive: leaves element t out of result t. The first minimum, or the last one if
            `reverse`, is inf, or the greatest number of a dtype without infinity.
        dtype: the type of the result, floating-point or integer; by default the type of `x`.
        segment_ids: integer array of the shape of `x`, or of the shape of its axis: results start again where the id differs
            from the id of the previous element.

    Returns:
        Array of the shape of `x`, or of (x.size,) if `axis` is None. NaN from the first NaN on. Bitwise reproducible.

    Raises:
        TypeError: `x` is complex, boolean or not an array; `dtype` is not real, or boolean; `segment_ids` is not of an
            integer dtype; `reverse` or `exclusive` is not a bool.
        ValueError: `axis` is out of bounds; `segment_ids` has another shape.

    Derivatives: forward and reverse mode, of any order. Where an element equals the minimum of the elements before it, each
    of the two has half of the gradient.

    Cost: for n elements of e bytes, the call moves 2 n e bytes. The gradient is a recurrence, which reads `x`, the result
    and the cotangent.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.cummin(jnp.array([[2, 5], [3, 1]]), axis=-1).tolist()
    [[2, 2], [3, 1]]
    """
    return _call("cummin", x, axis, reverse, exclusive, dtype, segment_ids)


def cumlogsumexp(
    x: ArrayLike,
    axis: int | None = 0,
    reverse: bool = False,
    *,
    exclusive: bool = False,
    dtype: DTypeLike | None = None,
    segment_ids: ArrayLike | None = None,
) -> jax.Array:
    """y[t] = log(exp(x[0]) + ... + exp(x[t])) along `axis`, as `jax.lax.cumlogsumexp`, without overflow.

    Args:
        x: array of any shape and real dtype, not boolean. float16 and bfloat16 are computed in float32, and each element is
            rounded once. Integers promote as in `jax.nn`.
        axis: an int, negative from the end, or None for the flattened array.
        reverse: results for the elements from `t` to the end.
        exclusive: leaves element t out of result t. The first result, or the last one if `reverse`, is -inf.
        dtype: the type of the result, floating-point; by default the type of `x`.
        segment_ids: integer array of the shape of `x`, or of the shape of its axis: results start again where the id differs
            from the id of the previous element.

    Returns:
        Array of the shape of `x`, or of (x.size,) if `axis` is None. Bitwise reproducible. On a GPU, exponentials of float32
        have relative errors of 2^-22; a logarithm has an absolute error of 2^-22 below log(2), and a relative one above.

    Raises:
        TypeError: `x` is complex, boolean or not an array; `dtype` is not floating-point; `segment_ids` is not of an
            integer dtype; `reverse` or `exclusive` is not a bool.
        ValueError: `axis` is out of bounds; `segment_ids` has another shape.

    Derivatives: forward and reverse mode, of any order. Gradients are finite where elements or results are -inf.

    Cost: for n elements of e bytes, the call moves 2 n e bytes. The gradient is a recurrence, which reads `x`, the result
    and the cotangent.

    >>> import jax.numpy as jnp, jaxkern
    >>> [round(y, 3) for y in jaxkern.cumlogsumexp(jnp.array([-jnp.inf, 1000.0, 1000.0])).tolist()]
    [-inf, 1000.0, 1000.693]
    """
    return _call("cumlogsumexp", x, axis, reverse, exclusive, dtype, segment_ids)


@jax.custom_jvp
def _logaddexp(a, b):
    return jnp.logaddexp(a, b)


@_logaddexp.defjvp
def _logaddexp_jvp(primals, tangents):
    """The weights are 0 where both operands are -inf, where JAX has NaN, and 0 or 1 if the sum is infinite."""
    y = _logaddexp(*primals)
    weight = lambda x: jnp.where(y == -jnp.inf, 0, jnp.exp(jnp.where(x == y, 0, x - y)))
    a, b = (weight(x) * t for x, t in zip(primals, tangents))
    return y, a + b


def _limit(dtype, sign):
    """The least number of a dtype, or the greatest one for sign -1."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min if sign > 0 else jnp.iinfo(dtype).max
    infinite = np.asarray(-sign * np.inf).astype(dtype)
    return infinite if np.isinf(infinite.astype(np.float32)) else -sign * jnp.finfo(dtype).max


# The operation, and its identity for a dtype.
_OPERATIONS = {
    "cumsum": (lax.add, lambda dtype: 0),
    "cumprod": (lax.mul, lambda dtype: 1),
    "cummax": (lax.max, lambda dtype: _limit(dtype, 1)),
    "cummin": (lax.min, lambda dtype: _limit(dtype, -1)),
    "cumlogsumexp": (_logaddexp, lambda dtype: _limit(dtype, 1)),
}


def _call(name, x, axis, reverse, exclusive, dtype, segment_ids):
    validate.check_array(name, "x", "an array or a number", x)
    if segment_ids is not None:
        validate.check_array(name, "segment_ids", "an integer array", segment_ids)
    along = validate.static_axis(name, axis)
    if isinstance(along, tuple):
        raise TypeError(f"jaxkern.{name}: axis must be an int or None, got {validate.shown(axis)}")
    return _cumulative(
        x,
        safe_index(segment_ids),
        name=name,
        axis=along,
        reverse=validate.flag(name, "reverse", reverse),
        exclusive=validate.flag(name, "exclusive", exclusive),
        dtype=None if dtype is None else _result_type(name, dtype),
    )


def _result_type(name, dtype):
    if name == "cumlogsumexp":
        return validate.floating_dtype(name, "dtype", dtype)
    found = validate.dtype_of(name, "dtype", dtype)
    if not (jnp.issubdtype(found, jnp.floating) or jnp.issubdtype(found, jnp.integer)):
        raise TypeError(f"jaxkern.{name}: dtype must be floating-point or integer, got {found}")
    return found


# Inlined, so that a jaxpr holds the scan alone. Jitted, so that an eager call costs no more than a jnp function.
@functools.partial(jax.jit, static_argnames=("name", "axis", "reverse", "exclusive", "dtype"), inline=True)
def _cumulative(x, segment_ids, *, name, axis, reverse, exclusive, dtype):
    if x.dtype == jnp.bool_ and name in ("cumsum", "cumprod"):
        x = x.astype(jax.eval_shape(jnp.sum, x).dtype)
    elif name == "cumlogsumexp":
        x = validate.floating(name, x)
    validate.real(name, "x", x)
    ids = None if segment_ids is None else integers(name, "segment_ids", segment_ids)
    flattened = x.shape
    if axis is None:
        ids = ids if ids is None or ids.shape != x.shape else ids.reshape(-1)
        x, axis = x.reshape(-1), 0
    (axis,) = validate.sorted_axes(name, axis, x.shape)
    dtype = x.dtype if dtype is None else dtype
    if x.shape[axis] == 0:
        return x.astype(dtype)
    floats = jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(dtype, jnp.floating)
    if not floats or dtype == jnp.float64:
        x = x.astype(dtype)
    x, stored = x.astype(held(x.dtype)), held(dtype)
    wide = computing(x.dtype)
    operation, identity = _OPERATIONS[name]
    inputs, segmented = [x], ids is not None
    if segmented:
        inputs.append(_starts(name, x, ids, axis, reverse, flattened))
    first = np.asarray(identity(dtype), wide)
    options = _scan(_Form(lambda a, b: [operation(a[0], b[0])], [first]), wide, stored, segmented, exclusive)
    if name == "cumlogsumexp":
        form = _Form(_join_sums, [first, wide.type(0)], lambda x: [x, jnp.ones_like(x)], lambda s: s[0] + jnp.log(s[1]))
        options = _scan(form, wide, stored, segmented, exclusive) | {"derivative": options, "approximate": True}
    (y,) = associative_scan(elems=inputs, axis=axis, reverse=reverse, label=f"jaxkern.{name}", **options)
    return y.astype(dtype)


class _Form(typing.NamedTuple):
    """A cumulative operation: how states are joined, the state of no elements, and of an element, and the result of a state."""

    combine: typing.Callable
    first: list
    element: typing.Callable = lambda x: [x]
    finish: typing.Callable = lambda state: state[0]


def _join_sums(a, b):
    """(m, s) stands for exp(m) s, where m is the largest element. One exponential, as one of both sums is not scaled."""
    (m, s), (n, t) = a, b
    # Of two equal infinities, the difference is NaN and becomes `most`: the later sum stays, and is finite. Kernels take the
    # minimum in one instruction.
    difference, most = m - n, jnp.finfo(m.dtype).max
    difference = jnp.where(difference < most, difference, most)
    factor = jnp.exp2(-jnp.abs(difference) * np.log2(np.e).astype(m.dtype))
    return [jnp.maximum(m, n), jnp.where(m > n, t * factor + s, s * factor + t)]


def _scan(form, wide, stored, segmented, exclusive) -> dict:
    """The arguments of `associative_scan`. If segmented, the last operand and the last member of a state say where one starts."""
    restart = lambda starts, state: [jnp.where(starts, c, s) for c, s in zip(form.first, state)]

    def combine(a, b):
        if not segmented:
            return form.combine(a, b)
        return [*form.combine(restart(b[-1], a[:-1]), b[:-1]), a[-1] | b[-1]]

    def finish(state, xs):
        if segmented:
            state = restart(xs[1], state[:-1]) if exclusive else state[:-1]
        return [form.finish(state).astype(stored)]

    return {
        "combine": combine,
        "exclusive": [*form.first, *[False] * segmented] if exclusive else None,
        "element": lambda xs: [*form.element(xs[0].astype(wide)), *xs[1:]],
        "finish": finish,
    }


def _starts(name, x, ids, axis, reverse, flattened):
    """Whether elements are the first of their segments, broadcast to `x`; what it is at the start of the scan has no effect."""
    if ids.shape == (x.shape[axis],):
        ids = ids.reshape([-1 if a == axis else 1 for a in range(x.ndim)])
    elif ids.shape != x.shape:
        shapes = f"{flattened} of x or {(x.shape[axis],)} of its axis"
        shapes += ", which is all of x, flattened, where axis is None" if x.shape != flattened else ""
        raise ValueError(f"jaxkern.{name}: segment_ids must have the shape {shapes}, got {ids.shape}")
    starts = jnp.broadcast_to(ids != jnp.roll(ids, -1 if reverse else 1, axis), x.shape)
    return validate.split_like(starts, jax.typeof(x))
