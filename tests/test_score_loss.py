"""softmax_cross_entropy of a score function: values, derivatives, transformations, programs, kernels.

What is expected is the same function on whole arrays, in float64.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
from conftest import ON_GPU

import jaxkern
from jaxkern._core import compat, functor, launch, registry
from jaxkern._ops.score import plan

MODULE = registry.kernels.module
EPS = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 4e-6, "float64": 1e-13}
NOTHING = -100  # ignore_index
OPTIONS = (
    {},
    {"label_smoothing": 0.1, "z_loss": 0.01},
    {"z_loss": 0.02, "ignore_index": NOTHING},
    {"label_smoothing": 1.0},
    {"label_smoothing": 0.1, "ignore_index": 3},  # a class
)


def score(s, b, q, k, slope, bias, i, j):
    """Everything that a score may be, with a row that is entirely masked."""
    s = 1.5 * jnp.tanh(s / 1.5) + bias + slope * (k - q)
    return jnp.where(((i == j) | (k % 4 == 3)) & ((q != 2) | (b == 0)), s, -jnp.inf)


def arguments(shape, dtype, seed=None):
    """(x, labels that take part, score_args)."""
    rng = np.random.default_rng(seed)
    b, q, k = shape
    i, j = rng.integers(0, 2, (b, q, 1)).astype(np.int32), rng.integers(0, 2, (b, 1, k)).astype(np.int8)
    real = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    labels = np.minimum(rng.integers(0, k, (b, q)) // 4 * 4 + 3, k - 1)
    j[:, :, -1], i[:, :, 0] = i[:, :1, 0], i[:, :1, 0]
    return real(*shape), jnp.asarray(labels), (real(b, 1, 1) / k, real(q, k), jnp.asarray(i), jnp.asarray(j))


def plain(x, labels, *args, f=score, where=True, axis=-1, label_smoothing=0.0, z_loss=0.0, ignore_index=None):
    """The loss of arrays, in jnp."""
    indices = [jax.lax.broadcasted_iota(jnp.int32, x.shape, d) for d in range(x.ndim)]
    s = jnp.broadcast_to(f(x, *indices, *args), x.shape)
    kept = jnp.broadcast_to(where & (s != -jnp.inf), s.shape)
    s = jnp.where(kept, s, 0)
    largest = jax.lax.stop_gradient(s.max(axis, keepdims=True, initial=-1e30))
    total = jnp.where(kept, jnp.exp(s - largest), 0).sum(axis)
    some = total > 0
    lse = jnp.log(jnp.where(some, total, 1)) + jnp.squeeze(largest, axis)
    label = jnp.expand_dims(jnp.clip(labels, 0, x.shape[axis] - 1), axis)
    take = lambda a: jnp.squeeze(jnp.take_along_axis(a, label, axis), axis)
    mean = s.sum(axis) / jnp.maximum(kept.sum(axis), 1)
    loss = lse - (1 - label_smoothing) * take(s) - label_smoothing * mean + z_loss * lse**2
    loss = jnp.where(take(kept) | (label_smoothing == 1), loss, jnp.inf)
    bad = (labels < 0) | (labels >= x.shape[axis])
    ignored = labels == (NOTHING if ignore_index is None else ignore_index)
    return jnp.where(some & ~ignored, jnp.where(bad, jnp.nan, loss), 0)


def ours(x, labels, *args, f=score, **options):
    return jaxkern.softmax_cross_entropy(x, labels, score=f, score_args=args, **options)


def both(of, labels, rest, options):
    """The losses, and the gradients of their weighted sum by x and the floating-point arguments."""

    def run(x, slope, bias):
        y, pull = jax.vjp(lambda x, slope, bias: of(x, labels, slope, bias, *rest, **options), x, slope, bias)
        return y, *pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    return run


def in_float64(f, *arrays):
    wide = lambda a: np.asarray(a, np.float64)
    with compat.enable_x64(), jax.default_device(jax.devices("cpu")[0]):
        return jax.tree.map(np.asarray, jax.jit(f)(*map(wide, arrays)))


def check(shape, dtype, options, where=None):
    x, labels, (slope, bias, *rest) = arguments(shape, dtype)
    if "ignore_index" in options:
        labels = labels.at[0, 1].set(options["ignore_index"])
    given = options if where is None else options | {"where": jnp.asarray(where)}
    found = jax.jit(both(ours, labels, rest, given))(x, slope, bias)
    rest = [np.asarray(a) for a in rest]
    given = options if where is None else options | {"where": where}
    wanted = in_float64(both(plain, np.asarray(labels), rest, given), x, slope, bias)
    assert [a.dtype for a in found] == [jnp.promote_types(dtype, "float32"), *[jnp.dtype(dtype)] * 3]
    narrow = 2e-6 if dtype != "float64" else 1e-13
    np.testing.assert_allclose(found[0], wanted[0], 8 * narrow, 8 * narrow)
    for a, b in zip(found[1:], wanted[1:]):
        np.testing.assert_allclose(
            np.asarray(a, "float64"), b, 4 * EPS[dtype], narrow * 20 + EPS[dtype] * np.abs(b).max() / 8
        )


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 9), (3, 4, 64)])
@pytest.mark.sweep(3)
def test_values_and_gradients(shape, options, dtype, x64):
    check(shape, dtype, options)


@pytest.mark.parametrize("width", [1, 4, 31, 512, 1001, 2048, 4104, 8192, 16393, 40000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.sweep(7)
def test_widths(width, dtype):
    check((2, 3, width), dtype, OPTIONS[0])


@pytest.mark.parametrize("mask_shape", [(2, 5, 9), (5, 1), (2, 1, 9)])
def test_where(mask_shape):
    where = np.random.default_rng().random(mask_shape) < 0.7
    if mask_shape[-1] > 1:
        where[..., [3, 7, 8]] = True  # the labels
    check((2, 5, 9), "float32", OPTIONS[1], where)


@pytest.mark.parametrize("options", OPTIONS[1:3], ids=str)
def test_rows_without_a_loss(options):
    """Labels that are no class, rows with NaN, and infinite logits where the score is -inf."""
    f = lambda s, q, k: jnp.where(k > 1, s * 2, -jnp.inf)
    x = (
        jnp.asarray(np.random.default_rng(0).normal(size=(6, 7)), jnp.float32)
        .at[:, 0]
        .set(jnp.inf)
        .at[4, 5]
        .set(jnp.nan)
    )
    labels = jnp.array([2, -1, 7, NOTHING, 3, 0])
    loss, pull = jax.vjp(lambda x: ours(x, labels, f=f, **options), x)
    (dx,) = pull(jnp.ones(6))
    ignores = "ignore_index" in options
    assert np.isnan(loss).tolist() == [False, True, True, not ignores, True, False]
    assert np.isposinf(loss).tolist() == [False] * 5 + [True] and (not ignores or loss[3] == 0)
    assert not np.asarray(dx)[:, :2].any()
    assert np.isnan(dx).any(1).tolist() == [False, True, True, not ignores, True, False]
    assert np.isnan(np.asarray(dx)[1, 2:]).all() and (not ignores or not np.asarray(dx)[3].any())


def close(found, wanted, tolerance=2e-4):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, tolerance, tolerance), found, wanted)


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_derivatives_of_derivatives(options):
    x, labels, (slope, bias, *rest) = arguments((2, 4, 6), "float32")
    a, t = (x, slope, bias), (x * 0.3, slope + 1, jnp.sin(bias))
    of = lambda f: lambda *a: f(a[0], labels, *a[1:], *rest, **options)
    loss = lambda f: lambda *a: (of(f)(*a) ** 2 * jnp.arange(1.0, 9).reshape(2, 4)).sum()
    norm = lambda f: lambda *a: sum((d * d).sum() for d in jax.grad(loss(f), (0, 1, 2))(*a))
    for transform in (
        lambda f: jax.jvp(of(f), a, t),
        lambda f: jax.jvp(jax.grad(loss(f), (0, 1, 2)), a, t)[1],
        lambda f: jax.grad(norm(f), (0, 1, 2))(*a),
        lambda f: jax.grad(lambda x: jax.jvp(loss(f), (x, *a[1:]), t)[1])(x),
    ):
        close(jax.jit(lambda: transform(ours))(), jax.jit(lambda: transform(plain))(), 1e-3)


@pytest.mark.parametrize("axes", [(0, None, None), (0, 0, 0), (2, 1, 2)])
def test_vmap(axes):
    rng = np.random.default_rng(0)
    bias_axis, x_axis, label_axis = axes
    batched = lambda shape, d: shape if d is None else (*shape[:d], 3, *shape[d:])
    x = jnp.asarray(rng.normal(size=batched((2, 4, 5), x_axis)), jnp.float32)
    bias = jnp.asarray(
        rng.normal(size=batched((4, 1), bias_axis if bias_axis is None else min(bias_axis, 2))), jnp.float32
    )
    labels = jnp.asarray(rng.integers(0, 5, batched((2, 4), label_axis)))
    f = lambda s, b, q, k, c: s * c + 0.1 * q - 0.2 * b * k
    run = lambda of: jax.vmap(
        jax.value_and_grad(lambda c, x, own: of(x, own, c, f=f).sum(), (0, 1)), (bias_axis, x_axis, label_axis)
    )(bias, x, labels)
    close(run(ours), run(plain))


def test_in_programs():
    x, labels, _ = arguments((2, 4, 6), "float32")
    for axis in (0, 1):
        own = labels[0] % x.shape[axis] if axis == 0 else labels % x.shape[axis]
        own = jnp.zeros([n for d, n in enumerate(x.shape) if d != axis], int) + own.ravel()[0]
        f = lambda s, a, b, c: s * 1.5 + 0.1 * (a - b) * c
        value_and_grad = lambda of: jax.value_and_grad(lambda x: of(x, own, f=f, axis=axis).sum())(x)
        close(value_and_grad(ours), value_and_grad(plain))

    def loss(of, factor):
        step = lambda c, x: (c + of(x, labels[0], f=lambda s, q, k: s * factor + jnp.where(k > q, c, 0)).mean(), None)
        return jax.lax.scan(jax.checkpoint(step), 0.5, x)[0]

    grad = lambda of: jax.jit(jax.value_and_grad(lambda c: loss(of, c)))(0.7)
    close(grad(ours), grad(plain))
    assert ours(jnp.zeros((0, 3)), jnp.zeros(0, int), f=lambda s, i, j: s).shape == (0,)
    assert np.isnan(ours(jnp.zeros((2, 0)), jnp.zeros(2, int), f=lambda s, i, j: s)).all()
    assert ours(jnp.arange(4), jnp.uint8(1), f=lambda s, i: s * 0).item() == pytest.approx(np.log(4))


def test_bad_input():
    x, labels, f = jnp.zeros((3, 4)), jnp.zeros(3, int), lambda s, i, j: s
    with pytest.raises(TypeError, match="softmax_cross_entropy: score must be a function of scalars, got int"):
        ours(x, labels, f=3)
    with pytest.raises(TypeError, match="score_args are the arguments of a score function, and score is None"):
        ours(x, labels, x, f=None)
    with pytest.raises(ValueError, match=r"score_args\[0\] of shape \(3,\) does not broadcast to logits of shape"):
        ours(x, labels, jnp.zeros(3), f=lambda s, i, j, a: s)
    with pytest.raises(ValueError, match=r"labels of shape \(3,\) for logits of shape \(3, 4\) and axis 0"):
        ours(x, labels, f=f, axis=0)
    with pytest.raises(TypeError, match="axis must be an int, got None"):
        ours(x, labels, f=f, axis=None)
    with pytest.raises(TypeError, match="softmax_cross_entropy: score is called with an element of x, 2 indices"):
        ours(x, labels, f=lambda s: s)


# ---- programs and kernels


@plans.needs_runtime
def test_one_kernel_forward_and_one_backward():
    def step(x, labels, bias):
        f = lambda s, q, k, c: 30 * jnp.tanh(s / 30) + c
        return jax.value_and_grad(lambda x, bias: ours(x, labels, bias, f=f).mean(), (0, 1))(x, bias)

    types = [
        jax.ShapeDtypeStruct(s, d) for s, d in (((8192, 4096), "bfloat16"), ((8192,), "int32"), ((4096,), "float32"))
    ]
    text = jax.jit(step).trace(*types).lower(lowering_platforms=("cuda",)).as_text()
    found = launch.programs(text)
    names = [re.search(r"^operation (\w+)", p, re.M)[1] for p in found]
    assert names == ["jaxkern_softmax_score_sums", "jaxkern_elementwise_kernel"]
    assert all(MODULE.check(p) == "" for p in found)
    large = re.findall(r"stablehlo\.(\w+).*tensor<8192x4096x\w+>$", text, re.M)
    assert not set(large) - {"custom_call", "optimization_barrier"}, large


KERNELS = [  # shape, dtype, mask, capability
    ((64, 512), "bfloat16", None, 90),
    ((64, 1001), "float32", (1, 1001), 80),
    ((64, 40000), "float16", None, 100),
    ((64, 300), "float64", None, 120),
]


@plans.needs_nvrtc
@pytest.mark.parametrize("shape, dtype, mask, capability", KERNELS)
def test_kernels_compile(shape, dtype, mask, capability):
    of = lambda shape, dtype: jax.core.ShapedArray(shape, jnp.dtype(dtype))
    wide = "float64" if dtype == "float64" else "float32"
    with compat.enable_x64():
        dtypes = [jnp.dtype(d) for d in (dtype, "int32", "bfloat16", "int8")]
        function, _ = functor.trace(lambda s, k, a, b: jnp.where(k > b, s, -jnp.inf) + a, dtypes, name="test")
        avals = [
            of(shape, dtype),
            of((1, shape[1]), "bfloat16"),
            of((shape[0], 1), "int8"),
            *([of(mask, bool)] if mask else []),
        ]
        static = dict(axis=1, algorithm="auto", log=True, indexed=(1,), extras="mask" if mask else "", unscored=False)
        found = plan.score_sums(
            plans.DEVICES[0], avals, [of((shape[0], 1), wide)] * 2, function=function.with_results([wide]), **static
        )
    plans.check_limits(found, plans.DEVICES[0])
    steps = found.launches if capability != 120 else (*found.launches, *found.unaligned)
    for step in steps:
        assert MODULE.compile(step.header, step.name, capability, step.source)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="no GPU")
@pytest.mark.parametrize("algorithm", ("warp", "block", "streaming"))
def test_forced_algorithms(algorithm):
    from jaxkern import algorithms

    for dtype, width in (("bfloat16", 512), ("float32", 333), ("float16", 1000)):
        with algorithms.force(softmax=algorithm):
            check((3, 5, width), dtype, OPTIONS[0])
