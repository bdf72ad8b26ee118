"""Arguments of replaced functions: which ones have kernels, and notes of calls that are left."""

import jax

from jaxkern._accelerate import gate
from jaxkern._core import compat, decisions, stablehlo


def is_plain(x) -> bool:
    """An array of floating-point numbers of a type that has kernels, and of known shape, with elements."""
    return (
        isinstance(x, jax.Array)
        and x.dtype in gate.FLOATS
        and not jax.typeof(x).weak_type
        and x.ndim > 0
        and all(isinstance(d, int) and d > 0 for d in x.shape)
    )


def decide(operation, taken, reason, x) -> bool:
    """Notes a decision that is made while the program is traced."""
    return decisions.record(operation, taken, reason, [jax.typeof(x)], compat.current_frames, stablehlo.size(x))
