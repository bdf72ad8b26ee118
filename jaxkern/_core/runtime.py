"""Configuration of the CUDA runtime: where NVRTC, the headers and the cache are, and whether they can be used.

NVRTC comes with `jax[cuda13]` or `jax[cuda12]`, or with a CUDA toolkit; nothing here needs a GPU. environment.py lists the
variables that set the cache.
"""

import contextlib
import functools
import glob
import hashlib
import importlib.util
import os
import pathlib
import stat
import tempfile

from jaxkern._core import environment, package


def kernels_folder() -> pathlib.Path:
    """The folder of kernel headers, in the checkout if this is one, else in the installed package."""
    checkout = pathlib.Path(__file__).resolve().parents[2] / "ffi" / "kernels"
    if checkout.is_dir():
        return checkout
    return next(p for p in (pathlib.Path(folder) / "kernels" for folder in package.folders()) if p.is_dir())


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


_CACHE_MB = 512
_OLDEST = 80  # the compute capability that kernels are written for: bfloat16 arithmetic, asynchronous copies


def cache_folder() -> str:
    """The folder of compiled kernels; empty if kernels are not kept on disk."""
    given = environment.read("JAXKERN_CACHE_DIR")
    if given is not None:
        folder = _absolute(given) if given else ""
        if not _is_utf8(folder):
            environment.warn("JAXKERN_CACHE_DIR", "the name is not UTF-8; kernels are not kept there")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = os.path.join(base, "jaxkern") if os.path.isabs(base) else ""
    return folder if _is_utf8(folder) else ""


def cache_bytes() -> int:
    """The size limit of the cache folder."""
    text = environment.read("JAXKERN_CACHE_MB")
    if text is None:
        return _CACHE_MB << 20
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < 1 << 40:
        environment.warn("JAXKERN_CACHE_MB", f"it must be a number of MiB; the default, {_CACHE_MB}, is used")
        limit = _CACHE_MB
    return int(limit * 2**20)


def _problem_with(folder: str, mode: int) -> str:
    """Why files cannot be written to a folder, which is created if it is missing; empty if they can."""
    if not _is_utf8(folder):
        return "the name is not UTF-8"
    try:
        os.makedirs(folder, mode, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _absolute(folder: str) -> str:
    with contextlib.suppress(OSError):  # the working directory is gone
        return os.path.abspath(os.path.expanduser(folder))
    return folder


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:  # Python keeps bytes that are not UTF-8 as surrogates
        return False
    return True


def _trusted(folder: str) -> bool:
    """Whether the folder belongs to this user, and nobody else may write to it; the runtime uses no other."""
    status = os.stat(folder)
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _usable_cache() -> str:
    """`cache_folder()`. Creates a folder that JAXKERN_CACHE_DIR names, and warns if it cannot be used."""
    folder = cache_folder()
    if folder and environment.read("JAXKERN_CACHE_DIR"):
        problem = _problem_with(folder, 0o700)
        if not problem and not _trusted(folder):
            problem = "it belongs to another user, or others may write to it"
        if problem:
            environment.warn("JAXKERN_CACHE_DIR", f"{problem}; kernels are not kept there")
    return folder


@functools.cache  # at import
def dump_folder() -> str:
    """The folder that every compiled kernel is written to; empty for none. Warns if JAXKERN_DUMP cannot be used."""
    given = environment.read("JAXKERN_DUMP")
    if not given:
        return ""
    folder = _absolute(given)
    problem = _problem_with(folder, 0o777)
    if problem:
        environment.warn("JAXKERN_DUMP", f"{problem}; kernels are not written there")
    return "" if problem else folder


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
    module.configure(
        version=package.__version__,
        nvrtc=nvrtc,
        builtins=builtins,
        includes=[str(folder), *includes],
        headers_hash=_headers_hash(folder),
        dump=dump_folder(),
        cache_folder=_usable_cache(),
        cache_bytes=cache_bytes(),
    )


@functools.cache
def problem(module, capability: int) -> str:
    """Why kernels cannot be compiled for GPUs of this compute capability; empty if they can."""
    if capability < _OLDEST:
        return f"kernels need a GPU of compute capability {_OLDEST / 10} or later, and this one has {capability / 10}"
    version, error = module.compiler()
    if error:
        return f"NVRTC cannot be used ({error}); it comes with jax[cuda13]"
    if not module.supports(capability):
        return f"NVRTC {version} does not know GPUs of compute capability {capability / 10}: upgrade nvidia-cuda-nvrtc"
    return ""
