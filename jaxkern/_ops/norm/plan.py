"""Which kernels run RMSNorm, LayerNorm and their gradients on CUDA, and how they are launched.

    warp        rows up to 2 KB: 1 to 32 lanes per row, in registers
    block       rows up to 128 KB, gradients 16 to 32 KB: a block per row, in registers
    cluster     sm_90 and newer, rows of whole vectors up to 1 MB, gradients 0.4 to 1 MB: a row in the registers of 2 to 16
                blocks, which exchange their sums
    streaming   any row: a block reads it twice; gradients in two launches, which both read all rows

Gradients of scale and bias are sums over rows: each block adds its own, and one more launch adds those of the blocks.
`vectors` below are 16 bytes of the widest array. If the width is no multiple of one, a thread holds several packs of the
largest power of two that divides the width instead. Rows that no registers hold, and long ones of many small packs in 16
bits, are mostly left to XLA: streaming runs what lies at any address, and what is forced.
"""

import math
import typing

from jaxkern._core.algorithms import pick
from jaxkern._core.define import CUDA_TYPES, EMPTY_VIEW, broadcast_view, ceil_div
from jaxkern._core.launch import Launch, Plan, boolean, f64, i32, i64, null, operand, result, scratch, struct

ALGORITHMS = ("warp", "block", "cluster", "streaming")

_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
DTYPES = tuple(_ITEMSIZE)

_WARP_VECTORS = 128
_WARP_PACKS = 8  # of a lane, by default
_FORWARD_THREADS, _BACKWARD_THREADS = 128, 256  # of a block whose rows belong to lanes; a gradient's of long rows: 128
_BLOCK_THREADS, _MOST_THREADS = 512, 1024  # at most, of a block per row; the latter forward, for rows that need it
_BLOCK_HELD = 8  # vectors per thread
_SUM_WORDS = 64  # of registers, for a thread's sums over rows
_KEPT_WORDS = 80  # kNormKept
_BUSY_THREADS, _RESIDENT_THREADS = 480, 1024  # of the gradient, on a multiprocessor: wanted, and at most
_CLUSTERS = (2, 4, 8, 16)  # blocks
_CLUSTER_VECTORS = 512  # of a block, at least, where there are few rows
_CLUSTER_WIDTH = 1 << 17  # of 16-bit elements, that 8 blocks hold
_STAGES = 4  # rows of a thread in shared memory
_STREAM_THREADS, _COLUMN_THREADS, _SUMS_COLUMNS, _SUMS_THREADS = 512, 128, 32, 512
_STREAM_ROWS = 128  # at least: a row takes a block
_MOST_GRID_X = 2**31 - 1
_MOST_EPILOGUE_ARGS = 16
_EPILOGUE_DTYPES = {*DTYPES, "int32", "uint32", "int64"}


class Problem(typing.NamedTuple):
    """Rows of `width` elements.

    inner: elements behind the axis, which is then moved to the end, so that there are `inner` times as many rows.
    out_dtype: of the result and its cotangent, if not that of x. backward: then `scale_sum` and `bias` say whether the
    gradients of scale and bias are computed.
    """

    rows: int
    width: int
    inner: int = 1
    dtype: str = "float32"
    out_dtype: str = ""
    centre: bool = False
    scale: bool = True
    bias: bool = False
    residual: bool = False
    backward: bool = False
    scale_sum: bool = False

    @property
    def itemsizes(self) -> tuple[int, int]:
        """Of x and of the result."""
        return _ITEMSIZE[self.dtype], _ITEMSIZE[self.out_dtype or self.dtype]

    @property
    def vector(self) -> int:
        """Elements in 16 bytes of the widest array."""
        return 16 // max(self.itemsizes)

    @property
    def vectors(self) -> int:
        return ceil_div(self.width, self.vector)

    @property
    def pack(self) -> int:
        """Elements that are read at once."""
        return math.gcd(self.width, self.vector)

    @property
    def sums(self) -> int:
        """Sums over rows, of the gradient."""
        return self.scale_sum + self.bias

    @property
    def computing(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"


def _held(p: Problem, device) -> tuple[int, int] | None:
    """(vectors per thread, threads) of a block per row: few idle threads, then 16 elements per thread or more.

    A gradient first wants 480 threads on a multiprocessor, then two blocks: layer_norm of bfloat16 8192 x 5120 takes 114
    microseconds in one block of 320 threads, 98 in three of 160; rms_norm of 16384 x 8192 takes 236 in one block of 512 and 221
    in two of 256 (H200).
    """
    most = min(_BLOCK_HELD, _SUM_WORDS // max(1, p.sums * p.vector * _ITEMSIZE[p.computing] // 4))
    wanted = max(1, 16 // p.vector) if p.backward else 4
    best = None
    for held in range(1, (most if p.backward else _BLOCK_HELD) + 1):
        threads = 32 * ceil_div(p.vectors, 32 * held)
        if threads <= (_BLOCK_THREADS if p.backward or p.vectors <= _BLOCK_HELD * _BLOCK_THREADS else _MOST_THREADS):
            few = 0 if threads >= 128 else 1  # whose blocks are short: as if an eighth of them were idle
            cost = held * threads * (8 + few), abs(held - wanted)
            if p.backward:
                blocks = _resident(p, device, ceil_div(p.width // p.pack, threads), threads, threads)
                cost = blocks * threads < _BUSY_THREADS, blocks < 2, *cost
            best = min(best, (cost, held, threads)) if best else (cost, held, threads)
    return best[1:] if best else None


def _resident(p: Problem, device, packs: int, threads: int, group: int) -> int:
    """Blocks of the gradient on a multiprocessor."""
    # Sums over rows, and what NormBackward keeps of a row. The rest was found by looking for spills.
    words = packs * p.pack * p.sums * _ITEMSIZE[p.computing] // 4
    kept = packs * p.pack * (2 + p.sums) * _ITEMSIZE[p.computing] // 4
    registers = (48 if packs > 8 else 40) + (kept if kept <= _KEPT_WORDS else words + 32)
    shared = _stages_room(device) // (2 * _stage_bytes(p, packs, threads, group))
    return max(1, min(65536 // (registers * threads), _RESIDENT_THREADS // threads, shared))


def _stages_room(device) -> int:
    """Bytes of shared memory for rows. The rest caches scale."""
    return min(3 * device.shared_memory // 4, device.shared_memory - 4096)


def _clustered(p: Problem, device) -> tuple[int, Problem] | None:
    """(blocks of a cluster, the problem of one of them); None if there is no cluster for the problem."""
    if device.compute_capability < 90 or device.shared_memory < 227 * 1024 or p.pack != p.vector:
        return None
    for blocks in _CLUSTERS:
        part = p._replace(width=ceil_div(p.vectors, blocks) * p.vector)
        if blocks > device.sm_count:
            return None
        holds = part.vectors <= _BLOCK_HELD * _BLOCK_THREADS and fits("block", part, device)
        # Few rows take more blocks each.
        more = p.rows * 2 * blocks <= device.sm_count and part.vectors >= _CLUSTER_VECTORS and blocks < _CLUSTERS[-1]
        if holds and not more:
            return blocks, part
    return None


def fits(algorithm: str, p: Problem, device) -> bool:
    """Whether the algorithm can run the problem."""
    if algorithm == "cluster":
        return _clustered(p, device) is not None
    if algorithm == "block":
        held = _held(p, device)
        if held is None or not p.backward:
            return held is not None
        packs, threads = ceil_div(p.width // p.pack, held[1]), held[1]
        return 2 * _stage_bytes(p, packs, threads, threads) <= device.shared_memory - 4096
    return algorithm == "streaming" or p.vectors <= _WARP_VECTORS


def choose(p: Problem, device) -> str:
    """The algorithm that runs the problem by default, unless it is `left_to_xla`.

    A block has rows of many small packs: bfloat16 65536 x 1001, microseconds of warp, block and XLA: rms_norm 144, 83 and 97,
    its gradient 253, 179 and 230, the gradient of layer_norm 512, 228 and 358 (H200).
    """
    warp = fits("warp", p, device) and p.width <= 32 * _WARP_PACKS * p.pack
    return next(a for a in ALGORITHMS[not warp :] if fits(a, p, device))


def left_to_xla(p: Problem, algorithm: str) -> bool:
    """Whether XLA runs the problem by default, where this algorithm was chosen.

    Measured on an H200, in microseconds, kernel and what XLA makes of the reference. Streaming: float32 2048 x 65536, rms_norm
    415 and 382, its gradient 804 and 723, but layer_norm 470 and 510, its gradient 797 and 864; layer_norm of 16 rows of 2^20,
    469 and 81. The gradient of rms_norm in clusters of 16 blocks, bfloat16 512 x 262144: 452 and 417, but layer_norm's 581 and
    623. Rows of 16-bit elements that are not whole vectors and take a block each, bfloat16 32768 x 4097: rms_norm 337
    and 180, its gradient 734 and 445, but the gradient of layer_norm 471 and 672.
    """
    if algorithm == "streaming":
        return not p.centre or p.rows < _STREAM_ROWS
    if algorithm == "cluster":
        return p.backward and not p.centre and _ITEMSIZE[p.dtype] == 2 and p.width > _CLUSTER_WIDTH
    partial = _ITEMSIZE[p.dtype] == 2 and p.pack < p.vector and p.vectors > _WARP_VECTORS
    return partial and not (p.backward and p.centre)


# ---- launches


def _cpp(flag: bool) -> str:
    return "true" if flag else "false"


class _Epilogue(typing.NamedTuple):
    """A function before the store."""

    source: str
    name: str  # NormEpilogue with its template arguments
    args: tuple  # of NormEpilogueParams: pointers, then maps
    header: str = "norm/epilogue.cuh"


class _Norm(typing.NamedTuple):
    """A problem with what its kernels are given."""

    p: Problem
    device: typing.Any
    parameters: str  # dtype of scale and bias
    gradients: tuple  # dtypes of the gradients of scale and bias
    arrays: typing.Any  # the pointers at the start of NormParams
    eps: float
    epilogue: typing.Any = None

    @property
    def op(self) -> str:
        p = self.p
        types = ", ".join(CUDA_TYPES[d] for d in (p.dtype, p.out_dtype or p.dtype, self.parameters))
        return f"jaxkern::Norm<{types}, {p.centre + 2 * p.scale + 4 * p.bias + 8 * p.residual + 16 * p.scale_sum}>"

    def params(self, blocks=0, rows=null, partial=null):
        """NormParams. rows: scratch for numbers of each row."""
        p = self.p
        arrays = sum(self.p.itemsizes) + p.itemsizes[0] * (p.backward + p.residual * (2 - p.backward))
        pointers = (*self.arrays[:6], rows if p.backward else self.arrays[6], partial)
        exceeds = p.rows * p.width * arrays > self.device.l2_bytes
        params = struct(*pointers, i64(p.rows), i64(p.width), f64(self.eps), i32(blocks), boolean(exceeds))
        return params if self.epilogue is None else struct(params, *self.epilogue.args)

    def forward(self, header: str, name: str, blocks: int, grid: int, threads: int, cluster: int = 1) -> list[Launch]:
        """The launch of NormForward or NormStream."""
        params, e = self.params(blocks), self.epilogue
        if e is None:
            return [Launch(header, f"{name}>", [params], grid, threads, cluster=cluster)]
        return [Launch(e.header, f"{name}, {e.name}>", [params], grid, threads, cluster=cluster, source=e.source)]

    def sums(self, blocks: int, offset: int) -> list[Launch]:
        """Adds the blocks' sums over rows, at this offset of the scratch."""
        if not self.gradients:
            return []
        p = self.p
        computing = CUDA_TYPES[p.computing]
        args = [struct(scratch(offset), result(1), result(len(self.gradients)), i64(p.width), i32(blocks))]
        grid = ceil_div(p.width, _SUMS_COLUMNS)
        name = f"NormSums<{computing}, {CUDA_TYPES[self.gradients[0]]}>"
        return [Launch("norm/backward.cuh", name, args, (grid, len(self.gradients)), _SUMS_THREADS)]

    def sums_bytes(self, blocks: int) -> int:
        return len(self.gradients) * blocks * self.p.width * _ITEMSIZE[self.p.computing]


def _stage_bytes(p: Problem, packs: int, threads: int, group: int) -> int:
    """Of the rows in shared memory that the groups of a block have at a time; see NormSlots."""
    sizes = (*p.itemsizes, *p.itemsizes[:1] * p.residual)
    if p.pack * min(sizes) >= 4:
        return packs * threads * p.pack * sum(sizes)
    return threads // group * sum(16 * (ceil_div(p.width * size, 16) + 1) for size in sizes)


def _layout(p: Problem, algorithm: str, device) -> tuple[int, int, int]:
    """(lanes per row or 0, vectors per thread, threads of a block)."""
    if algorithm == "block":
        held = _held(p, device)
        assert held is not None
        return 0, *held
    held = ceil_div(p.vectors, 32)
    threads = _BACKWARD_THREADS if p.backward and held <= 2 else _FORWARD_THREADS
    return (32 if held > 1 else 1 << (p.vectors - 1).bit_length()), held, threads


def _registers(n: _Norm, algorithm: str) -> tuple[list[Launch], int]:
    """The launches, and the bytes of scratch."""
    p, cluster, own = n.p, 1, n.p  # own: of a block
    if algorithm == "cluster":
        found = _clustered(p, n.device)
        assert found is not None
        cluster, own = found
    lanes, held, threads = _layout(own, "block" if cluster > 1 else algorithm, n.device)
    group = lanes or threads * cluster
    packs = ceil_div(p.width // p.pack, group)
    whole = _cpp(packs * group * p.pack == p.width)
    owners = lanes if cluster == 1 else -cluster
    if not p.backward:
        rows = max(1, 4 // held >> p.residual) if lanes else 1
        name = f"NormForward<{n.op}, {p.pack}, {owners}, {packs}, {rows}, {threads}, {whole}"
        grid = ceil_div(p.rows, threads // lanes * rows) if lanes else p.rows * cluster
        return n.forward("norm/forward.cuh", name, 0, grid, threads, cluster), 0
    of_block = lanes or threads  # threads of a block that own a row
    stage = _stage_bytes(own, packs, threads, of_block)
    # The sums of all groups are added in shared memory, at the end.
    sums = threads // lanes * p.width * _ITEMSIZE[p.computing] if lanes else 0
    resident = _resident(own, n.device, packs, threads, of_block)
    stages = max(2, min(_STAGES, _stages_room(n.device) // resident // stage))
    blocks = min(ceil_div(p.rows, threads // of_block), n.device.sm_count * resident // cluster)  # or clusters
    options = f"{owners}, {packs}, {threads}, {stages}, {whole}, {resident}"
    name = f"NormBackward<{n.op}, {p.pack}, {options}>"
    params = n.params(blocks, partial=scratch() if n.gradients else null)
    shared = max(stages * stage, sums)
    # Parts of a GPU have different numbers of multiprocessors, so that the GPU may run fewer clusters at once than that.
    more = {"cluster": cluster, "waves": 1} if cluster > 1 else {}
    launch = Launch("norm/backward.cuh", name, [params], blocks * cluster, threads, shared=shared, **more)
    return [launch, *n.sums(blocks, 0)], n.sums_bytes(blocks)


def _streaming(n: _Norm, pack: int) -> tuple[list[Launch], int]:
    p = n.p
    blocks = min(p.rows, 4 * n.device.sm_count)
    if not p.backward:
        return n.forward("norm/stream.cuh", f"NormStream<{n.op}, {pack}", blocks, blocks, _STREAM_THREADS), 0
    numbers = p.rows * 4 * _ITEMSIZE[p.computing]
    tiles = ceil_div(p.width, pack * _COLUMN_THREADS)
    parts = min(p.rows, ceil_div(16 * n.device.sm_count, tiles), 65535)
    partial = scratch(numbers) if n.gradients else null
    steps = [
        (f"NormRowStats<{n.op}, {pack}>", n.params(blocks, scratch()), blocks, _STREAM_THREADS),
        (f"NormColumns<{n.op}, {pack}>", n.params(parts, scratch(), partial), (tiles, parts), _COLUMN_THREADS),
    ]
    launches = [Launch("norm/stream.cuh", name, [params], grid, threads) for name, params, grid, threads in steps]
    return [*launches, *n.sums(parts, numbers)], numbers + n.sums_bytes(parts)


def norm(device, operands, results, *, operation, extras, eps, dtype, algorithm, function=None) -> Plan | None:
    """The plan of a norm for arrays of these types; function: applied before the store, to it and the last operands."""
    del dtype  # that of the result
    at = dict(zip(extras.split(), range(1, len(operands))))
    parameters = [operands[at[name]].dtype.name for name in ("scale", "bias") if name in at]
    pointers = [operand(at[name]) if name in at else null for name in ("residual", "scale", "bias")]
    x, y = operands[0], results[0]
    more = result(1) if "residual" in at else null
    arrays = (operand(0), pointers[0], null, *pointers[1:], result(0), more)
    epilogue = None
    if function is not None:
        epilogue = _epilogue(function, x, operands[1 + len(at) :], 1 + len(at))
        if epilogue is None:
            return None
    p = _problem(x, y, operation, at, "bias" in at)
    return _plan(p, device, operation, parameters, [], arrays, eps, algorithm, epilogue)


def _epilogue(function, x, args, first) -> _Epilogue | None:
    """None if kernels cannot read these operands, of the rank of x."""
    views = [broadcast_view(x.shape, a.shape, x.ndim - 1) for a in args]
    readable = len(args) <= _MOST_EPILOGUE_ARGS and {a.dtype.name for a in args} <= _EPILOGUE_DTYPES
    if None in views or not readable or not function.fits():
        return None
    splat = sum((a.shape[-1] == 1) << k for k, a in enumerate(args))
    types = ["Epilogue", str(splat), *(CUDA_TYPES[a.dtype.name] for a in args)]
    pointers = [operand(first + k) for k in range(len(args))] or [null]
    maps = [view.members[0] for view in views if view] or [EMPTY_VIEW.members[0]]
    source = function.source("Epilogue")
    return _Epilogue(source, f"jaxkern::NormEpilogue<{', '.join(types)}>", (*pointers, *maps))


def norm_grad(device, operands, results, *, operation, extras, eps, sums, algorithm) -> Plan | None:
    """The plan of a gradient for arrays of these types."""
    at = dict(zip(extras.split(), range(2, len(operands))))
    parameters = [operands[at[name]].dtype.name for name in ("scale",) if name in at]
    pointers = [operand(at[name]) if name in at else null for name in ("residual", "scale")]
    p = _problem(operands[0], operands[1], operation, at, sums[1] is not None)
    p = p._replace(backward=True, scale_sum=sums[0] is not None)
    arrays = (operand(0), pointers[0], operand(1), pointers[1], null, result(0), null)
    gradients = [a.dtype.name for a in results[1:]]
    return _plan(p, device, operation, parameters, gradients, arrays, eps, algorithm)


def _problem(x, y, operation, names, bias) -> Problem:
    kinds = {"centre": operation == "layer_norm", "scale": "scale" in names, "bias": bias}
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    return Problem(rows, width, 1, x.dtype.name, y.dtype.name, residual="residual" in names, **kinds)


def _plan(p, device, operation, parameters, gradients, arrays, eps, algorithm, epilogue=None) -> Plan | None:
    wide = {p.dtype, p.out_dtype, *parameters, *gradients}
    # Kernels have one type for scale and bias. What they compute in is float64 for all arrays of rows, or for none.
    if len(set(parameters)) > 1 or len(set(gradients)) > 1 or not wide <= _ITEMSIZE.keys() or p.width >= 1 << 30:
        return None
    if "float64" in wide and not p.dtype == p.out_dtype == "float64":
        return None
    automatic, algorithm = algorithm == "auto", pick(operation, algorithm, p, device)
    if automatic and left_to_xla(p, algorithm):
        return None
    n = _Norm(p, device, (parameters or [p.dtype])[0], tuple(gradients), arrays, eps, epilogue)
    launches, size = _streaming(n, p.pack) if algorithm == "streaming" else _registers(n, algorithm)
    unaligned, more = _streaming(n, 1)
    if any(step.grid3()[0] > _MOST_GRID_X for step in (*launches, *unaligned)):
        return None
    return Plan(algorithm, tuple(launches), max(size, more), tuple(unaligned))
