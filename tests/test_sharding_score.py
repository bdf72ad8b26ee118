"""softmax of a score function on arrays spread over several devices; see test_sharding.py."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding import check, mesh, numbers_of_rows, same, several

import jaxkern

SHAPE = (8, 4, 16, 32)


def score(s, b, h, q, k, bias, slope, i, j):
    s = jnp.tanh(s) * 2 + bias + slope * (k - q)
    return jnp.where((i == j) & (k <= q + 20 + b), s + 0.1 * h, -jnp.inf)


def arrays():
    rng = np.random.default_rng(0)
    real = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    ids = jnp.sort(jnp.asarray(rng.integers(0, 2, (8, 1, 1, 32)), jnp.int32))
    return real(*SHAPE), real(*SHAPE), real(1, 4, 16, 32), real(1, 4, 1, 1) / 16, ids[..., :16].swapaxes(2, 3), ids


def both(operation):
    def run(x, g, bias, slope, *ids):
        f = lambda x, bias, slope: getattr(jaxkern, operation)(x, score=score, score_args=[bias, slope, *ids])
        y, pull = jax.vjp(f, x, bias, slope)
        return y, pull(g)

    return run


@functools.cache
def on_one_device(operation):
    return jax.jit(both(operation))(*arrays())


def parts(spec, shapes):
    return [P(*(axes if n == m else None for axes, n, m in zip(spec, shape, SHAPE))) for shape in shapes]


@several
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    "spec",
    [("r", "c", None, None), (None, None, ("r", "c"), None), ("r", None, None, "c"), (None, "c", None, "r")],
    ids=str,
)
def test_indices_are_those_in_the_whole_array(kind, spec):
    """Split rows exchange a few numbers. In other cases devices only sum the gradients of operands that broadcast."""
    grid, given = mesh(kind), arrays()
    operation = "log_softmax" if spec[2] else "softmax"
    wanted = on_one_device(operation)
    split = [jax.device_put(a, NamedSharding(grid, s)) for a, s in zip(given, parts(spec, [a.shape for a in given]))]
    with jax.set_mesh(grid):
        compiled = jax.jit(both(operation)).lower(*split).compile()
    same(compiled(*split), wanted, 2e-5)
    assert numbers_of_rows(compiled.as_text(), math.prod(SHAPE[:-1]))
    forward = jax.jit(lambda x, *args: getattr(jaxkern, operation)(x, score=score, score_args=args))
    with jax.set_mesh(grid):
        compiled = forward.lower(split[0], *split[2:]).compile()
    check(compiled.as_text(), {"all-gather": 1} if spec[3] else {}, kernel=False)
    same(compiled(split[0], *split[2:]), wanted[0], 2e-5)


def labels_of_rows():
    return jnp.asarray(np.random.default_rng(1).integers(0, 32, SHAPE[:-1]))


def loss_and_gradients(x, labels, bias, slope, *ids):
    def loss(x, bias, slope):
        y = jaxkern.softmax_cross_entropy(x, labels, score=score, score_args=[bias, slope, *ids], z_loss=0.1)
        return jnp.sum(jnp.where(jnp.isfinite(y), y, 0) ** 2)

    return jax.value_and_grad(loss, (0, 1, 2))(x, bias, slope)


@functools.cache
def loss_on_one_device():
    x, _, *args = arrays()
    return jax.jit(loss_and_gradients)(x, labels_of_rows(), *args)


@several
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    "spec", [("r", "c", None, None), (None, None, ("r", "c"), None), ("r", None, None, "c")], ids=str
)
def test_cross_entropy(kind, spec):
    """The same; the label's score is found where it is."""
    grid, (x, _, *args) = mesh(kind), arrays()
    given = x, labels_of_rows(), *args
    wanted = loss_on_one_device()
    specs = [P(*spec), P(*spec[:-1]), *parts(spec, [a.shape for a in args])]
    split = [jax.device_put(a, NamedSharding(grid, s)) for a, s in zip(given, specs)]
    with jax.set_mesh(grid):
        compiled = jax.jit(loss_and_gradients).lower(*split).compile()
    same(compiled(*split), wanted, 5e-5)
    assert numbers_of_rows(compiled.as_text(), math.prod(SHAPE[:-1]))


@several
def test_parts_that_differ_in_size():
    grid = mesh(names=("r",))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(11, 6)), jnp.float32)
    f = lambda x: jaxkern.softmax(x, score=lambda s, i, j: jnp.where(j <= i, s * i, -jnp.inf))
    spread = jax.jit(lambda x: f(jax.lax.with_sharding_constraint(x * 1, NamedSharding(grid, P("r")))))
    same(spread(x), f(x))


@several
def test_in_shard_map():
    """Indices are those in the part on one device."""
    grid = mesh()
    x, g, bias, *_ = arrays()
    f = lambda t, x, bias: jaxkern.softmax(x, score=lambda s, b, h, q, k, c: s * t + c + 0.2 * q * b, score_args=[bias])
    split = jax.shard_map(
        f, mesh=grid, in_specs=(P(), P(None, "r", None, None), P()), out_specs=P(None, "r", None, None)
    )
    total = lambda f: jax.grad(lambda *a: jnp.sum(g * f(*a)), (0, 1, 2))(jnp.float32(0.5), x, bias[:, :1])

    def plain(t, x, c):
        b, q = (jax.lax.broadcasted_iota(jnp.float32, SHAPE, d) for d in (0, 2))
        return jax.nn.softmax(x * t + c + 0.2 * q * b)

    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), total(split), total(plain))
