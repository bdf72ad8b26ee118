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

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkern._core.functor import Unsupported
from jaxkern._core.jaxprs import computing
from jaxkern._engines.jaxpr import (
    REDUCTIONS,
    RENAMED,
    Constant,
    Flat,
    Step,
    Value,
    compute,
    merged,
    widened,
)


class Program(Flat):
    """See the module. row: (array, dimension) that is the row, or None; results are numbered after the operands.

    operands, results: Values; results may be Constants. steps: in order, those that the results need.
    row: the Dim of the row. others: the other Dims, slowest first.

    Raises: Unsupported, naming the equation and the user's line.
    """

    otherwise = "which is neither elementwise nor a reduction along the row"

    def __init__(self, closed, row, label):
        self.picks = _PICKS
        self._read(closed, label)
        self._unite()
        array, at = row or (0, 0)
        dims = [*self.operands, *self.results][array].dims if row else ()
        self.row = dims[at] if dims else None
        if self.row is None:
            raise Unsupported(f"{label}: the rows have one element")
        self._classify()

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
        elif name in RENAMED:
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
