"""sort_rows: rows in sorted order, and where their elements were. The kernels are in ffi/kernels/select/sort_rows.cuh and radix.cuh.

    sort_rows_p  (x, carried [..., columns])  ->  some of these, as `wanted` says: values like x, indices int32 [..., columns],
                                                  and carried, an operand of any type, in the order of x

The order is stable, ascending or descending; NaN is the greatest number, and -0 equals 0.
"""

import functools
import math
import sys
import typing

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern._core import algorithms, compat, launch
from jaxkern._core.define import ceil_div, cpp_bool
from jaxkern._core.params import Params
from jaxkern._core.primitive import bind, set_jvp
from jaxkern._core.signature import FLAT, Signature, local, primitive
from jaxkern._ops.indexing.sort import Scratch
from jaxkern._ops.select import elements, tuning
from jaxkern._ops.select.elements import element, gathered, largest, taken_along

NETWORK, RADIX, FEW = "select/sort_rows.cuh", "select/radix.cuh", "select/few.cuh"
ARGS, RADIX_ARGS, FEW_ARGS = Params(NETWORK, "SortRowsArgs"), Params(RADIX, "SortArgs"), Params(FEW, "FewArgs")
ALGORITHMS = ("network", "block", "tiles")
DTYPES = (*elements.DTYPES, "float64", "int64", "uint64")
CARRIED = (*DTYPES, "complex64")  # of 1, 2, 4 or 8 bytes
WIDTH, WIDTH_8, THREADS, OWN = 4096, 2048, 256, 8  # of the network; for keys of 8 bytes
DIGITS = 256
FEW_THREADS = 1024


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


class Results(typing.NamedTuple):
    """Where kernels write, and what follows its key. kept: so many elements of each sorted row are written."""

    kept: int
    values: typing.Any = launch.null
    indices: typing.Any = launch.null
    carried_in: typing.Any = launch.null
    carried: typing.Any = launch.null
    carried_bytes: int = 4


def plan(device, operands, results, *, descending, wanted) -> launch.Plan | None:
    """The plan for x [..., columns]; None if there is no kernel for it."""
    del results
    x, carried = operands
    *batch, columns = x.shape
    p = Problem(math.prod(batch), columns, x.dtype.name)
    algorithm = _algorithm(p, device)
    if algorithm is None:
        return None
    to = Results(columns, **{name: launch.result(n) for n, name in enumerate(wanted)})
    if carried is not None:
        to = to._replace(carried_in=launch.operand(1), carried_bytes=carried.dtype.itemsize)
    if algorithm == "tiles":
        return _in_tiles(p, device, x.dtype, to, descending)
    return launch.Plan(algorithm, (whole_rows(algorithm, p, to, descending, element(x.dtype)),))


def _algorithm(p: Problem, device) -> str | None:
    forced = algorithms.forced("sort")
    return None if forced == "xla" else algorithms.pick("sort", forced, p, device)


def whole_rows(algorithm: str, p: Problem, to: Results, descending: bool, read_as: str) -> launch.Launch:
    """The launch that sorts operand 0 by the network, or in a block for each row."""
    dtype = jnp.dtype(p.dtype)
    order = {"largest": largest(dtype), "flipped": 2**64 - 1 if descending else 0, "width": p.columns, "kept": to.kept}
    carried = f"uint{8 * to.carried_bytes}_t"
    if algorithm == "network":
        width = max(OWN, 1 << (p.columns - 1).bit_length())
        threads = max(THREADS, width // OWN)
        outputs = dict(values=to.values, indices=to.indices, carried_in=to.carried_in, carried_out=to.carried)
        args = ARGS(x=launch.operand(0), **outputs, rows=p.rows, **order)
        name = f"SortRows<{read_as}, {width}, {threads}, {carried}>"
        return launch.Launch(NETWORK, name, [args], ceil_div(p.rows, threads * OWN // width), threads)
    threads, own = _block(p.columns, dtype.itemsize)
    args = RADIX_ARGS(
        keys_in=launch.operand(0),
        keys_out=to.values,
        **_followers(to),
        **dict.fromkeys(("totals", "published", "taken", "done"), launch.null),
        **dict(tiles=1, parts=1, shift=0, passes=dtype.itemsize, **order),
    )
    columns = to.indices != launch.null or to.carried != launch.null
    name = f"SortBlock<{read_as}, {threads}, {own}, {cpp_bool(columns)}, {carried}>"
    return launch.Launch(RADIX, name, [args], p.rows, threads)


def _followers(to: Results) -> dict:
    """Members of SortArgs. 4 bytes that are carried move in place of columns."""
    if to.carried_bytes == 4 and to.indices == launch.null:
        return dict(columns_in=to.carried_in, columns_out=to.carried, carried_in=launch.null, carried_out=launch.null)
    return dict(columns_in=launch.null, columns_out=to.indices, carried_in=to.carried_in, carried_out=to.carried)


def _in_tiles(p, device, dtype, to, descending):
    passes, scratch, count = dtype.itemsize, Scratch(), p.rows * p.columns
    outputs = _followers(to)
    follows = outputs["columns_out"] != launch.null

    def targets(last, size):
        """Where each pass writes: to the result last, and to it and a spare buffer by turns before that."""
        spare = scratch.take(size * count) if passes > 1 else None
        own = scratch.take(size * count) if last == launch.null and passes > 2 else last
        return [last if left == 0 else spare if left % 2 else own for left in reversed(range(passes))]

    keys = targets(to.values, dtype.itemsize)
    columns = targets(outputs["columns_out"], 4) if follows else [launch.null] * passes
    order = {"largest": largest(dtype), "flipped": 2**64 - 1 if descending else 0, "width": p.columns}
    few, done = (), launch.null
    if not follows and _has_few(p, device):
        done = scratch.take(4 * p.rows)
        args = FEW_ARGS(keys_in=launch.operand(0), keys_out=to.values, done=done, **order)
        few = (
            launch.Memset(done, 4 * p.rows),
            launch.Launch(FEW, f"SortFew<{element(dtype)}>", [args], p.rows, FEW_THREADS),
        )
    order |= {"columns_in": outputs["columns_in"], "done": done}
    steps = digit_passes(p, device, element(dtype), keys, columns, scratch, **order)
    return launch.Plan("tiles", (*few, *steps), scratch.bytes)


def _has_few(p: Problem, device) -> bool:
    """Whether rows whose elements are equal but for a few are to be found first. A block reads a row, and all rows are sampled."""
    size = jnp.dtype(p.dtype).itemsize
    return 1 < size < 8 and p.columns <= tuning.FEW_COLUMNS and p.rows <= tuning.FEW_ROWS * device.sm_count


def digit_passes(
    p: Problem, device, element: str, keys, columns, scratch: Scratch, *, columns_in=launch.null, shift=0, **order
) -> list:
    """The launches that sort operand 0 by one digit for each of the buffers in `keys` and `columns`, which each pass writes.

    element: as kernels read it. columns_in: what the first pass reads in place of columns. shift: of the first digit. order: other
    members of SortArgs.
    """
    (threads, own), passes = _tile(p, columns[0] != launch.null), len(keys)
    tiles = ceil_div(p.columns, threads * own)
    blocks, parts = p.rows * tiles, max(1, min(tiles, tuning.COUNTING * device.sm_count // p.rows))
    words, digits = 4 * DIGITS * blocks, 4 * DIGITS  # bytes of what tiles publish in a pass, and of counts
    zeroed = passes * words + passes * p.rows * digits + 4 * passes
    at = scratch.take(zeroed).offset
    totals, taken = at + passes * words, at + zeroed - 4 * passes
    of, steps = f"<{element}, {threads}, {own}", [launch.Memset(launch.scratch(at), zeroed)]
    keys_in = launch.operand(0)
    for n, (keys_out, columns_out) in enumerate(zip(keys, columns, strict=True)):
        args = RADIX_ARGS(
            keys_in=keys_in,
            columns_in=columns_in,
            keys_out=keys_out,
            columns_out=columns_out,
            **dict.fromkeys(("carried_in", "carried_out"), launch.null),
            totals=launch.scratch(totals + n * digits),
            published=launch.scratch(at + n * words),
            taken=launch.scratch(taken + 4 * n),
            tiles=tiles,
            parts=parts,
            shift=shift + 8 * n,
            passes=passes,
            kept=p.columns,
            **{"done": launch.null, **order},
        )
        if n == 0:
            steps.append(launch.Launch(RADIX, f"SortCount{of}>", [args], p.rows * parts, threads))
        name = f"SortScatter{of}, {cpp_bool(columns_out != launch.null)}>"
        steps.append(launch.Launch(RADIX, name, [args], blocks, threads))
        keys_in, columns_in = keys_out, columns_out
    return steps


# ---- the primitive


def reference(x, carried, *, descending, wanted):
    flipped = (lambda a: lax.rev(a, (a.ndim - 1,))) if descending else (lambda a: a)
    place = jax.typeof(x).sharding  # of an explicit mesh
    column = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1, out_sharding=None if place.mesh.empty else place)
    # In descending order: the ascending order of the reversed row, from its end. Equal elements then come in their own order.
    operands = [flipped(a) for a in (x, column, carried) if a is not None]
    found = dict(zip(("values", "indices", "carried"), lax.sort(operands, num_keys=1, is_stable=True)))
    return [flipped(found[n]) for n in wanted]


def _gathering(x, carried, *, descending, wanted):
    """By the sort of x alone."""
    others = tuple(n for n in wanted if n != "carried")
    both = others if "indices" in others else (*others, "indices")
    found = dict(zip(both, bind(sort_rows_p, x, None, descending=descending, wanted=both)))
    found["carried"] = taken_along(carried, found["indices"], carried.ndim - 1)
    return [found[n] for n in wanted]


def _adapt(prim, x, carried, *, descending, wanted):
    """Tiles carry 4 bytes in place of indices."""
    del prim, descending
    if carried is None:
        return None
    p = Problem(math.prod(x.shape[:-1]), x.shape[-1], x.dtype.name)
    carries = carried.dtype.itemsize == 4 and "indices" not in wanted
    return None if carries or _algorithm(p, None) != "tiles" else _gathering


def _batch(prim, operands, dims, params):
    """Keys that are no batch are sorted once."""
    del prim
    if dims.x is not None:
        return None
    found = jax.vmap(functools.partial(_gathering, **params), tuple(dims))(*operands)
    return found, [0] * len(found)


def _results(operands, params) -> list[str]:
    of = {"values": "x", "indices": "int32", "carried": "carried"}
    return [f"{of[n]} *batch columns" for n in params["wanted"]]


sort_rows_p = primitive(
    "jaxkern_sort_rows",
    Signature({"x": "any *batch columns", "carried?": "any *batch columns"}, _results, layout=FLAT, whole={"columns"}),
    reference,
    batch=_batch,
    shard=local,
    makes_nan=False,
    plan=plan,
    adapt=_adapt,
    dtypes=DTYPES,
)


def _jvp(primals, tangents, *, descending, wanted):
    (x, carried), (slope, of_carried) = primals, tangents
    values, indices = bind(sort_rows_p, x, None, descending=descending, wanted=("values", "indices"))
    both = {
        "values": (values, gathered(values, slope, indices)),
        "indices": (indices, compat.zero_tangent(indices)),
    }
    if carried is not None:
        ordered = taken_along(carried, indices, carried.ndim - 1)
        both["carried"] = ordered, gathered(ordered, of_carried, indices)
    return tuple(zip(*(both[n] for n in wanted)))


set_jvp(sort_rows_p, _jvp)
