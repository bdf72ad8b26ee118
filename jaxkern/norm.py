"""rms_norm, layer_norm, scale_norm, group_norm and batch_norm, with scale and bias."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxkern._core import package, validate
from jaxkern._core.algorithms import forced
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind
from jaxkern._core.validate import Axis
from jaxkern._definitions.norms import layer_norm, rms_norm, scale_norm
from jaxkern._definitions.operation import column, not_negative, traced_epilogue
from jaxkern._definitions.traced import vectors
from jaxkern._ops.group_norm import derivatives as group_derivatives  # noqa: F401  derivatives are registered
from jaxkern._ops.group_norm.primitive import PRIMITIVES as GROUP_PRIMITIVES

package.publish(__name__, layer_norm, rms_norm, scale_norm)


def group_norm(
    x: ArrayLike,
    groups: int | None = None,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    num_groups: int | None = None,
    channel_axis: int = -1,
    batch_axes: Axis = 0,
    eps: float = 1e-6,
    epsilon: float | None = None,
    dtype: DTypeLike | None = None,
    epilogue: Callable[..., ArrayLike] | None = None,
) -> jax.Array:
    """(x - mean) / sqrt(var + eps) * scale + bias, with the mean and variance of each example and group of channels.

    It computes what the GroupNorm layers of flax, haiku and equinox compute, without their rounding: statistics are
    computed in float32 from deviations, not as mean(x^2) - mean(x)^2 (flax's `use_fast_variance`), and the result is
    rounded once. The default `eps` is flax's; equinox and haiku have 1e-5.

    Args:
        x: array of any shape. float16, bfloat16 and float32 are computed in float32, float64 in float64. Integers
            promote as in `jax.nn`. float8 uses XLA.
        groups: the number of groups of adjacent channels; it divides the number of channels. 1 normalises whole examples;
            the number of channels normalises each channel (instance normalisation).
        num_groups: flax's name of `groups`.
        scale, bias: arrays that broadcast to [channels], of a floating-point dtype of their own. None: 1 and 0.
        channel_axis: the dimension of x along which channels lie. Any dimension is read in place.
        batch_axes: the dimensions of examples, an int, a tuple of ints, or () if x is one example, as in equinox. Dimensions
            that do not lead are first moved to the front, and the result back, which costs two copies.
        eps: added to the variance, a Python number.
        epsilon: flax's name of `eps`.
        dtype: the type of the result; by default the type of `x`.
        epilogue: function of a scalar, such as `jax.nn.silu`, applied to each normalised element in the computing type,
            before it is rounded and stored. It is compiled into the kernel, unless it closes over traced scalars. XLA
            computes its derivative, from `x` and the statistics: the result of the norm is never stored.

    Returns:
        Array of the shape of `x`. Bitwise reproducible, and so are the gradients. An example and group with NaN or an
        infinity is NaN.

    Raises:
        TypeError: an array is complex or not an array; `groups` or `channel_axis` is not an int; `groups` or `eps` is given
            under both of its names; `eps` is not a Python number; `dtype` is not floating-point; `epilogue` is not
            callable, or contains an operation that a kernel cannot run.
        ValueError: an axis is out of bounds or repeated, or the channels are an axis of examples; `groups` does not
            divide the channels; `eps` is negative; a shape does not fit.

    Derivatives: forward and reverse mode, of any order, by `x`, `scale` and `bias`. The residuals are these and the
    statistics. One operation computes the three gradients. XLA computes the derivative of `epilogue`.

    Cost: for n elements of e bytes, the call moves 2 n e bytes and the gradient 3 n e, if channels lie last and a group
    fits into the shared memory of a few blocks. Other groups are read twice: 3 n e bytes and 5 n e.

    >>> import jax.numpy as jnp, jaxkern
    >>> y = jaxkern.group_norm(jnp.array([[1.0, 3.0, 10.0, 30.0]]), 2, eps=0)
    >>> [round(v, 3) for v in y[0].tolist()]
    [-1.0, 1.0, -1.0, 1.0]

    Source: Wu and He, "Group Normalization", 2018.
    """
    name = "group_norm"
    eps, dtype = _checked(name, {"x": x, "scale": scale, "bias": bias}, (eps, epsilon), 1e-6, dtype)
    if groups is not None and num_groups is not None:
        raise TypeError(f"jaxkern.{name}: groups and num_groups are names of one argument, and both are given")
    x, function, captured = _function(name, epilogue, x)
    return _grouped(
        x,
        scale,
        bias,
        captured,
        name=name,
        groups=validate.integer(name, *(("groups", groups) if num_groups is None else ("num_groups", num_groups))),
        channel=validate.integer(name, "channel_axis", channel_axis),
        batch=validate.static_axis(name, () if batch_axes is None else batch_axes, "batch_axes"),
        eps=eps,
        dtype=dtype,
        algorithm=forced(name),
        function=function,
    )[0]


def batch_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    channel_axis: int = -1,
    eps: float = 1e-5,
    epsilon: float | None = None,
    mean: ArrayLike | None = None,
    var: ArrayLike | None = None,
    dtype: DTypeLike | None = None,
    epilogue: Callable[..., ArrayLike] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(x - mean) / sqrt(var + eps) * scale + bias, with the mean and variance of each channel, which it returns too.

    This is the layer of flax, haiku and equinox without its running averages: the caller averages the returned mean and
    variance. As in these libraries, the variance is the biased one; it is computed from deviations.

    Args:
        x: array of any shape and dtype, as for `group_norm`.
        scale, bias: arrays that broadcast to [channels], of a floating-point dtype of their own. None: 1 and 0.
        channel_axis: the dimension of x along which channels lie. Statistics are over all other dimensions.
        eps: added to the variance, a Python number. The default is flax's, haiku's and equinox's.
        epsilon: flax's name of `eps`.
        dtype: the type of y; by default the type of `x`.
        epilogue: function of a scalar that is applied to each normalised element, as for `group_norm`.
        mean, var: arrays that broadcast to [channels], to normalise with, as in inference; XLA computes the result. Give
            both or neither.

    Returns:
        (y, mean, var): y of the shape of `x`, and the statistics that it is normalised with, [channels] in float32 (in
        float64 for float64). All have derivatives. Under `jit`, statistics cover the whole array even if it is split over
        devices; inside `shard_map` they cover the part of each device.

    Raises:
        TypeError: an array is complex or not an array; `channel_axis` is not an int; `eps` is given under both of its
            names, or is not a Python number; `dtype` is not floating-point; one of `mean` and `var` is given without the
            other; `epilogue` is not callable, or contains an operation that a kernel cannot run.
        ValueError: `channel_axis` is out of bounds; `eps` is negative; a shape does not fit.

    Derivatives: forward and reverse mode, of any order, of all three results, by `x`, `scale` and `bias`.

    Cost: for n elements of e bytes, the call reads `x` twice, once for the statistics, and writes y: 3 n e bytes. The
    gradient reads `x` and the cotangent twice: 5 n e. With `mean` and `var` given, one pass of XLA moves 2 n e bytes.

    >>> import jax.numpy as jnp, jaxkern
    >>> x = jnp.array([[1.0, 5.0], [3.0, 9.0]])
    >>> y, mean, var = jaxkern.batch_norm(x, jnp.ones(2), jnp.zeros(2), eps=0)
    >>> y.tolist(), mean.tolist(), var.tolist()
    ([[-1.0, -1.0], [1.0, 1.0]], [2.0, 7.0], [1.0, 4.0])
    >>> jaxkern.batch_norm(x, eps=0, mean=jnp.zeros(2), var=jnp.full(2, 4.0))[0].tolist()
    [[0.5, 2.5], [1.5, 4.5]]

    Source: Ioffe and Szegedy, "Batch Normalization", 2015.
    """
    name = "batch_norm"
    if (mean is None) != (var is None):
        raise TypeError(f"jaxkern.{name}: mean and var must be given together")
    arrays = {"x": x, "scale": scale, "bias": bias, "mean": mean, "var": var}
    eps, dtype = _checked(name, arrays, (eps, epsilon), 1e-5, dtype)
    x, function, captured = _function(name, epilogue, x)
    given = {"channel": validate.integer(name, "channel_axis", channel_axis), "eps": eps, "dtype": dtype}
    given |= {"name": name, "function": function}
    if mean is not None:
        return tuple(_normalised(x, scale, bias, mean, var, captured, **given))
    return tuple(_grouped(x, scale, bias, captured, groups=None, batch=(), algorithm=forced(name), **given))


def _function(name, epilogue, x):
    """(x, the Function of a normalised element and of captured scalars or None, these scalars)."""
    if epilogue is None:
        return x, None, []
    x = validate.floating(name, jnp.asarray(x))
    return x, *traced_epilogue(name, epilogue, x, ())


def _checked(name, arrays, eps, default, dtype):
    """(eps, the dtype of the result as JAX has it, or None). eps: the arguments `eps`, with this default, and `epsilon`."""
    for argument, value in arrays.items():
        if value is not None or argument == "x":
            validate.check_array(name, argument, "an array or a number" if argument == "x" else "an array", value)
    number = not_negative(name, "eps", eps[0], default, epsilon=eps[1])
    return number, None if dtype is None else validate.floating_dtype(name, "dtype", dtype)


def _parameters(name, x, row, given):
    """scale and bias as vectors of one dtype; None stays None."""
    given = {k: None if a is None else column(name, k, x, row, a) for k, a in given.items()}
    there = {k: a.reshape(-1) if a.size == 1 else a for k, a in given.items() if a is not None}
    return [vectors(row, computing(x.dtype), there).get(k) for k in given]


# ---- groups of channels


@functools.partial(
    jax.jit,
    static_argnames=("name", "groups", "channel", "batch", "eps", "dtype", "algorithm", "function"),
    inline=True,
)
def _grouped(x, scale, bias, captured, *, name, groups, channel, batch, eps, dtype, algorithm, function):
    """[y, mean, variance]. groups: None for one of each channel."""
    x = validate.floating(name, x)
    (channel,) = validate.sorted_axes(name, channel, x.shape, called="channel_axis")
    samples = validate.sorted_axes(name, batch, x.shape, called="batch_axes")
    if channel in samples:
        raise ValueError(
            f"jaxkern.{name}: axis {channel} of x of shape {x.shape} is both channel_axis and one of batch_axes"
        )
    channels = x.shape[channel]
    groups = channels if groups is None else groups
    if groups < 1 and channels or groups and channels % groups:
        raise ValueError(
            f"jaxkern.{name}: {groups} groups do not divide the {channels} channels along axis {channel} of x of shape "
            f"{x.shape}"
        )
    scale, bias = _parameters(name, x, (channels,), {"scale": scale, "bias": bias})
    order = samples + [a for a in range(x.ndim) if a not in samples]
    moved = order != list(range(x.ndim))
    wide, at = x.transpose(order) if moved else x, order.index(channel)
    each = 1 if groups == channels else channels // groups
    wide = validate.whole(wide, at) if each > 1 else wide
    split = lambda a, at: (
        jnp.expand_dims(a, at + 1) if each == 1 else a.reshape(*a.shape[:at], groups, each, *a.shape[at + 1 :])
    )
    vectors = (None if a is None else split(a, 0) for a in (scale, bias))
    y, mean, var = bind(
        GROUP_PRIMITIVES[name].forward,
        split(wide, at),
        *vectors,
        operation=name,
        batch=len(samples),
        keep=0,
        channel=at,
        eps=eps,
        dtype=computing(x.dtype) if captured else x.dtype if dtype is None else dtype,
        algorithm=algorithm,
        function=None if captured else function,
    )
    y = jnp.squeeze(y, at + 1) if each == 1 else y.reshape(wide.shape)
    y = y.transpose([order.index(a) for a in range(x.ndim)]) if moved else y
    y = validate.split_like(y, jax.typeof(x))
    return [_finished(y, function, captured, x.dtype if dtype is None else dtype) if captured else y, mean, var]


def _finished(y, function, captured, dtype):
    """y, in its computing type, with the function applied."""
    return jnp.broadcast_to(function.unrounded(y, *captured)[0], y.shape).astype(dtype)


@functools.partial(jax.jit, static_argnames=("name", "channel", "eps", "dtype", "function"), inline=True)
def _normalised(x, scale, bias, mean, var, captured, *, name, channel, eps, dtype, function):
    """[y, mean, variance] with given statistics."""
    x = validate.floating(name, x)
    (channel,) = validate.sorted_axes(name, channel, x.shape, called="channel_axis")
    dtype, wide = x.dtype if dtype is None else dtype, computing(x.dtype)
    row = (x.shape[channel],)
    parameters = [*_parameters(name, x, row, {"scale": scale, "bias": bias})]
    parameters += _parameters(name, x, row, {"mean": mean, "var": var})
    scale, bias, mean, var = (None if a is None else a.astype(wide) for a in parameters)
    along = lambda a: jnp.expand_dims(a, [d for d in range(x.ndim) if d != channel])
    rstd = jax.lax.rsqrt(var + eps)
    y = (x.astype(wide) - along(mean)) * along(rstd if scale is None else rstd * scale)
    y = y if bias is None else y + along(bias)
    return [y.astype(dtype) if function is None else _finished(y, function, captured, dtype), mean, var]
