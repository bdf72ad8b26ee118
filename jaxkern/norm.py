"""rms_norm, layer_norm, scale_norm, group_norm and batch_norm, with scale and bias."""

import functools
import math
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from jaxkern._core import functor, validate
from jaxkern._core.algorithms import forced
from jaxkern._core.primitive import bind
from jaxkern._core.rows import mask_shape
from jaxkern._core.validate import Axis
from jaxkern._definitions.norms import scale_norm  # noqa: F401
from jaxkern._ops.group_norm import derivatives as group_derivatives  # noqa: F401  derivatives are registered
from jaxkern._ops.group_norm.primitive import PRIMITIVES as GROUP_PRIMITIVES
from jaxkern._ops.norm import derivatives, quantized, reference  # noqa: F401
from jaxkern._ops.norm.primitive import PRIMITIVES
from jaxkern.quantize import Quantization, checked_quantization


def rms_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    eps: float = 1e-6,
    epsilon: float | None = None,
    residual: ArrayLike | None = None,
    where: ArrayLike | None = None,
    dtype: DTypeLike | None = None,
    epilogue: Callable[..., ArrayLike] | None = None,
    epilogue_args: Sequence[ArrayLike] = (),
    quantize: Quantization | None = None,
) -> jax.Array | tuple[typing.Any, ...]:
    """x / sqrt(mean(x^2) + eps) * scale along `axis`, as `flax.linen.RMSNorm`, `flax.nnx.RMSNorm` and `haiku.RMSNorm`.

    Args:
        x: array of any shape. float16, bfloat16 and float32 are computed in float32, float64 in float64, and the result
            is rounded once. Integers promote as in `jax.nn`. float8 uses XLA.
        scale: array that broadcasts to the dimensions of `x` along `axis`, of a floating-point dtype of its own, such as
            float32 for a bfloat16 `x`. None: 1.
        axis: an int, a tuple of ints, or None for all axes: the elements that are normalised together. Trailing axes are
            read in place. Others are first moved to the end, and the result back, which costs two copies.
        eps: added to the mean square, a Python number.
        epsilon: flax's name of `eps`.
        residual: array of the shape and dtype of `x` that is added to `x` first. The sum is rounded to the dtype of
            `x`, and the rounded sum is what is normalised.
        where: boolean array that broadcasts to the shape of `x`. Statistics are of the elements where it is True; all
            elements are normalised with them, as with flax's `mask`. A row without such elements is 0 (with a bias:
            the bias). Left to XLA.
        dtype: of the result; default: that of `x`.
        epilogue: function of scalars, applied to each normalised element before it is rounded and stored, after scale
            and bias: an activation, or a scale and shift by a condition. It is called with the element, in the
            computing type, and an element of each of `epilogue_args`, and returns a real number. It is compiled into
            the kernel, and may close over scalars. Its derivative is left to XLA, which writes the norm's result in the
            computing type for it.
        epilogue_args: arrays that broadcast to the shape of `x`, read in place by the kernel. Types other than float16,
            bfloat16, float32, float64, int32, uint32 and int64 use XLA.
        quantize: return the result in 8 bits, with scales, as `quantize_rows` and `quantize_blocks` do. The same kernel
            rounds the result in the computing type once, to 8 bits; so q and scale are those of `rms_norm(...,
            dtype=float32)`, up to the order in which float32 numbers are added. They have no derivative, x + residual has:
            `dequantize` says how to get the norm's (straight through). Takes the last axis, and no `dtype`. float64 is left
            to XLA.

    Returns:
        Array of the shape of `x`; with `quantize` instead of it (q, scale), q of the shape of `x` and scale float32 [..., 1]
        or [..., n / block], or, if the scale is given, (q, scale, amax), amax = max|result|, as `quantize_tensor` does. With
        `residual` a pair, that and x + residual. Bitwise reproducible, and so are
        the gradients. A row with NaN or an infinity contains NaN. Kernels divide squares by the width before they add
        them, so that float32 values up to 1.8e19 do not overflow; elsewhere a row is 0 if its sum of squares does.

    Raises:
        TypeError: an array is complex or not an array; `residual` has another dtype than `x`; `where` is not boolean;
            `eps` is not a Python number; `dtype` is not floating-point; `epilogue` is not callable, or does what a
            kernel cannot; `quantize` is not a `Quantization`, or its dtype none that it can have.
        ValueError: `axis` is out of bounds, empty or repeats a dimension; `eps` is negative; a shape does not fit;
            `quantize` is used with another axis or with `dtype`, or its block does not divide the rows.

    >>> import jax.numpy as jnp, jaxkern
    >>> y = jaxkern.rms_norm(jnp.array([3.0, 4.0]), jnp.array([1.0, 10.0]))
    >>> [round(v, 3) for v in y.tolist()]
    [0.849, 11.314]
    >>> shift = jnp.array([[0.0], [100.0]])
    >>> y = jaxkern.rms_norm(jnp.ones((2, 2)), epilogue=lambda v, b: 2 * v + b, epilogue_args=[shift])
    >>> [[round(v, 3) for v in row] for row in y.tolist()]
    [[2.0, 2.0], [102.0, 102.0]]

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    return _call(
        "rms_norm", x, scale, None, axis, (eps, epsilon), residual, where, dtype, epilogue, epilogue_args, quantize
    )


def layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    eps: float = 1e-6,
    epsilon: float | None = None,
    residual: ArrayLike | None = None,
    where: ArrayLike | None = None,
    dtype: DTypeLike | None = None,
    epilogue: Callable[..., ArrayLike] | None = None,
    epilogue_args: Sequence[ArrayLike] = (),
    quantize: Quantization | None = None,
) -> jax.Array | tuple[typing.Any, ...]:
    """(x - mean(x)) / sqrt(var(x) + eps) * scale + bias along `axis`, as the layers of flax, equinox and haiku.

    The default `eps` is flax's; equinox and haiku have 1e-5. The variance is the mean of the squared deviations from the
    mean, which is at least as accurate as mean(x^2) - mean(x)^2 (flax's `use_fast_variance`).

    Args:
        bias: as `scale`. None: 0.
        x, scale, axis, eps, epsilon, residual, where, dtype, epilogue, epilogue_args, quantize: as for `rms_norm`.

    Returns, raises: as `rms_norm`.

    >>> import jax.numpy as jnp, jaxkern
    >>> y, total = jaxkern.layer_norm(jnp.array([1.0, 2.0]), bias=jnp.array([0.5, 0.5]), residual=jnp.array([0.0, 1.0]))
    >>> [round(v, 3) for v in y.tolist()], total.tolist()
    ([-0.5, 1.5], [1.0, 3.0])

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    return _call(
        "layer_norm", x, scale, bias, axis, (eps, epsilon), residual, where, dtype, epilogue, epilogue_args, quantize
    )


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

    The same as `flax.linen.GroupNorm`, `flax.nnx.GroupNorm`, `haiku.GroupNorm` and `equinox.nn.GroupNorm` without their
    rounding: statistics are computed in float32 from deviations, not as mean(x^2) - mean(x)^2 (flax's
    `use_fast_variance`), and the result is rounded once. The default `eps` is flax's; equinox and haiku have 1e-5.

    Args:
        x: array of any shape. float16, bfloat16 and float32 are computed in float32, float64 in float64. Integers
            promote as in `jax.nn`. float8 uses XLA.
        groups: how many groups of adjacent channels there are; it divides the number of channels. 1 normalises whole
            examples, as many as there are channels each channel (instance normalisation).
        num_groups: flax's name of `groups`.
        scale, bias: arrays that broadcast to [channels], of a floating-point dtype of their own. None: 1 and 0.
        channel_axis: the dimension of x along which channels lie. Any is read in place.
        batch_axes: the dimensions of examples, an int, a tuple of ints, or () if x is one example, as in equinox. Other
            than leading dimensions are first moved to the front, and the result back, which costs two copies.
        eps, epsilon: as for `rms_norm`.
        dtype: of the result; default: that of `x`.
        epilogue: function of a scalar, such as `jax.nn.silu`, applied to each normalised element in the computing type,
            before it is rounded and stored. It is compiled into the kernel, unless it closes over traced scalars. XLA
            computes its derivative, from `x` and the statistics: the result of the norm is never stored.

    Returns:
        Array of the shape of `x`. Bitwise reproducible, and so are the gradients. An example and group with NaN or an
        infinity is NaN.

    Raises:
        TypeError: an array is complex or not an array; `groups` or `channel_axis` is not an int; `groups` or `eps` is given
            under both of its names; `eps` is not a Python number; `dtype` is not floating-point; `epilogue` is not
            callable, or does what a kernel cannot.
        ValueError: an axis is out of bounds or repeated, or the channels are an axis of examples; `groups` does not
            divide the channels; `eps` is negative; a shape does not fit.

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

    The same as the layers of flax, haiku and equinox, whose running averages are left to the caller: they are averages of
    the returned mean and variance. The variance is the biased one, as theirs, and is computed from deviations.

    Args:
        x, scale, bias, channel_axis, dtype, epilogue: as for `group_norm`. Statistics are over all other dimensions.
        eps, epsilon: as for `group_norm`. The default is flax's, haiku's and equinox's.
        mean, var: arrays that broadcast to [channels]: normalise with these, as in inference, which is left to XLA. Both
            or neither.

    Returns:
        (y, mean, var): y of the shape of `x`, and the statistics that it is normalised with, [channels] in float32 (in
        float64 for float64). All have derivatives. Under `jit`, the statistics of a split array are those of the whole
        array; inside `shard_map` they are those of each device's part.

    Raises:
        as `group_norm`; TypeError: one of `mean` and `var` is given without the other.

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
    return x, *_traced(name, epilogue, x, ())


def _checked(name, arrays, eps, default, dtype):
    """(eps, the dtype of the result as JAX has it, or None). eps: the arguments `eps`, with this default, and `epsilon`."""
    for argument, value in arrays.items():
        if value is not None or argument == "x":
            validate.check_array(name, argument, "an array or a number" if argument == "x" else "an array", value)
    argument, value = ("eps", eps[0]) if eps[1] is None else ("epsilon", eps[1])
    number = validate.number(name, argument, value)
    if eps[1] is not None and validate.number(name, "eps", eps[0]) != default:
        raise TypeError(f"jaxkern.{name}: eps and epsilon are names of one argument, and both are given")
    if number < 0:
        raise ValueError(f"jaxkern.{name}: {argument} must not be negative, got {value}")
    return number, None if dtype is None else validate.floating_dtype(name, "dtype", dtype)


def _call(name, x, scale, bias, axis, eps, residual, where, dtype, epilogue, args, quantize):
    arrays = {"x": x, "scale": scale, "bias": bias, "residual": residual}
    eps, dtype = _checked(name, arrays, eps, 1e-6, dtype)
    if where is not None:
        validate.check_array(name, "where", "a boolean array", where)
    to, block, given = None, None, None
    if quantize is not None:
        to, block, given = checked_quantization(name, quantize, x, axis, dtype)
    function = None
    if epilogue is not None or not isinstance(args, (tuple, list)) or args:
        x = validate.floating(name, jnp.asarray(x))
        function, args = _traced(name, epilogue, x, args)
    y = _norm(
        x,
        scale,
        bias,
        residual,
        where,
        list(args),
        given,
        name=name,
        axis=validate.static_axis(name, axis),
        eps=eps,
        dtype=dtype,
        algorithm=forced(name),
        function=function,
        to=to,
        block=block,
    )
    return y[0] if residual is None else tuple(y)


def _traced(name, epilogue, x, args):
    """(the Function of a normalised element and of `args` and captured scalars; all of these, of the rank of x)."""
    if epilogue is None:
        raise TypeError(f"jaxkern.{name}: epilogue_args are the arguments of an epilogue, and epilogue is None")
    validate.function(name, "epilogue", epilogue, "a function of scalars")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"jaxkern.{name}: epilogue_args must be a list or a tuple of arrays, got {type(args).__name__}")
    for k, a in enumerate(args):
        validate.check_array(name, f"epilogue_args[{k}]", "an array or a number", a)
        functor.check_dtype(f"jaxkern.{name}: epilogue_args[{k}]", jnp.result_type(a))
    ranked = (validate.full_rank(name, f"epilogue_args[{k}]", x, jnp.asarray(a)) for k, a in enumerate(args))
    args = [a for a in ranked if a is not None]  # none is
    scalars = f"a normalised element and an element of each of {len(args)} epilogue_args"
    validate.check_call(name, "epilogue", epilogue, 1 + len(args), scalars)
    wide = reference.computing(x.dtype)

    def converted(*scalars):
        y = jnp.asarray(epilogue(*scalars))
        real = jnp.issubdtype(y.dtype, jnp.floating) or jnp.issubdtype(y.dtype, jnp.integer)
        return y.astype(wide) if real else y

    label = getattr(epilogue, "__name__", None) or type(epilogue).__name__
    label = "epilogue" if label == "<lambda>" else f"epilogue {label}"
    dtypes, weak = [wide, *(a.dtype for a in args)], [False, *(a.weak_type for a in args)]
    function, captured = functor.trace(converted, dtypes, name=name, weak=weak, results=1, label=label)
    if function.out_dtypes[0] != wide:
        raise TypeError(f"{function.label} must return a real number, and returns {function.out_dtypes[0]}")
    return function, [*args, *(jnp.asarray(c).reshape((1,) * x.ndim) for c in captured)]


def norm(
    x,
    scale,
    bias,
    residual,
    where,
    args,
    given=None,
    *,
    name,
    axis,
    eps,
    dtype,
    algorithm,
    function,
    primitives=None,
    to=None,
    block=None,
):
    """The results of the operation `name` as a list. primitives: what to bind, if not PRIMITIVES[name].

    to: quantize to this type, with a scale for `block` neighbours, for a row, or `given`.
    """
    primitives = primitives or PRIMITIVES[name]
    x = validate.floating(name, x)
    dtype = x.dtype if dtype is None else dtype
    axes = validate.sorted_axes(name, axis, x.shape)
    if not axes:
        raise ValueError(f"jaxkern.{name}: axis {axis} names no dimension of x of shape {x.shape}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        kind = ValueError if residual.shape != x.shape else TypeError
        raise kind(
            f"jaxkern.{name}: residual must have the shape and dtype of x, {x.dtype}{list(x.shape)}, got "
            f"{residual.dtype}{list(residual.shape)}"
        )
    where = validate.full_rank_mask(name, x, where)
    row = tuple(x.shape[a] for a in axes)
    scale, bias = _parameters(name, x, row, {"scale": scale, "bias": bias})

    order = [a for a in range(x.ndim) if a not in axes] + axes
    flat = functools.partial(_flat, order=order, count=len(axes))
    rows = {"residual": residual, "scale": scale, "bias": bias}
    there = {k: flat(a) if k == "residual" else a for k, a in rows.items() if a is not None}
    args = [_argument(a, x, order, len(axes)) for a in args]
    if where is not None:
        where = flat(jnp.broadcast_to(where, x.shape))
        rest = {k: there.get(k) for k in rows} | {"operation": name, "eps": eps, "function": function}
        if to is not None:
            more = {"to": to, "block": block, "given": given}
            return _scaled(quantized.masked(x, jnp.broadcast_to(where, x.shape), args, **rest, **more), block, given)
        ys = reference.masked(flat(x), where, args, dtype=dtype, **rest)
    elif to is not None:
        if block is not None:
            x = validate.whole(x, x.ndim - 1)
            there = {k: validate.whole(a, a.ndim - 1) for k, a in there.items()}
        params = {
            "operation": name,
            "extras": " ".join(there),
            "eps": eps,
            "to": to,
            "block": block,
            "algorithm": algorithm,
        }
        operands = [*there.values(), *args, *([] if given is None else [given])]
        found = bind(quantized.QUANTIZED[name], x, *operands, given=given is not None, function=function, **params)
        return _scaled(found, block, given)
    else:
        params = {"operation": name, "extras": " ".join(there), "eps": eps, "dtype": dtype, "algorithm": algorithm}
        if function is None:
            ys = bind(primitives.forward, flat(x), *there.values(), **params)
        else:
            ys = bind(primitives.epilogue, flat(x), *there.values(), *args, function=function, **params)
    return [_restored(y, x, order, len(axes)) for y in ys]


def _scaled(found, block, given):
    """The results of the quantized norm: those in 8 bits as a tuple, then x + residual."""
    q, second, *s = found
    if given is not None:
        return [(q, given, quantized.largest(second)), *s]
    return [(q, second[..., None] if block is None else second), *s]


# Inlined, so that a jaxpr holds the primitive alone. Jitted, so that an eager call costs no more than a jnp function.
_norm = functools.partial(
    jax.jit, static_argnames=("name", "axis", "eps", "dtype", "algorithm", "function", "to", "block"), inline=True
)(norm)


def _parameters(name, x, row, given):
    """scale and bias as vectors of one dtype; None stays None."""
    for argument, value in given.items():
        if value is None:
            continue
        value = validate.floating(name, value, argument)
        try:
            fits = jnp.broadcast_shapes(value.shape, row) == row
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"jaxkern.{name}: {argument} of shape {value.shape} does not broadcast to the normalised dimensions "
                f"{row} of x of shape {x.shape}"
            )
        given[argument] = value if value.shape == row else jnp.broadcast_to(value, row)
    wide = reference.computing(x.dtype)
    dtypes = {value.dtype for value in given.values() if value is not None}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(d) for d in (jnp.float16, jnp.bfloat16, jnp.float32, wide)}:
        given = {k: value if value is None else value.astype(wide) for k, value in given.items()}
    return [value if value is None else value.reshape(math.prod(row)) for value in given.values()]


def _flat(x, order, count):
    """x with its normalised axes, the last `count` of `order`, as one last axis."""
    x = x if order == list(range(x.ndim)) else x.transpose(order)
    first = x.ndim - count
    if count == 1:
        return x
    return validate.mergeable(x, count, first).reshape(*x.shape[:first], math.prod(x.shape[first:]))


def _argument(a, x, order, count):
    """An argument of the epilogue as `_flat` has x; broadcast only where kernels could not read it otherwise."""
    rows, row = order[:-count], order[-count:]
    if any(a.shape[d] != 1 for d in row):
        a = jnp.broadcast_to(a, [n if d in row else a.shape[d] for d, n in enumerate(x.shape)])
    a = _flat(a, order, count)
    full = (*(x.shape[d] for d in rows), math.prod(x.shape[d] for d in row))
    wanted = mask_shape(full, a.shape, len(rows))
    return a if wanted == a.shape else jnp.broadcast_to(a, wanted)


def _restored(y, x, order, count):
    """y, flat, in the shape of x."""
    if count > 1:
        y = y.reshape([x.shape[a] for a in order])
        spec = validate.explicit_spec(x)
        if any(spec[a] for a in order[-count:]):
            y = jax.sharding.reshard(y, P(*(spec[a] for a in order)))
    return y if order == list(range(x.ndim)) else y.transpose([order.index(a) for a in range(x.ndim)])


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
    named = {k: split(a, 0) for k, a in (("scale", scale), ("bias", bias)) if a is not None}
    y, mean, var = bind(
        GROUP_PRIMITIVES[name].forward,
        split(wide, at),
        *named.values(),
        operation=name,
        extras=" ".join(named),
        batch=len(samples),
        keep=0,
        channel=at,
        eps=eps,
        dtype=reference.computing(x.dtype) if captured else x.dtype if dtype is None else dtype,
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
    dtype, wide = x.dtype if dtype is None else dtype, reference.computing(x.dtype)
    row = (x.shape[channel],)
    parameters = [*_parameters(name, x, row, {"scale": scale, "bias": bias})]
    parameters += _parameters(name, x, row, {"mean": mean, "var": var})
    scale, bias, mean, var = (None if a is None else a.astype(wide) for a in parameters)
    along = lambda a: jnp.expand_dims(a, [d for d in range(x.ndim) if d != channel])
    rstd = jax.lax.rsqrt(var + eps)
    y = (x.astype(wide) - along(mean)) * along(rstd if scale is None else rstd * scale)
    y = y if bias is None else y + along(bias)
    return [y.astype(dtype) if function is None else _finished(y, function, captured, dtype), mean, var]
