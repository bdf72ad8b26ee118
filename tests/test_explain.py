"""`jaxkern.explain`: what a GPU would run on kernels, what stays with XLA, and why."""

import functools
import re
import threading

import jax
import jax.numpy as jnp
import optax
import pytest
from accelerated import forced
from conftest import ON_GPU
from jax import lax
from test_accelerate import edges, nodes, receivers

import jaxkern
from jaxkern._core import decisions, switch
from jaxkern.accelerate import ELSEWHERE

# ---- explain


def big(dtype):
    return jax.ShapeDtypeStruct((1 << 17, 128), dtype), jax.ShapeDtypeStruct((1 << 19,), jnp.int32)


def test_explain_tells_what_a_gpu_would_run(measured_jaxlib):
    def f(x, i):
        return jax.ops.segment_sum(x[i] * 2, i, 1 << 16), jax.ops.segment_prod(x[i], i, 10)

    def line(text):
        return next(d for d in found if text in d.reason)

    def reversed(x, i):
        return jax.ops.segment_sum(x[i][::-1], i, 1 << 16), jax.ops.segment_prod(x[i], i, 10)

    chain = "one message kernel instead of gather, multiply and scatter"
    kernels = jaxkern._core.registry.kernels_run()
    cases = [(f, jnp.bfloat16, chain), (f, jnp.float32, chain)]
    cases += [(reversed, jnp.bfloat16, "16-bit sums"), (reversed, jnp.float32, "fuses the gather")]
    for f, dtype, reason in cases:
        found = jaxkern.explain(f)(*big(dtype))
        assert len(found) == 1  # products are not operations of jaxkern
        if kernels:
            (d,) = found
            assert d.taken == ("fuses" not in reason) and reason in d.reason
            assert d.operation == "scatter_add" and f"test_explain.py:{f.__code__.co_firstlineno + 1}" in d.source
            assert d.bytes >= (1 << 26) * jnp.dtype(dtype).itemsize
            table = str(found).splitlines()
            assert reason in table[1] and d.source in table[1]
            assert len(table) == 2 if ON_GPU else table[2:] == [ELSEWHERE]
    assert "no operation" in str(jaxkern.explain(jnp.sin)(1.0))


def test_a_gather_behind_a_call_is_seen(measured_jaxlib):
    f = lambda x, i: jax.ops.segment_sum(jax.nn.silu(jnp.take(x, i, axis=0))[::-1], i, 1000)
    assert [d.taken for d in jaxkern.explain(f)(*big(jnp.float32))] == [False]
    assert "fuses the gather" in str(jaxkern.explain(f)(*big(jnp.float32)))


@pytest.mark.skipif(not jaxkern._core.registry.kernels_run(), reason="no kernels")
@jaxkern.accelerate(without="rows")
def test_arithmetic_that_makes_logits_stays_with_xla():
    """A kernel would read what XLA computes where it reads it; a slice would have to be copied."""

    def loss(wider, x, w, y):
        return optax.softmax_cross_entropy_with_integer_labels(wider(x @ w), y).mean()

    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 64), (64, 2048)))
    y = jax.ShapeDtypeStruct((4096,), jnp.int32)
    widened, shifted = lambda a: a.astype(jnp.float32), lambda a: a[:, 1:]
    for wider, taken in ((lambda a: a, True), (widened, False), (jnp.tanh, False), (shifted, False)):
        f = jax.value_and_grad(lambda x, w, y: loss(wider, x, w, y))
        (d,) = (d for d in jaxkern.explain(f)(x, w, y) if d.operation == "softmax_cross_entropy")
        assert d.taken == (taken or wider is widened), d  # 16-bit logits that are converted are read as they are
        assert d.shapes.startswith("bf16")
        g = lambda x, w: jax.nn.logsumexp(wider(x @ w), 1)
        assert [d.taken for d in jaxkern.explain(g)(x, w)] == [taken]


def lse(x):
    return jax.nn.logsumexp(x, 1)


lse_jvp = jax.custom_jvp(lse)
lse_jvp.defjvp(lambda x, dx: jax.jvp(lse, x, dx))


def distances(x, w):
    """Squared distances of points, scaled, as Sinkhorn's algorithm has them."""
    square = lambda a: (a * a).sum(1)
    return (square(x)[:, None] + square(w.T)[None] - 2 * (x @ w)) / 0.1


def scanned_rows(f):
    return lambda x, w: lax.scan(lambda c, row: (c, lse(f(row, w))), 0.0, x.reshape(4, 1024, 64))[1]


# The rows that are reduced, as a function of x (4096, 64) and w (64, 512), and whether a kernel reduces them.
ROWS = {
    "an argument": (lambda x, w: lse(x), True),
    "a product": (lambda x, w: lse(x @ w), True),
    "a product with a bias": (lambda x, w: lse(x @ w + w[0]), True),
    "a product of several dimensions": (lambda x, w: lse((x.reshape(4, 1024, 64) @ w).reshape(-1, 512)), True),
    "a product with a number for each row": (lambda x, w: lse(x @ w + x[:, :1]), False),
    "an outer product": (lambda x, w: lse(x[:, :1] @ w[:1]), False),
    "a transposed product": (lambda x, w: lse((x @ w).T), True),
    "a transposed argument": (lambda x, w: lse(x.T), False),
    "arithmetic": (lambda x, w: lse(x * 2), False),
    "arithmetic, reshaped": (lambda x, w: lse((x * 2).reshape(512, 512)), False),
    "arithmetic, transposed": (lambda x, w: lse(jnp.tanh(x).T), False),
    "arithmetic in a function": (lambda x, w: lse(jax.nn.gelu(x @ w, approximate=False)), False),
    "rows of a table": (lambda x, w: lse(x[jnp.arange(4096) % 7]), False),
    "squared distances": (lambda x, w: lse(distances(x, w)), False),
    "a function of a product": (lambda x, w: lse_jvp(x @ w), True),
    "a function of an argument": (lambda x, w: jax.jit(lse_jvp)(x), True),
    "a function of arithmetic": (lambda x, w: lse_jvp(distances(x, w)), False),
    "functions of functions of arithmetic": (lambda x, w: jax.jit(lambda y, x: lse_jvp(y))(x * 2, x), False),
    "checkpointed arithmetic": (jax.checkpoint(lambda x, w: lse(x * 2)), False),
    "mapped arithmetic": (lambda x, w: jax.vmap(lambda r: jax.nn.logsumexp(jnp.sin(r)))(x), False),
    "products in a loop": (scanned_rows(lambda x, w: x @ w), True),
    "arithmetic in a loop": (scanned_rows(distances), False),
    "what a loop carries": (lambda x, w: lax.fori_loop(0, 3, lambda k, c: x + lse(c)[:, None], x), True),
    "a product in a branch": (lambda x, w: lax.cond(w[0, 0] > 0, lse, lambda y: y[:, 0], x @ w), True),
    "arithmetic in a branch": (lambda x, w: lax.cond(w[0, 0] > 0, lse, lambda y: y[:, 0], x * 2), False),
    "the gradient of softmax after a product": (jax.grad(lambda x, w: ((jax.nn.softmax(x) @ w) ** 2).sum()), True),
    "the gradient of softmax after arithmetic": (jax.grad(lambda x, w: (jax.nn.softmax(x) ** 2).sum()), False),
    "a loss of arithmetic in a function": (
        lambda x, w: jax.jit(optax.softmax_cross_entropy_with_integer_labels)(jnp.tanh(x @ w), jnp.zeros(4096, int)),
        False,
    ),
}


@pytest.mark.skipif(not jaxkern._core.registry.kernels_run(), reason="no kernels")
@pytest.mark.parametrize("name", ROWS)
@jaxkern.accelerate(without="rows")
def test_no_rows_are_taken_out_of_arithmetic_that_xla_fuses(name):
    f, taken = ROWS[name]
    shapes = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4096, 64), (64, 512)))
    found = jaxkern.explain(f)(*shapes)
    assert [d.taken for d in found if d.operation not in (*switch.SCATTERS, "scan", "while_loop")] == [taken], found


@pytest.mark.skipif(not jaxkern._core.registry.kernels_run(), reason="no kernels")
@jaxkern.accelerate(without="rows")
def test_the_gradient_of_attention():
    """A matrix product makes the cotangent of the first softmax, and arithmetic the cotangent of the second."""
    q, k = (jax.ShapeDtypeStruct((8, 512, 64), jnp.bfloat16) for _ in range(2))
    attend = lambda q, k: jax.nn.softmax(q @ k.mT) @ k
    dropped = lambda q, k: (jax.nn.softmax(q @ k.mT) * 2) @ k
    for f, taken in ((attend, True), (dropped, False)):
        found = jaxkern.explain(jax.grad(lambda q, k: f(q, k).sum().astype(jnp.float32)))(q, k)
        assert [(d.operation, d.taken) for d in found] == [("softmax", taken)], found


@pytest.mark.skipif(not jaxkern._core.registry.kernels_run(), reason="no kernels")
@pytest.mark.parametrize("without, operation", [((), "rows"), ("rows", "softmax")])
def test_softmax_in_float32_is_left_to_rows(without, operation):
    """What they leave is then the program as it is without us."""
    f = jax.grad(lambda x: jnp.square(jax.nn.softmax(jnp.tanh(x))).sum())
    with jaxkern.accelerate(without=without):
        found = jaxkern.explain(f)(jax.ShapeDtypeStruct((4096, 512), jnp.float32))
    assert {d.operation for d in found} == {operation}, found


@pytest.mark.skipif(not jaxkern._core.registry.kernels_run(), reason="no kernels")
def test_explain_lists_operations_on_request():
    f = jax.grad(lambda x: jnp.square(jax.nn.log_softmax(x) @ x.T).sum().astype(jnp.float32))
    large, small = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 256), (16, 256)))
    reasons = lambda found: [(d.operation, d.taken, d.reason) for d in found]
    with jaxkern.accelerate(without="rows"):
        assert reasons(jaxkern.explain(f)(large)) == [("log_softmax", False, "on request: the gradient in one read")]
        assert "on request" in str(jaxkern.explain(f)(large))
        assert reasons(jaxkern.explain(f)(small)) == [("log_softmax", False, "on request, but 16 rows of 256 are few")]
    with jaxkern.accelerate(only="log_softmax"):
        assert reasons(jaxkern.explain(f)(large)) == [("log_softmax", True, "the gradient in one read")]
    text = lambda: jax.jit(f).trace(large).lower(lowering_platforms=("cuda",)).as_text()
    plain = text()
    with jaxkern.accelerate(without="rows"):
        assert text() == plain


def test_explain_takes_any_callable():
    class Layer:
        def __init__(self, name):
            self.name = name

        def __call__(self, x, i, times=1, mode=None):
            assert type(times) is int  # is no array
            return {"sum": jax.ops.segment_sum(x[i] * times, i, 1 << 16, mode=mode), "name": self.name}

    layer, (x, i) = Layer("sum"), big(jnp.bfloat16)
    callables = {
        "an object": layer,
        "a method": layer.__call__,
        "a partial function": functools.partial(layer, times=2, mode="drop"),
        "a function of pytrees": lambda x, i: layer(**{"x": x, "i": i}),
        "a jitted function": jax.jit(lambda x, i: layer(x, i)["sum"]),
        "a partial jitted function": functools.partial(
            jax.jit(lambda x, i: layer(x, i)["sum"]), i=jnp.zeros(1 << 19, int)
        ),
    }
    for name, f in callables.items():
        arguments = (x,) if name == "a partial jitted function" else (x, i)
        found = jaxkern.explain(f)(*arguments)
        assert [d.operation for d in found] == ["scatter_add"], name
    assert len(jaxkern.explain(lambda x, i, n: layer(x, i, n)["sum"], static_argnums=2)(x, i, 1)) == 1
    equinox = pytest.importorskip("equinox")
    found = jaxkern.explain(equinox.filter_jit(lambda layer, x, i: layer(x, i)["sum"]))(layer, x, i)
    assert found[0].operation == "scatter_add" and found[-1] is found[0] and found[:1] == list(found)


def test_explain_sees_what_a_function_puts_into_its_arguments():
    """As a step of flax.nnx does, which updates its module and returns the loss alone."""

    @jax.tree_util.register_pytree_node_class
    class Module:
        def __init__(self, x):
            self.x = x

        def tree_flatten(self):
            return (self.x,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    def step(module, i):
        module.x -= jax.grad(lambda x: x[i].sum())(module.x)

    x, i = big(jnp.bfloat16)
    module = Module(x)
    assert [d.operation for d in jaxkern.explain(step)(module, i)] == ["scatter_add"] and module.x is x
    assert "return the gradients" in str(jaxkern.explain(lambda x, i: step(Module(x), i))(x, i))


def test_explain_for_another_platform():
    found = jaxkern.explain(lambda x, i: (jax.ops.segment_sum(x[i], i, 9), jax.nn.logsumexp(x, 1)), "cpu")(
        *big(jnp.float32)
    )
    reason = "programs for cpu run as they are"
    assert [(d.operation, d.taken, d.reason) for d in found] == [
        ("scatter_add", False, reason),
        ("logsumexp", False, reason),
    ]
    with pytest.raises(ValueError, match="platform must be one of") as caught:
        jaxkern.explain(jnp.sin, jnp.ones(3))
    assert "explain(f)(*arguments)" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"deterministic": True}, r"the block around it: `with jaxkern\.accelerate\(deterministic=True\):`"),
        ({"static_argnum": 1}, r"static_argnum is no option of jax\.jit; .*explain\(f\)\(\*arguments\)"),
        ({"static_argnums": 1}, "static_argnums is for jax.jit, and f is jitted already"),
    ],
)
def test_options_that_explain_cannot_use(options, message):
    with pytest.raises(TypeError, match=rf"jaxkern\.explain: .*{message}"):
        jaxkern.explain(jax.jit(jnp.sin), **options)


def test_explain_says_that_small_rows_are_not_listed():
    from jaxkern._accelerate import rows

    found = jaxkern.explain(lambda x: x / jnp.sum(x, -1, keepdims=True))(jnp.ones((8, 64)))
    assert not len(found) and f"rows of arrays with fewer than {rows.LEAST} elements" in str(found)


def test_the_source_in_an_installed_package_is_named_from_the_folder_of_packages(monkeypatch):
    frames = [("/env/lib/python3/site-packages/flax/nnx/layers.py", 7, "f"), ("<string>", 1, "g")]
    monkeypatch.setattr(decisions, "_PACKAGES", ("/env/lib/python3", "/env/lib/python3/site-packages"))
    assert decisions.source_of(frames) == "flax/nnx/layers.py:7"
    assert decisions.source_of([*frames, ("/home/me/model.py", 3, "h")]) == "/home/me/model.py:3"


@pytest.mark.skipif(ON_GPU, reason="of a process without a GPU")
def test_explain_when_compiled_for_another_platform(monkeypatch, capsys):
    monkeypatch.setenv("JAXKERN_EXPLAIN", "1")
    x, i = jnp.ones((6, 4)), jnp.array([0, 1, 1, 4, 4, 4])
    with jaxkern.accelerate():
        jax.jit(lambda x, i: (jax.ops.segment_sum(x, i, 5), jax.nn.softmax(x), jax.nn.logsumexp(x)))(x, i)
    lines = capsys.readouterr().err.splitlines()
    for name in ("scatter_add", "softmax", "logsumexp"):
        (line,) = (text for text in lines if f"left {name} " in text)
        assert "test_explain.py" in line and line.endswith("programs for cpu run as they are"), lines
    assert len(lines) == 3


def test_what_is_on_can_be_asked():
    assert jaxkern.installed() == ()
    with jaxkern.accelerate(only=["softmax", "scatter_add"]):
        assert jaxkern.installed() == ("scatter_add", "softmax")
    jaxkern.install(without="scatter_max")
    try:
        assert jaxkern.installed() == tuple(n for n in switch.DEFAULT if n != "scatter_max")
        with jaxkern.accelerate(only=()):
            assert jaxkern.installed() == ()
        seen = []
        thread = threading.Thread(target=lambda: seen.append(jaxkern.installed()))
        thread.start()
        thread.join()
        assert seen == [jaxkern.installed()]
    finally:
        jaxkern.uninstall()
    assert jaxkern.installed() == ()


def test_many_operands_in_a_table():
    shapes = ", ".join(["f32[2,3]"] * 12 + ["s32[4]"] + [f"f32[{k},3]" for k in range(20)])
    found = decisions.Decision("scan", True, "why", shapes, "file.py:1")
    line = str(decisions.Explanation([found])).splitlines()[1]
    assert re.search(r"  12 x f32\[2,3\], s32\[4\], f32\[0,3\], .*, \.\.\.  +why  file.py:1", line) and len(line) < 110


def test_nested_records():
    """The lists of both blocks are empty, and so equal, when the inner one ends."""
    with decisions.recorded() as outer:
        with decisions.recorded() as inner:
            pass
        jaxkern.explain(jax.grad(lambda x, i: x[i].sum()))(*big(jnp.bfloat16)[:2])
    assert outer and not inner


def test_explain_when_compiled(monkeypatch, capsys):
    monkeypatch.setenv("JAXKERN_EXPLAIN", "1")
    with forced:
        jax.jit(lambda x: x.at[receivers].add(edges))(nodes)
    assert "took scatter_add float32[37,8]" in (err := capsys.readouterr().err).replace("f32[", "float32["), err
    jax.jit(lambda x: x.at[receivers].add(edges))(nodes)
    assert not capsys.readouterr().err
