"""From a scan by an associative operation to C++: the struct `F` that ffi/kernels/loops/associative.cuh takes.

    lanes = Lanes(shape, axis, dims)                 where lanes lie in arrays
    text = source("Body", spec, lanes, each=1)       definitions

A lane is a place in the dimensions of an array without the axis of the scan.
"""

import math

from jaxkern._core import memo
from jaxkern._core.cpp import cpp_type
from jaxkern._core.functor import of_scalars
from jaxkern._core.jaxprs import computing
from jaxkern._engines.jaxpr import merged

# The maps of arrays whose lanes are adjacent, that have no lanes, and whose steps are adjacent: `Offset` of loops.cuh.
WHOLE, NONE, ROWS = -1, -2, -3


@memo.remembered(256)
def _functions(spec):
    """{name: Function}. Carries are states; Element has them as arguments, as in associative.cuh."""
    n, states, label = len(spec.states), spec.states, spec.combine.label
    element = lambda *carry_x: spec.element.scalars(*carry_x[n:])
    functions = {
        "Element": of_scalars(element, (*states, *spec.element.in_dtypes), states, label, False),
        "Combine": spec.combine,
        "Finish": spec.finish,
    }
    if spec.first is not None:
        numbers = lambda: [d.type(c) for c, d in zip(spec.first, states)]
        functions["Start"] = of_scalars(numbers, (), states, label, False)
    return functions


def size(spec) -> int:
    """Statements of the functions of a step."""
    return sum(f.size for f in _functions(spec).values())


def _step(name, spec) -> str:
    """The functors Step, First and Apply, which call the functors of `_functions`."""
    states, xs, ys = (
        [cpp_type(computing(d)) for d in dtypes]
        for dtypes in (spec.states, spec.element.in_dtypes, spec.finish.out_dtypes)
    )
    declared = lambda types, letter, reference="": [f"{t}{reference} {letter}{k}" for k, t in enumerate(types)]
    named = lambda types, letter: [f"{letter}{k}" for k in range(len(types))]
    results = [*declared(states, "next", "&"), *declared(ys, "y", "&")]
    local = lambda letter: "".join(f"    {line};\n" for line in declared(states, letter))
    keep = lambda letter: "".join(f"    next{k} = {letter}{k};\n" for k in range(len(states)))
    call = lambda function, *groups: f"    {name}{function}()({', '.join(a for group in groups for a in group)});\n"
    finish = lambda letter: call("Finish", named(states, letter), named(xs, "x"), named(ys, "y"))
    element = lambda carry: local("e") + call("Element", carry, named(xs, "x"), named(states, "e"))

    def functor(kind, arguments, body):
        return (
            f"struct {name}{kind} {{\n  JAXKERN_FN void operator()({', '.join(arguments)}) const {{\n{body}  }}\n}};\n"
        )

    carry, joined = named(states, "c"), "s" if spec.first is None else "c"
    body = element(carry) + local("s") + call("Combine", carry, named(states, "e"), named(states, "s"))
    text = functor("Step", [*declared(states, "c"), *declared(xs, "x"), *results], body + finish(joined) + keep("s"))
    if spec.first is None:
        zeros = [f"{t}(0)" for t in states]
        return text + functor("First", [*declared(xs, "x"), *results], element(zeros) + finish("e") + keep("e"))
    arguments = [*declared(states, "s"), *declared(states, "c"), *declared(states, "next", "&")]
    return text + functor("Apply", arguments, call("Combine", carry, named(states, "s"), named(states, "next")))


class Lanes:
    """How lanes lie in the arrays of a scan: index maps from a lane to its first element.

    shape: of the arrays. dims: see `associative.repeated_p`. maps: the groups of each index map, (size, stride), innermost first.
    """

    def __init__(self, shape, axis, dims):
        outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        self.rows, self.maps, self.step = inner == 1, [], inner
        own = [(inner, 1)] if outer == 1 else [(inner, 1), (outer, shape[axis] * inner)]
        self.whole = ROWS if self.rows else WHOLE if outer == 1 else self._number(own)
        self._operands = [None if d is None else self._groups(shape, axis, d) for d in dims]

    def _number(self, groups) -> int:
        if groups not in self.maps:
            self.maps.append(groups)
        return self.maps.index(groups)

    def _groups(self, shape, axis, dims):
        strides, stride = {}, 1
        for d in reversed(dims):
            strides[d], stride = stride, stride * shape[d]
        groups = merged((n, strides.get(d, 0)) for d, n in reversed([*enumerate(shape)]) if d != axis and n != 1)
        return groups, self._number(groups) if groups else NONE

    def of_operand(self, k, lanes) -> tuple:
        """(LaneKind of loops.cuh, map, distance of two steps) of an operand, for threads of so many lanes."""
        if self._operands[k] is None:
            return self.of_result
        groups, number = self._operands[k]
        (size, stride), *rest = groups or [(1, 0)]
        kind = "kEach" if rest and size % lanes else {0: "kSame", 1: "kPack"}.get(stride, "kEach")
        return kind, number, 0

    @property
    def of_result(self) -> tuple:
        return "kEach" if self.rows else "kPack", self.whole, self.step


def source(name, spec, lanes, each) -> str:
    """The struct and its functions. lanes: the Lanes of the scan; a thread has `each` of them."""
    functions = _functions(spec)
    text = "".join(f.source(f"{name}{k}") for k, f in functions.items()) + _step(name, spec)
    start = "kOpen" if spec.first is None else "kNumbers"
    types = {
        "Consts": (),
        "Carries": spec.states,
        "Xs": spec.element.in_dtypes,
        "Ys": spec.finish.out_dtypes,
        "States": spec.states,
    }
    lines = [f"  using {k} = Types<{', '.join(map(cpp_type, dtypes))}>;" for k, dtypes in types.items()]
    used = ["Element", "Combine", "Step", *(["First"] if spec.first is None else ["Start", "Apply"])]
    lines += [f"  using {k} = {name}{k};" for k in used]
    for k, dtypes in list(types.items())[:4]:
        arrays = [lanes.of_operand(at, each) if k == "Xs" else lanes.of_result for at in range(len(dtypes))]
        for what, values in zip(("Kind", "Map", "Step"), zip(*arrays, lanes.of_result)):
            picks = "".join(f"k == {at} ? {v} : " for at, v in enumerate(values[:-1]) if v != values[-1])
            type_ = "int64_t" if what == "Step" else "int"
            lines.append(
                f"  static constexpr {type_} {k}{what}(int{' k' * bool(picks)}) {{ return {picks}{values[-1]}; }}"
            )
    for k, value in (("CarriesOwner", -2), ("YsOwner", -2), ("FromZero", 0), ("PlaceMap", -2)):
        lines.append(f"  static constexpr int {k}(int) {{ return {value}; }}")
    lines.append(f"  static constexpr int kIndices = 0, kMaps = {len(lanes.maps)}, kStart = {start};")
    lines.append("  static constexpr bool kLast = false, kFar = false;")
    return text + "\n".join([f"struct {name} {{", *lines, "};"]) + "\n"
