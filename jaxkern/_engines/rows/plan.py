"""Which algorithm runs a row function, and its launch list.

lanes, warp, block   threads of a part of a warp, of a warp, or of a block hold a row in registers
streaming            a block reads a row again in each stage: any length
strided              the row is not the last dimension: threads take adjacent rows, and warps parts of them
"""

import math
import typing

from jaxkern._core import algorithms, define, functor, launch
from jaxkern._core.define import ceil_div
from jaxkern._core.functor import Unsupported, cpp_type
from jaxkern._core.jaxprs import computing
from jaxkern._core.launch import Launch, Plan, boolean, i64, struct
from jaxkern._engines.jaxpr import Value, merged
from jaxkern._engines.rows import tuning

HEADER = "rows/rows.cuh"
NAME = "Function"
ALGORITHMS = ("lanes", "warp", "block", "streaming", "strided")
DTYPES = tuple(define.CUDA_TYPES)
MOST_ARRAYS = 20
SHARED = 48 * 1024  # bytes of static shared memory, which functions of a kernel do not share


class Problem(typing.NamedTuple):
    """rows: how many. width: their length. bytes: of an element of all arrays that are rows. pack: elements of a thread's load.

    sums: bytes of what a thread adds up over rows, for each element. kept: words of an element that are computed once if
    there are registers for them. strided: the row is not the last dimension; pack counts rows then.
    """

    rows: int
    width: int
    bytes: int = 4
    pack: int = 4
    sums: int = 0
    kept: int = 0
    strided: bool = False


# Modules of hand-written kernels, by the name of the operation. by_hand(device, operands, results, function) returns the plan of
# one, None if XLA is faster than any kernel, or GENERATED.
BY_HAND: dict = {}
GENERATED = "generated"


def outputs(function) -> list:
    """(shape, dtype) of each output of the kernel."""
    size = lambda v: tuple(1 if d is None else d.size for d in v.dims)
    return [(size(o.result), o.dtype) for o in function.core.outputs]


def is_whole(function) -> bool:
    try:
        return function.core.trivial
    except Unsupported:
        return False


def fits(algorithm, problem, device=None) -> bool:
    if problem.strided or algorithm == "strided":
        return problem.strided and algorithm == "strided"
    if algorithm == "streaming":
        return not problem.sums
    return layout(algorithm, problem) is not None


def choose(problem, device=None) -> str:
    in_registers = ("lanes", "warp", "block")
    keep = (a for a in in_registers if problem.kept and not problem.strided and _layout(a, problem, tuning.KEPT_WORDS))
    return next(keep, None) or next(a for a in ALGORITHMS if fits(a, problem, device))


def _picked(function, problem, device) -> str:
    """The algorithm that the caller of the function forced, that is forced here, or that is chosen."""
    if function.name in BY_HAND:  # which has algorithms of its own
        return choose(problem, device)
    forced = algorithms.forced(function.name) if function.algorithm == "auto" else function.algorithm
    return algorithms.pick(function.name, forced, problem, device)


def layout(algorithm, problem):
    """(lanes, packs, threads) of an algorithm that holds rows in registers; None if the rows are too long for it.

    Rows are spread over enough threads to keep dear values, if there is such a layout.
    """
    return problem.kept and _layout(algorithm, problem, tuning.KEPT_WORDS) or _layout(algorithm, problem, None)


def _layout(algorithm, problem, most_kept):
    width, pack = problem.width, problem.pack
    count = ceil_div(
        width + (pack - 1) * (width % pack != 0), pack
    )  # packs of a row, which may start in the middle of one

    def fits(packs, most, threads=tuning.GROUP_THREADS):
        elements = packs * pack
        few = threads < tuning.WIDE_THREADS or elements <= tuning.WIDE_ELEMENTS
        keeps = most_kept is None or (elements * problem.kept <= most_kept and few)
        return keeps and elements * (problem.bytes + problem.sums) / 4 <= most

    if algorithm in ("lanes", "warp"):
        each = max(1, tuning.LANE_BYTES // max(1, pack * problem.bytes))
        for lanes in (32,) if algorithm == "warp" else (1, 2, 4, 8, 16):
            packs = ceil_div(count, lanes)
            if fits(packs, tuning.WARP_WORDS) and (packs <= each or lanes >= 16):
                return lanes, packs, tuning.GROUP_THREADS
        return None
    for threads in (64, 128, 256, 512, 1024):
        packs = ceil_div(count, threads)
        if fits(packs, tuning.BLOCK_WORDS if threads < 1024 else tuning.BLOCK_WORDS / 2, threads):
            if threads >= 256 or packs * pack <= 16 or fits(packs, 16):
                return 0, packs, threads
    return None


def plan(device, operands, results, *, function):
    """The launches of a row function, or None where there is no kernel."""
    if function.name in BY_HAND:
        found = BY_HAND[function.name].by_hand(device, operands, results, function)
        if found != GENERATED:
            return found
    core, program = function.core, function.program
    arrays = [*(operands[k] for k in program.used), *results]
    if not program.has_full:
        return None
    if len(arrays) > MOST_ARRAYS or any(d.size >= 1 << 31 for d in (program.row, *program.others)):
        return None
    mapped = [*(program.operands[k] for k in program.used), *(o.result for o in core.outputs)]
    if any(isinstance(v, Value) and len(program.groups(v)) > define.MAP_RANK for v in mapped):
        return None
    rows, width = math.prod(d.size for d in program.others), program.row.size
    views = [*(program.operands[k] for k in core.rows), *(o.result for o in core.of_kind("row"))]
    if any(_last(v) is not program.row for v in views):
        return _strided(device, operands, arrays, function, views)
    columns = [o for o in core.outputs if o.kind == "columns"]
    row_types = [*(operands[k].dtype for k in core.rows), *(o.dtype for o in core.of_kind("row"))]
    row_bytes = [d.itemsize for d in row_types] or [4]
    pack = tuning.PACK_BYTES // max(2, min(row_bytes))
    same = all([d for d in v.dims if d is not None] == [*program.others, program.row] for v in views)
    summed = sum(computing(o.value.aval.dtype).itemsize for o in columns)
    while width % pack and (not same or summed):
        pack //= 2  # packs start where rows do
    held = sum(operands[k].dtype.itemsize for k in core.rows) or row_bytes[0]
    problem = Problem(rows, width, held, pack, summed, core.kept_words)
    if not any(fits(a, problem, device) for a in ALGORITHMS):
        return None
    algorithm = _picked(function, problem, device)

    def launches(pack, problem):
        if algorithm == "streaming":
            lanes, packs, threads = 0, tuning.STREAM_PACKS, tuning.STREAM_THREADS
        else:
            lanes, packs, threads = layout(algorithm, problem)
        group = lanes or threads
        groups = threads // group
        stays = bool(columns or core.of_kind("total"))
        blocks = ceil_div(rows, groups)
        if stays:
            blocks = min(blocks, tuning.SUM_BLOCKS * device.sm_count * max(1, 512 // threads))
        if blocks >= 1 << 31:
            return None
        ends = "kRagged" if width % pack else "kWhole" if width == group * packs * pack else "kPart"
        room = threads * packs * pack * problem.sums if groups > 1 else 0
        if room + 2 * threads // 32 * sum(core.partial_bytes) + threads * core.total_bytes > SHARED:
            return None
        sums, scratch, after = _sums(core, blocks, width)
        args = _arguments(core, program, rows, width, sums, arrays, device)
        resident = max(1, min(2048 // threads, tuning_blocks(threads, problem, packs)))
        keeps = algorithm != "streaming" and packs * pack * problem.kept <= tuning.KEPT_WORDS
        source = core.source(NAME, keeps)
        if core.size > functor.MOST:
            functor.warn_of_size(function.label, core.size)
            return None
        flags = ", ".join(str(f).lower() for f in (stays, algorithm == "streaming"))
        name = f"RowsKernel<{NAME}, {pack}, {lanes}, {packs}, {threads}, {resident}, {ends}, {flags}>"
        return (Launch(HEADER, name, [args], blocks, threads, source=source), *after), scratch

    aligned = launches(pack, problem)
    if aligned is None:
        return None
    if pack == 1:
        return Plan(algorithm, *aligned)
    single = problem._replace(pack=1)
    unaligned = launches(1, single) if fits(algorithm, single, device) else None
    if unaligned is None:
        return None
    return Plan(algorithm, aligned[0], max(aligned[1], unaligned[1]), unaligned[0])


def tuning_blocks(threads, problem, packs) -> int:
    """Blocks of a multiprocessor that leave enough registers for the packs of each thread."""
    words = packs * problem.pack * max((problem.bytes + problem.sums) / 4, problem.kept)
    registers = 40 if words <= 8 else 64 if words <= 24 else 128
    return max(1, 65536 // (registers * threads))


def _place(core, output) -> int:
    return core.outputs.index(output)


def _last(value):
    """The last dimension of an array."""
    return next(d for d in reversed(value.dims) if d is not None)


def _sums(core, blocks, width):
    """(buffers for the sums over rows of each block, bytes of scratch, launches that add them)."""
    buffers, scratch, after = [], 0, []
    for o in (*core.of_kind("columns"), *core.of_kind("total")):
        dtype = computing(o.value.aval.dtype)
        count = width if o.kind == "columns" else 1
        buffers.append(launch.scratch(scratch))
        args = [struct(launch.scratch(scratch), launch.result(_place(core, o)), i64(blocks), i64(count))]
        name = f"SumOverBlocks<{cpp_type(dtype)}, {cpp_type(o.dtype)}>"
        after.append(Launch(HEADER, name, args, ceil_div(count, 32), 512))
        scratch += ceil_div(blocks * count * dtype.itemsize, 256) * 256
    return buffers, scratch, after


def _arguments(core, program, rows, width, sums, arrays, device):
    """RowEngine::Args (rows.cuh)."""
    moved = sum(a.size * a.dtype.itemsize for a in arrays)
    pointers = lambda buffers: (*buffers, launch.null)
    outs = lambda kind: [launch.result(_place(core, o)) for o in core.of_kind(kind)]
    maps = lambda values: [*(_map(program, v) for v in values), EMPTY_MAP]
    return struct(
        *pointers(launch.operand(k) for k in core.rows),
        *pointers(launch.operand(k) for k in core.columns),
        *pointers(launch.operand(k) for k in core.numbers),
        *pointers(outs("row")),
        *pointers(outs("number")),
        *pointers(sums),
        *maps(program.operands[k] for k in core.rows),
        *maps(program.operands[k] for k in core.numbers),
        *maps(o.result for o in core.of_kind("row")),
        *maps(o.result for o in core.of_kind("number")),
        *(_map_of_index(program, d) for d in core.indices),
        EMPTY_MAP,
        i64(rows),
        i64(width),
        boolean(moved > device.l2_bytes),
    )


def _strided(device, operands, arrays, function, views):
    """The plan where the row is not the last dimension of its arrays: the same dimension of all of them."""
    core, program = function.core, function.program
    inner = program.others[-1] if program.others else None
    if any(_last(v) is not inner for v in views):
        return None
    rows, width = math.prod(d.size for d in program.others), program.row.size
    types = [*(operands[k].dtype for k in core.rows), *(o.dtype for o in core.of_kind("row"))]
    pack = max(1, 8 // max(d.itemsize for d in types))
    while inner.size % pack:
        pack //= 2
    held = max(1, sum(operands[k].dtype.itemsize for k in core.rows))
    problem = Problem(rows, width, held, pack, 0, core.kept_words, strided=True)
    algorithm = _picked(function, problem, device)
    strides = lambda values: [*(i64(_stride(v, program.row)) for v in values), i64(0)]

    def launches(pack):
        words = pack * max(held / 4, core.kept_words)
        parts = next(
            (p for p in (1, 2, 4, 8) if ceil_div(width, p) * words <= tuning.STRIDED_WORDS and p * 4 >= min(width, 32)),
            16,
        )
        while parts > 1 and 32 * parts * (pack * sum(core.partial_bytes) + core.total_bytes) > SHARED:
            parts //= 2
        each = ceil_div(width, parts)
        each = each if each * words <= tuning.STRIDED_WORDS else 0
        source = core.source(NAME, keeps=bool(each))
        blocks = ceil_div(rows, 32 * pack)
        if core.size > functor.MOST or blocks >= 1 << 31:
            return None
        sums, scratch, after = _sums(core, blocks, width)
        views_of = lambda positions: [program.operands[k] for k in positions]
        args = struct(
            _arguments(core, program, rows, width, sums, arrays, device),
            *strides(views_of(core.rows)),
            *strides(o.result for o in core.of_kind("row")),
        )
        name = f"StridedRowsKernel<{NAME}, {pack}, {parts}, {each}>"
        return (Launch("rows/strided.cuh", name, [args], blocks, 32 * parts, source=source), *after), scratch

    aligned = launches(pack)
    if aligned is None or pack == 1:
        return aligned and Plan(algorithm, *aligned)
    unaligned = launches(1)
    return Plan(algorithm, aligned[0], max(aligned[1], unaligned[1]), unaligned[0])


def _stride(value, dim) -> int:
    """The distance of adjacent elements along a dimension."""
    after = value.dims[value.dims.index(dim) + 1 :]
    return math.prod(d.size for d in after if d is not None)


def _map(program, value):
    """IndexMap from the index of a row to the offset of an array's row."""
    return define._index_map(program.groups(value))


def _map_of_index(program, dim):
    return define._index_map(merged((d.size, int(d is dim)) for d in reversed(program.others)))


EMPTY_MAP = define._index_map([])
