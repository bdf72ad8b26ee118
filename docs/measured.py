"""Figures and tables of the committed measurements, for the pages of the site.

Figures are the files of docs/figures, which `python -m benchmarks plot` draws from benchmarks/results.
"""

import collections
import functools
import pathlib
import re

from benchmarks import _compose, _goals, _overview, _plot, _report, _words, palette


def both_themes(markdown) -> str:
    """Beside each image NAME-light.svg its partner NAME-dark.svg; the theme of the site shows one of them."""
    image = r"(!\[[^\]]*\]\([\w./-]+)-light\.svg\)"
    return re.sub(image, r"\1-light.svg#only-light) \1-dark.svg#only-dark)", markdown)


def table(head, rows) -> str:
    cells = lambda row: "| " + " | ".join(str(c).replace("|", "\\|") for c in row) + " |"
    return "\n".join([cells(head), "|" + "---|" * len(head), *map(cells, rows)])


@functools.cache
def _results() -> list:
    """The content of every committed result file."""
    return _plot.load()


@functools.cache
def _titles() -> dict:
    """{name: title} of every committed figure."""
    return {name: figure.title for name, figure in _plot.everything(_results()).items()}


def figures(name: str) -> str:
    """The figure of a name, and those whose names begin with it and a hyphen."""
    found = [n for n in _titles() if n == name or n.startswith(f"{name}-")]
    return "\n\n".join(f"![{_titles()[n]}](figures/{n}-light.svg)" for n in found)


def results(operation: str) -> str:
    """Figures of an operation; of each of its files the header and the tables."""
    text = [figures(operation)]
    for data in (d for d in _results() if d["operation"] == operation):
        text += [f"*{_report.header(data)}*", _rows(data), _verdicts(data)]
    return "\n\n".join(t for t in text if t)


def _rows(data) -> str:
    if data["operation"] == "programs":
        return _programs(data)
    if data["operation"] == "sharding":
        return _sharding(data)
    groups: dict = {}
    for r in data["results"]:
        times = _report.medians(r)
        if _goals.OURS in times:
            if _report.is_compute_bound(data, r):
                times.pop(_goals.COPY, None)
            one = data["operation"] == "elementwise"  # 65 operations: one row for each dtype
            op = "all of them" if one else _words.operation(r)
            groups.setdefault((op, _words.direction(r), r["dtype"]), []).append(times)
    rows = []
    for (op, direction, dtype), cells in groups.items():
        speed = [t["xla"] / t[_goals.OURS] for t in cells if "xla" in t]
        copy = [t[_goals.COPY] / t[_goals.OURS] for t in cells if _goals.COPY in t]
        ends = sorted({_number(min(speed)), _number(max(speed))}, key=float) if speed else ["-"]
        rows.append(
            [op, direction, dtype, len(cells), _mean(speed), " to ".join(ends), _mean(copy)]
        )
    head = ["operation", "direction", "dtype", "cells"]
    return table([*head, "times as fast as XLA", "range", "fraction of a copy's speed"], rows)


def _number(value) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _mean(values) -> str:
    return _number(_compose.mean(values)) if values else "-"


def _programs(data) -> str:
    rows, peer = [], any("pyg" in r["times"] for r in data["results"])
    for r in data["results"]:
        times = _report.medians(r)
        taken = sum(d["taken"] for d in r["decisions"])
        ratio = _number(times["xla"] / times[_goals.OURS]) if "xla" in times else "-"
        shown = (_goals.OURS, "xla", *["pyg"] * peer)
        words = _words.case("programs", r)
        cells = [words, r["dtype"], *(_milliseconds(r, who) for who in shown)]
        rows.append([*cells, ratio, f"{taken} of {len(r['decisions'])}"])
    head = ["program", "dtype", "jaxkern, ms", "XLA, ms", *["PyTorch Geometric, ms"] * peer]
    return table([*head, "times as fast as XLA", "operations taken"], rows)


def _milliseconds(r, who) -> str:
    us, error = _report.medians(r).get(who), r["times"].get(who, {}).get("error", "")
    if us is None:
        seconds = re.search(r"did not end in (\d+) s|not within (\d+) s", error)
        return f"no end in {seconds[1] or seconds[2]} s" if seconds else "-"
    return f"{us / 1000:.3g}" if us < 1e6 else f"{us / 1000:.0f}"


def _sharding(data) -> str:
    rows = []
    for r in data["results"]:
        t = _report.medians(r)
        sent = [f"{count} {kind}" for kind, count in r["sent"][_goals.OURS].items()]
        scaling = [f"{r['scaling'][who]:.2f}" for who in (_goals.OURS, "xla")]
        times = [_report.time_text(t.get(who)) for who in (_goals.OURS, "xla")]
        kind = "weak" if r["group"] in _words.WEAK else "strong"
        case = [_words.SPLITS[r["of"]], r["dtype"], kind, r["devices"]]
        rows.append([*case, *times, *scaling, ", ".join(sent) or "nothing"])
    head = ["case", "dtype", "scaling", "GPUs", "jaxkern, µs", "XLA, µs"]
    return table([*head, "of perfect, jaxkern", "of perfect, XLA", "sent"], rows)


def _verdicts(data) -> str:
    goals = [(r, g) for r in data["results"] for g in r["goals"]]
    if not goals:
        return ""
    lines = [f"    * {_label(data, r)}: {_goals.describe(g)}" for r, g in goals if not g["met"]]
    title = f'??? note "Goals met: {len(goals) - len(lines)} of {len(goals)}"\n\n'
    return title + ("\n".join(lines) if lines else "    All of them.")


def _label(data, r) -> str:
    words = [_words.case(data["operation"], r), r["dtype"], _words.direction(r)]
    if data["operation"] in ("programs", "sharding"):
        return ", ".join(words[:2])
    return f"{_words.operation(r)}, {', '.join(words)}"


def losses() -> str:
    """A row for each operation: in how many cells another implementation is faster, and where most."""
    rows = []
    for data in _results():
        slower = _overview.slower(data)
        compared = sum(len(_report.medians(r)) > 1 for r in data["results"])
        worst = "-"
        if slower:
            ratio, who, r = slower[0]
            worst = f"{palette.LOOKS[who].name} {ratio:.2f}×: {_label(data, r)}"
        rows.append([_words.FAMILIES[data["operation"]], compared, len(slower), worst])
    return table(["family", "cells", "jaxkern is slower in", "most in"], rows)


# Operations whose kernels the page about profiling shows, each with its gradient where a profile has it.
PROFILED = (
    *("softmax", "cross_entropy_both", "rms_norm", "group_norm", "reduce_sum", "gelu_erf"),
    *("row_kernel", "elementwise_kernel", "index_add", "segment_sum"),
    *(
        "index_select",
        "segment_softmax",
        "edge_reduce",
        "scan",
        "associative_scan",
        "while_loop",
    ),
)


@functools.cache
def kernels_of() -> dict:
    """{operation: names of its kernels, most frequent first} in the committed profiles of single operations.

    Kernels that the library has no more are left out.
    """
    found: dict = {}
    files = (pathlib.Path(__file__).resolve().parent.parent / "ffi" / "kernels").rglob("*.cuh")
    there = set(re.findall(r"\b(\w+)\(", "".join(path.read_text() for path in files)))
    for r in (r for data in _results() for r in data["results"]):
        timing = r["times"].get(_goals.OURS, {})
        if timing.get("source") == "profiler" and len(handlers := r.get("handlers") or ()) == 1:
            names = (re.match(r"jaxkern::(\w+)", name) for name in timing["kernels"])
            counts = found.setdefault(
                handlers[0].removeprefix("jaxkern_"), collections.Counter()
            )
            counts.update(match[1] for match in names if match and match[1] in there)
    return {name: [k for k, _ in counts.most_common()] for name, counts in found.items()}


def profiled() -> str:
    code = lambda names: ", ".join(f"`{name}`" for name in names)
    kernels = lambda name: code(kernels_of().get(name, ()))
    rows = [
        [f"`jaxkern_{n}`", kernels(n), kernels(f"{n}_grad")] for n in PROFILED if kernels(n)
    ]
    return table(["operation", "its kernels", "kernels of its gradient"], rows)
