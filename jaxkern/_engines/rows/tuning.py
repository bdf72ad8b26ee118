"""Numbers that decide how rows are laid over the GPU.

Those with a case in brackets were measured, others are starting points. H200, device time.
"""

PACK_BYTES = 16  # of a thread's load
LANE_BYTES = 64  # of a row in a lane, before more lanes share it
WARP_WORDS = 32  # of rows in a lane of a warp; beyond, a block holds the row
BLOCK_WORDS = 64  # of rows in a thread of a block; beyond, rows stream
GROUP_THREADS = 128  # threads of a block in which warps or lanes hold rows
STREAM_THREADS = 512
STREAM_PACKS = 4  # of a thread in flight
SUM_BLOCKS = 2  # blocks of a multiprocessor that stay to sum over rows
STRIDED_WORDS = 32  # of elements that a thread holds where the row is not the last dimension

# Words of values that a thread keeps from one stage to the next; where they are more, it computes them again
# [entropy, gradient, bfloat16 16384 x 8192: 213 us with 32, 403 with 16].
KEPT_WORDS = 32
# Wide blocks keep fewer [soft cap, float32 8192 x 16384: 337 us with 1024 threads of 16 elements, 425 with 512 of 32].
WIDE_THREADS, WIDE_ELEMENTS = 512, 16
