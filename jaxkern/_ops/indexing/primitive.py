"""The primitives of rows at indices: their signatures, batching, binding.

    index_add_p      (x, index, source, alpha, keys, order)   x, with alpha times each row of source added at index
    segment_sum_p    (source, index, keys, order)             the same onto zeros; writes every row once
    segment_max_p    (source, index, keys, order)             the maximum of the rows with the same index, or -inf
    segment_min_p    (source, index, keys, order)             the minimum, or inf
    segment_prod_p   (source, index, keys, order)             the product, or 1
    index_select_p   (x, index, keys, order)                  row index[k] of x, or the fill value

x has the shape (*batch, *outer, rows, *inner), source (*batch, *outer, count, *inner) and index (*batch, count): all of
`outer` and `inner` share the indices. The batch dimensions of source may be 1 if all of the batch shares it. Operands reach
the kernels without a reshape or transpose. index_select_p and segment_sum_p are each other's transposes.

alpha, keys and order are optional. keys and order are the results of `sort_indices` for the index, which then is not sorted
again. index_select_p passes them to its gradient.
"""

import functools
import math

import jax
import jax.numpy as jnp

from jaxkern._core import algorithms, stablehlo, validate
from jaxkern._core.algorithms import pick
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind
from jaxkern._core.signature import Layout, Signature, primitive
from jaxkern._ops.indexing import gather_plan, plan, reference, sharding, sort
from jaxkern._ops.indexing.problem import REDUCTIONS
from jaxkern._ops.indexing.reference import Rules  # noqa: F401

for _op in REDUCTIONS:
    algorithms.register(plan, _op, op=_op)
algorithms.register(gather_plan, "index_select")


def index_add(x, index, source, alpha=None, *order, rules):
    return bind(index_add_p, x, index, source, alpha, *order, rules=_planned(rules, index_add_p))


def index_select(x, index, *order, rules):
    return bind(index_select_p, x, index, *order, rules=_planned(rules, index_select_p))


def segment(prim, source, index, *order, rows, rules):
    return bind(prim, source, index, *order, rows=rows, rules=_planned(rules, prim))


def segment_sum(source, index, *order, rows, rules):
    return segment(segment_sum_p, source, index, *order, rows=rows, rules=rules)


def _planned(rules, prim):
    """Rules with the algorithm that the current context forces on the operation."""
    return rules._replace(plan=algorithms.forced(OPERATIONS[prim]))


# ---- signatures


def _ranks(params):
    rules = params["rules"]
    return {"batch": rules.batch_dims, "outer": rules.axis - rules.batch_dims}


def _grown(params, group, at):
    rules = params["rules"]
    more = rules._replace(axis=rules.axis + (group != "inner"), batch_dims=rules.batch_dims + (group == "batch"))
    return params | {"rules": more}


def _whole(operands, params):
    rows = params["rows"] if "rows" in params else operands.x.shape[params["rules"].axis]
    return {"positions", "rows"} if rows > sharding.LIMIT else {"positions"}


ROWS, SOURCE, SHARED = "T *batch *outer rows *inner", "T *batch *outer count *inner", "T *batch! *outer count *inner"
INDEX, ORDER = "integer *batch count", {"keys?": "uint32 positions", "order?": "uint32 positions"}
# Under vmap, a batch of arrays lies beside the batch dimensions and shares the indices. A batch of indices is one more batch
# dimension, and is sorted separately.
AT_INDICES = {
    "layout": Layout(_ranks, _grown),
    "sizes": lambda operands, params: {"positions": math.prod(operands.index.shape)},
    "dropped": {"batch": ("keys", "order")},
}
_signature = functools.partial(Signature, **AT_INDICES, exact={"rows", "count"}, whole=_whole)
_ADD = _signature({"x": ROWS, "index": INDEX, "source": SHARED, "alpha?": "wide"} | ORDER, ROWS)
_SEGMENT = _signature({"source": SHARED, "index": INDEX} | ORDER, ROWS)
_SELECT = _signature({"x": ROWS, "index": INDEX} | ORDER, SOURCE)


# ---- vmap, where the signature does not tell


def _batch_add(prim, operands, dims, params):
    if dims.alpha is None:
        return None
    return jax.vmap(functools.partial(_add_in_parts, **params), dims[:4])(*operands[:4]), 0


def _add_in_parts(x, index, source, alpha, *, rules):
    """index_add with a factor for each element of a batch."""
    wide = computing(x.dtype)
    rows, k = x.shape[rules.axis], rules.batch_dims
    total = segment_sum(source.astype(wide), index, rows=rows, rules=rules)
    # A row without updates must not change, even if alpha is infinite: 0 * inf is NaN.
    touched = segment_sum(jnp.ones(index.shape, jnp.int32), index, rows=rows, rules=rules._replace(axis=k)) > 0
    touched = touched.reshape(*index.shape[:k], *[1] * (rules.axis - k), rows, *[1] * (x.ndim - rules.axis - 1))
    return jnp.where(touched, (x.astype(wide) + alpha * total).astype(x.dtype), x)


def _batch_select(prim, operands, dims, params):
    """One array, a batch of indices: concatenates the indices."""
    if dims.x is not None or dims.index is None:
        return None
    x, index, rules = operands.x, operands.index, params["rules"]
    axis, k, size = rules.axis, rules.batch_dims, index.shape[dims.index]
    index = validate.mergeable(jnp.moveaxis(index, dims.index, k), 2, k)
    count = index.shape[k + 1]
    y = index_select(x, index.reshape(*index.shape[:k], size * count), rules=rules._replace(sorted=False, unique=False))
    return y.reshape(*y.shape[:axis], size, count, *y.shape[axis + 1 :]), axis


# ---- lowering


def _sorted(op, signature, *operands, rules, rows=None):
    """Sorts the indices, if the algorithm is `sort` and no order is given; see `signature.primitive`."""
    types = signature.named(*operands)
    p = plan.problem_of(op, plan.rows_shape(types, rules, rows), types.source, types.index, rules)
    if p is None or types.order is not None or pick(op, rules.plan, p) != "sort" or len(plan.parts(p)) > 1:
        return None

    def in_order(*operands, rules, rows=None):
        given = signature.named(*operands)
        keys, order = sort.sort_indices(
            given.index.reshape(p.batch, p.count), rows=p.rows, wrap=rules.wrap, clip=rules.clip
        )
        return given._replace(keys=keys, order=order)

    return in_order


def _without_order(x, index, keys, order, *, rules):
    return None if keys is None else lambda x, index, keys, order, *, rules: (x, index, None, None)


# A result of a custom call shares an operand's memory always or never. If x is still needed after an index_add that works in
# place, as an argument that was not donated is, XLA copies x first. Then a kernel that copies rows as it adds reads and
# writes less, so the result is an array of its own. To see this, the lowering rule must not be cached.


def _settled(operands, params):
    """The parameters of an index_add, with where its result lies."""
    rules = params["rules"]
    if rules.copies is not None:
        return params
    return params | {"rules": rules._replace(copies=stablehlo.is_kept(operands[0]))}


OPERATIONS = {}  # the name of the operation of each primitive


def _primitive(op, signature, reference, shard, launches=None, prepare=None, **options):
    prim = primitive(
        f"jaxkern_{op}",
        signature,
        reference,
        makes_nan=False,  # index_select may fill with NaN on purpose
        plan=launches or functools.partial(plan.plan, op),
        shard=shard,
        prepare=prepare or functools.partial(_sorted, op, signature),
        dtypes=plan.DTYPES,
        **options,
    )
    OPERATIONS[prim] = op
    return prim


def _segment_primitive(op, reference, join):
    return _primitive(op, _SEGMENT, reference, functools.partial(sharding.segments, join))


segment_sum_p = _segment_primitive("segment_sum", reference.total, sharding.SUM)
segment_max_p = _segment_primitive("segment_max", reference.largest, sharding.MAXIMUM)
segment_min_p = _segment_primitive("segment_min", reference.smallest, sharding.MINIMUM)
segment_prod_p = _segment_primitive("segment_prod", reference.product, sharding.PRODUCT)
index_add_p = _primitive(
    "index_add",
    _ADD,
    reference.add,
    functools.partial(sharding.add, segment_sum_p),
    batch=_batch_add,
    aliases=lambda prim, operands, params: None if params["rules"].copies else {0: 0},
    settled=_settled,
    cached=False,
)
index_select_p = _primitive(
    "index_select",
    _SELECT,
    reference.select,
    sharding.select,
    gather_plan.index_select,
    _without_order,
    batch=_batch_select,
)
