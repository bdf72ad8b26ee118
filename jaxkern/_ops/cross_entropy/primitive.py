"""The primitives of cross-entropy: shapes and batching.

    cross_entropy_p        (logits, labels[, mask])                                   -> loss, largest, total[, count]
    cross_entropy_grad_p   (logits, labels, largest, total, weight[, count, mask])    -> gradient
    cross_entropy_both_p   (logits, labels, weight[, mask])                           -> all of these, in one read
    cross_entropy_jvp_p    (logits, labels, largest, total, t[, count, mask])         -> the transpose of the gradient;
                                                                                         left to XLA

The residuals are numbers per row: the largest logit, `total`, the sum of exp(logit - largest), whose logarithms make
logsumexp, and with a mask the count of participants. They are functions of the logits, and so the derivatives treat
them: only those along logits and weight exist.
"""

import functools

import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.interpreters import mlir

from jaxkern._core import algorithms, compat, decisions, define, stablehlo, switch
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind
from jaxkern._core.rows import adapt_mask, without_axis
from jaxkern._ops.cross_entropy import one_read, plan, reference, sharding
from jaxkern._ops.cross_entropy.reference import Options  # noqa: F401

algorithms.register(plan, "softmax_cross_entropy")


# The operands of each primitive without a mask and with one, then its results: arrays of logits (x), numbers per row
# (r) and masks (m).
KINDS = {
    "cross_entropy": ("xr", "xrm", "rrr", "rrrr"),
    "cross_entropy_grad": ("xrrrr", "xrrrrrm", "x", "x"),
    "cross_entropy_jvp": ("xrrrx", "xrrrxrm", "r", "r"),
    "cross_entropy_both": ("xrr", "xrrm", "rrrx", "rrrrx"),
}


def kinds(name, operands):
    """The kinds of the operands and of the results of the primitive of this name."""
    plain, masked, results, masked_results = KINDS[name.removeprefix("jaxkern_")]
    return (masked, masked_results) if len(operands) == len(masked) else (plain, results)


def _abstract_eval(name, x, *rest, axis, algorithm, options):
    del algorithm, options
    operands, results = kinds(name, (x, *rest))
    rows = x.shape[:axis] + x.shape[axis + 1 :]
    for kind, a in zip(operands, (x, *rest), strict=True):
        fits = {
            "x": a.shape == x.shape and a.dtype == x.dtype,
            "r": a.shape == rows,
            "m": a.dtype == jnp.bool_ and a.ndim == x.ndim and all(b in (1, d) for d, b in zip(x.shape, a.shape)),
        }
        if not fits[kind]:
            raise ValueError(f"{name}: {a.str_short()} does not fit {x.str_short()} along axis {axis}")
    row = without_axis(x, axis).update(dtype=computing(x.dtype))
    found = [x.update(weak_type=False) if kind == "x" else row for kind in results]
    return found if len(found) > 1 else found[0]


def _batch(prim, operands, dims, *, axis, algorithm, options):
    """The batch becomes one more dimension of the logits, where they have it, or their first."""
    operand_kinds, results = kinds(prim.name, operands)
    size = next(x.shape[d] for x, d in zip(operands, dims) if d is not None)
    at = dims[0] if dims[0] is not None else 0
    new_axis = axis + (at <= axis)
    of_rows = at - (at > new_axis)

    def place(x, d, kind):
        where = of_rows if kind == "r" else at
        if d is not None:
            return jnp.moveaxis(x, d, where)  # nothing at all when they are equal
        x = jnp.expand_dims(x, where)
        # A mask keeps a dimension of size 1: kernels read it in place.
        return x if kind == "m" else jnp.broadcast_to(x, (*x.shape[:where], size, *x.shape[where + 1 :]))

    operands = [place(*args) for args in zip(operands, dims, operand_kinds)]
    out = bind(prim, *operands, axis=new_axis, algorithm=algorithm, options=options)
    places = [at if kind == "x" else of_rows for kind in results]
    return (out, places) if prim.multiple_results else (out, places[0])


# ---- lowering
#
# A result of a custom call shares an operand's memory always or never. If the operand is used afterwards, or is an
# argument that was not donated, XLA copies it first. So the gradient overwrites logits that are an intermediate result
# or a donated argument. It and the one-read rule (one_read.py) see the program around a primitive, so that lowering
# rules must not be cached: a cached rule sees the operands as arguments of a function of its own.


def _partition(prim, ctx, operands, params):
    params = params | {"options": params["options"]._replace(overwrites=_overwrites(prim, operands, params))}
    split = functools.partial(sharding.shard, prim, cross_entropy_p)
    return sharding.partitioned(prim, kinds(prim.name, operands), split, ctx, operands, params)


def _adapt(prim, *avals, axis, **params):
    return adapt_mask(prim, avals[0], avals[-1], axis) if kinds(prim.name, avals)[0][-1] == "m" else None


def _left(prim, ctx, operands, params) -> bool:
    """Whether a loss that `jaxkern.accelerate` put into a program is left to XLA there."""
    if not params["options"].as_written:
        return False
    settings = switch.current()
    why = switch.refusal(ctx, settings)
    narrow = None if why else stablehlo.before_widening(operands[0])
    if (
        not why
        and stablehlo.is_arithmetic(ctx, operands[0] if narrow is None else narrow)
        and not (settings and settings.force)
    ):
        why = "XLA fuses the arithmetic or slice that makes the logits"
    x = ctx.avals_in[0] if narrow is None else ctx.avals_in[0].update(dtype=jnp.dtype(jnp.bfloat16))
    if prim is cross_entropy_p:
        reason = why or "loss and gradient in one read"
        decisions.record(
            "softmax_cross_entropy",
            not why,
            reason,
            [x],
            functools.partial(compat.frames, ctx.traceback),
            stablehlo.size(x),
        )
    return bool(why)


def _overwrites(prim, operands, params) -> bool:
    """Whether the gradient takes the memory of the logits."""
    return prim is not cross_entropy_p and (params["options"].overwrites or _may_overwrite(operands[0]))


def _may_overwrite(value) -> bool:
    while (maker := one_read.maker(value)) is not None and maker.name == "stablehlo.reshape":
        value = maker.operands[0]  # the same memory
    if maker is not None:
        return maker.name != "stablehlo.constant"
    function = value.owner.owner.operation
    if function.name != "func.func" or "arg_attrs" not in function.attributes:
        return False
    own = ir.DictAttr(ir.ArrayAttr(function.attributes["arg_attrs"])[ir.BlockArgument(value).arg_number])
    return "jax.buffer_donor" in own or "tf.aliasing_output" in own


def _primitive(name, reference, taylor=None, which=None, **options):
    """which: the pass that kernels compute, if there are any. Taylor series follow functions of the logits alone."""
    results = len(KINDS[name][2])
    return define.primitive(
        f"jaxkern_{name}",
        functools.partial(_abstract_eval, name),
        _batch,
        reference,
        several=results > 1,
        taylor=taylor,
        plan=which and functools.partial(plan.cross_entropy, which),
        partition=_partition,
        adapt=_adapt,
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
    """{logits: gradient} if the gradient takes the memory of the logits."""
    return {0: len(kinds(prim.name, operands)[1]) - 1} if _overwrites(prim, operands, params) else None


cross_entropy_p = _primitive("cross_entropy", reference.loss, which="loss", instead=_loss_instead)
compat.check_indices(
    cross_entropy_p,
    lambda logits, labels, *mask, axis, options, **_: (labels, axis) if options.as_written else None,
)
cross_entropy_grad_p = _primitive(
    "cross_entropy_grad",
    reference.gradient_by_residuals,
    reference.gradient,
    "gradient",
    aliases=_overwritten,
    instead=_gradient_instead,
)
cross_entropy_jvp_p = _primitive("cross_entropy_jvp", reference.transpose_by_residuals, reference.transpose)
cross_entropy_both_p = _primitive("cross_entropy_both", reference.both, which="both", aliases=_overwritten)
