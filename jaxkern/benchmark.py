"""benchmark: the time of a function beside XLA's time and the time of a copy."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
import time
import typing
from collections.abc import Callable

import jax
import jax.core
import jax.numpy as jnp

from jaxkern import algorithms
from jaxkern._core import arrays, validate

__all__ = ["Benchmark", "benchmark"]

COLD = 192 << 20  # bytes that calls touch before they come back to the same array: three times the L2 of an H200
COPIES = 256  # copies of the operands, at most. If these do not add up to COLD, the host limits the calls anyway.
READING = 0.01  # seconds that a reading of the clock takes at least
ENQUEUED = 16  # calls of a reading whose enqueueing is timed; JAX lets the host be 32 calls ahead


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Times of a call in microseconds, each the median of several readings.

    Attributes:
        us: `jax.jit(f)`.
        xla_us: `jax.jit(f)` under `jaxkern.algorithms.force_xla()`.
        copy_us: a copy that reads and writes `bytes` in total.
        bytes: the sizes of the operands and results of `f`.
        enqueue_us: the time that the host takes to enqueue a call of `jax.jit(f)`. No other time can be below it.
        device: the device that ran the calls.
    """

    us: float
    xla_us: float
    copy_us: float
    bytes: int
    enqueue_us: float
    device: str

    @property
    def of_copy(self) -> float:
        """The speed of `f` as a fraction of a copy's speed."""
        return self.copy_us / self.us

    @property
    def over_xla(self) -> float:
        """How many times as fast as XLA's operations `f` is."""
        return self.xla_us / self.us

    def __str__(self) -> str:
        text = (
            f"{self.us:.4g} us, {self.over_xla:.3g} times as fast as XLA ({self.xla_us:.4g} us), {self.of_copy:.2f} of a copy "
            f"of {self.bytes / 1e6:.3g} MB ({self.copy_us:.4g} us), {self.device}"
        )
        if self.device != "cpu" and self.us < 1.25 * self.enqueue_us:
            text += f"; the host takes {self.enqueue_us:.3g} us to enqueue a call, and bounds the times"
        return text


def benchmark(f: Callable, *args: typing.Any, repeats: int = 20) -> Benchmark:
    """Times `jax.jit(f)(*args)` on the current device, beside XLA's operations and a copy of as many bytes.

    The clock is the host's, around calls that are enqueued one after the other and waited for once, at the end. Each reading
    takes 10 ms or one call; the three candidates take turns. Calls go round copies of the operands, and their results are
    kept, so that neither is found in the L2. A call that takes less than 10 to 20 microseconds is shorter than the time
    in which Python enqueues it, and cannot be timed this way: `enqueue_us` is that time, and the text says so.
    It takes memory for these copies and results: about 600 MB, and for larger operands three times what f needs. On a CPU the
    numbers are the CPU's, where jaxkern has no kernels.

    Args:
        f: a function of arrays, or of pytrees of arrays.
        args: its arguments. A `jax.ShapeDtypeStruct` among them becomes a random array: normal numbers, integers from 0 to 99
            (or as many as the dtype has), or bools. Pass arrays where values matter, as indices and labels do. What
            is neither array nor `jax.ShapeDtypeStruct` is passed to f as it is.
        repeats: how many readings each time is the median of.

    Returns:
        A `Benchmark`: the times `us`, `xla_us` and `copy_us` in microseconds, the `bytes` of operands and results, each counted
        once, and the fractions `of_copy` and `over_xla`. Printed, it is one line.

    Raises:
        TypeError: `f` is not callable, or `repeats` is not an int.
        ValueError: `repeats` is not positive.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> x = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    >>> found = jaxkern.benchmark(jaxkern.softmax, x, repeats=3)
    >>> found.bytes == 2 * 512 * 1024 * 4 and found.us > 0
    True
    """
    validate.function("benchmark", "f", f)
    if not 0 < (count := validate.integer("benchmark", "repeats", repeats)) < 1 << 31:
        raise ValueError(f"jaxkern.benchmark: repeats must be positive and below 2147483648, got {repeats}")
    return _benchmark(f, args, count)


def _benchmark(f, args, repeats: int) -> Benchmark:
    function, given = arrays.of_arrays(f, args)
    if any(isinstance(x, jax.core.Tracer) for x in given):
        raise TypeError(
            "jaxkern.benchmark: args must be arrays, got traced ones: it cannot be called in a jitted function"
        )
    operands = tuple(_random(x, k) if isinstance(x, jax.ShapeDtypeStruct) else x for k, x in enumerate(given))
    copies = [
        jax.jit(jnp.copy).lower(x).compile() for x in operands
    ]  # they run at once, also while something is traced
    first = tuple(copied(x) for copied, x in zip(copies, operands))
    ours = jax.jit(function).lower(*first).compile()
    with algorithms.force_xla():
        xla = jax.jit(function).lower(*first).compile()
    results = ours(*first)
    moved = sum(x.nbytes for x in (*first, *results))
    count = max(1, min(COPIES, math.ceil(COLD / max(1, moved))))

    device = next((next(iter(x.devices())) for x in (*results, *first)), jax.devices()[0])
    place = jax.sharding.SingleDeviceSharding(device)
    source = jax.jit(lambda: jnp.ones(max(1, moved // 2), jnp.uint8), out_shardings=place).lower().compile()
    sources = [(source(),) for _ in range(count)]
    sets = [first, *(tuple(copied(x) for copied, x in zip(copies, operands)) for _ in range(count - 1))]
    copy = jax.jit(jnp.copy).lower(*sources[0]).compile()

    candidates = [_Candidate(ours, sets), _Candidate(xla, sets), _Candidate(copy, sources)]
    for _ in range(repeats):
        for candidate in candidates:
            candidate.read()
    us, xla_us, copy_us = (statistics.median(c.readings) for c in candidates)
    return Benchmark(us, xla_us, copy_us, moved, statistics.median(candidates[0].enqueueing), device.device_kind)


class _Candidate:
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
        jax.block_until_ready(kept)
        return (time.perf_counter() - start) / calls, (enqueued - start) / timed


def _random(x: jax.ShapeDtypeStruct, seed: int):
    def make():
        key = jax.random.key(seed)
        if jnp.issubdtype(x.dtype, jnp.bool_):
            return jax.random.bernoulli(key, shape=x.shape)
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jax.random.randint(key, x.shape, 0, min(100, jnp.iinfo(x.dtype).max + 1)).astype(x.dtype)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return jax.random.normal(key, x.shape, x.dtype)
        return jax.random.normal(key, x.shape, jnp.float64 if x.dtype == jnp.float64 else jnp.float32).astype(x.dtype)

    return jax.jit(make, out_shardings=x.sharding).lower().compile()()
