"""The examples run as a user runs them: each in its own process, from the command line."""

import pathlib
import re
import runpy
import subprocess
import sys

import jax
import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"
MODULES = {"corpus", "display"}  # which examples import
LAYERS = {"flax_layers": "flax", "equinox_layers": "equinox"}  # and the library that they need
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def run(name, *arguments):
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(autouse=True)
def extra():
    for module in ("matplotlib", "tqdm"):
        pytest.importorskip(module, reason="the examples need the `examples` extra")


def result(name, *arguments, out, agree):
    """Runs an example as its reader would look at a log, and returns what it printed: (standard output, standard error)."""
    done = run(name, *arguments, "--out", out)
    text = done.stdout + done.stderr
    assert done.returncode == 0 and done.stdout.endswith(f"the {agree} agree\n"), text
    assert "\r" not in text and "\x1b" not in text, text
    assert f"\npicture  {out}\n" in done.stdout and "\ncompare  " in done.stdout
    assert ("no GPU here" in done.stdout) == (jax.default_backend() != "gpu")
    picture = out.read_bytes()
    assert picture.startswith(PNG_SIGNATURE) and len(picture) > 10_000
    return done.stdout, done.stderr


@pytest.mark.process
def test_language_model_trains_the_same_with_both_libraries(tmp_path):
    arguments = "--preset", "tiny", "--steps", 40
    printed, progress = result("language_model.py", *arguments, out=tmp_path / "curves.png", agree="curves")
    assert "step 40/40" in progress
    rows = dict(re.findall(r"^(jaxkern|jax\.nn) +([0-9.]+) +[0-9.]+ +[0-9.]+$", printed, re.M))
    assert rows.keys() == {"jaxkern", "jax.nn"}
    for bits in map(float, rows.values()):
        assert 2 < bits < 6.5  # 8 is a model that has learnt nothing


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_help_says_what_one_sees(path, monkeypatch, capsys):
    pytest.importorskip(LAYERS.get(path.stem, "jax"), reason="needs the `layers` extra")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    if path.stem in MODULES:
        assert "argparse" not in path.read_text()  # imported by examples, and no program
        return
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert end.value.code == 0 and f"python examples/{path.name}" in printed
    assert "What to look at:" in printed and "--out OUT" in printed
    assert not re.search(r"^  -(-\w+)( \w+| \{.*\})$\n(?!  {10})", printed, re.M), "an option without help"


@pytest.mark.parametrize("name, library", LAYERS.items())
def test_without_its_library_an_example_says_what_to_install(name, library, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        SystemExit, match=rf"What to look at:[\s\S]*{library}[\s\S]*pip install '\.\[layers,examples\]'"
    ):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--steps", "0"], "start at 1"),
        (["--text", "{empty}"], "too few .py files"),
        (["--out", "{empty}/no/such.png"], "there is no folder"),
    ],
)
def test_language_model_refuses_bad_arguments(tmp_path, arguments, message, monkeypatch, capsys):
    """Runs an example in this process, which has imported JAX."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import language_model

    monkeypatch.setattr(sys, "argv", ["language_model.py", *(a.format(empty=tmp_path) for a in arguments)])
    precision = jax.config.jax_default_matmul_precision
    try:
        with pytest.raises(SystemExit) as end:
            language_model.main()
    finally:
        jax.config.update("jax_default_matmul_precision", precision)
    assert end.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.process
@pytest.mark.parametrize("name", ["graph_network", "graph_attention"])
def test_graph_networks_learn_the_same_with_both_libraries(name, tmp_path):
    arguments = "--modules", 150, "--steps", 40, "--width", 16
    printed, progress = result(f"{name}.py", *arguments, out=tmp_path / "curves.png", agree="curves")
    assert "step 40/40" in progress
    found = re.findall(r"^(jaxkern|jax\.ops|jraph|guessing) +([0-9.]+)", printed, re.M)
    ours, theirs, guessing = (float(accuracy) for _, accuracy in found)
    assert ours > guessing + 0.1 and abs(ours - theirs) < 0.02


def test_byte_pairs_lose_nothing(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import corpus

    texts = [b"import os\n\n\ndef f(x):\n\treturn  x + 10\r\n\0", bytes(range(256)), b"aaaa aaaa  \n", b""]
    pairs = corpus.train(texts * 3, 60)
    table, encode = corpus.token_bytes(pairs), corpus.encoder(pairs)
    assert 0 < len(pairs) <= 60 and len(table) == 256 + len(pairs)
    for text in [*texts, b"def unseen(words): return \xff\xfe"]:
        ids = encode(text)
        assert b"".join(table[i] for i in ids) == text
    assert len(encode(texts[0])) < len(texts[0])


@pytest.mark.process
def test_an_unchanged_program_learns_the_same(tmp_path):
    pytest.importorskip("optax")
    arguments = "--steps", 4, "--width", 8, "--dtype", "float32", "--force"
    printed, progress = result("accelerate.py", *arguments, out=tmp_path / "curves.png", agree="losses")
    assert "step 4/4" in progress and "scatter_add" in printed
    assert re.search(r"^accelerated +[0-9.]+ +[0-9.]+ +[0-9.]+$", printed, re.M)


@pytest.mark.process
@pytest.mark.parametrize(
    "name, arguments",
    [
        ("embedding_tables", ("--rows", 500, "--batch", 256, "--steps", 10)),
        ("mixture_of_experts", ("--tokens", 128, "--steps", 10)),
    ],
)
def test_a_small_model_learns_the_same(name, arguments, tmp_path):
    pytest.importorskip("optax")
    printed, progress = result(f"{name}.py", *arguments, out=tmp_path / "curves.png", agree="losses")
    assert "step 10/10" in progress
    first, last = re.search(r"^jaxkern +(?:loss )?([0-9.]+)(?: to| ) +([0-9.]+)", printed, re.M).groups()
    assert float(last) < 0.8 * float(first)


@pytest.mark.process
@pytest.mark.parametrize(
    "name, arguments, agree, done",
    [
        (
            "recurrent_model",
            ("--steps", 30, "--layers", 1, "--width", 32, "--context", 32, "--batch", 8),
            "curves",
            "step 30/30",
        ),
        ("option_greeks", ("--batches", 4, "--paths", 2000, "--steps", 20), "results", "batch 4/4"),
    ],
)
def test_loops_are_those_of_jax(name, arguments, agree, done, tmp_path):
    pytest.importorskip("optax")
    _, progress = result(f"{name}.py", *arguments, out=tmp_path / "figure.png", agree=agree)
    assert done in progress
    if name == "recurrent_model":
        first, *_, last = map(float, re.findall(r"jaxkern=([0-9.]+)", progress))
        assert last < 0.9 * first


@pytest.mark.process
@pytest.mark.parametrize(
    "name, arguments",
    [
        ("flax_layers", ("--width", 16, "--context", 16, "--batch", 4, "--steps", 10, "--text", EXAMPLES)),
        ("equinox_layers", ("--width", 8, "--length", 5, "--models", 2, "--batch", 16, "--steps", 10)),
    ],
)
def test_layers_are_those_of_their_library(name, arguments, tmp_path):
    pytest.importorskip(LAYERS[name], reason="needs the `layers` extra")
    printed, progress = result(f"{name}.py", *arguments, out=tmp_path / "curves.png", agree="curves")
    assert "step 10/10" in progress
    pattern = rf"^(jaxkern|{LAYERS[name]}|moved) +([0-9.]+)"
    assert len({value for _, value in re.findall(pattern, printed, re.M)}) == 1  # but for rounding
    first, *_, last = map(float, re.findall(r"jaxkern=([0-9.]+)", progress))
    assert last < first
    assert float(re.search(r"difference\|?.*: ([0-9.e+-]+), allowed", printed)[1]) < 1e-5


@pytest.mark.process
def test_a_softmax_of_the_users(tmp_path):
    result("custom_softmax.py", "--tokens", 96, "--steps", 2, out=tmp_path / "weights.png", agree="results")


def test_documentation_names_every_example():
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    named = set(re.findall(r"^\| `(\w+\.py)`", page, re.M))
    assert named == {path.name for path in EXAMPLES.glob("*.py") if path.stem not in MODULES}
