"""quantize_rows, quantize_blocks, quantize_tensor, dequantize and fake_quantize; Quantization and DelayedScale."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxkern._core import package, validate
from jaxkern._definitions import quantize as definition
from jaxkern._definitions import quantized_forms as forms
from jaxkern._definitions.quantization import Quantization, block_of, check_matrix, checked, one_scale, type_of

package.publish(__name__, Quantization)

Pair = tuple[jax.Array, jax.Array]


@typing.overload
def quantize_rows(
    x: ArrayLike,
    dtype: DTypeLike = ...,
    *,
    scale: ArrayLike | None = ...,
    transposed: typing.Literal[False] = ...,
) -> Pair: ...
@typing.overload
def quantize_rows(
    x: ArrayLike, dtype: DTypeLike = ..., *, scale: ArrayLike | None = ..., transposed: typing.Literal[True]
) -> tuple[Pair, Pair]: ...
def quantize_rows(
    x: ArrayLike,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    *,
    scale: ArrayLike | None = None,
    transposed: bool = False,
) -> Pair | tuple[Pair, Pair]:
    """q = round(x / scale) with scale = max|x| / most for each row of `x`, along its last dimension: x is about q * scale.

    `most` is the largest number of `dtype` (448, 57344 or 127); the scale of a row of zeros is 1. q is rounded to nearest
    even, from x * (most / max|x|).

    Args:
        x: [..., n], floating-point. The kernel computes in float32.
        dtype: float8_e4m3fn, float8_e5m2 or int8.
        scale: a scale that is known already: a number, or an array that broadcasts to `x`. Then q = x / scale, saturated
            at `most`. XLA computes this; `quantize_tensor` has a kernel for one number.
        transposed: also quantize the transposed matrix, over the last two dimensions, with scales for its own rows. A
            product of 8-bit matrices that contracts the other dimension, as in a backward pass, needs it. The maxima of
            columns take another pass: this makes two calls, and the second reads a transposed copy.

    Returns:
        (q, scale): q of the shape of `x`; scale float32 [..., 1], or as it was given. If `transposed`, a pair of these: of
        `x`, and of `x` transposed.

    Raises:
        TypeError: `x` is not real, or `dtype` is not one of the three.
        ValueError: `x` has no elements in a row, `scale` does not broadcast, or `transposed` is used with `scale` or
            without a matrix.

    Derivatives: none: both results are constants to JAX. `fake_quantize` and `dequantize(straight_through=)` have one.

    Cost: for n elements of e bytes, n e bytes are read once and n bytes are written, beside 4 bytes for each scale.
    `transposed` reads a transposed copy too.

    >>> import jax.numpy as jnp, jaxkern
    >>> q, scale = jaxkern.quantize_rows(jnp.array([[1.0, -2.0, 0.5, 0.0]]), jnp.int8)
    >>> q.tolist(), round(float(scale[0, 0]), 4)
    ([[64, -127, 32, 0]], 0.0157)

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
    """
    x, dtype = checked("quantize_rows", x, dtype)
    if validate.flag("quantize_rows", "transposed", transposed):
        check_matrix("quantize_rows", x)
        if scale is not None:
            raise ValueError("jaxkern.quantize_rows: transposed cannot be used with scale, only with computed scales")
        return forms.call(forms.both, x, dtype=dtype, block=None)
    if scale is None:
        return forms.call(forms.rows, x, dtype=dtype, block=x.shape[-1])
    validate.check_array("quantize_rows", "scale", "an array or a number", scale)
    scale = validate.floating("quantize_rows", jnp.asarray(scale), "scale").astype(jnp.float32)
    shape = (1,) * (x.ndim - scale.ndim) + scale.shape
    if len(shape) != x.ndim or any(n not in (1, m) for n, m in zip(shape, x.shape)):
        raise ValueError(
            f"jaxkern.quantize_rows: scale of shape {scale.shape} does not broadcast to x of shape {x.shape}"
        )
    q = definition.rounded(jax.lax.stop_gradient(x.astype(jnp.float32) / scale), dtype)
    return q, scale


@typing.overload
def quantize_blocks(
    x: ArrayLike, dtype: DTypeLike = ..., *, block: int = ..., transposed: typing.Literal[False] = ...
) -> Pair: ...
@typing.overload
def quantize_blocks(
    x: ArrayLike, dtype: DTypeLike = ..., *, block: int = ..., transposed: typing.Literal[True]
) -> tuple[Pair, Pair]: ...
def quantize_blocks(
    x: ArrayLike, dtype: DTypeLike = jnp.float8_e4m3fn, *, block: int = 128, transposed: bool = False
) -> Pair | tuple[Pair, Pair]:
    """q = round(x / scale) with scale = max|x| / most for each block of `block` neighbours in a row, as in `quantize_rows`.

    Args:
        x: [..., n], floating-point. The kernel computes in float32.
        dtype: float8_e4m3fn, float8_e5m2 or int8.
        block: divides the last dimension of `x`.
        transposed: also quantize the transposed matrix, over the last two dimensions, with a scale for each `block`
            neighbours in a column of `x`; `block` divides that dimension too. With blocks of 128 one kernel reads `x` once
            and writes both; other blocks are two calls.

    Returns:
        (q, scale): q of the shape of `x`, scale float32 [..., n / block]. If `transposed`, a pair of these: of `x`, and of
        `x` transposed, q [..., n, m] and scale [..., n, m / block].

    Raises:
        TypeError: `x` is not real, `dtype` is not one of the three, or `block` is not an int.
        ValueError: `x` has no elements in a row, `block` is not positive or does not divide a dimension, or `transposed` is
            used without a matrix.

    Derivatives: none, as for `quantize_rows`.

    Cost: for n elements of e bytes, n e bytes are read once and n bytes are written, beside 4 bytes for each block; 2 n
    with `transposed` and blocks of 128.

    >>> import jax.numpy as jnp, jaxkern
    >>> q, scale = jaxkern.quantize_blocks(jnp.ones((4, 512)))
    >>> q.dtype.name, scale.shape
    ('float8_e4m3fn', (4, 4))
    >>> _, (q, scale) = jaxkern.quantize_blocks(jnp.ones((256, 512)), transposed=True)
    >>> q.shape, scale.shape
    ((512, 256), (512, 2))

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022; transposed: DeepSeek-AI, "DeepSeek-V3
    Technical Report", 2024, section 3.3.
    """
    x, dtype = checked("quantize_blocks", x, dtype)
    if validate.flag("quantize_blocks", "transposed", transposed):
        check_matrix("quantize_blocks", x)
        block_of("quantize_blocks", x, block, -2)
        return forms.call(forms.both, x, dtype=dtype, block=block_of("quantize_blocks", x, block))
    return forms.call(forms.rows, x, dtype=dtype, block=block_of("quantize_blocks", x, block))


@typing.overload
def quantize_tensor(
    x: ArrayLike, dtype: DTypeLike = ..., *, scale: ArrayLike | None = ..., transposed: typing.Literal[False] = ...
) -> tuple[jax.Array, jax.Array, jax.Array]: ...
@typing.overload
def quantize_tensor(
    x: ArrayLike, dtype: DTypeLike = ..., *, scale: ArrayLike | None = ..., transposed: typing.Literal[True]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]: ...
def quantize_tensor(
    x: ArrayLike,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    *,
    scale: ArrayLike | None = None,
    transposed: bool = False,
) -> tuple[jax.Array, ...]:
    """q = round(x / scale) with one scale for all of `x`, and max|x|, from which the next scale can be computed.

    q = x * (1 / scale), saturated at the largest number of `dtype` and rounded to nearest even.

    Args:
        x: [..., n], floating-point, not a scalar. The kernel computes in float32.
        dtype: float8_e4m3fn, float8_e5m2 or int8.
        scale: a number. None: max|x| / most, where `most` is the largest number of `dtype`; 1 if x is 0 everywhere.
        transposed: also return the transpose of q, over the last two dimensions. If 128 divides both, the same kernel
            writes it; otherwise XLA transposes q.

    Returns:
        (q, scale, amax): q of the shape of `x`; scale and amax = max|x| float32 []. amax is NaN if `x` contains NaN. If
        `transposed`, (q, scale, amax, q_t), where q_t has the shape [..., n, m].

    Raises:
        TypeError: `x` is not real, or `dtype` is not one of the three.
        ValueError: `x` has no elements in a row, `scale` is not a single number, or `transposed` is used without a matrix.

    Derivatives: none, as for `quantize_rows`.

    Cost: with a scale that is known already, such as the scale of a `DelayedScale`, one kernel reads n e bytes, for n
    elements of e bytes, and writes n bytes. Without one, a pass before it finds the maximum and reads n e bytes more.
    `transposed` writes n bytes more.

    >>> import jax.numpy as jnp, jaxkern
    >>> q, scale, amax = jaxkern.quantize_tensor(jnp.array([[1.0, -3.0], [0.5, 0.0]]), jnp.int8, scale=0.25)
    >>> q.tolist(), float(amax)
    ([[4, -12], [2, 0]], 3.0)

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
    """
    x, dtype = checked("quantize_tensor", x, dtype)
    if validate.flag("quantize_tensor", "transposed", transposed):
        check_matrix("quantize_tensor", x)
    if scale is not None:
        scale = one_scale("quantize_tensor", scale)
    return forms.call(forms.tensor, x, scale, dtype=dtype, transposed=bool(transposed))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["scale", "history"],
    meta_fields=["dtype", "margin", "most_recent"],
)
@dataclasses.dataclass(frozen=True)
class DelayedScale:
    """scale = amax / most * 2**margin, from the largest magnitudes amax that a tensor had in earlier steps; a pytree.

    amax is the largest of the history, and `most` the largest number of `dtype`. While amax is 0, infinite or NaN, the
    scale stays as it is. An infinite or NaN amax stays in the history for its length. `DelayedScale.create` makes the first
    one, and `update` the next.

    Attributes:
        scale: float32 [], the scale to quantize with.
        history: float32 [length], the largest magnitudes of the last steps, the newest first.
        dtype: the name of the 8-bit type; static.
        margin: an int, by which the exponent of the scale is raised; static.
        most_recent: whether the newest amax counts alone; static.

    Raises:
        TypeError: in `create`, if the `dtype` is not one that `quantize_tensor` takes, or another argument is of the wrong
            type.
        ValueError: in `create`, if `length` is not positive, or `scale` is not one number.

    Derivatives: none: quantised results are constants to JAX.

    Cost: 4 bytes for each step of the history.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> @jax.jit
    ... def step(state, x):
    ...     q, scale, amax = jaxkern.quantize_tensor(x, state.dtype, scale=state.scale)
    ...     return state.update(amax), jaxkern.dequantize(q, scale)
    >>> state = jaxkern.DelayedScale.create(jnp.float8_e4m3fn, length=4)
    >>> for k in range(3):
    ...     state, y = step(state, jnp.array([[896.0, 3.0]]))
    >>> float(state.scale), y.tolist(), state.history.tolist()
    (2.0, [[896.0, 3.0]], [896.0, 896.0, 896.0, 0.0])

    Source: NVIDIA, "Transformer Engine", recipe DelayedScaling.
    """

    scale: jax.Array
    history: jax.Array
    dtype: str = "float8_e4m3fn"
    margin: int = 0
    most_recent: bool = False

    @classmethod
    def create(
        cls,
        dtype: DTypeLike = jnp.float8_e4m3fn,
        *,
        length: int = 1024,
        margin: int = 0,
        most_recent: bool = False,
        scale: ArrayLike = 1.0,
    ) -> DelayedScale:
        """The state before the first step, with a history of zeros.

        Args:
            dtype: float8_e4m3fn, float8_e5m2 or int8.
            length: the number of steps in the history, an int.
            margin: an int: the scale is multiplied by 2**margin.
            most_recent: whether the newest amax counts alone.
            scale: a number, the first scale.

        Returns:
            A `DelayedScale`.

        Raises:
            TypeError: `quantize_tensor` does not take this `dtype`, or another argument is of the wrong type.
            ValueError: `length` is not positive, or `scale` is not one number.
        """
        name = "DelayedScale.create"
        known = type_of(name, dtype)
        length = validate.integer(name, "length", length)
        if not 0 < length < 1 << 31:
            raise ValueError(f"jaxkern.{name}: length must be positive and below 2**31, got {length}")
        margin = validate.integer(name, "margin", margin)
        most_recent = validate.flag(name, "most_recent", most_recent)
        return cls(one_scale(name, scale), jnp.zeros(length, jnp.float32), known, margin, most_recent)

    def update(self, amax: ArrayLike) -> DelayedScale:
        """The state after a step in which the largest magnitude was `amax`.

        Args:
            amax: a number, as `quantize_tensor` returns it. Inside a `shard_map`, it covers the part of one device: apply
                `jax.lax.pmax` first, so that all devices have the same state.

        Returns:
            A `DelayedScale`.

        Raises:
            ValueError: `amax` is not one number.
        """
        newest = one_scale("DelayedScale.update", amax, "amax").reshape(1)
        history = jnp.concatenate([newest, self.history[:-1]])
        largest = history[0] if self.most_recent else jnp.max(history)
        scale = definition.scale_of(largest, self.dtype) * math.ldexp(1.0, self.margin)
        usable = jnp.isfinite(largest) & (largest > 0) & (scale > 0)
        return dataclasses.replace(self, scale=jnp.where(usable, scale, self.scale), history=history)


def dequantize(
    q: ArrayLike,
    scale: ArrayLike,
    dtype: DTypeLike = jnp.float32,
    *,
    straight_through: ArrayLike | None = None,
) -> jax.Array:
    """q * scale in `dtype`, for the results of `quantize_rows`, `quantize_blocks`, `quantize_tensor` and of norms.

    Args:
        q: [..., n], of any real dtype.
        scale: [..., m], where m divides n: one number for n / m neighbours; or a number.
        dtype: the type of the result, floating-point.
        straight_through: the array that was quantized, of the shape of q. The result has the derivative of this array, as
            if it had not been quantized. Its values are not used: under `jit` XLA removes operations that only compute them.

    Returns:
        Array of the shape of `q` and of `dtype`, computed in float32 (in float64 if the scale is), and rounded once.

    Raises:
        TypeError: `q` or `scale` is not real, `dtype` is not floating-point, or an argument is not an array.
        ValueError: the shapes do not match.

    Derivatives: by `q` and `scale` where these have some; the results of the functions above have none. With
    `straight_through` the identity, in forward and reverse mode, of any order.

    Cost: XLA reads n bytes and writes n e, and fuses the product with the operations that read it.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.dequantize(*jaxkern.quantize_rows(jnp.array([4.0, -2.0]))).tolist()
    [4.0, -2.0]

    A norm that is quantized, with the derivative of the norm:

    >>> import jax
    >>> def f(x):
    ...     q, scale = jaxkern.rms_norm(x, quantize=jaxkern.Quantization())
    ...     return jaxkern.dequantize(q, scale, straight_through=jaxkern.rms_norm(x))[0]
    >>> x = jnp.array([3.0, 4.0])
    >>> jnp.allclose(jax.grad(f)(x), jax.grad(lambda x: jaxkern.rms_norm(x)[0])(x)).item()
    True

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
    """
    for argument, value in (("q", q), ("scale", scale)):
        validate.check_array("dequantize", argument, "an array or a number", value)
    q, scale = jnp.asarray(q), jnp.asarray(scale)
    for argument, value in (("q", q), ("scale", scale)):
        validate.real("dequantize", argument, value)
    dtype = validate.floating_dtype("dequantize", "dtype", dtype)
    if straight_through is not None:
        validate.check_array("dequantize", "straight_through", "an array", straight_through)
        like = validate.floating("dequantize", jnp.asarray(straight_through), "straight_through")
        if like.shape != q.shape:
            raise ValueError(
                f"jaxkern.dequantize: straight_through of shape {like.shape} must have the shape of q, {q.shape}"
            )
        return _straight_through(like, dequantize(q, scale, dtype))
    last = scale.shape[-1] if scale.ndim else 1
    if not q.ndim or not last or q.shape[-1] % last:
        raise ValueError(f"jaxkern.dequantize: scale of shape {scale.shape} for q of shape {q.shape}")
    wide = jnp.float64 if scale.dtype == jnp.float64 else jnp.float32
    scale = scale.astype(wide)
    if last in (1, q.shape[-1]):
        return (q.astype(wide) * scale).astype(dtype)
    blocks = q.reshape(*q.shape[:-1], last, q.shape[-1] // last).astype(wide) * scale[..., None]
    return blocks.reshape(q.shape).astype(dtype)


@jax.custom_jvp
def _straight_through(x, y):
    del x
    return y


@_straight_through.defjvp
def _straight_through_jvp(primals, tangents):
    _, y = primals
    return y, tangents[0].astype(y.dtype)


def fake_quantize(x: ArrayLike, dtype: DTypeLike = jnp.float8_e4m3fn, *, block: int | None = None) -> jax.Array:
    """q * scale in the type of `x`, for (q, scale) = quantize_rows(x) or quantize_blocks(x); its derivative is the identity.

    Args:
        x: [..., n], floating-point.
        dtype: float8_e4m3fn, float8_e5m2 or int8.
        block: the number of neighbours in a row that share a scale, which divides n. None: a scale for each row.

    Returns:
        Array of the shape and dtype of `x`.

    Raises:
        TypeError: `x` is not real, `dtype` is not one of the three, or `block` is not an int.
        ValueError: `x` has no elements in a row, or `block` is not positive or does not divide the last dimension.

    Derivatives: the identity (straight through), in forward and reverse mode, of any order.

    Cost: for n elements of e bytes, the kernel moves n e + n bytes, and XLA n + n e for the way back. The gradient moves
    nothing.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> jax.grad(lambda x: jaxkern.fake_quantize(x).sum())(jnp.array([1.0, 0.3])).tolist()
    [1.0, 1.0]

    Source: Bengio et al., "Estimating or Propagating Gradients Through Stochastic Neurons", 2013.
    """
    x, dtype = checked("fake_quantize", x, dtype)
    return _through(x, dtype, x.shape[-1] if block is None else block_of("fake_quantize", x, block))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _through(x, dtype, block):
    q, scale = forms.call(forms.rows, x, dtype=dtype, block=block)
    return dequantize(q, scale, x.dtype)


@_through.defjvp
def _through_jvp(dtype, block, primals, tangents):
    return _through(*primals, dtype, block), tangents[0]
