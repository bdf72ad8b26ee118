"""Scans on CUDA: the lowering rule of JAX's `scan_p` for bodies that `jaxkern.scan` has marked.

`loop_p` is the identity on one array. JAX's rules keep it in derivatives and batches of a body, so it marks these too. A scan
whose body has a mark becomes one kernel, if its body is elementwise over lanes; every other scan is lowered by JAX's rule.
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from jaxkern._core import algorithms, compat, device, environment, launch, registry, stablehlo, switch
from jaxkern._core.functor import Unsupported
from jaxkern._engines.jaxpr import Value
from jaxkern._engines.loops import plan
from jaxkern._engines.loops.generate import Core
from jaxkern._engines.loops.program import Program

TARGET = "jaxkern_scan"
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


class Loop(typing.NamedTuple):
    """A scan as kernels: what the body does, what they read and write, and their plan."""

    program: Program
    core: Core
    launches: launch.Plan
    length: int
    sources: dict = {}  # {position of an operand: the array that is read in its place, see Core.orders}


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
    program = Program(jaxpr, consts, num_consts, num_carry, label)
    sources, orders = _transposed(program, operands) if not program.captured else ({}, {})
    core = Core(program, orders, length)
    launches = plan.plan(device.this_device(), core, length, reverse)
    if launches is None:
        raise Unsupported(f"{label}: a body of that many arrays, dimensions or statements has no kernel")
    return Loop(program, core, launches, length, sources)


def _transposed(program, operands):
    """(sources, orders) of the xs that were transposed; see Loop and Core."""
    if any(program.operand_parts) or any(program.result_parts):
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
    alike = {orders.get(k, ()) for k in xs if len(program.operands[k].set()) == len(program.dims)}
    if len(alike) == 1 and (order := alike.pop()):
        for k, v in enumerate(program.results[program.num_carry :], program.num_carry):
            if isinstance(v, Value) and len(v.dims) + 1 == len(order) and len(v.set()) == len(program.dims):
                if k not in program.sums and _is_read_in_runs(np.argsort(order), v.dims, v.dtype):
                    orders[len(program.operands) + k] = order
    return sources, orders


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
    program, core, length = loop.program, loop.core, loop.length
    rule = lambda f: switch.own_code(mlir.lower_fun(f, multiple_results=True))
    avals = list(map(compat.physical, ctx.avals_in))
    if program.captured or any(program.operand_parts):
        captured = [c for _, c in program.captured.values()]
        operands = rule(lambda *xs: program.split([*captured, *xs]))(ctx.replace(avals_in=avals), *operands)
        avals = jax.eval_shape(lambda *xs: program.split([*captured, *xs]), *avals)
        avals = [jax.core.ShapedArray(a.shape, a.dtype) for a in avals]
        operands = [v[0] if isinstance(v, (tuple, list)) else v for v in operands]
    inits = [program.num_consts + k for k in range(program.num_carry) if k not in program.accumulators]
    reads = [*core.consts, *inits, *core.xs]
    writes = [jax.core.ShapedArray(shape, dtype) for shape, dtype in core.shapes(length)]
    in_memory = [
        avals[k].update(shape=tuple(avals[k].shape[a] for a in core.orders.get(k, range(avals[k].ndim)))) for k in reads
    ]
    inner = ctx.replace(avals_in=in_memory, avals_out=writes)
    found = launch.lower(inner, target, loop.launches, [loop.sources.get(k, operands[k]) for k in reads])

    sums = sorted(program.accumulators)
    given = [program.num_consts + k for k in sums]
    wanted = list(map(compat.physical, ctx.avals_out))

    def after(*arrays):
        inits = dict(zip(sums, arrays))
        return program.join(core.after(arrays[len(sums) :], inits, program.parts_of(wanted)))

    rest = ctx.replace(avals_in=[*(avals[k] for k in given), *writes])
    return rule(after)(rest, *(operands[k] for k in given), *found)


def of_scan(ctx, operands, params, label) -> Loop:
    """The same as `read` for an equation of `scan_p`."""
    closed = params["jaxpr"]
    jaxpr, consts = (closed.jaxpr, closed.consts) if isinstance(closed, ClosedJaxpr) else (closed, ())
    return read(
        ctx, operands, jaxpr, consts, *compat.counts_of_scan(params), params["length"], params["reverse"], label
    )


def _kernel(ctx, operands, params):
    """The results of a marked scan from a kernel, or None."""
    if environment.xla_only() or algorithms.xla_forced() or not registry.kernels_run():
        return None
    closed = params["jaxpr"]
    if compat.partitioned_devices(ctx) > 1 or not compat.calls(getattr(closed, "jaxpr", closed), loop_p.name):
        return None
    try:
        loop = of_scan(ctx, operands, params, "jaxkern.scan")
    except Unsupported:
        return None
    return emit(ctx, operands, loop)


def _register():
    scan_p = compat.scan_primitive()
    otherwise = compat.lowering_of(scan_p)

    def rule(ctx, *operands, **params):
        found = switch.own_promotion(_kernel)(ctx, operands, params)
        return otherwise(ctx, *operands, **params) if found is None else found

    registry.register_cuda_target(TARGET)
    mlir.register_lowering(scan_p, rule, platform="cuda")


_register()
