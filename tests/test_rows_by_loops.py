"""Rows of NaN, infinities and nothing in arrays that are large enough for the CPU's loops without selects."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern._core.rows import MANY

SHAPE, AXIS = (2, 72, 512), 2
SPECIAL = ("numbers", "nan", "infinite", "empty", "cotangent")
OPERATIONS = {
    "plain": lambda x, m: jaxkern.softmax(x),
    "plain log": lambda x, m: jaxkern.log_softmax(x),
    "where": lambda x, m: jaxkern.softmax(x, where=m),
    "axis 1": lambda x, m: jnp.swapaxes(jaxkern.softmax(jnp.swapaxes(x, 1, 2), 1, jnp.swapaxes(m, 1, 2)), 1, 2),
    "scale": lambda x, m: jaxkern.softmax(x, where=m, scale=0.5),
    "bias": lambda x, m: jaxkern.softmax(x, bias=jnp.where(m, jnp.float32(0), -jnp.inf)),
    "score": lambda x, m: jaxkern.softmax(x, where=m, score=lambda s, b, q, k: s * 0.5 + 0.01 * k.astype(s.dtype)),
    "log": lambda x, m: jaxkern.log_softmax(x, where=m),
    "log score": lambda x, m: jaxkern.log_softmax(x, where=m, score=lambda s, b, q, k: s * 0.5),
}


def operands(special, seed):
    rng = np.random.default_rng(seed)
    x, g = rng.standard_normal((2, *SHAPE)).astype(np.float32)
    mask = rng.random(SHAPE) < 0.8
    if special == "nan":
        x[0, 3, 5] = np.nan
        mask[0, 3, 5] = True
    if special == "infinite":
        x[0, 3, 5] = np.inf
        mask[0, 3, 5] = True
        x[1, 4, ::2] = -np.inf
    if special == "empty":
        mask[0, 7], x[1, 9] = False, -np.inf
    x[~mask] = rng.choice(np.float32([np.nan, np.inf, 7]), (~mask).sum())  # read by nothing
    if special == "cotangent":
        g[~mask] = np.nan
    return x, mask, g


def exactly(operation, x, mask, g):
    """(result, gradient) in float64."""
    k = np.arange(SHAPE[AXIS])
    factor = 0.5 if "sc" in operation else 1
    s = np.where(mask, x.astype(np.float64) * factor + (0.01 * k if operation == "score" else 0), -np.inf)
    with np.errstate(all="ignore"):
        largest = s.max(AXIS, keepdims=True)
        e = np.exp(s - np.where(largest == -np.inf, 0, largest))
        total = e.sum(AXIS, keepdims=True)
        # Only a score of -inf masks its element; a bias of -inf, or -inf itself, takes part in a row that is not empty.
        kept = s != -np.inf if "score" in operation else (mask | (operation == "bias")) & (total != 0)
        p = np.where(kept, e / total, 0)
        g = np.where(kept if "log" in operation else p != 0, g, 0)
        if "log" not in operation:
            return p, np.where(kept, p * (g - (p * g).sum(AXIS, keepdims=True)), 0) * factor
        y = np.where(kept, s - largest - np.log(total), -np.inf)
        return y, np.where(kept, g - p * g.sum(AXIS, keepdims=True), 0) * factor


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_special_rows(operation, special, dtype):
    assert np.prod(SHAPE) >= MANY
    x, mask, g = operands(special, SPECIAL.index(special))
    if operation.startswith("plain"):
        x, mask = np.where(mask, x, np.float32(0.5)), np.ones_like(mask)
    x, g = jnp.asarray(x, dtype), jnp.asarray(g, dtype)
    if operation == "bias":
        x = jnp.where(mask, x, 0)
    y, pull = jax.vjp(lambda x: OPERATIONS[operation](x, mask), x)
    (dx,) = pull(g)
    wanted = exactly(operation, *(np.asarray(a, np.float32) for a in (x,)), mask, np.asarray(g, np.float32))
    rough = {"rtol": 2e-5, "atol": 5e-6} if dtype == "float32" else {"rtol": 3e-2, "atol": 3e-2}
    for found, exact in zip((y, dx), wanted):
        np.testing.assert_allclose(np.asarray(found, np.float32), exact, **rough)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("axis", [2, 1])
def test_infinite_cotangents(axis, masked, dtype):
    """Where the result is 0, masked or not, the gradient is 0 and the cotangent does not count, whatever cotangents are. In
    jax.nn.softmax these are 0 times infinity, or NaN."""
    x, g = jnp.zeros(SHAPE, dtype).at[:, :, 5].set(-jnp.inf), jnp.ones(SHAPE, dtype).at[0, 1, 7].set(jnp.inf)
    g = g.at[1, 2, 5].set(jnp.nan).at[1, 3, 5].set(jnp.inf)
    where = jnp.ones(SHAPE, bool).at[:, :, 9].set(False) if masked else None
    move = lambda a: a if a is None or axis == 2 else jnp.swapaxes(a, 1, 2)  # columns run by hand
    dx = jax.vjp(lambda x: jaxkern.softmax(x, axis, where=move(where)), move(x))[1](move(g))[0]
    dx = np.asarray(move(dx), np.float32)
    assert (dx[:, :, 5] == 0).all()
    assert not masked or (dx[:, :, 9] == 0).all()
    assert np.isnan(dx[0, 1, 7]) and dx[0, 1, 8] == -np.inf and np.isfinite(dx[1]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("special", ["numbers", "nan", "infinite", "empty", "outside"])
def test_special_segments(special, dtype):
    rng = np.random.default_rng(3)
    rows, count, width = 50, 9000, 8
    assert count * width >= MANY
    x, ids = rng.standard_normal((count, width)).astype(np.float32), rng.integers(0, rows, count)
    if special == "nan":
        x[5, 2] = np.nan
    if special == "infinite":
        x[5, 2], x[9, 3] = np.inf, -np.inf
    if special == "empty":
        x[ids == 4] = -np.inf
        ids[ids == 6] = 7
    if special in ("nan", "outside"):
        ids[100:200:2], ids[101:200:2] = -1, rows
        x[100:150], x[150:200] = 1e30, np.nan
        x[ids == rows - 1, 0] = np.nan
    x = jnp.asarray(x, dtype)
    found = np.asarray(jaxkern.segment_softmax(x, ids, rows), np.float32)
    wanted, x = np.zeros((count, width)), np.asarray(x, np.float64)
    with np.errstate(all="ignore"):
        for row in range(rows):
            s = x[ids == row]
            largest = s.max(0, initial=-np.inf)
            e = np.exp(s - np.where(largest == -np.inf, 0, largest))
            wanted[ids == row] = np.where(largest == -np.inf, 0, e / e.sum(0))
    np.testing.assert_allclose(found, wanted, rtol=1e-5 if dtype == "float32" else 2e-2, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_scores_whose_derivative_is_infinite(masked):
    """An element with a score of -inf has a gradient of 0, whatever the derivative there and its cotangent are."""
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.uniform(1, 2, SHAPE), jnp.float32).at[:, :, 5].set(0)
    bias = jnp.zeros(SHAPE[1:], jnp.float32)
    g = jnp.asarray(rng.standard_normal(SHAPE), jnp.float32).at[0, 1, 5].set(jnp.inf)
    where = jnp.ones(SHAPE, bool).at[:, 3].set(False) if masked else None
    score = lambda s, i, j, k, b: jnp.log(s) + b
    f = lambda x, bias: jaxkern.softmax(x, where=where, score=score, score_args=[bias])
    y, pull = jax.vjp(f, x, bias)
    dx, db = map(np.asarray, pull(g))
    p = np.array(x, np.float64)
    p = np.where(np.ones(SHAPE, bool) if where is None else where, p, 0)
    p /= np.maximum(p.sum(AXIS, keepdims=True), 1e-300)
    clean = np.where(p == 0, 0, np.asarray(g, np.float64))
    ds = p * (clean - (p * clean).sum(AXIS, keepdims=True))
    np.testing.assert_allclose(y, p, 1e-5, 1e-7)
    np.testing.assert_allclose(dx, ds / np.where(x == 0, 1, x), 2e-4, 1e-7)
    np.testing.assert_allclose(db, ds.sum(0), 2e-4, 1e-7)
