"""What `jaxkern.accelerate` switches: a value that JAX keeps as a part of the keys of its caches of traces and programs.

The value is local to a thread; `install` sets the one that threads begin with. None: the program runs as it is. A lowering
rule that emits jnp code on behalf of jaxkern marks it with `own_code`, so that no rule for user code takes that again.
"""

import contextlib
import functools
import threading
import typing

from jaxkern._core import compat, registry

SCATTERS = ("scatter_add", "scatter_max", "scatter_min")
FUNCTIONS = (
    "logsumexp",
    "softmax",
    "dot_product_attention",
    "log_softmax",
    "softmax_cross_entropy",
    "layer_norm",
    "rms_norm",
)
OPERATIONS = (*SCATTERS, *FUNCTIONS)
# Taken only if named: less close to the original, or without a gain in the programs measured. All others are the default.
# The docstring of `accelerate` names them too.
ON_REQUEST = ("log_softmax", "layer_norm", "rms_norm")
DEFAULT = tuple(name for name in OPERATIONS if name not in ON_REQUEST)


class Settings(typing.NamedTuple):
    """What of a program runs on jaxkern.

    force: every case that can run, whatever its size and platform, to test with. export: exported programs too.
    session: nonzero: the number of a call of `explain`, whose programs are not found in any cache.
    """

    operations: frozenset
    force: bool = False
    export: bool = False
    session: int = 0


_context = compat.user_context(None)
_local = threading.local()


def available() -> bool:
    """Whether this version of JAX has such values."""
    return _context is not None


def current() -> Settings | None:
    """The settings of this thread, or None where programs run as they are."""
    return _context.value if _context is not None else None


def using(settings: Settings | None):
    """Context manager: these settings, in this thread."""
    return _context(settings) if _context is not None else contextlib.nullcontext()


def set_default(settings: Settings | None) -> bool:
    """Sets the settings of every thread that has none of its own; False where this version of JAX cannot."""
    return _context is not None and compat.set_global(_context, settings)


def in_own_code() -> bool:
    """Whether what is being lowered is code of this library."""
    return getattr(_local, "depth", 0) > 0


def own_code(rule):
    """`rule`, a lowering rule, whose jnp code is code of this library."""

    @functools.wraps(rule)
    def marked(*args, **kwargs):
        _local.depth = getattr(_local, "depth", 0) + 1
        try:
            return rule(*args, **kwargs)
        finally:
            _local.depth -= 1

    return marked


def refusal(ctx, settings) -> str:
    """Why kernels cannot run in the program that is being lowered in `ctx`; "" if they can."""
    if compat.for_export(ctx) and not (settings is not None and settings.export):
        return "exported programs run without jaxkern, but for accelerate(export=True)"
    if "cuda" in compat.platforms(ctx) and not registry.kernels_run():
        return "no kernels here: see python -m jaxkern"
    if compat.partitioned_devices(ctx) > 1 and not compat.may_partition_itself(ctx):
        return "XLA cannot be called back to partition it"
    return ""
