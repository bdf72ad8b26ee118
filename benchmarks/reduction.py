"""Row reductions against XLA, PyTorch, and the fastest row sum.

A reduction only reads, so beside the copy of as many bytes logsumexp is measured against the sums of the same
array: what memory gives to a kernel that reads once.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import _cell, _goals, _timing, _torch
from benchmarks._program import Program
from benchmarks.softmax import Case, Inputs

OPERATION = "reduction"
DIRECTIONS = ("forward",)
OPS = ("reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "logsumexp")
ALGORITHMS = ("lanes", "warp", "block", "cluster", "streaming", "split", "strided")

NEAR_SUM = 0.95  # of the fastest sum's bandwidth

DTYPES = {"gpu": ("bfloat16", "float32"), "cpu": ("float32",)}
CASES = (
    [Case("rows", s) for s in ((49152, 1024), (16384, 4096), (8192, 32768), (64, 1 << 20), (1, 1 << 26))]
    + [Case("narrow", (49152, 32))]
    + [Case("other", s) for s in ((49152, 100), (49152, 1003), (524288, 16), (4096, 4097), (512, 131072), (16, 8192))]
    + [Case("axis", (20, 400, 6000), a) for a in (0, 1)]
    + [Case("axis", (64, 1024, 1024), 1), Case("axis", (16384, 4096), 0), Case("axis", (1 << 20, 64), 0)]
    + [Case("where", (32, 16, 512, 512), mask=(32, 1, 512, 512))]
)
CPU_CASES = [
    Case("cpu", s, a, cpu=True) for s, a in (((1 << 22,), -1), ((2048, 2048), -1), ((2048, 2048), 0), ((65536, 64), -1))
]
QUICK = {c.name for c in CASES if c.group in ("rows", "narrow")}


@dataclasses.dataclass(frozen=True)
class Cell(_cell.Cell):
    """One row of the table."""

    case: Case

    @property
    def bytes(self) -> int:
        """What a call must move: the array and the mask once, and the result."""
        elements = self.case.size + self.case.size // self.case.width
        return elements * jnp.dtype(self.dtype).itemsize + (math.prod(self.case.mask) if self.case.mask else 0)

    def goals(self) -> list[dict[str, Any]]:
        peers = [{"goal": "peers", "against": ["xla"] if self.case.group == "cpu" else ["xla", "torch"]}]
        if self.op == "logsumexp" and self.case.group == "rows":
            peers.append({"goal": "peers", "against": ["jaxkern sum", "xla sum", "torch sum"], "required": NEAR_SUM})
        if self.op == "logsumexp" and self.case.group == "narrow":
            peers.append({"goal": "peers", "against": ["xla sum"]})
        return peers


# --- what runs -----------------------------------------------------------------------------------


def _ours(op: str, axis: int, algorithm: str = "auto") -> Callable[..., jax.Array]:
    import jaxkern

    def run(x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        with jaxkern.algorithms.force(**{op: algorithm}):
            return getattr(jaxkern, op)(x, axis=axis, where=mask)

    return run


def _xla(op: str, axis: int) -> Callable[..., jax.Array]:
    if op == "logsumexp":
        return lambda x, mask=None: jax.nn.logsumexp(x, axis=axis, where=mask)
    function, initial = (
        getattr(jnp, op.removeprefix("reduce_")),
        {"reduce_max": -jnp.inf, "reduce_min": jnp.inf}.get(op),
    )
    extra = {} if initial is None else {"initial": initial}
    return lambda x, mask=None: function(x, axis, where=mask, **extra)


def programs(cell: Cell, algorithms: bool) -> list[Program]:
    """This library's and XLA's programs of a cell, and beside logsumexp the programs of the sum."""
    case, axis = cell.case, cell.case.axis
    specs = [jax.ShapeDtypeStruct(case.shape, cell.dtype)]
    if case.mask:
        specs.append(jax.ShapeDtypeStruct(case.mask, jnp.bool_))
    found = [Program(_goals.OURS, _ours(cell.op, axis), specs), Program("xla", _xla(cell.op, axis), specs)]
    if cell.op == "logsumexp" and case.group in ("rows", "narrow"):
        found += [
            Program(f"{_goals.OURS} sum", _ours("reduce_sum", axis), specs),
            Program("xla sum", _xla("reduce_sum", axis), specs),
        ]
    if algorithms and jax.default_backend() == "gpu":
        found += [
            Program(f"{_goals.OURS}:{t}", _ours(cell.op, axis, t), specs) for t in ALGORITHMS if _ask("fits", cell, t)
        ]
    return found


def _ask(question: str, cell: Cell, *first: str) -> Any:
    algorithms = importlib.import_module("jaxkern.algorithms")
    shape, axis = cell.case.shape, cell.case.axis % len(cell.case.shape)
    return getattr(algorithms, question)(
        cell.op,
        *first,
        math.prod(shape[:axis]),
        shape[axis],
        math.prod(shape[axis + 1 :]),
        cell.dtype,
    )


def chosen_algorithm(cell: Cell) -> str | None:
    """The algorithm that runs a cell by default on this GPU."""
    return _ask("choose", cell) if jax.default_backend() == "gpu" else None


def candidates(cell: Cell, compiled: list[Program], inputs: Inputs) -> list[_timing.Candidate]:
    """What to time for a cell, the copy aside."""
    found = _cell.candidates(compiled, inputs)
    if _torch.available() and not cell.case.mask:
        found.append(_torch_candidate("torch", cell.op, cell.case.axis, inputs))
        if cell.op == "logsumexp" and cell.case.group == "rows":
            found.append(_torch_candidate("torch sum", "reduce_sum", cell.case.axis, inputs))
    return found


def _torch_candidate(name: str, op: str, axis: int, inputs: Inputs) -> _timing.Candidate:
    function = getattr(_torch.torch(), {"reduce_max": "amax", "reduce_min": "amin"}.get(op, op.removeprefix("reduce_")))
    tensors: list[Any] = []

    def call(i: int) -> Any:
        if not tensors:
            tensors.extend(_torch.share(a) for a in inputs.arrays)
        return function(tensors[i % len(tensors)], axis)

    return _timing.Candidate(name, call, _torch.sync, torch=True)


# --- checks --------------------------------------------------------------------------------------


def checks(clock: Any) -> list[dict[str, Any]]:
    """Properties of compiled programs: the gradient adds no jaxkern kernel and no copy."""
    import jaxkern

    del clock
    shape = jax.ShapeDtypeStruct((256, 512), jnp.float32)
    step = Program("step", jax.value_and_grad(lambda x: jaxkern.logsumexp(x, axis=-1).sum()), [shape])
    step.compile()
    moves = re.findall(r"= \S+ (transpose)\(", step.compiled.as_text())
    return [
        {
            "check": "value_and_grad of logsumexp is one kernel and one elementwise pass of XLA, no transpose",
            "met": step.targets == ["jaxkern_logsumexp_statistics"] and not moves,
            "handlers": step.targets,
            "moves": moves,
            "kernels": {},
        }
    ]
