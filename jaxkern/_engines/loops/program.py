"""What the body of a scan does, read from its jaxpr.

    program = Program(jaxpr, consts, num_consts, num_carry, label="jaxkern.scan: f")

All arrays of the body share dimensions, the lanes; an array may lack some. In each lane the body computes on scalars, so a
thread can run all steps of its lane. A value that lacks a dimension is the same in all lanes along it.

The gradient of a constant that lacks dimensions is a carry to which each step adds a sum over lanes. A sum over lanes is
linear, so such a carry is an accumulator: each lane adds up its own terms, and the sum over lanes is taken once, behind the
loop. Up to that addition the terms may be multiplied by what lacks the same dimensions.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern._core import functor
from jaxkern._core.functor import Unsupported
from jaxkern._engines.jaxpr import REDUCTIONS, RENAMED, Constant, Flat, Value

MOVES = (*RENAMED, "broadcast_in_dim", "transpose")
_ADD = ("add", "add_any")


class Program(Flat):
    """See the module.

    operands: constants, carries, elements of xs; results: new carries, elements of ys. num_consts, num_carry: how many.
    dims: the lanes, slowest first. accumulators: {position among the carries: frozenset of dims of its terms}.
    sums: {position among the results: the same}, of elements of ys that are sums over lanes; they are taken behind the loop.

    Raises: Unsupported, naming the equation and the user's line.
    """

    otherwise = "which is not elementwise over lanes"

    def __init__(self, jaxpr, consts, num_consts, num_carry, label):
        known = lambda c: np.ndim(c) == 0 and not isinstance(c, (jax.Array, jax.core.Tracer))
        self.label, self.steps, self._calls = label, [], []
        given = [Constant(np.asarray(c)) if known(c) else self._value(jax.typeof(c)) for c in consts]
        captured = [v for v in given if isinstance(v, Value)]
        self.num_consts, self.num_carry = len(captured) + num_consts, num_carry
        inputs = [self._value(v.aval) for v in jaxpr.invars]
        self.operands = [*captured, *inputs]
        self.results = self._inline(jaxpr, given, inputs)
        for v in (*self.operands, *self.results):
            functor.check_dtype(label, v.aval.dtype)
        self._remove_unused()
        carries = zip(self.carries, self.results)
        for a, b in carries:
            for d, e in zip(a.dims, b.dims):
                if d is not None:
                    d.unite(e)
        self._unite()
        self._find_lanes()
        self._find_accumulators()

    @property
    def carries(self) -> list:
        return self.operands[self.num_consts : self.num_consts + self.num_carry]

    def _values(self):
        found = [*self.operands, *self.results, *(v for s in self.steps for v in s.results)]
        return [v for v in dict.fromkeys(found) if isinstance(v, Value)]

    def _find_lanes(self):
        """Dimensions that no equation relates are united from the right, as if they were broadcast."""
        rank = lambda v: len(v.set())
        full = max(self._values(), key=rank, default=None)
        if full is None:
            self.dims = ()
            return
        for v in (*self.operands, *self.results):
            if isinstance(v, Value) and not v.set() <= full.set():
                for a, b in zip(reversed(full.dims), reversed(v.dims)):
                    if a is not None and b is not None and a.size == b.size:
                        a.same().unite(b.same())
        for v in self._values():
            v.dims = tuple(d and d.same() for d in v.dims)
            if rank(v) < sum(d is not None for d in v.dims):
                raise Unsupported(
                    f"{self.label}: an array of shape {v.aval.shape} has two dimensions that are one elsewhere"
                )
        for v in self._values():
            if not v.set() <= full.set():
                shapes = f"{tuple(v.aval.shape)} and {tuple(full.aval.shape)}"
                raise Unsupported(f"{self.label}: arrays of shapes {shapes} do not share their lanes")
        stored = [v for v in (*self.operands, *self.results) if isinstance(v, Value) and v.set() == full.set()]
        self.dims = tuple(d for d in (stored or [full])[-1].dims if d is not None)

    def _find_accumulators(self):
        uses = [v for s in self.steps for v in s.operands]
        once = lambda v: uses.count(v) == 1 and v not in self.results
        first = {v: k for k, v in enumerate(self.carries) if once(v) and jnp.issubdtype(v.dtype, jnp.inexact)}
        partial = {}  # value: dims of its terms, for values that are still to be summed over lanes
        summed = {}  # value: the accumulator that it is
        self.accumulators, self.sums = {}, {}
        for step in self.steps:
            name, out = step.name, step.result
            over, waiting = self.over(step), [v for v in step.operands if v in partial]
            if over and name != "reduce_sum":
                self.fail(step, "a reduction over lanes, which cannot be done within a loop")
            if over:
                v = step.operands[0]
                if isinstance(v, Constant):
                    self.fail(step, "a reduction over lanes of a constant")
                partial[out] = partial.get(v, v.set())
                continue
            started = [v for v in step.operands if v in summed]
            if not waiting and not started:
                continue
            others = [v for v in step.operands if v not in partial]
            terms = {partial[v] for v in waiting}
            known = [v for v in others if v in first or v in summed]
            if name in _ADD and len(waiting) == 1 and len(known) == 1:
                k = first.get(known[0], summed.get(known[0]))
                if self.accumulators.setdefault(k, *terms) == next(iter(terms)) and (
                    once(out) or out is self.results[k]
                ):
                    summed[out] = k
                    continue
            elif started:
                pass
            elif name in MOVES and out.set() == step.operands[0].set() or name in ("neg", *REDUCTIONS):
                partial[out] = terms.pop()
                continue
            elif name == "convert_element_type" and jnp.issubdtype(out.dtype, jnp.inexact):
                partial[out] = terms.pop()
                continue
            elif name in ("add", "add_any", "sub") and not others and len(terms) == 1:
                partial[out] = terms.pop()
                continue
            elif len(waiting) == 1 and (name == "mul" or name == "div" and step.operands[0] in partial):
                partial[out] = terms.pop().union(*(v.set() for v in others if isinstance(v, Value)))
                continue
            elif name == "select_n" and step.operands[0] not in partial and all(map(self._is_zero, others[1:])):
                if len(terms) == 1:
                    partial[out] = terms.pop().union(others[0].set() if isinstance(others[0], Value) else ())
                    continue
            self.fail(step, "on a sum over lanes, which is known only behind the loop")
        for k, v in enumerate(self.results):
            if v in partial and k >= self.num_carry:
                self.sums[k] = partial[v]
            elif v in partial or (v in summed and summed[v] != k) or (k in self.accumulators and v not in summed):
                raise Unsupported(f"{self.label}: a carry is a sum over lanes, which is known only behind the loop")

    def _is_zero(self, v) -> bool:
        while isinstance(v, Value):
            step = next((s for s in self.steps if v in s.results), None)
            if step is None or step.name not in MOVES:
                return False
            v = step.operands[0]
        return not v.value
