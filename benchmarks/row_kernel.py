"""Row functions that the library does not know by name, forward and backward, against XLA and a copy.

    python -m benchmarks row_kernel [--ops entropy,soft_cap]

The backward pass computes the gradients of all floating-point operands.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxkern
from benchmarks import _cell, _goals, elementwise
from benchmarks._program import Program

OPERATION = "row_kernel"
DIRECTIONS = ("forward", "backward")
FORWARD = 0.93  # of a copy
BACKWARD = {"float32": 0.85, "bfloat16": 0.75}
ODD = 0.8  # forward, where rows are no whole vectors
ACROSS_FORWARD, ACROSS_BACKWARD = 0.7, 0.5  # where the row is not the last dimension
LONG = 0.73  # gradients of rows that take several blocks: 0.65 of the memory's bandwidth


def scale_norm(x, scale):
    """Nguyen and Salazar, "Transformers without Tears", 2019."""
    return x * (scale * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6))


def block_end(x, residual, layer_scale, scale):
    """Layer scale, residual and norm; the sum is returned, too."""
    h = residual + x * layer_scale
    return h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * scale, h


def soft_cap(x):
    """Attention weights of Gemma 2, whose scores are bounded."""
    return jax.nn.softmax(30.0 * jnp.tanh(x / 30.0), -1)


def gated_norm(x, gate, scale):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale * jax.nn.silu(gate)


def threshold(x):
    """Weights below a tenth of the largest are cut off, and the others are normalised."""
    e = jnp.exp(x - lax.stop_gradient(jnp.max(x, -1, keepdims=True)))
    kept = jnp.where(e > 0.1, e, 0)
    return kept / jnp.sum(kept, -1, keepdims=True)


def smoothed_loss(x, labels):
    """Cross-entropy with label smoothing."""
    logp = jax.nn.log_softmax(x, -1)
    picked = jnp.take_along_axis(logp, labels[:, None], -1)[:, 0]
    return -0.9 * picked - 0.1 * jnp.mean(logp, -1)


def huber(x, target):
    d = x - target
    return jnp.mean(jnp.where(jnp.abs(d) < 1, 0.5 * d * d, jnp.abs(d) - 0.5), -1)


def entropy(x):
    logp = jax.nn.log_softmax(x, -1)
    return -jnp.sum(jnp.exp(logp) * logp, -1)


def rms_norm(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def layer_norm(x, scale, bias):
    d = x - jnp.mean(x, -1, keepdims=True)
    return d * lax.rsqrt(jnp.mean(d * d, -1, keepdims=True) + 1e-6) * scale + bias


# Operands of each: x full, c a column, l an integer for each row, s a scalar.
FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "scale_norm": (scale_norm, "xs"),
    "block_end": (block_end, "xxcc"),
    "soft_cap": (soft_cap, "x"),
    "gated_norm": (gated_norm, "xxc"),
    "threshold": (threshold, "x"),
    "smoothed_loss": (smoothed_loss, "xl"),
    "huber": (huber, "xx"),
    "entropy": (entropy, "x"),
    "softmax": (jax.nn.softmax, "x"),
    "rms_norm": (rms_norm, "xc"),
    "layer_norm": (layer_norm, "xcc"),
}
OPS = tuple(FUNCTIONS)


def across_rms_norm(x, scale, axis):
    scale = jnp.expand_dims(scale, [k for k in range(x.ndim) if k != axis])
    return x * lax.rsqrt(jnp.mean(x * x, axis, keepdims=True) + 1e-6) * scale


# The same along another axis than the last.
ACROSS: dict[str, Callable[..., Any]] = {"softmax": jax.nn.softmax, "rms_norm": across_rms_norm}
LONG_OPS = (
    "softmax",
    "rms_norm",
    "layer_norm",
)  # of rows that take several blocks; the others are for the shorter ones


@dataclasses.dataclass(frozen=True)
class Case:
    """rows x width, or with another axis."""

    group: str
    shape: tuple[int, ...]
    axis: int = -1
    cpu: bool = False

    arrays = 6  # that a backward pass moves

    @property
    def name(self) -> str:
        return "x".join(map(str, self.shape)) + (f" axis {self.axis}" if self.axis != -1 else "")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        return self.shape[self.axis]

    def operand(self, kind: str) -> tuple[int, ...]:
        return {"x": self.shape, "c": (self.width,), "l": self.shape[:1], "s": ()}[kind]


DTYPES = {"gpu": ("float32", "bfloat16"), "cpu": ("float32",)}
CASES = [Case("even", ((1 << 27) // n, n)) for n in (128, 512, 1024, 4096, 8192, 16384)]
CASES += [Case("odd", ((1 << 27) // n, n)) for n in (777, 12345)]
CASES += [Case("long", ((1 << 27) // n, n)) for n in (32768, 65536, 131072)]
CASES += [Case("across", (1024, 64, 1024), 1), Case("across", (20, 400, 6000), 1), Case("across", (64, 1024, 1024), 1)]
CASES += [Case("few columns", (16384, 4096), 0), Case("few columns", (1 << 20, 64), 0)]
CASES += [Case("odd columns", (16384, 4097), 0), Case("odd columns", (64, 1000, 1001), 1)]
CPU_CASES = [Case("cpu", (2048, 1024), cpu=True)]
QUICK = {"1048576x128", "32768x4096", "8192x16384", "172739x777"}


@dataclasses.dataclass(frozen=True)
class Cell(_cell.Cell):
    """One row of the table."""

    case: Case

    @property
    def function(self) -> Callable[..., Any]:
        if self.case.axis == -1:
            return FUNCTIONS[self.op][0]
        return functools.partial(ACROSS[self.op], axis=self.case.axis)

    def primals(self) -> list[jax.ShapeDtypeStruct]:
        kinds = FUNCTIONS[self.op][1]
        return [jax.ShapeDtypeStruct(self.case.operand(k), "int32" if k == "l" else self.dtype) for k in kinds]

    def results(self) -> list[jax.ShapeDtypeStruct]:
        return jax.tree.leaves(jax.eval_shape(self.function, *self.primals()))

    def operands(self) -> list[jax.ShapeDtypeStruct]:
        """The operands of the function, then the cotangents of a backward pass."""
        return self.primals() + (self.results() if self.direction == "backward" else [])

    @property
    def bytes(self) -> int:
        written = self.results()
        if self.direction == "backward":
            written = [s for s in self.primals() if s.dtype != np.int32]
        return sum(s.size * s.dtype.itemsize for s in (*self.operands(), *written))

    def goals(self) -> list[dict[str, Any]]:
        peers, backward = {"goal": "peers"}, self.direction == "backward"
        if self.case.group == "cpu":
            return [peers | {"against": ["xla"]}]
        if self.case.group in ("few columns", "odd columns"):  # rows are read again
            return [peers]
        if self.case.group == "across":
            return [peers, {"goal": "copy", "required": ACROSS_BACKWARD if backward else ACROSS_FORWARD}]
        required = BACKWARD[self.dtype] if backward else FORWARD
        if self.case.group == "odd":
            required = min(required, ODD)
        if self.case.group == "long" and backward:
            required = LONG
        return [peers | ({"required": 2.0} if backward else {}), {"goal": "copy", "required": required}]


def cells(case: Case, dtype: str, ops: tuple[str, ...]) -> Iterator[Cell]:
    for op in ops:
        if op in ACROSS if case.axis != -1 else (op in LONG_OPS) == (case.group == "long"):
            for direction in DIRECTIONS:
                yield Cell(case, dtype, op, direction)


def programs(cell: Cell, algorithms: bool) -> list[Program]:
    """This library's and XLA's programs of a cell."""
    specs = cell.operands()
    count = len(cell.primals())
    real = [k for k, s in enumerate(cell.primals()) if s.dtype != np.int32]

    def program(f: Callable[..., Any]) -> Callable[..., Any]:
        if cell.direction == "forward":
            return f

        def backward(*operands: jax.Array) -> Any:
            given = list(operands[:count])

            def of_real(*xs: jax.Array) -> Any:
                return f(*(xs[real.index(k)] if k in real else x for k, x in enumerate(given)))

            ys, pull = jax.vjp(of_real, *(given[k] for k in real))
            return pull(jax.tree.unflatten(jax.tree.structure(ys), operands[count:]))

        return backward

    return [
        Program(_goals.OURS, program(jaxkern.row_kernel(cell.function, axis=cell.case.axis)), specs),
        Program("xla", program(cell.function), specs),
    ]


def chosen_algorithm(cell: Cell) -> None:
    return None


class Inputs(elementwise.Inputs):
    """Labels are random classes."""

    def of(self, spec: jax.ShapeDtypeStruct) -> list[jax.Array]:
        key = (spec.shape, spec.dtype)
        if spec.dtype == np.int32 and key not in self.others:
            labels = np.random.default_rng(0).integers(0, self.case.width, spec.shape).astype(np.int32)
            self.others[key] = [jnp.asarray(labels)]
        return super().of(spec)


candidates = elementwise.candidates


def checks(clock: Any) -> list[dict[str, Any]]:
    """A training step is one kernel forward and one backward, and a sum over blocks for gradients of columns."""
    specs = [jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16)] * 2 + [jax.ShapeDtypeStruct((1024,), jnp.bfloat16)]
    kernel = jaxkern.row_kernel(gated_norm)
    step = jax.value_and_grad(lambda *a: jnp.sum(kernel(*a).astype(jnp.float32) ** 2), (0, 1, 2))
    compiled = Program("step", step, specs)
    compiled.compile()
    return [
        {
            "check": "value_and_grad of a row function is one call forward and one backward",
            "met": compiled.targets == ["jaxkern_row_kernel", "jaxkern_row_kernel_core"],
            "handlers": compiled.targets,
        }
    ]
