"""The examples run as a user runs them: each in its own process, from the command line."""

import pathlib
import re
import subprocess
import sys

import jax
import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def run(name, *arguments):
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(autouse=True)
def extra():
    for module in ("matplotlib", "tqdm"):
        pytest.importorskip(module, reason="the examples need the `examples` extra")


@pytest.mark.process
def test_language_model_trains_the_same_with_both_libraries(tmp_path):
    figure = tmp_path / "curves.png"
    result = run("language_model.py", "--preset", "tiny", "--steps", 40, "--out", figure)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the curves agree" in result.stdout
    assert "40/40" in result.stderr  # the progress bar

    rows = dict(re.findall(r"^(jaxkern|jax\.nn) +([0-9.]+) +[0-9.]+ +[0-9.]+$", result.stdout, re.M))
    assert rows.keys() == {"jaxkern", "jax.nn"}
    for bits in map(float, rows.values()):
        assert 2 < bits < 6.5  # 8 is a model that has learnt nothing

    picture = figure.read_bytes()
    assert picture.startswith(PNG_SIGNATURE) and len(picture) > 10_000


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
    figure = tmp_path / "curves.png"
    result = run(f"{name}.py", "--modules", 300, "--steps", 40, "--width", 16, "--out", figure)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the curves agree" in result.stdout
    assert "40/40" in result.stderr  # the progress bar
    found = re.findall(r"^(jaxkern|jax\.ops|jraph|guessing) +([0-9.]+)", result.stdout, re.M)
    ours, theirs, guessing = (float(accuracy) for _, accuracy in found)
    assert ours > guessing + 0.1 and abs(ours - theirs) < 0.02
    picture = figure.read_bytes()
    assert picture.startswith(PNG_SIGNATURE) and len(picture) > 10_000


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
def test_an_unchanged_program_learns_the_same():
    pytest.importorskip("optax")
    result = run("accelerate.py", "--steps", 4, "--width", 8, "--dtype", "float32", "--force")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the losses agree" in result.stdout and "4/4" in result.stderr
    assert re.search(r"^accelerated +[0-9.]+ +[0-9.]+ +[0-9.]+$", result.stdout, re.M)
    assert "scatter_add" in result.stdout


@pytest.mark.process
@pytest.mark.parametrize(
    "name, arguments",
    [
        ("embedding_tables", ("--rows", 500, "--batch", 256, "--steps", 10)),
        ("mixture_of_experts", ("--tokens", 128, "--steps", 10)),
    ],
)
def test_a_small_model_learns_the_same(name, arguments):
    pytest.importorskip("optax")
    result = run(f"{name}.py", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the losses agree" in result.stdout and "10/10" in result.stderr
    if name == "embedding_tables":
        first, last = re.search(r"^jaxkern +([0-9.]+) +([0-9.]+)", result.stdout, re.M).groups()
    else:
        first, last = re.search(r"^jaxkern +loss ([0-9.]+) to ([0-9.]+)", result.stdout, re.M).groups()
    assert float(last) < 0.8 * float(first)


@pytest.mark.process
@pytest.mark.parametrize(
    "name, arguments, words",
    [
        (
            "recurrent_model",
            ("--steps", 30, "--layers", 1, "--width", 32, "--context", 32, "--batch", 8),
            "the curves agree",
        ),
        ("option_greeks", ("--batches", 4, "--paths", 2000, "--steps", 20), "the results agree"),
    ],
)
def test_loops_are_those_of_jax(name, arguments, words, tmp_path):
    pytest.importorskip("optax")
    figure = tmp_path / "figure.png"
    result = run(f"{name}.py", *arguments, "--out", figure)
    assert result.returncode == 0, result.stdout + result.stderr
    assert words in result.stdout and re.search(r"(30/30|4/4)", result.stderr)
    if name == "recurrent_model":
        first, *_, last = map(float, re.findall(r"jaxkern=([0-9.]+)", result.stderr))
        assert last < 0.9 * first
    picture = figure.read_bytes()
    assert picture.startswith(PNG_SIGNATURE) and len(picture) > 10_000


@pytest.mark.process
def test_a_softmax_of_the_users():
    result = run("custom_softmax.py", "--tokens", 96, "--steps", 2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the results agree" in result.stdout


def test_documentation_names_every_example():
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    named = set(re.findall(r"^\| `(\w+\.py)`", page, re.M))
    assert named == {path.name for path in EXAMPLES.glob("*.py")} - {"corpus.py"}
