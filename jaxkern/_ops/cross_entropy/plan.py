"""Which kernels run cross-entropy on CUDA, and how they are launched.

                 loss                           gradient      both in one call
    sub_warp     8 or 16 lanes per row          the same      rows up to 1 KB in registers
    warp         a warp per row                 any row       rows up to 2 KB in registers
    block        a block per row                -             rows up to 64 KB (16 bit: 32 KB) in registers
    pipeline     -                              -             sm_90: a row in the shared memory of 1 to 16 blocks, which
                                                              bulk copies refill while it is written
    streaming    a block per row                as warp       one after the other
    split        several blocks per row         as warp       one after the other
    column       the axis is not the last one   the same      one after the other

If loss and gradient are computed one after the other, the logits are read twice; otherwise once. The limits come from the kernels
(ffi/kernels/cross_entropy), the preferences from measurements (benchmarks/NOTES.md, benchmarks/results).
"""

import math
import typing

from jaxkern._core.algorithms import pick
from jaxkern._core.define import CUDA_TYPES, EMPTY_VIEW, FLOAT_BYTES, broadcast_view, ceil_div, cpp_bool, per_thread
from jaxkern._core.launch import (
    MOST_BLOCKS_Y,
    Launch,
    Plan,
    f32,
    f64,
    i32,
    null,
    operand,
    planned,
    result,
    scratch,
    struct,
)
from jaxkern._core.params import Params
from jaxkern._ops.cross_entropy import tuning
from jaxkern._ops.softmax.plan import PARAMS as SOFTMAX_PARAMS

PARAMS = Params("cross_entropy/ops.cuh", "LossParams")
ALGORITHMS = ("sub_warp", "warp", "block", "pipeline", "streaming", "split", "column")

DTYPES = tuple(FLOAT_BYTES)
PASSES = ("loss", "gradient", "both")
_LABELS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class Problem(typing.NamedTuple):
    """A cross-entropy over the middle dimension of [rows, width, inner]."""

    rows: int
    width: int
    inner: int = 1
    dtype: str = "float32"
    which: typing.Literal[PASSES] = "loss"
    masked: bool = False

    @property
    def itemsize(self) -> int:
        return FLOAT_BYTES[self.dtype]

    @property
    def vector(self) -> int:
        """Elements in 16 bytes."""
        return 16 // self.itemsize

    @property
    def whole(self) -> bool:
        """Rows are whole vectors."""
        return self.width % self.vector == 0

    @property
    def vectors(self) -> int:
        """Whole vectors of a row, at most."""
        return self.width // self.vector

    @property
    def touched(self) -> int:
        """The largest number of vectors that a row covers, in whole or in part."""
        return self.vectors if self.whole else (self.width + 2 * self.vector - 2) // self.vector

    @property
    def stat_bytes(self) -> int:
        """sizeof(LossStat)."""
        return {2: 16, 4: 24, 8: 32}[self.itemsize]


def _parts(p: Problem, device) -> int:
    """How many blocks share a row of the split loss."""
    return min(ceil_div(ceil_div(p.width, p.vector), tuning.LOSS_PART_VECTORS), ceil_div(4 * device.sm_count, p.rows))


def fits(algorithm: str, p: Problem, device) -> bool:
    """Whether the algorithm can run the problem."""
    if algorithm == "column":
        return True  # a last axis is a column tile of width 1
    if p.inner != 1:
        return False
    narrow = not p.masked and p.dtype != "float64"
    in_registers = p.which == "both" and narrow
    if algorithm == "sub_warp":
        return narrow and p.vectors <= tuning.SUB_WARP_VECTORS
    if algorithm == "warp":
        return p.which != "both" or (in_registers and p.touched <= tuning.WARP_VECTORS)
    if algorithm == "block":
        # A thread holds 8 vectors; 4 in 16 bit, whose exponentials take twice the registers.
        most = tuning.BLOCK_THREADS * (4 if p.itemsize == 2 else 8)
        return p.which == "loss" or (in_registers and p.touched <= most)
    if algorithm == "pipeline":
        # Clusters, and the shared memory of a data-centre GPU.
        large = device.compute_capability >= 90 and device.shared_memory >= 227 * 1024
        return in_registers and large and 16 * p.vectors <= tuning.CLUSTER_BLOCKS * tuning.RING_BYTES
    return p.which != "gradient" and (algorithm == "streaming" or _parts(p, device) > 1)


def choose(p: Problem, device) -> str:
    """The algorithm that runs the problem by default; every problem has one."""
    if p.inner != 1:
        return "column"
    if fits("sub_warp", p, device):
        return "sub_warp"
    if p.which == "gradient":
        return "warp"
    # Few long rows: all multiprocessors work on each.
    few = p.rows * 2 <= device.sm_count and p.vectors >= tuning.SPLIT_VECTORS and fits("split", p, device)
    if p.which == "loss":
        if few:
            return "split"
        # A warp per row needs many more rows than there are warps, or short ones.
        rows = tuning.WARP_ROWS if p.vectors <= tuning.SHORT_VECTORS else tuning.LONG_WARP_ROWS
        return "warp" if p.rows >= rows * device.sm_count else "block"
    if fits("warp", p, device):
        return "warp"
    if few and p.rows * tuning.CLUSTER_BLOCKS < device.sm_count // 2 and p.vectors >= tuning.BOTH_SPLIT_VECTORS:
        return "split"
    return next(a for a in ("block", "pipeline", "streaming") if fits(a, p, device))


# ---- the kernels: names, parameters and launch shapes


def ignore_bits(ignore: int | None) -> int:
    """The label to ignore as the 64 bits of a signed number."""
    return 0 if ignore is None else ignore - (1 << 64 if ignore >= 1 << 63 else 0)


class _Call(typing.NamedTuple):
    """A problem with all other inputs of the kernels' parameters."""

    p: Problem
    device: typing.Any
    options: typing.Any  # smoothing, z_loss, ignore
    label_dtype: str
    mask_view: typing.Any

    @property
    def kind(self) -> str:
        return CUDA_TYPES[self.p.dtype]

    @property
    def masked(self) -> str:
        return cpp_bool(self.p.masked)

    @property
    def gradient_result(self) -> int:
        return 0 if self.p.which == "gradient" else 3 + self.p.masked

    def params(self, parts=1, partials=None):
        """LossParams. See primitive.py for the operands and results of each pass."""
        p, options = self.p, self.options
        rows = {
            "loss": (null, result(0), result(1), result(2), result(3), operand(2)),
            "both": (operand(2), result(0), result(1), result(2), result(3), operand(3)),
            "gradient": (operand(4), null, operand(2), operand(3), operand(5), operand(6)),
        }[p.which]
        weight, loss, largest, total, count, mask = rows if p.masked else (*rows[:4], null, null)
        numbers = (options.smoothing, 1 - options.smoothing, options.z_loss, options.classes or p.width)
        arrays = 1 if p.which == "loss" else 2
        return PARAMS(
            logits=operand(0),
            gradient=null if p.which == "loss" else result(self.gradient_result),
            labels=operand(1),
            weight=weight,
            loss=loss,
            largest=largest,
            total=total,
            count=count,
            rows=p.rows,
            width=p.width,
            inner=p.inner,
            parts=parts,
            ragged=not p.whole,
            exceeds_l2=p.rows * p.width * p.inner * p.itemsize * arrays > self.device.l2_bytes,
            has_ignore=options.ignore is not None,
            as_written=options.as_written or options.classes > 0,
            label_type=i32(_LABELS.index(self.label_dtype)),
            ignore=ignore_bits(options.ignore),
            single=struct(*map(f32, numbers)),
            wide=struct(*map(f64, numbers)),
            partials=partials or null,
            mask=mask,
            mask_view=self.mask_view or EMPTY_VIEW,
        )

    @property
    def blocks_per_sm(self) -> int:
        """kLossGroupBlocks."""
        return 4 if self.p.masked or self.p.itemsize == 8 else 6


def _rows(call: _Call, kernel: str, lanes: int, params, grid: int, threads=tuning.GROUP_THREADS) -> Launch:
    return Launch("cross_entropy/rows.cuh", f"{kernel}<{call.kind}, {lanes}, {call.masked}>", [params], grid, threads)


def _lanes(p: Problem, algorithm: str) -> int:
    if algorithm != "sub_warp":
        return 32
    return 8 if ceil_div(p.width, p.vector) <= 8 * tuning.LANE_VECTORS else 16


def _loss(call: _Call, algorithm: str) -> list[Launch]:
    p = call.p
    if algorithm in ("sub_warp", "warp"):
        # Groups that live as long as the kernel: as many as the GPU runs at once, or as there are rows.
        lanes = _lanes(p, algorithm)
        grid = min(ceil_div(p.rows, tuning.GROUP_THREADS // lanes), call.blocks_per_sm * call.device.sm_count)
        return [_rows(call, "LossRows", lanes, call.params(), grid)]
    # Several blocks of few warps per multiprocessor: while one of them waits at the end of a row, others do not.
    threads = min(tuning.STREAM_THREADS, max(128, 32 * ceil_div(ceil_div(p.width, p.vector), 4 * 32)))
    if algorithm != "split":
        return [_rows(call, "LossRows", 0, call.params(), p.rows, threads)]
    parts = _parts(p, call.device)
    params = call.params(parts, scratch())
    merge = Launch(
        "cross_entropy/rows.cuh",
        f"LossMerge<{call.kind}>",
        [params],
        ceil_div(p.rows, tuning.GROUP_THREADS // 32),
        tuning.GROUP_THREADS,
    )
    return [_rows(call, "LossRows", 0, params, p.rows * parts, threads), merge]


def _gradient(call: _Call, algorithm: str) -> list[Launch]:
    p, lanes = call.p, _lanes(call.p, algorithm)
    groups = tuning.GROUP_THREADS // lanes
    vectors = ceil_div(p.width, p.vector)
    # Four times as many units as run at once, if there are enough vectors, so that few multiprocessors idle at the end.
    wanted = ceil_div(4 * call.blocks_per_sm * groups * call.device.sm_count, p.rows)
    parts = max(
        ceil_div(vectors, tuning.GRADIENT_PART_VECTORS),
        min(ceil_div(vectors, tuning.GRADIENT_PART_VECTORS // 4), wanted),
    )
    return [_rows(call, "GradientRows", lanes, call.params(parts), ceil_div(p.rows * parts, groups))]


def _both_in_registers(call: _Call, algorithm: str) -> list[Launch]:
    """Launches softmax's kernel, whose arguments LossParams follow."""
    p, vectors = call.p, call.p.touched
    exceeds_l2 = 2 * p.rows * p.width * p.itemsize > call.device.l2_bytes
    softmax = SOFTMAX_PARAMS(
        input=[operand(0), null],
        out=result(call.gradient_result),
        rows=p.rows,
        width=p.width,
        grain=p.vector,
        exceeds_l2=exceeds_l2,
        inner=1,
        mask=null,
        mask_view=EMPTY_VIEW,
    )
    grid, threads = p.rows, tuning.GROUP_THREADS
    if vectors <= tuning.WARP_VECTORS:
        held = tuning.LANE_VECTORS
        lanes = 32 if algorithm != "sub_warp" or vectors > 16 * held else 8 if vectors <= 8 * held else 16
        grid = ceil_div(p.rows, tuning.GROUP_THREADS // lanes)
    else:
        lanes = "jaxkern::kBlockLanes"
        held, threads = (
            (4, 32 * ceil_div(vectors, 4 * 32)) if p.itemsize == 2 else per_thread(vectors, tuning.BLOCK_THREADS)
        )
    row = f"jaxkern::BothRow<{call.kind}, {'false' if p.whole else 'true'}>"
    name = f"SoftmaxRegisters<jaxkern::BothForward<{call.kind}>, {row}, {lanes}, {held}, 1>"
    return [Launch("cross_entropy/registers.cuh", name, [struct(softmax, call.params())], grid, threads)]


def _both_in_shared_memory(call: _Call) -> list[Launch]:
    """The smallest cluster whose blocks hold a row."""
    p, vectors = call.p, max(1, call.p.vectors)
    cluster = 1
    while ceil_div(ceil_div(vectors, cluster), tuning.CHUNK_VECTORS) > tuning.SLOTS:
        cluster *= 2
    # If there are few rows per cluster, all consumers together work on each.
    groups = 1 if p.rows < 4 * (call.device.sm_count // cluster) else 2
    shared = (
        tuning.RING_BYTES + 8 * tuning.SLOTS + groups * (8 * tuning.SLOTS + 16 + (32 // groups + 32) * p.stat_bytes)
    )
    return [
        Launch(
            "cross_entropy/pipeline.cuh",
            f"BothPipeline<{call.kind}, {groups}>",
            [call.params(), i32(ceil_div(vectors, cluster))],
            p.rows * cluster,
            tuning.BLOCK_THREADS + 32,
            cluster,
            shared,
            waves=1,
        )
    ]


def _column(call: _Call, aligned=True) -> list[Launch]:
    p = call.p
    vector = p.vector if aligned and not p.masked and p.itemsize < 8 and p.inner % p.vector == 0 else 1
    tiles = p.rows * ceil_div(p.inner, 32 * vector)
    useful = min(ceil_div(p.width, 4 * tuning.COLUMN_WARPS), ceil_div(8 * call.device.sm_count, tiles))
    grids = {"LossColumn": tiles, "GradientColumn": (tiles, min(max(useful, 1), MOST_BLOCKS_Y))}
    kernels = {"loss": ["LossColumn"], "gradient": ["GradientColumn"], "both": list(grids)}[p.which]
    return [
        Launch(
            "cross_entropy/column.cuh",
            f"{kernel}<{call.kind}, {vector}, {call.masked}>",
            [call.params()],
            grids[kernel],
            32 * tuning.COLUMN_WARPS,
        )
        for kernel in kernels
    ]


def _launches(call: _Call, algorithm: str) -> list[Launch]:
    if algorithm == "column":
        return _column(call)
    if call.p.which == "both" and algorithm == "pipeline":
        return _both_in_shared_memory(call)
    if call.p.which == "both" and algorithm in ("sub_warp", "warp", "block"):
        return _both_in_registers(call, algorithm)
    loss = _loss(call, algorithm) if call.p.which != "gradient" else []
    return loss + (_gradient(call, algorithm) if call.p.which != "loss" else [])


def cross_entropy(which: str, device, operands, results, *, axis: int, algorithm: str, options) -> Plan | None:
    """The plan of a primitive (see primitive.py) for arrays of these types; None where there is no kernel."""
    del results
    logits, labels, masked = operands.logits, operands.labels, operands.mask is not None
    shape = logits.shape
    view = broadcast_view(shape, operands.mask.shape, axis) if masked else None
    if logits.dtype.name not in FLOAT_BYTES or labels.dtype.name not in _LABELS or (masked and view is None):
        return None
    p = Problem(math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]), logits.dtype.name, which, masked)
    algorithm = pick("softmax_cross_entropy", algorithm, p, device)
    call = _Call(p, device, options, labels.dtype.name, view)
    launches = tuple(_launches(call, algorithm))
    # Element by element, for arrays that are not aligned.
    unaligned = tuple(_column(call, aligned=False))
    size = p.rows * _parts(p, device) * p.stat_bytes if algorithm == "split" else 0
    return planned(algorithm, launches, size, unaligned)
