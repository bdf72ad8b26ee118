"""Small dimensions of a loop's body along which data moves: every element along them becomes a value of its own.

A key of jax.random is an array of two numbers that the body takes apart and puts together again; so is a state [lanes, 3]
whose columns are read one by one. In a kernel each element of such a dimension is a variable: slices and concatenations choose
among variables, and cost nothing.

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

MOST = 16  # elements of a dimension that is taken apart
MOST_PARTS = 36  # of an array that has lanes besides, or is a matrix that acts on a state; of another one MOST
MOVES = ("slice", "concatenate", "pad", "rev")  # operations that move data along the dimensions that they change
_COMBINE = {"add": lax.add, "max": lax.max, "min": lax.min, "mul": lax.mul}
_COMBINE |= {"and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor}


@dataclasses.dataclass(frozen=True)
class Parts:
    """axes: of an array of one step, those that are taken apart. shape: of that array."""

    axes: tuple
    shape: tuple

    @property
    def places(self) -> list:
        return list(itertools.product(*(range(self.shape[a]) for a in self.axes)))

    def split(self, x) -> list:
        """The parts of an array that may have a dimension of steps in front."""
        first = x.ndim - len(self.shape)
        at = lambda place: dict(zip(self.axes, place))
        index = lambda place: tuple(at(place).get(a, slice(None)) for a in range(len(self.shape)))
        return [x[(slice(None),) * first + index(place)] for place in self.places]

    def of(self, aval) -> list:
        """The types of the parts of an array that may have a dimension of steps in front."""
        first = aval.ndim - len(self.shape)
        shape = tuple(n for a, n in enumerate(aval.shape) if a - first not in self.axes)
        return [jax.core.ShapedArray(shape, aval.dtype)] * len(self.places)

    def join(self, parts, steps=False):
        """The array of these parts. steps: they have a dimension of steps in front."""
        parts = list(parts)
        for a in reversed(self.axes):  # the last axis varies fastest; the axes before it are still missing
            n, missing = self.shape[a], sum(b < a for b in self.axes)
            parts = [jnp.stack(parts[k : k + n], a - missing + steps) for k in range(0, len(parts), n)]
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


def split(program, moved) -> None:
    """See the module. moved: (dimension, the step that moves data along it) of the program.

    Sets program.operand_parts, program.result_parts: for each operand and result of the scan, None or its Parts.
    """
    apart = {d.same() for d, _ in moved}
    for d, step in moved:
        if d.same().size > MOST:
            program.fail(step, f"{program.otherwise}: slice and join arrays before the loop")
    if not apart and not any(step.name in MOVES for step in program.steps):
        program.operand_parts = (None,) * len(program.operands)
        program.result_parts = (None,) * len(program.results)
        return
    parts: dict = {}  # Value: {its place along the dimensions that are taken apart: Value or Constant}

    def of_value(v):
        axes = tuple(a for a, d in enumerate(v.dims) if d in apart)
        found = Parts(axes, tuple(v.aval.shape)) if axes else None
        acts = len(axes) > len({v.dims[a] for a in axes}) or not v.set() <= apart
        if found and math.prod(v.aval.shape[a] for a in axes) > (MOST_PARTS if acts else MOST):
            step = next(step for d, step in moved if d.same() in v.dims)
            program.fail(step, program.otherwise)
        return found

    def new(v):
        """Values for the parts of v."""
        kind = of_value(v)
        if kind is None:
            return {(): v}
        rest = [a for a in range(len(v.dims)) if a not in kind.axes]
        aval = jax.core.ShapedArray(tuple(v.aval.shape[a] for a in rest), v.dtype)
        return {place: Value(aval, tuple(v.dims[a] for a in rest)) for place in kind.places}

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
    steps = []
    for step in program.steps:
        if step.name in MOVES:
            out = step.result
            parts[out] = {place: part(*_source(step, position(out, place))) for place in new(out)}
        else:
            steps += _of_parts(program, step, parts, new, part, apart)
    program.operand_parts = tuple(map(of_value, program.operands))
    program.result_parts = tuple(None if isinstance(v, Constant) else of_value(v) for v in program.results)
    spread = lambda vs: [w for v in vs for w in ([v] if isinstance(v, Constant) else parts[v].values())]
    consts = spread(program.operands[: program.num_consts])
    carries = spread(program.carries)
    xs = spread(program.operands[program.num_consts + program.num_carry :])
    program.steps, program.results = steps, spread(program.results)
    program.operands, program.num_consts, program.num_carry = [*consts, *carries, *xs], len(consts), len(carries)


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


def _of_parts(program, step, parts, new, part, apart) -> list:
    """The steps that compute the parts of the results of a step, which must not move data."""
    for v in step.results:
        parts[v] = new(v)
    if step.name == "iota":
        dim, v = step.result.dims[step.params["dimension"]], step.result
        if dim in apart:
            kind = [a for a, d in enumerate(v.dims) if d in apart]
            at = kind.index(step.params["dimension"])
            parts[v] = {place: Constant(np.asarray(place[at], v.dtype)) for place in parts[v]}
            return []
    if step.name in REDUCTIONS and not apart.isdisjoint(program.over(step)):
        return _reduced(program, step, parts, part, apart)
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


def _reduced(program, step, parts, part, apart) -> list:
    """A reduction over dimensions that are taken apart: it reduces the parts one by one, then the lanes."""
    if REDUCTIONS[step.name] not in _COMBINE:
        program.fail(step, program.otherwise)
    combine, x = _COMBINE[REDUCTIONS[step.name]], step.operands[0]
    scalar = jax.ShapeDtypeStruct((), x.dtype)
    equation = jax.make_jaxpr(combine)(scalar, scalar).eqns[0]
    mine = [a for a in axes_of(step.name, step.params) if x.dims[a] in apart]
    steps, add = _adder(step, parts)
    kept = kept_axes(step, x)
    for place in parts[step.result]:
        at = dict(zip((a for a, d in enumerate(step.result.dims) if d in apart), place))
        total = None
        for own in itertools.product(*(range(x.aval.shape[a]) for a in mine)):
            here = {a: at.get(b) for a, b in kept.items()} | dict(zip(mine, own))
            value = part(x, here)
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
