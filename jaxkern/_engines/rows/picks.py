"""Picks of one element of each row, products of vectors and reductions of few elements, in terms of rows.

Most functions here take an equation and the shapes of its operands, and return what the equation computes as a function of
arrays that `Program` can read, or None if they do not know it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxkern._engines.jaxpr import Constant


def element_at(hit, x, axes):
    """The elements of x along these axes where hit is true, which is one, to the bit."""
    if x.dtype == jnp.bool_:
        return lax.reduce_or(hit & x, axes)
    # The maximum of an element and of the least number is the element.
    least = -np.inf if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.iinfo(x.dtype).min
    return lax.reduce_max(jnp.where(hit, x, np.asarray(least, x.dtype)), axes)


def _element(x, index, along, missing=None):
    """The elements of x at an index along a dimension, which stays with size 1. missing: where there is no such element."""
    hit = lax.broadcasted_iota(index.dtype, x.shape, along) == index
    y = lax.expand_dims(element_at(hit, x, (along,)), (along,))
    inside = (index >= 0) & (index < x.shape[along])
    return jnp.where(inside, y, np.asarray(0 if missing is None else missing, x.dtype))


def _gather(e, shapes, of_index):
    mode, numbers = e.params["mode"], e.params["dimension_numbers"]
    found = _picked(shapes[0], e.params["slice_sizes"], numbers, of_index, numbers.offset_dims, e.outvars[0].aval.shape)
    if found is None:
        return None
    along, index_shape = found
    missing, dtype = e.params["fill_value"], e.outvars[0].aval.dtype
    if missing is None and mode == lax.GatherScatterMode.FILL_OR_DROP:
        kind = np.nan if jnp.issubdtype(dtype, jnp.inexact) else None
        if kind is None and dtype != jnp.bool_:
            kind = jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.iinfo(dtype).max
        missing = True if kind is None else kind

    def pick(x, index):
        index = index.reshape(index_shape)
        if mode == lax.GatherScatterMode.CLIP:
            index = jnp.clip(index, 0, x.shape[along] - 1)
        return [_element(x, index, along, missing).reshape(e.outvars[0].aval.shape)]

    return pick


def _scatter(e, shapes, of_index):
    """`lax.scatter_add` of one number to each row, the derivative of a pick."""
    numbers = e.params["dimension_numbers"]
    window, windows = iter(numbers.update_window_dims), numbers.inserted_window_dims
    absent = (*windows, *getattr(numbers, "operand_batching_dims", ()))
    sizes = [1 if k in absent else shapes[2][next(window)] for k in range(len(shapes[0]))]
    found = _picked(shapes[0], sizes, numbers, of_index, numbers.update_window_dims, shapes[2])
    if found is None:
        return None
    along, index_shape = found

    def place(x, index, update):
        index = index.reshape(index_shape)
        if e.params["mode"] == lax.GatherScatterMode.CLIP:
            index = jnp.clip(index, 0, x.shape[along] - 1)
        update = update.reshape(tuple(1 if k == along else n for k, n in enumerate(x.shape)))
        return [x + jnp.where(lax.broadcasted_iota(index.dtype, x.shape, along) == index, update, 0)]

    return place


def _picked(shape, sizes, numbers, of_index, offsets, out):
    """(dimension that is indexed, shape of the indices in all dimensions), or None if a row has not one index.

    of_index: the dimension of x that each dimension of the indices is, and last the dimension of x that is indexed; see
        `without_places`. sizes: of slices. offsets: the dimensions of `out`, the shape of picked elements, that are slices'.
    """
    if of_index is None:
        return None
    *of_index, along = of_index
    batching = tuple(getattr(numbers, "operand_batching_dims", ()))
    collapsed = getattr(numbers, "collapsed_slice_dims", None) or getattr(numbers, "inserted_window_dims", ())
    slices = iter([k for k in range(len(shape)) if k not in (*batching, *collapsed)])
    rest = iter(of_index)
    order = [next(slices if j in offsets else rest) for j in range(len(out))]
    real = [k for k, n in zip(order, out) if n != 1]
    if None in real or real != sorted(real) or sizes[along] != 1:
        return None
    if any(sizes[k] != n for k, n in enumerate(shape) if k != along and k not in of_index):
        return None
    return along, tuple(n if k in of_index else 1 for k, n in enumerate(shape))


def without_places(e, operands, parts, steps):
    """The operands, and for a gather or a scatter what the dimensions of its indices are; see `_picked`.

    Indices of several columns become the one column that is no iota: `x[jnp.arange(n), labels]` picks in each row.
    """
    name = e.primitive.name
    if name not in ("gather", "scatter-add", "scatter_add"):
        return (operands,)
    numbers, index = e.params["dimension_numbers"], operands[1]
    gathers = name == "gather"
    indexed = list(numbers.start_index_map if gathers else numbers.scatter_dims_to_operand_dims)
    batched = getattr(numbers, "start_indices_batching_dims" if gathers else "scatter_indices_batching_dims", ())
    of_index = [None] * (len(index.aval.shape) - 1)
    for k, d in zip(batched, getattr(numbers, "operand_batching_dims", ())):
        of_index[k] = d
    if len(indexed) > 1:
        columns, axis = parts.get(index, ((), 0))
        made = {v: step for step in steps for v in step.results}
        if len(columns) != len(indexed) or axis != len(of_index):
            return operands, None
        labels = dict(zip(indexed, columns))
        for d, column in list(labels.items()):
            place = _place_of(column, made)
            if len(labels) > 1 and place is not None and column.aval.shape[place] == operands[0].aval.shape[d]:
                of_index[place] = d
                del labels[d]
        indexed, columns = list(labels), list(labels.values())
        operands = [operands[0], columns[0], *operands[2:]]
    return operands, [*of_index, *indexed] if len(indexed) == 1 else None


def _place_of(value, made):
    """The dimension in which an integer array counts from 0, and is the same in the others; None if there is none.

    made: {value: the step that computes it}.
    """
    step = made.get(value)
    if step is None:
        return None
    if step.name == "iota":
        return step.params["dimension"]
    if step.name == "select_n":  # a negative index, counted from the end, as jnp writes it
        test = made.get(step.operands[0])
        counts = test is not None and test.name == "lt" and test.operands[0] is step.operands[1]
        zero = counts and isinstance(test.operands[1], Constant) and not test.operands[1].value.any()
        return _place_of(step.operands[1], made) if zero else None
    if step.name not in ("broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "expand_dims"):
        return None
    at = _place_of(step.operands[0], made)
    if at is None or step.name == "convert_element_type":
        return at
    shape, out = step.operands[0].aval.shape, value.aval.shape
    if step.name == "broadcast_in_dim":
        return (
            step.params["broadcast_dimensions"][at]
            if out[step.params["broadcast_dimensions"][at]] == shape[at]
            else None
        )
    real = [[k for k, n in enumerate(s) if n != 1] for s in (shape, out)]
    return real[1][real[0].index(at)] if len(real[0]) == len(real[1]) and at in real[0] else None


def _slice(e, shapes):
    (shape,), out = shapes, e.outvars[0].aval.shape
    cut = [k for k, (n, m) in enumerate(zip(shape, out)) if n != m]
    if len(cut) > 1 or any(out[k] != 1 for k in cut):
        return None
    start = e.params["start_indices"]
    return lambda x: [_element(x, jnp.int32(start[cut[0]]), cut[0]) if cut else x]


def _pad(e, shapes):
    shape, config = shapes[0], e.params["padding_config"]
    cut = [k for k, c in enumerate(config) if any(c)]
    if len(cut) != 1 or shape[cut[0]] != 1 or min(config[cut[0]]) < 0:
        return None
    at, out = config[cut[0]][0], e.outvars[0].aval.shape
    return lambda x, value: [jnp.where(lax.broadcasted_iota(jnp.int32, out, cut[0]) == int(at), x, value)]


def _dynamic_slice(e, shapes):
    shape, out = shapes[0], e.outvars[0].aval.shape
    cut = [k for k, (n, m) in enumerate(zip(shape, out)) if n != m]
    if len(cut) > 1 or any(out[k] != 1 for k in cut):
        return None
    return lambda x, *at: [_element(x, jnp.clip(at[cut[0]], 0, shape[cut[0]] - 1), cut[0]) if cut else x]


def _dynamic_update_slice(e, shapes):
    shape, own = shapes[:2]
    cut = [k for k, (n, m) in enumerate(zip(shape, own)) if n != m]
    if len(cut) > 1 or any(own[k] != 1 for k in cut):
        return None

    def update(x, y, *at):
        if not cut:
            return [y]
        index = jnp.clip(at[cut[0]], 0, shape[cut[0]] - 1)
        return [jnp.where(lax.broadcasted_iota(index.dtype, shape, cut[0]) == index, y, x)]

    return update


def _dot_general(e, shapes):
    """A product of elements and a sum, unless both sides have dimensions of their own and some are contracted."""
    contracted, batch = e.params["dimension_numbers"]
    free = [[k for k in range(len(n)) if k not in (*c, *b)] for n, c, b in zip(shapes, contracted, batch)]
    if all(free) and contracted[0]:
        return None
    dtype = e.outvars[0].aval.dtype
    # The product has dimensions of the batch, free ones of the left, free ones of the right, contracted ones.
    ends = np.cumsum([len(batch[0]), len(free[0]), len(free[1]), len(contracted[0])])
    spans = [
        range(end - n, end) for end, n in zip(ends, (len(batch[0]), len(free[0]), len(free[1]), len(contracted[0])))
    ]

    def factor(x, side):
        order = (*batch[side], *free[side], *contracted[side])
        at = (*spans[0], *spans[1 + side], *spans[3])
        shape = dict(zip(at, (x.shape[k] for k in order)))
        x = x.astype(dtype).transpose(order)
        return lax.broadcast_in_dim(x, [shape.get(k, 1) for k in range(ends[-1])], at)

    return lambda x, y: [lax.reduce_sum(factor(x, 0) * factor(y, 1), tuple(spans[3]))]


def of_parts(e, shapes):
    """A reduction over the axis along which arrays were put together."""
    out, name = e.outvars[0].aval, e.primitive.name
    if any(np.prod(n) != np.prod(out.shape) for n in shapes) or name == "reduce":
        return None

    def reduced(*parts):
        best, *parts = [p.reshape(out.shape) for p in parts]
        if name not in ("argmax", "argmin"):
            f = {"reduce_sum": lax.add, "reduce_max": lax.max, "reduce_min": lax.min, "reduce_prod": lax.mul}.get(name)
            f = f or {"reduce_and": lax.bitwise_and, "reduce_or": lax.bitwise_or, "reduce_xor": lax.bitwise_xor}[name]
            for p in parts:
                best = f(best, p)
            return [best]
        at = jnp.zeros(out.shape, out.dtype)
        for k, p in enumerate(parts, 1):
            takes = lax.gt(p, best) if name == "argmax" else lax.lt(p, best)
            if jnp.issubdtype(p.dtype, jnp.inexact):
                takes |= (p != p) & (best == best)
            best, at = jnp.where(takes, p, best), jnp.where(takes, np.asarray(k, out.dtype), at)
        return [at]

    return reduced


REWRITTEN = {
    "gather": _gather,
    "scatter-add": _scatter,
    "scatter_add": _scatter,
    "slice": _slice,
    "pad": _pad,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "dot_general": _dot_general,
}
PICKS = frozenset(REWRITTEN) - {"dot_general"}


def of_one_element(e, _):
    """A reduction of one element each as an elementwise function."""
    shapes = [v.aval.shape for v in e.outvars]
    if e.primitive.name != "reduce":
        return lambda x: [jnp.zeros(shapes[0], e.outvars[0].aval.dtype)]
    closed = e.params["jaxpr"]
    closed = closed if hasattr(closed, "consts") else ClosedJaxpr(closed, e.params["consts"])
    combine, count = jaxpr_as_fun(closed), len(shapes)

    def reduced(*xs):
        f = lambda *scalars: combine(*xs[count:], *scalars)
        for _ in xs[0].shape:
            f = jax.vmap(f)
        return [y.reshape(n) for y, n in zip(f(*xs[:count]), shapes)]

    return reduced
