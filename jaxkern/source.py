"""source: the kernels that a function runs on a GPU, and the C++ that is generated for them."""

from __future__ import annotations

import collections.abc
import concurrent.futures
import dataclasses
import textwrap
from collections.abc import Callable

import jax

from jaxkern._core import arrays, cubin, device, launch, registry, runtime, validate

__all__ = ["Kernel", "Source", "source"]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a program, as it is launched.

    Attributes:
        operation: the operation of jaxkern, with the types of its operands and results.
        algorithm: the algorithm that its plan chose; see `jaxkern.algorithms`.
        kernel: the kernel with its template arguments.
        header: the file that defines it, relative to the folder of kernels in the package.
        source: the C++ that is generated from user functions; empty if a kernel of the library has no such function.
        grid: blocks of the launch along x, y and z.
        block: threads of a block along x, y and z.
        cluster: blocks of a cluster.
        waves: if not 0, the grid has at most this many times the blocks that the GPU runs at once.
        shared: bytes of dynamic shared memory of a block.
        static_shared: bytes of static shared memory of a block.
        registers: registers of a thread.
        stack: bytes of local memory of a thread, which holds spilled registers and arrays that are indexed at run time.
        spills: instructions that read or write local memory. 0: no register was spilled.
        problem: why the kernel was not compiled. The four fields above are None then.
    """

    operation: str
    algorithm: str
    kernel: str
    header: str
    source: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: int
    waves: int
    shared: int
    static_shared: int | None = None
    registers: int | None = None
    stack: int | None = None
    spills: int | None = None
    problem: str = ""

    def __str__(self) -> str:
        lines = [f"{self.operation}, {self.algorithm}", *(f"    {line}" for line in self._lines())]
        return "\n".join([*lines, *(["", textwrap.indent(self.source.strip("\n"), "    ")] if self.source else [])])

    def _lines(self):
        size = lambda three: " x ".join(map(str, three[: 1 + max((k for k in range(3) if three[k] > 1), default=0)]))
        yield f"{self.header}: {self.kernel}"
        yield (
            f"grid {size(self.grid)}, block {size(self.block)}"
            + (f", cluster {self.cluster}" if self.cluster > 1 else "")
            + (f", at most {self.waves} times the blocks that run at once" if self.waves else "")
        )
        static = "" if self.static_shared is None else f" and {self.static_shared} static"
        yield f"shared memory {self.shared} bytes{static}"
        if self.problem:
            yield f"not compiled: {self.problem}"
        else:
            yield f"registers {self.registers}, stack {self.stack} bytes, spills {self.spills}"


class Source(collections.abc.Sequence):
    """What `jaxkern.source` found: a sequence of `Kernel`, one for each distinct kernel. As text, it shows all of them.

    Attributes:
        device: the GPU that the plans are made for and the kernels are compiled for, a `jaxkern.algorithms.Device`.
    """

    def __init__(self, kernels: collections.abc.Iterable[Kernel], device: device.Device, problem: str = ""):
        self.kernels, self.device, self._problem = list(kernels), device, problem

    def __getitem__(self, at):
        return self.kernels[at]

    def __len__(self):
        return len(self.kernels)

    def __str__(self) -> str:
        if not self.kernels:
            return f"no kernels of jaxkern: {self._problem or 'XLA runs the whole function'}"
        seen: dict[str, int] = {}
        shown = []
        for k, kernel in enumerate(self.kernels):
            first = seen.setdefault(kernel.source, k)
            if kernel.source and first != k:
                kernel = dataclasses.replace(kernel, source=f"// as in [{first}]")
            shown.append(f"[{k}] {kernel}")
        return "\n\n".join(shown)

    __repr__ = __str__


def source(f: Callable) -> Callable[..., Source]:
    """A function of the arguments of `f` that returns the kernels of jaxkern that `jax.jit(f)` would run on a GPU.

    It runs nothing, and needs no GPU. Plans are made and kernels are compiled for the GPU of this machine, or for an H200 if
    the machine has none. In a block of `jaxkern.accelerate` or `jaxkern.algorithms.force`, it returns the kernels of that block.

    Args:
        f: a function that uses jaxkern: row functions, elementwise functions, messages, scores, or any other operation.

    Returns:
        A function that returns a `Source`, a sequence of records, one for each distinct kernel: its operation with shapes and
        dtypes, its algorithm, its launch, its registers, stack and spills, and the C++ that is generated from user
        functions. Printed, it is a listing. Arrays and `jax.ShapeDtypeStruct` among the arguments, and in pytrees of them,
        are traced; everything else is passed as it is. The sequence is empty if XLA runs the whole function, and the text
        says why if no kernel can be used. Registers are None if NVRTC is not installed. Operations have other kernels, which
        are not listed, for a buffer whose address is not a multiple of 16 bytes, and operations that are split over
        several devices are planned when XLA compiles the program.

    Raises:
        TypeError: `f` is not callable. Errors of `f` itself are raised as they are.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> f = jaxkern.elementwise_kernel(lambda x, y: jnp.tanh(x) * y)
    >>> x = jax.ShapeDtypeStruct((8, 512), jnp.float32)
    >>> found = jaxkern.source(f)(x, x)
    >>> found[0].operation, found[0].header
    ('elementwise_kernel(float32[8,512], float32[8,512]) -> (float32[8,512])', 'elementwise/function.cuh')
    >>> "tanh" in found[0].source
    True
    """
    validate.function("source", "f", f)

    def found(*args, **kwargs) -> Source:
        gpu = device.this_device()
        function, operands = arrays.of_arrays(f, args, kwargs)
        lowered = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        kernels = dict.fromkeys(k for program in launch.programs(lowered) for k in _kernels(program))
        with concurrent.futures.ThreadPoolExecutor() as pool:
            return Source(pool.map(lambda k: _compiled(k, gpu), kernels), gpu, registry.refusal())

    return found


def _kernels(program: str):
    operation, algorithm = launch.title(program)
    for s in launch.variants(program)[0]:
        yield Kernel(
            operation, algorithm, s.name, s.header, s.source, s.grid3(), s.block3(), s.cluster, s.waves, s.shared
        )


def _compiled(kernel: Kernel, gpu: device.Device) -> Kernel:
    """The kernel with the resources that its compilation shows."""
    module, capability = registry.kernels.module, gpu.compute_capability
    assert module is not None  # or there would be no launch lists
    problem = runtime.problem(module, capability)
    if problem:
        return dataclasses.replace(kernel, problem=problem)
    try:
        image, _, _ = module.compile(kernel.header, kernel.kernel, capability, kernel.source)
    except ValueError as error:
        return dataclasses.replace(kernel, problem=str(error))
    used = cubin.usage(image, capability)
    return dataclasses.replace(
        kernel, static_shared=used.shared, registers=used.registers, stack=used.stack, spills=used.local
    )
