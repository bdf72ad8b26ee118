"""Chains of gathers, arithmetic and a scatter under `jaxkern.accelerate` on several devices; see test_sharding.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding import mesh, messages, same, several
from test_accelerate import PLATFORM

import jaxkern

NODES, EDGES, WIDTH = 24, 160, 16
forced = jaxkern.accelerate(force=True)


def graph():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(NODES, WIDTH)), rng.normal(size=(EDGES, 1))
    senders, receivers = (rng.integers(0, NODES, EDGES) for _ in range(2))
    return jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32), jnp.asarray(senders), jnp.asarray(receivers)


def layer(x, w, senders, receivers):
    return jax.ops.segment_sum(jnp.sin(x[senders] * w), receivers, NODES)


def loss(f):
    return jax.value_and_grad(lambda *args: jnp.sum(jnp.cos(f(*args))), (0, 1))


@several
def test_taken_in_shard_map():
    """Edges split over devices, the sums added: each device has a kernel for its edges, forward and backward.

    On a GPU the gradient of such narrow rows is a scatter alone, in no fixed order.
    """
    m = mesh(names=("r",))
    part = lambda *args: jax.lax.psum(layer(*args), "r")
    mapped = jax.shard_map(part, mesh=m, in_specs=(P(), P("r"), P("r"), P("r")), out_specs=P())
    f = jax.jit(loss(mapped))
    plain = f(*graph())
    with forced:
        own = f(*graph())
        taken = [d.reason for d in jaxkern.explain(f, PLATFORM)(*graph()).taken if d.operation == "scatter_add"]
    same(own, plain, 1e-4)
    assert len(taken) == 2
    assert sum("one message kernel" in reason for reason in taken) == (1 if PLATFORM == "cuda" else 2), taken


@several
@pytest.mark.parametrize("nodes, edges", [(P(), P("r")), (P(None, "r"), P()), (P("r"), P()), (P("r"), P("c"))])
def test_left_under_jit(nodes, edges):
    """The scatter alone is taken there: how nodes are split is not known; and no more is sent than before."""
    m = mesh()
    args = [jax.device_put(a, NamedSharding(m, s)) for a, s in zip(graph(), (nodes, edges, edges, edges))]
    f = jax.jit(loss(layer))
    plain, before = f(*args), messages(f.lower(*args).compile().as_text())
    with forced:
        own, after = f(*args), messages(f.lower(*args).compile().as_text())
        taken = [d.reason for d in jaxkern.explain(f, PLATFORM)(*args).taken]
    same(own, plain, 1e-4)
    assert taken and not any("message kernel" in reason for reason in taken)
    assert all(len(sizes) <= len(before[kind]) for kind, sizes in after.items()), (dict(after), dict(before))
