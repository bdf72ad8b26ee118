"""reduce_sum, reduce_mean, reduce_max, reduce_min and logsumexp: what a user calls, the primitives, their rules.

    reduce_sum_p    sum(x)            linear: its transpose spreads the cotangent over the row
    reduce_mean_p   sum(x) / count    likewise
    reduce_max_p    max(x)            dx = g / ties where x is the maximum
    reduce_min_p    -max(-x)          likewise
    logsumexp_p     log(sum(exp(x)))  dx = g * exp(x - largest) / total
    logsumexp_statistics_p            the same, the largest element and the sum of exp(x - largest)

along one axis, which the result is without, each with an optional mask. An element that is masked out takes
no part, and gets no gradient whatever the cotangent holds. The kernels only read; the gradients are one
elementwise pass (two over x for the ties), which XLA fuses with what comes before and after. That of logsumexp is
not taken from y, which has been rounded: where y is 10, exp(x - y) errs by ten times what the softmax does.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jaxkern import tiers
from jaxkern._core import compat, lowering, validate
from jaxkern._core.autodiff import defvjp
from jaxkern._core.primitive import bind, row_primitive


# ---- what a user calls


def reduce_sum(x, axis=-1, keepdims=False, where=None):
    """Sum along `axis`, as `jnp.sum`.

    Args:
        x: array of any shape. float16, bfloat16 and float32 are added up in float32 within a few vectors and
            in float64 between them, float64 in float64, and rounded once; integers and booleans exactly, modulo
            the 32 or 64 bits that `jnp.sum` promotes them to. Other floating-point types (float8) run
            through XLA, in float32.
        axis: an int, a tuple of ints, or None for all axes. Any single axis, and neighbouring ones, are read
            in place; axes that are apart are moved together first, which costs a copy.
        keepdims: whether the result keeps the axes, with size 1.
        where: boolean array that broadcasts to the shape of `x`, read without being materialised. Elements
            where it is False take no part.

    Returns:
        Array of the shape of `x` without the axes; 0 where nothing takes part. The same bits every time.

    Raises:
        TypeError: `x` is complex or no array; `where` is not boolean; `keepdims` is no bool.
        ValueError: `axis` is out of bounds or holds a duplicate; `where` does not broadcast to `x`.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.reduce_sum(jnp.arange(6).reshape(2, 3), where=jnp.array([True, True, False])).tolist()
    [1, 7]
    """
    return _call("reduce_sum", x, axis, keepdims, where)


def reduce_mean(x, axis=-1, keepdims=False, where=None):
    """Mean along `axis`, as `jnp.mean`.

    Arguments and errors as for `reduce_sum`; integers and booleans give float32 (float64 from 64 bits). The sum
    is divided before it is rounded, so that a float16 mean is finite where the sum would not be. With `where`
    it is the mean of what takes part. NaN where nothing does.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.reduce_mean(jnp.array([[1.0, 3.0], [5.0, 6.0]]), keepdims=True).tolist()
    [[2.0], [5.5]]
    """
    return _call("reduce_mean", x, axis, keepdims, where)


def reduce_max(x, axis=-1, keepdims=False, where=None):
    """Maximum along `axis`, as `jnp.max`: NaN if there is one.

    Arguments and errors as for `reduce_sum`, and a ValueError where the axis has no elements and `where` is
    None. Where nothing takes part the result is -inf, or the least number of a type without infinity, as if
    that were `initial`, which `jnp.max` asks for. Elements that share the maximum share its gradient
    equally.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> jax.grad(lambda x: jaxkern.reduce_max(x))(jnp.array([2.0, 1.0, 2.0])).tolist()
    [0.5, 0.0, 0.5]
    """
    return _call("reduce_max", x, axis, keepdims, where)


def reduce_min(x, axis=-1, keepdims=False, where=None):
    """Minimum along `axis`, as `jnp.min`: NaN if there is one.

    Arguments, errors and gradient as for `reduce_max`. Where nothing takes part the result is inf, or the
    greatest number of a type without infinity.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.reduce_min(jnp.array([[3, 1, 2], [7, 9, 8]])).tolist()
    [1, 7]
    """
    return _call("reduce_min", x, axis, keepdims, where)


def logsumexp(x, axis=-1, where=None, keepdims=False):
    """log(sum(exp(x))) along `axis`, as `jax.nn.logsumexp`, in one read of `x` and whatever its size.

    Args:
        x: array of any shape. float16, bfloat16 and float32 are computed in float32, float64 in float64, and
            rounded once; integers promote as in `jax.nn`; float8 runs through XLA.
        axis, where, keepdims: as for `reduce_sum`.

    Returns:
        Array of the shape of `x` without the axes. A row of which no element takes part, or which is -inf
        throughout, is -inf with zero gradients; +inf in a row makes it inf, NaN makes it NaN.

    Raises:
        TypeError: `x` is boolean, complex or no array; `where` is not boolean; `keepdims` is no bool.
        ValueError: `axis` is out of bounds or holds a duplicate; `where` does not broadcast to `x`.

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
    return _reduce(x, where, name=name, axis=validate.static_axis(name, axis), keepdims=bool(keepdims),
                   tier=tiers.forced(tiers.REDUCTIONS))


# Inlined, so that a jaxpr holds the primitive alone; jitted, so that an eager call costs no more than
# that of a jnp function.
@functools.partial(jax.jit, static_argnames=("name", "axis", "keepdims", "tier"), inline=True)
def _reduce(x, where, *, name, axis, keepdims, tier):
    prim = _PRIMITIVES[name]
    x = _operand(name, x)
    mask = validate.full_rank_mask(name, x, where)
    axes = validate.sorted_axes(name, axis, x.shape)
    if prim in (reduce_max_p, reduce_min_p) and mask is None and any(x.shape[a] == 0 for a in axes):
        raise ValueError(f"jaxkern.{name}: x of shape {x.shape} has no elements along axis {axis}, and nothing has no "
                         f"{'maximum' if prim is reduce_max_p else 'minimum'}")
    shape = tuple(1 if a in axes else d for a, d in enumerate(x.shape) if keepdims or a not in axes)
    x, (mask,), axis = validate.one_axis(x, [mask], axes)
    dtype = _sum_dtype(x.dtype) if prim is reduce_sum_p else x.dtype
    y = bind(prim, x, *(() if mask is None else (mask,)), axis=axis, dtype=dtype, tier=tier)
    return y if y.shape == shape else y.reshape(shape)


def _operand(name, x):
    """`x` in a type that the operation is defined for."""
    if name == "reduce_mean" and x.dtype == jnp.bool_:
        return x.astype(jax.eval_shape(jnp.mean, x).dtype)
    if name in ("reduce_mean", "logsumexp") or not (x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.integer)):
        return validate.floating(name, x)
    return x


def _sum_dtype(dtype):
    """The type of the sum of numbers of this type, as `jnp.sum` has it."""
    if jnp.issubdtype(dtype, jnp.floating):
        return dtype
    sums = jax.dtypes.canonicalize_dtype(np.uint64 if jnp.issubdtype(dtype, jnp.unsignedinteger) else np.int64)
    return sums if dtype.itemsize < sums.itemsize else dtype


# ---- the primitives and their derivatives

logsumexp_statistics_p = row_primitive("jaxkern_logsumexp_statistics", arrays=1, several=True)
_PRIMITIVES = {name: row_primitive(f"jaxkern_{name}", arrays=1)
               for name in ("reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "logsumexp")}
reduce_sum_p, reduce_mean_p, reduce_max_p, reduce_min_p, logsumexp_p = _PRIMITIVES.values()


def _computing(dtype):
    """The type that numbers of a floating-point type are computed in."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def _masked(x, mask):
    return jnp.where(mask[0], x, 0) if mask else x


def _count(shape, mask, axis, dtype):
    """How many elements of a row take part, with a dimension of size 1 for the axis."""
    if not mask:
        return jnp.asarray(shape[axis], dtype)
    return jnp.sum(jnp.broadcast_to(mask[0], shape), axis, keepdims=True, dtype=dtype)


def _deflinear(prim, spread):
    """Derivatives of a sum: its tangent is that of the tangents, its transpose `spread(ct, shape, mask, axis)`."""

    def jvp(primals, tangents, **params):
        y = bind(prim, *primals, **params)
        if type(tangents[0]) is ad.Zero:
            return y, compat.zero_tangent(y)
        return y, bind(prim, tangents[0], *primals[1:], **params)

    def transpose(ct, x, *mask, axis, dtype, tier):
        if any(map(ad.is_undefined_primal, mask)):
            raise NotImplementedError(f"{prim.name} is linear in its first operand only")
        none = [None] * len(mask)
        if type(ct) is ad.Zero:
            return [ad.Zero(x.aval), *none]
        dx = spread(jnp.expand_dims(ct.astype(_computing(x.aval.dtype)), axis), x.aval.shape, mask, axis)
        return [validate.split_like(dx.astype(x.aval.dtype), x.aval), *none]

    ad.primitive_jvps[prim] = jvp
    ad.primitive_transposes[prim] = transpose


_deflinear(reduce_sum_p, lambda ct, shape, mask, axis: _masked(jnp.broadcast_to(ct, shape), mask))
_deflinear(reduce_mean_p, lambda ct, shape, mask, axis: _masked(
    jnp.broadcast_to(ct / _count(shape, mask, axis, ct.dtype), shape), mask))


def _custom_vjp(prim, forward, backward):
    """The rule that every derivative of `prim` comes from.

    forward(x, *mask, **params) -> (y, kept); backward(x, kept, g, mask, axis) -> dx.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
    def f(x, mask, axis, dtype, tier):
        return bind(prim, x, *mask, axis=axis, dtype=dtype, tier=tier)

    def f_forward(x, mask, axis, dtype, tier):
        y, kept = forward(x, *mask, axis=axis, dtype=dtype, tier=tier)
        return y, (x, kept, mask)

    def f_backward(axis, dtype, tier, residuals, g):
        x, kept, mask = residuals
        g = jnp.expand_dims(g.astype(_computing(x.dtype)), axis)
        dx = _masked(backward(x, jnp.expand_dims(kept, axis), g, mask, axis), mask)
        return dx.astype(x.dtype), (None,) * len(mask)

    f.defvjp(f_forward, f_backward)
    defvjp(prim, lambda x, *mask, axis, dtype, tier: f(x, mask, axis, dtype, tier), differentiable=(0,))


def _extreme_forward(prim):
    def forward(x, *mask, **params):
        y = bind(prim, x, *mask, **params)
        return y, y

    return forward


def _extreme_backward(x, y, g, mask, axis):
    hits = (x == y) & mask[0] if mask else x == y
    ties = jnp.sum(hits, axis, keepdims=True, dtype=g.dtype)
    # A maximum that is NaN equals nothing, and its gradient is NaN; that of nothing is of no account.
    ties = jnp.where((ties == 0) & (y == y), 1, ties)
    return hits * (g / ties)


_custom_vjp(reduce_max_p, _extreme_forward(reduce_max_p), _extreme_backward)
_custom_vjp(reduce_min_p, _extreme_forward(reduce_min_p), _extreme_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _statistics(x, mask, params):
    return bind(logsumexp_statistics_p, x, *mask, **dict(params))


def _statistics_forward(x, mask, params):
    y, largest, total = bind(logsumexp_statistics_p, x, *mask, **dict(params))
    return [y, largest, total], (x, largest, total, mask)


def _statistics_backward(params, kept, cotangents):
    # The largest element is as good as any other number that sums are relative to: only y and, with it, the total change.
    x, *numbers, mask = kept
    of_y, _, of_total = cotangents
    g = of_y.astype(_computing(x.dtype)) + jnp.where(jnp.isfinite(numbers[1]), of_total * numbers[1], 0)
    largest, total, g = (jnp.expand_dims(a, dict(params)["axis"]) for a in (*numbers, g))
    x = x.astype(g.dtype)
    if mask:  # no exponential of what takes no part: it might be infinite
        x = jnp.where(mask[0], x, -jnp.inf)
    alive = total != 0
    dx = jnp.exp(x - jnp.where(alive, largest, 0)) * jnp.where(alive, g / jnp.where(alive, total, 1), 0)
    return _masked(dx, mask).astype(kept[0].dtype), (None,) * len(mask)


_statistics.defvjp(_statistics_forward, _statistics_backward)
defvjp(logsumexp_statistics_p, lambda x, *mask, **params: _statistics(x, mask, tuple(params.items())), differentiable=(0,))


def statistics(x, *mask, axis, tier, dtype=None):
    """logsumexp of each row in `dtype`, by default that of x, the row's largest element, and the sum of exp(x - largest).

    The sum is 0 where the largest is -inf, and the largest itself where that is inf or NaN.
    """
    wide = _computing(x.dtype)
    return bind(logsumexp_statistics_p, x, *mask, axis=axis, tier=tier, dtype=(dtype or x.dtype, wide, wide))


defvjp(logsumexp_p, lambda x, *mask, axis, dtype, tier: _statistics(x, mask, (
    ("axis", axis), ("tier", tier), ("dtype", (dtype, *[_computing(x.dtype)] * 2))))[0], differentiable=(0,))


# ---- the same in jnp, where there is no kernel


def _where(mask):
    return mask[0] if mask else None


def _sum_reference(x, *mask, axis, dtype, tier):
    wide = _computing(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype
    return jnp.sum(x, axis, dtype=wide, where=_where(mask)).astype(dtype)


def _mean_reference(x, *mask, axis, dtype, tier):
    total = jnp.sum(x, axis, dtype=_computing(dtype), where=_where(mask))
    count = _count(x.shape, mask, axis, total.dtype)
    return (total / (jnp.squeeze(count, axis) if mask else count)).astype(dtype)


def _bounds(dtype):
    """The least and the greatest value of a type."""
    if dtype == jnp.bool_:
        return False, True
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    if np.isinf(np.float32(-np.inf).astype(dtype).astype(np.float32)):
        return -jnp.inf, jnp.inf
    return float(jnp.finfo(dtype).min), float(jnp.finfo(dtype).max)


def _extreme_reference(method, end, x, *mask, axis, dtype, tier):
    # What takes no part needs a value; elsewhere none is given, which jax.experimental.jet cannot see through.
    rest = {"where": mask[0]} if mask else {}
    if mask or x.shape[axis] == 0:
        rest["initial"] = _bounds(dtype)[end]
    return method(x, axis, **rest).astype(dtype)


_max_reference = functools.partial(_extreme_reference, jnp.max, 0)
_min_reference = functools.partial(_extreme_reference, jnp.min, 1)


def _logsumexp_reference(x, *mask, axis, dtype, tier):
    return _statistics_reference(x, *mask, axis=axis, dtype=(dtype,), tier=tier)[0]


def _statistics_reference(x, *mask, axis, dtype, tier):
    x = x.astype(_computing(x.dtype))
    if mask:
        x = jnp.where(mask[0], x, -jnp.inf)
    largest = lax.stop_gradient(jnp.max(x, axis, initial=-jnp.inf))  # see rows.shifted
    base = _finite(largest)
    total = jnp.sum(jnp.exp(x - jnp.expand_dims(base, axis)), axis)
    return [_logsumexp_of(base, total, dtype[0]), largest, total]


def _finite(largest):
    """What sums of exponentials are relative to: 0 instead of an infinity."""
    return jnp.where(jnp.isfinite(largest), largest, 0)


def _logsumexp_of(base, total, dtype):
    y, (least, _) = jnp.log(total) + base, _bounds(dtype)
    return (y if math.isinf(least) else jnp.maximum(y, least)).astype(dtype)


# ---- rows that are split over devices: a kernel reduces each part, then the devices tell each other of theirs


def _sum_split(x, *mask, over, axis, dtype, tier):
    wide = _computing(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype
    return lax.psum(bind(reduce_sum_p, x, *mask, axis=axis, dtype=wide, tier=tier), over).astype(dtype)


def _mean_split(x, *mask, over, axis, dtype, tier):
    wide = _computing(dtype)
    total = bind(reduce_sum_p, x, *mask, axis=axis, dtype=wide, tier=tier)
    count = jnp.broadcast_to(jnp.squeeze(_count(x.shape, mask, axis, wide), axis) if mask else jnp.asarray(x.shape[axis], wide),
                             total.shape)
    total, count = lax.psum(jnp.stack([total, count]), over)
    return (total / count).astype(dtype)


def _extreme_split(prim, end, collective, x, *mask, over, axis, dtype, tier):
    y = bind(prim, x, *mask, axis=axis, dtype=dtype, tier=tier)
    if not jnp.issubdtype(dtype, jnp.floating):
        return collective(y, over)
    # Not every network takes NaN for the largest of all.
    nan = lax.psum(jnp.isnan(y).astype(jnp.int32), over)
    return jnp.where(nan > 0, jnp.nan, collective(jnp.where(jnp.isnan(y), _bounds(dtype)[end], y), over)).astype(dtype)


def _logsumexp_split(x, *mask, over, axis, dtype, tier):
    return _statistics_split(x, *mask, over=over, axis=axis, dtype=(dtype,), tier=tier)[0]


def _statistics_split(x, *mask, over, axis, dtype, tier):
    _, largest, total = statistics(x, *mask, axis=axis, tier=tier)
    whole = lax.pmax(largest, over)
    base = _finite(whole)
    # Of a part of nothing, and of one whose largest element is infinite or NaN, the total is that of exp(x).
    total = lax.psum(total * jnp.where(jnp.isfinite(largest), jnp.exp(largest - base), 1), over)
    return [_logsumexp_of(base, total, dtype[0]), jnp.where(jnp.isnan(total), jnp.nan, whole), total]


_FLOATS, _INTEGERS = lowering.KERNEL_DTYPES, lowering.INTEGER_DTYPES
for _prim, _reference, _split, _dtypes in (
        (reduce_sum_p, _sum_reference, _sum_split, _FLOATS | _INTEGERS | {jnp.dtype(bool)}),
        (reduce_mean_p, _mean_reference, _mean_split, _FLOATS),
        (reduce_max_p, _max_reference, functools.partial(_extreme_split, reduce_max_p, 0, lax.pmax), _FLOATS | _INTEGERS),
        (reduce_min_p, _min_reference, functools.partial(_extreme_split, reduce_min_p, 1, lax.pmin), _FLOATS | _INTEGERS),
        (logsumexp_p, _logsumexp_reference, _logsumexp_split, _FLOATS),
        (logsumexp_statistics_p, _statistics_reference, _statistics_split, _FLOATS)):
    lowering.register(_prim, 1, _reference, _dtypes, lowering.reduction_scratch_shape, _split)
