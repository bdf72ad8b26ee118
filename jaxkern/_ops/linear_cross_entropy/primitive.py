"""The primitives of the linear cross-entropy: shapes, batching, partitioning.

    linear_cross_entropy_p        (h, weight, labels[, bias])                 -> loss per row
    linear_cross_entropy_sum_p    (h, weight, labels, c[, bias])              -> sum(c * loss)
    linear_cross_entropy_both_p   (h, weight, labels, c[, bias])              -> loss, the wanted gradients of sum(c * loss)
    linear_cross_entropy_grad_p   (h, weight, labels, c[, bias])              -> the wanted gradients alone
    linear_cross_entropy_jvp_p    (h, weight, labels[, bias], *tangents)      -> the transpose of these, per row

with h [*rows, d], labels and c [*rows], weight [d, vocabulary] or transposed, and bias [vocabulary]. `wanted`: whether the
gradients of h, weight and bias are. They have no kernels of their own: they consist of XLA's products and of the primitives of
cross-entropy (reference.py), and `plan` cuts them into chunks. Rows and the vocabulary may be split over devices.
"""

import functools

import jax.numpy as jnp
from jax import lax

from jaxkern._core import algorithms, compat, define, partition
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind
from jaxkern._core.rows import without_axis
from jaxkern._ops.linear_cross_entropy import plan, reference
from jaxkern._ops.linear_cross_entropy.reference import Spec, Split  # noqa: F401

algorithms.register(plan, "linear_softmax_cross_entropy")


def kinds(name, operands, wanted=(), biased=False) -> tuple[str, str]:
    """The kinds of operands and results: h (x), weights (w), numbers per row (r), biases (b), a single number (1)."""
    if name.endswith("_jvp"):
        return "xwr" + "b" * biased + _chosen(wanted), "r"
    weighed = "r" * (not name.endswith("entropy"))
    found = "xwr" + weighed + "b" * (len(operands) > 3 + len(weighed))
    results = {"entropy": "r", "sum": "1", "both": "r" + _chosen(wanted), "grad": _chosen(wanted)}
    return found, results[name.rsplit("_", 1)[1]]


def _chosen(wanted) -> str:
    return "".join(kind for kind, w in zip("xwb", wanted) if w)


def _facts(params):
    return {k: params[k] for k in ("wanted", "biased") if k in params}


def _shape(name, *operands, spec, **facts):
    given, results = kinds(name, operands, **facts)
    h, weight = operands[:2]
    vocabulary = weight.shape[0 if spec.transposed else 1]
    shapes = {"x": h.shape, "w": weight.shape, "r": h.shape[:-1], "b": (vocabulary,)}
    if weight.ndim != 2 or any(a.shape != shapes[kind] for kind, a in zip(given, operands, strict=True)):
        raise ValueError(f"{name}: {', '.join(a.str_short() for a in operands)} do not fit")
    row = without_axis(h, h.ndim - 1).update(dtype=computing(jnp.dtype(spec.logits_dtype)))
    number = row
    while number.ndim:
        number = without_axis(number, 0)
    types = {
        "x": h,
        "w": weight,
        "r": row,
        "1": number,
        "b": next((a for kind, a in zip(given, operands) if kind == "b"), None),
    }
    found = [types[kind].update(weak_type=False) for kind in results]
    return found if _several(name) else found[0]


def _several(name) -> bool:
    return name.endswith(("_both", "_grad"))


def _batch(prim, operands, dims, **params):
    """A batch of rows becomes their first dimension; a batch of weights, or of their gradients, is a loop."""
    given, results = kinds(prim.name, operands, **_facts(params))
    size = next(x.shape[d] for x, d in zip(operands, dims) if d is not None)
    operands = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims)]
    batched = [d is not None for d in dims]
    if any(b for kind, b in zip(given, batched) if kind in "wb") or set(results) & set("wb"):

        def one(some):
            some = iter(some)
            return bind(prim, *(next(some) if b else x for x, b in zip(operands, batched)), **params)

        found = lax.map(one, [x for x, b in zip(operands, batched) if b])
        return found, [0] * len(found) if prim.multiple_results else 0
    spread = lambda x, b: x if b else jnp.broadcast_to(x, (size, *x.shape))
    operands = [spread(x, b) if kind in "xr" else x for kind, x, b in zip(given, operands, batched)]
    if prim is linear_cross_entropy_sum_p:
        h, weight, labels, c, *bias = operands
        value = c * bind(linear_cross_entropy_p, h, weight, labels, *bias, **params)
        return jnp.sum(value, range(1, value.ndim)), 0
    found = bind(prim, *operands, **params)
    return found, [0] * len(found) if prim.multiple_results else 0


# ---- lowering


def _partition(prim, ctx, operands, params):
    given, results = kinds(prim.name, operands, **_facts(params))
    rows = [f"row{d}" for d in range(ctx.avals_in[0].ndim - 1)]
    weight = ["vocabulary", "width"] if params["spec"].transposed else ["width", "vocabulary"]
    names = {"x": [*rows, "width"], "w": weight, "r": rows, "b": ["vocabulary"]}
    dims = [names[kind] for kind in given + results]
    left = {name for kind in results for name in names[kind]}

    def shard(over, *parts, **params):
        split = Split(tuple(a for name in rows for a in over[name]), tuple(over["vocabulary"]))
        if not any(split):
            return prim.bind(*parts, **params)
        return _REFERENCES[prim.name](*parts, split=split, **params)

    return partition.lower(
        ctx,
        prim,
        operands,
        params,
        dims,
        shard,
        exact={*rows, "vocabulary"},
        summed=[name for name in ("width", "vocabulary") if name not in left],
        whole={"width"},
    )


def _sum(h, weight, labels, c, *bias, spec):
    return jnp.sum(c * bind(linear_cross_entropy_p, h, weight, labels, *bias, spec=spec))


def _plain(h, weight, labels, *bias, spec):
    return reference.plain(h, weight, labels, *bias, spec=spec)


def _plain_both(h, weight, labels, c, *bias, spec, wanted):
    value = reference.plain(h, weight, labels, *bias, spec=spec)
    return [value, *reference.plain_gradient(h, weight, labels, c, *bias, spec=spec, wanted=wanted)]


_REFERENCES = {
    "jaxkern_linear_cross_entropy": reference.loss,
    "jaxkern_linear_cross_entropy_both": reference.both,
    "jaxkern_linear_cross_entropy_grad": reference.gradient,
    "jaxkern_linear_cross_entropy_jvp": reference.tangent,
}


def _primitive(suffix, taylor=None):
    name = f"jaxkern_linear_cross_entropy{suffix}"
    return define.primitive(
        name,
        functools.partial(_shape, name),
        _batch,
        _REFERENCES[name],
        several=_several(name),
        taylor=taylor,
        plan=lambda *types, **params: None,  # its reference has the kernels
        partition=_partition,
    )


linear_cross_entropy_p = _primitive("", _plain)
linear_cross_entropy_both_p = _primitive("_both", _plain_both)
linear_cross_entropy_grad_p = _primitive("_grad", lambda *a, **k: _plain_both(*a, **k)[1:])
linear_cross_entropy_jvp_p = _primitive("_jvp")
linear_cross_entropy_sum_p = define.primitive(
    "jaxkern_linear_cross_entropy_sum",
    functools.partial(_shape, "jaxkern_linear_cross_entropy_sum"),
    _batch,
    _sum,
    taylor=lambda h, weight, labels, c, *bias, spec: jnp.sum(c * _plain(h, weight, labels, *bias, spec=spec)),
)
compat.needs_devices(linear_cross_entropy_sum_p)  # for the primitive in its reference
