"""route: the experts of tokens, their weights and their slots. The kernels are in ffi/kernels/select/route.cuh.

    route_p  (logits [tokens, experts])
      ->  weights [tokens, k] like logits, experts int32 [tokens, k], slots int32 [tokens, k], counts int32 [experts]

The results are those of `jaxkern.moe_route`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern._core import compat, launch, validate
from jaxkern._core.define import ceil_div, cpp_bool, cuda_type
from jaxkern._core.dtypes import computing
from jaxkern._core.params import Params
from jaxkern._core.primitive import bind, set_jvp
from jaxkern._core.signature import FLAT, Signature, primitive
from jaxkern._ops.indexing.sort import row_offsets, sort_indices
from jaxkern._ops.select import tuning
from jaxkern._ops.select.elements import taken_along
from jaxkern._ops.select.top_k import loads_of_warp, top_k_p
from jaxkern.reduction import logsumexp

HEADER = "select/route.cuh"
ARGS = Params(HEADER, "RouteArgs")
DTYPES = ("float16", "bfloat16", "float32")
THREADS, WARPS, EXPERTS = 1024, 32, 512


def plan(device, operands, results, *, k, capacity, renormalize) -> launch.Plan | None:
    """The plan for logits [tokens, experts]; None if there is no kernel for them."""
    del results
    (logits,) = operands
    tokens, experts = logits.shape
    blocks = min(device.sm_count, ceil_div(tokens, WARPS))
    run = ceil_div(tokens, blocks * WARPS)
    if experts > EXPERTS or k > tuning.WARP_MOST or run * WARPS >= 2**16:
        return None
    names = ("weights", "experts", "slots", "counts")
    args = ARGS(
        logits=launch.operand(0),
        **{name: launch.result(n) for n, name in enumerate(names)},
        totals=launch.scratch(),
        tokens=tokens,
        width=experts,
        k=k,
        run=run,
        capacity=capacity or 0,
        normalized=renormalize,
    )

    def steps(vectors):
        vector, packs = loads_of_warp(vectors, logits.dtype.itemsize, experts)
        place = f"RoutePlace<{cpp_bool(capacity is not None)}>"
        choose = f"RouteChoose<{cuda_type(logits.dtype)}, {vector}, {packs}>"
        return [launch.Launch(HEADER, name, [args], blocks, THREADS) for name in (choose, place)]

    return launch.planned("warps", steps(True), 4 * blocks * experts, steps(False))


# ---- the primitive


def weights_of(logits, experts, renormalize):
    """The weights of experts that are chosen already; 0 for tokens whose logits are -inf, as in `jaxkern.softmax`."""
    wide = logits.astype(computing(logits.dtype))
    values = taken_along(wide, experts, 1)
    empty = values[:, :1] == -jnp.inf
    if renormalize:
        return jnp.where(empty, 0, jax.nn.softmax(jnp.where(empty, 0, values), -1)).astype(logits.dtype)
    total = logsumexp(wide, axis=-1, keepdims=True)
    # As in softmax, infinity less itself is NaN, and so are all weights beside it.
    total = jnp.where(total == jnp.inf, jnp.nan, jnp.where(empty, 0, total))
    return jnp.exp(values - total).astype(logits.dtype)


def placed(own, experts, counts, capacity):
    """The slot of each token that is number `own` of its expert."""
    if capacity is None:
        return own + (jnp.cumsum(counts) - counts)[experts]
    return jnp.where(own < capacity, experts * capacity + own, -1)


def reference(logits, *, k, capacity, renormalize):
    tokens, all_experts = logits.shape
    _, experts = bind(top_k_p, logits, k=k)
    flat = validate.mergeable(experts, 2).reshape(-1)[None]
    keys, order = sort_indices(flat, rows=all_experts, wrap=False, clip=False)
    first = row_offsets(keys, all_experts).astype(jnp.int32)
    slots = jnp.arange(tokens * k, dtype=jnp.int32)
    if capacity is not None:
        own, expert = slots - first[keys], keys.astype(jnp.int32)
        slots = jnp.where(own < capacity, expert * capacity + own, -1)
    # From the order of experts to that of tokens.
    slots = jnp.zeros_like(slots).at[order].set(slots, unique_indices=True, mode="promise_in_bounds").reshape(tokens, k)
    return [weights_of(logits, experts, renormalize), experts, slots, first[1:] - first[:-1]]


def _batch(prim, operands, dims, params):
    del prim
    return jax.vmap(functools.partial(reference, **params), tuple(dims))(*operands), [0] * 4


def _shard(prim, over, logits, *, k, capacity, renormalize):
    """Each device sends its counts."""
    across = over["tokens"]
    if not across:
        return bind(prim, logits, k=k, capacity=capacity, renormalize=renormalize)
    weights, experts, slots, counts = bind(prim, logits, k=k, capacity=None, renormalize=renormalize)
    each = lax.all_gather(counts, across)
    earlier = jnp.arange(len(each))[:, None] < lax.axis_index(across)
    before = jnp.sum(jnp.where(earlier, each, 0), 0) - (jnp.cumsum(counts) - counts)
    total = jnp.sum(each, 0)
    return [weights, experts, placed(slots + before[experts], experts, total, capacity), total]


route_p = primitive(
    "jaxkern_route",
    Signature(
        {"logits": "any tokens experts"},
        ["logits tokens k", "int32 tokens k", "int32 tokens k", "int32 experts"],
        layout=FLAT,
        exact={"tokens"},
        whole={"experts"},
    ),
    reference,
    batch=_batch,
    shard=_shard,
    plan=plan,
    dtypes=DTYPES,
)


def _jvp(primals, tangents, *, k, capacity, renormalize):
    found = bind(route_p, *primals, k=k, capacity=capacity, renormalize=renormalize)
    _, slope = jax.jvp(lambda x: weights_of(x, found[1], renormalize), primals, tangents)
    return found, [slope, *map(compat.zero_tangent, found[1:])]


set_jvp(route_p, _jvp)
