"""softmax_cross_entropy against XLA, PyTorch and a copy: the loss, and loss and gradient together.

    forward    the losses                       moves one array of logits (and a few numbers per row)
    both       losses and their gradient        two: softmax_cross_entropy_and_grad
    step       value_and_grad of the mean       two
    backward   the gradient from what is kept   two

XLA runs the formula of optax. A copy of as many bytes reads half of them and writes the other half. The sweep follows
the published figures of QuACK and Liger, with the vocabularies of GPT-2 and Llama.
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

from benchmarks import _cell, _goals, _inputs, _timing, _torch
from benchmarks._program import Program

OPERATION = "cross_entropy"
OPS = ("cross_entropy",)
DIRECTIONS = ("forward", "both", "step", "backward")
ALGORITHMS = ("sub_warp", "warp", "block", "pipeline", "streaming", "split")
NEAR_READ, NEAR_COPY, LARGE = 0.97, 0.95, 100e6


@dataclasses.dataclass(frozen=True)
class Case:
    """Logits of a shape, the classes last."""

    group: str
    shape: tuple[int, int]
    cpu: bool = False

    @property
    def name(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        return self.shape[-1]


DTYPES = {"gpu": ("bfloat16", "float32"), "cpu": ("float32", "bfloat16")}
CASES = (
    [Case("classes", (32768, 1 << k)) for k in range(8, 16)]
    + [Case("classes", s) for s in ((16384, 65536), (8192, 131072), (4096, 262144), (8192, 50257), (8192, 128256))]
    + [Case("few rows", s) for s in ((64, 131072), (1, 1 << 20), (1024, 50257))]
)
CPU_CASES = [Case("cpu", s, cpu=True) for s in ((4096, 1024), (512, 32768), (2048, 50257))]
QUICK = {"32768x256", "32768x1024", "32768x4096", "32768x16384", "32768x2048", "8192x50257", "8192x131072"}


@dataclasses.dataclass(frozen=True)
class Cell(_cell.Cell):
    """One row of the table."""

    case: Case

    @property
    def bytes(self) -> int:
        """What a call must move: the logits, the gradient; and for each row its label, loss or weight, and what is kept."""
        arrays = 1 if self.direction == "forward" else 2
        return arrays * self.case.size * jnp.dtype(self.dtype).itemsize + 16 * self.case.shape[0]  # by all rows

    def goals(self) -> list[dict[str, Any]]:
        peers = {"goal": "peers"}
        if self.case.cpu:
            return [peers | {"against": ["xla"]}]
        goals = [peers]
        width, itemsize = self.case.shape[1], jnp.dtype(self.dtype).itemsize
        if self.case.group == "classes" and width >= 4096 and self.bytes >= LARGE and self.direction != "backward":
            goals.append({"goal": "copy", "required": NEAR_READ if self.direction == "forward" else NEAR_COPY})
        direction = "both" if self.direction == "step" else self.direction
        found = _goals.published("cross_entropy", direction, itemsize, width)
        if found and self.case.group == "classes":
            best = max(found, key=found.__getitem__)
            goals.append({"goal": "published", "peer": best, "required": found[best] * (1 - _goals.NOISE)})
        return goals


# --- what runs -----------------------------------------------------------------------------------


def _optax(x: jax.Array, labels: jax.Array) -> jax.Array:
    """`optax.softmax_cross_entropy_with_integer_labels`."""
    of_label = jnp.take_along_axis(x, labels[:, None], -1)[:, 0]
    return jax.nn.logsumexp(x, -1) - of_label


def _ours(cell: Cell, algorithm: str) -> Callable[..., Any]:
    import jaxkern

    kernels = importlib.import_module("jaxkern._ops.cross_entropy.primitive")

    def run(x: jax.Array, labels: jax.Array, *rest: jax.Array) -> Any:
        with jaxkern.algorithms.force(softmax_cross_entropy=algorithm):
            if cell.direction == "forward":
                return jaxkern.softmax_cross_entropy(x, labels)
            if cell.direction == "both":
                return jaxkern.softmax_cross_entropy_and_grad(x, labels, *rest)
            if cell.direction == "step":
                return jax.value_and_grad(lambda x: jaxkern.softmax_cross_entropy(x, labels).mean())(x)
        return kernels.cross_entropy_grad_p.bind(
            x, labels, *rest, axis=1, algorithm=algorithm, options=kernels.Options()
        )

    return run


def _xla(cell: Cell) -> Callable[..., Any]:
    if cell.direction == "forward":
        return _optax
    if cell.direction == "step":
        return lambda x, labels: jax.value_and_grad(lambda x: _optax(x, labels).mean())(x)
    if cell.direction == "both":

        def both(x: jax.Array, labels: jax.Array, weights: jax.Array) -> Any:
            value, pull = jax.vjp(lambda x: _optax(x, labels), x)
            return value, pull(weights.astype(value.dtype))[0]

        return both

    def backward(x: jax.Array, labels: jax.Array, largest: jax.Array, total: jax.Array, g: jax.Array) -> jax.Array:
        p = jnp.exp(x.astype(jnp.float32) - largest[:, None]) / total[:, None]
        return (g[:, None] * (p - jax.nn.one_hot(labels, x.shape[1]))).astype(x.dtype)

    return backward


def _specs(cell: Cell) -> list[jax.ShapeDtypeStruct]:
    rows = cell.case.shape[:1]
    numbers = {"both": 1, "backward": 3}.get(cell.direction, 0)
    return [
        jax.ShapeDtypeStruct(cell.case.shape, cell.dtype),
        jax.ShapeDtypeStruct(rows, jnp.int32),
        *[jax.ShapeDtypeStruct(rows, jnp.float32)] * numbers,
    ]


def programs(cell: Cell, algorithms: bool) -> list[Program]:
    """This library's and XLA's programs of a cell."""
    found = [Program(_goals.OURS, _ours(cell, "auto"), _specs(cell))]
    if algorithms and jax.default_backend() == "gpu" and cell.direction != "step":
        found += [Program(f"{_goals.OURS}:{t}", _ours(cell, t), _specs(cell)) for t in ALGORITHMS if _fits(cell, t)]
    return [*found, Program("xla", _xla(cell), _specs(cell))]


def _problem(cell: Cell) -> dict[str, Any]:
    """The arguments with which to ask `jaxkern.algorithms`."""
    which = {"forward": "loss", "backward": "gradient"}.get(cell.direction, "both")
    return {"rows": cell.case.shape[0], "width": cell.case.shape[1], "dtype": cell.dtype, "which": which}


def _fits(cell: Cell, algorithm: str) -> bool:
    from jaxkern import algorithms

    return algorithms.fits("softmax_cross_entropy", algorithm, **_problem(cell))


def chosen_algorithm(cell: Cell) -> str | None:
    """The algorithm that runs a cell by default on this GPU."""
    from jaxkern import algorithms

    if jax.default_backend() != "gpu":
        return None
    try:
        return algorithms.choose("softmax_cross_entropy", **_problem(cell))
    except RuntimeError:
        return None


# --- inputs --------------------------------------------------------------------------------------


class Inputs:
    """Logits of one case and dtype, enough of them to go round cold; labels, and a number per row for anything else."""

    def __init__(self, pool: _inputs.Pool, case: Case) -> None:
        self.case = case
        self.turns = _inputs.rotation(case.size * pool.dtype.itemsize)
        self.arrays = [pool.array(case.shape, i) for i in range(self.turns)]
        self.labels = jax.random.randint(jax.random.key(5), case.shape[:1], 0, case.shape[1], jnp.int32)
        self.numbers = jax.random.uniform(jax.random.key(3), case.shape[:1], jnp.float32, 1, 2)
        jax.block_until_ready((self.arrays, self.labels, self.numbers))

    def feed(self, specs: list[jax.ShapeDtypeStruct]) -> Callable[[int], tuple[Any, ...]]:
        rest = (self.labels, *[self.numbers] * (len(specs) - 2))
        return lambda i: (self.arrays[i % len(self.arrays)], *rest)


def candidates(cell: Cell, compiled: list[Program], inputs: Inputs) -> list[_timing.Candidate]:
    """What to time for a cell, the copy aside."""
    found = _cell.candidates(compiled, inputs, keep=inputs.turns)
    if _torch.available() and cell.direction != "backward":
        found.append(_torch_candidate(cell, inputs))
    return found


def _torch_candidate(cell: Cell, inputs: Inputs) -> _timing.Candidate:
    torch = _torch.torch()
    tensors: list[Any] = []

    def call(i: int) -> Any:
        if not tensors:
            tensors.extend(_torch.share(a) for a in inputs.arrays)
            tensors.append(_torch.share(inputs.labels).long())
        x, labels = tensors[i % (len(tensors) - 1)], tensors[-1]
        if cell.direction == "forward":
            return torch.nn.functional.cross_entropy(x, labels, reduction="none")
        leaf = x.detach().requires_grad_()
        loss = torch.nn.functional.cross_entropy(leaf, labels)
        return torch.autograd.grad(loss, leaf)[0]

    return _timing.Candidate("torch", call, _torch.sync, keep=inputs.turns, torch=True)


# --- checks --------------------------------------------------------------------------------------


def examine(cell: Cell, compiled: list[Program], inputs: Inputs, times: dict[str, float]) -> list[dict[str, Any]]:
    """Memory beside the results: a few numbers per row, and the partial results of few rows."""
    return _goals.memory(compiled, 64 * cell.case.shape[0] + (1 << 17))


def checks(clock: Any) -> list[dict[str, Any]]:
    """Properties of compiled programs: value_and_grad of a mean is one kernel, and needs no copy; donated, in place."""
    import jaxkern

    shape, dtype = ((8192, 4096), "bfloat16") if jax.default_backend() == "gpu" else ((256, 512), "float32")
    x = jax.random.normal(jax.random.key(0), shape, dtype)
    labels = jax.random.randint(jax.random.key(1), shape[:1], 0, shape[1])
    found = []
    for donate in ((), (0,)):
        step = jax.value_and_grad(lambda x, labels: jaxkern.softmax_cross_entropy(x, labels).mean())
        compiled = jax.jit(step, donate_argnums=donate).lower(x, labels).compile()
        text = compiled.as_text()
        targets = re.findall(r'custom_call_target="(jaxkern\w*)"', text)
        moves = re.findall(r"= \S+ ((?:copy|transpose)(?:-start)?)\(", text)
        in_place = compiled.memory_analysis().alias_size_in_bytes >= x.nbytes
        found.append(
            {
                "check": f"value_and_grad of a mean is one kernel without a copy{', in the donated logits' * bool(donate)}",
                "met": targets == ["jaxkern_cross_entropy_both"] and not moves and in_place == bool(donate),
                "handlers": targets,
                "moves": moves,
                "kernels": {},
            }
        )
    return found
