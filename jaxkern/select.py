"""top_k, and functions that use it: filters of logits, sampling, and the routing of tokens to experts.

The primitive is in _ops/select.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxkern._core import functor, switch, validate
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind
from jaxkern._definitions.dropout import check_key
from jaxkern._ops.select.route import route_p
from jaxkern._ops.select.top_k import top_k_p
from jaxkern.reduction import logsumexp
from jaxkern.row_kernel import row_kernel

Pair = tuple[jax.Array, jax.Array]
NUCLEUS = 1024  # so many of the most probable classes are tried before all are sorted


def top_k(x: ArrayLike, k: int, axis: int = -1, *, function: Callable[[jax.Array], ArrayLike] | None = None) -> Pair:
    """The `k` largest elements along `axis` and their indices, as `jax.lax.top_k`.

    Args:
        x: array of one dimension or more, of real numbers or booleans. Kernels take types of 32 bits and fewer, XLA the rest.
        k: an int from 0 to the size of `axis`.
        axis: an int. Any axis but the last one costs a transpose.
        function: a function of a scalar, such as `jnp.abs`. It is applied to each element in the kernel that selects, so that
            the result is `top_k(function(x), k)`, for types of 8 to 32 bits. XLA applies a function that closes over an array.

    Returns:
        (values, indices): `values` has the shape and type of `x`, or the type of the result of `function`, except that `axis` has
        size `k`, in descending order. `indices`, int32 of the same shape, are positions along `axis`; of equal elements those that
        come first. Floats are in the total order of IEEE 754: NaN is greater than infinity, or less than -infinity if its sign is
        set, and -0 is less than 0.

    Raises:
        TypeError: `x` is complex, of fewer than 8 bits, or not an array; `k` or `axis` is not an int; `function` is not callable,
            returns no real number, or has an operation that a kernel cannot run.
        ValueError: `k` is negative or larger than the axis; `axis` is out of bounds, or has 2**31 elements or more.

    Derivatives: forward and reverse mode, of any order, by `x`. Tangents are gathered at the indices.

    Cost: for n elements of e bytes in r rows, n e bytes are read once and r k (e + 4) are written. If there are
    few long rows, each part of a row first writes up to k candidates of 8 bytes. From 40 elements on a part may have more of the
    largest elements than it wrote, as in a row that ascends; it is read again. More than 2048 elements cost a sort of the row.

    >>> import jax.numpy as jnp, jaxkern
    >>> values, indices = jaxkern.top_k(jnp.array([3.0, 1.0, 4.0, 1.0, 5.0]), 2)
    >>> values.tolist(), indices.tolist()
    ([5.0, 4.0], [4, 2])

    Source: radix selection as in Alabi et al., "Fast k-selection algorithms for graphics processing units", 2012; a buffer
    of candidates above a bound as in Johnson et al., "Billion-scale similarity search with GPUs", 2017.
    """
    name = "top_k"
    validate.check_array(name, "x", "an array", x)
    x, k = jnp.asarray(x), validate.integer(name, "k", k)
    axis = _axis(name, axis, x.shape)
    validate.positions(name, "x", x.shape, [axis])
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"jaxkern.{name}: x must be real, got {x.dtype}{list(x.shape)}")
    info = jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo
    if x.dtype != bool and info(x.dtype).bits < 8:
        raise TypeError(f"jaxkern.{name}: XLA selects no {x.dtype}{list(x.shape)}: convert x with astype")
    if k < 0 or (isinstance(x.shape[axis], int) and k > x.shape[axis]):
        raise ValueError(f"jaxkern.{name}: k must be from 0 to {x.shape[axis]}, the size of axis {axis}, got {k}")
    x, applied = _applied(name, function, x)
    return _top_k(x, k, axis, applied)


def _applied(name, function, x):
    """(x, the Function of its elements), or (the result of the function, None) if it closes over arrays."""
    if function is None:
        return x, None
    validate.function(name, "function", function, "a function of a scalar")
    found, captured = functor.trace(function, [x.dtype], name=name, weak=[x.weak_type], results=1)
    if not jnp.issubdtype(found.out_dtypes[0], jnp.floating) and found.out_dtypes[0].kind not in "iub":
        raise TypeError(f"{found.label} must return a real number, and returns {found.out_dtypes[0]}")
    return (found(x, *captured)[0], None) if captured else (x, found)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _top_k(x, k, axis, function):
    given = {"k": k} if function is None else {"k": k, "function": function}
    values, indices = bind(top_k_p, jnp.moveaxis(x, axis, -1), **given)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(indices, -1, axis)


def _axis(name, axis, shape, argument="x") -> int:
    (found,) = validate.sorted_axes(name, validate.integer(name, "axis", axis), shape, argument)
    return found


# ---- filters of logits


def top_p(logits: ArrayLike, p: ArrayLike, axis: int = -1) -> jax.Array:
    """Logits of the most probable classes that together have probability `p`; -inf in place of the others.

        kept[i] = sum of softmax(logits)[j] over classes j before i < p

    where classes are in descending order of logits, and equal ones in the order of their indices. The most probable class is
    always kept.

    Args:
        logits: array of one dimension or more, floating-point of a type with infinity, or integer; NaN is not kept.
        p: a number, or an array that broadcasts to `logits` with size 1 along `axis`. From 1 on, every class is kept that has
            a probability.
        axis: an int.

    Returns:
        Array of the shape of `logits`, and of its type if that is floating-point.

    Raises:
        TypeError: `logits` or `p` is not an array of real numbers, or `logits` has no infinity; `axis` is not an int.
        ValueError: `axis` is out of bounds, or has 2**31 elements or more; `p` does not broadcast.

    Derivatives: forward and reverse mode, of any order, by `logits`: the identity where they are kept.

    Cost: the logits are written once in float32 without NaN, and these read three times, for the largest 1024 of a row, for the
    sum of its exponentials and for the result. Where the largest 1024 do not reach `p` in some row, all rows are sorted.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.top_p(jnp.array([1.0, 3.0, 2.0]), 0.7).tolist()  # with probabilities 0.09, 0.67 and 0.24
    [-inf, 3.0, 2.0]

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020.
    """
    logits, axis, p = _filtered("top_p", logits, axis, p=p)
    validate.positions("top_p", "logits", logits.shape, [axis])
    return _top_p(logits, p, axis)


def min_p(logits: ArrayLike, p: ArrayLike, axis: int = -1) -> jax.Array:
    """Logits of classes that have at least `p` times the probability of the most probable one; -inf in place of the others.

        kept[i] = logits[i] >= max(logits) + log(min(p, 1))

    Args:
        logits: array of one dimension or more, floating-point of a type with infinity, or integer; NaN is not kept.
        p: a number, or an array that broadcasts to `logits` with size 1 along `axis`. With 0 every class is kept.
        axis: an int.

    Returns:
        Array of the shape of `logits`, and of its type if that is floating-point.

    Raises:
        TypeError: `logits` or `p` is not an array of real numbers, or `logits` has no infinity; `axis` is not an int.
        ValueError: `axis` is out of bounds; `p` does not broadcast.

    Derivatives: forward and reverse mode, of any order, by `logits`: the identity where they are kept.

    Cost: for n elements of e bytes, the call moves 2 n e bytes.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.min_p(jnp.array([1.0, 3.0, 2.0]), 0.5).tolist()  # with probabilities 0.09, 0.67 and 0.24
    [-inf, 3.0, -inf]

    Source: Nguyen et al., "Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs", 2024.
    """
    logits, axis, p = _filtered("min_p", logits, axis, p=p)
    return _min_p(logits, p, axis)


def _filtered(name, logits, axis, **p):
    """(logits, axis, p of the rank of logits)"""
    validate.check_array(name, "logits", "an array", logits)
    logits = validate.floating(name, jnp.asarray(logits), "logits")
    if not np.isinf(np.array(np.inf, logits.dtype)):
        raise TypeError(
            f"jaxkern.{name}: logits must be of a type with infinity, got {logits.dtype}{list(logits.shape)}"
        )
    axis = _axis(name, axis, logits.shape, "logits")
    ((argument, value),) = p.items()
    return logits, axis, _of_rows(name, argument, value, logits, axis)


def _of_rows(name, argument, value, logits, axis) -> jax.Array:
    """A number for each row of logits: an array of their rank, with size 1 along the axis."""
    validate.check_array(name, argument, "a number or an array", value)
    given = jnp.asarray(value)
    validate.real(name, argument, given)
    value = validate.full_rank(name, argument, logits, given, "logits")
    assert value is not None
    if value.shape[axis] != 1:
        raise ValueError(f"jaxkern.{name}: {argument} of shape {value.shape} must have size 1 along axis {axis}")
    return value.astype(computing(logits.dtype))


@functools.partial(jax.jit, static_argnums=2)
@switch.own_promotion
def _top_p(logits, p, axis):
    if 0 in logits.shape:
        return logits
    rows, p = (lax.stop_gradient(jnp.moveaxis(a, axis, -1)) for a in (logits, p))
    rows = _without_nan(rows.astype(computing(logits.dtype)))
    found, enough = _nucleus(rows, p, NUCLEUS)
    least, last = lax.cond(enough, lambda: found, lambda: _nucleus(rows, p, rows.shape[-1])[0])
    column = lax.broadcasted_iota(jnp.int32, rows.shape, rows.ndim - 1)
    kept = (rows > -jnp.inf) & ((p >= 1) | (rows > least) | ((rows == least) & (column <= last)))
    return jnp.where(jnp.moveaxis(kept, -1, axis), logits, -jnp.inf)


def _without_nan(rows):
    """Logits in which -0 is 0, and NaN is -inf."""
    return jnp.where(rows == 0, 0, jnp.where(jnp.isnan(rows), -jnp.inf, rows))


def _nucleus(rows, p, most):
    """([the least logit of each row that is kept, its column], whether the `most` largest logits suffice for all rows)."""
    values, columns = bind(top_k_p, rows, k=min(most, rows.shape[-1]))
    before, mass = _mass(values, logsumexp(rows, axis=-1, keepdims=True))
    at = jnp.maximum(jnp.sum((before < p) & (mass > 0), -1, keepdims=True, dtype=jnp.int32) - 1, 0)
    enough = (before[..., -1:] + mass[..., -1:] >= p) | (p >= 1) | (rows.shape[-1] <= most)
    return [jnp.take_along_axis(a, at, -1) for a in (values, columns)], jnp.all(enough)


def _mass(values, total):
    """(the sum of the probabilities of earlier logits of the row, the probability) of descending logits."""
    mass = jnp.exp(values - total)
    return jnp.cumsum(mass, -1) - mass, mass


@functools.partial(jax.jit, static_argnums=2)
@switch.own_promotion
def _min_p(logits, p, axis):
    if 0 in logits.shape:
        return logits
    wide = (
        logits.astype(jnp.float32) if logits.dtype.itemsize == 1 else logits
    )  # kernels of functions have no 8-bit floats
    return row_kernel(_above, axis=axis, name="min_p")(wide, p).astype(logits.dtype)


def _above(logits, p):
    wide = lax.stop_gradient(logits.astype(computing(logits.dtype)))
    largest = jnp.max(jnp.where(jnp.isnan(wide), -jnp.inf, wide), -1, keepdims=True)
    return jnp.where(wide >= largest + _offset(lax.stop_gradient(p)), logits, jnp.asarray(-jnp.inf, logits.dtype))


def _offset(p):
    """By how much a logit that min_p keeps may exceed the largest one: log(p), but at most 0."""
    return jnp.log(jnp.clip(p, 0, 1))


# ---- sampling


def sample(
    logits: ArrayLike,
    key: jax.Array,
    *,
    temperature: ArrayLike = 1.0,
    top_k: int | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
    axis: int = -1,
) -> jax.Array:
    """A class for each row of logits, at random among those that are left by the filters, which apply in this order.

        1. the `top_k` classes with the largest logits, and their probabilities softmax(logits / temperature)
        2. the classes that `jaxkern.top_p` keeps, with probabilities normalised to 1
        3. the classes that have `min_p` times the probability of the most probable class

    Args:
        logits: array of one dimension or more, floating-point or integer.
        key: a key of `jax.random`, or its `uint32[2]` words.
        temperature: a number from 0 on, or an array that broadcasts to `logits` with size 1 along `axis`; it may be traced. 0
            takes the most probable class, the first of equal ones.
        top_k: an int of 1 or more, or None for all classes.
        top_p, min_p: like temperature, or None for no filter.
        axis: an int, the dimension of the classes.

    Returns:
        int32 array of the shape of `logits` without `axis`. The same key gives the same classes.

    Raises:
        TypeError: `logits` or a filter is not an array of real numbers; `key` is not a key; `top_k` or `axis` is not an int.
        ValueError: there are no classes; `top_k` is less than 1; `temperature` is a negative Python number; `axis` is out of
            bounds, or has 2**31 elements or more; a filter does not broadcast.

    Derivatives: none.

    Cost: with `top_k` the logits are read once, with `top_p` alone twice, and only classes that these leave draw a number. Where
    the 1024 most probable classes do not reach `top_p` in some row, all rows are sorted. Without both every class draws a
    number, and XLA chooses.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> logits = jnp.log(jnp.array([[0.1, 0.6, 0.3], [0.8, 0.1, 0.1]]))
    >>> jaxkern.sample(logits, jax.random.key(0), temperature=0.7, top_k=2, top_p=0.5).tolist()
    [1, 0]

    Source: the Gumbel-max method, as in Maddison et al., "A* Sampling", 2014; filters as for `top_p` and `min_p`.
    """
    name = "sample"
    validate.check_array(name, "logits", "an array", logits)
    logits = validate.floating(name, jnp.asarray(logits), "logits")
    axis = _axis(name, axis, logits.shape, "logits")
    validate.positions(name, "logits", logits.shape, [axis])
    if logits.shape[axis] == 0:
        raise ValueError(f"jaxkern.{name}: logits of shape {logits.shape} have no classes")
    validate.check_array(name, "key", "a key of jax.random", key, keys=True)
    key = key if isinstance(key, jax.Array) else jnp.asarray(key)
    check_key(name, "key", key)
    if top_k is not None and validate.integer(name, "top_k", top_k, or_none=True) < 1:
        raise ValueError(f"jaxkern.{name}: top_k must be 1 or more, got {top_k}")
    if isinstance(temperature, (int, float)) and temperature < 0:
        raise ValueError(f"jaxkern.{name}: temperature must be 0 or more, got {temperature}")
    temperature = _of_rows(name, "temperature", temperature, logits, axis)
    filters = {"top_p": top_p, "min_p": min_p}
    filters = [None if p is None else _of_rows(name, n, p, logits, axis) for n, p in filters.items()]
    return _sample(logits, key, temperature, *filters, top_k and int(top_k), axis)


def _log_total(logits, temperature):
    return jax.nn.logsumexp(logits.astype(temperature.dtype) / temperature, -1, keepdims=True)


@functools.partial(jax.jit, static_argnums=(5, 6))
@switch.own_promotion
def _sample(logits, key, temperature, top_p, min_p, most, axis):
    rows = jnp.moveaxis(logits, axis, -1)
    temperature = jnp.moveaxis(temperature, axis, -1)
    top_p, min_p = (a if a is None else jnp.moveaxis(a, axis, -1) for a in (top_p, min_p))
    wide, count = computing(rows.dtype), rows.shape[-1]
    rows = rows.astype(wide) if rows.dtype.itemsize == 1 else rows  # kernels of functions have no 8-bit floats
    greedy = temperature[..., 0] == 0
    scale = jnp.where(temperature == 0, 1, temperature)

    def drawn(scaled, kept):
        found = jax.random.categorical(key, jnp.where(kept, scaled, -jnp.inf)).astype(jnp.int32)
        return jnp.where(greedy, 0, found)

    def above(scaled, largest):
        return True if min_p is None else scaled >= largest + _offset(min_p)

    def among(k, total=None):
        """(a class among the k most probable ones, whether these suffice). total: of all logits, by default of the k."""
        values, columns = bind(top_k_p, rows, k=k)
        scaled = values.astype(wide) / scale
        kept = above(scaled, scaled[..., :1])
        enough = True
        if top_p is not None:
            before, mass = _mass(scaled, jax.nn.logsumexp(scaled, -1, keepdims=True) if total is None else total)
            kept &= before < top_p
            enough = (before[..., -1] + mass[..., -1] >= top_p[..., 0]) | greedy
        kept |= lax.broadcasted_iota(jnp.int32, scaled.shape, scaled.ndim - 1) == 0
        at = drawn(scaled, kept)
        return jnp.take_along_axis(columns, at[..., None], -1)[..., 0], jnp.all(enough)

    if most is not None or (top_p is not None and count <= NUCLEUS):
        return among(min(most or count, count))[0]
    if top_p is not None:
        total = row_kernel(_log_total, name="logsumexp")(rows, scale)
        found, enough = among(NUCLEUS, total)
        return lax.cond(enough, lambda: found, lambda: among(count)[0])
    scaled = rows.astype(wide) / scale
    found = drawn(scaled, above(scaled, jnp.max(scaled, -1, keepdims=True)))
    return jnp.where(greedy, jnp.argmax(rows, -1).astype(jnp.int32), found)


# ---- mixtures of experts


class Routing(typing.NamedTuple):
    """What `moe_route` returns: see there.

    Attributes:
        weights: array of shape (tokens, k).
        experts: int32 array of shape (tokens, k).
        slots: int32 array of shape (tokens, k).
        counts: int32 array of shape (experts,).
    """

    weights: jax.Array
    experts: jax.Array
    slots: jax.Array
    counts: jax.Array


def moe_route(logits: ArrayLike, k: int, capacity: int | None = None, *, renormalize: bool = True) -> Routing:
    """The `k` most probable experts of each token, their weights, and the slots for `moe_dispatch` and `moe_combine`.

    Args:
        logits: array of shape (tokens, experts), floating-point or integer.
        k: an int from 1 to the number of experts.
        capacity: an int, how many tokens an expert takes. None: all.
        renormalize: whether the weights of a token sum to 1; otherwise they are its probabilities among all experts.

    Returns:
        (weights, experts, slots, counts), a NamedTuple:
        `weights`, (tokens, k), of the type of `logits` if that is floating-point: `jaxkern.softmax` of the experts; as there, NaN
        for a token with a logit of +inf, and 0 for one whose logits are all -inf.
        `experts`, int32 (tokens, k), most probable first.
        `slots`, int32 (tokens, k). With a capacity there are experts * capacity slots: the n-th token of an expert, in the
        order of tokens, has slot expert * capacity + n, and -1 if the expert is full. Without one there are tokens * k
        slots: the first ones belong to the tokens of expert 0, the next ones to the tokens of expert 1, and so on.
        `counts`, int32 (experts,): how many tokens chose each expert.

    Raises:
        TypeError: `logits` is not an array of real numbers; `k` or `capacity` is not an int.
        ValueError: `logits` does not have two dimensions; `k` is not from 1 to the number of experts; `capacity` is negative.

    Derivatives: forward and reverse mode, of any order, of `weights` by `logits`.

    Cost: the logits are read once, in two launches of kernels, for types of 32 bits and fewer, `k` to 16 and 512 experts.
    In other cases, and under `vmap`, `top_k` selects the experts, and a sort of the choices of all tokens (4 bytes each)
    gives the slots.

    >>> import jax.numpy as jnp, jaxkern
    >>> logits = jnp.log(jnp.array([[0.1, 0.6, 0.3], [0.5, 0.25, 0.25], [0.2, 0.6, 0.2]]))
    >>> r = jaxkern.moe_route(logits, 1)
    >>> r.experts.ravel().tolist(), r.slots.ravel().tolist(), r.counts.tolist()
    ([1, 0, 1], [1, 0, 2], [1, 2, 0])
    >>> jaxkern.moe_dispatch(jnp.array([1.0, 2.0, 3.0]), r.slots, 3).tolist()
    [2.0, 1.0, 3.0]

    Source: Shazeer et al., "Outrageously Large Neural Networks", 2017.
    """
    name = "moe_route"
    validate.check_array(name, "logits", "an array", logits)
    logits = validate.floating(name, jnp.asarray(logits), "logits")
    if logits.ndim != 2:
        raise ValueError(f"jaxkern.{name}: logits must have shape (tokens, experts), got {logits.shape}")
    k, renormalize = validate.integer(name, "k", k), validate.flag(name, "renormalize", renormalize)
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"jaxkern.{name}: k must be from 1 to {logits.shape[1]}, the number of experts, got {k}")
    if capacity is not None:
        capacity = validate.integer(name, "capacity", capacity, or_none=True)
        if not 0 <= capacity * logits.shape[1] < 2**31:
            raise ValueError(f"jaxkern.{name}: capacity must be 0 or more, and all slots below 2**31, got {capacity}")
    return _route(logits, k, capacity, renormalize)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
@switch.own_promotion
def _route(logits, k, capacity, renormalize):
    return Routing(*bind(route_p, logits, k=k, capacity=capacity, renormalize=renormalize))
