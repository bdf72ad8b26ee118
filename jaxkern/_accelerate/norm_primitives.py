"""The primitives of RMSNorm and LayerNorm in plain programs, which may be left to XLA where they are lowered.

    forward    (x[, scale][, bias])                 -> y
    grad       (s, g[, scale])                      -> ds[, dscale][, dbias]
    jvp        (s[, scale], ds[, dscale][, dbias])  -> dy: the transpose of the gradient; left to XLA

each for both operations, which `operation` names. Rows lie along the last axis of x; scale and bias are vectors of a row's width.
`extras` names the optional operands: scale and bias, in this order; of the others scale. `dtype` is the type of y, and `sums` the
types of dscale and dbias, each None if there is no such array. The kernels are those of _ops/norm/plan.py.

Rows that are split over devices are normalised by XLA's operations and a message or two of a number per row; split
otherwise, each device runs the kernel on its rows, and the sums over rows are added. Rows that do not divide evenly are
gathered for these sums.
"""

import functools
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec

from jaxkern._accelerate import norm_reference as reference
from jaxkern._core import define, launch, partition, validate
from jaxkern._core.primitive import bind
from jaxkern._ops.norm import plan


def _check(name, x, wide, vectors):
    if x.ndim < 1 or any(a.shape != x.shape for a in wide) or any(a.shape != x.shape[-1:] for a in vectors):
        types = ", ".join(a.str_short() for a in (x, *wide, *vectors))
        raise ValueError(f"{name}: operands do not fit: {types}")


def _vector(x, dtype):
    """The type of a sum over rows of x."""
    more = {}
    if not x.sharding.mesh.empty:
        more["sharding"] = NamedSharding(x.sharding.mesh, PartitionSpec(validate.explicit_spec(x)[-1]))
    return x.update(shape=x.shape[-1:], dtype=dtype, weak_type=False, **more)


def _norm_shape(x, *rest, operation, extras, eps, dtype, algorithm):
    _check(f"jaxkern_{operation}", x, (), rest)
    return [x.update(dtype=dtype, weak_type=False)]


def _grad_shape(s, g, *rest, operation, extras, eps, sums, algorithm):
    _check(f"jaxkern_{operation}_grad", s, (g,), rest)
    return [s.update(weak_type=False), *(_vector(s, d) for d in sums if d is not None)]


def _jvp_shape(s, *rest, operation, extras, eps, dtype, sums, algorithm):
    scale = extras.split().count("scale")
    _check(f"jaxkern_{operation}_jvp", s, rest[scale : scale + 1], rest[:scale] + rest[scale + 1 :])
    return [s.update(dtype=dtype, weak_type=False)]


# ---- batching


def _leading(operands, dims, size):
    """The operands with the batch as their first dimension."""
    return [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims)
    ]


def _batch_reference(f, operands, dims, params):
    ys = jax.vmap(functools.partial(f, **params), dims)(*operands)
    return ys, [0] * len(ys)


def _norm_batch(prim, operands, dims, **params):
    if any(d is not None for d in dims[1:]):
        return _batch_reference(reference.norm, operands, dims, params)
    size = operands[0].shape[dims[0]]
    ys = bind(prim, *_leading(operands[:1], dims[:1], size), *operands[1:], **params)
    return ys, [0] * len(ys)


def _grad_batch(prim, operands, dims, **params):
    """Each example has sums over rows of its own, which XLA computes."""
    if any(d is not None for d in dims[2:]):
        return _batch_reference(reference.norm_grad, operands, dims, params)
    size = next(x.shape[d] for x, d in zip(operands, dims) if d is not None)
    rows = _leading(operands[:2], dims[:2], size)
    ys = bind(prim, *rows, *operands[2:], **(params | {"sums": (None, None)}))
    # Comparing dtypes with None will not do: NumPy reads it as float64.
    some = any(d is not None for d in params["sums"])
    sums = _batch_reference(reference.norm_grad, operands, dims, params)[0][1:] if some else []
    return [*ys, *sums], [0] * (1 + len(sums))


def _jvp_batch(prim, operands, dims, **params):
    return _batch_reference(reference.norm_jvp, operands, dims, params)


# ---- several devices


def _partition(f, part, prim, ctx, operands, params):
    """part: the primitive that each device runs on its rows; None: `prim`."""
    part = part or prim
    full = [f"d{d}" for d in range(ctx.avals_in[0].ndim - 1)] + ["row"]
    # A vector has one dimension; so has x without others, which are then all named alike.
    vectors = [a.ndim == 1 for a in (*ctx.avals_in, *ctx.avals_out)]
    dims = [["row"] if vector else full for vector in vectors]

    def shard(over, *parts, **params):
        compute = functools.partial(f, over=over["row"]) if over["row"] else part.bind
        if "sums" not in params:
            return compute(*parts, **params)
        wide = tuple(None if d is None else reference.computing(parts[0].dtype) for d in params["sums"])
        ds, *sums = compute(*parts, **(params | {"sums": wide}))
        rows = tuple(axis for name in full[:-1] for axis in over[name])
        sums = lax.psum(sums, rows) if rows else sums
        return [ds, *(a.astype(d) for a, d in zip(sums, (d for d in params["sums"] if d is not None)))]

    # Rows that are added at the end to divide them evenly would count in the sums over rows.
    summed = any(d is not None for d in params.get("sums", ()))
    return partition.lower(ctx, prim, operands, params, dims, shard, exact=set(full) if summed else {"row"})


def _primitive(name, shape, batch, f, launches=None, part=None, **options):
    return define.primitive(
        f"jaxkern_{name}",
        shape,
        batch,
        f,
        several=True,
        plan=launches,
        partition=functools.partial(_partition, f, part) if launches else None,
        **options,
    )


# ---- plans


def _norm_plan(device, operands, results, *, operation, extras, eps, dtype, algorithm):
    at = dict(zip(extras.split(), range(1, len(operands))))
    read = lambda name: launch.operand(at[name]) if name in at else launch.null
    arrays = (launch.operand(0), launch.null, launch.null, read("scale"), read("bias"), launch.result(0), launch.null)
    p = plan.problem(operands[0], results[0], operation, at, "bias" in at)
    return plan.written_plan(
        p, device, operation, [operands[k].dtype.name for k in at.values()], [], arrays, eps, algorithm
    )


def _grad_plan(device, operands, results, *, operation, extras, eps, sums, algorithm):
    scale = launch.operand(2) if "scale" in extras else launch.null
    p = plan.problem(operands[0], operands[1], operation, extras.split(), sums[1] is not None)
    p = p._replace(backward=True, scale_sum=sums[0] is not None)
    arrays = (launch.operand(0), launch.null, launch.operand(1), scale, launch.null, launch.result(0), launch.null)
    gradients = [(k, a.dtype.name) for k, a in enumerate(results) if k]
    parameters = [a.dtype.name for a in operands[2:]]
    return plan.written_plan(p, device, operation, parameters, gradients, arrays, eps, algorithm)


class Primitives(typing.NamedTuple):
    """The primitives of an operation."""

    forward: Primitive
    grad: Primitive
    jvp: Primitive


def _primitives(label, parts=None, **options) -> Primitives:
    forward, grad = (parts.forward, parts.grad) if parts else (None, None)
    return Primitives(
        _primitive(label, _norm_shape, _norm_batch, reference.norm, _norm_plan, forward, **options),
        _primitive(f"{label}_grad", _grad_shape, _grad_batch, reference.norm_grad, _grad_plan, grad, **options),
        _primitive(f"{label}_jvp", _jvp_shape, _jvp_batch, reference.norm_jvp),
    )


PARTS = {name: _primitives(f"{name}_part") for name in ("rms_norm", "layer_norm")}


def variant(name: str, label: str, left) -> Primitives:
    """The primitives of an operation. left: as for `define.lower_to_kernels`.

    Where it returns False, each of several devices runs PARTS[name].
    """
    return _primitives(f"{label}_{name}", PARTS[name], left=left, cached=False)
