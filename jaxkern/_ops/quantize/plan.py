"""The launch list of the quantisation of a matrix and its transpose: see ffi/kernels/quantize/tiles.cuh."""

import math

from jaxkern._core import launch
from jaxkern._core.define import CUDA_TYPES, FLOAT8, cpp_bool
from jaxkern._core.params import Params

PARAMS = Params("quantize/tiles.cuh", "QuantizeTilesParams")
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
    args = [
        PARAMS(
            x=launch.operand(0),
            given=launch.operand(1) if given else launch.null,
            q=launch.result(0),
            q_t=launch.result(1),
            scale=launch.result(2),
            scale_t=launch.null if given else launch.result(3),
            height=down * TILE,
            width=across * TILE,
        )
    ]

    def steps(vectors):
        types = f"{CUDA_TYPES[x.dtype.name]}, {TYPES[str(dtype)]}"
        name = f"QuantizeTiles<{types}, {cpp_bool(given)}, {cpp_bool(vectors)}>"
        return (launch.Launch("quantize/tiles.cuh", name, args, blocks, _THREADS),)

    return launch.Plan("tiles", steps(True), unaligned=steps(False))
