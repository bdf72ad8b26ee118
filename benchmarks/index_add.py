"""index_add, segment_sum and index_select against XLA, PyTorch and the floor.

The floor of a call is a copy of the bytes that must move: for index_add the source once and the touched rows
twice; for segment_sum the source once and every row once; for index_select one row read and one row written per
index; and the indices. index_add's x is donated, as is `.at[].add`'s, and PyTorch's index_add_ works in place.

The cases are the five shapes of the PyTorch and OneFlow comparison, gradients of embeddings, graphs, histograms
and cases that users of JAX report as slow; one graph is run with indices from even to all on one row. On a CPU
there are a tenth of the rows and indices. Results are examined too: they have the same bits every
time, and an error like XLA's.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _cell, _goals, _inputs, _timing, _torch
from benchmarks._program import Program

OPERATION = "index_add"
OPS = ("index_add", "segment_sum", "index_select")
PLANS = ("unique", "small", "sorted", "sort", "narrow", "atomic")
LARGE_COUNT, LARGE_ROW = 65536, 256  # from which the floor is owed
EXAMINED_ROWS, EXAMINED_UPDATES, EXAMINED_ELEMENTS = 64, 200_000, 4 << 20
MOST_SOURCES = 64  # to go round: small ones are evicted by the array that they are added to
KINDS = ("uniform", "zipf 1.1", "zipf 1.5", "half", "same")


@dataclasses.dataclass(frozen=True)
class Case:
    """x of `shape`, indexed along its first dimension; `batch` of such problems under vmap."""

    group: str
    shape: tuple[int, ...]
    count: int
    kind: str = "uniform"
    below: int = 0  # indices are below this; 0: any row
    batch: int = 0
    shared: bool = False  # by the batch
    ops: tuple[str, ...] = OPS
    cpu: bool = False

    @property
    def name(self) -> str:
        batch = f"{self.batch} of " * bool(self.batch) + "shared " * self.shared
        return f"{batch}{'x'.join(map(str, self.shape))} n{self.count} {self.kind.replace(' ', '')}"

    @property
    def width(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def size(self) -> int:
        """Elements of the larger of x and source."""
        return max(1, self.batch) * max(self.shape[0], self.count) * self.width

    def tenth(self) -> Case:
        small = lambda n: max(1, n // 10)
        return dataclasses.replace(
            self,
            shape=(small(self.shape[0]), *self.shape[1:]),
            count=small(self.count),
            below=min(self.below, small(self.shape[0])),
            cpu=True,
        )


GRAPH = (169343, 128), 1166243
SEGMENTS = ("segment_sum",)
CASES = [
    *(
        Case("seeds", s, n, "uniform", below, ops=("index_add",))
        for s, n, below in (
            ((33554432,), 15, 1024),
            ((32768, 1024), 15, 1024),
            ((32, 1024, 1024), 15, 32),
            ((33554432,), 1024, 1024),
            ((32768, 1024), 1024, 1024),
        )
    ),
    Case("embedding", (128256, 4096), 16384, "zipf 1.1"),
    Case("embedding", (32000, 4096), 65536, "zipf 1.1"),
    *(Case("skew", *GRAPH, kind) for kind in KINDS),
    Case("sorted", *GRAPH, "sorted"),
    *(Case("sorted", (169343, width), 1166243, "sorted", ops=SEGMENTS) for width in (1, 7, 33, 256)),
    Case("sorted", (4000, 1091), 70000, "sorted", ops=SEGMENTS),
    Case("graph", (2449029, 32), 20_000_000),
    Case("same", (1024, 1024), 65536, "same"),
    Case("histogram", (1 << 20,), 64 << 20),
    Case("histogram", (1_000_000,), 100_000_000, ops=SEGMENTS),
    Case("few rows", (399, 128), 40960),
    Case("few rows", (399, 128), 40960, "same"),
    *(Case("few rows", (rows,), n, ops=SEGMENTS) for rows in (1, 1024) for n in (10_000, 100_000)),
    Case("batch", (10,), 1_000_000, batch=10, ops=SEGMENTS),
    Case("batch", (12123,), 16384, batch=1024, ops=SEGMENTS),
    Case("batch", (1000, 64), 20000, batch=64, ops=SEGMENTS),
    Case("batch", (1000, 64), 20000, batch=64, shared=True, ops=SEGMENTS),
]
DTYPES = {"gpu": ("float32", "bfloat16", "float16"), "cpu": ("float32", "bfloat16")}
CPU_CASES = [c.tenth() for c in CASES]
_QUICK = (
    "32768x1024 n1024 uniform",
    "169343x128 n1166243 uniform",
    "169343x128 n1166243 same",
    "399x128 n40960 uniform",
)
QUICK = {
    *_QUICK,
    *(c.tenth().name for c in CASES if c.name in _QUICK),
    "128256x4096 n16384 zipf1.1",
    "1048576 n67108864 uniform",
}


@functools.cache  # the dtypes come back to it
def index_of(case: Case) -> np.ndarray:
    """Indices of the kind that the case asks for: [count], or [batch, count] where each has its own."""
    rng, rows = np.random.default_rng(0), case.below or case.shape[0]
    shape = (case.batch, case.count) if case.batch and not case.shared else (case.count,)
    if case.kind.startswith("zipf"):  # frequent rows anywhere, as in a vocabulary
        weights = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -float(case.kind.split()[1]))
        found = np.searchsorted(weights, rng.random(shape) * weights[-1]).clip(0, rows - 1)
        return rng.permutation(rows)[found].astype(np.int32)
    found = rng.integers(0, rows, shape, dtype=np.int32)
    if case.kind == "same":
        found[...] = rows // 2
    elif case.kind == "half":
        found[..., ::2] = rows // 2
    return np.sort(found) if case.kind == "sorted" else found


@functools.cache
def touched(case: Case) -> int:
    index = index_of(case)
    times = max(1, case.batch) if index.ndim == 1 else 1
    return times * sum(int(np.count_nonzero(np.bincount(one))) for one in index.reshape(-1, case.count))


@dataclasses.dataclass(frozen=True)
class Cell(_cell.Cell):
    """One row of the table."""

    case: Case

    @property
    def bytes(self) -> int:
        case, item = self.case, jnp.dtype(self.dtype).itemsize
        moved = case.count * max(1, case.batch)
        rows = {
            "index_add": moved + 2 * touched(case),
            "segment_sum": moved + max(1, case.batch) * case.shape[0],
            "index_select": 2 * moved,
        }[self.op]
        return rows * case.width * item + index_of(case).size * 4

    def goals(self) -> list[dict[str, Any]]:
        case, item = self.case, jnp.dtype(self.dtype).itemsize
        peers = {"goal": "peers"}
        if case.cpu:
            return [peers | {"against": ["xla"]}]
        floor = lambda times: {"goal": "copy", "required": 1 / times}
        row = case.width * item
        if self.op == "index_select":
            return [peers, *([{"goal": "copy", "required": 0.9}] if row >= 128 else [])]
        if case.group == "embedding" and self.op == "segment_sum":
            return [peers, floor(1.2)]
        if case.kind == "sorted":
            return [peers, *([floor(1.15)] if self.op == "segment_sum" else [])]
        if row >= LARGE_ROW and case.count >= LARGE_COUNT:
            return [peers, floor(1.35 if item >= 4 else 1.6)]
        return [peers]


def cells(case: Case, dtype: str, ops: tuple[str, ...]) -> Iterator[Cell]:
    for op in case.ops:
        if op in ops:
            yield Cell(case, dtype, op)


# --- what runs -----------------------------------------------------------------------------------


def _function(cell: Cell, library: Any, plan: str = "auto") -> Any:
    """library: jaxkern, or jax for its own way."""
    import jaxkern

    case, ours = cell.case, library is jaxkern
    hint = case.kind == "sorted"
    rows = case.shape[0]

    def add(x, index, source):
        if ours:
            return jaxkern.index_add(x, 0, index, source, indices_are_sorted=hint, deterministic=plan != "atomic")
        return x.at[index].add(source, indices_are_sorted=hint)

    def total(index, source):
        module = jaxkern if ours else jax.ops
        return module.segment_sum(source, index, rows, indices_are_sorted=hint)

    def select(x, index):
        return jaxkern.index_select(x, 0, index) if ours else jnp.take(x, index, axis=0)

    function = {"index_add": add, "segment_sum": total, "index_select": select}[cell.op]
    if case.batch:
        at = None if case.shared else 0
        axes = {"index_add": (0, at, 0), "segment_sum": (at, 0), "index_select": (0, at)}
        function = jax.vmap(function, axes[cell.op])

    def run(*arguments):
        with jaxkern.algorithms.force(**{cell.op: plan}):
            return function(*arguments)

    return run


def _specs(cell: Cell) -> list[jax.ShapeDtypeStruct]:
    case = cell.case
    batch = (case.batch,) * bool(case.batch)
    x = jax.ShapeDtypeStruct((*batch, *case.shape), cell.dtype)
    source = jax.ShapeDtypeStruct((*batch, case.count, *case.shape[1:]), cell.dtype)
    index = jax.ShapeDtypeStruct(index_of(case).shape, jnp.int32)
    return {"index_add": [x, index, source], "segment_sum": [index, source], "index_select": [x, index]}[cell.op]


def programs(cell: Cell, algorithms: bool) -> list[Program]:
    """This library's and XLA's programs of a cell."""
    import jaxkern

    donate = (0,) if cell.op == "index_add" else ()
    specs = _specs(cell)
    program = lambda name, function: Program(name, function, specs, donate)
    found = [program(_goals.OURS, _function(cell, jaxkern)), program("xla", _function(cell, jax))]
    if algorithms and jax.default_backend() == "gpu" and cell.op != "index_select":
        found += [program(f"{_goals.OURS}:{p}", _function(cell, jaxkern, p)) for p in PLANS if _fits(cell, p)]
    return found


def _problem(cell: Cell) -> dict[str, Any]:
    """The problem of a cell, as `jaxkern.algorithms` takes it."""
    case = cell.case
    return dict(
        rows=case.shape[0],
        count=case.count,
        inner=case.width,
        dtype=cell.dtype,
        **({} if cell.op == "index_select" else dict(sorted=case.kind == "sorted")),
        **({"outer" if case.shared else "batch": case.batch} if case.batch and cell.op != "index_select" else {}),
    )


def _fits(cell: Cell, plan: str) -> bool:
    from jaxkern import algorithms

    return algorithms.fits(cell.op, plan, **_problem(cell), deterministic=plan != "atomic")


def chosen_algorithm(cell: Cell) -> str | None:
    """The plan that runs a cell by default on this GPU."""
    from jaxkern import algorithms

    if jax.default_backend() != "gpu":
        return None
    try:
        return algorithms.choose(cell.op, **_problem(cell))
    except RuntimeError:
        return None


# --- inputs --------------------------------------------------------------------------------------


class Inputs:
    """Sources and arrays of one case and dtype, enough of them to go round cold, and its indices."""

    def __init__(self, pool: _inputs.Pool, case: Case) -> None:
        batch = (case.batch,) * bool(case.batch)
        self.index = jnp.asarray(index_of(case))
        source = (*batch, case.count, *case.shape[1:])
        turns = min(MOST_SOURCES, _inputs.rotation(math.prod(source) * pool.dtype.itemsize))
        self.sources = [pool.array(source, i) for i in range(turns)]
        x = (*batch, *case.shape)  # read by index_select, overwritten again and again by index_add
        self.xs = [pool.array(x, i) for i in range(min(4, _inputs.rotation(math.prod(x) * pool.dtype.itemsize)))]
        jax.block_until_ready((self.index, self.sources, self.xs))

    def arguments(self, op: str, i: int) -> tuple[Any, ...]:
        """x is left to the caller for index_add, which gives it away."""
        source = self.sources[i % len(self.sources)]
        if op == "index_select":
            return self.xs[i % len(self.xs)], self.index
        return self.index, source


def candidates(cell: Cell, compiled: list[Program], inputs: Inputs) -> list[_timing.Candidate]:
    """What to time for a cell, the copy aside."""
    wait = lambda out: jax.block_until_ready(out)
    call = lambda p: _in_place(p, inputs) if cell.op == "index_add" else lambda i: p(*inputs.arguments(cell.op, i))
    # Whether it adds to x or to zeros, XLA's scatter is as slow.
    like = lambda p: f"{p.name} {cell.case.name} {cell.op if cell.op == 'index_select' else ''}"
    found = [_timing.Candidate(p.name, call(p), wait, like=like(p)) for p in compiled]
    if _torch.available():
        found.append(_torch_candidate(cell, inputs))
    return found


def _in_place(program: Program, inputs: Inputs) -> Any:
    """Calls that give their x away and get it back, of two arrays in turn."""
    own: list[jax.Array] = []

    def call(i: int) -> list[jax.Array]:
        if not own:
            own.extend(jnp.copy(x) for x in inputs.xs[:2])
        k = i % len(own)
        own[k] = program(own[k], *inputs.arguments("index_add", i))
        return own  # the list, not an array in it, which a later call gives away

    return call


def _torch_candidate(cell: Cell, inputs: Inputs) -> _timing.Candidate:
    torch = _torch.torch()
    case = cell.case
    state: dict[str, Any] = {}

    def call(i: int) -> Any:
        if case.batch:
            raise RuntimeError("PyTorch has no such batch in one call")
        if not state:
            state["index"] = _torch.share(inputs.index).to(torch.int64)
            state["sources"] = [_torch.share(s) for s in inputs.sources]
            state["xs"] = [_torch.share(x).clone() for x in inputs.xs[:2]]
        x = state["xs"][i % len(state["xs"])]
        source = state["sources"][i % len(state["sources"])]
        if cell.op == "index_select":
            return x.index_select(0, state["index"])
        if cell.op == "segment_sum":
            return torch.zeros_like(x).index_add_(0, state["index"], source)
        return x.index_add_(0, state["index"], source)

    return _timing.Candidate("torch", call, _torch.sync, torch=True)


# --- what is examined ----------------------------------------------------------------------------


def examine(cell: Cell, compiled: list[Program], inputs: Inputs, times: dict[str, float]) -> list[dict[str, Any]]:
    """Goals: reproducible, in four runs, and accurate (against XLA unless it is slow)."""
    by_name = {p.name: p for p in compiled}
    ours, theirs = by_name[_goals.OURS], by_name["xla"]
    if cell.op == "index_select" or ours.error:
        return []

    def run(program: Program) -> jax.Array:
        arguments = inputs.arguments(cell.op, 0)
        return program(*((jnp.copy(inputs.xs[0]), *arguments) if cell.op == "index_add" else arguments))

    first = run(ours)
    goals = [_goal("reproducible", float(all(_same(first, run(ours)) for _ in range(3))), 1.0)]
    if cell.case.batch:
        return goals
    rows, width, exact = _exact(cell, inputs)
    picked = lambda out: out.reshape(out.shape[0], -1)[jnp.asarray(rows), :width]
    error = lambda out: np.abs(np.asarray(picked(out)).astype(np.float64) - exact).max()
    # Half a unit of the largest result is what rounding costs either way.
    allowed = float(jnp.finfo(cell.dtype).eps) / 2 * np.abs(exact).max()
    if "xla" in times and times["xla"] < _timing.SLOW * 1e6:
        allowed = max(allowed, error(run(theirs)))
    return [*goals, _goal("accurate", allowed / max(error(first), 1e-300), 1 / _goals.ERROR)]


@jax.jit
def _same(a: jax.Array, b: jax.Array) -> jax.Array:
    bits = lambda a: jax.lax.bitcast_convert_type(a, jnp.uint16 if a.dtype.itemsize == 2 else jnp.uint32)
    return (bits(a) == bits(b)).all()


def _goal(name: str, value: float, required: float) -> dict[str, Any]:
    value = min(float(value), 1e6)
    return {"goal": name, "required": round(required, 4), "value": round(value, 4), "met": value >= required}


def _exact(cell: Cell, inputs: Inputs) -> tuple[np.ndarray, int, np.ndarray]:
    """Some rows, the first update's among them, how many of their columns, and these in float64."""
    index = index_of(cell.case)
    rows = np.unique(np.concatenate([index[:1], np.random.default_rng(1).choice(index, EXAMINED_ROWS)]))
    at = np.flatnonzero(np.isin(index, rows))
    while len(at) > EXAMINED_UPDATES and len(rows) > 1:
        rows = rows[: len(rows) // 2]
        at = np.flatnonzero(np.isin(index, rows))
    at = at[np.argsort(index[at], kind="stable")]
    width = max(1, EXAMINED_ELEMENTS // len(at))
    taken = lambda x, at: np.asarray(x.reshape(x.shape[0], -1)[jnp.asarray(at), :width]).astype(np.float64)
    exact = np.add.reduceat(taken(inputs.sources[0], at), np.searchsorted(index[at], rows))
    return rows, width, exact + taken(inputs.xs[0], rows) * (cell.op == "index_add")


def checks(clock: Any) -> list[dict[str, Any]]:
    """Properties of compiled programs: the gradient of a lookup is one kernel that writes every row once."""
    import jaxkern

    table, ids = jnp.ones((1000, 256)), jnp.arange(4096) % 1000
    gradient = jax.grad(lambda t, w: jnp.sum(jaxkern.embedding_lookup(t, ids) * w))
    program = Program("gradient", gradient, [table, jnp.ones((4096, 256))])
    program.compile()
    return [
        {
            "check": "the gradient of a lookup is one segment_sum",
            "met": program.targets == ["jaxkern_segment_sum"],
            "handlers": program.targets,
            "moves": [],
        }
    ]
