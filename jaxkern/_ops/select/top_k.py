"""top_k: the k largest elements of rows. The kernels are in ffi/kernels/select/top_k.cuh.

    top_k_p  (x [..., columns])  ->  values [..., k] like x, indices int32 [..., k]

With a parameter `function`, a Function of one element, the values are of function(x) and of its type. Values descend; of equal ones
those of lower columns come first. Floats are in the total order of IEEE 754, as in lax.top_k.
"""

import math
import sys
import typing

import jax.numpy as jnp
from jax import lax

from jaxkern._core import algorithms, compat, launch
from jaxkern._core.define import ceil_div, cuda_type
from jaxkern._core.device import H200
from jaxkern._core.params import Params
from jaxkern._core.primitive import bind, has_tangent, set_jvp
from jaxkern._core.signature import FLAT, Signature, primitive
from jaxkern._ops.select import sort_rows, tuning
from jaxkern._ops.select.elements import DTYPES, element, gathered, taken_along

HEADER, FUNCTION_HEADER = "select/top_k.cuh", "select/top_k_function.cuh"
FUNCTOR = "Function"
TOP_K = Params(HEADER, "TopKArgs")

ALGORITHMS = ("warp", "block", "split", "network", "sort")
APPLIED = tuple(d for d in DTYPES if not d.startswith("float8"))  # of operands and results of functions
# The algorithms that sort whole rows: their names here and in sort_rows.py.
SORTS = {"network": "network", "sort": "block"}
THREADS, ROWS = 256, 8  # of a block
RESIDENT = 4  # blocks that a multiprocessor holds: each has 41 KB of shared memory, and 64 registers in a thread
MOST = 2048  # the greatest k of a selection: half of the 4096 elements that a block holds are to be other candidates
MOST_PARTS = 2048  # elements of a tile of candidates
WARP_WIDTH = 1024  # 32 elements in each lane


class Problem(typing.NamedTuple):
    """The k largest of rows of so many columns. applied: whether a function is applied to elements."""

    rows: int
    columns: int
    k: int
    dtype: str = "float32"
    applied: bool = False


def fits(algorithm: str, p: Problem, device=None) -> bool:
    if p.dtype not in DTYPES or not 0 < p.k <= p.columns or not 0 < p.rows < 2**31 or p.columns >= 2**31:
        return False
    if algorithm in SORTS:
        return not p.applied and sort_rows.fits(SORTS[algorithm], _sort_of(p), device)
    if algorithm == "warp":
        return p.columns <= WARP_WIDTH and p.k <= 32
    if algorithm == "split":
        return p.k <= MOST and p.columns >= 2 * p.k and p.rows * p.columns < 2**31 * tuning.PART
    return algorithm == "block" and p.k <= MOST


def _sort_of(p: Problem) -> sort_rows.Problem:
    return sort_rows.Problem(p.rows, p.columns, p.dtype)


def _sorted_by(p: Problem, device) -> str | None:
    """The algorithm of SORTS for whole rows, if there is one."""
    sort = sort_rows.choose(_sort_of(p), device)
    return next((name for name, of in SORTS.items() if of == sort and fits(name, p, device)), None)


def _is_sorted_faster(p: Problem, device) -> bool:
    widths = tuning.SORTED_OF_K[max(2, jnp.dtype(p.dtype).itemsize)]
    of_k = next((of_k for width, of_k in widths if p.columns <= width), 0)
    return p.columns <= p.k * of_k * (tuning.SORTED_OF_FEW if p.rows <= device.sm_count else 1)


def choose(p: Problem, device=None) -> str | None:
    """The algorithm; None: XLA."""
    if p.columns <= tuning.SORTED_NARROW and fits("network", p):
        return "network"
    if fits("warp", p) and (p.k <= tuning.WARP_MOST or (p.applied and p.columns <= tuning.NARROW)):
        return "warp"
    if (name := _sorted_by(p, device)) and (name == "network" or p.k > MOST or _is_sorted_faster(p, device or H200)):
        return name
    if fits("split", p) and _parts(p, device or H200) > 1:
        return "split"
    return "block" if fits("block", p) else None


algorithms.register(sys.modules[__name__], "top_k")


def _reader(x, selected, function) -> tuple[str, str, str]:
    """A header, the template arguments for elements that kernels read and select, and the source of the function."""
    bits, order = element(selected).split(", ")
    if function is None:
        return HEADER, f"jaxkern::Same<{bits}>, {order}", ""
    applied = f"jaxkern::Applied<{cuda_type(x.dtype)}, {cuda_type(selected)}, {FUNCTOR}>"
    return FUNCTION_HEADER, f"{applied}, {order}", function.source(FUNCTOR)


def _parts(p: Problem, device) -> int:
    """How many blocks share a row so that all multiprocessors read, and parts are long."""
    few = _joins_few(p)
    least = tuning.PART if few else max(tuning.PART, tuning.PART_OF_K * p.k)
    parts = min(device.sm_count * RESIDENT // p.rows, p.columns // least, MOST_PARTS)
    if few and parts > 1:
        parts = max(parts, min(ceil_div(p.k, tuning.FEW_MEAN), p.columns // tuning.FEW_PART))
    return parts


def _joins_few(p: Problem) -> bool:
    """Whether parts give fewer than k candidates. A function is evaluated once, so its parts are not read again. Of 16 bits many
    elements are equal, and the largest are in the first part."""
    return p.k >= tuning.FEW_OF_PART and not p.applied and jnp.dtype(p.dtype).itemsize == 4


def _of_part(p: Problem, parts: int) -> int:
    """Candidates of a part: k, or so many that if the largest are anywhere, it is unlikely that all of a part are among them."""
    if not _joins_few(p):
        return p.k
    mean = p.k / parts
    return min(p.k, math.ceil(mean + 6 * math.sqrt(mean) + 8))


def _power(k: int) -> int:
    """The power of two from k on."""
    return 1 << (k - 1).bit_length()


def _loads(vectors: bool, size: int, columns: int) -> tuple[int, int]:
    """(elements of a load, loads at once) of a block, for elements of `size` bytes. vectors: whether rows are aligned."""
    vector = 16 // size if vectors and columns * size % 16 == 0 else 1
    return vector, 8 if vector == 1 else min(4, 16 // vector)


def loads_of_warp(vectors: bool, size: int, columns: int) -> tuple[int, int]:
    """(elements of a load, loads of a lane) for a row that a warp holds."""
    vector, _ = _loads(vectors, size, columns)
    if vector > 1 and 32 * vector > columns:
        vector //= 2  # more lanes have elements
    return vector, 1 << (ceil_div(columns, 32 * vector) - 1).bit_length()


def plan(device, operands, results, *, k, function=None) -> launch.Plan | None:
    """The plan for x [..., columns]; None if there is no kernel for it."""
    del results
    (x,) = operands
    selected = x.dtype if function is None else function.out_dtypes[0]
    if function is not None and not (function.fits() and {x.dtype.name, selected.name} <= set(APPLIED)):
        return None
    *batch, columns = x.shape
    p = Problem(math.prod(batch), columns, k, selected.name, function is not None)
    forced = algorithms.forced("top_k")
    algorithm = algorithms.pick("top_k", forced, p, device) if forced != "xla" else None
    if algorithm is None:
        return None
    if algorithm in SORTS:
        to = sort_rows.Results(k, launch.result(0), launch.result(1))
        step = sort_rows.whole_rows(SORTS[algorithm], _sort_of(p), to, True, element(x.dtype, "Total"))
        return launch.Plan(algorithm, (step,))
    header, read_as, source = _reader(x, selected, function)
    outputs = {"values": launch.result(0), "indices": launch.result(1), "candidates": launch.null}
    whole = {"rows": p.rows, "width": columns, "parts": 1, "part": columns}
    whole |= {"elements": launch.operand(0), "columns": columns, "of_part": k}

    def warps(vectors):
        vector, packs = loads_of_warp(vectors, x.dtype.itemsize, columns)
        args = [TOP_K(x=launch.operand(0), **outputs, **whole, k=k, sorted=0, tile_bits=0)]
        return launch.Launch(
            header, f"TopKWarp<{read_as}, {vector}, {packs}>", args, ceil_div(p.rows, ROWS), THREADS, source=source
        )

    def blocks(vectors, k=k, **given):
        vector, packs = _loads(vectors, x.dtype.itemsize, columns)
        args = outputs | whole | given
        tiles, blocks = ceil_div(args["part"], THREADS * vector * packs), p.rows * args["parts"]
        args = TOP_K(**args, x=launch.operand(0), k=k, sorted=_power(k), tile_bits=(tiles - 1).bit_length())
        name = f"TopKBlock<{read_as}, {vector}, {packs}>"
        return launch.Launch(header, name, [args], blocks, THREADS, source=source)

    if algorithm == "warp":
        return launch.Plan(algorithm, (warps(True),), unaligned=(warps(False),))
    if algorithm == "block":
        return launch.Plan(algorithm, (blocks(True),), unaligned=(blocks(False),))
    # Parts are whole vectors, and none is empty.
    part = ceil_div(ceil_div(columns, max(2, _parts(p, device))), 16) * 16
    parts = ceil_div(columns, part)
    of_part = _of_part(p, parts)
    split = lambda vectors: blocks(vectors, k=of_part, parts=parts, part=part, candidates=launch.scratch())
    vector, packs = _loads(True, 8, parts * of_part)
    read = {"x": launch.scratch(), "width": parts * of_part, "parts": parts, "part": part, "of_part": of_part}
    args = TOP_K(**(outputs | whole | read), k=k, sorted=_power(k), tile_bits=0)
    join = launch.Launch(HEADER, f"TopKJoin<{element(selected)}, {vector}, {packs}>", [args], p.rows, THREADS)
    return launch.planned(algorithm, (split(True), join), 8 * p.rows * parts * of_part, (split(False), join))


# ---- the primitive


def reference(x, *, k, function=None):
    if function is None:
        return lax.top_k(x, k)
    return bind(top_k_p, *function(x), k=k)


def _adapt(prim, x, *, k, function=None):
    """More than kernels select are the first of the sorted row."""
    del prim
    if k <= MOST or algorithms.forced("top_k") != "auto":
        return None
    p = Problem(math.prod(x.shape[:-1]), x.shape[-1], k, x.dtype.name, function is not None)
    return None if choose(p) else by_sorting


def by_sorting(x, *, k, function=None):
    if function is not None:
        (x,) = function(x)
    (indices,) = bind(sort_rows.sort_rows_p, _descending(x), None, descending=False, wanted=("indices",))
    return [taken_along(x, indices[..., :k], x.ndim - 1), indices[..., :k]]


def _descending(x):
    """Integers that ascend where elements descend, floats in the total order."""
    size = 8 * x.dtype.itemsize
    if x.dtype == bool:
        return ~x.astype(jnp.uint8)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return ~x
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"int{size}"))
    return ~(bits ^ (bits >> (size - 1)) & (2 ** (size - 1) - 1))


def _shard(prim, over, x, **given):
    """The k largest of each device's part are candidates."""
    if not over["columns"]:
        return bind(prim, x, **given)
    columns, k = x.shape[-1], given["k"]
    values, indices = bind(prim, x, **given | {"k": min(k, columns)})
    indices = indices + lax.axis_index(over["columns"]).astype(jnp.int32) * columns
    values, indices = _exchanged(values, indices, over["columns"])
    values, at = bind(prim, values, k=k)
    return [values, jnp.take_along_axis(indices, at, -1)]


def _exchanged(values, indices, axes):
    """Values and int32 indices of all devices along the last dimension, in one message of integers that hold the bits of both."""
    dtype, word = values.dtype, jnp.int64 if values.dtype.itemsize == 8 else jnp.int32
    floats = jnp.issubdtype(dtype, jnp.floating)
    bits = jnp.dtype(f"uint{jnp.finfo(dtype).bits}") if floats else dtype
    own = lax.bitcast_convert_type(values, bits) if floats else values
    message = jnp.stack([own.astype(word), indices.astype(word)])
    values, indices = lax.all_gather(message, axes, axis=message.ndim - 1, tiled=True)
    values = values.astype(bits)
    return lax.bitcast_convert_type(values, dtype) if floats else values, indices.astype(jnp.int32)


def _whole(operands, params) -> set:
    """If candidates were all elements, other dimensions are split in place of the columns."""
    return {"columns"} if 2 * params["k"] >= operands.x.shape[-1] else set()


def _results(operands, params) -> list[str]:
    del operands
    function = params.get("function")
    return [f"{'x' if function is None else function.out_dtypes[0].name} *batch k", "int32 *batch k"]


top_k_p = primitive(
    "jaxkern_top_k",
    Signature({"x": "any *batch columns"}, _results, layout=FLAT, exact={"columns"}, whole=_whole),
    reference,
    shard=_shard,
    makes_nan=False,
    plan=plan,
    adapt=_adapt,
    dtypes=DTYPES,
)


def _jvp(primals, tangents, *, k, function=None):
    """Values are gathered, and so are their tangents."""
    (x,), (t,) = primals, tangents
    if function is None:
        values, indices = bind(top_k_p, x, k=k)
        return [values, indices], [gathered(values, t, indices), compat.zero_tangent(indices)]
    values, indices = bind(top_k_p, x, k=k, function=function)
    slope = compat.zero_tangent(values)
    if function.inexact_results and has_tangent(t):
        (slope,) = function.jvp((0,))(*(taken_along(a, indices, x.ndim - 1) for a in (x, t)))
    return [values, indices], [slope, compat.zero_tangent(indices)]


set_jvp(top_k_p, _jvp)
