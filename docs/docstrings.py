"""An extension of griffe, which reads the docstrings for the API page: interactive examples become code blocks."""

import re

import griffe

EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.M | re.S)


class Examples(griffe.Extension):
    def on_object(self, *, obj, **kwargs):
        if obj.docstring is not None and not getattr(obj, "is_alias", False):
            value = obj.docstring.value
            if "```" not in value:
                obj.docstring.value = EXAMPLE.sub(lambda m: f"```python\n{m[0]}\n```", value)
