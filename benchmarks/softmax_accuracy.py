"""Errors of softmax and log-softmax against float64, beside the errors of `jax.nn` on the same input.

The whole problem runs on the device, so that the kernel is the one that would run; the reference is
computed by NumPy for a sample of the rows. Forward and backward are separate programs, as they are in a
training step with anything between them: in one program XLA would keep the output unrounded for the gradient.
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _inputs, _report, _run, _timing, softmax

SAMPLE_ROWS, SAMPLE_ELEMENTS = 512, 1 << 21
SCALE = 4.0  # logits of a real network are wider than a unit normal


def main(options: _run.Options, out: pathlib.Path) -> int:
    """Prints the table, writes OUT/softmax-accuracy-DEVICE.json; 0 if no cell is worse than jax.nn's."""
    dtypes = options.dtypes or softmax.DTYPES[_run.backend()]
    cases = [c for c in _run.cases(softmax, options.quick) if re.search(options.cases, c.name)]
    ops = options.ops or softmax.OPS
    rows: list[dict[str, Any]] = []
    plan = [(d, c) for d in dtypes for c in cases]
    pool = None
    for dtype, case in _timing.progress(plan, len(plan), "inspect"):
        if pool is None or pool.dtype != dtype:
            pool = _inputs.Pool(dtype, _run.pool_size(cases))
        for op in ops:
            rows += errors(pool, case, op)
    lines = [["case", "dtype", "op", "direction", "ours", "jax.nn", "ours/jax.nn", "verdict"]]
    for r in rows:
        ratio = r["ours"] / r["jax.nn"] if r["jax.nn"] else float(r["ours"] > 0)
        lines.append(
            [
                r["case"],
                r["dtype"],
                r["op"],
                r["direction"],
                f"{r['ours']:.3e}",
                f"{r['jax.nn']:.3e}",
                f"{ratio:.2f}",
                "met" if r["met"] else "missed",
            ]
        )
    print(_report._align(lines))
    missed = sum(not r["met"] for r in rows)
    print(
        f"maximum absolute error against float64: no larger than jax.nn's in {len(rows) - missed} of {len(rows)} cells"
    )
    out.mkdir(parents=True, exist_ok=True)
    environment = _run.environment()
    path = out / f"softmax-accuracy-{re.sub(r'[^A-Za-z0-9]+', '_', environment['device']).strip('_')}.json"
    path.write_text(json.dumps({"format": 1, "environment": environment, "results": rows}, indent=1) + "\n")
    print(f"written: {path}")
    return int(missed > 0)


def errors(pool: _inputs.Pool, case: softmax.Case, op: str) -> list[dict[str, Any]]:
    """Maximum absolute errors of both implementations in a case, forward and backward."""
    import jaxkern

    x = (pool.array(case.shape, 0) * SCALE).astype(pool.dtype)
    g = pool.array(case.shape, 1)
    mask = None
    if case.mask:
        mask = jax.random.uniform(jax.random.key(7), case.mask) < 0.8
    picked = _sample(case)

    @jax.jit
    def rows_of(a: jax.Array) -> jax.Array:
        moved = jnp.moveaxis(jnp.broadcast_to(a, case.shape), case.axis, -1)
        return moved.reshape(-1, case.width)[picked].astype(jnp.promote_types(a.dtype, jnp.float32))

    def take(a: jax.Array) -> np.ndarray:
        return np.asarray(rows_of(a)).astype(np.float64)

    keep = None if mask is None else take(mask) > 0
    expected = _exact(op, take(x), take(g), keep)
    found: dict[str, tuple[float, float]] = {}
    for name, function in (("ours", getattr(jaxkern, op)), ("jax.nn", getattr(jax.nn, op))):
        forward = jax.jit(lambda x, f=function: jax.vjp(lambda x: f(x, axis=case.axis, where=mask), x))
        y, pull = forward(x)
        dx = jax.jit(lambda pull, g: pull(g)[0])(pull, g)
        found[name] = _error(take(y), expected[0]), _error(take(dx), expected[1])
        del y, pull, dx
    return [
        {
            "case": case.name,
            "dtype": pool.dtype.name,
            "op": op,
            "direction": direction,
            "ours": found["ours"][i],
            "jax.nn": found["jax.nn"][i],
            "met": found["ours"][i] <= found["jax.nn"][i],
        }
        for i, direction in enumerate(softmax.DIRECTIONS)
    ]


def _sample(case: softmax.Case) -> np.ndarray:
    """Row numbers, evenly spread, the first and the last among them."""
    rows = case.size // case.width
    count = max(1, min(rows, SAMPLE_ROWS, SAMPLE_ELEMENTS // case.width))
    return np.unique(np.linspace(0, rows - 1, count).astype(np.int64))


def _exact(op: str, x: np.ndarray, g: np.ndarray, keep: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The operation and its gradient in float64, row by row."""
    keep = np.ones(x.shape, bool) if keep is None else keep
    shifted = np.where(keep, x, -np.inf)
    shifted = shifted - shifted.max(-1, keepdims=True)
    e = np.exp(shifted)
    total = e.sum(-1, keepdims=True)
    p, g = e / total, np.where(keep, g, 0)
    if op == "softmax":
        return p, p * (g - (p * g).sum(-1, keepdims=True))
    return shifted - np.log(total), np.where(keep, g - p * g.sum(-1, keepdims=True), 0)


def _error(got: np.ndarray, want: np.ndarray) -> float:
    """Maximum absolute difference; infinite where one is finite and the other is not."""
    both = np.isfinite(got) & np.isfinite(want)
    if not np.array_equal(got[~both], want[~both]):
        return float("inf")
    return float(np.max(np.abs(got - want), where=both, initial=0.0))
