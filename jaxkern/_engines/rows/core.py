"""What one kernel computes of a row function, and which of its values live from one pass to the next.

    core = Core(program, reduces=False)

A kernel stores rows and numbers, and sums both over rows. What the program does with these sums, if anything, is the epilogue,
which XLA runs. `generate.py` writes the kernel's code.
"""

import dataclasses
import functools
import itertools

import jax.numpy as jnp
import numpy as np

from jaxkern._core.coarse import COARSE, jumps
from jaxkern._core.define import FLOAT8, ceil_div
from jaxkern._core.jaxprs import computing
from jaxkern._engines.jaxpr import INDICES, MOVES, NOT_ELEMENTWISE, Constant, Value, source
from jaxkern._engines.rows.program import strides_of

# Elementary functions that a multiprocessor computes more slowly than it reads elements.
DEAR = frozenset(
    "acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma erf erf_inv erfc exp exp2 expm1 lgamma log log1p logistic pow "
    "sin sinh sqrt rsqrt tan tanh".split()
)


@dataclasses.dataclass(eq=False)
class Output:
    """An array that a kernel writes. kind: "row", "number", "columns" (rows, summed) or "total" (numbers, summed).

    value: what is stored or summed. result: the Value or Constant of the program that the array is. saturates: what is stored is
    clamped to the range of an 8-bit float.
    """

    value: object
    result: object
    kind: str
    dtype: np.dtype
    saturates: bool = False


class Core:
    """The part of a program that a kernel computes.

    reduces: whether it is a reduction, whose results are numbers: sums are added up in float64, unless the first result has 16 bits,
        which allow coarse arithmetic for all results.
    outputs: the arrays that it writes. epilogue: the steps that remain, on arrays; empty if the results of the program are
        the outputs.
    rows, columns, numbers: positions of operands that are read as such. indices: what is counted beside places in the row, {dimension: stride}.
    members: {number: its member in the struct Numbers}. inverses, scales: {divisor of elements: the member of its inverse, of its scale}; see
        `quotient` in functions.h, which coarse arithmetic does without.
    passes: for each pass over the row its reductions along it. stages: the passes of each stage, between which threads exchange
        what they reduced: one, or a maximum and sums with exponentials relative to it, which need one exchange.
    pivots: {stage of two passes: the number that exponents are relative to}. step_of: {value: the step that computes it}.
    """

    def __init__(self, program, reduces=False):
        self.program, self.reduces = program, reduces
        self._outputs()
        self._members()
        kinds = lambda test: tuple(k for k in program.used if test(program.operands[k]))
        self.rows = kinds(lambda v: v.is_row and len(v.set()) > 1)
        self.columns = kinds(lambda v: v.is_row and len(v.set()) == 1)
        self.numbers = kinds(lambda v: not v.is_row)

    def _outputs(self):
        """Cuts the program where sums over rows are complete."""
        program, found, summed = self.program, {}, []
        others = frozenset(program.others)
        for step in program.steps:
            value, over = next(iter(step.operands), None), program.over(step) - {program.row}
            if not over or value.summed:
                if any(v.summed for v in step.results):
                    summed.append(step)
                continue
            result, whole = step.result, value.set() - {program.row} == others == over
            if step.name == "reduce_sum" and whole and isinstance(value, Value):
                dtype = result.dtype if result in program.results else computing(result.dtype)
                found[result] = Output(value, result, "columns" if value.is_row else "total", dtype)
            else:  # XLA sums what the kernel stores
                if isinstance(value, Value):
                    kind = "row" if value.is_row else "number"
                    found[value] = Output(value, value, kind, computing(value.dtype))
                summed.append(step)
        for v in program.results:
            if isinstance(v, Value) and not v.summed and v not in found:
                clamped = self._clamped(v)
                found[v] = Output(clamped or v, v, "row" if v.is_row else "number", v.dtype, clamped is not None)
        for o in found.values():
            if o.kind in ("columns", "total"):
                o.dtype = self._only_rounded(o.result, summed) or o.dtype
        needed, epilogue = {v for v in program.results if isinstance(v, Value)}, []
        for step in reversed(summed):
            if needed.intersection(step.results) and not found.keys() & set(step.results):
                needed.update(v for v in step.operands if isinstance(v, Value))
                epilogue.append(step)
        self.epilogue = epilogue[::-1]
        # Values that the epilogue needs beside sums.
        for v in needed:
            if v not in found and not v.summed and v not in program.operands:
                found[v] = Output(v, v, "row" if v.is_row else "number", computing(v.dtype))
        order = {"row": 0, "number": 1, "columns": 2, "total": 3}
        self.outputs = sorted((o for v, o in found.items() if v in needed), key=lambda o: order[o.kind])
        self.outputs = [o for o in self.outputs if o.result not in program.operands or o.result in program.results]

    def _only_rounded(self, value, steps) -> np.dtype | None:
        """The type of 16 bits that the value is rounded to, if these steps change nothing but its shape and its type. Then the kernel may
        round it.
        """
        moved = {value}
        for step in steps:
            if moved.intersection(step.operands):
                of_one = step.name == "reduce_sum" and all(
                    step.operands[0].aval.shape[a] == 1 for a in step.params["axes"]
                )
                if not of_one and step.name not in (*MOVES, "convert_element_type"):
                    return None
                moved.update(step.results)
        types, rounded = {v.dtype for v in moved} - {np.dtype(np.float32)}, moved.intersection(self.program.results)
        if len(types) != 1 or not rounded or any(v.dtype not in types for v in rounded):
            return None
        (dtype,) = types
        return dtype if dtype.itemsize == 2 and computing(dtype) == np.float32 else None

    def _clamped(self, v):
        """What is clamped to the range of 8-bit floats and then converted to `v`; None if v is something else."""
        made = {y: step for step in self.program.steps for y in step.results}
        clamp = made.get(made[v].operands[0]) if v.is_row and v.dtype.name in FLOAT8 and v in made else None
        if clamp is None or clamp.name != "clamp":
            return None
        low, x, high = clamp.operands
        most = float(jnp.finfo(v.dtype).max)
        bounds = [float(b.value) for b in (low, high) if isinstance(b, Constant)]
        fits = bounds == [-most, most] and isinstance(x, Value) and x.is_row and computing(x.dtype) == np.float32
        return x if fits else None

    def steps(self) -> list:
        """The steps before the epilogue."""
        return [s for s in self.program.steps if s not in self.epilogue]

    @functools.cached_property
    def coarse(self) -> bool:
        """Whether coarse arithmetic is enough for what is stored: all real numbers that are stored have 16 bits."""
        # A sum that is only rounded at the end counts as wide: without the branches of precise divisions the compiler keeps more of a
        # row in registers, and spills [layer norm, gradient, bfloat16 1024 x 131072: 399 us, 458; H100].
        own = lambda o: o.kind in ("row", "number") or o.result in self.program.results
        real = [o.dtype if own(o) else computing(o.dtype) for o in self.outputs]
        real = [d for d in real if jnp.issubdtype(d, jnp.inexact)][: 1 if self.reduces else None]
        return bool(real) and all(d.itemsize == 2 for d in real)

    @functools.cached_property
    def precise(self) -> frozenset:
        """The steps that coarse arithmetic is not enough for, because a discontinuous operation depends on their results."""
        found, pending = set(), []
        for step in self.program.steps:
            if step.name in NOT_ELEMENTWISE or jumps(step.equation):
                pending += step.operands
        while pending:
            step = self.step_of.get(pending.pop())
            if step is not None and step not in found:
                found.add(step)
                pending += step.operands
        return frozenset(step for step in found if step.name in COARSE)

    def adds_in_float64(self, step) -> bool:
        """Whether threads add up a sum along the row in float64, from sums of packs in float32."""
        wide = self.reduces and not self.coarse and step.name == "reduce_sum"
        return wide and computing(step.result.dtype) == np.float32

    @functools.cached_property
    def quotients(self) -> dict:
        """{sum that is added up in float64: {its quotient by a constant: this constant}}. It is divided before it is rounded."""
        found = {}
        for step in self.program.steps:
            x = self.step_of.get(step.operands[0]) if step.name == "div" and step.result in self.members else None
            if x is not None and isinstance(step.operands[1], Constant) and self.adds_in_float64(x):
                found.setdefault(x.result, {})[step.result] = step.operands[1]
        return found

    def is_coarse(self, step) -> bool:
        return self.coarse and step not in self.precise

    @functools.cached_property
    def coarse_rows(self) -> bool:
        """Whether coarse arithmetic is enough for what is computed of elements after the last pass: rows of 16 bits alone."""
        rows = [o.dtype for o in self.of_kind("row")]
        narrow = all(d.itemsize == 2 and jnp.issubdtype(d, jnp.inexact) for d in rows)
        return self.coarse or (bool(rows) and narrow and not self.of_kind("columns"))

    @functools.cached_property
    def relative(self) -> frozenset:
        """Exponentials relative to the largest of a row, in sums and in rows of 16 bits: `exp_below` in functions.h is enough for them.

        Its errors relative to a number grow as the number falls, and so are less than rounding errors of a sum with 1 in it.
        """
        if self.reduces or not self.coarse_rows:
            return frozenset()
        largest = [p for p, q in self._pivots.items() if self._is_maximum(q)]
        found = (self._exponential(s.operands[0], p) for p in largest for s in self.passes[p + 1])
        return frozenset(step for step in found if step not in self.precise)

    def _is_maximum(self, q) -> bool:
        """Whether q is the maximum of a row, and not computed from it."""
        while q in self.step_of and self.step_of[q].name in (*MOVES, "convert_element_type"):
            q = self.step_of[q].operands[0]
        return q in self.step_of and self.step_of[q].name == "reduce_max"

    def of_kind(self, kind) -> list:
        return [o for o in self.outputs if o.kind == kind]

    @functools.cached_property
    def trivial(self) -> bool:
        """Whether the outputs, in their order, are the results."""
        return not self.epilogue and [o.result for o in self.outputs] == list(self.program.results)

    # ---- which numbers live from one pass to the next

    def _members(self):
        program = self.program
        self.step_of = {v: s for s in program.steps for v in s.results}
        reductions = [s for s in program.steps if program.row in program.over(s)]
        wanted = [o.value for o in self.outputs if isinstance(o.value, Value)]
        # Backwards from the outputs: reductions that are needed, and the numbers that elements are computed with.
        self.indices, leaves, needed, seen, pending = [], {}, set(), set(), list(wanted)
        for o in self.outputs:
            if isinstance(o.value, Value) and not o.value.is_row:
                leaves[o.value] = None
        while pending:
            v = pending.pop()
            if v in seen or not isinstance(v, Value):
                continue
            seen.add(v)
            step = self.step_of.get(v)
            if step is None:
                if not v.is_row:
                    leaves[v] = None
                continue
            if program.row in program.over(step):
                needed.add(step)
                leaves.update(dict.fromkeys(step.results))
                if step.name == "reduce":
                    leaves.update({x: None for x in step.operands[len(step.results) :] if isinstance(x, Value)})
            elif step.name in INDICES:
                self._index(step)
            for x in step.operands:
                if isinstance(x, Value) and v.is_row and not x.is_row:
                    leaves[x] = None
                pending.append(x)
        self.members = {v: f"n{k}" for k, v in enumerate(leaves)}
        # Divisors of elements: a row divides once, and its elements are multiplied.
        divisions = [s for v in seen if v.is_row and (s := self.step_of.get(v)) is not None and s.name == "div"]
        self.inverses = {}
        for step in divisions:
            y = step.operands[1]
            if y in self.members and computing(y.dtype) == np.float32:
                self.inverses.setdefault(y, f"d{len(self.inverses)}")
        order = sorted({s.result.stage for s in reductions if s in needed})
        self.passes = [[s for s in reductions if s in needed and s.result.stage == k] for k in order]
        self.pass_of = lambda v: sum(k <= v.stage for k in order)
        precise = not all(map(self.is_coarse, divisions))
        self.scales = {y: f"e{d[1:]}" for y, d in self.inverses.items() if precise and not self._is_near_one(y)}

    def _is_near_one(self, y) -> bool:
        """Whether y is a sum of the exponentials `relative`: from 1 to the length of a row, or NaN."""
        step = self.step_of.get(source(self.step_of, y))
        return (
            step is not None
            and step.name == "reduce_sum"
            and self.step_of.get(source(self.step_of, step.operands[0])) in self.relative
        )

    # ---- stages

    @functools.cached_property
    def stages(self) -> list:
        stages, p = [], 0
        while p < len(self.passes):
            count = 2 if p in self._pivots else 1
            stages.append(list(range(p, p + count)))
            p += count
        return stages

    @functools.cached_property
    def pivots(self) -> dict:
        return {s: self._pivots[passes[0]] for s, passes in enumerate(self.stages) if len(passes) > 1}

    @functools.cached_property
    def _pivots(self) -> dict:
        """{pass that reduces the maximum of v: the number q}, where the next pass sums products with exp(v - q)."""
        found = {}
        # A kernel that stores rows of 16 bits spills with other reductions beside the maximum [gradient of the smoothed loss, bfloat16
        # 8192 x 16384: 231 us, 180 with two exchanges; H100].
        narrow = any(o.dtype.itemsize == 2 for o in self.of_kind("row"))
        for p, (first, second) in enumerate(itertools.pairwise(self.passes)):
            if p - 1 in found or (narrow and {s.name for s in first} != {"reduce_max"}):
                continue
            exps = {self._exponential(s.operands[0], p) if s.name == "reduce_sum" else None for s in second}
            exp = exps.pop()
            if exps or exp is None or computing(exp.result.dtype) != np.float32:
                continue
            if exp in self.precise and not self.reduces:
                continue
            sub = self.step_of.get(source(self.step_of, exp.operands[0]))
            if sub is None or sub.name != "sub":
                continue
            x, q = sub.operands
            while q.is_row and q in self.step_of and self.step_of[q].name in MOVES:
                q = self.step_of[q].operands[0]
            same = lambda s: source(self.step_of, s.operands[0]) is source(self.step_of, x)
            maxima = [s for s in first if s.name == "reduce_max" and same(s)]
            if not maxima or q not in self.members:
                continue
            first.sort(key=lambda s: s is not maxima[0])  # the kernel finds it there
            kept = [v for v, at in self.kept_values.items() if at == p + 1]
            if self.pass_of(q) == p + 1 and all(source(self.step_of, v) is exp.result for v in kept):
                found[p] = q
        return found

    def _exponential(self, v, p):
        """The step of the one exponential that v is a product with, all of whose other factors are known before pass p."""
        step = self.step_of.get(source(self.step_of, v))
        if step is None or step.name == "exp":
            return step
        if step.name == "mul":
            later = [x for x in step.operands if self.pass_of(x) > p]
            return self._exponential(later[0], p) if len(later) == 1 else None
        return None

    # ---- values that live from one pass to the next

    def _plan_kept(self):
        """Values of elements that a pass computes and a later one needs, if they are dear: {value: pass}.

        Of the values that one pass computes and the later one would compute again, those nearest to what the later one wants.
        """
        wanted = [[v for s in steps for v in s.operands[: len(s.results)]] for steps in self.passes]
        wanted.append([o.value for o in self.outputs if o.kind in ("row", "columns")])
        computed, kept = {}, {}
        for pass_, values in enumerate(wanted):
            seen, pending = set(), list(values)
            while pending:
                v = pending.pop()
                step = self.step_of.get(v) if isinstance(v, Value) and v.is_row else None
                if step is None or v in seen or v in kept:
                    continue
                if v in computed and self._is_dear(v, kept):
                    kept[v] = computed[v]
                    continue
                seen.add(v)
                pending += step.operands
            for v in seen:
                computed.setdefault(v, pass_)
        return kept

    def _is_dear(self, value, kept) -> bool:
        """Whether an element of the value costs an elementary function, given those that are kept."""
        pending, seen = [value], set()
        while pending:
            v = pending.pop()
            step = self.step_of.get(v) if isinstance(v, Value) and v.is_row else None
            if step is None or v in seen or v in kept:
                continue
            seen.add(v)
            if step.name in DEAR:
                return True
            pending += step.operands
        return False

    @functools.cached_property
    def kept_values(self) -> dict:
        return self._plan_kept()

    @functools.cached_property
    def kept_words(self) -> int:
        """The most words that kept values of an element take at a time."""
        last = {}
        wanted = [[v for s in steps for v in s.operands[: len(s.results)]] for steps in self.passes]
        wanted.append([o.value for o in self.outputs if o.kind in ("row", "columns")])
        for pass_, values in enumerate(wanted):
            pending, seen = list(values), set()
            while pending:
                v = pending.pop()
                if not isinstance(v, Value) or v in seen or not v.is_row:
                    continue
                seen.add(v)
                if v in self.kept_values and self.kept_values[v] < pass_:
                    last[v] = pass_
                    continue
                step = self.step_of.get(v)
                pending += step.operands if step is not None else []
        alive = lambda pass_: sum(
            max(1, computing(v.dtype).itemsize // 4)
            for v, first in self.kept_values.items()
            if first < pass_ <= last.get(v, -1)
        )
        return max((alive(pass_) for pass_ in range(1, len(self.passes) + 1)), default=0)

    @functools.cached_property
    def partial_bytes(self) -> list:
        """Bytes of what a thread has reduced, for each stage."""
        places = lambda step: [4] * (step.name in ("argmax", "argmin"))
        least = lambda step: 8 if self.adds_in_float64(step) else 4
        sizes = lambda step: [*(max(least(step), computing(v.dtype).itemsize) for v in step.results), *places(step)]
        members = ([n for p in passes for s in self.passes[p] for n in sizes(s)] for passes in self.stages)
        return [8 * ceil_div(len(own) * max(own), 8) for own in members]  # members of 4 bytes may need padding

    @functools.cached_property
    def total_bytes(self) -> int:
        """Bytes of the numbers that a thread adds up over rows."""
        return sum(computing(o.value.aval.dtype).itemsize for o in self.of_kind("total"))

    def _index(self, step):
        index = self.index_of(step)
        if index and index != {self.program.row: 1} and index not in self.indices:
            self.indices.append(index)

    @staticmethod
    def index_of(step) -> dict:
        """What is counted: {dimension: stride}."""
        v = step.result
        if step.name == "ravel_index":
            return {v.dims[d]: n for d, n in strides_of(v)}
        dim = v.dims[step.params["dimension"]]
        return {} if dim is None else {dim: 1}
