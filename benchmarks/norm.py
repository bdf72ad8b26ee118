"""rms_norm and layer_norm, with scale and bias in float32, against XLA, PyTorch and a copy.

    python -m benchmarks norm [--ops layer_norm] [--tiers]

Backward is the gradients of x, scale and bias from x and the cotangent: statistics are computed again on all sides. With
a residual, forward adds it and returns the sum, and backward starts from the sum and adds its cotangent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxkern
from benchmarks import _cell, _goals, _timing, _torch, softmax
from benchmarks._program import Program
from jaxkern._ops.norm.primitive import PRIMITIVES

OPERATION = "norm"
OPS = ("rms_norm", "layer_norm")
DIRECTIONS = ("forward", "backward")
TIERS = ("sub_warp", "warp", "block", "streaming")
EPS = 1e-6

# Of a copy. A row of 64 to 256 elements costs reductions, an odd one narrow accesses.
NEAR_COPY = {
    "rows": {"forward": 0.95, "backward": 0.90},
    "narrow": {"forward": 0.85, "backward": 0.85},
    "odd": {"forward": 0.85, "backward": 0.85},
}
BEFORE_XLA = 2.5  # the gradient of layer_norm


@dataclasses.dataclass(frozen=True)
class Case(softmax.Case):
    """A shape to measure, perhaps with a residual."""

    residual: bool = False

    @property
    def name(self) -> str:
        return super().name + (" residual" if self.residual else "")


DTYPES = {"gpu": ("float16", "bfloat16", "float32"), "cpu": ("float32",)}
CASES = (
    [Case("rows", s) for s in ((131072, 512), (32768, 1024), (32768, 4096), (8192, 5120), (16384, 8192), (8192, 16384))]
    + [Case("rows", s, residual=True) for s in ((32768, 1024), (16384, 8192))]
    + [Case("narrow", s) for s in ((49152, 128), (1 << 20, 64), (1 << 19, 128), (1 << 18, 256))]
    + [Case("odd", s) for s in ((1 << 19, 100), (1 << 19, 77), (65536, 1001), (32768, 4097), (32768, 4100))]
    + [Case("wide", s) for s in ((2048, 65536), (16, 1 << 20))]
)
CPU_CASES = [Case("cpu", s, cpu=True) for s in ((2048, 1024), (32768, 64))]
QUICK = {"32768x4096", "524288x128", "32768x4097", "16384x8192 residual"}


@dataclasses.dataclass(frozen=True)
class Cell(_cell.Cell):
    """One row of the table."""

    case: Case

    @property
    def arrays(self) -> int:
        """Full arrays among the operands."""
        return 1 + (self.direction == "backward") + self.case.residual

    @property
    def bytes(self) -> int:
        results = 1 + (self.case.residual and self.direction == "forward")
        return (self.arrays + results) * self.case.size * jnp.dtype(self.dtype).itemsize

    def goals(self) -> list[dict[str, Any]]:
        peers = {"goal": "peers", "against": ["xla"]}
        if self.case.group == "cpu":
            return [peers]
        goals = [peers, {"goal": "peers"}]
        if self.op == "layer_norm" and self.direction == "backward" and self.case.group == "rows":
            goals[0] = peers | {"required": BEFORE_XLA}
        if self.bytes >= softmax.LARGE and self.case.group in NEAR_COPY:
            goals.append({"goal": "copy", "required": NEAR_COPY[self.case.group][self.direction]})
        return goals


# --- what runs -----------------------------------------------------------------------------------


def _specs(cell: Cell) -> list[jax.ShapeDtypeStruct]:
    """x, the cotangent, the residual or the cotangent of the sum; then scale, and bias of layer_norm."""
    full = jax.ShapeDtypeStruct(cell.case.shape, cell.dtype)
    row = jax.ShapeDtypeStruct(cell.case.shape[-1:], jnp.float32)
    return [full] * cell.arrays + [row] * (1 + (cell.op == "layer_norm"))


def _plain(cell: Cell) -> Callable[..., jax.Array]:
    """As flax's layers compute it: float32 inside, rounded once."""

    def norm(x: jax.Array, scale: jax.Array, *bias: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide, -1, keepdims=True) if cell.op == "layer_norm" else 0.0
        variance = jnp.mean(wide * wide, -1, keepdims=True) - mean * mean
        y = (wide - mean) * (jax.lax.rsqrt(jnp.maximum(variance, 0) + EPS) * scale)
        return (y + bias[0] if bias else y).astype(x.dtype)

    return norm


def _xla(cell: Cell) -> Callable[..., Any]:
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


def _ours(cell: Cell, tier: str) -> Callable[..., Any]:
    """The public function; for gradients, which have none, the primitive."""
    residual, biased = cell.case.residual, cell.op == "layer_norm"

    def forward(x: jax.Array, *rest: jax.Array) -> Any:
        more = {"residual": rest[0]} if residual else {}
        with jaxkern.tiers.force(**{cell.op: tier}):
            return getattr(jaxkern, cell.op)(x, *rest[residual:], eps=EPS, **more)

    def backward(s: jax.Array, g: jax.Array, *rest: jax.Array) -> Any:
        f32 = jnp.dtype(jnp.float32)
        return PRIMITIVES[cell.op].grad.bind(
            s,
            g,
            *(rest[:-1] if biased else rest),  # the bias is not read
            operation=cell.op,
            extras="residual scale" if residual else "scale",
            eps=EPS,
            sums=(f32, f32 if biased else None),
            tier=tier,
        )

    return forward if cell.direction == "forward" else backward


def programs(cell: Cell, tiers: bool) -> list[Program]:
    """This library's and XLA's programs of a cell."""
    specs = _specs(cell)
    found = [Program(_goals.OURS, _ours(cell, "auto"), specs), Program("xla", _xla(cell), specs)]
    if tiers and jax.default_backend() == "gpu":
        found += [
            Program(f"{_goals.OURS}:{t}", _ours(cell, t), specs)
            for t in TIERS
            if jaxkern.tiers.fits(cell.op, t, **_problem(cell))
        ]
    return found


def _problem(cell: Cell) -> dict[str, Any]:
    """The arguments with which to ask `jaxkern.tiers`."""
    backward = cell.direction == "backward"
    sizes = {"rows": math.prod(cell.case.shape[:-1]), "width": cell.case.width, "dtype": cell.dtype}
    flags = {"bias": cell.op == "layer_norm", "residual": cell.case.residual}
    return sizes | flags | {"backward": backward, "scale_sum": backward}


def chosen_tier(cell: Cell) -> str | None:
    """The tier that runs a cell by default on this GPU."""
    return jaxkern.tiers.choose(cell.op, **_problem(cell)) if jax.default_backend() == "gpu" else None


Inputs = softmax.Inputs


def candidates(cell: Cell, compiled: list[Program], inputs: Inputs) -> list[_timing.Candidate]:
    """What to time for a cell, the copy aside."""
    found = _cell.candidates(compiled, inputs, keep=inputs.turns)
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


# --- checks --------------------------------------------------------------------------------------


def checks(clock: Any) -> list[dict[str, Any]]:
    """A training step is one call forward and one backward, with a residual too."""
    del clock
    found = []
    for op in OPS:

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
                "met": step.targets == [f"jaxkern_{op}", f"jaxkern_{op}_grad"],
                "handlers": step.targets,
            }
        )
    return found
