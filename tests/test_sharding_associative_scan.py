"""Scans by an associative operation of arrays spread over several devices; see test_sharding.py.

Split lanes send nothing; an axis of steps that is split is gathered.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding import mesh, messages, same, several
from test_associative_scan import operands, ours

XS = operands(2, (8, 6, 8))


def run(*xs):
    y, pull = jax.vjp(lambda *xs: ours("sum", 1)(ours("affine", 1)(*xs)[1])[0], *xs)
    return y, pull(jnp.cos(y))


@several
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("spec", [("r", None, "c"), (None, None, ("r", "c")), (("r", "c"), None, None)], ids=str)
def test_split_lanes_send_nothing(spec, kind):
    grid = mesh(kind)
    split = [jax.device_put(x, NamedSharding(grid, P(*spec))) for x in XS]
    with jax.set_mesh(grid):
        compiled = jax.jit(run).lower(*split).compile()
    same(compiled(*split), jax.jit(run)(*XS), 2e-5)
    assert not messages(compiled.as_text())


@several
def test_split_steps_are_gathered():
    grid = mesh()
    split = [jax.device_put(x, NamedSharding(grid, P(None, "c", "r"))) for x in XS]
    f = jax.jit(ours("affine", 1))
    compiled = f.lower(*split).compile()
    same(compiled(*split), f(*XS), 2e-5)
    assert set(messages(compiled.as_text())) <= {"all-gather", "all-to-all"}


@several
def test_inside_shard_map():
    spec = P("r", None, "c")
    step = jax.shard_map(run, mesh=mesh(), in_specs=(spec, spec), out_specs=(spec, (spec, spec)))
    same(jax.jit(step)(*XS), jax.jit(run)(*XS), 2e-5)
