"""The softmax of scores and its derivatives in jnp.

primitive.py describes the operands. `over` names the mesh axes that split the rows. An element takes part if it is not masked
and its score is not -inf.
"""

import jax
import jax.numpy as jnp

from jaxkern._core import functor, partition
from jaxkern._core.rows import (
    computed,
    lowest_for_infinity,
    row_sum,
    unless_nan,
)


def operands(x, parts, indexed):
    """(arguments of `function` as arrays of the rank of x, mask or None). x is 0 where it is masked."""
    *args, mask, origin = parts
    indices = []
    for k, d in enumerate(indexed):
        index = jax.lax.broadcasted_iota(jnp.int32, (*(1,) * d, x.shape[d], *(1,) * (x.ndim - d - 1)), d)
        indices.append(index if origin is None else index + origin[k])
    return [x if mask is None else jnp.where(mask, x, 0), *indices, *args], mask


def _scores(x, parts, function, indexed):
    """(arguments, scores, which elements take part); the scores of the others are -inf."""
    arguments, mask = operands(x, parts, indexed)
    s = _unrounded(function, arguments, x.shape)
    kept = s != -jnp.inf if mask is None else mask & (s != -jnp.inf)
    return arguments, jnp.where(kept, s, -jnp.inf), kept


def _unrounded(function, arguments, shape):
    (s,) = function.unrounded(*arguments)
    return computed(jnp.broadcast_to(s, shape))


def _nonzero(total):
    return jnp.where(total == 0, 1, total)


def score(x, *parts, axis, algorithm, log, function, indexed, unscored, over=()):
    _, s, kept = _scores(x, parts, function, indexed)
    largest, (total,) = partition.row_exponentials(s, axis, over)
    if log:
        y = jnp.where((total == 0) | ~kept, -jnp.inf, s - largest - jnp.log(_nonzero(total)))
        return lowest_for_infinity(y, x.dtype)
    return jnp.where(kept, jnp.exp(s - largest) / _nonzero(total), 0).astype(x.dtype)


def score_on_cpu(x, *parts, axis, algorithm, log, function, indexed, unscored):
    # Rows with NaN or +inf are NaN even where an element takes no part, and so are rows without scores: see `unless_nan`.
    # 1.2 to 5.6 times as fast as `score`.
    params = dict(function=function, indexed=indexed)
    arguments, mask = operands(x, parts, indexed)
    s = _unrounded(function, arguments, x.shape)
    s = s if mask is None else jnp.where(mask, s, -jnp.inf)
    y = lowest_for_infinity((jax.nn.log_softmax if log else jax.nn.softmax)(s, axis), x.dtype)
    return unless_nan(
        y, axis, lambda: score(x, *parts, axis=axis, algorithm=algorithm, log=log, unscored=unscored, **params)
    )


def score_sums(x, *parts, axis, algorithm, log, function, indexed, unscored, over=()):
    """[largest score, logarithm of the sum of exp(score - largest)] of each row, with a dimension for the axis."""
    _, s, _ = _scores(x, parts, function, indexed)
    largest, (total,) = partition.row_exponentials(s, axis, over)
    return [largest, jnp.log(total)]


def _slopes(g, s, kept, axis, log, over=()):
    """The gradient by the scores."""
    h = computed(g, kept)
    largest, (total, of_h) = partition.row_exponentials(s, axis, over, **({"others": [h]} if log else {"weights": [h]}))
    p = jnp.exp(s - largest) / _nonzero(total)
    ds = h - p * of_h if log else p * (h - of_h / _nonzero(total))
    return jnp.where(kept, ds, 0)


def score_grads(x, g, *parts, axis, algorithm, log, function, indexed, unscored, over=()):
    """[dx, ds]"""
    arguments, s, kept = _scores(x, parts, function, indexed)
    ds = _slopes(g, s, kept, axis, log, over)
    return [_chain(function, arguments, ds, kept).astype(x.dtype), ds.astype(x.dtype)]


def score_grad(*operands, unscored, **params):
    return score_grads(*operands, unscored=unscored, **params)[unscored]


def score_jvp(x, t, *parts, unscored, **params):
    """The transpose of `score_grad` as a linear function of g."""
    return _score_jvp(x, *((None, t) if unscored else (t, None)), parts, **params)


def score_jvps(x, tx, ts, *parts, unscored, **params):
    """The transpose of `score_grads` as a linear function of g."""
    return _score_jvp(x, tx, ts, parts, **params)


def _score_jvp(x, tx, ts, parts, *, axis, algorithm, log, function, indexed):
    arguments, s, kept = _scores(x, parts, function, indexed)
    terms = [] if tx is None else [_chain(function, arguments, computed(tx, kept), kept)]
    terms += [] if ts is None else [computed(ts, kept)]
    t = sum(terms[1:], start=terms[0])
    largest, (total,) = partition.row_exponentials(s, axis, ())
    p = jnp.exp(s - largest) / _nonzero(total)
    dot = row_sum(p * t, axis)
    return jnp.where(kept, t - dot if log else p * (t - dot), 0).astype(x.dtype)


def _chain(function, arguments, ds, kept):
    """ds times the derivative of the scores by x."""
    return jnp.where(kept, _unrounded(function.vjp((0,)), [*arguments, ds], kept.shape), 0)


def argument_gradient(function, wrt, dtype, masked):
    """The Function of (arguments of `function`, mask if there is one, ds) that returns the gradients of those at `wrt`.

    dtype: of ds. Elements that take no part have gradients of 0.
    """
    pullback = function.vjp(wrt)

    def f(*xs):
        *arguments, ds = xs
        mask = arguments.pop() if masked else None
        if masked:
            arguments[0] = jnp.where(mask, arguments[0], 0)
        (s,) = function.scalars(*arguments)
        kept = s != -jnp.inf if mask is None else mask & (s != -jnp.inf)
        return [jnp.where(kept, d, 0) for d in pullback.scalars(*arguments, ds)]

    in_dtypes = [*function.in_dtypes, *([jnp.dtype(bool)] if masked else []), dtype]
    return functor.of_scalars(f, in_dtypes, pullback.out_dtypes, function.label, function.coarse)
