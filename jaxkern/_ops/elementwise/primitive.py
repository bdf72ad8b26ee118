"""The primitives of the elementwise operations: `jaxkern_<name>`, and `jaxkern_<name>_grad` for its derivative.

A primitive takes arrays of equal rank, each dimension 1 or the result's, then the operation's scalar parameters as
arrays of one element in the dtype that the arithmetic is done in: float64 for float64, else float32. `split` is -1, or
for a gated operation the axis along which one operand holds both halves. `algorithm` may be "auto".
"""

import functools

import jax.numpy as jnp
from jax.interpreters import ad
from jax.sharding import NamedSharding, PartitionSpec

from jaxkern._core import algorithms, compat, define, partition
from jaxkern._core.primitive import bind, set_jvp, set_transpose
from jaxkern._ops.elementwise import derivatives, plan, reference, table

algorithms.register(plan, "elementwise")
ROWS = {row.name: row for row in table.ROWS}


def _result(prim, arrays, split, dtype):
    """The type of what arrays of equal rank broadcast to; a split dimension is half as long."""
    first = arrays[0]
    shape, spec = list(first.shape), [*first.sharding.spec, *[None] * (first.ndim - len(first.sharding.spec))]
    if split >= 0:
        shape[split], spec[split] = shape[split] // 2, None
    for x in arrays[1:]:
        other = [*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec))]
        for d in range(len(shape)):
            if x.ndim != len(shape) or (x.shape[d] != shape[d] and 1 not in (x.shape[d], shape[d])):
                raise ValueError(
                    f"{prim}: operands of shapes {', '.join(str(a.shape) for a in arrays)} do not broadcast"
                )
            if isinstance(shape[d], int) and shape[d] == 1:
                shape[d], spec[d] = x.shape[d], other[d]
            elif spec[d] is None and not (isinstance(x.shape[d], int) and x.shape[d] == 1):
                spec[d] = other[d]
    mesh = next((x.sharding.mesh for x in arrays if not x.sharding.mesh.empty), first.sharding.mesh)
    sharding = {} if mesh.empty else {"sharding": NamedSharding(mesh, PartitionSpec(*spec))}
    return first.update(shape=tuple(shape), dtype=dtype, weak_type=False, **sharding)


def _abstract(row, *operands, split, algorithm="auto"):
    arrays = operands[: len(operands) - len(row.parameters)]
    predicate = row.types in ("test", "compare")
    return _result(row.name, arrays, split, jnp.dtype(bool) if predicate else reference.element_type(row, arrays))


def _abstract_gradient(row, *operands, split, algorithm="auto"):
    g = operands[len(operands) - len(row.parameters) - 1]
    return [operands[0].update(weak_type=False)] if split >= 0 else [g.update(weak_type=False)] * len(row.gradient)


def _batch(whole, prim, operands, dims, *, split, algorithm="auto"):
    at = next(d for d in dims if d is not None)
    # An unbatched operand gets a dimension of size 1: kernels read it in place.
    operands = [jnp.expand_dims(x, at) if d is None else jnp.moveaxis(x, d, at) for x, d in zip(operands, dims)]
    if whole is not None:  # cotangents and tangents, which begin at this position, and what is split keep the shape
        size = next(x.shape[at] for x, d in zip(operands, dims) if d is not None)
        operands = [
            jnp.broadcast_to(x, (*x.shape[:at], size, *x.shape[at + 1 :]))
            if k >= whole or (k == 0 and split >= 0)
            else x
            for k, x in enumerate(operands)
        ]
    y = bind(prim, *operands, split=split + (0 <= at <= split), algorithm=algorithm)
    return (y, [at] * len(y)) if prim.multiple_results else (y, at)


def _abstract_tangent(row, *operands, split, algorithm="auto"):
    k, _ = reference.operand_counts(row, split)
    return _result(row.name, operands[k : k + 1], split, operands[k].dtype)


def _primitive(name, row, abstract, reference, several=False, whole=None):
    return define.primitive(
        f"jaxkern_{name}",
        functools.partial(abstract, row),
        functools.partial(_batch, whole),
        functools.partial(reference, row),
        several=several,
        plan=functools.partial(plan.plan, name),
        partition=_partition,
    )


def _partition(prim, ctx, operands, params):
    """Each device computes its part. Any dimension may be split, except one that holds two halves."""
    split = params.get("split", -1)
    names = [f"d{d}" for d in range(max(a.ndim for a in (*ctx.avals_in, *ctx.avals_out)))]
    dims = [list(names[: a.ndim]) for a in (*ctx.avals_in, *ctx.avals_out)]
    if split >= 0:
        for k, names in enumerate(dims):
            names[split] = f"half{k}"
    whole = [name for names in dims for name in names if name.startswith("half")]
    shard = lambda over, *parts, **params: prim.bind(*parts, **params)
    return partition.lower(ctx, prim, operands, params, dims, shard, whole=whole)


def _define(row):
    forward_p = _primitive(row.name, row, _abstract, reference.forward)
    gradient_p = None
    if row.gradient:
        whole = len(reference.used(row))
        gradient_p = tangent_p = _primitive(
            f"{row.name}_grad", row, _abstract_gradient, reference.gradient, True, whole
        )
        if len(row.gradient) > 1:  # else the gradient is its own transpose
            tangent_p = _primitive(f"{row.name}_jvp", row, _abstract_tangent, reference.tangent, False, whole)
        derivatives.gradient_rules(row, gradient_p, tangent_p)
    if row.types in ("test", "compare", "logical"):
        derivatives.no_derivative(forward_p)
    else:
        derivatives.differentiate(row, forward_p, gradient_p)
    return forward_p, gradient_p


PRIMITIVES = {row.name: _define(row) for row in ROWS.values()}


# ---- cast


def _cast_jvp(primals, tangents, *, dtype):
    (x,), (t,) = primals, tangents
    y = bind(cast_p, x, dtype=dtype)
    if type(t) is ad.Zero or not jnp.issubdtype(dtype, jnp.floating):
        return y, compat.zero_tangent(y)
    return y, bind(cast_p, t, dtype=dtype)


def _cast_transpose(ct, x, *, dtype):
    return [ad.Zero(x.aval) if type(ct) is ad.Zero else bind(cast_p, ct, dtype=x.aval.dtype)]


cast_p = define.primitive(
    "jaxkern_cast",
    lambda x, *, dtype: x.update(dtype=dtype, weak_type=False),
    lambda prim, xs, ds, *, dtype: (bind(prim, *xs, dtype=dtype), ds[0]),
    reference.cast,
    plan=functools.partial(plan.plan, "cast"),
    partition=_partition,
)
set_jvp(cast_p, _cast_jvp)
set_transpose(cast_p, _cast_transpose)
