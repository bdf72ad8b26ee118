"""The launches of a scatter of messages: see ffi/kernels/messages/scatter.cuh."""

import typing

from jaxkern._core import launch
from jaxkern._core.define import CUDA_TYPES, ceil_div, cpp_bool
from jaxkern._core.launch import Launch, Plan
from jaxkern._core.params import Params
from jaxkern._ops.indexing.sort import MAX_KEYS, MAX_POSITIONS, Indices, Part
from jaxkern._ops.messages import plan, tuning

HEADER = "messages/scatter.cuh"
ARGS, OTHER, ZEROS = (Params(HEADER, name) for name in ("ScatterArgs", "OtherArgs", "ZerosArgs"))
DTYPES = ("float32", "float64")


class Other(typing.NamedTuple):
    """The nodes at the other ends of edges.

    nodes: how many there are. stride: of edge e it is number e // stride % nodes; 0 if indices name them, which are clipped, after
        negative ones have been wrapped around zero if `wrap` says so.
    """

    nodes: int
    stride: int = 0
    wrap: bool = False


class Layout(typing.NamedTuple):
    """How edges map to threads. vector, parts: features of a vector, and vectors of a row. in_flight: edges of a thread.

    all: whether every block sums all rows in shared memory.
    """

    vector: int
    parts: int
    in_flight: int
    all: bool


def layout_of(p: plan.Problem, dtype, edges, rows, vector) -> Layout:
    blocks = min(tuning.SCATTER_BLOCKS, ceil_div(edges, tuning.SCATTER_THREADS))
    fits_all = rows * p.width * dtype.itemsize <= tuning.ALL_BYTES and 4 * rows * blocks <= edges
    return Layout(vector, p.width // vector, tuning.EDGES_IN_FLIGHT, fits_all)


def scatter_plan(
    device, operands, results, *, function, ends, rows, other, wrap, clip, dtype, layout=None
) -> Plan | None:
    """The plan of a scatter; None where there is no kernel. layout: how to lay out threads, for tests."""
    del device
    x, index, other_index, *arrays = operands
    onto = x is not None
    first = onto + 1 + (other_index is not None)  # of the arrays
    (edges,) = index.shape
    p = plan.problem(arrays, ends)
    if p is None or not plan.known(p, function, (dtype,), edges, rows):
        return None
    if dtype.name not in DTYPES or p.width * dtype.itemsize > tuning.WIDTH_BYTES:
        return None
    if edges > MAX_POSITIONS or rows >= MAX_KEYS - 1 or function.out_dtypes != (dtype,):
        return None
    indices = Indices(launch.operand(int(onto)), index.dtype, rows, wrap, clip, Part(0, 1, 0, rows, 0, edges))
    # Rows and nodes must be numbers of 31 bits, too.
    plain = indices.plain and (other is None or other.nodes < 1 << 31)
    plain = plain and (other_index is None or other_index.dtype == "int32")
    size = results[0].size * dtype.itemsize
    zeros = ZEROS(out=launch.result(0), bytes=size)
    fill = Launch(
        HEADER,
        f"ScatterZeros<{tuning.ZERO_THREADS}>",
        [zeros],
        ceil_div(size, 64 * tuning.ZERO_THREADS),
        tuning.ZERO_THREADS,
    )

    def steps(laid: Layout):
        template = (
            f"EdgeScatter<Message, {laid.vector}, {laid.parts}, {laid.in_flight}, {cpp_bool(plain)}, {CUDA_TYPES[dtype.name]}, "
            f"{', '.join(o.name() for o in p.operands)}>"
        )
        args = ARGS(
            index=indices.struct(),
            other=_other(other, other_index, first - 1),
            operand=plan.operand_args(p, first),
            features=plan.feature_args(p),
            out=launch.result(0),
            all=rows if laid.all else 0,
        )
        places = rows if laid.all else tuning.MOST_HOT
        staged = dtype.itemsize * p.width * tuning.SCATTER_THREADS if laid.parts > 1 else 0
        shared = dtype.itemsize * p.width * places + max(staged, 0 if laid.all else tuning.BIN_BYTES)
        grid = ceil_div(edges, tuning.SCATTER_THREADS * laid.in_flight)
        grid = min(grid, tuning.SCATTER_BLOCKS) if laid.all else grid  # each block adds its sums to out
        source = function.source("Message")
        step = Launch(HEADER, template, [args], grid, tuning.SCATTER_THREADS, shared=shared, waves=1, source=source)
        return (step,) if onto else (fill, step)

    laid = lambda vector: layout_of(p, dtype, edges, rows, vector)
    vector = plan.vector_of(p, (dtype,))
    single = steps(laid(1)) if vector > 1 else None
    return Plan("atomic", steps(layout or laid(vector)), unaligned=single)


def _other(other, index, at):
    """index: of the nodes, operand number `at`."""
    if other is None:
        return OTHER.empty
    if other.stride:
        return OTHER(
            index=launch.null,
            nodes=other.nodes,
            index_bytes=0,
            index_signed=False,
            wrap=False,
            by_stride=other.stride,
            by_nodes=other.nodes,
        )
    signed = index.dtype.kind == "i"
    return OTHER(
        index=launch.operand(at),
        nodes=other.nodes,
        index_bytes=index.dtype.itemsize,
        index_signed=signed,
        wrap=other.wrap and signed,
        by_stride=1,
        by_nodes=1,
    )
