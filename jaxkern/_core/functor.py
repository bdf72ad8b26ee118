"""User functions in kernels: from a Python function of scalars to a C++ functor.

    function, captured = trace(lambda x, s: jax.nn.silu(x) * s, [jnp.bfloat16, jnp.float32], name="elementwise_kernel")
    function.source("Scale")    the functor, for the `source` of a Launch
    function(x, s)              the same in jnp, on arrays that broadcast
    function.vjp((0,))          the derivative, a Function of (x, s, cotangent)

`trace` makes a jaxpr of the function with the user's dtypes, then one with float32 in place of 16-bit types (jaxprs.py):
kernels compute these in float32 and round where they store. Each equation becomes one statement of C++, a call of an
overload in ffi/kernels/common/functions.h. If all real numbers of the function have 16 bits, it uses the overloads in
namespace `coarse` where there are any. These are more accurate than rounding after each operation, as JAX does, but not for
inputs of discontinuous operations (see `is_coarse`).

Two Functions are equal if they compute the same and have the same derivatives (canonical.py), so a Function can be a
parameter of a primitive: a lambda that is created in every call does not compile again.
"""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh

from jaxkern._core import canonical, compat, memo
from jaxkern._core.coarse import is_coarse
from jaxkern._core.cpp import Translation, at, check_dtype, cpp_type
from jaxkern._core.dtypes import computing
from jaxkern._core.jaxprs import evaluate, has_narrow, without_unused

MOST = 2000  # statements of a function in a kernel, weighted


def trace(f, dtypes, *, name, weak=None, results=None, label=None, coarse=None):
    """`f`, a function of scalars that returns a scalar or a pytree of scalars, as a `Function`.

    dtypes: the types of the arguments of f, as the user sees them.
    name: the name of the public function that f is given to, for errors.
    weak: for each argument, whether its dtype is weak, like the dtype of a Python number.
    results: how many scalars f must return; None: one or more.
    label: how errors name f; its own name by default.
    coarse: see `Function`; None: where f has 16-bit numbers alone, and `is_coarse`.

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
            hint = f"{label} is traced with scalars, one element of each operand: {names}"
            is_branch = isinstance(error, jax.errors.TracerBoolConversionError)
            error.add_note(f"{hint}. Write jnp.where in place of `if`" if is_branch else hint)
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
                f"{label} closes over an array, {c.dtype}{list(c.shape)}{at(where)}. It may close over scalars: pass the "
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
    Translation(label).run(closed.jaxpr, named, [f"x{k}" for k in range(len(dtypes))])

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
    coarse = is_coarse(closed.jaxpr) if coarse is None else coarse
    return _function(of_scalars, in_dtypes, out_dtypes, label, coarse, len(captured), out_tree, weak), captured


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
    code: about how many instructions it becomes, those of functions such as the logarithm included.
    """

    def __init__(self, closed, in_dtypes, out_dtypes, label, coarse, captured, out_tree):
        self.in_dtypes, self.out_dtypes = in_dtypes, out_dtypes
        self.label, self.coarse, self.captured, self.out_tree = label, coarse, captured, out_tree
        self.closed = closed
        translation = Translation(label, coarse)
        names = [f"x{k}" for k in range(len(in_dtypes))]
        outs = translation.run(closed.jaxpr, closed.consts, names)
        needed = translation.remove_unused(outs)
        self.used = tuple(k for k, name in enumerate(names) if name in needed)
        lines = [line for statement in translation.statements for line in statement.lines]
        self._lines = (*lines, *(f"y{k} = {out};" for k, out in enumerate(outs)))
        self.size = sum(statement.weight for statement in translation.statements)
        self.code = sum(statement.code for statement in translation.statements)
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


@memo.remembered(_CACHED)
def _vjp(self, wrt):
    n = len(self.in_dtypes)

    def pullback(*xs):
        _, pull = jax.vjp(self._only(wrt, xs[:n]), *(xs[k] for k in wrt))
        return pull(tuple(xs[n:]))

    cotangents = [self.out_dtypes[k] for k in self.inexact_results]
    return _function(
        pullback, (*self.in_dtypes, *cotangents), [self.in_dtypes[k] for k in wrt], self.label, self.coarse
    )


@memo.remembered(_CACHED)
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


@memo.remembered(_CACHED)
def _with_results(self, dtypes):
    if dtypes == self.out_dtypes:
        return self
    return _function(self.scalars, self.in_dtypes, dtypes, self.label, self.coarse, self.captured, self.out_tree)


@memo.remembered(_CACHED)
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


def _check_effects(label, closed):
    if closed.effects:
        e = next((e for e in closed.jaxpr.eqns if e.effects), None)
        what = f", in {e.primitive.name}{at(e)}" if e is not None else ""
        raise TypeError(f"{label} has side effects{what}, which kernels do not support: move them out of the function")
