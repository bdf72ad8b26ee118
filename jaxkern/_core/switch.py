"""The setting that `jaxkern.accelerate` changes. It is part of the keys with which JAX caches traces and programs.

Each thread has its own value; `install` sets the value that threads begin with. If it is None, programs run as they are. A
lowering rule that emits jnp code marks it with `own_code`, so that no rule for user code takes that code again. A program may
forbid implicit promotion of dtypes or ranks; jaxkern's own code runs under `promotion`.
"""

import contextlib
import functools
import threading
import typing

import jax

from jaxkern._core import compat, compat_lowering, registry

SCATTERS = ("scatter_add", "scatter_max", "scatter_min")
CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
# The operations, and what each is in a program. docs/accelerate.md shows this, and a test runs everything that it names.
TAKEN = {
    "scatter_add": "scatters of rows: `x.at[ids].add`, `jax.ops.segment_sum`, jraph's models; the gradients of `x[ids]`, "
    "`jnp.take` and `flax.linen.Embed`",
    "scatter_max": "`x.at[ids].max`, `jax.ops.segment_max`",
    "scatter_min": "`x.at[ids].min`, `jax.ops.segment_min`",
    "logsumexp": "`jax.nn.logsumexp`, `jax.scipy.special.logsumexp`",
    "softmax": "the gradient of `jax.nn.softmax`",
    "dot_product_attention": "the softmax in `jax.nn.dot_product_attention`, in 16 bits, with its masks",
    "log_softmax": "the gradient of `jax.nn.log_softmax` in 16 bits",
    "softmax_cross_entropy": "`optax.softmax_cross_entropy_with_integer_labels`, loss and gradient",
    "scan": "loops that are elementwise over lanes: `jax.lax.scan`, `jax.lax.fori_loop`, `jax.lax.map`, `jax.lax.while_loop` to a "
    "known count; their gradients",
    "associative_scan": "`jax.lax.associative_scan` of a function that is elementwise over lanes",
    "cumsum": "`jnp.cumsum`, `jax.lax.cumsum`",
    "cumprod": "`jnp.cumprod`, `jax.lax.cumprod`",
    "cummax": "`jax.lax.cummax`",
    "cummin": "`jax.lax.cummin`",
    "cumlogsumexp": "`jax.lax.cumlogsumexp`",
    "rows": "what a program computes with rows by `jnp.mean`, `jnp.sum` and `jnp.max`: norms, masked softmax, losses, and their "
    "gradients",
    "top_k": "`jax.lax.top_k`, `jax.lax.approx_max_k`, `jax.lax.approx_min_k`",
    "sort": "`jnp.sort`, `jnp.argsort`, `jax.lax.sort` by one key; a selection where only some elements at an end are used, as in "
    "`jnp.median` and `jnp.percentile`",
    "searchsorted": "`jnp.searchsorted` and `jnp.digitize`, in one array",
    "bincount": "scatter-adds of one number: `jnp.bincount`, `jnp.histogram`",
    "ragged_dot": "`jax.lax.ragged_dot`, and the gradient of its rows",
    "while_loop": "while loops in which each lane stops on its own: under `jax.vmap`, or with `jnp.any` over lanes as condition",
}
OPERATIONS = tuple(TAKEN)
# Taken only if named: less close to the original. All others are the default. The docstring of `accelerate` names it too.
ON_REQUEST = ("log_softmax",)
# Of these, what `explain` lists although it is not named.
LISTED = ("log_softmax",)
DEFAULT = tuple(name for name in OPERATIONS if name not in ON_REQUEST)
# {a former name: what to do in its place}
FORMER = {
    name: f"LayerNorm and RMSNorm of other libraries run as they are; call jaxkern.{name} in their place"
    for name in ("layer_norm", "rms_norm")
}


class Settings(typing.NamedTuple):
    """What of a program runs on jaxkern.

    operations: the names of operations.
    force: takes every case that can run, whatever its size and platform, for tests.
    export: takes operations of exported programs too.
    session: if nonzero, the number of a call of `explain` or of a checked function. No cache has its programs.
    listed: the operations that `explain` lists only, since they are taken on request.
    tune: times decide which regions of rows are taken, in place of estimates.
    deterministic: takes every sum of floating-point numbers that XLA adds in no fixed order, at whatever speed, in a fixed one.
    """

    operations: frozenset
    force: bool = False
    export: bool = False
    session: int = 0
    listed: frozenset = frozenset()
    deterministic: bool = False
    tune: bool = False


_context = jax.make_user_context(None)
_local = threading.local()

INSIDE = (
    "jaxkern.accelerate: entered inside a function that JAX traces, as under jax.jit, where it has no effect: put the block around the "
    "call of the jitted function, or the decorator above jax.jit"
)


def current() -> Settings | None:
    """The settings of this thread, or None where programs run as they are."""
    return _context.value


def using(settings: Settings | None):
    """Context manager: these settings, in this thread."""
    return _context(settings)


def set_default(settings: Settings | None) -> bool:
    """Sets the settings of every thread that has none of its own; False where this version of JAX cannot."""
    return compat.set_global(_context, settings)


def in_own_code() -> bool:
    """Whether what is being lowered is code of this library."""
    return getattr(_local, "depth", 0) > 0


def is_on(*operations) -> bool:
    """Whether one of these operations is switched on."""
    settings = current()
    return settings is not None and not settings.operations.isdisjoint(operations)


def wanted(*operations) -> bool:
    """Whether one of these operations is switched on, and what is being lowered is code of the user."""
    return is_on(*operations) and not in_own_code()


@contextlib.contextmanager
def promotion():
    """JAX's default promotion of dtypes and ranks, whatever the program sets for its own code."""
    config = jax.config
    if (config.jax_numpy_dtype_promotion, config.jax_numpy_rank_promotion) == ("standard", "allow"):
        yield  # a context of its own would not share JAX's caches of traces with the program
        return
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def own_promotion(f):
    """`f` under `promotion`."""

    @functools.wraps(f)
    def promoting(*args, **kwargs):
        with promotion():
            return f(*args, **kwargs)

    return promoting


def own_code(rule):
    """`rule`, a lowering rule, whose jnp code is code of this library."""

    @functools.wraps(rule)
    def marked(*args, **kwargs):
        _local.depth = getattr(_local, "depth", 0) + 1
        try:
            with promotion():
                return rule(*args, **kwargs)
        finally:
            _local.depth -= 1

    return marked


def no_kernels(platform) -> str:
    """Why operations of a program for this platform are left."""
    return f"programs for {platform} run as they are"


def refusal(ctx, settings) -> str:
    """Why kernels cannot run in the program that is being lowered in `ctx`; "" if they can."""
    if compat_lowering.for_export(ctx) and not (settings is not None and settings.export):
        return "exported programs run without jaxkern, unless accelerate(export=True) is used"
    if "cuda" in compat_lowering.platforms(ctx) and (reason := registry.refusal()):
        return f"no kernels here: {reason}"
    if compat.partitioned_devices(ctx) > 1 and not compat.may_partition_itself(ctx):
        return "XLA cannot be called back to partition it"
    return ""
