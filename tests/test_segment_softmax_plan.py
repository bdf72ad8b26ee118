"""segment_softmax on CUDA: its plans, the kernels that they name, and the programs that hold them. Needs no GPU."""

import functools
import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from indexed import FLOATS, values
from plans import compile_kernels, compile_on_other_gpus

import jaxkern
from jaxkern import algorithms
from jaxkern._core import compat, device, launch, registry
from jaxkern._ops.indexing.primitive import Rules
from jaxkern._ops.segment_softmax import plan, primitive, reference, tuning

needs_runtime = pytest.mark.skipif(registry.kernels.module is None, reason=registry.kernels.reason)
needs_nvrtc = pytest.mark.skipif(
    registry.kernels.module is None or bool(registry.kernels.module.compiler()[1]),
    reason=registry.kernels.reason or "NVRTC cannot be used",
)
DEVICES = (device.H200, device.A100, device.Device(84, 86, 99 << 10), device.Device(170, 120, 99 << 10))
PROBLEMS = [  # shape, axis, batch dimensions, segments
    ((17,), 0, 0, 5),
    ((1, 4), 0, 0, 3),
    ((5000, 1), 0, 0, 60),
    ((5000, 3), 0, 0, 700),
    ((900, 5, 7), 0, 0, 40),
    ((3000, 8), 0, 0, 100),
    ((700, 64), 0, 0, 30),
    ((400, 33), 0, 0, 1000),
    ((300, 257), 0, 0, 1),
    ((20_000, 9), 0, 0, 3),
    ((100_000, 3), 0, 0, 2),
    ((6, 900, 8), 1, 1, 40),
    ((3, 5, 4000, 4), 2, 1, 70),
    ((4, 2000, 128), 1, 0, 20),
    ((1_166_243, 8), 0, 0, 169_343),
    ((1 << 20, 256), 0, 0, 4000),
    ((1 << 30,), 0, 0, 2**31 - 3),
]
EVERY = [
    (problem, dtype, ordered, backward)
    for problem in PROBLEMS
    for dtype in FLOATS
    for ordered in (False, True)
    for backward in (False, True)
]


def planned(problem, dtype, ordered, backward, on=device.H200):
    shape, axis, k, rows = problem
    with compat.enable_x64():
        x = jax.core.ShapedArray(shape, jnp.dtype(dtype))
        count = int(plan.size_of(shape[:k])) * shape[axis]
        keys = jax.core.ShapedArray((count,), jnp.dtype("uint32"))
    operands = plan.Ordered((x,) * (1 + backward), keys, keys if ordered else None)
    make = plan.backward if backward else plan.forward
    return make(on, operands, [x], rows=rows, rules=Rules(axis, k)), jax.tree.leaves(operands), [x]


def as_problem(shape, axis, k, rows, dtype):
    return plan.problem_of(jax.ShapeDtypeStruct(shape, dtype), rows, axis, k)


def size_and_alignment(value):
    """The size and alignment of a C++ argument."""
    if isinstance(value, launch.Struct):
        at, most = 0, value.align
        for member in value.members:
            size, alignment = size_and_alignment(member)
            at, most = -(-at // alignment) * alignment + size, max(most, alignment)
        return -(-at // most) * most, most
    size = 8 if isinstance(value, launch.Buffer) else int(value.type[1:]) // 8
    return size, size


def buffers(value):
    if isinstance(value, launch.Struct):
        return [b for member in value.members for b in buffers(member)]
    return [value] if isinstance(value, launch.Buffer) else []


@pytest.mark.parametrize("on", DEVICES)
def test_limits(on):
    for problem, dtype, ordered, backward in EVERY:
        found, operands, results = planned(problem, dtype, ordered, backward, on)
        for steps in (found.launches, found.unaligned or ()):
            assert len(steps) in (0, 1, 3) and (found.scratch > 0) == (len(found.launches) == 3)
            for step in steps:
                grid, block = step.grid3(), step.block3()
                static = 16 * 1024  # of SegmentTiles in double, and less of others
                assert 0 < grid[0] < 2**31 and grid[1:] == (1, 1) and 0 < block[0] <= 1024
                assert step.shared + static <= tuning.SHARED_BYTES <= on.shared_memory
                used = [b for arg in step.args for b in buffers(arg)]
                assert ("scratch" in {b.kind for b in used}) == (found.scratch > 0)
        assert (
            registry.kernels.module is None
            or registry.kernels.module.check(launch.text("segment_softmax", found, operands, results)) == ""
        )


def test_structs_are_as_large_as_in_the_kernels():
    sizes = {}
    for case in EVERY:
        for step in planned(*case)[0].launches:
            kernel = step.name.split("<")[0]
            sizes.setdefault(kernel, set()).add(tuple(size_and_alignment(arg)[0] for arg in step.args))
    assert sizes == {
        "SegmentTiles": {(120, 104)},
        "SegmentRewrite": {(120, 104, 8)},
        "SegmentJoin": {(120, 8, 8)},
        "SegmentWalk": {(120, 72)},
    }


def test_every_place_is_in_one_tile():
    """Every place is in one tile, and every column in one column tile or strip."""
    for problem, dtype, ordered, backward in EVERY:
        rows, p = problem[-1], as_problem(*problem, dtype)
        found, _, _ = planned(problem, dtype, ordered, backward)
        for steps in (found.launches, found.unaligned or found.launches):
            run, shape = steps[0].args[:2]
            positions, dropped, places, lookahead, tiles = (m.value for m in run.members[9:14])
            assert positions == p.batch * p.count and dropped == p.batch * rows
            assert (tiles - 1) * places < positions <= tiles * places
            assert (found.scratch > 0) == (positions > places + lookahead)
            stat = max(p.itemsize, 4) * (1 if backward else 2)
            assert found.scratch in (0, p.outer * tiles * 2 * p.inner * stat)
            if found.algorithm == "walk":
                warps, log_lanes, strips = shape.members[0].value, shape.members[3].value, shape.members[4].value
                vector, parts = map(int, re.search(r">, (\d), (\d)>", steps[0].name).groups())
                assert warps == p.outer * tiles * strips <= steps[0].grid * tuning.WALK_WARPS
                width = vector * parts << log_lanes
                assert (strips - 1) * width < p.inner <= strips * width and 1 << log_lanes <= 32
                assert vector == 1 or (steps is found.launches and p.inner * p.itemsize % 16 == 0)
            else:
                columns, column_tiles, spans, held = (m.value for m in shape.members[:4])
                assert (
                    column_tiles - 1
                ) * columns < p.inner <= column_tiles * columns and columns <= tuning.TILE_COLUMNS
                assert spans * columns <= tuning.TILE_THREADS and steps[0].grid == p.outer * tiles * column_tiles
                room = spans * (15 if p.itemsize == 8 else 31)
                assert places + lookahead == room and held >= room * columns + 16 // p.itemsize
                assert steps[0].shared >= 4 * (room + 2)  # keys
                if "kVectors" in steps[0].name:
                    assert steps is found.launches and (columns | p.inner) * p.itemsize % 16 == 0
                if "kContiguous" in steps[0].name:
                    assert column_tiles == 1 and not ordered and (p.batch == 1 or p.outer == 1)
                if len(steps) == 3:
                    assert -(-steps[2].args[2].value // steps[2].grid) <= tuning.TILE_THREADS


def test_a_slice_is_cut_alike_in_any_batch():
    p = as_problem((1, 6000, 4), 1, 1, 40, "float32")
    assert len({plan.cut_of(p._replace(batch=batch)) for batch in (1, 3, 1000)}) == 1
    assert plan.most_slices(p._replace(batch=100)) >= 100
    large = plan.Problem(74_362_205, 147_668, batch=29)
    assert plan.most_slices(large) == 28


def test_algorithms():
    for problem in PROBLEMS:
        p = as_problem(*problem, "float32")
        assert plan.choose(p) == "sort" and plan.fits("sort", p) and not plan.fits("sorted", p)
        p = p._replace(sorted=True)
        assert plan.choose(p) == "sorted" and all(plan.fits(a, p) for a in plan.ALGORITHMS)
    assert not plan.fits("sort", p._replace(rows=2**31 - 2)) and not plan.fits("sort", p._replace(count=2**30 + 1))


@needs_nvrtc
def test_kernels_compile():
    names = set()
    for problem, dtype, ordered, backward in EVERY:
        if dtype == ("bfloat16" if backward else "float32") and problem in PROBLEMS[2:10]:
            found = planned(problem, dtype, ordered, backward)[0]
            names |= {(step.header, step.name) for step in (*found.launches, *(found.unaligned or ()))}
    compile_kernels(names, 90)
    op = "jaxkern::SegmentForward<double>"
    samples = [
        ("tiles", f"SegmentTiles<{op}, jaxkern::Rows::kElements>"),
        ("join", f"SegmentJoin<{op}>"),
        ("tiles", f"SegmentRewrite<{op}, jaxkern::Rows::kElements>"),
        ("walk", f"SegmentWalk<{op}, 1, 4>"),
    ]
    compile_on_other_gpus((f"segment_softmax/{header}.cuh", name) for header, name in samples)


# ---- what kernels are handed


def in_numpy(operands, rows, rules):
    """The softmax, as kernels understand their operands."""
    (x,), order = operands.arrays, operands.order
    axis, k = rules.axis, rules.batch_dims
    x, keys = np.asarray(x), np.asarray(operands.keys).view(np.uint32)
    batch, outer, count = (math.prod(d) for d in (x.shape[:k], x.shape[k:axis], x.shape[axis : axis + 1]))
    flat, y = (a.reshape(batch * outer * count, -1) for a in (x, np.full(x.shape, np.nan)))
    place = np.arange(batch * count)
    row = place + place // count * (outer - 1) * count if order is None else np.asarray(order).astype(int)
    alive = keys[keys < batch * rows]
    assert (np.diff(alive.astype(int)) >= 0).all() and len(keys) == batch * count
    for o in range(outer):
        y[o * count + row[keys >= batch * rows]] = 0
        for key in np.unique(alive):
            at = o * count + row[keys == key]
            e = np.exp(flat[at])
            y[at] = e / e.sum(0)
    return jnp.asarray(y.reshape(x.shape).astype(x.dtype))


def in_order(x, ids, rows, rules):
    params = {"rows": rows, "rules": rules}
    ordered = primitive.ordered_operands(x, ids, None, None, **params)
    return in_numpy(ordered(x, ids, None, None, **params), **params)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("ascending", [False, True])
@pytest.mark.parametrize("index_dtype", ["int8", "int32", "uint32", "uint16"])
@pytest.mark.parametrize(
    "shape, axis, k",
    [((90, 2), 0, 0), ((3, 90), 1, 0), ((3, 90, 2), 1, 1), ((3, 2, 90), 2, 1), ((2, 2, 3, 90, 2), 3, 2)],
)
@pytest.mark.sweep(7)
def test_operands_of_kernels(shape, axis, k, index_dtype, ascending, clip):
    ids = np.random.default_rng(0).integers(-4, 24, (*shape[:k], shape[axis]))
    ids = jnp.asarray((np.sort(ids) if ascending else ids).astype(index_dtype))
    ids = jnp.sort(ids) if ascending else ids  # negative ones are large without a sign
    x = values(shape, "float32")
    rules = Rules(axis, k, clip=clip, sorted=ascending)
    want = jax.jit(functools.partial(reference.softmax, rows=20, rules=rules))(x, ids)
    np.testing.assert_allclose(in_order(x, ids, 20, rules), want, rtol=2e-6)


def test_a_batch_in_parts(monkeypatch):
    monkeypatch.setattr(plan, "MOST_KEYS", 45)  # two of five slices
    x, ids = values((5, 3, 40), "float32"), np.random.default_rng(0).integers(-4, 24, (5, 40))
    rules = Rules(2, 1)
    bound = []

    def bind(prim, x, ids, *, rows, rules):
        bound.append(ids.shape)
        return in_order(x, ids, rows, rules)

    monkeypatch.setattr(primitive, "bind", bind)
    params = {"rows": 20, "rules": rules}
    parts = primitive.in_parts(primitive.segment_softmax_p, x, ids, None, None, **params)
    found = parts(x, jnp.asarray(ids), None, None, **params)
    assert bound == [(2, 40), (2, 40), (1, 40)]
    np.testing.assert_allclose(found, reference.softmax(x, jnp.asarray(ids), rows=20, rules=rules), rtol=2e-6)


# ---- programs


def lowered(f, *operands):
    return jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def spec(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def names(text):
    return [re.search(r"^operation (\w+)", program, re.MULTILINE)[1] for program in launch.programs(text)]


def both(x, ids, **options):
    y, pull = jax.vjp(lambda x: jaxkern.segment_softmax(x, ids, 60, **options), x)
    return y, pull(y)[0]


@needs_runtime
def test_equal_sorts():
    """The sorts of a forward and a backward pass and of a sum over the same ids are the same call, which XLA merges."""

    def f(x, ids):
        return *both(x, ids), jaxkern.segment_sum(x, ids, 60)

    text = lowered(f, spec((5000, 8)), spec((5000,), "int32"))
    found = launch.programs(text)
    assert all(registry.kernels.module.check(program) == "" for program in found)
    assert {"jaxkern_segment_softmax", "jaxkern_segment_softmax_grad", "jaxkern_sort_indices"} <= set(names(text))
    sorts = re.findall(r"custom_call @jaxkern_sort_indices\((%\w+)\) (.*)", text)
    assert len(sorts) >= 2 and len({rest for _, rest in sorts}) == 1
    definitions = {re.search(rf"{operand} = (.*)", text)[1] for operand, _ in sorts}
    assert len(definitions) == 1  # a reshape of the ids
    hinted = names(
        lowered(lambda x, ids: both(x, ids, indices_are_sorted=True), spec((5000, 8)), spec((5000,), "int32"))
    )
    assert hinted == ["jaxkern_segment_softmax", "jaxkern_segment_softmax_grad"]


@needs_runtime
@pytest.mark.parametrize("index_dtype", ["int8", "int32", "uint32"])
def test_ascending_ids(index_dtype):
    """Ids of 32 bits are keys as they are."""
    text = lowered(
        lambda x, ids: jaxkern.segment_softmax(x, ids, 60, indices_are_sorted=True),
        spec((5000, 8), "bfloat16"),
        spec((5000,), index_dtype),
    )
    assert names(text) == ["jaxkern_segment_softmax"]
    assert ("select" in text) == (index_dtype == "int8")


@needs_runtime
def test_batches():
    f = jax.vmap(jax.vmap(lambda x, ids: jaxkern.segment_softmax(x, ids, 60), (0, None)))
    text = lowered(f, spec((3, 2, 5000)), spec((3, 5000), "int32"))
    assert names(text) == ["jaxkern_sort_indices", "jaxkern_segment_softmax"] and "divide" in text
    many = lowered(
        jax.vmap(lambda x, ids: jaxkern.segment_softmax(x, ids, 2**30)), spec((5, 300)), spec((5, 300), "int32")
    )
    assert names(many).count("jaxkern_segment_softmax") == 5


@needs_runtime
def test_what_has_no_kernel_runs_the_reference():
    x = spec((40, 3))
    for data, rows in ((spec((40, 3), "float8_e4m3fn"), 5), (spec((0, 3)), 5), (x, 0), (x, 2**31 - 2)):
        f = functools.partial(jaxkern.segment_softmax, num_segments=rows)
        text = lowered(f, data, spec(data.shape[:1], "int32"))
        assert "jaxkern_segment_softmax" not in names(text)


@needs_runtime
def test_a_forced_algorithm_that_does_not_fit():
    with algorithms.force(segment_softmax="sorted"), pytest.raises(ValueError, match="jaxkern.segment_softmax.*sorted"):
        lowered(lambda x, ids: jaxkern.segment_softmax(x, ids, 60), spec((5000, 8)), spec((5000,), "int32"))
    with algorithms.force(segment_softmax="sort"):
        text = lowered(
            lambda x, ids: jaxkern.segment_softmax(x, ids, 60, indices_are_sorted=True),
            spec((5000, 8)),
            spec((5000,), "int32"),
        )
    assert names(text) == ["jaxkern_sort_indices", "jaxkern_segment_softmax"]


@needs_runtime
def test_the_same_text_in_every_process():
    code = (
        "import jax, test_segment_softmax_plan as t\n"
        "print('\\n'.join(t.launch.programs(t.lowered(t.both, t.spec((5000, 8)), t.spec((5000,), 'int32')))))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])},
    ).stdout
    here = "\n".join(launch.programs(lowered(both, spec((5000, 8)), spec((5000,), "int32"))))
    assert other.strip() == here.strip()
