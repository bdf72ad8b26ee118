"""Checks the clock: what a trace holds on this machine, and whether its times agree with other clocks.

Run it first on a new machine or a new JAX: a measurement is only as good as the attribution of kernels
to calls.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import _inputs, _run, _timing, _torch

AGREE = 0.05


def main() -> int:
    for key, value in _run.environment().items():
        print(f"{key:14} {value}")
    if jax.default_backend() != "gpu":
        print("no GPU: measurements are host times, and there is nothing to check")
        return 0
    results = [_show_trace(), _check_markers(), _check_copy(), _check_repeatability()]
    print("selftest:", "all good" if all(results) else "FAILED")
    return 0 if all(results) else 1


def _xla_call() -> Any:
    x = jax.random.normal(jax.random.key(0), (4096, 4096), jnp.float32)
    compiled = jax.jit(lambda x: jax.nn.softmax(x)).lower(x).compile()
    compiled(x).block_until_ready()
    return lambda: compiled(x).block_until_ready()


def _torch_call() -> Any:
    torch = _torch.torch()
    x = torch.randn(4096, 4096, device="cuda")
    torch.softmax(x, -1)
    _torch.sync()

    def call() -> None:
        torch.softmax(x, -1)
        _torch.sync()

    return call


def _show_trace() -> bool:
    """Prints every plane and line of a trace of one XLA and one PyTorch kernel."""
    calls = [_xla_call()] + ([_torch_call()] if _torch.available() else [])
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        jax.profiler.start_trace(directory, profiler_options=options)
        for call in calls:
            call()
        jax.profiler.stop_trace()
        profiles = _timing.read_profiles(directory)
    print(f"\na trace takes {time.perf_counter() - begin:.2f} s and leaves {len(profiles)} file(s)")
    for data in profiles:
        for plane in data.planes:
            print(f"plane {plane.name!r}")
            for line in plane.lines:
                events = list(line.events)
                print(f"  line {line.name!r}: {len(events)} events")
                for e in events[:4] if plane.name.startswith("/device") else events[:1]:
                    stats = {k: str(v)[:60] for k, v in e.stats}
                    print(f"    {e.name[:90]!r} start {e.start_ns:.0f} ns, {e.duration_ns / 1e3:.2f} us, {stats}")
    found = [e for data in profiles for e in _timing.device_events(data)]
    print("read as work on the device:", [(_timing.short_name(e.name), round(e.duration_ns / 1e3, 2)) for e in found])
    ok = bool(found)
    if _torch.available():
        of_torch = [e for e in found if "hlo_module" not in e.stats]
        print("kernels without an hlo_module (PyTorch's):", len(of_torch))
        ok = ok and bool(of_torch)
    return ok


def _check_markers() -> bool:
    call, mark = _xla_call(), _timing._marker_call()
    with _timing.trace() as events:
        for n in (1, 5, 0, 3):
            mark()
            for _ in range(n):
                call()
        mark()
    counts = [len(s) for s in _timing.split_by_marker(events)]
    each = counts[0] if counts else 0
    ok = each > 0 and counts == [each * n for n in (1, 5, 0, 3, 0)]
    marker = next((e for e in events if e.is_marker), None)
    print(f"\nkernels between markers, for 1, 5, 0, 3 calls: {counts}: {'ok' if ok else 'WRONG'}")
    if marker:
        print(
            f"the marker: {marker.name!r}, {marker.duration_ns / 1e3:.2f} us, module {marker.stats.get('hlo_module')!r}"
        )
    return ok


def _check_copy() -> bool:
    """The profiler's time of a large copy beside CUDA events and beside the host's clock."""
    pool = _inputs.Pool("float32", 1 << 29)
    candidate = pool.copy_candidate(2 << 30)
    times = {"profiler": _median(_timing.ProfilerClock().measure([candidate], 20)["copy"])}
    if _torch.available():
        times["cuda events"] = statistics.median(_torch.event_times(lambda: candidate.call(0), 20))
    out = candidate.call(0)
    candidate.sync(out)
    begin = time.perf_counter()
    for i in range(50):
        out = candidate.call(i)
    candidate.sync(out)
    times["host, 50 queued"] = (time.perf_counter() - begin) * 1e6 / 50
    print(
        "\ncopy of 1 GiB (2 GiB moved):",
        {k: f"{v:.1f} us, {(2 << 30) / v / 1e3:.0f} GB/s" for k, v in times.items()},
    )
    # Events bracket a call's launch too, which torch's slicing makes long: they are shown, not judged.
    ok = abs(times["host, 50 queued"] / times["profiler"] - 1) <= AGREE
    print(f"profiler and host agree within {AGREE:.0%}: {'ok' if ok else 'NO'}")
    return ok


def _median(result: _timing.Result) -> float:
    if isinstance(result, _timing.Failure):
        print("not measured:", result.reason)
        return float("nan")
    return result.median


def _check_repeatability() -> bool:
    """The same copies measured twice, cold; and once more over one buffer, to see what a warm L2 does."""
    pool, clock = _inputs.Pool("float32", 1 << 28), _timing.ProfilerClock()
    ok = True
    for megabytes in (4, 32, 256):
        pair = [_median(clock.measure([pool.copy_candidate(megabytes << 20)], 24)["copy"]) for _ in range(2)]
        fixed = pool.copy_candidate(megabytes << 20)
        warm = _median(
            clock.measure([_timing.Candidate("copy", lambda i: fixed.call(0), fixed.sync, torch=fixed.torch)], 24)[
                "copy"
            ]
        )
        print(f"copy moving {megabytes} MiB: cold {pair[0]:.2f} and {pair[1]:.2f} us, warm {warm:.2f} us")
        if megabytes > 4:  # the resolution of the clock limits a copy of 2 us
            ok = ok and abs(pair[1] / pair[0] - 1) <= 2 * AGREE
    return ok
