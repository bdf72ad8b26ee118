"""Scans on CUDA: the lowering rule of JAX's `scan_p` for bodies that `jaxkern.scan` has marked.

`loop_p` is the identity on one array. JAX's rules keep it in derivatives and batches of a body, so it marks these too. A scan
whose body has a mark becomes one kernel, if its body is elementwise over lanes; every other scan is lowered by JAX's rule.
"""

import jax
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from jaxkern._core import algorithms, compat, device, environment, launch, registry, switch
from jaxkern._core.functor import Unsupported
from jaxkern._engines.loops import plan
from jaxkern._engines.loops.generate import Core
from jaxkern._engines.loops.program import Program

TARGET = "jaxkern_scan"

loop_p = Primitive("jaxkern_loop")
loop_p.def_impl(lambda x: x)
loop_p.def_abstract_eval(lambda x: x)
ad.deflinear2(loop_p, lambda ct, _: [ct if type(ct) is ad.Zero else loop_p.bind(ct)])
batching.defvectorized(loop_p)
mlir.register_lowering(loop_p, lambda ctx, x: [x])


def mark(tree):
    """The arrays of a pytree, marked as part of a loop for kernels."""
    return jax.tree.map(loop_p.bind, tree)


def counts(params) -> tuple:
    """How many constants and carries a scan has."""
    if "num_consts" in params:  # jax < 0.11
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def _kernel(ctx, operands, params):
    """The results of a marked scan from a kernel, or None."""
    closed = params["jaxpr"]
    jaxpr, consts = (closed.jaxpr, closed.consts) if isinstance(closed, ClosedJaxpr) else (closed, ())
    known = all(isinstance(n, int) and n for a in (*ctx.avals_in, *ctx.avals_out) for n in a.shape)
    if environment.xla_only() or algorithms.xla_forced() or not known or not params["length"]:
        return None
    if compat.partitioned_devices(ctx) > 1 or not registry.kernels_run() or not compat.calls(jaxpr, loop_p.name):
        return None
    num_consts, num_carry = counts(params)
    try:
        program = Program(jaxpr, consts, num_consts, num_carry, "jaxkern.scan")
        if program.num_consts > num_consts:
            return None
        core = Core(program)
    except Unsupported:
        return None
    length = params["length"]
    inits = [num_consts + k for k in range(num_carry) if k not in program.accumulators]
    reads = [*core.consts, *inits, *core.xs]
    gpu = device.this_device()
    launches = plan.plan(gpu, core, length, params["reverse"])
    if launches is None:
        return None
    writes = [jax.core.ShapedArray(shape, dtype) for shape, dtype in core.shapes(length)]
    inner = ctx.replace(avals_in=[ctx.avals_in[k] for k in reads], avals_out=writes)
    found = launch.lower(inner, TARGET, launches, [operands[k] for k in reads])

    sums = sorted(program.accumulators)
    given = [num_consts + k for k in sums]

    def after(*arrays):
        return core.after(arrays[len(sums) :], dict(zip(sums, arrays)), ctx.avals_out)

    rest = ctx.replace(avals_in=[*(ctx.avals_in[k] for k in given), *writes])
    rule = switch.own_code(mlir.lower_fun(after, multiple_results=True))
    return rule(rest, *(operands[k] for k in given), *found)


def _register():
    scan_p = compat.scan_primitive()
    otherwise = compat.lowering_of(scan_p)

    def rule(ctx, *operands, **params):
        found = switch.own_promotion(_kernel)(ctx, operands, params)
        return otherwise(ctx, *operands, **params) if found is None else found

    registry.register_cuda_target(TARGET)
    mlir.register_lowering(scan_p, rule, platform="cuda")


_register()
