"""Compares operations with float64, for `python -m jaxkern`."""

import concurrent.futures
import functools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxkern
from jaxkern._core import compat, registry

OPERATIONS = ("softmax", "log_softmax")
REDUCTIONS = ("reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "logsumexp")
INDEXED = ("index_add", "index_select", "segment_sum", "segment_max")
SELECTIONS = ("top_k", "sort")
# (shape, axis, shape of the mask): rows of whole vectors, odd rows under a broadcast mask, an axis in the middle.
PROBLEMS = (((64, 1024), -1, None), ((4, 16, 1003), -1, (4, 1, 1003)), ((8, 200, 12), 1, None))


def kernels_run() -> bool:
    """Whether CUDA kernels run the operations of this process."""
    return jax.default_backend() == "gpu" and registry.kernels_run()


def tolerances() -> dict[str, float]:
    """The largest error that rounding explains, in epsilons of each dtype times the largest element.

    It is half an epsilon if the arithmetic is wider than the result, more if it is not, and most if XLA adds thousands of
    numbers one after the other. On a CPU XLA runs the same formulas in every dtype, and one is enough.
    """
    wide = 8.0 if jax.default_backend() == "gpu" else 32.0
    if jax.default_backend() == "cpu":
        return {"float32": wide}
    return {"float16": 1.0, "bfloat16": 1.0, "float32": wide, "float64": wide}


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


def check_selection(name, dtype) -> float:
    """0 if elements and indices are NumPy's, of rows with equal elements; otherwise infinite."""
    rng = np.random.default_rng(0)
    for shape in ((64, 100), (16, 3000), (2, 50000)):
        x = jnp.asarray(np.round(rng.normal(0, 3, shape), 2) + 0.0, dtype)
        wanted = np.argsort(-np.asarray(x, np.float64), axis=-1, kind="stable")
        if name == "top_k":
            values, indices = jaxkern.top_k(x, 20)
            wanted = wanted[:, :20]
        else:
            values, indices = jaxkern.sort(x, descending=True), jaxkern.argsort(x, descending=True)
        exact = np.take_along_axis(np.asarray(x), wanted, -1)
        if not (np.array_equal(indices, wanted) and np.array_equal(values, exact)):
            return np.inf
    return 0.0


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
    tolerance = tolerances()
    limits = ", ".join(f"{limit:g} for {dtype}" for dtype, limit in tolerance.items())
    print(
        "The largest error against NumPy in float64, over arrays of several shapes, for the result (forward) and for the gradients.\n"
        "The unit is the epsilon of the dtype, 1.2e-7 for float32, times the largest element. Rounding explains errors up to\n"
        f"{limits}; larger ones are marked. "
        + ("The CUDA kernels run." if kernels_run() else "No CUDA kernel runs here: this checks what XLA runs instead.")
        + "\n"
    )
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
    checks |= {operation: functools.partial(check_selection, operation) for operation in SELECTIONS}
    progress = Progress(len(checks) * len(tolerance))

    def errors_of(job):
        operation, dtype = job
        with compat.enable_x64():
            errors = checks[operation](dtype)
        progress.advance(operation)
        return errors if isinstance(errors, tuple) else (errors,)

    # Run in parallel, since compilers take most of the time.
    jobs = [(operation, dtype) for operation in checks for dtype in tolerance]
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        found = dict(zip(jobs, pool.map(errors_of, jobs)))
    progress.close()
    print(
        f"{'':16}"
        + "".join(f"{d:>22}" for d in tolerance)
        + "\n"
        + f"{'':16}"
        + f"{'forward':>11}{'gradient':>11}" * len(tolerance)
    )
    good = True
    for operation in checks:
        line = f"{operation:16}"
        for dtype, limit in tolerance.items():
            errors = found[operation, dtype]
            good &= all(e <= limit for e in errors)
            line += "".join(f"{e:10.2f}{' ' if e <= limit else '!'}" for e in errors) + " " * 11 * (2 - len(errors))
        print(line.rstrip())
    if not good:
        print("WRONG: the errors marked ! are larger than rounding explains")
    return good
