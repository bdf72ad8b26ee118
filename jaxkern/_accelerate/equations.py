"""Kinds of equations of a jaxpr, and their variables, as the passes over programs see them."""

import math

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxkern._core import compat
from jaxkern._core.cpp import ELEMENTWISE
from jaxkern._core.define import CUDA_TYPES

REDUCING = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split())
SAME = frozenset("copy copy_p stop_gradient name pvary pcast".split())
RENAMING = frozenset("broadcast_in_dim reshape squeeze expand_dims".split())
COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
CHEAP = ELEMENTWISE | SAME | RENAMING | {"iota"}  # equations that are computed again rather than stored
# Equations that XLA fuses with those that read their results, or whose operands they make.
FUSED = (
    CHEAP
    | REDUCING
    | set("transpose slice split unstack pad gather concatenate stack tile".split())
    | set("dynamic_slice dynamic_update_slice rev random_bits".split())
)
PICKS = frozenset({"gather", "scatter-add", "scatter_add"})
DTYPES = frozenset(map(jnp.dtype, CUDA_TYPES))


def is_variable(v) -> bool:
    return not isinstance(v, Literal)


def variables(e) -> list:
    return [v for v in e.invars if is_variable(v)]


def size_of(v) -> int:
    return math.prod(v.aval.shape)


def bytes_of(v) -> int:
    shape, dtype = getattr(v.aval, "shape", None), getattr(v.aval, "dtype", None)  # tokens have neither
    if shape is None or dtype is None or set(map(type, shape)) - {int}:
        return 0
    if isinstance(dtype, np.dtype):
        return math.prod(shape) * dtype.itemsize
    return compat.size_in_bytes(v.aval)


def is_renamed(shape, out) -> bool:
    """Whether two shapes differ by dimensions of one element alone."""
    real = lambda s: [n for n in s if n != 1]
    return real(shape) == real(out)


def only_names(e) -> bool:
    """Whether an equation gives an array another shape, with the same elements in the same order: nothing is moved."""
    if e.primitive.name == "broadcast_in_dim":
        dims = e.params["broadcast_dimensions"]
        return (
            len(e.invars) == 1
            and bytes_of(e.outvars[0]) == bytes_of(e.invars[0])
            and tuple(sorted(dims)) == tuple(dims)
        )
    return e.primitive.name in ("reshape", "squeeze", "expand_dims")
