"""Checking the arguments of an operation along an axis, and bringing them to what a primitive takes.

Every error here is raised while tracing and names the function, the argument and the shapes.
"""

import math
import operator

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxkern import _compat


def static_axis(name: str, axis):
    """`axis` as a hashable int, tuple of ints, or None."""
    if axis is None or type(axis) is int:
        return axis
    # A bool is an int to Python, a string or a dict is iterable: none of them is meant as an axis.
    if not isinstance(axis, (bool, str, bytes, bytearray, dict)):
        try:
            return _index(axis)
        except TypeError:
            pass
        try:
            return tuple(map(_index, axis))
        except TypeError:
            pass
    raise TypeError(f"jaxkern.{name}: axis must be an int, a tuple of ints or None, got {axis!r}")


def _index(a) -> int:
    if isinstance(a, bool):
        raise TypeError
    return operator.index(a)


def check_array(name: str, argument: str, wanted: str, value) -> None:
    """Raises unless `value` is something that a jitted function takes for one array."""
    if isinstance(value, jax.Array):
        return
    try:
        if not isinstance(value, jax.ShapeDtypeStruct):
            jax.typeof(value)
            return
        got = "ShapeDtypeStruct"
    except Exception:  # its type differs with the reason
        dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
        got = f"{dtype}{list(shape)}" if isinstance(shape, tuple) else type(value).__name__
        if isinstance(value, int):
            got = "an int too large for any integer type of JAX"
    raise TypeError(f"jaxkern.{name}: {argument} must be {wanted}, got {got}")


def floating(name: str, x):
    """`x` as a floating-point array; integers promote as in `jax.nn`."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        if jnp.iinfo(x.dtype).bits < 8:  # as in jax.nn
            raise TypeError(f"jaxkern.{name}: x of type {x.dtype}{list(x.shape)} does not promote to a floating-point "
                            "type by itself: convert it with x.astype")
        return x.astype(jax.eval_shape(jnp.exp, x).dtype)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        dtype = "float0" if x.dtype == jax.dtypes.float0 else x.dtype
        raise TypeError(f"jaxkern.{name}: x must be real, floating-point or integer, got {dtype}{list(x.shape)}")
    if float(jnp.finfo(x.dtype).min) >= 0:
        raise TypeError(f"jaxkern.{name}: x must be of a type with a zero and a sign, got {x.dtype}{list(x.shape)}")
    return x


def full_rank_mask(name: str, x, where):
    """`where` with as many dimensions as `x`, each 1 or equal; None stays None."""
    if where is not None and where.dtype != jnp.bool_:
        raise TypeError(f"jaxkern.{name}: where must be boolean, got {where.dtype}{list(where.shape)}")
    return full_rank(name, "where", x, where)


def full_rank(name: str, argument: str, x, part):
    """`part`, which broadcasts to `x`, with as many dimensions as `x`, each 1 or equal; None stays None."""
    if part is None:
        return None
    shape = (1,) * (x.ndim - part.ndim) + part.shape
    if len(shape) > x.ndim or any(b != 1 and b != a for a, b in zip(x.shape, shape)):
        raise ValueError(f"jaxkern.{name}: {argument} of shape {part.shape} does not broadcast to x of shape {x.shape}")
    return part if part.ndim == x.ndim else part.reshape(shape)


def sorted_axes(name: str, axis, shape) -> list[int]:
    """The axes as ascending non-negative numbers."""
    rank = len(shape)
    axes = range(rank) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    for a in axes:
        if not -rank <= a < rank:
            raise ValueError(f"jaxkern.{name}: axis {a} is out of bounds for x of shape {shape}")
    axes = sorted(a % rank for a in axes)
    if len(set(axes)) != len(axes):
        raise ValueError(f"jaxkern.{name}: duplicate value in axis {axis} for x of shape {shape}")
    return axes


def along_axes(f, x, parts, axes):
    """`f(x, parts, axis)`, a row operation over one axis, over several of them.

    parts: operands of the rank of `x` that broadcast to it, or None, in a list. Neighbouring axes become one by a reshape, which moves nothing; dimensions of size 1 are no
    obstacle. Other axes are first moved to the end, which copies the array.
    """
    long = [a for a in axes if x.shape[a] != 1]
    if len(long) == 1 or (not long and axes):
        return f(x, parts, (long or axes)[0])
    each = lambda do: [None if p is None else do(p) for p in parts]
    if not axes:  # each element is a row of its own
        return f(x[..., None], each(lambda p: p[..., None]), x.ndim)[..., 0]
    first, last = long[0], long[-1]
    if any(x.shape[a] != 1 for a in range(first, last) if a not in axes):
        order = [a for a in range(x.ndim) if a not in axes] + axes
        y = along_axes(f, x.transpose(order), each(lambda p: p.transpose(order)),
                       list(range(x.ndim - len(axes), x.ndim)))
        return y.transpose([order.index(a) for a in range(x.ndim)])
    span = slice(first, last + 1)

    def collapsed(part):
        # Whole or of size 1 over all these axes, it can be reshaped; else it is broadcast over them.
        if any(b != 1 for b in part.shape[span]):
            part = jnp.broadcast_to(part, (*part.shape[:first], *x.shape[span], *part.shape[last + 1 :]))
        return _collapse(_gathered(part, span), span)

    y = f(_collapse(_gathered(x, span), span), each(collapsed), first).reshape(x.shape)
    spec = _explicit_spec(x)
    return y if not any(spec[span]) else jax.sharding.reshard(y, P(*spec))


def _collapse(x, span):
    # math.prod keeps symbolic sizes symbolic
    return x.reshape(*x.shape[: span.start], math.prod(x.shape[span]), *x.shape[span.stop :])


def _explicit_spec(x) -> tuple:
    """How the type of `x` says that each dimension is split: all None but on a mesh with explicit axes."""
    spec = tuple(jax.typeof(x).sharding.spec)
    return spec + (None,) * (x.ndim - len(spec))


def split_like(y, x):
    """`y` split as the type of `x` says, on a mesh with explicit axes; elsewhere `y`."""
    spec = _explicit_spec(x)
    return y if _explicit_spec(y) == spec else jax.sharding.reshard(y, P(*spec))


def mergeable(x, dims: int):
    """`x` such that its first `dims` dimensions may be reshaped to one.

    JAX before 0.10 merges dimensions on a mesh with explicit axes only where no more than the first is split.
    """
    return x if _compat.merges_split_dimensions() else _gathered(x, slice(1, dims))


def _gathered(x, span):
    """`x` with the dimensions of `span` whole on every device, without which a type has no word for their product."""
    spec = _explicit_spec(x)
    if not any(spec[span]):
        return x
    return jax.sharding.reshard(x, P(*spec[: span.start], *(None,) * (span.stop - span.start), *spec[span.stop :]))
