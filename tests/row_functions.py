"""Row functions that tests share: name, function, kinds of its operands, whether it has a gradient.

x: full; c: a number for each column; n: one for each row; s: one; m: a mask that lacks the second dimension; l: a class for each row.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkern._definitions import dropout


def rms_norm(x, w):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w


def layer_norm(x, w, b):
    c = x - jnp.mean(x, -1, keepdims=True)
    return c * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-6) * w + b


def residual(x, r, w, scale):
    h = x + r * scale
    return jax.nn.gelu(rms_norm(h, 1 + w)), h


def loss(x, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(x), labels[..., None], -1)[..., 0]


def smoothed_loss(x, m, labels):
    y = jax.nn.log_softmax(x)
    picked = jnp.take_along_axis(jnp.where(m, y, -3), labels[..., None], -1)[..., 0]
    return jnp.sum(jnp.exp(y) * y, -1) - 0.9 * picked - 0.1 * jnp.mean(y, -1)


def one_hot_loss(x, labels):
    z = jax.nn.logsumexp(x, -1)
    hot = jax.nn.one_hot(labels, x.shape[-1], dtype=x.dtype)
    return z - jnp.sum(hot * x, -1) + 1e-2 * z**2


def masked(x, m):
    return jax.nn.softmax(jnp.where(m, x, -1e30), -1)


def causal(x):
    q, k = (lax.broadcasted_iota(jnp.int32, x.shape[-2:], a) for a in (0, 1))
    return jax.nn.softmax(jnp.where(q >= k, x, -1e30), -1) * (1 + jnp.arange(x.shape[-2], dtype=x.dtype)[:, None])


def band(x):
    q, k = (lax.broadcasted_iota(jnp.int32, x.shape[-2:], d) for d in (0, 1))
    return jax.nn.softmax(jnp.where((k > q) | ~(k > q - 9), -1e30, 2 * x), -1)


def dropped(x):
    key = [jnp.full((1,) * x.ndim, word, jnp.uint32) for word in (1, 2)]
    return jnp.where(dropout.kept(x.shape, x.ndim - 1, key, 20000), jax.nn.softmax(x, -1), 0)


def soft_cap(x):
    x = 5.0 * jnp.tanh(x / 5.0)
    e = jnp.exp(x - lax.stop_gradient(jnp.max(x, -1, keepdims=True)))
    return e / jnp.sum(e, -1, keepdims=True)


def entropy(x, n):
    p = jax.nn.softmax(x * n[..., None], -1)
    return -jnp.sum(p * jnp.log(p + 1e-9), -1)


def totals(x, c):
    return jnp.sum(jax.nn.softmax(x * c) ** 2), jnp.sum(x * x, tuple(range(x.ndim - 1))), jnp.mean(jnp.exp(x), -1)


def extremes(x):
    return jnp.max(x, -1), jnp.min(x, -1, keepdims=True) + 0 * x


def places(x):
    return jnp.argmax(x, -1), jnp.argmin(x, -1), jnp.any(x > 1, -1), jnp.all(x < 2, -1), jnp.sum(x > 0, -1)


def products(x):
    return jnp.prod(jnp.cos(x), -1)


def custom(x):
    return lax.reduce(x, np.zeros((), x.dtype), lambda a, b: jnp.sqrt(a * a + b * b), (x.ndim - 1,))


def pairs(x):
    """The largest number in absolute value, and its place."""

    def larger(a, b):
        takes = (jnp.abs(b[0]) > jnp.abs(a[0])) | ((jnp.abs(b[0]) == jnp.abs(a[0])) & (b[1] < a[1]))
        return jnp.where(takes, b[0], a[0]), jnp.where(takes, b[1], a[1])

    place = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return lax.reduce((x, place), (np.zeros((), x.dtype), np.int32(2**31 - 1)), larger, (x.ndim - 1,))


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.5, 0.5),))


def rules(x, s):
    return clipped(x * s) - lax.stop_gradient(jnp.mean(x, -1, keepdims=True)) * x


def branch(x, s):
    return lax.cond(s > 0, lambda x: x / jnp.sum(jnp.abs(x), -1, keepdims=True), jnp.sin, x)


FUNCTIONS = {
    f.__name__: (f, kinds, differentiable)
    for f, kinds, differentiable in (
        (rms_norm, "xc", True),
        (layer_norm, "xcc", True),
        (residual, "xxcs", True),
        (loss, "xl", True),
        (smoothed_loss, "xml", True),
        (one_hot_loss, "xl", True),
        (masked, "xm", True),
        (causal, "x", True),
        (band, "x", True),
        (dropped, "x", True),
        (soft_cap, "x", True),
        (entropy, "xn", True),
        (totals, "xc", True),
        (extremes, "x", True),
        (places, "x", False),
        (products, "x", True),
        (custom, "x", False),
        (pairs, "x", False),
        (rules, "xs", True),
        (branch, "xs", True),
    )
}


def operands(kinds, shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    real = lambda *shape: np.asarray(rng.normal(size=shape), dtype)
    made = {
        "x": lambda: real(*shape),
        "c": lambda: real(shape[-1]),
        "n": lambda: real(*shape[:-1]),
        "s": lambda: np.asarray(0.75, dtype),
        "m": lambda: rng.random((shape[0], 1, *shape[2:]) if len(shape) > 2 else shape) < 0.7,
        "l": lambda: rng.integers(0, shape[-1], shape[:-1]).astype(np.int32),
    }
    return [made[k]() for k in kinds]
