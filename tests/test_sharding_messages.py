"""Messages on several devices: as in test_sharding.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ON_GPU
from jax.sharding import PartitionSpec as P
from sharding import check, every_mesh, mesh, messages, put, same, several

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


# ---- edges that are split over devices

SPLIT_SENT = {  # of the result, and of its gradients by nodes and edges
    "edge_sum": (1, 2),
    "edge_mean": (2, 3),  # and the numbers of edges
    "edge_max": (1, 3),  # and how many devices have the maximum
    "edge_min": (1, 3),
    "edge_map": (0, 1),
    "graph_attention": (3, 5),
}


def of_split(name, graph, x, y, w):
    if name == "graph_attention":
        f = lambda x, y, w: jnp.sin(x) * w + y
        return jaxkern.graph_attention(f, graph, x, senders=x, receivers=y, edges=w)
    f = lambda x, y, w: jnp.sin(x) * w + y * w
    return getattr(jaxkern, name)(f, graph, senders=x, receivers=y, edges=w)


@several
@pytest.mark.parametrize("name", SPLIT_SENT)
def test_split_edges(name):
    """One message for the result, and one for the gradient by nodes; nothing for the gradient by edges."""
    graph, x, w = problem()
    m, split = mesh(names=("r",)), P("r")
    w = w[:, None]
    make = lambda s, r: jaxkern.Graph(s, r, num_nodes=NODES, axis_name="r")
    make = jax.jit(jax.shard_map(make, mesh=m, in_specs=split, out_specs=split))
    ids = put(m, (graph.senders, graph.receivers), (split, split))
    assert not messages(make.lower(*ids).compile().as_text())
    parts = make(*ids)
    of_map = split if name == "edge_map" else P()
    run = jax.shard_map(
        lambda graph, x, y, w: of_split(name, graph, x, y, w),
        mesh=m,
        in_specs=(split, P(), P(), split),
        out_specs=of_map,
    )
    weight = jnp.cos(jnp.arange(80.0))[: 80 if name == "edge_map" else NODES, None]
    total = lambda run: lambda graph, x, w: jnp.sum(jnp.where(jnp.isfinite(y := run(graph, x, x, w)), y * weight, 0))
    given = put(m, (x, w), (P(), split))
    forward = jax.jit(run).lower(parts, given[0], *given).compile()
    plain = lambda graph, x, y, w: of_split(name, graph, x, y, w)
    same(forward(parts, given[0], *given), jax.jit(plain)(graph, x, x, w))
    backward = jax.jit(jax.value_and_grad(total(run), (1, 2))).lower(parts, *given).compile()
    same(backward(parts, *given), jax.jit(jax.value_and_grad(total(plain), (1, 2)))(graph, x, w), 5e-5)
    for compiled, count in zip((forward, backward), SPLIT_SENT[name]):
        check(compiled.as_text(), {"all-reduce": count}, kernel=False)
    assert max(sum(messages(backward.as_text()).values(), [0])) <= 2 * NODES * WIDTH


@several
def test_split_edges_of_other_types():
    """Integers, 16 bits, NaN, and nodes without edges."""
    m, split = mesh(names=("r",)), P("r")
    count = len(m.devices.flat)
    ids = jnp.arange(8 * count) % 5
    for dtype in ("int32", "uint8", "bfloat16"):
        below = 10 if dtype == "bfloat16" else 100  # sums of parts are exact in 16 bits, too
        w = jnp.asarray(np.random.default_rng(0).integers(0, below, 8 * count), dtype)
        w = w.at[7].set(jnp.nan) if dtype == "bfloat16" else w
        for name in ("edge_sum", "edge_mean", "edge_max", "edge_min"):

            def run(ids, w, axis_name=None):
                graph = jaxkern.Graph(ids, ids, num_nodes=6, axis_name=axis_name)
                return getattr(jaxkern, name)(lambda w: w, graph, edges=w)

            f = jax.shard_map(lambda ids, w: run(ids, w, "r"), mesh=m, in_specs=split, out_specs=P())
            found, wanted = jax.jit(f)(ids, w), run(ids, w)
            assert found.dtype == wanted.dtype
            # On a GPU, XLA's quotients of float32 are not rounded to the nearest number.
            near = ON_GPU and name == "edge_mean"
            rtol = (2.0**-8 if dtype == "bfloat16" else 2.0**-22) if near else 0
            np.testing.assert_allclose(np.asarray(found, "float64"), np.asarray(wanted, "float64"), rtol=rtol)
