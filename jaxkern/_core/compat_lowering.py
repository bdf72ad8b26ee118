"""What of JAX's lowering and of MLIR depends on the version of JAX (0.8 to 0.12): see compat.py."""

import contextlib
import functools
import sys
import typing

import jax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.interpreters import mlir


def register_uncached_lowering(prim, rule, platform) -> None:
    """Registers a lowering rule that is called for every use of `prim`, in the function that contains the use."""
    register_lowering_uncached_when(prim, rule, platform, lambda *_: True)


def attributes(operation) -> list:
    """(name, attribute) of each attribute of an MLIR operation."""
    found = operation.attributes
    return list(found.items()) if hasattr(found, "items") else [(a.name, a.attr) for a in found]


class Conditional(set):
    """A set of primitives that contains some of them only while a condition holds."""

    def __init__(self, members=()):
        super().__init__(members)
        self.conditions = {}

    def __contains__(self, prim):
        return super().__contains__(prim) or (prim in self.conditions and self.conditions[prim]())


def register_lowering_uncached_when(prim, rule, platform, condition) -> None:
    """A lowering rule that, where `condition(module, equation, operands)` holds, sees the function that the operation stands in.

    module: the context of the module. equation: the equation of a jaxpr that is being lowered. operands: its values in the module.

    Where no condition of the primitive holds, JAX caches it as before. It does so too in programs for several platforms, which
    it cannot lower uncached.
    """
    mlir.register_lowering(prim, rule, platform=platform)
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src.interpreters import mlir as internal

        if not isinstance(internal._uncacheable_primitives, Conditional):
            internal._uncacheable_primitives = Conditional(internal._uncacheable_primitives)
        of_platform = _uncached_when.setdefault(prim, {})
        of_platform.setdefault(platform, []).append(condition)

        def uncached():
            lowers = sys._getframe(2).f_locals  # of the function that looks into the set
            module = lowers["ctx"]
            if len(module.platforms) > 1:
                return False
            for conditions in of_platform.get(module.platforms[0], ()), of_platform.get(None, ()):
                for holds in conditions:
                    if holds(module, lowers["eqn"], lowers["in_nodes"]):
                        return True
            return False

        internal._uncacheable_primitives.conditions[prim] = uncached


_uncached_when: dict = {}  # {primitive: {platform: conditions under which it is lowered uncached}}


def lowering_of(prim):
    """JAX's own lowering rule of a primitive, the one for all platforms."""
    from jax._src.interpreters import mlir as internal

    found = internal._lowerings[prim]
    return getattr(found, "rule", found)


def lowering_rule(prim, platform):
    """JAX's own lowering rule of `prim` for a platform, or None where it is not found."""
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src.interpreters import mlir as internal

        entry = internal._platform_specific_lowerings[platform].get(prim) or internal._lowerings.get(prim)
        return getattr(entry, "rule", entry)
    return None


def of_module(module_context) -> dict:
    """What is noted about the module that is being lowered; it is gone when JAX has lowered the module.

    A dictionary that is keyed weakly by the module would keep it alive, since notes hold operations.
    """
    return module_context.cached_primitive_lowerings.setdefault("jaxkern", {})


def lower_shared(name, key, rule, ctx, results, *operands):
    """Lowers an operation by `rule`, a lowering rule, as a call of a function that equal operations of a module share.

    key: hashable; with the types of the operands it determines what the rule emits. results: the MLIR types of the results.

    In a program of several platforms, or of symbolic shapes, what the rule emits reads values of the function around it.
    """
    if ctx.dim_var_values:
        return list(rule(ctx, *operands))
    functions, types = of_module(ctx.module_context).setdefault("functions", {}), [x.type for x in operands]
    where = platforms(ctx), ctx.module_context.axis_context, jax.config.jax_enable_x64
    key = (key, tuple(ctx.avals_in), tuple(types), where)
    if key not in functions:
        function = func.FuncOp(name, ir.FunctionType.get(types, results), ip=ctx.module_context.ip)
        function.attributes["sym_visibility"] = ir.StringAttr.get("private")
        ctx.module_context.symbol_table.insert(function)
        block = function.add_entry_block()
        with ir.InsertionPoint(block):
            func.ReturnOp(list(rule(ctx, *block.arguments)))
        functions[key] = function.name.value  # an operation would keep the module alive
    symbol = ir.FlatSymbolRefAttr.get(functions[key])
    return list(func.CallOp(results, symbol, list(operands)).results)


def lower_inlined(rule, ctx, results, *operands, **params):
    """Lowers an operation by `rule`, which is called once for all operations of a module that are equal.

    What it emits is copied to where each operation stands, as JAX does with rules that it caches. results: the MLIR types of
    the results.
    """
    copy = _copy_of_body()
    if copy is None or ctx.dim_var_values:
        return rule(ctx, *operands, **params)
    functions = of_module(ctx.module_context).setdefault("inlined", {})
    key = (rule, tuple(ctx.avals_in), platforms(ctx), ctx.jaxpr_eqn_ctx, tuple(sorted(params.items())))
    if key not in functions:
        function = func.FuncOp("inlined", ir.FunctionType.get([x.type for x in operands], results), ip=False)
        with ir.InsertionPoint(function.add_entry_block()):
            func.ReturnOp(list(rule(ctx, *function.arguments, **params)))
        functions[key] = function
    return copy(functions[key].operation, list(operands))


@functools.cache
def _copy_of_body():
    """A function (func.func, operands) that copies its body to the insertion point; None if jaxlib lacks it."""
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src.lib import jax_mlir_ext

        copy = jax_mlir_ext.inlined_func_call
        if "block:" in (copy.__doc__ or ""):  # jax < 0.10
            return lambda function, operands: copy(function, operands, ir.InsertionPoint.current.block)
        return copy
    return None


def callee(symbols, call):
    """The function that `call`, an operation func.call, names in a table of symbols; None if it is not found."""
    with contextlib.suppress(KeyError, AttributeError, ValueError):
        return symbols[ir.FlatSymbolRefAttr(call.attributes["callee"]).value]
    return None


def passed(value):
    """What the caller passes as `value`, an argument of the function that is being lowered; None if it is not known.

    The operation that calls the function is made after the function. But the frame of Python that lowers the caller's jaxpr
    has the values that the current equation reads. A function that is called from several places is lowered for the first.
    """
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "jaxpr_subcomp":
            frames.append(frame.f_locals)
        frame = frame.f_back
    own = [k for k, f in enumerate(frames) if value in f.get("args", ())]
    if not own or own[-1] + 1 == len(frames):
        return None
    read = []
    for node in frames[own[-1] + 1].get("in_nodes", ()):
        read += node if isinstance(node, (tuple, list)) else [node]
    # Before what the equation reads, a function has arguments for dimensions, tokens and constants.
    at = len(value.owner.arguments) - ir.BlockArgument(value).arg_number
    return read[-at] if at <= len(read) and read[-at].type == value.type else None


def standing(value):
    """(the jaxpr of the function around, the number of its equation that is being lowered, the variables that are `value`).

    None if this is not known. value: an argument of the function in MLIR. None, too, if another function that is inlined here has it
    as an argument.
    """
    own, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "jaxpr_subcomp":
            scope = frame.f_locals
            if not own or value in scope.get("args", ()):
                own.append(scope)
        frame = frame.f_back
    if len(own) != 1 or value not in own[0].get("args", ()) or "eqn" not in own[0]:
        return None
    equations = own[0]["jaxpr"].eqns
    at = next((k for k, e in enumerate(equations) if e is own[0]["eqn"]), None)
    return None if at is None else (own[0]["jaxpr"], at, own[0]["env"])


def for_export(ctx) -> bool:
    return bool(getattr(ctx.module_context.lowering_parameters, "for_export", False))


class ModuleOnly(typing.NamedTuple):
    """Stands for the lowering context of an equation where only its module, and perhaps its types, are known."""

    module_context: typing.Any
    avals_in: tuple = ()
    avals_out: tuple = ()
    platforms: tuple = ()


def platforms(ctx) -> tuple:
    """The platforms that an operation is lowered for."""
    return tuple(ctx.platforms or ctx.module_context.platforms)
