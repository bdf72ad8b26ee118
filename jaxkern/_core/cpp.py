"""C++ of jaxprs of scalars: types, literals, and the overload of each primitive in ffi/kernels/common/functions.h.

    translation = Translation(label)
    results = translation.run(jaxpr, consts, ["x0", "x1"])    expressions; the statements before them are in `statements`

Each equation becomes one statement. Values have their computing types, so that results of 16 bits are rounded explicitly.
"""

import math

import jax
import numpy as np
from jax.extend.core import Literal, Primitive

from jaxkern._core import compat
from jaxkern._core.coarse import COARSE
from jaxkern._core.define import CUDA_TYPES, FLOAT8, references
from jaxkern._core.dtypes import computing
from jaxkern._core.jaxprs import CALLS, CUSTOM, IDENTITIES, KERNEL, REDUCTIONS, called_jaxpr, in_jnp

HEADER = "common/functions.h"  # what the translated code includes


class Unsupported(TypeError):
    """A function does something that has no counterpart in a kernel."""


def check_dtype(label, dtype):
    """Raises, with an error that begins with `label`, unless kernels compute with this dtype."""
    if np.dtype(dtype).name not in CUDA_TYPES:
        raise Unsupported(f"{label}: kernels do not compute in {dtype}: compute it outside of the function")


def at(equation) -> str:
    """Where the user wrote an equation; empty if it is not known."""
    line = compat.source_line(equation) if equation is not None else ""
    return f" at {line}" if line else ""


def cpp_type(dtype) -> str:
    """The type of a value of a computing type, or of one that is stored."""
    return (CUDA_TYPES | FLOAT8 | COMPLEX_TYPES)[np.dtype(dtype).name]


def literal(value, dtype) -> str:
    dtype, kind = np.dtype(dtype), computing(dtype)
    if dtype.name == "bool":
        return "true" if value else "false"
    if dtype.kind in "iu":
        value = int(value)
        if dtype.itemsize == 8:
            text = f"{value}ull" if dtype.kind == "u" else f"{value}ll" if value > -(2**63) else f"({value + 1}ll - 1)"
        else:
            text = f"{value}u" if dtype.kind == "u" else str(value) if value > -(2**31) else f"({value + 1} - 1)"
        return f"{cpp_type(dtype)}({text})"
    value = float(np.asarray(value).astype(dtype))
    if math.isnan(value):
        return f"lax::nan<{cpp_type(kind)}>()"
    if math.isinf(value):
        return f"{'-' * (value < 0)}lax::infinity<{cpp_type(kind)}>()"
    text = value.hex() + "f" * (kind.itemsize == 4)
    return f"({text})" if text[0] == "-" else text


def _inverse(value) -> str | None:
    """1 / value as a literal, if value and it are normal numbers: XLA too multiplies by it rather than divide."""
    value = float(value)
    if not 2.0**-126 <= abs(value) <= 2.0**126:
        return None
    return literal(np.float32(1 / value), np.float32)


# What memory holds; functors take them apart by `real` and `imag`, and put them together by `complex`.
COMPLEX_TYPES = {"complex64": "Complex<float>", "complex128": "Complex<double>"}
_PARTS = ("real", "imag", "complex")

# Primitives with an overload of the same name in functions.h, or of the one given.
_OVERLOADS = {
    name: name
    for name in (
        "abs acos acosh add asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz cos cosh digamma div eq "
        "erf erf_inv erfc exp exp2 expm1 floor ge gt is_finite le lgamma log log1p log2 logistic lt max min mul ne neg "
        "nextafter one_minus_square population_count pow rem rsqrt shift_left shift_right_arithmetic "
        "shift_right_logical sign sin sinh sqrt square sub tan tanh real imag complex"
    ).split()
}
_OVERLOADS |= {name: f"{name}_" for name in ("and", "or", "xor", "not")} | {"add_any": "add"}
# quotient(x, y, 1 / (y * scale), scale), for a divisor of many; scale: scale_of_divisor(y).
quotient_p = Primitive("quotient")
quotient_p.def_abstract_eval(lambda x, y, inverse, scale: x)
# exp(x) for an x that is not above 0, with an absolute error of 2^-22.
exp_below_p = Primitive("exp_below")
exp_below_p.def_abstract_eval(lambda x: x)
_OVERLOADS |= {"exp_below": "exp_below"}
_OVERLOADS |= {"quotient": "quotient", "draw": "draw", "draw_in_pack": "draw"}  # see draws.py
_APPROXIMATE = frozenset(("exp2", "log"))  # those with an overload in namespace approximate
# Their code has branches and tables. Compiled for an H100 in a kernel of four elements per thread, 33 sines take 8 seconds, 300
# exponentials with 300 multiply-adds 2 seconds, 600 multiply-adds half a second.
_SLOW_TO_COMPILE = frozenset("bessel_i0e bessel_i1e cos digamma lgamma pow rem sin tan".split())
_LONG = 50  # their weight
# About how many instructions functions become, in float32 and in float64: counted in loops of 4 and 12 steps for an H100.
_CODE = {
    name: (int(single), int(double))
    for name, single, double in map(
        str.split,
        (
            "acos 29 137, acosh 48 168, asin 27 73, asinh 47 170, atan 24 43, atan2 44 122, atanh 42 168, "
            "bessel_i0e 126 332, bessel_i1e 132 346, cbrt 22 47, cos 31 57, cosh 21 66, digamma 145 298, "
            "div 10 24, erf 27 83, erf_inv 34 289, erfc 40 175, exp 10 42, exp2 4 44, expm1 34 81, lgamma 222 179, "
            "log 32 89, log1p 35 145, logistic 12 84, pow 84 120, rem 65 257, rsqrt 6 24, sin 29 57, sinh 29 133, "
            "sqrt 10 24, tan 32 99, tanh 19 108"
        ).split(", "),
    )
}
_TEMPLATES = {
    "integer_pow": lambda p: f"integer_pow<{p['y']}>",
    "round": lambda p: "round_to_even" if int(p["rounding_method"]) == 1 else "round_away_from_zero",
    "reduce_precision": lambda p: f"reduce_precision<{p['exponent_bits']}, {p['mantissa_bits']}>",
}

# Primitives of scalars that have a counterpart in C++.
ELEMENTWISE = frozenset(
    (*_OVERLOADS, *_TEMPLATES, "convert_element_type", "bitcast_convert_type", "select_n", "polynomial", "conj")
)


class _Statement:
    """Lines of C++ that define `names` from `uses`. weight: how long they take to compile. code: about how many instructions they become."""

    def __init__(self, names, lines, uses, weight=1, code=1):
        self.names, self.lines, self.uses, self.weight, self.code = names, lines, uses, weight, code

    def keep(self, needed):
        """Leaves out what does not define one of the names `needed`."""


class _Cond(_Statement):
    """A branch for each value of `index`, a pair of a translation and the expressions of its results.

    The lines belong to the results that were passed to `keep`.
    """

    def __init__(self, names, types, index, branches):
        super().__init__(names, [], {index})
        self.types, self.index, self.branches = types, index, branches

    def keep(self, needed):
        kept = [k for k, name in enumerate(self.names) if name in needed]
        self.lines = [f"{self.types[k]} {self.names[k]};" for k in kept]
        for n, (inner, outs) in enumerate(self.branches):
            self.uses |= inner.remove_unused([outs[k] for k in kept])
            self.weight += sum(statement.weight for statement in inner.statements)
            self.code += sum(statement.code for statement in inner.statements)
            test = f"if ({self.index} {'<=' if n == 0 else '=='} {n}) " if n + 1 < len(self.branches) else ""
            self.lines.append(f"{'} else ' if n else ''}{test}{{")
            self.lines += [f"  {line}" for statement in inner.statements for line in statement.lines]
            self.lines += [f"  {self.names[k]} = {outs[k]};" for k in kept]
        self.lines.append("}")


class Translation:
    """Statements that compute what a jaxpr does."""

    def __init__(self, label, coarse=False):
        self.label, self.coarse = label, coarse
        self.statements = []
        self._names = 0

    def remove_unused(self, outs):
        """Drops the statements that `outs` do not depend on; returns the names that they do depend on."""
        needed, kept = set(outs), []
        for statement in reversed(self.statements):
            if needed.intersection(statement.names):
                statement.keep(needed)
                needed.update(statement.uses)
                kept.append(statement)
        self.statements = kept[::-1]
        return needed

    def run(self, jaxpr, consts, args) -> list:
        """Adds the statements of a jaxpr; returns the expressions of its results."""
        env = dict(zip(jaxpr.invars, args))
        for v, c in zip(jaxpr.constvars, consts):
            if isinstance(c, jax.core.Tracer):
                raise TypeError(
                    f"{self.label}: a custom_jvp or custom_vjp rule closes over a traced scalar, {v.aval.str_short()}. "
                    "Make it an argument of the function that has the rule"
                )
            if np.ndim(c):
                raise TypeError(f"{self.label}: a constant array, {v.aval.str_short()}. Pass the array as an operand")
            env[v] = c if isinstance(c, str) else literal(np.asarray(c)[()], v.aval.dtype)
        read = lambda v: literal(v.val, v.aval.dtype) if isinstance(v, Literal) else env[v]
        for e in jaxpr.eqns:
            env.update(zip(e.outvars, self._equation(e, list(map(read, e.invars)))))
        return [read(v) for v in jaxpr.outvars]

    def _fail(self, e, what):
        raise Unsupported(
            f"{self.label} uses {compat.operation_name(e)}{at(e)}, {what}. Compute it outside and pass the result as an operand"
        )

    def _equation(self, e, operands) -> list:
        name = e.primitive.name
        for v in (*e.invars, *e.outvars):
            if getattr(v.aval, "shape", None) != ():
                self._fail(
                    e, f"with an array, {v.aval.str_short()}, and functions in kernels see one element at a time"
                )
            if v.aval.dtype.name not in CUDA_TYPES and name not in _PARTS:
                self._fail(e, f"and kernels do not compute in {v.aval.dtype}")
        if name in (*CALLS, *CUSTOM):
            return self.run(*called_jaxpr(e), operands)
        if name in ("stop_gradient", *IDENTITIES, *REDUCTIONS):
            return operands if len(operands) == len(e.outvars) else operands[-1:]
        if name == "cond":
            return self._cond(e, operands)
        if name == KERNEL:
            closed = e.params["function"].closed
            results = zip(e.outvars, self.run(closed.jaxpr, closed.consts, operands))
            return [self._define(v.aval.dtype, self._rounded(y, v.aval.dtype), [y]) for v, y in results]
        if references.get(e.primitive) is not None:
            closed = jax.make_jaxpr(lambda *xs: in_jnp(e, *xs))(
                *(jax.ShapeDtypeStruct((), v.aval.dtype) for v in e.invars)
            )
            return self.run(closed.jaxpr, closed.consts, operands)
        if name == "convert_element_type" and e.invars[0].aval.dtype == e.outvars[0].aval.dtype:
            return operands
        if name in ("empty", "empty2"):  # what the other branch of a cond keeps for its derivative
            return [literal(0, e.outvars[0].aval.dtype)]
        text = self._expression(e, name, operands)
        dtype, weight = e.outvars[0].aval.dtype, _LONG if name in _SLOW_TO_COMPILE else 1
        return [self._define(dtype, text, operands, weight, _CODE.get(name, (1, 1))[dtype == np.float64])]

    def _new(self):
        self._names += 1
        return f"t{self._names}"

    def _define(self, dtype, text, uses, weight=1, code=1):
        name = self._new()
        line = f"const {cpp_type(computing(dtype))} {name} = {text};"
        self.statements.append(_Statement([name], [line], set(uses), weight, code))
        return name

    def _expression(self, e, name, operands) -> str:
        dtypes, out = [np.dtype(v.aval.dtype) for v in e.invars], np.dtype(e.outvars[0].aval.dtype)
        if name == "dot_general" and out != np.bool_:
            name = "mul"
        if name == "convert_element_type":
            return self._convert(operands[0], dtypes[0], out)
        if name == "bitcast_convert_type":
            if computing(dtypes[0]) != dtypes[0]:
                return self._bitcast(f"lax::{dtypes[0].name}_bits({operands[0]})", np.dtype(np.uint16), out)
            return self._bitcast(operands[0], dtypes[0], out)
        if name == "select_n":
            which, *cases = operands
            if dtypes[0] == np.bool_:
                return f"{which} ? {cases[1]} : {cases[0]}" if len(cases) == 2 else cases[0]
            tests = [f"{which} == {k} ? {case} : " for k, case in enumerate(cases[:-1])]
            return "".join(tests) + cases[-1]
        if name == "polynomial":  # x, then its coefficients, starting with x^0
            x, *coefficients = operands
            text = coefficients[-1]
            for c in reversed(coefficients[:-1]):
                text = f"lax::add(lax::mul({text}, {x}), {c})"
            return self._rounded(text, out)
        if name == "div" and dtypes[1] == np.float32 and isinstance(e.invars[1], Literal):
            inverse = _inverse(e.invars[1].val)
            if inverse is not None:
                return f"lax::mul({operands[0]}, {inverse})"
        if name == "nextafter" and computing(out) != out:
            return f"lax::nextafter_{out.name}({', '.join(operands)})"
        if name in ("mul", "add", "sub") and dtypes[0] != out:
            operands = [self._convert(x, d, out) for x, d in zip(operands, dtypes)]
        if name in _TEMPLATES:
            function = _TEMPLATES[name](e.params)
        elif name in _OVERLOADS:
            function = _OVERLOADS[name]
        elif name in ("scan", "while"):
            self._fail(
                e, "a loop, which functions in kernels cannot have: write a Python loop over a fixed number of steps"
            )
        else:
            self._fail(e, "which has no counterpart in kernels")
        space = "lax"
        if out == np.float32 and self.coarse == "approximate":
            space = "approximate" if name in _APPROXIMATE else "lax"
        elif out == np.float32 and self.coarse:
            space = "coarse" if name in COARSE else "lax"
        return self._rounded(f"{space}::{function}({', '.join(operands)})", out)

    def _rounded(self, text, dtype):
        return text if computing(dtype) == dtype else f"lax::round_{dtype.name}({text})"

    def _convert(self, text, of, to):
        if of == to:
            return text
        if computing(to) != to:
            wide = of.name in ("float16", "bfloat16", "float32", "float64")
            return self._rounded(text if wide else f"lax::convert<float>({text})", to)
        return text if computing(of) == to else f"lax::convert<{cpp_type(to)}>({text})"

    def _bitcast(self, text, of, to):
        if computing(to) != to:
            return f"lax::from_{to.name}_bits(lax::bitcast_convert_type<uint16_t>({text}))"
        return text if of == to else f"lax::bitcast_convert_type<{cpp_type(to)}>({text})"

    def _cond(self, e, operands) -> list:
        index, *operands = operands
        results = [self._new() for _ in e.outvars]
        branches = []
        for branch in e.params["branches"]:
            inner = Translation(self.label, self.coarse)
            inner._names = self._names
            branches.append((inner, inner.run(branch.jaxpr, branch.consts, operands)))
            self._names = inner._names
        self.statements.append(_Cond(results, [cpp_type(computing(v.aval.dtype)) for v in e.outvars], index, branches))
        return results
