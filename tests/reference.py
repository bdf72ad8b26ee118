"""The operations in numpy, wider than the arrays under test, and the errors that rounding explains.

Bounds are derived, not fitted: half a unit in the last place of the result for its one rounding, plus
what the arithmetic in the computing type (float32, or float64 for float64) can lose on the way.
"""

import jax.numpy as jnp
import numpy as np

OPERATIONS = ("softmax", "log_softmax")
DTYPES = ("float16", "bfloat16", "float32", "float64")

wide = np.longdouble  # more than float64 where the machine has it


def whole(mask):
    return np.ones((), bool) if mask is None else np.asarray(mask)


def forward(operation, x, axis=-1, mask=None):
    """(result, error bound of the arithmetic), both in the wide type."""
    x = np.asarray(x).astype(wide)
    kept = np.broadcast_to(whole(mask), x.shape)
    with np.errstate(all="ignore"):
        x = np.where(kept, x, -np.inf)
        largest = x.max(axis, keepdims=True, initial=-np.inf)
        shifted = x - np.where(largest == -np.inf, 0, largest)
        e = np.exp(shifted)
        total = e.sum(axis, keepdims=True)
        dead = total == 0
        # exp: its argument is rounded, itself errs by an ulp or two; the sum by a few; the division.
        distance = np.where(np.isfinite(shifted), np.abs(shifted), 0)
        if operation == "softmax":
            y = np.where(kept, e / np.where(dead, 1, total), 0)
            return y, y * (distance / 2 + _sum_error(x, axis) + 4)
        y = np.where(kept & ~dead, shifted - np.log(np.where(dead, 1, total)), -np.inf)
        return y, distance + np.abs(np.log(np.where(dead, 1, total))) + _sum_error(x, axis) + 2


def gradient(operation, x, y, g, axis=-1, mask=None):
    """(gradient, from the result as it was rounded except for wide log_softmax, error bound of the arithmetic)."""
    g = np.asarray(g).astype(wide)
    kept = np.broadcast_to(whole(mask), g.shape)
    with np.errstate(all="ignore"):
        g = np.where(kept, g, 0)
        if operation == "softmax":
            y = np.where(kept, np.asarray(y).astype(wide), 0)
            dx = y * (g - (y * g).sum(axis, keepdims=True))
            size = np.abs(y) * (np.abs(g) + (1 + _sum_error(y, axis)) * np.abs(y * g).sum(axis, keepdims=True))
            return np.where(kept, dx, 0), 2 * size
        if np.asarray(x).dtype.itemsize > 2:
            y, _ = forward(operation, x, axis, mask)
        y = np.where(kept, np.asarray(y).astype(wide), -np.inf)
        alive = (y != -np.inf).any(axis, keepdims=True)
        p = np.exp(y)
        dx = np.where(kept & alive, g - p * g.sum(axis, keepdims=True), 0)
        argument = np.where(np.isfinite(y), np.abs(y), 0)
        size = np.abs(g) + p * (argument + 3 + _sum_error(y, axis)) * np.abs(g).sum(axis, keepdims=True)
        return dx, size


def _sum_error(x, axis):
    """Epsilons lost in a sum along `axis` that runs in a few interleaved partial sums."""
    count = np.prod([x.shape[a] for a in np.atleast_1d(axis)]) if axis is not None else x.size
    return 1 + np.sqrt(count) / 8


def computing(dtype):
    return jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32


def spacing(values, dtype):
    """The unit in the last place of `dtype` at these values."""
    info = jnp.finfo(dtype)
    tiny = wide(float(info.smallest_normal))
    with np.errstate(all="ignore"):
        _, exponent = np.frexp(np.maximum(np.abs(values), tiny))
    return np.ldexp(wide(float(info.eps)), exponent - 1)


def assert_rounded(found, exact, slack, dtype):
    """`found` is `exact` rounded to `dtype`, except for `slack` epsilons of the computing type."""
    found = np.asarray(found)
    assert found.dtype == jnp.dtype(dtype) and found.shape == exact.shape
    found = found.astype(wide)
    special = ~np.isfinite(exact)
    np.testing.assert_array_equal(found[special], exact[special])
    found, exact, slack = found[~special], exact[~special], np.broadcast_to(slack, special.shape)[~special]
    assert np.isfinite(found).all()
    info = jnp.finfo(computing(dtype))
    # Results below the smallest normal number of the computing type may be flushed to zero.
    bound = 0.5 * spacing(exact, dtype) + slack * wide(float(info.eps)) + wide(float(info.smallest_normal))
    ratio = np.abs(found - exact) / bound
    assert (ratio <= 1).all(), f"error {ratio.max():.3f} times the bound, at element {ratio.argmax()}"
