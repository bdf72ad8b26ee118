"""The elementwise operations, forward and backward, against XLA, PyTorch and a copy.

Every operation of the table at 2^28 elements; a few of them from 2^16 elements on, and with a bias or a scale per row
that are read in place.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks import _cell, _goals, _inputs, _timing, _torch
from benchmarks._program import Program
from jaxkern._ops.elementwise import primitive, reference

OPERATION = "elementwise"
ROWS = primitive.ROWS
OPS = (*ROWS, "cast_f32", "cast_f16")  # the casts: from the dtype to float32, or from float32 to it
SOME = ("relu", "gelu_erf", "silu", "add", "swiglu")
LARGE = 100e6  # bytes per call, from which bandwidth alone decides
NEAR_COPY, NEAR_COPY_BROADCAST = 0.97, 0.95


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape to measure; in the group "bias" and "scale" the last operand has one dimension of size 1."""

    group: str
    shape: tuple[int, ...]
    cpu: bool = False

    @property
    def name(self) -> str:
        shape = f"2^{self.size.bit_length() - 1}" if len(self.shape) == 1 else "x".join(map(str, self.shape))
        return shape if self.group in ("all", "sizes", "cpu") else f"{shape} {self.group}"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        return self.size

    def operand(self, last: bool) -> tuple[int, ...]:
        if not last or self.group not in ("bias", "scale"):
            return self.shape
        return (1, self.shape[1]) if self.group == "bias" else (self.shape[0], 1)


DTYPES = {"gpu": ("float16", "bfloat16", "float32"), "cpu": ("float32",)}
CASES = (
    [Case("all", (1 << 28,))]
    + [Case("sizes", (1 << n,)) for n in (16, 18, 20, 22, 24, 26)]
    + [Case("bias", (65536, 4096)), Case("scale", (65536, 4096))]
)
CPU_CASES = [Case("cpu", (1 << 22,), cpu=True)]
QUICK = {"2^16", "2^20", "2^24", "2^26", "65536x4096 bias"}


@dataclasses.dataclass(frozen=True)
class Cell(_cell.Cell):
    """One row of the table."""

    case: Case

    @property
    def row(self) -> Any:
        return ROWS.get(self.op)

    def operands(self) -> list[jax.ShapeDtypeStruct]:
        """Arrays, then the cotangent of a backward pass, then parameters."""
        if self.row is None:
            return [jax.ShapeDtypeStruct(self.case.shape, self.dtype if self.op == "cast_f32" else "float32")]
        row, count = self.row, len(self.row.arrays)
        types = [
            "bool" if row.types == "logical" or (row.types == "select" and k == 0) else self.dtype for k in range(count)
        ]
        arrays = [jax.ShapeDtypeStruct(self.case.operand(k == count - 1 and count > 1), t) for k, t in enumerate(types)]
        if self.direction == "backward":
            used = range(count) if row.uses is None else row.uses
            arrays = [arrays[k] for k in used] + [jax.ShapeDtypeStruct(self.case.shape, self.dtype)]
        return arrays + [jax.ShapeDtypeStruct((), reference.computing(jnp.dtype(self.dtype))) for _ in row.parameters]

    def results(self) -> int:
        return len(self.row.gradient) if self.direction == "backward" else 1

    @property
    def bytes(self) -> int:
        read = sum(s.size * s.dtype.itemsize for s in self.operands())
        if self.row is None:
            return read + self.case.size * jnp.dtype("float32" if self.op == "cast_f32" else self.dtype).itemsize
        predicate = self.row.types in ("test", "compare", "logical")
        return read + self.results() * self.case.size * (1 if predicate else jnp.dtype(self.dtype).itemsize)

    def goals(self) -> list[dict[str, Any]]:
        peers = {"goal": "peers"}
        if self.case.group == "cpu":
            return [peers | {"against": ["xla"]}]
        if self.case.group == "sizes":
            return [peers]
        wanted = {"bias": NEAR_COPY_BROADCAST, "scale": NEAR_COPY_BROADCAST}
        return [{"goal": "copy", "required": wanted.get(self.case.group, NEAR_COPY)}]


def cells(case: Case, dtype: str, ops: tuple[str, ...]) -> Iterator[Cell]:
    for op in ops:
        row = ROWS.get(op)
        if case.group != "all" and ops == OPS and op not in SOME:
            continue
        if row is None:
            if case.group == "all" and dtype not in ("float32", "float64"):
                yield Cell(case, dtype, op, "forward")
            continue
        if case.group in ("bias", "scale") and not (len(row.arrays) > 1):
            continue
        if row.types == "logical" and case.group != "all":
            continue
        yield Cell(case, dtype, op, "forward")
        if row.gradient and case.group not in ("bias", "scale"):
            yield Cell(case, dtype, op, "backward")


# --- what runs -----------------------------------------------------------------------------------


def programs(cell: Cell, algorithms: bool) -> list[Program]:
    """This library's and XLA's programs of a cell."""
    specs = cell.operands()
    if cell.row is None:
        to = jnp.dtype("float32" if cell.op == "cast_f32" else cell.dtype)
        return [
            Program(_goals.OURS, lambda x: jaxkern.cast(x, to), specs),
            Program("xla", lambda x: x.astype(to), specs),
        ]
    forward_p, backward_p = primitive.PRIMITIVES[cell.op]
    rank = len(cell.case.shape)
    count = len(specs) - len(cell.row.parameters)

    def ours(*operands: jax.Array) -> Any:
        prim = forward_p if cell.direction == "forward" else backward_p
        parameters = [p.reshape((1,) * rank) for p in operands[count:]]
        return prim.bind(*operands[:count], *parameters, split=-1)

    return [Program(_goals.OURS, ours, specs), Program("xla", _xla(cell), specs)]


def _xla(cell: Cell) -> Callable[..., Any]:
    """The row's expression in the arrays' own type, as a user of JAX would write it, and its derivative."""
    row, meaning = cell.row, reference.meaning(cell.row)
    if cell.op == "gelu_erf":
        meaning = functools.partial(jax.nn.gelu, approximate=False)
    if cell.op == "gelu_tanh":
        meaning = jax.nn.gelu

    def typed(operands: tuple[jax.Array, ...], parameters: tuple[jax.Array, ...]) -> Any:
        return meaning(*operands, *(p.astype(cell.dtype) for p in parameters))

    def forward(*operands: jax.Array) -> Any:
        count = len(row.arrays)
        return typed(operands[:count], operands[count:])

    def backward(*operands: jax.Array) -> Any:
        used = range(len(row.arrays)) if row.uses is None else row.uses
        *arrays, g = operands[: len(used) + 1]
        parameters = operands[len(used) + 1 :]
        full = [jnp.zeros(cell.case.shape, cell.dtype)] * len(row.arrays)
        for k, x in zip(used, arrays):
            full[k] = x

        def f(*xs: jax.Array) -> Any:
            whole = list(full)
            for k, x in zip(row.gradient, xs):
                whole[k] = x
            return typed(tuple(whole), parameters)

        return jax.vjp(f, *(full[k] for k in row.gradient))[1](g)

    return forward if cell.direction == "forward" else backward


def chosen_algorithm(cell: Cell) -> None:
    return None


# --- inputs --------------------------------------------------------------------------------------


class Inputs:
    """The arrays of one case and dtype, enough of them to go round cold."""

    def __init__(self, pool: _inputs.Pool, case: Case) -> None:
        self.case = case
        self.turns = _inputs.rotation(case.size * pool.dtype.itemsize)
        count = 4 if self.turns <= 2 else 2 * ((self.turns + 1) // 2)
        self.arrays = [pool.array(case.shape, i) for i in range(count)]
        self.others: dict[Any, list[jax.Array]] = {}
        jax.block_until_ready(self.arrays)

    def of(self, spec: jax.ShapeDtypeStruct) -> list[jax.Array]:
        if spec.shape == self.case.shape and spec.dtype == self.arrays[0].dtype:
            return self.arrays
        key = (spec.shape, spec.dtype)
        if key not in self.others:
            if spec.shape == ():
                made = [jnp.asarray(0.5, spec.dtype)]
            elif spec.shape != self.case.shape:
                made = [jnp.linspace(-1, 1, math.prod(spec.shape)).reshape(spec.shape).astype(spec.dtype)]
            else:
                made = [(x > 0) if spec.dtype == bool else x.astype(spec.dtype) for x in self.arrays]
            self.others[key] = jax.block_until_ready(made)
        return self.others[key]

    def feed(self, specs: list[jax.ShapeDtypeStruct]) -> Callable[[int], tuple[Any, ...]]:
        """The arguments of execution i, another one for each operand."""
        lists = [self.of(s) for s in specs]
        return lambda i: tuple(arrays[(i * len(lists) + k) % len(arrays)] for k, arrays in enumerate(lists))


def candidates(cell: Cell, compiled: list[Program], inputs: Inputs) -> list[_timing.Candidate]:
    """What to time for a cell, the copy aside."""
    found = []
    arguments = inputs.feed(compiled[0].specs)
    for program in compiled:

        def call(i: int, program: Program = program) -> Any:
            return program(*arguments(i))

        found.append(
            _timing.Candidate(program.name, call, lambda out: jax.block_until_ready(out), keep=min(inputs.turns, 8))
        )
    if _torch.available() and cell.direction == "forward" and (function := _torch_function(cell)):
        tensors: dict[int, Any] = {}

        def tensor(x: jax.Array) -> Any:
            if id(x) not in tensors:
                tensors[id(x)] = _torch.share(x)
            return tensors[id(x)]

        def torch_call(i: int) -> Any:
            return function(*(tensor(x) for x in arguments(i)))

        found.append(_timing.Candidate("torch", torch_call, _torch.sync, keep=min(inputs.turns, 8), torch=True))
    return found


def _torch_function(cell: Cell) -> Callable[..., Any] | None:
    torch = _torch.torch()
    f = torch.nn.functional
    named = {
        "gelu_erf": f.gelu,
        "gelu_tanh": lambda x: f.gelu(x, approximate="tanh"),
        "cast_f32": lambda x: x.to(torch.float32),
        "cast_f16": lambda x: x.to(getattr(torch, cell.dtype)),
    }
    names = ("relu", "silu", "mish", "softplus", "selu", "hardswish", "hardsigmoid", "softsign")
    named |= {name: getattr(f, name) for name in names}
    named |= {
        "hard_swish": f.hardswish,
        "hard_sigmoid": f.hardsigmoid,
        "log_sigmoid": f.logsigmoid,
        "soft_sign": f.softsign,
    }
    names = (
        "sigmoid tanh abs exp log sin cos erf erfc sqrt rsqrt add multiply square "
        "expm1 log1p floor reciprocal divide maximum minimum less isnan where lerp"
    ).split()
    return (named | {name: getattr(torch, name) for name in names}).get(cell.op)


# --- checks --------------------------------------------------------------------------------------


def checks(clock: Any) -> list[dict[str, Any]]:
    """A gated unit in a training step is one kernel forward and one backward."""
    x = jax.random.normal(jax.random.key(0), (512, 2048), "bfloat16")
    step = jax.value_and_grad(lambda x: jnp.sum(jaxkern.swiglu(x).astype(jnp.float32) ** 2))
    compiled = Program("step", step, [jax.ShapeDtypeStruct(x.shape, x.dtype)])
    compiled.compile()
    return [
        {
            "check": "value_and_grad of swiglu is one forward and one backward kernel",
            "met": compiled.targets == ["jaxkern_swiglu", "jaxkern_swiglu_grad"],
            "handlers": compiled.targets,
        }
    ]
