"""The primitives of cross-entropy: their signatures, and what kernels read.

    cross_entropy_p        (logits, labels, mask)                                   -> loss, largest, total[, count]
    cross_entropy_grad_p   (logits, labels, largest, total, weight, count, mask)    -> gradient
    cross_entropy_both_p   (logits, labels, weight, mask)                           -> all of these, in one read
    cross_entropy_jvp_p    (logits, labels, largest, total, tangent, count, mask)   -> the transpose of the gradient; left to
                                                                                       XLA

mask and count are optional. The residuals are numbers per row: the largest logit, `total`, the sum of exp(logit - largest),
whose logarithms make logsumexp, and with a mask the count of participants. They are functions of the logits, and so the
derivatives treat them: only those along logits and weight exist.
"""

import functools

import jax.numpy as jnp
from jax.interpreters import mlir

from jaxkern._core import algorithms, compat, decisions, stablehlo
from jaxkern._core.rows import mask_shape
from jaxkern._core.signature import Signature, primitive
from jaxkern._ops.cross_entropy import one_read, plan, reference, sharding
from jaxkern._ops.cross_entropy.reference import Options  # noqa: F401

algorithms.register(plan, "softmax_cross_entropy")

LOGITS, LABELS, ROW = "T *lead classes *trail", "integer *lead *trail", "wide *lead *trail"
MASK = {"mask?": "bool *lead? classes? *trail?"}


def _losses(operands, params):
    return [ROW] * (3 if operands.mask is None else 4)


_signature = functools.partial(Signature, exact={"classes"})
_INPUT, _RESIDUALS = {"logits": LOGITS, "labels": LABELS}, {"largest": ROW, "total": ROW}
LOSS = _signature(_INPUT | MASK, _losses)
GRADIENT = _signature(_INPUT | _RESIDUALS | {"weight": ROW, "count?": ROW} | MASK, LOGITS)
TANGENT = _signature(_INPUT | _RESIDUALS | {"tangent": LOGITS, "count?": ROW} | MASK, ROW)
BOTH = _signature(_INPUT | {"weight": ROW} | MASK, lambda operands, params: [*_losses(operands, params), LOGITS])


# ---- lowering
#
# A result of a custom call shares an operand's memory always or never. If the operand is used afterwards, or is an
# argument that was not donated, XLA copies it first. So the gradient overwrites logits that are an intermediate result
# or a donated argument. It and the one-read rule (one_read.py) see the program around a primitive, so that lowering
# rules must not be cached: a cached rule sees the operands as arguments of a function of its own.


def _readable(*types, axis, **params):
    """Broadcasts a mask that kernels cannot read; see `signature.primitive`."""
    logits, mask = types[0], types[-1]
    shape = None if mask is None else mask_shape(logits.shape, mask.shape, axis)
    if mask is None or shape == mask.shape:
        return None
    return lambda *operands, **params: (*operands[:-1], jnp.broadcast_to(operands[-1], shape))


def _partition(signature, part, prim, ctx, operands, params):
    params = params | {"options": params["options"]._replace(overwrites=_overwrites(prim, operands, params))}
    return signature.partition(functools.partial(sharding.shard, part), prim, ctx, operands, params)


def _left(prim, ctx, operands, params) -> bool:
    """Whether a loss that `jaxkern.accelerate` put into a program is left to XLA there."""
    if not params["options"].as_written:
        return False
    narrow = stablehlo.before_widening(operands[0])
    why = decisions.why_left(ctx, operands[0] if narrow is None else narrow, "logits")
    x = ctx.avals_in[0] if narrow is None else ctx.avals_in[0].update(dtype=jnp.dtype(jnp.bfloat16))
    if prim is cross_entropy_p:
        reason = "loss and gradient in one read"
        decisions.record_call(ctx, "softmax_cross_entropy", why, reason, [x], stablehlo.size(x))
    return bool(why)


def _overwrites(prim, operands, params) -> bool:
    """Whether the gradient takes the memory of the logits."""
    return prim is not cross_entropy_p and (params["options"].overwrites or _may_overwrite(operands[0]))


def _may_overwrite(value) -> bool:
    while (maker := one_read.maker(value)) is not None and maker.name == "stablehlo.reshape":
        value = maker.operands[0]  # the same memory
    if maker is not None:
        return maker.name != "stablehlo.constant"
    return stablehlo.is_donated(value)


def _primitive(name, signature, reference, part=None, which=None, **options):
    """part: computes the part of a device whose classes are split. which: the pass that kernels compute, if there are any."""
    return primitive(
        f"jaxkern_{name}",
        signature,
        reference,
        plan=which and functools.partial(plan.cross_entropy, which),
        partition=which and functools.partial(_partition, signature, part),
        prepare=_readable,
        dtypes=plan.DTYPES,
        left=_left,
        cached=False,
        **options,
    )


def _of_narrow_logits(prim, ctx, operands, params, lower):
    """Lowers a call on float32 logits that are converted bfloat16 logits to a call on the latter, which halves the reads.

    Returns None if the logits are not such a conversion. The gradient is rounded to bfloat16 and converted to float32; the
    program itself would round it where it converts the gradient back.
    """
    narrow = stablehlo.before_widening(operands[0]) if params["options"].as_written else None
    if narrow is None:
        return None
    wide, dtype = ctx.avals_in[0], jnp.dtype(jnp.bfloat16)
    as_narrow = lambda avals: [a.update(dtype=dtype) if a.shape == wide.shape else a for a in avals]
    inner = ctx.replace(avals_in=as_narrow(ctx.avals_in), avals_out=as_narrow(ctx.avals_out))
    with decisions.noted():
        results = lower(prim, inner, [narrow, *operands[1:]], params)
    if prim is cross_entropy_p:
        return results
    widen = mlir.lower_fun(lambda dx: dx.astype(wide.dtype), multiple_results=False)
    return widen(ctx.replace(avals_in=inner.avals_out), *results)


def _loss_instead(ctx, operands, params, lower):
    return _of_narrow_logits(cross_entropy_p, ctx, operands, params, lower)


def _gradient_instead(ctx, operands, params, lower):
    found = _of_narrow_logits(cross_entropy_grad_p, ctx, operands, params, lower)
    return found or one_read.gradient(cross_entropy_p, cross_entropy_both_p, ctx, operands, params, lower)


def _overwritten(prim, operands, params):
    """{logits: gradient} if the gradient, the last result, takes the memory of the logits."""
    last = 0 if prim is cross_entropy_grad_p else 3 + ("mask" in params.get("given", ""))
    return {0: last} if _overwrites(prim, operands, params) else None


def _loss_of_part(*operands, **params):
    return sharding.loss(cross_entropy_p, *operands, **params)


def _gradient_of_part(*operands, **params):
    return sharding.gradient(cross_entropy_grad_p, *operands, **params)


def _both_of_part(*operands, **params):
    return sharding.both(cross_entropy_p, cross_entropy_grad_p, *operands, **params)


cross_entropy_p = _primitive("cross_entropy", LOSS, reference.loss, _loss_of_part, "loss", instead=_loss_instead)
compat.check_indices(
    cross_entropy_p,
    lambda logits, labels, *mask, axis, options, **_: (labels, axis) if options.as_written else None,
)
# Taylor series follow functions of the logits alone.
cross_entropy_grad_p = _primitive(
    "cross_entropy_grad",
    GRADIENT,
    reference.gradient_by_residuals,
    _gradient_of_part,
    "gradient",
    taylor=reference.gradient,
    aliases=_overwritten,
    instead=_gradient_instead,
)
cross_entropy_jvp_p = _primitive(
    "cross_entropy_jvp", TANGENT, reference.transpose_by_residuals, taylor=reference.transpose
)
cross_entropy_both_p = _primitive(
    "cross_entropy_both", BOTH, reference.both, _both_of_part, "both", aliases=_overwritten
)
