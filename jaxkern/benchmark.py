"""benchmark: the time of a function beside XLA's time and the time of a copy."""

from __future__ import annotations

import dataclasses
import statistics
import typing
from collections.abc import Callable

import jax
import jax.core
import jax.numpy as jnp

from jaxkern import algorithms
from jaxkern._core import arrays, timing, validate

__all__ = ["Benchmark", "benchmark"]


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
        if self.device == "cpu":
            text += ": XLA ran both here, and no kernel"
        elif self.us < 1.25 * self.enqueue_us:
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
    operands = tuple(
        timing.random_array(x, k) if isinstance(x, jax.ShapeDtypeStruct) else x for k, x in enumerate(given)
    )
    copies = [
        jax.jit(jnp.copy).lower(x).compile() for x in operands
    ]  # they run at once, also while something is traced
    first = tuple(copied(x) for copied, x in zip(copies, operands))
    ours = jax.jit(function).lower(*first).compile()
    with algorithms.force_xla():
        xla = jax.jit(function).lower(*first).compile()
    results = ours(*first)
    moved = sum(x.nbytes for x in (*first, *results))
    count = timing.copies_of(moved)

    device = next((next(iter(x.devices())) for x in (*results, *first)), jax.devices()[0])
    place = jax.sharding.SingleDeviceSharding(device)
    source = jax.jit(lambda: jnp.ones(max(1, moved // 2), jnp.uint8), out_shardings=place).lower().compile()
    sources = [(source(),) for _ in range(count)]
    sets = [first, *(tuple(copied(x) for copied, x in zip(copies, operands)) for _ in range(count - 1))]
    copy = jax.jit(jnp.copy).lower(*sources[0]).compile()

    candidates = [timing.Candidate(ours, sets), timing.Candidate(xla, sets), timing.Candidate(copy, sources)]
    for _ in range(repeats):
        for candidate in candidates:
            candidate.read()
    us, xla_us, copy_us = (statistics.median(c.readings) for c in candidates)
    return Benchmark(us, xla_us, copy_us, moved, statistics.median(candidates[0].enqueueing), device.device_kind)
