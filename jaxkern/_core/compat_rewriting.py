"""What of rewriting jaxprs, where JAX lowers them, depends on the version of JAX (0.8 to 0.12): see compat.py."""

import contextlib
import functools
import os
import pathlib

import jax
import jax.extend.core

from jaxkern._core.compat import frames

_PACKAGE = str(pathlib.Path(__file__).parents[1])


def rewrite_jaxprs(rewrite) -> bool:
    """Makes JAX lower `rewrite(module, jaxpr)` in place of each jaxpr: of a program, a called function, a branch or a loop's body.

    module: the context of the module that is being lowered. False where this version of JAX has no such place.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src.interpreters import mlir as internal

        inner = internal.jaxpr_subcomp

        @functools.wraps(inner)
        def lowered(ctx, jaxpr, *args, **kwargs):
            return inner(ctx, rewrite(ctx, jaxpr), *args, **kwargs)

        internal.jaxpr_subcomp = lowered
        return True
    return False


def is_inlinable(equation) -> bool:
    """Whether a call can be replaced by the equations of the jaxpr that it calls, without a change to the program."""
    params = equation.params
    for s in (*params.get("in_shardings", ()), *params.get("out_shardings", ())):
        if type(s).__name__ != "UnspecifiedValue":
            return False
    for layout in (*params.get("in_layouts", ()), *params.get("out_layouts", ())):
        if layout is not None:
            return False
    return not (equation.effects or params.get("differentiated"))


def inlined_equation(call, inner, operands, results):
    """The equation `inner` of the jaxpr that `call` calls, with these operands and results, in the place of the call.

    It has the line of the call if its own is not the user's.
    """
    own, outer = inner.source_info, call.source_info
    name = call.params.get("name")
    stack = outer.name_stack.extend(f"jit({name})") if name else outer.name_stack
    traceback = own.traceback
    if traceback is None or not any(map(_is_users, frames(traceback))):
        traceback = outer.traceback
    source = own.replace(name_stack=stack + own.name_stack, traceback=traceback)
    return inner.replace(invars=operands, outvars=results, source_info=source)


def _is_users(frame) -> bool:
    from jax._src import source_info_util

    return source_info_util.is_user_filename(frame[0]) and not frame[0].startswith(_PACKAGE)


def is_of_jax(jaxpr) -> bool:
    """Whether a jaxpr is a trace of a function that JAX itself defines."""
    where = getattr(getattr(jaxpr, "debug_info", None), "func_src_info", None) or ""
    return str(pathlib.Path(jax.__file__).parent) + os.sep in where


def runs_anywhere(equation) -> bool:
    """Whether an equation has no metadata for XLA and no type of compute, such as the host's, of its own."""
    context = equation.ctx
    return context is None or not (getattr(context, "compute_type", None) or getattr(context, "xla_metadata", None))


def new_variable(aval):
    from jax._src import core

    return core.Var(aval)


def is_dropped(variable) -> bool:
    """Whether nothing reads a result of an equation."""
    return type(variable).__name__ == "DropVar"


def closed_jaxpr(equations, operands, results):
    """The ClosedJaxpr of these equations."""
    jaxpr = jax.extend.core.Jaxpr((), operands, results, equations, debug_info=_no_debug_info())
    return jax.extend.core.ClosedJaxpr(jaxpr, ())


def new_equation(like, prim, operands, results, params):
    """An equation of `prim` where the user made the equation `like`."""
    return like.replace(
        primitive=prim, invars=list(operands), outvars=list(results), params=params, effects=frozenset()
    )


def is_array(v) -> bool:
    """Whether a value is a variable, and an array of numbers: no key of a random generator, for example."""
    dtype = getattr(v.aval, "dtype", None)
    is_variable = not isinstance(v, jax.extend.core.Literal)
    return is_variable and dtype is not None and not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def barrier(like, operands):
    """(an optimization barrier behind `operands`, its results), where the user made the equation `like`."""
    operands = list(operands)
    results = [new_variable(v.aval) for v in operands]
    return new_equation(like, _barrier_primitive(), operands, results, {}), results


@functools.cache
def _barrier_primitive():
    return jax.make_jaxpr(jax.lax.optimization_barrier)(0.0).eqns[0].primitive


def with_constants(scan, body, arguments, operands):
    """An equation of a scan with more constants. body: a jaxpr that reads them as `arguments`. operands: their values."""
    params, more = dict(scan.params), len(operands)
    body = body.replace(invars=[*arguments, *body.invars], debug_info=_no_debug_info())
    closed = params["jaxpr"]
    params["jaxpr"] = jax.extend.core.ClosedJaxpr(body, ()) if hasattr(closed, "jaxpr") else body
    if "num_consts" in params:  # jax < 0.11
        params["num_consts"] += more
        if "linear" in params:
            params["linear"] = (False,) * more + tuple(params["linear"])
    else:
        from jax._src import flattree

        consts, carry, xs = params["ft_in"].unpack()
        params["ft_in"] = flattree.pack(((flattree.nones(more), consts), carry, xs))
    return scan.replace(invars=[*operands, *scan.invars], params=params)


@functools.cache
def _no_debug_info():
    return jax.make_jaxpr(lambda: ())().jaxpr.debug_info._replace(arg_names=None, result_paths=None)
