"""What a row function does, read from its jaxpr.

    program = Program(closed, row=(0, 1), label="jaxkern.row_kernel: f")

A row function is elementwise along all dimensions but one, the row; along the row it reduces and broadcasts. `Program` inlines
the jaxpr and finds out which dimensions of all its arrays are the same (see _engines/jaxpr.py). Then every value is

    a row       it has the dimension of the row; one that has no other dimension is a column operand, the same in all rows
    a number    it has not: there is one for each row, or a single one

and has a stage, the number of reductions along the row that must be complete before it. Sums over the other dimensions come
last: what depends on them is the epilogue, which runs on their results.

Values of 16 bits are computed in float32 and rounded where they are stored, so conversions between the two do nothing, as in
XLA where it may use excess precision.
"""

import functools
import math

import jax
import numpy as np
from jax import lax

from jaxkern._core.cpp import Unsupported
from jaxkern._core.define import FLOAT8
from jaxkern._core.jaxprs import computing
from jaxkern._engines.jaxpr import (
    NOT_ELEMENTWISE,
    REDUCTIONS,
    RENAMED,
    Constant,
    Flat,
    Step,
    Value,
    axes_of,
    compute,
    is_one,
    merged,
    widened,
)
from jaxkern._engines.rows import reductions
from jaxkern._engines.rows.early import early_picks
from jaxkern._engines.rows.linear import split_sums
from jaxkern._engines.rows.picks import PICKS, REWRITTEN, of_one_element, of_parts, without_places


class Program(Flat):
    """See the module. row: (array, dimension) that is the row, or None; results are numbered after the operands.

    operands, results: Values; results may be Constants. steps: in order, those that the results need.
    row: the Dim of the row. others: the other Dims, slowest first. has_full: whether some array has all dimensions.

    Raises: Unsupported, naming the equation and the user's line.
    """

    otherwise = "which is neither elementwise, a reduction along the row nor a pick of one element of each row"

    def __init__(self, closed, row, label):
        if not all(isinstance(n, int) for v in closed.jaxpr.invars for n in v.aval.shape):
            raise Unsupported(f"{label}: symbolic shapes")
        self._parts = {}  # {Value: (parts, axis)} of arrays that were put together
        self._read(closed, label)
        self._unite()
        array, at = row or (0, 0)
        dims = [*self.operands, *self.results][array].dims if row else ()
        if not dims or dims[at] is None:
            raise Unsupported(f"{label}: the rows have one element")
        self._place(dims[at])
        self.row = dims[at].same()
        self._classify()
        while early_picks(self) or split_sums(self):
            self._classify()
        for step in self.steps:
            if step.name == "reduce":
                reductions.check(step, label, self.line(step))

    def computes(self, dtype, equation):
        """8-bit floats are results of the function: nothing is computed from them."""
        (to,) = (v.aval.dtype for v in equation.outvars[:1])
        converts = equation.primitive.name == "convert_element_type" and to == dtype and dtype.name in FLOAT8
        return converts or super().computes(dtype, equation)

    def rewritten(self, e, operands):
        name, of_index = e.primitive.name, ()
        if (
            name in REDUCTIONS
            and operands[0] in self._parts
            and axes_of(name, e.params) == (self._parts[operands[0]][1],)
        ):
            operands, rewrite = self._parts[operands[0]][0], of_parts
        elif name in NOT_ELEMENTWISE and all(is_one(e.invars[0].aval.shape[a]) for a in axes_of(name, e.params)):
            rewrite = of_one_element
        elif name in REWRITTEN:
            operands, *of_index = without_places(e, operands, self._parts, self.steps)
            rewrite = REWRITTEN[name]
        else:
            return None
        f = rewrite(e, [v.aval.shape for v in operands], *of_index)
        if f is None:
            self.fail(Step(name, operands, [], e, {}, tuple(self._calls), self._origin), self.otherwise)
        return operands, f

    def why(self, step) -> str:
        loop = "a loop, which row functions cannot have: write a Python loop over a fixed number of steps"
        return loop if step.name in ("scan", "while") else self.otherwise

    def _equation(self, e, operands):
        numbered = self._numbered(e, operands) if e.primitive.name == "reshape" else None
        if numbered is not None:
            return numbered
        results = super()._equation(e, operands)
        if e.primitive.name in ("concatenate", "stack"):
            axis = e.params["dimension" if e.primitive.name == "concatenate" else "axis"]
            self._parts[results[0]] = operands, axis
        return results

    def _numbered(self, e, operands):
        """The result of a reshape of indices to several dimensions, which they number in row-major order; None if e is no such."""
        (shape,), own = (v.aval.shape for v in e.outvars), operands[0].aval.shape
        made = next((s for s in reversed(self.steps) if operands[0] in s.results), None)
        if made is None or made.name != "iota" or len(own) > 1 or sum(not is_one(n) for n in shape) < 2:
            return None
        step = Step("ravel_index", [], [self._value(e.outvars[0].aval)], e, {}, tuple(self._calls), self._origin)
        self.steps.append(step)
        return step.results

    def _place(self, row):
        """Identifies dimensions that no operation relates: dimensions of constants, and of operands used separately.

        Two dimensions of one size may be one if no array has both. The dimensions of an array are matched with the dimensions
        of the largest array with the row, from the last dimension, or, without the row, from the first.
        """
        arrays = [*(self.operands[k] for k in self.used), *(v for v in self.results if isinstance(v, Value))]
        arrays.sort(key=lambda v: row not in v.dims)
        largest = max(arrays, key=lambda v: len(v.set()))
        values = list(dict.fromkeys((*arrays, *(v for step in self.steps for v in step.results))))
        for v in values:
            pairs = [*zip(v.dims[::-1], largest.dims[::-1])]
            others = [d for d in largest.dims if d is None or d.same() is not row.same()]
            pairs += zip(v.dims, others) if len(v.dims) <= len(others) else []
            for own, d in pairs:
                if own is None or d is None or own.size != d.size or own.same() is d.same():
                    continue
                if not any({own.same(), d.same()} <= {x.same() for x in w.set()} for w in values):
                    own.unite(d)
        for v in values:
            v.dims = tuple(d and d.same() for d in v.dims)

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
                if name in NOT_ELEMENTWISE or (step.origin and step.origin.primitive.name in PICKS):
                    self.fail(step, "along other dimensions than the row")
                summed = True
            elif over and summed:
                what = "a reduction along the row of a sum over other dimensions"
                self.fail(step, f"{what}: reduce along the axis of the row alone, with keepdims=True")
            for v in step.results:
                v.is_row, v.summed, v.stage = row in v.dims, summed, max(stage + along, step.stage)
        arrays = [*(self.operands[k] for k in self.used), *(s.result for s in self.steps)]
        dims = [d for v in arrays for d in v.dims if d not in (None, row)]
        full = max((v for v in arrays if v.is_row), key=lambda v: len(v.set()), default=None)
        order = [d for d in full.dims if d not in (None, row)] if full is not None else []
        missing = [d for d in dict.fromkeys(dims) if d not in order]
        self.others, self.has_full = (*missing, *order), not missing

    def _apart(self, step) -> list:
        """A reduction along the row and other dimensions as two, the row first."""
        if step.name == "ravel_index" and self.row in step.result.dims:
            self.fail(step, "which splits dimensions, the row among them")
        over = self.over(step)
        if self.row not in over or over == {self.row} or step.name in NOT_ELEMENTWISE:
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
            Step(step.name, [value], [between], e.replace(params=first), first, step.calls),
            Step(step.name, [between], step.results, e.replace(params=second), second, step.calls),
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


def groups_of_index(program, index) -> list:
    """How the index of a row becomes what `index`, {dimension: stride}, counts; as `groups`."""
    return merged((d.size, index.get(d, 0)) for d in reversed(program.others))


def adjacent(program, inner, views) -> int:
    """How many rows lie side by side in all of these arrays that have the dimension `inner`; 0 if they differ in their dimensions."""
    dims = [[d for d in v.dims if d is not None] for v in views]
    whole = next(own for own in dims if inner in own)
    at = whole.index(program.row)
    before, after = whole[:at], whole[at + 1 :]
    alike = all(own == whole if inner in own else not {*own} & {*after} for own in dims)
    return math.prod(d.size for d in after) if alike and [*before, *after] == [*program.others] else 0


def strides_of(value) -> list:
    """(dimension, stride) of an array whose elements are numbered in row-major order."""
    shape = value.aval.shape
    return [(d, math.prod(shape[d + 1 :])) for d in range(len(shape)) if value.dims[d] is not None]


# ---- what a program computes, on arrays and on scalars


def evaluate(program, steps, env, size=None, start=None, collective=None):
    """Computes `steps` on arrays in their computing types; env: {Value: array}, which grows.

    On parts of the arrays: size(dim) is the size of a dimension there, start(dim) where a part begins, or None for 0, and
    collective(step, results) completes a reduction.
    """
    sizes = lambda v: tuple(1 if d is None else d.size if size is None else size(d) for d in v.dims)
    for step in steps:
        xs = [widened(v) if isinstance(v, Constant) else env[v] for v in step.operands]
        name, params, out = step.name, step.params, step.result
        if name == "broadcast_in_dim":
            ys = [lax.broadcast_in_dim(xs[0], sizes(out), params["broadcast_dimensions"])]
        elif name in RENAMED:
            ys = [lax.reshape(xs[0], sizes(out))]
        elif name == "iota":
            ys = [_indices(out, params["dimension"], sizes(out), start)]
        elif name == "ravel_index":
            dtype = computing(out.dtype)
            parts = (_indices(out, d, sizes(out), start) * np.asarray(n).astype(dtype) for d, n in strides_of(out))
            ys = [functools.reduce(lax.add, parts)]
        else:
            ys = compute(step, xs)
        if collective is not None and program.over(step):
            ys = collective(step, ys)
        env.update(zip(step.results, ys))
    return env


def _indices(out, dimension, shape, start):
    y = lax.broadcasted_iota(computing(out.dtype), shape, dimension)
    along = out.dims[dimension]
    begin = start(along) if start is not None and along is not None else None
    return y if begin is None else y + begin.astype(y.dtype)
