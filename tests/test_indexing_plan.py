"""Launch lists of index_add and the segment operations: coverage, limits, layouts, kernels, programs. Needs no GPU."""

import itertools
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from indexed import FLOATS, INTEGERS
from plans import DEVICES, compile_kernels, compile_on_other_gpus, layout, needs_nvrtc, needs_runtime, of_each_kind

import jaxkern
from jaxkern import algorithms
from jaxkern._core import compat, launch, params, registry, runtime
from jaxkern._ops.indexing import plan, sort
from jaxkern._ops.indexing.primitive import Rules
from jaxkern._ops.indexing.problem import REDUCTIONS

# Bytes of static shared memory that a kernel has at most, besides what its launch asks for.
STATIC = {"SmallUpdates": 128, "SmallSums": 0, "BinWindows": 49152, "BinParts": 8192, "ReduceFixup": 8192}

# batch, outer, rows, count, inner: around the edges of each algorithm.
SIZES = [
    (1, 1, 1, 1, 1),
    (1, 1, 1, 5000, 1000),
    (1, 1, 31, 1024, 128),
    (1, 1, 31, 20_000, 1),
    (1, 1, 31, 70_001, 33),
    (1, 1, 1000, 5000, 7),
    (1, 1, 1000, 33, 1000),
    (1, 1, 1000, 70_001, 8),
    (1, 1, 70_000, 5000, 15),
    (1, 1, 70_000, 300_001, 1),
    (1, 1, 2000, 70_001, 1),
    (1, 1, 169_343, 1_166_243, 128),
    (1, 1, 1 << 20, 64 << 20, 1),
    (1, 1, 4000, 70_000, 1091),
    (1, 1, 128_256, 16_384, 4096),
    (3, 1, 900, 5000, 16),
    (3, 2, 900, 5000, 16),
    (2, 5, 40, 9000, 3),
    (1, 6, 700, 3000, 4),
    (70, 1, 9000, 9001, 1),
    (5, 1, 2**30, 5000, 2),
    (1, 1, 2**31 + 5, 3000, 4),
    (1, 1, 7, 2**30 + 9, 2),
]


def problem(size, op="index_add", dtype="float32", **options):
    batch, outer, rows, count, inner = size
    types = jnp.dtype(dtype), np.dtype(options.pop("index_dtype", "int32"))
    return plan.Problem(rows, count, inner, *types, op, batch, outer, **options)


def hinted(algorithm):
    return dict(sorted=algorithm == "sorted", unique=algorithm == "unique", deterministic=algorithm != "atomic")


def every_problem(dtypes=("float32", "bfloat16", "float64")):
    for algorithm, size, op, dtype in itertools.product(plan.ALGORITHMS, SIZES, REDUCTIONS, dtypes):
        for options in ({}, dict(source_batched=False)) if size[0] > 1 else ({},):
            p = problem(size, op, dtype, wrap=op == "index_add", **hinted(algorithm), **options)
            if plan.fits(algorithm, p):
                yield algorithm, p


def buffers_of(p, ordered=False):
    return plan.Buffers(
        launch.operand(1),
        launch.operand(0),
        launch.null,
        launch.result(0),
        *((launch.operand(2), launch.operand(3)) if ordered else ()),
    )


def planned(algorithm, p, buffers, aligned=True):
    """`plan.launches` as a plan, as which the golden launch lists record it."""
    return launch.Plan(algorithm, *plan.launches(algorithm, p, buffers, aligned))


def buffers(value):
    if isinstance(value, launch.Struct):
        return [b for member in value.members for b in buffers(member)]
    return [value] if isinstance(value, launch.Buffer) else []


# ---- which algorithm


def test_every_problem_has_an_algorithm():
    for on, dtype, op, size in itertools.product(DEVICES, FLOATS + INTEGERS, REDUCTIONS, SIZES):
        for is_sorted, is_unique, deterministic in itertools.product((False, True), repeat=3):
            p = problem(size, op, dtype, sorted=is_sorted, unique=is_unique, deterministic=deterministic)
            assert plan.fits(plan.choose(p, on), p, on)
    for name in ("unique", "sorted", "atomic"):  # without their hint they would be wrong
        assert not plan.fits(name, problem(SIZES[0]))


def test_choices_that_were_measured():
    chosen = lambda *size, **options: plan.choose(problem(size, **options))
    assert chosen(1, 1, 128_256, 16_384, 4096) == chosen(1, 1, 169_343, 1_166_243, 128) == "sort"
    assert chosen(1, 1, 169_343, 1_166_243, 128, sorted=True) == "sorted"
    assert chosen(1, 1, 1 << 20, 64 << 20, 1) == chosen(1, 1, 1024, 100_000, 1) == "narrow"
    assert chosen(1, 1, 100_000, 15, 64) == chosen(1, 1, 100_000, 1024, 64) == "small"
    assert chosen(1, 1, 100_000, 5000, 64, unique=True) == "unique"
    assert chosen(1, 1, 100_000, 5000, 64, deterministic=False) == "atomic"
    assert chosen(1, 1, 100_000, 500_000, 64, deterministic=False) == "sort"


@pytest.mark.parametrize("name", [a for a in plan.ALGORITHMS if a in ("unique", "sorted", "atomic", "narrow")])
def test_a_plan_that_does_not_fit_is_an_error(name):
    x, ids = jax.ShapeDtypeStruct((5000, 3), "float32"), jax.ShapeDtypeStruct((5000,), "int32")
    with algorithms.force(segment_sum=name), pytest.raises(ValueError, match=f"segment_sum.*'{name}' cannot run"):
        jax.jit(lambda x, i: jaxkern.segment_sum(x, i, 9)).trace(x, ids).lower(lowering_platforms=("cuda",))


# ---- what is launched


def test_runs_cover_a_call():
    for size in SIZES:
        batch, outer, rows, count, _ = size
        found = plan.parts(problem(size))
        assert sum(p.batch * p.rows * p.count for p in found) == batch * rows * count
        for p in found:
            assert p.batch * p.rows <= plan.MAX_KEYS - 2 and p.batch * p.count <= plan.MAX_POSITIONS
            assert p.b + p.batch <= batch and p.row + p.rows <= rows and p.position + p.count <= count
            assert len(found) == 1 or p.batch == 1 or p.batch * p.count * outer <= plan.MAX_POSITIONS


def test_few_updates_of_many_short_rows_find_them_filled():
    """A separate kernel fills the rows, whatever algorithm sums them and reads them back."""
    of = lambda **changes: plan.Problem(1 << 22, 1000, op="segment_sum")._replace(**changes)
    few = (of(), of(batch=4096, rows=50257, count=1), of(op="segment_max", count=1 << 19), of(rows=2**31 - 2))
    others = (of(op="index_add"), of(rows=4096), of(count=1 << 20), of(inner=8))
    for p, fills in (*((p, True) for p in few), *((p, False) for p in others)):
        algorithm = plan.choose(p)
        steps = planned(algorithm, p, buffers_of(p)).launches
        assert [step.header == "indexing/fill.cuh" for step in steps].count(True) == fills
        assert steps[0].header == "indexing/fill.cuh" or not fills


def test_limits_and_bounds():
    """Threads, shared memory and grids are within every device's limits, buffers within what they have."""
    shared = min(d.shared_memory for d in DEVICES)
    for algorithm, p in every_problem():
        ordered = algorithm == "sort" and len(plan.parts(p)) == 1
        bytes_of = {
            ("operand", 0): (p.batch if p.source_batched else 1) * p.outer * p.count * p.row_bytes,
            ("operand", 1): 4 * p.batch * p.count,
            ("operand", 2): 4 * p.batch * p.count,
            ("operand", 3): 4 * p.batch * p.count,
            ("result", 0): p.batch * p.outer * p.rows * p.row_bytes,
        }
        for aligned, given in itertools.product((True, False), {False, ordered}):
            found = planned(algorithm, p, buffers_of(p, given), aligned)
            steps, scratch = found.launches, found.scratch
            assert scratch <= 64 * p.positions * max(1, p.outer) + 64 * p.positions * p.outer * p.inner // 16 + (
                1 << 22
            )
            for step in steps:
                (x, y, z), threads = step.grid3(), step.block3()[0]
                assert 0 < x < 2**31 and 0 < y < 65536 and z == 1 and 0 < threads <= 1024 and threads % 32 == 0
                assert step.shared + STATIC.get(step.name.split("<")[0], 4096) <= shared
                for b in (b for arg in step.args for b in buffers(arg)):
                    assert 0 <= b.offset < (scratch if b.kind == "scratch" else bytes_of[b.kind, b.index])
                if not aligned:  # vectors of one element, and keys one by one
                    assert not re.match(
                        r"(DirectUpdates|SmallUpdates)<[^,]+, [^,]+, [248]|SmallSums<\w+, [248]", step.name
                    )
                    assert not step.name.startswith("ReduceChunks") or step.name.endswith("1, 4, 8, false>")


def test_scratch_is_index_bytes_and_never_the_source():
    for rows, count, inner in ((128_256, 16_384, 4096), (169_343, 1_166_243, 128), (1 << 20, 64 << 20, 1)):
        p = problem((1, 1, rows, count, inner))
        algorithm = plan.choose(p)
        assert 0 <= planned(algorithm, p, buffers_of(p)).scratch <= max(64 * count, count * inner)


def test_parts_of_scratch_do_not_overlap():
    """No two buffers that a launch writes, or reads and writes, begin at the same byte of scratch."""
    for algorithm, p in every_problem(("float32",)):
        for step in planned(algorithm, p, buffers_of(p)).launches:
            used = [b.offset for b in buffers(step.args[0]) if b.kind == "scratch"]
            assert len(set(used)) == len(used) or step.name.startswith("Radix")


def test_structs_are_laid_out_as_in_cpp():
    folder = runtime.kernels_folder() / "indexing"
    sizes = dict(
        re.findall(
            r"static_assert\(sizeof\((\w+)\) == (\d+)\)",
            "".join(pathlib.Path(p).read_text() for p in folder.glob("*.cuh")),
        )
    )
    names = {
        "RadixCount": ("Indices", "RadixPass"),
        "RadixScatter": ("Indices", "RadixPass"),
        "SourceRows": ("Indices",),
        "ReduceChunks": ("IndexRun", "ReduceShape"),
        "Describe": ("IndexRun",),
        "ReduceFixup": ("IndexRun", "ReduceShape", "FixupShape"),
        "ReduceGroups": ("IndexRun", "ReduceShape"),
        "ReduceNarrow": ("IndexRun", "ReduceShape", "NarrowTile"),
        "ReduceTiles": ("IndexRun", "ReduceShape", "TileShape"),
        "DirectUpdates": ("IndexRun", "DirectShape"),
        "SmallUpdates": ("IndexRun", "SmallShape"),
        "SmallSums": ("SmallSum",),
        "BinSlices": ("IndexRun", "BinShape"),
        "BinParts": ("IndexRun", "BinShape"),
        "BinWindows": ("IndexRun",),
        "BinSorted": ("IndexRun", "BinShape"),
        "BinSpans": ("IndexRun", "BinShape"),
    }
    seen = set()
    for algorithm, p in every_problem():
        for step in planned(algorithm, p, buffers_of(p)).launches:
            kernel = step.name.split("<")[0]
            seen.add(kernel)
            for name, arg in zip(names.get(kernel, ()), step.args):
                assert layout(arg)[0] == int(sizes[name]), (kernel, name)
    assert seen >= set(names)


def test_members_are_given_by_name():
    shape = params.Params("indexing/direct.cuh", "DirectShape")
    given = dict(vectors=4, threads=400, by_vectors=4, by_positions=100)
    assert shape(**given).members[:2] == (launch.i64(4), launch.i64(400))
    for wrong, match in (
        (dict(positions=1), "unknown members: positions"),
        (dict(vectors=launch.operand(0)), "int"),
        (dict(vectors=2**63), "does not fit"),
    ):
        with pytest.raises((TypeError, OverflowError), match=match):
            shape(**given | wrong)
    with pytest.raises(TypeError, match="pointer"):
        sort.INDICES(**dict.fromkeys(sort.INDICES.members, 1))
    with pytest.raises(ValueError, match="no struct Other"):
        params.Params("indexing/direct.cuh", "Other")()


def test_shared_memory_of_the_scatter():
    text = (runtime.kernels_folder() / sort.HEADER).read_text()
    found = re.findall(r"sizeof\(ScatterShared<512, (\d+)>\) == (\d+)\)", text)
    assert {512 * int(items): int(size) for items, size in found} == sort.SCATTER_SHARED


# ---- kernels and programs


def kernels(problems):
    return {
        (s.header, s.name)
        for algorithm, p in problems
        for aligned in (True, False)
        for s in planned(algorithm, p, buffers_of(p), aligned).launches
    }


SAMPLE = [s for s in SIZES if s[3] < 1 << 20 and s[2] < 1 << 20]


@needs_nvrtc
def test_kernels_compile():
    """Kernels that differ only in their type compile for one of the two, in turns."""
    problems = [
        (a, problem(s, op, dtype, **hinted(a)))
        for a in plan.ALGORITHMS
        for s in SAMPLE
        for op in ("segment_sum", "index_add")
        for dtype in ("float32", "bfloat16")
    ]
    compile_kernels(of_each_kind(kernels((a, p) for a, p in problems if plan.fits(a, p))), 90)


@needs_nvrtc
def test_a_sample_of_every_template_compiles():
    found = {
        name.split("<")[0]: (header, name)
        for header, name in sorted(
            kernels(
                (a, problem(s, "segment_max" if a != "atomic" else "index_add", "float32", **hinted(a)))
                for a in plan.ALGORITHMS
                for s in SAMPLE
                if plan.fits(a, problem(s, **hinted(a)))
            )
        )
    }
    assert len(found) >= 14
    compile_on_other_gpus(found.values())


@needs_nvrtc
@pytest.mark.parametrize(
    "dtype, op",
    [
        ("float64", "segment_min"),
        ("int32", "segment_max"),
        ("int64", "segment_sum"),
        ("uint32", "index_add"),
        ("float16", "segment_min"),
        ("bfloat16", "segment_prod"),
        ("int64", "segment_prod"),
    ],
)
def test_other_types_compile(dtype, op):
    some = [s for s in SAMPLE if s in ((1, 1, 31, 70_001, 33), (1, 1, 31, 1024, 128), (1, 1, 1000, 5000, 7))]
    found = kernels((a, problem(s, op, dtype, **hinted(a))) for a in ("sort", "small", "sorted") for s in some)
    depend_on_type = [k for k in sorted(found) if "Reduction::" in k[1]]
    compile_kernels(depend_on_type[::2], 90)


def lowered(f, *shapes):
    return jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


DATA, IDS = jax.ShapeDtypeStruct((5000, 12), "bfloat16"), jax.ShapeDtypeStruct((5000,), "int32")


@needs_runtime
def test_programs():
    """Calls by the names of the operations, with launch lists that the runtime reads."""
    names = lambda text: [re.search(r"operation (\w+)", p)[1] for p in launch.programs(text)]
    text = lowered(lambda d, i: jaxkern.segment_sum(d, i, 900), DATA, IDS)
    assert names(text) == ["jaxkern_sort_indices", "jaxkern_segment_sum"]
    for algorithm in plan.ALGORITHMS:
        hints = hinted(algorithm)
        f = lambda d, i, hints=hints, algorithm=algorithm: jaxkern.index_add(
            jnp.zeros((900, 1 if algorithm == "narrow" else 12), d.dtype),
            0,
            i[:1000],
            d[:1000, :1] if algorithm == "narrow" else d[:1000],
            indices_are_sorted=hints["sorted"],
            unique_indices=hints["unique"],
            deterministic=hints["deterministic"],
        )
        data = jax.ShapeDtypeStruct(DATA.shape, "float32")
        with algorithms.force(index_add=algorithm):
            text = lowered(f, data, IDS)
        assert names(text)[-1] == "jaxkern_index_add"
        for program in launch.programs(text):
            assert registry.kernels.module.check(program) == ""


@needs_runtime
def test_the_program_is_the_same_in_every_process():
    code = (
        "import test_indexing_plan as t, jaxkern\n"
        "print(t.lowered(lambda d, i: jaxkern.segment_sum(d, i, 900), t.DATA, t.IDS))"
    )
    here = lowered(lambda d, i: jaxkern.segment_sum(d, i, 900), DATA, IDS)
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=pathlib.Path(__file__).parent
    ).stdout
    assert launch.programs(there) == launch.programs(here) != []


@needs_runtime
def test_what_kernels_do_not_run_lowers_to_the_reference():
    for shape, dtype in (((0, 3), "float32"), ((5, 3), "int8"), ((5, 0), "float32"), ((5, 3), "complex64")):
        data, ids = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:1], "int32")
        assert "@jaxkern" not in lowered(lambda d, i: jaxkern.segment_sum(d, i, 9), data, ids)


def test_a_problem_is_what_operands_say():
    of = lambda shape, dtype="float32": jax.core.ShapedArray(shape, jnp.dtype(dtype))
    with compat.enable_x64():
        p = plan.problem_of("index_add", (2, 3, 9, 4), of((2, 3, 5, 4)), of((2, 5), "uint8"), Rules(2, 1, wrap=True))
        shared = plan.problem_of("segment_sum", (2, 9, 4), of((1, 5, 4)), of((2, 5), "int64"), Rules(1, 1))
    assert p == problem((2, 3, 9, 5, 4), wrap=True, index_dtype="uint8")
    assert shared == problem((2, 1, 9, 5, 4), "segment_sum", source_batched=False, index_dtype="int64")
    assert plan.problem_of("segment_sum", (9,), of((5,), "int8"), of((5,), "int32"), Rules(0)) is None


ADD = lambda x, i, s: jaxkern.index_add(x, 0, i, s)  # noqa: E731


@pytest.mark.parametrize(
    "f, options, copies",
    [
        (ADD, {}, True),
        (ADD, {"donate_argnums": 0}, False),
        (lambda x, i, s: ADD(jnp.sin(x), i, s), {}, False),
        (lambda x, i, s: jax.jit(ADD)(x.reshape(500, 2, 32), i, s.reshape(-1, 2, 32)), {}, True),
        (lambda x, i, s: jax.jit(ADD)(x, i, s), {"donate_argnums": 0}, False),
        (lambda x, i, s: jax.lax.fori_loop(0, 3, lambda k, x: ADD(x, i, s), x), {}, False),
        (lambda x, i, s: x.at[i].add(s), {}, True),
        (lambda x, i, s: ADD(np.arange(500 * 64.0, dtype=np.float32).reshape(500, 64), i, s), {}, True),
    ],
    ids=["kept", "donated", "result", "function", "donated to a function", "loop", "scatter", "constant"],
)
def test_rows_that_are_kept_are_copied_as_they_are_added_to(f, options, copies):
    """The result has memory of its own; where x is not needed afterwards, it takes the memory of x."""
    types = [
        jax.ShapeDtypeStruct(s, d) for s, d in (((500, 64), "float32"), ((2000,), "int32"), ((2000, 64), "float32"))
    ]
    with jaxkern.accelerate(force=True):
        text = jax.jit(f, **options).trace(*types).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if "@jaxkern_index_add(" in line)
    assert ("output_operand_alias" in call) != copies


def test_a_copy_comes_first_where_no_kernel_copies_rows():
    """Each algorithm of an index_add that has memory of its own."""
    for size, algorithm in (
        ((1, 1, 5000, 9000, 64), "sort"),
        ((1, 1, 5000, 9000, 7), "sort"),
        ((1, 1, 99, 9, 64), "small"),
    ):
        p = problem(size, deterministic=True)
        steps, _ = plan.launches(algorithm, p, buffers_of(p)._replace(x=launch.operand(2)))
        assert (steps[0].header == "indexing/copy.cuh") == (size[4] == 7 or algorithm == "small")
        assert all(step.header != "indexing/copy.cuh" for step in steps[1:])
    # Of several runs, the first with a part of the rows copies it, and the next ones add to what that one has written.
    for size, copy in (((1, 1, 7, 2**30 + 9, 64), [True, False]), ((1, 1, 2**31 + 5, 3000, 64), [True, True])):
        p = problem(size)
        steps, _ = plan.launches("sort", p, buffers_of(p)._replace(x=launch.operand(2)))
        runs = [step.args[0] for step in steps if step.name.startswith("ReduceChunks")]
        assert [launch.operand(2) in [b._replace(offset=0) for b in buffers(run)] for run in runs] == copy
