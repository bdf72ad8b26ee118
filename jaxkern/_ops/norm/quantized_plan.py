"""Which kernels run norms that write 8 bits: see _definitions/quantized.py for operands and results."""

import math

from jaxkern._core import launch
from jaxkern._core.define import cpp_bool
from jaxkern._ops.norm import plan, tuning
from jaxkern._ops.quantize import plan as quantize_plan

_WARP = 32
_HEADER = "norm/quantize.cuh"


class _Kind:
    """A quantisation as template arguments, and what kernels are given for it."""

    def __init__(self, p, to, block, given, at):
        self.p, self.block = p, block
        self.type = f"jaxkern::{quantize_plan.TYPES[to]}"
        self.given = given
        self.args = (launch.operand(at) if given else launch.null, launch.result(1), launch.i64(block or p.width))

    def span(self, algorithm, device) -> int | None:
        """kSpan of NormQuantize; None if its threads cannot share the scales of the blocks."""
        if self.block is None or self.block == self.p.width:
            return -1 if self.given else 0
        lanes = plan.layout_of(self.p, algorithm, device)[0] or _WARP
        span = self.block // self.p.pack
        # Blocks are aligned groups of lanes; each lane has one pack of its block.
        fits = self.block % self.p.pack == 0 and span & (span - 1) == 0 and lanes % span == 0
        return span if fits else None


def _streaming(n, kind, inner, pack):
    blocks = min(n.p.rows, 4 * n.device.sm_count)
    name = (
        f"NormQuantizeStream<{n.op}, {pack}, {kind.type}, {cpp_bool(kind.given)}{f', {inner.name}' if inner else ''}>"
    )
    source = inner.source if inner else ""
    return [launch.Launch(_HEADER, name, [n.params(blocks)], blocks, tuning.STREAM_THREADS, source=source)]


def launches(operation, device, operands, results, *, extras, numbers, to, block, given, algorithm, function=None):
    """The plan for arrays of these types; None if there is no kernel for them."""
    norm_operands, count = 1 + len(extras.split()), len(operands) - given
    at = dict(zip(extras.split(), range(1, norm_operands)))
    parameters = [operands[at[name]].dtype.name for name in ("scale", "bias") if name in at]
    x = operands[0]
    p = plan.problem(x, x, operation, at, "bias" in at)
    if p.dtype not in quantize_plan.DTYPES or not set(parameters) <= set(quantize_plan.DTYPES) or p.width >= 1 << 30:
        return None
    if len(set(parameters)) > 1 or (algorithm == "auto" and plan.left_to_xla(p, "block")):
        return None
    inner = None
    if function is not None:
        inner = plan.epilogue_of(function, x, operands[norm_operands:count], norm_operands)
        if inner is None:
            return None
    pointers = [launch.operand(at[name]) if name in at else launch.null for name in ("residual", "scale", "bias")]
    more = launch.result(2) if "residual" in at else launch.null
    arrays = (launch.operand(0), pointers[0], launch.null, *pointers[1:], launch.result(0), more)
    kind = _Kind(p, to, block, given, count)
    algorithm = plan.pick(operation, algorithm, p, device)
    span = None if algorithm in ("cluster", "streaming") else kind.span(algorithm, device)
    if span is None:
        algorithm = "streaming"
    args = (*(inner.args if inner else ()), *kind.args)
    name = f"jaxkern::NormQuantize<{kind.type}, {span}{f', {inner.name}' if inner else ''}>"
    epilogue = plan.Epilogue(inner.source if inner else "", name, args, _HEADER)
    n = plan.Norm(p, device, (parameters or [p.dtype])[0], (), arrays, dict(numbers)["eps"], epilogue)
    pack = math.gcd(p.pack, block or p.pack)
    found = _streaming(n, kind, inner, pack) if span is None else plan.in_registers(n, algorithm)[0]
    unaligned = _streaming(n, kind, inner, 1)
    return launch.planned(algorithm, found, unaligned=unaligned)
