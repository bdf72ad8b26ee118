"""What mkdocs runs while it builds the site: figures and tables from the repository's own files, and checks of the result.

`{{ name }}` in a page stands for the Markdown that `FILL[name]` returns, and `{{ name:argument }}` for `FILL[name](argument)`.
Figures are drawn from benchmarks/results by benchmarks/_plot.py and exist in the built site only.
"""

import functools
import html.parser
import math
import pathlib
import re
import sys
import tempfile
import urllib.parse

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "docs"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import counterparts as pairs  # noqa: E402

from benchmarks import _goals, _plot, _report  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"


# ---- figures


def on_files(files, config):
    for name, content in _figures().items():
        files.append(File.generated(config, f"figures/{name}", content=content))
    return files


@functools.cache
def _results() -> dict:
    """{stem of the file: its content} of every committed result."""
    return {path.stem: _report.load(path) for path in sorted(RESULTS.glob("*.json"))}


def _devices() -> dict:
    devices: dict = {}
    for stem, data in _results().items():
        devices.setdefault(stem.split("-", 1)[1], []).append(data)
    return devices


@functools.cache
def _figures() -> dict:
    """{name: PNG} of every figure that the committed results give."""
    drawn = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for stem, data in _results().items():
            paths += _plot.plot(data, pathlib.Path(folder) / stem)
        for device, of_device in _devices().items():
            paths.append(
                _plot.overview(of_device, pathlib.Path(folder) / f"kernels-{device}.png")
            )
        for path in paths:
            drawn[path.name] = path.read_bytes()
    return drawn


# ---- what pages are filled with


def table(head, rows) -> str:
    cells = lambda row: "| " + " | ".join(str(c).replace("|", "\\|") for c in row) + " |"
    return "\n".join([cells(head), "|" + "---|" * len(head), *map(cells, rows)])


def figures(operation: str) -> str:
    """The figures of one operation, of every device; "kernels" are the overviews."""
    names = [
        name
        for name in _figures()
        if re.fullmatch(rf"{re.escape(operation)}-[^-]+(-.*)?\.png", name)
    ]
    return "\n\n".join(
        f"![{name.removesuffix('.png')}](figures/{name}){{ .figure }}" for name in names
    )


def results(operation: str) -> str:
    """Header, figures and tables of one operation's result files."""
    text = []
    for data in (d for stem, d in _results().items() if stem.split("-")[0] == operation):
        text += [f"*{_report.header(data)}*", figures(operation), _rows(data), _verdicts(data)]
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
            groups.setdefault((r["op"], r["direction"], r["dtype"]), []).append(times)
    if data["operation"] == "elementwise":  # 65 operations: one row for each dtype
        merged: dict = {}
        for (_, direction, dtype), cells in groups.items():
            merged.setdefault(("all", direction, dtype), []).extend(cells)
        groups = merged
    rows = []
    for (op, direction, dtype), cells in groups.items():
        speed = [t["xla"] / t[_goals.OURS] for t in cells if "xla" in t]
        copy = [t[_goals.COPY] / t[_goals.OURS] for t in cells if _goals.COPY in t]
        range_ = f"{min(speed):.2f} to {_number(max(speed))}" if speed else "-"
        rows.append(
            [f"`{op}`", direction, dtype, len(cells), _mean(speed), range_, _mean(copy)]
        )
    head = [
        "operation",
        "direction",
        "dtype",
        "cells",
        "times as fast as XLA",
        "range",
        "fraction of a copy's speed",
    ]
    return table(head, rows)


def _number(value) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _mean(values) -> str:
    return _number(math.exp(sum(map(math.log, values)) / len(values))) if values else "-"


def _programs(data) -> str:
    rows, peer = [], any("pyg" in r["times"] for r in data["results"])
    for r in data["results"]:
        t = _report.medians(r)
        ours, plain = t.get(_goals.OURS), t.get("xla")
        taken = sum(d["taken"] for d in r["decisions"])
        ratio = f"{_number(plain / ours)}" if ours and plain else "-"
        ms = lambda us: (
            "-" if us is None else f"{us / 1000:.3g}" if us < 1e6 else f"{us / 1000:.0f}"
        )
        others = [ms(plain), *([ms(t.get("pyg"))] if peer else [])]
        rows.append(
            [
                r["case"],
                r["dtype"],
                ms(ours),
                *others,
                ratio,
                f"{taken} of {len(r['decisions'])}",
            ]
        )
    others = ["plain, ms", *["PyTorch Geometric, ms"] * peer]
    return table(
        ["program", "dtype", "accelerated, ms", *others, "times as fast", "operations taken"],
        rows,
    )


def _sharding(data) -> str:
    rows = []
    for r in data["results"]:
        t = _report.medians(r)
        sent = (
            ", ".join(f"{count} {kind}" for kind, count in r["sent"][_goals.OURS].items())
            or "nothing"
        )
        scaling = [f"{r['scaling'][who]:.2f}" for who in (_goals.OURS, "xla")]
        times = [_report.time_text(t.get(who)) for who in (_goals.OURS, "xla")]
        rows.append([r["of"], r["dtype"], r["devices"], *times, *scaling, sent])
    return table(
        ["case", "dtype", "devices", "jaxkern, µs", "XLA, µs", "scaling", "of XLA", "sent"],
        rows,
    )


def _verdicts(data) -> str:
    goals = [(r, g) for r in data["results"] for g in r["goals"]]
    missed = [(r, g) for r, g in goals if not g["met"]]
    if not goals:
        return ""
    lines = [f"    * {_report._label(r)}: {_goals.describe(g)}" for r, g in missed]
    title = f'??? note "Goals met: {len(goals) - len(missed)} of {len(goals)}"\n\n'
    return title + ("\n".join(lines) if lines else "    All of them.")


def all_results() -> str:
    """A section for each operation that has results."""
    names = dict.fromkeys(stem.split("-")[0] for stem in _results())
    own = ("programs", "sharding")  # have sections of their own on the page
    return "\n\n".join(
        f"## {n.replace('_', ' ').capitalize()}\n\n{results(n)}" for n in names if n not in own
    )


def taken() -> str:
    """What `accelerate` takes by default and on request."""
    from jaxkern._core import switch

    when = lambda name: "on request" if name in switch.ON_REQUEST else "by default"
    rows = [[f"`{name}`", text, when(name)] for name, text in switch.TAKEN.items()]
    return table(["name", "operation in the program", "taken"], rows)


def elementwise() -> str:
    from jaxkern._ops.elementwise import table as operations

    return operations.markdown()


def elementwise_reference() -> str:
    """A row for each elementwise function: its arguments and the first line of its docstring."""
    import inspect

    import jaxkern

    rows = []
    for name in sorted(jaxkern.elementwise.__all__):
        function = getattr(jaxkern, name)
        signature = inspect.signature(function)
        bare = [
            p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()
        ]
        arguments = str(
            signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
        )
        rows.append([f"`{name}{arguments}`", (inspect.getdoc(function) or "").splitlines()[0]])
    return table(["function", "result"], rows)


def counterparts() -> str:
    """A row for each function with a counterpart: the arguments that both have, and the arguments that one side lacks."""
    rows = []
    for c in pairs.COUNTERPARTS:
        ours, theirs = c.parameters()
        back = {mine: other for other, mine in c.same.items()}
        name = lambda k: f"`{k}` (`{back[k]}`)" if k in back else f"`{k}`"
        both = [name(k) for k in ours if k in theirs]
        instead: dict = {}
        for argument, what in c.without.items():
            instead.setdefault(what, []).append(f"`{argument}`")
        missing = [f"{', '.join(arguments)}: {what}" for what, arguments in instead.items()]
        defaults = [f"`{k}` {why}" for k, why in c.defaults.items()]
        more = [f"`{k}`" for k in ours if k not in theirs]
        cells = [", ".join(both), "; ".join([*missing, *defaults]), ", ".join(more)]
        rows.append([f"`{c.ours}`", f"`{c.theirs}`", *cells])
    return table(
        [
            "here",
            "counterpart",
            "both (its name there)",
            "there, and here instead",
            "here alone",
        ],
        rows,
    )


def differences() -> str:
    return table(
        ["function", "here", "there", "why"],
        [[d.of, d.here, d.there, d.why] for d in pairs.DIFFERENCES],
    )


def elementwise_counterparts() -> str:
    modules: dict = {}
    for name, (label, _) in pairs.elementwise().items():
        modules.setdefault(label.rpartition(".")[0], []).append(f"`{name}`")
    return table(
        ["in", "functions"],
        [[f"`{module}`", ", ".join(names)] for module, names in modules.items()],
    )


def switches() -> str:
    from jaxkern._core import environment

    rows = [
        [f"`{v.name}`", v.meaning, f"`{v.default}`" if v.default else "", v.read]
        for v in environment.VARIABLES.values()
    ]
    return table(["variable", "meaning", "default", "read"], rows)


def algorithms() -> str:
    from jaxkern import algorithms

    code = lambda names: ", ".join(f"`{name}`" for name in names)
    groups: dict = {}
    for name in algorithms.operations():
        groups.setdefault(algorithms.names(name), []).append(name)
    return table(
        ["operations", "algorithms"],
        [[code(names), code(group)] for group, names in groups.items()],
    )


def gate(name: str) -> str:
    """A constant of jaxkern/_accelerate/gate.py."""
    from jaxkern._accelerate import gate

    value = getattr(gate, name)
    return value if isinstance(value, str) else f"{value:,}".replace(",", " ")


def transformations() -> str:
    """The transformations that tests/test_matrix.py runs every operation under."""
    source = (ROOT / "tests" / "test_matrix.py").read_text()
    body = source.split("TRANSFORMATIONS = {", 1)[1].split("\n}\n", 1)[0]
    return ", ".join(f"`{name}`" for name in re.findall(r'^    "([^"]+)":', body, re.M))


def error() -> str:
    """How many times its counterpart's the error of an operation may be."""
    return f"{_goals.ERROR:g}"


def file(path: str) -> str:
    """A Markdown file of the repository. Its links point to files that are not on the site, and become their names."""
    text = (ROOT / path).read_text()
    return re.sub(r"\[([^\]]+)\]\((?!http|#)[^)]+\)", lambda m: f"`{m[1]}`", text)


def version() -> str:
    import jaxkern

    return jaxkern.__version__


FILL = {
    f.__name__: f
    for f in (
        figures,
        results,
        all_results,
        elementwise,
        elementwise_reference,
        counterparts,
        differences,
        elementwise_counterparts,
        switches,
        algorithms,
        gate,
        taken,
        transformations,
        error,
        file,
        version,
    )
}


def on_page_markdown(markdown, page, config, files):
    def fill(match):
        name, argument = match[1], match[2]
        text = FILL[name](argument) if argument else FILL[name]()
        return text.replace("](figures/", f"]({'../' * page.file.src_uri.count('/')}figures/")

    return re.sub(r"\{\{ (\w+)(?::([\w./-]+))? \}\}", fill, markdown)


# ---- checks of the built site


class _Links(html.parser.HTMLParser):
    """The anchors of a page, its links, and what it loads."""

    def __init__(self):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids |= {given[k] for k in ("id", "name") if given.get(k)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag in ("script", "img", "link", "iframe", "source"):
            url = given.get("src") or given.get("href")
            if url and given.get("rel") != "canonical":
                self.loads.append(url)


def on_post_build(config):
    """Raises if a page links to a file or an anchor that does not exist, or loads anything from another host."""
    site = pathlib.Path(config["site_dir"])
    pages = {}
    for path in site.rglob("*.html"):
        pages[path] = _Links()
        pages[path].feed(path.read_text())
    wrong = []
    for path, page in pages.items():
        name = path.relative_to(site)
        wrong += [f"{name} loads {url}" for url in page.loads if "//" in url]
        if name.name == "404.html":
            continue
        for url in (*page.links, *page.loads):
            target, _, anchor = url.partition("#")
            if "//" in url or target.startswith("mailto:"):
                continue
            other = (path.parent / urllib.parse.unquote(target)).resolve() if target else path
            if other.is_dir():
                other /= "index.html"
            if not other.exists():
                wrong.append(f"{name} links to {url}, which does not exist")
            elif (
                anchor
                and other in pages
                and urllib.parse.unquote(anchor) not in pages[other].ids
            ):
                wrong.append(f"{name} links to {url}, which has no such anchor")
    if wrong:
        raise PluginError("the built site is wrong:\n  " + "\n  ".join(sorted(set(wrong))))
