"""The primitives of GroupNorm and BatchNorm: their signatures, partitioning. reference.py has the layout of their arrays.

    forward   (x, scale, bias)                                              -> y, mean, variance
    grad      (x, mean, variance, scale, g, of_mean, of_variance)           -> dx[, dscale][, dbias]
    jvp       (x, mean, variance, scale, t, of_scale, of_bias)              -> dy, dmean, dvariance: the transpose of the
              gradient, left to XLA

each for both operations, which `operation` names: PRIMITIVES["group_norm"].grad. scale, bias, of_scale and of_bias are
optional. `function` is applied to y before it is rounded to `dtype`, and `sums` are the types of dscale and dbias, each None if
there is no such array. Two more primitives compute what devices exchange if a sample is split:

    moments   (x)                    -> mean, variance
    sums      (x, mean, variance, g) -> sum of g, sum of g * z, per sample and channel

Split samples and groups need no messages, except for the sums over samples in dscale and dbias. Samples that are split
themselves send their mean and variance, and backward the two sums per channel; XLA computes what depends on them.
"""

import functools
import typing

from jax import lax
from jax.extend.core import Primitive

from jaxkern._core import algorithms
from jaxkern._core.primitive import bind
from jaxkern._core.signature import Layout, Signature, primitive
from jaxkern._ops.group_norm import plan, reference

algorithms.register(plan, "group_norm")
algorithms.register(plan, "batch_norm")


def _ranks(params):
    batch, keep = params["batch"], params.get("keep", 0)
    return {"keep": keep, "samples": batch - keep, "before": params["channel"] - batch}


def _grown(params, group, at):
    """A batch becomes one more dimension of all arrays: samples with parameters of their own."""
    return params | {name: params[name] + 1 for name in ("batch", "keep", "channel")}


_DIMS = "*keep *samples *before group within *after"
X, Y, ANY = f"T {_DIMS}", f"dtype {_DIMS}", f"any {_DIMS}"
STATISTIC, VECTOR, SUM = "wide *keep *samples group", "any *keep group within", "wide *keep *samples group within"
_STATISTICS = {"mean": STATISTIC, "variance": STATISTIC}
_COTANGENTS = {"g": ANY, "of_mean": STATISTIC, "of_variance": STATISTIC}


def _gradients(operands, params):
    return [X, *(f"{d.name} *keep group within" for d in params["sums"] if d is not None)]


_signature = functools.partial(Signature, layout=Layout(_ranks, _grown, ("keep",)), whole={"within"})
_REDUCED = {"before", "group", "within", "after"}
NORM = _signature({"x": X, "scale?": VECTOR, "bias?": VECTOR}, [Y, STATISTIC, STATISTIC], exact=_REDUCED)
GRAD = _signature(
    {"x": X} | _STATISTICS | {"scale?": VECTOR} | _COTANGENTS, _gradients, exact=_REDUCED | {"keep", "samples"}
)
JVP = _signature(
    {"x": X} | _STATISTICS | {"scale?": VECTOR, "t": X, "of_scale?": VECTOR, "of_bias?": VECTOR},
    [Y, STATISTIC, STATISTIC],
)
MOMENTS = _signature({"x": X}, [STATISTIC, STATISTIC])
SUMS = _signature({"x": X} | _STATISTICS | {"g": ANY}, [SUM, SUM])


# ---- several devices


def _shard_norm(name, prim, over, x, *vectors, **params):
    axes = over["before"] + over["after"]
    if not axes:
        return bind(prim, x, *vectors, **params)
    at = {k: params[k] for k in ("operation", "batch", "channel", "algorithm")}
    mean, var = reference.merged(*bind(PRIMITIVES[name].moments, x, **at), axes)
    return [reference.applied(x, mean, var, *vectors, **params), mean, var]


def _shard_grad(name, prim, over, x, mean, var, scale, g, *cotangents, sums, **params):
    axes, samples = over["before"] + over["after"], over["samples"]
    operands = (x, mean, var, scale, g, *cotangents)
    wide = params | {"sums": tuple(None if d is None else mean.dtype for d in sums)}
    if axes:
        at = {k: params[k] for k in ("operation", "batch", "channel", "eps", "algorithm")}
        found = lax.psum(tuple(bind(PRIMITIVES[name].sums, x, mean, var, g, **at)), axes)
        dx, *parts = reference.norm_grad(*operands, whole=found, split=lax.psum(1, axes), **wide)
    else:
        dx, *parts = bind(prim, *operands, **wide)
    parts = lax.psum(parts, samples) if samples and parts else parts
    return [dx, *(a.astype(d) for a, d in zip(parts, (d for d in sums if d is not None)))]


class Primitives(typing.NamedTuple):
    """The primitives of an operation."""

    forward: Primitive
    grad: Primitive
    jvp: Primitive
    moments: Primitive
    sums: Primitive


def _primitives(name) -> Primitives:
    def make(suffix, signature, reference, launches=None, shard=None):
        shard = shard and functools.partial(shard, name)
        return primitive(f"jaxkern_{name}{suffix}", signature, reference, plan=launches, shard=shard)

    return Primitives(
        make("", NORM, reference.norm, plan.norm, _shard_norm),
        make("_grad", GRAD, reference.norm_grad, plan.norm_grad, _shard_grad),
        make("_jvp", JVP, reference.norm_jvp),
        make("_moments", MOMENTS, reference.moments, plan.moments),
        make("_sums", SUMS, reference.sums, plan.sums),
    )


PRIMITIVES = {name: _primitives(name) for name in ("group_norm", "batch_norm")}
