"""segment_softmax: numbers, ids, special values, transformations, bad input, plans."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ON_GPU
from hypothesis import given, settings
from hypothesis import strategies as st
from indexed import INDEX_DTYPES, indices, numpy_rows, on_this_platform, scattered, values
from jax import export
from reference import DTYPES, assert_rounded, wide

import jaxkern
from jaxkern import algorithms
from jaxkern._core import compat, registry
from jaxkern._ops.indexing.primitive import Rules
from jaxkern._ops.segment_softmax.primitive import segment_softmax_grad_p

KERNELS = ON_GPU and registry.kernels.module is not None
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


# ---- the operation in numpy


def of_segments(x, at, rows, method, start):
    """method over the segment of each row, for each row; `start` where it is of none."""
    total = scattered(method, np.full((rows, *x.shape[1:]), start, wide), at, x)
    return np.where((at >= 0).reshape(-1, *[1] * (x.ndim - 1)), total[np.maximum(at, 0)] if rows else start, start)


def sum_error(at, rank):
    """Epsilons lost in the sum over each row's segment: in a few interleaved parts, or by XLA one element after the other."""
    _, segment, count = np.unique(at, return_inverse=True, return_counts=True)
    count = count[segment].reshape(-1, *[1] * (rank - 1))
    return 1 + (np.sqrt(count) / 8 if KERNELS else count / 2)


def softmax(x, at, rows):
    """(result, error bound of the arithmetic in epsilons), of x along its first dimension; `at`: -1 for no segment."""
    x = np.asarray(x).astype(wide)
    with np.errstate(all="ignore"):
        largest = of_segments(x, at, rows, np.maximum, -np.inf)
        shifted = x - np.where(largest == -np.inf, 0, largest)
        e = np.where((at >= 0).reshape(-1, *[1] * (x.ndim - 1)), np.exp(shifted), 0)
        total = of_segments(e, at, rows, np.add, 0)
        y = e / np.where(total == 0, 1, total)
        distance = np.where(np.isfinite(shifted), np.abs(shifted), 0)
    return y, y * (distance / 2 + 4 + sum_error(at, x.ndim))


def gradient(y, g, at, rows):
    """The gradient by NumPy, from the result as it was rounded."""
    y, g = (np.asarray(a).astype(wide) for a in (y, g))
    with np.errstate(all="ignore"):
        product = np.where(y == 0, 0, y * g)
        dx = np.where(y == 0, 0, y * (g - of_segments(product, at, rows, np.add, 0)))
        size = of_segments(np.abs(product), at, rows, np.add, 0)
        slack = np.where(y == 0, 0, 2 * np.abs(y) * (np.abs(g) + (1 + sum_error(at, y.ndim)) * size))
    return dx, slack


@functools.cache  # so that the same shapes compile once
def both(rows, **options):
    def f(x, ids, g):
        y, pull = jax.vjp(lambda x: jaxkern.segment_softmax(x, ids, rows, **options), x)
        return y, pull(g)[0]

    return jax.jit(f)


def check(dtype, shape, rows, ids, x=None, clip=False, **options):
    with compat.enable_x64(dtype == "float64" or np.asarray(ids).dtype.itemsize == 8):
        x = 3 * values(shape, dtype) if x is None else x
        g = values(shape, dtype, 2)
        y, dx = both(rows, **options)(x, ids, g)
        at = numpy_rows(ids, rows, wrap=False, clip=clip)
        assert_rounded(y, *softmax(x, at, rows), dtype)
        assert_rounded(dx, *gradient(y, g, at, rows), dtype)
        return y, dx


# ---- numbers

CASES = [  # shape, segments: what the ways through the kernels differ in
    ((17,), 5),
    ((1, 4), 3),
    ((5000, 1), 60),
    ((5000, 3), 700),  # narrow
    ((3000, 8), 100),
    ((900, 5, 7), 40),  # a warp per chunk, of vectors and of elements
    ((700, 64), 30),
    ((400, 33), 1000),  # strips; column tiles of a tile, for short segments
    ((300, 257), 1),  # one long segment
    ((20000, 9), 3),  # long segments over many chunks
]


@every_dtype
@pytest.mark.parametrize("shape, rows", CASES)
@pytest.mark.sweep(3)
@pytest.mark.optimized
def test_against_numpy(dtype, shape, rows):
    check(dtype, shape, rows, indices(rows, shape[0]))
    check(dtype, shape, rows, indices(rows, shape[0], kind="sorted"), indices_are_sorted=True)


def test_unique_ids_need_not_ascend():
    """Nor be unique once they are clipped; second derivatives go by way of the segments."""
    count = 3000
    ids = np.random.default_rng(0).permutation(count).astype(np.int32)
    check("float32", (count, 3), count, ids, unique_indices=True)
    check("float32", (3, 2), 4, np.array([-1, 3, -2], np.int32), clip=True, unique_indices=True, mode="clip")
    f = lambda x, **promise: jnp.sum(jnp.sin(jaxkern.segment_softmax(x, ids, count, **promise)) * x)
    x = values((count, 3), "float32")
    product = lambda **promise: jax.jvp(jax.grad(functools.partial(f, **promise)), (x,), (jnp.cos(x),))[1]
    np.testing.assert_array_equal(product(unique_indices=True), product())


@pytest.mark.parametrize("kind", ["same", "zipf", "uniform", "unique", "half", "none"])
@pytest.mark.parametrize("width, rows", [(1, 400), (8, 3000), (40, 300)])
def test_skew(kind, width, rows):
    """Any distribution of the lengths of segments, sorted and not; the results are the same bits."""
    count = 2600
    if kind == "unique":
        ids = np.random.default_rng(0).permutation(max(count, rows))[:count].astype(np.int32)
    elif kind == "none":
        ids = np.full(count, rows, np.int32)
    else:
        ids = indices(rows, count, kind=kind if kind != "half" else "uniform")
        ids[:: 2 if kind == "half" else count] = rows // 2
    x = 3 * values((count, width), "float32")
    check("float32", x.shape, rows, ids, x)
    order = np.argsort(ids, kind="stable")
    sorted_y, sorted_dx = check("float32", x.shape, rows, ids[order], x[order], indices_are_sorted=True)
    y, dx = both(rows)(x, ids, values(x.shape, "float32", 2)[np.argsort(order, kind="stable")])
    if not ON_GPU and width <= 8:
        return  # narrow rows are added up in the order that they lie in
    np.testing.assert_array_equal(y[order], sorted_y)
    np.testing.assert_array_equal(dx[order], sorted_dx)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_larger_an_error_than_jnp(dtype):
    count, rows, width = 20000, 300, 12
    x, ids = 3 * values((count, width), dtype), indices(rows, count, kind="zipf")

    def plain(x, ids, g):
        def f(x):
            e = jnp.exp(x - jax.ops.segment_max(x, ids, rows)[ids])
            return e / jax.ops.segment_sum(e, ids, rows)[ids]

        y, pull = jax.vjp(f, x)
        return y, pull(g)[0]

    g = values(x.shape, dtype, 2)
    at = numpy_rows(ids, rows, wrap=False)
    exact, _ = softmax(x, at, rows)
    exact_dx, _ = gradient(exact, g, at, rows)
    ours, theirs = both(rows)(x, ids, g), jax.jit(plain)(x, ids, g)
    for found, wanted, by_jnp in zip(ours, (exact, exact_dx), theirs):
        error, allowed = (np.abs(np.asarray(a).astype(wide) - wanted) for a in (found, by_jnp))
        assert error.mean() <= allowed.mean() * 1.01 and error.max() <= allowed.max() * 1.01


def test_the_same_bits_every_time():
    x, ids = values((9000, 20), "float32"), indices(50, 9000, kind="zipf")
    g = values(x.shape, "float32", 2)
    first, *others = ([np.asarray(a).tobytes() for a in both(50)(x, ids, g)] for _ in range(3))
    assert all(other == first for other in others)


# ---- ids


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("mode", [None, "clip"])
def test_every_type_of_id(index_dtype, mode):
    """Ids are out of range by a little, and by as much as their type allows."""
    info = np.iinfo(index_dtype)
    ids = np.array([info.max, 3, 0, info.min, 5, 4, 0, 3, info.max, 100], index_dtype)
    for order in (np.arange(ids.size), np.argsort(ids, kind="stable")):
        check("float32", (10, 6), 5, ids[order], clip=mode == "clip", mode=mode, indices_are_sorted=bool(order[0]))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_properties(data):
    """Each segment and column sums to 1; adding to a column changes nothing; a permutation permutes."""
    rows, kind = data.draw(st.sampled_from((1, 20, 500))), data.draw(st.sampled_from(("wild", "zipf", "uniform")))
    seed, shift = data.draw(st.integers(0, 1000)), data.draw(st.integers(-30, 30))
    ids, x = indices(rows, 600, seed, kind), values((600, 5), "float32", seed)
    f = jax.jit(lambda x, ids: jaxkern.segment_softmax(x, ids, rows))
    y, at = np.asarray(f(x, ids)), numpy_rows(ids, rows, wrap=False)
    sums = scattered(np.add, np.zeros((rows, 5), wide), at, y.astype(wide))
    np.testing.assert_allclose(sums[np.unique(at[at >= 0])], 1, atol=2e-5)
    assert (y[at < 0] == 0).all() and (y >= 0).all()
    np.testing.assert_allclose(f(x + shift, ids), y, rtol=3e-5, atol=1e-7)
    order = np.random.default_rng(seed).permutation(600)
    np.testing.assert_allclose(f(x[order], ids[order]), y[order], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("shape, rows", [((0, 3), 4), ((5, 0), 4), ((5, 3), 0), ((0, 0), 0), ((0,), 0), ((2, 0, 3), 2)])
def test_empty(shape, rows):
    x, ids = jnp.ones(shape, jnp.bfloat16), np.zeros(shape[0], np.int32)
    y, dx = both(rows)(x, ids, x)
    assert y.shape == dx.shape == shape and y.dtype == jnp.bfloat16
    assert not np.asarray(y).any() and not np.asarray(dx).any()
    assert jaxkern.segment_softmax(jnp.ones(0), jnp.zeros(0, int)).shape == (0,)


def test_without_a_number():
    ids = np.array([2, 0, 2, -1])
    np.testing.assert_allclose(jaxkern.segment_softmax(jnp.zeros(4), ids), [0.5, 1, 0.5, 0])
    np.testing.assert_array_equal(jaxkern.segment_softmax(jnp.zeros(2), np.array([-4, -2])), [0, 0])


def test_shapes_broadcast_as_in_segment_sum():
    ids = np.array([[0, 1, 0], [1, 1, 2]])
    np.testing.assert_allclose(jaxkern.segment_softmax(jnp.zeros(()), ids, 3), [[0.5, 1 / 3, 0.5], [1 / 3, 1 / 3, 1]])
    assert jaxkern.segment_softmax(jnp.zeros((1, 4)), np.zeros(3, int), 1).tolist() == [[np.float32(1 / 3)] * 4] * 3


# ---- special values


SIZES = [(60, 3), (60, 20), (1500, 17)]


@pytest.mark.parametrize(
    "dtype, ordered, count, width",
    [
        (dtype, ordered, *size)
        for n, dtype in enumerate(DTYPES)
        for k, size in enumerate(SIZES)
        for ordered in (False, True)
        if ON_GPU or ordered == (n + k) % 2  # each with every other, not every three
    ],
)
@pytest.mark.optimized
def test_special_values(dtype, ordered, count, width):
    """-inf weighs nothing; NaN and infinity stay in their segment and column; as the composition in jnp."""
    with compat.enable_x64(dtype == "float64"):
        rows = 5
        ids = np.arange(count) * rows // count if ordered else np.arange(count) % rows
        x = np.array(values((count, width), dtype))
        x[ids == 1, 0] = -np.inf  # a column of a segment is dead
        x[np.flatnonzero(ids == 2)[1], 1] = np.nan
        x[np.flatnonzero(ids == 3)[0], 2] = np.inf
        x[np.flatnonzero(ids == 4)[::2]] = -np.inf
        g = np.array(values((count, width), dtype, 2))
        g[np.flatnonzero(ids == 4)[::2]] = np.nan  # beside a weight of 0
        g[ids == 1, 0] = np.inf
        y, dx = map(np.asarray, both(rows, indices_are_sorted=ordered)(jnp.asarray(x), ids, jnp.asarray(g)))
        assert not y[ids == 1, 0].any() and not dx[ids == 1, 0].any()
        for segment, column in ((2, 1), (3, 2)):
            for found in (y, dx):
                nan = np.isnan(found[ids == segment].astype(np.float64))
                assert nan[:, column].any() and not np.delete(nan, column, 1).any()
        assert np.isnan(y[ids == 2, 1].astype(np.float64)).all()
        assert not y[ids == 4][::2].any() and not dx[ids == 4][::2].any()
        at = numpy_rows(ids, rows, wrap=False)
        fine = np.isin(ids, (0, 1, 4))
        for found, (want, slack) in ((y, softmax(x, at, rows)), (dx, gradient(y, g, at, rows))):
            assert_rounded(found[fine], want[fine], slack[fine], dtype)


@pytest.mark.optimized
def test_large_values_do_not_overflow():
    for dtype, large in (("float32", 1e38), ("bfloat16", 3e38), ("float16", 6e4)):
        x = jnp.asarray([large, -large, large, 0, -large, -large], dtype)[:, None] * jnp.ones(20, dtype)
        y = jaxkern.segment_softmax(x, np.array([0, 0, 0, 0, 1, 1]), 2)
        np.testing.assert_array_equal(y[:, 7].astype(jnp.float32), [0.5, 0, 0.5, 0, 0.5, 0.5])


# ---- transformations


IDS = np.array([0, 2, 2, -1, 1, 0, 2, 5, 4, 2, 1, 9], np.int32)


def plain(x, ids, rows, axis=0):
    """The operation in jnp along an axis, differentiable to any order; 0 where there is no segment."""
    one_hot = (ids[:, None] == np.arange(rows)).astype(x.dtype)
    x = jnp.moveaxis(x, axis, 0)
    of = lambda total: jnp.tensordot(one_hot, total, 1)
    inside = jnp.asarray(one_hot.any(1)).reshape(-1, *[1] * (x.ndim - 1))
    e = jnp.where(inside, jnp.exp(x), 0)
    return jnp.moveaxis(e / jnp.where(inside, of(jnp.tensordot(one_hot.T, e, 1)), 1), 0, axis)


def test_vmap_in_every_way(x64):
    """Data, ids or both, along any dimension, and nested; no more than one call each."""
    rng = np.random.default_rng(0)
    f = lambda x, ids: jaxkern.segment_softmax(x, ids, 6)
    x, ids = jnp.asarray(rng.normal(size=(12, 3, 4))), IDS
    for at in range(3):
        y = jax.vmap(f, (at, None), at)(jnp.moveaxis(jnp.stack([x, -x]), 0, at), ids)
        np.testing.assert_allclose(jnp.moveaxis(y, at, 0), [plain(x, ids, 6), plain(-x, ids, 6)], rtol=1e-12)
    many = np.stack([IDS, IDS[::-1], np.sort(IDS)])
    want = np.stack([plain(x, i, 6) for i in many])
    for at in range(2):
        y = jax.vmap(f, (None, at))(x, np.moveaxis(many, 0, at))
        np.testing.assert_allclose(y, want, rtol=1e-12)
    np.testing.assert_allclose(jax.vmap(f, (1, 0), 1)(jnp.stack([x] * 3, 1), many), np.moveaxis(want, 0, 1), rtol=1e-12)
    nested = jax.vmap(jax.vmap(f, (2, None), 2), (None, 0))  # outer: ids; inner: a dimension of the data
    np.testing.assert_allclose(nested(x, many), want, rtol=1e-12)
    lead = jax.vmap(jax.vmap(f, (0, None)), (0, 0))(jnp.stack([jnp.stack([x, 2 * x])] * 3), many)
    np.testing.assert_allclose(lead[:, 0], want, rtol=1e-12)
    np.testing.assert_allclose(lead[2, 1], plain(2 * x, many[2], 6), rtol=1e-12)
    text = jax.jit(lambda x, i: jax.vmap(f, (None, 0))(x, i)).lower(x, many).as_text()
    assert text.count("jaxkern_segment_softmax") <= 2  # the call and its comment at most


def test_derivatives_of_any_order(x64):
    rng = np.random.default_rng(1)
    x, t = (jnp.asarray(rng.normal(size=(12, 3))) for _ in range(2))
    of = lambda softmax: lambda x: jnp.sum(jnp.sin(3 * softmax(x)) * t)
    ours, theirs = of(lambda x: jaxkern.segment_softmax(x, IDS, 6)), of(lambda x: plain(x, IDS, 6))
    hvp = lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (t,))[1]
    third = lambda f: lambda x: jax.grad(lambda x: jnp.sum(hvp(f)(x) * t))(x)
    everything = lambda f: jax.jit(lambda x: (jax.grad(f)(x), jax.jvp(f, (x,), (t,)), jax.hessian(f)(x), third(f)(x)))(
        x
    )
    for found, want in zip(*map(jax.tree.leaves, (everything(ours), everything(theirs)))):
        np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-12)
    assert float(jnp.abs(everything(ours)[3]).max()) > 1e-2


def test_gradient_is_linear_in_the_cotangent_and_its_own_transpose():
    y = jaxkern.segment_softmax(values((50, 3), "float32"), indices(7, 50, kind="uniform"), 7)
    ids = jnp.asarray(indices(7, 50, kind="uniform"))
    rules = Rules(0)
    pull = lambda g: segment_softmax_grad_p.bind(y, g, ids, rows=7, rules=rules)
    a, b = values((50, 3), "float32", 3), values((50, 3), "float32", 4)
    np.testing.assert_allclose(pull(2 * a - b), 2 * pull(a) - pull(b), atol=1e-6)
    (transposed,) = jax.linear_transpose(pull, a)(b)
    np.testing.assert_array_equal(transposed, pull(b))


def test_one_kernel_forward_and_one_backward():
    on_this_platform()
    x, ids = jnp.ones((40, 8)), jnp.zeros(40, jnp.int8)
    for dtype in ("float16", "bfloat16", "float32"):
        text = (
            jax.jit(jax.grad(lambda x: jnp.sin(jaxkern.segment_softmax(x, ids, 4)).sum()))
            .lower(x.astype(dtype))
            .as_text()
        )
        assert text.count("@jaxkern_segment_softmax(") == text.count("@jaxkern_segment_softmax_grad(") == 1
        assert "scatter" not in text and "gather" not in text


def test_donated_and_exported():
    x, ids = values((30, 4), "float32"), indices(6, 30)
    want = np.asarray(jaxkern.segment_softmax(x, ids, 6))
    f = lambda x, ids: jaxkern.segment_softmax(x, ids, 6)
    np.testing.assert_array_equal(jax.jit(f, donate_argnums=0)(x + 0, ids), want)
    exported = export.export(jax.jit(f), disabled_checks=jaxkern.export_checks())(x, ids)
    np.testing.assert_array_equal(exported.call(x, ids), want)
    n, m = export.symbolic_shape("n, m")
    spec = jax.ShapeDtypeStruct((n, m), jnp.float32), jax.ShapeDtypeStruct((n,), jnp.int32)
    for g in (f, lambda x, ids: jaxkern.segment_softmax(x, ids, x.shape[0])):  # a number that is symbolic too
        anything = export.export(jax.jit(g), disabled_checks=jaxkern.export_checks())(*spec)
        np.testing.assert_allclose(anything.call(x, ids), g(x, ids), rtol=1e-6)


def test_numbers_of_other_types():
    ids = indices(5, 40)
    whole = jnp.arange(40, dtype=jnp.int32).reshape(40, 1) % 7
    np.testing.assert_array_equal(
        jaxkern.segment_softmax(whole, ids, 5), jaxkern.segment_softmax(whole.astype(jnp.float32), ids, 5)
    )
    small = values((40, 3), "float32").astype(jnp.float8_e4m3fn)
    y = jaxkern.segment_softmax(small, ids, 5)
    assert y.dtype == small.dtype
    want, _ = softmax(small.astype(jnp.float32), numpy_rows(ids, 5, wrap=False), 5)
    np.testing.assert_allclose(y.astype(jnp.float32), want.astype(np.float32), rtol=0.07, atol=2e-3)


# ---- bad input


def call(data=((2, 4), "float32"), ids=((2,), "int32"), n=3, **options):
    one = lambda a: jnp.ones(*a) if isinstance(a, tuple) else a
    return lambda: jaxkern.segment_softmax(one(data), one(ids), n, **options)


@pytest.mark.parametrize(
    "call, kind, words",
    [
        (call(ids=((2,), "float32")), TypeError, ["segment_ids must be of an integer type", "float32[2]"]),
        (call(ids=((2,), "bool")), TypeError, ["segment_ids must be of an integer type", "bool[2]"]),
        (call(ids=((2,), "float32"), n=None), TypeError, ["segment_ids must be of an integer type", "float32[2]"]),
        (call(ids=[0, 1]), TypeError, ["segment_ids must be an array", "list"]),
        (call(data=[1.0, 2.0]), TypeError, ["data must be an array", "list"]),
        (call(ids=((3,), "int32")), ValueError, ["(2, 4)", "(3,)"]),
        (call(data=((2, 4), "bool")), TypeError, ["data must be real", "bool[2, 4]"]),
        (call(data=((2, 4), "complex64")), TypeError, ["data must be real", "complex64[2, 4]"]),
        (call(n=-1), ValueError, ["num_segments must not be negative", "-1"]),
        (call(n=2.5), TypeError, ["num_segments must be an int", "2.5"]),
        (call(mode="wrap"), ValueError, ["mode", "'wrap'", "'clip'"]),
        (
            lambda: jax.jit(jaxkern.segment_softmax)(jnp.ones(3), jnp.zeros(3, int)),
            TypeError,
            ["num_segments must be given", "int32[3]"],
        ),
        (
            lambda: jax.jit(jaxkern.segment_softmax)(jnp.ones(3), jnp.zeros(3, int), 4),
            TypeError,
            ["num_segments must be an int"],
        ),
    ],
)
def test_bad_input(call, kind, words):
    with pytest.raises(kind) as error:
        call()
    message = str(error.value)
    assert message.startswith("jaxkern.segment_softmax: ") and all(word in message for word in words), message


# ---- algorithms


def test_algorithms():
    problem = dict(rows=50_000, count=1_166_243, inner=8, operation="segment_softmax")
    assert algorithms.choose(**problem) == "sort" and not algorithms.fits(algorithm="sorted", **problem)
    assert algorithms.choose(**problem, sorted=True) == "sorted"
    with algorithms.force(segment_softmax="sort"):
        text = str(jax.make_jaxpr(lambda x: jaxkern.segment_softmax(x, IDS, 5))(jnp.ones(12)))
    assert "plan='sort'" in text
    with algorithms.force(segment_sum="narrow"):  # another operation's
        assert "plan='auto'" in str(jax.make_jaxpr(lambda x: jaxkern.segment_softmax(x, IDS, 5))(jnp.ones(12)))


@pytest.mark.gpu
@every_dtype
def test_every_plan(dtype):
    """At sizes around tiles, chunks, spans and vectors, the plans agree to the bit, and so do two runs."""
    for count, width, rows in (
        (1, 1, 1),
        (7937, 1, 3),
        (20000, 1, 90),
        (993, 8, 2),
        (5000, 8, 700),
        (9000, 7, 40),
        (497, 16, 1),
        (3000, 64, 25),
        (3000, 257, 11),
        (100_000, 3, 2),
    ):
        ids = indices(rows, count, kind="sorted")
        found = []
        for algorithm in ("sort", "sorted", "sorted"):
            with algorithms.force(segment_softmax=algorithm):
                found.append(check(dtype, (count, width), rows, ids, indices_are_sorted=True))
        for y, dx in found[1:]:
            assert np.asarray(y).tobytes() == np.asarray(found[0][0]).tobytes()
            assert np.asarray(dx).tobytes() == np.asarray(found[0][1]).tobytes()


@pytest.mark.gpu
def test_a_promise_that_is_broken_does_no_harm():
    """Ids said to ascend that do not: nothing is read or written out of bounds, whatever comes out."""
    for width in (1, 8, 40):
        ids = indices(50, 30_000)
        jax.block_until_ready(
            both(50, indices_are_sorted=True)(
                values((30_000, width), "float32"), ids, values((30_000, width), "float32")
            )
        )
    with algorithms.force(segment_softmax="sorted"), pytest.raises(Exception, match="jaxkern.segment_softmax.*sorted"):
        jax.block_until_ready(jaxkern.segment_softmax(jnp.ones(5), jnp.zeros(5, int), 3))


@pytest.mark.gpu
def test_a_batch_of_more_segments_than_one_run_numbers():
    """28 slices of the batch are one run of the kernels, which sorts 4.1 million keys; the last is another."""
    batch, rows, count = 29, 74_362_205, 147_668
    hashed = np.random.default_rng(0).integers(0, rows, (batch, count), dtype=np.int32)
    ids = np.where(np.arange(count) % 4, np.roll(hashed, 1, 1), hashed)
    x = values((batch, count), "float32")
    found = jax.vmap(lambda x, i: jaxkern.segment_softmax(x, i, rows))(x, jnp.asarray(ids))
    for b in range(batch):
        distinct, at = np.unique(ids[b], return_inverse=True)
        want, error = softmax(x[b], at, len(distinct))
        assert_rounded(found[b], want, error, "float32")
