"""Dropout's random bits in jnp: the same bits as in the kernels (ffi/kernels/common/philox.h).

Philox4x32-7 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011, keyed with 64 bits:
the variant with the fewest rounds that passes their tests (BigCrush). The 16 bits of an element depend on the key, the
number of its row and its position in the row.
"""

import jax
import jax.numpy as jnp
import numpy as np

ROUNDS = 7


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


def _product(constant: int, x):
    """The high and the low word of the 64-bit product constant * x."""
    low, high = jnp.uint32(constant & 0xFFFF), jnp.uint32(constant >> 16)
    x_low, x_high = x & 0xFFFF, x >> 16
    middle = high * x_low + (low * x_low >> 16)
    other = low * x_high + (middle & 0xFFFF)
    return high * x_high + (middle >> 16) + (other >> 16), jnp.uint32(constant) * x


def philox(counter, key):
    """Four random words from four words of counter and two of key, each an array of uint32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = _product(0xD2511F53, c0), _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + jnp.uint32(0x9E3779B9), k1 + jnp.uint32(0xBB67AE85)
    return c0, c1, c2, c3


def row_numbers(shape, axis: int, key_shape):
    """The number of each row along `axis`; dimensions that it does not depend on, and `axis`, have size 1.

    Rows are numbered in row-major order, modulo 2^32, over the dimensions that share a key.
    """
    counted = [d for d in range(len(shape)) if d != axis and key_shape[d] == 1]
    numbers = jnp.zeros([shape[d] if d in counted else 1 for d in range(len(shape))], jnp.uint32)
    stride = jnp.uint32(1)
    for d in reversed(counted):
        numbers += jax.lax.broadcasted_iota(jnp.uint32, numbers.shape, d) * stride
        size = shape[d] % 2**32 if isinstance(shape[d], int) else jnp.asarray(shape[d])
        stride = stride * jnp.uint32(size)
    return numbers


def kept(shape, axis: int, key, threshold: int, first=0):
    """Which elements of an array of this shape dropout keeps.

    key: uint32 of shape (*dims, 2) or (*dims, 4), where each of `dims` is 1 or the size in `shape`, and 1 for `axis`.
        Where it is not 1 there is one key per index. The third of four words is the number of the row.
    first: the position of the first element in its row, if this array is a part of it.
    """
    width, whole = shape[axis], isinstance(first, int) and first == 0
    # Equal parts that are a multiple of 8 long begin at a block of 8.
    blocks = (width + 7) // 8 + (not whole and width % 8 != 0)
    drawn = (*shape[:axis], blocks, *shape[axis + 1 :])
    block = jax.lax.broadcasted_iota(jnp.uint32, drawn, axis)
    if not whole:
        block += jnp.asarray(first // 8).astype(jnp.uint32)
    row = key[..., 2] if key.shape[-1] == 4 else row_numbers(shape, axis, key.shape)
    zero = jnp.zeros((), jnp.uint32)
    words = philox((block, row, zero, zero), (key[..., 0], key[..., 1]))
    halves = [half for w in words for half in (w & 0xFFFF, w >> 16)]
    draws = jnp.stack([jnp.broadcast_to(half, drawn) for half in halves], axis + 1)
    draws = draws.reshape(*shape[:axis], blocks * 8, *shape[axis + 1 :])
    if whole or width % 8 == 0:
        return jax.lax.slice_in_dim(draws, 0, width, axis=axis) >= threshold
    return jax.lax.dynamic_slice_in_dim(draws, first % 8, width, axis) >= threshold
