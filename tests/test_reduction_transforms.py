"""The reductions under transformations that test_matrix.py leaves open, in float64, so that a wrong rule cannot hide behind rounding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ON_GPU
from jax import export
from jax.experimental import jet
from reductions import JAX, OURS, SELECTING, call, every_operation

import jaxkern
from jaxkern._core import registry

SHAPE, AXIS = (3, 4, 5), 1
MASKS = {"whole": None, "full": SHAPE, "broadcast": (3, 1, 5), "row": (4, 1)}


def functions(operation, mask, axis=AXIS):
    """The operation and what JAX derives everything of itself, as functions of x alone; no row is empty."""

    def plain(x):
        if operation in SELECTING:
            edge = -1e30 if operation == "reduce_max" else 1e30
            return JAX[operation](x if mask is None else jnp.where(mask, x, edge), axis=axis)
        return JAX[operation](x, axis=axis, where=mask)

    return lambda x: call(operation, x, axis, mask), plain


def inputs(shape=SHAPE, ties=True):
    rng = np.random.default_rng(0)
    x = rng.normal(0, 2, shape)
    if ties:
        x[0, :, :2] = np.round(x[0, :, :2])
        x[1, :, 1] = 0.5
    return jnp.asarray(x), jnp.asarray(rng.normal(size=shape))


def mask_of(shape):
    if shape is None:
        return None
    mask = np.random.default_rng(5).random(shape) < 0.6
    mask[(slice(None), 0) if len(shape) == 3 else 0] = True
    return jnp.asarray(mask)


def loss(f):
    return lambda x: jnp.sum(jnp.sin(f(x)) * jnp.cos(jnp.arange(f(x).size)).reshape(f(x).shape))


def assert_same(ours, theirs):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-11), ours, theirs)


@every_operation
@pytest.mark.parametrize("axis", [0, (0, 2), None])
def test_derivatives_on_every_axis(operation, axis, x64):
    x, _ = inputs()
    assert_same(*(jax.jit(jax.hessian(loss(h)))(x) for h in functions(operation, None, axis)))


@every_operation
@pytest.mark.parametrize("at, out", [(0, 0), (1, 2), (3, -1)])
def test_vmap_in_and_out_axes(operation, at, out, x64):
    x, _ = inputs((3, 4, 5, 6), ties=False)
    assert_same(*(jax.vmap(h, at, out)(x) for h in functions(operation, None)))


@pytest.mark.parametrize("operation", ["reduce_mean", "reduce_max", "logsumexp"])  # the others share their rules
@pytest.mark.parametrize(
    "x_at, mask_at, axis, mask_shape",
    [
        (0, 0, 1, (3, 1, 5)),
        (2, 1, 0, (3, 4, 5)),
        (1, 3, 2, (1, 4, 1)),
        (None, 0, 1, (3, 4, 5)),
        (None, 2, 0, (3, 1, 5)),
        (3, None, 2, (3, 4, 5)),
        (1, None, 1, (3, 1, 5)),
    ],
)
def test_vmap_of_array_and_mask(operation, x_at, mask_at, axis, mask_shape, x64):
    """Against a loop, gradients too: the batch may lie anywhere in either operand, or in one of them."""
    rng, size = np.random.default_rng(0), 2
    stack = lambda shape, at, draw: jnp.asarray(draw(shape if at is None else (*shape[:at], size, *shape[at:])))
    x = stack((3, 4, 5), x_at, lambda s: rng.normal(size=s))
    mask = stack(mask_shape, mask_at, lambda s: rng.random(s) < 0.7)

    def both(x, mask):
        y, pull = jax.vjp(lambda x: call(operation, x, axis, mask), x)
        return y, pull(jnp.cos(jnp.arange(y.size * 1.0)).reshape(y.shape))[0]

    batched, single = jax.jit(jax.vmap(both, (x_at, mask_at)))(x, mask), jax.jit(both)
    take = lambda a, at, k: a if at is None else jnp.take(a, k, at)
    for k in range(size):
        assert_same(tuple(b[k] for b in batched), single(take(x, x_at, k), take(mask, mask_at, k)))


@every_operation
def test_jaxpr_is_one_primitive(operation):
    for axis in (-1, 0, (1, 2)):
        jaxpr = str(jax.make_jaxpr(lambda x: OURS[operation](x, axis))(jnp.ones((2, 3, 4))))
        assert jaxpr.count(f"jaxkern_{operation}") == 1 and "transpose" not in jaxpr


@every_operation
@pytest.mark.parametrize(
    "shape, axis, mask_shape", [((64, 256), -1, None), ((8, 64, 32), 1, None), ((4, 8, 16, 64), -1, (4, 1, 16, 64))]
)
def test_one_kernel_and_nothing_moved(operation, shape, axis, mask_shape):
    if not (ON_GPU and registry.kernels.module):
        pytest.skip("kernels run on a GPU")
    mask = None if mask_shape is None else jnp.ones(mask_shape, bool)
    x = jnp.ones(shape, "bfloat16")
    text = (
        jax.jit(jax.value_and_grad(lambda x: call(operation, x, axis, mask).astype(jnp.float32).sum()))
        .lower(x)
        .compile()
        .as_text()
    )
    kernel = "logsumexp_statistics" if operation == "logsumexp" else operation
    assert text.count(f'custom_call_target="jaxkern_{kernel}"') == 1 and " transpose(" not in text


@every_operation
def test_export(operation):
    """One program for several platforms and every number of rows."""
    f = jax.jit(lambda x: jax.value_and_grad(lambda x: call(operation, x, -1, jnp.arange(7) < 5).sum())(x))
    shape = jax.ShapeDtypeStruct(export.symbolic_shape("rows, 7"), jnp.float32)
    exported = export.export(f, platforms=["cpu", "cuda", "tpu"], disabled_checks=jaxkern.export_checks())(shape)
    for n in (1, 9):
        x = jax.random.normal(jax.random.key(n), (n, 7))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), exported.call(x), f(x))


@every_operation
def test_taylor_series(operation, x64):
    x, t = inputs(ties=False)
    f, g = functions(operation, None)
    y, terms = jet.jet(f, (x,), ([t, jnp.zeros_like(t)],))
    curve = lambda e: g(x + e * t)
    first = lambda e: jax.jvp(curve, (e,), (1.0,))[1]
    assert_same([y, *terms], [curve(0.0), first(0.0), jax.jvp(first, (0.0,), (1.0,))[1]])
