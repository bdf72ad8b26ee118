"""The primitives of rows at indices: shapes, batching, binding.

    index_add_p      (x, index, source[, alpha][, keys, order])   x, with alpha times each row of source added at index
    segment_sum_p    (source, index[, keys, order])               the same onto zeros; writes every row once
    segment_max_p    (source, index[, keys, order])               the maximum of the rows with the same index, or -inf
    segment_min_p    (source, index[, keys, order])               the minimum, or inf
    segment_prod_p   (source, index[, keys, order])               the product, or 1
    index_select_p   (x, index[, keys, order])                    row index[k] of x, or the fill value

x has the shape (*lead, rows, *trail), source (*lead, count, *trail) and index (*batch, count). `batch` is the first
dimensions of `lead`; the other dimensions of `lead` share the indices. The batch dimensions of source may be 1 if all of
the batch shares it. Operands reach the kernels without a reshape or transpose. index_select_p and segment_sum_p are each
other's transposes.

keys and order are the results of `sort_indices` for the index, which then is not sorted again. index_select_p passes them
to its gradient.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxkern._core import algorithms, define, partition, validate
from jaxkern._core.algorithms import pick
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind
from jaxkern._ops.indexing import gather_plan, plan, reference, sharding, sort
from jaxkern._ops.indexing.problem import REDUCTIONS
from jaxkern._ops.indexing.reference import Rules, fill_value, greatest, least, parted  # noqa: F401

for _op in REDUCTIONS:
    algorithms.register(plan, _op, op=_op)
algorithms.register(gather_plan, "index_select")


def index_add(x, index, source, *rest, rules):
    return bind(index_add_p, x, index, source, *rest, rules=_planned(rules, index_add_p))


def index_select(x, index, *order, rules):
    return bind(index_select_p, x, index, *order, rules=_planned(rules, index_select_p))


def segment(prim, source, index, *order, rows, rules):
    return bind(prim, source, index, *order, rows=rows, rules=_planned(rules, prim))


def segment_sum(source, index, *order, rows, rules):
    return segment(segment_sum_p, source, index, *order, rows=rows, rules=rules)


def _planned(rules, prim):
    """Rules with the algorithm that the current context forces on the operation."""
    return rules._replace(plan=algorithms.forced(prim.name.removeprefix("jaxkern_")))


# ---- shapes


def _check(name, rows_shape, source_shape, index, order, rules):
    """rows_shape and source_shape: (*lead, rows, *trail) and (*lead, count, *trail)."""
    axis, k = rules.axis, rules.batch_dims
    fits = len(rows_shape) == len(source_shape) and 0 <= k <= axis < len(rows_shape) and index.ndim == k + 1
    if fits:
        whole, part = list(rows_shape), list(source_shape)
        fits = part.pop(axis) == index.shape[k]
        whole.pop(axis)
        fits &= part[k:] == whole[k:] and part[:k] in (whole[:k], [1] * k) and list(index.shape[:k]) == whole[:k]
    if not fits:
        raise ValueError(
            f"jaxkern.{name}: rows of shape {tuple(rows_shape)}, a source of shape {tuple(source_shape)} "
            f"and an index of shape {index.shape} do not fit along axis {axis}, with {k} batch dimensions"
        )
    if any(a.shape != (index.size,) or a.dtype != jnp.uint32 for a in order):
        raise ValueError(
            f"jaxkern.{name}: {', '.join(a.str_short() for a in order)} are no order of {index.str_short()}"
        )


def _along(x, axis, size, index=None):
    """The type of x with another size along the axis, which is sharded like the index if possible, or replicated."""
    spec = [*validate.explicit_spec(x)]
    spec[axis] = None
    if index is not None:
        spec[axis : axis + 1] = unused(validate.explicit_spec(index)[-1:], spec)
    shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
    if x.sharding.mesh.empty:
        return x.update(shape=shape, weak_type=False)
    return x.update(shape=shape, weak_type=False, sharding=NamedSharding(x.sharding.mesh, PartitionSpec(*spec)))


def unused(entries, others):
    """Entries of a PartitionSpec, with None in place of entries that share a mesh axis with `others`."""
    names = lambda entry: {*entry} if isinstance(entry, tuple) else {entry} - {None}
    used = set().union(*map(names, others))
    return [None if names(entry) & used else entry for entry in entries]


def _add_shape(x, index, source, *rest, rules):
    alpha, order = parted(rest)
    _check("index_add", x.shape, source.shape, index, order, rules)
    if source.dtype != x.dtype or any(
        a.shape not in ((), x.shape[: rules.batch_dims]) or a.dtype != computing(x.dtype) for a in alpha
    ):
        raise ValueError(
            f"jaxkern.index_add: operands differ: {x.str_short()}, {source.str_short()}, "
            f"{[a.str_short() for a in alpha]}"
        )
    return x.update(weak_type=False)


def _select_shape(x, index, *order, rules):
    selected = _along(x, rules.axis, index.shape[-1], index)
    _check("index_select", x.shape, selected.shape, index, order, rules)
    return selected


def _segment_shape(name, source, index, *order, rows, rules):
    k = rules.batch_dims
    out = _along(source, rules.axis, rows)
    if source.shape[:k] != index.shape[:k]:  # all 1, and the index is not
        spec = [*index.sharding.spec[:k], *out.sharding.spec[k:]]
        out = out.update(shape=(*index.shape[:k], *out.shape[k:]))
        if not out.sharding.mesh.empty:
            out = out.update(sharding=NamedSharding(out.sharding.mesh, PartitionSpec(*spec)))
    _check(name, out.shape, source.shape, index, order, rules)
    return out


# ---- vmap
#
# A batch of indices becomes a leading batch dimension and is sorted separately. A batch of arrays with shared indices
# keeps its position, after the existing batch dimensions, and joins the dimensions before or after the axis.


def moved(x, d, at, size):
    """Moves batch dimension d of x to `at`; broadcasts x if it has none."""
    if d is not None:
        return jnp.moveaxis(x, d, at)  # a no-op if d == at
    return jnp.broadcast_to(jnp.expand_dims(x, at), (*x.shape[:at], size, *x.shape[at:]))


def _source_in_front(source, d, size, lead, rules):
    """Moves the batch dimension of a source to the front; a source that the batch shares keeps size 1."""
    k = rules.batch_dims
    ones = source.shape[:k] if d is None else jnp.moveaxis(source, d, 0).shape[1 : 1 + k]
    if d is None and all(s == 1 for s in ones):
        return source[None]
    source = moved(source, d, 0, size)
    return jnp.broadcast_to(source, (size, *lead[:k], *source.shape[1 + k :]))


def inner(rules, at):
    """Rules for operands with a new dimension at `at` that shares the indices."""
    return rules._replace(axis=rules.axis + (at <= rules.axis))


def outer(rules):
    return rules._replace(axis=rules.axis + 1, batch_dims=rules.batch_dims + 1)


def size_of(operands, dims):
    return next(x.shape[d] for x, d in zip(operands, dims) if d is not None)


def place(d, rules):
    """The position of a new dimension that lies at d: there, but after the batch dimensions."""
    return max(d, rules.batch_dims)


def shares_order(index_dim, order_dims) -> bool:
    """Whether the whole batch shares the index and the order."""
    return index_dim is None and all(d is None for d in order_dims)


def _batch_add(prim, operands, dims, *, rules):
    (x, index, source, *rest), (dx, di, ds, *ds_rest) = operands, dims
    (alpha, order), (da, do) = parted(rest), parted(ds_rest)
    if da and da[0] is not None:
        return jax.vmap(functools.partial(_add_in_parts, rules=rules), (dx, di, ds, *da))(x, index, source, *alpha), 0
    size = size_of(operands, dims)
    if not shares_order(di, do):
        x, index = moved(x, dx, 0, size), moved(index, di, 0, size)
        source = _source_in_front(source, ds, size, x.shape[1:], rules)
        return index_add(x, index, source, *alpha, rules=outer(rules)), 0
    at = place(dx if dx is not None else ds, rules)
    x, source = moved(x, dx, at, size), moved(source, ds, at, size)
    return index_add(x, index, source, *alpha, *order, rules=inner(rules, at)), at


def _add_in_parts(x, index, source, alpha, *, rules):
    """index_add with a factor for each element of a batch."""
    wide = computing(x.dtype)
    rows, k = x.shape[rules.axis], rules.batch_dims
    total = segment_sum(source.astype(wide), index, rows=rows, rules=rules)
    # A row without updates must not change, even if alpha is infinite: 0 * inf is NaN.
    touched = segment_sum(jnp.ones(index.shape, jnp.int32), index, rows=rows, rules=rules._replace(axis=k)) > 0
    touched = touched.reshape(*index.shape[:k], *[1] * (rules.axis - k), rows, *[1] * (x.ndim - rules.axis - 1))
    return jnp.where(touched, (x.astype(wide) + alpha * total).astype(x.dtype), x)


def _batch_select(prim, operands, dims, *, rules):
    (x, index, *order), (dx, di, *do) = operands, dims
    axis, k = rules.axis, rules.batch_dims
    size = size_of(operands, dims)
    if dx is not None and shares_order(di, do):
        at = place(dx, rules)
        return index_select(moved(x, dx, at, size), index, *order, rules=inner(rules, at)), at
    if dx is not None:
        return index_select(moved(x, dx, 0, size), moved(index, di, 0, size), rules=outer(rules)), 0
    # One array, a batch of indices: concatenate the indices.
    index = validate.mergeable(moved(index, di, k, size), 2, k)
    count = index.shape[k + 1]
    y = index_select(x, index.reshape(*index.shape[:k], size * count), rules=rules._replace(sorted=False, unique=False))
    return y.reshape(*y.shape[:axis], size, count, *y.shape[axis + 1 :]), axis


def _batch_segment(prim, operands, dims, *, rows, rules):
    (source, index, *order), (ds, di, *do) = operands, dims
    size = size_of(operands, dims)
    if ds is not None and shares_order(di, do):
        at = place(ds, rules)
        return segment(prim, moved(source, ds, at, size), index, *order, rows=rows, rules=inner(rules, at)), at
    index = moved(index, di, 0, size)
    source = _source_in_front(source, ds, size, index.shape[1:], rules)
    return segment(prim, source, index, rows=rows, rules=outer(rules)), 0


# ---- lowering


def _partition(prim, ctx, operands, params):
    rules = params["rules"]
    rows = ctx.avals_in[0] if prim is index_select_p else ctx.avals_out[0]
    return partition.lower(
        ctx,
        prim,
        operands,
        params,
        sharding.dims(prim, ctx.avals_in, rules),
        sharding.SHARDS[prim],
        exact={"rows", "count"},
        summed=sharding.summed(prim),
        whole={"ordered", "rows"} if rows.shape[rules.axis] > sharding.LIMIT else {"ordered"},
    )


def _adapt(prim, *avals, rules, rows=None):
    """A function that sorts the indices and binds `prim` with their order, if the algorithm is `sort`; else None."""
    first, index, *rest = avals
    source, *rest = rest if rows is None else [first, *rest]
    k, axis = rules.batch_dims, rules.axis
    shape = first.shape if rows is None else (*index.shape[:k], *source.shape[k:axis], rows, *source.shape[axis + 1 :])
    name = prim.name.removeprefix("jaxkern_")
    problem = plan.problem_of(name, shape, source, index, rules)
    if problem is None or parted(rest)[1] or pick(name, rules.plan, problem) != "sort" or len(plan.parts(problem)) > 1:
        return None
    return functools.partial(_in_order, prim)


def _in_order(prim, *operands, rules, **params):
    index, rows = operands[1], params.get("rows", operands[0].shape[rules.axis])
    flat = index.reshape(define.size_of(index.shape[: rules.batch_dims]), index.shape[rules.batch_dims])
    order = sort.sort_indices(flat, rows=rows, wrap=rules.wrap, clip=rules.clip)
    return prim.bind(*operands, *order, rules=rules, **params)


def _without_order(prim, *avals, rules):
    if len(avals) == 2:
        return None
    return lambda x, index, *order, rules: prim.bind(x, index, rules=rules)


def _primitive(name, shape, batch, reference, launches=None, adapt=_adapt, **options):
    return define.primitive(
        f"jaxkern_{name}",
        shape,
        batch,
        reference,
        makes_nan=False,  # index_select may fill with NaN on purpose
        plan=launches or functools.partial(plan.plan, name),
        partition=_partition,
        adapt=adapt,
        dtypes=plan.DTYPES,
        **options,
    )


def _segment_primitive(name, reference):
    return _primitive(name, functools.partial(_segment_shape, name), _batch_segment, reference)


index_add_p = _primitive("index_add", _add_shape, _batch_add, reference.add, aliases={0: 0})
index_select_p = _primitive(
    "index_select", _select_shape, _batch_select, reference.select, gather_plan.index_select, _without_order
)
segment_sum_p = _segment_primitive("segment_sum", reference.total)
segment_max_p = _segment_primitive("segment_max", reference.largest)
segment_min_p = _segment_primitive("segment_min", reference.smallest)
segment_prod_p = _segment_primitive("segment_prod", reference.product)
SEGMENT = (segment_sum_p, segment_max_p, segment_min_p, segment_prod_p)

sharding.SHARDS.update({prim: functools.partial(sharding.segments, prim) for prim in SEGMENT})
sharding.SHARDS[index_add_p] = functools.partial(sharding.add, index_add_p, segment_sum_p)
sharding.SHARDS[index_select_p] = functools.partial(sharding.select, index_select_p)
