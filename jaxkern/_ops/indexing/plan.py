"""Launch lists of index_add, segment_sum, segment_max and segment_min on CUDA.

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

Kernels see x and out as [batch, outer, rows, inner], source as [batch, outer, count, inner], index as [batch, count].
"""

import dataclasses
import functools
import typing

import numpy as np

from jaxkern._core import launch
from jaxkern._core.algorithms import pick
from jaxkern._core.define import ceil_div, cuda_type, divider, fast_divmod, size_of
from jaxkern._core.launch import boolean, i32, i64, null, struct, u32, u64
from jaxkern._ops.indexing.sort import (
    MAX_KEYS,
    MAX_POSITIONS,
    Indices,
    Part,
    Scratch,
    bits_for,
    digits,
    radix_sort,
    sorted_into,
    source_rows,
)

ALGORITHMS = ("unique", "small", "sorted", "sort", "narrow", "atomic")
DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint32")
INDEX_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
REDUCTIONS = {"index_add": "kSum", "segment_sum": "kSum", "segment_max": "kMax", "segment_min": "kMin"}

WARP = 32
SMALL_COUNT = 1024  # indices: 32 for each lane of a warp
FEW_UPDATES = 16384  # few enough that every block may read all indices
NARROW_INNER = 8  # the longest row, in elements, for narrow_rows.cuh


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


# ---- which algorithm


def fits(algorithm: str, p: Problem, device=None) -> bool:
    """Whether the algorithm can run the problem. `sorted` and `unique` are wrong without their hint."""
    del device
    match algorithm:
        case "unique":
            return p.unique
        case "small":
            return p.count <= SMALL_COUNT
        case "sorted":
            return p.sorted
        case "sort":
            return True
        case "narrow":
            one_run = p.outer == 1 and p.batch * p.rows < MAX_KEYS and p.batch * p.count <= MAX_POSITIONS
            return p.inner == 1 and p.size <= 4 and (p.rows <= WIDE_BINS or one_run)
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
    if fits("atomic", p) and p.batch * p.count <= 16384:
        return "atomic"
    if p.sorted:
        return "sorted"
    if p.unique:
        return "unique"
    return "narrow" if fits("narrow", p) and _narrow_pays(p) else "sort"


def _small_pays(p):
    """Each update is compared with all others of its slice, once per 4 KB of its row."""
    compares = p.batch * p.outer * p.count * p.count * ceil_div(p.row_bytes, 4096)
    return p.count <= SMALL_COUNT and (p.count <= 64 or compares <= 16e6)


def _narrow_pays(p):
    positions = p.batch * p.outer * p.count
    if p.rows <= BINS and p.count >= 4 * p.rows and positions >= 4096:
        return True
    if p.count <= FEW_UPDATES and windows_of(p.batch * p.outer, p.rows, p.count):
        return True
    return (p.outer == 1 or p.rows <= WIDE_BINS) and positions >= 1 << 18 and p.count >= p.rows


# ---- runs


class Buffers(typing.NamedTuple):
    index: launch.Buffer
    source: launch.Buffer
    alpha: launch.Buffer | launch.Scalar
    out: launch.Buffer
    keys: launch.Buffer | None = None  # of the given order
    order: launch.Buffer | None = None


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
        return struct(
            *self.indices.members(),
            self.keys,
            self.order,
            self.pairs,
            self.keys_out,
            self.order_out,
            self.chunks,
            self.source,
            self.alpha,
            self.out,
            self.partials,
            i64(self.outer),
            i64(self.inner),
            i64(self.source_stride),
            i64(self.out_stride),
            i64(self.source_extra),
            i64(self.out_extra),
            divider(self.indices.part.rows),
            u32(self.chunk),
            i32(self.sorted_bits),
            boolean(self.sorted_keys),
            boolean(self.reads_out),
        )

    def replace(self, **fields) -> "Run":
        return dataclasses.replace(self, **fields)


def run_of(p: Problem, part: Part, buffers: Buffers, reads_out: bool) -> Run:
    source_batch = p.outer * p.count if p.source_batched else 0
    index = moved(buffers.index, (part.b * p.count + part.position) * p.index_dtype.itemsize)
    return Run(
        Indices(index, p.index_dtype, p.rows, p.wrap, p.clip, part),
        source=moved(buffers.source, (part.b * source_batch + part.position) * p.row_bytes),
        alpha=buffers.alpha,
        out=moved(buffers.out, part.b * p.outer * p.rows * p.row_bytes),
        outer=p.outer,
        inner=p.inner,
        source_stride=p.count,
        out_stride=p.rows,
        source_extra=source_batch - p.count if part.batch > 1 else 0,
        out_extra=(p.outer - 1) * p.rows if part.batch > 1 else 0,
        reads_out=reads_out,
    )


# ---- the launches of an algorithm


def kernel(header, name, args, blocks, threads, shared=0):
    return launch.Launch(f"indexing/{header}.cuh", name, args, grid=blocks, block=threads, shared=shared)


def launches(algorithm: str, p: Problem, buffers: Buffers, aligned: bool = True) -> tuple[list, int]:
    """(launches, bytes of scratch). aligned: all buffers are aligned to 16 bytes."""
    steps, most = [], 0
    if not p.adds and algorithm == "unique":
        steps.append(filled(buffers.out, p.batch * p.outer * p.rows * p.row_bytes, identity(p)))
    for part in parts(p):
        scratch, later = Scratch(), part.position > 0
        # A run reads the rows back that an earlier run has written.
        run = run_of(p, part, buffers, p.adds or (later and algorithm != "unique"))
        fills = not p.adds and not later and algorithm != "unique"
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


def vector_of(p, aligned) -> int:
    """The number of elements of a row that one access reads or writes."""
    if aligned and p.row_bytes % 16 == 0:
        return 16 // p.size
    return 2 if aligned and p.size == 2 and p.row_bytes % 4 == 0 else 1


def identity(p) -> int:
    """The result of a segment without elements as bits, repeated to 8 bytes."""
    if p.op == "segment_sum":
        return 0
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


def power_of_two(n, least, most) -> int:
    """The largest power of two up to n, within [least, most], which are powers of two."""
    return min(max(1 << max(n, 1).bit_length() - 1, least), most)


# -- unique and atomic


def direct(p, run, atomic, aligned):
    n = vector_of(p, aligned)
    positions, vectors, each = run.indices.positions, p.inner // n, 256 * 4
    threads = p.outer * positions * vectors
    shape = struct(i64(vectors), i64(threads), divider(vectors), divider(positions))
    name = f"DirectUpdates<jaxkern::Reduction::kSum, {cuda_type(p.dtype)}, {n}, {'true' if atomic else 'false'}>"
    return kernel("direct", name, [run.struct(), shape], ceil_div(threads, each), 256)


# -- small

SMALL_WARPS, SMALL_VECTORS, KEY_PITCH = 8, 4, 36


def small(p, run, fills, aligned):
    n, positions, count = vector_of(p, aligned), run.indices.positions, run.indices.part.count
    vectors, dtype, groups = p.inner // n, cuda_type(p.dtype), ceil_div(count, SMALL_WARPS)

    def shared(words, pitch):
        """Keys, a list of updates per warp and a vector of sums per thread."""
        return words * pitch * 4 + words * SMALL_WARPS * WARP * 2 + SMALL_WARPS * WARP * n * p.sum_bytes

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
        each = next(e for e in (1, 2, 4) if e == SMALL_VECTORS or ceil_div(vectors, WARP * e) * count <= 2048)
        slabs = ceil_div(vectors, WARP * each)
        if slabs * count <= 4096:
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
                kernel("small", f"SmallSums<{dtype}, {n}, {words}>", [args], (slabs, groups), 256, shared(words, 0))
            ]
    each = 1
    while each < SMALL_VECTORS and vectors * positions * p.outer > WARP * each * 4096 and vectors > WARP * each:
        each *= 2
    slabs, words = ceil_div(vectors, WARP * each), ceil_div(count, WARP)
    blocks = slabs * groups * run.indices.part.batch * p.outer
    fill, fill_blocks = fill_shape(run.indices.dropped, p.outer, vectors, n * p.size) if fills else (NO_FILL, 0)
    shape = struct(
        i64(vectors), i64(slabs), i32(each), i64(groups), divider(slabs), divider(groups), i32(words), i64(blocks), fill
    )
    return [
        kernel(
            "small",
            f"SmallUpdates<{p.reduction}, {dtype}, {n}>",
            [run.struct(), shape],
            blocks + fill_blocks,
            256,
            shared(words, KEY_PITCH),
        )
    ]


def fill_shape(keys, outer, vectors, size):
    """(FillShape, blocks) for rows of `vectors` of `size` bytes."""
    tile, most = 64 * 1024, 1024
    slab = tile // size if vectors * size > 2 * tile else vectors
    slabs, rows = ceil_div(vectors, slab), min(max(tile // (slab * size), 1), most)
    row_tiles = ceil_div(keys, rows)
    blocks = row_tiles * slabs * outer
    return struct(i64(rows), i64(slab), i64(slabs), i64(row_tiles), divider(slab), i64(blocks)), blocks


NO_FILL = struct(*[i64(0)] * 4, divider(1), i64(0))


# -- narrow

BIN_BITS, BINS, WIDE_BINS, FEW_BINS, BIN_WINDOW = 11, 1 << 11, 16384, 32, 16
BIN_THREADS, WIDE_THREADS, BIN_WARPS, WINDOW_THREADS, WINDOW_EACH, STRETCH_THREADS = 256, 128, 8, 768, 16, 512


def bin_chunk(positions, bins) -> int:
    """Positions of a block."""
    return power_of_two(positions // (512 if bins > BINS else 1024), 4096, 32768)


def bin_bytes(bins, copies) -> int:
    """Shared memory of a block: bins, and one flag bit per bin and warp. copies == 0: each thread has its own bins."""
    if copies == 0:
        return bins * BIN_THREADS * 4
    flags = BINS // 32 if bins <= BINS else ceil_div(bins, 32)
    return 4 * (copies * bins + (WIDE_THREADS // WARP if copies == 1 else copies) * flags)


def windows_of(slices, rows, count) -> int:
    """The number of blocks if each takes BIN_WINDOW rows of a slice and reads all of its updates; 0 if that is slower."""
    most_read = 1 << 23  # indices that all blocks read together, from L2
    if rows > BINS or count > (1 << 17 if rows > 32 else FEW_UPDATES):
        return 0
    windows = ceil_div(rows, BIN_WINDOW)
    return windows if slices * windows <= 512 and slices * windows * count <= most_read else 0


def narrow(p, run, fills, aligned, scratch):
    template, indices = f"{p.reduction}, {cuda_type(p.dtype)}", run.indices
    positions, part, step = indices.positions, indices.part, functools.partial(kernel, "bins")
    if p.rows > WIDE_BINS:
        return narrow_sorted(p, run, fills, scratch, template)
    slices, count, rows = part.batch * p.outer, part.count, part.rows
    windows = windows_of(slices, rows, count)
    whole = aligned and indices.buffer.offset % 16 == 0 and indices.plain and (part.batch == 1 or count % 4 == 0)
    if windows and (whole or count <= FEW_UPDATES):
        # As few passes over the updates as possible, and as many threads as they keep busy; whole vectors of bins.
        each, unit = WINDOW_EACH * ceil_div(count, WINDOW_EACH * WINDOW_THREADS), 4 * WARP
        return [
            step(
                f"BinWindows<{template}>",
                [run.struct(), u32(count // 4 if whole else 0)],
                (windows, slices),
                ceil_div(count, each * unit) * unit,
            )
        ]
    chunk, copies = bin_chunk(positions * p.outer, rows), 1 if rows > BINS else BIN_WARPS
    chunks, few = ceil_div(count, chunk), rows <= FEW_BINS
    if chunks > 1:
        run = run.replace(partials=scratch.take(4 * slices * chunks * rows))
    shape = struct(u32(chunk), u32(chunks), i64(slices), i32(rows), i32(copies), u32(0), i64(0), NO_FILL)
    steps = [
        step(
            f"BinSlices<{template}, {'true' if few else 'false'}>",
            [run.struct(), shape],
            slices * chunks,
            WIDE_THREADS if copies == 1 else BIN_THREADS,
            bin_bytes(rows, 0 if few else copies),
        )
    ]
    if chunks > 1:
        steps.append(step(f"BinParts<{template}>", [run.struct(), shape], slices * ceil_div(rows, WARP), 1024))
    return steps


def narrow_sorted(p, run, fills, scratch, template):
    """Sorts the elements of source by the leading bits of their keys, then adds them in bins."""
    indices, step = run.indices, functools.partial(kernel, "bins")
    # Dropped updates may mix with others, which saves a bit if the number of rows is a power of two.
    positions, cut = indices.positions, digits(indices.positions, BIN_BITS, bits_for(indices.dropped))
    buffers = [(scratch.take(4 * positions), scratch.take(4 * positions)) for _ in range(min(cut.passes, 2))]
    chunk = bin_chunk(positions, BINS)
    chunks = ceil_div(positions, chunk)
    targets = [buffers[i % 2] for i in range(cut.passes)]
    pairs = targets[-1][0]  # 8 * positions bytes: the buffer of the payload follows that of the keys
    steps = radix_sort(
        indices,
        cut,
        BIN_BITS,
        targets,
        scratch.take(4 * (cut.tiles + 1) << cut.bits),
        (run.source, run.source_extra, p.size),
    )
    run = run.replace(pairs=pairs, sorted_bits=cut.passes * cut.bits, partials=scratch.take(4 * 2 * chunks * BINS))
    fill, fill_blocks = fill_shape(indices.dropped, 1, 1, p.size) if fills else (NO_FILL, 0)
    shape = struct(
        u32(chunk), u32(chunks), i64(1), i32(0), i32(BIN_WARPS), u32((1 << run.sorted_bits) - 1), i64(chunks), fill
    )
    steps.append(
        step(
            f"BinSorted<{template}>",
            [run.struct(), shape],
            chunks + fill_blocks,
            BIN_THREADS,
            bin_bytes(BINS, BIN_WARPS),
        )
    )
    if chunks > 1:
        steps.append(step(f"BinStretches<{template}>", [run.struct(), shape], chunks, STRETCH_THREADS))
    return steps


# -- sorted and sort: the segmented reductions

REDUCE_THREADS, DESCRIBE_THREADS, KEYS_WRITTEN = 128, 128, 16
NARROW_THREADS, TILE_THREADS = 256, 256
TILE_PLACES, TILE_BYTES, TILE_REACH, TILE_PACKS = 2048, 45000, 32, 16


def reduces_tiles(algorithm, p) -> bool:
    if algorithm != "sorted" or p.batch != 1 or p.inner > 2**31 - 1:
        return False
    # Slabs of long rows are faster if elements are too small to be loaded one by one.
    odd = p.row_bytes % 16 != 0 and (p.row_bytes <= 512 or p.size < 4)
    return p.inner <= NARROW_INNER or odd


def in_flight(p) -> int:
    """Updates that a thread of ReduceChunks keeps in flight; more hide more latency. Vectors of small elements have enough
    threads for that, and each row of x that is read delays the updates behind it."""
    if p.row_bytes % 16 != 0:
        return 8
    many_rows = p.adds and p.count < 32 * p.rows
    return 4 if p.size > 2 or many_rows else 8


def chunk_of(p) -> int:
    """Positions of a chunk of ReduceChunks."""
    multiprocessors = 128  # a few less than there are: whole waves of threads
    whole, under_way = p.row_bytes % 16 == 0, in_flight(p)
    blocks = 4 if not whole else 8 if p.size > 2 else 7 if under_way == 4 else 5  # ReduceBlocks
    wave = multiprocessors * blocks * REDUCE_THREADS
    lanes = p.positions * p.outer * ceil_div(p.row_bytes, 16)
    least, most = 16, 500
    # One wave has the fewest chunk edges, but waits for its slowest thread. More waves are better if threads differ much in
    # how many long rows they write, and if there are many short rows.
    waves = max(1, ceil_div(lanes, most * wave))
    if whole and p.size == 2 and p.row_bytes >= 8192:
        waves = max(waves, 2)
    if whole and p.size > 2 and lanes >= 3 * 64 * wave:
        waves = max(waves, 3)
    # Odd, so that concurrent chunks do not all use the same memory channels.
    return min(max(ceil_div(lanes, waves * wave), least), most) | 1


class Tile(typing.NamedTuple):
    """Positions, columns, and elements from one position to the next, of a tile of tiles.cuh."""

    places: int
    slab: int
    pitch: int


def tile_of(inner, size) -> Tile:
    n, slab, pitch = 16 // size, inner, inner
    if inner * size > 512:
        # Slabs of equal width that TILE_PACKS vectors hold, wherever they begin. From one position to the next the
        # vectors of a slab shift as the vectors of source do, and the vectors of two positions never overlap.
        slab = ceil_div(inner, ceil_div(inner, (TILE_PACKS - 1) * n + 1))
        pitch = slab + 2 * n - 2
        while pitch % n != inner % n:
            pitch += 1
    return Tile(min(TILE_PLACES, (TILE_BYTES - 512) // (pitch * size + 7)), slab, pitch)  # keys, ends of runs


def tile_places(p) -> int:
    """The number of positions of a tile such that tiles of about equal length fill whole waves."""
    wave, least, tile = 640, 256, tile_of(p.inner, p.size)
    wave = max(wave // (p.outer * ceil_div(p.inner, tile.slab)), 1)
    tiles = ceil_div(ceil_div(p.positions, tile.places), wave) * wave
    return min(max(ceil_div(p.positions, tiles), min(least, tile.places)), tile.places)


def narrow_stretch(size) -> int:
    return 9 if size == 8 else 17  # NarrowStretch


def reduced(algorithm, p, run, buffers, fills, aligned, scratch):
    indices, steps = run.indices, []
    positions, plain = indices.positions, indices.plain and not (indices.wrap and indices.signed)
    tiles = reduces_tiles(algorithm, p)
    narrow_rows = not tiles and p.inner <= NARROW_INNER
    if tiles:
        run = run.replace(chunk=tile_places(p))
    elif narrow_rows:
        run = run.replace(chunk=256 // p.inner * narrow_stretch(p.size))
    else:
        run = run.replace(chunk=chunk_of(p))
    chunks = ceil_div(positions, run.chunk)
    if algorithm == "sort":
        if buffers.keys is not None:
            keys, order = buffers.keys, buffers.order
        else:
            keys, order = scratch.take(4 * positions), scratch.take(4 * positions)
            steps += sorted_into(indices, keys, order, scratch)
        if run.source_extra:
            rows = scratch.take(4 * positions) if buffers.keys is not None else order
            steps.append(source_rows(indices, order, rows, run.source_extra))
            order = rows
        run = run.replace(keys=keys, order=order, sorted_keys=True)
    elif plain and indices.part.batch == 1:
        # Ascending indices of this kind serve as keys: read as unsigned, an index out of range names no row either.
        run = run.replace(keys=indices.buffer)
    run = run.replace(partials=scratch.take(2 * chunks * p.outer * p.inner * p.sum_bytes))
    if tiles:
        return steps + tiled(p, run, fills)
    if narrow_rows:
        return steps + narrow_reduced(p, run, fills)
    run = run.replace(chunks=scratch.take(16 * chunks))
    if run.keys is null:
        order = scratch.take(4 * positions) if run.source_extra else null
        run = run.replace(keys_out=scratch.take(4 * positions), order_out=order)
    described, run = describe(run, chunks)
    return steps + described + chunked(p, run, fills, aligned)


def describe(run, chunks):
    """(launches, run) that fill run.chunks, and run.keys if there are only ascending indices."""
    indices = run.indices
    describing, writing = (
        ceil_div(chunks, DESCRIBE_THREADS),
        ceil_div(indices.positions, DESCRIBE_THREADS * KEYS_WRITTEN),
    )

    def step(keyed, describing, writing):
        return kernel(
            "chunks",
            f"Describe<{'true' if keyed else 'false'}>",
            [run.struct(), u32(run.chunk), u32(chunks), u32(describing)],
            describing + writing,
            DESCRIBE_THREADS,
        )

    if run.keys is not null:
        return [step(True, describing, 0)], run
    at_once = indices.plain and indices.part.batch == 1
    steps = [step(False, describing if at_once else 0, writing)]
    run = run.replace(keys=run.keys_out, order=run.order_out, keys_out=null, order_out=null)
    return steps if at_once else [*steps, step(True, describing, 0)], run


class Shape(typing.NamedTuple):
    """ReduceShape of reduce.cuh; vectors: threads that share a row."""

    run: Run
    vectors: int
    threads: int
    blocks: int
    reach: int
    bands: launch.Struct

    @property
    def chunks(self) -> int:
        return ceil_div(self.run.indices.positions, self.run.chunk)

    def struct(self) -> launch.Struct:
        return struct(
            u32(self.run.chunk),
            u32(self.chunks),
            u32(self.reach),
            i64(self.vectors),
            divider(self.vectors),
            divider(self.chunks),
            i64(self.threads),
            i64(self.blocks),
            self.bands,
        )


NO_BANDS = struct(u32(0), i64(0), u32(0), i64(0), i64(0), i64(0), u32(0), i64(0), i64(0), *[divider(1)] * 4)


def band_shape(run, vectors, size, gaps):
    """(BandShape, warps) for rows of `vectors` of `size` bytes; gaps: no other thread compares neighbouring keys."""
    part, positions = run.indices.part, run.indices.positions
    # If most rows receive updates, a warp can check more rows and positions.
    dense = positions >= run.indices.dropped
    slab_bytes, most = 64 * 1024, 256
    rows = power_of_two((16 if dense else 8) * 1024 // (vectors * size), 1, most)
    slab = slab_bytes // size if vectors * size > 2 * slab_bytes else vectors
    slabs, slice_bands = ceil_div(vectors, slab), ceil_div(part.rows, rows)
    bands = part.batch * slice_bands
    stretch = stretches = gap_warps = 0
    if gaps and rows > 1:
        stretch = 4 * WARP if dense else WARP
        stretches = (positions + stretch) // stretch  # plus one for the end of the positions
        gap_warps = run.outer * stretches * slabs
    warps = run.outer * bands * slabs + gap_warps
    return struct(
        u32(rows),
        i64(bands),
        u32(slice_bands),
        i64(slab),
        i64(slabs),
        i64(stretches),
        u32(stretch),
        i64(gap_warps),
        i64(warps),
        divider(slabs),
        divider(bands),
        divider(slice_bands),
        divider(max(stretches, 1)),
    ), warps


def chunked(p, run, fills, aligned):
    n = vector_of(p, aligned)
    whole = n * p.size == 16
    per_thread = 1 if whole else 4
    vectors, chunks = ceil_div(p.inner // n, per_thread), ceil_div(run.indices.positions, run.chunk)
    threads = p.outer * chunks * vectors
    bands, warps = band_shape(run, p.inner // n, n * p.size, True) if fills else (NO_BANDS, 0)
    shape = Shape(run, vectors, threads, ceil_div(threads, REDUCE_THREADS), 0, bands)
    # Larger elements in whole vectors have 4 positions in flight, rows of partial vectors 8.
    rows = 4 if whole and (p.size > 2 or (REDUCTIONS[p.op] == "kSum" and in_flight(p) == 4)) else 8
    keys_aligned = aligned and all(b is null or b.offset % 16 == 0 for b in (run.keys, run.order))
    name = (
        f"ReduceChunks<{p.reduction}, {cuda_type(p.dtype)}, {n}, {per_thread}, {rows}, "
        f"{'true' if keys_aligned else 'false'}>"
    )
    blocks = shape.blocks + ceil_div(warps, REDUCE_THREADS // WARP)
    return [kernel("chunks", name, [run.struct(), shape.struct()], blocks, REDUCE_THREADS), *fixup(p, shape)]


def narrow_reduced(p, run, fills):
    chunks, n = ceil_div(run.indices.positions, run.chunk), 16 // p.size
    bands, warps = band_shape(run, p.inner, p.size, False) if fills else (NO_BANDS, 0)
    shape = Shape(run, p.inner, 0, p.outer * chunks, 0, bands)
    values = (run.chunk * p.inner + 2 * n) // n * n
    shared = values * p.sum_bytes + NARROW_THREADS * (p.sum_bytes + 4) + (run.chunk + 2) * 4 + run.chunk * 2
    blocks = shape.blocks + ceil_div(warps, NARROW_THREADS // WARP)
    return [
        kernel(
            "narrow_rows",
            f"ReduceNarrow<{p.reduction}, {cuda_type(p.dtype)}>",
            [run.struct(), shape.struct(), struct(i32(values), i32(run.chunk))],
            blocks,
            NARROW_THREADS,
            shared,
        ),
        *fixup(p, shape),
    ]


def tiled(p, run, fills):
    places, n, tile = run.chunk, 16 // p.size, tile_of(p.inner, p.size)
    slabs, chunks = ceil_div(p.inner, tile.slab), ceil_div(run.indices.positions, run.chunk)
    values = (places * tile.pitch + 3 * n) // n * n
    each = next((e for e in (8, 4, 2) if places > e // 2 * TILE_THREADS), 1)
    bands, warps = band_shape(run, p.inner, p.size, False) if fills else (NO_BANDS, 0)
    shape = Shape(run, 1, 0, p.outer * chunks * slabs, TILE_REACH, bands)
    tile = struct(
        i32(tile.slab), i32(tile.pitch), i64(slabs), divider(slabs), fast_divmod(tile.slab), i32(values), i32(each)
    )
    shared = values * p.size + (places + TILE_REACH + 5) * 4 + (places + 1) * 2
    blocks = shape.blocks + ceil_div(warps, TILE_THREADS // WARP)
    return [
        kernel(
            "tiles",
            f"ReduceTiles<{p.reduction}, {cuda_type(p.dtype)}>",
            [run.struct(), shape.struct(), tile],
            blocks,
            TILE_THREADS,
            shared,
        ),
        *fixup(p, shape),
    ]


FIXUP_THREADS, FIXUP_LANES, FIXUP_CHUNKS, HEAD_THREADS, HEAD_GROUP = 256, 8, 8, 128, 32


def fixup(p, shape):
    """The launches that join the parts of runs that chunk edges cut; none if there is one chunk."""
    run, chunks, template = shape.run, shape.chunks, f"{p.reduction}, {cuda_type(p.dtype)}"
    if chunks == 1:
        return []
    n = 16 // p.sum_bytes
    wide = p.inner % n == 0
    vectors = p.inner // n if wide else p.inner
    lanes = FIXUP_LANES if vectors >= 5 else 4 if vectors >= 3 else vectors
    slabs, pieces = ceil_div(vectors, lanes), ceil_div(chunks, FIXUP_CHUNKS)
    # One wave of blocks; most find nothing to do.
    each = min(ceil_div(pieces * slabs * p.outer, 512), pieces) * FIXUP_CHUNKS
    step = ceil_div(chunks, each)
    # If the longest run would make one warp wait for memory more than 24 times.
    grouped = chunks > 24 * (8 if wide else 16) * WARP // lanes
    steps = []
    if grouped:
        groups = (chunks - 1) // HEAD_GROUP - 1
        threads = groups * p.inner * p.outer
        steps.append(
            kernel(
                "reduce",
                f"ReduceGroups<{template}>",
                [run.struct(), shape.struct(), divider(p.inner), divider(groups), i64(threads)],
                ceil_div(threads, HEAD_THREADS),
                HEAD_THREADS,
            )
        )
    fix = struct(i32(lanes), u32(each), u32(step), i64(slabs), boolean(grouped))
    steps.append(
        kernel(
            "reduce",
            f"ReduceFixup<{template}, {n if wide else 1}>",
            [run.struct(), shape.struct(), fix],
            slabs * step * p.outer,
            FIXUP_THREADS,
        )
    )
    return steps


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


def plan(op, device, operands, results, *, rules, rows=None) -> launch.Plan | None:
    """The plan of index_add or a segment operation, for operands as in primitive.py; None if there is no kernel.

    Without an order, each run sorts its updates in scratch.
    """
    del device, rows
    adds = op == "index_add"
    index, source = (operands[1], operands[2]) if adds else (operands[1], operands[0])
    rest = operands[3 if adds else 2 :]
    alphas = len(rest) % 2
    given = len(rest) > alphas
    p = problem_of(op, results[0].shape, source, index, rules)
    if p is None:
        return None
    algorithm = pick(op, rules.plan, p)
    given = given and len(parts(p)) == 1
    if given and algorithm == "sorted" and rules.plan == "auto":
        algorithm = "sort"  # over the given order
    at = len(operands) - 2
    buffers = Buffers(
        index=launch.operand(1),
        source=launch.operand(2 if adds else 0),
        out=launch.result(0),
        alpha=launch.operand(3) if alphas else null,
        **(dict(keys=launch.operand(at), order=launch.operand(at + 1)) if given else {}),
    )
    steps, scratch = launches(algorithm, p, buffers)
    unaligned, more = launches(algorithm, p, buffers, aligned=False)
    if any(step.grid3()[0] >= 2**31 for step in (*steps, *unaligned)):
        return None  # more blocks than one launch may have
    return launch.Plan(algorithm, tuple(steps), max(scratch, more), None if unaligned == steps else tuple(unaligned))
