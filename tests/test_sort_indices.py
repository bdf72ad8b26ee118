"""sort_indices: the order of updates by row, its plan, and that equal sorts of a program become one. Needs no GPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from indexed import INDEX_DTYPES, numpy_rows
from plans import DEVICES, compile_kernels, needs_nvrtc, needs_runtime

import jaxkern
from jaxkern._core import compat, device, launch, registry
from jaxkern._ops.indexing import sort

SIZES = [
    (1, 1, 1),
    (1, 2048, 3),
    (1, 65537, 512),
    (7, 3000, 100_000),
    (1, 1 << 19, 1 << 18),
    (1, 1_166_243, 169_343),
    (1, 1 << 22, 2**31 - 2),
    (64, 20_000, 1000),
    (1, 1 << 30, 3),
]


@pytest.mark.parametrize("wrap, clip", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
def test_against_numpy(index_dtype, wrap, clip):
    batch, count, rows = 3, 200, 40
    with compat.enable_x64():
        limits = np.iinfo(index_dtype)
        index = (
            np.random.default_rng(0)
            .integers(max(limits.min, -90), min(limits.max, 90), (batch, count))
            .astype(index_dtype)
        )
        keys, order = sort.sort_indices(jnp.asarray(index), rows=rows, wrap=wrap, clip=clip)
    row = np.stack([numpy_rows(i, rows, wrap, clip) for i in index])
    want = np.where(row < 0, batch * rows, row + rows * np.arange(batch)[:, None]).reshape(-1)
    np.testing.assert_array_equal(order, np.argsort(want, kind="stable"))
    np.testing.assert_array_equal(keys, np.sort(want))
    assert keys.dtype == order.dtype == np.uint32


@pytest.mark.parametrize("rows", [2**31 - 1, 2**31, 2**31 + 8, 2**32 - 2])
@pytest.mark.parametrize("wrap, clip", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("index_dtype", ["int32", "uint32"])
def test_more_rows_than_int32_numbers(index_dtype, wrap, clip, rows):
    index = np.array([5, -1, 2**31 - 1, -(2**31), 0, -5, 2**31 - 2], np.int32).astype(index_dtype)
    row = [int(i) + rows if wrap and i < 0 else int(i) for i in index]
    row = [min(max(i, 0), rows - 1) if clip else i if 0 <= i < rows else rows for i in row]
    found = jaxkern.sort_indices(jnp.asarray(index), rows, wrap=wrap, mode="clip" if clip else None)
    np.testing.assert_array_equal(found.order, np.argsort(row, kind="stable"))
    np.testing.assert_array_equal(found.keys, np.sort(row))


@pytest.mark.parametrize("rows", [4, 2**31, 2**32 - 2, 2**33])
@pytest.mark.parametrize("count", [1000, 2**31 - 1, 2**31, 2**32 + 8])
def test_large_calls_are_lowered(count, rows):
    """What kernels cannot number is left to XLA, and what 32 bits cannot number in an order raises."""
    struct = jax.ShapeDtypeStruct
    ids, data, table = struct((count,), "int32"), struct((count,), "float32"), struct((rows,), "float32")
    calls = [
        (jax.grad(lambda x, i: jaxkern.segment_sum(x, i, rows).sum()), data, ids),
        (jax.grad(lambda x, i: jaxkern.segment_max(x, i, rows).sum()), data, ids),
        (jax.grad(lambda x, i: jaxkern.segment_softmax(x, i, rows).sum()), data, ids),
        (jax.grad(lambda t, i: jaxkern.index_select(t, 0, i).sum()), table, ids),
        (lambda t, i, x: jaxkern.index_add(t, 0, i, x), table, ids, data),
    ]
    order = lambda i: jaxkern.sort_indices(i, rows)
    if rows >= 2**32 - 1:
        with pytest.raises(ValueError, match=r"jaxkern\.sort_indices: num_segments must be below 2\*\*32 - 1, got"):
            jax.eval_shape(order, ids)
    elif count < 2**31:
        calls.append((order, ids))
    for n, (f, *operands) in enumerate(calls):
        for platform in ("cuda", "cpu")[
            : 1 + (n + len(str(count)) + len(str(rows))) % 2
        ]:  # every other one for the CPU too
            jax.jit(f).trace(*operands).lower(lowering_platforms=(platform,))


@pytest.mark.parametrize("count", [2**31 - 1, 2**31, 2**31 + 8])
@pytest.mark.parametrize(
    "name, sorts",
    [
        ("sort_indices: at most 2**31 - 1 ids", lambda x, i: jaxkern.sort_indices(i, 7)),
        ("Graph: at most 2**31 - 1 edges", lambda x, i: jaxkern.Graph(i, i, num_nodes=7)),
        ("segment_prod: at most 2**31 - 1 rows", jax.grad(lambda x, i: jaxkern.segment_prod(x, i, 7).sum())),
    ],
    ids=["sort_indices", "Graph", "segment_prod"],
)
def test_more_than_xla_sorts_is_refused(name, sorts, count):
    """XLA raises an error on a GPU, when it compiles, for a stable sort of 2**31 elements; jaxkern where it is traced."""
    operands = jax.ShapeDtypeStruct((count,), "float32"), jax.ShapeDtypeStruct((count,), "int32")
    if count < 2**31:
        jax.eval_shape(sorts, *operands)
    else:
        with pytest.raises(ValueError, match=re.escape(f"jaxkern.{name} can be sorted") + f".*, got {count}"):
            jax.eval_shape(sorts, *operands)


def test_no_operation_sorts_more_than_xla_can():
    """Operations that sort ids themselves leave so many to scatters, on every platform and with every algorithm."""
    count = 2**31 + 8
    struct = jax.ShapeDtypeStruct
    ids, data, table = struct((count,), "int32"), struct((count,), "float32"), struct((7,), "float32")
    reductions = jaxkern.segment_sum, jaxkern.segment_max, jaxkern.segment_mean, jaxkern.segment_softmax
    calls = [(jax.grad(lambda x, i, f=f: f(x, i, 7).sum()), data, ids) for f in reductions]
    calls += [
        (jax.grad(lambda t, i: jaxkern.index_select(t, 0, i).sum()), table, ids),
        (lambda t, i, x: jaxkern.index_add(t, 0, i, x), table, ids, data),
        (lambda t, i, x: t.at[i].add(jnp.sin(x)), table, ids, data),
    ]
    sorts = {"index_add": "sort", "segment_sum": "sort", "segment_max": "sort", "segment_softmax": "sort"}
    for context in (jaxkern.algorithms.force(**sorts), jaxkern.accelerate(force=True)):
        with context:
            for f, *operands in calls:
                text = jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
                assert "stablehlo.sort" not in text and "sort_indices" not in text


def planned(batch, count, rows, gpu=device.H200, dtype="int32", wrap=False):
    index = jax.core.ShapedArray((batch, count), jnp.dtype(dtype))
    out = [jax.core.ShapedArray((batch * count,), jnp.dtype("uint32"))] * 2
    return sort.plan(gpu, [index], out, rows=rows, wrap=wrap, clip=False), [index], out


@pytest.mark.parametrize("gpu", DEVICES)
@pytest.mark.parametrize("batch, count, rows", SIZES)
def test_every_bit_of_the_keys_is_sorted(batch, count, rows, gpu):
    plan, operands, out = planned(batch, count, rows, gpu)
    positions, bits = batch * count, 0
    for step in plan.launches:
        assert step.shared <= gpu.shared_memory and step.grid3()[0] < 2**31 and step.block3()[0] <= 1024
        if "Scatter" not in step.name:
            continue
        fields = step.args[1].members
        shift, width, tiles = (fields[k].value for k in range(3))
        assert shift == bits and tiles * sort.THREADS * int(step.name.split(",")[1]) >= positions
        counts, keys, payload = fields[4], fields[7], fields[8]
        assert counts.offset + 4 * (tiles + 1 << width) <= plan.scratch
        for buffer in (keys, payload):
            assert buffer.kind == "result" or buffer.offset + 4 * positions <= plan.scratch
        bits += width
    assert (keys, payload) == (launch.result(0), launch.result(1)) and 2**bits > batch * rows
    assert (
        registry.kernels.module is None or registry.kernels.module.check(launch.text("sort", plan, operands, out)) == ""
    )


def test_what_32_bits_do_not_number_is_sorted_by_xla():
    assert planned(1, 5, 2**31 - 1)[0] is None and planned(1, 2**30 + 1, 5)[0] is None
    with pytest.raises(ValueError, match="32 bits"):
        jax.eval_shape(lambda i: sort.sort_indices(i, rows=2**31, wrap=False, clip=False), jnp.zeros((2, 3), int))


@needs_nvrtc
def test_kernels_compile():
    names = {step.name for size in SIZES[:6] for step in planned(*size)[0].launches}
    compile_kernels([(sort.HEADER, name) for name in names], 90)
    for capability in (80, 86, 89, 100, 120):
        assert registry.kernels.module.compile(sort.HEADER, max(names), capability)[0]


def test_vmap_sorts_each():
    index = jnp.array([[[3, -1, 0]], [[9, 1, 1]]])
    for one, keys, order in zip(
        index, *jax.vmap(lambda i: sort.sort_indices(i, rows=4, wrap=False, clip=False))(index)
    ):
        want = sort.sort_indices(one, rows=4, wrap=False, clip=False)
        np.testing.assert_array_equal(keys, want[0])
        np.testing.assert_array_equal(order, want[1])


# ---- the order in place of ids

IDS, ROWS = jnp.array([5, 0, 2, 2, -1, 9, 5, 1]), 6
DATA = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
OPERATIONS = {
    "segment_sum": lambda d, ids, **o: jaxkern.segment_sum(d, ids, ROWS, **o),
    "segment_mean": lambda d, ids, **o: jaxkern.segment_mean(d, ids, ROWS, **o),
    "segment_max": lambda d, ids, **o: jaxkern.segment_max(d, ids, ROWS, **o),
    "segment_min": lambda d, ids, **o: jaxkern.segment_min(d, ids, ROWS, **o),
    "segment_softmax": lambda d, ids, **o: jaxkern.segment_softmax(d, ids, ROWS, **o),
    "index_add": lambda d, ids, **o: jaxkern.index_add(jnp.ones((ROWS, 3)), 0, ids, d, alpha=0.5, **o),
    "index_select": lambda d, ids, **o: jnp.nan_to_num(jaxkern.index_select(d[:ROWS], 0, ids, **o)),
    "embedding_lookup": lambda d, ids, **o: jnp.nan_to_num(jaxkern.embedding_lookup(d[:ROWS], ids, **o)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_order_instead_of_ids(name):
    """The same values and derivatives, eagerly, under jit, vmap and twice differentiated."""
    f, wrap = OPERATIONS[name], not name.startswith("segment")
    order = jaxkern.sort_indices(IDS, ROWS, wrap=wrap)
    loss = lambda d, order: jnp.sum(jnp.sin(f(d, None if order else IDS, order=order)))
    for g in (
        lambda d, order: f(d, None if order else IDS, order=order),
        jax.grad(loss),
        jax.grad(lambda d, order: jnp.sum(jax.grad(loss)(d, order) ** 2)),
        lambda d, order: jax.jvp(lambda d: loss(d, order), (d,), (d,))[1],
        lambda d, order: jax.vmap(lambda d: loss(d, order))(jnp.stack([d, 2 * d])),
    ):
        np.testing.assert_array_equal(jax.jit(g)(DATA, order), jax.jit(g)(DATA, None))
    np.testing.assert_array_equal(f(DATA, IDS, order=order), f(DATA, IDS))


def test_vmap_of_an_order():
    ids = jnp.stack([IDS, IDS[::-1]])
    f = jax.vmap(lambda d, i: jaxkern.segment_sum(d, None, order=jaxkern.sort_indices(i, ROWS)), (None, 0))
    np.testing.assert_array_equal(f(DATA, ids), [jaxkern.segment_sum(DATA, i, ROWS) for i in ids])


def test_orders_of_any_shape_and_mode():
    ids, data = IDS.reshape(2, 4), DATA[:4]
    order = jaxkern.sort_indices(ids, ROWS, mode="clip")
    np.testing.assert_array_equal(
        jaxkern.segment_sum(data, None, order=order), jaxkern.segment_sum(data, ids, ROWS, mode="clip")
    )
    assert jaxkern.sort_indices(jnp.zeros(0, jnp.int32), 3).keys.shape == (0,)
    assert jaxkern.sort_indices(IDS, 0).keys.tolist() == [0] * 8


@pytest.mark.parametrize(
    "call, kind, words",
    [
        (lambda o: jaxkern.segment_sum(DATA, None, 5, order=o), ValueError, ["segment_sum", "6 rows, not 5"]),
        (lambda o: jaxkern.segment_sum(DATA, IDS[:3], order=o), ValueError, ["segment_ids", "(3,)", "(8,)"]),
        (lambda o: jaxkern.segment_sum(DATA, None, mode="clip", order=o), ValueError, ["mode 'clip'"]),
        (lambda o: jaxkern.segment_sum(DATA, None, order=(1, 2)), TypeError, ["sort_indices", "tuple"]),
        (lambda o: jaxkern.segment_sum(DATA, None, 3), TypeError, ["segment_ids", "None"]),
        (lambda o: jaxkern.index_add(DATA, 0, None, DATA, order=o), ValueError, ["index_add", "6 rows, not 8"]),
        (lambda o: jaxkern.sort_indices(DATA, 3), TypeError, ["ids", "integer"]),
        (lambda o: jaxkern.sort_indices(IDS, None), TypeError, ["num_segments"]),
        (lambda o: jaxkern.sort_indices(IDS, 2**33), ValueError, ["num_segments must be below 2**32 - 1"]),
    ],
)
def test_bad_orders(call, kind, words):
    with pytest.raises(kind) as error:
        call(jaxkern.sort_indices(IDS, ROWS))
    assert all(word in str(error.value) for word in words), error.value


# ---- sorts of a program


def sorts(f, *args):
    """Sorts that a program for CUDA holds, and how many of them differ."""
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    found = [p for p in launch.programs(text) if "operation jaxkern_sort_indices" in p]
    assert all(registry.kernels.module.check(p) == "" for p in launch.programs(text))
    return len(found), len(set(found))


MANY, EDGES = jax.ShapeDtypeStruct((5000, 16), "float32"), jax.ShapeDtypeStruct((5000,), "int32")


@needs_runtime
def test_equal_sorts_of_a_program_are_the_same_call():
    """Whatever is reduced over them: XLA merges calls of the same operands and launch list."""

    def layers(d, ids):
        y = jaxkern.segment_sum(d, ids, 900).sum() + jaxkern.segment_max(d[:, :3], ids, 900).sum()
        y += jaxkern.segment_sum(d.astype(jnp.bfloat16), ids, 900).sum().astype(jnp.float32)
        return y + jaxkern.segment_softmax(d, ids, 900)[0, 0]

    found, different = sorts(jax.grad(layers), MANY, EDGES)
    assert found >= 3 and different == 1
    assert sorts(lambda d, i: jaxkern.segment_sum(d, i, 900) + jaxkern.segment_sum(d, i + 1, 900), MANY, EDGES) == (
        2,
        1,
    )
    assert sorts(lambda d, i: jaxkern.segment_sum(d, i, 900, indices_are_sorted=True), MANY, EDGES) == (0, 0)
    select = lambda d, i: (jaxkern.index_select(d, 0, i) ** 2).sum()
    assert sorts(jax.grad(select), MANY, EDGES) == (1, 1)


@needs_runtime
def test_a_given_order_is_not_sorted():
    order = jax.eval_shape(lambda i: jaxkern.sort_indices(i, 900), EDGES)
    loss = lambda d, o: (jaxkern.segment_sum(d, None, order=o) ** 2).sum() + jaxkern.segment_max(d, None, order=o).sum()
    assert sorts(jax.grad(loss), MANY, order) == (0, 0)
    wrapped = jax.eval_shape(lambda i: jaxkern.sort_indices(i, 5000, wrap=True), EDGES)
    select = lambda d, o: (jaxkern.index_select(d, 0, None, order=o) ** 2).sum()
    assert sorts(jax.grad(select), MANY, wrapped) == (0, 0)


@pytest.mark.gpu
def test_xla_merges_equal_sorts():
    """The compiled step of two layers, forward and backward, contains two sorts: by either end of the edges."""

    def layers(x, senders, receivers):
        for _ in range(2):
            x = jnp.tanh(jaxkern.segment_sum(jaxkern.index_select(x, 0, senders), receivers, 900))
        return x.sum()

    x, ids = jnp.ones((900, 16)), jnp.arange(5000) % 900
    text = jax.jit(jax.grad(layers)).lower(x, ids, ids * 7 % 900).compile().as_text()
    assert text.count('custom_call_target="jaxkern_sort_indices"') == 2
