"""bincount and histogram. The primitive of counts is in _ops/select; weighted counts are segment sums."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxkern._core import switch, validate
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind
from jaxkern._ops.select.count import count_p
from jaxkern.segment import segment_sum
from jaxkern.sorting import searchsorted


def bincount(x: ArrayLike, length: int, weights: ArrayLike | None = None) -> jax.Array:
    """How often each of 0, ..., length - 1 is in `x`, or the sum of the weights there, as `jnp.bincount`.

    Args:
        x: array of any shape, of integers or booleans. Negative numbers count as 0; numbers from `length` on do not count.
        length: an int.
        weights: array of numbers, of the shape of `x`. None: 1.

    Returns:
        Array of shape (length,): int32 (int64 with x64) without weights, otherwise of the type of `weights`. Bitwise
        reproducible; floating-point weights are summed in float32 or wider and rounded once.

    Raises:
        TypeError: `x` is not an array of integers; `weights` is not an array of numbers; `length` is not an int.
        ValueError: `length` is negative, or 2**31 or more; `weights` has another shape than `x`.

    Derivatives: forward and reverse mode, of any order, by `weights`.

    Cost: without weights, x is read once. With weights it is sorted first, as by `sort_indices`.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.bincount(jnp.array([1, 3, 1, 7]), 5).tolist()
    [0, 2, 0, 1, 0]
    >>> jaxkern.bincount(jnp.array([1, 3, 1, 7]), 5, jnp.array([0.5, 1.0, 0.25, 2.0])).tolist()
    [0.0, 0.75, 0.0, 1.0, 0.0]

    Source: counts in shared memory, as in Podlozhnyuk, "Histogram calculation in CUDA", 2007.
    """
    name = "bincount"
    validate.check_array(name, "x", "an array of integers", x)
    x, length = jnp.asarray(x), validate.integer(name, "length", length)
    if not (jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool):
        raise TypeError(f"jaxkern.{name}: x must be an array of integers, got {x.dtype}{list(x.shape)}")
    if not 0 <= length < 2**31:
        raise ValueError(f"jaxkern.{name}: length must be from 0 to 2**31 - 1, got {length}")
    return _bincount(x, length, _weights(name, x, weights))


def _weights(name, x, weights):
    if weights is None:
        return None
    validate.check_array(name, "weights", "an array of numbers", weights)
    weights = jnp.asarray(weights)
    validate.number_array(name, "weights", weights)
    if weights.shape != x.shape:
        raise ValueError(f"jaxkern.{name}: weights of shape {weights.shape} and x of shape {x.shape} differ")
    return weights


@functools.partial(jax.jit, static_argnums=1)
@switch.own_promotion
def _bincount(x, length, weights):
    flat = lambda a: validate.mergeable(a, a.ndim).reshape(-1)
    x = flat(x.astype(jnp.uint8) if x.dtype == bool else x)
    if weights is not None:
        return segment_sum(flat(weights), jnp.maximum(x, 0), length)
    return bind(count_p, x, bins=length).astype(jax.dtypes.canonicalize_dtype(int))


def histogram(
    x: ArrayLike,
    bins: int | ArrayLike = 10,
    range: tuple[ArrayLike, ArrayLike] | None = None,
    weights: ArrayLike | None = None,
    *,
    density: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """How many elements of `x` lie between each two edges, or the sum of their weights, as `jnp.histogram`.

    Args:
        x: array of any shape, of real numbers.
        bins: an int, the number of bins of equal width; or an ascending array of one dimension, their edges. The last bin
            contains its upper edge, other bins do not.
        range: the lowest and the highest edge, or None for the least and the largest element; for an int of bins.
        weights: array of numbers, of the shape of `x`. None: 1.
        density: whether the result is divided by its sum and by the widths of the bins.

    Returns:
        (counts, edges): arrays of shape (bins,) and (bins + 1,), of the floating-point type that `x` and `weights` promote to;
        counts of complex weights are complex. Counts are exact before they are converted. Elements outside of the edges, and
        NaN, do not count.

    Raises:
        TypeError: `x` or `bins` is not an array of real numbers, or `weights` not of numbers; `density` is not a bool.
        ValueError: `bins` is less than 1, or does not have one dimension; `range` is not a pair; shapes differ.

    Derivatives: forward and reverse mode, of any order, by `weights`.

    Cost: x is read once, once more for the edges without `range`, and 4 bytes for each element are written and read again.

    >>> import jax.numpy as jnp, jaxkern
    >>> counts, edges = jaxkern.histogram(jnp.array([0.0, 0.1, 0.5, 1.0, 3.0]), 2, (0, 1))
    >>> counts.tolist(), edges.tolist()
    ([2.0, 2.0], [0.0, 0.5, 1.0])

    Source: as for `bincount`.
    """
    name = "histogram"
    validate.check_array(name, "x", "an array", x)
    x = validate.floating(name, jnp.asarray(x))
    weights, density = _weights(name, x, weights), validate.flag(name, "density", density)
    validate.check_array(name, "bins", "an int or an array", bins)
    edges, count = jnp.asarray(bins), None
    if edges.ndim > 1 or (edges.ndim == 1 and len(edges) < 2):
        raise ValueError(f"jaxkern.{name}: bins must be an int or two edges or more, got shape {edges.shape}")
    if edges.ndim == 0:
        count = validate.integer(name, "bins", bins)
        if count < 1:
            raise ValueError(f"jaxkern.{name}: bins must be 1 or more, got {bins}")
    validate.real(name, "bins", edges)
    if range is not None:
        if not isinstance(range, (tuple, list)) or len(range) != 2:
            raise ValueError(f"jaxkern.{name}: range must be a pair of numbers, got {validate.shown(range)}")
        for limit in range:
            validate.check_array(name, "range", "a pair of numbers", limit)
            validate.real(name, "range", jnp.asarray(limit))
    return _histogram(x, None if count else edges, range and tuple(range), weights, count, density)


@functools.partial(jax.jit, static_argnums=(4, 5))
@switch.own_promotion
def _histogram(x, edges, limits, weights, bins, density):
    if weights is not None and not jnp.issubdtype(weights.dtype, jnp.complexfloating):
        dtype = jnp.promote_types(x.dtype, weights.dtype)
        x, weights = x.astype(dtype), weights.astype(dtype)
    edges = (jnp.histogram_bin_edges(x, bins, limits) if edges is None else edges).astype(x.dtype)
    at = searchsorted(edges, x, "right")
    at = jnp.where(x == edges[-1], len(edges) - 1, at)
    dtype = x.dtype if weights is None else weights.dtype
    wide = computing(dtype) if density else dtype  # neither sums nor the widths of bins need fit into 16 bits
    counts = bincount(at, len(edges), weights if weights is None else weights.astype(wide))[1:].astype(wide)
    if density:
        counts /= jnp.sum(counts) * jnp.diff(edges.astype(computing(edges.dtype)))
    return counts.astype(dtype), edges
