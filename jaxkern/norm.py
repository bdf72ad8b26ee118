"""rms_norm and layer_norm, with scale, bias and a residual, in one read and one write."""

import functools
import math
import numbers
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from jaxkern._core import functor, validate
from jaxkern._core.algorithms import forced
from jaxkern._core.primitive import bind
from jaxkern._core.rows import mask_shape
from jaxkern._core.validate import Axis
from jaxkern._ops.norm import derivatives, quantized, reference  # noqa: F401  derivatives are registered
from jaxkern._ops.norm.primitive import PRIMITIVES
from jaxkern.quantize import Quantization, checked_quantization


def rms_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    eps: float = 1e-6,
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
    return _call("rms_norm", x, scale, None, axis, eps, residual, where, dtype, epilogue, epilogue_args, quantize)


def layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    eps: float = 1e-6,
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
        x, scale, axis, eps, residual, where, dtype, epilogue, epilogue_args, quantize: as for `rms_norm`.

    Returns, raises: as `rms_norm`.

    >>> import jax.numpy as jnp, jaxkern
    >>> y, total = jaxkern.layer_norm(jnp.array([1.0, 2.0]), bias=jnp.array([0.5, 0.5]), residual=jnp.array([0.0, 1.0]))
    >>> [round(v, 3) for v in y.tolist()], total.tolist()
    ([-0.5, 1.5], [1.0, 3.0])

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    return _call("layer_norm", x, scale, bias, axis, eps, residual, where, dtype, epilogue, epilogue_args, quantize)


def _call(name, x, scale, bias, axis, eps, residual, where, dtype, epilogue, args, quantize):
    validate.check_array(name, "x", "an array or a number", x)
    for argument, value in (("scale", scale), ("bias", bias), ("residual", residual)):
        if value is not None:
            validate.check_array(name, argument, "an array", value)
    if where is not None:
        validate.check_array(name, "where", "a boolean array", where)
    if isinstance(eps, bool) or not isinstance(eps, (numbers.Real, np.number)):
        raise TypeError(f"jaxkern.{name}: eps must be a Python number, got {type(eps).__name__}")
    if not float(eps) >= 0:
        raise ValueError(f"jaxkern.{name}: eps must not be negative, got {eps}")
    if dtype is not None:
        dtype = jnp.dtype(dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"jaxkern.{name}: dtype must be floating-point, got {dtype}")
        dtype = jax.dtypes.canonicalize_dtype(dtype)
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
        eps=float(eps),
        dtype=dtype,
        tier=forced(name),
        function=function,
        to=to,
        block=block,
    )
    return y[0] if residual is None else tuple(y)


def _traced(name, epilogue, x, args):
    """(the Function of a normalised element and of `args` and captured scalars; all of these, of the rank of x)."""
    if not callable(epilogue):
        raise TypeError(f"jaxkern.{name}: epilogue must be a function of scalars, got {type(epilogue).__name__}")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"jaxkern.{name}: epilogue_args must be a list or a tuple of arrays, got {type(args).__name__}")
    for k, a in enumerate(args):
        validate.check_array(name, f"epilogue_args[{k}]", "an array or a number", a)
    ranked = (validate.full_rank(name, f"epilogue_args[{k}]", x, jnp.asarray(a)) for k, a in enumerate(args))
    args = [a for a in ranked if a is not None]  # none is
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
    tier,
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
        params = {"operation": name, "extras": " ".join(there), "eps": eps, "to": to, "block": block, "tier": tier}
        operands = [*there.values(), *args, *([] if given is None else [given])]
        found = bind(quantized.QUANTIZED[name], x, *operands, given=given is not None, function=function, **params)
        return _scaled(found, block, given)
    else:
        params = {"operation": name, "extras": " ".join(there), "eps": eps, "dtype": dtype, "tier": tier}
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
    jax.jit, static_argnames=("name", "axis", "eps", "dtype", "tier", "function", "to", "block"), inline=True
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
