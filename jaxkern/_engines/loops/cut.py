"""Loops that are cut in time: the struct that row_scan.cuh and column_scan.cuh take for an affine body, and its launches.

maps = Maps(core)                                   the functors of the maps of a body
plan(device, maps, "columns", lanes, length, ...)   a launch.Plan

columns    a block takes some lanes. Its threads share their steps, and so do blocks if there are many steps
rows       the steps of a lane are adjacent. A warp or a block takes a lane, or blocks share one
"""

import functools
import typing

import numpy as np

from jaxkern._core import define, functor, launch
from jaxkern._core.cpp import cpp_type
from jaxkern._core.define import ceil_div
from jaxkern._core.jaxprs import computing
from jaxkern._core.launch import Launch, Memset, Plan, i64, struct
from jaxkern._engines.loops import pairs, tuning
from jaxkern._engines.loops.affine import MOST_COUPLED, affine
from jaxkern._engines.loops.generate import INDEX, SAME
from jaxkern._engines.loops.plan_associative import slots, staged_steps

_SHARED = 48 * 1024  # bytes of static shared memory


def _affine(body, num_consts, stored, num_xs, most=MOST_COUPLED):
    """The Affine of a body whose maps have numbers, and no counters; or None."""
    found = affine(body, num_consts, stored, num_xs, most) if stored else None
    return found if found is not None and found.dtypes and not found.counters else None


class _OfParts:
    """The Affine of a body whose complex numbers are apart, with the functions of one whose numbers are not."""

    def __init__(self, loop, stored):
        self._loop, self.dtypes, self.combine = loop, loop.dtypes, loop.combine
        self._carries = [computing(d) for d in stored]

    def element(self, consts, xs, places) -> list:
        return self._loop.element(pairs.split(consts), pairs.split(xs), places)

    def apply(self, state, carries) -> list:
        return pairs.joined(self._loop.apply(state, pairs.split(carries)), self._carries)


class Maps:
    """The maps of a Core's body as functors.

    loop: the Affine of the body, or what has its functions; None if it is not affine.
    numbers: the dtypes of a map, with complex numbers as pairs; () if the body is not affine.

    A body may be affine in the parts of complex carries only: gradients take real parts.
    """

    def __init__(self, core):
        self.core = core
        stored = [a.dtype for a in core.carries]
        body = core.body or core.function.closed
        self.loop = _affine(body, len(core.consts), stored, len(core.xs))
        if self.loop is None and any(map(pairs.is_complex, stored)):
            given = [v.aval.dtype for v in body.jaxpr.invars]
            first = len(core.consts) + len(stored)
            consts, xs = (len(pairs.real_types(d)) for d in (given[: len(core.consts)], given[first:][: len(core.xs)]))
            real = _affine(pairs.apart(body), consts, pairs.real_types(stored), xs, 2 * MOST_COUPLED)
            self.loop = real and _OfParts(real, stored)
        self.numbers = ()
        if self.loop is not None:
            self.numbers = tuple(pairs.real_types(self.loop.dtypes))

    @property
    def words(self) -> int:
        """The number of 32-bit words that the numbers of a map take in a block's shared memory."""
        fields = [(f"n{k}", d) for k, d in enumerate(self.numbers)]
        return ceil_div(np.dtype(fields, align=True).itemsize, 4)

    @functools.cached_property
    def functions(self) -> dict:
        """{name in associative.cuh: Function}."""
        core, loop, numbers = self.core, self.loop, self.numbers
        operand = lambda k: computing(core.program.operands[k].dtype)
        consts, xs = [operand(k) for k in core.consts], [operand(k) for k in core.xs]
        carries, n = [computing(a.dtype) for a in core.carries], len(numbers)
        first, last = len(consts) + len(carries), len(consts) + len(carries) + len(xs)
        state = lambda parts: pairs.joined(parts, loop.dtypes)

        def make(f, takes, gives):
            return functor.of_scalars(pairs.expanded(f, takes), takes, gives, core.program.label, False)

        element = lambda *a: pairs.split(loop.element(a[: len(consts)], a[first:last], a[last:]))
        combine = lambda *ab: pairs.split(loop.combine(state(ab[:n]), state(ab[n:])))
        apply = lambda *sc: loop.apply(state(sc[:n]), sc[n:])
        return {
            "Element": make(element, (*consts, *carries, *xs, *[INDEX] * len(core.indices)), numbers),
            "Combine": make(combine, numbers * 2, numbers),
            "Apply": make(apply, (*numbers, *carries), carries),
        }

    @property
    def size(self) -> int:
        """Statements of a step."""
        return self.core.function.size + sum(f.size for f in self.functions.values())

    def source(self, name, lanes):
        """The struct of `Core.source`, with the members that associative.cuh needs."""
        text, maps = self.core.source(f"{name}Loop", lanes)
        text += "".join(f.source(f"{name}{k}") for k, f in self.functions.items())
        lines = [f"  using {k} = {name}{k};" for k in self.functions]
        lines.append(f"  using States = Types<{', '.join(map(cpp_type, self.numbers))}>;")
        lines.append("  static constexpr int kStart = kGiven;\n  static constexpr bool kLast = true;")
        return text + "\n".join([f"struct {name} : {name}Loop {{", *lines, "};"]) + "\n", maps


class Layout(typing.NamedTuple):
    """pack: lanes of a thread. lanes, parts: threads of a block. items: steps of a thread. resident: blocks of a
    multiprocessor, for which registers must be enough. over: the parameter kOver of the kernels."""

    pack: int
    lanes: int
    parts: int
    items: int
    resident: int
    over: str
    staged: int = 0  # bytes of dynamic shared memory, if elements of a tile are kept there

    @property
    def tile(self) -> int:
        """Steps of a block at a time."""
        return self.parts * self.items


class RowLayout(typing.NamedTuple):
    """pack: steps of a vector. items: steps of a thread. lanes: threads of a warp that share a lane. threads: of a block."""

    pack: int
    items: int
    lanes: int
    threads: int
    resident: int
    over: str

    @property
    def tile(self) -> int:
        """Steps of a lane at a time."""
        return self.items * (self.lanes if self.over == "kOverWarp" else self.threads)


def _sizes(maps):
    """(bytes of the largest element, f, steps of a thread, blocks of a multiprocessor).

    f(lanes): registers that a thread loads in a step.
    """
    core = maps.core
    operands = [core.program.operands[k] for k in core.xs]
    xs = [v.dtype.itemsize for v in operands]
    words = lambda pack: sum(ceil_div(pack * n, 4) for n in xs)
    items = tuning.CUT_ITEMS
    while items > 4 and (items * words(1) > tuning.CUT_WORDS or items * maps.size > tuning.BODY):
        items //= 2
    resident = tuning.CUT_RESIDENT if maps.words < tuning.MANY_NUMBERS else tuning.CUT_RESIDENT - 1
    of_lanes = [v.dtype.itemsize for v in operands if v.set()]  # numbers of a step are loaded one by one
    return max([1, *of_lanes, *(a.dtype.itemsize for a in core.ys)]), words, items, resident


def _loaded(core, pack) -> int:
    """Bytes of what a thread loads in a step: `Loaded` of column_scan.cuh."""
    xs = map(core.operand, core.xs)
    sizes = [max(4, a.dtype.itemsize * (1 if core.kind(a, pack) == SAME else pack)) for a in xs]
    end = 0
    for size in (*sizes, max(sizes)):
        end = ceil_div(end, size) * size + size
    return end - max(sizes)


def row_layout(device, maps, lanes, length, vectors) -> RowLayout:
    """vectors: the arrays are aligned to 16 bytes."""
    itemsize, _, items, resident = _sizes(maps)
    pack = tuning.VECTOR_BYTES // itemsize if vectors else 1
    items = max(pack, min(items, tuning.CUT_ROW_BYTES // itemsize))
    while length % pack:
        pack //= 2
    across, threads, over = 32, tuning.CUT_THREADS, "kOverTiles"
    if length <= 32 * items:
        over, across = "kOverWarp", min(32, 1 << (ceil_div(length, items) - 1).bit_length())
    elif lanes >= tuning.ROW_BLOCKS * device.sm_count or length <= threads * items:
        over = "kOverBlock"
        while threads > tuning.FEW_THREADS and threads * items >= 2 * length:
            threads //= 2
    return RowLayout(pack, items, across, threads, max(1, resident * tuning.CUT_THREADS // threads), over)


def column_layout(device, maps, lanes, length, vectors) -> Layout:
    """vectors: the arrays are aligned to 16 bytes."""
    itemsize, words, items, resident = _sizes(maps)
    across = min(32, 1 << (lanes - 1).bit_length())
    parts_of = lambda across: min(tuning.CUT_THREADS // across, tuning.CUT_PARTS)
    shared = lambda across: across * (2 * parts_of(across) + 2 * tuning.COLUMN_RADIX + 1) * 4 * maps.words
    while shared(across) > _SHARED:  # `Shared` of ColumnScan
        across //= 2
    parts, pack = parts_of(across), max(1, tuning.COLUMN_BYTES // itemsize) if vectors else 1
    few = lambda pack: lanes * ceil_div(length, parts * items) < tuning.CUT_BLOCKS * device.sm_count * across * pack
    held = lambda pack: items * words(pack) > tuning.CUT_WORDS or pack * maps.words > tuning.CUT_NUMBERS
    while pack > 1 and (lanes % pack or few(pack) or held(pack) or pack * items * maps.size > tuning.BODY):
        pack //= 2
    if words(1):
        each = across * parts * _loaded(maps.core, pack)
        blocks = tuning.STAGED_COLUMNS - (maps.words >= tuning.MANY_NUMBERS)
        steps = staged_steps(pack * shared(across), each, parts, ceil_div(lanes, across * pack), length, device, blocks)
        if length > parts * steps and steps >= items:
            return Layout(pack, across, parts, steps, blocks, "kOverTiles", steps * each)
    return Layout(pack, across, parts, items, resident, "kOverTiles" if length > parts * items else "kOverBlock")


def plan(device, maps, algorithm, lanes, length, reverse, name, arguments):
    """The Plan of a loop that is cut; None if arrays have too many dimensions.

    arguments(groups of each index map): `LoopEngine::Args` of loops.cuh.
    """

    def launches(vectors):
        rows = algorithm == "rows"
        cut = (row_layout if rows else column_layout)(device, maps, lanes, length, vectors)
        source, groups = maps.source(name, 1 if rows else cut.pack)
        if any(len(g) > define.MAP_RANK for g in groups):
            return None
        tiles = ceil_div(length, cut.tile)
        if rows:
            kernel, threads, radix = "Row", cut.threads, tuning.ROW_RADIX
            sizes = cut.pack, cut.items, cut.lanes, threads
            blocks, states = ceil_div(lanes, threads // cut.lanes) if cut.over == "kOverWarp" else lanes, lanes
        else:
            kernel, threads, radix = "Column", cut.lanes * cut.parts, tuning.COLUMN_RADIX
            sizes = cut.pack, cut.lanes, cut.parts, cut.items
            blocks = ceil_div(lanes, cut.lanes * cut.pack)
            states = blocks * cut.lanes * cut.pack
        shared = cut.over == "kOverTiles"
        room = 0 if rows else cut.staged
        staged, backwards = str(room > 0).lower(), str(bool(reverse)).lower()
        values = ", ".join(map(str, (*sizes, cut.resident, radix, staged, cut.over, backwards)))
        scratch = 8 * maps.words * states * slots(tiles, radix, rows) if shared else 0
        args = struct(arguments(groups), launch.scratch() if scratch else launch.null, i64(tiles))
        step = Launch(
            f"loops/{kernel.lower()}_scan.cuh",
            f"{kernel}ScanKernel<{name}, {values}>",
            [args],
            blocks * (tiles if shared else 1),
            threads,
            source=source,
            shared=room,
        )
        return ((Memset(launch.scratch(), scratch), step) if scratch else (step,)), scratch

    aligned, any_address = launches(True), launches(False)
    if aligned is None or any_address is None:
        return None
    if aligned == any_address:
        return Plan(algorithm, *aligned)
    return Plan(algorithm, aligned[0], max(aligned[1], any_address[1]), any_address[0])
