"""Primitives: the one call that gives an operation its shapes, batching, lowering, partitioning and fallback.

    softmax_p = primitive("jaxkern_softmax", shape, batch, reference.softmax, plan=plan.softmax, partition=partitioned)

On CUDA the lowering rule calls `plan` for a launch list and emits it as one custom call under the name of the primitive. If
there is no plan, or kernels cannot run, it emits the reference, which XLA compiles. There are no kernels for the CPU: each
device computes its part with the reference. `autodiff` defines derivatives.
"""

import functools
import math

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxkern._core import algorithms, compat, compat_lowering, device, environment, launch, registry, switch
from jaxkern._core.partition import outside_meshes
from jaxkern._core.primitive import evaluate

references = {}  # of primitives, in jnp; None for those without one


def primitive(
    name: str,
    shape,
    batch=None,
    reference=None,
    *,
    on_cpu=None,
    several=False,
    taylor=None,
    makes_nan=True,
    plan=None,
    **lowering,
) -> Primitive:
    """Makes a primitive with all rules except derivatives. `params` are the primitive's parameters.

    shape(*avals, **params): the type of the result, or a list of types if there are several.
    batch(prim, operands, dims, **params): the batching rule.
    reference(*operands, **params): the operation in jnp. Without one, the primitive is bound only where kernels run.
    on_cpu: the reference as XLA:CPU runs it fastest; used where programs are lowered for the CPU, and for nothing else.
    taylor: a function in jnp for Taylor series; by default the reference.
    makes_nan: whether `checkify` looks for NaN in the results.
    plan, lowering: as for `_lower_to_kernels`. Without a plan there are no kernels; without a partition, too, XLA lowers the
        reference.
    """
    prim = Primitive(name)
    prim.multiple_results = several
    references[prim] = reference
    prim.def_abstract_eval(shape)
    prim.def_impl(functools.partial(evaluate, prim, reference))
    if batch is not None:
        batching.primitive_batchers[prim] = functools.partial(batch, prim)
    if makes_nan:
        compat.check_nans(prim)
    if reference is not None:
        mlir.register_lowering(prim, lower_reference(prim, reference))
        compat.taylor_rule(prim, taylor or reference)
    if on_cpu is not None:
        mlir.register_lowering(prim, lower_reference(prim, on_cpu), platform="cpu")
    if plan is not None or lowering.get("partition") is not None:
        _lower_to_kernels(prim, plan, reference, on_cpu=on_cpu, **lowering)
    return prim


def _lower_to_kernels(
    prim,
    plan,
    reference,
    partition=None,
    aliases=None,
    adapt=None,
    prepare=None,
    dtypes=None,
    instead=None,
    settled=None,
    left=None,
    cached=True,
    whole=False,
    on_cpu=None,
) -> None:
    """Registers the lowerings of `prim` for CUDA and, with `partition`, for the CPU.

    plan(device, operands, results, **params): a `launch.Plan` for arrays of these types (neither empty nor of symbolic
        shape), or None if there is no kernel for them. A pure function. A plan that asks for more shared memory than the
        device has counts as None. None: there are no kernels.
    reference(*operands, **params): the operation in jnp; on_cpu, if given, is what the CPU runs instead.
    partition(prim, ctx, operands, params): lowers a call on several devices to one part per device, with `partition.lower`.
        Returning None leaves the call to XLA, which partitions the reference, as it does without `partition`.
    aliases: {operand: result} that must share memory, or a function of (prim, operands, params) that returns it.
    adapt(prim, *avals, **params): None if kernels can read operands of these types. Otherwise a function in jnp that takes the
        same operands and params, and binds `prim` on operands that kernels can read.
    prepare(*avals, **params): None if kernels read operands of these types. Otherwise a function in jnp of the same operands
        and params that returns the operands that they read, as a pytree. `plan` then gets the pytree of their types.
    dtypes: names of the first operand's dtypes that have kernels. None: `plan` decides.
    instead(ctx, operands, params, lower): results that replace the call of the kernels or the parts, or None.
        lower(prim, ctx, operands, params) lowers a call of another primitive here.
    settled(operands, params): the parameters, with what the program around the call shows of its operands; for rules that are
        not cached.
    left(prim, ctx, operands, params): whether the call is left to the reference for a reason of its own.
    cached=False: the rule is called for every use of `prim`, in the function that contains the use.
    whole: with cached=False, whether kernels read operands that are slices inside of whole arrays; see `launch.lower`.
    """
    fallbacks = {"cuda": lower_reference(prim, reference), "cpu": lower_reference(prim, on_cpu or reference)}

    def rule(platform, ctx, *operands, **params):
        with switch.promotion():
            wanted = not (environment.xla_only() or algorithms.xla_forced())
            wanted = wanted and not (left is not None and left(prim, ctx, operands, params))
            wanted = wanted and _known(ctx) and (dtypes is None or ctx.avals_in[0].dtype.name in dtypes)
            split = wanted and partition is not None and compat.may_partition_itself(ctx)
            # XLA would gather the operands of a custom call on several devices.
            kernels = wanted and not split and platform == "cuda" and plan is not None
            kernels = kernels and compat.partitioned_devices(ctx) == 1 and registry.kernels_run()
            found = None
            if settled is not None and (split or kernels):
                params = settled(operands, params)
            if instead is not None and (split or kernels):
                found = instead(ctx, operands, params, _lower_on(platform))
            if found is None and split:
                found = partition(prim, ctx, operands, params)
            elif found is None and kernels:
                adapted = adapt(prim, *ctx.avals_in, **params) if adapt is not None else None
                if adapted is not None:
                    return _lower_traced(adapted, prim.multiple_results)(ctx, *operands, **params)
                prepared = prepare(*ctx.avals_in, **params) if prepare is not None else None
                inner, own, read = ctx, operands, list(ctx.avals_in)
                if prepared is not None:
                    inner, own, read = _prepared(prepared, ctx, operands, params)
                gpu = device.this_device()
                launches = plan(gpu, read, ctx.avals_out, **params)
                if launches is not None and launches.shared <= gpu.shared_memory:
                    shared = aliases(prim, own, params) if callable(aliases) else aliases
                    given = {"operand_output_aliases": shared} if shared else {}
                    found = launch.lower(inner, prim.name, launches, own, whole=whole, **given)
            return fallbacks[platform](ctx, *operands, **params) if found is None else found

    registry.register_cuda_target(prim.name)
    if partition is not None:
        compat.needs_devices(prim)
    for platform in ("cuda", "cpu") if partition is not None else ("cuda",):
        _rules[prim, platform] = functools.partial(rule, platform)
        if cached:
            mlir.register_lowering(prim, _rules[prim, platform], platform=platform)
        else:
            compat_lowering.register_uncached_lowering(prim, _rules[prim, platform], platform)


def _prepared(f, ctx, operands, params) -> tuple:
    """(the context of the results of `f`, these, the pytree of their types)"""
    types = None

    def flat(*operands, **params):
        nonlocal types
        found = f(*operands, **params)
        types = jax.tree.map(jax.typeof, found)
        return jax.tree.leaves(found)

    own = _lower_traced(flat, True)(ctx.replace(avals_out=None), *operands, **params)
    return ctx.replace(avals_in=jax.tree.leaves(types)), own, types


_rules = {}


def _lower_on(platform):
    return lambda prim, ctx, operands, params: _rules[prim, platform](ctx, *operands, **params)


def lower_reference(prim, reference):
    """The lowering of `prim` to its reference, in which no array varies over the axes of a `shard_map`.

    Each device computes its own part, and a jaxpr that was made elsewhere may be evaluated in the reference.
    """
    return switch.own_code(_lower_traced(reference, prim.multiple_results))


def _lower_traced(f, several):
    """The lowering rule that traces `f`, in jnp; several: whether it has several results.

    If one device computes all of it, `f` is traced outside of any mesh. A mesh with explicit axes would be part of the types, on which
    a jaxpr that was made elsewhere may not be evaluated, and XLA would find shardings in the part of one device.
    """
    on_one, on_several = (mlir.lower_fun(g, multiple_results=several) for g in (outside_meshes(f), f))

    def lower(ctx, *operands, **params):
        avals, rule = list(map(compat.not_varying, ctx.avals_in)), on_several
        if compat.partitioned_devices(ctx) == 1:
            avals, rule = [a.update(sharding=None) for a in avals], on_one
        return rule(ctx.replace(avals_in=avals), *operands, **params)

    return lower


def _known(ctx) -> bool:
    """Whether no shape is symbolic and no array is empty."""
    avals = (*ctx.avals_in, *ctx.avals_out)
    return all(isinstance(d, int) for a in avals for d in a.shape) and not any(0 in a.shape for a in avals)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def busy_parts(tiles: int, slots: int, most: int) -> int:
    """Into how many parts to cut each tile, at most, for a GPU that runs so many blocks at once: the fewest that keep nine
    tenths of it busy until the end, or else the busiest."""
    best, best_busy = 1, 0.0
    for waves in range(ceil_div(tiles, slots), ceil_div(tiles, slots) + 4):
        parts = max(1, min(most, waves * slots // tiles))
        busy = parts * tiles / (ceil_div(parts * tiles, slots) * slots)
        if busy > best_busy:
            best, best_busy = parts, busy
        if best_busy >= 0.9:
            break
    return best


def per_thread(vectors: int, most: int) -> tuple[int, int]:
    """(vectors per thread, threads) of a block for a row of so many vectors: 4 or 8 vectors, whichever leaves fewer threads of
    the last warp idle. most: the threads of a block with 4 vectors each, at most."""
    four, eight = (32 * ceil_div(ceil_div(vectors, each), 32) for each in (4, 8))
    better = 4 * four < 8 * eight or (4 * four == 8 * eight and vectors < 512)
    return (4, four) if better and four <= most else (8, eight)


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


# Types that kernels store, and do not compute with.
FLOAT8 = {"float8_e4m3fn": "Float8<3>", "float8_e5m2": "Float8<2>"}


def cuda_type(dtype) -> str:
    return CUDA_TYPES[dtype.name]


def cpp_bool(flag) -> str:
    """A template argument of type bool."""
    return "true" if flag else "false"


FLOAT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}  # of the floating-point types that have kernels


# ---- the structs of ffi/kernels/common/broadcast.h, as kernel arguments


def fast_divmod(divisor: int) -> launch.Struct:
    """FastDivmod for a divisor below 2^32."""
    shift = (divisor - 1).bit_length() if divisor > 1 else 0
    multiplier = ((1 << 32) * ((1 << shift) - divisor)) // divisor + 1
    return launch.struct(launch.u32(divisor), launch.u32(multiplier & 0xFFFFFFFF), launch.u32(shift))


def divider(divisor: int) -> launch.Struct:
    """Divider (common/divider.h) for any divisor."""
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


def index_map(groups) -> launch.Struct:
    """IndexMap of runs of dimensions, innermost first: [(size, stride)]."""
    sizes = [fast_divmod(n if k + 1 < len(groups) else 1) for k, (n, _) in enumerate(groups)]
    strides = [launch.i64(s) for _, s in groups]
    return launch.struct(
        launch.i32(len(groups)),
        *launch.array(sizes, MAP_RANK, fast_divmod(1)),
        *launch.array(strides, MAP_RANK, launch.i64(0)),
    )


def broadcast_view(full, part, axis: int) -> launch.Struct | None:
    """BroadcastView of an operand of shape `part` against an array of shape `full`; None if it has too many groups."""
    inner, stride = _groups(full[axis + 1 :], part[axis + 1 :], 1)
    axis_stride = 0 if part[axis] == 1 else stride
    outer, _ = _groups(full[:axis], part[:axis], stride * part[axis])
    fits = all(len(g) <= MAP_RANK and all(n < 1 << 32 for n, _ in g[:-1]) for g in (inner, outer))
    return launch.struct(index_map(outer), launch.i64(axis_stride), index_map(inner)) if fits else None


EMPTY_VIEW = launch.struct(index_map([]), launch.i64(0), index_map([]))
