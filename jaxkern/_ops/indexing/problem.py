"""What the launch lists of index_add and the segment reductions are made for: a problem, its runs of at most 2^31
positions, and the arguments of their kernels.

Kernels see x and out as [batch, outer, rows, inner], source as [batch, outer, count, inner], index as [batch, count].
"""

import dataclasses
import typing

import numpy as np

from jaxkern._core import launch
from jaxkern._core.define import ceil_div, cuda_type
from jaxkern._core.launch import i64, null, u64
from jaxkern._core.params import Params
from jaxkern._ops.indexing.sort import INDICES, MAX_KEYS, MAX_POSITIONS, Indices, Part

REDUCTIONS = {
    "index_add": "kSum",
    "segment_sum": "kSum",
    "segment_max": "kMax",
    "segment_min": "kMin",
    "segment_prod": "kProd",
}
WARP = 32
INDEX_RUN, FILL_SHAPE = Params("indexing/run.cuh", "IndexRun", INDICES), Params("indexing/run.cuh", "FillShape")


class Problem(typing.NamedTuple):
    """The properties of a call that its plan depends on."""

    rows: int
    count: int
    inner: int = 1
    dtype: np.dtype = np.dtype("float32")
    index_dtype: np.dtype = np.dtype("int32")
    op: str = "index_add"
    batch: int = 1
    outer: int = 1
    sorted: bool = False
    unique: bool = False
    deterministic: bool = True
    wrap: bool = False
    clip: bool = False
    source_batched: bool = True  # False: source is [1, outer, count, inner]

    @property
    def size(self) -> int:
        return self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return self.inner * self.size

    @property
    def sum_bytes(self) -> int:
        """Bytes of an element of the sum."""
        return max(self.size, 4)

    @property
    def adds(self) -> bool:
        return self.op == "index_add"

    @property
    def reduction(self) -> str:
        return f"jaxkern::Reduction::{REDUCTIONS[self.op]}"

    @property
    def positions(self) -> int:
        """The largest number of positions of a run."""
        return min(self.batch * self.count, MAX_POSITIONS)


# ---- runs


class Buffers(typing.NamedTuple):
    index: launch.Buffer
    source: launch.Buffer
    alpha: launch.Buffer | launch.Scalar
    out: launch.Buffer
    keys: launch.Buffer | None = None  # of the given order
    order: launch.Buffer | None = None
    x: launch.Buffer | None = None  # of an index_add whose result does not take the memory of x


def parts(p: Problem) -> list[Part]:
    """The runs of a call: whole slices of the batch if 32 bits can number them, else parts of the rows and of the updates
    of one slice."""
    rows, count = min(p.rows, MAX_KEYS - 2), min(p.count, MAX_POSITIONS)
    batch = min(p.batch, max(1, min((MAX_KEYS - 2) // p.rows, MAX_POSITIONS // p.count // p.outer)))
    return [
        Part(b, min(batch, p.batch - b), r, min(rows, p.rows - r), k, min(count, p.count - k))
        for b in range(0, p.batch, batch)
        for r in range(0, p.rows, rows)
        for k in range(0, p.count, count)
    ]


def moved(buffer, offset):
    """`buffer`, beginning `offset` bytes later."""
    return buffer._replace(offset=buffer.offset + offset)


@dataclasses.dataclass(frozen=True)
class Run:
    """IndexRun of ffi/kernels/indexing/run.cuh."""

    indices: Indices
    source: launch.Buffer
    alpha: typing.Any
    out: launch.Buffer
    base: launch.Buffer
    outer: int
    inner: int
    source_stride: int
    out_stride: int
    source_extra: int
    out_extra: int
    reads_out: bool
    keys: typing.Any = null
    order: typing.Any = null
    pairs: typing.Any = null
    keys_out: typing.Any = null
    order_out: typing.Any = null
    chunks: typing.Any = null
    partials: typing.Any = null
    chunk: int = 0
    sorted_bits: int = 0
    sorted_keys: bool = False

    def struct(self) -> launch.Struct:
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        indices = own.pop("indices")
        return INDEX_RUN(**indices.members(), **own, by_rows=indices.part.rows)

    def replace(self, **fields) -> "Run":
        return dataclasses.replace(self, **fields)


def run_of(p: Problem, part: Part, buffers: Buffers, reads_out: bool, base: launch.Buffer | None = None) -> Run:
    """base: what holds the old values of the rows, if the result does not."""
    source_batch = p.outer * p.count if p.source_batched else 0
    index = moved(buffers.index, (part.b * p.count + part.position) * p.index_dtype.itemsize)
    return Run(
        Indices(index, p.index_dtype, p.rows, p.wrap, p.clip, part),
        source=moved(buffers.source, (part.b * source_batch + part.position) * p.row_bytes),
        alpha=buffers.alpha,
        out=moved(buffers.out, part.b * p.outer * p.rows * p.row_bytes),
        base=moved(base or buffers.out, part.b * p.outer * p.rows * p.row_bytes),
        outer=p.outer,
        inner=p.inner,
        source_stride=p.count,
        out_stride=p.rows,
        source_extra=source_batch - p.count if part.batch > 1 else 0,
        out_extra=(p.outer - 1) * p.rows if part.batch > 1 else 0,
        reads_out=reads_out,
    )


# ---- what all kernels share


def kernel(header, name, args, blocks, threads, shared=0):
    return launch.Launch(f"indexing/{header}.cuh", name, args, grid=blocks, block=threads, shared=shared)


def vector_of(p, aligned) -> int:
    """The number of elements of a row that one access reads or writes."""
    if aligned and p.row_bytes % 16 == 0:
        return 16 // p.size
    return 2 if aligned and p.size == 2 and p.row_bytes % 4 == 0 else 1


def identity(p) -> int:
    """The result of a segment without elements as bits, repeated to 8 bytes."""
    if p.op == "segment_sum":
        return 0
    if p.op == "segment_prod":
        one = np.ones(1, p.dtype).tobytes()
        return int.from_bytes(one * (8 // p.size), "little")
    least = p.op == "segment_max"
    bits = {
        "float16": (0xFC00, 0x7C00),
        "bfloat16": (0xFF80, 0x7F80),
        "float32": (0xFF800000, 0x7F800000),
        "float64": (0xFFF0 << 48, 0x7FF0 << 48),
        "int32": (1 << 31, (1 << 31) - 1),
        "int64": (1 << 63, (1 << 63) - 1),
        "uint32": (0, (1 << 32) - 1),
    }[p.dtype.name][not least]
    return int.from_bytes(bits.to_bytes(p.size, "little") * (8 // p.size), "little")


def filled(buffer, size, pattern):
    return kernel("fill", "Fill<256, 4>", [buffer, i64(size), u64(pattern)], ceil_div(size, 256 * 4 * 16), 256)


def copied(p, buffers, aligned):
    """Copies x to the result."""
    n, elements = 16 // p.size if aligned else 1, p.batch * p.outer * p.rows * p.inner
    args = [buffers.x, buffers.out, i64(elements)]
    return kernel("copy", f"Copy<{cuda_type(p.dtype)}, {n}>", args, ceil_div(max(elements // n, n), 256 * 4), 256)


def power_of_two(n, least, most) -> int:
    """The largest power of two up to n, within [least, most], which are powers of two."""
    return min(max(1 << max(n, 1).bit_length() - 1, least), most)


def fill_shape(keys, outer, vectors, size):
    """(FillShape, blocks) for rows of `vectors` of `size` bytes."""
    tile, most = 64 * 1024, 1024
    column_tile = tile // size if vectors * size > 2 * tile else vectors
    column_tiles, rows = ceil_div(vectors, column_tile), min(max(tile // (column_tile * size), 1), most)
    row_tiles = ceil_div(keys, rows)
    blocks = row_tiles * column_tiles * outer
    shape = FILL_SHAPE(
        rows=rows,
        vectors=column_tile,
        column_tiles=column_tiles,
        row_tiles=row_tiles,
        by_vectors=column_tile,
        blocks=blocks,
    )
    return shape, blocks
