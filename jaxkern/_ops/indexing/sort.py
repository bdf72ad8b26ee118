"""sort_indices: sorts indices by the row that they name; reductions at indices run over this order.

    sort_indices_p   (index [batch, count])    keys, order: uint32 [batch * count]
    row_offsets_p    (keys uint32 [count])     offsets: uint32 [rows + 1], the first position of each row

index[b, k] has the position b * count + k and the key b * rows + row, or batch * rows if it names no row. `keys` ascend;
`order` holds the position of each key, and positions of equal keys ascend. The operands are the indices alone, so that XLA
merges equal sorts of a program. offsets[r] is how many of the ascending keys are less than r.
"""

import functools
import math
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern._core import algorithms, compat, launch, validate
from jaxkern._core.define import ceil_div
from jaxkern._core.params import Params
from jaxkern._core.primitive import bind, set_zero_jvp
from jaxkern._core.signature import FLAT, Signature, primitive
from jaxkern._ops.indexing import tuning

# The most keys (including one for dropped updates) and positions that one run of the kernels can number in 32 bits.
MAX_KEYS, MAX_POSITIONS = 1 << 31, 1 << 30
# The most elements that XLA sorts on a GPU, and so the most positions of an order.
MAX_ORDERED = (1 << 31) - 1


# ---- the primitive


def sort_indices(index, *, rows, wrap, clip):
    """(keys, order) of an index of shape [batch, count]; wrap and clip as in `Rules`."""
    wrap = wrap and not jnp.issubdtype(index.dtype, jnp.unsignedinteger)  # so that equal sorts look alike
    return bind(sort_indices_p, validate.whole(validate.whole(index, 0), 1), rows=rows, wrap=wrap, clip=clip)


def sortable(batch, count, rows) -> bool:
    """Whether one sort can number all updates and rows of a call."""
    return 0 < batch * count <= MAX_POSITIONS and 0 < rows and batch * rows < MAX_KEYS - 1


def check_ordered(function: str, what: str, count) -> None:
    """Raises an error of this public function if `count` elements are too many for a sort. A symbolic count is not checked."""
    if isinstance(count, int) and count > MAX_ORDERED:
        raise ValueError(f"jaxkern.{function}: at most 2**31 - 1 {what}, got {count}")


def _sizes(operands, params):
    (index,), rows = operands, params["rows"]
    if index.ndim == 2 and all(isinstance(d, int) for d in (*index.shape, rows)):
        if index.shape[0] * rows >= 2**32 - 1:
            raise ValueError(f"jaxkern.sort_indices: {index.shape[0] * rows} rows are more than 32 bits number")
        check_ordered("sort_indices", "ids can be sorted", math.prod(index.shape))
    return {"positions": math.prod(index.shape)}


def rows_of(index, rows, rules):
    """The row that each index names, or `rows` if it names none, in a dtype that can hold both."""
    if index.dtype.itemsize < 4:
        index = index.astype(jnp.int32)
    most = jnp.iinfo(index.dtype).max
    if isinstance(rows, int) and most < rows < 2**32 and jnp.issubdtype(index.dtype, jnp.signedinteger):
        # Of int32: uint32 can hold all rows. A negative index becomes 2**32 more, so that rows + index is right modulo 2**32.
        row = index.astype(jnp.uint32)
        return jnp.where(
            index < 0, row + jnp.uint32(rows) if rules.wrap else jnp.uint32(0 if rules.clip else rows), row
        )
    beyond = isinstance(rows, int) and rows > most  # more rows than the dtype can name: no index is too large
    limit = jnp.asarray(most if beyond else rows, index.dtype)  # rows may be symbolic
    if rules.wrap and jnp.issubdtype(index.dtype, jnp.signedinteger):
        index = jnp.where(index < 0, index + limit, index)
    if rules.clip:
        index = jnp.maximum(index, 0)
        return index if beyond else jnp.minimum(index, jnp.maximum(limit, 1) - 1)
    return jnp.where((index < 0) | ((index >= limit) & (not beyond)), limit, index)


class _Mode(typing.NamedTuple):
    wrap: bool
    clip: bool


def keys_of(index, rows, rules):
    """The key of each index [batch, count], in the order of their positions. rules: `Rules`, or their wrap and clip."""
    batch = index.shape[0]
    row = rows_of(index, rows, rules)
    exists = (row >= 0) & (row < jnp.asarray(rows, row.dtype))
    first = jnp.arange(batch, dtype=jnp.uint32)[:, None] * jnp.asarray(rows, jnp.uint32)
    return jnp.where(exists, row.astype(jnp.uint32) + first, jnp.asarray(batch * rows, jnp.uint32)).reshape(-1)


def reference(index, *, rows, wrap, clip, sort=None):
    positions = jax.lax.iota(jnp.uint32, index.shape[0] * index.shape[1])
    return (sort or _pairs_sorted)(keys_of(index, rows, _Mode(wrap, clip)), positions)


def _pairs_sorted(keys, positions):
    return jax.lax.sort([keys, positions], num_keys=1, is_stable=True)


def _on_cpu(index, **params):
    """XLA:CPU sorts 64-bit integers three times as fast as pairs."""

    def packed(keys, positions):
        with compat.enable_x64():
            both = jax.lax.sort(keys.astype(jnp.uint64) << 32 | positions.astype(jnp.uint64), is_stable=False)
            return [(both >> 32).astype(jnp.uint32), both.astype(jnp.uint32)]

    return reference(index, **params, sort=packed)


def _batch(prim, operands, dims, params):
    """One sort of the whole batch, from which each element of the batch is extracted. Keys of different elements are
    different, and keys that name no row, at the end, are in the order of their positions."""
    index, rows = jnp.moveaxis(operands.index, dims.index, 0), params["rows"]
    size, batch, count = index.shape
    known = all(isinstance(n, int) for n in (*index.shape, rows))
    if not (known and sortable(size * batch, count, rows)):
        return jax.lax.map(lambda i: bind(prim, i, **params), index), [0, 0]
    keys, order = sort_indices(index.reshape(size * batch, count), **params)
    own, each = jnp.uint32(batch * rows), batch * count
    number = jnp.arange(size + 1, dtype=jnp.uint32)
    begin = jnp.searchsorted(keys, number * own, method="scan_unrolled").astype(jnp.uint32)
    kept, others = begin[1:] - begin[:-1], begin[-1] + number[:-1] * jnp.uint32(each) - begin[:-1]
    nth = jnp.arange(each, dtype=jnp.uint32)
    named = nth < kept[:, None]
    at = jnp.where(named, begin[:-1, None] + nth, others[:, None] + (nth - kept[:, None])).astype(jnp.int32)
    first = number[:-1, None]
    return [jnp.where(named, keys[at] - first * own, own), order[at] - first * jnp.uint32(each)], [0, 0]


# ---- the plan

ALGORITHMS = ("radix",)


class Problem(typing.NamedTuple):
    """Indices [batch, count] into `rows` rows."""

    rows: int
    count: int
    batch: int = 1


def fits(algorithm: str, p: Problem, device=None) -> bool:
    return algorithm == "radix" and sortable(p.batch, p.count, p.rows)


def choose(p: Problem, device=None) -> str:
    return "radix"


algorithms.register(sys.modules[__name__], "sort_indices")
HEADER = "indexing/sort.cuh"
INDICES, RADIX_PASS = Params("indexing/indices.cuh", "Indices"), Params(HEADER, "RadixPass")
RADIX_BITS = 9  # kRadixBitsMax
THREADS, SMALL_TILE, TILE, LARGE_TILE = 512, 2048, 4608, 8192
SCATTER_SHARED = {SMALL_TILE: 51328, TILE: 55424, LARGE_TILE: 84096}  # bytes of ScatterShared


class Part(typing.NamedTuple):
    """The part of a call that one run of the kernels handles: slices [b, b + batch), rows from `row` on, and positions of
    each slice from `position` on."""

    b: int
    batch: int
    row: int
    rows: int
    position: int
    count: int


class Indices(typing.NamedTuple):
    """The indices of a run; `struct` is Indices of ffi/kernels/indexing/indices.cuh."""

    buffer: launch.Buffer  # of the run's first index
    dtype: np.dtype
    all_rows: int
    wrap: bool
    clip: bool
    part: Part

    @property
    def positions(self) -> int:
        return self.part.batch * self.part.count

    @property
    def dropped(self) -> int:
        return self.part.batch * self.part.rows

    @property
    def signed(self) -> bool:
        return np.issubdtype(self.dtype, np.signedinteger)

    @property
    def plain(self) -> bool:
        return self.dtype.itemsize == 4 and self.signed and not self.clip and self.part.rows == self.all_rows

    def members(self) -> dict:
        p = self.part
        return dict(
            index=self.buffer,
            all_rows=self.all_rows,
            first_row=p.row,
            rows=p.rows,
            count=p.count,
            batch=p.batch,
            positions=self.positions,
            dropped=self.dropped,
            index_bytes=self.dtype.itemsize,
            index_signed=self.signed,
            wrap=self.wrap and self.signed,
            clip=self.clip,
            plain=self.plain,
            by_count=p.count,
        )

    def struct(self) -> launch.Struct:
        return INDICES(**self.members())


class Scratch:
    """Hands out parts of the scratch of a call."""

    def __init__(self):
        self.bytes = 0

    def take(self, size: int) -> launch.Buffer:
        at, self.bytes = self.bytes, self.bytes + ceil_div(size, 256) * 256
        return launch.scratch(at)


class Digits(typing.NamedTuple):
    """How a radix sort splits bits [low, high) of keys: `passes` of `bits` bits, over `tiles` of `tile` positions."""

    passes: int
    bits: int
    tile: int
    tiles: int


def digits(positions: int, low: int, high: int) -> Digits:
    passes = ceil_div(max(high - low, 0), RADIX_BITS)
    tile = SMALL_TILE if positions < tuning.FEW_PAIRS else TILE if positions < tuning.MANY_PAIRS else LARGE_TILE
    return Digits(passes, ceil_div(high - low, passes) if passes else 0, tile, ceil_div(positions, tile))


def bits_for(n: int) -> int:
    """The number of bits that represent 0 .. n - 1."""
    return (n - 1).bit_length()


def radix_sort(indices: Indices, cut: Digits, low: int, targets, counts, elements=None) -> list[launch.Launch]:
    """The launches of a stable sort by the bits of keys from `low` on.

    targets: (keys, payload) for each pass, buffers of 4 * positions bytes. Passes of equal parity may share buffers.
    counts: a buffer of 4 * (tiles + 1) * 2^bits bytes.
    elements: (source, source_extra, bytes of an element) if the payload is elements instead of positions. The last pass
        then writes (key, element) pairs of 8 bytes to its keys buffer.
    """
    steps, run, items = [], indices.struct(), cut.tile // THREADS
    scanned = cut.tile > SMALL_TILE or cut.tiles > tuning.UNSCANNED_TILES
    null = launch.null
    keys_in = payload_in = null
    for i, (keys, payload) in enumerate(targets):
        pairs = keys if elements and i == cut.passes - 1 else null
        source, extra, size = elements if elements and i == 0 else (null, 0, 0)
        kind = "kLater" if i else f"kFirstOfElements{size}" if elements else "kFirstOfPositions"
        sort = RADIX_PASS(
            shift=low + i * cut.bits,
            bits=cut.bits,
            tiles=cut.tiles,
            scanned=scanned,
            counts=counts,
            keys_in=keys_in,
            payload_in=payload_in,
            keys_out=keys,
            payload_out=payload,
            pairs_out=pairs,
            source=source,
            source_extra=extra,
        )
        tiled = functools.partial(launch.Launch, HEADER, args=[run, sort], grid=cut.tiles, block=THREADS)
        steps.append(tiled(name=f"RadixCount<{THREADS}, {items}, {'false' if i else 'true'}>"))
        if scanned:
            steps.append(
                launch.Launch(
                    HEADER,
                    f"RadixScan<{tuning.SCAN_THREADS}>",
                    [counts, launch.u32(cut.tiles), launch.i32(1 << cut.bits)],
                    grid=ceil_div(1 << cut.bits, tuning.SCAN_DIGITS),
                    block=tuning.SCAN_THREADS,
                )
            )
        steps.append(
            tiled(name=f"RadixScatter<{THREADS}, {items}, jaxkern::Pass::{kind}>", shared=SCATTER_SHARED[cut.tile])
        )
        keys_in, payload_in = keys, payload
    return steps


def source_rows(indices: Indices, order, rows, extra: int) -> launch.Launch:
    """Converts the positions in `order` to rows of source, where consecutive slices are count + extra rows apart."""
    return launch.Launch(
        HEADER,
        f"SourceRows<{tuning.SOURCE_ROWS_THREADS}>",
        [indices.struct(), order, rows, launch.i64(extra)],
        grid=ceil_div(indices.positions, tuning.SOURCE_ROWS_THREADS),
        block=tuning.SOURCE_ROWS_THREADS,
    )


def sorted_into(indices: Indices, keys, order, scratch: Scratch) -> list[launch.Launch]:
    """The launches that write the keys and the order of all positions to two buffers."""
    cut = digits(indices.positions, 0, bits_for(indices.dropped + 1))
    bytes_ = 4 * indices.positions
    spare = (scratch.take(bytes_), scratch.take(bytes_)) if cut.passes > 1 else None
    targets = [(keys, order) if (cut.passes - i) % 2 else spare for i in range(cut.passes)]
    return radix_sort(indices, cut, 0, targets, scratch.take(4 * (cut.tiles + 1) << cut.bits))


def plan(device, operands, results, *, rows, wrap, clip) -> launch.Plan | None:
    """The plan of sort_indices; None if 32 bits cannot number all keys."""
    (index,) = operands
    batch, count = index.shape
    if not sortable(batch, count, rows):
        return None
    indices = Indices(launch.operand(0), index.dtype, rows, wrap, clip, Part(0, batch, 0, rows, 0, count))
    scratch = Scratch()
    steps = sorted_into(indices, launch.result(0), launch.result(1), scratch)
    return launch.Plan("radix", tuple(steps), scratch.bytes)


sort_indices_p = primitive(
    "jaxkern_sort_indices",
    Signature({"index": "integer batch count"}, ["uint32 positions"] * 2, layout=FLAT, sizes=_sizes),
    reference,
    batch=_batch,
    on_cpu=_on_cpu,
    plan=plan,
)
set_zero_jvp(sort_indices_p)

# ---- offsets


def row_offsets(keys, rows):
    """uint32 [rows + 1]: the first position of each row among ascending keys; the last one ends the last row."""
    return bind(row_offsets_p, keys, rows=rows)


def offsets_reference(keys, *, rows):
    if not isinstance(keys.shape[0], int):  # jnp.searchsorted takes no symbolic sizes
        counts = jnp.zeros(rows + 1, jnp.uint32).at[keys + 1].add(1, mode="drop")
        return jnp.cumsum(counts, dtype=jnp.uint32)
    return jnp.searchsorted(keys, jnp.arange(rows + 1, dtype=jnp.uint32), method="scan_unrolled").astype(jnp.uint32)


def _batch_offsets(prim, operands, dims, params):
    return jax.vmap(functools.partial(offsets_reference, **params), tuple(dims))(*operands), 0


def offsets_plan(device, operands, results, *, rows) -> launch.Plan | None:
    """The plan of row_offsets; None without keys."""
    del device, results
    (keys,) = operands
    count = keys.shape[0]
    if not (0 < count <= MAX_POSITIONS and rows < MAX_KEYS - 1):
        return None
    args = [launch.operand(0), launch.result(0), launch.u32(count), launch.u32(rows)]
    name, grid = f"RowOffsets<{tuning.OFFSETS_THREADS}, {tuning.OFFSETS_TILE}>", ceil_div(count, tuning.OFFSETS_TILE)
    return launch.Plan("tiles", (launch.Launch("indexing/offsets.cuh", name, args, grid, tuning.OFFSETS_THREADS),))


_OFFSETS = Signature(
    {"keys": "uint32 count"}, "uint32 ends", layout=FLAT, sizes=lambda operands, params: {"ends": params["rows"] + 1}
)
row_offsets_p = primitive("jaxkern_row_offsets", _OFFSETS, offsets_reference, batch=_batch_offsets, plan=offsets_plan)
set_zero_jvp(row_offsets_p)
