"""Messages on CUDA: their plans, the kernels that they name, and what these do, run on the CPU. Needs no GPU."""

import functools

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plans import DEVICES, check_limits, layout, needs_nvrtc

import jaxkern
from jaxkern._core import compat, device, functor, launch, registry
from jaxkern._ops.messages import plan, reference, tuning
from jaxkern._ops.messages.edges import ENDS as ALL_ENDS
from jaxkern._ops.messages.edges import WIDTH

ROW, OTHER, EDGE, SHARED = ALL_ENDS
ENDS = (OTHER, EDGE, ROW)


def function(dtypes, results=1):
    f = lambda x, w, y: (x * w + y, x - y)[:results]
    return functor.trace(f, dtypes, name="edge_sum")[0]


def graph_of(edges, nodes, skew, others=None, seed=0):
    rng = np.random.default_rng(seed)
    r, s = rng.integers(-1, nodes, edges), rng.integers(-1, others or nodes, edges)
    r[rng.random(edges) < skew] = nodes // 2
    return jaxkern.Graph(s, r, num_senders=others or nodes, num_receivers=nodes)


class Problem:
    """Operands of a message x * w + y, of the feature shapes `shapes`, on a graph."""

    def __init__(self, shapes, dtypes, edges=1500, nodes=90, skew=0.4, ends=ENDS, results=1):
        rng = np.random.default_rng(1)
        self.graph = graph_of(edges, nodes, skew)
        count = {ROW: nodes, OTHER: nodes, EDGE: edges, SHARED: 1}
        self.arrays = [jnp.asarray(rng.integers(-9, 9, (count[e], *s)) / 4, d) for e, s, d in zip(ends, shapes, dtypes)]
        self.function = function(dtypes, results)
        self.ends, self.operands = ends, [*self.graph.into, *self.arrays]

    def run(self, unaligned=False, rows=None, **params):
        """(what kernels compute, what the reference does), of both kinds of operations."""
        dtypes = params.pop("dtypes", self.function.out_dtypes)
        params |= dict(function=self.function, ends=self.ends, dtypes=tuple(map(np.dtype, dtypes)))
        avals = [jax.typeof(x) for x in self.operands]
        if "reduction" in params:
            found = plan.reduce_plan(device.H200, avals, None, rows=rows, **params)
            wanted = jax.jit(functools.partial(reference.reduce_messages, **params))(*self.operands)
        else:
            found = plan.map_plan(device.H200, avals, None, **params)
            wanted = jax.jit(functools.partial(reference.map_messages, **params))(*self.operands)
        check_limits(found, device.H200)
        results = [(y.shape, y.dtype) for y in wanted]
        self.algorithm = found.algorithm
        return emulated.run(found, list(map(np.asarray, self.operands)), results, unaligned), wanted


def same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        b = np.asarray(b)
        if b.dtype == np.uint32:
            np.testing.assert_array_equal(a, b)
        else:
            a, b = a.astype(np.float64), b.astype(np.float64)
            np.testing.assert_allclose(a, b, rtol=1e-2 if found[0].dtype.itemsize == 2 else 1e-5, atol=1e-5)


# ---- what the kernels do


needs_compiler = pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
FLOAT, HALF, BFLOAT, DOUBLE = "float32", "float16", "bfloat16", "float64"


@needs_compiler
@pytest.mark.parametrize(
    ("shapes", "dtypes", "reduction"),
    [
        ([(1,), (1,), (1,)], [FLOAT] * 3, "sum"),
        ([(5,), (1,), (5,)], [FLOAT] * 3, "max_at"),
        ([(8,), (1,), (8,)], [BFLOAT] * 3, "mean"),
        ([(33,), (33,), (33,)], [HALF] * 3, "min"),
        ([(128,), (1,), (128,)], [FLOAT] * 3, "sum"),
        ([(132,), (1,), (132,)], [BFLOAT, FLOAT, BFLOAT], "mean"),
        ([(4, 8), (4, 1), (1, 8)], [FLOAT] * 3, "min_at"),
        ([(4, 1, 8), (1, 3, 1), (4, 3, 1)], [FLOAT] * 3, "sum"),
    ],
)
def test_reductions(shapes, dtypes, reduction):
    """Rows of all lengths, some cut into chunks; whole vectors, partial vectors, and addresses that are not aligned."""
    p = Problem(shapes, dtypes)
    same(*p.run(reduction=reduction))
    assert p.algorithm == "chunks"
    if shapes[0] == (5,):
        same(*p.run(reduction=reduction, unaligned=True))
    if shapes[0] <= (8,):  # NaN and infinities reach their own rows alone
        p.operands[-2] = p.operands[-2].at[jnp.arange(0, 60, 3)].set(jnp.nan).at[61].set(jnp.inf).at[62].set(-jnp.inf)
        found, wanted = p.run(reduction=reduction)
        same(found, wanted)
        assert np.isnan(found[0].astype(np.float32)).any() and not np.isnan(found[0].astype(np.float32)).all()


CHUNK = tuning.SHORTEST_CHUNK


@needs_compiler
def test_rows_that_do_not_fill_blocks_and_rows_of_several():
    """Rows of 25 threads, five to a block, and rows that several blocks share: 250 threads, and 130 and 514 of two vectors."""
    for width in (100, 1000, 1040, 4112):
        p = Problem([(width,), (1,), (width,)], [FLOAT] * 3, edges=2 * tuning.CHUNK, nodes=9, skew=0.8)
        same(*p.run(reduction="sum"))
        assert p.algorithm == "chunks"
    p = Problem([(4112,), (1,), (4112,)], [FLOAT] * 3, edges=8, nodes=9)  # 257 threads of four vectors each
    same(*p.run(reduction="sum"))


@needs_compiler
def test_rows_and_chunks_in_order():
    """Rows that begin and end at chunks, one row for all, rows without edges, and rows of so many chunks that a block adds them."""
    c = CHUNK
    cases = [
        [c, 2 * c, 1, 3 * c, c - 1],
        [0, 8 * c - 24, 0, 0],
        [c + 1, 0, 3 * c - 1, c + 1],
        [1, c - 1, 5 * c + 1, 0, 200],
    ]
    cases += [[3, 15 * c, 16 * c, 17 * c, 40 * c + 5, c + 1, c + 1, 9], [c // 2, c + 1, c // 2 - 1, c + c // 2, 2 * c]]
    for lengths in cases:
        receivers = np.repeat(np.arange(len(lengths)), lengths)
        graph = jaxkern.Graph(np.zeros_like(receivers), receivers, num_senders=1, num_receivers=len(lengths))
        w = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (len(receivers), 1)), jnp.float32)
        f = functor.trace(lambda w: w, ["float32"], name="edge_sum")[0]
        for reduction in ("sum", "max_at"):
            params = dict(function=f, ends=(EDGE,), reduction=reduction, dtypes=f.out_dtypes)
            operands = [*graph.into, w]
            found = plan.reduce_plan(device.H200, [jax.typeof(x) for x in operands], None, **params)
            wanted = jax.jit(functools.partial(reference.reduce_messages, **params))(*operands)
            same(emulated.run(found, list(map(np.asarray, operands)), [(y.shape, y.dtype) for y in wanted]), wanted)


@needs_compiler
def test_several_results_and_wide_sums():
    p = Problem([(12,), (1,), (12,)], [BFLOAT] * 3, results=2)
    found, wanted = p.run(reduction="sum", dtypes=[FLOAT, BFLOAT])
    assert [a.dtype.name for a in found] == [FLOAT, BFLOAT]
    same(found, wanted)


@needs_compiler
@pytest.mark.parametrize(
    ("shapes", "dtypes", "summed"),
    [
        ([(64,), (1,), (64,)], [FLOAT] * 3, 0),
        ([(64,), (1,), (64,)], [BFLOAT] * 3, 1),
        ([(5,), (1,), (5,)], [FLOAT] * 3, 1),
        ([(3, 8), (3, 1), (1, 8)], [HALF] * 3, 1),
        ([(3, 8), (3, 1), (1, 8)], [FLOAT] * 3, 2),
        ([(3,), (1,), (1,)], [FLOAT] * 3, 0),
    ],
)
def test_messages_of_edges(shapes, dtypes, summed):
    same(*Problem(shapes, dtypes, edges=203, nodes=17).run(summed=summed))


@needs_compiler
@pytest.mark.parametrize("reduction", ["sum", None])
def test_arrays_that_are_no_graph_lead_nowhere(reduction):
    """Whatever the graph's arrays hold, kernels stay in bounds: buffers end at pages that nobody may touch."""
    p = Problem([(64,), (1,), (64,)], [FLOAT] * 3, edges=700, nodes=20)
    rng = np.random.default_rng(0)
    for high in (2**32, 40, 701):
        p.operands[:WIDTH] = [jnp.asarray(rng.integers(0, high, x.shape, np.uint32)) for x in p.operands[:WIDTH]]
        p.run(**(dict(reduction=reduction) if reduction else dict(summed=0)))


# ---- plans


SHAPES = [
    [(1,)] * 3,
    [(7,), (1,), (7,)],
    [(64,), (1,), (64,)],
    [(520,), (1,), (520,)],
    [(1024,), (1024,), (1024,)],
    [(8, 32), (8, 1), (8, 1)],
]


def avals(shapes, dtypes, edges, nodes):
    count = {OTHER: nodes, EDGE: edges, ROW: nodes}
    order = [jax.core.ShapedArray((n,), np.dtype(np.uint32)) for n in (edges, edges, edges, nodes + 1)]
    with compat.enable_x64():
        return order + [jax.core.ShapedArray((count[e], *s), jnp.dtype(d)) for e, s, d in zip(ENDS, shapes, dtypes)]


@pytest.mark.parametrize("on", DEVICES, ids=lambda d: str(d.compute_capability))
@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT, DOUBLE])
def test_every_plan_can_run(dtype, on, x64):
    f = function([dtype] * 3)
    params = dict(function=f, ends=ENDS, dtypes=f.out_dtypes)
    for shapes in SHAPES:
        for edges, nodes in (1, 1), (100, 7), (129, 1000), (1_166_243, 169_343), (50_000_000, 100):
            operands = avals(shapes, [dtype] * 3, edges, nodes)
            found = [plan.reduce_plan(on, operands, None, reduction=op, **params) for op in ("sum", "max_at")]
            found += [plan.map_plan(on, operands, None, summed=k, **params) for k in (0, len(shapes[0]))]
            for p in found:
                check_limits(p, on)
            assert found[0].algorithm == ("chunks" if edges > tuning.CHUNK else "rows")


def test_chunks_are_short_in_small_graphs():
    assert [plan.chunk_of(n) for n in (1, 30_000, 100_000, 200_000, 1_166_243, 2**30)] == [32, 32, 64, 128, 256, 256]


def test_vectors_and_threads():
    """The layouts that were measured: a thread reads one vector of 16 bytes, and more if a row fills several blocks."""
    for dtype, width, degree, rows in [
        (FLOAT, 128, 7, plan.Rows(4, 1, 32, 1, 4)),
        (BFLOAT, 128, 7, plan.Rows(8, 1, 16, 1, 4)),
        (FLOAT, 256, 7, plan.Rows(4, 1, 64, 1, 4)),
        (FLOAT, 1, 7, plan.Rows(1, 1, 1, 4, 2)),
        (FLOAT, 127, 7, plan.Rows(1, 4, 32, 1, 4)),
        (FLOAT, 4096, 7, plan.Rows(4, 2, 512, 1, 2)),
        (FLOAT, 4096, 1, plan.Rows(4, 4, 256, 1, 1)),
        (BFLOAT, 2048, 1, plan.Rows(8, 2, 128, 1, 1)),
    ]:
        operands = avals([(width,), (1,), (1,)], [dtype] * 3, 70_000, 10_000)
        problem = plan.problem(operands[WIDTH:], ENDS)
        vector = plan.vector_of(problem, [jnp.dtype(dtype)])
        assert plan.rows_of(problem, [jnp.dtype(dtype)], vector, degree) == rows


def test_what_has_no_kernel():
    """Too many alternations of features, results that are rounded differently, more edges than 32 bits number."""
    f = function([FLOAT] * 3)
    params = dict(function=f, ends=ENDS, reduction="sum", dtypes=f.out_dtypes)
    many = [(2, 1, 2, 1), (1, 2, 1, 2), (1, 1, 1, 1)]
    assert plan.reduce_plan(device.H200, avals(many, [FLOAT] * 3, 10, 10), None, **params) is None
    assert plan.reduce_plan(device.H200, avals(SHAPES[0], [FLOAT] * 3, (1 << 30) + 1, 10), None, **params) is None
    params["dtypes"] = (np.dtype(np.int32),)
    assert plan.reduce_plan(device.H200, avals(SHAPES[0], [FLOAT] * 3, 10, 10), None, **params) is None


def test_struct_sizes():
    """The sizes match the static_asserts of the kernels."""
    assert layout(plan._edges(3, 4)) == (40, 8)
    f = function([FLOAT] * 3)
    operands = avals(SHAPES[2], [FLOAT] * 3, 1000, 10)
    p = plan.reduce_plan(device.H200, operands, None, function=f, ends=ENDS, reduction="sum", dtypes=f.out_dtypes)
    assert [layout(step.args[0])[0] for step in p.launches] == [40 + 3 * 24 + 24 + 28 + 16 + 12, 40 + 24 + 16]


# ---- programs


def lowered(f, *shapes):
    return jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@needs_nvrtc
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT])
def test_a_step_and_its_kernels(dtype):
    """A message and its gradients are three kernels, and no array of all messages; they compile for every GPU."""
    graph = graph_of(20_000, 1000, 0.1)
    x, w = jax.ShapeDtypeStruct((1000, 128), dtype), jax.ShapeDtypeStruct((20_000,), dtype)

    def loss(x, w):
        y = jaxkern.edge_sum(lambda x, w: jax.nn.silu(x) * w, graph, senders=x, edges=w)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    text = lowered(jax.grad(loss, (0, 1)), x, w)
    found = launch.programs(text)
    assert sorted(p.splitlines()[1].split("(")[0] for p in found) == ["operation jaxkern_edge_map"] + 2 * [
        "operation jaxkern_edge_reduce"
    ]
    assert "20000x128" not in text
    kernels = {k for p in found for k in launch.kernels(p) if "4, 1, 1" in k.name or "EdgeDot<Message, 8" in k.name}
    for kernel in kernels:
        for capability in (80, 90, 120)[:: 1 if dtype == FLOAT else 2]:
            cubin, symbol, _ = registry.kernels.module.compile(kernel.header, kernel.name, capability, kernel.source)
            assert cubin and symbol


@needs_nvrtc
def test_other_kernels_compile():
    f = function([FLOAT] * 3)
    operands = avals([(5,), (1,), (5,)], [FLOAT] * 3, 1000, 100)
    params = dict(function=f, ends=ENDS, dtypes=f.out_dtypes)
    plans = [plan.reduce_plan(device.H200, operands, None, reduction="max_at", **params)]
    plans += [plan.map_plan(device.H200, operands, None, summed=0, **params)]
    for step in {s.name: s for p in plans for s in p.launches}.values():
        assert registry.kernels.module.compile(step.header, step.name, 90, step.source)[0]


def test_no_order_that_is_not_needed():
    """A graph made in the step, forward alone: one sort."""
    ids = jax.ShapeDtypeStruct((5000,), jnp.int32)
    x = jax.ShapeDtypeStruct((300, 8), jnp.float32)

    def forward(s, r, x):
        return jaxkern.edge_sum(lambda x: x, jaxkern.Graph(s, r, num_nodes=300), senders=x)

    text = lowered(forward, ids, ids, x)
    (call,) = [p for p in launch.programs(text) if "edge_reduce" in p.splitlines()[1]]
    assert call.splitlines()[1].count("uint32[5000]") == 3
