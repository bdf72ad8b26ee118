"""Numbers that decide how softmaxes of segments map to the GPU.

A number that was measured has its case in brackets; times are device times on an H200 unless the case says otherwise. The other
numbers were not measured.
"""

TILE_THREADS, TILE_COLUMNS = 256, 16
SHARED_BYTES = 99 << 10  # of shared memory, which the kernels need at most
WALK_WARPS, WALK_LANES = 4, 8  # warps of a block; the most lanes side by side in a row
JOIN_THREADS, JOIN_COLUMNS, JOIN_TILES = 256, 8, 64
