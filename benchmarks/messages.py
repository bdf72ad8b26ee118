"""Messages on graphs against XLA's composition, this library's separate operations, PyTorch's, and the copy.

PyTorch gathers and adds up, and with PyTorch Geometric multiplies by a sparse matrix whose orders are cached (`pyg`).

`forward` is the sum of `silu(x) * w` over the edges into a node, x of the sender and w of the edge; `both` its
gradients by x and by w for a cotangent, in one program. `scale` is the sum of `x * w`. The graph is sorted once,
outside the program, and the composition gets `indices_are_sorted=True`. The sizes are ogbn-arxiv's: 169 343 nodes and
1.17 M edges. Receivers are uniform, Zipf, or half of all edges end at one node. The floor counts the bytes that must move: for
each edge its row of x, its weight and its indices, and for each node its result; a kernel may be faster, where the
cache has rows that several edges read.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _cell, _goals, _inputs, _timing, _torch
from benchmarks._program import Program

OPERATION = "messages"
OPS = ("edge_sum", "edge_max", "edge_dot", "heads", "scale")
DIRECTIONS = ("forward", "both")
EDGES, NODES = 1_166_243, 169_343
EXAMINED = 64  # nodes whose results are compared with float64
COMPUTED = "by operation"  # name of this library's separate operations


@dataclasses.dataclass(frozen=True)
class Case:
    """So many edges of features [width] between so many nodes."""

    group: str
    shape: tuple[int, ...]  # edges, width
    nodes: int = NODES
    kind: str = "uniform"  # or zipf, half
    ordered: bool = True  # by receiver
    cpu: bool = False

    @property
    def name(self) -> str:
        order = "" if self.ordered else " unsorted"
        return f"{'x'.join(map(str, self.shape))} into {self.nodes} {self.kind}{order}"

    @property
    def edges(self) -> int:
        return self.shape[0]

    @property
    def width(self) -> int:
        return self.shape[1]

    @property
    def size(self) -> int:
        """Elements of the largest array."""
        return max(self.edges, self.nodes) * self.width

    def tenth(self) -> Case:
        return dataclasses.replace(self, shape=(self.edges // 10, self.width), nodes=self.nodes // 10, cpu=True)


CASES = [
    *(Case("width", (EDGES, width)) for width in (64, 128, 256, 1, 2, 4, 8, 16, 32, 33, 100, 512)),
    *(Case("skew", (EDGES, width), kind=kind) for width in (128, 8) for kind in ("zipf", "half")),
    Case("unsorted", (EDGES, 128), ordered=False),
]
DTYPES = {"gpu": ("float32", "bfloat16"), "cpu": ("float32", "bfloat16")}
CPU_CASES = [c.tenth() for c in CASES]
QUICK = {c.name for c in (*CASES[:3], *CPU_CASES[:1])}
HEADS = 8


@functools.cache
def ends_of(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Senders and receivers."""
    rng = np.random.default_rng(0)
    if case.kind == "zipf":
        weights = np.cumsum(np.arange(1, case.nodes + 1, dtype=np.float64) ** -1.1)
        receivers = np.searchsorted(weights, rng.random(case.edges) * weights[-1]).clip(0, case.nodes - 1)
    else:
        receivers = rng.integers(0, case.nodes, case.edges)
    if case.kind == "half":
        receivers[::2] = case.nodes // 2
    receivers = np.sort(receivers) if case.ordered else receivers
    return rng.integers(0, case.nodes, case.edges).astype(np.int32), receivers.astype(np.int32)


@functools.cache
def graph_of(case: Case) -> Any:
    import jaxkern

    return jaxkern.Graph(*ends_of(case), num_nodes=case.nodes)


@dataclasses.dataclass(frozen=True)
class Cell(_cell.Cell):
    """One row of the table."""

    case: Case

    @property
    def bytes(self) -> int:
        item, edges = jnp.dtype(self.dtype).itemsize, self.case.edges
        rows, result = (
            edges * self.case.width * item,
            self.case.nodes * self.case.width * item,
        )  # gathered for edges; of nodes
        weights = edges * item * (HEADS if self.op == "heads" else 1)
        if self.op == "edge_dot":
            # Queries of a receiver's edges come from the cache.
            return (
                rows + result + weights + 12 * edges if self.direction == "forward" else 2 * (rows + result + weights)
            )
        if self.direction == "forward":
            return rows + weights + result + 8 * edges
        # By x: cotangents are gathered; by w: x is, and neighbouring edges share their cotangent.
        return 2 * (rows + weights) + 3 * result + 20 * edges

    def goals(self) -> list[dict[str, Any]]:
        against = ["xla"] if self.case.cpu else ["xla", COMPUTED]
        return [{"goal": "peers", "against": against}]


def cells(case: Case, dtype: str, ops: tuple[str, ...]) -> list[Cell]:
    """Both directions of edge_sum; the other operations at widths of whole vectors."""
    few = ("edge_sum",) if case.group != "width" or case.width not in (64, 128, 256) else OPS
    pairs = [(op, d) for op in ops if op in few for d in DIRECTIONS if op != "scale" or d == "forward"]
    return [Cell(case, dtype, op, direction) for op, direction in pairs]


# --- what runs -----------------------------------------------------------------------------------


def _operands(cell: Cell) -> list[jax.ShapeDtypeStruct]:
    case = cell.case
    x = jax.ShapeDtypeStruct((case.nodes, case.width), cell.dtype)
    if cell.op == "edge_dot":
        return [x, x]
    weights = (case.edges, HEADS) if cell.op == "heads" else (case.edges,)
    return [x, jax.ShapeDtypeStruct(weights, cell.dtype)]


def _message(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.nn.silu(x) * w


def _scaled(x: jax.Array, w: jax.Array) -> jax.Array:
    return x * w


def _message_of(cell: Cell) -> Any:
    return _scaled if cell.op == "scale" else _message


def _fused(cell: Cell, graph: Any) -> Any:
    import jaxkern

    if cell.op == "edge_dot":
        return lambda q, k: jaxkern.edge_map(lambda k, q: k * q, graph, senders=k, receivers=q, reduce_features=0)
    if cell.op == "heads":
        per_head = lambda x: x.reshape(x.shape[0], HEADS, -1)
        run = lambda x, w: jaxkern.edge_sum(_message, graph, senders=per_head(x), edges=w[..., None])
        return lambda x, w: run(x, w).reshape(x.shape)
    reduce = jaxkern.edge_max if cell.op == "edge_max" else jaxkern.edge_sum
    return lambda x, w: reduce(_message_of(cell), graph, senders=x, edges=w)


def _composed(cell: Cell, select: Any, reduce: Any) -> Any:
    """The same of a gather and a reduction; f(senders, receivers, *operands)."""
    case = cell.case
    if cell.op == "edge_dot":
        return lambda s, r, q, k: jnp.sum(select(k, s) * select(q, r), 1)
    if cell.op == "heads":
        spread = lambda w: jnp.repeat(w, case.width // HEADS, 1)
        return lambda s, r, x, w: reduce(
            _message(select(x, s), spread(w)), r, case.nodes, indices_are_sorted=case.ordered
        )
    message = _message_of(cell)
    return lambda s, r, x, w: reduce(message(select(x, s), w[:, None]), r, case.nodes, indices_are_sorted=case.ordered)


def _function(cell: Cell, run: Any) -> Any:
    """A function of (graph, operands, cotangent)."""
    if cell.direction == "forward":
        return run

    def both(graph: Any, a: jax.Array, b: jax.Array, g: jax.Array) -> Any:
        return jax.vjp(functools.partial(run, graph), a, b)[1](g)

    return both


def programs(cell: Cell, algorithms: bool) -> list[Program]:
    """The fused program, XLA's composition, and the composition of this library's separate operations."""
    import jaxkern

    del algorithms
    reduction = "max" if cell.op == "edge_max" else "sum"
    plainly = _composed(cell, lambda x, i: x[i], getattr(jax.ops, f"segment_{reduction}"))
    apart = _composed(cell, lambda x, i: jaxkern.index_select(x, 0, i), getattr(jaxkern, f"segment_{reduction}"))
    runs = {
        _goals.OURS: lambda graph, *operands: _fused(cell, graph)(*operands),
        "xla": lambda graph, *operands: plainly(graph.senders, graph.receivers, *operands),
        COMPUTED: lambda graph, *operands: apart(graph.senders, graph.receivers, *operands),
    }
    specs = [jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), graph_of(cell.case)), *_operands(cell)]
    if cell.direction == "both":
        specs.append(jax.eval_shape(runs[_goals.OURS], *specs))
    return [Program(name, _function(cell, run), specs) for name, run in runs.items()]


def chosen_algorithm(cell: Cell) -> str | None:
    """The way of laying out threads is chosen by width alone."""
    return None


# --- inputs --------------------------------------------------------------------------------------


class Inputs:
    """Arrays of one case and dtype, enough of them to go round cold, and its graph."""

    def __init__(self, pool: _inputs.Pool, case: Case) -> None:
        self.graph, self.pool = graph_of(case), pool
        self.turns = min(64, 1 + _inputs.rotation(case.nodes * case.width * pool.dtype.itemsize))
        self._arrays: dict[Any, jax.Array] = {}

    def array(self, shape: tuple[int, ...], k: int) -> jax.Array:
        key = (shape, k % self.turns)
        if key not in self._arrays:
            self._arrays[key] = self.pool.array(*key)
        return self._arrays[key]

    def arguments(self, cell: Cell, i: int) -> tuple[Any, ...]:
        a, b = (self.array(spec.shape, 2 * i + k) for k, spec in enumerate(_operands(cell)))
        if cell.direction == "forward":
            return self.graph, a, b
        case = cell.case
        return (
            self.graph,
            a,
            b,
            self.array((case.edges,) if cell.op == "edge_dot" else (case.nodes, case.width), 2 * i + 1),
        )


def candidates(cell: Cell, compiled: list[Program], inputs: Inputs) -> list[_timing.Candidate]:
    """What to time for a cell, the copy aside."""
    wait = lambda out: jax.block_until_ready(out)
    call = lambda p: lambda i: p(*inputs.arguments(cell, i))
    like = "half" if cell.case.kind == "half" else f"{cell.case.name} {cell.direction}"
    found = [_timing.Candidate(p.name, call(p), wait, like=f"{p.name} {like}") for p in compiled]
    if _torch.available() and cell.direction == "forward" and cell.op == "edge_sum":
        found.append(_torch_candidate(cell, inputs))
        if _torch.geometric():
            found.append(_geometric_candidate(cell, inputs))
    return found


def _torch_candidate(cell: Cell, inputs: Inputs) -> _timing.Candidate:
    """What PyTorch Geometric's `propagate` does by default: gather, message, scatter-add."""
    torch = _torch.torch()
    state: dict[str, Any] = {}

    def call(i: int) -> Any:
        _, x, w = (None, *inputs.arguments(cell, i)[1:])
        if "s" not in state:
            state["s"], state["r"] = (
                _torch.share(a).to(torch.int64) for a in (inputs.graph.senders, inputs.graph.receivers)
            )
        x, w = _torch.share(x), _torch.share(w)
        m = torch.nn.functional.silu(x.index_select(0, state["s"])) * w[:, None]
        return torch.zeros_like(x).index_add_(0, state["r"], m)

    return _timing.Candidate("torch", call, _torch.sync, torch=True)


def _geometric_candidate(cell: Cell, inputs: Inputs) -> _timing.Candidate:
    """PyTorch Geometric's sparse product over an EdgeIndex whose orders are cached."""
    torch, geometric = _torch.torch(), _torch.geometric()
    state: dict[str, Any] = {}

    def call(i: int) -> Any:
        if not state:
            # Receivers ascend, unless the case says otherwise: then the product sorts.
            ends = torch.stack(
                [_torch.share(a).to(torch.int64) for a in (inputs.graph.receivers, inputs.graph.senders)]
            )
            nodes, order = cell.case.nodes, "row" if cell.case.ordered else None
            state["edges"] = geometric.EdgeIndex(ends, sparse_size=(nodes, nodes), sort_order=order)
            if order:
                state["edges"].fill_cache_()
        _, x, w = inputs.arguments(cell, i)
        x, w = _torch.share(x), _torch.share(w)
        return state["edges"].matmul(torch.nn.functional.silu(x), input_value=w)

    return _timing.Candidate("pyg", call, _torch.sync, torch=True)


# --- what is examined ----------------------------------------------------------------------------


def examine(cell: Cell, compiled: list[Program], inputs: Inputs, times: dict[str, float]) -> list[dict[str, Any]]:
    """The same bits each time, and no larger an error than half a unit of the largest result."""
    ours = compiled[0]
    if ours.error:
        return []
    run = lambda: jax.tree.leaves(ours(*inputs.arguments(cell, 0)))
    first = run()
    equal = all(bool(same(a, b)) for _ in range(2) for a, b in zip(first, run()))
    found = [goal("reproducible", float(equal), 1.0)]
    if cell.direction == "both" or cell.op == "heads":
        return found
    s, r = ends_of(cell.case)
    at = np.flatnonzero(np.isin(r, np.random.default_rng(1).choice(r, EXAMINED)))
    if at.size > 100_000:
        return found
    _, a, b = (None, *inputs.arguments(cell, 0)[1:])
    wide = lambda x, i: np.asarray(x[jnp.asarray(i)]).astype(np.float64)
    if cell.op == "edge_dot":
        exact, out = np.sum(wide(a, r[at]) * wide(b, s[at]), 1), wide(first[0], at)
    else:
        x = wide(a, s[at])
        rows, place = np.unique(r[at], return_inverse=True)
        exact = np.full((rows.size, x.shape[1]), -np.inf if cell.op == "edge_max" else 0.0)
        add = np.maximum if cell.op == "edge_max" else np.add
        values = x if cell.op == "scale" else x / (1 + np.exp(-x))
        add.at(exact, place, values * wide(b, at)[:, None])
        out = wide(first[0], rows)
    allowed = max(float(jnp.finfo(cell.dtype).eps), 2e-6) * np.abs(exact).max()
    return [*found, goal("accurate", allowed / max(np.abs(out - exact).max(), 1e-300), 1.0)]


@jax.jit
def same(a: jax.Array, b: jax.Array) -> jax.Array:
    bits = lambda a: jax.lax.bitcast_convert_type(a, jnp.uint16 if a.dtype.itemsize == 2 else jnp.uint32)
    return (bits(a) == bits(b)).all()


def goal(name: str, value: float, required: float) -> dict[str, Any]:
    value = min(float(value), 1e6)
    return {"goal": name, "required": required, "value": round(value, 4), "met": value >= required}


def checks(clock: Any) -> list[dict[str, Any]]:
    """One kernel forward, and one for each gradient; on a GPU, the training step of a network (graph_step.py)."""
    del clock
    from benchmarks import graph_step

    steps = graph_step.checks() if jax.default_backend() == "gpu" else []
    cell = Cell(Case("check", (4096, 32), 512), "float32", "edge_sum", "both")
    program = programs(cell, False)[0]
    program.compile()
    return [
        {
            "check": "the gradients by x and w are a kernel each",
            "handlers": program.targets,
            "moves": [],
            "met": sorted(program.targets) == ["jaxkern_edge_map", "jaxkern_edge_reduce"],
        },
        *steps,
    ]
