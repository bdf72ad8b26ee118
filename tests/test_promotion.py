"""Programs that forbid implicit promotion of dtypes and ranks, as equinox's own tests do, on jaxkern.

jaxkern's own code promotes; the settings concern only the code of the program.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from accelerated import ALL, both, close

import jaxkern

NODES, EDGES, FEATURES = 6, 20, 8
SENDERS, RECEIVERS = (jnp.asarray(np.random.default_rng(k).integers(0, NODES, EDGES), jnp.int32) for k in range(2))


@pytest.fixture(autouse=True)
def _forbidden():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def rows(dtype, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(NODES, FEATURES)), dtype)


def segment_sum(x):
    return jax.ops.segment_sum(x[SENDERS], RECEIVERS, NODES)


def weighted(x):
    m = jnp.tanh(x[SENDERS] - x[RECEIVERS]) * x[SENDERS, :1]
    return jax.ops.segment_sum(m, RECEIVERS, NODES)


def widened(x):
    return jax.ops.segment_sum(x[SENDERS].astype(jnp.float32) * 0.5, RECEIVERS, NODES)


def over_edges(x):
    e = x[SENDERS] * x[RECEIVERS]
    e = jnp.exp(e - jax.lax.stop_gradient(jax.ops.segment_max(e, RECEIVERS, NODES))[RECEIVERS])
    return jax.ops.segment_sum(e, RECEIVERS, NODES)


def loss(x):
    return optax.softmax_cross_entropy_with_integer_labels(x, RECEIVERS[:NODES])


PROGRAMS = {
    "segment_sum": segment_sum,
    "weighted": weighted,
    "widened": widened,
    "over edges": over_edges,
    "logsumexp": lambda x: jax.nn.logsumexp(x, -1),
    "softmax": lambda x: jax.nn.softmax(x, -1),
    "log_softmax": lambda x: jax.nn.log_softmax(x, -1),
    "loss": loss,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_forbid_promotion(name):
    f, x, t = PROGRAMS[name], rows("bfloat16"), rows("bfloat16", 1)
    energy = lambda x: jnp.sum(jnp.sin(f(x).astype(jnp.float32)))

    def derivatives(x, t):
        return f(x), *jax.jvp(jax.grad(energy), (x,), (t,))

    plain, own, taken = both(derivatives, x, t)
    assert taken
    close(plain, own, 2**-5)
    with jaxkern.accelerate(only=ALL, force=True):
        assert jaxkern.explain(derivatives, "cuda")(x, t).taken


PUBLIC = {
    "dequantize": lambda x: jaxkern.dequantize(*jaxkern.quantize_rows(x)),
    "embedding_bag": lambda x: jaxkern.embedding_bag(x, SENDERS.reshape(-1, 4), mode="mean"),
    "graph_attention": lambda x: jaxkern.graph_attention(
        lambda a, b: jnp.tanh(a + b),
        jaxkern.Graph(SENDERS, RECEIVERS, num_nodes=NODES),
        x,
        senders=x[:, 0],
        receivers=x[:, 0],
    ),
    "layer_norm": lambda x: jaxkern.layer_norm(x, jnp.ones(FEATURES), jnp.zeros(FEATURES)),
    "group_norm": lambda x: jaxkern.group_norm(x, 2, jnp.ones(FEATURES), jnp.zeros(FEATURES)),
    "softmax_cross_entropy": lambda x: jaxkern.softmax_cross_entropy(x, RECEIVERS[:NODES]),
    "segment_softmax": lambda x: jaxkern.segment_softmax(x, RECEIVERS[:NODES], NODES),
    "reduce_mean": lambda x: jaxkern.reduce_mean(x, axis=0),
    "silu": jaxkern.silu,
}


@pytest.mark.parametrize("name", PUBLIC)
def test_functions_in_programs_that_forbid_promotion(name):
    f, x, t = PUBLIC[name], rows("bfloat16"), rows("bfloat16", 1)
    energy = lambda x: jnp.sum(f(x).astype(jnp.float32) ** 2)

    @jax.jit
    def derivatives(x, t):
        return f(x), *jax.jvp(jax.grad(energy), (x,), (t,))

    own = derivatives(x, t)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        close(derivatives(x, t), own)
