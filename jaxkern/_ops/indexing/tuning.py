"""Numbers that decide how operations at indices map to the GPU.

A number that was measured has its case in brackets; times are device times on an H200 unless the case says otherwise. The other
numbers were not measured.
"""

# Few updates.
ATOMIC_UPDATES = 16384  # up to which atomics win, because a sort does not pay off
SMALL_COUNT = 1024  # indices of a call that one launch does: 32 for each lane of a warp
# Indices that are always compared with all others; more of them up to so many comparisons.
SMALL_ALWAYS, SMALL_COMPARISONS, SMALL_ROW_BYTES = 64, 16e6, 4096
SMALL_WARPS, SMALL_VECTORS, KEY_PITCH = 8, 4, 36  # of a block; vectors of a thread at most; words of a list of keys
# SmallSums: warps that run at once, and warps that it has at most [15 updates: 1.2 to 1.4 us, 2.3 by SmallUpdates].
SUMS_AT_ONCE, SUMS_WARPS = 2048, 4096
SMALL_WARPS_AT_ONCE = 4096  # of SmallUpdates; with fewer warps, a thread has one vector

# Bins. Updates, few enough that every block may read all indices [10000 updates of 1024 bins: 8.6 us, 10.1 in two launches].
FEW_UPDATES = 16384
NARROW_UPDATES, NARROW_EACH = 4096, 4  # at least, and for each of up to BINS rows
NARROW_MANY = 1 << 18  # updates of any number of rows, at least
# A block for a window of rows: updates of more than 32 rows, blocks, and indices that all blocks read from L2, at most [100000 updates of
# 1024 bins: 9.9 us, 10.7 sorted].
WINDOW_UPDATES, WINDOW_ROWS, WINDOW_BLOCKS, WINDOW_READ = 1 << 17, 32, 512, 1 << 23
BIN_BITS, BINS, WIDE_BINS, FEW_BINS, BIN_WINDOW = 11, 1 << 11, 16384, 32, 16  # of a block, by algorithm; see bins.cuh
BIN_THREADS, WIDE_THREADS, BIN_WARPS, WINDOW_THREADS, WINDOW_EACH, SPAN_THREADS = (
    256,
    128,
    8,
    768,
    16,
    512,
)  # of a block
BIN_CHUNKS, WIDE_CHUNKS, BIN_CHUNK = (
    1024,
    512,
    (4096, 32768),
)  # chunks of all positions; positions of one, at least and at most
FILL_ROW_BYTES, FILL_BYTES, FILL_ROWS = 32, 1 << 22, 8  # see _fills_first in plan.py; FILL_ROWS are rows of one update

# Sorted updates.
COPIED_ROW_BYTES = 256  # the shortest row that is copied in the pass that adds; see copies_rows in chunks_plan.py
NARROW_INNER = 8  # the longest row, in elements, for narrow_rows.cuh
# The longest row of no whole vectors whose elements may be loaded one by one, and of a tile [long odd rows of floats: 115 us, 154 in tiles].
ODD_ROW_BYTES = 512
# REDUCE_THREADS [Zipf's indices, float32: 1 % faster with 64 and with 32; embedding 1 % slower].
REDUCE_THREADS, DESCRIBE_THREADS, KEYS_WRITTEN = 128, 128, 16
MULTIPROCESSORS = 128  # a few less than there are, so that chunks fill whole waves of threads
CHUNK = 16, 500  # positions of a chunk, at least and at most
# Waves of threads in ReduceChunks: two for long rows in 16 bits [just under two: 103 us, 100], three for many vectors [float32 174 us, 196
# with two].
LONG_ROW_BYTES, MANY_CHUNK = 8192, 64
MANY_ROWS = 32  # updates of a row: with fewer, a thread has fewer updates in flight
NARROW_THREADS, TILE_THREADS = 256, 256  # of a block
TILE_PLACES, TILE_BYTES, TILE_LOOKAHEAD, TILE_PACKS = 2048, 45000, 32, 16  # see tiles.cuh
TILE_WAVE, LEAST_TILE = 640, 256  # tiles that run at once, and the least positions of a tile
# Rows without updates: bytes that a warp checks where most rows have updates or not, and rows at most. Longer rows are cut into columns of
# so many bytes [ranges of two rows of 8 KB: 347 us, one row 294].
DENSE_BYTES, SPARSE_BYTES, RANGE_ROWS, RANGE_COLUMN_BYTES = 16 * 1024, 8 * 1024, 256, 64 * 1024
# Shorter rows may be many for a warp [H100, rows of 4 KB: index_add 503 us, 261 with this; segment_sum 287, 234].
DENSE_ROW_BYTES = 1024
# Long runs: FIXUP_LANES columns of a warp, and from 512 chunks on groups of HEAD_GROUP are added up first [half or all of the edges in one
# row: 5 to 7 us, 21 to 59 without both].
FIXUP_THREADS, FIXUP_LANES, FIXUP_CHUNKS, HEAD_THREADS, HEAD_GROUP = 256, 8, 8, 128, 32
FIXUP_BLOCKS, FIXUP_WAITS = 512, 24  # one wave of blocks; how often a warp may wait for memory

# Sorts.
FEW_PAIRS, MANY_PAIRS = (
    1 << 19,
    1 << 22,
)  # sorts of fewer and of more have small and large tiles [64 M pairs 1289 us, 1069 in large ones]
UNSCANNED_TILES = 32  # up to so many of the smallest tiles, each block of RadixScatter adds up the counts itself
SCAN_THREADS, SOURCE_ROWS_THREADS = 1024, 256  # of a block
SCAN_DIGITS = 8  # of a block [64 M pairs: 24 us, 33 with 4]
OFFSETS_THREADS, OFFSETS_TILE = 256, 1024  # of a block, and the rows of its tile

# Gathers.
GATHER_THREADS = 256
GATHERED = 4  # rows of a thread [rows of 128 bytes: 1385 us; 1573 with 2, 1933 with 8, both with hints to L2, which alone cost 372]
FEW_BYTES = 8 << 20  # an x of this size stays in L2 without hints, and the result may stay there too
