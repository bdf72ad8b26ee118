"""From the primitives of loss.py to what XLA runs: our kernel on CPU and CUDA, jnp elsewhere.

Two things are decided here, where the program around a primitive is in view:

* whether the gradient is written over the logits. A custom call's result shares an operand's memory always or
  never, and where the operand lives on or is an argument that was not donated XLA would copy it first. So they
  share when the logits are an intermediate result or a donated argument.
* whether loss and gradient are taken in one read. `value_and_grad` asks for the loss, then for the gradient,
  whose cotangents are known beforehand if they do not depend on the loss: those of a mean, a weighted sum. Then
  what they are computed from is moved before the loss, and one call takes the place of both.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.interpreters import mlir

from jaxkern import _loss_parts, loss
from jaxkern._core import compat, lowering, partition, registry

PARTIAL_BYTES = 32  # of scratch for a part of a row: kLossPartialBytes


def _register(prim):
    reference = loss.REFERENCES[prim]
    without_kernel = loss.tangent if prim is loss.cross_entropy_jvp_p else reference
    mlir.register_lowering(prim, mlir.lower_fun(without_kernel, multiple_results=prim.multiple_results))
    compat.taylor_rule(prim, reference)
    for platform, module in registry.status.items():
        if prim.name in module.targets:
            rule = functools.partial(_lower, prim, platform)
            compat.needs_devices(prim)
            # Not cached: a cached rule sees the operands as arguments of a function of its own.
            compat.register_uncached_lowering(prim, rule, platform)


def _lower(prim, platform, ctx, *operands, axis, tier, options):
    avals = ctx.avals_in
    x, kinds = avals[0], loss.kinds(prim, avals)[0]
    through = functools.partial(mlir.lower_fun, multiple_results=prim.multiple_results)
    params = {"axis": axis, "tier": tier, "options": options}
    if x.dtype not in lowering.KERNEL_DTYPES or 0 in x.shape:
        return through(loss.REFERENCES[prim])(ctx, *operands, **params)
    if kinds[-1] == "m":
        sharded = compat.partitioned_devices(ctx) > 1 and not compat.may_partition_itself(ctx)
        shape = lowering.mask_shape(x.shape, avals[-1].shape, axis, sharded)
        if shape != avals[-1].shape:
            def with_larger_mask(*args, **params):
                return prim.bind(*args[:-1], jnp.broadcast_to(args[-1], shape), **params)
            return through(with_larger_mask)(ctx, *operands, **params)

    if prim is loss.cross_entropy_grad_p:
        fused = _take_both(ctx, platform, operands, params)
        if fused is not None:
            return [fused]
    return _call(prim, platform, ctx, avals, ctx.avals_out, operands, params)


def _call(prim, platform, ctx, avals, results, operands, params):
    x, axis, options = avals[0], params["axis"], params["options"]
    overwrites = prim is not loss.cross_entropy_p and (options.overwrites or _may_overwrite(operands[0]))
    if compat.may_partition_itself(ctx) and all(isinstance(d, int) for d in x.shape):
        params = params | {"options": options._replace(overwrites=overwrites)}
        dims = _loss_parts.dims(prim, avals, axis)
        shard = functools.partial(_loss_parts.shard, prim)
        ctx = ctx.replace(avals_in=list(avals), avals_out=list(results))
        summed = () if "x" in loss.kinds(prim, avals)[1] else ("classes",)
        return partition.lower(ctx, prim, operands, params, dims, shard, exact={"classes"}, summed=summed)
    count = len(results)
    scratch = scratch_shape(x.shape, x.dtype, axis) if platform == "cuda" and prim is not loss.cross_entropy_grad_p else None
    if scratch is not None:
        results = [*results, jax.core.ShapedArray(scratch, jnp.dtype(jnp.uint8))]
    attributes = partition.attributes([a.shape for a in avals], [a.shape for a in results], axis)
    aliases = {0: count - 1} if overwrites else None
    rule = jax.ffi.ffi_lowering(
        prim.name, **({"extra_attributes": attributes} if attributes else {}),
        **({"operand_output_aliases": aliases} if aliases else {}))
    return rule(ctx.replace(avals_in=list(avals), avals_out=results), *operands, **_attributes(params))[:count]


def _attributes(params):
    ignore = params["options"].ignore
    bits = 0 if ignore is None else ignore - (1 << 64 if ignore >= 1 << 63 else 0)
    return {"axis": params["axis"], "tier": params["tier"], "smoothing": np.float64(params["options"].smoothing),
            "z_loss": np.float64(params["options"].z_loss), "has_ignore": ignore is not None, "ignore": np.int64(bits)}


def scratch_shape(shape, dtype, axis: int):
    """CUDA: room for the partial results of few long rows, `32 * max(2, 2048 // rows)` bytes a row.

    >>> scratch_shape((4, 100_000), "float32", 1)
    (4, 16384)
    >>> scratch_shape((4096, 1000), "float32", 1) is None
    True
    """
    if not all(isinstance(d, int) for d in shape) or math.prod(shape[axis + 1 :]) != 1:
        return None
    rows = math.prod(shape[:axis])
    if rows > 512 or shape[axis] * jnp.dtype(dtype).itemsize < 32768:
        return None
    return (*shape[:axis], PARTIAL_BYTES * max(2, 2048 // rows))


# ---- the program around


def _maker(value):
    """The operation that `value` is a result of, None for an argument."""
    return None if isinstance(value.owner, ir.Block) else value.owner.operation


def _may_overwrite(value) -> bool:
    while (maker := _maker(value)) is not None and maker.name == "stablehlo.reshape":
        value = maker.operands[0]  # the same memory
    if maker is not None:
        return maker.name != "stablehlo.constant"
    function = value.owner.owner.operation
    if function.name != "func.func" or "arg_attrs" not in function.attributes:
        return False
    own = ir.DictAttr(ir.ArrayAttr(function.attributes["arg_attrs"])[ir.BlockArgument(value).arg_number])
    return "jax.buffer_donor" in own or "tf.aliasing_output" in own


def _take_both(ctx, platform, operands, params):
    """The gradient out of one call that takes the loss's place too; None where that cannot be."""
    logits, labels, largest, _, weight, *rest = operands
    forward = _maker(largest)
    if forward is None or not compat.moves_operations() or not _is_loss(forward, params):
        return None
    # The same problem, in the same block as everything that comes after.
    if list(forward.operands) != [logits, labels, *rest[1:]]:
        return None
    moved = _before(weight, forward)
    if moved is None:
        return None
    for operation in moved:
        operation.move_before(forward)
    row = [ctx.avals_in[2]] * (3 + bool(rest))
    avals = [ctx.avals_in[0], ctx.avals_in[1], ctx.avals_in[4], *ctx.avals_in[6:]]
    with ir.InsertionPoint(forward), forward.location:
        *found, gradient = _call(loss.cross_entropy_both_p, platform, ctx, avals, [*row, ctx.avals_out[0]],
                                 [logits, labels, weight, *rest[1:]], params)
    for old, new in zip(forward.results, found):
        old.replace_all_uses_with(new)  # which leaves the loss's own call without a use
    return gradient


def _is_loss(operation, params):
    """Whether it calls the kernel of the loss, or partitions it, with these parameters."""
    if operation.name == "stablehlo.custom_call":
        return ir.StringAttr(operation.attributes["call_target_name"]).value == loss.cross_entropy_p.name
    if operation.name != "func.call":
        return False
    callee = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
    return re.fullmatch(partition.function_name(loss.cross_entropy_p, params) + r"(_\d+)?", callee) is not None


def _before(value, barrier):
    """The operations, in order, that must be moved before `barrier` for `value` to be known there; None if one of
    them depends on it, is not plain arithmetic, or stands in another block."""
    found = []

    def visit(value):
        maker = _maker(value)
        if maker is None or maker in found:
            return True
        if maker.block != barrier.block:
            return False
        if maker != barrier and maker.is_before_in_block(barrier):
            return True
        # Regions of control flow may use what is not among the operands; a custom call may have an effect.
        unknown = ("stablehlo.custom_call", "stablehlo.while", "stablehlo.case", "stablehlo.if")
        plain = maker.name == "func.call" or (maker.name.startswith("stablehlo.") and maker.name not in unknown)
        if maker == barrier or not plain or len(found) > 200 or not all(map(visit, maker.operands)):
            return False
        found.append(maker)
        return True

    return found if visit(value) else None


for _prim in (loss.cross_entropy_p, loss.cross_entropy_grad_p, loss.cross_entropy_jvp_p, loss.cross_entropy_both_p):
    _register(_prim)
