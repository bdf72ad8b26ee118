"""while_loop: values against JAX's loops by vmap, derivatives, batches, kernels (run on the CPU, and compiled), bad input."""

import functools
import re

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
from conftest import ON_GPU
from jax import lax
from jax.extend.core import Literal
from while_functions import FUNCTIONS, over_arrays, per_lane

import jaxkern
from jaxkern._core import compat, device, launch, registry
from jaxkern._core.cpp import Unsupported
from jaxkern._engines.loops import plan, tuning, while_plan, while_sharding
from jaxkern._engines.loops.while_program import read

EXACT = ("sampler", "collatz")  # integers; where the others end depends on rounding
SHAPES = [(3, 5), (1,), ()] + [(300, 70), (100_003,)] * ON_GPU
ours = lambda run: lambda *xs: run(jaxkern.while_loop, *xs)


def close(found, wanted, name, dtype):
    """Equal, except for lanes whose number of steps rounding changes: their values are as close as the loop makes them."""
    tolerance = 0.05 if np.dtype(dtype).itemsize == 2 else 2e-3
    for y, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert y.dtype == want.dtype and y.shape == want.shape
        counts = y.dtype.kind == "i"
        y, want = (np.asarray(x, np.float64) for x in (y, want))
        if name in EXACT or want.size == 0:
            np.testing.assert_array_equal(y, want)
        elif name == "integrator":  # times, values, sizes of steps, counts
            assert np.mean(np.abs(y - want) <= tolerance * np.maximum(1, np.abs(want))) >= 0.98
        else:
            np.testing.assert_allclose(y, want, rtol=tolerance, atol=1 if counts else tolerance)


@pytest.mark.parametrize(
    "name, dtype", [*((name, "float32") for name in FUNCTIONS), ("newton", "bfloat16"), ("sampler", "bfloat16")]
)
def test_values(name, dtype):
    for shape in SHAPES:
        run, operands = FUNCTIONS[name](shape, dtype)
        wanted = jax.jit(per_lane(run, operands))(*operands)
        close(jax.jit(ours(run))(*operands), wanted, name, dtype)


def test_shapes_and_structures():
    """A number that becomes one for each lane, conditions and carries that lack dimensions, constants, structures."""
    a = np.arange(12, dtype=np.float32).reshape(3, 4)

    def loop(a, rows, n):
        going = lambda c: (c["k"] < rows) & (c["n"] < n)
        body = lambda c: {"x": c["x"] * 0.5 + a, "k": c["k"] + 1, "n": c["n"] + jnp.int8(1), "none": None}
        return jaxkern.while_loop(going, body, {"x": 0.0, "k": 0, "n": np.int8(0), "none": None})

    rows, n = np.array([[0], [2], [5]]), np.int8(3)
    for f in (loop, jax.jit(loop)):
        found = f(a, rows, n)
        x, count = np.zeros((3, 4), np.float32), np.minimum(rows, n)
        for k in range(3):
            x = np.where(k < count, x * 0.5 + a, x)
        np.testing.assert_allclose(found["x"], x, rtol=1e-6)
        assert found["k"].shape == found["n"].shape == (3, 1) and found["n"].dtype == np.int8
        assert found["k"].tolist() == found["n"].tolist() == count.tolist()
    assert lowered(loop, a, rows, n) == (1, 0)
    assert jaxkern.while_loop(lambda n: n < 5, lambda n: n + 2, 0) == 6
    empty = jaxkern.while_loop(lambda x: x < 5, lambda x: x + 1, jnp.ones((0, 3)))
    assert empty.shape == (0, 3)


def test_conditions_of_nan():
    x = np.array([np.nan, 1, 7], np.float32)
    assert jaxkern.while_loop(lambda x: x < 5, lambda x: x + 1, x)[1:].tolist() == [5, 7]
    count = jaxkern.while_loop(lambda c: ~(c[0] >= 5) & (c[1] < 9), lambda c: (c[0] + 1, c[1] + 1), (x, 0))[1]
    assert count.tolist() == [9, 4, 0]


def test_conditions_are_computed_once_for_each_step():
    """Without a kernel too. If it is computed twice, XLA may round the two differently, and a lane may never end."""
    x = np.linspace(0.2, 4, 600).astype(jnp.bfloat16)
    tolerance = np.asarray(0.02, jnp.bfloat16)

    def root(x):
        going = lambda c: (jnp.abs(c[0] * c[0] - x) > tolerance * x) & (c[1] < 50)
        return jaxkern.while_loop(going, lambda c: (0.5 * (c[0] + x / c[0]), c[1] + 1), (jnp.ones_like(x), 0))

    for f, operands in [(root, (x,)), (jax.vmap(root), (x.reshape(20, 30),)), (tangents(root), (x,))]:
        with jaxkern.algorithms.force_xla():
            text = jax.jit(f).lower(*operands).as_text()
            y = np.asarray(jax.jit(f)(*operands)[0], np.float64).ravel()
        condition = re.search(r"stablehlo.while.*? cond {(.*?)} do {", text, re.S)[1]
        assert "stablehlo.or" in condition and not re.search("multiply|abs|compare", condition)
        np.testing.assert_allclose(y, np.sqrt(x.astype(np.float64)), rtol=0.02)


def lowered(f, *operands):
    """(kernels of while loops, XLA's loops) of a program for CUDA."""
    text = jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    found = launch.programs(text)
    assert all("operation jaxkern_while_loop(" in p for p in found)
    return len(found), text.count("stablehlo.while")


def tangents(f):
    """The function of floating-point operands that returns results of a loop and their tangents."""

    def g(*xs):
        real = [
            jnp.sin(x) if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0) for x in xs
        ]
        ys, dys = jax.jvp(f, xs, tuple(real))
        return [y for y in jax.tree.leaves((ys, dys)) if y.dtype != jax.dtypes.float0]

    return g


@pytest.mark.parametrize("name", ["newton", "integrator"] + ["sampler", "collatz"] * ON_GPU)
def test_transformations(name):
    """Forward mode and vmap over each operand and over all: values, and that each is one kernel."""
    run, operands = FUNCTIONS[name]((2, 3), "float32", seed=3)
    operands = list(map(jnp.asarray, operands))
    assert lowered(ours(run), *operands) == (1, 0)
    assert lowered(tangents(ours(run)), *operands) == (1, 0)
    close(*(jax.jit(tangents(f))(*operands) for f in (ours(run), per_lane(run, operands))), name, "float32")
    many = [jnp.stack([x, x + x // 2]) for x in operands]
    n = len(operands)
    for axes in [[0] * n] + [[0 if j == k else None for j in range(n)] for k in range(n) if n > 1]:
        batch = [m if a == 0 else x for m, x, a in zip(many, operands, axes)]
        f, want = (jax.vmap(g, axes) for g in (ours(run), per_lane(run, operands)))
        assert lowered(f, *batch) == (1, 0)
        close(jax.jit(f)(*batch), jax.jit(want)(*batch), name, "float32")
    outer = lambda f: lax.scan(lambda s, _: (s + jax.tree.leaves(f(*operands))[0].sum(), None), 0, length=2)[0]
    if name in EXACT:
        assert outer(ours(run)) == outer(per_lane(run, operands))


def test_no_gradient_in_reverse_mode():
    f = lambda a: jaxkern.while_loop(lambda c: c[0] < 9, lambda c: (c[0] * a, c[1] + 1), (jnp.ones(3), 0))
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work .*jaxkern.scan .*custom_vjp"):
        jax.grad(lambda a: f(a)[0].sum())(jnp.full(3, 2.0))
    assert jax.grad(lambda a: (a * lax.stop_gradient(f(a)[0])).sum())(jnp.full(3, 2.0)).tolist() == [16] * 3


def test_what_is_left_to_xla(monkeypatch):
    run, operands = FUNCTIONS["newton"]((3,), "float32")
    f = ours(run)
    with jaxkern.algorithms.force_xla():
        assert lowered(f, *operands) == (0, 1)
    monkeypatch.setenv("JAXKERN_BACKEND", "xla")
    assert lowered(lambda *a: f(*a), *operands) == (0, 1)
    monkeypatch.delenv("JAXKERN_BACKEND")
    (n,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(lambda *a: f(*a)), platforms=["cuda"])(
        jax.ShapeDtypeStruct((n,), "float32"), operands[1]
    )
    assert "@jaxkern_while_loop(" not in exported.mlir_module()
    exported = jax.export.export(jax.jit(f), platforms=["cuda"], disabled_checks=jaxkern.export_checks())(*operands)
    assert "@jaxkern_while_loop(" in exported.mlir_module()
    assert lowered(per_lane(run, operands), *operands) == (0, 1)
    assert lowered(functools.partial(run, over_arrays), *operands) == (0, 1)


X = jnp.ones((40, 40))


@pytest.mark.parametrize(
    "cond, body, words",
    [
        (lambda c: c < 3, lambda c: c + c @ X, "uses dot_general at .*test_while_loop.py.*, which is not elementwise"),
        (lambda c: c < 3, lambda c: c - jnp.mean(c), "a sum over lanes"),
        (lambda c: c < jnp.max(c), lambda c: c + 1, "uses reduce_max at .*, a reduction over lanes"),
        (lambda c: jnp.any(c < 3), lambda c: c + 1, "uses reduce_or at .*, a reduction over lanes"),
        (lambda c: c[::-1] < 3, lambda c: c + 1, "uses rev at .*test_while_loop.py"),
        (lambda c: c < 3, lambda c: c.T + 1, "two dimensions"),
        (lambda c: c, lambda c: c + 1, "cond_fun must return an array of booleans, got float32"),
        (lambda c: (c < 3, c < 4), lambda c: c + 1, "cond_fun must return an array of booleans"),
        (lambda c: c < 3, lambda c: (c, c), "body_fun must return a pytree like init_val"),
        (lambda c: c < 3, lambda c: c.astype(jnp.int32), "must keep dtypes, and returns int32 for carry 0 of float32"),
        (lambda c: True, lambda c: c + 1, "does not depend on the loop"),
        (lambda c: c < jnp.ones((3, 5)), lambda c: c + 1, "do not broadcast|incompatible shapes"),
    ],
)
def test_errors(cond, body, words):
    with pytest.raises((TypeError, ValueError), match=words) as error:
        jaxkern.while_loop(cond, body, X)
    notes = "".join(getattr(error.value, "__notes__", ()))
    assert ("jax.vmap of jax.lax.while_loop" in notes) == isinstance(error.value, jaxkern.Unsupported)


# ---- programs and kernels


def words(x):
    """An array, or the numbers of keys."""
    return jax.random.key_data(x) if jnp.issubdtype(jax.typeof(x).dtype, jax.dtypes.prng_key) else jnp.asarray(x)


def loop_of(f, operands):
    """(program, its operands, its results by JAX) of the while loop of a function."""
    closed = jax.make_jaxpr(f)(*operands)
    env = dict(zip(closed.jaxpr.constvars, closed.consts)) | dict(zip(closed.jaxpr.invars, operands))
    for e in closed.jaxpr.eqns:
        args = [v.val if isinstance(v, Literal) else jnp.asarray(env[v]) for v in e.invars]
        results = compat.bind_equation(e, *args)
        if e.primitive is lax.while_p:
            equal = [next(j for j, w in enumerate(e.invars) if w is v) for v in e.invars]
            counts = e.params["cond_nconsts"], e.params["body_nconsts"]
            program = read(e.params["cond_jaxpr"], e.params["body_jaxpr"], *counts, "test", equal)
            return program, list(map(words, args)), list(map(np.asarray, map(words, results)))
        env.update(zip(e.outvars, results))
    raise AssertionError("no loop")


SMALL = device.Device(1, 90, 227 * 1024, 60 << 20)
CASES = [
    ("newton", (37,), "float32"),
    ("newton", (3, 5), "bfloat16"),
    ("integrator", (130,), "float32"),
    ("sampler", (333,), "float16"),
    ("collatz", (4, 300), "float32"),
    ("newton", (), "float32"),
]


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@plans.needs_runtime
@pytest.mark.parametrize("name, shape, dtype", CASES)
def test_kernels_on_the_cpu(name, shape, dtype, monkeypatch):
    run, operands = FUNCTIONS[name](shape, dtype, seed=1)
    monkeypatch.setattr(tuning, "WHILE_THREADS", 32)  # warps take several lanes for each thread
    for make in (ours(run), per_lane(run, operands))[: 1 + (name == "newton")]:
        check_kernel(make, operands, lambda ys, wanted: close(ys, wanted, name, dtype), SMALL)


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@plans.needs_runtime
def test_kernels_of_several_shapes_on_the_cpu():
    """Carries and conditions without some dimensions of the lanes, and places."""

    def f(a, rows):
        going = lambda c: c[1] < rows
        body = lambda c: (c[0] + a * jnp.arange(5) * c[2], c[1] + 1, ~c[2])
        return jaxkern.while_loop(going, body, (0.0, 0, True))

    rng = np.random.default_rng(0)
    check_kernel(f, [rng.normal(size=(4, 5)).astype(np.float32), np.array([[3], [0], [1], [7]])], np_close)


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@plans.needs_runtime
def test_kernels_of_keys_and_states_on_the_cpu():
    """A state of several numbers and a key in each lane, under vmap: norms, columns, captured arrays."""
    weights = np.array([0.5, 0.25, 0.125], np.float32)

    def lane(key, y, limit):
        def body(c):
            key, y, n = c
            key, sub = jax.random.split(key)
            return key, 1.5 * y[::-1] + weights * jax.random.uniform(sub, (3,)), n + 1

        key, y, n = lax.while_loop(lambda c: jnp.sum(c[1] ** 2) < limit, body, (key, y, 0))
        return jax.random.key_data(key), y, n

    rng = np.random.default_rng(0)
    keys = jax.random.split(jax.random.key(3), 37)
    y, limit = (rng.uniform(0, n, s).astype(np.float32) for n, s in ((1, (37, 3)), (90, (37,))))
    f = jax.vmap(lane)
    assert lowered(f, keys, y, limit) == (0, 1)  # not without `accelerate`
    check_kernel(f, [keys, y, limit], np_close)

    def draw(keys):
        split = lambda keys: jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
        body = lambda c: (split(c[0])[0], jax.vmap(jax.random.uniform)(split(c[0])[1]), c[2] + 1)
        return jaxkern.while_loop(lambda c: c[1] > 0.3, body, (keys, 1.0, 0))[1:]

    assert lowered(draw, keys) == (1, 0)
    x, n = draw(keys)
    assert x.max() <= 0.3 and n.min() == 1 and n.max() > 3


def np_close(ys, wanted):
    for y, want in zip(ys, wanted, strict=True):
        np.testing.assert_allclose(y, want, rtol=1e-6)


def check_kernel(f, operands, compare, on=device.H200):
    program, args, wanted = loop_of(f, operands)
    core = while_plan.WhileCore(program)
    made = while_plan.plan(on, core)
    plans.check_limits(made, on)
    given = program.split([*(c for _, c in program.captured.values()), *args])
    reads = [np.asarray(given[k]) for k in (*core.consts, *range(program.num_consts, len(given)))]
    overwritten = tuple(plan.in_place(core, made.algorithm).items())
    for aliases in ((), overwritten) if overwritten else ((),):
        ys = emulated.run(made, reads, core.results, aliases=aliases)
        ys = program.join([jnp.asarray(y.reshape(shape)) for y, (shape, _) in zip(ys, core.results)])
        compare(list(map(np.asarray, ys)), wanted)


@plans.needs_nvrtc
@pytest.mark.parametrize("capability, name, dtype", [(90, "integrator", "float32"), (80, "newton", "bfloat16")])
def test_kernels_compile(capability, name, dtype):
    run, operands = FUNCTIONS[name]((70,), dtype)
    made = while_plan.plan(device.H200, while_plan.WhileCore(loop_of(ours(run), operands)[0]))
    for step in made.launches:
        assert registry.kernels.module.compile(step.header, step.name, capability, step.source)


# ---- which loops have lanes of their own


def joined(cond=None, body=None, lanes=None):
    """A loop of arrays whose condition joins lanes."""
    going = lambda c: (c[0] < 5) & (c[1] < 3)
    cond = cond or (lambda c: jnp.any(going(c)))
    kept = lambda c: (jnp.where(going(c), c[0] + 1, c[0]), jnp.where(going(c), c[1] + 1, c[1]))
    return lambda x: lax.while_loop(cond, body or kept, (x, jnp.int32(x) * 0))


GOING = lambda c: (c[0] < 5) & (c[1] < 3)
LANES = {
    "selections": (joined(), True),
    "all": (joined(lambda c: ~jnp.all(~GOING(c))), True),
    "any of any": (joined(lambda c: jnp.any(jnp.any(GOING(c), axis=1, keepdims=True))), True),
    "another order of operands": (joined(lambda c: jnp.any((c[1] < 3) & (c[0] < 5))), False),
    "a count of lanes that go on": (
        joined(body=lambda c: (jnp.where(GOING(c), c[0] + 1, c[0]), c[1] + GOING(c).astype(jnp.int32))),
        True,
    ),
    "a flag of lanes that are done": (
        lambda x: lax.while_loop(
            lambda c: ~jnp.all(c[1]), lambda c: (jnp.where(c[1], c[0], c[0] + 1), c[1] | (c[0] > 4)), (x, x > 9)
        ),
        True,
    ),
    "a flag that falls again": (
        lambda x: lax.while_loop(
            lambda c: ~jnp.all(c[1]), lambda c: (jnp.where(c[1], c[0], c[0] + 1), c[0] > 4), (x, x > 9)
        ),
        False,
    ),
    "another condition": (
        joined(body=lambda c: (jnp.where(c[0] < 4, c[0] + 1, c[0]), jnp.where(GOING(c), c[1] + 1, c[1]))),
        False,
    ),
    "selected the other way": (
        joined(body=lambda c: (jnp.where(GOING(c), c[0], c[0] + 1), jnp.where(GOING(c), c[1] + 1, c[1]))),
        False,
    ),
    "a carry that always changes": (joined(body=lambda c: (jnp.where(GOING(c), c[0] + 1, c[0]), c[1] + 1)), False),
    "any over a part of the lanes": (joined(lambda c: jnp.any(GOING(c)[:1])), False),
    "all lanes": (joined(lambda c: jnp.all(GOING(c))), False),
    "the largest": (joined(lambda c: jnp.max(c[0]) < 5), False),
    "one condition for all, in a carry": (
        lambda x: lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * 2, c[1] + 1), (x, 0)),
        True,
    ),
    "vmap over rows, a sum over lanes": (
        jax.vmap(lambda x: lax.while_loop(lambda c: c.sum() < 5, lambda c: c + 1, x)),
        False,
    ),
    "vmap over rows, any within a row": (
        jax.vmap(lambda x: lax.while_loop(lambda c: jnp.any(c < 5), lambda c: c + 1, x)),
        False,
    ),
    "vmap over rows of two, a sum of each": (
        jax.vmap(lambda x: lax.while_loop(lambda c: c[:2].sum() < 5, lambda c: c + c[::-1], x[:2])),
        True,
    ),
    "vmap over rows of three, any of each": (
        jax.vmap(lambda x: lax.while_loop(lambda c: jnp.any(c < 5), lambda c: c + 1, x[:3])),
        True,
    ),
    "a carry that begins as a constant": (
        lambda x: lax.while_loop(lambda c: jnp.any(c < 3 * x), lambda c: jnp.where(c < 3 * x, c + x, c), x),
        True,
    ),
    "two carries that begin as one array": (
        jax.vmap(jax.vmap(lambda x: lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + c[1], c[1] + 1), (x, x)))),
        True,
    ),
    "vmap of selections": (jax.vmap(joined(lambda c: jnp.any(GOING(c)))), True),
    "vmap over rows, one condition each": (
        jax.vmap(lambda x, y: lax.while_loop(lambda c: c[1] < y, lambda c: (c[0] * 2, c[1] + 1), (x, 0))),
        True,
    ),
    "rows and columns exchanged": (joined(lambda c: jnp.any(GOING(c).T)), True),
    "selected by the transpose": (
        joined(body=lambda c: (jnp.where(GOING(c).T, c[0] + 1, c[0]), jnp.where(GOING(c), c[1] + 1, c[1]))),
        False,
    ),
}


@pytest.mark.parametrize("name", LANES)
def test_which_loops_have_lanes(name):
    f, wanted = LANES[name]
    x = np.random.default_rng(0).uniform(0, 9, (20, 20)).astype(np.float32)
    operands = (x, x[:, 0]) if "one condition each" in name else (x,)
    if wanted:
        program, args, results = loop_of(f, operands)
        given = [*(c for _, c in program.captured.values()), *args]
        for y, want in zip(while_sharding.part(while_plan.WhileCore(program), {}, given), results, strict=True):
            np.testing.assert_array_equal(y, want)
    else:
        with pytest.raises(Unsupported, match="^test "):
            loop_of(f, operands)


# ---- under accelerate

ROOT = lambda a: lax.while_loop(lambda x: x * x - a > 1e-3, lambda x: (x + a / x) / 2, a)
MANY, FEW = jnp.linspace(1, 50, 2048), jnp.linspace(1, 50, 64)
# f, its operand, whether it is taken, the reason.
PROGRAMS = {
    "vmap": (jax.vmap(ROOT), MANY, True, "2048 lanes that stop on their own"),
    "vmap of vmap": (jax.vmap(jax.vmap(ROOT)), MANY.reshape(2, 1024), True, "2048 lanes"),
    "jvp": (lambda a: jax.jvp(jax.vmap(ROOT), (a,), (a,)), MANY, True, "2048 lanes"),
    "vmap of jvp": (jax.vmap(lambda a: jax.jvp(ROOT, (a,), (a,))), MANY, True, "2048 lanes"),
    "vmap of jit in a scan": (
        lambda a: lax.scan(lambda c, _: (jax.vmap(jax.jit(ROOT))(c @ jnp.eye(2048) + 1), None), a, length=9)[0],
        MANY,
        True,
        "2048 lanes",
    ),
    "any": (
        lambda a: lax.while_loop(
            lambda x: jnp.any(x * x > a), lambda x: jnp.where(x * x > a, (x + a / x) / 2.01, x), a
        ),
        MANY,
        True,
        "2048 lanes",
    ),
    "few lanes": (jax.vmap(ROOT), FEW, False, "64 lanes are few"),
    "one lane": (ROOT, MANY[0], False, "1 lanes are few"),
    "any over some lanes": (
        lambda a: lax.while_loop(lambda x: jnp.any(x[1:] > 1), lambda x: jnp.where(x > 1, x / 2, x), a),
        MANY,
        False,
        "the body uses slice at .*test_while_loop.py",
    ),
    "another condition": (
        lambda a: lax.while_loop(lambda x: jnp.any(x > 1), lambda x: jnp.where(x > 0, x / 2, x), a),
        MANY,
        False,
        "carry 0 of shape .* changes in lanes whose own condition is false",
    ),
    "a product": (
        jax.vmap(lambda a: lax.while_loop(lambda x: x[0] > 1, lambda x: jnp.ones((40, 40)) @ x / 50, a * jnp.ones(40))),
        MANY,
        False,
        "the body uses dot_general at .*test_while_loop.py.* not elementwise",
    ),
}


@plans.needs_runtime
@pytest.mark.parametrize("what", PROGRAMS)
def test_unchanged_programs(what):
    f, x, taken, reason = PROGRAMS[what]
    decided = [d for d in jaxkern.explain(f)(x) if d.operation == "while_loop"]
    assert [d.taken for d in decided] == [taken] and re.search(reason, decided[0].reason)
    assert "test_while_loop.py:" in decided[0].source
    with jaxkern.accelerate(without="scan"):
        kernels, loops = lowered(lambda x: f(x), x)
    assert (kernels, loops) == (taken, (not taken) + ("in a scan" in what))
    with jaxkern.accelerate(without=("scan", "while_loop")):
        assert lowered(lambda x: f(x), x)[0] == 0
    wanted = jax.jit(lambda x: f(x))(x)
    with jaxkern.accelerate(force=True):
        found = jax.jit(lambda x: f(x))(x)
    jax.tree.map(lambda y, want: np.testing.assert_allclose(y, want, rtol=1e-3, atol=2e-4), found, wanted)
