"""What runs segment_softmax: sort_indices and launch lists on CUDA, the reference elsewhere."""

import functools

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from jaxkern._core import compat
from jaxkern._core.algorithms import pick
from jaxkern._core.define import lower_to_kernels
from jaxkern._ops.indexing import sort
from jaxkern._ops.segment_softmax import plan, reference, sharding
from jaxkern._ops.segment_softmax.primitive import (
    ordered_grad_p,
    ordered_p,
    segment_softmax_grad_p,
    segment_softmax_p,
    split,
)


def _register(prim, in_jnp, ordered, ordered_plan):
    through = mlir.lower_fun(in_jnp, multiple_results=False)
    mlir.register_lowering(prim, through)
    compat.taylor_rule(prim, in_jnp)

    def on_devices(ctx, operands, params):
        if _problem(prim, *ctx.avals_in, **params) is None:
            return through(ctx, *operands, **params)
        return sharding.partitioned(prim, in_jnp, ctx, operands, **params)

    def adapt(*avals, **params):
        return None if _problem(prim, *avals, **params) is None else functools.partial(_in_order, prim, ordered)

    lower_to_kernels(prim, lambda *types, **params: None, in_jnp, on_devices, adapt=adapt)
    lower_to_kernels(ordered, ordered_plan, reference=None)  # bound only where kernels run


# ---- CUDA


def _problem(prim, *operands, rows, rules) -> plan.Problem | None:
    """The problem if there are kernels for it."""
    (x, *_), index, _ = split(prim, operands)
    if x.dtype.name not in plan.DTYPES or not isinstance(rows, int) or rows == 0 or 0 in x.shape:
        return None
    problem = plan.problem_of(x, rows, rules.axis, rules.batch_dims, rules.sorted)
    return problem if plan.fits("sort", problem) else None


def _in_order(prim, ordered, *operands, rows, rules):
    """The primitive by way of sorted ids and the kernels that take them."""
    arrays, index, order = split(prim, operands)
    k, axis = rules.batch_dims, rules.axis
    problem = _problem(prim, *map(jax.typeof, operands), rows=rows, rules=rules)
    algorithm = pick("segment_softmax", rules.plan, problem)
    flat = index.reshape(problem.batch, problem.count)
    if problem.batch > plan.most_slices(problem):
        return _in_parts(prim, arrays, flat, plan.most_slices(problem), rows, rules)
    if not order:
        if algorithm == "sort":
            order = sort.sort_indices(flat, rows=rows, wrap=False, clip=rules.clip)
        else:
            order = (_keys(flat, rows, rules),)
    keys, *places = order
    if places and problem.batch > 1 and problem.outer > 1:  # kernels read rows of slice 0 at them
        count, extra = jnp.uint32(problem.count), jnp.uint32((problem.outer - 1) * problem.count)
        places = [places[0] + places[0] // count * extra]
    return ordered.bind(*arrays, keys, *places, rows=rows, axis=axis, batch_dims=k)


def _in_parts(prim, arrays, index, slices, rows, rules):
    """A batch of more keys than a call can number: several calls."""
    k = rules.batch_dims
    shape, local = arrays[0].shape, rules._replace(axis=rules.axis - k + 1, batch_dims=1)
    arrays = [a.reshape(-1, *shape[k:]) for a in arrays]
    parts = [
        prim.bind(*(a[b : b + slices] for a in arrays), index[b : b + slices], rows=rows, rules=local)
        for b in range(0, index.shape[0], slices)
    ]
    return jnp.concatenate(parts).reshape(shape)


def _keys(index, rows, rules):
    """The keys of ascending ids [batch, count], as `sort_indices` defines them.

    Any key that is too large is of no segment. So 32-bit ids of a single slice are keys as they are: negative ones are
    too large as unsigned numbers.
    """
    batch = index.shape[0]
    if batch == 1 and index.dtype.itemsize == 4 and not rules.clip:
        return index.reshape(-1)
    row = sort.rows_of(index, rows, rules)
    exists = (row >= 0) & (row < jnp.asarray(rows, row.dtype))
    first = jnp.arange(batch, dtype=jnp.uint32)[:, None] * jnp.uint32(rows)
    return jnp.where(exists, row.astype(jnp.uint32) + first, jnp.uint32(batch * rows)).reshape(-1)


_register(segment_softmax_p, reference.softmax, ordered_p, plan.forward)
_register(segment_softmax_grad_p, reference.gradient, ordered_grad_p, plan.backward)
