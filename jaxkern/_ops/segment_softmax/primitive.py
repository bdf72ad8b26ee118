"""The primitives of segment_softmax: their signatures, and what kernels read.

    segment_softmax_p        (data, index, keys, order)    y = exp(data - max) / sum(exp(data - max)) by segment
    segment_softmax_grad_p   (y, g, index, keys, order)    dx = y * (g - sum(y * g)) by segment; 0 where y is 0

The operands are as for the primitives at indices, with the same `Rules`. `rows` is the number of segments. An element of
no segment is 0, and so is a segment that is -inf throughout. keys and order are optional: what `sort_indices` made of the
index, which then is not sorted again.
"""

import functools

import jax.numpy as jnp

from jaxkern._core import algorithms, device
from jaxkern._core.algorithms import pick
from jaxkern._core.primitive import bind
from jaxkern._core.signature import Signature, primitive
from jaxkern._ops.indexing import sort
from jaxkern._ops.indexing.primitive import AT_INDICES, INDEX, ORDER, SOURCE
from jaxkern._ops.indexing.sharding import keeps_order
from jaxkern._ops.segment_softmax import plan, reference, tuning

algorithms.register(plan, "segment_softmax")


def segment_softmax(data, index, *order, rows, rules):
    """Binds the primitive; order: nothing, or the keys and the order of the index."""
    rules = rules._replace(plan=algorithms.forced("segment_softmax"))
    return bind(segment_softmax_p, data, index, *order, rows=rows, rules=rules)


# ---- lowering: kernels take the keys and the order of sorted ids


def _problem(x, rows, rules) -> plan.Problem | None:
    """The problem, or None if there are no kernels for it."""
    if not isinstance(rows, int) or rows == 0 or device.this_device().shared_memory < tuning.SHARED_BYTES:
        return None
    problem = plan.problem_of(x, rows, rules.axis, rules.batch_dims, rules.sorted)
    return problem if plan.fits("sort", problem) else None


def ordered_operands(*types, rows, rules):
    """A function that returns what kernels read; see `signature.primitive`."""
    problem = _problem(types[0], rows, rules)
    if problem is None:
        return None
    algorithm = pick("segment_softmax", rules.plan, problem)

    def ordered(*operands, rows, rules) -> plan.Ordered:
        *arrays, index, keys, order = operands
        flat = index.reshape(problem.batch, problem.count)
        if keys is None and algorithm == "sort":
            keys, order = sort.sort_indices(flat, rows=rows, wrap=False, clip=rules.clip)
        elif keys is None:
            keys = _keys(flat, rows, rules)
        if order is not None and problem.batch > 1 and problem.outer > 1:  # kernels read rows of slice 0 at them
            count, extra = jnp.uint32(problem.count), jnp.uint32((problem.outer - 1) * problem.count)
            order = order + order // count * extra
        return plan.Ordered(tuple(arrays), keys, order)

    return ordered


def in_parts(prim, *types, rows, rules):
    """A function that splits a batch that has more keys than one call can number into several calls, or None."""
    problem = _problem(types[0], rows, rules)
    if problem is None or problem.batch <= plan.most_slices(problem):
        return None
    slices = plan.most_slices(problem)

    def parts(*operands, rows, rules):
        *arrays, index, _, _ = operands
        k, shape = rules.batch_dims, arrays[0].shape
        arrays = [*(a.reshape(-1, *shape[k:]) for a in arrays), index.reshape(-1, problem.count)]
        local = rules._replace(axis=rules.axis - k + 1, batch_dims=1)
        found = [
            bind(prim, *(a[b : b + slices] for a in arrays), rows=rows, rules=local)
            for b in range(0, problem.batch, slices)
        ]
        return jnp.concatenate(found).reshape(shape)

    return parts


def _keys(index, rows, rules):
    """The keys of ascending ids [batch, count], as `sort_indices` defines them.

    A key that is too large belongs to no segment. So 32-bit ids of a single slice serve as keys: read as unsigned, negative
    ids are too large.
    """
    if index.shape[0] == 1 and index.dtype.itemsize == 4 and not rules.clip:
        return index.reshape(-1)
    return sort.keys_of(index, rows, rules)


def _shard(in_jnp, prim, over, *operands, rows, rules):
    """Any dimension may be split. If the rows of data are, devices exchange the maxima and sums of segments."""
    if over["count"]:
        return in_jnp(*operands[:-2], rows=rows, rules=rules, over=over["count"])
    return bind(prim, *(operands if keeps_order(over) else operands[:-2]), rows=rows, rules=rules)


def _primitive(name, arrays, in_jnp, launches):
    return primitive(
        name,
        Signature(
            dict.fromkeys(arrays, SOURCE) | {"index": INDEX} | ORDER,
            SOURCE,
            **AT_INDICES,
            exact={"count"},
            whole={"positions"},
        ),
        in_jnp,
        plan=launches,
        shard=functools.partial(_shard, in_jnp),
        adapt=in_parts,
        prepare=ordered_operands,
        dtypes=plan.DTYPES,
    )


segment_softmax_p = _primitive("jaxkern_segment_softmax", ["data"], reference.softmax, plan.forward)
segment_softmax_grad_p = _primitive("jaxkern_segment_softmax_grad", ["y", "g"], reference.gradient, plan.backward)
