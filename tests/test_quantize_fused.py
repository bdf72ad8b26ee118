"""Norms that quantize, one scale for all, transposed copies: numbers, derivatives, bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_quantize import TYPES, every_dtype, every_type, rows, same, wanted

import jaxkern
from jaxkern import DelayedScale, Quantization
from jaxkern._definitions.quantize import limit

NAMES = ("rms_norm", "layer_norm")
EPS = 1e-6
every_name = pytest.mark.parametrize("name", NAMES)


def given_scale(x, to, factor):
    """The rounding of x / factor in NumPy, and max|x| of its rows."""
    most = np.float32(limit(to))
    with np.errstate(all="ignore"):
        y = np.clip(x.astype(np.float32) * (np.float32(1) / np.float32(factor)), -most, most)
        q = np.where(np.isnan(y), 0, np.round(y)).astype(np.int8) if to == "int8" else y.astype(TYPES[to])
    return q, np.abs(x.astype(np.float32)).max(-1, keepdims=True)


def quantized_as(y, to, block=None, given=None):
    """(q, scales) of y [..., width] in NumPy."""
    if given is not None:
        return given_scale(y, to, given)
    blocks = y.reshape(*y.shape[:-1], -1, block or y.shape[-1])
    q, scale = wanted(blocks, to)
    return q.reshape(y.shape), scale[..., 0]


def normalised(name, s, scale, bias):
    """The normalised rows in float64."""
    s = s.astype(np.float64)
    with np.errstate(all="ignore"):
        if name == "layer_norm":
            s = s - s.mean(-1, keepdims=True)
        y = s / np.sqrt((s * s).mean(-1, keepdims=True) + EPS)
        y = y if scale is None else y * scale.astype(np.float64)
        return y if bias is None else y + bias.astype(np.float64)


def close(found, exact, to, share=2e-3):
    """q except for a few neighbours, and scales except for rounding."""
    (q, scale), (exact_q, exact_scale) = found, exact
    q, exact_q = (np.asarray(a).astype(np.float32) for a in (q, exact_q))
    np.testing.assert_allclose(np.asarray(scale), exact_scale, rtol=3e-6)
    np.testing.assert_array_equal(np.isnan(q), np.isnan(exact_q))
    step = {"int8": 0, "float8_e4m3fn": 2**-3, "float8_e5m2": 2**-2}[to] * np.abs(exact_q)
    least = {"int8": 1, "float8_e4m3fn": 2**-9, "float8_e5m2": 2**-16}[to]
    differs = np.abs(q - exact_q)[~np.isnan(q)]
    assert (differs <= np.maximum(step, least)[~np.isnan(q)]).all() and (differs > 0).mean() < share


def arguments(name, shape, dtype, residual, seed=None):
    rng = np.random.default_rng(seed)
    of = lambda *shape: jnp.asarray(rng.normal(0.3, 1, shape), dtype)
    vectors = [jnp.asarray(rng.normal(1, 0.3, shape[-1]), jnp.float32) for _ in range(1 + (name == "layer_norm"))]
    return of(*shape), of(*shape) if residual else None, vectors


# ---- norms


@every_name
@every_type
@every_dtype
@pytest.mark.parametrize("width", [64, 100, 128, 384, 1024, 4096, 4099, 36864])
@pytest.mark.sweep(5)
def test_norms(name, to, dtype, width):
    """Rows, blocks and one scale, with a residual in every other case."""
    x, more, vectors = arguments(name, (37 if width < 1000 else 5, width), dtype, width % 128 == 0)
    s = x if more is None else (x.astype(jnp.float32) + more.astype(jnp.float32)).astype(dtype)
    exact = normalised(name, np.asarray(s), *map(np.asarray, vectors), *[None] * (2 - len(vectors)))
    exact = exact.astype(np.float32)
    for block, given in ((None, None), (128, None), (32, None), (None, 0.02)):
        if block and width % block:
            continue
        how = Quantization(to, block, given)
        f = functools.partial(getattr(jaxkern, name), eps=EPS, residual=more, quantize=how)
        found = f(x, *vectors)
        if more is not None:
            found, total = found
            np.testing.assert_array_equal(np.asarray(total, np.float32), np.asarray(s, np.float32))
        assert found[0].dtype == TYPES[to] and found[0].shape == x.shape
        if given is None:
            assert found[1].shape == (*x.shape[:-1], width // (block or width)) and found[1].dtype == jnp.float32
            close(found, quantized_as(exact, to, block), to)
        else:
            q, scale, amax = found
            assert scale == np.float32(given) and amax.shape == () and amax.dtype == jnp.float32
            close((q, amax), (given_scale(exact, to, given)[0], np.abs(exact).max()), to)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_rounding(dtype):
    """What the norm returns in float32 is what is quantized, not its rounding to the dtype of x."""
    x, _, vectors = arguments("layer_norm", (64, 512), dtype, False, seed=1)
    found = jaxkern.layer_norm(x, *vectors, quantize=Quantization())
    wide = jaxkern.layer_norm(x, *vectors, dtype=jnp.float32)
    exact = jaxkern.quantize_rows(wide)
    close((found[0], found[1]), [np.asarray(a) for a in exact], "float8_e4m3fn", 1e-3)
    if dtype == "bfloat16":
        twice, _ = jaxkern.quantize_rows(wide.astype(dtype))
        assert (np.asarray(twice) != np.asarray(found[0])).mean() > 2e-3


@every_name
def test_functions_and_masks(name):
    x, _, vectors = arguments(name, (6, 40), "float32", False)
    b = jnp.linspace(0, 1, 40)
    f = functools.partial(getattr(jaxkern, name), x, *vectors)
    g = dict(epilogue=lambda v, b: jax.nn.silu(v) + b, epilogue_args=[b])
    keep = jnp.arange(40) % 3 > 0
    for options in (g, {"where": keep}, g | {"where": keep}):
        y = np.asarray(f(**options))
        for how, exact in (
            (Quantization(jnp.int8), quantized_as(y, "int8")),
            (Quantization(jnp.int8, 8), quantized_as(y, "int8", 8)),
        ):
            close(f(**options, quantize=how), exact, "int8", 0.02)
        q, _, amax = f(**options, quantize=Quantization(jnp.int8, scale=0.03))
        close((q, amax), (given_scale(y, "int8", 0.03)[0], np.abs(y).max()), "int8", 0.02)


@pytest.mark.parametrize("block", [None, 128])
def test_int8_of_numbers_that_are_not_finite(block):
    """All of a row or block with NaN or infinity becomes 0, and the others are as without it."""
    x = np.random.default_rng(0).normal(size=(3, 8192)).astype(np.float32)
    scale = np.ones(8192, np.float32)
    how = Quantization("int8", block)
    plain, _ = jaxkern.rms_norm(x, scale, quantize=how)
    for special in (np.nan, np.inf):
        scale[4097] = special
        q, scales = jaxkern.rms_norm(x, scale, quantize=how)
        held = slice(None) if block is None else slice(4096, 4224)
        assert not np.asarray(q)[:, held].any() and not np.isfinite(np.asarray(scales)).all()
        if block is not None:
            for part in (slice(4096), slice(4224, None)):
                np.testing.assert_array_equal(q[:, part], plain[:, part])


def test_special_rows_of_norms():
    x = np.ones((4, 128), np.float32)
    x[0], x[1, 3], x[2, 5] = 0, np.nan, np.inf
    q, scale = jaxkern.rms_norm(x, quantize=Quantization())
    q = np.asarray(q).astype(np.float32)
    assert not q[0].any() and scale[0, 0] == 1 and np.isnan(q[1]).all() and np.isnan(scale[1, 0])
    assert np.isnan(q[2, 5]) and (q[3] == 448).all()
    _, _, amax = jaxkern.rms_norm(x, quantize=Quantization(scale=1.0))
    assert np.isnan(amax)


# ---- one scale, transposed copies


LARGE = {
    "rows": lambda x, w: jaxkern.quantize_rows(x, jnp.float8_e4m3fn),
    "int8 rows": lambda x, w: jaxkern.quantize_rows(x, jnp.int8),
    "blocks": lambda x, w: jaxkern.quantize_blocks(x, jnp.float8_e5m2, block=128),
    "given": lambda x, w: jaxkern.quantize_tensor(x, jnp.int8, scale=0.05)[:1],
    "transposed": lambda x, w: jaxkern.quantize_blocks(x, jnp.int8, block=128, transposed=True),
    "rms_norm": lambda x, w: jaxkern.rms_norm(x, w, quantize=jaxkern.Quantization(jnp.int8)),
    "layer_norm": lambda x, w: jaxkern.layer_norm(x, w, w, residual=x, quantize=jaxkern.Quantization(jnp.int8, 128)),
    "norm with a function": lambda x, w: jaxkern.rms_norm(
        x, w, epilogue=jax.nn.silu, quantize=jaxkern.Quantization(jnp.int8)
    ),
}


@pytest.mark.optimized
@pytest.mark.parametrize("special", [None, np.nan, np.inf, 3e38])
@pytest.mark.parametrize("call", LARGE)
def test_large_arrays_are_as_their_parts(call, special):
    """The CPU runs large arrays without what few numbers need, and again with it if there are such numbers."""
    x = np.random.default_rng().normal(0, 2, (1024, 256)).astype("float32")
    w = np.random.default_rng().normal(1, 0.2, 256).astype("float32")
    f = jax.jit(LARGE[call])
    for of_parameter in (False, True):
        if special is not None and of_parameter:
            w[7] = special
        elif special is not None:
            x[[3, 130, 1023], [0, 255, 17]] = special, -special, special
        whole = f(x, w)
        parts = [f(part, w) for part in np.split(x, 8)]
        for k, (a, *of_parts) in enumerate(zip(*map(jax.tree.leaves, (whole, *parts)), strict=True)):
            b = np.concatenate(of_parts, next(d for d, n in enumerate(a.shape) if n != of_parts[0].shape[d]))
            assert a.dtype == b.dtype and a.shape == b.shape
            a, b = (np.asarray(v).astype("float32") for v in (a, b))
            np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
            if "norm" not in call:
                np.testing.assert_array_equal(a, b)
            elif k == 0:
                assert (np.abs(np.nan_to_num(a) - np.nan_to_num(b)) <= 1).all()
            else:
                np.testing.assert_allclose(a, b, 1e-5)


@every_type
@every_dtype
@pytest.mark.parametrize("shape", [(256, 384), (2, 128, 128), (3, 40, 24), (128, 130), (7,)])
@pytest.mark.sweep(4)
def test_tensor(shape, dtype, to):
    x = rows(shape, dtype)
    x[np.isinf(x.astype(np.float32))] = 3
    transposed = len(shape) > 1
    q, scale, amax, *rest = jaxkern.quantize_tensor(x, to, scale=0.05, transposed=transposed)
    exact, most = given_scale(x, to, 0.05)
    same([q, amax], [exact, most.max()])
    assert scale == np.float32(0.05) and amax.dtype == jnp.float32 and np.isnan(amax) == np.isnan(most.max())
    if transposed:
        assert rest[0].dtype == TYPES[to]
        same(rest, [np.swapaxes(exact, -1, -2)])
    x[np.isnan(x.astype(np.float32))] = 0
    q, scale, amax = jaxkern.quantize_tensor(x, to)
    largest = np.abs(x.astype(np.float32)).max()
    same([q, amax, scale], [given_scale(x, to, scale)[0], largest, largest * np.float32(1 / limit(to))])


@every_type
@every_dtype
@pytest.mark.parametrize("shape", [(256, 384), (2, 3, 128, 256), (64, 128)])
@pytest.mark.sweep(2)
def test_transposed(shape, dtype, to):
    """What the transpose gives on its own; with blocks of 128 from a kernel of its own."""
    x = rows(shape, dtype)
    turned = np.swapaxes(x, -1, -2)
    block = 128 if shape[-2] % 128 == 0 else 32
    for f in (jaxkern.quantize_rows, functools.partial(jaxkern.quantize_blocks, block=block)):
        found = f(x, to, transposed=True)
        for pair, part in zip(found, (x, turned), strict=True):
            alone = f(part, to)
            assert [a.shape for a in pair] == [a.shape for a in alone] and pair[0].dtype == TYPES[to]
            same(pair, alone)


# ---- delayed scales


@pytest.mark.parametrize("most_recent", [False, True])
def test_delayed_scale(most_recent):
    """The scale follows Transformer Engine's, over steps with zeros and an infinity."""
    amaxes = [0.0, 4.0, 100.0, np.inf, 2.0, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0]
    state = DelayedScale.create(jnp.int8, length=3, margin=1, most_recent=most_recent, scale=5.0)
    update = jax.jit(DelayedScale.update)
    history, scale = [0.0] * 3, 5.0
    for amax in amaxes:
        state = update(state, amax)
        history = [amax, *history[:-1]]
        most = history[0] if most_recent else max(history)
        scale = most / 127 * 2 if 0 < most < np.inf else scale
        np.testing.assert_allclose(float(state.scale), scale, rtol=1e-6)
        assert state.history.tolist() == history
    assert not np.isnan(float(update(state, jnp.nan).scale))
    leaves, tree = jax.tree.flatten(state)
    assert len(leaves) == 2 and jax.tree.unflatten(tree, leaves).margin == 1


def test_delayed_scale_in_a_loop():
    """Norms with the scale of the steps before, under scan."""
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(5, 16, 128)) * np.arange(1, 6)[:, None, None], jnp.float32)

    def step(state, x):
        q, scale, amax = jaxkern.rms_norm(x, epilogue=jnp.exp, quantize=Quantization(state.dtype, scale=state.scale))
        return state.update(amax), (jaxkern.dequantize(q, scale), scale)

    state, (ys, scales) = jax.jit(lambda s: jax.lax.scan(step, s, xs))(DelayedScale.create(length=2))
    exact = np.exp(normalised("rms_norm", np.asarray(xs), None, None))
    most = exact.max((1, 2))
    np.testing.assert_allclose(scales[1:], [max(most[max(k - 1, 0) : k + 1]) / 448 for k in range(4)], rtol=1e-5)
    np.testing.assert_allclose(ys, np.minimum(exact, 448 * np.asarray(scales)[:, None, None]), rtol=0.07, atol=1e-3)


# ---- transformations


@every_name
def test_derivatives(name):
    """q and scale have no derivative; straight through, the result has the derivative of the norm; the sum has its own."""
    x, more, vectors = arguments(name, (6, 256), "float32", True)
    g = jnp.asarray(np.random.default_rng(0).normal(size=x.shape), jnp.float32)
    norm = getattr(jaxkern, name)

    def f(x, more, *vectors):
        (q, scale), s = norm(x, *vectors, residual=more, quantize=Quantization(block=128))
        y, _ = norm(x, *vectors, residual=more)
        return jnp.sum(g * jaxkern.dequantize(q, scale, straight_through=y)) + jnp.sum(s * s)

    def plain(x, more, *vectors):
        y, s = norm(x, *vectors, residual=more)
        return jnp.sum(g * y) + jnp.sum(s * s)

    at = tuple(range(2 + len(vectors)))
    found, exact = (jax.jit(jax.grad(h, at))(x, more, *vectors) for h in (f, plain))
    for a, b in zip(found, exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    zero = jax.grad(lambda x: sum(jnp.sum(a.astype(jnp.float32)) for a in norm(x, quantize=Quantization())))(x)
    assert not np.asarray(zero).any()
    t = jax.jvp(lambda x: norm(x, residual=more, quantize=Quantization())[1], (x,), (g,))[1]
    np.testing.assert_array_equal(t, g)
    zero = jax.grad(lambda x: sum(jnp.sum(a.astype(jnp.float32)) for a in jaxkern.quantize_tensor(x)))(x)
    assert not np.asarray(zero).any()
    assert jax.grad(lambda x: jnp.sum(g * jaxkern.dequantize(*jaxkern.quantize_rows(x), straight_through=x)))(
        x
    ).tolist() == (g.tolist())


def test_straight_through_computes_nothing_more():
    """The norm that the derivative is taken of is not computed forward."""
    how = Quantization()
    f = lambda x: jaxkern.dequantize(*jaxkern.rms_norm(x, quantize=how), straight_through=jaxkern.rms_norm(x))
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    text = jax.jit(f).lower(x).compile().as_text()
    assert text.count(" rsqrt(") + text.count('custom_call_target="jaxkern_') == 1


@every_name
def test_batches(name):
    x, more, vectors = arguments(name, (3, 5, 128), "float32", True)
    norm = getattr(jaxkern, name)
    f = lambda x, more, *v: norm(x, *v, residual=more, quantize=Quantization(jnp.int8, 64))
    for axis in range(2):
        found = jax.vmap(f, (axis, axis, *[None] * len(vectors)), axis)(x, more, *vectors)
        jax.tree.map(lambda a, b: same([a], [b]), found, f(x, more, *vectors))
    several = [jnp.stack([v, 2 * v, -v]) for v in vectors]
    found = jax.vmap(f)(x, more, *several)
    apart = [f(x[k], more[k], *(v[k] for v in several)) for k in range(3)]
    jax.tree.map(lambda a, *b: alike(a, jnp.stack(b)), found, *apart)
    scales = jnp.array([0.01, 0.02, 0.5])
    for h in (
        lambda x, s: norm(x, quantize=Quantization(jnp.int8, scale=s)),
        lambda x, s: jaxkern.quantize_tensor(x, jnp.int8, scale=s),
    ):
        for s, d in ((scales, 0), (scales[0], None)):
            found = jax.vmap(h, (0, d))(x, s)
            apart = [h(x[k], s if d is None else s[k]) for k in range(3)]
            for a, b in zip(found, zip(*apart), strict=True):
                alike(a, jnp.stack(b))


def alike(found, exact):
    """Equal except for the order of sums, which XLA computes if parameters or scales are batched."""
    np.testing.assert_allclose(
        *(np.asarray(a).astype(np.float32) for a in (found, exact)), 1e-5, found.dtype == jnp.int8
    )


def test_batches_of_matrices():
    x = jnp.asarray(rows((2, 3, 128, 256), "bfloat16"))
    flat = lambda y: [a.astype(jnp.float32) for a in jax.tree.leaves(y)]
    blocks = functools.partial(jaxkern.quantize_blocks, transposed=True)
    tensor = lambda x: jaxkern.quantize_tensor(x, scale=0.5, transposed=True)
    same(flat(jax.vmap(blocks, 1)(x)), flat(blocks(x.swapaxes(0, 1))))
    found = jax.vmap(tensor)(x)
    apart = [tensor(x[k]) for k in range(2)]
    same(flat(found), [jnp.stack(a) for a in zip(*map(flat, apart))])
    found = jax.vmap(lambda x, s: jaxkern.quantize_tensor(x, scale=s, transposed=True))(x, jnp.array([0.5, 2.0]))
    same(flat(found)[0][1], flat(jaxkern.quantize_tensor(x[1], scale=2.0))[0])
    mesh = jax.make_mesh((1,), ("r",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    mapped = jax.shard_map(blocks, mesh=mesh, in_specs=P("r"), out_specs=P("r"))
    same(flat(jax.jit(mapped)(x)), flat(blocks(x)))
    norm = lambda x: jaxkern.rms_norm(x, quantize=Quantization(block=128))
    same(flat(jax.jit(jax.shard_map(norm, mesh=mesh, in_specs=P("r"), out_specs=P("r")))(x)), flat(norm(x)))


# ---- bad input


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda x: jaxkern.rms_norm(x, quantize=jnp.int8),
            TypeError,
            "rms_norm: quantize must be a jaxkern.Quantization",
        ),
        (
            lambda x: jaxkern.rms_norm(x, quantize=Quantization(jnp.int16)),
            TypeError,
            "Quantization: dtype must be one of",
        ),
        (lambda x: jaxkern.rms_norm(x, dtype=x.dtype, quantize=Quantization()), ValueError, "dtype and quantize"),
        (
            lambda x: jaxkern.layer_norm(x, axis=0, quantize=Quantization()),
            ValueError,
            "layer_norm: quantize takes rows",
        ),
        (lambda x: jaxkern.rms_norm(x, quantize=Quantization(block=3)), ValueError, "rms_norm: a block of 3"),
        (lambda x: jaxkern.rms_norm(x, quantize=Quantization(block=2, scale=1.0)), ValueError, "a block or a scale"),
        (
            lambda x: jaxkern.rms_norm(x, quantize=Quantization(scale=x)),
            ValueError,
            "Quantization: scale must be one number",
        ),
        (lambda x: jaxkern.quantize_tensor(x, scale=x), ValueError, "quantize_tensor: scale must be one number"),
        (lambda x: jaxkern.quantize_tensor(x[0], transposed=True), ValueError, "quantize_tensor: transposed takes"),
        (
            lambda x: jaxkern.quantize_rows(x[0], transposed=True),
            ValueError,
            "quantize_rows: transposed takes matrices",
        ),
        (
            lambda x: jaxkern.quantize_rows(x, scale=1.0, transposed=True),
            ValueError,
            "quantize_rows: transposed cannot be used with scale",
        ),
        (
            lambda x: jaxkern.quantize_blocks(x, block=8, transposed=True),
            ValueError,
            "a block of 8 does not divide the columns",
        ),
        (lambda x: jaxkern.dequantize(x, 1.0, straight_through=x[0]), ValueError, "dequantize: straight_through of"),
        (lambda x: DelayedScale.create(jnp.int16), TypeError, "DelayedScale.create: dtype must be one of"),
        (lambda x: DelayedScale.create(length=0), ValueError, "DelayedScale.create: length must be"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(jnp.ones((4, 8)))
