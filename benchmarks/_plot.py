"""The figure of OneFlow's softmax article: effective bandwidth against the number of columns.

One panel a direction and dtype, one line an implementation, the copy as the dashed limit. Peers that
were measured elsewhere (peers.json) are drawn thin, scaled by their ratio to the copy of their run.
"""

from __future__ import annotations

import pathlib
from typing import Any

from benchmarks import _goals, _report

STYLES = {
    "jaxkern": {"color": "#d62728", "marker": "o", "linewidth": 2.0, "zorder": 5},
    "xla": {"color": "#1f77b4", "marker": "s"},
    "torch": {"color": "#ff7f0e", "marker": "^"},
    "copy": {"color": "black", "linestyle": "--", "linewidth": 1.2},
    "oneflow": {"color": "#2ca02c"},
    "cudnn": {"color": "#9467bd"},
    "quack": {"color": "#8c564b"},
    "liger": {"color": "#7f7f7f"},
}
THIN = {"linewidth": 0.9, "linestyle": ":", "alpha": 0.8}


def plot(data: dict[str, Any], stem: pathlib.Path) -> list[pathlib.Path]:
    """Draws STEM-OP.png for each operation in a result file; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    written = []
    rows = [r for r in data["results"] if r["group"] in ("sweep", "odd", "cpu")]
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
        figure.suptitle(
            f"{environment['device']}, jax {environment['jax']}, {environment['date'][:10]}", fontsize=10
        )
        figure.tight_layout(rect=(0, 0.04, 1, 0.98))
        path = stem.with_name(f"{stem.name}-{op}.png")
        figure.savefig(path, dpi=110)
        plt.close(figure)
        written.append(path)
    return written


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
