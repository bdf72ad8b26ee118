"""Numbers that decide how elementwise operations map to the GPU.

A number that was measured has its case in brackets; times are device times on an H200 unless the case says otherwise. The other
numbers were not measured.
"""

THREADS = 256  # of a block
BLOCKS = 6  # per multiprocessor: kBlocksPerSm
TILE_WAVES = 4  # of blocks, at least, that take one tile each
# Waves of blocks at most, so that blocks take one tile and end [relu of 2^28 elements: float32 1.01 of a copy's speed, bfloat16 1.02;
# 0.958 and 0.964 with one wave of blocks that loop].
MOST_WAVES = 4096

# User functions with sums: blocks per multiprocessor that are resident, and their waves.
SUM_RESIDENT, SUM_WAVES = 4, 4
