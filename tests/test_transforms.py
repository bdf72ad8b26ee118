"""Transformations that test_matrix.py leaves open: softmax under vmap, in programs, and with NaN.

Values are float64, so that a wrong rule cannot hide behind rounding; compiled programs are read in float32.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ON_GPU
from jax import export, lax
from jax.experimental import checkify, jet
from reference import OPERATIONS

import jaxkern
from jaxkern._core import registry
from jaxkern._definitions import softmax as definition

SHAPE = (3, 4, 5)
AXIS = 1
RUNNERS = ["kernels", "cpu", "xla"]  # of definitions
MASKS = {"whole": None, "full": SHAPE, "broadcast": (3, 1, 5), "row": (4, 1)}


def plain(operation, x, axis, mask):
    """The operation in jnp, which JAX differentiates; no row is empty here."""
    x = x if mask is None else jnp.where(mask, x, -jnp.inf)
    shifted = x - lax.stop_gradient(x.max(axis, keepdims=True))
    y = shifted - jnp.log(jnp.exp(shifted).sum(axis, keepdims=True))
    return jnp.exp(y) if operation == "softmax" else y


def functions(operation, mask, axis=AXIS):
    """The operation and its twin as functions of x alone, finite wherever they are masked."""

    def finite(y):
        return y if mask is None else jnp.where(mask, y, 0)

    ours = lambda x: finite(getattr(jaxkern, operation)(x, axis, mask))
    return ours, lambda x: finite(plain(operation, x, axis, mask))


def inputs(shape=SHAPE, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(0, 2, shape)), jnp.asarray(rng.normal(size=shape))


def mask_of(shape):
    if shape is None:
        return None
    mask = np.random.default_rng(5).random(shape) < 0.6
    mask[(slice(None), 0) if len(shape) == 3 else 0] = True  # no empty row
    return jnp.asarray(mask)


def loss(f, t):
    return lambda x: jnp.sum(jnp.sin(f(x)) * t)


def assert_same(ours, theirs):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-12), ours, theirs)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("axis", [0, 1, -1, (0, 1), (0, 2)])
def test_second_order_on_every_axis(operation, axis, x64):
    x, t = inputs()
    f, g = functions(operation, None, axis)
    assert_same(*(jax.jit(jax.hessian(loss(h, t)))(x) for h in (f, g)))


# ---- vmap


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("x_at, mask_at", [(0, 0), (2, 1), (1, 3), (None, 0), (None, 2), (3, None), (0, None)])
@pytest.mark.parametrize("axis, mask_shape", [(0, (3, 4, 5)), (1, (3, 1, 5)), (2, (1, 4, 1)), (1, (1, 4, 1))])
@pytest.mark.sweep(3)
def test_vmap_of_array_and_mask(operation, x_at, mask_at, axis, mask_shape, x64):
    """Against a loop, gradients too: the batch may lie anywhere in either operand, or in one of them."""
    rng, size = np.random.default_rng(0), 2
    stack = lambda shape, at, draw: jnp.asarray(draw(shape if at is None else (*shape[:at], size, *shape[at:])))
    x = stack((3, 4, 5), x_at, lambda s: rng.normal(size=s))
    mask = stack(mask_shape, mask_at, lambda s: rng.random(s) < 0.7)
    f = getattr(jaxkern, operation)

    def both(x, mask):
        y, pull = jax.vjp(lambda x: jnp.where(mask, f(x, axis, mask), 0), x)
        return y, pull(jnp.cos(x))[0]

    batched, single = jax.jit(jax.vmap(both, (x_at, mask_at)))(x, mask), jax.jit(both)
    take = lambda a, at, k: a if at is None else jnp.take(a, k, at)
    for k in range(size):
        assert_same(tuple(b[k] for b in batched), single(take(x, x_at, k), take(mask, mask_at, k)))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_vmap_moves_and_broadcasts_nothing(at):
    x, mask = jnp.ones((4, 5, 6)), jnp.ones((5, 6)[:2] if at == 0 else ((4, 6) if at == 1 else (4, 5)), bool)
    batched = jax.vmap(lambda x: jaxkern.softmax(x, 0, mask), at, at)
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda x: (batched(x) * x).sum()))(x))
    assert "transpose" not in jaxpr
    assert "bool[4,5,6]" not in jaxpr


# ---- what becomes of it


def equations(jaxpr):
    """The equations of a jaxpr and of the calls in it."""
    for e in jaxpr.eqns:
        inner = [v for v in e.params.values() if hasattr(v, "eqns") or hasattr(v, "jaxpr")]
        if inner and e.primitive.name in ("jit", "pjit", "closed_call", "core_call"):
            for j in inner:
                yield from equations(getattr(j, "jaxpr", j))
        else:
            yield e


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("axis", [-1, 0, (1, 2)])
def test_jaxpr_is_one_primitive(operation, axis):
    jaxpr = jax.make_jaxpr(lambda x: getattr(jaxkern, operation)(x, axis))(jnp.ones((2, 3, 4)))
    names = [e.primitive.name for e in equations(jaxpr.jaxpr)]
    assert [n for n in names if n != "reshape"] == [f"jaxkern_{operation}"]
    assert isinstance(axis, tuple) or len(names) == 1


def compiled(f, *args):
    return jax.jit(f).lower(*args).compile().as_text()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "shape, axis, mask_shape",
    [
        ((64, 256), -1, None),
        ((64, 256), 0, None),
        ((8, 64, 32), 1, None),
        ((4, 8, 16, 64), -1, (4, 1, 16, 64)),
        ((4, 8, 16, 64), (2, 3), None),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_kernel_forward_and_one_backward(operation, shape, axis, mask_shape, dtype):
    """value_and_grad compiles to our two kernels, without a transpose or a copy."""
    if not (jax.default_backend() == "gpu" and registry.kernels.module):
        pytest.skip("kernels run on a GPU")
    mask = None if mask_shape is None else jnp.ones(mask_shape, bool)
    f = lambda x, w: (getattr(jaxkern, operation)(x, axis, mask) * w).sum()
    text = compiled(jax.value_and_grad(f), jnp.ones(shape, dtype), jnp.ones(shape, dtype))
    calls = re.findall(r'custom_call_target="(jaxkern_\w+)"', text)
    assert calls == [f"jaxkern_{operation}"] * 2
    # A copy of a scalar is the loss on its way out.
    moved = [line for line in re.findall(r"= (\S+) (?:transpose|copy)\(", text) if re.search(r"\[\d", line)]
    assert not moved, moved


@pytest.mark.parametrize("operation", OPERATIONS)
def test_forward_mode_costs_no_more_than_reverse(operation):
    x = jnp.ones((8, 16))
    f = getattr(jaxkern, operation)
    names = [e.primitive.name for e in equations(jax.make_jaxpr(lambda x: jax.jvp(f, (x,), (x,)))(x).jaxpr)]
    assert names == [f"jaxkern_{operation}"] * 2
    names = [e.primitive.name for e in equations(jax.make_jaxpr(lambda x: jax.vjp(f, x)[1](x))(x).jaxpr)]
    assert names == [f"jaxkern_{operation}"] * 2


def test_types_survive():
    """Weak types are dropped, 16 bits stay 16 bits through every order."""
    x = jnp.ones((2, 3), jnp.bfloat16)
    for operation in OPERATIONS:
        f = getattr(jaxkern, operation)
        leaves = jax.tree.leaves(
            [f(x), jax.jvp(f, (x,), (x,)), jax.vjp(f, x)[1](x), jax.hessian(lambda x: f(x).sum())(x)]
        )
        assert {leaf.dtype for leaf in leaves} == {x.dtype}
        assert not jax.eval_shape(lambda s: f(s, None), 1.0).weak_type


@pytest.mark.parametrize("operation", OPERATIONS)
def test_masked_elements_never_reach_a_derivative(operation, x64):
    """NaN under the mask, in the array, the tangent and the cotangent, through second order."""
    x, t = inputs()
    mask = mask_of(SHAPE).at[0].set(False)  # and some rows without any participant
    x, t = jnp.where(mask, x, jnp.nan), jnp.where(mask, t, jnp.nan)
    f = lambda x: getattr(jaxkern, operation)(x, AXIS, mask)
    y, dy = jax.jvp(f, (x,), (t,))
    (dx,) = jax.vjp(f, x)[1](t)
    ddx = jax.jvp(lambda x: jax.vjp(f, x)[1](t)[0], (x,), (t,))[1]
    for d in (dy, dx, ddx):
        assert jnp.isfinite(d).all() and (jnp.where(mask, 0, d) == 0).all() and (d[1:] != 0).any()
    assert not jnp.isnan(y).any()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("runner", RUNNERS)
def test_empty_rows_never_reach_a_derivative(operation, masked, runner, x64, monkeypatch):
    """Nor does NaN in the tangent or cotangent of a row of -inf, in the first three orders."""
    if runner != "kernels":  # what runs on platforms without a kernel
        monkeypatch.setattr(registry, "kernels_run", lambda: False)
        monkeypatch.setattr(definition, "runner", lambda: runner)
    # Each of another shape, or the program of another one would be reused.
    x, t = inputs((4, 5 + RUNNERS.index(runner)))
    mask = mask_of(x.shape) if masked else None
    rows = slice(1, 3)
    x, t = x.at[rows].set(-jnp.inf), t.at[rows].set(jnp.nan)
    f = lambda x: getattr(jaxkern, operation)(x, -1, mask)
    backward = lambda x, g: jax.vjp(f, x)[1](g)[0]
    forward = lambda x, d: jax.jvp(f, (x,), (d,))[1]
    gradient_of = lambda h: lambda x, d: jax.grad(lambda x, d: jnp.sum(jnp.sin(h(x, d))[::3]), (0, 1))(x, d)
    derivatives = {
        "first": lambda x, t: [backward(x, t), forward(x, t)],
        "forward over reverse": lambda x, t: jax.jvp(lambda x: backward(x, t), (x,), (t,))[1],
        "forward over forward": lambda x, t: jax.jvp(lambda x: forward(x, t), (x,), (t,))[1],
        "reverse over reverse": lambda x, t: jax.vjp(backward, x, t)[1](t),
        "reverse over forward": lambda x, t: jax.vjp(forward, x, t)[1](t),
        "third": lambda x, t: [jax.jvp(gradient_of(h), (x, t), (t, t))[1] for h in (backward, forward)],
    }
    found = jax.jit(lambda x, t: {name: derivative(x, t) for name, derivative in derivatives.items()})(x, t)
    for name in derivatives:
        for d in jax.tree.leaves(found[name]):
            assert (d[rows] == 0).all(), name
            assert jnp.isfinite(d).all() and (d[::3] != 0).any(), name


def test_mask_is_traced_and_not_differentiated(x64):
    x, t = inputs()
    f = lambda x, m: jnp.sum(jaxkern.softmax(x, AXIS, m) * t)
    value, (dx, dm) = jax.value_and_grad(f, (0, 1), allow_int=True)(x, mask_of(SHAPE))
    assert dm.dtype == jax.dtypes.float0 and dx.shape == x.shape
    depends = lambda x: jnp.sum(jaxkern.softmax(x, AXIS, x > 0) * t)
    fixed = lambda x, m=x > 0: jnp.sum(jaxkern.softmax(x, AXIS, m) * t)
    assert_same(jax.jit(jax.grad(depends))(x), jax.grad(fixed)(x))


# ---- programs


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("rows", ["4", "rows"])
def test_export(operation, rows):
    """One program for several platforms and, where the size is a symbol, for every number of rows, kept as bytes."""
    pytest.importorskip("flatbuffers", reason="Exported.serialize needs it")
    f = jax.jit(
        lambda x: jax.value_and_grad(lambda x: getattr(jaxkern, operation)(x, -1, jnp.arange(7) < 5)[..., 0].sum())(x)
    )
    here = {"cpu": "cpu", "gpu": "cuda"}[jax.default_backend()]
    platforms = {"cpu", "cuda", "tpu"}
    shape = export.symbolic_shape(f"{rows}, 7")
    exported = export.export(f, platforms=sorted(platforms), disabled_checks=jaxkern.export_checks())(
        jax.ShapeDtypeStruct(shape, jnp.float32)
    )
    assert set(exported.platforms) == platforms
    # A launch list is for arrays of one shape.
    loaded = {"cpu": False, "cuda": registry.kernels.module is not None and rows == "4"}
    for platform in loaded:
        kernel = f"custom_call @jaxkern_{operation}("
        single = export.export(f, platforms=[platform], disabled_checks=jaxkern.export_checks())(
            jax.ShapeDtypeStruct(shape, jnp.float32)
        )
        assert (kernel in single.mlir_module()) == loaded[platform]
    again = export.deserialize(exported.serialize())
    for n in (4,) if rows == "4" else (1, 4, 9):
        x = jax.random.normal(jax.random.key(n), (n, 7))
        same = (
            np.testing.assert_array_equal
            if loaded[here]
            else functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
        )
        jax.tree.map(same, again.call(x), f(x))
    if loaded[here]:
        with pytest.raises(ValueError, match="jaxkern_"):  # the checks are needed
            export.export(f, platforms=[here])(jax.ShapeDtypeStruct(shape, jnp.float32))


@pytest.mark.gpu
def test_command_buffers_and_scan():
    """Runs inside a CUDA graph: many calls in one program, twice, with other data the second time."""

    def program(x):
        def step(c, _):
            return jaxkern.softmax(c * 3) + jaxkern.log_softmax(c, 0) * 0.1, jax.grad(
                lambda c: jaxkern.softmax(c)[:, 0].sum()
            )(c).sum()

        for _ in range(8):
            x = step(x, None)[0]
        return lax.scan(step, x, length=5)

    options = {"xla_gpu_graph_min_graph_size": 1}
    x = jax.random.normal(jax.random.key(0), (64, 1000))
    f = jax.jit(program).lower(x).compile(compiler_options=options)
    assert "custom-call" in f.as_text()
    for scale in (1.0, 2.0, 2.0):
        with jax.disable_jit():
            want = program(x * scale)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-5), f(x * scale), want)


def step_of_many_calls(x, labels):
    """Calls of every family, one after the other, and calls of their gradients."""

    def loss(x):
        for _ in range(3):
            y = jaxkern.softmax(x, scale=0.5, causal=True) + jaxkern.log_softmax(x, 0) * 0.1
            x = jaxkern.index_add(y, 0, labels % 64, y) + jaxkern.logsumexp(y, -1)[:, None] + jaxkern.reduce_max(x, 0)
            x = jaxkern.gelu(x) + jaxkern.embedding_lookup(x, labels % 64)
        return jaxkern.softmax_cross_entropy(x, labels).mean()

    value, dx = jax.value_and_grad(loss)(x)
    return value, x - 0.1 * dx


@pytest.mark.gpu
def test_a_step_of_many_calls_is_a_cuda_graph(tmp_path):
    """XLA's own list of what it launches says so; and the result is right in whatever memory a call finds its arrays."""
    f = jax.jit(step_of_many_calls, donate_argnums=0)
    labels = jnp.arange(64) * 5
    rng = np.random.default_rng(0)
    xs = [jnp.asarray(rng.normal(size=(64, 512)), jnp.float32) for _ in range(4)]
    compiled = f.lower(xs[0], labels).compile(compiler_options={"xla_dump_to": str(tmp_path)})
    assert compiled.as_text().count('custom_call_target="jaxkern_') >= 20
    launched = "".join(file.read_text() for file in tmp_path.rglob("*thunk_sequence*.txt"))
    # Earlier versions of XLA made the graph of HLO, and have it in the program.
    assert re.search("command_?buffer", launched + compiled.as_text(), re.IGNORECASE), launched
    kept = []
    for _ in range(3):
        for k, x in enumerate(xs):
            with jax.disable_jit():
                wanted = step_of_many_calls(x, labels)
            found = compiled(x, labels)
            kept.append(jnp.ones(1000 + 7 * len(kept)))  # so that the next arrays lie elsewhere
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, wanted)
            xs[k] = found[1]


def test_threads_share_the_library():
    """Many Python threads at once: the same results as one."""
    from concurrent.futures import ThreadPoolExecutor

    xs = [jax.random.normal(jax.random.key(k), (65, 301)) for k in range(8)]
    f = jax.jit(lambda x: (jaxkern.softmax(x), jax.grad(lambda x: jaxkern.log_softmax(x, 0)[3].sum())(x)))
    alone = [jax.tree.map(np.asarray, f(x)) for x in xs]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda x: jax.tree.map(np.asarray, f(x)), xs * 5))
    for k, result in enumerate(together):
        jax.tree.map(np.testing.assert_array_equal, result, alone[k % len(xs)])


@pytest.mark.parametrize(
    "call", [lambda f, x: f(x), lambda f, x: jax.jit(f)(x), lambda f, x: jax.grad(lambda x: f(x)[0, 0])(x)]
)
def test_debug_nans_finds_them(call):
    x = jnp.array([[jnp.inf, 1.0]])
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError):
            call(jaxkern.softmax, x)
        call(jaxkern.softmax, jnp.ones((2, 3)))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_checkify_finds_nan(operation):
    f = getattr(jaxkern, operation)
    functions = {
        "": f,
        "_grad": jax.grad(lambda x: jnp.where(jnp.isnan(f(x)), 0, f(x)).sum()),
        "vmap": jax.vmap(f),
        "jit": jax.jit(f),
    }
    for name, g in functions.items():
        wanted = g(jnp.ones((2, 4)))
        for checks in (checkify.nan_checks, checkify.float_checks, checkify.all_checks):
            check = jax.jit(checkify.checkify(g, errors=checks))
            assert f"nan generated by primitive: jaxkern_{operation}" in (
                check(jnp.array([[jnp.inf, 1.0]]))[0].get() or ""
            ), name
            error, result = check(jnp.ones((2, 4)))
            assert error.get() is None
            np.testing.assert_array_equal(result, wanted)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("masked", ["whole", "broadcast"])
def test_taylor_series(operation, masked, x64):
    """jax.experimental.jet, to the third order, against nested forward mode."""
    x, t = inputs()
    f, g = functions(operation, mask_of(MASKS[masked]))
    curve = lambda e: g(x + e * t)
    orders = [curve]
    for _ in range(3):
        orders.append(lambda e, h=orders[-1]: jax.jvp(h, (e,), (1.0,))[1])
    for h in (f, jax.jit(f)):
        y, terms = jet.jet(h, (x,), ([t, jnp.zeros_like(t), jnp.zeros_like(t)],))
        assert_same([y, *terms], [order(0.0) for order in orders])


def test_disable_jit():
    x = jnp.arange(6.0).reshape(2, 3)
    for f in (jaxkern.softmax, functools.partial(jaxkern.softmax, scale=0.5)):
        want = f(x)
        with jax.disable_jit():
            np.testing.assert_array_equal(f(x), want)


LARGE = {
    "rms_norm": lambda x: jaxkern.rms_norm(x, x[0]),
    "layer_norm": lambda x: jaxkern.layer_norm(x, x[0], residual=x)[0],
    "layer_norm, all axes": lambda x: jaxkern.layer_norm(x, axis=None),
    "layer_norm, where": lambda x: jaxkern.layer_norm(x, where=x > 0),
    "quantized": lambda x: jaxkern.rms_norm(x, quantize=jaxkern.Quantization())[1],
    "group_norm": lambda x: jaxkern.group_norm(x, 1),
    "batch_norm": lambda x: jaxkern.batch_norm(x)[0],
    "dropout": lambda x: jaxkern.softmax(x, dropout_rate=0.5, dropout_key=jnp.zeros(2, jnp.uint32)),
    "log_softmax": lambda x: jaxkern.log_softmax(x, axis=0),
    "reduce_mean": lambda x: jaxkern.reduce_mean(x, where=x > 0),
}


@pytest.mark.parametrize("shape", [(1, 2**31), (2**31, 2), (2, 2**31 + 1)], ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_sizes_beyond_int32(name, shape):
    """JAX reads a Python int in arithmetic as an int32."""
    f = lambda x: jnp.sum(LARGE[name](x))
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    for g in (f, f if name == "quantized" else jax.grad(f)):
        for platform in ("cuda", "cpu"):
            jax.jit(g).trace(x).lower(lowering_platforms=(platform,))


IDS = np.random.default_rng(1).integers(0, 5, 37)
MAXIMA = {
    "reduce_max": lambda f, *xs: jaxkern.reduce_max(f(*xs), axis=0),
    "segment_max": lambda f, *xs: jaxkern.segment_max(f(*xs), IDS, 5),
    "edge_max": lambda f, *xs: jaxkern.edge_max(lambda e: f(*e), jaxkern.Graph(IDS, IDS, num_nodes=5), edges=xs),
    "segment_softmax": lambda f, *xs: jaxkern.segment_softmax(f(*xs), IDS, 5),
}


@pytest.mark.parametrize("name", MAXIMA)
@pytest.mark.optimized
def test_gradients_of_maxima_under_jit(name):
    """XLA:CPU may compute the operand of a maximum twice, and round differently where the gradient compares the two.

    docs/numerics.md advises to compute the operands in a separate program. `edge_max` and `segment_softmax` do not need it.
    """
    shapes = (37, 4, 6), (37, 4, 1), (37, 1, 6)
    xs = [jax.random.normal(jax.random.key(k), shape) for k, shape in enumerate(shapes)]
    arithmetic = lambda x, y, w: x * y + w
    finite = lambda y: jnp.sin(jnp.where(jnp.isfinite(y), y, 0)).sum()
    gradient = jax.grad(lambda *xs: finite(MAXIMA[name](arithmetic, *xs)), (0, 1, 2))
    if name in ("reduce_max", "segment_max"):
        elements, pull = jax.vjp(jax.jit(arithmetic), *xs)
        found = pull(jax.jit(jax.grad(lambda x: finite(MAXIMA[name](lambda x: x, x))))(elements))
    else:
        found = jax.jit(gradient)(*xs)
    jax.config.update("jax_disable_most_optimizations", not ON_GPU)  # the reference is right without them
    for a, b in zip(found, gradient(*xs), strict=True):
        assert b.any()
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
