"""Reports what is loaded on this machine, whether results are right, and how fast operations are.

`python -m jaxkern` takes about half a minute. It exits with 1 if a module that belongs on this machine is not loaded, or if
a result is wrong. `python -m jaxkern cache` lists or removes compiled kernels.
"""

import argparse
import concurrent.futures
import functools
import os
import pathlib
import platform
import re
import sys
import time

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np

import jaxkern
from jaxkern import algorithms
from jaxkern._core import cache, compat, device, environment, registry, runtime


def parse(arguments: list[str]) -> None:
    """Runs the command `cache`, and ends the process unless the arguments request the report."""
    if arguments[:1] == ["cache"]:
        sys.exit(cache.main(arguments[1:]))
    parser = argparse.ArgumentParser(prog="python -m jaxkern", description=__doc__)
    parser.add_argument("command", nargs="?", choices=["cache"], help="lists or clears the compiled kernels on disk")
    parser.add_argument("--version", action="version", version=f"jaxkern {jaxkern.__version__}")
    parser.parse_args(arguments)


if __name__ == "__main__":  # before a backend of JAX starts
    parse(sys.argv[1:])

OPERATIONS = ("softmax", "log_softmax")
REDUCTIONS = ("reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "logsumexp")
INDEXED = ("index_add", "index_select", "segment_sum", "segment_max")
# (shape, axis, shape of the mask): rows of whole vectors, odd rows under a broadcast mask, an axis in the middle.
PROBLEMS = (((64, 1024), -1, None), ((4, 16, 1003), -1, (4, 1, 1003)), ((8, 200, 12), 1, None))
# The largest error that rounding explains, in epsilons of the dtype times the largest element: half an epsilon if the arithmetic
# is wider than the result, more if it is not, and most if XLA adds thousands of numbers one after the other.
WIDE = 8.0 if jax.default_backend() == "gpu" else 32.0
TOLERANCE = {"float16": 1.0, "bfloat16": 1.0, "float32": WIDE, "float64": WIDE}
if jax.default_backend() == "cpu":  # there XLA runs the same formulas in every dtype: two are enough, in half the time
    TOLERANCE = {dtype: TOLERANCE[dtype] for dtype in ("bfloat16", "float32")}


def driver_version() -> str:
    try:
        text = pathlib.Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "none"
    found = re.search(r"(\d+\.\d+(\.\d+)?)", text)
    return found[1] if found else text.splitlines()[0]


def show_versions() -> None:
    api = compat.ffi_api_version()
    for name, value in (
        ("jaxkern", jaxkern.__version__),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("jax", jax.__version__),
        ("jaxlib", f"{jaxlib.version.__version__}, XLA FFI {'.'.join(map(str, api)) if api else 'unknown'}"),
        ("NVIDIA driver", driver_version()),
        ("devices", ", ".join(d.device_kind for d in jax.devices())),
    ):
        print(f"{name:14} {value}")
    for name, value in environment.given().items():
        print(f"{'environment':14} {name}={value}")


def show_runtime() -> bool:
    """Prints the paths of the CUDA compiler, its headers and its cache; False if there is a GPU that it cannot compile for."""
    module = registry.kernels.module
    if module is None:
        print(f"{'CUDA runtime':14} not loaded: {registry.kernels.reason}")
        return not registry.gpu_present()
    version, error = module.compiler()
    library, _, includes = runtime.find_nvrtc()
    print(f"{'CUDA runtime':14} loaded, built for XLA FFI {'.'.join(map(str, module.api_version))}")
    needed = "" if registry.gpu_present() else "; without a GPU it is not needed"
    print(f"{'NVRTC':14} " + (f"not usable: {error}{needed}" if error else f"{version}, {library}"))
    print(f"{'CUDA headers':14} {', '.join(includes) or 'included in NVRTC'}")
    print(f"{'kernels':14} {runtime.kernels_folder()}")
    folder = runtime.cache_folder()
    sizes = [entry.bytes for entry in cache.entries(folder)] if folder else []
    print(f"{'kernel cache':14} " + (f"{folder}, {len(sizes)} files, {sum(sizes) / 2**20:.1f} MB" if folder else "off"))
    if environment.xla_only():
        print(f"{'CUDA kernels':14} XLA runs instead: JAXKERN_BACKEND=xla")
        return True
    problem = registry.gpu_present() and runtime.problem(module, device.this_device().compute_capability)
    if problem:
        print(f"{'CUDA kernels':14} XLA runs instead: {problem}")
    return not problem


def expected(operation, x, mask, axis):
    """The operation by numpy, in float64 or wider."""
    x = np.where(mask, x.astype(np.longdouble), -np.inf)
    shifted = x - x.max(axis, keepdims=True)
    total = np.exp(shifted).sum(axis, keepdims=True)
    return np.exp(shifted) / total if operation == "softmax" else shifted - np.log(total)


def expected_gradient(operation, x, y, g, mask, axis):
    """The gradient for the cotangent `g` by numpy; computed from the result `y`, except for log_softmax of wide types."""
    g = np.where(mask, g.astype(np.longdouble), 0)
    if operation == "softmax":
        y = y.astype(np.longdouble)
        return y * (g - (y * g).sum(axis, keepdims=True))
    p = np.exp(y.astype(np.longdouble)) if x.dtype.itemsize <= 2 else expected("softmax", x, mask, axis)
    return np.where(mask, g - p * g.sum(axis, keepdims=True), 0)


def epsilons(found, wanted, dtype) -> float:
    """The largest error in epsilons of `dtype` times the largest element; NaN anywhere is infinite."""
    found, finite = found.astype(np.longdouble), np.isfinite(wanted)
    if not np.array_equal(found[~finite], wanted[~finite]) or not np.isfinite(found[finite]).all():
        return np.inf
    scale = float(jnp.finfo(dtype).eps) * np.abs(wanted[finite]).max()
    return float(np.abs(found[finite] - wanted[finite]).max() / scale)


def check(operation, dtype) -> tuple[float, float]:
    """The worst error of the operation and of its gradient over all problems."""
    f, worst, rng = getattr(jaxkern, operation), [0.0, 0.0], np.random.default_rng(0)
    for shape, axis, mask_shape in PROBLEMS:
        x, g = (jnp.asarray(rng.normal(0, 3, shape), dtype) for _ in range(2))
        mask = None if mask_shape is None else jnp.asarray(rng.random(mask_shape) < 0.8)
        y, pull = jax.vjp(jax.jit(lambda x: f(x, axis, mask)), x)
        (dx,) = pull(g)
        x, g, y, dx = map(np.asarray, (x, g, y, dx))
        mask = np.ones((), bool) if mask is None else np.asarray(mask)
        worst[0] = max(worst[0], epsilons(y, expected(operation, x, mask, axis), dtype))
        worst[1] = max(worst[1], epsilons(dx, expected_gradient(operation, x, y, g, mask, axis), dtype))
    return tuple(worst)


def check_indexed(name, dtype) -> float:
    """The worst error of an operation on rows over even and uneven indices, wide and narrow rows."""
    worst, rng = 0.0, np.random.default_rng(0)
    for rows, count, width, most in ((50, 4000, 1, 60), (300, 900, 130, 300), (40, 500, 17, 1)):
        ids = rng.integers(-3, most, count)
        data = jnp.asarray(rng.normal(size=(count, width)), dtype)
        x = jnp.asarray(rng.normal(size=(rows, width)), dtype)
        wide = lambda a: np.asarray(a).astype(np.longdouble)
        wanted, at = wide(x), ids
        if name == "index_add":
            at = np.where(ids < 0, ids + rows, ids)
            found = jaxkern.index_add(x, 0, ids, data)
        elif name == "index_select":
            at = np.clip(np.where(ids < 0, ids + rows, ids), 0, rows - 1)
            worst = max(worst, epsilons(np.asarray(jaxkern.index_select(x, 0, ids, mode="clip")), wide(x)[at], dtype))
            continue
        else:
            wanted = np.zeros_like(wanted) - (np.inf if name == "segment_max" else 0)
            found = getattr(jaxkern, name)(data, ids, rows)
        kept = (at >= 0) & (at < rows)
        (np.maximum if name == "segment_max" else np.add).at(wanted, at[kept], wide(data)[kept])
        worst = max(worst, epsilons(np.asarray(found), wanted, dtype))
    return worst


def check_reduction(name, dtype) -> float:
    """The worst error of a reduction over all problems."""
    worst, rng = 0.0, np.random.default_rng(0)
    for shape, axis, mask_shape in PROBLEMS:
        x = jnp.asarray(rng.normal(1, 3, shape), dtype)
        kept = np.ones(shape, bool) if mask_shape is None else np.broadcast_to(rng.random(mask_shape) < 0.8, shape)
        found = getattr(jaxkern, name)(x, axis=axis, where=None if mask_shape is None else jnp.asarray(kept))
        x = np.asarray(x).astype(np.longdouble)
        initial = {"reduce_max": {"initial": -np.inf}, "reduce_min": {"initial": np.inf}}.get(name, {})
        if name == "logsumexp":
            wanted = np.log(np.exp(x).sum(axis, where=kept))
        else:
            wanted = getattr(np, name.removeprefix("reduce_"))(x, axis=axis, where=kept, **initial)
        worst = max(worst, epsilons(np.asarray(found), wanted, dtype))
    return worst


def check_loss(dtype) -> tuple[float, float]:
    """The worst error of cross-entropy and of its gradient, with and without smoothing."""
    worst, rng = [0.0, 0.0], np.random.default_rng(0)
    for shape, smoothing in (((64, 1024), 0.0), ((16, 1003), 0.1), ((3, 50257), 0.0)):
        x = jnp.asarray(rng.normal(0, 3, shape), dtype)
        labels = rng.integers(0, shape[1], shape[0])
        f = lambda x: jaxkern.softmax_cross_entropy(x, labels.astype(np.int32), label_smoothing=smoothing)
        loss, pull = jax.vjp(jax.jit(f), x)
        (dx,) = pull(jnp.ones_like(loss))
        logs = expected("log_softmax", np.asarray(x), True, -1)
        target = (np.arange(shape[1]) == labels[:, None]) * (1 - smoothing) + smoothing / shape[1]
        worst[0] = max(worst[0], epsilons(np.asarray(loss), -(logs * target).sum(-1), loss.dtype))
        worst[1] = max(worst[1], epsilons(np.asarray(dx), np.exp(logs) - target, dtype))
    return tuple(worst)


def check_swiglu(dtype) -> tuple[float, float]:
    """The error of swiglu, for all elementwise operations, and of its gradient, over an odd number of columns."""
    rng = np.random.default_rng(0)
    h, g = (jnp.asarray(rng.normal(0, 2, shape), dtype) for shape in ((67, 2 * 1003), (67, 1003)))
    y, pull = jax.vjp(jax.jit(jaxkern.swiglu), h)
    (dh,) = pull(g)
    (x, gate), g = np.split(np.asarray(h).astype(np.longdouble), 2, 1), np.asarray(g).astype(np.longdouble)
    s = 1 / (1 + np.exp(-gate))
    gradient = np.concatenate([g * gate * s, g * x * s * (1 + gate * (1 - s))], 1)
    return epsilons(np.asarray(y), x * gate * s, dtype), epsilons(np.asarray(dh), gradient, dtype)


def check_segment_softmax(dtype) -> tuple[float, float]:
    """The worst error of segment_softmax and of its gradient over even and uneven segments, wide and narrow rows."""
    worst, rng = [0.0, 0.0], np.random.default_rng(0)
    for rows, count, width, most in ((50, 4000, 1, 60), (300, 900, 130, 300), (40, 5000, 17, 1), (90, 6000, 8, 90)):
        ids = rng.integers(-3, most, count)
        data, g = (jnp.asarray(rng.normal(0, 3, (count, width)), dtype) for _ in range(2))
        y, pull = jax.vjp(jax.jit(lambda x: jaxkern.segment_softmax(x, ids, rows)), data)
        found = np.asarray(y), np.asarray(pull(g)[0])
        wanted = [np.zeros((count, width), np.longdouble) for _ in range(2)]
        for segment in range(min(rows, most)):
            at = np.flatnonzero(ids == segment)
            if at.size:
                wanted[0][at] = expected("softmax", np.asarray(data)[at], True, 0)
                wanted[1][at] = expected_gradient("softmax", None, found[0][at], np.asarray(g)[at], True, 0)
        worst = [max(w, epsilons(f, e, dtype)) for w, f, e in zip(worst, found, wanted)]
    return tuple(worst)


def check_norm(dtype) -> tuple[float, float]:
    """The worst error of layer_norm with a residual, for rms_norm too, and of its gradients, over rows of all kinds."""
    worst, rng = [0.0, 0.0], np.random.default_rng(0)
    wide = lambda a: np.asarray(a).astype(np.longdouble)
    for rows, width in ((300, 128), (67, 1003), (9, 4096)):
        x, r, g, scale, bias = (
            jnp.asarray(rng.normal(0, 2, shape), dtype) for shape in (*[(rows, width)] * 3, *[(width,)] * 2)
        )
        f = lambda x, scale, bias, r=r: jaxkern.layer_norm(x, scale, bias, residual=r)
        (y, s), pull = jax.vjp(jax.jit(f), x, scale, bias)
        dx, dscale, dbias = pull((g, jnp.zeros_like(g)))
        d = wide(s) - wide(s).mean(1, keepdims=True)
        rstd = 1 / np.sqrt((d * d).mean(1, keepdims=True) + 1e-6)
        z, h = d * rstd, wide(g) * wide(scale)
        exact = rstd * (h - h.mean(1, keepdims=True) - z * (h * z).mean(1, keepdims=True))
        worst[0] = max(worst[0], epsilons(np.asarray(y), z * wide(scale) + wide(bias), dtype))
        for found, wanted in ((dx, exact), (dscale, (wide(g) * z).sum(0)), (dbias, wide(g).sum(0))):
            worst[1] = max(worst[1], epsilons(np.asarray(found), wanted, dtype))
    return tuple(worst)


def check_group_norm(dtype) -> tuple[float, float]:
    """The worst error of group_norm and batch_norm, and of their gradients, over samples in one pass and in two."""
    worst, rng = [0.0, 0.0], np.random.default_rng(0)
    wide = lambda a: np.asarray(a).astype(np.longdouble)
    shapes = ((4, 1024, 8, 16), (1, 3000, 200, 1), (2, 3000, 1, 264))  # samples, rows, groups, channels of a group
    for samples, rows, groups, within in shapes:
        shape, channels = (samples, rows, groups * within), groups * within
        x, g, scale, bias = (jnp.asarray(rng.normal(1, 2, s), dtype) for s in (shape, shape, channels, channels))
        if within == 1:
            f = lambda *args: jaxkern.batch_norm(*args)[0]
        else:
            f = lambda x, scale, bias, groups=groups: jaxkern.group_norm(x, groups, scale, bias, eps=1e-5)
        y, pull = jax.vjp(jax.jit(f), x, scale, bias)
        split = lambda a: wide(a).reshape(*a.shape[:-1], groups, within)
        mean = lambda a: a.mean((1, 3), keepdims=True)
        d = split(x) - mean(split(x))
        rstd = 1 / np.sqrt(mean(d * d) + 1e-5)
        z, h = d * rstd, split(g) * split(scale)
        exact = rstd * (h - mean(h) - z * mean(h * z))
        gradients = exact.reshape(shape), (split(g) * z).sum((0, 1)).ravel(), wide(g).sum((0, 1))
        worst[0] = max(worst[0], epsilons(np.asarray(y), (z * split(scale) + split(bias)).reshape(shape), dtype))
        for found, wanted in zip(pull(g), gradients, strict=True):
            worst[1] = max(worst[1], epsilons(np.asarray(found), wanted, dtype))
    return tuple(worst)


def check_linear_loss(dtype) -> tuple[float, float]:
    """The error of linear_softmax_cross_entropy and of its gradients by h and weight, with logits in several chunks."""
    rng = np.random.default_rng(0)
    rows, width, classes = 192, 64, 1003
    h, weight = (jnp.asarray(rng.normal(0, s, n), dtype) for s, n in ((1, (rows, width)), (0.125, (width, classes))))
    labels = rng.integers(0, classes, rows).astype(np.int32)
    f = lambda h, weight: jaxkern.linear_softmax_cross_entropy(
        h,
        weight,
        labels,
        logits_dtype="float64" if dtype == "float64" else "float32",
        precision="highest",
        memory=1 << 19,
    )
    loss, gradients = jax.jit(jax.value_and_grad(f, (0, 1)))(h, weight)
    wide, w = (np.asarray(a).astype(np.longdouble) for a in (h, weight))
    logs = expected("log_softmax", (wide @ w).astype(np.float64), True, -1)
    slope = (np.exp(logs) - (np.arange(classes) == labels[:, None])) / rows
    error = epsilons(np.asarray(loss), np.asarray(-logs[np.arange(rows), labels].mean()), loss.dtype)
    found = [epsilons(np.asarray(a), b, dtype) for a, b in zip(gradients, (slope @ w.T, wide.T @ slope))]
    return error, max(found)


def check_quantize(dtype) -> tuple[float]:
    """The worst error of the scales of rows, of blocks and their transpose, and of a norm; infinite if a quantized number
    is not a neighbour of the exact one."""
    worst, rng = 0.0, np.random.default_rng(0)
    x = jnp.asarray(rng.normal(0, 2, (256, 1024)), dtype)
    exact = np.asarray(x).astype(np.longdouble)
    normal = exact / np.sqrt((exact * exact).mean(-1, keepdims=True) + 1e-6)
    blocks, transposed = jaxkern.quantize_blocks(x, transposed=True)
    for (q, scale), wanted in (
        (jaxkern.quantize_rows(x), exact),
        (blocks, exact),
        (transposed, exact.T),
        (jaxkern.rms_norm(x, quantize=jaxkern.Quantization(block=128)), normal),
    ):
        apart = wanted.reshape(len(wanted), scale.shape[-1], -1)
        most = np.abs(apart).max(-1, keepdims=True)
        rounded = np.asarray(q).astype(np.longdouble).reshape(apart.shape) * most / 448
        # Rounding changes a number by up to a 16th of itself, or by half the smallest step.
        near = np.abs(rounded - apart) <= 1.001 * np.maximum(np.abs(apart) / 16, 2.0**-10 * most / 448)
        error = epsilons(np.asarray(scale), most[..., 0] / 448, dtype if dtype != "float64" else "float32")
        worst = max(worst, error if near.all() else np.inf)
    return (worst,)


class Progress:
    """A bar on standard error, if that is a terminal."""

    def __init__(self, total):
        self.total, self.done = total, 0
        self.shown = sys.stderr.isatty()

    def advance(self, what):
        self.done += 1
        if self.shown:
            filled = 30 * self.done // self.total
            print(
                f"\r{'#' * filled}{'.' * (30 - filled)} {self.done}/{self.total} {what:24.24}",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def close(self):
        if self.shown:
            print("\r" + " " * 72 + "\r", end="", file=sys.stderr, flush=True)


def show_checks() -> bool:
    limits = ", ".join(f"{limit:g} for {dtype}" for dtype, limit in TOLERANCE.items())
    print(f"\nlargest error against float64, in epsilons of the dtype; right is up to {limits}")
    checks = {operation: functools.partial(check, operation) for operation in OPERATIONS} | {
        "swiglu": check_swiglu,
        "layer_norm": check_norm,
        "group_norm": check_group_norm,
        "cross_entropy": check_loss,
        "linear_loss": check_linear_loss,
        "quantize": check_quantize,
        "segment_softmax": check_segment_softmax,
    }
    checks |= {operation: functools.partial(check_indexed, operation) for operation in INDEXED}
    checks |= {operation: functools.partial(check_reduction, operation) for operation in REDUCTIONS}
    progress = Progress(len(checks) * len(TOLERANCE))

    def errors_of(job):
        operation, dtype = job
        with compat.enable_x64():
            errors = checks[operation](dtype)
        progress.advance(operation)
        return errors if isinstance(errors, tuple) else (errors,)

    # Run in parallel, since compilers take most of the time.
    jobs = [(operation, dtype) for operation in checks for dtype in TOLERANCE]
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        found = dict(zip(jobs, pool.map(errors_of, jobs)))
    progress.close()
    print(
        f"{'':16}"
        + "".join(f"{d:>22}" for d in TOLERANCE)
        + "\n"
        + f"{'':16}"
        + f"{'forward':>11}{'gradient':>11}" * len(TOLERANCE)
    )
    good = True
    for operation in checks:
        line = f"{operation:16}"
        for dtype, limit in TOLERANCE.items():
            errors = found[operation, dtype]
            good &= all(e <= limit for e in errors)
            line += "".join(f"{e:10.2f}{' ' if e <= limit else '!'}" for e in errors) + " " * 11 * (2 - len(errors))
        print(line.rstrip())
    if not good:
        print("WRONG: the errors marked ! are larger than rounding explains")
    return good


def seconds(f, *args) -> float:
    """Time of a call: the best of three batches, each long enough to hide the dispatch."""
    jax.block_until_ready(f(*args))
    calls, best = 20 if jax.default_backend() == "gpu" else 3, np.inf
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls):
            out = f(*args)
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - start) / calls)
    return best


ALGORITHM = "  algorithm" if jax.default_backend() == "gpu" else ""


def algorithm_of(operation, *sizes, **problem) -> str:
    """The algorithm that runs a problem on this GPU; empty where XLA runs it."""
    return algorithms.choose(operation, *sizes, **problem) if ALGORITHM and registry.kernels_run() else ""


def show_speed() -> None:
    # Larger than the caches, so that the copy moves bytes of memory.
    rows = 65536 if jax.default_backend() == "gpu" else 2048
    print(
        f"\nmilliseconds a call on {jax.devices()[0].device_kind}, [{rows}, 2048]; the gradient reads two arrays, a reduction "
        "writes none"
    )
    print(f"{'':14}{'dtype':>10}{'jaxkern':>10}{'XLA':>10}{'copy':>10}{ALGORITHM}")
    for dtype in ("float32", "bfloat16"):
        x = jax.random.normal(jax.random.key(0), (rows, 2048), dtype)
        copy = seconds(jax.jit(jnp.copy), x)
        for operation in OPERATIONS:
            ours, theirs = (getattr(m, operation) for m in (jaxkern, jax.nn))
            rows_of_table = [("", seconds(jax.jit(ours), x), seconds(jax.jit(theirs), x))]
            # The residuals of the backward pass are arguments, not constants of the program.
            pull = jax.jit(lambda pull, g: pull(g))
            kept = [jax.vjp(f, x)[1] for f in (ours, theirs)]
            rows_of_table.append((" grad", *(seconds(pull, k, x) for k in kept)))
            for name, *times in rows_of_table:
                algorithm = algorithm_of(operation, rows, 2048, dtype=dtype, backward=bool(name))
                line = f"{operation + name:17}{dtype:>7}" + "".join(f"{1e3 * t:10.3f}" for t in (*times, copy))
                print(f"{line}  {algorithm}".rstrip())
        for operation, theirs in (("reduce_sum", jnp.sum), ("logsumexp", jax.nn.logsumexp)):
            last = (jax.jit(functools.partial(f, axis=-1)) for f in (getattr(jaxkern, operation), theirs))
            times = [seconds(f, x) for f in last]
            line = f"{operation:17}{dtype:>7}" + "".join(f"{1e3 * t:10.3f}" for t in (*times, copy))
            print(f"{line}  {algorithm_of(operation, rows, 2048, dtype=dtype)}".rstrip())


def show_norm_speed() -> None:
    rows, width = (32768, 4096) if jax.default_backend() == "gpu" else (1024, 1024)
    print(f"\nmilliseconds a call, layer_norm of [{rows}, {width}], and its gradients by x, scale and bias")
    print(f"{'':14}{'dtype':>10}{'jaxkern':>10}{'XLA':>10}{ALGORITHM}")

    def plain(x, scale, bias):
        wide = x.astype(jnp.float32)
        deviation = wide - wide.mean(-1, keepdims=True)
        rstd = jax.lax.rsqrt(jnp.square(deviation).mean(-1, keepdims=True) + 1e-6)
        return (deviation * rstd * scale + bias).astype(x.dtype)

    scale = jnp.ones(width)
    for dtype in ("float32", "bfloat16"):
        x = jax.random.normal(jax.random.key(0), (rows, width), dtype)
        for name, run in (("", lambda f: f), (" grad", lambda f: lambda *args: jax.vjp(f, *args)[1](args[0]))):
            times = [seconds(jax.jit(run(f)), x, scale, scale) for f in (jaxkern.layer_norm, plain)]
            kind = {"bias": True, "backward": bool(name), "scale_sum": bool(name)}
            algorithm = algorithm_of("layer_norm", rows, width, dtype=dtype, **kind)
            line = f"{'layer_norm' + name:17}{dtype:>7}{''.join(f'{1e3 * t:10.3f}' for t in times)}"
            print(f"{line}  {algorithm}".rstrip())


def show_loss_speed() -> None:
    rows, classes = (8192, 50257) if jax.default_backend() == "gpu" else (64, 50257)
    print(f"\nmilliseconds a call, value_and_grad of the mean cross-entropy of [{rows}, {classes}]")
    print(f"{'':14}{'dtype':>10}{'jaxkern':>10}{'XLA':>10}{ALGORITHM}")

    def plain(x, labels):
        return -jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], -1)[:, 0]

    labels = jax.random.randint(jax.random.key(1), rows, 0, classes)
    for dtype in ("float32", "bfloat16"):
        x = jax.random.normal(jax.random.key(0), (rows, classes), dtype)
        times = [
            seconds(jax.jit(jax.value_and_grad(lambda x, y, f=f: f(x, y).mean())), x, labels)
            for f in (jaxkern.softmax_cross_entropy, plain)
        ]
        algorithm = algorithm_of("softmax_cross_entropy", rows, classes, dtype=dtype, which="both")
        print(f"{'cross_entropy':17}{dtype:>7}{''.join(f'{1e3 * t:10.3f}' for t in times)}  {algorithm}".rstrip())


def show_indexed_speed() -> None:
    rows, count, width = 16934, 116624, 128
    print(f"\nmilliseconds a call, {count} rows of {width} into {rows} segments")
    print(f"{'':14}{'dtype':>10}{'jaxkern':>10}{'XLA':>10}{ALGORITHM}")
    ids = jax.random.randint(jax.random.key(1), count, 0, rows)
    for dtype in ("float32", "bfloat16"):
        data = jax.random.normal(jax.random.key(0), (count, width), dtype)
        times = [
            seconds(jax.jit(lambda d, i, f=module.segment_sum: f(d, i, rows)), data, ids)
            for module in (jaxkern, jax.ops)
        ]
        algorithm = algorithm_of("segment_sum", rows, count, width, dtype=dtype)
        print(f"{'segment_sum':17}{dtype:>7}{''.join(f'{1e3 * t:10.3f}' for t in times)}  {algorithm}".rstrip())


def main() -> int:
    show_versions()
    loaded = show_runtime()
    right = show_checks()
    show_speed()
    show_norm_speed()
    show_loss_speed()
    show_indexed_speed()
    print("\n" + ("all is well" if loaded and right else "something is wrong: see above"))
    return 0 if loaded and right else 1


if __name__ == "__main__":
    sys.exit(main())
