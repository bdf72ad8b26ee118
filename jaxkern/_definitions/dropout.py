"""Dropout: which elements of an array it keeps, by random bits that depend on a key and on their places (_core/draws.py)."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern._core import draws


def key_words(name: str, key):
    """The first two 32-bit words of a JAX key, which are all of a threefry key.

    key: a typed key, as from `jax.random.key`, or the raw data of one, `uint32[2]`.
    """
    check_key(name, "dropout_key", key)
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(key).reshape(-1)[:2].astype(jnp.uint32)
    return key


def check_key(name: str, argument: str, key) -> None:
    """Raises unless this argument is one typed key, or the raw data of one."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape:
            raise ValueError(f"jaxkern.{name}: {argument} must be a single key, got an array of shape {key.shape}")
    elif key.dtype != jnp.uint32 or key.shape != (2,):
        raise TypeError(
            f"jaxkern.{name}: {argument} must be a key of jax.random or uint32[2], got {key.dtype}{list(key.shape)}"
        )


def threshold(name: str, rate) -> int:
    """Draws of 16 bits below this are dropped."""
    if isinstance(rate, bool) or not isinstance(rate, (int, float, np.integer, np.floating)):
        raise TypeError(f"jaxkern.{name}: dropout_rate must be a number known while tracing, got {type(rate).__name__}")
    if not 0 <= rate < 1:
        raise ValueError(f"jaxkern.{name}: dropout_rate must be in [0, 1), got {rate}")
    return min(round(float(rate) * 65536), 65535)


def _row_numbers(shape, axis: int):
    """The number of each row along `axis`, in row-major order, modulo 2^32, with size 1 along `axis`."""
    rows = tuple(1 if d == axis else n for d, n in enumerate(shape))
    return jax.lax.iota(jnp.uint32, math.prod(rows)).reshape(rows)


def kept(shape, axis: int, key, threshold: int):
    """Which elements of an array of this shape dropout keeps, as kernels compute it.

    key: two words, arrays of uint32 that broadcast to the array, with size 1 along `axis`.
    """
    along = tuple(n if d == axis else 1 for d, n in enumerate(shape))
    place = jax.lax.broadcasted_iota(jnp.uint32, along, axis)
    return draws.draw_p.bind(place, _row_numbers(shape, axis), *key) >= jnp.uint32(threshold)


def kept_by_blocks(shape, axis: int, key, threshold: int):
    """The same, as XLA computes it: eight elements at a time."""
    blocks = (shape[axis] + 7) // 8
    drawn = (*shape[:axis], blocks, *shape[axis + 1 :])
    words = draws.words(jax.lax.broadcasted_iota(jnp.uint32, drawn, axis), _row_numbers(shape, axis), key)
    halves = [half for w in words for half in (w & 0xFFFF, w >> 16)]
    each = jnp.stack([jnp.broadcast_to(half, drawn) for half in halves], axis + 1)
    each = each.reshape(*shape[:axis], blocks * 8, *shape[axis + 1 :])
    return jax.lax.slice_in_dim(each, 0, shape[axis], axis=axis) >= threshold
