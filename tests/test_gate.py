"""What `jaxkern.accelerate` takes, and the measurements behind every threshold."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern._accelerate import gate
from jaxkern._core import compat, switch

# ---- the gate


def measured():
    """(problem, XLA's time, ours) of each case of the benchmark whose times the repository has."""
    path = pathlib.Path(__file__).parent.parent / "benchmarks/results/index_add-NVIDIA_H200.json"
    for row in json.loads(path.read_text())["results"]:
        times = [row["times"].get(who, {}).get("median_us") for who in ("xla", "jaxkern")]
        if row["op"] not in ("index_add", "segment_sum") or None in times:
            continue
        (rows, *_), width = row["shape"], row["width"]
        if len(row["shape"]) > 2 or " of " in row["case"]:
            continue
        yield (
            row["case"],
            gate.Scatter(
                "scatter_add",
                jnp.dtype(row["dtype"]),
                1,
                1,
                rows,
                row["count"],
                width,
                row["kind"] == "sorted",
                row["op"] == "segment_sum",
            ),
            *times,
        )


def test_the_gate_takes_what_was_measured_to_win():
    taken = 0
    for name, problem, xla, ours in measured():
        wins, why = gate.scatter(problem)
        taken += wins
        assert not wins or xla / ours >= 0.97, (name, problem, xla, ours, why)
        assert wins or xla / ours < 40, (name, problem, xla, ours, why)
    assert taken > 60


def scatter_problem(**changes):
    problem = gate.Scatter("scatter_add", jnp.dtype(jnp.float32), 1, 1, 169343, 1166243, 128)
    return problem._replace(**changes)


@pytest.mark.parametrize(
    "changes, taken",
    [
        ({}, True),
        ({"gathers": True}, False),
        ({"fused": True}, False),
        ({"fused": True, "dtype": jnp.dtype(jnp.bfloat16)}, True),
        ({"fused": True, "rows": 64}, True),  # updates of a row that contend
        ({"rows": 10, "count": 20480}, False),
        ({"rows": 10, "count": 20480, "trail": 1}, True),
        # XLA adds float32 by compare-and-swap in jaxlib 0.10.2 to 0.11.0.
        ({"count": 1000, "jaxlib": (0, 10, 1)}, False),
        ({"count": 1000, "jaxlib": (0, 10, 2)}, True),
        ({"count": 1000, "jaxlib": (0, 11, 0)}, True),
        ({"count": 1000, "jaxlib": (0, 11, 1)}, False),
        ({"count": 1000, "jaxlib": (0, 10, 2), "dtype": jnp.dtype(jnp.int32)}, False),
        ({"gathers": True, "jaxlib": (0, 10, 2)}, True),
        ({"fused": True, "jaxlib": (0, 10, 2)}, True),
        ({"count": 2, "trail": 8, "jaxlib": (0, 10, 2)}, False),
        ({"gathers": True, "dtype": jnp.dtype(jnp.bfloat16)}, True),
        ({"gathers": True, "operation": "scatter_max"}, True),
        ({"count": 1000}, False),
        ({"trail": 1}, False),
        ({"rows": 1, "trail": 1}, True),
        ({"moves_operand": True}, False),
        ({"moves_operand": True, "zeros": True}, True),
        ({"dtype": jnp.dtype(jnp.int8)}, False),
        ({"rows": 2**31}, False),
        # The gradient of take_along_axis, of one element in each row: nothing is summed.
        ({"dtype": jnp.dtype(jnp.bfloat16), "batch": 8192, "rows": 50257, "count": 1, "trail": 1}, False),
        ({"dtype": jnp.dtype(jnp.bfloat16), "batch": 8192, "rows": 50257, "count": 2, "trail": 1}, True),
    ],
)
def test_the_gate(changes, taken):
    assert gate.scatter(scatter_problem(**changes))[0] == taken


@pytest.mark.parametrize("jaxlib, chained", [((0, 10, 1), False), ((0, 10, 2), True), ((0, 11, 2), False)])
def test_the_gate_of_chains(jaxlib, chained):
    few = scatter_problem(count=1 << 15, rows=1 << 15, gathers=True, jaxlib=jaxlib)
    assert gate.chain(few, ordered=False)[0] == chained
    assert gate.chain(few._replace(dtype=jnp.dtype(jnp.bfloat16)), ordered=False)[0]


RESULTS = pathlib.Path(__file__).parent.parent / "benchmarks/results"


def results(name):
    return json.loads((RESULTS / f"{name}-NVIDIA_H200.json").read_text())


def gain(row):
    """XLA's time over ours; None if one of the two is missing."""
    times = [row["times"].get(who, {}).get("median_us") for who in ("xla", "jaxkern")]
    return None if None in times else times[0] / times[1]


def test_every_threshold_names_its_measurements():
    """Each is in the committed results, from the jaxlib that the gate names, and says what the gate says of it."""
    thresholds = {n for n, v in vars(gate).items() if n.isupper() and isinstance(v, int)}
    assert thresholds == set(gate.MEASURED)
    for name, measured in gate.MEASURED.items():
        for m in measured:
            found = results(m.file)
            assert found["environment"]["jaxlib"] == gate.JAXLIB
            key = m.operation, m.case, m.dtype, m.direction
            rows = [r for r in found["results"] if (r["op"], r["case"], r["dtype"], r["direction"]) == key]
            assert len(rows) == 1, (name, m)
            ratio = gain(rows[0])
            as_said = 0.95 < ratio < 1.05 if m.wins is None else ratio > 1.03 if m.wins else ratio < 0.99
            assert as_said, (name, m, ratio)


def test_no_problem_is_refused_before_its_program_is_read():
    """Rules read the program only where updates that nothing makes, added to zeros, would be taken."""
    rng, taken = np.random.default_rng(0), 0
    for _ in range(2000):
        sizes = (2 ** rng.integers(0, (2, 2, 24, 24, 9))).tolist()
        dtype = jnp.dtype(str(rng.choice(["float32", "bfloat16", "int32", "float64"])))
        facts = dict(zip(("is_sorted", "zeros", "moves_operand", "gathers", "fused"), map(bool, rng.integers(0, 2, 5))))
        problem = gate.Scatter(str(rng.choice(switch.SCATTERS)), dtype, *sizes, **facts)
        if gate.scatter(problem)[0]:
            taken += 1
            assert gate.scatter(problem._replace(zeros=True, gathers=False, fused=False))[0], problem
    assert 200 < taken < 1800


def test_no_program_loses():
    ratios = {(r["case"], r["dtype"]): gain(r) for r in results("programs")["results"]}
    assert all(ratio is None or ratio > 0.98 for ratio in ratios.values()), ratios


UPDATES = {
    "an argument": (lambda x, i: x, True),
    "a product": (lambda x, i: x @ jnp.ones((128, 128)), True),
    "arithmetic": (lambda x, i: x * 2, False),
    "a slice": (lambda x, i: jnp.concatenate([x, x], 1)[:, :128], False),
    "one number for each row": (lambda x, i: jnp.broadcast_to(x[:, :1], x.shape), False),
    "arithmetic in a function": (lambda x, i: jax.jit(jnp.tanh)(x), False),
}


@pytest.mark.skipif(not jaxkern._core.registry.kernels_run(), reason="no kernels")
@pytest.mark.parametrize("name", UPDATES)
def test_updates_are_not_taken_out_of_arithmetic(name, monkeypatch):
    """This holds in float32. 16-bit sums, and float32 where XLA adds by compare-and-swap, are taken anyway."""
    make, taken = UPDATES[name]
    f = lambda x, i: jax.ops.segment_sum(make(x, i), i, 40_000)
    x, i = jax.ShapeDtypeStruct((240_000, 128), jnp.float32), jax.ShapeDtypeStruct((240_000,), jnp.int32)
    for jaxlib, expected in (((0, 11, 2), taken), ((0, 10, 2), True)):
        monkeypatch.setattr(compat, "jaxlib", lambda jaxlib=jaxlib: jaxlib)
        (d,) = jaxkern.explain(f)(x, i)
        assert d.taken == expected, d
    assert jaxkern.explain(f)(jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), i)[0].taken
