"""cumsum and its relatives, associative_scan, and recurrences by name: values against loops in NumPy, derivatives against JAX's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxkern
from jaxkern._core import compat, launch

# The operation of two numbers in NumPy, and its identity.
OPERATIONS = {
    "cumsum": (np.add, 0),
    "cumprod": (np.multiply, 1),
    "cummax": (np.maximum, -np.inf),
    "cummin": (np.minimum, np.inf),
    "cumlogsumexp": (np.logaddexp, -np.inf),
}
every_operation = pytest.mark.parametrize("name", OPERATIONS)
IDS = np.array([4, 4, 0, 7, 7, 7, 4])  # of segments; an id may come back
SHAPE = (3, 7, 2)
CASES = [
    {"axis": 1},
    {"axis": 0, "reverse": True},
    {"axis": -1, "exclusive": True},
    {"axis": -2, "reverse": True, "exclusive": True, "segment_ids": IDS},
    {"axis": 1, "segment_ids": np.stack([np.stack([IDS, IDS[::-1]], 1)] * 3)},
    {"axis": None, "exclusive": True, "segment_ids": np.arange(42) // 5},
]


def numbers(dtype, shape=SHAPE, seed=0):
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if "int" in dtype:
        return rng.integers(0, 100, shape).astype(dtype)
    return rng.normal(size=shape).astype(jnp.dtype(dtype))


def loop(name, x, dtype, axis, reverse=False, exclusive=False, segment_ids=None):
    """The steps one after the other, in float64 or the integer type of the result."""
    f, first = OPERATIONS[name]
    integral = np.issubdtype(dtype, np.integer)
    if integral and np.isinf(first):
        first = np.iinfo(dtype).max if first > 0 else np.iinfo(dtype).min
    x = x.astype(dtype if integral else np.float64)
    x, axis = (x.reshape(-1), 0) if axis is None else (x, axis)
    order = slice(None, None, -1 if reverse else 1)
    steps = np.moveaxis(x, axis, 0)[order]
    first = np.full(steps.shape[1:], first, x.dtype)
    ids = np.zeros(len(steps)) if segment_ids is None else segment_ids
    ids = (np.moveaxis(ids, axis, 0) if ids.ndim == x.ndim else ids.reshape(-1, *[1] * (x.ndim - 1)))[order]
    ys, y = [], first
    for t, element in enumerate(steps):
        before = y if t and segment_ids is None else np.where(ids[t] == ids[t - 1], y, first) if t else first
        with np.errstate(all="ignore"):
            y = f(before, element).astype(x.dtype)
        ys.append(before if exclusive else y)
    return np.moveaxis(np.stack(ys)[order], 0, axis)


@pytest.fixture
def x64():
    with compat.enable_x64():
        yield


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int32", "int8", "uint16", "bool"])
@every_operation
@pytest.mark.sweep(3)
def test_values(name, dtype):
    if dtype == "bool" and name not in ("cumsum", "cumprod"):
        with pytest.raises(TypeError, match=rf"jaxkern.{name}: x must be real"):
            getattr(jaxkern, name)(numbers("bool"), 0)
        return
    x = numbers(dtype)
    with compat.enable_x64(dtype == "float64"):
        counterpart = getattr(jnp if name in ("cumsum", "cumprod") else lax, name)
        wanted = jnp.float32 if "int" in dtype and name == "cumlogsumexp" else jax.eval_shape(counterpart, x).dtype
        cases = CASES if dtype == "float32" else CASES[3:4]
        found = jax.jit(lambda x: [getattr(jaxkern, name)(x, **case) for case in cases])(x)
    for y, case in zip(found, cases, strict=True):
        want = loop(name, x, wanted, **case)
        assert y.dtype == wanted and y.shape == want.shape
        if not jnp.issubdtype(wanted, jnp.floating):
            assert np.array_equal(y, want)
        else:  # one rounding, and the rounding errors of a sum of a few numbers in float32
            near = float(jnp.finfo(wanted).eps) * (0.5 if dtype.endswith("16") else 4) + 2e-6 * (dtype != "float64")
            np.testing.assert_allclose(np.asarray(y, np.float64), want, near, near)


def theirs(name, x, segment_ids=None, reverse=False, exclusive=False):
    """The counterpart along axis 1, segment by segment."""
    runs = np.split(
        np.arange(x.shape[1]), 1 + np.flatnonzero(np.diff(np.zeros(7) if segment_ids is None else segment_ids))
    )
    parts = []
    for run in runs:
        y = getattr(lax, name)(x[:, run], axis=1, reverse=reverse)
        if exclusive:
            first = jnp.full_like(y[:, :1], OPERATIONS[name][1])
            y = jnp.concatenate([y[:, 1:], first] if reverse else [first, y[:, :-1]], 1)
        parts.append(y)
    return jnp.concatenate(parts, 1)


def finite_sum(y, t):
    return jnp.sum(jnp.where(jnp.isfinite(y), y, 0) * t)


# f: the operation; x, t: arrays of one shape.
TRANSFORMATIONS = {
    "jvp": lambda f, x, t: jax.jvp(f, (x,), (t,)),
    "grad": lambda f, x, t: jax.grad(lambda x: finite_sum(f(x), t))(x),
    "second": lambda f, x, t: jax.grad(lambda x: jnp.sum(jax.grad(lambda x: finite_sum(f(x), t * x))(x) * t))(x),
    "vmap of grad": lambda f, x, t: jax.vmap(jax.grad(lambda x: finite_sum(f(x), t)))(jnp.stack([x, t])),
}


@every_operation
def test_transformations(name, x64):
    """The tests run in float64; products have zeros among their factors, and maxima two equal elements."""
    x, t = (jnp.asarray(numbers("float64", (2, 7), seed)) for seed in range(2))
    x = x.at[0, 2].set(0) if name == "cumprod" else x.at[:, 4].set(x[:, 3])

    def run(f, x, t):
        own = functools.partial(f, segment_ids=IDS, reverse=True, exclusive=True)
        found = {k: transformed(own, x, t) for k, transformed in TRANSFORMATIONS.items()}
        return found | {"plain": TRANSFORMATIONS["grad"](f, x, t)}

    fs = [lambda x, **case: getattr(jaxkern, name)(x, 1, **case), functools.partial(theirs, name)]
    ours, wanted = (jax.jit(functools.partial(run, f))(x, t) for f in fs)
    for k in wanted:
        for y, want in zip(jax.tree.leaves(ours[k]), jax.tree.leaves(wanted[k]), strict=True):
            np.testing.assert_allclose(y, want, 1e-9, 1e-9, err_msg=k)


@every_operation
def test_gradients_are_kernels(name):
    """Cumulative operations of segments, too, need no XLA loop."""
    f = functools.partial(getattr(jaxkern, name), axis=1, segment_ids=IDS)
    step = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(f(x)))))
    text = step.trace(jnp.ones(SHAPE)).lower(lowering_platforms=("cuda",)).as_text()
    assert launch.programs(text) and "stablehlo.while" not in text


@every_operation
def test_nan_infinity_and_nothing(name):
    f = getattr(jaxkern, name)
    assert np.isnan(f(jnp.array([1.0, np.nan, 2.0, 3.0]), 0)).tolist() == [False, True, True, True]
    assert np.isinf(f(jnp.array([1.0, np.inf, 2.0]), 0)).tolist() == [False, name != "cummin", name != "cummin"]
    for shape in [(0,), (3, 0), (0, 3)]:
        y, pull = jax.vjp(lambda x: f(x, 0, exclusive=True), jnp.ones(shape))
        assert y.shape == shape and pull(y)[0].shape == shape
    one = f(jnp.float32(3), axis=None, reverse=True)
    assert one.tolist() == [3.0]


def test_gradients_of_infinite_logsumexps_are_finite():
    """JAX has NaN for elements before the first finite one."""
    x = jnp.array([-jnp.inf, -jnp.inf, 0.0, 0.0, jnp.inf])
    rows = jax.jacobian(lambda x: jaxkern.cumlogsumexp(x))(x)
    np.testing.assert_allclose(
        rows, [[1, 0, 0, 0, 0], [0] * 5, [0, 0, 1, 0, 0], [0, 0, 0.5, 0.5, 0], [0, 0, 0, 0, 1]], atol=1e-6
    )


@pytest.mark.parametrize("dtype, to", [("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_16_bit_numbers_are_rounded_once(dtype, to):
    """A sum of ones in bfloat16 would stop at 256."""
    y = jaxkern.cumsum(jnp.ones((600, 2), dtype), 0, to)
    assert y.dtype == to and np.array_equal(y[:, 0], jnp.arange(1, 601, dtype=jnp.float32).astype(to))


@pytest.mark.parametrize(
    "x, to", [("float32", "int32"), ("int8", "float16"), ("int8", "int32"), ("bool", "uint8"), ("int8", "float32")]
)
def test_dtype(x, to):
    x = numbers(x, (9,))
    x = x * 3 if x.dtype == np.float32 else x
    ours, counterpart = jaxkern.cumsum(x, dtype=to), jnp.cumsum(x, dtype=to)
    assert ours.dtype == counterpart.dtype and np.array_equal(ours, counterpart)
    assert jaxkern.cummax(x.astype(np.float32), dtype=to).dtype == to


def test_float8_and_int4():
    x = numbers("float32", (9,))
    assert np.array_equal(jaxkern.cummax(jnp.asarray(x, "float8_e4m3fn")), lax.cummax(jnp.asarray(x, "float8_e4m3fn")))
    assert float(jaxkern.cummax(jnp.asarray(x, "float8_e4m3fn"), exclusive=True)[0]) == -448
    eighths = jnp.asarray([1, 0.5, 2], "float8_e4m3fn")
    average = jaxkern.exponential_moving_average(eighths, jnp.asarray(0.5, eighths.dtype), initial=0)
    assert average.dtype == eighths.dtype and average.tolist() == [0.5, 0.5, 1.25]
    h = jaxkern.linear_recurrence(jnp.asarray(0.5, eighths.dtype), eighths)
    assert h.dtype == eighths.dtype and h.tolist() == [1, 1, 2.5]
    small = jnp.asarray([3, 3, 3], "int4")
    assert jaxkern.linear_recurrence(jnp.asarray(1, "int4"), small).tolist() == [3, 6, -7]
    assert jaxkern.cumsum(small).dtype == small.dtype and jaxkern.cumsum(small).tolist() == [3, 6, -7]


def test_wrong_segments():
    with pytest.raises(
        ValueError, match=r"cumsum: segment_ids must have the shape \(3, 7, 2\) of x or \(7,\) of its axis, got \(3,\)"
    ):
        jaxkern.cumsum(jnp.ones(SHAPE), 1, segment_ids=np.arange(3))
    with pytest.raises(
        ValueError, match=r"\(3, 7, 2\) of x or \(42,\) .* all of x, flattened, where axis is None, got \(7,\)"
    ):
        jaxkern.cumsum(jnp.ones(SHAPE), segment_ids=np.arange(7))


# ---- associative_scan


def affine(f, g):
    """x -> a x + b, f before g."""
    return {"a": f["a"] * g["a"], "b": f["b"] * g["a"] + g["b"]}


FEATURES = jnp.array([1.0, 0.0, 1.0])
SCANS = {
    "affine": (affine, {"a": (5, 3), "b": (5, 3)}),
    "vmapped": (jax.vmap(affine), {"a": (5, 3), "b": (5, 3)}),
    "broadcast": (affine, {"a": (5, 1), "b": (5, 3)}),
    "lanes": (lambda a, b: a * (1 - jnp.arange(3) % 2) + b, (5, 3)),
    "captured": (lambda a, b: jnp.maximum(a, b) * FEATURES, (5, 3)),
    "rule": (jax.vmap(lambda a, b: jnp.logaddexp(a, b)), (5, 3)),
}


@pytest.mark.filterwarnings("ignore:.*derivative of its own. XLA runs it")
@pytest.mark.parametrize("name", SCANS)
def test_associative_scan(name):
    fn, shapes = SCANS[name]
    reverse = name in ("affine", "vmapped", "captured")
    elems = jax.tree.map(lambda s: jnp.asarray(numbers("float32", s)), shapes, is_leaf=lambda s: isinstance(s, tuple))

    def both(scan):
        f = lambda elems: scan(fn, elems, reverse, 0)
        loss = lambda elems: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(elems)))
        return jax.jit(lambda elems: (f(elems), jax.grad(loss)(elems)))(elems)

    compare = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(compare, both(jaxkern.associative_scan), both(lax.associative_scan))


def complex_affine(f, g):
    return f[0] * g[0], f[1] * g[0] + g[1]


@pytest.mark.parametrize(
    "fn",
    [complex_affine, jax.vmap(complex_affine), lambda f, g: (f[0] * g[0], g[0] * f[1] + FEATURES * g[1])],
    ids=["scalars", "vmapped", "captured"],
)
@pytest.mark.parametrize("coefficients", ["complex", "real"])
def test_associative_scan_of_complex_numbers(fn, coefficients):
    a, x = (numbers("float32", s) + 1j * numbers("float32", s)[::-1] for s in ((6, 3), (6, 3)))
    elems = jnp.asarray(a if coefficients == "complex" else a.real), jnp.asarray(x)

    def both(scan):
        f = lambda elems: scan(fn, elems, coefficients == "real", 0)
        loss = lambda elems: sum(jnp.sum(jnp.abs(y) ** 2) for y in f(elems))
        return jax.jit(lambda elems: (f(elems), jax.grad(loss)(elems)))(elems)

    ours, theirs = both(jaxkern.associative_scan), both(lax.associative_scan)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), ours, theirs)
    assert [y.dtype for y in jax.tree.leaves(ours)] == [y.dtype for y in jax.tree.leaves(theirs)]
    assert "jaxkern_associative_scan" in str(jax.make_jaxpr(functools.partial(jaxkern.associative_scan, fn))(elems))


ONES = jnp.ones((4, 3, 3))


@pytest.mark.parametrize(
    "fn, elems, error, words",
    [
        (
            lambda a, b: a @ b,
            ONES,
            TypeError,
            r"fn uses dot_general at .*test_cumulative.py.*, which is not elementwise",
        ),
        (
            lambda a, b: a + jnp.sum(b, -1, keepdims=True),
            ONES,
            TypeError,
            r"fn (uses .*test_cumulative.py.* a sum over|combines elements of different) lanes",
        ),
        (lambda a, b: a + jnp.cumsum(b, 1), ONES, TypeError, r"fn uses cumsum at .*test_cumulative.py"),
        (
            lambda a, b: a + jnp.sum(b, 0),
            ONES[:, 0, 0],
            TypeError,
            r"fn (uses .*test_cumulative.py.* a sum over|combines elements of different) lanes",
        ),
        (lambda a, b: (a, b), ONES, TypeError, "fn must return the structure of elems"),
        (lambda a, b: a > b, ONES, TypeError, r"fn must return arrays of the types of elems, got bool\[2, 3, 3\] for"),
        (lambda a, b: a, (ONES, ONES[:2]), ValueError, "elems must have one rank and one size along axis 0"),
        (lambda a, b: a, (), TypeError, "elems must have at least one array"),
        (lambda a, b: jnp.tanh(a + 1j * b), ONES * 1j, TypeError, "fn uses tanh at .*test_cumulative.py"),
    ],
)
def test_what_no_associative_scan_does(fn, elems, error, words):
    with pytest.raises(error, match=f"^jaxkern.associative_scan: ({words})") as found:
        jaxkern.associative_scan(fn, elems)
    notes = "".join(getattr(found.value, "__notes__", ()))
    assert ("use jax.lax.associative_scan" in notes) == isinstance(found.value, jaxkern.Unsupported)


# ---- recurrences by name


def ewm(x, decay, adjust):
    """The sums of pandas' documentation."""
    ys = []
    for t in range(len(x)):
        weights = decay ** np.arange(t, -1, -1.0)
        weights[1:] *= 1 if adjust else 1 - decay
        ys.append(np.tensordot(weights, x[: t + 1], 1) / (weights.sum() if adjust else 1))
    return np.stack(ys)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_exponential_moving_average(dtype):
    x = numbers(dtype, (9, 4))
    f = jaxkern.exponential_moving_average
    wide, near = x.astype(np.float64), 8e-3 if dtype == "bfloat16" else 2e-6
    close = functools.partial(np.testing.assert_allclose, rtol=near, atol=near)
    to = "bfloat16" if dtype == "bfloat16" else "float32"
    for decay in (0.0, 0.9, 1.0):
        y = f(x, decay)
        assert y.dtype == to
        close(np.asarray(y, np.float64), ewm(wide, decay, True))
        close(np.asarray(f(x, decay, initial=x[0]), np.float64), ewm(wide, decay, False))
    many = np.array([0.5, 0.9, 0.99, 0.999], np.float32)
    y = f(x.T, many[:, None], axis=1, reverse=True)
    close(np.asarray(y.T[::-1], np.float64), np.stack([ewm(wide[::-1, k], d, True) for k, d in enumerate(many)], 1))


def test_moving_average_as_in_optax():
    optax = pytest.importorskip("optax")
    x = jnp.asarray(numbers("float32", (6, 3)))
    for debias in (True, False):
        ema = optax.ema(0.9, debias)
        state, ys = ema.init(x[0]), []
        for row in x:
            y, state = ema.update(row, state)
            ys.append(y)
        ours = jaxkern.exponential_moving_average(x, 0.9, initial=None if debias else 0)
        np.testing.assert_allclose(ours, jnp.stack(ys), 1e-5)


def gae(rewards, values, discounts, lambda_, bootstrap, done):
    """A sum of weighted differences for each step, as in the article."""
    values = np.concatenate([values, [bootstrap]])
    delta = rewards + discounts * ~done * values[1:] - values[:-1]
    weights = [np.concatenate([[1], np.cumprod((discounts * lambda_ * ~done)[t:-1])]) for t in range(len(rewards))]
    return np.array([np.sum(w * delta[t:]) for t, w in enumerate(weights)])


def test_returns_and_advantages():
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 4, 6)).astype(np.float32)
    done, bootstrap = rng.random((4, 6)) < 0.3, rng.normal(size=4).astype(np.float32)
    discounts, lambda_ = rng.uniform(0.5, 1, 6).astype(np.float32), np.float32(0.9)
    given = {"bootstrap": bootstrap, "done": done, "axis": 1}
    wanted = [gae(rewards[k], values[k], discounts, lambda_, bootstrap[k], done[k]) for k in range(4)]
    ours = jaxkern.advantages(rewards, values, discounts, lambda_, **given)
    np.testing.assert_allclose(ours, wanted, 1e-5, 1e-5)
    longer = np.concatenate([values, bootstrap[:, None]], 1)
    same = jaxkern.advantages(rewards, longer, discounts * ~done, lambda_, axis=-1)
    np.testing.assert_allclose(same, wanted, 1e-5, 1e-5)
    zeros = np.zeros_like(rewards)  # with lambda = 1 and no critic, advantages are returns
    wanted = [gae(rewards[k], zeros[k], discounts, 1, bootstrap[k], done[k]) for k in range(4)]
    np.testing.assert_allclose(jaxkern.discounted_returns(rewards, discounts, **given), wanted, 1e-5, 1e-5)
    half = jaxkern.discounted_returns(jnp.ones((600, 1), "bfloat16"), 1.0)
    assert half.dtype == jnp.bfloat16 and half[0, 0] == 600


def test_derivatives_of_recurrences(x64):
    """Derivatives by all operands match the derivatives of `lax.scan`."""
    x = jnp.asarray(numbers("float64", (5, 2)))
    by, decay, initial = (
        jnp.asarray(np.random.default_rng(k).uniform(0.2, 0.9, s)) for k, s in enumerate([(2,), (5, 1), ()])
    )

    def plain(step, carry, *operands):
        return lax.scan(step, carry, tuple(jnp.broadcast_to(a, x.shape) for a in operands), reverse=True)[1]

    average = lambda y, xd: (xd[1] * y + (1 - xd[1]) * xd[0],) * 2
    returns = lambda y, xd: (xd[1] * y + xd[0],) * 2

    def gae(carry, rvgl):
        r, v, g, d = rvgl
        a = r + g * carry[1] - v + g * d * carry[0]
        return (a, v), a

    start = lambda i: jnp.broadcast_to(i, (2,))
    ema = functools.partial(jaxkern.exponential_moving_average, reverse=True)
    pairs = [
        (lambda x, b, d, i: ema(x, d, initial=i), lambda x, b, d, i: plain(average, start(i), x, d)),
        (
            lambda x, b, d, i: ema(x, d),
            lambda x, b, d, i: plain(returns, start(0.0), x, d) / plain(returns, start(0.0), 1.0, d),
        ),
        (
            lambda x, b, d, i: jaxkern.discounted_returns(x, d, bootstrap=i),
            lambda x, b, d, i: plain(returns, start(i), x, d),
        ),
        (
            lambda x, b, d, i: jaxkern.advantages(x, b * x, d, 0.9, bootstrap=i),
            lambda x, b, d, i: plain(gae, (start(0.0), start(i)), x, b * x, d, 0.9),
        ),
    ]
    for pair in pairs:
        gradients = [jax.jit(jax.grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a))), range(4))) for f in pair]
        for a, b in zip(*(g(x, by, decay, initial) for g in gradients), strict=True):
            np.testing.assert_allclose(a, b, 1e-9, 1e-9)


def test_number_of_values():
    ones = jnp.ones((3, 4))
    with pytest.raises(ValueError, match="values must have one step more than rewards .* or bootstrap must be given"):
        jaxkern.advantages(ones, ones, 0.9, 0.9)
    with pytest.raises(
        ValueError, match=r"jaxkern.discounted_returns: bootstrap of shape \(3,\) does not broadcast to \(4,\)"
    ):
        jaxkern.discounted_returns(ones, 0.9, bootstrap=jnp.ones(3))


SYMBOLIC = {
    "cumsum": lambda x: jaxkern.cumsum(x, 0, reverse=True, exclusive=True),
    "cumlogsumexp": lambda x: jaxkern.cumlogsumexp(x, 0, exclusive=True),
    "segments": lambda x: jaxkern.cummax(x, 0, segment_ids=jnp.arange(x.shape[0]) // 2),
    "exponential_moving_average": lambda x: jaxkern.exponential_moving_average(x, 0.5),
    "quantize_rows": lambda x: jaxkern.quantize_rows(x, jnp.int8),
    "gradient": jax.grad(lambda x: jnp.sum(jnp.sin(jaxkern.cumprod(x, 0)))),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_a_symbolic_number_of_steps(name):
    f = jax.jit(SYMBOLIC[name])
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("steps, 2"), jnp.float32)
    exported = jax.export.export(f, platforms=["cpu", "cuda"], disabled_checks=jaxkern.export_checks())(shape)
    x = numbers("float32", (7, 2))
    for found, wanted in zip(jax.tree.leaves(exported.call(x)), jax.tree.leaves(f(x)), strict=True):
        np.testing.assert_allclose(found, wanted, 2e-6, 2e-6)
