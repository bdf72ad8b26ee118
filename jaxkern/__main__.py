"""`python -m jaxkern` reports what is loaded on this machine, whether results are right, and how fast operations are.

It takes half a minute or less, and explains each table that it prints. Nothing is changed, except for compiled kernels that are
kept in the cache.

  1. What is loaded: versions, devices, the compiler of the kernels, and whether operations run as kernels here or through XLA.
  2. Whether results are right: operations and their gradients against NumPy in float64.
  3. How fast they are: milliseconds beside XLA and, on a GPU, beside a copy of the same bytes.

On a machine with an NVIDIA GPU, the CUDA kernels are checked and timed. Without one, the same operations run through XLA: parts
2 and 3 then check and time XLA's code, and no CUDA kernel runs.

The exit status is 1 if a module that belongs on this machine is not loaded, or if a result is wrong, and 0 otherwise. Include the
output in a bug report.

`python -m jaxkern cache` lists or removes compiled kernels.
"""

import argparse
import pathlib
import platform
import re
import sys

import jax
import jaxlib.version

import jaxkern
from jaxkern._core import cache, compat, device, environment, package, registry, runtime
from jaxkern._doctor.checks import show_checks
from jaxkern._doctor.speed import show_speed


def parse(arguments: list[str]) -> None:
    """Runs the command `cache`, and ends the process unless the arguments request the report."""
    if arguments[:1] == ["cache"]:
        sys.exit(cache.main(arguments[1:]))
    parser = argparse.ArgumentParser(
        prog="python -m jaxkern", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "command", nargs="?", choices=["cache"], help="list or clear the compiled kernels on disk; see `cache --help`"
    )
    parser.add_argument("--version", action="version", version=f"jaxkern {jaxkern.__version__}")
    parser.parse_args(arguments)


if __name__ == "__main__":  # before a backend of JAX starts
    parse(sys.argv[1:])


def driver_version() -> str:
    try:
        text = pathlib.Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "none"
    found = re.search(r"(\d+\.\d+(\.\d+)?)", text)
    return found[1] if found else text.splitlines()[0]


def devices() -> str:
    try:
        return ", ".join(d.device_kind for d in jax.devices())
    except (RuntimeError, AssertionError) as error:  # an assertion where no platform is left
        return f"none, JAX does not start: {' '.join(str(error).split()) or 'no platform that JAX_PLATFORMS names is here'}"


def show_versions() -> None:
    api = compat.ffi_api_version()
    for name, value in (
        ("jaxkern", f"{jaxkern.__version__}, from {package.folders()[0]}"),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("jax", jax.__version__),
        ("jaxlib", f"{jaxlib.version.__version__}, XLA FFI {'.'.join(map(str, api)) if api else 'unknown'}"),
        ("NVIDIA driver", driver_version()),
        ("devices", devices()),
    ):
        print(f"{name:14} {value}")
    for name, value in environment.given().items():
        print(f"{'environment':14} {name}={value}")


def show_runtime() -> bool:
    """Prints the paths of the CUDA compiler, its headers and its cache; False if there is a GPU that it cannot compile for."""
    module = registry.kernels.module
    if module is None:
        print(f"{'CUDA runtime':14} not loaded: {registry.kernels.reason}")
        return not registry.gpu_present()
    version, error = module.compiler()
    library, _, includes = runtime.find_nvrtc()
    print(f"{'CUDA runtime':14} loaded, built for XLA FFI {'.'.join(map(str, module.api_version))}")
    needed = "" if registry.gpu_present() else "; without a GPU it is not needed"
    print(f"{'NVRTC':14} " + (f"not usable: {error}{needed}" if error else f"{version}, {library}"))
    print(f"{'CUDA headers':14} {', '.join(includes) or ('none' if error else 'included in NVRTC')}")
    print(f"{'kernel sources':14} {runtime.kernels_folder()}")
    folder = runtime.cache_folder()
    sizes = [entry.bytes for entry in cache.entries(folder)] if folder else []
    print(f"{'kernel cache':14} " + (f"{folder}, {len(sizes)} files, {sum(sizes) / 2**20:.1f} MB" if folder else "off"))
    if environment.xla_only():
        print(f"{'CUDA kernels':14} XLA runs instead: JAXKERN_BACKEND=xla")
        return True
    problem = registry.gpu_present() and runtime.problem(module, device.this_device().compute_capability)
    if problem:
        print(f"{'CUDA kernels':14} XLA runs instead: {problem}")
    return not problem


def where() -> str:
    """What runs the operations of programs for the default device of this process, and how to change that."""
    platform = jax.default_backend()
    if platform == "gpu":
        refusal = registry.refusal()
        return f"XLA, on a GPU: {refusal}" if refusal else "CUDA kernels, where there is a kernel, and XLA elsewhere"
    if registry.gpu_present():
        return f"XLA, on a {platform}, although there is a GPU: JAX_PLATFORMS excludes it, or JAX could not start CUDA"
    if driver_version() != "none":
        return f'XLA, on a {platform}. The GPU is not used, because JAX is without CUDA: pip install "jax[cuda13]"'
    return f"XLA, on a {platform}: there is no NVIDIA GPU"


NEXT = """
Next: `jaxkern.install()` at the top of a program runs its operations on kernels where they are faster, and
`print(jaxkern.explain(step)(*arguments))` says which ones, without a GPU, too. See docs/getting_started.md; if something
is wrong or slow, docs/troubleshooting.md.
"""


def main() -> int:
    print("== 1. What is loaded\n")
    show_versions()
    if devices().startswith("none"):
        print(
            "\nsomething is wrong: JAX finds no device. JAX_PLATFORMS names platforms that are not here, or JAX is broken"
        )
        return 1
    loaded = show_runtime()
    print(f"{'operations by':14} {where()}")
    print("\n== 2. Whether results are right\n")
    right = show_checks()
    print("\n== 3. How fast operations are")
    show_speed()
    print(NEXT)
    print("all is well" if loaded and right else "something is wrong: see above")
    return 0 if loaded and right else 1


if __name__ == "__main__":
    sys.exit(main())
