"""What the body of a scan does, read from its jaxpr.

    program = Program(jaxpr, consts, num_consts, num_carry, label="jaxkern.scan: f")

Loops of few steps in the body are repeated, random bits become arithmetic (rewrites.py), and small dimensions along which data
moves are taken apart (parts.py). All other arrays of the body share dimensions, the lanes; an array may lack some. In each
lane the body computes on scalars, so a thread can run all steps of its lane. A value that lacks a dimension is the same in all
lanes along it.

The gradient of a constant that lacks dimensions is a carry to which each step adds a sum over lanes. A sum over lanes is
linear, so such a carry is an accumulator: each lane adds up its own terms, and the sum over lanes is taken once, after the
loop. Up to that addition the terms may be multiplied by what lacks the same dimensions. Carries that are such sums and enter
linear operations are in linear.py.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkern._core import compat
from jaxkern._core.cpp import Unsupported, check_dtype
from jaxkern._core.jaxprs import inner_jaxprs, unrolled_size
from jaxkern._engines.jaxpr import REDUCTIONS, RENAMED, Constant, Flat, Step, Value
from jaxkern._engines.loops import indexing, linear, pairs, parts, rewrites
from jaxkern._engines.loops.known import computed

MOVES = (*RENAMED, "broadcast_in_dim", "transpose")
_ADD = ("add", "add_any")
MOST_REPEATED = 600  # equations of a loop in the body
MOST_STEPS = 4000  # of a body with its inner loops: twice the statements of the largest kernel
NEVER = frozenset(
    "dot_general conv_general_dilated sort top_k gather scatter scatter-add scatter-mul scatter-min scatter-max dynamic_slice "
    "dynamic_update_slice cumsum cumprod cummax cummin cumlogsumexp reduce_window_sum reduce_window_max fft psum all_gather "
    "all_to_all ppermute shard_map ffi_call pallas_call custom_partitioning rng_bit_generator cholesky triangular_solve "
    "io_callback pure_callback debug_callback".split()
)


class Program(Flat):
    """See the module.

    operands: constants, carries, elements of xs; results: new carries, elements of ys. num_consts, num_carry: how many.
    dims: the lanes, slowest first. accumulators: {position among the carries: frozenset of dims of its terms}.
    linear: positions of accumulators that enter linear operations; they start in one lane, and others with 0.
    sums: {position among the results: the same}, of elements of ys that are sums over lanes; they are taken after the loop.
    given, returned: what the jaxpr takes and returns, before arrays are taken apart.
    segments: Dims of the pieces of long dimensions that the body slices or joins.
    has_rows: whether dimensions that are taken apart are reduced, or occur twice in an array, as the dimensions of a matrix do.
    captured: {id: (Value, array)} of arrays that the jaxpr holds; they are operands in front of the others.

    Raises: Unsupported, naming the equation and the user's line.
    """

    otherwise = "which is not elementwise over lanes"
    linear: frozenset = frozenset()
    segments: frozenset = frozenset()
    operand_parts: tuple  # see parts.split
    result_parts: tuple

    def __init__(self, jaxpr, consts, num_consts, num_carry, label):
        self.label, self._calls, self.has_rows = label, [], False
        self._refuse(jaxpr)
        try:
            self._read_body(jaxpr, consts, num_consts, num_carry, False)
        except Unsupported:
            # Sums over lanes follow the loop where possible. Other reductions are of few elements and run in a lane.
            small = [d for step in self.steps for d in self.over(step) if d.size <= parts.MOST]
            if not small:
                raise
            try:
                self._read_body(jaxpr, consts, num_consts, num_carry, True)
                self.has_rows = True
            except Unsupported:
                small = []
            if not small:
                raise

    def _read_body(self, jaxpr, consts, num_consts, num_carry, reduces):
        """reduces: whether small dimensions are taken apart also where the body reduces them."""
        self._inline_body(jaxpr, consts, num_consts, num_carry)
        for step in self.steps if reduces else ():
            self._moved += [(d, step) for d in self.over(step) if d.size <= parts.MOST]
        long = [step for d, step in self._moved if d.same().size > parts.MOST]
        parts.split(self, self._moved)
        self.remove_unused()
        try:
            self._find_lanes()
        except Unsupported:
            if self.segments:  # of several sizes, which are not the same lanes
                self.fail(long[0], f"{self.otherwise}: slice and join arrays before the loop")
            raise
        try:
            self._find_accumulators()
        except Unsupported:
            if not linear.find(self):
                raise

    def _inline_body(self, jaxpr, consts, num_consts, num_carry):
        """Sets operands, steps and results, with the dimensions that they share."""
        self.steps, self._calls = [], []
        self._numbers = {}
        self.captured, self._moved = {}, []
        inputs = [self._value(v.aval) for v in jaxpr.invars]
        self.results = self._inline(jaxpr, list(map(self._constant, consts)), inputs)
        self.given, self.returned = tuple(inputs), tuple(self.results)
        self.operands = [*(v for v, _ in self.captured.values()), *inputs]
        self.num_consts, self.num_carry = len(self.captured) + num_consts, num_carry
        self.carries_of_scan = num_carry
        for v in (*self.operands, *self.results):
            if not pairs.is_complex(v.aval.dtype):
                check_dtype(self.label, v.aval.dtype)
        self.remove_unused()
        carries = zip(self.carries, self.results)
        for a, b in carries:
            for d, e in zip(a.dims, b.dims):
                if d is not None:
                    d.unite(e)
        self._unite()

    def _refuse(self, jaxpr):
        """Fails at the first operation that no kernel of a loop has, before anything is read: bodies may be whole models."""
        for e in jaxpr.eqns:
            if self.is_never(e):
                self.fail(Step(e.primitive.name, [], [], e, {}, tuple(self._calls)), self.why_never(e))
            self._calls.append(e)
            for inner in inner_jaxprs(e):
                self._refuse(inner)
            self._calls.pop()

    def is_never(self, equation) -> bool:
        """Whether no kernel of a loop has this operation."""
        name = equation.primitive.name
        return name in NEVER and not (name in (*indexing.READS, *indexing.WRITES) and indexing.may(equation))

    def why_never(self, equation) -> str:
        """What an error says of an operation that no kernel of a loop has."""
        name, most = equation.primitive.name, f"kernels index one element of at most {indexing.MOST}"
        if name in indexing.READS:
            return f"{self.otherwise}: {most}. Pass what step i reads at i as xs of the scan"
        if name in indexing.WRITES and not indexing.applies(equation):
            return f"{self.otherwise}: {most}. Return what step i writes at i as ys of the scan"
        return self.otherwise

    def _constant(self, c):
        """A number that is known, or else an operand in front of the others."""
        if np.ndim(c) == 0 and not isinstance(c, (jax.Array, jax.core.Tracer)):
            return Constant(np.asarray(c))
        if id(c) not in self.captured:
            self.captured[id(c)] = self._value(jax.typeof(c)), c
        return self.captured[id(c)][0]

    def _value(self, aval):
        if compat.is_extended(aval.dtype) and not compat.is_key(aval.dtype):  # whose sum, for example, may be a maximum
            raise Unsupported(f"{self.label} has values of {aval.dtype}, a type with arithmetic of its own")
        return super()._value(compat.physical(aval))

    def computes(self, dtype, equation) -> bool:
        if pairs.is_complex(dtype):
            return pairs.known(equation) or equation.primitive.name in parts.MOVES
        return super().computes(dtype, equation)

    def rewritten(self, e, operands):
        f = rewrites.rewritten(e)
        if f is None and e.primitive.name in (*indexing.READS, *indexing.WRITES):
            f = indexing.rewritten(e, list(map(self._number, operands)))
        return None if f is None else (operands, f)

    def _number(self, v):
        """The number, or the array of one number, that an operand of an equation is; None if it is not known."""
        if isinstance(v, Constant):
            return v.value
        if v not in self._numbers:
            self._numbers[v] = self._number_of(v)
        return self._numbers[v]

    def _number_of(self, v):
        step = next((s for s in reversed(self.steps) if v in s.results), None)
        if step is None or v.aval.size != 1 or not jnp.issubdtype(v.dtype, jnp.integer) and v.dtype != bool:
            return None
        xs = list(map(self._number, step.operands))
        if not xs or any(x is None for x in xs):
            return None
        if step.name in MOVES:
            return np.reshape(xs[0], v.aval.shape)
        return computed(step.name, xs, v.dtype)

    def _equation(self, e, operands):
        if e.primitive.name == "scan":
            return self._unrolled(e, operands)
        if e.primitive.name in (*indexing.READS, *indexing.WRITES):
            return self._indexed(e, operands)
        known = lambda k: operands[k].value if isinstance(operands[k], Constant) else None
        count = rewrites.fixed_count(e.params, known) if e.primitive.name == "while" else None
        if count is None:
            return super()._equation(e, operands)
        first, own = e.params["cond_nconsts"], e.params["body_nconsts"]
        carry = operands[first + own :]
        for _ in range(self._count(e, e.params["body_jaxpr"], count)):
            carry = self._called(e, e.params["body_jaxpr"], [*operands[first : first + own], *carry])
        return carry

    def _indexed(self, e, operands):
        """The results of a read or a write at an index. Among few elements it chooses from values of a lane."""
        results, along = super()._equation(e, operands), indexing.axis(e)
        step = Step(e.primitive.name, [], [], e, {}, tuple(self._calls))
        for v in (operands[0], *results) if e.primitive.name in indexing.WRITES else operands[:1]:
            d = v.dims[along] if isinstance(v, Value) and along is not None else None
            if d is not None and d.size <= parts.MOST:
                self._moved.append((d, step))
        return results

    def _count(self, e, closed, count) -> int:
        """How often the body of a loop is repeated, if that is not too often."""
        # Loops in loops multiply.
        large = len(self.steps) > MOST_STEPS or count * unrolled_size(closed.jaxpr) > MOST_STEPS
        if large or count * len(closed.jaxpr.eqns) > MOST_REPEATED:
            self.fail(
                Step(e.primitive.name, [], [], e, {}, tuple(self._calls)), f"a loop of {count} steps, which is long"
            )
        return count

    def _called(self, e, closed, operands):
        self._calls.append(e)
        results = self._inline(closed.jaxpr, map(self._constant, closed.consts), operands)
        self._calls.pop()
        return results

    def _unrolled(self, e, operands):
        """The results of a scan in the body: its steps one after the other."""
        closed, length = e.params["jaxpr"], self._count(e, e.params["jaxpr"], e.params["length"])
        num_consts, num_carry = compat.counts_of_scan(e.params)
        consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]
        xs, ys = operands[num_consts + num_carry :], [None] * length
        for t in range(length)[:: -1 if e.params["reverse"] else 1]:
            element = lambda x, t=t: lax.index_in_dim(x, t, 0, False)
            elements = [self.inlined(e, [x], element)[0] for x in xs]
            results = self._called(e, closed, [*consts, *carry, *elements])
            carry, ys[t] = results[:num_carry], results[num_carry:]
        together = lambda *ys: lax.concatenate([lax.expand_dims(y, (0,)) for y in ys], 0)
        empty = [v.aval for v in e.outvars[num_carry:]] if not length else []
        ys = [self.inlined(e, list(y), together)[0] for y in zip(*ys)]
        ys += [self.inlined(e, [], lambda a=a: jnp.zeros(a.shape, a.dtype))[0] for a in empty]
        return [*carry, *ys]

    def unite_step(self, step):
        if step.name in (*indexing.READS, *indexing.WRITES):
            self.fail(step, self.why_never(step.equation))
        if step.name not in parts.MOVES:
            super().unite_step(step)
            return
        unite = lambda pairs: [a.unite(b) for a, b in pairs if a is not None and b is not None]
        self._moved += [(d, step) for d in parts.unite(step, unite)]

    def _doubled(self, step, v):
        """A matrix of a state, such as probabilities of transitions, is taken apart if its dimensions are small."""
        twice = {d for d in v.set() if v.dims.count(d) > 1}
        if any(d.size > parts.MOST for d in twice):
            super()._doubled(step, v)
        self._moved += [(d, step) for d in twice]
        self.has_rows = True

    # ---- arrays of the scan

    def split(self, arrays) -> list:
        """The operands, from what the body captured and the operands of the scan."""
        return [y for x, p in zip(arrays, self.operand_parts, strict=True) for y in ([x] if p is None else p.split(x))]

    def parts_of(self, avals) -> list:
        """The types of the results, from the types of the results of the scan."""
        return [b for a, p in zip(avals, self.result_parts, strict=True) for b in ([a] if p is None else p.of(a))]

    def join(self, arrays) -> list:
        """The results of the scan, from the results."""
        arrays, found = iter(arrays), []
        for k, p in enumerate(self.result_parts):
            steps = k >= self.carries_of_scan
            found.append(next(arrays) if p is None else p.join([next(arrays) for _ in p.places], steps))
        return found

    @property
    def rank(self) -> int:
        """The dimensions of an array with all lanes."""
        return len(self.dims)

    @property
    def zeros(self) -> list:
        """Positions of the carries that start with 0; their first values are added after the loop."""
        return sorted(set(self.accumulators) - self.linear)

    @property
    def inits(self) -> list:
        """Positions, among the operands, of the first values that a kernel reads."""
        return [self.num_consts + k for k in range(self.num_carry) if k not in self.zeros]

    @property
    def carries(self) -> list:
        return self.operands[self.num_consts : self.num_consts + self.num_carry]

    def arrays(self) -> list:
        """The Values that the kernel reads or writes."""
        read = [self.operands[k] for k in self.used]
        return [v for v in dict.fromkeys((*read, *self.carries, *self.results)) if isinstance(v, Value)]

    def _values(self):
        found = [*self.arrays(), *(v for s in self.steps for v in s.results)]
        return list(dict.fromkeys(found))

    def refresh(self):
        """Sets the dimensions of all Values to what stands for them, after some were united."""
        for v in (*self.operands, *self._values()):
            v.dims = tuple(d and d.same() for d in v.dims)

    def _find_lanes(self):
        """Dimensions that no equation relates to all lanes are united with lanes of their size, from the right if possible."""
        rank = lambda v: len(v.set())
        full = max(self._values(), key=rank, default=None)
        if full is None:
            self.dims = ()
            return
        for v in self.arrays():
            if not v.set() <= full.set():
                every = list(reversed(full.dims))
                for a, b in [*zip(every, reversed(v.dims)), *itertools.product(every, reversed(v.dims))]:
                    if a is not None and b is not None and a.size == b.size:
                        own, lanes = ({d.same() for d in dims if d is not None} for dims in (v.dims, full.dims))
                        if b.same() not in lanes and a.same() not in own:
                            a.same().unite(b.same())
        self.refresh()
        for v in self._values():
            if rank(v) < sum(d is not None for d in v.dims):
                raise Unsupported(
                    f"{self.label}: an array of shape {v.aval.shape} has two dimensions that are one elsewhere"
                )
        for v in self._values():
            if not v.set() <= full.set():
                shapes = f"{tuple(v.aval.shape)} and {tuple(full.aval.shape)}"
                raise Unsupported(f"{self.label}: arrays of shapes {shapes} do not share their lanes")
        stored = [v for v in self.arrays() if v.set() == full.set()]
        self.dims = tuple(d for d in (stored or [full])[-1].dims if d is not None)

    def _find_accumulators(self):
        uses = [v for s in self.steps for v in s.operands]
        once = lambda v: uses.count(v) == 1 and v not in self.results
        is_last_or_once = lambda v, k: once(v) or v is self.results[k]
        first = {v: k for k, v in enumerate(self.carries) if once(v) and jnp.issubdtype(v.dtype, jnp.inexact)}
        partial = {}  # value: dims of its terms, for values that are still to be summed over lanes
        summed = {}  # value: the accumulator that it is
        zeros: set = set()  # sums of nothing but zeros
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
                partial[out] = partial.get(v, self.lanes_of(v))
                continue
            rest = [v for v in step.operands if v not in zeros and not (isinstance(v, Constant) and not v.value)]
            if name in _ADD and len(rest) < 2:
                # Gradients of parts of a constant are padded with zeros, and added up.
                v = rest[0] if rest else None
                if v is None:
                    zeros.add(out)
                elif v in partial:
                    partial[out] = partial[v]
                elif v in first and once(out):
                    first[out] = first[v]
                elif v in summed and is_last_or_once(out, summed[v]):
                    summed[out] = summed[v]
                if v not in summed or out in summed:
                    continue
            started = [v for v in step.operands if v in summed]
            if not waiting and not started:
                continue
            others = [v for v in step.operands if v not in partial]
            terms = {partial[v] for v in waiting}
            known = [v for v in others if v in first or v in summed]
            if name in _ADD and len(waiting) == 1 and len(known) == 1:
                k = first.get(known[0], summed.get(known[0]))
                if self.accumulators.setdefault(k, *terms) == next(iter(terms)) and is_last_or_once(out, k):
                    summed[out] = k
                    continue
            elif started:
                pass
            elif (
                name in MOVES
                and self.lanes_of(out) == self.lanes_of(step.operands[0])
                or name in ("neg", "conj")
                or self.is_sum(step)
            ):
                partial[out] = terms.pop()
                continue
            elif name == "convert_element_type" and jnp.issubdtype(out.dtype, jnp.inexact):
                partial[out] = terms.pop()
                continue
            elif name in ("add", "add_any", "sub") and not others and len(terms) == 1:
                partial[out] = terms.pop()
                continue
            elif len(waiting) == 1 and (name == "mul" or name == "div" and step.operands[0] in partial):
                partial[out] = terms.pop().union(*(self.lanes_of(v) for v in others if isinstance(v, Value)))
                continue
            elif name == "select_n" and step.operands[0] not in partial and all(map(self._is_zero, others[1:])):
                if len(terms) == 1:
                    partial[out] = terms.pop().union(self.lanes_of(others[0]) if isinstance(others[0], Value) else ())
                    continue
            self.fail(step, "on a sum over lanes, which is known only after the loop")
        for k, v in enumerate(self.results):
            if v in partial and k >= self.num_carry:
                self.sums[k] = partial[v]
            elif v in partial or (v in summed and summed[v] != k) or (k in self.accumulators and v not in summed):
                self.fail_of_sum(v)

    def lanes_of(self, v) -> frozenset:
        return v.set()

    def is_sum(self, step) -> bool:
        """Whether a step reduces nothing but lanes, or is a sum."""
        return step.name in REDUCTIONS

    def fail_of_sum(self, v):
        """Fails for a carry that is a sum over lanes."""
        raise Unsupported(f"{self.label}: a carry is a sum over lanes, which is known only after the loop")

    def _is_zero(self, v) -> bool:
        while isinstance(v, Value):
            step = next((s for s in self.steps if v in s.results), None)
            if step is None or step.name not in MOVES:
                return False
            v = step.operands[0]
        return not v.value
