"""Numbers that decide how rows map to the GPU.

Those with a case in brackets were measured, others are starting points. H200, device time.
"""

PACK_BYTES = 16  # of a thread's load
LANE_BYTES = 64  # of rows in a lane, before more lanes share them
# Packs of a row in a lane, before more lanes share it: lanes that read side by side [softmax, float32 2097152 x 32: 178 us with 2 in 4
# lanes, 202 with 4 in 2; log softmax, bfloat16 1048576 x 64: 90 and 101].
LANE_PACKS = 2
# The same of half packs, where rows are reduced to numbers in one stage [H100; sum, bfloat16 49152 x 100: 5.1 us, 5.5 with 2].
REDUCED_HALF_PACKS = 4
# Blocks of a multiprocessor, at least, where clusters reduce rows to numbers in one stage; with fewer, rows are split [H100; logsumexp,
# float32 512 x 131072: 92 us, 129 in clusters; bfloat16 64 x 1048576: 48 and 72].
REDUCING_BLOCKS = 2
# Bytes of rows that are not whole packs and are read in half packs, if these divide them [H100; softmax, gradient, bfloat16
# 671088 x 100: 131 us, 147 in ragged packs; forward 104 and 110].
HALF_PACK_BYTES = 512
# Rows that begin in the middle of a sector of memory are counted from its begin, if threads have room for its packs
# [H100; softmax, bfloat16 49152 x 1000: 66.6 us, 69.6 from the row's begin; 16384 x 4097: 89 and 97].
SECTOR_BYTES = 32
WARP_WORDS = 32  # of rows in a lane of a warp; beyond, a block holds the row
BLOCK_WORDS = 64  # of rows in a thread of a block; beyond, a cluster holds the row
# Threads of a block: fewer share a row only if each has few elements, more only where a cluster cannot hold it.
FEW_THREADS = 256
# Elements in a thread of a block of more than FEW_THREADS, if a cluster can hold the row [H100; log softmax, bfloat16: 98 us at 65536 columns
# with 128 in a block, 93 at 131072 with 64 in a cluster].
BLOCK_ELEMENTS = 64
# Bytes of rows that more blocks hold, or that are split, if half of the GPU would have none otherwise.
SPREAD_BYTES = 64 * 1024
# Words of rows in a thread of a block where results have 8 bits and a cluster can hold the row [quantize_rows to int8, 8192 x 32768:
# bfloat16 193 us in 2 blocks of 256 threads, 213 in one; float32 304 in 4, 350 in one of 512].
NARROW_WORDS = 16
# (most words of rows in a thread, blocks, threads of a block) of clusters; the first that holds a row
# [norm, float32 2048 x 65536: 260 us with 32 words in 8 blocks, 342 with 64 in 4, 281 with 16 in 16; H100; 1024 x 131072: 358 us in 8
# blocks of 512 threads, 404 in 16 of 256].
CLUSTERS = (*((32, blocks, 256) for blocks in (2, 4, 8)), (32, 8, 512), (32, 16, 256), (64, 16, 256), (64, 16, 512))
# The same where exponents are relative to a maximum: blocks of 512 threads that need more than 64 registers are alone on a multiprocessor
# [H100; log softmax, float32 3072 x 131072: 1156 us in 8 blocks of 512 threads, 1051 in 16 of 256; bfloat16 1536 x 262144: 618, 528].
PIVOT_CLUSTERS = tuple(c for c in CLUSTERS if c != (32, 8, 512))
# (most words of rows, most words of kept values, blocks, threads) for functions that keep dear values; smaller blocks wait for each other
# less [soft cap, bfloat16 8192 x 16384: 154 us with 4 blocks of 128 threads, 166 with 2 of 256, 236 with one of 1024; softmax, bfloat16
# 2048 x 65536: 134 us with 64 words in 8 blocks, 153 with 32 in 16; H100; entropy, gradient, bfloat16 1024 x 65536: 138 us with 64
# words, 187 with 32].
KEPT_CLUSTERS = (*((32, 64, blocks, 128) for blocks in (2, 4, 8, 16)), (32, 32, 8, 256), (32, 32, 16, 256))
KEPT_THREADS = 256  # threads of a block that keeps values; with more, a cluster keeps them if there are clusters
# Exchanges for each row, at most, where a cluster sums over rows in registers; with more, sums are in shared memory
# [layer norm, gradient, float32 2048 x 65536: 494 us, in registers 546; RMS norm, which has one, bfloat16: 248, in registers 235].
SHARED_STAGES = 1
SHARED_BYTES = 96 * 1024  # of sums in shared memory, of a block
COLUMN_BYTES = 8 * 1024  # of L1 for columns, of a block
SPLIT_THREADS = 256  # of blocks that share rows
SPLIT_WORDS = 32  # of rows and sums in a thread; fewer, if that leaves less than one block for each multiprocessor
SPLIT_BLOCKS = 16  # per multiprocessor, that share rows [lse, float32 64 x 1048576: 65 us, 74 with 8]
SPLIT_ROWS = 2  # rows for each multiprocessor; if there are fewer, long ones are split
# (words of rows and sums in a thread, registers), and where fewer are enough: for functions that keep dear values, and where sums are in
# shared memory [soft cap, float32 8192 x 16384: 262 us with 80, 325 with 128; scale norm, gradient, bfloat16 131072 x 1024: 226, 200].
REGISTERS = ((8, 40), (24, 64), (1 << 30, 128))
FEW_REGISTERS = ((8, 40), (24, 64), (40, 80), (1 << 30, 128))  # where fewer are enough
# Clusters for few rows have 64 registers in a thread, so that more of them run at once, if a thread has at most so many words, and if
# there are at most so many blocks for each multiprocessor.
AT_ONCE_WORDS, AT_ONCE_BLOCKS = 32, 16
# The fewest registers for rows that are not whole packs [rms_norm with a scale in float32, bfloat16 x 3 in a lane: 966 us, 1499 with 40].
RAGGED_REGISTERS = 64
# Rows that are not whole packs need more registers where a thread keeps more than so many words and sums nothing over rows [softmax,
# bfloat16 x 50257: 46 spills with 128 registers].
RAGGED_WORDS = 48
# Rows of 16-bit elements that are not whole packs have so many registers, at least, where fewer lanes than a warp's hold them, columns are
# read, and a thread has more than so many words: each lane moves columns by another distance [rms_norm, bfloat16 65536 x 1001: 69 us,
# 78 with 80 registers and 28 spills, 72 with 128; layer_norm 81, 97 and 85; scale_norm 68, 81 and 71].
LANE_WORDS, LANE_REGISTERS = 28, 96
# (packs of a row, at least, where it is not whole packs and columns are summed, so many more for each byte of an element's sums), by elements
# of a pack. Packs of shorter rows divide them [layer scale, residual and norm, gradient, bfloat16 172738 x 777: 564 us in packs of 1, 627
# in packs of 8; 10872 x 12345: 753 and 715; float32 172738 x 777: 1222 and 1311, RMS norm 562 and 614, gated norm x 1001: 1114 and 959;
# float32 on an H100. Gradients on an H200, bfloat16: 65536 x 1001, layer_norm 171 and 198, scale_norm 149 and 160; 32768 x 4097, layer_norm
# 373 and 459, rms_norm 319 and 342; 10872 x 12345, rms_norm 364 and 307, scale_norm 363 and 334. On an H100, one sum, 22000 x 6001:
# rms_norm 316 and 312, scale_norm 315 and 341; x 8191: rms_norm 485 and 442; two sums, layer_norm: 506 and 672, x 8191 714 and 807].
RAGGED_PACKS = {2: (128, 0), 4: (200, 0), 8: (512, 64)}
# Packs of so many elements that divide rows stay as they are there, however long rows are [gradients, bfloat16 32768 x 4100: rms_norm 283
# us, 341 in packs of 8, layer_norm 312 and 458, scale_norm 277 and 341].
SUMMED_PACK = 4
GROUP_THREADS = 128  # threads of a block in which warps or lanes hold rows
STREAM_THREADS = 512  # of a block that streams rows
STREAM_PACKS = 4  # per thread, in flight
SUM_BLOCKS = 2  # blocks of a multiprocessor that stay to sum over rows
GROUPED_BLOCKS, SUM_GROUPS = 2048, 64  # sums of so many blocks are added in groups first

# A thread holds whole rows if a row has at most so many elements, the rows and twice the sums of a thread have so many words, and a block
# needs so many bytes of shared memory [share, bfloat16 x 3: 146 us, 1068 in lanes, XLA 307; x 63: 157, 181, 403; float32 x 3: 150, 278, 170;
# x 63: 145, 147, 267]. It also holds rows of two vectors, which a lane would read at every other place [H100; rms_norm, bfloat16 x 16: 197 us,
# 222 in lanes].
THREAD_WIDTH, THREAD_WORDS, THREAD_ROOM = 64, 128, 40 * 1024
# A thread takes two rows of 16 bits and an odd width if these have at most so many words [x 17: 145 us, 162 with one row], and more rows if
# they have at most so many elements [x 3: 146 us, 158 with 8, 232 with one row].
THREAD_TWO, THREAD_ELEMENTS = 32, 16
THREAD_REGISTERS = (
    (8, 64),
    (24, 80),
    (48, 128),
    (1 << 30, 168),
)  # (words of a thread, registers) [x 31: 144 us, 245 with 64]
# The most elements of a row in a thread if the rows of some array do not lie side by side, such as a bias that broadcasts. A warp then reads
# one element of each of 32 rows at a time, from up to 32 lines of L1. By this count L1 takes longer than memory for longer rows; not measured.
THREAD_APART = 16

# Where the row is not the last dimension.
STRIDED_WORDS = 32  # of elements of rows that a thread holds
# Words of those and of kept values, by the bytes of a result; with more, values are computed again [softmax, float32 20 x 400 x 6000
# along the middle axis: 139 us if they are kept, 212 if not; its gradient, bfloat16 4096 x 256 x 64: 183, 154].
STRIDED_KEPT = {2: 48, 4: 80, 8: 80}
STRIDED_BYTES = 64  # that threads side by side read of an element, at least
# (threads, at most, blocks of a cluster, blocks of a multiprocessor, at least) that hold rows; the first with which they can
# [along the middle axis, float32: softmax 64 x 1024 x 1024 202 us in clusters, 240 in one block; norm 228 and 217 in two; gradient of norm
# 20 x 400 x 6000 203 and 179; H100].
STRIDED_HELD = (
    (256, 1, 1),
    (512, 1, 2),
    *((256, blocks, 1) for blocks in (2, 4, 8)),
    (512, 1, 1),
    (1024, 1, 1),
)
# (words of elements and numbers of a thread, its registers) [softmax, float32 4096 x 256 x 64 along the middle axis: 182 us with 80, 198
# with 64; its gradient 249 and 229; H100].
STRIDED_REGISTERS = ((90, 64), (104, 80), (1 << 30, 128))
STRIDED_NUMBERS = 32  # words of the numbers of a thread's rows; with more, it loads packs of 8 bytes
# Rows side by side that are no whole packs are read in packs that start before a tile if they are more than this part of its rows
SHIFTED_FILLED = 0.7
STRIDED_THREADS = 256  # of a block that reads rows again
# Rows with fewer elements are read by one thread each, in blocks of so many threads [H100; logsumexp, float32 20 x 400 x 6000 along the
# first axis: 71 us, 104 if threads share them].
STRIDED_SHORT, STRIDED_ALONE = 32, 128
STRIDED_FLIGHT = 16  # words of a thread in flight there
STRIDED_BLOCKS = 4  # of a multiprocessor there, at a time
STRIDED_ELEMENTS = 64  # of a row that occupy a block, at least
STRIDED_ROOM = 40 * 1024  # bytes of shared memory to join what the threads of a block reduced
STRIDED_MOST = 1280  # blocks, where blocks share rows

# Words of values that a thread keeps from one stage to the next; where they are more, it computes them again
# [entropy, gradient, bfloat16 16384 x 8192: 213 us with 32, 403 with 16; H100; 13421 x 5000: 123 us with 40, 172 with 32].
KEPT_WORDS = 40
# Lanes of a warp keep the values of few elements [soft cap, float32 131072 x 1024: 248 us with 16 in 64 threads, 260 with 32].
KEPT_ELEMENTS = 16
# Words of a row in a lane that may keep more, where masks exclude elements [H100; causal softmax, bfloat16 131072 x 1024, whose numbers are
# stored: 160 us with 16 in a warp, 179 with 8 in 64 threads].
GUARDED_WORDS = 16
# Wide blocks keep fewer [soft cap, float32 8192 x 16384: 337 us with 1024 threads of 16 elements, 425 with 512 of 32].
WIDE_THREADS, WIDE_ELEMENTS = 512, 16
# Rows of a matrix that are taken together, see rows.cuh [H100; softmax with a bias, bfloat16 8 x 16 x 2048 x 2048: 784 us, 1044 without].
RUN = 32
