"""The launch lists of quantisation. For rows there is one algorithm, for rows that fit the registers of a block: see
ffi/kernels/quantize/quantize.cuh. Longer rows are left to XLA. A matrix and its transpose: tiles.cuh."""

import math
import typing

from jaxkern._core import launch
from jaxkern._core.define import CUDA_TYPES, ceil_div, size_of

ALGORITHMS = ("registers",)
DTYPES = ("float16", "bfloat16", "float32")
TYPES = {"int8": "Int8", "float8_e4m3fn": "Float8<3>", "float8_e5m2": "Float8<2>"}

_HEADER, _THREADS, _MOST_THREADS = "quantize/quantize.cuh", 256, 1024
_ELEMENTS = 32  # per thread, at most
TILE, _TILE_THREADS = 128, 256


class Problem(typing.NamedTuple):
    """Rows of `width` elements, which are neighbours: inner is 1."""

    rows: int
    width: int
    inner: int = 1  # there is no other
    dtype: str = "bfloat16"


def cpp(flag) -> str:
    return "true" if flag else "false"


def fits(algorithm: str, problem: Problem, device=None) -> bool:
    del device
    return algorithm == "registers" and _shape(problem.width, _vector(problem)) is not None


def choose(problem: Problem, device=None) -> str:
    if not fits("registers", problem, device):
        raise ValueError(f"jaxkern.algorithms.choose: rows of {problem.width} elements are quantized by XLA")
    return "registers"


def _vector(problem: Problem) -> int:
    """Elements of a vector: a power of two that divides the width, of at most 16 bytes."""
    return min(problem.width & -problem.width, 4 if problem.dtype == "float32" else 8)


def _shape(width: int, vector: int) -> tuple[int, int] | None:
    """(threads of a group, vectors of a thread); None if the row is too long."""
    vectors = ceil_div(width, vector)
    most = _ELEMENTS // vector
    # Eight lanes of short rows, whose threads have more bytes in flight than 16 or 32 would have.
    each = next((v for v in (1, 2, 4) if v <= most and vectors <= 8 * v), most)
    group = ceil_div(vectors, each)
    group = 1 << (group - 1).bit_length() if group <= 32 else ceil_div(group, 32) * 32
    return (group, each) if group <= _MOST_THREADS else None


def quantize(device, operands, results, *, dtype) -> launch.Plan | None:
    """The plan for x [..., width], and perhaps a scale; None if there is no kernel for it."""
    x, *given = operands
    if x.dtype.name not in DTYPES:
        return None
    problem = Problem(size_of(x.shape[:-1]), x.shape[-1], dtype=x.dtype.name)

    def steps(vector):
        shape = _shape(problem.width, vector)
        if shape is None:
            return None
        group, each = shape
        threads = group if group > 32 else _THREADS
        grid = ceil_div(problem.rows, threads // group)
        name = f"Quantize<{CUDA_TYPES[x.dtype.name]}, {TYPES[str(dtype)]}, {group}, {each}, {vector}, {cpp(given)}>"
        members = (
            launch.operand(0),
            launch.operand(1) if given else launch.null,
            launch.result(0),
            launch.result(1),
            launch.i64(problem.rows),
            launch.i32(problem.width),
        )
        return (launch.Launch(_HEADER, name, [launch.struct(*members)], grid, threads),) if grid < 2**31 else None

    found, single = steps(_vector(problem)), steps(1)
    if found is None or single is None:
        return None
    return launch.Plan("registers", found, unaligned=single if _vector(problem) > 1 else None)


def tiles(device, operands, results, *, dtype) -> launch.Plan | None:
    """The plan for x [..., M, 128, N, 128], and perhaps a scale; None if there is no kernel for it."""
    del device, results
    x, *given = operands
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
        name = f"QuantizeTiles<{types}, {cpp(given)}, {cpp(vectors)}>"
        return (launch.Launch("quantize/tiles.cuh", name, args, blocks, _TILE_THREADS),)

    return launch.Plan("tiles", steps(True), unaligned=steps(False))
