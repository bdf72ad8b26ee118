"""scan: values, derivatives and transformations against `jax.lax.scan`, which scans become kernels, bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ON_GPU
from jax import lax
from scan_functions import FUNCTIONS
from scan_reference import rounded_where_stored

import jaxkern
from jaxkern._core import compat, launch

TOLERANCE = {"float64": 1e-12, "float32": 3e-5, "bfloat16": 6e-2, "float16": 1e-2}
SHAPES = {name: [((3, 4), 5)] + [((300, 64), 70), ((1, 100_003), 33)] * ON_GPU for name in FUNCTIONS}
JUMPS = ("neurons",)  # results jump where rounding differs


@pytest.fixture
def x64():
    with compat.enable_x64():
        yield


def close(ours, wanted, dtype):
    for y, want in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        assert y.dtype == want.dtype and y.shape == want.shape
        if y.dtype == jax.dtypes.float0:
            continue
        y, want = (np.asarray(v, np.complex128 if np.iscomplexobj(v) else np.float64) for v in (y, want))
        atol = TOLERANCE[dtype] * max(1, np.abs(want).max(initial=0))
        np.testing.assert_allclose(y, want, rtol=TOLERANCE[dtype], atol=atol)


def of_real(f, operands):
    """f as a function of its floating-point operands, and these."""
    at = [k for k, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def g(*ws):
        given = dict(zip(at, ws))
        return f(*(given.get(k, x) for k, x in enumerate(operands)))

    return g, [jnp.asarray(operands[k]) for k in at]


def loss(f):
    def scalar(*ws):
        real = [y for y in jax.tree.leaves(f(*ws)) if jnp.issubdtype(y.dtype, jnp.inexact)]
        return sum(jnp.sum(jnp.sin(y.astype(jnp.promote_types(y.dtype, jnp.float32)))) for y in real)

    return scalar


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name, dtype):
    if name in JUMPS and dtype == "bfloat16":
        dtype = "float32"
    make, differentiable = FUNCTIONS[name]
    # XLA's loops round 16-bit numbers after each operation or not, as its fusions have it.
    plain = rounded_where_stored if ON_GPU and dtype == "bfloat16" else jax.jit
    for shape, length in SHAPES[name]:
        run, operands = make(shape, length, dtype)
        f, g = (functools.partial(run, scan) for scan in (jaxkern.scan, lax.scan))
        close(jax.jit(f)(*operands), plain(g)(*operands), dtype)
        if differentiable:
            (f, ws), (g, _) = of_real(f, operands), of_real(g, operands)
            f, g = (jax.grad(loss(h), range(len(ws))) for h in (f, g))
            close(jax.jit(f)(*ws), plain(g)(*ws), dtype)


@pytest.mark.parametrize("name", ["recurrence", "gated"] + ["advantages", "heston", "neurons"] * ON_GPU)
def test_transformations(name, x64):
    """Forward mode, second derivatives, vmap over each operand and over all, remat, and a loop around the loop."""
    run, operands = FUNCTIONS[name][0]((2, 3), 4, "float64")
    fs = [of_real(functools.partial(run, scan), operands)[0] for scan in (jaxkern.scan, lax.scan)]
    ws = of_real(run, operands)[1]
    n = range(len(ws))
    close(*(jax.jvp(f, ws, [jnp.sin(w) for w in ws]) for f in fs), "float64")
    squares = lambda f: lambda *ws: sum(jnp.vdot(d, d) for d in jax.grad(loss(f), n)(*ws))
    close(*(jax.jit(jax.grad(squares(f), n))(*ws) for f in fs), "float64")
    many = [jnp.stack([w, w * 0.5]) for w in ws]
    for axes in ([0] * len(ws), [None if j else 0 for j in n], [0 if j == 1 else None for j in n]):
        batch = [m if a == 0 else w for m, w, a in zip(many, ws, axes)]
        close(*(jax.vmap(jax.grad(loss(f), n), axes)(*batch) for f in fs), "float64")
    close(*(jax.grad(jax.checkpoint(loss(f)), n)(*ws) for f in fs), "float64")
    outer = lambda f: lax.scan(lambda s, _: (s + loss(f)(*ws), None), 0.0, length=2)[0]
    close(*map(outer, fs), "float64")


def lowered(f, *operands):
    """(launch lists, number of XLA's loops) of a program for CUDA."""
    text = jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    return launch.programs(text), text.count("stablehlo.while")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_scans_are_kernels(name):
    """Forward, gradient, gradient of a batch, and second derivative contain no XLA loop."""
    make, differentiable = FUNCTIONS[name]
    run, operands = make((2, 3), 4, "float32")
    found, loops = lowered(functools.partial(run, jaxkern.scan), *operands)
    assert len(found) == 1 and not loops and "operation jaxkern_scan(" in found[0]
    found, loops = lowered(functools.partial(run, lax.scan), *operands)
    assert not found and loops
    if not differentiable:
        return
    f, ws = of_real(functools.partial(run, jaxkern.scan), operands)
    gradient = jax.grad(loss(f), range(len(ws)))
    found, loops = lowered(gradient, *ws)
    assert len(found) == 2 and not loops
    # A batch of all operands or of the first alone, for every other function.
    some = slice(None) if list(FUNCTIONS).index(name) % 2 else slice(1)
    batched = [jnp.stack([w, w]) for w in ws[some]] + list(ws[len(ws[some]) :])
    found, loops = lowered(jax.vmap(gradient, [0 if b.ndim > w.ndim else None for b, w in zip(batched, ws)]), *batched)
    assert len(found) == 2 and not loops
    found, loops = lowered(lambda *ws: jax.jvp(f, ws, ws), *ws)
    assert len(found) == 1 and not loops


@pytest.mark.parametrize("shape, axis", [((5, 64), 1), ((3, 64, 8), 1), ((2, 3, 64), 2)])
def test_steps_along_another_axis_are_read_in_place(shape, axis):
    """Forward and backward, without transposed arrays."""
    f = functools.partial(jaxkern.linear_recurrence, axis=axis)
    a, b = jnp.linspace(0.1, 0.9, 2 * np.prod(shape)).reshape(2, *shape)
    found, loops = lowered(jax.grad(loss(f), (0, 1)), a, b)
    types = {t for p in found for t in p.splitlines()[1].split("(", 1)[1].replace(" -> (", ", ").split(", ")}
    stored = f"float32[{','.join(map(str, shape))}]"
    assert len(found) == 2 and not loops and stored in {t.rstrip(")") for t in types}
    assert not any("[64," in t for t in types)


def test_what_all_lanes_share_runs_ahead():
    """A kernel makes the keys, and another the walks."""
    run, operands = FUNCTIONS["walk"][0]((1 << 16,), 4, "float32")
    found, loops = lowered(functools.partial(run, jaxkern.scan), *operands)
    assert len(found) == 2 and not loops
    results = [text.split(" -> (")[1].split(")")[0] for text in found]
    assert "float" not in results[0] and results[1] == "float32[65536]"


@pytest.mark.parametrize("first, read", [(jnp.zeros, False), (lambda n: -jnp.zeros(n), True), (jnp.ones, True)])
def test_first_carries_of_zeros_are_not_read(first, read):
    """Nor are they written before the loop; not even if an equal loop of the program begins with other numbers."""
    xs = jnp.linspace(0, 1, 5 * 8).reshape(5, 8)
    h = lambda x, first: jaxkern.scan(lambda h, x: (h * 0.5 + x,) * 2, first, x)[1]
    both = lambda x: (h(x, first(8)), h(x, x[0]))
    found, _ = lowered(both, xs)
    assert [text.count("float32[8],") for text in found] == [2 if read else 1, 2]
    close(jax.jit(both)(xs), tuple(both(xs)), "float32")


def test_what_is_left_to_xla(monkeypatch):
    run, operands = FUNCTIONS["recurrence"][0]((3, 4), 5, "float32")
    f = functools.partial(run, jaxkern.scan)
    with jaxkern.algorithms.force_xla():
        assert lowered(f, *operands) == ([], 1)
    monkeypatch.setenv("JAXKERN_BACKEND", "xla")
    assert lowered(lambda *a: f(*a), *operands) == ([], 1)
    monkeypatch.delenv("JAXKERN_BACKEND")
    none, left = lowered(lambda *a: f(*a), operands[0], *(x[:0] for x in operands[1:]))
    assert not none and left <= 1
    n, m = jax.export.symbolic_shape("n, m")
    symbolic = [jax.ShapeDtypeStruct(s, "float32") for s in ((m,), (n, m), (n, m))]
    exported = jax.export.export(jax.jit(lambda *a: f(*a)), platforms=["cuda"])(*symbolic)
    assert "jaxkern_scan" not in exported.mlir_module()


@pytest.mark.parametrize("length", [0, 1, 2])
def test_few_steps(length):
    for name in ("recurrence", "advantages"):
        run, operands = FUNCTIONS[name][0]((3, 4), length, "float32")
        given = [of_real(functools.partial(run, scan), operands) for scan in (jaxkern.scan, lax.scan)]
        close(*(jax.value_and_grad(loss(f), range(len(ws)))(*ws) for f, ws in given), "float32")
    assert jaxkern.linear_recurrence(0.5, jnp.ones((length, 3))).shape == (length, 3)


@pytest.mark.parametrize(
    "a, b, axis, initial",
    [
        ((), (5, 3), 0, None),
        ((3,), (5, 3), 0, (3,)),
        ((5, 3), (5, 3), -1, ()),
        ((2, 5, 1), (2, 5, 3), 1, (2, 3)),
        ((2, 5, 3), (), 1, None),
        ((1, 3), (1, 3), 0, (1,)),
    ],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_linear_recurrence(a, b, axis, initial, reverse):
    rng = np.random.default_rng(0)
    a, b = (np.asarray(rng.normal(size=shape), np.float32) for shape in (a, b))
    first = None if initial is None else np.asarray(rng.normal(size=initial), np.float32)
    ours = jaxkern.linear_recurrence(a, b, axis=axis, reverse=reverse, initial=first)
    shape = np.broadcast_shapes(a.shape, b.shape)
    a, b = (np.moveaxis(np.broadcast_to(x, shape), axis, 0) for x in (a, b))
    h, hs = np.broadcast_to(np.float64(0 if first is None else first), a.shape[1:]), []
    for t in range(len(a))[:: -1 if reverse else 1]:
        h = a[t] * h + b[t]
        hs.append(h)
    close(ours, jnp.asarray(np.moveaxis(np.stack(hs[:: -1 if reverse else 1]), 0, axis), jnp.float32), "float32")


def test_linear_recurrence_of_complex_numbers():
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(7, 3)) + 1j * rng.normal(size=(7, 3)) for _ in range(2))
    h, hs = np.zeros(3, complex), []
    for t in range(7):
        h = a[t] * h + b[t]
        hs.append(h)
    close(jaxkern.linear_recurrence(a.astype("c8"), b.astype("c8")), jnp.asarray(np.stack(hs), "c8"), "float32")


def largest(f, ws) -> int:
    """The size of the largest array that a scan in the jaxpr of f makes, except for its xs, other scans and remat."""
    found = []
    for e in compat.without_unused(jax.make_jaxpr(f)(*ws)).jaxpr.eqns:
        if e.primitive.name == "scan":
            inner = e.params["jaxpr"].jaxpr
            xs = inner.invars[sum(compat.counts_of_scan(e.params)) :]
            found += [v.aval.size for v, own in zip(e.outvars, inner.outvars) if own not in xs]
    return max(found)


@pytest.mark.parametrize(
    "length, every, reverse, kernels, of_xla",
    [(24, 6, False, 2, 0), (23, 5, True, 5, 0), (23, 5, False, 4, 0), (5, 5, True, 2, 0), (34, 17, False, 3, 2)],
)
def test_checkpoint_every(length, every, reverse, kernels, of_xla):
    """Results and gradients are the same. With chunks, the forward loop keeps one carry for each, and loops are kernels."""
    run, (c, w, b, scale, x, f) = FUNCTIONS["gated"][0]((3, 4), length, "float32")
    ours = functools.partial(jaxkern.scan, reverse=reverse, checkpoint_every=every)
    scans = (ours, functools.partial(lax.scan, reverse=reverse))
    close(*(run(scan, c, w, b, scale, x, f) for scan in scans), "float32")
    last = lambda scan: lambda c, w, b: jnp.sum(run(lambda *a: (scan(*a)[0], None), c, w, b, scale, x, f)[0])
    gradients = [jax.grad(last(scan), (0, 1, 2)) for scan in scans]
    close(*(g(c, w, b) for g in gradients), "float32")
    sizes = [largest(g, (c, w, b)) for g in gradients]
    assert sizes == [(length // every if every < length else length) * c.size, length * c.size]
    programs, loops = lowered(gradients[0], c, w, b)
    # The loops over chunks are kernels, too, if chunks have few steps, and otherwise XLA's.
    assert len(programs) == kernels and loops == of_xla
    both = [jax.jit(jax.grad(lambda *a, s=scan: loss(lambda *a: run(s, *a))(*a), range(6))) for scan in scans]
    close(*(g(c, w, b, jnp.asarray(scale), x, f) for g in both), "float32")


def test_checkpoint_every_without_arrays():
    count = lambda **more: jaxkern.scan(lambda n, _: (n + 1, 2 * n), 0, None, 7, **more)
    assert jax.tree.map(np.array_equal, count(checkpoint_every=3), count()) == (True, True)
    with pytest.raises(ValueError, match="checkpoint_every must be at least 1, got 0"):
        count(checkpoint_every=0)
    with pytest.raises(ValueError, match="length"):
        jaxkern.scan(lambda c, x: (c, x), 1.0, W, length=3, checkpoint_every=2)


def test_structures_and_no_arrays():
    body = lambda carry, x: ({"n": carry["n"] + 1}, None)
    carry, ys = jaxkern.scan(body, {"n": 0}, None, 7)
    assert carry["n"] == 7 and ys is None
    assert jaxkern.scan(lambda c, x: (c, x * 2), None, jnp.arange(3))[1].tolist() == [0, 2, 4]


def test_the_same_bits_in_every_run():
    run, operands = FUNCTIONS["gated"][0]((64, 640), 30, "float32")
    f, ws = of_real(functools.partial(run, jaxkern.scan), operands)
    step = jax.jit(jax.grad(loss(f), range(len(ws))))
    first = step(*ws)
    for _ in range(5):
        assert all(map(np.array_equal, step(*ws), first))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_last_carries_of_loops_that_are_cut(dtype):
    """They are those of the last step, and not of a part or a tile before it."""
    x = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (4096, 8192)), dtype)
    loop = lambda x: jaxkern.scan(lambda m, x: (0.9 * m + 0.1 * x,) * 2, jnp.zeros_like(x[0]), x)
    with jaxkern.algorithms.force(scan="columns"):
        for _ in range(5):
            last, ys = jax.jit(loop)(x)
            np.testing.assert_array_equal(np.asarray(last), np.asarray(ys[-1]))


X, W = jnp.ones((20, 20)), jnp.ones(4)
EFFECTS, KEYS = [], jax.random.split(jax.random.key(0), 3)
LONG = jnp.ones((2, 5000))  # rows that no kernel reduces within a loop


@pytest.mark.parametrize(
    "body, words, state",
    [
        (lambda c, x: (c + (c @ LONG.T) @ LONG, x), "a reduction of more than 4096 elements", LONG),
        (lambda c, x: (c - jnp.mean(c), x), "a sum over lanes, which is known only", LONG),
        (lambda c, x: (c / jnp.max(c), x), "a reduction over lanes", LONG),
        (lambda c, x: (c, lax.cumsum(x)), "which is not elementwise", X),
        (lambda c, x: (c, x[::-1]), "which is not elementwise", X),
        (lambda c, x: (c + c.T, x), "two dimensions", X),
        (lambda c, x: (lax.fori_loop(0, 3, lambda k, c: c.at[k].apply(jnp.sin), c), x), "which is not", X),
        (lambda c, x: (c * lax.fori_loop(0, 3, lambda k, y: y * jax.random.uniform(KEYS[k]), 1.0), x), "index", X),
        (lambda c, x: (c, jax.debug.callback(EFFECTS.append, c)), "side effects|which is not elementwise", X),
        (lambda c, x: (lax.fori_loop(0, jnp.int32(c[0, 0]), lambda _, c: c + 1, c), x), "", X),
        (lambda c, x: (jaxkern.while_loop(lambda c: c < 3, lambda c: c + 1, c), x), "which is not elementwise", X),
    ],
)
def test_what_is_not_elementwise(body, words, state):
    with pytest.raises(TypeError, match=f"^jaxkern.scan: f(: an array| uses .*test_scan.py).*({words})") as error:
        jaxkern.scan(body, state, jnp.ones((2, *state.shape)))
    assert "use jax.lax.scan" in error.value.__notes__[-1]
    jax.effects_barrier()
    assert not EFFECTS  # nothing has run


def test_errors_of_jax_stay():
    with pytest.raises(TypeError, match="carry"):
        jaxkern.scan(lambda c, x: (jnp.stack([c, c]), x), 1.0, W)
    with pytest.raises(ValueError, match="length"):
        jaxkern.scan(lambda c, x: (c, x), 1.0, W, length=3)
    with pytest.raises(TypeError, match="jaxkern.scan: f must return a pair"):
        jaxkern.scan(lambda c, x: c + x, 1.0, W)
    with pytest.raises(TypeError, match="uses tan at .*test_scan.py.*, and kernels do not compute in complex64"):
        jaxkern.scan(lambda c, x: (jnp.tan(c * x), x), jnp.complex64(1), W)
