"""Every place where one JAX version differs from another (0.8 to 0.12), and every private name.

Nothing else in the package probes a version or imports from `jax._src`.
"""

import concurrent.futures
import contextlib
import functools
import os
import pathlib
import re
import warnings

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.interpreters import ad, mlir


def varying_axes(x) -> frozenset:
    """The manual mesh axes that `x` varies over, inside `shard_map`; empty elsewhere."""
    aval = jax.typeof(x)
    if hasattr(aval, "manual_axis_type"):  # jax >= 0.10
        return frozenset(aval.manual_axis_type.varying)
    return frozenset(getattr(aval, "vma", ()))


def not_varying(aval):
    """The type `aval`, varying over no axes."""
    if hasattr(aval, "manual_axis_type"):  # jax >= 0.10
        return aval.update(manual_axis_type=type(aval.manual_axis_type)())
    return aval.update(vma=frozenset()) if hasattr(aval, "vma") else aval


def cast_varying(x, axes):
    """`x` marked as varying over `axes` too."""
    if hasattr(jax.lax, "pcast"):  # jax >= 0.8.3
        return jax.lax.pcast(x, tuple(axes), to="varying")
    return jax.lax.pvary(x, tuple(axes))


def enable_x64(on: bool = True):
    """Context manager: 64-bit types inside the block."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(on)
    from jax.experimental import enable_x64 as legacy

    return legacy(on)


def partitioned_devices(ctx) -> int:
    """How many devices XLA may spread the operation over that `ctx`, a lowering context, is for.

    One where each device runs its own copy: under jit on one device, or in a `shard_map` over
    every axis of the mesh.
    """
    axis_context = ctx.module_context.axis_context
    manual = getattr(axis_context, "manual_axes", None)
    if manual is not None:
        mesh = axis_context.mesh
        return 1 if set(manual) == set(mesh.axis_names) else mesh.size
    return getattr(axis_context, "num_devices", None) or 1


@functools.cache
def _primitives_that_need_devices():
    """The set of primitives that JAX names the devices to while they are lowered, or None where it is gone."""
    if os.environ.get("JAXKERN_PARTITION") == "batch":  # asked for: JAX refuses such primitives in some programs
        return None
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import dispatch
        from jax.experimental import custom_partitioning  # noqa: F401

        return dispatch.prim_requires_devices_during_lowering
    warnings.warn(
        "jaxkern: this version of JAX does not let operations partition themselves. Arrays that are split "
        "along the axis of an operation will be gathered.",
        stacklevel=2,
    )
    return None


def needs_devices(prim) -> None:
    """Lets the lowering of `prim` know the devices, without which it cannot partition itself."""
    primitives = _primitives_that_need_devices()
    if primitives is not None:
        primitives.add(prim)


def may_partition_itself(ctx) -> bool:
    """Whether `ctx`, a lowering context, is one in which XLA calls back to partition an operation."""
    # JAX 0.9 and 0.10 are called back in another thread, where 64-bit types that a context allows are unknown.
    elsewhere = (0, 9) <= jax.__version_info__ < (0, 11)
    wide = any(a.dtype.itemsize == 8 and a.dtype != jnp.complex64 for a in (*ctx.avals_in, *ctx.avals_out))
    if elsewhere and wide and not _in_a_thread(lambda: jax.config.jax_enable_x64):
        return False
    devices = getattr(ctx.module_context.axis_context, "device_assignment", None) or ()
    exported = getattr(ctx.module_context.lowering_parameters, "for_export", False)
    return len(devices) > 1 and not exported and shardy() and _primitives_that_need_devices() is not None


def _in_a_thread(f):
    """What `f` returns where none of this thread's contexts are."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(f).result()


def partitioned_by(f, partition, rule, summed):
    """`f`, which XLA partitions by `partition` after spreading shardings by `rule`."""
    from jax.experimental.custom_partitioning import custom_partitioning

    f = custom_partitioning(f)
    f.def_partition(partition, sharding_rule=rule, reduction_factors=summed, decode_shardings=False)
    return f


def merges_split_dimensions() -> bool:
    """Whether a reshape merges several dimensions that are split on a mesh with explicit axes."""
    return jax.__version_info__ >= (0, 10)


def shardy() -> bool:
    """Whether shardings go through Shardy (all of 0.9 and later) or the older GSPMD propagation."""
    return bool(getattr(jax.config, "jax_use_shardy_partitioner", True))


def register_uncached_lowering(prim, rule, platform) -> None:
    """A lowering rule that is called for every use of `prim`, in the function that the use stands in."""
    try:
        mlir.register_lowering(prim, rule, platform=platform, cacheable=False)
    except TypeError:  # before there was a cache
        mlir.register_lowering(prim, rule, platform=platform)


def moves_operations() -> bool:
    """Whether an operation of a program that is being lowered knows its place and can be moved."""
    return all(hasattr(ir.Operation, name) for name in ("block", "is_before_in_block", "move_before"))


def zero_tangent(y):
    """The symbolic zero that is the tangent of `y`."""
    if hasattr(ad.Zero, "from_primal_value"):  # jax < 0.10
        return ad.Zero.from_primal_value(y)
    aval = jax.typeof(y)
    return ad.Zero(aval.to_tangent_aval())


def check_nans(prim) -> None:
    """Lets `jax.experimental.checkify` report NaN that `prim` makes; elsewhere nothing changes."""
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import checkify

        checkify.error_checks[prim] = functools.partial(checkify.nan_error_check, prim)


def taylor_rule(prim, reference) -> None:
    """Lets `jax.experimental.jet` through `prim`, by the series of its reference; elsewhere nothing changes."""

    def rule(primals, series, **params):
        at = [k for k, x in enumerate(primals) if jnp.issubdtype(x.dtype, jnp.inexact)]
        if not at:  # integers alone, whose terms say nothing
            return reference(*primals, **params), jet.zero_series

        def f(*xs):  # of what has a series, which a mask has not
            operands = list(primals)
            for k, x in zip(at, xs):
                operands[k] = x
            return reference(*operands, **params)

        # Inside a rule the terms are not scaled by factorials.
        return jet.jet(f, [primals[k] for k in at], [series[k] for k in at], factorial_scaled=False)

    with contextlib.suppress(ImportError, AttributeError):
        from jax.experimental import jet

        jet.jet_rules[prim] = rule


@functools.cache
def ffi_api_version() -> tuple[int, int] | None:
    """The XLA FFI version (major, minor) that the running jaxlib implements, read from its header."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    with contextlib.suppress(OSError):
        text = header.read_text()
        found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
        if all(found):
            return int(found[0][1]), int(found[1][1])
    return None


def bind_equation(equation, *operands) -> list:
    """The results of an equation of a jaxpr on these operands, with the derivatives that it carries."""
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ((), params)  # jax < 0.10 has both
    axes = [varying_axes(x) for x in operands]  # inside shard_map literals vary over none
    union = frozenset().union(*axes)
    operands = [cast_varying(x, union - own) if union - own else x for x, own in zip(operands, axes)]
    with _made_at(equation):
        results = equation.primitive.bind(*functions, *operands, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def _made_at(equation):
    """Context manager: equations that are traced inside it say that the user made them where he made this one."""
    with contextlib.suppress(Exception):
        from jax._src import source_info_util

        return source_info_util.user_context(equation.source_info.traceback)
    return contextlib.nullcontext()


def source_line(equation) -> str:
    """The user's file and line that made an equation of a jaxpr; empty where JAX does not say."""
    with contextlib.suppress(Exception):
        from jax._src import source_info_util

        return source_info_util.summarize(equation.source_info)
    return ""
