"""Quantisation against XLA and a copy: bfloat16 or float32 to 8 bits, read once.

    python -m benchmarks quantize [--ops rows_e4m3,blocks_e4m3]

    rows, blocks, tensor    quantize_rows, quantize_blocks, and quantize_tensor with a scale that is given
    transposed              quantize_blocks with the transpose
    normrows, normblocks    rms_norm with a scale for each row or block, against the norm alone too

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
OPS = (
    *("rows_e4m3", "rows_int8", "blocks_e4m3", "blocks_e5m2", "tensor_e4m3", "transposed_e4m3"),
    *("normrows_e4m3", "normblocks_e4m3", "normblocks_int8"),
)
NORM = "norm alone"
BLOCK, NEAR_COPY, SCALE, EPS = 128, 0.9, 0.01, 1e-6

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
        """Each element as it was and in 8 bits, twice if transposed, and the scales."""
        copies = 1 + (self.kind == "transposed")
        scales = copies * self.case.size // (BLOCK if "blocks" in self.op or copies > 1 else self.case.width)
        return self.case.size * (jnp.dtype(self.dtype).itemsize + copies) + 4 * scales

    @property
    def kind(self) -> str:
        return self.op.split("_")[0]

    def goals(self) -> list[dict[str, Any]]:
        against = {"goal": "peers", "against": ["xla"]}
        alone = [{"goal": "peers", "against": [NORM]}] if "norm" in self.op else []
        return [] if self.case.cpu else [against, *alone, {"goal": "copy", "required": NEAR_COPY}]


def _ours(op: str) -> Callable[..., Any]:
    kind, name = op.split("_")
    to = TYPES[name]
    calls: dict[str, Callable[..., Any]] = {
        "rows": lambda x: jaxkern.quantize_rows(x, to),
        "blocks": lambda x: jaxkern.quantize_blocks(x, to, block=BLOCK),
        "tensor": lambda x: jaxkern.quantize_tensor(x, to, scale=SCALE),
        "transposed": lambda x: jaxkern.quantize_blocks(x, to, block=BLOCK, transposed=True),
        "normrows": lambda x, w: jaxkern.rms_norm(x, w, quantize=jaxkern.Quantization(to)),
        "normblocks": lambda x, w: jaxkern.rms_norm(x, w, quantize=jaxkern.Quantization(to, BLOCK)),
    }
    return calls[kind]


def _xla(op: str) -> Callable[..., Any]:
    kind, name = op.split("_")
    most = 127.0 if name == "int8" else float(jnp.finfo(TYPES[name]).max)

    def rounded(y: jax.Array) -> jax.Array:
        y = jnp.clip(y, -most, most)
        return (jnp.round(y) if name == "int8" else y).astype(TYPES[name])

    def quantize(x: jax.Array) -> Any:
        block = x.shape[-1] if "rows" in kind else BLOCK
        wide = x.reshape(*x.shape[:-1], -1, block).astype(jnp.float32)
        scale = jnp.max(jnp.abs(wide), -1, keepdims=True) / most
        return rounded(wide / scale).reshape(x.shape), scale[..., 0]

    def norm(x: jax.Array, w: jax.Array) -> Any:
        wide = x.astype(jnp.float32)
        return quantize(wide * (jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + EPS) * w))

    def tensor(x: jax.Array) -> Any:
        wide = x.astype(jnp.float32)
        return rounded(wide / SCALE), jnp.max(jnp.abs(wide))

    if kind == "tensor":
        return tensor
    if kind == "transposed":
        return lambda x: (quantize(x), quantize(x.T))
    return norm if "norm" in kind else quantize


def programs(cell: Cell, algorithms: bool) -> list[Program]:
    """This library's and XLA's programs of a cell; for a norm, this library's norm alone."""
    del algorithms  # there is one algorithm
    specs = [jax.ShapeDtypeStruct(cell.case.shape, cell.dtype)]
    alone = []
    if "norm" in cell.op:
        specs.append(jax.ShapeDtypeStruct(cell.case.shape[-1:], jnp.float32))
        alone.append(Program(NORM, lambda x, w: jaxkern.rms_norm(x, w), specs))
    return [Program(_goals.OURS, _ours(cell.op), specs), Program("xla", _xla(cell.op), specs), *alone]


def chosen_algorithm(cell: Cell) -> str | None:
    if jax.default_backend() != "gpu":
        return None
    if cell.kind == "transposed":
        return "tiles"
    name, width = (
        "rms_norm" if "norm" in cell.op else "quantize_rows",
        BLOCK if cell.kind == "blocks" else cell.case.width,
    )
    return jaxkern.algorithms.choose(name, cell.case.size // width, width, dtype=cell.dtype)


def candidates(cell: Cell, compiled: list[Program], inputs: Inputs) -> list[_timing.Candidate]:
    """What to time for a cell, the copy aside."""
    return _cell.candidates(compiled, inputs)


def checks(clock: Any) -> list[dict[str, Any]]:
    """There are no checks beside the properties of cells."""
    del clock
    return []
