"""What every test shares: the devices are found once, and the types stay 32 bits wide unless asked."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several test processes share a GPU

import jax
import pytest

from jaxkern._core import compat

ON_GPU = jax.default_backend() == "gpu"


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "process: runs a program for many seconds, and so begins before the others")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: "process" not in item.keywords)
    if not ON_GPU:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


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
def x64():
    """float64 arrays inside the test; its other arrays must name their dtype."""
    with compat.enable_x64():
        yield
