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

HEADER = "select/search.cuh"
ARGS = Params(HEADER, "SearchArgs")
DTYPES = {"float32": "Float", "int32": "Signed", "uint32": "Unsigned"}
THREADS, KEYS, QUERIES, RESIDENT = 256, 4096, 4, 8


def plan(device, operands, results, *, right) -> launch.Plan | None:
    """The plan of search; None for arrays that 31 bits do not number."""
    del results
    queries, array = operands
    size, count = math.prod(array.shape), math.prod(queries.shape)
    if not 0 < size < 2**31:
        return None
    args = ARGS(
        array=launch.operand(1),
        queries=launch.operand(0),
        results=launch.result(0),
        count=count,
        size=size,
        stride=ceil_div(size, KEYS),
    )
    name = f"Search<jaxkern::Order::k{DTYPES[array.dtype.name]}, {'true' if right else 'false'}>"
    blocks = min(RESIDENT * device.sm_count, ceil_div(count, THREADS * QUERIES))
    return launch.Plan("blocks", (launch.Launch(HEADER, name, [args], blocks, THREADS),))


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
    dtypes=tuple(DTYPES),
)

set_zero_jvp(search_p)
