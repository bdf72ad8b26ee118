"""sort, argsort, sort_pairs, searchsorted, bincount and histogram: numbers, kernels, bad input."""

import dataclasses
import functools

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plans import DEVICES, check_limits, needs_nvrtc
from test_select import rows, same

import jaxkern
from jaxkern import algorithms
from jaxkern._core import device, registry
from jaxkern._core.primitive import bind
from jaxkern._ops.select import count, search, sort_rows, tuning

compiler = pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")


def typed(shape, dtype):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def order_of(x, descending):
    """The stable order of NumPy."""
    x = x.astype(np.float64) if x.dtype != np.int64 else x
    if not descending:
        return np.argsort(x, -1, kind="stable")
    return x.shape[-1] - 1 - np.argsort(x[..., ::-1], -1, kind="stable")[..., ::-1]


def in_order(x, descending, wanted):
    """(what is carried, or None; the results of `wanted`, some of values, indices and "carried TYPE")."""
    at, carried = order_of(x, descending), None
    exact = {"values": np.take_along_axis(x, at, -1), "indices": at.astype(np.int32)}
    if wanted[-1].startswith("carried"):
        carried = rows(x.shape, wanted[-1].split()[1], 1)
        exact[wanted[-1]] = np.take_along_axis(carried, at, -1)
    return carried, [exact[n] for n in wanted]


# ---- kernels


SORTS = [
    ("network", (5, 1), "float32", False, ("values", "indices")),
    ("network", (40, 7), "int8", True, ("values", "indices")),
    ("network", (9, 64), "float32", True, ("values", "indices")),
    ("network", (3, 1000), "float32", False, ("indices",)),
    ("network", (2, 4096), "bfloat16", True, ("values",)),
    ("network", (4, 33), "float8_e4m3fn", False, ("values", "indices")),
    ("network", (3, 100), "uint64", True, ("values", "indices")),
    ("network", (2, 1025), "float64", False, ("values", "indices")),
    ("block", (3, 500), "float32", True, ("values", "indices")),
    ("block", (2, 1), "int64", False, ("values", "indices")),
    ("block", (2, 1999), "bfloat16", False, ("values",)),
    ("block", (1, 5000), "bool", True, ("indices",)),
    ("tiles", (3, 5000), "float32", False, ("values", "indices")),
    ("tiles", (2, 4096), "float64", True, ("indices",)),
    ("tiles", (1, 40001), "int16", False, ("values",)),
    ("tiles", (2, 300), "uint8", True, ("indices",)),
    ("network", (5, 70), "float32", True, ("values", "carried int8")),
    ("block", (3, 500), "bfloat16", False, ("carried int32",)),
    ("block", (2, 1000), "float32", True, ("values", "indices", "carried float64")),
    ("tiles", (2, 5000), "float16", False, ("values", "carried float32")),
]
FEW = [((3, 20000), "float32", False), ((3, 17001), "bfloat16", True)]  # dtype, descending
SEARCHES = [("int32", 1), ("uint32", 4096), ("float32", 100003), ("float64", 40001)]
COUNTS = [
    ("shared", "int32", 70001, 300),
    ("shared", "uint8", 70000, 256),
    ("shared", "int64", 5000, 12288),
    ("windows", "int32", 20001, 400),
    ("windows", "uint16", 20000, 65000),
    ("global", "int8", 20000, 100),
    ("global", "uint16", 20000, 60000),
]


def sorting(algorithm, shape, dtype, descending, wanted):
    """wanted: with the type of what is carried."""
    (carried,) = [typed(shape, n.split()[1]) for n in wanted if " " in n] or [None]
    names = tuple(n.split()[0] for n in wanted)
    with algorithms.force(sort=algorithm):
        return sort_rows.plan(device.H200, [typed(shape, dtype), carried], None, descending=descending, wanted=names)


def searching(dtype, size, count, right):
    """With as many threads as for many queries if the size is odd."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "MANY_QUERIES", count + 1 - size % 2)
        return search.plan(device.H200, [typed((count,), dtype), typed((size,), dtype)], None, right=right)


def counting(algorithm, dtype, elements, bins):
    with algorithms.force(bincount=algorithm):
        return count.plan(device.H200, [typed((elements,), dtype)], None, bins=bins)


@functools.cache
def compiled():
    """Compiles the kernels of all these cases at once."""
    searches = [searching(*case, 1, right) for case in SEARCHES for right in (False, True)]
    few = (sorting("tiles", *case, ("values",)) for case in FEW)
    emulated.prepare(*(sorting(*case) for case in SORTS), *few, *searches, *(counting(*case) for case in COUNTS))


@compiler
@pytest.mark.parametrize("algorithm, shape, dtype, descending, wanted", SORTS)
def test_sort(algorithm, shape, dtype, descending, wanted):
    compiled()
    with jax.enable_x64(True):
        x, made = rows(shape, dtype), sorting(algorithm, shape, dtype, descending, wanted)
    if algorithm == "tiles":
        x[:, shape[1] // 3 : -100] = x[0, 0]  # warps whose keys are equal
    check_limits(made, device.H200)
    carried, exact = in_order(x, descending, wanted)
    operands = [x] if carried is None else [x, carried]
    same(emulated.run(made, operands, [(shape, a.dtype) for a in exact]), exact)


@compiler
@pytest.mark.parametrize("shape, dtype, descending", FEW)
def test_sort_of_few(shape, dtype, descending):
    """The first row is sorted at once. In the second one too many elements differ, and the third one has 0 and -0."""
    compiled()
    x, made = rows(shape, dtype), sorting("tiles", shape, dtype, descending, ("values",))
    x[0, 700:-600], x[1, 2500:-2500], x[2] = -np.inf, -np.inf, 0
    x[2, 4000], x[2, 9] = -0.0, 1
    check_limits(made, device.H200)
    _, exact = in_order(x, descending, ("values",))
    same(emulated.run(made, [x], [(shape, x.dtype)]), exact)
    at_once = dataclasses.replace(made, launches=made.launches[:2])
    (found,) = emulated.run(at_once, [x], [(shape, x.dtype)])
    same([found[0]], [exact[0][0]])
    assert not (found[1:] == exact[0][1:]).all(1).any()


@compiler
@pytest.mark.parametrize("dtype, size", SEARCHES)
def test_search(dtype, size):
    """Of the elements themselves, of special numbers, and of others; in arrays that shared memory holds, or not."""
    compiled()
    array = rows((size,), dtype)
    array = array[order_of(array, False)]
    x = np.concatenate([rows((1500,), dtype, 1), array[:50], array[-50:]])
    for right, unaligned in ((False, False), (True, False), (True, True)):
        made = searching(dtype, size, len(x), right)
        check_limits(made, device.H200)
        (found,) = emulated.run(made, [x, array], [(x.shape, np.int32)], unaligned)
        np.testing.assert_array_equal(found, np.searchsorted(array, x, "right" if right else "left"))


@compiler
@pytest.mark.parametrize("algorithm, dtype, elements, bins", COUNTS)
def test_counts(algorithm, dtype, elements, bins):
    """With negative numbers, numbers that are too large, and a long run of equal ones."""
    compiled()
    info = jnp.iinfo(dtype)
    x = np.random.default_rng(0).integers(max(info.min, -100), min(info.max, 400), elements).astype(dtype)
    x[1000:3000] = 5
    exact = np.bincount(np.maximum(x.astype(np.int64), 0), minlength=bins)[:bins]
    made = counting(algorithm, dtype, elements, bins)
    check_limits(made, device.H200)
    for unaligned in (False, True):
        (found,) = emulated.run(made, [x], [((bins,), np.int32)], unaligned)
        np.testing.assert_array_equal(found, exact)


def test_choices_and_plans():
    assert [algorithms.choose("bincount", n, 1 << 24, device=device.H200) for n in (256, 1 << 20)] == [
        "shared",
        "windows",
    ]
    assert [algorithms.choose("sort", 4096, n, device=device.H200) for n in (64, 4096, 32768)] == list(
        sort_rows.ALGORITHMS
    )
    assert not algorithms.fits("sort", "network", 4096, 4097) and not algorithms.fits("sort", "block", 1, 8193)
    for on in DEVICES:
        for bins, elements in ((1, 1), (12288, 1 << 24), (1 << 20, 1000)):
            x = jax.ShapeDtypeStruct((elements,), jnp.int32)
            check_limits(count.plan(on, [x], None, bins=bins), on)
            check_limits(search.plan(on, [x, x], None, right=True), on)
        for shape, dtype in (((1, 1 << 26), "float32"), ((3, 1 << 22), "int64"), ((1 << 20, 4097), "uint8")):
            for wanted in (("values",), ("indices",), ("values", "indices")):
                how = {"descending": False, "wanted": wanted}
                check_limits(sort_rows.plan(on, [typed(shape, dtype), None], None, **how), on)


@needs_nvrtc
@pytest.mark.parametrize(
    "header, name, capability",
    [
        (sort_rows.NETWORK, "SortRows<uint32_t, jaxkern::Order::kFloat, 1024, 256, uint32_t>", 80),
        (sort_rows.RADIX, "SortBlock<uint64_t, jaxkern::Order::kFloat, 512, 8, true, uint64_t>", 80),
        (sort_rows.RADIX, "SortScatter<uint32_t, jaxkern::Order::kFloat, 512, 16, true>", 90),
        (search.HEADER, "Search<uint32_t, jaxkern::Order::kFloat, true, 1024, 4>", 90),
        (count.HEADER, "CountShared<int32_t, 4, 4>", 90),
        (count.HEADER, "CountGlobal<int64_t, 2, 8>", 120),
    ],
)
def test_kernels_compile(header, name, capability):
    assert registry.kernels.module.compile(header, name, capability, "")[0]


# ---- the functions


@pytest.mark.parametrize("dtype", ["float32", "bool", "float64", "complex64"])
def test_sorts(dtype):
    """As jnp, along each axis and both ways, with ties, NaN and zeros."""
    with jax.enable_x64(dtype == "float64"):
        x = rows((5, 6, 40), "float32" if dtype == "complex64" else dtype)
        x = np.where(np.abs(x) == x.dtype.type(1e-40), 0, x) if dtype != "bool" else x
        x = np.stack([x, x[::-1]], -1).view(dtype)[..., 0] if dtype == "complex64" else x
        places = np.arange(x.size, dtype=np.int32).reshape(x.shape)
        for axis, descending in ((-1, False), (0, True), (None, True)):
            how = {"axis": axis, "descending": descending}
            order = np.asarray(jnp.argsort(x, stable=True, **how))
            same([jaxkern.argsort(x, **how)], [order])
            flat = x.reshape(-1) if axis is None else x
            exact = np.take_along_axis(flat, order, 0 if axis is None else axis)
            keys, values = jaxkern.sort_pairs(x, {"a": x, "b": places}, **how)
            same([jaxkern.sort(x, **how), keys, values["a"]], [exact] * 3)
            follow = np.take_along_axis(places.reshape(flat.shape), order, axis or 0)
            same([values["b"], jaxkern.sort_pairs(x, places, **how)[1]], [follow] * 2)
    if dtype == "float32":  # one array of values, which moves with the keys: batches of it, and derivatives
        follow = lambda keys: jax.vmap(lambda v: jaxkern.sort_pairs(keys, v)[1])  # noqa: B023
        batch = np.stack([places[0], -places[0]])
        exact = np.take_along_axis(batch, np.argsort(x[0], -1, kind="stable")[None], -1)
        same([jax.jit(follow(x[0]))(batch)], [exact])
        slopes = jax.grad(lambda v: jnp.sum(follow(x[0])(v)[..., 0]))(batch.astype(np.float32))
        assert (np.asarray(slopes) == (np.asarray(batch) == exact[..., :1])).all()


@pytest.mark.parametrize(
    "shape, axis", [((3, 0), -1), ((0, 3), 1), ((1,), 0), ((2, 1, 3), 1), ((4, 5), 0), ((0,), None)]
)
def test_sorts_of_few_elements(shape, axis):
    """None, one, and equal ones, whose indices ascend either way."""
    x = np.full(shape, np.nan, np.float32)
    for descending in (False, True):
        how = {"axis": axis, "descending": descending}
        same([jaxkern.argsort(x, **how)], [np.asarray(jnp.argsort(x, stable=True, **how), np.int32)])
        same([jaxkern.sort(x, **how)], [x])


@pytest.mark.parametrize("algorithm, shape, dtype, descending, wanted", SORTS)
def test_algorithms(algorithm, shape, dtype, descending, wanted):
    """Each of them, where there is a GPU."""
    with jax.enable_x64(jnp.dtype(dtype).itemsize == 8 or "64" in wanted[-1]), algorithms.force(sort=algorithm):
        x = rows(shape, dtype)
        x = np.where(np.abs(x) == x.dtype.type(1e-40), 0, x) if jnp.issubdtype(dtype, jnp.floating) else x
        carried, exact = in_order(x, descending, wanted)
        how = {"descending": descending, "wanted": tuple(n.split()[0] for n in wanted)}
        same(jax.jit(lambda *operands: bind(sort_rows.sort_rows_p, *operands, **how))(x, carried), exact)


@pytest.mark.parametrize("dtype, size, fill", [("float32", 20, None), ("int32", 50, -1), ("complex64", 9, 0)])
def test_unique(dtype, size, fill):
    """As jnp, with more and with fewer different elements than asked for, and, of integers, without any and by values alone."""
    x = rows((6, 12), "float32" if dtype == "complex64" else dtype)
    x = np.where(np.abs(x) == x.dtype.type(1e-40), 0, x) if dtype != "int32" else x
    x = np.stack([x, x[::-1]], -1).view(dtype)[..., 0] if dtype == "complex64" else x
    every = dict.fromkeys(("return_index", "return_inverse", "return_counts"), True)
    call = lambda f: jax.jit(functools.partial(f, size=size, fill_value=fill, **every))(x)
    found, exact = call(jaxkern.unique), call(jnp.unique)
    same(found, exact)
    assert found[2].shape == x.shape
    if dtype == "int32":
        same([jaxkern.unique(x, size, fill), jaxkern.unique(x[:0], 2, fill)], [exact[0], np.full(2, fill, dtype)])


@pytest.mark.parametrize("side", ["left", "right"])
def test_searchsorted(side):
    """Of every pair of types, as NumPy."""
    for array, x in [
        ("float32", "float32"),
        ("bfloat16", "int32"),
        ("uint8", "int8"),
        ("bool", "uint32"),
        ("int32", "float16"),
    ]:
        sorted_array = rows((50,), array)
        sorted_array = sorted_array[order_of(sorted_array, False)]
        queries = rows((4, 30), x, 1)
        found = jaxkern.searchsorted(sorted_array, queries, side)
        assert found.dtype == jnp.int32
        subnormal = 1e-30 if jax.default_backend() == "cpu" else 0  # XLA takes them for 0 there
        wide = lambda a: np.where(np.abs(a.astype(np.float64)) < subnormal, 0, a.astype(np.float64))  # noqa: B023
        np.testing.assert_array_equal(found, np.searchsorted(wide(sorted_array), wide(queries), side))
    many = jax.vmap(lambda a, x: jaxkern.searchsorted(a, x, side))(
        jnp.arange(6.0).reshape(2, 3), jnp.arange(8.0).reshape(2, 4)
    )
    assert many.tolist() == [[0, 1, 2, 3], [1, 2, 3, 3]] if side == "left" else [[1, 2, 3, 3], [2, 3, 3, 3]]


def test_bincounts():
    x = np.array([[1, 3, -2], [7, 1, 1 << 30]])
    for dtype in ("int32", "int8", "uint8", "bool"):
        own = x.astype(dtype)
        np.testing.assert_array_equal(
            jaxkern.bincount(own, 4), np.bincount(np.maximum(own.astype(int), 0).ravel(), minlength=4)[:4]
        )
    # A type that does not hold the number of bins, alone and in a batch, and numbers beyond int32.
    for own in (np.full(3, 255, np.uint8), np.full(3, -3, np.int8), np.array([2**32 - 1, 2**31, 255], np.uint32)):
        exact = np.bincount(np.clip(own.astype(np.int64), 0, 256), minlength=256)[:256]
        np.testing.assert_array_equal(jaxkern.bincount(own, 256), exact)
        np.testing.assert_array_equal(jax.vmap(lambda x: jaxkern.bincount(x, 256))(own[None]), [exact])
    assert jaxkern.bincount(x[0], 0).shape == (0,) and jaxkern.bincount(x[:0], 3).tolist() == [0, 0, 0]
    found = jax.vmap(lambda x: jaxkern.bincount(x, 4), 1)(jnp.asarray(x))
    np.testing.assert_array_equal(found, [jnp.bincount(column, length=4) for column in x.T])
    weights = jnp.arange(6.0, dtype=jnp.bfloat16).reshape(x.shape)
    np.testing.assert_array_equal(jaxkern.bincount(x, 4, weights), [2, 4, 0, 1])
    assert jaxkern.bincount(x, 4, weights).dtype == jnp.bfloat16


EDGES = np.array([-2.0, 0.0, 0.5, 0.5, 3.0])


@pytest.mark.parametrize(
    "bins, limits, weights",
    [(7, None, "float32"), (4, (-1, 1.5), None), (EDGES, None, "bfloat16"), (EDGES, None, "int32")],
)
def test_histograms(bins, limits, weights):
    """As jnp, with elements on edges and outside; weights of other types."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=500), [-2, 0, 0.5, 3, 3]]).astype(np.float32)
    weights = jnp.asarray(8 * rng.random(x.shape)).astype(weights) if weights else None
    for density in (False, True):
        found = jaxkern.histogram(x, bins, limits, weights, density=density)
        exact = jnp.histogram(x, bins, limits, weights, density)
        for a, b in zip(found, exact, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6)
            assert a.dtype == b.dtype


@pytest.mark.parametrize("n, weight", [(70000, None), (4, 4e4)])
def test_densities_of_sums_that_exceed_16_bits(n, weight):
    weights = None if weight is None else jnp.full(n, weight, jnp.float16)
    density, edges = jaxkern.histogram(jnp.zeros(n, jnp.float16), 2, (-3e4, 3e4), weights, density=True)
    np.testing.assert_allclose(density.astype(jnp.float32), [0, 1 / 3e4], rtol=1e-2)
    assert density.dtype == edges.dtype == jnp.float16


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: jaxkern.sort_pairs(jnp.ones(3), jnp.ones(4)), ValueError, "sort_pairs: values of shape"),
        (lambda: jaxkern.searchsorted(jnp.ones((2, 2)), 1.0), ValueError, "searchsorted: array must have one"),
        (lambda: jaxkern.bincount(jnp.ones(3), 2), TypeError, "bincount: x must be an array of integers"),
        (lambda: jaxkern.bincount(jnp.arange(3), 2, jnp.ones(4)), ValueError, "bincount: weights of shape"),
        (lambda: jaxkern.histogram(jnp.ones(3), 0), ValueError, "histogram: bins must be 1 or more"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=f"jaxkern.{message}"):
        call()


LONG = {
    "argsort": lambda x: jaxkern.argsort(x),
    "sort_pairs": lambda x: jaxkern.sort_pairs(x, x),
    "searchsorted": lambda x: jaxkern.searchsorted(x, 1.0),
    "unique": lambda x: jaxkern.unique(x, 3),
    "median": lambda x: jaxkern.median(x),
    "quantile": lambda x: jaxkern.quantile(x.reshape(2**16, 2**15), 0.3, (0, 1)),
    "top_k": lambda x: jaxkern.top_k(x, 3),
    "top_p": lambda x: jaxkern.top_p(x, 0.5),
    "sample": lambda x: jaxkern.sample(x, jax.random.key(0), top_k=3),
}


@pytest.mark.parametrize("name", LONG)
def test_positions_that_int32_cannot_hold_are_refused(name):
    with pytest.raises(ValueError, match=rf"jaxkern.{name}: positions are int32, and \w+ of shape \(\d+"):
        jax.eval_shape(LONG[name], jax.ShapeDtypeStruct((2**31,), "float32"))
