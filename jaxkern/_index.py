"""The primitives of the index_add family: shapes, batching, derivatives.

    index_add_p      (x, index, source[, alpha])   x, plus alpha times each row of source, at index
    segment_sum_p    (source, index)               the same onto zeros: every row is written once
    segment_max_p    (source, index)               the largest of the rows that go to a row, or -inf
    segment_min_p    (source, index)               the smallest, or inf
    index_select_p   (x, index)                    row index[k] of x, or the fill value

with x of shape (*lead, rows, *trail) and source of (*lead, count, *trail). index is (*batch, count), where
batch is the first dimensions of lead: what is left of lead shares its indices. The source's first
dimensions may be 1 where it is the same for all of the batch. Nothing is ever reshaped or transposed on
the way to a kernel. index_select_p and segment_sum_p are each other's transposes.
"""

import functools
import typing

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.sharding import NamedSharding, PartitionSpec

from jaxkern import tiers
from jaxkern._core import validate
from jaxkern._core.autodiff import defvjp
from jaxkern._core.primitive import bind, evaluate


class Rules(typing.NamedTuple):
    """What all of the family are told, in the words of the FFI handlers' attributes."""

    axis: int
    batch_dims: int = 0
    wrap: bool = False  # negative indices count from the end
    clip: bool = False  # what is out of range goes to the nearest row; else nowhere
    sorted: bool = False
    unique: bool = False
    deterministic: bool = True
    fill_nan: bool = False  # index_select: what is out of range is NaN, or an integer's limit; else 0
    plan: str = "auto"


def index_add(x, index, source, *alpha, rules):
    return bind(index_add_p, x, index, source, *alpha, rules=_planned(rules, "index_add"))


def index_select(x, index, *, rules):
    return bind(index_select_p, x, index, rules=_planned(rules, "index_select"))


def segment(prim, source, index, *, rows, rules):
    return bind(prim, source, index, rows=rows, rules=_planned(rules, "segment"))


def segment_sum(source, index, *, rows, rules):
    return segment(segment_sum_p, source, index, rows=rows, rules=rules)


def _planned(rules, operation):
    """With the plan that is forced here and now, if the operation is one that it is for."""
    own = [p for p in tiers.PLANS if (p == "gather") == (operation == "index_select")]
    return rules._replace(plan=tiers.forced(own))


def computing(dtype):
    """What sums and alpha are held in: 16 bits and less are too few."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if narrow else jnp.dtype(dtype)


def least(dtype):
    if jnp.issubdtype(dtype, jnp.inexact):
        return -jnp.inf
    return False if dtype == jnp.bool_ else jnp.iinfo(dtype).min


def greatest(dtype):
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.inf
    return True if dtype == jnp.bool_ else jnp.iinfo(dtype).max


def fill_value(dtype):
    """What `jnp.take` gives for an index that is out of range."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    return least(dtype) if jnp.issubdtype(dtype, jnp.signedinteger) else greatest(dtype)


# ---- shapes


def _check(name, rows_shape, source_shape, index, rules):
    """rows_shape and source_shape: (*lead, rows, *trail) and (*lead, count, *trail)."""
    axis, k = rules.axis, rules.batch_dims
    fits = len(rows_shape) == len(source_shape) and 0 <= k <= axis < len(rows_shape) and index.ndim == k + 1
    if fits:
        whole, part = list(rows_shape), list(source_shape)
        fits = part.pop(axis) == index.shape[k]
        whole.pop(axis)
        fits &= part[k:] == whole[k:] and part[:k] in (whole[:k], [1] * k) and list(index.shape[:k]) == whole[:k]
    if not fits:
        raise ValueError(f"jaxkern.{name}: rows of shape {tuple(rows_shape)}, a source of shape {tuple(source_shape)} "
                         f"and an index of shape {index.shape} do not fit along axis {axis}, with {k} batch dimensions")


def _along(x, axis, size, index=None):
    """The type of x with another size along the axis, which is sharded as the index is, or not at all."""
    spec = [*validate.explicit_spec(x)]
    spec[axis] = None
    if index is not None:
        spec[axis : axis + 1] = _unused(validate.explicit_spec(index)[-1:], spec)
    shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
    if x.sharding.mesh.empty:
        return x.update(shape=shape, weak_type=False)
    return x.update(shape=shape, weak_type=False, sharding=NamedSharding(x.sharding.mesh, PartitionSpec(*spec)))


def _unused(entries, others):
    """Entries of a sharding's spec, None for those that name an axis of the mesh which the others name too."""
    names = lambda entry: {*entry} if isinstance(entry, tuple) else {entry} - {None}
    used = set().union(*map(names, others))
    return [None if names(entry) & used else entry for entry in entries]


def _add_shape(x, index, source, *alpha, rules):
    _check("index_add", x.shape, source.shape, index, rules)
    if source.dtype != x.dtype or any(
            a.shape not in ((), x.shape[: rules.batch_dims]) or a.dtype != computing(x.dtype) for a in alpha):
        raise ValueError(f"jaxkern.index_add: operands differ: {x.str_short()}, {source.str_short()}, "
                         f"{[a.str_short() for a in alpha]}")
    return x.update(weak_type=False)


def _select_shape(x, index, *, rules):
    selected = _along(x, rules.axis, index.shape[-1], index)
    _check("index_select", x.shape, selected.shape, index, rules)
    return selected


def _segment_shape(name, source, index, *, rows, rules):
    k = rules.batch_dims
    out = _along(source, rules.axis, rows)
    if source.shape[:k] != index.shape[:k]:  # all 1, and the index is not
        spec = [*index.sharding.spec[:k], *out.sharding.spec[k:]]
        out = out.update(shape=(*index.shape[:k], *out.shape[k:]))
        if not out.sharding.mesh.empty:
            out = out.update(sharding=NamedSharding(out.sharding.mesh, PartitionSpec(*spec)))
    _check(name, out.shape, source.shape, index, rules)
    return out


def _primitive(name, shape_rule):
    prim = Primitive(f"jaxkern_{name}")
    prim.def_abstract_eval(shape_rule)
    prim.def_impl(functools.partial(evaluate, prim))
    return prim


index_add_p = _primitive("index_add", _add_shape)
index_select_p = _primitive("index_select", _select_shape)
segment_sum_p = _primitive("segment_sum", functools.partial(_segment_shape, "segment_sum"))
segment_max_p = _primitive("segment_max", functools.partial(_segment_shape, "segment_max"))
segment_min_p = _primitive("segment_min", functools.partial(_segment_shape, "segment_min"))
SEGMENT = (segment_sum_p, segment_max_p, segment_min_p)


# ---- vmap
#
# A batch of indices becomes a batch dimension in front. A batch of arrays under the same indices joins the
# dimensions before or after the axis, wherever it lies, behind the batch dimensions that there are.


def moved(x, d, at, size):
    """Batch dimension d of x at `at`; x is repeated if it has none."""
    if d is not None:
        return jnp.moveaxis(x, d, at)  # nothing at all when d == at
    return jnp.broadcast_to(jnp.expand_dims(x, at), (*x.shape[:at], size, *x.shape[at:]))


def _source_in_front(source, d, size, lead, rules):
    """The same for a source under a batch of indices, which need not be repeated."""
    k = rules.batch_dims
    ones = source.shape[:k] if d is None else jnp.moveaxis(source, d, 0).shape[1 : 1 + k]
    if d is None and all(s == 1 for s in ones):
        return source[None]
    source = moved(source, d, 0, size)
    return jnp.broadcast_to(source, (size, *lead[:k], *source.shape[1 + k :]))


def inner(rules, at):
    """Rules of operands that have a new dimension at `at`, under the same indices."""
    return rules._replace(axis=rules.axis + (at <= rules.axis))


def outer(rules):
    return rules._replace(axis=rules.axis + 1, batch_dims=rules.batch_dims + 1)


def size_of(operands, dims):
    return next(x.shape[d] for x, d in zip(operands, dims) if d is not None)


def place(d, rules):
    """Where a batch that lies at d goes: there, but not among the batch dimensions."""
    return max(d, rules.batch_dims)


def _batch_add(operands, dims, *, rules):
    if len(operands) == 4 and dims[3] is not None:
        return jax.vmap(functools.partial(_add_in_parts, rules=rules), dims)(*operands), 0
    x, index, source, *alpha = operands
    dx, di, ds, *_ = dims
    size = size_of(operands, dims)
    if di is not None:
        x, index = moved(x, dx, 0, size), moved(index, di, 0, size)
        source = _source_in_front(source, ds, size, x.shape[1:], rules)
        return index_add(x, index, source, *alpha, rules=outer(rules)), 0
    at = place(dx if dx is not None else ds, rules)
    x, source = moved(x, dx, at, size), moved(source, ds, at, size)
    return index_add(x, index, source, *alpha, rules=inner(rules, at)), at


def _add_in_parts(x, index, source, alpha, *, rules):
    """index_add with a factor that may differ from one element of a batch to the next."""
    wide = computing(x.dtype)
    rows, k = x.shape[rules.axis], rules.batch_dims
    total = segment_sum(source.astype(wide), index, rows=rows, rules=rules)
    # A row that nothing goes to stays what it is, whatever alpha: 0 * inf is NaN.
    touched = segment_sum(jnp.ones(index.shape, jnp.int32), index, rows=rows, rules=rules._replace(axis=k)) > 0
    touched = touched.reshape(*index.shape[:k], *[1] * (rules.axis - k), rows, *[1] * (x.ndim - rules.axis - 1))
    return jnp.where(touched, (x.astype(wide) + alpha * total).astype(x.dtype), x)


def _batch_select(operands, dims, *, rules):
    (x, index), (dx, di) = operands, dims
    axis, k = rules.axis, rules.batch_dims
    size = size_of(operands, dims)
    if di is None:
        at = place(dx, rules)
        return index_select(moved(x, dx, at, size), index, rules=inner(rules, at)), at
    if dx is not None:
        return index_select(moved(x, dx, 0, size), moved(index, di, 0, size), rules=outer(rules)), 0
    # One array, many indices: a longer index.
    index = validate.mergeable(moved(index, di, k, size), 2, k)
    count = index.shape[k + 1]
    y = index_select(x, index.reshape(*index.shape[:k], size * count), rules=rules._replace(sorted=False, unique=False))
    return y.reshape(*y.shape[:axis], size, count, *y.shape[axis + 1 :]), axis


def _batch_segment(prim, operands, dims, *, rows, rules):
    (source, index), (ds, di) = operands, dims
    size = size_of(operands, dims)
    if di is None:
        at = place(ds, rules)
        return segment(prim, moved(source, ds, at, size), index, rows=rows, rules=inner(rules, at)), at
    index = moved(index, di, 0, size)
    source = _source_in_front(source, ds, size, index.shape[1:], rules)
    return segment(prim, source, index, rows=rows, rules=outer(rules)), 0


batching.primitive_batchers[index_add_p] = _batch_add
batching.primitive_batchers[index_select_p] = _batch_select
for _prim in SEGMENT:
    batching.primitive_batchers[_prim] = functools.partial(_batch_segment, _prim)


# ---- derivatives


def _shared(source, index, rules):
    """Batch dimensions over which a source is the same."""
    return tuple(d for d in range(rules.batch_dims) if source.shape[d] != index.shape[d])


def _summed(x, dims, dtype):
    return (jnp.sum(x, dims, keepdims=True) if dims else x).astype(dtype)


def _beside(source, g, index, rules):
    """Rows of g at index, on an explicit mesh where those of a source of this type are that they are to meet."""
    taken = index_select(g, index, rules=rules)
    if not _shared(source, index, rules):
        return validate.split_like(taken, source)
    k = rules.batch_dims  # over which the source is the same, and the rows may be spread by what is left of the mesh
    here, own = validate.explicit_spec(taken), validate.explicit_spec(source)[k:]
    spec = (*_unused(here[:k], own), *own)
    return taken if spec == here else jax.sharding.reshard(taken, PartitionSpec(*spec))


def _taken(g, index, source, *factor, rules):
    """Rows of g at index: the cotangent of a source of this type, times alpha."""
    taken = _beside(source, g, index, rules._replace(fill_nan=False))
    shared = _shared(source, index, rules)
    if shared or factor:
        wide = taken.astype(computing(g.dtype))
        taken = _summed(wide * factor[0] if factor else wide, shared, g.dtype)
    return validate.split_like(taken, source)


def _given(g, index, x, rules):
    """The sum of rows of g for each row of x: its cotangent."""
    return validate.split_like(segment_sum(g, index, rows=x.shape[rules.axis], rules=rules), x)


def _alpha_cotangent(g, index, source, rules):
    wide = computing(g.dtype)
    taken = _beside(jax.typeof(source), g, index, rules._replace(fill_nan=False))
    return jnp.sum(taken.astype(wide) * source.astype(wide))


# Forward rules bind the primitive and not the function that they belong to, which has no derivative. The
# types of operands, whose values the backward rules do without, are static arguments.


def _add_vjp(x, index, source, *alpha, rules):
    if alpha:
        return _add_scaled_vjp(x, index, source, *alpha, jax.typeof(source), rules)
    return _add_unscaled_vjp(x, index, source, jax.typeof(source), rules)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _add_unscaled_vjp(x, index, source, source_type, rules):
    return index_add(x, index, source, rules=rules)


_add_unscaled_vjp.defvjp(
    lambda x, index, source, source_type, rules: (index_add(x, index, source, rules=rules), index),
    lambda source_type, rules, index, g: (g, None, _taken(g, index, source_type, rules=rules)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _add_scaled_vjp(x, index, source, alpha, source_type, rules):
    return index_add(x, index, source, alpha, rules=rules)


def _add_scaled_backward(source_type, rules, kept, g):
    index, source, alpha = kept
    return g, None, _taken(g, index, source_type, alpha, rules=rules), _alpha_cotangent(g, index, source, rules)


_add_scaled_vjp.defvjp(
    lambda x, index, source, alpha, source_type, rules:
        (index_add(x, index, source, alpha, rules=rules), (index, source, alpha)),
    _add_scaled_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _select_vjp(x, index, x_type, rules):
    return index_select(x, index, rules=rules)


_select_vjp.defvjp(
    lambda x, index, x_type, rules: (index_select(x, index, rules=rules), index),
    lambda x_type, rules, index, g: (_given(g, index, x_type, rules), None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _sum_vjp(source, index, rows, source_type, rules):
    return segment_sum(source, index, rows=rows, rules=rules)


_sum_vjp.defvjp(
    lambda source, index, rows, source_type, rules: (segment_sum(source, index, rows=rows, rules=rules), index),
    lambda rows, source_type, rules, index, g: (_taken(g, index, source_type, rules=rules), None))


def _extreme_vjp(prim):
    """Of the largest or smallest: rows that share it share its gradient equally, as in jnp.max."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
    def f(source, index, rows, rules):
        return segment(prim, source, index, rows=rows, rules=rules)

    def forward(source, index, rows, rules):
        y = segment(prim, source, index, rows=rows, rules=rules)
        return y, (y, source, index)

    def backward(rows, rules, kept, g):
        y, source, index = kept
        wide = computing(g.dtype)
        select = functools.partial(_beside, jax.typeof(source), index=index)
        winners = (source == select(y, rules=rules._replace(fill_nan=True))).astype(wide)
        sharing = segment_sum(winners, index, rows=rows, rules=rules)
        share = select(g.astype(wide) / jnp.maximum(sharing, 1), rules=rules._replace(fill_nan=False))
        dx = _summed(winners * share, _shared(source, index, rules), g.dtype)
        return validate.split_like(dx, jax.typeof(source)), None

    f.defvjp(forward, backward)
    return lambda source, index, *, rows, rules: f(source, index, rows, rules)


defvjp(index_add_p, _add_vjp, differentiable=(0, 2, 3))
defvjp(index_select_p, lambda x, index, *, rules: _select_vjp(x, index, jax.typeof(x), rules), differentiable=(0,))
defvjp(segment_sum_p, lambda source, index, *, rows, rules:
       _sum_vjp(source, index, rows, jax.typeof(source), rules), differentiable=(0,))
for _prim in SEGMENT[1:]:
    defvjp(_prim, _extreme_vjp(_prim), differentiable=(0,))


def _transpose_add(ct, x, index, source, *alpha, rules):
    """Linear in x and source, and in alpha where neither is to be transposed."""
    operands = (x, index, source, *alpha)
    linear = [ad.is_undefined_primal(v) for v in operands]
    if type(ct) is ad.Zero:
        return [ad.Zero(v.aval) if is_linear else None for v, is_linear in zip(operands, linear)]
    cts = [ct if linear[0] else None, *[None] * (len(operands) - 1)]
    if linear[2]:
        cts[2] = _taken(ct, index, source.aval, *alpha, rules=rules)
    if any(linear[3:]):
        if any(linear[:3]):
            raise NotImplementedError("jaxkern.index_add is linear in source and alpha one at a time")
        cts[3] = _alpha_cotangent(ct, index, source, rules)
    return cts


def _transpose_select(ct, x, index, *, rules):
    if type(ct) is ad.Zero:
        return [ad.Zero(x.aval), None]
    return [_given(ct, index, x.aval, rules), None]


def _transpose_sum(ct, source, index, *, rows, rules):
    if type(ct) is ad.Zero:
        return [ad.Zero(source.aval), None]
    return [_taken(ct, index, source.aval, rules=rules), None]


ad.primitive_transposes[index_add_p] = _transpose_add
ad.primitive_transposes[index_select_p] = _transpose_select
ad.primitive_transposes[segment_sum_p] = _transpose_sum
