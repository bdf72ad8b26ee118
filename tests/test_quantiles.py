"""median and quantile against NumPy."""

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plans import check_limits, compile_on_other_gpus, needs_nvrtc

import jaxkern
from jaxkern._core import device
from jaxkern._ops.select import ranks


@pytest.mark.parametrize("method", ["linear", "lower", "higher", "midpoint", "nearest"])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_quantiles(method, dtype):
    """Along one axis, several and all, with a row with NaN, of one fraction and of many."""
    x = np.random.default_rng(0).integers(-50, 50, (4, 5, 6)).astype(dtype)
    if dtype == "float32":
        x[0, 0, 0] = np.nan
    for q, axis, keepdims in (
        (0.3, 1, False),
        (np.array([[0, 0.25], [0.5, 1]], np.float32), (0, 2), True),
        (0.5, None, False),
    ):
        found = jaxkern.quantile(x, q, axis, method=method, keepdims=keepdims)
        exact = np.quantile(x.astype(np.float64), q, axis, method=method, keepdims=keepdims)
        np.testing.assert_allclose(found, exact, rtol=1e-5)
        assert found.dtype == jnp.float32


def test_infinite_elements():
    assert jaxkern.median(np.zeros((0, 3, 5)), (1, 2)).shape == (0,)
    assert jaxkern.quantile(jnp.array([jnp.inf, 0, -jnp.inf]), jnp.array([0, 0.5, 1])).tolist() == [-np.inf, 0, np.inf]


def test_medians_and_derivatives():
    x = np.random.default_rng(0).normal(size=(7, 8)).astype(np.float32)
    for axis in (None, 0, (1,)):
        np.testing.assert_array_equal(jaxkern.median(x, axis), np.median(x, axis).astype(np.float32))
    assert jaxkern.median(x.astype(jnp.bfloat16), 0, keepdims=True).shape == (1, 8)
    for argument in (0, 1):
        ours, theirs = (
            jax.grad(lambda x, q, f=f: jnp.sum(jnp.sin(f(x, q, 1))), argument)(x, jnp.array([0.2, 0.71]))
            for f in (jaxkern.quantile, jnp.quantile)
        )
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)


RANKED = [((2, 100000), "float32", 2, False), ((1, 140001), "bfloat16", 4, True), ((3, 60000), "float16", 1, False)]


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("shape, dtype, count, unaligned", RANKED)
def test_kernels(shape, dtype, count, unaligned):
    """Against a sort of NumPy: numbers that differ in their last bits alone, ranks whose elements are equal, zeros, NaN."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=shape)[:, 9:], np.full((shape[0], 9), [-0.0, 0, np.inf] * 3)], 1)
    x = x.astype(jnp.dtype(dtype))
    x[-1, : shape[1] // 2] = 1
    at = np.array([shape[1] // 2, 0, shape[1] // 2 + 1, shape[1] - 1][:count], np.int32)
    given = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, at)]
    made = ranks.plan(device.H200._replace(sm_count=3), given, None)
    check_limits(made, device.H200)
    for nan in (False, True):
        x[0, 5] = np.nan if nan else 2
        (found,) = emulated.run(made, [x, at], [((shape[0], count), x.dtype)], unaligned)
        exact = np.sort(x, -1)[:, at]
        exact[0] = np.nan if nan else exact[0]
        np.testing.assert_array_equal(*(a.astype(np.float32) for a in (found, exact)))


def test_plans():
    """Of many short rows, and for many ranks, the rows are sorted."""
    for shape, count, selected in (((1, 1 << 26), 2, True), ((64, 8192), 2, False), ((1, 1 << 20), 5, False)):
        x, at = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((count,), jnp.int32)
        assert (ranks.plan(device.H200, (x, at), None) is not None) == selected


@needs_nvrtc
def test_kernels_compile():
    compile_on_other_gpus((ranks.HEADER, name) for name in ("RankCount<uint16_t, 8, 2>", "RankDigit<uint32_t>"))


def test_errors():
    with pytest.raises(ValueError, match="jaxkern.median: x of shape .* has no elements"):
        jaxkern.median(jnp.ones((2, 0)), 1)
    with pytest.raises(ValueError, match="jaxkern.quantile: method must be one of"):
        jaxkern.quantile(jnp.ones(2), 0.5, method="middle")
