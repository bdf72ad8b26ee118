"""search: positions in an ascending array. The kernel is in ffi/kernels/select/search.cuh.

    search_p  (queries [...], array [size])  ->  int32 like queries

How many elements are less than each query or, with right=True, not greater. NaN is the greatest number, and -0 equals 0.
"""

import functools
import math

import jax
import jax.numpy as jnp

from jaxkern._core import launch
from jaxkern._core.define import ceil_div
from jaxkern._core.params import Params
from jaxkern._core.primitive import set_zero_jvp
from jaxkern._core.signature import FLAT, Signature, local, primitive
from jaxkern._ops.select import tuning
from jaxkern._ops.select.elements import element, largest

HEADER = "select/search.cuh"
ARGS = Params(HEADER, "SearchArgs")
DTYPES = ("float32", "int32", "uint32", "float64", "int64", "uint64")
QUERIES = 4  # of a thread at once


def plan(device, operands, results, *, right) -> launch.Plan | None:
    """The plan of search; None for arrays that 31 bits do not number."""
    del results
    queries, array = operands
    size, count, item = math.prod(array.shape), math.prod(queries.shape), array.dtype.itemsize
    if not 0 < size < 2**31:
        return None
    few = count < tuning.MANY_QUERIES or size * item <= tuning.SEARCH_FEW[1]
    threads, room, resident = tuning.SEARCH_FEW if few else tuning.SEARCH_MANY
    room = min(room, device.shared_memory // 1024 * 1024)
    blocks = min(resident * device.sm_count, ceil_div(count, threads * QUERIES))

    def steps(vectors):
        vector = 16 // item if vectors else 1
        stride = 1 if size * item <= room else ceil_div(ceil_div(size * item, room), vector) * vector
        vector = 1 if stride == 1 else vector
        args = ARGS(
            array=launch.operand(1),
            queries=launch.operand(0),
            results=launch.result(0),
            count=count,
            largest=largest(array.dtype),
            size=size,
            stride=stride,
        )
        name = f"Search<{element(array.dtype)}, {'true' if right else 'false'}, {threads}, {vector}>"
        return (launch.Launch(HEADER, name, [args], blocks, threads, shared=item * ceil_div(size, stride)),)

    return launch.Plan("blocks", steps(True), unaligned=steps(False))


def reference(queries, array, *, right):
    return jnp.searchsorted(array, queries, side="right" if right else "left").astype(jnp.int32)


def _batch(prim, operands, dims, params):
    if dims.array is None:
        return None
    return jax.vmap(functools.partial(reference, **params), tuple(dims))(*operands), 0


search_p = primitive(
    "jaxkern_search",
    Signature({"queries": "T *batch", "array": "T size"}, "int32 *batch", layout=FLAT, whole={"size"}),
    reference,
    batch=_batch,
    shard=local,
    plan=plan,
    dtypes=DTYPES,
)

set_zero_jvp(search_p)
