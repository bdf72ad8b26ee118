"""softmax and log-softmax, forward and backward, against XLA, PyTorch and a copy.

The sweep over widths comes from OneFlow's softmax article (49152 rows), continued to 262144 columns. Other
cases are few long rows, axes other than the last, and a mask that broadcasts over attention heads.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import _cell, _goals, _inputs, _timing, _torch
from benchmarks._program import Program

OPERATION = "softmax"
OPS = ("softmax", "log_softmax")
DIRECTIONS = ("forward", "backward")
ALGORITHMS = ("lanes", "warp", "block", "cluster", "streaming", "split", "strided")

LARGE = 100e6  # bytes per call, from which bandwidth alone decides
NEAR_COPY, NEAR_COPY_UNALIGNED = 0.97, 0.93
VECTOR = 16  # bytes: rows of whole vectors owe the higher ratio


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape to measure. `group` decides which goals it has."""

    group: str
    shape: tuple[int, ...]
    axis: int = -1
    mask: tuple[int, ...] | None = None
    cpu: bool = False

    @property
    def name(self) -> str:
        text = "x".join(map(str, self.shape))
        if self.axis != -1:
            text += f" axis {self.axis}"
        return text + (" where" if self.mask else "")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        return self.shape[self.axis]


SWEEP = [(49152, w) for w in (32, 64, 100, 128, 256, 512, 1000, 1024, 2048, 4096, 5000, 8192)] + [
    (24576, 16384),
    (12288, 32768),
    (8011, 50257),
    (6144, 65536),
    (4096, 128256),
    (3072, 131072),
    (1536, 262144),
]
DTYPES = {"gpu": ("float16", "bfloat16", "float32"), "cpu": ("float32",)}
CASES = (
    [Case("sweep", s) for s in SWEEP]
    + [Case("odd", (49152, 4097))]
    + [Case("few rows", s) for s in ((1, 1 << 20), (16, 131072), (64, 131072), (8, 50257))]
    + [Case("axis", (20, 400, 6000), a) for a in (0, 1, 2)]
    + [Case("axis", (64, 1024, 1024), 1)]
    + [Case("where", (32, 16, 512, 512), mask=(32, 1, 512, 512))]
)
CPU_CASES = [Case("cpu", s, cpu=True) for s in ((4096, 1024), (512, 32768), (65536, 64))]
QUICK = {"49152x128", "49152x1024", "49152x4096", "12288x32768", "3072x131072", "64x131072", "64x1024x1024 axis 1"}


@dataclasses.dataclass(frozen=True)
class Cell(_cell.Cell):
    """One row of the table."""

    case: Case

    @property
    def mask_bytes(self) -> int:
        return math.prod(self.case.mask) if self.case.mask else 0

    @property
    def bytes(self) -> int:
        """What a call must move: two tensors forward, three backward, and the mask."""
        tensors = 2 if self.direction == "forward" else 3
        return tensors * self.case.size * jnp.dtype(self.dtype).itemsize + self.mask_bytes

    def goals(self) -> list[dict[str, Any]]:
        itemsize = jnp.dtype(self.dtype).itemsize
        peers, copy = {"goal": "peers"}, lambda ratio: {"goal": "copy", "required": ratio}
        group, forward = self.case.group, self.direction == "forward"
        if group == "cpu":
            return [peers | {"against": ["xla"]}]
        if group == "where":
            return [peers, copy(0.95)]
        if group == "axis":
            return [peers, copy(0.90)]
        if group in ("sweep", "odd"):
            goals = [peers]
            if self.bytes >= LARGE:
                whole_vectors = self.case.width * itemsize % VECTOR == 0
                goals.append(copy(NEAR_COPY if whole_vectors or not forward else NEAR_COPY_UNALIGNED))
            found = _goals.published("softmax", self.direction, itemsize, self.case.width) if forward else {}
            if found:
                best = max(found, key=found.__getitem__)
                goals.append({"goal": "published", "peer": best, "required": found[best] * (1 - _goals.NOISE)})
            return goals
        return [peers]


# --- what runs -----------------------------------------------------------------------------------


def _definitions() -> Any:
    """The module of the definitions, where the package is installed."""
    try:
        return importlib.import_module("jaxkern._definitions.softmax")
    except ImportError:
        return None


def _reference(op: str, axis: int) -> Callable[..., jax.Array]:
    function = getattr(jax.nn, op)
    return lambda x, mask=None: function(x, axis=axis, where=mask)


def programs(cell: Cell, algorithms: bool) -> list[Program]:
    """This library's and XLA's programs of a cell."""
    case = cell.case
    x = jax.ShapeDtypeStruct(case.shape, cell.dtype)
    mask = [jax.ShapeDtypeStruct(case.mask, jnp.bool_)] if case.mask else []
    found = []
    if case.cpu and cell.direction == "backward":
        ours = _ours(dataclasses.replace(cell, direction="forward"), "auto")
        both = ((_goals.OURS, ours), ("xla", _reference(cell.op, case.axis)))
        return [Program(name, result_and_gradient(f), [x, x, *mask]) for name, f in both]
    if _definitions() is not None:
        specs = [*([x] if cell.direction == "forward" else [x, x]), *mask]
        found.append(Program(_goals.OURS, _ours(cell, "auto"), specs))
        if algorithms and jax.default_backend() == "gpu":
            found += [Program(f"{_goals.OURS}:{t}", _ours(cell, t), specs) for t in ALGORITHMS if _fits(cell, t)]
    reference = _reference(cell.op, case.axis)
    if cell.direction == "forward":
        found.append(Program("xla", reference, [x, *mask]))
    elif mask:
        found.append(_xla_masked_backward(cell, x, mask[0]))
    else:
        found.append(_xla_backward(reference, x))
    return found


def result_and_gradient(f: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The result and the gradient in one program, for the CPU: apart from the forward pass, XLA's gradient would be given
    exponentials for which the whole of a step pays."""

    def both(x: jax.Array, g: jax.Array, *rest: jax.Array) -> Any:
        y, pull = jax.vjp(lambda x: f(x, *rest), x)
        return y, pull(g)[0]

    return both


def _ours(cell: Cell, algorithm: str) -> Callable[..., jax.Array]:
    """The public function; for the gradient, which has no public function, what its derivative calls."""
    import jaxkern

    axis = cell.case.axis % len(cell.case.shape)
    if cell.direction == "backward":
        of = functools.partial(_definitions().gradient, cell.op, axis=axis, algorithm=algorithm)
        return lambda y, g, *mask: of(y, g, dict(zip(("mask",), mask)))

    def forward(x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        with jaxkern.algorithms.force(**{cell.op: algorithm}):
            return getattr(jaxkern, cell.op)(x, axis, mask)

    return forward


def _problem(cell: Cell) -> dict[str, Any]:
    """The arguments with which to ask `jaxkern.algorithms`."""
    shape, axis = cell.case.shape, cell.case.axis % len(cell.case.shape)
    return {
        "rows": math.prod(shape[:axis]),
        "width": shape[axis],
        "inner": math.prod(shape[axis + 1 :]),
        "dtype": cell.dtype,
        "backward": cell.direction == "backward",
    }


def _fits(cell: Cell, algorithm: str) -> bool:
    from jaxkern import algorithms

    try:
        return algorithms.fits(cell.op, algorithm, **_problem(cell))
    except RuntimeError:
        return True  # nobody to ask: an algorithm that does not fit says so when it runs


def chosen_algorithm(cell: Cell) -> str | None:
    """The algorithm that runs a cell by default on this GPU."""
    if _definitions() is None or jax.default_backend() != "gpu":
        return None
    from jaxkern import algorithms

    try:
        return algorithms.choose(cell.op, **_problem(cell))
    except RuntimeError:
        return None


def _xla_backward(reference: Callable[..., Any], x: jax.ShapeDtypeStruct) -> Program:
    """The pullback that `jax.vjp` of the `jax.nn` function leaves, its residuals as arguments.

    Only the shapes of the residuals are needed, so the forward pass is never run.
    """
    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda x: jax.vjp(reference, x)[1], x))

    def backward(*operands: jax.Array) -> jax.Array:
        *residuals, g = operands
        return jax.tree.unflatten(tree, residuals)(g)[0]

    return Program("xla", backward, [*(jax.ShapeDtypeStruct(s.shape, s.dtype) for s in leaves), x])


def _xla_masked_backward(cell: Cell, x: jax.ShapeDtypeStruct, mask: jax.ShapeDtypeStruct) -> Program:
    """The formula from the output: taken apart from its forward pass, `jax.nn`'s masked pullback keeps
    nine residuals that the whole of a step would share, which would flatter us."""
    axis = cell.case.axis

    def backward(y: jax.Array, g: jax.Array, mask: jax.Array) -> jax.Array:
        if cell.op == "softmax":
            return y * (g - jnp.sum(y * g, axis, keepdims=True))
        g = jnp.where(mask, g, 0)
        return jnp.where(mask, g - jnp.exp(y) * jnp.sum(g, axis, keepdims=True), 0)

    return Program("xla", backward, [x, x, mask])


# --- inputs --------------------------------------------------------------------------------------


class Inputs:
    """The arrays of one case and dtype, enough of them to go round cold."""

    def __init__(self, pool: _inputs.Pool, case: Case) -> None:
        self.case = case
        self.turns = _inputs.rotation(case.size * pool.dtype.itemsize)
        count = 2 * ((self.turns + 1) // 2) if self.turns > 2 else 4
        self.arrays = [pool.array(case.shape, i) for i in range(count)]
        self.mask = None
        if case.mask:
            self.mask = jax.random.uniform(jax.random.key(7), case.mask) < 0.8
        jax.block_until_ready((self.arrays, self.mask))

    def feed(self, specs: list[jax.ShapeDtypeStruct]) -> Callable[[int], tuple[Any, ...]]:
        """The arguments of execution i: full-sized ones rotate, the rest stay.

        Values do not matter to the time, so any random tensor serves as an output or a cotangent.
        """
        full = [s.shape == self.case.shape and s.dtype == self.arrays[0].dtype for s in specs]
        fixed = [None if f else self._fixed(s) for f, s in zip(full, specs)]
        a_call = max(1, sum(full))

        def arguments(i: int) -> tuple[Any, ...]:
            nth = iter(range(i * a_call, (i + 1) * a_call))
            return tuple(self.arrays[next(nth) % len(self.arrays)] if f else v for f, v in zip(full, fixed))

        return arguments

    def _fixed(self, spec: jax.ShapeDtypeStruct) -> jax.Array:
        if spec.dtype == jnp.bool_ and self.mask is not None:
            return jnp.broadcast_to(self.mask, spec.shape)
        return jax.random.uniform(jax.random.key(3), spec.shape, jnp.float32, 1, 2).astype(spec.dtype)


def candidates(cell: Cell, compiled: list[Program], inputs: Inputs) -> list[_timing.Candidate]:
    """What to time for a cell, the copy aside."""
    found = _cell.candidates(compiled, inputs, keep=inputs.turns)
    if _torch.available():
        found.append(_torch_candidate(cell, inputs))
    return found


def _torch_candidate(cell: Cell, inputs: Inputs) -> _timing.Candidate:
    torch = _torch.torch()
    axis = cell.case.axis
    tensors: list[Any] = []
    hidden: list[Any] = []

    def prepare() -> None:
        if not tensors:
            tensors.extend(_torch.share(a) for a in inputs.arrays)
            if inputs.mask is not None:
                hidden.append(_torch.share((~inputs.mask).astype(jnp.uint8)).to(torch.bool))
                _torch.sync()

    def forward(i: int) -> Any:
        prepare()
        x = tensors[i % len(tensors)]
        if hidden:
            x = x.masked_fill(hidden[0], -math.inf)
        return getattr(torch, cell.op)(x, axis)

    def backward(i: int) -> Any:
        prepare()
        y, g = tensors[2 * i % len(tensors)], tensors[(2 * i + 1) % len(tensors)]
        return getattr(torch, f"_{cell.op}_backward_data")(g, y, axis, y.dtype)

    call = forward if cell.direction == "forward" else backward
    return _timing.Candidate("torch", call, _torch.sync, keep=inputs.turns, torch=True)


# --- checks --------------------------------------------------------------------------------------


def checks(clock: Any) -> list[dict[str, Any]]:
    """Properties of compiled programs: a training step is one forward and one backward kernel."""
    if _definitions() is None:
        return []
    import jaxkern

    found = []
    shape, dtype = ((8192, 4096), "bfloat16") if jax.default_backend() == "gpu" else ((256, 512), "float32")
    x, w = (jax.random.normal(jax.random.key(i), shape, dtype) for i in range(2))
    for op in OPS:
        function = getattr(jaxkern, op)
        step = jax.value_and_grad(lambda x, w: jnp.sum((function(x) * w).astype(jnp.float32)))
        compiled = jax.jit(step).lower(x, w).compile()
        text = compiled.as_text()
        targets = sorted(re.findall(r'custom_call_target="(jaxkern\w*)"', text))
        moves = re.findall(r"= \S+ ((?:copy|transpose)(?:-start)?)\(", text)
        timing = clock.measure(
            [_timing.Candidate("step", lambda i: compiled(x, w), lambda out: jax.block_until_ready(out))], 4
        )["step"]
        found.append(
            {
                "check": f"value_and_grad of {op} is one forward and one backward kernel, no copy, no transpose",
                "met": targets == [f"jaxkern_{op}"] * 2 and not moves,
                "handlers": targets,
                "moves": moves,
                "kernels": getattr(timing, "kernels", {}),
            }
        )
    return found
