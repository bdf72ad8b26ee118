"""Rows of plain JAX programs under `accelerate(only="rows")` on several devices; see test_sharding.py."""

import jax
import jax.numpy as jnp
import numpy as np
from accelerated import PLATFORM, close
from jax.sharding import PartitionSpec as P
from sharding import mesh, messages, put, several

import jaxkern


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def step(f):
    return jax.jit(jax.value_and_grad(lambda *args: jnp.sum(jnp.cos(f(*args))), (0, 1)))


@several
def test_devices():
    """In a shard_map each device has its own regions; elsewhere XLA spreads the program, and rows are left."""
    grid, rng = mesh(), np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=n), jnp.float32) for n in ((8, 8, 16), (16,))]
    plain, wanted = step(rms_norm), step(rms_norm)(*arrays)
    x, scale = put(grid, arrays, (P("r", "c"), P()))
    with jaxkern.accelerate(only="rows", force=True):
        found = jaxkern.explain(plain, PLATFORM)(x, scale)
        assert len(found) and all("several devices" in d.reason for d in found.left) and not found.taken
        close(wanted, plain(x, scale))
        mapped = step(jax.shard_map(rms_norm, mesh=grid, in_specs=(P("r", "c"), P()), out_specs=P("r", "c")))
        found = jaxkern.explain(mapped, PLATFORM)(x, scale)
        assert len(found) and not found.left
        close(wanted, mapped(x, scale))


@several
def test_what_is_left_sends_what_the_plain_program_sends():
    """Arrays whose rows are split, too; a scan, a conditional and a nested function that names its shardings."""
    grid = mesh()
    own = jax.sharding.NamedSharding(grid, P("r"))
    inner = jax.jit(lambda x: jax.nn.softmax(x, axis=-1), in_shardings=own, out_shardings=own)

    def f(x, scale):
        x = jax.lax.scan(lambda x, _: (rms_norm(x, scale), x.sum()), x, length=2)[0]
        return inner(jax.lax.cond(x[0, 0] > 0, jnp.sin, lambda x: jax.nn.softmax(x, axis=-1), x))

    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=n), jnp.float32) for n in ((8, 16), (16,))]
    x, scale = put(grid, arrays, (P("r", "c"), P("c")))
    plain = jax.jit(f)
    with jaxkern.accelerate(only="rows", force=True):
        left = plain.lower(x, scale).compile()
    wanted = plain.lower(x, scale).compile()
    assert messages(left.as_text()) == messages(wanted.as_text())
    close(wanted(x, scale), left(x, scale), 0)
