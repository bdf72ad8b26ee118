"""From the primitives of _index.py to what XLA runs: our kernel on CPU and CUDA, jnp elsewhere."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from jaxkern import _index, _index_parts, tiers
from jaxkern._core import compat, define, partition, registry
from jaxkern._ops.indexing import gather_plan

KERNEL_DTYPES = frozenset(map(jnp.dtype, (
    jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64, jnp.int32, jnp.int64, jnp.uint32)))
LIMIT = 2**32 - 2  # rows, and indices of one batch, that the CPU kernels number


# ---- the same in jnp, where there is no kernel


def rows_of(index, rows, rules):
    """The row that each index stands for, `rows` where it is none, in a type that can say so."""
    if index.dtype.itemsize < 4:
        index = index.astype(jnp.int32)
    most = jnp.iinfo(index.dtype).max
    beyond = isinstance(rows, int) and rows > most  # more rows than the type can name: none is too large
    limit = jnp.asarray(most if beyond else rows, index.dtype)  # rows may be symbolic
    if rules.wrap and jnp.issubdtype(index.dtype, jnp.signedinteger):
        index = jnp.where(index < 0, index + limit, index)
    if rules.clip:
        index = jnp.maximum(index, 0)
        return index if beyond else jnp.minimum(index, jnp.maximum(limit, 1) - 1)
    return jnp.where((index < 0) | ((index >= limit) & (not beyond)), limit, index)


def _for_each_batch(f, rules):
    """f on arrays without batch dimensions, for the operands of a primitive."""
    flat = rules._replace(axis=rules.axis - rules.batch_dims, batch_dims=0)
    f = functools.partial(f, rules=flat)
    for _ in range(rules.batch_dims):
        f = jax.vmap(f)
    return f


def _whole(source, index, rules):
    k = rules.batch_dims
    if source.shape[:k] == index.shape[:k]:
        return source
    return jnp.broadcast_to(source, (*index.shape[:k], *source.shape[k:]))


def _at(x, index, rules):
    return x.at[(slice(None),) * rules.axis + (rows_of(index, x.shape[rules.axis], rules),)]


def _add_reference(x, index, source, *alpha, rules):
    wide = _index.computing(x.dtype)

    def add(x, index, source, rules):
        if not alpha:
            return _at(x.astype(wide), index, rules).add(source.astype(wide), mode="drop").astype(x.dtype)
        total = _at(jnp.zeros_like(x, wide), index, rules).add(source.astype(wide), mode="drop")
        # 0 * inf is NaN, where nothing is added.
        touched = _at(jnp.zeros_like(x, bool), index, rules).set(True, mode="drop")
        return jnp.where(touched, (x.astype(wide) + alpha[0] * total).astype(x.dtype), x)

    return _for_each_batch(add, rules)(x, index, _whole(source, index, rules))


def _select_reference(x, index, *, rules):
    value = _index.fill_value(x.dtype) if rules.fill_nan else 0

    def select(x, index, rules):
        axis = rules.axis
        if x.shape[axis] == 0:  # JAX refuses to take anything from nothing
            return jnp.full((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]), value, x.dtype)
        return _at(x, index, rules).get(mode="fill", fill_value=value)

    return _for_each_batch(select, rules)(x, index)


def _sum_reference(source, index, *, rows, rules):
    k, axis = rules.batch_dims, rules.axis
    zeros = jnp.zeros((*index.shape[:k], *source.shape[k:axis], rows, *source.shape[axis + 1 :]), source.dtype)
    return _add_reference(zeros, index, source, rules=rules)


def _extreme_reference(method, identity, source, index, *, rows, rules):
    def extreme(source, index, rules):
        shape = (*source.shape[: rules.axis], rows, *source.shape[rules.axis + 1 :])
        start = jnp.full(shape, identity(source.dtype), source.dtype)
        return getattr(_at(start, index, rules), method)(source, mode="drop")

    return _for_each_batch(extreme, rules)(_whole(source, index, rules), index)


# ---- the kernels


def _register(prim, reference, of_source, aliases=None):
    """of_source: the position among operands and results of the array that has a row for each index."""
    mlir.register_lowering(prim, mlir.lower_fun(reference, multiple_results=False))
    compat.taylor_rule(prim, reference)
    for platform, module in registry.status.items():
        if prim.name in module.targets:
            rule = functools.partial(_lower, prim, reference, of_source, aliases, platform)
            compat.needs_devices(prim)
            mlir.register_lowering(prim, rule, platform=platform)


def _lower(prim, reference, of_source, aliases, platform, ctx, *operands, rules, **params):
    avals, (out,) = ctx.avals_in, ctx.avals_out
    through = functools.partial(mlir.lower_fun, multiple_results=False)
    source = [*avals, out][of_source]
    rows = out if source is not out else avals[0]
    sizes = [d for a in (*avals, out) for d in a.shape]
    count, height = source.shape[rules.axis], rows.shape[rules.axis]
    static = all(isinstance(d, int) for d in sizes)
    if (out.dtype not in KERNEL_DTYPES or 0 in sizes or not (static or platform == "cpu")
            or (platform == "cpu" and static and max(count, height) > LIMIT)):
        return through(reference)(ctx, *operands, rules=rules, **params)

    if static and compat.may_partition_itself(ctx):
        dims = _index_parts.dims(prim, [a.ndim for a in avals], rules)
        return partition.lower(
            ctx, prim, operands, dict(rules=rules, **params), dims, _index_parts.SHARDS[prim], exact={"rows", "count"},
            summed=_index_parts.summed(prim), whole={"rows"} if height > _index_parts.LIMIT else ())
    devices = compat.partitioned_devices(ctx)
    if devices > 1 and rules.axis > 0 and any(
            a.shape[: rules.axis] != out.shape[: rules.axis] for a in avals):
        return through(functools.partial(_spread, prim, out.shape[: rules.axis]))(ctx, *operands, rules=rules, **params)
    results = [out]
    if platform == "cuda":
        operation = prim.name.removeprefix("jaxkern_")
        scratch = scratch_shape(operation, out.dtype, avals[1], rows.shape, count, rules, devices)
        if scratch is None:
            return through(reference)(ctx, *operands, rules=rules, **params)
        results += [jax.core.ShapedArray(scratch, jnp.dtype(jnp.uint8))] if 0 not in scratch else []
    attributes = None
    if devices > 1:
        attributes = partition.attributes([a.shape for a in avals], [a.shape for a in results], rules.batch_dims)
    rule = jax.ffi.ffi_lowering(
        prim.name, **({"extra_attributes": attributes} if attributes else {}),
        **({"operand_output_aliases": aliases} if aliases else {}))
    return rule(ctx.replace(avals_out=results), *operands, **rules._asdict())[:1]


def _spread(prim, lead, *operands, rules, **params):
    """For several devices: every operand has all dimensions before the axis, so that they may be split."""
    axis = rules.axis
    operands = [jnp.broadcast_to(a, (*lead, *a.shape[k:])) for a, k in zip(
        operands, ((axis, rules.batch_dims, axis, 0) if prim is _index.index_add_p else (axis, rules.batch_dims)))]
    return prim.bind(*operands, rules=rules._replace(batch_dims=axis), **params)


def scratch_shape(operation, dtype, index, shape, count, rules, devices):
    """CUDA: the bytes that the plan needs, or None where there is nobody to ask.

    Split with its batch dimensions, it must still suffice for each device's part of them.
    """
    if registry.status["cpu"].module is None:
        return None
    k, axis = rules.batch_dims, rules.axis
    batch = math.prod(index.shape[:k])
    sizes = math.prod(shape[k:axis]), shape[axis], count, math.prod(shape[axis + 1 :])

    def needed(batch):
        query, _ = tiers.index_query(*sizes[1:], dtype, op=operation, batch=batch, outer=sizes[0],
                                     index_dtype=index.dtype, indices_are_sorted=rules.sorted, device=tiers.H200,
                                     unique_indices=rules.unique, deterministic=rules.deterministic)
        return query.scratch_bytes(rules.plan)

    if devices == 1 or k == 0:
        return (needed(batch),)
    parts = {-(-batch // n) for n in range(1, devices + 1)}
    return (*shape[:k], max(-(-needed(part) // part) for part in parts))


_register(_index.index_add_p, _add_reference, 2, {0: 0})
_register(_index.index_select_p, _select_reference, -1)
_register(_index.segment_sum_p, _sum_reference, 0)
_register(_index.segment_max_p, functools.partial(_extreme_reference, "max", _index.least), 0)
_register(_index.segment_min_p, functools.partial(_extreme_reference, "min", _index.greatest), 0)


def _partition_select(ctx, operands, params):
    rules, rows = params["rules"], ctx.avals_in[0].shape[params["rules"].axis]
    prim = _index.index_select_p
    dims = _index_parts.dims(prim, [a.ndim for a in ctx.avals_in], rules)
    return partition.lower(
        ctx, prim, operands, params, dims, _index_parts.SHARDS[prim], exact={"rows", "count"},
        summed=_index_parts.summed(prim), whole={"rows"} if rows > _index_parts.LIMIT else ())


define.lower_to_kernels(
    _index.index_select_p, plan=gather_plan.index_select, reference=_select_reference, partition=_partition_select)
