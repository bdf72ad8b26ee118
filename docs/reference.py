"""The API on the site: the functions that the pages in docs/api list, their index, and the functions that are made from a table."""

import importlib
import inspect
import pathlib
import re

from measured import table

from jaxkern._ops.elementwise import table as table_of_operations

_TITLES = {
    "gated": "Gated activations",
    "one operand": "Functions of one operand",
    "two": "Functions of two operands",
    "three": "Functions of three operands",
}
FOLDER = pathlib.Path(__file__).resolve().parent / "api"


def listed(page: str) -> list[str]:
    """The paths of the objects that a page lists, such as jaxkern.softmax.log_softmax."""
    return re.findall(r"^::: (jaxkern[\w.]*)", (FOLDER / page).read_text(), re.M)


def found(path: str):
    """The object at such a path. Modules have the names of their functions."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def pages() -> list[str]:
    """The pages of docs/api, in the order of the site."""
    return re.findall(r"api/(\w+\.md)", (FOLDER.parent.parent / "mkdocs.yml").read_text())


def _first_line(path: str) -> str:
    return (inspect.getdoc(found(path)) or "").split("\n\n")[0].replace("\n", " ")


def api() -> str:
    """A table for each page of docs/api: its functions and the first lines of their docstrings."""
    text = []
    for page in pages():
        title = re.search(r"^# (.*)", (FOLDER / page).read_text())
        assert title is not None
        rows = [
            [f"[`{p.rpartition('.')[2]}`](api/{page}#{p})", _first_line(p)]
            for p in listed(page)
        ]
        head = ["function", "result"]
        if page == "elementwise.md":
            head = ["group", "functions"]
            rows = [
                [group, _links(names, page)]
                for group, names in table_of_operations.groups().items()
            ]
        text += [f"## [{title[1]}](api/{page})", table(head, rows)]
    return "\n\n".join(text)


def _links(names, page="") -> str:
    path = f"api/{page}" if page else ""
    return ", ".join(f"[`{name}`]({path}#jaxkern.elementwise.{name})" for name in names)


def elementwise() -> str:
    """A row for each group of elementwise functions."""
    return table(
        ["group", "functions"],
        [[group, _links(names)] for group, names in table_of_operations.groups().items()],
    )


def elementwise_functions() -> str:
    """Each elementwise function; most of them stand in no source file."""
    options = "    options: {show_source: false}"
    text = []
    for group, names in table_of_operations.groups().items():
        text.append(f"## {_TITLES.get(group, group.capitalize())}")
        text += [f"::: jaxkern.elementwise.{name}\n{options}" for name in names]
    return "\n\n".join(text)


def public(html: str) -> str:
    """An API page without the names of private modules, which mkdocstrings puts into tooltips and above source code."""
    html = re.sub(r'(title="[^"]*)\bjaxkern\._[\w.]+\.(\w+)', r"\1\2", html)
    return re.sub(r"(<summary>Source code) in <code>jaxkern/_[^<]*</code>", r"\1", html)


def private(html: str) -> list[str]:
    """The private modules that a page shows; anchors and their links may name them."""
    return re.findall(r"jaxkern[./]_[\w./]+", re.sub(r'\b(id|href|name|for)="[^"]*"', "", html))
