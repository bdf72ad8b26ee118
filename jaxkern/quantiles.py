"""median and quantile. The primitive, which selects or sorts, is in _ops/select/ranks.py."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxkern._core import switch, validate
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind
from jaxkern._core.validate import Axis
from jaxkern._ops.select.ranks import ranked_p

_METHODS = ("linear", "lower", "higher", "midpoint", "nearest")


def quantile(
    x: ArrayLike, q: ArrayLike, axis: Axis = None, *, method: str = "linear", keepdims: bool = False
) -> jax.Array:
    """The values below which the fractions `q` of the elements along `axis` lie, as `jnp.quantile`.

        position = q (n - 1),  result = (1 - w) sorted[floor(position)] + w sorted[ceil(position)],  w = position - floor(position)

    Args:
        x: array of real numbers; integers are promoted to floating-point. A row with NaN has the quantile NaN.
        q: a number in [0, 1], or an array of any shape of such numbers.
        axis: an int, a tuple of ints, or None (the default) for all axes. Any but the last axis costs a transpose.
        method: "linear" as above, or which value to take instead: the "lower" or "higher" of the two elements, their mean
            ("midpoint"), or the "nearest" one (if both are equally near, the one at an even position).
        keepdims: whether the result keeps the axes, with size 1.

    Returns:
        Array of the shape of `q`, followed by the shape of `x` without the axes; of the type of `x` if that is
        floating-point.

    Raises:
        TypeError: `x` or `q` is not an array of real numbers; `axis` is not an int, a tuple of ints or None.
        ValueError: there are no elements along `axis`, or 2**31 or more, or `axis` is out of bounds; `method` is unknown.

    Derivatives: forward and reverse mode, of any order, by `x`, and by `q` with "linear".

    Cost: rows are sorted, as by `jaxkern.sort`. One or two numbers `q` of long rows (from 50000 elements on) are selected instead:
    in float32 a row is read three times, in 16 bits twice, and nothing of its size is written. Derivatives cost a sort.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.quantile(jnp.array([4.0, 1.0, 3.0, 2.0]), jnp.array([0.0, 0.5, 0.75])).tolist()
    [1.0, 2.5, 3.25]

    Source: definition 7 of Hyndman and Fan, "Sample quantiles in statistical packages", 1996.
    """
    name = "quantile"
    validate.check_array(name, "q", "a number or an array", q)
    q = jnp.asarray(q)
    validate.real(name, "q", q)
    validate.choice(name, "method", method, _METHODS)
    return _checked(name, x, q, axis, method, keepdims)


def median(x: ArrayLike, axis: Axis = None, *, keepdims: bool = False) -> jax.Array:
    """The middle of the elements along `axis`, or the mean of the middle two, as `jnp.median`.

    Args:
        x, axis, keepdims: as for `quantile`.

    Returns:
        Array of the shape of `x` without the axes; of its type if that is floating-point.

    Raises:
        TypeError: as for `quantile`.
        ValueError: as for `quantile`.

    Derivatives: forward and reverse mode, of any order, by `x`.

    Cost: as for `quantile`.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.median(jnp.array([[4.0, 1.0, 3.0], [2.0, 9.0, 5.0]]), axis=1).tolist()
    [3.0, 5.0]

    Source: as for `quantile`.
    """
    return _checked("median", x, jnp.float32(0.5), axis, "midpoint", keepdims)


def _checked(name, x, q, axis, method, keepdims):
    validate.check_array(name, "x", "an array", x)
    x, keepdims = validate.floating(name, jnp.asarray(x)), validate.flag(name, "keepdims", keepdims)
    axes = validate.sorted_axes(name, validate.static_axis(name, axis), x.shape)
    validate.positions(name, "x", x.shape, axes)
    if math.prod(x.shape[a] for a in axes) == 0:
        raise ValueError(f"jaxkern.{name}: x of shape {x.shape} has no elements along axis {axis}")
    return _quantile(x, q, tuple(axes), method, keepdims)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
@switch.own_promotion
def _quantile(x, q, axes, method, keepdims):
    kept = [n for d, n in enumerate(x.shape) if d not in axes]
    shape = tuple(1 if d in axes else n for d, n in enumerate(x.shape)) if keepdims else tuple(kept)
    rows = jnp.moveaxis(x, axes, range(x.ndim - len(axes), x.ndim)).reshape(*kept, math.prod(x.shape[a] for a in axes))
    wide, count = computing(x.dtype), q.size
    position = q.reshape(-1).astype(wide) * (rows.shape[-1] - 1)
    low, high = jnp.floor(position), jnp.ceil(position)
    at = {"nearest": [jnp.round(position)], "lower": [low], "higher": [high]}.get(method, [low, high])
    ranks = jnp.clip(jnp.concatenate(at).astype(jnp.int32), 0, rows.shape[-1] - 1)
    found = bind(ranked_p, rows, ranks).astype(wide)
    if len(at) == 2:
        below, above = found[..., :count], found[..., count:]
        w = position - low if method == "linear" else jnp.where(low == high, 0, jnp.asarray(0.5, wide))
        found = jnp.where(w == 0, below, (1 - w) * below + w * above)
    found = found.astype(x.dtype)
    return jnp.moveaxis(found, -1, 0).reshape(*q.shape, *shape)
