"""Messages on graphs against plain JAX in float64: on the CPU the reference, on a GPU the kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ON_GPU
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export

import jaxkern
from jaxkern import messages
from jaxkern._core import compat

REDUCE = {
    "sum": messages.edge_sum,
    "mean": messages.edge_mean,
    "max": messages.edge_max,
    "min": messages.edge_min,
}
TOLERANCE = {"float64": 1e-12, "float32": 3e-6, "bfloat16": 8e-3, "float16": 1e-3}


def edges_of(count, senders, receivers, skew=0.0, seed=0):
    """Senders and receivers, some of them out of range; a part `skew` of all edges goes to one node."""
    rng = np.random.default_rng(seed)
    s, r = rng.integers(-1, senders + 1, count), rng.integers(-1, receivers + 1, count)
    r[rng.random(count) < skew] = receivers // 2
    return s.astype(np.int32), r.astype(np.int32)


def plainly(op, f, s, r, senders, receivers, operands, reduce_features=None):
    """The same in jnp, of a function that takes arrays as well as scalars; operands by the name of the argument."""
    valid = (s >= 0) & (s < senders) & (r >= 0) & (r < receivers)
    s, r = np.where(valid, s, 0), np.where(valid, r, receivers)
    rank = max(x.ndim for x in jax.tree.leaves(operands)) - 1
    lift = lambda x: x.reshape(x.shape[0], *[1] * (rank - x.ndim + 1), *x.shape[1:])
    pick = {
        "senders": lambda x: lift(x)[s],
        "receivers": lambda x: lift(x)[np.minimum(r, receivers - 1)],
        "edges": lift,
    }
    given = [jax.tree.map(pick[k], operands[k]) for k in pick if k in operands]
    features = np.broadcast_shapes(*(lift(x).shape[1:] for x in jax.tree.leaves(operands)))
    y = jax.tree.map(lambda y: jnp.broadcast_to(y, (len(s), *features)), f(*given))
    beside = lambda v, y: v.reshape(-1, *[1] * (y.ndim - 1))
    if op == "map":
        if reduce_features is not None:
            y = jax.tree.map(lambda y: y.sum(tuple(d + 1 for d in np.atleast_1d(reduce_features))), y)
        return jax.tree.map(lambda y: jnp.where(beside(valid, y), y, 0), y)
    reduce = {"max": jax.ops.segment_max, "min": jax.ops.segment_min}.get(op, jax.ops.segment_sum)
    out = jax.tree.map(lambda y: reduce(y, r, receivers), y)
    if op == "mean":
        count = np.maximum(np.bincount(r, minlength=receivers + 1)[:receivers], 1)
        out = jax.tree.map(lambda y: y / beside(count, y), out)
    return out


class Case:
    """A function of pytrees by argument, on operands of these feature shapes."""

    def __init__(self, f, reduce_features=None, scalar=None, **shapes):
        self.f, self.reduce_features, self.scalar, self.shapes = f, reduce_features, scalar, shapes

    def operands(self, sizes, dtype, seed=1):
        rng = np.random.default_rng(seed)
        make = lambda shape, n: jnp.asarray(rng.normal(size=(n, *shape)), dtype)
        is_shape = lambda x: isinstance(x, tuple)
        return {k: jax.tree.map(lambda s: make(s, sizes[k]), v, is_leaf=is_shape) for k, v in self.shapes.items()}


CASES = {
    "copy": Case(lambda x: x, senders=(5,)),
    "scalars": Case(lambda x, w: jnp.sin(x) * w, senders=(), edges=()),
    "weighted": Case(lambda x, w: jax.nn.silu(x) * w, senders=(128,), edges=()),
    "odd": Case(lambda x, w: x * w, senders=(33,), edges=(1,)),
    "difference": Case(lambda x, y: jnp.tanh(x - y), senders=(16,), receivers=(16,)),
    "all": Case(lambda x, y, e: (x + e) * jnp.exp(-y * y), senders=(12,), receivers=(12,), edges=(12,)),
    "heads": Case(lambda x, w: x * w, senders=(3, 8), edges=(3, 1)),
    "mixed": Case(lambda x, y, w: x * y + w, senders=(4, 6), receivers=(4, 1), edges=(1, 6)),
    "tree": Case(
        lambda x, w: {"re": x["a"] * w[0] - x["b"] * w[1], "im": x["a"] * w[1]},
        senders={"a": (4,), "b": (4,)},
        edges=[(), ()],
    ),
    "edges": Case(lambda e: e * e, edges=(7,)),
    "wide": Case(lambda x, w: x * w, senders=(520,), edges=()),
}
MAPS = {
    "map": Case(lambda x, y, e: (x + e) * y, senders=(12,), receivers=(12,), edges=(12,)),
    "dot": Case(lambda x, y: x * y, 0, senders=(40,), receivers=(40,)),
    "heads": Case(lambda x, y: x * y, 1, senders=(3, 8), receivers=(3, 8)),
    "first": Case(lambda x, y, w: x * y * w, 0, senders=(3, 8), receivers=(3, 1), edges=()),
    "all": Case(lambda x, y, w: x * y + w, (0, 1), senders=(3, 8), receivers=(1, 8), edges=(3, 1)),
    "one": Case(lambda x, y: jnp.exp(x - y), senders=(), receivers=()),
}
SIZES = dict(senders=19, receivers=23, edges=157)


def call(op, case, graph, operands):
    if op == "map":
        return messages.edge_map(case.f, graph, **operands, reduce_features=case.reduce_features)
    return REDUCE[op](case.f, graph, **operands)


def close(found, wanted, dtype, scale=1):
    def check(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        finite = np.isfinite(b)
        np.testing.assert_array_equal(a[~finite], b[~finite])
        bound = scale * TOLERANCE[dtype] * max(1.0, np.abs(b[finite]).max(initial=0))
        np.testing.assert_allclose(a[finite], b[finite], rtol=0, atol=bound)

    jax.tree.map(check, found, wanted)


def problem(op, name, dtype, skew=0.3):
    case = (MAPS if op == "map" else CASES)[name]
    s, r = edges_of(SIZES["edges"], SIZES["senders"], SIZES["receivers"], skew)
    graph = messages.Graph(s, r, num_senders=SIZES["senders"], num_receivers=SIZES["receivers"])
    return case, (s, r, SIZES["senders"], SIZES["receivers"]), graph, case.operands(SIZES, dtype)


OPERATIONS = [*((op, name) for name in CASES for op in ("sum", "max")), ("mean", "all"), ("min", "heads")]
OPERATIONS += [("map", name) for name in MAPS]
each = pytest.mark.parametrize(("op", "name"), OPERATIONS, ids=lambda x: x)


def to64(tree):
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), tree)


@each
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.sweep(3)
def test_values(op, name, dtype, x64):
    case, at, graph, operands = problem(op, name, dtype)
    found = jax.jit(lambda operands: call(op, case, graph, operands))(operands)
    assert all(y.dtype == dtype for y in jax.tree.leaves(found))
    close(found, plainly(op, case.f, *at, to64(operands), case.reduce_features), dtype)


@each
@pytest.mark.sweep(3)
@pytest.mark.optimized
def test_gradients(op, name, x64):
    """Gradients by all operands, in float32; the cotangent of an empty row contributes nothing."""
    case, at, graph, operands = problem(op, name, "float32")
    wide = to64(operands)
    ours = lambda operands: call(op, case, graph, operands)
    theirs = lambda operands: plainly(op, case.f, *at, operands, case.reduce_features)
    rng = np.random.default_rng(5)
    g = jax.tree.map(lambda y: jnp.asarray(rng.normal(size=y.shape)), jax.eval_shape(theirs, wide))
    pull = lambda f: jax.jit(lambda operands, g: jax.vjp(f, operands)[1](g)[0])
    found = pull(ours)(operands, jax.tree.map(lambda x: x.astype("float32"), g))
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, operands)
    close(found, pull(theirs)(wide, g), "float32", scale=4)


@pytest.mark.parametrize(("op", "name"), [("sum", "weighted"), ("mean", "all"), ("map", "heads"), ("map", "first")])
def test_gradients_of_16_bits(op, name, x64):
    case, at, graph, operands = problem(op, name, "bfloat16")
    g = jnp.asarray(
        np.random.default_rng(5).normal(size=jax.eval_shape(lambda o: call(op, case, graph, o), operands).shape)
    )
    g = g.astype("bfloat16")
    pull = lambda f: jax.jit(lambda operands, g: jax.vjp(f, operands)[1](g)[0])
    found = pull(lambda o: call(op, case, graph, o))(operands, g)
    wanted = pull(lambda o: plainly(op, case.f, *at, o, case.reduce_features))(to64(operands), to64(g))
    close(found, wanted, "bfloat16", scale=2)


@pytest.mark.parametrize(("op", "name"), [("sum", "all"), ("mean", "heads"), ("max", "mixed"), ("map", "first")])
@pytest.mark.optimized
def test_forward_mode_and_second_derivatives(op, name, x64):
    """In float64, jitted, against plain JAX; for the maximum, operation by operation.

    There a jitted reference is wrong: XLA:CPU computes the messages once for the maximum and again where they are
    compared with it, there with fused multiply-adds, and then no message equals its maximum.
    """
    case, at, graph, operands = problem(op, name, "float64")
    ours = lambda operands: call(op, case, graph, operands)
    theirs = lambda operands: plainly(op, case.f, *at, operands, case.reduce_features)
    tangents = case.operands(SIZES, "float64", seed=9)

    def second(f, operands):
        loss = lambda o: sum(jnp.sum(jnp.sin(jnp.where(jnp.isfinite(y), y, 0))) for y in jax.tree.leaves(f(o)))
        slope = lambda o: sum(jnp.sum(d * t) for d, t in zip(*map(jax.tree.leaves, (jax.grad(loss)(o), tangents))))
        return jax.jvp(lambda o: jnp.nan_to_num(f(o), neginf=0), (operands,), (tangents,)), jax.grad(slope)(operands)

    found = jax.jit(functools.partial(second, ours))(operands)
    reference = functools.partial(second, theirs)
    close(found, (reference if op == "max" else jax.jit(reference))(operands), "float64", scale=10)


def test_only_the_gradients_that_are_wanted():
    """One kernel forward, one for each gradient; none reads what its function does not."""
    case, _, graph, operands = problem("sum", "weighted", "float32")
    loss = lambda x, w: jnp.sum(call("sum", case, graph, dict(senders=x, edges=w)))
    for wrt, kernels in (0, ["edge_reduce"]), (1, ["edge_map"]), ((0, 1), ["edge_map", "edge_reduce"]):
        text = str(jax.make_jaxpr(jax.grad(loss, wrt))(operands["senders"], operands["edges"]))
        counts = {k: text.count(f"jaxkern_{k}[") for k in ("edge_map", "edge_reduce")}
        assert counts == {k: (k in kernels) + (k == "edge_reduce") for k in counts}, text


def test_captured_scalars(x64):
    """Traced ones have gradients; Python numbers are constants."""
    case, at, graph, operands = problem("sum", "weighted", "float64")
    f = lambda x, w, a, b: jnp.tanh(a * x) * w + b + 0.5

    def ours(operands, a, b):
        return messages.edge_sum(lambda x, w: f(x, w, a, b), graph, **operands)

    def theirs(operands, a, b):
        return plainly("sum", lambda x, w: f(x, w, a, b), *at, operands)

    grads = lambda f: jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1, 2)))
    scalars = jnp.asarray(1.5), jnp.asarray(-0.25)
    close(ours(operands, *scalars), theirs(operands, *scalars), "float64")
    close(grads(ours)(operands, *scalars), grads(theirs)(operands, *scalars), "float64", scale=10)


def test_the_first_of_equals_has_the_gradient():
    graph = messages.Graph(np.array([0, 1, 2, 3]), np.array([0, 0, 0, 1]), num_nodes=4)
    x = jnp.array([2.0, 5.0, 5.0, 1.0])
    for sign, op in (1, messages.edge_max), (-1, messages.edge_min):
        d = jax.grad(lambda x: jnp.sum(op(lambda x: sign * x, graph, senders=x)[:2]))(x)
        np.testing.assert_array_equal(d, sign * np.array([0, 1, 0, 1]))


@pytest.mark.parametrize("op", ["max", "min"])
def test_extrema_of_no_edges_have_zero_gradients(op):
    none = np.zeros(0, np.int32)
    graph = messages.Graph(none, none, num_senders=3, num_receivers=2)
    found, d = jax.value_and_grad(lambda x: REDUCE[op](lambda x: x, graph, senders=x)[0, 0])(jnp.ones((3, 2)))
    assert found == (-jnp.inf if op == "max" else jnp.inf)
    np.testing.assert_array_equal(d, np.zeros((3, 2)))


@pytest.mark.parametrize("op", [*REDUCE, "map"])
def test_gradients_beside_results_of_integers(op):
    f = lambda x: {"float": x * x, "int": x.astype(jnp.int32), "other": 2 * x}
    s, r = np.array([0, 1, 2], np.int32), np.array([1, 1, 0], np.int32)
    graph = messages.Graph(s, r, num_nodes=3)
    x = jnp.array([1.5, 2.5, -3.5])
    call = messages.edge_map if op == "map" else REDUCE[op]
    at = slice(None) if op == "map" else slice(2)  # the others are empty
    step = lambda f, x: {k: v[at] for k, v in f(x).items()}
    ours = functools.partial(step, lambda x: call(f, graph, senders=x))
    plain = functools.partial(step, lambda x: plainly(op, f, s, r, 3, 3, {"senders": x}))
    close(ours(x), plain(x), "float32")

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(g, x):
        forward = jax.jvp(g, (x,), (jnp.ones(3),))[1]
        return {k: (forward[k], jax.grad(lambda x: g(x)[k].sum())(x)) for k in ("float", "other")}

    close(derivatives(ours, x), derivatives(plain, x), "float32")
    whole = jax.grad(lambda x: call(lambda x: x.astype(jnp.int32), graph, senders=x)[0] + x.sum())(x)
    np.testing.assert_array_equal(whole, np.ones(3))


def test_what_pads_contributes_nothing():
    """Padding contributes nothing, not even NaN, forward or backward."""
    s, r = np.array([0, -1, 5, 1, 0], np.int32), np.array([1, 0, 0, 7, -4], np.int32)
    graph = messages.Graph(s, r, num_senders=2, num_receivers=3)
    e = jnp.array([1.0, *[jnp.nan] * 4])
    y, pull = jax.vjp(lambda e: messages.edge_sum(lambda e: e * e, graph, edges=e), e)
    np.testing.assert_array_equal(y, [0, 1, 0])
    np.testing.assert_array_equal(pull(jnp.ones(3))[0], [2, 0, 0, 0, 0])
    np.testing.assert_array_equal(messages.edge_map(lambda e: e, graph, edges=e), [1, 0, 0, 0, 0])
    np.testing.assert_array_equal(messages.edge_max(lambda e: e, graph, edges=e), [-jnp.inf, 1, -jnp.inf])


@pytest.mark.parametrize(("op", "name"), [("sum", "weighted"), ("max", "heads"), ("map", "heads"), ("map", "map")])
def test_vmap(op, name):
    case, at, graph, operands = problem(op, name, "float32")
    many = case.operands({k: 3 * n for k, n in SIZES.items()}, "float32")
    many = jax.tree.map(lambda x: x.reshape(3, -1, *x.shape[1:]), many)
    loop = lambda f, *xs: jax.tree.map(
        lambda *ys: jnp.stack(ys), *(f(*(jax.tree.map(lambda a: a[k], x) for x in xs)) for k in range(3))
    )
    ours = lambda o: call(op, case, graph, o)
    program = jax.jit(
        lambda many: (jax.vmap(ours)(many), loop(ours, many))
    )  # one, which is compiled faster than its parts
    close(*program(many), "float32")
    # One operand alone is batched, and the gradient of what is not is a sum over the batch.
    key = next(iter(operands))
    rest = {k: v for k, v in operands.items() if k != key}
    f = lambda own, rest: call(op, case, graph, {key: own} | rest)
    ways = lambda f, xs: jax.vmap(f)(xs), loop
    program = jax.jit(lambda own, rest: [way(lambda own: f(own, rest), own) for way in ways])
    close(*program(many[key], rest), "float32")
    loss = lambda rest, way, own: jnp.sum(jnp.sin(jnp.nan_to_num(way(lambda own: f(own, rest), own), neginf=0)))
    if rest:
        program = jax.jit(lambda own, rest: [jax.grad(loss)(rest, way, own) for way in ways])
        close(*program(many[key], rest), "float32", scale=20)


def test_vmap_of_graphs():
    case, _, _, operands = problem("sum", "weighted", "float32")
    ends = [edges_of(SIZES["edges"], SIZES["senders"], SIZES["receivers"], seed=k) for k in range(3)]
    s, r = (jnp.stack([e[k] for e in ends]) for k in range(2))

    def one(s, r, x, w):
        graph = messages.Graph(s, r, num_senders=SIZES["senders"], num_receivers=SIZES["receivers"])
        loss = lambda x: jnp.sum(jnp.sin(messages.edge_sum(case.f, graph, senders=x, edges=w)))
        return jax.value_and_grad(loss)(x)

    args = s, r, operands["senders"], operands["edges"]
    found = jax.jit(jax.vmap(one, (0, 0, None, None)))(*args)
    for k in range(3):
        close(jax.tree.map(lambda y: y[k], found), one(s[k], r[k], *args[2:]), "float32", scale=10)


@pytest.mark.parametrize(
    "name, batched",
    [("edge_sum", "all"), ("edge_max", "all"), ("edge_map", "graphs"), ("edge_mean", "features and a scalar")],
)
def test_batches_of_graphs_are_one_graph(name, batched):
    """Values and both orders of grad and vmap, without a loop; some graphs have no edges, others pad."""
    rng = np.random.default_rng(0)
    s, r = (jnp.asarray(rng.integers(-1, 7, (4, 12)), jnp.int32) for _ in range(2))
    s, r = s.at[2].set(-1), r.at[3, :6].set(7)
    x, w, c = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((4, 7, 3), (4, 12, 1), (4,)))
    args, axes = [s, r, x, w, c], [0] * 5
    for k in {"all": (), "graphs": (2, 3, 4), "features and a scalar": (3,)}[batched]:
        args[k], axes[k] = args[k][0], None

    def one(s, r, x, w, c):
        graph = messages.Graph(s, r, num_nodes=7)
        y = getattr(messages, name)(lambda a, b, w: jnp.sin(a) * w - b * c, graph, senders=x, receivers=x, edges=w)
        return jnp.where(jnp.isfinite(y), y, 0)

    loss = lambda *args: jnp.sum(jnp.sin(one(*args)))
    at = lambda k: [a if d is None else a[k] for a, d in zip(args, axes)]

    def looped(f):
        f = jax.jit(f)
        return jax.tree.map(lambda *ys: jnp.stack(ys), *(f(*at(k)) for k in range(4)))

    every = jax.jit(jax.vmap(one, axes))
    assert "stablehlo.while" not in every.lower(*args).as_text()
    close(every(*args), looped(one), "float32")
    grad = lambda f: jax.grad(f, (2, 3, 4))
    inside = looped(grad(loss))
    close(jax.jit(jax.vmap(grad(loss), axes))(*args), inside, "float32", scale=10)
    outside = jax.jit(grad(lambda *args: jnp.sum(jax.vmap(loss, axes)(*args))))(*args)
    wanted = [g.sum(0) if d is None else g for g, d in zip(inside, axes[2:])]
    close(list(outside), wanted, "float32", scale=20)


def test_a_graph_made_in_the_step_and_layers_of_one():
    """The same as one that is made outside; under scan, remat and as an argument."""
    case, at, graph, operands = problem("sum", "difference", "float32")
    n = 23
    s, r = edges_of(157, n, n)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(n, 4)), jnp.float32)
    layer = lambda graph, x: messages.edge_mean(lambda x, y: jnp.tanh(x - y), graph, senders=x, receivers=x)

    @jax.jit
    def inside(s, r, x):
        graph = messages.Graph(s, r, num_nodes=n)
        return jax.grad(lambda x: jnp.sum(layer(graph, jax.checkpoint(layer)(graph, x)) ** 2))(x)

    @jax.jit
    def outside(graph, x):
        body = lambda x, _: (layer(graph, x), None)
        return jax.grad(lambda x: jnp.sum(jax.lax.scan(body, x, None, length=2)[0] ** 2))(x)

    close(inside(s, r, x), outside(messages.Graph(s, r, num_nodes=n), x), "float32")


def test_the_same_bits_every_time():
    case, at, graph, operands = problem("sum", "weighted", "float32", skew=0.9)
    step = jax.jit(lambda o: jax.value_and_grad(lambda o: jnp.sum(jnp.sin(call("sum", case, graph, o))))(o))
    first = step(operands)
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, first, step(operands))


@pytest.mark.skipif(not ON_GPU, reason="takes a GPU's time")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [1, 7, 8, 64, 129, 512])
@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0])
def test_long_rows(width, dtype, skew, x64):
    """Rows that are cut into chunks, in every layout of threads."""
    n, count = 300, 20_000
    s, r = edges_of(count, n, n, skew)
    graph = messages.Graph(s, r, num_nodes=n)
    case = Case(lambda x, w: x * w, senders=(width,), edges=())
    operands = case.operands(dict(senders=n, edges=count), dtype)
    for op in ("sum", "mean", "max"):
        step = lambda o: jax.vjp(lambda o: call(op, case, graph, o), o)
        y, pull = step(operands)
        wanted, wanted_pull = jax.vjp(lambda o: plainly(op, case.f, s, r, n, n, o), to64(operands))
        close(y, wanted, dtype, scale=2)
        if op != "max" or dtype != "bfloat16":
            g = jnp.asarray(np.random.default_rng(3).normal(size=y.shape), dtype)
            close(pull(g), wanted_pull(to64(g)), dtype, scale=4)


@settings(max_examples=10 if not ON_GPU else 60, deadline=None, derandomize=True)
@given(
    count=st.integers(0, 60),
    senders=st.integers(0, 9),
    receivers=st.integers(0, 9),
    features=st.lists(st.sampled_from([0, 1, 2, 3, 5, 8]), max_size=3),
    drops=st.tuples(*[st.integers(0, 7)] * 3),
    op=st.sampled_from([*REDUCE, "map"]),
    seed=st.integers(0, 1000),
)
def test_odd_shapes(count, senders, receivers, features, drops, op, seed):
    """Empty graphs, no edges, no features, operands that lack some."""
    rng = np.random.default_rng(seed)
    s, r = (rng.integers(-2, n + 2, count).astype(np.int32) for n in (senders, receivers))
    graph = messages.Graph(s, r, num_senders=senders, num_receivers=receivers)
    shapes = [tuple(1 if drop >> d & 1 else n for d, n in enumerate(features)) for drop in drops]
    arrays = [
        jnp.asarray(rng.normal(size=(n, *shape)), jnp.float32) for n, shape in zip((senders, receivers, count), shapes)
    ]
    operands = dict(zip(("senders", "receivers", "edges"), arrays))
    case = Case(lambda x, y, e: x * y + e)
    valid = (s >= 0) & (s < senders) & (r >= 0) & (r < receivers)
    # Where there are no nodes, there is nothing to compare with but zeros.
    whole = np.broadcast_shapes(*shapes)
    wide = {k: np.asarray(v, np.float64) for k, v in operands.items()}
    m = np.zeros((count, *whole))
    if valid.any():
        m[valid] = wide["senders"][s[valid]] * wide["receivers"][r[valid]] + wide["edges"][valid]
    if op == "map":
        want = m
    else:
        want = np.full((receivers, *whole), {"max": -np.inf, "min": np.inf}.get(op, 0.0))
        {"max": np.maximum, "min": np.minimum}.get(op, np.add).at(want, r[valid], m[valid])
        if op == "mean":
            degree = np.maximum(np.bincount(r[valid], minlength=receivers), 1)
            want = want / degree.reshape(-1, *[1] * len(whole))

    @jax.jit
    def run(operands):
        y, pull = jax.vjp(lambda o: call(op, case, graph, o), operands)
        return y, *pull(jnp.ones(want.shape, jnp.float32))

    found, g = run(operands)
    close(found, want, "float32")
    assert jax.tree.map(jnp.shape, g) == jax.tree.map(jnp.shape, operands)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(g))


def test_features_of_symbolic_size():
    graph = messages.Graph(np.array([0, 1, 2]), np.array([1, 1, 0]), num_nodes=3)
    f = lambda x, w: messages.edge_sum(lambda x, w: x * w, graph, senders=x, edges=w)
    (width,) = export.symbolic_shape("width")
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, width), (3, 1))]
    x, w = jnp.arange(12.0).reshape(3, 4), jnp.arange(3.0).reshape(3, 1)
    exported = export.export(jax.jit(f), disabled_checks=jaxkern.export_checks())(*shapes)
    np.testing.assert_allclose(exported.call(x, w), f(x, w))


def test_integers_and_booleans():
    graph = messages.Graph(np.array([0, 1, 2]), np.array([1, 1, 0]), num_nodes=3)
    x, on = jnp.array([3, -5, 7]), jnp.array([True, False, True])
    f = lambda x, on: jnp.where(on, x, 0)
    assert messages.edge_sum(f, graph, senders=x, edges=on).tolist() == [7, 3, 0]
    assert messages.edge_max(lambda x: x, graph, senders=x).tolist() == [7, 3, jnp.iinfo(x.dtype).min]
    assert messages.edge_mean(lambda x: x, graph, senders=x).tolist() == [7.0, -1.0, 0.0]
    assert messages.edge_map(lambda x: x > 0, graph, senders=x).tolist() == [True, False, True]


def test_bad_arguments():
    Graph, x = messages.Graph, jnp.zeros((3, 4))
    graph = Graph(np.array([0, 1]), np.array([1, 2]), num_nodes=3)
    for error, match, f in [
        (TypeError, "senders must be of an integer type", lambda: Graph(jnp.zeros(2), jnp.zeros(2, int), num_nodes=3)),
        (ValueError, "one size", lambda: Graph(jnp.zeros(2, int), jnp.zeros(3, int), num_nodes=3)),
        (ValueError, "excludes", lambda: Graph(jnp.zeros(2, int), jnp.zeros(2, int), num_nodes=3, num_senders=2)),
        (TypeError, "must be given where", lambda: jax.jit(lambda i: Graph(i, i).num_senders)(jnp.zeros(2, int))),
        (ValueError, "from 0", lambda: Graph(jnp.zeros(2, int), jnp.zeros(2, int), num_nodes=-1)),
        (ValueError, "from 0 to 2", lambda: Graph(np.array([2**40]), np.array([0]))),
        (TypeError, "graph must be .*: make one", lambda: messages.edge_sum(lambda x: x, None, senders=x)),
        (TypeError, "f must be a function", lambda: messages.edge_sum(x, graph, senders=x)),
        (TypeError, "must be given", lambda: messages.edge_sum(lambda: 0.0, graph)),
        (
            ValueError,
            "must have 2 rows, one for each edge of the graph",
            lambda: messages.edge_sum(lambda x: x, graph, edges=x),
        ),
        (
            ValueError,
            "do not broadcast",
            lambda: messages.edge_sum(lambda x, e: x, graph, senders=x, edges=jnp.zeros((2, 3))),
        ),
        (ValueError, "must return", lambda: messages.edge_sum(lambda x: (), graph, senders=x)),
        (TypeError, "must be numbers", lambda: messages.edge_sum(lambda x: x > 0, graph, senders=x)),
        (TypeError, "closes over an array", lambda: messages.edge_sum(lambda y: jnp.max(y * x), graph, senders=x)),
        (ValueError, "out of bounds", lambda: messages.edge_map(lambda x: x, graph, senders=x, reduce_features=1)),
        (TypeError, "an array", lambda: messages.edge_sum(lambda x: x, graph, senders=object())),
    ]:
        with pytest.raises(error, match=match):
            f()


def test_names_in_errors_and_text():
    graph = messages.Graph(np.array([0, 1]), np.array([1, 2]), num_nodes=3)
    assert repr(graph) == "Graph(2 edges, 3 senders, 3 receivers)"
    assert "senders=(2,)" in repr(jax.tree.map(jnp.shape, graph))  # as of shardings, there are no arrays
    with pytest.raises(
        jax.errors.TracerBoolConversionError, match=r"<lambda> at .*test_messages.py:.* argument feature"
    ):
        messages.edge_sum(lambda feature: feature if feature > 0 else 0, graph, senders=jnp.zeros((3, 4)))


def test_documented_without_64_bits():
    """Indices of 64 bits are not cut to 32 without x64."""
    with compat.enable_x64(False):
        graph = messages.Graph(np.array([0, 2**32]), np.array([0, 1]), num_nodes=2)
        assert messages.edge_sum(lambda x: x, graph, senders=jnp.ones(2)).tolist() == [1.0, 0.0]
    assert jaxkern.messages is messages
