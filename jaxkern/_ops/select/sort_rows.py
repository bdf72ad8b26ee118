"""sort_rows: rows in sorted order, and where their elements were. The kernels are in ffi/kernels/select/sort_rows.cuh and radix.cuh.

    sort_rows_p  (x [..., columns])  ->  values like x, indices int32 [..., columns], or one of the two, as `wanted` says

The order is stable, ascending or descending; NaN is the greatest number, and -0 equals 0.
"""

import math
import sys
import typing

import jax.numpy as jnp
from jax import lax

from jaxkern._core import algorithms, compat, launch
from jaxkern._core.define import ceil_div
from jaxkern._core.params import Params
from jaxkern._core.primitive import bind, set_jvp
from jaxkern._core.signature import FLAT, Signature, local, primitive
from jaxkern._ops.indexing.sort import Scratch
from jaxkern._ops.select import top_k, tuning
from jaxkern._ops.select.top_k import element, gathered, largest

NETWORK, RADIX = "select/sort_rows.cuh", "select/radix.cuh"
ARGS, RADIX_ARGS = Params(NETWORK, "SortRowsArgs"), Params(RADIX, "SortArgs")
ALGORITHMS = ("network", "block", "tiles")
DTYPES = (*top_k.DTYPES, "float64", "int64", "uint64")
WIDTH, WIDTH_8, THREADS, OWN = 4096, 2048, 256, 8  # of the network; for keys of 8 bytes
DIGITS = 256


class Problem(typing.NamedTuple):
    """Rows of so many columns."""

    rows: int
    columns: int
    dtype: str = "float32"


def _block(columns, size):
    """(threads, keys of a thread) of the smallest block that sorts a row; None if none does."""
    return next((b for b in tuning.BLOCKS if math.prod(b) >= columns and (size < 8 or b[1] <= 8)), None)


def _tile(p: Problem, indices: bool):
    """(threads, keys of a thread) of a tile, of a sort with indices or without."""
    if p.rows * p.columns < tuning.MANY:
        return tuning.SMALL
    if jnp.dtype(p.dtype).itemsize == 8:
        return tuning.LARGE_8
    if not indices:
        return tuning.LARGE if p.rows == 1 else tuning.ROWS
    places = lambda tile: ceil_div(p.columns, math.prod(tile)) * math.prod(tile)
    less = jnp.dtype(p.dtype).itemsize < 4 or tuning.LESS_COST * places(tuning.LESS) < places(tuning.LARGE)
    return tuning.LESS if less else tuning.LARGE


def fits(algorithm: str, p: Problem, device=None) -> bool:
    del device
    if p.dtype not in DTYPES or not 0 < p.columns < 2**31 or not 0 < p.rows < 2**31:
        return False
    if algorithm == "network":
        return p.columns <= (WIDTH_8 if jnp.dtype(p.dtype).itemsize == 8 else WIDTH)
    if algorithm == "block":
        return _block(p.columns, jnp.dtype(p.dtype).itemsize) is not None
    return (
        algorithm == "tiles" and p.columns >= DIGITS and p.rows * ceil_div(p.columns, math.prod(tuning.SMALL)) < 2**31
    )


def choose(p: Problem, device=None) -> str | None:
    """The algorithm; None: XLA."""
    width = tuning.NETWORK_WIDTH if jnp.dtype(p.dtype).itemsize == 4 else tuning.NETWORK_WIDTH_OTHER
    if p.columns <= width and fits("network", p):
        return "network"
    return next((name for name in ("block", "tiles") if fits(name, p, device)), None)


algorithms.register(sys.modules[__name__], "sort")


def plan(device, operands, results, *, descending, wanted) -> launch.Plan | None:
    """The plan for x [..., columns]; None if there is no kernel for it."""
    del results
    (x,) = operands
    *batch, columns = x.shape
    p = Problem(math.prod(batch), columns, x.dtype.name)
    forced = algorithms.forced("sort")
    algorithm = None if forced == "xla" else algorithms.pick("sort", forced, p, device)
    if algorithm is None:
        return None
    outputs = {n: launch.result(wanted.index(n)) if n in wanted else launch.null for n in ("values", "indices")}
    if algorithm == "network":
        return _network(p, x.dtype, outputs, descending)
    order = {"largest": largest(x.dtype), "flipped": 2**64 - 1 if descending else 0, "width": columns}
    if algorithm == "block":
        return _in_block(p, x.dtype, outputs, order)
    return _in_tiles(p, device, x.dtype, outputs, order)


def _network(p, dtype, outputs, descending):
    width = max(OWN, 1 << (p.columns - 1).bit_length())
    threads = max(THREADS, width // OWN)
    args = ARGS(
        x=launch.operand(0),
        **outputs,
        rows=p.rows,
        width=p.columns,
        largest=largest(dtype),
        flipped=2**64 - 1 if descending else 0,
    )
    name = f"SortRows<{element(dtype)}, {width}, {threads}>"
    return launch.Plan(
        "network", (launch.Launch(NETWORK, name, [args], ceil_div(p.rows, threads * OWN // width), threads),)
    )


def _in_block(p, dtype, outputs, order):
    threads, own = _block(p.columns, dtype.itemsize)
    unused = dict.fromkeys(("columns_in", "totals", "published", "taken"), launch.null)
    moved = {"keys_in": launch.operand(0), "keys_out": outputs["values"], "columns_out": outputs["indices"]}
    args = RADIX_ARGS(**unused, **moved, tiles=1, parts=1, shift=0, passes=dtype.itemsize, **order)
    name = f"SortBlock<{element(dtype)}, {threads}, {own}, {_boolean(outputs['indices'] != launch.null)}>"
    return launch.Plan("block", (launch.Launch(RADIX, name, [args], p.rows, threads),))


def _in_tiles(p, device, dtype, outputs, order):
    passes, scratch, count, columns = dtype.itemsize, Scratch(), p.rows * p.columns, outputs["indices"] != launch.null

    def targets(last, size):
        """Where each pass writes: to the result last, and to it and a spare buffer by turns before that."""
        spare = scratch.take(size * count) if passes > 1 else None
        own = scratch.take(size * count) if last == launch.null and passes > 2 else last
        return [last if left == 0 else spare if left % 2 else own for left in reversed(range(passes))]

    keys = targets(outputs["values"], dtype.itemsize)
    columns = targets(outputs["indices"], 4) if columns else [launch.null] * passes
    steps = digit_passes(p, device, element(dtype), keys, columns, scratch, **order)
    return launch.Plan("tiles", tuple(steps), scratch.bytes)


def digit_passes(p: Problem, device, element: str, keys, columns, scratch: Scratch, *, shift=0, **order) -> list:
    """The launches that sort operand 0 by one digit for each of the buffers in `keys` and `columns`, which each pass writes.

    element: as kernels read it. shift: of the first digit. order: other members of SortArgs.
    """
    (threads, own), passes = _tile(p, columns[0] != launch.null), len(keys)
    tiles = ceil_div(p.columns, threads * own)
    blocks, parts = p.rows * tiles, max(1, min(tiles, tuning.COUNTING * device.sm_count // p.rows))
    words, digits = 4 * DIGITS * blocks, 4 * DIGITS  # bytes of what tiles publish in a pass, and of counts
    zeroed = passes * words + passes * p.rows * digits + 4 * passes
    at = scratch.take(zeroed).offset
    totals, taken = at + passes * words, at + zeroed - 4 * passes
    of, steps = f"<{element}, {threads}, {own}", [launch.Memset(launch.scratch(at), zeroed)]
    keys_in, columns_in = launch.operand(0), launch.null
    for n, (keys_out, columns_out) in enumerate(zip(keys, columns, strict=True)):
        args = RADIX_ARGS(
            keys_in=keys_in,
            columns_in=columns_in,
            keys_out=keys_out,
            columns_out=columns_out,
            totals=launch.scratch(totals + n * digits),
            published=launch.scratch(at + n * words),
            taken=launch.scratch(taken + 4 * n),
            tiles=tiles,
            parts=parts,
            shift=shift + 8 * n,
            passes=passes,
            **order,
        )
        if n == 0:
            steps.append(launch.Launch(RADIX, f"SortCount{of}>", [args], p.rows * parts, threads))
        name = f"SortScatter{of}, {_boolean(columns_out != launch.null)}>"
        steps.append(launch.Launch(RADIX, name, [args], blocks, threads))
        keys_in, columns_in = keys_out, columns_out
    return steps


def _boolean(value) -> str:
    return "true" if value else "false"


# ---- the primitive


def reference(x, *, descending, wanted):
    column = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    if not descending:
        values, indices = lax.sort([x, column], num_keys=1, is_stable=True)
    else:  # the ascending order of the reversed row, from its end: equal elements then come in their own order
        values, indices = (
            a[..., ::-1] for a in lax.sort([x[..., ::-1], column[..., ::-1]], num_keys=1, is_stable=True)
        )
    return [{"values": values, "indices": indices}[n] for n in wanted]


sort_rows_p = primitive(
    "jaxkern_sort_rows",
    Signature(
        {"x": "any *batch columns"},
        lambda operands, params: [{"values": "x", "indices": "int32"}[n] + " *batch columns" for n in params["wanted"]],
        layout=FLAT,
        whole={"columns"},
    ),
    reference,
    shard=local,
    makes_nan=False,
    plan=plan,
    dtypes=DTYPES,
)


def _jvp(primals, tangents, *, descending, wanted):
    values, indices = bind(sort_rows_p, *primals, descending=descending, wanted=("values", "indices"))
    both = {
        "values": (values, gathered(values, tangents[0], indices)),
        "indices": (indices, compat.zero_tangent(indices)),
    }
    return tuple(zip(*(both[n] for n in wanted)))


set_jvp(sort_rows_p, _jvp)
