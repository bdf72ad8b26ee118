"""Loops of two kernels: a loop of few lanes runs ahead, and the loop of all lanes reads what it computed.

A random walk of 262144 lanes has one key, which every step splits. Nothing of that depends on the lane, and a thread of each
lane would compute it again. Such steps of a body, with the carries that depend on nothing else, are a loop of their own. It
stores what the other steps need in arrays of all steps, which are xs of the loop of all lanes.

Cheap values are computed again rather than stored: for a key, two words are stored, and not the schedule of its rounds.
"""

import copy
import math
import typing

import jax

from jaxkern._engines.jaxpr import Constant, Value
from jaxkern._engines.loops import tuning
from jaxkern._engines.loops.program import MOVES, Program

_CHEAP = (*MOVES, "add", "sub", "mul", "neg", "max", "min", "and", "or", "xor", "not", "shift_left")
_CHEAP += ("shift_right_logical", "select_n", "eq", "ne", "lt", "le", "gt", "ge", "convert_element_type")


class Part(typing.NamedTuple):
    """program: a Program of some steps of another. given: where its operands are among the operands of the other program and,
    after them, the results of the part that runs ahead. results: where its results are among those of the other program, in
    order; it may have more."""

    program: Program
    given: tuple
    results: tuple


def split(program, sm_count):
    """(the part that runs ahead, the part of all lanes); None if too little of the body is the same in many lanes."""
    size = lambda dims: math.prod(d.size for d in dims)
    lanes = size(program.dims)
    if lanes < tuning.AHEAD_THREADS * sm_count:
        return None
    few = dict.fromkeys([frozenset(), *(v.set() for v in program.carries)])
    few = [dims for dims in few if size(dims) * tuning.AHEAD_RATIO <= lanes]
    found = [_parts(program, dims) for dims in few]
    return max(filter(None, found), key=lambda parts: len(parts[0].program.steps), default=None)


def _parts(program, dims):
    """The parts of a program; the first part has these dimensions."""
    carries, known, varying = _same_in_lanes(program, dims)
    moved = [s for s in program.steps if s.results[0] in varying]
    if len(moved) < tuning.AHEAD_STEPS:
        return None
    xs = program.operands[program.num_consts + program.num_carry :]
    of_steps = varying.difference(xs)  # xs are read by both parts
    rest = [s for s in program.steps if s.results[0] not in varying]
    stored = dict.fromkeys(v for s in rest for v in s.operands if v in of_steps)
    again = set()
    for step in reversed(moved):
        v = step.result
        more = [u for u in dict.fromkeys(step.operands) if u in of_steps and u not in stored]
        if v in stored and step.name in _CHEAP and len(more) <= 1:
            del stored[v]
            stored.update(dict.fromkeys(more))
            again.add(v)

    is_ahead = lambda k, v: k in carries if k < program.num_carry else v in of_steps
    mine = [k for k, v in enumerate(program.results) if is_ahead(k, v)]
    others = [k for k in range(len(program.results)) if k not in mine]
    first = _part(program, carries, mine, [s for s in program.steps if s.results[0] in known], dims, list(stored))
    if len(first.program.steps) < tuning.AHEAD_STEPS:
        return None
    steps = [s for s in program.steps if s.results[0] not in varying or s.result in again]
    waiting = set(range(program.num_carry)) - carries
    second = _part(program, waiting, others, steps, frozenset(program.dims), [], list(stored), len(mine))
    return first, second


def _same_in_lanes(program, dims):
    """(carries, known, varying) of what depends on nothing beyond these dimensions.

    carries: their positions. known: all its Values; varying: those that are not the same in all steps.
    """
    n = program.num_consts
    few = lambda v: isinstance(v, Value) and v.set() <= dims
    carries = {k for k, v in enumerate(program.carries) if few(v) and k not in program.accumulators}
    while True:
        is_own = lambda k, own=carries: not n <= k < n + program.num_carry or k - n in own
        known = {v for k, v in enumerate(program.operands) if few(v) and is_own(k)}
        varying = known.difference(program.operands[:n])
        for step in program.steps:
            given = [v for v in step.operands if not isinstance(v, Constant)]
            if known.issuperset(given) and all(map(few, step.results)) and not program.over(step):
                known.update(step.results)
                varying.update(step.results if varying.intersection(given) else ())
        kept = {k for k in carries if isinstance(program.results[k], Constant) or program.results[k] in known}
        if kept == carries:
            return carries, known, varying
        carries = kept


def _part(program, carries, results, steps, dims, stored, read=(), before=0) -> Part:
    """A Part with some of the carries, results and steps. stored: Values that it returns after its results. read: Values that are
    xs of it, which the part ahead returns after its first `before` results."""
    n, m = program.num_consts, program.num_consts + program.num_carry
    given = [*range(n), *(n + k for k in sorted(carries)), *range(m, len(program.operands))]
    if not read:  # the part ahead
        given = [k for k in given if program.operands[k].set() <= dims]
    part = copy.copy(program)
    part.captured, part.operand_parts, part.result_parts = {}, (), ()
    part.operands = [*(program.operands[k] for k in given), *read]
    part.num_consts, part.num_carry = sum(k < n for k in given), len(carries)
    part.results = [*(program.results[k] for k in results), *stored]
    part.steps, part.dims = steps, tuple(d for d in program.dims if d in dims)
    place = {k: at for at, k in enumerate(results)}
    part.accumulators = {place[k]: v for k, v in program.accumulators.items() if k in place}
    part.linear = frozenset(place[k] for k in program.linear if k in place)
    part.sums = {place[k]: v for k, v in program.sums.items() if k in place}
    part.remove_unused()
    given += [len(program.operands) + before + j for j in range(len(read))]
    return Part(part, tuple(given), tuple(results))


def types(part, avals, length) -> list:
    """The types of all results of a part. avals: the types of the results of the whole program."""
    found = [avals[k] for k in part.results]
    more = part.program.results[len(found) :]
    return found + [jax.core.ShapedArray((length, *v.aval.shape), v.dtype) for v in more]
