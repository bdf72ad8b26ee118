"""Norms with scale and bias in float32, against XLA, PyTorch and a copy.

    python -m benchmarks norm [--ops layer_norm] [--algorithms]

Backward computes the gradients of x, scale and bias from x and the cotangent; all candidates compute the statistics again. With
a residual, forward adds it and returns the sum, and backward starts from the sum and adds its cotangent. group_norm and
batch_norm have a third direction, both: the result and all gradients in one program, as in a training step. Their backward
alone is given the statistics.
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
from benchmarks import _cell, _goals, _timing, _torch, softmax
from benchmarks._program import Program
from jaxkern._core.primitive import bind
from jaxkern._definitions.traced import of_rows
from jaxkern._ops.group_norm.primitive import PRIMITIVES as GROUP_PRIMITIVES

OPERATION = "norm"
GROUP_OPS = ("group_norm", "batch_norm")
DIRECTIONS = ("forward", "backward")
ALGORITHMS = ("generated", "warp", "block", "cluster", "streaming", "one_pass", "two_pass")
EPS = 1e-6
GROUPS = 32


_mean = functools.partial(jnp.mean, axis=-1, keepdims=True)


def _rms_norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(_mean(x * x) + EPS)


def _layer_norm(x: jax.Array) -> jax.Array:
    """The layer norm as flax's layer computes it."""
    variance = _mean(x * x) - _mean(x) * _mean(x)
    return (x - _mean(x)) * jax.lax.rsqrt(jnp.maximum(variance, 0) + EPS)


def _scale_norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(_mean(x * x) * x.shape[-1])


# Without scale and bias, of rows along the last axis.
NORMALISED = {"rms_norm": _rms_norm, "layer_norm": _layer_norm, "scale_norm": _scale_norm}
ROW_OPS = tuple(NORMALISED)
OPS = ROW_OPS + GROUP_OPS

# Of a copy. A row of 64 to 256 elements costs reductions, an odd one narrow accesses.
NEAR_COPY = {
    "rows": {"forward": 0.95, "backward": 0.90},
    "narrow": {"forward": 0.85, "backward": 0.85},
    "odd": {"forward": 0.85, "backward": 0.85},
}
BEFORE_XLA = 2.5  # the gradient of layer_norm
BEFORE_XLA_GROUPS = 2.0  # group_norm and batch_norm, forward and backward together


@dataclasses.dataclass(frozen=True)
class Case(softmax.Case):
    """A shape to measure, perhaps with a residual. axis: of the channels, for group_norm and batch_norm."""

    residual: bool = False

    @property
    def name(self) -> str:
        return super().name + (" residual" if self.residual else "")

    @property
    def images(self) -> bool:
        return len(self.shape) == 4


DTYPES = {"gpu": ("float16", "bfloat16", "float32"), "cpu": ("float32",)}
CASES = (
    [Case("rows", s) for s in ((131072, 512), (32768, 1024), (32768, 4096), (8192, 5120), (16384, 8192), (8192, 16384))]
    + [Case("rows", s, residual=True) for s in ((32768, 1024), (16384, 8192))]
    + [Case("narrow", s) for s in ((49152, 128), (1 << 20, 64), (1 << 19, 128), (1 << 18, 256))]
    + [Case("odd", s) for s in ((1 << 19, 100), (1 << 19, 77), (65536, 1001), (32768, 4097), (32768, 4100))]
    + [Case("wide", s) for s in ((2048, 65536), (16, 1 << 20))]
)
CASES += [Case("images", s) for s in ((64, 64, 64, 256), (16, 64, 64, 320), (256, 14, 14, 1024), (8, 256, 256, 128))]
CASES += [Case("images", (64, 256, 64, 64), 1)]
CPU_CASES = [Case("cpu", s, cpu=True) for s in ((2048, 1024), (32768, 64))]
CPU_CASES += [Case("cpu", (8, 32, 32, 64), cpu=True)]
QUICK = {"32768x4096", "524288x128", "32768x4097", "16384x8192 residual", "64x64x64x256"}


@dataclasses.dataclass(frozen=True)
class Cell(_cell.Cell):
    """One row of the table."""

    case: Case

    @property
    def arrays(self) -> int:
        """Full arrays among the operands."""
        return 1 + (self.direction != "forward") + self.case.residual

    @property
    def bytes(self) -> int:
        """The bytes of both directions: one call forward and one backward, which reads x again."""
        if self.direction == "both":
            return 5 * self.case.size * jnp.dtype(self.dtype).itemsize
        results = 1 + (self.case.residual and self.direction == "forward")
        return (self.arrays + results) * self.case.size * jnp.dtype(self.dtype).itemsize

    def goals(self) -> list[dict[str, Any]]:
        peers = {"goal": "peers", "against": ["xla"]}
        if self.case.group == "cpu":
            return [peers]
        if self.case.group == "images":
            return [peers | ({"required": BEFORE_XLA_GROUPS} if self.direction == "both" else {}), {"goal": "peers"}]
        goals = [peers, {"goal": "peers"}]
        if self.op == "layer_norm" and self.direction == "backward" and self.case.group == "rows":
            goals[0] = peers | {"required": BEFORE_XLA}
        if self.bytes >= softmax.LARGE and self.case.group in NEAR_COPY:
            goals.append({"goal": "copy", "required": NEAR_COPY[self.case.group][self.direction]})
        return goals


def cells(case: Case, dtype: str, ops: tuple[str, ...]) -> Iterator[Cell]:
    """Norms of groups of images, norms of rows elsewhere."""
    for op in ops:
        if (op in GROUP_OPS) == case.images:
            yield from (Cell(case, dtype, op, d) for d in (*DIRECTIONS, *["both"] * case.images))


# --- what runs -----------------------------------------------------------------------------------


def _specs(cell: Cell) -> list[jax.ShapeDtypeStruct]:
    """x, the cotangent, the residual or the cotangent of the sum; then scale, and bias of layer_norm."""
    full = jax.ShapeDtypeStruct(cell.case.shape, cell.dtype)
    if cell.case.images:
        vector = jax.ShapeDtypeStruct((cell.case.width,), jnp.float32)
        statistic = [jax.ShapeDtypeStruct(_statistics(cell), jnp.float32)] * 2 * (cell.direction == "backward")
        return [full] * cell.arrays + [vector] * 2 + statistic
    row = jax.ShapeDtypeStruct(cell.case.shape[-1:], jnp.float32)
    return [full] * cell.arrays + [row] * (1 + (cell.op == "layer_norm"))


def _statistics(cell: Cell) -> tuple[int, ...]:
    return (cell.case.shape[0], GROUPS) if cell.op == "group_norm" else (cell.case.width,)


def _plain_groups(cell: Cell) -> Callable[..., jax.Array]:
    """The norm as flax's layers compute it."""
    axis, case = cell.case.axis % 4, cell.case
    groups = GROUPS if cell.op == "group_norm" else case.width
    split = (*case.shape[:axis], groups, case.width // groups, *case.shape[axis + 1 :])
    kept = (0, axis) if cell.op == "group_norm" else (axis,)
    over = tuple(d for d in range(5) if d not in kept)
    along = lambda a: a.reshape([-1 if d == axis else 1 for d in range(4)])

    def norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32).reshape(split)
        mean = jnp.mean(wide, over, keepdims=True)
        variance = jnp.maximum(jnp.mean(wide * wide, over, keepdims=True) - mean * mean, 0)
        y = ((wide - mean) * jax.lax.rsqrt(variance + EPS)).reshape(x.shape)
        return (y * along(scale) + along(bias)).astype(x.dtype)

    return norm


def _public_groups(cell: Cell) -> Callable[..., jax.Array]:
    axis = cell.case.axis
    if cell.op == "group_norm":
        return lambda x, *rest: jaxkern.group_norm(x, GROUPS, *rest, channel_axis=axis, eps=EPS)
    return lambda x, *rest: jaxkern.batch_norm(x, *rest, channel_axis=axis, eps=EPS)[0]


def _both(norm: Callable[..., jax.Array]) -> Callable[..., Any]:
    def both(x: jax.Array, g: jax.Array, *rest: jax.Array) -> Any:
        y, pull = jax.vjp(norm, x, *rest)
        return y, pull(g)

    return both


def _xla_groups(cell: Cell) -> Callable[..., Any]:
    """Backward computes the statistics again, which is less work for XLA than what depends on given ones."""
    norm = _plain_groups(cell)
    if cell.direction == "both":
        return _both(norm)
    return norm if cell.direction == "forward" else lambda x, g, *rest: _both(norm)(x, g, *rest[:2])[1]


def _ours_groups(cell: Cell, algorithm: str) -> Callable[..., Any]:
    """The public function; for the gradient alone, the primitive."""
    norm, axis = _public_groups(cell), cell.case.axis % 4
    batch, groups = (1, GROUPS) if cell.op == "group_norm" else (0, cell.case.width)

    def forced(*arrays: jax.Array) -> Any:
        with jaxkern.algorithms.force(**{cell.op: algorithm}):
            return (_both(norm) if cell.direction == "both" else norm)(*arrays)

    def backward(x: jax.Array, g: jax.Array, scale: jax.Array, bias: jax.Array, mean: jax.Array, var: jax.Array) -> Any:
        del bias
        split = lambda a: a.reshape(*cell.case.shape[:axis], groups, -1, *cell.case.shape[axis + 1 :])
        zero, f32 = jnp.zeros(mean.shape, jnp.float32), jnp.dtype(jnp.float32)
        dx, *sums = bind(
            GROUP_PRIMITIVES[cell.op].grad,
            split(x),
            mean,
            var,
            scale.reshape(groups, -1),
            split(g),
            zero,
            zero,
            operation=cell.op,
            batch=batch,
            keep=0,
            channel=axis,
            eps=EPS,
            sums=(f32, f32),
            algorithm=algorithm,
        )
        return dx.reshape(x.shape), *sums

    return backward if cell.direction == "backward" else forced


def _plain(cell: Cell) -> Callable[..., jax.Array]:
    """The norm in float32, rounded once."""

    def norm(x: jax.Array, scale: jax.Array, *bias: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        y = NORMALISED[cell.op](wide) * scale
        return (y + bias[0] if bias else y).astype(x.dtype)

    return norm


def _xla(cell: Cell) -> Callable[..., Any]:
    if cell.case.images:
        return _xla_groups(cell)
    norm, residual = _plain(cell), cell.case.residual

    def forward(x: jax.Array, *rest: jax.Array) -> Any:
        if not residual:
            return norm(x, *rest)
        s = x + rest[0]
        return norm(s, *rest[1:]), s

    def backward(s: jax.Array, g: jax.Array, *rest: jax.Array) -> Any:
        ds, *sums = jax.vjp(norm, s, *rest[residual:])[1](g)
        return (ds + rest[0] if residual else ds), *sums

    return forward if cell.direction == "forward" else backward


def _ours(cell: Cell, algorithm: str) -> Callable[..., Any]:
    """The public function; for gradients, what it calls."""
    if cell.case.images:
        return _ours_groups(cell, algorithm)
    residual = cell.case.residual

    def forward(x: jax.Array, *rest: jax.Array) -> Any:
        more = {"residual": rest[0]} if residual else {}
        with jaxkern.algorithms.force(**{cell.op: algorithm}):
            return getattr(jaxkern, cell.op)(x, *rest[residual:], eps=EPS, **more)

    def backward(s: jax.Array, g: jax.Array, *rest: jax.Array) -> Any:
        return _from_sum(cell, s, g, rest, algorithm)

    return forward if cell.direction == "forward" else backward


def _from_sum(cell: Cell, s: jax.Array, g: jax.Array, rest: tuple[jax.Array, ...], algorithm: str) -> Any:
    """The gradients of the sum, scale and bias."""
    own = getattr(jaxkern, cell.op).operation
    given = {"numbers": (("eps", EPS),), "dtype": s.dtype, "function": None, "algorithm": algorithm}
    cotangents, parameters = [g, *rest[: cell.case.residual]], rest[cell.case.residual :]

    def norm(s: jax.Array, *parameters: jax.Array) -> list[jax.Array]:
        operands = {"x": s, **dict(zip(("scale", "bias"), parameters))}
        return of_rows(own, operands, [], keeps_x=cell.case.residual, **given)

    return jax.vjp(norm, s, *parameters)[1](cotangents)


def programs(cell: Cell, algorithms: bool) -> list[Program]:
    """This library's and XLA's programs of a cell."""
    specs = _specs(cell)
    found = [Program(_goals.OURS, _ours(cell, "auto"), specs), Program("xla", _xla(cell), specs)]
    if algorithms and jax.default_backend() == "gpu":
        found += [
            Program(f"{_goals.OURS}:{t}", _ours(cell, t), specs)
            for t in ALGORITHMS
            if _asks(cell.op)
            and t in jaxkern.algorithms.names(cell.op)
            and jaxkern.algorithms.fits(cell.op, t, **_problem(cell))
        ]
    return found


def _problem(cell: Cell) -> dict[str, Any]:
    """The arguments with which to ask `jaxkern.algorithms`."""
    backward = cell.direction != "forward"
    if cell.case.images:
        shape, axis = cell.case.shape, cell.case.axis % 4
        samples = shape[0] if cell.op == "group_norm" else 1
        sizes = {"samples": samples, "rows": math.prod(shape[:axis]) // samples, "channels": cell.case.width}
        groups = GROUPS if cell.op == "group_norm" else cell.case.width
        more = {"inner": math.prod(shape[axis + 1 :]), "dtype": cell.dtype, "out_dtype": cell.dtype, "each": samples}
        return sizes | more | {"groups": groups, "backward": backward}
    sizes = {"rows": math.prod(cell.case.shape[:-1]), "width": cell.case.width, "dtype": cell.dtype}
    flags = {"bias": cell.op == "layer_norm", "residual": cell.case.residual}
    return sizes | flags | {"backward": backward, "scale_sum": backward}


def chosen_algorithm(cell: Cell) -> str | None:
    """The algorithm that runs a cell by default on this GPU."""
    return (
        jaxkern.algorithms.choose(cell.op, **_problem(cell))
        if _asks(cell.op) and jax.default_backend() == "gpu"
        else None
    )


def _asks(op: str) -> bool:
    """Whether `jaxkern.algorithms` knows the operation by the sizes of a cell."""
    return op in GROUP_OPS or "generated" in jaxkern.algorithms.names(op)


Inputs = softmax.Inputs


def candidates(cell: Cell, compiled: list[Program], inputs: Inputs) -> list[_timing.Candidate]:
    """What to time for a cell, the copy aside."""
    found = _cell.candidates(compiled, inputs, keep=inputs.turns)
    if cell.case.images:
        some = _torch.available() and cell.direction != "backward"  # which autograd does not give alone
        return [*found, _torch_groups(cell, inputs)] if some else found
    if _torch.available() and not cell.case.residual and (cell.direction == "forward" or cell.op == "layer_norm"):
        found.append(_torch_candidate(cell, inputs))
    return found


def _torch_candidate(cell: Cell, inputs: Inputs) -> _timing.Candidate:
    """Parameters of the dtype of x, which PyTorch wants."""
    torch, shape = _torch.torch(), list(cell.case.shape[-1:])
    tensors: list[Any] = []

    def call(i: int) -> Any:
        if not tensors:
            shared = [_torch.share(a) for a in inputs.arrays]
            weight = torch.ones(shape, dtype=shared[0].dtype, device=shared[0].device)
            tensors.append(
                (shared, weight, [torch.native_layer_norm(x, shape, weight, weight, EPS)[1:] for x in shared])
            )
        shared, weight, statistics = tensors[0]
        k = i % len(shared)
        if cell.direction == "backward":
            g = shared[(k + 1) % len(shared)]
            mask = [True, True, True]
            return torch.ops.aten.native_layer_norm_backward(g, shared[k], shape, *statistics[k], weight, weight, mask)
        if cell.op == "layer_norm":
            return torch.nn.functional.layer_norm(shared[k], shape, weight, weight, EPS)
        return torch.nn.functional.rms_norm(shared[k], shape, weight, EPS)

    return _timing.Candidate("torch", call, _torch.sync, keep=inputs.turns, torch=True)


def _torch_groups(cell: Cell, inputs: Inputs) -> _timing.Candidate:
    """Channels second in shape, wherever they lie in memory."""
    torch, tensors = _torch.torch(), []

    def call(i: int) -> Any:
        if not tensors:
            shared = [_torch.share(a) for a in inputs.arrays]
            shared = [a if cell.case.axis == 1 else a.permute(0, 3, 1, 2) for a in shared]
            weight = torch.ones(cell.case.width, device=shared[0].device)
            weight = weight.to(shared[0].dtype) if cell.op == "group_norm" else weight
            tensors.append((shared, weight.requires_grad_(), weight.detach().clone().requires_grad_()))
        shared, weight, bias = tensors[0]
        k = i % len(shared)
        x = shared[k].detach().requires_grad_(cell.direction != "forward")

        def forward() -> Any:
            if cell.op == "group_norm":
                return torch.nn.functional.group_norm(x, GROUPS, weight, bias, EPS)
            return torch.nn.functional.batch_norm(x, None, None, weight, bias, True, 0.1, EPS)

        if cell.direction == "forward":
            with torch.no_grad():
                return forward()
        y = forward()
        return y, torch.autograd.grad(y, (x, weight, bias), shared[(k + 1) % len(shared)])

    return _timing.Candidate("torch", call, _torch.sync, keep=inputs.turns, torch=True)


# --- checks --------------------------------------------------------------------------------------


def checks(clock: Any) -> list[dict[str, Any]]:
    """A training step is one call forward and one backward, with a residual too."""
    del clock
    found = []
    for op in ROW_OPS:

        def loss(x: jax.Array, r: jax.Array, scale: jax.Array, op: str = op) -> jax.Array:
            y, s = getattr(jaxkern, op)(x, scale, residual=r)
            return jnp.sum((y * s).astype(jnp.float32))

        full = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
        step = Program(
            "step", jax.value_and_grad(loss, (0, 1, 2)), [full, full, jax.ShapeDtypeStruct((512,), "float32")]
        )
        step.compile()
        found.append(
            {
                "check": f"value_and_grad of {op} with a residual is one call forward and one backward",
                "met": step.targets
                in ([f"jaxkern_{op}", f"jaxkern_{op}_grad"], [f"jaxkern_{op}", f"jaxkern_{op}_core"]),
                "handlers": step.targets,
            }
        )
    return found
