"""The cross-entropy of scores, and its derivatives.

    softmax_score_loss_p    (x, labels, *args, mask)    -> loss, largest, log_total[, count]

The operands are the operands of softmax_score_p (primitive.py) with labels after x: int32, of the shape of x with size 1 along
the axis, IGNORED or BAD where there is no class. All results have size 1 along the axis and the computing type. `largest` and
`log_total` are the results of softmax_score_sums_p, one kernel; `count`, of label smoothing alone, is the number of
participants, or 1 if there is none. The score of the label is gathered: numbers per row.

The gradients are one kernel (_ops/function), which computes the scores again. For the row weights

    a = g (1 + 2 z_loss lse) + h        g, h: cotangents of the loss and of log_total
    b = g

the cotangent of the score of an element is  a p - b (s / count + (1 - s) [label]),  where s is the label smoothing and
p = exp(score - largest - log_total). `largest` is treated as a constant: the derivative of lse = largest + log_total is the
derivative of log_total. So the derivatives are closed, to any order.
"""

import functools

import jax
import jax.numpy as jnp
from jax.interpreters import mlir
from jax.sharding import AbstractMesh

from jaxkern._core import define, functor, partition, switch, validate
from jaxkern._core.autodiff import defvjp
from jaxkern._core.primitive import bind
from jaxkern._core.rows import computed
from jaxkern._core.signature import primitive
from jaxkern._ops.function.primitive import apply
from jaxkern._ops.score import reference
from jaxkern._ops.score.derivatives import MOST
from jaxkern._ops.score.primitive import MASK, ROW, X, arguments, of_scores, softmax_score_sums_p

BAD, IGNORED = -1, -2


def _loss(x, labels, *parts, options, **params):
    """The results in terms of other primitives."""
    largest, log_total = bind(softmax_score_sums_p, x, *parts, None, log=True, unscored=False, **params)
    loss = log_total + (1 - options.smoothing) * (largest - _of_label(x, labels, parts, **params))
    counts = []
    if options.smoothing:
        below, count = _participants(x, largest, parts, **params)
        counts = [jnp.maximum(count, 1)]
        loss = loss - options.smoothing * (below / counts[0])
    if options.z_loss:
        loss = loss + options.z_loss * (largest + log_total) ** 2
    loss = jnp.where((labels == IGNORED) | (log_total == -jnp.inf), 0, loss)
    return [jnp.where(labels == BAD, jnp.nan, loss), largest, log_total, *counts]


def _of_label(x, labels, parts, *, axis, algorithm, function, indexed):
    """The score of each row's label; -inf where it is masked."""
    del algorithm
    if isinstance(x.shape[axis], int) and x.shape[axis] == 0:
        return jnp.full(labels.shape, -jnp.inf, computed(x).dtype)
    label = jnp.maximum(labels, 0)
    take = lambda a: a if a.shape[axis] == 1 else jnp.take_along_axis(a, label, axis, mode="clip")
    (_, *arguments), mask = reference.operands(x, (*parts, None), indexed)
    arguments = [label if k < len(indexed) and indexed[k] == axis else take(a) for k, a in enumerate(arguments)]
    (s,) = function.unrounded(take(x), *arguments)
    s = computed(jnp.broadcast_to(s, labels.shape))
    return s if mask is None else jnp.where(take(mask), s, -jnp.inf)


def _participants(x, largest, parts, *, axis, algorithm, function, indexed):
    """Sums over rows of the scores less the largest one, and how many elements take part: one kernel."""
    arguments, mask = reference.operands(x, (*parts, None), indexed)

    def f(*xs):
        *arguments, largest = xs
        s, kept = _score(function, arguments, mask is not None)
        return [jnp.where(kept, s - largest, 0), jnp.where(kept, 1, 0).astype(s.dtype)]

    in_dtypes = [*function.in_dtypes, *([jnp.dtype(bool)] if mask is not None else []), largest.dtype]
    f = functor.of_scalars(f, in_dtypes, [largest.dtype] * 2, function.label, False)
    arrays = [x, *arguments[1:], *([] if mask is None else [mask]), largest]
    return apply(f, arrays, [(axis,)] * 2, x.shape)


def _score(function, arguments, masked):
    """(the score of an element, whether it takes part); the last of `arguments` is the mask, if there is one."""
    arguments, mask = (arguments[:-1], arguments[-1]) if masked else (arguments, None)
    x, *rest = arguments
    (s,) = function.scalars(x if mask is None else jnp.where(mask, x, 0), *rest)
    return s, s != -jnp.inf if mask is None else mask & (s != -jnp.inf)


def _gradient(function, wrt, column, options, masked, dtype):
    """The Function of an element's gradients by the arguments of `function` at `wrt`.

    Its arguments: the arguments of `function`; the mask if there is one; the index along the axis, unless it is the argument
    `column`; the numbers of the row: label, largest, log_total, with smoothing count, then b and a.
    """
    pullback = function.vjp(wrt)
    own = len(function.in_dtypes)

    def f(*xs):
        arguments, rest = xs[: own + masked], list(xs[own + masked :])
        index = rest.pop(0) if column is None else arguments[column]
        label, largest, log_total, *count, b, a = rest
        s, kept = _score(function, arguments, masked)
        kept &= label != IGNORED
        # Finite where nothing takes part, for the transpose.
        p = jnp.exp(jnp.where(kept, (s - largest) - log_total, -jnp.inf))
        ds = a * jnp.where(label == BAD, jnp.nan, p) - jnp.where(index == label, b * (1 - options.smoothing), 0)
        if options.smoothing:
            ds = ds - b * (options.smoothing / count[0])
        ds = jnp.where(kept, ds, 0)
        given = [jnp.where(arguments[own], arguments[0], 0) if masked else arguments[0], *arguments[1:own]]
        return [jnp.where(kept, d, 0) for d in pullback.scalars(*given, ds)]

    in_dtypes = [*function.in_dtypes, *[jnp.dtype(bool)] * masked, *[jnp.dtype(jnp.int32)] * (1 + (column is None))]
    in_dtypes += [dtype] * (4 + bool(options.smoothing))
    return functor.of_scalars(f, in_dtypes, pullback.out_dtypes, function.label, function.coarse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _differentiable(operands, active, params):
    return bind(softmax_score_loss_p, *operands, **dict(params))


def _forward(operands, active, params):
    found = bind(softmax_score_loss_p, *operands, **dict(params))
    return found, (operands, found[1:])


def _backward(active, params, kept, cts):
    (x, labels, *parts), (largest, log_total, *count) = kept
    params = dict(params)
    function, indexed, axis, options = (params[k] for k in ("function", "indexed", "axis", "options"))
    g, _, h, *_ = cts
    a, b = g + h, g
    if options.z_loss:
        lse = largest + jnp.where(log_total == -jnp.inf, 0, log_total)
        a = a + g * (2 * options.z_loss * lse)
    arguments, mask = reference.operands(x, (*parts, None), indexed)
    # Positions of the operands among the arguments of `function`.
    at = {k: 0 if k == 0 else k - 1 + len(indexed) for k in active}
    column = 1 + indexed.index(axis) if axis in indexed else None
    pullback = _gradient(function, tuple(at.values()), column, options, mask is not None, largest.dtype)
    index = jax.lax.broadcasted_iota(jnp.int32, [n if d == axis else 1 for d, n in enumerate(x.shape)], axis)
    arrays = [x, *arguments[1:], *([] if mask is None else [mask]), *([index] if column is None else [])]
    arrays += [labels, largest, log_total, *count, b, a]
    operands = (x, labels, *parts)
    over = [tuple(d for d in range(x.ndim) if operands[k].shape[d] == 1 != x.shape[d]) for k in at]
    cotangents = [None] * len(operands)
    for k, d in zip(at, apply(pullback, arrays, over, x.shape)):
        cotangents[k] = validate.split_like(d, jax.typeof(operands[k]))
    return (tuple(cotangents),)


_differentiable.defvjp(_forward, _backward)


softmax_score_loss_p = primitive(
    "jaxkern_softmax_score_loss",
    of_scores(
        lambda params: {"x": X, "labels": "int32 *lead one *trail"} | arguments(params) | MASK,
        lambda operands, params: [ROW] * (3 + bool(params["options"].smoothing)),
    ),
    _loss,
)


def _lower(ctx, *operands, **params):
    """Lowers _loss, outside of explicit meshes: XLA finds where the score of a label is."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        avals = [jax.core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]
    f = partition.outside_meshes(functools.partial(define.references[softmax_score_loss_p], **params))
    return mlir.lower_fun(f, multiple_results=True)(ctx.replace(avals_in=avals), *operands)


mlir.register_lowering(softmax_score_loss_p, switch.own_code(_lower))
defvjp(
    softmax_score_loss_p,
    lambda *operands, active, **params: _differentiable(operands, active, tuple(params.items())),
    differentiable=(0, *range(2, MOST)),
    tell_active=True,
)
