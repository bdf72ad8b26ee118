"""softmax and log_softmax of a score function: values, derivatives, transformations, plans, bad input.

What is expected is the same function on whole arrays, in float64.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
from conftest import ON_GPU

import jaxkern
from jaxkern import algorithms
from jaxkern._core import compat, launch, registry, runtime
from jaxkern._ops.score import arguments, plan

MODULE = registry.kernels.module
FLOATS = ("float16", "bfloat16", "float32", "float64")
EPS = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 4e-6, "float64": 1e-13}
CAP = 1.5


def cap(s, b, h, q, k):
    return CAP * jnp.tanh(s / CAP)


def alibi(s, b, h, q, k, slope):
    return s + slope * (k - q)


def relative(s, b, h, q, k, bias):
    return jnp.where(k <= q + 2, s * 0.7 + bias, -jnp.inf)


def document(s, b, h, q, k, i, j):
    return jnp.where(i == j, s, -jnp.inf)


def window(s, b, h, q, k):
    return jnp.where(abs(q - k) < 3, s + 0.1 * h - b, -jnp.inf)


def band(s, b, h, q, k, bias):
    """A masked row, and vectors that are masked as a whole in all others, also at their ends."""
    return jnp.where((abs(k - 150 * (b + 1) - q) < 100 + h) & (q != 1), s + bias, -jnp.inf)


def everything(s, b, h, q, k, slope, bias, i, j, factor):
    """All of them, with a row that is entirely masked."""
    s = CAP * jnp.tanh(s * factor / CAP) + bias + slope * ((k & 63) - q) / 8
    return jnp.where((i == j) & (k != 1) & ((q != 2) | (b == 0)), s, -jnp.inf)


def operands(name, shape, dtype, rng):
    """(score_args, positions of those that have gradients)."""
    b, h, q, k = shape
    slope = jnp.asarray(rng.random((h, 1, 1)), dtype)
    bias = jnp.asarray(rng.normal(size=(h, q, k)), dtype)
    ids = np.sort(rng.integers(0, 3, (b, max(q, k))), -1)
    i, j = jnp.asarray(ids[:, None, :q, None], jnp.int32), jnp.asarray(ids[:, None, None, :k], jnp.int8)
    return {
        cap: ([], []),
        alibi: ([slope], [0]),
        relative: ([bias], [0]),
        document: ([i, j.astype(jnp.int32)], []),
        window: ([], []),
        band: ([bias], [0]),
        everything: ([slope, bias, i, j, jnp.asarray(rng.random((b, 1, 1, 1)), "float32")], [0, 1, 4]),
    }[name]


def plain(operation, f):
    """The operation on arrays, in jnp."""

    def softmax(x, *args, where=True):
        indices = [jax.lax.broadcasted_iota(jnp.int32, x.shape, d) for d in range(x.ndim)]
        s = jnp.where(where, jnp.broadcast_to(f(x, *indices, *args), x.shape), -jnp.inf)
        kept = s != -jnp.inf
        largest = jax.lax.stop_gradient(s.max(-1, keepdims=True))
        below = jnp.where(kept, s - jnp.where(largest == -jnp.inf, 0, largest), 0)
        e = jnp.where(kept, jnp.exp(below), 0)
        total = e.sum(-1, keepdims=True)
        total = jnp.where(total == 0, 1, total)
        return e / total if operation == "softmax" else jnp.where(kept, below - jnp.log(total), -jnp.inf)

    return softmax


def ours(operation, f):
    return lambda x, *args, where=None: getattr(jaxkern, operation)(x, where=where, score=f, score_args=args)


def both(f, wrt, g):
    """The result and the gradients by x and by the arguments at `wrt`."""

    def run(x, *args):
        def of(x, *chosen):
            given = list(args)
            for k, a in zip(wrt, chosen):
                given[k] = a
            return f(x, *given)

        y, pull = jax.vjp(of, x, *(args[k] for k in wrt))
        return y, pull(g.astype(y.dtype))

    return run


def in_float64(f, *arrays):
    wider = lambda a: np.asarray(a, np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else np.asarray(a)
    with compat.enable_x64(), jax.default_device(jax.devices("cpu")[0]):
        return jax.tree.map(np.asarray, jax.jit(f)(*map(wider, arrays)))


def random(shape, dtype, seed=None):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def check(operation, f, shape, dtype, where=None):
    rng = np.random.default_rng()
    x, g = random(shape, dtype), random(shape, dtype)
    args, wrt = operands(f, shape, dtype, rng)
    found = jax.jit(both(functools.partial(ours(operation, f), where=where), wrt, g))(x, *args)
    part = True if where is None else np.asarray(where)
    g64 = np.where(np.isfinite(np.asarray(g, np.float64)), np.asarray(g, np.float64), 0)
    wanted = in_float64(both(functools.partial(plain(operation, f), where=part), wrt, g64), x, *args)
    assert found[0].dtype == x.dtype and found[1][0].dtype == x.dtype
    size = 1 + np.abs(np.where(np.isfinite(wanted[0]), wanted[0], 0)).max()
    close = lambda a, b, atol: np.testing.assert_allclose(np.asarray(a, np.float64), b, 4 * EPS[dtype], atol)
    close(found[0], wanted[0], EPS[dtype] * size / 4)
    close(found[1][0], wanted[1][0], EPS[dtype] * 2)
    for k, a, b in zip(wrt, found[1][1:], wanted[1][1:], strict=True):
        assert a.shape == args[k].shape and a.dtype == args[k].dtype
        terms = math.prod(shape) / a.size
        close(a, b, max(EPS[dtype], EPS[a.dtype.name]) * 2 * math.sqrt(terms) * (8 if f is not relative else 1))


# ---- values and gradients


@pytest.mark.parametrize("f", [cap, alibi, relative, document, window])
@pytest.mark.parametrize("operation", ["softmax", "log_softmax"])
def test_examples(f, operation):
    check(operation, f, (2, 3, 5, 9), "float32")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (2, 2, 4, 64)])
def test_every_dtype(shape, dtype, x64):
    check("softmax" if shape[-1] % 2 else "log_softmax", everything, shape, dtype)


WIDTHS = (1, 2, 8, 31, 512, 1001, 1024, 2048, 4096, 4104, 8192, 16393, 40000)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.sweep(6)
def test_widths(width, dtype):
    check("softmax", everything, (2, 3, 2, width), dtype)
    check("softmax", cap, (2, 1, 3, width), dtype)
    check("log_softmax", band, (2, 2, 3, width), dtype)


@pytest.mark.parametrize("mask_shape", [(2, 3, 5, 9), (5, 1), (2, 1, 1, 9)])
def test_where(mask_shape):
    where = jnp.asarray(np.random.default_rng().random(mask_shape) < 0.7)
    check("softmax", everything, (2, 3, 5, 9), "float32", where)
    check("log_softmax", relative, (2, 3, 5, 9), "float32", where)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_masked_stays_out(dtype):
    """NaN in x where it is masked, infinite cotangents where the score is -inf, and NaN in one row alone."""
    where = jnp.ones((4, 24), bool).at[:, 5].set(False)
    score = lambda s, q, k, b: jnp.where((k >= 8) & (q != 3), s * s + b, -jnp.inf)
    b = jnp.zeros((24,), dtype)

    def run(x, g):
        y, pull = jax.vjp(lambda x, b: jaxkern.softmax(x, where=where, score=score, score_args=[b]), x, b)
        return y, *pull(g)

    x, g = random((4, 24), dtype), random((4, 24), dtype)
    clean = run(x, g)
    dirty = run(x.at[:, 5].set(jnp.nan), g.at[:, :8].set(jnp.inf).at[3].set(jnp.nan))
    for a, c in zip(clean, dirty):
        np.testing.assert_array_equal(a, c)
    assert not np.asarray(clean[0])[3].any() and not np.asarray(clean[1])[3].any()
    y, dx, _ = run(x.at[1, 9].set(jnp.nan), g)
    kept = np.zeros((4, 24), bool)
    kept[1, 8:] = True
    assert (np.isnan(y) == kept).all() and (np.isnan(dx) == kept).all()


def test_captured_scalars():
    x, g = random((3, 6, 10), "float32"), random((3, 6, 10), "float32")

    def loss(softmax, x, factor, shift):
        y = softmax(lambda s, b, q, k: s * factor + 2.5 * jnp.where(k > q, jnp.sin(shift), 0.0), x)
        return (g * y).sum()

    jaxkerns = functools.partial(loss, lambda f, x: jaxkern.softmax(x, score=f), x)
    wanted = jax.jit(functools.partial(loss, lambda f, x: plain("softmax", f)(x), x))
    for transform in (lambda f: jax.grad(f, (0, 1)), lambda f: jax.jit(jax.grad(f, (0, 1)))):
        np.testing.assert_allclose(transform(jaxkerns)(0.7, 1.1), transform(wanted)(0.7, 1.1), 1e-4, 1e-5)
    over = lambda f: jax.vmap(jax.grad(f), (0, None))(jnp.arange(3.0), 0.3)
    np.testing.assert_allclose(over(jaxkerns), over(wanted), 1e-4, 1e-5)


def test_other_axes_types_and_numbers():
    x = random((4, 5, 6), "float32")
    f = lambda s, a, b, c, t: s * t + a * 0.1 - b * c * 0.2
    for axis in (0, 1, -1, (2,)):
        s = f(x, *(jax.lax.broadcasted_iota(jnp.int32, x.shape, d) for d in range(3)), 2.0)
        found = jaxkern.softmax(x, axis, score=f, score_args=[2.0])
        np.testing.assert_allclose(found, jax.nn.softmax(s, axis), 1e-5, 1e-7)
    assert jaxkern.softmax(jnp.arange(4), score=lambda s, k: s * 0).tolist() == [0.25] * 4
    assert jaxkern.softmax(jnp.zeros(4), score=lambda s, k: k * 0).tolist() == [0.25] * 4
    small = jaxkern.softmax(x.astype(jnp.float8_e4m3fn), score=lambda s, a, b, c: s)
    assert small.dtype == jnp.float8_e4m3fn
    assert jaxkern.softmax(jnp.zeros((0, 3)), score=lambda s, i, j: s).shape == (0, 3)
    y = jaxkern.softmax(jnp.zeros((3, 1)), 0, score=lambda s, i, j: i * jnp.log(2.0))
    np.testing.assert_allclose(y.ravel(), [1 / 7, 2 / 7, 4 / 7], 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ("warp", "block", "streaming"))
def test_forced_algorithms(algorithm):
    for dtype, width in (("bfloat16", 512), ("float32", 333), ("float16", 1000)):
        with algorithms.force(softmax=algorithm):
            check("softmax", everything, (2, 3, 5, width), dtype)
            check("softmax", band, (2, 3, 5, width), dtype)


@pytest.mark.gpu
def test_any_address_and_the_same_bits():
    x, bias = random((4, 3, 5, 65), "float32"), random((5, 65), "float32")

    def shifted(x, bias):
        x, bias = (a.ravel()[1 : 1 + a.size // 65 * 64].reshape(*a.shape[:-1], 64) for a in (x, bias))
        f = lambda s, b, h, q, k, c: jnp.where(k != h, s + c, -jnp.inf)
        y, pull = jax.vjp(lambda x, b: jaxkern.softmax(x, score=f, score_args=[b]), x, bias)
        return (
            y,
            *pull(jnp.cos(y)),
            jaxkern.softmax(jnp.where(jnp.arange(64) != jnp.arange(3)[:, None, None], x + bias, -jnp.inf)),
        )

    first, again = jax.jit(shifted)(x, bias), jax.jit(shifted)(x, bias)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    np.testing.assert_allclose(first[0], first[-1], 1e-5, 1e-7)


# ---- transformations


def close(found, wanted, tolerance=2e-4):
    """Sums of large terms that cancel are as exact as the largest of the array."""

    def compare(a, b):
        np.testing.assert_allclose(a, b, tolerance, max(tolerance / 10, 1e-5 * np.abs(b).max()))

    jax.tree.map(compare, found, wanted)


@pytest.mark.parametrize("operation", ["softmax", "log_softmax"])
def test_derivatives_of_derivatives(operation):
    shape = (2, 2, 4, 6)
    rng = np.random.default_rng()
    args, wrt = operands(relative, shape, "float32", rng)
    x, g = random(shape, "float32"), random(shape, "float32")
    score = lambda s, b, h, q, k, c: CAP * jnp.tanh(s * c) + jnp.where(k > 1, c * c, 0.1)

    def loss(f):
        return lambda x, c: (g * f(operation, score)(x, c) ** 2).sum()

    def second(f):
        return lambda *a: sum((d * d).sum() for d in jax.grad(loss(f), (0, 1))(*a))

    a, t = (x, args[0]), (g, args[0] * 0.5)
    transforms = (
        lambda f, a, t: jax.jvp(loss(f), a, t)[1],
        lambda f, a, t: jax.jvp(f(operation, score), a, t)[1],
        lambda f, a, t: jax.jvp(jax.grad(loss(f), (0, 1)), a, t)[1],
        lambda f, a, t: jax.grad(second(f), (0, 1))(*a),
        lambda f, a, t: jax.grad(lambda x: jax.jvp(loss(f), (x, a[1]), t)[1])(a[0]),
    )
    used = transforms if operation == "softmax" else transforms[2:4]
    found, wanted = (jax.jit(lambda a, t, f=f: [of(f, a, t) for of in used])(a, t) for f in (ours, plain))
    for one, expected in zip(found, wanted):
        close(one, expected, 1e-3)


@pytest.mark.parametrize("axes", [(0, None), (0, 0), (2, None), (None, 1), (4, 2)])
def test_vmap(axes):
    """Indices are those in each example."""
    shapes = [(2, 3, 4, 5), (3, 1, 5)]
    x, bias = (random(s if a is None else (*s[:a], 3, *s[a:]), "float32") for s, a in zip(shapes, axes))
    f = lambda s, b, h, q, k, c: s * c + 0.1 * h * q - 0.2 * b * k
    g = np.arange(120.0, dtype=np.float32).reshape(2, 3, 4, 5) % 7
    run = lambda make: jax.jit(jax.vmap(both(make("softmax", f), [0], g), axes))(x, bias)
    close(run(ours), run(plain))


def test_in_programs():
    x, bias = random((3, 4, 8), "float32"), random((4, 1), "float32")
    f = lambda s, b, q, k, c: jnp.where(k <= q + b, s + c * k, -jnp.inf)
    scan = lambda make: jax.lax.scan(lambda c, _: (make("softmax", f)(c, bias) * 2, None), x, None, 3)[0]
    close(scan(ours), scan(plain))
    remat = lambda make: jax.grad(lambda x: (jax.checkpoint(make("softmax", f))(x, bias) ** 2).sum())(x)
    close(remat(ours), remat(plain))
    run = jax.jit(ours("softmax", f))
    run(x, bias)
    before = run._cache_size()
    run(x, bias)
    assert run._cache_size() == before
    count = arguments._softmax_of_scores._cache_size
    jaxkern.softmax(x, score=lambda s, b, q, k: s * 1.25)
    before = count()
    jaxkern.softmax(x, score=lambda s, b, q, k: s * 1.25)
    assert count() == before  # a new lambda with the same source compiles nothing


# ---- bad input


def test_bad_input():
    x, softmax = jnp.zeros((3, 4)), jaxkern.softmax
    good = lambda s, i, j: s
    for kwargs in ({"scale": 2.0}, {"scale": jnp.ones(())}, {"bias": x}, {"causal": True}, {"dropout_rate": 0.5}):
        (name,) = kwargs
        with pytest.raises(TypeError, match=f"jaxkern.softmax: score does not combine with {name}"):
            softmax(x, score=good, **kwargs)
    with pytest.raises(TypeError, match="jaxkern.log_softmax: score does not combine with scale: write the scale in"):
        jaxkern.log_softmax(x, score=good, scale=2)
    with pytest.raises(TypeError, match="score must be a function of scalars, got int"):
        softmax(x, score=3)
    with pytest.raises(TypeError, match="score_args are the arguments of a score function, and score is None"):
        softmax(x, score_args=[x])
    with pytest.raises(TypeError, match="score_args must be a list or a tuple"):
        softmax(x, score=lambda s, i, j, a: s, score_args=x)
    with pytest.raises(TypeError, match=r"score_args\[1\] must be an array or a number, got str"):
        softmax(x, score=lambda s, i, j, a, b: s, score_args=[x, "x"])
    with pytest.raises(ValueError, match=r"score_args\[0\] of shape \(5,\) does not broadcast to x of shape \(3, 4\)"):
        softmax(x, score=lambda s, i, j, a: s, score_args=[jnp.zeros(5)])
    with pytest.raises(TypeError, match="score is called with an element of x, 2 indices and an element of each of 0"):
        softmax(x, score=lambda s: s)
    with pytest.raises(TypeError, match="score closes over an array, float32.3, 4."):
        softmax(x, score=lambda s, i, j: s + x[i, j])
    with pytest.raises(TypeError, match="score mask must return a real number, and returns bool"):

        def mask(s, i, j):
            return i < j

        softmax(x, score=mask)
    with pytest.raises(ValueError, match="must return 1 scalar, and returns 2"):
        softmax(x, score=lambda s, i, j: (s, s))
    with pytest.raises(TypeError, match=r"uses igamma at .*test_score.py"):
        softmax(x, score=lambda s, i, j: jax.scipy.special.gammainc(s, 2.0))
    for axis in (None, (0, 1), ()):
        with pytest.raises(ValueError, match="score needs axis to be one dimension"):
            softmax(x, axis, score=good)
    with pytest.raises(TypeError, match="where must be boolean"):
        softmax(x, where=x, score=good)


# ---- plans


def lowered(f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def programs(f, shape, dtype, args=(), where=None, operation="softmax", wrt=()):
    specs = [jax.ShapeDtypeStruct(shape, dtype), *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args)]

    def run(x, g, *args):
        mask = None if where is None else args[-1]
        args = args if where is None else args[:-1]
        return both(functools.partial(ours(operation, f), where=mask), wrt, g)(x, *args)

    masks = [] if where is None else [jax.ShapeDtypeStruct(where, bool)]
    return lowered(run, specs[0], specs[0], *specs[1:], *masks)


@plans.needs_runtime
def test_one_call_forward_and_one_backward():
    bias = jnp.zeros((16, 512, 512), "bfloat16")
    score = lambda s, b, h, q, k, c: 30 * jnp.tanh(s / 30) + c
    text = programs(score, (32, 16, 512, 512), "bfloat16", [bias])
    found = launch.programs(text)
    assert [re.search(r"^operation (\w+)", p, re.M)[1] for p in found] == [
        "jaxkern_softmax_score",
        "jaxkern_softmax_score_grad",
    ]
    assert all(MODULE.check(p) == "" for p in found)
    assert "reduce" not in text and text == programs(score, (32, 16, 512, 512), "bfloat16", [bias])
    with_bias = launch.programs(programs(score, (32, 16, 512, 512), "bfloat16", [bias], wrt=[0]))
    assert [re.search(r"^operation (\w+)", p, re.M)[1] for p in with_bias] == [
        "jaxkern_softmax_score",
        "jaxkern_softmax_score_grads",
        "jaxkern_elementwise_kernel",
    ]


@plans.needs_runtime
def test_forced_algorithms_are_lowered():
    x = jax.ShapeDtypeStruct((4, 8, 512), "float32")
    for name in ("warp", "block", "streaming"):
        with algorithms.force(softmax=name):
            (program,) = launch.programs(lowered(lambda x: jaxkern.softmax(x, score=lambda s, b, q, k: s * 2), x))
        assert re.search(rf"^operation jaxkern_softmax_score\(.*, {name}$", program, re.M)
    with algorithms.force(softmax="cluster"), pytest.raises(ValueError, match="the algorithm 'cluster' cannot run"):
        lowered(lambda x: jaxkern.softmax(x, score=lambda s, b, q, k: s * 2), x)


@plans.needs_runtime
def test_without_a_kernel():
    deep = jnp.zeros((2, 1) * 5 + (1,))
    text = lowered(
        lambda x: jaxkern.softmax(x, score=lambda s, *rest: s + rest[-1], score_args=[deep]),
        jax.ShapeDtypeStruct((2,) * 11, "float32"),
    )
    assert "@jaxkern_softmax_score(" in text and "tensor<2x2x2x2x2x2x2x2x2x2x2xf32>" in text
    wide = [jnp.zeros(7)] * 20
    text = lowered(
        lambda x: jaxkern.softmax(x, score=lambda s, i, j, *a: s + sum(a), score_args=wide),
        jax.ShapeDtypeStruct((5, 7), "float32"),
    )
    assert "@jaxkern_" not in text
    (n,) = jax.export.symbolic_shape("n")
    f = lambda x: jaxkern.softmax(x, score=lambda s, i, j: jnp.where(i < j, s, -jnp.inf))
    exported = jax.export.export(jax.jit(f), platforms=["cuda", "cpu"])(jax.ShapeDtypeStruct((n, 7), "float32"))
    assert "@jaxkern_" not in exported.mlir_module()
    if not ON_GPU:
        x = random((3, 7), "float32")
        np.testing.assert_allclose(exported.call(x), f(x), 1e-6)


def planned(shape, args, indexed, dtype="float32", on=plans.DEVICES[0], backward=False, mask=None, f=None):
    """The plan of a function, by default of one that uses everything."""
    of = lambda shape, dtype: jax.core.ShapedArray(shape, jnp.dtype(dtype))
    with compat.enable_x64():
        from jaxkern._core import functor

        f = f or (lambda s, *rest: s + sum(r.astype(s.dtype) for r in rest))
        dtypes = [jnp.dtype(dtype), *[jnp.dtype("int32")] * len(indexed), *(jnp.dtype(d) for _, d in args)]
        function, _ = functor.trace(f, dtypes, name="test")
        wide = "float64" if dtype == "float64" else "float32"
        function = function.with_results([wide])
        avals = [of(shape, dtype)] * (1 + backward) + [of(s, d) for s, d in args]
        avals += [of(mask, bool)] if mask else []
        return plan.score(
            on,
            avals,
            [of(shape, dtype)],
            axis=len(shape) - 1,
            algorithm="auto",
            log=False,
            function=function,
            indexed=indexed,
            extras="mask" if mask else "",
            unscored=False,
            backward=backward,
        )


@pytest.mark.parametrize("on", plans.DEVICES, ids=lambda d: str(d.sm_count))
def test_launches_are_within_limits(on):
    for shape in ((3, 5), (4, 64, 512), (2, 7, 1003), (16, 4096), (5, 33333), (1 << 24, 64)):
        args = [(shape[-1:], "bfloat16"), ((1,), "int8")]
        args = [((1,) * (len(shape) - 1) + s, d) for s, d in args]
        for dtype in FLOATS:
            for backward in (False, True):
                found = planned(shape, args, tuple(range(len(shape))), dtype, on, backward)
                plans.check_limits(found, on)


def test_struct_is_laid_out_as_in_the_kernel():
    """Sizes that score.cuh asserts, and where the members lie."""
    found = planned((4, 6, 8, 64), [((1, 6, 8, 64), "float32"), ((4, 1, 1, 1), "int32")], (0, 2, 3))
    args = found.launches[0].args[0]
    assert plans.layout(args) == (688 + 2 * (8 + 88) + 3 * 24 + 16, 8)
    text = (runtime.kernels_folder() / "softmax/score.cuh").read_text()
    assert "sizeof(ScoreParams<2, 3>) == 688 + 2 * (8 + 88) + 3 * 24 + 16" in text
    assert plans.layout(planned((4, 64), [], ()).launches[0].args[0]) == (688 + 96 + 24 + 16, 8)
    # Rows of dimensions 0 and 2: row / (6 * 8) % 4 and row % 8; the column is its own index.
    n = len(args.members)
    below, extent = ([m.members[0].value for m in args.members[n - 8 + 3 * k : n - 5 + 3 * k]] for k in range(2))
    assert (below, extent[:2]) == ([48, 1, 1], [4, 8])
    assert "ScoreCall<Score, void, void, false, 3, 2, 2, float, int32_t>" in found.launches[0].name


def test_what_skips_vectors():
    """Masks of indices and of operands that broadcast over rows; not of operands as large as x."""
    shape, lowest = (4, 6, 512), -jnp.inf
    documents = [((4, 6, 1), "int32"), ((4, 1, 512), "int32")]
    for f, args, after in (
        (lambda s, b, q, k: jnp.where(k <= q, s, lowest), [], "false"),
        (lambda s, b, q, k, last: jnp.where(k < last, s, lowest), [((4, 1, 1), "int32")], "false"),
        (lambda s, b, q, k, i, j: jnp.where((i == j) & (k <= q), s, lowest), documents, "true"),
        (lambda s, b, q, k, i, j: jnp.where(k <= q, s + i + j, lowest), documents, "false"),
        (lambda s, b, q, k: jnp.where((k <= q) | (not True), s, lowest), [], "false"),
        (lambda s, b, q, k, keep: jnp.where(keep & (k <= q), s, lowest), [(shape, "bool")], "false"),
        (lambda s, b, q, k, keep: jnp.where(keep, s, lowest), [(shape, "bool")], None),
        (lambda s, b, q, k: s + jnp.where(k <= q, 0, lowest), [], None),  # NaN + -inf is NaN
    ):
        for backward in (False, True):
            name = planned(shape, args, (0, 1, 2), backward=backward, f=f).launches[0].name
            gradient = "ScoreGradient" if backward else "void"
            expected = f"{gradient}, ScoreMask, {after}, 3" if after else f"{gradient}, void, false, 3"
            assert f"ScoreCall<Score, {expected}, 2" in name


KERNELS = [  # shape, arguments, indices, dtype, backward, mask, capability
    ((4, 16, 64, 512), [], (), "float32", True, None, 90),
    ((4, 16, 64, 512), [((1, 16, 64, 512), "bfloat16")], (), "bfloat16", False, None, 90),
    ((4, 16, 64, 512), [((1, 16, 64, 512), "bfloat16")], (2, 3), "bfloat16", True, None, 100),
    ((4, 9, 1001), [((1, 9, 1001), "int8"), ((4, 1, 1), "bool")], (0, 1, 2), "float16", True, (4, 1, 1001), 80),
    ((4, 9, 4096), [((1, 1, 4096), "float64"), ((1, 9, 4096), "uint16")], (1,), "float32", True, None, 120),
    ((4, 9, 1000), [((1, 9, 1000), "float32")], (2,), "float64", False, (4, 1, 1000), 90),
]


@plans.needs_nvrtc
@pytest.mark.parametrize(
    "width, dtype, backward", [(512, "bfloat16", True), (1001, "float32", False), (33333, "float16", True)]
)
def test_kernels_that_skip_compile(width, dtype, backward):
    ids = [((4, 9, 1), "int32"), ((4, 1, width), "int8")]
    for f in (
        lambda s, b, q, k, i, j: jnp.where(i == j, s * 2, -jnp.inf),
        lambda s, b, q, k, i, j: jnp.where(abs(q - k) < i, s + j, -jnp.inf),
    ):
        p = planned((4, 9, width), ids, (0, 1, 2), dtype, backward=backward, f=f)
        for step in (*p.launches, *p.unaligned):
            assert MODULE.compile(step.header, step.name, 90, step.source)


@plans.needs_nvrtc
@pytest.mark.parametrize("shape, args, indexed, dtype, backward, mask, capability", KERNELS)
def test_kernels_compile(shape, args, indexed, dtype, backward, mask, capability):
    p = planned(shape, args, indexed, dtype, backward=backward, mask=mask)
    steps = p.launches if capability != 120 else (*p.launches, *p.unaligned)
    for step in steps:
        assert MODULE.compile(step.header, step.name, capability, step.source)
