"""What a while loop does in each lane, read from the jaxprs of its condition and its body.

    program = WhileProgram(cond_jaxpr, body_jaxpr, cond_nconsts, body_nconsts, "jaxkern.while_loop")

`vmap` gives a while loop a condition for each lane: JAX runs the loop until all of them are false, and keeps the carries of the
lanes that are done. A loop that is written for arrays does the same by `jnp.any` in its condition and selections in its body.
In both, each lane can run a loop of its own and stop when its own condition is false, with the same result. This holds if

- the condition and the body are elementwise over lanes, so that no lane depends on another one;
- the body keeps the carries of a lane whose condition is false. The condition then stays false.

The first is checked as for scans. For the second, the condition is assumed to be false and the body is simplified: each result
must be its carry.
"""

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from jaxkern._core.cpp import Unsupported, check_dtype
from jaxkern._engines.jaxpr import Constant, Value
from jaxkern._engines.loops import parts
from jaxkern._engines.loops.program import MOVES, Program

_BOOL = np.dtype(bool)

# The identity on the conditions of lanes, which `jaxkern.while_loop` puts where its condition joins them and where its body
# selects by them: the two are the same. JAX passes what they close over as separate operands.
lanes_p = Primitive("jaxkern_lanes")
lanes_p.def_impl(lambda x: x)
lanes_p.def_abstract_eval(lambda x: x)
ad.deflinear2(lanes_p, lambda ct, _: [ct])
batching.defvectorized(lanes_p)
mlir.register_lowering(lanes_p, lambda ctx, x: [x])


class WhileProgram(Program):
    """See the module.

    operands: constants of the condition, constants of the body, carries; results: new carries. condition: the condition of a lane.
    given: the operands before small dimensions are taken apart.

    equal: for each operand of the loop, the position of the first one that is the same array; equal constants are merged.
    join: whether a condition that joins others by `any` is a condition for each of these.

    Raises: Unsupported, naming the equation and the user's line.
    """

    def __init__(self, cond, body, cond_nconsts, body_nconsts, label, equal=(), join=True):
        self.label, self.steps, self._calls, self._marked = label, [], [], []
        self._numbers = {}
        self.captured, self._moved = {}, []
        (cond, of_cond), (body, of_body) = map(_parts, (cond, body))
        if cond.effects or body.effects:
            raise Unsupported(f"{label} has a condition or a body with side effects")
        self._refuse(cond)
        self._refuse(body)
        inputs = [self._value(v.aval) for v in (*cond.invars[:cond_nconsts], *body.invars)]
        for k, first in enumerate(
            equal[: cond_nconsts + body_nconsts]
        ):  # not carries, which only begin as the same array
            inputs[k] = inputs[first]
        self.given, carries = inputs, inputs[cond_nconsts + body_nconsts :]
        constants = lambda values: list(map(self._constant, values))
        (whole,) = self._inline(cond, constants(of_cond), [*inputs[:cond_nconsts], *carries])
        condition, joined = self._of_lanes(whole) if join else (whole, False)
        results = self._inline(body, constants(of_body), inputs[cond_nconsts:])
        if not isinstance(condition, Value):
            raise Unsupported(f"{label} has a condition that does not depend on the loop")
        self.operands = [*(v for v, _ in self.captured.values()), *inputs]
        self.num_consts, self.num_carry = len(self.operands) - len(carries), len(carries)
        self.carries_of_scan = len(carries)
        self.results = [*results, condition]
        for v in (*self.operands, *self.results):
            check_dtype(label, v.aval.dtype)
        self.remove_unused()
        for carry, result in zip(carries, results):
            for dims in (whole.dims, result.dims):  # conditions of several loops have the first dimensions of carries
                for d, e in zip(carry.dims, dims):
                    if d is not None and e is not None:
                        d.unite(e)
        self._unite()
        lanes = {d.same() for d in condition.dims if d is not None}
        for step in self.steps:  # small dimensions that are reduced in a lane
            self._moved += [(d, step) for d in self.over(step) if d.same() not in lanes and d.size <= parts.MOST]
        parts.split(self, self._moved, lanes)
        *self.result_parts, own = self.result_parts
        if own is not None:
            raise Unsupported(f"{label} joins conditions along a dimension in which the body moves data")
        self.remove_unused()
        if joined:
            self._check_kept()
            self.remove_unused()
        self._find_lanes()
        self._find_accumulators()
        self.condition = self.results.pop()
        if self.accumulators or self.sums:
            raise Unsupported(f"{label} has a sum over lanes, which are not done at the same time")

    def _equation(self, e, operands):
        if e.primitive is lanes_p:
            self._marked += operands
            return operands
        return super()._equation(e, operands)

    def remove_unused(self):
        super().remove_unused()
        self.used = tuple(k for k in self.used if self.operands.index(self.operands[k]) == k)

    def _of_lanes(self, whole):
        """(condition of a lane, whether `any` joins lanes) from the condition of the loop."""
        made = {v: step for step in self.steps for v in step.results}
        condition, negated, joined, passed = whole, False, False, []
        while condition in made and condition.dtype == _BOOL and condition not in self._marked:
            step = made[condition]
            if step.name == "not":
                negated = not negated
            elif step.name == ("reduce_and" if negated else "reduce_or"):
                joined = True
            elif step.name not in MOVES:
                break
            passed.append(step)
            condition = step.operands[0]
        if not joined:
            return whole, False
        for step in passed:  # which are no part of the program, but relate dimensions
            self.unite_step(step)
        if negated and isinstance(condition, Value):
            (condition,) = self.inlined(passed[0].equation, [condition], lambda x: [jnp.logical_not(x)])
        return condition, True

    # ---- lanes that are done

    def _check_kept(self):
        """Raises unless the body keeps the carries of a lane whose condition is false; removes its selections."""
        numbers = Numbers(self)
        done, runs = (numbers.assuming([self.results[-1], *self._marked], truth) for truth in (False, True))
        for k, (carry, result) in enumerate(zip(self.carries, self.results)):
            if done(carry) != done(result):
                raise Unsupported(
                    f"{self.label} has a condition that joins lanes, and carry {k} of shape {carry.aval.shape} changes in "
                    "lanes whose own condition is false"
                )
        for k, result in enumerate(self.results[: self.num_carry]):
            self.results[k] = numbers.value(runs(result))


class Numbers:
    """Gives values and constants of a program the same number if they are computed in the same way."""

    def __init__(self, program):
        self._steps, self._made, self._numbers, self._known, self._values = program.steps, {}, {}, {}, []
        for v in program.operands:
            self._define(v, id(v), v)
        for step in program.steps:
            if step.name in MOVES:
                self._numbers[step.result] = self(step.operands[0])
                continue
            params = str(sorted((k, _key(p)) for k, p in step.params.items()))
            place = () if step.operands else step.result.dims
            operands = tuple(map(self, step.operands))
            for j, v in enumerate(step.results):
                self._made.setdefault(self._define(v, (step.name, params, place, operands, j), v), step)

    def _define(self, v, key, value) -> int:
        if key not in self._known:
            self._known[key] = len(self._values)
            self._values.append(value)
        return self._numbers.setdefault(v, self._known[key])

    def __call__(self, v) -> int:
        if isinstance(v, Value):
            return self._numbers[v]
        key = (v.value.dtype, v.value.tobytes())
        return self._define(key, key, v)

    def value(self, number):
        """A value, or a constant, with this number."""
        return self._values[number]

    def assuming(self, conditions, truth):
        """A function from values to the numbers of what they are if the conditions have this truth value."""
        equal = {}  # number: of a simpler value

        def simplest(v):
            n = self(v)
            while n in equal:
                n = equal[n]
            return n

        def assume(v, truth):
            if isinstance(self.value(self(v)), Value) and self(v) not in equal:
                equal[self(v)] = self(Constant(np.bool_(truth)))
                step = self._made.get(self(v))
                if step is not None and step.name in ("not", "or" if not truth else "and"):
                    for x in step.operands:
                        assume(x, truth != (step.name == "not"))

        for v in conditions:
            if v in self._numbers:  # else the results do not depend on it
                assume(v, truth)
        for step in self._steps:
            if step.name not in MOVES and self(step.result) not in equal:
                found = self._simplified(step, [simplest(v) for v in step.operands])
                if found not in (None, self(step.result)):
                    equal[self(step.result)] = found
        return simplest

    def _simplified(self, step, xs):
        """The number of what a step computes from values with these numbers, if it is one of them or a constant."""
        values = [self.value(x) for x in xs]
        constants = [v.value if isinstance(v, Constant) else None for v in values]
        name, dtype = step.name, step.result.dtype
        if name == "select_n":
            which, cases = constants[0], xs[1:]
            return cases[int(which)] if which is not None else cases[0] if len(set(cases)) == 1 else None
        if name == "convert_element_type":
            same = values[0].aval.dtype == dtype
            return xs[0] if same else self(Constant(constants[0].astype(dtype))) if constants[0] is not None else None
        if name == "not" and dtype == _BOOL and constants[0] is not None:
            return self(Constant(np.logical_not(constants[0])))
        if name in ("and", "or") and dtype == _BOOL or name in ("add", "sub") and jnp.issubdtype(dtype, jnp.integer):
            for k, c in enumerate(constants):
                if c is not None and name in ("and", "or") and bool(c) == (name == "or"):
                    return xs[k]
                if c is not None and (k == 1 or name != "sub") and bool(c) == (name == "and"):
                    return xs[1 - k]
        return None


def read(cond, body, cond_nconsts, body_nconsts, label, equal=()) -> WhileProgram:
    """The WhileProgram of a while loop. Lanes are the dimensions that its condition is joined over, by default the dimensions of `vmap`."""
    given = cond, body, cond_nconsts, body_nconsts, label, equal
    try:
        return WhileProgram(*given)
    except Unsupported:
        if not _parts(cond)[0].outvars[0].aval.shape:
            raise
        return WhileProgram(*given, join=False)


def _key(param) -> str:
    """Text of a parameter of an equation. Parameters whose text is equal are equal."""
    plain = isinstance(param, (str, int, float, bool, tuple, type(None), np.dtype, type))
    return repr(param) if plain else f"{type(param).__name__} {id(param)}"


def _parts(closed):
    """(jaxpr, its constants)."""
    return (closed.jaxpr, closed.consts) if isinstance(closed, ClosedJaxpr) else (closed, getattr(closed, "consts", ()))
