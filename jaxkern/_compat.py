"""Every place where one JAX version differs from another (0.8 to 0.12), and every private name.

Nothing else in the package probes a version or imports from `jax._src`.
"""

import contextlib
import functools
import pathlib
import re

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
