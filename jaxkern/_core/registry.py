"""Loading the extension modules and registering their kernels with XLA, once, at import.

Each module (`_cpu`, `_cuda`) has `registrations()`, target name -> capsule, and `api_version`, the
version of the XLA FFI headers that it was built with. A module that is absent or refused leaves a
reason in `status`, and the operations run through XLA instead.
"""

import atexit
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import warnings

import jax
import jax.export
import jaxlib.version

import jaxkern
from jaxkern._core import compat, device, runtime


@dataclasses.dataclass(frozen=True)
class Module:
    """One extension module: loaded (`module` is set), or not, and why (`reason`)."""

    name: str
    platform: str  # as XLA spells it
    module: object = None
    targets: frozenset = frozenset()
    reason: str = ""


def find_installed(package=jaxkern) -> None:
    """Lets a checkout, which Python prefers when it runs there, use the modules of the installed package."""
    try:
        installed = importlib.metadata.distribution("jaxkern")
    except importlib.metadata.PackageNotFoundError:
        return
    folder = pathlib.Path(str(installed.locate_file("jaxkern")))
    if folder.is_dir() and installed.version == package.__version__ and str(folder) not in package.__path__:
        package.__path__.append(str(folder))


def load(name: str, platform: str, api_version=None, targets=True) -> Module:
    """Imports `jaxkern.<name>` and registers its targets; never raises."""
    if importlib.util.find_spec(f"jaxkern.{name}") is None:
        return Module(name, platform, reason=f"jaxkern.{name} was not built")
    try:
        module = importlib.import_module(f"jaxkern.{name}")
    except Exception as error:  # a missing symbol, a wrong glibc: anything the loader says
        return Module(name, platform, reason=f"jaxkern.{name} does not load: {error}")
    api_version = api_version or compat.ffi_api_version()
    if api_version is not None and tuple(module.api_version) > tuple(api_version):
        built, accepted = (".".join(map(str, v)) for v in (module.api_version, api_version))
        return Module(
            name, platform,
            reason=f"jaxkern.{name} was built for XLA FFI {built}, and jaxlib {jaxlib.version.__version__} "
            f"accepts up to {accepted}: upgrade jaxlib, or rebuild jaxkern against this one")
    if not targets:
        return Module(name, platform, module)
    try:
        targets = module.registrations()
        for target, capsule in targets.items():
            jax.ffi.register_ffi_target(target, capsule, platform=platform)
            jax.ffi.register_ffi_target_as_batch_partitionable(target)
    except Exception as error:
        return Module(name, platform, reason=f"jaxkern.{name} does not register: {error}")
    return Module(name, platform, module, frozenset(targets))


def load_runtime() -> Module:
    """Imports `jaxkern._runtime`, which compiles and launches CUDA kernels, and says where things lie; never raises."""
    loaded = load("_runtime", "CUDA", targets=False)
    if loaded.module is not None:
        try:
            runtime.configure(loaded.module)
        except Exception as error:  # headers that are not there, an environment variable that is no number
            return dataclasses.replace(loaded, module=None, reason=f"jaxkern._runtime cannot be set up: {error}")
        atexit.register(loaded.module.stop_prefetching)
    return loaded


def register_cuda_target(name: str) -> None:
    """Makes `name` a custom call on CUDA that runs launch lists."""
    if kernels.module is not None and name not in cuda_targets:
        jax.ffi.register_ffi_target(name, kernels.module.stages(), platform="CUDA")
        cuda_targets.add(name)


def kernels_run() -> bool:
    """Whether a program for CUDA may hold our kernels.

    Not where the GPU of this process is one that they cannot be compiled for. A program that is made without a GPU, to be
    exported, holds them.
    """
    return kernels.module is not None and not _problem_here()


def prefetch(program: str) -> None:
    """Begins to compile the kernels of a launch list for the GPU of this process, if it has one."""
    if gpu_present():
        kernels.module.prefetch(program, device.this_device().compute_capability)


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


def warn(modules, gpu: bool) -> None:
    """One warning for each module whose absence a user would want to know of."""
    for module in modules:
        absent = module.reason.endswith("was not built")
        # No CUDA module on a machine without a GPU is as it should be.
        wanted = gpu if module.platform == "CUDA" else not absent
        if module.module is None and wanted:
            warnings.warn(f"jaxkern runs through XLA on {module.platform}: {module.reason}", stacklevel=4)


def export_checks() -> list:
    """What `jax.export` must be told of this library's kernels: that their names and meaning will last.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    >>> exported = jax.export.export(jax.jit(jaxkern.softmax), disabled_checks=jaxkern.export_checks())(shape)

    A program that holds such a kernel runs where this library is imported, in the version that exported it or a
    later one. For a platform whose module is not loaded here, the program holds XLA's own operations instead.
    """
    targets = cuda_targets.union(*(module.targets for module in status.values()))
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in sorted(targets)]


find_installed()
# By the platform name that lowering rules use.
kernels = load_runtime()
cuda_targets: set[str] = set()
status = {"cpu": load("_cpu", "cpu"), "cuda": load("_cuda", "CUDA")}
warn(status.values(), gpu_present())
