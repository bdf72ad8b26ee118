"""User functions: five operations on three operands, forward and all gradients, against XLA and a copy.

    python -m benchmarks elementwise_kernel [--ops five]

In the groups "bias", "scale" and "scalar" the last operand broadcasts, and its gradient is a sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks import _cell, _goals, elementwise
from benchmarks._program import Program

OPERATION = "elementwise_kernel"
DIRECTIONS = ("forward", "backward")
GOALS = {"forward": 0.97, "backward": 0.95}  # of a copy


def five(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    return jnp.tanh(x * y + z) * jax.nn.sigmoid(x)


def cheap(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    return jnp.maximum(x * y + z, 0) * x - y


FUNCTIONS: dict[str, Callable[..., jax.Array]] = {"five": five, "cheap": cheap}
OPS = tuple(FUNCTIONS)


@dataclasses.dataclass(frozen=True)
class Case(elementwise.Case):
    """A shape to measure; the last operand has one dimension of size 1, or no dimension, in groups that say so."""

    @property
    def arrays(self) -> int:
        return 4  # half of the seven that a backward pass moves, rounded up

    @property
    def name(self) -> str:
        shape = f"2^{self.size.bit_length() - 1}" if len(self.shape) == 1 else "x".join(map(str, self.shape))
        return shape if self.group in ("all", "cpu") else f"{shape} {self.group}"

    def operand(self, last: bool) -> tuple[int, ...]:
        return () if last and self.group == "scalar" else super().operand(last)


DTYPES = {"gpu": ("float32", "bfloat16"), "cpu": ("float32",)}
CASES = [
    Case("all", (1 << 28,)),
    Case("all", (1 << 22,)),
    Case("bias", (65536, 4096)),
    Case("scale", (65536, 4096)),
    Case("scalar", (65536, 4096)),
    Case("bias", (1 << 20, 64)),
]
CPU_CASES = [Case("cpu", (1 << 22,), cpu=True)]
QUICK = {"2^28", "65536x4096 bias", "65536x4096 scale"}


@dataclasses.dataclass(frozen=True)
class Cell(_cell.Cell):
    """One row of the table."""

    case: Case

    def operands(self) -> list[jax.ShapeDtypeStruct]:
        """x, y and z, then the cotangent of a backward pass."""
        shapes = [self.case.operand(k == 2) for k in range(3)]
        shapes += [self.case.shape] if self.direction == "backward" else []
        return [jax.ShapeDtypeStruct(s, self.dtype) for s in shapes]

    @property
    def bytes(self) -> int:
        read = self.operands()
        written = read[:3] if self.direction == "backward" else [jax.ShapeDtypeStruct(self.case.shape, self.dtype)]
        return sum(s.size * s.dtype.itemsize for s in (*read, *written))

    def goals(self) -> list[dict[str, Any]]:
        peers = {"goal": "peers"}
        if self.case.group == "cpu":
            return [peers | {"against": ["xla"]}]
        return [peers] if self.case.size < 1 << 24 else [peers, {"goal": "copy", "required": GOALS[self.direction]}]


def programs(cell: Cell, algorithms: bool) -> list[Program]:
    """This library's and XLA's programs of a cell."""
    specs = cell.operands()

    def program(f: Callable[..., Any]) -> Callable[..., Any]:
        if cell.direction == "forward":
            return f
        return lambda x, y, z, g: jax.vjp(f, x, y, z)[1](g)

    function = FUNCTIONS[cell.op]
    return [
        Program(_goals.OURS, program(jaxkern.elementwise_kernel(function)), specs),
        Program("xla", program(function), specs),
    ]


def chosen_algorithm(cell: Cell) -> None:
    return None


Inputs = elementwise.Inputs
candidates = elementwise.candidates


def checks(clock: Any) -> list[dict[str, Any]]:
    """A training step is one kernel forward and one backward, the sum for a bias included."""
    specs = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((512, 2048), (512, 2048), (2048,))]
    kernel = jaxkern.elementwise_kernel(five)
    step = jax.value_and_grad(lambda *a: jnp.sum(kernel(*a).astype(jnp.float32) ** 2), (0, 1, 2))
    compiled = Program("step", step, specs)
    compiled.compile()
    return [
        {
            "check": "value_and_grad of a user function is one call forward and one backward",
            "met": compiled.targets == ["jaxkern_elementwise_kernel"] * 2,
            "handlers": compiled.targets,
        }
    ]
