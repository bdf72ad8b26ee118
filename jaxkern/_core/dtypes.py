"""The dtypes that numbers are computed in, and their limits."""

import jax.numpy as jnp
import numpy as np


def computing(dtype) -> np.dtype:
    """float32 for narrower floating-point dtypes, `dtype` for all others."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return np.dtype(np.float32) if narrow else jnp.dtype(dtype)
