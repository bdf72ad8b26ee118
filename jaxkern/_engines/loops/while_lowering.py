"""While loops on CUDA: the lowering rule of JAX's `while_p` for loops that `jaxkern.while_loop` has marked.

A loop whose body selects by the mark of the lanes' conditions becomes one kernel, if every lane can run a loop of its own
(while_program.py). Every other loop is lowered by JAX's rule.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
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


def _with_conditions(*operands, cond_jaxpr, body_jaxpr, cond_nconsts, body_nconsts):
    """A marked loop in JAX that carries the conditions of its lanes.

    XLA would compute them once to see whether a lane goes on, and once to select the lanes that take a step. It may round them
    differently, for example by contracting a product and a sum in only one. A lane that goes on but takes no step would never end.
    """
    constants, of_body = operands[:cond_nconsts], operands[cond_nconsts : cond_nconsts + body_nconsts]
    conditions = lambda carries: _evaluated(cond_jaxpr, (*constants, *carries), None)
    goes_on = lambda state: _evaluated(cond_jaxpr, (*constants, *state[1:]), state[0])[0]

    def step(state):
        going, *carries = state
        batches, new = goes_on(state), _evaluated(body_jaxpr, (*of_body, *carries), going)
        if batches.ndim:  # under vmap JAX selects batches where it lowers the loop
            new = [
                lax.select(lax.broadcast_in_dim(batches, y.shape, range(batches.ndim)), y, x)
                for x, y in zip(carries, new)
            ]
        return [going & conditions(new), *new]

    init = operands[cond_nconsts + body_nconsts :]
    return lax.while_loop(lambda state: jnp.any(goes_on(state)), step, [conditions(init), *init])[1:]


def _evaluated(closed, operands, going):
    """The results of a condition or a body if the conditions of its lanes are `going`; without it, these conditions."""
    jaxpr, found, needed = closed.jaxpr, [], set()
    marks = [e for e in jaxpr.eqns if e.primitive is lanes_p]
    results = jaxpr.outvars if going is not None else marks[0].invars
    needed.update(v for v in results if not isinstance(v, Literal))
    for e in reversed(jaxpr.eqns):
        if not needed.isdisjoint(e.outvars) and (going is None or e.primitive is not lanes_p):
            found.append(e)
            needed.update(v for v in e.invars if not isinstance(v, Literal))
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *operands)))
    env.update((e.outvars[0], going) for e in marks if going is not None)
    read = lambda v: v.val if isinstance(v, Literal) else env[v]
    for e in reversed(found):
        env.update(zip(e.outvars, compat.bind_equation(e, *map(read, e.invars))))
    values = list(map(read, results))
    return values if going is not None else values[0]


def _may_carry_conditions(ctx, params) -> bool:
    """Whether a loop is one that `_with_conditions` computes: marked itself, with one condition for each lane, and not in a shard_map."""
    closed = params["cond_jaxpr"], params["body_jaxpr"]
    marks = [[e.outvars[0].aval for e in c.jaxpr.eqns if e.primitive is lanes_p] for c in closed]
    types = {(a.shape, a.sharding) for found in marks for a in found}
    known = marks[0] and len(types) == 1 and not any(c.effects for c in closed)
    # Batches are selected whatever their arrays are split by, and selections of explicit meshes are not.
    split = closed[0].out_avals[0].ndim and any(any(a.sharding.spec) for a in ctx.avals_in)
    return bool(known) and not split and not any(map(compat.varying_axes, ctx.avals_in))


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
        if found is None and _may_carry_conditions(ctx, params):
            found = switch.own_code(mlir.lower_fun(functools.partial(_with_conditions, **params)))(ctx, *operands)
        return otherwise(ctx, *operands, **params) if found is None else found

    registry.register_cuda_target(TARGET)
    compat.needs_devices(lanes_p)
    for platform in ("cuda", "cpu"):
        mlir.register_lowering(lax.while_p, functools.partial(rule, platform), platform=platform)


_register()
