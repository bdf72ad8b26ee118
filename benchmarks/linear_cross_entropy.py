"""linear_softmax_cross_entropy against all logits at once, and against its three matrix products alone.

    forward    the mean loss
    2.8GB      value_and_grad of the mean by activations and weight, with so much memory beside operands and results
    0.7GB      the same with less: the vocabulary in chunks, whose logits are computed twice
    default    the same with the default budget

XLA runs the composition of `jnp.dot` and the formula of optax, on logits in float32. "products" are the products alone that a
differentiated loss has at least: the logits, and from these the gradients of activations and weight, without a loss in between.
The cases: the heads of Llama 3 (8 billion) and of GPT-2, the latter with a float32 weight.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks import _cell, _goals, _inputs, _timing
from benchmarks._program import Program

OPERATION = "linear_cross_entropy"
OPS = ("linear_cross_entropy",)
BUDGETS = {"forward": 700_000_000, "2.8GB": 2_800_000_000, "0.7GB": 700_000_000, "default": None}
DIRECTIONS = tuple(BUDGETS)
REQUIRED = {"2.8GB": 1.12, "0.7GB": 1.40}  # of the time of the products
PRODUCTS = "products"


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows, width and vocabulary."""

    group: str
    shape: tuple[int, int, int]
    weight_dtype: str = ""
    cpu: bool = False

    @property
    def name(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def size(self) -> int:
        """Elements of activations and weight together."""
        rows, width, vocabulary = self.shape
        return width * (rows + vocabulary)

    @property
    def width(self) -> int:
        return self.shape[1]


DTYPES = {"gpu": ("bfloat16",), "cpu": ("float32",)}
CASES = [Case("llama", (8192, 4096, 128256)), Case("gpt2", (32768, 768, 50257), "float32")]
CPU_CASES = [Case("cpu", (512, 256, 8192), cpu=True)]
QUICK = {"8192x4096x128256"}


@dataclasses.dataclass(frozen=True)
class Cell(_cell.Cell):
    """One row of the table."""

    case: Case

    @property
    def weight_dtype(self) -> str:
        return self.case.weight_dtype or self.dtype

    @property
    def bytes(self) -> int:
        """Operands, and results if there are gradients. The logits are not among them."""
        rows, width, vocabulary = self.case.shape
        sizes = [jnp.dtype(d).itemsize for d in (self.dtype, self.weight_dtype)]
        return (1 if self.direction == "forward" else 2) * width * (rows * sizes[0] + vocabulary * sizes[1])

    def goals(self) -> list[dict[str, Any]]:
        if self.case.cpu:
            return []
        against_xla = {"goal": "peers", "against": ["xla"]}
        if self.case.group != "llama" or self.direction not in REQUIRED:
            return [against_xla] if self.direction != "0.7GB" else []
        return [{"goal": "peers", "against": [PRODUCTS], "required": 1 / REQUIRED[self.direction]}]


# --- what runs -----------------------------------------------------------------------------------


def _mean(cell: Cell, algorithm: str) -> Callable[..., jax.Array]:
    def mean(h: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        with jaxkern.algorithms.force(linear_softmax_cross_entropy=algorithm):
            return jaxkern.linear_softmax_cross_entropy(h, weight, labels, memory=BUDGETS[cell.direction])

    return mean


def _plain(h: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jnp.dot(h, weight.astype(h.dtype)).astype(jnp.float32)
    if jax.default_backend() == "cpu" and h.dtype == jnp.bfloat16:
        logits = jax.lax.reduce_precision(logits, 8, 7)  # XLA:CPU drops the rounding of a product that is converted
    of_label = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return (jax.nn.logsumexp(logits, -1) - of_label).mean()


def _products(h: jax.Array, weight: jax.Array, labels: jax.Array) -> Any:
    w = weight.astype(h.dtype)
    logits = jnp.dot(h, w)
    return jnp.dot(logits, w.T), jnp.dot(h.T, logits, preferred_element_type=weight.dtype)


def _directed(cell: Cell, mean: Callable[..., jax.Array]) -> Callable[..., Any]:
    return mean if cell.direction == "forward" else jax.value_and_grad(mean, (0, 1))


def _specs(cell: Cell) -> list[jax.ShapeDtypeStruct]:
    rows, width, vocabulary = cell.case.shape
    return [
        jax.ShapeDtypeStruct((rows, width), cell.dtype),
        jax.ShapeDtypeStruct((width, vocabulary), cell.weight_dtype),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    ]


def programs(cell: Cell, algorithms: bool) -> list[Program]:
    """This library's and XLA's programs of a cell, and the products."""
    specs = _specs(cell)
    found = [Program(_goals.OURS, _directed(cell, _mean(cell, "auto")), specs)]
    if algorithms:
        name = "linear_softmax_cross_entropy"
        fitting = [a for a in jaxkern.algorithms.names(name) if jaxkern.algorithms.fits(name, a, **_problem(cell))]
        found += [Program(f"{_goals.OURS}:{a}", _directed(cell, _mean(cell, a)), specs) for a in fitting]
    found.append(Program("xla", _directed(cell, _plain), specs))
    if cell.direction != "forward":
        found.append(Program(PRODUCTS, _products, specs))
    return found


def _problem(cell: Cell) -> dict[str, Any]:
    """The arguments with which to ask `jaxkern.algorithms`."""
    problem = dict(zip(("rows", "width", "vocabulary"), cell.case.shape))
    problem |= {"dtype": cell.dtype, "weight_dtype": cell.weight_dtype}
    memory = BUDGETS[cell.direction]
    return (
        problem | {"which": "loss" if cell.direction == "forward" else "both"} | ({"memory": memory} if memory else {})
    )


def chosen_algorithm(cell: Cell) -> str | None:
    """The algorithm of a cell, on any platform."""
    return jaxkern.algorithms.choose("linear_softmax_cross_entropy", **_problem(cell))


# --- inputs --------------------------------------------------------------------------------------


class Inputs:
    """Activations and weights of one case and dtype, two of each, and labels. Logits are about normal."""

    def __init__(self, pool: _inputs.Pool, case: Case) -> None:
        rows, width, vocabulary = case.shape
        self.turns = 2
        self.h = [pool.array((rows, width), i) for i in range(self.turns)]
        weights = (pool.array((width, vocabulary), i) for i in range(self.turns))
        dtype = case.weight_dtype or pool.dtype
        self.weights = [(w * jnp.asarray(width**-0.5, w.dtype)).astype(dtype) for w in weights]
        self.labels = jax.random.randint(jax.random.key(5), (rows,), 0, vocabulary, jnp.int32)
        jax.block_until_ready((self.h, self.weights, self.labels))

    def feed(self, specs: list[jax.ShapeDtypeStruct]) -> Callable[[int], tuple[Any, ...]]:
        del specs
        return lambda i: (self.h[i % self.turns], self.weights[i % self.turns], self.labels)


def candidates(cell: Cell, compiled: list[Program], inputs: Inputs) -> list[_timing.Candidate]:
    """What to time for a cell, the copy aside."""
    return _cell.candidates(compiled, inputs, keep=1)


# --- checks --------------------------------------------------------------------------------------


def examine(cell: Cell, compiled: list[Program], inputs: Inputs, times: dict[str, float]) -> list[dict[str, Any]]:
    """Memory beside the results: the budget, which by default is known to the plan alone."""
    if cell.case.cpu:
        return []  # where XLA's own loss takes a second copy of a chunk
    plan = importlib.import_module("jaxkern._ops.linear_cross_entropy.plan")
    return _goals.memory(compiled, plan.budget(plan.Problem(**_problem(cell))))


def checks(clock: Any) -> list[dict[str, Any]]:
    """The root mean square errors of loss and gradients against float64 do not exceed the errors with whole logits."""
    from jaxkern._core import compat

    rows, width, vocabulary = (4096, 512, 16384) if jax.default_backend() == "gpu" else (256, 64, 1024)
    keys = jax.random.split(jax.random.key(0), 3)
    h = jax.random.normal(keys[0], (rows, width), jnp.bfloat16)
    weight = (jax.random.normal(keys[1], (width, vocabulary)) * width**-0.5).astype(jnp.bfloat16)
    labels = jax.random.randint(keys[2], (rows,), 0, vocabulary, jnp.int32)
    leaves = lambda f: jax.tree.leaves(jax.jit(jax.value_and_grad(f, (0, 1)))(h, weight, labels))
    with compat.enable_x64():
        exact = [a.astype(jnp.float64) for a in _exactly(h, weight, labels)]

    def errors(found: list[jax.Array]) -> list[float]:
        with compat.enable_x64():
            pairs = zip(found, exact, strict=True)
            return [float(jnp.sqrt(jnp.mean((a.astype(jnp.float64) - b) ** 2) / jnp.mean(b**2))) for a, b in pairs]

    logits = 2 * rows * vocabulary
    budgets = {"whole": None, "rows": 6 * width * vocabulary + logits // 4, "vocabulary": logits // 3}
    plain, found = errors(leaves(_plain)), []
    for algorithm, memory in budgets.items():

        def mean(h: jax.Array, w: jax.Array, y: jax.Array, a: str = algorithm, m: int | None = memory) -> jax.Array:
            with jaxkern.algorithms.force(linear_softmax_cross_entropy=a):
                return jaxkern.linear_softmax_cross_entropy(h, w, y, memory=m)

        ours = errors(leaves(mean))
        # The loss is one number, whose error is a matter of luck below an epsilon of float32.
        met = all(a <= 1.02 * b + (1e-6 if k == 0 else 0) for k, (a, b) in enumerate(zip(ours, plain)))
        text = ", ".join(f"{a:.3g} ({b:.3g})" for a, b in zip(ours, plain))
        found.append(
            {
                "check": f"errors of loss and gradients of '{algorithm}', and in brackets of all logits at once: {text}",
                "met": met and all(map(math.isfinite, ours)),
                "handlers": [],
                "moves": [],
                "ours": ours,
                "plain": plain,
                "kernels": {},
            }
        )
    return found


def _exactly(h: jax.Array, weight: jax.Array, labels: jax.Array) -> list[jax.Array]:
    """Loss and gradients in float64."""

    def mean(h: jax.Array, weight: jax.Array) -> jax.Array:
        logits = jnp.dot(h, weight, precision="highest")
        of_label = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
        return (jax.nn.logsumexp(logits, -1) - of_label).mean()

    wide = (h.astype(jnp.float64), weight.astype(jnp.float64))
    return jax.tree.leaves(jax.jit(jax.value_and_grad(mean, (0, 1)))(*wide))
