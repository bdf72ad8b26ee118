"""group_norm and batch_norm: values, gradients, special values, transformations, bad input.

What is expected is the same formula in float64, differentiated by JAX.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ON_GPU
from reference import DTYPES

import jaxkern
from jaxkern import algorithms
from jaxkern._core import compat, launch, registry
from jaxkern._ops.group_norm import plan

EPS = 1e-5
NAMES = ("group_norm", "batch_norm")
every_name = pytest.mark.parametrize("name", NAMES)


def random(shape, dtype, seed=None, shift=0.5):
    with compat.enable_x64(dtype == "float64"):
        return jnp.asarray(np.random.default_rng(seed).normal(shift, 1, shape), dtype)


def plain(name, x, groups, scale=None, bias=None, channel_axis=-1, batch_axes=0, eps=EPS):
    """[y, mean, var] in the dtype of x."""
    axis, shape = channel_axis % x.ndim, x.shape
    samples = [a % x.ndim for a in np.atleast_1d(batch_axes)] if name == "group_norm" and batch_axes != () else []
    groups = groups if name == "group_norm" else shape[axis]
    wide = x.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])
    kept = [axis, *(a + (a > axis) for a in samples)]
    over = tuple(d for d in range(wide.ndim) if d not in kept)
    mean = wide.mean(over, keepdims=True)
    var = ((wide - mean) ** 2).mean(over, keepdims=True)
    y = ((wide - mean) / jnp.sqrt(var + eps)).reshape(shape)
    along = lambda a: jnp.broadcast_to(a, shape[axis]).reshape([-1 if d == axis else 1 for d in range(x.ndim)])
    y = y if scale is None else y * along(scale)
    return [y if bias is None else y + along(bias), mean.squeeze(over), var.squeeze(over)]


def ours(name, x, groups, scale=None, bias=None, **options):
    """[y], or [y, mean, var]."""
    if name == "group_norm":
        return [jaxkern.group_norm(x, groups, scale, bias, eps=EPS, **options)]
    return list(jaxkern.batch_norm(x, scale, bias, eps=EPS, **options))


def check(name, shape, groups, dtype, parameters="float32", out=None, seed=None, **axes):
    """Values, and all gradients for random cotangents, of the statistics too."""
    out, channels = out or dtype, shape[axes.get("channel_axis", -1)]
    scale, bias = (random((channels,), parameters, seed, shift=1.0) for _ in range(2)) if parameters else (None, None)
    x = random(shape, dtype, seed)
    given = [x, *([scale, bias] if parameters else [])]
    with compat.enable_x64(dtype == "float64"):
        stat = [random((channels,), "float64" if dtype == "float64" else "float32")] * 2 * (name == "batch_norm")
        cotangents = [random(shape, out), *stat]

    @jax.jit
    def found(cotangents, *given):
        ys, pull = jax.vjp(lambda x, *rest: ours(name, x, groups, *rest, dtype=out, **axes), *given)
        return ys, pull(cotangents)

    @jax.jit
    def wanted(cotangents, *given):
        ys, pull = jax.vjp(lambda x, *rest: plain(name, x, groups, *rest, **axes)[: len(cotangents)], *given)
        return ys, pull(cotangents)

    with compat.enable_x64(dtype == "float64"):
        ys, gradients = found(cotangents, *given)
    with compat.enable_x64(), jax.default_device(jax.devices("cpu")[0]):
        of = lambda arrays: [np.asarray(a, np.float64) for a in arrays]
        exact, slopes = jax.tree.map(np.asarray, wanted(of(cotangents), *of(given)))
    arithmetic = 64 * np.finfo(np.float64 if dtype == "float64" else np.float32).eps
    assert ys[0].dtype == out and len(gradients) == len(slopes)
    for a, b in zip([*ys, *gradients], [*exact, *slopes], strict=True):
        assert a.shape == b.shape
        close(a, b, arithmetic * (1 + np.abs(b).max(initial=0)) * max(1, (x.size / max(1, a.size)) ** 0.5))
    for a, b in zip(gradients, given):
        assert a.dtype == b.dtype


def close(found, wanted, atol):
    rtol = float(jnp.finfo(found.dtype).eps)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol, atol)


# ---- values and gradients


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "shape", "groups", "axes"),
    [
        ("group_norm", (3, 5, 7, 12), 4, {}),
        ("group_norm", (2, 12, 5, 8), 3, {"channel_axis": 1}),
        ("batch_norm", (3, 5, 7, 12), None, {}),
        ("batch_norm", (4, 6, 3, 8), None, {"channel_axis": 1}),
        ("group_norm", (3, 12), 12, {}),
        ("group_norm", (6, 5, 2, 3), 1, {"channel_axis": 0, "batch_axes": (1, -1)}),
        ("group_norm", (10, 4, 5), 2, {"channel_axis": 0, "batch_axes": ()}),
        ("batch_norm", (50, 9), None, {"channel_axis": 0}),
        ("batch_norm", (5, 6, 7), None, {"channel_axis": 1}),
    ],
)
@pytest.mark.sweep(3)
def test_axes(name, shape, groups, axes, dtype):
    check(name, shape, groups, dtype, None if shape == (3, 12) else "float32", **axes)


LARGE = [  # shape, groups, channel_axis: more than a megabyte, which kernels compute
    ((8, 64, 64, 64), 32, -1),
    ((3, 32, 32, 320), 32, -1),
    ((5, 4097, 24), 2, -1),
    ((4, 40, 64, 64), 8, 1),
    ((2, 1, 3000, 128), 1, -1),
    ((70000, 8), 8, -1),
    ((2, 33000, 16), 4, -1),
    ((130, 130, 3, 9), 3, 2),
]


@every_name
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "groups", "channel_axis"), LARGE)
@pytest.mark.sweep(13)
def test_large(name, shape, groups, channel_axis, dtype):
    check(name, shape, groups, dtype, channel_axis=channel_axis)


@pytest.mark.parametrize("algorithm", plan.ALGORITHMS)
@pytest.mark.parametrize("shape", [(4, 9, 9, 64), (1, 3, 32), (2, 1000, 256), (3, 70, 40)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.sweep(7)
def test_algorithms(algorithm, shape, dtype):
    with algorithms.force(group_norm=algorithm, batch_norm=algorithm if shape[0] == 1 else "two_pass"):
        check("group_norm", shape, 8, dtype)
        check("batch_norm", shape, None, dtype)


@pytest.mark.parametrize(
    ("dtype", "parameters", "out"),
    [
        ("bfloat16", "bfloat16", None),
        ("float16", "float32", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("float32", None, "float16"),
        ("float64", "float32", None),
        ("float64", "float64", "float32"),
    ],
)
@pytest.mark.sweep(2)
def test_dtypes(dtype, parameters, out):
    check("group_norm", (4, 300, 160), 32, dtype, parameters, out)
    check("batch_norm", (4, 300, 160), None, dtype, parameters, out)


def test_parameters_broadcast_and_differ_in_dtype():
    x = random((3, 4, 8), "float32")
    y = jaxkern.group_norm(x, 4, jnp.full((), 2, jnp.bfloat16), jnp.arange(8.0))
    close(y, np.asarray(plain("group_norm", x, 4, jnp.full(8, 2.0), jnp.arange(8.0), eps=1e-6)[0]), 1e-5)
    ds, db = jax.grad(lambda s, b: jaxkern.batch_norm(x, s, b)[0].sum(), (0, 1))(jnp.ones(8, jnp.bfloat16), jnp.ones(8))
    assert (ds.dtype, db.dtype) == (jnp.bfloat16, jnp.float32)
    y, mean, var = jaxkern.batch_norm(jnp.arange(6).reshape(3, 2))
    assert {a.dtype for a in (y, mean, var)} == {jnp.dtype(jnp.float32)} and mean.tolist() == [2, 3]


def test_layer_and_instance_norm():
    """One group, and as many as channels."""
    x = random((2, 5, 6), "float32")
    close(jaxkern.group_norm(x, 1), np.asarray(jaxkern.layer_norm(x, axis=(1, 2))), 1e-5)
    close(jaxkern.group_norm(x, 6), np.asarray(jaxkern.layer_norm(x, axis=1)), 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_given_statistics(dtype):
    """Statistics are given, as in inference; all arguments have gradients."""
    x, scale, bias, mean = random((4, 6, 5), dtype), *(random((6,), "float32") for _ in range(3))
    var, t = random((6,), "float32") ** 2 + 0.1, random((4, 6, 5), "float32")

    def f(x, scale, bias, mean, var):
        y, m, v = jaxkern.batch_norm(x, scale, bias, channel_axis=1, mean=mean, var=var)
        assert y.dtype == x.dtype and m.dtype == v.dtype == jnp.float32
        return (y.astype(jnp.float32) * t).sum() + (jnp.sin(m) * v).sum()

    def g(x, scale, bias, mean, var):
        of = lambda a: a[:, None]
        y = (x.astype(jnp.float32) - of(mean)) / jnp.sqrt(of(var) + EPS) * of(scale) + of(bias)
        return (y * t).sum() + (jnp.sin(mean) * var).sum()

    args = (x, scale, bias, mean, var)
    found, wanted = (jax.jit(jax.value_and_grad(h, (0, 1, 2, 3, 4)))(*args) for h in (f, g))
    rtol = 1e-4 if dtype == "float32" else 2e-2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, rtol * 10), found, wanted)


# ---- a function before the store


@every_name
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("captures", [False, True])
def test_epilogue(name, dtype, captures):
    """Values and all gradients; with a scalar that the function closes over, too."""
    x, scale, bias = random((8, 32, 32, 64), dtype), random((64,), "float32"), random((64,), "float32")
    g, factor = random(x.shape, "float32"), jnp.float32(1.5)

    def ours_of(x, scale, bias, factor):
        epilogue = (lambda v: jax.nn.silu(v) * factor) if captures else jax.nn.silu
        return ours(name, x, 8, scale, bias, epilogue=epilogue)[0]

    def plain_of(x, scale, bias, factor):
        y = jax.nn.silu(plain(name, x.astype(jnp.float32), 8, scale, bias)[0])
        return (y * factor if captures else y).astype(dtype)

    args = (x, scale, bias, factor)
    loss = lambda f: lambda *a: (f(*a).astype(jnp.float32) * g).sum()
    found, wanted = (
        (jax.jit(f)(*args), jax.jit(jax.grad(loss(f), range(3 + captures)))(*args)) for f in (ours_of, plain_of)
    )
    eps = float(jnp.finfo(dtype).eps)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        # Sums of as many rounded cotangents as there are elements.
        atol = 8 * eps * np.abs(b).max() + (eps * (x.size / a.size) ** 0.5 if a.size < x.size else 0)
        np.testing.assert_allclose(a, b, 4 * eps, atol)


@every_name
def test_epilogue_transformed(name, x64):
    """The epilogue works under vmap, forward over reverse, and with given statistics."""
    x = random((3, 4, 5, 6), "float64")
    f = lambda x: ours(name, x, 2, jnp.cos(x[0, 0]), epilogue=jnp.sin)[0]
    g = lambda x: jnp.sin(plain(name, x, 2, jnp.cos(x[0, 0]))[0])
    for make in (jax.vmap, lambda f: lambda x: jax.jvp(jax.grad(lambda x: jnp.cos(f(x)).sum()), (x[0],), (x[1],))):
        same(*(jax.jit(make(h))(x) for h in (f, g)))
    y, *_ = jaxkern.batch_norm(x, eps=0, mean=jnp.ones(6), var=jnp.full(6, 4.0), epilogue=jnp.tanh)
    np.testing.assert_allclose(y, jnp.tanh((x - 1) / 2), 1e-12)


# ---- special values


@every_name
@pytest.mark.parametrize("mean", [1e3, -3e4])
@pytest.mark.parametrize("first", [None, 1e6])
def test_far_from_zero(name, mean, first):
    """The variance does not cancel, as mean(x^2) - mean(x)^2 would; nor if an element, such as the first, lies far off."""
    x = np.random.default_rng(0).normal(mean, 1, (3, 9000, 16)).astype(np.float32)
    if first:
        x[:, 0, :8] = mean + first
    found, exact = (np.asarray(f(name, x, 4)[0], np.float64) for f in (jax.jit(ours, static_argnums=(0, 2)), plain64))
    # The rounding of x and of its mean, times rstd; XLA on the CPU adds all elements one after the other.
    roundings = 4 if ON_GPU and registry.kernels_run() else 64
    np.testing.assert_allclose(found, exact, 1e-4, roundings * np.spacing(np.float32(abs(mean))))


def plain64(name, x, groups):
    with compat.enable_x64(), jax.default_device(jax.devices("cpu")[0]):
        return plain(name, jnp.asarray(x, jnp.float64), groups)


@every_name
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_constant_and_huge_values(name, dtype):
    x = jnp.broadcast_to(jnp.asarray([0.0, 1.0, -300.0, 5e4], dtype), (40, 4000, 4))
    f = jax.jit(lambda x: ours(name, x, 4)[0])
    if ON_GPU and registry.kernels_run():  # elsewhere the rounding of the mean is divided by sqrt(eps)
        assert not f(x).any()
    x = random((8, 5000, 8), dtype, 1)
    big = f((x * 2.0**50).astype(dtype))
    np.testing.assert_allclose(np.asarray(big, np.float32), np.asarray(f(x), np.float32), 2e-2, 2e-3)


@every_name
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_stay_in_their_group(name, bad):
    x = random((3, 3000, 64), "float32", 1)
    spoilt = x.at[1, 1234, 20].set(bad)
    f = jax.jit(lambda x: jax.vjp(lambda x: ours(name, x, 8)[0], x))
    (y, pull), (clean, clean_pull) = f(spoilt), f(x)
    (dx,), (clean_dx,) = pull(x), clean_pull(x)
    where = np.zeros(x.shape, bool)
    where[(1, slice(None), slice(16, 24)) if name == "group_norm" else (..., 20)] = True
    assert jnp.isnan(y[where]).all()
    np.testing.assert_array_equal(y[~where], clean[~where])
    np.testing.assert_array_equal(dx[~where], clean_dx[~where])


@every_name
@pytest.mark.parametrize("shape", [(0, 4, 8), (4, 0, 8), (4, 3, 0)])
def test_no_elements(name, shape):
    scale = jnp.ones(shape[-1])
    f = lambda x, scale: ours(name, x, 4 if shape[-1] else 1, scale, scale)[0]
    y = f(jnp.zeros(shape), scale)
    dx, dscale = jax.jit(jax.grad(lambda *a: f(*a).sum(), (0, 1)))(jnp.zeros(shape), scale)
    assert y.shape == dx.shape == shape and not dscale.any()


@every_name
def test_the_same_bits_every_time(name):
    x, scale = random((6, 5000, 40), "bfloat16", 4), random((40,), "float32", 4)
    f = jax.jit(lambda x, s: jax.vjp(lambda x, s: ours(name, x, 4, s, s)[0], x, s)[1](x))
    first = f(x, scale)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, first, f(x, scale))


# ---- transformations


def both(name, **axes):
    f = lambda x, s, b: ours(name, x, 2, s, b, **axes)
    return f, lambda x, s, b: plain(name, x, 2, s, b, **axes)[: 1 + 2 * (name == "batch_norm")]


def loss(f):
    return lambda *args: sum(jnp.sin(y * (k + 1)).sum() for k, y in enumerate(f(*args)))


def same(found, wanted):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-8, atol=1e-9), found, wanted)


@every_name
@pytest.mark.parametrize("dims", [(0, None, None), (None, 0, 0), (2, 1, None)])
def test_vmap(name, dims, x64):
    """vmap of values, of gradients for each example, of a forward derivative, and of their derivatives; and twice."""
    rng, shapes = np.random.default_rng(0), [(3, 5, 4), (4,), (4,)]
    batched = lambda shape, d: shape if d is None else (*shape[:d], 3, *shape[d:])
    args = [jnp.asarray(rng.normal(size=batched(s, d))) for s, d in zip(shapes, dims)]
    for make in (
        lambda f: f,
        lambda f: lambda *a: jax.jvp(jax.grad(loss(f), (0, 1, 2)), a, tuple(map(jnp.cos, a))),
    ):
        same(*(jax.jit(jax.vmap(make(f), dims))(*args) for f in both(name)))
    same(*(jax.jit(jax.grad(loss(jax.vmap(f, dims)), (0, 1, 2)))(*args) for f in both(name)))
    if dims[0] == 0:
        twice = lambda f: jax.vmap(jax.vmap(jax.grad(loss(f), (0, 1, 2)), dims), (0, 0, None))
        stacked = [jnp.stack([args[0], args[0] + 1]), jnp.stack([args[1], -args[1]]), args[2]]
        same(*(jax.jit(twice(f))(*stacked) for f in both(name)))


@every_name
def test_derivatives_of_some_operands(name, x64):
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=s)) for s in ((2, 3, 4, 2), (4,), (4,))]
    for make in (
        lambda f: [jax.grad(loss(f), wrt) for wrt in ((0,), (1,), (2,))],
        lambda f: [jax.jacfwd(f, 1), jax.hessian(loss(f), (0, 1))],
    ):
        run = lambda f, make=make: jax.jit(lambda *args: [g(*args) for g in make(f)])(*args)
        same(*map(run, both(name, channel_axis=2)))


# ---- programs


def lowered(f, *args):
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return launch.programs(text)


@pytest.mark.skipif(registry.kernels.module is None, reason=registry.kernels.reason or "no runtime")
@every_name
def test_a_step_is_two_calls(name):
    x, scale = jnp.zeros((8, 64, 64, 64), jnp.bfloat16), jnp.ones(64)
    f = lambda x, s: ours(name, x, 32, s, s)[0].astype(jnp.float32).sum()
    forward, backward = lowered(jax.value_and_grad(f, (0, 1)), x, scale)
    assert f"jaxkern_{name}(" in forward and f"jaxkern_{name}_grad(" in backward
    assert lowered(lambda x: ours(name, x, 2)[0], jnp.zeros((2, 8, 8))) == []  # small: left to XLA
    # Under vmap, and the transpose of the forward derivative, too.
    (forward,) = lowered(lambda x: jax.vmap(lambda x: ours(name, x, 32)[0])(x), x[:, None])
    assert f"jaxkern_{name}(" in forward
    twice = lambda x: jax.jvp(lambda x: f(x, scale), (x,), (x,))[1]
    assert any(f"jaxkern_{name}_grad(" in text for text in lowered(jax.grad(twice), x))


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(x="text"), TypeError, "x must be an array"),
        (dict(x=jnp.ones((2, 4), complex)), TypeError, "x must be real"),
        (dict(scale=jnp.ones(2)), ValueError, r"scale of shape \(2,\) does not broadcast"),
        (dict(bias=jnp.ones((2, 4))), ValueError, "bias of shape"),
        (dict(groups=3), ValueError, r"3 groups do not divide the 4 channels along axis 1 of x of shape \(2, 4\)"),
        (dict(groups=0), ValueError, "0 groups"),
        (dict(groups=2.0), TypeError, "groups must be an int"),
        (dict(groups=True), TypeError, "groups must be an int"),
        (dict(groups=None), TypeError, "groups must be an int"),
        (dict(num_groups=2), TypeError, "groups and num_groups are names of one argument"),
        (dict(groups=None, num_groups=True), TypeError, "num_groups must be an int"),
        (dict(groups=None, num_groups=3), ValueError, "3 groups"),
        (dict(channel_axis=2), ValueError, "axis 2 is out of bounds"),
        (dict(channel_axis="x"), TypeError, "channel_axis must be an int"),
        (dict(channel_axis=0), ValueError, "axis 0 .* is both channel_axis and one of batch_axes"),
        (dict(batch_axes=(0, 0)), ValueError, "duplicate"),
        (dict(batch_axes="x"), TypeError, "batch_axes must be"),
        (dict(eps=-1.0), ValueError, "eps must not be negative"),
        (dict(eps=jnp.ones(())), TypeError, "eps must be a Python number"),
        (dict(dtype="int32"), TypeError, "dtype must be a floating-point type"),
        (dict(epilogue=3), TypeError, "epilogue must be a function"),
        (dict(epilogue=lambda v: v > 0), TypeError, "epilogue must return a real number"),
    ],
)
def test_errors(arguments, error, message):
    arguments = {"x": jnp.ones((2, 4)), "groups": 2} | arguments
    with pytest.raises(error, match=f"jaxkern.group_norm: .*{message}"):
        jaxkern.group_norm(**arguments)


def test_errors_of_batch_norm():
    x = jnp.ones((2, 4))
    with pytest.raises(TypeError, match=r"jaxkern.batch_norm: mean and var must be given together"):
        jaxkern.batch_norm(x, mean=jnp.zeros(4))
    with pytest.raises(ValueError, match=r"jaxkern.batch_norm: var of shape \(3,\)"):
        jaxkern.batch_norm(x, mean=jnp.zeros(4), var=jnp.ones(3))
