"""Programs for `benchmarks/programs.py` whose rows are written by hand: norms, masked softmax and losses in plain JAX.

Each function returns (loss, parameters of a key, data), as in _loops.py.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def _weights(key: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    keys = jax.random.split(key, len(shapes))
    normal = lambda k, n: jax.random.normal(k, n) / n[-2] ** 0.5
    return {name: jnp.ones(n) if len(n) == 1 else normal(k, n) for k, (name, n) in zip(keys, shapes.items())}


def _cast(params: Any, dtype: str) -> Any:
    return jax.tree.map(lambda a: a.astype(dtype), params)


def _tokens(batch: int, length: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    draw = lambda: rng.integers(0, classes, (batch, length)).astype(np.int32)
    return draw(), draw()


def _rms_norm(x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    variance = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(variance + 1e-6)).astype(x.dtype) * scale


def _layer_norm(x: Any, scale: Any, bias: Any) -> Any:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.square(wide - mean).mean(-1, keepdims=True)
    return ((wide - mean) / jnp.sqrt(variance + 1e-6)).astype(x.dtype) * scale + bias


def _heads(x: Any, heads: int) -> Any:
    return x.reshape(*x.shape[:-1], heads, -1)


def _softmax(scores: Any, dtype: Any) -> Any:
    e = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    return (e / e.sum(-1, keepdims=True)).astype(dtype)


def _experts(p: Any, x: Any, chosen: int) -> Any:
    """SwiGLU of the `chosen` best experts of each token, whose products are grouped by expert."""
    tokens = x.reshape(-1, x.shape[-1])
    weights, experts = jax.lax.top_k(jax.nn.softmax((tokens @ p["router"]).astype(jnp.float32), axis=-1), chosen)
    weights = weights / weights.sum(-1, keepdims=True)
    order = jnp.argsort(experts.reshape(-1))
    sizes = jnp.bincount(experts.reshape(-1), length=p["router"].shape[-1])
    of = order // chosen
    y = tokens[of]
    y = jax.nn.silu(jax.lax.ragged_dot(y, p["gate"], sizes)) * jax.lax.ragged_dot(y, p["up"], sizes)
    y = jax.lax.ragged_dot(y, p["down"], sizes) * weights.reshape(-1)[order][:, None].astype(x.dtype)
    return jnp.zeros_like(tokens).at[of].add(y).reshape(x.shape)


def llama(dtype: str, small: bool, experts: int = 0, cudnn: bool = False) -> tuple[Any, ...]:
    """Touvron et al., "LLaMA", 2023: RMSNorm, rotary embeddings, masked softmax, SwiGLU and the loss of labels.

    experts: how many there are, two for each token, as in Jiang et al., "Mixtral of Experts", 2024. cudnn: attention is one call.
    """
    layers, batch, length, width, heads, classes = (2, 2, 16, 32, 4, 64) if small else (8, 8, 1024, 1024, 16, 32000)
    hidden = 4 * width

    def params(key):
        square = dict.fromkeys("qkvo", (width, width))
        own = (experts,) if experts else ()
        shapes = square | {"gate": (*own, width, hidden), "up": (*own, width, hidden), "down": (*own, hidden, width)}
        shapes |= {"attention_norm": (width,), "norm": (width,)} | ({"router": (width, experts)} if experts else {})
        *keys, last = jax.random.split(key, layers + 1)
        outer = _weights(last, {"table": (classes, width), "norm": (width,), "head": (width, classes)})
        return outer | {"layers": [_weights(k, shapes) for k in keys]}

    def rotated(x):
        half = x.shape[-1] // 2
        angles = jnp.arange(length)[:, None] / 10000.0 ** (jnp.arange(half) / half)
        cos, sin = (f(angles)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    def attention(p, x):
        q, k, v = (_heads(x @ p[n], heads) for n in "qkv")
        if cudnn:  # CPUs do not have it
            own = "cudnn" if jax.default_backend() == "gpu" else None
            mixed = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True, implementation=own)
            return mixed.reshape(x.shape) @ p["o"]
        scores = jnp.einsum("bqhd,bkhd->bhqk", rotated(q), rotated(k)).astype(jnp.float32)
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = _softmax(jnp.where(causal, scores * (width // heads) ** -0.5, -1e30), x.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p["o"]

    def loss(p, tokens, labels):
        p = _cast(p, dtype)
        x = p["table"][tokens]
        for layer in p["layers"]:
            x = x + attention(layer, _rms_norm(x, layer["attention_norm"]))
            y = _rms_norm(x, layer["norm"])
            if experts:
                x = x + _experts(layer, y, 2)
            else:
                x = x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
        logits = (_rms_norm(x, p["norm"]) @ p["head"]).astype(jnp.float32)
        log_probabilities = jax.nn.log_softmax(logits, axis=-1)
        return -jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1).mean()

    return loss, params, _tokens(batch, length, classes)


def t5(dtype: str, small: bool) -> tuple[Any, ...]:
    """Raffel et al., "T5", 2020, an encoder: norms without bias, a learned bias of positions, one-hot labels, z-loss."""
    layers, batch, length, width, heads, classes = (2, 2, 16, 32, 4, 64) if small else (6, 16, 512, 768, 12, 32128)

    def params(key):
        shapes = dict.fromkeys("qkvo", (width, width)) | {"up": (width, 4 * width), "down": (4 * width, width)}
        shapes |= {"attention_norm": (width,), "norm": (width,)}
        *keys, last = jax.random.split(key, layers + 1)
        outer = {"table": (classes, width), "bias": (heads, 2 * length), "norm": (width,), "head": (width, classes)}
        return _weights(last, outer) | {"layers": [_weights(k, shapes) for k in keys]}

    def loss(p, tokens, labels):
        p = _cast(p, dtype)
        x = p["table"][tokens]
        distance = jnp.arange(length)[:, None] - jnp.arange(length) + length
        bias = p["bias"][:, distance].astype(jnp.float32)
        for layer in p["layers"]:
            y = _rms_norm(x, layer["attention_norm"])
            q, k, v = (_heads(y @ layer[n], heads) for n in "qkv")
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) + bias
            mixed = jnp.einsum("bhqk,bkhd->bqhd", _softmax(scores, x.dtype), v)
            x = x + mixed.reshape(x.shape) @ layer["o"]
            x = x + jax.nn.relu(_rms_norm(x, layer["norm"]) @ layer["up"]) @ layer["down"]
        logits = (_rms_norm(x, p["norm"]) @ p["head"]).astype(jnp.float32)
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.sum(jax.nn.one_hot(labels, classes) * logits, axis=-1)
        return jnp.mean(normalizer - picked + 1e-4 * jnp.square(normalizer))

    return loss, params, _tokens(batch, length, classes)


def vision(dtype: str, small: bool) -> tuple[Any, ...]:
    """Dosovitskiy et al., "ViT", 2021, from patches on: LayerNorm with bias, GELU, softmax."""
    layers, batch, length, width, heads, classes = (2, 2, 16, 32, 4, 10) if small else (8, 64, 256, 768, 12, 1000)

    def params(key):
        shapes = dict.fromkeys("qkvo", (width, width)) | {"up": (width, 4 * width), "down": (4 * width, width)}
        shapes |= dict.fromkeys(("scale1", "bias1", "scale2", "bias2"), (width,))
        *keys, last = jax.random.split(key, layers + 1)
        return _weights(last, {"head": (width, classes)}) | {"layers": [_weights(k, shapes) for k in keys]}

    def loss(p, x, labels):
        p = _cast(p, dtype)
        x = x.astype(dtype)
        for layer in p["layers"]:
            y = _layer_norm(x, layer["scale1"], layer["bias1"])
            q, k, v = (_heads(y @ layer[n], heads) for n in "qkv")
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
            mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)
            x = x + mixed.reshape(x.shape) @ layer["o"]
            x = x + jax.nn.gelu(_layer_norm(x, layer["scale2"], layer["bias2"]) @ layer["up"]) @ layer["down"]
        logits = (x.mean(1) @ p["head"]).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1).mean()

    rng = np.random.default_rng(0)
    patches = rng.normal(size=(batch, length, width)).astype(np.float32)
    return loss, params, (patches, rng.integers(0, classes, batch).astype(np.int32))


def capped(dtype: str, small: bool) -> tuple[Any, ...]:
    """Scores and logits of Gemma 2 (2024), which are capped by tanh, with norms of `1 + scale`, after and before."""
    layers, batch, length, width, heads, classes = (2, 2, 16, 32, 4, 64) if small else (4, 8, 1024, 1024, 8, 32768)

    def norm(x, scale):
        wide = x.astype(jnp.float32)
        wide = wide * jnp.reciprocal(jnp.sqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6))
        return (wide * (1 + scale.astype(jnp.float32))).astype(x.dtype)

    def params(key):
        shapes = dict.fromkeys("qkvo", (width, width)) | {"up": (width, 4 * width), "down": (4 * width, width)}
        shapes |= dict.fromkeys(("before1", "after1", "before2", "after2"), (width,))
        *keys, last = jax.random.split(key, layers + 1)
        return _weights(last, {"table": (classes, width)}) | {"layers": [_weights(k, shapes) for k in keys]}

    def loss(p, tokens, labels):
        p = _cast(p, dtype)
        x = p["table"][tokens] * width**0.5
        causal = jnp.arange(length)[:, None] >= jnp.arange(length)
        for layer in p["layers"]:
            y = norm(x, layer["before1"])
            q, k, v = (_heads(y @ layer[n], heads) for n in "qkv")
            scores = 50.0 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 50.0)
            weights = jax.nn.softmax(jnp.where(causal, scores, -2.0e30), axis=-1).astype(x.dtype)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
            x = x + norm(mixed @ layer["o"], layer["after1"])
            y = norm(x, layer["before2"])
            x = x + norm(jax.nn.gelu(y @ layer["up"]) @ layer["down"], layer["after2"])
        logits = 30.0 * jnp.tanh((x @ p["table"].T).astype(jnp.float32) / 30.0)
        log_probabilities = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.sum(jax.nn.one_hot(labels, classes) * log_probabilities, axis=-1))

    return loss, params, _tokens(batch, length, classes)


def sampling(dtype: str, small: bool) -> tuple[Any, ...]:
    """(init, step, data): a token of each row of logits, by temperature, the 50 best, the best of 90 %, and chance."""
    rows, classes, best = (4, 500, 10) if small else (128, 128_256, 50)
    logits = (3 * np.random.default_rng(0).normal(size=(rows, classes))).astype(dtype)

    def step(key, logits):
        key, own = jax.random.split(key)
        x = logits / 0.8
        x = jnp.where(x < jax.lax.top_k(x, best)[0][:, -1:], -jnp.inf, x)
        ordered = jnp.sort(x, axis=-1)[:, ::-1]
        before = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1) - jax.nn.softmax(ordered, axis=-1)
        least = jnp.min(jnp.where(before < 0.9, ordered, jnp.inf), axis=-1, keepdims=True)
        token = jax.random.categorical(own, jnp.where(x < least, -jnp.inf, x))
        return key, token.astype(jnp.float32).mean()

    return lambda: jax.random.key(0), step, (logits,)


PROGRAMS = {
    "llama": llama,
    "llama with experts": functools.partial(llama, experts=8),
    "llama with cudnn": functools.partial(llama, cudnn=True),
    "t5 encoder": t5,
    "vision transformer": vision,
    "capped transformer": capped,
}
