"""Numbers that decide how loops map to the GPU."""

VECTOR_BYTES = 16  # of a thread's load
# Per multiprocessor, at least, where threads take several lanes: 65536 lanes of float32, two of a thread, 0.89 -> 0.93 of a copy.
VECTOR_THREADS = 240
# Statements of a body that arithmetic bounds, and threads per multiprocessor that take several lanes of it, at least: random walks of
# 65536 / 131072 / 262144 lanes take 106 / 174 / 293 us with 1 / 1 / 2 lanes of a thread, and 129 / 219 / 363 us with 2 / 4 / 4.
BUSY_BODY, BUSY_THREADS = 64, 960
VECTOR_REGISTERS = 80  # of such a thread, at most, for its lanes: more would leave too few threads to hide latency
THREADS = 128  # per block
FEW_THREADS = 64  # per block, where blocks of THREADS would leave multiprocessors idle
# Bytes that a multiprocessor loads ahead, to keep memory busy: 65536 lanes of float32 at 0.90 of a copy.
IN_FLIGHT = 48 * 1024
IN_FLIGHT_OF_FEW = 72 * 1024  # the same with fewer threads than VECTOR_THREADS: 16384 lanes 0.81 -> 0.83 of a copy
# Registers of a thread that hold what is loaded ahead; with 176 gradients of a gated unit were slower.
AHEAD_WORDS = 128
OWN_REGISTERS = 48  # per thread, beside those for its values: addresses, counters, temporaries
MOST_AHEAD, LEAST_AHEAD = 112, 4  # steps that are loaded ahead; 128 spilled
# Where ys are sums over lanes, a block adds up its own lanes. SUM_LANES: the fewest lanes for each multiprocessor. SUM_TERMS: the fewest bytes
# of terms that would be stored otherwise. SUM_COUNT: how many terms become one; a block grows until it holds so many. SUM_WAVES: how much
# longer the grid may take because its last blocks leave multiprocessors idle.
# [124 lanes for each multiprocessor, without and with sums: gradient 0.74 and 0.72 ms, forward 0.20 and 0.22 ms; H200]
SUM_LANES, SUM_TERMS, SUM_COUNT, SUM_WAVES = 96, 32 << 20, 16, 1.25
BODY = 4000  # statements of an unrolled loop, which compile within seconds
# Instructions of a thread beyond which no step is loaded ahead: a warp runs at most one in a cycle, and a load from memory takes about 700.
# The code of steps that are loaded ahead is unrolled, so that more would only take longer to compile.
LATENCY = 2700

# ---- loops with a part that runs ahead: the group "ahead" of `benchmarks scan`

AHEAD_STEPS = 40  # operations that are the same in all lanes, at least: a block of Threefry has 110
AHEAD_RATIO = 32  # lanes for each lane of the part, at least
AHEAD_THREADS = 256  # lanes of a multiprocessor, at least: fewer wait for latency, and would wait for the part as well

# ---- scans by an associative operation

ROW_BYTES = 64  # of an array that a thread takes in a tile, where steps are adjacent
MOST_ITEMS = 32  # elements of a thread in a tile
ROW_LANES = 4  # lanes that share a short row, at least
SCAN_THREADS = 256  # per block
SCAN_BLOCKS = 4  # per multiprocessor, with 64 registers per thread
STAGED_BYTES = 36 * 1024  # of a tile of a row that a block keeps in shared memory: 2^27 elements 0.64 -> 0.74 of a copy
STAGED_BLOCKS = 5  # per multiprocessor that do so
RING_TILES = 3  # of a block that takes tiles of one row in turn: kStages of ring_scan.cuh
# Of a multiprocessor, of a block: 2^27 elements of float32 0.88 -> 0.95 of a copy; two of 256: 0.92, and two of 512: 0.88.
RING_BLOCKS, RING_THREADS = 4, 128
RING_BYTES = 72 * 1024  # of such a tile, at most
RING_TURNS = 16  # tiles of a block, at least: at 2^24 elements, which are 7, both take 56 us
RING_WORDS = 1  # of a state, at most: 2^27 elements of cumlogsumexp, whose states have two, 0.85 -> 0.78 of a copy
MOST_SHARED = 227 * 1024  # bytes of shared memory of a block, at most
STAGED_COLUMNS = 3  # blocks per multiprocessor that keep a tile of columns in shared memory; two: 0.94 -> 0.85
STAGED_STEPS = 56  # of a thread in such a tile, at most
# At least, if the tiles make STAGED_WAVE blocks for each multiprocessor: advantages of 1024 x 2048 15.8 -> 14.9 us, oscillators 22.9 -> 20.0.
STAGED_LEAST, STAGED_WAVE = 32, 1.5
WARP_STEPS = 1024  # that a warp walks through, at most
ROW_BLOCKS = 24  # rows for each multiprocessor, from which a block walks through a row
# Loads of 16 bytes by all lanes in a step, for each multiprocessor, from which a thread runs all steps.
LANE_VECTORS = 1024
COLUMN_BLOCKS = 24  # the same for blocks that walk through all steps of their lanes
COLUMN_BYTES = 4  # of a thread's load, where the threads of a block share the steps of adjacent lanes
COLUMN_STEPS = 16  # per thread in a tile
LANE_ITEMS = 32  # elements that a thread which runs all steps loads at once
COLUMN_WORDS = 8  # of the states of a thread's lanes
ROW_RADIX, COLUMN_RADIX = 32, 8  # tiles of a group that publishes its state, and groups of a supergroup
WHILE_THREADS = 256  # per multiprocessor, at least, where threads of a while loop run several lanes in turn
WHILE_ROUNDS = 16  # lanes of such a thread, at most
WHILE_IDLE = 8  # threads of a warp that are done before they begin other lanes

# ---- loops that are cut in time: the group "cut" of `benchmarks scan`

CUT_STEPS = 256  # of a loop that is cut, at least: at 256 x 2048 lanes both take 3.9 us
CUT_ROW_STEPS = 32  # of a loop over adjacent steps of several lanes, at least: a sector of memory for each lane
CUT_LANES = 96  # for each multiprocessor, below which a loop is cut: at 4096 x 16384 lanes both reach 0.84 of a copy
CUT_THREADS = 256  # per block, at most
CUT_PARTS = 16  # of the steps of a block, at most: each thread joins the maps of those before its own
CUT_ITEMS = 16  # steps of a thread
CUT_ROW_BYTES = 128  # of an array that a thread takes at a time, where the steps of one lane are adjacent
CUT_WORDS = 48  # registers of a thread that hold elements of xs
CUT_NUMBERS = 8  # words of the maps of a thread's lanes
CUT_BLOCKS = 2  # for each multiprocessor, from which a thread takes several lanes: 2048 x 2048 bfloat16 15.5 -> 13.8 us
CUT_RESIDENT = 3  # blocks of a multiprocessor, with 80 registers per thread
MANY_NUMBERS = 4  # words of a map, from which there is a block less: advantages of 1024 x 2048 take 16.9 -> 16.1 us
CUT_SMALL = 2  # times as many lanes are cut if elements have 16 bits: at 4096 x 16384 0.76 -> 0.92 of a copy

# ---- loops with rows

WARP_ROW = 256  # elements of a row that a warp takes, at most
# Threads per multiprocessor, up to which several share what is reduced for an element; other values were not timed.
ROW_THREADS = 0
TEAM_LANES = 16384  # up to which teams run states that a thread could hold; more were not timed
# Elements of a sum that a team takes in each step, at most, where each lane could keep its part of the sum until the loop ends: 4096 sums
# of 32 elements take 347 us, and 483 us if each lane keeps its part; 64 of 1024 take 409 and 242 us.
SUM_ROW = 32
ISSUED = 128  # threads of a multiprocessor that run an instruction in a cycle
ROW_STEP = 16384  # instructions of a thread that take as long as the launches of a step's kernels in XLA
# Our instructions for each of XLA's, at most: threads of a team repeat what is the same along a row.
ROW_WASTE = 4
# Bytes of matrices that do not fit shared memory, and so are read from L2 in every step: by one lane, whose multiprocessor reads
# 64 bytes in a cycle, and by all lanes. No such loop was timed; 256 KB take a fourth of ROW_STEP.
UNSTAGED_OF_LANE, UNSTAGED = 256 << 10, 16 << 20
ROW_AHEAD = 4  # steps that are loaded ahead, at most
ROW_LATENCY = 600  # statements of a thread that take as long as a load from memory
ROW_WORDS = 16  # registers of a thread that hold elements of xs
