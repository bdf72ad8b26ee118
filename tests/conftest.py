"""What every test shares: the devices are found once, and the types stay 32 bits wide unless asked."""

import collections
import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several test processes share a GPU

import jax
import pytest

from jaxkern._core import compat

ON_GPU = jax.default_backend() == "gpu"


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line(
        "markers",
        "sweep(n): many cases that differ in the kernel; without a GPU, where all run the same code, every nth",
    )
    config.addinivalue_line("markers", "process: runs a program for many seconds, and so begins before the others")


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: "process" not in item.keywords)
    if not ON_GPU:
        left_out = [item for item, number in _numbered(items) if number % item.get_closest_marker("sweep").args[0]]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _numbered(items):
    """(item, its number among the cases of its test) of tests that are marked with `sweep`."""
    seen = collections.Counter()
    for item in items:
        if item.get_closest_marker("sweep"):
            yield item, seen[item.function]
            seen[item.function] += 1


@pytest.fixture
def quick_compilation():
    """On the CPU, XLA spends no time on making its own code fast: for tests that compile much and run little."""
    if ON_GPU:
        yield
        return
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def highest_precision():
    """Products of float32 with all its bits, which GPUs do not give unless asked."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def x64():
    """float64 arrays inside the test; its other arrays must name their dtype."""
    with compat.enable_x64():
        yield
