"""Regions of rows that read a slice of an array, as regions that read the whole array.

A loss of `logits[:, :-1]` leaves out the last of T rows of each sequence. XLA reads such a slice where it lies, but a kernel needs its
operand in memory: the slice would be copied in front of it, and the zeros that the slice's gradient is padded with would be a copy
behind it. So the region is computed for all rows instead: the slice is left out, arrays that the region reads beside it get a row of
zeros for each row that was left out, and such rows of the results are dropped. Where a result is padded with zeros to the size of the
whole array, the region writes the whole array, with zeros in these rows whatever it computes there, and the padding is left out.

The rows in question lie along another dimension than the row, and are cut out of it by unit strides. Nothing but a sum goes over
them: it takes zeros there. Here is what a slice and a padding are; lifting.py computes the region for all rows.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxkern._accelerate.equations import RENAMING, is_variable, size_of
from jaxkern._core import compat_rewriting

MOST_CHAINED = 32  # equations between a slice and the region, or between the region and a padding


@dataclasses.dataclass(frozen=True)
class Cut:
    """Which part of a whole array's elements a slice keeps, in row-major order.

    The whole array has the shape (outer, whole, inner); the slice keeps (outer, size, inner) of it, from `start` on.
    """

    outer: int
    whole: int
    inner: int
    start: int
    size: int

    def of_axis(self, shape, row):
        """(axis, repeats, inner) of a region with this shape and rows along the axis `row`: its axis that the slice shortens has
        repeats * size * inner elements. None if there is no such axis, or if it is the row.
        """
        for axis, n in enumerate(shape):
            before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
            if self.outer % before or self.inner % after or n == 1:
                continue
            repeats, inner = self.outer // before, self.inner // after
            if n == repeats * self.size * inner:
                return None if axis == row else (axis, repeats, inner)
        return None


@dataclasses.dataclass(frozen=True)
class Rows:
    """The axis of a region's arrays that a cut shortens: it has repeats * size * inner elements. See `Cut.of_axis`."""

    cut: Cut
    repeats: int
    inner: int

    def longer(self, shape, axis):
        n = self.repeats * self.cut.whole * self.inner
        return tuple(n if k == axis else size for k, size in enumerate(shape))

    def _parts(self, shape, axis, size):
        """(shape, axis of it) in which the rows that the cut keeps are a span of an axis."""
        if self.repeats * self.inner == 1:
            return shape, axis
        return (*shape[:axis], self.repeats, size, self.inner, *shape[axis + 1 :]), axis + 1

    def extended(self, x, axis, fill=0):
        """x with a number, 0 by default, along an axis, in the rows that the cut leaves out."""
        cut, (shape, at) = self.cut, self._parts(x.shape, axis, self.cut.size)
        config = [(0, 0, 0)] * len(shape)
        config[at] = (cut.start, cut.whole - cut.start - cut.size, 0)
        y = lax.pad(lax.reshape(x, shape), np.asarray(fill, x.dtype), config)
        return lax.reshape(y, self.longer(x.shape, axis))

    def shortened(self, y, axis):
        """y without the rows that the cut leaves out."""
        cut, (shape, at) = self.cut, self._parts(y.shape, axis, self.cut.whole)
        kept = lax.slice_in_dim(lax.reshape(y, shape), cut.start, cut.start + cut.size, axis=at)
        n = self.repeats * cut.size * self.inner
        return lax.reshape(kept, (*y.shape[:axis], n, *y.shape[axis + 1 :]))

    def masked(self, y, axis):
        """y with zeros along an axis, in the rows that the cut leaves out."""
        cut = self.cut
        place = lax.broadcasted_iota(np.int32, [n if k == axis else 1 for k, n in enumerate(y.shape)], axis)
        if self.inner > 1:
            place = lax.div(place, np.int32(self.inner))
        if self.repeats > 1:
            place = lax.rem(place, np.int32(cut.whole))
        first, last = lax.ge(place, np.int32(cut.start)), lax.lt(place, np.int32(cut.start + cut.size))
        kept = last if not cut.start else first if cut.start + cut.size == cut.whole else lax.bitwise_and(first, last)
        kept = lax.broadcast_in_dim(kept, y.shape, range(y.ndim))
        return lax.select(kept, y, lax.broadcast(np.zeros((), y.dtype), y.shape))


def cuts_of(region, operands, made) -> list:
    """The cuts by which arrays of rows that a region reads were made, with the axis of the region that each shortens."""
    found = {}
    for v in operands:
        cut = source(v, made)[0] if region.is_row(v) else None
        along = cut and cut.of_axis(region.shape, region.axis)
        if along:
            found[cut] = along
    return list(found.items())


def source(v, made):
    """(cut, array, types): the slice that makes v, the array that it cuts, and the types that this is converted to, first to last.

    made: {value: the equation that makes it}. (None, v, []) if v is no slice.
    """
    cut, types, x, found = None, [], v, v
    for _ in range(MOST_CHAINED):
        e = made.get(x)
        if e is None:
            break
        name = e.primitive.name
        if name == "slice" and cut is None:
            cut = _cut(e.invars[0].aval.shape, e.params)
            if cut is None:
                return None, v, []
        elif name == "convert_element_type" and _is_wider(e.invars[0], e.outvars[0]):
            types.insert(0, e.params)
        elif not (name in RENAMING and size_of(e.invars[0]) == size_of(x) and _keeps_order(e)):
            break
        if not is_variable(e.invars[0]) or not compat_rewriting.runs_anywhere(e):
            break
        x = e.invars[0]
        found = found if name in RENAMING else x
    return (cut, found, types) if cut is not None else (None, v, [])


def _is_wider(x, y) -> bool:
    real = lambda v: jnp.issubdtype(v.aval.dtype, jnp.floating)
    return real(x) and real(y) and x.aval.dtype.itemsize < y.aval.dtype.itemsize


def _keeps_order(e) -> bool:
    """Whether an equation that gives an array another shape keeps the order of its elements."""
    if e.primitive.name == "broadcast_in_dim":
        dims = tuple(e.params["broadcast_dimensions"])
        return len(e.invars) == 1 and tuple(sorted(dims)) == dims
    return e.params.get("dimensions") is None or e.primitive.name != "reshape"


def _cut(shape, params):
    """The cut of a slice with unit strides that shortens one axis to several elements; None for others."""
    starts, limits, strides = params["start_indices"], params["limit_indices"], params["strides"]
    short = [k for k, n in enumerate(shape) if limits[k] - starts[k] != n]
    if len(short) != 1 or (strides is not None and set(strides) != {1}):
        return None
    (k,) = short
    return _cut_along(shape, k, starts[k], limits[k] - starts[k])


def _cut_along(shape, k, start, size):
    sizes = (math.prod(shape[:k]), shape[k], math.prod(shape[k + 1 :]), start, size)
    return Cut(*map(int, sizes)) if _are_numbers(sizes) and size > 1 else None


def _are_numbers(sizes) -> bool:
    """Whether none of these sizes is symbolic."""
    return all(isinstance(n, int | np.integer) for n in sizes)


def padding(v, cut, reader, made):
    """The equations that pad a value with zeros to the size of the whole array, and nothing else; None if there are none.

    reader, made: as for `lifted`.
    """
    chain, shape, pads = [], v.aval.shape, 0
    while len(chain) < MOST_CHAINED:
        e = reader(v)
        if e is None or not compat_rewriting.runs_anywhere(e):
            break
        name, (out,) = e.primitive.name, e.outvars
        if name == "pad" and not pads:
            config, zero = e.params["padding_config"], e.invars[1]
            at = [k for k, own in enumerate(config) if any(own)]
            if len(at) != 1 or not _is_zero(zero, made) or config[at[0]][2]:
                break
            (k,) = at
            low, high, _ = config[k]
            if not _are_numbers((shape[k], low, high)) or low < 0 or high < 0:
                break
            whole = int(shape[k] + low + high)
            if _cut_along((*shape[:k], whole, *shape[k + 1 :]), k, int(low), shape[k]) != cut:
                break
            pads = len(chain) + 1
        elif name == "convert_element_type" and _is_wider(out, e.invars[0]):
            pads += bool(pads)
        elif name in RENAMING and size_of(out) == size_of(v) and _keeps_order(e):
            pads += bool(pads)
        else:
            break
        chain.append(e)
        v, shape = out, out.aval.shape
    return chain[:pads] if pads else None


def _is_zero(v, made) -> bool:
    """Whether a number is known to be 0, and not -0."""
    if not is_variable(v):
        return str(float(v.val)) == "0.0"
    e = made.get(v)
    return e is not None and e.primitive.name in ("convert_element_type", *RENAMING) and _is_zero(e.invars[0], made)


def typed(aval, shape, dtype):
    """The type of an array where one of the type `aval` is."""
    whole = NamedSharding(aval.sharding.mesh, PartitionSpec(*(None for _ in shape)))
    return aval.update(shape=tuple(shape), dtype=np.dtype(dtype), weak_type=False, sharding=whole)


def traced(equations, like, f, *operands, into=None) -> list:
    """The results of f, a function in lax of these values; appends its equations, which have the line of `like`, to `equations`.

    into: the value that the result of f is.
    """
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        closed = jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in operands))
    jaxpr = closed.jaxpr
    names = dict(zip(jaxpr.invars, operands))
    read = lambda v: names.get(v, v) if is_variable(v) else v
    (result,) = jaxpr.outvars
    for e in jaxpr.eqns:
        for v in e.outvars:
            names[v] = compat_rewriting.new_variable(typed(operands[0].aval, v.aval.shape, v.aval.dtype))
        if into is not None and result in e.outvars:
            names[result] = into
        equations.append(
            e.replace(
                invars=list(map(read, e.invars)), outvars=list(map(read, e.outvars)), source_info=like.source_info
            )
        )
    return [read(result)]
