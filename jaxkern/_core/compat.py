"""Everything that depends on the version of JAX (0.8 to 0.12), and every use of a private name.

Nothing else in the package probes a version or imports from `jax._src`, except compat_lowering.py and compat_rewriting.py.
"""

import concurrent.futures
import contextlib
import functools
import inspect
import os
import pathlib
import re
import sys
import warnings

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.interpreters import ad
from jaxlib.version import __version__ as jaxlib_version

from jaxkern._core import environment
from jaxkern._core.arrays import of_some
from jaxkern._core.compat_lowering import Conditional

_PACKAGE = str(pathlib.Path(__file__).parent.parent) + os.sep


def varying_axes(x) -> frozenset:
    """The manual mesh axes that `x` varies over, inside `shard_map`; empty elsewhere."""
    aval = x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)
    if hasattr(aval, "manual_axis_type"):  # jax >= 0.10
        return frozenset(aval.manual_axis_type.varying)
    return frozenset(getattr(aval, "vma", ()))


def not_varying(aval):
    """The type `aval`, varying over no axes."""
    if hasattr(aval, "manual_axis_type"):  # jax >= 0.10
        return aval.update(manual_axis_type=type(aval.manual_axis_type)())
    return aval.update(vma=frozenset()) if hasattr(aval, "vma") else aval


def cast_varying(x, axes):
    """Marks `x` as varying over `axes` too."""
    if hasattr(jax.lax, "pcast"):  # jax >= 0.8.3
        return jax.lax.pcast(x, tuple(axes), to="varying")
    return jax.lax.pvary(x, tuple(axes))


def enable_x64(on: bool = True):
    """Context manager: 64-bit types inside the block."""
    return jax.enable_x64(on)


def partitioned_devices(ctx) -> int:
    """The number of devices that XLA may spread the operation over; ctx: its lowering context.

    It is 1 if each device runs its own copy: under jit on one device, or in a `shard_map` over all axes of the mesh.
    """
    axis_context = ctx.module_context.axis_context
    manual = getattr(axis_context, "manual_axes", None)
    if manual is not None:
        mesh = axis_context.mesh
        return 1 if set(manual) == set(mesh.axis_names) else mesh.size
    return getattr(axis_context, "num_devices", None) or 1


@functools.cache
def _primitives_that_need_devices():
    """JAX's set of primitives whose lowering rules are given the devices; None in versions without that set."""
    if environment.read("JAXKERN_PARTITION") == "batch":  # on request: JAX refuses such primitives in some programs
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
    """Makes JAX pass the devices to the lowering rule of `prim`, which needs them to partition itself."""
    primitives = _primitives_that_need_devices()
    if primitives is not None:
        primitives.add(prim)


def may_partition_itself(ctx) -> bool:
    """Whether XLA calls back to partition an operation; ctx: its lowering context."""
    # In JAX 0.9 and 0.10 the callback runs in another thread, which does not see `enable_x64` contexts of this one.
    elsewhere = (0, 9) <= jax.__version_info__ < (0, 11)
    wide = any(a.dtype.itemsize == 8 and a.dtype != jnp.complex64 for a in (*ctx.avals_in, *ctx.avals_out))
    if elsewhere and wide and not _in_a_thread(lambda: jax.config.jax_enable_x64):
        return False
    devices = getattr(ctx.module_context.axis_context, "device_assignment", None) or ()
    exported = getattr(ctx.module_context.lowering_parameters, "for_export", False)
    return len(devices) > 1 and not exported and shardy() and _primitives_that_need_devices() is not None


def _in_a_thread(f):
    """Calls `f` in a new thread, without the context managers of this thread."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(f).result()


def partitioned_by(f, partition, rule, summed):
    """Makes XLA partition `f` with `partition`, after it has propagated shardings with `rule`."""
    from jax.experimental.custom_partitioning import custom_partitioning

    f = custom_partitioning(f)
    f.def_partition(partition, sharding_rule=rule, reduction_factors=summed, decode_shardings=False)
    return f


def merges_split_dimensions() -> bool:
    """Whether a reshape may merge several dimensions that are split on a mesh with explicit axes."""
    return jax.__version_info__ >= (0, 10)


def shardy() -> bool:
    """Whether shardings are propagated by Shardy (always from 0.9) rather than GSPMD."""
    return bool(getattr(jax.config, "jax_use_shardy_partitioner", True))


def zero_tangent(y):
    """The symbolic zero that is the tangent of `y`."""
    if hasattr(ad.Zero, "from_primal_value"):  # jax < 0.10
        return ad.Zero.from_primal_value(y)
    aval = jax.typeof(y)
    return ad.Zero(aval.to_tangent_aval())


def check_nans(prim) -> None:
    """Makes `jax.experimental.checkify` report NaN in the results of `prim`."""
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import checkify

        checkify.error_checks[prim] = functools.partial(checkify.nan_error_check, prim)


def check_indices(prim, index_of) -> None:
    """Makes `jax.experimental.checkify` report indices out of range in `prim`, as it does for gathers, besides NaN.

    index_of(*operands, **params): the indices and the axis of the first operand that they are of, or None.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import checkify

        # jax >= 0.11 passes a context before the error.
        before = int("ctx" in inspect.signature(checkify.nan_error_check).parameters)

        def rule(*arguments, **params):
            context, (_, enabled_errors, *operands) = arguments[:before], arguments[before:]
            error, out = checkify.nan_error_check(prim, *arguments, **params)
            found = index_of(*operands, **params)
            if found is not None and checkify.OOBError in enabled_errors:
                index, shape = found[0].reshape(-1, 1), operands[0].shape
                outside = (index < 0) | (index >= shape[found[1]])
                payload = checkify.oob_payload(outside, index, (found[1],), shape)
                report = checkify.OOBError(checkify.get_traceback(), "gather", shape, payload)
                error = checkify.assert_func(*context, error, jnp.any(outside), report)
            return error, out

        checkify.error_checks[prim] = rule


def taylor_rule(prim, reference) -> None:
    """Gives `prim` a rule for `jax.experimental.jet`: the Taylor series of its reference."""

    def rule(primals, series, **params):
        at = [k for k, x in enumerate(primals) if jnp.issubdtype(x.dtype, jnp.inexact)]
        if not at:  # only integers, which have no series
            y = reference(*primals, **params)
            return y, [jet.zero_series] * len(y) if prim.multiple_results else jet.zero_series

        f = of_some(functools.partial(reference, **params), primals, at)  # masks have no series
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


def operation_name(equation) -> str:
    """The name of an equation's operation, as JAX prints it: newer versions have one primitive for operations with rules in Python."""
    own = equation.params.get("_prim")
    return equation.primitive.name if own is None else type(own).__name__


def source_line(equation) -> str:
    """The user's file and line that made an equation of a jaxpr, not a line of this package; empty where JAX does not say."""
    with contextlib.suppress(Exception):
        from jax._src import source_info_util

        lines = source_info_util.summarize(equation.source_info, num_frames=64).splitlines()
        return next((line for line in reversed(lines) if not line.startswith(_PACKAGE)), "")
    return ""


def without_unused(closed):
    """A closed jaxpr without the equations that its results do not depend on; it keeps all operands."""
    from jax.interpreters import partial_eval

    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return jax.extend.core.ClosedJaxpr(jaxpr, closed.consts)


def calls(jaxpr, name) -> bool:
    """Whether an equation of a jaxpr, or of one in it, has a primitive of this name."""
    inner = lambda params: (getattr(v, "jaxpr", v) for v in jax.tree.leaves(list(params.values()), is_leaf=_is_jaxpr))
    return any(
        e.primitive.name == name or any(calls(j, name) for j in inner(e.params) if hasattr(j, "eqns"))
        for e in jaxpr.eqns
    )


def _is_jaxpr(x) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def drops_results(prim, rule) -> None:
    """JAX removes results of a primitive that are not used by rule(used, equation); without such rules, they stay."""
    from jax.interpreters import partial_eval

    getattr(partial_eval, "dce_rules", {})[prim] = lambda used, *args: rule(used, args[-1])


def used_operands(closed) -> tuple:
    """The positions of the operands that the results of a closed jaxpr depend on."""
    from jax.interpreters import partial_eval

    _, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return tuple(k for k, own in enumerate(used) if own)


# ---- for jaxkern.accelerate


@functools.cache
def jaxlib() -> tuple[int, ...]:
    """The version of jaxlib, which brings XLA: its first three numbers."""
    return tuple(int(n) for n in re.findall(r"\d+", jaxlib_version)[:3])


def set_global(context, value) -> bool:
    """Sets what threads without a value of their own find in `context`; False where that is impossible."""
    for holder in (context, getattr(context, "_obj", None)):  # jax < 0.9: on the inner object alone
        if hasattr(holder, "set_global"):
            holder.set_global(value)
            return True
    return False


def needs_devices_when(prim, condition) -> None:
    """The same as `needs_devices`, but only while `condition()`, a function of a user context, holds.

    JAX's caches use the trace context as a key, and it includes the user contexts.
    """
    primitives = _primitives_that_need_devices()
    if primitives is None:
        return
    from jax._src import dispatch

    if not isinstance(primitives, Conditional):
        dispatch.prim_requires_devices_during_lowering = primitives = Conditional(primitives)
        _primitives_that_need_devices.cache_clear()
    primitives.conditions[prim] = lambda: condition() and not _lowers_without_devices()


def _lowers_without_devices() -> bool:
    """Whether the program that is being lowered has an `AbstractMesh` alone, where JAX refuses what needs devices."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "lower_sharding_computation":
            return frame.f_locals.get("device_assignment", ()) is None
        frame = frame.f_back
    return False


def is_extended(dtype) -> bool:
    """Whether a dtype is one of JAX's that numpy does not have, such as a key of jax.random."""
    return jnp.issubdtype(dtype, jax.dtypes.extended)


def is_key(dtype) -> bool:
    """Whether a dtype is a key of jax.random."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def physical(aval):
    """The type of an array as it lies in memory: a key of jax.random is an array of numbers."""
    if not is_extended(aval.dtype):
        return aval
    from jax._src import core

    found = core.physical_aval(aval)
    return jax.core.ShapedArray(found.shape, found.dtype)


def size_in_bytes(aval) -> int:
    """Bytes of an array."""
    found = physical(aval)
    return found.size * found.dtype.itemsize


@functools.cache
def scan_primitive():
    """The primitive of `jax.lax.scan`."""
    with jax.disable_jit(False):  # without jit, JAX runs a scan as a loop of Python
        return jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (c, None), x, length=2)[0])(0.0).eqns[0].primitive


@functools.cache
def ragged_dot_primitive():
    """The primitive of `jax.lax.ragged_dot`; None if this version of JAX has another one."""
    types = [jax.ShapeDtypeStruct(s, "float32") for s in ((2, 2), (1, 2, 2))] + [jax.ShapeDtypeStruct((1,), "int32")]
    # On a mesh with explicit axes, JAX asks for the sharding of the result.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        equations = jax.make_jaxpr(jax.lax.ragged_dot)(*types).eqns
    return next((e.primitive for e in equations if e.primitive.name == "ragged_dot_general"), None)


def counts_of_scan(params) -> tuple:
    """How many constants and carries a scan has."""
    if "num_consts" in params:  # jax < 0.11
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


# Modules of Pallas, and in each the context manager that is entered while the body of a kernel is traced.
KERNEL_BODIES = {"jax._src.pallas.core": "tracing_grid_env", "jax._src.pallas.mpmd": "mpmd_map_tracing_context"}


def enter_in_kernel_bodies(module, context) -> None:
    """Makes `module`, one of `KERNEL_BODIES`, enter `context()` too while it traces the body of a kernel."""
    name = KERNEL_BODIES[module.__name__]
    inner = getattr(module, name, None)
    if inner is None:  # older versions trace the bodies of all kernels by the other one
        return

    @functools.wraps(inner)
    @contextlib.contextmanager
    def entered(*args, **kwargs):
        with context(), inner(*args, **kwargs) as found:
            yield found

    setattr(module, name, entered)


def differentiates_softmax_by_parts() -> bool:
    """Whether the code that runs now stands in `with jax.softmax_custom_jvp(False)`, not outside of any such block."""
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import config

        return config.softmax_custom_jvp.get_local() is False
    return False


def frames(traceback) -> list[tuple[str, int, str]]:
    """(file, line, function) of each frame of a JAX traceback, the innermost first."""
    found = getattr(traceback, "frames", None) or ()
    return [(f.file_name, f.line_num, f.function_name) for f in found]


def current_frames() -> list[tuple[str, int, str]]:
    """The same for where Python is now."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


_INSIDE = (str(pathlib.Path(__file__).parents[1]) + os.sep, contextlib.__file__)


@functools.cache
def warn_once(message: str) -> None:
    """Warns once in a process. The warning names the innermost line outside this package and the decorators of contextlib."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def stages() -> bool:
    """Whether this thread traces a program to be compiled, as under `jax.jit`; not under `jax.grad` or `jax.vmap` alone."""
    from jax._src import core

    return not core.trace_state_clean() and isinstance(jnp.zeros(()), jax.core.Tracer)


def linear_loop(f, args):
    """f(*args), a scan that is linear in args: on jax 0.8 it has a transpose only if it is the tangent of a scan."""
    if jax.__version_info__ >= (0, 10, 2):
        return f(*args)
    return jax.jvp(f, [jnp.zeros_like(x) for x in args], list(args))[1]
