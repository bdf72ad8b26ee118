"""Norms of rows."""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxkern._core.validate import Axis
from jaxkern._definitions.moments import inverse_root, mean_square, standardized
from jaxkern._definitions.operation import operation
from jaxkern._definitions.quantization import Quantization
from jaxkern._ops.norm import plan


@operation(columns=("scale",), masks=("where",), by_hand=plan)
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
            the bias).
        dtype: the type of the result; by default the type of `x`.
        epilogue: function of scalars, applied to each normalised element before it is rounded and stored, after scale
            and bias: an activation, or a scale and shift by a condition. It is called with the element, in the
            computing type, and an element of each of `epilogue_args`, and returns a real number. It is compiled into
            the kernel, and its derivative into the gradient's. It may close over scalars.
        epilogue_args: arrays that broadcast to the shape of `x`, read in place by the kernel.
        quantize: return the result in 8 bits, with scales, as `quantize_rows` and `quantize_blocks` do. The same kernel
            rounds the result once, from the computing type to 8 bits. q and scale are therefore the same as for the result of
            `rms_norm(..., dtype=float32)`, up to the order in which float32 numbers are added. They have no derivative, but
            x + residual has one; `dequantize` gives the result the derivative of the norm (straight through). Needs the last
            axis, and no `dtype`. XLA computes float64.

    Returns:
        Array of the shape of `x`. With `quantize` instead (q, scale), q of the shape of `x` and scale float32 [..., 1] or
        [..., n / block]; if the scale is given, (q, scale, amax), amax = max|result|, as `quantize_tensor` returns. With
        `residual` a pair: this result, and x + residual. Results and gradients are bitwise reproducible. A row with NaN or
        an infinity contains NaN. Kernels divide squares by the width before they add them, so that float32 values up to
        1.8e19 do not overflow; elsewhere a row is 0 if its sum of squares overflows.

    Raises:
        TypeError: an array is complex or not an array; `residual` has another dtype than `x`; `where` is not boolean;
            `eps` is not a Python number; `dtype` is not floating-point; `epilogue` is not callable, or contains an
            operation that a kernel cannot run; `quantize` is not a `Quantization`, or has an unsupported dtype.
        ValueError: `axis` is out of bounds, empty or repeats a dimension; `eps` is negative; a shape does not fit;
            `quantize` is used with another axis or with `dtype`, or its block does not divide the rows.

    Derivatives: forward and reverse mode, of any order, by `x`, `scale`, `residual`, `epilogue_args` and scalars that
    `epilogue` closes over. One kernel computes the gradients of `x` and `scale`; its residuals are the arguments.

    Cost: for n elements of e bytes, the call moves 2 n e bytes, or 4 n e with a residual, and the gradient 3 n e. Rows that
    are too long to be kept (1 MB; 128 KB before Hopper; shorter ones in gradients) are read twice: 3 n e bytes and 5 n e.
    `quantize` writes 1 byte instead of e.

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
    y = x * inverse_root(mean_square(x, where) + eps, x, where)
    return y if scale is None else y * scale


@operation(columns=("scale", "bias"), masks=("where",), by_hand=plan)
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
    """(x - mean(x)) / sqrt(var(x) + eps) * scale + bias along `axis`, as `flax.linen.LayerNorm` and `equinox.nn.LayerNorm`.

    The variance is the mean of the squared deviations from the mean, which is at least as accurate as mean(x^2) - mean(x)^2
    (flax's `use_fast_variance`).

    Args:
        x: array of any shape. float16, bfloat16 and float32 are computed in float32, float64 in float64, and the result
            is rounded once. Integers promote as in `jax.nn`. float8 uses XLA.
        scale, bias: arrays that broadcast to the dimensions of `x` along `axis`, of a floating-point dtype of their own. None:
            1 and 0.
        axis: an int, a tuple of ints, or None for all axes: the elements that are normalised together, as for `rms_norm`.
        eps: added to the variance, a Python number. The default is flax's; equinox and haiku have 1e-5.
        epsilon: flax's name of `eps`.
        residual: array of the shape and dtype of `x` that is added to `x` first, as for `rms_norm`.
        where: boolean array that broadcasts to the shape of `x`: statistics are of the elements where it is True.
        dtype: the type of the result; by default the type of `x`.
        epilogue, epilogue_args: a function of scalars that is applied to each normalised element before it is stored, and its
            other operands, as for `rms_norm`.
        quantize: a `Quantization`: return the result in 8 bits, with scales, as for `rms_norm`.

    Returns:
        Array of the shape of `x`. With `quantize` instead (q, scale) or (q, scale, amax); with `residual` a pair of this result
        and x + residual, as for `rms_norm`. Bitwise reproducible, and so are the gradients. A row with NaN or an infinity
        contains NaN.

    Raises:
        TypeError: an array is complex or not an array; `residual` has another dtype than `x`; `where` is not boolean;
            `eps` is not a Python number; `dtype` is not floating-point; `epilogue` is not callable, or contains an
            operation that a kernel cannot run; `quantize` is not a `Quantization`, or has an unsupported dtype.
        ValueError: `axis` is out of bounds, empty or repeats a dimension; `eps` is negative; a shape does not fit;
            `quantize` is used with another axis or with `dtype`, or its block does not divide the rows.

    Derivatives: forward and reverse mode, of any order, by all arrays but `where`. One kernel computes the gradients of
    `x`, `scale` and `bias`; its residuals are the arguments.

    Cost: as for `rms_norm`: for n elements of e bytes 2 n e bytes, or 4 n e with a residual, and 3 n e for the gradient.

    >>> import jax.numpy as jnp, jaxkern
    >>> y, total = jaxkern.layer_norm(jnp.array([1.0, 2.0]), bias=jnp.array([0.5, 0.5]), residual=jnp.array([0.0, 1.0]))
    >>> [round(v, 3) for v in y.tolist()], total.tolist()
    ([-0.5, 1.5], [1.0, 3.0])

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    y = standardized(x, eps, where)
    y = y if scale is None else y * scale
    return y if bias is None else y + bias


@operation(columns=("scale",))
def scale_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    eps: float = 1e-5,
    residual: ArrayLike | None = None,
    dtype: DTypeLike | None = None,
    epilogue: Callable[..., ArrayLike] | None = None,
    epilogue_args: Sequence[ArrayLike] = (),
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """scale * x / |x| along `axis`, with the Euclidean norm |x|: the length of each row becomes `scale`.

    Args:
        x: array of any shape and dtype, as for `rms_norm`.
        scale: the length, an array of one element; or an array that broadcasts to the dimensions of `x` along `axis`, by which
            rows of length 1 are multiplied. Of a floating-point dtype of its own. None: 1.
        axis: an int, a tuple of ints, or None for all axes: the elements that are normalised together, as for `rms_norm`.
        eps: the least norm that a row is divided by, a Python number. Rows of zeros stay 0.
        residual: array of the shape and dtype of `x` that is added to `x` first, as for `rms_norm`.
        dtype: the type of the result; by default the type of `x`.
        epilogue, epilogue_args: a function of scalars that is applied to each normalised element before it is stored, and its
            other operands, as for `rms_norm`.

    Returns:
        Array of the shape of `x`; with `residual` a pair, that and x + residual. Bitwise reproducible, and so are the
        gradients. A row with NaN contains NaN. A row is 0 if its sum of squares is infinite in the computing type.

    Raises:
        TypeError: an array is complex or not an array; `residual` has another dtype than `x`; `eps` is not a Python number;
            `dtype` is not floating-point; `epilogue` is not callable, or contains an operation that a kernel cannot run.
        ValueError: `axis` is out of bounds, empty or repeats a dimension; `eps` is negative; a shape does not fit.

    Derivatives: forward and reverse mode, of any order, by `x`, `scale`, `residual` and `epilogue_args`. One kernel
    computes the gradients of `x` and `scale`.

    Cost: as for `rms_norm`: for n elements of e bytes 2 n e bytes, or 4 n e with a residual, and 3 n e for the gradient.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.scale_norm(jnp.array([[3.0, 4.0], [0.0, 0.0]]), 10.0).tolist()
    [[6.0, 8.0], [0.0, 0.0]]

    Source: Nguyen and Salazar, "Transformers without Tears", 2019.
    """
    y = x * lax.rsqrt(jnp.maximum(jnp.sum(x * x, -1, keepdims=True), eps * eps))
    return y if scale is None else y * scale
