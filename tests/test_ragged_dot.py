"""`jax.lax.ragged_dot` of plain programs, which `jaxkern.accelerate` writes in the layout that XLA's product reads."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxkern
from jaxkern._core import compat, registry

ROWS, GROUPS, K, N = 60, 5, 16, 24
SIZES = {
    "all rows": (10, 0, 25, 5, 20),
    "some rows belong to no group": (10, 0, 25, 5, 3),
    "one group": (0, 0, 60, 0, 0),
    "none": (0, 0, 0, 0, 0),
}


def experts(x, up, down, sizes):
    return lax.ragged_dot(jnp.tanh(lax.ragged_dot(x, up, sizes)), down, sizes)


def gradients(x, up, down, sizes):
    loss = lambda *args: jnp.square(experts(*args, sizes)).astype(jnp.float32).sum()
    return jax.value_and_grad(loss, (0, 1, 2))(x, up, down)


def arguments(dtype="float32", sizes=SIZES["all rows"], index="int32"):
    rng = np.random.default_rng(0)
    made = [jnp.asarray(rng.normal(size=s), dtype) for s in ((ROWS, K), (GROUPS, K, N), (GROUPS, N, K))]
    return *made, jnp.asarray(sizes, index)


def lowered(f, *args):
    return jax.jit(lambda *args: f(*args)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("index", ["int32", "uint32", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.sweep(5)
def test_values(sizes, dtype, index):
    args = arguments(dtype, SIZES[sizes], index)
    f = jax.jit(lambda *args: (experts(*args), gradients(*args)))
    plain = f(*args)
    with jaxkern.accelerate(only="ragged_dot", force=True):
        own = f(*args)
        assert jaxkern.explain(f, jax.default_backend().replace("gpu", "cuda"))(*args).taken
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(own), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(y).astype(np.float64) for y in (a, b))
        np.testing.assert_allclose(b, a, rtol=1e-5 if dtype == "float32" else 2e-2, atol=1e-6 * np.abs(a).max())


def test_rows_of_no_group_may_be_nan():
    """Rows behind the groups, which programs use as padding, reach no gradient of a matrix."""
    x, *rest, _ = arguments()
    sizes = jnp.asarray(SIZES["some rows belong to no group"])
    x = x.at[int(sizes.sum()) :].set(jnp.nan)
    with jaxkern.accelerate(only="ragged_dot", force=True):
        _, (_, *of_matrices) = jax.jit(gradients)(x, *rest, sizes)
    assert all(bool(jnp.isfinite(y).all()) for y in of_matrices)


@pytest.mark.skipif(not registry.kernels_run(), reason="no kernels")
def test_the_layout(measured_jaxlib):
    """[rows, groups, k], which the product sums over groups and k as they lie; sums over rows stay as they are."""
    args = arguments()
    left = lambda text: text.count('"chlo.ragged_dot"(')
    assert left(lowered(gradients, *args)) == 6
    with jaxkern.accelerate():
        text = lowered(gradients, *args)
        found = jaxkern.explain(gradients)(*args)
    assert left(text) == 2
    products = re.findall(
        r"stablehlo.dot_general .*contracting_dims = \[1, 2\] x \[0, [12]\].*tensor<60x5x\d+xf32>, ", text
    )
    assert len(products) == 4
    assert [d.taken for d in found if d.operation == "ragged_dot"].count(True) == 4


@pytest.mark.skipif(not registry.kernels_run(), reason="no kernels")
def test_left(measured_jaxlib, monkeypatch):
    """Batches, and versions of XLA that were not seen."""
    x, up, _, sizes = arguments()
    several = jnp.stack([x, x]), jnp.stack([up, up]), jnp.stack([sizes, sizes])
    one = lambda *args: lax.ragged_dot(*args)
    plain = lowered(jax.vmap(one), *several), lowered(one, x, up, sizes)
    with jaxkern.accelerate():
        assert lowered(jax.vmap(one), *several) == plain[0]
        assert lowered(one, x, up, sizes) != plain[1]
        monkeypatch.setattr(compat, "jaxlib", lambda: (0, 12, 0))
        assert lowered(lambda *args: one(*args), x, up, sizes) == plain[1]
