"""Jaxprs of arrays for engines that compute one element at a time: inlined, with the dimensions that arrays share.

`Flat` inlines a jaxpr and finds out which dimensions of all its arrays are the same: operands of an elementwise operation share
their dimensions, a broadcast adds some, a reduction takes some away. Dimensions of size 1 are no dimensions.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jaxkern._core import compat
from jaxkern._core.cpp import ELEMENTWISE, Unsupported
from jaxkern._core.define import CUDA_TYPES, references
from jaxkern._core.jaxprs import CALLS, CUSTOM, called_jaxpr, computing


class Dim:
    """A dimension that arrays share. `same()` is what stands for all that are known to be equal."""

    def __init__(self, size):
        self.size, self._other = size, None

    def same(self) -> "Dim":
        dim = self
        while dim._other is not None:
            dim = dim._other
        return dim

    def unite(self, other) -> None:
        a, b = self.same(), other.same()
        if a is not b:
            b._other = a


@dataclasses.dataclass(eq=False)
class Value:
    """An array of the jaxpr. dims: a `Dim` for each dimension, None for a dimension of size 1."""

    aval: jax.core.ShapedArray
    dims: tuple = ()
    is_row: bool = False
    stage: int = 0
    summed: bool = False  # depends on a sum over other dimensions than the row

    @property
    def dtype(self):
        return np.dtype(self.aval.dtype)

    def set(self) -> frozenset:
        return frozenset(d for d in self.dims if d is not None)


@dataclasses.dataclass(eq=False)
class Constant:
    """A scalar that is known."""

    value: np.ndarray

    @property
    def aval(self):
        return jax.core.ShapedArray((), self.value.dtype)

    dims, is_row, stage, summed = (), False, 0, False


@dataclasses.dataclass(eq=False)
class Step:
    """One operation. name: the primitive's, or "select", which picks one of its operands by the first.

    calls: the equations that call the jaxpr it is in, outermost first. origin: the equation that it was rewritten from.
    stage: of the results, at least.
    """

    name: str
    operands: list
    results: list
    equation: object
    params: dict
    calls: tuple = ()
    origin: object = None
    stage: int = 0

    @property
    def result(self) -> Value:
        return self.results[0]


# Operations that move no data between elements, under which dimensions are kept in their order.
RENAMED = ("reshape", "squeeze", "expand_dims")
MOVES = (*RENAMED, "broadcast_in_dim", "transpose")  # an element of the result is one of the operand
_SAME = ("copy", "copy_p", "stop_gradient", "optimization_barrier", "name", "pvary", "pcast", "reshard", "mesh_cast")
_SAME += ("sharding_constraint", "tie", "jaxkern_loop")
REDUCTIONS = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "mul",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
    "argmax": "argmax",
    "argmin": "argmin",
    "reduce": "reduce",
}
INDICES = ("iota", "ravel_index")  # along a dimension; of elements in row-major order
NOT_ELEMENTWISE = ("argmax", "argmin", "reduce")  # even if they reduce one element
# Operations that are done in the types of the jaxpr, whose bits they show or whose own jaxpr names them.
_AS_WRITTEN = ("bitcast_convert_type", "nextafter", "reduce")


class Flat:
    """A jaxpr as steps on Values. Subclasses call `_read`, then give the Values their meaning.

    operands, results: Values; results may be Constants. steps: in order, those that the results need. used: positions of
    the operands that the results need.

    Raises: Unsupported, naming the equation and the user's line.
    """

    _origin = None  # the equation that is being rewritten
    otherwise = "which is not elementwise"  # of an equation that is neither elementwise nor a reduction

    def _read(self, closed, label):
        self.label, self.steps, self._calls = label, [], []
        self.operands = [self._value(v.aval) for v in closed.jaxpr.invars]
        self.results = self._inline(closed.jaxpr, map(self._constant, closed.consts), self.operands)
        self.remove_unused()

    def _value(self, aval):
        return Value(aval, tuple(None if is_one(n) else Dim(n) for n in aval.shape))

    def _constant(self, c):
        return Constant(np.asarray(c))

    def fail(self, step, what):
        e, line = step.origin or step.equation, self.line(step)
        raise Unsupported(f"{self.label} uses {compat.operation_name(e)}{' at ' + line if line else ''}, {what}")

    def why(self, step) -> str:
        """What an error says of a step that is neither elementwise nor a reduction."""
        return self.otherwise

    def line(self, step) -> str:
        """Where the user wrote a step; empty if it is not known."""
        equations = (step.origin or step.equation, *reversed(step.calls))
        return next(filter(None, map(compat.source_line, equations)), "")

    def _inline(self, jaxpr, consts, args) -> list:
        env = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args))
        read = lambda v: Constant(np.asarray(v.val, v.aval.dtype)) if isinstance(v, Literal) else env[v]
        for e in jaxpr.eqns:
            operands = list(map(read, e.invars))
            env.update(zip(e.outvars, self._equation(e, operands)))
        return list(map(read, jaxpr.outvars))

    def _equation(self, e, operands) -> list:
        name = e.primitive.name
        if name in (*CALLS, *CUSTOM):
            inner, consts = called_jaxpr(e)
            self._calls.append(e)
            results = self._inline(inner, map(self._constant, consts), operands)
            self._calls.pop()
            return results
        if references.get(e.primitive) is not None:
            reference = references[e.primitive]
            return self.inlined(e, operands, lambda *xs: jax.tree.leaves(reference(*xs, **e.params)))
        if name == "cond":
            return self._cond(e, operands)
        if name in ("empty", "empty2"):  # where a branch of `cond` leaves no residual
            return self.inlined(e, operands, lambda: [jnp.zeros(v.aval.shape, v.aval.dtype) for v in e.outvars])
        rewritten = self.rewritten(e, operands)
        if rewritten is not None:
            return self.inlined(e, *rewritten)
        if name in _SAME:
            return operands if len(operands) == len(e.outvars) else operands[-1:]
        results = [self._value(v.aval) for v in e.outvars]
        step = Step(name, operands, results, e, dict(e.params), tuple(self._calls), self._origin)
        if e.effects:
            self.fail(step, "which has side effects")
        for v in (*operands, *results):
            if not self.computes(v.aval.dtype, e):
                self.fail(step, f"and kernels do not compute in {v.aval.dtype}")
        self.steps.append(step)
        return step.results

    def computes(self, dtype, equation) -> bool:
        """Whether kernels have the operation of an equation on numbers of a dtype."""
        return dtype.name in CUDA_TYPES

    def rewritten(self, e, operands):
        """(operands, function in jnp of them) that stand for an equation; None if the equation stays as it is."""
        return None

    def inlined(self, e, operands, f) -> list:
        """The results of f, a function in jnp, in place of the equation."""
        closed = jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in operands))
        outer, self._origin = self._origin, self._origin or e
        results = self._inline(closed.jaxpr, map(self._constant, closed.consts), operands)
        self._origin = outer
        return results

    def _cond(self, e, operands):
        """All branches, then a selection: they have no side effects."""
        index, *operands = operands
        branches = [self._inline(b.jaxpr, map(self._constant, b.consts), operands) for b in e.params["branches"]]
        if index.aval.shape:
            raise Unsupported(f"{self.label} uses cond with an index of shape {index.aval.shape}")
        results = [self._value(v.aval) for v in e.outvars]
        for result, *cases in zip(results, *branches):
            self.steps.append(Step("select", [index, *cases], [result], e, {}))
        return results

    def remove_unused(self):
        needed, kept = {v for v in self.results if isinstance(v, Value)}, []
        for step in reversed(self.steps):
            if needed.intersection(step.results):
                needed.update(v for v in step.operands if isinstance(v, Value))
                kept.append(step)
        self.steps = kept[::-1]
        self.used = tuple(k for k, v in enumerate(self.operands) if v in needed)

    # ---- which dimensions are the same

    def _unite(self):
        for step in self.steps:
            self.unite_step(step)
        values = {v for s in self.steps for v in (*s.operands, *s.results)}.union(self.operands)
        for v in values:
            if isinstance(v, Value):
                v.dims = tuple(d and d.same() for d in v.dims)
        for step in self.steps:
            for v in (*step.results, *step.operands):
                if isinstance(v, Value) and len(v.set()) < sum(d is not None for d in v.dims):
                    self._doubled(step, v)

    def _doubled(self, step, v):
        """Called for a result or an operand of a step that has a dimension twice."""
        which = "result" if v in step.results else "operand"
        self.fail(step, f"whose {which} has two dimensions that must be equal elsewhere")

    def unite_step(self, step):
        name, out, params = step.name, step.result, step.params
        unite = lambda pairs: [a.unite(b) for a, b in pairs if a is not None and b is not None]
        arrays = [v for v in step.operands if v.aval.shape]
        if name == "broadcast_in_dim":
            own = step.operands[0].dims
            unite((a, out.dims[at]) for a, at in zip(own, params["broadcast_dimensions"]))
        elif name in RENAMED:
            a, b = ([d for d in v.dims if d is not None] for v in (step.operands[0], out))
            if [d.size for d in a] != [d.size for d in b]:
                self.fail(step, "which merges or splits dimensions")
            unite(zip(a, b))
        elif name == "transpose":
            unite((step.operands[0].dims[p], d) for p, d in zip(params["permutation"], out.dims))
        elif name in REDUCTIONS:
            gone = set(axes_of(name, params))
            for x in arrays:
                unite(zip((d for k, d in enumerate(x.dims) if k not in gone), out.dims))
                unite(zip(arrays[0].dims, x.dims))
            for y in step.results[1:]:
                unite(zip(out.dims, y.dims))
        elif name in INDICES:
            pass
        else:
            fits = all(_fits(v.aval.shape, out.aval.shape) for v in arrays)
            if name not in (*ELEMENTWISE, "select") or not fits:
                self.fail(step, self.why(step))
            for x in arrays:
                unite(zip(x.dims, out.dims))

    def over(self, step) -> frozenset:
        """The Dims that a step reduces."""
        if step.name not in REDUCTIONS:
            return frozenset()
        return frozenset(step.operands[0].dims[a] for a in axes_of(step.name, step.params)) - {None}


def axes_of(name, params):
    """The axes of a reduction."""
    return params["dimensions" if name == "reduce" else "axes"]


def source(made, v):
    """The value that v is a copy of, perhaps broadcast or in another type that is computed in the same one.

    made: {value: the step that computes it}.
    """
    while (step := made.get(v)) is not None and step.name in (*MOVES, "convert_element_type"):
        x = step.operands[0]
        if not isinstance(x, Value) or computing(x.dtype) != computing(v.dtype):
            break
        v = x
    return v


def merged(dims) -> list:
    """(size, stride) of dimensions, innermost first, with those merged that lie after each other."""
    groups = []
    for n, stride in dims:
        if groups and (groups[-1][1] == 0 if stride == 0 else groups[-1][1] * groups[-1][0] == stride != 0):
            groups[-1] = (groups[-1][0] * n, groups[-1][1])
        else:
            groups.append((n, stride))
    return [] if len(groups) == 1 and groups[0][1] == 0 else groups


def _fits(part, whole) -> bool:
    return len(part) == len(whole) and all(is_one(a) or a == b for a, b in zip(part, whole))


def is_one(n):
    return isinstance(n, int) and n == 1


def widened(v):
    """A constant in its computing type."""
    return v.value.astype(computing(v.value.dtype))


def compute(step, xs) -> list:
    """The results of a step on operands in computing types, arrays or, if it is elementwise, scalars."""
    if step.name == "select":
        index, *cases = xs
        index = lax.clamp(np.asarray(0, index.dtype), index, np.asarray(len(cases) - 1, index.dtype))
        y = cases[-1]
        for k in reversed(range(len(cases) - 1)):
            y = jnp.where(index == k, cases[k], y)
        return [y]
    if step.name == "convert_element_type":
        (x,), to = xs, computing(step.result.dtype)
        if jnp.iscomplexobj(x) and not jnp.issubdtype(to, jnp.complexfloating):
            x = lax.real(x)
        return [lax.convert_element_type(x, to)]
    if step.name in _AS_WRITTEN:
        xs = [lax.convert_element_type(x, v.aval.dtype) for v, x in zip(step.operands, xs)]
    ys = compat.bind_equation(step.equation, *xs)
    return [lax.convert_element_type(y, computing(v.dtype)) for v, y in zip(step.results, ys)]
