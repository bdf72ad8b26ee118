"""What the tests of operations at indices share: arrays and indices of every kind, and the operations in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ON_GPU
from reference import assert_rounded, wide

import jaxkern
from jaxkern._core import compat, registry

REDUCTIONS = ("index_add", "segment_sum", "segment_mean", "segment_max", "segment_min", "segment_prod")
MEANS = ("segment_mean",)  # of integers in float32, another type than the reference has
COMPOSED = {"segment_mean": "segment_sum"}  # of the kernels of another operation, whose algorithms run it
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int32", "int64", "uint32")
INDEX_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

every_reduction = pytest.mark.parametrize("operation", REDUCTIONS)
every_dtype = pytest.mark.parametrize("dtype", FLOATS + INTEGERS)


# ---- the operations in numpy


def numpy_rows(index, rows, wrap, clip=False):
    """The row of each index, by the rules of Python integers; -1 for an index that names no row."""
    found = []
    for i in np.asarray(index).ravel().tolist():
        i += rows if wrap and i < 0 else 0
        i = min(max(i, 0), rows - 1) if clip else i
        found.append(i if 0 <= i < rows else -1)
    return np.array(found, np.int64).reshape(np.shape(index))


def scattered(method, start, at, source):
    """method.at along the first dimension, without what goes nowhere."""
    out, kept = start.copy(), np.flatnonzero(at >= 0)
    kept = kept[np.argsort(at[kept], kind="stable")]
    if kept.size:
        rows, first = np.unique(at[kept], return_index=True)
        out[rows] = method(out[rows], method.reduceat(source[kept], first))
    return out


def assert_reduced(operation, found, x, index, source, axis=0, alpha=1, clip=False):
    """`found` is the operation by numpy, as precisely as its types allow; of `x`, segments take the shape alone."""
    dtype, rows = found.dtype, x.shape[axis]
    floating = jnp.issubdtype(dtype, jnp.floating)
    # Integers wrap, and no wider type could tell where.
    exact_type = wide if floating else np.dtype(dtype).type
    x, source, found = (np.moveaxis(np.asarray(a), axis, 0) for a in (x, source, found))
    at = numpy_rows(index, rows, wrap=operation == "index_add", clip=clip)
    source = source.astype(exact_type)
    zeros = np.zeros(x.shape, exact_type)
    if operation in ("segment_max", "segment_min"):
        largest = operation == "segment_max"
        limits = (-np.inf, np.inf) if floating else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        start = np.full(x.shape, limits[0 if largest else 1], exact_type)
        want = scattered(np.maximum if largest else np.minimum, start, at, source)
        return np.testing.assert_array_equal(found.astype(exact_type), want)
    if operation == "segment_prod":
        with np.errstate(over="ignore"):
            want = scattered(np.multiply, zeros + exact_type(1), at, source)
        if not floating:
            return np.testing.assert_array_equal(found, want)
        many = np.bincount(at[at >= 0], minlength=rows).reshape(-1, *[1] * (x.ndim - 1))
        return assert_rounded(found, want, np.abs(want) * many, dtype)
    with np.errstate(over="ignore"):
        want = scattered(np.add, zeros, at, source) * np.asarray(alpha).astype(exact_type)
    many = scattered(np.add, np.zeros(rows, wide), at, np.ones(len(at), wide)).reshape(-1, *[1] * (x.ndim - 1))
    size = scattered(np.add, zeros.astype(wide), at, np.abs(source.astype(wide))) * wide(abs(alpha))
    if operation == "index_add":
        want, size = want + x.astype(exact_type), size + np.abs(x.astype(wide))
    if operation == "segment_mean":
        want, size = (a / np.maximum(many, 1) for a in (want, size))
    if not floating:
        return np.testing.assert_array_equal(found, want)
    # A sum of n terms in a few parts, or where XLA runs it in one; alpha itself is rounded.
    assert_rounded(found, want, size * (2 + np.sqrt(many) / (4 if ON_GPU else 1)), dtype)


def values(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    with compat.enable_x64():
        if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            return jnp.asarray(rng.normal(size=shape), dtype)
        return jnp.asarray(rng.integers(0 if dtype == "uint32" else -(2**31), 2**31, shape), dtype)


def indices(rows, count, seed=1, kind="wild"):
    rng = np.random.default_rng(seed)
    if kind == "same":
        return np.full(count, rows // 2, np.int32)
    if kind == "zipf":
        return (rng.zipf(1.3, count) % max(rows, 1)).astype(np.int32)
    low, high = {"wild": (-2 * rows - 1, 2 * rows + 2), "uniform": (0, max(rows, 1)), "sorted": (0, max(rows, 1))}[kind]
    found = rng.integers(low, high, count).astype(np.int32)
    return np.sort(found) if kind == "sorted" else found


def run(operation, x, index, source, axis=0, lies=False, **options):
    """The operation on arrays of these shapes; segments along another axis through vmap. lies: a hint is not true."""
    f = jitted(operation, x.shape[axis], axis, tuple(options.items()))
    if operation != "index_add":
        return f(source, index)
    copied, in_place = f(x, index, source)
    if ON_GPU and options.get("deterministic", True) and not lies:
        assert np.asarray(in_place).tobytes() == np.asarray(copied).tobytes()
    return copied


@functools.cache  # so that the same shapes compile once
def jitted(operation, rows, axis, options):
    if operation == "index_add":
        add = lambda x, i, s: jaxkern.index_add(x, axis, i, s, **dict(options))
        # To an argument, whose rows are copied, and where there are kernels to an intermediate result, in place.
        return jax.jit(lambda x, i, s: (add(x, i, s), add(jax.lax.optimization_barrier(x), i, s) if ON_GPU else x))
    f = lambda s, i: getattr(jaxkern, operation)(s, i, rows, **dict(options))
    for _ in range(axis):
        f = jax.vmap(f, (0, None))
    return jax.jit(f)


def check(operation, dtype, shape, axis, count, kind="wild", **options):
    axis %= len(shape)
    source_shape = (*shape[:axis], count, *shape[axis + 1 :])
    with compat.enable_x64("64" in dtype):
        if operation in MEANS and dtype in INTEGERS:
            pytest.skip("the mean of integers is another type")
        x, source, index = values(shape, dtype), values(source_shape, dtype, 2), indices(shape[axis], count, kind=kind)
        found = run(operation, x, index, source, axis, **options)
        options = {k: v for k, v in options.items() if k == "alpha"}
        assert_reduced(operation, found, x, index, source, axis, **options)


def assert_selected(found, x, index, axis, clip=False):
    x = np.asarray(x)
    at = numpy_rows(index, x.shape[axis], wrap=True, clip=clip)
    want = np.take(x, np.maximum(at, 0), axis)
    fill = (
        np.nan
        if jnp.issubdtype(x.dtype, jnp.floating)
        else (np.iinfo(x.dtype).max if x.dtype.kind == "u" else np.iinfo(x.dtype).min)
    )
    np.moveaxis(want, axis, 0)[at < 0] = fill
    assert found.dtype == x.dtype
    exact = wide if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype  # numpy knows no NaN of bfloat16
    np.testing.assert_array_equal(np.asarray(found).astype(exact), want.astype(exact))


def on_this_platform():
    if not (ON_GPU and registry.kernels.module):
        pytest.skip("kernels run on a GPU")
