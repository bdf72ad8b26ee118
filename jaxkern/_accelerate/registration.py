"""Puts lowering rules in place of JAX's own, once for each primitive and platform."""

import functools
import threading

from jaxkern._core import compat, compat_lowering

_lock = threading.Lock()
_registered: set = set()


def register(prim, rule, platform: str, reads_program) -> None:
    """Makes JAX lower `prim` for a platform by rule(plain, ctx, *operands, **params), where `plain` is JAX's own rule.

    reads_program(module, equation, operands): whether the rule looks at the operations around the equation, or records what it
        decides. JAX lowers any other equation once for all that are equal, as it does without the rule.
    """
    with _lock:
        if (prim, platform) in _registered:
            return
        _registered.add((prim, platform))
        plain = compat_lowering.lowering_rule(prim, platform)
        if plain is None:
            compat.warn_once(f"jaxkern.accelerate: this version of JAX has no public rule for {prim}, which XLA runs")
            return
        compat_lowering.register_lowering_uncached_when(prim, functools.partial(rule, plain), platform, reads_program)
