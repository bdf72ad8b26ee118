"""Caches separate what depends on JAX's settings and on the GPU: a program is lowered as in a process that never had other settings."""

import contextlib
import functools
import gc
from unittest import mock

import jax
import jax.numpy as jnp

import jaxkern
from jaxkern._core import compat, device, switch

SETTINGS = {
    "plain": contextlib.nullcontext,
    "64-bit types": lambda: compat.enable_x64(True),
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "another GPU": lambda: mock.patch.object(device, "this_device", lambda: device.A100),
}


def clear():
    for cache in gc.get_objects():
        if isinstance(cache, functools._lru_cache_wrapper) and (cache.__module__ or "").startswith("jaxkern"):
            cache.cache_clear()


@jax.custom_jvp
def ramp(x):
    return jnp.tanh(x)


@ramp.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return jnp.tanh(x), t * jnp.expand_dims(jnp.arange(x.shape[-1]), range(x.ndim - 1)).astype(x.dtype)


def loss(x, labels):
    return jnp.mean(jax.nn.logsumexp(x, axis=-1) - jnp.take_along_axis(x, labels[:, None], axis=-1)[:, 0])


def rows(x, _):
    y = ramp(x)
    return jnp.sum(jnp.sin(y / jnp.sum(y * y, -1, keepdims=True)) + jax.nn.log_softmax(x, axis=-1))


def scattered(x, labels):
    return jnp.sum(jnp.sin(jnp.zeros((9, 3), x.dtype).at[labels].add(jax.nn.silu(x[labels, :3]) * x[:, 3:6])))


def test_a_program_is_the_same_after_others():
    types = jax.ShapeDtypeStruct((64, 128), "float32"), jax.ShapeDtypeStruct((64,), "int32")

    def lowered(setting):
        # A function that JAX has not traced.
        gradient = jax.grad(lambda *args: loss(*args) + rows(*args) + scattered(*args))
        with SETTINGS[setting](), jaxkern.accelerate(only=switch.OPERATIONS, force=True):
            text = jax.jit(gradient).trace(*types).lower(lowering_platforms=("cuda",)).as_text()
            return text, [d.reason for d in jaxkern.explain(gradient, "cuda")(*types)]

    cold = {}
    for setting in SETTINGS:
        clear()
        cold[setting] = lowered(setting)
    for order in (list(SETTINGS), list(SETTINGS)[::-1]):
        clear()
        for setting in order:
            assert lowered(setting) == cold[setting], f"{setting} in {order}"
