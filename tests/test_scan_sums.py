"""Elements of ys that are sums over lanes: blocks add them up, so that their terms are never in memory."""

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
from test_scan_plan import FEW, planned, run_on_the_cpu, scans

from jaxkern._core import compat, registry
from jaxkern._engines.loops import tuning


def selective(shape, length, dtype, over=(-1,), jacobian=True):
    """The scans of a selective state space model of [batch, features, states], and of its gradient.

    over: the dimensions that each step's result is summed over.
    """

    def layer(a, dt, x, b, c):
        def step(h, inputs):
            dt, x, b, c = inputs
            h = jnp.exp(-dt[..., None] * a) * h + (dt * x)[..., None] * b[:, None, :]
            return h, jnp.sum(h * c[:, None, :], over)

        return jax.lax.scan(step, jnp.zeros(shape, dtype), (dt, x, b, c))[1]

    batch, features, states = shape
    of = lambda *s: jax.ShapeDtypeStruct(s, dtype)
    wide, narrow = of(length, batch, features), of(length, batch, states)
    args = of(features, states), wide, wide, narrow, narrow
    f = jax.grad(lambda *xs: jnp.sum(jnp.sin(layer(*xs).astype("float32"))), range(5)) if jacobian else layer
    return scans(jax.make_jaxpr(f)(*args).jaxpr)


def summed(core) -> list:
    """(the distance of two lanes that a block adds up, how many of them) of each sum of ys."""
    ys = [core.ys[k - core.program.num_carry] for k in core.program.sums]
    return [(y.inner, int(np.prod([*y.summed.values()]))) for y in ys]


@pytest.fixture
def always(monkeypatch):
    """Loops of any size have such sums."""
    for name, value in (("SUM_LANES", 0), ("SUM_TERMS", 0), ("SUM_WAVES", float("inf"))):
        monkeypatch.setattr(tuning, name, value)


CASES = [
    # shape, steps, dtype, summed dimensions of a result, and what blocks add up: in the forward loop, and, over states and over features, in
    # the loop of the gradient
    ((2, 64, 16), 7, "float32", (-1,), (1, 16), (1, 16), (16, 16)),
    ((2, 64, 2), 3, "float32", (-1,), (1, 2), (1, 2), (2, 64)),
    ((1, 32, 64), 3, "float32", (-1,), (1, 64), (1, 64), (64, 8)),
    ((1, 16, 128), 3, "float32", (-1,), (1, 128), (1, 128), (128, 4)),
    ((3, 64, 12), 5, "float32", (-1,), (1, 4), (1, 1), (1, 1)),
    ((2, 32, 16), 5, "bfloat16", (-1,), (1, 16), (1, 16), (16, 16)),
    ((2, 64, 16), 3, "float64", (-1,), (1, 16), (1, 16), (16, 16)),
    ((4, 16, 16), 3, "float32", (-2, -1), (1, 256), (1, 16), (16, 16)),
    ((4, 16, 16), 3, "float32", (-2,), (16, 16), (1, 16), (16, 16)),
    ((16, 16, 4), 3, "float32", (0,), (64, 16), (1, 4), (4, 16)),
]


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler")
@plans.needs_runtime
@pytest.mark.parametrize("shape, length, dtype, over, forward, of_states, of_features", CASES, ids=str)
def test_kernels_on_the_cpu(shape, length, dtype, over, forward, of_states, of_features, monkeypatch, always):
    """With one lane of a thread, and with two or four."""
    wanted = [forward], [of_states] * 2 + [of_features] * 2
    for threads in ("VECTOR_THREADS", "BUSY_THREADS"):
        monkeypatch.setattr(tuning, threads, int(np.prod(shape)) // 4)
    with compat.enable_x64(dtype == "float64"):
        for e, sums in zip(selective(shape, length, dtype, over), wanted, strict=True):
            made, core = planned(e, FEW)
            assert summed(core) == sums
            run_on_the_cpu(e, made, core, dtype)


def test_no_terms_are_in_memory():
    """Of a model of the usual size, the gradient stores a sixteenth of the terms of sums over features, and no term over states."""
    shape = (8, 512, 16)
    _, backward = selective(shape, 1024, "float32")
    _, core = planned(backward)
    *_, a, b, c, d = (s for s, _ in core.shapes(1024))
    assert (a, b, c, d) == ((1024, 8, 512, 1),) * 2 + ((1024, 8, 32, 16),) * 2


def test_small_loops_keep_their_terms():
    """In few lanes, or with little memory at stake, a barrier in each step may cost more."""
    for shape, length in (((1, 512, 16), 1024), ((8, 512, 16), 16)):
        for e in selective(shape, length, "float32"):
            made, core = planned(e)
            assert set(summed(core)) == {(1, 1)} and "YsSums" not in made.launches[-1].source


@plans.needs_nvrtc
@pytest.mark.parametrize("capability", (80, 90, 120))
def test_kernels_compile(capability):
    for e in selective((8, 512, 16), 1024, "bfloat16" if capability == 80 else "float32"):
        made, _ = planned(e)
        for step in (*made.launches, *(made.unaligned or ())):
            assert registry.kernels.module.compile(step.header, step.name, capability, step.source)
