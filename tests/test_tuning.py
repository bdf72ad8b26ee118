"""How modules are laid out: tuned numbers have names in the file tuning.py of their family, what several modules use is in none that
users import, and files of kernels are short."""

import ast
import functools
import pathlib

import pytest

import jaxkern
from jaxkern._core import runtime

PACKAGE = pathlib.Path(jaxkern.__file__).parent
FAMILIES = sorted(f"{p.parent.parent.name}/{p.parent.name}" for p in PACKAGE.glob("_*/*/__init__.py"))
TUNED = [family for family in FAMILIES if (PACKAGE / family / "tuning.py").is_file()]
LARGEST = 16  # bytes of a vector; what exceeds it and is no limit of an integer type was tuned
LIMITS = {2**k + less for k in (16, 30, 31, 32, 63) for less in (0, -1)}
# Lanes, threads of a block, the capability and the shared memory from which there are clusters, and the most that int32 numbers.
OF_GPUS = {32, 1024, 90, 227 * 1024, 2**31 - 2}


def compared(tree):
    """The numbers that a module compares something with."""
    for node in ast.walk(tree):
        for side in (node.left, *node.comparators) if isinstance(node, ast.Compare) else ():
            names = any(
                isinstance(part, (ast.Name, ast.Call, ast.Attribute, ast.List, ast.Tuple, ast.Set, ast.Dict))
                for part in ast.walk(side)
            )
            value = None if names else eval(ast.unparse(side))
            if isinstance(value, (int, float)):
                yield node.lineno, value


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_thresholds_have_names(family):
    paths = [p for p in PACKAGE.glob(f"{family}/*.py") if p.stem != "tuning"]
    assert paths
    numbers = [(p.name, *found) for p in paths for found in compared(parsed(p))]
    assert not [found for found in numbers if found[2] > LARGEST and found[2] not in LIMITS | OF_GPUS]


@pytest.mark.parametrize("family", TUNED)
def test_numbers_say_what_they_count(family):
    path = PACKAGE / family / "tuning.py"
    lines = ["", *path.read_text().split("\n")]
    for node in parsed(path).body:
        if isinstance(node, ast.Assign):
            own = "\n".join(lines[node.lineno : node.end_lineno + 1])
            assert "#" in own or lines[node.lineno - 1].startswith("#"), own


def test_private_modules_import_no_helpers_of_public_ones():
    """They may call public functions, as a user would."""
    helpers = []
    for path in PACKAGE.glob("_*/**/*.py"):
        for node in ast.walk(parsed(path)):
            module = getattr(node, "module", None)
            if isinstance(node, ast.ImportFrom) and module and module.startswith("jaxkern.") and module[8] != "_":
                helpers += [(path.name, a.name) for a in node.names if not hasattr(jaxkern, a.name)]
    assert not helpers


def test_files_are_short():
    kernels = [p for p in runtime.kernels_folder().rglob("*") if p.suffix in (".cuh", ".h")]
    assert kernels and not [p.name for p in (*kernels, *PACKAGE.rglob("*.py")) if len(p.read_text().splitlines()) > 450]
