"""Rows in plain JAX programs: regions of a jaxpr that JAX lowers become calls of the row engine.

JAX lowers each jaxpr of a program after derivatives and vmap: the program itself, the functions that it calls, branches, bodies
of loops, what is recomputed by `jax.checkpoint`, and each device's part of a `shard_map`. The pass inlines small calls, such as
those of `jax.nn.softmax`, finds regions (regions.py), and replaces a region where the model of costs says that one kernel is
faster (cost.py). Everything else is lowered as it is written.
"""

import dataclasses
import functools
import math
import typing

import jax

from jaxkern._accelerate import cost, cuts, inlining, last, lifting, memory, regions, siblings, tune
from jaxkern._accelerate.equations import FUSED, bytes_of, is_variable, only_names, size_of, variables
from jaxkern._accelerate.sequences import in_order, renamed, with_own_indices
from jaxkern._core import (
    algorithms,
    compat,
    compat_lowering,
    compat_rewriting,
    decisions,
    device,
    environment,
    switch,
)
from jaxkern._core.cpp import Unsupported
from jaxkern._engines.rows import plan as planning
from jaxkern._engines.rows.function import RowFunction
from jaxkern._engines.rows.primitive import PRIMITIVES

ROWS = "rows"
LABEL = "the region"
LEAST = 1 << 16  # elements of the arrays of a region; fewer take no longer than launches
SKINNY = 128  # rows or columns of an operand of a product, up to which it is as fast as the other operand is read
NEAR = 0.5  # of the kernel's time: a region for which XLA's estimate is shorter is not timed


def rewrite(module, jaxpr):
    """The jaxpr that JAX lowers in place of `jaxpr`."""
    settings = switch.current()
    if not switch.wanted(ROWS):
        return jaxpr
    ctx, known = compat_lowering.ModuleOnly(module), compat_lowering.of_module(module)
    seen, fused = known.setdefault("inlined for rows", {}), known.setdefault("operands that XLA may fuse with", {})
    if id(jaxpr) in seen or not (settings.force or "cuda" in compat_lowering.platforms(ctx) or decisions.listened()):
        return jaxpr
    inlining.note_calls(jaxpr, fused)
    least = 2 if settings.force else LEAST
    if (
        not (inlining.reduces(least, jaxpr) or siblings.possible(jaxpr.eqns))
        or algorithms.xla_forced()
        or environment.xla_only()
    ):
        return jaxpr
    why_not = refusal(ctx, settings)
    tunes = settings.tune and not (settings.force or why_not or compat_lowering.for_export(ctx))
    marks = None
    while True:
        equations, results, opened = inlining.inlined(jaxpr, seen, marks)
        equations, found = regions.find(equations, results, least)
        if siblings.possible(equations):
            found += siblings.find(equations, results, found, least)
        program = _Program(equations, results, found, {jaxpr.invars[k] for k in fused.get(id(jaxpr), (None, ()))[1]})
        taken = program.decided(settings, why_not, tunes)
        # Functions by name stay if no region needs a part of them: they may have kernels of their own.
        inside = {id(e) for region, _ in taken for e in region.equations}
        needed = {mark for mark, parts in opened.items() if any(id(e) in inside for e in parts)}
        if len(needed) == len(opened):
            break
        marks = needed
    taken = program.recorded(taken, why_not)
    return jaxpr.replace(eqns=program.with_kernels(taken), outvars=results) if taken else jaxpr


def refusal(ctx, settings) -> str:
    """Why no region of a module is taken."""
    if not settings.force and "cuda" not in (platforms := compat_lowering.platforms(ctx)):
        return switch.no_kernels(platforms[0])
    if compat.partitioned_devices(ctx) > 1:
        return "rows on several devices, outside of shard_map"
    return switch.refusal(ctx, settings)


# ---- decisions


class _Kernel(typing.NamedTuple):
    """A region as a row function of `operands`, and what the model says of it.

    shape: of its rows. moved: bytes that are moved beside it. problem: why there is no kernel. lifted: the region if it is computed for
    all rows of an array that a slice cuts; see lifting.py.
    """

    function: typing.Any
    operands: list
    results: list
    shape: tuple
    estimate: typing.Any = None
    moved: int = 0
    problem: str = ""
    lifted: lifting.Lifted | None = None


class _Program:
    """The equations of a jaxpr, its results, and the regions in it."""

    def __init__(self, equations, results, found, fused=frozenset()):
        """fused: operands of the program that XLA may compute where it reads them."""
        self.equations, self.results, self.regions, self.fused = equations, results, found, fused
        self.made = {v: e for e in equations for v in e.outvars}

    def decided(self, settings, refusal, tunes) -> list:
        """(region, kernel) of the regions that win. tunes: whether regions are timed."""
        self._connect()
        self._live = self._lives()
        self.kernels = {region: self._kernel(region, settings.force) for region in self.regions}
        if tunes:
            self._tune()
        wins = lambda kernel: not kernel.problem and not refusal and (settings.force or kernel.estimate.wins)
        taken = [(region, kernel) for region, kernel in self.kernels.items() if wins(kernel)]
        self._give(taken)
        return [(region, kernel) for region, kernel in self.kernels.items() if wins(kernel)]

    def _give(self, taken):
        """Estimates regions again that read numbers of rows from those that are taken: XLA would compute them in its one kernel."""
        given = {v for region, _ in taken for v in region.results if not region.is_row(v)}
        wins = {region for region, _ in taken}
        for region, kernel in self.kernels.items():
            reads = not kernel.problem and region not in wins and not given.isdisjoint(kernel.operands)
            if reads and not kernel.estimate.measured:
                estimate = _estimated(kernel.function, device.this_device(), given=True)[0]
                xla = {name: getattr(estimate, name) for name in ("xla", "xla_bytes", "kernels")}
                self.kernels[region] = kernel._replace(estimate=dataclasses.replace(kernel.estimate, **xla))

    def recorded(self, taken, refusal) -> list:
        """The same without regions that `explain` only lists; records all."""
        wins = {region for region, _ in taken}
        noted = {
            region: self._record(region, kernel, region in wins, refusal) for region, kernel in self.kernels.items()
        }
        return [(region, kernel) for region, kernel in taken if noted[region]]

    def _record(self, region, kernel, taken, refusal) -> bool:
        why = ": ".join(str(part) for part in (refusal, kernel.problem or kernel.estimate) if part)
        avals = [v.aval for v in kernel.operands if v.aval.shape == kernel.shape] or [v.aval for v in kernel.results]
        frames = functools.partial(compat.frames, region.named.source_info.traceback)
        size = kernel.estimate.kernel_bytes if kernel.estimate is not None else 0
        return decisions.record(ROWS, taken, why, avals, frames, size)

    def _connect(self):
        """Finds what regions read, and which of their results others read."""
        inside = {v for region in self.regions for v in region.made}
        self.readers: dict = {}
        self.outside: dict = {}  # as `made`, without what regions make: they may not write what they convert, say
        for e in self.equations:
            if not any(v in inside for v in e.outvars):
                self.outside.update(dict.fromkeys(e.outvars, e))
                for v in variables(e):
                    self.readers.setdefault(v, []).append(e)
        for region in self.regions:
            made = {v for e in region.equations for v in e.outvars}
            region.operands = list(dict.fromkeys(v for e in region.equations for v in variables(e) if v not in made))
        wanted = set(self.readers).union(filter(is_variable, self.results), *(r.operands for r in self.regions))
        for region in self.regions:
            own = [v for e in region.equations for v in e.outvars]
            region.results = [v for v in own if v in region.made and v in wanted]

    def _tune(self):
        """Puts times in place of the estimates of regions that may win."""
        # Alone, XLA makes one kernel of arrays that it makes apart where products read them.
        near = lambda region, k: region.reductions and not k.problem and k.estimate.xla >= NEAR * k.estimate.kernel
        found = {region: kernel for region, kernel in self.kernels.items() if near(region, kernel)}
        tune.prepare([kernel.function for kernel in found.values()])
        for region, kernel in found.items():
            estimate = tune.measured(kernel.function, _estimated(kernel.function, device.this_device())[0])
            self.kernels[region] = kernel._replace(estimate=estimate.beside(kernel.moved))

    def _kernel(self, region, force) -> _Kernel:
        """The kernel of a region, or of the region for all rows of an array that a slice cuts, if that takes less time."""
        needed, kept = set(region.results), []
        for e in reversed(region.equations):
            if not needed.isdisjoint(e.outvars):
                kept.append(e)
                needed.update(variables(e))
        kept.reverse()
        made = {v for e in kept for v in e.outvars}
        operands = list(dict.fromkeys(v for e in kept for v in variables(e) if v not in made))
        own = self._planned(region, kept, operands, region.results, region.shape, self._beside(region, operands))
        best = own
        whole = best.estimate is None or not region.reductions
        for cut, along in () if whole else cuts.cuts_of(region, operands, self.outside):
            lifted = lifting.lifted(region, kept, operands, cut, along, self.outside, self._reader)
            if lifted is None:
                continue
            moved = self._beside_lifted(region, lifted)
            found = self._planned(region, lifted.equations, lifted.operands, lifted.results, lifted.shape, moved)
            if found.problem:
                continue
            # XLA computes the rows that the program has, from what the kernel reads.
            least = min(own.estimate, found.estimate, key=lambda estimate: estimate.xla)
            xla = {name: getattr(least, name) for name in ("xla", "xla_bytes", "kernels")}
            found = found._replace(estimate=dataclasses.replace(found.estimate, **xla), lifted=lifted)
            if force or found.estimate.kernel < best.estimate.kernel:
                best = found
        stored = best.moved // 2  # it is written and read
        if not region.reductions:  # XLA stores its results one after the other
            stored += sum(map(bytes_of, best.results)) - max(map(bytes_of, best.results))
            stored -= sum(bytes_of(best.operands[k]) for k, _ in self._overwritten(region, best))
        more, most = self._live[region] + stored - self._live[None], self._live[None]
        if stored > 0 and not force and not best.problem and more > (memory.LARGER - 1) * most:
            return best._replace(problem=f"{best.estimate}; {memory.reason(more, most)}")
        return best

    def _overwritten(self, region, kernel) -> list:
        """(operand, result) pairs of rows that may share memory: operands that nothing reads after this kernel."""
        free = [k for k, v in enumerate(kernel.results) if v.aval.shape == kernel.shape]
        found: list = []
        for k, v in enumerate(kernel.operands if kernel.lifted is None else ()):
            fits = [j for j in free if kernel.results[j].aval.dtype == v.aval.dtype]
            if v.aval.shape == kernel.shape and fits and self._last.reads(v, region):
                found.append((k, fits[0]))
                free.remove(fits[0])
        return found

    @functools.cached_property
    def _last(self):
        return last.LastReads(self.equations, self.results, self.regions)

    def _planned(self, region, equations, operands, results, shape, moved) -> _Kernel:
        """A region of these equations, with rows of this shape. moved: bytes that are moved beside it."""
        found = _Kernel(None, operands, results, shape, moved=moved)
        row = next((k for k, v in enumerate([*operands, *results]) if v.aval.shape == shape), None)
        if row is None:
            return found._replace(problem="no array of rows is read or written")
        closed = compat_rewriting.closed_jaxpr(with_own_indices(equations), operands, results)
        function = RowFunction(closed, (row, region.axis), LABEL)
        estimate, problem = _estimated(function, device.this_device(), apart=not region.reductions)
        if problem:
            return found._replace(problem=problem)
        return found._replace(function=function, estimate=estimate.beside(moved))

    def _beside(self, region, operands) -> int:
        """Bytes that are moved since XLA cannot fuse a region with the equations that make its operands or read its results."""
        moved = 0
        for v in operands:
            if region.is_row(v) and self._is_computed(v):
                moved += 2 * bytes_of(v)
        for v in region.results:
            if region.is_row(v) and self._is_fused(v):
                moved += 2 * bytes_of(v)
        return moved

    def _beside_lifted(self, region, lifted) -> int:
        """The same for a region that is computed for all rows of an array that a slice cuts. What is made longer or cut is copied."""
        moved, numbers = 0, math.prod(lifted.shape) // lifted.shape[region.axis]
        for v in lifted.operands:
            if v in lifted.extended:
                moved += 2 * bytes_of(v) if size_of(v) > numbers else 0
            elif v.aval.shape == lifted.shape:
                own = next((e.invars[0] for e in lifted.before if v in e.outvars), v)
                moved += 2 * bytes_of(v) if self._is_computed(own) else 0
        for v in lifted.results:
            if v.aval.shape == lifted.shape:
                last = lifted.padded.get(v)
                moved += 2 * bytes_of(v) if last is None or self._is_fused(last) else 0
        return moved

    def _is_computed(self, v) -> bool:
        """Whether XLA computes an array where it is read, rather than store it."""
        return v in self.fused or (v in self.made and not self._is_stored(v))

    def _reader(self, v):
        """The only equation that reads a value, if no region contains it; None for others."""
        readers = self.readers.get(v, ())
        if len(readers) != 1 or v in self.results or any(v in region.operands for region in self.regions):
            return None
        (e,) = readers
        return e if sum(x is v for x in e.invars) == 1 and len(e.outvars) == 1 else None

    def _is_fused(self, v) -> bool:
        """Whether XLA computes an array in all that reads it, under whatever shape."""
        pending = [v]
        while pending:
            v = pending.pop()
            readers = self.readers.get(v, ())
            if not readers or v in self.results or not all(only_names(e) or _would_fuse(e, v) for e in readers):
                return False
            pending += [e.outvars[0] for e in readers if only_names(e)]
        return True

    def _lives(self) -> dict:
        """{region: bytes of the arrays that the plain program has while it computes the region, at most; None: the most of all}"""
        live = memory.Live(self.equations, self.results, _would_fuse, donated=False)
        found = {None: live.most}
        for region in self.regions:
            found[region] = max(live.during.get(id(e), 0) for e in region.equations)
        return found

    def _is_stored(self, v) -> bool:
        """Whether XLA stores an array that a region reads: what others than it and other regions read, or what it cannot fuse."""
        e = self.made[v]
        while (only_names(e) or e.primitive.name in ("convert_element_type", "copy")) and v not in self.results:
            (v,) = variables(e)[:1] or (None,)
            if v not in self.made:
                return v not in self.fused
            e = self.made[v]
        return e.primitive.name not in FUSED or any(v in region.made for region in self.regions)

    # ---- the program with kernels

    def with_kernels(self, taken) -> list:
        """The equations of the program, each behind those that make what it reads.

        What a region computes again it computes again too where it is left, unless the value is there.
        """
        inside = {v for region, _ in taken for v in region.made}
        inside.update(v for _, kernel in taken if kernel.lifted for v in kernel.lifted.gone)
        order = {id(e): k for k, e in enumerate(self.equations)}
        place = {v: k for k, e in enumerate(self.equations) for v in e.outvars}
        copied: dict = {}  # {equation of a region that is left, by its id: {value: its copy}}
        nodes, kernels = [], {region for region, _ in taken}
        for region in self.regions:
            if region in kernels:
                continue
            again: dict = {}
            for e in region.equations:
                (out,) = e.outvars
                if out in region.made:
                    copied[id(e)] = again
                elif out in inside:
                    again[out] = compat_rewriting.new_variable(out.aval)
                    nodes.append(renamed(e, again))
                    order[id(nodes[-1])] = order[id(e)]
        for e in self.equations:
            if not any(v in inside for v in e.outvars):
                again = copied.get(id(e))
                nodes.append(renamed(e, again) if again else e)
                order[id(nodes[-1])] = order[id(e)]
        for region, kernel in taken:
            like = region.named
            params = {"function": kernel.function.overwriting(self._overwritten(region, kernel))}
            call = compat_rewriting.new_equation(
                like, PRIMITIVES["row_kernel"].whole, kernel.operands, kernel.results, params
            )
            before, after = (kernel.lifted.before, kernel.lifted.after) if kernel.lifted else ((), ())
            for e in (*before, call, *after):
                order[id(e)] = max(place[v] for v in region.results)
                nodes.append(e)
        found = in_order(sorted(nodes, key=lambda e: order[id(e)]))
        if not any(kernel.lifted for _, kernel in taken):
            return found
        needed, used = set(filter(is_variable, self.results)), []  # without the slices that nothing reads any more
        for e in reversed(found):
            if e.effects or not needed.isdisjoint(e.outvars):
                needed.update(variables(e))
                used.append(e)
        return used[::-1]


def _would_fuse(e, v) -> bool:
    """Whether XLA would compute the array v where equation e reads it, in the order of elements that e wants.

    It does so in products of a matrix and a few vectors [Sinkhorn's gradient, float32 8192x8192 times 8192x64, H100].
    """
    if e.primitive.name != "dot_general":
        return e.primitive.name in FUSED
    contracted, batch = e.params["dimension_numbers"]
    for side, x in enumerate(e.invars):
        if x is v:
            other = e.invars[1 - side].aval
            if set(map(type, (*x.aval.shape, *other.shape))) - {int}:
                return False
            if not batch[side] and other.size <= SKINNY * math.prod(other.shape[d] for d in contracted[1 - side]):
                return True
            rest = [d for d in range(x.aval.ndim) if d not in batch[side]]
            own = sorted(contracted[side])
            ends = own in (rest[: len(own)], rest[len(rest) - len(own) :])
            if sorted(batch[side]) != list(range(len(batch[side]))) or not ends:
                return True  # a copy in another order
    return False


@functools.lru_cache(maxsize=1024)
def _estimated(function, gpu, given=False, apart=False):
    """(what the model says of a row function on a GPU, a `Device`, "") or (None, why there is no kernel). given, apart: see cost.py."""
    try:
        core = function.core
        outputs = [jax.core.ShapedArray(shape, dtype) for shape, dtype in planning.outputs(function)]
    except Unsupported as error:
        return None, str(error)
    if not outputs:
        return None, "nothing is computed"
    found = planning.plan(gpu, function.avals, outputs, function=function)
    if found is None:
        return None, f"no kernel for rows takes {len(function.avals)} arrays and returns {len(outputs)} like these"
    return cost.estimate(core, found, gpu, given, apart), ""
