"""Bodies of scans that tests share: name, (make, whether it has a gradient).

make(shape, length, dtype, seed) returns (run, operands): run(scan, *operands) scans with `jaxkern.scan` or `jax.lax.scan`.
"""

import jax
import jax.numpy as jnp
import numpy as np


def _real(rng, dtype, *shape):
    return np.asarray(rng.normal(size=shape) * 0.5, dtype)


def recurrence(shape, length, dtype, seed=0):
    rng = np.random.default_rng(seed)
    a = np.asarray(rng.uniform(0.2, 0.9, (length, *shape)), dtype)

    def run(scan, h, a, x):
        return scan(lambda h, ax: (ax[0] * h + ax[1],) * 2, h, (a, x))

    return run, [_real(rng, dtype, *shape), a, _real(rng, dtype, length, *shape)]


def advantages(shape, length, dtype, seed=0):
    rng = np.random.default_rng(seed)
    done = rng.random((length, *shape)) < 0.2

    def run(scan, last, rewards, values, done):
        def body(carry, x):
            advantage, after = carry
            reward, value, done = x
            go_on = 1 - done.astype(value.dtype)
            advantage = reward + 0.99 * after * go_on - value + 0.95 * 0.99 * go_on * advantage
            return (advantage, value), advantage

        return scan(body, (jnp.zeros_like(last), last), (rewards, values, done), reverse=True)[1]

    return run, [
        _real(rng, dtype, *shape),
        _real(rng, dtype, length, *shape),
        _real(rng, dtype, length, *shape),
        done,
    ]


def gated(shape, length, dtype, seed=0):
    """A recurrent unit with a weight and a bias for each feature, and a scalar."""
    rng = np.random.default_rng(seed)
    features = shape[-1:]

    def run(scan, c, w, b, scale, x, f):
        def body(c, xf):
            x, f = xf
            forget = jax.nn.sigmoid(f + w * c + b)
            c = forget * c + (1 - forget) * x
            return c, jnp.tanh(c) * scale

        return scan(body, c, (x, f))

    operands = [_real(rng, dtype, *shape), _real(rng, dtype, *features), _real(rng, dtype, *features)]
    operands += [np.asarray(0.75, dtype), _real(rng, dtype, length, *shape), _real(rng, dtype, length, *shape)]
    return run, operands


def heston(shape, length, dtype, seed=0):
    """Heston's model: steps without results, a step size for each step, scalars of the model."""
    rng = np.random.default_rng(seed)

    def run(scan, s, v, kappa, theta, dt, z, w):
        def body(carry, x):
            s, v, n = carry
            dt, z, w = x
            positive = jnp.maximum(v, 0)
            s = s * jnp.exp(-0.5 * positive * dt + jnp.sqrt(positive * dt + 1e-6) * z)
            v = v + kappa * (theta - positive) * dt + 0.3 * jnp.sqrt(positive * dt + 1e-6) * w
            return (s, v, n + 1), None

        return scan(body, (s, v, jnp.int32(0)), (dt, z, w))[0]

    scalars = [np.asarray(x, dtype) for x in (1.5, 0.04)]
    operands = [np.ones(shape, dtype), np.full(shape, 0.04, dtype), *scalars, np.full(length, 0.01, dtype)]
    return run, [*operands, _real(rng, dtype, length, *shape), _real(rng, dtype, length, *shape)]


@jax.custom_jvp
def spike(v):
    return (v > 0).astype(v.dtype)


spike.defjvp(lambda p, t: (spike(*p), t[0] / (1 + jnp.abs(p[0])) ** 2))


def neurons(shape, length, dtype, seed=0):
    rng = np.random.default_rng(seed)

    def run(scan, v, decay, current):
        def body(v, i):
            v = decay * v + i
            s = spike(v - 0.5)
            return jnp.where(s > 0, v - 0.5, v), s

        return scan(body, v, current)

    return run, [_real(rng, dtype, *shape), np.asarray(0.9, dtype), _real(rng, dtype, length, *shape)]


def average(shape, length, dtype, seed=0):
    rng = np.random.default_rng(seed)

    def run(scan, m, x):
        return scan(lambda m, x: ((0.9 * m + 0.1 * x).astype(m.dtype),) * 2, m, x)

    return run, [_real(rng, dtype, *shape), _real(rng, dtype, length, *shape)]


def shapes(shape, length, dtype, seed=0):
    """Carries of several shapes, a transposed result, places, a carry in float32, a branch."""
    rng = np.random.default_rng(seed)

    def run(scan, a, b, x):
        def body(carry, x):
            a, b, s, n = carry
            a = a * 0.5 + b + x[:, None] * jnp.arange(a.shape[1]).astype(a.dtype)
            s = s + a.astype(s.dtype)
            b = jax.lax.cond(n % 2 == 0, lambda b: b * 0.5, lambda b: b + 1, b)
            return (a, b, s, n + 1), (a.T, b, n)

        (a, b, s, _), (y, z, n) = scan(body, (a, b, jnp.zeros(a.shape, jnp.float32), jnp.int32(3)), x)
        return a, b, s, y, z, n

    rows, columns = shape
    return run, [_real(rng, dtype, *shape), _real(rng, dtype, columns), _real(rng, dtype, length, rows)]


def counters(shape, length, dtype, seed=0):
    """Integers, booleans, and elements that are the same in all lanes."""
    rng = np.random.default_rng(seed)

    def run(scan, n, flag, x, k):
        def body(carry, xk):
            n, flag, total = carry
            x, k = xk
            n = jnp.where(flag, n * 3 + k.astype(n.dtype), n ^ x)
            return (n, flag ^ (x > 4), total + k), (n, flag, total)

        return scan(body, (n, flag, np.int16(0)), (x, k))

    integer = lambda *s: rng.integers(0, 9, s)
    operands = [integer(*shape).astype(np.uint32), rng.random(shape) < 0.5, integer(length, *shape).astype(np.uint32)]
    return run, [*operands, integer(length).astype(np.int16)]


def plain(shape, length, dtype, seed=0):
    """Lanes without a carry, elements that are returned as they are, numbers that are the same in all steps."""
    rng = np.random.default_rng(seed)

    def run(scan, x, k):
        def body(n, xk):
            x, k = xk
            return n + 1, (x, 2 * x, k, n, jnp.float32(3))

        return scan(body, jnp.int32(0), (x, k))

    return run, [_real(rng, dtype, length, *shape), rng.integers(0, 9, length).astype(np.int8)]


def _complex(rng, dtype, *shape):
    wide = np.float64 if dtype == "float64" else np.float32
    return _real(rng, wide, *shape) + np.asarray(1j, np.result_type(wide, np.complex64)) * _real(rng, wide, *shape)


def _decays(rng, dtype, *shape):
    """Complex numbers of magnitude below one. Loops that multiply by them stay bounded, and so do errors of rounding."""
    kind = np.complex128 if dtype == "float64" else np.complex64
    return np.asarray(rng.uniform(0.2, 0.9, shape) * np.exp(1j * rng.uniform(-3, 3, shape)), kind)


def oscillators(shape, length, dtype, seed=0):
    """A diagonal state space layer: complex carries, a decay and weights for each feature, a real input."""
    rng = np.random.default_rng(seed)

    def run(scan, h, a, b, w, x):
        def body(h, x):
            h = a * h + b * (w * x)  # the gradient of w takes real parts of a carry
            return h, jnp.real(jnp.conj(b) * h).astype(x.dtype)

        return scan(body, h, x)[1]

    features = shape[-1:]
    operands = [_complex(rng, dtype, *shape), _decays(rng, dtype, *features), _complex(rng, dtype, *features)]
    return run, [*operands, _real(rng, dtype, *features), _real(rng, dtype, length, *shape)]


def modes(shape, length, dtype, seed=0):
    """The operations on complex numbers that kernels have, in a body that is not affine."""
    rng = np.random.default_rng(seed)

    def run(scan, h, w, x, a):
        def body(h, xa):
            x, a = xa
            h = jnp.exp(w) * a * h + x.astype(h.dtype) + jnp.where(x > 0, h, -h) / (3 + h.imag)
            y = jnp.abs(2 + h) + jnp.real(jnp.log(3 + h) + (2 + h) ** 3 - jnp.square(a)) + (h == a)
            return h * 0.5, y

        h, y = scan(body, h, (x, a))
        return h.real, jnp.abs(2 + h), y

    # Carries stay within the unit circle: half of 0.9 + 0.5 + 1 / 2 at most.
    x = np.clip(_real(rng, dtype, length, *shape), -0.5, 0.5)
    operands = [_decays(rng, dtype, *shape), np.log(_decays(rng, dtype, *shape[-1:])), x]
    return run, [*operands, _decays(rng, dtype, length, *shape)]


def scalars(shape, length, dtype, seed=0):
    """A single lane."""
    rng = np.random.default_rng(seed)
    return lambda scan, s, x: scan(lambda s, x: (s * 0.5 + x, s), s, x), [
        np.asarray(0.5, dtype),
        _real(rng, dtype, length),
    ]


def walk(shape, length, dtype, seed=0):
    """A key that is split in the body, and a loop and a branch in it."""

    def run(scan, key, x, drift):
        def body(carry, _):
            key, x = carry
            key, sub = jax.random.split(key)
            word = jax.random.key_data(key)[0]
            x = x + drift * jax.random.normal(sub, x.shape, jnp.float32).astype(x.dtype)
            x = jax.lax.fori_loop(0, 3, lambda _, x: 0.9 * x, x)
            x = jax.lax.cond(word % 2 == 0, lambda x: jnp.where(x > 1, x - 1, x), lambda x: x * table, x)
            return (key, x), word

        table = np.arange(1, 1 + x.shape[-1]).astype(x.dtype) / x.shape[-1]
        (key, x), words = scan(body, (key, x), None, length=length)
        return jax.random.key_data(key), x, words

    rng = np.random.default_rng(seed)
    return run, [jax.random.key(seed), _real(rng, dtype, *shape), _real(rng, dtype, *shape[-1:])]


def orbit(shape, length, dtype, seed=0):
    """A state whose columns are taken apart and put together, a key for each step."""

    def run(scan, state, keys):
        def body(state, key):
            x, v = state[..., :2], state[..., 2:]
            kick = jax.random.uniform(jax.random.wrap_key_data(key), v.shape[-1:], jnp.float32)
            v = v - 0.1 * x / (1 + jnp.sum(x * x, -1, keepdims=True)) + 0.1 * kick.astype(v.dtype)
            state = jnp.concatenate([x + 0.1 * v, v[..., ::-1]], -1)
            return state, jnp.stack([state[..., 0], state[..., 3]])

        return scan(body, state, keys)

    rng = np.random.default_rng(seed)
    keys = jax.random.key_data(jax.random.split(jax.random.key(seed), length))
    return run, [_real(rng, dtype, *shape, 4), keys]


def hidden(shape, length, dtype, seed=0):
    """The forward algorithm of a hidden Markov model of 3 states: a matrix, whose dimensions are both the state's."""
    rng = np.random.default_rng(seed)

    def run(scan, state, transitions, emissions):
        def body(state, emission):
            state = jax.nn.logsumexp(state[..., :, None] + transitions, -2) + emission
            return state.astype(emission.dtype), state[..., 0]

        return scan(body, state, emissions)

    operands = [_real(rng, dtype, *shape, 3), _real(rng, dtype, 3, 3) - np.asarray(1, dtype)]
    return run, [*operands, _real(rng, dtype, length, *shape, 3)]


def spreading(shape, length, dtype, seed=0):
    """Carries that broadcast into larger ones: a scalar into one for each feature, and both into one for each lane."""
    rng = np.random.default_rng(seed)

    def run(scan, s, v, h, x, z):
        def body(carry, xz):
            s, v, h = carry
            x, z = xz
            s = z * s / 2 + z  # its cotangent is a sum over lanes, multiplied by z in every step
            v = jnp.where(z > 0, s * v, v - s)
            h = h * v + s * x
            return (s, v, h), (jnp.tanh(h), v, s)

        return scan(body, (s, v, h), (x, z))

    operands = [_real(rng, dtype), _real(rng, dtype, *shape[-1:]), _real(rng, dtype, *shape)]
    return run, [*operands, _real(rng, dtype, length, *shape), _real(rng, dtype, length)]


def pieces(shape, length, dtype, seed=0):
    """Gates and a column that are cut out of x, weights out of w, a carry of two halves, and a result with zeros behind it."""
    rng = np.random.default_rng(seed)
    *rows, n = shape
    n = max(n, 20)  # elements of a shorter dimension are taken apart one by one

    def run(scan, s, w, x):
        def body(s, x):
            forget, value = jax.nn.sigmoid(x[..., :n]), x[..., n : 2 * n]
            q, p = s[..., :n], s[..., n:]
            p = forget * p + (1 - forget) * value - w[:n] * q
            q = q + w[n:] * p * x[..., 2 * n :]
            s = jnp.concatenate([q, p], -1) * (1 - jnp.arange(2 * n, dtype=s.dtype) / (3 * n))
            return s, (jnp.pad(p, ((0, 0),) * len(rows) + ((0, n),)), jnp.sin(x[..., 2 * n]))

        return scan(body, s, x)

    # Weights are small, so that carries stay below 3. Where they grow to 400, the cosine of one has no digits of a bfloat16.
    w = np.asarray(np.clip(_real(rng, dtype, 2 * n), -0.25, 0.25), dtype)
    return run, [_real(rng, dtype, *rows, 2 * n), w, _real(rng, dtype, length, *rows, 2 * n + 1)]


def indexed(shape, length, dtype, seed=0):
    """Elements of a small state, and of a table, that an index chooses, reads and writes of a ring, an update at a known index."""
    rng = np.random.default_rng(seed)

    def run(scan, s, table, k):
        def body(carry, k):
            s, n = carry
            chosen = jnp.take_along_axis(s, k[..., None], -1, mode="fill", fill_value=2)[..., 0]
            chosen = jnp.where(1 / jnp.full_like(table, -0.0)[n % 7] < 0, chosen, 0)  # the sign of 0 stays
            s = (0.9 * s).at[..., 0].set(chosen * table.at[k].get(mode="clip"))
            k = n.astype(np.uint32) - np.uint32(2)  # beyond 2^31 at first
            s = s.at[..., n % 5].set(s[..., (n + 2) % 5] + jax.lax.dynamic_index_in_dim(table, k, 0, False))
            return (0.5 * s.at[..., -1].add(chosen), n + 1), (chosen, s[..., 1])

        return scan(body, (s, jnp.int32(0)), k)

    return run, [
        _real(rng, dtype, *shape, 5),
        _real(rng, dtype, 7),
        rng.integers(0, 5, (length, *shape)).astype(np.int32),
    ]


FUNCTIONS = {
    f.__name__: (f, differentiable)
    for f, differentiable in (
        (recurrence, True),
        (advantages, True),
        (gated, True),
        (heston, True),
        (neurons, True),
        (average, True),
        (shapes, False),
        (counters, False),
        (plain, True),
        (scalars, True),
        (oscillators, True),
        (modes, True),
        (walk, True),
        (orbit, True),
        (hidden, True),
        (spreading, True),
        (pieces, True),
        (indexed, True),
    )
}
