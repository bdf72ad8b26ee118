"""Operations on rows: their primitives, and what their references in jnp have in common.

A row operation takes one or more arrays of equal shape, then perhaps a mask (boolean, the same rank, each dimension 1 or
equal), and returns one array of that shape or, if it reduces rows, of that shape without the axis. Its parameters are
`axis`, the dimension that a row lies along, `algorithm`, or "auto", and, if it reduces, `dtype`, the type of the result
or the types of several.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxkern._core import define, partition
from jaxkern._core.primitive import bind


def row_primitive(name: str, arrays: int, reference, plan=None, split=None, several=False, **options):
    """A primitive on `arrays` arrays and an optional mask.

    reference, plan, options: as for `define.primitive`. The mask that `plan` sees fits a BroadcastView.
    split(prim, *parts, over, **params): the operation for rows that are split over devices, which exchange messages
        along the mesh axes `over`. True: the reference takes `over`. None: such rows are gathered.
    several: it reduces rows to several numbers each.
    """
    return define.primitive(
        name,
        functools.partial(_shape, name, arrays),
        functools.partial(_batch, arrays),
        reference,
        several=several,
        plan=plan,
        partition=functools.partial(_partition, (lambda prim, *a, **k: reference(*a, **k)) if split is True else split),
        adapt=functools.partial(_adapt, arrays),
        **options,
    )


def _shape(name, arrays, x, *rest, axis, algorithm, dtype=None):
    del algorithm
    others, mask = rest[: arrays - 1], rest[arrays - 1 :]
    if not 0 <= axis < x.ndim:
        raise ValueError(f"{name}: axis {axis} is out of bounds for shape {x.shape}")
    for y in others:
        if y.shape != x.shape or y.dtype != x.dtype:
            raise ValueError(f"{name}: operands differ: {x.str_short()} and {y.str_short()}")
    for m in mask:
        if m.dtype != jnp.bool_ or m.ndim != x.ndim or any(b != 1 and b != a for a, b in zip(x.shape, m.shape)):
            raise ValueError(f"{name}: the mask {m.str_short()} does not fit {x.str_short()}")
    if dtype is None:
        return x.update(weak_type=False)
    y = without_axis(x, axis)
    return [y.update(dtype=d) for d in dtype] if isinstance(dtype, tuple) else y.update(dtype=dtype)


def without_axis(x, axis):
    """The type of x without a dimension; keeps its sharding and varying axes."""
    shape = {"shape": (*x.shape[:axis], *x.shape[axis + 1 :]), "weak_type": False}
    if not x.sharding.mesh.empty:
        spec = [*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec))]
        shape["sharding"] = NamedSharding(x.sharding.mesh, PartitionSpec(*spec[:axis], *spec[axis + 1 :]))
    return x.update(**shape)


def _batch(arrays, prim, operands, dims, *, axis, **params):
    """The batch becomes one more dimension, at the position that it has in the first batched operand."""
    at = next(d for d in dims if d is not None)
    size = next(x.shape[d] for x, d in zip(operands, dims) if d is not None)

    def place(x, d, broadcasts):
        if d is not None:
            return jnp.moveaxis(x, d, at)  # a no-op if d == at
        x = jnp.expand_dims(x, at)
        return x if broadcasts else jnp.broadcast_to(x, (*x.shape[:at], size, *x.shape[at + 1 :]))

    # An unbatched mask gets a dimension of size 1: kernels read it in place.
    operands = [place(x, d, k >= arrays) for k, (x, d) in enumerate(zip(operands, dims))]
    y = bind(prim, *operands, axis=axis + (at <= axis), **params)
    place_of = lambda a: at - (a.ndim < operands[0].ndim and at > axis)
    return y, list(map(place_of, y)) if prim.multiple_results else place_of(y)


def _partition(split, prim, ctx, operands, params):
    """Any dimension may be split, and the row as well if there is a `split`."""
    axis = params["axis"]
    names = [f"d{d}" for d in range(ctx.avals_in[0].ndim)]
    names[axis] = "row"
    reduced = names[:axis] + names[axis + 1 :]
    dims = [names if a.ndim == len(names) else reduced for a in (*ctx.avals_in, *ctx.avals_out)]

    def shard(over, *parts, **params):
        if over["row"]:
            return split(prim, *parts, over=over["row"], **params)
        return prim.bind(*parts, **params)

    summed = () if dims[-1] is names else ("row",)
    whole = () if split else {"row"}
    return partition.lower(ctx, prim, operands, params, dims, shard, exact={"row"}, whole=whole, summed=summed)


# ---- masks that kernels can read

MASK_GROUPS = define.MAP_RANK  # alternating runs of broadcast and other dimensions, before and after the axis


def _adapt(arrays, prim, x, *others, axis, **params):
    mask = others[arrays - 1 :]
    return adapt_mask(prim, x, mask[0], axis) if mask else None


def adapt_mask(prim, x, mask, axis):
    """A function that broadcasts the last operand, the mask, and binds `prim`; None if kernels can read the mask."""
    shape = mask_shape(x.shape, mask.shape, axis)
    if shape == mask.shape:
        return None
    return lambda *operands, **params: prim.bind(*operands[:-1], jnp.broadcast_to(operands[-1], shape), **params)


def mask_shape(full, part, axis: int):
    """The shape that a mask must be broadcast to before a kernel can read it; mostly its own."""
    if _groups(full[:axis], part[:axis]) > MASK_GROUPS or _groups(full[axis + 1 :], part[axis + 1 :]) > MASK_GROUPS:
        return tuple(full)
    return tuple(part)


def _groups(full, part) -> int:
    """The number of alternating groups of broadcast and other dimensions, without dimensions of size 1."""
    kinds = [b == 1 for a, b in zip(full, part) if a != 1]
    if any(a >= 1 << 32 for a in full):
        return MASK_GROUPS + 1 if len(set(kinds)) > 1 else 1
    return sum(k == 0 or kinds[k] != kinds[k - 1] for k in range(len(kinds)))


# ---- references


def computed(x, *mask):
    """`x` in the type that its arithmetic is done in, with 0 where it is masked out."""
    x = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    return jnp.where(mask[0], x, 0) if mask else x


def row_sum(x, axis):
    return jnp.sum(x, axis, keepdims=True)


def largest_of(x, mask, axis, least=None):
    """The largest element of each row in the computing type; `least`, or the least finite number, if it has none.

    16-bit numbers are compared as they are: XLA:CPU then widens them once, for the exponentials. The maximum counts as a
    constant: see `shifted`.
    """
    x = x if x.dtype in (jnp.float16, jnp.bfloat16) else computed(x)
    initial = jnp.finfo(x.dtype).min if least is None else least
    return computed(
        jax.lax.stop_gradient(jnp.max(x, axis, keepdims=True, initial=initial, where=mask[0] if mask else None))
    )


def shifted(x, mask, axis):
    """x - max in the computing type, its exponential, and the sum of exponentials; all-masked rows sum to 0.

    The maximum counts as a constant: no derivative of what is computed from these depends on it. The derivative of a
    maximum looks for an element equal to it, and finds none where XLA rounds the two differently.
    """
    x = computed(x)
    if mask:
        x = jnp.where(mask[0], x, -jnp.inf)
    largest = jax.lax.stop_gradient(jnp.max(x, axis, keepdims=True, initial=-jnp.inf))
    below = x - jnp.where(largest == -jnp.inf, 0, largest)
    exponential = jnp.exp(below)
    return below, exponential, row_sum(exponential, axis)


MANY = 1 << 16  # elements


def worthwhile(x) -> bool:
    """Whether x is so large that computing it twice where a result is NaN, as `unless_nan` does, saves time."""
    return all(isinstance(n, int) for n in x.shape) and x.size >= MANY


def unless_nan(fast, axis, exact, also=False, finite=False):
    """`fast`, or exact() if a row of `fast` begins with NaN (finite: or with infinity), or `also` is true.

    XLA:CPU compiles row operations to one loop only if they contain no selects. So `fast` has none, and where it is wrong
    its whole row is NaN. Arrays of fewer than `MANY` elements are computed by exact() at once.
    """
    if not worthwhile(fast):
        return exact()
    first = jax.lax.slice_in_dim(fast, 0, 1, axis=axis)
    total = jnp.sum(first, dtype=computed(first).dtype)
    return jax.lax.cond((~jnp.isfinite(total) if finite else jnp.isnan(total)) | also, exact, lambda: fast)


def gradient_without_selects(y, g, axis):
    """The gradient of a softmax from its result y.

    If a row has a cotangent that is not finite, or their sum is not, the first element of the row is not finite either, and
    elements where y is 0 may be NaN.
    """
    p, h = computed(y), computed(g)
    return p * (h - row_sum(p * h, axis))


def lowest_for_infinity(y, dtype):
    """`y` in `dtype`, with the lowest finite number for -inf if the type has no infinity (some 8-bit types)."""
    if not np.isinf(np.float32(-np.inf).astype(dtype).astype(np.float32)):
        y = jnp.maximum(y, float(jnp.finfo(dtype).min))
    return y.astype(dtype)
