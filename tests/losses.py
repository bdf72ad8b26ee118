"""What the tests of softmax_cross_entropy share: problems, the loss and its gradient in NumPy, comparisons."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ON_GPU
from reference import DTYPES, computing, spacing, wide

import jaxkern
from jaxkern._core import compat, registry

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
needs_runtime = pytest.mark.skipif(registry.kernels.module is None, reason=registry.kernels.reason or "no runtime")
needs_kernels = pytest.mark.skipif(not ON_GPU or registry.kernels.module is None, reason="no kernels here")

OPERATION = "softmax_cross_entropy"
OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2, "ignore_index": 0},  # a class
    {"label_smoothing": 1.0, "z_loss": -1e-3, "ignore_index": -1},
]


def problem(shape, dtype, axis=-1, scale=3.0, seed=0):
    """Random logits, labels and weights of rows."""
    rng = np.random.default_rng(seed)
    rows = np.delete(shape, axis)
    with compat.enable_x64(dtype == "float64"):
        x = jnp.asarray(rng.normal(0, scale, shape), dtype)
        g = jnp.asarray(rng.normal(size=rows), computing(dtype))
    return x, jnp.asarray(rng.integers(0, shape[axis], rows), jnp.int32), g


def exact(x, labels, g, axis=-1, mask=None, smoothing=0.0, z_loss=0.0, ignore=None):
    """Loss and gradient in numpy, wider than float64 where the machine can, and what the arithmetic may lose of each."""
    x = np.moveaxis(np.asarray(x).astype(wide), axis, -1)
    width = x.shape[-1]
    kept = (
        np.ones(x.shape, bool)
        if mask is None
        else np.moveaxis(np.broadcast_to(np.asarray(mask), np.moveaxis(x, -1, axis).shape), axis, -1)
    )
    labels, g = np.asarray(labels).astype(object), np.asarray(g).astype(wide)[..., None]
    ignored = (labels == ignore).astype(bool)[..., None] if ignore is not None else np.zeros((*labels.shape, 1), bool)
    bad = ~((labels >= 0) & (labels < width)).astype(bool)[..., None] & ~ignored
    at = np.where((bad | ignored)[..., 0], 0, labels).astype(np.int64)[..., None]
    with np.errstate(all="ignore"):
        x = np.where(kept, x, -np.inf)
        largest = x.max(-1, keepdims=True, initial=-np.inf)
        largest = np.where(largest == -np.inf, 0, largest)
        e = np.exp(x - largest)
        total = e.sum(-1, keepdims=True)
        dead = total == 0
        lse = largest + np.log(total)
        below = np.where(kept, largest - x, 0)
        count = kept.sum(-1, keepdims=True)
        of_label = np.take_along_axis(largest - x, at, -1)
        value = np.log(total) + z_loss * lse**2
        value = value + ((1 - smoothing) * of_label if smoothing != 1 else 0)
        value = value + (smoothing * below.sum(-1, keepdims=True) / count if smoothing else 0)
        p = e / total
        rise = 1 + 2 * z_loss * lse
        target = (np.arange(width) == at) * (1 - smoothing) + smoothing / count
        dx = g * (p * rise - target)
        finite = np.where(np.isfinite(of_label), np.abs(of_label), 0)
        value_size = 2 + np.sqrt(width) / 8 + np.abs(np.log(total)) + finite + 2 * z_loss * lse**2
        value_size += (
            smoothing * (3 + np.log2(width + 1)) * np.where(np.isfinite(below), below, 0).max(-1, keepdims=True)
        )
        distance = np.where(np.isfinite(x), np.abs(x - largest), 0)
        dx_size = np.abs(g) * (
            p * (np.abs(rise) + np.abs(2 * z_loss * lse)) * (distance / 2 + 8 + np.sqrt(width) / 8) + 2 * target
        )
    value = np.where(ignored | (dead & ~bad), 0, np.where(bad, np.nan, value))
    dx = np.where(bad, np.nan, np.where(ignored | dead, 0, dx))
    dx = np.where(kept, dx, 0)
    back = lambda a: np.moveaxis(a, -1, axis)
    nothing = ignored | dead | bad  # of these there is no arithmetic
    value_size, dx_size = (np.where(nothing, 0, size) for size in (value_size, dx_size))
    return (value[..., 0], value_size[..., 0]), (back(dx), back(np.broadcast_to(dx_size, dx.shape)))


def assert_near(found, wanted, size, dtype):
    """`found` is `wanted` rounded to its own dtype, except for `size` epsilons of what `dtype` is computed in."""
    found = np.asarray(found)
    assert found.shape == wanted.shape
    info = jnp.finfo(computing(dtype))
    special = ~np.isfinite(wanted)
    np.testing.assert_array_equal(found.astype(wide)[special], wanted[special])
    found_wide, wanted, size = (
        found.astype(wide)[~special],
        wanted[~special],
        np.broadcast_to(size, special.shape)[~special],
    )
    bound = 0.5 * spacing(wanted, found.dtype) + size * wide(float(info.eps)) + wide(float(info.smallest_normal))
    ratio = np.abs(found_wide - wanted) / bound
    assert np.isfinite(found_wide).all()
    assert (ratio <= 1).all(), f"error {ratio.max():.3f} times the bound, at element {ratio.argmax()}"


@functools.partial(jax.jit, static_argnames=("axis", "options"))
def separate(x, labels, g, mask, axis, options):
    """The loss, then its gradient, by the two kernels."""
    value, pull = jax.vjp(lambda x: jaxkern.softmax_cross_entropy(x, labels, axis=axis, where=mask, **dict(options)), x)
    # A cotangent that depends on the loss keeps the two apart.
    return value, pull(jnp.where(value == 12345, 0, g))[0]


@functools.partial(jax.jit, static_argnames=("axis", "options"))
def together(x, labels, g, mask, axis, options):
    return jaxkern.softmax_cross_entropy_and_grad(x, labels, g, axis=axis, where=mask, **dict(options))


def check(x, labels, g, axis=-1, mask=None, runs=(separate, together), **options):
    names = {"label_smoothing": "smoothing", "z_loss": "z_loss", "ignore_index": "ignore"}
    (value, value_size), (dx, dx_size) = exact(x, labels, g, axis, mask, **{names[k]: v for k, v in options.items()})
    with compat.enable_x64(x.dtype == jnp.float64):
        for run in runs:
            found, found_dx = run(x, labels, g, mask, axis, tuple(options.items()))
            assert found.dtype == computing(x.dtype) and found_dx.dtype == x.dtype
            assert_near(found, value, value_size, x.dtype)
            assert_near(found_dx, dx, dx_size, x.dtype)
