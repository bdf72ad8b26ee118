"""What XLA makes of a program on an H100, without a GPU: kernels, bytes that they move, copies, collectives, and memory.

    python -m benchmarks compiled                        every program of `benchmarks programs`, plain and accelerated
    python -m benchmarks compiled --cases transformer    those whose name and dtype match
    python -m benchmarks compiled --deterministic        also under accelerate(deterministic=True)

    report = compiled.read(compiled.compile(f, *args))   the same of any function, for tests

XLA's compiler for CUDA runs on any machine where the packages jax-cuda13-plugin and jax-cuda13-pjrt of JAX's own version are
installed, without other packages of CUDA. Arguments may be shapes. It measures nothing here, so the tiles of matrix products are
XLA's defaults, and cuDNN is not asked. Nothing runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import re
from typing import Any

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # of CUDA's libraries, which nothing here needs

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern
from benchmarks import _hlo
from jaxkern._core import device

TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 } runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
OPTIONS = {"xla_gpu_autotune_level": 0}  # measuring needs a GPU
SMALL = 1 << 12  # bytes of a copy that is not reported


def missing() -> str:
    """Why no program compiles here; empty if programs do."""
    found = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))
    return "" if found else "XLA's compiler for CUDA is not installed: pip install jax-cuda13-plugin jax-cuda13-pjrt"


@functools.cache
def devices(count: int = 1) -> tuple[Any, ...]:
    """H100s of one host that are not there: programs compile for them."""
    from jax.experimental import topologies

    return tuple(
        topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology=f"1x1x{count}").devices  # pyright: ignore
    )


def mesh(**axes: int) -> jax.sharding.Mesh:
    """A mesh of such devices: mesh(data=4, model=2)."""
    shape = tuple(axes.values())
    return jax.sharding.Mesh(np.array(devices(math.prod(shape))).reshape(shape), tuple(axes))


@contextlib.contextmanager
def planned():
    """Within the block, decisions and plans are those for the H100: without a GPU they are for an H200, whose memory is faster."""
    before = device.this_device
    device.this_device = lambda: device.describe(devices()[0])
    try:
        yield
    finally:
        device.this_device = before


def compile(f: Any, *args: Any, donate: tuple[int, ...] = ()) -> jax.stages.Compiled:
    """Compiles jax.jit(f) for an H100, or for the devices of args that are `jax.ShapeDtypeStruct`s with shardings over a `mesh`.

    args: pytrees of arrays or of shapes. donate: the numbers of arguments whose memory results may take.
    """
    one = jax.sharding.SingleDeviceSharding(devices()[0])

    def spec(x):
        dtype = jax.dtypes.canonicalize_dtype(
            getattr(x, "dtype", None) or jnp.result_type(x), allow_extended_dtype=True
        )
        own = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else None
        return jax.ShapeDtypeStruct(jnp.shape(x), dtype, sharding=own or one)

    with planned():
        lowered = jax.jit(lambda *a: f(*a), donate_argnums=donate).lower(*jax.tree.map(spec, args))
    return lowered.compile(compiler_options=OPTIONS)


@dataclasses.dataclass(frozen=True)
class Report:
    """temporary: bytes of temporary memory, workspaces included. peak: that, arguments and results."""

    steps: tuple[_hlo.Step, ...]
    temporary: int
    peak: int

    kernels = property(lambda self: sum(s.launches * s.times for s in self.steps))
    moved = property(lambda self: sum(s.total for s in self.steps))
    workspace = property(lambda self: max((s.workspace for s in self.steps), default=0))
    collectives = property(lambda self: [s for s in self.steps if s.op in _hlo.COLLECTIVES])
    copies = property(lambda self: [s for s in self.steps if s.copy in _hlo.COPIES and s.bytes >= SMALL])
    copied = property(lambda self: sum(s.total for s in self.copies))


def read(compiled: jax.stages.Compiled) -> Report:
    sizes: Any = compiled.memory_analysis()
    own = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    temporary = sizes.temp_size_in_bytes
    return Report(tuple(_hlo.steps(compiled.as_text() or "")), temporary, own + temporary)


def compare(f: Any, *args: Any, donate: tuple[int, ...] = (), **sets: dict[str, Any]) -> dict[str, Report]:
    """{"plain": of f, "accelerated": under accelerate(), and of each of `sets`, which are arguments of accelerate}."""
    found = {}
    for label, options in {"plain": None, **(sets or {"accelerated": {}})}.items():
        with contextlib.nullcontext() if options is None else jaxkern.accelerate(**options):
            found[label] = read(compile(f, *args, donate=donate))
    return found


HEAD = (
    "",
    "kernels",
    "MB moved",
    "copies",
    "MB copied",
    "exchanged",
    "MB exchanged",
    "MB temporary",
    "MB peak",
    "MB workspace",
)


def rows(name: str, reports: dict[str, Report]) -> list[list[str]]:
    """The lines of a table; beside the numbers that have a bound, their ratio to the plain program's."""
    plain, found = reports["plain"], []
    for label, r in reports.items():
        over = lambda get, r=r: (
            f"{get(r) / 1e6:.1f}" + (f" ({get(r) / max(get(plain), 1):.3f})" if r is not plain else "")
        )
        exchanged = sum(s.total for s in r.collectives) / 1e6
        found.append(
            [f"{name} [{label}]", str(r.kernels), over(lambda r: r.moved), str(len(r.copies)), f"{r.copied / 1e6:.1f}"]
        )
        found[-1] += [str(len(r.collectives)), f"{exchanged:.1f}", f"{r.temporary / 1e6:.1f}", over(lambda r: r.peak)]
        found[-1].append(f"{r.workspace / 1e6:.1f}")
    return found


def run(arguments: Any) -> int:
    """Prints the table of the programs that are chosen, each as soon as it has compiled."""
    if why := missing():
        raise SystemExit(f"benchmarks: {why}")
    from benchmarks import _report, programs

    sets: dict[str, dict[str, Any]] = {"accelerated": {}}
    if arguments.deterministic:
        sets["deterministic"] = {"deterministic": True}
    for program in programs.programs():
        name = f"{program.name}, {program.dtype}"
        if re.search(arguments.cases, f"{program.name} {program.dtype}"):
            training = program.make(program.dtype, arguments.quick)
            found = compare(training.step, *training.specs(), donate=(0,), **sets)
            print(_report.align([list(HEAD), *rows(name, found)]), flush=True)
    return 0
