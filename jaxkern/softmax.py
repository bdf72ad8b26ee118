"""softmax and log_softmax: what a user calls, the primitives, their rules and references.

    softmax_p            y  = exp(x - max) / sum(exp(x - max))
    log_softmax_p        y  = x - max - log(sum(exp(x - max)))
    softmax_grad_p       dx = y * (g - sum(y * g))
    log_softmax_grad_p   dx = g - softmax(x) * sum(g)      or of y, which is the same but for y's rounding
    log_softmax_jvp_p    dy = t - sum(softmax(x) * t)      the transpose of the last one; left to XLA

along one axis, each with an optional mask. An element that is masked out takes no part: its output is
0 (log_softmax: -inf), its gradient 0 whatever the cotangent holds. A row of which nothing takes part,
or which is -inf throughout, is a row of such elements.

With a scale, a bias, a causal limit or dropout it is the primitives of _fused.py that are bound.
"""

import functools

import jax
import jax.numpy as jnp

from jaxkern import _fused, reduction, tiers
from jaxkern._core import lowering, partition, validate
from jaxkern._core.autodiff import deflinear, defvjp
from jaxkern._core.primitive import bind, row_primitive
from jaxkern._core.rows import computed, lowest_for_infinity, row_sum


# ---- what a user calls


def softmax(x, axis=-1, where=None, *, scale=1.0, bias=None, causal=False, dropout_rate=0.0, dropout_key=None):
    """Softmax of `scale * x + bias` along `axis`, as `jax.nn.softmax`: positive, and 1 in sum before dropout.

    One kernel reads x once and writes the result, whichever of the arguments are given. The gradient, one kernel too,
    starts from the result. With dropout it computes the softmax anew, so that nothing but x and these arguments is
    kept for it.

    Args:
        x: array of any shape. float16, bfloat16 and float32 are computed in float32, float64 in
            float64, and rounded once; integers promote as in `jax.nn`; other floating-point types
            (float8) run through XLA, in float32.
        axis: an int, a tuple of ints, or None for all axes. Any single axis, and neighbouring ones,
            are read in place; axes that are apart are moved together first, which costs a copy.
        where: boolean array that broadcasts to the shape of `x`, read without being materialised.
            Elements where it is False take no part and get 0.
        scale: a number, or a scalar array, which may be traced and has a gradient.
        bias: floating-point array that broadcasts to the shape of `x`, read without being materialised. Its
            gradient is summed over the dimensions that it broadcasts over. One of another type than x or
            the computing type is converted first.
        causal: the last two dimensions of `x` are queries and keys, of which query i takes the keys up to
            i + keys - queries: the last query takes them all. Needs `axis` to be the last one.
        dropout_rate: a number in [0, 1), rounded to a multiple of 2**-16: the probability of an element of the
            result to be 0; the others are divided by one less the rate.
        dropout_key: a key of `jax.random` or the `uint32[2]` of one; of a longer key the first two words.

    The elements that are dropped depend on the key, on the number of an element's row among all rows of `x`
    and on its place in the row, on nothing else: they are the same on the CPU and on CUDA, under `jit`,
    `jax.checkpoint` and any sharding. Under `vmap` each example has the numbers that it would have alone: give
    each a key of its own, or all drop the same ones. Inside `shard_map`, `x` is the part that a device has.

    Scale, bias, causal limit and dropout run in a kernel of ours where `axis` is the last one of more than one
    element, through XLA elsewhere.

    Returns:
        Array of the shape of `x`. A row of which no element takes part, or which is -inf throughout,
        is zeros with zero gradients; NaN or +inf in a row makes it NaN, as in `jax.nn`.

    Raises:
        TypeError: `x` is boolean, complex or no array; `where` is not boolean, `bias` not floating-point;
            `scale` or `dropout_rate` is no number; `dropout_key` is no key.
        ValueError: `axis` is out of bounds or holds a duplicate; `where` or `bias` does not broadcast to `x`;
            `scale` is no scalar; `causal` with another axis than the last; `dropout_rate` is not in [0, 1),
            or not 0 without a key.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> x = jnp.array([[0.0, 0.0, 5.0], [1.0, 1.0, 1.0]])
    >>> jaxkern.softmax(x, where=jnp.array([True, True, False])).tolist()
    [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]
    >>> jaxkern.softmax(jnp.array([[3.0, 9.0], [1.0, 1.0]]), scale=2, causal=True).tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    >>> y = jaxkern.softmax(jnp.zeros((1000, 1000)), dropout_rate=0.25, dropout_key=jax.random.key(0))
    >>> round(float((y == 0).mean()), 2), round(float(y.max()) * 1000, 3)
    (0.25, 1.333)

    Source: Bridle, "Probabilistic Interpretation of Feedforward Classification Network Outputs", 1990;
    one pass over a row after Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018;
    random bits after Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011 (Philox4x32-7).
    """
    extras = _fused.extras("softmax", scale, bias, causal, dropout_rate, dropout_key)
    if extras is not None:
        return _call(_fused_softmax, "softmax", x, axis, where, *extras)
    return _call(_softmax, "softmax", x, axis, where)


def log_softmax(x, axis=-1, where=None, *, scale=1.0, bias=None):
    """Logarithm of the softmax of `scale * x + bias` along `axis`, as `jax.nn.log_softmax`, without taking it of a
    small number.

    Args:
        x: array of any shape. float16, bfloat16 and float32 are computed in float32, float64 in
            float64, and rounded once; integers promote as in `jax.nn`; other floating-point types
            (float8) run through XLA, in float32.
        axis: an int, a tuple of ints, or None for all axes. Any single axis, and neighbouring ones,
            are read in place; axes that are apart are moved together first, which costs a copy.
        where: boolean array that broadcasts to the shape of `x`, read without being materialised.
            Elements where it is False take no part and get -inf, or the least number of a type
            without infinity (some of float8).
        scale, bias: as for `softmax`.

    Returns:
        Array of the shape of `x`. A row of which no element takes part, or which is -inf throughout,
        is -inf with zero gradients; NaN or +inf in a row makes it NaN, as in `jax.nn`.

    Raises:
        TypeError: `x` is boolean, complex or no array; `where` is not boolean, `bias` not floating-point; `scale`
            is no number.
        ValueError: `axis` is out of bounds or holds a duplicate; `where` or `bias` does not broadcast to `x`;
            `scale` is no scalar.

    >>> import jax.numpy as jnp, jaxkern
    >>> y = jaxkern.log_softmax(jnp.array([3.0, 3.0, 7.0]), where=jnp.array([True, True, False]))
    >>> [round(v, 4) for v in y.tolist()]
    [-0.6931, -0.6931, -inf]

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    extras = _fused.extras("log_softmax", scale, bias)
    if extras is not None:
        return _call(_fused_log_softmax, "log_softmax", x, axis, where, *extras)
    return _call(_log_softmax, "log_softmax", x, axis, where)


def _call(jitted, name, x, axis, where, arrays=(), flags=None):
    # jit would name itself and not the operation
    validate.check_array(name, "x", "an array or a number", x)
    if where is not None:
        validate.check_array(name, "where", "a boolean array", where)
    return jitted(x, where, *arrays, axis=validate.static_axis(name, axis), tier=tiers.forced(), **(flags or {}))


def _along_axis(name, prim, x, where, axis, tier):
    x = validate.floating(name, x)
    mask = validate.full_rank_mask(name, x, where)
    axes = validate.sorted_axes(name, axis, x.shape)

    def row_operation(x, parts, axis):
        return bind(prim, x, *(p for p in parts if p is not None), axis=axis, tier=tier)

    return validate.along_axes(row_operation, x, [mask], axes)


# Inlined, so that a jaxpr holds the primitive alone; jitted, so that an eager call costs no more than
# that of a jnp function.
@functools.partial(jax.jit, static_argnames=("axis", "tier"), inline=True)
def _softmax(x, where, *, axis, tier):
    return _along_axis("softmax", softmax_p, x, where, axis, tier)


@functools.partial(jax.jit, static_argnames=("axis", "tier"), inline=True)
def _log_softmax(x, where, *, axis, tier):
    return _along_axis("log_softmax", log_softmax_p, x, where, axis, tier)


@functools.partial(jax.jit, static_argnames=("axis", "tier", "causal", "threshold"), inline=True)
def _fused_softmax(x, where, scale, bias, key, *, axis, tier, causal, threshold):
    return _fused.along_axis("softmax", x, where, scale, bias, key, axis, tier, causal, threshold)


@functools.partial(jax.jit, static_argnames=("axis", "tier"), inline=True)
def _fused_log_softmax(x, where, scale, bias, *, axis, tier):
    return _fused.along_axis("log_softmax", x, where, scale, bias, None, axis, tier, False, 0)


# ---- the primitives and their derivatives

softmax_p = row_primitive("jaxkern_softmax", arrays=1)
log_softmax_p = row_primitive("jaxkern_log_softmax", arrays=1)
softmax_grad_p = row_primitive("jaxkern_softmax_grad", arrays=2)
log_softmax_grad_p = row_primitive("jaxkern_log_softmax_grad", arrays=2)
log_softmax_jvp_p = row_primitive("jaxkern_log_softmax_jvp", arrays=2)


def _custom_vjp(forward_p, backward_p, keep):
    """The rule that every derivative of `forward_p` comes from; `keep` says which of x, y the backward pass takes."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
    def f(x, mask, axis, tier):
        return bind(forward_p, x, *mask, axis=axis, tier=tier)

    def forward(x, mask, axis, tier):
        y = bind(forward_p, x, *mask, axis=axis, tier=tier)  # not f, which has no derivative
        return y, (keep(x, y), mask)

    def backward(axis, tier, residuals, g):
        kept, mask = residuals
        return bind(backward_p, kept, g, *mask, axis=axis, tier=tier), (None,) * len(mask)

    f.defvjp(forward, backward)
    return lambda x, *mask, axis, tier: f(x, mask, axis, tier)


def _precise(x, y):
    """What log_softmax keeps: y has been rounded, and the error comes back multiplied by |y|.

    16-bit results hide that, and their kernels are faster from y; both have the same softmax.
    """
    return y if x.dtype.itemsize <= 2 else x


softmax_vjp = _custom_vjp(softmax_p, softmax_grad_p, keep=lambda x, y: y)
log_softmax_vjp = _custom_vjp(log_softmax_p, log_softmax_grad_p, keep=_precise)
defvjp(softmax_p, softmax_vjp, differentiable=(0,))
defvjp(log_softmax_p, log_softmax_vjp, differentiable=(0,))


def _participants(x, nothing, axis, *mask):
    """Elements that take part in a row that is alive: in which something unmasked is not `nothing`.

    Whatever the tangents and cotangents of all the others hold, NaN included, stays out of a sum.
    """
    takes_part = x != nothing
    alive = jnp.any(takes_part & mask[0] if mask else takes_part, axis, keepdims=True)
    return jnp.broadcast_to(alive & mask[0] if mask else alive, x.shape)


def _probabilities(x, axis, kept):
    """softmax(x) in the computing type; 0 for elements that are not `kept`."""
    wide = _unmasked(x, kept)
    largest, (total,) = partition.row_exponentials(wide, axis, ())
    return jnp.exp(wide - largest) / _nonzero(total)


def _softmax_grad_jvp(y, g, *rest, axis, tier):
    *mask, dy = rest
    kept = _participants(y, 0, axis, *mask)
    dtype = y.dtype
    y, g, dy = (computed(a, kept) for a in (y, g, dy))
    return (dy * (g - row_sum(y * g, axis)) - y * row_sum(dy * g, axis)).astype(dtype)


def _softmax_tangent(x, dx, axis, kept):
    p, dx = _probabilities(x, axis, kept), computed(dx, kept)
    return p * (dx - row_sum(p * dx, axis))


def _log_softmax_grad_jvp(x, g, *rest, axis, tier):
    *mask, dx = rest
    kept = _participants(x, -jnp.inf, axis, *mask)
    return (-_softmax_tangent(x, dx, axis, kept) * row_sum(computed(g, kept), axis)).astype(x.dtype)


def _log_softmax_jvp_jvp(x, t, *rest, axis, tier):
    *mask, dx = rest
    kept = _participants(x, -jnp.inf, axis, *mask)
    dot = row_sum(_softmax_tangent(x, dx, axis, kept) * computed(t, kept), axis)
    return computed(jnp.broadcast_to(-dot, x.shape), kept).astype(x.dtype)


deflinear(softmax_grad_p, 1, _softmax_grad_jvp, transpose=softmax_grad_p)  # self-adjoint
deflinear(log_softmax_grad_p, 1, _log_softmax_grad_jvp, transpose=log_softmax_jvp_p)
deflinear(log_softmax_jvp_p, 1, _log_softmax_jvp_jvp, transpose=log_softmax_grad_p)


# ---- the same in jnp: where there is no kernel, and for rows that are split over devices


def _unmasked(x, *mask):
    """`x` in the type that its arithmetic is done in, with -inf where it is masked out."""
    x = computed(x)
    return jnp.where(mask[0], x, -jnp.inf) if mask else x


def _nonzero(total):
    """A sum of exponentials to divide by; it is 0 where nothing takes part."""
    return jnp.where(total == 0, 1, total)


def _exponentials(x, mask, axis, over, others=()):
    """(x in the computing type, its largest element in each row, [sum of exponentials, sums of the others]).

    Of rows that are split, a kernel reads each part once.
    """
    wide = _unmasked(x, *mask)
    if not over:
        return wide, *partition.row_exponentials(wide, axis, (), others=others)
    _, largest, total = (jnp.expand_dims(a, axis) for a in reduction.statistics(x, *mask, axis=axis, tier="auto"))
    sums = [total, *(jnp.sum(a, axis, keepdims=True) for a in others)]
    return wide, *partition.merge_exponentials(largest, sums, over)


def _softmax_reference(x, *mask, axis, tier, over=()):
    wide, largest, (total,) = _exponentials(x, mask, axis, over)
    y = jnp.exp(wide - largest) / _nonzero(total)
    return computed(y, *mask).astype(x.dtype)


def _log_softmax_reference(x, *mask, axis, tier, over=()):
    wide, largest, (total,) = _exponentials(x, mask, axis, over)
    y = jnp.where(total == 0, -jnp.inf, wide - largest - jnp.log(total))
    return lowest_for_infinity(jnp.where(mask[0], y, -jnp.inf) if mask else y, x.dtype)


# What the tangents and cotangents hold in rows where nothing takes part, NaN included, is in sums that
# are not used: to know beforehand which rows those are would be another message between devices.


def _kept(dx, alive, mask, dtype):
    """`dx`, and 0 where it is masked out or nothing in the row is alive."""
    return jnp.where(alive & mask[0] if mask else alive, dx, 0).astype(dtype)


def _softmax_grad_reference(y, g, *mask, axis, tier, over=()):
    p, g = computed(y, *mask), computed(g, *mask)
    dot, positive = partition.row_sums(axis, over, p * g, (p != 0).astype(p.dtype))
    return _kept(p * (g - dot), positive != 0, mask, y.dtype)


def _log_softmax_grad_reference(x, g, *mask, axis, tier, over=()):
    g = computed(g, *mask)
    wide, largest, (total, of_g) = _exponentials(x, mask, axis, over, others=[g])
    return _kept(g - jnp.exp(wide - largest) / _nonzero(total) * of_g, total != 0, mask, x.dtype)


def _log_softmax_jvp_reference(x, t, *mask, axis, tier, over=()):
    t = computed(t, *mask)
    _, (total, dot) = partition.row_exponentials(_unmasked(x, *mask), axis, over, weights=[t])
    return _kept(t - dot / _nonzero(total), total != 0, mask, x.dtype)


for _prim, _arrays, _reference in (
        (softmax_p, 1, _softmax_reference), (log_softmax_p, 1, _log_softmax_reference),
        (softmax_grad_p, 2, _softmax_grad_reference), (log_softmax_grad_p, 2, _log_softmax_grad_reference),
        (log_softmax_jvp_p, 2, _log_softmax_jvp_reference)):
    lowering.register(_prim, _arrays, _reference, split=_reference)
