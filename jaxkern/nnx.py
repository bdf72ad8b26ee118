"""Layers of flax.nnx that compute with jaxkern: RMSNorm, LayerNorm, GroupNorm, BatchNorm, Embed and MultiHeadAttention.

    import jaxkern.nnx
    norm = jaxkern.nnx.RMSNorm(512, dtype=jnp.bfloat16, rngs=rngs)      # in place of nnx.RMSNorm(...)

Each class is a subclass of flax's class of the same name, and overrides only the computation. Arguments, defaults, parameters,
their metadata, the state and the random numbers are flax's, so checkpoints fit both. A call that jaxkern has no function for, such as
a norm whose statistics cover a named axis (`axis_name`), runs flax's code.
"""

import functools
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jax.typing import ArrayLike, DTypeLike

import jaxkern

try:
    from flax import nnx
    from flax.nnx.nn import dtypes
except ImportError as error:
    raise ImportError("jaxkern.nnx needs flax: pip install flax") from error

__all__ = ["BatchNorm", "Embed", "GroupNorm", "LayerNorm", "MultiHeadAttention", "RMSNorm", "dot_product_attention"]


# ---- norms


def _operands(layer, x, *parameters):
    """(x, the arrays of these parameters or None, the dtype of the result), by the layer's rules of promotion.

    flax rounds x and the parameters to `layer.dtype` first. jaxkern's kernels read each in its own dtype, compute in float32 or
    wider, and round once, to the dtype of flax's result.
    """
    x = jnp.asarray(x)
    arrays = [None if p is None else p[...] for p in parameters]
    promote = getattr(layer, "promote_dtype", dtypes.promote_dtype)  # flax 0.12.0 has no choice
    if promote is not dtypes.promote_dtype:
        x, *arrays = promote((x, *arrays), dtype=layer.dtype)
    return x, arrays, dtypes.canonicalize_dtype(x, *arrays, dtype=layer.dtype)


def _real(x, dtype) -> bool:
    """Whether x is an array of real numbers, and the result too."""
    return jnp.issubdtype(dtype, jnp.floating) and not jnp.issubdtype(x.dtype, jnp.complexfloating)


def _axes(x, axes):
    """Axes as a sorted list of numbers that are not negative, or None if one is out of bounds."""
    axes = tuple(axes) if isinstance(axes, Iterable) else (axes,)
    inside = all(-x.ndim <= axis < x.ndim for axis in axes)
    return sorted({axis % x.ndim for axis in axes}) if inside else None


def _of_rows(function, layer, x, mask, **parameters):
    """`function` of x with the options of the layer, or None if it has no such norm."""
    x, arrays, dtype = _operands(layer, x, *parameters.values())
    rows, features = _axes(x, layer.reduction_axes), _axes(x, layer.feature_axes)
    if layer.axis_name is not None or not _real(x, dtype) or not rows or features is None:
        return None
    shape = [x.shape[axis] if axis in features else 1 for axis in rows]
    for name, array in zip(parameters, arrays):
        if array is None:
            parameters[name] = None
        elif set(features) <= set(rows) and array.size == math.prod(shape):
            parameters[name] = array.reshape(shape)
        else:
            return None
    return function(x, **parameters, axis=tuple(rows), eps=layer.epsilon, where=mask, dtype=dtype)


class RMSNorm(nnx.RMSNorm):
    """`flax.nnx.RMSNorm` by `jaxkern.rms_norm`, with the same arguments, parameters and state.

    It runs flax's code with `axis_name`, for complex numbers, and with `feature_axes` outside of `reduction_axes`. With a `mask`, a
    row without elements is 0, where flax has NaN.

    >>> from flax import nnx
    >>> import jax.numpy as jnp, jaxkern.nnx
    >>> norm = jaxkern.nnx.RMSNorm(2, rngs=nnx.Rngs(0))
    >>> [round(v, 3) for v in norm(jnp.array([3.0, 4.0])).tolist()]
    [0.849, 1.131]
    """

    def __call__(self, x: ArrayLike, mask: jax.Array | None = None) -> jax.Array:
        y = _of_rows(jaxkern.rms_norm, self, x, mask, scale=self.scale)
        return super().__call__(x, mask=mask) if y is None else y


class LayerNorm(nnx.LayerNorm):
    """`flax.nnx.LayerNorm` by `jaxkern.layer_norm`, with the same arguments, parameters and state.

    The variance is the mean of squared deviations, whatever `use_fast_variance` says. The rest is as for `RMSNorm`.

    >>> from flax import nnx
    >>> import jax.numpy as jnp, jaxkern.nnx
    >>> norm = jaxkern.nnx.LayerNorm(2, use_bias=False, rngs=nnx.Rngs(0))
    >>> [round(v, 3) for v in norm(jnp.array([3.0, 4.0])).tolist()]
    [-1.0, 1.0]
    """

    def __call__(self, x: ArrayLike, *, mask: jax.Array | None = None) -> jax.Array:
        y = _of_rows(jaxkern.layer_norm, self, x, mask, scale=self.scale, bias=self.bias)
        return super().__call__(x, mask=mask) if y is None else y


class GroupNorm(nnx.GroupNorm):
    """`flax.nnx.GroupNorm` by `jaxkern.group_norm`, with the same arguments, parameters and state.

    The variance is the mean of squared deviations, whatever `use_fast_variance` says. It runs flax's code with a `mask`, with
    `axis_name`, for complex numbers, and with `reduction_axes` other than all axes but the first.

    >>> from flax import nnx
    >>> import jax.numpy as jnp, jaxkern.nnx
    >>> norm = jaxkern.nnx.GroupNorm(4, num_groups=2, rngs=nnx.Rngs(0))
    >>> [round(v, 3) for v in norm(jnp.array([[1.0, 3.0, 10.0, 30.0]]))[0].tolist()]
    [-1.0, 1.0, -1.0, 1.0]
    """

    def __call__(self, x: ArrayLike, *, mask: jax.Array | None = None) -> jax.Array:
        wide, (scale, bias), dtype = _operands(self, x, self.scale, self.bias)
        axes = range(1, wide.ndim) if self.reduction_axes is None else _axes(wide, self.reduction_axes)
        if (
            mask is not None
            or self.axis_name is not None
            or not _real(wide, dtype)
            or wide.ndim < 2
            or list(axes or ()) != list(range(1, wide.ndim))
            or wide.shape[-1] != self.num_groups * self.group_size
        ):
            return super().__call__(x, mask=mask)
        return jaxkern.group_norm(wide, self.num_groups, scale, bias, eps=self.epsilon, dtype=dtype)


class BatchNorm(nnx.BatchNorm):
    """`flax.nnx.BatchNorm` by `jaxkern.batch_norm`, with the same arguments, parameters and state.

    It runs flax's code with the running average, which needs no statistics of x, and with a `mask`, with `axis_name`, for complex
    numbers, and with several axes. The new running averages have no derivative.

    >>> from flax import nnx
    >>> import jax.numpy as jnp, jaxkern.nnx
    >>> norm = jaxkern.nnx.BatchNorm(2, momentum=0.5, rngs=nnx.Rngs(0))
    >>> [[round(v, 3) for v in row] for row in norm(jnp.array([[1.0, 5.0], [3.0, 9.0]])).tolist()]
    [[-1.0, -1.0], [1.0, 1.0]]
    >>> norm.mean[...].tolist(), norm.var[...].tolist()
    ([1.0, 3.5], [1.0, 2.5])
    """

    def __call__(
        self, x: ArrayLike, use_running_average: bool | None = None, *, mask: jax.Array | None = None
    ) -> jax.Array:
        running = self.use_running_average if use_running_average is None else use_running_average
        wide, (_, _, scale, bias), dtype = _operands(self, x, self.mean, self.var, self.scale, self.bias)
        axis = self.axis
        if (
            running is None  # an error of flax
            or running
            or mask is not None
            or self.axis_name is not None
            or not _real(wide, dtype)
            or not isinstance(axis, int)
            or _axes(wide, axis) is None
            or wide.shape[axis] != self.num_features
        ):
            return super().__call__(x, use_running_average, mask=mask)
        y, mean, var = jaxkern.batch_norm(wide, scale, bias, channel_axis=axis, eps=self.epsilon, dtype=dtype)
        for average, new in ((self.mean, mean), (self.var, var)):
            average[...] = self.momentum * average[...] + (1 - self.momentum) * jax.lax.stop_gradient(new)
        return y


# ---- embedding


class Embed(nnx.Embed):
    """`flax.nnx.Embed` by `jaxkern.embedding_lookup`, with the same arguments, parameters and state; `attend` is flax's.

    Rows are looked up before they are converted to `dtype`. The gradient of the table therefore is a sum in float32, or in the
    dtype of the table if that is wider, and bitwise reproducible. It runs flax's code with `out_sharding`, and for tables of integers
    or of one row.

    >>> from flax import nnx
    >>> import jax.numpy as jnp, jaxkern.nnx
    >>> embed = jaxkern.nnx.Embed(5, 3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    >>> y = embed(jnp.array([[0, 1], [4, -1]]))
    >>> y.shape, str(y.dtype), bool((y[1, 0] == y[1, 1]).all())
    ((2, 2, 3), 'bfloat16', True)
    """

    def __call__(self, inputs: jax.Array, out_sharding=None) -> jax.Array:
        if out_sharding is not None:
            return super().__call__(inputs, out_sharding)
        table = self.embedding[...]
        kinds = jnp.issubdtype(inputs.dtype, jnp.integer), jnp.issubdtype(table.dtype, jnp.inexact)
        if not all(kinds) or self.num_embeddings == 1:
            return super().__call__(inputs)
        rows = jaxkern.embedding_lookup(table, inputs)
        return self.promote_dtype((rows,), dtype=self.dtype, inexact=False)[0]


# ---- attention


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: PrecisionLike = None,
    module: nnx.Module | None = None,
    promote_dtype: Callable[..., tuple[jax.Array, ...]] = dtypes.promote_dtype,
    is_causal: bool = False,
) -> jax.Array:
    """softmax(q k / sqrt(depth) + bias) v: `flax.nnx.dot_product_attention` with `jaxkern.softmax`.

    One kernel applies scale, bias, mask, softmax and dropout.

    Logits are float32 or wider, as in `jax.nn.dot_product_attention`, which flax calls without dropout. A query whose keys are all
    masked has the result 0; in flax it is the mean of all values. Dropout takes the same key as flax's, but drops other elements.

    Args:
        query: [batch..., queries, heads, depth].
        key: [batch..., keys, key heads, depth]; the number of key heads divides the number of heads.
        value: [batch..., keys, key heads, value depth].
        bias, mask: arrays that broadcast to [batch..., heads, queries, keys]. Elements where the mask is 0 are masked.
        is_causal: query i sees keys 0 .. i.
        broadcast_dropout, dropout_rng, dropout_rate, deterministic, dtype, precision, module, promote_dtype: as in flax.

    Returns:
        Array [batch..., queries, heads, value depth] of the promoted dtype.

    Raises:
        ValueError: shapes do not match; `dropout_rate` is not in [0, 1), or is not 0 without `dropout_rng`.

    >>> import jax, jax.numpy as jnp, jaxkern.nnx
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 8, 4, 16))
    >>> jaxkern.nnx.dot_product_attention(q, k[:, :, :2], v[:, :, :2], is_causal=True).shape
    (2, 8, 4, 16)
    """
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    _check_shapes(query, key, value)
    *batch, queries, heads, depth = query.shape
    keys, key_heads = key.shape[-3:-1]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    g = ""
    if heads != key_heads:  # several heads share a key head
        g, query = "g", query.reshape(*batch, queries, key_heads, heads // key_heads, depth)
    product = functools.partial(jnp.einsum, precision=precision)
    logits = product(f"...qh{g}d,...khd->...h{g}qk", query, key, preferred_element_type=wide)
    logits = logits.reshape(*batch, heads, queries, keys) if g else logits

    where = None if mask is None else jnp.asarray(mask).astype(bool)
    if is_causal and queries != keys:  # with `causal` of softmax, the last query sees all keys
        triangle = jnp.tril(jnp.ones((queries, keys), bool))
        where, is_causal = triangle if where is None else where & triangle, False
    if bias is not None and not jnp.issubdtype(jnp.result_type(bias), jnp.floating):
        bias = jnp.asarray(bias, wide)

    def softmax(x, where, bias, **dropout):
        options = {"scale": depth**-0.5, "causal": is_causal, "dtype": query.dtype}
        return jaxkern.softmax(x, where=where, bias=bias, **options, **dropout)

    drops = not deterministic and dropout_rate != 0
    if not drops:
        weights = softmax(logits, where, bias)
    else:
        apply = functools.partial(softmax, dropout_rate=dropout_rate, dropout_key=dropout_rng)
        weights = (_over_matrices(apply) if broadcast_dropout else apply)(logits, where, bias)
    if module is not None:  # the weights before dropout, as in flax
        module.sow(nnx.Intermediate, "attention_weights", softmax(logits, where, bias) if drops else weights)

    weights = weights.reshape(*batch, key_heads, heads // key_heads, queries, keys) if g else weights
    y = product(f"...h{g}qk,...khd->...qh{g}d", weights, value)
    return y.reshape(*batch, queries, heads, value.shape[-1]) if g else y


def _check_shapes(query, key, value):
    q, k, v = query.shape, key.shape, value.shape
    if not len(q) == len(k) == len(v) >= 3:
        fault = "query, key and value must have the same rank, 3 or more"
    elif not q[:-3] == k[:-3] == v[:-3]:
        fault = "batch dims of query, key and value must match"
    elif k[-3] != v[-3]:
        fault = "key and value lengths must match"
    elif k[-2] != v[-2]:
        fault = "key and value heads must match"
    elif q[-1] != k[-1]:
        fault = "query and key depths must match"
    elif k[-2] == 0 or q[-2] % k[-2]:
        fault = "the number of query heads must be a multiple of the number of key heads"
    else:
        return
    raise ValueError(f"jaxkern.nnx.dot_product_attention: {fault}; got shapes {q}, {k} and {v}")


def _over_matrices(f):
    """f(x, *others) on the last two dimensions of x, under vmap over all others, so that each matrix drops the same elements.

    The other operands are None or broadcast to x.
    """

    def over(x, *others):
        if x.ndim == 2:
            return f(x, *others)
        one = lambda a: a is not None and a.ndim == x.ndim and a.shape[0] == 1
        others = [a[0] if one(a) else a for a in others]
        axes = [0 if a is not None and a.ndim == x.ndim else None for a in others]
        return jax.vmap(over, (0, *axes))(x, *others)

    return over


class MultiHeadAttention(nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` with `jaxkern.softmax`, with the same arguments, parameters and state.

    `attention_fn` is `jaxkern.nnx.dot_product_attention` unless it is given, and the norms of `normalize_qk` are
    `jaxkern.nnx.LayerNorm`. All other computation is flax's.

    >>> from flax import nnx
    >>> import jax.numpy as jnp, jaxkern.nnx
    >>> layer = jaxkern.nnx.MultiHeadAttention(num_heads=4, in_features=32, decode=False, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 8, 32)), mask=nnx.make_causal_mask(jnp.ones((2, 8)))).shape
    (2, 8, 32)
    """

    @functools.wraps(nnx.MultiHeadAttention.__init__)
    def __init__(self, *args, attention_fn=dot_product_attention, **options):
        super().__init__(*args, attention_fn=attention_fn, **options)
        for norm in (self.query_ln, self.key_ln):
            if norm is not None:
                norm.__class__ = LayerNorm  # flax has made them, with parameters and random numbers as they must be
