"""top_k: the k largest elements of rows. The kernels are in ffi/kernels/select/top_k.cuh.

    top_k_p  (x [..., columns])  ->  values [..., k] like x, indices int32 [..., k]

Values descend; of equal ones those of lower columns come first. Floats are in the total order of IEEE 754, as in lax.top_k.
"""

import math
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkern._core import algorithms, compat, launch, validate
from jaxkern._core.define import ceil_div
from jaxkern._core.device import H200
from jaxkern._core.params import Params
from jaxkern._core.primitive import bind, has_tangent, set_jvp
from jaxkern._core.signature import FLAT, Signature, primitive

HEADER = "select/top_k.cuh"
TOP_K = Params(HEADER, "TopKArgs")

ALGORITHMS = ("warp", "block", "split")
DTYPES = (
    *("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"),
    *("int8", "int16", "int32", "uint8", "uint16", "uint32", "bool"),
)
THREADS, ROWS = 256, 8  # of a block
RESIDENT = 4  # blocks that a multiprocessor holds: each has 41 KB of shared memory, and 64 registers in a thread
MOST = 1024  # the greatest k: of the 4096 elements that a block holds, most are to be other candidates
WARP_WIDTH = 1024  # 32 elements in each lane

# Not measured: a warp takes about 35 instructions for each of the k, and 4 for each element of a lane.
WARP_MOST = 16
# Not measured: a part has so many elements, or so many times k, that reading it takes longer than selecting.
PART, PART_OF_K = 8192, 16


class Problem(typing.NamedTuple):
    """Rows of so many columns, of which the k largest are wanted."""

    rows: int
    columns: int
    k: int
    dtype: str = "float32"


def fits(algorithm: str, p: Problem, device=None) -> bool:
    del device
    if p.dtype not in DTYPES or not 0 < p.k <= min(p.columns, MOST) or not 0 < p.rows < 2**31 or p.columns >= 2**31:
        return False
    if algorithm == "warp":
        return p.columns <= WARP_WIDTH and p.k <= 32
    if algorithm == "split":
        return p.columns >= 2 * p.k and p.rows * p.columns < 2**31 * PART
    return algorithm == "block"


def choose(p: Problem, device=None) -> str | None:
    """The algorithm; None: XLA."""
    if fits("warp", p) and p.k <= WARP_MOST:
        return "warp"
    if fits("split", p) and _parts(p, device or H200) > 1:
        return "split"
    return "block" if fits("block", p) else None


def element(dtype) -> str:
    """An element as kernels read it: its bits, and their order."""
    order = "Float" if jnp.issubdtype(dtype, jnp.floating) else "Signed" if dtype.kind == "i" else "Unsigned"
    return f"uint{8 * dtype.itemsize}_t, jaxkern::Order::k{order}"


def largest(dtype) -> int:
    """The bits of the largest number that is not NaN; 0 for types without NaN."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return 0
    most = np.array(np.inf, dtype)
    most = most if np.isinf(most) else np.array(jnp.finfo(dtype).max, dtype)
    return int(most.view(f"uint{8 * dtype.itemsize}"))


algorithms.register(sys.modules[__name__], "top_k")


def _parts(p: Problem, device) -> int:
    """How many blocks share a row so that all multiprocessors read, and parts are long."""
    return min(device.sm_count * RESIDENT // p.rows, p.columns // max(PART, PART_OF_K * p.k))


def plan(device, operands, results, *, k) -> launch.Plan | None:
    """The plan for x [..., columns]; None if there is no kernel for it."""
    del results
    (x,) = operands
    *batch, columns = x.shape
    p = Problem(math.prod(batch), columns, k, x.dtype.name)
    forced = algorithms.forced("top_k")
    algorithm = algorithms.pick("top_k", forced, p, device) if forced != "xla" else None
    if algorithm is None:
        return None
    outputs = {"values": launch.result(0), "indices": launch.result(1), "candidates": launch.null}
    whole = {"rows": p.rows, "width": columns, "k": k, "parts": 1, "part": columns, "sorted": 1 << (k - 1).bit_length()}

    def loads(vectors, size, width):
        """Elements of a load, and loads at once."""
        vector = 16 // size if vectors and width * size % 16 == 0 else 1
        return vector, 8 if vector == 1 else min(4, 16 // vector)

    def warps(vectors):
        vector, _ = loads(vectors, x.dtype.itemsize, columns)
        packs = 1 << (ceil_div(columns, 32 * vector) - 1).bit_length()
        args = [TOP_K(x=launch.operand(0), **outputs, **whole)]
        return launch.Launch(
            HEADER, f"TopKWarp<{element(x.dtype)}, {vector}, {packs}>", args, ceil_div(p.rows, ROWS), THREADS
        )

    def blocks(vectors, joins=False, size=x.dtype.itemsize, width=columns, **given):
        vector, packs = loads(vectors, size, width)
        read = {"x": launch.scratch() if joins else launch.operand(0), "width": width, "part": width}
        args = TOP_K(**(outputs | whole | read | given))
        name = f"TopKBlock<{element(x.dtype)}, {'true' if joins else 'false'}, {vector}, {packs}>"
        return launch.Launch(HEADER, name, [args], p.rows * given.get("parts", 1), THREADS)

    if algorithm == "warp":
        return launch.Plan(algorithm, (warps(True),), unaligned=(warps(False),))
    if algorithm == "block":
        return launch.Plan(algorithm, (blocks(True),), unaligned=(blocks(False),))
    # Parts are whole vectors, and none is empty.
    part = ceil_div(ceil_div(columns, max(2, _parts(p, device))), 16) * 16
    parts = ceil_div(columns, part)
    join = blocks(True, True, 8, parts * k)
    split = lambda vectors: blocks(vectors, parts=parts, part=part, candidates=launch.scratch())
    return launch.planned(algorithm, (split(True), join), 8 * p.rows * parts * k, (split(False), join))


# ---- the primitive


def reference(x, *, k):
    return lax.top_k(x, k)


def _shard(prim, over, x, *, k):
    """The k largest of each device's part are candidates."""
    if not over["columns"]:
        return bind(prim, x, k=k)
    columns, (values, indices) = x.shape[-1], bind(prim, x, k=min(k, x.shape[-1]))
    indices = indices + lax.axis_index(over["columns"]).astype(jnp.int32) * columns
    gathered = lambda a: lax.all_gather(a, over["columns"], axis=a.ndim - 1, tiled=True)
    values, at = bind(prim, gathered(values), k=k)
    return [values, jnp.take_along_axis(gathered(indices), at, -1)]


top_k_p = primitive(
    "jaxkern_top_k",
    Signature({"x": "any *batch columns"}, ["x *batch k", "int32 *batch k"], layout=FLAT, exact={"columns"}),
    reference,
    shard=_shard,
    makes_nan=False,
    plan=plan,
    dtypes=DTYPES,
)


def _jvp(primals, tangents, *, k):
    """Values are gathered, and so are their tangents."""
    values, indices = bind(top_k_p, *primals, k=k)
    return [values, indices], [gathered(values, tangents[0], indices), compat.zero_tangent(indices)]


def gathered(values, tangent, indices):
    """The tangent of values that were selected at these indices."""
    if not has_tangent(tangent):
        return compat.zero_tangent(values)
    return taken_along(tangent, indices, tangent.ndim - 1)


def taken_along(x, indices, axis):
    """`jnp.take_along_axis` of indices that are in bounds. On a mesh with explicit axes the result is split as the indices are."""
    x, whole = validate.whole(x, axis), validate.whole(indices, axis)
    found = jnp.take_along_axis(x, whole, axis, mode="promise_in_bounds")
    return validate.split_like(found, jax.typeof(indices))


set_jvp(top_k_p, _jvp)
