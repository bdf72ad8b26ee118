"""From a scan by an associative operation to C++: the struct `F` that ffi/kernels/loops/associative.cuh takes.

    source, maps = source("Body", spec, outer, length, inner)     definitions, and the groups of each index map

Arrays are [outer, length, inner], and a lane is a place in [outer, inner].
"""

import functools

from jaxkern._core.functor import cpp_type, of_scalars
from jaxkern._core.jaxprs import computing


@functools.lru_cache(maxsize=256)
def _functions(spec):
    """{name in associative.cuh: Function}, with the arguments that it names. Carries are states."""
    n, xs, ys = len(spec.states), spec.element.in_dtypes, spec.finish.out_dtypes
    element, combine, finish = spec.element.scalars, spec.combine.scalars, spec.finish.scalars
    label, states = spec.combine.label, spec.states
    results = (*states, *map(computing, ys))
    make = lambda f, takes, gives: of_scalars(f, takes, gives, label, False)

    def step(*carry_x):
        before, x = carry_x[:n], carry_x[n:]
        after = combine(*before, *element(*x))
        return [*after, *finish(*(after if spec.first is None else before), *x)]

    def first(*x):
        state = element(*x)
        return [*state, *finish(*state, *x)]

    functions = {
        "Element": make(lambda *carry_x: element(*carry_x[n:]), (*states, *xs), states),
        "Combine": spec.combine,
        "Step": make(step, (*states, *xs), results),
    }
    if spec.first is None:
        functions["First"] = make(first, xs, results)
    else:
        functions["Apply"] = make(lambda *sc: combine(*sc[n:], *sc[:n]), (*states, *states), states)
        functions["Start"] = make(lambda: [d.type(c) for c, d in zip(spec.first, states)], (), states)
    return functions


def size(spec) -> int:
    """Statements of the functions of a step."""
    return sum(f.size for f in _functions(spec).values())


def lanes_of(outer, length, inner) -> list:
    """The groups of the index map from a lane to its first element, innermost first."""
    if inner == 1:
        return [(outer, length)]
    return [(inner, 1)] if outer == 1 else [(inner, 1), (outer, length * inner)]


def source(name, spec, outer, length, inner):
    functions = _functions(spec)
    text = "".join(f.source(f"{name}{k}") for k, f in functions.items())
    groups = lanes_of(outer, length, inner)
    whole = groups == [(inner, 1)]
    start = "kOpen" if spec.first is None else "kNumbers"
    types = {
        "Consts": (),
        "Carries": spec.states,
        "Xs": spec.element.in_dtypes,
        "Ys": spec.finish.out_dtypes,
        "States": spec.states,
    }
    lines = [f"  using {k} = Types<{', '.join(map(cpp_type, dtypes))}>;" for k, dtypes in types.items()]
    lines += [f"  using {k} = {name}{k};" for k in functions]
    kind, at = "kEach" if inner == 1 else "kPack", -1 if whole else 0
    for k in ("Consts", "Carries", "Xs", "Ys"):
        lines.append(f"  static constexpr int {k}Kind(int) {{ return {kind}; }}")
        lines.append(f"  static constexpr int {k}Map(int) {{ return {at}; }}")
        lines.append(f"  static constexpr int64_t {k}Step(int) {{ return {inner}; }}")
    for k, value in (("CarriesOwner", -2), ("YsOwner", -2), ("IsSum", 0), ("PlaceMap", -2)):
        lines.append(f"  static constexpr int {k}(int) {{ return {value}; }}")
    lines.append(f"  static constexpr int kIndices = 0, kMaps = {int(not whole)}, kStart = {start};")
    lines.append("  static constexpr bool kLast = false;")
    return text + "\n".join([f"struct {name} {{", *lines, "};"]) + "\n", [] if whole else [groups]
