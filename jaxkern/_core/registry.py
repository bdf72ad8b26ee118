"""Loading the extension module and registering its handler with XLA, at import.

`jaxkern._runtime` compiles and launches CUDA kernels (ffi/runtime). If it cannot be loaded, `kernels.reason` says why, and
the operations use XLA instead.
"""

import atexit
import dataclasses
import functools
import importlib
import importlib.util
import os
import types
import warnings

import jax
import jax.export
import jaxlib.version

from jaxkern._core import compat, device, environment, package, runtime


@dataclasses.dataclass(frozen=True)
class Module:
    """An extension module: either `module` is set, or `reason` says why it is not loaded."""

    module: types.ModuleType | None = None
    reason: str = ""


def load(name: str, api_version=None) -> Module:
    """Imports `jaxkern.<name>`; never raises. api_version: XLA FFI version to check against; default: the jaxlib's."""
    if importlib.util.find_spec(f"jaxkern.{name}") is None:
        return Module(reason=f"jaxkern.{name} was not built")
    try:
        module = importlib.import_module(f"jaxkern.{name}")
    except Exception as error:  # any error of the loader: a missing symbol, a wrong glibc
        return Module(reason=f"jaxkern.{name} does not load: {error}")
    accepted = api_version or compat.ffi_api_version()
    if accepted is not None and tuple(module.api_version) > tuple(accepted):
        built, known = (".".join(map(str, v)) for v in (module.api_version, accepted))
        return Module(
            reason=f"jaxkern.{name} was built for XLA FFI {built}, and jaxlib {jaxlib.version.__version__} accepts up to "
            f"{known}: upgrade jaxlib, or rebuild jaxkern against this one"
        )
    try:
        runtime.configure(module)
    except Exception as error:  # missing headers
        return Module(reason=f"jaxkern.{name} cannot be set up: {error}")
    atexit.register(module.stop_prefetching)
    return Module(module)


def register_cuda_target(name: str) -> None:
    """Registers the handler of launch lists as the CUDA custom call `name`."""
    if kernels.module is not None and name not in cuda_targets:
        jax.ffi.register_ffi_target(name, kernels.module.stages(), platform="CUDA")
        cuda_targets.add(name)


def kernels_run() -> bool:
    """Whether programs for CUDA may contain launch lists. True without a GPU: the program is for export."""
    return not refusal()


def refusal() -> str:
    """Why programs for CUDA contain no launch lists; empty if they may."""
    if kernels.module is None:
        return kernels.reason
    return "JAXKERN_BACKEND=xla" if environment.xla_only() else _problem_here()


def prefetch(program: str) -> None:
    """Starts compiling the kernels of a launch list in the background, if this process has a GPU."""
    if gpu_present():
        kernels.module.prefetch(program, device.this_device().compute_capability)


@functools.cache  # once for each kernel
def dump(header: str, name: str, source: str) -> None:
    """Compiles a kernel for the device that plans are made for, and so writes it to JAXKERN_DUMP. Without a GPU nothing else
    would compile it. Warns if it cannot be compiled."""
    try:
        kernels.module.compile(header, name, device.this_device().compute_capability, source)
    except ValueError as error:
        environment.warn("JAXKERN_DUMP", f"a kernel cannot be compiled: {error}")


@functools.cache
def _problem_here() -> str:
    if not gpu_present():
        return ""
    problem = runtime.problem(kernels.module, device.this_device().compute_capability)
    if problem:
        warnings.warn(f"jaxkern runs through XLA on CUDA: {problem}", stacklevel=2)
    return problem


@functools.cache
def gpu_present() -> bool:
    """Whether JAX could use an NVIDIA GPU here, without starting any of its backends."""
    driver = any(map(os.path.exists, ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")))
    plugin = any(importlib.util.find_spec(f"jax_cuda{v}_plugin") for v in (12, 13, 14))
    return driver and plugin


def warn(module: Module, gpu: bool) -> None:
    """Warns if the module is missing on a machine with a GPU."""
    if module.module is None and gpu:
        warnings.warn(f"jaxkern runs through XLA on CUDA: {module.reason}", stacklevel=4)


def export_checks() -> list:
    """The safety checks that `jax.export` must skip to export programs with this library's kernels.

    Returns:
        A list of `jax.export.DisabledSafetyCheck`.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    >>> exported = jax.export.export(jax.jit(jaxkern.softmax), disabled_checks=jaxkern.export_checks())(shape)

    An artifact for CUDA contains launch lists, which name kernels of this version of the library. It runs only where this
    version is imported; with another version it raises an error that names the version. An artifact is code: trust it like
    code.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in sorted(cuda_targets)]


package.find_installed()
if namesake := package.namesake():
    warnings.warn(namesake, stacklevel=2)
kernels = load("_runtime")
cuda_targets: set[str] = set()
warn(kernels, gpu_present())
