"""Runs the Python blocks of README.md, and checks that the pages name what they must name."""

import json
import pathlib
import re

import conftest
import pytest

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"
EXAMPLES = list(conftest.pages.parse(README).examples())


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_block(number):
    EXAMPLES[number].evaluate()


def test_readme_has_blocks():
    assert EXAMPLES


@pytest.mark.parametrize(
    "path", sorted((README.parent / "docs" / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem
)
def test_notebooks_have_no_output(path):
    """`mkdocs build` runs them; what they printed once would be out of date."""
    cells = json.loads(path.read_text())["cells"]
    assert len(cells) > 5 and not any(cell.get("outputs") for cell in cells)


def test_drawing_of_rows():
    """Each size in the drawing is the longest float32 row that the algorithm runs on an H200."""
    from jaxkern import algorithms

    drawing = (README.parent / "docs" / "drawings" / "rows-light.svg").read_text()
    found = re.findall(
        r">(\w+)</text>\s*<text[^>]*>up to ([\d.]+) (bytes|KB|MB)</text>", drawing
    )
    assert len(found) == 4
    for algorithm, size, unit in found:
        width = int(float(size) * {"bytes": 1, "KB": 1 << 10, "MB": 1 << 20}[unit]) // 4
        choose = lambda width: algorithms.choose("softmax", 8192, width, device=algorithms.H200)
        assert choose(width) == algorithm != choose(width + 4)


def test_api_lists_every_public_name():
    import reference

    import jaxkern

    made = set(jaxkern.elementwise.__all__)  # docs/reference.py lists them
    assert set(reference.pages()) == {path.name for path in reference.FOLDER.glob("*.md")}
    listed = [path for page in reference.pages() for path in reference.listed(page)]
    assert len(set(listed)) == len(listed), "a name is on two pages"
    names = {path.rpartition(".")[2] for path in listed}
    missing = set(jaxkern.__all__) - made - {"algorithms"} - names
    assert not missing, f"docs/api lacks {', '.join(sorted(missing))}"
    assert not [path for path in listed if "._" in path or not reference.found(path)]


def test_links_between_pages():
    """A link from a page to another page, README.md included, names a file, or a notebook that becomes one."""
    docs = README.parent / "docs"
    for page in [README, *docs.rglob("*.md")]:
        for target in re.findall(r"\]\((?!http|#)([\w./-]+\.md)", page.read_text()):
            path = page.parent / target
            found = path.exists() or path.with_suffix(".ipynb").exists()
            assert found, f"{page.name} links to {target}"


def test_named_tests_exist():
    """Every test that a page names is a function of that file."""
    root = README.parent
    named = {
        m
        for page in (root / "docs").rglob("*.md")
        for m in re.findall(r"(tests/\w+\.py)::(\w+)", page.read_text())
    }
    missing = [
        f"{path}::{name}"
        for path, name in named
        if f"def {name}(" not in (root / path).read_text()
    ]
    assert len(named) > 20 and not missing, missing


def test_code_fits_a_laptop():
    """Lines of code on the pages are at most 96 characters long, as docs/ruff.toml has it, comments included."""
    docs = README.parent / "docs"
    long = []
    for page in docs.rglob("*.md"):
        for block in re.findall(
            r"^```(?:python|bash)\n(.*?)^```", page.read_text(), re.M | re.S
        ):
            long += [
                f"{page.relative_to(docs)}: {line}"
                for line in block.splitlines()
                if len(line) > 96
            ]
    assert not long, "\n".join(long)


@pytest.mark.parametrize(
    ("path", "function"),
    [
        ("jaxkern/_definitions/norms.py", "scale_norm"),
        ("jaxkern/_definitions/recurrences.py", "discounted_returns"),
        ("jaxkern/_ops/indexing/segments.py", "mean"),
    ],
)
def test_contributing_quotes_the_code(path, function):
    """Every line of the body of a quoted function, without its signature and docstring, stands in the source."""
    source = (README.parent / path).read_text()
    blocks = re.findall(
        r"```python\n(.*?)```", (README.parent / "CONTRIBUTING.md").read_text(), re.S
    )
    (block,) = (b for b in blocks if re.search(rf'def {function}\(|"{function}"', b))
    lines = [line.strip() for line in block.splitlines()]
    body = [
        line
        for line in lines
        if line and '"""' not in line and not line.startswith(f"def {function}(")
    ]
    assert len(body) > 2
    missing = [line for line in body if line not in source]
    assert not missing, f"{path} lacks {missing}"
