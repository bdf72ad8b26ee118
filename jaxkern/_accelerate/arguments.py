"""Calls of replaced functions: arguments that have kernels, the gate's answer, and the record of it."""

import jax

from jaxkern._accelerate import gate
from jaxkern._core import compat, decisions, stablehlo, switch


def is_plain(x) -> bool:
    """An array of floating-point numbers of a type that has kernels, and of known shape, with elements."""
    return (
        isinstance(x, jax.Array)
        and x.dtype in gate.FLOATS
        and not jax.typeof(x).weak_type
        and x.ndim > 0
        and all(isinstance(d, int) and d > 0 for d in x.shape)
    )


def gated(rule, *problem) -> tuple[bool, str]:
    """What `rule` of the gate says of a problem, (taken, why); where everything is forced, it is taken."""
    settings = switch.current()
    return (True, "forced") if settings and settings.force else rule(*problem)


def decide(operation, taken, reason, x) -> bool:
    """Notes a decision that is made while the program is traced."""
    return decisions.record(operation, taken, reason, [jax.typeof(x)], compat.current_frames, stablehlo.size(x))
