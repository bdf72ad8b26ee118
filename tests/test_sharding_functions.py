"""User functions on arrays spread over several devices; see test_sharding.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding import mesh, messages, same, several

import jaxkern
from jaxkern._core import compat

pytestmark = pytest.mark.usefixtures("highest_precision")


def gate(x, y, b):
    return jax.nn.gelu(x * y + b) * jax.nn.relu(x)


def operands():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((8, 6, 32), (8, 6, 32), (32,))]


def both(f):
    def run(*arrays):
        out, pull = jax.vjp(f, *arrays)
        return out, pull(jnp.cos(out))

    return run


@several
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("spec", [P("r", None, None), P("r", None, "c"), P(("r", "c"), None, None), P(None, None, "c")])
def test_stays_where_it_is(kind, spec):
    """The only message is the sum of the bias' gradient."""
    grid, arrays = mesh(kind), operands()
    wanted = jax.jit(both(gate))(*arrays)
    specs = (spec, spec, P(spec[-1]))
    split = [jax.device_put(a, NamedSharding(grid, s)) for a, s in zip(arrays, specs)]
    with jax.set_mesh(grid):
        compiled = jax.jit(both(jaxkern.elementwise_kernel(gate))).lower(*split).compile()
    same(compiled(*split), wanted, 2e-5)
    assert set(messages(compiled.as_text())) <= {"all-reduce"}


@several
def test_captured_scalar_on_explicit_mesh():
    grid = mesh("Explicit")
    x, _, _ = operands()
    split = jax.device_put(x, NamedSharding(grid, P("r", None, "c")))
    f = lambda s, x: jnp.sum(jaxkern.elementwise_kernel(lambda x: jnp.where(x > 0, x * s, jax.nn.silu(x)))(x))
    wanted = jax.grad(f, (0, 1))(2.0, x)
    with jax.set_mesh(grid):
        same(jax.jit(jax.grad(f, (0, 1)))(2.0, split), wanted, 2e-5)


@several
@pytest.mark.parametrize("groups", [8, 4])
def test_attention_with_split_heads_on_explicit_mesh(groups):
    """Lengths leave queries without keys."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(4, 6, heads, 8)), jnp.float32) for heads in (8, groups, groups)]
    lengths = jnp.asarray([5, 0, 6, 1], jnp.int32)
    f = both(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths))
    wanted = jax.jit(f)(*arrays)
    grid = mesh("Explicit")
    split = [jax.device_put(a, NamedSharding(grid, P(None, None, "c"))) for a in arrays]
    with jax.set_mesh(grid), jaxkern.accelerate(only="dot_product_attention", force=True):
        assert all(d.taken for d in jaxkern.explain(f, "cuda")(*split))
        same(jax.jit(f)(*split), wanted, 2e-5)


@several
def test_in_shard_map():
    grid, (x, y, b) = mesh(), operands()
    f = lambda s, x, y, b: jaxkern.elementwise_kernel(lambda x, y, b: gate(x, y, b) * s)(x, y, b)
    split = jax.shard_map(f, mesh=grid, in_specs=(P(), P("r"), P("r"), P()), out_specs=P("r"))
    total = lambda f: jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1, 2, 3))(jnp.float32(0.5), x, y, b)
    plain = lambda s, x, y, b: gate(x, y, b) * s
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), total(split), total(plain))


@several
def test_accelerate_is_entered_on_an_explicit_mesh():
    """Its rules may be registered there first."""
    compat.ragged_dot_primitive.cache_clear()
    with jax.set_mesh(mesh("Explicit")), jaxkern.accelerate():
        assert compat.ragged_dot_primitive() is not None
