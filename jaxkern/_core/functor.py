"""User functions in kernels: from a Python function of scalars to a C++ functor.

    function, captured = trace(lambda x, s: jax.nn.silu(x) * s, [jnp.bfloat16, jnp.float32], name="elementwise_kernel")
    function.source("Scale")    the functor, for the `source` of a Launch
    function(x, s)              the same in jnp, on arrays that broadcast
    function.vjp((0,))          the derivative, a Function of (x, s, cotangent)

`trace` makes a jaxpr of the function with the user's dtypes, then one with float32 in place of 16-bit types (jaxprs.py):
kernels compute these in float32 and round where they store. Each equation becomes one statement of C++, a call of an
overload in ffi/kernels/common/functions.h. If all real numbers of the function have 16 bits, it uses the overloads in
namespace `coarse` where there are any. These are more accurate than rounding after each operation, as JAX does, but not for
inputs of discontinuous operations (see `_is_coarse`).

Two Functions are equal if they compute the same and have the same derivatives (canonical.py), so a Function can be a
parameter of a primitive: a lambda that is created in every call does not compile again.
"""

import contextlib
import functools
import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, Primitive
from jax.sharding import AbstractMesh

from jaxkern._core import canonical, compat
from jaxkern._core.define import CUDA_TYPES, FLOAT8, references
from jaxkern._core.dtypes import computing
from jaxkern._core.jaxprs import (
    CALLS,
    CUSTOM,
    IDENTITIES,
    KERNEL,
    REDUCTIONS,
    called_jaxpr,
    evaluate,
    has_narrow,
    in_jnp,
    vjp_rule,
    without_unused,
)

HEADER = "common/functions.h"  # what the source of a Function needs


class Unsupported(TypeError):
    """A function does something that has no counterpart in a kernel."""


def trace(f, dtypes, *, name, weak=None, results=None, label=None, coarse=None):
    """`f`, a function of scalars that returns a scalar or a pytree of scalars, as a `Function`.

    dtypes: the types of the arguments of f, as the user sees them.
    name: the name of the public function that f is given to, for errors.
    weak: for each argument, whether its dtype is weak, like the dtype of a Python number.
    results: how many scalars f must return; None: one or more.
    label: how errors name f; its own name by default.
    coarse: see `Function`; None: where f has 16-bit numbers alone, and `_is_coarse`.

    Returns (function, captured). captured are scalar arrays and tracers that f closes over; they are further arguments of
    `function`, after the arguments of f. `function.out_tree` is the structure of the result of f.

    Raises: TypeError, ValueError.
    """
    label = f"jaxkern.{name}: {label or _name_of(f)}"
    weak = weak or (False,) * len(dtypes)
    dtypes = [jax.dtypes.canonicalize_dtype(d) for d in dtypes]
    for d in dtypes:
        check_dtype(label, d)
    scalar = lambda dtype, weak: jax.ShapeDtypeStruct((), dtype, weak_type=bool(weak))
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        try:
            closed, shapes = jax.make_jaxpr(f, return_shape=True)(*map(scalar, dtypes, weak))
        except Exception as error:
            names = ", ".join(d.name for d in dtypes)
            error.add_note(f"{label} is traced with scalars, one element of each operand: {names}")
            raise
    out, out_tree = jax.tree.flatten(shapes)
    if not out or (results is not None and len(out) != results):
        wanted = "at least one scalar" if results is None else f"{results} scalar{'s' * (results != 1)}"
        raise ValueError(f"{label} must return {wanted}, and returns {len(out)}")
    _check_effects(label, closed)
    consts, captured = [], []
    for v, c in zip(closed.jaxpr.constvars, closed.consts):
        if np.ndim(c):
            where = next((e for e in closed.jaxpr.eqns if any(x is v for x in e.invars)), None)
            raise TypeError(
                f"{label} closes over an array, {c.dtype}{list(c.shape)}{_at(where)}. It may close over scalars: pass the "
                "array as an operand"
            )
        traced = isinstance(c, (jax.Array, jax.core.Tracer))
        consts.append(None if traced else np.asarray(c))
        captured += [c] if traced else []

    for k, a in enumerate(out):
        if a.shape != ():
            raise ValueError(f"{label} must return scalars, and result {k} is {a.dtype}{list(a.shape)}")
        check_dtype(label, a.dtype)
    # For its errors, which name the user's lines.
    named = [c if c is not None else f"c{k}" for k, c in enumerate(consts)]
    _Translation(label).run(closed.jaxpr, named, [f"x{k}" for k in range(len(dtypes))])

    def of_scalars(*xs):
        args, rest = xs[: len(dtypes)], iter(xs[len(dtypes) :])
        values = [
            next(rest).astype(computing(v.aval.dtype)) if c is None else c
            for v, c in zip(closed.jaxpr.constvars, consts)
        ]
        return evaluate(closed.jaxpr, values, args)

    in_dtypes = (*dtypes, *(np.dtype(c.dtype) for c in captured))
    weak = (*weak, *(bool(getattr(c, "weak_type", False)) for c in captured))
    out_dtypes = tuple(np.dtype(a.dtype) for a in out)
    coarse = _is_coarse(closed.jaxpr) if coarse is None else coarse
    return _function(of_scalars, in_dtypes, out_dtypes, label, coarse, len(captured), out_tree, weak), captured


def _is_coarse(jaxpr) -> bool:
    """Whether coarse arithmetic is enough for a jaxpr and the derivative rules in it.

    All its real numbers have 16 bits, and no discontinuous operation depends on results of coarse arithmetic: x / y may
    round to a whole number in 16 bits, and coarse arithmetic gives a number just below it, with another floor.
    """
    return _inexact(jaxpr, [False] * len(jaxpr.invars), {}) is not None


def _inexact(jaxpr, given, rules) -> list | None:
    """Which results of a jaxpr depend on coarse arithmetic; None where that is not enough.

    given: which arguments do. rules: the equations by the identity of their derivative rules, of those looked into so far.
    """
    if any(map(_is_wide, (*jaxpr.invars, *jaxpr.constvars, *jaxpr.outvars))):
        return None
    inexact = {v for v, own in zip(jaxpr.invars, given) if own}
    is_inexact = lambda v: not isinstance(v, Literal) and v in inexact
    for e in jaxpr.eqns:
        if any(map(_is_wide, (*e.invars, *e.outvars))):
            return None
        name, own = e.primitive.name, list(map(is_inexact, e.invars))
        results = [name in _COARSE or any(own) or references.get(e.primitive) is not None] * len(e.outvars)
        jaxprs = [called_jaxpr(e)[0]] if name in (*CALLS, *CUSTOM) else []
        if name == "cond":
            jaxprs, own = [branch.jaxpr for branch in e.params["branches"]], own[1:]
        elif name == KERNEL:
            if not e.params["function"].coarse:
                return None
            results = [True] * len(e.outvars)
        elif not jaxprs and any(own) and _jumps(e):
            return None
        if name in CUSTOM and (identity := canonical.rule_identity(e)) not in rules:
            rules[identity] = e
            if len(rules) > canonical.MOST_RULES:
                return None
            with contextlib.suppress(TypeError, NotImplementedError):  # there is no derivative
                rule = vjp_rule(e).jaxpr
                if _inexact(rule, [False] * len(rule.invars), rules) is None:
                    return None
        if jaxprs:
            of_each = [_inexact(j, own, rules) for j in jaxprs]
            if None in of_each:
                return None
            results = list(map(any, zip(*of_each)))
        inexact.update(v for v, r in zip(e.outvars, results) if r)
    return list(map(is_inexact, jaxpr.outvars))


def _is_wide(v) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.inexact) and v.aval.dtype.itemsize > 2


def _jumps(e) -> bool:
    """Whether the result of an equation jumps where an operand hardly changes. NaN and infinities stay what they are."""
    if e.primitive.name == "convert_element_type":
        of, to = e.invars[0].aval.dtype, e.outvars[0].aval.dtype
        return jnp.issubdtype(of, jnp.floating) and not jnp.issubdtype(to, jnp.floating)
    if e.primitive.name in ("eq", "ne"):
        a, b = e.invars
        infinite = any(isinstance(v, Literal) and math.isinf(v.val) for v in (a, b))
        return a is not b and not infinite
    return e.primitive.name in _JUMPS


def _function(f, in_dtypes, out_dtypes, label, coarse, captured=0, out_tree=None, weak=None):
    """A Function of `f`, which takes and returns scalars of computing types."""

    def converted(*xs):
        return [jnp.asarray(y).astype(computing(d)) for y, d in zip(f(*xs), out_dtypes)]

    weak = weak or (False,) * len(in_dtypes)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        args = [jax.ShapeDtypeStruct((), computing(d), weak_type=w) for d, w in zip(in_dtypes, weak)]
        closed = jax.make_jaxpr(converted)(*args)
        if has_narrow(closed.jaxpr):  # f has derivative rules of functions on 16-bit values
            narrow = closed
            closed = jax.make_jaxpr(lambda *xs: evaluate(narrow.jaxpr, narrow.consts, xs))(*args)
        closed = ClosedJaxpr(without_unused(closed.jaxpr), closed.consts)
        return Function(closed, tuple(in_dtypes), tuple(out_dtypes), label, coarse, captured, out_tree)


def of_scalars(f, in_dtypes, out_dtypes, label, coarse) -> "Function":
    """The Function of `f`, written in terms of other Functions' `scalars`.

    f takes scalars of the computing types of `in_dtypes` and returns a list of scalars, one for each of `out_dtypes`.
    """
    return _function(f, tuple(map(np.dtype, in_dtypes)), tuple(map(np.dtype, out_dtypes)), label, coarse)


def warn_of_size(label, size) -> None:
    compat.warn_once(
        f"{label} has a size of {size} statements, above the limit of {MOST}: XLA runs it. Several smaller functions compile "
        "faster"
    )


class Function:
    """A function of scalars, immutable, and equal to any other that computes the same and has the same derivatives.

    in_dtypes, out_dtypes: the types of its arguments and results, as the user sees them.
    captured: how many arguments at the end stand for what the user's function closes over.
    out_tree: the structure of what the user's function returns; None for a derivative.
    used: the positions of the arguments that the results depend on.
    label: the names of the public function and of the user function, for errors.
    closed: its jaxpr, of scalars of computing types.
    coarse: whether kernels compute it with relative errors of 2^-13, enough for 16-bit results; "approximate": whether they
        compute exp2 and log alone by the GPU's approximate instructions (namespace approximate in common/functions.h).
    size: how long it takes to compile, in statements of simple arithmetic.
    """

    def __init__(self, closed, in_dtypes, out_dtypes, label, coarse, captured, out_tree):
        self.in_dtypes, self.out_dtypes = in_dtypes, out_dtypes
        self.label, self.coarse, self.captured, self.out_tree = label, coarse, captured, out_tree
        self.closed = closed
        translation = _Translation(label, coarse)
        names = [f"x{k}" for k in range(len(in_dtypes))]
        outs = translation.run(closed.jaxpr, closed.consts, names)
        needed = translation.remove_unused(outs)
        self.used = tuple(k for k, name in enumerate(names) if name in needed)
        lines = [line for statement in translation.statements for line in statement.lines]
        self._lines = (*lines, *(f"y{k} = {out};" for k, out in enumerate(outs)))
        self.size = sum(statement.weight for statement in translation.statements)
        dtypes = [" ".join(d.name for d in group) for group in (in_dtypes, out_dtypes)]
        content = "\n".join((*dtypes, str(captured), str(coarse), canonical.text_of(closed)))
        self.canonical_digest = hashlib.sha256(content.encode()).hexdigest()

    def __eq__(self, other):
        return isinstance(other, Function) and self.canonical_digest == other.canonical_digest

    def __hash__(self):
        return hash(self.canonical_digest)

    def __repr__(self):  # names a program in compilation caches
        return f"Function({self.canonical_digest[:24]})"

    # ---- C++

    def fits(self) -> bool:
        """Whether a kernel of it compiles within seconds; a warning says once if it does not. XLA runs such a function."""
        if self.size > MOST:
            warn_of_size(self.label, self.size)
        return self.size <= MOST

    def source(self, struct_name: str) -> str:
        """The definition of a functor, for code in namespace jaxkern that includes `HEADER`.

        Its operator() takes the arguments by value, then the results by reference, all in computing types.
        """
        arguments = [f"{cpp_type(computing(d))} x{k}" for k, d in enumerate(self.in_dtypes)]
        arguments += [f"{cpp_type(computing(d))}& y{k}" for k, d in enumerate(self.out_dtypes)]
        body = "\n".join(f"    {line}" for line in self._lines)
        signature = f"JAXKERN_FN void operator()({', '.join(arguments)}) const"
        return f"struct {struct_name} {{\n  {signature} {{\n{body}\n  }}\n}};\n"

    # ---- jnp

    def scalars(self, *xs) -> list:
        """The results for scalars of computing types, in computing types."""
        return evaluate(self.closed.jaxpr, self.closed.consts, xs)

    def __call__(self, *arrays) -> list:
        """The results for arrays that broadcast against each other: a list of arrays of their common shape.

        Arrays are cast to `in_dtypes`. The result can be differentiated and batched by JAX.
        """
        return [y.astype(d) for y, d in zip(self.unrounded(*arrays), self.out_dtypes)]

    def unrounded(self, *arrays) -> list:
        """The same in computing types."""
        if len(arrays) != len(self.in_dtypes):
            raise TypeError(f"{self.label}: {len(arrays)} operands for {len(self.in_dtypes)} arguments")
        shape = jnp.broadcast_shapes(*map(jnp.shape, arrays))
        is_one = lambda n: isinstance(n, int) and n == 1
        operands, dims = [], []
        for x, dtype in zip(arrays, self.in_dtypes):
            x = jnp.asarray(x).astype(dtype).astype(computing(dtype))
            skip = len(shape) - x.ndim
            dims.append([d >= skip and not is_one(x.shape[d - skip]) for d in range(len(shape))])
            operands.append(jax.lax.squeeze(x, [d for d in range(x.ndim) if is_one(x.shape[d])]))
        f = self.scalars
        for d in reversed(range(len(shape))):
            axes = tuple(0 if mapped[d] else None for mapped in dims)
            if any(mapped[d] for mapped in dims):
                f = jax.vmap(f, axes)
        ones = [d for d, n in enumerate(shape) if not any(mapped[d] for mapped in dims)]
        return [jnp.expand_dims(y, ones) for y in f(*operands)]

    # ---- derivatives

    @property
    def inexact_results(self) -> tuple:
        """Positions of the results that have a cotangent: results of floating-point types."""
        return tuple(k for k, d in enumerate(self.out_dtypes) if jnp.issubdtype(d, jnp.inexact))

    def vjp(self, wrt) -> "Function":
        """The Function of (*arguments, *cotangents) that returns the cotangents of the arguments at the positions `wrt`.

        There is one cotangent for each of `inexact_results`. Arguments at `wrt` must be of floating-point types.
        """
        return _vjp(self, tuple(wrt))

    def jvp(self, wrt) -> "Function":
        """The Function of (*arguments, *tangents of those at `wrt`) that returns the tangents of `inexact_results`."""
        return _jvp(self, tuple(wrt))

    def select(self, arguments) -> "Function":
        """The Function of the arguments at these positions, which must include all that are `used`."""
        return _select(self, tuple(arguments))

    def with_results(self, dtypes) -> "Function":
        """The same Function with results of other dtypes that are computed in the same types."""
        return _with_results(self, tuple(map(np.dtype, dtypes)))

    def _only(self, wrt, xs):
        """The inexact results as a function of the arguments at `wrt`."""

        def f(*ws):
            operands = list(xs)
            for k, w in zip(wrt, ws):
                operands[k] = w
            ys = self.scalars(*operands)
            return tuple(ys[k] for k in self.inexact_results)

        return f


_CACHED = 512  # Functions that each of these remembers


@functools.lru_cache(maxsize=_CACHED)
def _vjp(self, wrt):
    n = len(self.in_dtypes)

    def pullback(*xs):
        _, pull = jax.vjp(self._only(wrt, xs[:n]), *(xs[k] for k in wrt))
        return pull(tuple(xs[n:]))

    cotangents = [self.out_dtypes[k] for k in self.inexact_results]
    return _function(
        pullback, (*self.in_dtypes, *cotangents), [self.in_dtypes[k] for k in wrt], self.label, self.coarse
    )


@functools.lru_cache(maxsize=_CACHED)
def _jvp(self, wrt):
    n = len(self.in_dtypes)

    def pushforward(*xs):
        return jax.jvp(self._only(wrt, xs[:n]), [xs[k] for k in wrt], list(xs[n:]))[1]

    def transposed(*xs):  # where there is a jax.custom_vjp
        ys, pull = jax.vjp(self._only(wrt, xs[:n]), *(xs[k] for k in wrt))
        return jax.linear_transpose(pull, ys)(tuple(xs[n:]))[0]

    in_dtypes = (*self.in_dtypes, *(self.in_dtypes[k] for k in wrt))
    out_dtypes = [self.out_dtypes[k] for k in self.inexact_results]
    try:
        return _function(pushforward, in_dtypes, out_dtypes, self.label, self.coarse)
    except TypeError:
        return _function(transposed, in_dtypes, out_dtypes, self.label, self.coarse)


@functools.lru_cache(maxsize=_CACHED)
def _with_results(self, dtypes):
    if dtypes == self.out_dtypes:
        return self
    return _function(self.scalars, self.in_dtypes, dtypes, self.label, self.coarse, self.captured, self.out_tree)


@functools.lru_cache(maxsize=_CACHED)
def _select(self, arguments):
    if not set(self.used) <= set(arguments):
        raise ValueError(f"{self.label}: arguments {self.used} are used, and {arguments} given")

    def f(*xs):
        given = dict(zip(arguments, xs))
        zeros = [np.zeros((), computing(d)) for d in self.in_dtypes]
        return self.scalars(*(given.get(k, zero) for k, zero in enumerate(zeros)))

    return _function(f, [self.in_dtypes[k] for k in arguments], self.out_dtypes, self.label, self.coarse)


def _name_of(f) -> str:
    name = getattr(f, "__name__", None) or type(f).__name__
    return "f" if name == "<lambda>" else name


def _at(equation) -> str:
    line = compat.source_line(equation) if equation is not None else ""
    return f" at {line}" if line else ""


def check_dtype(label, dtype):
    """Raises, with an error that begins with `label`, unless kernels compute with this dtype."""
    if np.dtype(dtype).name not in CUDA_TYPES:
        raise Unsupported(f"{label}: kernels do not compute in {dtype}: compute it outside of the function")


def _check_effects(label, closed):
    if closed.effects:
        e = next((e for e in closed.jaxpr.eqns if e.effects), None)
        what = f", in {e.primitive.name}{_at(e)}" if e is not None else ""
        raise TypeError(f"{label} has side effects{what}, which kernels do not support: move them out of the function")


# ---- C++


def cpp_type(dtype) -> str:
    """The type of a value of a computing type, or of one that is stored."""
    return (CUDA_TYPES | FLOAT8 | COMPLEX_TYPES)[np.dtype(dtype).name]


def _literal(value, dtype) -> str:
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
    return _literal(np.float32(1 / value), np.float32)


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
_OVERLOADS |= {"quotient": "quotient"}
_JUMPS = frozenset("bitcast_convert_type ceil floor ge gt le lt rem round sign".split())
# Those with an overload in namespace coarse too.
_COARSE = frozenset("cos div erf erfc exp exp2 expm1 log log1p logistic pow sin sqrt tanh".split())
_APPROXIMATE = frozenset(("exp2", "log"))  # those with an overload in namespace approximate
# Their code has branches and tables. Compiled for an H100 in a kernel of four elements per thread, 33 sines take 8 seconds, 300
# exponentials with 300 multiply-adds 2 seconds, 600 multiply-adds half a second.
_SLOW_TO_COMPILE = frozenset("bessel_i0e bessel_i1e cos digamma lgamma pow rem sin tan".split())
_LONG = 50  # their weight
MOST = 2000  # weight of a function in a kernel
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
    """Lines of C++ that define `names` from `uses`; weight: how long they take to compile."""

    def __init__(self, names, lines, uses, weight=1):
        self.names, self.lines, self.uses, self.weight = names, lines, uses, weight

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
            test = f"if ({self.index} {'<=' if n == 0 else '=='} {n}) " if n + 1 < len(self.branches) else ""
            self.lines.append(f"{'} else ' if n else ''}{test}{{")
            self.lines += [f"  {line}" for statement in inner.statements for line in statement.lines]
            self.lines += [f"  {self.names[k]} = {outs[k]};" for k in kept]
        self.lines.append("}")


class _Translation:
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
            env[v] = c if isinstance(c, str) else _literal(np.asarray(c)[()], v.aval.dtype)
        read = lambda v: _literal(v.val, v.aval.dtype) if isinstance(v, Literal) else env[v]
        for e in jaxpr.eqns:
            env.update(zip(e.outvars, self._equation(e, list(map(read, e.invars)))))
        return [read(v) for v in jaxpr.outvars]

    def _fail(self, e, what):
        raise Unsupported(
            f"{self.label} uses {e.primitive.name}{_at(e)}, {what}. Compute it outside and pass the result as an operand"
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
            return [_literal(0, e.outvars[0].aval.dtype)]
        text = self._expression(e, name, operands)
        return [self._define(e.outvars[0].aval.dtype, text, operands, _LONG if name in _SLOW_TO_COMPILE else 1)]

    def _new(self):
        self._names += 1
        return f"t{self._names}"

    def _define(self, dtype, text, uses, weight=1):
        name = self._new()
        line = f"const {cpp_type(computing(dtype))} {name} = {text};"
        self.statements.append(_Statement([name], [line], set(uses), weight))
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
            self._fail(e, "a loop, which functions in kernels cannot have")
        else:
            self._fail(e, "which has no counterpart in kernels")
        space = "lax"
        if out == np.float32 and self.coarse == "approximate":
            space = "approximate" if name in _APPROXIMATE else "lax"
        elif out == np.float32 and self.coarse:
            space = "coarse" if name in _COARSE else "lax"
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
            inner = _Translation(self.label, self.coarse)
            inner._names = self._names
            branches.append((inner, inner.run(branch.jaxpr, branch.consts, operands)))
            self._names = inner._names
        self.statements.append(_Cond(results, [cpp_type(computing(v.aval.dtype)) for v in e.outvars], index, branches))
        return results
