"""The memory of plain programs (jaxkern/_accelerate/memory.py), and what `accelerate` leaves since it would need more."""

import jax
import jax.numpy as jnp
import pytest

import jaxkern
from jaxkern._accelerate import memory
from jaxkern._core import registry

MB = 1 << 20


def peak(f, *shapes):
    return memory.peak(jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).jaxpr) / MB


SQUARE = (512, 512)  # 1 MB
# A function of two squares and the MB that it needs: arrays that XLA fuses are not stored, operands go when they are read last.
NEEDS = {
    "fused": (lambda x, y: jnp.sin(x) * jnp.cos(y) + 1, 3),
    "a product": (lambda x, y: jnp.sin(x) @ y, 3),  # the sine is stored, and x is not read again
    "products in turn": (lambda x, y: ((x @ y) @ y) @ y, 3),
    "a number": (lambda x, y: (jnp.sin(x) * y).sum(), 2),
    "kept for the gradient": (jax.grad(lambda x, y: jnp.tanh(x @ y).sum()), 3),
    "in a function": (lambda x, y: jax.jit(lambda z: (z @ z) @ (z @ z))(x + y), 3),
    "a loop": (lambda x, y: jax.lax.scan(lambda c, _: ((c @ y) @ (c @ y), c), x, None, length=8)[1], 11),
    "in functions of elements": (lambda x, y: jnp.where(jax.nn.silu(2 * x) > 0, y, jax.nn.relu(x + 1)) + 1, 3),
    "a maximum": (lambda x, y: (x.at[jnp.arange(512) * 7 % 512].max(jnp.sin(y)), y), 3),
    "indices": (lambda x, y: x.at[(y[0] * 7).astype(int) % 512].add(y), 3),
}


@pytest.mark.parametrize("name", NEEDS)
def test_the_memory_of_a_program(name):
    f, needs = NEEDS[name]
    assert peak(f, SQUARE, SQUARE) == pytest.approx(needs, rel=0.01)


def hash_grid(computed, tables, x, places):
    """The features of points at the corners of cells, whose numbers in a table are computed or given."""

    def level(k, table):
        cell = jnp.floor(x * 1.5**k).astype(jnp.uint32)[:, None] + jnp.arange(8, dtype=jnp.uint32)[:, None]
        if computed:
            at = (
                (cell[..., 0] ^ (cell[..., 1] * jnp.uint32(2654435761)) ^ (cell[..., 2] * jnp.uint32(805459861)))
                % len(table)
            ).astype(jnp.int32)
        else:
            at = places[k]
        return table[at].sum(1)

    features = jnp.concatenate([level(k, table) for k, table in enumerate(tables)], -1)
    return jnp.square(jnp.tanh(features @ jnp.ones((features.shape[1], 64)))).sum()


@pytest.mark.skipif(not registry.kernels_run(), reason="no kernels")
@pytest.mark.parametrize(
    "points, computed, taken", [(1 << 19, True, False), (1 << 19, False, True), (1 << 17, True, True)]
)
def test_sums_are_left_where_they_store_what_xla_computes(points, computed, taken, measured_jaxlib):
    """Unless the program is small, where memory is not at stake."""
    tables = [jax.ShapeDtypeStruct((1 << 16, 2), jnp.float32)] * 4
    x, places = jax.ShapeDtypeStruct((points, 3), jnp.float32), [jax.ShapeDtypeStruct((points, 8), jnp.int32)] * 4
    with jaxkern.accelerate(only="scatter_add"):
        found = jaxkern.explain(jax.grad(lambda *args: hash_grid(computed, *args)))(tables, x, places)
    assert [d.taken for d in found] == [taken] * 4, found
    more = f"would need {points * 8 * 4 / 1e6:.3g} MB more than plain"
    assert all((more in d.reason) == (not taken) for d in found), found
