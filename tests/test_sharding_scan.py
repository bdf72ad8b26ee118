"""Scans of arrays that are spread over several devices; see test_sharding.py.

If lanes are split, devices only send sums over lanes. If steps are split, they gather a map for each lane if the body is affine.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from scan_functions import FUNCTIONS
from sharding import mesh, messages, put, same, several

import jaxkern

pytestmark = pytest.mark.usefixtures("highest_precision")

SHAPE, LENGTH = (4, 8), 16


def close(found, wanted):
    real = lambda y: np.asarray(y) if not jnp.issubdtype(y.dtype, jax.dtypes.prng_key) else jax.random.key_data(y)
    same(jax.tree.map(real, found), jax.tree.map(real, wanted), 2e-5)


def gradient(f, operands):
    """f with its gradients by all real operands."""
    at = [k for k, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def run(*xs):
        loss = lambda *ws: _sum(f(*(dict(zip(at, ws)).get(k, x) for k, x in enumerate(xs))))
        return f(*xs), jax.grad(loss, tuple(range(len(at))))(*(xs[k] for k in at))

    return run


def _sum(ys):
    real = [y for y in jax.tree.leaves(ys) if jnp.issubdtype(y.dtype, jnp.inexact)]
    return sum(jnp.sum(jnp.sin(jnp.real(y) + jnp.imag(y))) for y in real)


def spec_of(x, steps, lanes):
    if x.shape[-1:] == (41,):  # which devices cannot split
        lanes = (lanes[0], None)
    if x.shape[:1] == (LENGTH,) and x.ndim in (1, 3):
        return P(steps, *lanes[: x.ndim - 1])
    return P(*lanes) if x.ndim == 2 else P()


@several
@pytest.mark.parametrize("steps, lanes", [(None, ("r", "c")), ("r", (None, "c")), (("r", "c"), (None, None))], ids=str)
@pytest.mark.parametrize("name", ["advantages", "gated", "heston", "oscillators", "counters", "spreading", "pieces"])
def test_split_scans(name, steps, lanes):
    """Results, and gradients with sums over lanes for constants."""
    make, differentiable = FUNCTIONS[name]
    run, operands = make(SHAPE, LENGTH, "float32")
    operands = list(map(jnp.asarray, operands))
    grid, f = mesh(), functools.partial(run, jaxkern.scan)
    f = gradient(f, operands) if differentiable else f
    split = put(grid, operands, [spec_of(x, steps, lanes) for x in operands])
    compiled = jax.jit(f).lower(*split).compile()
    close(compiled(*split), jax.jit(f)(*operands))


@several
@pytest.mark.parametrize("name, affine", [("recurrence", True), ("advantages", True), ("neurons", False)])
def test_what_split_steps_send(name, affine):
    """A map for each lane and device, and the last carry. If the body is not affine, devices exchange steps for lanes."""
    run, operands = FUNCTIONS[name][0](SHAPE, 1024, "float32")
    grid = mesh(shape=(len(jax.devices()[:8]),), names=("r",))
    split = put(grid, operands, [P("r") if x.shape[:1] == (1024,) else P() for x in operands])
    text = jax.jit(functools.partial(run, jaxkern.scan)).lower(*split).compile().as_text()
    sent = messages(text)
    most = 8 * 4 * 32 if affine else 1024 * 32 // grid.size
    assert sent and max(n for sizes in sent.values() for n in sizes) <= most
    assert ("all-to-all" in sent) != affine


@several
def test_split_lanes_send_nothing():
    run, operands = FUNCTIONS["gated"][0](SHAPE, LENGTH, "float32")
    grid = mesh()
    split = put(grid, operands, [spec_of(x, None, ("r", "c")) for x in operands])
    f = functools.partial(run, jaxkern.scan)
    assert not messages(jax.jit(f).lower(*split).compile().as_text())
    # The gradients of weights are sums over lanes.
    sent = messages(jax.jit(gradient(f, operands)).lower(*split).compile().as_text())
    assert set(sent) <= {"all-reduce"} and max(sent["all-reduce"]) <= 64


@several
def test_keys_and_chunks_of_split_lanes():
    """A key in the carry is taken apart, and put together again in the shape that a device has; so are chunks of one step."""

    def f(x):
        def walk(carry, x):
            key, total = carry
            key, sub = jax.random.split(key)
            return (key, 0.5 * total + x + jax.random.normal(sub, x.shape)), total

        def loss(x):
            (_, last), ys = jaxkern.scan(walk, (jax.random.key(0), jnp.zeros(x.shape[1:])), x, checkpoint_every=4)
            return jnp.sum(jnp.sin(last)) + jnp.sum(jnp.sin(ys))

        return jax.value_and_grad(loss)(x)

    x = jnp.sin(jnp.arange(16.0 * 32).reshape(16, 4, 8))
    (split,) = put(mesh(), [x], [P(None, "r", "c")])
    close(jax.jit(f)(split), jax.jit(f)(x))


@several
def test_split_dimensions_that_only_results_have():
    """A device makes its own part of them; and loops that differ in their number of steps alone have their own callbacks."""

    def f(x, length=3):
        wide = lambda c: (c[:, None] + jnp.arange(8.0), jnp.broadcast_to(c[:, None], (4, 8)))
        return jaxkern.scan(lambda c, _: (0.5 * c + 1, wide(c)), x, None, length)

    x = jnp.arange(4.0)
    (split,) = put(mesh(), [x], [P("r")])
    out = (P("r"), (P(None, "r", "c"), P(None, "r", "c")))
    out = jax.tree.map(lambda spec: NamedSharding(mesh(), spec), out, is_leaf=lambda spec: isinstance(spec, P))
    close(jax.jit(f, out_shardings=out)(split), jax.jit(f)(x))
    last = lambda length: jax.jit(lambda x: f(x, length)[0]).lower(split).as_text()
    names = [re.search(r"jaxkern_scan_lanes_\w+", last(length))[0] for length in (3, 4)]
    assert names[0] != names[1]


@several
def test_rows_of_split_lanes():
    """Lanes send nothing but the gradients of what they share; steps and rows that are split are gathered."""

    def f(p, transitions, x):
        def body(p, x):
            p = (p @ transitions) * jnp.exp(x) + 1e-3 * jnp.arange(8.0)[:, None]
            p = p / jnp.sum(p, -1, keepdims=True)
            return p, (p, jnp.argmax(p, -1))

        return jaxkern.scan(body, p, x)

    random = lambda *s: np.random.default_rng(0).uniform(0.5, 1, s).astype(np.float32)
    operands = [random(8, 20), random(20, 20), random(LENGTH, 8, 20)]
    both = gradient(f, operands)
    for specs in ((P("r"), P(), P(None, "r")), (P(("r", "c")), P("c"), P("r", None, "c"))):
        split = put(mesh(), operands, specs)
        close(jax.jit(both)(*split), jax.jit(both)(*map(jnp.asarray, operands)))
    split = put(mesh(), operands, (P("r"), P(), P(None, "r")))
    whole = jax.jit(f).lower(*split)
    assert "jaxkern_scan_lanes" in whole.as_text() and not messages(whole.compile().as_text())
    sent = messages(jax.jit(both).lower(*split).compile().as_text())
    assert set(sent) <= {"all-reduce"} and max(sent["all-reduce"]) <= 400
