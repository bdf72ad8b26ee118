"""The first use of an operation: what compiling its kernels adds, cold and with kernels on disk.

    python -m benchmarks.first_use [--out FILE]

A new process each time compiles and runs a jitted operation, once with an empty kernel cache, and once with the cache that the
first process left; the plain JAX counterpart is timed in both. Kernels compile while XLA compiles, so they add less to a first
call than they take. Times are in milliseconds; `kernel` is the slowest kernel of the operation. Kernels for buffers that are not
aligned are left out, because no first call waits for them.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any


def cases() -> dict[str, tuple[Any, Any, list[Any]]]:
    """name: (operation, the same in plain JAX, arguments)"""
    import jax
    import jax.numpy as jnp

    import jaxkern

    x = jnp.ones((4096, 1024), jnp.bfloat16)
    wide = jnp.ones((512, 50257), jnp.bfloat16)
    labels = jnp.zeros(512, jnp.int32)
    ids = jnp.arange(100_000, dtype=jnp.int32) % 7919
    data = jnp.ones((100_000, 128), jnp.float32)
    grad = lambda f: jax.grad(lambda x, *rest: f(x, *rest).astype(jnp.float32).sum())
    plain_loss = lambda x, y: -jnp.take_along_axis(jax.nn.log_softmax(x.astype(jnp.float32)), y[:, None], -1)
    cap = lambda x, w: jax.nn.softmax(30 * jnp.tanh(x / 30 * w), -1)  # a function that jaxkern does not know
    w = jnp.ones(1024, jnp.bfloat16)
    plain_norm = lambda x, w: (
        x * jax.lax.rsqrt(jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True) + 1e-6).astype(x.dtype) * w
    )
    step = lambda h, ab: (ab[0] * h + ab[1],) * 2
    plain_recurrence = lambda a, b: jax.lax.scan(step, jnp.zeros(128), (a, b))[1]
    return {
        "gelu": (jaxkern.gelu, lambda x: jax.nn.gelu(x, approximate=False), [x]),
        "swiglu and gradient": (grad(jaxkern.swiglu), grad(lambda x: jax.nn.silu(x[:, 512:]) * x[:, :512]), [x]),
        "reduce_sum": (lambda x: jaxkern.reduce_sum(x, axis=-1), lambda x: x.sum(-1), [x]),
        "logsumexp": (lambda x: jaxkern.logsumexp(x, axis=-1), lambda x: jax.nn.logsumexp(x, axis=-1), [x]),
        "softmax": (jaxkern.softmax, jax.nn.softmax, [x]),
        "softmax and gradient": (grad(jaxkern.softmax), grad(jax.nn.softmax), [x]),
        "softmax, wide": (jaxkern.softmax, jax.nn.softmax, [wide]),
        "cross-entropy and gradient": (grad(jaxkern.softmax_cross_entropy), grad(plain_loss), [wide, labels]),
        "row function": (jaxkern.row_kernel(cap), cap, [x, w]),
        "row function and gradient": (grad(jaxkern.row_kernel(cap)), grad(cap), [x, w]),
        "rms_norm and gradient": (grad(jaxkern.rms_norm), grad(plain_norm), [x, w]),
        "scan": (lambda a, b: jaxkern.linear_recurrence(a, b), plain_recurrence, [data, data]),
        "index_select": (lambda x, i: jaxkern.index_select(x, 0, i), lambda x, i: x[i], [data, ids]),
        "segment_sum": (
            lambda x, i: jaxkern.segment_sum(x, i, 7919),
            lambda x, i: jax.ops.segment_sum(x, i, 7919),
            [data, ids],
        ),
        "segment_softmax": (
            lambda x, i: jaxkern.segment_softmax(x, i, 7919),
            lambda x, i: jax.ops.segment_sum(x, i, 7919),
            [data, ids],
        ),
    }


def measure() -> dict[str, dict[str, float]]:
    """Milliseconds of first calls in this process, and of the slowest kernel compiled alone."""
    import jax

    from jaxkern._core import device, launch, registry

    jax.jit(lambda x: x + 1)(1.0).block_until_ready()  # the devices are there
    capability = device.this_device().compute_capability
    found = {}
    for name, (ours, plain, arguments) in cases().items():
        jax.block_until_ready(arguments)
        row = {}
        for which, f in (("plain", plain), ("jaxkern", ours)):
            begin = time.perf_counter()
            jax.block_until_ready(jax.jit(f)(*arguments))
            row[which] = 1e3 * (time.perf_counter() - begin)
        lowered = jax.jit(ours).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        kernels = {kernel for text in launch.programs(lowered) for kernel in launch.kernels(text, unaligned=False)}
        times = [0.0]
        for kernel in kernels:
            begin = time.perf_counter()
            registry.kernels.module.compile(capability=capability, **kernel._asdict())
            times.append(1e3 * (time.perf_counter() - begin))
        found[name] = row | {"kernels": len(kernels), "from the cache": max(times)}
    return found


def compile_alone() -> dict[str, float]:
    """Milliseconds that the slowest kernel of each operation takes to compile, with an empty cache."""
    import jax

    from jaxkern._core import device, launch, registry

    capability = device.this_device().compute_capability
    found = {}
    for name, (ours, _, arguments) in cases().items():
        lowered = jax.jit(ours).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        found[name] = 0.0
        for kernel in {k for text in launch.programs(lowered) for k in launch.kernels(text, unaligned=False)}:
            begin = time.perf_counter()
            cubin, _, cached = registry.kernels.module.compile(capability=capability, **kernel._asdict())
            if not cached:
                found[name] = max(found[name], 1e3 * (time.perf_counter() - begin))
    return found


def child(what: str, cache: str) -> Any:
    environment = {**os.environ, "JAXKERN_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_use", "--child", what],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="write the figures to this file")
    parser.add_argument("--child", choices=("measure", "compile"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure() if options.child == "measure" else compile_alone()))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        alone = child("compile", "")
        cold, warm = (child("measure", os.path.join(folder, "cache")) for _ in range(2))
    print(f"{'milliseconds':28}{'kernels':>8}{'kernel':>8}{'cached':>8}{'first call':>12}{'cached':>8}{'plain':>8}")
    for name in cold:
        print(
            f"{name:28}{cold[name]['kernels']:8.0f}{alone[name]:8.0f}{warm[name]['from the cache']:8.1f}{cold[name]['jaxkern']:12.0f}"
            f"{warm[name]['jaxkern']:8.0f}{warm[name]['plain']:8.0f}"
        )
    if options.out:
        options.out.write_text(json.dumps({"kernel": alone, "cold": cold, "cached": warm}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
