"""segment_sum, segment_max, segment_min, segment_prod as in `jax.ops`; segment_mean, segment_softmax, sort_indices.

They reduce the rows of `data` with the same id to one row, or normalise them together. The primitives are in
_ops/indexing and _ops/segment_softmax.
"""

from __future__ import annotations

import functools

import jax
from jax.typing import ArrayLike

from jaxkern._core import package, validate
from jaxkern._ops.indexing import segments, sort
from jaxkern._ops.indexing.arguments import Mode, integers, rules_of, safe_index
from jaxkern._ops.indexing.order import Order

package.publish(__name__, Order)


def segment_sum(
    data: ArrayLike,
    segment_ids: ArrayLike | None,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: jax.sharding.NamedSharding | jax.sharding.PartitionSpec | None = None,
    order: Order | None = None,
) -> jax.Array:
    """y[i] = sum of the rows data[e] with segment_ids[e] = i, as `jax.ops.segment_sum`.

    Args:
        data: array of shape (count, ...). float16, bfloat16 and float32 are summed in float32 or wider, float64 in
            float64, and rounded once; int32, int64 and uint32 wrap. Other dtypes use XLA.
        segment_ids: array of shape (count,) and any integer dtype: the row of the result that each row of `data` is
            added to. Other shapes as in `jax.ops`: `data` broadcasts to `segment_ids.shape + data.shape[1:]`.
        num_segments: the number of rows of the result, an int. None: the largest id plus 1, which is possible only if
            the ids are known while tracing. Required under jit.
        indices_are_sorted: a promise that ids ascend, which saves sorting them.
        unique_indices: a promise that no id occurs twice.
        bucket_size: a positive int or None; accepted for compatibility with `jax.ops`, where it makes sums more
            accurate. Sums here do not need it.
        mode: how to treat ids outside [0, num_segments), including negative ones: None, "drop", "fill" and
            "promise_in_bounds" drop them, "clip" uses the nearest row.
        out_sharding: the sharding of the result on a mesh with explicit axes, a `NamedSharding` or a `PartitionSpec`.
            None: the sharding of `data`, with rows replicated.
        order: the result of `jaxkern.sort_indices(segment_ids, num_segments)`, which saves sorting the ids again. It
            holds the ids: `segment_ids` and `num_segments` may be None.

    Returns:
        Array of shape (num_segments, *data.shape[1:]), with 0 in rows that nothing is added to. Bitwise reproducible.

    Raises:
        TypeError: `segment_ids` is not of an integer dtype; `num_segments` is not an int, or is missing under jit.
        ValueError: `num_segments` is negative or exceeds 64 bits; shapes do not match; `mode` is unknown; `order`
            belongs to other ids.

    Derivatives: forward and reverse mode, of any order. The sum is linear; its gradient is an `index_select`.

    Cost: each row of `data` is read once and each row of the result is written once, beside 4 bytes for each id. Ids that
    do not ascend are sorted first, once in a program, and its gradient uses the same order; `order` saves that. The
    gradient reads each row of the cotangent where it is needed, and writes an array of the size of `data`.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.segment_sum(jnp.arange(5.0), jnp.array([0, 0, 1, 1, -1]), num_segments=3).tolist()
    [1.0, 5.0, 0.0]

    Source: Bell and Garland, "Implementing sparse matrix-vector multiplication on throughput-oriented processors", 2009.
    """
    return segments.segment(
        "segment_sum",
        segments.total,
        data,
        segment_ids,
        num_segments,
        indices_are_sorted,
        unique_indices,
        bucket_size,
        mode,
        out_sharding,
        order,
    )


def segment_mean(
    data: ArrayLike,
    segment_ids: ArrayLike | None,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: jax.sharding.NamedSharding | jax.sharding.PartitionSpec | None = None,
    order: Order | None = None,
) -> jax.Array:
    """y[i] = mean of the rows data[e] with segment_ids[e] = i; 0 for ids without rows.

    Args:
        data: array of shape (count, ...). Integers give float32.
        segment_ids: integer array of shape (count,): the row of the result that each row of `data` counts for.
        num_segments: the number of rows of the result, an int. Required under jit, unless `order` is given.
        indices_are_sorted: a promise that ids ascend, which saves sorting them.
        unique_indices: a promise that no id occurs twice.
        bucket_size, mode, out_sharding, order: as for `segment_sum`.

    Returns:
        Array of shape (num_segments, *data.shape[1:]). Sums of 16-bit numbers stay in float32 until they
        are divided, so that a float16 mean is finite even if the sum would overflow. Bitwise reproducible.

    Raises:
        TypeError: `segment_ids` is not of an integer dtype; `num_segments` is not an int, or is missing under jit.
        ValueError: `num_segments` is negative or exceeds 64 bits; shapes do not match; `mode` is unknown; `order`
            belongs to other ids.

    Derivatives: forward and reverse mode, of any order. The mean is linear; its gradient is an `index_select`.

    Cost: as for `segment_sum`; the rows of each id are counted too.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.segment_mean(jnp.array([1.0, 2.0, 6.0]), jnp.array([0, 0, 2]), num_segments=3).tolist()
    [1.5, 0.0, 6.0]

    Source: a sum and a count, as for `segment_sum`.
    """
    return segments.segment(
        "segment_mean",
        segments.mean,
        data,
        segment_ids,
        num_segments,
        indices_are_sorted,
        unique_indices,
        bucket_size,
        mode,
        out_sharding,
        order,
    )


def segment_max(
    data: ArrayLike,
    segment_ids: ArrayLike | None,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: jax.sharding.NamedSharding | jax.sharding.PartitionSpec | None = None,
    order: Order | None = None,
) -> jax.Array:
    """y[i] = max of the rows data[e] with segment_ids[e] = i, column by column, as `jax.ops.segment_max`.

    Args:
        data: array of shape (count, ...) and any real dtype.
        segment_ids: integer array of shape (count,): the row of the result that each row of `data` counts for.
        num_segments: the number of rows of the result, an int. Required under jit, unless `order` is given.
        indices_are_sorted: a promise that ids ascend, which saves sorting them.
        unique_indices: a promise that no id occurs twice.
        bucket_size, mode, out_sharding, order: as for `segment_sum`.

    Returns:
        Array of shape (num_segments, *data.shape[1:]). Ids without rows give -inf, or the lowest integer. NaN
        propagates. Bitwise reproducible.

    Raises:
        TypeError: `segment_ids` is not of an integer dtype; `num_segments` is not an int, or is missing under jit.
        ValueError: `num_segments` is negative or exceeds 64 bits; shapes do not match; `mode` is unknown; `order`
            belongs to other ids.

    Derivatives: forward and reverse mode, of any order. Elements that equal the maximum share its gradient equally.

    Cost: as for `segment_sum`; the gradient reads `data` and the result again.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.segment_max(jnp.array([3.0, 1.0, 2.0]), jnp.array([0, 0, 2]), num_segments=3).tolist()
    [3.0, -inf, 2.0]
    """
    return segments.segment(
        "segment_max",
        segments.largest,
        data,
        segment_ids,
        num_segments,
        indices_are_sorted,
        unique_indices,
        bucket_size,
        mode,
        out_sharding,
        order,
    )


def segment_min(
    data: ArrayLike,
    segment_ids: ArrayLike | None,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: jax.sharding.NamedSharding | jax.sharding.PartitionSpec | None = None,
    order: Order | None = None,
) -> jax.Array:
    """y[i] = min of the rows data[e] with segment_ids[e] = i, column by column, as `jax.ops.segment_min`.

    Args:
        data: array of shape (count, ...) and any real dtype.
        segment_ids: integer array of shape (count,): the row of the result that each row of `data` counts for.
        num_segments: the number of rows of the result, an int. Required under jit, unless `order` is given.
        indices_are_sorted: a promise that ids ascend, which saves sorting them.
        unique_indices: a promise that no id occurs twice.
        bucket_size, mode, out_sharding, order: as for `segment_sum`.

    Returns:
        Array of shape (num_segments, *data.shape[1:]). Ids without rows give inf, or the greatest integer. NaN
        propagates. Bitwise reproducible.

    Raises:
        TypeError: `segment_ids` is not of an integer dtype; `num_segments` is not an int, or is missing under jit.
        ValueError: `num_segments` is negative or exceeds 64 bits; shapes do not match; `mode` is unknown; `order`
            belongs to other ids.

    Derivatives: forward and reverse mode, of any order. Elements that equal the minimum share its gradient equally.

    Cost: as for `segment_sum`; the gradient reads `data` and the result again.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.segment_min(jnp.array([3.0, 1.0, 2.0]), jnp.array([0, 0, 2]), num_segments=3).tolist()
    [1.0, inf, 2.0]
    """
    return segments.segment(
        "segment_min",
        segments.smallest,
        data,
        segment_ids,
        num_segments,
        indices_are_sorted,
        unique_indices,
        bucket_size,
        mode,
        out_sharding,
        order,
    )


def segment_prod(
    data: ArrayLike,
    segment_ids: ArrayLike | None,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: jax.sharding.NamedSharding | jax.sharding.PartitionSpec | None = None,
    order: Order | None = None,
) -> jax.Array:
    """y[i] = product of the rows data[e] with segment_ids[e] = i, as `jax.ops.segment_prod`.

    Args:
        data: array of shape (count, ...). float16, bfloat16 and float32 are multiplied in float32, float64 in float64,
            and rounded once; int32, int64 and uint32 wrap.
        segment_ids: integer array of shape (count,): the row of the result that each row of `data` counts for.
        num_segments: the number of rows of the result, an int. Required under jit, unless `order` is given.
        indices_are_sorted: a promise that ids ascend, which saves sorting them.
        unique_indices: a promise that no id occurs twice.
        bucket_size, mode, out_sharding, order: as for `segment_sum`.

    Returns:
        Array of shape (num_segments, *data.shape[1:]). Ids without rows give 1. Bitwise reproducible.

    Raises:
        TypeError: `segment_ids` is not of an integer dtype; `num_segments` is not an int, or is missing under jit.
        ValueError: `num_segments` is negative or exceeds 64 bits; shapes do not match; `mode` is unknown; `order`
            belongs to other ids.

    Derivatives: forward and reverse mode, of any order. They hold for zeros too, and whether ids repeat or not
    (`jax.ops.segment_prod` has them for unique ids alone).

    Cost: as for `segment_sum`. XLA computes the gradient, by a scan over the sorted rows.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> product = lambda data: jaxkern.segment_prod(data, jnp.array([0, 0, 2]), num_segments=3)
    >>> data = jnp.array([-3.0, 0.0, 5.0])
    >>> product(data).tolist(), jax.grad(lambda data: product(data).sum())(data).tolist()
    ([-0.0, 1.0, 5.0], [0.0, -3.0, 1.0])
    """
    return segments.segment(
        "segment_prod",
        segments.product,
        data,
        segment_ids,
        num_segments,
        indices_are_sorted,
        unique_indices,
        bucket_size,
        mode,
        out_sharding,
        order,
    )


def segment_softmax(
    data: ArrayLike,
    segment_ids: ArrayLike | None,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    mode: Mode = None,
    order: Order | None = None,
) -> jax.Array:
    """exp(data) / (sum of exp(data) over the rows with the same id), for each column.

    In jnp, with `of(x)` for `jnp.take(x, segment_ids, 0)`: `e = exp(data - of(jax.ops.segment_max(data, segment_ids)))`,
    then `e / of(jax.ops.segment_sum(e, segment_ids))`.

    Args:
        data: array of shape (count, ...). float16, bfloat16 and float32 are computed in float32, float64 in float64,
            and rounded once; integers promote as in `jax.nn`; other floating-point dtypes (float8) use XLA, in float32.
        segment_ids: array of shape (count,) and any integer dtype: the segment of each row of `data`. Other shapes as
            for `segment_sum`: `data` broadcasts to `segment_ids.shape + data.shape[1:]`.
        num_segments: the number of segments, an int. None: the largest id plus 1, which is possible only if the ids are
            known while tracing. Required under jit.
        indices_are_sorted: a promise that ids ascend, which saves sorting them.
        unique_indices: a promise that no id occurs twice; accepted for symmetry with `segment_sum`, without effect.
        mode: how to treat ids outside [0, num_segments), including negative ones: with None, "drop", "fill" and
            "promise_in_bounds" they belong to no segment, with "clip" to the nearest one.
        order: as for `segment_sum`.

    Returns:
        Array of the shape that `data` was broadcast to; bitwise reproducible. In each segment and column the elements are
        nonnegative and sum to 1. Rows of no segment, and segments that are entirely -inf, are 0 and have zero gradients.
        NaN or +inf makes its segment NaN in its column. Where an element of the result is 0, its gradient is 0 whatever
        the cotangent is.

    Raises:
        TypeError: `data` is boolean, complex or not an array; `segment_ids` is not of an integer dtype; `num_segments`
            is not an int, or is missing under jit.
        ValueError: `num_segments` is negative or exceeds 64 bits; shapes do not match; `mode` is unknown; `order` belongs to
            other ids, or was made with wrap=True.

    Derivatives: forward and reverse mode, of any order. The gradient is one kernel, whose residual is the result.

    Cost: for n elements of e bytes, one kernel reads n e bytes (wide rows a second time, from the cache) and writes n e;
    the gradient moves 3 n e. Long segments (hundreds of rows, or thousands of narrow rows) are read twice. Ids are sorted
    first unless they ascend, and take a few bytes for each row. Calls with more than 2**31 - 3 segments or 2**30 rows use
    XLA.

    >>> import jax.numpy as jnp, jaxkern
    >>> data, ids = jnp.array([0.0, 0.0, 5.0, 1.0, 1.0]), jnp.array([0, 0, 1, 3, -1])
    >>> jaxkern.segment_softmax(data, ids, num_segments=4, indices_are_sorted=False).tolist()
    [0.5, 0.5, 1.0, 1.0, 0.0]

    Source: the weights of Velickovic et al., "Graph Attention Networks", 2018; one pass over a segment after Milakov
    and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    name = "segment_softmax"
    validate.flag(name, "unique_indices", unique_indices)  # saves nothing
    rules = rules_of(name, 0, mode, sorted=validate.flag(name, "indices_are_sorted", indices_are_sorted), unique=False)
    if isinstance(order, Order) and order.wrap:
        raise ValueError(f"jaxkern.{name}: the order must be made with wrap=False")
    return segments.ordered_segment(name, segments.softmax, data, segment_ids, num_segments, rules, mode, order)


def sort_indices(ids: ArrayLike, num_segments: int, *, mode: Mode = None, wrap: bool = False) -> Order:
    """keys = sort(ids) and order = argsort(ids), which operations at indices take as `order=` instead of sorting.

    Operations at equal indices in one jitted program sort once even without it. For a graph that does not change, an order
    that is made outside the program saves that sort too, in every step and its gradient.

    Args:
        ids: array of any shape and integer dtype: segment ids, or the indices of `index_add` or `index_select`.
        num_segments: the number of rows, an int.
        mode: how to treat indices that are out of range: with None, "drop", "fill" and "promise_in_bounds" they name no
            row, with "clip" the nearest one.
        wrap: whether negative indices count from the end, as in `index_add`. False: they name no row, as in
            `segment_sum`. Operations that take the order use its `mode` and `wrap`.

    Returns:
        An `Order`, a pytree of `ids`, `keys` and `order`. `keys` and `order` have shape (ids.size,) and dtype uint32: the
        rows in ascending order, and the position of each in the flattened ids. If all indices name rows, `order` is
        `jnp.argsort(ids.ravel())`.

    Raises:
        TypeError: `ids` is not of an integer dtype; `num_segments` is not an int.
        ValueError: `num_segments` is negative, or 2**32 - 1 or more; there are more than 2**31 - 1 ids, which XLA does not
            sort on GPUs; `mode` is unknown.

    Derivatives: none, of integers.

    Cost: a radix sort reads and writes 8 bytes for each id in each pass, and a pass sorts up to 9 bits of `num_segments`.

    >>> import jax.numpy as jnp, jaxkern
    >>> order = jaxkern.sort_indices(jnp.array([2, 0, 2, -1]), 3)
    >>> order.keys.tolist(), order.order.tolist()
    ([0, 2, 2, 3], [1, 0, 2, 3])
    >>> jaxkern.segment_sum(jnp.arange(4.0), None, order=order).tolist()
    [1.0, 0.0, 2.0]

    Source: the least-significant-digit radix sort of Satish, Harris and Garland, "Designing efficient sorting
    algorithms for manycore GPUs", 2009.
    """
    name = "sort_indices"
    rules = rules_of(name, 0, mode, wrap=validate.flag(name, "wrap", wrap))
    validate.check_array(name, "ids", "an array of integers", ids)
    if num_segments is None:
        raise TypeError(f"jaxkern.{name}: num_segments must be an int, got None")
    rows = segments.number_of_segments(name, num_segments, ids)
    if isinstance(rows, int) and rows >= 2**32 - 1:
        raise ValueError(f"jaxkern.{name}: num_segments must be below 2**32 - 1, got {rows}")
    return _sort_jit(safe_index(ids), rows=rows, wrap=rules.wrap, clip=rules.clip)


@functools.partial(jax.jit, static_argnames=("rows", "wrap", "clip"), inline=True)
def _sort_jit(ids, *, rows, wrap, clip):
    ids = integers("sort_indices", "ids", ids)
    sort.check_ordered("sort_indices", "ids can be sorted", ids.size)
    flat = validate.mergeable(ids, ids.ndim).reshape(1, -1)
    keys, order = sort.sort_indices(flat, rows=rows, wrap=wrap, clip=clip)
    return Order(ids, keys, order, rows, wrap, clip)
