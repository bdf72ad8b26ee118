"""Loss curves of whole programs over several seeds: plain, and under `jaxkern.accelerate()`.

    python -m benchmarks curves                                  every program with parameters
    python -m benchmarks curves --cases llama --seeds 8 --steps 500
    python -m benchmarks curves --only default,rows              also under accelerate(only=...)

Rounding alone makes two runs of a program drift apart. Each program therefore also trains plainly from parameters that differ in the
last bit of its type. The distance of these losses from the plain ones is the measure for the accelerated losses. Without a GPU, programs
are small, and jaxkern's references run in place of its kernels.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern
from benchmarks import _goals, _report, _run, _timing, programs

OPERATION = "curves"
PLAIN, NEARBY = "xla", "nearby"
END = 0.1  # the share of the steps, at the end, whose losses are compared
ALLOWED = 3.0  # how much farther than the nearby run's these may be
POINTS = 100  # of a curve, at most, in the result file


def _nearby(params: Any, dtype: str, key: jax.Array) -> Any:
    """The parameters with about the last bit of each number changed, up or down at random."""
    leaves, tree = jax.tree.flatten(params)

    def moved(a, key):
        if not jnp.issubdtype(a.dtype, jnp.floating):
            return a
        sign = jax.random.rademacher(key, a.shape, jnp.float32)
        eps = max(float(jnp.finfo(d).eps) for d in (a.dtype, dtype))
        return (a * (1 + eps * sign)).astype(a.dtype)

    return tree.unflatten(map(moved, leaves, jax.random.split(key, max(1, len(leaves)))))


def train(training: programs.Training, seed: int, steps: int, nearby: str = "") -> np.ndarray:
    """The loss before each step. nearby: the type of the program, if it begins at nearby parameters."""
    own, other = jax.random.split(jax.random.key(seed))
    moved = lambda params: _nearby(params, nearby, other) if nearby else params
    state = jax.jit(lambda: training.begin(moved(training.params(own))))()
    step, data = jax.jit(training.step, donate_argnums=0), [jax.device_put(a) for a in training.data]
    losses = []
    for _ in range(steps):
        state, loss = step(state, *data)
        losses.append(loss)
    return np.asarray(jax.device_get(losses), np.float64)


def distance(curves: np.ndarray, plain: np.ndarray) -> float:
    """How far losses at the end are from the plain ones, relative to these: the root mean square over seeds.

    curves, plain: of shape [seeds, steps].
    """
    last = max(1, round(END * plain.shape[1]))
    own, wanted = (c[:, -last:].mean(1) for c in (curves, plain))
    return float(np.sqrt(np.mean(np.square((own - wanted) / np.maximum(np.abs(wanted), 1e-9)))))


def run(arguments: Any) -> dict[str, Any]:
    """Trains; what goes to the result file."""
    gpu = _run.backend() == "gpu"
    small = not gpu or arguments.quick
    sets, seeds, force = programs._sets(arguments), range(arguments.seeds), arguments.force or not gpu
    chosen = [p for p in programs.programs() if re.search(arguments.cases, f"{p.name} {p.dtype}")]
    rows: list[dict[str, Any]] = []
    for program in _timing.progress(chosen, len(chosen), "train programs"):
        training = program.make(program.dtype, small)
        if training.params is None or (program.endless and not small):
            continue
        trained = lambda nearby="", t=training: np.stack([train(t, s, arguments.steps, nearby) for s in seeds])
        found = {PLAIN: trained(), NEARBY: trained(program.dtype)}
        for label, options in sets.items():
            with jaxkern.accelerate(**options | {"force": force}):
                rows.append(_row(program, label, found | {_goals.OURS: trained()}))
    if not rows:
        raise SystemExit(f"benchmarks: no program with parameters matches {arguments.cases!r}")
    return {
        "format": 1,
        "operation": OPERATION,
        "environment": _run.environment() | {"clock": "no"},
        "options": {"quick": small, "cases": arguments.cases, "seeds": arguments.seeds, "steps": arguments.steps},
        "results": rows,
        "checks": [],
    }


def _row(program: programs.Program, label: str, curves: dict[str, np.ndarray]) -> dict[str, Any]:
    found = {who: distance(c, curves[PLAIN]) for who, c in curves.items() if who != PLAIN}
    # Losses that are equal but for rounding may be equal in the nearby run.
    allowed = ALLOWED * max(found[NEARBY], float(jnp.finfo(jnp.float32).eps))
    every = -(-curves[PLAIN].shape[1] // POINTS)
    return {
        "case": program.name + label,
        "dtype": program.dtype,
        "distance": found,
        "goals": [
            {"goal": "loss", "required": allowed, "value": found[_goals.OURS], "met": found[_goals.OURS] <= allowed}
        ],
        "curves": {who: c[:, ::every].tolist() for who, c in curves.items()},
    }


def table(data: dict[str, Any]) -> str:
    lines = [["case", "dtype", "first loss", "last loss", "accelerated off by", "nearby off by", "verdict"]]
    for row in data["results"]:
        plain = np.asarray(row["curves"][PLAIN]).mean(0)
        (goal,) = row["goals"]
        lines.append(
            [
                row["case"],
                row["dtype"],
                *(f"{loss:.5g}" for loss in (plain[0], plain[-1])),
                *(f"{row['distance'][who]:.1e}" for who in (_goals.OURS, NEARBY)),
                "met" if goal["met"] else "missed: loss",
            ]
        )
    return _report.align(lines)
