"""Regions of rows in a jaxpr: equations that one kernel of the row engine may compute.

    equations, regions = find(equations, results, least=1 << 16)

A region has the shape of an array and an axis of it, the row. Its equations make arrays of this shape element by element, reduce
them along the row, compute with the numbers of each row, and sum over the other axes at the end. A region is convex, and so are
all of them together: no value leaves a region and comes back, by way of other equations or other regions. What depends on what
among regions is kept as bits, so the search is one walk over the equations.

Values that a region would read from another one are computed again where that reads no more: what JAX saves for the backward pass
is made from what the forward pass read. So are small arrays, such as masks of indices and scales in another type.
"""

import collections
import dataclasses
import math

from jaxkern._accelerate.copies import Copies
from jaxkern._accelerate.equations import (
    CHEAP,
    DTYPES,
    PICKS,
    REDUCING,
    RENAMING,
    SAME,
    is_renamed,
    is_variable,
    size_of,
    variables,
)
from jaxkern._core import compat_rewriting
from jaxkern._core.cpp import ELEMENTWISE

MOST_EQUATIONS = 256  # of a region
MOST_ROWS = 8  # arrays of its shape that a region reads


@dataclasses.dataclass(eq=False)
class Region:
    """shape, axis: of its rows. equations: what it computes, in order, with copies of equations of other regions.

    made: the results of its own equations. operands, results: what it reads, and what of `made` others read.
    """

    shape: tuple
    axis: int
    equations: list
    made: set
    operands: list = dataclasses.field(default_factory=list)
    results: list = dataclasses.field(default_factory=list)

    def is_row(self, v) -> bool:
        return v.aval.shape == self.shape

    @property
    def reductions(self) -> list:
        return [e for e in self.equations if reduces(e) == (self.shape, (self.axis,))]

    @property
    def named(self):
        """The equation whose line of source stands for the region."""
        return next(iter(self.reductions), self.equations[-1])


def reduces(e):
    """(shape, axes) of a reduction, or None."""
    return (e.invars[0].aval.shape, tuple(e.params["axes"])) if e.primitive.name in REDUCING else None


def reduces_rows(e, least) -> bool:
    """Whether an equation reduces an array of at least so many elements along one of several dimensions."""
    found = reduces(e)
    if found is None or len(found[1]) != 1 or len(found[0]) < 2 or set(map(type, found[0])) != {int}:
        return False
    (shape, (axis,)), size = found, math.prod(found[0])
    return size >= least and 1 < shape[axis] < size


def row_axes(equations, least) -> dict:
    """{shape: axes} of arrays of at least so many elements that are reduced along one axis: the last, or the most frequent.

    Other axes follow if something else than a sum is computed along them, as in Sinkhorn's algorithm. A sum along another axis may
    be the gradient of a scale, which is a part of a region of the first axis.
    """
    counts, others = collections.Counter(), set()
    for e in equations:
        found = reduces(e)
        if found and len(found[1]) == 1 and len(found[0]) > 1 and all(isinstance(n, int) for n in found[0]):
            shape, (axis,) = found
            if reduces_rows(e, least):
                counts[shape, axis] += 1
            others.update([(shape, axis)] if e.primitive.name != "reduce_sum" else ())
    best: dict = {}
    for (shape, axis), _ in sorted(counts.items(), key=lambda item: (item[0][1] != len(item[0][0]) - 1, -item[1])):
        if shape not in best or (shape, axis) in others:
            best[shape] = (*best.get(shape, ()), axis)
    return best


def _wanted(rows, equations) -> dict:
    """{value: the axes along which arrays that are computed from it, element by element, are reduced} where rows have several."""
    found: dict = {}
    several = {shape for shape, axes in rows.items() if len(axes) > 1}
    for e in reversed(equations) if several else ():
        reduced = reduces(e)
        if reduced is not None and reduced[0] in several and is_variable(e.invars[0]):
            found.setdefault(e.invars[0], set()).update(reduced[1] if len(reduced[1]) == 1 else ())
        elif len(e.outvars) == 1 and e.primitive.name in (*ELEMENTWISE, *SAME) and e.outvars[0] in found:
            for v in variables(e):
                if v.aval.shape == e.outvars[0].aval.shape:
                    found.setdefault(v, set()).update(found[e.outvars[0]])
    return found


class _Search:
    """The walk over equations. Groups are numbered; merged ones are found by `root`, and have the bits of all their members."""

    def __init__(self, rows, equations):
        self.rows = rows
        self.wanted = _wanted(rows, equations)
        self.parent, self.bits, self.above, self.below = [], [], [], []
        self.shape, self.members, self.reads = [], [], []
        self.axis = []  # of the rows of each group; None: no reduction has decided it
        self.group = {}  # {value: a group whose equation made it}
        self.direct = {}  # {value: bits of the groups that it depends on, but for what these depend on}
        self.effects = 0  # bits of the groups that equations with effects depend on
        self.reader = {}  # {value: the last group that reads it as rows}

    def root(self, g) -> int:
        while self.parent[g] != g:
            self.parent[g] = g = self.parent[self.parent[g]]
        return g

    def closure(self, mask) -> int:
        found = 0
        while mask:
            g = self.root(mask.bit_length() - 1)
            found |= self.bits[g] | self.above[g]
            mask &= ~found
        return found

    def new(self, shape) -> int:
        g = len(self.parent)
        self.parent.append(g)
        for values, first in (
            (self.bits, 1 << g),
            (self.above, 0),
            (self.below, False),
            (self.shape, shape),
            (self.members, []),
            (self.reads, set()),
            (self.axis, None),
        ):
            values.append(first)
        return g

    def merge(self, g, other) -> int:
        if g == other:
            return g
        self.parent[other] = g
        self.bits[g] |= self.bits[other]
        self.above[g] |= self.above[other]
        self.below[g] |= self.below[other]
        self.members[g] += self.members[other]
        self.reads[g] |= self.reads[other]
        self.axis[g] = self.axis[other] if self.axis[g] is None else self.axis[g]
        if self.below[g]:  # what depends on one of both depends on all that the other depends on
            for k, own in enumerate(self.parent):
                if own == k and self.above[k] & self.bits[g]:
                    self.above[k] |= self.above[g]
        return g

    def axis_of(self, g) -> int:
        return self.rows[self.shape[g]][0] if self.axis[g] is None else self.axis[g]

    def shape_of(self, e):
        """(shape of the rows that an equation belongs to, whether it may begin a region, their axis if it says one), or None."""
        name = e.primitive.name
        if (
            e.effects
            or len(e.outvars) != 1
            or compat_rewriting.is_dropped(e.outvars[0])
            or not compat_rewriting.runs_anywhere(e)
        ):
            return None
        out = e.outvars[0].aval
        if not all(getattr(v.aval, "dtype", None) in DTYPES for v in (*e.invars, *e.outvars)):
            return None
        of_number = self._of_number(e)
        if of_number is not None:
            g = of_number
            return self.shape[g], False, self.axis_of(g)
        if name in REDUCING:
            return self._of_reduction(e, *reduces(e))
        if name in PICKS:
            shape, picked = e.invars[0].aval.shape, e.outvars[0] if name == "gather" else e.invars[2]
            if shape in self.rows and size_of(picked) * shape[self.rows[shape][0]] == math.prod(shape):
                return shape, True, self.rows[shape][0]
            return None
        if out.shape not in self.rows:
            return None
        elementwise = name in ELEMENTWISE or name in SAME
        axes = self.wanted.get(e.outvars[0], ())
        axis = min(axes) if len(axes) == 1 else None
        return (out.shape, True, axis) if elementwise or name in ("broadcast_in_dim", "iota") else None

    def _of_reduction(self, e, shape, axes):
        """As `shape_of`, of a reduction of an array of this shape along some axes."""
        if shape not in self.rows:
            return None
        sums, own = e.primitive.name == "reduce_sum", self.group.get(e.invars[0])
        own = None if own is None or self.shape[self.root(own)] != shape else self.axis[self.root(own)]
        first, *others = self.rows[shape]
        if axes == (first,) or (len(axes) == 1 and axes[0] in others and (not sums or own == axes[0])):
            return shape, True, axes[0]
        axis = first if own is None else own
        rest = tuple(k for k in range(len(shape)) if k != axis)
        return (shape, False, axis) if sums and axes in (rest, tuple(range(len(shape)))) else None

    def _of_number(self, e):
        """The group of the rows whose numbers an equation computes with, or None. It made one of its operands."""
        name, out = e.primitive.name, e.outvars[0].aval.shape
        if set(map(type, out)) - {int}:
            return None
        renames = name in RENAMING or name in REDUCING
        if name not in CHEAP and not renames:
            return None
        for v in variables(e):
            g = self.root(self.group[v]) if v in self.group else None
            if g is None or self.shape[g] in (v.aval.shape, out):
                continue
            if math.prod(out) * self.shape[g][self.axis_of(g)] > math.prod(self.shape[g]):
                continue  # more numbers than rows
            if not renames or is_renamed(v.aval.shape, out):
                return g
        return None

    def add(self, i, e):
        found, operands = self.shape_of(e), variables(e)
        if found is None:
            self._leave(e)
            return
        shape, begins, axis = found
        roots = {v: self.root(self.group[v]) for v in operands if v in self.group}
        near = [g for g in roots.values() if self.shape[g] == shape]
        rows = [v for v in operands if v.aval.shape == shape]
        if begins:
            near += [g for v in rows if v in self.reader for g in [self.root(self.reader[v])] if self.shape[g] == shape]
        joined: list = []
        for g in dict.fromkeys(near):
            fits = axis is None or self.axis[g] in (None, axis)
            if fits and self._merges([*joined, g], operands, roots):
                joined.append(g)
                axis = self.axis[g] if axis is None else axis
        if not joined and not begins:
            self._leave(e)
            return
        g = joined[0] if joined else self.new(shape)
        for other in joined[1:]:
            g = self.merge(g, other)
        self.axis[g] = axis
        self.members[g].append(i)
        outside = 0
        for v in operands:
            if v not in self.group or self.root(self.group[v]) != g:
                outside |= self.direct.get(v, 0)
        self._depend(g, outside)
        for v in rows:
            self.reader[v] = g
            if v not in self.group or self.root(self.group[v]) != g:
                self.reads[g].add(v)
        (out,) = e.outvars
        self.direct[out] = 1 << g
        if not reduces(e) or reduces(e)[1] == (self.axis_of(g),):
            self.group[out] = g

    def _leave(self, e):
        """An equation in no region. Equations with effects stay in their order, so each depends on those before it."""
        mask = self.effects if e.effects else 0
        for v in variables(e):
            mask |= self.direct.get(v, 0)
        if e.effects:
            self.effects = mask
        for v in e.outvars:
            self.direct[v] = mask

    def _merges(self, groups, operands, roots) -> bool:
        """Whether these groups and an equation with these operands may be one."""
        bits, outside = 0, 0
        for g in groups:
            bits |= self.bits[g]
        reads = {
            v for g in groups for v in self.reads[g] if v not in self.group or self.root(self.group[v]) not in groups
        }
        if len(reads) > MOST_ROWS or sum(len(self.members[g]) for g in groups) >= MOST_EQUATIONS:
            return False
        for v in operands:
            if roots.get(v) not in groups:
                outside |= self.direct.get(v, 0)
        if self.closure(outside) & bits:
            return False
        # One group may read another one's values, but not through what is in neither.
        return all(not self.above[g] & bits for g in groups)

    def _depend(self, g, mask):
        """Group g depends on what has these bits."""
        added = self.closure(mask) & ~self.above[g]
        if not added:
            return
        while mask:
            other = self.root(mask.bit_length() - 1)
            self.below[other] = True
            mask &= ~self.bits[other]
        self.above[g] |= added
        if self.below[g]:
            for k, own in enumerate(self.parent):
                if own == k and self.above[k] & self.bits[g]:
                    self.above[k] |= added


def find(equations, results, least):
    """(equations, regions) of a jaxpr: its equations, with copies of some, and regions in the order in which they begin.

    least: elements of the arrays of a region.
    """
    rows = row_axes(equations, least)
    if not rows:
        return equations, []
    search = _Search(rows, equations)
    for i, e in enumerate(equations):
        search.add(i, e)
    found = []
    for g in range(len(search.parent)):
        if search.root(g) != g:
            continue
        own = [equations[i] for i in sorted(search.members[g])]
        shape = search.shape[g]
        region = Region(shape, search.axis_of(g), own, {v for e in own for v in e.outvars})
        if region.reductions:
            found.append((min(search.members[g]), region))
    regions = [region for _, region in sorted(found, key=lambda item: item[0])]
    if not regions:
        return equations, []
    copies = Copies(equations, results, regions)
    equations = copies.beside(equations)
    for region in regions:
        copies.complete(region)
    return equations, regions
