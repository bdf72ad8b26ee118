"""Dimensions of a loop's body along which data moves: what lies along them becomes several values.

A key of jax.random is an array of two numbers that the body takes apart and puts together again; so is a state [lanes, 3]
whose columns are read one by one. In a kernel each element of such a dimension is a variable: slices and concatenations choose
among variables, and cost nothing. A long dimension is cut into segments (segments.py), whose elements remain lanes.

    split(program)              replaces the arrays that have such dimensions by their parts, in operands, steps and results
    Parts                       how an array of the scan is taken apart, and put together
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkern._engines.jaxpr import REDUCTIONS, RENAMED, Constant, Step, Value, axes_of
from jaxkern._engines.loops import segments
from jaxkern._engines.loops.segments import MOST, MOST_PARTS, MOVES

_COMBINE = {"add": lax.add, "max": lax.max, "min": lax.min, "mul": lax.mul}
_COMBINE |= {"and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor}


@dataclasses.dataclass(frozen=True)
class Parts:
    """axes: of an array of one step, those that are taken apart. shape: of that array.

    starts: for each of the axes, where its parts begin. Parts that are single elements lack the axis, if `single` says so.
    """

    axes: tuple
    shape: tuple
    starts: tuple
    single: tuple

    @property
    def places(self) -> list:
        """The starts of each part."""
        return list(itertools.product(*self.starts))

    def _index(self, place) -> tuple:
        """Where a part is in an array of one step."""
        index: list = [slice(None)] * len(self.shape)
        for a, start, starts, single in zip(self.axes, place, self.starts, self.single):
            ends = dict(zip(starts, (*starts[1:], self.shape[a])))
            index[a] = start if single else slice(start, ends[start])
        return tuple(index)

    def split(self, x) -> list:
        """The parts of an array that may have a dimension of steps in front."""
        first = x.ndim - len(self.shape)
        return [x[(slice(None),) * first + self._index(place)] for place in self.places]

    def of(self, aval) -> list:
        """The types of the parts of an array that may have a dimension of steps in front."""
        first = aval.shape[: aval.ndim - len(self.shape)]
        return [jax.core.ShapedArray((*first, *self.of_step(place)), aval.dtype) for place in self.places]

    def of_step(self, place) -> tuple:
        """The shape of a part in one step."""
        index = zip(self._index(place), self.shape)
        return tuple(len(range(n)[at]) for at, n in index if isinstance(at, slice))

    def join(self, parts, steps=False):
        """The array of these parts. steps: they have a dimension of steps in front."""
        parts, singles = list(parts), [a for a, single in zip(self.axes, self.single) if single]
        for a, starts in reversed(list(zip(self.axes, self.starts))):
            # The last axis varies fastest. Single axes before it are still missing.
            n, axis = len(starts), a - sum(b < a for b in singles) + steps
            put = jnp.stack if a in singles else jnp.concatenate
            parts = [put(parts[k : k + n], axis) for k in range(0, len(parts), n)]
        return parts[0]


def unite(step, unite_pairs) -> list:
    """Relates the dimensions of a step of `MOVES`; returns those along which it moves data."""
    name, out, params = step.name, step.result, step.params
    if name == "slice":
        strides = params["strides"] or (1,) * len(out.dims)
        whole = lambda a: (
            (params["start_indices"][a], params["limit_indices"][a], strides[a])
            == (
                0,
                step.operands[0].aval.shape[a],
                1,
            )
        )
        changed = [a for a in range(len(out.dims)) if not whole(a)]
        arrays = step.operands
    elif name == "concatenate":
        changed, arrays = [params["dimension"]], step.operands
    elif name == "pad":
        changed, arrays = (
            [a for a, p in enumerate(params["padding_config"]) if tuple(p) != (0, 0, 0)],
            step.operands[:1],
        )
    else:
        changed, arrays = list(params["dimensions"]), step.operands
    moved = []
    for x in arrays:
        for a, (d, e) in enumerate(zip(x.dims, out.dims)):
            if a in changed:
                moved += [v for v in (d, e) if v is not None]
            else:
                unite_pairs([(d, e)])
    return moved


def split(program, moved, rigid=()) -> None:
    """See the module. moved: (dimension, the step that moves data along it) of the program. rigid: dimensions without segments.

    Sets program.operand_parts, program.result_parts: for each operand and result of the scan, None or its Parts.
    """
    cut, whole = segments.find(program, moved, rigid)
    program.segments = frozenset(d for _, dims in cut.values() for d in dims if d is not None)
    apart = {d.same() for d, _ in moved} - whole
    for d, step in moved:
        if d.same().size > MOST and d.same() in apart.difference(cut):
            program.fail(step, f"{program.otherwise}: slice and join arrays before the loop")
    if not apart and not any(step.name in MOVES for step in program.steps):
        program.operand_parts = (None,) * len(program.operands)
        program.result_parts = (None,) * len(program.results)
        return
    parts: dict = {}  # Value: {its place along the dimensions that are taken apart: Value or Constant}

    def of_value(v):
        axes = tuple(a for a, d in enumerate(v.dims) if d in apart)
        starts = tuple(cut[v.dims[a]][0] if v.dims[a] in cut else tuple(range(v.aval.shape[a])) for a in axes)
        single = tuple(v.dims[a] not in cut for a in axes)
        found = Parts(axes, tuple(v.aval.shape), starts, single) if axes else None
        acts = len(axes) > len({v.dims[a] for a in axes}) or not v.set() <= apart or not all(single)
        if found and math.prod(map(len, starts)) > (MOST_PARTS if acts else MOST):
            step = next(step for d, step in moved if d.same() in v.dims)
            program.fail(step, program.otherwise)
        return found

    def new(v):
        """Values for the parts of v."""
        kind = of_value(v)
        if kind is None:
            return {(): v}
        found = {}
        for place in kind.places:
            at, dims = dict(zip(kind.axes, place)), []
            for a, d in enumerate(v.dims):
                if d in cut:
                    starts, own = cut[d]
                    dims.append(own[starts.index(at[a])])
                elif a not in at:
                    dims.append(d)
            found[place] = Value(jax.core.ShapedArray(kind.of_step(place), v.dtype), tuple(dims))
        return found

    def part(v, position):
        """The part of v at a position: {axis: index}, which may have more axes."""
        if isinstance(v, Constant):
            return v
        kind = of_value(v)
        return parts[v][tuple(position[a] for a in kind.axes) if kind else ()]

    def position(v, place):
        kind = of_value(v)
        return dict.fromkeys(range(len(v.dims)), 0) | (dict(zip(kind.axes, place)) if kind else {})

    for v in program.operands:
        parts[v] = new(v)
    steps, made = [], {v: step for step in program.steps for v in step.results}
    for step in program.steps:
        if step.name in MOVES:
            out = step.result
            parts[out] = {place: part(*_source(step, position(out, place))) for place in new(out)}
        else:
            steps += _of_parts(program, step, parts, new, part, apart, cut)
    program.operand_parts = tuple(map(of_value, program.operands))
    program.result_parts = tuple(None if isinstance(v, Constant) else of_value(v) for v in program.results)
    for v, step in {v: made[v] for v in program.results[program.num_carry :] if v in made}.items():
        steps += _padding(step, parts, new(v))
    spread = lambda vs: [w for v in vs for w in ([v] if isinstance(v, Constant) else parts[v].values())]
    consts = spread(program.operands[: program.num_consts])
    carries = spread(program.carries)
    xs = spread(program.operands[program.num_consts + program.num_carry :])
    program.steps, program.results = steps, spread(program.results)
    program.operands, program.num_consts, program.num_carry = [*consts, *carries, *xs], len(consts), len(carries)


def _padding(step, parts, wanted) -> list:
    """The steps that broadcast parts of the result of a step that are the number with which it pads an array.

    wanted: {place: a Value with all dimensions of the part}.
    """
    steps, own = [], parts[step.result]
    for place, v in own.items():
        if len(v.aval.shape) < len(wanted[place].aval.shape):
            params = {"broadcast_dimensions": ()}
            steps.append(Step("broadcast_in_dim", [v], [wanted[place]], step.equation, params, step.calls, step.origin))
            own[place] = wanted[place]
    return steps


def _source(step, at):
    """(operand, position in it) of an element of the result of one of `MOVES`."""
    name, params, x = step.name, step.params, step.operands[0]
    if name == "slice":
        strides = params["strides"] or (1,) * len(at)
        return x, {a: params["start_indices"][a] + i * strides[a] for a, i in at.items()}
    if name == "concatenate":
        axis = params["dimension"]
        i = at[axis]
        for x in step.operands:
            if i < x.aval.shape[axis]:
                return x, at | {axis: i}
            i -= x.aval.shape[axis]
    if name == "pad":
        found = {}
        for a, (low, _, between) in enumerate(params["padding_config"]):
            i, rest = divmod(at[a] - low, between + 1)
            if rest or not 0 <= i < x.aval.shape[a]:
                return step.operands[1], {}
            found[a] = i
        return x, found
    n = x.aval.shape
    return x, at | {a: n[a] - 1 - at[a] for a in params["dimensions"]}


def _of_parts(program, step, parts, new, part, apart, cut) -> list:
    """The steps that compute the parts of the results of a step, which must not move data."""
    for v in step.results:
        parts[v] = new(v)
    if step.name == "iota":
        dim, v = step.result.dims[step.params["dimension"]], step.result
        if dim in apart:
            kind = [a for a, d in enumerate(v.dims) if d in apart]
            at = kind.index(step.params["dimension"])
            return _places(step, parts, at)
    if step.name in REDUCTIONS and not apart.isdisjoint(program.over(step)):
        return _reduced(program, step, parts, part, apart, cut)
    steps, add = _adder(step, parts)
    for place in parts[step.result]:
        at = dict(zip((a for a, d in enumerate(step.result.dims) if d in apart), place))
        pick = lambda v: part(v, {a: at.get(b) for a, b in kept_axes(step, v).items()})
        operands = list(map(pick, step.operands))
        results = [parts[v][place] for v in step.results]
        if len(parts[step.result]) == 1 and all(a is b for a, b in zip(operands, step.operands)):
            steps.append(step)
        elif step.name in REDUCTIONS:
            add(place, _over_lanes(step, operands, results, apart))
        else:
            params = step.params
            if step.name == "iota":
                params = params | {"dimension": results[0].dims.index(step.result.dims[params["dimension"]])}
            steps.append(dataclasses.replace(step, operands=operands, results=results, params=params))
    return steps


def _places(step, parts, at) -> list:
    """The steps of an iota along a dimension that is taken apart; at: where its starts are in places."""
    steps, v = [], step.result
    equation = _equation(lax.add, v.dtype)
    for place, y in parts[v].items():
        start = Constant(np.asarray(place[at], v.dtype))
        if len(y.dims) < len(v.dims) or y.dims[step.params["dimension"]] is None:
            parts[v][place] = start
            continue
        own = Value(y.aval, y.dims)
        steps.append(dataclasses.replace(step, results=[own]))
        steps.append(Step("add", [own, start], [y], equation, {}, step.calls, step.origin or step.equation))
    return steps


def _equation(f, dtype):
    """The equation of a function of two scalars."""
    scalar = jax.ShapeDtypeStruct((), dtype)
    return jax.make_jaxpr(f)(scalar, scalar).eqns[0]


def kept_axes(step, v) -> dict:
    """{axis of an operand: the same axis of the result} of a step that does not move data. A dimension may occur twice."""
    own, out = ([a for a, d in enumerate(x.dims) if d is not None] for x in (v, step.result))
    if step.name == "broadcast_in_dim":
        return dict(enumerate(step.params["broadcast_dimensions"]))
    if step.name in RENAMED:
        return dict(zip(own, out))
    if step.name == "transpose":
        return {a: k for k, a in enumerate(step.params["permutation"])}
    if step.name in REDUCTIONS:
        gone = axes_of(step.name, step.params)
        return {a: k for k, a in enumerate(a for a in range(len(v.dims)) if a not in gone)}
    return {a: a for a in range(len(v.dims))}


def _adder(step, parts):
    """(steps, add): add(place, found) adds to steps, or notes the part of the result that is a Constant."""
    steps: list = []

    def add(place, found):
        if isinstance(found, Constant):
            parts[step.result][place] = found
        else:
            steps.append(found)

    return steps, add


def _over_lanes(step, operands, results, apart) -> Step | Constant:
    """A reduction of parts over the lanes among its dimensions, which a part that was moved may have at other axes."""
    x, key = operands[0], "dimensions" if step.name == "reduce" else "axes"
    over = [step.operands[0].dims[a] for a in step.params[key]]
    over = [d for d in over if d is not None and d not in apart]
    if isinstance(x, Constant) and over:
        count = math.prod(d.size for d in over)
        value = {"add": x.value * count, "mul": x.value**count}.get(REDUCTIONS[step.name], x.value)
        return Constant(np.asarray(value, x.value.dtype))
    params = step.params | {key: tuple(x.dims.index(d) for d in over)}
    return dataclasses.replace(step, operands=operands, results=results, params=params)


def _reduced(program, step, parts, part, apart, cut) -> list:
    """A reduction over dimensions that are taken apart: it reduces the parts one by one, then the lanes."""
    if REDUCTIONS[step.name] not in _COMBINE:
        program.fail(step, program.otherwise)
    combine, x = _COMBINE[REDUCTIONS[step.name]], step.operands[0]
    equation = _equation(combine, x.dtype)
    mine = [a for a in axes_of(step.name, step.params) if x.dims[a] in apart]
    steps, add = _adder(step, parts)
    singles = [a for a, d in enumerate(x.dims) if d in apart and d not in cut]
    within = [a - sum(b < a for b in singles) for a in mine if x.dims[a] in cut]  # axes of segments in a part
    starts = [cut[x.dims[a]][0] if x.dims[a] in cut else range(x.aval.shape[a]) for a in mine]
    kept = kept_axes(step, x)
    if not all(map(len, starts)):
        program.fail(step, "a reduction of no elements")
    for place in parts[step.result]:
        at = dict(zip((a for a, d in enumerate(step.result.dims) if d in apart), place))
        total = None
        for own in itertools.product(*starts):
            here = {a: at.get(b) for a, b in kept.items()} | dict(zip(mine, own))
            value = part(x, here)
            if within and not isinstance(value, Constant):
                kept_here = [a for a in range(len(value.dims)) if a not in within]
                aval = jax.core.ShapedArray([value.aval.shape[a] for a in kept_here], value.dtype)
                sum_of_lanes = Value(aval, tuple(value.dims[a] for a in kept_here))
                key = "dimensions" if step.name == "reduce" else "axes"
                params = step.params | {key: tuple(within)}
                steps.append(dataclasses.replace(step, operands=[value], results=[sum_of_lanes], params=params))
                value = sum_of_lanes
            if total is None:
                total = value
                continue
            dims = value.dims if isinstance(total, Constant) else total.dims
            aval = (value if isinstance(total, Constant) else total).aval
            result = Value(aval, dims)
            steps.append(
                Step(
                    equation.primitive.name,
                    [total, value],
                    [result],
                    equation,
                    {},
                    step.calls,
                    step.origin or step.equation,
                )
            )
            total = result
        add(place, _over_lanes(step, [total], [parts[step.result][place]], apart))
    return steps
