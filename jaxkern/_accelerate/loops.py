"""Lowering rules for the loops of plain JAX programs: `lax.scan`, `lax.while_loop` that counts to a known number, and
`lax.while_loop` in which each lane stops on its own.

`lax.fori_loop`, `lax.map` and the gradients of all these are scans too. A rule runs below derivatives and vmap, which remain
JAX's own. It reads the body of the loop as the loop engine does. If the gate takes the loop, the rule emits the engine's kernel in
its place; if not, it calls JAX's rule. A body that is not elementwise over lanes stays with XLA, and the record says at which
operation.
"""

import functools
import math
import threading

from jax import lax

from jaxkern._accelerate import gate, numbers, registration
from jaxkern._accelerate.program import Program
from jaxkern._core import algorithms, compat, compat_lowering, decisions, stablehlo, switch
from jaxkern._core.cpp import Unsupported
from jaxkern._engines.loops import counted, lowering, rewrites, while_lowering

SCAN, WHILE = "scan", "while_loop"
LABEL = "the body"

# scan: the line of the scan that JAX's rule lowers, and how many operands its while loop has
_local = threading.local()


def leave(module, scan, why: str) -> None:
    """Leaves the equation of a scan to XLA. module: the context of the module in which it is lowered."""
    closed = scan.params["jaxpr"]
    _left(module)[id(closed)] = closed, why


def _left(module) -> dict:
    """{the body of a scan that is left to XLA, by its id: (it, why)}"""
    return compat_lowering.of_module(module).setdefault("scans that are left", {})


def is_for_cuda(ctx) -> bool:
    """Whether a loop that is lowered is for CUDA; tests replace this function, to run kernels on a CPU."""
    return "cuda" in compat_lowering.platforms(ctx)


def _line(ctx) -> str:
    return decisions.source_of(compat.frames(ctx.traceback))


def _take(operation, plain, ctx, avals, decision, read, decide, emit):
    """The results of a loop: by `emit` of what `read()` returns, or by `plain`.

    avals: the types of the arrays that the loop reads. decision: the answer of the gate before the body is read. decide(lanes): what it
    says then.
    """
    settings = switch.current()
    if algorithms.xla_forced():
        return plain()
    frames = functools.partial(compat.frames, ctx.traceback)
    record = functools.partial(decisions.record, operation, avals=avals or ctx.avals_out, frames=frames)
    if not settings.force and "cuda" not in (platforms := compat_lowering.platforms(ctx)):
        record(False, switch.no_kernels(platforms[0]))
        return plain()
    taken, why = decision if not settings.force else (True, "")
    if taken and compat.partitioned_devices(ctx) > 1:
        taken, why = False, "a loop on several devices"
    loop = None
    if taken:
        try:
            loop = read()
            taken, why = decide(math.prod(d.size for d in loop.program.dims))
            taken = taken or settings.force
        except Unsupported as error:
            taken, why = False, str(error)
    if taken and (refusal := switch.refusal(ctx, settings)):
        taken, why = False, refusal
    size = sum(map(stablehlo.size, (*avals, *ctx.avals_out))) if taken else 0
    if not record(taken, why, bytes=size):
        return plain()
    if is_for_cuda(ctx):
        return emit(loop)
    return lowering.by_xla(loop) if loop.counted else plain()


@switch.own_promotion
def _scan(plain, ctx, *operands, **params):
    jaxpr = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
    plain = functools.partial(_by_jax, plain, ctx, *operands, **params)
    if not switch.wanted(SCAN) or compat.calls(jaxpr, lowering.loop_p.name):
        return plain()
    closed, counts = params["jaxpr"], compat.counts_of_scan(params)
    read = functools.partial(_read, ctx, operands, closed, *counts, params["length"], params["reverse"])
    unroll = params["length"] if params["unroll"] is True else int(params["unroll"])
    emit = functools.partial(lowering.emit, ctx, operands)
    _, left = _left(ctx.module_context).get(id(closed), (None, ""))
    decision = (False, left) if left else gate.steps(params["length"], unroll)
    return _take(SCAN, plain, ctx, list(ctx.avals_in), decision, read, _counted(params["length"]), emit)


def _read(ctx, operands, closed, num_consts, num_carry, length, reverse):
    """A loop as kernels, if need be with what its steps read and write at their indices as xs and ys."""
    body = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ()), num_consts, num_carry, length, reverse
    try:
        return lowering.read(ctx, operands, *body, LABEL)
    except Unsupported:
        known: dict = {}
        found = counted.find(*body, lambda k: numbers.known(Program.of(ctx).value(operands[k]), known))
        if found is None:
            raise
        return lowering.read_counted(ctx, operands, found, LABEL)


def _counted(length):
    return lambda lanes: (True, f"{length} steps of {lanes} lanes in one kernel")


def _by_jax(plain, ctx, *operands, **params):
    """JAX's rule for a scan, which makes a while loop of its operands, a counter and buffers for ys."""
    carry = compat.counts_of_scan(params)[1]
    outer, _local.scan = getattr(_local, "scan", None), (_line(ctx), len(operands) + 1 + len(ctx.avals_out) - carry)
    try:
        return plain(ctx, *operands, **params)
    finally:
        _local.scan = outer


@switch.own_promotion
def _while(plain, ctx, *operands, **params):
    plain = functools.partial(plain, ctx, *operands, **params)
    if not switch.wanted(SCAN, WHILE) or (_line(ctx), len(operands)) == getattr(_local, "scan", None):
        return plain()

    def known(k):
        constant = Program.of(ctx).value(operands[k]).constant
        return None if constant is None or ctx.avals_in[k].shape else constant

    count = rewrites.fixed_count(params, known)
    if count is None:
        return _of_lanes(plain, ctx, operands, params)
    if not switch.wanted(SCAN):
        return plain()
    own, body = params["cond_nconsts"], params["body_jaxpr"]
    inner = ctx.replace(avals_in=ctx.avals_in[own:])
    carry = len(operands) - own - params["body_nconsts"]
    read = functools.partial(_read, inner, operands[own:], body, params["body_nconsts"], carry, count, False)
    emit = functools.partial(lowering.emit, inner, operands[own:])
    return _take(SCAN, plain, ctx, list(inner.avals_in), gate.steps(count, 1), read, _counted(count), emit)


def _of_lanes(plain, ctx, operands, params):
    """A loop whose end depends on its state. Each lane may end on its own."""
    if not switch.wanted(WHILE) or while_lowering.is_marked(params):
        return plain()
    read = lambda: while_lowering.find(ctx, operands, params, LABEL)
    emit = functools.partial(lowering.emit, ctx, operands, target=while_lowering.TARGET)
    return _take(WHILE, plain, ctx, list(ctx.avals_in), (True, ""), read, gate.while_loop, emit)


def register(platform: str) -> None:
    """Puts the rules in place. They call JAX's wherever nothing is switched on."""
    for prim, rule, operations in ((compat.scan_primitive(), _scan, (SCAN,)), (lax.while_p, _while, (SCAN, WHILE))):
        wanted = lambda *_, operations=operations: switch.wanted(*operations)
        registration.register(prim, rule, platform, wanted)
