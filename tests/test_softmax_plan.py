"""Softmax on CUDA: its plans, the kernels that they name, and the programs that hold them. Needs no GPU."""

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
)
from problems import ROWS, WIDTHS
from reference import DTYPES

import jaxkern
from jaxkern import algorithms
from jaxkern._core import compat, device, launch, registry
from jaxkern._ops.softmax import fused_plan, plan

SHAPES = [  # and axis
    *(((3, width), 1) for width in WIDTHS),
    *((shape, axis % len(shape)) for shape, axis, _ in ROWS if isinstance(axis, int)),
    *(((49152, width), 1) for width in (32, 100, 512, 1024, 4096, 8192, 16384, 32768)),
    *(((2048, width), 1) for width in (65536, 50257, 262144)),
    ((1, 1 << 20), 1),
    ((8, 1 << 18), 1),
    ((1 << 33, 2), 1),
    ((64, 1024, 1024), 1),
    ((64, 20, 512), 1),
    ((64, 30, 512), 1),
    ((4, 100_000, 33), 1),
    ((100_000, 40), 0),
]
KINDS = list(itertools.product((False, True), (False, True)))  # log, backward
EXTRAS = ("", "scale", "bias", "mask", "bias scale mask", "key0 key1", "bias scale mask key0 key1")


def of(shape, dtype):
    return jax.core.ShapedArray(shape, jnp.dtype(dtype))


def plain(shape, axis, dtype="float32", log=False, backward=False, on=device.H200):
    """The plan of the kernel that is chosen, or None."""
    p = plan.problem_of(of(shape, "float32"), axis, log=log, backward=backward)._replace(dtype=dtype)
    kernel = plan.choose(p, on)
    return kernel and plan.plain(kernel, p, on)


def fused(shape, extras, dtype="bfloat16", which="", log=False, causal=False, wide=False, on=device.H200):
    with compat.enable_x64():
        compute = "float64" if dtype == "float64" else "float32"
        ones = (1,) * len(shape)
        part = (1, *shape[1:])
        types = {
            "bias": of(part, compute if wide else dtype),
            "scale": of(ones, compute),
            "mask": of(part, bool),
            "key0": of(ones, "uint32"),
            "key1": of(ones, "uint32"),
        }
        operands = [of(shape, dtype)] * (2 if which else 1) + [types[e] for e in extras.split()]
        return fused_plan.fused(
            on,
            operands,
            axis=len(shape) - 1,
            log=log,
            extras=extras.split(),
            causal=causal,
            threshold=6554 * ("key0" in extras),
            backward=which != "",
            from_output=which == "output_grad",
        )


def fused_calls(dtype):
    """Arguments of every kind of fused call."""
    for which, causal, wide in itertools.product(("", "grad"), (False, True), (False, True)):
        for extras in EXTRAS:
            if not wide or "bias" in extras:  # wide: the bias in the computing type
                yield dict(extras=extras, dtype=dtype, which=which, causal=causal, wide=wide)
    for which, extras in itertools.product(("", "grad"), EXTRAS[:5]):
        yield dict(extras=extras, dtype=dtype, which=which, log=True)
    for causal, extras in itertools.product((False, True), EXTRAS[:2]):
        yield dict(extras=extras, dtype=dtype, which="output_grad", causal=causal)


# ---- plans


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_plans(dtype, on):
    for (shape, axis), (log, backward) in itertools.product(SHAPES, KINDS):
        if found := plain(shape, axis, dtype, log, backward, on):
            assert len(found.launches) == 1 and not found.scratch
            check_limits(found, on)
            check_coverage(found, plan.problem_of(of(shape, "float32"), axis)._replace(dtype=dtype))


def check_coverage(found, p):
    """The blocks cover each row."""
    step = found.launches[0]
    (x, _, _), (threads, _, _) = step.grid3(), step.block3()
    if found.algorithm == "cluster":
        held = int(step.name.split(", ")[-2])
        assert x == p.rows * step.cluster and held * threads * step.cluster >= math.ceil(p.width / p.vector)
    (x, y, _) = found.unaligned[0].grid3()
    assert p.inner != 1 or x * y >= p.rows


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_fused_problem_has_a_plan(dtype, on):
    for shape, call in itertools.product(
        ((3, 5), (4, 64, 512), (8, 2048, 2048), (2, 7, 1003), (16, 4096), (5, 33333)), fused_calls(dtype)
    ):
        rows, log, backward = math.prod(shape[:-1]), call.get("log", False), call["which"] != ""
        p = plan.Problem(rows, shape[-1], 1, dtype, log, backward)
        found = fused(shape, on=on, **call)
        assert found.algorithm == fused_plan.choose(p, call.get("causal") and call["extras"] in ("", "scale"))
        check_limits(found, on)


def test_the_kernels_of_the_benchmarks():
    def chosen(shape, axis, *kind, **options):
        found = plain(shape, axis, *kind, **options)
        step = found.launches[0]
        return found.algorithm, step.grid3()[:2], step.block3()[0], step.cluster

    assert chosen((49152, 32), 1) == ("sub_warp", (1536, 1), 128, 1)
    assert chosen((16, 131072), 1, "bfloat16") == ("cluster", (256, 1), 128, 16)
    assert chosen((64, 1024, 1024), 1)[0] == "column"
    assert plain((49152, 8192), 1) is plain((64, 1024, 33), 1) is plain((16, 131072), 1, on=device.A100) is None
    assert plain((49152, 8), 1, "bfloat16", False, True) is None


def test_where_kernels_by_hand_run():
    """Few long rows, short rows and columns; with a scale, a bias, a causal limit or dropout."""
    chosen = lambda *problem, **more: algorithms.choose("softmax", *problem, device=device.H200, **more)
    assert (
        chosen(16, 131072) == chosen(49152, 64, dtype="bfloat16", backward=True) == chosen(64, 1024, 1024) == "by_hand"
    )
    assert chosen(49152, 32) == "by_hand" and algorithms.choose("log_softmax", 49152, 32, device=device.H200) == "lanes"
    assert chosen(4096, 131072) == "cluster" and chosen(1, 1 << 20) == "split" and chosen(49152, 64) == "lanes"
    key = jnp.zeros(2, "uint32")
    x, bias, mask = of_type((8, 64, 1024)), of_type((1, 64, 1024)), of_type((8, 1, 1024), "bool")
    programs = {
        True: (
            lambda x, bias, _: jaxkern.softmax(x, bias=bias, scale=2.0),
            lambda x, *_: jaxkern.softmax(x, causal=True),
            lambda x, *_: jaxkern.softmax(x, dropout_rate=0.1, dropout_key=key, dtype="bfloat16"),
            lambda x, *_: jax.vmap(lambda x: jaxkern.softmax(x, causal=True))(x),
            lambda x, bias, _: jax.vmap(lambda x: jaxkern.softmax(x, bias=bias[0]))(x),
        ),
        False: (
            lambda x, _, mask: jaxkern.softmax(x, where=mask),
            lambda x, *_: jax.vmap(lambda x: jaxkern.softmax(x, causal=True), 1)(x),
            lambda x, *_: jax.vmap(lambda x: jaxkern.softmax(x, dropout_rate=0.1, dropout_key=key))(x),
            lambda x, bias, _: jaxkern.softmax(x[..., :33], bias=bias[..., :33]),
        ),
    }
    for by_hand, functions in programs.items():
        for f in functions:
            assert ("softmax/" in lowered(f, x, bias, mask)) == by_hand


def test_struct_sizes():
    """SoftmaxParams, ColumnPlan, FusedParams; the headers assert the same."""
    found = plain((64, 64, 64), 1)
    assert layout(found.launches[0].args[0]) == (248, 8) and layout(found.unaligned[0].args[1]) == (16, 8)
    for extras in EXTRAS:
        assert layout(fused((4, 64, 512), extras).launches[0].args[0]) == (688, 8)


def test_rows_of_matrices_are_taken_by_runs():
    """This happens if an operand broadcasts over matrices and the arrays exceed L2."""
    by_runs = lambda *args: fused(*args).launches[0].args[0].members[-1].value
    assert by_runs((64, 2048, 2048), "bias") and by_runs((64, 2048, 2048), "mask")
    assert (
        not by_runs((64, 2048, 2048), "scale")
        and not by_runs((2, 64, 64), "bias")
        and not by_runs((64, 2047, 2048), "bias")
    )


def test_no_plan():
    assert plain((1 << 33, 2, 32), 1) is None  # a grid with too many blocks
    assert fused((1 << 31, 8), "scale") is None


# ---- kernels


@needs_nvrtc
def test_kernels_compile():
    names = set()
    shapes = [((49152, 32), 1), ((16, 40000), 1), ((3, 131072), 1), ((3, 50257), 1)]
    shapes += [((64, n, 512), 1) for n in (20, 30, 300)]
    for shape, axis in shapes:
        for dtype, kind in (("bfloat16", (False, False)), ("float32", (True, True)), ("float16", (True, False))):
            if found := plain(shape, axis, dtype, *kind):
                names |= kernels(found, unaligned=shape in ((16, 40000), (64, 300, 512)))
    names |= kernels(plain((49152, 16), 1, "bfloat16", False, True), unaligned=False)
    names |= kernels(plain((64, 300, 256), 1, "float64", False, True), unaligned=True)
    for shape, dtype in (((8, 64, 512), "bfloat16"), ((8, 64, 4096), "float32"), ((4, 9, 1001), "float16")):
        names |= kernels(fused(shape, "scale", dtype), unaligned=False)
        names |= kernels(fused(shape, "bias scale mask key0 key1", dtype, "grad", causal=True), unaligned=False)
    names |= kernels(fused((4, 9, 1000), "bias", "bfloat16", log=True, wide=True))
    names |= kernels(fused((4, 9, 1000), "key0 key1", "float64"))
    names |= kernels(fused((4, 9, 1000), "scale", "float16", "output_grad", causal=True))
    assert len(names) > 35
    compile_kernels(names, 90)
    templates = {name.split("<")[0] + "Fused" * ("Fused" in name): (header, name) for header, name in sorted(names)}
    assert set(templates) == {
        "SoftmaxRegisters",
        "SoftmaxStreaming",
        "SoftmaxColumnRegisters",
        "SoftmaxColumn",
        "SoftmaxRegistersFused",
        "SoftmaxStreamingFused",
    }
    compile_on_other_gpus(templates.values())


# ---- programs


def lowered(f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def of_type(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


LOWERED = """
import jax, jax.numpy as jnp, jaxkern
f = lambda x: jaxkern.softmax(x, scale=0.5, causal=True).sum() + jaxkern.log_softmax(x)[0, 0]
traced = jax.jit(jax.value_and_grad(f)).trace(jax.ShapeDtypeStruct((4, 100_000), "float32"))
print(traced.lower(lowering_platforms=("cuda",)).as_text())
"""


@needs_runtime
def test_programs():
    """One call forward and one backward, with launch lists that the runtime reads, the same text in every process."""
    f = lambda x: jaxkern.softmax(x, scale=0.5, causal=True).sum() + jaxkern.log_softmax(x)[0, 0]
    text = lowered(jax.value_and_grad(f), of_type((4, 100_000)))
    for name in ("softmax", "log_softmax"):
        assert text.count(f"@jaxkern_{name}(") == 2
    assert len(launch.programs(text)) == 4
    assert all(registry.kernels.module.check(program) == "" for program in launch.programs(text))
    other = subprocess.run([sys.executable, "-c", LOWERED], capture_output=True, text=True, check=True).stdout
    assert other.strip() == text.strip()


@needs_runtime
def test_masks_of_many_groups_are_broadcast():
    mask = jnp.ones((2, 1) * 5 + (1,), bool)
    for f in (lambda x: jaxkern.softmax(x, where=mask), lambda x: jaxkern.softmax(x, where=mask, scale=2)):
        text = lowered(f, of_type((2,) * 11))
        assert "@jaxkern_softmax" in text and "tensor<2x2x2x2x2x2x2x2x2x2x2xi1>" in text


@needs_runtime
def test_keys_of_a_batch_are_read_in_place():
    f = jax.vmap(lambda x, key: jaxkern.softmax(x, dropout_rate=0.1, dropout_key=key))
    (program,) = launch.programs(lowered(f, of_type((8, 16, 64)), of_type((8, 2), "uint32")))
    assert program.count("uint32[8,1,1]") == 2 and registry.kernels.module.check(program) == ""


@needs_runtime
def test_without_a_kernel():
    """Empty arrays, symbolic sizes and other dtypes lower to XLA's own operations."""
    for x in (of_type((0, 3)), of_type((5, 3), "float8_e5m2")):
        for f in (jaxkern.softmax, lambda x: jaxkern.softmax(x, scale=2)):
            assert "@jaxkern_" not in lowered(f, x)
    (n,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(jaxkern.softmax), platforms=["cuda"])(of_type((n, 7)))
    assert "@jaxkern_" not in exported.mlir_module()


def test_a_forced_algorithm_that_does_not_fit_is_refused():
    with (
        jaxkern.algorithms.force(softmax="lanes"),
        pytest.raises(ValueError, match="jaxkern.softmax: the algorithm 'lanes'"),
    ):
        lowered(jaxkern.softmax, of_type((2, 100_003)))
