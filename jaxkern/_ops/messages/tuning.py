"""Numbers that decide how messages map to the GPU.

A number that was measured has its case in brackets; times are device times on an H200 unless the case says otherwise. The other
numbers were not measured.
"""

# Threads of a block, kMessageThreads [x * w in float32 163 us with 128 and with 64; silu(x) * w on a Zipf graph 220 and 289; 1166243 edges
# of 169343 nodes, 128 features].
THREADS = 128
# Edges of a row that one group of threads reduces alone, at most [the same graph, x * w: float32 156 us, 163 with 128; bfloat16 92 and
# 97].
CHUNK = 256
SHORTEST_CHUNK = 32  # the same in a small graph
# Edges in flight [the same, float32: 163 us, 222 with 8], and where many operands are gathered.
IN_FLIGHT, MANY_IN_FLIGHT = 4, 2
FOLD_THREADS, FOLD_CHUNKS = 512, 32  # kFoldThreads, kFoldChunks

# Scatters in no fixed order, on an H100.
SCATTER_THREADS, MOST_HOT, BIN_BYTES = 512, 128, 4 * 2048  # kScatterThreads, kMostHot, of kSampleBins
ZERO_THREADS = 256  # of a block that writes zeros
WIDTH_BYTES = 64  # of a row, which a thread holds in registers
# Bytes of all rows, at most, if each block sums them all [2 M updates of 1000 rows of 1, 3 and 8 numbers: 20, 39 and 61 us, XLA 177, 124
# and 82].
ALL_BYTES = 32 << 10
SCATTER_BLOCKS = (
    264  # that run at once [2 M updates of one number: 34 us, 39 with twice as many, 44 with one for each tile]
)
EDGES_IN_FLIGHT = 1  # of a thread [the same: 28.7 us, 29.8 with 2, 32.4 with 3, 34.0 with 4]
