"""Reports what is loaded on this machine, whether results are right, and how fast operations are.

`python -m jaxkern` takes half a minute or less. It exits with 1 if a module that belongs on this machine is not loaded, or if
a result is wrong. `python -m jaxkern cache` lists or removes compiled kernels.
"""

import argparse
import pathlib
import platform
import re
import sys

import jax
import jaxlib.version

import jaxkern
from jaxkern._core import cache, compat, device, environment, registry, runtime
from jaxkern._doctor.checks import show_checks
from jaxkern._doctor.speed import show_speed


def parse(arguments: list[str]) -> None:
    """Runs the command `cache`, and ends the process unless the arguments request the report."""
    if arguments[:1] == ["cache"]:
        sys.exit(cache.main(arguments[1:]))
    parser = argparse.ArgumentParser(prog="python -m jaxkern", description=__doc__)
    parser.add_argument("command", nargs="?", choices=["cache"], help="lists or clears the compiled kernels on disk")
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


def show_versions() -> None:
    api = compat.ffi_api_version()
    for name, value in (
        ("jaxkern", jaxkern.__version__),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("jax", jax.__version__),
        ("jaxlib", f"{jaxlib.version.__version__}, XLA FFI {'.'.join(map(str, api)) if api else 'unknown'}"),
        ("NVIDIA driver", driver_version()),
        ("devices", ", ".join(d.device_kind for d in jax.devices())),
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
    print(f"{'CUDA headers':14} {', '.join(includes) or 'included in NVRTC'}")
    print(f"{'kernels':14} {runtime.kernels_folder()}")
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


def main() -> int:
    show_versions()
    loaded = show_runtime()
    right = show_checks()
    show_speed()
    print("\n" + ("all is well" if loaded and right else "something is wrong: see above"))
    return 0 if loaded and right else 1


if __name__ == "__main__":
    sys.exit(main())
