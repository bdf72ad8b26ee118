"""The primitives of segment_softmax: shapes, batching, binding.

    segment_softmax_p        (data, index[, keys, order])    y = exp(data - max) / sum(exp(data - max)) by segment
    segment_softmax_grad_p   (y, g, index[, keys, order])    dx = y * (g - sum(y * g)) by segment; 0 where y is 0

data, y, g and the result have the shape (*lead, count, *trail) and index (*batch, count), as for `indexing.Rules`,
which these take too: batch is the first dimensions of lead, and the rest of lead shares its indices. `rows` is the
number of segments. An element of no segment is 0, and so is a segment that is -inf throughout. keys and order are what
`sort_indices` made of the index, which kernels then do not sort again.

On CUDA ids are sorted first. Primitives of the same names then take (data, keys[, order]) or (y, g, keys[, order]).
"""

import functools

import jax
import jax.numpy as jnp

from jaxkern._core import algorithms, define, device
from jaxkern._core.algorithms import pick
from jaxkern._core.primitive import bind
from jaxkern._ops.indexing import primitive as indexing
from jaxkern._ops.indexing import sort
from jaxkern._ops.segment_softmax import plan, reference, sharding

algorithms.register(plan, "segment_softmax")


def segment_softmax(data, index, *order, rows, rules):
    """Binds the primitive; order: nothing, or the keys and the order of the index."""
    rules = rules._replace(plan=algorithms.forced("segment_softmax"))
    return bind(segment_softmax_p, data, index, *order, rows=rows, rules=rules)


def split(name, operands):
    """(arrays, index, order) of the operands of the primitive of this name."""
    n = 2 if name.endswith("_grad") else 1
    return operands[:n], operands[n], operands[n + 1 :]


def _shape(name, *operands, rows, rules):
    arrays, index, order = split(name, operands)
    x, axis, k = arrays[0], rules.axis, rules.batch_dims
    if not (
        0 <= k <= axis < x.ndim
        and index.shape == (*x.shape[:k], x.shape[axis])
        and all(a.shape == x.shape and a.dtype == x.dtype for a in arrays)
        and all(a.size == index.size and a.ndim == 1 and a.dtype == "uint32" for a in order)
    ):
        types = ", ".join(a.str_short() for a in operands)
        raise ValueError(f"{name}: {types} do not fit along axis {axis}, with {k} batch dimensions")
    return x.update(weak_type=False)


def _batch(prim, operands, dims, *, rows, rules):
    """A batch of indices becomes a leading batch dimension; a batch of arrays alone stays after the batch dimensions."""
    arrays, index, order = split(prim.name, operands)
    at, di, of_order = split(prim.name, dims)
    size = indexing.size_of(operands, dims)
    if di is not None or any(d is not None for d in of_order):
        # The order is dropped: its keys and positions do not account for the batch.
        arrays = [indexing.moved(a, d, 0, size) for a, d in zip(arrays, at)]
        return bind(prim, *arrays, indexing.moved(index, di, 0, size), rows=rows, rules=indexing.outer(rules)), 0
    place = indexing.place(next(d for d in at if d is not None), rules)
    arrays = [indexing.moved(a, d, place, size) for a, d in zip(arrays, at)]
    return bind(prim, *arrays, index, *order, rows=rows, rules=indexing.inner(rules, place)), place


# ---- lowering: kernels take the keys and the order of sorted ids


def _problem(prim, *operands, rows, rules) -> plan.Problem | None:
    """The problem, or None if there are no kernels for it."""
    (x, *_), index, _ = split(prim.name, operands)
    if not isinstance(rows, int) or rows == 0:
        return None
    problem = plan.problem_of(x, rows, rules.axis, rules.batch_dims, rules.sorted)
    return problem if plan.fits("sort", problem) else None


def _in_order(prim, ordered, *operands, rows, rules):
    """Computes the primitive with sorted ids and the kernels that take them."""
    arrays, index, order = split(prim.name, operands)
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
    """Splits a batch that has more keys than one call can number into several calls."""
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

    A key that is too large belongs to no segment. So 32-bit ids of a single slice serve as keys: read as unsigned, negative
    ids are too large.
    """
    batch = index.shape[0]
    if batch == 1 and index.dtype.itemsize == 4 and not rules.clip:
        return index.reshape(-1)
    row = sort.rows_of(index, rows, rules)
    exists = (row >= 0) & (row < jnp.asarray(rows, row.dtype))
    first = jnp.arange(batch, dtype=jnp.uint32)[:, None] * jnp.uint32(rows)
    return jnp.where(exists, row.astype(jnp.uint32) + first, jnp.uint32(batch * rows)).reshape(-1)


def _partition(prim, ctx, operands, params):
    if _problem(prim, *ctx.avals_in, **params) is None:
        return None
    arrays, index, _ = split(prim.name, operands)  # an order is valid only for all rows
    return sharding.partitioned(prim, REFERENCES[prim.name], ctx, [*arrays, index], **params)


def _adapt(prim, *avals, **params):
    if _problem(prim, *avals, **params) is None or device.this_device().shared_memory < plan.SHARED_BYTES:
        return None
    return functools.partial(_in_order, prim, ORDERED[prim.name])


REFERENCES = {"jaxkern_segment_softmax": reference.softmax, "jaxkern_segment_softmax_grad": reference.gradient}
# These have the name of the public primitive in programs, and are bound by its lowering to kernels.
ORDERED = {
    name: define.primitive(name, lambda x, *operands, rows, axis, batch_dims: x.update(weak_type=False), plan=launches)
    for name, launches in zip(REFERENCES, (plan.forward, plan.backward))
}
segment_softmax_p, segment_softmax_grad_p = (
    define.primitive(
        name,
        functools.partial(_shape, name),
        _batch,
        in_jnp,
        plan=lambda *types, **params: None,  # see _adapt
        partition=_partition,
        adapt=_adapt,
        dtypes=plan.DTYPES,
    )
    for name, in_jnp in REFERENCES.items()
)
