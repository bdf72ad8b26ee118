"""What runs the primitives of rows at indices: kernels on CUDA, the reference elsewhere."""

import functools

import jax.numpy as jnp
from jax.interpreters import mlir

from jaxkern._core import compat, partition, switch
from jaxkern._core.define import lower_to_kernels, size_of
from jaxkern._ops.indexing import gather_plan, plan, reference, sharding, sort
from jaxkern._ops.indexing.primitive import (
    index_add_p,
    index_select_p,
    parted,
    segment_max_p,
    segment_min_p,
    segment_sum_p,
)

KERNEL_DTYPES = frozenset(map(jnp.dtype, plan.DTYPES))


def _operands(prim) -> int:
    """Operands before alpha and the order."""
    return 3 if prim is index_add_p else 2


def _order_of(prim, operands):
    """The order at the end of the operands, or ()."""
    rest = operands[_operands(prim) :]
    return parted(rest)[1]


def _register(prim, in_jnp, aliases=None):
    mlir.register_lowering(prim, switch.own_code(mlir.lower_fun(in_jnp, multiple_results=False)))
    compat.taylor_rule(prim, in_jnp)
    name = prim.name.removeprefix("jaxkern_")
    if prim is index_select_p:
        found, adapt = gather_plan.index_select, _without_order
    else:
        found, adapt = functools.partial(plan.plan, name), functools.partial(_adapt, prim, name)
    lower_to_kernels(prim, found, in_jnp, functools.partial(_on_devices, prim, in_jnp), aliases, adapt)


# ---- several devices


def _on_devices(prim, in_jnp, ctx, operands, params):
    """A part for each device, where it has kernels for it."""
    if ctx.avals_out[0].dtype not in KERNEL_DTYPES:
        return switch.own_code(mlir.lower_fun(in_jnp, multiple_results=False))(ctx, *operands, **params)
    return _partitioned(prim, ctx, operands, **params)


def _partitioned(prim, ctx, operands, rules, **params):
    rows = ctx.avals_in[0] if prim is index_select_p else ctx.avals_out[0]
    whole = {"rows"} if rows.shape[rules.axis] > sharding.LIMIT else set()
    return partition.lower(
        ctx,
        prim,
        operands,
        dict(rules=rules, **params),
        sharding.dims(prim, ctx.avals_in, rules),
        sharding.SHARDS[prim],
        exact={"rows", "count"},
        summed=sharding.summed(prim),
        whole={"ordered", *whole},
    )


# ---- CUDA


def _adapt(prim, name, *avals, rules, rows=None):
    """For updates that are to be sorted first: a function that does, and binds `prim` with their order."""
    order = _order_of(prim, avals)
    shape = (
        avals[0].shape
        if rows is None
        else (
            *avals[1].shape[: rules.batch_dims],
            *avals[0].shape[rules.batch_dims : rules.axis],
            rows,
            *avals[0].shape[rules.axis + 1 :],
        )
    )
    problem = plan.problem_of(name, shape, avals[2 if prim is index_add_p else 0], avals[1], rules)
    if problem is None or order or plan.chosen(problem, rules) != "sort" or len(plan.parts(problem)) > 1:
        return None
    return functools.partial(_in_order, prim)


def _in_order(prim, *operands, rules, **params):
    index, rows = operands[1], params.get("rows", operands[0].shape[rules.axis])
    k = rules.batch_dims
    order = sort.sort_indices(
        index.reshape(size_of(index.shape[:k]), index.shape[k]), rows=rows, wrap=rules.wrap, clip=rules.clip
    )
    return prim.bind(*operands, *order, rules=rules, **params)


def _without_order(*avals, rules):
    if len(avals) == 2:
        return None
    return lambda x, index, *order, rules: index_select_p.bind(x, index, rules=rules)


_register(index_add_p, reference.add, {0: 0})
_register(index_select_p, reference.select)
_register(segment_sum_p, reference.total)
_register(segment_max_p, reference.largest)
_register(segment_min_p, reference.smallest)
