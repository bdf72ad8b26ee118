"""Scans of arrays that are split over several devices.

Where lanes are split, every device runs the loop of its own lanes and sends nothing, except sums over lanes. Where the steps are
split and the body is affine in its carries (affine.py), every device composes the maps of its own steps, all devices gather these
maps, and each runs its steps from the carries before them: a map for each lane is all that is sent. For other bodies, lanes are split in
place of the steps, or the steps are gathered. The part of a device is JAX's scan under vmap, from the scalar functions of the kernel.
On CUDA its lowering rule makes a kernel of it. Bodies that reduce along rows are in row_sharding.py.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Primitive

from jaxkern._core import compat, partition
from jaxkern._core.cpp import Unsupported
from jaxkern._core.jaxprs import computing
from jaxkern._engines.loops import row_sharding
from jaxkern._engines.loops.cut import Maps
from jaxkern._engines.loops.generate import Core
from jaxkern._engines.loops.program import Program
from jaxkern._engines.loops.row_program import RowProgram

STEPS = "steps"

# The whole scan, as XLA sees it before it is partitioned. results: types. loop: its text, for caches.
_whole_p = Primitive("jaxkern_scan_lanes")
_whole_p.multiple_results = True
_whole_p.def_abstract_eval(lambda *_, results, loop: list(results))


def lower(ctx, operands, params, mark, label):
    """The results of a scan on several devices, or None where XLA partitions it. mark(tree): of carries and ys for kernels."""
    avals = [*ctx.avals_in, *ctx.avals_out]
    if not params["length"] or not all(isinstance(n, int) and n for a in avals for n in a.shape):
        return None
    closed, (num_consts, num_carry) = params["jaxpr"], compat.counts_of_scan(params)
    jaxpr, consts = (closed.jaxpr, closed.consts) if isinstance(closed, ClosedJaxpr) else (closed, ())
    program, core = _read(jaxpr, consts, num_consts, num_carry, label)
    if program is None or program.captured:
        return None
    maps = None if core is None else Maps(core).loop
    first_x = num_consts + num_carry
    lanes = {d: f"d{k}" for k, d in enumerate(program.dims)}

    def named(k, v, of_steps):
        dims = [lanes.get(d and d.same()) or f"own{k}x{j}" for j, d in enumerate(v.dims)]
        return [STEPS] * of_steps + dims

    dims = [named(k, v, k >= first_x) for k, v in enumerate(program.given)]
    dims += dims[num_consts:first_x]
    dims += [named(len(dims) + k, v, True) for k, v in enumerate(program.returned[num_carry:])]
    results = tuple(jax.core.ShapedArray(a.shape, a.dtype) for a in map(compat.physical, ctx.avals_out))
    every = {name for names in dims for name in names}
    sums = program.accumulators | program.sums
    terms = sums.values() if core is None else (_terms(core, k) for k in sums)
    summed = {lanes[d] for own in terms for d in own if d is not None}
    unread = set(lanes.values()).difference(*dims[: len(operands)])  # only results have them
    exact = summed | {lanes[d] for d in (program if core is None else core).indices} | unread | {STEPS}
    whole = every.difference(lanes.values(), {STEPS}) | {lanes[d.same()] for d in program.segments if d.same() in lanes}
    whole |= set() if maps is not None and core.xs else {STEPS}
    gone = {STEPS, *lanes.values()}.intersection(every).difference(*dims[len(operands) :])
    inner = ctx.replace(avals_in=list(map(compat.physical, ctx.avals_in)), avals_out=list(results))
    given = {"results": results, "loop": f"{params['length']} {params['reverse']}\n{jaxpr}"}

    def shard(over, *parts, results, loop):
        del loop
        axes = {d: tuple(over.get(name, ())) for d, name in lanes.items()}
        if core is None:
            return row_sharding.Part(program, axes, parts, params["length"]).run(params["reverse"], mark, results)
        return _Part(core, axes, parts, params["length"]).run(
            maps, tuple(over.get(STEPS, ())), params["reverse"], mark, results
        )

    return partition.lower(inner, _whole_p, operands, given, dims, shard, exact=exact, summed=tuple(gone), whole=whole)


def _read(*given):
    """(Program, Core) of a body, (RowProgram, None) if it reduces along rows, or (None, None)."""
    try:
        program = Program(*given)
        return program, Core(program)
    except Unsupported:
        with contextlib.suppress(Unsupported):
            return RowProgram(*given), None
        return None, None


def _terms(core, k) -> tuple:
    """The dimensions of a result as a kernel writes it: an accumulator has a lane for each of its terms."""
    return [*core.carries, *core.ys][k].dims


class _Part:
    """The part of a device. axes: {dimension of the lanes: the axes of the mesh that split it}. parts: of the operands.
    length: of the whole loop."""

    def __init__(self, core, axes, parts, length):
        self.core, self.axes, self.program = core, axes, core.program
        program = self.program
        self.operands = program.split(parts)
        self.size = {d: d.size // (lax.axis_size(axes[d]) if axes[d] else 1) for d in program.dims}
        first_x = program.num_consts + program.num_carry
        for k, (v, x) in enumerate(zip(program.operands, self.operands)):
            self.size.update({d: n for d, n in zip(v.dims, x.shape[k >= first_x :]) if d is not None})
        wide = lambda x: x.astype(computing(x.dtype))
        in_order = lambda k: self._in_order(self.operands[k], program.operands[k].dims, k >= first_x)
        self.consts = [(wide(in_order(k)), program.operands[k].dims) for k in core.consts]
        self.xs = [in_order(k) for k in core.xs]
        self.dims_of_xs = [program.operands[k].dims for k in core.xs]
        self.length = self.xs[0].shape[0] if self.xs else length
        self.places = []
        for d in core.indices:
            self.places.append((self._begin(d) + jnp.arange(self.size[d], dtype=np.int32), (d,)))
        self.dims = [a.dims for a in (*core.carries, *core.ys)]

    def run(self, maps, over, reverse, mark, results) -> list:
        """The results of the scan. over: the axes of the mesh that split the steps. results: types, on all devices together."""
        program, core = self.program, self.core
        count, dtypes = len(core.carries), [a.dtype for a in (*core.carries, *core.ys)]
        consts, dims_of_consts = _apart(self.consts)
        places, dims_of_places = _apart(self.places)
        f = self._over_lanes(
            core.function.scalars, (*dims_of_consts, *self.dims[:count], *self.dims_of_xs, *dims_of_places), self.dims
        )
        wide = lambda xs: [x.astype(computing(x.dtype)) for x in xs]

        def body(carries, xs):
            ys = f(*consts, *wide(carries), *wide(xs), *places)
            ys = mark([y.astype(d) for y, d in zip(ys, dtypes)])
            return ys[:count], ys[count:]

        first = self._first()
        if over:
            first = self._behind_others(
                maps, first, over, reverse, mark, (consts, dims_of_consts), (places, dims_of_places)
            )
        carries, ys = lax.scan(body, mark(first), self.xs, self.length, reverse)
        if over:
            at, n = lax.axis_index(over), lax.axis_size(over)
            is_last = at == (0 if reverse else n - 1)
            carries = lax.psum([jnp.where(is_last, c, jnp.zeros_like(c)) for c in carries], over)
        types = program.parts_of(results)
        return program.join(
            [self._finished(k, y, a) for k, (y, a) in enumerate(zip([*carries, *ys], types, strict=True))]
        )

    def _first(self) -> list:
        """The first carries. An accumulator starts with 0, or in one lane."""
        program, found = self.program, []
        for k, a in enumerate(self.core.carries):
            at = program.num_consts + k
            own = program.operands[at].dims
            if k in program.zeros:
                found.append(jnp.zeros([self.size[d] for d in a.dims], a.dtype))
                continue
            x = self._in_order(self.operands[at], own, False)
            if k in program.linear:  # the first lane of all devices has it
                x = jnp.expand_dims(x, [axis for axis, d in enumerate(a.dims) if d not in own]).astype(a.dtype)
                for axis, d in enumerate(a.dims):
                    if d not in own:
                        place = lax.broadcasted_iota(np.int32, [self.size[d] if e is d else 1 for e in a.dims], axis)
                        first = self._begin(d) + place == 0
                        x = jnp.where(first, x, jnp.zeros_like(x))
            found.append(x)
        return found

    def _begin(self, d):
        """Where the lanes of this device begin along a dimension."""
        return lax.axis_index(self.axes[d]) * self.size[d] if self.axes[d] else 0

    def _behind_others(self, maps, first, over, reverse, mark, consts, places) -> list:
        """The carries before the steps of this device."""
        lanes, count = self.program.dims, len(first)
        size = [self.size[d] for d in lanes]
        every = lambda n: [lanes] * n
        (consts, dims_of_consts), (places, dims_of_places) = consts, places
        nc, nx, n = len(consts), len(self.xs), len(maps.dtypes)
        element = self._over_lanes(
            lambda *a: maps.element(a[:nc], a[nc : nc + nx], a[nc + nx :]),
            (*dims_of_consts, *self.dims_of_xs, *dims_of_places),
            every(n),
        )
        combine = self._over_lanes(lambda *ab: maps.combine(ab[:n], ab[n:]), every(2 * n), every(n))
        apply = self._over_lanes(lambda *sc: maps.apply(sc[:n], sc[n:]), every(n + count), every(count))
        whole = lambda xs: [jnp.broadcast_to(x, size) for x in xs]
        of_step = lambda xs: whole(element(*consts, *(x.astype(computing(x.dtype)) for x in xs), *places))
        edge = slice(-1, None) if reverse else slice(0, 1)
        rest = slice(0, -1) if reverse else slice(1, None)
        own, _ = lax.scan(
            lambda state, xs: (mark(whole(combine(*state, *of_step(xs)))), None),
            mark(of_step([x[edge][0] for x in self.xs])),
            [x[rest] for x in self.xs],
            self.length - 1,
            reverse,
        )
        gathered = lax.all_gather(own, over)
        at = lax.axis_index(over)

        def join(carries, given):
            device, state = given
            earlier = device > at if reverse else device < at
            return mark([jnp.where(earlier, a, b) for a, b in zip(apply(*state, *carries), carries)]), None

        wide = [self._spread(c.astype(computing(c.dtype)), d) for c, d in zip(first, self.dims)]
        devices = jnp.arange(lax.axis_size(over))
        wide, _ = lax.scan(join, mark(wide), (devices, gathered), reverse=reverse)
        found = []
        for c, dims, narrow in zip(wide, self.dims, first):
            index = tuple(slice(None) if d in dims else 0 for d in lanes)
            found.append(c[index].astype(narrow.dtype))
        return found

    def _finished(self, k, y, aval):
        """A result of the scan from what the loop made: sums over lanes are taken, and dimensions are put in order.

        aval: its type on all devices together.
        """
        program, step = self.program, int(k >= len(self.core.carries))
        v, lanes = program.results[k], [d for d in program.dims if d in self.dims[k]]
        if k in program.accumulators or k in program.sums:
            gone = [d for d in lanes if d not in v.dims]
            y = jnp.sum(y, [step + lanes.index(d) for d in gone])
            axes = tuple(a for d in gone for a in self.axes[d])
            y = lax.psum(y, axes) if axes else y
            lanes = [d for d in lanes if d in v.dims]
        present = [d for d in v.dims if d is not None]
        y = jnp.transpose(y, [*range(step), *(step + lanes.index(d) for d in present)])
        sizes = iter(y.shape[step:])
        y = y.reshape([*y.shape[:step], *(1 if n == 1 else next(sizes) for n in aval.shape[step:])])
        if k in program.zeros:
            y = self.operands[program.num_consts + k] + y
        return y.astype(aval.dtype)

    def _in_order(self, x, dims, of_steps):
        """The array with its dimensions in the order of the lanes, behind the dimension of steps."""
        step = int(of_steps)
        x = lax.squeeze(x, [step + a for a, d in enumerate(dims) if d is None])
        present = [d for d in dims if d is not None]
        return jnp.transpose(x, [*range(step), *(step + present.index(d) for d in self.program.dims if d in present)])

    def _spread(self, x, dims):
        """The array with all lanes."""
        lanes = self.program.dims
        x = jnp.expand_dims(x, [a for a, d in enumerate(lanes) if d not in dims])
        return jnp.broadcast_to(x, [self.size[d] for d in lanes])

    def _over_lanes(self, f, given, returned):
        """f, a function of scalars, of arrays with these dimensions."""
        for d in reversed(self.program.dims):
            along = [[0 if d in dims else None for dims in group] for group in (given, returned)]
            f = jax.vmap(f, along[0], along[1], axis_size=self.size[d])
        return f


def _apart(pairs):
    return [x for x, _ in pairs], [dims for _, dims in pairs]
