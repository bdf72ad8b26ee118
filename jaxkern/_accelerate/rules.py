"""Lowering rules for lax.scatter_add, scatter_max and scatter_min of plain JAX programs.

A rule runs below derivatives, vmap and control flow, which remain JAX's own. It reads the scatter as an operation on rows
(layout.py). If the gate takes it, the rule emits primitives of jaxkern in place of the scatter; if not, it calls JAX's rule.
On several devices each computes its part (`_shard`). Where indices are split there is one collective, of the result in its own
type, as in XLA's scatter; elsewhere there is none.

Where gathers and elementwise arithmetic make the updates, one message kernel computes all of it (chains.py).
"""

import collections
import functools
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxkern._accelerate import chains, gate, memory, message, registration
from jaxkern._accelerate import layout as layouts
from jaxkern._accelerate.program import Program, root
from jaxkern._core import compat, compat_lowering, decisions, environment, partition, stablehlo, switch
from jaxkern._core.primitive import bind
from jaxkern._ops.indexing import primitive, reference, sharding
from jaxkern._ops.indexing.reference import Rules

IDENTITY = {"scatter_add": lambda dtype: 0, "scatter_max": reference.least, "scatter_min": reference.greatest}
SEGMENT = {
    "scatter_add": primitive.segment_sum_p,
    "scatter_max": primitive.segment_max_p,
    "scatter_min": primitive.segment_min_p,
}
ACROSS = {"scatter_add": sharding.SUM, "scatter_max": sharding.MAXIMUM, "scatter_min": sharding.MINIMUM}
JOIN = {"scatter_max": jnp.maximum, "scatter_min": jnp.minimum}
MODES = ("CLIP", "FILL_OR_DROP", "PROMISE_IN_BOUNDS")


# ---- one device


def _rules(layout, params) -> Rules:
    """XLA never writes out of bounds, in whatever mode: what is not clipped is dropped."""
    alone = len(layout.indexed) == 1  # merged indices are resolved, and in no known order
    return Rules(
        layout.axis,
        batch_dims=len(layout.batch),
        clip=params["clip"] and alone,
        sorted=params["is_sorted"] and alone,
        unique=params["is_unique"] and not params["clip"],  # clipped indices may be equal
    )


def _rows(operand, indices, updates, *, layout, **params):
    """The operands in the shapes of jaxkern's primitives: x, index, source, and their rules."""
    x = layouts.canonical_operand(layout, operand)
    index = layouts.canonical_indices(layout, indices, operand.shape, params["clip"])
    return x, index, layouts.canonical_updates(layout, updates), _rules(layout, params)


def _scatter_rows(operand, indices, updates, *, name, layout, onto_identity, copies=None, **params):
    del copies
    x, index, source, rules = _rows(operand, indices, updates, layout=layout, **params)
    if name == "scatter_add" and not onto_identity:
        y = primitive.index_add(x, index, source, rules=rules)
    else:
        y = primitive.segment(SEGMENT[name], source, index, rows=x.shape[rules.axis], rules=rules)
        y = y if onto_identity else JOIN[name](x, y)
    return layouts.original(layout, y, operand.shape)


# ---- several devices

scatter_rows_p = Primitive("jaxkern_scatter_rows")
scatter_rows_p.def_abstract_eval(lambda operand, *_, **params: operand.update(weak_type=False))
mlir.register_lowering(scatter_rows_p, mlir.lower_fun(_scatter_rows, multiple_results=False))


def _dims(layout, operand, indices, updates):
    """Names for the dimensions of the operands and the result, and the names that must not be split."""
    alone = len(layout.indexed) == 1
    of_operand = [f"d{d}" for d in range(operand.ndim)]
    if alone:
        of_operand[layout.indexed[0]] = "rows"
    of_indices, of_updates = ["vector"] * indices.ndim, [""] * updates.ndim
    for d, i, u in zip(layout.batch, layout.index_batch, layout.update_batch):
        of_indices[i] = of_updates[u] = of_operand[d]
    for i, u in zip(layout.index_count, layout.update_count):
        of_indices[i] = of_updates[u] = f"i{i}"
    for d, u in layout.update_window:
        of_updates[u] = of_operand[d]
    whole = {"vector"} if alone else {"vector", *(of_operand[d] for d in layout.indexed)}
    if alone and operand.shape[layout.indexed[0]] > sharding.LIMIT:
        whole.add("rows")
    return [of_operand, of_indices, of_updates, of_operand], whole


def _shard(rows, over, operand, indices, updates, *, name, layout, onto_identity, copies, **params):
    """A device's part. rows: the number of rows of the whole operand. copies: whether the operand is still needed."""
    x, index, source, rules = _rows(operand, indices, updates, layout=layout, **params)
    across = over.get("rows", ())
    along = tuple(a for i in layout.index_count for a in over[f"i{i}"])
    over = {"rows": across, "count": along, "batch": tuple(a for d in layout.batch for a in over[f"d{d}"])}
    if name == "scatter_add":
        y = _sum_of_part(over, x, source, index, rows, rules, onto_identity, copies)
    else:
        y = sharding.segments(ACROSS[name], SEGMENT[name], over, source, index, rows=rows, rules=rules)
        y = y if onto_identity else JOIN[name](x, y)
    return layouts.original(layout, y, operand.shape)


def _sum_of_part(over, x, source, index, rows, rules, onto_identity, copies):
    """One message at most if indices are split, in the type of the sums, as XLA sends."""
    part = sharding.of_part(over, source, index, rows, rules, source.dtype)
    if not part.along and not onto_identity:
        rules = part.rules._replace(copies=copies)
        return bind(primitive.index_add_p, x, part.index, part.source, None, rules=rules)
    y = primitive.segment_sum_p.bind(part.source, part.index, rows=part.rows, rules=part.rules)
    if part.along:
        y = sharding.summed(y, part.along, part.shared, rules.axis)
    return y if onto_identity else reference.added(x, y)


def _partitioned(ctx, operands, params):
    operand, indices, updates = ctx.avals_in
    layout = params["layout"]
    dims, whole = _dims(layout, operand, indices, updates)
    rows = math.prod(operand.shape[d] for d in layout.indexed)
    count = {f"i{i}" for i in layout.index_count}
    return partition.lower(
        ctx,
        scatter_rows_p,
        operands,
        params,
        dims,
        functools.partial(_shard, rows),
        exact={"rows", *count},
        summed=tuple(sorted(count)),
        whole=whole,
    )


# ---- the rules


@switch.own_promotion
def _scatter(name, plain, ctx, operand, indices, updates, *, dimension_numbers, **params):
    settings, avals, values = switch.current(), ctx.avals_in, (operand, indices, updates)
    params = dict(params, dimension_numbers=dimension_numbers)
    fallback = functools.partial(plain, ctx, *values, **params)
    if not switch.wanted(name):
        return fallback()
    platforms, listened = compat_lowering.platforms(ctx), decisions.listened()
    frames = functools.partial(compat.frames, ctx.traceback)
    record = functools.partial(decisions.record, name, avals=avals, frames=frames)
    if not settings.force and "cuda" not in platforms:
        record(False, switch.no_kernels(platforms[0]))
        return fallback()
    if (made := _without_whole(name, ctx, indices, updates, params, settings)) is not None:
        return _scatter(name, plain, made[0], operand, *made[1], **made[2])
    found = _problem(name, avals, params)
    if not listened and not _may_be_taken(found, settings, ctx.module_context):
        return fallback()
    if isinstance(found, str):
        record(False, found)
        return fallback()
    problem, layout = found
    clip = params["mode"] == lax.GatherScatterMode.CLIP
    chain, why_not = _chain(name, ctx, values, problem, layout, clip, settings)
    if chain is not None:
        taken, why = _fits(ctx, chain, problem, settings)
    else:
        problem = _in_program(problem, ctx, operand, updates, listened or settings.force)
        taken, why = gate.can_scatter(problem) if settings.force else gate.scatter(problem)
        if not taken and _must_be_taken(problem, settings):
            taken, why = True, "in a fixed order"
        if not taken and why == gate.FUSED_GATHER and why_not:
            why = f"{why}, and {why_not}"
        if taken and (refusal := switch.refusal(ctx, settings)):
            taken, why = False, refusal
    if not record(taken, why, bytes=problem.bytes if chain is None else chain.bytes):
        return compat_lowering.lower_inlined(plain, ctx, [operand.type], *values, **params)
    own = dict(layout=layout, clip=clip, onto_identity=_is_identity(name, ctx, operand))
    if chain is not None:
        return _emit_chain(ctx, operand, indices, chain, own)
    own |= dict(name=name, is_sorted=bool(params["indices_are_sorted"]), is_unique=bool(params["unique_indices"]))
    if compat.partitioned_devices(ctx) > 1:
        return _partitioned(ctx, values, own | dict(copies=stablehlo.is_kept(operand)))
    body = functools.partial(_scatter_rows, **own)
    return switch.own_code(mlir.lower_fun(body, multiple_results=False))(ctx, *values)


def _without_whole(name, ctx, indices, updates, params, settings):
    """(ctx, (indices, updates), params) of an equal scatter, if only that may be taken; see `layouts.without_whole`."""
    if params["mode"] not in (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS):
        return None
    avals = ctx.avals_in
    found = layouts.without_whole(params["dimension_numbers"], avals[0].shape, avals[2].shape)
    if found is None:
        return None
    numbers, columns, dropped = found
    change = lambda i, u: (jnp.stack([i[..., k] for k in columns], -1), jnp.squeeze(u, dropped))
    types = jax.eval_shape(change, *avals[1:])
    params = dict(params, dimension_numbers=numbers)
    problem = _problem(name, (avals[0], *types), params)
    if not decisions.listened() and not _may_be_taken(problem, settings, ctx.module_context):
        return None
    types = [a.update(shape=t.shape) for a, t in zip(avals[1:], types)]
    ctx = ctx.replace(avals_in=(avals[0], *types))
    lower = switch.own_code(mlir.lower_fun(change, multiple_results=True))
    values = lower(ctx.replace(avals_in=avals[1:], avals_out=types), indices, updates)
    return ctx, [v[0] if isinstance(v, (list, tuple)) else v for v in values], params


def _emit_chain(ctx, operand, indices, chain, params):
    """The message kernel in place of a scatter. Equal chains of a module share a function."""
    program = Program.of(ctx)
    chain, cuts = message.with_whole_arrays(chain, None if params["onto_identity"] else program.value(operand))
    made: dict = {}
    arrays = [program.materialize(value, made) for value in chain.values]
    params = dict(chain=chain._replace(values=()), cuts=cuts, **params)
    lower = switch.own_code(mlir.lower_fun(functools.partial(message.run, **params), multiple_results=False))
    rule = lambda ctx, *values: lower(ctx.replace(avals_in=message.types(ctx, chain)), *values)
    key = tuple(params.values())
    return compat_lowering.lower_shared("jaxkern_chain", key, rule, ctx, [operand.type], operand, indices, *arrays)


class Orders(typing.NamedTuple):
    """The orders of edges that a module has or will have.

    made: indices that chains have sorted. The same indices wrapped around zero take one more sort, which costs less than
        XLA's sums do: graph attention did not end with these after a maximum.
    gathered: how many chains gather by these indices. The gradients of such chains are scatters by the indices.
    """

    made: set
    gathered: collections.Counter


def _orders(module) -> Orders:
    return compat_lowering.of_module(module).setdefault("orders", Orders(set(), collections.Counter()))


def _chain(name, ctx, values, problem, layout, clip, settings):
    """The chain that makes the updates, where there is one that is to be taken, or None and why not; see chains.py."""
    if compat.partitioned_devices(ctx) > 1 or not chains.in_order(layout, ctx.avals_in):
        return None, ""
    known, program = _orders(ctx.module_context), Program.of(ctx)
    indices, updates = map(program.value, values[1:])
    own = root(indices) if any(known) else None
    ordered = own is not None and (own[0] in known.made or known.gathered[own] > 1)
    find = functools.partial(chains.find, program, name, ctx.avals_in, indices, updates, clip)
    if (
        not ordered
        and _may_be_free(problem, settings)
        and not _in_order(settings)
        and not switch.refusal(ctx, settings)
    ):
        problem = problem._replace(zeros=_is_identity(name, ctx, values[0]))
        if settings.force or gate.free(problem)[0]:
            found = find(free=True)
            if found is None and (settings.force or not stablehlo.is_arithmetic(ctx, values[2])):
                found = find(free=True, alone=True)
            if found is not None:
                return found, ""
    # What is sorted in any case need not be stored before.
    sorts = _must_be_taken(problem, settings) and gate.chain(problem, True)[0] and problem.count >= gate.CHAIN_COUNT
    taken, why = gate.can_scatter(problem) if settings.force or sorts else gate.chain(problem, ordered)
    if not taken or switch.refusal(ctx, settings):
        return None, "" if taken else why
    # So is arithmetic on arrays of edges x features where the updates would be stored for the kernel.
    alone = gate.alone(problem._replace(gathers=program.gathers(updates)), ordered)
    found = find(sorts=sorts or (alone and problem.trail > 1))
    if found is None and alone:
        found = find(alone=True)
    if found is not None:
        known.made.add(root(indices)[0])
        if isinstance(found.other, int):
            known.gathered[root(found.values[found.other])] += 1
    return found, ""


def _fits(ctx, chain, problem, settings) -> tuple[bool, str]:
    """(whether the program has room for what a chain stores and XLA computes where it adds the updates, what the record says).

    Sums in an order are taken in any case: XLA may take thousands of times as long, as it does by compare-and-swap.
    """
    if settings.force or chain.free is None or problem.swaps:
        return True, chain.text
    room = memory.room(ctx.module_context)
    size = lambda value: math.prod(value.type[0]) * value.type[1].itemsize
    stored = {value.key: size(value) for value in chain.values if value.is_computed_again}
    more = room.needed(stored)
    if stored and not room.is_there(more):
        return False, f"{chain.text}; {memory.reason(more, room.plain)}"
    room.values |= stored
    return True, chain.text


def _problem(name, avals, params):
    """(problem, layout), or why it is not one of rows. The facts that only the program knows are the best for kernels."""
    mode = getattr(params["mode"], "name", str(params["mode"]))
    wide, hints = bool(jax.config.jax_enable_x64), (bool(params["indices_are_sorted"]), bool(params["unique_indices"]))
    types = tuple([(a.shape, a.dtype) for a in avals])
    return _problem_of(name, types, params["dimension_numbers"], mode, hints, wide, compat.jaxlib())


@functools.lru_cache(maxsize=1024)
def _problem_of(name, types, dimension_numbers, mode, hints, wide, jaxlib):
    """wide: whether 64-bit types are on, which the numbers of rows depend on."""
    (operand, dtype), (indices, _), (updates, of_updates) = types
    if dtype != of_updates or jnp.issubdtype(dtype, jax.dtypes.extended):
        return f"updates of {of_updates} for {dtype}"
    if mode not in MODES:
        return f"mode {mode}"
    layout = layouts.of(dimension_numbers, operand, indices, updates)
    if isinstance(layout, str):
        return layout
    if not layouts.numbers_rows(layout, operand):
        return "more rows than 32 bits number"
    moves = layouts.moves_operand(layout, operand)
    sizes = layouts.sizes(layout, operand, indices)
    is_sorted, is_unique = hints
    return gate.Scatter(name, dtype, *sizes, is_sorted, True, moves, is_unique=is_unique, jaxlib=jaxlib), layout


def _in_program(problem, ctx, operand, updates, whole):
    """The problem with the facts that only the program knows; unless `whole`, up to the first that decides against kernels."""
    program = Program.of(ctx)
    facts = {
        "gathers": lambda: program.gathers(program.value(updates)),
        "fused": lambda: stablehlo.is_arithmetic(ctx, updates),
        "zeros": lambda: _is_identity(problem.operation, ctx, operand),
    }
    for name, read in facts.items():
        if whole or gate.scatter(problem)[0]:
            problem = problem._replace(**{name: read()})
    return problem


def _is_identity(name, ctx, operand) -> bool:
    value = Program.of(ctx).value(operand).constant
    return (
        value is not None and value == IDENTITY[name](ctx.avals_in[0].dtype) and not (value == 0 and np.signbit(value))
    )


def _may_be_taken(found, settings, module) -> bool:
    """Whether the program around a scatter decides if it is taken. found: what `_problem` returned."""
    if isinstance(found, str):
        return False
    if settings.force or _must_be_taken(found[0], settings):
        return gate.can_scatter(found[0])[0]
    free = gate.free(found[0])[0] and not _in_order(settings)
    return free or gate.scatter(found[0])[0] or gate.chain(found[0], any(_orders(module)))[0]


def _in_order(settings) -> bool:
    """Whether the user asks for sums in a fixed order: us, or XLA by its flags."""
    return settings.deterministic or environment.xla_is_deterministic()


def _must_be_taken(problem, settings) -> bool:
    """Whether XLA would add floating-point numbers in no fixed order, where a fixed one is asked for."""
    adds = problem.operation == "scatter_add" and problem.dtype in gate.FLOATS
    return settings.deterministic and adds and gate.can_scatter(problem)[0]


def _may_be_free(problem, settings) -> bool:
    return gate.free(problem._replace(count=max(problem.count, gate.FREE_COUNT)) if settings.force else problem)[0]


def _reads_program(name, module, equation, _) -> bool:
    """Whether the rule for an equation looks at the operations around it, or records what it decides."""
    settings = switch.current()
    if not switch.wanted(name):
        return False
    if decisions.listened():
        return True
    if not settings.force and "cuda" not in module.platforms:
        return False
    return _may_be_taken(_problem(name, [v.aval for v in equation.invars], equation.params), settings, module)


def _needs_devices(name) -> bool:
    return switch.is_on(name, *(("bincount",) if name == "scatter_add" else ()))


def register(platform: str) -> None:
    """Puts the rules in place. They call JAX's wherever nothing is switched on."""
    for name in switch.SCATTERS:
        prim = getattr(lax, f"{name}_p")
        rule, reads_program = functools.partial(_scatter, name), functools.partial(_reads_program, name)
        registration.register(prim, rule, platform, reads_program)
        compat.needs_devices_when(prim, functools.partial(_needs_devices, name))
