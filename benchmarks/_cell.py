"""A row of a result table, and the candidates that are compiled JAX programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax

from benchmarks import _timing
from benchmarks._program import Program


@dataclasses.dataclass(frozen=True)
class Cell:
    """A row of the table: case, dtype, operation and direction. The subclass of an operation adds its bytes and its goals."""

    case: Any
    dtype: str
    op: str
    direction: str = "forward"


def cells(operation: ModuleType, case: Any, dtype: str, ops: tuple[str, ...]) -> Iterator[Any]:
    """The cells of a case: an operation's own choice, or each of `ops` in each of its directions."""
    if hasattr(operation, "cells"):
        yield from operation.cells(case, dtype, ops)
        return
    for op in ops:
        for direction in operation.DIRECTIONS:
            yield operation.Cell(case, dtype, op, direction)


def candidates(compiled: list[Program], inputs: Any, keep: int = 2, span: bool = False) -> list[_timing.Candidate]:
    """The programs, each on arguments of its own."""

    def candidate(program: Program) -> _timing.Candidate:
        arguments = inputs.feed(program.specs)
        return _timing.Candidate(
            program.name, lambda i: program(*arguments(i)), jax.block_until_ready, keep=keep, span=span
        )

    return [candidate(program) for program in compiled]
