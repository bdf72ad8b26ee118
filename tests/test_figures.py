"""The figures of the documentation: committed as the results give them, readable in both themes, and in words.

No program is compiled here: a figure is data, and its drawing knows where each text is.
"""

import importlib.util
import itertools
import pathlib
import re

import numpy as np
import pytest

import jaxkern
from benchmarks import _plot, _report, _svg, _words, palette, programs

NAMES = sorted(path.name.removesuffix("-light.svg") for path in _plot.FIGURES.glob("*-light.svg"))
RAW = re.compile(r"\d+x\d+|\bn\d\d|2\^")  # a case as the result files name it


@pytest.fixture(scope="module")
def files():
    return _plot.load()


@pytest.fixture(scope="module")
def figures(files):
    return _plot.everything(files)


def test_committed_figures_are_those_of_the_results(figures):
    """If this fails, run `python -m benchmarks plot` and look at what changed."""
    wanted = {
        f"{name}-{theme}.svg": _svg.lay_out(figure, theme).svg()
        for name, figure in figures.items()
        for theme in palette.THEMES
    }
    found = {path.name: path.read_text() for path in _plot.FIGURES.glob("*.svg")}
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if found[name] != wanted[name]] == []
    assert sum(map(len, found.values())) < 1.2e6


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_can_be_read(name, figures):
    figure = figures[name]
    for theme in palette.THEMES:
        drawing = _svg.lay_out(figure, theme)
        assert _svg.overlapping(drawing) == []
        assert len(drawing.marks) > len(figure.shown())  # more than the legend
    assert min(_svg.SMALL, _svg.BODY, _svg.TITLE) * 400 / _svg.WIDTH >= 9
    texts = [box.text for box in drawing.texts]
    words = " ".join(texts)
    assert not RAW.search(words), RAW.search(words)
    value = figure.y or figure.x  # the axis of what was measured
    arrow = ("↑" if value.larger else "↓") if figure.y else ("→" if value.larger else "←")
    assert value.better.split()[-1] in ("faster", "better") and f"{arrow} {value.better}" in words
    unit = ("ms", "µs", "GB/s", "fraction of", "times as fast")
    assert any(u in value.quantity for u in unit), value.quantity
    assert all(palette.LOOKS[who].name in texts for who in figure.shown())
    dots = [p for panel in figure.panels if isinstance(panel, _svg.Dots) for p in panel.points()]
    assert not any(p.hollow for p in dots) or {"float32", "bfloat16"} <= set(texts)
    assert not figure.base or figure.base in texts and figure.base.startswith("1: ")
    assert re.search(r"NVIDIA H\d00.*, driver [\d.]+, JAX \d+\.\d+\.\d+, .*\d{4}-\d\d-\d\d", figure.environment)
    assert ("fraction of" in value.quantity or "times as" in value.quantity) <= bool(figure.base or figure.y)


def test_what_did_not_end_is_shown(files, figures):
    rows = [r for data in files for r in data["results"] if data["operation"] == "programs"]
    ends = [re.search(r"did not end in (\d+) s", r["times"]["xla"].get("error", "")) for r in rows]
    wanted = sorted(f"no end in {end[1]} s" for end in ends if end)
    texts = [box.text for box in _svg.lay_out(figures["programs"], "dark").texts]
    assert wanted and sorted(text for text in texts if "no end" in text) == wanted
    assert any("no end" in box.text for box in _svg.lay_out(figures["speed"], "light").texts)
    assert any("50 s a call" in box.text for box in _svg.lay_out(figures["segment_softmax"], "light").texts)


def test_the_page_of_results_has_a_section_for_each_operation(files):
    text = (_plot.FIGURES.parent / "results.md").read_text()
    assert sorted(re.findall(r"{{ results:(\w+) }}", text)) == sorted({data["operation"] for data in files})


def test_every_cell_has_words(files):
    own = (*_words.OPERATIONS, "training", "programs", "cross_entropy", "linear_cross_entropy", "reduce_min", "row")
    for data in files:
        assert data["operation"] in _words.FAMILIES
        for r in data["results"]:
            words = _words.case(data["operation"], r)
            assert words != r["case"] or data["operation"] == "programs" or r["op"] == "program"
            assert not RAW.search(words), words
            assert r["direction"] in _words.DIRECTIONS
            known = r["op"] in own or hasattr(jaxkern, r["op"]) or data["operation"] == "elementwise"  # drawn as one
            assert known, r["op"]


def test_every_program_has_words():
    for name in {p.name for p in programs.programs()}:
        first, *rest = name.split(", ")
        assert first in _words.PROGRAMS
        assert all(
            word in _words.DETAILS or word in ("jraph", "flax.linen", "flax.nnx", "equinox", "haiku") for word in rest
        )


def test_one_file_is_drawn_beside_it(tmp_path, files):
    data = next(d for d in files if d["operation"] == "sharding" and d["environment"]["device"] == "NVIDIA H200")
    path = _report.save(data, tmp_path)
    written = _plot.plot(data, path.with_suffix(""))
    assert [p.name for p in written] == ["sharding-NVIDIA_H200-light.svg", "sharding-NVIDIA_H200-dark.svg"]
    assert all(p.parent == tmp_path and "</svg>" in p.read_text() for p in written)


def test_gpus_are_side_by_side(files):
    """The same operation on another GPU has a column of its own beside the same words, which says so."""
    (figure,) = _plot.OPERATIONS["row_kernel"]([d for d in files if d["operation"] == "row_kernel"]).values()
    assert [p.heading for p in figure.panels] == ["forward", "gradient"]
    for panel in figure.panels:
        columns = panel.columns()
        assert [column.gpu for column in columns] == ["H100", "H200"]
        assert len({tuple(row.label for row in column.rows) for column in columns}) == 1
        assert all(any(row.points for row in column.rows) for column in columns)
    assert len(figure.environment.splitlines()) == 2
    drawing = _svg.lay_out(figure, "light")
    (first, *_), (second, *_) = ([box for box in drawing.texts if box.text == gpu] for gpu in ("H100", "H200"))
    assert first.top == second.top and first.right < second.left


def test_overlapping_texts_are_found():
    drawing = _svg.Drawing("light", "", "")
    drawing.height = 100
    drawing.text(10, 20, "first")
    drawing.text(30, 24, "second")
    drawing.text(470, 60, "outside")
    drawing.mark(12, 18, "xla")
    assert _svg.overlapping(drawing) == [("first", "second"), ("first", "xla"), ("outside", "the edge")]


def _linear(colour: str) -> np.ndarray:
    srgb = np.array([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def _contrast(a: str, b: str) -> float:
    bright = sorted(float(_linear(c) @ (0.2126, 0.7152, 0.0722)) for c in (a, b))
    return (bright[1] + 0.05) / (bright[0] + 0.05)


def _lab(linear: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(linear, 0, 1) / (0.9505, 1, 1.089)
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency", 2009.
SIGHTS = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
}


@pytest.mark.parametrize("theme", palette.THEMES)
def test_colours_are_told_apart(theme):
    """By everyone, and against the page; colours that come near each other for some have markers of other shapes."""
    for behind in palette.BEHIND[theme]:
        assert all(_contrast(text[theme], behind) >= 4.5 for text in (palette.INK, palette.MUTED))
        assert all(_contrast(look.colour(theme), behind) >= 3 for look in palette.LOOKS.values())
    lines = [palette.LOOKS[who] for who in ("jaxkern", "xla", "torch", "cudnn")]
    for sight in SIGHTS.values():
        for a, b in itertools.combinations(lines, 2):
            distance = np.linalg.norm(np.subtract(*(_lab(sight @ _linear(x.colour(theme))) for x in (a, b))))
            assert distance >= 20, (a.name, b.name, distance)
    looks = [(look.colour(theme), look.marker, look.hollow) for look in palette.LOOKS.values()]
    assert len(set(looks)) == len(looks)


def test_drawings_are_those_of_their_program():
    """If this fails, run `python docs/draw.py`."""
    spec = importlib.util.spec_from_file_location("draw", _plot.FIGURES.parent / "draw.py")
    spec.loader.exec_module(draw := importlib.util.module_from_spec(spec))
    assert {path.name: path.read_text() for path in draw.FOLDER.glob("*")} == draw.files()
    for theme, make in itertools.product(palette.THEMES, draw.DRAWINGS):
        assert _svg.overlapping(make(theme)) == []


@pytest.mark.parametrize(
    "file", ["examples/display.py", "docs/notebooks/own_kernel.ipynb", "docs/notebooks/unchanged_model.ipynb"]
)
def test_pictures_of_matplotlib_have_the_same_colours(file):
    """jaxkern's and XLA's; grey is allowed."""
    root = pathlib.Path(__file__).parent.parent
    found = set(re.findall(r"#[0-9a-f]{6}\b", (root / file).read_text()))
    ours, xla = (palette.LOOKS[who].light for who in ("jaxkern", "xla"))
    assert {ours, xla} <= found <= {ours, xla, palette.MUTED["light"]}


def test_readme_shows_a_figure_of_this_folder():
    text = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
    shown = re.findall(r"docs/figures/([\w-]+)\.svg", text)
    assert {"speed-light", "speed-dark"} <= set(shown) <= {f"{n}-{t}" for n in NAMES for t in palette.THEMES}


def test_the_page_of_devices_says_what_was_measured(files):
    """Its numbers are those of the results, and it names every case that scales badly."""
    text = (pathlib.Path(__file__).parent.parent / "docs" / "devices.md").read_text().split("## Measured")[1]
    rows = [r for data in files if data["operation"] == "sharding" for r in data["results"]]
    times = {f"{t[f'{k}_us']:.0f}" for r in rows for t in r["times"].values() for k in ("median", "min", "max")}
    assert set(re.findall(r"(\d+) µs", text)) <= times and re.findall(r"between (\d+) and", text)
    assert set(re.findall(r"between (\d+) and", text)) <= times
    said = set(re.findall(r"\d\.\d\d", text))
    assert said <= {f"{v:.2f}" for r in rows for v in r["scaling"].values()}
    assert said >= {f"{v:.2f}" for r in rows if (v := r["scaling"]["jaxkern"]) < 0.9}
