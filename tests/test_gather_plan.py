"""index_select on CUDA: its plans, the kernels that they name, and the programs that hold them. Needs no GPU."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from indexed import FLOATS, INDEX_DTYPES, INTEGERS

import jaxkern
from jaxkern._core import compat, device, launch, registry
from jaxkern._ops.indexing import gather_plan, tuning
from jaxkern._ops.indexing.primitive import Rules

needs_nvrtc = pytest.mark.skipif(
    registry.kernels.module is None or bool(registry.kernels.module.compiler()[1]),
    reason=registry.kernels.reason or "NVRTC cannot be used",
)
PROBLEMS = [  # shape of x, axis, batch dimensions, count
    ((5,), 0, 0, 9),
    ((100, 3), 0, 0, 50),
    ((7, 50, 8), 1, 0, 33),
    ((7, 50, 33), 1, 1, 20),
    ((2, 3, 40, 6), 2, 1, 11),
    ((169_343, 128), 0, 0, 1_166_243),
    ((128_256, 4096), 0, 0, 65536),
    ((1 << 33, 1), 0, 0, 1 << 32),
]


def plan(shape, axis, batch_dims, count, dtype="float32", index_dtype="int32", **rules):
    of = lambda shape, dtype: jax.core.ShapedArray(shape, jnp.dtype(dtype))
    with compat.enable_x64():
        x, index = of(shape, dtype), of((*shape[:batch_dims], count), index_dtype)
        out = of((*shape[:axis], count, *shape[axis + 1 :]), dtype)
        return gather_plan.index_select(device.H200, [x, index], [out], rules=Rules(axis, batch_dims, **rules))


def kernels(found):
    return {(step.header, step.name) for step in (*found.launches, *(found.unaligned or ()))}


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_thread_for_every_vector(problem, dtype):
    shape, axis, _, count = problem
    size = jnp.dtype(dtype).itemsize
    total = int(np.prod(shape[:axis] + shape[axis + 1 :], dtype=object)) * count * size
    found = plan(*problem, dtype)
    for steps, least in ((found.launches, 2), (found.unaligned or found.launches, size)):
        (step,) = steps
        vector = {name: size for size, name in gather_plan.VECTORS.items()}[re.match(r"Gather<(\w+)", step.name)[1]]
        assert vector >= least and (found.unaligned is None or steps is found.launches or vector == size)
        (grid, *_), (threads, *_) = step.grid3(), step.block3()
        each = threads * tuning.GATHERED * vector
        assert (grid - 1) * each < total <= grid * each and grid < 2**31 and threads <= 1024
        assert ("uint32_t>" in step.name) == (total // vector + threads * tuning.GATHERED < 2**31 - 1)


def test_fill_and_flags():
    def members(**options):
        return plan((100, 3), 0, 0, 50, **options).launches[0].args[3].members

    at = lambda **options: [m.value for m in members(**options)[-4:]]
    assert at() == [0, 0, 0, 0] and at(wrap=True, clip=True) == [0, 1, 1, 0]
    assert at(wrap=True, index_dtype="uint32") == [0, 0, 0, 0]
    for dtype, element in (
        ("float16", np.float16(np.nan)),
        ("float32", np.float32(np.nan)),
        ("float64", np.nan),
        ("int32", np.iinfo(np.int32).min),
        ("int64", np.iinfo(np.int64).min),
        ("uint32", 2**32 - 1),
    ):
        bits = np.full(8, element, dtype).view(np.uint64)[0]
        assert at(dtype=dtype, fill_nan=True)[0] == bits
    assert at(dtype="bfloat16", fill_nan=True)[0] == np.full(4, jnp.nan, jnp.bfloat16).view(np.uint64)[0]


def test_no_plan_for_other_types():
    assert plan((100, 3), 0, 0, 50, "int8") is None


@needs_nvrtc
def test_kernels_compile():
    compile = registry.kernels.module.compile
    names = set().union(*(kernels(plan(*problem, dtype)) for problem in PROBLEMS for dtype in ("bfloat16", "float64")))
    names |= set().union(*(kernels(plan(*PROBLEMS[1], index_dtype=d)) for d in INDEX_DTYPES))
    for name in names:
        assert compile(*name, 90)[0]
    for capability in (80, 86, 89, 100, 120):
        assert compile(*min(names), capability)[0]


LOWERED = """
import jax, jaxkern
x, index = jax.ShapeDtypeStruct((100, 12), "bfloat16"), jax.ShapeDtypeStruct((40,), "int32")
f = jax.jit(lambda x, index: jaxkern.index_select(x, 0, index))
print(f.trace(x, index).lower(lowering_platforms=("cuda",)).as_text())
"""


@pytest.mark.skipif(registry.kernels.module is None, reason=registry.kernels.reason)
def test_programs():
    """One call with a launch list that the runtime reads, and the same text in every process."""
    x, index = jax.ShapeDtypeStruct((100, 12), "bfloat16"), jax.ShapeDtypeStruct((40,), "int32")
    f = jax.jit(lambda x, index: jaxkern.index_select(x, 0, index))
    text = f.trace(x, index).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@jaxkern_index_select(") == 1 and "Gather<uint2, int32_t, uint32_t>" in text
    operands, results = (
        [jax.core.ShapedArray(a.shape, a.dtype) for a in (x, index)],
        [jax.core.ShapedArray((40, 12), x.dtype)],
    )
    found = plan((100, 12), 0, 0, 40, "bfloat16", wrap=True, fill_nan=True)
    program = launch.text("jaxkern_index_select", found, operands, results)
    assert registry.kernels.module.check(program) == "" and program.splitlines()[-1] in text.replace("\\0A", "\n")
    other = subprocess.run(
        [sys.executable, "-c", LOWERED],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ).stdout
    module = lambda text: re.sub(r"@jit_\w+|module @\S+", "", text).strip()
    assert module(other) == module(text)


def test_every_case_has_a_reference():
    """Empty arrays, symbolic sizes and other dtypes lower to XLA's own operations."""
    f = lambda x, i: jaxkern.index_select(x, 0, i)
    for shape, dtype in (((0, 3), "float32"), ((5, 3), "int8"), ((5, 0), "float32")):
        x, index = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((4,), "int32")
        assert "jaxkern_index_select" not in jax.jit(f).trace(x, index).lower(lowering_platforms=("cuda",)).as_text()
