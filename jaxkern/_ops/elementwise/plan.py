"""Which kernel of ffi/kernels/elementwise runs an elementwise call, and its grid.

flat       all arrays are contiguous or scalars
strided    some arrays are broadcast, or are halves of an array
"""

import functools
import itertools
import math
import typing

import numpy as np

from jaxkern._core import launch
from jaxkern._core.algorithms import pick
from jaxkern._core.define import ceil_div, cpp_bool, cuda_type
from jaxkern._core.launch import Launch, Plan
from jaxkern._core.params import Params
from jaxkern._ops.elementwise import table, tuning

ALGORITHMS = ("flat", "strided")
HEADER = "elementwise/elementwise.cuh"
FLAT_ARGS, STRIDED_ARGS = Params(HEADER, "FlatArgs"), Params(HEADER, "StridedArgs")
GROUPS = 3  # runs of neighbouring dimensions that each array either broadcasts over or not

_ARITHMETIC = {"float32": "Single", "float64": "Double", "int32": "Integer"}


@functools.cache
def _kernels():
    return {kernel.key: kernel for kernel in table.kernels()}


def plan(name, device, operands, results, *, split=-1, algorithm="auto", **_):
    """The launches of operation `name` (a row of the table, or with _grad its derivative), or None without a kernel."""
    views = []
    for kind, avals in ((launch.operand, operands), (launch.result, results)):
        for k, aval in enumerate(avals):
            # The operand that holds two halves, and a result that holds their gradients.
            halved = split >= 0 and k == 0 and aval.shape == operands[0].shape
            views.append([View.of(kind(k), aval, split if halved else -1, half) for half in range(1 + halved)])
    ins, outs = (list(itertools.chain(*v)) for v in (views[: len(operands)], views[len(operands) :]))
    kernel = _kernels().get(f"{name}({','.join(v.dtype.name for v in ins)})->{','.join(v.dtype.name for v in outs)}")
    if kernel is None:
        return None
    arrays, parameters = ins[: len(ins) - kernel.parameters], ins[len(ins) - kernel.parameters :]
    sizes, strides = collapse([*arrays, *outs])
    if len(sizes) > GROUPS or any(math.prod(p.shape) != 1 for p in parameters):
        return None
    arithmetic = "Coarse" if kernel.coarse else _ARITHMETIC[kernel.computing]
    return elementwise(
        device, f"{kernel.functor}<{arithmetic}>", arrays, outs, parameters, sizes, strides, algorithm=algorithm
    )


def elementwise(device, functor, arrays, outs, parameters, sizes, strides, header=HEADER, source="", algorithm="auto"):
    """The launch of a functor, over dimensions that `collapse` returned; None if there is no kernel for them.

    arrays, outs, parameters: views. source: the definition of the functor, if `header` does not have it.
    """
    call = _Call(device, functor, arrays, outs, parameters, sizes, strides, header, source)
    return call.flat() if pick("elementwise", algorithm, call) == "flat" else call.strided()


class View:
    """An array or a half of one: its buffer, and its strides in elements along the dimensions of the result."""

    def __init__(self, buffer, dtype, shape, strides):
        self.buffer, self.dtype, self.shape, self.strides = buffer, dtype, shape, strides

    @classmethod
    def of(cls, buffer, aval, split, half):
        shape = list(aval.shape)
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        if split >= 0:
            shape[split] //= 2
            buffer = buffer._replace(offset=half * shape[split] * strides[split] * aval.dtype.itemsize)
        return cls(buffer, aval.dtype, shape, strides)

    @property
    def cuda_type(self):
        return "Pred" if self.dtype == np.bool_ else cuda_type(self.dtype)

    @property
    def bytes(self):
        return self.dtype.itemsize


def collapse(views):
    """(sizes, strides of each view), outermost first, with dimensions merged if all views allow it.

    The innermost strides are 0 or 1: a dimension of size 1 is added if an array has gaps between its elements.
    """
    full = views[-1].shape
    strides = [[0 if n == 1 and m != 1 else s for n, m, s in zip(v.shape, full, v.strides)] for v in views]
    sizes, merged = [], []  # innermost first
    for d in reversed(range(len(full))):
        if full[d] == 1:
            continue
        own = [s[d] for s in strides]
        if sizes and own == [s * sizes[-1] for s in merged[-1]]:
            sizes[-1] *= full[d]
        else:
            sizes.append(full[d])
            merged.append(own)
    if not sizes or any(s > 1 for s in merged[0]):
        sizes, merged = [1, *sizes], [[1] * len(views), *merged]
    return sizes[::-1], [[group[v] for group in reversed(merged)] for v in range(len(views))]


class Problem(typing.NamedTuple):
    """Contiguous operands of equal rank, which broadcast against each other."""

    shapes: tuple[tuple[int, ...], ...]

    def is_flat(self) -> bool:
        full = np.broadcast_shapes(*self.shapes)
        return all(shape == full or math.prod(shape) == 1 for shape in self.shapes)


def fits(algorithm: str, problem, device=None) -> bool:
    """Whether the algorithm can run the problem, a `Problem` or a call of a kernel."""
    return algorithm == "strided" or problem.is_flat()


def choose(problem, device=None) -> str:
    return "flat" if problem.is_flat() else "strided"


class _Call:
    def __init__(self, device, functor, arrays, outs, parameters, sizes, strides, header, source):
        self.header, self.source = header, source
        self.device, self.arrays, self.outs = device, arrays, outs
        self.groups = len(sizes)
        pad = GROUPS - len(sizes)
        self.sizes = [1] * pad + sizes
        self.strides = [[0] * pad + s for s in strides]  # of arrays, then of outs
        self.count = math.prod(sizes)
        widest = max(v.bytes for v in (*arrays, *outs))
        self.pack = 16 // widest
        self.unroll = 1 if widest == 8 or len(arrays) > 2 else 2
        moved = sum(v.bytes * self.count for v, s in zip((*arrays, *outs), self.strides) if any(s))
        self.exceeds_l2 = moved > device.l2_bytes
        ins, results = (", ".join(v.cuda_type for v in vs) for vs in (arrays, outs))
        self.template = f"Elementwise<{functor}, {len(parameters)}, Types<{results}>, Types<{ins}>>"
        buffers = lambda views: [v.buffer for v in views]
        self.pointers = dict(
            **{"in": buffers(arrays)}, out=buffers(outs), parameter=buffers(parameters) or [launch.null]
        )

    def __repr__(self):
        return f"operands of shapes {', '.join(str(tuple(v.shape)) for v in self.arrays)}"

    def is_flat(self):
        """Whether every operand is a scalar or contiguous, every result is contiguous, and all begin on 16 bytes."""
        aligned = all(v.buffer.offset % 16 == 0 for v in (*self.arrays, *self.outs))
        outs = self.strides[len(self.arrays) :]
        return (
            aligned
            and self.groups == 1
            and all(s[-1] == 1 for s in outs)
            and all(s[-1] in (0, 1) for s in self.strides)
        )

    def grid(self, threads):
        """(blocks, threads of one): a block for every tuning.THREADS threads that are wanted, up to many waves.

        Measured, blocks that take one tile and end are 4% faster than one wave that loops.
        """
        block = (
            tuning.THREADS // 2 if threads <= self.device.sm_count * tuning.THREADS else tuning.THREADS
        )  # little work: on more multiprocessors
        return min(ceil_div(threads, block), self.device.sm_count * tuning.BLOCKS * tuning.MOST_WAVES), block

    def flat(self):
        scalars = sum(1 << k for k, s in enumerate(self.strides[: len(self.arrays)]) if not any(s))
        packs = self.count // self.pack
        tile = self.unroll * tuning.THREADS
        tiles = packs // tile if packs >= tuning.TILE_WAVES * tuning.BLOCKS * self.device.sm_count * tile else 0

        def step(packs, threads, in_tiles):
            blocks, block = self.grid(threads)
            args = FLAT_ARGS(**self.pointers, count=self.count, packs=packs, exceeds_l2=self.exceeds_l2)
            return Launch(
                self.header,
                f"FlatKernel<{self.template}, {scalars}, {cpp_bool(in_tiles)}>",
                [args],
                blocks,
                block,
                source=self.source,
            )

        aligned = step(tiles * tile, tiles * tuning.THREADS, True) if tiles else step(packs, packs or self.count, False)
        return Plan("flat", (aligned,), unaligned=(step(0, self.count, False),))

    def strided(self):
        views = [*zip((*self.arrays, *self.outs), self.strides)]
        outer, middle, inner = self.sizes
        if max(self.sizes) >= 1 << 32:
            return None
        in_packs = inner % self.pack == 0 and all(
            s[2] == 0
            or (s[0] % self.pack == 0 and s[1] % self.pack == 0 and v.buffer.offset % (self.pack * v.bytes) == 0)
            for v, s in views
        )
        # Operands that are the same along a row, and those that all rows of the middle dimension share.
        columns, shared = (
            sum((s[d] == 0) << k for k, s in enumerate(self.strides[: len(self.arrays)])) for d in (2, 1)
        )

        def step(in_packs):
            rows = self.unroll if in_packs else 1
            runs, units = ceil_div(middle, rows), inner // (self.pack if in_packs else 1)
            count = outer * runs * units
            blocks, block = self.grid(count)
            strides = [s[:2] for s in self.strides]
            args = STRIDED_ARGS(
                **self.pointers,
                in_stride=itertools.chain(*strides[: len(self.arrays)]),
                out_stride=itertools.chain(*strides[len(self.arrays) :]),
                count=count,
                inner=units,
                middle=runs,
                middle_size=middle,
                exceeds_l2=self.exceeds_l2,
            )
            name = f"StridedKernel<{self.template}, {cpp_bool(in_packs)}, {columns}, {shared}>"
            return Launch(self.header, name, [args], blocks, block, source=self.source)

        return Plan("strided", (step(in_packs),), unaligned=(step(False),) if in_packs else None)
