"""How long XLA and one kernel take for a region of rows: a model of bytes, arithmetic and launches.

A kernel takes the time in which a copy moves its bytes, or the time of its operations on elements, whichever is longer. The
constants are fitted to `benchmarks/results/row_kernel-NVIDIA_H200.json`, and to the regions of the programs in
`benchmarks/_by_hand.py` on an H100 (jaxlib 0.11.2, device time); tests/test_cost.py holds the model to the former.

XLA fuses elementwise operations into the reduction or the result that reads them, so a kernel of XLA reads arrays that are in
memory, and again for each reduction that waits for another one: from L2 as far as all arrays fit there. It makes one kernel of
all, by Triton, if a single array of rows is written, nothing is summed over rows, no element is picked, and no number of rows is
kept that is reduced in several stages, or rows are short and it is reduced in one. Otherwise the numbers take a kernel of their own
[the causal softmax of llama, whose normalizer its gradient reads, bfloat16 131072x1024, H100: 123 and 222 us].
"""

import dataclasses
import math

from jaxkern._accelerate.places import shares
from jaxkern._core import device
from jaxkern._core.decisions import megabytes
from jaxkern._engines.jaxpr import MOVES, Value
from jaxkern._engines.rows import tuning
from jaxkern._engines.rows.core import DEAR
from jaxkern._engines.rows.picks import PICKS

GAIN = 1.03  # XLA's time over the kernel's, at least, where a region is taken
# The same for a region that stores arrays that XLA does not: its gradient may read them, and they stay in memory until then [a transformer
# with capped logits, H100: four softmaxes save 4 us each by these estimates, and the program needs 2103 MB, plain 1969].
STORING_GAIN = 1.1
# Bytes that a copy moves in a second: on an H200, and on an H100, which stands for all other GPUs.
H200_BANDWIDTH, BANDWIDTH = 4.2e12, 3.1e12
LAUNCH = 1.5e-6  # seconds between a kernel and the next

# Triton's kernel where it has several stages or elementary functions: in 16 bits [soft_cap, 32768x4096: 1.7]; the same from SHORT on where
# it writes rows after three reductions [soft_cap backward 3.2, threshold backward 2.7]; of long rows [soft_cap, float32 8192x16384: 2.2];
# and of others from SHORT on [threshold backward, float32 32768x4096: 1.14].
TRITON_NARROW, TRITON_THREE, TRITON_LONG, TRITON_WIDE, LONG, SHORT = 1.6, 2.5, 1.4, 1.1, 8192, 512
# Seconds of an operation of an element, and how many of them an elementary function is; coarsely where 16-bit numbers alone are stored
# [the loss of the capped transformer, with tanh in each of three passes, H100: 1210 us where bytes take 346; threshold, bfloat16
# 32768x4096, H200: 160 us where they take 128].
OPERATION, XLA_OPERATION = 0.05e-12, 0.04e-12
FUNCTION, COARSE_FUNCTION = 12, 5
# Operations of a quotient of float32, and how many times as long they take where threads share the elements of rows that are not adjacent
# [Sinkhorn's logsumexp of quotients, float32 8192x8192, H100: 127 us along the last axis, 142 along the first; bytes take 87].
QUOTIENT, ACROSS = 4, 1.15
# How many times as long as a copy both take for bytes there [a maximum, float32 8192x8192, H100: 104 us, XLA 101, bytes 87; Sinkhorn's
# logsumexp of quotients, H200: XLA 150 us for 128 by bytes, and 134 along the last axis].
BYTES_ACROSS = 1.17
# Seconds for each array of columns that a kernel sums over rows: blocks store partial sums, which a second kernel adds [llama, gradient
# of a norm, bfloat16 8192x1024, H100: 31 us for 50 MB; gated_norm backward, bfloat16 32768x4096, H200: 338 us for 1342 MB].
SUMS = 13e-6
CLUSTER_SUMS = (
    1.5  # factor where rows of 16 bits that are summed take a cluster [gated_norm backward, bfloat16 8192x16384]
)
RAGGED = {2: 1.8, 4: 1.3, 8: 1.1}  # factor of rows that are not whole packs, by the bytes of an element [10872x12345]
GUARDED = ("warp", "block", "cluster", "streaming", "split")  # algorithms that do not read what conditions exclude
READS_ALONE = 1.15  # factor of a kernel that writes no rows and reduces in several stages


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of a region in XLA and as one kernel, and the bytes that each moves.

    measured: the seconds are measured (tune.py). kernels: how many XLA takes. computes: whether operations, and not bytes, limit the
    region's kernel. unstored: bytes that it moves of arrays that XLA does not store.
    """

    xla: float
    kernel: float
    xla_bytes: int
    kernel_bytes: int
    bandwidth: float
    measured: bool = False
    kernels: int = 1
    computes: bool = False
    unstored: int = 0

    @property
    def wins(self) -> bool:
        return self.xla >= (STORING_GAIN if self.unstored else GAIN) * self.kernel

    def beside(self, moved: int) -> "Estimate":
        """The estimate with bytes that are moved because a kernel cannot be fused with its neighbours."""
        kernel, kernel_bytes = self.kernel + moved / self.bandwidth, self.kernel_bytes + moved
        return dataclasses.replace(self, kernel=kernel, kernel_bytes=kernel_bytes, unstored=self.unstored + moved)

    def __str__(self):
        kernels = "1 kernel" if self.kernels == 1 else f"{self.kernels} kernels"
        xla = f"XLA: {kernels}, {megabytes(self.xla_bytes)} MB, {self.xla * 1e6:.0f} us"
        own = f"one kernel: {megabytes(self.kernel_bytes)} MB, {self.kernel * 1e6:.0f} us"
        notes = [f"{megabytes(self.unstored)} MB for arrays that XLA does not store"] if self.unstored else []
        notes += ["limited by arithmetic"] if self.computes and not self.measured else []
        notes += ["measured"] if self.measured else []
        return f"{xla}; {own}" + (f" ({', '.join(notes)})" if notes else "")


def bandwidth(gpu) -> float:
    """Bytes that a copy moves in a second on a GPU, a `Device`."""
    return H200_BANDWIDTH if gpu.l2_bytes == device.H200.l2_bytes else BANDWIDTH


def estimate(core, plan, gpu, given=False, apart=False) -> Estimate:
    """core: of the region's row function. plan: of its kernel on a GPU, a `Device`.

    given: whether numbers of rows that the region reads are in memory, where XLA would compute them in its kernel otherwise. apart:
    whether XLA makes a kernel for each array of rows, as for products that read them.
    """
    model = _Model(core, gpu)
    xla, xla_bytes, kernels = model.xla(given, apart)
    kernel, kernel_bytes, computes = model.kernel(plan)
    return Estimate(xla, kernel, xla_bytes, kernel_bytes, model.bandwidth, kernels=kernels, computes=computes)


def _bytes(v, dtype=None) -> int:
    return math.prod(d.size for d in v.dims if d is not None) * (dtype or v.dtype).itemsize


class _Model:
    """What XLA and the row engine make of a region; core: of its row function."""

    def __init__(self, core, gpu):
        self.core, self.program = core, core.program
        self.bandwidth, self.l2 = bandwidth(gpu), gpu.l2_bytes
        # Bytes of all operands and results.
        self.distinct = sum(_bytes(self.program.operands[k]) for k in self.program.used)
        self.distinct += sum(_bytes(o.result, o.dtype) for o in core.outputs)
        self.made = {v: step for step in self.program.steps for v in step.results}
        self.elements = math.prod(d.size for d in (self.program.row, *self.program.others))
        types = [*(self.program.operands[k].dtype for k in core.rows), *(o.dtype for o in core.of_kind("row"))]
        self.narrow = min([d.itemsize for d in types] or [4])  # bytes of an element
        self.stages: dict = {}  # {stage: its reductions along the row}
        for step in core.steps():
            picks = step.origin is not None and step.origin.primitive.name == "gather"  # one element of a row
            if self.program.row in self.program.over(step) and not picks:
                self.stages.setdefault(step.result.stage, []).append(step)
        self.stored: set = set()  # rows that XLA stores on the way

    # ---- the row engine

    def kernel(self, plan):
        """(seconds, bytes, whether operations take longer than bytes) of the region's kernel."""
        core = self.core
        share = shares(core) if plan.algorithm in GUARDED else {}
        size = lambda k: _bytes(self.program.operands[k])
        moved = self.distinct - round(sum((1 - share[k]) * size(k) for k in share))
        reads = plan.algorithm in ("streaming", "split")  # rows again in each stage
        if reads:
            rows = round(sum(share.get(k, 1.0) * size(k) for k in core.rows))
            moved += rows * (len(core.stages) - (not core.of_kind("row")))
        factor, columns = 1.0, len(core.of_kind("columns"))
        if columns and plan.algorithm == "cluster" and self.narrow <= 2:
            factor = CLUSTER_SUMS
        elif not core.of_kind("row") and len(core.stages) > 1:
            factor = READS_ALONE
        if self._ragged() and plan.algorithm != "thread":
            factor *= RAGGED.get(self.narrow, RAGGED[2])
        passes = [[v for s in steps for v in s.operands[: len(s.results)]] for steps in core.passes]
        passes.append([o.value for o in core.outputs if o.kind in ("row", "columns")])
        # Long rows have no registers for what is kept.
        kept = {} if reads or self.program.row.size >= LONG else core.kept_values
        function = COARSE_FUNCTION if core.coarse else FUNCTION
        known = lambda p: {v for v, at in kept.items() if at < p}
        arithmetic = OPERATION * sum(self._operations(values, known(p), function) for p, values in enumerate(passes))
        arithmetic *= ACROSS if self._is_across() else 1
        launches = len(plan.launches) + bool(core.epilogue)
        memory = moved * factor * (BYTES_ACROSS if self._is_across() else 1) / self.bandwidth
        return max(memory, arithmetic) + columns * SUMS + launches * LAUNCH, moved, arithmetic > memory

    def _is_across(self) -> bool:
        """Whether the row is not the last dimension of its arrays."""
        arrays = [*(self.program.operands[k] for k in self.core.rows), *(o.result for o in self.core.of_kind("row"))]
        last = lambda v: next((d for d in reversed(v.dims) if d is not None), None)
        return any(last(v) is not self.program.row for v in arrays)

    def _ragged(self) -> bool:
        """Whether rows are not whole packs."""
        return bool(self.program.row.size * self.narrow % tuning.PACK_BYTES)

    # ---- XLA

    def xla(self, given=False, apart=False):
        """(seconds, bytes, number) of XLA's kernels. given, apart: see `estimate`."""
        core = self.core
        kernels = []  # (bytes, factor of their time, operations) of each
        sums = [o for o in core.outputs if o.kind in ("columns", "total")]
        rows = [o for o in core.outputs if o.kind == "row"]
        picks = {id(s.origin): s.origin for s in core.steps() if s.origin and s.origin.primitive.name in PICKS}
        # Zeros, and the updates in them, are arrays of rows.
        scattered = sum(e.invars[0].aval.dtype.itemsize for e in picks.values() if e.primitive.name != "gather")
        # Rows that depend on no reduction are written first, if that takes several arrays, and read from then on.
        early = [o for o in rows if isinstance(o.value, Value) and o.value.stage == 0]
        for o in early if len(early) < len(rows) else ():
            if len(self._leaves([o.value])) > 1:
                kernels.append(self._kernel_of([o.value], [o]))
                self.stored.add(o.value)
        late = [o for o in rows if o.value not in self.stored]
        values = [o.value for o in (*late, *(o for o in sums if o.kind == "columns"))]
        reduced = [[v for s in steps for v in s.operands] for steps in self.stages.values()]
        whole = [v for values_ in reduced for v in values_]
        narrow = self.program.row.size < LONG
        fuses = not sums and not picks and self.stages and not (given and not self._begins())
        numbers = bool(core.of_kind("number"))
        if fuses and len(late) == 1 and numbers and narrow and len(self.stages) > 1:
            kernels += [self._kernel_of(whole, ()), self._kernel_of([*whole, *values], late, self._triton())]
        elif fuses and len(late) == 1 and (narrow or not numbers):
            kernels.append(self._kernel_of([*whole, *values], late, self._triton()))
        elif fuses and not late and len(self.stages) > 2:
            kernels.append(self._kernel_of(whole, (), self._triton(rows=False)))
        else:
            for values_ in reduced:
                kernels.append(self._kernel_of(values_, ()))
            if values and apart:
                kernels += [self._kernel_of([o.value], [o]) for o in late]
            elif values:
                kernels.append(self._kernel_of(values, late))
        launches = len(kernels) + 2 * bool(scattered) + any(o.kind == "columns" for o in sums)
        kernels += [(2 * scattered * self.elements, 1.0, 0)] if scattered else []
        # What is read again lies in L2, as far as all arrays do.
        moved = sum(b for b, *_ in kernels)
        cached = max(0, moved - self.distinct) * min(1, self.l2 / self.distinct)
        share = (1 - cached / moved) / self.bandwidth if moved else 0
        share *= BYTES_ACROSS if self._is_across() else 1
        seconds = sum(max(b * factor * share, n * XLA_OPERATION) for b, factor, n in kernels)
        return seconds + launches * LAUNCH, moved, launches

    def _begins(self) -> bool:
        """Whether rows are combined with a reduction of themselves, as in x / sum(x): where XLA's kernel of several stages begins."""
        steps = [(step, v) for v, step in self.made.items()]
        for reduction in (step for steps_ in self.stages.values() for step in steps_):
            x, same = reduction.operands[0], set()
            while isinstance(x, Value) and x.is_row:
                same.add(x)
                own = set(self.made[x].operands) if x in self.made else set()
                x = own.pop() if len(own) == 1 else None
            numbers = set(reduction.results)
            for step, v in steps:  # in order
                if numbers.intersection(step.operands):
                    if v.is_row and same.intersection(step.operands):
                        return True
                    numbers.update(() if v.is_row and step.name not in MOVES else [v])
        return False

    def _triton(self, rows=True) -> float:
        """rows: whether it writes rows."""
        if len(self.stages) < 3 and sum(self.made[v].name in DEAR for v in self.made if v.is_row) < 2:
            return 1.0
        width = self.program.row.size
        if self.narrow <= 2:
            reductions = sum(map(len, self.stages.values()))
            slow = rows and reductions >= 3 and width >= SHORT and not self._ragged()
            return TRITON_THREE if slow else TRITON_NARROW
        return TRITON_LONG if width >= LONG else TRITON_WIDE if width >= SHORT else 1.0

    def _kernel_of(self, values, outputs, factor=1.0):
        """(bytes, factor, operations) of a kernel of XLA. factor: of the time of its bytes."""
        moved = sum(map(_bytes, self._leaves(values))) + sum(_bytes(o.result, o.dtype) for o in outputs)
        return moved, factor, self._operations(values, self.stored, FUNCTION)

    def _leaves(self, values) -> set:
        """The arrays in memory that values of rows are computed from."""
        return {v for v in self._needed(values, self.stored) if v not in self.made or v in self.stored}

    def _operations(self, values, known, function) -> int:
        """Operations that compute values of rows from those that are known. function: how many a function is."""
        steps = [self.made[v] for v in self._needed(values, known) if v.is_row and v in self.made and v not in known]
        own = [step for step in steps if step.name not in (*MOVES, "iota")]
        quotient = QUOTIENT if self.narrow >= 4 else 1
        weights = {"div": quotient} | dict.fromkeys(DEAR, function)
        return self.elements * sum(weights.get(step.name, 1) for step in own)

    def _needed(self, values, known) -> set:
        """Rows that values are computed from, down to those that are known, and the numbers and operands that they read."""
        seen, pending = set(), list(values)
        while pending:
            v = pending.pop()
            if isinstance(v, Value) and v not in seen:
                step = self.made.get(v)
                if v.is_row or step is None:
                    seen.add(v)
                if step is not None and v.is_row and v not in known:
                    pending += step.operands
        return seen
