"""Which rows of arrays a loop's body reads and writes in each step, where a counter says it: what counted.py moves out of the body.

    reader = Reader(jaxpr, num_consts, num_carry, length, reverse, value, blocked)
    reader.run_body()                           adds to `blocked` what must stay in the body, and has to be run again if it does

Integers that depend on counters of known first value, on known operands and on known xs alone are computed for all steps (known.py).
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jaxkern._core.jaxprs import CALLS, CONTEXTS, called_jaxpr
from jaxkern._engines.loops import indexing, known, rewrites

MOST_LISTED = 1 << 14  # indices that a program lists; more than these count evenly
MOST_COLUMNS = 8  # numbers of an index that is returned for each step
MOST_BEFORE = 4  # steps back to which a body may read rows that it wrote
INDEXED = (*indexing.READS, *indexing.WRITES)
_ADD = ("add", "add_any")


class _Array(typing.NamedTuple):
    """An operand of the loop, in which equations have put rows, or which is transposed.

    source: its position, None of zeros. updates: the equations. order: the axes of the operand, if not in their order.
    """

    source: int | None
    updates: tuple = ()
    order: tuple = ()


_ZEROS = _Array(None)


class Rows(typing.NamedTuple):
    """What an equation reads or writes. rows: at each step.

    rest: the axes of the source that a row has, as they are read; cut: {axis: (start, size)} of those that are sliced. place: the axis
    among them. before: how many steps before a row was written; 0 is before the loop. late: (update that
    adds rows, how many steps before) of those that had added to a row. is_zero: zeros are written. keep: which rows stay added.
    """

    source: int | None
    axis: int
    rows: np.ndarray
    rest: tuple = ()
    cut: dict = {}
    place: int = 0
    adds: bool = False
    before: int = 0
    late: tuple = ()
    is_zero: bool = False
    keep: np.ndarray | None = None


class Reader:
    """What a body reads and writes where. Equations have as names the path of equations that lead to them.

    A value is the array of its numbers in all steps where these are known, an _Array, or None. blocked: carries and equations that stay as
    they are; what is used otherwise is added to it.
    """

    def __init__(self, jaxpr, num_consts, num_carry, length, reverse, value, blocked):
        self.jaxpr, self.num_consts, self.num_carry, self.length = jaxpr, num_consts, num_carry, length
        self.reverse, self.value, self.blocked = reverse, value, blocked
        self.reads, self.updates, self.dropped, self.moved, self.ys = {}, {}, set(), {}, {}

    def run_body(self):
        first, values = self.num_consts, []
        for k, v in enumerate(self.jaxpr.invars):
            value = self._number(k, v)
            is_array = v.aval.ndim and not jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)
            if value is None and is_array and k < first + self.num_carry and k not in self.blocked:
                value = _Array(k)
            values.append(value)
        results = self._run(self.jaxpr, [None] * len(self.jaxpr.constvars), values, ())
        for k, value in enumerate(results):
            own = first + k if k < self.num_carry else None
            is_own = isinstance(value, _Array) and own is not None and value.source == own and not value.order
            if not is_own:
                self._used(value)
                if own is not None and isinstance(values[own], _Array):
                    self.blocked.add(own)
            elif own not in self.blocked:
                self.moved[k] = value.updates
            is_known = own is None and isinstance(value, np.ndarray) and value.dtype != np.bool_
            if is_known and 0 < value[0].size <= MOST_COLUMNS and all(map(even, value.reshape(self.length, -1).T)):
                self.ys[k - self.num_carry] = value
        put = [path for updates in self.moved.values() for path in updates]
        self.blocked.update(path for path in put if put.count(path) > 1)  # what stays of it differs between carries
        for k, updates in self.moved.items():
            if first + k not in self.blocked and not self._is_known(first + k, updates):
                self.blocked.add(first + k)

    def _number(self, k, v):
        """The value of an operand of the body in all steps, if it is an integer that is known."""
        if not known.is_whole(v):
            return None
        if k >= self.num_consts + self.num_carry:
            found = self.value(k)
            return None if found is None else np.broadcast_to(found, (self.length, *v.aval.shape))
        out = None if k < self.num_consts else self.jaxpr.outvars[k - self.num_consts]
        first = None if v.aval.shape else self.value(k)
        if first is None:
            return None
        first = np.full(self.length, first, v.aval.dtype)
        if out is None or out is v:
            return first
        by = rewrites.increment(self.jaxpr, k, k - self.num_consts)
        if by is None:
            return None
        steps = np.arange(self.length)[:: -1 if self.reverse else 1]
        return first + (steps * by).astype(v.aval.dtype)

    def _is_known(self, k, updates) -> bool:
        """Whether a carry needs no place in memory that steps read and write; sets what of it is read and what stays."""
        own, shape = {path: self.updates[path] for path in updates}, self.jaxpr.invars[k].aval.shape
        if not own:
            return True
        axis, *others = {r.axis for r in own.values()}
        added, put = ([r.rows for r in own.values() if r.adds == adds] for adds in (True, False))
        if others or not all(map(_differ, [*added, *(put and [np.concatenate(put)])])):
            return False
        when = {path: self._when(r, shape[axis]) for path, r in own.items()}
        is_set = np.min([np.full(shape[axis], self.length), *(when[p] for p, r in own.items() if not r.adds)], 0)
        for path, r in own.items():
            if r.adds:
                added, stays = when[path][r.rows], is_set[r.rows] == self.length
                if np.any(added == is_set[r.rows]):
                    return False
                stays |= added > is_set[r.rows]
                self.updates[path] = r._replace(keep=None if np.all(stays) else stays)
        self.moved[k - self.num_consts] = tuple(sorted(updates, key=lambda path: own[path].adds))
        reads = [path for path, read in self.reads.items() if read.source == k]
        return all(self._is_read(path, own, when, is_set, axis) for path in reads)

    def _when(self, update, n):
        """The step that writes each of n rows, `length` if none does."""
        when = np.full(n, self.length)
        when[update.rows] = np.arange(self.length)[:: -1 if self.reverse else 1]
        return when

    def _is_read(self, path, own, when, is_set, axis) -> bool:
        """Whether the rows of a carry that an equation reads are known before the loop, or from some steps before; sets from which."""
        read, steps = self.reads[path], np.arange(self.length)
        if read.axis != axis:
            return False
        if list(read.rest) != sorted(read.rest) or read.cut:  # none that is written before
            return bool(np.all(np.min(list(when.values()), 0)[read.rows] >= self._order(steps)))
        rows, late = self._order(read.rows), []
        if np.any(is_set[rows] < steps):
            if len(own) > 1:
                return False
            found = _steps_before(is_set[rows], steps)
            self.reads[path] = read._replace(before=found)
            return found > 0
        for update, r in own.items():
            if r.adds and np.any(when[update][rows] < steps):
                late.append((update, _steps_before(when[update][rows], steps)))
        self.reads[path] = read._replace(late=tuple(sorted(late, key=lambda own: -own[1])))
        return all(d for _, d in late)

    def _order(self, positions):
        """What belongs to positions in xs, in the order of steps; and the other way around."""
        return positions[::-1] if self.reverse else positions

    def _run(self, jaxpr, consts, args, path) -> list:
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args)))
        read = lambda v: self._literal(v) if isinstance(v, Literal) else env.get(v)
        for e in jaxpr.eqns:
            found = self._equation(e, [read(v) for v in e.invars], (*path, id(e)))
            env.update(zip(e.outvars, found))
        return [read(v) for v in jaxpr.outvars]

    def _literal(self, v):
        if not known.is_whole(v):
            return None
        return np.broadcast_to(np.asarray(v.val, v.aval.dtype), (self.length, *v.aval.shape))

    def _equation(self, e, values, path) -> list:
        name, none = e.primitive.name, [None] * len(e.outvars)
        if name in CONTEXTS:
            return values
        if name in CALLS:
            jaxpr, consts = called_jaxpr(e)
            return self._run(jaxpr, [None] * len(consts), values, path)
        if name == "broadcast_in_dim" and e.outvars[0].aval.ndim and (_is_zero(e.invars[0]) or _is_zeros(values[0])):
            return [_ZEROS]
        arrays = [v for v in values if isinstance(v, _Array)]
        if not arrays:
            return [known.number(e, values)] if len(none) == 1 else none
        if isinstance(values[0], _Array) and path not in self.blocked:
            found = self._indexed(e, values, path)
            if found is not None:
                return found
        if name in _ADD and len(arrays) == 2 and path not in self.blocked:
            a, b = arrays
            is_sum = None in (a.source, b.source) and not any(_is_zeros(x) or x.order for x in arrays)
            if is_sum:
                self.dropped.add(path)
                return [_Array(b.source if a.source is None else a.source, (*a.updates, *b.updates))]
        if name == "transpose" and arrays[0].source is not None and not arrays[0].updates:
            x, order = arrays[0], tuple(map(int, e.params["permutation"]))
            if x.source >= self.num_consts:
                self.dropped.add(path)
            return [_Array(x.source, (), tuple(x.order[a] for a in order) if x.order else order)]
        for v in arrays:
            self._used(v)
        return none

    def _indexed(self, e, values, path):
        """The result of an equation that reads or writes at known indices; None if it does not."""
        name, x = e.primitive.name, values[0]
        if name not in INDEXED or indexing.applies(e):
            return None
        place = _place(e, values)
        if place is None:
            return None
        for v in values[1:]:
            self._used(v)
        axis, rows, cut = place
        if not even(rows) and self.length > MOST_LISTED:
            return None
        if name in indexing.READS:
            if x.updates or x.source is None or self.length > e.invars[0].aval.shape[axis]:
                return None
            order = x.order or tuple(range(e.invars[0].aval.ndim))
            rest = tuple(a for k, a in enumerate(order) if k != axis)
            cut = {order[k]: own for k, own in cut.items()}
            self.reads[path] = Rows(x.source, order[axis], rows, rest, cut, axis)
            return [None]
        adds = name == "scatter-add" or x.source is None
        if adds and name != "scatter-add" and x.updates:
            return None
        if x.order or not adds and x.source < self.num_consts:
            return None
        is_zero = _is_zeros(values[1 if name == "dynamic_update_slice" else 2])
        self.updates[path] = Rows(x.source, axis, rows, adds=adds, is_zero=is_zero)
        return [_Array(x.source, (*x.updates, path))]

    def _used(self, value):
        """An array is used as a whole."""
        if isinstance(value, _Array):
            self.blocked.update(value.updates)
            if value.source is not None and value.source >= self.num_consts:
                self.blocked.add(value.source)


def _differ(rows) -> bool:
    """Whether no two numbers are equal."""
    return bool(np.all(np.diff(np.sort(rows, kind="stable"))))  # which takes runs as they are


def _steps_before(written, steps) -> int:
    """How many steps before a row was written, in every step that reads one that was written; 0 if that differs."""
    is_late = lambda d: (
        np.array_equal(written < steps, steps >= d) and np.array_equal(written[d:], steps[: len(steps) - d])
    )
    return next((d for d in range(1, MOST_BEFORE + 1) if d <= len(steps) and is_late(d)), 0)


def _is_zero(v) -> bool:
    """Whether a value is the floating-point number 0, and is not -0."""
    is_number = isinstance(v, Literal) and jnp.issubdtype(v.aval.dtype, jnp.floating)
    return is_number and v.val == 0 and not np.signbit(v.val)


def _is_zeros(value) -> bool:
    return isinstance(value, _Array) and value == _ZEROS


def _place(e, values):
    """(axis, rows, cut): the one element along an axis that an equation reads or writes, in every step; None if that is not known.

    cut: {axis: (start, size)} of other axes that are sliced.
    """
    name, shape = e.primitive.name, e.invars[0].aval.shape
    if name.startswith("dynamic"):
        sizes = e.params["slice_sizes"] if name == "dynamic_slice" else e.invars[1].aval.shape
        starts = values[len(values) - len(shape) :]
        moving = [a for a, n in enumerate(sizes) if n != shape[a]]
        if any(not isinstance(starts[a], np.ndarray) for a in moving):
            return None
        starts = {a: _clipped(starts[a], shape[a], sizes[a]) for a in moving}
        counted = [a for a in moving if np.any(starts[a] != starts[a][0])]
        if len(counted) != 1 or sizes[counted[0]] != 1 or len(moving) > 1 and name != "dynamic_slice":
            return None
        (axis,) = counted
        return axis, starts[axis], {a: (int(starts[a][0]), sizes[a]) for a in moving if a != axis}
    dims = e.params["dimension_numbers"]
    if e.invars[1].aval.ndim != 1 or dims.operand_batching_dims or not isinstance(values[1], np.ndarray):
        return None
    axis, sizes = indexing.axis(e), indexing.window_sizes(e)
    if axis is None or any(n != (1 if a == axis else shape[a]) for a, n in enumerate(sizes)):
        return None
    single = dims.collapsed_slice_dims if name == "gather" else dims.inserted_window_dims
    if not set(single) <= {axis}:
        return None
    index = values[1][:, indexing.counted_axes(e).index(axis)]
    rows = _clipped(index, shape[axis])
    if e.params["mode"] != lax.GatherScatterMode.CLIP and not np.array_equal(rows, index):
        return None
    if name == "gather" and np.all(rows == rows[0]):
        return None
    return int(axis), rows, {}


def _clipped(index, n, size=1):
    if index.dtype.kind == "u":
        index = np.minimum(index.astype(np.uint64), np.uint64(n))
    return np.clip(index.astype(np.int64), 0, n - size)


def even(rows) -> bool:
    """Whether numbers count evenly."""
    by = np.diff(rows)
    return bool(np.all(by == by[:1]))
