"""Rows of dots and panels of lines for figures, from the cells of result files, with the machines that ran them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks import _goals, _report, _words, palette
from benchmarks._scale import number
from benchmarks._svg import Axis, Dots, Figure, Lines, Point, Row

Files = list[dict[str, Any]]  # of one operation, or of all
Cell = dict[str, Any]

OF_COPY = Axis("speed as a fraction of a copy's", "faster")
OF_XLA = Axis("times as fast as XLA", "faster")


def environment(files: Files, peers: Iterable[str] = ()) -> str:
    """GPU, driver, versions and days, a line for each GPU."""
    found: dict[tuple[str, ...], list[str]] = {}
    for data in files:
        e = data["environment"]
        names = {"torch": "PyTorch", "torch_geometric": "PyTorch Geometric"}
        versions = [f"{names[k]} {e[k]}" for k in names if k in peers and e.get(k)]
        driver = [f"driver {e['driver']}"] if e["driver"] else []
        found.setdefault((e["device"], *driver, f"JAX {e['jax']}", *versions), []).append(e["date"][:10])
    parts = [
        ", ".join((*machine, min(dates) if min(dates) == max(dates) else f"{min(dates)} to {max(dates)}"))
        for machine, dates in found.items()
    ]
    return "\n".join(parts)


def mean(values: Iterable[float]) -> float:
    """Geometric."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))


def cells(files: Files, keep: Callable[[Cell], bool] = lambda r: True) -> list[tuple[dict[str, Any], Cell]]:
    return [(data, r) for data in files for r in data["results"] if keep(r)]


def beside(columns: list[Dots]) -> Dots:
    """One panel of the same rows on several GPUs, which are named where there is more than one."""
    first, *more = columns
    return dataclasses.replace(first, gpu=first.gpu if more else "", beside=tuple(more))


def titled(files: Files, data: dict[str, Any], words: str) -> str:
    """The title of a panel, which names its GPU if there are several."""
    several = len({d["environment"]["device"] for d in files}) > 1
    gpu = _words.device(data["environment"])
    return (f"{gpu}: {words}" if words else gpu) if several else words


def implementations(panels: Iterable[Any]) -> set[str]:
    dots = [p.who for d in panels if isinstance(d, Dots) for p in d.points()]
    return set(dots) | {who for panel in panels if isinstance(panel, Lines) for who in panel.lines}


def figure(files: Files, title: str, panels: list[Any], **more: Any) -> Figure:
    used = implementations(panels)
    peers = [name for name, who in (("torch", {"torch", "pyg"}), ("torch_geometric", {"pyg"})) if used & who]
    return Figure(title, environment(files, peers), tuple(panels), **more)


def dots(
    files: Files,
    title: str,
    label: Callable[[Cell], str],
    panel: Callable[[Cell], str] = _words.direction,
    keep: Callable[[Cell], bool] = lambda r: True,
    base: str = _goals.COPY,
    by_dtype: bool = False,
    note: str = "",
) -> Figure:
    """Rows with the geometric mean of the speeds of their cells; by dtype, bfloat16 is filled and float32 is hollow."""
    found: dict[str, dict[str, dict[tuple[str, str, bool], list[float]]]] = {}
    missing: dict[tuple[str, str, str], str] = {}
    for data, r in cells(files, keep):
        times, gpu = _report.medians(r), _words.device(data["environment"])
        if base not in times or _goals.OURS not in times or (by_dtype and r["dtype"] == "float16"):
            continue
        points = found.setdefault(panel(r), {}).setdefault(label(r), {})
        if "xla" not in times:
            missing[panel(r), label(r), gpu] = _not_run(r)
        for who, us in times.items():
            if who in palette.LOOKS and who not in (base, _goals.COPY):
                key = gpu, who, by_dtype and r["dtype"] == "float32"
                points.setdefault(key, []).append(times[base] / us)

    def row(heading: str, words: str, gpu: str) -> Row:
        of = {(who, hollow): v for (g, who, hollow), v in found[heading][words].items() if g == gpu}
        beyond = "" if any(who == "xla" for who, _ in of) else missing.get((heading, words, gpu), "")
        points = (Point(who, mean(v), hollow) for (who, hollow), v in of.items())
        return Row(words, tuple(points), beyond=beyond, left=True)

    gpus = sorted({key[0] for rows in found.values() for points in rows.values() for key in points})
    panels = [
        beside([Dots(heading, tuple(row(heading, words, gpu) for words in rows), gpu) for gpu in gpus])
        for heading, rows in found.items()
    ]
    return figure(
        files,
        title,
        panels,
        x=OF_COPY if base == _goals.COPY else OF_XLA,
        base="1: a copy of the same bytes" if base == _goals.COPY else "1: XLA",
        base_who=base,
        note=note,
    )


def _not_run(r: Cell) -> str:
    seconds = re.search(r"([\d.]+) s a call of its like", r["times"].get("xla", {}).get("error", ""))
    return f"XLA: {seconds[1]} s a call" if seconds else ""


def lines(
    files: Files,
    title: str,
    x: Axis,
    y: Axis,
    value: Callable[[Cell, float], float],
    panel: Callable[[Cell], str],
    at: Callable[[Cell], float] = lambda r: r["width"],
    keep: Callable[[Cell], bool] = lambda r: True,
    more: Callable[[Cell], dict[str, float]] = lambda r: {},
    order: Callable[[Cell], Any] = lambda r: (r["dtype"], list(_words.DIRECTIONS).index(r["direction"])),
    note: str = "",
) -> Figure:
    """Points of value(cell, microseconds), and of `more`, at at(cell). Points at one place are averaged."""
    found: dict[str, dict[str, dict[float, list[float]]]] = {}
    for data, r in sorted(cells(files, keep), key=lambda cell: order(cell[1])):
        series = found.setdefault(titled(files, data, panel(r)), {})
        values = {who: value(r, us) for who, us in _report.medians(r).items() if who in palette.LOOKS}
        for who, v in (values | more(r)).items():
            series.setdefault(who, {}).setdefault(at(r), []).append(v)
    panels = [
        Lines(words, {who: [(k, mean(v)) for k, v in sorted(points.items())] for who, points in series.items()})
        for words, series in found.items()
    ]
    return figure(files, title, panels, x=x, y=y, note=note)


def ratio(times: dict[str, float]) -> float:
    return times["xla"] / times[_goals.OURS]


def range_of(points: Iterable[Point]) -> str:
    values = [p.value for p in points]
    text = lambda v: number(float(f"{v:.2g}")) if v >= 9.95 else f"{v:.1f}" if v >= 0.995 else f"{v:.2f}"
    low, high = text(min(values)), text(max(values))
    return f"{low}×" if low == high else f"{low} to {high}×"


def ended(r: Cell) -> str:
    """What is said of XLA, beside an arrow in its colour: no end in 230 s."""
    seconds = re.search(r"did not end in (\d+) s", r["times"].get("xla", {}).get("error", ""))
    return f"no end in {seconds[1]} s" if seconds else "XLA failed"
