"""Elementwise operations: activations, their gated forms, arithmetic, comparisons, casts.

The functions are made from the rows of _ops/elementwise/table.py. Operands broadcast against each other as in `jnp`;
kernels read them in place.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxkern._core import validate
from jaxkern._core.algorithms import forced
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind
from jaxkern._ops.elementwise.documentation import documentation
from jaxkern._ops.elementwise.primitive import PRIMITIVES, ROWS, cast_p


def _call(row, arrays, parameters=(), split=-1):
    for name, x in zip(row.arrays, arrays):
        validate.check_array(row.part_of or row.name, name, "an array or a number", x)
    for (name, _), x in zip(row.parameters, parameters):
        validate.check_array(row.name, name, "a number", x)
    return _jitted(*arrays, *parameters, name=row.name, split=split, algorithm=forced("elementwise"))


# Inlined, so that a jaxpr holds the primitive alone. Jitted, so that an eager call costs no more than a jnp function.
@functools.partial(jax.jit, static_argnames=("name", "split", "algorithm"), inline=True)
def _jitted(*operands, name, split, algorithm):
    row = ROWS[name]
    count = len(operands) - len(row.parameters)
    arrays, parameters = list(operands[:count]), operands[count:]
    public = row.part_of or row.name
    first = 1 if row.types == "select" else 0
    dtype = _common_type(row, public, arrays[first:])
    arrays[first:] = [
        x if x.dtype == dtype else x.astype(dtype) if dtype != jnp.bool_ else x != 0 for x in arrays[first:]
    ]
    if first and arrays[0].dtype != jnp.bool_:
        arrays[0] = arrays[0] != 0
    if split >= 0:
        arrays[0] = validate.whole(arrays[0], split)
    rank = max(x.ndim for x in arrays)
    try:
        np.broadcast_shapes(*(tuple(d if isinstance(d, int) else 1 for d in x.shape) for x in arrays))
    except ValueError:
        shapes = ", ".join(f"{a} of shape {x.shape}" for a, x in zip(row.arrays, arrays))
        raise ValueError(f"jaxkern.{public}: {shapes} do not broadcast against each other") from None
    arrays = [x if x.ndim == rank else x.reshape((1,) * (rank - x.ndim) + x.shape) for x in arrays]
    for (argument, _), x in zip(row.parameters, parameters):
        if x.ndim or jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise TypeError(f"jaxkern.{public}: {argument} must be a real scalar, got {x.dtype}{list(x.shape)}")
    parameters = [x.astype(computing(dtype)).reshape((1,) * rank) for x in parameters]
    return bind(PRIMITIVES[name][0], *arrays, *parameters, split=split, algorithm=algorithm)


def _common_type(row, public, arrays):
    """The dtype that the arrays promote to. Raises if the operation is not defined for it."""
    dtype = jnp.result_type(*arrays)
    if row.types == "logical":
        return jnp.dtype(bool)
    if row.types in ("select", "compare") and not jnp.issubdtype(dtype, jnp.complexfloating):
        return dtype
    if dtype == jnp.bool_ or not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        given = ", ".join(
            f"{a} of type {x.dtype}{list(x.shape)}" for a, x in zip(row.arrays[row.types == "select" :], arrays)
        )
        raise TypeError(f"jaxkern.{public}: operands must be real numbers, floating-point or integer, got {given}")
    if jnp.issubdtype(dtype, jnp.integer) and row.types in ("float", "test"):
        return jnp.result_type(dtype, jnp.float32 if dtype.itemsize < 8 else jnp.float64)
    return dtype


def _public(row):
    """Makes the public function of a row, with the arguments that the row names."""
    arguments = [*row.arrays, *(name if default is None else f"{name}={default!r}" for name, default in row.parameters)]
    parameters = "".join(f"{name}, " for name, _ in row.parameters)
    space = {"_call": _call, "_row": row, "ArrayLike": ArrayLike, "jax": jax}
    exec(
        f"def {row.name}({', '.join(arguments)}):\n    return _call(_row, ({', '.join(row.arrays)},), ({parameters}))",
        space,
    )
    function = space[row.name]
    function.__module__ = __name__
    function.__annotations__ = dict.fromkeys(inspect.signature(function).parameters, "ArrayLike") | {
        "return": "jax.Array"
    }
    function.__doc__ = documentation(row)
    return function


globals().update({row.name: _public(row) for row in ROWS.values() if not row.part_of and not row.gated})


def gelu(x: ArrayLike, approximate: bool = True) -> jax.Array:
    """x Phi(x), the Gaussian error linear unit, as `jax.nn.gelu`; Phi is the normal distribution function.

    Args:
        x: floating-point array of any shape; integers promote as in `jnp`.
        approximate: whether to approximate Phi(x) by (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, which changes the
            result by up to 5e-4.

    Returns:
        Array of the shape and dtype of `x`. float16, bfloat16 and float32 are computed in float32 and rounded once.

    Raises:
        TypeError: `x` is boolean, complex or not an array; `approximate` is not a bool.

    Derivatives: forward and reverse mode, of any order. The gradient is one kernel.

    Cost: for n elements of e bytes, the call moves 2 n e bytes and the gradient 3 n e.

    >>> import jax.numpy as jnp, jaxkern
    >>> [f"{y:.4f}" for y in jaxkern.gelu(jnp.array([-1.0, 0.0, 1.0]), approximate=False)]
    ['-0.1587', '0.0000', '0.8413']

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
    """
    approximate = validate.flag("gelu", "approximate", approximate)
    return _call(ROWS["gelu_tanh" if approximate else "gelu_erf"], (x,))


def glu(x: ArrayLike, axis: int = -1, *, gate: ArrayLike | None = None) -> jax.Array:
    """x sigmoid(gate), the gated linear unit, as `jax.nn.glu`.

    Args:
        x: floating-point array of any shape; integers promote. Without `gate`, its first half along `axis` is x and its
            second half the gate. The kernel reads both halves in place.
        axis: an int, the dimension to split in halves.
        gate: floating-point array that broadcasts against `x`.

    Returns:
        Array of the common shape of `x` and `gate`, or of one half of `x`, and of the dtype that they promote to.

    Raises:
        TypeError: an operand is boolean, complex or not an array; `axis` is not an int.
        ValueError: `axis` is out of bounds, its size is odd, or the shapes do not broadcast.

    Derivatives: forward and reverse mode, of any order. One kernel computes the gradients of both operands.

    Cost: for results of n elements of e bytes, the call moves 3 n e bytes and the gradient 5 n e.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.glu(jnp.array([2.0, 4.0, 0.0, 0.0])).tolist()
    [1.0, 2.0]

    Source: Dauphin et al., "Language Modeling with Gated Convolutional Networks", 2017.
    """
    return _gated("glu", "glu", x, axis, gate)


def swiglu(x: ArrayLike, axis: int = -1, *, gate: ArrayLike | None = None) -> jax.Array:
    """x silu(gate), a gated linear unit: `glu` with another activation.

    Args:
        x: floating-point array of any shape; integers promote. Without `gate`, its first half along `axis` is x and its
            second half the gate. The kernel reads both halves in place.
        axis: an int, the dimension to split in halves.
        gate: floating-point array that broadcasts against `x`.

    Returns:
        Array of the common shape of `x` and `gate`, or of one half of `x`, and of the dtype that they promote to.

    Raises:
        TypeError: an operand is boolean, complex or not an array; `axis` is not an int.
        ValueError: `axis` is out of bounds, its size is odd, or the shapes do not broadcast.

    Derivatives: forward and reverse mode, of any order. One kernel computes the gradients of both operands.

    Cost: for results of n elements of e bytes, the call moves 3 n e bytes and the gradient 5 n e.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.swiglu(jnp.array([2.0]), gate=jnp.array([0.0])).tolist()
    [0.0]

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    return _gated("swiglu", "swiglu", x, axis, gate)


def geglu(x: ArrayLike, axis: int = -1, *, gate: ArrayLike | None = None, approximate: bool = True) -> jax.Array:
    """x gelu(gate, approximate), a gated linear unit: `glu` with another activation.

    Args:
        x: floating-point array of any shape; integers promote. Without `gate`, its first half along `axis` is x and its
            second half the gate. The kernel reads both halves in place.
        axis: an int, the dimension to split in halves.
        gate: floating-point array that broadcasts against `x`.
        approximate: whether the gelu is the one with tanh, as in `gelu`.

    Returns:
        Array of the common shape of `x` and `gate`, or of one half of `x`, and of the dtype that they promote to.

    Raises:
        TypeError: an operand is boolean, complex or not an array; `axis` is not an int; `approximate` is not a bool.
        ValueError: `axis` is out of bounds, its size is odd, or the shapes do not broadcast.

    Derivatives: forward and reverse mode, of any order. One kernel computes the gradients of both operands.

    Cost: for results of n elements of e bytes, the call moves 3 n e bytes and the gradient 5 n e.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.geglu(jnp.array([2.0]), gate=jnp.array([0.0])).tolist()
    [0.0]

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    approximate = validate.flag("geglu", "approximate", approximate)
    return _gated("geglu", "geglu_tanh" if approximate else "geglu_erf", x, axis, gate)


def _gated(public, name, x, axis, gate):
    if np.ndim(axis):
        raise TypeError(
            f"jaxkern.{public}: axis must be an int; an array of gates is passed by name, {public}(x, gate=...)"
        )
    axis = validate.integer(public, "axis", axis)
    if gate is not None:
        return _call(ROWS[name], (x, gate))
    validate.check_array(public, "x", "an array", x)
    shape = jnp.shape(x)
    if not -len(shape) <= axis < len(shape) or shape[axis] % 2 != 0:
        raise ValueError(f"jaxkern.{public}: x of shape {shape} has no halves along axis {axis}")
    return _call(ROWS[name], (x,), split=axis % len(shape))


# ---- cast


def cast(x: ArrayLike, dtype: DTypeLike) -> jax.Array:
    """`x` in another dtype, as `x.astype(dtype)`: rounded once; to integers towards 0, saturating.

    Args:
        x: array of any shape and real dtype, booleans included.
        dtype: a real dtype.

    Returns:
        Array of the shape of `x` and of `dtype`; `x` itself if it has that dtype.

    Raises:
        TypeError: `x` is not an array, or a dtype is complex or not numeric.

    Derivatives: forward and reverse mode, of any order, between floating-point dtypes; the gradient is a cast.

    Cost: n elements of a bytes are read and n of b bytes are written; the gradient moves as many bytes.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.cast(jnp.array([1.0, 2.5, -300.0]), jnp.int8).tolist()
    [1, 2, -128]
    """
    validate.check_array("cast", "x", "an array or a number", x)
    return _cast(x, dtype=validate.dtype_of("cast", "dtype", dtype))


@functools.partial(jax.jit, static_argnames=("dtype",), inline=True)
def _cast(x, *, dtype):
    for argument, t in (("x", x.dtype), ("dtype", dtype)):
        if not any(jnp.issubdtype(t, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
            raise TypeError(f"jaxkern.cast: {argument} must be of a real type, got {t}")
    return x if x.dtype == dtype else bind(cast_p, x, dtype=dtype)


if typing.TYPE_CHECKING:  # the functions of the table's rows

    def __getattr__(name: str) -> Callable[..., jax.Array]: ...


NAMES = tuple(sorted({row.part_of or row.name for row in ROWS.values()} | {"cast"}))
__all__ = list(NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
