"""The time of a call: device time on a GPU, host time on a CPU.

On a GPU the time of a call is the sum over every kernel, copy and memset that it runs, as CUPTI
records them. `jax.profiler` switches CUPTI on and `jax.profiler.ProfileData` reads the result; the
records cover the whole process, so PyTorch's kernels are in the same trace and are read in the
same way. One trace holds many candidates: before each, a kernel that nothing else launches is run as
a marker, and everything between two markers belongs to the candidate between them.

Host time around a dispatch would measure Python for every kernel under about 50 us.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib.util
import math
import pathlib
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

WARM_UP = 3  # calls of a candidate before it is timed
SLOW = 0.25  # seconds a call: what takes longer is called once more, by the host's clock
HOPELESS = 2.0  # and what takes this long is never called again in the run, nor is its like
ROUNDS = 2  # turns that every candidate gets in a trace, so that a drifting clock hits all alike
TURN = 0.05  # seconds of a turn, from which calls are fewer: a loop of XLA has thousands of kernels, each an event of the trace
MARKER = "benchmark_marker"
MARKER_KERNEL = "popcnt"  # the HLO that the marker compiles to, and so part of its kernel's name


@dataclasses.dataclass
class Candidate:
    """Something to time. `call(i)` enqueues execution i and returns its output; `sync` waits for all."""

    name: str
    call: Callable[[int], Any]
    sync: Callable[[Any], None]
    keep: int = 2  # outputs to hold on to, so that the allocator cannot hand out a cached one
    torch: bool = False
    span: bool = (
        False  # its time runs from its first kernel's start to its last one's end, with the gaps between kernels
    )
    like: str = ""  # candidates of one `like` do the same, to other types say: if one is hopeless, so are they all


@dataclasses.dataclass
class Timing:
    """Times of one candidate in microseconds."""

    samples: list[float]
    source: str  # "profiler", "cuda events" or "host"
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)  # name: launches per call
    kernel_us: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # name: time of these, where there are several
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def to_json(self) -> dict[str, Any]:
        return {
            "median_us": round(self.median, 3),
            "min_us": round(min(self.samples), 3),
            "max_us": round(max(self.samples), 3),
            "calls": len(self.samples),
            "source": self.source,
            "kernels": self.kernels,
            **({"kernel_us": self.kernel_us} if len(self.kernel_us) > 1 else {}),
            **({"note": self.note} if self.note else {}),
        }


@dataclasses.dataclass
class Failure:
    """A candidate that could not run, and why."""

    reason: str

    def to_json(self) -> dict[str, Any]:
        return {"error": self.reason}


Result = Timing | Failure


@dataclasses.dataclass(frozen=True)
class Event:
    """One kernel, copy or memset on the device."""

    name: str
    start_ns: float
    duration_ns: float
    stats: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def is_marker(self) -> bool:
        return MARKER in str(self.stats.get("hlo_module", "")) or MARKER_KERNEL in self.name


# --- traces --------------------------------------------------------------------------------------

# A record of work on the device carries one of these; allocations, overheads and the lines that the
# profiler derives from the records (modules, operations, steps) carry none.
_WORK = ("kernel_details", "memcpy_details", "memset_details", "cuda_graph_exec_id")
_NOT_WORK = re.compile(r"overhead|alloc|free|residency|sync", re.IGNORECASE)


@contextlib.contextmanager
def trace() -> Iterator[list[Event]]:
    """Profiles its body; on leaving, the list holds the first GPU's events in the order they began."""
    events: list[Event] = []
    directory = tempfile.mkdtemp(prefix="benchmarks-trace-")
    try:
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level = 0
        options.python_tracer_level = 0
        options.enable_hlo_proto = False
        jax.profiler.start_trace(directory, profiler_options=options)
        try:
            yield events
        finally:
            jax.profiler.stop_trace()
        for data in read_profiles(directory):
            events.extend(device_events(data))
        events.sort(key=lambda e: e.start_ns)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def read_profiles(directory: str) -> list[jax.profiler.ProfileData]:
    """Every profile that a trace left under `directory`."""
    files = sorted(pathlib.Path(directory).rglob("*.xplane.pb"))
    return [jax.profiler.ProfileData.from_serialized_xspace(f.read_bytes()) for f in files]


def device_events(data: jax.profiler.ProfileData, ordinal: int = 0) -> list[Event]:
    """The work that GPU `ordinal` did, from the lines that stand for CUDA streams."""
    found, unlabelled = [], []
    for plane in data.planes:
        if not re.fullmatch(rf"/device:GPU:{ordinal}\b.*", plane.name):
            continue
        for line in plane.lines:
            # A stream's line takes the second name when an overhead record lands on it.
            if not line.name.startswith(("Stream #", "CUPTI overhead")):
                continue
            for e in line.events:
                stats = {k: v for k, v in e.stats if k is not None}
                event = Event(e.name, e.start_ns, e.duration_ns, stats)
                if any(k in stats for k in _WORK):
                    found.append(event)
                elif not _NOT_WORK.search(e.name):
                    unlabelled.append(event)
    # Labels are the surer way; without any (another profiler version) the names must do.
    return found or unlabelled


@functools.cache
def _marker_call() -> Callable[[], None]:
    def benchmark_marker(x: jax.Array) -> jax.Array:
        return jax.lax.population_count(x)

    argument = jnp.arange(7, dtype=jnp.int32)
    compiled = jax.jit(benchmark_marker).lower(argument).compile()
    compiled(argument).block_until_ready()

    def mark() -> None:
        compiled(argument).block_until_ready()

    return mark


@functools.cache
def _flush_call() -> Callable[[], None]:
    """Reads so much that nothing else is left in the L2."""
    from benchmarks import _inputs

    argument = jnp.ones(_inputs.COLD_BYTES["gpu"] // 4, jnp.float32)
    compiled = jax.jit(jnp.sum).lower(argument).compile()
    return lambda: compiled(argument).block_until_ready()


def split_by_marker(events: Iterable[Event]) -> list[list[Event]]:
    """The events between one marker and the next; what precedes the first marker is dropped."""
    segments: list[list[Event]] = []
    for e in events:
        if e.is_marker:
            segments.append([])
        elif segments:
            segments[-1].append(e)
    return segments


def split_by_call(events: list[Event], calls: int) -> list[list[Event]] | None:
    """Divides a candidate's events among its calls, or None where they cannot be told apart."""
    if not events or len(events) % calls:
        return None
    each = len(events) // calls
    groups = [events[i : i + each] for i in range(0, len(events), each)]
    names = sorted(e.name for e in groups[0])
    return groups if all(sorted(e.name for e in g) == names for g in groups) else None


def _timing_from(events: list[Event], calls: int, span: bool = False) -> Timing:
    counts = collections.Counter(e.name for e in events)
    kernels = {short_name(k): round(v / calls, 3) for k, v in counts.items()}
    durations: collections.Counter[str] = collections.Counter()
    for e in events:
        durations[short_name(e.name)] += e.duration_ns
    kernel_us = {k: round(ns / calls / 1e3, 3) for k, ns in durations.items()}
    groups = split_by_call(events, calls)
    if groups is None:
        total = sum(e.duration_ns for e in events) / calls
        return Timing(
            [total / 1e3], "profiler", kernels, kernel_us, f"{len(events)} kernels do not divide among {calls} calls"
        )
    if span:
        times = [max(e.start_ns + e.duration_ns for e in g) - min(e.start_ns for e in g) for g in groups]
    else:
        times = [sum(e.duration_ns for e in g) for g in groups]
    return Timing([ns / 1e3 for ns in times], "profiler", kernels, kernel_us)


def short_name(kernel: str) -> str:
    """A kernel's name without its parameter list, and not longer than a line."""
    kernel = re.sub(r"\)? *\[clone[^]]*\]", "", kernel)
    depth, cut = 0, len(kernel)
    for i, c in enumerate(kernel):
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0 and not kernel.startswith("(anonymous", i):
            cut = i
            break
    kernel = kernel[:cut].removeprefix("void ")
    return kernel if len(kernel) <= 120 else kernel[:117] + "..."


# --- clocks --------------------------------------------------------------------------------------


def calls_of_a_turn(repeats: int, seconds: float) -> int:
    """How often a candidate is called in one of its turns, if a call takes so long: at least once, and in TURN seconds."""
    return max(1, min(-(-repeats // ROUNDS), int(TURN / seconds)))


class ProfilerClock:
    """Device time on a GPU, from CUPTI through `jax.profiler`."""

    name = "profiler"

    def __init__(self) -> None:
        self._next: collections.Counter[str] = collections.Counter()
        self._hopeless: dict[str, float] = {}  # seconds that a call took, by `like`
        self._pace: dict[str, float] = {}  # seconds that a call takes after the first, by name, in this measurement
        self.single_traces = 0  # measurements whose markers were lost
        with trace():  # the first trace of a process loads CUPTI and may come back incomplete
            _marker_call()()

    def works(self) -> bool:
        """Whether a trace shows the marker at all."""
        with trace() as events:
            for _ in range(3):
                _marker_call()()
        return len(split_by_marker(events)) == 3

    def measure(self, candidates: list[Candidate], repeats: int) -> dict[str, Result]:
        results: dict[str, Result] = {}
        ready = []
        for c in candidates:
            try:
                slow = self._warm_up(c)
            except Exception as e:  # a peer that refuses a shape must not end the run
                slow = Failure(one_line(e))
            if slow:
                results[c.name] = slow
            else:
                ready.append(c)

        calls = {c.name: calls_of_a_turn(repeats, self._pace[c.name]) for c in ready}
        turns = [c for _ in range(ROUNDS) for c in ready]
        segments = self._segments(turns, calls)
        if len(segments) != len(turns):
            self.single_traces += 1
            segments = [self._alone(c, calls[c.name]) for c in turns]

        events: dict[str, list[Event]] = {c.name: [] for c in ready}
        for c, segment in zip(turns, segments):
            events[c.name].extend(segment)
        for c in ready:
            if events[c.name]:
                results[c.name] = _timing_from(events[c.name], calls[c.name] * ROUNDS, c.span)
            elif c.torch:  # its kernels are not in XLA's trace
                from benchmarks import _torch

                results[c.name] = Timing(
                    _torch.event_times(functools.partial(self._step, c), calls[c.name] * ROUNDS), "cuda events"
                )
            else:
                results[c.name] = Failure("the profiler recorded no kernels")
        return results

    def _step(self, c: Candidate) -> Any:
        i = self._next[c.name]
        self._next[c.name] += 1
        return c.call(i)

    def _warm_up(self, c: Candidate) -> Result | None:
        """Calls a candidate as often as it is fast; what came of it, if that was not often enough to go on."""
        if c.like in self._hopeless:
            return Failure(f"not called: {self._hopeless[c.like]:.0f} s a call of its like")
        seconds = self._seconds(c)
        if seconds < SLOW:
            start = time.perf_counter()
            self._run(c, WARM_UP - 1)
            self._pace[c.name] = (time.perf_counter() - start) / (WARM_UP - 1)
            return None
        if c.like and seconds > HOPELESS:
            self._hopeless[c.like] = seconds
        else:
            seconds = self._seconds(c)  # without what the first call alone has to do
            if seconds < SLOW:
                self._pace[c.name] = seconds
                return None
        return Timing([seconds * 1e6], "host", note=f"{seconds:.2g} s a call: timed once, by the host's clock")

    def _seconds(self, c: Candidate) -> float:
        start = time.perf_counter()
        self._run(c, 1)
        return time.perf_counter() - start

    def _run(self, c: Candidate, calls: int) -> None:
        kept: collections.deque[Any] = collections.deque(maxlen=max(2, c.keep))
        for _ in range(calls):
            kept.append(self._step(c))
        c.sync(kept[-1])

    # The candidates of a case read the same arrays: without the flush, of small ones the first alone would find none in the L2.
    def _segments(self, turns: list[Candidate], calls: dict[str, int]) -> list[list[Event]]:
        with trace() as events:
            for c in turns:
                _marker_call()()
                _flush_call()()
                _marker_call()()
                self._run(c, calls[c.name])
            _marker_call()()
        return split_by_marker(events)[1:-1:2]

    def _alone(self, c: Candidate, calls: int) -> list[Event]:
        _flush_call()()
        with trace() as events:
            self._run(c, calls)
        return [e for e in events if not e.is_marker]


class HostClock:
    """Wall-clock time around a call, the candidates taking turns."""

    name = "host"
    single_traces = 0

    def measure(self, candidates: list[Candidate], repeats: int) -> dict[str, Result]:
        results: dict[str, Result] = {}
        ready = []
        for c in candidates:
            try:
                for i in range(WARM_UP):
                    c.sync(c.call(i))
                ready.append(c)
            except Exception as e:
                results[c.name] = Failure(one_line(e))
        samples: dict[str, list[float]] = {c.name: [] for c in ready}
        for i in range(repeats):
            # The order turns as well: whoever follows a given neighbour finds its cache and its clock.
            for c in ready[i % len(ready) :] + ready[: i % len(ready)]:
                start = time.perf_counter()
                out = c.call(i)
                c.sync(out)
                samples[c.name].append((time.perf_counter() - start) * 1e6)
                del out  # giving a large array back to the system is not part of the call
        return results | {k: Timing(v, "host") for k, v in samples.items()}


def steps(
    run: Callable[[], Any], wait: Callable[[], Any], readings: int, sample: float = 0.2, until: float = math.inf
) -> list[float]:
    """Microseconds of a step, by so many readings of the host's clock around steps that follow each other.

    run() enqueues a step, and wait() waits for all of them. A reading takes `sample` seconds or one step. Steps of more
    than a second have two readings at most. None begins after `until`, by `time.perf_counter`, but the first.
    """

    def seconds(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            run()
        wait()
        return time.perf_counter() - start

    one = seconds(1)
    count = max(1, min(200, round(sample / max(one, 1e-6))))
    found = []
    for _ in range(readings if one < 1 else min(readings, 2)):
        if time.perf_counter() + count * one > until:
            break
        found.append(seconds(count) / count * 1e6)
    return found or [one * 1e6]


def make_clock() -> ProfilerClock | HostClock:
    """The best clock of this machine."""
    if jax.default_backend() != "gpu":
        return HostClock()
    clock = ProfilerClock()
    if clock.works():
        return clock
    print(
        "benchmarks: the profiler shows no kernels here (is nvidia-cuda-cupti installed?); times are "
        "host times and mean little below 1 ms",
        file=sys.stderr,
    )
    return HostClock()


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


# --- progress ------------------------------------------------------------------------------------


def progress(items: Iterable[Any], total: int, label: str) -> Iterator[Any]:
    """Iterates and shows on stderr how many items are done: tqdm's bar on a terminal, else a line now and then.

    tqdm is optional. Without a terminal it would write its bar again and again, and in steps that the first, fast items set.
    """
    if sys.stderr.isatty() and importlib.util.find_spec("tqdm"):
        from tqdm import tqdm

        yield from tqdm(items, total=total, desc=label, file=sys.stderr, mininterval=1.0, miniters=1)
        return
    begin = last = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - last >= 10 or done == total:
            print(f"{label}: {done}/{total}, {now - begin:.0f} s", file=sys.stderr, flush=True)
            last = now
