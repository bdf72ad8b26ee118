"""Runs launch plans on the CPU: kernels compiled by the host's C++ compiler, a fiber for each thread of a block.

Kernels may use no inline assembly except the assembly of common/pack.cuh, must declare dynamic shared memory as norm/norm.cuh does,
and must use clusters of more than one block as rows/exchange.cuh does. This checks the arithmetic of indices and that nothing is read
or written out of bounds (buffers end at guard pages); it says nothing of races between warps, nor of the compiler for GPUs.
"""

import ctypes
import functools
import hashlib
import mmap
import pathlib
import shutil
import struct as packing
import subprocess
import tempfile

import numpy as np
from plans import layout

from jaxkern._core import launch, runtime

COMPILER = shutil.which("g++")
FUSED = ["-O2", "-march=native", "-ffp-contract=fast", "-fno-strict-aliasing"]
_FORMATS = {"u8": "B", "i32": "i", "u32": "I", "f32": "f", "i64": "q", "u64": "Q", "f64": "d"}


_FOLDER = tempfile.TemporaryDirectory(prefix="emulated")  # of libraries and headers, until the process ends


@functools.cache
def has_fused() -> bool:
    """Whether the compiler makes fused multiply-adds for this processor."""
    if COMPILER is None:
        return False
    macros = subprocess.run([COMPILER, *FUSED, "-dM", "-E", "-x", "c++", "-"], input=b"", capture_output=True).stdout
    return b"__FP_FAST_FMAF " in macros


@functools.cache
def _includes(flags):
    """Folders of headers; the first has cuda.h precompiled, which takes half the time of a small library."""
    here, kernels = pathlib.Path(__file__).parent, runtime.kernels_folder()
    folder = pathlib.Path(tempfile.mkdtemp(dir=_FOLDER.name))
    out = str(folder / "cuda.h.gch")
    subprocess.check_call([COMPILER, *flags, f"-I{here}", "-x", "c++-header", "-o", out, str(here / "cuda.h")])
    return tuple(f"-I{i}" for i in (folder, here, kernels))


_ENTRIES = {}  # ((header, name, source), fused) -> the function that runs a kernel


def _steps(plan, unaligned):
    return plan.unaligned if unaligned and plan.unaligned is not None else plan.launches


def _compile(steps, fused=False):
    """Compiles the kernels of these steps that were not compiled before, in one library."""
    kernels = [(s.header, s.name, s.source) for s in steps if isinstance(s, launch.Launch)]
    kernels = [k for k in dict.fromkeys(kernels) if (k, fused) not in _ENTRIES]
    if not kernels:
        return
    text = ['#include "cuda.h"']
    text += [f'#include "{header}"' for header in sorted({k[0] for k in kernels})]
    for n, (_, name, source) in enumerate(kernels):
        text.append(f"namespace jaxkern {{ namespace own{n} {{\n{source}\n")
        text.append(
            f'extern "C" void run{n}(const void* a, unsigned x, unsigned y, unsigned t, unsigned c) '
            f"{{ emulated::Run(&{name}, a, x, y, t, c); }} }} }}"
        )
    flags = FUSED if fused else ["-O0", "-ffp-contract=off"]
    # Libraries have functors of the same name, and must not share the shared memory of a kernel.
    flags = ("-std=c++20", *flags, "-w", "-fpermissive", "-fPIC", "-fno-gnu-unique")
    path = pathlib.Path(_FOLDER.name) / hashlib.sha256("\n".join([*flags, *text]).encode()).hexdigest()[:16]
    path.with_suffix(".cc").write_text("\n".join(text))
    subprocess.check_call(
        [COMPILER, *flags, "-shared", *_includes(flags)]
        + ["-o", str(path.with_suffix(".so")), str(path.with_suffix(".cc"))]
    )
    library = ctypes.CDLL(str(path.with_suffix(".so")))
    _ENTRIES.update({(kernel, fused): getattr(library, f"run{n}") for n, kernel in enumerate(kernels)})


def prepare(*plans) -> None:
    """Compiles the kernels of plans, on aligned and unaligned buffers, together: half the time of a library for each."""
    _compile([step for plan in plans for unaligned in (False, True) for step in _steps(plan, unaligned)])


class _Guarded:
    """A copy of an array that ends where a page begins that nobody may touch."""

    def __init__(self, array):
        array = np.asarray(array, order="C")  # ascontiguousarray gives a scalar a dimension
        page = mmap.PAGESIZE
        size = -(-max(array.nbytes, 1) // page) * page
        self._map = mmap.mmap(-1, size + page)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(base + size), ctypes.c_size_t(page), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
        self.address = base + size - -(-array.nbytes // 16) * 16
        self.array = np.frombuffer(self._map, np.uint8, array.nbytes, self.address - base).view(array.dtype)
        self.array = self.array.reshape(array.shape)
        self.array[...] = array


def _bytes(arg, address) -> bytes:
    if isinstance(arg, launch.Buffer):
        return packing.pack("Q", address(arg))
    if isinstance(arg, launch.Scalar):
        return packing.pack(_FORMATS[arg.type], arg.value)
    out = b""
    for member in arg.members:
        out += bytes(-len(out) % layout(member)[1]) + _bytes(member, address)
    return out + bytes(-len(out) % layout(arg)[1])


def run(plan: launch.Plan, operands, results, unaligned=False, fused=False, aliases=()):
    """The results, arrays of these (shape, dtype), of a plan on NumPy arrays.

    aliases: pairs of an operand and the result that has its memory.
    fused: products and sums are contracted to multiply-adds, as NVRTC does, if `has_fused()`.
    """
    steps = _steps(plan, unaligned)
    _compile(steps, fused)
    poison = lambda shape, dtype: np.frombuffer(
        b"\xa5" * int(np.prod(shape) * np.dtype(dtype).itemsize), dtype
    ).reshape(shape)
    buffers = {
        "operand": [_Guarded(x) for x in operands],
        "result": [_Guarded(poison(shape, dtype)) for shape, dtype in results],
        "scratch": [_Guarded(np.full(max(plan.scratch, 1), 0xA5, np.uint8))],
    }
    for operand, result in aliases:
        buffers["operand"][operand] = buffers["result"][result]
        buffers["result"][result].array[...] = operands[operand]
    for step in steps:
        if isinstance(step, launch.Memset):
            at = step.buffer.offset
            buffers[step.buffer.kind][step.buffer.index].array.reshape(-1).view(np.uint8)[at : at + step.bytes] = (
                step.value
            )
            continue
        (arg,) = step.args
        data = _bytes(arg, lambda b: buffers[b.kind][b.index].address + b.offset)
        x, y, _ = step.grid3()
        entry = _ENTRIES[(step.header, step.name, step.source), fused]
        entry(ctypes.c_char_p(data), x, y, step.block3()[0], step.cluster)
    return [np.array(b.array) for b in buffers["result"]]
