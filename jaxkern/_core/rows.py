"""Rows in jnp: what the references of the softmax family have in common."""

import jax
import jax.numpy as jnp
import numpy as np


def computed(x, *mask):
    """`x` in the type that its arithmetic is done in, with 0 where it is masked out."""
    x = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    return jnp.where(mask[0], x, 0) if mask else x


def row_sum(x, axis):
    return jnp.sum(x, axis, keepdims=True)


def largest_of(x, mask, axis, least=None):
    """The largest element of each row in the computing type; `least`, or the least finite number, if it has none.

    16-bit numbers are compared as they are: XLA:CPU then widens them once, for the exponentials. The maximum counts as a
    constant: see `shifted`.
    """
    x = x if x.dtype in (jnp.float16, jnp.bfloat16) else computed(x)
    initial = jnp.finfo(x.dtype).min if least is None else least
    return computed(
        jax.lax.stop_gradient(jnp.max(x, axis, keepdims=True, initial=initial, where=mask[0] if mask else None))
    )


def shifted(x, mask, axis):
    """x - max in the computing type, its exponential and that one's sum; all-masked rows sum to 0.

    The maximum counts as a constant: no derivative of what is made of these depends on it, and that of a maximum
    looks for an element equal to it, which is not found where XLA rounds the two differently.
    """
    x = computed(x)
    if mask:
        x = jnp.where(mask[0], x, -jnp.inf)
    largest = jax.lax.stop_gradient(jnp.max(x, axis, keepdims=True, initial=-jnp.inf))
    below = x - jnp.where(largest == -jnp.inf, 0, largest)
    exponential = jnp.exp(below)
    return below, exponential, row_sum(exponential, axis)


def lowest_for_infinity(y, dtype):
    """`y` in `dtype`, its least number for -inf where it has no infinity (some of 8 bits) and would make that NaN."""
    if not np.isinf(np.float32(-np.inf).astype(dtype).astype(np.float32)):
        y = jnp.maximum(y, float(jnp.finfo(dtype).min))
    return y.astype(dtype)
