"""Reductions as row functions: what their kernels compute (run on the CPU), and the programs that hold them. Needs no GPU."""

import functools
import subprocess
import sys

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plans import check_limits, needs_nvrtc, needs_runtime
from problems import normal, random_mask
from reductions import expected
from reference import assert_rounded

import jaxkern
from jaxkern._core import device, launch, registry
from jaxkern._core.launch import Plan
from jaxkern._definitions import reductions
from jaxkern._definitions.traced import row_function
from jaxkern._engines.rows import plan
from jaxkern._ops.logsumexp import by_hand

# So few multiprocessors that rows are cut, and clusters are many.
SMALL = device.Device(4, 90, 227 * 1024, 4 << 10)
LONG = {"warp": (5, 1003), "block": (3, 4097), "streaming": (2, 60001), "split": (2, 60001), "strided": (2, 8191, 6)}


def planned(operation, x, mask=None, algorithm="auto", on=device.H200):
    """(the plan, the types of its results)"""
    operands = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, *([] if mask is None else [mask]))]
    dtypes = (x.dtype, *["float32"] * 2) if operation == "logsumexp_statistics" else x.dtype
    static = {"row": 1 - x.ndim, "axis": 1, "dtype": dtypes}
    function = row_function(
        operation.removesuffix("_statistics"), reductions.IN_KERNELS[operation], operands, algorithm, **static
    )
    results = plan.outputs(function)
    found = plan.plan(on, operands, [jax.ShapeDtypeStruct(*r) for r in results], function=function, alone=True)
    return found, results


def run(operation, x, mask, algorithm):
    found, results = planned(operation, x, mask, algorithm, SMALL)
    assert found.algorithm == algorithm
    emulated.prepare(found)
    args = [np.asarray(a) for a in (x, mask) if a is not None]
    return [emulated.run(found, args, results, unaligned)[0] for unaligned in (False, True)]


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@needs_runtime
@pytest.mark.parametrize(
    "operation, algorithm, shape, dtype, masked",
    [
        ("reduce_sum", "lanes", (9, 100), "float32", True),
        ("reduce_mean", "warp", (9, 1003), "bfloat16", True),
        ("reduce_max", "split", (2, 9001), "float16", False),
        ("reduce_min", "strided", (3, 20, 140), "float32", True),
        ("logsumexp", "strided", (2, 31, 300), "float32", False),
        ("logsumexp", "block", (5, 700), "float32", True),
        ("logsumexp", "lanes", (5, 100), "bfloat16", True),
        ("reduce_max", "split", (2, 50, 6), "bfloat16", (1, 50, 1)),
    ],
)
def test_kernels_on_the_cpu(operation, algorithm, shape, dtype, masked):
    """masked: no mask, one of every element, or the shape of a mask."""
    x, mask = normal(shape, dtype), random_mask(shape if masked is True else masked) if masked else None
    for y in run(operation, x, mask, algorithm):
        assert_rounded(y, *expected(operation, x, 1, mask), x.dtype)


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@needs_runtime
@pytest.mark.parametrize("algorithm", LONG)
def test_long_sums_are_rounded_once(algorithm):
    """Threads add up float32 in float64: thousands of equal numbers, whose errors in float32 would have one sign."""
    shape = LONG[algorithm]
    x = np.full(shape, 0.1, np.float32)
    for operation, divisor in (("reduce_sum", 1), ("reduce_mean", shape[1])):
        exact = shape[1] * np.float64(x[0, 0].flat[0]) / divisor
        for y in run(operation, x, None, algorithm):  # threads of strided kernels add up 16 numbers in float32
            np.testing.assert_allclose(y.astype(np.float64), exact, rtol=2e-7 if algorithm == "strided" else 6e-8)


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@needs_runtime
@pytest.mark.parametrize("width, dtype", [(8, "float16"), (264, "bfloat16"), (512, "float16")])
def test_masked_logsumexp_by_hand(width, dtype):
    """Rows that do not fill the last warps, a mask that lacks a dimension, empty rows, infinities and NaN."""
    x, mask = np.array(normal((5, 7, width), dtype), np.float32), np.array(random_mask((5, 1, width), 0.5))
    mask[:, :, 0] = True
    x[0, 0, 1], x[1, 1], x[2, 2, 0], x[3, 3, 1:], mask[4] = np.inf, -np.inf, np.nan, -600, False
    x = jnp.asarray(x, dtype)
    operands = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, mask)]
    outputs = [(x.shape[:2], x.dtype), *[(x.shape[:2], np.dtype(np.float32))] * 2]
    types = [jax.ShapeDtypeStruct(*of) for of in outputs]
    found = Plan("", by_hand.launches(SMALL, operands, types, axis=2, algorithm="by_hand"))
    emulated.prepare(found)
    y, largest, total = emulated.run(found, [np.asarray(x), mask], outputs, False)
    assert_rounded(y, *expected("logsumexp", x, 2, mask), x.dtype)
    kept = np.where(mask, np.asarray(x, np.float64), -np.inf)
    most = kept.max(-1)
    np.testing.assert_array_equal(largest, most)
    exact = np.where(np.isfinite(most), np.exp(kept - np.where(np.isfinite(most), most, 0)[..., None]).sum(-1), most)
    np.testing.assert_allclose(total, np.where(most == -np.inf, 0, exact), 1e-4)


@needs_nvrtc
@pytest.mark.parametrize(
    "operation, shape, dtype, masked, capability",
    [
        ("logsumexp", (16384, 4096), "float32", False, 90),
        ("reduce_mean", (49152, 1003), "bfloat16", True, 80),
        ("logsumexp_statistics", (20, 20, 512), "float32", True, 100),
        ("reduce_max", (1, 40001, 3), "bfloat16", (1, 40001, 1), 90),  # one mask for all rows
    ],
)
def test_kernels_compile(operation, shape, dtype, masked, capability):
    x, mask = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape if masked is True else masked or (), bool)
    found, _ = planned(operation, x, mask if masked else None)
    check_limits(found, device.H200)
    for step in found.launches:
        assert registry.kernels.module.compile(step.header, step.name, capability, step.source)


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
    assert one.count("@jaxkern_logsumexp(") == 1
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
    assert registry.kernels.module.check(program) == ""


@needs_runtime
def test_masks_of_many_groups_are_broadcast():
    mask = jnp.ones((2, 1) * 5 + (1,), bool)
    text = lowered(lambda x: jaxkern.reduce_sum(x, -1, where=mask), (2,) * 11, "float32")
    assert "@jaxkern_reduce_sum(" in text and "tensor<2x2x2x2x2x2x2x2x2x2x2xi1>" in text


@needs_runtime
def test_without_a_kernel():
    """Empty arrays, other dtypes and rows of one element lower to XLA's own operations."""
    for shape, dtype in (((0, 3), "float32"), ((5, 3), "float8_e5m2"), ((5, 1), "float32")):
        assert "@jaxkern_" not in lowered(lambda x: jaxkern.reduce_sum(x, -1), shape, dtype)
