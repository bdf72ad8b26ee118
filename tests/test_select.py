"""top_k, and functions that use it: numbers, ties, special values, derivatives, shardings, the kernel, bad input."""

import dataclasses
import functools

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plans import DEVICES, check_limits, compile_on_other_gpus, needs_nvrtc

import jaxkern
from jaxkern import algorithms
from jaxkern._core import device, functor
from jaxkern._ops.select import route, top_k

SPECIAL = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1.0, 1.0, -1.0, 1e-40]


def rows(shape, dtype, seed=0):
    """Rows with few different numbers, so that there are ties; every third row descends, and special numbers are anywhere."""
    rng = np.random.default_rng(seed)
    if jnp.issubdtype(dtype, jnp.floating):
        x = np.where(rng.random(shape) < 0.5, rng.normal(size=shape), rng.integers(-3, 4, shape))
        x = np.where(rng.random(shape) < 0.05, rng.choice(SPECIAL, shape), x)
    else:
        x = rng.integers(0, 2, shape) if dtype == "bool" else rng.integers(*_range(dtype), shape)
    x = np.asarray(x).astype(jnp.dtype(dtype))
    return x


def _range(dtype):
    info = jnp.iinfo(dtype)
    return max(info.min, -1000), min(info.max, 1000)


def wanted(x, k):
    """By a stable sort of NumPy, of the bits in descending order."""
    size = x.dtype.itemsize
    bits = np.ascontiguousarray(x).view(f"int{8 * size}").astype(np.int64)
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = np.where(bits < 0, bits ^ (2 ** (8 * size - 1) - 1), bits)  # -0 is -1
    elif x.dtype.kind != "i":
        bits = x.astype(np.int64)
    at = np.argsort(~bits, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(x, at, -1), at


def same(found, exact):
    """Bit for bit."""
    for a, b in zip(found, exact, strict=True):
        a = np.ascontiguousarray(a)
        b = np.ascontiguousarray(b, a.dtype)
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


KERNELS = [
    ("warp", (11, 256), "float32", 8, False),
    ("warp", (9, 1000), "bfloat16", 32, False),
    ("warp", (3, 37), "int8", 5, True),
    ("block", (3, 9000), "float32", 50, False),
    ("block", (2, 20011), "float16", 1024, False),
    ("block", (2, 5000), "uint32", 1, True),
    ("block", (3, 700), "bool", 700, False),
    ("block", (2, 9000), "float32", 2048, False),
    ("network", (5, 100), "float32", 20, False),
    ("sort", (2, 3000), "bfloat16", 1100, False),
    ("sort", (2, 500), "int8", 500, False),
    ("block", (2, 9000), "float16 negated", 300, False),
    ("block", (2, 9000), "uint32 negated", 5, False),
    ("warp", (5, 100), "int16 negated", 3, False),
    ("split", (1, 330000), "float32 negated", 130, False),  # more candidates than a block holds
    ("split", (1, 50001), "int16", 7, True),
    ("split", (2, 60000), "float32", 1500, False),
    ("split", (2, 40000), "int32", 2048, False),  # of ascending rows, all of the last part
]


ROUTES = [
    ((1000, 64), "float32", 2, None, True, False),
    ((300, 384), "bfloat16", 8, 3, True, True),
    ((37, 5), "float16", 5, 7, False, False),
    ((200, 100), "float32", 1, None, False, True),
]


@functools.cache
def plans():
    """Of each of KERNELS, and of ROUTES for a GPU whose five blocks have several tokens in each warp. One library has them all."""
    found, few = [], device.H200._replace(sm_count=5)
    for algorithm, shape, dtype, k, _ in KERNELS:
        dtype, *negated = dtype.split()
        function = functor.trace(lambda x: -x, [jnp.dtype(dtype)], name="top_k")[0] if negated else None
        with algorithms.force(top_k=algorithm):
            x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
            found.append(top_k.plan(device.H200, [x], None, k=k, function=function))
    for shape, dtype, k, capacity, renormalize, _ in ROUTES:
        given = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))]
        found.append(route.plan(few, given, None, k=k, capacity=capacity, renormalize=renormalize))
    steps = [p.unaligned if case[-1] and p.unaligned else p.launches for p, case in zip(found, [*KERNELS, *ROUTES])]
    emulated.prepare(*(dataclasses.replace(p, launches=s, unaligned=None) for p, s in zip(found, steps)))
    return found


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("n", range(len(KERNELS)))
def test_kernel(n):
    (algorithm, shape, dtype, k, unaligned), made = KERNELS[n], plans()[n]
    dtype, *negated = dtype.split()
    x = np.nan_to_num(rows(shape, dtype)) if negated else rows(shape, dtype)
    if algorithm == "block" or dtype == "int32":
        x[0].sort()
    check_limits(made, device.H200)
    assert made.algorithm == algorithm
    found = emulated.run(made, [x], [((*shape[:-1], k), x.dtype), ((*shape[:-1], k), np.int32)], unaligned)
    same(found, wanted(-x if negated else x, k))


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("n", range(len(ROUTES)))
def test_route_kernels(n):
    """Weights against NumPy, with ties among the logits; experts, slots and counts against a loop."""
    (shape, dtype, k, capacity, renormalize, unaligned), made = ROUTES[n], plans()[len(KERNELS) + n]
    x = np.round(np.random.default_rng(n).normal(size=shape), 1).astype(jnp.dtype(dtype))
    x[3, 2], x[5, :3], x[7] = np.inf, -np.inf, -np.inf
    check_limits(made, device.H200)
    results = [((shape[0], k), x.dtype), *[((shape[0], k), np.int32)] * 2, ((shape[1],), np.int32)]
    found = emulated.run(made, [x], results, unaligned)
    exact = plain_route(x, k, capacity, renormalize)
    np.testing.assert_allclose(*(a.astype(np.float64) for a in (found[0], exact[0])), rtol=2 * jnp.finfo(dtype).eps)
    same(found[1:], exact[1:])


def plain_route(logits, k, capacity, renormalize):
    """By loops, in float64. With a logit of +inf all weights are NaN, and 0 if all logits are -inf."""
    wide, at = logits.astype(np.float64), wanted(logits, k)[1]
    empty = wide.max(1, keepdims=True) == -np.inf
    with np.errstate(invalid="ignore"):
        p = np.exp(wide - wide.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        weights = np.take_along_axis(p, at, 1)
        weights = np.where(empty, 0, weights / weights.sum(1, keepdims=True) if renormalize else weights)
    counts = np.bincount(at.ravel(), minlength=logits.shape[1])
    first, seen, slots = np.cumsum(counts) - counts, np.zeros(len(counts), int), np.empty(at.size, int)
    for i, e in enumerate(at.ravel()):
        slots[i] = first[e] + seen[e] if capacity is None else e * capacity + seen[e] if seen[e] < capacity else -1
        seen[e] += 1
    return weights, at, slots.reshape(at.shape), counts


def test_largest_parts_and_candidates():
    """Plans for rows of any size: parts are whole vectors, none is empty, and candidates fit the scratch."""
    for shape, k in [((1, 1 << 24), 100), ((16, 262144), 256), ((64, 128256), 50), ((3, 65537), 1024), ((1, 40000), 1)]:
        for on in DEVICES:
            check_limits(top_k.plan(on, [jax.ShapeDtypeStruct(shape, jnp.float32)], None, k=k), on)


def test_choices():
    """Short rows for few elements run in warps, few long rows in parts; rows of which many are wanted are sorted."""
    ask = lambda *p, **given: algorithms.choose("top_k", *p, device=device.H200, **given)
    assert [ask(32768, 256, 8), ask(4096, 32768, 50), ask(64, 128256, 50), ask(1, 1 << 24, 100)] == [
        *("warp", "block", "split", "split")
    ]
    assert [ask(4096, 256, 64), ask(4096, 4096, 2048), ask(64, 128256, 2048)] == ["network", "sort", "split"]
    assert [ask(rows, 4096, 300, "bfloat16") for rows in (8, 4096)] == ["sort", "block"]
    assert not algorithms.fits("top_k", "block", 4, 5000, 2049) and not algorithms.fits("top_k", "warp", 4, 1025, 3)


@needs_nvrtc
def test_kernels_compile():
    kernels = (
        "TopKBlock<jaxkern::Same<uint32_t>, jaxkern::Order::kFloat, 4, 4>",
        "TopKWarp<jaxkern::Same<uint16_t>, jaxkern::Order::kFloat, 8, 1>",
    )
    compile_on_other_gpus((top_k.HEADER, name) for name in kernels)
    compile_on_other_gpus([(route.HEADER, name) for name in ("RouteChoose<__nv_bfloat16, 8, 2>", "RoutePlace<true>")])


# ---- the functions


@pytest.mark.parametrize("dtype", ["float32", "bool", "float64"])
def test_top_k(dtype):
    """Along each axis, with ties and special numbers, bit for bit."""
    with jax.enable_x64(dtype == "float64"):
        x = rows((5, 6, 40), dtype)
        for axis, k in ((-1, 7), (0, 5), (2, 0)):
            found = jaxkern.top_k(jnp.asarray(x), k, axis)
            same(found, [np.moveaxis(a, -1, axis) for a in wanted(np.moveaxis(x, axis, -1), k)])
        if dtype != "float64":  # as kernels select more elements than a block holds
            same(jax.jit(lambda x: top_k.by_sorting(x, k=9))(x), wanted(x, 9))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint32"])
def test_functions_of_elements(dtype):
    """In the types of the function: derivatives, batches, more elements than kernels select, a scalar that it closes over."""
    x, scale = jnp.asarray(rows((3, 1100), dtype)), jnp.float32(2)
    x = jnp.nan_to_num(x)
    cast = (lambda y: y.astype(jnp.bfloat16)) if dtype == "float32" else lambda y: y

    def f(x):
        return cast(jnp.abs(x - 1) * 2)

    for k in (5, 1050):
        same(jaxkern.top_k(x, k, function=f), wanted(np.asarray(jax.jit(f)(x)), k))
    same(jaxkern.top_k(x, 5, function=lambda x: x * scale), wanted(np.asarray(x * scale), 5))
    if dtype == "float32":
        both = [
            jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(jax.vmap(g)(x)))))(x)  # noqa: B023
            for g in (lambda x: jaxkern.top_k(x, 5, function=jnp.sin)[0], lambda x: jax.lax.top_k(jnp.sin(x), 5)[0])
        ]
        np.testing.assert_allclose(*both, rtol=1e-5, atol=1e-6)


def test_derivatives_and_batches():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 9)), jnp.float32)
    ours, theirs = (lambda x, f=f: jnp.sum(jnp.sin(f(x * x, 3)[0])) for f in (jaxkern.top_k, jax.lax.top_k))
    for derivative in (jax.grad, lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))):
        found, exact = jax.jit(lambda x: (derivative(ours)(x), derivative(theirs)(x)))(x)  # noqa: B023
        np.testing.assert_allclose(found, exact, rtol=1e-5)
    same(jax.vmap(lambda x: jaxkern.top_k(x, 2), 1)(x), jax.lax.top_k(x.swapaxes(0, 1), 2))
    same(
        jax.jvp(lambda i: jaxkern.top_k(i, 2), (jnp.arange(9),), (np.zeros(9, jax.dtypes.float0),))[0], ([8, 7], [8, 7])
    )


def plain_top_p(x, p):
    """By sorting."""
    at = np.argsort(-x, -1, kind="stable")
    mass = np.exp(x - x.max(-1, keepdims=True))
    mass = np.take_along_axis(mass / mass.sum(-1, keepdims=True), at, -1)
    before = np.concatenate([np.zeros_like(mass[..., :1]), np.cumsum(mass, -1)[..., :-1]], -1)
    kept = np.empty(x.shape, bool)
    np.put_along_axis(kept, at, before < p, -1)
    return np.where(kept, x, -np.inf)


@pytest.mark.parametrize("width, p", [(50, 0.1), (50, 0.97), (1100, 0.6), (1100, 0.97), (50, 1.0)])
def test_filters(width, p):
    """1100 classes of like probability need a sort of all. From 1 on all are kept."""
    x = np.random.default_rng(1).normal(size=(4, width)).astype(np.float32)
    x[1] *= 5
    x[2, ::3] = 1  # equal ones
    kept = x if p == 1 else plain_top_p(x.astype(np.float64), p).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(jaxkern.top_p(x.T, p, 0)).T, kept)
    exact = np.where(x >= x.max(-1, keepdims=True) + np.float32(np.log(p)), x, -np.inf)
    for f in (jaxkern.top_p, jaxkern.min_p):
        ps = np.full((4, 1), p, np.float32)
        each, slope = jax.jit(lambda x: jax.jvp(lambda x: f(x, ps), (x,), (jnp.ones_like(x),)))(x)  # noqa: B023
        np.testing.assert_array_equal(each, exact if f is jaxkern.min_p else kept)
        np.testing.assert_array_equal(slope, np.asarray(each) > -np.inf)


def test_filters_of_special_numbers():
    x = np.array([[np.nan, 1, -np.inf, -0.0, 0], [np.inf, 1, 2, 3, 4], [-np.inf] * 5, [np.nan] * 5], np.float32)
    for f in (jaxkern.top_p, jaxkern.min_p):
        found = np.asarray(f(x, 0.9))
        assert found[0, 1] == 1 and found[0, [0, 2]].tolist() == [-np.inf] * 2
        assert found[1].tolist() == [np.inf, *[-np.inf] * 4] and (found[2:] == -np.inf).all()
        assert f(np.zeros((0, 5)), 0.5).shape == (0, 5) and f(np.zeros((5, 0)), 0.5).shape == (5, 0)
        assert jax.eval_shape(f, np.arange(3), 0.5).dtype == jnp.float32
        small = np.arange(20.0).reshape(4, 5).astype(jnp.float8_e5m2)
        same([f(small, 0.7)], [np.asarray(f(small.astype(np.float32), 0.7)).astype(small.dtype)])
    # From 1 on min_p keeps the most probable class.
    assert np.isfinite(jaxkern.min_p(np.arange(20, dtype=np.float32).reshape(4, 5), 2.0)).sum() == 4
    assert jaxkern.sample(np.arange(3.0), jax.random.key(0), min_p=2.0) == 2


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.8, "min_p": 0.1, "temperature": 1.7}],
)
def test_samples(filters):
    """The frequencies of classes are those of the composition of the filters, within five deviations."""
    count = 20000
    x = np.random.default_rng(2).normal(size=8).astype(np.float32) * 1.5
    found = jaxkern.sample(jnp.broadcast_to(x, (count, 8)), jax.random.key(3), **filters)
    assert found.shape == (count,) and found.dtype == jnp.int32
    left = x.astype(np.float64) / filters.get("temperature", 1)
    if "top_k" in filters:
        left = np.where(left >= np.sort(left)[-filters["top_k"]], left, -np.inf)
    if "top_p" in filters:
        left = plain_top_p(left[None], filters["top_p"])[0]
    left = np.where(left >= left.max() + np.log(filters.get("min_p", 1e-30)), left, -np.inf)
    p = np.exp(left - left.max()) / np.exp(left - left.max()).sum()
    times = np.bincount(found, minlength=8)
    assert (np.abs(times - count * p) <= 5 * np.sqrt(count * p * (1 - p))).all() and (times[p == 0] == 0).all()


def test_samples_of_many_classes():
    """Where the largest 1024 suffice for top_p, and where they do not; along another axis; temperature 0 of some rows."""
    x = np.random.default_rng(4).normal(size=(6, 1100)).astype(np.float32)
    x[:3] *= 6
    cold = np.zeros((6, 1), np.float32)
    cold[::2] = 9
    for given in (x[3:], x[:3]):
        kept = np.asarray(jaxkern.top_p(given, 0.8)) > -np.inf
        for n in range(3):
            at = jaxkern.sample(given, jax.random.key(n), top_p=0.8)
            assert np.take_along_axis(kept, np.asarray(at)[:, None], 1).all()
    for filters in ({}, {"top_k": 9}):
        found = np.asarray(jaxkern.sample(x.T, jax.random.key(0), temperature=cold.T, axis=0, **filters))
        same_class = found == np.argmax(x, 1)
        assert same_class[1::2].all() and not same_class[::2].all()


@pytest.mark.parametrize("capacity, renormalize", [(None, True), (3, False)])
def test_routes(capacity, renormalize):
    """The slots carry tokens to their experts and back. A batch of routers, and the derivative."""
    tokens, experts, k = 37, 5, 2
    logits = jnp.asarray(np.random.default_rng(5).normal(size=(tokens, experts)), jnp.float32)
    special = logits.at[1, 2].set(jnp.inf).at[2, :4].set(-jnp.inf).at[3].set(-jnp.inf)
    exact = plain_route(np.asarray(special), k, capacity, renormalize)
    np.testing.assert_allclose(jaxkern.moe_route(special, k, capacity, renormalize=renormalize)[0], exact[0], rtol=1e-5)
    weights, chosen, slots, counts = jaxkern.moe_route(logits, k, capacity, renormalize=renormalize)
    exact = plain_route(np.asarray(logits), k, capacity, renormalize)
    np.testing.assert_allclose(weights, exact[0], rtol=1e-5)
    same((chosen, slots, counts), exact[1:])
    if capacity is not None:  # of any number of tokens
        given = jax.ShapeDtypeStruct(jax.export.symbolic_shape(f"tokens, {experts}"), jnp.float32)
        exported = jax.export.export(jax.jit(lambda x: jaxkern.moe_route(x, k, capacity)[2:]))(given)
        same(exported.call(logits), (slots, counts))
    if renormalize:
        pair = jax.vmap(lambda x: jaxkern.moe_route(x, k).slots, 1, 1)(logits[:, None])
        np.testing.assert_array_equal(pair[:, 0], slots)
    x = np.arange(1.0, tokens + 1, dtype=np.float32)[:, None]
    held = jaxkern.moe_dispatch(x, slots, tokens * k if capacity is None else capacity * experts)
    back = jaxkern.moe_combine(held, slots, np.ones((tokens, k), np.float32))
    np.testing.assert_array_equal(back, x * (np.asarray(slots) >= 0).sum(1, keepdims=True))
    loss = lambda logits: jnp.sum(jnp.sin(jaxkern.moe_route(logits, k, renormalize=renormalize).weights))

    def plain(logits):
        w = jax.lax.top_k(jax.nn.softmax(logits), k)[0]
        return jnp.sum(jnp.sin(w / w.sum(1, keepdims=True) if renormalize else w))

    found, exact = jax.jit(lambda x: (jax.grad(loss)(x), jax.grad(plain)(x)))(logits)
    np.testing.assert_allclose(found, exact, atol=1e-6)
    np.testing.assert_allclose(jax.grad(loss)(special)[2:4], jnp.zeros((2, experts)), atol=1e-6)


# ---- bad input


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: jaxkern.top_k(jnp.ones(3), 1, function=lambda x: x + 1j), TypeError, "top_k: "),
        (lambda: jaxkern.top_k(jnp.ones(3), 4), ValueError, "top_k: k must be from 0 to 3"),
        (lambda: jaxkern.top_k(jnp.ones(3, jnp.complex64), 1), TypeError, "top_k: x must be real"),
        (lambda: jaxkern.top_k(jnp.ones(3, jnp.int4), 1), TypeError, "top_k: XLA selects no int4"),
        (lambda: jaxkern.top_p(jnp.ones((2, 3)), jnp.ones(3)), ValueError, "top_p: p of shape"),
        (
            lambda: jaxkern.top_p(jnp.ones(3, jnp.float8_e4m3fn), 0.5),
            TypeError,
            "top_p: logits must be of a type with inf",
        ),
        (
            lambda: jaxkern.sample(jnp.ones(3), jax.random.key(0), temperature=-1),
            ValueError,
            "sample: temperature must",
        ),
        (lambda: jaxkern.sample(jnp.ones((2, 3)), jax.random.key(0), top_k=0), ValueError, "sample: top_k must be 1"),
        (lambda: jaxkern.sample(jnp.ones((2, 0)), jax.random.key(0)), ValueError, "sample: logits of shape"),
        (lambda: jaxkern.min_p(jnp.ones(3), 0.5, 1), ValueError, "min_p: axis 1 is out of bounds for logits of shape"),
        (lambda: jaxkern.moe_route(jnp.ones((2, 3)), 4), ValueError, "moe_route: k must be from 1 to 3"),
        (lambda: jaxkern.moe_route(jnp.ones(3), 1), ValueError, "moe_route: logits must have shape"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=f"jaxkern.{message}"):
        call()
