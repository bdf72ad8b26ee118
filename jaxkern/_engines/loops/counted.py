"""Reads and writes of a loop's body at indices that its steps count: they become xs and ys.

    found = find(jaxpr, consts, num_consts, num_carry, length, reverse, value)
    operands' = found.before(*operands)         of the scan of found.jaxpr, with found.num_carry carries
    results = found.after(operands, results')

A step of `lax.fori_loop(0, n, body, init)` reads `x[i]` from an array that the body closes over, and writes `out.at[i].set(y)` into
a carry. Where the first value of a counter is known, the indices of all steps are: they are computed here, in NumPy. So step i
reads element i of xs, and what it writes is element i of ys, which is the carry after the loop or, where other rows stay, is put
into it. A carry may be read where no step before has written, or as it was written some steps before: then the last rows that
were written are carries. Gradients of reads add rows to an array of zeros, and that to a carry. Gradients of writes read a row of a
carry, to which some steps before may have added, and set it to 0.

A carry that is used in another way stays one, and so do its reads and writes. Which rows a read or write takes is known for every
step or it stays too. Sums of gradients of several reads of one array are added in another order than in the loop.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from jaxkern._core import compat
from jaxkern._core.jaxprs import CALLS, CONTEXTS, called_jaxpr
from jaxkern._engines.loops.counted_reader import INDEXED, Reader, even
from jaxkern._engines.loops.program import NEVER

MOST_STEPS = 1 << 24  # the numbers of each step are listed on the host: 8 bytes for each integer of the body


@dataclasses.dataclass(frozen=True)
class Counted:
    """See the module. moved: {carry: its updates}. reads, updates: {equation: its Rows}. ys: {result of each step: its value}."""

    jaxpr: ClosedJaxpr
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    of: tuple  # num_carry of the loop as it was, and how many results it had
    moved: dict
    reads: dict
    updates: dict
    ys: dict

    def before(self, *operands) -> list:
        """The operands of the scan, from the operands of the loop."""
        first, last = self.num_consts, self.num_consts + self.of[0]
        kept = [x for k, x in enumerate(operands[first:last]) if k not in self.moved]
        late, xs = [], []
        for read in self.reads.values():
            x = operands[read.source]
            if not read.before:
                xs.append(_taken(x, read))
                row = [x.shape[a] for a in read.rest]
                late += [jnp.zeros(row, x.dtype) for _, d in read.late for _ in range(d)]
                continue
            steps = read.rows[::-1] if self.reverse else read.rows
            at = [int(steps[min(k, self.length - 1)]) for k in range(read.before)]
            late += [lax.index_in_dim(x, k, read.axis, False) for k in at]
        return [*operands[:first], *kept, *late, *operands[last:], *xs]

    def after(self, operands, results) -> list:
        """The results of the loop, from the results of the scan."""
        carry, count = self.of
        kept, ys = iter(results), iter(results[self.num_carry :])
        found = [None if k in self.moved else next(kept) for k in range(carry)]
        found += [self._known(self.ys[k]) if k in self.ys else next(ys) for k in range(count - carry)]
        put = dict(zip((path for path, u in self.updates.items() if not u.is_zero), ys))
        for k, updates in self.moved.items():
            x = operands[self.num_consts + k]
            for own, update in ((own, self.updates[own]) for own in updates):
                row = x.shape[: update.axis] + x.shape[update.axis + 1 :]
                x = _put(x, jnp.zeros((self.length, *row), x.dtype) if update.is_zero else put[own], update)
            found[k] = x
        return found

    def run(self, *operands) -> list:
        """The results of the loop, by `lax.scan`."""
        given, first, last = self.before(*operands), self.num_consts, self.num_consts + self.num_carry
        body = jaxpr_as_fun(self.jaxpr)

        def step(carry, xs):
            results = body(*given[:first], *carry, *xs)
            return results[: self.num_carry], results[self.num_carry :]

        carry, ys = lax.scan(step, given[first:last], given[last:], self.length, self.reverse)
        return self.after(operands, [*carry, *ys])

    def _known(self, value):
        columns = [lax.reshape(_listed(x), (len(x), 1)) for x in value.reshape(self.length, -1).T]
        return lax.reshape(lax.concatenate(columns, 1), value.shape)


def find(jaxpr, consts, num_consts, num_carry, length, reverse, value) -> Counted | None:
    """See the module. value: a function of the positions of operands that returns their value, a number or an array, or None.

    Returns None if no read or write of the body moves out of it.
    """
    if not all(isinstance(n, int) for n in (length, *(n for v in jaxpr.invars for n in v.aval.shape))):
        return None
    # No two steps read or write one row. So a loop with more steps than there are rows is not listed, however long it is.
    rows = max((n for v in jaxpr.invars[: num_consts + num_carry] for n in v.aval.shape), default=0)
    if not 0 < length <= min(rows, MOST_STEPS):
        return None
    equations = list(_equations(jaxpr))
    if any(map(_is_on_mesh, (*jaxpr.invars, *(v for e in equations for v in e.outvars)))):
        return None
    if any(map(_is_never, equations)) or not any(e.primitive.name in INDEXED for e in equations):
        return None
    blocked: set = set()
    while True:
        reader = Reader(jaxpr, num_consts, num_carry, length, reverse, value, blocked)
        count = len(blocked)
        reader.run_body()
        if len(blocked) == count:
            break
    if not reader.reads and not reader.updates:
        return None
    if len(jaxpr.invars) == num_consts + num_carry and len(reader.ys) == len(jaxpr.outvars) - num_carry:
        moves = [_run(r.rows) for r in (*reader.reads.values(), *reader.updates.values())]
        if moves.count(-1) > moves.count(1):  # the last step first: nothing is reversed
            reverse = not reverse
            back = lambda x: None if x is None else x[::-1]
            flipped = lambda kept: {k: r._replace(rows=back(r.rows), keep=back(r.keep)) for k, r in kept.items()}
            reader.reads, reader.updates = flipped(reader.reads), flipped(reader.updates)
    return _rewritten(jaxpr, consts, num_consts, num_carry, length, reverse, reader)


def _rewritten(jaxpr, consts, num_consts, num_carry, length, reverse, reader) -> Counted:
    """The scan that takes xs and returns ys."""
    reads, updates, moved = reader.reads, reader.updates, reader.moved
    avals = [v.aval for v in jaxpr.invars]
    late, xs = [], []
    for r in reads.values():
        of = avals[r.source]
        own = jax.core.ShapedArray([r.cut[a][1] if a in r.cut else of.shape[a] for a in r.rest], of.dtype)
        late += [own] * (r.before + sum(d for _, d in r.late))
        xs += [] if r.before else [own]
    first, last = num_consts, num_consts + num_carry
    kept = [k for k in range(num_carry) if k not in moved]
    latest = {k: own[0] for k, own in moved.items() if own}  # the only update of carries that are read late

    def body(*args):
        args = iter(args)
        take = lambda n: [next(args) for _ in range(n)]
        values = [*take(first), *(None if k in moved else next(args) for k in range(num_carry))]
        rows, given = take(len(late)), take(len(avals) - last)
        elements, registers = {}, []
        for path, r in reads.items():
            elements[path] = None if r.before else next(args)
            waits = [(latest[r.source - first], r.before)] if r.before else r.late
            for update, d in waits:
                own, rows = rows[:d], rows[d:]
                registers.append((update, own))
                elements[path] = own[0] if r.before else lax.add(elements[path], own[0])
        written: dict = {}
        results = _run_with(jaxpr, consts, [*values, *given], (), reader, elements, written)
        after = [row for update, own in registers for row in (*own[1:], written[update])]
        own = [results[k] for k in kept]
        ys = [y for k, y in enumerate(results[num_carry:]) if k not in reader.ys]
        return [*own, *after, *ys, *(written[path] for path, u in updates.items() if not u.is_zero)]

    operands = [*avals[:first], *(avals[first + k] for k in kept), *late, *avals[last:], *xs]
    closed = jax.make_jaxpr(body)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands))
    closed = compat.without_unused(closed)
    of = num_carry, len(jaxpr.outvars)
    return Counted(closed, num_consts, len(kept) + len(late), length, reverse, of, moved, reads, updates, reader.ys)


def _run_with(jaxpr, consts, args, path, reader, elements, written) -> list:
    """The results of a jaxpr in which reads are `elements`; sets the rows that its equations write. Arrays that moved are None."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args)))
    read = lambda v: v.val if isinstance(v, Literal) else env[v]
    for e in jaxpr.eqns:
        own, operands = (*path, id(e)), [read(v) for v in e.invars]
        if own in elements:
            x, shape = elements[own], e.outvars[0].aval.shape
            results = [x if x.ndim == len(shape) else lax.expand_dims(x, (reader.reads[own].place,))]
        elif own in reader.updates:
            x, axis = e.invars[0].aval, reader.updates[own].axis
            u = jnp.asarray(operands[1 if e.primitive.name == "dynamic_update_slice" else 2], x.dtype)
            written[own] = lax.squeeze(u, (axis,)) if u.ndim == x.ndim else u
            results = [None]
        elif own in reader.dropped:
            results = [None]
        elif e.primitive.name in CONTEXTS:
            results = operands
        elif e.primitive.name in CALLS:
            inner, inner_consts = called_jaxpr(e)
            results = _run_with(inner, inner_consts, operands, own, reader, elements, written)
        else:
            results = compat.bind_equation(e, *operands)
        env.update(zip(e.outvars, results))
    return [read(v) for v in jaxpr.outvars]


def _equations(jaxpr):
    """The equations of a jaxpr, and of functions that it calls."""
    for e in jaxpr.eqns:
        yield e
        if e.primitive.name in CALLS:
            yield from _equations(called_jaxpr(e)[0])


def _is_never(e) -> bool:
    """Whether no kernel of a loop has an equation, or it can only be traced where the axes of a mesh are known."""
    return e.primitive.name in NEVER and e.primitive.name not in INDEXED or "axis_name" in e.params


def _is_on_mesh(v) -> bool:
    """Whether the type of a variable names a mesh with explicit axes. The arrays that are put together here have no such types."""
    mesh = v.aval.sharding.mesh if isinstance(v.aval, jax.core.ShapedArray) else None
    return mesh is not None and jax.sharding.AxisType.Explicit in (mesh.axis_types or ())


def _run(rows) -> int:
    """1 or -1 if rows follow each other, up or down; 0 if not."""
    by = np.diff(rows)
    return next((k for k in (1, -1) if np.all(by == k)), 0)


def _listed(numbers):
    """A vector of known numbers, in as few operations as there are."""
    if not even(numbers):
        return jnp.asarray(numbers)
    first, by = numbers[0], np.diff(numbers[:2])[0] if len(numbers) > 1 else 1
    counted = lax.iota(numbers.dtype, len(numbers))
    counted = counted if by == 1 else lax.mul(counted, lax.full_like(counted, by))
    return lax.add(counted, lax.full_like(counted, first)) if first else counted


def _rows_of(x, rows, axis):
    """Known rows of x along an axis."""
    run = _run(rows)
    if not run:
        return jnp.take(x, _listed(rows.astype(np.int32)), axis, mode="clip")
    low = int(rows.min())
    x = x if len(rows) == x.shape[axis] else lax.slice_in_dim(x, low, low + len(rows), axis=axis)
    return lax.rev(x, (axis,)) if run < 0 else x


def _taken(x, read):
    """The rows of x that steps read, in front."""
    axis, rows = read.axis, read.rows
    for a, (start, size) in read.cut.items():
        x = lax.slice_in_dim(x, start, start + size, axis=a)
    x = _rows_of(x, rows, axis)
    order = axis, *read.rest
    return x if list(order) == sorted(order) else lax.transpose(x, order)


def _put(x, ys, update):
    """x after each step has set one row of it to an element of ys, or has added it there. No two steps have the same row."""
    axis, rows = update.axis, update.rows
    if update.keep is not None:
        stay = np.flatnonzero(update.keep)
        if not len(stay):
            return x
        rows, ys = rows[stay], _rows_of(ys, stay, 0)
    run = _run(rows)
    ys = ys if axis == 0 else lax.transpose(ys, (*range(1, axis + 1), 0, *range(axis + 1, x.ndim)))
    if not run:
        at = x.at[(*[slice(None)] * axis, _listed(rows.astype(np.int32)))]
        put = at.add if update.adds else at.set
        return put(ys, mode="promise_in_bounds", unique_indices=True)
    low, n = int(rows.min()), len(rows)
    ys = lax.rev(ys, (axis,)) if run < 0 else ys
    if update.adds:
        ys = lax.add(x if n == x.shape[axis] else lax.slice_in_dim(x, low, low + n, axis=axis), ys)
    return ys if n == x.shape[axis] else lax.dynamic_update_slice_in_dim(x, ys, low, axis)
