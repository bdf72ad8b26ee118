"""softmax and log_softmax. A scale, a bias, a causal limit or dropout selects the fused primitives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxkern._core import validate
from jaxkern._core.algorithms import forced
from jaxkern._core.primitive import bind
from jaxkern._core.rows import computed
from jaxkern._core.validate import Axis
from jaxkern._ops.softmax import derivatives, dropout, primitive  # noqa: F401  derivatives are registered


def softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    scale: ArrayLike = 1.0,
    bias: ArrayLike | None = None,
    causal: bool = False,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Softmax of `scale * x + bias` along `axis`, as `jax.nn.softmax`.

    One kernel reads `x` once and writes the result, whichever arguments are given. The gradient is one kernel, too. Its
    residual is the result; with dropout the residuals are `x` and these arguments, and the gradient recomputes the
    softmax.

    Args:
        x: array of any shape. float16, bfloat16 and float32 are computed in float32, float64 in
            float64, and rounded once; integers promote as in `jax.nn`; other floating-point types
            (float8) run through XLA, in float32.
        axis: an int, a tuple of ints, or None for all axes. Any single axis, and neighbouring ones,
            are read in place. Axes with other dimensions between them are first made neighbours, which costs a copy.
        where: boolean array that broadcasts to the shape of `x`; the kernel reads it without materialising it. Elements
            where it is False are masked: they do not enter the sum, and their result is 0.
        scale: a real number, or a scalar array, which may be traced and is differentiable.
        bias: floating-point array that broadcasts to the shape of `x`; the kernel reads it without materialising it.
            Its gradient is summed over the dimensions that it broadcasts over. A dtype other than that of `x` or of
            the computation is converted first.
        causal: the last two dimensions of `x` are queries and keys. Query i sees keys 0 .. i + keys - queries, so that
            the last query sees all of them. Requires `axis` to be the last one.
        dropout_rate: a number in [0, 1), rounded to a multiple of 2**-16: the probability that an element of the
            result is set to 0. The other elements are divided by 1 - rate.
        dropout_key: a key of `jax.random`, or its `uint32[2]` words; only the first two words of a longer key count.

    Which elements are dropped depends only on the key, the number of the row among all rows of `x`, and the position in
    the row. The result is therefore the same on the CPU and on CUDA, under `jit`, `jax.checkpoint` and any sharding.
    Under `vmap` each example numbers its own rows: give each example its own key, or all drop the same elements. Inside
    `shard_map`, `x` is the part on one device.

    The fused kernels run if `axis` is the last dimension that has more than one element. Other axes use XLA, with the
    same dropout bits.

    Returns:
        Array of the shape of `x`. A row that is entirely masked or -inf is
        zero and has zero gradients. NaN or +inf makes its row NaN, as in `jax.nn`.

    Raises:
        TypeError: `x` is boolean, complex or not an array; `where` is not boolean; `bias` is not floating-point;
            `scale` or `dropout_rate` is not a number; `dropout_key` is not a key.
        ValueError: `axis` is out of bounds or repeats a dimension; `where` or `bias` does not broadcast to `x`; `scale`
            is not a scalar; `causal` is given with an axis other than the last; `dropout_rate` is not in [0, 1), or is
            not 0 without a key.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> x = jnp.array([[0.0, 0.0, 5.0], [1.0, 1.0, 1.0]])
    >>> jaxkern.softmax(x, where=jnp.array([True, True, False])).tolist()
    [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]
    >>> jaxkern.softmax(jnp.array([[3.0, 9.0], [1.0, 1.0]]), scale=2, causal=True).tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    >>> y = jaxkern.softmax(jnp.zeros((1000, 1000)), dropout_rate=0.25, dropout_key=jax.random.key(0))
    >>> round(float((y == 0).mean()), 2), round(float(y.max()) * 1000, 3)
    (0.25, 1.333)

    Source: Bridle, "Probabilistic Interpretation of Feedforward Classification Network Outputs", 1990;
    one pass over a row after Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018;
    random bits after Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011 (Philox4x32-7).
    """
    extras = _extras("softmax", scale, bias, causal, dropout_rate, dropout_key)
    if extras is not None:
        return _call(_fused_softmax, "softmax", x, axis, where, *extras)
    return _call(_softmax, "softmax", x, axis, where)


def log_softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    scale: ArrayLike = 1.0,
    bias: ArrayLike | None = None,
) -> jax.Array:
    """Logarithm of the softmax of `scale * x + bias` along `axis`, as `jax.nn.log_softmax`.

    Args:
        x: array of any shape. float16, bfloat16 and float32 are computed in float32, float64 in
            float64, and rounded once; integers promote as in `jax.nn`; other floating-point types
            (float8) run through XLA, in float32.
        axis: an int, a tuple of ints, or None for all axes. Any single axis, and neighbouring ones,
            are read in place. Axes with other dimensions between them are first made neighbours, which costs a copy.
        where: boolean array that broadcasts to the shape of `x`; the kernel reads it without materialising it. Elements
            where it is False are masked: they do not enter the sum, and their result is -inf (the lowest finite
            number of a dtype without infinity, such as some float8 types).
        scale, bias: as for `softmax`.

    Returns:
        Array of the shape of `x`. A row that is entirely masked or -inf is -inf and has zero gradients. NaN or +inf
        makes its row NaN, as in `jax.nn`.

    Raises:
        TypeError: `x` is boolean, complex or not an array; `where` is not boolean; `bias` is not floating-point;
            `scale` is not a number.
        ValueError: `axis` is out of bounds or repeats a dimension; `where` or `bias` does not broadcast to `x`;
            `scale` is not a scalar.

    >>> import jax.numpy as jnp, jaxkern
    >>> y = jaxkern.log_softmax(jnp.array([3.0, 3.0, 7.0]), where=jnp.array([True, True, False]))
    >>> [round(v, 4) for v in y.tolist()]
    [-0.6931, -0.6931, -inf]

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    extras = _extras("log_softmax", scale, bias)
    if extras is not None:
        return _call(_fused_log_softmax, "log_softmax", x, axis, where, *extras)
    return _call(_log_softmax, "log_softmax", x, axis, where)


def _call(jitted, name, x, axis, where, arrays=(), flags=None):
    # Checked here because an error of jit would not name the operation.
    validate.check_array(name, "x", "an array or a number", x)
    if where is not None:
        validate.check_array(name, "where", "a boolean array", where)
    return jitted(x, where, *arrays, axis=validate.static_axis(name, axis), tier=forced(name), **(flags or {}))


def _along_axis(name, prim, x, where, axis, tier):
    x = validate.floating(name, x)
    mask = validate.full_rank_mask(name, x, where)
    axes = validate.sorted_axes(name, axis, x.shape)

    def row_operation(x, parts, axis):
        return bind(prim, x, *(p for p in parts if p is not None), axis=axis, tier=tier)

    return validate.along_axes(row_operation, x, [mask], axes)


# Inlined, so that a jaxpr holds the primitive alone. Jitted, so that an eager call costs no more than a jnp function.
@functools.partial(jax.jit, static_argnames=("axis", "tier"), inline=True)
def _softmax(x, where, *, axis, tier):
    return _along_axis("softmax", primitive.softmax_p, x, where, axis, tier)


@functools.partial(jax.jit, static_argnames=("axis", "tier"), inline=True)
def _log_softmax(x, where, *, axis, tier):
    return _along_axis("log_softmax", primitive.log_softmax_p, x, where, axis, tier)


@functools.partial(jax.jit, static_argnames=("axis", "tier", "causal", "threshold"), inline=True)
def _fused_softmax(x, where, scale, bias, key, *, axis, tier, causal, threshold):
    return _fused_along_axis("softmax", x, where, scale, bias, key, axis, tier, causal, threshold)


@functools.partial(jax.jit, static_argnames=("axis", "tier"), inline=True)
def _fused_log_softmax(x, where, scale, bias, *, axis, tier):
    return _fused_along_axis("log_softmax", x, where, scale, bias, None, axis, tier, False, 0)


# ---- from arguments to operands


def _extras(name: str, scale, bias, causal=None, rate=0.0, key=None):
    """(arrays, flags) for the jitted functions, or None if nothing is fused; causal: None for log_softmax."""
    numbers = (int, float, np.integer, np.floating)
    if isinstance(scale, bool) or not isinstance(scale, numbers):
        validate.check_array(name, "scale", "a real number or a scalar array", scale)
    else:
        scale = None if scale == 1 else float(scale)
    if bias is not None:
        validate.check_array(name, "bias", "an array of floating-point type", bias)
    if causal is None:
        return None if scale is None and bias is None else ((scale, bias), {})
    if not isinstance(causal, (bool, np.bool_)):
        raise TypeError(f"jaxkern.{name}: causal must be True or False, got {type(causal).__name__}")
    threshold = dropout.threshold(name, rate)
    if rate != 0 and key is None:
        raise ValueError(f"jaxkern.{name}: dropout_rate of {rate} needs a dropout_key")
    if key is not None:
        validate.check_array(name, "dropout_key", "a key of jax.random", key)
    if scale is None and bias is None and not causal and threshold == 0:
        return None
    return (scale, bias, key if threshold else None), {"causal": bool(causal), "threshold": threshold}


def _fused_along_axis(name: str, x, where, scale, bias, key, axis, tier, causal, threshold):
    x = validate.floating(name, x)
    wide = computed(x).dtype
    mask = validate.full_rank_mask(name, x, where)
    bias = validate.full_rank(name, "bias", x, _bias(name, bias, x.dtype, wide))
    scale = _scale(name, scale, wide)
    axes = validate.sorted_axes(name, axis, x.shape)
    if causal and (x.ndim < 2 or axes != [x.ndim - 1]):
        raise ValueError(
            f"jaxkern.{name}: causal needs axis to be the last of two or more dimensions, got axis {axis} "
            f"for x of shape {x.shape}"
        )
    key = None if key is None else dropout.key_words(name, key)

    def row_operation(x, parts, axis):
        ones = (1,) * x.ndim
        operands = {
            "bias": parts[0],
            "scale": None if scale is None else scale.reshape(ones),
            "mask": parts[1],
            "key": None if key is None else key.reshape(*ones, 2),
        }
        names = [e for e in primitive.EXTRAS if operands[e] is not None]
        return bind(
            primitive.softmax_fused_p,
            x,
            *(operands[e] for e in names),
            axis=axis,
            tier=tier,
            log=name == "log_softmax",
            extras=" ".join(names),
            causal=causal,
            threshold=threshold,
            unscaled=False,
        )

    if causal:  # keep the last two dimensions, even if one has size 1
        return row_operation(x, [bias, mask], x.ndim - 1)
    return validate.along_axes(row_operation, x, [bias, mask], axes)


def _bias(name, bias, dtype, wide):
    if bias is None:
        return None
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"jaxkern.{name}: bias must be of floating-point type, got {bias.dtype}{list(bias.shape)}")
    return bias if bias.dtype in (dtype, wide) else bias.astype(wide)


def _scale(name, scale, wide):
    if scale is None:
        return None
    scale = jnp.asarray(scale)  # still a Python number if jit is disabled
    if scale.ndim:
        raise ValueError(f"jaxkern.{name}: scale must be a scalar, got shape {scale.shape}")
    if not jnp.issubdtype(scale.dtype, jnp.floating) and not jnp.issubdtype(scale.dtype, jnp.integer):
        raise TypeError(f"jaxkern.{name}: scale must be a real number, got {scale.dtype}")
    return scale.astype(wide)
