"""The launches of `sorted` and `sort`: segmented reductions over fixed chunks of ascending indices (chunks.cuh; tiles.cuh and
narrow_rows.cuh for short rows; reduce.cuh adds what chunks share)."""

import typing

from jaxkern._core import launch
from jaxkern._core.define import ceil_div, cpp_bool, cuda_type, divider
from jaxkern._core.launch import i64, null, u32
from jaxkern._core.params import Params
from jaxkern._ops.indexing.problem import REDUCTIONS, WARP, Run, kernel, power_of_two, vector_of
from jaxkern._ops.indexing.sort import sorted_into, source_rows

REDUCE_SHAPE, FIXUP_SHAPE = Params("indexing/reduce.cuh", "ReduceShape"), Params("indexing/reduce.cuh", "FixupShape")
BAND_SHAPE = Params("indexing/gaps.cuh", "BandShape")
NARROW_TILE, TILE_SHAPE = Params("indexing/narrow_rows.cuh", "NarrowTile"), Params("indexing/tiles.cuh", "TileShape")
NARROW_INNER = 8  # the longest row, in elements, for narrow_rows.cuh
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
    threads for that, and each row of x that is read delays the updates after it."""
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
            f"Describe<{cpp_bool(keyed)}>",
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
        return REDUCE_SHAPE(
            chunk=self.run.chunk,
            chunks=self.chunks,
            reach=self.reach,
            vectors=self.vectors,
            by_vectors=self.vectors,
            by_chunks=self.chunks,
            threads=self.threads,
            blocks=self.blocks,
            bands=self.bands,
        )


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
    shape = BAND_SHAPE(
        rows=rows,
        bands=bands,
        slice_bands=slice_bands,
        slab=slab,
        slabs=slabs,
        stretches=stretches,
        stretch=stretch,
        gap_warps=gap_warps,
        warps=warps,
        by_slabs=slabs,
        by_bands=bands,
        by_slice=slice_bands,
        by_stretches=max(stretches, 1),
    )
    return shape, warps


def chunked(p, run, fills, aligned):
    n = vector_of(p, aligned)
    whole = n * p.size == 16
    per_thread = 1 if whole else 4
    vectors, chunks = ceil_div(p.inner // n, per_thread), ceil_div(run.indices.positions, run.chunk)
    threads = p.outer * chunks * vectors
    bands, warps = band_shape(run, p.inner // n, n * p.size, True) if fills else (BAND_SHAPE.empty, 0)
    shape = Shape(run, vectors, threads, ceil_div(threads, REDUCE_THREADS), 0, bands)
    # Larger elements in whole vectors have 4 positions in flight, rows of partial vectors 8.
    rows = 4 if whole and (p.size > 2 or (REDUCTIONS[p.op] == "kSum" and in_flight(p) == 4)) else 8
    keys_aligned = aligned and all(b is null or b.offset % 16 == 0 for b in (run.keys, run.order))
    name = f"ReduceChunks<{p.reduction}, {cuda_type(p.dtype)}, {n}, {per_thread}, {rows}, {cpp_bool(keys_aligned)}>"
    blocks = shape.blocks + ceil_div(warps, REDUCE_THREADS // WARP)
    return [kernel("chunks", name, [run.struct(), shape.struct()], blocks, REDUCE_THREADS), *fixup(p, shape)]


def narrow_reduced(p, run, fills):
    chunks, n = ceil_div(run.indices.positions, run.chunk), 16 // p.size
    bands, warps = band_shape(run, p.inner, p.size, False) if fills else (BAND_SHAPE.empty, 0)
    shape = Shape(run, p.inner, 0, p.outer * chunks, 0, bands)
    values = (run.chunk * p.inner + 2 * n) // n * n
    shared = values * p.sum_bytes + NARROW_THREADS * (p.sum_bytes + 4) + (run.chunk + 2) * 4 + run.chunk * 2
    blocks = shape.blocks + ceil_div(warps, NARROW_THREADS // WARP)
    return [
        kernel(
            "narrow_rows",
            f"ReduceNarrow<{p.reduction}, {cuda_type(p.dtype)}>",
            [run.struct(), shape.struct(), NARROW_TILE(values=values, places=run.chunk)],
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
    bands, warps = band_shape(run, p.inner, p.size, False) if fills else (BAND_SHAPE.empty, 0)
    shape = Shape(run, 1, 0, p.outer * chunks * slabs, TILE_REACH, bands)
    tile = TILE_SHAPE(
        slab=tile.slab,
        pitch=tile.pitch,
        slabs=slabs,
        by_slabs=slabs,
        by_columns=tile.slab,
        values=values,
        each=each,
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
    fix = FIXUP_SHAPE(lanes=lanes, chunks=each, step=step, slabs=slabs, grouped=grouped)
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
