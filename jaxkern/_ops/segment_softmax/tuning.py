"""Numbers that decide how softmaxes of segments map to the GPU.

A number that was measured has its case in brackets; times are device times on an H200 unless the case says otherwise. The other
numbers were not measured.
"""

TILE_THREADS, TILE_COLUMNS = 256, 16  # of a block; columns of a tile, at most
SHARED_BYTES = 99 << 10  # of shared memory, which the kernels need at most
WALK_WARPS, WALK_LANES = 4, 8  # warps of a block; the most lanes side by side in a row
WALK_WARPS_ALL = 8192  # about so many walk at once, if there is work for them
WALK_PLACES, WALK_LOOKAHEAD = (32, 128), (64, 1024)  # of a tile that a warp walks, at least and at most
JOIN_THREADS, JOIN_COLUMNS, JOIN_TILES = 256, 8, 64  # of a block
