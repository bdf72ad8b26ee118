"""The benchmarks run: each family on one small case, from the options of the command line to the result file."""

import argparse
import dataclasses
import importlib
import itertools
import json
import signal
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plans
import pytest
from conftest import ON_GPU

import jaxkern
from benchmarks import __main__ as main
from benchmarks import (
    _cell,
    _geometric,
    _goals,
    _plot,
    _report,
    _run,
    _timing,
    _torch,
    curves,
    programs,
    sanitize,
    sharding,
)
from benchmarks.__main__ import OPERATIONS
from jaxkern._core import switch

SMALL = {
    "softmax": (1024, 256),
    "fused_softmax": (2, 2, 128, 512),
    "score": (2, 2, 128, 512),
    "elementwise": (1 << 18,),
    "elementwise_kernel": (1 << 18,),
    "row_kernel": (1024, 256),
    "scan": (16, 1024),
    "while_loop": (256,),
    "associative_scan": (64, 1024),
    "quantize": (128, 256),
    "reduction": (1024, 256),
    "norm": (1024, 256),
    "cross_entropy": (1024, 256),
    "linear_cross_entropy": (64, 32, 512),
    "index_add": (5000, 8),
    "scatter": (100, 3),
    "select": (16, 256),
    "selected": (16, 256),
    "segment_softmax": (5000, 8),
    "messages": (5000, 64),
    "sparse": (5000, 8),
}
# Without a GPU it is XLA that is measured, whose error and memory are its own.
KERNEL_GOALS = ("reproducible", "accurate", "memory") if ON_GPU else ("reproducible",)


@pytest.mark.skipif(ON_GPU, reason="the profiler's clock has a test of its own: python -m benchmarks selftest")
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_small_case(name, monkeypatch, tmp_path):
    operation = importlib.import_module(f"benchmarks.{name}")
    fewer = {"count": 4000, "below": 0} if name == "index_add" else {}
    case = dataclasses.replace(operation.CPU_CASES[0], shape=SMALL[name], **fewer)
    monkeypatch.setattr(operation, "CPU_CASES", [case])
    few = (operation.OPS[0], operation.OPS[-1]) if operation.OPS else ()
    data = _run.run(operation, _run.Options(repeats=1, dtypes=("float32",), ops=few))
    path = _report.save(data, tmp_path)
    rows = json.loads(path.read_text())["results"]
    assert rows and {r["case"] for r in rows} == {case.name}
    for row in rows:
        times = row["times"]
        assert all("median_us" in times[who] for who in (_goals.OURS, "xla", _goals.COPY)), (row["op"], times)
        assert all(goal["met"] for goal in row["goals"] if goal["goal"] in KERNEL_GOALS)
    assert case.name in _report.table(data)


@pytest.mark.parametrize("name", ["cross_entropy", "elementwise", "norm"])
def test_primitives_are_given_what_they_take(name):
    """Benchmarks of gradients that call primitives: each program of the smallest cases is traced."""
    operation = importlib.import_module(f"benchmarks.{name}")
    traced = 0
    for case in operation.CPU_CASES:
        for cell in _cell.cells(operation, case, "float32", operation.OPS):
            for program in operation.programs(cell, False):
                jax.eval_shape(program.function, *program.specs)
                traced += 1
    assert traced > 2 * len(operation.CPU_CASES)


@pytest.mark.parametrize("command", ["softmax", "sharding", "programs", "curves"])
def test_a_part_is_not_written_among_whole_runs(command, capsys):
    def chosen(*arguments):
        parser = main._parser()
        found = parser.parse_args([command, *arguments])
        main._choose_out(parser, found)
        return found.out

    assert chosen() == main.RESULTS == chosen("--out", str(main.RESULTS))
    assert chosen("--quick") == chosen("--cases", "x") == main.PARTS != main.RESULTS
    assert chosen("--cases", "x", "--out", str(main.RESULTS)) == main.RESULTS  # as it was asked for
    with pytest.raises(SystemExit):
        chosen("--quick", "--out", str(main.RESULTS / "."))
    assert "--quick does not write to" in capsys.readouterr().err


def test_progress_without_a_terminal(monkeypatch, capsys):
    """A line for about every ten seconds and one at the end, with the number of items that are done."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for item in _timing.progress(range(40), 40, "measure"):
        now[0] += 0.01 if item < 20 else 4
    assert capsys.readouterr().err.splitlines() == [
        *(f"measure: {done}/40, {0.2 + 4 * (done - 20):.0f} s" for done in (23, 26, 29, 32, 35, 38)),
        "measure: 40/40, 80 s",
    ]


@pytest.mark.skipif(ON_GPU, reason="arrays of a gigabyte")
def test_what_devices_are_worth(tmp_path):
    """It runs on as many devices as there are."""
    options = argparse.Namespace(quick=True, cases="s classes|index_add", devices=(), repeats=1, out=None)
    path = _report.save(data := sharding.run(options), tmp_path)
    rows = json.loads(path.read_text())["results"]
    assert {r["group"] for r in rows} == {"classes", "rows", "shared"} and {1} <= {r["devices"] for r in rows}
    for row in rows:
        assert set(row["times"]) == set(row["scaling"]) == {_goals.OURS, "xla"}
        assert row["sent"][_goals.OURS] == (
            {"all-gather": 1} if row["group"] == "classes" and row["devices"] > 1 else {}
        )
        assert row["devices"] > 1 or set(row["scaling"].values()) == {1.0}
    assert all(row["of"] in sharding.table(data) for row in rows)


def test_whole_programs(tmp_path):
    options = argparse.Namespace(quick=True, cases="^(click model|vocabulary head) float32", repeats=1)
    path = _report.save(data := programs.run(options), tmp_path)
    rows = json.loads(path.read_text())["results"]
    assert [r["case"] for r in rows] == ["click model", "vocabulary head"]
    for row in rows:
        assert set(row["times"]) == set(row["loss"]) == {_goals.OURS, "xla"}
        assert row["loss"][_goals.OURS] == pytest.approx(row["loss"]["xla"], rel=1e-3)
        assert row["decisions"] and row["case"] in programs.table(data)


@pytest.mark.parametrize("wrong", [0.0, 0.1])
def test_loss_curves(wrong, monkeypatch):
    """Losses that rounding alone sets apart are close; others are not, though both fall."""

    def loss(w, x):
        error = wrong if jaxkern.installed() else 0
        rows = x / jnp.sum(x * x, -1, keepdims=True)
        # In the default precision of a GPU, products lose the difference of the weights nearby.
        return jnp.mean(jnp.square(jnp.matmul(rows, w, precision="highest") - 1)) + error

    make = lambda dtype, small: programs._optimized(
        optax.sgd(1.0), loss, lambda key: jax.random.normal(key, (16, 4)), (np.ones((8, 16), np.float32),)
    )
    monkeypatch.setattr(programs, "programs", lambda: [programs.Program("rows", "float32", make)])
    options = argparse.Namespace(quick=True, cases="", seeds=2, steps=20, only=["rows"], without=None, force=False)
    rows = (data := curves.run(options))["results"]
    assert [r["case"] for r in rows] == ["rows", "rows [only rows]"] and "[only rows]" in curves.table(data)
    for row in rows:
        assert row["goals"][0]["met"] == (not wrong)
        assert np.shape(row["curves"]["xla"]) == (2, 20) and row["curves"]["xla"][0] != row["curves"]["xla"][1]
        assert 0 < row["distance"]["nearby"] < 1e-4


@pytest.mark.parametrize("endless", ["", "four steps did not end"])
def test_first_steps_are_compared_with_matrix_products_known(endless, monkeypatch):
    """If the goal is checked, the plain step is compiled once before all others, and again where it is measured."""
    events = []

    def step(state, x):
        events.append("traced")
        return state + x, x

    training = programs.Training(lambda: jnp.zeros(()), step, (np.ones((), np.float32),))
    plain = jax.jit(training.step, donate_argnums=0)
    programs._compile_plainly(training)
    programs._compile_plainly(training)
    plain(jnp.zeros(()), jnp.ones(()))
    assert events == ["traced"] * 3

    def measured(training, compiled, repeats):
        events.append("measured")
        return programs._Measured(_timing.Timing([1.0], "host"), 2.0, 0.0)

    events.clear()
    monkeypatch.setattr(programs._run, "backend", lambda: "gpu")
    monkeypatch.setattr(programs, "_compile_plainly", lambda training: events.append("compiled"))
    monkeypatch.setattr(programs, "_measured", measured)
    program = programs.Program("steps", "float32", lambda dtype, small: training, endless=endless)
    for small in (False, True):
        (row,) = programs._rows(program, {"": {}}, small, 1, 0, {})
        checked = not small and not endless
        assert [goal["goal"] for goal in row["goals"]] == (["plain", "first step", "memory"] if checked else [])
        found = [e for e in events if e != "traced"]
        assert found == ["compiled"] * checked + ["measured"] * (1 if endless and not small else 2)
        assert not checked or events[0] == "compiled"
        events.clear()


TRANSFORMER = {"softmax_cross_entropy", "scatter_add", "dot_product_attention"}
# What is found in a program, at least.
FOUND = {
    "transformer, flax.nnx": TRANSFORMER,
    "transformer, equinox": TRANSFORMER,
    "transformer, haiku": TRANSFORMER,
    "mesh simulator, flax.linen": {"scatter_add"},
    "potential with forces": {"scatter_add"},
    "sinkhorn, ott-jax": {"logsumexp"},
    "griffin layer": {"scan"},
    "advantages": {"scan"},
    "random walks": {"scan"},
    "oscillators": {"scan"},
    "adaptive integrator": {"while_loop"},
    "llama, by hand": {"rows", "scatter_add"},
    "t5 encoder, by hand": {"rows", "scatter_add"},
    "vision transformer, by hand": {"rows"},
    "capped transformer, by hand": {"rows", "scatter_add"},
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found_in_programs(name):
    """Every operation is taken, whatever its size, and the losses are the same, from parameters that cost no program."""
    found = [p for p in programs.programs() if p.name == name]
    if not found:
        pytest.skip("its package is not installed")
    # In 16 bits regions round elsewhere than the plain program: test_accelerate_rows.py compares both with float64.
    dtype, platform = "float32" if "rows" in FOUND[name] else found[0].dtype, "cuda" if ON_GPU else "cpu"
    training = found[0].make(dtype, True)
    step, rng = jax.jit(training.step), np.random.default_rng(0)
    is_key = lambda a: jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
    some = lambda a: np.abs(rng.normal(0, 0.1, a.shape)).astype(a.dtype)  # moments of an optimizer are not negative
    first = jax.tree.map(lambda a: jax.random.key(0) if is_key(a) else some(a), jax.eval_shape(training.init))

    def losses():
        state, found = first, []
        for _ in range(3):
            state, loss = step(state, *training.data)
            found.append(float(loss))
        return found

    plain = losses()
    others = set(switch.OPERATIONS) - {"rows"}  # rows would take what functions by name are part of
    with jaxkern.accelerate(only=others | FOUND[name], force=True):
        explanation = jaxkern.explain(step, platform)(*training.specs())
        own = losses()
    assert {d.operation for d in explanation.taken} >= FOUND[name], explanation
    assert own == pytest.approx(plain, rel=5e-3)


def test_errors_in_results_are_within_the_promise():
    """The factor is the one that docs/numerics.md states."""
    rows = [row for path in main.RESULTS.glob("*.json") for row in json.loads(path.read_text()).get("results", [])]
    goals = [
        (goal["value"], row["op"], row["case"], row["dtype"])
        for row in rows
        for goal in row.get("goals", [])
        if goal["goal"] == "accurate"
    ]
    assert goals and min(goals)[0] >= 1 / _goals.ERROR, min(goals)


def test_rows_of_sinkhorn():
    """Its rows are arithmetic on potentials and on a product: they stay with XLA, or a region of both reads the product alone."""
    pytest.importorskip("ott")
    (program,) = (p for p in programs.programs() if p.name == "sinkhorn, ott-jax")
    training = program.make(program.dtype, False)
    with jaxkern.accelerate(without="rows"):
        found = jaxkern.explain(training.step)(*training.specs())
    assert found and not found.taken, found
    found = jaxkern.explain(training.step)(*training.specs())
    assert {d.operation for d in found.taken} == {"rows"}, found
    of_loop = [d for d in found.taken if d.bytes < 1.1 * 8192 * 8192 * 4]
    assert len(of_loop) == 2, found  # along each axis


def test_sets_of_operations(tmp_path):
    """Each set is a case of its own, beside the default."""
    options = argparse.Namespace(
        quick=True,
        cases="^vocabulary head float32",
        repeats=1,
        only=["default,log_softmax"],
        without=["softmax_cross_entropy"],
    )
    rows = programs.run(options)["results"]
    assert [r["case"] for r in rows] == [
        f"vocabulary head{label}" for label in ("", " [only default,log_softmax]", " [without softmax_cross_entropy]")
    ]
    operations = [{d["operation"] for d in r["decisions"]} for r in rows]
    assert "softmax_cross_entropy" in operations[0] & operations[1] and "softmax_cross_entropy" not in operations[2]
    with pytest.raises(ValueError, match="no operation 'transpose'"):
        programs.run(argparse.Namespace(quick=True, cases="head", repeats=1, only=["transpose"]))


def test_programs_of_full_size_are_traced(capsys):
    """They are traced as on a GPU, but without arrays, which would not fit in memory."""
    programs.explain(argparse.Namespace(quick=False, cases="^embedding bfloat16"))
    assert "16-bit sums" in capsys.readouterr().out or not programs.jaxkern._core.registry.kernels_run()


@pytest.mark.parametrize("name", [p.name for p in programs.programs() if p.pyg and p.dtype == "float32"])
def test_pytorch_geometric_runs_the_same_models(name):
    """From the same parameters, every way to run the model has the same losses in steps of Adam."""
    if _torch.geometric() is None:
        pytest.skip("PyTorch Geometric is not installed")
    program = next(p for p in programs.programs() if p.name == name and p.dtype == "float32")
    training, steps = program.make("float32", True), 3
    step, state, wanted = jax.jit(training.step), training.init(), []
    params = jax.device_get(state[0])
    for _ in range(steps):
        state, loss = step(state, *training.data)
        wanted.append(float(loss))
    make, kinds = _geometric.MODELS[program.pyg]
    for kind in kinds:
        if kind != "compiled":  # the same code, and half a minute of compilation
            run = _geometric.step(make(kind, params, training.data), "float32")
            assert [float(run().detach()) for _ in range(steps)] == pytest.approx(
                wanted, rel=5e-3 if ON_GPU else 1e-4
            ), kind


def test_a_peer_that_fails_is_a_note(monkeypatch, tmp_path, capsys):
    """A peer that runs is in the file, the table and the figure."""
    measured = lambda: _geometric.Measured(_timing.Timing([1e6], "host", note="edge list"), 1.0, 2.0)
    peers = {"convolution": measured(), "interaction": _timing.Failure("out of memory")}
    monkeypatch.setattr(_torch, "geometric", lambda: True)
    monkeypatch.setattr(_geometric, "measure", lambda name, *_: peers[name])
    options = argparse.Namespace(quick=True, cases="^(graph convolution, zipf|interaction).*float32", repeats=1)
    path = _report.save(data := programs.run(options), tmp_path)
    rows = _report.load(path)["results"]
    assert [set(row["loss"]) - {_goals.OURS, "xla"} for row in rows] == [{"pyg"}, set()]
    assert _report.medians(rows[0])["pyg"] == 1e6 and "pyg" not in _report.medians(rows[1])
    assert "1000000" in programs.table(data) and "pyg: out of memory" in _report.summary(data)
    assert _plot.plot(data, path.with_suffix(""))[0].stat().st_size > 0
    found = [p for p in programs.programs() if p.name == "interaction network"]
    assert programs._peer(found[0], found[0].make("float32", True), 0, {}) is None


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs an interval timer")
def test_a_peer_has_a_limit():
    begin = time.perf_counter()
    with pytest.raises(TimeoutError), _geometric._within(0.1):
        while time.perf_counter() < begin + 20:
            time.sleep(0.01)
    assert time.perf_counter() < begin + 10
    with pytest.raises(TimeoutError), _geometric._within(0):
        pytest.fail("no time was left")


def test_readings_of_steps():
    """There are as many readings as requested, each of whole steps, and only the first may begin after the end."""
    calls, waits = [], []
    run, wait = lambda: calls.append(time.sleep(0.001)), lambda: waits.append(len(calls))
    assert len(_timing.steps(run, wait, 3, sample=0.01)) == 3
    assert waits[0] == 1 and len({b - a for a, b in zip(waits, waits[1:])}) == 1
    calls.clear(), waits.clear()
    (us,) = _timing.steps(run, wait, 3, sample=0.01, until=0.0)
    assert len(calls) == 1 and us >= 1000


def test_slow_candidates_are_called_less_often():
    """A trace holds every kernel, and a loop of XLA has thousands."""
    assert [_timing.calls_of_a_turn(24, seconds) for seconds in (1e-5, 5e-3, 0.1)] == [12, 10, 1]


def test_results_of_two_runs_become_one():
    def run(commit, cells, **more):
        environment = {"device": "A", "driver": "1", "jax": "1", "jaxlib": "1", "torch": "", "clock": "host"}
        environment |= {"jaxkern": "1", "commit": commit, "date": commit, **more}
        rows = [{"case": c, "dtype": "float32", "op": "f", "direction": "forward", "us": us} for c, us in cells.items()]
        return {"operation": "f", "environment": environment, "results": rows}

    merged = _report.merge(run("one", {"a": 1, "b": 2}), run("two", {"b": 3, "c": 4}))
    merged = _report.merge(merged, run("three", {"c": 5}))
    found = {r["case"]: (r["us"], r.get("earlier", {}).get("commit")) for r in merged["results"]}
    assert found == {"a": (1, "one"), "b": (3, "two"), "c": (5, None)}
    assert "commit three" in _report.header(merged) and "1 cells at commit one" in _report.header(merged)
    with pytest.raises(ValueError, match="different driver"):
        _report.merge(run("one", {"a": 1}), run("two", {"a": 1}, driver="2"))


# ---- benchmarks.sanitize


class Planned:
    """jax for a module of `benchmarks`: programs are planned for CUDA before they run here."""

    def __getattr__(self, name):
        return getattr(jax, name)

    def jit(self, f):
        jitted = jax.jit(f)

        def call(*args):
            jitted.trace(*args).lower(lowering_platforms=("cuda",))
            return jitted(*args)

        return call


@pytest.mark.skipif(ON_GPU, reason="benchmarks.sanitize itself runs there")
@plans.needs_runtime
@pytest.mark.parametrize("family", ["score", "group_norm", "segment_softmax", "scan", "while_loop"])
def test_sanitized_problems_can_be_planned(family, monkeypatch, capsys):
    """A few problems of families that take little time: the operation takes such a call, and the algorithm can run it or is left out."""
    few = lambda *lists: (found := list(itertools.product(*lists)))[:: len(found) // 2 + 1]
    for module in (sanitize, sanitize._sanitize_loops):
        monkeypatch.setattr(module, "jax", Planned())
        monkeypatch.setattr(module, "itertools", types.SimpleNamespace(product=few))
    monkeypatch.setattr(sanitize, "FUSED", {"warp": (257, 512), "by_hand": (512,)})
    monkeypatch.setattr("sys.argv", ["sanitize", "--only", family, "--dtypes", "float32", "--quick"])
    assert sanitize.main() == 0, capsys.readouterr().out
