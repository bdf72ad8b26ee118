"""What the tests of the reductions share: the operations, ours and JAX's, their results in NumPy, comparisons."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import DTYPES, assert_rounded, computing, whole, wide

import jaxkern
from jaxkern._core import compat
from jaxkern._core.algorithms import forced
from jaxkern._definitions import reductions

OPERATIONS = ("reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "logsumexp")
SELECTING = ("reduce_max", "reduce_min")
OURS = {name: getattr(jaxkern, name) for name in OPERATIONS}
JAX = {
    "reduce_sum": jnp.sum,
    "reduce_mean": jnp.mean,
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
    "logsumexp": jax.nn.logsumexp,
}

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_operation = pytest.mark.parametrize("operation", OPERATIONS)


def call(operation, x, axis=-1, mask=None, keepdims=False):
    return OURS[operation](x, axis=axis, where=mask, keepdims=keepdims)


INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def expected(operation, x, axis=-1, mask=None, keepdims=False):
    """(result, error bound of the arithmetic in epsilons of the computing type), both in the wide type.

    Sums run in a few interleaved partial sums of float32, joined in double: an error of the size of the
    elements for each of them, and no more than a few of them in a vector.
    """
    x = np.asarray(x).astype(wide)
    axis = tuple(range(x.ndim)) if axis is None else axis
    kept = np.broadcast_to(whole(mask), x.shape)
    reduced = dict(axis=axis, keepdims=keepdims)
    with np.errstate(all="ignore"):
        if operation in SELECTING:
            identity = -np.inf if operation == "reduce_max" else np.inf
            method = np.max if operation == "reduce_max" else np.min
            return method(np.where(kept, x, identity), initial=identity, **reduced), wide(0)
        if operation == "logsumexp":
            x = np.where(kept, x, -np.inf)
            largest = x.max(axis, keepdims=True, initial=-np.inf)
            base = np.where(np.isfinite(largest), largest, 0)
            e = np.exp(x - base)
            y = np.log(e.sum(**reduced)) + (base if keepdims else base.sum(axis))
            # The difference is rounded, the exponential and the logarithm err by an ulp or two, and so does the sum.
            distance = np.where(np.isfinite(x), base - x, 0)
            weighted = np.where(e > 0, e * distance, 0).sum(**reduced) / np.where(
                e.sum(**reduced) > 0, e.sum(**reduced), 1
            )
            return y, weighted + np.abs(np.where(np.isfinite(y), y, 0)) + 6
        x = np.where(kept, x, 0)
        total, size = x.sum(**reduced), np.abs(np.where(np.isfinite(x), x, 0)).sum(**reduced)
        if operation == "reduce_mean":
            count = kept.sum(**reduced)
            return total / count, 4 * size / np.maximum(count, 1)
        return total, 4 * size


def check_all(x, axis=-1, mask=None, keepdims=False):
    """All operations, in one compiled function."""
    with compat.enable_x64(x.dtype == jnp.float64):
        found = jax.jit(lambda x, mask: [call(operation, x, axis, mask, keepdims) for operation in OPERATIONS])(x, mask)
    for operation, y in zip(OPERATIONS, found):
        assert_rounded(y, *expected(operation, x, axis, mask, keepdims), x.dtype)


def check(operation, x, axis=-1, mask=None, keepdims=False):
    with compat.enable_x64(x.dtype == jnp.float64):
        y = call(operation, x, axis, mask, keepdims)
    exact, slack = expected(operation, x, axis, mask, keepdims)
    assert_rounded(y, exact, slack, x.dtype)


def check_statistics(x, axis, mask=None):
    """What logsumexp keeps for its gradient: the largest element, and the sum that is relative to it."""
    with compat.enable_x64(x.dtype == jnp.float64):
        y, largest, total = jax.jit(
            functools.partial(reductions.statistics_of, axis=axis, algorithm=forced("logsumexp"))
        )(x, *([] if mask is None else [jnp.expand_dims(mask, range(x.ndim - mask.ndim))]))
    assert_rounded(y, *expected("logsumexp", x, axis, mask), x.dtype)
    assert largest.dtype == total.dtype == computing(x.dtype)
    kept, axis = np.where(whole(mask), np.asarray(x).astype(wide), -np.inf), axis % x.ndim
    with np.errstate(invalid="ignore"):
        most = kept.max(axis)
        np.testing.assert_array_equal(np.asarray(largest, np.float64), most.astype(np.float64))
        below = kept - np.expand_dims(np.where(most == -np.inf, 0, most), axis)
        exact = np.where(np.isfinite(most), np.exp(below).sum(axis), np.where(most == -np.inf, 0, most))
        # Of 16 bits in float32 throughout: the arguments are rounded as well.
        weighted = np.where(np.isfinite(below), np.exp(below) * -below, 0).sum(axis)
    slack = weighted / np.where(exact > 0, exact, 1) + (np.sqrt(x.shape[axis]) / 8 + 8 if x.dtype.itemsize == 2 else 4)
    assert_rounded(total, exact, np.where(np.isfinite(exact), exact * slack, 0), total.dtype)


def integers(shape, dtype, seed=0):
    info = np.iinfo(dtype)
    with compat.enable_x64():
        return jnp.asarray(np.random.default_rng(seed).integers(info.min, info.max, shape, dtype, endpoint=True))
