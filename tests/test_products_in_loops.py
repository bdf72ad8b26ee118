"""Large products in loops that are the same in every step: `jaxkern.accelerate` computes them once, before the loop."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxkern
from jaxkern._core import decisions, registry

pytestmark = pytest.mark.skipif(not registry.kernels_run(), reason="no kernels")

M, N, D, STEPS = 384, 512, 256, 10
SCALE = 0.05


def transport(x, y, g, steps=STEPS):
    """Sinkhorn's algorithm. The costs are computed in each step."""

    def step(g, _):
        cost = jnp.square(x).sum(1)[:, None] + jnp.square(y).sum(1) - 2 * jnp.einsum("md,nd->mn", x, y)
        f = -jax.nn.logsumexp((g - cost) * SCALE, 1)
        return -jax.nn.logsumexp((f[:, None] - cost) * SCALE, 0), f.sum()

    return lax.scan(step, g, None, length=steps)


def nested(x, y, g):
    return lax.fori_loop(0, 3, lambda _, g: transport(x, y, g)[0] * 0.9, g)


def scanned(body, x, y, g, length=STEPS):
    return lax.scan(lambda g, _: body(x, y, g), g, None, length=length)


def arrays():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((M, D), (N, D), (N,))]


MOVED = {
    "transport": transport,
    "in a loop": nested,
    "under vmap": lambda x, y, g: jax.vmap(transport, (0, None, None))(jnp.stack([x, x + 1]), y, g),
    "in two products": lambda x, y, g: scanned(
        lambda x, y, g: (g + jnp.max(x @ y.T, 0) + jnp.exp(SCALE * ((x + 1) @ y.T)).sum(0), None), x, y, g
    ),
    "a function before sums of rows": lambda x, y, g: scanned(
        lambda x, y, g: (0.5 * g + (jnp.tanh(x @ y.T) * g).sum(1).max(), None), x, y, g
    ),
    "reductions that are results": lambda x, y, g: scanned(
        lambda x, y, g: (g * 0.5 + jnp.max(x @ y.T * g, 0), ((x @ y.T).sum(1), jnp.max(x @ y.T))), x, y, g
    ),
    "a reduction that is a carry": lambda x, y, g: lax.scan(
        lambda c, _: ((jnp.max(x @ y.T, 0), c[0] * c[1]), c[1].sum()), (g, g), None, length=STEPS
    ),
}
LEFT = {
    "what changes in each step": lambda x, y, g: scanned(
        lambda x, y, g: (g + jnp.max((x + g[0]) @ y.T, 0), None), x, y, g
    ),
    "a result": lambda x, y, g: scanned(lambda x, y, g: (g * 0.5, g * (x @ y.T)), x, y, g),
    "what a product reads": lambda x, y, g: scanned(lambda x, y, g: (g + jnp.exp(x @ y.T).T @ x[:, 0], None), x, y, g),
    "a function before sums of columns, which XLA would store": lambda x, y, g: scanned(
        lambda x, y, g: (0.5 * g + (jnp.tanh(x @ y.T) * g).sum(0), None), x, y, g
    ),
    "one step": lambda x, y, g: transport(x, y, g, steps=1),
    "small": lambda x, y, g: transport(x[:64], y, g),
    "of vectors": lambda x, y, g: scanned(
        lambda x, y, g: (g + ((y @ x[0]) * g[0]).max(), None), x, jnp.tile(y, (512, 1)), g
    ),
}


def products(f, *args):
    """How many products the lowered program has outside of loops, in loops, in loops in loops, and so on."""
    module = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    functions = {str(g.attributes["sym_name"]).strip('"'): g for g in module.body.operations}
    found = [0] * 4

    def walk(operation, depth):
        found[depth] += operation.name == "stablehlo.dot_general"
        if operation.name == "func.call":
            walk(functions[str(operation.attributes["callee"]).lstrip("@")].operation, depth)
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    walk(inner.operation, depth + (operation.name == "stablehlo.while"))

    walk(functions["main"].operation, 0)
    return found


@pytest.mark.parametrize("name", MOVED)
def test_computed_once(name):
    args, f = arrays(), MOVED[name]
    *few, inner, last = products(f, *args) if name == "in a loop" else products(f, *args)[:2] + [0]
    assert inner > 0 and last == 0
    with jaxkern.accelerate(), decisions.recorded() as found:
        now = products(f, *args)
    assert now[len(few)] == 0 and now[len(few) - 1] > 0
    assert any(d.taken and "computed before the loop" in d.reason for d in found)


@pytest.mark.parametrize("name", MOVED)
def test_values(name):
    args, f = arrays(), jax.jit(lambda *args: MOVED[name](*args))
    plain = f(*args)
    with jaxkern.accelerate(force=True, only="rows"):
        own = f(*args)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(own), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-4, atol=2e-4 * float(jnp.abs(a).max()))


@pytest.mark.parametrize("name", LEFT)
def test_left(name):
    args, f = arrays(), LEFT[name]
    plain = products(f, *args)
    with jaxkern.accelerate():
        assert products(f, *args) == plain


def test_scopes():
    """The product keeps the scopes around the loop, as profiles show them, and its line."""

    def f(x, y, g):
        with jax.named_scope("loss"):
            return transport(x, y, g)

    with jaxkern.accelerate():
        lowered = jax.jit(f).trace(*arrays()).lower(lowering_platforms=("cuda",))
    names = re.findall(r'"([^"]*dot_general)"', lowered.as_text(debug_info=True))
    assert names and all("/loss/" in name for name in names)


def test_room():
    """A product that is not there when the body needs most stays in it."""
    m, k = 8192, 64
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((m, k), (m, k), (m,))]

    def f(x, y, g):
        def step(g, _):
            h = lax.optimization_barrier((x @ y.T * g).max(0))
            a, b = jnp.fft.fft(jnp.outer(h, h)), h.sum()
            return jnp.abs(a).sum(0) + b, None

        return lax.scan(step, g, None, length=STEPS)

    with jaxkern.accelerate(), decisions.recorded() as found:
        assert products(f, *types)[:2] == [0, 1]
    assert any("more than plain" in d.reason for d in found)


def test_the_loop_stays_with_xla():
    """Kernels for loops were not measured with large arrays that no step makes."""

    def f(x, y, g):
        return scanned(lambda x, y, g: (g + jnp.max(y @ x.T, 1), None), x, y, g)

    with jaxkern.accelerate(), decisions.recorded() as found:
        assert products(f, *arrays())[:2] == [1, 0]
    (scan,) = [d for d in found if d.operation == "scan"]
    assert not scan.taken and "before the loop" in scan.reason
