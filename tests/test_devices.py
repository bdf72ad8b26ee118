"""Programs need no more shared memory than a block has, and XLA runs them on GPUs that kernels are not written for."""

import re

import jax
import jax.numpy as jnp
import pytest
from plans import needs_runtime

import jaxkern
from jaxkern._core import device, launch, registry

DEVICES = {
    48: device.Device(20, 80, 48 << 10),  # what every GPU gives a block
    99: device.Device(84, 86, 99 << 10),
    163: device.A100,
    227: device.H200,
}

pytestmark = needs_runtime


def of(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def gradient(f):
    return jax.value_and_grad(lambda *args: f(*args).astype("float32").sum())


def programs():
    """(function, arguments) of operations with kernels that use dynamic shared memory, and of some that do not."""
    ids = of(100_000, dtype="int32")
    for width in (777, 40_000, 200_000):
        for dtype in ("float32", "bfloat16", "float64"):
            yield gradient(jaxkern.softmax), [of(512, width, dtype=dtype)]
    yield gradient(lambda x: jaxkern.softmax(x, axis=1)), [of(8, 4000, 100)]
    for width, dtype in ((96, "bfloat16"), (1001, "bfloat16"), (4096, "float32"), (20_000, "float32")):
        norm = gradient(lambda x, s, b: jaxkern.layer_norm(x, s, b))
        yield norm, [of(4096, width, dtype=dtype), of(width), of(width)]
    yield gradient(lambda x, s, b: jaxkern.group_norm(x, 32, s, b)), [of(8, 4096, 256), of(256), of(256)]
    for classes in (1000, 50_257, 256_000):
        yield gradient(jaxkern.softmax_cross_entropy), [of(512, classes), of(512, dtype="int32")]
    for width in (1, 3, 64):
        yield gradient(lambda x, i: jaxkern.segment_sum(x, i, 5000)), [of(100_000, width), ids]
        yield gradient(lambda x, i: jaxkern.segment_softmax(x, i, 5000)), [of(100_000, width), ids]
    yield lambda i: jaxkern.sort_indices(i, 5000), [ids]
    yield lambda x, i, y: jaxkern.index_add(x, 0, i, y), [of(5000, 64), ids, of(100_000, 64)]
    yield lambda x: jaxkern.quantize_blocks(x, transposed=True), [of(4096, 4096, dtype="bfloat16")]


@pytest.mark.parametrize("kilobytes", DEVICES)
def test_shared_memory(kilobytes, monkeypatch, x64):
    """Checks every launch list of every program; XLA runs the operations without one."""
    gpu = DEVICES[kilobytes]
    monkeypatch.setattr(device, "this_device", lambda: gpu)
    most = 0
    for f, arguments in programs():
        lowered = jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        lists = launch.programs(lowered)
        assert lists or kilobytes == 48
        most = max([most, *(int(size) for text in lists for size in re.findall(r" shared=(\d+) ", text))])
    assert 16 << 10 < most <= gpu.shared_memory


def test_gpus_that_kernels_are_not_written_for(monkeypatch):
    """XLA runs. A warning says why, and so does `explain`."""
    monkeypatch.setattr(device, "this_device", lambda: device.Device(40, 75, 64 << 10))
    monkeypatch.setattr(registry, "gpu_present", lambda: True)
    registry._problem_here.cache_clear()
    try:
        with pytest.warns(UserWarning, match="compute capability 8.0 or later, and this one has 7.5"):
            lowered = jax.jit(jaxkern.softmax).trace(jnp.ones((8, 512))).lower(lowering_platforms=("cuda",)).as_text()
        assert "jaxkern_softmax" not in lowered and "stablehlo.exponential" in lowered
        table, ids = jnp.zeros((1000, 64), jnp.bfloat16), jnp.zeros(4096, jnp.int32)
        (decision,) = jaxkern.explain(jax.grad(lambda t, i: t[i].sum()))(table, ids)
        assert not decision.taken and "this one has 7.5" in decision.reason
    finally:
        registry._problem_here.cache_clear()
