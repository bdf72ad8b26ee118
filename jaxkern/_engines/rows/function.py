"""Row functions as parameters of a primitive: a jaxpr on whole arrays, its derivatives, and what kernels make of it."""

import contextlib
import copy
import functools
import hashlib
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from jaxkern._core import canonical, compat, memo
from jaxkern._core.cpp import Unsupported
from jaxkern._core.jaxprs import computing
from jaxkern._engines.jaxpr import Constant, widened
from jaxkern._engines.rows.core import Core
from jaxkern._engines.rows.program import Program, evaluate


def trace(f, avals, axis, label, name="row_kernel", algorithm="auto", replaces=False):
    """The `RowFunction` of f for arrays of these types, and the arrays that f closes over, its further operands.

    axis: the row, counted from the last dimension, so negative. name, algorithm, replaces: as for `RowFunction`.

    Returns (function, captured, structure of what f returns).
    """
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        closed, shapes = jax.make_jaxpr(f, return_shape=True)(*avals)
        captured = [c for c in closed.consts if np.ndim(c) or isinstance(c, (jax.Array, jax.core.Tracer))]
        kept = [k for k, c in enumerate(closed.consts) if any(c is x for x in captured)]

        def with_consts(*xs):
            consts = list(closed.consts)
            for k, x in zip(kept, xs[len(avals) :]):
                consts[k] = x
            return jax.core.eval_jaxpr(closed.jaxpr, consts, *xs[: len(avals)])

        if kept:
            types = [jax.ShapeDtypeStruct(jnp.shape(c), jnp.result_type(c)) for c in captured]
            closed = jax.make_jaxpr(with_consts)(*avals, *types)
    function = RowFunction(closed, _row_of(closed, len(avals), axis), label, name, algorithm, replaces)
    return function, captured, jax.tree.structure(shapes)


def _row_of(closed, own, axis):
    """(operand, dimension) of the row, for the operand with most dimensions among operands that f uses and whose rows are not 1.

    Arrays that f closes over, all but the first `own`, have a row only if no other operand has one.
    """
    used, shapes = compat.used_operands(closed), [v.aval.shape for v in closed.jaxpr.invars]
    found = [k for k in used if len(shapes[k]) >= -axis and shapes[k][axis] != 1]
    found.sort(key=lambda k: (k >= own, -len(shapes[k])))
    return (found[0], len(shapes[found[0]]) + axis) if found else None


# Operations whose row functions reduce; see `Core`.
REDUCTIONS = frozenset(("reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "logsumexp"))


class Roles(typing.NamedTuple):
    """What the operands and results of a function are, for hand-written kernels that compute the same.

    operands, results: names. A tangent or cotangent of `x` is `d x`. facts: (name, value) pairs that hold for the operation.
    """

    operands: tuple
    results: tuple
    facts: tuple


class RowFunction:
    """A jaxpr of arrays that is a row function, equal to any other with equal jaxpr and derivative rules.

    closed: the jaxpr. row: (array, dimension) that is the row, or None; results are numbered after the operands. label: names
    the public function and the user's, for errors. name: the name of the operation and its primitives. algorithm: the one that
    its caller forces, or "auto". replaces: whether it stands for operations of a plain program, which is exported plain; see
    `accelerate`. roles: a `Roles`, or None. variant: None, or a function that returns the same function as XLA runs it fastest, on a
    CPU for "cpu" and elsewhere for "xla". avals, results: the types of its operands and results.
    tangent: None, or how it is differentiated instead of its jaxpr: tangent(wrt) is the function of (*results, *operands,
    *tangents of the operands at `wrt`) that returns the tangents of its results. `name` and the jaxpr determine it.
    overwritten: (operand, result) pairs whose memory kernels may share, since nothing reads the operand later.
    """

    roles = variant = tangent = None
    overwritten = ()

    def __init__(self, closed, row, label, name="row_kernel", algorithm="auto", replaces=False):
        self.closed, self.row, self.label, self.name, self.algorithm = closed, row, label, name, algorithm
        self.replaces = replaces
        self.avals = [v.aval for v in closed.jaxpr.invars]
        self.results = [v.aval for v in closed.jaxpr.outvars]
        shapes = " ".join(f"{a.dtype.name}{list(a.shape)}" for a in self.avals)
        content = "\n".join((name, algorithm, str(replaces), shapes, str(row), canonical.text_of(closed)))
        self._digest = hashlib.sha256(content.encode()).hexdigest()

    def __eq__(self, other):
        return isinstance(other, RowFunction) and self._digest == other._digest

    def __hash__(self):
        return hash(self._digest)

    def __repr__(self):  # names a program in compilation caches
        return f"RowFunction({self._digest[:24]})"

    def __call__(self, *operands) -> list:
        """The jaxpr on arrays, as the user wrote it."""
        return jax.core.eval_jaxpr(self.closed.jaxpr, self.closed.consts, *operands)

    def overwriting(self, pairs) -> "RowFunction":
        """The same function with these pairs; see `overwritten`."""
        found = copy.copy(self)
        found.overwritten = tuple(pairs)
        found._digest = hashlib.sha256(f"{self._digest} {found.overwritten}".encode()).hexdigest()
        return found

    # ---- what it computes

    @functools.cached_property
    def program(self) -> Program:
        return Program(self.closed, self.row, self.label)

    @functools.cached_property
    def core(self) -> Core:
        return Core(self.program, self.name in REDUCTIONS)

    def check(self) -> None:
        """Raises where the user's function is no row function."""
        if self.row is None:  # the rows have one element
            return
        try:
            program = self.program
        except Unsupported as error:
            if "compute it outside" not in str(error).lower():
                error.add_note("compute it outside of the function, and pass the result as an operand")
            raise
        for step in self.core.epilogue:
            if step.result.set() >= {program.row, *program.others}:
                program.fail(
                    step,
                    "on rows and a sum over other dimensions: reduce along the axis of the row alone, with "
                    "keepdims=True. Only at the end may the function sum over other dimensions",
                )

    def wide(self, *operands) -> list:
        """The results, with 16-bit types computed in float32."""
        return self.rounded(self._all(self.program.steps, self.in_computing_types(operands), {}))

    def in_computing_types(self, operands) -> dict:
        """{Value: array} of the operands, as `evaluate` takes them."""
        return {
            v: jnp.asarray(x).astype(computing(v.dtype)) for v, x in zip(self.program.operands, operands, strict=True)
        }

    def _all(self, steps, env, parts):
        env = evaluate(self.program, steps, env, **parts)
        return [jnp.asarray(widened(v)) if isinstance(v, Constant) else env[v] for v in self.program.results]

    def rounded(self, results) -> list:
        return [y.astype(a.dtype) for y, a in zip(results, self.results)]

    def after_core(self, operands, outputs, parts=None) -> list:
        """The results from the outputs of a kernel. parts: as for `evaluate`, where operands are parts."""
        env = self.in_computing_types(operands)
        for o, y in zip(self.core.outputs, outputs, strict=True):
            env[o.result] = y.astype(computing(o.dtype))
        return self.rounded(self._all(self.core.epilogue, env, parts or {}))

    def of_outputs(self, shapes, size, begins=()) -> "RowFunction":
        """The function whose results are the outputs of a kernel, for operands that are split over devices; see `of_parts`."""
        dtype = lambda o: computing(o.dtype) if o.kind in ("columns", "total") else o.dtype
        wanted = [(o.result, dtype(o)) for o in self.core.outputs]
        found = self.of_parts(wanted, self.core.steps(), (), shapes, size, begins)
        if self.roles is not None:
            operands = (*self.roles.operands, *["begin"] * len(begins))
            found.roles = self.roles._replace(operands=operands, results=self.output_roles())
        return found

    def of_parts(self, wanted, steps, known, shapes, size, begins=(), complete=None) -> "RowFunction":
        """The function of (*operands, *known, *begins) whose results are the `wanted` ones, for parts of arrays on one device.

        wanted: (value, dtype) pairs, which `steps` make. known: values that are further operands, in computing types. shapes: of the
        operands and the known values. size(dim): the size of a dimension of a part. begins: dimensions whose index counts from a number,
        an int32. complete(step, results): what the steps after a reduction take for its results.
        """
        count = len(self.avals)
        values = [*self.program.operands, *known]

        def f(*xs):
            env = self.in_computing_types(xs[:count]) | dict(zip(known, xs[count:]))
            start = dict(zip(begins, xs[len(values) :]))
            reduced = {}

            def completed(step, ys):
                reduced.update(zip(step.results, ys))
                return complete(step, ys)

            env = evaluate(self.program, steps, env, size=size, start=start.get, collective=complete and completed)
            env |= reduced
            return [(widened(v) if isinstance(v, Constant) else env[v]).astype(dtype) for v, dtype in wanted]

        types = [*(a.dtype for a in self.avals), *(computing(v.dtype) for v in known)]
        avals = [*map(jax.ShapeDtypeStruct, shapes, types), *[jax.ShapeDtypeStruct((), jnp.int32)] * len(begins)]
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            closed = jax.make_jaxpr(f)(*avals)
        used, row = compat.used_operands(closed), self.program.row
        arrays = [(k, v) for k, v in enumerate(values) if k in used]
        arrays += [(len(avals) + k, v) for k, (v, _) in enumerate(wanted)]
        where = next(((k, v.dims.index(row)) for k, v in arrays if row in v.dims), None)
        return RowFunction(closed, where, self.label, self.name, self.algorithm, self.replaces)

    def output_roles(self) -> tuple:
        """The roles of the outputs of a kernel: of the results that are made of one alone, by conversions and reshapes."""
        core, roles = self.core, {}
        step_of = {v: step for step in core.epilogue for v in step.results}
        for v, role in zip(self.program.results, self.roles.results):
            while v in step_of and len(step_of[v].operands) == 1:
                v = step_of[v].operands[0]
            roles[v] = role
        return tuple(roles.get(o.result) for o in core.outputs)

    # ---- derivatives and batches

    def _results(self):
        return range(len(self.avals), len(self.avals) + len(self.results))

    def used(self) -> tuple:
        """The positions of the operands that the results depend on."""
        return compat.used_operands(self.closed)

    def select(self, arguments) -> "RowFunction":
        return _select(self, tuple(arguments))

    def keep(self, results) -> "RowFunction":
        """The function that returns these of its results alone."""
        return _keep(self, tuple(results))

    def jvp(self, wrt) -> "RowFunction":
        """The function of (*operands, *tangents of those at `wrt`) that returns tangents of the inexact results."""
        return _jvp(self, tuple(wrt))

    def forward(self, wrt) -> "RowFunction":
        """The function as reverse mode evaluates it: by the first function of each `jax.custom_vjp`."""
        return _forward(self, tuple(wrt))

    def vjp(self, wrt) -> "RowFunction":
        """The function of (*operands, *cotangents of the inexact results) that returns cotangents of those at `wrt`."""
        return _vjp(self, tuple(wrt))

    @functools.cached_property
    def has_vjp(self) -> bool:
        """Whether a part of it has a `jax.custom_vjp`, and so no forward derivative."""
        return any(compat.calls(self.closed.jaxpr, name) for name in ("custom_vjp_call", "custom_vjp_call_jaxpr"))

    def transpose(self, linear) -> "RowFunction":
        """The function of (*operands but those at `linear`, *cotangents of inexact results): cotangents of those.

        The function is linear in the operands at `linear`.
        """
        return _transpose(self, tuple(linear))

    def batched(self, mapped, size, at=0) -> "RowFunction":
        """The function for a batch: mapped operands have one more dimension, at this place."""
        return _batched(self, tuple(mapped), size, at)

    @property
    def inexact_results(self) -> tuple:
        return tuple(k for k, a in enumerate(self.results) if jnp.issubdtype(a.dtype, jnp.inexact))


def _made(of, f, avals, operands, results, shifted=None, at=0):
    """The RowFunction of f. operands, results: the arrays of `of` whose dimensions its own have, by their numbers.

    shifted: the numbers of those that have one more dimension, at this place.
    """
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        closed = jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
    row, used = None, compat.used_operands(closed)
    with contextlib.suppress(Unsupported):
        program = of.program
        arrays = [*program.operands, *program.results]
        for k, number in enumerate((*operands, *results)):
            v = arrays[number]
            if program.row in v.dims and (k in used or k >= len(operands)):
                dim = v.dims.index(program.row)
                row = (k, dim + (shifted is not None and number in shifted and at <= dim))
                break
    return RowFunction(compat.without_unused(closed), row, of.label, of.name, of.algorithm, of.replaces)


CACHED = 1024  # derivatives and batches that are kept


def _derived(roles):
    """Keeps what the decorated function makes of a RowFunction, and makes the same of its variants.

    roles(function, names of operands, names of results, *parameters): the names of operands and results of what it makes.
    """

    def derived(make):
        @memo.remembered(CACHED)
        def of(function, *parameters):
            found = make(function, *parameters)
            if function.roles is not None and roles is not None:
                operands, results, facts = function.roles
                found.roles = Roles(*map(tuple, roles(function, operands, results, *parameters)), facts)
            if function.variant is not None:
                found.variant = lambda runner: of(function.variant(runner), *parameters)
            return found

        return of

    return derived


@_derived(lambda _, operands, results, arguments: ([operands[k] for k in arguments], results))
def _select(self, arguments):
    def f(*xs):
        given = dict(zip(arguments, xs))
        return self(*(given[k] if k in given else jnp.zeros(a.shape, a.dtype) for k, a in enumerate(self.avals)))

    return _made(self, f, [self.avals[k] for k in arguments], arguments, self._results())


@_derived(lambda _, operands, results, kept: (operands, [results[k] for k in kept]))
def _keep(self, kept):
    n = len(self.avals)
    f = lambda *xs: (lambda ys: [ys[k] for k in kept])(self(*xs))
    return _made(self, f, self.avals, range(n), [n + k for k in kept])


def _inexact_of(self, xs, wrt):
    def f(*ws):
        operands = list(xs)
        for k, w in zip(wrt, ws):
            operands[k] = w
        ys = self(*operands)
        return tuple(ys[k] for k in self.inexact_results)

    return f


def _roles_of_jvp(function, operands, results, wrt):
    return [*operands, *(f"d {operands[k]}" for k in wrt)], [f"d {results[k]}" for k in function.inexact_results]


@contextlib.contextmanager
def _explained(self):
    """Adds to an error of JAX's derivative of `lax.reduce` what to write in its place."""
    try:
        yield
    except TypeError as error:
        if compat.calls(self.closed.jaxpr, "reduce"):
            error.add_note(
                f"{self.label}: JAX does not differentiate lax.reduce of numbers together with integers. Reduce "
                "lax.stop_gradient of the numbers, and pick the element at the index that is found"
            )
        raise


@_derived(_roles_of_jvp)
def _jvp(self, wrt):
    n = len(self.avals)

    def pushforward(*xs):
        with _explained(self):
            return jax.jvp(_inexact_of(self, xs[:n], wrt), [xs[k] for k in wrt], list(xs[n:]))[1]

    avals, operands = [*self.avals, *(self.avals[k] for k in wrt)], [*range(n), *wrt]
    results = [n + k for k in self.inexact_results]
    return _made(self, pushforward, avals, operands, results)


@_derived(None)
def _forward(self, wrt):
    def primal(*xs):
        def f(*ws):
            operands = list(xs)
            for k, w in zip(wrt, ws):
                operands[k] = w
            ys = self(*operands)
            return [ys[k] for k in self.inexact_results], ys

        return jax.vjp(f, *(xs[k] for k in wrt), has_aux=True)[2]

    return _made(self, primal, self.avals, range(len(self.avals)), self._results())


@_derived(None)
def _vjp(self, wrt):
    n = len(self.avals)

    def pullback(*xs):
        with _explained(self):
            _, pull = jax.vjp(_inexact_of(self, xs[:n], wrt), *(xs[k] for k in wrt))
        return pull(tuple(xs[n:]))

    avals, results = (
        [*self.avals, *(self.results[k] for k in self.inexact_results)],
        [n + k for k in self.inexact_results],
    )
    return _made(self, pullback, avals, [*range(n), *results], wrt)


def _roles_of_transpose(function, operands, results, linear):
    others = [name for k, name in enumerate(operands) if k not in linear]
    return [*others, *(results[k] for k in function.inexact_results)], [operands[k] for k in linear]


@_derived(_roles_of_transpose)
def _transpose(self, linear):
    others = [k for k in range(len(self.avals)) if k not in linear]

    def pullback(*xs):
        known, cotangents = xs[: len(others)], xs[len(others) :]
        given = dict(zip(others, known))

        def f(*ws):
            operands = given | dict(zip(linear, ws))
            ys = self(*(operands[k] for k in range(len(self.avals))))
            return [ys[k] for k in self.inexact_results]

        types = [jax.ShapeDtypeStruct(self.avals[k].shape, self.avals[k].dtype) for k in linear]
        return jax.linear_transpose(f, *types)(list(cotangents))

    cotangents, n = [self.results[k] for k in self.inexact_results], len(self.avals)
    operands = [*others, *(n + k for k in self.inexact_results)]
    return _made(self, pullback, [*(self.avals[k] for k in others), *cotangents], operands, linear)


@_derived(lambda _, operands, results, *__: (operands, results))
def _batched(self, mapped, size, at):
    larger = lambda a: jax.ShapeDtypeStruct((*a.shape[:at], size, *a.shape[at:]), a.dtype)
    avals = [larger(a) if m else a for a, m in zip(self.avals, mapped)]
    numbers = [k for k, m in enumerate(mapped) if m]
    batched = jax.vmap(self.__call__, [at if m else None for m in mapped], at)
    found = _made(self, batched, avals, range(len(mapped)), self._results(), {*numbers, *self._results()}, at)
    if self.tangent is not None:
        # A tangent has the shape of the batch even where the operand has none.
        given = (*(True for _ in self.results), *mapped)
        found.tangent = lambda wrt: self.tangent(wrt).batched((*given, *(mapped[k] for k in wrt)), size, at)
    return found
