"""Cumulative operations and recurrences of arrays spread over several devices; see test_sharding.py. Split lanes send nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding import mesh, messages, same, several

import jaxkern

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 6, 8)), jnp.float32)
IDS = jnp.array([0, 0, 1, 1, 1, 2])
FUNCTIONS = {
    "cumsum": functools.partial(jaxkern.cumsum, axis=1, exclusive=True, reverse=True),
    "cumlogsumexp": functools.partial(jaxkern.cumlogsumexp, axis=1, segment_ids=IDS),
    "average": functools.partial(jaxkern.exponential_moving_average, decay=0.9, axis=1),
    "advantages": lambda x: jaxkern.advantages(x, x, 0.9, 0.9, bootstrap=1.0, axis=1),
}


@several
@pytest.mark.parametrize("spec, kind", [(("r", None, "c"), "Auto"), ((("r", "c"), None, None), "Explicit")], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_split_lanes_send_nothing(name, spec, kind):
    def run(x):
        y, pull = jax.vjp(FUNCTIONS[name], x)
        return y, pull(jnp.cos(y))

    wanted, grid = jax.jit(run)(X), mesh(kind)
    split = jax.device_put(X, NamedSharding(grid, P(*spec)))
    with jax.set_mesh(grid):
        compiled = jax.jit(run).lower(split).compile()
    same(compiled(split), wanted, 2e-5)
    assert not messages(compiled.as_text())
