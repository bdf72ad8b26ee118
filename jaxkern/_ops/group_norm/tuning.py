"""Numbers that decide how norms of groups map to the GPU.

A number that was measured has its case in brackets; times are device times on an H200 unless the case says otherwise. The other
numbers were not measured.
"""

THREADS = 256  # kGroupThreads
THREAD_STEPS = 128  # at most: of a thread whose moments are relative to its first element
FEW_STEPS = 8  # per thread, where parts are made to occupy the GPU
RESIDENT = 3  # blocks of a multiprocessor in two passes
WAVES = 2  # of blocks, where parts may be that small
WARP_STEPS = 64  # per lane, where a warp has a channel; beyond, a block has one
TILE_PACKS = (16, 64)  # of the channels, in a row of threads; fewer if there are no more
STATISTICS_ENTRIES = 256  # of a sample and group, from which a block merges them; below, a warp
SUMS_COLUMNS = 32  # of a block that adds the sums of the blocks
# Packs that a thread holds in registers in one pass, and as many at most in shared memory [64 x 64 x 64 x 256 with 32 groups, forward and
# backward: bfloat16 77 and 134 us, 111 and 173 in two passes; float32 142 and 221, 202 and 327].
HELD = 16
PACK_BYTES = 16 * THREADS  # at most: of a pack of each thread
STATIC_BYTES = 20 << 10  # of shared memory, beside what holds packs
EXCHANGE_BYTES = 16 << 10  # of sums that a block gets from its cluster
CLUSTERS = (4, 8)  # blocks: few if they suffice for tiles of some width, as 4 fit all parts of a GPU
ONE_PASS_PACKS = 64  # of a tile's row, at most
ONE_PASS_BYTES = (128, 64, 32)  # of a tile's rows
FEW_ELEMENTS = 1024  # of a group, below which its gradients are computed by kGroupSmall
SMALL_BYTES = 1 << 20  # of all arrays
