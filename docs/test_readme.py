"""The Python blocks of README.md, run like those of the pages beside this file."""

import pathlib

import conftest
import pytest

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"
EXAMPLES = list(conftest.pages.parse(README).examples())


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_block(number):
    EXAMPLES[number].evaluate()


def test_readme_has_blocks():
    assert EXAMPLES
