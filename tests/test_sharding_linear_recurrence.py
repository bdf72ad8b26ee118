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
    functions = {
        "recurrence": jaxkern.linear_recurrence,
        "average": lambda a, b: jaxkern.exponential_moving_average(b, a),
        "advantages": lambda a, b: jaxkern.advantages(b, b, a, 0.9, bootstrap=1.0),
    }
    a = 0.5 * jnp.abs(X) if specs[0] != P() else jnp.float32(0.5)
    split = put(grid, [a, X], specs)
    for name, f in functions.items():
        run = lambda *xs, f=f: (f(*xs), jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs))), (0, 1))(*xs))
        with jax.set_mesh(grid):
            compiled = jax.jit(f).lower(*split).compile()
            found = jax.jit(run)(*split)
        same(found, jax.jit(run)(a, X))
        assert found[0].sharding.spec[0] == (None if specs[1] == P(None, "r") else specs[1][0])
        if specs[0] == P():  # a map for each device, where a is a number, and what begins the loop
            assert max(n for sizes in messages(compiled.as_text()).values() for n in sizes) <= 8 * 8 * 16, name
