"""Derivatives of messages, forward and reverse, to any order: messages again.

Let y[r] be the sum of f(x_r, x_s, w_e) over the edges e from s to r, and g the cotangent of y. The cotangents of

    x_r   are the sum of  f'(x_r, x_s, w_e) g_r   over the edges of row r,
    x_s   are this sum over the edges of s, in the order of the other ends (`back`),
    w_e   are this term for each edge, summed over the features that w lacks,

where f' is the derivative of f by that operand, times g. The cotangents of a message per edge are the same with g_e. So
the gradient is made of the two primitives that it is the gradient of, and of operands that the function f' reads. A mean
divides g by the number of edges of the row. The cotangent of a maximum goes to the first edge that attains it, which the
maximum itself records it: messages that are computed again may be rounded differently, and attain nothing.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from jaxkern._core import compat, functor, memo, validate
from jaxkern._core.arrays import of_some
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind, set_jvp, set_transpose
from jaxkern._ops.messages.edges import EDGE, LOCATED, OTHER, ROW, SHARED, SWAPPED, WIDTH, Edges, features_of
from jaxkern._ops.messages.primitive import edge_map, edge_map_p, edge_reduce, edge_reduce_p

# ---- functions


@memo.remembered(512)
def _pullback(function, wrt, given, kind):
    """(f', used): the derivative of f by the operands at `wrt`, and the positions of the operands that it reads.

    Positions count the operands of f first, then for kind "mean" a factor, for "max" the edges that attain the results at
    `given` and the edge, then the cotangents of the results at `given`. For "max" the other edges get nothing. One operand
    is always read.
    """
    n = len(function.in_dtypes)
    cotangents = [function.out_dtypes[k] for k in given]
    beside = {"sum": [], "mean": [_mean_dtype(function)], "max": [np.dtype(np.uint32)] * (len(given) + 1)}[kind]

    def f(*operands):
        xs, beside_them, gs = operands[:n], operands[n : n + len(beside)], operands[n + len(beside) :]

        def outputs(*operands):
            ys = function.scalars(*operands)
            return [ys[k] for k in given]

        ys, pull = jax.vjp(of_some(outputs, xs, wrt), *(xs[k] for k in wrt))
        if kind == "mean":
            gs = [(g * beside_them[0]).astype(g.dtype) for g in gs]
        if kind == "max":
            edge = beside_them[-1]
            gs = [jnp.where(first == edge, g, jnp.zeros_like(g)) for first, g in zip(beside_them, gs)]
        return pull(list(gs))

    dtypes = (*function.in_dtypes, *beside, *cotangents)
    derivative = functor.of_scalars(f, dtypes, [function.in_dtypes[k] for k in wrt], function.label, function.coarse)
    used = derivative.used or (len(dtypes) - 1,)
    return derivative.select(used), used


def _mean_dtype(function):
    return jnp.result_type(jnp.float32, *function.out_dtypes)


# ---- gradients


def _by_operands(edges, back, arrays, beside, cts, wanted, *, function, ends, kind="sum"):
    """{k: cotangent of arrays[k]} for k in `wanted`.

    beside: (end, array) of the operands that `_pullback` names for this kind. cts: (end, array) or None for each result.
    """
    given = tuple(k for k, ct in enumerate(cts) if ct is not None)
    extra = [*beside, *(cts[k] for k in given)]
    operands, places = [*arrays, *(x for _, x in extra)], (*ends, *(end for end, _ in extra))
    features = features_of(operands)
    lacks = lambda k: tuple(d for d, n in enumerate(features) if not _is_one(n) and _is_one(arrays[k].shape[1 + d]))
    groups = {}
    for k in wanted:
        group = (EDGE, lacks(k)) if ends[k] == EDGE else (OTHER if ends[k] == OTHER else ROW, ())
        groups.setdefault(group, []).append(k)
    found = {}
    for (end, dims), wrt in groups.items():
        f, used = _pullback(function, tuple(wrt), given, kind)
        read, at = [operands[k] for k in used], [places[k] for k in used]
        own = features_of(read)  # without the features of operands that are not read
        if end == EDGE:
            dtypes = [arrays[k].dtype for k in wrt]
            ds = _summed_map(edges, back, read, f, at, [d for d in dims if not _is_one(own[d])], dtypes)
        else:
            wide = lambda k: ends[k] == SHARED or any(not _is_one(own[d]) for d in lacks(k))
            dtypes = [computing(arrays[k].dtype) if wide(k) else arrays[k].dtype for k in wrt]
            orders, at = ((edges, back), at) if end == ROW else ((back, edges), [SWAPPED[p] for p in at])
            ds = edge_reduce(*orders, read, function=f, ends=at, reduction="sum", dtypes=dtypes)
        for k, d in zip(wrt, ds):
            times = math.prod(features[f] for f in lacks(k) if _is_one(own[f]))
            found[k] = _cotangent(d, times, arrays[k])
    return found


def _is_one(n):
    return isinstance(n, int) and n == 1


def _cotangent(d, times, x):
    """The cotangent of x: d, with each element counted `times` times, summed over the dimensions that x lacks."""
    dims = tuple(k for k, (n, m) in enumerate(zip(d.shape, x.shape)) if _is_one(m) and not _is_one(n))
    d = jnp.sum(d, dims, keepdims=True) if dims else d
    d = d * times if not _is_one(times) else d
    return validate.split_like(jnp.broadcast_to(d.astype(x.dtype), x.shape), jax.typeof(x))


def _summed_map(edges, back, operands, function, ends, dims, dtypes):
    """edge_map summed over these features, which the results have with size 1."""
    rank = operands[0].ndim - 1
    order = [d for d in range(rank) if d not in dims] + list(dims)
    if order != list(range(rank)):
        operands = [x.transpose(0, *(d + 1 for d in order)) for x in operands]
    ds = edge_map(edges, back, operands, function=function, ends=ends, summed=len(dims), dtypes=dtypes)
    return [jnp.expand_dims(d, tuple(k + 1 for k in dims)) for d in ds]


def _reduce_gradients(edges, back, arrays, ys, cts, wanted, *, function, ends, reduction, dtypes):
    """{k: cotangent} of edge_reduce; cts holds None for a result without cotangent."""
    del dtypes
    cts = [None if ct is None else ct.astype(d) for ct, d in zip(cts, function.out_dtypes)]
    lift = lambda ct: None if ct is None else (ROW, ct)
    by = functools.partial(_by_operands, edges, back, arrays, wanted=wanted, function=function, ends=ends)
    if reduction == "sum":
        return by([], list(map(lift, cts)))
    if reduction == "mean":
        count = (edges.offsets[1:] - edges.offsets[:-1]).astype(_mean_dtype(function))
        factor = (1 / jnp.maximum(count, 1)).reshape(-1, *[1] * (arrays[0].ndim - 1))
        return by([(ROW, factor)], list(map(lift, cts)), kind="mean")
    first = ys[len(function.out_dtypes) :]
    edge = jnp.arange(edges.keys.shape[0], dtype=jnp.uint32).reshape(-1, *[1] * (arrays[0].ndim - 1))
    beside = [*((ROW, e) for e, ct in zip(first, cts) if ct is not None), (EDGE, edge)]
    return by(beside, list(map(lift, cts)), kind="max")


def _map_gradients(edges, back, arrays, cts, wanted, *, function, ends, summed, dtypes):
    """{k: cotangent} of edge_map; cts holds None for a result without cotangent."""
    del dtypes

    def lift(ct, dtype):
        return None if ct is None else (EDGE, ct.astype(dtype).reshape(*ct.shape, *[1] * summed))

    cts = list(map(lift, cts, function.out_dtypes))
    return _by_operands(edges, back, arrays, [], cts, wanted, function=function, ends=ends)


def _parts(operands):
    edges, back = Edges(*operands[:WIDTH]), Edges(*operands[WIDTH : 2 * WIDTH])
    return edges, back, list(operands[2 * WIDTH :])


def _differentiate(prim, gradients):
    """All derivatives of `prim`, whose gradient is gradients(edges, back, arrays, results, cotangents, wanted, **params)."""

    def located(params):
        """The parameters with which the results say what derivatives must know."""
        params = dict(params)
        if params.get("reduction") in ("max", "min"):
            params["reduction"] += "_at"
        return params

    @functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
    def f(operands, wanted, params):
        return bind(prim, *operands, **located(params))

    def forward(operands, wanted, params):
        ys = bind(prim, *operands, **located(params))
        return ys, (operands, ys if len(ys) > len(dict(params)["dtypes"]) else None)

    def backward(wanted, params, residuals, cts):
        operands, ys = residuals
        params = dict(params)
        cts = [None if ct.dtype == jax.dtypes.float0 else ct for ct in cts[: len(params["dtypes"])]]
        found = gradients(*_parts(operands), ys, cts, [k - 2 * WIDTH for k in wanted], **params)
        return (tuple(found.get(k - 2 * WIDTH) for k in range(len(operands))),)

    f.defvjp(forward, backward)

    def jvp(primals, tangents, **params):
        """The rule of `autodiff.defvjp`; the edges that attain maxima have no tangent."""
        active = [k for k, t in enumerate(tangents) if k >= 2 * WIDTH and type(t) is not ad.Zero]
        if not active:
            ys = bind(prim, *primals, **params)
            return ys, list(map(compat.zero_tangent, ys))
        several, dtypes = params.get("reduction") in LOCATED, params["dtypes"]
        inexact = [k for k, d in enumerate(dtypes) if jnp.issubdtype(d, jnp.inexact)]
        if not inexact:
            ys = bind(prim, *primals, **params)
            return ys, list(map(compat.zero_tangent, ys))

        def numbers(*operands):
            ys = f(operands, tuple(active), tuple(params.items()))
            return [ys[k] for k in inexact], [y for k, y in enumerate(ys) if k not in inexact]

        found, pull, others = jax.vjp(of_some(numbers, primals, active), *(primals[k] for k in active), has_aux=True)
        (tangents,) = jax.linear_transpose(pull, found)(tuple(tangents[k] for k in active))
        found, tangents, others = iter(found), iter(tangents), iter(others)
        ys, dys = [], []
        for k in range(len(dtypes) * (1 + several)):
            ys.append(next(found) if k in inexact else next(others))
            dys.append(next(tangents) if k in inexact else compat.zero_tangent(ys[-1]))
        return ys, dys

    set_jvp(prim, jvp)

    def transpose(cts, *operands, **params):
        """The primitive is linear in each undefined operand; f' does not read it."""
        linear = [k - 2 * WIDTH for k, x in enumerate(operands) if ad.is_undefined_primal(x)]
        result = [None] * len(operands)
        if all(type(ct) is ad.Zero for ct in cts):
            for k in linear:
                result[k + 2 * WIDTH] = ad.Zero(operands[k + 2 * WIDTH].aval)
            return result
        if params.get("reduction") not in (None, "sum", "mean"):
            raise NotImplementedError(f"{prim.name} is linear in nothing with reduction {params['reduction']}")
        edges, back, arrays = _parts(operands)
        zeros = lambda a: validate.split_like(jnp.zeros(a.shape, a.dtype), a)
        arrays = [zeros(x.aval) if ad.is_undefined_primal(x) else x for x in arrays]
        cts = [None if type(ct) is ad.Zero else ct for ct in cts]
        for k, d in gradients(edges, back, arrays, None, cts, linear, **params).items():
            result[k + 2 * WIDTH] = d
        return result

    set_transpose(prim, transpose)


_differentiate(edge_reduce_p, _reduce_gradients)
_differentiate(
    edge_map_p,
    lambda edges, back, arrays, ys, cts, wanted, **params: _map_gradients(edges, back, arrays, cts, wanted, **params),
)
