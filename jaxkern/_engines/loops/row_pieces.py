"""Pieces of the C++ of a loop with rows: loops over elements, offsets in memory, and shared memory with its barriers."""

import math
import typing

import jax.numpy as jnp

from jaxkern._core.cpp import cpp_type
from jaxkern._core.define import ceil_div
from jaxkern._core.jaxprs import computing
from jaxkern._engines.jaxpr import merged


class Layout(typing.NamedTuple):
    """How threads are shared out. width: threads that own different elements of a row. split: threads that own the same ones, and share
    what is reduced for an element. threads: of a block."""

    width: int
    split: int
    threads: int

    @property
    def team(self) -> int:
        """The threads of a lane."""
        return self.width * self.split

    @property
    def teams(self) -> int:
        return self.threads // self.team


class Pieces:
    """What row_writer.Writer builds on. core: a generate_rows.RowCore."""

    def __init__(self, core, layout):
        self._core, self._p, self._layout = core, core.program, layout
        self.maps, self._functors, self._types = [], [], []
        self._members, self._begin, self._load, self._x, self._step, self._end = [], [], [], [], [], []
        self._ids: dict = {}
        self._offsets: dict = {}  # of shared memory: (area, bytes into it)
        self._area = {"block": 0, "own": 0}
        self._dirty = None  # (what is written, what is read) since threads waited; None: anything
        self._globals: dict = {}  # matrix that is read from memory: (place among these, its Array, text of the distance of a step)
        self._flips: dict = {}  # matrix that is carried: bytes of each of its two buffers

    def _id(self, v) -> int:
        return self._ids.setdefault(v, len(self._ids))

    def _functor(self, function) -> str:
        self._functors.append(function)
        return f"${len(self._functors) - 1}()"

    def _type(self, v) -> str:
        return cpp_type(computing(v.dtype))

    def _items(self, n) -> int:
        return ceil_div(n, self._layout.width)

    def _each(self, n, name, lines, all_run=False) -> list:
        """A loop over the elements of a row that a thread owns. all_run: threads without an element run another one again."""
        width = self._layout.width
        place = f"w + k * {width}"
        inner = [f"const int {name} = {place};", *lines]
        if n % width:
            guarded = [f"const int {name} = {place};", f"if ({name} < {n}) {{", *(f"  {line}" for line in lines), "}"]
            inner = [f"const int {name} = min({place}, {n - 1});", *lines] if all_run else guarded
        return ["#pragma unroll", f"for (int k = 0; k < {self._items(n)}; ++k) {{", *(f"  {i}" for i in inner), "}"]

    def _once(self, lines) -> list:
        """Lines that one of the threads runs which own the same elements."""
        return ["if (p == 0) {", *(f"  {line}" for line in lines), "}"] if self._layout.split > 1 and lines else lines

    def _every(self, sizes, lines, of_block=False) -> list:
        """A loop over the elements of a matrix, spread over the threads of a team or of the block."""
        first, by = ("static_cast<int>(threadIdx.x)", self._layout.threads) if of_block else ("t", self._layout.team)
        head = f"for (int e = {first}; e < {math.prod(sizes)}; e += {by}) {{"
        return ["#pragma unroll 1", head, *(f"  {line}" for line in [*self._places("e", sizes, "o"), *lines]), "}"]

    def _places(self, whole, sizes, letter) -> list:
        """The indices of element `whole` of an array of these sizes."""
        found = []
        for k, n in enumerate(sizes):
            rest = math.prod(sizes[k + 1 :])
            at = whole if rest == 1 else f"{whole} / {rest}"
            found.append(f"const int {letter}{k} = {at if k == 0 else f'{at} % {n}'};")
        return found

    def _lane_offset(self, groups, lane) -> str:
        if not groups:
            return "0"
        if len(groups) == 1:
            return f"{lane} * {groups[0][1]}"
        if groups not in self.maps:
            self.maps.append(groups)
        return f"a.map[{self.maps.index(groups)}]({lane})"

    def _pointer(self, k, array, lane="lane") -> str:
        """A pointer to what a lane has of an operand. k: its place among those that the kernel reads."""
        offset = self._lane_offset(array.groups(self._p.dims), lane)
        return f"static_cast<const {cpp_type(array.dtype)}*>(a.in[{k}]) + {offset}"

    def _offset(self, array, names) -> str:
        """The offset of an element of an array in memory."""
        wide = math.prod(array.sizes) * array.length >= 1 << 31
        times = [f"int64_t{{{array.strides[a]}}}" if wide else array.strides[a] for a in array.rows]
        terms = [f"({name}) * {n}" for n, name in zip(times, names)]
        return " + ".join(terms) or "0"

    def _owner(self, array) -> str:
        """Whether a thread's lane stores an array that may lack lanes."""
        lacking = merged_places([d for d in self._p.dims if d not in array.dims], self._p.dims)
        offset = self._lane_offset(lacking, "lane")
        return "active" if offset == "0" else f"active && {offset} == 0"

    # ---- shared memory

    def _place(self, key, count, dtype, area="own") -> None:
        at = self._area[area] + 15 & ~15
        self._offsets[key] = area, at
        self._area[area] = at + count * computing(dtype).itemsize + 15 & ~15

    def _shared(self, key, type_, index, area=None, flips="") -> str:
        own, at = self._offsets[key]
        area = own if own == "block" or area is None else area
        return f"Shared<{type_}>({area}, {at}{flips})[{index}]"

    def _padded(self, sizes, names) -> str:
        """The offset of an element of a matrix in shared memory. Rows have an odd length, so that columns lie in all banks."""
        strides = padded_strides(sizes)
        return " + ".join(f"({n}) * {s}" for n, s in zip(names, strides))

    def _sync(self, of_block=False) -> None:
        self._step.append("__syncthreads();" if of_block or self._layout.team > 32 else "__syncwarp();")
        self._dirty = set(), set()

    def _reads(self, keys) -> None:
        if keys and (self._dirty is None or self._dirty[0] & set(keys)):
            self._sync()
        if keys:
            self._dirty[1].update(keys)

    def _writes(self, keys) -> None:
        if keys and (self._dirty is None or self._dirty[1] & set(keys)):
            self._sync()
        if keys:
            self._dirty[0].update(keys)

    # ---- leaves

    def _leaf(self, leaf, own, mate=False) -> tuple:
        """(the text of a leaf, the keys of the shared memory that it reads).

        own: the index whose elements a thread owns. mate: of the lane `mate_lane` of the block, with shared memory at `mate`.
        """
        v, names = leaf
        if not isinstance(names, tuple):
            if mate and names is not None and not isinstance(names, str):
                return f"static_cast<int>({self._lane_offset(merged_places([names], self._p.dims), 'mate_lane')})", ()
            return (names if isinstance(names, str) else "0" if names is None else f"place{self._place_of(names)}"), ()
        n, type_ = self._id(v), self._type(v)
        area = "mate" if mate else None
        if not names:
            return (self._shared(v, type_, 0, area), (v,)) if mate else (f"v{n}", ())
        if len(names) == 1:
            if names[0] == own and not mate:
                return f"v{n}[k]", ()
            return self._shared(v, type_, names[0], area), (v,)
        if v in self._globals:
            k, array, steps = self._globals[v]
            pointer = f"({self._pointer(k, array, 'mate_lane')}{steps})" if mate else f"g{n}"
            return f"Wide<{cpp_type(v.dtype)}>({pointer}[{self._offset(array, names)}])", ()
        flips = f" + flip * {self._flips[v]}" if v in self._flips else ""
        return self._shared(v, type_, self._padded(self._p.sizes(v), names), area, flips), (v,)

    def _leaves(self, nest, own, mate=False, known=None):
        known = known or {}
        found = [(known[leaf[0]], ()) if leaf[0] in known else self._leaf(leaf, own, mate) for leaf in nest.leaves]
        return [text for text, _ in found], [key for _, keys in found for key in keys]

    def _place_of(self, dim) -> int:
        return self._dims.index(dim)


def padded_strides(sizes) -> list:
    strides = [1]
    for k, n in enumerate(reversed(sizes[1:])):
        strides.append(strides[-1] * (n | 1 if k == 0 else n))
    return strides[::-1]


def padded_count(sizes) -> int:
    return padded_strides(sizes)[0] * sizes[0]


def merged_places(dims, lanes) -> list:
    """The index map of the place of a lane along some dimensions, in order."""
    strides, stride = {}, 1
    for d in reversed(lanes):
        if d in dims:
            strides[d], stride = stride, stride * d.size
    return merged((d.size, strides.get(d, 0)) for d in reversed(lanes))


def owned(nest) -> str | None:
    """The index of a nest whose elements a thread owns."""
    if nest.over and not nest.out:
        return "r0"
    return "o0" if len(nest.out) == 1 else None


def neutral(kind, type_, dtype, chooses=False) -> str:
    """The value that a reduction begins with. chooses: whether it is a sum that chooses an element, as indexing.py writes it."""
    if kind in ("max", "min") and jnp.issubdtype(dtype, jnp.floating):
        return f"{'-' if kind == 'max' else ''}lax::infinity<{type_}>()"
    if kind in ("max", "min"):
        if type_ == "bool":
            return "false" if kind == "max" else "true"
        return f"lax::k{'Lowest' if kind == 'max' else 'Highest'}<{type_}>"
    if kind == "and":
        return "true" if type_ == "bool" else f"{type_}(~{type_}(0))"
    if chooses and kind == "add" and jnp.issubdtype(dtype, jnp.floating):
        return f"-{type_}(0)"  # a chosen -0.0 keeps its sign. Other sums of -0.0 are 0, as XLA's
    return f"{type_}({int(kind == 'mul')})"
