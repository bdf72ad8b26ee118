"""softmax of a score function: soft cap, relative bias, window and documents, forward and gradient by x, against XLA and a
copy.

    python -m benchmarks score [--ops cap_bias] [--algorithms]

Attention logits of [batch, heads, queries, keys]; the relative bias [heads, queries, keys] broadcasts over the batch.
The gradient starts from the logits and the cotangent: neither the scores nor the result are kept. The copy is of all bytes,
also of those that a mask excludes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks import _cell, _goals, fused_softmax
from benchmarks._program import Program
from jaxkern._ops.softmax import fused_plan
from jaxkern._ops.softmax.plan import Problem

OPERATION = "score"
DIRECTIONS = ("forward", "backward")
GOALS = {"forward": 0.9, "backward": 0.85}  # of a copy
BEFORE_XLA = 1.5
ALGORITHMS = fused_softmax.ALGORITHMS
CAP, SIZE = 30.0, 128  # of the soft cap; of the window and of a document


def cap(s: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    return CAP * jnp.tanh(s / CAP)


def cap_bias(s: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array, bias: jax.Array) -> jax.Array:
    return CAP * jnp.tanh(s / CAP) + bias


def window(s: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.where(abs(q - k) < SIZE, s, -jnp.inf)


def documents(
    s: jax.Array, b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array, of_q: jax.Array, of_k: jax.Array
) -> jax.Array:
    return jnp.where(of_q == of_k, s, -jnp.inf)


FUNCTIONS: dict[str, Callable[..., jax.Array]] = {
    "cap_bias": cap_bias,
    "cap": cap,
    "window": window,
    "documents": documents,
}
OPS = tuple(FUNCTIONS)

Case = fused_softmax.Case
DTYPES = {"gpu": ("bfloat16", "float32"), "cpu": ("float32",)}
CASES = [Case((32, 16, 512, 512)), Case((8, 16, 2048, 2048))]
CPU_CASES = [Case((4, 4, 512, 512), cpu=True)]
QUICK = {"32x16x512x512"}


@dataclasses.dataclass(frozen=True)
class Cell(_cell.Cell):
    """One row of the table."""

    case: Case

    def operands(self) -> list[jax.ShapeDtypeStruct]:
        """x, the cotangent of a backward pass, and the bias."""
        full = [jax.ShapeDtypeStruct(self.case.shape, self.dtype)]
        bias = [jax.ShapeDtypeStruct(self.case.bias, self.dtype)] if self.op == "cap_bias" else []
        return [*full * (1 if self.direction == "forward" else 2), *bias]

    @property
    def bytes(self) -> int:
        read = sum(s.size * s.dtype.itemsize for s in self.operands())
        return read + self.case.size * jnp.dtype(self.dtype).itemsize

    def goals(self) -> list[dict[str, Any]]:
        against_xla = {"goal": "peers", "against": ["xla"]}
        if self.case.cpu:
            return [against_xla]
        if self.op == "cap_bias" and self.case.name in QUICK:
            return [against_xla | {"required": BEFORE_XLA}, {"goal": "copy", "required": GOALS[self.direction]}]
        return [against_xla]


# --- what runs -----------------------------------------------------------------------------------


def programs(cell: Cell, algorithms: bool) -> list[Program]:
    """This library's and XLA's programs of a cell."""
    specs = cell.operands()
    found = [Program(_goals.OURS, _directed(cell, _ours(cell, "auto")), specs)]
    if algorithms and jax.default_backend() == "gpu":
        fitting = [t for t in ALGORITHMS if fused_plan.fits(t, _problem(cell))]
        found += [Program(f"{_goals.OURS}:{t}", _directed(cell, _ours(cell, t)), specs) for t in fitting]
    return [*found, Program("xla", _directed(cell, _composition(cell)), specs)]


def _directed(cell: Cell, f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    if cell.direction == "forward":
        return f
    return lambda x, g, *bias: jax.vjp(lambda x: f(x, *bias), x)[1](g)[0]


def _ours(cell: Cell, algorithm: str) -> Callable[..., jax.Array]:
    def softmax(x: jax.Array, *bias: jax.Array) -> jax.Array:
        with jaxkern.algorithms.force(softmax=algorithm):
            return jaxkern.softmax(x, score=FUNCTIONS[cell.op], score_args=[*bias, *_documents(cell)])

    return softmax


def _documents(cell: Cell) -> list[jax.Array]:
    """The document of each query and of each key, where the function asks for them."""
    if cell.op != "documents":
        return []
    numbers = lambda d: jax.lax.broadcasted_iota(
        jnp.int32, [n if k == d else 1 for k, n in enumerate(cell.case.shape)], d
    )
    return [numbers(2) // SIZE, numbers(3) // SIZE]


def _composition(cell: Cell) -> Callable[..., jax.Array]:
    """The same as a user of jax.nn writes it, in float32."""

    def softmax(x: jax.Array, *bias: jax.Array) -> jax.Array:
        indices = [jax.lax.broadcasted_iota(jnp.int32, x.shape, d) for d in range(x.ndim)]
        args = [*(b.astype(jnp.float32) for b in bias), *_documents(cell)]
        s = FUNCTIONS[cell.op](x.astype(jnp.float32), *indices, *args)
        return jax.nn.softmax(s).astype(x.dtype)

    return softmax


def _problem(cell: Cell) -> Problem:
    """What the plan of the kernels chooses by."""
    rows, backward = math.prod(cell.case.shape[:-1]), cell.direction == "backward"
    return Problem(rows, cell.case.width, dtype=cell.dtype, backward=backward)


def chosen_algorithm(cell: Cell) -> str | None:
    """The algorithm that runs a cell by default on this GPU."""
    try:
        device = jaxkern.algorithms.this_device() if jax.default_backend() == "gpu" else None
    except RuntimeError:
        return None
    return device and fused_plan.choose(_problem(cell))


Inputs = fused_softmax.Inputs
candidates = fused_softmax.candidates
examine = fused_softmax.examine


def checks(clock: Any) -> list[dict[str, Any]]:
    """A training step is one kernel forward and one backward."""
    specs = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4, 4, 256, 256), (4, 256, 256))]
    loss = lambda x, bias: jnp.sum(jaxkern.softmax(x, score=cap_bias, score_args=[bias]).astype(jnp.float32) ** 2)
    compiled = Program("step", jax.value_and_grad(loss), specs)
    compiled.compile()
    return [
        {
            "check": "value_and_grad of a softmax of scores is one call forward and one backward",
            "met": compiled.targets == ["jaxkern_softmax_score", "jaxkern_softmax_score_grad"],
            "handlers": compiled.targets,
        }
    ]
