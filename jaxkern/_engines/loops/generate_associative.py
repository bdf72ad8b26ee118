"""From a scan by an associative operation to C++: the struct `F` that ffi/kernels/loops/associative.cuh takes.

    source, maps = source("Body", spec, outer, length, inner)     definitions, and the groups of each index map

Arrays are [outer, length, inner], and a lane is a place in [outer, inner].
"""

from jaxkern._core import memo
from jaxkern._core.cpp import cpp_type
from jaxkern._core.functor import of_scalars
from jaxkern._core.jaxprs import computing


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


def lanes_of(outer, length, inner) -> list:
    """The groups of the index map from a lane to its first element, innermost first."""
    return [(inner, 1)] if outer == 1 else [(inner, 1), (outer, length * inner)]


def source(name, spec, outer, length, inner):
    functions = _functions(spec)
    text = "".join(f.source(f"{name}{k}") for k, f in functions.items()) + _step(name, spec)
    groups = lanes_of(outer, length, inner)
    whole = inner == 1 or outer == 1
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
    kind, at = ("kEach", -3) if inner == 1 else ("kPack", -1 if whole else 0)
    for k in ("Consts", "Carries", "Xs", "Ys"):
        lines.append(f"  static constexpr int {k}Kind(int) {{ return {kind}; }}")
        lines.append(f"  static constexpr int {k}Map(int) {{ return {at}; }}")
        lines.append(f"  static constexpr int64_t {k}Step(int) {{ return {inner}; }}")
    for k, value in (("CarriesOwner", -2), ("YsOwner", -2), ("IsSum", 0), ("PlaceMap", -2)):
        lines.append(f"  static constexpr int {k}(int) {{ return {value}; }}")
    lines.append(f"  static constexpr int kIndices = 0, kMaps = {int(not whole)}, kStart = {start};")
    lines.append("  static constexpr bool kLast = false, kFar = false;")
    return text + "\n".join([f"struct {name} {{", *lines, "};"]) + "\n", [] if whole else [groups]
