"""The goals of a cell, and whether its times meet them.

A goal is plain data, so that result files carry both the requirement and the figure:

    copy       copy / ours is at least `required`
    peers      ours is not slower than the fastest peer in the same run (or of those that `against`
               names), up to NOISE, or the peer's time over ours is at least `required`
    time       the goal's `us` microseconds over ours are at least 1
    reproducible    the same bits every time: 1 (examined by the operation itself)
    accurate        the largest error of XLA's result, or half a unit in the last place of the largest result if that is
                    more, over ours, all against float64, is at least `required` (likewise)
    scaling         the time on one device over that on several, as a fraction of the perfect one, is at least `required`
    memory          the bytes that outputs and a few numbers per row take, over the peak: 1 (likewise)
    published  copy / ours is at least what the best peer measured elsewhere (peers.json) reached
               against the copy of its own run, up to NOISE
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

# What docs/numerics.md promises: the largest error is at most this many times XLA's, or this many half units. Sums of the
# same few numbers in two random orders have largest errors that differ by up to a factor of two, either way.
ERROR = 3.0
NOISE = 0.03  # two medians of one kernel differ by this much from run to run
OURS, COPY = "jaxkern", "copy"


@functools.cache
def _published() -> list[dict[str, Any]]:
    return json.loads((pathlib.Path(__file__).parent / "peers.json").read_text())["ratios"]


def published(operation: str, direction: str, itemsize: int, width: int) -> dict[str, float]:
    """Ratios to copy of peers measured elsewhere: {peer: copy / peer}."""
    found: dict[str, float] = {}
    for row in _published():
        if (row["operation"], row["direction"], row["itemsize"], row["width"]) == (
            operation,
            direction,
            itemsize,
            width,
        ):
            found[row["peer"]] = max(found.get(row["peer"], 0.0), row["copy_us"] / row["us"])
    return found


def evaluate(goals: list[dict[str, Any]], medians: dict[str, float]) -> list[dict[str, Any]]:
    """Adds `value` and `met` to each goal. A goal without its figures is not met."""
    done = []
    ours, copy = medians.get(OURS), medians.get(COPY)
    for goal in goals:
        required, value, label = goal.get("required"), None, ""
        if goal["goal"] == "peers":
            against = goal.get("against") or [k for k in medians if k not in (OURS, COPY) and ":" not in k]
            peers = {k: medians[k] for k in against if k in medians}
            required = required or 1 - NOISE
            if ours and peers:
                label = min(peers, key=peers.__getitem__)
                value = peers[label] / ours
            elif ours:
                continue  # nobody to compare with
        elif goal["goal"] == "time":
            required = 1.0
            if ours:
                value = goal["us"] / ours
        elif ours and copy:
            value = copy / ours
        met = value is not None and value >= required
        done.append(
            goal
            | {"required": round(required, 4), "value": None if value is None else round(value, 4), "met": met}
            | ({"peer": label} if label else {})
        )
    return done


def memory(programs: list[Any], beside: int) -> list[dict[str, Any]]:
    """Peak memory of our program, by XLA's own account: its outputs and at most so many bytes beside them."""
    ours = next(p for p in programs if p.name == OURS)
    if ours.compiled is None:
        return []
    taken = ours.compiled.memory_analysis()
    allowed, peak = taken.output_size_in_bytes + beside, taken.output_size_in_bytes + taken.temp_size_in_bytes
    return [
        {
            "goal": "memory",
            "required": 1.0,
            "value": round(allowed / peak, 4),
            "met": peak <= allowed,
            "peak_bytes": peak,
            "temporary_bytes": taken.temp_size_in_bytes,
        }
    ]


def describe(goal: dict[str, Any]) -> str:
    value = "not measured" if goal["value"] is None else f"{goal['value']:.3f}"
    against = {
        "copy": "copy",
        "peers": goal.get("peer", "peers"),
        "plain": "the plain program",
        "published": f"copy, as {goal.get('peer', '')}",
    }
    if goal["goal"] not in against:  # a property of ours alone, such as reproducible, memory or first step
        return f"{goal['goal']}: {value}, required {goal['required']:.3f}"
    return f"{value} of {against[goal['goal']]}, required {goal['required']:.3f}"
