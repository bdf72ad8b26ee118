"""Scans by an associative operation: values and derivatives against `jax.lax.associative_scan`, transformations, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

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


@pytest.mark.parametrize("reverse, exclusive", [(False, False), (True, False), (True, True)])
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
    close(jax.grad(loss(f))(x), jax.grad(loss(wanted))(x))


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
    f = lambda combine: lambda x, c: combine(lambda a, b: [jnp.maximum(a[0], b[0] * c)], [x])
    xs = operands(1, (6,))[0], 1.0
    scans = [lambda g, x: associative_scan(g, x, axis=0), lax.associative_scan]
    close(*(jax.jit(jax.grad(lambda x, c: f(s)(x, c)[0].sum(), (0, 1)))(*xs) for s in scans))


def test_errors_name_the_function():
    x = jnp.ones(3)

    def mixed(a, b):
        return [(a[0] + b[0]).astype(jnp.int32)]

    with pytest.raises(TypeError, match=r"jaxkern.cumsum: mixed takes states of float32 .* not int32"):
        associative_scan(mixed, [x], axis=0, label="cumsum")
    with pytest.raises(ValueError, match="shapes"):
        associative_scan(OPERATIONS["affine"][0], [x, jnp.ones(4)], axis=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_derivatives_of_sums_are_sums(dtype):
    f = ours("sum", 0, exclusive=True)
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda x: f(x)[0].sum()))(jnp.ones((3, 2), dtype)))
    assert jaxpr.count("jaxkern_associative_scan[") == 2 and " scan[" not in jaxpr
