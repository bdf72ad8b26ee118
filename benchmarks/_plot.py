"""Softmax and norms: the figure of OneFlow's softmax article: effective bandwidth against the number of columns.

One panel per direction and dtype, one line per implementation, the copy as the dashed limit. Peers that
were measured elsewhere (peers.json) are drawn thin, scaled by their ratio to the copy of their run.

Sharding: the time of a call and the fraction of perfect scaling against the number of devices.

scan: time against lanes, a line for each number of steps.

index_add: time over the floor, a copy of the bytes that must move, against how uneven the indices are.

`overview` draws all families in one figure, which README.md shows.
"""

from __future__ import annotations

import math
import pathlib
from typing import Any

from benchmarks import _goals, _report

STYLES = {
    "jaxkern": {"color": "#d62728", "marker": "o", "linewidth": 2.0, "zorder": 5},
    "xla": {"color": "#1f77b4", "marker": "s"},
    "associative_scan": {"color": "#2ca02c", "marker": "v"},
    "torch": {"color": "#ff7f0e", "marker": "^"},
    "pyg": {"color": "#ff7f0e", "marker": "D"},
    "copy": {"color": "black", "linestyle": "--", "linewidth": 1.2},
    "oneflow": {"color": "#2ca02c"},
    "cudnn": {"color": "#9467bd"},
    "quack": {"color": "#8c564b"},
    "liger": {"color": "#7f7f7f"},
}
PLOTTED = {"norm": ("narrow", "rows", "cpu")}  # groups of cases, where they are others
THIN = {"linewidth": 0.9, "linestyle": ":", "alpha": 0.8}


def plot(data: dict[str, Any], stem: pathlib.Path) -> list[pathlib.Path]:
    """Draws STEM-OP.png for each operation in a result file; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if data["operation"] == "index_add":
        return _skew(data, stem, plt)
    if data["operation"] == "scan":
        return _loops(data, stem, plt)
    if data["operation"] == "sharding":
        return _scaling(data, stem, plt)
    if data["operation"] == "programs":
        return _programs(data, stem, plt)

    written = []
    groups = PLOTTED.get(data["operation"], ("sweep", "odd", "cpu"))
    rows = [r for r in data["results"] if r["group"] in groups and "residual" not in r["case"]]
    for op in dict.fromkeys(r["op"] for r in rows):
        mine = [r for r in rows if r["op"] == op]
        dtypes = list(dict.fromkeys(r["dtype"] for r in mine))
        figure, axes = plt.subplots(2, len(dtypes), figsize=(5.2 * len(dtypes), 7.2), squeeze=False, sharex=True)
        for i, direction in enumerate(("forward", "backward")):
            for j, dtype in enumerate(dtypes):
                _panel(axes[i][j], [r for r in mine if r["direction"] == direction and r["dtype"] == dtype])
                axes[i][j].set_title(f"{op}, {direction}, {dtype}", fontsize=10)
            axes[i][0].set_ylabel("effective bandwidth, GB/s")
        for axis in axes[-1]:
            axis.set_xlabel("columns")
        handles = {h.get_label(): h for a in axes.flat for h in a.get_lines()}
        figure.legend(
            handles.values(), handles.keys(), loc="lower center", ncols=len(handles), fontsize=8, frameon=False
        )
        environment = data["environment"]
        figure.suptitle(f"{environment['device']}, jax {environment['jax']}, {environment['date'][:10]}", fontsize=10)
        figure.tight_layout(rect=(0, 0.04, 1, 0.98))
        path = stem.with_name(f"{stem.name}-{op}.png")
        figure.savefig(path, dpi=110)
        plt.close(figure)
        written.append(path)
    return written


DIRECTIONS = {"forward": "forward", "backward": "gradient", "both": "value and gradient", "step": "step"}


def speeds(data: dict[str, Any]) -> dict[str, dict[str, float]]:
    """{direction: {implementation: its speed as a fraction of a copy's}}, geometric means over all cells of a file."""
    found: dict[str, dict[str, list[float]]] = {}
    for r in data["results"]:
        times = _report.medians(r)
        if _goals.COPY not in times or _goals.OURS not in times or _report.is_compute_bound(data, r):
            continue
        for name, us in times.items():
            if name in STYLES and name != _goals.COPY:
                ratios = found.setdefault(r["direction"], {}).setdefault(name, [])
                ratios.append(math.log(times[_goals.COPY] / us))
    return {d: {k: math.exp(sum(v) / len(v)) for k, v in who.items()} for d, who in found.items()}


def overview(files: list[dict[str, Any]], path: pathlib.Path) -> pathlib.Path:
    """Draws a row for each family and direction: speeds as fractions of a plain copy's, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = []
    for data in sorted(files, key=lambda data: data["operation"], reverse=True):
        for direction, who in reversed(speeds(data).items()):
            rows.append((f"{data['operation']}, {DIRECTIONS.get(direction, direction)}", who))
    figure, axis = plt.subplots(figsize=(8, 1.2 + 0.22 * len(rows)))
    for name, label in {"torch": "PyTorch", "xla": "XLA", "jaxkern": "jaxkern"}.items():
        points = [(who[name], k) for k, (_, who) in enumerate(rows) if name in who]
        style = {k: v for k, v in STYLES[name].items() if k in ("color", "marker", "zorder")}
        if points:
            axis.scatter(*zip(*points), label=label, s=30, **style)
    axis.axvline(1, label="copy", **STYLES["copy"])
    axis.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    axis.set_xscale("log")
    axis.grid(alpha=0.25)
    axis.set_xlabel("fraction of the speed of a copy of the same bytes (geometric mean)")
    axis.set_title(", ".join(dict.fromkeys(data["environment"]["device"] for data in files)), fontsize=10)
    figure.legend(fontsize=8, loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _programs(data: dict[str, Any], stem: pathlib.Path, plt: Any) -> list[pathlib.Path]:
    """How many times faster each program is, on a logarithmic axis; where it was measured, beside PyTorch Geometric."""
    times = [(r, _report.medians(r)) for r in data["results"]]
    rows = [
        (f"{r['case']}, {r['dtype']}", t["xla"] / t[_goals.OURS], t.get("pyg", 0) / t[_goals.OURS])
        for r, t in times
        if {"xla", _goals.OURS} <= t.keys()
    ]
    if not rows:
        return []
    rows.sort(key=lambda row: row[1])
    names, ratios, peers = zip(*rows)
    figure, axis = plt.subplots(figsize=(8, 0.8 + 0.28 * len(rows)))
    bars = axis.barh(names, ratios, color=STYLES["xla"]["color"], left=0, label="plain JAX")
    for k, (ratio, peer) in enumerate(zip(ratios, peers)):
        text = f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.3g}"
        at = peer if ratio < peer < 2 * ratio else ratio  # a number behind the bar, or behind the marker beside it
        style = {"color": STYLES["xla"]["color"], "va": "center", "fontsize": 8}
        axis.annotate(text, (at, k), xytext=(5, 0), textcoords="offset points", **style)
    if points := [(peer, k) for k, peer in enumerate(peers) if peer]:
        style = {"color": STYLES["pyg"]["color"], "marker": STYLES["pyg"]["marker"], "edgecolors": "white", "zorder": 5}
        marks = axis.scatter(*zip(*points), s=36, linewidths=0.6, label="PyTorch Geometric", **style)
        axis.legend(handles=[bars, marks], fontsize=8, loc="lower right", frameon=False)
    axis.set_xscale("log")
    axis.margins(x=0.12)
    axis.axvline(1, color="#999999", lw=0.8)
    what = "a plain step" if not any(peers) else "a step"
    axis.set_xlabel(f"time of {what} / time under jaxkern.accelerate()")
    axis.tick_params(labelsize=8)
    axis.set_title(f"{data['environment']['device']}, jax {data['environment']['jax']}", fontsize=10)
    figure.tight_layout()
    path = stem.with_name(f"{stem.name}.png")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return [path]


def _skew(data: dict[str, Any], stem: pathlib.Path, plt: Any) -> list[pathlib.Path]:
    """One panel per dtype and operation, over the cases of one shape from even indices to all on one row."""
    rows = [r for r in data["results"] if r["group"] == "skew" and "copy" in _report.medians(r)]
    if not rows:
        return []
    dtypes, ops = (list(dict.fromkeys(r[k] for r in rows)) for k in ("dtype", "op"))
    figure, axes = plt.subplots(len(ops), len(dtypes), figsize=(4.6 * len(dtypes), 3.4 * len(ops)), squeeze=False)
    for i, op in enumerate(ops):
        for j, dtype in enumerate(dtypes):
            mine, axis = [r for r in rows if r["op"] == op and r["dtype"] == dtype], axes[i][j]
            for name in dict.fromkeys(k for r in mine for k in _report.medians(r) if k != "copy" and ":" not in k):
                points = [(k, t[name] / t["copy"]) for k, t in enumerate(map(_report.medians, mine)) if name in t]
                axis.plot(*zip(*points), label=name, **{"markersize": 4} | STYLES.get(name, {}))
            axis.axhline(1, label="floor", **STYLES["copy"])
            axis.set_xticks(range(len(mine)), [r["kind"] for r in mine], rotation=30, fontsize=8)
            axis.set_yscale("log")
            axis.set_title(f"{op}, {dtype}", fontsize=10)
            axis.grid(alpha=0.25)
        axes[i][0].set_ylabel("time / floor")
    axes[0][0].legend(fontsize=8, frameon=False)
    environment = data["environment"]
    figure.suptitle(
        f"{rows[0]['case'].rsplit(' ', 1)[0]}: {environment['device']}, jax {environment['jax']}", fontsize=10
    )
    figure.tight_layout()
    path = stem.with_name(f"{stem.name}-skew.png")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return [path]


def _loops(data: dict[str, Any], stem: pathlib.Path, plt: Any) -> list[pathlib.Path]:
    """A panel for each number of steps: the time of a loop against its lanes."""
    rows = [r for r in data["results"] if r["group"] == "lanes"]
    lengths = sorted({r["shape"][0] for r in rows})
    if not rows:
        return []
    figure, axes = plt.subplots(1, len(lengths), figsize=(3.4 * len(lengths), 3.4), squeeze=False, sharey=True)
    labels = {"xla": "lax.scan", "associative_scan": "lax.associative_scan"}
    for axis, length in zip(axes[0], lengths):
        mine = sorted((r for r in rows if r["shape"][0] == length), key=lambda r: r["shape"][1])
        for name in dict.fromkeys(k for r in mine for k in _report.medians(r)):
            points = [(r["shape"][1], t[name]) for r, t in zip(mine, map(_report.medians, mine)) if name in t]
            axis.plot(*zip(*points), label=labels.get(name, name), **{"markersize": 4} | STYLES.get(name, {}))
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(f"{length} steps", fontsize=10)
        axis.set_xlabel("lanes")
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("us")
    axes[0][-1].legend(fontsize=8, frameon=False)
    environment = data["environment"]
    figure.suptitle(f"linear recurrence, float32: {environment['device']}, jax {environment['jax']}", fontsize=10)
    figure.tight_layout()
    path = stem.with_name(f"{stem.name}.png")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return [path]


def _scaling(data: dict[str, Any], stem: pathlib.Path, plt: Any) -> list[pathlib.Path]:
    """One column per case: the time of a call, and the fraction of perfect scaling, against the number of devices."""
    names = list(dict.fromkeys(r["of"] for r in data["results"]))
    figure, axes = plt.subplots(2, len(names), figsize=(2.6 * len(names), 5.4), squeeze=False, sharex=True)
    for (above, below), name in zip(axes.T, names):
        rows = [r for r in data["results"] if r["of"] == name]
        devices = [r["devices"] for r in rows]
        for who in rows[0]["scaling"]:
            style = {"markersize": 4} | STYLES.get(who, {})
            above.plot(devices, [_report.medians(r)[who] / 1000 for r in rows], label=who, **style)
            below.plot(devices, [r["scaling"][who] for r in rows], label=who, **style)
        for goal in rows[-1]["goals"]:
            below.axhline(goal["required"], label="goal", **STYLES["copy"])
        below.set_xscale("log", base=2)
        below.set_xticks(devices, [str(n) for n in devices])
        above.set_ylim(bottom=0)
        below.set_ylim(0, max(1.15, 1.05 * max(v for r in rows for v in r["scaling"].values())))
        above.set_title(name, fontsize=9)
        below.set_xlabel("devices")
        above.grid(alpha=0.25)
        below.grid(alpha=0.25)
    axes[0][0].set_ylabel("ms per call")
    axes[1][0].set_ylabel("fraction of perfect scaling")
    axes[1][0].legend(fontsize=8, frameon=False)
    environment = data["environment"]
    figure.suptitle(f"{environment['device']}, jax {environment['jax']}, {environment['date'][:10]}", fontsize=10)
    figure.tight_layout()
    path = stem.with_name(f"{stem.name}.png")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return [path]


def _panel(axis: Any, rows: list[dict[str, Any]]) -> None:
    rows = sorted(rows, key=lambda r: r["width"])
    lines: dict[str, list[tuple[int, float]]] = {}
    elsewhere: dict[str, list[tuple[int, float]]] = {}
    for r in rows:
        times = _report.medians(r)
        for name, us in times.items():
            if ":" not in name:
                lines.setdefault(name, []).append((r["width"], r["bytes"] / us / 1e3))
        if "copy" in times and r["group"] == "sweep":
            known = _goals.published("softmax", r["direction"], _report._itemsize(r["dtype"]), r["width"])
            for peer, ratio in known.items():
                elsewhere.setdefault(peer, []).append((r["width"], r["bytes"] / times["copy"] / 1e3 * ratio))
    for peer, points in elsewhere.items():
        axis.plot(*zip(*points), label=f"{peer} (elsewhere)", **STYLES.get(peer, {}), **THIN)
    for name, points in lines.items():
        axis.plot(*zip(*points), label=name, **{"markersize": 4, "linewidth": 1.3} | STYLES.get(name, {}))
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
