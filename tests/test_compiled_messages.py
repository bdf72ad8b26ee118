"""What programs over several H100s send, copy and keep, as XLA compiles them (benchmarks/compiled.py); nothing runs."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_compiled import LARGER, WORKSPACE, needs_kernels, needs_xla

import jaxkern
from benchmarks import compiled

pytestmark = [needs_xla, needs_kernels, pytest.mark.optimized]
ROWS, WIDTH, STEPS, TABLE, COUNT = 4096, 8192, 1024, 65536, 32768
DEVICES = 4


def spec(*shape, split=(), dtype="float32", mesh=None):
    mesh = mesh or compiled.mesh(d=DEVICES)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*split)))


rows = lambda **more: spec(ROWS, WIDTH, split=("d",), **more)
columns = lambda **more: spec(ROWS, WIDTH, split=(None, "d"), **more)
steps = lambda: spec(STEPS, WIDTH, split=("d",))
lanes = lambda: spec(STEPS, WIDTH, split=(None, "d"))
gain = lambda *split: spec(WIDTH, split=split)
labels = lambda *split: spec(ROWS, split=split, dtype="int32")
table = lambda: spec(TABLE, 256, split=("d",))


def sent(report):
    return collections.Counter(s.op for s in report.collectives for _ in range(s.times))


def sent_bytes(report):
    return sum(s.total for s in report.collectives)


def recurrence(a, b):
    return jaxkern.linear_recurrence(a, b, axis=0)


def oscillate(c, xs):
    def step(c, x):
        c = jnp.tanh(c * 0.9 + x)
        return c, c

    return jaxkern.scan(step, c, xs)


def halvings(x):
    return jaxkern.while_loop(lambda s: jnp.abs(s[0]) > 1, lambda s: (s[0] / 2, s[1] + 1), (x, jnp.zeros(x.shape, int)))


@jaxkern.row_kernel
def gated(x, scale):
    y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale
    return jax.nn.silu(y) / (1 + jnp.max(jnp.abs(y), -1, keepdims=True))


loss = jax.value_and_grad(lambda x, labels: jaxkern.softmax_cross_entropy(x, labels).sum())
NUMBER = 4 * ROWS  # bytes of a number for each row
FUNCTIONS = {  # name -> (the function, its arguments, what it sends, the most bytes of all that it sends)
    "softmax, rows": (jaxkern.softmax, lambda: [rows()], {}, 0),
    "layer_norm, rows": (jaxkern.layer_norm, lambda: [rows(), gain(), gain()], {}, 0),
    "a row function, rows": (gated, lambda: [rows(), gain()], {}, 0),
    "the loss and its gradient, rows": (loss, lambda: [rows(), labels("d")], {"all-reduce": 1}, 4),
    "cumsum, lanes": (lambda x: jaxkern.cumsum(x, 0), lambda: [lanes()], {}, 0),
    "linear_recurrence, lanes": (recurrence, lambda: [lanes(), lanes()], {}, 0),
    "scan, lanes": (oscillate, lambda: [gain("d"), lanes()], {}, 0),
    "while_loop, lanes": (halvings, lambda: [lanes()], {}, 0),
    "top_k, rows": (lambda x: jaxkern.top_k(x, 64), lambda: [rows()], {}, 0),
    "sort, rows": (jaxkern.sort, lambda: [rows()], {}, 0),
    "searchsorted, queries": (jaxkern.searchsorted, lambda: [gain(), rows()], {}, 0),
    "softmax, row": (jaxkern.softmax, lambda: [columns()], {"all-gather": 1}, 2 * NUMBER * DEVICES),
    "log_softmax, row": (jaxkern.log_softmax, lambda: [columns()], {"all-gather": 1}, 2 * NUMBER * DEVICES),
    "rms_norm, row": (jaxkern.rms_norm, lambda: [columns(), gain("d")], {"all-reduce": 1}, NUMBER),
    "a row function, row": (gated, lambda: [columns(), gain("d")], {"all-reduce": 2}, 2 * NUMBER),
    "reduce_sum, row": (lambda x: jaxkern.reduce_sum(x, -1), lambda: [columns()], {"all-reduce": 1}, NUMBER),
    "reduce_mean, row": (lambda x: jaxkern.reduce_mean(x, -1), lambda: [columns()], {"all-reduce": 1}, NUMBER),
    "the loss and its gradient, classes": (
        loss,
        lambda: [columns(), labels()],
        {"all-gather": 1},
        3 * NUMBER * DEVICES,
    ),
    "cumsum, steps": (lambda x: jaxkern.cumsum(x, 0), lambda: [steps()], {"all-gather": 1}, 4 * WIDTH * DEVICES),
    "linear_recurrence, steps": (recurrence, lambda: [steps(), steps()], {"all-gather": 1}, 8 * WIDTH * DEVICES),
    "top_k, row": (lambda x: jaxkern.top_k(x, 64), lambda: [columns()], {"all-gather": 1}, 128 * NUMBER * DEVICES),
    "sort, row": (jaxkern.sort, lambda: [columns()], {"all-to-all": 2}, 2 * 4 * ROWS * WIDTH // DEVICES),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_send_what_they_must(name):
    f, arguments, listed, most = FUNCTIONS[name]
    report = compiled.read(compiled.compile(f, *arguments()))
    assert any(s.op.startswith("jaxkern_") for s in report.steps)
    assert sent(report) == collections.Counter(listed)
    assert sent_bytes(report) <= most, [(s.op, s.bytes) for s in report.collectives]


def add(x, index, source):
    return x.at[index].add(source)


def summed(x, index, source):
    return jax.ops.segment_sum(source, index, TABLE)


def placed(f, mesh, *split):
    return lambda *a: jax.lax.with_sharding_constraint(f(*a), NamedSharding(mesh, P(*split)))


SELECTIONS = {  # name -> (a plain program, its arguments)
    "rows at indices": (add, lambda: [table(), spec(COUNT, dtype="int32"), spec(COUNT, 256)]),
    "rows and indices": (
        add,
        lambda: [table(), spec(COUNT, dtype="int32", split=("d",)), spec(COUNT, 256, split=("d",))],
    ),
    "segments": (summed, lambda: [table(), spec(COUNT, dtype="int32", split=("d",)), spec(COUNT, 256, split=("d",))]),
    "sort, rows": (jnp.sort, lambda: [rows()]),
    "sort, row": (jnp.sort, lambda: [columns()]),
    "argsort, row": (jnp.argsort, lambda: [columns()]),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_programs_at_indices_send_and_copy_no_more_than_plain(name):
    f, arguments = SELECTIONS[name]
    arguments = arguments()
    f = placed(f, arguments[0].sharding.mesh, *arguments[0].sharding.spec)
    found = compiled.compare(f, *arguments)
    plain, own = found["plain"], found["accelerated"]
    assert any(s.op.startswith("jaxkern_") for s in own.steps)
    assert sent(own).total() <= sent(plain).total(), (sent(own), sent(plain))
    assert sent_bytes(own) <= sent_bytes(plain)
    assert own.copied <= plain.copied, own.copies


def test_rows_at_indices_of_an_array_that_is_kept_are_not_copied_first():
    """The kernel copies rows as it adds to others, as on one device."""
    report = compiled.compare(*[SELECTIONS["rows at indices"][0], *SELECTIONS["rows at indices"][1]()])["accelerated"]
    assert not report.copies and not report.collectives


# ---- a transformer

BATCH, LENGTH, HIDDEN, HEADS, VOCABULARY = 32, 512, 512, 8, 16384
PARAMETERS = {  # name -> (its shape, the dimension that model-parallel devices split)
    "embedding": ((VOCABULARY, HIDDEN), 0),
    "norm": ((HIDDEN,), None),
    "qkv": ((HIDDEN, 3, HEADS, HIDDEN // HEADS), 2),
    "out": ((HEADS, HIDDEN // HEADS, HIDDEN), 0),
    "up": ((HIDDEN, 2, 2 * HIDDEN), 2),
    "down": ((2 * HIDDEN, HIDDEN), 0),
}


def normed(x, gain):
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + 1e-6) * gain).astype(x.dtype)


def language_loss(p, tokens, join=lambda x: x, axis=None):
    """axis: the axis of `shard_map` that splits heads, hidden units and classes; join: sums over it."""
    p = {k: v.astype(jnp.bfloat16) for k, v in p.items()}
    ids, wanted = tokens[:, :-1], tokens[:, 1:]
    begin = jax.lax.axis_index(axis) * len(p["embedding"]) if axis else 0

    def of_this_device(ids):
        own = (ids >= begin) & (ids < begin + len(p["embedding"]))
        return own, jnp.where(own, ids - begin, 0)

    own, at = of_this_device(ids)
    x = join(jnp.where(own[..., None], p["embedding"][at], 0)) if axis else p["embedding"][ids]
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", normed(x, p["norm"]), p["qkv"]), 2, 0)
    scores = jnp.einsum("bthk,bshk->bhts", q, k).astype(jnp.float32) / 8
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    mixed = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores).astype(x.dtype), v)
    x += join(jnp.einsum("bthk,hkd->btd", mixed, p["out"]))
    units = jnp.einsum("btd,dcf->btcf", normed(x, p["norm"]), p["up"])
    x += join((jax.nn.silu(units[:, :, 0]) * units[:, :, 1]) @ p["down"])
    logits = (normed(x, p["norm"]) @ p["embedding"].T).astype(jnp.float32)
    if not axis:
        picked = jnp.take_along_axis(logits, wanted[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - picked).mean()
    largest = jax.lax.pmax(jax.lax.stop_gradient(logits).max(-1), axis)
    own, at = of_this_device(wanted)
    picked = join(jnp.where(own, jnp.take_along_axis(logits, at[..., None], -1)[..., 0], 0))
    return (jnp.log(join(jnp.exp(logits - largest[..., None]).sum(-1))) + largest - picked).mean()


def adam(p, m, v, g):
    tree = jax.tree.map
    m, v = tree(lambda m, g: 0.9 * m + 0.1 * g, m, g), tree(lambda v, g: 0.99 * v + 0.01 * g * g, v, g)
    return tree(lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), p, m, v), m, v


def data_parallel(p, m, v, tokens):
    vary = functools.partial(jax.lax.pcast, axis_name="d", to="varying")
    loss, g = jax.value_and_grad(language_loss)(jax.tree.map(vary, p), tokens)
    return *adam(p, m, v, jax.lax.pmean(g, "d")), jax.lax.pmean(loss, "d")


def model_parallel(p, m, v, tokens):
    join = functools.partial(jax.lax.psum, axis_name="d")
    loss, g = jax.value_and_grad(language_loss)(p, tokens, join, "d")
    return *adam(p, m, v, g), loss


def state(split, mesh=None):
    """Parameters, split by `split(shape, the dimension of model-parallel devices)`, and both moments."""
    own = lambda shape, dim: spec(*shape, split=split(shape, dim), mesh=mesh)
    return [{k: own(*given) for k, given in PARAMETERS.items()}] * 3


whole = lambda shape, dim: ()
of_model = lambda shape, dim: () if dim is None else (*[None] * dim, "d")
tokens = lambda *split, mesh=None: spec(BATCH, LENGTH + 1, split=split, dtype="int32", mesh=mesh)


def mapped(f, split, *of_tokens):
    own = {k: P(*split(*given)) for k, given in PARAMETERS.items()}
    specs = (own, own, own)
    return jax.shard_map(f, mesh=compiled.mesh(d=DEVICES), in_specs=(*specs, P(*of_tokens)), out_specs=(*specs, P()))


TRANSFORMERS = {  # name -> (the step, its arguments)
    "data parallel, shard_map": (
        lambda: mapped(data_parallel, whole, "d"),
        lambda: [*state(whole), tokens("d")],
    ),
    "model parallel, shard_map": (
        lambda: mapped(model_parallel, of_model),
        lambda: [*state(of_model), tokens()],
    ),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_transformer_sends_no_more_than_plain(name):
    make, arguments = TRANSFORMERS[name]
    found = compiled.compare(make(), *arguments(), donate=(0, 1, 2))
    plain, own = found["plain"], found["accelerated"]
    assert sent(plain) and any(s.op.startswith("jaxkern_") for s in own.steps)
    assert sent(own).total() <= sent(plain).total(), (sent(own), sent(plain))
    assert sent_bytes(own) <= 1.001 * sent_bytes(plain), (sent_bytes(own), sent_bytes(plain))
    assert own.temporary <= LARGER * plain.temporary + WORKSPACE, (own.temporary, plain.temporary)
