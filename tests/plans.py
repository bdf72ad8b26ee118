"""Checks of launch plans that the tests of every family share."""

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


def on_other_gpus(names):
    """(capability, name) of kernels that also compile for 90: each for one GPU before it, and every third for one after it.

    Kernels differ in their source between those before 90 and the others (`__CUDA_ARCH__` in ffi/kernels).
    """
    for n, name in enumerate(names):
        yield (80, 86, 89)[n % 3], name
        if n % 3 == 0:
            yield (100, 120)[n // 3 % 2], name


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
