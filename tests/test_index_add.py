"""index_add, index_select, embedding_lookup and the segment reductions: numbers, indices, bad input."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ON_GPU
from hypothesis import given, settings
from hypothesis import strategies as st
from indexed import (
    FLOATS,
    INDEX_DTYPES,
    INTEGERS,
    MEANS,
    REDUCTIONS,
    assert_reduced,
    assert_selected,
    check,
    every_dtype,
    every_reduction,
    indices,
    on_this_platform,
    run,
    scattered,
    values,
)
from reference import wide

import jaxkern
from jaxkern._core import compat

GatherScatterMode = jax.lax.GatherScatterMode


# ---- numbers

CASES = [  # shape, axis, count: what the ways through the kernels differ in
    ((5,), 0, 17),
    ((3, 4), 0, 1),
    ((7, 5), 1, 30),
    ((4, 33, 3), 1, 70),
    ((2, 3, 40, 130), 2, 50),
    ((2, 1000), 1, 5000),  # narrow
    ((60000, 4), 0, 40000),  # narrow, in buckets
    ((9, 2000), -1, 3000),
    ((100, 700), 0, 900),
    ((50000, 20), 0, 40),  # few rows of many
    ((6, 5001), 0, 300),  # wide and odd
]


@every_reduction
@every_dtype
@pytest.mark.parametrize("shape, axis, count", CASES)
@pytest.mark.sweep(5)
@pytest.mark.optimized
def test_against_numpy(operation, dtype, shape, axis, count):
    check(operation, dtype, shape, axis, count)


@every_reduction
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("kind", ["same", "zipf", "uniform", "sorted"])
@pytest.mark.parametrize("shape, count", [((300,), 9000), ((40, 24), 9000), ((300, 129), 5000)])
@pytest.mark.sweep(7)
def test_skew(operation, dtype, kind, shape, count):
    check(operation, dtype, shape, 0, count, kind, indices_are_sorted=kind == "sorted")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32"])
@pytest.mark.parametrize("width", [1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 257, 1091])
@pytest.mark.sweep(7)
def test_widths(dtype, width):
    for operation in ("index_add", "segment_max"):
        check(operation, dtype, (23, width), 0, 90)
    x, index = values((23, width), dtype), indices(23, 90)
    assert_selected(jaxkern.index_select(x, 0, index), x, index, 0)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize("alpha", [2, -3, 0])
def test_integral_alpha(dtype, alpha):
    check("index_add", dtype, (12, 30), 0, 40, alpha=alpha)


@pytest.mark.parametrize("dtype", FLOATS)
def test_alpha_is_applied_before_the_only_rounding(dtype):
    check("index_add", dtype, (12, 30), 1, 40, alpha=0.375)
    with compat.enable_x64(dtype == "float64"):
        x, source = jnp.ones((1,), dtype), jnp.full((1000,), 0.001, dtype)
        for alpha in (0.5, jnp.float32(0.5), np.float16(0.5)):
            found = jaxkern.index_add(x, 0, np.zeros(1000, np.int32), source, alpha=alpha)
            assert_reduced("index_add", found, x, np.zeros(1000, np.int32), source, alpha=0.5)


def test_sixteen_bits_do_not_saturate():
    """1 + 1 + ... stops at 256 in a bfloat16 that is rounded after every addition."""
    ids = jnp.zeros(10000, jnp.int32)
    assert jaxkern.segment_sum(jnp.ones(10000, jnp.bfloat16), ids, 1)[0] == 9984  # 10000, rounded
    assert jaxkern.segment_mean(jnp.full(10000, 60000, jnp.float16), ids, 1)[0] == 60000  # whose sum is infinite


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("rows, count, width", [(100, 3000, 32), (10, 20000, 1), (3, 5000, 100)])
@pytest.mark.optimized
def test_no_less_accurate_than_jax(dtype, rows, count, width):
    data, ids = values((count, width), dtype), indices(rows, count, kind="zipf")
    exact = scattered(np.add, np.zeros((rows, width), wide), ids.astype(np.int64), np.asarray(data).astype(wide))
    ours, theirs = (
        np.abs(np.asarray(f(data, ids, rows)).astype(wide) - exact).max()
        for f in (jaxkern.segment_sum, jax.ops.segment_sum)
    )
    # Half a unit of the largest result is what rounding costs either way.
    assert ours <= max(theirs, float(jnp.finfo(dtype).eps) * np.abs(exact).max() / 2), (ours, theirs)


@every_reduction
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape, count", [((50,), 20000), ((3000, 40), 8000), ((7, 3000), 500), ((90000, 2), 30000)])
@pytest.mark.sweep(3)
def test_bitwise_reproducible(operation, dtype, shape, count):
    x, source = values(shape, dtype), values((count, *shape[1:]), dtype, 2)
    index = indices(shape[0], count, kind="zipf")
    runs = {np.asarray(run(operation, x, index, source)).tobytes() for _ in range(4)}
    assert len(runs) == 1


def test_ids_of_few_bits():
    ids = jnp.array([0, 1, 1, -3]).astype("int4")
    assert jaxkern.segment_sum(jnp.arange(4.0), ids).tolist() == [0, 3]
    assert jaxkern.segment_sum(jnp.arange(4.0), ids, 3).tolist() == [0, 3, 0]


@pytest.mark.parametrize("operation", ["index_add", "segment_sum"])
@pytest.mark.parametrize("ascending", [False, True])
@pytest.mark.parametrize("width", [2, 16, 33, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int32"])
@pytest.mark.sweep(5)
def test_runs_of_every_length(operation, ascending, width, dtype):
    """Runs begin and end at every place of chunks and tiles, and some rows have no update."""
    rng = np.random.default_rng(0)
    lengths = [0, 0, 1, 2, 3, 4, 5, 8, 9, 12, 16, 17, 18, 20, 21, 22, 31, 33, 34, 35, 38, 51, 64, 69, 200, 900]
    lengths = rng.permutation(np.repeat(lengths, 6))
    index = np.repeat(np.arange(lengths.size, dtype=np.int32), lengths)
    if not ascending:
        index = rng.permutation(index)
    x, source = values((lengths.size, width), dtype), values((index.size, width), dtype, 2)
    runs = [run(operation, x, index, source, indices_are_sorted=ascending) for _ in range(2)]
    assert_reduced(operation, runs[0], x, index, source)
    assert np.asarray(runs[0]).tobytes() == np.asarray(runs[1]).tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("rows, width, count", [(5000, 1, 1024), (1200, 24, 1000), (2000, 7, 129)])
def test_few_updates(dtype, rows, width, count):
    """However many of them meet in a row or go nowhere, NaN, infinity and subnormal numbers among them."""
    x, source, rng = values((rows, width), dtype), np.array(values((count, width), dtype, 2)), np.random.default_rng(0)
    special = source.copy()
    special[3], special[5, 0], special[8] = jnp.finfo(dtype).smallest_subnormal * 3, np.nan, np.inf
    apart = rng.permutation(rows)[:count]
    pairs = rng.permutation(np.concatenate([apart[: count - count // 2], apart[: count // 2] - rows]))
    same = indices(rows, count, kind="same")
    for index in (apart, pairs, indices(rows, count), indices(40, count), same, apart + rows):
        index = index.astype(np.int32)
        for data in (source, special):
            runs = [run("index_add", x, index, data) for _ in range(3)]
            assert_reduced("index_add", runs[0], x, index, data)
            assert len({np.asarray(r).tobytes() for r in runs}) == 1
    if ON_GPU or dtype == "float16":  # XLA's threads take subnormal floats for 0
        found = np.asarray(run("index_add", jnp.zeros_like(x), apart.astype(np.int32), special))
        assert found[apart[3]].tobytes() == special[3].tobytes()


@every_reduction
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_propagate_as_in_jax(operation, bad):
    if operation != "index_add" and not hasattr(jax.ops, operation):
        pytest.skip("jax.ops has no such function")
    source = np.random.default_rng(0).normal(size=(40, 70)).astype(np.float32)
    source[5, 3], source[7, 69], source[8, 3] = bad, bad, 1
    index = indices(4, 40, kind="uniform")
    index[7] = 9  # goes nowhere
    x = np.zeros((4, 70), np.float32)
    theirs = x_at_add(x, index, source) if operation == "index_add" else getattr(jax.ops, operation)(source, index, 4)
    np.testing.assert_allclose(run(operation, x, index, source), theirs, rtol=1e-5, atol=1e-5)


def x_at_add(x, index, source, **options):
    return jnp.asarray(x).at[index].add(source, **options)


# ---- index_select and embedding_lookup


@every_dtype
@pytest.mark.parametrize("shape, axis, count", CASES)
@pytest.mark.parametrize("mode", [None, "clip"])
@pytest.mark.sweep(5)
@pytest.mark.optimized
def test_select_against_numpy(dtype, shape, axis, count, mode):
    with compat.enable_x64("64" in dtype):
        x, index = values(shape, dtype), indices(shape[axis], count)
        assert_selected(jaxkern.index_select(x, axis, index, mode=mode), x, index, axis, clip=mode == "clip")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64", "float8_e4m3fn"])
@pytest.mark.parametrize("ids_shape", [(), (7,), (2, 3, 4), (0,), (3, 0)])
def test_lookup_is_take(dtype, ids_shape):
    table = values((11, 6), "float32").astype(dtype)
    ids = jnp.asarray(np.random.default_rng(0).integers(-13, 14, ids_shape), jnp.int32)
    found, want = jaxkern.embedding_lookup(table, ids), jnp.take(table, ids, axis=0)
    assert found.dtype == want.dtype and found.shape == want.shape
    np.testing.assert_array_equal(np.asarray(found.astype(jnp.complex64)), np.asarray(want.astype(jnp.complex64)))


def test_gradient_of_a_lookup_is_written_once():
    """A segment_sum, not an index_add onto zeros that are written first."""
    table, ids = jnp.ones((20, 8)), jnp.arange(12).reshape(3, 4) % 5
    gradient = jax.grad(lambda t: (jaxkern.embedding_lookup(t, ids) ** 2).sum())
    text = str(jax.make_jaxpr(gradient)(table))
    assert "jaxkern_segment_sum" in text and "jaxkern_index_add" not in text and "jaxkern_index_select" in text
    np.testing.assert_array_equal(gradient(table), jax.grad(lambda t: (t[ids] ** 2).sum())(table))


# ---- indices


@every_reduction
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("rows", [5, 1000, 70000])
@pytest.mark.sweep(7)
def test_every_index_type(operation, index_dtype, x64, rows):
    """The extremes of the type among them; 8 bits may count into more rows than they can name."""
    with compat.enable_x64(x64):
        info = np.iinfo(index_dtype)
        index = np.random.default_rng(0).integers(-min(rows, -int(info.min)), min(2 * rows, int(info.max)), 50)
        extremes = np.array([info.min, info.max, 0, info.max - 1], index_dtype)
        index = np.concatenate([index.astype(index_dtype), extremes])
        x, source = jnp.zeros((rows, 3)), values((len(index), 3), "float32")
        assert_reduced(operation, run_eager(operation, x, index, source), x, index, source)
        x = values((rows, 3), "float32")
        assert_selected(jaxkern.index_select(x, 0, index), x, index, 0)


def run_eager(operation, x, index, source):
    if operation == "index_add":
        return jaxkern.index_add(x, 0, index, source)
    return getattr(jaxkern, operation)(source, index, x.shape[0])


@pytest.mark.parametrize("index", [2**31, 2**32 + 1, 2**33, -(2**32) + 1, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("x64", [False, True])
def test_indices_beyond_32_bits_go_nowhere(index, x64):
    with compat.enable_x64(x64):
        index = np.array([index, 1], np.int64)
        np.testing.assert_array_equal(jaxkern.segment_sum(jnp.ones(2), index, 3), [0, 1, 0])
        np.testing.assert_array_equal(jaxkern.index_add(jnp.zeros(3), 0, index, jnp.ones(2)), [0, 1, 0])
        assert np.isnan(jaxkern.embedding_lookup(jnp.ones(3), index)).tolist() == [True, False]


MODES = [
    None,
    "drop",
    "fill",
    "clip",
    "promise_in_bounds",
    *(m for m in GatherScatterMode if m.name in ("CLIP", "FILL_OR_DROP", "PROMISE_IN_BOUNDS")),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 6])
def test_modes_are_those_of_jax(mode, rows):
    promised = "promise" in str(mode).lower()
    index = jnp.asarray(indices(rows, 40) % rows if promised else indices(rows, 40))
    x, source = values((rows, 3), "float32"), values((40, 3), "float32", 2)
    same = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    same(jaxkern.index_add(x, 0, index, source, mode=mode), x.at[index].add(source, mode=mode))
    for name in ("segment_sum", "segment_max", "segment_min"):
        same(*(getattr(m, name)(source, index, rows, mode=mode) for m in (jaxkern, jax.ops)))
    same(jaxkern.index_select(x, 0, index, mode=mode), x.at[index].get(mode=mode or "fill"))


@every_reduction
@pytest.mark.parametrize("hint", ["sorted", "unique", "both"])
@pytest.mark.parametrize("width", [1, 33, 128])
@pytest.mark.sweep(5)
def test_hints_that_lie_touch_no_other_row(operation, hint, width):
    """Such sums may be wrong; rows that no index names are not, nor is what runs next."""
    rows, count = 4000, 9000
    index = indices(rows // 2, count, kind="uniform") * 2  # neither in order nor unique
    index[::7], index[::11] = 3 * rows + 1, -5 * rows
    x, source = values((rows, width), "float32"), values((count, width), "float32", 2)
    found = run(
        operation, x, index, source, lies=True, indices_are_sorted=hint != "unique", unique_indices=hint != "sorted"
    )
    assert found.shape == x.shape
    if operation == "index_add":
        np.testing.assert_array_equal(found[1::2], x[1::2])
    assert_reduced(operation, run(operation, x, index, source), x, index, source)


@pytest.mark.gpu
def test_more_than_2_31_elements():
    """Offsets into every array are wider than 32 bits."""
    rows, width, last = 2**21 + 7, 1032, 100
    place = jnp.arange(rows, dtype=jnp.int32) - (rows - last)
    large = jnp.broadcast_to(jnp.maximum(place, 0).astype(jnp.float16)[:, None], (rows, width)) + jnp.float16(0)
    assert large.size > 2**31
    ids = jnp.asarray([rows - 1, 0, rows - 50, -1], jnp.int32)
    selected = jaxkern.index_select(large, 0, ids)
    np.testing.assert_array_equal(selected, np.repeat([[99], [0], [50], [99]], width, 1))
    total = jaxkern.segment_sum(large, place % 50, 50)
    np.testing.assert_array_equal(total, np.repeat(2 * np.arange(50)[:, None] + 50, width, 1))
    for hints in ({}, {"indices_are_sorted": True}, {"unique_indices": True}):
        ends = jnp.asarray([0, rows - 2, rows - 1], jnp.int32)
        spread = jaxkern.segment_sum(selected[:3], ends, rows, **hints)
        assert int((spread != 0).sum(dtype=jnp.int32)) == 2 * width and (spread[ends] == selected[:3]).all()
        del spread
    add = jax.jit(lambda x, i, s: jaxkern.index_add(x, 0, i, s), donate_argnums=0)
    summed = add(large, jnp.tile(ids, 500), jnp.ones((2000, width), jnp.float16))
    np.testing.assert_array_equal(summed[ids], np.repeat([[1099], [500], [550], [1099]], width, 1))
    assert (summed[1 : rows - last] == 0).all()


@pytest.mark.gpu
def test_a_batch_of_more_rows_than_one_run_numbers():
    """Three slices of the batch are one run of the kernels, two another, which sorts fewer keys."""
    batch, rows, count = 5, 2**29, 1_100_000
    ids = np.random.default_rng(0).integers(0, rows, (batch, count), dtype=np.int32)
    ids[:, ::3] = ids[:, ::3] % 1000 + rows - 1000
    total = jax.vmap(lambda i: jaxkern.segment_sum(jnp.ones(count, jnp.float16), i, rows))(jnp.asarray(ids))
    for found, i in zip(total, ids, strict=True):
        touched, times = np.unique(i, return_counts=True)
        np.testing.assert_array_equal(found[touched], times)
        assert int((found != 0).sum(dtype=jnp.int32)) == len(touched)


@settings(max_examples=80 if ON_GPU else 48, deadline=None, derandomize=True)
@given(st.data())
def test_any_shape_axis_and_indices(data):
    shape = tuple(data.draw(st.lists(st.sampled_from((0, 1, 2, 3, 5, 17)), min_size=1, max_size=4), label="shape"))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1), label="axis")
    rows, count = shape[axis], data.draw(st.sampled_from((0, 1, 2, 7, 300)), label="count")
    hint = data.draw(st.sampled_from(("none", "sorted", "unique", "both")), label="hint")
    if hint in ("unique", "both"):
        count = min(count, rows)
        index = np.random.default_rng(count).permutation(rows)[:count]
    else:
        some = st.one_of(st.integers(-2 * rows - 1, 2 * rows), st.sampled_from((-(2**31), 2**31 - 1)))
        index = np.array(data.draw(st.lists(some, min_size=count, max_size=count), label="index"), np.int64)
        if hint == "sorted":
            index = np.sort(np.abs(index) % max(rows, 1))
    index = (np.sort(index) if hint == "both" else index).astype(np.int32)
    options = dict(indices_are_sorted=hint in ("sorted", "both"), unique_indices=hint in ("unique", "both"))
    dtype = data.draw(st.sampled_from(FLOATS + INTEGERS), label="dtype")
    operation = data.draw(st.sampled_from(REDUCTIONS), label="operation")
    if operation in MEANS and dtype in INTEGERS:
        operation = "segment_sum"
    axis %= len(shape)
    with compat.enable_x64("64" in dtype):
        x, source = values(shape, dtype), values((*shape[:axis], count, *shape[axis + 1 :]), dtype, 2)
        assert_reduced(operation, run(operation, x, index, source, axis, **options), x, index, source, axis)
        if rows:
            assert_selected(jaxkern.index_select(x, axis, index), x, index, axis)


@every_reduction
@pytest.mark.parametrize(
    "shape, count", [((4, 3), 0), ((0, 3), 5), ((4, 0), 5), ((0, 0), 0), ((0,), 0), ((2, 0, 3), 2)]
)
def test_empty(operation, shape, count):
    x, source = jnp.ones(shape, jnp.bfloat16), jnp.ones((count, *shape[1:]), jnp.bfloat16)
    index = indices(shape[0], count)
    found = run(operation, x, index, source)
    assert found.shape == shape
    identity = {"segment_max": -np.inf, "segment_min": np.inf, "index_add": 1, "segment_prod": 1}.get(operation, 0)
    if count == 0:
        assert (np.asarray(found) == identity).all()
    selected = jaxkern.index_select(x, 0, index)
    assert selected.shape == source.shape and (shape[0] != 0 or np.isnan(np.asarray(selected, np.float32)).all())
    gradient = jax.grad(lambda x: jaxkern.index_select(x, 0, index, mode="clip").astype(jnp.float32).sum())(x)
    assert gradient.shape == shape


# ---- like jax.ops


@pytest.mark.parametrize("name", ["segment_sum", "segment_max", "segment_min", "segment_prod"])
def test_segments_without_a_number(name):
    data, ids = values((9, 2), "float32"), np.array([0, 3, 1, 1, 0, 3, -1, 2, 2])
    ours, theirs = (getattr(m, name)(data, ids) for m in (jaxkern, jax.ops))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert getattr(jaxkern, name)(jnp.ones(0), jnp.zeros(0, int)).shape == (0,)
    assert jaxkern.segment_sum(jnp.ones(2), np.array([127, 0], np.int8)).shape == (128,)
    assert jaxkern.segment_sum(jnp.ones(2), np.array([-4, -2])).shape == (0,)


@pytest.mark.parametrize(
    "data_shape, ids_shape", [((1,), (6,)), ((), (4,)), ((3, 2), ()), ((1, 2), (5,)), ((3,), (2, 3))]
)
def test_segments_broadcast_as_in_jax(data_shape, ids_shape):
    data = values(data_shape, "float32")
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 3, ids_shape))
    try:
        want = jax.ops.segment_sum(data, ids, 3)
    except (ValueError, TypeError):
        with pytest.raises(ValueError, match="does not fit segment_ids"):
            jaxkern.segment_sum(data, ids, 3)
    else:
        np.testing.assert_allclose(jaxkern.segment_sum(data, ids, 3), want, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "bool", "complex64", "float8_e4m3fn", "uint64"])
def test_other_types_run_through_xla(dtype):
    with compat.enable_x64(dtype == "uint64"):
        data = jnp.asarray(np.random.default_rng(0).integers(0, 2, (30, 4)), jnp.float32).astype(dtype)
        ids = jnp.asarray(indices(5, 30))
        for name in ("segment_sum", "segment_max", "segment_min", "segment_prod"):
            if (dtype, name) in (
                ("bool", "segment_sum"),
                ("bool", "segment_prod"),
                ("complex64", "segment_max"),
                ("complex64", "segment_min"),
            ):
                continue  # neither library has these
            results = (getattr(m, name)(data, ids, 5).astype(jnp.complex64) for m in (jaxkern, jax.ops))
            np.testing.assert_array_equal(*map(np.asarray, results))


@pytest.mark.parametrize("bucket_size", [1, 7, 1000])
def test_buckets(bucket_size):
    data, ids = values((50, 3), "float32"), indices(6, 50, kind="uniform")
    ours, theirs = (m.segment_sum(data, ids, 6, bucket_size=bucket_size) for m in (jaxkern, jax.ops))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "x_dtype, source_dtype",
    [
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
        ("float32", "int32"),
        ("int32", "int8"),
        ("float16", "bfloat16"),
        ("float32", "bool"),
        ("int32", "uint8"),
    ],
)
def test_types_promote_as_in_jax(x_dtype, source_dtype):
    x, source = values((5, 4), "float32").astype(x_dtype), (values((9, 4), "float32", 2) * 3).astype(source_dtype)
    index = indices(5, 9, kind="uniform")
    ours, theirs = jaxkern.index_add(x, 0, index, source), x.at[index].add(source)
    assert ours.dtype == theirs.dtype
    np.testing.assert_allclose(*(np.asarray(a.astype(jnp.float32)) for a in (ours, theirs)), rtol=2e-2)


def test_strict_promotion_as_in_jax():
    x, index, ones = values((5, 4), "bfloat16"), jnp.arange(3), jnp.broadcast_to(1.0, (3, 4))
    with jax.numpy_dtype_promotion("strict"):
        np.testing.assert_array_equal(jaxkern.index_add(x, 0, index, ones), x.at[index].add(ones))
        assert jaxkern.segment_mean(index, index, 5).dtype == jnp.float32
        with pytest.raises(ValueError, match="promotion"):
            jaxkern.index_add(x, 0, index, jnp.ones((3, 4)))


@pytest.mark.parametrize("shape, alpha", [((), 1), ((5,), 0.5), ((4, 1), 1), ((1, 5), 0.5), ((1, 1), 1)])
def test_updates_broadcast_as_in_jax(shape, alpha, x64):
    x, index, source = values((3, 5), "float64"), jnp.array([2, 0, -1, 2]), values(shape, "float64", 2)
    ours = lambda x, s: jnp.sin(jaxkern.index_add(x, 0, index, s, alpha=alpha))
    theirs = lambda x, s: jnp.sin(x.at[index].add(alpha * s))
    both = lambda f: jax.jit(lambda x, s: (f(x, s), jax.jacrev(f, (0, 1))(x, s)))(x, source)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), both(ours), both(theirs))
    np.testing.assert_array_equal(jaxkern.index_add(x, 1, index, 1), x.at[:, index].add(1))  # a number


@pytest.mark.parametrize("mode", [None, "fill", "clip"])
@pytest.mark.parametrize("dtype", ["float32", "int32", "bool", "bfloat16"])
def test_fill_value_as_in_jax(dtype, mode):
    x, index = values((4, 3), "float32").astype(dtype), jnp.array([3, -1, 4, 0, -5, 2**31 - 1, -(2**31)])
    for fill in (0, -1.5):
        ours = jaxkern.index_select(x, 0, index, mode=mode, fill_value=fill)
        theirs = x.at[index].get(mode=mode or "fill", fill_value=fill)
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
        columns = jaxkern.index_select(x.T, 1, index, mode=mode, fill_value=fill)
        np.testing.assert_array_equal(columns, theirs.T)
        looked_up = jaxkern.embedding_lookup(x, index[None], fill_value=fill)
        np.testing.assert_array_equal(looked_up, jnp.take(x, index[None], axis=0, fill_value=fill))
    order = jaxkern.sort_indices(index, 4, wrap=True)
    ordered = jaxkern.index_select(x, 0, None, fill_value=2, order=order)
    np.testing.assert_array_equal(ordered, jnp.take(x, index, axis=0, fill_value=2))


def test_gradient_with_a_fill_value():
    x, index = values((4, 3), "float32"), jnp.array([3, 3, 9, -1])
    f = lambda x, fill: jnp.sin(jaxkern.index_select(x, 0, index, fill_value=fill)).sum()
    g = lambda x, fill: jnp.sin(jnp.where((index < 4)[:, None], x[index], fill)).sum()
    for ours, theirs in zip(*(jax.grad(h, (0, 1))(x, 0.3) for h in (f, g))):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("name", ["segment_sum", "segment_max", "segment_min", "segment_prod"])
def test_signatures_of_jax(name):
    ours, theirs = (list(inspect.signature(getattr(m, name)).parameters.values()) for m in (jaxkern, jax.ops))
    for mine, other in zip(ours, theirs):
        assert (mine.name, mine.kind, mine.default) == (other.name, other.kind, other.default)
    assert len(ours) >= len(theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "int8"])
def test_rows_that_nothing_goes_to_are_left_alone(dtype):
    """Whatever alpha: 0 * inf is NaN, and -0 + 0 is 0."""
    x, index = jnp.array([[-0.0, 1.0], [2.0, 3.0], [-0.0, 5.0]]).astype(dtype), jnp.array([1, 7, -4])
    alphas = jnp.array([3, -2]) if dtype == "int8" else jnp.array([jnp.inf, jnp.nan, 2.0])
    add = lambda alpha: jaxkern.index_add(x, 0, index, jnp.ones((3, 2), dtype), alpha=alpha)
    bits = lambda a: np.asarray(a[..., [0, 2], :]).tobytes()
    assert bits(jax.vmap(add)(alphas)) == b"".join(bits(add(a)) for a in alphas) == len(alphas) * bits(x)


def test_numpy_and_scalars_are_arrays():
    assert jaxkern.index_add(np.zeros(3), 0, np.array([1]), np.ones(1)).tolist() == [0, 1, 0]
    scaled = jaxkern.index_add(jnp.zeros(3), np.int64(-1), np.array([1]), np.ones(1), alpha=np.float64(2))
    assert scaled.tolist() == [0, 2, 0]
    assert jaxkern.embedding_lookup(jnp.arange(3), 1) == 1


# ---- what XLA makes of it


def test_donated_x_is_updated_in_place():
    on_this_platform()
    x, index, source = jnp.ones((500, 64)), jnp.zeros(7, jnp.int32), jnp.ones((7, 64))
    f = jax.jit(lambda x, i, s: jaxkern.index_add(x, 0, i, s), donate_argnums=0)
    compiled = f.lower(x, index, source).compile()
    text = compiled.as_text()
    assert "input_output_alias={ {}: (0, {}, may-alias)" in text.replace("must-alias", "may-alias"), text
    assert "copy(" not in text and text.count("jaxkern_index_add") >= 1
    where = x.unsafe_buffer_pointer()
    y = f(x, index, source)
    assert x.is_deleted() and y.unsafe_buffer_pointer() == where
    assert y[0, 0] == 8 and y[1, 0] == 1


def test_what_is_not_donated_is_left_alone():
    x = jnp.ones((50, 4))
    f = jax.jit(lambda x: (jaxkern.index_add(x, 0, jnp.zeros(3, jnp.int32), jnp.ones((3, 4))), x))
    y, same = f(x)
    assert (x == 1).all() and (same == 1).all() and y[0, 0] == 4


def test_backend_is_the_one_under_test():
    """On a machine with both modules no operation silently runs through XLA."""
    on_this_platform()
    index = jnp.zeros(3, jnp.int8)
    for dtype in ("float16", "bfloat16", "float32", "int32", "uint32"):
        x = jnp.ones((3, 5), dtype)
        for name, f in {
            "index_add": lambda x: jaxkern.index_add(x, 0, index, x),
            "index_select": lambda x: jaxkern.index_select(x, 0, index),
            **{
                n: functools.partial(getattr(jaxkern, n), segment_ids=index, num_segments=4)
                for n in ("segment_sum", "segment_max", "segment_min")
            },
        }.items():
            assert f"jaxkern_{name}" in jax.jit(f).lower(x).as_text()


@pytest.mark.parametrize("ids", [[0, 0, 1, 1, 1, 3, 3, -1, 9], [2] * 9, [3, 1, 0, 2, -1, 4, 9, 5, 7]], ids=str)
def test_derivatives_of_products(ids, x64):
    """Rows have zeros (one, two and three in a segment), negative numbers, or no segment."""
    data = np.random.default_rng(0).normal(size=(9, 4))
    data[[0, 2, 3, 5, 8], 1] = 0
    data[:, 2] = 0
    data, ids = jnp.asarray(data), jnp.array(ids)
    ours = lambda x: jnp.sin(jaxkern.segment_prod(x, ids, 5))
    theirs = lambda x: jnp.sin(jnp.where((ids == jnp.arange(5)[:, None])[..., None], x, 1).prod(1))
    for f, g in (
        (ours, theirs),
        *((d(ours), d(theirs)) for d in (jax.jacrev, jax.jacfwd)),
        *(((lambda x, h=h: jax.hessian(lambda x: h(x).sum())(x)) for h in (ours, theirs)),),
    ):
        np.testing.assert_allclose(jax.jit(f)(data), jax.jit(g)(data), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("bucket_size", [1, 7, 1000])
def add(x=((3, 4), "float32"), axis=0, index=((2,), "int32"), source=((2, 4), "float32"), **options):
    one = lambda a: jnp.ones(*a) if isinstance(a, tuple) else a
    return lambda: jaxkern.index_add(one(x), axis, one(index), one(source), **options)


def total(data=((2, 4), "float32"), ids=((2,), "int32"), n=3, **options):
    one = lambda a: jnp.ones(*a) if isinstance(a, tuple) else a
    return lambda: jaxkern.segment_sum(one(data), one(ids), n, **options)


@pytest.mark.parametrize(
    "call, kind, words",
    [
        (add(index=((2,), "float32")), TypeError, ["index_add: index must be of an integer type", "float32[2]"]),
        (add(index=((2,), "bool")), TypeError, ["index must be of an integer type", "bool[2]"]),
        (add(index=((2, 1), "int32")), ValueError, ["index must have one dimension", "(2, 1)"]),
        (add(index=[0, 1]), TypeError, ["index must be an array", "list"]),
        (add(x=[1.0]), TypeError, ["x must be an array", "list"]),
        (add(source=((2, 5), "float32")), ValueError, ["source must broadcast to (2, 4)", "(3, 4)", "(2,)", "(2, 5)"]),
        (add(source=((3, 4), "float32")), ValueError, ["source must broadcast to (2, 4)", "(3, 4)"]),
        (add(source=((1, 2, 4), "float32")), ValueError, ["source must broadcast to (2, 4)", "(1, 2, 4)"]),
        (add(axis=2), ValueError, ["axis 2 is out of bounds", "(3, 4)"]),
        (add(axis=-3), ValueError, ["axis -3 is out of bounds", "(3, 4)"]),
        (add(axis=0.0), TypeError, ["axis must be an int", "0.0"]),
        (add(axis=True), TypeError, ["axis must be an int", "True"]),
        (add(x=1.0), ValueError, ["axis 0 is out of bounds", "()"]),
        (add(mode="wrap"), ValueError, ["mode", "'wrap'", "'clip'"]),
        (add(mode=["clip"]), ValueError, ["mode", "['clip']"]),
        (add(mode=GatherScatterMode.ONE_HOT), ValueError, ["mode", "ONE_HOT"]),
        (add(x=((3, 4), "int32")), TypeError, ["source of type float32", "int32"]),
        (add(source=((2, 4), "complex64")), TypeError, ["source of type complex64", "float32"]),
        (add(alpha=jnp.ones(2)), ValueError, ["alpha must be a scalar", "(2,)"]),
        (add(alpha=1j), TypeError, ["alpha of type complex64", "float32"]),
        (add(alpha=1 + 0j), TypeError, ["alpha of type complex64", "float32"]),
        (add(x=((3, 4), "int32"), source=((2, 4), "int32"), alpha=1.0), TypeError, ["alpha of type float32", "int32"]),
        (add(x=((3, 4), "int32"), source=((2, 4), "int32"), alpha=0.5), TypeError, ["alpha of type float32", "int32"]),
        (add(x=jax.random.key(0)), TypeError, ["x must be an array", "key"]),
        (
            total(ids=((2,), "float32")),
            TypeError,
            ["segment_sum: segment_ids must be of an integer type", "float32[2]"],
        ),
        (total(ids=((2,), "float32"), n=None), TypeError, ["segment_ids must be of an integer type", "float32[2]"]),
        (total(ids=((3,), "int32")), ValueError, ["(2, 4)", "(3,)"]),
        (total(data=((2, 4), "bool")), TypeError, ["segment_sum: data must not be boolean", "bool[2, 4]"]),
        (add(x=((3, 4), "bool")), TypeError, ["x must not be boolean", "bool[3, 4]"]),
        (total(n=-1), ValueError, ["num_segments must not be negative", "-1"]),
        (total(n=2.5), TypeError, ["num_segments must be an int", "2.5"]),
        (total(bucket_size=0), ValueError, ["bucket_size", "0"]),
        (total(mode="no"), ValueError, ["mode", "'no'"]),
        (total(ids=None, n=None), TypeError, ["segment_ids must be an array", "got None"]),
        (total(ids=np.array([0, 2**40]), n=None), ValueError, ["num_segments must be at most", "1099511627777"]),
        (total(n=2**70), ValueError, ["num_segments must be at most", str(2**70)]),
        (total(bucket_size=1.5), TypeError, ["bucket_size must be an int", "1.5"]),
        (
            lambda: jax.jit(jaxkern.segment_sum)(jnp.ones(3), jnp.zeros(3, int)),
            TypeError,
            ["num_segments must be given", "int32[3]"],
        ),
        (
            lambda: jax.jit(jaxkern.segment_sum)(jnp.ones(3), jnp.zeros(3, int), 4),
            TypeError,
            ["num_segments must be an int"],
        ),
        (
            lambda: jaxkern.embedding_lookup(jnp.ones((3, 2)), jnp.ones(2)),
            TypeError,
            ["embedding_lookup: ids", "float32[2]"],
        ),
        (lambda: jaxkern.embedding_lookup(jnp.ones(()), jnp.ones(2, int)), ValueError, ["table", "()"]),
        (
            lambda: jaxkern.index_select(jnp.ones(3), 0, jnp.ones(2, int), fill_value=jnp.ones(1)),
            ValueError,
            ["index_select: fill_value must be a scalar", "(1,)"],
        ),
        (
            lambda: jaxkern.embedding_lookup(jnp.ones(3), jnp.ones(2, int), fill_value="0"),
            TypeError,
            ["embedding_lookup: fill_value must be a number", "str"],
        ),
        (lambda: jaxkern.index_select(jnp.ones(3), 1, jnp.ones(2, int)), ValueError, ["index_select: axis 1", "(3,)"]),
        (
            lambda: jaxkern.index_select(jnp.ones(3), 0, jnp.ones((), int)),
            ValueError,
            ["index must have one dimension", "()"],
        ),
    ],
)
def test_bad_input(call, kind, words):
    with pytest.raises(kind) as error:
        call()
    message = str(error.value)
    assert message.startswith("jaxkern.") and all(word in message for word in words), message
