"""sort_indices: the order of updates by row, its plan, and that equal sorts of a program become one. Needs no GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from indexed import INDEX_DTYPES, numpy_rows

from jaxkern._core import compat, device, launch, registry
from jaxkern._ops.indexing import sort

needs_nvrtc = pytest.mark.skipif(registry.kernels.module is None or bool(registry.kernels.module.compiler()[1]),
                                 reason=registry.kernels.reason or "NVRTC cannot be used")
DEVICES = [device.H200, device.A100, device.Device(84, 86, 99 << 10), device.Device(170, 120, 99 << 10)]
SIZES = [(1, 1, 1), (1, 2048, 3), (1, 65537, 512), (7, 3000, 100_000), (1, 1 << 19, 1 << 18), (1, 1_166_243, 169_343),
         (1, 1 << 22, 2**31 - 2), (64, 20_000, 1000), (1, 1 << 30, 3)]


@pytest.mark.parametrize("wrap, clip", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
def test_against_numpy(index_dtype, wrap, clip):
    batch, count, rows = 3, 200, 40
    with compat.enable_x64():
        limits = np.iinfo(index_dtype)
        index = np.random.default_rng(0).integers(max(limits.min, -90), min(limits.max, 90), (batch, count)).astype(index_dtype)
        keys, order = sort.sort_indices(jnp.asarray(index), rows=rows, wrap=wrap, clip=clip)
    row = np.stack([numpy_rows(i, rows, wrap, clip) for i in index])
    want = np.where(row < 0, batch * rows, row + rows * np.arange(batch)[:, None]).reshape(-1)
    np.testing.assert_array_equal(order, np.argsort(want, kind="stable"))
    np.testing.assert_array_equal(keys, np.sort(want))
    assert keys.dtype == order.dtype == np.uint32


def planned(batch, count, rows, gpu=device.H200, dtype="int32", wrap=False):
    index = jax.core.ShapedArray((batch, count), jnp.dtype(dtype))
    out = [jax.core.ShapedArray((batch * count,), jnp.dtype("uint32"))] * 2
    return sort.plan(gpu, [index], out, rows=rows, wrap=wrap, clip=False), [index], out


@pytest.mark.parametrize("gpu", DEVICES)
@pytest.mark.parametrize("batch, count, rows", SIZES)
def test_every_bit_of_the_keys_is_sorted(batch, count, rows, gpu):
    plan, operands, out = planned(batch, count, rows, gpu)
    positions, bits = batch * count, 0
    for step in plan.launches:
        assert step.shared <= gpu.shared_memory and step.grid3()[0] < 2**31 and step.block3()[0] <= 1024
        if "Scatter" not in step.name:
            continue
        fields = step.args[1].members
        shift, width, tiles = (fields[k].value for k in range(3))
        assert shift == bits and tiles * sort.THREADS * int(step.name.split(",")[1]) >= positions
        counts, keys, payload = fields[4], fields[7], fields[8]
        assert counts.offset + 4 * (tiles + 1 << width) <= plan.scratch
        for buffer in (keys, payload):
            assert buffer.kind == "result" or buffer.offset + 4 * positions <= plan.scratch
        bits += width
    assert (keys, payload) == (launch.result(0), launch.result(1)) and 2**bits > batch * rows
    assert registry.kernels.module is None or registry.kernels.module.check(launch.text("sort", plan, operands, out)) == ""


def test_what_32_bits_do_not_number_is_sorted_by_xla():
    assert planned(1, 5, 2**31 - 1)[0] is None and planned(1, 2**30 + 1, 5)[0] is None
    with pytest.raises(ValueError, match="32 bits"):
        jax.eval_shape(lambda i: sort.sort_indices(i, rows=2**31, wrap=False, clip=False), jnp.zeros((2, 3), int))


@needs_nvrtc
def test_kernels_compile():
    names = {step.name for size in SIZES[:6] for step in planned(*size)[0].launches}
    for name in names:
        assert registry.kernels.module.compile(sort.HEADER, name, 90)[0]
    for capability in (80, 86, 89, 100, 120):
        assert registry.kernels.module.compile(sort.HEADER, max(names), capability)[0]


def test_vmap_sorts_each():
    index = jnp.array([[[3, -1, 0]], [[9, 1, 1]]])
    for one, keys, order in zip(index, *jax.vmap(lambda i: sort.sort_indices(i, rows=4, wrap=False, clip=False))(index)):
        want = sort.sort_indices(one, rows=4, wrap=False, clip=False)
        np.testing.assert_array_equal(keys, want[0])
        np.testing.assert_array_equal(order, want[1])
