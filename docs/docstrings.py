"""An extension of griffe, which reads the docstrings for the API pages.

Examples become code blocks, and titles such as `Cost:` bold. The elementwise functions are made from a table when the module is
imported: griffe, which reads source files, gets them from there.
"""

import re
import sys

import griffe

EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.M | re.S)
TITLE = re.compile(r"^(Derivatives|Cost|Source): ", re.M)


def _as_markdown(obj) -> None:
    if obj.docstring is not None and "```" not in obj.docstring.value:
        text = EXAMPLE.sub(lambda m: f"```python\n{m[0]}\n```", obj.docstring.value)
        obj.docstring.value = TITLE.sub(r"**\1**: ", text)


class Examples(griffe.Extension):
    def on_object(self, *, obj, **kwargs):
        if not getattr(obj, "is_alias", False):
            _as_markdown(obj)

    def on_package(self, *, pkg, **kwargs):
        if pkg.path != "jaxkern":
            return
        module = pkg["elementwise"]
        imported = griffe.inspect(
            "elementwise", filepath=module.filepath, parent=pkg, import_paths=sys.path
        )
        for name, function in imported.functions.items():
            if name not in module.members and not name.startswith("_"):
                _as_markdown(function)
                module.set_member(name, function)
