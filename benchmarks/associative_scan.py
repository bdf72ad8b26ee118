"""Scans by an associative operation: cumulative sums, linear recurrences and cumulative logsumexp, against XLA's and a copy.

    python -m benchmarks associative_scan [--ops cumsum,recurrence]

XLA's are `jnp.cumsum`, `jax.lax.cumlogsumexp`, and for the recurrence `jax.lax.associative_scan`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern
from benchmarks import _cell, _goals, _timing, elementwise
from benchmarks._program import Program
from jaxkern import algorithms
from jaxkern._engines.loops.associative import associative_scan

OPERATION = "associative_scan"
DIRECTIONS = ("forward",)


def _maps(a: Any, b: Any) -> list[Any]:
    return [b[0] * a[0], b[0] * a[1] + b[1]]


def recurrence(a: Any, x: Any, axis: int) -> Any:
    """h[t] = a[t] h[t - 1] + x[t]"""
    return associative_scan(_maps, [a, x], axis=axis, finish=lambda s, _: [s[1]])[0]


def xla_recurrence(a: Any, x: Any, axis: int) -> Any:
    return jax.lax.associative_scan(lambda a, b: tuple(_maps(a, b)), (a, x), axis=axis)[1]


@dataclasses.dataclass(frozen=True)
class Function:
    """arrays: operands. required: of a copy, by dtype."""

    f: Callable[..., Any]
    peer: Callable[..., Any]
    arrays: int
    required: dict[str, float]


FUNCTIONS = {
    "cumsum": Function(jaxkern.cumsum, jnp.cumsum, 1, {"float32": 0.9, "bfloat16": 0.85}),
    "recurrence": Function(recurrence, xla_recurrence, 2, {"float32": 0.6, "bfloat16": 0.6}),
    "cumlogsumexp": Function(jaxkern.cumlogsumexp, jax.lax.cumlogsumexp, 1, {"float32": 0.7, "bfloat16": 0.7}),
}
OPS = tuple(FUNCTIONS)


@dataclasses.dataclass(frozen=True)
class Case:
    """An array, its axis of steps, and the operation that runs on it; all of them if `op` is empty."""

    group: str
    shape: tuple[int, ...]
    axis: int = 0
    op: str = ""
    cpu: bool = False

    arrays = 3

    @property
    def name(self) -> str:
        return "x".join(map(str, self.shape)) + f" axis {self.axis}"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        return self.shape[self.axis]

    @property
    def problem(self) -> tuple[int, int, int]:
        return math.prod(self.shape[: self.axis]), self.width, math.prod(self.shape[self.axis + 1 :])


DTYPES = {"gpu": ("float32", "bfloat16"), "cpu": ("float32",)}
CASES = [
    Case("one row", (1 << 27,), 0, "cumsum"),
    Case("rows", (4096, 32768), 1, "cumsum"),
    Case("rows", (131072, 1024), 1, "cumsum"),
    Case("columns", (32768, 4096), 0, "cumsum"),
    Case("few lanes", (65536, 1536), 0, "recurrence"),
    Case("few lanes", (2048, 2048), 0, "recurrence"),
    Case("rows", (4096, 32768), 1, "cumlogsumexp"),
    Case("columns", (32768, 4096), 0, "cumlogsumexp"),
]
# What the gates of jaxkern/_accelerate/gate.py rest on: CUMULATIVE_LENGTH and CUMULATIVE_ELEMENTS, ASSOCIATIVE_LENGTH and
# ASSOCIATIVE_LANES.
CASES += [Case("gate", (1 << 20 >> k, 1 << k), 1, "cumsum") for k in (4, 6, 8)]
CASES += [Case("gate", (1 << k, 1024), 1, "cumsum") for k in (6, 8)]
CASES += [Case("gate", (1 << k, 1 << 16), 0, "recurrence") for k in (4, 6)]
CASES += [Case("gate", (1024, 1 << k), 0, "recurrence") for k in (8, 12)]
CPU_CASES = [Case("cpu", (64, 1024), 1, cpu=True)]
QUICK = {"4096x32768 axis 1", "2048x2048 axis 0"}


@dataclasses.dataclass(frozen=True)
class Cell(_cell.Cell):
    """One row of the table."""

    case: Case

    @property
    def function(self) -> Function:
        return FUNCTIONS[self.op]

    def operands(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(self.case.shape, self.dtype)] * self.function.arrays

    @property
    def bytes(self) -> int:
        return (self.function.arrays + 1) * self.case.size * np.dtype(self.dtype).itemsize

    def goals(self) -> list[dict[str, Any]]:
        if self.case.group in ("cpu", "gate"):
            return [{"goal": "peers", "against": ["xla"]}]
        required = self.function.required[self.dtype] if self.case.size > 1 << 24 else 0.3
        return [{"goal": "peers", "required": 1.0}, {"goal": "copy", "required": required}]


def cells(case: Case, dtype: str, ops: tuple[str, ...]) -> Iterator[Cell]:
    for op in ops:
        if case.op in ("", op):
            yield Cell(case, dtype, op)


def programs(cell: Cell, algorithms: bool) -> list[Program]:
    """This library's and XLA's programs of a cell."""
    function, axis = cell.function, cell.case.axis
    return [
        Program(_goals.OURS, lambda *xs: function.f(*xs, axis), cell.operands()),
        Program("xla", lambda *xs: function.peer(*xs, axis=axis), cell.operands()),
    ]


def chosen_algorithm(cell: Cell) -> str:
    itemsize = np.dtype(cell.dtype).itemsize
    return algorithms.choose(OPERATION, *cell.case.problem, itemsize, cell.function.arrays)


Inputs = elementwise.Inputs


def candidates(cell: Cell, compiled: list[Program], inputs: elementwise.Inputs) -> list[_timing.Candidate]:
    return _cell.candidates(compiled, inputs)


def checks(clock: Any) -> list[dict[str, Any]]:
    """A scan is one call of a kernel."""
    cell = Cell(CASES[-1], "float32", CASES[-1].op)
    compiled = programs(cell, False)[0]
    compiled.compile()
    return [
        {
            "check": "a scan by an associative operation is one call",
            "met": compiled.targets == ["jaxkern_associative_scan"],
            "handlers": compiled.targets,
        }
    ]
