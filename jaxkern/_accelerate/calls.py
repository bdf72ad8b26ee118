"""Calls of kernels of selection in the place of equations: functions in jnp that `call_p` lowers where the equations stood.

A function is a NamedTuple, so that equal calls share what is lowered for them. Its results are the equation's, bit for bit.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxkern._accelerate import layout as layouts
from jaxkern._core import switch
from jaxkern._core.primitive import bind
from jaxkern._ops.select.count import count_p
from jaxkern._ops.select.elements import taken_along
from jaxkern._ops.select.sort_rows import CARRIED, sort_rows_p
from jaxkern._ops.select.top_k import top_k_p
from jaxkern.sorting import searchsorted


class Selected(typing.NamedTuple):
    """lax.top_k."""

    k: int
    axis: int

    def __call__(self, x):
        return [jnp.moveaxis(a, -1, self.axis) for a in bind(top_k_p, jnp.moveaxis(x, self.axis, -1), k=self.k)]


class Result(typing.NamedTuple):
    """A result of a sort. kind: VALUES of operand `at` in the order of the keys, which are operand 0; INDICES of the elements before
    they were sorted, or FLIPPED ones, which count from the end, both of this dtype."""

    kind: int
    at: int = 0
    dtype: typing.Any = None


VALUES, INDICES, FLIPPED = range(3)


class Sorted(typing.NamedTuple):
    """lax.sort of one key, or in descending order; or of its results the first `count` elements along the axis, or the last ones."""

    axis: int
    results: tuple
    descending: bool = False
    count: int | None = None
    last: bool = False

    def __call__(self, *operands):
        rows = [jnp.moveaxis(x, self.axis, -1) for x in operands]
        keys, width = rows[0], rows[0].shape[-1]
        others = {r for r in self.results if r != Result(VALUES)}
        at = self.carries([x.dtype for x in operands])
        carried = None if at is None else rows[at]
        if self.count is not None:
            values, indices = None, _ends(keys, self.count, self.last)
        else:
            wanted = ("values",) * (Result(VALUES) in self.results)
            wanted += ("indices",) * (carried is None and bool(others)) + ("carried",) * (carried is not None)
            found = dict(zip(wanted, bind(sort_rows_p, keys, carried, descending=self.descending, wanted=wanted)))
            values, indices, carried = map(found.get, ("values", "indices", "carried"))

        def result(r):
            if r.kind == VALUES:
                own = values if r.at == 0 else carried
                return taken_along(rows[r.at], indices, keys.ndim - 1) if own is None else own
            return (indices if r.kind == INDICES else width - 1 - indices).astype(r.dtype)

        return [jnp.moveaxis(result(r), -1, self.axis) for r in self.results]

    def carries(self, dtypes) -> int | None:
        """The operand that alone follows the keys, and can move with them; or None. dtypes: of the operands."""
        others = {r for r in self.results if r != Result(VALUES)}
        if self.count is not None or len(others) != 1:
            return None
        (r,) = others
        return r.at if r.kind == VALUES and dtypes[r.at].name in CARRIED else None


def _ends(keys, count, last):
    """The indices of the first or last elements of sorted rows, in sorted order."""
    bits = _ordered(keys)
    if not last:
        return bind(top_k_p, ~bits, k=count)[1]
    # Of equal elements the last ones come last.
    indices = bind(top_k_p, lax.rev(bits, (bits.ndim - 1,)), k=count)[1]
    return keys.shape[-1] - 1 - lax.rev(indices, (indices.ndim - 1,))


def _ordered(x):
    """Integers or booleans in the order in which lax.sort puts x: NaN is the greatest number, and -0 equals 0."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    x = jnp.where(jnp.isnan(x), jnp.nan, jnp.where(x == 0, 0, x)).astype(x.dtype)
    bits = lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


class Sliced(typing.NamedTuple):
    """lax.dynamic_slice at indices that are known."""

    starts: tuple
    sizes: tuple

    def __call__(self, x):
        return [lax.slice(x, self.starts, [at + n for at, n in zip(self.starts, self.sizes)])]


class Gathered(typing.NamedTuple):
    """lax.gather at indices that are known. params: of the equation, in pairs."""

    indices: tuple
    shape: tuple
    params: tuple

    def __call__(self, x):
        indices = np.asarray(self.indices, np.int32).reshape(self.shape)
        return [lax.gather_p.bind(x, jnp.asarray(indices), **dict(self.params))]


class Search(typing.NamedTuple):
    """jnp.searchsorted."""

    side: str
    dtype: typing.Any

    def __call__(self, array, x):
        return [searchsorted(array, x, self.side).astype(self.dtype)]


class Counted(typing.NamedTuple):
    """lax.scatter_add of the number `weight` at each index, in rows of one element."""

    layout: layouts.Layout
    clip: bool
    weight: int

    def __call__(self, operand, indices):
        x = layouts.canonical_operand(self.layout, operand)
        at, bins = layouts.canonical_indices(self.layout, indices, operand.shape, self.clip), x.shape[-1]
        if self.clip:
            at = jnp.clip(at, 0, min(bins - 1, jnp.iinfo(at.dtype).max))
        elif jnp.issubdtype(at.dtype, jnp.signedinteger):  # negative ones, which count nothing, become large
            wide = at.astype(jnp.int32) if at.dtype.itemsize < 4 else at
            at = lax.bitcast_convert_type(wide, f"uint{8 * wide.dtype.itemsize}")
        count = functools.partial(bind, count_p, bins=bins)
        for _ in self.layout.batch:
            count = jax.vmap(count)
        found = count(at).astype(x.dtype) * jnp.asarray(self.weight, x.dtype)
        return [layouts.original(self.layout, x + found, operand.shape)]


call_p = Primitive("jaxkern_call")
call_p.multiple_results = True


def _lower(ctx, *operands, function):
    return switch.own_code(mlir.lower_fun(function, multiple_results=True))(ctx, *operands)


mlir.register_lowering(call_p, _lower)
