"""Row functions of arrays spread over several devices; see test_sharding.py.

If rows are split, devices only send sums over rows. If the row itself is split, they exchange numbers of each row.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from row_functions import FUNCTIONS, operands, rms_norm
from sharding import check, mesh, numbers_of_rows, put, same, several

import jaxkern

SHAPE = (8, 4, 32)


@functools.cache
def given(name):
    kinds = FUNCTIONS[name][1]
    return kinds, list(map(jnp.asarray, operands(kinds, SHAPE, np.float32)))


def run(name):
    f, kinds, _ = FUNCTIONS[name]
    kernel = jaxkern.row_kernel(f)
    real = [k for k, kind in enumerate(kinds) if kind not in "lm"]

    def both(*args):
        of_real = lambda *xs: kernel(*(xs[real.index(k)] if k in real else a for k, a in enumerate(args)))
        ys, pull = jax.vjp(of_real, *(args[k] for k in real))
        return ys, pull(jax.tree.map(jnp.cos, ys))

    return both


@functools.cache
def on_one_device(name):
    return jax.jit(run(name))(*given(name)[1])


def specs(kinds, spec):
    last = {"x": spec, "c": spec[2:], "n": spec[:2], "s": (), "m": (spec[0], None, spec[2]), "l": spec[:2]}
    return [P(*last[k]) for k in kinds]


@several
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    "spec", [("r", "c", None), (("r", "c"), None, None), (None, "r", "c"), ("c", None, "r")], ids=str
)
@pytest.mark.parametrize("name", ["rms_norm", "loss", "masked", "totals"])
def test_split_arrays(name, spec, kind):
    grid, (kinds, args) = mesh(kind), given(name)
    split = [jax.device_put(a, NamedSharding(grid, s)) for a, s in zip(args, specs(kinds, spec))]
    with jax.set_mesh(grid):
        compiled = jax.jit(run(name)).lower(*split).compile()
    same(compiled(*split), on_one_device(name), 2e-5)
    assert numbers_of_rows(compiled.as_text(), math.prod(SHAPE[:-1]))
    if (
        name == "masked" or spec[2] is None and name == "loss"
    ):  # a maximum and the sums relative to it are one message, of each pass
        check(compiled.as_text(), {} if spec[2] is None else {"all-gather": 2}, kernel=False)


@several
def test_inside_shard_map():
    spec = ("r", None, None)
    grid, (kinds, args) = mesh("Auto"), given("rms_norm")
    step = jax.shard_map(
        run("rms_norm"), mesh=grid, in_specs=tuple(specs(kinds, spec)), out_specs=(P(*spec), (P(*spec), P()))
    )
    wanted = on_one_device("rms_norm")
    same(jax.jit(step)(*args), wanted, 2e-5)


@several
def test_rows_that_do_not_divide():
    """The last device has fewer rows, and XLA pads its part."""
    grid = mesh(names=("r",))
    x, w = np.random.default_rng(0).normal(size=(13, 24)).astype(np.float32), np.ones(24, np.float32)
    f = jaxkern.row_kernel(rms_norm)
    split = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(grid, P("r")))
    run = lambda g: jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(f(g(x), w))), (0, 1)))(x, w)
    same(run(split), run(lambda x: x), 2e-5)


@several
def test_sums_relative_to_numbers_of_the_row():
    """Parts whose maximum is -inf, NaN or far from that of the row, and sums of what depends on several numbers of the row."""

    def f(x, w):
        most = jnp.max(x, -1, keepdims=True)
        base = jnp.where(most == -jnp.inf, 0, most)
        e = jnp.exp(x - base)
        total = jnp.sum(e, -1, keepdims=True)
        p = jnp.where(most == -jnp.inf, 0, e / jnp.where(total == 0, 1, total))
        of_other = jnp.sum(jnp.exp(w - base), -1)  # finite where the largest x of a part is -inf
        plain = jax.nn.softmax(x, -1)  # which subtracts an infinite maximum
        times = jnp.sum(
            w * jnp.where(jnp.isinf(most), 0, jnp.round(most) / 2), -1
        )  # a number of the row that may be 0 in a part
        return (
            p,
            plain,
            times,
            jnp.sum(p * w, -1),
            of_other,
            jnp.sum(jnp.where(p > 0, p * jnp.log(p), 0), -1),
            jnp.sum(w, -1),
        )

    x = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
    x[0], x[1, :16], x[2, 16:], x[3, 5], x[4, 20] = -np.inf, -np.inf, -np.inf, np.nan, np.inf
    x[5, :16], x[6], x[7] = 80, -60, -abs(x[7])
    x[7, 3], x[7, 20] = 0, 4
    w = np.random.default_rng(1).normal(size=(8, 32)).astype(np.float32)
    grid, kernel = mesh("Auto"), jaxkern.row_kernel(f)
    split = put(grid, (x, w), (P("c", "r"),) * 2)
    compiled = jax.jit(kernel).lower(*split).compile()
    same(compiled(*split), jax.jit(f)(x, w), 2e-5)
    check(compiled.as_text(), {"all-gather": 1, "all-reduce": 1}, kernel=False)


def scaled_norm(x):
    largest = jnp.max(jnp.abs(x), -1, keepdims=True)
    return largest * jnp.sqrt(jnp.sum((x / largest) ** 2, -1, keepdims=True))


def sum_of_probabilities(x):
    return jnp.sum(jnp.exp(x - jax.nn.logsumexp(x, -1, keepdims=True)), -1, keepdims=True)


@several
@pytest.mark.parametrize("f, scale", [(scaled_norm, 1e20), (scaled_norm, 1e-25), (sum_of_probabilities, None)])
def test_parts_neither_overflow_nor_vanish(f, scale):
    """What a row is scaled by stays in the parts of devices; so does the whole of a part that is -inf."""
    m = mesh()
    x = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32) * (scale or 1)
    if scale is None:
        x[:, 16:] = -np.inf
    found = jax.jit(jaxkern.row_kernel(f))(jax.device_put(x, NamedSharding(m, P(None, ("r", "c")))))
    np.testing.assert_allclose(found, f(jnp.asarray(x)), rtol=1e-5)
