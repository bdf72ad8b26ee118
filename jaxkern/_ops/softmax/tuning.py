"""Numbers that decide how the hand-written kernels of softmax and of scores map to the GPU.

A number that was measured has its case in brackets. The other numbers were not measured.
"""

# ---- where these kernels run instead of generated ones; device microseconds on an H100, generated and by hand

# Columns, at most [bfloat16 64 x 1024 x 1024 along the middle axis: softmax 122 and 96, the gradient of log_softmax 179 and 143;
# float32 202 and 187, 308 and 280].
COLUMN_WIDTH = 1024
# Multiprocessors for each cluster, at least; a gradient or log_softmax needs more [bfloat16 16 x 131072
# 5.9 and 5.4, its gradient 7.1 and 6.5; 64 x 131072 15.5 and 14.4, its gradient 19.9 and 21.0; one row of 2^20 6.5 and 6.4].
CLUSTER_MULTIPROCESSORS, OTHER_CLUSTER_MULTIPROCESSORS = 2, 8
CLUSTER_VECTORS = 256, 65536  # of the arrays that are read, for each row: these and no fewer, and no more
# Bytes of short rows: of a gradient at most, of softmax exactly [the gradient of bfloat16 49152 x 32 4.6 and 4.3; float32 49152 x 32 5.7
# and 5.2, gradients 7.9 and 7.6, of log_softmax 8.1 and 7.7, which itself takes 5.5 in both; bfloat16 49152 x 64 5.5 and 5.3].
# Not one vector [H200, gradients of bfloat16 2^20 x 8 52 and 363, float32 2^20 x 4 64 and 303].
SHORT_BYTES = 128
# Columns with a bias or a causal limit, at least [bfloat16 32 x 16 x 512 x 512 and 8 x 16 x 2048 x 2048. A bias: 210 and 188, 793 and
# 796. The causal limit: 154 and 140, 560 and 545, the gradient 749 and 718 of 2048].
FUSED_WIDTH = 512

# ---- vectors of 16 bytes

# Of a block of a cluster, from which more blocks share a row; the same if more multiprocessors are then busy.
CLUSTER_BLOCK_VECTORS, FEWEST_BLOCK_VECTORS = 1024, 256
FUSED_VECTORS = 4  # in a thread of fused kernels
# The most that a warp or a block holds.
FUSED_WARP_VECTORS, FUSED_BLOCK_VECTORS = 32 * FUSED_VECTORS, 512 * FUSED_VECTORS
SCORE_GRADIENT_VECTORS = 2  # of 16 bits in a thread of the gradient of scores
CAUSAL_WARP_VECTORS = 32 * 8  # of float32, forward [8 x 12 x 1024 x 1024 to bfloat16: 103 us, a block 128]
SECTOR_BYTES, LINE_BYTES = 32, 128  # vectors are counted from a boundary of so many bytes,
LINE_ROW_BYTES = 8192  # of a line for rows of so many bytes or more

# ---- threads and blocks

WARP_THREADS, BLOCK_THREADS, STREAM_THREADS = 128, 512, 512  # of blocks of the kernels
MOST_CLUSTER_BLOCKS = 16  # of a cluster
# Rows of a column that one thread holds; of the gradient.
COLUMN_ALONE, GRADIENT_COLUMN_ALONE = 24, 8
COLUMN_LANES = 4  # lanes side by side where several threads hold a column
COLUMN_ROWS, WARP_COLUMN_ROWS = 8, 4  # rows of each of these threads, of several warps or of one
# Threads of a block where columns of odd widths are read element by element.
COLUMN_THREADS = 256
