"""quantize_rows and quantize_blocks against XLA and a copy: bfloat16 or float32 to 8 bits, read once.

    python -m benchmarks quantize [--ops rows_e4m3,blocks_e4m3]

XLA runs the same formulas in jnp. A copy of as many bytes reads half of them and writes the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks import _cell, _goals, _timing, softmax
from benchmarks._program import Program

OPERATION = "quantize"
DIRECTIONS = ("forward",)
TYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "int8": "int8"}
OPS = ("rows_e4m3", "rows_int8", "blocks_e4m3", "blocks_e5m2")
BLOCK, NEAR_COPY = 128, 0.9

Case, Inputs = softmax.Case, softmax.Inputs
DTYPES = {"gpu": ("bfloat16", "float32"), "cpu": ("float32",)}
CASES = [Case("rows", s) for s in ((16384, 8192), (32768, 4096), (65536, 1024), (8192, 32768))]
CPU_CASES = [Case("cpu", (2048, 2048), cpu=True)]
QUICK = {"16384x8192"}


@dataclasses.dataclass(frozen=True)
class Cell(_cell.Cell):
    """One row of the table."""

    case: Case

    @property
    def bytes(self) -> int:
        """Each element as it was and in 8 bits, and the scales."""
        scales = self.case.size // (BLOCK if "blocks" in self.op else self.case.width)
        return self.case.size * (jnp.dtype(self.dtype).itemsize + 1) + 4 * scales

    def goals(self) -> list[dict[str, Any]]:
        against_xla = {"goal": "peers", "against": ["xla"]}
        return [] if self.case.cpu else [against_xla, {"goal": "copy", "required": NEAR_COPY}]


def _ours(op: str) -> Callable[..., Any]:
    kind, name = op.split("_")
    if kind == "rows":
        return lambda x: jaxkern.quantize_rows(x, TYPES[name])
    return lambda x: jaxkern.quantize_blocks(x, TYPES[name], block=BLOCK)


def _xla(op: str) -> Callable[..., Any]:
    kind, name = op.split("_")
    most = 127.0 if name == "int8" else float(jnp.finfo(TYPES[name]).max)

    def quantize(x: jax.Array) -> Any:
        wide = x.reshape(*x.shape[:-1], -1, BLOCK if kind == "blocks" else x.shape[-1]).astype(jnp.float32)
        scale = jnp.max(jnp.abs(wide), -1, keepdims=True) / most
        y = jnp.clip(wide / scale, -most, most)
        q = (jnp.round(y) if name == "int8" else y).astype(TYPES[name])
        return q.reshape(x.shape), scale[..., 0]

    return quantize


def programs(cell: Cell, tiers: bool) -> list[Program]:
    """This library's and XLA's programs of a cell."""
    del tiers  # there is one algorithm
    specs = [jax.ShapeDtypeStruct(cell.case.shape, cell.dtype)]
    return [Program(_goals.OURS, _ours(cell.op), specs), Program("xla", _xla(cell.op), specs)]


def chosen_tier(cell: Cell) -> str | None:
    return "registers" if jax.default_backend() == "gpu" else None


def candidates(cell: Cell, compiled: list[Program], inputs: Inputs) -> list[_timing.Candidate]:
    """What to time for a cell, the copy aside."""
    return _cell.candidates(compiled, inputs)


def checks(clock: Any) -> list[dict[str, Any]]:
    """Nothing beside the properties of cells."""
    del clock
    return []
