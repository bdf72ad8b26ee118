"""Times operations beside XLA and a copy, for `python -m jaxkern`."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern
from jaxkern import algorithms
from jaxkern._doctor.checks import OPERATIONS, kernels_run


def seconds(f, *args) -> float:
    """Time of a call: the best of three batches, each long enough to hide the dispatch."""
    jax.block_until_ready(f(*args))
    calls, best = 20 if on_gpu() else 3, np.inf
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls):
            out = f(*args)
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def dtypes() -> tuple[str, ...]:
    return ("float32", "bfloat16") if on_gpu() else ("float32",)


def header(*columns) -> str:
    names = (f"{name:>10}" for name in ("dtype", "jaxkern", "XLA", *columns))
    return f"{'':14}{''.join(names)}{'  algorithm' if on_gpu() else ''}"


def algorithm_of(operation, *sizes, **problem) -> str:
    """The algorithm that runs a problem on this GPU; empty where XLA runs it."""
    return algorithms.choose(operation, *sizes, **problem) if kernels_run() else ""


def show_row_speed() -> None:
    # Larger than the caches, so that the copy moves bytes of memory.
    rows = 65536 if on_gpu() else 2048
    print(
        f"\nrows of [{rows}, 2048] on {jax.devices()[0].device_kind}; the gradient reads two arrays, a reduction writes none"
    )
    print(header(*["copy"] * kernels_run()))
    for dtype in dtypes():
        x = jax.random.normal(jax.random.key(0), (rows, 2048), dtype)
        copy = [seconds(jax.jit(jnp.copy), x)] if kernels_run() else []
        for operation in OPERATIONS:
            ours, theirs = (getattr(m, operation) for m in (jaxkern, jax.nn))
            rows_of_table = [("", seconds(jax.jit(ours), x), seconds(jax.jit(theirs), x))]
            # The residuals of the backward pass are arguments, not constants of the program.
            pull = jax.jit(lambda pull, g: pull(g))
            kept = [jax.vjp(f, x)[1] for f in (ours, theirs)]
            rows_of_table.append((" grad", *(seconds(pull, k, x) for k in kept)))
            for name, *times in rows_of_table:
                algorithm = algorithm_of(operation, rows, 2048, dtype=dtype, backward=bool(name))
                line = f"{operation + name:17}{dtype:>7}" + "".join(f"{1e3 * t:10.3f}" for t in (*times, *copy))
                print(f"{line}  {algorithm}".rstrip())
        for operation, theirs in (("reduce_sum", jnp.sum), ("logsumexp", jax.nn.logsumexp)):
            last = (jax.jit(functools.partial(f, axis=-1)) for f in (getattr(jaxkern, operation), theirs))
            times = [seconds(f, x) for f in last]
            line = f"{operation:17}{dtype:>7}" + "".join(f"{1e3 * t:10.3f}" for t in (*times, *copy))
            print(f"{line}  {algorithm_of(operation, rows, 2048, dtype=dtype)}".rstrip())


def show_norm_speed() -> None:
    rows, width = (32768, 4096) if on_gpu() else (1024, 1024)
    print(f"\nlayer_norm of [{rows}, {width}], and its gradients by x, scale and bias")
    print(header())

    def plain(x, scale, bias):
        wide = x.astype(jnp.float32)
        deviation = wide - wide.mean(-1, keepdims=True)
        rstd = jax.lax.rsqrt(jnp.square(deviation).mean(-1, keepdims=True) + 1e-6)
        return (deviation * rstd * scale + bias).astype(x.dtype)

    scale = jnp.ones(width)
    for dtype in dtypes():
        x = jax.random.normal(jax.random.key(0), (rows, width), dtype)
        for name, run in (("", lambda f: f), (" grad", lambda f: lambda *args: jax.vjp(f, *args)[1](args[0]))):
            times = [seconds(jax.jit(run(f)), x, scale, scale) for f in (jaxkern.layer_norm, plain)]
            kind = {"bias": True, "backward": bool(name), "scale_sum": bool(name)}
            algorithm = algorithm_of("layer_norm", rows, width, dtype=dtype, **kind)
            line = f"{'layer_norm' + name:17}{dtype:>7}{''.join(f'{1e3 * t:10.3f}' for t in times)}"
            print(f"{line}  {algorithm}".rstrip())


def show_loss_speed() -> None:
    rows, classes = (8192, 50257) if on_gpu() else (64, 50257)
    print(f"\nvalue_and_grad of the mean cross-entropy of [{rows}, {classes}]")
    print(header())

    def plain(x, labels):
        return -jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], -1)[:, 0]

    labels = jax.random.randint(jax.random.key(1), rows, 0, classes)
    for dtype in dtypes():
        x = jax.random.normal(jax.random.key(0), (rows, classes), dtype)
        times = [
            seconds(jax.jit(jax.value_and_grad(lambda x, y, f=f: f(x, y).mean())), x, labels)
            for f in (jaxkern.softmax_cross_entropy, plain)
        ]
        algorithm = algorithm_of("softmax_cross_entropy", rows, classes, dtype=dtype, which="both")
        print(f"{'cross_entropy':17}{dtype:>7}{''.join(f'{1e3 * t:10.3f}' for t in times)}  {algorithm}".rstrip())


def show_indexed_speed() -> None:
    rows, count, width = 16934, 116624, 128
    print(f"\nsums of {count} rows of {width} into {rows} segments")
    print(header())
    ids = jax.random.randint(jax.random.key(1), count, 0, rows)
    for dtype in dtypes():
        data = jax.random.normal(jax.random.key(0), (count, width), dtype)
        times = [
            seconds(jax.jit(lambda d, i, f=module.segment_sum: f(d, i, rows)), data, ids)
            for module in (jaxkern, jax.ops)
        ]
        algorithm = algorithm_of("segment_sum", rows, count, width, dtype=dtype)
        print(f"{'segment_sum':17}{dtype:>7}{''.join(f'{1e3 * t:10.3f}' for t in times)}  {algorithm}".rstrip())


COLUMNS = """
Times are in milliseconds per call; lower is faster.
  jaxkern    this library{ours}
  XLA        the same in jax.nn, jax.ops or jnp"""
ON_GPU = """
  copy       a copy of the operand, which a kernel that reads one array and writes one can hardly beat
  algorithm  how jaxkern's kernel works: see docs/switches.md
Best of three batches of calls. A kernel near the copy is as fast as memory; one slower than XLA is worth a report."""
ELSEWHERE = """
Both columns are code of XLA, so they show that operations run, and nothing about kernels."""


def show_speed() -> None:
    ours = "" if kernels_run() else ", through XLA on this machine: no CUDA kernel runs here"
    print(COLUMNS.format(ours=ours) + (ON_GPU if kernels_run() else ELSEWHERE))
    show_row_speed()
    show_norm_speed()
    show_loss_speed()
    show_indexed_speed()
