"""reduce_sum, reduce_mean, reduce_max, reduce_min and logsumexp: numbers, extremes, bad input, algorithms."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ON_GPU
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import ROWS, WIDTHS, normal, random_mask
from reductions import JAX, OPERATIONS, OURS, SELECTING, call, every_operation
from reference import DTYPES, assert_rounded, computing, whole, wide

import jaxkern
from jaxkern import algorithms, reduction
from jaxkern._core import compat, registry
from jaxkern._core.algorithms import forced

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

every_dtype = pytest.mark.parametrize("dtype", DTYPES)


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
        y, largest, total = jax.jit(functools.partial(reduction.statistics, axis=axis, algorithm=forced("logsumexp")))(
            x, *([] if mask is None else [jnp.broadcast_to(mask, x.shape)])
        )
        np.testing.assert_array_equal(*(np.asarray(a, np.float64) for a in (y, call("logsumexp", x, axis, mask))))
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


# ---- numbers


@every_dtype
@pytest.mark.parametrize("shape, axis, mask", ROWS)
@pytest.mark.sweep(3)
@pytest.mark.optimized
def test_against_numpy(dtype, shape, axis, mask):
    check_all(
        normal(shape, dtype),
        axis,
        None if mask is None else random_mask(mask),
        keepdims=(len(shape) + len(dtype)) % 2 == 0,
    )


@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.sweep(11)
def test_widths(dtype, width):
    x = normal((5, width), dtype)
    check_all(x)
    check_all(x, -1, random_mask((5, width)))


@every_dtype
@pytest.mark.parametrize("inner", [2, 5, 16, 40, 63, 64, 65, 130, 257])
@pytest.mark.sweep(7)
def test_columns(dtype, inner):
    """Whole vectors of columns and single ones, few and many of them, short and tall."""
    for width in (3, 100, 1031):
        check_all(normal((2, width, inner), dtype), 1)
    check_all(normal((2, 300, inner), dtype), 1, random_mask((2, 300, 1) if inner % 2 else (300, inner)))


@every_operation
@pytest.mark.parametrize(
    "shape, axis",
    [((1, 1 << 19), -1), ((17, 997, 130), -1), ((70001, 5), -1), ((3, 40001, 2), 1), ((40001, 3), 0), ((30011, 64), 0)],
)
def test_long(operation, shape, axis):
    check(operation, normal(shape, "float32"), axis)
    check(operation, normal(shape, "bfloat16"), axis, random_mask((*shape[:-1], 1) if axis == 0 else shape[1:]))


@pytest.mark.parametrize("start", range(1, 9))
def test_slices_that_start_anywhere(start):
    """XLA may hand over an array that does not start on a vector."""
    x = normal((4 * 333 + 9,), "float16")
    for operation in OPERATIONS:
        y = jax.jit(lambda x: call(operation, x[start : start + 4 * 333].reshape(4, 333)))(x)
        part = x[start : start + 4 * 333].reshape(4, 333)
        assert_rounded(y, *expected(operation, part), x.dtype)


@pytest.mark.parametrize(
    "dtype, shape, axis",
    [
        *(
            (dtype, *problem)
            for dtype in INTEGERS + ("bool",)
            for problem in (((5, 7), 1), ((3, 130), 1), ((4, 50, 6), 1), ((300, 64), 0))
        ),
        *(
            (dtype, *problem)
            for dtype in ("int8", "uint16", "int64", "bool")
            for problem in (((2, 70001), -1), ((3, 5000, 65), 1))
        ),
    ],
)
@pytest.mark.sweep(5)
def test_integers_are_exact(dtype, shape, axis):
    x, mask = random_mask(shape, 0.4) if dtype == "bool" else integers(shape, dtype), random_mask(shape, 0.5)
    alive = np.asarray(mask).any(axis)
    for x64 in (True, False):
        if not x64 and jnp.dtype(dtype).itemsize == 8:
            continue
        with compat.enable_x64(x64):
            run = jax.jit(
                lambda x, mask: {
                    (name, kept is not None): call(name, x, axis, kept)
                    for name in ("reduce_sum", *SELECTING)
                    for kept in (None, mask)
                }
            )
            for (name, masked), found in run(x, mask).items():
                assert found.dtype == jax.eval_shape(functools.partial(JAX[name], axis=axis), x).dtype
                # In numpy: sums modulo 2^n.
                method = {"reduce_sum": np.sum, "reduce_max": np.max, "reduce_min": np.min}[name]
                ends = {
                    "reduce_sum": {"dtype": found.dtype},
                    "reduce_max": {"initial": np.min(x)},
                    "reduce_min": {"initial": np.max(x)},
                }
                wanted = method(np.asarray(x), axis, where=np.asarray(mask) if masked else True, **ends[name])
                rows = alive if masked and name in SELECTING else np.ones_like(alive)
                np.testing.assert_array_equal(np.asarray(found)[rows], wanted[rows])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    "shape, axis, scale", [((64, 1000), 1, 1.0), ((16, 4096), 1, 10.0), ((4, 500_257), 1, 3.0), ((3000, 40), 0, 1.0)]
)
@pytest.mark.optimized
def test_no_less_accurate_than_jax(dtype, shape, axis, scale):
    """The largest error of a result is at most XLA's, or within rounding of the largest."""
    x = normal(shape, dtype, scale)
    run = jax.jit(lambda x: [[f[name](x, axis=axis) for f in (OURS, JAX)] for name in OPERATIONS])
    found = [[np.asarray(y).astype(wide) for y in pair] for pair in run(x)]
    for operation, pair in zip(OPERATIONS, found):
        exact = expected(operation, x, axis)[0]
        limit = float(jnp.finfo(dtype).eps) * np.abs(exact).max() / 2 * (1 + 2.0**-20)
        ours, theirs = (np.abs(y - exact).max() for y in pair)
        assert ours <= max(theirs, limit), f"{operation}: {ours / limit:.3f} of the rounding, XLA {theirs / limit:.3f}"


@pytest.mark.parametrize(
    "dtype, shape, axis, mean, scale",
    [
        ("float32", (64, 65536), 1, 0, 1.0),
        ("float32", (16, 65536), 1, 50, 10.0),
        ("float32", (4, 500_257), 1, 0, 3.0),
        ("float32", (4096, 64), 1, -300, 1.0),
        ("float32", (3000, 40), 0, 0, 1.0),
        ("bfloat16", (16, 65536), 1, 50, 3.0),
        ("float16", (16, 4096), 1, 0, 1.0),
    ],
)
@pytest.mark.optimized
def test_gradient_of_logsumexp_is_no_less_accurate_than_jax(dtype, shape, axis, mean, scale):
    """It is the softmax, whose largest error is at most XLA's, or half a unit: y, which is rounded, has no part in it."""
    ours, theirs = (
        jax.jit(jax.grad(lambda x: f(x, axis=axis).astype(jnp.float32).sum()))
        for f in (OURS["logsumexp"], JAX["logsumexp"])
    )
    for seed in range(3):
        x = normal(shape, dtype, scale, seed) + jnp.asarray(mean, dtype)
        exact = np.exp(np.asarray(x, np.float64) - np.asarray(x, np.float64).max(axis, keepdims=True))
        exact /= exact.sum(axis, keepdims=True)
        error, allowed = (np.abs(np.asarray(f(x), np.float64) - exact).max() for f in (ours, theirs))
        rounding = float(jnp.finfo(dtype).eps) / 2 * exact.max()
        assert error <= max(allowed, rounding), f"{error / rounding:.2f} of the rounding, XLA {allowed / rounding:.2f}"


@every_operation
@every_dtype
def test_bitwise_reproducible(operation, dtype):
    for shape, axis in (((257, 1003), 1), ((2, 300_001), 1), ((9001, 24), 0)):
        x = normal(shape, dtype)
        with compat.enable_x64(dtype == "float64"):
            runs = [np.asarray(call(operation, x, axis)).tobytes() for _ in range(4)]
        assert all(run == runs[0] for run in runs)


@settings(max_examples=60 if ON_GPU else 40, deadline=None, derandomize=True)
@given(st.data())
def test_any_shape_axis_and_mask(data):
    shape = tuple(data.draw(st.lists(st.sampled_from((0, 1, 2, 3, 5, 17)), min_size=1, max_size=4), label="shape"))
    rank = len(shape)
    axes = st.one_of(
        st.integers(-rank, rank - 1), st.none(), st.lists(st.integers(0, rank - 1), unique=True).map(tuple)
    )
    axis = data.draw(axes, label="axis")
    operation = data.draw(st.sampled_from(OPERATIONS), label="operation")
    mask = None
    if data.draw(st.booleans()) or (0 in shape and operation in SELECTING):
        drop = data.draw(st.integers(0, rank), label="dropped")
        mask_shape = [s if data.draw(st.booleans()) else 1 for s in shape][drop:]
        mask = random_mask(tuple(mask_shape), data.draw(st.sampled_from((0.2, 0.8))))
    check(operation, normal(shape, data.draw(st.sampled_from(DTYPES))), axis, mask, data.draw(st.booleans()))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    # XLA on the CPU reads subnormal numbers as 0.
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=ON_GPU), min_size=1, max_size=40
    ),
    st.floats(-1e4, 1e4, width=32),
)
def test_laws(values, shift):
    """max and min are elements and mirror each other; logsumexp lies between the maximum and log(n) above it."""
    x = np.asarray(values, np.float32)
    high, low, lse = (float(OURS[name](x)) for name in ("reduce_max", "reduce_min", "logsumexp"))
    assert high == x.max() and low == x.min() and low == -float(jaxkern.reduce_max(-x))
    assert high <= lse <= high + np.log(len(x)) + abs(high) * 2.0**-22 + 1e-5
    assert float(jaxkern.reduce_sum(x[::-1])) == pytest.approx(
        float(np.sum(x.astype(np.float64))), rel=1e-6, abs=4e-7 * np.abs(x.astype(np.float64)).sum()
    )


@every_dtype
def test_statistics_of_rows(dtype):
    """Rows and columns of one chunk and of many; bases of exponentials that 16 bits round; no elements, infinity and NaN."""
    for shape, axis, mask in (
        ((5, 1003), 1, None),
        ((70, 40), 1, (70, 40)),
        ((2, 200_003), 1, (1, 200_003)),
        ((3, 700, 5), 1, None),
        ((3, 700, 70), 1, (3, 1, 70)),
    ):
        mask = None if mask is None else random_mask(mask)
        for scale in (1, 300):
            check_statistics(normal(shape, dtype, scale), axis, mask)
    x = np.zeros((6, 300))
    x[0, 7], x[1, 8], x[2], x[3, 9], x[4] = np.inf, np.nan, -np.inf, -np.inf, 60000
    with compat.enable_x64(dtype == "float64"):
        check_statistics(jnp.asarray(x, dtype), 1)
        check_statistics(jnp.asarray(x.T, dtype), 0, jnp.arange(300)[:, None] != 100)


# ---- extremes


@every_operation
@every_dtype
@pytest.mark.parametrize("width, axis", [(5, 1), (300, 0), (40000, 1)])
@pytest.mark.sweep(3)
def test_masked_out_and_empty_rows(operation, dtype, width, axis):
    """What is masked out is never looked at, in the gradient either; a row of nothing has the neutral result."""
    x = np.random.default_rng(0).normal(size=(5, width))
    mask = np.random.default_rng(1).random((5, width)) < 0.5
    mask[0], mask[1:, 0] = False, True
    x[2, ~mask[2]], x[4, ~mask[4]] = np.nan, np.inf
    x[0] = np.nan
    with compat.enable_x64(dtype == "float64"):
        x, mask = (a if axis else a.T.copy() for a in (jnp.asarray(x, dtype), jnp.asarray(mask)))
        x = jnp.asarray(x, dtype)
        y, pull = jax.vjp(lambda x: call(operation, x, axis, mask), x)
        dx = np.asarray(pull(jnp.full(y.shape, 1.5, dtype))[0])
    nothing = {
        "reduce_sum": 0,
        "reduce_mean": np.nan,
        "reduce_max": -np.inf,
        "reduce_min": np.inf,
        "logsumexp": -np.inf,
    }
    np.testing.assert_array_equal(np.asarray(y)[0].astype(np.float64), nothing[operation])
    assert np.isfinite(np.asarray(y)[1:]).all()
    assert np.isfinite(dx).all() and (dx[~np.asarray(mask)] == 0).all()
    with np.errstate(invalid="ignore"):
        exact, slack = expected(operation, x, axis, mask)
    assert_rounded(np.asarray(y)[1:], exact[1:], np.broadcast_to(slack, exact.shape)[1:], dtype)


@every_operation
@every_dtype
@pytest.mark.parametrize("width", [3, 700, 140_000])
@pytest.mark.sweep(5)
def test_nan_and_infinities_as_in_jax(operation, dtype, width):
    x = np.random.default_rng(0).normal(size=(8, width))
    x[0, 0], x[1, -1], x[2, width // 2] = np.nan, np.inf, -np.inf
    x[3, [0, -1]] = np.inf, -np.inf
    x[4, [0, -1]] = np.nan, np.inf
    x[5], x[6] = -np.inf, np.inf
    loses_nan, rows_without_nan = operation in SELECTING and not ON_GPU, [1, 2, 3, 5, 6, 7]
    with compat.enable_x64(dtype == "float64"):
        x = jnp.asarray(x, dtype)
        for axis, a in ((1, x), (0, x.T)):
            found, wanted = np.asarray(call(operation, a, axis)).astype(np.float64), expected(operation, a, axis)[0]
            special = ~np.isfinite(wanted)  # by numpy: on a CPU XLA's maximum may lose a NaN, and so does ours
            if loses_nan:
                found, wanted, special = found[rows_without_nan], wanted[rows_without_nan], special[rows_without_nan]
            np.testing.assert_array_equal(found[special], wanted[special].astype(np.float64))
            assert np.isfinite(found[~special]).all()
            if dtype != "float32" or width > 1000:
                continue
            rows = [0, 1, 2, 4, 7] if operation == "logsumexp" else rows_without_nan if loses_nan else range(8)
            ours, theirs = (
                np.isnan(np.asarray(jax.grad(lambda x: f(x, axis=axis)[:7].astype(jnp.float32).sum())(a)))
                for f in (OURS[operation], JAX[operation])
            )
            if operation in SELECTING:  # likewise
                theirs = np.broadcast_to(np.isin(np.arange(8), (0, 4))[:, None], (8, width))
                theirs = theirs if axis else theirs.T
            np.testing.assert_array_equal(*(a[rows] if axis else a.T[rows] for a in (ours, theirs)))


@every_dtype
@pytest.mark.optimized
def test_huge_and_tiny_values(dtype):
    info = jnp.finfo(dtype)
    huge, tiny = float(info.max), float(info.smallest_normal)
    rows = [
        [huge, -huge, 0],
        [-huge, -huge, -huge],
        [huge / 2, 0, -huge / 2],
        [tiny, -tiny, 0],
        [huge / 4, huge / 4, -huge / 2],
    ]
    with compat.enable_x64(dtype == "float64"):
        x = jnp.asarray(np.array(rows), dtype)
        for operation in OPERATIONS:
            y = call(operation, x)
            exact, slack = expected(operation, x)
            fits = np.abs(exact) <= huge
            if operation in ("reduce_sum", "reduce_mean"):  # nor may a sum on the way overflow what it is computed in
                fits &= np.abs(np.asarray(x).astype(wide)).sum(-1) <= float(jnp.finfo(computing(dtype)).max)
            assert_rounded(np.asarray(y)[fits], exact[fits], np.broadcast_to(slack, exact.shape)[fits], dtype)
        if dtype == "float16":  # the sum is infinite, the mean is not
            y = jaxkern.reduce_mean(jnp.full((2, 1000), 60000, dtype), -1)
            assert (np.asarray(y) == 60000).all() and np.isinf(jaxkern.reduce_sum(jnp.full(1000, 60000, dtype)))


@every_operation
@pytest.mark.parametrize(
    "shape, axis",
    [((0,), 0), ((3, 0), 1), ((3, 0), 0), ((0, 5), -1), ((2, 0, 3), 1), ((2, 0, 3), (1, 2)), ((0, 0), None)],
)
@pytest.mark.sweep(3)
def test_empty(operation, shape, axis):
    x = jnp.zeros(shape, jnp.bfloat16)
    reduced = any(shape[a] == 0 for a in (range(len(shape)) if axis is None else np.atleast_1d(axis)))
    mask = jnp.ones(shape[-1:], bool)
    if operation in SELECTING and reduced:
        with pytest.raises(ValueError, match="has no elements"):
            call(operation, x, axis)
        y = call(operation, x, axis, mask)
        assert (np.asarray(y) == (-np.inf if operation == "reduce_max" else np.inf)).all()
        return
    theirs = np.asarray(JAX[operation](x, axis=axis))
    for y in (call(operation, x, axis), call(operation, x, axis, mask)):
        np.testing.assert_array_equal(np.asarray(y).astype(np.float32), theirs.astype(np.float32))
        assert y.dtype == theirs.dtype
    assert jax.grad(lambda x: call(operation, x, axis).sum())(x).shape == shape


@every_operation
def test_numbers_and_other_types(operation):
    ours, theirs = OURS[operation], JAX[operation]
    assert ours(2.5, axis=None) == theirs(2.5, axis=None) and ours(2.5, axis=None).shape == ()
    assert not ours(2.5, axis=()).weak_type
    for dtype in ("int8", "uint8", "int16", "int32", "uint32"):
        x = jnp.arange(6, dtype=dtype)
        assert ours(x).dtype == theirs(x).dtype
        np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-6)
    if operation != "logsumexp":
        x = jnp.array([[True, False, True], [False, False, True]])
        assert ours(x).dtype == theirs(x).dtype
        np.testing.assert_allclose(ours(x), theirs(x))
    np.testing.assert_array_equal(ours(np.arange(6.0)), ours(jnp.arange(6.0)))


@every_operation
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_types_without_a_kernel(operation, dtype):
    """Computed in float32 through XLA and rounded once."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 40)), dtype)
    for mask in (None, random_mask((6, 40)).at[0].set(False)):
        wider = call(operation, x.astype(jnp.float32), mask=mask)
        if mask is not None:
            wider = wider[1:]
        narrow = call(operation, x, mask=mask)
        assert narrow.dtype == x.dtype
        found = np.asarray(narrow.astype(jnp.float32))
        np.testing.assert_array_equal(
            found[len(found) - len(wider) :], np.asarray(wider.astype(dtype).astype(jnp.float32))
        )
        assert operation == "reduce_mean" or not np.isnan(found).any()
    assert jax.grad(lambda x: OURS[operation](x, -1)[0].astype(jnp.float32))(x).dtype == x.dtype


@pytest.mark.gpu
@every_operation
def test_more_than_2_to_31_elements(operation):
    free = jax.devices()[0].memory_stats()
    shape = ((1 << 20) + 3, 2051)
    if free["bytes_limit"] - free["bytes_in_use"] < 2.5 * 2 * shape[0] * shape[1]:
        pytest.skip("not enough device memory")
    x = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))(jax.random.key(0))
    rows = (0, 1, (1 << 31) // 2051, (1 << 31) // 2051 + 1, shape[0] - 1)
    y = jax.jit(lambda x: OURS[operation](x, -1))(x)
    for row in rows:
        assert_rounded(y[row], *expected(operation, x[row]), x.dtype)
    columns = jax.jit(lambda x: OURS[operation](x, 0))(x)
    whole = jax.jit(lambda x: OURS[operation](x.reshape(1, -1), 1))(x)
    some = [0, 7, 2050]
    near = jax.jit(lambda x: JAX[operation](x[:, jnp.array(some)].astype(jnp.float32), axis=0))(x)
    np.testing.assert_allclose(
        np.asarray(columns.astype(jnp.float32))[some], near, rtol=1e-2, atol=8 if operation == "reduce_sum" else 1e-4
    )
    if operation in SELECTING:
        assert whole[0] == OURS[operation](y)
    elif operation == "logsumexp":
        np.testing.assert_allclose(float(whole[0]), float(jax.nn.logsumexp(y.astype(jnp.float32))), rtol=1e-2)


# ---- the arguments of jnp


@pytest.mark.parametrize("x_dtype", ["bfloat16", "float32", "uint8", "bool"])
@every_operation
def test_arguments_as_in_jnp(operation, x_dtype, x64):
    """Every combination gives the value, shape and dtype of the counterpart; without an axis, of the whole array."""
    if operation == "logsumexp" and x_dtype == "bool":
        pytest.skip("logsumexp of booleans is refused")
    x = jnp.asarray(np.random.default_rng(0).normal(0, 3, (3, 4, 5))).astype(x_dtype)
    axes = ({}, {"axis": (0, 2)}, {"axis": -1, "keepdims": True})
    others = [{}]
    if operation in ("reduce_sum", "reduce_mean"):
        types = ("float16", "float32", "float64", *(("int8", "uint8", "int32") if operation == "reduce_sum" else ()))
        others += [{"dtype": dtype} for dtype in types]
    if operation == "reduce_sum":
        others += [
            {"promote_integers": False},
            {"initial": 1.5, "promote_integers": False},
            {"initial": 2, "dtype": "int8"},
        ]
    if operation not in ("reduce_mean", "logsumexp"):
        others += [{"initial": 2}, {"initial": jnp.float32(1.5)}, {"initial": -1, "where": x > 0}]
    cases = [axis | other for axis, other in itertools.product(axes, others)]
    for ours, theirs, case in zip(
        *(jax.jit(lambda x, f=f: [f(x, **case) for case in cases])(x) for f in (OURS[operation], JAX[operation])), cases
    ):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), case
        near = 2.0**-6 if "16" in f"{x_dtype}{ours.dtype}" else 1e-5
        np.testing.assert_allclose(*(np.asarray(y, np.float64) for y in (ours, theirs)), near, near, err_msg=str(case))


@pytest.mark.parametrize("initial", [0.5, 3.0])
@pytest.mark.parametrize("operation", ["reduce_sum", "reduce_max", "reduce_min"])
def test_gradient_with_an_initial_value(operation, initial, x64):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 6))).at[0].set(initial)
    ours, theirs = (
        jax.grad(lambda x, a: jnp.sin(f[operation](x, 1, initial=a)).sum(), (0, 1))(x, initial) for f in (OURS, JAX)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), ours, theirs)


FACTORS = {
    "number": lambda: 2.0,
    "column": lambda: jnp.array([[1.0], [-2.0], [0.0]]),
    "wider than x": lambda: jnp.asarray(np.random.default_rng(2).normal(size=(2, 3, 7))).at[:, :, 2].set(0),
    "integers": lambda: jnp.arange(-3, 4),
    "booleans": lambda: jnp.arange(7) > 2,
}


@pytest.mark.parametrize("b", FACTORS)
@pytest.mark.parametrize(
    "given, return_sign", [({}, False), ({"axis": -1, "keepdims": True}, True), ({"axis": (0, -1)}, True)]
)
def test_logsumexp_with_factors(b, given, return_sign, x64):
    """Values, signs and gradients of jax.nn.logsumexp, huge and masked elements included."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 7))).at[0, 5].set(700.0).at[1, 3].set(-jnp.inf)
    b = FACTORS[b]()
    given = given | {"return_sign": return_sign, "where": jnp.arange(7) != 1}
    real = jnp.issubdtype(jnp.asarray(b).dtype, jnp.floating)

    def both(f):
        y, pull, sign = jax.vjp(lambda *a: split(f(*a)), *((x, b) if real else (x,)), has_aux=True)
        return y, sign, pull(jnp.where(jnp.isfinite(y), jnp.cos(y), 0))

    def split(found):
        return found if return_sign else (found, jnp.zeros(()))

    ours = both(lambda x, *factor: OURS["logsumexp"](x, b=factor[0] if factor else b, **given))
    theirs = both(lambda x, *factor: JAX["logsumexp"](x, b=factor[0] if factor else b, **given))
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-12)
    np.testing.assert_array_equal(ours[1], theirs[1])
    for a, c in zip(ours[2], theirs[2]):  # JAX has NaN where a sum vanishes, ours has no gradient there
        np.testing.assert_allclose(a, jnp.where(jnp.isnan(c), 0, c), rtol=1e-10, atol=1e-14)


def test_logsumexp_with_a_sign():
    x = jnp.array([[0.0, 1.0], [-jnp.inf, -jnp.inf], [jnp.inf, 0.0], [jnp.nan, 0.0]])
    for found, wanted in zip(*(f["logsumexp"](x, 1, return_sign=True) for f in (OURS, JAX))):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
        assert found.dtype == wanted.dtype


# ---- bad input


@every_operation
@pytest.mark.parametrize(
    "args, kind, words",
    [
        (lambda: (jnp.ones((2, 3)), 2), ValueError, ["axis 2", "(2, 3)"]),
        (lambda: (jnp.ones((2, 3)), (1, -1)), ValueError, ["duplicate", "(1, -1)", "(2, 3)"]),
        (lambda: (jnp.ones((2, 3)), 1.0), TypeError, ["axis", "1.0"]),
        (lambda: (jnp.ones((2, 3)), True), TypeError, ["axis must be", "True"]),
        (lambda: (1.0, -1), ValueError, ["axis -1", "()"]),
        (lambda: (jnp.ones((2, 3), jnp.complex64), -1), TypeError, ["x must be real", "complex64[2, 3]"]),
        (lambda: (jax.random.key(0), None), TypeError, ["x must be an array or a number", "key<fry>[]"]),
        (lambda: ([1.0, 2.0], -1), TypeError, ["x must be an array", "list"]),
        (lambda: (None,), TypeError, ["x must be an array", "NoneType"]),
        (lambda: (jnp.ones((2, 3)), -1, 1), TypeError, ["where must be boolean", "int32[]"]),
        (lambda: (jnp.ones((2, 3)), -1, jnp.ones((2,), bool)), ValueError, ["where", "(2,)", "(2, 3)"]),
        (lambda: (jnp.ones((2, 3)), -1, jnp.ones((4, 2, 3), bool)), ValueError, ["where", "(4, 2, 3)", "(2, 3)"]),
        (lambda: (jnp.ones((2, 3)), -1, None, 1), TypeError, ["keepdims must be True or False", "1"]),
    ],
)
def test_bad_input(operation, args, kind, words):
    x, axis, where, keepdims = (*args(), *(-1, None, False)[len(args()) - 1 :])
    with pytest.raises(kind) as error:
        call(operation, x, axis, where, keepdims)
    message = str(error.value)
    assert message.startswith(f"jaxkern.{operation}: ") and all(word in message for word in words), message


@pytest.mark.parametrize(
    "operation, given, kind, words",
    [
        ("reduce_sum", {"dtype": "complex64"}, TypeError, "dtype must be floating-point or integer, got complex64"),
        ("reduce_sum", {"dtype": bool}, TypeError, "dtype must be floating-point or integer, got bool"),
        ("reduce_mean", {"dtype": int}, TypeError, "dtype must be floating-point, got int32"),
        ("reduce_sum", {"initial": jnp.ones(2)}, ValueError, r"initial must be a scalar, got shape \(2,\)"),
        ("reduce_max", {"initial": 1j}, TypeError, "initial must be real, got complex64"),
        ("reduce_min", {"initial": "1"}, TypeError, "initial must be a number, got str"),
        ("reduce_sum", {"promote_integers": 0}, TypeError, "promote_integers must be True or False, got 0"),
        ("logsumexp", {"return_sign": 1}, TypeError, "return_sign must be True or False, got 1"),
        ("logsumexp", {"b": "b"}, TypeError, "b must be an array or a number, got str"),
        ("logsumexp", {"b": jnp.ones(3, "complex64")}, TypeError, "b must be real"),
        ("logsumexp", {"b": jnp.ones(2)}, ValueError, r"x of shape \(2, 3\) and b of shape \(2,\) do not broadcast"),
        ("logsumexp", {"x": jnp.ones(3, bool)}, TypeError, "x must be real"),
        ("logsumexp", {"x": jnp.ones(3, bool), "b": 1.0}, TypeError, "x must be real"),
    ],
)
def test_bad_arguments(operation, given, kind, words):
    with pytest.raises(kind, match=f"jaxkern.{operation}: {words}"):
        OURS[operation](**({"x": jnp.ones((2, 3))} | given))


# ---- algorithms


def test_force():
    with algorithms.force(logsumexp="split"):
        assert "algorithm=split" in str(jax.make_jaxpr(jaxkern.logsumexp)(jnp.ones(3)))
    with algorithms.force(softmax="pipeline"):
        assert "algorithm=auto" in str(jax.make_jaxpr(jaxkern.logsumexp)(jnp.ones(3)))


def test_algorithm_query_needs_no_gpu():
    for device, width, inner, dtype, masked, rows in itertools.product(
        (algorithms.H200, algorithms.A100),
        (1, 64, 1000, 4096, 50257, 1 << 20),
        (1, 7),
        ("bfloat16", "float64", "uint8"),
        (False, True),
        (1, 49152),
    ):
        problem = dict(rows=rows, width=width, inner=inner, dtype=dtype, masked=masked, device=device)
        algorithm = algorithms.choose("reduce_sum", **problem)
        assert algorithm in algorithms.names("reduce_sum") and algorithms.fits("reduce_sum", algorithm, **problem)
        assert (algorithm == "column") == (inner != 1)
    wanted = {
        (49152, 32): "sub_warp",
        (49152, 1024): "warp",
        (16384, 4096): "block",
        (8192, 32768): "block",
        (64, 1 << 20): "split",
        (1, 1 << 26): "split",
    }
    assert {shape: algorithms.choose("reduce_sum", *shape, device=algorithms.H200) for shape in wanted} == wanted
    assert not algorithms.fits("reduce_sum", "sub_warp", 8, 129, masked=True)


@pytest.mark.parametrize(
    "problem, kind, words",
    [
        (dict(dtype="complex64"), ValueError, "no kernel for dtype complex64, there are bfloat16, bool, float16"),
        (dict(width=0), ValueError, "width must be positive, got 0"),
        (dict(inner=2.0), TypeError, "inner must be an int, got 2.0"),
        (dict(masked=1), TypeError, "masked must be True or False, got 1"),
        (dict(device="H200"), TypeError, "device must be a jaxkern.algorithms.Device or None, got str"),
    ],
)
def test_bad_algorithm_query(problem, kind, words):
    problem = {"rows": 8, "width": 64, **problem}
    for name, ask in (
        ("choose", lambda **p: algorithms.choose("reduce_max", **p)),
        ("fits", lambda **p: algorithms.fits("reduce_max", "warp", **p)),
    ):
        with pytest.raises(kind) as error:
            ask(**problem)
        assert str(error.value).startswith(f"jaxkern.algorithms.{name}: {words}")
    with pytest.raises(ValueError, match="reduce_max has no algorithm 'pipeline', there are sub_warp"):
        algorithms.fits("reduce_max", "pipeline", 8, 64)


EDGES = (
    1,
    3,
    7,
    8,
    9,
    31,
    32,
    33,
    64,
    100,
    127,
    128,
    129,
    255,
    256,
    257,
    513,
    1000,
    1025,
    4095,
    4097,
    16384,
    50257,
    131080,
    600_001,
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES + ("int8", "uint16", "int32", "uint64"))
@pytest.mark.parametrize("algorithm", algorithms.names("reduce_sum"))
def test_every_algorithm(algorithm, dtype):
    """Each kernel where it fits, with a mask too, at widths around every algorithm's edges; right and the same twice."""
    ran, whole = 0, dtype in INTEGERS
    for width, operation, masked in itertools.product(EDGES, OPERATIONS, (False, True)):
        if whole and operation in ("reduce_mean", "logsumexp"):
            continue
        shapes = (
            [((37, width, 24), 1), ((3, width, 5), 1), ((1, width, 70), 1)]
            if algorithm == "column"
            else [((37 if width < 5000 else 3, width), 1)]
        )
        for shape, axis in shapes:
            inner = int(np.prod(shape[2:]))
            if (
                not algorithms.fits(operation, algorithm, shape[0], width, inner, dtype, masked=masked)
                or np.prod(shape) > 3_000_000
            ):
                continue
            with compat.enable_x64(jnp.dtype(dtype).itemsize == 8), algorithms.force(**{operation: algorithm}):
                mask = random_mask((1, width, *shape[2:])) if masked else None
                if whole:
                    x = integers(shape, dtype)
                    y = call(operation, x, axis, mask)
                    kept = np.broadcast_to(True if mask is None else mask, shape)
                    method, initial = {
                        "reduce_sum": (np.sum, 0),
                        "reduce_max": (np.max, np.iinfo(dtype).min),
                        "reduce_min": (np.min, np.iinfo(dtype).max),
                    }[operation]
                    np.testing.assert_array_equal(
                        y,
                        method(
                            np.asarray(x),
                            axis,
                            where=kept,
                            initial=initial,
                            **({"dtype": y.dtype} if operation == "reduce_sum" else {}),
                        ),
                    )
                else:
                    check(operation, normal(shape, dtype), axis, mask)
                    if operation == "logsumexp":
                        check_statistics(normal(shape, dtype), axis, mask)
            ran += 1
    assert ran


def test_an_algorithm_that_does_not_fit_is_an_error():
    if registry.kernels.module is None:
        pytest.skip(registry.kernels.reason)
    with algorithms.force(logsumexp="sub_warp"), pytest.raises(ValueError, match="jaxkern.logsumexp.*sub_warp"):
        jax.jit(jaxkern.logsumexp).trace(jnp.ones((2, 100_003))).lower(lowering_platforms=("cuda",))


def test_backend_is_the_one_under_test():
    """On CUDA no operation silently runs through XLA."""
    if registry.kernels.module is None:
        pytest.skip(registry.kernels.reason)
    for operation, dtype in itertools.product(OPERATIONS, ("float16", "bfloat16", "float32", "int8", "uint32")):
        if dtype in DTYPES or operation not in ("reduce_mean", "logsumexp"):
            traced = jax.jit(OURS[operation]).trace(jnp.ones((3, 5), dtype))
            assert f"@jaxkern_{operation}(" in traced.lower(lowering_platforms=("cuda",)).as_text()
