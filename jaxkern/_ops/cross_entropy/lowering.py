"""From the primitives of cross-entropy to what XLA runs: kernels on CPU and CUDA, the reference elsewhere.

The rules see the program around a primitive, and decide two things by it: whether the gradient overwrites the logits,
and whether loss and gradient are computed in one read (one_read.py).

A result of a custom call shares an operand's memory always or never. If the operand is used afterwards, or is an
argument that was not donated, XLA copies it first. So the gradient overwrites logits that are an intermediate result or
a donated argument.
"""

import functools

import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.interpreters import mlir

from jaxkern._core import compat, device, launch, lowering, partition, registry
from jaxkern._ops.cross_entropy import one_read, plan, reference, sharding
from jaxkern._ops.cross_entropy.primitive import (
    cross_entropy_both_p,
    cross_entropy_grad_p,
    cross_entropy_jvp_p,
    cross_entropy_p,
    kinds,
)

REFERENCES = {
    cross_entropy_p: reference.loss,
    cross_entropy_grad_p: reference.gradient,
    cross_entropy_jvp_p: reference.transpose,
    cross_entropy_both_p: reference.both,
}
PASSES = {cross_entropy_p: "loss", cross_entropy_grad_p: "gradient", cross_entropy_both_p: "both"}


def _register(prim):
    without_kernel = reference.tangent if prim is cross_entropy_jvp_p else REFERENCES[prim]
    mlir.register_lowering(prim, mlir.lower_fun(without_kernel, multiple_results=prim.multiple_results))
    compat.taylor_rule(prim, REFERENCES[prim])
    if prim not in PASSES:
        return
    registry.register_cuda_target(prim.name)
    compat.needs_devices(prim)
    # Not cached: a cached rule sees the operands as arguments of a function of its own.
    for platform in ("cpu", "cuda"):
        compat.register_uncached_lowering(prim, functools.partial(_lower, prim, platform), platform)


def _lower(prim, platform, ctx, *operands, **params):
    avals, axis = ctx.avals_in, params["axis"]
    x, several_devices = avals[0], compat.partitioned_devices(ctx) > 1
    through = functools.partial(mlir.lower_fun, multiple_results=prim.multiple_results)
    known = all(isinstance(d, int) for d in x.shape)
    partitions = compat.may_partition_itself(ctx) and known
    # XLA would gather the operands of a custom call that several devices share.
    runs = partitions or (platform == "cuda" and known and not several_devices and registry.kernels_run())
    if x.dtype not in lowering.KERNEL_DTYPES or 0 in x.shape or not runs:
        return through(REFERENCES[prim])(ctx, *operands, **params)
    if kinds(prim, avals)[0][-1] == "m":
        shape = lowering.mask_shape(x.shape, avals[-1].shape, axis, several_devices and not partitions)
        if shape != avals[-1].shape:

            def with_larger_mask(*args, **params):
                return prim.bind(*args[:-1], jnp.broadcast_to(args[-1], shape), **params)

            return through(with_larger_mask)(ctx, *operands, **params)

    emit = functools.partial(_emit, partitions=partitions)
    if prim is cross_entropy_grad_p:
        gradient = one_read.gradient(ctx, operands, params, emit)
        if gradient is not None:
            return [gradient]
    return emit(prim, ctx, operands, params)


def _emit(prim, ctx, operands, params, partitions):
    """The call of a kernel, or of what partitions it; its results."""
    avals, results, axis, options = ctx.avals_in, ctx.avals_out, params["axis"], params["options"]
    overwrites = prim is not cross_entropy_p and (options.overwrites or _may_overwrite(operands[0]))
    if partitions:
        params = params | {"options": options._replace(overwrites=overwrites)}
        shard = functools.partial(sharding.shard, prim)
        summed = () if "x" in kinds(prim, avals)[1] else ("classes",)
        return partition.lower(
            ctx, prim, operands, params, sharding.dims(prim, avals, axis), shard, exact={"classes"}, summed=summed
        )
    launches = plan.cross_entropy(PASSES[prim], device.this_device(), avals, results, **params)
    if launches is None:
        return mlir.lower_fun(REFERENCES[prim], multiple_results=prim.multiple_results)(ctx, *operands, **params)
    aliases = {"operand_output_aliases": {0: len(results) - 1}} if overwrites else {}
    return launch.lower(ctx, prim.name, launches, operands, **aliases)


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
