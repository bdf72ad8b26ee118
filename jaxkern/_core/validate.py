"""Checks the arguments of operations along an axis, and converts them to the operands of primitives.

Every error here is raised while tracing and names the function, the argument and the shapes.
"""

import inspect
import math
import numbers
import operator
from collections.abc import Sequence

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxkern._core import compat

Axis = int | Sequence[int] | None


def static_axis(name: str, axis, argument: str = "axis"):
    """Converts `axis` to a hashable int, tuple of ints, or None; errors name it as `argument`."""
    if axis is None or type(axis) is int:
        return axis
    # A bool is an int in Python, and a string or a dict is iterable; none of them is an axis.
    if not isinstance(axis, (bool, str, bytes, bytearray, dict)):
        try:
            return _index(axis)
        except TypeError:
            pass
        try:
            return tuple(map(_index, axis))
        except TypeError:
            pass
    raise TypeError(f"jaxkern.{name}: {argument} must be an int, a tuple of ints or None, got {shown(axis)}")


def integer(name: str, argument: str, value, or_none: bool = False) -> int:
    """Converts a static argument to an int. or_none: whether the caller accepts None too, for the error."""
    try:
        return _index(value)
    except TypeError:
        wanted = "an int or None" if or_none else "an int"
        raise TypeError(f"jaxkern.{name}: {argument} must be {wanted}, got {shown(value)}") from None


def _index(a) -> int:
    if isinstance(a, (bool, np.bool_)):
        raise TypeError
    return operator.index(a)


def flag(name: str, argument: str, value) -> bool:
    """Converts a static argument to a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"jaxkern.{name}: {argument} must be True or False, got {shown(value)}")
    return bool(value)


def number(name: str, argument: str, value) -> float:
    """Converts a static argument to a finite float."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (numbers.Real, np.floating, np.integer)):
        raise TypeError(
            f"jaxkern.{name}: {argument} must be a Python number, which is known while tracing, got {shown(value)}"
        )
    if not math.isfinite(value):
        raise ValueError(f"jaxkern.{name}: {argument} must be finite, got {value}")
    return float(value)


def dtype_of(name: str, argument: str, value, wanted: str = "a dtype") -> np.dtype:
    """Converts a static argument to the dtype that JAX has for it. None, which NumPy reads as float64, is an error."""
    try:
        if value is None or isinstance(value, (list, jax.Array, np.ndarray, np.generic)):
            raise TypeError
        return jax.dtypes.canonicalize_dtype(jnp.dtype(value))
    except (TypeError, ValueError):
        raise TypeError(f"jaxkern.{name}: {argument} must be {wanted}, got {shown(value)}") from None


def floating_dtype(name: str, argument: str, value) -> np.dtype:
    """Converts a static argument to a real floating-point dtype."""
    found = dtype_of(name, argument, value, "a floating-point type")
    if not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"jaxkern.{name}: {argument} must be a floating-point type, got {found}")
    return found


def function(name: str, argument: str, value, what: str = "a function") -> None:
    if not callable(value):
        raise TypeError(f"jaxkern.{name}: {argument} must be {what}, got {type(value).__name__}")


def check_call(name: str, argument: str, f, count: int, scalars: str) -> None:
    """Raises unless `f`, the `argument` of a public function, can be called with `count` arguments, which are `scalars`."""
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):  # it has none
        return
    try:
        signature.bind(*range(count))
    except TypeError as error:
        raise TypeError(f"jaxkern.{name}: {argument} is called with {scalars}: {error}") from None


def choice(name: str, argument: str, value, names: Sequence[str]) -> None:
    """Raises unless `value` is one of these strings."""
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"jaxkern.{name}: {argument} must be one of {', '.join(names)}, got {shown(value)}")


def shown(value) -> str:
    """A value that an error says is wrong: its representation if that is short, else its type."""
    if isinstance(value, jax.core.Tracer):
        return f"a traced {jax.typeof(value).str_short()}"
    if isinstance(value, (jax.Array, np.ndarray)):
        return f"an array, {_dtype_name(value.dtype)}{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else type(value).__name__


def check_array(name: str, argument: str, wanted: str, value, keys: bool = False) -> None:
    """Raises unless a jitted function accepts `value` as one array, of numbers or booleans or, if `keys`, of keys."""
    try:
        if isinstance(value, jax.ShapeDtypeStruct):
            raise TypeError
        dtype = value.dtype if isinstance(value, jax.Array) else jax.typeof(value).dtype
        if dtype != jax.dtypes.float0 and (keys or isinstance(dtype, np.dtype)):
            return
        got = f"{_dtype_name(dtype)}{list(value.shape)}"
    except Exception:  # the type of the error depends on the reason
        got = type(value).__name__
        if isinstance(value, np.ndarray):
            got = f"{value.dtype}{list(value.shape)}"
        elif isinstance(value, int):
            got = "an int too large for any integer type of JAX"
    raise TypeError(f"jaxkern.{name}: {argument} must be {wanted}, got {got}")


def _dtype_name(dtype) -> str:
    return "float0" if dtype == jax.dtypes.float0 else str(dtype)


def real(name: str, argument: str, x) -> None:
    """Raises unless the elements of an array are numbers, and not complex."""
    if not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
        raise TypeError(f"jaxkern.{name}: {argument} must be real, got {_dtype_name(x.dtype)}{list(x.shape)}")


def number_array(name: str, argument: str, x) -> None:
    """Raises unless the elements of an array are numbers, real or complex."""
    if not jnp.issubdtype(x.dtype, jnp.number):
        raise TypeError(f"jaxkern.{name}: {argument} must be of numbers, got {_dtype_name(x.dtype)}{list(x.shape)}")


def floating(name: str, x, argument: str = "x"):
    """Promotes integers to floating-point as `jax.nn` does; errors name `x` as `argument`."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        if jnp.iinfo(x.dtype).bits < 8:  # as in jax.nn
            raise TypeError(
                f"jaxkern.{name}: {argument} of type {x.dtype}{list(x.shape)} does not promote to a floating-point "
                "type by itself: convert it with astype"
            )
        return x.astype(jax.eval_shape(jnp.exp, x).dtype)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"jaxkern.{name}: {argument} must be real, floating-point or integer, got {_dtype_name(x.dtype)}{list(x.shape)}"
        )
    if float(jnp.finfo(x.dtype).min) >= 0:
        raise TypeError(
            f"jaxkern.{name}: {argument} must be of a type with a zero and a sign, got {x.dtype}{list(x.shape)}"
        )
    return x


def full_rank_mask(name: str, x, where, whole: str = "x"):
    """Reshapes `where` to the rank of `x`, each dimension 1 or equal; errors name `x` as `whole`. None stays None."""
    if where is not None and where.dtype != jnp.bool_:
        raise TypeError(f"jaxkern.{name}: where must be boolean, got {where.dtype}{list(where.shape)}")
    return full_rank(name, "where", x, where, whole)


def full_rank(name: str, argument: str, x, part, whole: str = "x"):
    """Reshapes `part` to the rank of `x`, each dimension 1 or equal. None stays None."""
    if part is None:
        return None
    shape = (1,) * (x.ndim - part.ndim) + part.shape
    if len(shape) > x.ndim or any(b != 1 and b != a for a, b in zip(x.shape, shape)):
        raise ValueError(
            f"jaxkern.{name}: {argument} of shape {part.shape} does not broadcast to {whole} of shape {x.shape}"
        )
    return part if part.ndim == x.ndim else part.reshape(shape)


def sorted_axes(name: str, axis, shape, argument: str = "x", called: str = "axis") -> list[int]:
    """The axes as ascending nonnegative ints. Errors name the array as `argument` and the axes as `called`."""
    rank = len(shape)
    axes = range(rank) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    for a in axes:
        if not -rank <= a < rank:
            raise ValueError(f"jaxkern.{name}: {called} {a} is out of bounds for {argument} of shape {shape}")
    axes = sorted(a % rank for a in axes)
    if len(set(axes)) != len(axes):
        raise ValueError(f"jaxkern.{name}: duplicate value in {called} {axis} for {argument} of shape {shape}")
    return axes


def along_axes(f, x, parts, axes):
    """Applies `f(x, *parts, axis=axis)`, a row operation along one axis, along several axes; see one_axis."""
    if _apart(x, axes):
        order = _last(x, axes)
        y = along_axes(
            f, x.transpose(order), _each(lambda p: p.transpose(order), parts), list(range(x.ndim - len(axes), x.ndim))
        )
        return y.transpose([order.index(a) for a in range(x.ndim)])
    merged, parts, axis = one_axis(x, parts, axes)
    y = f(merged, *parts, axis=axis)
    if merged.ndim >= x.ndim:
        return y if merged.ndim == x.ndim else y[..., 0]
    y = y.reshape(x.shape)
    spec = explicit_spec(x)
    return y if not any(spec[axes[0] : axes[-1] + 1]) else jax.sharding.reshard(y, P(*spec))


def one_axis(x, parts, axes):
    """(x, parts, axis) with one axis in place of several.

    parts: a list of operands that have the rank of `x` and broadcast to it, or None.

    Neighbouring axes are merged by a reshape, which moves no data; dimensions of size 1 between them do not matter. Other
    axes are first moved to the end, which copies the array. All other dimensions keep their order, but dimensions of size 1
    between the axes may disappear. Without axes, a new one of size 1 is added.
    """
    long = [a for a in axes if x.shape[a] != 1]
    if len(long) == 1 or (not long and axes):
        return x, parts, (long or axes)[0]
    if not axes:  # each element is a row
        return x[..., None], _each(lambda p: p[..., None], parts), x.ndim
    if _apart(x, axes):
        order = _last(x, axes)
        return one_axis(
            x.transpose(order), _each(lambda p: p.transpose(order), parts), list(range(x.ndim - len(axes), x.ndim))
        )
    first, last = long[0], long[-1]
    span = slice(first, last + 1)

    def collapsed(part):
        # A part that has full size, or size 1, along all these axes can be reshaped. Other parts are broadcast first.
        if any(b != 1 for b in part.shape[span]):
            part = jnp.broadcast_to(part, (*part.shape[:first], *x.shape[span], *part.shape[last + 1 :]))
        return _collapse(_gathered(part, span), span)

    return collapsed(x), _each(collapsed, parts), first


def _each(do, parts):
    return [None if p is None else do(p) for p in parts]


def _apart(x, axes) -> bool:
    """Whether another dimension, not of size 1, lies between the axes."""
    long = [a for a in axes if x.shape[a] != 1]
    return any(x.shape[a] != 1 for a in range(long[0], long[-1] + 1) if a not in axes) if long else False


def _last(x, axes) -> list[int]:
    """The permutation of dimensions that moves the axes to the end."""
    return [a for a in range(x.ndim) if a not in axes] + list(axes)


def _collapse(x, span):
    # math.prod keeps symbolic sizes symbolic
    return x.reshape(*x.shape[: span.start], math.prod(x.shape[span]), *x.shape[span.stop :])


def explicit_spec(x) -> tuple:
    """The sharding of each dimension of `x`, an array or a type; all None unless the mesh has explicit axes."""
    aval = x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)
    spec = tuple(aval.sharding.spec)
    return spec + (None,) * (x.ndim - len(spec))


def split_like(x, aval):
    """Reshards `x` like `aval` on a mesh with explicit axes, as its cotangent must be."""
    same = tuple(jax.typeof(x).sharding.spec) == tuple(aval.sharding.spec)
    return x if same or aval.sharding.mesh.empty else jax.sharding.reshard(x, aval.sharding.spec)


def positions(name: str, argument: str, shape, axes) -> None:
    """Raises where positions along `axes`, merged if there are several, do not fit into int32, the type of indices."""
    sizes = [shape[a] for a in axes]
    if all(isinstance(n, int) for n in sizes) and math.prod(sizes) >= 2**31:
        raise ValueError(
            f"jaxkern.{name}: positions are int32, and {argument} of shape {tuple(shape)} has 2**31 or more of them"
        )


def mergeable(x, dims: int, first: int = 0):
    """Reshards `x` so that `dims` dimensions, beginning at `first`, can be reshaped to one.

    On a mesh with explicit axes, JAX merges dimensions only if no split dimension follows an unsplit one; before 0.10,
    only if at most the first is split.
    """
    spec, at = explicit_spec(x), first
    if compat.merges_split_dimensions():
        while at < first + dims and (spec[at] or x.shape[at] == 1):
            at += 1
    return _gathered(x, slice(max(at, first + 1), first + dims))


def whole(x, dim: int):
    """Replicates a dimension of `x` on a mesh with explicit axes."""
    return _gathered(x, slice(dim, dim + 1))


def _gathered(x, span):
    """Replicates the dimensions `span` of `x`; JAX has no sharding for the product of split dimensions."""
    spec = explicit_spec(x)
    if not any(spec[span]):
        return x
    return jax.sharding.reshard(x, P(*spec[: span.start], *(None,) * (span.stop - span.start), *spec[span.stop :]))
