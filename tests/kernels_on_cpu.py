"""EMULATED=1 pytest ...: programs for the CPU run the kernels, by emulation, where they would run the references.

Every lowering rule of the library for CUDA is registered for the CPU, too, and a launch list becomes a call of `emulated.run`. So a
test of an operation checks its kernels without a GPU, at a second or more for each kernel. Where the host cannot compile a kernel,
and for programs of several devices, the references run. conftest.py imports this before the library.
"""

import subprocess

import numpy as np
from jax._src.callback import emit_python_callback
from jax.interpreters import mlir

REFUSED = set()  # kernels that the compiler of the host does not take
register = mlir.register_lowering
_on_cuda = set()


def _register(prim, rule, platform=None, **options):
    if platform == "cuda":
        _on_cuda.add(prim)
        register(prim, rule, platform="cpu", **options)
    if platform != "cpu" or prim not in _on_cuda:
        register(prim, rule, platform=platform, **options)


mlir.register_lowering = _register

import emulated  # noqa: E402

from jaxkern._core import compat_lowering, launch  # noqa: E402

lower, lowering_rule = launch.lower, compat_lowering.lowering_rule
_plain = {}


def _rule_for_cpu(prim, platform):
    """JAX's own rule for the CPU: XLA for CPUs cannot compile the scan operation that JAX makes of a cumsum on a GPU."""
    if platform not in ("cpu", "cuda"):
        return lowering_rule(prim, platform)
    if prim not in _plain:
        _plain[prim] = lowering_rule(prim, "cpu")
    return _plain[prim]


def _compiles(plan) -> bool:
    try:
        emulated.prepare(plan)
        return True
    except subprocess.CalledProcessError:
        REFUSED.update(step.name for step in plan.launches if isinstance(step, launch.Launch))
        return False


def _lower(ctx, operation, plan, operands, **options):
    if "cpu" not in ctx.module_context.platforms:
        return lower(ctx, operation, plan, operands, **options)
    if not _compiles(plan):
        return None
    results = [(a.shape, a.dtype) for a in ctx.avals_out]
    aliases = tuple((options.get("operand_output_aliases") or {}).items())

    def run(*arrays):
        arrays = [np.asarray(x) for x in arrays]
        return tuple(emulated.run(plan, arrays, results, aliases=aliases))

    types = [list(operands), list(ctx.avals_in), list(ctx.avals_out)]
    return list(emit_python_callback(ctx, run, None, *types, has_side_effect=False, returns_token=False)[0])


launch.lower = _lower
compat_lowering.lowering_rule = _rule_for_cpu

from jaxkern._accelerate import loops  # noqa: E402

loops.is_for_cuda = lambda ctx: True
