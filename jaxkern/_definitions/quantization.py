"""Arguments of quantisations: dtypes, blocks, scales, and the `Quantization` that norms take."""

from __future__ import annotations

import dataclasses
import typing

import jax
import jax.numpy as jnp

from jaxkern._core import validate
from jaxkern._ops.quantize import plan


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How `rms_norm` and `layer_norm` quantize what they return, in the kernel that computes it.

    Attributes:
        dtype: float8_e4m3fn, float8_e5m2 or int8.
        block: the number of neighbours in a row that share a scale; None: a scale for each row.
        scale: a number, one scale for the whole array that is known already, such as the scale of a `DelayedScale`; then
            block is None.

    Raises:
        TypeError: `dtype` is not one of the three, or `block` is not an int.
        ValueError: `block` is not positive, or `scale` is not a single number.

    >>> import jax.numpy as jnp, jaxkern
    >>> (q, scale) = jaxkern.rms_norm(jnp.ones((4, 256)), quantize=jaxkern.Quantization(block=128))
    >>> q.dtype.name, scale.shape
    ('float8_e4m3fn', (4, 2))
    """

    dtype: typing.Any = jnp.float8_e4m3fn
    block: int | None = None
    scale: typing.Any = None

    def __post_init__(self):
        type_of("Quantization", self.dtype)
        if self.block is not None and validate.integer("Quantization", "block", self.block, or_none=True) < 1:
            raise ValueError(f"jaxkern.Quantization: block must be positive, got {self.block}")
        if self.scale is not None:
            one_scale("Quantization", self.scale)


def type_of(name, dtype) -> str:
    wanted = f"one of {', '.join(plan.TYPES)}"
    known = validate.dtype_of(name, "dtype", dtype, wanted).name
    if known not in plan.TYPES:
        raise TypeError(f"jaxkern.{name}: dtype must be {wanted}, got {known}")
    return known


def checked(name, x, dtype):
    validate.check_array(name, "x", "an array", x)
    x = validate.floating(name, jnp.asarray(x))
    known = type_of(name, dtype)
    if not x.ndim or x.shape[-1] == 0:
        raise ValueError(f"jaxkern.{name}: x of shape {x.shape} has no rows")
    return x, known


def check_matrix(name, x) -> None:
    if x.ndim < 2 or 0 in x.shape[-2:]:
        raise ValueError(f"jaxkern.{name}: transposed takes matrices, got x of shape {x.shape}")


def block_of(name, x, block, dim=-1) -> int:
    block = validate.integer(name, "block", block)
    if block < 1 or x.shape[dim] % block:
        what = "rows" if dim == -1 else "columns"
        raise ValueError(f"jaxkern.{name}: a block of {block} does not divide the {what} of x of shape {x.shape}")
    return block


def one_scale(name, scale, argument="scale"):
    """`scale` as float32 []; errors name it as `argument`."""
    validate.check_array(name, argument, "a number", scale)
    scale = validate.floating(name, jnp.asarray(scale), argument)
    if scale.size != 1:
        raise ValueError(f"jaxkern.{name}: {argument} must be one number, got shape {scale.shape}")
    return jax.lax.stop_gradient(scale.astype(jnp.float32).reshape(()))


def checked_quantization(name, quantize, x, axis, dtype):
    """(dtype, block, scale or None) of the `quantize` argument of a norm `name` of x."""
    if not isinstance(quantize, Quantization):
        raise TypeError(f"jaxkern.{name}: quantize must be a jaxkern.Quantization, got {type(quantize).__name__}")
    if dtype is not None:
        raise ValueError(f"jaxkern.{name}: dtype and quantize cannot be used together: the result has quantize.dtype")
    if not jnp.ndim(x) or axis not in (-1, jnp.ndim(x) - 1, (-1,), (jnp.ndim(x) - 1,)):
        raise ValueError(f"jaxkern.{name}: quantize takes rows along the last dimension of x, got axis {axis}")
    to = type_of(name, quantize.dtype)
    if jnp.shape(x)[-1] == 0:
        raise ValueError(f"jaxkern.{name}: quantize takes rows with elements, got x of shape {jnp.shape(x)}")
    if quantize.scale is None:
        return to, None if quantize.block is None else block_of(name, jnp.asarray(x), quantize.block), None
    if quantize.block is not None:
        raise ValueError(f"jaxkern.{name}: a Quantization has a block or a scale, not both")
    return to, None, one_scale(name, quantize.scale)
