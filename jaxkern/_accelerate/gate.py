"""Which operations run on jaxkern: those that it runs faster.

Every function here is pure: it depends on shapes, types and hints alone, so that a program is compiled the same way in
every process. Each returns (taken, reason). The thresholds are from benchmarks/results (one H200, times in microseconds,
XLA's first), by the cases named beside them; a case that lies outside what was measured stays with XLA.
"""

import typing

import jax.numpy as jnp

SCATTER_DTYPES = frozenset(
    map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64, jnp.int32, jnp.int64, jnp.uint32))
)
FLOATS = frozenset(map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)))

# 16-bit sums: XLA adds by compare-and-swap and loses at every size; below this many elements nothing is measured but
# a draw (33554432 n15: 1.5 to 1.2).
NARROW_ELEMENTS = 1 << 10
# float32 and integers: XLA adds atomically. It is slower from some megabytes of updates on (64 of 1000x64 n20000 159 to
# 149, 128256x4096 n16384 168 to 134, 169343x128 n1166243 442 to 238), faster below (399x128 n40960 13 to 24).
WIDE_BYTES = 32 << 20
# Rows as narrow as these were measured with sorted indices alone (169343x1 47 to 11; unsorted 1048576 698 to 748).
WIDE_TRAIL = 16
# So many updates of one row keep adding to the same address (1 n10000 19 to 4.4, 10 of 10 n1000000 3378 to 29), and
# 100 do not yet (1024 n100000 10 to 10).
CROWDED = 1 << 10
CROWDED_COUNT = 1 << 13
# Chains of gathers, arithmetic and a scatter, as one message kernel: it needs the edges in order, which takes a sort, and
# XLA shares that sort between all that have the same indices. float32, 1166243 edges into 169343 nodes, 64 features:
# 217 to 200 with the sort, 40 features: 137 to 187; 200000 edges into 20000 nodes, which stay in the cache: 59 to 74
# with 128 features. 16 bits: 163 to 127 with 4 features, and 861 to 148 in float32 with one if receivers are Zipf.
CHAIN_COUNT = 100_000
CHAIN_ROWS = 16  # for one edge, at most: finding where each row begins takes time for each row, too
ORDERED_COUNT = 1 << 14  # 16 bits, or in an order that is there already: below, launches weigh as much as the sums
ALONE_BYTES = 32  # of a row of updates that XLA would not have stored
FUSED_GATHER = "XLA fuses the gather that makes the updates"
# Maxima of floats: compare-and-swap at any width (graph attention with a segment_max, Zipf receivers: no step in
# minutes). Elements as of 399x128 n40960 at least.
EXTREME_ELEMENTS = 1 << 18

# logsumexp: 16x8192 4.2 to 2.6.
LOGSUMEXP_ELEMENTS = 1 << 17
# Loss with its gradient: 1x1048576 12.4 to 10.0, 32768x256 46.6 to 23.1; the program "vocabulary
# head" in bfloat16, 8192x50257, 5941 to 5392.
LOSS_ELEMENTS, LOSS_CLASSES = 1 << 20, 256
# The gradient of softmax: 8x50257 5.7 to 3.9. That of log_softmax of 16 bits: 3072 rows and more.
SOFTMAX_ELEMENTS, SOFTMAX_ROWS, LOG_SOFTMAX_ROWS = 1 << 18, 8, 1 << 11

# Attention: GPT-2's sizes, 8x12x1024x1024 (benchmarks/results/programs); nothing smaller is measured.
ATTENTION_ELEMENTS, ATTENTION_VECTOR = 1 << 22, 8

# Norms, forward and gradient: rms_norm 32768x4096 bfloat16 148 to 127 and 353 to 227, layer_norm 233 to 138 and 472 to
# 246, in float32 275 to 250 and 616 to 413; 524288x128 66 to 65 and 185 to 113. Nothing is measured below this many
# elements, of float64, or of 16-bit rows that are not whole vectors of 16 bytes.
NORM_ELEMENTS, NORM_VECTOR = 1 << 20, 8


class Scatter(typing.NamedTuple):
    """A scatter of rows: (batch, lead, rows, trail) updated by (batch, lead, count, trail)."""

    operation: str
    dtype: jnp.dtype
    batch: int
    lead: int
    rows: int
    count: int
    trail: int
    is_sorted: bool = False
    zeros: bool = False  # the operand is the operation's identity
    moves_operand: bool = False  # its dimensions must be transposed
    gathers: bool = False  # the updates are arithmetic on a gather

    @property
    def elements(self) -> int:
        """Of the updates."""
        return self.batch * self.lead * self.count * self.trail

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


def scatter(p: Scatter) -> tuple[bool, str]:
    can, why = can_scatter(p)
    if not can:
        return False, why
    if p.moves_operand and not p.zeros:
        return False, "the operand would be transposed"
    if p.operation == "scatter_add":
        if p.dtype.itemsize == 2:
            if p.count == 1:
                return False, "one update of a row has nothing to be summed with"
            enough = p.elements >= NARROW_ELEMENTS
            return enough, "16-bit sums" if enough else f"{p.elements} elements are few"
        if p.gathers:
            return False, FUSED_GATHER
    elif p.dtype in FLOATS:
        enough = p.elements >= EXTREME_ELEMENTS
        return enough, "extrema of floats" if enough else f"{p.elements} elements are few"
    if p.count >= CROWDED_COUNT and p.count >= CROWDED * p.rows:
        return True, f"{p.count // p.rows} updates for each row"
    if p.elements * p.dtype.itemsize < WIDE_BYTES:
        return False, f"{p.elements * p.dtype.itemsize / 1e6:.3g} MB of updates are few"
    if p.is_sorted:
        return (True, "sorted rows") if p.zeros else (False, "XLA is as fast on sorted indices")
    if p.trail < WIDE_TRAIL:
        return False, f"{p.trail} elements side by side are few"
    return True, "large rows"


def chain(p: Scatter, ordered: bool) -> tuple[bool, str]:
    """Whether a chain that makes the updates of this scatter is taken together with it, where there is one.

    ordered: another chain has these indices.
    """
    if p.dtype not in FLOATS or p.dtype.itemsize > 4:
        return False, f"no chains of {p.dtype} were measured"
    if p.rows > CHAIN_ROWS * p.count:
        return False, f"{p.rows} rows are many for {p.count} edges"
    first = p.dtype.itemsize == 2 or ordered
    if p.count < (ORDERED_COUNT if first else CHAIN_COUNT):
        return False, f"{p.count} edges are few for a chain"
    if not first and p.operation == "scatter_add" and p.rows * p.trail * p.dtype.itemsize < WIDE_BYTES:
        return False, f"{p.rows} rows of {p.trail} features are few for a chain"
    return True, "a chain"


def alone(p: Scatter, ordered: bool) -> bool:
    """Whether the message kernel reduces updates that no chain makes."""
    if p.operation != "scatter_add":
        return True  # and those sums that follow a maximum, in a softmax over the edges of a node, find its order
    return ordered and (not p.gathers or p.trail * p.dtype.itemsize <= ALONE_BYTES)


def logsumexp(dtype, rows: int, width: int) -> tuple[bool, str]:
    if dtype not in FLOATS:
        return False, f"no kernel for {dtype}"
    enough = rows * width >= LOGSUMEXP_ELEMENTS
    return enough, "one read" if enough else f"{rows * width} elements are few"


def loss(dtype, rows: int, classes: int) -> tuple[bool, str]:
    if dtype not in FLOATS:
        return False, f"no kernel for {dtype}"
    if classes < LOSS_CLASSES:
        return False, f"{classes} classes are few"
    enough = rows * classes >= LOSS_ELEMENTS
    return enough, "one read" if enough else f"{rows * classes} logits are few"


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
    return enough, "the softmax in one read" if enough else "few logits"


def log_softmax(dtype, rows: int, width: int) -> tuple[bool, str]:
    if dtype not in FLOATS or dtype.itemsize != 2:
        return False, f"the gradient of rows of -inf would be 0, not NaN, in {dtype}"
    enough = rows >= LOG_SOFTMAX_ROWS and rows * width >= SOFTMAX_ELEMENTS
    return enough, "the gradient in one read" if enough else f"{rows} rows of {width} are few"


def norm(dtype, rows: int, width: int) -> tuple[bool, str]:
    if dtype not in FLOATS or dtype.itemsize > 4:
        return False, f"no norms of {dtype} were measured"
    if dtype.itemsize == 2 and width % NORM_VECTOR:
        return False, f"{width} elements of 16 bits are not whole vectors of 16 bytes"
    enough = rows * width >= NORM_ELEMENTS
    return enough, "one read" if enough else f"{rows * width} elements are few"
