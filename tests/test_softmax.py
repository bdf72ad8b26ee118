"""softmax and log_softmax and their gradients: numbers, shapes, extremes, bad input, algorithms."""

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
from reference import DTYPES, OPERATIONS, assert_rounded, forward, gradient

import jaxkern
from jaxkern import algorithms
from jaxkern._core import compat, registry
from jaxkern._core.algorithms import forced

OURS = {name: getattr(jaxkern, name) for name in OPERATIONS}
JAX = {name: getattr(jax.nn, name) for name in OPERATIONS}

every_operation = pytest.mark.parametrize("operation", OPERATIONS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def both(f, x, g, axis, mask):
    """The result and the gradient, in one compiled function."""

    def run(x, g, mask):
        y, pull = jax.vjp(lambda x: f(x, axis, mask), x)
        return y, pull(g)[0]

    return jax.jit(run)(x, g, mask)


def check(operation, x, axis=-1, mask=None, seed=1):
    """The operation and its gradient against numpy."""
    with compat.enable_x64(x.dtype == jnp.float64):
        g = jnp.asarray(np.random.default_rng(seed).normal(size=x.shape), x.dtype)
        y, dx = both(OURS[operation], x, g, axis, mask)
        assert_rounded(y, *forward(operation, x, axis, mask), x.dtype)
        assert_rounded(dx, *gradient(operation, x, y, g, axis, mask), x.dtype)


# ---- numbers


@every_operation
@every_dtype
@pytest.mark.parametrize("shape, axis, mask", ROWS)
@pytest.mark.sweep(5)
@pytest.mark.optimized
def test_against_numpy(operation, dtype, shape, axis, mask):
    check(operation, normal(shape, dtype), axis, None if mask is None else random_mask(mask))


@every_operation
@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.sweep(13)
def test_widths(operation, dtype, width):
    check(operation, normal((3, width), dtype))


@every_dtype
@pytest.mark.parametrize("width", [1, 8, 9, 24, 25, 32, 33, 64, 65, 400, 1023, 1025])
@pytest.mark.sweep(7)
def test_columns(dtype, width):
    """Whole vectors of columns, in each of the ways that tiles of so many rows are held; and single ones."""
    for operation in OPERATIONS:
        check(operation, normal((2, width, 40), dtype), 1)
    check(OPERATIONS[width % 2], normal((2, width, 37), dtype), 1)


@every_operation
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("axis", [-1, 0])
def test_where_a_product_with_log2_e_loses_its_meaning(operation, dtype, axis):
    """Values so large that their products round by more than 1, or overflow; their differences do not."""
    rng = np.random.default_rng(5)
    scales = np.array([2.0**k for k in (0, 20, 27, 28, 29, 30, 40, 100, 126)] + [1.6e38])[:, None]
    x = rng.uniform(-1, 1, (10, 3000)) * scales
    x[:, 7] = x[:, 1900] = x.max(1)  # the largest twice, far apart
    x[5, 100] = np.nextafter(np.float32(x[5].max()), 0)
    x = np.concatenate([x, -np.abs(x)])
    x = jnp.asarray(x if axis else x.T, dtype)
    check(operation, x, axis)
    check(operation, x, axis, random_mask((3000,) if axis else (3000, 1)))


@every_operation
@every_dtype
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17])
@pytest.mark.sweep(11)
def test_many_short_rows(operation, dtype, width):
    """Short rows are computed many at a time: groups full and not, a last register that is not full either."""
    for rows, masks in ((33, (None, (33, width))), (131, ((1, width),))):
        x = np.array(normal((rows, width), dtype))
        x[5] = x[7, 0] = -np.inf
        for mask in masks:
            check(operation, x, -1, None if mask is None else random_mask(mask))


@every_operation
@pytest.mark.parametrize(
    "shape, axis", [((1, 1 << 20), -1), ((2, 131080), -1), ((70001, 5), -1), ((3, 40001, 2), 1), ((40001, 3), 0)]
)
@pytest.mark.sweep(3)
def test_long(operation, shape, axis):
    check(operation, normal(shape, "float32"), axis)
    check(operation, normal(shape, "bfloat16"), axis, random_mask((*shape[:-1], 1) if axis == 0 else shape[1:]))


@every_operation
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    "shape, scale", [((64, 1), 9.0), ((64, 2), 9.0), ((64, 1000), 1.0), ((16, 4096), 10.0), ((4, 50257), 3.0)]
)
@pytest.mark.optimized
def test_no_less_accurate_than_jax(operation, dtype, shape, scale):
    x, g = normal(shape, dtype, scale), normal(shape, dtype, seed=3)
    exact = [forward(operation, x)[0]]
    exact.append(gradient(operation, x, exact[0], g)[0])
    eps = float(jnp.finfo(dtype).eps)
    # Where both are within rounding of the largest element there is nothing to compare. Without a GPU both are XLA's, which
    # orders the sums of each program in its own way.
    allowed = [(1 if ON_GPU else 2) * eps * np.abs(e).max() for e in exact]
    with compat.enable_x64(dtype == "float64"):
        ours, theirs = (
            [
                np.abs(np.asarray(found).astype(np.longdouble) - e).max()
                for found, e in zip(both(f, x, g, -1, None), exact)
            ]
            for f in (OURS[operation], JAX[operation])
        )
    for what, error, peer, limit in zip(("result", "gradient"), ours, theirs, allowed):
        assert error <= max(peer, limit), f"{what}: {error / limit:.2f} of the rounding, jax.nn {peer / limit:.2f}"


@every_operation
@every_dtype
@pytest.mark.parametrize(
    "shape, axis", [((300, 1), -1), ((40, 24), -1), ((40, 1003), -1), ((9, 30, 16), 1), ((3, 70000), -1)]
)
@pytest.mark.sweep(3)
def test_rows_of_one_participant_are_exact(operation, dtype, shape, axis):
    """The only element of a row has the probability 1 and the logarithm 0, whatever it is, as in jax.nn."""
    with compat.enable_x64(dtype == "float64"):
        x = normal(shape, dtype, 50.0)
        at = np.expand_dims(np.random.default_rng(3).integers(0, shape[axis], x.sum(axis).shape), axis)
        mask = np.zeros(shape, bool)
        np.put_along_axis(mask, at, True, axis)
        alone = jnp.where(mask, x, -jnp.inf)
        found = [OURS[operation](alone, axis), OURS[operation](x, axis, jnp.asarray(mask))]
    for y in found:
        np.testing.assert_array_equal(np.asarray(y, np.float64)[mask], 1 if operation == "softmax" else 0)


@every_operation
@every_dtype
def test_bitwise_reproducible(operation, dtype):
    x, g, mask = normal((257, 1003), dtype), normal((257, 1003), dtype, seed=3), random_mask((1, 1003))
    with compat.enable_x64(dtype == "float64"):
        runs = [[np.asarray(a).tobytes() for a in both(OURS[operation], x, g, -1, mask)] for _ in range(5)]
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
    mask = None
    if data.draw(st.booleans(), label="masked"):
        drop = data.draw(st.integers(0, rank), label="dropped")
        mask_shape = [s if data.draw(st.booleans()) else 1 for s in shape][drop:]
        mask = random_mask(tuple(mask_shape), data.draw(st.sampled_from((0.2, 0.8))))
    check(data.draw(st.sampled_from(OPERATIONS)), normal(shape, data.draw(st.sampled_from(DTYPES))), axis, mask)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False), min_size=6, max_size=6)
)
def test_sums_to_one_and_keeps_order(values):
    x = np.clip(np.asarray(values, np.float32), -1e30, 1e30)
    y = np.asarray(jaxkern.softmax(x), np.float64)
    assert abs(y.sum() - 1) <= 6 * 2.0**-23 and (y >= 0).all()
    assert (np.diff(y[np.argsort(x, kind="stable")]) >= 0).all()


# ---- extremes


@every_operation
@every_dtype
@pytest.mark.parametrize("width", [5, 300, 5000])
@pytest.mark.sweep(3)
def test_masked_out_and_empty_rows(operation, dtype, width):
    """Rows with nothing in them: masked out, or -inf throughout, or both; never NaN."""
    x = np.random.default_rng(0).normal(size=(5, width))
    x[1] = x[3, 1:] = -np.inf
    mask = np.random.default_rng(1).random((5, width)) < 0.5
    mask[0], mask[3, 1:], mask[3, 0] = False, True, False
    x[2, ~mask[2]] = np.nan  # what is masked out is never looked at
    x[4, ~mask[4]] = np.inf
    mask[2, 0] = mask[4, 0] = True
    x[2, 0] = x[4, 0] = 0
    with compat.enable_x64(dtype == "float64"):
        x = jnp.asarray(x, dtype)
        g = jnp.where(mask, 1.5, jnp.nan).astype(dtype)
        y, dx = both(OURS[operation], x, g, -1, jnp.asarray(mask))
    y, dx = np.asarray(y), np.asarray(dx)
    empty = 0 if operation == "softmax" else -np.inf
    assert (y[[0, 1, 3]] == empty).all() and (dx[[0, 1, 3]] == 0).all()
    assert (y[~mask] == empty).all() and (dx[~mask] == 0).all()
    assert not np.isnan(y).any() and not np.isnan(dx).any()
    assert_rounded(y, *forward(operation, x, -1, mask), dtype)


@every_operation
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("width", [4, 513, 30000])
def test_rows_of_minus_infinity_without_a_mask(operation, width, axis):
    x = np.full((3, width), -np.inf, np.float32)
    x[1, width // 2], x[2, -1] = 7, -1e30
    x = x if axis == 1 else x.T.copy()
    y, dx = map(np.asarray, both(OURS[operation], x, np.ones_like(x), axis, None))
    y, dx = (y, dx) if axis == 1 else (y.T, dx.T)
    assert (y[0] == (0 if operation == "softmax" else -np.inf)).all() and (dx[0] == 0).all()
    one = 1 if operation == "softmax" else 0
    assert y[1, width // 2] == one and y[2, -1] == one and not np.isnan(y).any() and not np.isnan(dx).any()


@every_operation
@every_dtype
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("width", [3, 40, 700, 20000])
@pytest.mark.sweep(3)
def test_nan_and_infinity_propagate_as_in_jax(operation, dtype, bad, width):
    x = np.random.default_rng(0).normal(size=(4, width))
    x[0, 0], x[2, -1], x[3, width // 2] = bad, bad, -np.inf
    with compat.enable_x64(dtype == "float64"):
        x = jnp.asarray(x, dtype)
        ours, theirs = np.asarray(OURS[operation](x)), np.asarray(JAX[operation](x))
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    assert np.isnan(ours[[0, 2]]).all() and not np.isnan(ours[[1, 3]]).any()


@every_operation
@every_dtype
@pytest.mark.optimized
def test_huge_and_tiny_values(operation, dtype):
    info = jnp.finfo(dtype)
    huge, tiny, least = float(info.max), float(info.smallest_normal), float(info.smallest_subnormal)
    rows = [
        [huge, huge, huge],
        [-huge, -huge, -huge],
        [huge / 2, 0, -huge / 2],
        [tiny, -tiny, 0],
        [least, 0, -least],
        [huge, huge / 2, -np.inf],
    ]
    with compat.enable_x64(dtype == "float64"):
        x = jnp.asarray(np.array(rows), dtype)
        y = OURS[operation](x)
    assert_rounded(y, *forward(operation, x), dtype)


@every_operation
@pytest.mark.parametrize(
    "shape, axis",
    [((0,), 0), ((3, 0), 1), ((3, 0), 0), ((0, 5), -1), ((2, 0, 3), 1), ((2, 0, 3), (1, 2)), ((0, 0), None)],
)
def test_empty(operation, shape, axis):
    x = jnp.zeros(shape, jnp.bfloat16)
    mask = jnp.ones(shape[-1:], bool)
    for y in (
        OURS[operation](x, axis),
        OURS[operation](x, axis, mask),
        jax.grad(lambda x: OURS[operation](x, axis).sum())(x),
    ):
        assert y.shape == shape and y.dtype == x.dtype


@every_operation
def test_numbers_integers_and_other_types(operation):
    ours, theirs = OURS[operation], JAX[operation]
    assert ours(2.5, axis=None) == theirs(2.5, axis=None) and ours(2.5, axis=None).shape == ()
    assert not ours(2.5, axis=()).weak_type
    for dtype in ("int8", "uint8", "int16", "int32", "uint32"):
        x = jnp.arange(6, dtype=dtype)
        assert ours(x).dtype == theirs(x).dtype == jnp.float32
        np.testing.assert_array_equal(ours(x), ours(x.astype(jnp.float32)))
    np.testing.assert_array_equal(ours(np.arange(6.0)), ours(jnp.arange(6.0)))


@every_operation
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_types_without_a_kernel(operation, dtype):
    """Computed in float32 through XLA and rounded once."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 40)), dtype)
    wide, narrow = OURS[operation](x.astype(jnp.float32)).astype(dtype), OURS[operation](x)
    assert narrow.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(narrow.astype(jnp.float32)), np.asarray(wide.astype(jnp.float32)))
    assert jax.grad(lambda x: OURS[operation](x)[0, 0].astype(jnp.float32))(x).dtype == x.dtype


@every_operation
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"])
def test_types_without_an_infinity(operation, dtype):
    """What would be -inf is the least number, never NaN; so is a logarithm below it."""
    least = float(jnp.finfo(dtype).min)
    x = jnp.asarray([[0, 1, 2, 3], [0, 1, 2, 3], [-least, 0, 1, least]], dtype)
    mask = jnp.asarray([[True, False, True, True], [False] * 4, [True] * 4])
    y, dx = both(OURS[operation], x, jnp.ones_like(x), -1, mask)
    exact = np.asarray(forward(operation, x.astype(jnp.float32), -1, mask)[0])
    y, dx = (np.asarray(a.astype(jnp.float32)) for a in (y, dx))
    assert np.isfinite(y).all() and np.isfinite(dx).all()
    np.testing.assert_allclose(y, np.maximum(exact, least), rtol=float(jnp.finfo(dtype).eps), atol=2.0**-8)
    assert (dx[~np.asarray(mask)] == 0).all()
    assert np.isnan(np.asarray(OURS[operation](x.at[0, 0].set(jnp.nan)).astype(jnp.float32))[0]).all()


@pytest.mark.gpu
@every_operation
def test_more_than_2_to_31_elements(operation):
    free = jax.devices()[0].memory_stats()
    shape = ((1 << 20) + 3, 2051)
    if free["bytes_limit"] - free["bytes_in_use"] < 5 * 2 * shape[0] * shape[1]:
        pytest.skip("not enough device memory")
    x = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))(jax.random.key(0))
    y = jax.jit(OURS[operation])(x)
    for row in (0, 1, (1 << 31) // 2051, (1 << 31) // 2051 + 1, shape[0] - 1):
        assert_rounded(y[row], *forward(operation, x[row]), x.dtype)


# ---- bad input


@every_operation
@pytest.mark.parametrize(
    "args, kind, words",
    [
        (lambda: (jnp.ones((2, 3)), 2), ValueError, ["axis 2", "(2, 3)"]),
        (lambda: (jnp.ones((2, 3)), -3), ValueError, ["axis -3", "(2, 3)"]),
        (lambda: (jnp.ones((2, 3)), (0, 2)), ValueError, ["axis 2", "(2, 3)"]),
        (lambda: (jnp.ones((2, 3)), (1, -1)), ValueError, ["duplicate", "(1, -1)", "(2, 3)"]),
        (lambda: (jnp.ones((2, 3)), 1.0), TypeError, ["axis", "1.0"]),
        (lambda: (jnp.ones((2, 3)), "x"), TypeError, ["axis", "'x'"]),
        (lambda: (1.0, -1), ValueError, ["axis -1", "()"]),
        (lambda: (jnp.ones((2, 3), bool), -1), TypeError, ["x must be real", "bool[2, 3]"]),
        (lambda: (jnp.ones((2, 3), jnp.complex64), -1), TypeError, ["x must be real", "complex64[2, 3]"]),
        (lambda: (jax.random.key(0), None), TypeError, ["x must be an array or a number", "key<fry>[]"]),
        (lambda: ([1.0, 2.0], -1), TypeError, ["x must be an array", "list"]),
        (lambda: ("abc",), TypeError, ["x must be an array", "str"]),
        (lambda: (None,), TypeError, ["x must be an array", "NoneType"]),
        (lambda: (object(),), TypeError, ["x must be an array", "object"]),
        (lambda: (np.array(["a", "b"]),), TypeError, ["x must be an array", "<U1[2]"]),
        (lambda: (np.ones((2, 3), np.longdouble),), TypeError, ["x must be an array", "[2, 3]"]),
        (lambda: (jax.ShapeDtypeStruct((2, 3), jnp.float32),), TypeError, ["x must be an array", "ShapeDtypeStruct"]),
        (lambda: (1 << 70, None), TypeError, ["x must be an array", "too large"]),
        (lambda: (np.zeros(3, jax.dtypes.float0),), TypeError, ["x must be an array or a number", "float0[3]"]),
        (lambda: (jnp.ones((2, 3), jnp.int4),), TypeError, ["int4[2, 3]", "does not promote"]),
        (lambda: (jnp.ones((2, 3), jnp.uint4),), TypeError, ["uint4[2, 3]", "does not promote"]),
        (lambda: (jnp.ones((2, 3), jnp.int2),), TypeError, ["int2[2, 3]", "does not promote"]),
        (lambda: (jnp.ones((2, 3), jnp.float8_e8m0fnu),), TypeError, ["a zero and a sign", "float8_e8m0fnu[2, 3]"]),
        (lambda: (jnp.ones((2, 3)), ""), TypeError, ["axis must be", "''"]),
        (lambda: (jnp.ones((2, 3)), b"\0"), TypeError, ["axis must be", "b'\\x00'"]),
        (lambda: (jnp.ones((2, 3)), {0: 1}), TypeError, ["axis must be", "{0: 1}"]),
        (lambda: (jnp.ones((2, 3)), True), TypeError, ["axis must be", "True"]),
        (lambda: (jnp.ones((2, 3)), (0, False)), TypeError, ["axis must be", "(0, False)"]),
        (lambda: (jnp.ones((2, 3)), ((0,), 1)), TypeError, ["axis must be", "((0,), 1)"]),
        (lambda: (jnp.ones((2, 3)), jnp.ones((2, 3), bool)), TypeError, ["axis must be", "bool[2, 3]"]),
        (lambda: (jnp.ones((2, 3)), -1, "abc"), TypeError, ["where must be a boolean array", "str"]),
        (lambda: (jnp.ones((2, 3)), -1, object()), TypeError, ["where must be a boolean array", "object"]),
        (
            lambda: (jnp.ones((2, 3)), -1, np.array([None] * 3)),
            TypeError,
            ["where must be a boolean array", "object[3]"],
        ),
        (lambda: (jnp.ones((2, 3)), -1, 1), TypeError, ["where must be boolean", "int32[]"]),
        (lambda: (jnp.ones((2, 3)), -1, jnp.ones((2,), bool)), ValueError, ["where", "(2,)", "(2, 3)"]),
        (lambda: (jnp.ones((2, 3)), -1, jnp.ones((4, 2, 3), bool)), ValueError, ["where", "(4, 2, 3)", "(2, 3)"]),
        (lambda: (jnp.ones((2, 1)), -1, jnp.ones((2, 3), bool)), ValueError, ["where", "(2, 3)", "(2, 1)"]),
        (lambda: (jnp.ones((2, 3)), -1, jnp.ones((2, 3))), TypeError, ["where must be boolean", "float32[2, 3]"]),
        (lambda: (jnp.ones((2, 3)), -1, [True, False, True]), TypeError, ["where must be a boolean array", "list"]),
    ],
)
def test_bad_input(operation, args, kind, words):
    with pytest.raises(kind) as error:
        OURS[operation](*args())
    message = str(error.value)
    assert message.startswith(f"jaxkern.{operation}: ") and all(word in message for word in words), message


@every_operation
def test_axes_of_any_integer_type(operation):
    x = normal((2, 3, 4), "float32")
    for axis, same in (
        (np.int64(1), 1),
        (np.array(-1), -1),
        ([0, 1], (0, 1)),
        (np.array([0, 1]), (0, 1)),
        (range(3), None),
    ):
        np.testing.assert_array_equal(OURS[operation](x, axis), OURS[operation](x, same))


# ---- algorithms


def test_force_is_local_and_restored():
    text = lambda f: str(jax.make_jaxpr(f)(jnp.ones(3)))
    assert forced("softmax") == "auto"
    automatic, of = text(jaxkern.softmax), {}
    for algorithm in ("warp", "split"):
        with algorithms.force(softmax=algorithm):
            of[algorithm] = text(jaxkern.softmax)
    assert len({automatic, *of.values()}) == 3
    with algorithms.force(softmax="block", log_softmax="warp"):
        with algorithms.force(softmax="auto"):
            assert forced("softmax") == "auto" and forced("log_softmax") == "warp"
            assert text(jaxkern.softmax) == automatic
        assert text(jaxkern.softmax) != automatic
    f = jax.jit(jaxkern.softmax)  # neither way round may a program of another algorithm be reused
    automatic, of = text(f), {}
    for algorithm in ("auto", "warp", "auto", "split", "warp"):
        with algorithms.force(softmax=algorithm):
            assert of.setdefault(algorithm, text(f)) == text(f)
    assert len(set(of.values())) == 3 and of["auto"] == automatic
    with (
        pytest.raises(ValueError, match="softmax has no algorithm 'blok', there are thread, lanes"),
        algorithms.force(softmax="blok"),
    ):
        pass
    with pytest.raises(ValueError, match="no operation 'softmix', there are"), algorithms.force(softmix="block"):
        pass


def test_algorithm_query_needs_no_gpu():
    for device in (algorithms.H200, algorithms.A100):
        for width, inner, dtype, backward in itertools.product(
            (1, 64, 1000, 4096, 50257, 1 << 20), (1, 7), DTYPES, (False, True)
        ):
            for rows in (1, 49152):
                problem = dict(rows=rows, width=width, inner=inner, dtype=dtype, backward=backward, device=device)
                algorithm = algorithms.choose("softmax", **problem)
                assert algorithm in algorithms.names("softmax") and algorithms.fits("softmax", algorithm, **problem)
                assert (algorithm in ("strided", "split")) if inner != 1 else algorithm != "strided"
                assert device is algorithms.H200 or algorithm != "cluster"  # Hopper's
    assert algorithms.choose("softmax", 49152, 32, dtype=jnp.bfloat16) == "lanes"
    assert algorithms.choose("softmax", 1, 1 << 20) == "split"
    assert not algorithms.fits("softmax", "cluster", 49152, 8192, device=algorithms.A100)
    with pytest.raises(ValueError, match="no algorithm 'wrap'"):
        algorithms.fits("softmax", "wrap", 1, 1)


@pytest.mark.parametrize(
    "problem, kind, words",
    [
        (dict(dtype="int32"), ValueError, "no kernel for dtype int32, there are bfloat16, float16, float32, float64"),
        (dict(dtype=None), ValueError, "no kernel for dtype None"),
        (dict(dtype="floot"), TypeError, "dtype must be a dtype or the name of one, got 'floot'"),
        (dict(dtype=object()), TypeError, "dtype must be a dtype or the name of one"),
        (dict(width=0), ValueError, "width must be positive, got 0"),
        (dict(rows=-3), ValueError, "rows must be positive, got -3"),
        (dict(inner=2.0), TypeError, "inner must be an int, got 2.0"),
        (dict(rows=True), TypeError, "rows must be an int, got True"),
        (dict(rows="8"), TypeError, "rows must be an int, got '8'"),
        (dict(width=1 << 63), ValueError, "width must be below 9223372036854775808, got 9223372036854775808"),
        (dict(backward=1), TypeError, "backward must be True or False, got 1"),
        (dict(backward=None), TypeError, "backward must be True or False, got None"),
        (dict(device="H200"), TypeError, "device must be a jaxkern.algorithms.Device or None, got str"),
        (dict(device=(132, 90, 1)), TypeError, "device must be a jaxkern.algorithms.Device or None, got tuple"),
        (dict(device=algorithms.Device(132, 9.0, 1)), TypeError, "device.compute_capability must be an int, got 9.0"),
        (dict(device=algorithms.Device(0, 90, 1)), ValueError, "device.sm_count must be positive, got 0"),
    ],
)
def test_bad_algorithm_query(problem, kind, words):
    problem = {"rows": 8, "width": 64, **problem}
    for name, ask in (
        ("choose", functools.partial(algorithms.choose, "softmax")),
        ("fits", functools.partial(algorithms.fits, "log_softmax", "warp")),
    ):
        with pytest.raises(kind) as error:
            ask(**problem)
        message = str(error.value)
        assert message.startswith(f"jaxkern.algorithms.{name}: {words}") and "\n" not in message, message


EDGES = (
    1,
    7,
    8,
    9,
    31,
    127,
    128,
    129,
    255,
    257,
    511,
    513,
    1000,
    1023,
    1025,
    2047,
    2049,
    4095,
    4097,
    8193,
    16384,
    16385,
    32767,
    50257,
    131080,
)


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("algorithm", algorithms.names("softmax"))
def test_every_algorithm(algorithm, dtype):
    """Each kernel where it fits, right and the same with a mask, at widths around every algorithm's edges."""
    ran = 0
    for width, operation in itertools.product(EDGES, OPERATIONS):
        rows = 5
        inner = 3 if algorithm == "strided" else 1
        fits = functools.partial(algorithms.fits, operation, algorithm, rows, width, inner, dtype=dtype)
        if not fits() or not fits(backward=True):
            continue
        with algorithms.force(**{operation: algorithm}):
            shape, axis = ((rows, width), 1) if inner == 1 else ((rows, width, inner), 1)
            check(operation, normal(shape, dtype), axis)
            # No hand-written gradient of log_softmax starts from a masked result.
            if algorithm != "by_hand" or operation == "softmax" or jnp.dtype(dtype).itemsize > 2:
                check(operation, normal(shape, dtype), axis, random_mask((1, *shape[1:])))
        ran += 1
    assert ran or not any(
        algorithms.fits("softmax", algorithm, 5, w, dtype=dtype) for w in EDGES
    )  # an algorithm of another device


@pytest.mark.gpu
def test_a_algorithm_that_does_not_fit_is_an_error():
    with algorithms.force(softmax="lanes"), pytest.raises(Exception, match="jaxkern.softmax.*lanes"):
        jax.block_until_ready(jaxkern.softmax(jnp.ones((2, 100_003))))


def test_backend_is_the_one_under_test():
    """No operation silently runs through XLA on CUDA."""
    if registry.kernels.module is None:
        pytest.skip(registry.kernels.reason)
    for dtype in ("float16", "bfloat16", "float32"):
        traced = jax.jit(jaxkern.softmax).trace(jnp.ones((3, 5), dtype))
        assert "jaxkern_softmax" in traced.lower(lowering_platforms=("cuda",)).as_text()
