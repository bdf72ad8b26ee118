"""softmax_cross_entropy: numbers, labels, extremes, bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import ON_GPU
from losses import (
    OPERATION,
    OPTIONS,
    assert_near,
    check,
    every_dtype,
    exact,
    needs_runtime,
    problem,
    separate,
    together,
)
from problems import random_mask
from reference import DTYPES, computing, wide

import jaxkern
from jaxkern import algorithms
from jaxkern._core import compat
from jaxkern._ops.cross_entropy import primitive as primitives

# ---- numbers


@every_dtype
@pytest.mark.parametrize(
    "shape, axis, mask",
    [
        ((9,), 0, None),
        ((5, 1), -1, None),
        ((33, 128), -1, None),
        ((3, 1003), 1, (3, 1003)),
        ((5, 7, 40), 1, None),
        ((5, 40, 7), 1, (5, 1, 7)),
        ((6, 4, 300), -1, (1, 4, 1)),
        ((6, 4, 300), -1, (300,)),
        ((130, 6), 0, (130, 1)),
        ((2, 2, 2, 2, 2, 2, 2, 2, 2, 3), -1, (2, 1, 2, 1, 2, 1, 2, 1, 2, 3)),
    ],
)  # more groups than a kernel takes
@pytest.mark.sweep(3)
@pytest.mark.optimized
def test_against_numpy(dtype, shape, axis, mask):
    for options in OPTIONS if ON_GPU and dtype == "float32" else OPTIONS[len(shape) % 2 :: 2]:
        check(*problem(shape, dtype, axis), axis, None if mask is None else random_mask(mask), **options)


# Around the ends of packs (16 bytes) and of the algorithms that rows of so many bytes run in.
WIDTHS = sorted(
    {max(1, w + d) for w in (1, 8, 16, 64, 256, 512, 2048) for d in (-1, 0, 1)} | {8191, 16387, 32768, 50257}
)


@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.sweep(11)
def test_widths(dtype, width):
    check(*problem((5, width), dtype), label_smoothing=0.1 if width % 2 else 0.0)


def by_optax(x, labels, g):
    value, pull = jax.vjp(lambda x: optax.softmax_cross_entropy_with_integer_labels(x, labels), x)
    return value, pull(g.astype(value.dtype))[0]


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-6), ("bfloat16", 3e-2), ("float16", 4e-3)])
def test_as_optax(dtype, tolerance):
    x, labels, g = problem((64, 1000), dtype)
    for ours, theirs in zip(separate(x, labels, g, None, -1, ()), jax.jit(by_optax)(x, labels, g)):
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), np.asarray(theirs, np.float32), rtol=tolerance, atol=10 * tolerance
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shift", [0.0, 1e4])
@pytest.mark.optimized
def test_no_less_accurate_than_optax(dtype, shift):
    """Nor where the logits are large, so that their differences are all that counts."""
    x, labels, g = problem((32, 4096), dtype, scale=4.0)
    x = (x.astype(jnp.float32) + shift).astype(dtype)
    wanted = [size_and_value[0] for size_and_value in exact(x, labels, g)]
    allowed = [
        float(jnp.finfo(jnp.float32).eps) * np.abs(wanted[0]).max(),
        float(jnp.finfo(dtype).eps) * np.abs(wanted[1]).max(),
    ]
    errors = [
        [np.abs(np.asarray(a).astype(wide) - w).max() for a, w in zip(found, wanted)]
        for found in (
            separate(x, labels, g, None, -1, ()),
            together(x, labels, g, None, -1, ()),
            jax.jit(by_optax)(x, labels, g),
        )
    ]
    for ours in errors[:2]:
        for mine, theirs, limit in zip(ours, errors[2], allowed):
            assert mine <= max(theirs, limit), f"{mine / limit:.2f} of the rounding, optax {theirs / limit:.2f}"


@every_dtype
@pytest.mark.parametrize(
    "shape, axis, participants",
    [
        ((300, 1), 1, 1),
        ((70, 1, 8), 1, 1),
        ((70, 1, 3), 1, 1),
        ((300, 40), 1, 1),
        ((300, 40), 1, 40),
        ((70, 20, 8), 1, 20),
        ((9, 5000), 1, 5000),
        ((9, 50257), 1, 50257),
        ((9, 140_000), 1, 140_000),
    ],
)
@pytest.mark.sweep(3)
def test_a_certain_class_costs_exactly_nothing(dtype, shape, axis, participants):
    """One class, one participant, or one logit far above the others."""
    x, labels, g = problem(shape, dtype, axis, scale=30)
    with compat.enable_x64(dtype == "float64"):
        hot = jnp.expand_dims(labels, axis) == jax.lax.broadcasted_iota(labels.dtype, shape, axis)
        if participants > 1:
            x = jnp.where(hot, x + 1500, x).astype(dtype)
        mask = hot if participants < shape[axis] else None
        run = functools.partial(jaxkern.softmax_cross_entropy, axis=axis, where=mask)
        both = functools.partial(jaxkern.softmax_cross_entropy_and_grad, axis=axis, where=mask)
        value, pull = jax.jit(lambda x: jax.vjp(lambda x: run(x, labels), x))(x)
        for found in (value, *pull(g), *jax.jit(lambda x: both(x, labels, g))(x)):
            assert not np.asarray(found).any()


@every_dtype
def test_bitwise_reproducible(dtype):
    x, labels, g = problem((257, 1003), dtype)
    with compat.enable_x64(dtype == "float64"):
        for run in (separate, together):
            runs = [
                [np.asarray(a).tobytes() for a in run(x, labels, g, None, -1, (("label_smoothing", 0.1),))]
                for _ in range(4)
            ]
            assert all(r == runs[0] for r in runs)


# ---- labels

LABELS = [0, 6, 7, -1, -2, 100, -100, 127, -128]


@pytest.mark.parametrize(
    "label_type", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "int4"]
)
@pytest.mark.parametrize(
    "ignore, shape, axis", [(None, (9, 7), 1), (-1, (9, 7), 1), (-100, (7, 9), 0), (100, (9, 7), 1), (6, (7, 9), 0)]
)
@pytest.mark.sweep(3)
def test_labels_of_any_type(label_type, ignore, shape, axis):
    """Out of range: NaN, unless it is what is ignored. 64 bits with x64 off."""
    values = [v for v in LABELS if np.iinfo(label_type if label_type != "int4" else np.int8).min <= v]
    values = [v if label_type != "int4" or -8 <= v < 8 else 0 for v in values]
    values = (values + [2] * 9)[:9]
    if label_type == "int64":
        values[-2:] = [2**32 + 1, -(2**40)]
    if label_type in ("uint32", "uint64"):
        values[-2:] = [2**32 - 1, 2**63 + 1 if label_type == "uint64" else 2**31]
    labels = np.array(values, label_type if label_type != "int4" else jnp.int4)
    x, _, g = problem(shape, "float32", axis)
    exactly = np.array(values, object)
    (value, _), (dx, _) = exact(x, exactly, g, axis, ignore=ignore)
    options = {} if ignore is None else {"ignore_index": ignore}
    f = lambda x: jaxkern.softmax_cross_entropy(x, labels, axis=axis, **options)
    found, pull = jax.vjp(f, x)
    for a, b in (
        (found, value),
        (pull(g)[0], dx),
        *zip(jaxkern.softmax_cross_entropy_and_grad(x, labels, g, axis=axis, **options), (value, dx)),
    ):
        np.testing.assert_allclose(a, b.astype(np.float64), rtol=1e-5, atol=1e-5)
    assert np.isnan(value).any() and np.isfinite(value).any()


def test_more_classes_than_the_labels_can_name():
    x, _, g = problem((4, 50257), "float32")
    check(x, jnp.array([0, 127, -1, -128], jnp.int8), g, ignore_index=-128)


def test_ignored_rows_do_not_spread_nan():
    x, labels, g = problem((6, 40), "float32")
    x, g = x.at[1].set(jnp.nan), g.at[1].set(jnp.nan)
    labels = labels.at[1].set(-7)
    for run in (separate, together):
        value, dx = run(x, labels, g, None, -1, (("ignore_index", -7),))
        assert value[1] == 0 and (dx[1] == 0).all() and np.isfinite(dx).all()


# ---- extremes


@every_dtype
@pytest.mark.parametrize("width", [3, 40, 700, 9000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.sweep(5)
def test_special_logits(dtype, width, smoothing):
    x = np.random.default_rng(0).normal(size=(8, width))
    x[0, 0] = x[1, -1] = np.nan
    x[2, width // 2] = np.inf
    x[3] = -np.inf  # a row without a class
    x[4, 1:] = -np.inf  # one class
    x[5, 0] = -np.inf  # the label is impossible
    x[6, 0] = -np.inf
    labels = jnp.array([1, 0, 1, 1, 0, 0, 1, 1])
    _, _, g = problem((8, width), dtype)
    with compat.enable_x64(dtype == "float64"):
        x = jnp.asarray(x, dtype)
        for run in (separate, together):
            value, dx = (
                np.asarray(a, np.float64) for a in run(x, labels, g, None, -1, (("label_smoothing", smoothing),))
            )
            assert np.isnan(value[:3]).all() and np.isnan(dx[:3]).all(-1).all()
            assert value[3] == 0 and (dx[3] == 0).all()
            assert np.isposinf(value[5]) and np.isfinite(dx[3:]).all()
            assert np.isposinf(value[[4, 6]]).all() if smoothing else abs(value[4]) < 1e-7 and np.isfinite(value[6])
            assert np.isfinite(value[7])


def as_written(x, labels, g, algorithm, which):
    """(loss, gradient) with the rows of logsumexp(x) - x[label]; None where this algorithm is not for these passes."""
    rows, width = x.shape
    params = {"axis": 1, "algorithm": algorithm, "options": primitives.Options(as_written=True)}
    fits = functools.partial(algorithms.fits, OPERATION, algorithm, rows, width, dtype=x.dtype.name)
    if which == "both":
        if algorithm != "auto" and not fits(which=which):
            return None
        loss, _, _, dx = primitives.cross_entropy_both_p.bind(x, labels, g, **params)
        return loss, dx
    forward, backward = (
        params | ({} if algorithm == "auto" or fits(which=which) else {"algorithm": "auto"})
        for which in ("loss", "gradient")
    )
    if algorithm != "auto" and "auto" == forward["algorithm"] == backward["algorithm"]:
        return None
    loss, *residuals = primitives.cross_entropy_p.bind(x, labels, **forward)
    return loss, primitives.cross_entropy_grad_p.bind(x, labels, *residuals, g, **backward)


@every_dtype
@pytest.mark.parametrize("width", [3, 40, 700, 9000, 30000])
@pytest.mark.sweep(5)
def test_special_rows_as_jax_has_them(dtype, width):
    """What `jaxkern.accelerate` puts in the place of optax's loss, in every algorithm: NaN and infinities as JAX has them."""
    x = np.random.default_rng(0).normal(size=(9, width))
    x[0, 0] = np.nan
    x[1, width // 2] = x[2, 1] = np.inf
    x[3] = -np.inf
    x[4, 1:] = -np.inf
    x[5, 0] = -np.inf
    labels = jnp.array([1, 0, 1, 1, 0, 0, width, -1, 1])
    with compat.enable_x64(dtype == "float64"):
        x = jnp.asarray(x, dtype)
        g = jnp.linspace(-1, 2, 9, dtype=computing(dtype))
        forced = ("auto", *algorithms.names(OPERATION)) if ON_GPU else ("auto",)
        found = [as_written(x, labels, g, a, which) for a in forced for which in ("separate", "both")]
        wide = x.astype(computing(dtype))
        at = lambda x: jnp.where(labels == -1, jnp.nan, jnp.take_along_axis(x, labels[:, None], 1)[:, 0])
        wanted, pull = jax.vjp(lambda x: jax.nn.logsumexp(x, 1) - at(x), wide)
        wanted_dx = np.array(pull(g)[0], np.float64)
        # A label that is no class: in JAX -1 counts from the end, here it is out of range.
        wanted_dx[7] = np.asarray(g)[7] * np.asarray(jax.nn.softmax(wide[7]))
        rtol = {"float64": 1e-12, "float32": 2e-6}.get(dtype, 2e-2)
        for loss, dx in (f for f in found if f is not None):
            np.testing.assert_allclose(np.asarray(loss, np.float64), wanted, rtol=rtol, atol=rtol)
            dx = np.asarray(dx, np.float64)
            np.testing.assert_allclose(dx[[0, *range(3, 9)]], wanted_dx[[0, *range(3, 9)]], rtol=rtol, atol=rtol)
            assert np.isnan(dx[1, width // 2]) and np.isnan(dx[2, 1])


@every_dtype
@pytest.mark.parametrize("axis", [0, 1])
def test_huge_logits(dtype, axis):
    huge = float(jnp.finfo(dtype).max)
    rows = np.array(
        [[huge, huge, huge], [-huge, -huge, -huge], [huge / 2, 0, -huge / 2], [huge, huge / 2, -np.inf], [0, 1e-4, 0]]
    )
    with compat.enable_x64(dtype == "float64"):
        x = jnp.asarray(rows if axis else rows.T, dtype)
        check(x, jnp.array([0, 1, 0, 0, 2]), jnp.ones(5, computing(dtype)), axis)


@every_dtype
@pytest.mark.parametrize("width", [5, 300, 5000])
@pytest.mark.sweep(3)
def test_masks(dtype, width):
    """A row without a participant, a masked label, and NaN where it is not looked at."""
    x = np.random.default_rng(0).normal(size=(5, width))
    mask = np.random.default_rng(1).random((5, width)) < 0.5
    mask[0], mask[1:, 0], mask[1:, 1] = False, True, False
    x[2, 1] = np.nan
    labels = jnp.array([0, 0, 0, 1, 0])  # the label of row 3 is masked
    for smoothing in (0.0, 0.1):
        with compat.enable_x64(dtype == "float64"):
            x = jnp.asarray(x, dtype)
            check(x, labels, jnp.ones(5, computing(dtype)), -1, jnp.asarray(mask), label_smoothing=smoothing)
            value = jaxkern.softmax_cross_entropy(x, labels, where=jnp.asarray(mask), label_smoothing=smoothing)
            assert value[0] == 0 and np.isposinf(value[3])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape, axis", [((0, 5), -1), ((3, 0), 0), ((2, 0, 3), 1), ((0,), 0)])
def test_empty(shape, axis, smoothing):
    x = jnp.zeros(shape, jnp.bfloat16)
    labels = jnp.zeros(np.delete(shape, axis), jnp.int32)
    options = {"axis": axis, "label_smoothing": smoothing}
    value, dx = jaxkern.softmax_cross_entropy_and_grad(x, labels, **options)
    assert value.shape == labels.shape and value.dtype == jnp.float32 and dx.shape == shape and dx.dtype == x.dtype
    assert jax.grad(lambda x: jaxkern.softmax_cross_entropy(x, labels, **options).sum())(x).shape == shape
    assert np.isnan(value).all() or 0 in labels.shape  # no label is one of no classes
    assert not jaxkern.softmax_cross_entropy(x, labels - 1, ignore_index=-1, **options).any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_cotangents(dtype, smoothing):
    """The gradient has the NaNs and infinities of JAX's derivative: with an infinite cotangent the label's entry is the
    difference of two infinities."""
    with compat.enable_x64(dtype == "float64"):
        x, labels, _ = problem((6, 24), dtype)
        g = jnp.asarray([np.inf, -np.inf, np.nan, 1.0, 0.0, -2.0], computing(dtype))
        target = (1 - smoothing) * jax.nn.one_hot(labels, 24, dtype=g.dtype) + smoothing / 24
        wide = lambda x: jax.nn.logsumexp(x.astype(g.dtype), axis=-1)
        label = lambda x: jnp.take_along_axis(x.astype(g.dtype), labels[:, None], -1)[:, 0]
        if smoothing:
            theirs = lambda x: wide(x) - jnp.sum(target * x.astype(g.dtype), -1)
        else:
            theirs = lambda x: wide(x) - label(x)
        expected = jax.jit(lambda g: jax.vjp(theirs, x)[1](g)[0])(g)
        ours = lambda x: jaxkern.softmax_cross_entropy(x, labels, label_smoothing=smoothing)
        found = [jax.jit(lambda g: jax.vjp(ours, x)[1](g)[0])(g)]
        found.append(jaxkern.softmax_cross_entropy_and_grad(x, labels, g, label_smoothing=smoothing)[1])
    expected, *found = (np.asarray(a, np.float64) for a in (expected, *found))
    for dx in found:
        for special in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(special(dx), special(expected))
    assert np.isnan(expected[0, labels[0]]) and (smoothing or np.isposinf(expected[0]).sum() == 23)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int32"])
def test_types_without_a_kernel(dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(0, 3, (6, 40)), dtype)
    labels = jnp.arange(6)
    np.testing.assert_allclose(
        jaxkern.softmax_cross_entropy(x, labels),
        jaxkern.softmax_cross_entropy(x.astype(jnp.float32), labels),
        rtol=1e-6,
    )


@pytest.mark.gpu
def test_more_than_2_to_31_elements():
    free = jax.devices()[0].memory_stats()
    shape = ((1 << 20) + 3, 2051)
    if free["bytes_limit"] - free["bytes_in_use"] < 6 * 2 * shape[0] * shape[1]:
        pytest.skip("not enough device memory")
    x = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))(jax.random.key(0))
    labels = jnp.arange(shape[0]) % shape[1]
    g = jnp.ones(shape[0])
    rows = np.array([0, 1, (1 << 31) // 2051, (1 << 31) // 2051 + 1, shape[0] - 1])
    for run in (separate, together):
        value, dx = run(x, labels, g, None, -1, ())
        (wanted, size), (wanted_dx, size_dx) = exact(x[rows], labels[rows], g[rows])
        assert_near(value[rows], wanted, size, x.dtype)
        assert_near(dx[rows], wanted_dx, size_dx, x.dtype)
        del value, dx


# ---- bad input


@pytest.mark.parametrize(
    "args, options, kind, words",
    [
        (
            (jnp.ones((2, 3)), jnp.zeros(2)),
            {},
            TypeError,
            ["labels must be of an integer type", "float32[2]: one-hot labels"],
        ),
        ((jnp.ones((2, 3)), jnp.zeros(2, bool)), {}, TypeError, ["labels must be of an integer type", "bool[2]"]),
        ((jnp.ones((2, 3)), jnp.zeros(3, int)), {}, ValueError, ["labels of shape (3,)", "(2, 3)", "axis 1"]),
        ((jnp.ones((2, 3)), jnp.zeros((2, 3), int)), {}, ValueError, ["labels of shape (2, 3)", "shape (2,)"]),
        ((jnp.ones((2, 3)), jnp.zeros(2, int)), {"axis": 2}, ValueError, ["axis 2", "logits of shape (2, 3)"]),
        ((jnp.ones((2, 3)), jnp.zeros(2, int)), {"axis": (0, 1)}, TypeError, ["axis must be an int", "(0, 1)"]),
        ((jnp.ones((2, 3)), jnp.zeros(2, int)), {"axis": None}, TypeError, ["axis must be an int", "None"]),
        ((jnp.ones((2, 3)), [0, 1]), {}, TypeError, ["labels must be an array of integers", "list"]),
        (([[1.0]], jnp.zeros(1, int)), {}, TypeError, ["logits must be an array", "list"]),
        (
            (jnp.ones((2, 3), jnp.complex64), jnp.zeros(2, int)),
            {},
            TypeError,
            ["logits must be real", "complex64[2, 3]"],
        ),
        ((1.0, jnp.zeros((), int)), {}, ValueError, ["axis -1", "logits of shape ()"]),
        (
            (jnp.ones((2, 3)), jnp.zeros(2, int)),
            {"where": jnp.ones((2, 3))},
            TypeError,
            ["where must be boolean", "float32[2, 3]"],
        ),
        (
            (jnp.ones((2, 3)), jnp.zeros(2, int)),
            {"where": jnp.ones((2,), bool)},
            ValueError,
            ["where of shape (2,)", "logits of shape (2, 3)"],
        ),
        ((jnp.ones((2, 3)), jnp.zeros(2, int)), {"label_smoothing": 1.5}, ValueError, ["label_smoothing", "1.5"]),
        (
            (jnp.ones((2, 3)), jnp.zeros(2, int)),
            {"label_smoothing": jnp.float32(0.1)},
            TypeError,
            ["label_smoothing must be a Python number"],
        ),
        ((jnp.ones((2, 3)), jnp.zeros(2, int)), {"z_loss": "a"}, TypeError, ["z_loss must be a Python number", "'a'"]),
        ((jnp.ones((2, 3)), jnp.zeros(2, int)), {"z_loss": float("nan")}, ValueError, ["z_loss must be finite"]),
        (
            (jnp.ones((2, 3)), jnp.zeros(2, int)),
            {"ignore_index": 1.0},
            TypeError,
            ["ignore_index must be an int", "1.0"],
        ),
        (
            (jnp.ones((2, 3)), jnp.zeros(2, int)),
            {"ignore_index": True},
            TypeError,
            ["ignore_index must be an int", "True"],
        ),
    ],
)
def test_bad_input(args, options, kind, words):
    for name in ("softmax_cross_entropy", "softmax_cross_entropy_and_grad"):
        with pytest.raises(kind) as error:
            getattr(jaxkern, name)(*args, **options)
        message = str(error.value)
        assert message.startswith(f"jaxkern.{name}: ") and all(word in message for word in words), message


def test_bad_weights():
    x, labels, _ = problem((2, 3), "float32")
    for weights, kind, words in (
        (jnp.ones(3), ValueError, "weights of shape \\(3,\\)"),
        (jnp.ones((2, 1)), ValueError, "weights"),
        (jnp.ones(2, bool), TypeError, "weights must be real"),
        ("a", TypeError, "weights must be an array"),
    ):
        with pytest.raises(kind, match=words):
            jaxkern.softmax_cross_entropy_and_grad(x, labels, weights)


@needs_runtime
def test_backend_is_the_one_under_test():
    """No call for CUDA silently runs through XLA."""
    for dtype in ("float16", "bfloat16", "float32"):
        x, labels, _ = problem((3, 5), dtype)
        traced = jax.jit(jaxkern.softmax_cross_entropy).trace(x, labels)
        assert "@jaxkern_cross_entropy(" in traced.lower(lowering_platforms=("cuda",)).as_text()
