"""Plans of row functions: which algorithm, what its kernels compute (run on the CPU), and that they compile for GPUs."""

import re

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
from jax import lax
from row_functions import FUNCTIONS, layer_norm, operands

from jaxkern import algorithms
from jaxkern._core import compat, device, registry
from jaxkern._core.draws import draw_p
from jaxkern._engines.rows import in_place, layout, plan, tuning
from jaxkern._engines.rows.function import trace

# So few multiprocessors that blocks which sum over rows take several, and so little L2 that rows are taken by runs.
SMALL = device.Device(4, 90, 227 * 1024, 4 << 10)


def traced(name, shape, dtype, gradient, seed=0):
    """The RowFunction of an entry of FUNCTIONS, or of its gradients, and operands for it."""
    f, kinds, _ = FUNCTIONS[name]
    args = operands(kinds, shape, dtype, seed)
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
    function, _, _ = trace(lambda *xs: f(*xs), avals, -1, name)
    if gradient:
        wrt = [k for k, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating)]
        rng = np.random.default_rng(seed + 1)
        args += [np.asarray(rng.normal(size=function.results[k].shape), dtype) for k in function.inexact_results]
        function = function.vjp(wrt)
        used = function.used()
        function, args = function.select(used), [args[k] for k in used]
    return function, args


def planned(function, algorithm=None, on=device.H200):
    results = [jax.ShapeDtypeStruct(*o) for o in plan.outputs(function)]
    with algorithms.force(row_kernel=algorithm or "auto"):
        return plan.plan(on, function.avals, results, function=function)


needs_compiler = pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
CASES = [
    ("layer_norm", (13, 1100), "float32", True, "cluster"),
    ("entropy", (3, 4003), "bfloat16", False, "cluster"),
    ("totals", (4, 3, 448), "float64", False, "cluster"),
    ("layer_norm", (3, 1100), "float32", True, "split"),
    ("entropy", (33, 9001), "float32", False, "split"),
    ("rms_norm", (5, 3, 64), "float32", False, "lanes"),
    ("residual", (5, 3, 64), "bfloat16", True, "warp"),
    ("layer_norm", (7, 777), "bfloat16", False, "block"),
    ("layer_norm", (70, 777), "float32", True, "block"),
    ("rms_norm", (29, 777), "float32", True, "cluster"),
    ("rms_norm", (70, 6201), "bfloat16", True, "split"),
    ("masked", (3, 2, 4, 40), "float16", True, "lanes"),
    ("causal", (1, 2, 12, 20), "float32", False, "streaming"),
    ("masked", (2, 3, 64, 40), "float32", False, "lanes"),
    ("band", (2, 30, 44), "bfloat16", True, "block"),
    ("dropped", (3, 4, 50), "bfloat16", True, "warp"),
    ("dropped", (2, 3, 440), "float32", False, "cluster"),
    ("loss", (9, 130), "float32", True, "lanes"),
    ("one_hot_loss", (3, 3001), "bfloat16", False, "streaming"),
    ("entropy", (2, 3, 33), "float32", True, "warp"),
    ("totals", (4, 3, 48), "float64", False, "lanes"),
    ("places", (4, 3, 50), "float32", False, "warp"),
    ("pairs", (4, 3, 50), "float16", False, "lanes"),
    ("products", (4, 50), "float32", False, "block"),
    ("branch", (4, 50), "float32", True, "lanes"),
    ("loss", (9, 777), "bfloat16", False, "block"),
    ("smoothed_loss", (3, 1100), "float32", False, "cluster"),
    ("smoothed_loss", (9, 301), "bfloat16", False, "lanes"),
    ("smoothed_loss", (3, 3001), "float32", False, "streaming"),
    ("smoothed_loss", (3, 3001), "float32", False, "split"),
    ("residual", (3, 2, 97, 3), "bfloat16", True, "thread"),
    ("masked", (3, 2, 50, 6), "float16", True, "thread"),
    ("smoothed_loss", (133, 5), "float64", False, "thread"),
    ("totals", (70, 200, 7), "float32", False, "thread"),  # blocks add up the sums of several spans
    ("dropped", (2, 70, 31), "float32", True, "thread"),
    ("places", (150, 2), "bfloat16", False, "thread"),
    ("pairs", (150, 7), "int8", False, "thread"),  # parts of 8 bits are exchanged as words
]


IN_PLACE = [
    ("thread", (150, 7), "float32"),
    ("lanes", (29, 64), "bfloat16"),
    ("warp", (9, 777), "bfloat16"),
    ("block", (5, 1100), "float32"),
    ("cluster", (3, 4003), "bfloat16"),
    ("streaming", (3, 3001), "float32"),
    ("split", (3, 3001), "bfloat16"),
]


@needs_compiler
@plans.needs_runtime
@pytest.mark.parametrize("algorithm, shape, dtype", IN_PLACE)
def test_results_over_operands(algorithm, shape, dtype):
    def f(x, w):
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))
        return y * w, jnp.sum(y, -1), x + w

    x, w = operands("xx", shape, dtype)
    function, _, _ = trace(f, [jax.ShapeDtypeStruct(shape, dtype)] * 2, -1, "f")
    function = function.overwriting([(1, 0), (0, 2)])
    found = planned(function, algorithm)
    assert found.algorithm == algorithm and in_place.in_place(function, algorithm) == {1: 0, 0: 1}  # sums come last
    emulated.prepare(found)
    for unaligned in (False, True):
        apart, over = (
            emulated.run(found, [x, w], plan.outputs(function), unaligned, aliases=aliases)
            for aliases in ((), ((1, 0), (0, 1)))
        )
        assert all(map(np.array_equal, apart, over))


@needs_compiler
@plans.needs_runtime
@pytest.mark.parametrize("begin", [8, 12, 13])
@pytest.mark.parametrize("algorithm", ["warp", "block", "thread"])
def test_random_bits_of_a_part_of_each_row(algorithm, begin):
    """The part of a device draws the bits of the places that it has in the whole rows."""

    def f(x, begin):
        place = lax.broadcasted_iota(jnp.int32, x.shape, 1) + begin
        row = lax.broadcasted_iota(jnp.uint32, x.shape, 0)
        key = [jnp.full((1, 1), k, jnp.uint32) for k in (3, 4)]
        return jnp.where(draw_p.bind(place.astype(jnp.uint32), row, *key) < 30000, x, 0)

    x = operands("x", (70, 7 if algorithm == "thread" else 24), "float32")[0]
    function, _, _ = trace(f, [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((), jnp.int32)], -1, "f")
    check(planned(function, algorithm), function, [x, np.int32(begin)], "float32")


def test_what_is_not_written_over_an_operand():
    x, labels = jax.ShapeDtypeStruct((4, 64), jnp.float32), jax.ShapeDtypeStruct((4, 1), jnp.int32)
    pairs = {
        "a pick": lambda x, k: x - jnp.take_along_axis(x, k, -1),
        "another type": lambda x, k: (x + k).astype(jnp.bfloat16),
        "transposed": lambda x, k: (x + k).T,
    }
    for what, f in pairs.items():
        function, _, _ = trace(f, [x, labels], -1, "f")
        assert in_place.in_place(function.overwriting([(0, 0)]), "lanes") == {}, what
    function, _, _ = trace(lambda x, k: x + k, [x, labels], -1, "f")
    assert in_place.in_place(function.overwriting([(0, 0)]), "strided") == {}
    assert in_place.in_place(function.overwriting([(0, 0)]), "lanes") == {0: 0}
    assert function.overwriting([(0, 0)]) != function


# The row is dimension 1 of these. (name, function, shape of x, shape of w, dtype, whether the gradient); threads of a block hold
# the first, of a cluster the second, and the third is read again.
ACROSS = [
    ("softmax", lambda x, w: jax.nn.softmax(x * w, 1), (30, 5, 12), (5, 1), "bfloat16", True),
    (
        "norm",
        lambda x, w: x * jax.lax.rsqrt(jnp.mean(x * x, 1, keepdims=True)) * w,
        (2, 2100, 6),
        (2100, 1),
        "float32",
        True,
    ),
    (
        "total",
        lambda x, w: (jax.nn.log_softmax(x + w, 1), jnp.sum(x * x), jnp.argmax(x, 1)),
        (2, 50, 64),
        (2, 50, 1),
        "float32",
        False,
    ),
    (
        "pick",
        lambda x, w: jnp.take_along_axis(x, (9 * w).astype(int) % 30, 1),
        (2, 30, 48),
        (2, 1, 48),
        "float32",
        False,
    ),
    # Rows side by side are no whole packs.
    ("odd softmax", lambda x, w: jax.nn.softmax(x * w, 1), (2, 30, 205), (30, 1), "bfloat16", True),
    (
        "odd cluster",
        lambda x, w: x * jax.lax.rsqrt(jnp.mean(x * x, 1, keepdims=True)) * w,
        (2, 45, 227),
        (45, 1),
        "float32",
        True,
    ),
    (
        "odd total",
        lambda x, w: (jax.nn.log_softmax(x + w, 1), jnp.sum(x * x), jnp.argmax(x, 1)),
        (2, 50, 3, 79),
        (2, 50, 1, 1),
        "float32",
        False,
    ),
    # Of 32 threads side by side, the 8 elements at a time would not start at the same of 16 places.
    ("odd total of bytes", lambda x, w: x < jnp.max(x * w, 1, keepdims=True), (2, 50, 479), (50, 1), "int8", False),
]


@needs_compiler
@plans.needs_runtime
@pytest.mark.parametrize("algorithm", ["strided", "split"])
@pytest.mark.parametrize("name, f, shape, of_w, dtype, gradient", ACROSS, ids=[case[0] for case in ACROSS])
def test_strided_kernels_on_the_cpu(name, f, shape, of_w, dtype, gradient, algorithm, monkeypatch):
    monkeypatch.setattr(tuning, "GROUPED_BLOCKS", 2)
    monkeypatch.setattr(tuning, "SUM_GROUPS", 2)
    if "total" in name:
        monkeypatch.setattr(tuning, "STRIDED_HELD", ())
    if "cluster" in name:
        monkeypatch.setattr(tuning, "STRIDED_HELD", ((256, 2, 1),))
    args = operands("x", shape, dtype) + operands("x", of_w, dtype, 1)
    function, _, _ = trace(f, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args], 1 - len(shape), name)
    if gradient:
        args += operands("x", function.results[0].shape, dtype, 2)
        function = function.vjp((0, 1))
    assert len(function.used()) == len(args)
    found = planned(function, algorithm, SMALL)
    assert found.algorithm == algorithm
    assert (found.launches[0].cluster > 1) == (name in ("norm", "odd cluster") and algorithm == "strided")
    assert found.launches[0].name.endswith("true>") == ("odd" in name)
    check(found, function, args, dtype)


@needs_compiler
@plans.needs_runtime
@pytest.mark.parametrize("name, shape, dtype, gradient, algorithm", CASES)
def test_kernels_on_the_cpu(name, shape, dtype, gradient, algorithm):
    """Every element is written, nothing is read or written out of bounds, at any alignment, and results are right."""
    with compat.enable_x64(dtype == "float64"):
        function, args = traced(name, shape, dtype, gradient)
        found = planned(function, algorithm, SMALL)
        assert found.algorithm == algorithm
        check(found, function, args, dtype)


@needs_compiler
@plans.needs_runtime
def test_sums_of_long_rows_are_accurate():
    """A thread adds up thousands of packs, whose rounding errors have one sign where all elements are the same."""
    x = np.full((1, 1 << 21), 0.1, np.float32)
    function, _, _ = trace(lambda x: jnp.sum(x, -1), [jax.ShapeDtypeStruct(x.shape, x.dtype)], -1, "sum")
    (ours,) = emulated.run(planned(function, "streaming", SMALL), [x], plan.outputs(function), False)
    np.testing.assert_allclose(ours, x.astype(np.float64).sum(-1), rtol=1e-6)


def check(found, function, args, dtype):
    """The results of a plan, on aligned and unaligned buffers, match the function."""
    plans.check_limits(found, device.H200)
    wanted, after_core = jax.jit(function.wide)(*args), jax.jit(function.after_core)
    emulated.prepare(found)
    for unaligned in (False, True):
        ours = after_core(args, emulated.run(found, args, plan.outputs(function), unaligned))
        for y, want in zip(ours, wanted, strict=True):
            assert y.dtype == want.dtype
            y, want = np.asarray(y, np.float64), np.asarray(want, np.float64)
            tolerance = {"int8": 0, "float64": 1e-13, "float32": 3e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
            np.testing.assert_allclose(y, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


@needs_compiler
@plans.needs_runtime
def test_columns_of_another_type_at_any_alignment():
    """Rows of 777 elements begin anywhere in the packs of a thread; columns are read in vectors all the same."""
    x, w = operands("x", (5, 777), "bfloat16")[0], operands("c", (5, 777), "float32")[0]
    f = lambda x, w: (x * jnp.sum(x * w, -1, keepdims=True)).astype(jnp.bfloat16)
    function, _, _ = trace(f, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, w)], -1, "f")
    found = planned(function)
    assert "kRagged" in found.launches[0].name
    check(found, function, [x, w], "bfloat16")


@needs_compiler
@plans.needs_runtime
def test_division_by_a_number_of_the_row():
    """Quotients equal the result of a division for divisors of any size, though a row divides only once."""
    tiny, huge = np.float32(3e-40), np.float32(3e38)
    rows = [[1, 3, 7, 0.1], [tiny, tiny / 3, 1, 0], [huge, 1e38, 1, 1e-30], [np.inf, 1, 0, huge], [0, 0, 0, 0]]
    x = np.array([*rows, [1e-30, 1e-38, tiny, 1e20], [np.nan, 1, 2, 3]], np.float32)
    with np.errstate(all="ignore"):
        wanted = x / x[:, :1]
    function, _, _ = trace(lambda x: x / x[:, :1], [jax.ShapeDtypeStruct(x.shape, x.dtype)], -1, "f")
    (y,) = emulated.run(planned(function), [x], plan.outputs(function))
    np.testing.assert_allclose(y, wanted, rtol=2e-7, atol=0)


@needs_compiler
@plans.needs_runtime
@pytest.mark.parametrize(
    "algorithm, f, gradient",
    [
        ("cluster", jax.nn.softmax, False),
        ("block", jax.nn.softmax, True),
        ("split", jax.nn.logsumexp, False),
        ("cluster", jax.nn.log_softmax, True),  # the cotangents are summed with the maximum
        ("split", jax.nn.log_softmax, True),
    ],
)
def test_a_maximum_and_sums_of_exponentials_take_one_exchange(algorithm, f, gradient):
    """Each thread's exponents are relative to the largest of its own elements; some have none but -inf."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(7, 1400)).astype(np.float32) * 50
    x[1, :1000], x[2], x[3, 70], x[4, 1200], x[5, 3:] = -np.inf, -np.inf, np.inf, np.nan, -300
    args, wanted = [x], f(x, -1)
    function, _, _ = trace(lambda x: f(x, -1), [jax.ShapeDtypeStruct(x.shape, x.dtype)], -1, "f")
    if gradient:
        args.append(rng.normal(size=x.shape).astype(np.float32))
        function, wanted = function.vjp([0]), jax.vjp(lambda x: f(x, -1), x)[1](args[1])[0]
    assert len(function.core.passes) == 2 and len(function.core.stages) == 1
    (y,) = emulated.run(planned(function, algorithm), args, plan.outputs(function))
    np.testing.assert_allclose(np.reshape(y, (7, -1)), np.reshape(wanted, (7, -1)), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    "f, passes",
    [
        (lambda x: jax.vjp(lambda x: layer_norm(x, 1.5, 0.5), x)[1](x), 2),
        (lambda x: jax.vjp(lambda x: jax.nn.softmax(x, -1), x)[1](x), 2),
        (lambda x: jnp.sum(jax.nn.log_softmax(x, -1), -1), 2),  # x - max(x) and the normalizer: all terms have one sign
        (
            lambda x: jnp.sum(x - jax.nn.logsumexp(x, -1, keepdims=True), -1),
            3,
        ),  # the sum of x alone would be less accurate
        (lambda x: jax.nn.log_softmax(x, -1)[:, 3], 2),
        (lambda x: jax.vjp(lambda x: jnp.sum(_p_log_p(jax.nn.log_softmax(x, -1)), -1), x)[1](x[:, 0]), 2),
        (lambda x: jnp.sum(_p_log_p(x - jax.nn.logsumexp(x, -1, keepdims=True)), -1), 3),
        (lambda x: jnp.sum(x / jnp.max(x, -1, keepdims=True), -1), 2),  # and would overflow
        (lambda x: jnp.sum(x * (x / jnp.max(x, -1, keepdims=True)), -1), 2),
    ],
)
def test_sums_of_terms_with_factors_of_the_row_take_no_pass_of_their_own(f, passes):
    function, _, _ = trace(f, [jax.ShapeDtypeStruct((4, 64), jnp.float32)], -1, "f")
    assert len(function.core.passes) == passes


def _centred(x, k):
    scale = jax.lax.rsqrt(jnp.mean((x - jnp.mean(x, -1, keepdims=True)) ** 2, -1, keepdims=True) + 1)
    return x - jnp.sum(k(scale) * (scale * (x * x)), -1, keepdims=True)


def _p_log_p(y):
    return jnp.exp(y) * y


def _soft(x):
    e = jnp.exp(x - jnp.max(x, -1, keepdims=True))
    return e, jnp.sum(e, -1, keepdims=True)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, k: (lambda e, total: jnp.sum(total * (x * (e / total)), -1))(*_soft(x)),
        lambda x, k: _centred(x, lambda _: jnp.broadcast_to(k, x.shape).transpose(1, 0, 2)),
        lambda x, k: _centred(x, lambda n: jnp.broadcast_to(9 * n, x.shape).astype(jnp.int32).astype(x.dtype)),
    ],
    ids=["multiplied_and_divided", "transposed", "rounded"],
)
def test_factors_of_the_row_that_sums_are_multiplied_by(f):
    x = np.random.default_rng(0).normal(size=(3, 3, 50)).astype(np.float32)
    args = [x, x[:, :, :1].copy()]
    function, _, _ = trace(f, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args], -1, "f")
    np.testing.assert_allclose(function.wide(*args)[0], f(*args), rtol=1e-5, atol=1e-5)


@needs_compiler
@plans.needs_runtime
@pytest.mark.parametrize("algorithm", ["block", "split"])
def test_masked_elements_of_an_entropy_overflow_nothing(algorithm):
    """Threads and blocks whose elements are all masked by the lowest number sum the products of it with exp(0)."""

    def f(x):
        e, total = _soft(x)
        return jnp.sum(e * x, -1) / total[..., 0]

    x = np.random.default_rng(0).normal(size=(3, 2048)).astype(np.float32)
    x[0, 700:], x[1, :2000] = np.finfo(np.float32).min, np.finfo(np.float32).min
    function, _, _ = trace(f, [jax.ShapeDtypeStruct(x.shape, x.dtype)], -1, "f")
    assert len(function.core.stages) == 1
    (y,) = emulated.run(planned(function, algorithm), [x], plan.outputs(function))
    np.testing.assert_allclose(y, f(x), rtol=1e-5, atol=1e-6)


@needs_compiler
@plans.needs_runtime
def test_kept_exponentials_of_rows_with_infinities():
    """The others are finite numbers over infinity, though those that a thread kept were relative to a large number."""

    def f(x):
        most = jnp.max(x, -1, keepdims=True)
        e = jnp.exp(x - jnp.where(jnp.isfinite(most), most, 0))
        return e / jnp.sum(e, -1, keepdims=True)

    x = np.random.default_rng(0).normal(size=(3, 2048)).astype(np.float32)
    x[0, 5], x[0, 700:900], x[0, 1600:], x[1] = np.inf, 95, -np.inf, -np.inf
    function, _, _ = trace(f, [jax.ShapeDtypeStruct(x.shape, x.dtype)], -1, "f")
    assert len(function.core.stages) == 1
    (y,) = emulated.run(planned(function, "block"), [x], plan.outputs(function))
    np.testing.assert_allclose(y, f(x), rtol=1e-5, atol=1e-6)


@needs_compiler
@plans.needs_runtime
@pytest.mark.parametrize("width", [2, 5, 13])
def test_streaming_reads_the_edges_of_rows_without_a_whole_pack(width):
    f = lambda x: x - jnp.sum(x, -1, keepdims=True)
    x = np.random.default_rng(0).normal(size=(3, width)).astype(np.float32)
    function, _, _ = trace(f, [jax.ShapeDtypeStruct(x.shape, x.dtype)], -1, "f")
    check(planned(function, "streaming"), function, [x], "float32")


@needs_compiler
@plans.needs_runtime
def test_integers_are_clamped_to_the_range_of_an_8_bit_float():
    x = np.arange(-900, 900, 20, np.int32).reshape(2, -1)
    f = lambda x: jax.lax.clamp(np.int32(-448), x, np.int32(448)).astype(jnp.float8_e4m3fn)
    function, _, _ = trace(f, [jax.ShapeDtypeStruct(x.shape, x.dtype)], -1, "f")
    (y,) = emulated.run(planned(function), [x], plan.outputs(function))
    np.testing.assert_array_equal(y.astype(np.float32), np.asarray(f(x), np.float32))


def test_partial_results_have_room_for_their_padding():
    with compat.enable_x64(True):
        shapes = [jax.ShapeDtypeStruct((4, 64), d) for d in ("float32", "float64")]
        f = lambda x, y: (jnp.sum(x, -1), jnp.sum(y, -1), jnp.max(x, -1))
        function, _, _ = trace(f, shapes, -1, "f")
        assert function.core.partial_bytes == [24]


@pytest.mark.parametrize("jumps, divides", [(lambda e, z: e > 0.1, False), (lambda e, z: e / z > 0.1, True)])
def test_only_what_a_comparison_depends_on_is_precise(jumps, divides):
    """In 16 bits: a value that is compared is computed with the accuracy of float32, and what follows it is not."""

    def f(x):
        e = jnp.exp(x)
        z = jnp.sum(e, -1, keepdims=True)
        return jnp.where(jumps(e, z), e, 0) / z

    function, _, _ = trace(f, [jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)], -1, "f")
    code = planned(function).launches[0].source
    assert "lax::exp" in code and "coarse::exp" not in code and ("lax::quotient" in code) == divides


def test_rows_of_16_bits_beside_numbers_of_32_are_divided_coarsely():
    """What is stored of a row in float32 is computed from exponentials as accurate as that, and rows of 16 bits are not."""

    def f(x):
        e = jnp.exp(x.astype(jnp.float32))
        z = jnp.sum(e, -1, keepdims=True)
        return (e / z).astype(x.dtype), z

    function, _, _ = trace(f, [jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)], -1, "f")
    code = planned(function).launches[0].source
    assert "lax::exp" in code and "coarse::exp" not in code and "lax::quotient" not in code


def test_exponentials_relative_to_the_largest_of_a_row():
    """In sums of float32 beside rows of 16 bits two instructions are enough, unless they are compared; not for rows of 32 bits."""

    def f(x, dtype, jumps=False):
        q = jnp.max(x, -1, keepdims=True).astype(jnp.float32)
        e = jnp.exp(x.astype(jnp.float32) - q)
        z = jnp.sum(e, -1, keepdims=True)
        e = jnp.where(e > 0.1, e, 0) if jumps else e
        return (e / z).astype(dtype), z

    x = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)
    code = lambda *args: planned(trace(lambda x: f(x, *args), [x], -1, "f")[0]).launches[0].source
    near = code(jnp.bfloat16)
    assert (
        "lax::exp_below" in near and "lax::exp(" not in near and "scale_of_divisor" not in near
    )  # the sum has a 1 in it
    for args in ((jnp.float32,), (jnp.bfloat16, True)):
        other = code(*args)
        assert "lax::exp(" in other and "exp_below" not in other and "scale_of_divisor" in other


def test_places_are_compared_within_a_pack():
    def f(x):
        row, column = (lax.broadcasted_iota(jnp.int32, x.shape, d) for d in (0, 1))
        return jnp.where(row >= column + 3, x, 0)

    function, _, _ = trace(f, [jax.ShapeDtypeStruct((8, 64), jnp.float32)], -1, "f")
    code = planned(function).launches[0].source
    assert re.search(r"Result\(\)\([^)]*\bfirst\b", code) and "int32_t at, int32_t first)" in code


@plans.needs_nvrtc
@pytest.mark.parametrize("capability", (80, 90, 120))
def test_kernels_compile(capability):
    name, shape, dtype, gradient = {
        80: ("residual", (64, 128), "bfloat16", True),
        90: ("loss", (64, 5001), "float32", True),
        120: ("totals", (64, 33), "float64", False),
    }[capability]
    with compat.enable_x64(dtype == "float64"):
        found = planned(traced(name, shape, dtype, gradient)[0])
    for step in {step.name: step for step in found.launches}.values():
        assert registry.kernels.module.compile(step.header, step.name, capability, step.source)


@pytest.mark.parametrize("on", plans.DEVICES)
def test_any_shape_has_a_plan_within_the_limits_of_the_device(on):
    for shape in ((1, 2), (3, 128), (1 << 20, 64), (100_000, 777), (4096, 16384), (7, 1 << 20), (1, 1 << 24)):
        found = planned(traced_shape("soft_cap", shape, "bfloat16"), on=on)
        plans.check_limits(found, on)
        norm = planned(traced_shape("rms_norm", shape, "float32", gradient=True), on=on)
        plans.check_limits(norm, on)


@pytest.mark.parametrize(
    "problem, on_h200, on_a100",
    [
        (layout.Problem(10**6, 64), "lanes", "lanes"),
        (layout.Problem(10**5, 1024), "warp", "warp"),
        (layout.Problem(10**4, 8192, bytes=8, sums=4), "block", "block"),
        (layout.Problem(8192, 16384, bytes=2, pack=8, kept=1), "cluster", "block"),
        (layout.Problem(2048, 65536, bytes=8, sums=4), "cluster", "split"),
        (layout.Problem(4096, 1 << 20), "streaming", "streaming"),
        (layout.Problem(16, 1 << 20), "split", "split"),
        (layout.Problem(64, 1 << 20, inner=64), "split", "split"),
        (layout.Problem(1 << 16, 1024, inner=1024), "strided", "strided"),
    ],
)
def test_which_algorithm(problem, on_h200, on_a100):
    assert layout.choose(problem, device.H200) == on_h200 and layout.choose(problem, device.A100) == on_a100


@pytest.mark.parametrize("parts", [2, 17, 32, 33, 320])
def test_blocks_that_join_parts(parts):
    """They have the most threads whose partial results fit in shared memory, and at least a warp."""
    sizes = [
        layout.joining(parts, layout.Problem(1 << 10, 1 << 16, inner=64, partial=n), 48 << 10) for n in (8, 176, 1200)
    ]
    assert sizes == sorted(sizes, reverse=True)
    for (rows, threads), partial in zip(sizes, (8, 176, 1200)):
        assert threads % 32 == threads % rows == 0 and 32 <= threads <= 512
        assert (rows * partial + 16) * (threads // 32 + 1) <= 48 << 10


def test_packs_of_transposed_operands_start_where_rows_do():
    """Rows of 77 elements are read in aligned packs only if each array has them in the order of the results."""
    x, y = jax.ShapeDtypeStruct((5, 3, 77), jnp.float32), jax.ShapeDtypeStruct((3, 5, 77), jnp.float32)
    ragged = lambda f, *types: "kRagged" in planned(trace(f, types, -1, "f")[0]).launches[0].name
    assert ragged(lambda x: x * 2, x) and not ragged(lambda x, y: x + jnp.swapaxes(y, 0, 1), x, y)


@pytest.mark.parametrize(
    "name, width, dtype, gradient, pack, packs, blocks",
    [
        ("rms_norm", 777, "bfloat16", False, 8, 6, 6),
        ("rms_norm", 1001, "bfloat16", False, 8, 8, 5),  # the fewest registers without spills
        ("rms_norm", 2001, "bfloat16", False, 8, 8, 6),  # lanes of a warp move columns alike
        ("rms_norm", 1001, "bfloat16", True, 1, 16, 8),
        ("rms_norm", 4097, "float16", True, 1, 17, 2),
        ("rms_norm", 6001, "bfloat16", True, 1, 24, 2),
        ("rms_norm", 8191, "bfloat16", True, 8, 4, 2),
        ("layer_norm", 8191, "bfloat16", True, 1, 16, 1),
        ("rms_norm", 4100, "float16", True, 4, 5, 2),
        ("rms_norm", 12345, "bfloat16", True, 8, 3, 1),
        ("rms_norm", 12348, "bfloat16", True, 4, 7, 1),
    ],
)
def test_packs_and_registers_of_odd_rows_with_columns(name, width, dtype, gradient, pack, packs, blocks):
    kernel = planned(traced_shape(name, (4096, width), dtype, gradient)).launches[0].name
    found = [int(n) for n in kernel.split(", ")[1:6]]
    assert [found[0], found[2], found[4]] == [pack, packs, blocks]


@needs_compiler
@plans.needs_runtime
def test_threads_read_and_write_transposed_rows_element_by_element():
    """The block copies the rows that are adjacent in memory; its threads read and write the transposed ones."""
    f = lambda x, y: (jax.nn.softmax(x + jnp.swapaxes(y, 0, 1), -1), jnp.swapaxes(x * 2, 0, 1), x < 0.5)
    args = operands("x", (5, 31, 7), "bfloat16") + operands("x", (31, 5, 7), "bfloat16")
    function, _, _ = trace(f, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args], -1, "f")
    found = planned(function)
    assert found.algorithm == "thread"
    check(found, function, args, "bfloat16")


@pytest.mark.parametrize(
    "width, of_bias, algorithm", [(49, (5, 9), "thread"), (49, (9,), "lanes"), (7, (9,), "thread")]
)
def test_rows_that_broadcast_are_read_side_by_side(width, of_bias, algorithm):
    """A thread reads rows element by element that do not lie side by side in the order of the others, unless they are very short."""
    types = [jax.ShapeDtypeStruct((*shape, width), jnp.bfloat16) for shape in ((5, 9), of_bias)]
    assert planned(trace(lambda x, bias: jax.nn.softmax(x + bias, -1), types, -1, "f")[0]).algorithm == algorithm


@needs_compiler
@plans.needs_runtime
def test_threads_store_an_odd_number_of_8_bit_floats():
    x = operands("x", (70, 33), "float32")
    f = lambda x: jnp.clip(x / jnp.max(jnp.abs(x), -1, keepdims=True) * 448, -448, 448).astype(jnp.float8_e4m3fn)
    function, _, _ = trace(f, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in x], -1, "f")
    (y,) = emulated.run(planned(function, "thread"), x, plan.outputs(function))
    np.testing.assert_array_equal(y.astype(np.float32), np.asarray(f(jnp.asarray(x[0])), np.float32))


def traced_shape(name, shape, dtype, gradient=False):
    f, kinds, _ = FUNCTIONS[name]
    avals = [jax.ShapeDtypeStruct({"x": shape, "c": shape[-1:]}[k], dtype) for k in kinds]
    function, _, _ = trace(lambda *xs: f(*xs), avals, -1, name)
    if gradient:
        function = function.vjp(range(len(kinds)))
        function = function.select(function.used())
    return function


@pytest.mark.parametrize(
    "name, width, gradient, rows",
    [("rms_norm", 512, True, (5000, 20000, 1 << 20)), ("soft_cap", 1 << 21, False, (2, 9, 99))],
)
def test_one_kernel_serves_any_number_of_rows(name, width, gradient, rows):
    names = {
        tuple((s.name, s.source) for s in planned(traced_shape(name, (n, width), "bfloat16", gradient)).launches)
        for n in rows
    }
    assert len(names) == 1


@plans.needs_nvrtc
@pytest.mark.parametrize(
    "shape, row, sums, kernel",
    [((4096, 256), -1, 14, ""), ((64, 512, 256), -2, 14, ""), ((5, 65536, 64), -2, 44, "Join")],
)
def test_kernels_with_many_reductions_have_room_for_them(shape, row, sums, kernel):
    """Fewer threads share a row where what they reduced would not fit the shared memory of a block."""
    f = lambda x: x * sum(jnp.sum(jnp.abs(x - k), row, keepdims=True) for k in range(1, sums + 1))
    function, _, _ = trace(f, [jax.ShapeDtypeStruct(shape, "float32")], row, "many")
    found = planned(function)
    for step in {
        step.name: step for step in (*found.launches, *(found.unaligned or ())) if kernel in step.name
    }.values():
        assert registry.kernels.module.compile(step.header, step.name, 90, step.source)
