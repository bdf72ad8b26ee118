"""Numbers that decide how loops are laid over the GPU."""

VECTOR_BYTES = 16  # of a thread's load
VECTOR_THREADS = 256  # of a multiprocessor, at least, where threads take several lanes
VECTOR_REGISTERS = 80  # of such a thread, at most, for its lanes: more would leave too few threads to hide latency
THREADS = 128  # of a block
FEW_THREADS = 64  # of a block, where blocks of THREADS would leave multiprocessors idle
IN_FLIGHT = 48 * 1024  # bytes that a multiprocessor loads ahead, to keep memory busy
AHEAD_WORDS = 96  # registers of a thread that hold what is loaded ahead
OWN_REGISTERS = 48  # of a thread, beside those for its values: addresses, counters, temporaries
AHEAD = (64, 32, 16, 8, 4)  # steps that are loaded ahead
BODY = 4000  # statements of an unrolled loop, which compile within seconds
