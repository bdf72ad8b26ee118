"""Regions that are timed (jaxkern/_accelerate/tune.py): what times decide, where they are kept, and timing while a program is lowered."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ON_GPU

import jaxkern
from jaxkern._accelerate import tune
from jaxkern._accelerate.tune import UNKNOWN, Times
from jaxkern._core import cache, registry, timing

pytestmark = pytest.mark.skipif(not registry.kernels_run(), reason="no kernels")
ROWS = (jax.ShapeDtypeStruct((4096, 1024), "float32"),)


def residual_norm(x):  # the model takes it
    h = x + jnp.sin(x)
    return h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True)), h


@pytest.fixture
def given(monkeypatch, tmp_path):
    """The times that regions have, and the regions that are timed."""
    if ON_GPU:
        pytest.skip("times are given")

    class Given:
        times, timed = Times(2e-5, 1e-5), []

    def timed(functions, wide):
        Given.timed += functions
        return [Given.times] * len(functions)

    monkeypatch.setenv("JAXKERN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tune, "device_kind", lambda: "a GPU")
    monkeypatch.setattr(tune, "timed", timed)
    tune._known.clear()
    yield Given
    Given.timed.clear()
    tune._known.clear()


def explained(f=residual_norm, platform="cuda", **options):
    with jaxkern.accelerate(only="rows", **options):
        (found,) = jaxkern.explain(f, platform)(*ROWS)
    return found


@pytest.mark.parametrize("times, taken", [((9e-5, 3e-5), True), ((3e-5, 3e-5), False), (UNKNOWN, None)])
def test_times_decide(given, times, taken):
    estimated = explained()
    given.times = Times(*times)
    found = explained(tune=True)
    assert found.taken == (estimated.taken if taken is None else taken)
    assert ("measured" in found.reason) == (taken is not None) and "measured" not in estimated.reason
    assert len(given.timed) == 1


def test_a_region_is_timed_once(given, monkeypatch, tmp_path):
    """In a process, and in all later ones that have the same GPU."""
    explained(tune=True)
    explained(tune=True)
    tune._known.clear()
    explained(tune=True)
    assert len(given.timed) == 1
    (file,) = tmp_path.iterdir()
    assert [e.path for e in cache.entries(str(tmp_path))] == [str(file)]
    monkeypatch.setattr(tune, "device_kind", lambda: "another GPU")
    explained(tune=True)
    assert len(given.timed) == 2
    file.write_text('{"xla": ')
    monkeypatch.setattr(tune, "device_kind", lambda: "a GPU")
    tune._known.clear()
    explained(tune=True)
    assert len(given.timed) == 3


def test_where_nothing_is_timed(given, monkeypatch):
    explained()
    explained(tune=True, force=True)
    explained(tune=True, platform="cpu")
    monkeypatch.setattr(tune, "device_kind", lambda: "")
    explained(tune=True)
    assert not given.timed


def test_memory_that_is_short(given, tmp_path):
    given.times = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    estimated = explained()
    with pytest.warns(UserWarning, match="a region is not timed, and estimates decide"):
        assert explained(tune=True) == estimated
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not ON_GPU, reason="no GPU")
def test_a_gpu_times_regions(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXKERN_CACHE_DIR", str(tmp_path))
    tune._known.clear()
    x = jax.random.normal(jax.random.key(0), (32768, 4096))
    with jaxkern.accelerate(only="rows", tune=True):
        (found,) = jaxkern.explain(residual_norm)(x)
        own = jax.jit(residual_norm)(x)
    assert "measured" in found.reason and list(tmp_path.glob("*.times")), found
    np.testing.assert_allclose(own[0], jax.jit(lambda x: residual_norm(x))(x)[0], rtol=1e-5, atol=1e-6)
    tune._known.clear()


def test_times_are_taken_while_a_program_is_lowered(given, monkeypatch):
    """By calls of compiled functions in a thread of their own, here on the CPU."""
    monkeypatch.setattr(timing, "COLD", 1 << 10)
    monkeypatch.setattr(timing, "READING", 1e-4)
    found, device = [], jax.devices("cpu")[0]

    def timed(functions, wide):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            own = lambda f: tune._timed(tune._compiled(f, wide, device), wide, device)
            found.extend(pool.map(own, functions))
        return found

    monkeypatch.setattr(tune, "timed", timed)
    mesh, few = jax.make_mesh((1,), "d"), jax.ShapeDtypeStruct((128, 512), "float32")
    with jax.set_mesh(mesh), jaxkern.accelerate(only="rows", tune=True):
        text = jax.jit(residual_norm).trace(few).lower(lowering_platforms=("cuda",)).as_text()
    (times,) = found
    assert "module @jit_residual_norm" in text and (times == UNKNOWN or min(times) > 0)
