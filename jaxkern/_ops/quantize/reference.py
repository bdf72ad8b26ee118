"""Quantisation in jnp: what the kernel computes."""

import jax.numpy as jnp
import numpy as np
from jax import lax


def limit(dtype) -> float:
    """The largest number of a type of 8 bits; of int8 the same on both sides of 0."""
    return 127.0 if jnp.dtype(dtype) == jnp.int8 else float(jnp.finfo(dtype).max)


def rounded(x, dtype):
    """float32 numbers rounded to a type of 8 bits, saturated; NaN becomes 0 in int8."""
    most = limit(dtype)
    if jnp.dtype(dtype) == jnp.int8:
        return jnp.where(jnp.isnan(x), 0, jnp.round(jnp.clip(x, -most, most))).astype(dtype)
    return jnp.clip(x, -most, most).astype(dtype)


def quantize(x, *, dtype, over=()):
    """(q, scale) of rows along the last dimension; `over`: the mesh axes that split it."""
    wide = x.astype(jnp.float32)
    # In the order of the bits of magnitudes NaN is the largest; XLA:CPU's maximum of floats may lose it.
    bits = jnp.max(lax.bitcast_convert_type(jnp.abs(wide), jnp.uint32), -1, initial=0)
    most = lax.bitcast_convert_type(lax.pmax(bits, over) if over else bits, jnp.float32)
    factor = jnp.where(most == 0, 1, jnp.minimum(limit(dtype) / most, np.finfo(np.float32).max))
    return [rounded(wide * factor[..., None], dtype), jnp.where(most == 0, 1, most / limit(dtype))]
