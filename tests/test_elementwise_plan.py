"""Plans of elementwise operations: every signature has kernels that compile, and every call launches what it should."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest

import jaxkern
from jaxkern._core import launch, registry, runtime
from jaxkern._core.device import A100, H200, Device
from jaxkern._ops.elementwise import plan, table

MODULE = registry.kernels.module
DEVICES = (H200, A100, Device(84, 86, 99 * 1024), Device(170, 120, 99 * 1024))
needs_nvrtc = pytest.mark.skipif(MODULE is None or MODULE.compiler()[1] != "", reason="NVRTC is not installed")


def array(dtype, shape):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def planned(kernel, shapes, full, device=H200):
    """The plan of a kernel of the table for operands of these shapes; the last shape repeats."""
    arrays = len(kernel.operands) - kernel.parameters
    shapes = [*shapes, *[shapes[-1]] * arrays][:arrays] + [(1,) * len(full)] * kernel.parameters
    operands = [array(t, shape) for t, shape in zip(kernel.operands, shapes)]
    return plan.plan(kernel.name, device, operands, [array(t, full) for t in kernel.results])


def steps(p):
    return [*p.launches, *(p.unaligned or ())]


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: str(d.compute_capability))
def test_every_signature_has_a_plan_within_limits(device):
    for kernel in table.kernels():
        for full, shapes in (
            ((1,), [(1,)]),
            ((1 << 27,), [(1 << 27,)]),
            ((3, 5, 1001), [(3, 5, 1001), (1, 5, 1), (1, 1, 1001)]),
        ):
            if len(kernel.operands) - kernel.parameters == 1:
                shapes = shapes[:1]
            p = planned(kernel, shapes, full, device)
            assert p is not None and p.scratch == 0, kernel.key
            for step in steps(p):
                assert step.grid < 1 << 31 and step.block in (128, 256) and step.shared == 0
                assert min(math.prod(full), 1 << 20) / 32 <= step.grid * step.block < 1 << 32


def test_flat_and_strided_calls():
    find = {k.key: k for k in table.kernels()}
    add = find["add(float32,float32)->float32"]
    algorithm = lambda shapes, full: planned(add, shapes, full).algorithm
    assert algorithm([(64, 128)], (64, 128)) == "flat"
    assert algorithm([(64, 128), (1, 1)], (64, 128)) == "flat"
    assert algorithm([(64, 128), (1, 128)], (64, 128)) == "strided"
    assert algorithm([(64, 1, 7), (64, 9, 1)], (64, 9, 7)) == "strided"
    assert planned(add, [(2, 1, 2, 1), (2, 2, 2, 2)], (2, 2, 2, 2)) is None  # more groups than a kernel takes
    assert planned(add, [(1 << 32, 1), (1 << 32, 2)], (1 << 32, 2)) is None
    names = lambda shapes, full: [step.name for step in steps(planned(add, shapes, full))]
    template = "Elementwise<Add<Single>, 0, Types<float>, Types<float, float>>"
    assert names([(1 << 27,)], (1 << 27,)) == [f"FlatKernel<{template}, 0, true>", f"FlatKernel<{template}, 0, false>"]
    assert names([(77,), (1,)], (77,)) == [f"FlatKernel<{template}, 2, false>"] * 2
    assert names([(64, 128), (1, 128)], (64, 128)) == [
        f"StridedKernel<{template}, true, 0, 2>",
        f"StridedKernel<{template}, false, 0, 2>",
    ]
    assert names([(64, 127), (1, 127)], (64, 127)) == [f"StridedKernel<{template}, false, 0, 2>"]
    assert names([(64, 127), (64, 1)], (64, 127)) == [f"StridedKernel<{template}, false, 2, 0>"]


def test_halves_of_an_array():
    operands = [array("float16", (4, 2, 64))]
    for split, offset in ((2, 64), (1, 128), (0, 512)):
        shape = tuple(n // 2 if d == split else n for d, n in enumerate((4, 2, 64)))
        p = plan.plan("swiglu", H200, operands, [array("float16", shape)], split=split)
        first, second = p.launches[0].args[0].members[:2]
        assert first == launch.operand(0) and second == launch.operand(0, offset), split
        g = array("float16", shape)
        p = plan.plan("swiglu_grad", H200, [*operands, g], operands, split=split)
        pointers = p.launches[0].args[0].members[:5]
        assert pointers == (
            launch.operand(0),
            launch.operand(0, offset),
            launch.operand(1),
            launch.result(0),
            launch.result(0, offset),
        )


def walk(step):
    """What a strided launch does, in Python: for each element the byte address in every array, in no order.

    Follows RunStrided in elementwise.cuh. Addresses are (buffer, bytes).
    """
    packs, columns, shared = re.search(r">, (true|false), (\d+), (\d+)>$", step.name).groups()
    types = [re.findall(r"Types<(.*?)>", step.name)[k].split(", ") for k in (1, 0)]
    bytes_of = {"float": 4, "double": 8, "__half": 2, "Pred": 1}
    sizes = [bytes_of[t] for group in types for t in group]
    members = list(step.args[0].members)
    buffers, members = members[: len(sizes)], members[len(sizes) + 1 :]  # there is no parameter
    strides = np.array([m.value for m in members[: 2 * len(sizes)]]).reshape(-1, 2)
    count, inner, middle, middle_size, _ = members[2 * len(sizes) :]
    units, runs = inner.members[0].value, middle.members[0].value
    n = 16 // max(sizes) if packs == "true" else 1
    rows = 1 if n == 1 or max(sizes) == 8 or len(types[0]) > 2 else 2
    for p in range(count.value):
        run, unit = divmod(p, units)
        outer, group = divmod(run, runs)
        for row in range(group * rows, min((group + 1) * rows, middle_size.value)):
            for column in range(unit * n, (unit + 1) * n):
                yield [
                    (
                        (b.kind, b.index),
                        b.offset
                        + size
                        * int(
                            outer * s[0]
                            + (0 if int(shared) >> k & 1 else row * s[1])
                            + (0 if int(columns) >> k & 1 else column)
                        ),
                    )
                    for k, (b, size, s) in enumerate(zip(buffers, sizes, strides))
                ]


def check_walk(step, expected):
    """expected: for each array (buffer, bytes per element, index of its element for each element of the result)."""
    wanted = sorted(zip(*([(buffer, int(i) * size) for i in index.ravel()] for buffer, size, index in expected)))
    assert sorted(map(tuple, walk(step))) == wanted


@pytest.mark.parametrize(
    "full, shapes",
    [
        ((3, 5, 8), [(3, 5, 8), (1, 5, 1)]),
        ((3, 5, 8), [(1, 1, 8), (3, 5, 8)]),
        ((3, 5, 7), [(3, 1, 7), (3, 5, 7)]),
        ((4, 6), [(4, 1), (1, 6)]),
        ((5, 3, 2, 8), [(5, 1, 2, 8), (5, 3, 2, 8)]),
        ((2, 3, 4), [(1, 3, 1), (2, 3, 4)]),
        ((3, 1, 8), [(3, 1, 8), (1, 1, 8)]),
    ],
)
def test_strides_reach_every_element_once(full, shapes):
    for name in ("add(float32,float32)->float32", "less(float16,float16)->bool", "add(float64,float64)->float64"):
        kernel = next(k for k in table.kernels() if k.key == name)
        size, out = {"float32": (4, 4), "float16": (2, 1), "float64": (8, 8)}[kernel.operands[0]]
        index = [np.broadcast_to(np.arange(math.prod(s)).reshape(s), full) for s in (*shapes, full)]
        p = planned(kernel, shapes, full)
        assert p.algorithm == "strided"
        arrays = [("operand", 0), ("operand", 1), ("result", 0)]
        for step in steps(p):
            check_walk(step, list(zip(arrays, (size, size, out), index)))


@pytest.mark.parametrize(
    "shape, split",
    [
        ((3, 16), 1),
        ((3, 2), 1),
        ((3, 2, 1), 1),
        ((5, 4, 3), 1),
        ((2, 2, 2), 2),
        ((4, 2, 1, 8), 1),
        ((6, 4), 0),
        ((2,), 0),
        ((2, 1), 0),
    ],
)
def test_halves_reach_every_element_once(shape, split):
    """Forward and backward, halves of one element included, which have gaps between them."""
    first, second = np.split(np.arange(math.prod(shape)).reshape(shape), 2, split)
    full = first.shape
    whole, half = array("float32", shape), array("float32", full)
    dense = np.arange(first.size).reshape(full)
    x, g, y = ("operand", 0), ("operand", 1), ("result", 0)
    forward = plan.plan("swiglu", H200, [whole], [half], split=split)
    backward = plan.plan("swiglu_grad", H200, [whole, half], [whole], split=split)
    for p, expected in (
        (forward, [(x, first), (x, second), (y, dense)]),
        (backward, [(x, first), (x, second), (g, dense), (y, first), (y, second)]),
    ):
        for step in steps(p):
            if step.name.startswith("StridedKernel"):
                check_walk(step, [(buffer, 4, index) for buffer, index in expected])


def test_structs_are_laid_out_as_in_the_kernels():
    """The sizes that elementwise.cuh asserts."""
    by_key = {k.key: k for k in table.kernels()}
    flat = planned(by_key["add(float32,float32)->float32"], [(8,)], (8,))
    strided = plan.plan("swiglu", H200, [array("float32", (4, 16))], [array("float32", (4, 8))], split=1)
    text = (runtime.kernels_folder() / plan.HEADER).read_text()
    sizes = [int(n) for n in re.findall(r"sizeof\(\w+Args<2, 1, \d>\) == (\d+)", text)]
    assert [plans.layout(p.launches[0].args[0])[0] for p in (flat, strided)] == sizes


@needs_nvrtc
def test_kernels_compile():
    """One of every functor, in turns of all types, flat and strided."""
    done, kernels = set(), set()
    turn = itertools.cycle(range(3))
    for kernel in table.kernels():
        if (kernel.functor, kernel.coarse) in done or kernel.computing == "float64":
            continue
        done.add((kernel.functor, kernel.coarse))
        n = next(turn)
        if n and len(done) % 4:
            continue
        several = len(kernel.operands) - kernel.parameters > 1
        p = planned(kernel, [(3, 8), (1, 8)] if several and n else [(3, 8)], (3, 8))
        kernels.add((p.launches[0].header, p.launches[0].name))
    plans.compile_kernels(kernels, 90)


@needs_nvrtc
@pytest.mark.parametrize("capability", [80, 86, 89, 100, 120])
def test_kernels_compile_for_every_gpu(capability):
    add = next(k for k in table.kernels() if k.key == "add(bfloat16,bfloat16)->bfloat16")
    calls = ([(1 << 27,)], (1 << 27,)), ([(64, 128), (1, 128)], (64, 128))
    plans.compile_kernels({(s.header, s.name) for call in calls for s in steps(planned(add, *call))}, capability)


@pytest.mark.skipif(MODULE is None, reason="the runtime is not built")
def test_lowering():
    x = jnp.ones((64, 128), jnp.bfloat16)
    text = jax.jit(jaxkern.silu).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "@jaxkern_silu" in text
    (program,) = launch.programs(text)
    assert MODULE.check(program) == ""
    assert re.search(r"^operation jaxkern_silu\(bfloat16\[64,128\]\) -> \(bfloat16\[64,128\]\), flat$", program, re.M)
