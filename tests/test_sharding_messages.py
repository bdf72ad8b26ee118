"""Messages on several devices: as in test_sharding.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharding import check, every_mesh, mesh, put, same, several

import jaxkern

NODES, EDGES, WIDTH = 24, 80, 16
SPLIT = {  # of x and w
    "features": (P(None, "r"), P()),
    "nodes": (P("r", None), P()),
    "edges": (P(), P("r")),
    "all": (P("r", "c"), P("r")),
}
# Features may be split at the cost of one sum, of numbers of edges, for what lacks them; else rows are gathered.
SENT = {
    "features": {"all-reduce": 1},
    "nodes": {"all-gather": 1},
    "edges": {"all-gather": 2, "all-reduce": 1},
    "all": {"all-gather": 3, "all-reduce": 2},
}


def problem():
    rng = np.random.default_rng(0)
    s, r = (rng.integers(-1, NODES, EDGES).astype(np.int32) for _ in range(2))
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((NODES, WIDTH), (EDGES,)))
    return jaxkern.Graph(s, r, num_nodes=NODES), x, w


def sums(graph, x, w):
    return jnp.sum(jnp.sin(jaxkern.edge_sum(lambda x, w: jnp.tanh(x) * w, graph, senders=x, edges=w)))


def products(graph, x, w):
    return jnp.sum(w * jaxkern.edge_map(lambda x, y: x * y, graph, senders=x, receivers=x, reduce_features=0))


@several
@every_mesh
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("split", SPLIT)
@pytest.mark.parametrize("f", [sums, products], ids=lambda f: f.__name__)
def test_values_and_gradients(f, split, kind, shape_of_mesh):
    graph, x, w = problem()
    wanted = jax.value_and_grad(f, (1, 2))(graph, x, w)
    m = mesh(kind, shape_of_mesh)
    with jax.set_mesh(m):
        operands = put(m, (x, w), SPLIT[split])
        step = jax.jit(jax.value_and_grad(f, (1, 2)))
        same(step(graph, *operands), wanted, 5e-5)
        check(step.lower(graph, *operands).compile().as_text(), SENT[split], kernel=False)


@several
def test_a_batch_sends_nothing():
    graph, x, _ = problem()
    m = mesh(names=("r",))
    (xs,) = put(m, [jnp.stack([x] * 8)], [P("r")])
    step = jax.jit(jax.vmap(lambda x: jaxkern.edge_sum(lambda x: x * x, graph, senders=x)))
    check(step.lower(xs).compile().as_text(), {}, kernel=False)
    same(step(xs)[3], jaxkern.edge_sum(lambda x: x * x, graph, senders=x))


@several
def test_inside_shard_map():
    graph, x, w = problem()
    m = mesh(names=("r",))
    f = lambda x: jax.grad(sums, 1)(graph, x, w)
    same(jax.jit(jax.shard_map(f, mesh=m, in_specs=P(None, "r"), out_specs=P(None, "r")))(x), f(x), 5e-5)
