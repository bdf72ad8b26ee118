"""While loops of lanes that are spread over several devices: nothing is sent; see test_sharding.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding import mesh, messages, put, same, several
from while_functions import FUNCTIONS, per_lane

import jaxkern

SHAPE = (16, 24)


@functools.cache
def given(name):
    run, operands = FUNCTIONS[name](SHAPE, "float32", seed=2)
    return run, list(map(jnp.asarray, operands)), jax.jit(per_lane(run, operands))(*operands)


@several
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    "name, spec", [("newton", ("r", "c")), ("sampler", (("r", "c"), None)), ("collatz", (None, "c"))]
)
def test_split_lanes(name, spec, kind):
    grid, (run, operands, wanted) = mesh(kind), given(name)
    split = put(grid, operands, [P(*spec) if x.ndim else P() for x in operands])
    with jax.set_mesh(grid):
        step = jax.jit(lambda *xs: run(jaxkern.while_loop, *xs))
        assert not messages(step.lower(*split).compile().as_text())
        found = step(*split)
    same(found, wanted)
    assert all(y.sharding.is_equivalent_to(NamedSharding(grid, P(*spec)), 2) for y in jax.tree.leaves(found))


@several
def test_numbers_on_an_explicit_mesh():
    """Numbers that become one for each lane are split as the lanes are."""
    grid = mesh("Explicit")
    (a,) = put(grid, [jnp.arange(1, 385, dtype=jnp.float32).reshape(SHAPE)], [P("r", "c")])
    with jax.set_mesh(grid):
        f = jax.jit(lambda a: jaxkern.while_loop(lambda c: c[0] < 5 * a, lambda c: (c[0] + a, c[1] + 1), (0.0, 0)))
        x, n = f(a)
        assert not messages(f.lower(a).compile().as_text())
    assert (n == 5).all() and (x == 5 * a).all() and n.sharding.spec == P("r", "c")


@several
def test_places_shapes_keys_and_tangents():
    """Indices of lanes, carries and conditions that lack dimensions, a state of each lane, a tangent."""
    grid = mesh()
    a = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    rows = (np.arange(16) % 5)[:, None]

    def f(a, rows):
        body = lambda c: (c[0] * 0.5 + a * jnp.arange(24), c[1] + 1)
        return jaxkern.while_loop(lambda c: c[1] < rows, body, (0.0, 0))

    derived = lambda a, rows: (f(a, rows), jax.jvp(lambda a: f(a, rows)[0], (a,), (a,))[1])
    wanted = jax.jit(derived)(a, rows)
    given = put(grid, [a, rows], [P("r", "c"), P("r", None)])
    step = jax.jit(derived)
    assert not messages(step.lower(*given).compile().as_text())
    same(step(*given), wanted)
    orbit = jax.vmap(
        lambda y, n: jaxkern.while_loop(lambda c: c[1] < n, lambda c: (c[0][::-1] * 1.1, c[1] + 1), (y, 0))[0]
    )
    y, n = a[:, :3], rows[:, 0]
    given = put(grid, [y, n], [P("r", None), P("r")])
    assert not messages(jax.jit(orbit).lower(*given).compile().as_text())
    same(jax.jit(orbit)(*given), orbit(y, n))
    inside = jax.jit(
        jax.shard_map(orbit, mesh=grid, in_specs=(P(("r", "c"), None), P(("r", "c"))), out_specs=P(("r", "c")))
    )
    same(inside(y, n), orbit(y, n))
