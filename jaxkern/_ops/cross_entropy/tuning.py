"""Numbers that decide how losses map to the GPU.

A number that was measured has its case in brackets; times are device times on an H200 unless the case says otherwise. The other
numbers were not measured.
"""

GROUP_THREADS, STREAM_THREADS, BLOCK_THREADS = 128, 256, 512  # of blocks of the kernels
COLUMN_WARPS = 8  # of a block
# Vectors of a row that lanes or a warp hold, four in a thread [loss and gradient, bfloat16, 4096 to 16384 columns: 0.88 to 0.93 of a copy's
# speed, 0.80 with eight].
LANE_VECTORS = 4
# The most that half a warp or a warp holds.
SUB_WARP_VECTORS, WARP_VECTORS = 16 * LANE_VECTORS, 32 * LANE_VECTORS
# Rows for each multiprocessor from which a warp, and not a block, takes each: of short rows, and of others.
SHORT_VECTORS, WARP_ROWS, LONG_WARP_ROWS = 1024, 24, 60
# Vectors of a row that several blocks share if there are few, at least; if loss and gradient are computed one after the other.
SPLIT_VECTORS, BOTH_SPLIT_VECTORS = 2048, 16384
CLUSTER_BLOCKS = 16  # of a cluster, at most
CHUNK_VECTORS, SLOTS = 1024, 13  # of the pipeline's ring in shared memory
RING_BYTES = 16 * CHUNK_VECTORS * SLOTS  # of all slots
# Vectors of a part of a row that a group writes; down to a quarter if there are few parts [gradient, float32: 0.97 to 1.0 of XLA's speed,
# 0.96 with one wave of blocks].
GRADIENT_PART_VECTORS = 512
LOSS_PART_VECTORS = 2048  # of a row that several blocks share, at least
