"""While loops that tests share: name, make(shape, dtype, seed), which returns (run, operands).

run(loop, *operands) calls loop(cond_fun, body_fun, init_val) once. It is written for a lane, `per_lane` runs it by JAX, and for
arrays of lanes, as `jaxkern.while_loop` takes it. Operands are arrays of lanes, or scalars.
"""

import jax
import jax.numpy as jnp
import numpy as np


def _real(rng, dtype, *shape):
    return np.asarray(rng.uniform(0.2, 4, shape), dtype)


def newton(shape, dtype, seed=0):
    """Square roots, how many steps each takes, and relative errors. Some lanes take none, one is NaN.

    In 16 bits the error is at most 0.014 in the end. It is carried because XLA computes the condition of JAX's loop twice, and may
    round the two differently: a lane whose error is close to the tolerance would never end.
    """
    rng = np.random.default_rng(seed)
    a = _real(rng, dtype, *shape)
    if a.size > 2:
        a.flat[0], a.flat[1] = 1, np.nan

    def run(loop, a, tolerance):
        error = lambda x: jnp.abs(x * x - a) / a

        def step(c):
            x = 0.5 * (c[0] + a / c[0])
            return x, c[1] + 1, error(x)

        one = jnp.ones_like(a)
        return loop(lambda c: c[2] > tolerance, step, (one, 0 * jnp.int32(a), error(one)))

    return run, [a, np.asarray(0.02 if np.dtype(dtype).itemsize == 2 else 1e-5, dtype)]


def integrator(shape, dtype, seed=0):
    """Steps of Bogacki and Shampine of a size of their own in each lane."""
    rng = np.random.default_rng(seed)

    def run(loop, y, rate, end):
        f = lambda t, y: rate * jnp.cos(rate * t) - y

        def step(state):
            t, y, h, n = state
            h = jnp.minimum(h, end - t)
            k1 = f(t, y)
            k2 = f(t + h / 2, y + h / 2 * k1)
            k3 = f(t + 3 * h / 4, y + 3 * h / 4 * k2)
            new = y + h * (2 / 9 * k1 + 1 / 3 * k2 + 4 / 9 * k3)
            k4 = f(t + h, new)
            error = jnp.abs(h * (-5 / 72 * k1 + 1 / 12 * k2 + 1 / 9 * k3 - 1 / 8 * k4)) / 1e-3
            accepted = error <= 1
            scale = jnp.clip(0.9 * jnp.maximum(error, 1e-6) ** (-1 / 3), 0.2, 5)
            return jnp.where(accepted, t + h, t), jnp.where(accepted, new, y), h * scale, n + 1

        zero = jnp.zeros_like(y)
        return loop(lambda s: s[0] < end, step, (zero, y, zero + 0.1, jnp.int32(zero)))

    return run, [_real(rng, dtype, *shape), _real(rng, dtype, *shape), np.asarray(1, dtype)]


def sampler(shape, dtype, seed=0):
    """Rejection by a generator of random bits in the loop: integers, a boolean carry, a branch."""
    rng = np.random.default_rng(seed)

    def run(loop, bits):
        def body(c):
            bits, found, x = c
            bits = bits ^ (bits << 13)
            bits = bits ^ (bits >> 17)
            bits = bits ^ (bits << 5)
            u = (bits >> 8).astype(jnp.float32) * 2.0**-24
            return bits, u * u < 0.3 * u, u.astype(dtype)

        return loop(lambda c: ~c[1], body, (bits, bits == 0, bits.astype(dtype) * 0))

    return run, [rng.integers(1, 1 << 32, shape).astype(np.uint32)]


def collatz(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)

    def run(loop, n):
        half = lambda n: jnp.where(n % 2 == 0, n // 2, 3 * n + 1)
        return loop(lambda c: c[0] > 1, lambda c: (half(c[0]), c[1] + jnp.int16(1)), (n, jnp.int16(0 * n)))

    return run, [rng.integers(0, 1000, shape).astype(np.int32)]


FUNCTIONS = {f.__name__: f for f in (newton, integrator, sampler, collatz)}


def per_lane(run, operands):
    """What JAX makes of `run` by vmap over all dimensions of lanes, as a function of the operands."""
    rank = max(map(np.ndim, operands))
    f = lambda *xs: run(jax.lax.while_loop, *xs)
    for _ in range(rank):
        f = jax.vmap(f, [0 if np.ndim(x) == rank else None for x in operands])
    return f


def over_arrays(cond_fun, body_fun, init_val):
    """The same loops as JAX programs of arrays have them: `any` joins lanes, and a selection keeps those that are done."""

    def body(c):
        going = cond_fun(c)
        return jax.tree.map(lambda new, old: jnp.where(going, new, old), body_fun(c), c)

    return jax.lax.while_loop(lambda c: jnp.any(cond_fun(c)), body, init_val)
