"""Device traits: the properties of a GPU that plans depend on."""

import typing

import jax


class Device(typing.NamedTuple):
    """The properties of a GPU that plans depend on.

    Attributes:
        sm_count: the number of multiprocessors.
        compute_capability: 10 * major + minor.
        shared_memory: the bytes that a block can opt in to.
        l2_bytes: the size of the L2.
    """

    sm_count: int
    compute_capability: int
    shared_memory: int
    l2_bytes: int = 50 << 20


H200 = Device(132, 90, 227 * 1024, 60 << 20)
A100 = Device(108, 80, 163 * 1024, 40 << 20)

# By compute capability: kilobytes of shared memory that a block can opt in to ("Technical Specifications per Compute
# Capability" of the CUDA programming guide), and megabytes of L2 (NVIDIA's white papers of each architecture).
_SHARED_KB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
_L2_MB = {80: 40, 86: 6, 89: 72, 90: 50, 100: 126, 120: 96}


def describe(gpu) -> Device:
    """The traits of a `jax.Device` of platform "gpu"."""
    major, minor = map(int, gpu.compute_capability.split("."))
    capability = 10 * major + minor
    l2 = 60 if gpu.device_kind == "NVIDIA H200" else _L2_MB.get(capability, 40)
    return Device(gpu.core_count, capability, 1024 * _SHARED_KB.get(capability, 99), l2 << 20)


def this_device() -> Device:
    """The first GPU that JAX sees, or an H200 if there is none.

    Returns:
        A `Device`.

    >>> from jaxkern import algorithms
    >>> algorithms.this_device().sm_count > 0
    True
    """
    try:
        return describe(jax.local_devices(backend="cuda")[0])
    except RuntimeError:
        return H200
