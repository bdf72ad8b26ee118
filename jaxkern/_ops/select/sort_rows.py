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
from jaxkern._ops.indexing.sort import Scratch, scan_counts
from jaxkern._ops.select import top_k
from jaxkern._ops.select.top_k import element, gathered, largest

NETWORK, RADIX = "select/sort_rows.cuh", "select/radix.cuh"
ARGS, RADIX_ARGS = Params(NETWORK, "SortRowsArgs"), Params(RADIX, "SortArgs")
ALGORITHMS = ("network", "block", "tiles")
DTYPES = (*top_k.DTYPES, "float64", "int64", "uint64")
WIDTH, WIDTH_8, THREADS, OWN = 4096, 2048, 256, 8  # of the network; for keys of 8 bytes
DIGITS = 256
# (threads, keys of a thread) of SortBlock. Keys of 8 bytes have no room in the last one.
BLOCKS = ((128, 4), (128, 8), (256, 8), (256, 16), (512, 8), (512, 16))
# Of tiles, for sorts of few keys, of many, and of many that have 8 bytes.
SMALL, LARGE, LARGE_8 = (512, 4), (512, 16), (512, 8)
# From so many keys on, tiles are large. 2^20 float32, us on an H100: 139 in large tiles, 151 in small ones; 2^22: 182 and 214.
MANY = 1 << 20
# Up to so many tiles in a row, each block adds up their counts itself.
UNSCANNED = 16
# Rows up to this width are sorted by the network; the first for keys of 4 bytes. us on an H100, network / block: 2^26 float32 in rows of
# 256 719 / 2787, of 512 1064 / 1120, of 1024 1655 / 960; bfloat16 of 512 1093 / 582; 2^24 float64 of 256 564 / 1537, of 512 1024 / 655.
NETWORK_WIDTH, NETWORK_WIDTH_OTHER = 512, 256


class Problem(typing.NamedTuple):
    """Rows of so many columns."""

    rows: int
    columns: int
    dtype: str = "float32"


def _block(columns, size):
    """(threads, keys of a thread) of the smallest block that sorts a row; None if none does."""
    return next((b for b in BLOCKS if math.prod(b) >= columns and (size < 8 or b[1] <= 8)), None)


def _tile(p: Problem):
    """(threads, keys of a thread) of a tile."""
    if p.rows * p.columns < MANY:
        return SMALL
    return LARGE_8 if jnp.dtype(p.dtype).itemsize == 8 else LARGE


def fits(algorithm: str, p: Problem, device=None) -> bool:
    del device
    if p.dtype not in DTYPES or not 0 < p.columns < 2**31 or not 0 < p.rows < 2**31:
        return False
    if algorithm == "network":
        return p.columns <= (WIDTH_8 if jnp.dtype(p.dtype).itemsize == 8 else WIDTH)
    if algorithm == "block":
        return _block(p.columns, jnp.dtype(p.dtype).itemsize) is not None
    tiles = ceil_div(p.columns, math.prod(_tile(p)))
    # Counts of digits are not to take much more room than keys.
    return (
        algorithm == "tiles"
        and p.columns >= DIGITS
        and p.rows * tiles < 2**31
        and (tiles <= UNSCANNED or p.rows < 2**16)
    )


def choose(p: Problem, device=None) -> str | None:
    """The algorithm; None: XLA."""
    width = NETWORK_WIDTH if jnp.dtype(p.dtype).itemsize == 4 else NETWORK_WIDTH_OTHER
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
    return (_in_block if algorithm == "block" else _in_tiles)(p, x.dtype, outputs, order)


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
    args = RADIX_ARGS(
        keys_in=launch.operand(0),
        columns_in=launch.null,
        keys_out=outputs["values"],
        columns_out=outputs["indices"],
        counts=launch.null,
        tiles=1,
        shift=0,
        scanned=False,
        **order,
    )
    name = f"SortBlock<{element(dtype)}, {threads}, {own}, {_boolean(outputs['indices'] != launch.null)}>"
    return launch.Plan("block", (launch.Launch(RADIX, name, [args], p.rows, threads),))


def counts_bytes(p: Problem) -> int:
    """The size of the counts of `digit_pass`."""
    return 4 * p.rows * (ceil_div(p.columns, math.prod(_tile(p))) + 1) * DIGITS


def digit_pass(p: Problem, element: str, counts, *, columns_out, **members) -> list[launch.Launch]:
    """The launches of one pass over all tiles, of keys as `element` names them; members: of SortArgs."""
    threads, own = _tile(p)
    tiles = ceil_div(p.columns, threads * own)
    scanned = tiles > UNSCANNED
    args = [RADIX_ARGS(counts=counts, tiles=tiles, scanned=scanned, columns_out=columns_out, **members)]
    of = f"<{element}, {threads}, {own}"
    columns = _boolean(columns_out != launch.null)
    return [
        launch.Launch(RADIX, f"SortCount{of}>", args, p.rows * tiles, threads),
        *([scan_counts(counts, tiles, DIGITS, p.rows)] if scanned else []),
        launch.Launch(RADIX, f"SortScatter{of}, {columns}>", args, p.rows * tiles, threads),
    ]


def _in_tiles(p, dtype, outputs, order):
    passes, scratch, count, columns = dtype.itemsize, Scratch(), p.rows * p.columns, outputs["indices"] != launch.null
    counts = scratch.take(counts_bytes(p))

    def targets(last, size):
        """Where each pass writes: to the result last, and to it and a spare buffer by turns before that."""
        spare = scratch.take(size * count) if passes > 1 else None
        own = scratch.take(size * count) if last == launch.null and passes > 2 else last
        return [last if left == 0 else spare if left % 2 else own for left in reversed(range(passes))]

    keys_in, columns_in, steps = launch.operand(0), launch.null, []
    columns_out = targets(outputs["indices"], 4) if columns else [launch.null] * passes
    for n, (keys, indices) in enumerate(zip(targets(outputs["values"], dtype.itemsize), columns_out, strict=True)):
        moved = {"keys_in": keys_in, "columns_in": columns_in, "keys_out": keys, "columns_out": indices}
        steps += digit_pass(p, element(dtype), counts, **moved, shift=8 * n, **order)
        keys_in, columns_in = keys, indices
    return launch.Plan("tiles", tuple(steps), scratch.bytes)


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
