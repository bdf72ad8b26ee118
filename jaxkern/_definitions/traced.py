"""Definitions as row functions: traced for arrays whose rows are their last dimension, with what `operation` adds to them."""

import contextlib
import functools
import threading

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jaxkern._core import memo, switch
from jaxkern._core.dtypes import computing
from jaxkern._engines.rows.function import Roles, trace
from jaxkern._engines.rows.primitive import apply

TRACES = 1024  # row functions that are kept


def vectors(shape, wide, columns) -> dict:
    """Columns as hand-written kernels take them: of this shape, and of one type, their own or `wide`."""
    dtypes = {a.dtype for a in columns.values()}
    same = len(dtypes) <= 1 and dtypes <= {jnp.dtype(d) for d in (jnp.float16, jnp.bfloat16, jnp.float32, wide)}
    return {k: jnp.broadcast_to(a if same else a.astype(wide), shape) for k, a in columns.items()}


def of_rows(operation, operands, args, keeps_x=False, **given) -> list:
    """The results for arrays whose rows are their last dimension. operands: arrays by name. args: the arguments of the epilogue.

    keeps_x: x is the second result.
    """
    arrays = [*operands.values(), *args]
    of = functools.partial(traced, operation, **given)
    types = tuple((a.shape, a.dtype) for a in arrays)
    function = of(tuple(operands), types, keeps_x=keeps_x)
    if "residual" not in operands:
        return apply(function, arrays)
    # Derivatives start from the rounded sum.
    rest = tuple(k for k in operands if k != "residual")
    return _from_sum(function, of(rest, (types[0], *types[2:]), keeps_x=True), arrays)


def _from_sum(function, of_sum, operands) -> list:
    """`function` of (x, residual, ...), whose results are y and the sum, with the derivatives of `of_sum` of (sum, ...)."""

    @jax.custom_jvp
    def call(*operands):
        return tuple(apply(function, operands))

    def jvp(primals, tangents):
        y, total = call(*primals)
        x, residual = (None if isinstance(t, SymbolicZero) else t for t in tangents[:2])
        of_total = x + residual if x is not None and residual is not None else residual if x is None else x
        given = [SymbolicZero(jax.typeof(total)) if of_total is None else of_total, *tangents[2:]]
        active = [k for k, t in enumerate(given) if not isinstance(t, SymbolicZero)]
        if not active:
            return (y, total), (jnp.zeros_like(y), jnp.zeros_like(total))
        found = apply(of_sum.jvp(active), [total, *primals[2:], *(given[k] for k in active)])
        return (y, total), tuple(found)

    call.defjvp(jvp, symbolic_zeros=True)
    return list(call(*operands))


def row_function(
    name,
    definition,
    arrays,
    algorithm="auto",
    *,
    row=-1,
    tangent=None,
    tangent_dtype=None,
    replaces=False,
    roles=None,
    **static,
):
    """The RowFunction of an operation `name`, for arrays of these types.

    definition(*arrays, **static): an array or several. Functions are compared by identity; static can be hashed.
    row: the dimension that rows lie along, counted from the last, so negative.
    tangent: None, or how it is differentiated: tangent(*results, *arrays, *tangents of the arrays at `wrt`, wrt=wrt, **static) returns
        the tangents of the results. tangent_dtype: the type of the first array's tangent, if it is not the array's.
    roles: None, or (names of the arrays, names of the results), for hand-written kernels; `static` are their facts.
    """
    types = tuple((a.shape, a.dtype) for a in arrays)
    how = (algorithm, row, replaces)
    return _function(name, definition, (tangent, tangent_dtype), roles, types, tuple(static.items()), how)


@memo.remembered(TRACES)
def _function(name, definition, differentiated, roles, types, static, how, runner="kernels"):
    f = switch.own_promotion(functools.partial(definition, **dict(static)))
    found = _traced(name, f, types, *how, runner=runner)
    found.variant = lambda runner: _function(name, definition, differentiated, roles, types, static, how, runner)
    tangent, dtype = differentiated
    if roles is not None:
        found.roles = Roles(*roles, static)
    if tangent is not None:
        results = tuple((a.shape, a.dtype) for a in found.results)
        of_array = ((types[0][0], dtype or types[0][1]), *types[1:])

        def of(wrt):
            given = (*results, *types, *(of_array[k] for k in wrt))
            names = roles and (
                (*roles[1], *roles[0], *(f"d {roles[0][k]}" for k in wrt)),
                tuple(f"d {y}" for y in roles[1]),
            )
            return _function(name, tangent, (None, None), names, given, (("wrt", tuple(wrt)), *static), how)

        found.tangent = of
    return found


def _traced(name, f, types, algorithm, row=-1, replaces=False, runner="kernels"):
    with _traced_for(runner):
        avals = [jax.ShapeDtypeStruct(*t) for t in types]
        found, captured, _ = trace(f, avals, row, f"jaxkern.{name}", name, algorithm, replaces)
    assert not captured
    return found


@memo.remembered(TRACES)
def traced(operation, names, types, *, numbers, dtype, function, algorithm, keeps_x=False, runner="kernels"):
    """The RowFunction of operands of these names and types.

    keeps_x: whether x is the second result. runner: see below.
    """

    def f(x, *rest):
        named, args = dict(zip(names[1:], rest)), rest[len(names) - 1 :]
        wide, own = computing(x.dtype), x.dtype
        x = x.astype(wide)  # for both results, so that their cotangents are added before they are rounded
        if "residual" in named:
            x = _rounded(x + named.pop("residual").astype(wide), own)
        given = {k: a if k in operation.masks else a.astype(wide) for k, a in named.items()}
        absent = dict.fromkeys((*operation.columns, *operation.masks))
        y = switch.own_promotion(operation.definition)(x, **(absent | given | dict(numbers)))
        if function is not None:
            (y,) = function.unrounded(y, *args)
        if y.shape != x.shape:
            raise TypeError(
                f"jaxkern.{operation.name}: the definition must return the shape of x, {x.shape}, got {y.shape}"
            )
        y = y.astype(dtype)
        return [y, x.astype(own)] if keeps_x or "residual" in names else [y]

    found = _traced(operation.name, f, types, algorithm, runner=runner)
    if runner == "kernels":
        arguments = (f"argument {k}" for k in range(len(types) - len(names)))
        results = ("y", "sum")[: len(found.results)]
        found.roles = Roles((*names, *arguments), results, (("numbers", numbers), ("function", function)))
        given = {"numbers": numbers, "dtype": dtype, "function": function, "algorithm": algorithm, "keeps_x": keeps_x}
        found.variant = lambda runner: traced(operation, names, types, runner=runner, **given)
    return found


def _rounded(x, dtype):
    """x with the precision of `dtype`. A conversion alone would not round where 16 bits are computed in float32."""
    if dtype.itemsize > 2:
        return x
    if dtype.itemsize < 2:
        return x.astype(dtype).astype(x.dtype)
    info = jnp.finfo(dtype)
    normal = lax.reduce_precision(x, info.nexp, info.nmant)  # which makes 0 of subnormal numbers
    if dtype != jnp.float16:
        return normal
    return jnp.where(
        jnp.abs(x) < float(info.tiny), (x + 0.75) - 0.75, normal
    )  # float32 numbers near 0.75 are 2^-24 apart


# ---- what definitions may ask

_local = threading.local()


def runner() -> str:
    """What runs a definition that is being traced: "kernels"; "cpu", XLA on a CPU; or "xla", XLA elsewhere."""
    return getattr(_local, "runner", "kernels")


@contextlib.contextmanager
def _traced_for(runner):
    _local.runner = runner
    try:
        yield
    finally:
        _local.runner = "kernels"
