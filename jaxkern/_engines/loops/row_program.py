"""What the body of a scan does that reduces along small dimensions, its rows.

    program = RowProgram(jaxpr, consts, num_consts, num_carry, label)

Dimensions of the body's arrays are lanes, as for `Program`, or rows. Along a row the body may reduce, and multiply by matrices:
probabilities of transitions between the states of a hidden Markov model, or the costs of a transport. The threads that share a
lane hold its rows. A product (`dot_general`) is a sum of products along the contracted rows.

A dimension is one of rows if the body reduces along it within a step, or has it twice in an array. A sum over other dimensions
that only ends up in an accumulator is a sum over lanes, which is taken after the loop; see program.py. So dimensions become rows one
after the other, until all sums that are left can wait for the end of the loop.
"""

import math

from jax import lax

from jaxkern._core.cpp import Unsupported
from jaxkern._engines.jaxpr import REDUCTIONS, Flat, Value
from jaxkern._engines.loops import pairs, parts
from jaxkern._engines.loops.program import Program

MOST_ROW = 4096  # elements of a row
MOST_PRODUCT = 1 << 25  # multiplications of a product in a step: XLA's are faster for larger ones
_ARRAYS = ("add", "max", "min", "mul", "and", "or", "xor", "argmax", "argmin")  # reductions that kernels have


class _SumsOver(Exception):
    """A sum over these dimensions is needed within a step."""

    def __init__(self, dims):
        super().__init__()
        self.dims = dims


class RowProgram(Program):
    """See the module and `Program`. rows: the Dims that are rows. dims: the lanes alone.

    accumulators, sums: {position: frozenset of the lanes of its terms}.
    """

    otherwise = "which is neither elementwise over lanes nor a reduction along a row"

    def __init__(self, jaxpr, consts, num_consts, num_carry, label):
        self.label, self._calls, self.rows = label, [], frozenset()
        if not all(isinstance(n, int) for v in jaxpr.invars for n in v.aval.shape):
            raise Unsupported(f"{label}: symbolic shapes")
        self._refuse(jaxpr)
        self._inline_body(jaxpr, consts, num_consts, num_carry)
        self.operand_parts, self.result_parts = (None,) * len(self.operands), (None,) * len(self.results)
        self.made = {v: step for step in self.steps for v in step.results}
        self._find_rows()
        self._find_lanes()

    def is_never(self, equation) -> bool:
        if equation.primitive.name != "dot_general":
            return super().is_never(equation)
        return multiplications(equation) > MOST_PRODUCT

    def why_never(self, equation) -> str:
        if equation.primitive.name != "dot_general":
            return super().why_never(equation)
        return f"a product of {multiplications(equation)} multiplications in each step, of at most {MOST_PRODUCT} for a kernel"

    def rewritten(self, e, operands):
        if e.primitive.name == "dot_general":
            self._has_products = True
            return operands, lambda a, b: _product(a, b, e.params)
        return super().rewritten(e, operands)

    def computes(self, dtype, equation) -> bool:
        return not pairs.is_complex(dtype) and super().computes(dtype, equation)

    def unite_step(self, step):
        if step.name not in parts.MOVES:
            Flat.unite_step(self, step)
            return
        if step.name == "pad" and any(between for _, _, between in step.params["padding_config"]):
            self.fail(step, self.otherwise)
        unite = lambda pairs: [a.unite(b) for a, b in pairs if a is not None and b is not None]
        self._moved += [(d, step) for d in parts.unite(step, unite)]

    def _doubled(self, step, v):
        pass

    def over(self, step) -> frozenset:
        """The lanes that a step reduces."""
        return super().over(step) - self.rows

    def reduced(self, step) -> frozenset:
        """The rows that a step reduces."""
        return super().over(step) & self.rows

    def lanes_of(self, v) -> frozenset:
        return v.set() - self.rows

    def is_sum(self, step) -> bool:
        linear = ("reduce_sum", "slice", "rev") + ("pad",) * (step.name == "pad" and self._is_zero(step.operands[1]))
        return step.name in linear or (step.name in REDUCTIONS and not self.reduced(step))

    def fail(self, step, what):
        if self._finds_rows and (dims := self._sums_behind(step.operands, self.over(step))):
            raise _SumsOver(dims)
        super().fail(step, what)

    def fail_of_sum(self, v):
        if dims := self._sums_behind([v], frozenset()):
            raise _SumsOver(dims)
        super().fail_of_sum(v)

    _finds_rows = _has_products = False

    def _sums_behind(self, values, dims) -> frozenset:
        """The lanes of the sums that values depend on, if these are not given."""
        waiting, seen = list(values), set()
        while waiting and not dims:
            v = waiting.pop()
            if v in seen or v not in self.made:
                continue
            seen.add(v)
            dims = self.over(self.made[v])
            waiting += self.made[v].operands
        return dims

    def _find_rows(self):
        every = self._values()
        self.rows = frozenset(d for v in every for d in v.set() if v.dims.count(d) > 1)
        self.rows |= {d.same() for d, _ in self._moved}
        self._finds_rows = True
        while True:
            try:
                self._find_accumulators()
            except _SumsOver as sums:
                self.rows |= sums.dims
                continue
            # What no carry has is a row, too, as the results of a product of a row and a matrix.
            own = [v for k, v in enumerate(self.carries) if k not in self.accumulators]
            carried = {d for v in own for d in v.set()} - self.rows
            more = {d for v in every for d in v.set() if d.size <= MOST_ROW} - carried - self.rows
            if not (carried and more) and not any(map(self.reduced, self.steps)):
                # Products of a carry and a matrix may be only results of a step.
                carried, more = True, {d for k, own in self.sums.items() for d in own - self.results[k].set()}
            if not carried or not more:
                break
            self.rows |= more
        self._finds_rows = False
        if self.rows and not self._has_products and not any(map(self.reduced, self.steps)):  # a thread runs a lane
            raise Unsupported(f"{self.label} reduces no row")
        for step in self.steps:
            if self.reduced(step) and REDUCTIONS[step.name] not in _ARRAYS:
                self.fail(step, "a reduction that kernels of loops do not have")
            if any(d.size > MOST_ROW for d in self.reduced(step)):
                self.fail(step, f"a reduction of more than {MOST_ROW} elements")
        related = self._related(frozenset().union(*map(self.reduced, self.steps)))
        for d, step in self._moved:
            if d.same() not in related and d.same().size > parts.MOST:  # such as the steps of an inner loop
                self.fail(step, self.otherwise)
        if any(d.size > MOST_ROW for d in self.rows):
            raise Unsupported(f"{self.label}: rows of more than {MOST_ROW} elements")

    def _related(self, dims) -> frozenset:
        """These rows, and rows between which data moves to or from them."""
        groups: dict = {}
        for d, step in self._moved:
            groups.setdefault(id(step), set()).add(d.same())
        found = set(dims)
        while more := [own for own in groups.values() if own & found and not own <= found]:
            found.update(*more)
        return frozenset(found)

    def lanes(self, v) -> tuple:
        return tuple(d for d in v.dims if d is not None and d not in self.rows)

    def axes(self, v) -> tuple:
        """The axes of a value that are rows."""
        return tuple(a for a, d in enumerate(v.dims) if d in self.rows)

    def sizes(self, v) -> tuple:
        return tuple(v.dims[a].size for a in self.axes(v))

    @property
    def rank(self) -> int:
        """The dimensions of an array with all lanes and a row."""
        return len(self.dims) + 1

    @property
    def indices(self) -> list:
        """The lanes whose indices the body uses."""
        found = [s.result.dims[s.params["dimension"]] for s in self.steps if s.name == "iota"]
        return [d for d in dict.fromkeys(found) if d in self.dims]

    def _find_lanes(self):
        values = [v for v in (*self.operands, *self.results) if isinstance(v, Value)]
        full = max(map(self.lanes, values), key=len, default=())
        self.dims = next((self.lanes(v) for v in reversed(values) if len(self.lanes(v)) == len(full)), ())
        for v in self._values():
            if not set(self.lanes(v)) <= set(self.dims):
                raise Unsupported(f"{self.label}: arrays of shape {tuple(v.aval.shape)} do not share their lanes")


def multiplications(equation) -> int:
    """Of a dot_general."""
    (contracted, _), (batch, _) = equation.params["dimension_numbers"]
    a, b = (v.aval.shape for v in equation.invars)
    return math.prod(a) * math.prod(b) // max(1, math.prod(a[k] for k in (*contracted, *batch)))


def _product(a, b, params):
    """A dot_general as a sum of products."""
    (ca, cb), (ba, bb) = params["dimension_numbers"]
    kind = params["preferred_element_type"] or a.dtype
    free = lambda x, c, batch: [k for k in range(x.ndim) if k not in c and k not in batch]
    fa, fb = free(a, ca, ba), free(b, cb, bb)
    batch, rest = len(ba), len(fa) + len(fb)
    shape = [a.shape[k] for k in (*ba, *fa)] + [b.shape[k] for k in fb] + [a.shape[k] for k in ca]
    at = lambda axes, first: [*range(batch), *range(first, first + len(axes))]
    row = range(batch + rest, batch + rest + len(ca))
    a = lax.broadcast_in_dim(lax.transpose(a, (*ba, *fa, *ca)), shape, (*at(fa, batch), *row))
    b = lax.broadcast_in_dim(lax.transpose(b, (*bb, *fb, *cb)), shape, (*at(fb, batch + len(fa)), *row))
    convert = lambda x: lax.convert_element_type(x, kind)
    return lax.reduce_sum(lax.mul(convert(a), convert(b)), tuple(row))
