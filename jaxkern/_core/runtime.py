"""Configuration of the CUDA runtime: where NVRTC, the headers and the cache are, and whether they can be used.

NVRTC comes with `jax[cuda13]` or `jax[cuda12]`, or with a CUDA toolkit; nothing here needs a GPU. environment.py lists the
variables that set the cache.
"""

import functools
import glob
import hashlib
import importlib.util
import os
import pathlib

import jaxkern
from jaxkern._core import environment


def kernels_folder() -> pathlib.Path:
    """The folder of kernel headers: of the checkout if this is one, else of the installed package."""
    checkout = pathlib.Path(__file__).resolve().parents[2] / "ffi" / "kernels"
    if checkout.is_dir():
        return checkout
    return next(p for p in (pathlib.Path(folder) / "kernels" for folder in jaxkern.__path__) if p.is_dir())


def _nvidia_folders():
    """(library folder, include folders) of NVIDIA's packages from PyPI, newest CUDA release first."""
    spec = importlib.util.find_spec("nvidia")
    for site in spec.submodule_search_locations if spec else ():
        for root in sorted(glob.glob(os.path.join(site, "cu[0-9]*")), reverse=True):
            yield os.path.join(root, "lib"), [os.path.join(root, "include")]
        yield (
            os.path.join(site, "cuda_nvrtc", "lib"),
            [os.path.join(site, "cuda_runtime", "include"), os.path.join(site, "cuda_nvcc", "include")],
        )


def _toolkit_folders():
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if root:
            yield os.path.join(root, "lib64"), [os.path.join(root, "include")]


@functools.cache
def find_nvrtc() -> tuple[str, str, tuple[str, ...]]:
    """(libnvrtc, its builtins, folders of CUDA headers); relies on the system's search path if nothing is found."""
    for lib, includes in (*_nvidia_folders(), *_toolkit_folders()):
        found = sorted(p for p in glob.glob(os.path.join(lib, "libnvrtc.so.*")) if "alt" not in p)
        if found and any(os.path.exists(os.path.join(i, "cuda_fp16.h")) for i in includes):
            builtins = sorted(p for p in glob.glob(os.path.join(lib, "libnvrtc-builtins.so.*")) if "alt" not in p)
            return found[0], (builtins or [""])[-1], tuple(i for i in includes if os.path.isdir(i))
    return "libnvrtc.so", "", ()


def cache_folder() -> str:
    folder = environment.read("JAXKERN_CACHE_DIR")
    if folder is not None:
        return os.path.abspath(os.path.expanduser(folder)) if folder else ""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(base, "jaxkern") if os.path.isabs(base) else ""


def cache_bytes() -> int:
    """The size limit of the cache folder. Raises a ValueError if the variable is not a number."""
    limit = environment.read("JAXKERN_CACHE_MB")
    return int(float("512" if limit is None else limit) * 2**20)


def _headers_hash(folder: pathlib.Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def configure(module) -> None:
    """Passes the locations and limits to the extension module `jaxkern._runtime`."""
    folder = kernels_folder()
    nvrtc, builtins, includes = find_nvrtc()
    dump = environment.read("JAXKERN_DUMP") or ""
    if dump:
        os.makedirs(dump, exist_ok=True)
    module.configure(
        version=jaxkern.__version__,
        nvrtc=nvrtc,
        builtins=builtins,
        includes=[str(folder), *includes],
        headers_hash=_headers_hash(folder),
        dump=dump,
        cache_folder=cache_folder(),
        cache_bytes=cache_bytes(),
    )


@functools.cache
def problem(module, capability: int) -> str:
    """Why kernels cannot be compiled for GPUs of this compute capability; empty if they can."""
    version, error = module.compiler()
    if error:
        return f"NVRTC cannot be used ({error}); it comes with jax[cuda13]"
    if not module.supports(capability):
        return f"NVRTC {version} does not know GPUs of compute capability {capability / 10}: upgrade nvidia-cuda-nvrtc"
    return ""
