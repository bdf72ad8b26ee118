"""While loops in which each lane stops on its own, against `jax.lax.while_loop` under `jax.vmap`.

    python -m benchmarks while_loop [--ops newton,integrator]

Times run from the first kernel's start to the last one's end: in JAX's loops each step of all lanes starts kernels, and the host
waits for the condition. There is no goal against a copy, since arithmetic decides: a lane reads and writes a few numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks import _cell, _goals, _timing, elementwise
from benchmarks._program import Program

OPERATION = "while_loop"
DIRECTIONS = ("forward", "tangent")


def newton(loop: Any, x: Any) -> Any:
    """Kepler's equation: the anomaly E with E - e sin E = M, for eccentricities up to 1."""
    mean, eccentricity = 3 * jnp.abs(jnp.tanh(x)) + 0.05, 0.99 * jnp.abs(jnp.sin(37 * x))

    def step(state: Any) -> Any:
        anomaly, _, count = state
        residual = anomaly - eccentricity * jnp.sin(anomaly) - mean
        change = residual / (1 - eccentricity * jnp.cos(anomaly))
        return anomaly - change, change, count + 1

    return loop(lambda s: (jnp.abs(s[1]) > 1e-5) & (s[2] < 50), step, (mean, jnp.ones_like(x), 0 * x.astype(int)))[0]


def integrator(loop: Any, x: Any) -> Any:
    """Bogacki and Shampine, "A 3(2) pair of Runge-Kutta formulas", 1989, for a forced decay at a rate of each lane."""
    rate = 1 + 10 * jnp.abs(x)

    def step(state: Any) -> Any:
        t, y, h = state
        f = lambda t, y: rate * (jnp.cos(rate * t) - y)
        h = jnp.minimum(h, 2 - t)
        k1 = f(t, y)
        k2 = f(t + h / 2, y + h * k1 / 2)
        k3 = f(t + 3 * h / 4, y + 3 * h * k2 / 4)
        new = y + h * (2 * k1 + 3 * k2 + 4 * k3) / 9
        error = jnp.abs(h * (-5 * k1 / 72 + k2 / 12 + k3 / 9 - f(t + h, new) / 8)) / 1e-4
        accepted = error <= 1
        scale = jnp.clip(0.9 * jnp.maximum(error, 1e-6) ** (-1 / 3), 0.2, 5)
        return jnp.where(accepted, t + h, t), jnp.where(accepted, new, y), h * scale

    return loop(lambda s: s[0] < 2, step, (jnp.zeros_like(x), x, jnp.full_like(x, 1e-3)))[1]


def sampler(loop: Any, x: Any) -> Any:
    """Half-normal numbers by rejection from exponential ones, with a key for each lane."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    key = jax.random.wrap_key_data(jnp.stack([bits, ~bits]))

    def propose(state: Any) -> Any:
        key, first, second = jax.random.split(state[0], 3)
        y = jax.random.exponential(first)
        return key, y, jax.random.uniform(second) <= jnp.exp(-((y - 1) ** 2) / 2)

    return loop(lambda s: ~s[2], propose, (key, x * 0, x != x))[1]


FUNCTIONS: dict[str, Callable[..., Any]] = {"newton": newton, "integrator": integrator, "sampler": sampler}
OPS = tuple(FUNCTIONS)
DERIVED = ("newton",)  # what is also run in forward mode


@dataclasses.dataclass(frozen=True)
class Case:
    """How many lanes."""

    group: str
    shape: tuple[int, ...]
    cpu: bool = False

    arrays = 2  # that a lane moves

    @property
    def name(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        return self.shape[-1]


DTYPES = {"gpu": ("float32",), "cpu": ("float32",)}
# Few lanes are what WHILE_LANES of jaxkern/_accelerate/gate.py rests on.
CASES = [Case("few lanes", (n,)) for n in (32, 256)]
CASES += [Case("lanes", (1024,)), Case("lanes", (65536,)), Case("lanes", (1 << 20,))]
CPU_CASES = [Case("cpu", (1024,), cpu=True)]
QUICK = {"65536"}
REQUIRED = {"newton": 3.0, "integrator": 20.0, "sampler": 3.0}


@dataclasses.dataclass(frozen=True)
class Cell(_cell.Cell):
    """One row of the table."""

    case: Case

    def operands(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(self.case.shape, self.dtype)] * (2 if self.direction == "tangent" else 1)

    @property
    def bytes(self) -> int:
        return 2 * sum(s.size * s.dtype.itemsize for s in self.operands())

    def goals(self) -> list[dict[str, Any]]:
        if self.case.group in ("cpu", "few lanes"):
            return [{"goal": "peers", "against": ["xla"]}]
        return [{"goal": "peers", "required": REQUIRED[self.op]}]


def cells(case: Case, dtype: str, ops: tuple[str, ...]) -> Iterator[Cell]:
    for op in ops:
        for direction in DIRECTIONS:
            if direction == "forward" or op in DERIVED:
                yield Cell(case, dtype, op, direction)


def programs(cell: Cell, algorithms: bool) -> list[Program]:
    """This library's and XLA's programs of a cell."""

    def program(loop: Any) -> Callable[..., Any]:
        f = jax.vmap(lambda x: FUNCTIONS[cell.op](loop, x))
        return f if cell.direction == "forward" else lambda x, dx: jax.jvp(f, (x,), (dx,))

    return [
        Program(_goals.OURS, program(jaxkern.while_loop), cell.operands()),
        Program("xla", program(jax.lax.while_loop), cell.operands()),
    ]


def chosen_algorithm(cell: Cell) -> None:
    return None


Inputs = elementwise.Inputs


def candidates(cell: Cell, compiled: list[Program], inputs: elementwise.Inputs) -> list[_timing.Candidate]:
    return _cell.candidates(compiled, inputs, span=True)


def checks(clock: Any) -> list[dict[str, Any]]:
    """A loop is one call, also in forward mode."""
    compiled = programs(Cell(CASES[1], "float32", "newton", "tangent"), False)[0]
    compiled.compile()
    return [
        {
            "check": "a loop in forward mode is one call",
            "met": compiled.targets.count("jaxkern_while_loop") == 1,
            "handlers": compiled.targets,
        }
    ]
