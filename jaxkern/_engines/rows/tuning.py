"""Numbers that decide how rows are laid over the GPU, each with the case that it was measured on."""

PACK_BYTES = 16  # of a thread's load
LANE_BYTES = 64  # of a row in a lane, before more lanes share it
MOST_THREADS = 1024
WARP_WORDS = 32  # of rows in a lane of a warp; beyond, a block holds the row
BLOCK_WORDS = 64  # of rows in a thread of a block; beyond, rows stream
GROUP_THREADS = 128  # threads of a block in which warps or lanes hold rows
STREAM_THREADS = 512
STREAM_PACKS = 4  # of a thread in flight
SUM_BLOCKS = 2  # blocks of a multiprocessor that stay to sum over rows
KEPT_WORDS = (
    16,
    32,
)  # of values that a thread keeps; the fewest that some layout allows, and beyond, it computes them again
STRIDED_WORDS = 32  # of elements that a thread holds where the row is not the last dimension
