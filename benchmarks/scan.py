"""Loops with an elementwise body, forward and backward, against `jax.lax.scan` and a copy; a linear recurrence also against
`jax.lax.associative_scan`.

    python -m benchmarks scan [--ops recurrence,gated]

The backward pass is the gradient, with the forward loop that it needs. Its bytes count all arrays that the two
loops must read and write, including the carries that are stored for each step. Times run from the first kernel's start to
the last one's end: JAX's loops launch kernels for each step, and their time is mostly the gaps between them.
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

OPERATION = "scan"
DIRECTIONS = ("forward", "backward")


def recurrence(scan: Any, h: Any, a: Any, x: Any) -> Any:
    return scan(lambda h, ax: (ax[0] * h + ax[1],) * 2, h, (a, x))


def advantages(scan: Any, last: Any, rewards: Any, values: Any, done: Any) -> Any:
    """Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation", 2016."""

    def body(carry, x):
        advantage, after = carry
        reward, value, done = x
        go_on = 1 - done
        advantage = reward + 0.99 * after * go_on - value + 0.95 * 0.99 * go_on * advantage
        return (advantage, value), advantage

    return scan(body, (jnp.zeros_like(last), last), (rewards, values, done), reverse=True)[1]


def gated(scan: Any, c: Any, w: Any, b: Any, x: Any, f: Any) -> Any:
    """A unit as in Lei et al., "Simple Recurrent Units for Highly Parallelizable Recurrence", 2018."""

    def body(c, xf):
        forget = jax.nn.sigmoid(xf[1] + w * c + b)
        c = forget * c + (1 - forget) * xf[0]
        return c, jnp.tanh(c)

    return scan(body, c, (x, f))


def heston(scan: Any, s: Any, v: Any, kappa: Any, theta: Any, z: Any, w: Any) -> Any:
    """Paths of Heston's model for given noise; the last prices and variances."""
    dt = 1 / 252

    def body(carry, noise):
        s, v = carry
        z, w = noise
        positive = jnp.maximum(v, 0)
        root = jnp.sqrt(positive * dt + 1e-8)
        s = s * jnp.exp(-0.5 * positive * dt + root * z)
        return (s, v + kappa * (theta - positive) * dt + 0.3 * root * (0.8 * w - 0.6 * z)), None

    return scan(body, (s, v), (z, w))[0]


def neurons(scan: Any, v: Any, current: Any) -> Any:
    """Leaky neurons that integrate a current and fire."""

    def body(v, i):
        v = 0.95 * v + i
        fires = v > 1
        return jnp.where(fires, v - 1, v), fires.astype(v.dtype)

    return scan(body, v, current)


def oscillators(scan: Any, re: Any, im: Any, decay: Any, angle: Any, b: Any, x: Any) -> Any:
    """A diagonal state space layer, whose states are complex; Gu et al., "On the Parameterization and Initialization of Diagonal
    State Space Models", 2022."""
    a = jax.nn.sigmoid(decay) * jnp.exp(1j * angle)

    def body(h, x):
        h = a * h + b * x
        return h, h.real

    return scan(body, jax.lax.complex(re, im), x)[1]


def walk(scan: Any, x: Any) -> Any:
    """Random walks whose key is split in the body: the keys run ahead."""

    def body(carry, _):
        key, x = carry
        key, sub = jax.random.split(key)
        return (key, x + jax.random.normal(sub, x.shape, x.dtype)), None

    return scan(body, (jax.random.key(0), x), None, length=256)[0][1]


def average(scan: Any, m: Any, x: Any) -> Any:
    return scan(lambda m, x: (0.9 * m + 0.1 * x,) * 2, m, x)


def hidden(scan: Any, alpha: Any, transitions: Any, x: Any) -> Any:
    """The forward algorithm of hidden Markov models with common transitions, in logarithms."""

    def body(alpha: Any, x: Any) -> Any:
        alpha = jax.nn.logsumexp(alpha[:, :, None] + transitions, 1) + x
        return alpha, alpha

    return scan(body, alpha, x)


def filtered(scan: Any, p: Any, transitions: Any, x: Any) -> Any:
    """The forward algorithm with probabilities, which are normalised in each step; Rabiner, "A Tutorial on Hidden Markov Models and
    Selected Applications in Speech Recognition", 1989."""

    def body(p: Any, x: Any) -> Any:
        p = (p @ transitions) * jnp.exp(x)
        p = p / jnp.sum(p, -1, keepdims=True)
        return p, p

    return scan(body, p, x)


def sinkhorn(scan: Any, f: Any, g: Any, cost: Any, scale: Any) -> Any:
    """Potentials of transport; Cuturi, "Sinkhorn Distances: Lightspeed Computation of Optimal Transport", 2013. A step has its
    regularisation."""

    def body(fg: Any, scale: Any) -> Any:
        f, g = fg
        s = 1 + jnp.abs(scale)
        f = -s * jax.nn.logsumexp((g[:, None, :] - cost) / s, 2)
        return (f, -s * jax.nn.logsumexp((f[:, :, None] - cost) / s, 1)), None

    return scan(body, (f, g), scale)[0]


@dataclasses.dataclass(frozen=True)
class Function:
    """kinds of the operands: h a carry, w a number for each feature, s a scalar, x an element of each step; with rows: m a matrix, c a
    matrix for each lane, t a number for each step.

    wrt: positions of the operands that a gradient is by. arrays: of all steps, that a gradient moves.
    goals: forward and backward; a fraction of a copy, or microseconds. times: how many times XLA's speed, at least.
    """

    f: Callable[..., Any]
    kinds: str
    goals: tuple[float, ...]
    wrt: tuple[int, ...] = ()
    arrays: int = 0
    times: tuple[float, float] = (20.0, 4.0)


# Fractions of a copy are what the first version of the kernels reached on an H200, or more. XLA's loop over Heston's noise takes 18 times
# as long as a copy of it on an H100.
FUNCTIONS = {
    "recurrence": Function(recurrence, "hxx", (0.85, 0.8), (0, 1, 2), 8),
    "advantages": Function(advantages, "hxxx", (0.57,)),
    "gated": Function(gated, "hwwxx", (0.34, 0.45), (0, 1, 2, 3, 4), 9),
    "heston": Function(heston, "hhssxx", (0.89, 0.64), (0, 1, 2, 3), 8, (15.0, 4.0)),
    "neurons": Function(neurons, "hx", (0.76,)),
    "average": Function(average, "hx", (0.7,)),
    "oscillators": Function(oscillators, "hhwwwx", (0.6, 0.3), (2, 3, 4, 5), 7),
    "walk": Function(walk, "h", ()),
    "hidden": Function(hidden, "hmx", (), (0, 1, 2), 7),
    "filtered": Function(filtered, "hmx", (), (0, 1, 2), 7),
    "sinkhorn": Function(sinkhorn, "hhct", ()),
}
OPS = tuple(FUNCTIONS)
ROWS = ("hidden", "filtered", "sinkhorn")  # bodies that reduce along rows


@dataclasses.dataclass(frozen=True)
class Case:
    """steps x lanes. op, dtype: what runs; empty for all. goals: in place of the function's."""

    group: str
    shape: tuple[int, ...]
    op: str = ""
    dtype: str = ""
    cpu: bool = False
    goals: tuple[float, ...] = ()

    arrays = 6  # that a backward pass moves

    @property
    def name(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        return self.shape[-1]

    def operand(self, kind: str) -> tuple[int, ...]:
        own = {"x": self.shape, "h": self.shape[1:], "w": self.shape[-1:], "s": ()}
        own |= {"m": self.shape[-1:] * 2, "c": (*self.shape[1:], self.shape[-1]), "t": self.shape[:1]}
        return own[kind]


DTYPES = {"gpu": ("float32", "bfloat16"), "cpu": ("float32",)}
CASES = [
    Case("many lanes", (4096, 16384), "recurrence", "float32"),
    Case("many lanes", (1024, 16384), "advantages", "float32"),
    Case("many lanes", (1024, 16, 512), "gated", "float32"),
    Case("many lanes", (252, 262144), "heston", "float32"),
    Case("many lanes", (1000, 65536), "neurons", "float32"),
    Case("many lanes", (4096, 8192), "average", "bfloat16"),
    Case("few lanes", (2048, 2048), "recurrence", "float32", goals=(50, 100)),
    Case("few lanes", (65536, 1536), "recurrence", "float32", goals=(0.6, 0.5)),
    Case("few lanes", (1024, 2048), "advantages", "float32", goals=(0.4,)),
    Case("few lanes", (4096, 8, 128), "oscillators", "float32"),
    Case("16 bits", (4096, 16384), "recurrence", "bfloat16", goals=(0.7, 0.7)),
    Case("16 bits", (65536, 1536), "recurrence", "bfloat16", goals=(0.7, 0.7)),
]
CASES += [Case("lanes", (t, n), "recurrence", "float32") for t in (64, 512, 4096) for n in (256, 2048, 16384, 131072)]
# What the constants of plans and gates rest on: LOOP_STEPS of _accelerate/gate.py, and CUT_STEPS, CUT_LANES and AHEAD_THREADS of
# _engines/loops/tuning.py. Loops that may be cut run by every algorithm.
CASES += [Case("few steps", (t, n), "recurrence", "float32") for t in (2, 4, 8, 16) for n in (1024, 65536)]
CASES += [Case("cut", (t, 2048), "recurrence", "float32") for t in (128, 256, 512)]
CASES += [Case("cut", (4096, n), "recurrence", "float32") for n in (8192, 12288, 16384)]
CASES += [Case("few steps", (128, 2048), "advantages", "float32")]
CASES += [Case("ahead", (256, n), "walk", "float32") for n in (8192, 32768, 65536, 131072)]
# Bodies that reduce along rows, by a team of threads for each lane.
CASES += [Case("rows", (1000, 1024, n), "hidden", "float32") for n in (4, 8, 32)]
CASES += [Case("rows", (1000, 1024, 32), "filtered", "float32")]
# XLA's gradient of 1000 steps keeps 67 GB.
CASES += [Case("rows", (250, 1024, 128), op, "float32") for op in ("hidden", "filtered")]
CASES += [Case("rows", (100, 256, 64), "sinkhorn", "float32")]
CPU_CASES = [Case("cpu", (64, 1024), cpu=True)]
CPU_CASES += [Case("cpu", (16, 8, 12), op, cpu=True) for op in ROWS]
QUICK = {"1024x16384", "1024x16x512", "4096x8192"}


@dataclasses.dataclass(frozen=True)
class Cell(_cell.Cell):
    """One row of the table."""

    case: Case

    @property
    def function(self) -> Function:
        return FUNCTIONS[self.op]

    def operands(self) -> list[jax.ShapeDtypeStruct]:
        """The operands of the function; for its gradient also the cotangents of the results."""
        given = [jax.ShapeDtypeStruct(self.case.operand(k), self.dtype) for k in self.function.kinds]
        return given + self.results(given) if self.direction == "backward" else given

    def results(self, given: list[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        results = jax.tree.leaves(jax.eval_shape(lambda *xs: self.function.f(jax.lax.scan, *xs), *given))
        return [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in results]

    @property
    def bytes(self) -> int:
        itemsize = np.dtype(self.dtype).itemsize
        if self.direction == "backward":
            return self.function.arrays * self.case.size * itemsize
        given = self.operands()
        return sum(s.size * s.dtype.itemsize for s in (*given, *self.results(given)))

    def goals(self) -> list[dict[str, Any]]:
        if self.case.group in ("cpu", "lanes", "few steps", "cut", "ahead", "rows"):
            return [{"goal": "peers", "against": ["xla"]}]
        goal = (self.case.goals or self.function.goals)[DIRECTIONS.index(self.direction)]
        own = {"goal": "copy", "required": goal} if goal <= 1 else {"goal": "time", "us": goal}
        required = self.function.times[DIRECTIONS.index(self.direction)]
        return [{"goal": "peers", "against": ["xla"], "required": required}, {"goal": "peers"}, own]


def cells(case: Case, dtype: str, ops: tuple[str, ...]) -> Iterator[Cell]:
    for op in ops:
        if (case.op == op or (not case.op and op not in ROWS)) and case.dtype in ("", dtype):
            for direction in DIRECTIONS:
                has_gradient = FUNCTIONS[op].wrt and case.group not in ("lanes", "few steps", "cut")
                if direction == "forward" or has_gradient:
                    yield Cell(case, dtype, op, direction)


def programs(cell: Cell, algorithms: bool) -> list[Program]:
    """This library's and XLA's programs of a cell."""
    function = cell.function

    def program(scan: Any) -> Callable[..., Any]:
        if cell.direction == "forward":
            return lambda *xs: function.f(scan, *xs)

        def gradient(*xs: jax.Array) -> list[jax.Array]:
            given, cotangents = xs[: len(function.kinds)], xs[len(function.kinds) :]
            results, pullback = jax.vjp(lambda *xs: function.f(scan, *xs), *given)
            gradients = pullback(jax.tree.unflatten(jax.tree.structure(results), cotangents))
            return [gradients[k] for k in function.wrt]

        return gradient

    made = [
        Program(_goals.OURS, program(jaxkern.scan), cell.operands()),
        Program("xla", program(jax.lax.scan), cell.operands()),
    ]
    if cell.case.group == "cut" or (algorithms and cell.op == "recurrence"):
        for name in ("lanes", "columns"):
            ours = program(jaxkern.scan)
            made.append(Program(f"{_goals.OURS}:{name}", ours, cell.operands(), forced={"scan": name}))
    if cell.case.group == "rows" and cell.case.width <= 8:
        made += [
            Program(f"{_goals.OURS}:{name}", program(jaxkern.scan), cell.operands(), forced={"scan": name})
            for name in ("lanes", "teams")
        ]
    if cell.op == "recurrence":
        made.append(Program("associative_scan", program(_associative), cell.operands()))
    return made


def _associative(step: Any, h: Any, xs: Any) -> Any:
    """What `scan` gives for the linear recurrence, by `jax.lax.associative_scan`."""
    join = lambda p, q: (q[0] * p[0], q[0] * p[1] + q[1])
    a, x = jax.lax.associative_scan(join, xs)
    hs = a * h + x
    return hs[-1], hs


def chosen_algorithm(cell: Cell) -> None:
    return None


Inputs = elementwise.Inputs


def candidates(cell: Cell, compiled: list[Program], inputs: elementwise.Inputs) -> list[_timing.Candidate]:
    return _cell.candidates(compiled, inputs, span=True)


def checks(clock: Any) -> list[dict[str, Any]]:
    """A gradient is a loop forward and one backward."""
    cell = Cell(CASES[2], "float32", "gated", "backward")
    compiled = programs(cell, False)[0]
    compiled.compile()
    return [
        {
            "check": "the gradient of a loop is one call forward and one backward",
            "met": compiled.targets.count("jaxkern_scan") == 2,
            "handlers": compiled.targets,
        }
    ]
