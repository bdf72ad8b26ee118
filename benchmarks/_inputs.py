"""Inputs that are random and cold.

Zeros can run faster than random data, and an input that is still in the L2 faster than one that is not.
Therefore all inputs are cut from one pool of random numbers per dtype, and a candidate cycles through
enough of them that each is evicted before it is used again. The copy that serves as the baseline reads
the pool itself.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import _timing, _torch

# More than three times the largest last-level cache (60 MB on an H200; a desktop CPU has less).
COLD_BYTES = {"gpu": 192 << 20, "cpu": 96 << 20}
MOST_BUFFERS = 4096  # of the smallest arrays, each of which is a call of JAX; the clock flushes the L2 before each turn
ALIGN = 512  # bytes: as an allocator would place an array


def rotation(nbytes: int) -> int:
    """How many buffers of a size to go round."""
    cold = math.ceil(COLD_BYTES.get(jax.default_backend(), 192 << 20) / max(1, nbytes))
    return max(2, min(MOST_BUFFERS, cold))


class Pool:
    """Random numbers of one dtype, to cut inputs from."""

    def __init__(self, dtype: Any, count: int) -> None:
        self.dtype = jnp.dtype(dtype)
        unit = ALIGN // self.dtype.itemsize
        self.count = -(-count // unit) * unit
        self._unit = unit
        self.data = jax.jit(lambda key: jax.random.normal(key, (self.count,), self.dtype))(jax.random.key(2024))
        self.data.block_until_ready()

    def _start(self, size: int, index: int) -> int:
        """The start of buffer `index` of a size: buffers follow each other, then start again."""
        padded = -(-size // self._unit) * self._unit
        places = max(1, self.count // padded)
        # Later rounds start a little further on, so that no two buffers are equal.
        shift = (index // places) * self._unit
        return min((index % places) * padded + shift, self.count - size) // self._unit * self._unit

    def array(self, shape: tuple[int, ...], index: int) -> jax.Array:
        """A new array of random numbers; different for each index."""
        return _cut(shape)(self.data, self._start(math.prod(shape), index))

    def copy_candidate(self, nbytes: int) -> _timing.Candidate:
        """A plain copy that moves `nbytes`, half of them read and half written."""
        half = nbytes // 2
        if _torch.available() and jax.default_backend() == "gpu":
            return self._torch_copy(half)
        size = max(1, half // self.dtype.itemsize)
        sources = [self.array((size,), i) for i in range(rotation(half))]
        compiled = jax.jit(jnp.copy).lower(sources[0]).compile()
        return _timing.Candidate(
            "copy",
            lambda i: compiled(sources[i % len(sources)]),
            lambda out: jax.block_until_ready(out),
            keep=len(sources),
        )

    def _torch_copy(self, half: int) -> _timing.Candidate:
        source, target = self._tensors
        stride = -(-half // ALIGN) * ALIGN
        places = max(1, source.numel() // stride)
        turns = min(places, rotation(half))

        def call(i: int) -> Any:
            begin = i % turns * stride
            target[begin : begin + half].copy_(source[begin : begin + half])

        return _timing.Candidate("copy", call, _torch.sync, torch=True)

    @functools.cached_property
    def _tensors(self) -> tuple[Any, Any]:
        source = _torch.share(self.data).view(_torch.torch().uint8)
        return source, _torch.torch().empty_like(source)


@functools.cache
def _cut(shape: tuple[int, ...]) -> Any:
    size = math.prod(shape)

    def cut(pool: jax.Array, start: int) -> jax.Array:
        return jax.lax.dynamic_slice(pool, (start,), (size,)).reshape(shape)

    return jax.jit(cut)
