"""`pytest docs`: runs every Python block of the pages and of README.md, each page from top to bottom in one namespace.

Blocks are code or interactive sessions, whose results are compared. The process has eight CPU devices, so that the pages
about several devices run too. `<!-- skip: next -->` in front of a block leaves it out.
"""

import os
import pathlib

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # before JAX starts
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
from sybil import Sybil  # noqa: E402
from sybil.integration.pytest import SybilItem  # noqa: E402
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
jax.config.update("jax_disable_most_optimizations", True)  # compiles in half the time

# A failure shows the frames of the page and below. Sybil's own filter fails if no frame belongs to the page.
SybilItem._traceback_filter = lambda self, e: (
    e.traceback.cut(path=self.example.path) or e.traceback
)

pages = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()], patterns=["*.md"])
pytest_collect_file = pages.pytest()
