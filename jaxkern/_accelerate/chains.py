"""Chains of gathers, elementwise arithmetic and a scatter of rows, as one message kernel.

    y = jnp.zeros(...).at[receivers].add(silu(x[senders]) * w[:, None])

`find` walks the StableHLO operations that make the updates of a scatter. Gathers of whole rows become operands of the
kernel that it reads by node, values per edge become operands that it reads by edge, and the elementwise operations become
a `functor.Function`. Functions under jit are looked into (program.py). An unknown operation ends the chain: its result is an
operand. Nothing is removed from the program: XLA drops unused operations. Cheap arithmetic on nodes whose result only a gather
reads, `(h * scale[:, None])[senders]`, is done for each edge instead, so that it takes no pass over memory.

The order of the edges is a sort, which XLA shares between all chains of a program that have the same indices. Where it is
there already, updates that no chain makes are reduced by the message kernel, too. Sums of short rows need no order (unordered.py).

Where XLA splits a program over devices, no chain is taken; its gathers and its scatter run as they do alone. When a scatter is
lowered, it is not known how the nodes are split. If they are, the kernel needs all of them, an all-gather that the plain program
need not send (it may add up parts of what is gathered). In a `shard_map` over all axes of the mesh each device has its own graph,
and chains are taken.

The message has the semantics of the operations that it replaces. `stablehlo.gather` clamps indices that are out of range, and so
does the kernel; a gather that fills is a select by a mask of its indices, which is an operand per edge. Edges that the scatter
drops are not in the order. Values of 16 bits are rounded after every operation, except for the message, which is added in float32.
"""

import functools
import math
import typing

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkern._accelerate import unordered
from jaxkern._accelerate.message import Chain, Operand, arranged, has_plan
from jaxkern._accelerate.nodes import (
    EXACT,
    ROWS,
    Ends,
    Walk,
    has_features,
    index_key,
    is_floating,
    reached,
    unwrapped_key,
)
from jaxkern._accelerate.program import row_bytes
from jaxkern._core import cpp, functor, memo
from jaxkern._core.dtypes import computing
from jaxkern._ops.indexing import sort
from jaxkern._ops.messages.edges import EDGE, OTHER, ROW, SHARED
from jaxkern._ops.messages.scatter_plan import Other

REDUCTIONS = {"scatter_add": "sum", "scatter_max": "max", "scatter_min": "min"}
MOST_OPERANDS = 12
MOST_STORED = 2  # of them of edges x features: XLA may fuse several into one


def find(program, name, avals, indices, updates, clip, *, alone=False, free=False, sorts=False) -> Chain | None:
    """The chain that makes the updates of this scatter, which is `in_order`; or None.

    indices, updates: the scatter's, values of `program`. alone: the updates are an operand, whatever makes them.
    free: the messages are added in no fixed order (unordered.py). sorts: the indices are sorted in any case, and what a chain does not
    make is stored.
    """
    for sinks in (False,) if alone else (True, False):
        walk = Walk(program, avals[2].shape, avals[1].ndim - 1, sinks)
        try:
            if (chain := _chain(walk, name, avals, indices, updates, clip, alone, free, sorts)) is not None:
                return chain
        except (Ends, cpp.Unsupported):
            pass
        if not walk.has_sunk:
            break
    return None


def in_order(layout, avals) -> bool:
    """Whether the operand is [rows, *features], and the updates [*count, *features]."""
    operand, _, updates = avals
    counts = len(layout.index_count)
    return (
        not layout.batch
        and not layout.lead
        and layout.indexed == (0,)
        and layout.trail == tuple(range(1, operand.ndim))
        and layout.index_count == tuple(range(counts))
        and layout.update_count == tuple(range(counts))
        and layout.update_window == tuple((d, counts + d - 1) for d in layout.trail)
        and updates.ndim == counts + operand.ndim - 1
        and sort.sortable(1, math.prod(updates.shape[:counts]), operand.shape[0])
    )


def _chain(walk, name, avals, indices, value, clip, alone, free, sorts) -> Chain | None:
    """The chain that `walk` finds in the updates, which are `value`; raises Ends where it cannot be one message."""
    operand, _, updates = avals
    dims = tuple(d if n != 1 else None for d, n in enumerate(walk.full))
    root = walk.numbered(walk.leaf(value, dims)) if alone else walk.visit(value, dims)
    used = reached(walk.nodes, root)
    if name != "scatter_add" and not walk.nodes[root].exact:
        return None  # the gradient compares updates with their maximum, and these would be rounded differently
    at_row, by_index = _by_index(walk, used, operand.shape[0], indices, clip)
    weight = lambda nodes: sum(row_bytes(_source(walk.nodes[k])) for k in nodes)
    at_other = max(by_index.values(), key=weight, default=[])
    gathers = any(has_features(walk, walk.nodes[k].leaf.dims) for k in (*at_row, *at_other))
    if not gathers and not (alone or free or (sorts and walk.nodes[root].name not in ("leaf", "constant"))):
        return None
    # XLA fuses a gather of wider types with the arithmetic that it would then store for the kernel.
    read = _operands(walk, used, at_row, at_other, may_store_gathers=alone or updates.dtype.itemsize <= 2, free=free)
    function = _function_of(walk, used, root, read)
    other, others, nodes = None, 0, None
    if at_other:
        first = walk.nodes[at_other[0]]
        others = read.operands[read.of_node[at_other[0]]].rows
        if first.name == "rows":
            index, wrap = unordered.raw(first.leaf.index, others) if free else (first.leaf.index, False)
            other, nodes = read.place(index), Other(others, wrap=wrap)
        else:
            other = _repeated(walk, first.leaf.dims)
            nodes = unordered.repeated(other, walk.full, walk.counts)
    own = None
    if free:
        index, wrap = unordered.raw(indices, operand.shape[0])
        own = unordered.Free(read.place(index), wrap, nodes)
        if (nodes is None) != (other is None) or not read.operands:
            raise Ends
    chain = Chain(
        values=tuple(read.values),
        operands=tuple(read.operands),
        other=other,
        others=others,
        function=function,
        reduction=REDUCTIONS[name],
        full=tuple(walk.full),
        counts=walk.counts,
        text=_text(walk, used, isinstance(other, tuple), free),
        bytes=0,
        free=own,
    )
    return _with_plan(chain, walk, operand, read.dtypes)


class _Operands:
    """The inputs of a message. values: values of the program. operands: operands of the kernel. of_node: {leaf or rows: number of
    its operand}."""

    def __init__(self):
        self.values: list = []
        self.operands: list[Operand] = []
        self.of_node: dict[int, int] = {}
        self._places: dict[int, int] = {}

    def place(self, value) -> int:
        """The place of a value among `values`, the same for equal ones."""
        if value.key not in self._places:
            self._places[value.key] = len(self.values)
            self.values.append(value)
        return self._places[value.key]

    def add(self, node, end, value, dims, rows):
        operand = Operand(end, self.place(value), dims, rows)
        if operand not in self.operands:
            self.operands.append(operand)
        self.of_node[node] = self.operands.index(operand)

    @property
    def dtypes(self) -> list:
        return [self.values[o.at].type[1] for o in self.operands]


def _operands(walk, used, at_row, at_other, may_store_gathers, free) -> _Operands:
    """The operands of the nodes `used`. at_row, at_other: nodes that are rows of the nodes at the ends of the edges.

    may_store_gathers: whether an operand of edges x features may be arithmetic on a gather. free: with no order, XLA would have
        read arrays of edges x features, too, unless it fuses what makes them.
    """
    read = _Operands()
    stored = set()  # operands of edges x features
    for k in used:
        node = walk.nodes[k]
        if node.name == "rows" and (k in at_row or k in at_other):
            x = node.leaf.x
            read.add(k, ROW if k in at_row else OTHER, x, (ROWS, *node.leaf.dims), x.type[0][0])
        elif k in at_other:
            others = math.prod(walk.full[d] for d in _repeated(walk, node.leaf.dims))
            read.add(k, OTHER, node.leaf.value, node.leaf.dims, others)
        elif node.name in ("rows", "leaf"):
            leaf = node.leaf.result if node.name == "rows" else node.leaf
            if leaf is None:
                raise Ends
            edge = any(d is not None and d < walk.counts for d in leaf.dims)
            whole = edge and {d for d in leaf.dims if d is not None} == walk.all
            if whole and not may_store_gathers and walk.program.gathers(leaf.value):
                raise Ends
            read.add(k, EDGE if edge else SHARED, leaf.value, leaf.dims, walk.edges if edge else 1)
            if whole and not (free and not leaf.value.is_fused):
                stored.add(read.of_node[k])
    if len(read.operands) > MOST_OPERANDS or len(stored) > MOST_STORED:
        raise Ends
    return read


def _function_of(walk, used, root, read) -> functor.Function:
    """The nodes `used` as a function of the operands."""
    reals = [walk.nodes[k].dtype for k in used if is_floating(walk.nodes[k].dtype)]
    coarse = all(d.itemsize == 2 for d in reals)
    steps, numbers = [], {k: n for n, k in enumerate(used)}
    for k in used:
        node = walk.nodes[k]
        own = node.leaf.item() if node.name == "constant" else read.of_node.get(k)
        steps.append(Step(node.name, node.dtype, tuple(numbers[o] for o in node.operands), node.f, own))
    dtypes = tuple(read.dtypes)
    function = _function(tuple(steps), numbers[root], dtypes, coarse)
    if tuple(function.in_dtypes) != dtypes:
        raise Ends
    return function


def _text(walk, used, repeats, free) -> str:
    """What the record says of a chain. repeats: nodes at the other ends are repeated, not gathered."""
    order = "in no fixed order" if free else "in the order of the edges"
    kinds = {"rows": "gather", **({"leaf": "broadcast"} if repeats else {})}
    names = dict.fromkeys(kinds.get(walk.nodes[k].name, walk.nodes[k].name) for k in used)
    names = [n for n in names if n not in ("leaf", "constant")]
    if not names:
        return order
    return f"one message kernel instead of {', '.join(names)} and scatter" + (f", {order}" if free else "")


def _with_plan(chain, walk, operand, dtypes) -> Chain | None:
    """The chain with its bytes, if its message has a kernel. operand: the operand of the scatter."""
    shapes = [arranged(o, chain) for o in chain.operands]
    ends, plans = tuple(o.end for o in chain.operands), walk.program.plans
    rows = operand.shape[0]
    nodes = chain.free and (chain.free.other,)
    key = (chain.function, ends, chain.reduction, walk.edges, rows, tuple(shapes), tuple(dtypes), operand.dtype, nodes)
    if key not in plans:
        plans[key] = has_plan(chain, operand, shapes, dtypes)
    if not plans[key]:
        return None
    read = {ROW: rows, OTHER: walk.edges, EDGE: walk.edges, SHARED: 1}
    moved = [read[end] * math.prod(s[1:]) * d.itemsize for end, s, d in zip(ends, shapes, dtypes)]
    result = operand.size * operand.dtype.itemsize
    indices = (3 if chain.free is None else 1 + (chain.other is not None)) * 4 * walk.edges
    return chain._replace(bytes=sum(moved) + result + indices)


def _by_index(walk, used, count, scattered, clip):
    """Nodes that are rows: those that the edges' rows name, and lists of those that have an index in common, by it.

    count: how many rows the scatter has. scattered: its indices.
    """
    own, own_unwrapped = index_key(scattered), unwrapped_key(scattered)
    at_row, by_index, unwrapped = [], {}, {}
    # Gathers that fill come last: wherever their indices are in range, they are equal to others'.
    for k in sorted(used, key=lambda k: walk.nodes[k].name == "rows" and walk.nodes[k].leaf.filled):
        node = walk.nodes[k]
        if node.name == "rows":
            rows, nodes = node.leaf, node.leaf.x.type[0][0]
            key, wrapped = index_key(rows.index), unwrapped_key(rows.index)
            # Edges whose indices are not in range are dropped by the scatter, unless it clips.
            same = own == key or (wrapped == own and not clip) or (rows.filled and own_unwrapped == key)
            if same and nodes == count:
                at_row.append(k)
                continue
            if rows.filled and (key, nodes) not in by_index:
                key = next((j for (j, n), of in unwrapped.items() if of == key and n == nodes), key)
            by_index.setdefault((key, nodes), []).append(k)
            unwrapped.setdefault((key, nodes), wrapped)
        elif node.name == "leaf" and (own_counts := _repeated(walk, node.leaf.dims)):
            by_index.setdefault(own_counts, []).append(k)
    return at_row, by_index


def _source(node):
    return node.leaf.x if node.name == "rows" else node.leaf.value


def _repeated(walk, dims) -> tuple:
    """The dimensions of the indices that a value with features has, if it has some of them, and lacks others."""
    counts = {d for d in walk.all if d < walk.counts}
    own = tuple(sorted(d for d in dims if d in counts))
    return own if set(own) < counts and any(d is not None and d >= walk.counts for d in dims) else ()


class Step(typing.NamedTuple):
    """A node of a message as _function computes it. operands: numbers of earlier steps.

    own: the number that a constant is, or the number of a leaf's operand.
    """

    name: str
    dtype: np.dtype
    operands: tuple
    f: typing.Callable | None
    own: typing.Any


@memo.remembered(1024)
def _function(steps, root, dtypes, coarse) -> functor.Function:
    """The message as a function of the operands. Layers of a model have messages that are equal."""
    message = functools.partial(_message, steps, root)
    return functor.trace(message, dtypes, name="accelerate", results=1, label="a chain", coarse=coarse)[0]


def _message(steps, root, *xs):
    """The message of one edge and feature, from one element of each operand, in computing types."""
    values = []
    for k, step in enumerate(steps):
        wide = computing(step.dtype)
        if step.name == "constant":
            y = np.asarray(step.own, wide)
        elif step.f is None:
            y = lax.convert_element_type(xs[step.own], wide)
        else:
            y = step.f(*(values[o] for o in step.operands))
            if wide != step.dtype and k != root and step.name not in EXACT:
                y = lax.convert_element_type(lax.convert_element_type(y, step.dtype), wide)
        values.append(y)
    return jnp.asarray(values[root])
