"""Reductions on CUDA: their plans, the kernels that they name, and the programs that hold them. Needs no GPU."""

import functools
import itertools
import math
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plans import (
    DEVICES,
    check_limits,
    compile_kernels,
    compile_on_other_gpus,
    kernels,
    layout,
    needs_nvrtc,
    needs_runtime,
    of_each_kind,
)

import jaxkern
from jaxkern._core import compat, device, launch, registry
from jaxkern._ops.reduction import plan

FLOATS, INTEGERS = ("float16", "bfloat16", "float32", "float64"), ("int8", "uint16", "int32", "uint64")
SHAPES = [  # and axis
    ((49152, 32), 1),
    ((49152, 100), 1),
    ((7, 3), 1),
    ((49152, 512), 1),
    ((49152, 1024), 1),
    ((8192, 1003), 1),
    ((16384, 4096), 1),
    ((16, 8192), 1),
    ((3, 50257), 1),
    ((64, 1 << 20), 1),
    ((1, 1 << 26), 1),
    ((5, 600_001), 1),
    ((20, 400, 6000), 0),
    ((1 << 20, 64), 0),
    ((3, 40001, 2), 1),
    ((64, 300, 256), 1),
    ((1, 1), 1),
    ((1, 9), 0),
]
OPS = ("sum", "mean", "max", "min", "logsumexp")


def make(op, shape, axis, dtype="float32", mask=None, on=device.H200, algorithm="auto", statistics=False, out=None):
    with compat.enable_x64():
        of = lambda shape, dtype: jax.core.ShapedArray(shape, jnp.dtype(dtype))
        reduced = shape[:axis] + shape[axis + 1 :]
        integer_sum = "int" in dtype and op == "sum"
        out = out or ("int64" if integer_sum else dtype)
        operands = [of(shape, dtype)] + ([of(mask, bool)] if mask else [])
        wide = "float64" if dtype == "float64" else "float32"
        results = [of(reduced, out)] + ([of(reduced, wide)] * 2 if statistics else [])
        return plan.reduce(op, on, operands, results, axis=axis, dtype=None, algorithm=algorithm)


def problem(shape, axis, dtype, masked=False):
    return plan.Problem(math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]), dtype, masked)


def ops_of(dtype):
    return OPS if "float" in dtype else ("sum", "max", "min")


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_every_problem_has_a_plan(dtype, on):
    for (shape, axis), masked in itertools.product(SHAPES, (False, True)):
        p = problem(shape, axis, dtype, masked)
        assert plan.fits(plan.choose(p, on), p, on)
        for algorithm in plan.ALGORITHMS:
            if not plan.fits(algorithm, p, on):
                with pytest.raises(ValueError, match=f"jaxkern.reduce_sum: the algorithm '{algorithm}'"):
                    make("sum", shape, axis, dtype, shape if masked else None, on, algorithm)
                continue
            for op in ops_of(dtype):
                found = make(op, shape, axis, dtype, shape if masked else None, on, algorithm)
                assert found.algorithm == algorithm
                check_limits(found, on)
                check_coverage(found, p)


def check_coverage(found, p):
    """The parts cover each row once, and the partial results fill the scratch."""
    for steps in (found.launches, found.unaligned):
        rows, _, inner, parts, each = (m.value for m in steps[0].args[0].members[4:9])
        assert (rows, inner) == (p.rows, p.inner) and parts * each >= p.width
        assert len(steps) == 1 + (parts > 1) and (parts > 1) == bool(found.scratch)
        assert found.scratch in (0, rows * inner * parts * 16)
        if parts > 1:
            assert steps[0].grid3()[1] == parts and "ReduceMerge" in steps[1].name


def test_the_algorithms_of_the_benchmarks():
    def chosen(shape, axis, dtype="float32", **options):
        found = make("sum", shape, axis, dtype, **options)
        return found.algorithm, found.launches[0].grid3()[:2], found.launches[0].block3()[0]

    assert chosen((49152, 32), 1) == ("sub_warp", (768, 1), 128)
    assert chosen((49152, 1024), 1, "bfloat16") == ("warp", (6144, 1), 128)
    assert chosen((49152, 1003), 1, "bfloat16") == ("warp", (3072, 1), 128)
    assert chosen((16384, 4096), 1, "bfloat16") == ("block", (16384, 1), 64)
    assert chosen((8192, 32768), 1) == ("block", (8192, 1), 256)
    assert chosen((1, 1 << 26), 1) == ("split", (1, 1056), 128)
    assert chosen((20, 400, 6000), 0, "bfloat16") == ("column", (2344, 1), 128)
    assert chosen((1 << 20, 64), 0, "float32")[:2] == ("column", (1, 528))


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + ("bool",))
def test_neutral_elements(dtype):
    """The neutral element as it is in memory, before it is flipped."""
    kind = np.dtype("uint8") if dtype == "bool" else jnp.dtype(dtype)
    of = lambda op: np.full(1, plan._flip_and_neutral(op, problem((8, 8), 1, dtype))[1], np.uint64).view(kind)
    if "float" in dtype:
        lowest, highest = -np.inf, np.inf
    else:
        lowest, highest = (np.iinfo(kind).min, np.iinfo(kind).max)
    assert (of("sum") == 0).all() and (of("mean") == 0).all()
    assert (of("max") == lowest).all() and (of("min") == highest).all()
    if "float" in dtype:
        assert (of("logsumexp") == -np.inf).all()


def test_struct_sizes():
    """ReduceParams; the header asserts the same."""
    for mask in (None, (1024, 1)):
        assert layout(make("sum", (1024, 1024), 1, mask=mask).launches[0].args[0])[0] == 296


def test_no_plan():
    assert make("sum", (8, 8, 8, 8, 8, 8, 8, 8, 8, 8), 9, mask=(8, 1) * 5) is None  # a mask with too many groups
    assert make("sum", (8, 8), 1, "float32", out="float64") is None
    assert make("max", (2**33, 3, 1), 1, "int8", algorithm="column") is None  # a grid with too many blocks


@needs_nvrtc
def test_kernels_compile():
    names = set()
    for dtype in ("bfloat16", "float32"):
        for (shape, axis), op in itertools.product(SHAPES, ("mean", "logsumexp")):
            names |= kernels(make(op, shape, axis, dtype), unaligned=False)
    for shape, axis in (((4096, 512), 1), ((4096, 1003), 1), ((49152, 40), 1), ((8, 100_000), 1), ((64, 300, 256), 1)):
        for dtype, op in (("float16", "max"), ("float64", "logsumexp"), ("int8", "sum"), ("uint64", "min")):
            names |= kernels(make(op, shape, axis, dtype), unaligned=True)
            names |= kernels(make(op, shape, axis, dtype, shape), unaligned=False)
    assert len(names) > 50
    compile_kernels(of_each_kind(names), 90)
    templates = {name.split("<")[0]: (header, name) for header, name in sorted(names)}
    assert set(templates) == {"ReduceNarrow", "ReduceWhole", "ReduceRows", "ReduceColumns", "ReduceMerge"}
    compile_on_other_gpus(templates.values())


LOWERED = """
import jax, jaxkern
traced = jax.jit(lambda x: jaxkern.logsumexp(x, -1)).trace(jax.ShapeDtypeStruct((4, 100_000), "float32"))
print(traced.lower(lowering_platforms=("cuda",)).as_text())
"""


@needs_runtime
def test_programs():
    """One call per reduction, with a launch list that the runtime reads, and the same text in every process."""
    text = functools.partial(lowered, lambda x: jaxkern.logsumexp(x, -1))
    one = text((4, 100_000), "float32")
    assert one.count("@jaxkern_logsumexp(") == 1 and "LogSumExp_<float>" in one
    for program in (*launch.programs(one), *launch.programs(text((64, 3), "float16"))):
        assert registry.kernels.module.check(program) == ""
    other = subprocess.run([sys.executable, "-c", LOWERED], capture_output=True, text=True, check=True).stdout
    assert other.strip() == one.strip()


def lowered(f, *args):
    x = jax.ShapeDtypeStruct(*args[:2])
    return jax.jit(f).trace(x, *args[2:]).lower(lowering_platforms=("cuda",)).as_text()


@needs_runtime
@pytest.mark.parametrize("dtype", ["int8", "bool", "uint32"])
def test_programs_of_integers(dtype):
    (program,) = launch.programs(lowered(lambda x: jaxkern.reduce_sum(x, -1), (64, 300), dtype))
    assert re.search(r"Sum_<u?int(8|32)_t, false, false>", program) and registry.kernels.module.check(program) == ""


@needs_runtime
def test_masks_of_many_groups_are_broadcast():
    mask = jnp.ones((2, 1) * 5 + (1,), bool)
    text = lowered(lambda x: jaxkern.reduce_sum(x, -1, where=mask), (2,) * 11, "float32")
    assert "@jaxkern_reduce_sum(" in text and "tensor<2x2x2x2x2x2x2x2x2x2x2xi1>" in text


@needs_runtime
def test_without_a_kernel():
    """Empty arrays, symbolic sizes and other dtypes lower to XLA's own operations."""
    for shape, dtype in (((0, 3), "float32"), ((5, 3), "float8_e5m2")):
        assert "@jaxkern_" not in lowered(jaxkern.reduce_sum, shape, dtype)
