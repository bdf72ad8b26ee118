"""Reads and writes at an index in a loop's body, as operations on all elements among which the index chooses.

    f = rewritten(equation, known)

To read x[i] among few elements, all elements of x are summed, with -0.0 in place of those that are not at i. To write x[i], every
element of x is kept or replaced, by a comparison of its place with i. In a kernel the elements are then variables of a lane, or a
row. If the index is a known number, as in `x.at[0].set(y)`, the array is sliced and concatenated instead, and may be long.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkern._engines.loops import rewrites

MOST = 64  # elements among which an index chooses: all are read
READS, WRITES = ("dynamic_slice", "gather"), ("dynamic_update_slice", "scatter", "scatter-add")


def applies(e) -> bool:
    """Whether a scatter applies a function to elements, as `x.at[i].apply(f)` does, and sets no update."""
    return e.primitive.name == "scatter" and e.params["update_jaxpr"] is not None


def _is_other(e) -> bool:
    """Whether an equation does what nothing here stands for. Keys are arrays of their words, which have more dimensions."""
    return applies(e) or rewrites.is_key(e.invars[0])


def may(e) -> bool:
    """Whether an equation of READS or WRITES may be rewritten, from its parameters and shapes."""
    name, shape = e.primitive.name, e.invars[0].aval.shape
    if _is_other(e):
        return False
    if name.startswith("dynamic"):
        return len(_moving(e)) < 2 or name == "dynamic_update_slice"
    if not all(isinstance(n, int) for v in e.invars for n in v.aval.shape):
        return False
    one = len(_axes(e)) == 1
    return one and (shape[_axes(e)[0]] <= MOST or name == "scatter" and e.invars[1].aval.shape == (1,))


def rewritten(e, known):
    """The function in jnp that stands for an equation; None if there is none. known: values of its operands, None if not known."""
    name, shape = e.primitive.name, e.invars[0].aval.shape
    if _is_other(e):  # in a loop of the body
        return None
    if name == "scatter" and known[1] is not None and e.invars[1].aval.shape == (1,) and len(_axes(e)) == 1:
        return _put_at(e, int(known[1][0]))
    if name in ("gather", "scatter", "scatter-add"):
        if not may(e) or shape[_axes(e)[0]] > MOST:
            return None
        return (_gather if name == "gather" else _scatter)(e)
    if name not in ("dynamic_slice", "dynamic_update_slice"):
        return None
    sizes = e.params["slice_sizes"] if name == "dynamic_slice" else e.invars[1].aval.shape
    starts, axes = known[len(known) - len(shape) :], _moving(e)
    if all(starts[a] is not None for a in axes):
        first = [min(max(int(starts[a]), 0), shape[a] - sizes[a]) if a in axes else 0 for a in range(len(shape))]
        if name == "dynamic_slice":
            return lambda x, *_: lax.slice(x, first, [a + n for a, n in zip(first, sizes)])
        return lambda x, u, *_: _put(x, u, first)
    if len(axes) != 1 or sizes[axes[0]] != 1 or shape[axes[0]] > MOST:
        return None
    (along,) = axes

    def is_at(start):
        place = lax.broadcasted_iota(np.int32, shape, along)
        return place == _within(_signed(start, shape[along]), shape[along]).astype(np.int32)

    if name == "dynamic_slice":
        return lambda x, *starts: jnp.expand_dims(_sum(is_at(starts[along]), x, along), along)
    return lambda x, u, *starts: jnp.where(is_at(starts[along]), u, x)


def axis(e) -> int | None:
    """The axis of the array along which an equation of READS or WRITES chooses one element; None if it does not."""
    axes = _moving(e) if e.primitive.name.startswith("dynamic") else _axes(e)
    return axes[0] if len(axes) == 1 else None


def _moving(e) -> list:
    """The axes along which a dynamic slice is shorter than the array."""
    sizes = e.params["slice_sizes"] if e.primitive.name == "dynamic_slice" else e.invars[1].aval.shape
    return [a for a, (n, whole) in enumerate(zip(sizes, e.invars[0].aval.shape)) if n != whole]


def _axes(e) -> tuple:
    """The axes of the array along which the indices of a gather or scatter choose."""
    every, sizes = counted_axes(e), window_sizes(e)
    if not _clips(e) or len(every) == 1:
        return every
    # A dynamic slice under vmap has an index for each axis. Along a whole one it is 0.
    return tuple(a for a in every if sizes[a] != e.invars[0].aval.shape[a])


def counted_axes(e) -> tuple:
    """The axes that the numbers of an index count along."""
    dims = e.params["dimension_numbers"]
    return dims.start_index_map if e.primitive.name == "gather" else dims.scatter_dims_to_operand_dims


def window_sizes(e) -> tuple:
    """How many elements along each axis of the array a gather reads, or a scatter updates, at an index."""
    if e.primitive.name == "gather":
        return e.params["slice_sizes"]
    dims, updates = e.params["dimension_numbers"], e.invars[2].aval.shape
    window = iter(updates[a] for a in dims.update_window_dims)
    single = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    return tuple(1 if a in single else next(window) for a in range(len(e.invars[0].aval.shape)))


def _sum(which, x, axis):
    """The elements of x where `which` is true: one along an axis."""
    chosen = jnp.where(which, x, _nothing(x.dtype))
    return jnp.any(chosen, axis) if x.dtype == np.bool_ else jnp.sum(chosen, axis, dtype=x.dtype)


def _nothing(dtype):
    """What changes no number that it is added to: -0.0 of floating-point numbers, since 0.0 would turn -0.0 into 0.0."""
    return np.asarray(False) if dtype == np.bool_ else -np.zeros((), dtype)


def _put(x, u, first):
    """x with u in it from `first` on, by slices and concatenations."""
    axis = next((a for a in range(x.ndim) if u.shape[a] != x.shape[a]), None)
    if axis is None:
        return u
    at, n = first[axis], u.shape[axis]
    rest = [0 if a == axis else start for a, start in enumerate(first)]
    cut = lambda low, high: lax.slice_in_dim(x, low, high, axis=axis)
    pieces = [cut(0, at), _put(cut(at, at + n), u, rest), cut(at + n, x.shape[axis])]
    return lax.concatenate([p for p in pieces if p.shape[axis]], axis)


def _put_at(e, index):
    """A scatter at one index that is known."""
    shape, dims, (along,) = e.invars[0].aval.shape, e.params["dimension_numbers"], _axes(e)
    sizes = window_sizes(e)
    if dims.operand_batching_dims or any(n != whole for a, (n, whole) in enumerate(zip(sizes, shape)) if a != along):
        return None
    if e.params["mode"] == lax.GatherScatterMode.CLIP:
        index = min(max(index, 0), shape[along] - sizes[along])
    if not 0 <= index <= shape[along] - sizes[along]:  # nothing is written
        return lambda x, *_: x
    return lambda x, _, u: _put(x, u.reshape(sizes), [index if a == along else 0 for a in range(len(shape))])


def _clips(e) -> bool:
    """Whether a gather reads the last element where an index is beyond it, or any where no index is."""
    return e.params["mode"] in (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def _spread(x, places, shape):
    """x broadcast to a shape; places: of its axes there."""
    order = np.argsort(places)
    return lax.broadcast_in_dim(lax.transpose(x, order), shape, [places[k] for k in order])


def _gather(e):
    """One element along an axis for each index: out[..., batch, ...] = sum over k of x[..., k, ...] where index[batch] = k."""
    x, indices = (v.aval.shape for v in e.invars)
    dims, out, (along,) = e.params["dimension_numbers"], e.outvars[0].aval.shape, _axes(e)
    batch = [a for a in range(len(out)) if a not in dims.offset_dims]
    of_batch = dict(zip(dims.operand_batching_dims, dims.start_indices_batching_dims))
    whole = all(n == x[a] for a, n in enumerate(e.params["slice_sizes"]) if a != along and a not in of_batch)
    if not whole or e.params["slice_sizes"][along] != 1 or not set(dims.collapsed_slice_dims) <= {along}:
        return None
    window, places = iter(dims.offset_dims), []
    for a in range(len(x)):
        if a in of_batch:
            places.append(batch[of_batch[a]])
            continue
        at = None if a in dims.collapsed_slice_dims else next(window)
        places.append(len(out) if a == along else at)
    fill, dtype, n = e.params["fill_value"], e.outvars[0].aval.dtype, x[along]
    if fill is None:  # as JAX fills by default
        is_a = lambda kind: jnp.issubdtype(dtype, kind)
        fill = np.nan if is_a(np.inexact) else True if is_a(np.bool_) else jnp.iinfo(dtype).min
        fill = jnp.iinfo(dtype).max if is_a(np.unsignedinteger) else fill

    def f(x, index):
        index = _signed(index[..., counted_axes(e).index(along)], n)
        inside = _spread((index >= 0) & (index < n), batch, out)
        index = _spread(_within(index, n) if _clips(e) else index, batch, (*out, n))
        # An axis that is chosen from and stays has size 1 in the result.
        y = _sum(index == lax.broadcasted_iota(index.dtype, index.shape, len(out)), _spread(x, places, (*out, n)), -1)
        return y if _clips(e) else jnp.where(inside, y, jnp.asarray(fill, y.dtype))

    return f


def _signed(index, n: int):
    """Indices into n elements as signed numbers that hold n. Those beyond n are n."""
    if jnp.issubdtype(index.dtype, np.unsignedinteger) and index.dtype.itemsize >= 4:
        index = jnp.minimum(index, jnp.asarray(n, index.dtype))
    elif jnp.issubdtype(index.dtype, np.signedinteger) and index.dtype.itemsize >= 4:
        return index
    return index.astype(np.int32)


def _within(index, n: int):
    """Signed indices, those that are none of n elements moved to the nearest one."""
    number = lambda k: jnp.asarray(k, index.dtype)
    return lax.clamp(number(0), index, number(n - 1))


def _scatter(e):
    """Each element of x is updated, or not, by each of the updates along the axis."""
    x, indices, updates = (v.aval.shape for v in e.invars)
    dims, (along,) = e.params["dimension_numbers"], _axes(e)
    of_batch = dict(zip(dims.scatter_indices_batching_dims, dims.operand_batching_dims))
    extra = [k for k in range(len(indices) - 1) if k not in of_batch]
    several = [k for k in extra if indices[k] != 1]
    window = iter(a for a in range(len(x)) if a not in dims.inserted_window_dims and a not in of_batch.values())
    batch = iter(range(len(indices) - 1))
    shape, places, index_places = (*x, *(indices[k] for k in extra)), [], []
    at = lambda k: of_batch[k] if k in of_batch else len(x) + extra.index(k)
    for a, n in enumerate(updates):
        place = next(window) if a in dims.update_window_dims else at(next(batch))
        if a in dims.update_window_dims and n != (1 if place == along else x[place]):
            return None
        places.append(place)
    index_places = [at(k) for k in range(len(indices) - 1)]
    if not set(dims.inserted_window_dims) <= {along} or (several and e.primitive.name == "scatter"):
        return None
    over, n = tuple(range(len(x), len(shape))), x[along]

    def f(x, index, u):
        index = _signed(index[..., counted_axes(e).index(along)], n)
        if e.params["mode"] == lax.GatherScatterMode.CLIP:
            index = _within(index, n)
        which = _spread(index, index_places, shape) == lax.broadcasted_iota(index.dtype, shape, along)
        u = _spread(u, places, shape)
        if e.primitive.name == "scatter-add":
            return x + jnp.sum(jnp.where(which, u, _nothing(u.dtype)), over, dtype=x.dtype)
        drop = lambda y: lax.squeeze(y, over)
        return jnp.where(drop(which), drop(u), x)

    return f
