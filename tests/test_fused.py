"""softmax with scale, bias, mask, causal limit and dropout; log_softmax with scale and bias."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ON_GPU
from reference import DTYPES, _sum_error, assert_rounded, gradient, wide

import jaxkern
from jaxkern import algorithms
from jaxkern._core import compat, draws, registry
from jaxkern._definitions import dropout

FEATURES = ("scale", "bias", "mask", "causal", "dropout")
RATE, KEY = 0.3, np.array([7, 0xFFFFFFFF], np.uint32)
THRESHOLD = round(RATE * 65536)


# ---- the random bits, in numpy


def philox(counter, key):
    """Philox4x32-7 in 64-bit integers: four words for four of counter and two of key."""
    c, k = [np.asarray(x, np.uint64) for x in counter], [np.uint64(x) for x in key]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(7):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> np.uint64(32)) ^ c[1] ^ k[0], b & low, (a >> np.uint64(32)) ^ c[3] ^ k[1], a & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return c


def drawn(rows, width, key=KEY):
    """16 bits for each element of [rows, width]."""
    column, row = np.arange(-(-width // 8)), np.arange(rows)[:, None]
    words = philox((column, row, 0, 0), np.asarray(key))
    halves = [
        np.broadcast_to(h, (rows, len(column))) for w in words for h in (w & np.uint64(0xFFFF), w >> np.uint64(16))
    ]
    return np.stack(halves, -1).reshape(rows, -1)[:, :width]


def kept(shape, key=KEY, threshold=THRESHOLD):
    return (drawn(int(np.prod(shape[:-1])), shape[-1], key) >= threshold).reshape(shape)


@pytest.mark.parametrize(
    "counter, key, words",
    [  # of the Random123 library of the authors of Philox
        ((0,) * 4, (0,) * 2, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_philox(counter, key, words):
    assert tuple(int(w) for w in philox(counter, key)) == words
    as_words = lambda xs: [jnp.uint32(x) for x in xs]
    assert tuple(int(w) for w in jax.jit(draws.philox)(as_words(counter), as_words(key))) == words


# ---- the operation in numpy


def reference(x, g, scale=None, bias=None, where=None, causal=False, keep=None, log=False):
    """(y, bound), (dx, bound), (terms of the bias' gradient), of the composition in the wide type."""
    x, g = np.asarray(x).astype(wide), np.asarray(g).astype(wide)
    part = np.broadcast_to(True if where is None else np.asarray(where), x.shape)
    if causal:
        queries, keys = x.shape[-2:]
        part = part & (np.arange(keys) <= np.arange(queries)[:, None] + keys - queries)
    factor = wide(1) if scale is None else wide(float(scale))
    b = wide(0) if bias is None else np.asarray(bias).astype(wide)
    with np.errstate(all="ignore"):
        s = np.where(part, x * factor + b, -np.inf)
        size = np.where(part, np.abs(x * factor) + np.abs(b), 0).max(-1, keepdims=True)
        largest = s.max(-1, keepdims=True)
        below = s - np.where(largest == -np.inf, 0, largest)
        e = np.exp(below)
        total = e.sum(-1, keepdims=True)
        p = e / np.where(total == 0, 1, total)
        distance = np.where(np.isfinite(below), np.abs(below), 0)
        # s is rounded twice, and so is its largest element, against which it is measured.
        slack = distance + 4 * size + _sum_error(x, -1) + 6
        k = wide(65536) / (65536 - THRESHOLD) if keep is not None else wide(1)
        kept = np.broadcast_to(True if keep is None else keep, x.shape)
        if log:
            y = np.where(part & (total > 0), below - np.log(np.where(total == 0, 1, total)), -np.inf)
            forward = y, slack + np.abs(np.where(np.isfinite(y), y, 0))
            h = np.where(part & (total > 0), g, 0)
            ds = h - p * h.sum(-1, keepdims=True)
            bound = np.abs(h) + p * slack * np.abs(h).sum(-1, keepdims=True)
        else:
            y = np.where(kept, k * p, 0)
            forward = y, y * slack
            h = np.where(part & kept & (total > 0), k * g, 0)
            ds = p * (h - (p * h).sum(-1, keepdims=True))
            bound = 2 * p * slack * (np.abs(h) + np.abs(p * h).sum(-1, keepdims=True))
        return forward, (ds * factor, bound * np.abs(factor)), ds


def from_result(y, g, scale=None):
    """(dx, bound) of softmax without dropout, which keeps y, rounded as it is, for the gradient."""
    dx, bound = gradient("softmax", None, y, g, mask=np.asarray(y) != 0)
    factor = wide(1) if scale is None else wide(float(scale))
    return factor * dx, np.abs(factor) * (bound + np.abs(dx))


def arguments(features, shape, dtype, seed=0, bias_shape=None, mask_shape=None, bias_dtype=None):
    """Keyword arguments for softmax, and what `reference` takes beside them."""
    rng = np.random.default_rng(seed)
    given, more = {}, {}
    if "scale" in features:
        given["scale"] = 0.75
    if "bias" in features:
        given["bias"] = jnp.asarray(rng.normal(size=bias_shape or (*shape[1:-2], 1, shape[-1])), bias_dtype or dtype)
    if "mask" in features:
        given["where"] = jnp.asarray(rng.random(mask_shape or (shape[0], *(1,) * (len(shape) - 3), *shape[-2:])) < 0.7)
    if "causal" in features:
        given["causal"] = True
    more |= given
    if "dropout" in features:
        given |= {"dropout_rate": RATE, "dropout_key": KEY}
        more["keep"] = kept(shape)
    return given, more


def normal(shape, dtype, seed=0, scale=2.0):
    return jnp.asarray(np.random.default_rng(seed).normal(0, scale, shape), dtype)


def check(features, shape, dtype, operation="softmax", **kwargs):
    """The result and the gradient of x against numpy."""
    with compat.enable_x64(dtype == "float64"):
        x, g = normal(shape, dtype), normal(shape, dtype, 1, 1.0)
        given, more = arguments(features, shape, dtype, **kwargs)
        static = {k: given.pop(k) for k in ("causal", "dropout_rate") if k in given}

        @jax.jit
        def run(x, g, given):
            y, pull = jax.vjp(lambda x: getattr(jaxkern, operation)(x, **static, **given), x)
            return y, pull(g)[0]

        y, dx = run(x, g, given)
        forward, backward, _ = reference(x, g, log=operation == "log_softmax", **more)
        assert_rounded(y, *forward, dtype)
        if operation == "softmax" and "dropout" not in features:
            backward = from_result(y, g, more.get("scale"))
        assert_rounded(dx, *backward, dtype)
        if "dropout_rate" in static:
            alive = np.asarray(forward[0] > 1e-6)
            assert ((np.asarray(y).astype(np.float64) != 0) == more["keep"])[alive].all()


SUBSETS = [s for n in range(1, 6) for s in itertools.combinations(FEATURES, n) if s != ("mask",)]


@pytest.mark.parametrize("features", SUBSETS, ids="+".join)
@pytest.mark.sweep(2)
def test_every_combination(features):
    check(features, (2, 3, 9, 40), "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [("scale",), ("bias", "mask"), ("causal", "dropout"), FEATURES], ids="+".join)
@pytest.mark.sweep(3)
def test_every_dtype(features, dtype):
    check(features, (2, 3, 13, 37), dtype)
    check(features, (2, 3, 5, 64), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("features", [(), ("causal",), ("scale", "bias", "mask"), FEATURES], ids="+".join)
@pytest.mark.parametrize("width", [7, 64, 1000, 1024, 2056, 10001])
@pytest.mark.sweep(4)
def test_narrower_results(width, features, dtype):
    """16 bits from float32: one rounding, and the gradient of the result as it was rounded."""
    shape = (2, 3, 6, width)
    x, g = normal(shape, "float32"), normal(shape, dtype, 1, 1.0)
    given, more = arguments(features, shape, "float32")
    y, pull = jax.vjp(lambda x: jaxkern.softmax(x, dtype=dtype, **given), x)
    assert y.dtype == dtype
    forward, backward, _ = reference(x, g, **more)
    assert_rounded(y, *forward, dtype)
    (dx,) = pull(g)
    assert dx.dtype == jnp.float32
    if "dropout" in features:
        assert_rounded(dx, *backward, "float32")
    else:
        assert_rounded(dx.astype(dtype), *from_result(y, g, more.get("scale")), dtype)


def test_dtypes_of_the_result(x64):
    for source, given in itertools.product(
        ("float16", "float32", "float64"), ({}, {"causal": True}, {"score": lambda s, i, j: 2 * s})
    ):

        @jax.jit
        def run(x, given=given):
            softmax = lambda x, dtype: jaxkern.softmax(x, dtype=dtype, **given)
            values = {dtype: softmax(x, dtype) for dtype in ("bfloat16", "float32", "float64")}
            slope = lambda dtype: jax.grad(lambda x: softmax(x, dtype)[1, 0].astype("float32"))(x)
            return values, [slope(dtype) for dtype in values], jaxkern.softmax(x.astype("float64"), **given)

        values, slopes, exact = run(normal((4, 9), source))
        for dtype, y in values.items():
            assert y.dtype == dtype
            np.testing.assert_allclose(y, exact, atol=2.0**-8)
        assert all(slope.dtype == source for slope in slopes)
    with pytest.raises(TypeError, match="dtype must be a floating-point type, got int32"):
        jaxkern.softmax(jnp.ones(3), dtype=jnp.int32)


@pytest.mark.filterwarnings("error")
def test_a_dtype_that_jax_truncates():
    assert jaxkern.softmax(jnp.ones(3), dtype=float).dtype == jnp.float32


WIDTHS = (1, 2, 7, 8, 9, 31, 64, 100, 255, 512, 1000, 1024, 1025, 2048, 4096, 4100, 8192, 16384, 16393, 40000)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.sweep(7)
def test_widths(width, dtype):
    check(FEATURES, (2, 3, width), dtype, mask_shape=(2, 3, width), bias_shape=(3, width))
    if width in (64, 2048, 4096):
        check(
            ("causal", "dropout", "bias"),
            (2, width + 5 if width == 64 else 4, width),
            dtype,
            bias_shape=(1, width),
            bias_dtype="float32",
        )


@pytest.mark.parametrize(
    "bias_shape, mask_shape",
    [
        ((), (2, 3, 9, 40)),
        ((40,), (9, 1)),
        ((3, 1, 40), (1, 40)),
        ((2, 3, 9, 40), ()),
        ((3, 9, 1), (2, 1, 1, 40)),
        ((2, 1, 9, 40), (3, 1, 1)),
        ((1, 3, 9, 40), (2, 1, 9, 1)),
    ],
)
@pytest.mark.parametrize("bias_dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.sweep(3)
def test_broadcast(bias_shape, mask_shape, bias_dtype):
    check(FEATURES, (2, 3, 9, 40), "bfloat16", bias_shape=bias_shape, mask_shape=mask_shape, bias_dtype=bias_dtype)


def test_operands_that_broadcast_over_many_matrices():
    """More than fits a GPU's L2, where rows are then taken in another order."""
    x = normal((16, 3, 64, 8192 if ON_GPU else 64), "bfloat16")
    bias, mask = (
        normal((3, 64, x.shape[-1]), "bfloat16", 1),
        jnp.asarray(np.random.default_rng(0).random((16, 1, *x.shape[2:])) < 0.5),
    )
    f = jax.jit(lambda x, bias, mask: jaxkern.softmax(x, bias=bias, where=mask, dropout_rate=RATE, dropout_key=KEY))
    whole = f(x, jnp.broadcast_to(bias, x.shape), jnp.broadcast_to(mask, x.shape))
    assert (np.asarray(f(x, bias, mask)) == np.asarray(whole)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_softmax(dtype):
    for features in (("scale",), ("bias",), ("scale", "bias", "mask")):
        check(features, (2, 3, 5, 64), dtype, "log_softmax")
    check(("scale", "bias", "mask"), (2, 3, 5, 1001), dtype, "log_softmax")


@pytest.mark.parametrize("queries, keys", [(1, 9), (5, 9), (9, 9), (12, 9), (3, 1)])
def test_causal_is_aligned_at_the_end(queries, keys):
    y = jaxkern.softmax(jnp.zeros((2, queries, keys)), causal=True)
    allowed = np.tril(np.ones((queries, keys), bool), keys - queries)
    count = allowed.sum(1, keepdims=True)
    np.testing.assert_allclose(y, np.broadcast_to(np.where(allowed, 1 / np.maximum(count, 1), 0), y.shape), rtol=1e-6)


@pytest.mark.parametrize("axis", [0, 1, (0, 2), None, ()])
def test_other_axes(axis):
    """Through XLA, where it is not the last one."""
    x, bias = normal((4, 5, 6), "float32"), normal((5, 1), "float32", 1)
    where = jnp.asarray(np.random.default_rng(3).random((4, 5, 6)) < 0.8)
    found = jaxkern.softmax(x, axis, where, scale=0.5, bias=bias)
    wanted = jnp.where(where, jax.nn.softmax(jnp.where(where, 0.5 * x + bias, -1e30), axis), 0)
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-7)
    dropped = jaxkern.softmax(x, axis, where, scale=0.5, bias=bias, dropout_rate=0.5, dropout_key=KEY)
    keep = np.asarray(dropped != 0)
    np.testing.assert_allclose(np.where(keep, dropped, 0), np.where(keep, 2 * found, 0), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_what_is_masked_stays_out(dtype, x64):
    x = np.array(normal((2, 4, 6), dtype))
    g = np.array(normal((2, 4, 6), dtype, 1))
    where = np.random.default_rng(0).random(x.shape) < 0.6
    where[0, 1] = False
    where[:, :, 0] |= where.any(-1)
    clean = x.copy(), g.copy()
    x[~where], g[~where] = np.nan, np.inf
    x[1, 2] = -np.inf  # a row of nothing
    clean[0][1, 2] = -np.inf

    def run(x, g):
        f = lambda x, s, b: jaxkern.softmax(x, where=where, scale=s, bias=b, dropout_rate=0.4, dropout_key=KEY)
        y, pull = jax.vjp(f, jnp.asarray(x), jnp.asarray(0.5, x.dtype), jnp.ones((4, 6), x.dtype))
        return y, pull(jnp.asarray(g))

    found, wanted = run(x, g), run(*clean)
    dead = ~where
    dead[1, 2] = True
    assert not np.asarray(found[0])[dead].any() and not np.asarray(found[1][0])[dead].any()
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[1][0], wanted[1][0])
    np.testing.assert_array_equal(found[1][2], wanted[1][2])
    assert np.isfinite(np.asarray(run(np.where(where, clean[0], np.nan), g)[1][2])).all()


def test_nan_of_a_row_is_in_it_alone_and_not_where_it_is_masked():
    x = np.zeros((3, 5, 40), np.float32)
    x[1, 3, 2] = np.nan
    y = np.asarray(jaxkern.softmax(x, causal=True, bias=jnp.zeros(40)))
    row = np.zeros((3, 5), bool)
    row[1, 3] = True
    allowed = np.broadcast_to(np.tril(np.ones((5, 40), bool), 35), x.shape)
    assert (np.isnan(y) == (row[..., None] & allowed)).all()


@pytest.mark.parametrize("scale", [0.0, -1.5, 1e30, 30.0])
def test_scales(scale):
    if scale == 1e30 and not ON_GPU:
        pytest.skip("XLA rounds scale * x in two ways here; jax.nn.softmax(scale * x) is NaN")
    x = normal((3, 700), "float32")
    found = jax.jit(lambda s: jaxkern.softmax(x, scale=s))(scale)
    wanted = np.exp(
        (np.asarray(x, np.float64) * np.float32(scale))
        - (np.asarray(x, np.float64) * np.float32(scale)).max(-1, keepdims=True)
    )
    np.testing.assert_allclose(found, wanted / wanted.sum(-1, keepdims=True), rtol=2e-5, atol=1e-30)


# ---- dropout


def test_dropout_statistics():
    """The rate, and that neither neighbours, rows nor keys depend on each other; bounds of five standard deviations."""
    shape, rate = (512, 1024), 0.3
    draw = jax.jit(lambda key: jaxkern.softmax(jnp.zeros(shape), dropout_rate=rate, dropout_key=key) != 0)
    found = [np.asarray(draw(jax.random.key(k))) for k in (0, 1)]
    p, n = 1 - THRESHOLD / 65536, np.prod(shape)
    sigma = np.sqrt(p * (1 - p) / n)
    for keep in found:
        assert abs(keep.mean() - p) < 5 * sigma
        for axis in (0, 1):
            # Means of rows and of columns scatter as much as independent draws do.
            count = shape[1 - axis]
            spread = keep.mean(1 - axis).var() * count / (p * (1 - p))
            assert abs(spread - 1) < 5 * np.sqrt(2 / shape[axis])
    both = lambda a, b: (
        abs((a - p) * (b - p)).mean() and abs(((a - p) * (b - p)).mean()) / (p * (1 - p)) * np.sqrt(a.size)
    )
    a, b = found
    assert both(a, b) < 5
    for shift in (1, 2, 4, 7, 8, 16):
        assert both(a[:, shift:], a[:, :-shift]) < 5 and both(a[shift:], a[:-shift]) < 5


@pytest.mark.parametrize("rate", [2.0**-16, 0.1, 0.5, 0.9, 1 - 2.0**-16])
def test_rates(rate):
    y = np.asarray(jaxkern.softmax(jnp.zeros((64, 1000)), dropout_rate=rate, dropout_key=KEY))
    threshold = round(rate * 65536)
    assert ((y != 0) == kept(y.shape, threshold=threshold)).all()
    np.testing.assert_allclose(y[y != 0], 65536 / (65536 - threshold) / 1000, rtol=1e-6)


def test_keys_of_every_kind():
    x = jnp.zeros((16, 64))
    draw = lambda key: np.asarray(jaxkern.softmax(x, dropout_rate=RATE, dropout_key=key) != 0)
    key = jax.random.key(5)
    np.testing.assert_array_equal(draw(key), draw(jax.random.key_data(key)))
    np.testing.assert_array_equal(draw(key), draw(jax.random.PRNGKey(5)))
    other = jax.random.key(5, impl="rbg")
    np.testing.assert_array_equal(draw(other), draw(jax.random.key_data(other)[:2]))
    assert (draw(key) != draw(jax.random.key(6))).any()


@pytest.mark.parametrize(
    "dtype, width", [("bfloat16", 40), ("float32", 1001), ("float16", 512), ("float32", 2048), ("float64", 100)]
)
def test_the_same_bits_everywhere(dtype, width):
    """Every algorithm, the CPU, jnp and the gradient use the bits of the generator in numpy."""
    with compat.enable_x64(dtype == "float64"):
        x = jnp.zeros((3, 70, width), dtype)
        wanted = kept(x.shape)

        def draws(x):
            y, pull = jax.vjp(lambda x: jaxkern.softmax(x, dropout_rate=RATE, dropout_key=KEY), x)
            g = jnp.where(jnp.arange(width) == jnp.arange(70)[:, None] % width, 1, 0).astype(dtype)
            return y != 0, pull(jnp.broadcast_to(g, x.shape))[0] != 0

        names = [
            t
            for t in algorithms.names("softmax")
            if algorithms.fits("softmax", t, 210, width, dtype=dtype, backward=True)
        ]
        for name in ("auto", *names) if ON_GPU else ("auto",):
            with algorithms.force(softmax=name):
                y, dx = jax.jit(draws)(x)
            np.testing.assert_array_equal(y, wanted)
            # One element of each row has a cotangent; if it is dropped, nothing has a gradient.
            at = np.broadcast_to((np.arange(70) % width)[None, :, None], (3, 70, 1))
            np.testing.assert_array_equal(np.asarray(dx).any(-1), np.take_along_axis(wanted, at, -1)[..., 0])
        cpu = jax.device_put(x, jax.devices("cpu")[0])
        np.testing.assert_array_equal(jax.jit(draws)(cpu)[0], wanted)
        words = [jnp.asarray(w).reshape(1, 1, 1) for w in KEY]
        for keeps in (dropout.kept, dropout.kept_by_blocks):
            np.testing.assert_array_equal(keeps(x.shape, 2, words, THRESHOLD), wanted)


def test_vmap_numbers_each_example_by_itself():
    x, keys = normal((4, 3, 5, 40), "float32"), jax.random.split(jax.random.key(1), 4)
    f = lambda x, key: jaxkern.softmax(x, scale=0.5, causal=True, dropout_rate=RATE, dropout_key=key)
    # The bits are compared in one algorithm: by default, single examples have kernels written by hand, which round otherwise.
    with algorithms.force(softmax="warp"):
        each = np.stack([f(x[i], keys[i]) for i in range(4)])
        np.testing.assert_array_equal(jax.jit(jax.vmap(f))(x, keys), each)
        for at in (1, 2):
            np.testing.assert_array_equal(jax.jit(jax.vmap(f, (at, 0)))(jnp.moveaxis(x, 0, at), keys), each)
        same = np.stack([f(x[i], keys[0]) for i in range(4)])  # one key: the same elements in each example
        np.testing.assert_array_equal(jax.vmap(f, (0, None))(x, keys[0]), same)
        np.testing.assert_array_equal(jax.vmap(f, (None, 0))(x[0], keys), np.stack([f(x[0], k) for k in keys]))
        grad = lambda x, key: jax.grad(lambda x: jnp.sum(f(x, key) ** 2))(x)
        found = jax.jit(jax.vmap(grad))(x, keys)
        np.testing.assert_array_equal(found, np.stack([grad(x[i], keys[i]) for i in range(4)]))
        two = jax.jit(jax.vmap(jax.vmap(lambda x, key: f(x, key), (0, None))))(x, keys)
        np.testing.assert_array_equal(two, np.stack([[f(x[i, j], keys[i]) for j in range(3)] for i in range(4)]))
    last = jax.jit(jax.vmap(f, (3, 0)))(jnp.moveaxis(x, 0, 3), keys)  # the row is not the last dimension
    for found in (last, np.stack([f(x[i], keys[i]) for i in range(4)])):
        np.testing.assert_array_equal(found != 0, each != 0)
        np.testing.assert_allclose(found, each, rtol=1e-6)


@pytest.mark.parametrize("at", [0, 1, -1])
def test_vmap_over_each_operand(at):
    x, bias = normal((3, 4, 5), "float32"), normal((3, 4, 5), "float32", 1)
    where, scales = jnp.asarray(np.random.default_rng(0).random((3, 4, 5)) < 0.7), jnp.array([0.5, 1.0, 2.0])
    full = (x, bias, where, scales)
    for batched in itertools.product((False, True), repeat=4):
        if not any(batched):
            continue
        causal = sum(batched) % 2 == 1
        f = lambda x, bias, where, scale: jaxkern.softmax(x, bias=bias, where=where, scale=scale, causal=causal)
        args = [jnp.moveaxis(a, 0, at) if b and a.ndim == 3 else a if b else a[0] for a, b in zip(full, batched)]
        axes = [at if b and a.ndim == 3 else 0 if b else None for a, b in zip(full, batched)]
        found = jax.jit(jax.vmap(f, axes))(*args)
        each = [f(*(a[i] if b else a[0] for a, b in zip(full, batched))) for i in range(3)]
        np.testing.assert_allclose(found, np.stack(each), rtol=1e-6)


# ---- derivatives


def plain(x, scale, bias, where, keep, log):
    """The composition in jnp, which JAX differentiates; no row is empty here."""
    s = scale * x + bias
    queries, keys = x.shape[-2:]
    part = where if log else where & (jnp.arange(keys) <= jnp.arange(queries)[:, None] + keys - queries)
    if log:
        return jnp.where(part, jax.nn.log_softmax(jnp.where(part, s, -1e30)), 0)
    y = jax.nn.softmax(jnp.where(part, s, -1e30))
    return y if keep is None else jnp.where(keep, y * 65536 / (65536 - THRESHOLD), 0)


DERIVATIVES = {
    "vjp": lambda f, xs, ts, t: jax.vjp(f, *xs)[1](t),
    "jvp": lambda f, xs, ts, t: jax.jvp(f, xs, ts),
    "linearize": lambda f, xs, ts, t: jax.linearize(f, *xs)[1](*ts),
    "forward over reverse": lambda f, xs, ts, t: jax.jvp(grad(f, t), xs, ts),
    "reverse over forward": lambda f, xs, ts, t: jax.grad(lambda xs: jnp.sum(jax.jvp(f, xs, ts)[1] * jnp.sin(t)))(xs),
    "reverse over reverse": lambda f, xs, ts, t: jax.grad(
        lambda xs: sum(jnp.vdot(a, b) for a, b in zip(grad(f, t)(*xs), ts))
    )(xs),
    "third order": lambda f, xs, ts, t: jax.jvp(lambda *xs: jax.jvp(grad(f, t), xs, ts)[1], xs, ts)[1],
    "gradient in the cotangent": lambda f, xs, ts, t: jax.grad(
        lambda t: sum(jnp.sum(jnp.sin(d)) for d in jax.vjp(f, *xs)[1](t))
    )(t),
    "vmap of grad": lambda f, xs, ts, t: jax.vmap(lambda s: grad(f, t)(xs[0], s, xs[2]))(jnp.array([0.3, 1.7])),
    "grad of vmap": lambda f, xs, ts, t: jax.grad(
        lambda b: jnp.sum(jnp.sin(jax.vmap(lambda x: f(x, xs[1], b))(jnp.stack([xs[0], ts[0]]))))
    )(xs[2]),
    "remat": lambda f, xs, ts, t: grad(jax.checkpoint(lambda *xs: f(*xs) ** 2), t)(*xs),
    "scan": lambda f, xs, ts, t: jax.grad(
        lambda x: jax.lax.scan(lambda c, s: (c + f(c, s, xs[2]), None), x, jnp.array([0.5, 1.5]))[0].sum()
    )(xs[0]),
    "scale alone": lambda f, xs, ts, t: jax.grad(lambda s: jnp.sum(f(xs[0], s, xs[2]) * t))(xs[1]),
    "bias alone, forward": lambda f, xs, ts, t: jax.jvp(lambda b: f(xs[0], xs[1], b), xs[2:], ts[2:]),
}


def grad(f, t):
    return lambda *xs: jax.grad(lambda xs: jnp.sum(jnp.sin(f(*xs)) * t))(xs)


# Dropout keeps x for the gradient, softmax alone y.
OF_DROPOUT = (
    "vjp",
    "jvp",
    "forward over reverse",
    "reverse over reverse",
    "gradient in the cotangent",
    "vmap of grad",
    "remat",
    "scale alone",
)
OF_SOFTMAX = [n for n in DERIVATIVES if n not in ("vmap of grad", "remat")]
OF_LOG = ("vjp", "jvp", "forward over reverse", "reverse over reverse")


@pytest.mark.parametrize("kind, names", [("dropout", OF_DROPOUT), ("softmax", OF_SOFTMAX), ("log", OF_LOG)])
def test_derivatives(kind, names, x64):
    """Derivatives by x, scale and bias, in float64, so that a wrong rule cannot hide behind rounding."""
    shape = (2, 3, 4, 5)
    draw = lambda shape, seed: jnp.asarray(np.random.default_rng(seed).normal(size=shape))
    where = np.random.default_rng(0).random((2, 1, 4, 5)) < 0.6
    where[..., :2] = True  # no empty row
    log, dropout = kind == "log", {"dropout_rate": RATE, "dropout_key": KEY} if kind == "dropout" else {}
    keep = kept(shape) if dropout else None
    xs, ts = ((draw(shape, k), draw((), k + 1), draw((3, 1, 5), k + 2)) for k in (1, 4))

    def ours(x, scale, bias):
        if log:
            return jnp.where(where, jaxkern.log_softmax(x, where=where, scale=scale, bias=bias), 0)
        return jaxkern.softmax(x, where=where, scale=scale, bias=bias, causal=True, **dropout)

    theirs = lambda x, scale, bias: plain(x, scale, bias, where, keep, log)
    xs, ts = tuple(xs), tuple(ts)
    run = lambda f: jax.jit(lambda *args: {n: DERIVATIVES[n](f, *args) for n in names})(xs, ts, draw(shape, 9))
    found, wanted = run(ours), run(theirs)
    for n in names:
        assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted[n])) > 1e-3  # or nothing is compared
        close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-11, err_msg=n)
        jax.tree.map(close, found[n], wanted[n])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_of_bias_and_scale(dtype):
    shape = (3, 4, 9, 40)
    x, g, bias = normal(shape, dtype), normal(shape, dtype, 1, 1.0), normal((4, 1, 40), dtype, 2)
    f = lambda scale, bias: jaxkern.softmax(x, scale=scale, bias=bias, dropout_rate=RATE, dropout_key=KEY)
    for scale in (0.75, 0.0):
        dscale, dbias = jax.jit(lambda s, b: jax.vjp(f, s, b)[1](g))(jnp.float32(scale), bias)
        ds = reference(x, g, scale, bias, keep=kept(shape))[2]
        eps = float(jnp.finfo(dtype).eps)
        terms = np.abs(ds).sum((0, 2), keepdims=True)[0]
        assert (
            dbias.dtype == dtype
            and (
                np.abs(np.asarray(dbias).astype(wide) - ds.sum((0, 2), keepdims=True)[0]) <= 2 * eps * terms + 1e-6
            ).all()
        )
        products = ds * np.asarray(x).astype(wide)
        assert abs(wide(float(dscale)) - products.sum()) <= eps * np.abs(products).sum() + 1e-6


# ---- what is compiled


def calls(f, *args):
    """Names of this library's primitives in the jaxpr."""
    text = str(jax.make_jaxpr(f)(*args))
    return sorted(line.split("=")[1].split("[")[0].strip() for line in text.splitlines() if "= jaxkern_" in line)


def test_what_does_nothing_leaves_no_operand():
    x, where = jnp.zeros((4, 8)), jnp.ones((4, 8), bool)
    same = lambda f, g: str(jax.make_jaxpr(f)(x)) == str(jax.make_jaxpr(g)(x))
    masked = lambda x: jaxkern.softmax(x, where=where)
    assert same(lambda x: jaxkern.softmax(x, where=where, scale=1.0, dropout_rate=0.0), masked)
    assert same(lambda x: jaxkern.softmax(x, scale=1, dropout_rate=1e-9, dropout_key=KEY), jaxkern.softmax)
    assert same(lambda x: jaxkern.log_softmax(x, where=where, scale=1), lambda x: jaxkern.log_softmax(x, where=where))
    assert calls(masked, x) == ["jaxkern_softmax"] and not same(masked, jaxkern.softmax)


def needs_kernels():
    return pytest.mark.skipif(not (ON_GPU and registry.kernels.module), reason="kernels run on a GPU")


@needs_kernels()
def test_one_kernel_each_way_and_nothing_materialised():
    x = jax.ShapeDtypeStruct((8, 4, 64, 256), jnp.bfloat16)
    extras = {
        "bias": jax.ShapeDtypeStruct((4, 64, 256), jnp.bfloat16),
        "where": jax.ShapeDtypeStruct((8, 1, 64, 256), jnp.bool_),
    }
    key = jax.eval_shape(lambda: jax.random.key(0))
    f = lambda x, key, extras: jaxkern.softmax(
        x, scale=0.125, causal=True, dropout_rate=RATE, dropout_key=key, **extras
    )

    def both(x, g, key, extras):
        y, pull = jax.vjp(lambda x: f(x, key, extras), x)
        return y, pull(g)[0]

    compiled = jax.jit(both).lower(x, x, key, extras).compile()
    text = compiled.as_text()
    names = re.findall(r'custom_call_target="(jaxkern\w*)"', text)
    assert names == ["jaxkern_softmax"] * 2
    assert compiled.memory_analysis().temp_size_in_bytes <= 32 * 8 * 4 * 64  # O(rows)
    each = jax.jit(jax.vmap(lambda x, key: jaxkern.softmax(x, causal=True, dropout_rate=RATE, dropout_key=key)))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
    assert each.lower(x, keys).compile().memory_analysis().temp_size_in_bytes <= 48 * 8 * 4 * 64


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", [a for a in algorithms.names("softmax") if a != "strided"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_algorithms(algorithm, dtype):
    done = 0
    for width in (5, 64, 333, 1024, 1030, 4096, 8000):
        # The bias has the rows of x, and so has the mask, whose packs of 8 elements are too many words of float64 for a lane.
        few = dtype == "float64" and algorithm in ("lanes", "warp")
        if not few and algorithms.fits("softmax", algorithm, 6, 2 * width, dtype=dtype, backward=True):
            with algorithms.force(softmax=algorithm):
                check(FEATURES, (2, 3, width), dtype, mask_shape=(2, 3, width), bias_shape=(3, width))
                if width in (64, 1024, 4096):  # whole packs
                    for feature in ("scale", "bias", "causal", "dropout"):
                        check((feature,), (2, 3, width), dtype, bias_shape=(3, width))
            done += 1
    assert done or few


def test_exported_with_a_symbolic_size():
    shape = jax.export.symbolic_shape("b, 4, k")
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    f = jax.jit(lambda x: jaxkern.softmax(x, causal=True, scale=0.5, dropout_rate=RATE, dropout_key=KEY))
    exported = jax.export.export(f, disabled_checks=jaxkern.export_checks())(x)
    x = normal((3, 4, 21), "float32")
    np.testing.assert_allclose(jax.jit(exported.call)(x), f(x), rtol=2e-6)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 3)])
def test_empty(shape):
    y, pull = jax.vjp(
        lambda x: jaxkern.softmax(x, causal=True, scale=2.0, dropout_rate=RATE, dropout_key=KEY), jnp.zeros(shape)
    )
    assert y.shape == pull(y)[0].shape == shape


# ---- bad input

X = jnp.zeros((4, 8))


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"scale": "2"}, TypeError, "scale must be a real number or a scalar array"),
        ({"scale": True}, TypeError, "scale must be a real number"),
        ({"scale": jnp.ones(3)}, ValueError, "scale must be a scalar, got shape (3,)"),
        ({"scale": jnp.array(1j)}, TypeError, "scale must be a real number, got complex64"),
        ({"bias": jnp.ones(8, int)}, TypeError, "bias must be of floating-point type, got int32[8]"),
        ({"bias": jnp.ones(7)}, ValueError, "bias of shape (7,) does not broadcast to x of shape (4, 8)"),
        ({"bias": jnp.ones((2, 4, 8))}, ValueError, "bias of shape (2, 4, 8) does not broadcast to x of shape (4, 8)"),
        ({"bias": "no"}, TypeError, "bias must be an array of floating-point type, got str"),
        ({"bias": jnp.ones(8), "where": jnp.ones(7, bool)}, ValueError, "where of shape (7,) does not broadcast"),
        ({"causal": 1}, TypeError, "causal must be True or False, got 1"),
        (
            {"causal": True, "axis": 0},
            ValueError,
            "causal needs axis to be the last of two or more dimensions, got axis 0",
        ),
        ({"causal": True, "axis": None}, ValueError, "causal needs axis to be the last"),
        ({"dropout_rate": 1.0, "dropout_key": KEY}, ValueError, "dropout_rate must be in [0, 1), got 1.0"),
        ({"dropout_rate": -0.1, "dropout_key": KEY}, ValueError, "dropout_rate must be in [0, 1), got -0.1"),
        ({"dropout_rate": float("nan"), "dropout_key": KEY}, ValueError, "dropout_rate must be in [0, 1), got nan"),
        (
            {"dropout_rate": jnp.float32(0.1), "dropout_key": KEY},
            TypeError,
            "dropout_rate must be a number known while tracing",
        ),
        ({"dropout_rate": 0.1}, ValueError, "dropout_rate of 0.1 needs a dropout_key"),
        (
            {"dropout_rate": 0.1, "dropout_key": 3},
            TypeError,
            "dropout_key must be a key of jax.random or uint32[2], got int32[]",
        ),
        ({"dropout_rate": 0.1, "dropout_key": np.zeros(4, np.uint32)}, TypeError, "or uint32[2], got uint32[4]"),
        (
            {"dropout_rate": 0.1, "dropout_key": jax.random.split(jax.random.key(0))},
            ValueError,
            "a single key, got an array of shape (2,)",
        ),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error) as caught:
        jaxkern.softmax(X, **arguments)
    assert message in str(caught.value) and "jaxkern.softmax: " in str(caught.value)


def test_errors_of_log_softmax_and_of_one_dimension():
    with pytest.raises(ValueError, match=r"jaxkern.log_softmax: bias of shape \(7,\)"):
        jaxkern.log_softmax(X, bias=jnp.ones(7))
    with pytest.raises(ValueError, match="causal needs axis to be the last of two or more dimensions"):
        jaxkern.softmax(jnp.zeros(8), causal=True)
