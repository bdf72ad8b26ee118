"""Sorts in a jaxpr whose results are read in part.

    program = Program(jaxpr)
    part = program.part(e)                       which elements of a sort are used; None: not only some at an end
    program.replace(e, part, function)           puts the selection of these in place of the sort

What uses a sort is followed through reversals and elementwise functions to slices, and to gathers at indices that are known while
the program is lowered, as in `jnp.median`. These read the selected elements instead.
"""

import typing

import numpy as np
from jax import lax

from jaxkern._accelerate.calls import Gathered, Sliced, call_p
from jaxkern._accelerate.equations import is_variable, variables
from jaxkern._accelerate.searches import is_named
from jaxkern._core import compat_rewriting, validate
from jaxkern._core.cpp import ELEMENTWISE
from jaxkern._core.jaxprs import CALLS, called_jaxpr

MOST_INLINED = 64  # equations of a function that sorts
MOST_KNOWN = 64  # elements of an array that is known
_KNOWN = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.true_divide,  # of integers the quotient is rounded otherwise, and is not an index that a program computes
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "lt": np.less,
    "select_n": lambda which, no, yes: np.where(which, yes, no),
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
}


class Part(typing.NamedTuple):
    """The first `count` elements of a sort, or the last ones."""

    count: int
    last: bool


def _small(e):
    """The jaxpr that an equation calls, if it is small and pure."""
    if e.primitive.name not in CALLS or is_named(e) or not compat_rewriting.is_inlinable(e):
        return None
    jaxpr, consts = called_jaxpr(e)
    return jaxpr if not consts and not jaxpr.constvars and len(jaxpr.eqns) <= MOST_INLINED else None


def inner(e):
    """The jaxpr that an equation calls, if it is small, pure, and sorts."""
    jaxpr = _small(e)
    return jaxpr if jaxpr is not None and _sorts(jaxpr) else None


def _sorts(jaxpr) -> bool:
    return any(e.primitive.name == "sort" or inner(e) is not None for e in jaxpr.eqns)


def _holds(dtype, value) -> bool:
    """Whether a type has these numbers, rounded towards 0 if they are no integers. What others become is left to XLA."""
    if dtype.kind not in "iu":
        return True
    info, value = np.iinfo(dtype), value.astype(np.float64)
    return bool(np.all((value > info.min - 1) & (value < info.max + 1)))


class Program:
    """The equations of a jaxpr, and of the functions in it that sort or read what is sorted."""

    def __init__(self, jaxpr):
        self.equations = []
        self._sorted: set = set()  # what sorts return, and what others make of it element by element
        self.results = self._inlined(None, jaxpr, {})
        self._returned = set(filter(is_variable, self.results))
        self.made = {v: e for e in self.equations for v in e.outvars}
        self.readers: dict = {}
        for e in self.equations:
            for v in variables(e):
                self.readers.setdefault(v, []).append(e)
        self.replaced: dict = {}  # {id of an equation: the one in its place}
        self._known: dict = {}

    def _inlined(self, call, jaxpr, env) -> list:
        """Adds the equations of the jaxpr that `call` calls; returns its results. env: the values of its variables."""
        read = lambda v: env.get(v, v) if is_variable(v) else v
        for e in jaxpr.eqns:
            operands, moved = list(map(read, e.invars)), e
            if call is not None:
                dropped = compat_rewriting.is_dropped
                own = [v if dropped(v) else compat_rewriting.new_variable(v.aval) for v in e.outvars]
                env.update(zip(e.outvars, own))
                moved = compat_rewriting.inlined_equation(call, e, operands, own)
            elif operands != e.invars:
                moved = e.replace(invars=operands)
            reads = any(is_variable(v) and v in self._sorted for v in operands)
            called = _small(e) if reads else inner(e)
            if called is None:
                self.equations.append(moved)
                if e.primitive.name == "sort" or (reads and self._passes(moved, 0)):
                    self._sorted.update(moved.outvars)
            else:
                env.update(zip(e.outvars, self._inlined(moved, called, dict(zip(called.invars, operands)))))
        return list(map(read, jaxpr.outvars))

    def is_used(self, v) -> bool:
        return v in self.readers or v in self._returned

    # ---- which elements are used

    def part(self, e) -> Part | None:
        axis = e.params["dimension"]
        width = e.outvars[0].aval.shape[axis]
        if (
            not all(isinstance(n, int) for n in e.outvars[0].aval.shape)
            or validate.explicit_spec(e.outvars[0].aval)[axis] is not None
        ):
            return None
        spans = [self._span(v, axis, False) for v in e.outvars if self.is_used(v)]
        if not spans or None in spans:
            return None
        low, high = min(s[0] for s in spans), max(s[1] for s in spans)
        last = width - low < high
        count = width - low if last else high
        return Part(count, last) if count < width else None

    def _span(self, v, axis, flipped):
        """(the first, behind the last) of the sorted elements that are used of v; None: all. flipped: whether v has them from the
        last to the first."""
        if v in self._returned:
            return None
        width, spans = v.aval.shape[axis], []
        for e in self.readers[v]:
            if passes := self._passes(e, axis):
                (out,) = e.outvars
                if self.is_used(out):
                    spans.append(self._span(out, axis, flipped != (passes == "flipped")))
            else:
                span = self._read(e, v, axis)
                spans.append((width - span[1], width - span[0]) if flipped and span else span)
        return (
            None
            if None in spans
            else (min((s[0] for s in spans), default=width), max((s[1] for s in spans), default=0))
        )

    @staticmethod
    def _passes(e, axis) -> str:
        """ "same" or "flipped" if an equation makes each element from one of its operand, in this order along the axis; or ""."""
        if e.primitive.name == "rev":
            return "flipped" if axis in e.params["dimensions"] else "same"
        single = e.primitive.name in (*ELEMENTWISE, "copy", "copy_p") and len(e.invars) == 1
        return "same" if single and e.invars[0].aval.shape == e.outvars[0].aval.shape else ""

    def _read(self, e, v, axis):
        """The span of elements along the axis that a slice or a gather reads; None for other equations."""
        if e.primitive.name == "slice":
            return e.params["start_indices"][axis], e.params["limit_indices"][axis]
        if e.primitive.name == "dynamic_slice" and e.invars[0] is v:
            starts = self._starts(e)
            return starts and (starts[axis], starts[axis] + e.params["slice_sizes"][axis])
        if e.primitive.name != "gather" or e.invars[0] is not v or e.invars[1] is v:
            return None
        sizes, numbers = e.params["slice_sizes"], e.params["dimension_numbers"]
        of_axis = [size if d != axis else 1 for d, size in enumerate(v.aval.shape)]
        if tuple(numbers.start_index_map) != (axis,) or numbers.operand_batching_dims or list(sizes) != of_axis:
            return None
        at = self.known(e.invars[1])
        if at is None or not at.size or at.shape[-1:] != (1,) or at.min() < 0 or at.max() >= v.aval.shape[axis]:
            return None
        return int(at.min()), int(at.max()) + 1

    def _starts(self, e):
        """Where a dynamic_slice of known indices starts; None for others."""
        starts, sizes = [self.known(o) for o in e.invars[1:]], e.params["slice_sizes"]
        if any(n is None for n in starts):
            return None
        return tuple(max(0, min(int(at), n - own)) for at, n, own in zip(starts, e.invars[0].aval.shape, sizes))

    def known(self, v):
        """The value of a small array that depends on no argument, or None."""
        if not is_variable(v):
            return np.asarray(v.val, v.aval.dtype)
        if v not in self._known:
            self._known[v] = self._computed(v)
        return self._known[v]

    def _computed(self, v):
        e = self.made.get(v)
        if e is None or not all(isinstance(n, int) for n in v.aval.shape) or v.aval.size > MOST_KNOWN:
            return None
        name = e.primitive.name
        if name not in (*_KNOWN, "convert_element_type", "broadcast_in_dim"):
            return None
        if name == "round" and e.params["rounding_method"] != lax.RoundingMethod.TO_NEAREST_EVEN:
            return None
        if name == "select_n" and len(e.invars) > 3:  # by a number
            return None
        operands = [self.known(o) for o in e.invars]
        if any(o is None for o in operands):
            return None
        if name == "broadcast_in_dim":
            dims, shape = e.params["broadcast_dimensions"], v.aval.shape
            within = [operands[0].shape[dims.index(d)] if d in dims else 1 for d in range(len(shape))]
            return np.broadcast_to(operands[0].reshape(within), shape)
        with np.errstate(all="ignore"):
            value = np.asarray(_KNOWN[name](*operands) if name in _KNOWN else operands[0])
            return value.astype(v.aval.dtype) if _holds(v.aval.dtype, value) else None

    # ---- selections in place of sorts

    def replace(self, e, part, function, operands) -> None:
        """Puts `function`, of these operands, in place of a sort; its results are those that are used."""
        axis = e.params["dimension"]
        used = [v for v in e.outvars if self.is_used(v)]
        width = used[0].aval.shape[axis]
        first = width - part.count if part.last else 0
        made = [self._shorter(v, axis, part.count) for v in used]
        self.replaced[id(e)] = compat_rewriting.new_equation(e, call_p, operands, made, {"function": function})
        for v, new in zip(used, made):
            self._read_from(v, new, axis, first)

    @staticmethod
    def _shorter(v, axis, count):
        shape = v.aval.shape
        return compat_rewriting.new_variable(v.aval.update(shape=(*shape[:axis], count, *shape[axis + 1 :])))

    def _read_from(self, v, new, axis, first):
        """Makes the equations that read v read `new`, which has the elements of v from `first` on."""
        width, count = v.aval.shape[axis], new.aval.shape[axis]
        for e in self.readers.get(v, ()):
            passes = self._passes(e, axis)
            (out,) = e.outvars
            if passes:
                short = self._shorter(out, axis, count)
                self.replaced[id(e)] = e.replace(invars=[new], outvars=[short])
                self._read_from(out, short, axis, width - count - first if passes == "flipped" else first)
            elif e.primitive.name == "dynamic_slice":
                starts = tuple(at - first * (d == axis) for d, at in enumerate(self._starts(e)))
                function = Sliced(starts, tuple(e.params["slice_sizes"]))
                self.replaced[id(e)] = compat_rewriting.new_equation(e, call_p, [new], [out], {"function": function})
            elif e.primitive.name == "slice":
                moved = lambda name: tuple(n - first * (d == axis) for d, n in enumerate(e.params[name]))
                limits = {name: moved(name) for name in ("start_indices", "limit_indices")}
                self.replaced[id(e)] = e.replace(invars=[new], params=e.params | limits)
            else:
                at = self.known(e.invars[1]) - first
                function = Gathered(tuple(at.ravel().tolist()), at.shape, tuple(sorted(e.params.items())))
                self.replaced[id(e)] = compat_rewriting.new_equation(e, call_p, [new], [out], {"function": function})

    def equations_now(self) -> list:
        return [self.replaced.get(id(e), e) for e in self.equations]
