"""What XLA makes of programs for an H100 (benchmarks/compiled.py): with kernels no more bytes, copies or memory than without."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import _hlo, compiled
from jaxkern._core import device, registry

MB = 1 << 20
LARGER = 1.02  # temporary memory of the accelerated program over the plain one's
WORKSPACE = 16 * MB  # that kernels may need beside it: partial sums, sorted positions

HLO = """
%body (p: (s32[], f32[8,256])) -> (s32[], f32[8,256]) {
  %p = (s32[], f32[8,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,256]{1,0} get-tuple-element(%p), index=1
  %next = s32[] add(%i, %i)
  %start = ((f32[8,256]{1,0}, s32[]), f32[8,256]{1,0}, u32[]) fusion-start(%x, %i), kind=kLoop, calls=%update
  %done = f32[8,256]{1,0} fusion-done(%start)
  ROOT %t = (s32[], f32[8,256]{1,0}) tuple(%next, %done)
}

%update (a: f32[8,256], k: s32[]) -> f32[8,256] {
  %a = f32[8,256]{1,0} parameter(0)
  %k = s32[] parameter(1)
  %z = s32[] constant(0)
  %row = f32[1,256]{1,0} dynamic-slice(%a, %k, %z), dynamic_slice_sizes={1,256}
  %e = f32[1,256]{1,0} exponential(%row)
  ROOT %u = f32[8,256]{1,0} dynamic-update-slice(%a, %e, %k, %z)
}

%turn (b: f32[8,256]) -> f32[256,8] {
  %b = f32[8,256]{1,0} parameter(0)
  ROOT %c = f32[256,8]{1,0} transpose(%b), dimensions={1,0}
}

ENTRY %main (v: f32[8,256]) -> f32[256,8] {
  %v = f32[8,256]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %s = (s32[], f32[8,256]{1,0}) tuple(%zero, %v)
  %w = (s32[], f32[8,256]{1,0}) while(%s), condition=%none, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %y = f32[8,256]{1,0} get-tuple-element(%w), index=1
  %call = (f32[8,256]{1,0}, u8[64]{0}) custom-call(%y, %v), custom_call_target="jaxkern_f", PROGRAM
  %g = f32[8,256]{1,0} get-tuple-element(%call), index=0
  %all = f32[8,256]{1,0} all-reduce(%g), replica_groups={{0,1}}
  ROOT %r = f32[256,8]{1,0} fusion(%all), kind=kInput, calls=%turn
}

%none (q: (s32[], f32[8,256])) -> pred[] {
  %q = (s32[], f32[8,256]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}
""".replace(
    "PROGRAM", 'program = "jaxkern\\0Aalignment 16\\0Alaunch grid=1\\0Alaunch grid=1\\0Aalignment 1\\0Alaunch grid=1"'
)


def test_a_program_is_read():
    add, update, call, exchange, turn = _hlo.steps(HLO)
    assert add.times == update.times == 5 and update.bytes == 2 * 1024 + 4, "a slice is read, and written in place"
    assert (call.op, call.bytes, call.launches, call.workspace) == ("jaxkern_f", 3 * 8192, 2, 64)
    assert (exchange.op, exchange.bytes) == ("all-reduce", 8192)
    assert (turn.copy, turn.bytes) == ("transpose", 2 * 8192)


needs_xla = pytest.mark.skipif(bool(compiled.missing()), reason=compiled.missing() or "found")
needs_kernels = pytest.mark.skipif(not registry.kernels_run(), reason="no kernels")
spec = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)


def rms_norm(x, w):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * w


def layer(x, w, norm, wanted):
    y = jax.nn.gelu(rms_norm(x, norm) @ w)
    return jnp.square(rms_norm(x + y, norm) - wanted).mean()


def language_loss(x, w, labels):
    logits = jax.nn.log_softmax((x @ w).astype(jnp.float32))
    return -jnp.take_along_axis(logits, labels[:, None], 1).mean()


def graph_layer(x, w, senders, receivers):
    return jnp.square(jax.ops.segment_sum((x @ w)[senders], receivers, len(x))).mean()


def aggregations(x, w, senders, receivers):
    """Mean, largest and smallest element, and deviation of the messages to each node, as in principal neighbourhood aggregation."""
    messages = jax.nn.relu(jnp.concatenate([x[senders], x[receivers]], -1) @ w)
    over = lambda reduce, m: reduce(m, receivers, len(x))
    count = jnp.maximum(over(jax.ops.segment_sum, jnp.ones(len(receivers))), 1)[:, None]
    mean = over(jax.ops.segment_sum, messages) / count
    squares = over(jax.ops.segment_sum, messages * messages) / count
    deviation = jnp.sqrt(jnp.maximum(squares - mean * mean, 0) + 1e-5)
    largest, smallest = over(jax.ops.segment_max, messages), over(jax.ops.segment_min, messages)
    extreme = [jnp.where(jnp.isfinite(m), m, 0) for m in (largest, smallest)]
    return jnp.concatenate([mean, *extreme, deviation], -1)


def two_aggregations(x, w, v, senders, receivers):
    x = aggregations(x, w, senders, receivers) @ v
    return jnp.square(aggregations(x, w, senders, receivers)).mean()


def masked_attention(q, k, v, kept):
    """Attention with a causal mask and padding, as written by hand."""
    scores = (q @ k.swapaxes(2, 3)).astype(jnp.float32) / 8
    place = jnp.arange(q.shape[2])
    mask = (place[:, None] >= place) & (kept[:, None, None, :] > 0)
    scores = scores - 1e9 * (1 - mask.astype(jnp.float32))
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True))) * mask
    weights = weights / (weights.sum(-1, keepdims=True) + 1e-9)
    return jnp.square((weights.astype(q.dtype) @ v).astype(jnp.float32)).mean()


def advantages(rewards, values, ends):
    def back(later, now):
        reward, value, following, end = now
        own = reward + 0.99 * following * (1 - end) - value + 0.99 * 0.95 * (1 - end) * later
        return own, own

    steps = rewards, values[:-1], values[1:], ends
    return jax.lax.scan(back, jnp.zeros_like(rewards[0]), steps, reverse=True)[1]


half = functools.partial(spec, dtype=jnp.bfloat16)
whole = functools.partial(spec, dtype=jnp.int32)
PROGRAMS = {
    "softmax": (lambda x: jax.nn.softmax(2 * x), spec(4096, 8192)),
    "a norm and its gradient": (
        jax.grad(lambda x, w: (rms_norm(x, w) ** 3).sum(), (0, 1)),
        half(8192, 4096),
        half(4096),
    ),
    "a layer": (jax.grad(layer, (0, 1, 2)), spec(8192, 1024), spec(1024, 1024), spec(1024), spec(8192, 1024)),
    "the loss of a language model": (jax.grad(language_loss, 1), half(4096, 512), half(512, 32000), whole(4096)),
    "a graph": (jax.grad(graph_layer, (0, 1)), spec(50000, 64), spec(64, 64), whole(400000), whole(400000)),
    "aggregations": (
        jax.grad(two_aggregations, (0, 1, 2)),
        *(spec(100_000, 64), spec(128, 64), spec(256, 64), whole(800_000), whole(800_000)),
    ),
    "masked attention": (
        jax.grad(masked_attention, (0, 1, 2)),
        *(half(4, 8, 1024, 64), half(4, 8, 1024, 64), half(4, 8, 1024, 64), whole(4, 1024)),
    ),
    "advantages": (advantages, spec(512, 8192), spec(513, 8192), spec(512, 8192)),
    "columns": (lambda x, y: jax.nn.logsumexp(x[:, None] - jnp.square(y), 0), spec(4096), spec(4096, 8192)),
}


@needs_xla
def test_programs_are_planned_for_the_gpu_that_they_are_compiled_for():
    seen, before = [], device.this_device

    def f(x):
        seen.append(device.this_device())
        return 2 * x

    compiled.compile(f, spec(8))
    assert seen == [device.describe(compiled.devices()[0])] and seen[0].l2_bytes == 50 * MB
    assert device.this_device is before


@needs_xla
@needs_kernels
@pytest.mark.optimized
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_more_bytes_copies_or_memory_than_plain(name):
    found = compiled.compare(PROGRAMS[name][0], *PROGRAMS[name][1:])
    plain, own = found["plain"], found["accelerated"]
    assert own.temporary <= LARGER * plain.temporary + WORKSPACE, (own.temporary, plain.temporary)
    assert own.moved <= plain.moved, [s for s in own.steps if s.bytes > MB]
    assert own.copied <= plain.copied, own.copies


def potentials(x, y, g):
    """Loops of two scales, and all of them once more: equal products in several loops."""
    for scale in (1.0, 2.0, 1.0, 2.0):
        step = lambda g, _, scale=scale: (0.5 * g + jnp.max(jnp.exp(x * scale @ y.T) * g, 0), None)
        g = jax.lax.scan(step, g, None, length=5)[0]
    return g


def experts(x, up, down, sizes):
    return jnp.sin(jax.lax.ragged_dot(jax.nn.silu(jax.lax.ragged_dot(x, up, sizes)), down, sizes)).sum()


def pulled(x, ids, weights):
    """Rows of x are added to others, in the memory of x."""
    y = x.reshape(-1, 3)
    return y.at[ids].add(y[100_001:][: len(ids)] * weights[:, None]).reshape(x.shape)


def columns_of_functions(x, y, g):
    return jax.lax.scan(lambda g, _: (0.5 * g + jnp.sum(jnp.tanh(x @ y.T) * g, 0), None), g, None, length=5)[0]


IN_LITTLE_MEMORY = {
    "functions before sums of columns": (columns_of_functions, (spec(4096, 256), spec(4096, 256), spec(4096)), ()),
    "equal products in loops": (potentials, (spec(4096, 256), spec(4096, 256), spec(4096)), ()),
    "experts": (
        jax.grad(experts, (0, 1, 2)),
        (spec(2048, 512), spec(64, 512, 512), spec(64, 512, 512), whole(64)),
        (),
    ),
    "a part of what is updated": (pulled, (spec(2, 4_000_000, 3), whole(150_000), spec(150_000)), (0,)),
}


@needs_xla
@needs_kernels
@pytest.mark.optimized
@pytest.mark.parametrize("name", IN_LITTLE_MEMORY)
def test_no_more_memory_than_plain(name, measured_jaxlib):
    f, args, donate = IN_LITTLE_MEMORY[name]
    found = compiled.compare(f, *args, donate=donate, accelerated={}, forced=dict(force=True))
    plain, *others = found.values()
    for own in others:
        assert own.temporary <= LARGER * plain.temporary, (own.temporary, plain.temporary)


def hidden_layers(x, w, v, norm):
    """Layers of a network with norms and relus, whose masks the gradient reads."""
    y = jax.nn.relu(rms_norm(x @ w, norm))
    return jnp.square(jax.nn.relu(rms_norm(y @ v, norm))).mean()


def normed_twice(x, w, v, norm):
    """A relu between two norms; the gradient of the first norm's scale alone reads the mask, in a kernel of XLA that reads x."""
    return jnp.square(rms_norm(jax.nn.relu(rms_norm(x, norm)) @ w, norm)).mean()


def layer_norm(x, w):
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-6) * w


def centered_twice(x, w, v, norm):
    return jnp.square(layer_norm(jax.nn.relu(layer_norm(x, norm)) @ w, norm)).mean()


@needs_xla
@needs_kernels
@pytest.mark.optimized
@pytest.mark.parametrize(
    "f, dtype", [(hidden_layers, "float32"), (normed_twice, "float32"), (centered_twice, "bfloat16")]
)
def test_masks_of_relus_are_not_stored(f, dtype):
    args = [spec(*shape, dtype=dtype) for shape in ((1 << 15, 1024), (1024, 1024), (1024, 1024), (1024,))]
    found = compiled.compare(jax.grad(f, (1, 2, 3)), *args)
    plain, own = found["plain"], found["accelerated"]
    assert any("jaxkern" in s.op for s in own.steps)
    # With two norms: partial sums of the gradient of a scale, beside plain's memory, and numbers of rows, which are stored.
    room, more = (0, 1) if f is hidden_layers else (own.workspace, 1.001)
    assert own.temporary <= LARGER * plain.temporary + room, (own.temporary, plain.temporary)
    assert own.moved <= more * plain.moved, (own.moved, plain.moved)


def oscillators(state, damping):
    x, v = jax.lax.fori_loop(0, 1000, lambda _, s: (s[0] + 0.01 * s[1], s[1] - 0.01 * (damping * s[1] + s[0])), state)
    return (x, v), jnp.square(x).mean()


def stopped(state, limit):
    halve = lambda s, m: jax.lax.while_loop(lambda s: s[0] > m, lambda s: (0.5 * s[0], s[1] + 1), s)
    return jax.vmap(halve)(state, limit)


@needs_xla
@needs_kernels
@pytest.mark.optimized
@pytest.mark.parametrize("f", [oscillators, stopped])
def test_loops_overwrite_a_donated_state(f):
    found = compiled.compare(f, (spec(1 << 20), spec(1 << 20)), spec(1 << 20), donate=(0,))
    plain, own = found["plain"], found["accelerated"]
    assert any("jaxkern" in s.op for s in own.steps) and not own.copies, own.copies
    assert own.peak <= LARGER * plain.peak and own.temporary <= MB, (own, plain)


def relaxed(x, y):
    return jax.lax.fori_loop(0, 100, lambda _, c: 0.9 * c + jnp.sin(y), x)


@needs_xla
@needs_kernels
@pytest.mark.optimized
@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: x - 0.1 * relaxed(x, y),
        lambda x, y: relaxed(relaxed(x, y), y),
        lambda x, y: relaxed(x, y).reshape(1 << 10, 1 << 10) @ y.reshape(1 << 10, 1 << 10),
    ],
    ids=["difference", "twice", "product"],
)
def test_states_that_are_still_needed_are_not_copied(f):
    own = compiled.compare(f, spec(1 << 20), spec(1 << 20), donate=(0,))["accelerated"]
    assert any("jaxkern" in s.op for s in own.steps) and not own.copies, own.copies


def slopes(slope, group, x, y):
    return jnp.square((slope[group] * x).sum(-1) - y).sum()


@needs_xla
@needs_kernels
@pytest.mark.optimized
def test_sums_in_a_fixed_order_store_no_updates():
    """The order of 2 M edges is sorted numbers and positions, and a workspace of the same size: no product of edges x features."""
    edges = 1 << 21
    args = spec(20000, 8), whole(edges), spec(edges, 8), spec(edges)
    report = compiled.compare(jax.grad(slopes), *args, fixed={"deterministic": True})["fixed"]
    assert report.temporary <= 4 * edges * 7 + MB, report.temporary / edges / 4


@needs_xla
@pytest.mark.optimized
def test_collectives_of_several_devices():
    mesh, of = compiled.mesh(data=2, model=2), jax.sharding.PartitionSpec
    x = jax.ShapeDtypeStruct((1024, 512), jnp.float32, sharding=jax.NamedSharding(mesh, of("data", "model")))
    report = compiled.read(compiled.compile(lambda x: jnp.exp(x).sum(1), x))
    assert [(s.op, s.bytes) for s in report.collectives] == [("all-reduce", 512 * 4)]
    assert report.moved == pytest.approx(x.size, rel=0.01) and np.prod(mesh.devices.shape) == 4
