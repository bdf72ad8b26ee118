"""From the primitives of cross-entropy to what XLA runs: kernels on CUDA, the reference elsewhere.

The CUDA rules see the program around a primitive, and decide two things by it: whether the gradient overwrites the
logits, and whether loss and gradient are computed in one read (one_read.py).

A result of a custom call shares an operand's memory always or never. If the operand is used afterwards, or is an
argument that was not donated, XLA copies it first. So the gradient overwrites logits that are an intermediate result or
a donated argument.
"""

import functools

from jax.extend.mlir import ir
from jax.interpreters import mlir

from jaxkern._core import compat, decisions, device, launch, lowering, partition, registry, stablehlo, switch
from jaxkern._ops.cross_entropy import one_read, plan, reference, sharding
from jaxkern._ops.cross_entropy.primitive import (
    cross_entropy_both_p,
    cross_entropy_grad_p,
    cross_entropy_jvp_p,
    cross_entropy_p,
    kinds,
)

# As functions of the logits alone, for Taylor series; and as XLA runs them, from the residuals.
REFERENCES = {
    cross_entropy_p: reference.loss,
    cross_entropy_grad_p: reference.gradient,
    cross_entropy_jvp_p: reference.transpose,
    cross_entropy_both_p: reference.both,
}
BY_RESIDUALS = REFERENCES | {
    cross_entropy_grad_p: reference.gradient_by_residuals,
    cross_entropy_jvp_p: reference.transpose_by_residuals,
}
PASSES = {cross_entropy_p: "loss", cross_entropy_grad_p: "gradient", cross_entropy_both_p: "both"}


def _register(prim):
    mlir.register_lowering(prim, _fallback(prim))
    compat.taylor_rule(prim, REFERENCES[prim])
    if prim not in PASSES:
        return
    registry.register_cuda_target(prim.name)
    compat.needs_devices(prim)
    # Not cached: a cached rule sees the operands as arguments of a function of its own.
    compat.register_uncached_lowering(prim, functools.partial(_lower, prim, _cuda_call), "cuda")
    compat.register_uncached_lowering(prim, functools.partial(_lower, prim, None), "cpu")


def _fallback(prim):
    return mlir.lower_fun(BY_RESIDUALS[prim], multiple_results=prim.multiple_results)


def _lower(prim, call, ctx, *operands, **params):
    """call(prim, ctx, operands, params): emits the call of a kernel on one device; None: there are no kernels."""
    avals = ctx.avals_in
    if params["options"].fusible and not _accelerated(prim, ctx, operands):
        return _fallback(prim)(ctx, *operands, **params)
    x = avals[0]
    known = all(isinstance(d, int) for d in x.shape) and 0 not in x.shape and x.dtype in lowering.KERNEL_DTYPES
    if known and compat.may_partition_itself(ctx):
        emit = _partition
    elif known and call and compat.partitioned_devices(ctx) == 1 and registry.kernels_run():
        # XLA would gather the operands of a custom call that several devices share.
        emit = call
    else:
        return _fallback(prim)(ctx, *operands, **params)
    if kinds(prim, avals)[0][-1] == "m":
        shape = lowering.mask_shape(x.shape, avals[-1].shape, params["axis"])
        if shape != avals[-1].shape:
            adapted = lowering.with_larger_mask(prim, shape)
            return mlir.lower_fun(adapted, multiple_results=prim.multiple_results)(ctx, *operands, **params)
    gradient = one_read.gradient(ctx, operands, params, emit) if prim is cross_entropy_grad_p else None
    return emit(prim, ctx, operands, params) if gradient is None else [gradient]


def _accelerated(prim, ctx, operands) -> bool:
    """Whether a loss that `jaxkern.accelerate` put into a program runs on kernels there."""
    settings = switch.current()
    why = switch.refusal(ctx, settings)
    if not why and stablehlo.is_arithmetic(ctx, operands[0]) and not (settings and settings.force):
        why = "XLA fuses the arithmetic that makes the logits"
    x = ctx.avals_in[0]
    if prim is cross_entropy_p:
        reason = why or "loss and gradient in one read"
        decisions.record("softmax_cross_entropy", not why, reason, [x], compat.frames(ctx.traceback), stablehlo.size(x))
    return not why


def _partition(prim, ctx, operands, params):
    avals = ctx.avals_in
    options = params["options"]._replace(overwrites=_overwrites(prim, operands, params))
    return partition.lower(
        ctx,
        prim,
        operands,
        params | {"options": options},
        sharding.dims(prim, avals, params["axis"]),
        functools.partial(sharding.shard, prim),
        exact={"classes"},
        summed=() if "x" in kinds(prim, avals)[1] else ("classes",),
    )


def _cuda_call(prim, ctx, operands, params):
    launches = plan.cross_entropy(PASSES[prim], device.this_device(), ctx.avals_in, ctx.avals_out, **params)
    if launches is None:
        return _fallback(prim)(ctx, *operands, **params)
    aliases = {0: len(ctx.avals_out) - 1} if _overwrites(prim, operands, params) else None
    return launch.lower(ctx, prim.name, launches, operands, **({"operand_output_aliases": aliases} if aliases else {}))


def _overwrites(prim, operands, params) -> bool:
    """Whether the gradient takes the memory of the logits."""
    return prim is not cross_entropy_p and (params["options"].overwrites or _may_overwrite(operands[0]))


def _may_overwrite(value) -> bool:
    while (maker := one_read.maker(value)) is not None and maker.name == "stablehlo.reshape":
        value = maker.operands[0]  # the same memory
    if maker is not None:
        return maker.name != "stablehlo.constant"
    function = value.owner.owner.operation
    if function.name != "func.func" or "arg_attrs" not in function.attributes:
        return False
    own = ir.DictAttr(ir.ArrayAttr(function.attributes["arg_attrs"])[ir.BlockArgument(value).arg_number])
    return "jax.buffer_donor" in own or "tf.aliasing_output" in own


for _prim in REFERENCES:
    _register(_prim)
