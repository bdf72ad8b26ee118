"""Runs one operation's benchmark: compile everything, then measure case by case.

Compiling comes first and in threads, because XLA tries out kernels on the GPU while it compiles and
would disturb a measurement. Benchmarks that run side by side on a GPU compile together and measure one
at a time, when all have compiled: see `turn`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import datetime
import fcntl
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax

import jaxkern
from benchmarks import _cell, _goals, _inputs, _timing, _torch


@dataclasses.dataclass
class Options:
    """What the command line asked for."""

    quick: bool = False
    cases: str = ""
    dtypes: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    repeats: int = 0
    algorithms: bool = False


def run(operation: ModuleType, options: Options) -> dict[str, Any]:
    """Measures and returns what goes to the result file."""
    gpu = jax.default_backend() == "gpu"
    dtypes = options.dtypes or (("bfloat16",) if options.quick and gpu else operation.DTYPES[backend()])
    ops = options.ops or operation.OPS
    repeats = (
        options.repeats
        or {(True, False): 24, (True, True): 20, (False, False): 15, (False, True): 7}[gpu, options.quick]
    )
    chosen = [c for c in cases(operation, options.quick) if re.search(options.cases, c.name)]
    if not chosen:
        raise SystemExit(
            f"benchmarks: no case matches {options.cases!r}; there are: "
            + ", ".join(c.name for c in cases(operation, False))
        )

    chosen = _that_fit(chosen, max(jax.numpy.dtype(d).itemsize for d in dtypes))

    plan = [(dtype, case, list(_cell.cells(operation, case, dtype, ops))) for dtype in dtypes for case in chosen]
    plan = [(dtype, case, cells) for dtype, case, cells in plan if cells]
    with turn(alone=False):
        compiled = _compile(operation, [cell for _, _, cells in plan for cell in cells], options.algorithms)
    with turn(alone=True):
        return _measured(operation, options, chosen, plan, compiled, repeats, list(dtypes), list(ops))


def _measured(
    operation: ModuleType,
    options: Options,
    chosen: list[Any],
    plan: list[Any],
    compiled: dict[Any, list[Any]],
    repeats: int,
    dtypes: list[str],
    ops: list[str],
) -> dict[str, Any]:
    clock = _timing.make_clock()
    rows: list[dict[str, Any]] = []
    pool = None
    found: list[Any] = []
    try:
        for dtype, case, cells in _timing.progress(plan, len(plan), f"measure {operation.OPERATION}"):
            if pool is None or pool.dtype != dtype:
                pool = None  # the old one goes before the new one comes
                pool = _inputs.Pool(dtype, pool_size(chosen))
            rows += _measure(operation, clock, pool, case, cells, compiled, repeats)
            _torch.release()
        found = operation.checks(clock) if backend() == "gpu" else []  # they look at the kernels that a program calls
    except KeyboardInterrupt:
        if not rows:
            raise
        print(f"benchmarks: interrupted; {len(rows)} results are kept", file=sys.stderr)
    return {
        "format": 1,
        "operation": operation.OPERATION,
        "environment": environment(clock),
        "options": dataclasses.asdict(options) | {"dtypes": dtypes, "ops": ops, "repeats": repeats},
        "results": rows,
        "checks": found,
    }


@contextlib.contextmanager
def turn(alone: bool) -> Iterator[None]:
    """Waits until no other benchmark of this user and these GPUs measures and, if `alone`, none compiles."""
    devices = re.sub(r"\W", "-", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    path = os.path.join(tempfile.gettempdir(), f"jaxkern-benchmarks-{os.getuid()}-{devices}.lock")
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def backend() -> str:
    return "gpu" if jax.default_backend() == "gpu" else "cpu"


def cases(operation: ModuleType, quick: bool) -> list[Any]:
    """An operation's cases for this device; of these a quick run takes what QUICK names, or all if it names none."""
    found = operation.CASES if backend() == "gpu" else operation.CPU_CASES
    return quick and [c for c in found if c.name in operation.QUICK] or found


def pool_size(chosen: list[Any]) -> int:
    """Elements that the random pool needs: a copy reads half of what a call moves, from two places.

    A case whose calls move more than six arrays says half as many as its `arrays`.
    """
    return max(getattr(c, "arrays", 3) * c.size for c in chosen) + sum(2 * _inputs.ALIGN for _ in chosen)


def _facts(cell: Any) -> dict[str, Any]:
    """What a row of the results says of its cell."""
    case = cell.case
    some = {name: getattr(case, name) for name in ("axis", "count", "kind") if hasattr(case, name)}
    return {
        "case": case.name,
        "group": case.group,
        "shape": list(case.shape),
        "width": case.width,
        **some,
        "dtype": cell.dtype,
        "op": cell.op,
        "direction": cell.direction,
        "bytes": cell.bytes,
    }


def _that_fit(chosen: list[Any], itemsize: int) -> list[Any]:
    """The cases that the GPU's memory has room for: the pool, its copy, inputs and outputs that rotate."""
    stats = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    fit = [c for c in chosen if not limit or 14 * c.size * itemsize < limit]
    for c in chosen:
        if c not in fit:
            print(f"benchmarks: {c.name} needs more memory than this device has", file=sys.stderr)
    if not fit:
        raise SystemExit("benchmarks: no case fits this device's memory")
    return fit


def _compile(operation: ModuleType, cells: list[Any], algorithms: bool) -> dict[Any, list[Any]]:
    programs = {cell: operation.programs(cell, algorithms) for cell in cells}
    everything = [p for found in programs.values() for p in found]
    threads = max(1, min(8, (os.cpu_count() or 2) // 2))
    with concurrent.futures.ThreadPoolExecutor(threads) as executor:
        jobs = [executor.submit(p.compile) for p in everything]
        for job in _timing.progress(concurrent.futures.as_completed(jobs), len(jobs), "compile"):
            job.result()
    return programs


def _measure(
    operation: ModuleType,
    clock: Any,
    pool: Any,
    case: Any,
    cells: list[Any],
    compiled: dict[Any, list[Any]],
    repeats: int,
) -> list[dict[str, Any]]:
    """All cells of a case in one go, so that they share the inputs, the copies and the trace."""
    inputs = operation.Inputs(pool, case)
    everything: dict[str, _timing.Candidate] = {}
    for cell in cells:
        if (key := f"copy {cell.bytes}") not in everything:
            everything[key] = pool.copy_candidate(cell.bytes)
        for candidate in operation.candidates(cell, compiled[cell], inputs):
            everything[f"{cell.op} {cell.direction} {candidate.name}"] = candidate
    measured = clock.measure([dataclasses.replace(c, name=key) for key, c in everything.items()], repeats)

    # What an operation checks of the results themselves, as goals that are met or not; it is told the medians.
    examined = getattr(operation, "examine", lambda *_: [])
    rows = []
    for cell in cells:
        results = {_goals.COPY: measured[f"copy {cell.bytes}"]}
        prefix = f"{cell.op} {cell.direction} "
        results |= {k.removeprefix(prefix): v for k, v in measured.items() if k.startswith(prefix)}
        medians = {k: v.median for k, v in results.items() if isinstance(v, _timing.Timing)}
        copy = medians.get(_goals.COPY)
        native = [p.targets for p in compiled[cell] if p.name == _goals.OURS]
        rows.append(
            _facts(cell)
            | {
                "times": {k: v.to_json() for k, v in results.items()},
                "copy_ratio": {k: round(copy / v, 4) for k, v in medians.items()} if copy else {},
                "goals": _goals.evaluate(cell.goals(), medians) + examined(cell, compiled[cell], inputs, medians),
                "handlers": native[0] if native else [],
                "algorithm": operation.chosen_algorithm(cell),
            }
        )
    return rows


def environment(clock: Any = None) -> dict[str, Any]:
    """What the figures depend on."""
    torch = _torch.torch()
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device.device_kind if device.platform == "gpu" else _cpu_name(),
        "platform": device.platform,
        "driver": _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if device.platform == "gpu"
        else "",
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": _version("jaxlib"),
        "torch": torch.__version__ if torch else None,
        "torch_geometric": _version("torch_geometric") if torch else None,
        "jaxkern": jaxkern.__version__,
        "commit": _commit(),
        "clock": getattr(clock, "name", None),
        "single_traces": getattr(clock, "single_traces", 0),
    }


def _version(package: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """The checkout's commit; JAXKERN_COMMIT names it where a copy of the tree is measured without git."""
    if os.environ.get("JAXKERN_COMMIT"):
        return os.environ["JAXKERN_COMMIT"]
    here = os.path.dirname(os.path.abspath(__file__))
    commit = _command("git", "-C", here, "rev-parse", "--short=12", "HEAD")
    dirty = commit and _command("git", "-C", here, "status", "--porcelain", "--untracked-files=no")
    return commit + (" with changes" if dirty else "")


def _command(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""


def _cpu_name() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
