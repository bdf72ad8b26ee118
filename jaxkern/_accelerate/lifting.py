"""A region of rows that reads a slice, computed for all rows of the array that the slice cuts; cuts.py says why.

`_Axes` finds which axis of each value of the region the slice shortens. `_Lift` writes the region's equations with that axis as
long as it is in the whole array, the equations that make arrays that the region reads longer, and those that drop rows of its results.
"""

import dataclasses

from jax import lax

from jaxkern._accelerate.cuts import Rows, padding, source, traced, typed
from jaxkern._accelerate.equations import PICKS, REDUCING, RENAMING, SAME, is_variable, variables
from jaxkern._core import compat_rewriting
from jaxkern._core.cpp import ELEMENTWISE


@dataclasses.dataclass
class Lifted:
    """A region that is computed for all rows.

    equations, operands, results, shape: of the region. before: equations that make operands. after: equations that make the results
    of the region as the program has them. gone: values of the program that nothing makes any more. padded: for each result
    that is a whole array of the program, that array, {result: the program's value}. extended: operands that are made longer.
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
