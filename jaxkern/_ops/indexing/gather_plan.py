"""The launch list of index_select on CUDA. There is one algorithm: see ffi/kernels/indexing/gather.cuh."""

import typing

import numpy as np

from jaxkern._core import launch
from jaxkern._core.define import ceil_div, cuda_type, size_of
from jaxkern._core.params import Params
from jaxkern._ops.indexing import tuning

HEADER = "indexing/gather.cuh"
SHAPE = Params(HEADER, "GatherShape")
VECTORS = {16: "uint4", 8: "uint2", 4: "uint32_t", 2: "uint16_t"}

# The element that an index out of range selects, as bits: NaN, the lowest integer, or the greatest unsigned one.
FILL = {
    "float16": 0x7E00,
    "bfloat16": 0x7FC0,
    "float32": 0x7FC00000,
    "float64": 0x7FF8000000000000,
    "int32": 0x80000000,
    "int64": 0x8000000000000000,
    "uint32": 0xFFFFFFFF,
}


ALGORITHMS, DTYPES = ("gather",), tuple(FILL)


class Problem(typing.NamedTuple):
    """The sizes of a call; there is one algorithm."""

    rows: int
    count: int
    inner: int = 1
    dtype: str = "float32"


def fits(algorithm: str, problem: Problem, device=None) -> bool:
    return algorithm == "gather"


def choose(problem: Problem, device=None) -> str:
    return "gather"


def index_select(device, operands, results, *, rules) -> launch.Plan | None:
    """The plan for x and an index of these types; None if the dtype has no kernel."""
    (x, index), axis, k = operands[:2], rules.axis, rules.batch_dims
    if x.dtype.name not in FILL:
        return None
    size, rows, count = x.dtype.itemsize, x.shape[axis], index.shape[k]
    row_bytes, slices = size_of(x.shape[axis + 1 :]) * size, size_of(x.shape[:axis])
    fill = int.from_bytes(FILL[x.dtype.name].to_bytes(size, "little") * (8 // size), "little") if rules.fill_nan else 0

    def gather(vector):
        vectors = row_bytes // vector
        total, each = slices * count * vectors, tuning.GATHER_THREADS * tuning.GATHERED
        number = "uint32_t" if total < 2**31 - 1 - each else "int64_t"
        shape = SHAPE(
            vectors=vectors,
            total=total,
            count=count,
            rows=rows,
            by_vectors=vectors,
            by_count=count,
            by_outer=size_of(x.shape[k:axis]),
            fill=fill,
            wrap=rules.wrap and np.issubdtype(index.dtype, np.signedinteger),
            clip=rules.clip,
            streams=slices * rows * row_bytes > tuning.FEW_BYTES,
        )
        name = f"Gather<{VECTORS[vector]}, {cuda_type(index.dtype)}, {number}>"
        return (
            launch.Launch(
                HEADER,
                name,
                [launch.operand(0), launch.operand(1), launch.result(0), shape],
                grid=ceil_div(total, each),
                block=tuning.GATHER_THREADS,
            ),
        )

    vector = next(v for v in VECTORS if row_bytes % v == 0)
    return launch.Plan("gather", gather(vector), unaligned=gather(size) if vector > size else None)
