"""Calls of softmax and log_softmax: their arguments are checked, and become operands of the row functions in softmax.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern._core import validate
from jaxkern._core.algorithms import forced
from jaxkern._core.rows import computed
from jaxkern._definitions import dropout
from jaxkern._definitions.softmax import softmax as softmax_of_rows


def called(name, x, axis, where, scale, bias, key=None, **flags):
    # Checked here because an error of jit would not name the operation.
    validate.check_array(name, "x", "an array or a number", x)
    if where is not None:
        validate.check_array(name, "where", "a boolean array", where)
    if isinstance(scale, bool) or not isinstance(scale, (int, float, np.integer, np.floating)):
        validate.check_array(name, "scale", "a real number or a scalar array", scale)
    else:
        scale = None if scale == 1 else float(scale)
    if bias is not None:
        validate.check_array(name, "bias", "an array of floating-point type", bias)
    axis = validate.static_axis(name, axis)
    return _along_axis(x, where, scale, bias, key, name=name, axis=axis, algorithm=forced(name), **flags)


def replacement(x, where, scale: float, causal: bool, dtype) -> jax.Array:
    """`softmax` of float rows in place of operations of a plain program, which is exported plain."""
    return called("softmax", x, -1, where, scale, None, None, causal=causal, dtype=jnp.dtype(dtype), replaces=True)


# ---- from arguments to operands


# Inlined, so that a jaxpr holds the primitive alone. Jitted, so that an eager call costs no more than a jnp function.
@functools.partial(
    jax.jit, static_argnames=("name", "axis", "algorithm", "causal", "threshold", "dtype", "replaces"), inline=True
)
def _along_axis(
    x, where, scale, bias, key, *, name, axis, algorithm, causal=False, threshold=0, dtype=None, replaces=False
):
    x = validate.floating(name, x)
    wide = computed(x).dtype
    parts = [
        validate.full_rank(name, "bias", x, _bias(name, bias, x.dtype, wide)),
        validate.full_rank_mask(name, x, where),
    ]
    scale = _scale(name, scale, wide)
    axes = validate.sorted_axes(name, axis, x.shape)
    if causal and (x.ndim < 2 or axes != [x.ndim - 1]):
        raise ValueError(
            f"jaxkern.{name}: causal needs axis to be the last of two or more dimensions, got axis {axis} "
            f"for x of shape {x.shape}"
        )
    words = (None, None) if key is None else dropout.key_words(name, key)

    narrower = dtype is not None and dtype.itemsize == 2 and x.dtype == jnp.float32
    row_operation = functools.partial(
        softmax_of_rows,
        name=name,
        numbers={"scale": scale, "key0": words[0], "key1": words[1]},
        algorithm=algorithm,
        causal=causal,
        threshold=threshold,
        dtype=dtype if narrower else x.dtype,
        replaces=replaces,
    )
    if len(axes) == 1:
        y = row_operation(x, *parts, axis=axes[0])
    else:
        y = validate.along_axes(row_operation, x, parts, axes)
    return y if dtype is None else y.astype(dtype)


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
