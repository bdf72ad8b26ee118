"""RMSNorm and LayerNorm on CUDA: their plans, the kernels that they name, and what these do, run on the CPU."""

import functools
import itertools
import math

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plans import DEVICES, check_limits, kernels, needs_nvrtc
from problems import WIDTHS

from jaxkern import tiers
from jaxkern._core import compat, device, functor, registry
from jaxkern._ops.norm import plan, reference

NAMES = ("rms_norm", "layer_norm")
SHAPES = [
    *((3, width) for width in (*WIDTHS, 77, 100, 768, 5001, 5120)),
    *((49152, width) for width in (1, 64, 128, 1024, 4096, 8192, 16384, 32768)),
    (1, 1 << 20),
    (1 << 28, 4),
]
EXTRAS = ("", "scale", "scale bias", "residual scale bias")


def found(
    name, shape, dtype, extras, backward, on=device.H200, out=None, parameters="float32", tier="auto", gradients=True
):
    """The plan of a call, and what the reference is called with: avals of operands and results, and parameters."""
    of = lambda shape, dtype: jax.core.ShapedArray(shape, jnp.dtype(dtype))
    x, y, vector = of(shape, dtype), of(shape, out or dtype), of(shape[-1:], parameters)
    params = dict(operation=name, eps=1e-6, algorithm=tier)
    if not backward:
        operands = [x, *(x if e == "residual" else vector for e in extras.split())]
        results = [y, *[x] * ("residual" in extras)]
        params |= dict(extras=extras, dtype=y.dtype)
        return plan.norm(on, operands, results, **params), operands, results, params
    names = [e for e in extras.split() if e != "bias"]
    operands = [x, y, *(x if e == "residual" else vector for e in names)]
    sums = tuple(vector.dtype if gradients and k in extras else None for k in ("scale", "bias"))
    results = [x, *(vector for d in sums if d is not None)]
    params |= dict(extras=" ".join(names), sums=sums)
    return plan.norm_grad(on, operands, results, **params), operands, results, params


def numbers(step):
    """The integers among a kernel's template arguments, behind the Norm."""
    return [int(n) for n in step.name.split(">, ")[-1].rstrip(">").split(", ") if n.lstrip("-").isdigit()]


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("dtype", plan.DTYPES)
def test_every_problem_has_a_plan(dtype, on):
    with compat.enable_x64():
        for name, shape, extras, backward in itertools.product(NAMES, SHAPES, EXTRAS, (False, True)):
            chosen, operands, results, _ = found(name, shape, dtype, extras, backward, on)
            kinds = dict(scale="scale" in extras, bias="bias" in extras, residual="residual" in extras)
            more = dict(backward=backward, scale_sum=backward and "scale" in extras)
            problem = (name, *shape, 1, dtype, dtype)
            if chosen is not None:
                check_limits(chosen, on)
                check_coverage(chosen, shape, dtype, extras, backward, on)
            elif tiers.choose(*problem, device=on, **kinds, **more) != "streaming":
                assert shape[1] % 8 and shape[1] > 1024 and not (backward and name == "layer_norm")
            for algorithm in plan.ALGORITHMS:
                if tiers.fits(name, algorithm, *problem[1:], device=on, **kinds, **more):
                    other, *_ = found(name, shape, dtype, extras, backward, on, tier=algorithm)
                    assert other is None or other.algorithm == algorithm
                    if other is not None:
                        check_limits(other, on)
                        check_coverage(other, shape, dtype, extras, backward, on)
                else:
                    assert chosen is None or chosen.algorithm != algorithm
                    with pytest.raises(ValueError, match=f"{name}: the algorithm '{algorithm}' cannot run"):
                        found(name, shape, dtype, extras, backward, on, tier=algorithm)


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
    choose = functools.partial(tiers.choose, device=device.H200)
    widths = (128, 512, 1001, 4096, 65536, 65544, 1 << 19, 1 << 20, 65541)
    expected = ["warp"] * 2 + ["block"] * 3 + ["cluster"] * 2 + ["streaming"] * 2
    assert [choose("rms_norm", 8192, n, dtype="bfloat16") for n in widths] == expected
    assert choose("rms_norm", 8192, 65536, dtype="bfloat16", backward=True) == "cluster"
    assert tiers.choose("rms_norm", 8192, 65544, dtype="bfloat16", device=DEVICES[1]) == "streaming"
    assert choose("layer_norm", 8192, 8192, backward=True, scale_sum=True, bias=True) == "block"
    assert "rms_norm" in tiers.operations() and tiers.algorithms("layer_norm") == plan.ALGORITHMS


def test_long_rows_are_left_to_xla():
    """XLA has 16-bit rows that are not whole vectors (but not the gradient of layer_norm), and rows too long for registers
    if they are few or of rms_norm. A forced algorithm runs all of them."""
    of = lambda *args, **options: found(*args, "scale", **options)[0]
    for name, dtype, backward in itertools.product(NAMES, ("bfloat16", "float16", "float32"), (False, True)):
        kernel = dtype == "float32" or (name == "layer_norm" and backward)
        assert (of(name, (4096, 4097), dtype, backward=backward) is not None) == kernel
        assert of(name, (4096, 4097), dtype, backward=backward, tier="block").algorithm == "block"
        for width in (77, 1001, 1024, 4096, 65536, 1 << 20):
            streams = width == 1 << 20  # too long for clusters in both directions and all dtypes
            for rows in (16, 4096):
                left = streams and (name == "rms_norm" or rows == 16)
                assert (of(name, (rows, width), dtype, backward=backward) is None) == left
        assert of(name, (16, 1 << 20), dtype, backward=backward, tier="streaming").algorithm == "streaming"


def test_what_kernels_do_not_take():
    """Two dtypes of parameters, and some of the arrays in float64, are left to XLA."""
    with compat.enable_x64():
        assert found("rms_norm", (4, 8), "float32", "scale", False, parameters="float64")[0] is None
        assert found("rms_norm", (4, 8), "float32", "scale", False, out="float64")[0] is None
        assert found("rms_norm", (4, 8), "float64", "scale", True, parameters="float32")[0] is not None
        assert found("rms_norm", (4, 8), "float8_e4m3fn", "scale", False)[0] is None


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
    """On a device of two multiprocessors, so that blocks walk over rows; once more at any address for one of them."""
    rng, on = np.random.default_rng(0), device.H200._replace(sm_count=2)
    for backward, unaligned in ((False, False), (True, False), *([(False, True), (True, True)] * (shape[1] == 76))):
        tier = {1025: "block", 1030: "block", 16500: "streaming" if backward else "auto"}.get(shape[1], "auto")
        chosen, operands, results, params = found(
            name, shape, dtype, extras, backward, on, out=out, parameters=parameters, tier=tier
        )
        given = [jnp.asarray(rng.normal(0.3, 1, a.shape), a.dtype) for a in operands]
        wanted = (reference.norm_grad if backward else reference.norm)(*given, **params)
        ours = emulated.run(chosen, list(map(np.asarray, given)), [(a.shape, a.dtype) for a in results], unaligned)
        for a, b in zip(ours, wanted, strict=True):
            assert a.dtype == b.dtype
            terms = math.sqrt(shape[0]) if a.ndim == 1 else 1
            a, b = a.astype(np.float64), np.asarray(b, np.float64)
            np.testing.assert_allclose(a, b, float(jnp.finfo(ours[0].dtype).eps), 1e-5 * terms)


@pytest.mark.skipif(not emulated.has_fused(), reason="no fused multiply-adds")
@pytest.mark.parametrize(
    ("width", "dtype", "unaligned"),
    [(1, "float32", False), (1, "float64", False), (1, "float32", True), (2, "float32", False)],
)
def test_short_rows_where_products_are_fused(width, dtype, unaligned):
    """A row of one element has deviation 0 and rstd 1000, and nothing may be left of g * scale - mean(g * scale)."""
    rng = np.random.default_rng(0)
    with compat.enable_x64():
        shape = (9 if unaligned else 300, width)
        chosen, operands, results, params = found("layer_norm", shape, dtype, "scale bias", True, parameters=dtype)
        given = [rng.normal(0.5, 1, a.shape).astype(a.dtype) for a in operands]
        dx, dscale, _ = emulated.run(chosen, given, [(a.shape, a.dtype) for a in results], unaligned, fused=True)
        x, g, scale = (a.astype("float64") for a in given)
        exact, *_ = reference.norm_grad(*map(jnp.asarray, (x, g, scale)), **params | {"sums": (None, None)})
    if width == 1:
        assert not dx.any() and not dscale.any()
    # The rounding of g * scale, times rstd.
    unit = np.abs(g * scale).max(-1, keepdims=True) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    assert (np.abs(dx - np.asarray(exact)) / unit).max() < 4 * np.finfo(dtype).eps


def with_epilogue(name, shape, args, dtype="bfloat16", tier="auto"):
    """The plan of a norm with a function of arguments of these (shape, dtype), and what the reference is called with."""
    f = lambda v, *args: jax.nn.silu(v) + sum(args, 0.5)
    function, _ = functor.trace(f, ["float32", *(d for _, d in args)], name=name, results=1)
    of = lambda shape, dtype: jax.core.ShapedArray(shape, jnp.dtype(dtype))
    operands = [of(shape, dtype), of(shape[-1:], "float32"), *(of(*a) for a in args)]
    params = dict(operation=name, extras="scale", eps=1e-6, dtype=jnp.dtype(dtype), algorithm=tier, function=function)
    return plan.norm(device.H200, operands, [operands[0]], **params), operands, params


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
def test_kernels_with_a_function():
    """Arguments per row, along rows, and broadcast over some rows."""
    shape = (3, 7, 40)
    args = [((3, 7, 1), "float32"), ((3, 1, 40), "bfloat16"), ((1, 1, 40), "int32"), ((1, 1, 1), "float32")]
    chosen, operands, params = with_epilogue("layer_norm", shape, args)
    rng = np.random.default_rng(0)
    given = [jnp.asarray(rng.normal(0, 2, a.shape), a.dtype) for a in operands]
    (wanted,) = reference.norm(*given, **params)
    for unaligned in (False, True):
        (found,) = emulated.run(chosen, list(map(np.asarray, given)), [(shape, wanted.dtype)], unaligned)
        found, exact = found.astype(np.float64), np.asarray(wanted, np.float64)
        np.testing.assert_allclose(found, exact, 2**-7, 1e-4)


def test_functions_that_kernels_do_not_take():
    """Arguments of types that are not read as packs, or with more groups of dimensions than a kernel follows."""
    assert with_epilogue("rms_norm", (4, 8), [((4, 8), "int8")])[0] is None
    shape = (2, 2, 2, 2, 2, 2, 2, 2, 2, 3)
    assert with_epilogue("rms_norm", shape, [((2, 1, 2, 1, 2, 1, 2, 1, 2, 3), "float32")])[0] is None
    assert with_epilogue("rms_norm", shape, [(shape, "float32")])[0] is not None


@needs_nvrtc
def test_kernels_with_a_function_compile():
    for shape in ((64, 128), (8, 1 << 20)):
        args = [((1, shape[1]), "bfloat16"), ((1, 1), "float32")]
        chosen, *_ = with_epilogue("layer_norm", shape, args, tier="auto" if shape[1] == 128 else "streaming")
        for step in chosen.launches:
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
            tier = {4097: "block", 1 << 20: "streaming"}.get(shape[1], "auto")
            chosen, *_ = found(name, shape, dtype, extras, backward, parameters=parameters, tier=tier)
            for header, kernel in sorted(kernels(chosen, unaligned=capability == 90)):
                assert registry.kernels.module.compile(header, kernel, capability)
