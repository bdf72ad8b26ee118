"""What a row function does, read from its jaxpr.

    program = Program(closed, row=(0, 1), label="jaxkern.row_kernel: f")

A row function is elementwise along all dimensions but one, the row; along the row it reduces and broadcasts. `Program` inlines
the jaxpr and finds out which dimensions of all its arrays are the same: operands of an elementwise operation share their
dimensions, a broadcast adds some, a reduction takes some away. Dimensions of size 1 are no dimensions. Then every value is

    a row       it has the dimension of the row; one that has no other dimension is a column operand, the same in all rows
    a number    it has not: there is one for each row, or a single one

and has a stage, the number of reductions along the row that must be complete before it. Sums over the other dimensions come
last: what depends on them is the epilogue, which runs on their results.

Values of 16 bits are computed in float32 and rounded where they are stored, so conversions between the two do nothing, as in
XLA where it may use excess precision.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jaxkern._core import compat
from jaxkern._core.define import CUDA_TYPES, references
from jaxkern._core.functor import ELEMENTWISE, Unsupported
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
    """An array of the jaxpr. dims: a `Dim` for each dimension, None for those of size 1."""

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

    calls: the equations that call the jaxpr it is in, outermost first.
    """

    name: str
    operands: list
    results: list
    equation: object
    params: dict
    calls: tuple = ()

    @property
    def result(self) -> Value:
        return self.results[0]


# Operations that move no data between elements, under which dimensions are kept in their order.
_RENAMED = ("reshape", "squeeze", "expand_dims")
_SAME = ("copy", "copy_p", "stop_gradient", "optimization_barrier", "name", "pvary", "pcast", "reshard", "mesh_cast")
_SAME += ("sharding_constraint", "tie")
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
# Operations that are done in the types of the jaxpr, whose bits they show or whose own jaxpr names them.
_AS_WRITTEN = ("bitcast_convert_type", "nextafter", "reduce")


class Program:
    """See the module. row: (array, dimension) that is the row, or None; results are numbered after the operands.

    operands, results: Values; results may be Constants. steps: in order, those that the results need.
    row: the Dim of the row. others: the other Dims, slowest first.

    Raises: Unsupported, naming the equation and the user's line.
    """

    def __init__(self, closed, row, label):
        self.label, self.steps, self._calls = label, [], []
        self.operands = [self._value(v.aval) for v in closed.jaxpr.invars]
        self.results = self._inline(closed.jaxpr, [Constant(np.asarray(c)) for c in closed.consts], self.operands)
        self._remove_unused()
        self._unite()
        array, at = row or (0, 0)
        dims = [*self.operands, *self.results][array].dims if row else ()
        self.row = dims[at] if dims else None
        if self.row is None:
            raise Unsupported(f"{label}: the rows have one element")
        self._classify()

    # ---- reading the jaxpr

    def _value(self, aval):
        return Value(aval, tuple(None if _is_one(n) else Dim(n) for n in aval.shape))

    def fail(self, step, what):
        e = step.equation
        line = next(filter(None, map(compat.source_line, (e, *reversed(step.calls)))), "")
        raise Unsupported(f"{self.label} uses {e.primitive.name}{' at ' + line if line else ''}, {what}")

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
            results = self._inline(inner, [Constant(np.asarray(c)) for c in consts], operands)
            self._calls.pop()
            return results
        if references.get(e.primitive) is not None:
            reference = references[e.primitive]
            return self._of_rows(e, operands, lambda e: lambda *xs: jax.tree.leaves(reference(*xs, **e.params)))
        if name == "cond":
            return self._cond(e, operands)
        if name in ("empty", "empty2"):  # where a branch of `cond` leaves no residual
            return self._of_rows(
                e, operands, lambda e: lambda: [jnp.zeros(v.aval.shape, v.aval.dtype) for v in e.outvars]
            )
        if name in _PICKS:
            return self._of_rows(e, operands, _PICKS[name])
        if name in _SAME:
            return operands if len(operands) == len(e.outvars) else operands[-1:]
        results = [self._value(v.aval) for v in e.outvars]
        step = Step(name, operands, results, e, dict(e.params), tuple(self._calls))
        for v in (*operands, *results):
            if v.aval.dtype.name not in CUDA_TYPES:
                self.fail(step, f"and kernels have no arithmetic of {v.aval.dtype}")
        self.steps.append(step)
        return step.results

    def _of_rows(self, e, operands, rewrite):
        """What `rewrite(equation)` returns, a function in jnp, in place of the equation."""
        f = rewrite(e)
        if f is None:
            self.fail(
                Step(e.primitive.name, operands, [], e, {}, tuple(self._calls)),
                "which is no pick of one element of each row",
            )
        closed = jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in e.invars))
        return self._inline(closed.jaxpr, [Constant(np.asarray(c)) for c in closed.consts], operands)

    def _cond(self, e, operands):
        """All branches, then a selection: they have no side effects."""
        index, *operands = operands
        branches = [
            self._inline(b.jaxpr, [Constant(np.asarray(c)) for c in b.consts], operands) for b in e.params["branches"]
        ]
        if index.aval.shape:
            raise Unsupported(f"{self.label} uses cond with an index of shape {index.aval.shape}")
        results = [self._value(v.aval) for v in e.outvars]
        for result, *cases in zip(results, *branches):
            self.steps.append(Step("select", [index, *cases], [result], e, {}))
        return results

    def _remove_unused(self):
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
            self._unite_step(step)
        values = {v for s in self.steps for v in (*s.operands, *s.results)}.union(self.operands)
        for v in values:
            if isinstance(v, Value):
                v.dims = tuple(d and d.same() for d in v.dims)
        for step in self.steps:
            for v in step.results:
                if len(v.set()) < sum(d is not None for d in v.dims):
                    self.fail(step, "whose result has two dimensions that must be equal elsewhere")

    def _unite_step(self, step):
        name, out, params = step.name, step.result, step.params
        unite = lambda pairs: [a.unite(b) for a, b in pairs if a is not None and b is not None]
        arrays = [v for v in step.operands if v.aval.shape]
        if name == "broadcast_in_dim":
            own = step.operands[0].dims
            unite((a, out.dims[at]) for a, at in zip(own, params["broadcast_dimensions"]))
        elif name in _RENAMED:
            a, b = ([d for d in v.dims if d is not None] for v in (step.operands[0], out))
            if [d.size for d in a] != [d.size for d in b]:
                self.fail(step, "which merges or splits dimensions")
            unite(zip(a, b))
        elif name == "transpose":
            unite((step.operands[0].dims[p], d) for p, d in zip(params["permutation"], out.dims))
        elif name in REDUCTIONS:
            gone = set(params["axes"] if name != "reduce" else params["dimensions"])
            for x in arrays:
                unite(zip((d for k, d in enumerate(x.dims) if k not in gone), out.dims))
                unite(zip(arrays[0].dims, x.dims))
            for y in step.results[1:]:
                unite(zip(out.dims, y.dims))
        elif name == "iota":
            pass
        else:
            fits = all(_fits(v.aval.shape, out.aval.shape) for v in arrays)
            if name not in (*ELEMENTWISE, "select") or not fits:
                self.fail(step, "which is neither elementwise nor a reduction along the row")
            for x in arrays:
                unite(zip(x.dims, out.dims))

    # ---- rows, numbers and stages

    def _classify(self):
        row = self.row
        for v in self.operands:
            v.is_row = row in v.dims
        self.steps = [part for step in self.steps for part in self._apart(step)]
        for step in self.steps:
            name = step.name
            stage = max((v.stage for v in step.operands), default=0)
            summed = any(v.summed for v in step.operands)
            over = self.over(step)
            along = row in over
            if over - {row}:
                if name not in REDUCTIONS or name in ("argmax", "argmin", "reduce"):
                    self.fail(step, "along other dimensions than the row")
                summed = True
            elif over and summed:
                self.fail(step, "a reduction along the row of what was summed over other dimensions")
            for v in step.results:
                v.is_row, v.summed, v.stage = row in v.dims, summed, stage + along
        arrays = [*(self.operands[k] for k in self.used), *(s.result for s in self.steps)]
        dims = [d for v in arrays for d in v.dims if d not in (None, row)]
        full = max((v for v in arrays if v.is_row), key=lambda v: len(v.set()), default=None)
        order = [d for d in full.dims if d not in (None, row)] if full is not None else []
        missing = [d for d in dict.fromkeys(dims) if d not in order]
        if missing:
            raise Unsupported(f"{self.label}: no array has all dimensions of the others, so there are no rows")
        self.others = tuple(order)

    def _apart(self, step) -> list:
        """A reduction along the row and other dimensions as two, the row first."""
        over = self.over(step)
        if self.row not in over or over == {self.row} or step.name in ("argmax", "argmin", "reduce"):
            return [step]
        value = step.operands[0]
        at = value.dims.index(self.row)
        dims = value.dims[:at] + value.dims[at + 1 :]
        shape = value.aval.shape[:at] + value.aval.shape[at + 1 :]
        between = Value(jax.core.ShapedArray(shape, step.result.dtype), dims)
        rest = tuple(a - (a > at) for a in step.params["axes"] if a != at)
        first, second = ({**step.params, "axes": axes} for axes in ((at,), rest))
        e = step.equation
        return [
            Step(step.name, [value], [between], e.replace(params=first), first),
            Step(step.name, [between], step.results, e.replace(params=second), second),
        ]

    def groups(self, value) -> list:
        """How the index of a row becomes the offset of an array's row: (size, stride) of dimensions, innermost first.

        Adjacent dimensions that the array has, or lacks, are one; an array that lacks all has no groups.
        """
        strides, stride = {}, 1
        for d in reversed(value.dims):
            if d is not None:
                strides[d] = stride
                stride *= d.size
        return merged((d.size, strides.get(d, 0)) for d in reversed(self.others))

    def over(self, step) -> frozenset:
        """The Dims that a step reduces."""
        if step.name not in REDUCTIONS:
            return frozenset()
        axes = step.params["axes"] if step.name != "reduce" else step.params["dimensions"]
        return frozenset(step.operands[0].dims[a] for a in axes) - {None}


def merged(dims) -> list:
    """(size, stride) of dimensions, innermost first, with those merged that lie behind each other."""
    groups = []
    for n, stride in dims:
        if groups and (groups[-1][1] == 0 if stride == 0 else groups[-1][1] * groups[-1][0] == stride != 0):
            groups[-1] = (groups[-1][0] * n, groups[-1][1])
        else:
            groups.append((n, stride))
    return [] if len(groups) == 1 and groups[0][1] == 0 else groups


def _fits(part, whole) -> bool:
    return len(part) == len(whole) and all(_is_one(a) or a == b for a, b in zip(part, whole))


def _is_one(n):
    return isinstance(n, int) and n == 1


# ---- picks of one element of each row, as reductions


def _gather(e):
    """`lax.gather` as a sum along the row, if it is what `jnp.take_along_axis` writes for one element of each row."""
    numbers, mode = e.params["dimension_numbers"], e.params["mode"]
    along = _picked(e, numbers, numbers.start_index_map, "start_indices_batching_dims")
    if along is None or any(n != 1 for n in e.params["slice_sizes"]):
        return None
    fill = e.params["fill_value"]

    def pick(x, index):
        n, out = x.shape[along], e.outvars[0].aval
        index = index.reshape(*x.shape[:along], 1, *x.shape[along + 1 :])
        at = jnp.clip(index, 0, n - 1) if mode == lax.GatherScatterMode.CLIP else index
        hit = lax.broadcasted_iota(index.dtype, x.shape, along) == at
        if x.dtype == jnp.bool_:
            y = jnp.any(hit & x, along, keepdims=True)
        else:
            y = lax.reduce(jnp.where(hit, x, 0), np.zeros((), x.dtype), lax.add, (along,))
        y = y.reshape(index.shape)
        if mode == lax.GatherScatterMode.FILL_OR_DROP and fill is not None:
            y = jnp.where((index >= 0) & (index < n), y, np.asarray(fill, x.dtype))
        return [y.reshape(out.shape)]

    return pick


def _scatter(e):
    """`lax.scatter_add` of one number to each row, the derivative of a pick."""
    numbers = e.params["dimension_numbers"]
    along = _picked(e, numbers, numbers.scatter_dims_to_operand_dims, "scatter_indices_batching_dims")
    if along is None or numbers.update_window_dims:
        return None

    def place(x, index, update):
        one = (*x.shape[:along], 1, *x.shape[along + 1 :])
        index, update = index.reshape(one), update.reshape(one)
        if e.params["mode"] == lax.GatherScatterMode.CLIP:
            index = jnp.clip(index, 0, x.shape[along] - 1)
        return [x + jnp.where(lax.broadcasted_iota(index.dtype, x.shape, along) == index, update, 0)]

    return place


_PICKS = {"gather": _gather, "scatter-add": _scatter, "scatter_add": _scatter}


def _picked(e, numbers, indexed, batching):
    """The dimension in which each row has one index; None if there is no such dimension."""
    x, index = e.invars[0].aval, e.invars[1].aval
    batch, of_index = tuple(getattr(numbers, "operand_batching_dims", ())), tuple(getattr(numbers, batching, ()))
    rest = [n for k, n in enumerate(index.shape) if k not in of_index]
    if (
        len(indexed) != 1
        or any(n != 1 for n in rest)
        or list(batch) != sorted(batch)
        or list(of_index) != sorted(of_index)
    ):
        return None
    along = indexed[0]
    return along if all(k in batch or k == along or x.shape[k] == 1 for k in range(x.ndim)) else None


# ---- what a program computes, on arrays and on scalars


def widened(v):
    """A constant in its computing type."""
    return v.value.astype(computing(v.value.dtype))


def evaluate(program, steps, env, size=None, start=None, collective=None):
    """Computes `steps` on arrays in their computing types; env: {Value: array}, which grows.

    On parts of the arrays: size(dim) is the size of a dimension there, start(dim) where a part begins, and
    collective(step, results) completes a reduction.
    """
    sizes = lambda v: tuple(1 if d is None else d.size if size is None else size(d) for d in v.dims)
    for step in steps:
        xs = [widened(v) if isinstance(v, Constant) else env[v] for v in step.operands]
        name, params, out = step.name, step.params, step.result
        if name == "broadcast_in_dim":
            ys = [lax.broadcast_in_dim(xs[0], sizes(out), params["broadcast_dimensions"])]
        elif name in _RENAMED:
            ys = [lax.reshape(xs[0], sizes(out))]
        elif name == "iota":
            y = lax.broadcasted_iota(computing(out.dtype), sizes(out), params["dimension"])
            along = out.dims[params["dimension"]]
            ys = [y if start is None or along is None else y + start(along).astype(y.dtype)]
        else:
            ys = compute(step, xs)
        if collective is not None and program.over(step):
            ys = collective(step, ys)
        env.update(zip(step.results, ys))
    return env


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
        return [lax.convert_element_type(xs[0], computing(step.result.dtype))]
    if step.name in _AS_WRITTEN:
        xs = [lax.convert_element_type(x, v.aval.dtype) for v, x in zip(step.operands, xs)]
    ys = compat.bind_equation(step.equation, *xs)
    return [lax.convert_element_type(y, computing(v.dtype)) for v, y in zip(step.results, ys)]
