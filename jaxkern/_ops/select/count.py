"""count: how often each number occurs. The kernels are in ffi/kernels/select/count.cuh.

    count_p  (x [elements])  ->  int32 [bins]

Negative numbers count as 0; numbers from `bins` on are not counted.
"""

import math
import sys
import typing

import jax.numpy as jnp
from jax import lax

from jaxkern._core import algorithms, launch, validate
from jaxkern._core.define import ceil_div
from jaxkern._core.device import H200
from jaxkern._core.params import Params
from jaxkern._core.primitive import bind, set_zero_jvp
from jaxkern._core.signature import FLAT, Signature, primitive
from jaxkern._ops.indexing.sort import Scratch
from jaxkern._ops.select import sort_rows, tuning

HEADER = "select/count.cuh"
ARGS = Params(HEADER, "CountArgs")
ALGORITHMS = ("shared", "global", "windows")
DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
THREADS, SHARED_BINS = 512, 12288
WINDOW_BITS, MOST_WINDOW_BITS = 12, 13  # log2 of the bins in a window


class Problem(typing.NamedTuple):
    """So many elements into so many bins."""

    bins: int
    elements: int
    dtype: str = "int32"


def fits(algorithm: str, p: Problem, device=None) -> bool:
    del device
    exists = p.dtype in DTYPES and 0 < p.bins < 2**31 and 0 < p.elements < 2**31
    if algorithm == "windows":
        return exists and p.bins <= sort_rows.DIGITS << MOST_WINDOW_BITS
    return exists and (algorithm == "global" or (algorithm == "shared" and p.bins <= SHARED_BINS))


def choose(p: Problem, device=None) -> str | None:
    """The algorithm; None: XLA."""
    blocks = min(tuning.COUNT_RESIDENT * (device or H200).sm_count, ceil_div(p.elements, THREADS * 16))
    if fits("shared", p) and p.bins * blocks * tuning.ELEMENTS_OF_BIN <= max(p.elements, 2**16):
        return "shared"
    if fits("windows", p) and p.bins > SHARED_BINS and p.elements >= tuning.WINDOWS_ELEMENTS:
        return "windows"
    return "global" if fits("global", p) else None


algorithms.register(sys.modules[__name__], "bincount")


def plan(device, operands, results, *, bins) -> launch.Plan | None:
    """The plan for x [elements]; None if there is no kernel for it."""
    del results
    (x,) = operands
    p = Problem(bins, math.prod(x.shape), x.dtype.name)
    forced = algorithms.forced("bincount")
    algorithm = None if forced == "xla" else algorithms.pick("bincount", forced, p, device)
    if algorithm is None:
        return None
    shift = max(WINDOW_BITS, (bins - 1).bit_length() - 8)
    scratch, x_in, sorted_first = Scratch(), launch.operand(0), []
    if algorithm == "windows":
        x_in = scratch.take(p.elements * x.dtype.itemsize)
        sorted_first = sort_rows.digit_passes(
            sort_rows.Problem(1, p.elements, x.dtype.name),
            device,
            f"uint{8 * x.dtype.itemsize}_t, jaxkern::Order::kUnsigned",
            [x_in],
            [launch.null],
            scratch,
            shift=min(shift, 8 * (x.dtype.itemsize - 1)),
            width=p.elements,
            largest=0,
            flipped=0,
        )
    args = [ARGS(x=x_in, result=launch.result(0), count=p.elements, bins=bins, shift=shift)]

    def steps(vectors):
        vector = 16 // x.dtype.itemsize
        vector = vector if vectors and p.elements % vector == 0 else 1
        packs = max(1, 16 // vector)
        resident = tuning.WINDOWS_RESIDENT if algorithm == "windows" else tuning.COUNT_RESIDENT
        blocks = min(resident * device.sm_count, ceil_div(p.elements, THREADS * vector * packs))
        name = f"Count{algorithm.capitalize()}<{x.dtype.name}_t, {vector}, {packs}>"
        memset = launch.Memset(launch.result(0), 4 * bins)
        return (memset, *sorted_first, launch.Launch(HEADER, name, args, blocks, THREADS))

    return launch.Plan(algorithm, steps(True), scratch.bytes, unaligned=steps(False))


# ---- the primitive


def bin_of(x, bins):
    """The bin of each number, an int32; `bins` for numbers that are not counted. The type of x need not hold `bins`."""
    return jnp.clip(x, 0, min(bins, int(jnp.iinfo(x.dtype).max))).astype(jnp.int32)


def reference(x, *, bins):
    return jnp.zeros(bins, jnp.int32).at[bin_of(x, bins)].add(1, mode="drop")


def _batch(prim, operands, dims, params):
    """The numbers of each element of the batch have bins of their own."""
    x, bins = jnp.moveaxis(operands.x, dims.x, 0), params["bins"]
    size = len(x)
    if size * bins >= 2**31:
        return lax.map(lambda x: bind(prim, x, **params), x), 0
    own, first = bin_of(x, bins), bins * jnp.arange(size, dtype=jnp.int32)[:, None]
    at = jnp.where(own < bins, own + first, size * bins)
    flat = validate.mergeable(at, at.ndim).reshape(-1)
    return bind(prim, flat, bins=size * bins).reshape(size, bins), 0


def _shard(prim, over, x, *, bins):
    found = bind(prim, x, bins=bins)
    return lax.psum(found, over["elements"]) if over["elements"] else found


count_p = primitive(
    "jaxkern_count",
    Signature({"x": "integer elements"}, "int32 bins", layout=FLAT, exact={"elements"}),
    reference,
    batch=_batch,
    shard=_shard,
    plan=plan,
    dtypes=DTYPES,
)

set_zero_jvp(count_p)
