"""Which figures the result files give. `python -m benchmarks plot` draws all of them to docs/figures, for light and dark pages.

Each function below takes the files of one operation, one for each GPU, and returns {name: figure}. A colour stands for the same
implementation everywhere (benchmarks/palette.py), the words for cells are benchmarks/_words.py's, and benchmarks/_svg.py draws. Speeds
are relative to a copy of the same bytes, or to XLA where arithmetic decides the time, and have the line at 1 of what they are relative
to. Times are drawn where a base would be arbitrary. What did not end, and what was not run, is said in words.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any

from benchmarks import _compose, _goals, _overview, _report, _svg, _words, palette
from benchmarks._compose import Cell, Files, cells, dots, lines, titled
from benchmarks._svg import Axis, Dots, Figure, Lines, Point, Row

RESULTS = pathlib.Path(__file__).parent / "results"
FIGURES = pathlib.Path(__file__).parent.parent / "docs" / "figures"

FASTER = "faster"
ARXIV = "A graph of ogbn-arxiv's size: 169\u00a0343 nodes and 1.17 million edges."


# ---- rows: bandwidth against columns


def _elsewhere(operation: str) -> Callable[[Cell], dict[str, float]]:
    """Bandwidths of peers.json, whose GPU was an H200."""

    def more(r: Cell) -> dict[str, float]:
        copy, direction = _report.medians(r).get(_goals.COPY), _report.PUBLISHED.get(r["direction"], r["direction"])
        if copy is None or r["group"] not in ("sweep", "classes"):
            return {}
        known = _goals.published(operation, direction, _report.itemsize(r["dtype"]), r["width"])
        return {who: r["bytes"] / copy / 1e3 * ratio for who, ratio in known.items() if who in palette.LOOKS}

    return more


def _bandwidth(files: Files, title: str, columns: str, keep: Callable[[Cell], bool], published: str = "") -> Figure:
    on_h200 = all(_words.device(data["environment"]) == "H200" for data in files)
    more = _elsewhere(published) if published and on_h200 else lambda r: {}
    figure = lines(
        files,
        title,
        Axis(columns, base=2),
        Axis("effective bandwidth, GB/s", FASTER, log=False),
        lambda r, us: r["bytes"] / us / 1e3,
        lambda r: f"{_words.direction(r)}, {r['dtype']}",
        keep=keep,
        more=more,
    )
    shown = [palette.LOOKS[who].name for who in figure.shown() if who in palette.ELSEWHERE]
    return _with_note(figure, _peers(shown)) if shown else figure


def _peers(names: list[str]) -> str:
    listed = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
    return f"{listed}: measured in another run on an H200, and scaled by the copies of both runs."


def _with_note(figure: Figure, note: str) -> Figure:
    return dataclasses.replace(figure, note=" ".join(filter(None, (figure.note, note))))


def _softmax(files: Files) -> dict[str, Figure]:
    names = {"softmax": "Softmax of rows", "log_softmax": "Log-softmax of rows"}
    row = lambda op: lambda r: r["op"] == op and r["group"] in ("sweep", "cpu")
    wide = dots(
        files,
        "Softmax of other shapes",
        lambda r: _words.case("softmax", r),
        keep=lambda r: r["op"] == "softmax" and r["group"] not in ("sweep", "cpu"),
    )
    found = {f"softmax-{op}": _bandwidth(files, names[op], "columns", row(op), "softmax") for op in names}
    return found | {"softmax-shapes": wide}


def _norm(files: Files) -> dict[str, Figure]:
    """Rows of whole vectors as lines; odd widths, residuals and images as dots."""
    even = lambda r: r["width"] % 64 == 0 and "residual" not in r["case"] and r["group"] in ("narrow", "rows", "cpu")
    keep = lambda op: lambda r: r["op"] == op and even(r)
    panel = lambda r: f"{r['op']}, {_words.direction(r)}"
    titles = {"rms_norm": "RMSNorm of rows", "layer_norm": "LayerNorm of rows"}
    words = lambda r: _words.case("norm", r)
    found = {f"norm-{op}": _bandwidth(files, title, "columns", keep(op)) for op, title in titles.items()}
    rows = lambda r: len(r["shape"]) < 4
    others = lambda r: rows(r) and not even(r)
    found["norm-shapes"] = dots(files, "Norms of other rows: odd widths, few rows, residuals", words, panel, others)
    images = lambda r: not rows(r) and r["direction"] != "backward"
    found["norm-images"] = dots(files, "Norms of images", words, panel, images)
    return found


def _cross_entropy(files: Files) -> dict[str, Figure]:
    keep = lambda r: r["group"] in ("classes", "cpu")
    return {"cross_entropy": _bandwidth(files, "Cross-entropy from logits", "classes", keep, "cross_entropy")}


# ---- speeds by what is computed


def _simple(operation: str, title: str, label: Callable[[Cell], str], **more: Any) -> Callable[[Files], dict]:
    return lambda files: {operation: dots(files, title, label, **more)}


def _elementwise(files: Files) -> dict[str, Figure]:
    sizes = lines(
        files,
        "Elementwise functions by size",
        Axis("elements", base=2),
        Axis("effective bandwidth, GB/s, mean of functions", FASTER, log=False),
        lambda r, us: r["bytes"] / us / 1e3,
        lambda r: f"{_words.direction(r)}, {r['dtype']}",
        keep=lambda r: r["group"] == "sizes" and r["dtype"] != "float16",
        note="PyTorch has some of the functions, and its mean is over these.",
    )
    return {"elementwise": sizes}


def _index_add(files: Files) -> dict[str, Figure]:
    skew = dots(
        files,
        "Adding the edges of a graph to its nodes, from even to all on one node",
        lambda r: _words.KINDS[r["kind"]],
        lambda r: r["op"],
        lambda r: r["group"] == "skew",
        by_dtype=True,
        note=f"{ARXIV} Rows of 128 features. Where XLA has no mark for bfloat16 it was not run: a call of its like takes seconds.",
    )
    cases = dots(
        files,
        "Sums at indices, and rows at indices",
        lambda r: _words.case("index_add", r).replace(
            "graph of ogbn-arxiv's size, 1.17\u00a0million edges, ", "edges of a graph, "
        ),
        lambda r: r["op"],
        lambda r: r["group"] != "skew",
        note=ARXIV,
    )
    return {"index_add-skew": skew, "index_add": cases}


def _segment_softmax(files: Files) -> dict[str, Figure]:
    note = "1.17 million rows if not said otherwise. XLA was not run where a call of its like takes as many seconds as the figure says."
    label = lambda r: _words.case("segment_softmax", r).replace("1.17\u00a0million rows of ", "rows of ")
    return {"segment_softmax": dots(files, "Softmax of segments", label, note=note)}


def _messages(files: Files) -> dict[str, Figure]:
    return {
        "messages": lines(
            files,
            "Messages: gather, a function and a sum",
            Axis("features of a node", base=2),
            Axis("speed as a fraction of a copy's", FASTER, log=False),
            lambda r, us: r["times"][_goals.COPY]["median_us"] / us,
            lambda r: f"{_words.direction(r)}, {r['dtype']}",
            keep=lambda r: r["op"] == "edge_sum" and r["group"] == "width",
            note=f"{ARXIV} Its degrees are even. Above 1, the cache has rows that several edges read.",
        ),
        "messages-functions": dots(
            files,
            "Messages: other functions, and uneven graphs",
            lambda r: f"{_words.operation(r)}, {_words.case('messages', r).split('edges, ')[1]}",
            keep=lambda r: r["group"] != "width" or r["op"] != "edge_sum" and r["width"] == 128,
            note=ARXIV,
        ),
    }


# ---- loops


def _scan(files: Files) -> dict[str, Figure]:
    figure = lines(
        files,
        "A linear recurrence as a loop",
        Axis("lanes", base=2),
        Axis("time of a call, µs", FASTER, larger=False),
        lambda r, us: us,
        lambda r: f"{_words.count(r['shape'][0])} steps",
        keep=lambda r: r["group"] == "lanes",
        order=lambda r: r["shape"][0],
        note="XLA runs lax.scan, which starts kernels in every step.",
    )
    return {"scan": figure, "scan-loops": _by_loop(files, "scan", "Loops: jaxkern.scan beside lax.scan")}


def _by_loop(files: Files, operation: str, title: str) -> Figure:
    """A dot for every cell: how many times as fast as XLA's loop."""
    found: dict[str, dict[str, list[Point]]] = {}
    for data, r in cells(files):
        times = _report.medians(r)
        if {"xla", _goals.OURS} <= times.keys():
            rows = found.setdefault(titled(files, data, _words.direction(r)), {})
            rows.setdefault(_words.operation(r), []).append(Point(_goals.OURS, times["xla"] / times[_goals.OURS]))
    panels = [
        Dots(h, tuple(Row(words, tuple(p), _compose.range_of(p)) for words, p in rows.items()))
        for h, rows in found.items()
    ]
    name = {"scan": "lax.scan", "while_loop": "lax.while_loop"}[operation]
    return _compose.figure(
        files,
        title,
        panels,
        x=Axis(f"times as fast as {name} under XLA", FASTER),
        base=f"1: {name}",
        base_who="xla",
        note="A dot for every number of steps and lanes that was measured.",
    )


def _while_loop(files: Files) -> dict[str, Figure]:
    figure = lines(
        files,
        "Loops in which each lane stops on its own",
        Axis("lanes", base=2),
        Axis("time of a call, µs", FASTER, larger=False),
        lambda r, us: us,
        lambda r: _words.operation(r) + ("" if r["direction"] == "forward" else ", forward mode"),
        order=lambda r: (list(_words.OPERATIONS).index(r["op"]) if r["op"] in _words.OPERATIONS else 0, r["direction"]),
        note="XLA runs lax.while_loop under vmap: all lanes take as many steps as the slowest one.",
    )
    return {"while_loop": _without(figure, _goals.COPY)}


def _without(figure: Figure, who: str) -> Figure:
    panels = [Lines(p.title, {k: v for k, v in p.lines.items() if k != who}) for p in figure.panels]
    return dataclasses.replace(figure, panels=tuple(panels))


# ---- programs


def _programs(files: Files) -> dict[str, Figure]:
    """Milliseconds of a training step: no base, since XLA has no time where it did not end."""
    panels = []
    for dtype in ("bfloat16", "float32"):
        for data in files:
            rows = []
            for r in data["results"]:
                times = _report.medians(r)
                if r["dtype"] == dtype and _goals.OURS in times:
                    points = [Point(who, times[who] / 1000) for who in (_goals.OURS, "xla", "pyg") if who in times]
                    rows.append((_compose.ratio(times) if "xla" in times else math.inf, r, points))
            rows.sort(key=lambda row: row[0])
            panels.append(Dots(titled(files, data, dtype), tuple(
                Row(
                    _words.case("programs", r),
                    tuple(points),
                    f"{_factor(ratio)}" if math.isfinite(ratio) else "",
                    "" if math.isfinite(ratio) else _compose.ended(r),
                )
                for ratio, r, points in rows
            )))  # fmt: skip
    return {
        "programs": _compose.figure(
            files,
            "Training steps of unchanged programs",
            [p for p in panels if p.rows],
            x=Axis("time of a step, ms", FASTER, larger=False),
            note="XLA: plain JAX. jaxkern: the same program under jaxkern.accelerate(). Beside the marks: how many times as fast "
            "jaxkern is as XLA. An arrow: XLA had not ended a few steps after that time. "
            "PyTorch Geometric runs the same model in the fastest of four ways.",
        )
    }


def _factor(ratio: float) -> str:
    return (
        f"{ratio:,.0f}×".replace(",", "\u00a0")
        if ratio >= 10
        else f"{ratio:.1f}×"
        if ratio >= 1.995
        else f"{ratio:.2f}×"
    )


# ---- several devices


def _sharding(files: Files) -> dict[str, Figure]:
    """The fraction of perfect scaling, weak and strong apart."""
    found: dict[str, list[Row]] = {}
    for weak in (True, False):
        for data, r in cells(files, lambda r: r["devices"] > 1 and (r["group"] in _words.WEAK) == weak):
            n = r["devices"]
            kind = (
                "Weak scaling: each has the work of one alone" if weak else "Strong scaling: they share the work of one"
            )
            points = tuple(Point(who, r["scaling"][who]) for who in (_goals.OURS, "xla"))
            rows = found.setdefault(titled(files, data, f"{kind}, {n} GPUs"), [])
            rows.append(Row(_words.SPLITS.get(r["of"], r["of"]), points))
    figure = _compose.figure(
        files,
        "Several GPUs: the fraction of perfect scaling",
        [Dots(heading, tuple(rows)) for heading, rows in found.items()],
        x=Axis("speed as a fraction of perfect scaling", "better", log=False),
        base="1: perfect scaling",
        note="Each implementation is compared with itself on one GPU. A mark further to the right is not a faster program: the times "
        "are in the table.",
    )
    return {"sharding": figure} if found else {}


# ---- everything


OPERATIONS: dict[str, Callable[[Files], dict[str, Figure]]] = {
    "programs": _programs,
    "sharding": _sharding,
    "softmax": _softmax,
    "fused_softmax": _simple("fused_softmax", "Attention weights in one pass", _words.operation),
    "score": _simple("score", "Softmax of a function of scores", _words.operation),
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _simple(
        "linear_cross_entropy",
        "The last product of a language model with its loss",
        lambda r: _words.case("linear_cross_entropy", r).split(":")[0],
        base="xla",
        note="Llama 3: 8 192 tokens, 4 096 features, 128 256 words. GPT-2: 32 768 tokens, 768 features, 50 257 words. The memory is "
        "what the gradient may take beside its operands and results.",
    ),
    "norm": _norm,
    "quantize": _simple("quantize", "Quantisation to 8 bits", _words.operation, by_dtype=True),
    "reduction": _simple(
        "reduction",
        "Reductions, geometric mean of five",
        lambda r: _words.case("reduction", r),
        by_dtype=True,
        note="Sum, mean, maximum, minimum and logsumexp.",
    ),
    "elementwise": _elementwise,
    "elementwise_kernel": _simple(
        "elementwise_kernel",
        "Own elementwise functions",
        lambda r: _words.case("elementwise_kernel", r),
        panel=lambda r: f"{_words.operation(r)}: {_words.direction(r)}",
    ),
    "row_kernel": _simple("row_kernel", "Own functions of rows", _words.operation, by_dtype=True),
    "index_add": _index_add,
    "segment_softmax": _segment_softmax,
    "messages": _messages,
    "sparse": _simple("sparse", "Bags, experts, attention and products on graphs", _words.operation, by_dtype=True),
    "select": _simple(
        "select",
        "Selection",
        lambda r: _words.case("select", r),
        panel=lambda r: _words.operation(r) + (", bfloat16" if r["dtype"] == "bfloat16" else ""),
    ),
    "selected": _simple(
        "selected",
        "Programs that select, sort and count, as they are",
        lambda r: _words.case("selected", r),
        panel=_words.operation,
        keep=lambda r: r["op"] == "program",
        base="xla",
    ),
    "scan": _scan,
    "while_loop": _while_loop,
    "associative_scan": _simple(
        "associative_scan",
        "Cumulative sums and recurrences by an associative operation",
        lambda r: _words.case("associative_scan", r),
        panel=lambda r: {"recurrence": "linear recurrence"}.get(r["op"], r["op"]),
        by_dtype=True,
    ),
}


def load(folder: pathlib.Path = RESULTS) -> Files:
    """Every result file of a folder, in the order of OPERATIONS."""
    files = [_report.load(path) for path in sorted(folder.glob("*.json"))]
    order = list(OPERATIONS)
    return sorted(files, key=lambda d: order.index(d["operation"]) if d["operation"] in order else len(order))


def figures(files: Files) -> dict[str, Figure]:
    """{name: figure} of operations, whose names begin with the operation's."""
    found: dict[str, Figure] = {}
    for operation, draw in OPERATIONS.items():
        if of := [data for data in files if data["operation"] == operation]:
            found |= {name: figure for name, figure in draw(of).items() if any(_compose.implementations(figure.panels))}
    return found


def everything(files: Files) -> dict[str, Figure]:
    """All figures: the overviews, and the figures of each operation."""
    whole = {"speed": _overview.speed(files), "kernels": _overview.kernels(files), "losses": _overview.losses(files)}
    return whole | figures(files)


def write(found: dict[str, Figure], folder: pathlib.Path) -> list[pathlib.Path]:
    """FOLDER/NAME-light.svg and NAME-dark.svg of each figure."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in found.items():
        for theme in palette.THEMES:
            path = folder / f"{name}-{theme}.svg"
            path.write_text(_svg.lay_out(figure, theme).svg())
            written.append(path)
    return written


def plot(data: dict[str, Any], stem: pathlib.Path) -> list[pathlib.Path]:
    """The figures of one result file, beside it: STEM-light.svg, or STEM-PART-light.svg of several."""
    named = {stem.name + name.removeprefix(data["operation"]): figure for name, figure in figures([data]).items()}
    return write(named, stem.parent)


def plot_all() -> list[pathlib.Path]:
    """All figures of benchmarks/results, to docs/figures, where there are no others afterwards."""
    written = write(everything(load()), FIGURES)
    for path in set(FIGURES.glob("*.svg")) - set(written):
        path.unlink()
    return written
