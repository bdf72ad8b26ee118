"""Functions of JAX and optax that leave no operation of their own in a program: `TARGETS`, which replace.py replaces.

A replacement leaves a call to the original if it does not compute the same. Results differ from the original's in these
cases alone:

* Arithmetic is in float32 or wider.
* The gradient of `optax.softmax_cross_entropy_with_integer_labels` may be NaN throughout a row that holds +inf, where optax has
  0 at most finite logits. The loss of a row that holds NaN and +inf may be inf, where optax has NaN.
* Where the program converts logits from bfloat16 to float32 for this loss, the gradient is rounded to bfloat16 before it is
  converted back. A program that uses the float32 gradient has it in the precision of bfloat16.
* The gradient of softmax is 0 where the softmax is 0, even if a cotangent is infinite or NaN.

`jax.nn.dot_product_attention` is in attention.py, `jax.lax.associative_scan` in cumulative.py.

jraph's functions need nothing here: they consist of lax.scatter and arithmetic. Its segment_softmax is NaN for segments of
-inf, and takes rows of others where ids are out of range: `jaxkern.segment_softmax` does neither.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.interpreters import ad, mlir

from jaxkern._accelerate import attention, cumulative, gate
from jaxkern._accelerate.arguments import decide, gated, is_plain
from jaxkern._accelerate.replace import Target
from jaxkern._core import compat, compat_lowering, decisions, stablehlo, switch, validate
from jaxkern._core.algorithms import forced
from jaxkern._core.autodiff import deftranspose, linear_jvp
from jaxkern._core.primitive import bind, set_jvp
from jaxkern._core.rows import row_primitive
from jaxkern._definitions import reductions
from jaxkern._definitions.softmax import gradient as softmax_gradient
from jaxkern._definitions.softmax_on_cpu import log_softmax_gradient, log_softmax_tangent
from jaxkern._ops.cross_entropy.primitive import Options, cross_entropy_p

# ---- what a call may look like


def _axes(axis, rank):
    """Neighbouring axes in ascending order, or None."""
    axes = tuple(range(rank)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    if not axes or not all(isinstance(a, int) and not isinstance(a, bool) and -rank <= a < rank for a in axes):
        return None
    axes = sorted(a % rank for a in axes)
    return axes if axes == list(range(axes[0], axes[-1] + 1)) else None


# ---- logsumexp

row_statistics_p = row_primitive("jaxkern_row_statistics", 1, reductions.statistics, several=True)


def _taken(ctx, operation, value, reason, what) -> bool:
    """Whether an operation of a replaced function runs on a kernel; records the decision.

    It does not where XLA would fuse the arithmetic that makes `value`, the operand that messages call `what`.
    """
    why = decisions.why_left(ctx, value, what)
    return decisions.record_call(ctx, operation, why, reason, ctx.avals_in[:1], stablehlo.size(ctx.avals_in[0]))


def _register_uncached(prim, rule):
    """Lowers `prim` by `rule`, which looks at what makes its operands; on other platforms its reference remains."""
    for platform in ("cuda", "cpu"):
        compat_lowering.register_uncached_lowering(prim, switch.own_promotion(rule), platform)
    compat.needs_devices(prim)


def _lower_statistics(ctx, x, **params):
    taken = _taken(ctx, "logsumexp", x, "one read", "operand")
    body = reductions.logsumexp_statistics_p.bind if taken else reductions.statistics
    return switch.own_code(mlir.lower_fun(body, multiple_results=True))(ctx, x, **params)


_register_uncached(row_statistics_p, _lower_statistics)


def _statistics_jvp(primals, tangents, *, axis, **params):
    """The largest element counts as a constant, as in JAX's own logsumexp; in rows of -inf the derivative is NaN."""
    (x,), (dx,) = primals, tangents
    result, largest, total = bind(row_statistics_p, x, axis=axis, **params)
    if type(dx) is ad.Zero:
        return [result, largest, total], [compat.zero_tangent(a) for a in (result, largest, total)]
    base = jnp.expand_dims(_finite(largest), axis)
    dtotal = jnp.sum(jnp.exp(x.astype(total.dtype) - base) * dx.astype(total.dtype), axis)
    return [result, largest, total], [(dtotal / total).astype(result.dtype), compat.zero_tangent(largest), dtotal]


# A rule of the primitive and not jax.custom_jvp, which is lowered to a function of its own.
set_jvp(row_statistics_p, _statistics_jvp)


def _finite(largest):
    return jnp.where(jnp.isfinite(largest), largest, 0)


@switch.own_promotion
def _logsumexp(original, a, axis=None, b=None, keepdims=False, return_sign=False, where=None):
    del original
    if b is not None or where is not None or return_sign is not False or not is_plain(a):
        return NotImplemented
    axes = _axes(axis, a.ndim)
    if axes is None or not isinstance(keepdims, bool):
        return NotImplemented
    width = math.prod(a.shape[d] for d in axes)
    taken, why = gated(gate.logsumexp, a.dtype, a.size // width, width)
    if not taken:
        decide("logsumexp", False, why, a)
        return NotImplemented
    shape = tuple(1 if d in axes else n for d, n in enumerate(a.shape) if keepdims or d not in axes)
    x, _, at = validate.one_axis(a, [None], axes)
    wide = reductions.computing(a.dtype)
    _, largest, total = bind(row_statistics_p, x, axis=at, dtype=(wide, wide, wide), algorithm=forced("logsumexp"))
    y = (jnp.log(total) + _finite(largest)).astype(a.dtype)
    return y if y.shape == shape else y.reshape(shape)


# ---- softmax and log_softmax: the value as JAX computes it, and our kernel for the gradient


def _plain_softmax_gradient(y, g, *, axis, algorithm):
    del algorithm
    return y * (g - jnp.sum(y * g, axis, keepdims=True))


def _gradient_primitive(operation, reference):
    """The gradient (y, g) -> dx of a replaced function: a kernel where one is to run, `reference` elsewhere."""
    prim = row_primitive(f"jaxkern_row_{operation}_gradient", 2, reference)

    def lower(ctx, y, g, **params):
        taken = _taken(ctx, operation, g, "the gradient in one read", "cotangent")
        body = functools.partial(softmax_gradient, operation) if taken else reference
        return switch.own_code(mlir.lower_fun(body, multiple_results=False))(ctx, y, g, **params)

    _register_uncached(prim, lower)
    return prim


softmax_gradient_p = _gradient_primitive("softmax", _plain_softmax_gradient)
log_softmax_gradient_p = _gradient_primitive("log_softmax", log_softmax_gradient)
log_softmax_tangent_p = row_primitive("jaxkern_row_log_softmax_tangent", 2, log_softmax_tangent)
for _prim, _reference, _transpose in (
    (softmax_gradient_p, _plain_softmax_gradient, softmax_gradient_p),  # self-adjoint
    (log_softmax_gradient_p, log_softmax_gradient, log_softmax_tangent_p),
    (log_softmax_tangent_p, log_softmax_tangent, log_softmax_gradient_p),
):
    set_jvp(_prim, functools.partial(linear_jvp, _prim, _reference, (1,)))
    deftranspose(_prim, 1, _transpose)


def _value_of_softmax(x, *, axis, algorithm):
    """The operations of jax.nn.softmax."""
    del algorithm
    powers = jnp.exp(x - jnp.max(x, axis, initial=-jnp.inf, keepdims=True))
    return powers / jnp.sum(powers, axis, keepdims=True)


def _value_of_log_softmax(x, *, axis, algorithm):
    """The operations of jax.nn.log_softmax."""
    del algorithm
    below = x - jax.lax.stop_gradient(jnp.max(x, axis, initial=-jnp.inf, keepdims=True))
    return below - jnp.log(jnp.sum(jnp.exp(below), axis, keepdims=True))


def _value_primitive(name, value, tangent_p):
    """A primitive that XLA computes, with the tangent tangent_p(y, dx)."""
    prim = row_primitive(name, 1, value)

    def jvp(primals, tangents, **params):
        y, (dx,) = bind(prim, *primals, **params), tangents
        return y, compat.zero_tangent(y) if type(dx) is ad.Zero else bind(tangent_p, y, dx, **params)

    set_jvp(prim, jvp)
    return prim


row_softmax_p = _value_primitive("jaxkern_row_softmax", _value_of_softmax, softmax_gradient_p)
row_log_softmax_p = _value_primitive("jaxkern_row_log_softmax", _value_of_log_softmax, log_softmax_tangent_p)


@switch.own_promotion
def _softmax_like(name, rule, prim, original, x, axis=-1, where=None):
    del original
    if where is not None or not is_plain(x) or (name == "softmax" and compat.differentiates_softmax_by_parts()):
        return NotImplemented
    axes = _axes(axis, x.ndim)
    if axes is None or len(axes) > 1:
        return NotImplemented
    settings = switch.current()
    if name == "softmax" and x.dtype.itemsize >= 4 and "rows" in settings.operations and not settings.force:
        # JAX differentiates it by parts. Regions of rows see these, and what they leave XLA fuses as it does without us.
        return NotImplemented
    width = x.shape[axes[0]]
    taken, why = gated(rule, x.dtype, x.size // width, width)
    if not taken:
        decide(name, False, why, x)
        return NotImplemented
    return bind(prim, x, axis=axes[0], algorithm=forced(name))


# ---- optax


@switch.own_promotion
def _cross_entropy(original, logits, labels, axis=-1, where=None):
    del original
    if where is not None or not is_plain(logits) or not isinstance(labels, jax.Array):
        return NotImplemented
    axes = _axes(axis, logits.ndim) if isinstance(axis, int) else None
    if axes is None or not jnp.issubdtype(labels.dtype, jnp.integer):
        return NotImplemented
    (at,) = axes
    classes = logits.shape[at]
    if labels.shape != logits.shape[:at] + logits.shape[at + 1 :] or classes > jnp.iinfo(jnp.int32).max:
        return NotImplemented
    taken, why = gated(gate.loss, logits.dtype, logits.size // classes, classes)
    if not taken:
        decide("softmax_cross_entropy", False, why, logits)
        return NotImplemented
    labels = labels.astype(jnp.int32)  # as in take_along_axis, where negative indices count from the end
    labels = jnp.where(labels < 0, labels + classes, labels)
    loss, *_ = bind(
        cross_entropy_p,
        logits,
        labels,
        axis=at,
        algorithm=forced("softmax_cross_entropy"),
        options=Options(as_written=True),
    )
    return loss.astype(logits.dtype)


# What stands in a program for a replaced function, with JAX's own operations as its reference.
MARKS = frozenset(
    (
        row_statistics_p,
        row_softmax_p,
        softmax_gradient_p,
        row_log_softmax_p,
        log_softmax_tangent_p,
        log_softmax_gradient_p,
    )
)

TARGETS = (
    # One function, by the name of either module: a process may have imported one of them alone.
    Target("logsumexp", "jax.nn", "logsumexp", _logsumexp),
    Target("logsumexp", "jax.scipy.special", "logsumexp", _logsumexp),
    Target("softmax", "jax.nn", "softmax", functools.partial(_softmax_like, "softmax", gate.softmax, row_softmax_p)),
    Target(
        "log_softmax",
        "jax.nn",
        "log_softmax",
        functools.partial(_softmax_like, "log_softmax", gate.log_softmax, row_log_softmax_p),
    ),
    Target("softmax_cross_entropy", "optax", "softmax_cross_entropy_with_integer_labels", _cross_entropy),
    Target("associative_scan", "jax.lax", "associative_scan", cumulative.associative_scan),
    Target("dot_product_attention", "jax.nn", "dot_product_attention", attention.dot_product_attention),
)
