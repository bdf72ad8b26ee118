"""The primitives of segment_softmax: shapes, batching, binding.

    segment_softmax_p        (data, index[, keys, order])    y = exp(data - max) / sum(exp(data - max)) by segment
    segment_softmax_grad_p   (y, g, index[, keys, order])    dx = y * (g - sum(y * g)) by segment; 0 where y is 0

data, y, g and the result have the shape (*lead, count, *trail) and index (*batch, count), as for `indexing.Rules`,
which these take too: batch is the first dimensions of lead, and the rest of lead shares its indices. `rows` is the
number of segments. An element of no segment is 0, and so is a segment of nothing but -inf. keys and order are what
`sort_indices` made of the index, which kernels then do not sort again.

    ordered_p, ordered_grad_p   (data, keys[, order])    what kernels run: see plan.py
"""

import functools

from jax.extend.core import Primitive
from jax.interpreters import batching

from jaxkern._core import algorithms, compat
from jaxkern._core.primitive import bind, evaluate
from jaxkern._ops.indexing import primitive as indexing
from jaxkern._ops.segment_softmax import plan

algorithms.register(plan, "segment_softmax")


def segment_softmax(data, index, *order, rows, rules):
    """Binds the primitive; order: nothing, or the keys and the order of the index."""
    rules = rules._replace(plan=algorithms.forced("segment_softmax"))
    return bind(segment_softmax_p, data, index, *order, rows=rows, rules=rules)


def split(prim, operands):
    """(arrays, index, order) of the operands of a primitive."""
    n = 2 if prim is segment_softmax_grad_p else 1
    return operands[:n], operands[n], operands[n + 1 :]


def _shape(prim, *operands, rows, rules):
    arrays, index, order = split(prim, operands)
    x, axis, k = arrays[0], rules.axis, rules.batch_dims
    if not (
        0 <= k <= axis < x.ndim
        and index.shape == (*x.shape[:k], x.shape[axis])
        and all(a.shape == x.shape and a.dtype == x.dtype for a in arrays)
        and all(a.size == index.size and a.ndim == 1 and a.dtype == "uint32" for a in order)
    ):
        types = ", ".join(a.str_short() for a in operands)
        raise ValueError(f"{prim.name}: {types} do not fit along axis {axis}, with {k} batch dimensions")
    return x.update(weak_type=False)


def _batch(prim, operands, dims, *, rows, rules):
    """A batch of indices becomes a batch dimension in front; one of arrays alone a dimension anywhere behind those."""
    arrays, index, order = split(prim, operands)
    at, di, of_order = split(prim, dims)
    size = indexing.size_of(operands, dims)
    if di is not None or any(d is not None for d in of_order):
        # Without the order, whose keys and positions lack their place in the batch.
        arrays = [indexing.moved(a, d, 0, size) for a, d in zip(arrays, at)]
        return bind(prim, *arrays, indexing.moved(index, di, 0, size), rows=rows, rules=indexing.outer(rules)), 0
    place = indexing.place(next(d for d in at if d is not None), rules)
    arrays = [indexing.moved(a, d, place, size) for a, d in zip(arrays, at)]
    return bind(prim, *arrays, index, *order, rows=rows, rules=indexing.inner(rules, place)), place


def _primitive(name):
    prim = Primitive(name)
    prim.def_abstract_eval(functools.partial(_shape, prim))
    prim.def_impl(functools.partial(evaluate, prim))
    batching.primitive_batchers[prim] = functools.partial(_batch, prim)
    compat.check_nans(prim)
    return prim


def _ordered_primitive(name):
    """Called by its name in programs; bound only where the public primitive of this name is lowered."""
    prim = Primitive(name)
    prim.def_abstract_eval(lambda x, *operands, rows, axis, batch_dims: x.update(weak_type=False))
    return prim


segment_softmax_p = _primitive("jaxkern_segment_softmax")
segment_softmax_grad_p = _primitive("jaxkern_segment_softmax_grad")
ordered_p = _ordered_primitive(segment_softmax_p.name)
ordered_grad_p = _ordered_primitive(segment_softmax_grad_p.name)
