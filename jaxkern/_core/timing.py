"""Times of compiled functions by the host's clock, around calls that are enqueued one after the other and waited for once."""

import collections
import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np

COLD = 192 << 20  # bytes that calls touch before they come back to the same array: three times the L2 of an H200
COPIES = 256  # copies of the operands, at most. If these do not add up to COLD, the host limits the calls anyway.
READING = 0.01  # seconds that a reading of the clock takes at least
ENQUEUED = 16  # calls of a reading whose enqueueing is timed; JAX lets the host be 32 calls ahead


def copies_of(moved: int) -> int:
    """How many sets of operands calls go round that move so many bytes, so that they find none in the L2."""
    return max(1, min(COPIES, math.ceil(COLD / max(1, moved))))


class Candidate:
    """A compiled function that is timed on sets of operands, which it goes round."""

    def __init__(self, call, sets):
        self.call, self.sets, self.next = call, sets, 0
        self.readings, self.enqueueing = [], []  # microseconds of a call
        self._seconds(2)  # what the first calls alone have to do
        self.calls = max(1, min(1000, math.ceil(READING / self._seconds(3)[0])))

    def read(self) -> None:
        seconds, enqueue = self._seconds(self.calls)
        self.readings.append(1e6 * seconds)
        self.enqueueing.append(1e6 * enqueue)

    def _seconds(self, calls: int) -> tuple[float, float]:
        """The seconds that a call takes, and those that the host takes to enqueue it."""
        kept = collections.deque(maxlen=len(self.sets))  # results in memory of their own
        timed = min(calls, ENQUEUED)
        start = enqueued = time.perf_counter()
        for k in range(calls):
            kept.append(self.call(*self.sets[self.next]))
            self.next = (self.next + 1) % len(self.sets)
            if k + 1 == timed:
                enqueued = time.perf_counter()
        jax.block_until_ready(list(kept))  # JAX does not look into a deque
        return (time.perf_counter() - start) / calls, (enqueued - start) / timed


def random_array(x: jax.ShapeDtypeStruct, seed: int):
    """An array of this type and sharding: normal numbers, integers from 0 to 99 (or as many as the dtype has), or bools."""
    wide = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    return _random(x.shape, jnp.dtype(x.dtype), x.sharding, wide)(np.uint32(seed))


@functools.lru_cache(maxsize=64)
def _random(shape, dtype, sharding, wide):
    """The compiled function of a seed that makes such an array. wide: whether 64-bit types are on."""
    del wide

    def make(seed):
        key = jax.random.key(seed)
        if jnp.issubdtype(dtype, jnp.bool_):
            return jax.random.bernoulli(key, shape=shape)
        if jnp.issubdtype(dtype, jnp.integer):
            return jax.random.randint(key, shape, 0, min(100, jnp.iinfo(dtype).max + 1)).astype(dtype)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            return jax.random.normal(key, shape, dtype)
        return jax.random.normal(key, shape, jnp.float64 if dtype == jnp.float64 else jnp.float32).astype(dtype)

    return jax.jit(make, out_shardings=sharding).lower(jax.ShapeDtypeStruct((), jnp.uint32)).compile()
