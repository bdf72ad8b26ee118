"""The body of a loop with rows as loops over the elements of rows.

    nests = find(program)       in the order in which they run

A `Nest` computes some values of a lane. It has an axis `o0`, `o1`, ... for each row that its results have, and `r0`, ... for each row
that it reduces. Values with at most one row are computed once, and stored; the threads of a lane own their elements. Matrices,
values with more rows, are computed where they are needed, from what is stored, except for results of reductions. A value that
moves no data, such as a broadcast, stands for its operand at other indices.

What a nest needs is a leaf: (value, index of each of its rows). The level of a nest is larger than the levels of all reductions
that it depends on. In a level, scalars are computed first, then rows, then reductions.
"""

import dataclasses

import jax
import numpy as np

from jaxkern._core import functor
from jaxkern._core.jaxprs import computing
from jaxkern._engines.jaxpr import REDUCTIONS, Constant, compute, widened
from jaxkern._engines.loops.parts import kept_axes
from jaxkern._engines.loops.program import MOVES

INDEX = np.dtype(np.int32)
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
        return step.name in MOVES or alone

    def resolve(self, v, index):
        """(value, index) of what a value stands for. index: {axis: name}."""
        while v in self.made and self.is_alias(step := self.made[v]):
            x = step.operands[0]
            if isinstance(x, Constant):
                return x, {}
            kept = kept_axes(step, x)
            index = {a: index[kept[a]] for a in self.program.axes(x)}
            v = x
        return v, index

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


def find(program):
    """(body, nests that compute what is stored, in order)."""
    body = Body(program)
    level: dict = {}

    def after(step):
        """The level of what a step computes."""
        collect, memo, found = _Collect(), {}, 0
        for x in step.operands:
            if not isinstance(x, Constant):
                body.evaluate(x, body.own_index(x), frozenset(step.results), collect, memo)
        for v, at in collect.leaves:
            if isinstance(at, tuple) and v in level:
                found = max(found, level[v] + bool(program.reduced(body.made[v])))
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
    return body, [body.finish(nest) for nest in nests]


def _index_of_operand(program, step) -> dict:
    """The indices of the operand of a reduction."""
    x, kept = step.operands[0], kept_axes(step, step.operands[0])
    out = dict(zip(program.axes(step.result), outer(len(program.axes(step.result)))))
    gone = [a for a in program.axes(x) if a not in kept]
    return {a: out[kept[a]] if a in kept else f"r{gone.index(a)}" for a in program.axes(x)}
