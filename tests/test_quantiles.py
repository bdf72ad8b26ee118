"""median and quantile against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern


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


def test_errors():
    with pytest.raises(ValueError, match="jaxkern.median: x of shape .* has no elements"):
        jaxkern.median(jnp.ones((2, 0)), 1)
    with pytest.raises(ValueError, match="jaxkern.quantile: method must be one of"):
        jaxkern.quantile(jnp.ones(2), 0.5, method="middle")
