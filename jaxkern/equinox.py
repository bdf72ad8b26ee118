"""Layers of equinox that compute with jaxkern: RMSNorm, LayerNorm, GroupNorm, Embedding and MultiheadAttention.

    import jaxkern.equinox
    norm = jaxkern.equinox.RMSNorm(512)      # in place of eqx.nn.RMSNorm(512)
    y = jax.vmap(norm)(x)

Each class is a subclass of equinox's class of the same name, and overrides only `__call__`. Arguments, defaults, fields and
random numbers are equinox's: a file of `eqx.tree_serialise_leaves` fits both. A call that jaxkern has no function for, such as one
with complex numbers or with a wrong shape, runs equinox's code, which raises equinox's errors.

`eqx.nn.BatchNorm` takes its statistics over a named axis of `vmap`, across which no kernel sees the batch. It has no counterpart.
"""

import functools
import math
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

import jaxkern

try:
    import equinox as eqx
except ImportError as error:
    raise ImportError("jaxkern.equinox needs equinox: pip install equinox") from error

__all__ = ["Embedding", "GroupNorm", "LayerNorm", "MultiheadAttention", "RMSNorm"]

_NO_STATE = object()


def _with(y, state):
    """The result of a layer that has no state: y, or (y, state) if a state was given."""
    return y if state is _NO_STATE else (y, state)


def _fits(layer, x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and x.shape == layer.shape != ()


def _add(y, bias):
    return y + bias


class RMSNorm(eqx.nn.RMSNorm):
    """`equinox.nn.RMSNorm` by `jaxkern.rms_norm`, with the same arguments and fields. One kernel adds the bias, too.

    >>> import jax, jax.numpy as jnp, jaxkern.equinox
    >>> y = jax.vmap(jaxkern.equinox.RMSNorm(2))(jnp.array([[3.0, 4.0]]))
    >>> [round(v, 3) for v in y[0].tolist()]
    [0.849, 1.131]
    """

    @jax.named_scope("jaxkern.equinox.RMSNorm")
    def __call__(self, x: jax.Array, state: typing.Any = _NO_STATE, *, key: jax.Array | None = None) -> typing.Any:
        if not _fits(self, x):
            return _with(super().__call__(x), state)
        bias = {} if self.bias is None else {"epilogue": _add, "epilogue_args": [self.bias]}
        return _with(jaxkern.rms_norm(x, self.weight, axis=None, eps=self.eps, **bias), state)


class LayerNorm(eqx.nn.LayerNorm):
    """`equinox.nn.LayerNorm` by `jaxkern.layer_norm`, with the same arguments and fields.

    >>> import jax, jax.numpy as jnp, jaxkern.equinox
    >>> y = jax.vmap(jaxkern.equinox.LayerNorm(2))(jnp.array([[3.0, 4.0]]))
    >>> [round(v, 3) for v in y[0].tolist()]
    [-1.0, 1.0]
    """

    @jax.named_scope("jaxkern.equinox.LayerNorm")
    def __call__(self, x: jax.Array, state: typing.Any = _NO_STATE, *, key: jax.Array | None = None) -> typing.Any:
        if not _fits(self, x):
            return _with(super().__call__(x), state)
        return _with(jaxkern.layer_norm(x, self.weight, self.bias, axis=None, eps=self.eps), state)


class GroupNorm(eqx.nn.GroupNorm):
    """`equinox.nn.GroupNorm` by `jaxkern.group_norm`, with the same arguments and fields.

    >>> import jax, jax.numpy as jnp, jaxkern.equinox
    >>> y = jax.vmap(jaxkern.equinox.GroupNorm(2, channels=4))(jnp.array([[1.0, 3.0, 10.0, 30.0]]))
    >>> [round(v, 3) for v in y[0].tolist()]
    [-1.0, 1.0, -1.0, 1.0]
    """

    @jax.named_scope("jaxkern.equinox.GroupNorm")
    def __call__(self, x: jax.Array, state: typing.Any = _NO_STATE, *, key: jax.Array | None = None) -> typing.Any:
        channels = x.shape[0] if x.ndim else 0
        whole = channels and channels % self.groups == 0 and self.weight is None or channels == self.channels
        if not (whole and jnp.issubdtype(x.dtype, jnp.floating)):
            return _with(super().__call__(x), state)
        options = {"channel_axis": 0, "batch_axes": (), "eps": self.eps}
        return _with(jaxkern.group_norm(x, self.groups, self.weight, self.bias, **options), state)


class Embedding(eqx.nn.Embedding):
    """`equinox.nn.Embedding` by `jaxkern.index_select`, with the same arguments and fields.

    Under `jax.vmap` all indices are looked up together, and the gradient of `weight` is one sum, bitwise reproducible. As in
    equinox, an index out of range stands for the nearest one.

    >>> import jax, jax.numpy as jnp, jaxkern.equinox
    >>> embed = jaxkern.equinox.Embedding(5, 3, key=jax.random.key(0))
    >>> y = jax.vmap(embed)(jnp.array([0, 4, -1, 7]))
    >>> y.shape, bool((y[1:] == embed.weight[4]).all())
    ((4, 3), True)
    """

    @jax.named_scope("jaxkern.equinox.Embedding")
    def __call__(self, x: ArrayLike, *, key: jax.Array | None = None) -> jax.Array:
        if not (jnp.shape(x) == () and jnp.issubdtype(jnp.result_type(x), jnp.integer)):
            return super().__call__(x)
        index = jnp.asarray(x)[None]
        return jaxkern.index_select(self.weight, 0, index, mode="promise_in_bounds")[0]


class MultiheadAttention(eqx.nn.MultiheadAttention):
    """`equinox.nn.MultiheadAttention` with `jaxkern.softmax`, which applies scale, mask and dropout in the same kernel.

    Arguments and fields are equinox's, and `__call__` has one argument more: with `causal=True`, the last query sees all keys,
    the query before it all but one, and so on. The kernel reads no logits that this excludes, and no mask is needed. A query whose
    keys are all masked has weights of 0; in equinox they are equal. Dropout takes the same key as equinox's, but drops other elements.

    >>> import jax, jax.numpy as jnp, jaxkern.equinox
    >>> layer = jaxkern.equinox.MultiheadAttention(4, 32, key=jax.random.key(0))
    >>> x = jnp.ones((2, 8, 32))
    >>> jax.vmap(lambda x: layer(x, x, x, causal=True))(x).shape
    (2, 8, 32)
    """

    @jax.named_scope("jaxkern.equinox.MultiheadAttention")
    def __call__(
        self,
        query: jax.Array,
        key_: jax.Array,
        value: jax.Array,
        mask: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None,
        causal: bool = False,
    ) -> jax.Array:
        name, given = "jaxkern.equinox.MultiheadAttention", {"query": query, "key_": key_, "value": value}
        for argument, x in given.items():
            if x.ndim != 2:
                raise ValueError(f"{name}: {argument} must be [length, size], got {x.shape}. For a batch, use jax.vmap")
        if key_.shape[0] != value.shape[0]:
            raise ValueError(f"{name}: key_ and value must have one length, got shapes {key_.shape} and {value.shape}")
        shape = self.num_heads, query.shape[0], key_.shape[0]
        if mask is not None and mask.shape not in (shape, shape[1:]):
            raise ValueError(f"{name}: mask must have shape {shape[1:]} or {shape}, got {mask.shape}")
        projections = self.query_proj, self.key_proj, self.value_proj
        heads = [jax.vmap(f)(x).reshape(x.shape[0], self.num_heads, -1) for f, x in zip(projections, given.values())]
        if process_heads is not None:
            shapes = [x.shape for x in heads]
            heads = process_heads(*heads)
            if [x.shape for x in heads] != shapes:
                raise ValueError(f"{name}: process_heads must not change the shapes of the heads, {shapes}")
        queries, keys, values = heads
        # As in equinox, the scale is applied before the product, which could overflow in float16.
        logits = jnp.einsum("qhd,khd->hqk", queries / math.sqrt(queries.shape[-1]), keys)
        dropout = {} if deterministic is None else {"deterministic": deterministic}
        softmax = functools.partial(jaxkern.softmax, where=None if mask is None else mask.astype(bool), causal=causal)
        rate, off = self.dropout.p, self.dropout.inference if inference is None else inference
        if not off and isinstance(rate, float) and rate < 1 and key is not None and deterministic is None:
            weights = softmax(logits, dropout_rate=rate, dropout_key=key)
        else:  # equinox does nothing, raises an error, or has a rate that is not known yet
            weights = self.dropout(softmax(logits), key=key, inference=inference, **dropout)
        attended = jnp.einsum("hqk,khd->qhd", weights, values)
        return jax.vmap(self.output_proj)(attended.reshape(query.shape[0], -1))
