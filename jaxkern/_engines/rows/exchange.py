"""Rows that devices split: each device reduces its part, and then they exchange what they reduced.

Reductions that need the result of no other are one level, and are completed by one message; those that need them, the next. A
maximum and the sums of exponentials relative to it are one level, too: a sum over the row of the whole is the sum over the devices
of what each summed relative to its own maximum, times exp(own - whole). What is multiplied or divided by a number of the row, as by the sum
of exponentials, or is 0 by a condition on such numbers, is summed without that, which is done to the sum. Each level is a row function
of a part, and so are the results, so that kernels compute them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkern._core import partition
from jaxkern._core.dtypes import computing
from jaxkern._engines.jaxpr import MOVES, Constant
from jaxkern._engines.rows.program import evaluate

PLAIN = ("times", ())  # how a value that is the same on one device and in the whole row depends on numbers of the row
COLLECTIVES = {"reduce_sum": lax.psum, "reduce_max": partition.largest, "reduce_min": partition.smallest}
_NOTHING = {"reduce_max": -jnp.inf, "reduce_min": jnp.inf}
_MERGED = {"reduce_sum": jnp.sum, "reduce_max": jnp.max, "reduce_min": jnp.min}


def of_part(function, apply, parts, axes, size, start, indexed) -> list:
    """The results of a row function on the part of one device, with what it exchanges.

    apply: primitive.apply. axes: {Dim: the mesh axes that split it}. size(dim), start(dim): as for `evaluate`.
    indexed: the dimensions that are split, and along which indices count.
    """
    program = function.program
    split = lambda step: tuple(a for d in program.over(step) for a in axes[d])
    levels = _Levels(program, split)
    begins = [start(d).astype(jnp.int32) for d in indexed]
    known, given = {}, function.in_computing_types(parts)

    def numbers(wanted, results):
        """Numbers of the row from the results of reductions."""
        env = given | known | results
        env = evaluate(program, levels.steps(wanted, env), env, size=size, start=start)
        return [env[n] for n in wanted]

    def computed(wanted, steps, complete=None):
        given = _inputs(steps, [v for v, _ in wanted], known)
        shapes = [x.shape for x in (*parts, *(known[v] for v in given))]
        of = function.of_parts(wanted, steps, given, shapes, size, indexed, complete)
        return apply(of, [*parts, *(known[v] for v in given), *begins])

    for level in range(1, levels.count + 1):
        reductions = [step for step in program.steps if split(step) and levels.of[step.result] == level]
        results = [step.result for step in reductions]
        steps = levels.steps(results, known, level)
        own = dict(zip(results, computed([(v, computing(v.dtype)) for v in results], steps, _finite)))
        known |= _whole(levels, reductions, own, known, numbers, split)
    wanted = [(v, v.dtype) for v in program.results]
    return function.rounded(computed(wanted, levels.steps(program.results, known)))


def _inputs(steps, wanted, known) -> list:
    used = {v for step in steps for v in step.operands} | set(wanted)
    return [v for v in known if v in used]


def _whole(levels, reductions, own, known, numbers, split) -> dict:
    """The results of reductions of one level over all devices. own: on this one. known: of the levels before."""
    relative = [step for step in reductions if levels.factors[step.result]]
    over = split(relative[0]) if relative else None
    found, sums, every = {}, {}, {}
    for step in reductions:
        y = own[step.result]
        if split(step) == over:
            every.setdefault(y.dtype, []).append(step.result)
        elif step.name == "reduce_sum":
            sums.setdefault((split(step), y.dtype), []).append(step.result)
        else:
            found[step.result] = COLLECTIVES[step.name](y, split(step))
    for (axes, _), values in sums.items():
        found |= _sent(values, own, lambda y, axes=axes: lax.psum(y, axes))
    gathered = [_sent(values, own, lambda y: lax.all_gather(y, over)) for values in every.values()]
    every = dict(item for group in gathered for item in group.items())  # of each device
    found |= {
        s.result: _MERGED[s.name](every[s.result], 0) for s in reductions if s.result in every and s not in relative
    }
    for step in relative:
        y, factor, alive = every[step.result], 1, True
        wanted = list(dict.fromkeys(n for _, n, _ in levels.factors[step.result]))
        results = [v for v in found if v in every]
        of = jax.vmap(lambda *ys, wanted=wanted, results=results: numbers(wanted, dict(zip(results, ys))))
        name = {s.result: s.name for s in reductions}
        here = dict(zip(wanted, of(*(_from_finite(name[v], every[v]) for v in results))))
        whole = dict(zip(wanted, numbers(wanted, found)))
        for kind, n, k in levels.factors[step.result]:
            own_n, whole_n = (_like(a, n, step.result) for a in (here[n], whole[n]))
            if kind == "exp":
                further = jnp.where(whole_n == own_n, 0, k * (whole_n - own_n))
                y = jnp.where((y == 0) & jnp.isfinite(whole_n), 0, y * jnp.exp(further))
            elif kind == "mul":
                factor *= whole_n**k
            else:
                alive &= whole_n == bool(k)
        found[step.result] = jnp.where(alive, jnp.sum(y, 0) * factor, 0)
    return found


def _from_finite(name, y):
    """An extreme that other numbers of a part are relative to: 0 in place of the infinity of a part where nothing is finite."""
    if name not in _NOTHING or not jnp.issubdtype(y.dtype, jnp.floating):
        return y
    return jnp.where(y == _NOTHING[name], 0, y)


def _finite(step, ys) -> list:
    return [_from_finite(step.name, y) for y in ys]


def _sent(values, own, send) -> dict:
    """What `send` makes of the arrays of these values, in one message."""
    arrays = [own[v] for v in values]
    y = send(jnp.concatenate([x.reshape(-1) for x in arrays]))
    parts = jnp.split(y, np.cumsum([x.size for x in arrays])[:-1], -1)
    return {v: part.reshape(*part.shape[:-1], *x.shape) for v, part, x in zip(values, parts, arrays)}


def _like(array, value, other):
    """An array of the dimensions of `value`, perhaps with one of devices before them, in the dimensions of `other`."""
    first = array.ndim - len(value.dims)
    array = array.reshape(*array.shape[:first], *(n for n, d in zip(array.shape[first:], value.dims) if d is not None))
    at = [other.dims.index(d) for d in value.dims if d is not None]
    array = lax.transpose(array, (*range(first), *(first + int(k) for k in np.argsort(at))))
    return lax.expand_dims(array, [first + k for k in range(len(other.dims)) if k not in at])


class _Levels:
    """of: {value: the level of the last message that it needs}. factors: {sum: how its part depends on numbers of its own level}.

    A factor is (kind, number, k): the part of a device is multiplied by exp(k * (whole - own)) of the number ["exp"]; or the sum by its
    k-th power ["mul"], or the sum is 0 unless the number is k ["where"], which is left out of the parts.
    """

    def __init__(self, program, split):
        self.program, self.of, self.factors = program, {}, {}
        self._kinds, self._behind = {}, {}  # of values; of what is left out of parts, the operand that stands for it
        for step in program.steps:
            level = max((self._level(v) for v in step.operands), default=0)
            if split(step):
                factors = self._relative(step, level)
                self.factors[step.result] = factors
                level += not factors
                kind = ("number", step.result)
            else:
                kind = self._kind(step, level)
            for v in step.results:
                self.of[v], self._kinds[v] = level, kind
        self.count = max(self.of.values(), default=0)

    def steps(self, wanted, known, local=None) -> list:
        """The steps that make the wanted values from known ones, in order. local: the level that a device reduces by itself."""
        needed, found = set(wanted), []
        for step in reversed(self.program.steps):
            if needed.isdisjoint(step.results) or step.result in known:
                continue
            if local is not None and self.of[step.result] == local and step.result in self._behind:
                kept = self._behind[step.result]
                step = dataclasses.replace(step, name="convert_element_type", operands=[kept], params={})
            needed.update(step.operands)
            found.append(step)
        return found[::-1]

    def _level(self, v):
        return self.of.get(v, 0)

    def _relative(self, step, level):
        kind = self._kind_of(step.operands[0], level)
        if level == 0 or step.name != "reduce_sum" or self.program.over(step) != {self.program.row} or kind is None:
            return ()
        return kind[1] if kind[0] == "times" and self._stable(kind[1]) else ()

    def _stable(self, factors):
        """Whether parts without these factors are finite where the row is."""
        powers = {}
        for f, n, k in factors:
            if f == "mul":
                powers[n] = powers.get(n, 0) + k
        exponents = [n for f, n, _ in factors if f == "exp"]
        if not exponents and any(abs(k) > 1 or self._holds(n, _NOTHING) for n, k in powers.items()):
            return False  # squares of x / max(abs(x)): the squares of x overflow
        # The logarithm of the sum of a part may be -inf where that of the row is not.
        return not any(self._holds(n, ("reduce_sum",)) for n in exponents)

    def _holds(self, v, names) -> bool:
        """Whether a value of the row, or one that it was made of, is a reduction of these names."""
        made = {y: s for s in self.program.steps for y in s.results}
        behind, seen = [v], set()
        while behind:
            v = behind.pop()
            if v in seen or v not in made or self._level(v) == 0:
                continue
            if made[v].name in names:
                return True
            seen.add(v)
            behind += made[v].operands
        return False

    def _kind_of(self, v, level):
        return PLAIN if self._level(v) < level or isinstance(v, Constant) or level == 0 else self._kinds.get(v)

    def _kind(self, step, level):
        """How the result of an operation depends on numbers of this level; None: in another way."""
        if level == 0:
            return PLAIN
        result, name = step.result, step.name
        kinds = [self._kind_of(v, level) for v in step.operands]
        if None in kinds:
            return None
        real = jnp.issubdtype(result.dtype, jnp.floating)
        if name in MOVES or name == "convert_element_type" and kinds[0][0] == "times" and real:
            return kinds[0]
        if not result.is_row:
            return ("number", result) if not self.program.over(step) else None
        (a, own), *rest = kinds
        b, other = rest[0] if rest else (None, ())
        if name in ("add", "sub") and {a, b} <= {"number", "plus", "times"}:
            signs = (1, 1 if name == "add" else -1)
            found = ()
            for (kind, of), sign in zip(kinds, signs):
                if kind == "number":
                    found += ((of, sign),)
                elif kind == "plus":
                    found += tuple((n, k * sign) for n, k in of)
                elif of:  # a multiple
                    return None
            return "plus", found
        if name == "exp" and a == "plus":
            return "times", tuple(("exp", n, k) for n, k in own)
        if name in ("mul", "div") and a == "times" and b == "times":
            if name == "div" and any(f == "where" for f, _, _ in other):
                return None
            return "times", (*own, *((f, n, -k if name == "div" else k) for f, n, k in other))
        if (
            name in ("mul", "div")
            and real
            and sorted((a, b)) == ["number", "times"]
            and (name == "mul" or b == "number")
        ):
            (of,), n = (kind for kind in kinds if kind[0] == "times"), own if a == "number" else other
            self._behind[result] = step.operands[a == "number"]
            return "times", (*of[1], ("mul", n, 1 if name == "mul" else -1))
        if name == "neg" and a in ("times", "plus"):
            return a, own if a == "times" else tuple((n, -k) for n, k in own)
        if name == "select_n" and len(kinds) == 3:
            return self._selected(step, kinds)
        return None

    def _selected(self, step, kinds):
        zero = [self._is_zero(v) for v in step.operands[1:]]
        if sum(zero) != 1 or kinds[2 - zero.index(True)][0] != "times":
            return None
        at = 1 - zero.index(True)  # the case that is not 0
        if kinds[0] == PLAIN:
            return kinds[1 + at]
        if kinds[0][0] != "number":
            return None
        self._behind[step.result] = step.operands[1 + at]
        return "times", (*kinds[1 + at][1], ("where", kinds[0][1], at))

    def _is_zero(self, v):
        made = {y: s for s in self.program.steps for y in s.results}
        while v in made and made[v].name in (*MOVES, "convert_element_type"):
            v = made[v].operands[0]
        return isinstance(v, Constant) and np.all(v.value == 0)
