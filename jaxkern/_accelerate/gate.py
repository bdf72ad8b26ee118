"""Which operations run on jaxkern: the ones that it runs faster.

Every function here is pure. It depends on shapes, types, hints and the version of jaxlib alone, so that every process compiles a
program in the same way. Each returns (taken, reason). A case that lies outside of what was measured stays with XLA. `MEASURED`
names the measurements of each threshold.
"""

import functools
import typing

import jax.numpy as jnp

remembered = functools.lru_cache(maxsize=1024)  # a program asks the same of many scatters

SCATTER_DTYPES = frozenset(
    map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64, jnp.int32, jnp.int64, jnp.uint32))
)
FLOATS = frozenset(map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)))

# The jaxlib whose XLA was measured.
JAXLIB = "0.11.2"
# jaxlibs, the first and the last, in which XLA adds float32 to memory by compare-and-swap on GPUs, as all do in 16 bits. LLVM
# took care of subnormal numbers, which atomic additions flush. Reports have 450 to 5000 times the time where indices are equal.
SWAPS = ((0, 10, 2), (0, 11, 0))

# Sums by compare-and-swap: XLA loses at every size, and at this many elements of updates the two are equal.
NARROW_ELEMENTS = 1 << 10
# Other sums: XLA adds atomically, which is as fast as memory while the updates are few or the rows stay in the cache.
WIDE_BYTES = 32 << 20
# Shorter rows were measured with sorted indices alone, or lose.
WIDE_TRAIL = 16
# So many updates of one row keep adding to the same address; a tenth as many do not.
CROWDED = 1 << 10
CROWDED_COUNT = 1 << 13
# Longer rows need a sort, of 22 us and more, in which XLA adds 4000 times to an address.
CROWDED_WIDE, CROWDED_ROWS = 1 << 13, 64
# A chain of gathers, arithmetic and a scatter, as one message kernel: it needs the edges in order, which takes a sort that all
# chains with the same indices share. At 200000 edges into 20000 nodes of 128 features, which stay in the cache, XLA takes 59 us
# and the chain 74.
CHAIN_COUNT = 100_000
CHAIN_ROWS = 16  # rows for each edge, at most: the kernel finds where each row begins
ORDERED_COUNT = 1 << 14  # in 16 bits, or in an order that is there already: below, launches take as long as the sums
# Narrow rows in no fixed order: bytes of a row of sums, which are float32 for 16-bit numbers; updates from which launches take less
# time than the sums.
FREE_BYTES, FREE_COUNT = 60, 100_000
ALONE_BYTES = 32  # of a row of updates that XLA would not have stored
FUSED_GATHER = "XLA fuses the gather that makes the updates"
FUSED_ARITHMETIC = "XLA fuses the arithmetic or slice that makes the updates"
# Maxima of floats: XLA compares and swaps at any width.
EXTREME_ELEMENTS = 1 << 18

LOGSUMEXP_ELEMENTS = 1 << 17
LOSS_ELEMENTS, LOSS_CLASSES = 1 << 20, 256  # with its gradient
SOFTMAX_ELEMENTS, SOFTMAX_ROWS, LOG_SOFTMAX_ROWS = 1 << 18, 8, 1 << 11  # gradients

ATTENTION_ELEMENTS, ATTENTION_VECTOR = 1 << 22, 8

# Steps that XLA takes one after the other. Each starts its kernels again, in 3 to 5 us on an H200, whatever the lanes are: a single
# warp takes a step of a recurrence in a tenth of that. XLA unrolls shorter loops, and fuses them with what is around them. The
# group "few steps" of `benchmarks scan` measures them.
LOOP_STEPS = 8
# Associative scans: XLA computes the levels of a tree one after the other, twice log2(length) of them. The gradient of jaxkern's is a
# loop over the steps, whose lanes must be many. The group "gate" of `benchmarks associative_scan` measures these and the next.
ASSOCIATIVE_LENGTH, ASSOCIATIVE_LANES = 64, 1 << 12
# Cumulative sums and their kin: XLA has a tree of windows, at 0.17 to 0.30 of a copy in float32.
CUMULATIVE_LENGTH, CUMULATIVE_ELEMENTS = 64, 1 << 20
# Of a while loop in which each lane stops on its own. XLA takes each step of all lanes with several kernels and a message to the
# host; a kernel takes all steps of a lane in a thread. The group "few lanes" of `benchmarks while_loop` measures fewer.
WHILE_LANES = 1024


class Measured(typing.NamedTuple):
    """A case of benchmarks/results/FILE-NVIDIA_H200.json, and whether jaxkern wins, loses or is as fast (None) there."""

    file: str
    operation: str
    case: str
    dtype: str
    direction: str
    wins: bool | None


def _programs(*cases):
    return [Measured("programs", "programs", case, dtype, "step", wins) for case, dtype, wins in cases]


def _scatters(*cases):
    return [Measured("index_add", *case, "float32", "forward", wins) for *case, wins in cases]


# {threshold: its measurements}. Without any, it is an estimate.
MEASURED = {
    "NARROW_ELEMENTS": [
        Measured("index_add", "index_add", "33554432 n1024 uniform", "bfloat16", "forward", None),
        Measured("index_add", "segment_sum", "1024 n10000 uniform", "bfloat16", "forward", True),
        *_programs(("embedding", "bfloat16", True)),
    ],
    "WIDE_BYTES": [
        *_scatters(
            ("index_add", "399x128 n40960 uniform", False),
            ("segment_sum", "64 of 1000x64 n20000 uniform", True),
            ("index_add", "128256x4096 n16384 zipf1.1", True),
            ("index_add", "169343x128 n1166243 uniform", True),
        ),
        *_programs(("embedding", "float32", True), ("interaction network", "float32", None)),
    ],
    "WIDE_TRAIL": _scatters(
        ("segment_sum", "169343x1 n1166243 sorted", True),
        ("segment_sum", "2449029x32 n20000000 uniform", True),
        ("segment_sum", "1048576 n67108864 uniform", False),
    ),
    "CROWDED": _scatters(
        ("segment_sum", "1 n10000 uniform", True),
        ("segment_sum", "10 of 10 n1000000 uniform", True),
        ("segment_sum", "1024 n100000 uniform", False),
    ),
    "CROWDED_COUNT": _scatters(("segment_sum", "1 n10000 uniform", True)),
    "CROWDED_WIDE": [
        *_scatters(("segment_sum", "399x128 n40960 same", True)),
        *_programs(("potential with forces", "float32", None)),  # 2048 updates of each row: 0.3 % slower
    ],
    "CROWDED_ROWS": [],
    "CHAIN_COUNT": [
        Measured("messages", "edge_sum", "1166243x128 into 169343 uniform unsorted", "float32", "forward", True),
        *_programs(("graph convolution, uniform", "float32", True), ("potential with forces", "float32", None)),
    ],
    "CHAIN_ROWS": [],
    "ORDERED_COUNT": _programs(("potential with forces", "bfloat16", True)),
    "FREE_BYTES": [],
    "FREE_COUNT": [],
    "ALONE_BYTES": [
        Measured("messages", "edge_sum", "1166243x8 into 169343 uniform", "float32", "forward", True),
        Measured("messages", "edge_sum", "1166243x8 into 169343 zipf", "float32", "forward", True),
    ],
    "EXTREME_ELEMENTS": [
        Measured("messages", "edge_max", "1166243x64 into 169343 uniform", "float32", "forward", True),
    ],
    "LOGSUMEXP_ELEMENTS": [
        Measured("reduction", "logsumexp", "16x8192", "float32", "forward", True),
        Measured("reduction", "logsumexp", "16x8192", "bfloat16", "forward", True),
    ],
    "LOSS_ELEMENTS": [
        Measured("cross_entropy", "cross_entropy", "1x1048576", "float32", "both", True),
        *_programs(("vocabulary head", "float32", True), ("vocabulary head", "bfloat16", True)),
    ],
    "LOSS_CLASSES": [Measured("cross_entropy", "cross_entropy", "32768x256", "float32", "both", True)],
    "SOFTMAX_ELEMENTS": [Measured("softmax", "softmax", "8x50257", "float32", "backward", True)],
    "SOFTMAX_ROWS": [
        Measured("softmax", "softmax", "8x50257", "float32", "backward", True),
        Measured("softmax", "softmax", "1x1048576", "bfloat16", "backward", None),
    ],
    "LOG_SOFTMAX_ROWS": [
        Measured("softmax", "log_softmax", "3072x131072", "bfloat16", "backward", True),
        Measured("softmax", "log_softmax", "1x1048576", "bfloat16", "backward", False),
    ],
    "ATTENTION_ELEMENTS": _programs(("transformer, flax.nnx", "bfloat16", True)),  # 8 x 12 heads of 1024 x 1024
    "ATTENTION_VECTOR": _programs(("transformer, flax.nnx", "bfloat16", True)),
    "LOOP_STEPS": [],
    "ASSOCIATIVE_LENGTH": [],
    "ASSOCIATIVE_LANES": [],
    "CUMULATIVE_LENGTH": [],
    "CUMULATIVE_ELEMENTS": [],
    "WHILE_LANES": [],
}


class Scatter(typing.NamedTuple):
    """A scatter of rows: (batch, lead, rows, trail) updated by (batch, lead, count, trail).

    zeros: the operand is the operation's identity.
    moves_operand: dimensions of the operand must be transposed.
    gathers: the updates are arithmetic on a gather.
    fused: the updates are arithmetic, slices or the like, which XLA computes where it adds them.
    is_unique: no row occurs twice.
    jaxlib: its version.
    """

    operation: str
    dtype: jnp.dtype
    batch: int
    lead: int
    rows: int
    count: int
    trail: int
    is_sorted: bool = False
    zeros: bool = False
    moves_operand: bool = False
    gathers: bool = False
    fused: bool = False
    is_unique: bool = False
    jaxlib: tuple[int, ...] = (0, 11, 2)

    @property
    def elements(self) -> int:
        """The number of elements of the updates."""
        return self.batch * self.lead * self.count * self.trail

    @property
    def swaps(self) -> bool:
        """Whether XLA adds these numbers to memory by compare-and-swap on a GPU."""
        return self.dtype.itemsize == 2 or (self.dtype == jnp.float32 and SWAPS[0] <= self.jaxlib <= SWAPS[1])

    @property
    def bytes(self) -> int:
        """Read and written by a kernel: updates and indices once, rows once onto zeros, else twice."""
        operand = self.batch * self.lead * self.rows * self.trail * (1 if self.zeros else 2)
        return (self.elements + operand) * self.dtype.itemsize + 4 * self.batch * self.count


def can_scatter(p: Scatter) -> tuple[bool, str]:
    """Whether kernels run it at all."""
    if p.dtype not in SCATTER_DTYPES:
        return False, f"no kernel for {p.dtype}"
    if p.rows > 2**31 - 2:
        return False, "more rows than 32 bits number"
    return True, "forced"


def _is_crowded(p: Scatter) -> bool:
    """Whether so many updates add to each row that XLA's atomic additions wait for each other."""
    if p.trail == 1:
        return p.count >= CROWDED_COUNT and p.count >= CROWDED * p.rows
    return p.rows <= CROWDED_ROWS and p.count >= CROWDED_WIDE * p.rows


def few(count: int, what: str, least: int, why: str = "") -> str:
    """Why so many are left to XLA."""
    return f"{count} {what} are few{why}, taken from {least}"


@remembered
def scatter(p: Scatter) -> tuple[bool, str]:
    can, why = can_scatter(p)
    if not can:
        return False, why
    if p.moves_operand and not p.zeros:
        return False, "the operand would be transposed"
    if p.operation == "scatter_add":
        if p.swaps:
            if p.count == 1:
                return False, "one update of a row has nothing to be summed with"
            sums = "16-bit sums" if p.dtype.itemsize == 2 else "this jaxlib adds float32 by compare-and-swap"
            enough = p.elements >= NARROW_ELEMENTS
            return enough, sums if enough else few(p.elements, "elements", NARROW_ELEMENTS)
        if p.gathers:
            return False, FUSED_GATHER
    elif p.dtype in FLOATS:
        enough = p.elements >= EXTREME_ELEMENTS
        return enough, "extrema of floats" if enough else few(p.elements, "elements", EXTREME_ELEMENTS)
    if _is_crowded(p):
        return True, f"{p.count // p.rows} updates for each row"
    if p.elements * p.dtype.itemsize < WIDE_BYTES:
        return False, few(p.elements * p.dtype.itemsize, "bytes of updates", WIDE_BYTES)
    if p.fused:
        return False, FUSED_ARITHMETIC
    if p.is_sorted:
        return (True, "sorted rows") if p.zeros else (False, "XLA is as fast on sorted indices")
    if p.trail < WIDE_TRAIL:
        return False, few(p.trail, "elements side by side", WIDE_TRAIL)
    return True, "large rows"


@remembered
def chain(p: Scatter, ordered: bool) -> tuple[bool, str]:
    """Whether a chain that makes the updates of this scatter is taken together with it, where there is one.

    ordered: another chain has these indices.
    """
    if p.dtype not in FLOATS or p.dtype.itemsize > 4:
        return False, f"no chains of {p.dtype} were measured"
    if p.rows > CHAIN_ROWS * p.count:
        return False, f"{p.rows} rows are many for {p.count} edges"
    first = p.swaps or ordered
    if p.count < (least := ORDERED_COUNT if first else CHAIN_COUNT):
        return False, few(p.count, "edges", least, " for a chain")
    if not first and p.operation == "scatter_add" and p.rows * p.trail * p.dtype.itemsize < WIDE_BYTES:
        return False, f"{p.rows} rows of {p.trail} features are few for a chain"
    return True, "a chain"


@remembered
def free(p: Scatter) -> tuple[bool, str]:
    """Whether narrow rows are added in no fixed order, as XLA adds them (unordered.py)."""
    if p.operation != "scatter_add" or p.dtype not in FLOATS:
        return False, f"no atomic sums of {p.dtype}"
    if p.batch * p.lead > 1 or p.trail * max(4, p.dtype.itemsize) > FREE_BYTES:
        return False, f"{p.trail} elements side by side are many"
    if p.is_sorted or p.is_unique:
        return False, "nothing was measured with sorted or unique indices"
    if p.count < FREE_COUNT:
        return False, few(p.count, "updates", FREE_COUNT)
    if not p.zeros and p.rows > p.count:
        return False, "the operand is larger than the updates"
    return True, "narrow rows"


def alone(p: Scatter, ordered: bool) -> bool:
    """Whether the message kernel reduces updates that no chain makes."""
    if p.operation != "scatter_add":
        return True  # and those sums that follow a maximum, in a softmax over the edges of a node, find its order
    return ordered and (not p.gathers or p.trail * p.dtype.itemsize <= ALONE_BYTES)


def steps(length: int, unroll: int) -> tuple[bool, str]:
    """Whether a loop of this many steps is taken, if XLA runs `unroll` steps at once."""
    if not isinstance(length, int):
        return False, "a symbolic number of steps"
    if not length:
        return False, "a loop of no steps"
    count = -(-length // max(unroll, 1))
    if count < LOOP_STEPS:
        unrolled = f" unrolled by {unroll}" if unroll > 1 else ""
        return False, few(length, f"steps{unrolled}", (LOOP_STEPS - 1) * max(unroll, 1) + 1)
    return True, "one kernel for all steps"


def while_loop(lanes: int) -> tuple[bool, str]:
    """Whether a while loop in which each lane stops on its own is taken."""
    enough = lanes >= WHILE_LANES
    return enough, f"{lanes} lanes that stop on their own" if enough else few(lanes, "lanes", WHILE_LANES)


def associative(length: int, lanes: int) -> tuple[bool, str]:
    if length < ASSOCIATIVE_LENGTH:
        return False, few(length, "steps", ASSOCIATIVE_LENGTH)
    why = few(lanes, "lanes", ASSOCIATIVE_LANES)
    return lanes >= ASSOCIATIVE_LANES, f"{why}: the gradient is a loop over the steps"


def cumulative(length: int, elements: int) -> tuple[bool, str]:
    if length < CUMULATIVE_LENGTH:
        return False, few(length, "steps", CUMULATIVE_LENGTH)
    return elements >= CUMULATIVE_ELEMENTS, few(elements, "elements", CUMULATIVE_ELEMENTS)


def logsumexp(dtype, rows: int, width: int) -> tuple[bool, str]:
    if dtype not in FLOATS:
        return False, f"no kernel for {dtype}"
    enough = rows * width >= LOGSUMEXP_ELEMENTS
    return enough, "one read" if enough else few(rows * width, "elements", LOGSUMEXP_ELEMENTS)


def loss(dtype, rows: int, classes: int) -> tuple[bool, str]:
    if dtype not in FLOATS:
        return False, f"no kernel for {dtype}"
    if classes < LOSS_CLASSES:
        return False, few(classes, "classes", LOSS_CLASSES)
    enough = rows * classes >= LOSS_ELEMENTS
    return enough, "one read" if enough else few(rows * classes, "logits", LOSS_ELEMENTS)


def softmax(dtype, rows: int, width: int) -> tuple[bool, str]:
    if dtype not in FLOATS:
        return False, f"no kernel for {dtype}"
    enough = rows >= SOFTMAX_ROWS and rows * width >= SOFTMAX_ELEMENTS
    return enough, "the gradient in one read" if enough else f"{rows} rows of {width} are few"


def attention(dtype, rows: int, keys: int) -> tuple[bool, str]:
    if dtype not in FLOATS or dtype.itemsize != 2:
        return False, f"no attention of {dtype} was measured"
    if keys % ATTENTION_VECTOR:
        return False, f"{keys} keys are not whole vectors of 16 bytes"
    enough = rows * keys >= ATTENTION_ELEMENTS
    return enough, "the softmax in one read" if enough else few(rows * keys, "logits", ATTENTION_ELEMENTS)


def log_softmax(dtype, rows: int, width: int) -> tuple[bool, str]:
    if dtype not in FLOATS or dtype.itemsize != 2:
        return False, f"the gradient of rows of -inf would be 0, not NaN, in {dtype}"
    enough = rows >= LOG_SOFTMAX_ROWS and rows * width >= SOFTMAX_ELEMENTS
    return enough, "the gradient in one read" if enough else f"{rows} rows of {width} are few"
