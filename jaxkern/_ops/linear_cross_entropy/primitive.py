"""The primitives of the linear cross-entropy: their signatures, batching, partitioning.

    linear_cross_entropy_p        (h, weight, labels, bias)        -> loss per row
    linear_cross_entropy_sum_p    (h, weight, labels, c, bias)     -> sum(c * loss)
    linear_cross_entropy_both_p   (h, weight, labels, c, bias)     -> loss, the wanted gradients of sum(c * loss)
    linear_cross_entropy_grad_p   (h, weight, labels, c, bias)     -> the wanted gradients alone
    linear_cross_entropy_jvp_p    (h, weight, labels, bias, dh, dweight, dbias)    -> the transpose of these, per row

with h [*rows, width], labels and c [*rows], weight [width, vocabulary] or transposed, and bias [vocabulary]. bias and the
tangents are optional. `wanted`: whether the gradients of h, weight and bias are. They have no kernels of their own: they
consist of XLA's products and of the primitives of cross-entropy (reference.py), and `plan` cuts them into chunks. Rows and the
vocabulary may be split over devices.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern._core import algorithms, compat
from jaxkern._core.arrays import of_some
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind
from jaxkern._core.signature import FLAT, Signature, primitive
from jaxkern._ops.linear_cross_entropy import plan, reference
from jaxkern._ops.linear_cross_entropy.reference import Spec, Split  # noqa: F401

algorithms.register(plan, "linear_softmax_cross_entropy")


def _weight(params):
    return "weight vocabulary width" if params["spec"].transposed else "weight width vocabulary"


def _operands(params):
    return {"h": H, "weight": _weight(params), "labels": LABELS}


def _gradients(operands, params):
    return [text for text, wanted in zip((H, _weight(params), BIAS), params["wanted"]) if wanted]


# `number` is the dtype of the loss.
H, LABELS, BIAS, ROW = "T *rows width", "integer *rows", "bias vocabulary", "number *rows"
_signature = functools.partial(
    Signature,
    layout=FLAT,
    dtypes=lambda params: {"number": computing(jnp.dtype(params["spec"].logits_dtype))},
    exact={"rows", "vocabulary"},
    whole={"width"},
    summed={"width", "vocabulary"},
)
_weighed = functools.partial(_signature, lambda params: _operands(params) | {"c": ROW, "bias?": BIAS})


# ---- vmap


def _batch(prim, operands, dims, params):
    """A batch of rows becomes one of their dimensions; a batch of weights, or of their gradients, is a loop."""
    shared = [dims._asdict().get(name) for name in ("weight", "bias", "dweight", "dbias")]
    if any(d is not None for d in shared) or any(params.get("wanted", (False,))[1:]):
        at = [k for k, d in enumerate(dims) if d is not None]
        one = of_some(functools.partial(bind, prim, **params), operands, at)
        found = lax.map(lambda xs: one(*xs), [jnp.moveaxis(operands[k], dims[k], 0) for k in at])
        return found, [0] * len(found) if prim.multiple_results else 0
    if prim is not linear_cross_entropy_sum_p:
        return None
    h, weight, labels, c, bias = operands
    one = lambda h, labels, c: c * bind(linear_cross_entropy_p, h, weight, labels, bias, **params)
    value = jax.vmap(one, (dims.h, dims.labels, dims.c))(h, labels, c)
    return jnp.sum(value, range(1, value.ndim)), 0


# ---- lowering


def _shard(reference, prim, over, *parts, **params):
    split = Split(over["rows"], over["vocabulary"])
    return reference(*parts, split=split, **params) if any(split) else bind(prim, *parts, **params)


def _primitive(suffix, signature, reference, **options):
    return primitive(
        f"jaxkern_linear_cross_entropy{suffix}",
        signature,
        reference,
        batch=_batch,
        shard=functools.partial(_shard, reference),
        **options,
    )


def _plain_both(h, weight, labels, c, bias, *, spec, wanted):
    value = reference.plain(h, weight, labels, bias, spec=spec)
    return [value, *reference.plain_gradient(h, weight, labels, c, bias, spec=spec, wanted=wanted)]


_LOSS, _GRADIENT = _signature(lambda params: _operands(params) | {"bias?": BIAS}, ROW), _weighed(results=_gradients)
_BOTH = _weighed(results=lambda operands, params: [ROW, *_gradients(operands, params)])
linear_cross_entropy_p = _primitive("", _LOSS, reference.loss, taylor=reference.plain)
linear_cross_entropy_both_p = _primitive("_both", _BOTH, reference.both, taylor=_plain_both)
linear_cross_entropy_grad_p = _primitive(
    "_grad", _GRADIENT, reference.gradient, taylor=lambda *operands, **params: _plain_both(*operands, **params)[1:]
)
linear_cross_entropy_jvp_p = _primitive(
    "_jvp",
    _signature(
        lambda params: _operands(params) | {"bias?": BIAS, "dh?": H, "dweight?": _weight(params), "dbias?": BIAS}, ROW
    ),
    reference.tangent,
)
linear_cross_entropy_sum_p = primitive(
    "jaxkern_linear_cross_entropy_sum",
    _weighed(results="number"),
    lambda h, weight, labels, c, bias, *, spec: jnp.sum(
        c * bind(linear_cross_entropy_p, h, weight, labels, bias, spec=spec)
    ),
    batch=_batch,
    taylor=lambda h, weight, labels, c, bias, *, spec: jnp.sum(c * reference.plain(h, weight, labels, bias, spec=spec)),
)
compat.needs_devices(linear_cross_entropy_sum_p)  # for the primitive in its reference
