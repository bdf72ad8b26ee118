"""Fits the constants of the cost model (jaxkern/_accelerate/cost.py) to half of the regions, and checks them on the other half.

    python -m benchmarks fit                       with benchmarks/results/row_kernel-NVIDIA_H200.json
    python -m benchmarks fit FILE --seeds 5        with another file of an H200, and more ways to halve it

A region is a function, forward or backward, and a width; both of its types are in the same half. The constants are changed by
factors, one after the other, until estimates on the first half come no closer to the measured times. No GPU is needed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _report, _timing, row_kernel
from jaxkern._accelerate import cost
from jaxkern._core import device
from jaxkern._engines.rows import plan as planning
from jaxkern._engines.rows.function import trace

# Of cost.py; a number in a dictionary is named with its key.
CONSTANTS = (
    "H200_BANDWIDTH",
    "LAUNCH",
    "TRITON_NARROW",
    "TRITON_THREE",
    "TRITON_LONG",
    "TRITON_WIDE",
    "OPERATION",
    "XLA_OPERATION",
    "FUNCTION",
    "COARSE_FUNCTION",
    "SUMS",
    "CLUSTER_SUMS",
    "READS_ALONE",
    *(("RAGGED", bytes_) for bytes_ in cost.RAGGED),
)
FACTORS = (0.5, 0.8, 0.9, 0.97, 1.03, 1.1, 1.25, 2.0)
ROUNDS = 3


class Region(NamedTuple):
    """A measured region: key as above, its core and plan, and the seconds that XLA and the kernel took."""

    key: tuple[Any, ...]
    core: Any
    plan: Any
    xla: float
    kernel: float


def regions(data: dict[str, Any]) -> list[Region]:
    """The regions of a result file, which was measured on an H200."""
    found = []
    for row in _timing.progress(data["results"], len(data["results"]), "trace regions"):
        f, kinds = row_kernel.FUNCTIONS[row["op"]]
        shape = row_kernel.Case("", tuple(row["shape"])).operand
        avals = [jax.ShapeDtypeStruct(shape(k), "int32" if k == "l" else row["dtype"]) for k in kinds]
        function = trace(f, avals, -1, row["op"])[0]
        if row["direction"] == "backward":
            function = function.vjp([k for k, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.inexact)])
            function = function.select(function.used())
        outputs = [jax.core.ShapedArray(*output) for output in planning.outputs(function)]
        plan = planning.plan(device.H200, function.avals, outputs, function=function)
        key, times = (row["op"], row["direction"], row["width"]), _report.medians(row)
        found.append(Region(key, function.core, plan, times["xla"] * 1e-6, times["jaxkern"] * 1e-6))
    return found


def constants() -> dict[Any, float]:
    return {
        name: getattr(cost, name) if isinstance(name, str) else getattr(cost, name[0])[name[1]] for name in CONSTANTS
    }


@contextlib.contextmanager
def using(values: Mapping[Any, float]) -> Iterator[None]:
    """The model with these constants."""
    before = constants()

    def put(values):
        for name, value in values.items():
            if isinstance(name, str):
                setattr(cost, name, value)
            else:
                getattr(cost, name[0])[name[1]] = value

    put(values)
    try:
        yield
    finally:
        put(before)


def estimates(found: list[Region], values: Mapping[Any, float]) -> list[cost.Estimate]:
    with using(values):
        return [cost.estimate(r.core, r.plan, device.H200) for r in found]


def error(found: list[Region], values: Mapping[Any, float]) -> float:
    """The mean of |log(estimate / measured)|, of both times."""
    pairs = zip(estimates(found, values), found)
    return float(np.mean([abs(math.log(a / b)) for e, r in pairs for a, b in ((e.kernel, r.kernel), (e.xla, r.xla))]))


def fitted(found: list[Region], begin: Mapping[Any, float]) -> dict[Any, float]:
    """Constants with a smaller error, from these on."""
    best, least = dict(begin), error(found, begin)
    for _ in range(ROUNDS):
        before = least
        for name in best:
            tried = [best | {name: best[name] * factor} for factor in FACTORS]
            errors = [error(found, values) for values in tried]
            if min(errors) < least:
                best, least = tried[int(np.argmin(errors))], min(errors)
        if least > 0.999 * before:
            break
    return best


def _text(name: Any) -> str:
    return name if isinstance(name, str) else f"{name[0]}[{name[1]}]"


class Judged(NamedTuple):
    """What constants are worth on some regions.

    error: see `error`.
    taken, lost: how many regions are taken, and how many of these were slower than XLA.
    missed: how many regions are left although their kernel was faster by GAIN.
    time: the time of all regions with these decisions, divided by the time with the best decisions.
    """

    error: float
    taken: int
    lost: int
    missed: int
    time: float


def judged(found: list[Region], values: Mapping[Any, float]) -> Judged:
    wins = [e.wins for e in estimates(found, values)]
    time = sum(r.kernel if w else r.xla for r, w in zip(found, wins)) / sum(min(r.kernel, r.xla) for r in found)
    lost = sum(w and r.xla < 0.98 * r.kernel for r, w in zip(found, wins))
    missed = sum(not w and r.xla >= cost.GAIN * r.kernel for r, w in zip(found, wins))
    return Judged(error(found, values), sum(wins), lost, missed, time)


def halves(found: list[Region], seed: int) -> tuple[list[Region], list[Region]]:
    keys = sorted({r.key for r in found})
    first = {keys[k] for k in np.random.default_rng(seed).permutation(len(keys))[: len(keys) // 2]}
    return [r for r in found if r.key in first], [r for r in found if r.key not in first]


def run(data: dict[str, Any], seeds: int) -> str:
    """The table: for each way to halve the regions, the constants of cost.py and fitted ones on the half they were not fitted to."""
    found, own = regions(data), constants()
    lines = [["constants", "judged by", "regions", "error", "taken", "slower", "missed", "time / best"]]

    def line(name, by, part, values):
        j = judged(part, values)
        lines.append([name, by, str(len(part)), f"{j.error:.3f}", *map(str, j[1:4]), f"{j.time:.3f}"])

    line("cost.py", "all", found, own)
    changes: list[str] = []
    for seed in range(seeds):
        first, second = halves(found, seed)
        values = fitted(first, own)
        line("cost.py", f"half {seed}", second, own)
        line("fitted to the other half", f"half {seed}", second, values)
        changed = [f"{_text(name)} {values[name]:.3g}" for name in own if values[name] != own[name]]
        changes.append(f"fitted for half {seed}: {', '.join(changed) or 'nothing changed'}")
    return "\n".join([_report.align(lines), *changes])
