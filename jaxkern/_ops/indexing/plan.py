"""Launch lists of index_add, segment_sum, segment_max, segment_min and segment_prod on CUDA.

    unique    no row occurs twice (a hint): each update is added to its row, or written, independently (direct.cuh)
    small     few indices: one launch, in which each update compares its index with all others (small.cuh)
    sorted    ascending indices (a hint): a segmented reduction over fixed chunks of them (chunks.cuh; tiles.cuh and
              narrow_rows.cuh for short rows)
    sort      any indices: the same reduction over the order of sort_indices
    narrow    rows of one element: bins in shared memory. If they do not hold all rows of a slice, updates are first
              sorted by the leading bits of their row (bins.cuh)
    atomic    32-bit numbers, added by atomics: not reproducible, only with deterministic=False (direct.cuh)

All algorithms except `atomic` are bitwise reproducible on any device: chunks depend only on the problem, and their
partial sums are added in order. Preferences and tuned numbers were measured: see benchmarks/NOTES.md, index_add.

problem.py says what they are made for; the launches of `narrow` are in bins_plan.py, of `sorted` and `sort` in chunks_plan.py.
"""

from jaxkern._core import launch
from jaxkern._core.algorithms import pick
from jaxkern._core.define import ceil_div, cpp_bool, cuda_type, size_of
from jaxkern._core.launch import null, struct, u32
from jaxkern._core.params import Params
from jaxkern._ops.indexing import tuning
from jaxkern._ops.indexing.bins_plan import narrow, windows_of
from jaxkern._ops.indexing.chunks_plan import copies_rows, reduced
from jaxkern._ops.indexing.problem import (
    FILL_SHAPE,
    WARP,
    Buffers,
    Problem,
    copied,
    fill_shape,
    filled,
    identity,
    kernel,
    parts,
    run_of,
    vector_of,
)
from jaxkern._ops.indexing.sort import MAX_KEYS, MAX_POSITIONS, Scratch

ALGORITHMS = ("unique", "small", "sorted", "sort", "narrow", "atomic")
DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint32")
INDEX_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

DIRECT_SHAPE, SMALL_SHAPE = Params("indexing/direct.cuh", "DirectShape"), Params("indexing/small.cuh", "SmallShape")


# ---- which algorithm


def fits(algorithm: str, p: Problem, device=None) -> bool:
    """Whether the algorithm can run the problem. `sorted` and `unique` are wrong without their hint."""
    del device
    match algorithm:
        case "unique":
            return p.unique
        case "small":
            return p.count <= tuning.SMALL_COUNT
        case "sorted":
            return p.sorted
        case "sort":
            return True
        case "narrow":
            one_run = p.outer == 1 and p.batch * p.rows < MAX_KEYS and p.batch * p.count <= MAX_POSITIONS
            return p.inner == 1 and p.size <= 4 and (p.rows <= tuning.WIDE_BINS or one_run)
        case "atomic":
            return not p.deterministic and p.adds and p.size == 4
    return False


def choose(p: Problem, device=None) -> str:
    """The algorithm that runs the problem by default; the same on every device."""
    if p.unique and p.adds:
        return "unique"
    if _small_pays(p):
        return "small"
    # Atomics win if there are too few updates to amortise a sort, and lose if rows receive many updates.
    if fits("atomic", p) and p.batch * p.count <= tuning.ATOMIC_UPDATES:
        return "atomic"
    if p.sorted:
        return "sorted"
    if p.unique:
        return "unique"
    return "narrow" if fits("narrow", p) and _narrow_pays(p) else "sort"


def _small_pays(p):
    """Each update is compared with all others of its slice, once per 4 KB of its row."""
    compares = p.batch * p.outer * p.count * p.count * ceil_div(p.row_bytes, tuning.SMALL_ROW_BYTES)
    return p.count <= tuning.SMALL_COUNT and (p.count <= tuning.SMALL_ALWAYS or compares <= tuning.SMALL_COMPARISONS)


def _narrow_pays(p):
    positions = p.batch * p.outer * p.count
    if p.rows <= tuning.BINS and p.count >= tuning.NARROW_EACH * p.rows and positions >= tuning.NARROW_UPDATES:
        return True
    if p.count <= tuning.FEW_UPDATES and windows_of(p.batch * p.outer, p.rows, p.count):
        return True
    return (p.outer == 1 or p.rows <= tuning.WIDE_BINS) and positions >= tuning.NARROW_MANY and p.count >= p.rows


# ---- the launches of an algorithm


def launches(algorithm: str, p: Problem, buffers: Buffers, aligned: bool = True) -> tuple[list, int]:
    """(launches, bytes of scratch). aligned: all buffers are aligned to 16 bytes."""
    steps, most = [], 0
    # Rows without updates are written here, or by the first run.
    writes_all = not p.adds or buffers.x is not None
    fills_first = writes_all and (
        _fills_first(p) or (not copies_rows(algorithm, p) if p.adds else algorithm == "unique")
    )
    if fills_first:
        size = p.batch * p.outer * p.rows * p.row_bytes
        steps.append(copied(p, buffers, aligned) if p.adds else filled(buffers.out, size, identity(p)))
    for part in parts(p):
        scratch, later = Scratch(), part.position > 0
        # A run reads the rows back that an earlier run has written.
        reads_out = p.adds or ((later or fills_first) and algorithm != "unique")
        fills = writes_all and not later and not fills_first
        run = run_of(p, part, buffers, reads_out, buffers.x if fills else None)
        if algorithm == "small":
            steps += small(p, run, fills, aligned)
        elif algorithm in ("unique", "atomic"):
            steps.append(direct(p, run, algorithm == "atomic", aligned))
        elif algorithm == "narrow":
            steps += narrow(p, run, fills, aligned, scratch)
        else:
            steps += reduced(algorithm, p, run, buffers, fills, aligned, scratch)
        most = max(most, scratch.bytes)
    return steps, most


def _fills_first(p) -> bool:
    """Few updates of many short rows: a kernel that only writes is faster than one that looks for the rows without any.

    On an H200, microseconds without and with it: 1 of each of 8192 x 50257 rows, bfloat16, 5782 and 214; 500,000 of 2^22,
    float32, 274 and 108; rows of 32 bytes 45 and 49.
    """
    rows = p.batch * p.outer * p.rows
    return (
        p.row_bytes < tuning.FILL_ROW_BYTES
        and rows * p.row_bytes >= tuning.FILL_BYTES
        and p.rows >= tuning.FILL_ROWS * p.count
    )


# -- unique and atomic


def direct(p, run, atomic, aligned):
    n = vector_of(p, aligned)
    positions, vectors, each = run.indices.positions, p.inner // n, 256 * 4
    threads = p.outer * positions * vectors
    shape = DIRECT_SHAPE(vectors=vectors, threads=threads, by_vectors=vectors, by_positions=positions)
    name = f"DirectUpdates<jaxkern::Reduction::kSum, {cuda_type(p.dtype)}, {n}, {cpp_bool(atomic)}>"
    return kernel("direct", name, [run.struct(), shape], ceil_div(threads, each), 256)


# -- small


def small(p, run, fills, aligned):
    n, positions, count = vector_of(p, aligned), run.indices.positions, run.indices.part.count
    vectors, dtype, groups = p.inner // n, cuda_type(p.dtype), ceil_div(count, tuning.SMALL_WARPS)

    def shared(words, pitch):
        """Keys, a list of updates per warp and a vector of sums per thread."""
        return words * pitch * 4 + words * tuning.SMALL_WARPS * WARP * 2 + tuning.SMALL_WARPS * WARP * n * p.sum_bytes

    floats = p.dtype.kind != "i" and p.dtype.kind != "u" and p.size <= 4
    if (
        p.adds
        and floats
        and n in (1, 16 // p.size)
        and run.indices.plain
        and run.reads_out
        and run.indices.part.batch * p.outer == 1
    ):
        # No more warps than run at once, so that they load little too early.
        each = next(
            e
            for e in (1, 2, 4)
            if e == tuning.SMALL_VECTORS or ceil_div(vectors, WARP * e) * count <= tuning.SUMS_AT_ONCE
        )
        column_tiles = ceil_div(vectors, WARP * each)
        if column_tiles * count <= tuning.SUMS_WARPS:
            words = 4 if count <= 4 * WARP else 32
            args = struct(
                run.indices.buffer,
                run.source,
                run.alpha,
                run.out,
                u32(p.inner),
                u32(p.rows),
                u32(p.rows if p.wrap else 0),
                u32(count | each << 16),
            )
            return [
                kernel(
                    "small", f"SmallSums<{dtype}, {n}, {words}>", [args], (column_tiles, groups), 256, shared(words, 0)
                )
            ]
    each, most = 1, WARP * tuning.SMALL_WARPS_AT_ONCE
    while each < tuning.SMALL_VECTORS and vectors * positions * p.outer > most * each and vectors > WARP * each:
        each *= 2
    column_tiles, words = ceil_div(vectors, WARP * each), ceil_div(count, WARP)
    blocks = column_tiles * groups * run.indices.part.batch * p.outer
    fill, fill_blocks = (
        fill_shape(run.indices.dropped, p.outer, vectors, n * p.size) if fills else (FILL_SHAPE.empty, 0)
    )
    shape = SMALL_SHAPE(
        vectors=vectors,
        column_tiles=column_tiles,
        each=each,
        groups=groups,
        by_column_tiles=column_tiles,
        by_groups=groups,
        words=words,
        fill_after=blocks,
        fill=fill,
    )
    return [
        kernel(
            "small",
            f"SmallUpdates<{p.reduction}, {dtype}, {n}>",
            [run.struct(), shape],
            blocks + fill_blocks,
            256,
            shared(words, tuning.KEY_PITCH),
        )
    ]


# ---- the plan of a primitive


def problem_of(op, rows_shape, source, index, rules) -> Problem | None:
    """The problem of operands of these types and a result of rows_shape; None if there is no kernel for them."""
    k, axis = rules.batch_dims, rules.axis
    if source.dtype.name not in DTYPES:
        return None
    whole = source.shape[:k] == index.shape[:k]
    return Problem(
        rows_shape[axis],
        source.shape[axis],
        size_of(rows_shape[axis + 1 :]),
        source.dtype,
        index.dtype,
        op,
        size_of(index.shape[:k]),
        size_of(rows_shape[k:axis]),
        rules.sorted,
        rules.unique,
        rules.deterministic,
        rules.wrap,
        rules.clip,
        whole,
    )


def rows_shape(operands, rules, rows=None) -> tuple:
    """The shape of the result. operands: of index_add or a segment operation, or their types."""
    if rows is None:
        return operands.x.shape
    source, k, axis = operands.source, rules.batch_dims, rules.axis
    return (*operands.index.shape[:k], *source.shape[k:axis], rows, *source.shape[axis + 1 :])


def plan(op, device, operands, results, *, rules, rows=None) -> launch.Plan | None:
    """The plan of index_add or a segment operation, for operands as in primitive.py; None if there is no kernel.

    Without an order, each run sorts its updates in scratch.
    """
    del device, rows
    p = problem_of(op, results[0].shape, operands.source, operands.index, rules)
    if p is None:
        return None
    algorithm, given = pick(op, rules.plan, p), launch.operands(operands)._asdict()
    if operands.order is None or len(parts(p)) > 1:
        given |= {"keys": None, "order": None}
    elif algorithm == "sorted" and rules.plan == "auto":
        algorithm = "sort"  # over the given order
    out = launch.result(0)
    if not rules.copies:
        given.pop("x", None)
    buffers = Buffers(**{"alpha": null, "out": out} | given)
    steps, scratch = launches(algorithm, p, buffers)
    unaligned, more = launches(algorithm, p, buffers, aligned=False)
    return launch.planned(algorithm, steps, max(scratch, more), None if unaligned == steps else unaligned)
