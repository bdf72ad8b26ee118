"""Figures of all operations together: the figure of README.md, speeds beside a copy, and where others are faster."""

from __future__ import annotations

import math
from typing import Any

from benchmarks import _compose, _goals, _report, _words
from benchmarks._compose import OF_COPY, Cell, Files
from benchmarks._svg import Axis, Dots, Figure, Point, Row


def _speeds(data: dict[str, Any]) -> dict[str, dict[str, float]]:
    """{direction: {implementation: its speed as a fraction of a copy's}}, geometric means.

    jaxkern's is over all cells of the file. The others did not run in all: they are as far from it as in the cells that both ran.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for r in data["results"]:
        times = _report.medians(r)
        if _goals.COPY in times and _goals.OURS in times and not _report.is_compute_bound(data, r):
            of = found.setdefault(_words.direction(r), {})
            of.setdefault(_goals.OURS, []).append(times[_goals.COPY] / times[_goals.OURS])
            for who in ("xla", "torch"):
                if who in times:
                    of.setdefault(who, []).append(times[_goals.OURS] / times[who])
    means = {direction: {who: _compose.mean(v) for who, v in of.items()} for direction, of in found.items()}
    return {
        d: {who: v if who == _goals.OURS else v * of[_goals.OURS] for who, v in of.items()} for d, of in means.items()
    }


def kernels(files: Files) -> Figure:
    """A row for each family and direction."""
    used = [data for data in files if _speeds(data)]
    rows: dict[str, dict[str, tuple[Point, ...]]] = {}
    for data in used:
        for direction, of in _speeds(data).items():
            words = f"{_words.FAMILIES[data['operation']]}, {direction}"
            points = tuple(Point(who, v) for who, v in of.items())
            rows.setdefault(words, {})[_words.device(data["environment"])] = points
    gpus = sorted({gpu for of in rows.values() for gpu in of})
    columns = [Dots("", tuple(Row(words, of.get(gpu, ())) for words, of in rows.items()), gpu) for gpu in gpus]
    return _compose.figure(
        used,
        "How near kernels come to the speed of a copy",
        [_compose.beside(columns)],
        x=OF_COPY,
        base="1: a copy of the same bytes",
        note="Geometric means over all shapes and dtypes. XLA and PyTorch are as far from jaxkern as in the cells that both ran.",
    )


def speed(files: Files) -> Figure:
    """README.md's figure: how many times as fast as plain JAX programs and loops are, each measurement a dot."""
    panels = []
    for data in (d for d in files if d["operation"] == "programs"):
        found: dict[str, list[tuple[Point | None, str]]] = {}
        for r in data["results"]:
            times = _report.medians(r)
            if _goals.OURS in times:
                ratio = _compose.ratio(times) if "xla" in times else None
                point = Point(_goals.OURS, ratio, r["dtype"] == "float32") if ratio else None
                found.setdefault(_short(r["case"]), []).append((point, "" if point else _compose.ended(r)))
        rows = []
        for words, of in found.items():
            points = tuple(p for p, _ in of if p)
            beyond = next((text for p, text in of if text), "")
            rows.append(Row(words, points, _compose.range_of(points) if points else "", beyond))
        rows.sort(key=lambda row: (bool(row.beyond), max((p.value for p in row.points), default=math.inf)))
        gpu = _words.device(data["environment"])
        panels.append(Dots(f"Training steps of unchanged programs ({gpu})", tuple(rows)))
    loops: dict[str, list[Row]] = {}
    for data in (d for d in files if d["operation"] in ("scan", "while_loop")):
        times = [_report.medians(r) for r in data["results"] if r["direction"] == "forward"]
        points = tuple(
            Point(_goals.OURS, _compose.ratio(t), hollow=True) for t in times if {"xla", _goals.OURS} <= t.keys()
        )
        kinds = len({r["op"] for r in data["results"]})
        row = Row(f"lax.{data['operation']}, {kinds} loops", points, _compose.range_of(points))
        loops.setdefault(_words.device(data["environment"]), []).append(row)
    panels += [Dots(f"Loops ({gpu})", tuple(rows)) for gpu, rows in loops.items()]
    used = [d for d in files if d["operation"] in ("programs", "scan", "while_loop")]
    return _compose.figure(
        used,
        "How many times as fast as plain JAX",
        panels,
        x=Axis("times as fast as plain JAX", "faster"),
        base="1: plain JAX (XLA)",
        base_who="xla",
        note="A dot for each measurement. Loops differ in their bodies, and in the numbers of steps and lanes.",
    )


def _short(name: str) -> str:
    """Programs that differ in the library they are written with have one row."""
    first, *rest = name.split(", ")
    words = {"transformer": "transformers", "embedding": "embedding", "click model": "click model"}
    words["vocabulary head"] = "vocabulary head"
    kind = [{"zipf": "skewed", "uniform": "even"}[k] for k in rest if k in ("zipf", "uniform")]
    return ", ".join([words.get(first, _words.PROGRAMS.get(first, first)), *kind])


def slower(data: dict[str, Any]) -> list[tuple[float, str, Cell]]:
    """(how many times as fast the fastest other implementation is, which, cell) where jaxkern is slower than noise; worst first."""
    found = []
    for r in data["results"]:
        times = _report.medians(r)
        others = [k for k in ("xla", "associative_scan", "torch", "pyg") if k in times]
        if others and _goals.OURS in times:
            who = min(others, key=times.__getitem__)
            if times[_goals.OURS] > times[who] * (1 + _goals.NOISE):
                found.append((times[_goals.OURS] / times[who], who, r))
    return sorted(found, key=lambda f: -f[0])


def losses(files: Files) -> Figure:
    """The worst cell of each operation in which another implementation is faster, a panel for each GPU."""
    used = [(data, found[0]) for data in files if (found := slower(data))]
    rows: dict[str, list[Row]] = {}
    for data, (ratio, who, r) in sorted(used, key=lambda row: -row[1][0]):
        words = _words.case(data["operation"], r)
        if data["operation"] not in ("sharding", "programs"):
            words = f"{_words.operation(r)}, {_words.direction(r)}, {r['dtype']}: {words}"
        row = Row(words, (Point(who, ratio),), f"{ratio:.2f}×")
        rows.setdefault(_words.device(data["environment"]), []).append(row)
    return _compose.figure(
        [data for data, _ in used],
        "Where others are faster: the worst case of each family",
        [Dots(gpu, tuple(of)) for gpu, of in sorted(rows.items())],
        x=Axis("times as fast as jaxkern", "the other is faster"),
        base="1: jaxkern",
        base_who=_goals.OURS,
        note="Families that are missing have no such case. Differences below 3 % are noise.",
    )
