"""From a primitive to XLA: the lowering that every operation shares.

    lower_to_kernels(softmax_p, plan=plan.softmax, reference=reference.softmax, partition=sharding.softmax)

gives `softmax_p` its rules. The CUDA rule asks `plan` for a launch list and emits it as one custom call under the name of
the primitive; where there is no plan, and wherever kernels cannot run, it lowers to the reference, which XLA compiles.
On the CPU there are no kernels: each device computes its part by the reference.
"""

import math

from jax.interpreters import mlir

from jaxkern._core import compat, device, launch, registry


def lower_to_kernels(prim, plan, reference, partition=None, aliases=None, adapt=None) -> None:
    """Registers the lowerings of `prim` for CUDA and, with `partition`, for the CPU.

    plan(device, operands, results, **params): a `launch.Plan` for arrays of these types (their shapes are not empty and
        hold no symbols), or None where there is no kernel for them. A pure function; params are the primitive's.
    reference(*operands, **params): the same in jnp.
    partition(ctx, operands, params): lowers a call that several devices share to parts that each of them computes, with
        `partition.lower`; without it, XLA partitions the reference.
    aliases: {operand: result} that must share memory.
    adapt(*avals, **params): None if kernels can read operands of these types as they are; else a function in jnp of the
        same operands and params that binds `prim` again, on operands that kernels can read.
    """

    fallback = lower_reference(prim, reference)

    def is_partitioned(ctx):
        return _known(ctx) and partition is not None and compat.may_partition_itself(ctx)

    def rule_of_cpu(ctx, *operands, **params):
        return partition(ctx, operands, params) if is_partitioned(ctx) else fallback(ctx, *operands, **params)

    def rule(ctx, *operands, **params):
        if is_partitioned(ctx):
            return partition(ctx, operands, params)
        if not _known(ctx):
            return fallback(ctx, *operands, **params)
        # XLA would gather the operands of a custom call that several devices share.
        if compat.partitioned_devices(ctx) > 1 or not registry.kernels_run():
            return fallback(ctx, *operands, **params)
        adapted = adapt(*ctx.avals_in, **params) if adapt is not None else None
        if adapted is not None:
            return mlir.lower_fun(adapted, multiple_results=prim.multiple_results)(ctx, *operands, **params)
        launches = plan(device.this_device(), ctx.avals_in, ctx.avals_out, **params)
        if launches is None:
            return fallback(ctx, *operands, **params)
        options = {"operand_output_aliases": aliases} if aliases else {}
        return launch.lower(ctx, prim.name, launches, operands, **options)

    registry.register_cuda_target(prim.name)
    if partition is not None:
        compat.needs_devices(prim)
        mlir.register_lowering(prim, rule_of_cpu, platform="cpu")
    mlir.register_lowering(prim, rule, platform="cuda")


def lower_reference(prim, reference):
    """The lowering of `prim` to its reference, in which no array varies over the axes of a `shard_map`.

    Each device computes its own part, and a jaxpr that was made elsewhere may be evaluated in the reference.
    """
    rule = mlir.lower_fun(reference, multiple_results=prim.multiple_results)
    return lambda ctx, *operands, **params: rule(
        ctx.replace(avals_in=list(map(compat.not_varying, ctx.avals_in))), *operands, **params
    )


def _known(ctx) -> bool:
    """Whether shapes hold no symbols, and no array is empty."""
    avals = (*ctx.avals_in, *ctx.avals_out)
    return all(isinstance(d, int) for a in avals for d in a.shape) and not any(0 in a.shape for a in avals)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def size_of(shape) -> int:
    return math.prod(shape)


# The C++ name of each dtype in ffi/kernels.
CUDA_TYPES = {
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
    "float64": "double",
    "bool": "bool",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "uint8": "uint8_t",
    "uint16": "uint16_t",
    "uint32": "uint32_t",
    "uint64": "uint64_t",
}


def cuda_type(dtype) -> str:
    return CUDA_TYPES[dtype.name]


# ---- arguments that the structs of ffi/kernels/common/broadcast.h take


def fast_divmod(divisor: int) -> launch.Struct:
    """FastDivmod of a divisor below 2^32."""
    shift = (divisor - 1).bit_length() if divisor > 1 else 0
    multiplier = ((1 << 32) * ((1 << shift) - divisor)) // divisor + 1
    return launch.struct(launch.u32(divisor), launch.u32(multiplier & 0xFFFFFFFF), launch.u32(shift))


def divider(divisor: int) -> launch.Struct:
    """Divider (common/divider.h) of any divisor."""
    wide = divisor >= 2**31 - 1
    return launch.struct(launch.i64(divisor), fast_divmod(1 if wide else divisor), launch.boolean(wide))


MAP_RANK = 4  # IndexMap::kMaxRank


def _groups(full, part, stride):
    """Runs of dimensions that are all broadcast or all not, innermost first: [(size, stride)], and the next stride."""
    groups = []
    for n, own in reversed(list(zip(full, part))):
        if n == 1:
            continue
        s = 0 if own == 1 else stride
        stride *= own
        if groups and (groups[-1][1] == 0 if s == 0 else groups[-1][1] != 0 and s == groups[-1][1] * groups[-1][0]):
            groups[-1] = (groups[-1][0] * n, groups[-1][1])
        else:
            groups.append((n, s))
    return ([] if len(groups) == 1 and groups[0][1] == 0 else groups), stride


def _index_map(groups) -> launch.Struct:
    sizes = [fast_divmod(n if k + 1 < len(groups) else 1) for k, (n, _) in enumerate(groups)]
    strides = [launch.i64(s) for _, s in groups]
    return launch.struct(
        launch.i32(len(groups)),
        *launch.array(sizes, MAP_RANK, fast_divmod(1)),
        *launch.array(strides, MAP_RANK, launch.i64(0)),
    )


def broadcast_view(full, part, axis: int) -> launch.Struct | None:
    """BroadcastView of an operand of shape `part` against an array of shape `full`; None where it has too many groups."""
    inner, stride = _groups(full[axis + 1 :], part[axis + 1 :], 1)
    axis_stride = 0 if part[axis] == 1 else stride
    outer, _ = _groups(full[:axis], part[:axis], stride * part[axis])
    fits = all(len(g) <= MAP_RANK and all(n < 1 << 32 for n, _ in g[:-1]) for g in (inner, outer))
    return launch.struct(_index_map(outer), launch.i64(axis_stride), _index_map(inner)) if fits else None


EMPTY_VIEW = launch.struct(_index_map([]), launch.i64(0), _index_map([]))
