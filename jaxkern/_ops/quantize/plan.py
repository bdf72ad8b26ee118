"""The launch list of the quantisation of a matrix and its transpose: see ffi/kernels/quantize/tiles.cuh."""

import math

from jaxkern._core import launch
from jaxkern._core.define import CUDA_TYPES, FLOAT8, cpp_bool

DTYPES = ("float16", "bfloat16", "float32")
TYPES = {"int8": "Int8", **FLOAT8}

TILE, _THREADS = 128, 256


def tiles(device, operands, results, *, dtype) -> launch.Plan | None:
    """The plan for x [..., M, 128, N, 128], and perhaps a scale; None if there is no kernel for it."""
    del device, results
    x, *rest = operands
    given = any(a is not None for a in rest)
    *batch, down, height, across, width = x.shape
    blocks = math.prod(batch) * down * across
    if x.dtype.name not in DTYPES or (height, width) != (TILE, TILE) or blocks >= 2**31:
        return None
    scales = [launch.result(2), launch.null if given else launch.result(3)]
    arrays = [
        launch.operand(0),
        launch.operand(1) if given else launch.null,
        launch.result(0),
        launch.result(1),
        *scales,
    ]
    args = [launch.struct(*arrays, launch.i64(down * TILE), launch.i64(across * TILE))]

    def steps(vectors):
        types = f"{CUDA_TYPES[x.dtype.name]}, {TYPES[str(dtype)]}"
        name = f"QuantizeTiles<{types}, {cpp_bool(given)}, {cpp_bool(vectors)}>"
        return (launch.Launch("quantize/tiles.cuh", name, args, blocks, _THREADS),)

    return launch.Plan("tiles", steps(True), unaligned=steps(False))
