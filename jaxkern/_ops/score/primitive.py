"""The primitives of softmax and log_softmax of a user function.

    softmax_score_p          y = softmax(s) or log_softmax(s), where s = function(x, *indices, *args)
    softmax_score_grad_p     dx from x and g: ds of the softmax, times the derivative of the function by x;
                             `unscored`: ds itself
    softmax_score_grads_p    both of these
    softmax_score_jvp_p      the transpose of softmax_score_grad_p; left to XLA
    softmax_score_jvps_p     the transpose of softmax_score_grads_p, which takes two tangents; left to XLA
    softmax_score_sums_p     the largest s of each row, and log(sum(exp(s - largest))), -inf for a row without participants;
                             both in the computing type, with size 1 along the axis. It has the derivatives of the loss
                             (loss.py)

Operands: x, for a gradient g, the arguments of `function` after the indices, and two optional ones, the mask, and the origin, an
int32 for each index, which says where a part of an array begins.

function: a Function (_core/functor.py) of an element of x, of int32 indices and of `args`, that returns the score in the
computing type. indexed: the dimensions of x that the indices count along.
"""

import functools

import jax.numpy as jnp
from jax import lax

from jaxkern._core.primitive import bind
from jaxkern._core.rows import mask_shape
from jaxkern._core.signature import AXIS, Layout, Signature, numbered, primitive
from jaxkern._ops.score import plan, reference


def _grown(params, group, at):
    return AXIS.grown(params, group, at) | {"indexed": tuple(d + (d >= at) for d in params["indexed"])}


X, ROW = "T *lead row *trail", "wide *lead one *trail"
MASK = {"mask?": "bool *lead? row? *trail?"}
# A batch becomes a dimension before the axis, which indices do not count along.
of_scores = functools.partial(
    Signature, layout=Layout(AXIS.ranks, _grown, ("lead",)), sizes=lambda operands, params: {"one": 1}, exact={"row"}
)


def _signature(arrays, results):
    return of_scores(
        lambda params: dict.fromkeys(arrays, X) | arguments(params) | MASK | {"origin?": "int32 indices"}, results
    )


def arguments(params) -> dict:
    """The declarations of the arguments of `function` after x and the indices."""
    return numbered(
        "argument", len(params["function"].in_dtypes) - 1 - len(params["indexed"]), "any *lead? row? *trail?"
    )


def readable(*types, axis, **params):
    """Broadcasts masks and arguments that kernels cannot read; see `signature.primitive`."""
    x, shape = types[0], lambda a: a.shape if a.ndim != x.ndim else mask_shape(x.shape, a.shape, axis)
    full = [None if a is None else shape(a) for a in types]
    if all(a is None or s == a.shape for a, s in zip(types, full)):
        return None
    return lambda *operands, **params: tuple(a if a is None else jnp.broadcast_to(a, s) for a, s in zip(operands, full))


def _partition(signature, in_jnp, prim, ctx, operands, params):
    """Each device computes its part. Rows that are split exchange a few numbers."""
    if "origin" in params.get("given", "") or not plan.reads(ctx.avals_in[0].shape, params["axis"]):
        return None
    return signature.partition(functools.partial(_shard, in_jnp), prim, ctx, operands, params)


def _shard(in_jnp, prim, over, x, *parts, axis, indexed, **params):
    name = lambda d: f"lead{d}" if d < axis else "row" if d == axis else f"trail{d - axis - 1}"
    along = [over.get(name(d), ()) for d in indexed]
    if any(along):
        begins = [lax.axis_index(axes) * x.shape[d] if axes else 0 for d, axes in zip(indexed, along)]
        parts = (*parts[:-1], jnp.stack([jnp.asarray(b, jnp.int32) for b in begins]))
    params |= {"axis": axis, "indexed": indexed}
    return in_jnp(x, *parts, over=over["row"], **params) if over["row"] else bind(prim, x, *parts, **params)


def _planned(launches, device, operands, results, **params):
    extras = " ".join(n for n in ("mask", "origin") if getattr(operands, n) is not None)
    return launches(device, [a for a in operands if a is not None], results, extras=extras, **params)


def _primitive(name, arrays, results, in_jnp, launches=None, **options):
    signature = _signature(arrays, results)
    return primitive(
        f"jaxkern_softmax_{name}",
        signature,
        in_jnp,
        plan=launches and functools.partial(_planned, launches),
        partition=launches and functools.partial(_partition, signature, in_jnp),
        prepare=readable,
        dtypes=plan.DTYPES,
        **options,
    )


softmax_score_p = _primitive("score", ["x"], X, reference.score, plan.score, on_cpu=reference.score_on_cpu)
softmax_score_grad_p = _primitive("score_grad", ["x", "g"], X, reference.score_grad, plan.score_grad)
softmax_score_grads_p = _primitive("score_grads", ["x", "g"], [X, X], reference.score_grads, plan.score_grad)
softmax_score_jvp_p = _primitive("score_jvp", ["x", "t"], X, reference.score_jvp)
softmax_score_jvps_p = _primitive("score_jvps", ["x", "tx", "ts"], X, reference.score_jvps)
softmax_score_sums_p = _primitive("score_sums", ["x"], [ROW, ROW], reference.score_sums, plan.score_sums)
