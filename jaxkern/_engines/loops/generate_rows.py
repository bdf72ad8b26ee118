"""From the body of a scan with rows to C++: the struct `F` that ffi/kernels/loops/row_loops.cuh takes.

    core = RowCore(program)                     what the kernel reads and writes
    core.writer(Layout(32, 1, 128), 96 * 1024)  the struct, its index maps and the bytes of shared memory of a block

Each nest of row_nests.py becomes a loop over the elements that a thread owns, with a loop over the rows that it reduces inside.
Values with rows that other threads read are written to shared memory, too.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from jaxkern._core.jaxprs import computing
from jaxkern._engines.jaxpr import Constant, Value, merged
from jaxkern._engines.loops import row_nests
from jaxkern._engines.loops.row_writer import Writer


@dataclasses.dataclass(eq=False)
class Array:
    """An array in memory, of one step. dims: a Dim of the lanes, or None; sizes: of its dimensions; rows: axes that are rows.

    order, length: see generate.Array.
    """

    dims: tuple
    sizes: tuple
    dtype: np.dtype
    rows: tuple
    order: tuple = ()
    length: int = 1

    def _distances(self) -> dict:
        """{dimension: distance of two elements along it}; 0 is the dimension of steps, the others follow."""
        found, stride, sizes = {}, 1, (self.length, *self.sizes)
        for axis in reversed(self.order or range(len(sizes))):
            found[axis], stride = stride, stride * sizes[axis]
        return found

    @property
    def strides(self) -> tuple:
        found = self._distances()
        return tuple(found[a + 1] for a in range(len(self.sizes)))

    @property
    def step(self) -> int:
        """The distance of two steps."""
        return self._distances()[0]

    @property
    def size_of_rows(self) -> int:
        return math.prod(self.sizes[a] for a in self.rows)

    def groups(self, lanes) -> list:
        """The index map of the lanes."""
        own = {d: s for a, (d, s) in enumerate(zip(self.dims, self.strides)) if d is not None and a not in self.rows}
        return merged((d.size, own.get(d, 0)) for d in reversed(lanes))


class RowCore:
    """What the kernel reads and writes; compare generate.Core.

    consts, xs: positions of the operands that it reads. carries, ys: the arrays that it writes. per_block: positions of
    accumulators that are matrices: the teams of a block have one in common. blocks: of the grid, set by the plan. orders, length: see
    generate.Core.
    """

    def __init__(self, program, orders=None, length=1):
        self.program, self.orders, self.length, self.blocks = program, orders or {}, length, 1
        first_x = program.num_consts + program.num_carry
        self.consts = [k for k in program.used if k < program.num_consts]
        self.xs = [k for k in program.used if k >= first_x]
        self.body, self.nests = row_nests.find(program)
        self.sums = program.accumulators | program.sums
        self.per_block = [k for k in program.accumulators if len(program.axes(program.carries[k])) > 1]
        every = frozenset(program.dims)
        self.alone = any(program.accumulators[k] != every or program.lanes(program.carries[k]) for k in self.per_block)
        self.finals = [self._final(v) for v in program.results]
        self.every_nest = [*self.nests, *(f for f in self.finals if isinstance(f, row_nests.Nest))]
        results = [self._written(k, v) for k, v in enumerate(program.results)]
        self.carries, self.ys = results[: program.num_carry], results[program.num_carry :]

    def _final(self, v):
        """The leaf that a result of the scan is, or the nest that computes it."""
        program, body = self.program, self.body
        if isinstance(v, Constant):
            return body.finish(row_nests.Nest([v], [(v, {})], ()))
        index = body.own_index(v)
        found, at = body.resolve(v, index)
        if found in body.stored:
            return found, tuple(at[a] for a in program.axes(found))
        return body.finish(row_nests.Nest([v], [(v, index)], program.sizes(v)))

    def _array(self, v, place=None) -> Array:
        """place: of an operand or, after them, of a result, among `orders`."""
        if isinstance(v, Constant):
            return Array((), (), np.dtype(v.aval.dtype), ())
        order = self.orders.get(place, ())
        return Array(v.dims, tuple(v.aval.shape), v.dtype, self.program.axes(v), order, self.length)

    @property
    def inits(self) -> list:
        return self.program.inits

    def operand(self, k) -> Array:
        return self._array(self.program.operands[k], k)

    def _written(self, k, v) -> Array:
        p = self.program
        if k not in self.sums:
            return self._array(v, len(p.operands) + k) if k >= p.num_carry else self._array(p.carries[k])
        lanes = tuple(d for d in p.dims if d in self.sums[k])
        sizes = tuple(d.size for d in lanes)
        rows = p.sizes(v)
        axes = tuple(range(len(lanes), len(lanes) + len(rows)))
        return Array((*lanes, *(None for _ in rows)), (*sizes, *rows), computing(v.dtype), axes)

    def shapes(self, length) -> list:
        """(shape, dtype) of each array that the kernel writes."""
        found = []
        for k, a in enumerate((*self.carries, *self.ys)):
            shape = (length, *a.sizes) if k >= len(self.carries) else a.sizes
            shape = tuple(shape[axis] for axis in a.order) or shape
            if k in self.per_block and not self.alone:
                shape = (self.blocks, *(a.sizes[at] for at in a.rows))
            found.append((shape, a.dtype))
        return found

    def after(self, arrays, inits, avals) -> list:
        """The results of the scan; see generate.Core."""
        p, found = self.program, []
        for k, (y, a, aval) in enumerate(zip(arrays, (*self.carries, *self.ys), avals, strict=True)):
            y = jnp.transpose(y, np.argsort(a.order)) if a.order else y
            if k in self.sums:
                v, step = p.results[k], int(k >= p.num_carry)
                own, lanes = p.lanes(v), [d for d in a.dims if d is not None]
                if k in self.per_block and not self.alone:
                    y = jnp.sum(y, 0)
                else:
                    y = jnp.sum(y, [step + at for at, d in enumerate(lanes) if d not in own])
                # Its lanes come before its rows; the result has them in its own order.
                order = [*(d for d in lanes if d in own)]
                rows = iter(range(len(order), y.ndim - step))
                place = [order.index(d) if d in own else next(rows) for d in v.dims if d is not None]
                y = jnp.transpose(y, [*range(step), *(step + at for at in place)])
                y = y if step else inits[k] + y.reshape(aval.shape)
            found.append(y.reshape(aval.shape).astype(aval.dtype))
        return found

    @property
    def size(self) -> int:
        """Statements of a step."""
        return sum(nest.function.size for nest in self.every_nest)

    def rows(self) -> list:
        """The sizes of the rows whose elements threads own."""
        p = self.program
        values = [v for v in (*p.operands, *(v for n in self.nests for v in n.values)) if isinstance(v, Value)]
        owned = [n.over[0] for n in self.nests if n.over and not n.out]
        return [*(p.sizes(v)[0] for v in values if len(p.sizes(v)) == 1), *owned]

    def writer(self, layout, shared) -> Writer:
        return Writer(self, layout, shared)
