"""Rows of plain JAX programs under `accelerate(only="rows")` on several devices; see test_sharding.py."""

import jax
import jax.numpy as jnp
import numpy as np
from accelerated import PLATFORM, close
from jax.sharding import PartitionSpec as P
from sharding import mesh, put, several

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
