"""Sums of narrow rows in unchanged programs: a scatter-add under `jaxkern.accelerate()` against XLA's atomic additions.

    python -m benchmarks scatter [--ops updates,chain] [--cases REGEX]
    python -m benchmarks scatter --dtypes bfloat16        which XLA adds by compare-and-swap

What XLA takes depends on the indices more than on the sizes: additions to one address wait for each other. The cases are rows of 1, 3
and 8 float32 numbers, 200 thousand and 2 million updates, and three numbers of rows. The indices are uniform or follow Zipf's law
with the exponent 1.3. `updates` sums an array, `chain` the products of gathered rows and weights of edges. Times run from the start
of the first kernel to the end of the last one, since both sides start two.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern
from benchmarks import _cell, _goals, _inputs, _timing
from benchmarks._program import Program

OPERATION = "scatter"
OPS = ("updates", "chain")
DIRECTIONS = ("forward",)
ZIPF = 1.3
FASTER = 4.0  # with Zipf's indices and many updates


@dataclasses.dataclass(frozen=True)
class Case:
    """`count` rows, summed into an array of `shape`; `kind` of indices."""

    group: str
    shape: tuple[int, int]
    count: int
    kind: str
    cpu: bool = False

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.width} n{self.count} {self.kind}"

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def width(self) -> int:
        return self.shape[1]

    @property
    def size(self) -> int:
        return max(self.rows, self.count) * self.width


def _cases(counts: tuple[int, ...], rows: tuple[int, ...], group: str, cpu: bool = False) -> list[Case]:
    sizes = itertools.product(counts, rows, (1, 3, 8), ("uniform", "zipf"))
    return [Case(group, (r, width), n, kind, cpu) for n, r, width, kind in sizes]


DTYPES = {"gpu": ("float32",), "cpu": ("float32",)}
CASES = _cases((200_000, 2_000_000), (1000, 20_000, 500_000), "narrow")
CPU_CASES = _cases((2000,), (100,), "cpu", cpu=True)
QUICK = {"20000x3 n2000000 uniform", "20000x3 n2000000 zipf"}


@functools.cache
def index_of(case: Case) -> np.ndarray:
    rng = np.random.default_rng(0)
    if case.kind == "uniform":
        return rng.integers(0, case.rows, case.count, dtype=np.int32)
    weights = np.cumsum(np.arange(1, case.rows + 1, dtype=np.float64) ** -ZIPF)
    found = np.searchsorted(weights, rng.random(case.count) * weights[-1]).clip(0, case.rows - 1)
    return rng.permutation(case.rows)[found].astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Cell(_cell.Cell):
    """One row of the table."""

    case: Case

    @property
    def bytes(self) -> int:
        case = self.case
        rows = case.count + case.rows
        if self.op == "chain":
            rows += case.rows
        weights = case.count if self.op == "chain" else 0
        indices = (2 if self.op == "chain" else 1) * case.count
        return jnp.dtype(self.dtype).itemsize * (rows * case.width + weights) + 4 * indices

    def goals(self) -> list[dict[str, Any]]:
        many = self.case.kind == "zipf" and self.case.count >= 2_000_000
        return [{"goal": "peers", "required": FASTER} if many else {"goal": "peers"}]


class Accelerated(Program):
    """A program that is compiled under `jaxkern.accelerate()`."""

    def compile(self) -> None:
        with jaxkern.accelerate(force=jax.default_backend() != "gpu"):
            super().compile()


def programs(cell: Cell, algorithms: bool) -> list[Program]:
    """This library's and XLA's programs of a cell."""
    case = cell.case
    trail = (case.width,) if case.width > 1 else ()
    array = lambda *shape: jax.ShapeDtypeStruct(shape, cell.dtype)
    indices = jax.ShapeDtypeStruct((case.count,), jnp.int32)

    def updates(index, source):
        return jax.ops.segment_sum(source, index, case.rows)

    def chain(index, senders, x, w):
        return jax.ops.segment_sum(x[senders] * (w[:, None] if trail else w), index, case.rows)

    if cell.op == "updates":
        function, specs = updates, [indices, array(case.count, *trail)]
    else:
        function, specs = chain, [indices, indices, array(case.rows, *trail), array(case.count)]
    return [Accelerated(_goals.OURS, function, specs), Program("xla", function, specs)]


def chosen_algorithm(cell: Cell) -> None:
    return None


class Inputs:
    """Indices of a case, and arrays of random numbers, enough of them to go round cold."""

    def __init__(self, pool: _inputs.Pool, case: Case) -> None:
        self._pool = pool
        index = index_of(case)
        self._indices = jnp.asarray(index), jnp.asarray(np.random.default_rng(1).permutation(index))
        self._made: dict[Any, list[jax.Array]] = {}

    def feed(self, specs: list[jax.ShapeDtypeStruct]) -> Any:
        """A function of the number of an execution that returns its arguments."""
        indices = iter(self._indices)
        arguments = [[next(indices)] if s.dtype == jnp.int32 else self._arrays(s.shape) for s in specs]
        return lambda i: [a[i % len(a)] for a in arguments]

    def _arrays(self, shape: tuple[int, ...]) -> list[jax.Array]:
        if shape not in self._made:
            turns = min(32, _inputs.rotation(math.prod(shape) * self._pool.dtype.itemsize))
            self._made[shape] = [self._pool.array(shape, i) for i in range(turns)]
        return self._made[shape]


def candidates(cell: Cell, compiled: list[Program], inputs: Inputs) -> list[_timing.Candidate]:
    return _cell.candidates(compiled, inputs, span=True)


def examine(cell: Cell, compiled: list[Program], inputs: Inputs, times: dict[str, float]) -> list[dict[str, Any]]:
    """The error against float64, beside XLA's."""
    exact = np.zeros(cell.case.shape)
    arguments = [np.asarray(a) for a in inputs.feed(compiled[0].specs)(0)]
    column = lambda a: a.astype(np.float64).reshape(len(a), -1)
    values = column(arguments[1])
    if cell.op == "chain":
        values = column(arguments[2])[arguments[1]] * column(arguments[3])
    for c in range(cell.case.width):
        exact[:, c] = np.bincount(arguments[0], values[:, c], cell.case.rows)
    error = lambda p: np.abs(column(np.asarray(p(*inputs.feed(p.specs)(0)))) - exact).max()
    ours, theirs = map(error, compiled)
    allowed = max(theirs, float(jnp.finfo(cell.dtype).eps) / 2 * np.abs(exact).max())
    value = min(float(allowed / max(ours, 1e-300)), 1e6)
    required = 1 / _goals.ERROR
    return [{"goal": "accurate", "required": round(required, 4), "value": round(value, 4), "met": value >= required}]


def checks(clock: Any) -> list[dict[str, Any]]:
    return []
