"""Regions of rows that read a slice of an array, as regions that read the whole array.

A loss of `logits[:, :-1]` leaves out the last of T rows of each sequence. XLA reads such a slice where it lies, but a kernel needs its
operand in memory: the slice would be copied in front of it, and the zeros that the slice's gradient is padded with would be a copy
behind it. So the region is computed for all rows instead: the slice is left out, arrays that the region reads beside it get a row of
zeros for each row that was left out, and such rows of the results are dropped. Where a result is padded with zeros to the size of the
whole array, the region writes the whole array, with zeros in these rows whatever it computes there, and the padding is left out.

The rows in question lie along another dimension than the row, and are cut out of it by unit strides. Nothing but a sum goes over
them: it takes zeros there.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxkern._accelerate.equations import PICKS, REDUCING, RENAMING, SAME, is_variable, size_of, variables
from jaxkern._core import compat_rewriting
from jaxkern._core.cpp import ELEMENTWISE

MOST_CHAINED = 32  # equations between a slice and the region, or between the region and a padding


@dataclasses.dataclass(frozen=True)
class Cut:
    """Which part of a whole array's elements a slice keeps, in row-major order.

    The whole array has the shape (outer, whole, inner); the slice keeps (outer, size, inner) of it, from `start` on.
    """

    outer: int
    whole: int
    inner: int
    start: int
    size: int

    def of_axis(self, shape, row):
        """(axis, repeats, inner) of a region with this shape and rows along the axis `row`: its axis that the slice shortens has
        repeats * size * inner elements. None if there is no such axis, or if it is the row.
        """
        for axis, n in enumerate(shape):
            before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
            if self.outer % before or self.inner % after or n == 1:
                continue
            repeats, inner = self.outer // before, self.inner // after
            if n == repeats * self.size * inner:
                return None if axis == row else (axis, repeats, inner)
        return None


@dataclasses.dataclass(frozen=True)
class Rows:
    """The axis of a region's arrays that a cut shortens: it has repeats * size * inner elements. See `Cut.of_axis`."""

    cut: Cut
    repeats: int
    inner: int

    def longer(self, shape, axis):
        n = self.repeats * self.cut.whole * self.inner
        return tuple(n if k == axis else size for k, size in enumerate(shape))

    def _parts(self, shape, axis, size):
        """(shape, axis of it) in which the rows that the cut keeps are a span of an axis."""
        if self.repeats * self.inner == 1:
            return shape, axis
        return (*shape[:axis], self.repeats, size, self.inner, *shape[axis + 1 :]), axis + 1

    def extended(self, x, axis, fill=0):
        """x with a number, 0 by default, along an axis, in the rows that the cut leaves out."""
        cut, (shape, at) = self.cut, self._parts(x.shape, axis, self.cut.size)
        config = [(0, 0, 0)] * len(shape)
        config[at] = (cut.start, cut.whole - cut.start - cut.size, 0)
        y = lax.pad(lax.reshape(x, shape), np.asarray(fill, x.dtype), config)
        return lax.reshape(y, self.longer(x.shape, axis))

    def shortened(self, y, axis):
        """y without the rows that the cut leaves out."""
        cut, (shape, at) = self.cut, self._parts(y.shape, axis, self.cut.whole)
        kept = lax.slice_in_dim(lax.reshape(y, shape), cut.start, cut.start + cut.size, axis=at)
        n = self.repeats * cut.size * self.inner
        return lax.reshape(kept, (*y.shape[:axis], n, *y.shape[axis + 1 :]))

    def masked(self, y, axis):
        """y with zeros along an axis, in the rows that the cut leaves out."""
        cut = self.cut
        place = lax.broadcasted_iota(np.int32, [n if k == axis else 1 for k, n in enumerate(y.shape)], axis)
        if self.inner > 1:
            place = lax.div(place, np.int32(self.inner))
        if self.repeats > 1:
            place = lax.rem(place, np.int32(cut.whole))
        first, last = lax.ge(place, np.int32(cut.start)), lax.lt(place, np.int32(cut.start + cut.size))
        kept = last if not cut.start else first if cut.start + cut.size == cut.whole else lax.bitwise_and(first, last)
        kept = lax.broadcast_in_dim(kept, y.shape, range(y.ndim))
        return lax.select(kept, y, lax.broadcast(np.zeros((), y.dtype), y.shape))


@dataclasses.dataclass
class Lifted:
    """A region that is computed for all rows.

    equations, operands, results, shape: of the region. before: equations that make operands. after: equations that make the results
    of the region as the program has them. gone: values of the program that nothing makes any more. padded: those of `results` that are
    whole arrays of the program, {result: the program's value}. extended: operands that are made longer.
    """

    equations: list
    operands: list
    results: list
    shape: tuple
    before: list
    after: list
    gone: set
    padded: dict
    extended: list


def cuts_of(region, operands, made) -> list:
    """The cuts by which arrays of rows that a region reads were made, with the axis of the region that each shortens."""
    found = {}
    for v in operands:
        cut = source(v, made)[0] if region.is_row(v) else None
        along = cut and cut.of_axis(region.shape, region.axis)
        if along:
            found[cut] = along
    return list(found.items())


def source(v, made):
    """(cut, array, types): the slice that makes v, the array that it cuts, and the types that this is converted to, first to last.

    made: {value: the equation that makes it}. (None, v, []) if v is no slice.
    """
    cut, types, x, found = None, [], v, v
    for _ in range(MOST_CHAINED):
        e = made.get(x)
        if e is None:
            break
        name = e.primitive.name
        if name == "slice" and cut is None:
            cut = _cut(e.invars[0].aval.shape, e.params)
            if cut is None:
                return None, v, []
        elif name == "convert_element_type" and _is_wider(e.invars[0], e.outvars[0]):
            types.insert(0, e.params)
        elif not (name in RENAMING and size_of(e.invars[0]) == size_of(x) and _keeps_order(e)):
            break
        if not is_variable(e.invars[0]) or not compat_rewriting.runs_anywhere(e):
            break
        x = e.invars[0]
        found = found if name in RENAMING else x
    return (cut, found, types) if cut is not None else (None, v, [])


def _is_wider(x, y) -> bool:
    real = lambda v: jnp.issubdtype(v.aval.dtype, jnp.floating)
    return real(x) and real(y) and x.aval.dtype.itemsize < y.aval.dtype.itemsize


def _keeps_order(e) -> bool:
    """Whether an equation that gives an array another shape keeps the order of its elements."""
    if e.primitive.name == "broadcast_in_dim":
        dims = tuple(e.params["broadcast_dimensions"])
        return len(e.invars) == 1 and tuple(sorted(dims)) == dims
    return e.params.get("dimensions") is None or e.primitive.name != "reshape"


def _cut(shape, params):
    """The cut of a slice with unit strides that shortens one axis to several elements; None for others."""
    starts, limits, strides = params["start_indices"], params["limit_indices"], params["strides"]
    short = [k for k, n in enumerate(shape) if limits[k] - starts[k] != n]
    if len(short) != 1 or (strides is not None and set(strides) != {1}):
        return None
    (k,) = short
    return _cut_along(shape, k, starts[k], limits[k] - starts[k])


def _cut_along(shape, k, start, size):
    sizes = (math.prod(shape[:k]), shape[k], math.prod(shape[k + 1 :]), start, size)
    return Cut(*map(int, sizes)) if _are_numbers(sizes) and size > 1 else None


def _are_numbers(sizes) -> bool:
    """Whether none of these sizes is symbolic."""
    return all(isinstance(n, int | np.integer) for n in sizes)


def lifted(region, equations, operands, cut, along, made, reader):
    """The region, with these equations and operands, computed for all rows of the array that `cut` shortens; None if it cannot be.

    along: what `Cut.of_axis` returns for it. made: {value: the equation of the program that makes it}. reader: a function that returns the
    only equation that reads a value, and that no region contains; None if there is no such one.
    """
    if any(s for v in operands for s in v.aval.sharding.spec):  # split over devices
        return None
    try:
        return _Lift(region, equations, cut, along).run(operands, made, reader)
    except _Left:
        return None


class _Left(Exception):
    """A region is not lifted."""


class _Lift:
    def __init__(self, region, equations, cut, along):
        self.region, self.cut = region, cut
        self.axis, *sizes = along
        self.rows = Rows(cut, *sizes)
        self.equations = equations
        self.like = region.reductions[0]
        self.shape = self.rows.longer(region.shape, self.axis)
        self.axes = _Axes(equations, region, self.axis)
        self.new: dict = {}  # {value: its longer one}
        self.made: list = []  # the equations of the lifted region

    def run(self, operands, made, reader) -> Lifted:
        before, own, extended = [], [], []
        for v in operands:
            axis = self.axes.of(v)
            cut, x, types = source(v, made) if self.region.is_row(v) else (None, v, [])
            if axis is None:
                own.append(v)
            elif cut == self.cut:
                whole = x
                if x.aval.shape != self.shape:
                    (whole,) = traced(before, self.like, lambda x: lax.reshape(x, self.shape), x)
                own.append(whole)
                for params in types:
                    out = compat_rewriting.new_variable(typed(whole.aval, self.shape, params["new_dtype"]))
                    self.made.append(
                        compat_rewriting.new_equation(self.like, lax.convert_element_type_p, [whole], [out], params)
                    )
                    whole = out
                self.new[v] = whole
            else:
                (self.new[v],) = traced(before, self.like, lambda x, axis=axis: self.rows.extended(x, axis), v)
                own.append(self.new[v])
                extended.append(self.new[v])
        for e in self.equations:
            self._lift(e)
        results, after, gone, padded = [], [], set(), {}
        for v in self.region.results:
            if self.axes.of(v) is None:
                results.append(v)
                continue
            chain = padding(v, self.cut, reader, made) if self.region.is_row(v) else None
            if chain is None:
                results.append(self.new[v])
                axis = self.axes.of(v)
                traced(after, self.like, lambda y, axis=axis: self.rows.shortened(y, axis), self.new[v], into=v)
                continue
            last = chain[-1].outvars[0]
            gone.update(e.outvars[0] for e in chain)
            types = [e.params for e in chain if e.primitive.name == "convert_element_type"]

            def masked(y, types=types, last=last):
                y = self.rows.masked(y, self.axis)
                for params in types:
                    y = lax.convert_element_type(y, params["new_dtype"])
                return y.astype(last.aval.dtype)

            renamed = last.aval.shape != self.shape
            (whole,) = traced(self.made, self.like, masked, self.new[v], into=None if renamed else last)
            results.append(whole)
            padded[whole] = last
            if renamed:
                traced(after, self.like, lambda y, last=last: lax.reshape(y, last.aval.shape), whole, into=last)
        own = list(dict.fromkeys(own))
        return Lifted(self.made, own, results, self.shape, before, after, gone, padded, extended)

    # ---- equations

    def _lift(self, e):
        (out,) = e.outvars
        name, params, axis = e.primitive.name, e.params, self.axes.of(out)
        operands = [self.new.get(v, v) if is_variable(v) else v for v in e.invars]
        if name in REDUCING and (along := self.axes.of(e.invars[0])) in params["axes"]:
            if name != "reduce_sum":
                raise _Left
            operands = traced(self.made, e, lambda y: self.rows.masked(y, along), *operands)
        if axis is not None:
            if name in ("broadcast_in_dim", "iota"):
                if (
                    name == "iota"
                    and params["dimension"] == axis
                    and (self.cut.start or self.rows.repeats * self.rows.inner > 1)
                ):
                    raise _Left
                params = params | {"shape": self.rows.longer(params["shape"], axis)}
            elif name == "reshape":
                params = params | {"new_sizes": self.rows.longer(params["new_sizes"], axis)}
            self.new[out] = compat_rewriting.new_variable(
                typed(out.aval, self.rows.longer(out.aval.shape, axis), out.aval.dtype)
            )
        if name == "gather" and (at := self.axes.of(e.invars[0])) is not None and params["slice_sizes"][at] > 1:
            params = params | {"slice_sizes": self.rows.longer(params["slice_sizes"], at)}
        self.made.append(e.replace(invars=operands, outvars=[self.new.get(out, out)], params=params))


def padding(v, cut, reader, made):
    """The equations that pad a value with zeros to the size of the whole array, and nothing else; None if there are none.

    reader, made: as for `lifted`.
    """
    chain, shape, pads = [], v.aval.shape, 0
    while len(chain) < MOST_CHAINED:
        e = reader(v)
        if e is None or not compat_rewriting.runs_anywhere(e):
            break
        name, (out,) = e.primitive.name, e.outvars
        if name == "pad" and not pads:
            config, zero = e.params["padding_config"], e.invars[1]
            at = [k for k, own in enumerate(config) if any(own)]
            if len(at) != 1 or not _is_zero(zero, made) or config[at[0]][2]:
                break
            (k,) = at
            low, high, _ = config[k]
            if not _are_numbers((shape[k], low, high)) or low < 0 or high < 0:
                break
            whole = int(shape[k] + low + high)
            if _cut_along((*shape[:k], whole, *shape[k + 1 :]), k, int(low), shape[k]) != cut:
                break
            pads = len(chain) + 1
        elif name == "convert_element_type" and _is_wider(out, e.invars[0]):
            pads += bool(pads)
        elif name in RENAMING and size_of(out) == size_of(v) and _keeps_order(e):
            pads += bool(pads)
        else:
            break
        chain.append(e)
        v, shape = out, out.aval.shape
    return chain[:pads] if pads else None


def _is_zero(v, made) -> bool:
    """Whether a number is known to be 0, and not -0."""
    if not is_variable(v):
        return str(float(v.val)) == "0.0"
    e = made.get(v)
    return e is not None and e.primitive.name in ("convert_element_type", *RENAMING) and _is_zero(e.invars[0], made)


class _Axes:
    """Which axis of each value of a region is the one that a slice shortens."""

    def __init__(self, equations, region, axis):
        self.parent: dict = {}
        rows = [v for e in equations for v in (*variables(e), *e.outvars) if region.is_row(v)]
        for v in rows:
            for k in range(len(region.shape)):
                self._unite((v, k), (rows[0], k))
        for e in equations:
            self._relate(e)
        self.found: dict = {}
        root = self._root((rows[0], axis))
        for v, k in list(self.parent):
            if self._root((v, k)) == root and v.aval.shape[k] != 1:
                if self.found.setdefault(v, k) != k:
                    raise _Left
        for e in equations:
            if e.primitive.name in PICKS:
                self._check_pick(e)

    def of(self, v):
        return self.found.get(v) if is_variable(v) else None

    def _root(self, node):
        while self.parent.setdefault(node, node) != node:
            self.parent[node] = node = self.parent[self.parent[node]]
        return node

    def _unite(self, a, b):
        self.parent[self._root(a)] = self._root(b)

    def _relate(self, e):
        name, (out,) = e.primitive.name, e.outvars
        operands = [v for v in variables(e) if v.aval.shape]
        for v in (*operands, out):
            for k in range(len(v.aval.shape)):
                self._root((v, k))
        if name == "iota":
            return
        if name == "broadcast_in_dim":
            for v in operands[:1]:
                self._pairs(v, range(v.aval.ndim), out, e.params["broadcast_dimensions"])
        elif name in RENAMING:
            real = lambda v: [k for k, n in enumerate(v.aval.shape) if n != 1]
            for v in operands[:1]:
                if [v.aval.shape[k] for k in real(v)] != [out.aval.shape[k] for k in real(out)]:
                    raise _Left
                self._pairs(v, real(v), out, real(out))
        elif name in REDUCING:
            for v in operands[:1]:
                rest = [k for k in range(v.aval.ndim) if k not in e.params["axes"]]
                self._pairs(v, rest, out, range(len(rest)))
        elif name in PICKS:
            self._pick(e)
        elif name in ELEMENTWISE or name in SAME:
            for v in operands:
                self._pairs(v, range(v.aval.ndim), out, range(v.aval.ndim))
        else:
            raise _Left

    def _pairs(self, v, axes, out, own):
        for k, at in zip(axes, own):
            if v.aval.shape[k] == out.aval.shape[at]:
                self._unite((v, int(k)), (out, int(at)))

    def _pick(self, e):
        numbers, gathers = e.params["dimension_numbers"], e.primitive.name == "gather"
        x, index, *updates = e.invars
        small, (out,) = (updates or e.outvars)[0], e.outvars
        windows = numbers.offset_dims if gathers else numbers.update_window_dims
        absent = {*(numbers.collapsed_slice_dims if gathers else numbers.inserted_window_dims), *_batching(numbers)}
        places = range(index.aval.ndim - 1)
        if not all(map(is_variable, (x, index, small))):
            raise _Left
        self._pairs(x, _batching(numbers), index, _batching_of_indices(numbers))
        self._pairs(index, places, small, [k for k in range(small.aval.ndim) if k not in windows])
        self._pairs(x, [k for k in range(x.aval.ndim) if k not in absent], small, windows)
        if not gathers:
            self._pairs(x, range(x.aval.ndim), out, range(x.aval.ndim))

    def _check_pick(self, e):
        """Raises where a pick of an element is along the axis."""
        x, _, *updates = e.invars
        at, small = self.of(x), (updates or e.outvars)[0]
        if at is not None and (at in _indexed(e) or self.of(small) is None):
            raise _Left


def _batching(numbers):
    return tuple(getattr(numbers, "operand_batching_dims", ()))


def _batching_of_indices(numbers):
    name = "start_indices_batching_dims" if hasattr(numbers, "offset_dims") else "scatter_indices_batching_dims"
    return tuple(getattr(numbers, name, ()))


def _indexed(e):
    numbers = e.params["dimension_numbers"]
    return numbers.start_index_map if e.primitive.name == "gather" else numbers.scatter_dims_to_operand_dims


def typed(aval, shape, dtype):
    """The type of an array where one of the type `aval` is."""
    whole = NamedSharding(aval.sharding.mesh, PartitionSpec(*(None for _ in shape)))
    return aval.update(shape=tuple(shape), dtype=np.dtype(dtype), weak_type=False, sharding=whole)


def traced(equations, like, f, *operands, into=None) -> list:
    """The results of f, a function in lax of these values; appends its equations, which have the line of `like`, to `equations`.

    into: the value that the result of f is.
    """
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        closed = jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in operands))
    jaxpr = closed.jaxpr
    names = dict(zip(jaxpr.invars, operands))
    read = lambda v: names.get(v, v) if is_variable(v) else v
    (result,) = jaxpr.outvars
    for e in jaxpr.eqns:
        for v in e.outvars:
            names[v] = compat_rewriting.new_variable(typed(operands[0].aval, v.aval.shape, v.aval.dtype))
        if into is not None and result in e.outvars:
            names[result] = into
        equations.append(
            e.replace(
                invars=list(map(read, e.invars)), outvars=list(map(read, e.outvars)), source_info=like.source_info
            )
        )
    return [read(result)]
