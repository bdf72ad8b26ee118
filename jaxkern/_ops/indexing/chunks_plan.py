"""The launches of `sorted` and `sort`: segmented reductions over fixed chunks of ascending indices (chunks.cuh; tiles.cuh and
narrow_rows.cuh for short rows; reduce.cuh adds what chunks share)."""

import typing

from jaxkern._core import launch
from jaxkern._core.define import ceil_div, cpp_bool, cuda_type, divider
from jaxkern._core.launch import i64, null, u32
from jaxkern._core.params import Params
from jaxkern._ops.indexing import tuning
from jaxkern._ops.indexing.problem import REDUCTIONS, WARP, Run, kernel, power_of_two, vector_of
from jaxkern._ops.indexing.sort import sorted_into, source_rows

REDUCE_SHAPE, FIXUP_SHAPE = Params("indexing/reduce.cuh", "ReduceShape"), Params("indexing/reduce.cuh", "FixupShape")
RANGE_SHAPE = Params("indexing/gaps.cuh", "RangeShape")
NARROW_TILE, TILE_SHAPE = Params("indexing/narrow_rows.cuh", "NarrowTile"), Params("indexing/tiles.cuh", "TileShape")


def reduces_tiles(algorithm, p) -> bool:
    if algorithm != "sorted" or p.batch != 1 or p.inner > 2**31 - 1:
        return False
    # Column tiles of long rows are faster if elements are too small to be loaded one by one.
    odd = p.row_bytes % 16 != 0 and (p.row_bytes <= tuning.ODD_ROW_BYTES or p.size < 4)
    return p.inner <= tuning.NARROW_INNER or odd


def copies_rows(algorithm, p) -> bool:
    """Whether the kernel of an index_add copies the rows without updates from another array.

    It finds these rows between neighbouring keys, and would miss some if the indices were not in order as a hint says. On an
    H100, us in one pass and with a copy first: 262144 rows of 4096 bytes, 65536 updates, 889 and 1041, 10^6 updates 2228 and
    2920; 169343 of 512 bytes 360 and 417; 2^20 of 128 bytes 187 and 181, of 132 bytes 298 and 208.
    """
    return algorithm == "sort" and p.row_bytes % 16 == 0 and p.row_bytes >= tuning.COPIED_ROW_BYTES


def in_flight(p) -> int:
    """Updates that a thread of ReduceChunks keeps in flight; more hide more latency. Vectors of small elements have enough
    threads for that, and each row of x that is read delays the updates after it."""
    if p.row_bytes % 16 != 0:
        return 8
    many_rows = p.adds and p.count < tuning.MANY_ROWS * p.rows
    return 4 if p.size > 2 or many_rows else 8


def chunk_of(p) -> int:
    """Positions of a chunk of ReduceChunks."""
    whole, under_way = p.row_bytes % 16 == 0, in_flight(p)
    blocks = 4 if not whole else 8 if p.size > 2 else 7 if under_way == 4 else 5  # ReduceBlocks
    wave = tuning.MULTIPROCESSORS * blocks * tuning.REDUCE_THREADS
    lanes = p.positions * p.outer * ceil_div(p.row_bytes, 16)
    least, most = tuning.CHUNK
    # One wave has the fewest chunk edges, but waits for its slowest thread. More waves are better if threads differ much in
    # how many long rows they write, and if there are many short rows.
    waves = max(1, ceil_div(lanes, most * wave))
    if whole and p.size == 2 and p.row_bytes >= tuning.LONG_ROW_BYTES:
        waves = max(waves, 2)
    if whole and p.size > 2 and lanes >= 3 * tuning.MANY_CHUNK * wave:
        waves = max(waves, 3)
    # Odd, so that concurrent chunks do not all use the same memory channels.
    return min(max(ceil_div(lanes, waves * wave), least), most) | 1


class Tile(typing.NamedTuple):
    """Positions, columns, and elements from one position to the next, of a tile of tiles.cuh."""

    places: int
    columns: int
    pitch: int


def tile_of(inner, size) -> Tile:
    n, column_tile, pitch = 16 // size, inner, inner
    if inner * size > tuning.ODD_ROW_BYTES:
        # Column tiles of equal width that tuning.TILE_PACKS vectors hold, wherever they begin. From one position to the next the
        # vectors of a column tile shift as the vectors of source do, and the vectors of two positions never overlap.
        column_tile = ceil_div(inner, ceil_div(inner, (tuning.TILE_PACKS - 1) * n + 1))
        pitch = column_tile + 2 * n - 2
        while pitch % n != inner % n:
            pitch += 1
    return Tile(
        min(tuning.TILE_PLACES, (tuning.TILE_BYTES - 512) // (pitch * size + 7)), column_tile, pitch
    )  # keys, ends of runs


def tile_places(p) -> int:
    """The number of positions of a tile such that tiles of about equal length fill whole waves."""
    least, tile = tuning.LEAST_TILE, tile_of(p.inner, p.size)
    wave = max(tuning.TILE_WAVE // (p.outer * ceil_div(p.inner, tile.columns)), 1)
    tiles = ceil_div(ceil_div(p.positions, tile.places), wave) * wave
    return min(max(ceil_div(p.positions, tiles), min(least, tile.places)), tile.places)


def narrow_span(size) -> int:
    return 9 if size == 8 else 17  # NarrowSpan


def reduced(algorithm, p, run, buffers, fills, aligned, scratch):
    indices, steps = run.indices, []
    positions, plain = indices.positions, indices.plain and not (indices.wrap and indices.signed)
    tiles = reduces_tiles(algorithm, p)
    narrow_rows = not tiles and p.inner <= tuning.NARROW_INNER
    if tiles:
        run = run.replace(chunk=tile_places(p))
    elif narrow_rows:
        run = run.replace(chunk=256 // p.inner * narrow_span(p.size))
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
        ceil_div(chunks, tuning.DESCRIBE_THREADS),
        ceil_div(indices.positions, tuning.DESCRIBE_THREADS * tuning.KEYS_WRITTEN),
    )

    def step(keyed, describing, writing):
        return kernel(
            "chunks",
            f"Describe<{cpp_bool(keyed)}>",
            [run.struct(), u32(run.chunk), u32(chunks), u32(describing)],
            describing + writing,
            tuning.DESCRIBE_THREADS,
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
    lookahead: int
    ranges: launch.Struct

    @property
    def chunks(self) -> int:
        return ceil_div(self.run.indices.positions, self.run.chunk)

    def struct(self) -> launch.Struct:
        return REDUCE_SHAPE(
            chunk=self.run.chunk,
            chunks=self.chunks,
            lookahead=self.lookahead,
            vectors=self.vectors,
            by_vectors=self.vectors,
            by_chunks=self.chunks,
            threads=self.threads,
            blocks=self.blocks,
            ranges=self.ranges,
        )


def range_shape(run, vectors, size, gaps):
    """(RangeShape, warps) for rows of `vectors` of `size` bytes; gaps: no other thread compares neighbouring keys."""
    part, positions = run.indices.part, run.indices.positions
    # If most rows receive updates, a warp can check more rows and positions. Long rows take longer to write than to check, and if few of
    # the indices name a row here, because others do on other devices, a warp would have many to write.
    dense = positions >= run.indices.dropped and vectors * size < tuning.DENSE_ROW_BYTES
    checked, tile_bytes = tuning.DENSE_BYTES if dense else tuning.SPARSE_BYTES, tuning.RANGE_COLUMN_BYTES
    rows = power_of_two(checked // (vectors * size), 1, tuning.RANGE_ROWS)
    column_tile = tile_bytes // size if vectors * size > 2 * tile_bytes else vectors
    column_tiles, slice_ranges = ceil_div(vectors, column_tile), ceil_div(part.rows, rows)
    ranges = part.batch * slice_ranges
    span = spans = gap_warps = 0
    if gaps and rows > 1:
        span = 4 * WARP if dense else WARP
        spans = (positions + span) // span  # plus one for the end of the positions
        gap_warps = run.outer * spans * column_tiles
    warps = run.outer * ranges * column_tiles + gap_warps
    shape = RANGE_SHAPE(
        rows=rows,
        ranges=ranges,
        slice_ranges=slice_ranges,
        column_tile=column_tile,
        column_tiles=column_tiles,
        spans=spans,
        span=span,
        gap_warps=gap_warps,
        warps=warps,
        by_column_tiles=column_tiles,
        by_ranges=ranges,
        by_slice=slice_ranges,
        by_spans=max(spans, 1),
    )
    return shape, warps


def chunked(p, run, fills, aligned):
    n = vector_of(p, aligned)
    whole = n * p.size == 16
    per_thread = 1 if whole else 4
    vectors, chunks = ceil_div(p.inner // n, per_thread), ceil_div(run.indices.positions, run.chunk)
    threads = p.outer * chunks * vectors
    ranges, warps = range_shape(run, p.inner // n, n * p.size, True) if fills else (RANGE_SHAPE.empty, 0)
    shape = Shape(run, vectors, threads, ceil_div(threads, tuning.REDUCE_THREADS), 0, ranges)
    # Larger elements in whole vectors have 4 positions in flight, rows of partial vectors 8.
    rows = 4 if whole and (p.size > 2 or (REDUCTIONS[p.op] == "kSum" and in_flight(p) == 4)) else 8
    keys_aligned = aligned and all(b is null or b.offset % 16 == 0 for b in (run.keys, run.order))
    name = f"ReduceChunks<{p.reduction}, {cuda_type(p.dtype)}, {n}, {per_thread}, {rows}, {cpp_bool(keys_aligned)}>"
    blocks = shape.blocks + ceil_div(warps, tuning.REDUCE_THREADS // WARP)
    return [kernel("chunks", name, [run.struct(), shape.struct()], blocks, tuning.REDUCE_THREADS), *fixup(p, shape)]


def narrow_reduced(p, run, fills):
    chunks, n = ceil_div(run.indices.positions, run.chunk), 16 // p.size
    ranges, warps = range_shape(run, p.inner, p.size, False) if fills else (RANGE_SHAPE.empty, 0)
    shape = Shape(run, p.inner, 0, p.outer * chunks, 0, ranges)
    values = (run.chunk * p.inner + 2 * n) // n * n
    shared = values * p.sum_bytes + tuning.NARROW_THREADS * (p.sum_bytes + 4) + (run.chunk + 2) * 4 + run.chunk * 2
    blocks = shape.blocks + ceil_div(warps, tuning.NARROW_THREADS // WARP)
    return [
        kernel(
            "narrow_rows",
            f"ReduceNarrow<{p.reduction}, {cuda_type(p.dtype)}>",
            [run.struct(), shape.struct(), NARROW_TILE(values=values, places=run.chunk)],
            blocks,
            tuning.NARROW_THREADS,
            shared,
        ),
        *fixup(p, shape),
    ]


def tiled(p, run, fills):
    places, n, tile = run.chunk, 16 // p.size, tile_of(p.inner, p.size)
    column_tiles, chunks = ceil_div(p.inner, tile.columns), ceil_div(run.indices.positions, run.chunk)
    values = (places * tile.pitch + 3 * n) // n * n
    each = next((e for e in (8, 4, 2) if places > e // 2 * tuning.TILE_THREADS), 1)
    ranges, warps = range_shape(run, p.inner, p.size, False) if fills else (RANGE_SHAPE.empty, 0)
    shape = Shape(run, 1, 0, p.outer * chunks * column_tiles, tuning.TILE_LOOKAHEAD, ranges)
    tile = TILE_SHAPE(
        columns=tile.columns,
        pitch=tile.pitch,
        column_tiles=column_tiles,
        by_column_tiles=column_tiles,
        by_columns=tile.columns,
        values=values,
        each=each,
    )
    shared = values * p.size + (places + tuning.TILE_LOOKAHEAD + 5) * 4 + (places + 1) * 2
    blocks = shape.blocks + ceil_div(warps, tuning.TILE_THREADS // WARP)
    return [
        kernel(
            "tiles",
            f"ReduceTiles<{p.reduction}, {cuda_type(p.dtype)}>",
            [run.struct(), shape.struct(), tile],
            blocks,
            tuning.TILE_THREADS,
            shared,
        ),
        *fixup(p, shape),
    ]


def fixup(p, shape):
    """The launches that join the parts of runs that chunk edges cut; none if there is one chunk."""
    run, chunks, template = shape.run, shape.chunks, f"{p.reduction}, {cuda_type(p.dtype)}"
    if chunks == 1:
        return []
    described = cpp_bool(run.chunks is not null)
    n = 16 // p.sum_bytes
    wide = p.inner % n == 0
    vectors = p.inner // n if wide else p.inner
    lanes = tuning.FIXUP_LANES if vectors >= 5 else 4 if vectors >= 3 else vectors
    column_tiles, pieces = ceil_div(vectors, lanes), ceil_div(chunks, tuning.FIXUP_CHUNKS)
    # One wave of blocks; most find nothing to do.
    each = min(ceil_div(pieces * column_tiles * p.outer, tuning.FIXUP_BLOCKS), pieces) * tuning.FIXUP_CHUNKS
    step = ceil_div(chunks, each)
    # If the longest run would make one warp wait for memory too often.
    grouped = chunks > tuning.FIXUP_WAITS * (8 if wide else 16) * WARP // lanes
    steps = []
    if grouped:
        groups = (chunks - 1) // tuning.HEAD_GROUP - 1
        threads = groups * p.inner * p.outer
        steps.append(
            kernel(
                "reduce",
                f"ReduceGroups<{template}, {described}>",
                [run.struct(), shape.struct(), divider(p.inner), divider(groups), i64(threads)],
                ceil_div(threads, tuning.HEAD_THREADS),
                tuning.HEAD_THREADS,
            )
        )
    fix = FIXUP_SHAPE(lanes=lanes, chunks=each, step=step, column_tiles=column_tiles, grouped=grouped)
    steps.append(
        kernel(
            "reduce",
            f"ReduceFixup<{template}, {n if wide else 1}, {described}>",
            [run.struct(), shape.struct(), fix],
            column_tiles * step * p.outer,
            tuning.FIXUP_THREADS,
        )
    )
    return steps
