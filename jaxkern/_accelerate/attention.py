"""`jax.nn.dot_product_attention` with its softmax in one kernel each way, between XLA's products.

JAX multiplies the logits, float32, by the scale, writes a large negative number where a mask, the causal limit, a window or
lengths exclude a key, takes the softmax in float32 and rounds it to the type of the keys. XLA reads and writes the logits
several times for this. Here a kernel reads them once, skips what lies beyond the causal limit, and writes the rounded softmax;
the gradient is computed from that. A query that may see no key takes the mean of all values, as in JAX, where all logits of
such a row are equal.

What differs: products with the softmax's gradient have it rounded to the type of the keys, as JAX's own have on the GPU; a
query whose logits are -inf throughout has the result 0, where JAX has NaN; and the gradient of a query whose logits have NaN
leaves the keys that it may not see as they are, where JAX makes those NaN, too.
"""

import functools

import jax
import jax.numpy as jnp

from jaxkern._accelerate import gate
from jaxkern._accelerate.arguments import decide, gated, is_plain
from jaxkern._core import switch
from jaxkern._definitions.softmax_calls import replacement as softmax

NAME = "dot_product_attention"


@switch.own_promotion
def dot_product_attention(
    original,
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    implementation=None,
    return_residual=False,
):
    del original
    arrays = [a for a in (query, key, value, mask, query_seq_lengths, key_value_seq_lengths) if a is not None]
    if (
        bias is not None
        or implementation not in (None, "xla")
        or return_residual is not False
        or not isinstance(is_causal, bool)
        or not (scale is None or isinstance(scale, (int, float)))
        or not all(isinstance(a, jax.Array) for a in arrays)
        or not all(is_plain(a) and a.ndim in (3, 4) for a in (query, key, value))
        or not len({query.ndim, key.ndim, value.ndim}) == len({query.dtype, key.dtype, value.dtype}) == 1
    ):
        return NotImplemented
    lengths = query_seq_lengths, key_value_seq_lengths
    others = mask is not None or is_causal or any(n is not None for n in lengths)
    if local_window_size is not None and not others:
        return NotImplemented  # some versions of JAX ignore a window that is alone
    given = query
    query, key, value = (a if a.ndim == 4 else a[None] for a in (query, key, value))
    batch, queries, heads, width = query.shape
    keys, groups = key.shape[1:3]
    if (
        key.shape != value.shape
        or key.shape != (batch, keys, groups, width)
        or heads % groups
        or not _fits(mask, (batch, heads, queries, keys), jnp.bool_)
        or any(n is not None and (n.shape != (batch,) or n.dtype != jnp.int32) for n in lengths)
    ):
        return NotImplemented  # which JAX refuses, or may
    taken, why = gated(gate.attention, query.dtype, batch * heads * queries, keys)
    decide(NAME, taken, why if taken else f"{why}: {heads} heads of {queries} x {keys}", given)
    if not taken:
        return NotImplemented

    seen = _seen(mask, is_causal and queries != keys, local_window_size, *lengths, queries, keys)
    wide, precision = jnp.promote_types(query.dtype, jnp.float32), _precision(query.dtype)
    grouped = query.reshape(batch, queries, groups, heads // groups, width)
    product = functools.partial(jnp.einsum, "btkgh,bskh->bkgts", grouped, key, preferred_element_type=wide)
    try:
        logits = product(precision=precision)
    except (ValueError, jax.errors.JaxRuntimeError):  # as in JAX: a platform may refuse it, at once outside of jit
        logits = product()
    logits = logits.reshape(batch, heads, queries, keys)
    scale = width**-0.5 if scale is None else float(scale)
    causal = is_causal and queries == keys
    weights = softmax(logits, seen, scale, causal, key.dtype)
    weights = weights.reshape(batch, groups, heads // groups, queries, keys)
    mixed = jnp.einsum("bkgts,bskh->btkgh", weights, value)
    if seen is not None:
        mixed = mixed + _mean_where_blind(seen, causal, value, mixed.shape)
    mixed = mixed.reshape(query.shape)
    if query_seq_lengths is not None:
        mixed = mixed * (jnp.arange(queries) < query_seq_lengths[:, None])[..., None, None].astype(mixed.dtype)
    return mixed.reshape(given.shape)


def _fits(mask, shape, dtype) -> bool:
    if mask is None:
        return True
    lead = (1,) * (4 - mask.ndim) + mask.shape
    return mask.dtype == dtype and len(lead) == 4 and all(a in (1, b) for a, b in zip(lead, shape))


def _precision(dtype):
    """The precision that JAX's own function uses: without it, the products of the gradient are in float32."""
    presets = {"bfloat16": "BF16_BF16_F32", "float16": "F16_F16_F32"}
    return jax.lax.DotAlgorithmPreset[presets[dtype.name]] if dtype.name in presets else None


def _seen(mask, causal, window, query_lengths, key_lengths, queries, keys):
    """Which keys a query may see, (batch or 1, heads or 1, queries or 1, keys or 1); None: all."""
    query, key = jnp.arange(queries)[:, None], jnp.arange(keys)
    parts = [] if mask is None else [mask.reshape((1,) * (4 - mask.ndim) + mask.shape)]
    if causal:
        parts.append((query >= key)[None, None])
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        parts.append(((query <= key + left) & (query >= key - right))[None, None])
    if query_lengths is not None:
        parts.append((query < query_lengths[:, None, None])[:, None])
    if key_lengths is not None:
        parts.append((key < key_lengths[:, None, None])[:, None])
    if not parts:
        return None
    seen = parts[0]
    for part in parts[1:]:
        seen = seen & part
    return seen


def _mean_where_blind(seen, causal, value, shape):
    """The mean of all values for queries that see no key; 0 for others. shape: (batch, queries, groups, heads each, width).

    Heads are broadcast, not repeated: under explicit sharding JAX refuses to repeat along a dimension that is split.
    """
    _, queries, *heads, _ = shape
    if causal:
        seen = seen & jnp.tril(jnp.ones((queries, queries), bool))
    blind = ~jnp.any(seen, -1)  # (batch or 1, heads or 1, queries or 1)
    heads = (1, 1) if blind.shape[1] == 1 else heads
    blind = blind.reshape(blind.shape[0], *heads, blind.shape[2])
    blind = jnp.moveaxis(blind, -1, 1)[..., None]
    mean = jnp.mean(value, 1, keepdims=True)[:, :, :, None]
    return jnp.where(blind, mean, jnp.zeros((), value.dtype))
