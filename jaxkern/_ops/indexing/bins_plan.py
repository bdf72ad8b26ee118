"""The launches of `narrow`: rows of one element, added in bins of shared memory (bins.cuh)."""

import functools

from jaxkern._core.define import ceil_div, cpp_bool, cuda_type
from jaxkern._core.launch import u32
from jaxkern._core.params import Params
from jaxkern._ops.indexing import tuning
from jaxkern._ops.indexing.problem import FILL_SHAPE, WARP, fill_shape, kernel, power_of_two
from jaxkern._ops.indexing.sort import bits_for, digits, radix_sort

BIN_SHAPE = Params("indexing/bins.cuh", "BinShape")


def bin_chunk(positions, bins) -> int:
    """Positions of a block."""
    return power_of_two(
        positions // (tuning.WIDE_CHUNKS if bins > tuning.BINS else tuning.BIN_CHUNKS), *tuning.BIN_CHUNK
    )


def bin_bytes(bins, copies) -> int:
    """Shared memory of a block: bins, and one flag bit per bin and warp. copies == 0: each thread has its own bins."""
    if copies == 0:
        return bins * tuning.BIN_THREADS * 4
    flags = tuning.BINS // 32 if bins <= tuning.BINS else ceil_div(bins, 32)
    return 4 * (copies * bins + (tuning.WIDE_THREADS // WARP if copies == 1 else copies) * flags)


def windows_of(slices, rows, count) -> int:
    """The number of blocks if each takes tuning.BIN_WINDOW rows of a slice and reads all of its updates; 0 if that is slower."""
    if rows > tuning.BINS or count > (tuning.WINDOW_UPDATES if rows > tuning.WINDOW_ROWS else tuning.FEW_UPDATES):
        return 0
    windows = ceil_div(rows, tuning.BIN_WINDOW)
    few = slices * windows <= tuning.WINDOW_BLOCKS and slices * windows * count <= tuning.WINDOW_READ
    return windows if few else 0


def narrow(p, run, fills, aligned, scratch):
    template, indices = f"{p.reduction}, {cuda_type(p.dtype)}", run.indices
    positions, part, step = indices.positions, indices.part, functools.partial(kernel, "bins")
    if p.rows > tuning.WIDE_BINS:
        return narrow_sorted(p, run, fills, scratch, template)
    slices, count, rows = part.batch * p.outer, part.count, part.rows
    windows = windows_of(slices, rows, count)
    whole = aligned and indices.buffer.offset % 16 == 0 and indices.plain and (part.batch == 1 or count % 4 == 0)
    if windows and (whole or count <= tuning.FEW_UPDATES):
        # As few passes over the updates as possible, and as many threads as they keep busy; whole vectors of bins.
        each, unit = tuning.WINDOW_EACH * ceil_div(count, tuning.WINDOW_EACH * tuning.WINDOW_THREADS), 4 * WARP
        return [
            step(
                f"BinWindows<{template}>",
                [run.struct(), u32(count // 4 if whole else 0)],
                (windows, slices),
                ceil_div(count, each * unit) * unit,
            )
        ]
    chunk, copies = bin_chunk(positions * p.outer, rows), 1 if rows > tuning.BINS else tuning.BIN_WARPS
    chunks, few = ceil_div(count, chunk), rows <= tuning.FEW_BINS
    if chunks > 1:
        run = run.replace(partials=scratch.take(4 * slices * chunks * rows))
    shape = BIN_SHAPE(
        chunk=chunk,
        chunks=chunks,
        slices=slices,
        bins=rows,
        copies=copies,
        spans=0,
        fill_after=0,
        fill=FILL_SHAPE.empty,
    )
    steps = [
        step(
            f"BinSlices<{template}, {cpp_bool(few)}>",
            [run.struct(), shape],
            slices * chunks,
            tuning.WIDE_THREADS if copies == 1 else tuning.BIN_THREADS,
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
    positions, cut = indices.positions, digits(indices.positions, tuning.BIN_BITS, bits_for(indices.dropped))
    buffers = [(scratch.take(4 * positions), scratch.take(4 * positions)) for _ in range(min(cut.passes, 2))]
    chunk = bin_chunk(positions, tuning.BINS)
    chunks = ceil_div(positions, chunk)
    targets = [buffers[i % 2] for i in range(cut.passes)]
    pairs = targets[-1][0]  # the keys; their payload lies directly after them
    steps = radix_sort(
        indices,
        cut,
        tuning.BIN_BITS,
        targets,
        scratch.take(4 * (cut.tiles + 1) << cut.bits),
        (run.source, run.source_extra, p.size),
    )
    run = run.replace(
        pairs=pairs, sorted_bits=cut.passes * cut.bits, partials=scratch.take(4 * 2 * chunks * tuning.BINS)
    )
    fill, fill_blocks = fill_shape(indices.dropped, 1, 1, p.size) if fills else (FILL_SHAPE.empty, 0)
    shape = BIN_SHAPE(
        chunk=chunk,
        chunks=chunks,
        slices=1,
        bins=0,
        copies=tuning.BIN_WARPS,
        spans=(1 << run.sorted_bits) - 1,
        fill_after=chunks,
        fill=fill,
    )
    steps.append(
        step(
            f"BinSorted<{template}>",
            [run.struct(), shape],
            chunks + fill_blocks,
            tuning.BIN_THREADS,
            bin_bytes(tuning.BINS, tuning.BIN_WARPS),
        )
    )
    if chunks > 1:
        steps.append(step(f"BinSpans<{template}>", [run.struct(), shape], chunks, tuning.SPAN_THREADS))
    return steps
