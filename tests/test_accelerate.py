"""Plain JAX programs under `jaxkern.accelerate`: the same results, one switch for a thread or a process, the rest of JAX.

`force=True` takes every case that kernels can run: on the CPU jaxkern's references stand for them, and on a GPU the same
tests run the kernels.
"""

import contextlib
import os
import re
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from accelerated import ALL, PLATFORM, both, close, forced
from conftest import ON_GPU
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import checkify

import jaxkern
from jaxkern._core import compat, decisions, switch

# ---- lax.scatter, over its dimension numbers


@st.composite
def scatters(draw):
    """A scatter of rows, or nearly: (operand, indices, updates), dimension numbers, options, whether it is one of rows."""
    rank = draw(st.integers(1, 4))
    shape = [draw(st.integers(1, 4)) for _ in range(rank)]
    dims = draw(st.permutations(range(rank)))
    indexed = dims[: draw(st.integers(1, min(rank, 3)))]
    rest = [d for d in dims if d not in indexed]
    batch = rest[: draw(st.integers(0, min(len(rest), 2)))]
    inserted = [d for d in indexed if draw(st.integers(0, 3))]  # the others have windows of size 1, or take the whole
    window = [d for d in range(rank) if d not in inserted and d not in batch]
    partial = draw(st.integers(0, 9)) == 0
    single = [d for d in indexed if draw(st.integers(0, 2))]
    sizes = [1 if d in single else max(1, shape[d] - partial) for d in window]
    own = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, 2)))]
    index_dims = [("batch", d) for d in batch] + [("own", n) for n in own]
    index_dims = draw(st.permutations(index_dims))
    lengths = [shape[n] if kind == "batch" else n for kind, n in index_dims]
    update_rank = len(lengths) + len(window)
    window_dims = tuple(sorted(draw(st.permutations(range(update_rank)))[: len(window)]))
    updates = [0] * update_rank
    for u, n in zip(window_dims, sizes):
        updates[u] = n
    for u, n in zip([u for u in range(update_rank) if u not in window_dims], lengths):
        updates[u] = n
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=window_dims,
        inserted_window_dims=tuple(sorted(inserted)),
        scatter_dims_to_operand_dims=tuple(indexed),
        operand_batching_dims=tuple(sorted(batch)),
        scatter_indices_batching_dims=tuple(index_dims.index(("batch", d)) for d in sorted(batch)),
    )
    mode = draw(st.sampled_from(["fill", "clip", "promise_in_bounds"]))
    dtype = draw(st.sampled_from([jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint32]))
    index_dtype = draw(st.sampled_from([jnp.int32, jnp.int8, jnp.uint8]))
    low = 0 if mode == "promise_in_bounds" or index_dtype == jnp.uint8 else -3
    high = 1 if mode == "promise_in_bounds" else 7
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if mode == "promise_in_bounds":
        last = dict(zip(window, sizes))
        columns = [rng.integers(0, shape[d] - last.get(d, 1) + 1, (*lengths, 1)) for d in indexed]
        indices = np.concatenate(columns, -1)
    else:
        indices = rng.integers(low, high, (*lengths, len(indexed)))
    whole = lambda shape: jnp.asarray(rng.integers(0, 4, shape), dtype)  # sums are exact in every type
    operand = jnp.zeros(shape, dtype) if draw(st.booleans()) else whole(shape)
    method = draw(st.sampled_from(["scatter_add", "scatter_max", "scatter_min"]))
    clipped = [d for d, u in zip(window, sizes) if mode != "fill" and d in indexed and u == shape[d] > 1]
    clipped = clipped if len(clipped) < len(indexed) else []
    rows = all(u == (1 if d in indexed and d not in clipped else shape[d]) for d, u in zip(window, sizes))
    return method, (operand, jnp.asarray(indices, index_dtype), whole(updates)), numbers, mode, rows


# Every example is a program of its own.
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(scatters())
def test_scatter(case):
    method, operands, numbers, mode, rows = case
    f = lambda *operands: getattr(lax, method)(*operands, numbers, mode=mode)
    plain = jax.jit(f)(*operands)
    with forced, decisions.recorded() as found:
        own = jax.jit(f)(*operands)
    assert [d.taken for d in found] == [rows], found
    assert own.dtype == plain.dtype
    np.testing.assert_array_equal(np.asarray(own, np.float64), np.asarray(plain, np.float64))


def test_identities_are_not_read():
    """Sums onto zeros are segment sums, also under a vmap; a maximum onto -inf needs no second maximum."""
    ids, x = jnp.array([0, 2, 2]), jnp.arange(192.0).reshape(3, 64)  # short rows are added in no fixed order
    with forced:
        segment = jax.jit(lambda x, ids: jax.ops.segment_sum(x, ids, 3)).lower(x, ids)
        onto = jax.jit(lambda y, x, ids: y.at[ids].add(x)).lower(x, x, ids)
        largest = jax.jit(lambda x, ids: jax.ops.segment_max(x, ids, 3)).lower(x, ids)
    if not ON_GPU:
        return
    assert "jaxkern_segment_sum" in segment.as_text() and "jaxkern_index_add" in onto.as_text()
    kernel = re.search("jaxkern_(segment_max|edge_reduce)", largest.as_text())  # alone, or as a chain of one operation
    assert kernel and "stablehlo.maximum" not in largest.as_text()


# ---- programs

rng = np.random.default_rng(0)
NODES, EDGES, WIDTH = 37, 150, 8
senders = jnp.asarray(rng.integers(0, NODES, EDGES), jnp.int32)
receivers = jnp.asarray((rng.zipf(1.5, EDGES) - 1) % NODES, jnp.int32)
nodes = jnp.asarray(rng.normal(size=(NODES, WIDTH)), jnp.float32)
edges = jnp.asarray(rng.normal(size=(EDGES, WIDTH)), jnp.float32)
weight = jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32)


def gcn(x, w, s, r):
    for _ in range(2):
        degree = jax.ops.segment_sum(jnp.ones(s.shape), r, NODES)
        x = jax.nn.relu(jax.ops.segment_sum((x @ w)[s], r, NODES) / jnp.maximum(degree, 1)[:, None])
    return (x**2).sum()


def gat(x, w, s, r):
    h = x @ w
    score = jax.nn.leaky_relu((h[s] * h[r]).sum(-1))
    e = jnp.exp(score - jax.ops.segment_max(score, r, NODES)[r])
    a = e / jax.ops.segment_sum(e, r, NODES)[r]
    return (jax.ops.segment_sum(h[s] * a[:, None], r, NODES) ** 2).sum()


def attention(x, w):
    scores = (x @ w) @ x.T
    return ((jax.nn.softmax(scores) @ x) ** 2).sum()


def scanned(x, s, r):
    step = lambda c, i: (c.at[s[i]].add(c[r[i]] * 0.1), (c**2).sum())
    return lax.scan(step, x, jnp.arange(5))[1].sum()


def scanned_batches(x, s, r):
    """A scan that is no kernel by itself, because each step has a Fourier transform."""
    step = lambda c, by: (c.at[by[0]].add(c[by[1]] * 0.1), (jnp.fft.rfft(c).real ** 2).sum())
    return lax.scan(step, x, (s.reshape(5, -1), r.reshape(5, -1)))[1].sum()


labels = jnp.asarray(rng.integers(0, WIDTH, NODES), jnp.int32)
ADD, MAX = "scatter_add", "scatter_max"
PROGRAMS = {
    "embedding gradient": (jax.grad(lambda t, i: (t[i] ** 2).sum()), (nodes, senders), [ADD]),
    "embedding of two index dimensions": (
        jax.grad(lambda t, i: (jnp.take(t, i, axis=0) ** 2).sum()),
        (nodes, senders.reshape(10, 15)),
        [ADD],
    ),
    "segment_sum": (lambda x, i: jax.ops.segment_sum(x, i, NODES), (edges, receivers), [ADD]),
    "segment_sum, its gradient": (
        jax.grad(lambda x, i: (jax.ops.segment_sum(x, i, NODES) ** 2).sum()),
        (edges, receivers),
        [ADD],
    ),
    "segment_max and its gradient": (
        jax.value_and_grad(lambda x, i: jnp.sum(jnp.tanh(jax.ops.segment_max(x, i, NODES)) ** 2)),
        (edges, receivers),
        [MAX],
    ),
    "segment_min": (lambda x, i: jax.ops.segment_min(x, i, NODES), (edges, receivers), ["scatter_min"]),
    "segment_prod stays": (lambda x, i: jax.ops.segment_prod(x, i, NODES), (edges, receivers), []),
    **{
        f"at[].{method}, {mode}": (
            lambda x, i, u, method=method, mode=mode: getattr(x.at[i], method)(u, mode=mode),
            (nodes, jnp.array([0, -1, 36, 3, 3, *([] if mode == "promise_in_bounds" else [37, -38, 1000])]), edges[:n]),
            [name],
        )
        for method, name in (("add", ADD), ("max", MAX), ("min", "scatter_min"))
        for mode, n in (("drop", 8), ("fill", 8), ("clip", 8), ("promise_in_bounds", 5))
    },
    "the last axis": (lambda x, i, u: x.T.at[:, i].add(u.T), (nodes, receivers, edges), [ADD]),
    "two index arrays": (lambda x, i, j: x.at[i, j % WIDTH].add(1.0), (nodes, receivers, senders), [ADD]),
    "bincount": (lambda i: jnp.bincount(i, length=NODES), (receivers,), ["bincount"]),
    "vmapped, indices too": (
        jax.vmap(lambda x, i, u: x.at[i].add(u)),
        (jnp.stack([nodes, -nodes]), jnp.stack([senders, receivers]), jnp.stack([edges, edges])),
        [ADD],
    ),
    "vmapped, one index": (
        jax.vmap(lambda x, i, u: x.at[i].add(u), (0, None, 0)),
        (jnp.stack([nodes, -nodes]), receivers, jnp.stack([edges, edges])),
        [ADD],
    ),
    "vmapped over the last axis": (
        jax.vmap(lambda x, i, u: x.at[i].max(u), (2, 1, 0), 2),
        (jnp.stack([nodes, -nodes], 2), jnp.stack([senders, receivers], 1), jnp.stack([edges, edges])),
        [MAX],
    ),
    "take_along_axis": (
        jax.grad(lambda x, i: (jnp.take_along_axis(x, i[:, None], 1) ** 2).sum()),
        (nodes, labels),
        [ADD],
    ),
    "scan": (jax.value_and_grad(scanned), (nodes, senders, receivers), ["scan", "scan"]),
    "scan of batches": (jax.value_and_grad(scanned_batches), (nodes, senders, receivers), [ADD]),
    "cond": (
        lambda x, i, u: lax.cond(x[0, 0] < 100, lambda x: x.at[i].add(u), lambda x: x, x),
        (nodes, receivers, edges),
        [ADD],
    ),
    "graph convolution": (jax.value_and_grad(gcn, (0, 1)), (nodes, weight, senders, receivers), [ADD] * 3),
    "graph attention": (jax.value_and_grad(gat, (0, 1)), (nodes, weight, senders, receivers), [ADD, MAX]),
    "attention": (jax.value_and_grad(attention, (0, 1)), (nodes, weight), ["softmax"]),
    "second derivatives": (
        jax.jacfwd(jax.grad(lambda x, i: (jax.nn.logsumexp(x[i], axis=0) ** 2).sum())),
        (nodes[:4, :2], jnp.array([0, 3, 3])),
        [ADD, "logsumexp"],
    ),
    "cross-entropy": (
        jax.value_and_grad(lambda x, y: optax.softmax_cross_entropy_with_integer_labels(x, y).mean()),
        (nodes, labels.at[0].set(-2)),
        ["softmax_cross_entropy"],
    ),
    "log_softmax": (
        jax.value_and_grad(lambda x: (jax.nn.log_softmax(x, 0)[1] ** 2).sum()),
        (nodes.astype(jnp.bfloat16),),
        ["log_softmax"],
    ),
    "checkpointed": (
        jax.value_and_grad(jax.checkpoint(lambda x, i: (jax.ops.segment_sum(x[i] ** 2, i, NODES) ** 2).sum())),
        (nodes, receivers),
        [ADD, ADD],
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name):
    f, args, expected = PROGRAMS[name]
    plain, own, taken = both(f, *args)
    assert not set(expected) - set(taken), taken
    assert bool(expected) == bool(taken) and len(taken) >= len(expected)
    close(plain, own, 2e-2 if args[0].dtype == jnp.bfloat16 else 2e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float64, jnp.int64])
def test_types(dtype, x64):
    """Sums of 16 bits are rounded once: they are closer to the exact ones than plain JAX's."""
    x = np.abs(rng.normal(size=(4000, 3))) * 8
    x, i = jnp.asarray(x, dtype), jnp.asarray(rng.integers(0, 5, 4000), jnp.int32)
    plain, own, taken = both(lambda x, i: jax.ops.segment_sum(x, i, 5), x, i)
    exact = np.zeros((5, 3))
    np.add.at(exact, np.asarray(i), np.asarray(x, np.float64))
    error = lambda y: np.max(np.abs(np.asarray(y, np.float64) - exact))
    assert taken == ["scatter_add"] and own.dtype == plain.dtype
    assert error(own) <= (error(plain) if jnp.dtype(dtype).itemsize == 2 else 1e-9)


def test_types_without_kernels_stay():
    x, i = jnp.ones((6, 2), jnp.complex64), jnp.array([0, 1, 1, 2, 2, 2])
    for x in (x, jnp.ones((6, 2), jnp.int8), jnp.ones((6, 2), jnp.float8_e4m3fn)):
        plain, own, taken = both(lambda x, i: jnp.zeros((3, 2), x.dtype).at[i].add(x), x, i)
        assert not taken and (plain == own).all()


def test_other_platforms_stay():
    """Once the rules of the CPU are in place, for tests, they take nothing that is not forced."""
    with forced:
        pass
    x, i = jnp.ones((1 << 12, 64), jnp.bfloat16), jnp.zeros(1 << 12, jnp.int32)
    with jaxkern.accelerate():
        text = (
            jax.jit(lambda x, i: jax.ops.segment_sum(x, i, 3)).trace(x, i).lower(lowering_platforms=("cpu",)).as_text()
        )
    assert (
        text
        == jax.jit(lambda x, i: jax.ops.segment_sum(x, i, 3)).trace(x, i).lower(lowering_platforms=("cpu",)).as_text()
    )


def test_shard_map():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    f = jax.shard_map(lambda x, i: jax.ops.segment_sum(x, i, 5), mesh=mesh, in_specs=spec, out_specs=spec)
    close(*both(f, edges, receivers % 5)[:2])


# ---- the switch


def table_gradient(table, ids):
    return jax.grad(lambda t: (t[ids] ** 2).sum())(table)


def test_compiled_functions_switch_both_ways():
    traces = []

    @jax.jit
    def f(x):
        traces.append(switch.current())
        return x.at[jnp.array([0, 0])].add(1.0)

    for _ in range(2):
        f(nodes)
        with forced:
            f(nodes)
            with jaxkern.accelerate(only=()):
                f(nodes)
            f(nodes)
        f(nodes)
    assert len(traces) == 3 and len(set(traces)) == 3
    assert switch.current() is None


def test_a_thread_has_its_own_switch():
    seen = {}

    def other():
        seen["value"], seen["softmax"] = switch.current(), jax.nn.softmax(nodes)

    plain = jax.nn.softmax(nodes)
    with forced:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen["value"] is None and (seen["softmax"] == plain).all()


def test_install_is_for_all_threads_and_ends():
    seen, code = [], jax.nn.softmax.__code__
    look = lambda: seen.append(switch.current())
    jaxkern.install(without="scatter_min")
    jaxkern.install(without="scatter_max")
    try:
        threads = [threading.Thread(target=look) for _ in range(2)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        with jaxkern.accelerate(only="logsumexp"):
            look()
        look()
        assert jax.nn.softmax.__code__ is not code
    finally:
        jaxkern.uninstall()
    default = frozenset({*switch.DEFAULT} - {"scatter_max"})
    assert [s.operations for s in seen] == [default, default, frozenset({"logsumexp"}), default]
    assert switch.current() is None and jax.nn.softmax.__code__ is code
    jaxkern.uninstall()


def test_nothing_changes_for_others():
    """Once used, it leaves the text of plain programs, the code of functions and their signatures as they were."""
    script = """
import inspect, jax, jax.numpy as jnp, jaxkern
def f(x, i): return jax.grad(lambda x: jax.nn.logsumexp(x[i]) + jax.nn.log_softmax(x).sum())(x), x.at[i].max(1.0)
args = jnp.ones((4, 3)), jnp.array([[0, 1], [2, 2]])
lower = lambda: jax.jit(lambda *a: f(*a)).lower(*args).as_text()
before, signature = lower(), inspect.signature(jax.nn.logsumexp)
with jaxkern.accelerate(force=True):
    assert lower() != before and inspect.signature(jax.nn.logsumexp) == signature
    jax.jit(jax.nn.log_softmax, static_argnames="axis")(args[0], axis=0)
assert lower() == before
import sys
assert "optax" not in sys.modules
with jaxkern.accelerate(force=True):
    import optax
    from optax import softmax_cross_entropy_with_integer_labels as loss
    assert "jaxkern" in loss.__code__.co_filename
assert "jaxkern" not in loss.__code__.co_filename
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_aliases_are_caught():
    from jax.nn import logsumexp as alias  # a name that was bound before

    with forced, decisions.recorded() as found:
        jax.jit(lambda x: alias(x) + jax.scipy.special.logsumexp(x))(nodes)
    assert [d.operation for d in found if d.taken] == ["logsumexp"] * 2


def test_softmax_that_is_differentiated_by_parts_stays():
    f, x = jax.grad(lambda x: jax.nn.softmax(x)[0]), jnp.arange(4.0)
    names = lambda: [d.operation for d in jaxkern.explain(jax.jit(lambda x: f(x)), PLATFORM)(x)]
    with forced:
        taken = names()
        with jax.softmax_custom_jvp(False):
            left = names()
    assert (taken, left) == (["softmax"], [])


def test_arguments():
    with pytest.raises(ValueError, match="no operation 'transpose'"):
        jaxkern.accelerate(only="transpose")
    with pytest.raises(TypeError, match="check"), jaxkern.accelerate(check=True):
        pass

    @jaxkern.accelerate(without=["scatter_add"])
    def inside():
        return switch.current()

    assert inside().operations == {
        "scatter_max",
        "scatter_min",
        *(n for n in switch.DEFAULT if n not in switch.SCATTERS),
    }
    assert inside.__name__ == "inside" and switch.current() is None

    def generator():
        yield

    async def coroutine():
        pass

    for f in generator, coroutine:
        with pytest.raises(TypeError, match=f"{f.__name__} runs after the call"):
            jaxkern.accelerate()(f)
    with pytest.raises(TypeError, match="parentheses"):
        jaxkern.accelerate(generator)
    checked = jaxkern.accelerate(check=True)(lambda x: x * 2)
    for traced, x in (jax.jit(checked), 1.0), (jax.grad(checked), 1.0), (jax.vmap(checked), jnp.ones(3)):
        with pytest.raises(TypeError, match="put the decorator above"):
            traced(x)


def test_a_block_inside_a_traced_function_warns(recwarn):
    def f(x):
        with jaxkern.accelerate():
            return x + 1

    compat.warn_once.cache_clear()
    for harmless, x in (
        (f, 1.0),
        (jax.grad(f), 1.0),
        (jax.vmap(f), jnp.ones(3)),
        (jaxkern.accelerate()(jax.jit(f)), 1.0),
    ):
        harmless(x)
    assert not [w for w in recwarn if "no effect" in str(w.message)]
    with pytest.warns(UserWarning, match="put the block around the call") as found:
        jax.jit(jax.vmap(jax.grad(f)))(jnp.ones(3))
    assert [w.filename for w in found] == [__file__]


@pytest.mark.parametrize("function", [jaxkern.accelerate, jaxkern.install])
@pytest.mark.parametrize("name", switch.FORMER)
def test_former_operations(name, function):
    """A program that names them still runs. A warning at its own line says what to call in their place."""
    what = f"has no operation {name!r} any more: .* run as they are; call jaxkern.{name} in their place"
    try:
        for names in ({"only": ["logsumexp", name]}, {"without": name}):
            with pytest.warns(FutureWarning, match=f"jaxkern.{function.__name__}: {next(iter(names))} {what}") as found:
                active = function(**names)
            assert [w.filename for w in found] == [__file__]
            with active or contextlib.nullcontext():
                wanted = ("logsumexp",) if "only" in names else switch.DEFAULT
                assert jaxkern.installed() == wanted and callable(getattr(jaxkern, name))
    finally:
        jaxkern.uninstall()


def test_check_of_an_array_that_is_rounding_alone():
    """Such an array, like the gradient of a bias of keys, is judged by the largest number of its own result."""
    from jaxkern._accelerate.checked import compared

    plain = (np.float32(100), {"w": np.array([1.0, -0.5], np.float32), "b": np.array([3e-5, -1e-5], np.float32)})
    compare = lambda b, w=(1.0, -0.5): compared(
        "max", plain, (plain[0], {"w": np.array(w, np.float32), "b": np.array(b, np.float32)}), 2**-4
    )
    assert not compare([-2e-5, 4e-5])
    for wrong in (([2e-3, 0],), ([3e-5, -1e-5], (1.1, -0.5))):
        assert "of the largest element" in compare(*wrong)


# ---- check


def test_check_passes_and_takes_donated_arguments():
    calls = []

    def f(table, ids):
        calls.append(1)
        return table_gradient(table, ids), table

    step = jaxkern.accelerate(only=ALL, check=True, force=True)(jax.jit(f, donate_argnums=0))
    gradient, _ = step(jnp.array(nodes), senders)
    close(table_gradient(nodes, senders), gradient)
    step(jnp.array(nodes), senders)
    assert len(calls) == 2  # traced once plain and once not


def test_check_reports(monkeypatch):
    from jaxkern._accelerate import rules

    wrong = lambda *args, **kwargs: jaxkern._ops.indexing.primitive.index_add(*args, **kwargs) * 1.01
    monkeypatch.setattr(
        rules, "primitive", type("wrong", (), {**vars(rules.primitive), "index_add": staticmethod(wrong)})
    )
    f = jax.jit(lambda x, i, u: {"sum": x.at[i].add(u)})
    with pytest.raises(ArithmeticError) as e:
        jaxkern.accelerate(check=True, force=True, deterministic=True)(f)(nodes, receivers, edges)
    assert "['sum']: differs by" in str(e.value) and "scatter_add" in str(e.value)
    assert "of the largest element; 0.00024 of it is allowed" in str(e.value)
    for nothing in (0, 0.0):  # no difference is allowed
        with pytest.raises(ArithmeticError, match="; 0 of it is allowed"):
            jaxkern.accelerate(check=nothing, force=True, deterministic=True)(f)(nodes, receivers, edges)
    with pytest.raises(TypeError, match="check compares the results of a function"), jaxkern.accelerate(check=0.0):
        pass
    jaxkern.accelerate(check=0.1, force=True, deterministic=True)(f)(nodes, receivers, edges)


def test_the_warning_inside_a_traced_function_names_its_line():
    @jax.jit
    def inside(x):
        return jaxkern.accelerate()(jnp.sin)(x)

    compat.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="entered inside a function that JAX traces") as caught:
        inside(1.0)
    (warning,) = (w for w in caught if "entered inside" in str(w.message))
    assert (warning.filename, warning.lineno) == (__file__, inside.__wrapped__.__code__.co_firstlineno + 2)


# ---- the rest of JAX


@pytest.mark.parametrize("platforms", (["cuda"], ["cpu", "cuda"]))
def test_functions_are_taken_in_programs_exported_without_a_gpu(platforms):
    f = jax.jit(lambda x: jax.nn.logsumexp(x, -1))
    with jaxkern.accelerate(export=True):
        export = jax.export.export(f, platforms=platforms, disabled_checks=jaxkern.export_checks())
        exported = export(jax.ShapeDtypeStruct((8192, 4096), jnp.float32))
        small = jax.random.normal(jax.random.key(0), (4, 8))
        close(f(small), jax.scipy.special.logsumexp(small, -1))
    assert "jaxkern_" in exported.mlir_module()


def test_exported_programs_stay_plain():
    f = jax.jit(lambda x, i: (jax.ops.segment_sum(x, i, NODES), jax.nn.logsumexp(x, 1)))
    with forced:
        exported = jax.export.export(f, platforms=["cpu", "cuda"])(edges, receivers)
        assert "@jaxkern" not in exported.mlir_module()
    close(f(edges, receivers), exported.call(edges, receivers))
    with jaxkern.accelerate(force=True, export=True):
        checks = jaxkern.export_checks()
        exported = jax.export.export(f, platforms=["cpu", "cuda"], disabled_checks=checks)(edges, receivers)
        assert "@jaxkern" in exported.mlir_module()
    close(f(edges, receivers), exported.call(edges, receivers))
    if jaxkern._core.registry.kernels_run():
        with jaxkern.accelerate(force=True, export=True):
            exported = jax.export.export(f, platforms=["cuda"], disabled_checks=jaxkern.export_checks())(
                edges, receivers
            )
        assert "jaxkern_edge_scatter" in exported.mlir_module()


def test_symbolic_shapes_stay():
    f = jax.jit(lambda x, i: jax.ops.segment_sum(x, i, NODES))
    (n,) = jax.export.symbolic_shape("n")
    shapes = jax.ShapeDtypeStruct((n, WIDTH), jnp.float32), jax.ShapeDtypeStruct((n,), jnp.int32)
    with forced:
        exported = jax.export.export(f)(*shapes)
    close(f(edges, receivers), exported.call(edges, receivers))
    g = jax.jit(lambda x, i: lax.scan(lambda c, i: (c + 1, nodes[c % NODES] * nodes[i]), 0, i)[1])
    for context in (jaxkern.accelerate(export=True), jaxkern.accelerate(force=True, export=True)):
        with context:  # a loop of as many steps as there are indices
            exported = jax.export.export(g, platforms=["cuda"])(*shapes)
        assert "@jaxkern" not in exported.mlir_module()


def test_a_mesh_without_devices():
    """JAX lowers no primitive there that needs to know the devices."""
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x, i = (jax.ShapeDtypeStruct((4, *a.shape[1:]), a.dtype, sharding=sharding) for a in (edges, receivers))
    with forced:
        lowered = (
            jax.jit(lambda x, i: jax.ops.segment_sum(x, i, NODES)).trace(x, i).lower(lowering_platforms=(PLATFORM,))
        )
    assert "stablehlo.scatter" in lowered.as_text() and "@jaxkern" not in lowered.as_text()


def test_checkify_and_debug_nans():

    checked = jax.jit(checkify.checkify(lambda x, i: jax.nn.logsumexp(x.at[i].get() / 0), errors=checkify.all_checks))
    for context in (jaxkern.accelerate(only=()), forced):
        with context:
            assert "division by zero" in str(checked(nodes, receivers)[0].get())
    with forced, jax.debug_nans(True):
        close(*both(lambda x, i, u: x.at[i].add(u), nodes, receivers, edges)[:2])
        with pytest.raises(FloatingPointError):
            jax.jit(lambda x, i, u: x.at[i].add(u))(nodes, receivers, edges * jnp.inf * 0)


def test_taylor_series():
    from jax.experimental.jet import jet

    f = lambda x: jax.nn.logsumexp(jax.nn.softmax(x), axis=1)
    series = lambda: jet(f, (nodes,), ((jnp.ones_like(nodes), nodes**2),))
    plain = series()
    with forced:
        close(plain, series())


def test_compilation_cache(tmp_path):
    """A program on jaxkern is found again by another process, and is not taken for the plain one."""
    script = f"""
import jax, jax.numpy as jnp, jaxkern, sys
jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
f = jax.jit(lambda x, i: jax.ops.segment_sum(x, i, 5))
args = jnp.ones((6, 2), jnp.bfloat16), jnp.array([0, 1, 1, 4, 4, 4])
plain = f(*args)
with jaxkern.accelerate(force=True):
    own = f(*args)
assert (plain == own).all()
"""
    counts = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
        counts.append(sorted(p.name for p in tmp_path.iterdir() if p.name.endswith("-cache")))
    assert counts[0] == counts[1] and sum("segment_sum" in n or "lambda" in n for n in counts[0]) == 2


DEVICES = """
import collections, re, jax, jax.numpy as jnp, numpy as np, jaxkern
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
def sent(text):
    return collections.Counter(re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\\(", text))
rng = np.random.default_rng(0)
t, i = rng.normal(size=(16, 8)).astype(np.float32), rng.integers(-3, 20, (4, 6)).astype(np.int32)
u = rng.normal(size=(4, 6, 8)).astype(np.float32)
add = lambda t, i, u: t.at[i].add(u)
zeros = lambda t, i, u: jnp.zeros((16, 8)).at[i].add(u)
grad = lambda t, i, u: jax.grad(lambda t: (t[i] * u).sum())(t)
large = lambda t, i, u: t.at[i].max(u)
CASES = [
    (add, (), (), ()), (add, ("a",), (), ()), (add, (None, "b"), (), (None, None, "b")),
    (add, (), ("a",), ("a",)), (zeros, (), ("a", "b"), ("a", "b")), (grad, (), ("a",), ("a",)), (grad, (None, "b"), ("a",), ("a", None, "b")),
    (large, (), ("a",), ("a",)), (large, ("a",), (), ()), (grad, (), (None, "b"), (None, "b")),
]
for f, *specs in CASES:
    args = [put(x, *s) for x, s in zip((t, i, u), specs)]
    jitted = jax.jit(f)
    plain, text = jitted(*args), jitted.lower(*args).compile().as_text()
    with jaxkern.accelerate(force=True):
        found = jaxkern.explain(jitted, jax.default_backend() if jax.default_backend() == "cpu" else "cuda")
        own, ours = jitted(*args), jitted.lower(*args).compile().as_text()
    np.testing.assert_allclose(own, plain, rtol=1e-5, atol=1e-5)
    a, b = sent(text), sent(ours)
    print(f.__name__, specs, dict(a), dict(b), own.sharding.spec, plain.sharding.spec)
    assert sum(b.values()) <= sum(a.values()), (specs, a, b)
    assert b["all-gather"] <= a["all-gather"]
"""


@pytest.mark.process
@pytest.mark.skipif(ON_GPU, reason="four devices of the CPU")
def test_several_devices_send_no_more_than_before():
    env = os.environ | {
        "XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=4",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_PLATFORMS": "cpu",
    }
    result = subprocess.run([sys.executable, "-c", DEVICES], env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
