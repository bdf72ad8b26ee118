"""softmax with scale, mask, bias, causal limit and dropout, each alone and all together, against XLA and a copy.

The arrays are attention weights of [batch, heads, queries, keys]: the mask broadcasts over heads, the bias over the batch. A
causal call need not read elements above the diagonal, and its bytes are counted without them. A gradient without dropout
starts from the result, and needs neither the bias nor, beside another feature, the mask. The report shows the time, and the
memory that a compiled call takes beyond its operands and results.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _cell, _goals, _inputs, _timing, softmax
from benchmarks._program import Program

OPERATION = "fused_softmax"
OPS = ("scale", "mask", "bias", "causal", "dropout", "all")
DIRECTIONS = ("forward", "backward")
ALGORITHMS = ("warp", "block", "cluster", "streaming")

NEAR_COPY = 0.93
BEFORE_XLA = 1.3  # all together
ROW_BYTES = 32  # of memory beyond operands and results that a call may take, for each row
SCALE, RATE = 0.125, 0.1


@dataclasses.dataclass(frozen=True)
class Case:
    """Attention weights of a shape."""

    shape: tuple[int, ...]
    cpu: bool = False
    group: str = "fused"

    @property
    def name(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        return self.shape[-1]

    @property
    def mask(self) -> tuple[int, ...]:
        return (self.shape[0], 1, *self.shape[2:])

    @property
    def bias(self) -> tuple[int, ...]:
        return (1, *self.shape[1:])


DTYPES = {"gpu": ("bfloat16", "float16"), "cpu": ("float32",)}
CASES = [Case((32, 16, 512, 512)), Case((8, 16, 2048, 2048))]
CPU_CASES = [Case((4, 4, 512, 512), cpu=True)]
QUICK = {"32x16x512x512"}


@dataclasses.dataclass(frozen=True)
class Cell(_cell.Cell):
    """One row of the table; `op` is what is fused."""

    case: Case

    def has(self, feature: str) -> bool:
        return self.op in (feature, "all")

    @property
    def bytes(self) -> int:
        """What a call must move: the arrays that it reads, of a causal one below the diagonal, and the one that it writes."""
        queries, keys = self.case.shape[-2:]
        triangle = np.tri(queries, keys, keys - queries).mean() if self.has("causal") else 1.0
        item = jnp.dtype(self.dtype).itemsize
        read = (1 if self.direction == "forward" else 2) * self.case.size * item
        if self.direction == "forward" or self.has("dropout") or self.op == "mask":
            read += math.prod(self.case.mask) if self.has("mask") else 0
            read += math.prod(self.case.bias) * item if self.has("bias") else 0
        return int(read * triangle) + self.case.size * item

    def goals(self) -> list[dict[str, Any]]:
        against_xla = {"goal": "peers", "against": ["xla"]}
        if self.case.cpu:
            return [against_xla]
        return [
            against_xla | ({"required": BEFORE_XLA} if self.op == "all" else {}),
            {"goal": "copy", "required": NEAR_COPY},
        ]


# --- what runs -----------------------------------------------------------------------------------


def _extras(cell: Cell) -> list[jax.ShapeDtypeStruct]:
    """The mask, bias and key that a cell has."""
    found = []
    if cell.has("mask"):
        found.append(jax.ShapeDtypeStruct(cell.case.mask, jnp.bool_))
    if cell.has("bias"):
        found.append(jax.ShapeDtypeStruct(cell.case.bias, cell.dtype))
    if cell.has("dropout"):
        found.append(jax.ShapeDtypeStruct((2,), jnp.uint32))
    return found


def _named(cell: Cell, extras: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip([f for f in ("mask", "bias", "dropout") if cell.has(f)], extras))


def programs(cell: Cell, algorithms: bool) -> list[Program]:
    """This library's and XLA's programs of a cell."""
    x = jax.ShapeDtypeStruct(cell.case.shape, cell.dtype)
    forward = cell.direction == "forward"
    specs = [*([x] if forward else [x, x]), *_extras(cell)]
    plain = lambda x, *extras: _composition(cell, x, extras)
    if cell.case.cpu and not forward:
        ours = _ours(dataclasses.replace(cell, direction="forward"), "auto")
        return [Program(n, softmax.result_and_gradient(f), specs) for n, f in ((_goals.OURS, ours), ("xla", plain))]
    found = [Program(_goals.OURS, _ours(cell, "auto"), specs)]
    if algorithms and jax.default_backend() == "gpu":
        found += [Program(f"{_goals.OURS}:{t}", _ours(cell, t), specs) for t in ALGORITHMS if _fits(cell, t)]
    if forward:
        return [*found, Program("xla", plain, specs)]
    kept = [jax.ShapeDtypeStruct(cell.case.shape, jnp.bool_)] if cell.has("dropout") else []
    return [*found, Program("xla", lambda p, g, *kept: _xla_backward(cell, p, g, *kept), [x, x, *kept])]


def _ours(cell: Cell, algorithm: str) -> Callable[..., jax.Array]:
    import jaxkern

    def softmax(x: jax.Array, extras: tuple[Any, ...]) -> jax.Array:
        named = _named(cell, extras)
        dropout = {"dropout_rate": RATE, "dropout_key": named["dropout"]} if "dropout" in named else {}
        with jaxkern.algorithms.force(softmax=algorithm):
            return jaxkern.softmax(
                x,
                where=named.get("mask"),
                bias=named.get("bias"),
                scale=SCALE if cell.has("scale") else 1.0,
                causal=cell.has("causal"),
                **dropout,
            )

    if cell.direction == "forward":
        return lambda x, *extras: softmax(x, extras)
    if cell.op == "mask":  # the plain gradient, which reads the mask too
        return lambda y, g, mask: _gradient_of_masked(y, g, mask, algorithm)
    if not cell.has("dropout"):  # has a gradient that starts from the result
        return lambda y, g, *extras: _gradient_from_result(cell, y, g, algorithm)
    return lambda x, g, *extras: jax.vjp(lambda x: softmax(x, extras), x)[1](g)[0]  # the forward pass falls away


def _gradient_of_masked(y: jax.Array, g: jax.Array, mask: jax.Array, algorithm: str) -> jax.Array:
    from jaxkern._definitions.softmax import gradient

    return gradient("softmax", y, g, {"mask": mask}, axis=-1, algorithm=algorithm)


def _gradient_from_result(cell: Cell, y: jax.Array, g: jax.Array, algorithm: str) -> jax.Array:
    from jaxkern._definitions.softmax import gradient

    scale = {"scale": jnp.full((1,) * y.ndim, SCALE, jnp.float32)} if cell.has("scale") else {}
    return gradient("softmax", y, g, scale, axis=-1, algorithm=algorithm, causal=cell.has("causal"))


def _composition(cell: Cell, x: jax.Array, extras: tuple[Any, ...]) -> jax.Array:
    """The same as a user of jax.nn writes it."""
    named = _named(cell, extras)
    s = x.astype(jnp.float32)
    if cell.has("scale"):
        s = s * SCALE
    if "bias" in named:
        s = s + named["bias"].astype(jnp.float32)
    part = named.get("mask")
    if cell.has("causal"):
        below = jnp.tri(*x.shape[-2:], x.shape[-1] - x.shape[-2], dtype=bool)
        part = below if part is None else part & below
    y = jax.nn.softmax(s if part is None else jnp.where(part, s, jnp.finfo(jnp.float32).min))
    if "dropout" in named:
        kept = jax.random.bernoulli(jax.random.wrap_key_data(named["dropout"]), 1 - RATE, x.shape)
        y = jnp.where(kept, y / (1 - RATE), 0)
    return y.astype(x.dtype)


def _xla_backward(cell: Cell, p: jax.Array, g: jax.Array, kept: jax.Array | None = None) -> jax.Array:
    """From the probabilities and from what dropout kept, the least that a composition can leave for its
    gradient: with them it needs neither mask nor bias. `jax.vjp` of it leaves more."""
    h = g.astype(jnp.float32)
    if kept is not None:
        h = jnp.where(kept, h / (1 - RATE), 0)
    p32 = p.astype(jnp.float32)
    dx = p32 * (h - jnp.sum(p32 * h, -1, keepdims=True))
    return (dx * SCALE if cell.has("scale") else dx).astype(p.dtype)


def _problem(cell: Cell) -> dict[str, Any]:
    """The arguments with which to ask `jaxkern.algorithms`."""
    shape = cell.case.shape
    problem = {"rows": math.prod(shape[:-1]), "width": shape[-1], "dtype": cell.dtype}
    problem |= {"backward": cell.direction == "backward"}
    return problem


def _fits(cell: Cell, algorithm: str) -> bool:
    from jaxkern import algorithms

    return algorithms.fits("softmax", algorithm, **_problem(cell))


def chosen_algorithm(cell: Cell) -> str | None:
    """The algorithm that runs a cell by default on this GPU."""
    from jaxkern import algorithms

    try:
        return algorithms.choose("softmax", **_problem(cell)) if jax.default_backend() == "gpu" else None
    except RuntimeError:
        return None


# --- inputs --------------------------------------------------------------------------------------


class Inputs:
    """The arrays of one case and dtype, enough of them to go round cold."""

    def __init__(self, pool: _inputs.Pool, case: Case) -> None:
        self.case = case
        self.turns = _inputs.rotation(case.size * pool.dtype.itemsize)
        self.arrays = [pool.array(case.shape, i) for i in range(4)]
        self.fixed = {
            case.mask: jax.random.uniform(jax.random.key(7), case.mask) < 0.8,
            case.bias: pool.array(case.bias, 5),
            (2,): jnp.array([1, 2], jnp.uint32),
        }
        jax.block_until_ready((self.arrays, self.fixed))

    def feed(self, specs: list[jax.ShapeDtypeStruct]) -> Callable[[int], tuple[Any, ...]]:
        """The arguments of execution i: full-sized ones rotate, the rest stay."""
        full = [s.shape == self.case.shape and s.dtype != jnp.bool_ for s in specs]
        if (
            any(s.shape == self.case.shape and s.dtype == jnp.bool_ for s in specs)
            and self.case.shape not in self.fixed
        ):
            self.fixed[self.case.shape] = (
                jax.random.uniform(jax.random.key(9), self.case.shape, jnp.bfloat16) < 1 - RATE
            )
        fixed = [None if f else self.fixed[s.shape] for f, s in zip(full, specs)]
        a_call = sum(full)

        def arguments(i: int) -> tuple[Any, ...]:
            nth = iter(range(i * a_call, (i + 1) * a_call))
            return tuple(self.arrays[next(nth) % len(self.arrays)] if f else v for f, v in zip(full, fixed))

        return arguments


def candidates(cell: Cell, compiled: list[Program], inputs: Inputs) -> list[_timing.Candidate]:
    """What to time for a cell, the copy aside."""
    found = _cell.candidates(compiled, inputs)
    return found


# --- checks --------------------------------------------------------------------------------------


def examine(cell: Cell, compiled: list[Program], inputs: Inputs, times: dict[str, float]) -> list[dict[str, Any]]:
    """Memory beside the results: some bytes per row."""
    return _goals.memory(compiled, ROW_BYTES * math.prod(cell.case.shape[:-1]))


def checks(clock: Any) -> list[dict[str, Any]]:
    return []
