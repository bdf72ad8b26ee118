"""Cumulative operations and `lax.associative_scan` of plain JAX programs.

Cumulative operations have a lowering rule each. `lax.associative_scan` leaves slices and concatenations in a program, so the
function is replaced (functions.py).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from jaxkern._accelerate import gate, registration
from jaxkern._accelerate.arguments import decide, gated
from jaxkern._core import algorithms, compat, compat_lowering, decisions, stablehlo, switch
from jaxkern._core.define import CUDA_TYPES
from jaxkern._definitions import cumulative
from jaxkern._definitions.associative_scan import of_pytrees


def _decided(ctx, aval, axis) -> tuple[bool, str]:
    settings, platforms = switch.current(), compat_lowering.platforms(ctx)
    if not settings.force and "cuda" not in platforms:
        return False, switch.no_kernels(platforms[0])
    if not all(isinstance(n, int) and n for n in aval.shape) or aval.dtype not in gate.SCATTER_DTYPES:
        return False, f"no kernel for {aval.str_short(short_dtypes=True)}"
    length = aval.shape[axis]
    taken, why = (True, "") if settings.force else gate.cumulative(length, aval.size)
    if not taken:
        return False, why
    if compat.partitioned_devices(ctx) > 1:
        return False, "a loop on several devices"
    refusal = switch.refusal(ctx, settings)
    return not refusal, refusal or f"{length} steps of {aval.size // length} lanes in one kernel"


@switch.own_promotion
def _cumulative(name, plain, ctx, x, *, axis, reverse):
    if not switch.wanted(name) or algorithms.xla_forced():
        return plain(ctx, x, axis=axis, reverse=reverse)
    (aval,) = ctx.avals_in
    taken, why = _decided(ctx, aval, axis)
    frames = functools.partial(compat.frames, ctx.traceback)
    if not decisions.record(name, taken, why, [aval], frames, 2 * stablehlo.size(aval) if taken else 0):
        return switch.own_code(plain)(ctx, x, axis=axis, reverse=reverse)  # it may be an associative scan
    body = functools.partial(getattr(cumulative, name), axis=axis, reverse=reverse, dtype=aval.dtype)
    return switch.own_code(mlir.lower_fun(body, multiple_results=False))(ctx, x)


def associative_scan(original, fn, elems, reverse=False, axis=0):
    """The replacement of `lax.associative_scan`; see functions.py."""
    del original
    leaves = jax.tree.leaves(elems)
    known = lambda x: isinstance(x, jax.Array) and all(isinstance(n, int) and n for n in x.shape)
    if not leaves or not all(map(known, leaves)):
        return NotImplemented
    x = leaves[0]
    if not isinstance(axis, int) or not -x.ndim <= axis < x.ndim:
        return NotImplemented
    length, taken, why = x.shape[axis], False, _unlike(leaves)
    if not why:
        taken, why = gated(gate.associative, length, x.size // length)
    if taken:
        try:
            return switch.own_code(of_pytrees)(fn, elems, reverse, axis, replaced=True)
        except (TypeError, ValueError) as error:  # fn is not elementwise, or JAX raises an error of its own
            why = str(error)
    decide("associative_scan", False, why, x)
    return NotImplemented


def _unlike(leaves) -> str:
    """Why a scan of these arrays is left to XLA, whatever its length; empty if nothing speaks against it."""
    if any(jnp.iscomplexobj(x) for x in leaves):
        return "complex numbers, which were not measured: call jaxkern.associative_scan or jaxkern.linear_recurrence"
    if any(x.dtype.name not in CUDA_TYPES for x in leaves):
        return f"no kernel for {', '.join(jax.typeof(x).str_short(short_dtypes=True) for x in leaves)}"
    if any(x.shape != leaves[0].shape for x in leaves):
        return f"arrays of different shapes, {', '.join(str(x.shape) for x in leaves)}"
    return "a weak type, such as that of jnp.full(n, 0.5)" if any(jax.typeof(x).weak_type for x in leaves) else ""


def register(platform: str) -> None:
    """Puts the rules in place. They call JAX's wherever nothing is switched on."""
    for name in switch.CUMULATIVE:
        rule = functools.partial(_cumulative, name)
        # Each equation is lowered on its own, so that the record has the line of each.
        registration.register(getattr(lax, f"{name}_p"), rule, platform, lambda *_, name=name: switch.wanted(name))
