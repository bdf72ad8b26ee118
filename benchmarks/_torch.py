"""PyTorch as a peer: optional, in the same process, on the same bytes.

JAX arrays are handed over through DLPack, so both libraries read the very same buffers.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax


@functools.cache
def torch() -> Any:
    """The torch module where it is installed and has the device that JAX runs on, else None."""
    try:
        import torch as module
    except Exception:  # a broken installation is as good as none
        return None
    if jax.default_backend() == "gpu" and not module.cuda.is_available():
        return None
    return module


def available() -> bool:
    return torch() is not None


@functools.cache
def geometric() -> Any:
    """The torch_geometric module where it is installed beside `torch()`, else None."""
    if torch() is None:
        return None
    try:
        import torch_geometric  # pyright: ignore[reportMissingImports]
    except Exception:
        return None
    return torch_geometric


def share(x: jax.Array) -> Any:
    """The tensor over `x`'s own memory, or random numbers of its shape where DLPack refuses it."""
    x.block_until_ready()  # the two libraries use different streams
    t = torch()
    try:
        return t.from_dlpack(x)
    except Exception as error:
        _tell(f"benchmarks: no DLPack between JAX and PyTorch ({error}); PyTorch gets its own random numbers")
        device = "cuda" if jax.default_backend() == "gpu" else "cpu"
        if x.dtype == "uint8":
            return (t.rand(x.shape, device=device) < 0.2).to(t.uint8)
        return t.randn(x.shape, device=device, dtype=getattr(t, x.dtype.name))


@functools.cache
def _tell(message: str) -> None:
    """Once."""
    print(message, file=sys.stderr)


def sync(_: Any = None) -> None:
    if torch().cuda.is_available():
        torch().cuda.synchronize()


def release() -> None:
    """Gives cached memory back, so that JAX can have it."""
    if available() and torch().cuda.is_available():
        torch().cuda.empty_cache()


def event_times(call: Callable[[], Any], calls: int, replays: int = 5) -> list[float]:
    """Microseconds a call, by CUDA events around replays of a graph of `calls` calls.

    The way out where the profiler does not see PyTorch's kernels. Gaps between the kernels of a graph
    (about 1 us each) are in the figure, so it is an upper bound for small kernels.
    """
    t = torch()
    t.cuda.synchronize()
    graph = t.cuda.CUDAGraph()
    kept = []
    with t.cuda.graph(graph, capture_error_mode="thread_local"):  # XLA has threads of its own
        for _ in range(calls):
            kept.append(call())
    graph.replay()
    t.cuda.synchronize()
    times = []
    for _ in range(replays):
        begin, end = (t.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    del kept
    return [statistics.median(times)] if len(times) < 3 else times
