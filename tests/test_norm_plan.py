"""RMSNorm and LayerNorm on CUDA: their plans, the kernels that they name, and what these do, run on the CPU."""

import functools
import itertools
import math

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plans import DEVICES, check_limits, compile_kernels, kernels, needs_nvrtc
from problems import WIDTHS

import jaxkern
from jaxkern import algorithms
from jaxkern._core import compat, device, functor, launch, registry
from jaxkern._core.jaxprs import inner_jaxprs
from jaxkern._definitions.traced import traced
from jaxkern._engines.rows import plan as rows_plan
from jaxkern._ops.norm import plan

NAMES = ("rms_norm", "layer_norm")
SHAPES = [
    *((3, width) for width in (*WIDTHS, 77, 100, 768, 5001, 5120)),
    *((49152, width) for width in (1, 64, 128, 1024, 4096, 8192, 16384, 32768)),
    (1, 1 << 20),
    (1 << 28, 4),
]
EXTRAS = ("", "scale", "scale bias", "residual scale bias")


def problem(name, shape, dtype, extras, backward, out=None):
    kinds = dict(
        centre=name == "layer_norm", scale="scale" in extras, bias="bias" in extras, residual="residual" in extras
    )
    return plan.Problem(
        *shape, 1, dtype, out or dtype, **kinds, backward=backward, scale_sum=backward and "scale" in extras
    )


def found(name, shape, dtype, extras, backward, on=device.H200, out=None, parameters="float32", algorithm="auto"):
    """The plan of a hand-written kernel; gradients of all operands if backward."""
    p = problem(name, shape, dtype, extras, backward, out)
    vectors = [parameters for e in extras.split() if e != "residual"]
    gradients = [(k + 1, d) for k, d in enumerate(vectors)] if backward else []
    arrays = [launch.operand(k) for k in range(5)] + [launch.result(0), launch.result(3)]
    return plan.written_plan(p, on, name, vectors[: 1 if backward else None], gradients, arrays, 1e-6, algorithm)


def row_function(
    name, shape, dtype, extras, backward, out=None, parameters="float32", algorithm="auto", f=None, args=()
):
    """The RowFunction of a norm, or of its gradients. f: before the store, a function of an element and of `args`."""
    wide = ["float32", *(d for _, d in args)]
    f = None if f is None else functor.trace(f, wide, name=name, results=1)[0]
    names = ["x", *extras.split()]
    if backward and "residual" in names:  # derivatives start from the sum
        names.remove("residual")
    types = [
        (shape if k in ("x", "residual") else shape[-1:], dtype if k in ("x", "residual") else parameters)
        for k in names
    ]
    types = tuple((s, jnp.dtype(d)) for s, d in (*types, *args))
    more = dict(numbers=(("eps", 1e-6),), dtype=jnp.dtype(out or dtype), function=f, algorithm=algorithm)
    own = getattr(jaxkern, name).operation
    function = traced(own, tuple(names), types, keeps_x=backward and "residual" in extras, **more)
    if not backward:
        return function
    tangents = function.jvp(range(len(names)))
    gradient = tangents.transpose(range(len(names), 2 * len(names)))
    return gradient.select(gradient.used())


def row_plan(function, on=device.H200):
    outputs = [jax.ShapeDtypeStruct(*o) for o in rows_plan.outputs(function)]
    return rows_plan.plan(on, function.avals, outputs, function=function)


def numbers(step):
    """The integers among a kernel's template arguments, after the Norm."""
    return [int(n) for n in step.name.split(">, ")[-1].rstrip(">").split(", ") if n.lstrip("-").isdigit()]


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("dtype", plan.DTYPES)
def test_every_problem_has_a_plan(dtype, on):
    with compat.enable_x64():
        for name, shape, extras, backward in itertools.product(NAMES, SHAPES, EXTRAS, (False, True)):
            chosen = found(name, shape, dtype, extras, backward, on)
            p = problem(name, shape, dtype, extras, backward)
            if chosen is not None:
                check_limits(chosen, on)
                check_coverage(chosen, shape, dtype, extras, backward, on)
            elif plan.written(p, on) != "streaming":
                assert shape[1] % 8 and shape[1] > 1024 and not (backward and name == "layer_norm")
            for algorithm in plan.ALGORITHMS[1:]:
                if plan.fits(algorithm, p, on):
                    other = found(name, shape, dtype, extras, backward, on, algorithm=algorithm)
                    assert other is None or other.algorithm == algorithm
                    if other is not None:
                        check_limits(other, on)
                        check_coverage(other, shape, dtype, extras, backward, on)
                else:
                    assert chosen is None or chosen.algorithm != algorithm
                    with pytest.raises(ValueError, match=f"{name}: the algorithm '{algorithm}' cannot run"):
                        found(name, shape, dtype, extras, backward, on, algorithm=algorithm)


def check_coverage(chosen, shape, dtype, extras, backward, on):
    """Threads hold the packs of a row, blocks all rows, and shared memory and scratch what they write."""
    rows, width = shape
    step = chosen.launches[0]
    if chosen.algorithm == "streaming":
        assert step.name.startswith("NormRowStats" if backward else "NormStream")
        return
    pack, lanes, packs, *rest = numbers(step)
    threads, cluster = step.block3()[0], max(-lanes, 1)
    assert step.cluster == cluster and (cluster > 1) == (chosen.algorithm == "cluster")
    lanes = max(lanes, 0)
    group = lanes or threads * cluster
    assert width % pack == 0 and packs * group * pack >= width and (threads % 32 == 0) and 32 % (lanes or 32) == 0
    assert ("true" in step.name.split(">")[-2]) == (packs * group * pack == width)
    itemsize = jnp.dtype(dtype).itemsize
    assert pack * itemsize <= 16
    if not backward:
        each, declared = rest
        assert declared == threads and step.grid3()[0] * threads // group * each >= rows
        return
    declared, stages, resident = rest
    inputs = 2 + ("residual" in extras)
    assert declared == threads and stages >= 2
    assert step.shared * cluster >= stages * inputs * itemsize * (threads // group or 1) * width
    compute = 8 if dtype == "float64" else 4
    if threads > group:
        assert step.shared >= threads // group * width * compute
    assert resident * step.shared <= max(on.shared_memory, step.shared)
    assert step.grid3()[0] <= resident * on.sm_count
    sums = chosen.launches[1:]
    if sums:
        assert chosen.scratch >= sums[0].grid3()[1] * step.grid3()[0] // cluster * width * compute


def test_algorithms():
    choose = functools.partial(algorithms.choose, device=device.H200)
    widths = (128, 512, 1001, 4096, 65536, 65544, 1 << 19, 1 << 20, 65541)
    expected = ["warp"] * 2 + ["generated"] + ["block"] * 2 + ["cluster"] * 2 + ["streaming", "generated"]
    assert [choose("rms_norm", 8192, n, dtype="bfloat16") for n in widths] == expected
    assert choose("rms_norm", 8192, 65536, dtype="bfloat16", backward=True) == "cluster"
    assert algorithms.choose("rms_norm", 8192, 65544, dtype="bfloat16", device=DEVICES[1]) == "streaming"
    assert choose("layer_norm", 8192, 8192, backward=True, scale_sum=True, bias=True) == "block"
    assert "rms_norm" in algorithms.operations() and algorithms.names("layer_norm") == plan.ALGORITHMS


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "extras", "forward", "backward"),
    [
        ("rms_norm", (4096, 128), "bfloat16", "scale", "warp", "warp"),
        ("rms_norm", (4096, 128), "float32", "scale", "warp", "lanes"),
        ("rms_norm", (4096, 4096), "float32", "scale", "block", "block"),
        ("layer_norm", (4096, 4096), "bfloat16", "scale bias", "block", "block"),
        ("layer_norm", (4096, 1001), "float32", "scale bias", "block", "block"),
        ("layer_norm", (4096, 64), "float16", "residual scale bias", "warp", "warp"),
        ("rms_norm", (4096, 4097), "bfloat16", "scale", "block", "block"),
        ("layer_norm", (4096, 65536), "bfloat16", "scale", "block", "cluster"),
        ("layer_norm", (4096, 4100), "float16", "scale bias", None, "block"),
        ("layer_norm", (4096, 1001), "float16", "scale bias", "lanes", "block"),
        ("rms_norm", (4096, 4097), "bfloat16", "residual scale", "block", "block"),
        ("layer_norm", (4096, 12345), "bfloat16", "scale bias", "block", "cluster"),
        ("rms_norm", (4096, 33), "bfloat16", "scale", "thread", "thread"),
        ("layer_norm", (4096, 7), "float32", "residual scale bias", "thread", "thread"),
        ("layer_norm", (4096, 44), "bfloat16", "scale bias", "thread", "warp"),
        ("layer_norm", (4096, 4098), "bfloat16", "residual scale bias", "block", "block"),
        ("rms_norm", (4096, 65537), "bfloat16", "scale", "cluster", "cluster"),
    ],
)
def test_generated_or_by_hand(name, shape, dtype, extras, forward, backward):
    """The plan of a row function runs the faster kernel, and every chosen algorithm has a plan; None: XLA is faster."""
    for back, algorithm in ((False, forward), (True, backward)):
        chosen = row_plan(row_function(name, shape, dtype, extras, back))
        assert (chosen and chosen.algorithm) == algorithm
        kinds = dict(bias="bias" in extras, residual="residual" in extras, backward=back, scale_sum=back)
        own = algorithms.choose(name, *shape, dtype=dtype, device=device.H200, **kinds) != "generated"
        assert chosen is None or (chosen.launches[0].header.startswith("rows/")) != own


def test_row_functions_that_are_not_written_by_hand():
    """Forward derivatives, gradients of the scale alone, parameters of two types or of one element: generated kernels."""
    f = row_function("layer_norm", (64, 256), "bfloat16", "scale bias", False)
    generated = lambda f: row_plan(f).launches[0].header == "rows/rows.cuh"
    assert not generated(f) and not generated(f.batched((True, False, False), 3))
    assert generated(f.jvp((0, 1, 2))) and generated(f.jvp((1,)).transpose((3,)))
    types = (((64, 256), "bfloat16"), ((256,), "float16"), ((1,), "float32"))
    own = jaxkern.layer_norm.operation
    more = dict(numbers=(("eps", 1e-6),), dtype=jnp.dtype("bfloat16"), function=None, algorithm="auto")
    types = tuple((s, jnp.dtype(d)) for s, d in types)
    assert generated(traced(own, ("x", "scale", "bias"), types, **more))
    assert generated(row_function("layer_norm", (64, 256), "bfloat16", "scale", False, algorithm="generated"))
    with pytest.raises(ValueError, match="layer_norm: the algorithm 'warp' cannot run"):
        row_plan(row_function("layer_norm", (64, 8192), "bfloat16", "scale", False, algorithm="warp"))


def test_long_rows_are_left_to_xla():
    """XLA has 16-bit rows that are not whole vectors (but not the gradient of layer_norm), and rows too long for registers
    if they are few or of rms_norm. A forced algorithm runs all of them."""
    of = lambda *args, **options: found(*args, "scale", **options)
    for name, dtype, backward in itertools.product(NAMES, ("bfloat16", "float16", "float32"), (False, True)):
        kernel = dtype == "float32" or (name == "layer_norm" and backward)
        assert (of(name, (4096, 4097), dtype, backward=backward) is not None) == kernel
        assert of(name, (4096, 4097), dtype, backward=backward, algorithm="block").algorithm == "block"
        for width in (77, 1001, 1024, 4096, 65536, 1 << 20):
            streams = width == 1 << 20  # too long for clusters in both directions and all dtypes
            for rows in (16, 4096):
                left = streams and (name == "rms_norm" or rows == 16)
                assert (of(name, (rows, width), dtype, backward=backward) is None) == left
        assert of(name, (16, 1 << 20), dtype, backward=backward, algorithm="streaming").algorithm == "streaming"


def test_what_kernels_do_not_take():
    """Two dtypes of parameters, and some of the arrays in float64, are left to XLA."""
    with compat.enable_x64():
        assert found("rms_norm", (4, 8), "float32", "scale", False, parameters="float64") is None
        assert found("rms_norm", (4, 8), "float32", "scale", False, out="float64") is None
        assert found("rms_norm", (4, 8), "float64", "scale", True, parameters="float32") is not None
        assert found("rms_norm", (4, 8), "float8_e4m3fn", "scale", False) is None


# ---- what the kernels do


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("name", "shape", "dtype", "out", "parameters", "extras"),
    [
        ("layer_norm", (37, 64), "bfloat16", "float32", "float32", "scale bias"),  # several rows per warp
        ("rms_norm", (70, 7), "bfloat16", None, "bfloat16", "residual scale"),  # odd, two bytes at a time
        ("layer_norm", (4, 1025), "float16", None, "float32", "residual scale bias"),  # and a block per row
        ("layer_norm", (9, 76), "float32", "bfloat16", "float32", "residual scale bias"),
        ("layer_norm", (30, 1030), "float16", None, "float32", "scale bias"),  # a block per row
        ("layer_norm", (2, 16500), "float32", None, "float32", "residual scale bias"),  # of more than 512 threads
    ],
)
def test_kernels(name, shape, dtype, out, parameters, extras):
    """The device has two multiprocessors, so that blocks walk over rows; one of the kernels runs once more at any address."""
    rng, on = np.random.default_rng(0), device.H200._replace(sm_count=2)
    for backward, unaligned in ((False, False), (True, False), *([(False, True), (True, True)] * (shape[1] == 76))):
        algorithm = {64: "warp", 1025: "block", 1030: "block", 16500: "streaming" if backward else "auto"}.get(
            shape[1], "auto"
        )
        f = row_function(name, shape, dtype, extras, backward, out=out, parameters=parameters, algorithm=algorithm)
        chosen = row_plan(f, on)
        given = [jnp.asarray(rng.normal(0.3, 1, a.shape), a.dtype) for a in f.avals]
        outputs = emulated.run(chosen, list(map(np.asarray, given)), rows_plan.outputs(f), unaligned)
        ours, wanted = jax.jit(lambda given, outputs: (f.after_core(given, outputs), f(*given)))(given, outputs)
        for a, b in zip(ours, wanted, strict=True):
            assert a.dtype == b.dtype
            terms = math.sqrt(shape[0]) if a.ndim == 1 else 1
            eps = float(jnp.finfo(a.dtype).eps)
            np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), eps, 1e-5 * terms)


@pytest.mark.skipif(not emulated.has_fused(), reason="no fused multiply-adds")
def test_short_rows_where_products_are_fused():
    """The variance may be near 0, so that what is left of g * scale - mean(g * scale) is multiplied by up to 1000."""
    rng = np.random.default_rng(0)
    f = row_function("layer_norm", (300, 2), "float32", "scale bias", True, algorithm="warp")
    given = [rng.normal(0.5, 1, a.shape).astype(a.dtype) for a in f.avals]
    dx, _, _ = emulated.run(row_plan(f), given, [(a.shape, a.dtype) for a in f.results], fused=True)
    with compat.enable_x64():
        x, scale, g = (a.astype("float64") for a in given)
        exact = row_function("layer_norm", (300, 2), "float64", "scale bias", True, parameters="float64")(x, scale, g)[
            0
        ]
    # The rounding of g * scale, times rstd.
    unit = np.abs(g * scale).max(-1, keepdims=True) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    assert (np.abs(dx - np.asarray(exact)) / unit).max() < 4 * np.finfo("float32").eps


def with_epilogue(name, shape, args, dtype="bfloat16", algorithm="warp"):
    """The RowFunction of a norm with a function of arguments of these (shape, dtype)."""
    f = lambda v, *args: jax.nn.silu(v) + sum(args, 0.5)
    return row_function(name, shape, dtype, "scale", False, algorithm=algorithm, f=f, args=args)


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("whole", [True, False])
def test_kernels_with_a_function(whole):
    """Arguments per row, along rows, and broadcast over some rows; not whole: of fewer dimensions, as `vmap` leaves them."""
    shape = (3, 7, 40)
    args = [((3, 7, 1), "float32"), ((3, 1, 40), "bfloat16"), ((1, 1, 40), "int32"), ((1, 1, 1), "float32")]
    args = args if whole else [((7, 1), "float32"), ((3, 1, 40), "bfloat16"), ((40,), "int32"), ((), "float32")]
    f = with_epilogue("layer_norm", shape, args)
    rng = np.random.default_rng(0)
    given = [jnp.asarray(rng.normal(0, 2, a.shape), a.dtype) for a in f.avals]
    (wanted,) = f(*given)
    chosen = row_plan(f)
    emulated.prepare(chosen)
    for unaligned in (False, True):
        (found,) = emulated.run(chosen, list(map(np.asarray, given)), [(shape, wanted.dtype)], unaligned)
        found, exact = found.astype(np.float64), np.asarray(wanted, np.float64)
        np.testing.assert_allclose(found, exact, 2**-7, 1e-4)


def test_functions_that_these_kernels_do_not_take():
    """Arguments of types that are not read as packs, or with more groups of dimensions than a kernel follows."""
    chosen = lambda *args: row_plan(with_epilogue("rms_norm", *args)).algorithm
    assert chosen((4, 8), [((4, 8), "int8")]) == "lanes"
    shape = (2, 2, 2, 2, 2, 2, 2, 2, 2, 3)
    assert row_plan(with_epilogue("rms_norm", shape, [((2, 1, 2, 1, 2, 1, 2, 1, 2, 3), "float32")])) is None
    assert chosen(shape, [(shape, "float32")]) == "warp"


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_behind_the_rows(name):
    """These kernels read rows of adjacent elements: not where vmap has put a batch behind them, of one length or another."""
    norm = functools.partial(getattr(jaxkern, name), eps=1e-6)
    loss = lambda x: jnp.sum(jnp.sin(norm(x)))
    by_hand = lambda function: plan.by_hand(
        device.H200, function.avals, [jax.ShapeDtypeStruct(*o) for o in rows_plan.outputs(function)], function
    )
    for f in (norm, jax.grad(loss)):
        for shape in ((4, 5, 3), (4, 5, 5)):
            calls = {at: functions(jax.make_jaxpr(jax.vmap(f, at))(jnp.ones(shape)).jaxpr) for at in (0, 2)}
            with algorithms.force(**{name: "warp"}):
                assert calls[0] and all(by_hand(function) != rows_plan.GENERATED for function in calls[0])
                assert calls[2] and all(by_hand(function) == rows_plan.GENERATED for function in calls[2])


def functions(jaxpr) -> list:
    """The row functions of the calls in a jaxpr."""
    found = [e.params["function"] for e in jaxpr.eqns if e.primitive.name.startswith("jaxkern")]
    return found + [x for e in jaxpr.eqns for inner in inner_jaxprs(e) for x in functions(inner)]


@needs_nvrtc
def test_kernels_with_a_function_compile():
    for shape in ((64, 128), (8, 1 << 20)):
        args = [((1, shape[1]), "bfloat16"), ((1, 1), "float32")]
        for step in row_plan(
            with_epilogue("layer_norm", shape, args, algorithm="warp" if shape[1] == 128 else "streaming")
        ).launches:
            assert registry.kernels.module.compile(step.header, step.name, 90, step.source)


@needs_nvrtc
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_kernels_compile(capability):
    """One of each kind for each capability."""
    with compat.enable_x64():
        calls = [
            ("rms_norm", (4096, 128), "bfloat16", "scale"),
            ("layer_norm", (4096, 4097), "float16", "residual scale bias"),  # forward: of a forced algorithm
            ("layer_norm", (4, 1 << 20), "float32", "scale bias"),
            ("layer_norm", (4096, 512), "float64", "scale bias"),
        ]
        name, shape, dtype, extras = calls[[80, 90, 100, 120].index(capability)]
        parameters = "float64" if dtype == "float64" else "float32"
        for backward in (False, True):
            algorithm = {4097: "block", 1 << 20: "streaming"}.get(shape[1], "auto")
            chosen = found(name, shape, dtype, extras, backward, parameters=parameters, algorithm=algorithm)
            compile_kernels(kernels(chosen, unaligned=capability == 90), capability)
