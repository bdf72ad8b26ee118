"""segment_softmax against XLA's composition, PyTorch's, and the copy of the bytes that must move.

The peers compose it of separate operations: maxima of segments, a gather, an exponential, sums of segments, a gather, a
division. `forward` is the softmax alone, `both` the softmax and its gradient in one program. The floor of `forward`
reads and writes the data once; the floor of `both` reads data, result and cotangent, and writes result and gradient.
Both read the ids. Cases are the attention weights of graphs: 1.17 M edges of 8 heads, and of wide rows, with segments
from even to one that has everything. On a CPU rows and segments are a tenth. Results are examined too: they have the
same bits every time, an error like XLA's, and take no more memory than outputs, sorted ids and a few numbers for each
long segment.
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

OPERATION = "segment_softmax"
OPS = ("segment_softmax",)
DIRECTIONS = ("forward", "both")
TIMES_XLA = 5.0  # what is asked of graphs
EXAMINED_SEGMENTS, EXAMINED_ROWS = 32, 100_000
SORTED_BYTES = 24  # a row of data: two buffers of (key, position), counts
PARTS = 8  # a byte for so many elements: statistics of the parts of long segments


@dataclasses.dataclass(frozen=True)
class Case:
    """Data of `shape` in so many segments."""

    group: str
    shape: tuple[int, ...]
    segments: int
    kind: str = "sorted"  # or uniform, zipf, half, same ("same" is sorted too)
    cpu: bool = False

    @property
    def name(self) -> str:
        return f"{'x'.join(map(str, self.shape))} in {self.segments} {self.kind}"

    @property
    def count(self) -> int:
        return self.shape[0]

    @property
    def width(self) -> int:
        return self.shape[1]

    @property
    def size(self) -> int:
        return self.count * self.width

    @property
    def ascending(self) -> bool:
        return not self.kind.endswith("unsorted")

    def tenth(self) -> Case:
        small = lambda n: max(1, n // 10)
        return dataclasses.replace(self, shape=(small(self.count), self.width), segments=small(self.segments), cpu=True)


EDGES = 1_166_243
CASES = [
    *(Case("graph", (EDGES, 8), n, kind) for n in (10_000, 50_000) for kind in ("sorted", "unsorted")),
    *(Case("graph", (EDGES, width), n) for n, width in ((10_000, 64), (50_000, 64), (10_000, 256), (50_000, 256))),
    Case("graph", (EDGES, 64), 50_000, "unsorted"),
    *(Case("skew", (EDGES, 8), 50_000, kind) for kind in ("zipf", "half", "same", "half unsorted")),
    *(Case("width", (EDGES, width), 50_000) for width in (1, 3, 16, 33)),
    Case("large", (20_000_000, 8), 2_449_029),
    Case("large", (20_000_000, 8), 2_449_029, "unsorted"),
]
DTYPES = {"gpu": ("float32", "bfloat16"), "cpu": ("float32", "bfloat16")}
CPU_CASES = [c.tenth() for c in CASES]
QUICK = {c.name for c in (*CASES[:3], *CPU_CASES[:3])}


@functools.cache
def ids_of(case: Case) -> np.ndarray:
    rng = np.random.default_rng(0)
    shape = case.kind.removesuffix("unsorted").strip()
    if shape == "zipf":
        weights = np.cumsum(np.arange(1, case.segments + 1, dtype=np.float64) ** -1.1)
        ids = np.searchsorted(weights, rng.random(case.count) * weights[-1]).clip(0, case.segments - 1).astype(np.int32)
    else:
        ids = rng.integers(0, case.segments, case.count, dtype=np.int32)
    if shape in ("half", "same"):
        ids[:: 2 if shape == "half" else 1] = case.segments // 2
    return np.sort(ids) if case.ascending else ids


@dataclasses.dataclass(frozen=True)
class Cell(_cell.Cell):
    """One row of the table."""

    case: Case

    @property
    def bytes(self) -> int:
        arrays = 2 if self.direction == "forward" else 5
        return arrays * self.case.size * jnp.dtype(self.dtype).itemsize + 4 * self.case.count

    def goals(self) -> list[dict[str, Any]]:
        peers = {"goal": "peers"}
        if self.case.cpu:
            return [peers | {"against": ["xla"]}]
        of_xla = {"goal": "peers", "against": ["xla"], "required": TIMES_XLA}
        return [peers, *([of_xla] if self.case.group == "graph" else [])]


# --- what runs -----------------------------------------------------------------------------------


def _composition(x: jax.Array, ids: jax.Array, segments: int, ascending: bool) -> jax.Array:
    of = lambda reduce, x: reduce(x, ids, segments, indices_are_sorted=ascending)[ids]
    e = jnp.exp(x - of(jax.ops.segment_max, x))
    return e / of(jax.ops.segment_sum, e)


def _function(cell: Cell, softmax: Any) -> Any:
    case = cell.case
    run = lambda x, ids: softmax(x, ids, case.segments, case.ascending)
    if cell.direction == "forward":
        return run

    def both(x: jax.Array, ids: jax.Array, g: jax.Array) -> Any:
        y, pull = jax.vjp(lambda x: run(x, ids), x)
        return y, pull(g)[0]

    return both


def programs(cell: Cell, algorithms: bool) -> list[Program]:
    """This library's and XLA's programs of a cell."""
    import jaxkern

    del algorithms  # one way for sorted ids, and the same behind a sort for others
    data = jax.ShapeDtypeStruct(cell.case.shape, cell.dtype)
    specs = [data, jax.ShapeDtypeStruct((cell.case.count,), jnp.int32), data][: 2 if cell.direction == "forward" else 3]
    return [
        Program(_goals.OURS, _function(cell, jaxkern.segment_softmax), specs),
        Program("xla", _function(cell, _composition), specs),
    ]


def chosen_algorithm(cell: Cell) -> str | None:
    """The plan that runs a cell by default on this GPU."""
    from jaxkern import algorithms

    if jax.default_backend() != "gpu":
        return None
    case = cell.case
    return algorithms.choose(
        "segment_softmax", case.segments, case.count, case.width, cell.dtype, sorted=case.ascending
    )


# --- inputs --------------------------------------------------------------------------------------


class Inputs:
    """Arrays of one case and dtype, enough of them to go round cold, and its ids."""

    def __init__(self, pool: _inputs.Pool, case: Case) -> None:
        self.ids = jnp.asarray(ids_of(case))
        turns = min(64, 1 + _inputs.rotation(case.size * pool.dtype.itemsize))
        self.arrays = [pool.array(case.shape, i) for i in range(turns)]
        jax.block_until_ready((self.ids, self.arrays))

    def arguments(self, cell: Cell, i: int) -> tuple[Any, ...]:
        array = lambda k: self.arrays[k % len(self.arrays)]
        return (array(i), self.ids) if cell.direction == "forward" else (array(2 * i), self.ids, array(2 * i + 1))


def candidates(cell: Cell, compiled: list[Program], inputs: Inputs) -> list[_timing.Candidate]:
    """What to time for a cell, the copy aside."""
    wait = lambda out: jax.block_until_ready(out)
    call = lambda p: lambda i: p(*inputs.arguments(cell, i))
    hot = cell.case.kind.split()[0] in ("half", "same")  # XLA takes seconds wherever one segment has most of the rows
    like = "hot segment" if hot else f"{cell.case.name} {cell.direction}"
    found = [_timing.Candidate(p.name, call(p), wait, like=f"{p.name} {like}") for p in compiled]
    if _torch.available() and cell.direction == "forward":
        found.append(_torch_candidate(cell, inputs))
    return found


def _torch_candidate(cell: Cell, inputs: Inputs) -> _timing.Candidate:
    torch = _torch.torch()
    case = cell.case
    state: dict[str, Any] = {}

    def call(i: int) -> Any:
        if not state:
            state["ids"] = _torch.share(inputs.ids).to(torch.int64)
            state["xs"] = [_torch.share(x) for x in inputs.arrays]
        x, ids = state["xs"][i % len(state["xs"])], state["ids"]
        start = torch.full((case.segments, case.width), -torch.inf, dtype=x.dtype, device=x.device)
        largest = start.scatter_reduce_(0, ids[:, None].expand_as(x), x, "amax")
        e = (x - largest.index_select(0, ids)).exp_()
        return e.div_(torch.zeros_like(start).index_add_(0, ids, e).index_select(0, ids))

    return _timing.Candidate("torch", call, _torch.sync, torch=True)


# --- what is examined ----------------------------------------------------------------------------


def examine(cell: Cell, compiled: list[Program], inputs: Inputs, times: dict[str, float]) -> list[dict[str, Any]]:
    """Goals: reproducible, accurate (against XLA unless it is slow) and memory."""
    ours, theirs = compiled
    if ours.error:
        return []
    run = lambda program: jax.tree.leaves(program(*inputs.arguments(cell, 0)))
    first = run(ours)
    same = all(bool(_same(a, b)) for _ in range(2) for a, b in zip(first, run(ours)))
    case = cell.case
    beside = (0 if case.ascending else SORTED_BYTES * case.count) + case.size // PARTS + (1 << 16)
    found = [_goal("reproducible", float(same), 1.0), *_goals.memory(compiled, beside)]
    at, exact = _exact(cell, inputs)
    errors = lambda out: [
        np.abs(np.asarray(a[jnp.asarray(at)]).astype(np.float64) - e).max() for a, e in zip(out, exact, strict=True)
    ]
    allowed = [float(jnp.finfo(cell.dtype).eps) / 2 * np.abs(e).max() for e in exact]
    if "xla" in times and times["xla"] < _timing.SLOW * 1e6:
        allowed = map(max, allowed, errors(run(theirs)))
    share = min(a / max(e, 1e-300) for a, e in zip(allowed, errors(first)))
    return [*found, _goal("accurate", share, 1 / _goals.ERROR)]


@jax.jit
def _same(a: jax.Array, b: jax.Array) -> jax.Array:
    bits = lambda a: jax.lax.bitcast_convert_type(a, jnp.uint16 if a.dtype.itemsize == 2 else jnp.uint32)
    return (bits(a) == bits(b)).all()


def _goal(name: str, value: float, required: float) -> dict[str, Any]:
    value = min(float(value), 1e6)
    return {"goal": name, "required": round(required, 4), "value": round(value, 4), "met": value >= required}


def _exact(cell: Cell, inputs: Inputs) -> tuple[np.ndarray, list[np.ndarray]]:
    """The rows of some segments, and the softmax of these, and its gradient, in float64."""
    ids = ids_of(cell.case)
    segments = np.unique(np.random.default_rng(1).choice(ids, EXAMINED_SEGMENTS))
    while (at := np.flatnonzero(np.isin(ids, segments))).size > EXAMINED_ROWS and segments.size > 1:
        segments = segments[: segments.size // 2]
    at = at[np.argsort(ids[at], kind="stable")]
    x, *g = (np.asarray(a[jnp.asarray(at)]).astype(np.float64) for a in inputs.arguments(cell, 0)[::2])
    begin, place = np.searchsorted(ids[at], segments), np.searchsorted(segments, ids[at])
    e = np.exp(x - np.maximum.reduceat(x, begin)[place])
    y = e / np.add.reduceat(e, begin)[place]
    return at, [y, *(y * (g - np.add.reduceat(y * g, begin)[place]) for g in g)]


def checks(clock: Any) -> list[dict[str, Any]]:
    """Properties of compiled programs: one kernel forward and one backward, and nothing that is as large beside."""
    import jaxkern

    del clock
    ids = jnp.arange(4096) // 10
    step = jax.grad(lambda x, g: jnp.sum(jaxkern.segment_softmax(x, ids, 410, indices_are_sorted=True) * g))
    program = Program("gradient", step, [jax.ShapeDtypeStruct((4096, 8), jnp.float32)] * 2)
    program.compile()
    return [
        {
            "check": "the gradient is one kernel forward and one backward",
            "handlers": program.targets,
            "moves": [],
            "met": program.targets == ["jaxkern_segment_softmax", "jaxkern_segment_softmax_grad"],
        }
    ]
