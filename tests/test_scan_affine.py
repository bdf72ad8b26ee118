"""Bodies of scans that are affine in their carries: which are found, their maps, and what a loop that is cut in time computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

from jaxkern._core import compat
from jaxkern._engines.loops import affine as module
from jaxkern._engines.loops.affine import ONE, affine

STEPS = 7


@pytest.fixture(autouse=True)
def x64(monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 2 * 8 * 20)  # of four coupled carries, of complex128
    with compat.enable_x64():
        yield


def read(body, consts, carries, xs):
    """The Affine of body(consts, carries, xs) -> (carries, ys), for lists of numbers; xs are of one step."""
    count = len(consts), len(carries)

    def flat(*args):
        parts = args[: count[0]], args[count[0] : sum(count)], args[sum(count) :]
        carries, ys = body(*map(list, parts))
        return [*carries, *ys]

    args = [*consts, *carries, *xs]
    shapes = [jax.ShapeDtypeStruct((), jnp.result_type(x)) for x in args]
    closed, stored = jax.make_jaxpr(flat)(*shapes), [s.dtype for s in shapes[count[0] :][: count[1]]]
    with jax.checking_leaks():
        return affine(closed, len(consts), stored, len(xs))


def cut(loop, consts, carries, xs):
    """The carries before each step, from compositions of the maps of all steps before it."""
    starts = [carries[k] for k in loop.counters]
    element = lambda step, *xs: loop.element(consts, xs, (), starts, step)
    steps = jnp.arange(STEPS, dtype=jnp.int32)
    maps = jax.vmap(element)(steps, *map(jnp.asarray, xs)) if loop.dtypes else []
    prefixes = lax.associative_scan(jax.vmap(loop.combine), maps) if maps else []
    behind = jax.vmap(lambda *state: loop.apply(state, carries), axis_size=STEPS)(*prefixes)
    return [jnp.concatenate([jnp.asarray(c, b.dtype)[None], b]) for c, b in zip(carries, behind)]


def stepped(body, consts, carries, xs):
    """The same, step by step."""
    found = [list(map(jnp.asarray, carries))]
    with jax.disable_jit():
        for t in range(STEPS):
            found.append(body(consts, found[-1], [x[t] for x in xs])[0])
    return [jnp.stack(c) for c in zip(*found)]


def agree(body, consts, carries, xs, tolerance=1e-11):
    loop = read(body, consts, carries, [x[0] for x in xs])
    assert loop is not None
    for ours, want in zip(cut(loop, consts, carries, xs), stepped(body, consts, carries, xs), strict=True):
        assert ours.dtype == want.dtype
        scale = max(1, np.abs(np.asarray(want)).max())
        np.testing.assert_allclose(ours, want, rtol=tolerance, atol=tolerance * scale)
    return loop


@jax.custom_jvp
def halved(x):
    return x * 0.5


halved.defjvp(lambda p, t: (halved(*p), t[0] * 3))

# (number of carries' forms, operands that are known, function of forms and known numbers)
OPERATIONS = {
    "add": lambda a, b, x, y: a + b,
    "subtract": lambda a, b, x, y: a - b,
    "negative": lambda a, b, x, y: -a,
    "scale": lambda a, b, x, y: x * a,
    "divide": lambda a, b, x, y: a / (1.5 + x * x),
    "offset": lambda a, b, x, y: a + jnp.sin(y),
    "select": lambda a, b, x, y: jnp.where(x > 0, a, b),
    "reset": lambda a, b, x, y: jnp.where(x > y, jnp.full_like(a, 0), a),
    "cast": lambda a, b, x, y: a.astype(jnp.promote_types(a.dtype, jnp.float64)).astype(a.dtype),
    "cond": lambda a, b, x, y: lax.cond(x > 0, lambda a, b: a - b, lambda a, b: b * 0.5, a, b),
    "switch": lambda a, b, x, y: lax.switch((y * 3).astype(int), [lambda a: a, lambda a: -a, lambda a: a * 0.3], a),
    "call": lambda a, b, x, y: jax.jit(lambda a: halved(a) + x)(a),
    "pass": lambda a, b, x, y: lax.stop_gradient(a),
    "barrier": lambda a, b, x, y: (lambda u, v, w: u - 0.5 * v + w)(*lax.optimization_barrier((a, b, x))),
}


@st.composite
def bodies(draw):
    """(body, number of carries): of two constants and two elements of xs, affine in the carries."""
    count = draw(st.integers(1, 4))
    of, known = st.integers(0, 11), st.integers(0, 3)
    program = draw(
        st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), of, of, known, known), min_size=1, max_size=8)
    )
    results = draw(st.lists(of, min_size=count, max_size=count))

    def body(consts, carries, xs):
        pool, numbers = list(carries), [*consts, *xs]
        for name, i, j, k, m in program:
            pool.append(OPERATIONS[name](pool[i % len(pool)], pool[j % len(pool)], numbers[k], numbers[m]))
        return [pool[-1 - r % len(pool)] for r in results], [jnp.tanh(jnp.real(pool[0]))]

    return body, count


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(bodies(), st.booleans(), st.integers(0, 2**31))
def test_random_bodies(made, is_complex, seed):
    body, count = made
    rng = np.random.default_rng(seed)
    number = lambda *shape: rng.uniform(-0.9, 0.9, shape)
    carries = [number() + 1j * number() if is_complex else number() for _ in range(count)]
    agree(body, [number(), number()], carries, [number(STEPS), number(STEPS)])


def test_barriers_of_several():
    def body(c, h, x):
        u, v = lax.optimization_barrier((h[0] * 0.5, h[1] * x[0]))
        return [u + v, lax.optimization_barrier((x[0], v, u))[1]], [v]

    agree(body, [], [0.3, 0.7], [np.linspace(-0.9, 0.9, STEPS)])


BODIES = {
    "sum": (lambda c, h, x: ([h[0] + x[0]], []), "f", "f", {(0, 0): ONE}, 1),
    "product": (lambda c, h, x: ([h[0] * x[0]], []), "f", "f", {(0, 0): None}, 1),
    "recurrence": (lambda c, h, x: ([h[0] * x[0] + x[1]], []), "f", "ff", {(0, 0): None}, 2),
    "complex": (lambda c, h, x: ([h[0] * x[0] + x[1]], []), "F", "Ff", {(0, 0): None}, 2),
    "decoupled": (
        lambda c, h, x: ([h[0] * x[0] + 1, h[1] - x[1]], []),
        "ff",
        "ff",
        {(0, 0): None, (1, 1): ONE},
        3,
    ),
    "advantages": (
        lambda c, h, x: ([x[0] + h[1] * x[2] - x[1] + 0.9 * x[2] * h[0], x[1]], []),
        "ff",
        "fff",
        {(0, 0): None, (0, 1): None},
        4,
    ),
    "integrator": (
        lambda c, h, x: ([h[0] + x[1] * h[1], h[1] + x[0]], []),
        "ff",
        "ff",
        {(0, 0): ONE, (0, 1): None, (1, 1): ONE},
        3,
    ),
    "rotation": (
        lambda c, h, x: ([h[0] * x[0] - h[1] * x[1], h[0] * x[1] + h[1] * x[0]], []),
        "ff",
        "ff",
        {(i, j): None for i in (0, 1) for j in (0, 1)},
        4,
    ),
    "counter": (lambda c, h, x: ([h[0] + 2, h[1] * x[0]], []), "if", "f", {(0, 0): ONE, (1, 1): None}, 2),
    "counted": (
        lambda c, h, x: ([h[0] + 2, jnp.where(h[0] % 3 == 0, h[1] / h[0], h[1] * x[0]), h[2]], []),
        "iff",
        "f",
        {(0, 0): ONE, (1, 1): None, (2, 2): ONE},
        2,
    ),
    "kept": (lambda c, h, x: ([h[0], h[0] * h[1] + x[0]], []), "ff", "f", {(0, 0): ONE, (1, 1): None}, 2),
    "integers": (lambda c, h, x: ([h[0] * x[0] + h[1], x[0] + 3], []), "ii", "i", {(0, 0): None, (0, 1): None}, 4),
    "narrow": (lambda c, h, x: ([h[0] * x[0] + x[1].astype(jnp.float32)], []), "f", "fd", {(0, 0): None}, 2),
}


@pytest.mark.parametrize("name", BODIES)
def test_maps(name):
    """Known bodies have maps of as few numbers as they need, and the right ones."""
    body, carries, xs, entries, numbers = BODIES[name]
    rng = np.random.default_rng(0)

    def array(code, *shape):
        dtype = np.dtype({"i": "i4", "F": "c16", "f": "f8", "d": "f8"}[code])
        if name == "narrow" and code == "f":
            dtype = np.dtype("f4")
        if code == "i":
            return rng.integers(1, 9, shape).astype(dtype)
        x = rng.uniform(-0.9, 0.9, shape)
        return np.asarray(x + 1j * x[::-1] if code == "F" and shape else x, dtype)

    tolerance = 1e-6 if name == "narrow" else 1e-12
    loop = agree(body, [], [array(c)[()] for c in carries], [array(c, STEPS) for c in xs], tolerance)
    assert len(loop.dtypes) == numbers and loop.entries == entries
    assert (loop.counters != ()) == (name in ("counted", "kept"))


REFUSED = {
    "maximum": lambda c, h, x: ([jnp.maximum(h[0], x[0])], []),
    "absolute": lambda c, h, x: ([jnp.abs(h[0]) + x[0]], []),
    "product": lambda c, h, x: ([h[0] * h[1], h[1] * x[0]], []),
    "square": lambda c, h, x: ([h[0] * h[0] + x[0]], []),
    "sine": lambda c, h, x: ([jnp.sin(h[0]) + x[0]], []),
    "quotient": lambda c, h, x: ([x[0] / h[0]], []),
    "condition": lambda c, h, x: ([jnp.where(h[0] > 1, h[0] - 1, h[0])], []),
    "branch": lambda c, h, x: ([lax.cond(h[0] > 1, lambda a: a, lambda a: -a, h[0])], []),
    "rounded": lambda c, h, x: ([jnp.round(h[0] * x[0])], []),
    "conjugate": lambda c, h, x: ([jnp.conj(h[0]) * x[0]], []),
    "quotient of integers": lambda c, h, x: ([h[0] // 2 + 1], []),
    "real of an integer": lambda c, h, x: ([h[0] * 3 + 1, h[1] + h[0].astype(float)], []),
    "flag": lambda c, h, x: ([x[0] > 0], []),
    "several results": lambda c, h, x: ([lax.fori_loop(0, 3, lambda i, v: v * 0.5, h[0] + x[0])], []),
    "three operands": lambda c, h, x: ([lax.clamp(-1.0, h[0] + x[0], 1.0)], []),
    "five": lambda c, h, x: ([*h[1:], x[0] * h[0]], []),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_affine(name):
    kinds = {
        "product": [0.5, 0.5],
        "conjugate": [0.5j],
        "quotient of integers": [np.int32(1)],
        "real of an integer": [np.int32(1), 0.5],
        "flag": [True],
        "five": [0.5] * 5,
    }
    assert read(REFUSED[name], [], kinds.get(name, [0.5]), [0.5]) is None


def test_a_reset_stops_what_is_not_finite():
    """Where a condition resets a carry, infinities and NaN of earlier steps do not reach later ones."""
    body = lambda c, h, x: ([jnp.where(x[1] > 0, x[0], h[0] * 0.5 + x[0])], [])
    x, reset = np.ones(STEPS), np.zeros(STEPS)
    x[2], reset[5] = np.nan, 1
    loop = agree(body, [], [np.inf], [x, reset])
    assert np.isfinite(cut(loop, [], [np.inf], [x, reset])[0][6:]).all()


@pytest.mark.parametrize("name", ["decay", "signs", "integrator", "rotation", "sum"])
def test_errors_of_rounding(name):
    """At most twice the error of a float32 loop, as docs/loops.md says."""
    rng, steps, lanes = np.random.default_rng(0), 1200, 24
    x = rng.normal(size=(steps, lanes)).astype(np.float32)
    a = {"decay": rng.uniform(0.9, 1, x.shape), "signs": rng.choice([-1, 1], x.shape) * rng.uniform(0.5, 1, x.shape)}
    angle = np.exp(1j * rng.uniform(0, 1, x.shape))
    a = a.get(name, angle if name == "rotation" else np.ones(x.shape)).astype("c8" if name == "rotation" else "f4")
    body, count = {
        "integrator": (lambda c, h, x: ([h[0] + x[0] * h[1] * 0.1, 0.9 * h[1] + x[1]], []), 2),
        "sum": (lambda c, h, x: ([h[0] + x[1]], []), 1),
    }.get(name, (lambda c, h, x: ([x[0] * h[0] + x[1]], []), 1))
    carries = [np.zeros((), a.dtype)[()]] * count
    loop = read(body, [], carries, [a[0, 0], x[0, 0]])

    join = lambda earlier, later: (loop.combine(earlier, later),) * 2
    joined = lambda maps: lax.scan(join, [m[0] for m in maps], [m[1:] for m in maps])

    def in_parts(a, x):
        """A lane in parts of 12 steps, as a thread of a kernel takes them."""
        a, x = a.reshape(-1, 12), x.reshape(-1, 12)
        totals, _ = jax.vmap(joined)(jax.vmap(jax.vmap(lambda a, x: loop.element([], [a, x], ())))(a, x))
        before = [jnp.concatenate([m[:1], later[:-1]]) for m, later in zip(totals, joined(totals)[1])]
        run = lambda first, a, x: lax.scan(lambda h, ax: (body([], h, ax)[0],) * 2, first, (a, x))[1][0]
        own = jax.vmap(lambda a, x, *state: run(loop.apply(state, carries), a, x))(a[1:], x[1:], *before)
        return jnp.concatenate([run(carries, a[0], x[0])[None], own]).reshape(-1)

    def stepped(dtype):
        kind = np.result_type(dtype, np.complex64) if np.iscomplexobj(a) else dtype
        step = lambda h, ax: (body([], h, ax)[0],) * 2
        first = [jnp.zeros(lanes, kind)] * count
        return np.asarray(lax.scan(step, first, (jnp.asarray(a, kind), jnp.asarray(x, dtype)))[1][0])

    exact = stepped(np.dtype("f8"))
    error = lambda y: np.sqrt(np.mean(np.abs(y - exact) ** 2))
    assert 0 < error(np.asarray(jax.jit(jax.vmap(in_parts, 1, 1))(a, x))) <= 2 * error(stepped(np.dtype("f4")))
