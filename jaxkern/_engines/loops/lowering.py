"""Scans on CUDA: the lowering rule of JAX's `scan_p` for bodies that `jaxkern.scan` has marked.

`loop_p` is the identity on one array. JAX's rules keep it in derivatives and batches of a body, so it marks these too. A scan
whose body has a mark becomes one kernel, if its body is elementwise over lanes, or reduces along small dimensions; every other
scan is lowered by JAX's rule.
"""

import contextlib
import functools
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from jaxkern._core import algorithms, compat, compat_lowering, device, environment, launch, registry, stablehlo, switch
from jaxkern._core.cpp import Unsupported
from jaxkern._core.jaxprs import inner_jaxprs
from jaxkern._engines.jaxpr import Value
from jaxkern._engines.loops import ahead, donated, plan, plan_rows, scan_sharding, tuning
from jaxkern._engines.loops.generate import Core
from jaxkern._engines.loops.generate_rows import RowCore
from jaxkern._engines.loops.plan import TooLarge
from jaxkern._engines.loops.program import Program
from jaxkern._engines.loops.row_program import RowProgram

TARGET = "jaxkern_scan"
OPERATION, TEAMS = "scan", "teams"
LABEL = "jaxkern.scan"
SECTOR = 32  # bytes that a GPU reads at once

loop_p = Primitive("jaxkern_loop")
loop_p.def_impl(lambda x: x)
loop_p.def_abstract_eval(lambda x: x)
ad.deflinear2(loop_p, lambda ct, _: [ct if type(ct) is ad.Zero else loop_p.bind(ct)])
batching.defvectorized(loop_p)
mlir.register_lowering(loop_p, lambda ctx, x: [x])


def mark(tree):
    """The arrays of numbers of a pytree, marked as part of a loop for kernels."""
    leaves, structure = jax.tree.flatten(tree)
    for k, x in enumerate(leaves):
        if not jnp.issubdtype(x.dtype, jax.dtypes.extended):
            leaves[k] = loop_p.bind(x)
    return jax.tree.unflatten(structure, leaves)


class Loop(typing.NamedTuple):
    """A scan as kernels: what the body does, what they read and write, and their plan.

    sources: {position of an operand: the array that is read in its place, see Core.orders}.
    parts: (ahead.Part, its Loop) of each of two kernels; core and launches are None then.
    counted: (Counted, context and operands of the loop, context and operands of its scan), if this is a scan in place of a loop.
    """

    program: Program
    core: Core | RowCore | None
    launches: launch.Plan | None
    length: int
    sources: dict = {}
    parts: tuple = ()
    counted: tuple = ()


def read(ctx, operands, jaxpr, consts, num_consts, num_carry, length, reverse, label) -> Loop:
    """A scan that is being lowered, as a Loop; ctx has the types of its operands and results.

    Arrays of all steps that were transposed, such as [batch, steps, features], are read as they were before. If all of them
    are, ys are written like that, too: programs transpose them back, and XLA drops both transposes. An array that is the same in
    all steps is read as it was before it was repeated.

    Raises: Unsupported, which says why there is no kernel.
    """
    avals = *ctx.avals_in, *ctx.avals_out
    if not are_known(avals):
        raise Unsupported(f"{label}: symbolic shapes")
    if not length or not have_elements(avals):
        raise Unsupported(f"{label}: arrays without elements")
    body = jaxpr, consts, num_consts, num_carry
    if algorithms.forced(OPERATION) == TEAMS:
        with contextlib.suppress(Unsupported):
            return _in_teams(operands, *body, length, reverse, label)
    try:
        return _in_lanes(operands, *body, length, reverse, label)
    except Unsupported as of_lanes:
        try:
            return _in_teams(operands, *body, length, reverse, label)
        except Unsupported as of_rows:
            raise _of_both(jaxpr, of_lanes, of_rows) from None


def read_counted(ctx, operands, found, label) -> Loop:
    """The same as `read`, for the scan that takes the place of a loop; see counted.py."""
    jaxpr, consts = found.jaxpr.jaxpr, found.jaxpr.consts
    if not have_elements([v.aval for v in (*jaxpr.invars, *jaxpr.outvars)]):
        raise Unsupported(f"{label}: arrays without elements")
    check(jaxpr, consts, found.num_carry, 0, label, found.num_consts)  # before anything is emitted
    ctx = ctx.replace(avals_in=list(map(compat.not_varying, ctx.avals_in)))
    given = jax.eval_shape(found.before, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ctx.avals_in))
    avals_in = [jax.core.ShapedArray(a.shape, a.dtype) for a in given]
    operands_in = _in_jnp(ctx, found.before, ctx.avals_in, operands)
    steps = [v.aval.update(shape=(found.length, *v.aval.shape)) for v in jaxpr.outvars[found.num_carry :]]
    avals_out = [*(v.aval for v in jaxpr.outvars[: found.num_carry]), *steps]
    inner = ctx.replace(avals_in=avals_in, avals_out=avals_out)
    counts = found.num_consts, found.num_carry
    loop = read(inner, operands_in, jaxpr, consts, *counts, found.length, found.reverse, label)
    return loop._replace(counted=(found, ctx, operands, inner, operands_in))


def _of_both(jaxpr, of_lanes, of_rows) -> Unsupported:
    """Which error says more of a body that is neither of lanes nor of rows. Only rows have products."""
    if isinstance(of_rows, TooLarge):
        return of_rows
    return of_rows if compat.calls(jaxpr, "dot_general") and not isinstance(of_lanes, TooLarge) else of_lanes


def _in_teams(operands, jaxpr, consts, num_consts, num_carry, length, reverse, label, most=None) -> Loop:
    """A scan whose body reduces along rows, of at most `most` elements if given: a team of threads runs a lane."""
    program = RowProgram(jaxpr, consts, num_consts, num_carry, label)
    if most is not None and any(d.size > most for d in program.rows):
        raise Unsupported(f"{label} has rows of more than {most} elements")
    sources, orders = _transposed(program, operands)
    core = RowCore(program, orders, length)
    problem = plan.Problem(
        math.prod(d.size for d in program.dims), length, row=max((d.size for d in program.rows), default=1)
    )
    algorithms.pick(OPERATION, algorithms.forced(OPERATION), problem)
    launches = plan_rows.plan(device.this_device(), core, length, reverse)
    return Loop(program, core, launches, length, sources)


def _in_lanes(operands, jaxpr, consts, num_consts, num_carry, length, reverse, label) -> Loop:
    """A scan whose body is elementwise over lanes: a thread runs a lane."""
    program = Program(jaxpr, consts, num_consts, num_carry, label)
    few = math.prod(d.size for d in program.dims) <= tuning.TEAM_LANES
    if (program.has_rows and few or program.linear) and algorithms.forced(OPERATION) == "auto":
        # A team reads rows where they are, and compiles in a third of the time. It adds up short sums in each step.
        most = None if program.has_rows else tuning.SUM_ROW
        with contextlib.suppress(Unsupported):
            return _in_teams(operands, jaxpr, consts, num_consts, num_carry, length, reverse, label, most)
    parts = ahead.split(program, device.this_device().sm_count)
    if parts is not None:
        with contextlib.suppress(TooLarge):
            loops = [_planned(part.program, length, reverse) for part in parts]
            return Loop(program, None, None, length, {}, tuple(zip(parts, loops)))
    found, zeros = _adjacent(program, operands), _zeros(program, operands)
    if found is not None:
        with contextlib.suppress(TooLarge):
            loop = _planned(program, length, reverse, *found, zeros)
            if loop.launches.algorithm == "rows":
                return loop
    return _planned(program, length, reverse, *_transposed(program, operands, stablehlo.repeated), zeros)


def _planned(program, length, reverse, sources=None, orders=None, zeros=()) -> Loop:
    core = Core(program, orders, length, zeros)
    launches = plan.plan(device.this_device(), core, length, reverse)
    return Loop(program, core, launches, length, sources or {})


def check(jaxpr, consts, num_carry, length, label, num_consts=0) -> None:
    """Raises Unsupported, which says why, unless the body of a scan is one of a kernel.

    The answer does not depend on the GPU of this machine: one like an H200 is assumed where it matters.
    """
    body = jaxpr, consts, num_consts, num_carry, label
    avals = [v.aval for v in (*jaxpr.invars, *jaxpr.outvars)]
    is_planned = isinstance(length, int) and length and are_known(avals) and have_elements(avals)
    try:
        program = Program(*body)
        if is_planned:
            _check_lanes(program)
    except Unsupported as of_lanes:
        try:
            program = RowProgram(*body)
            if is_planned:
                plan_rows.plan(device.H200, RowCore(program, None, length), length, False, always=True)
        except Unsupported as of_rows:
            raise _of_both(jaxpr, of_lanes, of_rows) from None


def _check_lanes(program):
    core = Core(program)
    try:
        plan.check(core, core.function.size)
    except TooLarge:
        parts = ahead.split(program, device.H200.sm_count)
        if parts is None:
            raise
        for part in parts:
            core = Core(part.program)
            plan.check(core, core.function.size)


def are_known(avals) -> bool:
    """Whether no shape is symbolic."""
    return all(isinstance(n, int) for a in avals for n in a.shape)


def have_elements(avals) -> bool:
    return all(n for a in avals for n in a.shape)


@contextlib.contextmanager
def left_to_xla(ctx, jaxpr, mark, length=1):
    """A loop of a public function that no kernel runs is left to XLA, with a warning unless it has no elements.

    These functions check their loops while they are traced. Here are derivatives and batches of these loops, GPUs with less
    shared memory than others, and loops around such loops, which need no warning. mark: the primitive that marks a loop in jaxpr.
    """
    try:
        yield
    except Unsupported as error:
        avals = *ctx.avals_in, *ctx.avals_out
        if length and are_known(avals) and have_elements(avals) and _has_own(getattr(jaxpr, "jaxpr", jaxpr), mark):
            compat.warn_once(
                f"{error}. XLA runs this loop, which may be a derivative or a batch of a loop in the program"
            )


def _zeros(program, operands) -> list:
    """The carries whose first value is the constant 0, which need not be in memory. Of a kernel without other operands, not all."""
    if program.captured or any(program.operand_parts):
        return []
    first = program.num_consts
    found = [k for k in range(program.num_carry) if k not in program.linear and stablehlo.is_zero(operands[first + k])]
    return found if {*program.used, *program.inits} - {first + k for k in found} else found[1:]


def _transposed(program, operands, repeated=lambda _: (None, None)):
    """(sources, orders) of the xs that were transposed; see Loop and Core. repeated: `stablehlo.repeated`, where xs may be such."""
    if program.captured or any(program.operand_parts) or any(program.result_parts):
        return {}, {}
    sources, orders, xs = {}, {}, []
    for k in program.used:
        v = program.operands[k]
        if k < program.num_consts + program.num_carry or not v.set():
            continue
        source, dims = repeated(operands[k])
        if dims and 0 not in dims and any(v.dims[d - 1] is not None for d in dims):
            sources[k], orders[k] = source, dims
            continue
        xs.append(k)
        source, permutation = stablehlo.transposed(operands[k])
        if source is not None and _is_read_in_runs(permutation, v.dims, v.dtype):
            sources[k], orders[k] = source, tuple(map(int, np.argsort(permutation)))
    alike = {orders.get(k, ()) for k in xs if len(program.operands[k].set()) == program.rank}
    if len(alike) == 1 and (order := alike.pop()):
        for k, v in enumerate(program.results[program.num_carry :], program.num_carry):
            if isinstance(v, Value) and len(v.dims) + 1 == len(order) and len(v.set()) == program.rank:
                if k not in program.sums and _is_read_in_runs(np.argsort(order), v.dims, v.dtype):
                    orders[len(program.operands) + k] = order
    return sources, orders


def _adjacent(program, operands):
    """(sources, orders) by which the steps of each lane are adjacent in xs and ys; None if xs do not lie like that.

    So lie arrays [batch, steps], which programs transpose for a scan.
    """
    if program.captured or any(program.operand_parts) or any(program.result_parts) or not program.dims:
        return None
    sources, orders = {}, {}
    for k in program.used:
        v = program.operands[k]
        if k < program.num_consts + program.num_carry or not v.set():
            continue
        source, permutation = stablehlo.transposed(operands[k])
        if source is None or permutation[0] != len(v.dims):
            return None
        sources[k], orders[k] = source, tuple(map(int, np.argsort(permutation)))
    for k, v in enumerate(program.results[program.num_carry :], len(program.operands) + program.num_carry):
        if isinstance(v, Value) and v.set():
            orders[k] = (*range(1, len(v.dims) + 1), 0)
    return (sources, orders) if sources else None


def _is_read_in_runs(permutation, dims, dtype) -> bool:
    """Whether lanes that lie side by side fill a sector of memory. permutation: of [steps, *dims], from memory."""
    run = 1
    for axis in reversed(np.argsort(permutation)):
        if axis == 0:
            break
        run *= dims[axis - 1].size if dims[axis - 1] is not None else 1
    return run * dtype.itemsize >= SECTOR


def emit(ctx, operands, loop, target=TARGET, places=None) -> list:
    """Emits the kernels of a loop; returns the results of the scan, or of the while loop.

    places: of each carry, its last value among the results of the equation that is being lowered.
    """
    if loop.counted:
        found, ctx, operands, inner, given = loop.counted
        places = [k for k in range(found.of[0]) if k not in found.moved]
        results = emit(inner, given, loop._replace(counted=()), target, places)
        after = lambda *xs: found.after(xs[: len(operands)], xs[len(operands) :])
        return _in_jnp(ctx, after, [*ctx.avals_in, *inner.avals_out], [*operands, *results])
    program = loop.program
    avals = list(map(compat.physical, ctx.avals_in))
    if program.captured or any(program.operand_parts):
        captured = [c for _, c in program.captured.values()]
        operands = _in_jnp(ctx, lambda *xs: program.split([*captured, *xs]), avals, operands)
        avals = jax.eval_shape(lambda *xs: program.split([*captured, *xs]), *avals)
        avals = [jax.core.ShapedArray(a.shape, a.dtype) for a in avals]
    wanted = list(map(compat.physical, ctx.avals_out))
    types = program.parts_of(wanted)
    whole = range(len(wanted)) if places is None else places
    places = [k for at, p in zip(whole, program.result_parts) for k in ([at] if p is None else [None] * len(p.places))]
    if loop.parts:
        found = _parts(ctx, loop, operands, avals, types, target, places)
    else:
        found = _kernel(ctx, loop, operands, avals, types, target, places)
    return _in_jnp(ctx, lambda *ys: program.join(ys), types, found) if any(program.result_parts) else found


def by_xla(loop) -> list:
    """The results of a loop with `counted`, whose scan XLA runs."""
    found, ctx, operands, *_ = loop.counted
    return _in_jnp(ctx, found.run, ctx.avals_in, operands)


def _in_jnp(ctx, f, avals, operands) -> list:
    """The results of f, a function in jnp that returns a list."""
    rule = switch.own_code(mlir.lower_fun(f, multiple_results=True))
    found = rule(ctx.replace(avals_in=avals), *operands)
    return [v[0] if isinstance(v, (tuple, list)) else v for v in found]


def _parts(ctx, loop, operands, avals, types, target, places) -> list:
    """The results of a loop of several kernels. types: the types of the results."""
    pool, pool_avals, found = list(operands), list(avals), {}
    for part, own in loop.parts:
        given, given_avals = ([values[k] for k in part.given] for values in (pool, pool_avals))
        own_types = ahead.types(part, types, loop.length)
        own_places = [places[k] for k in part.results if k < len(places)]
        ys = _kernel(ctx, own, given, given_avals, own_types, target, own_places)
        pool, pool_avals = [*pool, *ys], [*pool_avals, *own_types]
        found.update(zip(part.results, ys))
    return [found[k] for k in range(len(types))]


def _kernel(ctx, loop, operands, avals, types, target, places) -> list:
    """The results of a loop of one kernel. types: the types of the results. places: see `emit`."""
    program, core = loop.program, loop.core
    reads = [*core.consts, *core.inits, *core.xs]
    writes = [jax.core.ShapedArray(shape, dtype) for shape, dtype in core.shapes(loop.length)]
    in_memory = [
        avals[k].update(shape=tuple(avals[k].shape[a] for a in core.orders.get(k, range(avals[k].ndim)))) for k in reads
    ]
    values = dict(enumerate(operands)) | loop.sources
    linear = sorted(program.linear)
    if linear:
        at = [program.num_consts + k for k in linear]
        firsts = lambda *xs: [core.first(k, x) for k, x in zip(linear, xs)]
        values.update(zip(at, _in_jnp(ctx, firsts, [avals[k] for k in at], [operands[k] for k in at])))
        for k, aval in zip(at, jax.eval_shape(firsts, *(avals[k] for k in at))):
            in_memory[reads.index(k)] = jax.core.ShapedArray(aval.shape, aval.dtype)
    inner = ctx.replace(avals_in=in_memory, avals_out=writes)
    given = [values[k] for k in reads]
    shared = _in_place(loop, given, in_memory, writes, places)
    found = launch.lower(inner, target, loop.launches, given, operand_output_aliases=shared)

    sums = program.zeros
    given = [program.num_consts + k for k in sums]
    after = lambda *arrays: core.after(arrays[len(sums) :], dict(zip(sums, arrays)), types)
    return _in_jnp(ctx, after, [*(avals[k] for k in given), *writes], [*(operands[k] for k in given), *found])


def _in_place(loop, values, given, types, places) -> dict[int, int] | None:
    """{operand: result} of last carries that take the memory of the first ones; None if there are none.

    Those of donated arguments do, where XLA copies nothing for it; see donated.py. given, types: of operands and results. places: see
    `emit`.
    """
    found = {}
    for operand, k in plan.in_place(loop.core, loop.launches.algorithm).items():
        value = values[operand]
        alike = given[operand].update(weak_type=False) == types[k]
        if k < len(places) and alike and values.count(value) == 1 and places[k] in donated.results_over(value):
            found[operand] = k
    return found or None


def of_scan(ctx, operands, params, label) -> Loop:
    """The same as `read` for an equation of `scan_p`."""
    closed = params["jaxpr"]
    jaxpr, consts = (closed.jaxpr, closed.consts) if isinstance(closed, ClosedJaxpr) else (closed, ())
    return read(
        ctx, operands, jaxpr, consts, *compat.counts_of_scan(params), params["length"], params["reverse"], label
    )


def _is_marked(params) -> bool:
    """Whether a scan is one of `jaxkern.scan`."""
    closed = params["jaxpr"]
    return compat.calls(getattr(closed, "jaxpr", closed), loop_p.name)


def _has_own(jaxpr, primitive) -> bool:
    """Whether a primitive is called in a jaxpr, and not only in the loops in it."""
    outside = [e for e in jaxpr.eqns if e.primitive.name not in ("scan", "while")]
    return any(e.primitive is primitive or any(_has_own(j, primitive) for j in inner_jaxprs(e)) for e in outside)


def _register():
    scan_p = compat.scan_primitive()
    otherwise = compat_lowering.lowering_of(scan_p)

    def rule(platform, ctx, *operands, **params):
        found = None
        if _is_marked(params) and not environment.xla_only() and not algorithms.xla_forced():
            with switch.promotion():
                if compat.may_partition_itself(ctx):
                    found = scan_sharding.lower(ctx, operands, params, mark, LABEL)
                elif platform == "cuda" and compat.partitioned_devices(ctx) == 1 and registry.kernels_run():
                    with left_to_xla(ctx, params["jaxpr"], loop_p, params["length"]):
                        found = emit(ctx, operands, of_scan(ctx, operands, params, LABEL))
        return otherwise(ctx, *operands, **params) if found is None else found

    def reads_transposed(module, equation, operands):
        """Whether a marked scan may read an array as it was before it was transposed or repeated, or overwrite one."""
        moved = lambda x: stablehlo.transposed(x)[0] is not None or stablehlo.repeated(x)[0] is not None
        return any(moved(x) or stablehlo.is_donated(x) for x in operands) and _is_marked(equation.params)

    registry.register_cuda_target(TARGET)
    compat.needs_devices(loop_p)
    compat_lowering.register_lowering_uncached_when(scan_p, functools.partial(rule, "cuda"), "cuda", reads_transposed)
    mlir.register_lowering(scan_p, functools.partial(rule, "cpu"), platform="cpu")


_register()
