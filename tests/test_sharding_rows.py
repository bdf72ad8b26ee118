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
from benchmarks import _by_hand

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


FUNCTIONS = {
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "logsumexp": lambda x: jax.nn.logsumexp(x, -1),
    "logsumexp of columns": lambda x: jax.nn.logsumexp(x, 0),
    "norm": lambda x: rms_norm(x, 2.0),
    "masked": lambda x: jax.nn.softmax(jnp.where(x > 0, x, -1e9), -1),
    "largest": lambda x: jnp.where(x == x.max(-1, keepdims=True), x, 0).sum(-1),
    "cumsum": lambda x: jnp.cumsum(x, -1),
    "top_k": lambda x: jax.lax.top_k(x, 3)[0],
    # Before 0.11 JAX refuses to sort on explicit meshes.
    "median": lambda x: jax.lax.stop_gradient(jnp.median(x, -1) if jax.__version_info__ >= (0, 11) else x.min(-1)),
    "loss": lambda x: optax.softmax_cross_entropy_with_integer_labels(x, jnp.arange(len(x))),
    "nested": lambda x: jax.jit(lambda x: jax.nn.softmax(jnp.sin(x)))(x),
    "recomputed": jax.checkpoint(lambda x: jax.nn.softmax(rms_norm(x, 2.0))),
}


@several
@pytest.mark.parametrize(
    "kind, devices, mapped",
    [("Explicit", 1, False), ("Explicit", 1, True), ("Explicit", 2, False), ("Explicit", 2, True), ("Auto", 1, True)],
)
def test_functions_on_meshes_of_each_kind(kind, devices, mapped):
    """Functions and gradients. What takes their place is traced while JAX lowers a program, where the mesh is set."""
    axis_types = (getattr(jax.sharding.AxisType, kind),)
    grid = jax.make_mesh((devices,), ("r",), axis_types=axis_types, devices=DEVICES[:devices])
    (x,) = put(grid, [np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)], [P("r")])

    def total(x):
        found = {name: f(x) for name, f in FUNCTIONS.items()}
        return sum(jnp.sum(jnp.cos(y)) for y in found.values()), found

    def f(x):
        (_, found), dx = jax.value_and_grad(total, has_aux=True)(x)
        return {**found, "dx": dx}

    if mapped:  # each device has rows of its own, and logsumexp makes columns of them
        specs = dict.fromkeys((*FUNCTIONS, "dx"), P("r"))
        f = jax.shard_map(f, mesh=grid, in_specs=P("r"), out_specs=specs)
    with jax.set_mesh(grid):
        wanted = jax.jit(f)(x)
        with jaxkern.accelerate(force=True):
            found = jax.jit(f)(x)
    close(wanted, found, 1e-5)
    assert jax.tree.map(lambda a: a.sharding, found) == jax.tree.map(lambda a: a.sharding, wanted)


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


SPLIT = {
    "embedding": P(),
    "scale": P(),
    "qkv": P(None, None, "c"),
    "out": P("c"),
    "up": P(None, None, "c"),
    "down": P("c"),
    "head": P(None, "c"),
}


def layers_split(params):
    """Specs of a program of `_by_hand`: the first product of each pair is split by columns, the second one by rows."""
    columns, rows = {"q", "k", "v", "gate", "up", "head"}, {"o", "down"}
    name = lambda path: path[-1].key
    spec = lambda path, _: P(None, "c") if name(path) in columns else P("c") if name(path) in rows else P()
    return jax.tree_util.tree_map_with_path(spec, params)


def of_hand(name):
    """(loss of parameters and tokens, shapes of the parameters)"""
    if name == "transformer":
        shapes = {
            "embedding": (VOCABULARY, WIDTH),
            "scale": (WIDTH,),
            "qkv": (WIDTH, 3, HEADS, 8),
            "out": (HEADS, 8, WIDTH),
            "up": (WIDTH, 2, 64),
            "down": (64, WIDTH),
            "head": (WIDTH, VOCABULARY),
        }
        return transformer, shapes
    loss, params, _ = _by_hand.PROGRAMS[name]("float32", True)
    return lambda p, tokens: loss(p, tokens[:, :-1], tokens[:, 1:]), jax.eval_shape(params, jax.random.key(0))


PROGRAMS = [("transformer", "data"), ("transformer", "tensor"), ("llama", "tensor"), ("llama", "mapped")]
PROGRAMS += [("t5 encoder", "data"), ("t5 encoder", "mapped")]


@several
@pytest.mark.parametrize("name, parallel", PROGRAMS)
def test_a_transformer_sends_no_more_than_the_plain_program(name, parallel):
    """Whatever is taken; mapped: in a shard_map over the batch, where each device has its own rows.

    A loss whose classes are split sends its few numbers per row in one message, where XLA needs more.
    """
    grid, rng = mesh(), np.random.default_rng(0)
    loss, shapes = of_hand(name)
    is_shape = lambda s: isinstance(s, tuple)
    specs, split = jax.tree.map(lambda _: P(), shapes, is_leaf=is_shape), P(("r", "c"))
    if parallel == "tensor":
        specs, split = (SPLIT if name == "transformer" else layers_split(shapes)), P("r")
    own = jax.tree.map(lambda spec: NamedSharding(grid, spec), specs)
    draw = lambda s, place: jax.device_put(rng.normal(0, 0.3, getattr(s, "shape", s)).astype(np.float32), place)
    params = jax.tree.map(draw, shapes, own, is_leaf=is_shape)
    (tokens,) = put(grid, [rng.integers(0, VOCABULARY, (8, TOKENS + 1))], [split])
    step = jax.value_and_grad(loss)
    if parallel == "mapped":
        mean = lambda *args: jax.lax.pmean(loss(*args), ("r", "c"))
        step = jax.shard_map(jax.value_and_grad(mean), mesh=grid, in_specs=(P(), split), out_specs=P())
    step = jax.jit(step, out_shardings=(NamedSharding(grid, P()), own))
    plain = step.lower(params, tokens).compile()
    with jaxkern.accelerate(force=True):
        accelerated = step.lower(params, tokens).compile()
        taken = {d.operation for d in jaxkern.explain(step, PLATFORM)(params, tokens).taken}
    assert ("rows" in taken) == (parallel == "mapped") and taken
    close(plain(params, tokens), accelerated(params, tokens), 1e-4)
    before, after = messages(plain.as_text()), messages(accelerated.as_text())
    count, size = (lambda sent: sum(map(len, sent.values()))), (lambda sent: sum(map(sum, sent.values())))
    assert count(after) <= count(before), (before, after)
    allowed = 3 * len(DEVICES) * tokens.size if parallel == "tensor" else 0
    assert size(after) <= size(before) + allowed, (before, after)


@several
@pytest.mark.parametrize("reads", [lambda x, t: (x[:, :-1], t[:, 1:]), lambda x, t: (x[:, 1:], t[:, :-1])])
def test_rows_of_a_slice(reads):
    """Losses of shifted logits, split over the batch: each device computes its own rows of the whole array."""
    grid, rng = mesh(), np.random.default_rng(0)
    x, labels = (
        jnp.asarray(rng.normal(size=(8, 6, 16)), jnp.float32),
        jnp.asarray(rng.integers(0, 16, (8, 6)), jnp.int32),
    )

    def loss(x, labels):
        logits, labels = reads(x, labels)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
        return -picked.mean()

    wanted = jax.jit(jax.value_and_grad(loss))(x, labels)
    split = P(("r", "c"))

    def part(x, labels):
        value, gradient = jax.value_and_grad(loss)(x, labels)
        return jax.lax.pmean(value, ("r", "c")), gradient / len(DEVICES)

    mapped = jax.jit(jax.shard_map(part, mesh=grid, in_specs=(split, split), out_specs=(P(), split)))
    args = put(grid, (x, labels), (split, split))
    with jaxkern.accelerate(only="rows", force=True):
        found = jaxkern.explain(mapped, PLATFORM)(*args)
        assert found.taken and all(",6,16]" in d.shapes for d in found.taken), found
        close(wanted, mapped(*args))
        close(wanted, jax.jit(jax.value_and_grad(loss))(*args))


@several
@pytest.mark.parametrize("split", [P(("r", "c")), P("r", None, "c")])
def test_a_loss_by_name_of_a_slice(split):
    grid, rng = mesh(), np.random.default_rng(0)
    x, labels = (
        jnp.asarray(rng.normal(size=(8, 6, 16)), jnp.float32),
        jnp.asarray(rng.integers(0, 16, (8, 6)), jnp.int32),
    )
    x = x.at[:, -1].set(jnp.nan)
    loss = lambda x, t: optax.softmax_cross_entropy_with_integer_labels(x[:, :-1], t[:, 1:]).mean()
    wanted = jax.jit(jax.value_and_grad(loss))(x, labels)
    args = put(grid, (x, labels), (split, P()))
    with jaxkern.accelerate(only="softmax_cross_entropy", force=True):
        found = jaxkern.explain(jax.value_and_grad(loss), PLATFORM)(*args)
        assert found.taken and all(",6,16]" in d.shapes for d in found.taken), found
        close(wanted, jax.jit(jax.value_and_grad(loss))(*args))
