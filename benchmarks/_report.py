"""Result files and what is printed from them: the table, the goals missed, the comparison of two runs."""

from __future__ import annotations

import json
import math
import pathlib
import re
from typing import Any

from benchmarks import _goals

PEERS = ("xla", "torch")
# Under what name, if not its own, peers.json has an operation or a direction.
PUBLISHED = {"cross_entropy": "cross_entropy", "step": "both"}
CHANGED = 0.03  # a difference between two runs that is worth a mark
COMPUTE_BOUND = {"linear_cross_entropy", "while_loop", "walk"}  # operations and functions


def save(data: dict[str, Any], directory: pathlib.Path) -> pathlib.Path:
    """Writes DIRECTORY/OPERATION-DEVICE.json and returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    device = re.sub(r"[^A-Za-z0-9]+", "_", data["environment"]["device"]).strip("_")
    path = directory / f"{data['operation']}-{device}.json"
    rows = data["results"]
    head = json.dumps({**data, "results": []}, indent=1)
    body = ",\n  ".join(json.dumps(r) for r in rows)  # one row per line keeps differences readable
    path.write_text(head.replace('"results": []', '"results": [\n  ' + body + "\n ]") + "\n")
    return path


def load(path: str | pathlib.Path) -> dict[str, Any]:
    return json.loads(pathlib.Path(path).read_text())


def is_compute_bound(data: dict[str, Any], row: dict[str, Any]) -> bool:
    """True if arithmetic decides the time of a cell, so that a copy says nothing of it."""
    return not COMPUTE_BOUND.isdisjoint((data["operation"], row["op"]))


def medians(row: dict[str, Any]) -> dict[str, float]:
    return {k: t["median_us"] for k, t in row["times"].items() if "median_us" in t}


def time_text(us: float | None) -> str:
    """Three significant digits, as a table wants them."""
    if us is None:
        return "-"
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"


def table(data: dict[str, Any]) -> str:
    """The whole run: times in us, ratios to the copy, and the verdict of every cell."""
    rows = data["results"]
    names = list(dict.fromkeys(k for r in rows for k in r["times"]))
    shown = [_goals.COPY, _goals.OURS, *(p for p in PEERS if p in names)]
    algorithms = [k for k in names if ":" in k]
    peaks = [next((g["peak_bytes"] for g in r["goals"] if g["goal"] == "memory"), None) for r in rows]
    with_peaks = any(p is not None for p in peaks)
    lines = [
        [
            "case",
            "dtype",
            "op",
            *shown,
            "copy/ours",
            "best published",
            "algorithm",
            *["peak MB"] * with_peaks,
            *(t.split(":")[1] for t in algorithms),
            "verdict",
        ]
    ]
    for r, peak in zip(rows, peaks):
        times = medians(r)
        ratio = r["copy_ratio"].get(_goals.OURS)
        known = (
            _goals.published(
                PUBLISHED.get(r["op"], "softmax"),
                PUBLISHED.get(r["direction"], r["direction"]),
                itemsize(r["dtype"]),
                r["width"],
            )
            if r["group"] in ("sweep", "odd", "classes")
            else {}
        )
        best = max(known, key=known.__getitem__) if known else None
        goals = r["goals"]
        verdict = (
            "-"
            if not goals
            else "met"
            if all(g["met"] for g in goals)
            else "missed: " + ", ".join(g["goal"] for g in goals if not g["met"])
        )
        lines.append(
            [
                r["case"],
                r["dtype"].replace("float", "f"),
                f"{r['op']} { ({'forward': 'fwd', 'backward': 'bwd'}.get(r['direction'], r['direction'])) }",
                *(time_text(times.get(k)) for k in shown),
                "-" if ratio is None else f"{ratio:.3f}",
                f"{known[best]:.2f} {best}" if best else "-",
                r.get("algorithm") or "-",
                *["-" if peak is None else f"{peak / 1e6:.1f}"] * with_peaks,
                *(time_text(times.get(t)) for t in algorithms),
                verdict,
            ]
        )
    return align(lines)


def itemsize(dtype: str) -> int:
    return int(re.search(r"\d+", dtype).group()) // 8


def align(lines: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    left = {0, 1, 2, len(widths) - 1}
    text = [
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))).rstrip()
        for line in lines
    ]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def summary(data: dict[str, Any]) -> str:
    """The end of the report: what failed to run, the goals missed, the count."""
    lines = []
    goals = [(r, g) for r in data["results"] for g in r["goals"]]
    for r in data["results"]:
        for name, t in r["times"].items():
            if "error" in t and ":" not in name:
                lines.append(f"not run: {_label(r)} {name}: {t['error']}")
            elif "note" in t:
                lines.append(f"note: {_label(r)} {name}: {t['note']}")
    if data["results"] and not any(r["handlers"] for r in data["results"]):
        lines.append("note: no handler of this library was called; its figures come from the XLA fallback")
    for c in data["checks"]:
        if not c["met"]:
            lines.append(f"missed: {c['check']} (handlers {c['handlers']}, moves {c.get('moves', [])})")
    missed = [(r, g) for r, g in goals if not g["met"]]
    lines += [f"missed: {_label(r)}: {_goals.describe(g)}" for r, g in missed]
    checks = sum(c["met"] for c in data["checks"])
    lines.append(
        f"goals met: {len(goals) - len(missed)} of {len(goals)}; checks met: {checks} of {len(data['checks'])}"
    )
    return "\n".join(lines)


def _label(row: dict[str, Any]) -> str:
    return f"{row['case']} {row['dtype']} {row['op']} {row['direction']}"


def header(data: dict[str, Any]) -> str:
    e = data["environment"]
    parts = [
        f"{e['device']}",
        f"driver {e['driver']}" if e["driver"] else "",
        f"jax {e['jax']}",
        f"torch {e['torch']}" if e["torch"] else "",
    ]
    parts += [
        f"jaxkern {e['jaxkern'] or 'from source'}",
        f"commit {e['commit']}" if e["commit"] else "",
        f"{e['clock']} times in us",
        e["date"],
    ]
    earlier = [r["earlier"]["commit"] for r in data["results"] if "earlier" in r]
    parts += [f"{earlier.count(c)} cells at commit {c}" for c in dict.fromkeys(earlier)]
    return ", ".join(p for p in parts if p)


def _key(r: dict[str, Any]) -> tuple[str, ...]:
    return r["case"], r["dtype"], r["op"], r["direction"]


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The cells of `new`, and the cells of `old` that it lacks, with the date and commit at which they were measured.

    Raises ValueError if the machines, or the versions of what the times depend on, differ.
    """
    same = ("device", "driver", "jax", "jaxlib", "torch", "clock")
    a, b = old["environment"], new["environment"]
    if differing := [k for k in same if a.get(k) != b.get(k)] + ["operation"] * (old["operation"] != new["operation"]):
        raise ValueError(f"runs with different {', '.join(differing)} are not one result")
    measured = {k: a[k] for k in ("date", "commit")}
    found = {_key(r) for r in new["results"]}
    kept = [{**r, "earlier": r.get("earlier", measured)} for r in old["results"] if _key(r) not in found]
    return {**new, "results": [*new["results"], *kept]}


def compare(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Each cell's time and ratio to the copy in two runs, and the geometric mean of the change."""
    before = {_key(r): r for r in old["results"]}
    lines = [["case", "dtype", "op", "old us", "new us", "change", "old copy/ours", "new copy/ours", ""]]
    logs = []
    for r in new["results"]:
        was = before.get(_key(r))
        a, b = (medians(x).get(_goals.OURS) if x else None for x in (was, r))
        if not a or not b:
            continue
        logs.append(math.log(b / a))
        change = b / a - 1
        mark = "" if abs(change) <= CHANGED else "slower" if change > 0 else "faster"
        ratios = (x["copy_ratio"].get(_goals.OURS) for x in (was, r))
        lines.append(
            [
                r["case"],
                r["dtype"],
                f"{r['op']} {r['direction']}",
                time_text(a),
                time_text(b),
                f"{change:+.1%}",
                *("-" if v is None else f"{v:.3f}" for v in ratios),
                mark,
            ]
        )
    if not logs:
        return "no cell is in both files"
    mean = math.exp(sum(logs) / len(logs)) - 1
    end = f"{len(logs)} cells, geometric mean of the change {mean:+.1%}"
    return "\n".join([f"old: {header(old)}", f"new: {header(new)}", align(lines), end])
