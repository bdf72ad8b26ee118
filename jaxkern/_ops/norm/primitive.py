"""The primitives of RMSNorm and LayerNorm: shapes, batching, partitioning.

    forward    (x[, residual][, scale][, bias])           -> y[, s], where s = x + residual
    grad       (s, g[, sum_g][, scale])                   -> ds[, dscale][, dbias]
    jvp        (s[, scale], ds[, dscale][, dbias])        -> dy[, ds]: the transpose of the gradient; left to XLA
    epilogue   as forward, then arguments of `function`   -> function(y, *arguments)[, s]

each for both operations, which `operation` names: PRIMITIVES["rms_norm"].grad. Rows lie along the last axis of x; scale
and bias are vectors of a row's width. `extras` names the optional operands: residual, scale, bias, in this order; of the gradient residual (the
cotangent sum_g of s) and scale, of the jvp residual (whether ds is returned) and scale. `dtype` is the type of y, and
`sums` the types of dscale and dbias, each None if there is no such array.

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

from jaxkern._core import algorithms, define, partition, validate
from jaxkern._core.primitive import bind
from jaxkern._ops.norm import plan, reference

algorithms.register(plan, "rms_norm", centre=False)
algorithms.register(plan, "layer_norm", centre=True)


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


def _norm_shape(x, *rest, operation, extras, eps, dtype, algorithm, function=None):
    names, residual = extras.split(), extras.split().count("residual")
    _check(f"jaxkern_{operation}", x, rest[:residual], rest[residual : len(names)])
    args = rest[len(names) :]
    if any(a.ndim != x.ndim or any(b not in (1, n) for n, b in zip(x.shape, a.shape)) for a in args):
        raise ValueError(f"jaxkern_{operation}: arguments {args} do not broadcast to {x.str_short()}")
    return [x.update(dtype=dtype, weak_type=False), *[x.update(weak_type=False)] * residual]


def _grad_shape(s, g, *rest, operation, extras, eps, sums, algorithm):
    residual = extras.split().count("residual")
    _check(f"jaxkern_{operation}_grad", s, (g, *rest[:residual]), rest[residual:])
    return [s.update(weak_type=False), *(_vector(s, d) for d in sums if d is not None)]


def _jvp_shape(s, *rest, operation, extras, eps, dtype, sums, algorithm):
    names = extras.split()
    scale = names.count("scale")
    _check(f"jaxkern_{operation}_jvp", s, rest[scale : scale + 1], rest[:scale] + rest[scale + 1 :])
    return [s.update(dtype=dtype, weak_type=False), *[s.update(weak_type=False)] * names.count("residual")]


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
    wide, args = 1 + params["extras"].split().count("residual"), 1 + len(params["extras"].split())
    if any(d is not None for d in dims[wide:args]):
        return _batch_reference(reference.norm, operands, dims, params)
    size = next(x.shape[d] for x, d in zip(operands, dims) if d is not None)
    rows = _leading(operands[:wide], dims[:wide], size)
    given = [x[None] if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands[args:], dims[args:])]
    ys = bind(prim, *rows, *operands[wide:args], *given, **params)
    return ys, [0] * len(ys)


def _grad_batch(prim, operands, dims, **params):
    """Each example has sums over rows of its own, which XLA computes."""
    wide = 2 + params["extras"].split().count("residual")
    if any(d is not None for d in dims[wide:]):
        return _batch_reference(reference.norm_grad, operands, dims, params)
    size = next(x.shape[d] for x, d in zip(operands, dims) if d is not None)
    rows = _leading(operands[:wide], dims[:wide], size)
    ys = bind(prim, *rows, *operands[wide:], **(params | {"sums": (None, None)}))
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
    if f is reference.norm:
        options["on_cpu"] = functools.partial(f, quick=True)
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


class Primitives(typing.NamedTuple):
    """The primitives of an operation."""

    forward: Primitive
    grad: Primitive
    jvp: Primitive
    epilogue: Primitive | None


def _primitives(name) -> Primitives:
    return Primitives(
        _primitive(name, _norm_shape, _norm_batch, reference.norm, plan.norm),
        _primitive(f"{name}_grad", _grad_shape, _grad_batch, reference.norm_grad, plan.norm_grad),
        _primitive(f"{name}_jvp", _jvp_shape, _jvp_batch, reference.norm_jvp),
        _primitive(f"{name}_epilogue", _norm_shape, _norm_batch, reference.norm, plan.norm),
    )


PRIMITIVES = {name: _primitives(name) for name in ("rms_norm", "layer_norm")}


def variant(name: str, label: str, left) -> Primitives:
    """The same operation as primitives that may be left to XLA where they are lowered; without `epilogue`.

    left: as for `define.lower_to_kernels`. Where it returns False, each of several devices runs PRIMITIVES[name].
    """
    own, options = PRIMITIVES[name], {"left": left, "cached": False}
    forward = _primitive(f"{label}_{name}", _norm_shape, _norm_batch, reference.norm, plan.norm, own.forward, **options)
    grad = _primitive(
        f"{label}_{name}_grad", _grad_shape, _grad_batch, reference.norm_grad, plan.norm_grad, own.grad, **options
    )
    return Primitives(
        forward, grad, _primitive(f"{label}_{name}_jvp", _jvp_shape, _jvp_batch, reference.norm_jvp), None
    )
