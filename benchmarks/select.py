"""top_k, sorts of rows, counts, searches and sampling, against XLA, PyTorch and a copy.

    python -m benchmarks select [--ops top_k,sort] [--cases REGEX]

    top_k         the k largest of each row: sampling, routing, beam search, one long row, rows that ascend
    sort, argsort rows, and all elements of one array
    bincount      uniform numbers into few and many bins, and all into one
    searchsorted  uniform queries in a sorted array
    median        of a long array, and of long rows
    sample        temperature, top-k 50, top-p 0.9: with `jaxkern.sample`; XLA sorts the vocabulary
    route         softmax, top-k, renormalisation and slots of a router

A copy moves as many bytes as must be read and written once. A sort has no such bound; it is given for comparison.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern
from benchmarks import _cell, _goals, _inputs, _timing, _torch
from benchmarks._program import Program

OPERATION = "select"
OPS = ("top_k", "sort", "argsort", "bincount", "searchsorted", "median", "sample", "route")
DIRECTIONS = ("forward",)
FASTER_XLA, FASTER_TORCH = 5.0, 2.0  # asked of top_k, but XLA finds one element of float32 in one read


@dataclasses.dataclass(frozen=True)
class Case:
    """An array of `shape` for one operation; `number`: k, the bins, or the elements of the array that is searched."""

    group: str  # the operation
    shape: tuple[int, ...]
    number: int = 0
    dtype: str = "float32"
    kind: str = "uniform"
    cpu: bool = False

    @property
    def name(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{self.group} {shape}{f' {self.number}' if self.number else ''}{f' {self.kind}' if self.kind != 'uniform' else ''}"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        return self.shape[-1]


SORTED = ((65536, 1024), (1048576, 64), (16384, 4096), (4096, 32768), (1, 1 << 26))
CASES = [
    *(Case("top_k", (4096, 32768), k) for k in (1, 8, 50)),
    Case("top_k", (4096, 32768), 50, kind="ascending"),
    Case("top_k", (64, 128256), 50, "bfloat16"),
    Case("top_k", (4096, 32768), 1, "bfloat16"),
    Case("top_k", (32768, 256), 8),
    Case("top_k", (4096, 4096), 2048),
    Case("top_k", (64, 128256), 2048),
    Case("top_k", (1, 1 << 24), 100),
    Case("top_k", (16, 262144), 256),
    *(Case(op, shape) for op in ("sort", "argsort") for shape in SORTED),
    *(Case("bincount", (1 << 24,), bins) for bins in (256, 1 << 20)),
    Case("bincount", (1 << 24,), 256, kind="one"),
    Case("searchsorted", (1 << 24,), 1 << 20),
    *(Case("median", shape) for shape in ((1, 1 << 26), (64, 1 << 20))),
    Case("sample", (128, 128256), 50),
    Case("route", (32768, 64), 2),
]
CPU_CASES = [
    Case("top_k", (64, 4096), 8, cpu=True),
    Case("sort", (256, 1024), cpu=True),
    Case("argsort", (256, 1024), cpu=True),
    Case("bincount", (1 << 18,), 256, cpu=True),
    Case("searchsorted", (1 << 16,), 1 << 12, cpu=True),
    Case("median", (8, 4096), cpu=True),
    Case("sample", (8, 4096), 50, cpu=True),
    Case("route", (1024, 64), 2, cpu=True),
]
DTYPES = {"gpu": ("float32", "bfloat16"), "cpu": ("float32",)}
CHOOSES = {"top_k": "top_k", "bincount": "bincount", "sort": "sort", "argsort": "sort"}  # the operation in `algorithms`
QUICK = {c.name for c in (CASES[2], CASES[6], *CPU_CASES)}


@dataclasses.dataclass(frozen=True)
class Cell(_cell.Cell):
    """One row of the table."""

    case: Case

    @property
    def bytes(self) -> int:
        """What must be read and written once."""
        case, size = self.case, jnp.dtype(self.dtype).itemsize
        rows = case.size // case.width
        written = {
            "top_k": rows * case.number * (size + 4),
            "sort": case.size * size,
            "argsort": 4 * case.size,
            "bincount": 4 * case.number,
            "searchsorted": 4 * case.size + size * case.number,
            "median": rows * size,
            "sample": 4 * rows,
            "route": rows * case.number * (size + 8),
        }
        return case.size * size + written[self.op]

    def goals(self) -> list[dict[str, Any]]:
        if self.case.cpu:
            return []
        top = self.op == "top_k"
        one_read = self.case.number == 1 and self.dtype == "float32"
        peers = {"goal": "peers", "against": ["xla"], "required": FASTER_XLA if top and not one_read else 1.0}
        return [peers, {"goal": "peers", "against": ["torch"], "required": FASTER_TORCH}] if top else [peers]


def cells(case: Case, dtype: str, ops: tuple[str, ...]) -> list[Cell]:
    return [Cell(case, dtype, case.group)] if case.group in ops and case.dtype == dtype else []


def _sampled(key: jax.Array, logits: jax.Array, k: int) -> jax.Array:
    """What programs do by hand: both filters in the order of a full sort."""
    order = jnp.argsort(-logits / 0.8)
    rows = jnp.take_along_axis(logits / 0.8, order, -1)
    rows = jnp.where(jnp.arange(rows.shape[-1]) < k, rows, -jnp.inf)
    mass = jax.nn.softmax(rows)
    at = jax.random.categorical(key, jnp.where(jnp.cumsum(mass, -1) - mass < 0.9, rows, -jnp.inf))
    return jnp.take_along_axis(order, at[:, None], -1)[:, 0]


def _routed(logits: jax.Array, k: int) -> Any:
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits), k)
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    slots = jnp.zeros(flat.shape, jnp.int32).at[order].set(jnp.arange(flat.size, dtype=jnp.int32))
    counts = jnp.zeros(logits.shape[-1], jnp.int32).at[flat].add(1)
    return weights / weights.sum(-1, keepdims=True), experts, slots.reshape(experts.shape), counts


def programs(cell: Cell, algorithms: bool) -> list[Program]:
    """This library's programs, in each algorithm if asked, and XLA's."""
    case, size = cell.case, cell.case.number
    x = jax.ShapeDtypeStruct(case.shape, jnp.int32 if cell.op == "bincount" else cell.dtype)
    array = jax.ShapeDtypeStruct((size,), cell.dtype)
    key = functools.partial(jax.random.key, 0)
    calls = {
        "top_k": (lambda x: jaxkern.top_k(x, size), lambda x: jax.lax.top_k(x, size), [x]),
        "sort": (jaxkern.sort, jnp.sort, [x]),
        "argsort": (jaxkern.argsort, jnp.argsort, [x]),
        "bincount": (lambda x: jaxkern.bincount(x, size), lambda x: jnp.bincount(x, length=size), [x]),
        "searchsorted": (
            lambda x, a: jaxkern.searchsorted(a, x),
            lambda x, a: jnp.searchsorted(a, x, method="scan_unrolled"),
            [x, array],
        ),
        "median": (lambda x: jaxkern.median(x, -1), lambda x: jnp.median(x, -1), [x]),
        "sample": (
            lambda x: jaxkern.sample(x, key(), temperature=0.8, top_k=size, top_p=0.9),
            lambda x: _sampled(key(), x, size),
            [x],
        ),
        "route": (lambda x: jaxkern.moe_route(x, size), lambda x: _routed(x, size), [x]),
    }
    ours, theirs, specs = calls[cell.op]
    found = [Program(_goals.OURS, ours, specs)]
    if algorithms and cell.op in CHOOSES:
        op = CHOOSES[cell.op]
        for name in jaxkern.algorithms.names(op):
            if jaxkern.algorithms.fits(op, name, **_problem(cell)):
                found.append(Program(name, ours, specs, forced={op: name}))
    return [*found, Program("xla", theirs, specs)]


def chosen_algorithm(cell: Cell) -> str | None:
    if jax.default_backend() != "gpu" or cell.op not in CHOOSES:
        return None
    return jaxkern.algorithms.choose(CHOOSES[cell.op], **_problem(cell))


def _problem(cell: Cell) -> dict[str, Any]:
    """What a plan is made for."""
    case = cell.case
    if cell.op == "bincount":
        return dict(bins=case.number, elements=case.size, dtype="int32")
    more = {"k": case.number} if cell.op == "top_k" else {}
    return dict(rows=case.size // case.width, columns=case.width, dtype=cell.dtype, **more)


class Inputs:
    """Random arrays of a case, enough of them to go round cold, and an ascending array."""

    def __init__(self, pool: _inputs.Pool, case: Case) -> None:
        rng, turns = np.random.default_rng(0), min(16, _inputs.rotation(case.size * pool.dtype.itemsize))
        if case.group == "bincount":
            of = lambda i: np.full(case.shape, i) if case.kind == "one" else rng.integers(0, case.number, case.shape)
            self.arrays = [jnp.asarray(of(i), jnp.int32) for i in range(turns)]
        else:
            self.arrays = [pool.array(case.shape, i) for i in range(turns)]
            if case.kind == "ascending":
                self.arrays = [jnp.sort(a) for a in self.arrays]
        self.ascending = jnp.sort(pool.array((max(case.number, 1),), turns))
        jax.block_until_ready((self.arrays, self.ascending))

    def feed(self, specs: list[jax.ShapeDtypeStruct]) -> Any:
        """A function of the number of an execution that returns its arguments."""
        return lambda i: [self.arrays[i % len(self.arrays)], self.ascending][: len(specs)]


def candidates(cell: Cell, compiled: list[Program], inputs: Inputs) -> list[_timing.Candidate]:
    """What to time for a cell, the copy aside."""
    found = _cell.candidates(compiled, inputs)
    if _torch.available() and cell.op in ("top_k", "sort", "argsort", "bincount", "searchsorted", "median"):
        found.append(_torch_candidate(cell, inputs))
    return found


def _torch_candidate(cell: Cell, inputs: Inputs) -> _timing.Candidate:
    torch, size = _torch.torch(), cell.case.number
    state: list[Any] = []
    calls = {
        "top_k": lambda x, a: torch.topk(x, size),
        "sort": lambda x, a: torch.sort(x, dim=-1, stable=True)[0],
        "argsort": lambda x, a: torch.argsort(x, dim=-1, stable=True),
        "bincount": lambda x, a: torch.bincount(x, minlength=size),
        "median": lambda x, a: torch.median(x, -1),
        "searchsorted": lambda x, a: torch.searchsorted(a, x, out_int32=True),
    }

    def call(i: int) -> Any:
        if not state:
            state[:] = [_torch.share(a) for a in (inputs.ascending, *inputs.arrays)]
        return calls[cell.op](state[1 + i % (len(state) - 1)], state[0])

    return _timing.Candidate("torch", call, _torch.sync, torch=True)


def examine(cell: Cell, compiled: list[Program], inputs: Inputs, times: dict[str, float]) -> list[dict[str, Any]]:
    """Whether results are XLA's, to the bit; of sampling, whether two calls agree."""
    ours, theirs = compiled[0], compiled[-1] if cell.op != "sample" else compiled[0]
    run = lambda program: jax.tree.leaves(program(*inputs.feed(program.specs)(0)))
    pairs = list(zip(run(ours), run(theirs), strict=True))[cell.op == "route" :]  # weights are rounded otherwise
    same = all(bool((a == b).all()) for a, b in pairs)
    return [{"goal": "same", "required": 1.0, "value": float(same), "met": same}]


def checks(clock: Any) -> list[dict[str, Any]]:
    return []
