"""The pass over jaxprs, which JAX lowers as it returns them: for each engine in turn."""

import functools

from jax import lax

from jaxkern._accelerate import invariant, losses, memory, rows, selections
from jaxkern._core import compat, compat_rewriting, switch

_hooked: list = []


def rewrite(module, jaxpr):
    """The jaxpr that JAX lowers in place of `jaxpr`. module: the context of the module that is being lowered."""
    if switch.current() is not None:
        memory.note(module, jaxpr)
    jaxpr = losses.rewrite(module, rows.rewrite(module, jaxpr))
    return selections.rewrite(module, invariant.rewrite(module, jaxpr))


def register() -> None:
    """Puts the pass in place. It changes nothing where nothing is switched on."""
    if not _hooked:
        _hooked.append(True)
        for prim, name in ((lax.top_k_p, "top_k"), (lax.sort_p, "sort")):  # their kernels partition themselves
            compat.needs_devices_when(prim, functools.partial(switch.is_on, name))
        if not compat_rewriting.rewrite_jaxprs(rewrite):
            compat.warn_once(
                "jaxkern.accelerate: this version of JAX lowers jaxprs elsewhere, so rows, selections and sorts stay with XLA"
            )
