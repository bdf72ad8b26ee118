"""group_norm and batch_norm of arrays spread over several devices; see test_sharding.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding import TOLERANCE, check, every_mesh, mesh, put, same, several, split_by

import jaxkern

SHAPE = (8, 4, 32, 16)
NAMES = ("group_norm", "batch_norm")


def arrays():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(0.3, 1, s), jnp.float32) for s in (SHAPE, SHAPE, (16,), (16,))]


def norm(name, x, scale, bias):
    return jaxkern.group_norm(x, 8, scale, bias) if name == "group_norm" else jaxkern.batch_norm(x, scale, bias)[0]


def step(name):
    """Values and all gradients."""

    def f(x, g, scale, bias):
        y, pull = jax.vjp(lambda *a: norm(name, *a), x, scale, bias)
        return y, pull(g)

    return f


def close(found, wanted):
    """Errors are relative to the largest element: in gradients of scale and bias, sums of a thousand numbers, much cancels."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * np.abs(b).max())


@several
@every_mesh
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", [P("r"), P("r", "c"), P(("r", "c")), P(None, "r"), P("r", None, None, "c")])
def test_splits(shape_of_mesh, name, spec):
    """A split sample sends its statistics once each way; split channels and examples send the sums of scale and bias."""
    m = mesh(shape=shape_of_mesh)
    args = put(m, arrays(), (spec,) * 2 + (P(),) * 2)
    outputs = NamedSharding(m, spec), (NamedSharding(m, spec), *(NamedSharding(m, P()),) * 2)
    f = jax.jit(step(name), out_shardings=outputs).lower(*args).compile()
    close(f(*args), jax.jit(step(name))(*arrays()))
    cut = split_by(m, spec[:3] if name == "batch_norm" else spec[1:3], ("r", "c"))
    channels = split_by(m, spec[3:], ("r", "c"))
    # Statistics; the sums of a sample, then of dscale and dbias over samples; two parameters that have the split of x.
    sent = {"all-reduce": 2 * cut + 2, "all-gather": cut + 2 * channels}
    check(f.as_text(), sent, most=2 * 8 * 8 * 8)


@several
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", [P("r"), P("r", None, None, "c"), P(None, "c")])
def test_explicit_axes(name, spec):
    m = mesh("Explicit")
    with jax.sharding.use_mesh(m) if hasattr(jax.sharding, "use_mesh") else jax.set_mesh(m):
        found = jax.jit(step(name))(*put(m, arrays(), (spec,) * 2 + (P(),) * 2))
    close(found, jax.jit(step(name))(*arrays()))


@several
@pytest.mark.parametrize("name", NAMES)
def test_statistics_and_second_order(name):
    """The statistics of the whole batch, and derivatives of gradients."""
    m = mesh(names=("r",))
    x, g, scale, bias = arrays()

    def f(x, scale):
        y = jaxkern.batch_norm(x, scale, bias) if name == "batch_norm" else [jaxkern.group_norm(x, 8, scale, bias)]
        return sum(jnp.sin((k + 1) * a).sum() for k, a in enumerate(y))

    for spec in (P("r"), P(None, "r")):
        for h in (f, lambda x, s: jax.jvp(jax.grad(f, (0, 1)), (x, s), (g, bias))[1]):
            whole = NamedSharding(m, spec if x.shape[spec.index("r")] % m.shape["r"] == 0 else P())
            of = lambda x, s, h=h, whole=whole: h(jax.lax.with_sharding_constraint(x, whole), s)
            same(jax.jit(of)(x, scale), jax.jit(h)(x, scale), 1e-4)


@several
@pytest.mark.parametrize("name", NAMES)
def test_shard_map_with_replicated_scale(name):
    """Statistics are of a device's part; the gradient of what all devices share is summed over them."""
    m = mesh(names=("r",))
    x, g, scale, bias = arrays()
    mapped = jax.shard_map(lambda *a: norm(name, *a), mesh=m, in_specs=(P("r"), P(), P()), out_specs=P("r"))
    parts = lambda x, *a: jnp.concatenate([norm(name, part, *a) for part in jnp.split(x, m.size)])
    found, wanted = (
        jax.jit(jax.grad(lambda *a, h=h: (h(*a) * g).sum(), (0, 1, 2)))(x, scale, bias) for h in (mapped, parts)
    )
    close(found, wanted)


@several
def test_examples_that_do_not_divide():
    m = mesh(names=("r",))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(13, 5, 6)), jnp.float32)
    split = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(m, P("r")))
    for f in (
        lambda x, s: jnp.sin(jaxkern.batch_norm(x, s, s)[0]).sum(),
        lambda x, s: jnp.sin(jaxkern.group_norm(x, 3, s, s)).sum(),
    ):
        g = lambda x, s, f=f: f(split(x), s)
        found, wanted = (jax.jit(jax.value_and_grad(h, (0, 1)))(x, jnp.ones(6)) for h in (g, f))
        close(found, wanted)
