"""rms_norm and layer_norm, with scale, bias and a residual, in one read and one write."""

import functools
import math
import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from jaxkern._core import validate
from jaxkern._core.algorithms import forced
from jaxkern._core.primitive import bind
from jaxkern._core.validate import Axis
from jaxkern._ops.norm import derivatives, reference  # noqa: F401  derivatives are registered
from jaxkern._ops.norm.primitive import PRIMITIVES


def rms_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    eps: float = 1e-6,
    residual: ArrayLike | None = None,
    where: ArrayLike | None = None,
    dtype: DTypeLike | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """x / sqrt(mean(x^2) + eps) * scale along `axis`, as `flax.linen.RMSNorm`, `flax.nnx.RMSNorm` and `haiku.RMSNorm`.

    Args:
        x: array of any shape. float16, bfloat16 and float32 are computed in float32, float64 in float64, and the result
            is rounded once. Integers promote as in `jax.nn`. float8 uses XLA.
        scale: array that broadcasts to the dimensions of `x` along `axis`, of a floating-point dtype of its own, such as
            float32 for a bfloat16 `x`. None: 1.
        axis: an int, a tuple of ints, or None for all axes: the elements that are normalised together. Trailing axes are
            read in place. Others are first moved to the end, and the result back, which costs two copies.
        eps: added to the mean square, a Python number.
        residual: array of the shape and dtype of `x` that is added to `x` first. The sum is rounded to the dtype of
            `x`, and the rounded sum is what is normalised.
        where: boolean array that broadcasts to the shape of `x`. Statistics are of the elements where it is True; all
            elements are normalised with them, as with flax's `mask`. A row without such elements is 0 (with a bias:
            the bias). Left to XLA.
        dtype: of the result; default: that of `x`.

    Returns:
        Array of the shape of `x`; with `residual` a pair, that array and x + residual. Bitwise reproducible, and so are
        the gradients. A row with NaN or an infinity contains NaN. Kernels divide squares by the width before they add
        them, so that float32 values up to 1.8e19 do not overflow; elsewhere a row is 0 if its sum of squares does.

    Raises:
        TypeError: an array is complex or not an array; `residual` has another dtype than `x`; `where` is not boolean;
            `eps` is not a Python number; `dtype` is not floating-point.
        ValueError: `axis` is out of bounds, empty or repeats a dimension; `eps` is negative; a shape does not fit.

    >>> import jax.numpy as jnp, jaxkern
    >>> y = jaxkern.rms_norm(jnp.array([3.0, 4.0]), jnp.array([1.0, 10.0]))
    >>> [round(v, 3) for v in y.tolist()]
    [0.849, 11.314]

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    return _call("rms_norm", x, scale, None, axis, eps, residual, where, dtype)


def layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    eps: float = 1e-6,
    residual: ArrayLike | None = None,
    where: ArrayLike | None = None,
    dtype: DTypeLike | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """(x - mean(x)) / sqrt(var(x) + eps) * scale + bias along `axis`, as the layers of flax, equinox and haiku.

    The default `eps` is flax's; equinox and haiku have 1e-5. The variance is the mean of the squared deviations from the
    mean, which is at least as accurate as mean(x^2) - mean(x)^2 (flax's `use_fast_variance`).

    Args:
        bias: as `scale`. None: 0.
        x, scale, axis, eps, residual, where, dtype: as for `rms_norm`.

    Returns, raises: as `rms_norm`.

    >>> import jax.numpy as jnp, jaxkern
    >>> y, total = jaxkern.layer_norm(jnp.array([1.0, 2.0]), bias=jnp.array([0.5, 0.5]), residual=jnp.array([0.0, 1.0]))
    >>> [round(v, 3) for v in y.tolist()], total.tolist()
    ([-0.5, 1.5], [1.0, 3.0])

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    return _call("layer_norm", x, scale, bias, axis, eps, residual, where, dtype)


def _call(name, x, scale, bias, axis, eps, residual, where, dtype):
    validate.check_array(name, "x", "an array or a number", x)
    for argument, value in (("scale", scale), ("bias", bias), ("residual", residual)):
        if value is not None:
            validate.check_array(name, argument, "an array", value)
    if where is not None:
        validate.check_array(name, "where", "a boolean array", where)
    if isinstance(eps, bool) or not isinstance(eps, (numbers.Real, np.number)):
        raise TypeError(f"jaxkern.{name}: eps must be a Python number, got {type(eps).__name__}")
    if not float(eps) >= 0:
        raise ValueError(f"jaxkern.{name}: eps must not be negative, got {eps}")
    if dtype is not None:
        dtype = jnp.dtype(dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"jaxkern.{name}: dtype must be floating-point, got {dtype}")
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    y = _norm(
        x,
        scale,
        bias,
        residual,
        where,
        name=name,
        axis=validate.static_axis(name, axis),
        eps=float(eps),
        dtype=dtype,
        tier=forced(name),
    )
    return y[0] if residual is None else tuple(y)


# Inlined, so that a jaxpr holds the primitive alone. Jitted, so that an eager call costs no more than a jnp function.
@functools.partial(jax.jit, static_argnames=("name", "axis", "eps", "dtype", "tier"), inline=True)
def _norm(x, scale, bias, residual, where, *, name, axis, eps, dtype, tier):
    x = validate.floating(name, x)
    dtype = x.dtype if dtype is None else dtype
    axes = validate.sorted_axes(name, axis, x.shape)
    if not axes:
        raise ValueError(f"jaxkern.{name}: axis {axis} names no dimension of x of shape {x.shape}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        kind = ValueError if residual.shape != x.shape else TypeError
        raise kind(
            f"jaxkern.{name}: residual must have the shape and dtype of x, {x.dtype}{list(x.shape)}, got "
            f"{residual.dtype}{list(residual.shape)}"
        )
    where = validate.full_rank_mask(name, x, where)
    row = tuple(x.shape[a] for a in axes)
    scale, bias = _parameters(name, x, row, {"scale": scale, "bias": bias})

    order = [a for a in range(x.ndim) if a not in axes] + axes
    flat = functools.partial(_flat, order=order, count=len(axes))
    rows = {"residual": residual, "scale": scale, "bias": bias}
    given = {k: flat(a) if k == "residual" else a for k, a in rows.items() if a is not None}
    if where is not None:
        where = flat(jnp.broadcast_to(where, x.shape))
        rest = {k: given.get(k) for k in rows}
        ys = reference.masked(flat(x), where, operation=name, eps=eps, dtype=dtype, **rest)
    else:
        params = {"operation": name, "extras": " ".join(given), "eps": eps, "dtype": dtype, "tier": tier}
        ys = bind(PRIMITIVES[name].forward, flat(x), *given.values(), **params)
    return [_restored(y, x, order, len(axes)) for y in ys]


def _parameters(name, x, row, given):
    """scale and bias as vectors of one dtype; None stays None."""
    for argument, value in given.items():
        if value is None:
            continue
        value = validate.floating(name, value, argument)
        try:
            fits = jnp.broadcast_shapes(value.shape, row) == row
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"jaxkern.{name}: {argument} of shape {value.shape} does not broadcast to the normalised dimensions "
                f"{row} of x of shape {x.shape}"
            )
        given[argument] = value if value.shape == row else jnp.broadcast_to(value, row)
    wide = reference.computing(x.dtype)
    dtypes = {value.dtype for value in given.values() if value is not None}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(d) for d in (jnp.float16, jnp.bfloat16, jnp.float32, wide)}:
        given = {k: value if value is None else value.astype(wide) for k, value in given.items()}
    return [value if value is None else value.reshape(math.prod(row)) for value in given.values()]


def _flat(x, order, count):
    """x with its normalised axes, the last `count` of `order`, as one last axis."""
    x = x if order == list(range(x.ndim)) else x.transpose(order)
    first = x.ndim - count
    if count == 1:
        return x
    return validate.mergeable(x, count, first).reshape(*x.shape[:first], math.prod(x.shape[first:]))


def _restored(y, x, order, count):
    """y, flat, in the shape of x."""
    if count > 1:
        y = y.reshape([x.shape[a] for a in order])
        spec = validate.explicit_spec(x)
        if any(spec[a] for a in order[-count:]):
            y = jax.sharding.reshard(y, P(*(spec[a] for a in order)))
    return y if order == list(range(x.ndim)) else y.transpose([order.index(a) for a in range(x.ndim)])
