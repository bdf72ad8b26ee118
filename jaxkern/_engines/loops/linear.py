"""Carries that are sums over lanes and enter linear operations: cotangents of carries that broadcast into larger ones.

    find(program)       sets program.accumulators, linear and sums, and adds the steps that they need

A scalar s that a step adds to all lanes, s' = a s, h' = h + s, has the cotangent t' = a (t + sum over lanes of g). If a does
not depend on these lanes, each lane can keep a part of t, p' = a (p + g), and the parts are added up once, after the loop. So a
*part* is a value whose sum over some lanes is the value of the body. Sums over lanes are parts; what linear operations make of
parts are parts too; a carry whose new value is a part is one. What is added to a part, and is the same in all lanes, is added by
the first lane alone; so is the first value of the carry.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkern._core.cpp import Unsupported
from jaxkern._engines.jaxpr import MOVES, REDUCTIONS, Constant, Step, Value

_UNARY = ("neg", "conj", "real", "imag")
_ADD = ("add", "add_any", "sub", "complex")


def find(program) -> bool:
    """See the module. Returns False, and changes nothing, if a part enters an operation that is not linear."""
    carries: dict = {}  # {position of a carry that is a part: the lanes over which it is summed, and its own}
    while True:
        reader = _Reader(program, carries)
        try:
            reader.run()
        except Unsupported:
            return False
        grown = reader.grown()
        if not grown:
            break
        carries |= grown
    if not all(jnp.issubdtype(program.carries[k].dtype, jnp.inexact) for k in carries):
        return False
    results = list(program.results)
    for k, v in enumerate(results):
        if k in carries:
            results[k] = reader.part(v, carries[k], program.carries[k])
    count = program.num_carry
    program.sums = {k: reader.parts[v] for k, v in enumerate(results) if k >= count and v in reader.parts}
    program.accumulators, program.linear = dict(carries), frozenset(carries)
    program.results, program.steps = results, reader.steps
    program.remove_unused()
    return True


class _Reader:
    """parts: {Value: the lanes that it depends on; it is summed over some of them}. steps: the program's, and new ones."""

    def __init__(self, program, carries):
        self.program, self.carries = program, carries
        self.parts = {program.carries[k]: dims for k, dims in carries.items()}
        self.steps, self._firsts = [], {}

    def run(self):
        for step in self.program.steps:
            self._step(step)

    def grown(self) -> dict:
        """Carries that are parts, or of more lanes than was known."""
        found = {}
        for k, v in enumerate(self.program.results[: self.program.num_carry]):
            own = self.program.carries[k].set()
            dims = self.parts.get(v, frozenset()) | self.carries.get(k, frozenset())
            if dims and dims | own != self.carries.get(k):
                found[k] = dims | own
        return found

    def _step(self, step):
        name, out, operands = step.name, step.result, step.operands
        given = [v for v in operands if v in self.parts]
        over = self.program.over(step)
        if over:
            if name != "reduce_sum" or isinstance(operands[0], Constant):
                self._fail()
            self.parts[out] = self.parts.get(operands[0], operands[0].set())
        elif given:
            operands = self._linear(step, given)
            step = Step(name, operands, step.results, step.equation, step.params, step.calls, step.origin, step.stage)
        self.steps.append(step)

    def _linear(self, step, given) -> list:
        """The operands of a step on parts; the step is linear in them. Sets what its result is."""
        name, out, operands = step.name, step.result, step.operands
        dims = frozenset().union(*(self.parts.get(v, _lanes(v)) for v in operands), *map(_lanes, operands))
        which = 0  # the first operand that may be a part
        if name in MOVES:
            added = out.set() - operands[0].set()
            if added & dims:
                self._fail()  # it takes the sum back to the lanes
            dims |= added
        elif name in _ADD:
            operands = [self.part(v, dims, out) for v in operands]
        elif name in ("select_n", "select"):
            which = 1
            operands = [operands[0], *(self.part(v, dims, out) for v in operands[1:])]
        elif name in ("mul", "div"):
            if len(given) > 1 or (name == "div" and operands[0] not in self.parts):
                self._fail()
        elif name == "convert_element_type":
            if not jnp.issubdtype(out.dtype, jnp.inexact):
                self._fail()
        elif name not in _UNARY and name not in REDUCTIONS:  # of dimensions of size 1
            self._fail()
        if any(v in self.parts for v in operands[:which]):
            self._fail()
        for part in given:
            summed = self.parts[part] - part.set()
            if any(_lanes(v) & summed for v in step.operands):
                self._fail()  # a coefficient depends on the lanes over which the part is summed
        self.parts[out] = dims
        return operands

    def part(self, v, dims, like):
        """v as a part of these lanes; it is 0 in all lanes but the first along lanes that it lacks. like: of its shape."""
        lacking = dims - self.parts.get(v, _lanes(v))
        if isinstance(v, Constant):
            if not np.any(v.value):
                return v
        if not lacking:
            return v
        zero = Constant(np.zeros((), v.aval.dtype))
        y = Value(jax.core.ShapedArray(like.aval.shape, v.aval.dtype), like.dims)
        self._add(lax.select_n, [self._first(lacking), zero, v], y)
        self.parts[y] = dims
        return y

    def _first(self, dims):
        """Whether a lane is the first along these dimensions."""
        if dims not in self._firsts:
            ordered = [d for d in self.program.dims if d in dims]
            flags = []
            for d in ordered:
                kind = lambda dtype, d=d: jax.core.ShapedArray((d.size,), np.dtype(dtype))
                place, flag = Value(kind(np.int32), (d,)), Value(kind(bool), (d,))
                iota = jax.make_jaxpr(lambda d=d: lax.iota(np.int32, d.size))().eqns[0]
                self.steps.append(Step("iota", [], [place], iota, dict(iota.params)))
                self._add(lax.eq, [place, Constant(np.zeros((), np.int32))], flag)
                flags.append((flag, (d,)))

            def both(a, b):
                (x, first), (y, second) = a, b
                own = (*first, *second)
                z = Value(jax.core.ShapedArray(tuple(d.size for d in own), np.dtype(bool)), own)
                self._add(lax.bitwise_and, [x, y], z)
                return z, own

            self._firsts[dims] = functools.reduce(both, flags)[0]
        return self._firsts[dims]

    def _add(self, f, operands, result):
        scalars = [jax.ShapeDtypeStruct((), v.aval.dtype) for v in operands]
        equation = jax.make_jaxpr(f)(*scalars).eqns[0]
        self.steps.append(Step(equation.primitive.name, operands, [result], equation, dict(equation.params)))

    def _fail(self):
        raise Unsupported("not linear")


def _lanes(v) -> frozenset:
    return v.set() if isinstance(v, Value) else frozenset()
