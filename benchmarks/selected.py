"""Programs that select, sort, count and search, which do not name jaxkern: plain, and under `jaxkern.accelerate`.

    python -m benchmarks selected [--ops program,top_k] [--cases REGEX]

    program       steps of decoders and routers, medians, histograms, ranks
    top_k, sort, argsort, pairs, part, bincount, searchsorted
                  single operations around the thresholds of the gate (jaxkern/_accelerate/selection_gate.py); `forced` is the
                  time if they are taken whatever the gate says

A `part` is a sort whose elements are used in part.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxkern
from benchmarks import _cell, _goals, _inputs, _timing
from benchmarks._program import Program

OPERATION = "selected"
OPS = ("program", "top_k", "sort", "argsort", "pairs", "part", "bincount", "searchsorted")
DIRECTIONS = ("forward",)
TAKEN = ("top_k", "sort", "searchsorted", "bincount")
KEEPS = 0.98  # of plain's speed, at least


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of arrays of these shapes, of integers from 0 to `below` if that is not 0."""

    group: str
    name: str
    function: Callable[..., Any]
    shape: tuple[int, ...]
    more: tuple[tuple[int, ...], ...] = ()
    dtype: str = "float32"
    below: int = 0
    cpu: bool = False

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.shape, *self.more)

    @property
    def size(self) -> int:
        return sum(map(math.prod, self.shapes))

    @property
    def width(self) -> int:
        return self.shape[-1]

    @property
    def specs(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(s, jnp.int32 if self.below else jnp.dtype(self.dtype)) for s in self.shapes]


# ---- programs


def _key() -> jax.Array:
    return jax.random.key(0)


def _top_k_then_p(x: jax.Array) -> jax.Array:
    """Temperature, top-k by a threshold, top-p by a sort of the vocabulary, and a draw."""
    x = x / 0.8
    x = jnp.where(x < lax.top_k(x, 50)[0][..., -1:], -jnp.inf, x)
    descending = jnp.sort(x)[..., ::-1]
    below = jnp.cumsum(jax.nn.softmax(descending), -1) < 0.9
    cut = jnp.take_along_axis(descending, below.sum(-1, keepdims=True), -1)
    return jax.random.categorical(_key(), jnp.where(x < cut, -jnp.inf, x))


def _top_p_of_k(x: jax.Array) -> jax.Array:
    """The same among the k largest alone."""
    values, classes = lax.top_k(x / 0.8, 50)
    mass = jax.nn.softmax(values)
    values = jnp.where(jnp.cumsum(mass, -1) - mass < 0.9, values, -jnp.inf)
    return jnp.take_along_axis(classes, jax.random.categorical(_key(), values)[:, None], -1)[:, 0]


def _threshold(x: jax.Array) -> jax.Array:
    return jax.random.categorical(_key(), jnp.where(x < jnp.sort(x)[:, -50, None], -jnp.inf, x))


def _router(x: jax.Array, capacity: int = 1280) -> Any:
    """Weights, experts, and positions of tokens in the buffers of their experts, by one-hot rows and a cumulative sum."""
    weights, experts = lax.top_k(jax.nn.softmax(x), 2)
    chosen = jax.nn.one_hot(experts.reshape(-1), x.shape[-1], dtype=jnp.int32)
    position = jnp.cumsum(chosen, 0) * chosen
    return weights / weights.sum(-1, keepdims=True), experts, jnp.where(position <= capacity, position, 0).sum(-1) - 1


def _sorted_router(x: jax.Array) -> Any:
    """Weights, tokens in the order of their experts, and sizes of groups."""
    weights, experts = lax.top_k(jax.nn.softmax(x), 2)
    order = jnp.argsort(experts.reshape(-1))
    return weights, order // 2, jnp.bincount(experts.reshape(-1), length=x.shape[-1])


def _programs(small: bool) -> list[Case]:
    of = lambda name, f, *shapes: Case("program", name, f, shapes[0], shapes[1:], cpu=small)
    vocabulary, tokens, many = (512, 256, 1 << 12) if small else (128256, 32768, 1 << 22)
    return [
        of("sampling, top-k and top-p", _top_k_then_p, (128, vocabulary)),
        of("sampling, top-p of the largest", _top_p_of_k, (128, vocabulary)),
        of("sampling, a threshold by sort", _threshold, (128, vocabulary)),
        of("router, positions by cumsum", _router, (tokens, 64)),
        of("router, tokens sorted", _sorted_router, (tokens, 64)),
        of("median of short rows", lambda x: jnp.median(x, -1), (tokens, 512)),
        of(
            "percentile of long rows",
            lambda x: jnp.percentile(x, 99, axis=-1),
            (tokens // 8, 16384 if not small else 512),
        ),
        of("histogram", lambda x: jnp.histogram(x, 256, range=(-3, 3))[0], (many,)),
        of("beams", lambda x: lax.top_k(x.reshape(8, -1), 10), (32, vocabulary)),
        of("neighbours", lambda x, y: lax.approx_max_k(x @ y.T, 16), (1024, 64), (vocabulary // 8, 64)),
        of("ranks", lambda x: jnp.argsort(jnp.argsort(x)), (1024, 1024 if not small else 64)),
    ]


# ---- single operations


def _rows(
    op: str, f: Callable[..., Any], rows: int, columns: int, dtype: str = "float32", arrays: int = 1, below: int = 0
) -> Case:
    name = f"{rows}x{columns}" + (" int32" if below else "")
    return Case(op, name, f, (rows, columns), ((rows, columns),) * (arrays - 1), dtype, below)


def _top_k(rows: int, columns: int, k: int, dtype: str = "float32") -> Case:
    return Case("top_k", f"{rows}x{columns} {k}", functools.partial(lax.top_k, k=k), (rows, columns), dtype=dtype)


def _part(rows: int, columns: int, k: int) -> Case:
    return Case("part", f"{rows}x{columns} {k}", lambda x: jnp.sort(x)[:, -k:], (rows, columns))


def _count(elements: int, bins: int) -> Case:
    return Case("bincount", f"{elements} {bins}", lambda x: jnp.bincount(x, length=bins), (elements,), below=bins)


def _search(queries: int, size: int, method: str) -> Case:
    search = lambda x, a: jnp.searchsorted(a, x, method=method)
    return Case("searchsorted", f"{queries} in {size} {method}", search, (queries,), ((size,),))


_PAIRS = lambda x, y: lax.sort([x, y], num_keys=1)
# On both sides of each threshold of the gate.
CASES = [
    *_programs(small=False),
    *(_top_k(r, c, k) for r, c, k in ((1, 16384, 8), (128, 1024, 8), (128, 1024, 128), (1024, 64, 8), (262144, 16, 4))),
    *(_top_k(r, c, k) for r, c, k in ((4096, 256, 64), (4096, 1024, 512), (64, 8192, 1024), (64, 4096, 2048))),
    *(_top_k(r, c, k) for r, c, k in ((128, 128, 32), (1024, 64, 32), (8, 256, 100), (8, 1024, 200))),
    *(
        _top_k(r, c, k, "bfloat16")
        for r, c, k in (
            (128, 1024, 8),
            (1024, 1024, 32),
            (64, 32000, 50),
            (4096, 1024, 256),
            (1024, 64, 32),
            (8, 4096, 300),
        )
    ),
    *(
        _rows("sort", jnp.sort, r, c)
        for r, c in ((1024, 64), (1024, 256), (8, 1024), (64, 4096), (64, 16384), (1, 1 << 20))
    ),
    *(_rows("sort", jnp.sort, r, c, "bfloat16") for r, c in ((1, 4096), (1024, 1024))),
    _rows("sort", jnp.sort, 1, 1 << 20, below=1 << 30),
    *(_rows("argsort", jnp.argsort, r, c) for r, c in ((128, 1024), (1, 1 << 20))),
    _rows("argsort", jnp.argsort, 64, 16384, below=1 << 30),
    _rows("pairs", _PAIRS, 1024, 1024, arrays=2),
    *(_part(r, c, k) for r, c, k in ((64, 256, 1), (128, 1024, 8), (1024, 512, 32), (4096, 2048, 128))),
    *(_count(n, bins) for n, bins in ((1 << 12, 64), (1 << 14, 64), (1 << 16, 1024), (1 << 20, 1 << 16))),
    *(_search(n, size, "scan") for n, size in ((32, 256), (1 << 14, 1 << 16))),
    _search(1 << 14, 1 << 16, "scan_unrolled"),
    _search(1024, 256, "compare_all"),
]
CPU_CASES = _programs(small=True)
DTYPES = {"gpu": ("float32", "bfloat16"), "cpu": ("float32",)}
QUICK = {c.name for c in CPU_CASES[:4]}


@dataclasses.dataclass(frozen=True)
class Cell(_cell.Cell):
    """One row of the table."""

    case: Case

    @property
    def bytes(self) -> int:
        """What must be read and written once."""
        specs = [*self.case.specs, *jax.tree.leaves(jax.eval_shape(self.case.function, *self.case.specs))]
        return sum(s.size * s.dtype.itemsize for s in specs)

    def goals(self) -> list[dict[str, Any]]:
        return [] if self.case.cpu else [{"goal": "peers", "against": ["xla"], "required": KEEPS}]


def cells(case: Case, dtype: str, ops: tuple[str, ...]) -> list[Cell]:
    return [Cell(case, dtype, case.group)] if case.group in ops and case.dtype == dtype else []


@dataclasses.dataclass
class Accelerated(Program):
    """A program that is compiled under `accelerate`; force: everything that kernels can run is taken."""

    force: bool = False

    def compile(self) -> None:
        with jaxkern.accelerate(only=TAKEN if self.force else None, force=self.force):
            super().compile()


def programs(cell: Cell, algorithms: bool) -> list[Program]:
    """The function under `accelerate`, forced, and as XLA runs it."""
    f, specs = cell.case.function, cell.case.specs
    forced = [] if cell.op == "program" else [Accelerated("forced", f, specs, force=True)]
    return [Accelerated(_goals.OURS, f, specs), *forced, Program("xla", f, specs)]


def chosen_algorithm(cell: Cell) -> None:
    return None


class Inputs:
    """Random arrays of a case, enough of them to go round cold; of searches the second one ascends."""

    def __init__(self, pool: _inputs.Pool, case: Case) -> None:
        rng, turns = np.random.default_rng(0), min(16, _inputs.rotation(4 * case.size))
        self.sets = []
        for k in range(turns):
            if case.below:
                arrays = [jnp.asarray(rng.integers(0, case.below, s), jnp.int32) for s in case.shapes]
            else:
                arrays = [pool.array(s, k + turns * n) for n, s in enumerate(case.shapes)]
            if case.group == "searchsorted":
                arrays[1] = jnp.sort(arrays[1])
            self.sets.append(arrays)
        jax.block_until_ready(self.sets)

    def feed(self, specs: list[jax.ShapeDtypeStruct]) -> Any:
        """A function of the number of an execution that returns its arguments."""
        return lambda i: self.sets[i % len(self.sets)]


def candidates(cell: Cell, compiled: list[Program], inputs: Inputs) -> list[_timing.Candidate]:
    """What to time for a cell, the copy aside."""
    return _cell.candidates(compiled, inputs)


def examine(cell: Cell, compiled: list[Program], inputs: Inputs, times: dict[str, float]) -> list[dict[str, Any]]:
    """Whether results are plain JAX's, to the bit."""
    *own, plain = (jax.tree.leaves(program(*inputs.feed(program.specs)(0))) for program in compiled)
    same = all(bool((a == b).all()) for found in own for a, b in zip(found, plain, strict=True))
    return [{"goal": "same", "required": 1.0, "value": float(same), "met": same}]


def checks(clock: Any) -> list[dict[str, Any]]:
    return []
