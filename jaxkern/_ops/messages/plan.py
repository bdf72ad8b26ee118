"""Which kernels of ffi/kernels/messages run a message, and over which blocks.

rows       a group of threads for each row, EdgeReduce
chunks     the same, where rows may be long: their chunks by further groups, FoldChunks combines them
edges      a message for each edge, EdgeMap
dot        sums of a message over features, EdgeDot
"""

import functools
import math
import typing

from jaxkern._core import launch
from jaxkern._core.define import CUDA_TYPES, ceil_div, cpp_bool
from jaxkern._core.launch import Launch, Plan
from jaxkern._core.params import Params
from jaxkern._ops.messages import tuning
from jaxkern._ops.messages.edges import LOCATED, WIDTH, features_of

REDUCE, MAP, _OPERANDS = "messages/reduce.cuh", "messages/map.cuh", "messages/operands.cuh"
EDGES, OPERAND, FEATURES = (Params(_OPERANDS, name) for name in ("EdgeArgs", "OperandArgs", "FeatureArgs"))
REDUCED, REDUCE_ARGS, FOLD_ARGS = (Params(REDUCE, name) for name in ("ReducedArgs", "ReduceArgs", "FoldArgs"))
MAP_ARGS = Params(MAP, "MapArgs")
MAX_COUNT = 1 << 30  # edges, and elements of one row: kernels number both in 32 bits
GROUPS = 3  # runs of neighbouring features that all operands agree to have or to lack
VECTOR = 16  # bytes

_ENDS = {"row": "kRow", "other": "kOther", "edge": "kEdge", "shared": "kShared"}
_REDUCTIONS = {"sum": "kSum", "mean": "kMean", "max": "kMax", "min": "kMin", "max_at": "kMaxAt", "min_at": "kMinAt"}
_REDUCED = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint32")
_COMPUTED_BYTES = {"float64": 8, "int64": 8}  # 4 otherwise


class Operand(typing.NamedTuple):
    """An array as kernels see it: strides in elements along [outer, middle, inner] features, 0 where it lacks them."""

    dtype: typing.Any
    end: str
    rows: int
    strides: tuple[int, int, int]

    @property
    def vector(self) -> bool:
        return self.strides[2] == 1

    def name(self) -> str:
        vector = cpp_bool(self.vector)
        return f"jaxkern::Operand<{CUDA_TYPES[self.dtype.name]}, jaxkern::End::{_ENDS[self.end]}, {vector}>"


class Problem(typing.NamedTuple):
    """Operands, and features [outer, middle, inner]."""

    operands: tuple
    lengths: tuple  # elements of a row of each operand
    features: tuple[int, int, int]

    @property
    def width(self) -> int:
        return math.prod(self.features)


def problem(arrays, ends) -> Problem | None:
    """The problem of these arrays; None where there is no kernel."""
    none = (False,) * len(arrays)
    groups = []  # innermost first: size, and which arrays have it
    for d, n in reversed(list(enumerate(features_of(arrays)))):
        has = tuple(a.shape[1 + d] != 1 for a in arrays)
        if n == 1:
            continue
        if groups and groups[-1][1] == has:
            groups[-1] = (groups[-1][0] * n, has)
        else:
            groups.append((n, has))
    if len(groups) > GROUPS:
        return None
    groups += [(1, none)] * (GROUPS - len(groups))
    operands, lengths = [], []
    for k, (a, end) in enumerate(zip(arrays, ends)):
        if a.dtype.name not in CUDA_TYPES or a.shape[0] >= 1 << 32:
            return None
        strides, stride = [], 1
        for size, has in groups:
            strides.append(stride if has[k] else 0)
            stride *= size if has[k] else 1
        operands.append(Operand(a.dtype, end, a.shape[0], tuple(strides[::-1])))
        lengths.append(stride)
    return Problem(tuple(operands), tuple(lengths), tuple(g[0] for g in groups[::-1]))


def _widest(p: Problem, dtypes) -> int:
    """Bytes of the largest element that is part of a vector."""
    return max((d.itemsize for d in (*dtypes, *(o.dtype for o in p.operands if o.vector))), default=VECTOR)


def vector_of(p: Problem, dtypes) -> int:
    """Features of a vector: as many as fit 16 bytes of every array and divide the inner features."""
    widest = _widest(p, dtypes)
    return math.gcd(VECTOR // widest, p.features[2])


# ---- arguments


def _edges(edges, rows):
    keys, order, other, offsets = map(launch.operand, range(WIDTH))
    return EDGES(keys=keys, order=order, other=other, offsets=offsets, edges=edges, rows=rows)


def operand_args(p: Problem, first: int = WIDTH):
    """The arguments of the operands of a message; first: the number of the first one among the operands of the call."""
    for k, (o, length) in enumerate(zip(p.operands, p.lengths)):
        row, (outer, middle, *_) = length * o.dtype.itemsize, o.strides
        yield OPERAND(data=launch.operand(first + k), row=row, last=o.rows - 1, outer=outer, middle=middle)


def feature_args(p: Problem):
    return FEATURES(inner=p.features[2], middle=p.features[1], width=p.width)


def _types(dtypes):
    return f"jaxkern::Types<{', '.join(CUDA_TYPES[d.name] for d in dtypes)}>"


def known(p: Problem, function, dtypes, *sizes):
    """Whether kernels number these sizes and rows' bytes, and read and write what the function takes and returns."""
    rows = (length * o.dtype.itemsize for o, length in zip(p.operands, p.lengths))
    numbered = all(0 < n <= MAX_COUNT for n in (*sizes, p.width, *p.lengths)) and all(n < 1 << 32 for n in rows)
    return numbered and all(d.name in CUDA_TYPES for d in (*dtypes, *function.in_dtypes)) and function.fits()


# ---- reductions


class Rows(typing.NamedTuple):
    """How rows map to threads: see ffi/kernels/messages/reduce.cuh."""

    vector: int
    parts: int
    lanes: int
    split: int
    in_flight: int


def rows_of(p: Problem, dtypes, vector, degree) -> Rows:
    """degree: edges of a row, on average."""
    vectors = p.width // vector
    widest = _widest(p, dtypes)
    parts = 1
    while parts < 4 and parts * 2 * vector * widest <= VECTOR and parts * 2 <= vectors:
        parts *= 2
    # Several blocks share a wide row, and each of them waits for the row's offsets and indices: give it more to do.
    wide, most = vectors >= 2 * parts * tuning.THREADS, 4 if degree <= 1 else 2
    while parts < most and vectors >= 2 * parts * tuning.THREADS:
        parts *= 2
    lanes = ceil_div(vectors, parts)
    split = 1
    while split < 8 and lanes * split * 2 <= 8 and split * 2 <= degree:
        split *= 2
    gathered = sum(o.vector and o.end in ("other", "edge") for o in p.operands)
    if wide:
        return Rows(vector, parts, lanes, split, 1 if degree <= 1 else 2)
    return Rows(
        vector, parts, lanes, split, tuning.MANY_IN_FLIGHT if split > 1 or gathered * parts > 4 else tuning.IN_FLIGHT
    )


def chunk_of(edges: int) -> int:
    """Edges of a row that one group of threads reduces alone, at most: a small graph's kernels wait for the longest one."""
    return min(tuning.CHUNK, max(tuning.SHORTEST_CHUNK, 1 << (edges >> 11).bit_length()))


def reduce_plan(device, operands, results, *, function, ends, reduction, dtypes, rows=None) -> Plan | None:
    """The plan of a reduction of messages; rows: how to lay out threads, for tests."""
    del device
    arrays = operands[WIDTH:]
    edges, nodes = operands[0].shape[0], operands[3].shape[0] - 1
    p = problem(arrays, ends)
    if p is None or not known(p, function, dtypes, edges, nodes):
        return None
    outs = function.out_dtypes
    if any(d.name not in _REDUCED for d in dtypes) or any(_computed(a) != _computed(b) for a, b in zip(outs, dtypes)):
        return None
    chunk = chunk_of(edges)
    chunks = ceil_div(edges, chunk) if edges > tuning.CHUNK else 0
    located = reduction in LOCATED
    reduced, at = [], 0
    for k, d in enumerate(dtypes):
        reduced.append(
            REDUCED(
                out=launch.result(k),
                partials=launch.scratch(at) if chunks else launch.null,
                edges=launch.result(k + len(dtypes)) if located else launch.null,
            )
        )
        at += ceil_div(2 * chunks * p.width * _COMPUTED_BYTES.get(d.name, 4) * (1 + located), 256) * 256
    source = function.source("Message")

    def steps(r: Rows):
        of_block = min(r.lanes, tuning.THREADS // r.split)  # of the lanes of a row
        items = tuning.THREADS // (of_block * r.split)
        grid = (ceil_div(2 * chunks + nodes, items), ceil_div(r.lanes, of_block))
        template = (
            f"EdgeReduce<Message, jaxkern::Reduce::{_REDUCTIONS[reduction]}, {r.vector}, {r.parts}, {r.split}, "
            f"{r.in_flight}, {_types(dtypes)}, {', '.join(o.name() for o in p.operands)}>"
        )
        args = REDUCE_ARGS(
            edges=_edges(edges, nodes),
            operand=operand_args(p),
            result=reduced,
            features=feature_args(p),
            lanes=r.lanes,
            items=items,
            chunk=chunk,
            chunks=chunks,
            by_lanes=of_block,
        )
        return (Launch(REDUCE, template, [args], grid, tuning.THREADS, source=source), *folds)

    folds = []
    columns = min(64, 1 << (p.width - 1).bit_length())
    for k, d in enumerate(dtypes if chunks else ()):
        grid = (ceil_div(chunks, tuning.FOLD_CHUNKS), ceil_div(p.width, columns))
        if grid[1] >= 1 << 16:
            return None
        args = FOLD_ARGS(edges=_edges(edges, nodes), result=reduced[k], width=p.width, chunk=chunk, chunks=chunks)
        template = f"FoldChunks<jaxkern::Reduce::{_REDUCTIONS[reduction]}, {CUDA_TYPES[d.name]}, {columns}>"
        folds.append(Launch(REDUCE, template, [args], grid, tuning.FOLD_THREADS))

    if p.width > 32 * tuning.THREADS * ((1 << 16) - 1):  # blocks side by side on a row of single elements
        return None
    laid = functools.partial(rows_of, p, dtypes, degree=edges / nodes)
    vector = vector_of(p, dtypes)
    whole = steps(rows or laid(vector=vector))
    single = steps(laid(vector=1)) if vector > 1 else None
    return Plan("chunks" if chunks else "rows", whole, at, unaligned=single)


def _computed(dtype):
    return {"float16": "float32", "bfloat16": "float32"}.get(dtype.name, dtype.name)


# ---- messages of edges


def map_plan(device, operands, results, *, function, ends, summed, dtypes) -> Plan | None:
    """The plan of a message for each edge."""
    del device
    arrays = operands[WIDTH:]
    edges, nodes = operands[0].shape[0], operands[3].shape[0] - 1
    p = problem(arrays, ends)
    if p is None or not known(p, function, dtypes, edges, nodes):
        return None
    outs = function.out_dtypes
    if any(_computed(a) != _computed(b) for a, b in zip(outs, dtypes)) or (
        summed and any(d.name not in _REDUCED for d in dtypes)
    ):
        return None
    source = function.source("Message")
    features = features_of(arrays)
    length = math.prod(features[len(features) - summed :])
    many = sum(o.vector for o in p.operands) > 2

    def step(vector):
        in_flight = tuning.MANY_IN_FLIGHT if many else tuning.IN_FLIGHT
        items = ceil_div(edges, in_flight)
        if summed:
            kept = p.width // length
            lanes = min(8, 1 << (ceil_div(length, vector) - 1).bit_length())
            threads = items * kept * lanes
            name = f"EdgeDot<Message, {vector}, {lanes}"
        else:
            kept = p.width // vector
            threads = items * kept
            name = f"EdgeMap<Message, {vector}"
        template = f"{name}, {in_flight}, {_types(dtypes)}, {', '.join(o.name() for o in p.operands)}>"
        args = MAP_ARGS(
            edges=_edges(edges, nodes),
            operand=operand_args(p),
            out=map(launch.result, range(len(dtypes))),
            features=feature_args(p),
            kept=kept,
            summed=length if summed else vector,
            by_kept=kept,
        )
        return Launch(MAP, template, [args], ceil_div(threads, tuning.THREADS), tuning.THREADS, source=source)

    vector = math.gcd(vector_of(p, ()), length) if summed else vector_of(p, dtypes)
    return Plan("dot" if summed else "edges", (step(vector),), unaligned=(step(1),) if vector > 1 else None)
