"""Numbers that decide how operations at indices map to the GPU.

A number that was measured has its case in brackets; times are device times on an H200 unless the case says otherwise. The other
numbers were not measured.
"""

# Few updates, and bins.
SMALL_COUNT = 1024  # indices of a call that one launch does: 32 for each lane of a warp
SMALL_WARPS, SMALL_VECTORS, KEY_PITCH = 8, 4, 36
# Updates, few enough that every block may read all indices [10000 updates of 1024 bins: 8.6 us, 10.1 in two launches].
FEW_UPDATES = 16384
BIN_BITS, BINS, WIDE_BINS, FEW_BINS, BIN_WINDOW = 11, 1 << 11, 16384, 32, 16
BIN_THREADS, WIDE_THREADS, BIN_WARPS, WINDOW_THREADS, WINDOW_EACH, SPAN_THREADS = 256, 128, 8, 768, 16, 512
FILL_ROW_BYTES, FILL_BYTES, FILL_ROWS = 32, 1 << 22, 8  # see _fills_first in plan.py; FILL_ROWS are rows of one update

# Sorted updates.
COPIED_ROW_BYTES = 256  # the shortest row that is copied in the pass that adds; see copies_rows in chunks_plan.py
NARROW_INNER = 8  # the longest row, in elements, for narrow_rows.cuh
# REDUCE_THREADS [Zipf's indices, float32: 1 % faster with 64 and with 32; embedding 1 % slower].
REDUCE_THREADS, DESCRIBE_THREADS, KEYS_WRITTEN = 128, 128, 16
NARROW_THREADS, TILE_THREADS = 256, 256
TILE_PLACES, TILE_BYTES, TILE_LOOKAHEAD, TILE_PACKS = 2048, 45000, 32, 16
# Long runs: FIXUP_LANES columns of a warp, and from 512 chunks on groups of HEAD_GROUP are added up first [half or all of the edges in one
# row: 5 to 7 us, 21 to 59 without both].
FIXUP_THREADS, FIXUP_LANES, FIXUP_CHUNKS, HEAD_THREADS, HEAD_GROUP = 256, 8, 8, 128, 32

# Sorts.
UNSCANNED_TILES = 32  # up to so many of the smallest tiles, each block of RadixScatter adds up the counts itself
SCAN_THREADS, SOURCE_ROWS_THREADS = 1024, 256
SCAN_DIGITS = 8  # of a block [64 M pairs: 24 us, 33 with 4]
OFFSETS_THREADS, OFFSETS_TILE = 256, 1024

# Gathers.
GATHER_THREADS = 256
GATHERED = 4  # rows of a thread [rows of 128 bytes: 1385 us; 1573 with 2, 1933 with 8, both with hints to L2, which alone cost 372]
FEW_BYTES = 8 << 20  # an x of this size stays in L2 without hints, and the result may stay there too
