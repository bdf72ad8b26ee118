"""From a row function to C++: the struct `F` that ffi/kernels/rows/rows.cuh takes.

    core = Core(program)          what a kernel computes of it: which arrays it reads and writes
    core.source("Function")       the struct

Its functions compute one element at a time. Each is a functor that _core/functor.py writes from scalar operations:

    Begin, After     the numbers of a row before the first stage, and after each: members of the struct Numbers
    Reduce           the values of an element that a stage reduces; Identity and Combine are those of its reductions
    Result           the values of an element that are stored, or summed over rows
    NumberResult, Total   numbers that are stored, or summed over rows
"""

import dataclasses
import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from jaxkern._core import functor
from jaxkern._core.define import ceil_div
from jaxkern._core.functor import cpp_type
from jaxkern._core.jaxprs import computing
from jaxkern._engines.jaxpr import NOT_ELEMENTWISE, REDUCTIONS, Constant, Value, compute, widened

INDEX = np.dtype(np.int32)  # of places along a dimension


@dataclasses.dataclass(eq=False)
class Output:
    """An array that a kernel writes. kind: "row", "number", "columns" (rows, summed) or "total" (numbers, summed).

    value: what is stored or summed. result: the Value or Constant of the program that the array is.
    """

    value: object
    result: object
    kind: str
    dtype: np.dtype


class Core:
    """The part of a program that a kernel computes.

    outputs: the arrays that it writes. epilogue: the steps that remain, on arrays; empty if the results of the program are
        the outputs.
    rows, columns, numbers: positions of operands that are read as such. indices: other dimensions whose index is used.
    size: of the functors of the last `source`, in statements; see `functor.Function`.
    """

    def __init__(self, program):
        self.program, self.size = program, 0
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
                found[v] = Output(v, v, "row" if v.is_row else "number", v.dtype)
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

    def steps(self) -> list:
        """The steps before the epilogue."""
        return [s for s in self.program.steps if s not in self.epilogue]

    @functools.cached_property
    def coarse(self) -> bool:
        """Whether coarse arithmetic is enough: all real numbers that are stored have 16 bits, and nothing jumps."""
        real = [o.dtype for o in self.outputs if jnp.issubdtype(o.dtype, jnp.inexact)]
        inexact = set()  # values that depend on coarse arithmetic
        for step in self.program.steps:
            own = [v in inexact for v in step.operands]
            if any(own) and step.name in NOT_ELEMENTWISE or (any(own) and functor._jumps(step.equation)):
                return False
            if any(own) or step.name in functor._COARSE:
                inexact.update(step.results)
        return bool(real) and all(d.itemsize == 2 for d in real)

    def of_kind(self, kind) -> list:
        return [o for o in self.outputs if o.kind == kind]

    @functools.cached_property
    def trivial(self) -> bool:
        """Whether the outputs, in their order, are the results."""
        return not self.epilogue and [o.result for o in self.outputs] == list(self.program.results)

    # ---- which numbers live from one stage to the next

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
            elif step.name == "iota" and not v.is_row:
                self._index(step)
            elif step.name == "iota" and v.dims[step.params["dimension"]] is not program.row:
                self._index(step)
            for x in step.operands:
                if isinstance(x, Value) and v.is_row and not x.is_row:
                    leaves[x] = None
                pending.append(x)
        self.members = {v: f"n{k}" for k, v in enumerate(leaves)}
        # Divisors of elements: a row divides once, and its elements are multiplied.
        divisors = [
            s.operands[1] for v in seen if v.is_row and (s := self.step_of.get(v)) is not None and s.name == "div"
        ]
        single = [v for v in divisors if v in self.members and computing(v.dtype) == np.float32]
        self.inverses = {v: f"d{k}" for k, v in enumerate(dict.fromkeys(single))}
        stages = sorted({s.result.stage for s in reductions if s in needed})
        self.stages = [[s for s in reductions if s in needed and s.result.stage == k] for k in stages]
        self.stage_of = lambda v: sum(k <= v.stage for k in stages)

    def _plan_kept(self):
        """Values of elements that a stage computes and a later one needs, if they are dear: {value: stage}.

        Of the values that one stage computes and the later one would compute again, those nearest to what the later one wants.
        """
        wanted = [[v for s in steps for v in s.operands[: len(s.results)]] for steps in self.stages]
        wanted.append([o.value for o in self.outputs if o.kind in ("row", "columns")])
        computed, kept = {}, {}
        for stage, values in enumerate(wanted):
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
                computed.setdefault(v, stage)
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
        wanted = [[v for s in steps for v in s.operands[: len(s.results)]] for steps in self.stages]
        wanted.append([o.value for o in self.outputs if o.kind in ("row", "columns")])
        for stage, values in enumerate(wanted):
            pending, seen = list(values), set()
            while pending:
                v = pending.pop()
                if not isinstance(v, Value) or v in seen or not v.is_row:
                    continue
                seen.add(v)
                if v in self.kept_values and self.kept_values[v] < stage:
                    last[v] = stage
                    continue
                step = self.step_of.get(v)
                pending += step.operands if step is not None else []
        alive = lambda stage: sum(
            max(1, computing(v.dtype).itemsize // 4)
            for v, first in self.kept_values.items()
            if first < stage <= last.get(v, -1)
        )
        return max((alive(stage) for stage in range(1, len(self.stages) + 1)), default=0)

    @functools.cached_property
    def partial_bytes(self) -> list:
        """Bytes of what a thread has reduced, for each stage."""
        places = lambda step: 4 * (step.name in ("argmax", "argmin"))
        size = lambda step: sum(max(4, computing(v.dtype).itemsize) for v in step.results) + places(step)
        return [8 * ceil_div(sum(map(size, steps)), 8) for steps in self.stages]

    @functools.cached_property
    def total_bytes(self) -> int:
        """Bytes of the numbers that a thread adds up over rows."""
        return sum(computing(o.value.aval.dtype).itemsize for o in self.of_kind("total"))

    def _index(self, step):
        dim = step.result.dims[step.params["dimension"]]
        if dim is not None and dim not in self.indices:
            self.indices.append(dim)

    # ---- functors

    def _functor(self, name, wanted, given):
        """(source, arguments) of a functor that computes the values `wanted` of an element or of a row.

        given(value): the C++ expression of a value that is known where the functor is called, or None.
        """
        leaves, order = {}, []

        def find(v):
            """Fills `leaves` with what is known, and `order` with the steps that compute the others."""
            if isinstance(v, Constant) or v in leaves:
                return
            text = given(v)
            if text is not None:
                leaves[v] = text
                return
            step = self.step_of[v]
            if step in found:
                return
            found.add(step)
            if step.name == "iota":
                dim = v.dims[step.params["dimension"]]
                leaves[v] = "0" if dim is None else self._place(dim)
                return
            for x in step.operands[:1] if self._is_identity(step) else step.operands:
                find(x)
            if self._divides(step):
                leaves.setdefault(("inverse", step.operands[1]), f"n.{self.inverses[step.operands[1]]}")
            order.append(step)

        found = set()
        for v in wanted:
            find(v)
        places = {
            v for v in leaves if (step := self.step_of.get(v)) is not None and step.name == "iota" and not given(v)
        }

        def f(*xs):
            env = dict(zip(leaves, xs))
            for v in places:
                env[v] = jax.lax.convert_element_type(env[v], computing(v.dtype))
            read = lambda v: widened(v)[()] if isinstance(v, Constant) else env[v]
            for step in order:
                if self._is_identity(step):
                    env[step.result] = read(step.operands[0])
                elif self._divides(step):
                    x, y = step.operands
                    env[step.result] = functor.quotient_p.bind(read(x), read(y), env["inverse", y])
                else:
                    env.update(zip(step.results, compute(step, [read(x) for x in step.operands])))
            return [jnp.asarray(read(v)) for v in wanted]

        dtype = lambda v: np.dtype(np.float32) if isinstance(v, tuple) else computing(v.dtype)
        with_index = [INDEX if v in places else dtype(v) for v in leaves]
        outs = [computing(np.dtype(v.aval.dtype)) for v in wanted]
        function = functor.of_scalars(f, with_index, outs, self.program.label, self.coarse)
        self.size += function.size
        return function.source(name), list(leaves.values())

    def _divides(self, step):
        """Whether elements are divided by a number of the row."""
        return step.name == "div" and step.result.is_row and step.operands[1] in self.inverses

    def _is_identity(self, step):
        """Whether an element of the result is the element of the operand."""
        reduces = step.name in REDUCTIONS and step.name not in NOT_ELEMENTWISE
        return step.name in _MOVES or (reduces and not self.program.over(step))

    def _place(self, dim):
        return "at" if dim is self.program.row else f"i{self.indices.index(dim)}"

    def source(self, name, keeps=False) -> str:
        """The struct, as definitions for namespace jaxkern. keeps: whether dear values live from one stage to the next."""
        program, members = self.program, self.members
        self.size = 0
        kept = {v: f"k{k}" for k, v in enumerate(self.kept_values)} if keeps else {}
        text, functors = [], []
        arguments = {}  # of elements
        for kind, prefix in (("rows", "r"), ("columns", "c")):
            for k in getattr(self, kind):
                arguments[program.operands[k]] = f"{prefix}{k}"
        known = lambda v: arguments.get(v) or (f"n.{members[v]}" if v in members else None)

        def elements(stage):
            """What is known of an element in a stage."""
            before = {v: f"k.{m}" for v, m in kept.items() if self.kept_values[v] < stage}
            return lambda v: before.get(v) or known(v)

        list_of = lambda vs: ", ".join(vs)
        signature = [f"{cpp_type(computing(v.dtype))} {a}" for v, a in arguments.items()]

        def call(functor_name, wanted, given, targets):
            source, args = self._functor(functor_name, wanted, given)
            functors.append(source)
            return f"{functor_name}()({list_of([*args, *targets])});"

        def numbers_after(stage, known):
            """Statements that compute the members of this stage."""
            of_stage = [v for v in members if not v.is_row and self.stage_of(v) == stage]
            own = [v for v in of_stage if v not in known]
            given = lambda v: f"n.{members[v]}" if v in members and v not in own else None
            text = call(f"{name}After{stage}", own, given, [f"n.{members[v]}" for v in own]) if own else ""
            return text + "".join(f" n.{d} = 1 / n.{members[v]};" for v, d in self.inverses.items() if v in of_stage)

        declared = " ".join(f"{_member_type(v)} {m};" for v, m in members.items())
        declared += "".join(f" float {d};" for d in self.inverses.values())
        text.append(f"  struct Numbers {{ {declared or 'int unused;'} }};")
        declared = " ".join(f"{_member_type(v)} {m};" for v, m in kept.items())
        text.append(f"  struct Kept {{ {declared} }};")
        given = [(program.operands[k], f"m{k}") for k in self.numbers]
        loads = " ".join(f"n.{members[v]} = {a};" for v, a in given if v in members)
        begin = [*(f"int32_t i{k}" for k in range(len(self.indices)))]
        begin += [f"{cpp_type(computing(v.dtype))} {a}" for v, a in given]
        body = numbers_after(0, {v for v, _ in given})
        text.append(f"  static JAXKERN_FN void Begin({list_of(['Numbers& n', *begin])}) {{ {loads} {body} }}")
        for s, steps in enumerate(self.stages):
            here = {v: f"k.{m}" for v, m in kept.items() if self.kept_values[v] == s}
            text += self._stage(name, s, steps, signature, elements(s), call, numbers_after, functors, here)
        if not self.stages:  # the kernel's code names them
            text.append("  template <class S> static int Identity(S, const Numbers&);")
        rows, columns = self.of_kind("row"), self.of_kind("columns")
        outs = [f"{cpp_type(computing(o.value.aval.dtype))}& y{k}" for k, o in enumerate((*rows, *columns))]
        body = ""
        if rows or columns:
            wanted = [o.value for o in (*rows, *columns)]
            body = call(f"{name}Result", wanted, elements(len(self.stages)), [f"y{k}" for k in range(len(wanted))])
        inside = ["const Numbers& n", "int32_t at", "const Kept& k", *signature, *outs]
        text.append(f"  static JAXKERN_FN void Result({list_of(inside)}) {{ {body} }}")
        for kind, function in (("number", "NumberResult"), ("total", "Total")):
            own = self.of_kind(kind)
            outs = [f"{cpp_type(computing(o.value.aval.dtype))}& y{k}" for k, o in enumerate(own)]
            sets = " ".join(f"y{k} = {self._number(o.value)};" for k, o in enumerate(own))
            text.append(f"  static JAXKERN_FN void {function}({list_of(['const Numbers& n', *outs])}) {{ {sets} }}")
        of = lambda vs: list_of(cpp_type(np.dtype(v.aval.dtype)) for v in vs)
        stored = lambda kind: list_of(cpp_type(o.dtype) for o in self.of_kind(kind))
        summed = lambda kind: list_of(cpp_type(computing(o.value.aval.dtype)) for o in self.of_kind(kind))
        at = lambda positions: of(program.operands[k] for k in positions)
        types = {
            "Rows": at(self.rows),
            "Columns": at(self.columns),
            "NumberOperands": at(self.numbers),
            "Results": stored("row"),
            "NumberResults": stored("number"),
            "ColumnSums": summed("columns"),
            "Totals": summed("total"),
        }
        head = [f"  using {k} = Types<{v}>;" for k, v in types.items()]
        head += [f"  static constexpr int kStages = {len(self.stages)}, kIndices = {len(self.indices)};"]
        ranks = {
            "Row": [program.operands[k] for k in self.rows],
            "Number": [program.operands[k] for k in self.numbers],
            "Result": [o.result for o in self.of_kind("row")],
            "NumberResult": [o.result for o in self.of_kind("number")],
        }
        for kind, values in ranks.items():
            rank = [f"{{k}} == {k} ? {len(program.groups(v))} : ".replace("{k}", "k") for k, v in enumerate(values)]
            head.append(f"  static constexpr int {kind}Rank(int k) {{ return {''.join(rank)}0; }}")
        return "\n".join([*functors, f"struct {name} {{", *head, *text, "};"]) + "\n"

    def _number(self, v):
        return functor._literal(widened(v)[()], v.aval.dtype) if isinstance(v, Constant) else f"n.{self.members[v]}"

    def _stage(self, name, s, steps, signature, elements, call, numbers_after, functors, kept):
        """Identity, Combine, Reduce and After of a stage; kept: {value: member} that it computes for later ones."""
        reduced, parts, identity, combine, after = [], [], [], [], []
        for step in steps:
            kind, count = REDUCTIONS[step.name], len(step.results)
            at = len(parts)
            own = [f"v{at + j}" for j in range(count)]
            operands = step.operands[:count] if kind == "reduce" else step.operands[:1]
            types = [computing(np.dtype(v.aval.dtype)) for v in operands]
            if kind in ("argmax", "argmin"):
                own, types = [f"v{at}", f"v{at + 1}"], [types[0], INDEX]
            parts += list(zip(types, own))
            reduced += operands
            a, b = ([f"{side}.{v}" for v in own] for side in "pq")
            if kind == "reduce":
                identity += [self._number(v) for v in step.operands[count:]]
                functor_name = f"{name}Combine{s}_{at}"
                functors.append(_combine(functor_name, step, types))
                combine.append(f"{functor_name}()({', '.join([*a, *b, *(f'y.{v}' for v in own)])});")
            elif kind in ("argmax", "argmin"):
                identity += [_least(types[0], "max" if kind == "argmax" else "min"), f"{2**31 - 1}"]
                better = ">" if kind == "argmax" else "<"
                same = f"{b[0]} == {a[0]} || ({b[0]} != {b[0]} && {a[0]} != {a[0]})"
                takes = (
                    f"{b[0]} {better} {a[0]} || ({b[0]} != {b[0]} && {a[0]} == {a[0]}) || (({same}) && {b[1]} < {a[1]})"
                )
                combine.append(f"{{ const bool takes = {takes};")
                combine += [f"y.{v} = takes ? {q} : {p};" for v, p, q in zip(own, a, b)]
                combine.append("}")
            else:
                identity.append(_least(types[0], kind))
                overload = {"and": "and_", "or": "or_", "xor": "xor_"}.get(kind, kind)
                combine.append(
                    f"y.{own[0]} = lax::{overload}({cpp_type(types[0])}({a[0]}), {cpp_type(types[0])}({b[0]}));"
                )
            for v, part in zip(step.results, own[-count:]):
                after.append(f"n.{self.members[v]} = {cpp_type(computing(v.dtype))}(p.{part});")
        members = " ".join(f"{_part_type(d)} {v};" for d, v in parts)
        # A functor writes its results in their own types; parts of words smaller than a lane exchanges are widened.
        locals_ = [f"t{k}" for k in range(len(reduced))]
        declare = " ".join(f"{cpp_type(computing(np.dtype(v.aval.dtype)))} {t};" for v, t in zip(reduced, locals_))
        body = call(f"{name}Reduce{s}", [*reduced, *kept], elements, [*locals_, *kept.values()])
        sets, k = [], 0
        for step in steps:
            kind = REDUCTIONS[step.name]
            for t in range(len(step.results)):
                sets.append(f"p.{parts[len(sets)][1]} = {locals_[k + t]};")
            if kind in ("argmax", "argmin"):
                sets.append(f"p.{parts[len(sets)][1]} = at;")
            k += len(step.results)
        stage, inside = (
            f"Stage<{s}>",
            ", ".join(["const Numbers& n", "int32_t at", "Kept& k", f"Partial{s}& p", *signature]),
        )
        known = {v for step in steps for v in step.results}
        later = numbers_after(s + 1, known)
        return [
            f"  struct Partial{s} {{ {members} }};",
            f"  static JAXKERN_FN Partial{s} Identity({stage}, const Numbers& n) {{ return {{{', '.join(identity)}}}; }}",
            f"  static JAXKERN_FN Partial{s} Combine({stage}, const Partial{s}& p, const Partial{s}& q) {{",
            f"    Partial{s} y; {' '.join(combine)} return y;",
            "  }",
            f"  static JAXKERN_FN void Reduce({stage}, {inside}) {{ {declare} {body} {' '.join(sets)} }}",
            f"  static JAXKERN_FN void After({stage}, Numbers& n, const Partial{s}& p) {{ {' '.join(after)} {later} }}",
        ]


# Elementary functions, of which a multiprocessor computes fewer than it can read elements.
DEAR = frozenset(
    "acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma erf erf_inv erfc exp exp2 expm1 lgamma log log1p logistic pow "
    "sin sinh sqrt rsqrt tan tanh".split()
)
_MOVES = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose")


def _member_type(v):
    return cpp_type(computing(v.dtype))


def _part_type(dtype):
    """The type of a part of a reduction: at least as wide as what lanes exchange."""
    return cpp_type(dtype) if np.dtype(dtype).itemsize >= 4 else "int32_t"


def _least(dtype, kind) -> str:
    """The identity of a reduction."""
    dtype = np.dtype(dtype)
    if kind in ("max", "min"):
        if jnp.issubdtype(dtype, jnp.floating):
            return functor._literal(np.asarray(-np.inf if kind == "max" else np.inf, dtype), dtype)
        if dtype == np.bool_:
            return "false" if kind == "max" else "true"
        info = jnp.iinfo(dtype)
        return functor._literal(info.min if kind == "max" else info.max, dtype)
    if kind == "and":
        return (
            "true" if dtype == np.bool_ else functor._literal(-1 if dtype.kind == "i" else jnp.iinfo(dtype).max, dtype)
        )
    return functor._literal(np.asarray(1 if kind == "mul" else 0, dtype), dtype)


def _combine(name, step, types) -> str:
    """The functor of the user's function of `lax.reduce`, which takes two of each part."""
    closed = step.params["jaxpr"]
    closed = closed if hasattr(closed, "consts") else jax.extend.core.ClosedJaxpr(closed, step.params["consts"])
    call = jax.extend.core.jaxpr_as_fun(closed)

    def f(*xs):
        ys = call(*(jax.lax.convert_element_type(x, v.aval.dtype) for x, v in zip(xs, closed.jaxpr.invars)))
        return [jax.lax.convert_element_type(y, d) for y, d in zip(ys, types)]

    return functor.of_scalars(f, [*types, *types], types, step.equation.primitive.name, False).source(name)
