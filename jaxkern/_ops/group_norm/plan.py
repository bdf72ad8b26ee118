"""Which kernels run GroupNorm, BatchNorm and their gradients on CUDA, and how they are launched.

    one_pass    channels last: a block or a cluster of up to 8 holds some groups of a sample in registers and shared memory
    two_pass    any shape: one pass for statistics, one for the result; backward one for sums, one for dx

Two passes: blocks take parts of a sample, and a small launch merges what they find. ffi/kernels/norm/group.cuh has the layout of work.
"""

import itertools
import math
import typing

from jaxkern._core import launch
from jaxkern._core.algorithms import pick
from jaxkern._core.define import CUDA_TYPES, FLOAT_BYTES, ceil_div, cpp_bool
from jaxkern._core.launch import Launch, Plan, null, operand, planned, result, scratch
from jaxkern._core.params import Params
from jaxkern._ops.group_norm import tuning

ALGORITHMS = ("one_pass", "two_pass")

PARAMS = Params("norm/group.cuh", "GroupParams")
DTYPES = tuple(FLOAT_BYTES)

_MOST = 1 << 30


class Problem(typing.NamedTuple):
    """Arrays of [samples, rows, channels, inner]; batch_norm has one sample, and as many groups as channels.

    out_dtype: the type of the result and its cotangent, if it differs from the type of x. each: samples that share scale and
    bias.
    """

    samples: int
    rows: int
    channels: int
    groups: int = 1
    inner: int = 1
    dtype: str = "float32"
    out_dtype: str = ""
    each: int = 1
    backward: bool = False

    @property
    def itemsizes(self) -> tuple[int, int]:
        """The bytes of an element of x and of the result."""
        return FLOAT_BYTES[self.dtype], FLOAT_BYTES[self.out_dtype or self.dtype]

    @property
    def pack(self) -> int:
        """Elements that are read at once: at most 16 bytes of the widest array."""
        return math.gcd(self.channels if self.inner == 1 else self.inner, 16 // max(self.itemsizes))

    @property
    def per_group(self) -> int:
        return self.channels // self.groups

    @property
    def bytes(self) -> int:
        return self.samples * self.rows * self.channels * self.inner * sum(self.itemsizes)

    @property
    def computing(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"


def fits(algorithm: str, p: Problem, device) -> bool:
    """Whether the algorithm can run the problem."""
    if algorithm == "one_pass" and _held(p, device) is None:
        return False
    return max(p.rows * p.inner, 8 * p.channels, p.groups * p.samples) < _MOST


class _Held(typing.NamedTuple):
    """How clusters hold a problem."""

    across: int  # packs of a tile
    cluster: int
    packs: int  # per thread, in registers
    shared: int  # per thread, in shared memory; backward these are of g
    whole: bool  # whether all threads have all their packs


def _held(p: Problem, device) -> _Held | None:
    """None if a cluster does not hold a sample of whole groups."""
    packs = p.channels // p.pack
    unit = math.lcm(p.per_group, p.pack) // p.pack  # of whole groups
    if p.inner > 1 or p.pack * min(p.itemsizes) < 4 or unit > min(packs, tuning.ONE_PASS_PACKS):
        return None
    shared = min(tuning.HELD, (device.shared_memory // 2 - tuning.STATIC_BYTES) // tuning.PACK_BYTES)
    held = min(tuning.HELD, shared) if p.backward else tuning.HELD + shared
    sizes = tuning.CLUSTERS if device.compute_capability >= 90 else (1,)
    for most, wanted in itertools.product(sizes, tuning.ONE_PASS_BYTES):
        across = unit * ceil_div(wanted, unit * p.pack * max(p.itemsizes))
        across = min(across, packs, tuning.ONE_PASS_PACKS // unit * unit)
        down, pair = tuning.THREADS // across, 2 * FLOAT_BYTES[p.computing]
        most = min(most, tuning.EXCHANGE_BYTES // (across * p.pack * pair))
        cluster = 1 << (ceil_div(p.rows, held * down) - 1).bit_length()
        if cluster <= most:
            tiles = p.samples * ceil_div(packs, across)
            # Twice as many blocks of half as many packs, where there are not two per multiprocessor.
            while 2 * cluster <= most and tiles * cluster < 2 * device.sm_count and p.rows > 2 * cluster * down:
                cluster *= 2
            each = ceil_div(ceil_div(p.rows, cluster), down)
            whole = p.rows == cluster * each * down and packs % across == tuning.THREADS % across == 0
            return _Held(
                across, cluster, min(each, tuning.HELD), each if p.backward else max(each - tuning.HELD, 0), whole
            )
    return None


def choose(p: Problem, device) -> str:
    """The algorithm that runs the problem by default, unless it is `left_to_xla`.

    Measured on an H200, 64x64x64x256, forward and backward in microseconds: one pass 77 and 134 in bfloat16, 143 and 221 in
    float32; two passes 111 and 173, 202 and 327.
    """
    return "one_pass" if fits("one_pass", p, device) else "two_pass"


def left_to_xla(p: Problem) -> bool:
    """Whether XLA runs the problem by default: small ones, and packs of two bytes. Estimated, not measured."""
    return p.bytes < tuning.SMALL_BYTES or p.pack * min(p.itemsizes) < 4


# ---- launches


class _Walk(typing.NamedTuple):
    """How blocks walk over a problem; see GroupWalk."""

    pack: int
    steps: int
    length: int
    parts: int
    across: int
    tiles: int
    lanes: int = 0  # threads that own a channel; 0: channels lie last


def _across(packs: int) -> int:
    """The packs of a tile: few threads without any, then wide."""
    least, most = tuning.TILE_PACKS
    if packs <= most:
        return packs
    return min(range(least, most + 1), key=lambda n: (ceil_div(packs, n) * n, -n))


def _walk(p: Problem, device, pack: int) -> _Walk:
    if p.inner == 1:
        across, steps = _across(p.channels // pack), p.rows
        tiles, down = ceil_div(p.channels // pack, across), tuning.THREADS // across
        lanes = 0
    else:
        across, steps = 1, p.rows * p.inner // pack
        lanes = down = 32 if steps <= 32 * tuning.WARP_STEPS else tuning.THREADS
        tiles = ceil_div(p.channels, tuning.THREADS // lanes)
    wanted = tuning.WAVES * tuning.RESIDENT * device.sm_count // (p.samples * tiles)
    parts = max(ceil_div(steps, tuning.THREAD_STEPS * down), min(wanted, steps // (tuning.FEW_STEPS * down)), 1)
    length = ceil_div(steps, parts)
    return _Walk(pack, steps, length, ceil_div(steps, length), across, tiles, lanes)


class _Group(typing.NamedTuple):
    """A problem with what its kernels are given."""

    p: Problem
    device: typing.Any
    scale: typing.Any = null
    bias: typing.Any = null
    parameters: str = ""  # dtype of scale and bias
    g: typing.Any = null
    y: typing.Any = null
    mean: typing.Any = null
    var: typing.Any = null
    of_mean: typing.Any = null
    of_var: typing.Any = null
    dscale: typing.Any = null
    dbias: typing.Any = null
    gradients: str = ""  # dtype of dscale and dbias
    slopes: bool = True  # whether dx is computed
    eps: float = 0.0
    function: typing.Any = None  # applied before the store

    @property
    def pair(self) -> int:
        """Bytes."""
        return 2 * FLOAT_BYTES[self.p.computing]

    def result(self, header: str, name: str, *args, **options) -> Launch:
        """The launch that writes y or dx; name: the name of the kernel, without the last >."""
        if self.function is None:
            return Launch(header, f"{name}>", *args, **options)
        name, source = f"{name}, jaxkern::GroupEpilogue<Epilogue>>", self.function.source("Epilogue")
        return Launch("norm/group_epilogue.cuh", name, *args, **options, source=source)

    def op(self, w: _Walk) -> str:
        p, pack = self.p, w.pack
        types = ", ".join(CUDA_TYPES[d] for d in (p.dtype, p.out_dtype or p.dtype, self.parameters or p.dtype))
        small = p.backward and p.rows * p.per_group * p.inner < tuning.FEW_ELEMENTS
        flags = (self.scale != null) + 2 * (self.bias != null) + 4 * small
        return f"jaxkern::Group<{types}, {flags}, {pack}, {w.lanes}, {p.per_group}, {w.across}>"

    def per_entry(self, w: _Walk) -> int:
        """The number of channels that share moments of a part: a whole pack if its channels belong to one group."""
        return 1 if self.p.inner > 1 or self.p.per_group % w.pack else w.pack

    def params(self, w: _Walk):
        """GroupParams. Scratch: partial results, sums of each sample and channel, slopes."""
        p = self.p
        total, slope, _ = self.offsets(w)
        given = ("g", "scale", "bias", "y", "mean", "var", "of_mean", "of_var", "dscale", "dbias")
        return PARAMS(
            x=operand(0),
            **{name: getattr(self, name) for name in given},
            partial=scratch(),
            total=scratch(total) if p.backward and p.each > 1 else null,
            slope=scratch(slope) if p.backward and self.slopes else null,
            samples=p.samples,
            rows=p.rows,
            inner=p.inner,
            each=p.each,
            eps=self.eps,
            channels=p.channels,
            per_group=p.per_group,
            steps=w.steps,
            length=w.length,
            parts=w.parts,
            across=w.across,
            tiles=w.tiles,
            per_step=w.pack if p.inner > 1 else self.per_entry(w),
            run=p.inner // w.pack if p.inner > 1 else 1,
            exceeds_l2=p.bytes > self.device.l2_bytes,
        )

    def offsets(self, w: _Walk) -> tuple[int, int, int]:
        """The offsets of total and slope in scratch, and the size of scratch."""
        p = self.p
        total = p.samples * p.channels * w.parts * self.pair
        slope = total + (p.samples * p.channels * self.pair if p.backward and p.each > 1 else 0)
        return total, slope, slope + (p.samples * p.groups * self.pair if p.backward and self.slopes else 0)


def _statistics(n: _Group, w: _Walk) -> list[Launch]:
    """Mean and variance."""
    p, header = n.p, "norm/group_two_pass.cuh"
    entries, blocks = p.per_group // n.per_entry(w), p.samples * w.parts * w.tiles
    threads = 256 if entries * w.parts >= tuning.STATISTICS_ENTRIES else 32
    merge = f"GroupStatistics<{CUDA_TYPES[p.computing]}, {entries}, {threads}>"
    return [
        Launch(header, f"GroupMoments<{n.op(w)}>", [n.params(w)], blocks, tuning.THREADS),
        Launch(header, merge, [n.params(w)], p.samples * p.groups, threads),
    ]


def _sums(n: _Group, w: _Walk) -> list[Launch]:
    """dscale, dbias, and what dx depends on."""
    p, header = n.p, "norm/group_two_pass.cuh"
    threads = 256 if p.per_group > 2 else 32
    computing, sums = CUDA_TYPES[p.computing], CUDA_TYPES[n.gradients or p.computing]
    options = f"{cpp_bool(n.scale != null)}, {cpp_bool(p.each == 1)}, {threads}"
    types = f"{computing}, {CUDA_TYPES[n.parameters or p.dtype]}, {sums}"
    launches = [
        Launch(header, f"GroupSums<{n.op(w)}>", [n.params(w)], p.samples * w.parts * w.tiles, tuning.THREADS),
        Launch(header, f"GroupSlopes<{types}, {options}>", [n.params(w)], p.samples * p.groups, threads),
    ]
    return [*launches, *_over_samples(n, w)]


def _over_samples(n: _Group, w: _Walk) -> list[Launch]:
    """Adds dscale and dbias of samples that share scale and bias."""
    p = n.p
    if not p.backward or p.each == 1 or n.dscale == n.dbias == null:
        return []
    name = f"GroupOverSamples<{CUDA_TYPES[p.computing]}, {CUDA_TYPES[n.gradients or p.computing]}>"
    grid = ceil_div(p.channels, tuning.SUMS_COLUMNS) * (p.samples // p.each)
    return [Launch("norm/group_two_pass.cuh", name, [n.params(w)], grid, tuning.THREADS)]


def _two_pass(n: _Group, pack: int, result: bool) -> tuple[list[Launch], int]:
    """The launches and the bytes of scratch. result: with the second pass."""
    w = _walk(n.p, n.device, pack)
    first = (_sums if n.p.backward else _statistics)(n, w)
    name = "GroupGradient" if n.p.backward else "GroupApply"
    blocks = n.p.samples * w.parts * w.tiles
    second = n.result("norm/group_two_pass.cuh", f"{name}<{n.op(w)}", [n.params(w)], blocks, tuning.THREADS)
    return [*first, *([second] if result else [])], n.offsets(w)[2]


def _one_pass(n: _Group) -> tuple[list[Launch], int]:
    """The launches and the bytes of scratch."""
    p, header, h = n.p, "norm/group_one_pass.cuh", _held(n.p, n.device)
    assert h is not None
    tiles = ceil_div(p.channels // p.pack, h.across)
    w = _Walk(p.pack, p.rows, ceil_div(p.rows, h.cluster), h.cluster, h.across, tiles)
    kinds, name = f"{h.packs}, {h.shared}, {h.cluster}, {cpp_bool(h.whole)}", "GroupNormOnePass"
    if p.backward:
        sums = f"{CUDA_TYPES[n.gradients or p.computing]}, {cpp_bool(p.each == 1)}"
        kinds = f"{sums}, {h.packs}, {h.cluster}, {cpp_bool(h.whole)}"
        name = "GroupGradientOnePass"
    name, blocks = f"{name}<{n.op(w)}, {kinds}", p.samples * tiles * h.cluster
    shared = h.shared * tuning.THREADS * p.pack * p.itemsizes[p.backward]
    launch = n.result(header, name, [n.params(w)], blocks, tuning.THREADS, cluster=h.cluster, shared=shared)
    return [launch, *_over_samples(n, w)], n.offsets(w)[2]


def _plan(n: _Group, operation, dtypes, algorithm, result=True) -> Plan | None:
    """dtypes: of all arrays."""
    p = n.p
    if not dtypes <= FLOAT_BYTES.keys() or ("float64" in dtypes and not p.dtype == p.out_dtype == "float64"):
        return None
    if not fits(ALGORITHMS[-1], p, n.device) or (algorithm == "auto" and left_to_xla(p)):
        return None
    algorithm = pick(operation, algorithm, p, n.device) if result else "two_pass"
    launches, size = _one_pass(n) if algorithm == "one_pass" else _two_pass(n, p.pack, result)
    unaligned, more = _two_pass(n, 1, result)
    return planned(algorithm, launches, max(size, more), unaligned)


def _problem(x, y, batch, channel, keep=0, backward=False) -> Problem:
    size, groups, within = math.prod, x.shape[channel], x.shape[channel + 1]
    samples, inner = size(x.shape[:batch]), size(x.shape[channel + 2 :])
    rows, each = size(x.shape[batch:channel]), size(x.shape[keep:batch])
    return Problem(
        samples, rows, groups * within, groups, inner, x.dtype.name, y.dtype.name, each=each, backward=backward
    )


def norm(
    device, operands, results, *, operation, batch, keep, channel, eps, dtype, algorithm, function=None
) -> Plan | None:
    """The plan of a norm for arrays of these types."""
    del dtype  # results[0] has it
    x, *parameters = operands
    given = launch.operands(operands)
    kinds = {a.dtype.name for a in parameters if a is not None}
    if len(kinds) > 1 or (function is not None and not function.fits()):
        return None
    n = _Group(
        _problem(x, results[0], batch, channel, keep),
        device,
        given.scale,
        given.bias,
        parameters=next(iter(kinds), ""),
        y=result(0),
        mean=result(1),
        var=result(2),
        eps=eps,
        function=function,
    )
    return _plan(n, operation, {x.dtype.name, results[0].dtype.name, *kinds}, algorithm)


def norm_grad(device, operands, results, *, operation, batch, keep, channel, eps, sums, algorithm) -> Plan | None:
    """The plan of a gradient for arrays of these types."""
    x, g, scale = operands.x, operands.g, operands.scale
    given, gradients = launch.operands(operands), {a.dtype.name for a in results[1:]}
    if len(gradients) > 1:
        return None
    kinds = set() if scale is None else {scale.dtype.name}
    n = _Group(
        _problem(x, g, batch, channel, keep, backward=True),
        device,
        given.scale,
        parameters=next(iter(kinds), ""),
        g=given.g,
        y=result(0),
        mean=given.mean,
        var=given.variance,
        of_mean=given.of_mean,
        of_var=given.of_variance,
        dscale=result(1) if sums[0] is not None else null,
        dbias=result(len(results) - 1) if sums[1] is not None else null,
        gradients=next(iter(gradients), ""),
        eps=eps,
    )
    return _plan(n, operation, {x.dtype.name, g.dtype.name, *kinds, *gradients}, algorithm)


def moments(device, operands, results, *, operation, batch, channel, algorithm) -> Plan | None:
    """The plan of the statistics alone."""
    (x,) = operands
    n = _Group(_problem(x, x, batch, channel, batch), device, mean=result(0), var=result(1))
    return _plan(n, operation, {x.dtype.name}, algorithm, result=False)


def sums(device, operands, results, *, operation, batch, channel, eps, algorithm) -> Plan | None:
    """The plan of the sums of g and g * z of each sample and channel."""
    x, mean, var, g = operands
    n = _Group(
        _problem(x, g, batch, channel, batch, backward=True),
        device,
        g=operand(3),
        mean=operand(1),
        var=operand(2),
        dscale=result(1),
        dbias=result(0),
        gradients=results[0].dtype.name,
        slopes=False,
        eps=eps,
    )
    dtypes = {x.dtype.name, g.dtype.name, mean.dtype.name}
    return _plan(n, operation, dtypes, algorithm, result=False)
