"""Loops under `jaxkern.accelerate`: which are taken, what is left and at which operation, and their results."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_loops
from accelerated import both, close, forced
from conftest import EMULATED, ON_GPU
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from scan_reference import rounded_where_stored
from test_scan import TOLERANCE

import jaxkern
from jaxkern._core import compat, launch, registry
from jaxkern._engines.loops.program import Program

needs_kernels = pytest.mark.skipif(not registry.kernels_run(), reason="no kernels")


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def decay(h, x):
    h = 0.9 * h + jnp.sin(x)
    return h, h


def gated(c, w, x, f):
    def body(c, xf):
        forget = jax.nn.sigmoid(xf[1] + w * c)
        c = forget * c + (1 - forget) * xf[0]
        return c, jnp.tanh(c)

    return lax.scan(body, c, (x, f))[1]


def griffin(x, w, gates, out):
    """A block with products around a gated recurrence."""
    h = jax.nn.gelu(x @ w)
    a = jax.nn.sigmoid(x @ gates)
    h = lax.scan(lambda h, ax: (ax[0] * h + jnp.sqrt(1 - ax[0] ** 2) * ax[1],) * 2, jnp.zeros_like(h[0]), (a, h))[1]
    return x + h @ out


def advantages(rewards, values, done):
    def body(carry, x):
        advantage, after = carry
        reward, value, done = x
        advantage = reward + 0.99 * after * (1 - done) - value + 0.95 * 0.99 * (1 - done) * advantage
        return (advantage, value), advantage

    first = jnp.zeros_like(values[0]), values[-1]
    return lax.scan(body, first, (rewards, values, done), reverse=True)[1]


def walk(key, x):
    def body(carry, _):
        key, x = carry
        key, sub = jax.random.split(key)
        return (key, x + jax.random.normal(sub, x.shape)), None

    return lax.scan(body, (key, x), None, length=12)[0][1]


def van_der_pol(x, v):
    step = lambda _, s: (s[0] + 0.01 * s[1], s[1] + 0.01 * ((1 - s[0] * s[0]) * s[1] - s[0]))
    return lax.fori_loop(0, 50, step, (x, v))


def recurrent(w, x):
    return lax.scan(lambda h, x: (jnp.tanh(h @ w + x),) * 2, x[0], x)[1]


def loss(f, argnums=0):
    return jax.grad(lambda *a: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(*a))), argnums)


def stored(y, u):
    """An integrator that stores its path: step i reads u[i] and writes path[i]."""

    def body(i, carry):
        y, path = carry
        y = y + 0.1 * (u[i] - jnp.sin(y))
        return y, path.at[i].set(y)

    return lax.fori_loop(0, len(u), body, (y, jnp.zeros((len(u), *y.shape), y.dtype)))[1]


X = jnp.asarray(np.random.default_rng(0).normal(size=(12, 4, 8)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(8, 8)) / 4, jnp.float32)
KEY = jax.random.key(0)
LONG = jnp.asarray(np.random.default_rng(2).normal(size=(80, 4, 8)), jnp.float32)
while_loop = lambda x: lax.while_loop(lambda s: s[1] > 3, lambda s: (jnp.cos(s[0]), s[1] - 2), (x, 40))[0]
decays = lambda x: lax.scan(decay, x[0], x)[1]
# What a program does, f, its arguments, how many kernels it has.
TAKEN = {
    "scan": (decays, (X,), 1),
    "gradient": (loss(lambda c, w, x: gated(c, w, x, x), (0, 1, 2)), (X[0], W[0], X), 2),
    "gradient of remat": (loss(jax.checkpoint(decays)), (X,), 3),
    "vmap": (jax.vmap(decays, 1, 1), (X,), 1),
    "vmap of the gradient": (
        jax.vmap(loss(lambda c, w, x: gated(c, w, x, x), (0, 1)), (None, 0, None)),
        (X[0], W, X),
        2,
    ),
    "jvp": (lambda x: jax.jvp(decays, [x], [jnp.cos(x)]), (X,), 1),
    "a block with products": (loss(griffin, (0, 1, 2, 3)), (X, W, W, W), 2),
    "reverse": (advantages, (X, X * 0.5, (X > 1).astype(X.dtype)), 1),
    "a key": (walk, (jax.random.key(0), X[0]), 1),
    "a key for each lane": (jax.vmap(walk), (jax.random.split(jax.random.key(0), 4), X[0]), 1),
    "words of a key": (walk, (jax.random.PRNGKey(0), X[0]), 1),
    "fori_loop": (van_der_pol, (X, X), 1),
    "map": (lambda x: lax.map(lambda y: jnp.sin(y) * W[0], x), (X,), 1),
    "while_loop": (while_loop, (X,), 1),
    "in a loop": (lambda x: lax.scan(lambda c, _: (jnp.sort(decays(c)), None), x, length=9)[0], (X,), 1),
    "a reduction of few elements": (
        lambda x: lax.scan(lambda h, y: (h / jnp.max(jnp.abs(h), -1, keepdims=True) + y, h), x[0], x)[1],
        (X[..., :3],),
        1,
    ),
    "a reduction of no elements": (
        lambda x: lax.scan(lambda h, x: (h * x + jnp.sum(h[:, :0], 1, keepdims=True), None), x[0], x)[0],
        (X,),
        1,
    ),
    "pieces": (
        loss(lambda x: lax.scan(lambda h, x: (jax.nn.sigmoid(x[:, :40]) * h + x[:, 40:], h), x[0, :, :40], x)[1]),
        (jnp.tile(X, 10),),
        2,
    ),
    "columns": (
        loss(lambda x: lax.scan(lambda h, x: (jnp.stack([h[:, 1], jnp.sin(h[:, 0])], -1), x[:, 0]), x[0, :, :2], x)[1]),
        (X,),
        2,
    ),
    "an index that is an array of one number": (
        lambda x: lax.scan(lambda h, x: (h.at[jnp.zeros(1, int)].set(x[:1]) * x, h[jnp.ones(1, int)]), x[0], x),
        (X,),
        1,
    ),
    "products of rows": (loss(recurrent, (0, 1)), (W, X), 2),
    "reads and writes at i": (stored, (X[0], LONG), 1),
    "their gradient": (loss(stored, (0, 1)), (X[0], LONG), 2),
    "vmap of their gradient": (jax.vmap(loss(stored, (0, 1)), (0, 1)), (X[0], LONG), 2),
    "gradient of an array that the loop reads and writes": (
        loss(lambda x: lax.fori_loop(3, 80, lambda i, y: y.at[i].set(jnp.sin(y[i - 3]) / 2 - y[i - 1] * x[i] / 4), x)),
        (LONG,),
        2,
    ),
    "in a branch": (lambda x: lax.cond(x[0, 0, 0] > 0, decays, lambda x: x, x), (X,), 1),
}


@needs_kernels
@pytest.mark.parametrize("what", TAKEN)
def test_taken(what):
    """Loops become kernels, and no other loop is there; results are plain JAX's."""
    f, args, kernels = TAKEN[what]
    with jaxkern.accelerate():
        text = jax.jit(lambda *a: f(*a)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    found = launch.programs(text)
    assert len(found) == kernels and all("operation jaxkern_scan(" in p for p in found)
    assert text.count("stablehlo.while") == (what == "in a loop")
    plain, own, taken = both(f, *args)
    close(plain, own)
    assert taken.count("scan") >= kernels  # JAX makes random bits by loops on a CPU


@needs_kernels
def test_steps_along_another_axis():
    """[batch, steps, features], transposed for the scan and back, is read and written in place, forward and backward."""

    def f(x):
        move = lambda y: jnp.swapaxes(y, 0, 1)
        return move(lax.scan(decay, x[:, 0], move(x))[1])

    for make, count in ((f, 1), (loss(f), 2), (jax.vmap(decays), 1)):
        with jaxkern.accelerate():
            text = (
                jax.jit(lambda x, make=make: make(x))
                .trace(spec(4, 16, 64))
                .lower(lowering_platforms=("cuda",))
                .as_text()
            )
        found = launch.programs(text)
        assert len(found) == count and all("float32[4,16,64]" in p for p in found)
        assert not any("float32[16,4,64]" in p for p in found)
    x = lambda x: jnp.swapaxes(lax.scan(decay, x[:, 0], x.T)[1], 0, 1)  # steps are the fastest dimension: not in place
    with jaxkern.accelerate():
        text = jax.jit(lambda y: x(y)).trace(spec(64, 16)).lower(lowering_platforms=("cuda",)).as_text()
    assert "float32[16,64]" in launch.programs(text)[0]


@needs_kernels
def test_last_carries_take_the_memory_of_donated_arguments():
    """XLA would copy them there, if the kernel wrote them elsewhere. Otherwise it would copy the argument, or the result, as well."""
    counted = lambda x, y: lax.fori_loop(0, 100, lambda _, c: (c[0] + 0.1 * c[1], c[1] - 0.1 * jnp.sin(c[0])), (x, y))
    stops = lambda c: lax.while_loop(lambda c: c[0] < 1, lambda c: (1.1 * c[0] + 0.01, c[1] + 1), c)
    until = lambda x, y: jax.vmap(lambda x, y: stops((x, y)))(x, y)
    twice = lambda x, y: lax.scan(lambda c, _: (c * x + y, None), x, None, length=100)[0]
    marked = lambda x, y: jaxkern.scan(lambda c, _: (c * 0.5 + y, None), x, None, length=100)[0]
    loop = lambda x, y: lax.fori_loop(0, 100, lambda _, c: 0.5 * c + jnp.sin(y), x)
    rows = lambda x: x.reshape(1 << 9, 1 << 9)
    drawn = lambda c, y: (jax.random.fold_in(c[0], 1), c[1] + y * jax.random.uniform(c[0], c[1].shape))
    with_key = lambda x, y: lax.fori_loop(0, 9, lambda _, c: drawn(c, y), (jax.random.key(0), x))[1]
    for f, donated, aliases in (
        (counted, (0, 1), [0, 1]),
        (counted, (1,), []),  # the first result has the memory of the second argument
        (counted, (), []),
        (until, (0, 1), [0, 1]),
        (twice, (0,), []),
        (marked, (0,), [0]),
        (lambda x, y: loop(rows(x), rows(y)).reshape(-1), (0,), [0]),
        (lambda x, y: (lambda z: (0.5 * z, jnp.square(z).sum()))(loop(x, y)), (0,), [0]),
        (with_key, (0,), [0]),
        (lambda x, y: (lambda z: z + z[::-1])(loop(x, y)), (0,), []),
        (lambda x, y: (lambda z: z[0] + z[1])(counted(x, y)), (0,), [0]),
        (lambda x, y: counted(x, y)[::-1], (0, 1), []),  # each would have the other's memory
        (lambda x, y: x - 0.1 * loop(x, y), (0,), []),
        (lambda x, y: (loop(x, y), x.sum()), (0,), []),
        (lambda x, y: (x.sum(), loop(x, y)), (0,), []),
        (lambda x, y: rows(loop(x, y)) @ rows(y), (0,), []),
    ):
        with jaxkern.accelerate():
            step = jax.jit(lambda *a, f=f: f(*a), donate_argnums=donated).trace(spec(1 << 18), spec(1 << 18))
            text = step.lower(lowering_platforms=("cuda",)).as_text()
        assert len(launch.programs(text)) == 1 + (f is with_key)
        found = re.findall(r"output_operand_alias<.*?operand_index = (\d+)", text)
        assert len(found) == len(aliases), (f, donated, found)


def few(x):
    return lax.scan(decay, x[0], x[:4])[1]


def mean(x):
    return lax.scan(lambda h, x: (h - jnp.max(x), h), x[0], x)[1]


LEFT = {
    "few steps": (few, (X,), "4 steps are few, taken from 8"),
    "unrolled": (
        lambda x: lax.scan(decay, x[0], x, unroll=True)[1],
        (X,),
        "12 steps unrolled by 12 are few, taken from 85",
    ),
    "a product": (
        recurrent,
        (spec(5000, 5000), spec(12, 4, 5000)),
        "the body uses dot_general at .*test_accelerate_loops.py:[0-9]+.*a product of 100000000 multiplications",
    ),
    "a reduction": (
        mean,
        (spec(12, 2, 5000),),
        "the body uses reduce_max at .*test_accelerate_loops.py:[0-9]+.*a reduction over lanes",
    ),
    "an index": (
        lambda x, k: lax.fori_loop(0, 99, lambda i, s: s + x[i * k % 99], x[0]),
        (spec(99, 4, 8), spec(dtype=jnp.int32)),
        "the body uses dynamic_slice at .*Pass what step i reads at i as xs of the scan",
    ),
    "a function of one element": (
        lambda x: lax.scan(lambda h, x: (h.at[0].apply(jnp.sin) + x, None), x[0], x)[0],
        (X,),
        "the body uses scatter at ",
    ),
    "a key among several": (
        lambda x: lax.scan(
            lambda c, x: ((c[0], c[1] + 1), x * jax.random.uniform(c[0][c[1] % 4])), (jax.random.split(KEY, 4), 0), x
        )[1],
        (X,),
        "the body uses dynamic_slice at ",
    ),
    "more steps than rows": (
        lambda x: lax.fori_loop(0, 2**31 - 2, lambda i, s: s + x[i % 99], x[0]),
        (spec(99, 4, 8),),
        "the body uses dynamic_slice at ",
    ),
    "a write at an index": (
        lambda x, k: lax.fori_loop(0, 99, lambda i, y: y.at[i * k % 99].set(x[i]), x),
        (spec(99, 4, 8), spec(dtype=jnp.int32)),
        "the body uses scatter at .*Return what step i writes at i as ys of the scan",
    ),
    "a write to a carry that is read": (
        lambda x: lax.fori_loop(0, 99, lambda i, y: y.at[i].set(x[i] + y[0]), x),
        (spec(99, 4, 8),),
        "the body uses scatter at ",
    ),
}


@needs_kernels
@pytest.mark.parametrize("what", LEFT)
def test_left(what):
    f, args, reason = LEFT[what]
    (found,) = jaxkern.explain(f)(*args)
    assert not found.taken and found.operation == "scan" and "test_accelerate_loops.py" in found.source
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(found.reason)


@needs_kernels
@pytest.mark.parametrize("what", ("gradient", "steps", "rows"))
def test_types_with_arithmetic_of_their_own(what):
    """The sum of two scales of flax's 8-bit layers is their maximum. Kernels would add them up."""
    fp8 = pytest.importorskip("flax.linen.fp8_ops")
    scale = lambda x: lax.convert_element_type(x, fp8.fp32_max_grad)
    number = lambda x: lax.convert_element_type(x, jnp.float32)
    f32 = jnp.dtype("float32")

    def quantised(x, history, factor):
        history, factor = scale(history), scale(factor)
        step = lambda c, _: (fp8.in_qdq(f32, jnp.float8_e4m3fn, c, factor, history), None)
        return lax.scan(step, x, None, length=20)[0].sum()

    def larger(x, y):
        """The maximum of two arrays of scales, as the sum of gradients."""
        return jax.vjp(lambda z: (z, z), x)[1]((x, y))[0]

    def of_steps(x):
        return number(lax.scan(lambda c, x: (larger(c, x), None), scale(x[0]), scale(jnp.cos(x)))[0])

    def of_rows(x):
        rows = jnp.exp(number(larger(scale(x), scale(-x))) - x.max(-1, keepdims=True))
        return rows / (x * number(larger(scale(x), scale(1 - x)))).sum(-1, keepdims=True)

    f, *args = {
        "gradient": (jax.grad(quantised, (0, 1, 2)), X[0, 0, :1], jnp.zeros(3), jnp.ones(1)),
        "steps": (of_steps, X),
        "rows": (of_rows, X[0]),
    }[what]
    plain = jax.jit(f)(*args)
    with jaxkern.accelerate(force=True):
        own = jax.jit(f)(*args)
        jax.jit(lambda *a: f(*a)).trace(*args).lower(lowering_platforms=("cuda",))
    close(plain, own)
    if what == "steps":
        np.testing.assert_allclose(own, np.maximum(X[0], np.cos(X).max(0)), rtol=1e-6)
        (found,) = jaxkern.explain(f)(*args)
        assert not found.taken and "the body has values of fp8_meta32" in found.reason


@needs_kernels
def test_inner_loops_that_multiply(monkeypatch):
    """Four loops of 12 steps, one in another, are 20736 bodies, which took half a minute to write one after the other."""
    body = jnp.sin
    for _ in range(4):
        body = lambda c, f=body: lax.fori_loop(0, 12, lambda _, c: f(c) * 1.1 + 1, c)
    read, plain = [], Program._called
    monkeypatch.setattr(Program, "_called", lambda self, *args: read.append(0) or plain(self, *args))
    found = jaxkern.explain(lambda x: lax.scan(lambda c, _: (body(c), None), x, length=9)[0])(X)
    assert any("a loop of 12 steps, which is long" in d.reason for d in found) and len(read) < 2 * 12**3, len(read)


@needs_kernels
def test_an_index_of_many_steps():
    """Each step uses the last one three times: without a memory of them, the number of paths is 3^60."""

    def step(h, i):
        for _ in range(60):
            i = jnp.where(i < 2, i + 1, i)
        return h.at[..., i].add(1.0), h[..., i]

    f = lambda x: lax.scan(step, x[0, :, :4], jnp.zeros(20, jnp.int32))
    close(*both(f, X)[:2])
    until = lambda x: lax.while_loop(lambda c: c[2] < 40, lambda c: step(c, 0)[0], x + 2)
    close(*both(jax.vmap(until), X[0, :, :4])[:2])


def fori(first, last, step, *others):
    """A loop on LONG, whose element `step` returns."""
    return lambda x: lax.fori_loop(first, last, lambda i, y: step(i, y, x), *others or (x,))


def at(i, f, add=False):
    return lambda k, y, x: getattr(y.at[i(k)], "add" if add else "set")(f(k, y, x))


def counts(kind, by, first, length):
    """A loop with a counter of its own, which may begin anywhere and wrap around."""
    step = lambda c, _: ((c[0] + kind(by), c[1] * 0.5 + LONG[c[0]]), c)
    return lambda x: lax.scan(step, (kind(first), x[0]), length=length)


def several(x):
    numbers = jnp.arange(80, dtype=jnp.int32) * 7

    def body(i, carry):
        total, sums, flags = carry
        return total + numbers[i], sums.at[i].set(total), flags.at[79 - i].set(numbers[i] % 3 == 0)

    return lax.fori_loop(0, 80, body, (0, jnp.zeros(80, jnp.int32), jnp.zeros(80, bool)))


def added_twice(x):
    """The second carry keeps half of what the first one keeps."""

    def body(i, carry):
        row = jnp.zeros_like(x).at[i].add(x[i])
        return carry[0] + row, (carry[1] + row).at[79 - i].set(x[i])

    return lax.fori_loop(0, 80, body, (x, x))


n = 80
# Which rows steps read and write, and whether the loop is taken.
COUNTED = {
    "a part": (fori(10, 50, at(lambda i: i, lambda i, y, x: x[i - 10])), True),
    "backwards": (fori(0, n, at(lambda i: n - 1 - i, lambda i, y, x: x[n - 1 - i] * 2)), True),
    "added backwards": (fori(10, 50, at(lambda i: 60 - i, lambda i, y, x: x[i // 2], add=True)), True),
    "negative indices": (fori(0, n, at(lambda i: i - 5, lambda i, y, x: x[-i])), True),
    "every other row, of two": (
        fori(0, 40, lambda i, y, x: y.at[2 * i].set(x[i]).at[2 * i + 1].set(x[jnp.clip(i - 1, 0)])),
        True,
    ),
    "clamped reads": (
        fori(0, n, lambda i, y, x: y * 0.5 + lax.dynamic_index_in_dim(x, i + 3, 0, False), LONG[0]),
        True,
    ),
    "reads of small numbers": (fori(0, n, lambda i, y, x: y * 0.5 + jnp.take(x, i % 7, axis=0), LONG[0]), True),
    "in place": (fori(0, n - 1, at(lambda i: i, lambda i, y, x: y[i] * 2 + y[i + 1])), True),
    "steps before": (fori(3, n, at(lambda i: i, lambda i, y, x: y[i - 3] * 0.5 - y[i - 1] + x[i])), True),
    "the step before, backwards": (fori(1, n, at(lambda i: n - 1 - i, lambda i, y, x: y[n - i] * 0.5 + x[i])), True),
    "set and added, then read": (
        fori(2, n, lambda i, y, x: y.at[n - i].set(x[i]).at[n - i - 1].add(y[n - i] * 0.5)),
        True,
    ),
    "a step far before": (fori(9, n, at(lambda i: i, lambda i, y, x: y[i - 9] + x[i])), False),
    "a row twice": (fori(0, n, at(lambda i: i // 2, lambda i, y, x: x[i])), False),
    "written twice": (fori(1, n, lambda i, y, x: y.at[i].set(x[i]).at[i - 1].set(x[i - 1])), False),
    "clamped writes": (fori(0, n, lambda i, y, x: lax.dynamic_update_index_in_dim(y, x[i], i + 3, 0)), False),
    "dropped writes": (fori(0, n, at(lambda i: i + 3, lambda i, y, x: x[i])), False),
    "a function of a row": (fori(0, n, lambda i, y, x: y.at[i].apply(jnp.sin)), False),
    "an index that is an array": (fori(0, n, lambda i, y, x: y.at[i[None]].set(x[i][None])), False),
    "added to two carries": (added_twice, False),
    "columns": (fori(0, n, lambda i, y, x: y.at[:, i].set(x[i, 2]), jnp.zeros((8, n))), True),
    "integers and booleans": (several, True),
    "16 bits": (lambda x: stored(x[0].astype(jnp.bfloat16), x.astype(jnp.bfloat16)), True),
    "uint32": (counts(np.uint32, 1, 5, 70), True),
    "int8 wraps around": (counts(np.int8, 3, 100, 70), True),
    "reverse": (
        lambda x: lax.scan(lambda c, y: ((c[0] + 1, c[1] + x[c[0]] * y), c), (0, x[0]), x, reverse=True),
        True,
    ),
    "places": (lambda x: lax.scan(lambda c, i: (c * 0.5 + x[i], c), x[0], jnp.arange(n - 1, -1, -1)), True),
}


@needs_kernels
@pytest.mark.parametrize("what", COUNTED)
def test_indices_that_steps_count(what):
    """What steps read and write at counted indices are xs and ys of a scan, with the bits of the plain loop.

    A GPU's kernels round 16 bits where they are stored, and contract products and sums; so does XLA, elsewhere.
    """
    f, taken = COUNTED[what]
    plain, own, names = both(f, LONG)
    assert ("scan" in names) == taken
    kernels = ON_GPU or EMULATED
    if kernels and what == "16 bits":
        plain = rounded_where_stored(f)(LONG)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(own), strict=True):
        assert a.dtype == b.dtype
        if kernels and jnp.issubdtype(a.dtype, jnp.inexact):
            close(a, b, rtol=TOLERANCE[a.dtype.name])
        else:
            np.testing.assert_array_equal(a, b)


join = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
CUMULATIVE = {
    "associative_scan": lambda x: lax.associative_scan(join, (x, x), axis=1)[1],
    "cumsum": lambda x: jnp.cumsum(x, 1),
    "cumprod": lambda x: lax.cumprod(x, 1, reverse=True),
    "cummax": lambda x: lax.cummax(x, 1),
    "cummin": lambda x: lax.cummin(x, 1, reverse=True),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, 1),
}


@needs_kernels
@pytest.mark.parametrize("name", CUMULATIVE)
def test_cumulative_operations(name):
    """Values and gradients are plain JAX's; kernels run them from a size on."""
    f = CUMULATIVE[name]
    x = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1, (3, 70, 2)), jnp.float32)
    for g in (f, loss(f))[: 1 + (name in ("associative_scan", "cumprod"))]:
        plain, own, taken = both(g, x)
        close(plain, own)
        assert taken
    for shape, takes in (((64, 4096, 64), True), ((64, 40, 4096), False), ((4, 4096, 4), False)):
        found = jaxkern.explain(f)(spec(*shape))
        assert [(d.operation, d.taken) for d in found] == [(name, takes)]
    with jaxkern.accelerate(export=True):  # on a machine without a GPU, too
        text = jax.jit(lambda x: f(x)).trace(spec(64, 4096, 64)).lower(lowering_platforms=("cuda",)).as_text()
    assert len(launch.programs(text)) == 1


@needs_kernels
def test_associative_scans_that_are_left():
    products = lambda x: lax.associative_scan(jnp.matmul, x)
    (found,) = jaxkern.explain(products)(spec(128, 64, 64))
    assert not found.taken and "dot_general" in found.reason
    sums = lambda *xs: lax.associative_scan(lambda a, b: jax.tree.map(jnp.add, a, b), xs)
    for given, why in {
        (
            spec(4096, 64, dtype=jnp.complex64),
        ): "complex numbers, which were not measured: call jaxkern.associative_scan",
        (spec(4096, 64, dtype=jnp.float8_e4m3fn),): r"no kernel for f8_e4m3fn\[4096,64\]",
        (spec(4096, 64), spec(4096, 1)): r"arrays of different shapes, \(4096, 64\), \(4096, 1\)",
        (jax.ShapeDtypeStruct((4096, 64), jnp.float32, weak_type=True),): "a weak type",
    }.items():
        (found,) = jaxkern.explain(sums)(*given)
        assert not found.taken and re.match(why, found.reason), found.reason


@needs_kernels
def test_settings():
    """Loops off by name; jaxkern.scan, which is no operation of the program; another platform; a count that is not known."""
    assert not jaxkern.explain(lambda x: jaxkern.scan(decay, x[0], x)[1])(X)
    with jaxkern.accelerate(without="scan"):
        assert not jaxkern.explain(decays)(X)
    (found,) = jaxkern.explain(decays)(X).taken
    assert found.reason == "12 steps of 32 lanes in one kernel" and found.bytes == 2 * X.nbytes + X[0].nbytes * 2
    (found,) = jaxkern.explain(decays, "tpu")(X)
    assert found.reason == "programs for tpu run as they are"
    counted = lambda x, n: lax.fori_loop(0, n, lambda _, x: jnp.sin(x), x)
    assert not jaxkern.explain(counted)(X, jnp.int32(9)).taken
    with jaxkern.algorithms.force_xla():
        assert not jaxkern.explain(lambda x: decays(x))(X)
    with jax.disable_jit():  # rules are registered when jaxkern is imported, under JAX_DISABLE_JIT=1 too
        assert compat.scan_primitive().name == "scan"


@pytest.mark.parametrize("bound", [(0, 40, 1), (5, 26, 4), (7, 7, 1), (9, 2, 1), (30, -1, -3)])
@pytest.mark.parametrize("test", ["lt", "le", "ne", "gt", "ge"])
def test_counts_of_while_loops(bound, test):
    """The loop runs as often as Python's does, or its count is not known."""
    from jaxkern._engines.loops import rewrites

    first, last, by = bound
    holds = lambda i: getattr(lax, test)(i, jnp.int32(last))
    f = lambda i, x: lax.while_loop(lambda s: holds(s[0]), lambda s: (s[0] + by, s[1] * 2), (i, x))
    (e,) = jax.make_jaxpr(f)(jnp.int32(first), 1.0).eqns
    at = e.params["cond_nconsts"] + e.params["body_nconsts"]
    known = lambda k: first if k == at else last if k == 0 else None
    count, i = 0, first
    while count <= 50 and bool(holds(jnp.int32(i))):
        count, i = count + 1, i + by
    found = rewrites.fixed_count(e.params, known)
    assert found == count if count <= 50 else found is None


def test_unsigned_indices():
    """JAX searches complex numbers by a loop that gathers at uint32."""
    args = [jnp.sort(X[0, 0] + 1j), X[1, 0] + 1j]
    plain = jnp.searchsorted(*args)
    with jaxkern.accelerate(force=True):
        jax.jit(jnp.searchsorted).trace(*args).lower(lowering_platforms=("cuda",))
        np.testing.assert_array_equal(jax.jit(lambda *a: jnp.searchsorted(*a))(*args), plain)


def test_several_devices():
    """Left where lanes are split, and where types say how; each device has its own kernel in shard_map."""
    m = jax.make_mesh((1,), ("r",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    mapped = jax.shard_map(decays, mesh=m, in_specs=P(None, "r"), out_specs=P(None, "r"))
    plain, own, taken = both(mapped, X)
    close(plain, own)
    assert taken == ["scan"]
    x = jax.device_put(X, NamedSharding(m, P(None, "r")))
    plain, own, _ = both(decays, x)
    close(plain, own)
    m = jax.make_mesh((1,), ("r",), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:1])
    with jax.set_mesh(m):  # whose axes are in the types of the body
        writes = lambda x: lax.fori_loop(1, 80, lambda i, y: y.at[i].set(jnp.sin(y[i - 1])), x)
        plain, own, _ = both(loss(writes), jax.device_put(LONG, P(None, "r")))
    close(plain, own)


@pytest.mark.parametrize("number", range(8))
def test_random_programs(number):
    random_loops.lower(0, number)


@pytest.mark.parametrize("number", [13, 17])
def test_kernels_of_random_programs(number):
    pytest.importorskip("emulated")
    assert random_loops.run(0, number)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("number", range(20))
def test_values_of_random_programs(number):
    program = random_loops.Program(1, number)
    plain = jax.jit(lambda *a: program.f(*a))(*program.args)
    with forced:
        own = jax.jit(lambda *a: program.f(*a))(*program.args)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(own), strict=True):
        random_loops.compare(program, np.asarray(random_loops.words(b)), np.asarray(random_loops.words(a)))
