"""rms_norm and layer_norm: values, gradients, special rows, transformations, bad input.

What is expected is the same formula in float64, differentiated by JAX.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ON_GPU
from problems import WIDTHS
from reference import DTYPES

import jaxkern
from jaxkern import algorithms
from jaxkern._core import compat, launch, registry
from jaxkern._definitions.traced import traced
from jaxkern._ops.norm import plan

EPS = 1e-6


def standardized(x, over):
    x = x - over(jnp.mean, x)
    return x * jax.lax.rsqrt(over(jnp.mean, x * x) + EPS)


# The norms without scale and bias. over(reduction, x): a reduction of jnp of each row of x, with the normalised axes kept.
NORMALISED = {
    "rms_norm": lambda x, over: x * jax.lax.rsqrt(over(jnp.mean, x * x) + EPS),
    "layer_norm": standardized,
    "scale_norm": lambda x, over: x * jax.lax.rsqrt(over(jnp.sum, x * x)),
}
NAMES = ("rms_norm", "layer_norm")  # with every option
every_name = pytest.mark.parametrize("name", NAMES)
every_norm = pytest.mark.parametrize("name", NORMALISED)


def random(shape, dtype, seed=None, scale=1.0, shift=0.5):
    with compat.enable_x64(dtype == "float64"):
        return jnp.asarray(np.random.default_rng(seed).normal(shift, scale, shape), dtype)


def plain(name, x, scale=None, bias=None, axis=-1, where=None):
    """The norm in the dtype of x, as flax computes it without its fast variance."""
    masked = {} if where is None else {"where": where}
    y = NORMALISED[name](x, lambda reduction, x: reduction(x, axis, keepdims=True, **masked))
    shape = np.array(x.shape)
    others = [d for d in range(x.ndim) if d not in np.atleast_1d(np.arange(x.ndim)[np.array(axis)])]
    shape[others] = 1
    y = y if scale is None else y * jnp.broadcast_to(scale, shape[shape_axes(x, axis)]).reshape(shape)
    return y if bias is None else y + jnp.broadcast_to(bias, shape[shape_axes(x, axis)]).reshape(shape)


def shape_axes(x, axis):
    return sorted(np.atleast_1d(np.arange(x.ndim)[np.array(axis)]).tolist())


def ours(name, x, scale=None, bias=None, **options):
    return getattr(jaxkern, name)(x, scale, *([bias] if name == "layer_norm" else []), **options)


def arguments(name, shape, row, dtype, parameters, residual=False, seed=None):
    """x, scale, bias, residual; None for what there is not."""
    scale = random(row, parameters, seed, shift=1.0) if parameters else None
    bias = random(row, parameters, seed) if parameters and name == "layer_norm" else None
    return random(shape, dtype, seed), scale, bias, random(shape, dtype, seed) if residual else None


def check(name, shape, dtype, parameters="float32", axis=-1, residual=False, out=None, where=None):
    """Values, and all gradients for random cotangents."""
    row = tuple(np.array(shape)[shape_axes(np.zeros(shape), axis)])
    x, gain, bias, more = arguments(name, shape, row, dtype, parameters, residual)
    out = out or dtype
    g, g_sum = random(shape, out), random(shape, dtype)
    given = [a for a in (x, gain, bias, more) if a is not None]
    there = [a is not None for a in (x, gain, bias, more)]

    def spread(args):
        args = iter(args)
        return [next(args) if has else None for has in there]

    @jax.jit
    def found(g, g_sum, *given):
        def f(*given):
            x, gain, bias, more = spread(given)
            masked = {} if where is None else {"where": where}
            return ours(name, x, gain, bias, axis=axis, residual=more, dtype=out, **masked)

        y, pull = jax.vjp(f, *given)
        return y, pull((g, g_sum) if residual else g)

    @jax.jit
    def wanted(g, g_sum, *given):
        s = given[0]
        if residual:  # the sum is what is rounded
            s = (given[0] + given[-1]).astype(dtype).astype(jnp.float64)

        def f(s, *rest):
            _, gain, bias, _ = spread((s, *rest, None))
            return plain(name, s, gain, bias, axis, where)

        y, pull = jax.vjp(f, s, *given[1 : len(given) - residual])
        ds, *rest = pull(g)
        ds = ds + g_sum if residual else ds
        return ((y, s) if residual else y), (ds, *rest, *([ds] if residual else []))

    with compat.enable_x64(dtype == "float64"):
        ys, gradients = found(g, g_sum, *given)
    with compat.enable_x64(), jax.default_device(jax.devices("cpu")[0]):
        wide = [np.asarray(a, np.float64) for a in (g, g_sum, *given)]
        exact, slopes = jax.tree.map(np.asarray, wanted(*wide))
    width = math.prod(row)
    assert (ys[0] if residual else ys).dtype == out
    if residual:
        assert ys[1].dtype == dtype
        np.testing.assert_array_equal(np.asarray(ys[1], np.float64), exact[1])
        ys, exact = ys[0], exact[0]
    arithmetic = (np.finfo(np.float64 if dtype == "float64" else np.float32).eps) * (16 + width / 64)
    # In rows of a few elements, which may be nearly alike, the rounding of x and of products is multiplied by rstd.
    s = wide[2] + wide[-1] if residual else wide[2]
    square = np.var(s, axis) if name == "layer_norm" else np.mean(s * s, axis)
    steep = 4 / math.sqrt(min(1, square.min() + EPS)) if width <= 4 else 1
    close(ys, exact, out, arithmetic * (1 + np.abs(exact).max(initial=0)) * steep)
    assert len(gradients) == len(slopes)
    for a, b, given_to in zip(gradients, slopes, given):
        assert a.dtype == given_to.dtype and a.shape == given_to.shape
        terms = max(1, math.sqrt(math.prod(shape) / max(1, a.size)))
        close(a, b, a.dtype.name, arithmetic * (1 + np.abs(b).max(initial=0)) * terms * steep)


def close(found, wanted, dtype, atol):
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, float(jnp.finfo(dtype).eps), atol)


# ---- values and gradients


@every_norm
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((7,), -1),
        ((5, 1), -1),
        ((3, 64), 1),
        ((4, 50, 6), 1),
        ((2, 3, 5, 8), (1, 3)),
        ((2, 3, 10), (-1, -2)),
        ((6, 4), 0),
    ],
)
@pytest.mark.sweep(5)
def test_axes(name, dtype, shape, axis):
    check(name, shape, dtype, None if len(shape) == 1 else "float32", axis, residual=len(shape) == 3)


@every_name
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [*WIDTHS, 77, 100, 768, 5120, 5001, 8200, 20000])
@pytest.mark.sweep(17)
def test_widths(name, dtype, width):
    rows = 67 if width <= 2048 else 5
    check(name, (rows, width), dtype, residual=width % 2 == 0)


@every_norm
@pytest.mark.parametrize(
    ("dtype", "parameters", "out"),
    [
        ("bfloat16", "bfloat16", None),
        ("float16", "float16", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float16"),
        ("float32", None, "float16"),
        ("float64", "float32", None),
        ("float64", "float64", "float32"),
    ],
)
@pytest.mark.sweep(2)
def test_dtypes(name, dtype, parameters, out):
    for width in (64, 515):
        check(name, (33, width), dtype, parameters, residual=width == 64, out=out)


@pytest.mark.parametrize("rows", [1, 300, 20_000])
@pytest.mark.parametrize("algorithm", plan.ALGORITHMS)
@pytest.mark.sweep(5)
def test_algorithms(rows, algorithm):
    """Blocks that walk over many rows, and over fewer than their groups."""
    for width in (48, 64, 127):
        if algorithm == "cluster" and width == 127:
            continue  # its rows are whole vectors
        with algorithms.force(rms_norm=algorithm, layer_norm=algorithm):
            check("layer_norm", (rows, width), "bfloat16")


@pytest.mark.gpu
@every_name
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(700, 8200), (90, 16384), (2, 65544), (19, 98304)])
def test_rows_of_several_blocks(name, dtype, shape):
    """Clusters of 2 to 16 blocks, forward and backward, that walk over few rows and over many."""
    with algorithms.force(rms_norm="cluster", layer_norm="cluster"):
        check(name, shape, dtype, residual=shape[0] == 90)


@every_name
def test_scale_and_bias_broadcast_and_differ_in_dtype(name):
    x = random((3, 4, 8), "float32")
    y = jaxkern.rms_norm(x, jnp.full(8, 2.0), axis=(1, 2))
    close(y, np.asarray(plain("rms_norm", x, jnp.full((4, 8), 2.0), axis=(1, 2))), "float32", 1e-6)
    y = jaxkern.layer_norm(x, jnp.full((), 2, jnp.bfloat16), jnp.arange(8.0))
    close(y, np.asarray(plain("layer_norm", x, jnp.full(8, 2.0), jnp.arange(8.0))), "float32", 1e-5)
    of = lambda s, b: jaxkern.layer_norm(x, s, b).sum()
    ds, db = jax.grad(of, (0, 1))(jnp.ones(8, jnp.bfloat16), jnp.zeros(8, jnp.float32))
    assert (ds.dtype, db.dtype) == (jnp.bfloat16, jnp.float32)
    assert ours(name, jnp.arange(6).reshape(2, 3)).dtype == jnp.float32


@every_name
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where_is_flax_mask(name, dtype):
    """Statistics cover some elements, and all elements are normalised."""
    where = jnp.asarray(np.random.default_rng(0).random((5, 1, 9)) < 0.7).at[:, :, 0].set(True)
    check(name, (5, 3, 9), dtype, where=where)
    check(name, (5, 3, 9), dtype, where=where, residual=True, axis=(0, 2))
    x = random((2, 4), dtype)
    y, dx = jax.value_and_grad(lambda x: ours(name, x, where=jnp.zeros(4, bool)).sum())(x)
    assert y == 0 and not dx.any()


# ---- a function before the store


def modulated(v, shift, gain, kind):
    return jnp.where(kind > 0, jax.nn.silu(v * (1 + gain) + shift), v)


@every_name
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axis", [-1, (1, 2)])
def test_epilogue(name, dtype, axis):
    """Arguments per row, per example and per element, of several types; values and all gradients."""
    shape = (3, 5, 16)
    row = tuple(np.array(shape)[shape_axes(np.zeros(shape), axis)])
    x, scale, _, more = arguments(name, shape, row, dtype, "float32", True)
    args = [random((3, 1, 16), "float32"), random((3, 1, 1), dtype), jnp.arange(5, dtype=jnp.int32)[:, None] % 3]
    factor = jnp.float32(1.5)

    def ours_of(x, more, scale, shift, gain, factor):
        f = lambda v, *rest: modulated(v, *rest) * factor
        given = dict(axis=axis, residual=more, epilogue=f, epilogue_args=[shift, gain, args[2]])
        return jnp.stack(getattr(jaxkern, name)(x, scale, **given)).astype(jnp.float32)

    def exact_of(x, more, scale, shift, gain, factor):
        s = (x + more).astype(dtype).astype("float64")
        y = modulated(plain(name, s, scale, axis=axis), shift, gain.astype("float64"), args[2]) * factor
        return jnp.stack([y, s])

    operands = (x, more, scale, args[0], args[1], factor)
    g = random((2, *shape), dtype).astype("float32")  # cotangents of results in 16 bits are rounded
    of = lambda f: (jax.jit(f)(*operands), jax.jit(jax.grad(lambda *a: (f(*a) * g).sum(), range(6)))(*operands))
    found = of(ours_of)
    with compat.enable_x64():
        y, gradients = of(exact_of)
        slopes = jax.jit(jax.jacrev(exact_of, range(2, 6)))(*operands)
    # Errors are compared with the largest element. Gradients of parameters are sums that may cancel: theirs with the
    # largest sum of magnitudes.
    sizes = [np.abs(a).max() for a in (y, *gradients[:2])]
    sizes += [np.tensordot(np.abs(g), np.abs(slope), g.ndim).max() for slope in slopes]
    eps = float(jnp.finfo(dtype).eps)
    for a, b, size in zip(jax.tree.leaves(found), (y, *gradients), sizes, strict=True):
        assert a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, 2 * eps, (8 if dtype == "float32" else 1) * eps * size)
    assert [a.dtype for a in found[1]] == [a.dtype for a in operands]


def test_epilogue_transformed(x64):
    """The epilogue works under vmap with arguments of each example, forward and reverse, and with a mask."""
    x, b = random((4, 3, 8), "float64"), random((4, 8), "float64")
    ours_of = lambda x, b: jaxkern.layer_norm(x, epilogue=lambda v, b: jnp.sin(v * b), epilogue_args=[b])
    plain_of = lambda x, b: jnp.sin(plain("layer_norm", x) * b)
    for make in (
        lambda f: lambda x, b: f(x, b[:, None]),
        jax.vmap,
        lambda f: jax.vmap(jax.grad(loss(f), (0, 1))),
        lambda f: jax.vmap(lambda *a: jax.jvp(jax.grad(loss(f)), a, a)),
        lambda f: jax.hessian(lambda x, b: f(x, b[:, None]).sum()),
    ):
        found, wanted = (jax.jit(make(f))(x, b) for f in (ours_of, plain_of))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), found, wanted)
    where = jnp.arange(8) < 5
    found = jaxkern.rms_norm(x, where=where, epilogue=jnp.tanh)
    np.testing.assert_allclose(found, jnp.tanh(plain("rms_norm", x, where=where)), 1e-12)


# ---- special rows


@every_name
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("width", [8, 33, 600])
def test_rows_with_nan_and_infinity(name, dtype, width):
    """They are NaN, others what they are without them; and so are gradients."""
    x = random((9, width), dtype, 1)
    bad = x.at[2, 3].set(jnp.nan).at[5, 0].set(jnp.inf).at[6, 1].set(-jnp.inf)
    f = jax.jit(lambda x: jax.vjp(lambda x: ours(name, x), x))
    (y, pull), (clean, clean_pull) = f(bad), f(x)
    (dx,), (clean_dx,) = pull(x), clean_pull(x)
    good = np.array([0, 1, 3, 4, 7, 8])
    assert jnp.isnan(y[2]).all() and jnp.isnan(y[5:7]).any(1).all()
    np.testing.assert_array_equal(y[good], clean[good])
    np.testing.assert_array_equal(dx[good], clean_dx[good])


@pytest.mark.optimized
def test_rows_far_from_zero_among_others():
    """The CPU computes the variance of long rows in two ways, row by row: what a row gets depends on no other."""
    offsets = np.repeat([0.0, 0.2, 0.25, 0.3, 30.0, 1000.0, np.nan, np.inf], 16)[:, None]
    x = np.random.default_rng().normal(0, 1, (128, 1024)) + offsets
    x[5] = x[100] = 7  # constant
    x = x.astype("float32")
    f = jax.jit(lambda x: jaxkern.layer_norm(x))
    y, exact = np.asarray(f(x)), x.astype("float64")
    with np.errstate(invalid="ignore"):
        exact = exact - exact.mean(-1, keepdims=True)
        exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + EPS)
    # The mean is rounded, and a float32 near 1000 is good to 3e-5.
    allowed = 4e-6 + 1e-6 * np.nan_to_num(np.abs(offsets), posinf=0)
    assert np.isnan(y[96:100]).all() and np.isnan(y[101:]).all()
    rows = [*range(96), 100]
    assert (np.abs(y[rows] - exact[rows]) <= allowed[rows]).all()
    np.testing.assert_array_equal(y[:64], np.asarray(f(np.concatenate([x[:64], np.zeros_like(x[:64])])))[:64])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 64, 1000])
def test_constant_rows(dtype, width):
    with compat.enable_x64(dtype == "float64"):
        x = jnp.broadcast_to(jnp.asarray([[0.0], [1.0], [-300.0], [5e4]], dtype), (4, width))
        y = jax.jit(jaxkern.layer_norm)(x)
        # sqrt(eps) is 1e-3: of one rounding of the mean in the wider type, little is left.
        assert jnp.abs(y).max() <= (0 if ON_GPU and registry.kernels_run() else 8), y[:, 0]
        z = jax.jit(jaxkern.rms_norm)(x)
    np.testing.assert_allclose(np.asarray(z, np.float64)[1:], np.sign(np.asarray(x, np.float64)[1:]), 1e-2)
    assert not z[0].any()


@every_name
def test_huge_and_tiny_values(name):
    """Squares of 1e19 are near the largest float32, and kernels add a row's without overflow."""
    x = random((4, 4096), "float32", 3)
    exact = np.asarray(jax.jit(functools.partial(ours, name))(x))
    for size in (1e4, 1e17, 1e19)[: 3 if ON_GPU and registry.kernels_run() else 2]:
        y, pull = jax.vjp(jax.jit(functools.partial(ours, name)), x * size)
        np.testing.assert_allclose(y, exact, 2e-5, 1e-5)
        assert jnp.isfinite(pull(x)[0]).all()
    y = ours(name, x * 1e-19)  # eps is all that is left
    np.testing.assert_allclose(np.abs(y).max(), 0, atol=1e-12)
    assert jnp.isfinite(ours(name, x * 1e-12, eps=0)).all()


@every_norm
@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0,), (2, 0, 3)])
def test_no_elements(name, shape):
    scale = jnp.ones(shape[-1])
    f = lambda x, scale: ours(name, x, scale, residual=x)[0].sum()
    y = ours(name, jnp.zeros(shape), scale)
    dx, dscale = jax.jit(jax.grad(f, (0, 1)))(jnp.zeros(shape), scale)
    assert y.shape == dx.shape == shape and not dscale.any()


def test_rows_of_one_element():
    """The deviation is 0 and rstd 1000, and nothing is left of g * scale - mean(g * scale), however it is rounded."""
    x, scale, *_ = arguments("rms_norm", (300, 1), (1,), "float32", "float32")
    dx, dscale = jax.jit(jax.grad(lambda x, s: jnp.sin(jaxkern.layer_norm(x, s)).sum(), (0, 1)))(x, scale)
    assert not dx.any() and not dscale.any()


def test_sums_are_rounded_as_a_conversion_rounds_them():
    """Subnormal numbers of float16, too. The rounded sum is what is normalised."""
    x = jnp.asarray(np.random.default_rng().normal(size=(4, 512)) * 2.0 ** np.arange(-26, -10, 4)[:, None], "float16")
    third = x / 3  # an operand: within the program, XLA may round the quotient otherwise
    y, total = jax.jit(lambda x, third: jaxkern.rms_norm(x, residual=third, eps=0, dtype="float32"))(x, third)
    np.testing.assert_array_equal(total, (x.astype("float32") + third.astype("float32")).astype("float16"))
    np.testing.assert_allclose(y, jaxkern.rms_norm(total, eps=0, dtype="float32"), 1e-6)


@every_name
def test_the_same_bits_every_time(name):
    x, scale, bias, _ = arguments(name, (3000, 515), (515,), "bfloat16", "float32", seed=4)
    f = jax.jit(lambda *args: jax.vjp(lambda *a: ours(name, *a), *args)[1](x))
    first = f(x, scale, bias) if bias is not None else f(x, scale)
    for _ in range(5):
        again = f(x, scale, bias) if bias is not None else f(x, scale)
        jax.tree.map(np.testing.assert_array_equal, first, again)


# ---- transformations


def both(name, **options):
    """Ours and the plain function, of x, scale and bias."""
    f = lambda x, s, b: ours(name, x, s, b if name == "layer_norm" else None, **options)
    return f, lambda x, s, b: plain(name, x, s, b if name == "layer_norm" else None)


def loss(f):
    return lambda *args: jnp.sin(f(*args)).sum()


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("rms_norm", (0, None, None)),
        ("layer_norm", (1, None, None)),
        ("layer_norm", (None, 0, 0)),
        ("rms_norm", (2, 1, None)),
        ("layer_norm", (0, None, 1)),
    ],
)
def test_vmap(name, dims, x64):
    """vmap of values, of gradients for each example, of a forward derivative, and of their derivatives."""
    rng, width = np.random.default_rng(0), 6
    shapes = [(4, 5, width), (width,), (width,)]
    batched = lambda shape, d: shape if d is None else (*shape[:d], 3, *shape[d:])
    args = [jnp.asarray(rng.normal(size=batched(s, d))) for s, d in zip(shapes, dims)]
    for make in (
        lambda f: f,
        lambda f: jax.grad(loss(f), (0, 1, 2)),
        lambda f: lambda *a: jax.jvp(f, a, tuple(map(jnp.cos, a))),
        lambda f: lambda *a: jax.jvp(jax.grad(loss(f), (0, 1, 2)), a, tuple(map(jnp.cos, a))),
    ):
        found, wanted = (jax.jit(jax.vmap(make(f), dims))(*args) for f in both(name))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), found, wanted)
    found, wanted = (jax.jit(jax.grad(loss(jax.vmap(f, dims)), (0, 1, 2)))(*args) for f in both(name))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), found, wanted)


@every_norm
def test_derivatives_of_some_operands(name, x64):
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=s)) for s in ((4, 7), (7,), (7,))]
    for make in (
        lambda f: [jax.grad(loss(f), wrt) for wrt in ((0,), (1,), (2,))],
        lambda f: [jax.jacfwd(f, 1), jax.hessian(loss(f), (0, 1))],
    ):
        run = lambda f, make=make: jax.jit(lambda *args: [g(*args) for g in make(f)])(*args)
        found, wanted = map(run, both(name))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), found, wanted)


@every_norm
def test_residual_in_a_scan(name, x64):
    """Layers of x + f(norm(x)), as a model has them, by the sum that the operation returns."""
    rng = np.random.default_rng(0)
    x, weights, scales = (jnp.asarray(rng.normal(size=s)) for s in ((4, 6), (3, 6, 6), (3, 6)))

    def layers(norm):
        def layer(carry, parameters):
            x, update = carry
            y, x = norm(x, update, parameters[1])
            return (x, jnp.tanh(y @ parameters[0])), None

        def run(x, weights, scales):
            (x, update), _ = jax.lax.scan(jax.checkpoint(layer), (x, jnp.zeros_like(x)), (weights, scales))
            return jnp.sin(x + update).sum()

        return run

    f = layers(lambda x, update, scale: ours(name, x, scale, residual=update))
    g = layers(lambda x, update, scale: (plain(name, x + update, scale), x + update))
    forward_over_reverse = lambda f: lambda *a: jax.jvp(jax.grad(f, (0, 1, 2)), a, a)
    for make in (lambda f: f, forward_over_reverse):
        found, wanted = (jax.jit(make(f))(x, weights, scales) for f in (f, g))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), found, wanted)


# ---- programs


def lowered(f, *args):
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return launch.programs(text)


@pytest.mark.skipif(registry.kernels.module is None, reason=registry.kernels.reason or "no runtime")
def test_a_step_is_two_calls():
    """One forward, one backward with all gradients; without the gradient of scale, no sums."""
    x, scale = jnp.zeros((64, 256), jnp.bfloat16), jnp.ones(256)
    both = lambda x, r, s: jnp.stack(jaxkern.layer_norm(x, s, s, residual=r)).astype(jnp.float32).sum()
    forward, backward = lowered(jax.value_and_grad(both, (0, 1, 2)), x, x, scale)
    assert "jaxkern_layer_norm(" in forward and len(launch.kernels(forward)) == 2  # for any address too
    assert "jaxkern_layer_norm_core(" in backward and "NormSums" in backward
    (backward,) = lowered(jax.grad(lambda x: jaxkern.rms_norm(x, scale).astype(jnp.float32).sum()), x)
    assert "NormBackward" in backward and "NormSums" not in backward


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "group_norm", "batch_norm"])
def test_the_names_of_flax(name):
    """epsilon is eps, and num_groups is groups; the same program either way."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)), jnp.float32)
    groups, num_groups = ({"groups": 4}, {"num_groups": 4}) if name == "group_norm" else ({}, {})
    f = getattr(jaxkern, name)
    one, other = (
        jax.make_jaxpr(lambda x: f(x, **given))(x) for given in (groups | {"eps": 0.5}, num_groups | {"epsilon": 0.5})
    )
    assert str(one) == str(other) != str(jax.make_jaxpr(lambda x: f(x, **groups))(x))


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(x="text"), TypeError, "x must be an array"),
        (dict(x=jnp.ones((2, 3), complex)), TypeError, "x must be real"),
        (
            dict(scale=jnp.ones(2)),
            ValueError,
            r"scale of shape \(2,\) does not broadcast .* \(3,\) of x of shape \(2, 3\)",
        ),
        (dict(scale=jnp.ones((2, 3))), ValueError, "scale of shape"),
        (dict(bias=jnp.ones(4)), ValueError, "bias of shape"),
        (dict(axis=2), ValueError, "axis 2 is out of bounds"),
        (dict(axis=()), ValueError, "names no dimension"),
        (dict(axis=(0, -2)), ValueError, "duplicate"),
        (dict(axis="x"), TypeError, "axis must be"),
        (dict(eps=-1.0), ValueError, "eps must not be negative"),
        (dict(eps=jnp.ones(())), TypeError, "eps must be a Python number"),
        (dict(epsilon=-1.0), ValueError, "epsilon must not be negative"),
        (dict(eps=1e-3, epsilon=1e-3), TypeError, "eps and epsilon are names of one argument"),
        (dict(residual=jnp.ones(3)), ValueError, r"residual must have the shape .* float32\[2, 3\], got float32\[3\]"),
        (dict(residual=jnp.ones((2, 3), jnp.bfloat16)), TypeError, "residual must have"),
        (dict(where=jnp.ones(3)), TypeError, "where must be boolean"),
        (dict(where=jnp.ones(4, bool)), ValueError, "where of shape"),
        (dict(dtype="int32"), TypeError, "dtype must be a floating-point type"),
        (dict(epilogue=3), TypeError, "epilogue must be a function"),
        (dict(epilogue_args=[jnp.ones(3)]), TypeError, "epilogue is None"),
        (dict(epilogue=lambda v, a: v, epilogue_args=[jnp.ones(4)]), ValueError, r"epilogue_args\[0\] of shape"),
        (dict(epilogue=lambda v: jnp.ones(3)), ValueError, "epilogue must return scalars"),
        (dict(epilogue=lambda v: v > 0), TypeError, "epilogue must return a real number"),
    ],
)
def test_errors(arguments, error, message):
    arguments = {"x": jnp.ones((2, 3))} | arguments
    with pytest.raises(error, match=f"jaxkern.layer_norm: .*{message}"):
        jaxkern.layer_norm(**arguments)


def test_a_definition_returns_the_shape_of_x():
    """A sum of each row would be broadcast to x."""

    class Total:
        name, columns, masks = "total", (), ()
        definition = staticmethod(lambda x: jnp.sum(x, -1, keepdims=True))

    x = ((2, 3), jnp.dtype(jnp.float32))
    with pytest.raises(
        TypeError, match=r"jaxkern.total: the definition must return the shape of x, \(2, 3\), got \(2, 1\)"
    ):
        traced(Total, ("x",), (x,), numbers=(), dtype=x[1], function=None, algorithm="auto")
