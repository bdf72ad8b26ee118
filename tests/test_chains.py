"""Chains of gathers, arithmetic and a scatter of rows, which `jaxkern.accelerate` runs as one message kernel.

On the CPU jaxkern's references run in place of the kernels; on a GPU the same tests run the kernels.
"""

import functools
import gc
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_programs
from conftest import ON_GPU
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

import jaxkern
from jaxkern._accelerate import gate
from jaxkern._accelerate.program import Program
from jaxkern._core import decisions, launch, registry

SCATTERS = ("scatter_add", "scatter_max", "scatter_min")
forced = jaxkern.accelerate(only=SCATTERS, force=True, deterministic=True)
unordered = jaxkern.accelerate(only=SCATTERS, force=True)

NODES, EDGES, WIDTH = 37, 150, 8
rng = np.random.default_rng(0)
floats = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
ids = lambda *shape: jnp.asarray(rng.integers(-4, NODES + 5, shape), jnp.int32)  # some out of range, and negative
nodes, others, edges, bias = floats(NODES, WIDTH), floats(NODES, WIDTH), floats(EDGES, WIDTH), floats(WIDTH)
weights, senders, receivers, third = floats(EDGES), ids(EDGES), ids(EDGES), ids(EDGES)


def chains(decisions):
    """The operations of each chain that was taken."""
    return [d.reason.removeprefix("one message kernel instead of ") for d in decisions if "kernel" in d.reason]


def check(f, *args, rtol=2e-5, forced=forced):
    """Runs f plain and on jaxkern, and compares; returns the chains that were taken."""
    jitted = jax.jit(lambda *args: f(*args))  # compiled again
    plain = jitted(*args)
    with forced, decisions.recorded() as found:
        own = jitted(*args)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(own), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
        scale = np.max(np.abs(a), where=np.isfinite(a), initial=1)
        np.testing.assert_allclose(b, a, rtol=rtol, atol=rtol * scale)
    return chains(found)


def gradient(f, argnums=0):
    """The gradient of a sum of squares of f."""
    return jax.grad(lambda *args: (f(*args).astype(jnp.float32) ** 2).sum(), argnums)


# ---- programs

sums = lambda messages, to: jax.ops.segment_sum(messages, to, NODES)
convolution = lambda x, w, s, r: sums(x[s] * w[:, None], r)
taken = lambda x, w, s, r: sums(jnp.where(jnp.isnan(y := jnp.take(x, s, axis=0)), 1, y) * w[:, None], r)
activated = lambda x, w, s, r: sums(jax.nn.silu(x[s]) * w[:, None], r)
both_ends = lambda x, w, s, r: sums(jax.nn.relu(x[s] - x[r]) * w[:, None], r)
onto = lambda x, w, s, r: x.at[r].add(x[s] * w[:, None])
clipped = lambda x, w, s, r: x.at[r].add(x[s] * w[:, None], mode="clip")


def layers(x, w, s, r):
    for _ in range(2):
        x = jax.nn.relu(convolution(x, w, s, r) * 0.1)
    return x


FORWARD = {
    "a graph convolution": (convolution, "gather, multiply and scatter"),
    "jnp.take, that fills with NaN": (taken, "gather, select, compare, multiply and scatter"),
    "jax.nn.silu": (activated, "gather, negate, exponential, add, divide, multiply and scatter"),
    "senders and receivers": (both_ends, "gather, subtract, maximum, multiply and scatter"),
    "onto an array": (onto, "gather, multiply and scatter"),
    "clipped indices": (clipped, "gather, multiply and scatter"),
    "an array of edges": (
        lambda x, w, s, r: sums(jnp.sin(x[s]) + edges.astype(x.dtype), r),
        "gather, sine, add and scatter",
    ),
    "a bias": (lambda x, w, s, r: sums(x[s] * bias.astype(x.dtype) + 1, r), "gather, multiply, add and scatter"),
    "a scalar argument": (lambda x, w, s, r: sums(x[s] * w[0], r), "gather, multiply and scatter"),
    "converted": (
        lambda x, w, s, r: sums((x[s].astype(jnp.float32) * 1.5).astype(x.dtype), r),
        "gather, ",
    ),
    "features in two dimensions": (
        lambda x, w, s, r: sums(x.reshape(NODES, 2, 4)[s] * w[:, None, None] * x[:, :2][r][:, :, None], r),
        "gather, multiply and scatter",
    ),
    "transposed features": (
        lambda x, w, s, r: sums(x.reshape(NODES, 2, 4).transpose(0, 2, 1)[s].transpose(0, 2, 1) * w[:, None, None], r),
        "gather, ",
    ),
    "no features": (lambda x, w, s, r: sums(x[:, 0][s] * w, r), "gather, multiply and scatter"),
    "a mask of edges": (
        lambda x, w, s, r: sums(jnp.where((w > 0)[:, None], x[s], -x[s]), r),
        "gather, negate, select and scatter",
    ),
    "two index dimensions": (
        lambda x, w, s, r: x.at[r.reshape(10, 15)].add(x[s.reshape(10, 15)] * w.reshape(10, 15, 1)),
        "gather, multiply and scatter",
    ),
    "repeated along a dimension of the indices": (
        lambda x, w, s, r: x.at[r[:130].reshape(10, 13)].add(jnp.broadcast_to(x[:10, None] * 2, (10, 13, WIDTH))),
        "broadcast and scatter",
    ),
    "the same, along the first": (
        lambda x, w, s, r: x.at[r[:130].reshape(10, 13)].add(jnp.broadcast_to(x[:13] * 2, (10, 13, WIDTH))),
        "broadcast and scatter",
    ),
    "indices of 8 bits": (
        lambda x, w, s, r: sums(x[s.astype(jnp.int8)] * w[:, None], r.astype(jnp.int8)),
        "gather, multiply and scatter",
    ),
    "unsigned indices": (
        lambda x, w, s, r: sums(x[s.astype(jnp.uint32)] * w[:, None], r.astype(jnp.uint8)),
        "gather, multiply and scatter",
    ),
    "a maximum": (lambda x, w, s, r: jax.ops.segment_max(-x[s], r, NODES), "gather, negate and scatter"),
    "a minimum, onto an array": (lambda x, w, s, r: x.at[r].min(x[s]), "gather and scatter"),
    "a loop": (
        lambda x, w, s, r: lax.fori_loop(0, 3, lambda k, x: convolution(x, w, s, r) * 0.1, x),
        "gather, multiply and scatter",
    ),
}


@pytest.mark.parametrize("number, name", list(enumerate(FORWARD)))
def test_programs(number, name):
    f, expected = FORWARD[name]
    dtype = (jnp.float32, jnp.bfloat16)[number % 2]
    args = nodes.astype(dtype), weights.astype(dtype), senders, receivers
    # Sums of float32 are in no fixed order unless one is asked for.
    for context in (forced, unordered) if dtype == jnp.float32 else (forced,):
        found = check(f, *args, rtol=2e-5 if dtype == jnp.float32 else 2e-2, forced=context)
        (found,) = [text.replace("convert, ", "") for text in found]
        if context is unordered and "imum" not in name:
            assert found.endswith(", in no fixed order")
            found = found.removesuffix(", in no fixed order")
        assert found == expected or (expected.endswith(", ") and found.startswith(expected)), found


@pytest.mark.parametrize(
    "f, count, dtype",
    [
        (layers, 4, jnp.float32),
        (layers, 4, jnp.bfloat16),
        (activated, 2, jnp.float16),
        (both_ends, 3, jnp.float32),
        (both_ends, 3, jnp.bfloat16),
        (onto, 2, jnp.float32),
        (clipped, 2, jnp.bfloat16),
    ],
)
def test_gradients(f, count, dtype):
    """The gradient's scatters are chains as well, where their updates are made in the same function."""
    args = nodes.astype(dtype), weights.astype(dtype), senders, receivers
    for context in (forced, unordered) if dtype == jnp.float32 else (forced,):
        assert (
            len(check(gradient(f, (0, 1)), *args, rtol=3e-5 if dtype == jnp.float32 else 3e-2, forced=context)) == count
        )


def test_embedding_bags():
    """The cotangent of a bag's sum is read by bag, not repeated for each of its ids."""
    bags = ids(20, 7)
    f = gradient(lambda x, i: x[i].sum(1))
    assert check(f, nodes, bags) == ["broadcast and scatter"]
    check(gradient(lambda x, i: x[i].mean(0)), nodes, bags)


# ---- where chains end

matrix = floats(WIDTH, WIDTH)
ENDS = {
    # A product of matrices is an operand, stored as before.
    "dot_general": (lambda x, w, s, r: sums(x[s] * (edges @ matrix), r), ["gather, multiply and scatter"]),
    "dot_general of a gather": (lambda x, w, s, r: sums(x[s] @ matrix, r), []),
    "dot_general of a gather, and another": (
        lambda x, w, s, r: sums(x[r] * (x[s] @ matrix), r),
        ["gather, multiply and scatter"],
    ),
    "cumsum": (lambda x, w, s, r: sums(jnp.cumsum(x[s], 0), r), []),
    "control flow": (lambda x, w, s, r: sums(lax.cond(w[0] > 9, jnp.sin, jnp.cos, x[s]), r), []),
    "a loop": (lambda x, w, s, r: sums(lax.fori_loop(0, 2, lambda k, y: y * 2, x[s]), r), []),
    # Only two ends have rows of their own; a third gather would have to be stored, where XLA fuses it.
    "three indices": (lambda x, w, s, r: sums(x[s] * x[third], r), []),
    "part of a row": (lambda x, w, s, r: sums(lax.dynamic_slice_in_dim(x, 0, 4, 1)[s], r), ["gather and scatter"]),
    "a thousand operations": (
        lambda x, w, s, r: sums(functools.reduce(lambda y, k: y * 1.01 + w[:, None], range(150), x[s]), r),
        [],
    ),
    "elements": (lambda x, w, s, r: sums(x[s, jnp.arange(EDGES) % WIDTH], r), []),
    "reversed": (lambda x, w, s, r: sums(x[s][::-1], r), []),
    "an iota": (
        lambda x, w, s, r: sums(x[s] * lax.broadcasted_iota(jnp.float32, (EDGES, WIDTH), 1), r),
        ["gather, multiply and scatter"],
    ),
    "an iota alone": (lambda x, w, s, r: sums(lax.broadcasted_iota(jnp.float32, (EDGES, WIDTH), 0), r), []),
    "a mask that is a triangle": (
        lambda x, w, s, r: sums(jnp.where(jnp.tri(EDGES, WIDTH, dtype=bool), x[s], 0), r),
        ["add, compare, gather, select and scatter"],
    ),
    "a maximum of values that would be rounded differently": (
        lambda x, w, s, r: jax.ops.segment_max(x[s] * w[:, None], r, NODES),
        [],
    ),
    "no gather": (lambda x, w, s, r: sums(edges * w[:, None], r), []),
    "integers by rounding": (lambda x, w, s, r: sums((x[s] * 9).astype(jnp.int32), r), []),
    "the axis of features": (lambda x, w, s, r: x.T.at[:, r].add(x.T[:, s]), []),
}


@pytest.mark.parametrize("name", ENDS)
def test_ends(name):
    f, expected = ENDS[name]
    args = nodes, weights, senders, receivers
    assert check(f, *args) == expected


def test_third_gather_is_read_where_it_is_stored():
    """In 16 bits the scatter is taken in any case, and XLA would store its updates."""
    f = lambda x, s, t, r: sums(x[s] * x[t], r)
    args = nodes.astype(jnp.bfloat16), senders, third, receivers
    assert check(f, *args, rtol=2e-2) == ["gather, multiply and scatter"]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradient_of_a_maximum_finds_it(dtype):
    """It compares the updates with their maximum; an update that is computed again may differ from it in the last digit."""

    def f(x, w, s, r):
        y = jax.ops.segment_max(x[s] * w[:, None] + x[r], r, NODES)
        return jnp.where(jnp.isfinite(y), y, 0)

    args = nodes.astype(dtype), weights.astype(dtype), senders % NODES, receivers % NODES
    check(gradient(f), *args, rtol=2e-5 if dtype == jnp.float32 else 3e-2)


# Constants in another type than they were written in: 256 + NODES is NODES in 8 bits, and -2^31 is 0 in 16.
CONVERTED = {
    "negative indices": lambda of: jax.ops.segment_sum(
        edges, jnp.where(receivers < 0, receivers + of(256 + NODES, jnp.uint8, receivers.shape), receivers), 256 + NODES
    ),
    "a start": lambda of: of(-(2**31), jnp.int16, (NODES, 8)).at[receivers].max(jnp.full((EDGES, 8), -5)),
    "too large": lambda of: of(np.float32(3e9), jnp.int32, (NODES, 8)).at[receivers].max(jnp.full((EDGES, 8), 5)),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_constants_have_the_values_of_their_types(name):
    of = lambda number, dtype, shape: lax.convert_element_type(lax.full(shape, number).astype(dtype), jnp.int32)
    check(lambda: CONVERTED[name](of), forced=unordered)


def test_16_bit_operations_are_rounded():
    """They are rounded as in NumPy: a float16 that overflows overflows here too, and digits below the last one are lost."""
    x = np.array([[300, 3.3], [1, 1], [300, 5.3]], np.float16)
    message = lambda y: (y * y) / y + ((y + 2048) - 2048)
    i = jnp.array([0, 2, 2])
    with forced, decisions.recorded() as found:
        own = jax.jit(lambda x, i: jax.ops.segment_sum(message(x[i]), i, 3))(jnp.asarray(x), i)
    assert chains(found)
    with np.errstate(over="ignore"):
        expected = message(x) * np.array([[1], [0], [2]], np.float16)
    assert np.isinf(own[0, 0]) and np.isinf(own[2, 0])
    np.testing.assert_allclose(np.asarray(own[:, 1], np.float32), expected[:, 1].astype(np.float32), rtol=2e-3)


def test_sizes_that_are_equal():
    """Nodes, edges and features, so that nothing is told apart by its size."""
    n = 9
    x, w, s, r = floats(n, n), floats(n), ids(n) - 2, ids(n) - 2

    def f(x, w, s, r):
        along = lambda mask: mask[:, None] if mask is by_edge else mask
        by_edge, by_feature = (r >= 0) & (r < n), (s >= 0) & (s < n)
        y = jnp.where(along(by_edge), x[r], 1) + jnp.where(along(by_feature), x[s], 2) * w[:, None] + x.T[s] * w
        return jnp.zeros_like(x).at[r].add(y + jnp.take(x, s, axis=0, mode="clip").T)

    assert check(lambda x, w, s, r: jax.ops.segment_sum(x[s] * w + x[r] * w[:, None], r, n), x, w, s, r)
    assert check(lambda x, w, s, r: jax.ops.segment_sum(x[s].T * x[r], r, n), x, w, s, r) == []
    g = lambda x, w, s, r: jnp.zeros_like(x).at[r].add(jnp.take(x, s, axis=0, mode="fill", fill_value=2) * w)
    assert check(g, x, w, s, r) and check(gradient(g), x, w, s, r)
    check(f, x, w, s, r)


# ---- random chains


@st.composite
def messages(draw):
    """A function of (x, y, w, e, s, r) that makes messages, of random operations."""
    index = lambda k, s, r: (s, r)[k]
    leaf = st.one_of(
        st.tuples(st.integers(0, 1), st.integers(0, 1)).map(
            lambda c: lambda x, y, w, e, s, r: (x, y)[c[0]][index(c[1], s, r)]
        ),
        st.just(lambda x, y, w, e, s, r: jnp.take(x, s, axis=0, mode="fill", fill_value=0.5)),
        st.just(lambda x, y, w, e, s, r: jnp.take(y, s, axis=0, mode="clip")),
        st.just(lambda x, y, w, e, s, r: jnp.broadcast_to(w[:, None], e.shape)),
        st.just(lambda x, y, w, e, s, r: w[s % EDGES][:, None] + e),
        st.just(lambda x, y, w, e, s, r: e),
    )
    unary = st.sampled_from([jnp.tanh, jnp.negative, jax.nn.sigmoid, jax.nn.gelu, jnp.abs, lambda v: v**2, jnp.floor])
    binary = st.sampled_from([jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, lambda a, b: jnp.where(a > b, a, 2.0)])
    extend = lambda inner: st.one_of(
        st.tuples(unary, inner).map(lambda c: lambda *args: c[0](c[1](*args))),
        st.tuples(binary, inner, inner).map(lambda c: lambda *args: c[0](c[1](*args), c[2](*args))),
    )
    return draw(st.recursive(leaf, extend, max_leaves=4))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    messages(),
    st.sampled_from(["drop", "clip", "promise_in_bounds"]),
    st.booleans(),
    st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_random_chains(message, mode, onto, dtype):
    x, y, w, e = (a.astype(dtype) for a in (nodes, others, weights, edges))
    s, r = (i % NODES if mode == "promise_in_bounds" else i for i in (senders, receivers))
    f = lambda x, y, w, e, s, r: (y if onto else jnp.zeros_like(y)).at[r].add(message(x, y, w, e, s, r), mode=mode)
    check(f, x, y, w, e, s, r, rtol=3e-5 if dtype == jnp.float32 else 4e-2)


@pytest.mark.skipif(not registry.kernels_run(), reason="no kernels")
def test_random_programs_are_lowered():
    """tests/random_programs.py lowers any number of others."""
    found = [d for number in range(40) for d in random_programs.lower(0, number)]
    assert len(chains(found)) > 10 and not all(d.taken for d in found)


def test_random_programs_have_one_result():
    """Their scatters do not depend on the order of the updates, so a difference on a GPU is always a fault."""
    for number in range(10):
        random_programs.run_backwards(0, number)


def test_random_programs_compute_the_same():
    assert len(chains([d for number in range(6) for d in random_programs.run(0, number)])) > 0


# ---- what a GPU runs


def lowered(f, *args):
    with forced:
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",))


def live(lowered):
    """(name, type of a result) of every operation that the results of a lowered program depend on."""
    module = lowered.compiler_ir("stablehlo")
    functions = {str(f.attributes["sym_name"]).strip('"'): f for f in module.body.operations}
    found, entered = [], set()

    def enter(name):
        if name in entered:
            return
        entered.add(name)
        *_, last = functions[name].regions[0].blocks[0].operations
        seen, pending = set(), list(last.operands)
        while pending:
            operation = pending.pop().owner
            operation = getattr(operation, "operation", None)
            if operation is None or operation in seen:
                continue
            seen.add(operation)
            target = "call_target_name" in operation.attributes and str(operation.attributes["call_target_name"])
            found.extend((target.strip('"') if target else operation.name, str(r.type)) for r in operation.results)
            pending += operation.operands
            if operation.name == "func.call":
                enter(str(operation.attributes["callee"]).lstrip("@"))

    enter("main")
    return found


@pytest.mark.skipif(not registry.kernels_run(), reason="no kernels")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("f", [convolution, activated, taken, both_ends, gradient(layers), gradient(activated)])
def test_nothing_of_edges_by_features_is_stored(f, dtype):
    args = nodes.astype(dtype), weights.astype(dtype), senders, receivers
    found = live(lowered(f, *args))
    names = [name for name, _ in found]
    assert "jaxkern_edge_reduce" in names and "jaxkern_sort_indices" in names
    assert "stablehlo.scatter" not in names and not any("segment_sum" in n or "index_add" in n for n in names)
    assert not [(name, t) for name, t in found if f"<{EDGES}x{WIDTH}x" in t]


def test_sorts_are_shared_between_layers():
    """One for each of the two indices, in two layers and their gradients."""
    with forced:
        text = jax.jit(gradient(layers)).lower(nodes, weights, senders, receivers).compile().as_text()
    if ON_GPU:
        assert text.count('custom_call_target="jaxkern_sort_indices"') == 2
    else:
        assert text.count(" sort(") == 2


def test_programs_that_are_left_stay_as_they_are():
    """Functions that were looked into leave no copies."""
    f = lambda x, w, s, r: sums(jax.nn.silu(x[s]) * x[third], r)
    with jaxkern.accelerate(only=()):
        plain = jax.jit(f).trace(nodes, weights, senders, receivers).lower(lowering_platforms=("cuda",)).as_text()
    text = lowered(f, nodes, weights, senders, receivers).as_text()
    assert plain.count("stablehlo.exponential") == text.count("stablehlo.exponential") == 1


# ---- places


def test_transformations():
    check(jax.vmap(convolution, (0, None, None, None)), jnp.stack([nodes, others]), weights, senders, receivers)
    tangent = lambda x, w, s, r: jax.jvp(lambda x: activated(x, w, s, r), (x,), (others,))
    assert len(check(tangent, nodes, weights, senders, receivers)) == 2
    hessian = lambda x, w, s, r: jax.jvp(jax.grad(lambda x: (taken(x, w, s, r) ** 2).sum()), (x,), (others,))[1]
    check(hessian, nodes, weights, senders, receivers, rtol=1e-4)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_meshes_of_one_device(kind):
    mesh = jax.make_mesh((1,), ("a",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    spec = jax.sharding.PartitionSpec
    args = nodes, weights, senders % NODES, receivers % NODES
    mapped = jax.shard_map(
        activated, mesh=mesh, in_specs=(spec(), spec("a"), spec("a"), spec("a")), out_specs=spec("a")
    )
    if kind == "Auto":
        assert len(check(mapped, *args)) == 1
    else:
        with jax.set_mesh(mesh):
            placed = [jax.device_put(a, jax.sharding.NamedSharding(mesh, spec())) for a in args]
            f = lambda x, w, s, r: sums(x.at[s].get(out_sharding=spec()) * w[:, None], r)
            assert len(check(f, *placed)) == 1


def test_float64(x64):
    args = (
        nodes.astype(jnp.float64),
        weights.astype(jnp.float64),
        senders.astype(jnp.int64),
        receivers.astype(jnp.int64),
    )
    assert len(check(gradient(activated), *args, rtol=1e-12)) == 2


# ---- the gate, and what is said


def problem(**changes):
    return gate.Scatter("scatter_add", jnp.dtype(jnp.float32), 1, 1, 169343, 1166243, 128)._replace(**changes)


BFLOAT16 = jnp.dtype(jnp.bfloat16)


@pytest.mark.parametrize(
    "changes, alone, ordered",
    [
        ({}, True, True),
        ({"trail": 40}, False, True),
        ({"trail": 1}, False, True),
        ({"rows": 20_000, "count": 200_000}, False, True),
        ({"count": 50_000}, False, True),
        ({"count": 1000}, False, False),
        ({"rows": 2_000_000, "count": 100_000}, False, False),
        ({"trail": 1, "dtype": BFLOAT16}, True, True),
        ({"count": 50_000, "dtype": BFLOAT16}, True, True),
        ({"count": 1000, "dtype": BFLOAT16}, False, False),
        ({"trail": 1, "operation": "scatter_max"}, True, True),
        ({"dtype": jnp.dtype(jnp.float64)}, False, False),
        ({"dtype": jnp.dtype(jnp.int32)}, False, False),
    ],
)
def test_the_gate(changes, alone, ordered):
    """What is taken alone, and where another chain has the same indices."""
    assert (gate.chain(problem(**changes), False)[0], gate.chain(problem(**changes), True)[0]) == (alone, ordered)


@pytest.mark.parametrize(
    "changes, taken",
    [
        ({}, True),
        ({"trail": 15}, True),
        ({"trail": 16}, False),
        ({"trail": 7, "dtype": jnp.dtype(jnp.float64)}, True),
        ({"trail": 8, "dtype": jnp.dtype(jnp.float64)}, False),
        ({"trail": 15, "dtype": BFLOAT16}, True),
        ({"trail": 16, "dtype": BFLOAT16}, False),
        ({"dtype": jnp.dtype(jnp.int32)}, False),
        ({"operation": "scatter_max"}, False),
        ({"count": gate.FREE_COUNT - 1}, False),
        ({"rows": 1 << 22, "zeros": True}, True),
        ({"rows": 1 << 22}, False),
        ({"lead": 2}, False),
        ({"is_sorted": True}, False),
        ({"is_unique": True}, False),
    ],
)
def test_the_gate_of_sums_in_no_fixed_order(changes, taken):
    assert gate.free(problem(**{"trail": 3} | changes))[0] == taken


@pytest.mark.skipif(not registry.kernels_run(), reason="no kernels")
def test_deterministic():
    """Scatter-adds of floating-point numbers are taken whatever their sizes, and in a fixed order."""
    f = lambda x, w, s, r: (x.at[r].add(w[:, None]), sums(x[s] * w[:, None], r), x.astype(jnp.int32).at[r].add(1))
    n = gate.FREE_COUNT
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((n,), jnp.float32), ((n,), jnp.int32), ((n,), jnp.int32))]
    for args in ((nodes, weights, senders, receivers), (nodes, *shapes)):
        with jaxkern.accelerate(deterministic=True):
            found = jaxkern.explain(f, platform="cuda")(*args)
        assert [d.taken for d in found] == [True, True, False]
        assert not any("no fixed order" in d.reason for d in found)


@pytest.mark.skipif(not registry.kernels_run(), reason="no kernels")
def test_sums_that_are_sorted_in_any_case_make_their_updates():
    """The gradient of a gather, in a fixed order: products of edges x features are not stored for the sum."""

    def loss(slope, group, x, y):
        return jnp.square((slope[group] * x).sum(-1) - y).sum()

    n, e = 20_000, 2 * gate.CHAIN_COUNT
    slope, x, y = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((n, 4), (e, 4), (e,)))
    with jaxkern.accelerate(only="scatter_add", deterministic=True):
        found = jaxkern.explain(jax.grad(loss), platform="cuda")(slope, jax.ShapeDtypeStruct((e,), jnp.int32), x, y)
    assert chains(found) == ["multiply and scatter"]
    rng = np.random.default_rng(0)
    of = lambda s: rng.normal(size=s.shape).astype(np.float32)
    group = rng.integers(-3, n + 3, e).astype(np.int32)
    in_order = jaxkern.accelerate(only="scatter_add", force=True, deterministic=True)
    made = check(jax.grad(loss), of(slope), group, of(x), of(y), rtol=1e-4, forced=in_order)
    assert made == ["multiply and scatter"]
    ones = lambda group: sums(jnp.ones((e, 4)), group)  # nothing to be stored
    assert check(ones, group % NODES, forced=in_order) == []


@pytest.mark.skipif(not registry.kernels_run(), reason="no kernels")
def test_one_order_for_all(measured_jaxlib):
    """A softmax over the edges of a node: what follows its maximum is reduced in the order that the maximum takes."""
    n, e = 20_000, 200_000
    scores, s, r = (jax.ShapeDtypeStruct((e,), d) for d in (jnp.float32, jnp.int32, jnp.int32))
    x = jax.ShapeDtypeStruct((n, 8), jnp.float32)

    def attention(x, scores, s, r):
        y = jnp.exp(scores - jax.ops.segment_max(scores, r, n)[r])
        weights = y / jax.ops.segment_sum(y, r, n)[r]
        return jax.ops.segment_sum(x[s] * weights[:, None], r, n)

    found = jaxkern.explain(attention, platform="cuda")(x, scores, s, r)
    assert [d.taken for d in found] == [True] * 3
    assert all("in no fixed order" not in d.reason for d in found)
    found = jaxkern.explain(lambda x, y, s, r: jax.ops.segment_sum(x[s] * y[:, None], r, n), platform="cuda")(
        x, scores, s, r
    )
    assert ["in no fixed order" in d.reason for d in found] == [True]


@pytest.mark.skipif(not registry.kernels_run(), reason="no kernels")
@pytest.mark.parametrize(
    "flag, free", [("deterministic_ops=true", 0), ("exclude_nondeterministic_ops", 0), ("deterministic_ops=false", 1)]
)
def test_flags_of_xla_that_ask_for_an_order(flag, free, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_{flag}")
    f = lambda y, r: sums(y, r) * 1.0
    y, r = jax.ShapeDtypeStruct((200_000, 3), jnp.float32), jax.ShapeDtypeStruct((200_000,), jnp.int32)
    found = jaxkern.explain(f, platform="cuda")(y, r)
    assert sum("in no fixed order" in d.reason for d in found) == free


def test_arithmetic_below_a_gather():
    """(x @ m * scale)[s]: the scale is read for each edge, and no array of nodes is written for it."""

    def scaled(x, m, scale, s, r):
        return sums((x @ m * scale[:, None])[s], r)

    scale = floats(NODES)
    args = nodes, floats(WIDTH, WIDTH), scale, senders % NODES, receivers % NODES
    assert check(scaled, *args, rtol=1e-4) == ["gather, multiply and scatter"]
    # A tanh is too much work for each edge; arithmetic on an argument takes one pass with the tanh, which remains.
    kept = lambda x, m, scale, s, r: sums(jnp.tanh(x @ m)[s] * 2, r)
    assert check(kept, *args, rtol=1e-4) == ["gather, multiply and scatter"]
    fused = lambda x, m, scale, s, r: sums((jnp.tanh(x) * scale[:, None])[s], r)
    assert check(fused, *args, rtol=1e-4) == ["gather and scatter"]


BELOW = {
    "of nodes by features": lambda x, c, f, s, r: sums((c[:, None] - x * f)[s], r),
    "an outer product": lambda x, c, f, s, r: sums((c[:, None] * f)[s] + x[s], r),
    "transposed": lambda x, c, f, s, r: sums((x.T * c + f[:, None]).T[s], r),
    "rows last": lambda x, c, f, s, r: sums((x.T * c)[:, s].T, r),
    "features in two dimensions, moved": lambda x, c, f, s, r: sums(
        (x.reshape(-1, 2, 4).transpose(1, 0, 2) * c[:, None] + f.reshape(2, 1, 4)).transpose(1, 0, 2)[s], r
    ),
    "a mask": lambda x, c, f, s, r: sums(jnp.where((c > 0)[:, None], x * f, 1)[s], r),
    "bytes that wrap": lambda x, c, f, s, r: sums(
        ((x * 100).astype(jnp.int8) * np.int8(3) - np.int8(99))[s].astype(jnp.float32), r
    ),
    "halves": lambda x, c, f, s, r: sums((x.astype(jnp.bfloat16) * 3 + c[:, None].astype(jnp.bfloat16))[s] * f, r),
    "what fills": lambda x, c, f, s, r: sums((x * c[:, None]).at[s].get(mode="fill", fill_value=3), r),
    "both ends": lambda x, c, f, s, r: sums((x * c[:, None])[s] * (x + f).at[r].get(mode="clip"), r),
    "three ends": lambda x, c, f, s, r: sums((x * c[:, None])[s] * (x + f)[r] * (x - 1)[(s + r) // 2], r),
    "clipped, of what is wrapped": lambda x, c, f, s, r: x.at[r].add((x * c[:, None])[r] + x[r], mode="clip"),
    "a maximum": lambda x, c, f, s, r: jax.ops.segment_max(jnp.maximum(-x, c[:, None])[s], r, NODES),
    "second derivatives": lambda x, c, f, s, r: gradient(lambda x: gradient(lambda x: sums((x * f * x)[s], r))(x))(x),
    "one order": lambda x, c, f, s, r: (
        sums((x * f)[s], r)
        + x.at[r].add(jnp.cumsum(x[s], 0), mode="clip")
        + sums(jnp.cumsum(x[s], 0), jnp.where(r < 0, r + NODES, r))
        + jax.ops.segment_sum(jnp.cumsum(x[s], 0), r, NODES + 7)[:NODES]
    ),
}


CONFUSED = ("of nodes by features", "an outer product", "transposed", "rows last", "what fills", "both ends")


@pytest.mark.parametrize(
    "name, n, e",
    [
        *((name, NODES, EDGES) for name in BELOW),
        # Dimensions that could be mistaken for each other.
        *((name, *sizes) for name in CONFUSED for sizes in ((WIDTH, WIDTH), (1, 6), (6, 1))),
    ],
)
def test_arithmetic_below_a_gather_is_that_of_the_program(name, n, e):
    check(BELOW[name], nodes[:n], weights[:n], bias, senders[:e], receivers[:e], rtol=1e-4)


@pytest.mark.parametrize("of", [lambda x: x + 1.5, lambda x: x.T], ids=["arithmetic", "transposes"])
def test_a_long_program_below_a_gather(of):
    def f(x, s, r):
        for _ in range(400):
            x = of(x)
        return sums(x[s], r)

    assert check(f, nodes, senders, receivers, rtol=1e-4) == ["gather and scatter"]


@jax.jit
def wrapped(i):
    i = i * 2 // 2
    return lax.select(i < 0, i + NODES, i)


@jax.jit
def scaled_and_wrapped(x, i):
    return x * 2, wrapped(i), x


def nested(x, s, r):
    y, i, x = scaled_and_wrapped(x, s)
    return sums(y[i] + x[i], wrapped(r)) + sums(y[s], wrapped(r))


def in_a_loop(x, s, r):
    y, i, _ = scaled_and_wrapped(x, s)
    step = lambda k, z: z * 0.1 + nested(z, i, r) + sums(y[i], r)
    return lax.fori_loop(0, 2, step, x) + sums(y[i], r) + lax.cond(s[0] > 0, lambda: nested(x, i, r), lambda: x)


@pytest.mark.parametrize(
    "f, count", [(lambda x, s, r: sums(x[s], wrapped(r)), 1), (nested, 2), (in_a_loop, 6), (gradient(in_a_loop), 9)]
)
def test_functions_under_jit(f, count):
    """Values inside a function are copied to the scatter that reads them, and are found in every part of a program."""
    assert len(check(f, nodes, senders, receivers, rtol=1e-4)) >= count


def attention(x, w, s, r):
    """A layer with a softmax over the edges of each node."""
    scores = jax.nn.leaky_relu((x * w[:WIDTH])[s].sum(-1) + (x * w[-WIDTH:])[r].sum(-1))
    y = jnp.exp(scores - jax.ops.segment_max(scores, r, NODES)[r])
    weights = y / sums(y, r)[r]
    return jax.nn.elu(sums(x[s] * weights[:, None], r))


def gated(x, w, s, r):
    wide = jnp.tile(x, 4)
    return jnp.tanh(sums((wide * w[: wide.shape[1]])[s] * wide[r], r))[:, :WIDTH] + x


LOWERED = {
    # settings, layer, edges, and how many calls of Python functions lowering makes for each of plain JAX's
    "taken": (forced, attention, len(senders), 4.0),
    "too small": (jaxkern.accelerate(), attention, len(senders), 1.05),
    "left to XLA's fusions": (jaxkern.accelerate(), gated, 1 << 21, 1.5),
}


@pytest.mark.parametrize("case", LOWERED)
def test_lowering_is_linear_in_the_program(case, measured_jaxlib):
    """Python functions that are called while a gradient is lowered, for few layers, many, and in the plain program."""
    accelerated, layer, edges, most = LOWERED[case]
    indices = jax.ShapeDtypeStruct((edges,), jnp.int32)

    def calls(count, context):
        def f(x, w, s, r):
            for _ in range(count):
                x = layer(x, w, s, r)
            return (x**2).sum()

        number = [0]

        def called(frame, event, arg):
            number[0] += event == "call"

        with context:
            traced = jax.jit(jax.grad(f)).trace(nodes, weights, indices, indices)
            sys.setprofile(called)
            try:
                text = traced.lower(lowering_platforms=("cuda",)).as_text()
            finally:
                sys.setprofile(None)
        assert bool(launch.programs(text)) == (case == "taken" and context is accelerated)
        return number[0]

    plain = jaxkern.accelerate(only=())
    calls(1, accelerated), calls(1, plain)  # what is done once in a process
    few, many = calls(4, accelerated), calls(16, accelerated)
    assert many < 4.2 * few
    assert many < most * calls(16, plain)


def test_nothing_is_kept_of_a_module_that_was_lowered():
    gc.collect()
    before = sum(isinstance(o, Program) for o in gc.get_objects())
    lowered(lambda x, w, s, r: convolution(x, w, s, r) + 1, nodes, weights, senders, receivers)
    jax.clear_caches()
    gc.collect()
    assert sum(isinstance(o, Program) for o in gc.get_objects()) <= before


@pytest.mark.skipif(not registry.kernels_run(), reason="no kernels")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_explain(dtype):
    def f(x, w, s, r):
        return jax.ops.segment_sum(jax.nn.relu(jnp.take(x, s, axis=0)) * w[:, None], r, 1 << 17)

    x, w = jax.ShapeDtypeStruct((1 << 17, 128), dtype), jax.ShapeDtypeStruct((1 << 19,), dtype)
    i = jax.ShapeDtypeStruct((1 << 19,), jnp.int32)
    (d,) = jaxkern.explain(f)(x, w, i, i)
    assert d.taken and d.reason == "one message kernel instead of gather, select, maximum, multiply and scatter"
    assert f"test_chains.py:{f.__code__.co_firstlineno + 1}" in d.source
    assert (1 << 26) * x.dtype.itemsize < d.bytes < 3 * (1 << 26) * x.dtype.itemsize
