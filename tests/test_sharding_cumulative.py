"""Cumulative operations and recurrences of arrays spread over several devices; see test_sharding.py.

Split lanes send nothing. Devices with parts of the steps send the states of their parts.
"""

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


def affine(before, own):
    return before[0] * own[0], own[0] * before[1] + own[1]


ALONG_STEPS = {  # name -> (the function, how many numbers a lane's state has)
    "cumsum": (functools.partial(jaxkern.cumsum, axis=1), 1),
    "cumprod": (functools.partial(jaxkern.cumprod, axis=1, exclusive=True), 1),
    "cummax": (functools.partial(jaxkern.cummax, axis=1, reverse=True), 1),
    "cumlogsumexp": (functools.partial(jaxkern.cumlogsumexp, axis=1, exclusive=True, reverse=True), 2),
    "segments": (lambda x: jaxkern.cumsum(x, axis=1, segment_ids=jnp.arange(16) // 5), 2),
    "associative_scan": (lambda x: jaxkern.associative_scan(affine, (jnp.sin(x), x), axis=1)[1], 2),
    "16 bits": (lambda x: jaxkern.cumsum(x.astype(jnp.bfloat16), axis=1), 1),
}


@several
@pytest.mark.parametrize(
    "spec, kind",
    [((None, "r", None), "Auto"), (("c", "r", None), "Explicit"), ((None, ("r", "c"), None), "Auto")],
    ids=str,
)
@pytest.mark.parametrize("name", ALONG_STEPS)
def test_split_steps_send_the_state_of_each_part(name, spec, kind):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16, 4)), jnp.float32)
    f, members = ALONG_STEPS[name]

    # Not a function of the results, which are rounded in two ways.
    weights = np.cos(np.arange(x.size)).reshape(x.shape).astype(np.float32)

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(weights * f(x).astype(jnp.float32)))(x)

    wanted, grid = jax.jit(lambda x: (f(x), gradient(x)))(x), mesh(kind)
    place = NamedSharding(grid, P(*spec))
    split = jax.device_put(x, place)
    with jax.set_mesh(grid):
        compiled = jax.jit(f, out_shardings=place).lower(split).compile()
        found = compiled(split), jax.jit(gradient)(split)
    sent = messages(compiled.as_text())
    beside = 32 if name == "segments" else 0  # XLA finds out where the ids change
    assert sum(sum(sizes) for sizes in sent.values()) <= members * 8 * 4 * grid.size + beside, dict(sent)
    same(found[0], wanted[0], 2.0**-7 if name == "16 bits" else 3e-5)
    same(found[1], wanted[1], 2.0**-6 if name == "16 bits" else 1e-4)


@several
def test_steps_that_do_not_divide_evenly():
    """Their split goes to a dimension that does; in memory, arrays of an uneven dimension are whole."""
    x, grid = X[:, :5], mesh()
    y = jax.jit(
        lambda x: jaxkern.cumsum(jax.lax.with_sharding_constraint(x, NamedSharding(grid, P(None, "r"))), axis=1)
    )(x)
    same(y, jaxkern.cumsum(x, axis=1))
