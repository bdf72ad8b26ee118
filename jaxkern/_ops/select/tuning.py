"""Sizes of tiles and thresholds of selections, sorts, searches and counts, with what was measured on an H100, us; see benchmarks/NOTES.md."""

# ---- selections

# Up to so many elements, of rows of any width or, of functions, of narrow ones, warps are faster than blocks [32768x1000: 16 elements 82 in
# place of 211, 24 elements 309 and 225; 32768x256: 32 elements 126 in place of 392].
WARP_MOST, NARROW = 16, 256
# Rows up to this width are sorted by the network whatever k is [32768x64: 8 elements 15 in place of 16, 32 elements 16 in place of 63].
SORTED_NARROW = 32
# Rows of more elements than a warp selects are sorted if they have at most so many columns for each of the k, by width and by the bytes of an
# element [float32, sorted and selected: 4096x1024, k 64 69 and 41, 128 69 and 66, 512 70 and 150; 4096x4096, 256 254 and 145, 1024 256 and 274,
# 2048 258 and 353; 2048x8192, 1024 307 and 208, 2048 308 and 285; bfloat16: 4096x1024, 32 35 and 74; 4096x4096, 128 137 and 80, 1024 139, 299;
# rows of 8192 were not measured]. All that the network sorts by default are [float32: 4096x256, 32 13 and 19, 128 13 and 59].
SORTED_OF_K = {4: ((1024, 8), (4096, 6)), 2: ((1024, 1024), (4096, 12), (8192, 8))}
# ... and so many times as many, if all rows run at once: then a sort is short, and its steps do not grow with k [bfloat16, 300 of 8x4096 22 by a
# selection, 19 in XLA; all of 1x4096 sorted 7; float32, 128 of 128x1024 7.1 and 5.6].
SORTED_OF_FEW = 2
# A part has at least so many elements, or so many times k, so that reading it takes longer than selecting [50 of 64x128256, bfloat16: 25, with
# 4096 25, with 16384 27; 10 of 2^20: 11, 9, 13; 50 of 8x128256: 16, 17, 19; 1024 of 16x262144: 87, with 8 times k 91, with 32 90].
PART, PART_OF_K = 8192, 16
# From so many elements on, a part gives fewer candidates than k [k of each part, and fewer: uniform bfloat16, 50 of 64x128256: 25, 36;
# 100 of 64x128256, float32: 30.6, 26.9; 512: 81, 39; 100 of 2^24: 46, 38; 256 of 16x262144: 49, 25; rows that ascend, 2048 of 64x128256: 126,
# 144, as a part is read again]. There are parts for about FEW_MEAN of the k in each, of FEW_PART elements or more: so few candidates are not
# sorted, but counted [2048 of 64x128256 in 8, 15, 25 and 32 parts: 84, 82, 88, 67].
FEW_OF_PART, FEW_MEAN, FEW_PART = 40, 64, 4000
# The counts of a selection by rank take at most this share of the memory of the rows.
RANKS_SHARE = 4

# ---- sorts; pairs are (threads, keys of a thread)

# Rows up to this width are sorted by the network; the first for keys of 4 bytes [network / block, 2^26 float32 in rows of 256 719 / 2787, of
# 512 1064 / 1120, of 1024 1655 / 960; 2^26 bfloat16 in rows of 512 1093 / 582; 2^24 float64 in rows of 256 564 / 1537, of 512 1024 / 655].
NETWORK_WIDTH, NETWORK_WIDTH_OTHER = 512, 256
# Of a block for each row. Keys of 8 bytes have room for 8 in a thread.
BLOCKS = ((128, 4), (128, 8), (256, 8), (256, 16), (512, 8), (512, 16))
# Tiles of long rows: for few keys, for many, for many that have 8 bytes, and for many in several rows [tiles of 4096 / 8192 / 2048 keys, 2^20
# float32 76 / 78 / 93, with indices 90 / 86 / 109; 2^26 1704 / 1703, with indices 3055 / 2494; 4096 rows of 32768 2783 / 3003 / 4186].
SMALL, LARGE, LARGE_8, ROWS = (512, 4), (512, 16), (512, 8), (256, 16)
MANY = 1 << 20  # keys
# With indices, tiles of 4096 keys cost more for each key, but more of them are full [10000 rows of 10000 3611 in place of 4593]. They are
# faster for keys of 2 bytes [2^26 bfloat16 1207 in place of 1649, whose registers were spilled].
LESS, LESS_COST = (512, 8), 1.1
# A block of SortFew reads a row of at most so many columns. There are at most so many rows for each multiprocessor.
FEW_COLUMNS, FEW_ROWS = 1 << 19, 8
COUNTING = 4  # blocks of SortCount on a multiprocessor

# ---- searches: (threads, bytes of keys in shared memory, blocks on a multiprocessor)

# For few queries, and for as many as fill all blocks of the second kind several times [2^24 queries in 2^20 float32: 1206 with the first; with
# 1024 threads and 96 KB for two blocks 826, 128 KB 982, 192 KB 719].
SEARCH_FEW, SEARCH_MANY, MANY_QUERIES = (256, 16 << 10, 8), (1024, 192 << 10, 1), 1 << 20

# ---- counts

COUNT_RESIDENT = 4  # blocks on a multiprocessor
# From so many elements on, sorting them by window is faster than adding each to the result [2^24 into 2^20: 187 in place of 222, and 208 in
# place of 429 if all are equal; 212 with 4 blocks on a multiprocessor].
WINDOWS_ELEMENTS, WINDOWS_RESIDENT = 1 << 24, 8
# Not measured: each block adds all its bins to the result, and so must count more elements than bins.
ELEMENTS_OF_BIN = 4
