"""quantize_rows, quantize_blocks, dequantize and fake_quantize."""

import functools

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from jaxkern._core import validate
from jaxkern._core.primitive import bind
from jaxkern._ops.quantize import plan, reference
from jaxkern._ops.quantize.primitive import quantize_p


def quantize_rows(
    x: ArrayLike, dtype: DTypeLike = jnp.float8_e4m3fn, *, scale: ArrayLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """Rounds each row of `x`, along its last dimension, to 8 bits with a scale: x is about q * scale.

    The scale is max|x| / most, where `most` is the largest number of `dtype` (448, 57344 or 127), and 1 for a row of zeros;
    q = x * (most / max|x|), rounded to nearest even. One kernel reads `x` once if a row has up to 32768 elements; XLA
    computes longer rows. Neither result has a derivative: see `fake_quantize`.

    Args:
        x: [..., n], floating-point. It is computed on in float32.
        dtype: float8_e4m3fn, float8_e5m2 or int8.
        scale: a scale that is known already, as of delayed scaling: a number, or an array that broadcasts to `x`. Then
            q = x / scale, saturated at `most`.

    Returns:
        (q, scale): q of the shape of `x`; scale float32 [..., 1], or as it was given.

    Raises:
        TypeError: `x` is not real, or `dtype` none of the three.
        ValueError: `x` has no elements in a row, or `scale` does not broadcast.

    >>> import jax.numpy as jnp, jaxkern
    >>> q, scale = jaxkern.quantize_rows(jnp.array([[1.0, -2.0, 0.5, 0.0]]), jnp.int8)
    >>> q.tolist(), round(float(scale[0, 0]), 4)
    ([[64, -127, 32, 0]], 0.0157)

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
    """
    x, dtype = _checked("quantize_rows", x, dtype)
    if scale is None:
        return _call(_rows, x, dtype=dtype, block=x.shape[-1])
    validate.check_array("quantize_rows", "scale", "an array or a number", scale)
    scale = validate.floating("quantize_rows", jnp.asarray(scale), "scale").astype(jnp.float32)
    shape = (1,) * (x.ndim - scale.ndim) + scale.shape
    if len(shape) != x.ndim or any(n not in (1, m) for n, m in zip(shape, x.shape)):
        raise ValueError(
            f"jaxkern.quantize_rows: scale of shape {scale.shape} does not broadcast to x of shape {x.shape}"
        )
    q = reference.rounded(jax.lax.stop_gradient(x.astype(jnp.float32) / scale), dtype)
    return q, scale


def quantize_blocks(
    x: ArrayLike, dtype: DTypeLike = jnp.float8_e4m3fn, *, block: int = 128
) -> tuple[jax.Array, jax.Array]:
    """As `quantize_rows`, with a scale for each block of `block` neighbours in a row.

    Args:
        x, dtype: as for `quantize_rows`.
        block: divides the last dimension of `x`.

    Returns:
        (q, scale): q of the shape of `x`, scale float32 [..., n / block].

    Raises:
        As `quantize_rows`. ValueError if `block` does not divide the last dimension.

    >>> import jax.numpy as jnp, jaxkern
    >>> q, scale = jaxkern.quantize_blocks(jnp.ones((4, 512)))
    >>> q.dtype.name, scale.shape
    ('float8_e4m3fn', (4, 4))

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022.
    """
    x, dtype = _checked("quantize_blocks", x, dtype)
    return _call(_rows, x, dtype=dtype, block=_block("quantize_blocks", x, block))


def dequantize(q: ArrayLike, scale: ArrayLike, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """q * scale in `dtype`, for the results of `quantize_rows` and `quantize_blocks`.

    Args:
        q: [..., n]. scale: [..., m], where m divides n: one number for n / m neighbours; or a number.

    Raises:
        ValueError: the shapes do not match.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.dequantize(*jaxkern.quantize_rows(jnp.array([4.0, -2.0]))).tolist()
    [4.0, -2.0]
    """
    q, scale = jnp.asarray(q), jnp.asarray(scale)
    last = scale.shape[-1] if scale.ndim else 1
    if not q.ndim or not last or q.shape[-1] % last:
        raise ValueError(f"jaxkern.dequantize: scale of shape {scale.shape} for q of shape {q.shape}")
    wide = jnp.result_type(scale.dtype, jnp.float32)
    if last in (1, q.shape[-1]):
        return (q.astype(wide) * scale).astype(dtype)
    blocks = q.reshape(*q.shape[:-1], last, q.shape[-1] // last).astype(wide) * scale[..., None]
    return blocks.reshape(q.shape).astype(dtype)


def fake_quantize(x: ArrayLike, dtype: DTypeLike = jnp.float8_e4m3fn, *, block: int | None = None) -> jax.Array:
    """`x` as it is after quantisation, in its own type; its derivative is that of `x` (straight through).

    Args:
        x, dtype: as for `quantize_rows`. block: as for `quantize_blocks`; None: a scale for each row.

    Raises:
        As these.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> jax.grad(lambda x: jaxkern.fake_quantize(x).sum())(jnp.array([1.0, 0.3])).tolist()
    [1.0, 1.0]

    Source: Bengio et al., "Estimating or Propagating Gradients Through Stochastic Neurons", 2013.
    """
    x, dtype = _checked("fake_quantize", x, dtype)
    return _through(x, dtype, x.shape[-1] if block is None else _block("fake_quantize", x, block))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _through(x, dtype, block):
    q, scale = _call(_rows, x, dtype=dtype, block=block)
    return dequantize(q, scale, x.dtype)


@_through.defjvp
def _through_jvp(dtype, block, primals, tangents):
    return _through(*primals, dtype, block), tangents[0]


def _checked(name, x, dtype):
    validate.check_array(name, "x", "an array", x)
    x = validate.floating(name, jnp.asarray(x))
    try:
        known = jnp.dtype(dtype).name if dtype is not None else ""
    except TypeError:
        known = ""
    if known not in plan.TYPES:
        raise TypeError(f"jaxkern.{name}: dtype must be one of {', '.join(plan.TYPES)}, got {dtype!r}")
    if not x.ndim or x.shape[-1] == 0:
        raise ValueError(f"jaxkern.{name}: x of shape {x.shape} has no rows")
    return x, known


def _block(name, x, block) -> int:
    if isinstance(block, bool) or not isinstance(block, int):
        raise TypeError(f"jaxkern.{name}: block must be an int, got {block!r}")
    if block < 1 or x.shape[-1] % block:
        raise ValueError(f"jaxkern.{name}: blocks of {block} do not divide rows of x of shape {x.shape}")
    return block


def _call(f, x, **static):
    return f(x, **static) if isinstance(x, Tracer) else _compiled(f, x, **static)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("dtype", "block"))
def _compiled(f, x, **static):
    return f(x, **static)


def _rows(x, *, dtype, block):
    if block == x.shape[-1]:
        q, scale = bind(quantize_p, x, dtype=dtype)
        return q, scale[..., None]
    blocks = _in_blocks(x, block)
    q, scale = bind(quantize_p, blocks, dtype=dtype)
    return q.reshape(x.shape), scale


def _in_blocks(x, block):
    """x [..., n / block, block]; on a mesh with explicit axes, the last dimension is gathered first."""
    return validate.whole(x, x.ndim - 1).reshape(*x.shape[:-1], x.shape[-1] // block, block)
