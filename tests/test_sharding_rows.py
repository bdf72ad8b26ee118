"""Plain JAX programs under `accelerate` on several devices: rows, and a transformer; see test_sharding.py."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from accelerated import PLATFORM, close
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding import DEVICES, mesh, messages, put, several

import jaxkern

pytestmark = pytest.mark.usefixtures("highest_precision")


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def step(f):
    return jax.jit(jax.value_and_grad(lambda *args: jnp.sum(jnp.cos(f(*args))), (0, 1)))


@several
def test_devices():
    """In a shard_map each device has its own regions; elsewhere XLA spreads the program, and rows are left."""
    grid, rng = mesh(), np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=n), jnp.float32) for n in ((8, 8, 16), (16,))]
    plain, wanted = step(rms_norm), step(rms_norm)(*arrays)
    x, scale = put(grid, arrays, (P("r", "c"), P()))
    with jaxkern.accelerate(only="rows", force=True):
        found = jaxkern.explain(plain, PLATFORM)(x, scale)
        assert len(found) and all("several devices" in d.reason for d in found.left) and not found.taken
        close(wanted, plain(x, scale))
        mapped = step(jax.shard_map(rms_norm, mesh=grid, in_specs=(P("r", "c"), P()), out_specs=P("r", "c")))
        found = jaxkern.explain(mapped, PLATFORM)(x, scale)
        assert len(found) and not found.left
        close(wanted, mapped(x, scale))


@several
def test_what_is_left_sends_what_the_plain_program_sends():
    """Arrays whose rows are split, too; a scan, a conditional and a nested function that names its shardings."""
    grid = mesh()
    own = NamedSharding(grid, P("r"))
    inner = jax.jit(lambda x: jax.nn.softmax(x, axis=-1), in_shardings=own, out_shardings=own)

    def f(x, scale):
        x = jax.lax.scan(lambda x, _: (rms_norm(x, scale), x.sum()), x, length=2)[0]
        return inner(jax.lax.cond(x[0, 0] > 0, jnp.sin, lambda x: jax.nn.softmax(x, axis=-1), x))

    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=n), jnp.float32) for n in ((8, 16), (16,))]
    x, scale = put(grid, arrays, (P("r", "c"), P("c")))
    plain = jax.jit(f)
    with jaxkern.accelerate(only="rows", force=True):
        left = plain.lower(x, scale).compile()
    wanted = plain.lower(x, scale).compile()
    assert messages(left.as_text()) == messages(wanted.as_text())
    close(wanted(x, scale), left(x, scale), 0)


VOCABULARY, WIDTH, HEADS, TOKENS = 64, 32, 4, 16


def transformer(params, tokens):
    """The loss of a layer as people write it: norms, masked softmax, gated units and the loss by hand."""
    x = params["embedding"][tokens[:, :-1]]
    q, k, v = jnp.einsum("btd,dnhk->nbhtk", rms_norm(x, params["scale"]), params["qkv"])
    scores = jnp.einsum("bhtk,bhsk->bhts", q, k) / 3
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    x = x + jnp.einsum("bhts,bhsk,hkd->btd", weights / weights.sum(-1, keepdims=True), v, params["out"])
    gate, up = jnp.einsum("btd,dnf->nbtf", rms_norm(x, params["scale"]), params["up"])
    x = x + (jax.nn.silu(gate) * up) @ params["down"]
    logits = rms_norm(x, params["scale"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


# The specs of the parameters and of the tokens.
PARALLEL = {
    "data": (dict.fromkeys(("embedding", "scale", "qkv", "out", "up", "down", "head"), P()), P(("r", "c"))),
    "tensor": (
        {
            "embedding": P(),
            "scale": P(),
            "qkv": P(None, None, "c"),
            "out": P("c"),
            "up": P(None, None, "c"),
            "down": P("c"),
            "head": P(None, "c"),
        },
        P("r"),
    ),
}


@several
@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_transformer_sends_no_more_than_the_plain_program(parallel):
    """Whatever is taken. A loss whose classes are split sends its few numbers per row in one message, where XLA needs more."""
    grid, rng = mesh(), np.random.default_rng(0)
    specs, split = PARALLEL[parallel]
    shapes = {
        "embedding": (VOCABULARY, WIDTH),
        "scale": (WIDTH,),
        "qkv": (WIDTH, 3, HEADS, 8),
        "out": (HEADS, 8, WIDTH),
        "up": (WIDTH, 2, 64),
        "down": (64, WIDTH),
        "head": (WIDTH, VOCABULARY),
    }
    params = dict(
        zip(shapes, put(grid, [rng.normal(0, 0.3, s).astype(np.float32) for s in shapes.values()], specs.values()))
    )
    (tokens,) = put(grid, [rng.integers(0, VOCABULARY, (8, TOKENS + 1))], [split])
    kept = NamedSharding(grid, P()), {n: NamedSharding(grid, s) for n, s in specs.items()}
    step = jax.jit(jax.value_and_grad(transformer), out_shardings=kept)
    plain = step.lower(params, tokens).compile()
    with jaxkern.accelerate(force=True):
        own = step.lower(params, tokens).compile()
    close(plain(params, tokens), own(params, tokens), 1e-4)
    before, after = messages(plain.as_text()), messages(own.as_text())
    count, size = (lambda sent: sum(map(len, sent.values()))), (lambda sent: sum(map(sum, sent.values())))
    assert count(after) <= count(before), (before, after)
    assert size(after) <= size(before) + 3 * len(DEVICES) * tokens.size, (before, after)
