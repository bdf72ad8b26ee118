"""LayerNorm and RMSNorm of flax.linen, flax.nnx, equinox and haiku.

flax: a layer calls `_compute_stats`, and passes the mean and the variance to `_normalize`. The replaced `_compute_stats` is
the original, and remembers what the results were computed from. If the replaced `_normalize` is given these very results,
the same x and the same axes, it normalises x with a kernel, and XLA removes the statistics, which nothing else uses. Calls
of other layers (BatchNorm, GroupNorm, InstanceNorm) differ in x or in the axes, and run the original.

equinox: `__call__` is replaced. A layer sees one example, mostly under `jax.vmap`, so that sizes are known only where the
program is lowered; a small norm is left to XLA there.

haiku: `__call__` is replaced, for rows along the last axis with parameters of a row. Plain layers round to the type of x after
each operation.

Results differ from the layers' by rounding. The variance is the mean of squared deviations in float32 or wider, where flax
has mean(x^2) - mean(x)^2 by default, whose relative error is larger by a factor of mean^2 / variance.
"""

import functools
import inspect
import math
import threading
import typing
import weakref

import jax
import jax.numpy as jnp

from jaxkern._accelerate import gate, norm_derivatives, norm_primitives, split_norms
from jaxkern._accelerate.arguments import decide, is_plain
from jaxkern._core import compat, decisions, stablehlo, switch
from jaxkern._core.algorithms import forced
from jaxkern._core.primitive import bind
from jaxkern._definitions.operation import column, flat, restored
from jaxkern._definitions.traced import computing, vectors

NAMES = ("layer_norm", "rms_norm")


def _left(prim, ctx, operands, params) -> bool:
    """Whether a norm of a program is left to XLA; notes the decision."""
    del operands
    settings, x = switch.current(), ctx.avals_in[0]
    why, reason = switch.refusal(ctx, settings), "forced"
    if not why and not (settings and settings.force):
        if not all(isinstance(d, int) for d in x.shape):
            why = "its shape is symbolic"
        else:
            taken, reason = gate.norm(x.dtype, math.prod(x.shape[:-1]), x.shape[-1])
            why = "" if taken else reason
    if not why and "sums" in params:
        reason = f"{reason}, the gradient"
    frames = functools.partial(compat.frames, ctx.traceback)
    size = sum(stablehlo.size(a) for a in (*ctx.avals_in, *ctx.avals_out)) if not why else 0
    return not decisions.record(params["operation"], not why, why or reason, [x], frames, size)


PRIMITIVES = {name: norm_primitives.variant(name, "plain", _left) for name in NAMES}
for _primitives in PRIMITIVES.values():
    norm_derivatives.define(_primitives)
# By (operation, whether the variance is mean(x^2) - mean(x)^2 in the plain layer).
SPLIT = {
    (name, fast): split_norms.variant(name, fast, PRIMITIVES[name], _left) for name in NAMES for fast in (False, True)
}


@switch.own_promotion
def _normalized(operation, x, scale, bias, axes, eps, dtype, fast=False):
    """The norm of x along its last axes; scale and bias have their shape, or are None.

    fast: the plain layer has the variance as mean(x^2) - mean(x)^2.
    """
    # Where there is one device, rows are split over none.
    primitives = PRIMITIVES[operation] if jax.device_count() == 1 else SPLIT[operation, fast]
    count, row = len(axes), tuple(x.shape[a] for a in axes)
    columns = {k: column(operation, k, x, row, a) for k, a in (("scale", scale), ("bias", bias)) if a is not None}
    columns = {k: a.reshape(math.prod(row)) for k, a in vectors(row, computing(x.dtype), columns).items()}
    params = {"operation": operation, "extras": " ".join(columns), "eps": float(eps), "dtype": jnp.dtype(dtype)}
    order = list(range(x.ndim))
    (y,) = bind(primitives.forward, flat(x, order, count), *columns.values(), algorithm=forced(operation), **params)
    return restored(y, x, order, count)


def _is_asked(operation) -> bool:
    return operation in switch.current().operations


def _is_strict() -> bool:
    """Whether arithmetic with several types raises an error, in a layer that converts nothing itself."""
    return jax.config.jax_numpy_dtype_promotion == "strict"


@switch.own_promotion
def _widens(dtype, wide) -> bool:
    """Whether arithmetic of the two types is in the type `wide`."""
    return jnp.promote_types(dtype, wide) == wide


def _is_eps(eps) -> bool:
    return type(eps) in (int, float) and 0 <= eps < math.inf


def _are_parameters(x, *parameters) -> bool:
    """Whether arithmetic with these, where they are not None, is in the type in which rows of x are normalised.

    Under strict promotion they must have the type of x.
    """
    given = [p for p in parameters if p is not None]
    if _is_strict() and any(p.dtype != x.dtype for p in given):
        return False
    wide = computing(x.dtype)
    return all(is_plain(p) and _widens(p.dtype, wide) for p in given)


# ---- flax


class _Statistics(typing.NamedTuple):
    """What `_compute_stats` was called with last in this thread. x, mean, var: weak references."""

    x: weakref.ref
    mean: weakref.ref
    var: weakref.ref
    axes: tuple
    centred: bool
    fast: bool  # the variance is mean(x^2) - mean(x)^2
    why: str  # why kernels do not compute the same


_local = threading.local()


@functools.lru_cache(maxsize=64)
def _names(function) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _arguments(original, arguments, named) -> dict:
    return dict(zip(_names(original), arguments)) | named


def _trailing(axes, rank):
    """These axes, sorted, if they are the last ones; or None."""
    try:
        axes = tuple(axes) if not isinstance(axes, int) else (axes,)
    except TypeError:
        return None
    if not axes or not all(type(a) is int and -rank <= a < rank for a in axes):
        return None
    axes = tuple(sorted({a % rank for a in axes}))
    return axes if axes == tuple(range(rank - len(axes), rank)) else None


def _why_not(x, a) -> str:
    """Why kernels do not compute the statistics of a call of `_compute_stats` with arguments `a`."""
    if a.get("mask") is not None:
        return "statistics of some elements (mask)"
    if a["axis_name"] is not None:
        return "statistics over several devices (axis_name)"
    if a.get("force_float32_reductions", True) is not True:
        return "statistics in the type of x (force_float32_reductions)"
    try:
        dtype = x.dtype if a["dtype"] is None else jnp.dtype(a["dtype"])
        wide = jax.dtypes.canonicalize_dtype(jnp.promote_types(dtype, jnp.float32))
    except TypeError:
        return "dtype"
    if _is_strict() and wide != x.dtype:
        return f"strict promotion: x is {x.dtype}, its statistics are {wide}"
    return "" if wide == computing(x.dtype) else f"statistics in {wide}"


def statistics(original, *arguments, **named):
    """Runs `_compute_stats` of flax, and remembers the call."""
    mean, var = results = original(*arguments, **named)
    _local.last = None
    a = _arguments(original, arguments, named)
    x, centred = a["x"], a["use_mean"]
    if is_plain(x) and isinstance(centred, bool) and (axes := _trailing(a["axes"], x.ndim)):
        _local.last = _Statistics(
            *map(weakref.ref, (x, mean, var)), axes, centred, a["use_fast_variance"] is True, _why_not(x, a)
        )
    return results


def _layer(a):
    """(operation, axes, fast) that a call of `_normalize` with arguments `a` is to run as; None for the original."""
    last, x = getattr(_local, "last", None), a["x"]
    if last is None or last.x() is not x or last.mean() is not a["mean"] or last.var() is not a["var"]:
        return None
    if any(_trailing(a[k], x.ndim) != last.axes for k in ("reduction_axes", "feature_axes")):
        return None
    operation = "layer_norm" if last.centred else "rms_norm"
    if not _is_asked(operation) or not _is_eps(a["epsilon"]) or (a["dtype"] is not None and not _is_float(a["dtype"])):
        return None
    width = math.prod(x.shape[d] for d in last.axes)
    taken, reason = (False, last.why) if last.why else (True, "forced")
    if taken and not switch.current().force:
        taken, reason = gate.norm(x.dtype, x.size // width, width)
    if not taken:
        decide(operation, False, reason, x)
        return None
    return operation, last.axes, last.fast


def _is_float(dtype) -> bool:
    try:
        return jax.dtypes.canonicalize_dtype(jnp.dtype(dtype)) in gate.FLOATS
    except TypeError:
        return False


def _flax_norm(operation, axes, fast, a, scale, bias):
    """The result of `_normalize`, or None if parameters are not such that kernels keep it."""
    x = a["x"]
    row = tuple(x.shape[d] for d in axes)
    given = [p for p in (scale, bias) if p is not None]
    if not _are_parameters(x, *given) or any(p.size != math.prod(row) for p in given):
        return None
    dtype = jnp.result_type(x, *given) if a["dtype"] is None else jax.dtypes.canonicalize_dtype(jnp.dtype(a["dtype"]))
    scale, bias = (None if p is None else p.reshape(row) for p in (scale, bias))
    return _normalized(operation, x, scale, bias, axes, a["epsilon"], dtype, fast)


class _Made:
    """A linen module whose parameters were made already."""

    def __init__(self, module, parameters):
        self._module, self._parameters = module, parameters

    def param(self, name, *_, **__):
        return self._parameters[name]

    def __getattr__(self, name):
        return getattr(self._module, name)


def linen(original, *arguments, **named):
    """`_normalize` of flax.linen, which makes the parameters."""
    a = _arguments(original, arguments, named)
    found = _layer(a) if a.get("force_float32_reductions", True) is True else None
    if found is None:
        return NotImplemented
    _, axes, _ = found
    module, shape = a["mdl"], [a["x"].shape[d] for d in axes]
    made = {}
    for name in ("scale", "bias"):
        if a[f"use_{name}"]:
            made[name] = module.param(name, a[f"{name}_init"], shape, a["param_dtype"])
    y = _flax_norm(*found, a, made.get("scale"), made.get("bias"))
    if y is None:  # A module makes a parameter once.
        return original(**(a | {"mdl": _Made(module, made)}))
    return y


def nnx(original, *arguments, **named):
    """`_normalize` of flax.nnx."""
    a = _arguments(original, arguments, named)
    found = _layer(a)
    y = None if found is None else _flax_norm(*found, a, a["scale"], a["bias"])
    return NotImplemented if y is None else y


# ---- equinox


def equinox(operation, original, layer, x, state, **named):
    """`LayerNorm.__call__` and `RMSNorm.__call__`, which normalise the whole of x."""
    del named  # the key has no effect
    if not _is_asked(operation) or not is_plain(x):
        return NotImplemented
    try:
        weight = layer.weight if layer.use_weight else None
        bias = layer.bias if layer.use_bias else None
        shape, eps = layer.shape, layer.eps
    except AttributeError:  # another version
        return NotImplemented
    parameters = [p for p in (weight, bias) if p is not None]
    if (layer.use_weight and weight is None) or (layer.use_bias and bias is None) or not _is_eps(eps):
        return NotImplemented
    if x.shape != shape or not all(is_plain(p) and p.shape == shape for p in parameters):
        return NotImplemented
    wide = computing(x.dtype)
    weight, bias = (p.astype(wide) if p is not None and not _widens(p.dtype, wide) else p for p in (weight, bias))
    y = _normalized(operation, x, weight, bias, tuple(range(x.ndim)), eps, x.dtype)
    default = inspect.signature(original).parameters["state"].default
    return y if state is default else (y, state)


# ---- haiku


def haiku(operation, original, layer, inputs, scale=None, offset=None):
    """`LayerNorm.__call__` and `RMSNorm.__call__`, which make the parameters."""
    make = getattr(original.__globals__.get("hk"), "get_parameter", None)
    if make is None or not _is_asked(operation) or not is_plain(inputs) or scale is not None or offset is not None:
        return NotImplemented
    try:
        axes, of_parameters = (
            tuple(range(inputs.ndim)[a]) if isinstance(a, slice) else _trailing(a, inputs.ndim)
            for a in (layer.axis, layer.param_axis)
        )
        inits = {"scale": layer.scale_init if layer.create_scale else None}
        if operation == "layer_norm":
            inits["offset"] = layer.offset_init if layer.create_offset else None
        eps, fast = layer.eps, bool(getattr(layer, "use_fast_variance", False))
    except AttributeError:  # another version
        return NotImplemented
    row, width = (inputs.ndim - 1,), inputs.shape[-1]
    if axes != row or of_parameters != row or not _is_eps(eps):
        return NotImplemented
    taken, reason = (True, "forced")
    if not switch.current().force:
        taken, reason = gate.norm(inputs.dtype, inputs.size // width, width)
    if not taken:
        decide(operation, False, reason, inputs)
        return NotImplemented
    # haiku makes a parameter once, so that the original finds those that are made here.
    made = {k: make(k, (width,), inputs.dtype, init=f) for k, f in inits.items() if f is not None}
    if not _are_parameters(inputs, *made.values()) or any(p.shape != (width,) for p in made.values()):
        return NotImplemented
    dtype = jnp.result_type(inputs, *made.values())
    return _normalized(operation, inputs, made.get("scale"), made.get("offset"), row, eps, dtype, fast)


# ---- what is replaced

_STATISTICS = "x axes dtype axis_name axis_index_groups use_mean use_fast_variance"
_COMMON = "x mean var reduction_axes feature_axes dtype epsilon"
_FLAX_OPTIONS = "mask force_float32_reductions"

# The fields of `functions.Target`. `_compute_stats` is a part of a norm.
REPLACED = (
    (NAMES, "flax.linen.normalization", "_compute_stats", statistics, _STATISTICS, _FLAX_OPTIONS, False),
    (
        NAMES,
        "flax.linen.normalization",
        "_normalize",
        linen,
        f"{_COMMON} mdl param_dtype use_bias use_scale bias_init scale_init",
        "force_float32_reductions",
    ),
    (NAMES, "flax.nnx.nn.normalization", "_compute_stats", statistics, _STATISTICS, _FLAX_OPTIONS, False),
    (NAMES, "flax.nnx.nn.normalization", "_normalize", nnx, f"{_COMMON} scale bias", ""),
    (
        ("layer_norm",),
        "equinox.nn._normalisation",
        "LayerNorm.__call__",
        functools.partial(equinox, "layer_norm"),
        "self x state key",
        "",
    ),
    (
        ("rms_norm",),
        "equinox.nn._normalisation",
        "RMSNorm.__call__",
        functools.partial(equinox, "rms_norm"),
        "self x state key",
        "",
    ),
    (
        ("layer_norm",),
        "haiku._src.layer_norm",
        "LayerNorm.__call__",
        functools.partial(haiku, "layer_norm"),
        "self inputs scale offset",
        "",
    ),
    (("rms_norm",), "haiku._src.rms_norm", "RMSNorm.__call__", functools.partial(haiku, "rms_norm"), "self inputs", ""),
)
