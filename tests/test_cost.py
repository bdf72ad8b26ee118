"""The model that decides which regions of rows `accelerate` takes, against measurements."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import row_functions

from benchmarks import fit, row_kernel
from jaxkern._accelerate import cost
from jaxkern._core import device, registry
from jaxkern._engines.rows import plan
from jaxkern._engines.rows.function import trace

pytestmark = pytest.mark.skipif(not registry.kernels_run(), reason="no kernels")
RESULTS = pathlib.Path(row_kernel.__file__).parent / "results" / "row_kernel-NVIDIA_H200.json"
MEASURED = [r for r in json.loads(RESULTS.read_text())["results"] if r["width"] in (128, 4096)]


def estimate(f, avals, backward=False, gpu=device.H200):
    function = trace(f, avals, -1, "f")[0]
    if backward:
        function = function.vjp([k for k, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.inexact)])
        function = function.select(function.used())
    outputs = [jax.core.ShapedArray(*output) for output in plan.outputs(function)]
    return cost.estimate(function.core, plan.plan(gpu, function.avals, outputs, function=function), gpu)


def of_result(result):
    f, kinds = row_kernel.FUNCTIONS[result["op"]]
    shape = row_kernel.Case("", tuple(result["shape"])).operand
    dtype = lambda kind: "int32" if kind == "l" else result["dtype"]
    return estimate(f, [jax.ShapeDtypeStruct(shape(k), dtype(k)) for k in kinds], result["direction"] == "backward")


@pytest.mark.parametrize("op", sorted({r["op"] for r in MEASURED}))
def test_what_was_measured(op):
    """No case is taken that was slower than XLA, and both estimates are within a factor of 2.5 of what was measured."""
    for r in (r for r in MEASURED if r["op"] == op):
        found, times = of_result(r), r["times"]
        own, xla = times["jaxkern"]["median_us"] * 1e-6, times["xla"]["median_us"] * 1e-6
        case = (r["case"], r["dtype"], r["direction"], found, own, xla)
        assert not found.wins or xla > 0.98 * own, case
        assert 0.6 < found.kernel / own < 1.7, case
        assert found.xla / xla < 1.4, case  # what XLA takes longer, such as two kernels in place of one, is left out


def causal_softmax(x):
    """Half of the elements count: queries are eight times as many as keys."""
    place = lambda axis: jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jax.nn.softmax(jnp.where(place(0) >= 8 * place(1), 0.1 * x, -1e30), -1)


# What a region moves, in arrays of its rows: (function, operands, XLA, kernel).
MOVED = {
    "a causal softmax": (causal_softmax, "x", 2, 1.5),
    "a norm": (row_functions.rms_norm, "xc", 2, 2),
    "a residual and its norm": (lambda x, r, w: (row_functions.rms_norm(h := x + r, w), h), "xxc", 5, 4),
    "a normalizer": (lambda x: jax.nn.logsumexp(x, -1), "x", 2, 1),
    "a loss": (row_functions.loss, "xl", 2, 1),
    "a softmax that keeps its normalizer": (lambda x: (jax.nn.softmax(x), jax.nn.logsumexp(x, -1)), "x", 3, 2),
    "two elementwise results": (lambda x: (x + 1, x - jnp.mean(x, -1, keepdims=True)), "x", 4, 3),
}


@pytest.mark.parametrize("name", MOVED)
def test_bytes(name):
    f, kinds, xla, kernel = MOVED[name]
    shapes = {"x": (8192, 1024), "c": (1024,), "l": (8192,)}
    found = estimate(f, [jax.ShapeDtypeStruct(shapes[k], "int32" if k == "l" else "float32") for k in kinds])
    array = 8192 * 1024 * 4
    np.testing.assert_allclose([found.xla_bytes, found.kernel_bytes], [xla * array, kernel * array], rtol=0.01)


def test_sums_over_rows_take_a_second_kernel():
    x, c = jax.ShapeDtypeStruct((8192, 1024), "bfloat16"), jax.ShapeDtypeStruct((1024,), "bfloat16")
    found = estimate(row_functions.rms_norm, [x, c], backward=True)
    assert found.kernel > found.kernel_bytes / found.bandwidth + cost.SUMS


# Regions of benchmarks/_by_hand.py on an H100, bfloat16: (function, operands, backward, shape, XLA, kernel), in us.
H100 = {
    "a residual and its norm": (MOVED["a residual and its norm"][0], "xxc", False, (8192, 1024), 27, 20),
    "a norm, backward": (row_functions.rms_norm, "xc", True, (8192, 1024), 17, 31),
    "soft cap": (row_functions.soft_cap, "x", False, (65536, 1024), 202, 94),
}


@pytest.mark.parametrize("name", H100)
def test_another_gpu(name):
    f, kinds, backward, shape, xla, kernel = H100[name]
    gpu = device.Device(132, 90, 227 * 1024, 50 << 20)
    avals = [jax.ShapeDtypeStruct({"x": shape, "c": shape[-1:]}[k], "bfloat16") for k in kinds]
    found = estimate(f, avals, backward, gpu)
    assert found.wins == (xla > kernel), found
    assert found.kernel * 1e6 == pytest.approx(kernel, rel=0.3) and found.xla * 1e6 < 1.3 * xla, found


def test_neighbours():
    """What a kernel cannot be fused with is moved beside it."""
    found = cost.Estimate(2e-5, 1.9e-5, 100, 80, 4e12)
    assert found.wins and not found.beside(10**7).wins and found.beside(20).kernel_bytes == 100
    assert str(found.beside(20)).endswith("one kernel: 0.0001 MB, 19 us (2e-05 MB for arrays that XLA does not store)")


def test_what_stores_more_must_gain_more():
    alone = cost.Estimate(1.05e-4, 1e-4, 300, 200, 3e12)
    assert alone.wins and not dataclasses.replace(alone, unstored=100).wins
    assert dataclasses.replace(alone, xla=1.2e-4, unstored=100).wins


def test_arithmetic_is_named_where_it_limits_a_kernel():
    found = estimate(
        lambda x: jnp.tanh(jax.nn.softmax(30 * jnp.tanh(jnp.sin(x)))), [jax.ShapeDtypeStruct((8192, 32768), "float32")]
    )
    assert str(found).endswith("us (limited by arithmetic)"), found


def test_constants_are_fitted_to_half_of_the_regions(monkeypatch):
    monkeypatch.setattr(fit, "CONSTANTS", ("LAUNCH", "H200_BANDWIDTH", ("RAGGED", 4)))
    rows = [r for r in MEASURED if r["op"] in ("soft_cap", "huber") and r["width"] == 128]
    before = fit.constants()
    first, second = fit.halves(found := fit.regions({"results": rows}), 0)
    assert len(first) + len(second) == len(found) == len(rows) and not {r.key for r in first} & {r.key for r in second}
    wrong = before | {"H200_BANDWIDTH": before["H200_BANDWIDTH"] / 2}
    values = fit.fitted(first, wrong)
    assert fit.constants() == before
    assert fit.judged(second, values).error < 0.8 * fit.judged(second, wrong).error
    assert fit.judged(second, before).time >= 1
    assert "fitted to the other half" in fit.run({"results": rows}, 1)
