"""While loops on CUDA: the lowering rule of JAX's `while_p` for loops that `jaxkern.while_loop` has marked.

A loop whose body selects by the mark of the lanes' conditions becomes one kernel, if every lane can run a loop of its own
(while_program.py). Every other loop is lowered by JAX's rule.
"""

import functools

from jax import lax
from jax.interpreters import mlir

from jaxkern._core import algorithms, compat, compat_lowering, device, environment, registry, switch
from jaxkern._core.cpp import Unsupported
from jaxkern._engines.loops import lowering, plan, while_plan, while_program, while_sharding
from jaxkern._engines.loops.while_plan import WhileCore
from jaxkern._engines.loops.while_program import lanes_p

TARGET = "jaxkern_while_loop"
LABEL = "jaxkern.while_loop"


def mark(going):
    """The conditions of lanes, marked where the body of a loop for kernels selects by them."""
    return lanes_p.bind(going)


def is_marked(params) -> bool:
    """Whether a while loop is one of `jaxkern.while_loop`."""
    cond = params["cond_jaxpr"]
    return compat.calls(getattr(cond, "jaxpr", cond), lanes_p.name)


def find(ctx, operands, params, label) -> lowering.Loop:
    """A while loop that is being lowered, as a Loop.

    Raises: Unsupported, which says why there is no kernel.
    """
    if not all(isinstance(n, int) for a in (*ctx.avals_in, *ctx.avals_out) for n in a.shape):
        raise Unsupported(f"{label} has symbolic shapes")
    if not all(n for a in (*ctx.avals_in, *ctx.avals_out) for n in a.shape):
        raise Unsupported(f"{label} has arrays without elements")
    first = {}
    equal = [first.setdefault(x, k) if hasattr(x, "type") else k for k, x in enumerate(operands)]
    counts = params["cond_nconsts"], params["body_nconsts"]
    program = while_program.read(params["cond_jaxpr"], params["body_jaxpr"], *counts, label, equal)
    core = WhileCore(program)
    return lowering.Loop(program, core, while_plan.plan(device.this_device(), core), 0)


def check(closed) -> None:
    """Raises Unsupported, which says why, unless the while loop of a jaxpr is one kernel. That depends on no GPU."""
    e = next(e for e in reversed(closed.jaxpr.eqns) if e.primitive is lax.while_p)
    counts = e.params["cond_nconsts"], e.params["body_nconsts"]
    program = while_program.read(e.params["cond_jaxpr"], e.params["body_jaxpr"], *counts, LABEL)
    if all(isinstance(n, int) for v in (*e.invars, *e.outvars) for n in v.aval.shape):
        core = WhileCore(program)
        plan.check(core, core.size)


def _register():
    otherwise = compat_lowering.lowering_of(lax.while_p)

    def rule(platform, ctx, *operands, **params):
        found = None
        if is_marked(params) and not environment.xla_only() and not algorithms.xla_forced():
            with switch.promotion():
                if compat.may_partition_itself(ctx):
                    found = while_sharding.lower(ctx, operands, params, LABEL)
                elif platform == "cuda" and compat.partitioned_devices(ctx) == 1 and registry.kernels_run():
                    with lowering.left_to_xla(ctx, params["cond_jaxpr"], lanes_p):
                        found = lowering.emit(ctx, operands, find(ctx, operands, params, LABEL), TARGET)
        return otherwise(ctx, *operands, **params) if found is None else found

    registry.register_cuda_target(TARGET)
    compat.needs_devices(lanes_p)
    for platform in ("cuda", "cpu"):
        mlir.register_lowering(lax.while_p, functools.partial(rule, platform), platform=platform)


_register()
