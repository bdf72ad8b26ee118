"""Derivatives of index_add, the segment reductions and index_select, to any order.

`at` is (index,) or (index, keys, order): the indices and their order, which the gradient reuses.
"""

import functools

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jax.sharding import PartitionSpec

from jaxkern._core import compat, validate
from jaxkern._core.autodiff import defvjp
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import set_jvp, set_transpose
from jaxkern._core.signature import distinct
from jaxkern._ops.indexing import reference, sort
from jaxkern._ops.indexing.primitive import (
    index_add,
    index_add_p,
    index_select,
    index_select_p,
    segment,
    segment_max_p,
    segment_min_p,
    segment_prod_p,
    segment_sum,
    segment_sum_p,
)


def _shared(source, index, rules):
    """The batch dimensions that the source is broadcast over."""
    return tuple(d for d in range(rules.batch_dims) if source.shape[d] != index.shape[d])


def _summed(x, dims, dtype):
    return (jnp.sum(x, dims, keepdims=True) if dims else x).astype(dtype)


def _beside(source, g, at, rules):
    """Gathers rows of g; on an explicit mesh, reshards them to match `source`, an array or a type."""
    taken = index_select(g, *at, rules=rules)
    if not _shared(source, at[0], rules):
        return validate.split_like(taken, source)
    # The source is broadcast over the batch dimensions, and the rows may be split along the other axes of the mesh.
    k = rules.batch_dims
    here, own = validate.explicit_spec(taken), validate.explicit_spec(source)[k:]
    batch = distinct((*own, *here[:k]))[len(own) :]
    spec = (*batch, *own)
    return taken if spec == here else jax.sharding.reshard(taken, PartitionSpec(*spec))


def _taken(g, at, source, alpha=None, *, rules):
    """The cotangent of a source of this type: the rows of g that it was added to, times alpha."""
    taken = _beside(source, g, at, rules._replace(fill_nan=False))
    shared = _shared(source, at[0], rules)
    if shared or alpha is not None:
        wide = taken.astype(computing(g.dtype))
        taken = _summed(wide if alpha is None else wide * alpha, shared, g.dtype)
    return validate.split_like(taken, source)


def _given(g, at, x, rules):
    """The cotangent of x: for each row, the sum of the rows of g that selected it."""
    return validate.split_like(segment_sum(g, *at, rows=x.shape[rules.axis], rules=rules), x)


def _alpha_cotangent(g, at, source, rules):
    wide = computing(g.dtype)
    taken = _beside(jax.typeof(source), g, at, rules._replace(fill_nan=False))
    return jnp.sum(taken.astype(wide) * source.astype(wide))


# Forward rules bind the primitive, not the custom_vjp function, which has no derivative itself. Operands whose values the
# backward rules do not need are passed as types, in static arguments.


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _add_vjp(x, at, source, alpha, source_type, rules):
    return index_add(x, at[0], source, alpha, *at[1:], rules=rules)


def _add_forward(x, at, source, alpha, source_type, rules):
    y = index_add(x, at[0], source, alpha, *at[1:], rules=rules)
    return y, (at, None if alpha is None else source, alpha)


def _add_backward(source_type, rules, residuals, g):
    at, source, alpha = residuals
    by_alpha = None if alpha is None else _alpha_cotangent(g, at, source, rules)
    return g, None, _taken(g, at, source_type, alpha, rules=rules), by_alpha


_add_vjp.defvjp(_add_forward, _add_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _select_vjp(x, at, x_type, rules):
    return index_select(x, *at, rules=rules)


_select_vjp.defvjp(
    lambda x, at, x_type, rules: (index_select(x, *at, rules=rules), at),
    lambda x_type, rules, at, g: (_given(g, at, x_type, rules), None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _sum_vjp(source, at, rows, source_type, rules):
    return segment_sum(source, *at, rows=rows, rules=rules)


_sum_vjp.defvjp(
    lambda source, at, rows, source_type, rules: (segment_sum(source, *at, rows=rows, rules=rules), at),
    lambda rows, source_type, rules, at, g: (_taken(g, at, source_type, rules=rules), None),
)


def _extreme_vjp(prim):
    """The derivative of the maximum or minimum: elements that equal it share its gradient equally, as in jnp.max."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
    def f(source, at, rows, rules):
        return segment(prim, source, *at, rows=rows, rules=rules)

    def forward(source, at, rows, rules):
        y = segment(prim, source, *at, rows=rows, rules=rules)
        return y, (y, source, at)

    def backward(rows, rules, residuals, g):
        y, source, at = residuals
        wide = computing(g.dtype)
        select = functools.partial(_beside, jax.typeof(source), at=at)
        winners = (source == select(y, rules=rules._replace(fill_nan=True))).astype(wide)
        sharing = segment_sum(winners, *at, rows=rows, rules=rules)
        share = select(g.astype(wide) / jnp.maximum(sharing, 1), rules=rules._replace(fill_nan=False))
        dx = _summed(winners * share, _shared(source, at[0], rules), g.dtype)
        return validate.split_like(dx, jax.typeof(source)), None

    f.defvjp(forward, backward)
    return lambda source, *at, rows, rules: f(source, at, rows, rules)


defvjp(
    index_add_p,
    lambda x, index, source, alpha, *order, rules: _add_vjp(
        x, (index, *order), source, alpha, jax.typeof(source), rules
    ),
    differentiable=(0, 2, 3),
)
defvjp(index_select_p, lambda x, *at, rules: _select_vjp(x, at, jax.typeof(x), rules), differentiable=(0,))
defvjp(
    segment_sum_p,
    lambda source, *at, rows, rules: _sum_vjp(source, at, rows, jax.typeof(source), rules),
    differentiable=(0,),
)
for _prim in (segment_max_p, segment_min_p):
    defvjp(_prim, _extreme_vjp(_prim), differentiable=(0,))


def _product_jvp(primals, tangents, *, rows, rules):
    source, *at = primals
    y = segment(segment_prod_p, source, *at, rows=rows, rules=rules)
    if type(tangents[0]) is ad.Zero:
        return y, compat.zero_tangent(y)
    count = at[0].shape[rules.batch_dims]
    sort.check_ordered("segment_prod", "rows can be sorted for its derivative", count)
    along = validate.whole(tangents[0], rules.axis)
    source, index = validate.whole(source, rules.axis), validate.whole(at[0], rules.batch_dims)
    f = functools.partial(reference.product_by_scan, index=index, rows=rows, rules=rules)
    return y, validate.split_like(jax.jvp(f, (source,), (along,))[1], jax.typeof(y))


set_jvp(segment_prod_p, _product_jvp)


def _transpose_add(ct, x, index, source, alpha, *order, rules):
    """Transposes with respect to x and source, or with respect to alpha if both are known."""
    operands = (x, index, source, alpha, *order)
    linear = [ad.is_undefined_primal(v) for v in operands]
    if type(ct) is ad.Zero:
        return [ad.Zero(v.aval) if is_linear else None for v, is_linear in zip(operands, linear)]
    cts = [ct if linear[0] else None, *[None] * (len(operands) - 1)]
    if linear[2]:
        cts[2] = _taken(ct, (index, *order), source.aval, alpha, rules=rules)
    if linear[3]:
        if any(linear[:3]):
            raise NotImplementedError("jaxkern.index_add is linear in source and alpha one at a time")
        cts[3] = _alpha_cotangent(ct, (index, *order), source, rules)
    return cts


def _transpose_select(ct, x, *at, rules):
    return [ad.Zero(x.aval) if type(ct) is ad.Zero else _given(ct, at, x.aval, rules), *[None] * len(at)]


def _transpose_sum(ct, source, *at, rows, rules):
    dx = ad.Zero(source.aval) if type(ct) is ad.Zero else _taken(ct, at, source.aval, rules=rules)
    return [dx, *[None] * len(at)]


set_transpose(index_add_p, _transpose_add)
set_transpose(index_select_p, _transpose_select)
set_transpose(segment_sum_p, _transpose_sum)
