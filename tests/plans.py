"""Checks of launch plans that the tests of every family share."""

import collections
import re

import pytest

from jaxkern._core import device, launch, registry

DEVICES = (
    device.H200,
    device.A100,
    device.Device(84, 86, 99 * 1024, 6 << 20),
    device.Device(170, 120, 99 * 1024, 96 << 20),
)

needs_runtime = pytest.mark.skipif(registry.kernels.module is None, reason=registry.kernels.reason or "no runtime")
needs_nvrtc = pytest.mark.skipif(
    registry.kernels.module is None or bool(registry.kernels.module.compiler()[1]),
    reason=registry.kernels.reason or "NVRTC cannot be used",
)

_SIZES = {"u8": 1, "i32": 4, "u32": 4, "f32": 4}


def layout(arg) -> tuple[int, int]:
    """(size, alignment) of an argument, as C++ lays it out."""
    if isinstance(arg, launch.Buffer):
        return 8, 8
    if isinstance(arg, launch.Scalar):
        return (_SIZES.get(arg.type, 8),) * 2
    at, most = 0, arg.align
    for size, align in map(layout, arg.members):
        at = -(-at // align) * align + size
        most = max(most, align)
    return -(-at // most) * most, most


def _buffers(arg):
    if isinstance(arg, launch.Buffer):
        yield arg
    elif isinstance(arg, launch.Struct):
        for member in arg.members:
            yield from _buffers(member)


def check_limits(plan: launch.Plan, on: device.Device) -> None:
    """Every launch is one that a GPU can run, and touches scratch only where there is some."""
    for step in (*plan.launches, *(plan.unaligned or ())):
        if isinstance(step, launch.Memset):
            assert 0 <= step.buffer.offset and step.bytes >= 0
            assert step.buffer.kind != "scratch" or step.buffer.offset + step.bytes <= plan.scratch
            continue
        (x, y, z), block = step.grid3(), step.block3()
        assert 1 <= x < 2**31 and 1 <= y < 2**16 and 1 <= z < 2**16
        assert 1 <= block[0] * block[1] * block[2] <= 1024 and block[2] <= 64
        assert 0 <= step.shared <= on.shared_memory and x % step.cluster == 0
        for buffer in (b for arg in step.args for b in _buffers(arg)):
            assert buffer.kind != "scratch" or 0 <= buffer.offset < plan.scratch


def kernels(plan: launch.Plan, unaligned=True) -> set:
    """(header, kernel) of every launch."""
    return {(step.header, step.name) for step in (*plan.launches, *((plan.unaligned or ()) if unaligned else ()))}


def of_each_kind(kernels) -> list:
    """One (header, name) of those that differ only in their types: the first of the first kind, the second of the second..."""
    kinds = collections.defaultdict(list)
    for header, name in sorted(kernels):
        kind = re.sub(r"\b(float|double|__half|__nv_bfloat16|u?int\d+_t)\b", "T", name)
        kinds[header, kind].append((header, name))
    return [alike[n % len(alike)] for n, alike in enumerate(kinds.values())]


def compile_kernels(kernels, capability) -> None:
    """Compiles these (header, name), kernels of one header in one program: NVRTC spends most of its time reading headers.

    Kernels of 16-bit types have a program of their own, since others do not get CUDA's headers of these types (runtime/nvrtc.cc).
    """
    programs = collections.defaultdict(set)
    for header, name in kernels:
        programs[header, "half" in name or "float16" in name].add(name)
    for (header, _), (first, *others) in programs.items():
        source = "template <auto kernel> struct Used {};\n" + "".join(f"template struct Used<&{n}>;\n" for n in others)
        image, *_ = registry.kernels.module.compile(header, first, capability, source)
        assert len(set(re.findall(rb"\.text\.(\w+)", image))) == len(others) + 1


def compile_on_other_gpus(kernels) -> None:
    """Compiles kernels that compile for 90 too: each for one GPU before it, and every third for one after it.

    Kernels differ in their source between those before 90 and the others (`__CUDA_ARCH__` in ffi/kernels).
    """
    kernels = list(kernels)
    for n, capability in enumerate((80, 86, 89)):
        compile_kernels(kernels[n::3], capability)
    for n, capability in enumerate((100, 120)):
        compile_kernels(kernels[3 * n :: 6], capability)
