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
from jaxkern._engines.jaxpr import Value
from jaxkern._engines.loops import ahead, plan, plan_rows, scan_sharding, tuning
from jaxkern._engines.loops.generate import Core
from jaxkern._engines.loops.generate_rows import RowCore
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
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return jax.tree.map(lambda x: x if is_key(x) else loop_p.bind(x), tree)


class TooLarge(Unsupported):
    """A body that is one of a kernel, but beyond a kernel's limits."""


class Loop(typing.NamedTuple):
    """A scan as kernels: what the body does, what they read and write, and their plan.

    sources: {position of an operand: the array that is read in its place, see Core.orders}.
    parts: (ahead.Part, its Loop) of each of two kernels; core and launches are None then.
    """

    program: Program
    core: Core | RowCore | None
    launches: launch.Plan | None
    length: int
    sources: dict = {}
    parts: tuple = ()


def read(ctx, operands, jaxpr, consts, num_consts, num_carry, length, reverse, label) -> Loop:
    """A scan that is being lowered, as a Loop; ctx has the types of its operands and results.

    Arrays of all steps that were transposed, such as [batch, steps, features], are read as they were before. If all of them
    are, ys are written like that, too: programs transpose them back, and XLA drops both transposes.

    Raises: Unsupported, which says why there is no kernel.
    """
    if not all(isinstance(n, int) for a in (*ctx.avals_in, *ctx.avals_out) for n in a.shape):
        raise Unsupported(f"{label}: symbolic shapes")
    if not length or not all(n for a in (*ctx.avals_in, *ctx.avals_out) for n in a.shape):
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
        except TooLarge:
            raise
        except Unsupported:
            raise of_lanes from None


def _in_teams(operands, jaxpr, consts, num_consts, num_carry, length, reverse, label) -> Loop:
    """A scan whose body reduces along rows: a team of threads runs a lane."""
    program = RowProgram(jaxpr, consts, num_consts, num_carry, label)
    sources, orders = _transposed(program, operands)
    core = RowCore(program, orders, length)
    problem = plan.Problem(
        math.prod(d.size for d in program.dims), length, row=max((d.size for d in program.rows), default=1)
    )
    algorithms.pick(OPERATION, algorithms.forced(OPERATION), problem)
    launches = plan_rows.plan(device.this_device(), core, length, reverse)
    if launches is None:
        raise TooLarge(f"{label}: a body of that many arrays, statements or elements of matrices has no kernel")
    return Loop(program, core, launches, length, sources)


def _in_lanes(operands, jaxpr, consts, num_consts, num_carry, length, reverse, label) -> Loop:
    """A scan whose body is elementwise over lanes: a thread runs a lane."""
    program = Program(jaxpr, consts, num_consts, num_carry, label)
    few = math.prod(d.size for d in program.dims) <= tuning.TEAM_LANES
    if program.has_rows and few and algorithms.forced(OPERATION) == "auto":
        # A team reads rows where they are, and compiles in a third of the time.
        with contextlib.suppress(Unsupported):
            return _in_teams(operands, jaxpr, consts, num_consts, num_carry, length, reverse, label)
    parts = ahead.split(program, device.this_device().sm_count)
    if parts is not None:
        loops = [_planned(part.program, length, reverse) for part in parts]
        if None not in loops:
            return Loop(program, None, None, length, {}, tuple(zip(parts, loops)))
    found = _adjacent(program, operands)
    if found is not None:
        loop = _planned(program, length, reverse, *found)
        if loop is not None and loop.launches.algorithm == "rows":
            return loop
    loop = _planned(program, length, reverse, *_transposed(program, operands))
    if loop is None:
        raise TooLarge(f"{label}: a body of that many arrays, dimensions or statements has no kernel")
    return loop


def _planned(program, length, reverse, sources=None, orders=None) -> Loop | None:
    core = Core(program, orders, length)
    launches = plan.plan(device.this_device(), core, length, reverse)
    return launches and Loop(program, core, launches, length, sources or {})


def _transposed(program, operands):
    """(sources, orders) of the xs that were transposed; see Loop and Core."""
    if program.captured or any(program.operand_parts) or any(program.result_parts):
        return {}, {}
    sources, orders, xs = {}, {}, []
    for k in program.used:
        v = program.operands[k]
        if k < program.num_consts + program.num_carry or not v.set():
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


def emit(ctx, operands, loop, target=TARGET) -> list:
    """Emits the kernels of a loop; returns the results of the scan, or of the while loop."""
    program = loop.program
    avals = list(map(compat.physical, ctx.avals_in))
    if program.captured or any(program.operand_parts):
        captured = [c for _, c in program.captured.values()]
        operands = _in_jnp(ctx, lambda *xs: program.split([*captured, *xs]), avals, operands)
        avals = jax.eval_shape(lambda *xs: program.split([*captured, *xs]), *avals)
        avals = [jax.core.ShapedArray(a.shape, a.dtype) for a in avals]
    wanted = list(map(compat.physical, ctx.avals_out))
    types = program.parts_of(wanted)
    if loop.parts:
        found = _parts(ctx, loop, operands, avals, types, target)
    else:
        found = _kernel(ctx, loop, operands, avals, types, target)
    return _in_jnp(ctx, lambda *ys: program.join(ys), types, found) if any(program.result_parts) else found


def _in_jnp(ctx, f, avals, operands) -> list:
    """The results of f, a function in jnp that returns a list."""
    rule = switch.own_code(mlir.lower_fun(f, multiple_results=True))
    found = rule(ctx.replace(avals_in=avals), *operands)
    return [v[0] if isinstance(v, (tuple, list)) else v for v in found]


def _parts(ctx, loop, operands, avals, types, target) -> list:
    """The results of a loop of several kernels. types: the types of the results."""
    pool, pool_avals, found = list(operands), list(avals), {}
    for part, own in loop.parts:
        given, given_avals = ([values[k] for k in part.given] for values in (pool, pool_avals))
        own_types = ahead.types(part, types, loop.length)
        ys = _kernel(ctx, own, given, given_avals, own_types, target)
        pool, pool_avals = [*pool, *ys], [*pool_avals, *own_types]
        found.update(zip(part.results, ys))
    return [found[k] for k in range(len(types))]


def _kernel(ctx, loop, operands, avals, types, target) -> list:
    """The results of a loop of one kernel. types: the types of the results."""
    program, core = loop.program, loop.core
    inits = [program.num_consts + k for k in range(program.num_carry) if k not in program.accumulators]
    reads = [*core.consts, *inits, *core.xs]
    writes = [jax.core.ShapedArray(shape, dtype) for shape, dtype in core.shapes(loop.length)]
    in_memory = [
        avals[k].update(shape=tuple(avals[k].shape[a] for a in core.orders.get(k, range(avals[k].ndim)))) for k in reads
    ]
    inner = ctx.replace(avals_in=in_memory, avals_out=writes)
    found = launch.lower(inner, target, loop.launches, [loop.sources.get(k, operands[k]) for k in reads])

    sums = sorted(program.accumulators)
    given = [program.num_consts + k for k in sums]
    after = lambda *arrays: core.after(arrays[len(sums) :], dict(zip(sums, arrays)), types)
    return _in_jnp(ctx, after, [*(avals[k] for k in given), *writes], [*(operands[k] for k in given), *found])


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
                    try:
                        found = emit(ctx, operands, of_scan(ctx, operands, params, LABEL))
                    except TooLarge as error:
                        compat.warn_once(f"{error}: XLA runs the loop")
                    except Unsupported:
                        pass
        return otherwise(ctx, *operands, **params) if found is None else found

    def reads_transposed(module, equation, operands):
        """Whether a marked scan may read an array as it was before it was transposed."""
        return any(stablehlo.transposed(x)[0] is not None for x in operands) and _is_marked(equation.params)

    registry.register_cuda_target(TARGET)
    compat.needs_devices(loop_p)
    compat_lowering.register_lowering_uncached_when(scan_p, functools.partial(rule, "cuda"), "cuda", reads_transposed)
    mlir.register_lowering(scan_p, functools.partial(rule, "cpu"), platform="cpu")


_register()
