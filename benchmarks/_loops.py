"""Programs of loops for `benchmarks/programs.py`, written as their papers and libraries write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def _normal(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _matrices(key: Any, width: int, names: str) -> dict[str, Any]:
    keys = jax.random.split(key, len(names))
    return {n: jax.random.normal(k, (width, width)) / width**0.5 for n, k in zip(names, keys)}


def _squares(apply: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, x: jnp.square(apply(params, x).astype(jnp.float32)).mean()


def griffin(dtype: str, small: bool) -> tuple[Any, ...]:
    """(loss, parameters of a key, data) of a residual block around a real-gated linear recurrence.

    De et al., "Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient Language Models", 2024. Its
    authors run the recurrence by `lax.scan` on GPUs.
    """
    batch, length, width = (2, 16, 8) if small else (8, 2048, 1024)

    def params(key):
        return _matrices(key, width, "xrigo") | {"decay": jnp.linspace(0.5, 4.0, width)}

    def apply(p, x):
        p = jax.tree.map(lambda a: a.astype(dtype), p)
        x = x.astype(dtype)
        u, gate = x @ p["x"], jax.nn.gelu(x @ p["g"])
        log_a = -8 * jax.nn.sigmoid(u @ p["r"]).astype(jnp.float32) * jax.nn.softplus(p["decay"].astype(jnp.float32))
        a = jnp.exp(log_a / 8)
        b = jnp.sqrt(1 - jnp.square(a) + 1e-6) * (jax.nn.sigmoid(u @ p["i"]) * u).astype(jnp.float32)

        def step(h, ab):
            h = ab[0] * h + ab[1]
            return h, h.astype(dtype)

        along = lambda y: jnp.moveaxis(y, 1, 0)
        h = jax.lax.scan(step, jnp.zeros((batch, width)), (along(a), along(b)))[1]
        return x + (along(h) * gate) @ p["o"]

    return _squares(apply), params, (_normal((batch, length, width)),)


def state_space(dtype: str, small: bool) -> tuple[Any, ...]:
    """The same of diagonal state space layers on `lax.associative_scan`.

    Smith et al., "Simplified State Space Layers for Sequence Modeling", 2023, with real states.
    """
    layers, batch, length, width = (2, 2, 16, 8) if small else (4, 8, 4096, 512)

    def params(key):
        of_layer = lambda k: _matrices(k, width, "bc") | {"decay": jnp.linspace(1.0, 6.0, width)}
        return [of_layer(k) for k in jax.random.split(key, layers)]

    def join(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    def apply(p, x):
        x = x.astype(dtype)
        for layer in p:
            u = x @ layer["b"].astype(dtype)
            a = jnp.broadcast_to(jax.nn.sigmoid(layer["decay"]).astype(dtype), u.shape)
            h = jax.lax.associative_scan(join, (a, u), axis=1)[1]
            x = x + jax.nn.gelu(h) @ layer["c"].astype(dtype)
        return x

    return _squares(apply), params, (_normal((batch, length, width)),)


# Programs without parameters: (init, step, data), as in `programs.Training`.


def advantages(dtype: str, small: bool) -> tuple[Any, ...]:
    """Generalised advantages of PPO as PureJaxRL computes them (Schulman et al., 2016), and their moments."""
    steps, environments = (16, 8) if small else (1024, 16384)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(steps, environments)).astype(dtype) for _ in range(2)]
    done = (rng.random((steps, environments)) < 0.01).astype(dtype)

    def step(last, rewards, values, done):
        def body(carry, x):
            advantage, after = carry
            reward, value, done = x
            delta = reward + 0.99 * after * (1 - done) - value
            advantage = delta + 0.99 * 0.95 * (1 - done) * advantage
            return (advantage, value), advantage

        found = jax.lax.scan(body, (jnp.zeros_like(last), last), (rewards, values, done), reverse=True)[1]
        return 0.9 * last + 0.1 * found[0], jnp.square(found).mean()

    return lambda: jnp.zeros(environments, dtype), step, (*arrays, done)


def walk(dtype: str, small: bool) -> tuple[Any, ...]:
    """Random walks with drift whose noise is drawn in the loop; nothing is stored but their ends."""
    steps, walks = (16, 8) if small else (1000, 262_144)

    def step(state, drift):
        def body(carry, _):
            key, x = carry
            key, sub = jax.random.split(key)
            x = x + drift * 0.01 + 0.1 * jax.random.normal(sub, x.shape, x.dtype)
            return (key, x), None

        (key, x), _ = jax.lax.scan(body, state, length=steps)
        return (key, 0.5 * x), jnp.square(x).mean()

    return lambda: (jax.random.key(0), jnp.zeros(walks, dtype)), step, (np.asarray(0.05, dtype),)


def oscillators(dtype: str, small: bool) -> tuple[Any, ...]:
    """Van der Pol's oscillators by Euler's method in a `fori_loop`."""
    steps, oscillators = (16, 8) if small else (1000, 262_144)
    damping = np.linspace(0.5, 2, oscillators).astype(dtype)

    def step(state, damping):
        def body(_, s):
            x, v = s
            return x + 0.01 * v, v + 0.01 * (damping * (1 - x * x) * v - x)

        x, v = jax.lax.fori_loop(0, steps, body, state)
        return (x, v), jnp.square(x).mean()

    return lambda: (jnp.full(oscillators, 2, dtype), jnp.zeros(oscillators, dtype)), step, (damping,)


def integrator(dtype: str, small: bool) -> tuple[Any, ...]:
    """Van der Pol's oscillators under `vmap`, each with steps of its own size.

    Bogacki and Shampine, "A 3(2) pair of Runge-Kutta formulas", 1989, as libraries of solvers write it: a state of several
    numbers, the norm of its error, the last slope of a step as the first one of the next.
    """
    lanes = 8 if small else 65536
    damping = np.random.default_rng(0).uniform(0.1, 8, lanes).astype(dtype)

    def solve(y, damping):
        slope = lambda y: jnp.stack([y[1], damping * (1 - y[0] ** 2) * y[1] - y[0]])

        def body(state):
            t, h, y, k1 = state
            h = jnp.minimum(h, 2 - t)
            k2 = slope(y + h / 2 * k1)
            k3 = slope(y + 3 / 4 * h * k2)
            new = y + h * (2 / 9 * k1 + 1 / 3 * k2 + 4 / 9 * k3)
            k4 = slope(new)
            error = h * (-5 / 72 * k1 + 1 / 12 * k2 + 1 / 9 * k3 - 1 / 8 * k4)
            scaled = error / (1e-5 + 1e-5 * jnp.maximum(jnp.abs(y), jnp.abs(new)))
            norm = jnp.sqrt(jnp.mean(scaled**2))
            keep = lambda a, b: jnp.where(norm <= 1, a, b)
            return keep(t + h, t), h * jnp.clip(0.9 * norm ** (-1 / 3), 0.2, 5), keep(new, y), keep(k4, k1)

        first = jnp.zeros((), dtype), jnp.asarray(0.01, dtype), y, slope(y)
        return jax.lax.while_loop(lambda state: state[0] < 2, body, first)[2]

    def step(state, damping):
        y = jax.vmap(solve)(state, damping)
        return y, jnp.square(y).mean()

    return lambda: jnp.tile(jnp.asarray([2, 0], dtype), (lanes, 1)), step, (damping,)
