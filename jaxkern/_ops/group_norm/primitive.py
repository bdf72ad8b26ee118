"""The primitives of GroupNorm and BatchNorm: shapes, batching, partitioning. reference.py has the layout of their arrays.

    forward   (x[, scale][, bias])                               -> y, mean, variance
    grad      (x, mean, variance[, scale], g, g_mean, g_variance) -> dx[, dscale][, dbias]
    jvp       (x, mean, variance[, scale], dx[, dscale][, dbias]) -> dy, dmean, dvariance: the transpose of the gradient,
              left to XLA

each for both operations, which `operation` names: PRIMITIVES["group_norm"].grad. `extras` names the optional operands:
scale and bias, in this order. `function` is applied to y before it is rounded to `dtype`, and `sums` are the types of dscale
and dbias, each None if there is no such array. Two more primitives compute what devices exchange if a sample is split:

    moments   (x)                    -> mean, variance
    sums      (x, mean, variance, g) -> sum of g, sum of g * z, per sample and channel

Split samples and groups need no messages, except for the sums over samples in dscale and dbias. Samples that are split
themselves send their mean and variance, and backward the two sums per channel; XLA computes what depends on them.
"""

import functools
import typing

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec

from jaxkern._core import algorithms, define, partition, validate
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind
from jaxkern._ops.group_norm import plan, reference

algorithms.register(plan, "group_norm")
algorithms.register(plan, "batch_norm")


def _typed(x, dims, dtype):
    """The type of an array that has these dimensions of x."""
    more = {}
    if not x.sharding.mesh.empty:
        spec = validate.explicit_spec(x)
        more["sharding"] = NamedSharding(x.sharding.mesh, PartitionSpec(*(spec[d] for d in dims)))
    return x.update(shape=tuple(x.shape[d] for d in dims), dtype=dtype, weak_type=False, **more)


def _statistic(x, batch, channel):
    return _typed(x, (*range(batch), channel), computing(x.dtype))


def _vector(x, keep, channel, dtype):
    """The type of scale, bias and their gradients."""
    return _typed(x, (*range(keep), channel, channel + 1), dtype)


def _check(name, x, wide, statistics, vectors, batch, keep, channel):
    fit = 0 <= keep <= batch <= channel < x.ndim - 1
    fit = fit and all(a.shape == x.shape for a in wide)
    fit = fit and all(a.shape == (*x.shape[:batch], x.shape[channel]) for a in statistics)
    fit = fit and all(a.shape == (*x.shape[:keep], *x.shape[channel : channel + 2]) for a in vectors)
    if not fit:
        types = ", ".join(a.str_short() for a in (x, *wide, *statistics, *vectors))
        raise ValueError(f"{name}: operands do not fit: {types}")


def _norm_shape(x, *vectors, operation, batch, keep, channel, dtype, **_):
    _check(f"jaxkern_{operation}", x, (), (), vectors, batch, keep, channel)
    return [x.update(dtype=dtype, weak_type=False), *[_statistic(x, batch, channel)] * 2]


def _grad_shape(x, mean, var, *rest, operation, batch, keep, channel, sums, **_):
    *scale, g, of_mean, of_var = rest
    _check(f"jaxkern_{operation}_grad", x, (g,), (mean, var, of_mean, of_var), scale, batch, keep, channel)
    return [x.update(weak_type=False), *(_vector(x, keep, channel, d) for d in sums if d is not None)]


def _jvp_shape(x, mean, var, *rest, operation, extras, batch, keep, channel, dtype, **_):
    at = len(extras.split())
    vectors = (*rest[:at], *rest[at + 1 :])
    _check(f"jaxkern_{operation}_jvp", x, rest[at : at + 1], (mean, var), vectors, batch, keep, channel)
    return [x.update(dtype=dtype, weak_type=False), *[_statistic(x, batch, channel)] * 2]


def _moments_shape(x, *, batch, channel, **_):
    return [_statistic(x, batch, channel)] * 2


def _sums_shape(x, mean, var, g, *, batch, channel, **_):
    return [_typed(x, (*range(batch), channel, channel + 1), mean.dtype)] * 2


def _batch(prim, operands, dims, *, batch, keep, channel, **params):
    """The batch becomes the first dimension of all arrays: samples with parameters of their own."""
    size = next(x.shape[d] for x, d in zip(operands, dims) if d is not None)
    operands = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims)
    ]
    ys = bind(prim, *operands, batch=batch + 1, keep=keep + 1, channel=channel + 1, **params)
    return ys, [0] * len(ys)


# ---- several devices


class _Names(typing.NamedTuple):
    """The names of the dimensions of x."""

    x: list
    batch: int
    keep: int
    channel: int

    @property
    def samples(self):
        return self.x[: self.batch]

    @property
    def reduced(self):
        return [*self.x[self.batch : self.channel], *self.x[self.channel + 2 :]]

    @property
    def statistic(self):
        return [*self.samples, self.x[self.channel]]

    @property
    def vector(self):
        return [*self.x[: self.keep], *self.x[self.channel : self.channel + 2]]


def _names(x, batch, keep, channel) -> _Names:
    names = [f"d{d}" for d in range(x.ndim)]
    names[channel : channel + 2] = ["group", "within"]
    return _Names(names, batch, keep, channel)


def _along(over, names):
    return tuple(axis for name in names for axis in over[name])


def _partition_norm(primitives, prim, ctx, operands, params):
    names = _names(ctx.avals_in[0], params["batch"], params["keep"], params["channel"])
    dims = [names.x, *[names.vector] * (len(operands) - 1), names.x, names.statistic, names.statistic]

    def shard(over, x, *vectors, **params):
        axes = _along(over, names.reduced)
        if not axes:
            return prim.bind(x, *vectors, **params)
        at = {k: params[k] for k in ("operation", "batch", "channel", "algorithm")}
        mean, var = reference.merged(*primitives().moments.bind(x, **at), axes)
        return [reference.applied(x, mean, var, *vectors, **params), mean, var]

    exact = {*names.reduced, "group", "within"}
    return partition.lower(ctx, prim, operands, params, dims, shard, exact=exact, whole={"within"})


def _partition_grad(primitives, prim, ctx, operands, params):
    names = _names(ctx.avals_in[0], params["batch"], params["keep"], params["channel"])
    scale = [names.vector] * (len(operands) - 6)
    dims = [names.x, *[names.statistic] * 2, *scale, names.x, *[names.statistic] * 2]
    dims += [names.x, *[names.vector] * (len(ctx.avals_out) - 1)]

    def shard(over, x, mean, var, *rest, **params):
        axes, samples = _along(over, names.reduced), _along(over, names.samples[names.keep :])
        wide = params | {"sums": tuple(None if d is None else mean.dtype for d in params["sums"])}
        if axes:
            at = {k: params[k] for k in ("operation", "batch", "channel", "eps", "algorithm")}
            found = lax.psum(tuple(primitives().sums.bind(x, mean, var, rest[-3], **at)), axes)
            dx, *parts = reference.norm_grad(x, mean, var, *rest, whole=found, split=lax.psum(1, axes), **wide)
        else:
            dx, *parts = prim.bind(x, mean, var, *rest, **wide)
        parts = lax.psum(parts, samples) if samples and parts else parts
        return [dx, *(a.astype(d) for a, d in zip(parts, (d for d in params["sums"] if d is not None)))]

    return partition.lower(ctx, prim, operands, params, dims, shard, exact=set(names.x), whole={"within"})


class Primitives(typing.NamedTuple):
    """The primitives of an operation."""

    forward: Primitive
    grad: Primitive
    jvp: Primitive
    moments: Primitive
    sums: Primitive


def _primitives(name) -> Primitives:
    found = lambda: PRIMITIVES[name]
    make = functools.partial(define.primitive, several=True)
    over = lambda rule: functools.partial(rule, found)
    return Primitives(
        make(f"jaxkern_{name}", _norm_shape, _batch, reference.norm, plan=plan.norm, partition=over(_partition_norm)),
        make(
            f"jaxkern_{name}_grad",
            _grad_shape,
            _batch,
            reference.norm_grad,
            plan=plan.norm_grad,
            partition=over(_partition_grad),
        ),
        make(f"jaxkern_{name}_jvp", _jvp_shape, _batch, reference.norm_jvp),
        make(f"jaxkern_{name}_moments", _moments_shape, None, reference.moments, plan=plan.moments),
        make(f"jaxkern_{name}_sums", _sums_shape, None, reference.sums, plan=plan.sums),
    )


PRIMITIVES = {name: _primitives(name) for name in ("group_norm", "batch_norm")}
