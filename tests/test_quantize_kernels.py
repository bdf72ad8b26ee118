"""Kernels of norms that quantize and of quantised tiles: on the CPU, plans, programs, compiled for GPUs."""

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plans import DEVICES, check_limits, compile_kernels, kernels, needs_nvrtc, needs_runtime
from problems import WIDTHS
from test_quantize import DTYPES, TYPES, plan_of, rows, same
from test_quantize_fused import EPS, NAMES, close, given_scale, normalised, quantized_as

import jaxkern
from jaxkern import Quantization
from jaxkern._core import compat, device, functor, launch, registry
from jaxkern._ops.norm import quantized_plan
from jaxkern._ops.quantize import plan

# ---- the kernels


def norm_plan(name, shape, dtype, extras, to, block=None, given=False, algorithm="auto", on=device.H200, function=None):
    """The plan, avals of operands and results, and parameters."""
    of = lambda shape, dtype: jax.core.ShapedArray(shape, jnp.dtype(dtype))
    operands = [of(shape, dtype), *(of(shape if e == "residual" else shape[-1:], dtype) for e in extras.split())]
    operands = [a if a.ndim > 1 else of(a.shape, "float32") for a in operands]
    operands += [of((shape[0], 1), "float32")] * (function is not None) + [of((), "float32")] * given
    scales = (shape[0],) if block is None else (shape[0], shape[1] // block)
    results = [(shape, np.uint8), (scales, np.float32), *[(shape, jnp.dtype(dtype))] * ("residual" in extras)]
    params = dict(extras=extras, numbers=(("eps", EPS),), to=to, block=block, given=given)
    params |= dict(algorithm=algorithm, function=function)
    return quantized_plan.launches(name, on, operands, None, **params), operands, results, params


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("name", "shape", "dtype", "extras", "to", "block", "given", "unaligned"),
    [
        ("layer_norm", (37, 64), "float32", "scale bias", "int8", None, False, False),  # several rows per warp
        ("rms_norm", (37, 128), "bfloat16", "residual scale", "float8_e4m3fn", 32, False, False),
        ("rms_norm", (9, 1280), "float32", "scale", "float8_e5m2", 128, False, False),  # not whole, a block per row
        ("layer_norm", (7, 1032), "bfloat16", "residual scale bias", "float8_e4m3fn", None, True, False),
        ("layer_norm", (3, 384), "float16", "residual scale bias", "int8", 384 // 2, False, False),  # streaming
        ("rms_norm", (2, 16640), "bfloat16", "scale", "float8_e4m3fn", None, False, False),  # normalised twice
        ("rms_norm", (5, 100), "float32", "scale", "float8_e4m3fn", None, False, True),
        ("rms_norm", (5, 96), "bfloat16", "residual", "float8_e4m3fn", 32, False, True),
    ],
)
def test_norm_kernels(name, shape, dtype, extras, to, block, given, unaligned):
    """Two multiprocessors let blocks walk over rows; the norm's numbers are within rounding of NumPy's."""
    on = device.H200._replace(sm_count=2)
    found, operands, results, _ = norm_plan(name, shape, dtype, extras, to, block, given, on=on)
    check_limits(found, on)
    rng = np.random.default_rng(0)
    arrays = [np.asarray(jnp.asarray(rng.normal(0.3, 1, a.shape), a.dtype)) for a in operands]
    if given:
        arrays[-1] = np.float32(0.02)
    q, scale, *s = emulated.run(found, arrays, results, unaligned)
    named = dict(zip(extras.split(), arrays[1:]))
    total = arrays[0]
    if "residual" in named:
        total = np.asarray(jnp.asarray(arrays[0].astype(np.float32) + named["residual"].astype(np.float32), dtype))
        np.testing.assert_array_equal(s[0], total)
    y = normalised(name, total, named.get("scale"), named.get("bias")).astype(np.float32)
    exact = quantized_as(y, to, block, 0.02 if given else None)
    close((q.view(TYPES[to]), scale.reshape(exact[1].shape)), exact, to, 5e-3)


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("width", [384, 1280])  # a warp and a block of several per row, whose last packs do not exist
def test_special_blocks(width):
    """Blocks with infinity, with NaN, and of zeros, beside others; more rows than fill the last block of threads."""
    found, operands, results, _ = norm_plan("rms_norm", (7, width), "bfloat16", "scale", "int8", 128)
    rng = np.random.default_rng(0)
    arrays = [np.asarray(jnp.asarray(rng.normal(0.3, 1, a.shape), a.dtype)) for a in operands]
    arrays[0] = np.where(np.arange(7)[:, None] == 5, 0, arrays[0]).astype(arrays[0].dtype)
    arrays[1] = np.array(arrays[1])
    arrays[1][[3, 130]] = np.inf, np.nan
    q, scale = emulated.run(found, arrays, results)
    with np.errstate(invalid="ignore"):
        y = normalised("rms_norm", *arrays, None).astype(np.float32)
        exact = quantized_as(y, "int8", 128)
    close((q.view(np.int8), scale), exact, "int8")
    assert not q[:, :256].any() and (scale[5, 2:] == 1).all()
    assert np.isinf(scale[0, 0]) and np.isnan(scale[:, 1]).all()


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
def test_a_norm_kernel_with_a_function():
    f = lambda v, a: jax.nn.silu(v) * a
    function, _ = functor.trace(f, ["float32", "float32"], name="rms_norm", results=1)
    found, operands, results, _ = norm_plan("rms_norm", (6, 256), "bfloat16", "scale", "int8", 128, function=function)
    rng = np.random.default_rng(0)
    arrays = [np.asarray(jnp.asarray(rng.normal(0.3, 1, a.shape), a.dtype)) for a in operands]
    y = normalised("rms_norm", arrays[0], arrays[1], None)
    y = (y / (1 + np.exp(-y)) * arrays[2]).astype(np.float32)
    emulated.prepare(found)
    for unaligned in (False, True):
        q, scale = emulated.run(found, arrays, results, unaligned)
        close((q.view(np.int8), scale), quantized_as(y, "int8", 128), "int8", 0.02)


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("dtype", "to", "given", "unaligned"),
    [
        ("bfloat16", "float8_e4m3fn", False, False),
        ("float32", "float8_e5m2", False, False),
        ("float16", "int8", True, False),
        ("float32", "int8", False, True),
        ("bfloat16", "float8_e4m3fn", True, True),
    ],
)
def test_tile_kernels(dtype, to, given, unaligned):
    """Bit for bit, for two matrices of 2 x 3 tiles."""
    x = rows((2, 256, 384), dtype)
    tiled = x.reshape(2, 2, 128, 3, 128)
    avals = [
        jax.core.ShapedArray(tiled.shape, jnp.dtype(dtype)),
        *[jax.core.ShapedArray((), jnp.dtype("float32"))] * given,
    ]
    found = plan.tiles(device.H200, avals, None, dtype=to)
    check_limits(found, device.H200)
    results = [(x.shape, np.uint8), ((2, 384, 256), np.uint8)]
    results += [((2, 2, 3), np.float32)] if given else [((2, 256, 3), np.float32), ((2, 384, 2), np.float32)]
    q, q_t, *scales = emulated.run(found, [tiled, *[np.float32(0.05)] * given], results, unaligned)
    if given:
        exact, _ = given_scale(x, to, 0.05)
        same([q.view(TYPES[to]), q_t.view(TYPES[to])], [exact, np.swapaxes(exact, 1, 2)])
        same(scales, [np.abs(tiled.astype(np.float32)).max((2, 4))])
    else:
        for a, scale, part in ((q, scales[0], x), (q_t, scales[1], np.swapaxes(x, 1, 2))):
            same([a.view(TYPES[to]), scale], quantized_as(part, to, 128))


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
def test_a_row_kernel_with_a_given_scale():
    x = rows((70, 264), "bfloat16")
    avals = [jax.core.ShapedArray(x.shape, jnp.dtype("bfloat16")), jax.core.ShapedArray((), jnp.dtype("float32"))]
    found = plan_of(avals, "float8_e4m3fn")
    q, most = emulated.run(found, [x, np.float32(0.3)], [(x.shape, np.uint8), ((70,), np.float32)])
    exact, exact_most = given_scale(x, "float8_e4m3fn", 0.3)
    same([q.view(TYPES["float8_e4m3fn"]), most[:, None]], [exact, exact_most])


def test_plans():
    """Every problem has a plan, within the limits of each GPU, whose threads hold whole blocks."""
    for name in NAMES:
        for width in (*WIDTHS, 384, 768, 5120, 65536):
            for dtype in DTYPES:
                for block, given in ((None, False), (None, True), (32, False), (128, False), (512, False)):
                    if width % (block or 1):
                        continue
                    for on in DEVICES:
                        extras = "residual scale" if width % 2 else "scale"
                        found, *_ = norm_plan(name, (4096, width), dtype, extras, "int8", block, given, on=on)
                        if found is None:
                            assert dtype != "float32" and width % 8 and width > 1024
                            continue
                        check_limits(found, on)
                        step = found.launches[0]
                        if found.algorithm == "streaming":
                            assert block == 512 or width > 16384 and step.name.startswith("NormQuantizeStream")
                            continue
                        span = int(step.name.removesuffix(">>").split(", ")[-1])
                        pack, lanes = (int(n) for n in step.name.split(">, ")[1].split(", ")[:2])
                        if block is None or block == width:
                            assert span == -int(given)
                        else:
                            assert span * pack == block and (lanes or 32) % span == 0


def test_what_kernels_do_not_take():
    with compat.enable_x64():
        assert norm_plan("rms_norm", (4, 128), "float64", "scale", "int8")[0] is None
    on = [jax.core.ShapedArray((2, 128, 2, 128), jnp.dtype("float32"))]
    assert plan.tiles(device.H200, on, None, dtype="int8") is not None
    assert plan.tiles(device.H200, [on[0].update(shape=(2, 64, 2, 64))], None, dtype="int8") is None


@needs_runtime
@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda x: jaxkern.rms_norm(x, quantize=Quantization(block=128)), ["NormForward"]),
        (lambda x: jaxkern.layer_norm(x, residual=x, quantize=Quantization(scale=0.5)), ["NormForward"]),
        (lambda x: jaxkern.quantize_tensor(x, scale=0.5), ["RowsKernel<"]),
        (lambda x: jaxkern.quantize_tensor(x, scale=0.5, transposed=True), ["QuantizeTiles"]),
        (lambda x: jaxkern.quantize_blocks(x, transposed=True), ["QuantizeTiles"]),
        (lambda x: jaxkern.quantize_blocks(x, block=64, transposed=True), ["RowsKernel<", "RowsKernel<"]),
        (lambda x: jaxkern.quantize_rows(x, transposed=True), ["RowsKernel<", "RowsKernel<"]),
    ],
)
def test_programs(call, named):
    """The kernels of each call, in launch lists that the runtime reads."""
    x = jax.ShapeDtypeStruct((256, 1024), jnp.bfloat16)
    programs = launch.programs(jax.jit(call).trace(x).lower(lowering_platforms=("cuda",)).as_text())
    assert all(registry.kernels.module.check(program) == "" for program in programs)
    for program, name in zip(programs, named, strict=True):
        assert launch.kernels(program)[0].name.startswith(name)


@needs_nvrtc
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_kernels_compile(capability):
    name, shape, dtype, to, block, given = {
        80: ("rms_norm", (64, 8192), "bfloat16", "int8", 128, False),
        90: ("layer_norm", (64, 256), "bfloat16", "float8_e4m3fn", None, True),
        100: ("layer_norm", (64, 4096), "float32", "float8_e5m2", 128, False),
        120: ("rms_norm", (64, 65536), "float16", "float8_e4m3fn", None, False),
    }[capability]
    found, *_ = norm_plan(name, shape, dtype, "residual scale", to, block, given)
    avals = [
        jax.core.ShapedArray((2, 128, 2, 128), jnp.dtype(dtype)),
        *[jax.core.ShapedArray((), jnp.dtype("float32"))] * given,
    ]
    tiles = plan.tiles(device.H200, avals, None, dtype=to)
    compile_kernels(kernels(found, unaligned=False) | kernels(tiles, unaligned=capability == 90), capability)
