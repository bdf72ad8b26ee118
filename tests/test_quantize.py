"""quantize_rows, quantize_blocks: numbers, special rows, derivatives, shardings, the kernel, bad input."""

import functools

import emulated
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from plans import DEVICES, check_limits, needs_nvrtc

import jaxkern
from jaxkern import algorithms
from jaxkern._core import device, registry
from jaxkern._definitions import quantize
from jaxkern._definitions.traced import row_function
from jaxkern._engines.rows import plan
from jaxkern._engines.rows.function import trace

TYPES = {"int8": np.int8, "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
DTYPES = ("float16", "bfloat16", "float32")
every_type = pytest.mark.parametrize("to", TYPES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def rows(shape, dtype="float32", seed=0):
    """Rows of many magnitudes, in each of them numbers of many, and special rows if there are enough."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp(rng.normal(0, 2, shape)) * np.exp(rng.normal(0, 1, (*shape[:-1], 1)))
    if np.prod(shape[:-1]) > 8:
        flat = x.reshape(-1, shape[-1])
        flat[1] = 0
        flat[2, -1] = np.nan
        flat[3, 0] = -np.inf
        flat[4] = 1e-7
        flat[5, ::2] = 0
    return np.asarray(x).astype(jnp.dtype(dtype))


def wanted(x, to):
    """The result by NumPy, in float32."""
    most = np.float32(quantize.limit(to))
    wide = x.astype(np.float32)
    with np.errstate(all="ignore"):
        largest = np.abs(x.astype(np.float32)).max(-1, keepdims=True)
        factor = np.where(largest == 0, np.float32(1), np.minimum(most / largest, np.finfo(np.float32).max))
        y = np.clip(wide * factor, -most, most)
        q = np.where(np.isnan(y), 0, np.round(y)).astype(np.int8) if to == "int8" else y.astype(TYPES[to])
    return q, np.where(largest == 0, np.float32(1), largest * np.float32(1 / np.float64(most)))


def same(found, exact):
    for a, b in zip(found, exact, strict=True):
        np.testing.assert_array_equal(np.asarray(a).astype(np.float32), np.asarray(b).astype(np.float32))


@every_type
@every_dtype
@pytest.mark.parametrize("shape", [(9, 128), (3, 5, 100), (33,), (2, 9, 1), (11, 4097)])
def test_rows(shape, dtype, to):
    """Bit for bit."""
    x = rows(shape, dtype)
    q, scale = jaxkern.quantize_rows(x, to)
    assert q.dtype == TYPES[to] and q.shape == shape and scale.shape == (*shape[:-1], 1) and scale.dtype == jnp.float32
    same([q, scale], wanted(x, to))


@every_type
def test_rounding_error(to):
    """Half a unit in the last place of numbers that are not subnormal, or of the scale."""
    x = rows((200, 256))[6:]
    found = np.asarray(jaxkern.dequantize(*jaxkern.quantize_rows(x, to)))
    scale = np.abs(x).max(-1, keepdims=True) / quantize.limit(to)
    half, least = {"int8": (0, 0.5), "float8_e4m3fn": (2**-4, 2**-10), "float8_e5m2": (2**-3, 2**-17)}[to]
    assert (np.abs(found - x) <= 1.001 * np.maximum(half * np.abs(x), least * scale)).all()


@every_type
def test_every_number_is_its_own_rounding(to):
    """In a row with the largest number the scale is 1."""
    every = np.arange(256, dtype=np.uint8).view(TYPES[to]).astype(np.float32)
    every = every[np.isfinite(every) & (every >= -quantize.limit(to))]
    q, scale = jaxkern.quantize_rows(every, to)
    assert scale == 1
    np.testing.assert_array_equal(np.asarray(q).astype(np.float32), every)


def test_blocks_are_rows():
    x = rows((12, 512), "bfloat16")
    q, scale = jaxkern.quantize_blocks(x)
    apart, scales = jaxkern.quantize_rows(x.reshape(12, 4, 128))
    same([q, scale], [apart.reshape(x.shape), scales[..., 0]])
    np.testing.assert_allclose(
        np.asarray(jaxkern.dequantize(q, scale))[6:],
        x.astype(np.float32)[6:],
        rtol=0.07,
        atol=1e-2 * np.abs(x[6:]).max(),
    )


def test_a_given_scale_saturates():
    x = jnp.array([[1.0, -1000.0, 3.0, jnp.nan]])
    q, scale = jaxkern.quantize_rows(x, scale=0.5)
    assert scale.shape == () and q[0, :3].astype(jnp.float32).tolist() == [2.0, -448.0, 6.0] and jnp.isnan(q[0, 3])
    q, _ = jaxkern.quantize_rows(x, jnp.int8, scale=jnp.array([0.1, 1.0, 1.0, 1.0]))
    assert q.tolist() == [[10, -127, 3, 0]]


# ---- transformations


def test_derivatives():
    x = jnp.asarray(rows((6, 256)))
    f = lambda x: jnp.sum(jnp.sin(jaxkern.fake_quantize(x, block=64)))
    y = jaxkern.fake_quantize(x, block=64)
    same([jax.jit(jax.grad(f))(x), jax.jvp(f, (x,), (x,))[1]], [jnp.cos(y), jnp.sum(jnp.cos(y) * x)])
    zero = jax.grad(lambda x: sum(jnp.sum(a.astype(jnp.float32)) for a in jaxkern.quantize_rows(x)))(x)
    assert not np.asarray(zero).any()


def test_batches_and_loops():
    x = jnp.asarray(rows((4, 6, 32)))
    for axis in range(3):
        found = jax.vmap(lambda x: jaxkern.quantize_rows(x, jnp.int8), axis, axis)(x)
        apart = [jaxkern.quantize_rows(x.take(k, axis), jnp.int8) for k in range(x.shape[axis])]
        same(found, [jnp.stack(a, axis) for a in zip(*apart)])
    found = jax.lax.scan(lambda c, x: (c, jaxkern.quantize_blocks(x, block=8)), 0, x)[1]
    same(found, jaxkern.quantize_blocks(x, block=8))
    mesh = jax.make_mesh((1,), ("r",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    mapped = jax.shard_map(jaxkern.quantize_rows, mesh=mesh, in_specs=P("r"), out_specs=P("r"))
    same(jax.jit(mapped)(x), jaxkern.quantize_rows(x))


# ---- the kernel


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "shape, dtype, to, unaligned",
    [
        ((13, 128), "bfloat16", "float8_e4m3fn", False),
        ((70, 24), "float32", "float8_e5m2", False),
        ((9, 1030), "float16", "int8", False),
        ((300, 3), "float32", "float8_e4m3fn", False),
        ((9, 70001), "float32", "int8", False),
        ((9, 136), "bfloat16", "int8", True),
    ],
)
def test_kernel(shape, dtype, to, unaligned):
    """Bit for bit, in lanes, warps, blocks and clusters, with rows that do not fill blocks."""
    x = rows(shape, dtype)
    found = planned(shape, dtype, to)
    check_limits(found, device.H200)
    q, scale = emulated.run(found, [x], [(shape, np.uint8), (shape[:-1], np.float32)], unaligned)
    same([q.view(TYPES[to]), scale[..., None]], wanted(x, to))


def planned(shape, dtype, to, on=device.H200):
    return plan_of([jax.core.ShapedArray(shape, jnp.dtype(dtype))], to, on)


def plan_of(operands, to, on=device.H200):
    function = row_function("quantize_rows", quantize.definition, operands, dtype=to)
    return plan.plan(on, function.avals, function.results, function=function)


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("to", ["float8_e4m3fn", "float8_e5m2"])
def test_conversions_to_8_bit_floats(to):
    """Row functions convert as JAX does: what is too large is NaN or infinite, ties go to even, signs stay."""
    numbers = np.arange(0, 1 << 16, 7, np.uint16).view(jnp.bfloat16).astype(np.float32)
    edges = np.float32([464, 464.0001, 480, 61439.99, 61440, 65536, 1e30, np.inf, np.nan])
    x = np.resize(np.concatenate([numbers, edges, -edges]), (3, 3128))
    function, _, _ = trace(lambda x: x.astype(to), [jax.ShapeDtypeStruct(x.shape, x.dtype)], -1, "f")
    made = plan.plan(device.H200, function.avals, function.results, function=function)
    for unaligned in (False, True):
        (y,) = emulated.run(made, [x], [(x.shape, np.uint8)], unaligned)
        with np.errstate(invalid="ignore"):
            same([y.view(TYPES[to])], [x.astype(TYPES[to])])


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
def test_numbers_of_rows_are_8_bit_floats_too():
    x = np.arange(-60, 60, dtype=np.float32).reshape(6, 20)
    f = lambda x: jnp.max(x, -1).astype("float8_e4m3fn")
    function, _, _ = trace(f, [jax.ShapeDtypeStruct(x.shape, x.dtype)], -1, "f")
    made = plan.plan(device.H200, function.avals, function.results, function=function)
    (y,) = emulated.run(made, [x], [((6,), np.uint8)], False)
    same([y.view(TYPES["float8_e4m3fn"])], [f(x)])


def test_algorithms_are_asked_by_type():
    ask = functools.partial(algorithms.choose, "quantize_rows", device=device.H200)
    found = [ask(1 << 12, width, dtype="bfloat16") for width in (128, 2048, 8192, 1 << 18)]
    assert found == ["lanes", "warp", "block", "cluster"] and ask(64, 300, 8, "float32") == "strided"
    assert algorithms.fits("quantize_rows", "split", 1, 1 << 20, dtype="float32")


@needs_nvrtc
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_kernels_compile(capability):
    width, dtype, to = {80: (128, "bfloat16", "int8"), 90: (8192, "bfloat16", "float8_e4m3fn")}.get(
        capability, (4096, "float32", "float8_e5m2")
    )
    for step in planned((64, width), dtype, to).launches:
        assert registry.kernels.module.compile(step.header, step.name, capability, step.source)[0]


def test_plans():
    """A kernel for rows of any width."""
    for width in (2, 7, 128, 4096, 50257, 1 << 20):
        for dtype in DTYPES:
            for on in DEVICES:
                check_limits(planned((1 << 10, width), dtype, "int8", on), on)


# ---- bad input


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: jaxkern.quantize_rows("x"), TypeError, "quantize_rows: x must be an array"),
        (lambda: jaxkern.quantize_rows(jnp.ones(3) * 1j), TypeError, "quantize_rows: x must be real"),
        (lambda: jaxkern.quantize_rows(jnp.ones(3), jnp.int16), TypeError, "quantize_rows: dtype must be one of int8"),
        (lambda: jaxkern.quantize_rows(jnp.ones(3), None), TypeError, "quantize_rows: dtype"),
        (lambda: jaxkern.quantize_rows(jnp.ones((3, 0))), ValueError, r"quantize_rows: x of shape \(3, 0\)"),
        (lambda: jaxkern.quantize_rows(jnp.ones((3, 2)), scale=jnp.ones(3)), ValueError, r"scale of shape \(3,\)"),
        (
            lambda: jaxkern.quantize_blocks(jnp.ones((3, 200))),
            ValueError,
            "quantize_blocks: a block of 128 does not divide",
        ),
        (lambda: jaxkern.fake_quantize(jnp.ones(4), block=3), ValueError, "fake_quantize: a block of 3"),
        (lambda: jaxkern.quantize_blocks(jnp.ones(4), block=2.0), TypeError, "quantize_blocks: block must be an int"),
        (lambda: jaxkern.dequantize(jnp.ones(4), jnp.ones(3)), ValueError, "dequantize: scale of shape"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
