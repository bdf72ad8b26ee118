"""Numbers that decide how loops are laid over the GPU."""

VECTOR_BYTES = 16  # of a thread's load
VECTOR_THREADS = 256  # of a multiprocessor, at least, where threads take several lanes
VECTOR_REGISTERS = 80  # of such a thread, at most, for its lanes: more would leave too few threads to hide latency
THREADS = 128  # of a block
FEW_THREADS = 64  # of a block, where blocks of THREADS would leave multiprocessors idle
IN_FLIGHT = (
    48 * 1024
)  # bytes that a multiprocessor loads ahead, to keep memory busy: 65536 lanes of float32 at 0.90 of a copy
IN_FLIGHT_OF_FEW = 72 * 1024  # the same with fewer threads than VECTOR_THREADS: 16384 lanes 0.81 -> 0.83 of a copy
AHEAD_WORDS = (
    128  # registers of a thread that hold what is loaded ahead; with 176 gradients of a gated unit were slower
)
OWN_REGISTERS = 48  # of a thread, beside those for its values: addresses, counters, temporaries
MOST_AHEAD, LEAST_AHEAD = 112, 4  # steps that are loaded ahead; 128 spilled
BODY = 4000  # statements of an unrolled loop, which compile within seconds
