"""Writes the C++ of a loop with rows: see generate_rows.py, which uses it, and ffi/kernels/loops/row_loops.cuh."""

import math
import textwrap

import numpy as np

from jaxkern._core.cpp import cpp_type
from jaxkern._core.jaxprs import computing
from jaxkern._engines.loops.row_pieces import Pieces, merged_places, neutral, owned, padded_count

_FUNCTIONS = {"add": "add", "mul": "mul", "max": "max", "min": "min", "and": "and_", "or": "or_", "xor": "xor_"}


class Writer(Pieces):
    """The struct of a core for a Layout.

    text(name): its source. maps: the groups of its index maps. bytes: of the shared memory of a block, at most `most` where matrices
    are staged there; larger ones are read from memory in every step. unstaged: their bytes.
    """

    def __init__(self, core, layout, most):
        super().__init__(core, layout)
        self._most, self.unstaged = most, 0
        self._write()

    @property
    def bytes(self) -> int:
        return self._area["block"] + self._area["own"] * self._layout.teams

    def text(self, name) -> str:
        indent = lambda lines, by: textwrap.indent("\n".join(lines), " " * by)
        functors = "".join(f.source(f"{name}{k}") for k, f in enumerate(self._functors))
        body = "\n".join(
            [
                f"struct {name} {{",
                f"  static constexpr int kTeam = {self._layout.team}, kTeams = {self._layout.teams};",
                f"  static constexpr int kBlockBytes = {self._area['block']}, kTeamBytes = {self._area['own']};",
                "  struct Args {",
                f"    const void* in[{len(self._given) + 1}];",
                f"    void* out[{len(self._p.results) + 1}];",
                f"    IndexMap map[{len(self.maps) + 1}];",
                "    int64_t lanes, steps;",
                "  };",
                "  struct X {",
                indent(self._x, 4),
                "  };",
                indent(self._types, 2),
                "  int t, w, p;  // the place of the thread in its team; of its elements in a row; among those that own the same",
                "  bool active;",
                "  int flip = 0;",
                "  int64_t first, lane;",
                "  char *block, *own;",
                indent(self._members, 2),
                "  template <class T> static __device__ __forceinline__ T* Shared(char* area, int bytes) {",
                "    return reinterpret_cast<T*>(area + bytes);",
                "  }",
                *(
                    f"  __device__ __forceinline__ void {signature} {{\n{indent(lines, 4)}\n  }}"
                    for signature, lines in (
                        ("Begin(const Args& a, char* shared)", self._begin),
                        ("Load(const Args& a, X& x, int64_t step) const", self._load),
                        ("Step(const Args& a, const X& x, int64_t step)", self._step),
                        ("End(const Args& a)", self._end),
                    )
                ),
                "};\n",
            ]
        )
        return functors + body.replace("$", name)

    # ---- the parts of the struct

    def _write(self):
        core, p = self._core, self._p
        self._given = [*core.consts, *p.inits, *core.xs]  # operands that the kernel reads
        leaves = [leaf for nest in core.every_nest for leaf in nest.leaves]
        is_dim = lambda at: not isinstance(at, (tuple, str)) and at is not None
        self._dims = list(dict.fromkeys(at for _, at in leaves if is_dim(at)))
        self._crossed = self._find_crossed()
        self._write_begin()
        for nest in core.nests:
            self._write_nest(nest)
        self._write_ys()
        self._write_sums()
        self._write_carries()
        self._write_end()

    def _find_crossed(self) -> set:
        """Values with at most one row that other threads than their owners read."""
        core, found = self._core, set()
        for nest in core.nests:
            own = owned(nest)
            found.update(v for v, at in nest.leaves if isinstance(at, tuple) and len(at) == 1 and at[0] != own)
        for k, final in enumerate(core.finals):
            leaves = [final] if isinstance(final, tuple) else final.leaves
            if k in core.per_block:
                found.update(v for v, at in leaves if isinstance(at, tuple) and len(at) < 2)
            else:
                own = "o0" if len(self._p.sizes(self._p.results[k])) == 1 else None
                found.update(v for v, at in leaves if isinstance(at, tuple) and len(at) == 1 and at[0] != own)
        return found

    def _cross(self, v, text) -> list:
        """Writes an element that a thread owns to shared memory, if others read it."""
        if v not in self._crossed:
            return []
        if v not in self._offsets:
            self._place(v, math.prod(self._p.sizes(v)), v.dtype)
        if not self._p.sizes(v):
            return [f"if (t == 0) {self._shared(v, self._type(v), 0)} = {text};"]
        return self._once([f"{self._shared(v, self._type(v), 'o0')} = {text};"])

    def _declared(self, v) -> str:
        """A variable for a value with at most one row."""
        sizes = self._p.sizes(v)
        return f"{self._type(v)} v{self._id(v)}{f'[{self._items(sizes[0])}]' if sizes else ''};"

    def _write_begin(self):
        core, p, out = self._core, self._p, self._begin
        out += [
            f"t = threadIdx.x % {self._layout.team};",
            f"w = t / {self._layout.split};",
            f"p = t % {self._layout.split};",
            "first = static_cast<int64_t>(blockIdx.x) * kTeams;",
            f"lane = first + threadIdx.x / {self._layout.team};",
            "active = lane < a.lanes;",
            "if (!active) lane = a.lanes - 1;",
            "block = shared;",
            f"own = shared + kBlockBytes + threadIdx.x / {self._layout.team} * kTeamBytes;",
        ]
        for j, d in enumerate(self._dims):
            self._members.append(f"int place{j};")
            out.append(f"place{j} = static_cast<int>({self._lane_offset(merged_places([d], p.dims), 'lane')});")
        for at, k in enumerate(self._given):
            if k >= p.num_consts + p.num_carry:
                self._write_x(at, k)
            else:
                self._write_given(at, k)
        for k in p.accumulators:
            v = p.carries[k]
            n = self._id(v)
            if k in core.per_block:
                self._place((v, "sum"), math.prod(p.sizes(v)), v.dtype, "block")
                out += self._every(p.sizes(v), [f"{self._sum(v)} = 0;"], of_block=True)
            else:
                self._members.append(f"{self._declared(v)[:-1]}{' = {}' if p.sizes(v) else ' = 0'};")
                out += self._in_row(v, self._cross(v, f"v{n}[k]" if p.sizes(v) else f"v{n}"))
        out.append("__syncthreads();")

    def _in_row(self, v, lines) -> list:
        """Lines for each element of v that a thread owns."""
        sizes = self._p.sizes(v)
        return self._each(sizes[0], "o0", lines) if sizes and lines else lines

    def _write_given(self, at, k):
        """Reads a constant or a first carry."""
        p, out = self._p, self._begin
        v, array, n = p.operands[k], self._core.operand(k), self._id(p.operands[k])
        type_, wide, sizes = cpp_type(v.dtype), self._type(v), p.sizes(v)
        if len(sizes) < 2:
            self._members.append(self._declared(v))
            x = f"v{n}[k]" if sizes else f"v{n}"
            read = f"{x} = Wide<{type_}>(from[{self._offset(array, ('o0',))}]);"
            lines = self._in_row(v, [read, *self._cross(v, x)])
        else:
            carried = k >= p.num_consts
            of_block = not carried and not p.lanes(v)  # all teams read it; each changes its own carry
            count = padded_count(sizes)
            bytes = count * computing(v.dtype).itemsize
            teams = 1 if of_block else self._layout.teams
            if not carried and self.bytes + bytes * teams > self._most:
                self._members.append(f"const {type_}* g{n};")
                self._begin.append(f"g{n} = {self._pointer(at, array)};")
                self._globals[v] = at, array, ""
                self.unstaged += array.size_of_rows * v.dtype.itemsize
                return
            if carried and not self._is_in_place(k - p.num_consts):
                bytes = bytes + 15 & ~15
                self._place(v, 2 * bytes // computing(v.dtype).itemsize, v.dtype)
                self._flips[v] = bytes
            else:
                self._place(v, count, v.dtype, "block" if of_block else "own")
            names = [f"o{j}" for j in range(len(sizes))]
            to = self._shared(v, wide, self._padded(sizes, names))
            read = f"{to} = Wide<{type_}>(from[{self._offset(array, names)}]);"
            lines = self._every(sizes, [read], of_block)
        out += ["{", f"  const {type_}* const from = {self._pointer(at, array)};", *(f"  {x}" for x in lines), "}"]

    def _is_in_place(self, k) -> bool:
        """Whether a carried matrix has one place: each new element needs no other element, and no other carry needs the matrix,
        or the matrix never changes.
        """
        v, finals = self._p.carries[k], self._core.finals[: self._p.num_carry]
        if finals[k] == (v, self._own_names(v)):
            return True
        leaves = [[final] if isinstance(final, tuple) else final.leaves for final in finals]
        return all(j == k and at == self._own_names(v) for j, own in enumerate(leaves) for w, at in own if w is v)

    def _write_x(self, at, k):
        """Loads elements of xs."""
        p = self._p
        v, array, n = p.operands[k], self._core.operand(k), self._id(p.operands[k])
        type_, sizes, step = cpp_type(v.dtype), p.sizes(v), f" + step * {array.step}"
        self._members.append(f"const {type_}* p{n};")
        self._begin.append(f"p{n} = {self._pointer(at, array)};")
        if len(sizes) > 1:
            self._globals[v] = at, array, step
            self._step.append(f"const {type_}* const g{n} = p{n}{step};")
            return
        self._x.append(f"{type_} x{n}{f'[{self._items(sizes[0])}]' if sizes else ''};")
        item = "[k]" if sizes else ""
        load = f"x.x{n}{item} = p{n}[step * {array.step} + {self._offset(array, ('o0',))}];"
        self._load += self._in_row(v, [load])
        self._step.append(self._declared(v))
        lines = [f"v{n}{item} = Wide<{type_}>(x.x{n}{item});", *self._cross(v, f"v{n}{item}")]
        self._writes([v] if v in self._crossed else [])
        self._step += self._in_row(v, lines)

    def _write_nest(self, nest):
        values, sizes, out = nest.values, nest.out, self._step
        own = owned(nest)
        texts, keys = self._leaves(nest, own)
        if not nest.kinds:
            self._reads(keys)
            crossed = [v for v in values if v in self._crossed]
            out += [self._declared(v) for v in values]
            item = "[k]" if sizes else ""
            results = [f"v{self._id(v)}{item}" for v in values]
            call = f"{self._functor(nest.function)}({', '.join([*texts, *results])});"
            lines = [call, *(x for v in crossed for x in self._cross(v, f"v{self._id(v)}{item}"))]
            self._writes(crossed)
            out += self._in_row(values[0], lines)
            return
        self._reads(keys)
        name = self._result_type(nest)
        is_arg = nest.kinds[0].startswith("arg")
        result = lambda v, j, of: f"static_cast<{self._type(v)}>({of}.i{j})" if is_arg else f"{of}.v{j}"
        compute = [
            f"{name} y;",
            f"{self._functor(nest.function)}({', '.join([*texts, *(f'y.v{j}' for j in range(len(values)))])});",
            *(f"y.i{j} = r0;" for j in range(len(values)) if is_arg),
        ]
        serial = nest.over[1:] if own == "r0" else nest.over
        split = self._layout.split if own else 1
        inner = compute
        if serial:
            first = len(nest.over) - len(serial)
            places = self._places("r", serial, "r") if not first else self._shifted(serial)
            inner = [
                f"const {name} y = OverSerial<{math.prod(serial)}, {split}, {name}>(p, [&](int r) {{",
                *(f"  {x}" for x in [*places, *compute, "return y;"]),
                "});",
            ]
        if own == "r0":
            s = f"s{len(self._types)}"
            out.append(f"{name} {s};")
            out += self._each(nest.over[0], "r0", [*inner, f"{name}::Join({s}, y);"])
            self._join_team(nest, name, s, 1 if serial else split)
            for j, v in enumerate(values):
                out.append(f"const {self._type(v)} v{self._id(v)} = {result(v, j, s)};")
                if v in self._crossed:
                    lines = self._cross(v, f"v{self._id(v)}")
                    self._writes([v])
                    out += lines
            return
        if len(sizes) == 1:
            out += [self._declared(v) for v in values]
            join = [f"const {name} z = OverLanes<{split}, 1>(y);"] if split > 1 else []
            lines = [f"v{self._id(v)}[k] = {result(v, j, 'z' if join else 'y')};" for j, v in enumerate(values)]
            crossed = [v for v in values if v in self._crossed]
            for v in crossed:
                written = self._cross(v, f"v{self._id(v)}[k]")
                lines += (
                    written
                    if sizes[0] % self._layout.width == 0
                    else [f"if (w + k * {self._layout.width} < {sizes[0]}) {{", *written, "}"]
                )
            self._writes(crossed)
            out += self._each(sizes[0], "o0", [*inner, *join, *lines], all_run=bool(join))
            return
        lines = []
        for j, v in enumerate(values):
            self._place(v, padded_count(sizes), v.dtype)
            names = [f"o{i}" for i in range(len(sizes))]
            lines.append(f"{self._shared(v, self._type(v), self._padded(sizes, names))} = {result(v, j, 'y')};")
        self._writes(values)
        out += self._every(sizes, [*inner, *lines])

    def _shifted(self, serial) -> list:
        """The indices of what is reduced behind the row whose elements a thread owns."""
        lines = self._places("r", serial, "q")
        return [*lines, *(f"const int r{k + 1} = q{k};" for k in range(len(serial)))]

    def _result_type(self, nest) -> str:
        """The struct of what a nest reduces."""
        name, members, joins = f"R{len(self._types)}", [], []
        align = 4  # lanes exchange words
        for j, kind in enumerate(nest.kinds):
            dtype = computing(nest.terms[j][0].dtype)
            type_, align = cpp_type(dtype), max(align, np.dtype(dtype).itemsize)
            if kind.startswith("arg"):
                members += [f"{type_} v{j} = 0;", f"int i{j} = -1;"]
                is_max = "true" if kind == "argmax" else "false"
                joins.append(
                    f"if (IsBefore<{is_max}>(a.v{j}, a.i{j}, b.v{j}, b.i{j})) a.v{j} = b.v{j}, a.i{j} = b.i{j};"
                )
            else:
                origin = self._p.made[nest.values[j]].origin
                chooses = origin is not None and origin.primitive.name != "dot_general"
                members.append(f"{type_} v{j} = {neutral(kind, type_, nest.terms[j][0].dtype, chooses)};")
                joins.append(f"a.v{j} = lax::{_FUNCTIONS[kind]}(a.v{j}, b.v{j});")
        join = f"static __device__ __forceinline__ void Join({name}& a, const {name}& b) {{ {' '.join(joins)} }}"
        self._types.append(f"struct alignas({align}) {name} {{ {' '.join(members)} {join} }};")
        return name

    def _join_team(self, nest, name, s, alike):
        """All threads of a team get what each has reduced; `alike` adjacent threads have reduced the same."""
        out, team = self._step, self._layout.team
        out.append(f"{s} = OverLanes<{min(team, 32)}, {alike}>({s});")
        if team <= 32:
            return
        bytes = sum(8 + computing(v.dtype).itemsize for v, _ in nest.terms) + 8
        self._place(nest, team // 32 * bytes, np.int8)
        self._writes([nest])
        out.append(f"if (t % 32 == 0) {self._shared(nest, name, 't / 32')} = {s};")
        self._reads([nest])
        out.append(f"{s} = OverRoom<{team // 32}>(&{self._shared(nest, name, 0)});")

    def _final(self, k, own, mate=False, known=None) -> tuple:
        """(lines that compute a result of the scan, its text, the keys that this reads)."""
        final = self._core.finals[k]
        if isinstance(final, tuple):
            text, keys = self._leaf(final, own, mate)
            return [], text, keys
        texts, keys = self._leaves(final, own, mate, known)
        call = f"{self._functor(final.function)}({', '.join([*texts, 'y'])});"
        return [f"{cpp_type(final.function.out_dtypes[0])} y;", call], "y", keys

    def _write_ys(self):
        p = self._p
        for k, array in enumerate(self._core.ys, p.num_carry):
            type_, sizes = cpp_type(array.dtype), tuple(array.sizes[a] for a in array.rows)
            own = "o0" if len(sizes) == 1 else None
            lines, text, keys = self._final(k, own)
            self._reads(keys)
            names = [f"o{j}" for j in range(len(sizes))]
            offset = self._lane_offset(array.groups(p.dims), "lane")
            self._members.append(f"{type_}* q{k};")
            self._begin.append(f"q{k} = static_cast<{type_}*>(a.out[{k}]) + {offset};")
            stored = [*lines, f"q{k}[step * {array.step} + {self._offset(array, names)}] = Rounded<{type_}>({text});"]
            owner = self._owner(array)
            if not sizes:
                self._step += [f"if (t == 0 && {owner}) {{", *(f"  {x}" for x in stored), "}"]
                continue
            loop = self._once(self._each(sizes[0], "o0", stored)) if len(sizes) == 1 else self._every(sizes, stored)
            self._step += [f"if ({owner}) {{", *(f"  {x}" for x in loop), "}"]

    def _write_sums(self):
        """Accumulators that are matrices: the threads of a block share their elements, and add up what its teams have."""
        p, out = self._p, self._step
        for k in self._core.per_block:
            v = p.carries[k]
            if isinstance(self._core.finals[k], tuple):  # nothing is added
                continue
            sizes, to = p.sizes(v), self._sum(v)
            lines, text, _ = self._final(k, None, True, {v: "sum"})
            self._sync(of_block=True)
            add = [
                f"{self._type(v)} sum = {to};",
                "#pragma unroll 4",
                "for (int r = 0; r < mates; ++r) {",
                "  const int64_t mate_lane = first + r;",
                "  char* const mate = block + kBlockBytes + r * kTeamBytes;",
                *(f"  {x}" for x in [*lines, f"sum = {text};"]),
                "}",
                f"{to} = sum;",
            ]
            mates = "const int mates = static_cast<int>(min(int64_t{kTeams}, a.lanes - first));"
            out += self._scoped([mates, *self._every(sizes, add, of_block=True)])
            self._sync(of_block=True)

    def _sum(self, v) -> str:
        """Element e of an accumulator that is a matrix, in shared memory. Each element belongs to a thread of the block."""
        return self._shared((v, "sum"), self._type(v), "e")

    def _write_carries(self):
        core, p, out = self._core, self._p, self._step
        moved = []
        for k in range(p.num_carry):
            if k in core.per_block or core.finals[k] == (p.carries[k], self._own_names(p.carries[k])):
                continue
            v, array = p.carries[k], core.carries[k]
            n, sizes, type_ = self._id(v), p.sizes(v), cpp_type(array.dtype)
            lines, text, keys = self._final(k, "o0" if len(sizes) == 1 else None)
            self._reads(keys)
            if len(sizes) > 1:
                names = [f"o{j}" for j in range(len(sizes))]
                flips = f" + (1 - flip) * {self._flips[v]}" if v in self._flips else ""
                self._writes([(v, "next") if flips else v])
                to = self._shared(v, self._type(v), self._padded(sizes, names), None, flips)
                out += self._every(sizes, [*lines, f"{to} = Round<{type_}>({text});"])
                continue
            item = "[k]" if sizes else ""
            out.append(f"{self._type(v)} n{n}{f'[{self._items(sizes[0])}]' if sizes else ''};")
            out += self._scoped(self._in_row(v, [*lines, f"n{n}{item} = Round<{type_}>({text});"]))
            moved.append(v)
        for v in moved:
            n, item = self._id(v), "[k]" if self._p.sizes(v) else ""
            crossed = self._cross(v, f"v{n}{item}")
            self._writes([v] if crossed else [])
            out += self._in_row(v, [f"v{n}{item} = n{n}{item};", *crossed])
        if self._flips:
            out.append("flip = 1 - flip;")

    def _scoped(self, lines) -> list:
        return ["{", *(f"  {x}" for x in lines), "}"]

    def _own_names(self, v) -> tuple:
        return tuple(f"o{k}" for k in range(len(self._p.sizes(v))))

    def _write_end(self):
        core, p, out = self._core, self._p, self._end
        out.append("__syncthreads();")
        for k, array in enumerate(core.carries):
            v = p.carries[k]
            n, sizes, type_ = self._id(v), p.sizes(v), cpp_type(array.dtype)
            names, count = self._own_names(v), math.prod(sizes)
            if k in core.per_block and not core.alone:
                to = f"static_cast<{type_}*>(a.out[{k}])[blockIdx.x * int64_t{{{count}}} + e]"
                out += self._every(sizes, [f"{to} = {self._sum(v)};"], of_block=True)
                continue
            offset = self._lane_offset(array.groups(p.dims), "lane")
            out += [
                f"if ({self._owner(array)}) {{",
                f"  {type_}* const q = static_cast<{type_}*>(a.out[{k}]) + {offset};",
            ]
            to = f"q[{self._offset(array, names)}]"
            if k in core.per_block:
                loop = self._every(sizes, [f"q[e] = {self._sum(v)};"], of_block=True)
            elif len(sizes) > 1:
                flips = f" + flip * {self._flips[v]}" if v in self._flips else ""
                x = self._shared(v, self._type(v), self._padded(sizes, names), None, flips)
                loop = self._every(sizes, [f"{to} = Rounded<{type_}>({x});"])
            elif sizes:
                loop = self._once(self._each(sizes[0], "o0", [f"{to} = Rounded<{type_}>(v{n}[k]);"]))
            else:
                loop = [f"if (t == 0) *q = Rounded<{type_}>(v{n});"]
            out += [*(f"  {x}" for x in loop), "}"]
