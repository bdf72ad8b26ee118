"""reduce_sum, reduce_mean, reduce_max, reduce_min and logsumexp: numbers, extremes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ON_GPU
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import ROWS, WIDTHS, normal, random_mask
from reductions import (
    INTEGERS,
    JAX,
    OPERATIONS,
    OURS,
    SELECTING,
    call,
    check,
    check_all,
    check_statistics,
    every_dtype,
    every_operation,
    expected,
    integers,
)
from reference import DTYPES, assert_rounded, computing, wide

import jaxkern
from jaxkern._core import compat

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
