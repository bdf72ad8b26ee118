"""Linear recurrences on meshes with explicit axes; see test_sharding.py."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from sharding import mesh, messages, put, same, several

import jaxkern

X = jnp.sin(jnp.arange(8 * 8 * 16, dtype=jnp.float32)).reshape(8, 8, 16)


def run(a, b, initial):
    f = lambda a, b, initial: jaxkern.linear_recurrence(a, b, initial=initial)
    y, pull = jax.vjp(f, a, b, initial)
    return y, pull(jnp.cos(y))[1]


@several
@pytest.mark.parametrize(
    "specs",
    [
        (P(), P(None, "r", "c"), P()),
        (P(None, "r", "c"), P(), P()),
        (P(None, "c"), P(None, None, "r"), P()),
        (P(), P(), P("c", "r")),
    ],
    ids=str,
)
def test_first_carry_is_split_as_operands_are(specs):
    grid = mesh("Explicit")
    a = 0.5 * X if specs[0] != P() else jnp.float32(0.5)
    initial = X[0] if specs[2] != P() else jnp.float32(0)
    split = put(grid, [a, X, initial], specs)
    with jax.set_mesh(grid):
        compiled = jax.jit(run).lower(*split).compile()
        found = compiled(*split)
    same(found, jax.jit(run)(a, X, initial))
    if specs[1] == P(None, "r", "c"):
        assert not messages(compiled.as_text())


@several
@pytest.mark.parametrize("specs", [(P("r", None, "c"), P(None, "r")), (P(), P(("r", "c"))), (P("c"), P("c"))], ids=str)
def test_split_steps(specs):
    """`jax.lax.scan` refuses them. Results are split as the operands are, unless another dimension has the axis of the mesh."""
    grid = mesh("Explicit")
    average = lambda a, b: jaxkern.exponential_moving_average(b, a)
    a = 0.5 * jnp.abs(X) if specs[0] != P() else jnp.float32(0.5)
    split = put(grid, [a, X], specs)
    for f in (jaxkern.linear_recurrence, average):
        with jax.set_mesh(grid):
            found = jax.jit(f)(*split)
        same(found, jax.jit(f)(a, X))
        assert found.sharding.spec[0] == (None if specs[1] == P(None, "r") else specs[1][0])
