"""Sharding: operations on split arrays work on their parts, and gather nothing that they do not need.

Under jit on several devices a lowering rule gives XLA a callback (`jax.experimental.custom_partitioning`). The primitive
names the dimensions of its operands and results. Dimensions of one name are split alike, and `shard` computes the part of
one device, with collectives if necessary. JAX has no callbacks inside a `shard_map` over some axes of the mesh, and in
programs that are exported for several devices: XLA partitions the reference there.
"""

import functools
import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkern._core import compat
from jaxkern._core.dtypes import computing
from jaxkern._core.package import __version__

# ---- a callback that computes each device's part


def lower(ctx, prim, operands, params, dims, shard, exact=(), summed=(), whole=(), gathered=False):
    """Lowers `prim` to one part per device.

    dims: for each operand, then for each result, the names of its dimensions. Dimensions of one name are split alike. A
        dimension of size 1 is replicated if others of its name are longer.
    shard(over, *parts, **params): computes the part of the result (a list if `prim` has several results) from these parts
        of the operands. `over` maps each name to the mesh axes that split it, for use in collectives; mostly ().
    exact: names that are split only into equal parts, because `shard` depends on where a part begins. Other dimensions
        may be padded at the end with arbitrary values.
    summed: names that no result has; `shard` must reduce over them.
    whole: names that are never split. If arrays are split there, another dimension that all of them have is split in its place,
        if one divides evenly; otherwise, or with `gathered`, they are gathered.
    """
    several, count = prim.multiple_results, len(ctx.avals_in)
    shapes = [a.shape for a in (*ctx.avals_in, *ctx.avals_out)]
    size = {}
    for names, shape in zip(dims, shapes):
        for name, n in zip(names, shape):
            size[name] = max(n, size.get(name, n))
    alone = [
        [name if n == size[name] else f"one{k}x{d}" for d, (name, n) in enumerate(zip(names, shape))]
        for k, (names, shape) in enumerate(zip(dims, shapes))
    ]
    size = {name: n for names, shape in zip(alone, shapes) for name, n in zip(names, shape)}

    def partition(mesh, parts, results):
        arrays = [*parts, *(results if several else [results])]
        mesh = _refined(mesh, arrays)
        splits = [_axes_of(a.sharding, mesh, len(names)) for a, names in zip(arrays, alone)]
        order = [*range(count, len(arrays)), *range(count)]
        over = _agreed(alone, splits, order, size, exact, None if gathered else summed, whole, mesh.shape)
        shardings = [NamedSharding(mesh, P(*(over[name] or None for name in names))) for names in alone]
        local = outside_meshes(functools.partial(shard, over, **params))
        return mesh, local, shardings[count:] if several else shardings[count], tuple(shardings[:count])

    spelled = [" ".join(names) for names in alone]
    call = compat.partitioned_by(
        outside_meshes(functools.partial(prim.bind, **params)),
        partition,
        rule=f"{', '.join(spelled[:count])} -> {', '.join(spelled[count:])}",
        summed=tuple(name for name in summed if any(name in names for names in alone)),
    )

    def named(*operands):
        return call(*operands)

    named.__name__ = function_name(prim, params)
    return mlir.lower_fun(jax.jit(named), multiple_results=several)(ctx, *operands)


def function_name(prim, params) -> str:
    """Name of the jitted function that wraps the partitioning callback of `prim`; lowering may append a numeric suffix.

    The compilation cache may see the callback's address, and another callback may have this address in another process. The
    name therefore identifies what the callback does.
    """
    facts = repr((__version__, sorted(params.items())))
    return f"{prim.name}_{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def outside_meshes(f):
    """Calls `f` outside of any mesh: parts of arrays have no sharding."""

    def g(*parts, **params):
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return f(*parts, **params)

    return g


def _refined(mesh, arrays):
    """The mesh with its axes factored into axes of prime size, because XLA may split a dimension by part of an axis."""
    sharding, rank = next(((a.sharding, len(a.shape)) for a in arrays if a.sharding is not None), (None, 0))
    if sharding is None:
        return mesh
    devices = list(sharding.devices_indices_map((sharding.num_devices,) * rank))  # in the order of the mesh
    sizes = mesh.shape.values() if mesh.size == len(devices) else (len(devices),)
    primes = [p for n in sizes for p in _primes(n)]
    return Mesh(np.array(devices).reshape(primes), [f"jaxkern{k}" for k in range(len(primes))])


def _primes(n):
    p = next((p for p in range(2, math.isqrt(n) + 1) if n % p == 0), n)
    return [] if n == 1 else [p, *_primes(n // p)]


def _axes_of(sharding, mesh, rank):
    """The mesh axes that split each dimension, slowest first; () if there are none, or no axes express the split."""
    if sharding is None or rank == 0:
        return [()] * rank
    n, shape = mesh.size, tuple(mesh.shape.values())
    begin = [[s.start or 0 for s in part] for part in sharding.devices_indices_map((n,) * rank).values()]
    digit = dict(zip(mesh.axis_names, np.indices(shape)))
    splits = []
    for begins in np.array(begin).T.reshape(rank, *shape):
        stride = {a: begins[tuple(int(k == at) for k in range(len(shape)))] for at, a in enumerate(mesh.axis_names)}
        axes = sorted((a for a in stride if stride[a]), key=stride.get, reverse=True)
        unit, expected = n, np.zeros(shape, int)
        for a in axes:
            unit //= mesh.shape[a]
            expected += unit * digit[a]
        splits.append(tuple(axes) if (expected == begins).all() else ())
    return splits


def _agreed(dims, splits, order, size, exact, summed, whole, mesh_shape):
    """The split of each name: the split of the first array, in this order, that has one.

    One mesh axis must not split two dimensions of an array. It may split two names that never occur in the same array.
    summed: as for `lower`; None if no other name is split in place of one that cannot be.
    """
    over, lost = {}, {}
    parts = lambda axes: math.prod(mesh_shape[a] for a in axes)
    taken = lambda name: {a for names in dims if name in names for other in names for a in over.get(other, ())}
    for k in order:
        for name, axes in zip(dims[k], splits[k]):
            if over.get(name):
                continue
            used = taken(name)
            axes = tuple(a for a in axes if a not in used)
            if name in whole or size[name] % parts(axes) and name in exact:
                lost.setdefault(name, axes)
                axes = ()
            over[name] = axes
    for name, axes in lost.items():
        if over[name] or summed is None:
            continue
        having = [names for names in dims if name in names]
        others = [n for n in having[0] if all(n in names for names in having)]
        moves = []
        for other in others:
            if other == name or other in whole or other in exact or other in summed:
                continue
            used = taken(other)
            free = tuple(a for a in axes if a not in used)
            moves += [(k, other, (*over[other], *free[:k])) for k in range(1, len(free) + 1)]
        moves = [move for move in moves if size[move[1]] % parts(move[2]) == 0]
        if moves:
            _, other, over[other] = max(moves, key=lambda move: move[0])
    return over


# ---- split rows: each device reduces its part, then devices exchange a few numbers per row


def row_exponentials(x, axis, over, weights=(), others=()):
    """(largest, sums): the largest element of each row of x, and sums over the row, with one message.

    It sums exp(x - largest), exp(x - largest) times each of the weights, and each of the other arrays. For a row that is
    entirely -inf, the largest element is 0 and the sums of exponentials are 0.
    """
    if over:
        largest, *sums = _in_one_read(x, weights, axis)
    else:
        largest = lax.stop_gradient(jnp.max(x, axis, keepdims=True, initial=-jnp.inf))  # see rows.shifted
        exponential = jnp.exp(x - jnp.where(largest == -jnp.inf, 0, largest))
        sums = [jnp.sum(a, axis, keepdims=True) for a in (exponential, *(exponential * w for w in weights))]
    sums += [jnp.sum(a, axis, keepdims=True) for a in others]
    return merge_exponentials(largest, sums, over, 1 + len(weights))


def _in_one_read(x, weights, axis):
    """The largest element of each row and the sums of exponentials, so that XLA computes and reads x once.

    A sum is relative to the largest element so far and is rescaled when that grows (Milakov and Gimelshein, 2018).
    """

    def join(a, b):
        largest = jnp.maximum(a[0], b[0])
        base = jnp.where(largest == -jnp.inf, 0, largest)
        return largest, *(s * jnp.exp(a[0] - base) + t * jnp.exp(b[0] - base) for s, t in zip(a[1:], b[1:]))

    operands = (x, *(jnp.where(x == -jnp.inf, 0, w) for w in (jnp.ones_like(x), *weights)))
    zero = jnp.zeros((), x.dtype)
    found = lax.reduce(operands, (zero - jnp.inf, *[zero] * (len(operands) - 1)), join, (axis,))
    return [jnp.expand_dims(a, axis) for a in found]


def merge_exponentials(largest, sums, over, scaled=1):
    """(largest, sums) of whole rows from the parts on each device; the first `scaled` sums are of exponentials."""
    if not over:
        return jnp.where(largest == -jnp.inf, 0, largest), sums
    largest, *sums = gathered([largest, *sums], over)
    whole = jnp.max(largest, 0)
    whole = jnp.where(whole == -jnp.inf, 0, whole)
    factor = jnp.exp(jnp.where(largest == -jnp.inf, -jnp.inf, largest - whole))
    return whole, [jnp.sum(s * factor if k < scaled else s, 0) for k, s in enumerate(sums)]


def gathered(numbers, over):
    """The arrays `numbers`, of one shape, of all devices along `over`, each with a first dimension for the devices.

    One message. A maximum, and then sums relative to it, would be two, and the second one would wait for the first. Each device
    receives the numbers of all: for a few numbers per row and some dozens of devices, what takes time is the message itself.
    """
    every = lax.all_gather(jnp.stack(numbers), over)
    return [every[:, k] for k in range(len(numbers))]


def _summed(sums, over):
    return list(lax.psum(jnp.stack(sums), over)) if over else sums


# ---- extremes over devices: `lax.pmax` and `lax.pmin` may lose NaN


def largest(x, axes):
    """The largest x of the devices along `axes`, NaN if one of them is; devices that have it share its gradient evenly."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return lax.pmax(x, axes)
    return _largest(x.astype(computing(x.dtype)), axes).astype(x.dtype)


def smallest(x, axes):
    """The smallest x of the devices along `axes`, like `largest`."""
    return lax.pmin(x, axes) if not jnp.issubdtype(x.dtype, jnp.floating) else -largest(-x, axes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _largest(x, axes):
    """The maximum of integers that are in the order of x, with NaN last."""
    integer = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    last = jnp.asarray(jnp.iinfo(integer).max, integer)
    turned = lambda bits: jnp.where(bits < 0, bits ^ last, bits)
    key = jnp.where(jnp.isnan(x), last, turned(lax.bitcast_convert_type(x, integer)))
    return lax.bitcast_convert_type(turned(lax.pmax(key, axes)), x.dtype)


@_largest.defjvp
def _largest_jvp(axes, primals, tangents):
    (x,), (t,) = primals, tangents
    most = _largest(x, axes)
    has = (x == most) | (jnp.isnan(x) & jnp.isnan(most))
    share = jnp.where(has, 1 / lax.psum(has.astype(x.dtype), axes), 0).astype(x.dtype)
    return most, lax.psum(share * t, axes)
