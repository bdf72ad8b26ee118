"""Scans by an associative operation: values and derivatives against `jax.lax.associative_scan`, transformations, bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxkern
from jaxkern import algorithms
from jaxkern._core import compat, launch, registry
from jaxkern._engines.loops import tuning
from jaxkern._engines.loops.associative import associative_scan

# (combine, number of arrays, the state before the first step)
OPERATIONS = {
    "sum": (lambda a, b: [a[0] + b[0]], 1, [0]),
    "product": (lambda a, b: [a[0] * b[0]], 1, [1]),
    "maximum": (lambda a, b: [jnp.maximum(a[0], b[0])], 1, [-jnp.inf]),
    "affine": (lambda a, b: [b[0] * a[0], b[0] * a[1] + b[1]], 2, [1, 0]),
}


def operands(count, shape, dtype="float32"):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.uniform(0.5, 1.5, shape), dtype) for _ in range(count)]


def ours(name, axis, reverse=False, exclusive=False):
    combine, _, first = OPERATIONS[name]
    return lambda *xs: associative_scan(combine, xs, axis=axis, reverse=reverse, exclusive=first if exclusive else None)


def jax_own(name, axis, reverse=False, exclusive=False):
    combine, _, first = OPERATIONS[name]

    def f(*xs):
        ys = lax.associative_scan(lambda a, b: tuple(combine(a, b)), tuple(xs), axis=axis, reverse=reverse)
        if exclusive:
            pad = [(0, 0)] * xs[0].ndim
            pad[axis] = (0, 1) if reverse else (1, 0)
            at = [slice(None)] * xs[0].ndim
            at[axis] = slice(1, None) if reverse else slice(0, -1)
            ys = [jnp.pad(y, pad, constant_values=c)[tuple(at)] for y, c in zip(ys, first)]
        return list(ys)

    return f


def close(a, b, tolerance=1e-4):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * np.abs(y[np.isfinite(y)]).max(initial=0))


def loss(f):
    return lambda *xs: sum(jnp.sum(jnp.sin(y)) for y in f(*xs))


@pytest.mark.parametrize("reverse, exclusive", [(False, False), (True, True)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_values_and_derivatives(name, reverse, exclusive):
    xs = operands(OPERATIONS[name][1], (2, 5, 3))
    n = range(len(xs))
    fs = [make(name, 1, reverse, exclusive) for make in (ours, jax_own)]
    close(*(jax.jit(f)(*xs) for f in fs))
    close(*(jax.jit(jax.grad(loss(f), n))(*xs) for f in fs))
    if name in ("sum", "affine") and exclusive:
        close(*(jax.jvp(f, xs, [jnp.sin(x) for x in xs]) for f in fs))
        squares = lambda f: lambda *xs: sum(jnp.vdot(d, d) for d in jax.grad(loss(f), n)(*xs))
        close(*(jax.jit(jax.grad(squares(f), n))(*xs) for f in fs))
        close(*(jax.vmap(f, (1, *[None] * (len(xs) - 1)))(xs[0], *(x[:, 0] for x in xs[1:])) for f in fs))


def test_states_that_are_not_what_is_stored():
    """A logsumexp: its states are a maximum and a sum."""
    (x,) = operands(1, (3, 9))

    def combine(a, b):
        largest = jnp.maximum(a[0], b[0])
        return [largest, a[1] * jnp.exp(a[0] - largest) + b[1] * jnp.exp(b[0] - largest)]

    def f(x):
        start = lambda x: [x[0], jnp.ones_like(x[0])]
        return associative_scan(combine, [x], axis=1, element=start, finish=lambda s, _: [s[0] + jnp.log(s[1])])

    wanted = lambda x: [lax.cumlogsumexp(x, 1)]
    close(f(x), wanted(x))
    close(*(jax.jit(jax.grad(loss(g)))(x) for g in (f, wanted)))


@pytest.mark.parametrize("reverse", [False, True])
def test_arrays_that_are_the_same_in_all_steps(reverse):
    """Kernels read them as they are, in the scan and in its gradient, and store nothing that is not used."""
    decay, x = operands(1, (70,))[0] / 2, operands(1, (2, 3000, 70))[0]
    of = lambda f: lambda decay, x: jnp.sum(jnp.sin(f("affine", 1, reverse)(jnp.broadcast_to(decay, x.shape), x)[1]))
    step = jax.jit(jax.grad(of(ours), (0, 1)))
    close(step(decay, x), jax.jit(jax.grad(of(jax_own), (0, 1)))(decay, x))
    if registry.kernels_run():
        text = step.trace(decay, x).lower(lowering_platforms=("cuda",)).as_text()
        forward, *_, backward = (program.splitlines()[1] for program in launch.programs(text))
        assert "(float32[70], float32[2,3000,70]) -> (float32[2,3000,70])" in forward
        assert "float32[3000,2,70]" not in backward and "float32[70]" in backward


def test_types_and_lengths():
    for dtype in ("bfloat16", "int8", "bool"):
        (x,) = operands(1, (2, 40), dtype)
        combine = OPERATIONS["sum"][0] if dtype != "bool" else lambda a, b: [a[0] | b[0]]
        (y,) = associative_scan(combine, [x], axis=-1)
        assert y.dtype == x.dtype
        # Numbers of 16 bits are added up in float32.
        want = np.cumsum(np.asarray(x, np.float32), 1) if dtype != "bool" else np.logical_or.accumulate(x, 1)
        np.testing.assert_array_equal(np.asarray(y), np.asarray(jnp.asarray(want).astype(dtype)))
    for length in (0, 1, 2):
        for exclusive in (False, True):
            xs = operands(2, (length, 3))
            close(*(make("affine", 0, exclusive=exclusive)(*xs) for make in (ours, jax_own)))


def test_functions_may_close_over_traced_scalars():
    f = lambda combine: lambda x, c: combine(lambda a, b: [a[0] + b[0] + c], [x])
    xs = operands(1, (6,))[0], 1.0
    scans = [lambda g, x: associative_scan(g, x, axis=0), lax.associative_scan]
    close(*(jax.jit(jax.grad(lambda x, c: f(s)(x, c)[0].sum(), (0, 1)))(*xs) for s in scans))


def test_arrays_that_a_function_closes_over_are_operands():
    """Of one number, of lanes, and places of lanes: one scan, and one loop for the gradient."""
    xs = operands(2, (2, 7, 3))
    given = jnp.float32(0.7), operands(1, (3,))[0], operands(1, (2, 1, 1))[0]

    def sums(scan, a, b, c, d, e):
        product = lambda p, q: (p[0] * q[0] * c, jnp.maximum(p[1], q[1]))
        lanes = lambda p, q: (p[0] * q[0] * c * d, jnp.maximum(p[1], q[1]) + 0 * e * jnp.arange(3))
        return [jnp.sum(jnp.sin(y)) for f in (product, lanes) for y in scan(f, (a, b), axis=1)]

    fs = [functools.partial(sums, scan) for scan in (jaxkern.associative_scan, lax.associative_scan)]
    gradients = [jax.jit(jax.value_and_grad(lambda *a, f=f: sum(f(*a)), range(5))) for f in fs]
    close(*(g(*xs, *given) for g in gradients))
    assert str(jax.make_jaxpr(fs[0])(*xs, *given)).count("jaxkern_associative_scan[") == 2


def test_errors_name_the_function():
    x = jnp.ones(3)

    def mixed(a, b):
        return [(a[0] + b[0]).astype(jnp.int32)]

    with pytest.raises(TypeError, match=r"jaxkern.cumsum: mixed takes states of float32 .* not int32"):
        associative_scan(mixed, [x], axis=0, label="cumsum")
    with pytest.raises(ValueError, match="shapes"):
        associative_scan(OPERATIONS["affine"][0], [x, jnp.ones(4)], axis=0)
    many = [x] * 11
    with pytest.raises(
        TypeError, match="fn reads and writes 22 arrays, above the limit of 20: use jax.lax.associative_scan"
    ):
        jaxkern.associative_scan(lambda a, b: [x + y for x, y in zip(a, b)], many)
    of_steps = jnp.ones((2, 3))
    with pytest.raises(
        TypeError, match=r"fn closes over an array of float32\[2, 3\], which has no value for each lane"
    ):
        jaxkern.associative_scan(lambda a, b: a + b * of_steps, jnp.ones((5, 3)))
    with pytest.warns(UserWarning, match="fn closes over an array .* derivative of its own. XLA runs it"):
        jaxkern.associative_scan(lambda a, b: jnp.logaddexp(a + x, b), jnp.ones((5, 3)))
    with pytest.raises(TypeError, match="fn has a size of [0-9]+ statements, above the limit of 2000"):
        jaxkern.associative_scan(lambda a, b: functools.reduce(lambda s, _: jnp.sin(s), range(50), a * b), x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_derivatives_of_sums_are_sums(dtype):
    f = ours("sum", 0, exclusive=True)
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda x: f(x)[0].sum()))(jnp.ones((3, 2), dtype)))
    assert jaxpr.count("jaxkern_associative_scan[") == 2 and " scan[" not in jaxpr


ON_THE_GPU = [
    ("warp", (5001, 700), 1),
    ("warp", (50_001, 20), 1),
    ("block", (300, 9000), 1),
    ("tiles", (2, (1 << 22) + 5000), 1),
    ("tiles", ((1 << 22) + 4099,), 0),
    ("tiles by turns", ((1 << 22) + 4099,), 0),
    ("lanes", (40, 100_002), 0),
    ("columns", (3, 5000, 1033), 1),
    ("column_tiles", (20_000, 70), 0),
    ("column_tiles", (2, 50_001, 3), 1),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int32"])
@pytest.mark.parametrize("algorithm, shape, axis", ON_THE_GPU)
def test_kernels(algorithm, shape, axis, dtype, monkeypatch):
    """Results match float64, are no less exact than a loop in float32, and have the same bits in each run."""
    if "turns" in algorithm:  # as for longer rows
        algorithm = "tiles"
        monkeypatch.setattr(tuning, "RING_TURNS", 1)
        monkeypatch.setattr(tuning, "RING_WORDS", 2)
    rng = np.random.default_rng(0)
    with compat.enable_x64(dtype == "float64"):
        x = rng.integers(-9, 9, shape) if dtype == "int32" else rng.standard_normal(shape)
        x = jnp.asarray(x, dtype)
        for reverse in (False, True):
            turned = lambda y: np.flip(y, axis) if reverse else y
            f = lambda x: associative_scan(OPERATIONS["sum"][0], [x], axis=axis, reverse=reverse)[0]
            with algorithms.force(associative_scan=algorithm):
                y, *others = (np.asarray(jax.jit(f)(x)) for _ in range(3))
            for other in others:
                np.testing.assert_array_equal(y.view(np.uint8), other.view(np.uint8))
            exact = turned(np.cumsum(turned(np.asarray(x, np.longdouble)), axis))
            loop = turned(
                np.cumsum(turned(np.asarray(x, y.dtype if dtype in ("float64", "int32") else np.float32)), axis)
            )
            allowed = np.abs(loop - exact).max()
            if dtype == "bfloat16":  # half a unit in the last of 8 bits: the sum is rounded once
                allowed = allowed + np.ldexp(0.5, np.frexp(exact.astype(np.float64))[1] - 8)
            assert (np.abs(y.astype(np.longdouble) - exact) <= allowed).all()

            a, b = (jnp.asarray(rng.uniform(0.5, 0.99, shape), dtype) for _ in range(2)) if dtype != "int32" else (x, x)
            g = lambda a, b: associative_scan(OPERATIONS["affine"][0], [a, b], axis=axis, reverse=reverse)
            with algorithms.force(associative_scan=algorithm):
                ours, again = (jax.jit(g)(a, b) for _ in range(2))
            h = np.zeros(np.delete(shape, axis))
            if dtype == "int32":
                continue
            wide = [np.moveaxis(turned(np.asarray(v, np.float64)), axis, 0) for v in (a, b, ours[1])]
            for k in range(min(shape[axis], 3000)):
                h = wide[0][k] * h + wide[1][k]
                np.testing.assert_allclose(wide[2][k], h, rtol=1e-2 if dtype == "bfloat16" else 1e-5)
            np.testing.assert_array_equal(np.asarray(ours[1]).view(np.uint8), np.asarray(again[1]).view(np.uint8))
