"""Cross-entropy on CUDA: its plans, the kernels that they name, and the programs that hold them. Needs no GPU."""

import itertools
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
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
from reference import DTYPES

import jaxkern
from jaxkern._core import compat, device, launch, registry
from jaxkern._ops.cross_entropy import plan, primitive

SHAPES = [  # and axis
    ((5, 1), 1),
    ((49152, 32), 1),
    ((49152, 257), 1),
    ((32768, 1024), 1),
    ((32768, 1003), 1),
    ((5, 4096), 1),
    ((32768, 4096), 1),
    ((700, 16384), 1),
    ((700, 50257), 1),
    ((32768, 131072), 1),
    ((4096, 262144), 1),
    ((1, 1 << 20), 1),
    ((3, 600_001), 1),
    ((4, 1 << 22), 1),
    ((64, 300, 256), 1),
    ((3, 9000, 5), 1),
    ((1 << 20, 7), 0),
]
SIGNATURES = {"loss": primitive.LOSS, "gradient": primitive.GRADIENT, "both": primitive.BOTH}


def make(
    which, shape, axis, dtype="float32", mask=None, on=device.H200, algorithm="auto", options=None, labels="int32"
):
    wide = "float64" if dtype == "float64" else "float32"
    types = {
        primitive.LOGITS: (shape, dtype),
        primitive.LABELS: (shape[:axis] + shape[axis + 1 :], labels),
        primitive.ROW: (shape[:axis] + shape[axis + 1 :], wide),
        primitive.MASK["mask?"]: (mask, "bool"),
    }
    signature = SIGNATURES[which]
    with compat.enable_x64():
        of = lambda text: jax.core.ShapedArray(types[text][0], jnp.dtype(types[text][1]))
        given = [text for n, text in signature.operands.items() if mask or n not in signature.optional]
        operands = signature.named(*map(of, given))
        params = dict(axis=axis, algorithm=algorithm, options=options or primitive.Options())
        return plan.cross_entropy(which, on, operands, None, **params)


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_problem_has_a_plan(dtype, on):
    for (shape, axis), which, masked in itertools.product(SHAPES, plan.PASSES, (False, True)):
        p = plan.Problem(math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]), dtype, which, masked)
        assert plan.fits(plan.choose(p, on), p, on)
        for algorithm in plan.ALGORITHMS:
            mask = shape if masked else None
            if not plan.fits(algorithm, p, on):
                with pytest.raises(ValueError, match=f"softmax_cross_entropy.*the algorithm '{algorithm}'"):
                    make(which, shape, axis, dtype, mask, on, algorithm)
                continue
            found = make(which, shape, axis, dtype, mask, on, algorithm)
            assert found.algorithm == algorithm
            check_limits(found, on)
            check_coverage(found, p)


def check_coverage(found, p):
    """The launches write every result, and there is a group, block or cluster for every part of every row."""
    for steps in (found.launches, found.unaligned):
        kinds = [step.name.split("<")[0] for step in steps]
        one = kinds[0] in ("SoftmaxRegisters", "BothPipeline")
        losses, gradients = (
            sum(k.startswith(start) for k in kinds) for start in (("LossRows", "LossColumn"), "Gradient")
        )
        assert one or (losses, gradients) == (p.which != "gradient", p.which != "loss")
        assert not one or (p.which == "both" and len(steps) == 1)
        for step, kind in zip(steps, kinds):
            if kind == "GradientRows":
                lanes = int(step.name.split(", ")[1])
                parts = step.args[0].members[11].value
                assert step.grid3()[0] * (128 // lanes) >= p.rows * parts
            if kind == "SoftmaxRegisters":
                *_, lanes, held, rows = step.name.split(", ")
                threads = step.block3()[0] if "kBlockLanes" in lanes else int(lanes)
                assert threads * int(held) >= p.touched and rows == "1>"
                assert step.grid3()[0] * (1 if "kBlockLanes" in lanes else 128 // threads) >= p.rows
            if kind == "BothPipeline":
                assert step.args[1].value * step.cluster >= p.vectors and step.cluster <= 16
                assert step.args[1].value <= 13 * 1024
    assert bool(found.scratch) == any("LossMerge" in step.name for step in found.launches)


def test_the_algorithms_of_the_benchmarks():
    def chosen(which, shape, dtype="float32", **options):
        found = make(which, shape, 1, dtype, **options)
        step = found.launches[0]
        return found.algorithm, step.grid3()[0], step.block3()[0]

    assert chosen("loss", (32768, 4096)) == ("warp", 6 * 132, 128)
    assert chosen("loss", (32768, 131072), "bfloat16") == ("warp", 6 * 132, 128)
    assert chosen("loss", (4096, 262144), "bfloat16") == ("block", 4096, 256)
    assert chosen("loss", (1, 1 << 20)) == ("split", 128, 256)
    assert chosen("gradient", (32768, 4096)) == ("warp", 16384, 128)
    assert chosen("both", (49152, 256)) == ("sub_warp", 6144, 128)
    assert chosen("both", (32768, 4096), "bfloat16") == ("block", 32768, 128)
    assert chosen("both", (32768, 4096)) == ("block", 32768, 128)
    assert chosen("both", (32768, 131072), "bfloat16") == ("pipeline", 65536, 544)
    assert chosen("both", (32768, 131072), "bfloat16", on=device.A100)[0] == "streaming"


def test_struct_sizes():
    """LossParams and BothParams; the headers assert the same."""
    for mask in (None, (1024, 1)):
        assert layout(make("loss", (1024, 1024), 1, mask=mask).launches[0].args[0])[0] == 360
    assert layout(make("both", (1024, 1024), 1).launches[0].args[0])[0] == 248 + 360


def test_options():
    """What the kernels are told of the options and the labels."""

    def members(**options):
        step = make(
            "loss", (9, 7), 1, labels=options.pop("labels", "int32"), options=primitive.Options(**options)
        ).launches[0]
        *scalars, single, wide = step.args[0].members[14:20]
        return [m.value for m in (*scalars, *single.members, *wide.members)]

    assert members(smoothing=0.25, z_loss=0.5) == [0, 0, 2, 0, *[0.25, 0.75, 0.5, 7] * 2]
    assert members(ignore=-100, labels="int8")[:4] == [1, 0, 0, -100]
    assert members(ignore=2**64 - 1, labels="uint64", as_written=True)[:4] == [1, 1, 7, -1]


def test_no_plan():
    shape = (8,) * 10
    assert make("loss", shape, 9, mask=(8, 1) * 5) is None  # a mask with too many groups
    assert make("loss", (8, 8), 1, labels="int4") is None
    assert make("gradient", (2**33, 3), 1, "float16", algorithm="column") is None  # a grid with too many blocks


@needs_nvrtc
def test_kernels_compile():
    names = set()
    for (shape, axis), which in itertools.product(SHAPES, plan.PASSES):
        names |= kernels(make(which, shape, axis, "bfloat16"))
    for (shape, axis), which in itertools.product((((700, 50257), 1), ((64, 300, 256), 1)), plan.PASSES):
        for dtype in ("float16", "float32", "float64"):
            names |= kernels(make(which, shape, axis, dtype), unaligned=False)
        names |= kernels(make(which, shape, axis, "bfloat16", shape))
    compile_kernels(of_each_kind(names), 90)
    templates = {name.split("<")[0]: (header, name) for header, name in sorted(names)}
    assert set(templates) == {
        "LossRows",
        "LossMerge",
        "GradientRows",
        "LossColumn",
        "GradientColumn",
        "SoftmaxRegisters",
        "BothPipeline",
    }
    compile_on_other_gpus(templates.values())


LOWERED = """
import jax, jaxkern
x, labels = jax.ShapeDtypeStruct((4, 100_000), "float32"), jax.ShapeDtypeStruct((4,), "int32")
print(jax.jit(jaxkern.softmax_cross_entropy).trace(x, labels).lower(lowering_platforms=("cuda",)).as_text())
"""


def lowered(f, shape, dtype, labels="int32"):
    x, labels = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:-1], labels)
    return jax.jit(f).trace(x, labels).lower(lowering_platforms=("cuda",)).as_text()


@needs_runtime
def test_programs():
    """One call per pass, with a launch list that the runtime reads, and the same text in every process."""
    one = lowered(jaxkern.softmax_cross_entropy, (4, 100_000), "float32")
    assert one.count("@jaxkern_cross_entropy(") == 1
    for f in (jaxkern.softmax_cross_entropy, jaxkern.softmax_cross_entropy_and_grad):
        for program in launch.programs(lowered(f, (64, 1000), "float16")):
            assert registry.kernels.module.check(program) == ""
    other = subprocess.run([sys.executable, "-c", LOWERED], capture_output=True, text=True, check=True).stdout
    assert other.strip() == one.strip()


@needs_runtime
def test_masks_of_many_groups_are_broadcast():
    mask = jnp.ones((2, 1) * 5 + (1,), bool)
    text = lowered(lambda x, y: jaxkern.softmax_cross_entropy(x, y, where=mask), (2,) * 11, "float32")
    assert "@jaxkern_cross_entropy(" in text and "tensor<2x2x2x2x2x2x2x2x2x2x2xi1>" in text


@needs_runtime
def test_without_a_kernel():
    """Empty arrays and other dtypes lower to XLA's own operations."""
    for shape, dtype in (((0, 3), "float32"), ((5, 3), "float8_e5m2")):
        assert "@jaxkern_" not in lowered(jaxkern.softmax_cross_entropy, shape, dtype)
