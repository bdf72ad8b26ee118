"""The body of a loop with rows as loops over the elements of rows.

    nests = find(program)       in the order in which they run

A `Nest` computes some values of a lane. It has an axis `o0`, `o1`, ... for each row that its results have, and `r0`, ... for each row
that it reduces. Values with at most one row are computed once, and stored; the threads of a lane own their elements. Matrices,
values with more rows, are computed where they are needed, from what is stored, except for results of reductions. A broadcast, a
transpose or a slice stands for its operand at other indices.

What a nest needs is a leaf: (value, index of each of its rows), where an index is text such as "o0" or "1 + o0"; or (`PLACE`, an
index), the index itself. The level of a nest is larger than the levels of all reductions
that it depends on. In a level, scalars are computed first, then rows, then reductions.
"""

import dataclasses
import functools
import operator

import jax
import numpy as np

from jaxkern._core import functor
from jaxkern._core.jaxprs import computing
from jaxkern._engines.jaxpr import REDUCTIONS, Constant, Value, compute, widened
from jaxkern._engines.loops.parts import kept_axes
from jaxkern._engines.loops.plan import check_size
from jaxkern._engines.loops.program import MOVES

INDEX = np.dtype(np.int32)
PLACE = Value(jax.core.ShapedArray((), INDEX))
_ARG = ("argmax", "argmin")


@dataclasses.dataclass(eq=False)
class Nest:
    """values: what it computes. terms: what its functor returns: (value, indices) for each.

    out, over: sizes of the rows that the results have, and of those that are reduced. kinds: the reduction of each value; empty for
    none. own: values that are computed within it. function: of the leaves. leaves: what it reads, see the module.
    """

    values: list
    terms: list
    out: tuple
    over: tuple = ()
    kinds: tuple = ()
    own: frozenset = frozenset()
    function: functor.Function | None = None
    leaves: tuple = ()


def outer(rank) -> tuple:
    return tuple(f"o{k}" for k in range(rank))


class Body:
    """The values of a RowProgram, as leaves and scalar functions."""

    def __init__(self, program):
        self.program = program
        p = program
        self.made = p.made
        self.stored = set(p.operands)
        for step in p.steps:
            if not self.is_alias(step) and (p.reduced(step) or len(p.axes(step.result)) < 2):
                self.stored.update(step.results)

    def is_alias(self, step) -> bool:
        """Whether the result of a step is its operand at other indices."""
        alone = step.name in REDUCTIONS and step.name not in (*_ARG, "reduce") and not self.program.reduced(step)
        return step.name in (*MOVES, "slice", "rev") or alone

    def resolve(self, v, index):
        """(value, index) of what a value stands for. index: {axis: name}."""
        while v in self.made and self.is_alias(step := self.made[v]):
            x = step.operands[0]
            if isinstance(x, Constant):
                return x, {}
            if step.name in ("slice", "rev"):
                index = {a: self._moved(step, a, index.get(a, "0")) for a in self.program.axes(x)}
            else:
                kept = kept_axes(step, x)
                index = {a: index[kept[a]] for a in self.program.axes(x)}
            v = x
        return v, index

    def _moved(self, step, axis, name) -> str:
        """The index of an operand of a slice or a reversal along an axis."""
        params = step.params
        if step.name == "rev":
            return f"{step.operands[0].aval.shape[axis] - 1} - ({name})" if axis in params["dimensions"] else name
        start, stride = params["start_indices"][axis], (params["strides"] or (1,) * (axis + 1))[axis]
        if name == "0":
            return str(start)
        name = name if stride == 1 else f"{stride} * ({name})"
        return name if start == 0 else f"{start} + {name}"

    def _pieces(self, step) -> list:
        """(operand, axes and first places along them at which it lies) of a pad or concatenate; the first has the others below it."""
        if step.name == "pad":
            firsts = {a: low for a, (low, high, _) in enumerate(step.params["padding_config"]) if low or high}
            return [(step.operands[1], None), (step.operands[0], firsts)]
        axis, first, found = step.params["dimension"], 0, []
        for x in step.operands:
            found.append((x, {axis: first} if found else None))
            first += x.aval.shape[axis]
        return found

    def _joined(self, step, index, own, leaf, memo):
        """An element of a pad or concatenate: of the operand in which its index lies."""
        total = None
        for x, firsts in self._pieces(step):
            inside = [(index.get(a, "0"), first, x.aval.shape[a]) for a, first in (firsts or {}).items()]
            at = {}
            for a in self.program.axes(x):
                first, n = (firsts or {}).get(a, 0), x.aval.shape[a]
                moves = first or n != step.result.aval.shape[a]
                at[a] = f"min(max({index.get(a, '0')} - {first}, 0), {n - 1})" if moves else index[a]
            value = leaf(x, ()) if isinstance(x, Constant) else self.evaluate(x, at, own, leaf, memo)
            places = [leaf(PLACE, name) for name, _, _ in inside]
            total = value if firsts is None else leaf.chosen(places, inside, value, total)
        return total

    def own_index(self, v, names=None) -> dict:
        axes = self.program.axes(v)
        return dict(zip(axes, names or outer(len(axes))))

    def evaluate(self, v, index, own, leaf, memo):
        """The scalar of a value at an index, from leaf(value, names of indices) of what is stored."""
        v, index = self.resolve(v, index)
        if isinstance(v, Constant):
            return leaf(v, ())
        names = tuple(index[a] for a in self.program.axes(v))
        key = v, names
        if key in memo:
            return memo[key]
        if v in self.stored and v not in own:
            memo[key] = leaf(v, names)
            return memo[key]
        step = self.made[v]
        if step.name == "iota":
            axis = step.params["dimension"]
            memo[key] = leaf(v, index.get(axis) or step.result.dims[axis])
            return memo[key]
        if step.name in ("pad", "concatenate"):
            memo[key] = self._joined(step, index, own, leaf, memo)
            return memo[key]
        operands = [
            self.evaluate(x, {a: index[a] for a in self.program.axes(x)}, own, leaf, memo)
            if not isinstance(x, Constant)
            else leaf(x, ())
            for x in step.operands
        ]
        results = leaf.step(step, operands)
        for y, found in zip(step.results, results):
            memo[y, names] = found
        return memo[key]

    def finish(self, nest):
        """Sets the function and the leaves of a nest."""
        collect = _Collect()
        memo: dict = {}
        for v, index in nest.terms:
            self.evaluate(v, index, nest.own, collect, memo)
        nest.leaves = tuple(collect.leaves)
        places = {key: k for k, key in enumerate(nest.leaves)}

        def f(*xs):
            memo: dict = {}
            return [self.evaluate(v, index, nest.own, _Run(xs, places), memo) for v, index in nest.terms]

        is_index = lambda at: not isinstance(at, tuple)
        takes = [INDEX if is_index(at) else computing(v.dtype) for v, at in nest.leaves]
        gives = [computing(np.dtype(v.aval.dtype)) for v, _ in nest.terms]
        nest.function = functor.of_scalars(f, takes, gives, self.program.label, False)
        return nest


class _Collect:
    """Notes leaves."""

    def __init__(self):
        self.leaves = {}

    def __call__(self, v, at):
        if not isinstance(v, Constant):
            self.leaves[v, at] = None

    def step(self, step, operands):
        return [None] * len(step.results)

    def chosen(self, places, inside, value, otherwise):
        pass


class _Run:
    """Computes on scalars."""

    def __init__(self, xs, places):
        self._xs, self._places = xs, places

    def __call__(self, v, at):
        if isinstance(v, Constant):
            return jax.numpy.asarray(widened(v)[()])
        x = self._xs[self._places[v, at]]
        return x if isinstance(at, tuple) else jax.lax.convert_element_type(x, computing(v.dtype))

    def step(self, step, operands):
        return compute(step, operands)

    def chosen(self, places, inside, value, otherwise):
        """A value where all places are inside their ranges."""
        tests = [(place >= first) & (place < first + n) for place, (_, first, n) in zip(places, inside)]
        return jax.numpy.where(functools.reduce(operator.and_, tests), value, otherwise) if tests else value


def find(program):
    """(body, nests that compute what is stored, in order).

    Raises: TooLarge if the nests have more statements than a kernel.
    """
    body = Body(program)
    level: dict = {}

    def after(step):
        """The level of what a step computes."""
        collect, found, reduces = _Collect(), 0, program.reduced(step)
        if reduces:
            body.evaluate(step.operands[0], body.own_index(step.operands[0]), frozenset(), collect, {})
        else:
            body.evaluate(step.result, body.own_index(step.result), frozenset(step.results), collect, {})
        own, sizes = outer(len(program.axes(step.result))), program.sizes(step.result)
        for v, at in collect.leaves:
            if isinstance(at, tuple) and v in level:
                # Elements of other threads, and of rows of another length, are there after the nest that computes them.
                is_other = at and (at != own or program.sizes(v) != sizes)
                later = program.reduced(body.made[v]) or (not reduces and is_other)
                found = max(found, level[v] + bool(later))
        return found

    groups: dict = {}
    for step in program.steps:
        if step.result not in body.stored:
            continue
        n = after(step)
        level.update(dict.fromkeys(step.results, n))
        if not program.reduced(step):
            groups.setdefault((n, 0, program.sizes(step.result)), []).append(step)
            continue
        x = step.operands[0]
        kept = kept_axes(step, x)
        over = tuple(x.dims[a].size for a in program.axes(x) if a not in kept)
        key = (n, 1, program.sizes(step.result), over, step.name in _ARG)
        groups.setdefault(key, []).append(step)

    nests = []
    for key in sorted(groups, key=lambda key: (key[:2], len(key[2]), key[2:])):
        steps = groups[key]
        if key[1] == 0:
            values = [v for s in steps for v in s.results]
            terms = [(v, body.own_index(v)) for v in values]
            nests.append(Nest(values, terms, key[2], own=frozenset(values)))
            continue
        terms = [(s.operands[0], _index_of_operand(program, s)) for s in steps]
        kinds = tuple(REDUCTIONS[s.name] for s in steps)
        nests.append(Nest([s.result for s in steps], terms, key[2], key[3], kinds))
    size = 0
    for nest in nests:  # each is traced, which takes seconds for all nests of a body that is too large
        size += body.finish(nest).function.size
        check_size(program, size, "at least ")
    return body, nests


def _index_of_operand(program, step) -> dict:
    """The indices of the operand of a reduction."""
    x, kept = step.operands[0], kept_axes(step, step.operands[0])
    out = dict(zip(program.axes(step.result), outer(len(program.axes(step.result)))))
    gone = [a for a in program.axes(x) if a not in kept]
    return {a: out[kept[a]] if a in kept else f"r{gone.index(a)}" for a in program.axes(x)}
