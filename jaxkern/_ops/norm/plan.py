"""Hand-written kernels of RMSNorm, LayerNorm and their gradients on CUDA: which run, and how they are launched.

    generated   the kernel that the engine of rows makes of the definition: see _engines/rows/plan.py
    warp        rows up to 2 KB: 1 to 32 lanes per row, in registers
    block       rows up to 128 KB, gradients 16 to 32 KB: a block per row, in registers
    cluster     sm_90 and newer, rows of whole vectors up to 1 MB, gradients 0.4 to 1 MB: a row in the registers of 2 to 16
                blocks, which exchange their sums
    streaming   any row: a block reads it twice; gradients in two launches, which both read all rows

Gradients of scale and bias are sums over rows: each block adds its own rows, and one more launch adds the sums of the blocks.
`vectors` below are 16 bytes of the widest array. If the width is no multiple of one, a thread holds several packs of the
largest power of two that divides the width instead. Rows that no registers hold, and long ones of many small packs in 16
bits, are mostly left to XLA: streaming runs what lies at any address, and what is forced.
"""

import math
import typing

from jaxkern._core import algorithms
from jaxkern._core.define import CUDA_TYPES, EMPTY_VIEW, FLOAT_BYTES, broadcast_view, ceil_div, cpp_bool
from jaxkern._core.launch import Launch, Plan, null, operand, planned, result, scratch, struct
from jaxkern._core.params import Params
from jaxkern._engines.rows.plan import GENERATED
from jaxkern._ops.norm import tuning
from jaxkern._ops.norm.tuning import generated, left_to_xla

ALGORITHMS = (GENERATED, "warp", "block", "cluster", "streaming")
FIXED = {"rms_norm": {"centre": False}, "layer_norm": {"centre": True}}  # fields of Problem

PARAMS, SUMS_PARAMS = Params("norm/norm.cuh", "NormParams"), Params("norm/backward.cuh", "NormSumsParams")
_ARRAYS = ("x", "residual", "g", "scale", "bias", "y", "sum")  # members of NormParams
DTYPES = tuple(FLOAT_BYTES)

_MOST_EPILOGUE_ARGS = 16
_EPILOGUE_DTYPES = {*DTYPES, "int32", "uint32", "int64"}


class Problem(typing.NamedTuple):
    """Rows of `width` elements.

    inner: elements after the axis, which is then moved to the end, so that there are `inner` times as many rows.
    out_dtype: the type of the result and its cotangent, if it differs from the type of x. backward: then `scale_sum` and
    `bias` say whether the gradients of scale and bias are computed.
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
        """The bytes of an element of x and of the result."""
        return FLOAT_BYTES[self.dtype], FLOAT_BYTES[self.out_dtype or self.dtype]

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
    most = min(tuning.BLOCK_HELD, tuning.SUM_WORDS // max(1, p.sums * p.vector * FLOAT_BYTES[p.computing] // 4))
    wanted = max(1, 16 // p.vector) if p.backward else 4
    best = None
    for held in range(1, (most if p.backward else tuning.BLOCK_HELD) + 1):
        threads = 32 * ceil_div(p.vectors, 32 * held)
        if threads <= (
            tuning.BLOCK_THREADS
            if p.backward or p.vectors <= tuning.BLOCK_HELD * tuning.BLOCK_THREADS
            else tuning.MOST_THREADS
        ):
            few = (
                0 if threads >= tuning.SHORT_THREADS else 1
            )  # whose blocks are short: as if an eighth of them were idle
            cost = held * threads * (8 + few), abs(held - wanted)
            if p.backward:
                blocks = _resident(p, device, ceil_div(p.width // p.pack, threads), threads, threads)
                cost = blocks * threads < tuning.BUSY_THREADS, blocks < 2, *cost
            best = min(best, (cost, held, threads)) if best else (cost, held, threads)
    return best[1:] if best else None


def _resident(p: Problem, device, packs: int, threads: int, group: int) -> int:
    """Blocks of the gradient on a multiprocessor."""
    # Sums over rows, and what NormBackward keeps of a row. The rest was found by looking for spills.
    words = packs * p.pack * p.sums * FLOAT_BYTES[p.computing] // 4
    kept = packs * p.pack * (2 + p.sums) * FLOAT_BYTES[p.computing] // 4
    registers = (48 if packs > 8 else 40) + (kept if kept <= tuning.KEPT_WORDS else words + 32)
    shared = _stages_room(device) // (2 * _stage_bytes(p, packs, threads, group))
    return max(1, min(65536 // (registers * threads), tuning.RESIDENT_THREADS // threads, shared))


def _stages_room(device) -> int:
    """Bytes of shared memory for rows. The rest caches scale."""
    return min(3 * device.shared_memory // 4, device.shared_memory - 4096)


def _clustered(p: Problem, device) -> tuple[int, Problem] | None:
    """(blocks of a cluster, the problem of one of them); None if there is no cluster for the problem."""
    if device.compute_capability < 90 or device.shared_memory < 227 * 1024 or p.pack != p.vector:
        return None
    for blocks in tuning.CLUSTERS:
        part = p._replace(width=ceil_div(p.vectors, blocks) * p.vector)
        if blocks > device.sm_count:
            return None
        holds = part.vectors <= tuning.BLOCK_HELD * tuning.BLOCK_THREADS and fits("block", part, device)
        # Few rows take more blocks each.
        more = (
            p.rows * 2 * blocks <= device.sm_count
            and part.vectors >= tuning.CLUSTER_VECTORS
            and blocks < tuning.CLUSTERS[-1]
        )
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
    return algorithm in (GENERATED, "streaming") or p.vectors <= tuning.WARP_VECTORS


def choose(p: Problem, device) -> str:
    """The algorithm that runs the problem by default, unless it is `left_to_xla`."""
    return GENERATED if generated(p) else written(p, device)


def pick(operation: str, algorithm: str, p: Problem, device) -> str:
    """The hand-written algorithm that is forced or chosen."""
    return written(p, device) if algorithm in ("auto", GENERATED) else algorithms.pick(operation, algorithm, p, device)


def written(p: Problem, device) -> str:
    """The fastest hand-written algorithm.

    A block has rows of many small packs: bfloat16 65536 x 1001, microseconds of warp, block and XLA: rms_norm 144, 83 and 97,
    its gradient 253, 179 and 230, the gradient of layer_norm 512, 228 and 358 (H200).
    """
    warp = fits("warp", p, device) and p.width <= 32 * tuning.WARP_PACKS * p.pack
    return next(a for a in ALGORITHMS[1 + (not warp) :] if fits(a, p, device))


# ---- launches


class Epilogue(typing.NamedTuple):
    """A function before the store."""

    source: str
    name: str  # NormEpilogue with its template arguments
    args: tuple  # of NormEpilogueParams: pointers, then maps
    header: str = "norm/epilogue.cuh"


class Norm(typing.NamedTuple):
    """A problem with what its kernels are given."""

    p: Problem
    device: typing.Any
    parameters: str  # dtype of scale and bias
    gradients: tuple  # (number, dtype) of the results that are gradients of scale and bias
    arrays: typing.Any  # the pointers of _ARRAYS
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
        params = PARAMS(
            **dict(zip(_ARRAYS, self.arrays)) | ({"sum": rows} if p.backward else {}),
            partial=partial,
            rows=p.rows,
            width=p.width,
            eps=self.eps,
            blocks=blocks,
            exceeds_l2=p.rows * p.width * arrays > self.device.l2_bytes,
        )
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
        first, last = self.gradients[0], self.gradients[-1]
        out = [result(first[0]), result(last[0])]
        args = [SUMS_PARAMS(partial=scratch(offset), out=out, width=p.width, blocks=blocks)]
        grid = ceil_div(p.width, tuning.SUMS_COLUMNS)
        name = f"NormSums<{computing}, {CUDA_TYPES[first[1]]}>"
        return [Launch("norm/backward.cuh", name, args, (grid, len(self.gradients)), tuning.SUMS_THREADS)]

    def sums_bytes(self, blocks: int) -> int:
        return len(self.gradients) * blocks * self.p.width * FLOAT_BYTES[self.p.computing]


def _stage_bytes(p: Problem, packs: int, threads: int, group: int) -> int:
    """The bytes of the rows that the groups of a block hold in shared memory at a time; see NormSlots."""
    sizes = (*p.itemsizes, *p.itemsizes[:1] * p.residual)
    if p.pack * min(sizes) >= 4:
        return packs * threads * p.pack * sum(sizes)
    return threads // group * sum(16 * (ceil_div(p.width * size, 16) + 1) for size in sizes)


def layout_of(p: Problem, algorithm: str, device) -> tuple[int, int, int]:
    """(lanes per row or 0, vectors per thread, threads of a block)."""
    if algorithm == "block":
        held = _held(p, device)
        assert held is not None
        return 0, *held
    held = ceil_div(p.vectors, 32)
    threads = tuning.BACKWARD_THREADS if p.backward and held <= 2 else tuning.FORWARD_THREADS
    return (32 if held > 1 else 1 << (p.vectors - 1).bit_length()), held, threads


def in_registers(n: Norm, algorithm: str) -> tuple[list[Launch], int]:
    """The launches, and the bytes of scratch."""
    p, cluster, own = n.p, 1, n.p  # own: of a block
    if algorithm == "cluster":
        found = _clustered(p, n.device)
        assert found is not None
        cluster, own = found
    lanes, held, threads = layout_of(own, "block" if cluster > 1 else algorithm, n.device)
    group = lanes or threads * cluster
    packs = ceil_div(p.width // p.pack, group)
    whole = cpp_bool(packs * group * p.pack == p.width)
    owners = lanes if cluster == 1 else -cluster
    if not p.backward:
        rows = max(1, 4 // held >> p.residual) if lanes else 1
        name = f"NormForward<{n.op}, {p.pack}, {owners}, {packs}, {rows}, {threads}, {whole}"
        grid = ceil_div(p.rows, threads // lanes * rows) if lanes else p.rows * cluster
        return n.forward("norm/forward.cuh", name, 0, grid, threads, cluster), 0
    of_block = lanes or threads  # threads of a block that own a row
    stage = _stage_bytes(own, packs, threads, of_block)
    # The sums of all groups are added in shared memory, at the end.
    sums = threads // lanes * p.width * FLOAT_BYTES[p.computing] if lanes else 0
    resident = _resident(own, n.device, packs, threads, of_block)
    stages = max(2, min(tuning.STAGES, _stages_room(n.device) // resident // stage))
    blocks = min(ceil_div(p.rows, threads // of_block), n.device.sm_count * resident // cluster)  # or clusters
    options = f"{owners}, {packs}, {threads}, {stages}, {whole}, {resident}"
    name = f"NormBackward<{n.op}, {p.pack}, {options}>"
    params = n.params(blocks, partial=scratch() if n.gradients else null)
    shared = max(stages * stage, sums)
    # Parts of a GPU have different numbers of multiprocessors, so that the GPU may run fewer clusters at once than that.
    more = {"cluster": cluster, "waves": 1} if cluster > 1 else {}
    launch = Launch("norm/backward.cuh", name, [params], blocks * cluster, threads, shared=shared, **more)
    return [launch, *n.sums(blocks, 0)], n.sums_bytes(blocks)


def _streaming(n: Norm, pack: int) -> tuple[list[Launch], int]:
    p = n.p
    blocks = min(p.rows, 4 * n.device.sm_count)
    if not p.backward:
        return n.forward("norm/stream.cuh", f"NormStream<{n.op}, {pack}", blocks, blocks, tuning.STREAM_THREADS), 0
    numbers = p.rows * 4 * FLOAT_BYTES[p.computing]
    tiles = ceil_div(p.width, pack * tuning.COLUMN_THREADS)
    parts = min(p.rows, ceil_div(16 * n.device.sm_count, tiles), 65535)
    partial = scratch(numbers) if n.gradients else null
    steps = [
        (f"NormRowStats<{n.op}, {pack}>", n.params(blocks, scratch()), blocks, tuning.STREAM_THREADS),
        (f"NormColumns<{n.op}, {pack}>", n.params(parts, scratch(), partial), (tiles, parts), tuning.COLUMN_THREADS),
    ]
    launches = [Launch("norm/stream.cuh", name, [params], grid, threads) for name, params, grid, threads in steps]
    return [*launches, *n.sums(parts, numbers)], numbers + n.sums_bytes(parts)


def by_hand(device, operands, results, function):
    """The plan of a row function of an operation; None if XLA is faster than any kernel, or GENERATED."""
    if function.roles is None:
        return GENERATED
    outputs = function.output_roles()
    given = dict(zip(function.roles.operands, enumerate(operands)))
    made = dict(zip(outputs, enumerate(results)))
    facts, names = dict(function.roles.facts), set(given)
    args = [name for name in function.roles.operands if name.startswith("argument ")]
    backward = "d y" in names
    if backward:
        known = names <= {"x", "scale", "bias", "d y", "d sum"} and "d x" in outputs and facts["function"] is None
        known = known and set(outputs) <= {"d x", "d scale", "d bias"}
    else:
        known = names <= {"x", "residual", "scale", "bias", *args} and "y" in outputs
        known = known and set(outputs) == {"y", *["sum"] * ("residual" in names)}
    rows = ("x", "residual", "y", "sum", "d x", "d y", "d sum")
    columns = ("scale", "bias", "d scale", "d bias")
    if not known or "x" not in names:
        return GENERATED
    x, (array, axis) = given["x"][1], function.row
    if axis != [*function.avals, *function.results][array].ndim - 1:  # a batch lies behind the row
        return GENERATED
    if any(a.shape != x.shape for of in (given, made) for k, (_, a) in of.items() if k in rows):
        return GENERATED
    if any(a.shape != x.shape[-1:] for of in (given, made) for k, (_, a) in of.items() if k in columns):
        return GENERATED
    read = lambda name: operand(given[name][0]) if name in given else null
    write = lambda name: result(made[name][0]) if name in made else null
    vectors = [given[k][1].dtype.name for k in ("scale", "bias") if k in given and not (backward and k == "bias")]
    epilogue = None
    if backward:
        p = problem(x, given["d y"][1], function.name, {*names} - {"residual"}, "d bias" in outputs)
        p = p._replace(backward=True, scale_sum="d scale" in outputs, residual="d sum" in names)
        arrays = (read("x"), read("d sum"), read("d y"), read("scale"), null, write("d x"), null)
    else:
        p = problem(x, made["y"][1], function.name, names, "bias" in names)
        arrays = (read("x"), read("residual"), null, read("scale"), read("bias"), write("y"), write("sum"))
        if facts["function"] is not None:
            first = given[args[0]][0] if args else len(operands)
            epilogue = epilogue_of(facts["function"], x, [given[name][1] for name in args], first)
            if epilogue is None:
                return GENERATED
    if p.dtype not in FLOAT_BYTES or p.out_dtype not in FLOAT_BYTES:
        return GENERATED
    forced = algorithms.forced(function.name) if function.algorithm == "auto" else function.algorithm
    if algorithms.pick(function.name, forced, p, device) == GENERATED:
        return GENERATED
    sums = [(made[k][0], made[k][1].dtype.name) for k in ("d scale", "d bias") if k in made]
    if not _has_kernel(p, vectors, [dtype for _, dtype in sums]):
        return GENERATED
    return written_plan(
        p, device, function.name, vectors, sums, arrays, dict(facts["numbers"])["eps"], forced, epilogue
    )


def epilogue_of(function, x, args, first) -> Epilogue | None:
    """None if kernels cannot read these operands, which broadcast to x, maybe from fewer dimensions: `vmap` leaves them so."""
    shapes = [(1,) * (x.ndim - a.ndim) + a.shape for a in args]
    views = [broadcast_view(x.shape, shape, x.ndim - 1) for shape in shapes]
    readable = len(args) <= _MOST_EPILOGUE_ARGS and {a.dtype.name for a in args} <= _EPILOGUE_DTYPES
    if None in views or not readable or not function.fits():
        return None
    splat = sum((shape[-1] == 1) << k for k, shape in enumerate(shapes))
    types = ["Epilogue", str(splat), *(CUDA_TYPES[a.dtype.name] for a in args)]
    pointers = [operand(first + k) for k in range(len(args))] or [null]
    maps = [view.members[0] for view in views if view] or [EMPTY_VIEW.members[0]]
    source = function.source("Epilogue")
    return Epilogue(source, f"jaxkern::NormEpilogue<{', '.join(types)}>", (*pointers, *maps))


def problem(x, y, operation, names, bias) -> Problem:
    kinds = {"centre": operation == "layer_norm", "scale": "scale" in names, "bias": bias}
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    return Problem(rows, width, 1, x.dtype.name, y.dtype.name, residual="residual" in names, **kinds)


def _has_kernel(p, parameters, gradients) -> bool:
    """Whether there is a kernel for these types: one for scale and bias; float64 for all arrays of rows, or for none."""
    wide = {p.dtype, p.out_dtype, *parameters, *gradients}
    one = len(set(parameters)) <= 1 and len(set(gradients)) <= 1 and wide <= FLOAT_BYTES.keys()
    return one and p.width < 1 << 30 and ("float64" not in wide or p.dtype == p.out_dtype == "float64")


def written_plan(p, device, operation, parameters, gradients, arrays, eps, algorithm, epilogue=None) -> Plan | None:
    """The plan of a hand-written kernel.

    parameters: dtypes of scale and bias. arrays: the pointers of _ARRAYS. gradients: (number, dtype) of the
    results that are gradients of scale and bias.
    """
    if not _has_kernel(p, parameters, [dtype for _, dtype in gradients]):
        return None
    automatic, algorithm = algorithm == "auto", pick(operation, algorithm, p, device)
    if automatic and left_to_xla(p, algorithm):
        return None
    n = Norm(p, device, (parameters or [p.dtype])[0], tuple(gradients), arrays, eps, epilogue)
    launches, size = _streaming(n, p.pack) if algorithm == "streaming" else in_registers(n, algorithm)
    unaligned, more = _streaming(n, 1)
    return planned(algorithm, launches, max(size, more), unaligned)
