"""Rows of plain JAX programs under `accelerate(only="rows")`: results, what is taken, and where regions end."""

import functools
import re

import exact_row_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_row_programs
from accelerated import PLATFORM, close

import jaxkern
from benchmarks import _by_hand
from jaxkern._core import compat, registry

forced = jaxkern.accelerate(only="rows", force=True)
needs_kernels = pytest.mark.skipif(not registry.kernels_run(), reason="no kernels")


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), dtype)


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def regions(f, *args, platform=PLATFORM):
    """What `explain` says of the rows of f."""
    return [d for d in jaxkern.explain(f, platform)(*args) if d.operation == "rows"]


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def layer_norm(x, scale):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6) * (1 + scale)


def residual(x, scale):
    y = x + jnp.sin(x[..., ::-1])
    return rms_norm(y, scale) @ jnp.ones((x.shape[-1], 2)), y


def capped(x, scale):
    mask = jnp.arange(x.shape[-2])[:, None] >= jnp.arange(x.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask, 5 * jnp.tanh(x * scale / 5), -1e30), axis=-1)
    return weights @ x.swapaxes(-1, -2)


def labels_loss(x, scale):
    labels = jnp.arange(x.shape[-2]) % x.shape[-1]
    log_probabilities = jax.nn.log_softmax(x * scale)
    picked = jnp.take_along_axis(log_probabilities, jnp.broadcast_to(labels, x.shape[:-1])[..., None], axis=-1)
    return -picked.mean()


def one_hot_loss(x, scale):
    logits, classes = x * scale, x.shape[-1]
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    picked = (jax.nn.one_hot(jnp.arange(x.shape[-2]) % classes, classes) * logits).sum(-1)
    return (normalizer - picked + 1e-4 * normalizer**2).mean()


def sinkhorn(x, scale):
    f = -jax.nn.logsumexp(x, axis=-1, keepdims=True)
    return (x + f - jax.nn.logsumexp(x + f, axis=-2, keepdims=True)) * scale


FUNCTIONS = [rms_norm, layer_norm, residual, capped, labels_loss, one_hot_loss, sinkhorn]


def total(f):
    return lambda *args: sum(jnp.sum(jnp.cos(y).astype(jnp.float32)) for y in jax.tree.leaves(f(*args)))


TRANSFORMS = {
    "value": lambda f: f,
    "gradient": lambda f: jax.value_and_grad(total(f), (0, 1)),
    "remat": lambda f: jax.grad(jax.checkpoint(total(f)), (0, 1)),
    "vmap of the gradient": lambda f: jax.vmap(jax.grad(total(f), (0, 1)), (0, None)),
    "scan": lambda f: lambda x, s: jax.lax.scan(lambda c, x: (c + total(f)(x, s), f(x, s)), 0.0, x),
    "jvp": lambda f: lambda x, s: jax.jvp(f, (x, s), (jnp.sin(x), s)),
}


CASES = [(f, "gradient") for f in FUNCTIONS] + [(f, "value") for f in (capped, one_hot_loss, sinkhorn)]
CASES += [(labels_loss, t) for t in TRANSFORMS if t not in ("value", "gradient")]


@pytest.mark.parametrize("f, transform", CASES, ids=lambda c: c if isinstance(c, str) else c.__name__)
def test_results(f, transform):
    g, args = jax.jit(TRANSFORMS[transform](f)), (normal(3, 8, 16), normal(16))
    plain = g(*args)
    with forced:
        close(plain, g(*args))
        assert any(d.taken for d in regions(g, *args))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("number", range(4))
def test_random_programs(number, dtype):
    random_row_programs.check(random_row_programs.Program(0, number, dtype))


@pytest.mark.parametrize("number", range(3))
def test_random_programs_of_exact_numbers(number):
    exact_row_programs.Program(0, number).check()


def test_gradients_in_bfloat16_are_no_less_accurate():
    """Regions round where they store, the plain program after each operation; both are compared with float64."""
    make, data = _by_hand.PROGRAMS["llama"], _by_hand.PROGRAMS["llama"]("float32", True)[2]
    rng, shapes = np.random.default_rng(0), jax.eval_shape(make("float32", True)[1], jax.random.key(0))
    params = jax.tree.map(lambda s: np.asarray(jnp.asarray(rng.normal(0, 0.1, s.shape), jnp.bfloat16)), shapes)
    gradient = lambda dtype: jax.jit(jax.grad(make(dtype, True)[0]))
    plainly = gradient("bfloat16")
    plain = plainly(params, *data)
    with forced:
        own = plainly(params, *data)
        assert sum(d.taken for d in regions(plainly, params, *data)) >= 15
    with compat.enable_x64():
        exact = gradient("float64")(jax.tree.map(lambda p: p.astype(np.float64), params), *data)
        exact = jax.tree.map(np.asarray, exact)

    def error(found):
        off = lambda a, b: np.mean((np.asarray(a, np.float64) - b) ** 2) / np.mean(np.square(b))
        return np.sqrt(np.mean(jax.tree.leaves(jax.tree.map(off, found, exact))))

    assert error(own) <= 1.1 * error(plain)


# ---- which regions there are


def shapes(found):
    return [d.shapes for d in found]


@needs_kernels
@pytest.mark.parametrize("name, least", [("llama", 15), ("t5 encoder", 12)])
def test_a_training_step(name, least):
    """Losses, norms with residuals and some of their gradients are taken."""
    loss, params, data = _by_hand.PROGRAMS[name]("bfloat16", False)
    shapes = jax.eval_shape(lambda: params(jax.random.key(0)))
    with jaxkern.accelerate(only="rows"):
        found = regions(jax.value_and_grad(loss), shapes, *data, platform="cuda")
    assert sum(d.taken for d in found) >= least


@needs_kernels
def test_the_loss_is_one_region():
    """Labels' logits, the normalizer and the gradient: logits are read once and written once, in their own type."""
    f = lambda x, w: labels_loss((x @ w).astype(jnp.float32), 1.0)
    args = spec(8192, 1024, dtype=jnp.bfloat16), spec(1024, 32000, dtype=jnp.bfloat16)
    with jaxkern.accelerate(only="rows"):
        (found,) = regions(jax.value_and_grad(f), *args, platform="cuda")
    assert found.taken and found.shapes == "bf16[8192,32000]"
    assert found.bytes == pytest.approx(2 * 8192 * 32000 * 2, rel=0.001)


@needs_kernels
def test_what_the_backward_pass_reads():
    """The norm is computed again from its operand, with the numbers of its rows."""
    f = lambda x, s, w: jnp.sum(jnp.sin((rms_norm(x @ w, s) @ w).astype(jnp.float32)))
    args = spec(65536, 1024), spec(1024), spec(1024, 1024)
    with jaxkern.accelerate(only="rows"):
        forward, backward = regions(jax.grad(f, (0, 1, 2)), *args, platform="cuda")
    array = 65536 * 1024 * 4
    assert forward.bytes == pytest.approx(2 * array, rel=0.01)
    assert backward.taken and backward.bytes == pytest.approx(3 * array, rel=0.01)


@needs_kernels
def test_the_mask_of_a_relu_is_not_stored():
    """The backward region reads the operand of the norm in any case: it computes the mask again from there."""
    f = lambda x, s, w: jnp.square(jax.nn.relu(rms_norm(x @ w, s)) @ w).sum()
    args = spec(65536, 1024), spec(1024), spec(1024, 1024)
    with jaxkern.accelerate(only="rows"):
        found = regions(jax.grad(f, (0, 1, 2)), *args, platform="cuda")
    assert found[-1].taken and found[-1].bytes == pytest.approx(3 * 65536 * 1024 * 4, rel=0.01)
    assert not any("bool" in d.shapes for d in found), shapes(found)
    rng = np.random.default_rng(0)
    small = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((96, 64), (64,), (64, 64))]
    plain = jax.jit(jax.grad(f, (0, 1, 2)))(*small)
    with forced:
        close(plain, jax.jit(jax.grad(lambda *args: f(*args), (0, 1, 2)))(*small))


@needs_kernels
def test_estimates():
    """`explain` shows what the model says of each region, taken or left."""
    f, args = lambda x, s: residual(x, s), (spec(4096, 1024), spec(1024))
    with jaxkern.accelerate(without="rows"):
        assert not regions(f, *args, platform="cuda")
    (found,) = regions(f, *args, platform="cuda")
    (small,) = regions(jax.nn.softmax, spec(64, 1024), platform="cuda")
    assert re.fullmatch(
        r"XLA: 2 kernels, 83\.9 MB, \d+ us; one kernel: 134 MB, \d+ us \(67\.1 MB for arrays that XLA does not store\); "
        r"would need 33\.5 MB more than plain \(33\.6 MB\)",
        found.reason,
    )
    assert re.fullmatch(r"XLA: 1 kernel, 0\.524 MB, 2 us; one kernel: 0\.524 MB, 2 us", small.reason)
    assert not small.taken and not found.taken


@needs_kernels
def test_functions_by_name():
    """Functions that have kernels of their own are parts of a region where it wins, and stay where it is left."""
    args = spec(8192, 1024, dtype=jnp.bfloat16), spec(1024, 32000, dtype=jnp.bfloat16)
    loss = jax.grad(lambda x, w: one_hot_loss((x @ w).astype(jnp.float32), 1.0))
    weights = jax.grad(lambda x, w: jnp.sum(jnp.sin((jax.nn.softmax(x @ w) @ w.T).astype(jnp.float32))))
    with jaxkern.accelerate(only=("rows", "softmax", "logsumexp")):
        assert {d.operation for d in jaxkern.explain(loss)(*args).taken} == {"rows"}
        assert "softmax" in {d.operation for d in jaxkern.explain(weights)(*args).taken}


def test_a_region_ends():
    """At products, and where a value that left would come back: the second sum is no part of the first region."""

    def f(x, w):
        y = x / jnp.sum(x, -1, keepdims=True)
        return y + (y @ w) / jnp.sum(y @ w, -1, keepdims=True)

    args = normal(8, 16), normal(16, 16)
    plain = jax.jit(f)(*args)
    with forced:
        close(plain, jax.jit(f)(*args))
        assert len(regions(f, *args)) == 2


def test_regions_that_depend_on_each_other_by_way_of_others():
    """Two regions that become one depend on what either did, and so do those that depend on one of them."""

    def f(u, p, m, n):
        x, a = jnp.exp(u), p * 2.0
        b, k = m @ x + 1.0, jnp.exp(n @ a)
        return *(y.sum(1) for y in (x, b, a, k)), (a * b).sum(1), (k * x).sum(1)

    args = normal(8, 16), normal(12, 16), normal(12, 8), normal(8, 12)
    with forced:
        close(jax.jit(f)(*args), jax.jit(f)(*args))
        assert any(d.taken for d in regions(f, *args))


@needs_kernels
@pytest.mark.parametrize("shared", [False, True])
def test_rows_along_two_axes(shared):
    """Half steps of Sinkhorn's algorithm reduce arithmetic on a product along either axis: each region reads the product alone."""

    def f(x, y, a, b):
        scaled = lambda a, b: (a[:, None] + b - x @ y.T) / 0.1
        first = scaled(a, b)
        b = b - jax.nn.logsumexp(first, 0)
        return a - jax.nn.logsumexp(first if shared else scaled(a, b), 1), b

    args = spec(8192, 64), spec(8192, 64), spec(8192), spec(8192)
    with jaxkern.accelerate(only=("rows", "logsumexp"), force=True):
        found = regions(f, *args, platform="cuda")
    assert [d.taken for d in found] == [True, True], found
    assert [d.bytes for d in found] == [pytest.approx(8192 * 8192 * 4, rel=0.01)] * 2


@needs_kernels
def test_one_array_of_places_along_two_dimensions():
    """A mask of `i[:, None] >= i` is the mask of two such arrays."""

    def f(two, x, c):
        i = jnp.arange(2048) - 1
        j = jnp.arange(2048) - 1 if two else i
        weights = lambda x: jax.nn.softmax(jnp.where(i[:, None] >= j, 30 * jnp.tanh(x / 30), -1e30), -1)
        return jax.vjp(weights, x)[1](c)

    args = [spec(8, 2048, 2048, dtype=jnp.bfloat16)] * 2
    with jaxkern.accelerate(only="rows"):
        (one,), (two,) = (
            regions(lambda *args, two=two: f(two, *args), *args, platform="cuda") for two in (False, True)
        )
    assert one.taken and one.reason == two.reason, (one, two)


@needs_kernels
@pytest.mark.parametrize("width, taken", [(16, False), (1024, True)])
def test_memory_is_not_taken_for_time(width, taken):
    """XLA computes the weights of a mixture where a product with few columns reads them; a kernel would store them."""

    def f(x, y, means):
        scores = x @ means.T + y @ jnp.abs(means).T
        e = jnp.exp(scores - scores.max(-1, keepdims=True))
        weights = e / e.sum(-1, keepdims=True)
        return weights @ means, weights.sum(0)

    args = spec(1 << 18, width), spec(1 << 18, width), spec(64, width)
    with jaxkern.accelerate(only="rows"):
        (found,) = regions(f, *args, platform="cuda")
    assert found.taken == taken and ("would need" in found.reason) == (not taken), found
    # Rows of 64 weights, which XLA does not store if products have few columns.
    assert ("134 MB for arrays that XLA does not store" in found.reason) == (not taken), found


@needs_kernels
def test_costs_that_another_axis_reads_are_computed_again():
    """Both halves of a step, as in Sinkhorn's algorithm, compute costs from a product. The half along the last axis waits for the other one,
    whose sines are left to XLA, and reads the product alone."""

    def f(product, x, y, f, g):
        costs = lambda: x[:, None] + y[None] - 2 * product
        g = g - jax.nn.logsumexp(jnp.sin(jnp.sin(f[:, None] + g[None] - costs())), 0)
        return f - jax.nn.logsumexp(f[:, None] + g[None] - costs(), 1), g

    args = spec(8192, 8192), *[spec(8192)] * 4
    with jaxkern.accelerate(only=("rows", "logsumexp")):
        found = regions(f, *args, platform="cuda")
    (taken,) = [d for d in found if d.taken]
    assert taken.operation == "rows" and taken.bytes == pytest.approx(4 * 8192 * 8192, rel=0.01)


@needs_kernels
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shape", [(8192, 1024), (1, 8192, 1024)])
def test_operands_of_called_functions(shape, fused):
    """What XLA would compute inside of a function that is called is stored for a kernel in it, and counts twice."""

    @jax.jit
    def called(x):
        x = x.reshape(8192, 1024)
        for _ in range(70):  # it is not inlined
            x = x * 1.5
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)), x

    with jaxkern.accelerate(only="rows"):
        (found,) = regions(lambda x: called(jnp.sin(x) if fused else x), spec(*shape), platform="cuda")
    assert found.bytes == pytest.approx((5 if fused else 3) * 8192 * 1024 * 4, rel=0.01)


@needs_kernels
@pytest.mark.parametrize(
    "before, after",
    [
        (lambda x: x[0], lambda y: y[None]),
        (lambda x: x.reshape(-1, 4096), lambda y: y.reshape(1, -1, 4096)),
        (lambda x: jnp.squeeze(x, 0), lambda y: y.reshape(-1, 64, 64)[:, None]),
        (lambda x: x[0], lambda y: functools.reduce(lambda y, _: jax.lax.squeeze(y[None], (0,)), range(400), y)),
    ],
)
def test_another_shape_of_the_same_elements_moves_nothing(before, after):
    f = lambda x: after(jax.nn.softmax(3 * jnp.tanh(before(x)), -1))
    (found,) = regions(f, spec(1, 16384, 4096), platform="cuda")
    (plain,) = regions(lambda x: jax.nn.softmax(3 * jnp.tanh(x), -1), spec(16384, 4096), platform="cuda")
    assert found.taken and found.bytes == plain.bytes, (found, plain)


# Arrays in pieces, and of pieces, by primitives of their own and by slices, concatenations and broadcasts.
PIECES = {
    "split": (lambda x: jnp.split(x, 2, -1), lambda x: [x[:, :2048], x[:, 2048:]]),
    "unstack": (lambda x: jnp.unstack(x.reshape(2, -1, 4096)), lambda x: [x[:2048], x[2048:]]),
    "stack": (
        lambda x: [jnp.stack([x, jnp.sin(x)])],
        lambda x: [jnp.concatenate([x[None], jnp.sin(x)[None]])],
    ),
    "tile": (
        lambda x: [jnp.tile(x, (2, 1))],
        lambda x: [jnp.broadcast_to(x[None], (2, *x.shape)).reshape(-1, x.shape[-1])],
    ),
}


@needs_kernels
@pytest.mark.parametrize("name", PIECES)
def test_pieces_are_not_stored(name):
    """XLA cuts and joins arrays where it reads them, however the program says it."""
    given, plainly = (
        regions(
            lambda x: [rms_norm(piece, 1) for piece in f(x @ jnp.ones((1024, 4096)))], spec(4096, 1024), platform="cuda"
        )
        for f in PIECES[name]
    )
    assert given and "for arrays that XLA does not store" in given[0].reason, given
    assert [d.reason.split(";")[1] for d in given] == [d.reason.split(";")[1] for d in plainly]


@needs_kernels
def test_what_is_compared_is_not_computed_again():
    """Another rounding of x might have no element that reaches the least of its largest ones."""

    def f(u, compared):
        x = 30 * jnp.tanh(u.astype(jnp.float32) / 30)
        least = jax.lax.top_k(x, 1)[0][:, -1:] if compared else 0.0
        return jnp.sum(x, -1), jax.nn.softmax(jnp.where(x >= least, x, -jnp.inf), -1).astype(jnp.bfloat16)

    array = 4096 * 4096
    for compared in (False, True):
        with jaxkern.accelerate(only="rows"):
            found = regions(lambda u: f(u, compared), spec(4096, 4096, dtype=jnp.bfloat16), platform="cuda")
        assert sum(d.bytes for d in found) == pytest.approx((12 if compared else 4) * array, rel=0.01)


def test_effects_stay_in_order(capfd):
    def f(x, w):
        y = x / jnp.sum(x, -1, keepdims=True)
        jax.debug.print("first {}", y[0, 0], ordered=True)
        z = jnp.exp(x @ w)
        jax.debug.print("second {}", z[0, 0], ordered=True)
        return y * 2, z / jnp.sum(z, -1, keepdims=True) + y

    with forced:
        jax.block_until_ready(jax.jit(f)(normal(8, 16), normal(16, 16)))
    jax.effects_barrier()
    out = capfd.readouterr().out
    assert 0 <= out.index("first") < out.index("second")


def test_lines_and_scopes():
    def f(x):
        with jax.named_scope("outer"):
            return jax.nn.softmax(x) * 2

    x = normal(8, 16)
    with forced:
        (found,) = regions(f, x)
        text = jax.jit(f).lower(x).as_text(debug_info=True)
    assert found.source.startswith(("tests/test_accelerate_rows.py", __file__)) and "outer" in text


def test_donated():
    f = jax.jit(rms_norm, donate_argnums=0)
    x, scale = normal(8, 16), normal(16)
    plain = rms_norm(x, scale)
    with forced:
        own = f(x, scale)
    close(plain, own)
    assert x.is_deleted()


def test_cond_and_nested_jit():
    inner = jax.jit(rms_norm)

    def f(x, s):
        return jax.lax.cond(x[0, 0] > 0, inner, lambda x, s: jax.nn.softmax(inner(x, s)), x, s)

    args = -jnp.abs(normal(8, 16)), normal(16)
    plain = jax.jit(f)(*args)
    with forced:
        close(plain, jax.jit(f)(*args))
        assert len(regions(f, *args)) == 2


@needs_kernels
def test_off_outside():
    """A program is compiled again for each setting; without one it has no region."""
    f, x = jax.jit(lambda x: jax.nn.softmax(x) + 1), spec(8, 16)
    kernels = lambda: f.trace(x).lower(lowering_platforms=("cuda",)).as_text().count("jaxkern_row_kernel")
    assert not kernels()
    with forced:
        assert kernels()
    assert not kernels()


def beside_a_token(x):
    y = jax.nn.softmax(x)
    y, _ = jax.lax.optimization_barrier((y - y.mean(-1, keepdims=True), jax.lax.create_token()))
    return y * 2


@pytest.mark.parametrize(
    "f, shape",
    [
        (lambda x, y: y @ (x / jnp.linalg.norm(x, axis=-1, keepdims=True)), "n, 1024"),
        (lambda x, y: (y * x.sum(-1)[:, None], rms_norm(x, 1.0), x + 1), "1024, n"),
        (lambda x, y: (jnp.sin(y).sum(), rms_norm(x, 1.0), x + 1), "n, 8"),
        (lambda x, y: beside_a_token(x), "8"),
    ],
)
def test_rows_beside_sizes_that_are_not_known_and_tokens(f, shape):
    args = spec(1024, 1024), spec(*jax.export.symbolic_shape(shape))
    export = lambda: jax.export.export(jax.jit(lambda *args: f(*args)), platforms=["cuda"])(*args)
    lower = lambda: jax.jit(lambda *args: f(*args)).trace(*args).lower(lowering_platforms=("cuda",))
    run = export if "n" in shape else lower
    try:
        run()
    except AttributeError:
        pytest.skip("plain JAX 0.10 does not lower a token in a barrier")
    with jaxkern.accelerate():
        run()


def test_rows_on_an_explicit_mesh_of_one_device():
    """Numbers of rows have fewer dimensions than what they are made of."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:1])
    f = lambda x: (x.mean(-1), x.max(-1), rms_norm(x, 1.0))
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((4096, 32000), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("d")))
        assert any(d.taken for d in regions(f, x, platform="cuda"))
        small = jax.device_put(normal(8, 64), jax.NamedSharding(mesh, jax.P("d")))
        plain = jax.jit(f)(small)
        with forced:
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), jax.jit(f)(small), plain)
        with jaxkern.accelerate(force=True):
            np.testing.assert_array_equal(jax.jit(jnp.argsort)(small), np.argsort(small, -1))
