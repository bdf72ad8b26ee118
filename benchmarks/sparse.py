"""Embedding bags, mixtures of experts and attention on graphs against XLA's compositions, PyTorch and a copy.

    embedding_bag     sums of 20 rows of a table of 500 000 x 64
    moe_dispatch      32 768 tokens of 4096 numbers, each to 2 slots of its experts
    moe_combine       back, with weights
    graph_attention   8 heads of 32 numbers on the graph of messages.py, scores as in graph attention networks
    spmm              that graph's matrix times features of 128 numbers

`forward` is the result, `both` the result and all gradients for a cotangent, in one program. Graphs are sorted outside the
program; ids of bags and slots of experts are not, as they change from step to step. The floor counts what must move: rows as
often as they are gathered, each result once, and two passes over what has a number per edge and head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern
from benchmarks import _cell, _goals, _inputs, _timing, _torch, messages
from benchmarks._program import Program

OPERATION = "sparse"
OPS = ("embedding_bag", "moe_dispatch", "moe_combine", "graph_attention", "spmm")
DIRECTIONS = ("forward", "both")
HEADS = 8
EXAMINED = 64  # rows whose results are compared with float64

# Times of XLA over ours, at least; a fraction of a copy.
BEFORE_XLA = {"embedding_bag": 2.0, "graph_attention both": 3.0}
NEAR_COPY = {"moe_combine forward": 0.9}


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of `width` numbers, and `each` of them for each of `count` results; or so many edges between nodes."""

    group: str  # bags, experts, graph, matrix
    shape: tuple[int, ...]  # rows, width
    count: int
    each: int = 1
    cpu: bool = False

    @property
    def name(self) -> str:
        kind = f"{self.count} edges between" if self.graph else f"{self.count} of {self.each} of"
        return f"{self.group} {kind} {self.rows}x{self.width}"

    @property
    def graph(self) -> bool:
        return self.group in ("graph", "matrix")

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def width(self) -> int:
        return self.shape[1]

    @property
    def size(self) -> int:
        """Elements that are gathered, or of the table."""
        return max(self.rows, self.count * self.each) * self.width

    def messages(self) -> messages.Case:
        return messages.Case("width", (self.count, self.width), self.rows)

    def tenth(self) -> Case:
        rows = self.count // 10 * self.each if self.group == "experts" else self.rows // 10
        return dataclasses.replace(self, count=self.count // 10, shape=(rows, min(self.width, 256)), cpu=True)


CASES = [
    Case("bags", (500_000, 64), 32_768, 20),
    Case("experts", (65_536, 4096), 32_768, 2),
    Case("graph", (messages.NODES, HEADS * 32), messages.EDGES),
    Case("matrix", (messages.NODES, 128), messages.EDGES),
]
OF_GROUP = {
    "bags": ("embedding_bag",),
    "experts": ("moe_dispatch", "moe_combine"),
    "graph": ("graph_attention",),
    "matrix": ("spmm",),
}
DTYPES = {"gpu": ("float32", "bfloat16"), "cpu": ("float32",)}
CPU_CASES = [c.tenth() for c in CASES]
QUICK: set[str] = set()  # all


@dataclasses.dataclass(frozen=True)
class Cell(_cell.Cell):
    """One row of the table."""

    case: Case

    @property
    def bytes(self) -> int:
        case, item = self.case, jnp.dtype(self.dtype).itemsize
        gathered = case.count * case.each * case.width * item
        result, rows = case.count * case.width * item, case.rows * case.width * item
        if self.op == "moe_dispatch":
            forward = result + rows
            return forward if self.direction == "forward" else 2 * forward
        if not case.graph:
            # Backward: cotangents are read, and all rows written; the gradient by weights reads what was gathered.
            return (
                gathered + result + (result + rows + gathered * (self.op == "moe_combine")) * (self.direction == "both")
            )
        numbers = 2 * case.count * (HEADS if self.op == "graph_attention" else 1) * item
        forward = gathered + rows + numbers + 8 * case.count
        return (
            forward if self.direction == "forward" else forward + 2 * gathered + 2 * rows + 2 * numbers + 8 * case.count
        )

    def goals(self) -> list[dict[str, Any]]:
        peers = {"goal": "peers", "against": ["xla"]}
        if self.case.cpu:
            return [peers]
        label = f"{self.op} {self.direction}"
        required = BEFORE_XLA.get(label, BEFORE_XLA.get(self.op))
        goals = [peers | ({"required": required} if required else {}), {"goal": "peers"}]
        if label in NEAR_COPY:
            goals.append({"goal": "copy", "required": NEAR_COPY[label]})
        return goals


def cells(case: Case, dtype: str, ops: tuple[str, ...]) -> Iterator[Cell]:
    """Both directions of what a case is for."""
    for op in OF_GROUP[case.group]:
        if op in ops:
            yield from (Cell(case, dtype, op, direction) for direction in DIRECTIONS)


# --- what runs -----------------------------------------------------------------------------------


def _operands(cell: Cell) -> list[jax.ShapeDtypeStruct]:
    """Arrays of random numbers, which are differentiated."""
    case = cell.case
    of = lambda *shape: jax.ShapeDtypeStruct(shape, cell.dtype)
    x = of(case.rows, case.width)
    return {
        "embedding_bag": [x],
        "moe_dispatch": [of(case.count, case.width)],
        "moe_combine": [x, of(case.count, case.each)],
        "graph_attention": [x, of(case.rows, HEADS), of(case.rows, HEADS)],
        "spmm": [x, of(case.count)],
    }[cell.op]


def _index(case: Case) -> Any:
    """Ids of bags, slots of experts, or a graph."""
    if case.graph:
        return messages.graph_of(case.messages())
    rng = np.random.default_rng(0)
    if case.group == "experts":
        ids = rng.permutation(case.rows)
    else:
        ids = rng.integers(0, case.rows, case.count * case.each)
    return jnp.asarray(ids.reshape(case.count, case.each), jnp.int32)


def _score(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.nn.leaky_relu(a + b, 0.2)


def _ours(cell: Cell) -> Callable[..., jax.Array]:
    case = cell.case
    heads = lambda x: x.reshape(x.shape[0], HEADS, -1)

    def attention(graph: Any, x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return jaxkern.graph_attention(_score, graph, heads(x), senders=a, receivers=b).reshape(x.shape)

    return {
        "embedding_bag": lambda ids, table: jaxkern.embedding_bag(table, ids),
        "moe_dispatch": lambda slots, x: jaxkern.moe_dispatch(x, slots, case.rows),
        "moe_combine": lambda slots, x, w: jaxkern.moe_combine(x, slots, w),
        "graph_attention": attention,
        "spmm": lambda graph, x, w: jaxkern.edge_sum(lambda x, w: x * w, graph, senders=x, edges=w),
    }[cell.op]


def _xla(cell: Cell) -> Callable[..., jax.Array]:
    """The operation in a program without this library. Tokens are gathered by the sorted slots, which is faster than a scatter."""
    case = cell.case
    summed = lambda values, graph: jax.ops.segment_sum(values, graph.receivers, case.rows, indices_are_sorted=True)

    def attention(graph: Any, x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        scores = _score(a[graph.senders], b[graph.receivers])
        top = jax.ops.segment_max(scores, graph.receivers, case.rows, indices_are_sorted=True)
        e = jnp.exp(scores - jax.lax.stop_gradient(top)[graph.receivers])
        weights = e / summed(e, graph)[graph.receivers]
        values = x.reshape(case.rows, HEADS, -1)[graph.senders] * weights[..., None]
        return summed(values, graph).reshape(x.shape)

    return {
        "embedding_bag": lambda ids, table: jnp.sum(table[ids], 1),
        "moe_dispatch": lambda slots, x: x[jnp.argsort(slots.reshape(-1)) // case.each],
        "moe_combine": lambda slots, x, w: jnp.sum(x[slots] * w[..., None], 1),
        "graph_attention": attention,
        "spmm": lambda graph, x, w: summed(x[graph.senders] * w[:, None], graph),
    }[cell.op]


def _function(cell: Cell, run: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A function of the index, the operands and, backward, the cotangent."""
    if cell.direction == "forward":
        return run

    def both(index: Any, *arrays: jax.Array) -> Any:
        y, pull = jax.vjp(lambda *operands: run(index, *operands), *arrays[:-1])
        return y, *pull(arrays[-1])

    return both


def programs(cell: Cell, algorithms: bool) -> list[Program]:
    """This library's and XLA's programs of a cell."""
    del algorithms
    specs = [jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), _index(cell.case)), *_operands(cell)]
    if cell.direction == "both":
        specs.append(jax.eval_shape(_ours(cell), *specs))
    return [Program(n, _function(cell, f), specs) for n, f in ((_goals.OURS, _ours(cell)), ("xla", _xla(cell)))]


def chosen_algorithm(cell: Cell) -> str | None:
    """There is one way."""
    return None


# --- inputs --------------------------------------------------------------------------------------


class Inputs:
    """Arrays of one case and dtype, enough of them to go round cold, and its indices."""

    def __init__(self, pool: _inputs.Pool, case: Case) -> None:
        self.index, self.pool = _index(case), pool
        self.turns = 1 + _inputs.rotation(min(case.rows, case.count) * case.width * pool.dtype.itemsize)
        self._arrays: dict[Any, jax.Array] = {}

    def array(self, shape: tuple[int, ...], k: int) -> jax.Array:
        key = (shape, k % self.turns)
        if key not in self._arrays:
            self._arrays[key] = self.pool.array(*key)
        return self._arrays[key]

    def arguments(self, specs: list[Any], i: int) -> tuple[Any, ...]:
        arrays = [s for s in specs[1:] if isinstance(s, jax.ShapeDtypeStruct)]
        return self.index, *(self.array(s.shape, len(arrays) * i + k) for k, s in enumerate(arrays))


def candidates(cell: Cell, compiled: list[Program], inputs: Inputs) -> list[_timing.Candidate]:
    """What to time for a cell, the copy aside."""
    for i in range(inputs.turns):  # all arrays are made before the first call
        inputs.arguments(compiled[0].specs, i)
    call = lambda p: lambda i: p(*inputs.arguments(p.specs, i))
    found = [_timing.Candidate(p.name, call(p), jax.block_until_ready) for p in compiled]
    if _torch.available() and cell.op == "embedding_bag" and cell.direction == "forward":
        found.append(_torch_candidate(cell, compiled[0], inputs))
    return found


def _torch_candidate(cell: Cell, program: Program, inputs: Inputs) -> _timing.Candidate:
    """`torch.nn.functional.embedding_bag`."""
    torch = _torch.torch()
    ids: list[Any] = []

    def call(i: int) -> Any:
        if not ids:
            ids.append(_torch.share(inputs.index))
        _, table = inputs.arguments(program.specs, i)
        return torch.nn.functional.embedding_bag(ids[0], _torch.share(table), mode="sum")

    return _timing.Candidate("torch", call, _torch.sync, torch=True)


# --- what is examined ----------------------------------------------------------------------------


def examine(cell: Cell, compiled: list[Program], inputs: Inputs, times: dict[str, float]) -> list[dict[str, Any]]:
    """The same bits each time, and sums of rows no further from float64 than half a unit of the largest result."""
    del times
    ours = compiled[0]
    if ours.error:
        return []
    arguments = inputs.arguments(ours.specs, 0)
    run = lambda: jax.tree.leaves(ours(*arguments))
    first = run()
    found = [
        messages.goal(
            "reproducible", float(all(messages.same(a, b) for _ in range(2) for a, b in zip(first, run()))), 1.0
        )
    ]
    if cell.direction == "both" or cell.op not in ("embedding_bag", "moe_combine"):
        return found
    at = np.random.default_rng(1).integers(0, cell.case.count, EXAMINED)
    index, x, *weights = arguments
    wide = lambda a: np.asarray(a).astype(np.float64)
    terms = wide(x[index[at]]) * (wide(weights[0][at])[..., None] if weights else 1)
    exact = terms.sum(1)
    allowed = max(float(jnp.finfo(cell.dtype).eps), 2e-6) * np.abs(exact).max()
    return [*found, messages.goal("accurate", allowed / max(np.abs(wide(first[0][at]) - exact).max(), 1e-300), 1.0)]


def checks(clock: Any) -> list[dict[str, Any]]:
    """There are no checks beside the properties of cells."""
    del clock
    return []
