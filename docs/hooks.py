"""What mkdocs runs while it builds the site: figures and tables from the repository's own files, and checks of the result.

`{{ name }}` in a page stands for the Markdown that `FILL[name]` returns, and `{{ name:argument }}` for `FILL[name](argument)`.
Figures and tables of measurements are docs/measured.py's.
"""

import html.parser
import pathlib
import re
import sys
import urllib.parse

from mkdocs.exceptions import PluginError

ROOT = pathlib.Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "docs"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import counterparts as pairs  # noqa: E402
import measured  # noqa: E402
import reference  # noqa: E402
from measured import table  # noqa: E402

from benchmarks import _goals  # noqa: E402

# ---- what pages are filled with


def taken() -> str:
    """What `accelerate` takes by default and on request."""
    from jaxkern._core import switch

    when = lambda name: "on request" if name in switch.ON_REQUEST else "by default"
    rows = [[f"`{name}`", text, when(name)] for name, text in switch.TAKEN.items()]
    return table(["name", "operation in the program", "taken"], rows)


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
    """A constant of jaxkern/_accelerate/gate.py or selection_gate.py."""
    from jaxkern._accelerate import gate, selection_gate

    value = getattr(gate, name) if hasattr(gate, name) else getattr(selection_gate, name)
    return value if isinstance(value, str) else f"{value:,}".replace(",", " ")


def cost(name: str) -> str:
    """A constant of jaxkern/_accelerate/cost.py."""
    from jaxkern._accelerate import cost

    value = getattr(cost, name)
    if name.endswith("BANDWIDTH"):
        return f"{value / 1e12:g} TB/s"
    return f"{value * 1e6:g} µs" if value < 1e-3 else f"{value:g}"


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
        measured.figures,
        measured.results,
        measured.losses,
        measured.profiled,
        reference.api,
        reference.elementwise,
        reference.elementwise_functions,
        counterparts,
        differences,
        elementwise_counterparts,
        switches,
        algorithms,
        gate,
        cost,
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

    markdown = re.sub(r"\{\{ (\w+)(?::([\w./-]+))? \}\}", fill, markdown)
    return measured.both_themes(markdown)


def on_page_content(html, page, config, files):
    """Each cell of a table gets the name of its column, which a narrow screen shows in front of it."""

    def labelled(table):
        heads = re.findall(r"<th\b.*?>(.*?)</th>", table[0], re.S)
        names = [re.sub("<.*?>", "", head) for head in heads]
        return re.sub(r"<tr>.*?</tr>", lambda row: named(row[0], names), table[0], flags=re.S)

    def named(row, names):
        first, *cells = row.split("<td")
        labels = (f' data-label="{name}"' if name else "" for name in names)
        return first + "".join(f"<td{label}{cell}" for label, cell in zip(labels, cells))

    return re.sub(r"<table>.*?</table>", labelled, html, flags=re.S)


def on_post_page(output, page, config):
    return reference.public(output) if page.file.src_uri.startswith("api") else output


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
    """Raises if a page links to a file or an anchor that does not exist, or loads anything from another host.

    Also if an API page names a private module.
    """
    site = pathlib.Path(config["site_dir"])
    pages = {}
    for path in site.rglob("*.html"):
        pages[path] = _Links()
        pages[path].feed(path.read_text())
    wrong = []
    for path, page in pages.items():
        name = path.relative_to(site)
        wrong += [f"{name} loads {url}" for url in page.loads if "//" in url]
        if name.parts[0] in ("api", "api.html"):
            wrong += [
                f"{name} names {module}" for module in reference.private(path.read_text())
            ]
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
