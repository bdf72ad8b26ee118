"""From a row function to C++: the struct `F` that ffi/kernels/rows/rows.cuh takes.

    source(core, "Function")      the struct, as text

Its functions compute one element at a time. Each is a functor that _core/cpp.py writes from scalar operations:

    Begin, After     the numbers of a row before the first pass, and after each: members of the struct Numbers
    Counts           whether an element of a row counts, see guards.py
    Reduce           the values of an element that a pass reduces; Identity and Combine belong to its reductions. Where threads add up
                     in float64, Neutral is the identity of what a pack is reduced to, in float32, and Widened converts that
    Place, Pick      where the first pass picks elements: their places, kPicks of them; adds such an element to what is reduced
    Pivot, Rescale   in a stage of two passes, a maximum and sums with exponentials: the number that exponents are relative to;
                     multiplies sums and kept exponentials, to make them relative to another number
    Result           the values of an element that are stored, or summed over rows
    NumberResult, Total   numbers that are stored, or summed over rows
"""

import typing

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from jaxkern._core import cpp, functor
from jaxkern._core.cpp import cpp_type
from jaxkern._core.draws import draw_in_pack_p
from jaxkern._core.jaxprs import computing
from jaxkern._engines.jaxpr import INDICES, MOVES, NOT_ELEMENTWISE, REDUCTIONS, Constant, Value, compute, widened
from jaxkern._engines.rows.guards import guards, place_of
from jaxkern._engines.rows.program import groups_of_index
from jaxkern._engines.rows.reductions import INDEX, Reduction, part_type

_COMPARISONS = ("ge", "gt", "le", "lt")
_FAR = 1 << 30


class Source(typing.NamedTuple):
    """text: the struct, as definitions for namespace jaxkern. size: the statements of its functors; see `functor.Function`."""

    text: str
    size: int


def source(core, name, keeps=False) -> Source:
    """The struct of a `Core`. keeps: whether dear values live from one pass to the next."""
    writer = _Writer(core, name, keeps)
    return Source(writer.struct(), writer.size)


class _Writer:
    """Writes the struct `name`. Expressions in it: n.x is a number of the row, k.x a kept value, r0, c0, ... are an element of
    each row and column, m0, ... the numbers that are read, n.i0, ... other places, `at` and `first` those of the element and its pack.
    """

    def __init__(self, core, name, keeps):
        self.core, self.program, self.members, self.name = core, core.program, core.members, name
        self.kept = {v: f"k{k}" for k, v in enumerate(core.kept_values)} if keeps else {}
        self.functors, self.size = [], 0
        self.elements = {}  # {operand: argument} of functions of an element
        for prefix, positions in (("r", core.rows), ("c", core.columns)):
            self.elements.update({self.program.operands[k]: f"{prefix}{k}" for k in positions})
        self.signature = [f"{_type(v)} {a}" for v, a in self.elements.items()]

    def struct(self) -> str:
        core = self.core
        inverses = "".join(f" float {m};" for m in (*core.inverses.values(), *core.scales.values()))
        places = [f"int32_t i{k};" for k in range(len(core.indices))]
        numbers = " ".join([*places, *(f"{_type(v)} {m};" for v, m in self.members.items())]) + inverses
        kept = " ".join(f"{_type(v)} {m};" for v, m in self.kept.items())
        body = [
            *self._types(),
            *self._ranks(),
            f"  struct Numbers {{ {numbers or 'int unused;'} }};",
            f"  struct Kept {{ {kept} }};",
            self._begin(),
            *self._counts(),
        ]
        for p in range(len(core.passes)):
            body += self._pass(p)
        body += map(self._pivot, core.pivots)
        if not core.passes:  # the kernel's code names them
            body.append("  template <class S> static int Identity(S, const Numbers&);")
        body += [self._result(), self._of_numbers("number", "NumberResult"), self._of_numbers("total", "Total")]
        return "\n".join([*self.functors, f"struct {self.name} {{", *body, "};"]) + "\n"

    # ---- the parts of the struct

    def _types(self) -> list:
        """The types of all arrays in memory, and of sums."""
        core = self.core
        at = lambda positions: [cpp_type(self.program.operands[k].dtype) for k in positions]
        stored = lambda kind: [_stored(o) for o in core.of_kind(kind)]
        summed = lambda kind: [cpp_type(computing(o.value.aval.dtype)) for o in core.of_kind(kind)]
        types = {
            "Rows": at(core.rows),
            "Columns": at(core.columns),
            "NumberOperands": at(core.numbers),
            "Results": stored("row"),
            "NumberResults": stored("number"),
            "ColumnSums": summed("columns"),
            "Totals": summed("total"),
        }
        return [
            *(f"  using {name} = Types<{', '.join(found)}>;" for name, found in types.items()),
            f"  static constexpr int kPasses = {len(core.passes)}, kStages = {len(core.stages)}, kIndices = {len(core.indices)};",
            f"  static constexpr int FirstPass(int s) {{ return {_cases(p[0] for p in core.stages)}; }}",
            f"  static constexpr int LastPass(int s) {{ return {_cases(p[-1] for p in core.stages)}; }}",
            "  static constexpr bool Pivots(int s) { return FirstPass(s) != LastPass(s); }",
        ]

    def _ranks(self):
        """How many groups of dimensions the maps from rows to offsets have."""
        core = self.core
        ranks = {
            "Row": [self.program.operands[k] for k in core.rows],
            "Number": [self.program.operands[k] for k in core.numbers],
            "Result": [o.result for o in core.of_kind("row")],
            "NumberResult": [o.result for o in core.of_kind("number")],
        }
        groups = {kind: map(self.program.groups, values) for kind, values in ranks.items()}
        groups["Index"] = (groups_of_index(self.program, index) for index in core.indices)
        for kind, found in groups.items():
            yield f"  static constexpr int {kind}Rank(int k) {{ return {_cases(map(len, found), 'k')}; }}"

    def _begin(self) -> str:
        core = self.core
        given = {self.program.operands[k]: f"m{k}" for k in core.numbers}
        arguments = [f"int32_t i{k}" for k in range(len(core.indices))]
        arguments += [f"{_type(v)} {a}" for v, a in given.items()]
        loads = [f"n.i{k} = i{k};" for k in range(len(core.indices))]
        loads = " ".join([*loads, *(f"n.{self.members[v]} = {a};" for v, a in given.items() if v in self.members)])
        body = f"{loads} {self._numbers_after(0, set(given))}"
        return f"  static JAXKERN_FN void Begin({', '.join(['Numbers& n', *arguments])}) {{ {body} }}"

    def _counts(self):
        """Counts: whether an element of a row that is read counts."""
        found, core = guards(self.core), self.core
        yield f"  static constexpr bool Guarded(int k) {{ return {_cases((int(k in found) for k in core.rows), 'k')}; }}"
        given = lambda v: f"n.{self.members[v]}" if v in self.members else None
        for at, k in enumerate(core.rows):
            conditions = found.get(k, [])
            names = [f"y{j}" for j in range(len(conditions))]
            body = "return true;"
            if conditions:
                call = self._call(f"{self.name}Counts{k}", [v for v, _ in conditions], given, names)
                any_of = " || ".join(y if value else f"!{y}" for y, (_, value) in zip(names, conditions))
                body = f"bool {', '.join(names)}; {call} return {any_of};"
            yield f"  static JAXKERN_FN bool Counts(Pass<{at}>, const Numbers& n, int32_t at, int32_t first) {{ {body} }}"

    def _pass(self, p) -> list:
        """Reduced, Identity, Combine, Reduce and After of a pass, and Place and Pick of the first."""
        steps = self.core.passes[p]
        parts, sums, identity, combine, after, reduced, values, picked = [], [], [], [], [], [], [], []
        for step in steps:
            place = place_of(self.core, step) if p == 0 else None
            own = Reduction(self, step, p, len(parts))
            parts += own.parts
            sums += own.sums
            identity += own.identity
            combine += own.combine
            after += [
                f"n.{self.members[v]} = {_type(v)}(p.{part});"
                for v, (_, part) in zip(step.results, own.parts[-len(step.results) :])
            ]
            for v, divisor in self.core.quotients.get(step.results[0], {}).items():
                after.append(f"n.{self.members[v]} = {_type(v)}(p.{own.parts[0][1]} / {self.number(divisor)});")
            if place is not None:
                picked.append((own, place))
                values.append((own.parts[0][1], own.identity[0]))
                continue
            # A functor writes its results in their own types; parts of words smaller than a lane exchanges are widened.
            values += [(part, f"t{len(reduced) + k}") for k, (_, part) in enumerate(own.parts[: len(own.operands)])]
            values += [(part, "at") for _, part in own.parts[len(own.operands) :]]
            reduced += own.operands
        here = {v: f"k.{m}" for v, m in self.kept.items() if self.core.kept_values[v] == p}
        locals_ = [f"t{k}" for k in range(len(reduced))]
        declare = " ".join(f"{_type(v)} {t};" for v, t in zip(reduced, locals_))
        targets = [*locals_, *here.values()]
        reduce = self._call(f"{self.name}Reduce{p}", [*reduced, *here], self._given_in(p), targets) if targets else ""
        sets = " ".join(f"p.{part} = {value};" for part, value in values)
        members = lambda found: " ".join(f"{part_type(d)} {v};" for d, v in found)
        value = f"Reduced{p}" if sums == parts else f"Value{p}"
        types = {f"Reduced{p}": sums, value: parts}
        known = {v for step in steps for x in step.results for v in (x, *self.core.quotients.get(x, ()))}
        later = self._numbers_after(p + 1, known)
        arguments = [
            f"Pass<{p}>",
            "const Numbers& n",
            "int32_t at",
            "int32_t first",
            "Kept& k",
            f"{value}& p",
            *self.signature,
        ]
        widened = ", ".join(f"p.{v}" for _, v in parts)
        narrow = [
            f"  static JAXKERN_FN {value} Neutral(Pass<{p}>) {{ return {{{', '.join(identity)}}}; }}",
            f"  static JAXKERN_FN Reduced{p} Widened(Pass<{p}>, const {value}& p) {{ return {{{widened}}}; }}",
        ]
        return [
            *(f"  struct {name} {{ {members(found)} }};" for name, found in types.items()),
            f"  static JAXKERN_FN Reduced{p} Identity(Pass<{p}>, const Numbers& n) {{ return {{{', '.join(identity)}}}; }}",
            *(
                f"  static JAXKERN_FN {name} Combine(Pass<{p}>, const {name}& p, const {name}& q) {{\n"
                f"    {name} y; {' '.join(combine)} return y;\n"
                "  }"
                for name in types
            ),
            *([] if sums == parts else narrow),
            f"  static JAXKERN_FN void Reduce({', '.join(arguments)}) {{ {declare} {reduce} {sets} }}",
            *(self._picks(picked) if picked else ()),
            f"  static JAXKERN_FN void After(Pass<{p}>, Numbers& n, const Reduced{p}& p) {{ {' '.join(after)} {later} }}",
        ]

    def _picks(self, picked):
        """Place and Pick. picked: (reduction, the number that is the place) of each."""
        places = _cases((f"n.{self.members[v]}" for _, v in picked), "k")
        names = [f"t{k}" for k in range(len(picked))]
        call = self._call(f"{self.name}Pick", [own.operands[0] for own, _ in picked], self._given_in(0), names)
        declare = " ".join(f"{_type(own.operands[0])} {t};" for (own, _), t in zip(picked, names))
        sets = " ".join(own.taken("p", f"p.{own.parts[0][1]}", t) for (own, _), t in zip(picked, names))
        arguments = ", ".join(["const Numbers& n", "int32_t at", "int32_t first", "P& p", *self.signature])
        yield f"  static constexpr int kPicks = {len(picked)};"
        yield f"  static JAXKERN_FN int32_t Place(const Numbers& n, int k) {{ return {places}; }}"
        yield f"  template <class P> static JAXKERN_FN void Pick({arguments}) {{ {declare} {call} {sets} }}"

    def _pivot(self, s) -> str:
        """Pivot and Rescale of a stage of two passes."""
        last = self.core.stages[s][-1]
        kept = [m for v, m in self.kept.items() if self.core.kept_values[v] == last]
        # A sum of exponentials is never infinite where its factor is 0; a sum of products may be.
        scaled = "p.v{k} *= scale;" if self.core.reduces else "p.v{k} = Rescaled(p.v{k}, scale);"
        sums = " ".join(scaled.format(k=k) for k in range(len(self.core.passes[last])))
        factor = "  static JAXKERN_FN float Factor(float x) { return coarse::exp(x); }\n"
        return (factor if self.core.reduces and self.core.coarse else "") + (
            f"  static JAXKERN_FN void Rescale(Pass<{s}>, Reduced{last}& p, float scale) {{ {sums} }}\n"
            f"  static JAXKERN_FN float& Pivot(Pass<{s}>, Numbers& n) {{ return n.{self.members[self.core.pivots[s]]}; }}\n"
            f"  static JAXKERN_FN void Rescale(Pass<{s}>, Kept& k, float scale) {{ {' '.join(f'k.{m} *= scale;' for m in kept)} }}"
        )

    def _result(self) -> str:
        wanted = [o.value for kind in ("row", "columns") for o in self.core.of_kind(kind)]
        outs = [f"y{k}" for k in range(len(wanted))]
        given = self._given_in(len(self.core.passes))
        body = self._call(f"{self.name}Result", wanted, given, outs, self.core.coarse_rows) if wanted else ""
        arguments = ["const Numbers& n", "int32_t at", "int32_t first", "const Kept& k", *self.signature]
        arguments += [f"{_type(v)}& {y}" for v, y in zip(wanted, outs)]
        return f"  static JAXKERN_FN void Result({', '.join(arguments)}) {{ {body} }}"

    def _of_numbers(self, kind, function) -> str:
        outputs = self.core.of_kind(kind)
        arguments = ["const Numbers& n", *(f"{_type(o.value)}& y{k}" for k, o in enumerate(outputs))]
        sets = " ".join(f"y{k} = {self.number(o.value)};" for k, o in enumerate(outputs))
        return f"  static JAXKERN_FN void {function}({', '.join(arguments)}) {{ {sets} }}"

    # ---- expressions and statements

    def number(self, v) -> str:
        return cpp.literal(widened(v)[()], v.aval.dtype) if isinstance(v, Constant) else f"n.{self.members[v]}"

    def _given_in(self, p):
        """given(value): the expression of a value that is known of an element in a pass, or None."""
        before = {v: f"k.{m}" for v, m in self.kept.items() if self.core.kept_values[v] < p}
        number = lambda v: f"n.{self.members[v]}" if v in self.members else None
        return lambda v: before.get(v) or self.elements.get(v) or number(v)

    def _numbers_after(self, count, known) -> str:
        """Statements that compute the numbers that are complete after so many passes, except for those that are known."""
        members = self.members
        complete = [v for v in members if not v.is_row and self.core.pass_of(v) == count]
        own = [v for v in complete if v not in known]
        given = lambda v: f"n.{members[v]}" if v in members and v not in own else None
        text = ""
        if own:
            text = self._call(f"{self.name}After{count}", own, given, [f"n.{members[v]}" for v in own])
        for v, inverse in self.core.inverses.items():
            if v in complete:
                y = f"n.{members[v]}"
                if v in self.core.scales:
                    scale = f"n.{self.core.scales[v]}"
                    text += f" {scale} = lax::scale_of_divisor({y});"
                    y = f"({y} * {scale})"
                text += f" n.{inverse} = 1 / {y};"
        return text

    def _call(self, name, wanted, given, targets, coarse=None) -> str:
        """A statement that computes the values `wanted` of an element or of a row into `targets`, by a functor of this name.

        given(value): the expression of a value that is known there, or None. coarse: whether coarse arithmetic is enough; None: as for
        all of the kernel.
        """
        leaves, order = self._inputs(wanted, given)
        coarse = (self.core.coarse if coarse is None else coarse) and self.core.precise.isdisjoint(order)
        places = [v for v in leaves if not isinstance(v, tuple) and self._is_iota(v) and not given(v)]

        def f(*xs):
            env = dict(zip(leaves, xs))
            for v in places:
                env[v] = jax.lax.convert_element_type(env[v], computing(v.dtype))
            read = lambda v: widened(v)[()] if isinstance(v, Constant) else env[v]
            for step in order:
                if self._is_identity(step):
                    env[step.result] = read(step.operands[0])
                elif ("in pack", step) in env:
                    place, *rest = (jax.lax.convert_element_type(read(x), np.uint32) for x in step.operands)
                    first = place - jax.lax.convert_element_type(env["in pack", step], np.uint32)
                    env[step.result] = draw_in_pack_p.bind(place, first, *rest)
                elif self._divides(step):
                    x, y = map(read, step.operands)
                    inverse, scale = (env.get((part, step.operands[1])) for part in ("inverse", "scale"))
                    if scale is None:
                        env[step.result] = x * inverse
                    elif coarse:
                        env[step.result] = x * scale * inverse
                    else:
                        env[step.result] = cpp.quotient_p.bind(x, y, inverse, scale)
                elif ("first", step) in env:  # less of an element is left to compute
                    env[step.result] = compute(step, [read(x) - env["first", step] for x in step.operands])[0]
                elif step in self.core.relative and not coarse:
                    env[step.result] = cpp.exp_below_p.bind(read(step.operands[0]))
                else:
                    env.update(zip(step.results, compute(step, [read(x) for x in step.operands])))
            return [jnp.asarray(read(v)) for v in wanted]

        part = lambda name: INDEX if name in ("first", "in pack") else np.dtype(np.float32)
        dtype = lambda v: part(v[0]) if isinstance(v, tuple) else computing(v.dtype)
        types = [INDEX if v in places else dtype(v) for v in leaves]
        outs = [computing(np.dtype(v.aval.dtype)) for v in wanted]
        function = functor.of_scalars(f, types, outs, self.program.label, coarse)
        self.size += function.size
        self.functors.append(function.source(name))
        return f"{name}()({', '.join([*leaves.values(), *targets])});"

    def _inputs(self, wanted, given):
        """({value: expression} of the inputs of a functor, the steps that it computes in order).

        The inverse of a divisor and its scale are the inputs ("inverse", divisor) and ("scale", divisor); where a pack begins, for
        a comparison of places, is ("first", step), and the place in a pack, for random bits, ("in pack", step): where rows are parts
        of longer ones, the places of random bits begin elsewhere.
        """
        leaves, order, found = {}, [], set()

        def find(v):
            if isinstance(v, Constant) or v in leaves:
                return
            text = given(v)
            if text is not None:
                leaves[v] = text
                return
            step = self.core.step_of[v]
            if step in found:
                return
            found.add(step)
            if step.name in INDICES:
                leaves[v] = self._place(self.core.index_of(step))
                return
            for x in step.operands[:1] if self._is_identity(step) else step.operands:
                find(x)
            if step.name == "draw" and step.operands[0].is_row:
                leaves["in pack", step] = "at - first"
            elif self._compares_places(step):
                leaves["first", step] = "first"
            if self._divides(step):
                y = step.operands[1]
                for part, members in (("inverse", self.core.inverses), ("scale", self.core.scales)):
                    if y in members:
                        leaves[part, y] = f"n.{members[y]}"
            order.append(step)

        for v in wanted:
            find(v)
        return leaves, order

    def _is_iota(self, v) -> bool:
        step = self.core.step_of.get(v)
        return step is not None and step.name in INDICES

    def _compares_places(self, step) -> bool:
        """Whether a step compares places, of the row and along another dimension."""
        return step.name in _COMPARISONS and step.result.is_row and all(map(self._is_place, step.operands))

    def _is_place(self, v) -> bool:
        """Whether an integer is a place along a dimension or less than 2^30 beside one, if all dimensions are less than that."""
        far = self._offset(v)
        return far is not None and far < _FAR

    def _offset(self, v) -> int | None:
        """How far an integer is from a place along a dimension, at most; None if it is none."""
        step = self.core.step_of.get(v) if isinstance(v, Value) and v.dtype == np.int32 else None
        if step is None:
            return None
        if step.name in INDICES:
            return 0 if all(d.size < _FAR for d in v.dims if d is not None) else None
        if step.name in MOVES:
            return self._offset(step.operands[0])
        by = [x for x in step.operands if isinstance(x, Constant)] if step.name in ("add", "sub") else []
        inner = self._offset(step.operands[0]) if len(by) == 1 else None
        return None if inner is None else inner + abs(int(widened(by[0])[()]))

    def _divides(self, step) -> bool:
        """Whether elements are divided by a number of the row."""
        return step.name == "div" and step.result.is_row and step.operands[1] in self.core.inverses

    def _is_identity(self, step) -> bool:
        """Whether an element of the result is the element of the operand."""
        reduces = step.name in REDUCTIONS and step.name not in NOT_ELEMENTWISE
        return step.name in MOVES or (reduces and not self.program.over(step))

    def _place(self, index) -> str:
        if index in ({}, {self.program.row: 1}):
            return "at" if index else "0"
        return f"n.i{self.core.indices.index(index)}"


def _cases(values, at="s") -> str:
    """The expression of values[at]."""
    return "".join(f"{at} == {k} ? {v} : " for k, v in enumerate(values)) + "0"


def _type(v) -> str:
    """The C++ type that a value is computed in."""
    return cpp_type(computing(np.dtype(v.aval.dtype)))


def _stored(output) -> str:
    """The C++ type of an array that a kernel writes."""
    own = cpp_type(output.dtype)
    return f"{own[:-1]}, true>" if output.saturates else own
