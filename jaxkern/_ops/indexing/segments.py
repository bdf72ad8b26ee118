"""Segment operations on data and ids of any shape: arguments are checked, and a function of flat data and ids computes the result."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jaxkern._core import validate
from jaxkern._core.dtypes import computing
from jaxkern._ops.indexing import primitive
from jaxkern._ops.indexing.arguments import integers, rules_of, safe_index
from jaxkern._ops.indexing.order import with_order
from jaxkern._ops.segment_softmax.primitive import segment_softmax


def ordered_segment(name, compute, data, segment_ids, num_segments, rules, mode, order):
    validate.check_array(name, "data", "an array", data)
    if segment_ids is not None:
        validate.check_array(name, "segment_ids", "an array of integers", segment_ids)
    rows = None
    if order is None or num_segments is not None:
        rows = number_of_segments(name, num_segments, segment_ids)
    ids, order_operands, rules = with_order(name, "segment_ids", segment_ids, order, rules, mode, rows)
    rows = rows if order is None else order.num_segments
    return _segment_jit(data, safe_index(ids), *order_operands, name=name, compute=compute, rows=rows, rules=rules)


def segment(
    name,
    compute,
    data,
    segment_ids,
    num_segments,
    indices_are_sorted,
    unique_indices,
    bucket_size,
    mode,
    out_sharding,
    order,
):
    rules = rules_of(
        name,
        0,
        mode,
        sorted=validate.flag(name, "indices_are_sorted", indices_are_sorted),
        unique=validate.flag(name, "unique_indices", unique_indices),
    )
    if bucket_size is not None and validate.integer(name, "bucket_size", bucket_size, or_none=True) < 1:
        raise ValueError(f"jaxkern.{name}: bucket_size must be positive, got {bucket_size}")
    if out_sharding is not None and not isinstance(out_sharding, (NamedSharding, PartitionSpec)):
        raise TypeError(
            f"jaxkern.{name}: out_sharding must be a NamedSharding, a PartitionSpec or None, got "
            f"{validate.shown(out_sharding)}"
        )
    y = ordered_segment(name, compute, data, segment_ids, num_segments, rules, mode, order)
    if out_sharding is None:
        return y
    try:
        return jax.sharding.reshard(y, out_sharding)
    except (TypeError, ValueError) as error:  # it does not fit the mesh or the result
        raise ValueError(f"jaxkern.{name}: out_sharding {out_sharding}: {error}") from None


def number_of_segments(name, num_segments, segment_ids):
    if num_segments is None:
        if isinstance(segment_ids, Tracer):
            raise TypeError(
                f"jaxkern.{name}: num_segments must be given where segment_ids is traced, "
                f"as {jax.typeof(segment_ids).str_short()} is"
            )
        if segment_ids is None:
            raise TypeError(f"jaxkern.{name}: segment_ids must be an array, got None")
        ids = np.asarray(segment_ids)
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise TypeError(f"jaxkern.{name}: segment_ids must be of an integer type, got {ids.dtype}{list(ids.shape)}")
        rows = max(int(ids.max()) + 1, 0) if ids.size else 0
    elif export.is_symbolic_dim(num_segments):
        return num_segments
    else:
        rows = validate.integer(name, "num_segments", num_segments)
    if rows < 0:
        raise ValueError(f"jaxkern.{name}: num_segments must not be negative, got {rows}")
    x64 = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    most = np.iinfo(np.int64 if x64 or num_segments is not None else np.int32).max
    if rows > most:  # without x64 ids beyond int32 name no row of their own
        raise ValueError(
            f"jaxkern.{name}: num_segments must be at most {most}, got {rows}"
            f"{'' if num_segments is not None else ' from segment_ids'}"
        )
    return rows


@functools.partial(jax.jit, static_argnames=("name", "compute", "rows", "rules"), inline=True)
def _segment_jit(data, segment_ids, *order, name, compute, rows, rules):
    """compute(name, data, ids, *order, rows, rules) of data of shape (count, ...) and ids of shape (count,)."""
    ids = integers(name, "segment_ids", segment_ids)
    if ids.ndim == 1 and data.shape[:1] == ids.shape:
        return compute(name, data, ids, *order, rows=rows, rules=rules)
    tail = data.shape[1:]
    try:
        data = jnp.broadcast_to(data, (*ids.shape, *tail))
    except ValueError:
        raise ValueError(
            f"jaxkern.{name}: data of shape {data.shape} does not fit segment_ids of shape {ids.shape}"
        ) from None
    flat = validate.mergeable(data, ids.ndim).reshape(math.prod(ids.shape), *tail)
    flat_ids = validate.mergeable(ids, ids.ndim).reshape(-1)
    y = compute(name, flat, flat_ids, *order, rows=rows, rules=rules)
    return y.reshape(data.shape) if compute is softmax else y


def _reduced(prim, booleans=True):
    def compute(name, data, *at, rows, rules):
        if data.dtype == jnp.bool_ and not booleans:
            raise TypeError(f"jaxkern.{name}: data must not be boolean, got bool{list(data.shape)}")
        return primitive.segment(prim, data, *at, rows=rows, rules=rules)

    return compute


total = _reduced(primitive.segment_sum_p, booleans=False)
product = _reduced(primitive.segment_prod_p, booleans=False)
largest = _reduced(primitive.segment_max_p)
smallest = _reduced(primitive.segment_min_p)


def softmax(name, data, *at, rows, rules):
    return segment_softmax(validate.floating(name, data, "data"), *at, rows=rows, rules=rules)


def mean(name, data, *at, rows, rules):
    dtype = data.dtype if jnp.issubdtype(data.dtype, jnp.inexact) else jnp.dtype(jnp.float32)
    total = primitive.segment_sum(data.astype(computing(dtype)), *at, rows=rows, rules=rules)
    count = primitive.segment_sum(jnp.ones(at[0].shape, jnp.int32), *at, rows=rows, rules=rules)
    count = jnp.maximum(count, 1).reshape(rows, *[1] * (data.ndim - 1))
    return (total / count.astype(total.dtype)).astype(dtype)
