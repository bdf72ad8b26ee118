"""Runs every algorithm and plan at the sizes where kernels break, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python -m benchmarks.sanitize [--dtypes ...] [--wide]

Only kernels of this library run: inputs come from NumPy, and each compiled program is one call. With
XLA_PYTHON_CLIENT_ALLOCATOR=platform every array is a separate allocation, so that memcheck detects an
access beyond its end. Values are checked too.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if __name__ == "__main__":  # tests import this file
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks import _sanitize_loops, _sanitize_select  # noqa: E402

# Row bytes at which one algorithm gives way to the next, and those that each algorithm is run around.
EDGES = {
    "lanes": (16, 64, 128, 256, 512),
    "warp": (512, 1024, 2048),
    "block": (2048, 8192, 16384, 32768, 65536),
    "cluster": (16384, 65536, 131072, 262144),
    "streaming": (16, 4096, 65536, 262144),
    "split": (32768, 262144),
    "strided": (16, 48, 96, 512, 2048, 4096),
    "by_hand": (64, 512, 1024, 65536),
}
WIDE = {"cluster": (1 << 20,), "streaming": (2 << 20,), "split": (1 << 20, 4 << 20)}
TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-5, "float64": 1e-12}
LIES = [False, True]  # whether the hints of a call are right
MASK_EVERY = 3  # one width in so many is run with a mask as well


def launched(call: Callable, *operands: Any) -> Any:
    """The results of a program, or None where the algorithm that is forced cannot run an operation of it."""
    try:
        return jax.jit(call)(*map(jax.device_put, operands))
    except ValueError as error:
        if "the algorithm" not in str(error):
            raise
        return None


def widths(algorithm: str, itemsize: int, wide: bool) -> list[int]:
    """Row lengths at each edge and one either side of it, and one that no vector width divides."""
    found = set()
    for edge in EDGES[algorithm] + (WIDE.get(algorithm, ()) if wide else ()):
        at = edge // itemsize
        found |= {at - 1, at, at + 1}
    found.add(max(found) // 2 + 3 | 1)
    return sorted(w for w in found if w > 0)


def shape_of(algorithm: str, width: int) -> tuple[tuple[int, ...], int]:
    """A problem for an algorithm: odd numbers of rows, so that the last block is ragged."""
    if algorithm == "strided":
        return (3, width, 40 if width % 2 else 37), 1  # in vectors, and element by element
    rows = 67 if width <= 2048 else 5 if width <= 65536 else 2
    return (rows, width), 1


def reference(op: str, x: np.ndarray, g: np.ndarray, keep: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """y, and dx as a function of the y given, in float64."""
    dtype = x.dtype
    x = np.where(keep, x.astype(np.float64), -np.inf)
    e = np.exp(x - x.max(axis, keepdims=True))
    total = e.sum(axis, keepdims=True)
    p, g = e / total, np.where(keep, g.astype(np.float64), 0)
    if op == "softmax":
        return p, p * (g - (p * g).sum(axis, keepdims=True))
    with np.errstate(divide="ignore"):
        y = np.log(e) - np.log(total)
    if dtype.itemsize == 2:  # whose logarithms are percents apart
        p = np.exp(y.astype(dtype).astype(np.float64))
    return y, np.where(keep, g - p * g.sum(axis, keepdims=True), 0)


def run(algorithm: str, dtype: str, width: int, masked: bool, direction: str) -> str:
    """Runs both operations once; "" or what went wrong."""
    import jaxkern
    from jaxkern import algorithms

    shape, axis = shape_of(algorithm, width)
    generator = np.random.default_rng(width)
    np_dtype = jnp.dtype(dtype)
    x, g = (generator.standard_normal(shape).astype(np_dtype) for _ in range(2))
    mask = None
    if masked:  # broadcast over the other dimensions, and every row keeps its first element
        mask = generator.random((1, width, 1) if algorithm == "strided" else (1, width)) < 0.8
        mask[:, 0] = True
    keep = np.broadcast_to(True if mask is None else mask, shape)
    operands = [] if mask is None else [jax.device_put(mask)]
    for op in ("softmax", "log_softmax"):
        y, dx = reference(op, x, g, keep, axis)
        given = [x] if direction == "forward" else [x, g]

        def call(x, *rest, op=op):
            mask = rest[-1] if masked else None
            with algorithms.force(**{op: algorithm}):
                value = lambda x: getattr(jaxkern, op)(x, axis, mask)
                return value(x) if direction == "forward" else jax.vjp(value, x)[1](rest[0])[0]

        got = np.asarray(jax.device_get(jax.jit(call)(*map(jax.device_put, given), *operands))).astype(np.float64)
        want = y if direction == "forward" else dx
        with np.errstate(invalid="ignore"):  # -inf against -inf is equal, and their difference nothing
            same = (got == want) | (np.abs(got - want) <= TOLERANCE[dtype] * np.maximum(1, np.abs(want)))
        if not same.all():
            where = np.argwhere(~same)[0].tolist()
            return f"{op} {direction}: wrong at {where} of {shape}, {int((~same).sum())} elements"
    return ""


# The widths that each algorithm is run around with everything fused.
FUSED = {
    "warp": (8, 256, 512),
    "block": (512, 2048, 8192),
    "streaming": (3, 1000, 20000),
    "by_hand": (3, 512, 2048, 20000),
}


def run_fused(algorithm: str, dtype: str, width: int) -> str | None:
    """Runs softmax with everything fused, and its gradient, once; "" or what went wrong, None where the algorithm cannot run it."""
    import jaxkern
    from jaxkern import algorithms

    generator, np_dtype = np.random.default_rng(width), jnp.dtype(dtype)
    shape = (2, 3, 11 if width < 4096 else 3, width)
    x, g = (generator.standard_normal(shape).astype(np_dtype) for _ in range(2))
    wide = np.float64 if dtype == "float64" else np.float32
    bias = generator.standard_normal((1, 3, 1, width)).astype(wide if width % 2 else np_dtype)
    mask = generator.random((2, 1, *shape[2:])) < 0.8
    every = {"scale": 0.5, "bias": bias, "where": mask, "causal": True}
    dropout = {"dropout_rate": 0.3, "dropout_key": np.array([1, 2], np.uint32)}
    found = None
    for more in (every | dropout, every, {"bias": bias}, {"bias": bias, "causal": True}):

        def both(x, g, more=more):
            with algorithms.force(softmax=algorithm):
                y, pull = jax.vjp(lambda x: jaxkern.softmax(x, **more), x)
                return y, pull(g)[0]

        got = launched(both, x, g)
        if got is None:
            continue
        found = ""
        with jax.default_device(jax.devices("cpu")[0]):
            wanted = jax.device_get(jax.jit(both)(x, g))
        for what, a, b in zip(("result", "gradient"), got, wanted):
            a, b = (np.asarray(v).astype(np.float64) for v in (a, b))
            same = np.abs(a - b) <= TOLERANCE[dtype] * np.maximum(1, np.abs(b))
            if not same.all():
                at = np.argwhere(~same)[0].tolist()
                return f"{what} with {', '.join(more)}: wrong at {at} of {shape}, {int((~same).sum())} elements"
    return found


def sanitize_fused(dtypes: list[str]) -> tuple[int, list[str]]:
    """The fused kernels around the edges of their algorithms."""
    done, wrong = 0, []
    for algorithm, dtype in itertools.product(FUSED, dtypes):
        for width in sorted({edge + d for edge in FUSED[algorithm] for d in (-1, 0, 1)}):
            problem = run_fused(algorithm, dtype, width)
            done += problem is not None
            if problem:
                wrong.append(f"fused {algorithm} {dtype} width {width}: {problem}")
    print(f"fused: {done} problems run, {len(wrong)} wrong", flush=True)
    return done, wrong


# Rows, updates and elements of a row: around blocks of 32 and 1024, chunks and bins, aligned and not.
INDEXED = list(itertools.product((1, 33, 5000), (1, 31, 1025, 9001), (1, 3, 8, 65, 260)))
MANY = (300_000, (1 << 22) + 3, 1)  # for the sort's largest tiles, once a plan that sorts


def run_indexed(op: str, plan: str, dtype: str, rows: int, count: int, inner: int, lie: bool) -> str | None:
    """Runs an operation at indices once; "" or what went wrong, None where the plan cannot run it.

    If the hints of the plan are a lie, nothing is right or wrong but where it reads and writes.
    """
    from jaxkern import algorithms

    generator = np.random.default_rng(count)
    hints = {"sorted": plan == "sorted", "unique": plan == "unique", "deterministic": plan != "atomic"}
    if (
        (plan == "unique" and count > rows and not lie)
        or plan not in algorithms.names(op)
        or not algorithms.fits(op, plan, rows, count, inner, dtype, **(hints if op != "index_select" else {}))
    ):
        return None
    index = generator.integers(-rows, 2 * rows, count)
    if not lie:
        honest = {"unique": generator.permutation(rows)[:count], "sorted": np.sort(np.abs(index) % rows)}
        index = honest.get(plan, index)
    x, source = (generator.standard_normal((n, inner)).astype(jnp.dtype(dtype)) for n in (rows, count))
    primitives, wraps = importlib.import_module("jaxkern._ops.indexing.primitive"), op in ("index_add", "index_select")
    rules = primitives.Rules(
        0, wrap=wraps, sorted=plan == "sorted", unique=plan == "unique", deterministic=plan != "atomic", plan=plan
    )
    index = index.astype(np.int32)
    at = np.where((index < 0) & wraps, index + rows, index)
    kept = (at >= 0) & (at < rows)
    if op == "index_select":
        call, operands = lambda x, i: primitives.index_select_p.bind(x, i, rules=rules), (x, index)
        want = np.where(kept[:, None], x[np.clip(at, 0, rows - 1)], 0).astype(np.float64)
    elif op == "index_add":
        call, operands = lambda *a: primitives.index_add_p.bind(*a, rules=rules), (x, index, source)
        want = x.astype(np.float64)
        np.add.at(want, at[kept], source[kept].astype(np.float64))
    else:
        prim = getattr(primitives, f"{op}_p")
        call, operands = lambda s, i: prim.bind(s, i, rows=rows, rules=rules), (source, index)
        start, join = {"segment_max": (-np.inf, np.maximum), "segment_prod": (1.0, np.multiply)}.get(op, (0.0, np.add))
        want = np.full((rows, inner), start)
        join.at(want, at[kept], source[kept].astype(np.float64))
    got = np.asarray(jax.device_get(jax.jit(call)(*map(jax.device_put, operands)))).astype(np.float64)
    if lie:
        return ""
    allowed = TOLERANCE[dtype] * np.maximum(1, np.abs(want)) * 4
    if plan == "atomic":  # one after the other, each sum rounded
        size = np.zeros_like(want)
        np.add.at(size, at[kept], np.abs(source[kept]).astype(np.float64))
        allowed += np.finfo(np.float32).eps * size
    with np.errstate(invalid="ignore"):
        same = (got == want) | (np.abs(got - want) <= allowed)
    if same.all():
        return ""
    return f"wrong at {np.argwhere(~same)[0].tolist()} of {got.shape}, {int((~same).sum())} elements"


INDEXED_OPERATIONS = ("index_add", "segment_sum", "segment_max", "segment_prod", "index_select")


def sanitize_indexed(
    dtypes: list[str], plans: Sequence[str], operations: Sequence[str], quick: bool
) -> tuple[int, list[str]]:
    """These operations at indices in each of these plans that can run them. quick: at a seventh of the sizes."""
    done, wrong = 0, []
    for plan in plans:
        for dtype, op, sizes, lie in itertools.product(
            dtypes,
            operations,
            INDEXED[::7] if quick else [*INDEXED, MANY],
            LIES if plan in ("sorted", "unique") else (False,),
        ):
            if sizes == MANY and (plan not in ("sort", "narrow") or op != "segment_sum"):
                continue
            problem = run_indexed(op, plan, dtype, *sizes, lie)
            done += problem is not None
            if problem:
                wrong.append(f"{plan} {op} {dtype} {sizes}: {problem}")
        print(f"{plan}: {done} problems run so far, {len(wrong)} wrong", flush=True)
    return done, wrong


# Rows of data and elements of a row: around the sizes of runs, tiles, vectors and column tiles.
SEGMENTED = [(1, 1), (7937, 1), (40000, 1), (700, 3), (993, 8), (9000, 8), (497, 16), (3000, 40), (2001, 129)]


def run_segment_softmax(plan: str, dtype: str, count: int, inner: int, segments: int, lie: bool) -> str:
    """The softmax and its gradient once; "" or what went wrong, which a lie about the order can only be by stopping."""
    import jaxkern

    generator = np.random.default_rng(count)
    ids = generator.integers(-2, segments + 2, count).astype(np.int32)
    ids = ids if lie or plan == "sort" else np.sort(ids)
    x, g = (generator.standard_normal((count, inner)).astype(jnp.dtype(dtype)) for _ in range(2))

    def both(x: jax.Array, ids: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, pull = jax.vjp(lambda x: jaxkern.segment_softmax(x, ids, segments, plan == "sorted"), x)
        return y, pull(g)[0]

    found = [np.asarray(a).astype(np.float64) for a in jax.jit(both)(*map(jax.device_put, (x, ids, g)))]
    if lie:
        return ""
    want = [np.zeros((count, inner)) for _ in range(2)]
    for segment in range(segments):
        at = np.flatnonzero(ids == segment)
        if at.size:
            e = np.exp(x[at].astype(np.float64) - x[at].astype(np.float64).max(0))
            want[0][at] = e / e.sum(0)
            y, cotangent = found[0][at], g[at].astype(np.float64)
            want[1][at] = y * (cotangent - (y * cotangent).sum(0))
    for name, a, b in zip(("result", "gradient"), found, want):
        wrong = ~(np.abs(a - b) <= 4 * TOLERANCE[dtype])
        if wrong.any():
            return f"{name} wrong at {np.argwhere(wrong)[0].tolist()} of {a.shape}, {int(wrong.sum())} elements"
    return ""


def sanitize_segment_softmax(dtypes: list[str]) -> tuple[int, list[str]]:
    """Runs both plans with short and long segments, and with ids that do not ascend although they are declared to."""
    done, wrong = 0, []
    for plan, dtype, sizes, segments in itertools.product(("sort", "sorted"), dtypes, SEGMENTED, (1, 40)):
        for lie in LIES if plan == "sorted" else (False,):
            problem = run_segment_softmax(plan, dtype, *sizes, segments, lie)
            done += 1
            if problem:
                wrong.append(f"segment_softmax {plan} {dtype} {sizes} in {segments}: {problem}")
    print(f"segment_softmax: {done} problems run, {len(wrong)} wrong", flush=True)
    return done, wrong


# Widths around the ends of vectors, lane groups, warps and parts.
REDUCED = (1, 3, 8, 15, 32, 33, 127, 129, 256, 513, 1003, 4096, 8201, 70001)


def run_reduction(op: str, algorithm: str, dtype: str, width: int, masked: bool) -> str | None:
    """Runs a reduction in an algorithm once; "" or what went wrong, None where the algorithm cannot run it."""
    from jaxkern import algorithms

    inner = {"strided": (24, 37), "split": (1, 24, 37)}.get(algorithm, (1,))
    inner = inner[width % len(inner)]
    rows = 67 if width <= 2048 else 3
    if width == 1 or not algorithms.fits(op, algorithm, rows, width, inner, dtype):
        return None
    generator = np.random.default_rng(width)
    x = generator.standard_normal((rows, width, inner)).astype(jnp.dtype(dtype))
    mask = generator.random((1, width, 1)) < 0.8 if masked else np.ones((1, 1, 1), bool)
    mask[:, 0] = True
    public = getattr(importlib.import_module("jaxkern.reduction"), op)
    with algorithms.force(**{op: algorithm}):
        call = jax.jit(lambda x, m: public(x, axis=1, where=m)) if masked else jax.jit(lambda x, m: public(x, axis=1))
        got = np.asarray(jax.device_get(call(jax.device_put(x), jax.device_put(mask)))).astype(np.float64)
    x, keep = x.astype(np.float64), np.broadcast_to(mask, x.shape)
    want = {
        "reduce_sum": lambda: x.sum(1, where=keep),
        "reduce_mean": lambda: x.mean(1, where=keep),
        "reduce_max": lambda: x.max(1, where=keep, initial=-np.inf),
        "logsumexp": lambda: np.log(np.exp(x).sum(1, where=keep)),
    }[op]()
    size = np.abs(x).sum(1) if op == "reduce_sum" else 1
    same = np.abs(got - want) <= TOLERANCE[dtype] * np.maximum(size, np.abs(want))
    return (
        "" if same.all() else f"wrong at {np.argwhere(~same)[0].tolist()} of {got.shape}, {int((~same).sum())} elements"
    )


def sanitize_reductions(dtypes: list[str]) -> tuple[int, list[str]]:
    """Every reduction in every algorithm that can run it."""
    from jaxkern import algorithms

    done, wrong = 0, []
    for algorithm in algorithms.names("reduce_sum"):
        for dtype, op, width, masked in itertools.product(
            dtypes, ("reduce_sum", "reduce_mean", "reduce_max", "logsumexp"), REDUCED, (False, True)
        ):
            problem = run_reduction(op, algorithm, dtype, width, masked)
            done += problem is not None
            if problem:
                wrong.append(f"{algorithm} {op} {dtype} width {width}{' masked' if masked else ''}: {problem}")
        print(f"{algorithm}: {done} reductions run so far, {len(wrong)} wrong", flush=True)
    return done, wrong


# Widths around the ends of vectors, lane groups, warps and blocks.
NORMALISED = (1, 7, 8, 31, 64, 76, 128, 257, 512, 1002, 1024, 4097, 8192, 33000, 80000)


def _compare(calls, dtype: str) -> str:
    """The (primitive, reference, operands, parameters) in `calls` whose results differ, as text; empty if none differ."""
    from jaxkern._core.primitive import bind

    for prim, meaning, operands, params in calls:
        call = jax.jit(functools.partial(bind, prim, **params))
        got = jax.device_get(call(*map(jax.device_put, operands)))
        with jax.default_device(jax.devices("cpu")[0]):
            want = meaning(*map(jnp.asarray, operands), **params)
        for a, b in zip(got, want, strict=True):
            a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
            same = np.abs(a - b) <= 4 * TOLERANCE[dtype] * max(1, np.abs(b).max())
            if not same.all():
                return f"{prim.name}: wrong at {np.argwhere(~same)[0].tolist()} of {a.shape}, {int((~same).sum())} elements"
    return ""


def run_norm(op: str, algorithm: str, dtype: str, width: int) -> str | None:
    """Runs a norm and its gradient in an algorithm once; "" or what went wrong, None where the algorithm cannot run it."""
    import jaxkern
    from jaxkern import algorithms
    from jaxkern._definitions.traced import traced
    from jaxkern._engines.rows.primitive import PRIMITIVES

    rows, bias, residual = 67 if width <= 2048 else 5, op == "layer_norm", width % 2 == 0
    kinds = {"bias": bias, "residual": residual, "backward": True, "scale_sum": True}
    if not algorithms.fits(op, algorithm, rows, width, 1, dtype, **kinds):
        return None
    generator, np_dtype = np.random.default_rng(width), jnp.dtype(dtype)
    wide = jnp.dtype(np.float64 if dtype == "float64" else np.float32)
    full, vector = ((rows, width), np_dtype), ((width,), wide)
    names = ["x", *["residual"] * residual, "scale", *["bias"] * bias]
    given = {"numbers": (("eps", 1e-6),), "dtype": np_dtype, "function": None, "algorithm": algorithm}

    def function(names: list[str], **more: bool) -> Any:
        types = tuple(full if name in ("x", "residual") else vector for name in names)
        return traced(getattr(jaxkern, op).operation, tuple(names), types, **given, **more)

    of_sum = [name for name in names if name != "residual"]
    count = len(of_sum)
    gradient = function(of_sum, keeps_x=residual).jvp(range(count)).transpose(range(count, 2 * count))
    calls = []
    for f in (function(names), gradient.select(gradient.used())):
        operands = [generator.standard_normal(a.shape).astype(a.dtype) for a in f.avals]
        calls.append((PRIMITIVES[op].whole, lambda *xs, function: function(*xs), operands, {"function": f}))
    return _compare(calls, dtype)


# Samples, rows, channels, groups, inner: around packs, tiles and the ends of algorithms.
GROUPED = (
    (1, 1, 1, 1, 1),
    (3, 70, 24, 4, 1),
    (2, 700, 40, 4, 1),
    (1, 3000, 7, 7, 1),
    (2, 513, 520, 8, 1),
    (3, 129, 96, 2, 1),
    (2, 4096, 64, 8, 1),
    (1, 9000, 16, 16, 1),
    (2, 1, 12, 3, 77),
    (1, 5, 6, 6, 4096),
    (2, 3, 4, 1, 1000),
)


def run_group_norm(op: str, algorithm: str, dtype: str, sizes: tuple[int, ...]) -> str | None:
    """Runs a norm of groups and its gradient in an algorithm once; "" or what went wrong, None where it cannot run it."""
    from jaxkern import algorithms
    from jaxkern._ops.group_norm import primitive, reference

    samples, rows, channels, groups, inner = sizes
    if not all(algorithms.fits(op, algorithm, *sizes, dtype, dtype, each=samples, backward=b) for b in (False, True)):
        return None
    generator, np_dtype = np.random.default_rng(rows), jnp.dtype(dtype)
    shape = (samples, rows, groups, channels // groups, inner)
    x, g = (generator.standard_normal(shape).astype(np_dtype) for _ in range(2))
    wide = jnp.dtype(np.float64 if dtype == "float64" else np.float32)
    scale, bias = (generator.standard_normal(shape[2:4]).astype(wide) for _ in range(2))
    mean, var = map(np.asarray, reference.moments(jnp.asarray(x), batch=1, channel=2))
    of_mean, of_var = (generator.standard_normal(mean.shape).astype(wide) for _ in range(2))
    common = {"operation": op, "batch": 1, "channel": 2, "algorithm": algorithm}
    eps = common | {"eps": 1e-5}
    own = primitive.PRIMITIVES[op]
    calls = [
        (own.forward, reference.norm, [x, scale, bias], eps | {"keep": 0, "dtype": np_dtype, "function": None}),
        (
            own.grad,
            reference.norm_grad,
            [x, mean, var, scale, g, of_mean, of_var],
            eps | {"keep": 0, "sums": (wide, wide)},
        ),
        (own.moments, reference.moments, [x], common),
        (own.sums, reference.sums, [x, mean, var, g], eps),
    ]
    return _compare(calls, dtype)


def sanitize_group_norms(dtypes: list[str]) -> tuple[int, list[str]]:
    """group_norm, and batch_norm of one sample, forward and backward, in every algorithm that can run them."""
    from jaxkern import algorithms

    done, wrong = 0, []
    for algorithm in algorithms.names("group_norm"):
        for dtype, sizes in itertools.product(dtypes, GROUPED):
            op = "batch_norm" if sizes[0] == 1 and sizes[2] == sizes[3] else "group_norm"
            problem = run_group_norm(op, algorithm, dtype, sizes)
            done += problem is not None
            if problem:
                wrong.append(f"{algorithm} {op} {dtype} {sizes}: {problem}")
        print(f"{algorithm}: {done} norms of groups run so far, {len(wrong)} wrong", flush=True)
    return done, wrong


def sanitize_norms(dtypes: list[str]) -> tuple[int, list[str]]:
    """Both norms, forward and backward, in every algorithm that can run them."""
    from jaxkern import algorithms

    done, wrong = 0, []
    for algorithm in algorithms.names("rms_norm"):
        for dtype, op, width in itertools.product(dtypes, ("rms_norm", "layer_norm"), NORMALISED):
            problem = run_norm(op, algorithm, dtype, width)
            done += problem is not None
            if problem:
                wrong.append(f"{algorithm} {op} {dtype} width {width}: {problem}")
        print(f"{algorithm}: {done} norms run so far, {len(wrong)} wrong", flush=True)
    return done, wrong


# Rows and classes: around packs, batches and the ends of algorithms.
LOSSES = [(rows, width) for rows in (1, 70) for width in (1, 7, 64, 129, 513, 1024, 2049)]
LOSSES += [(540, 129), (5, 9001), (3, 40000), (2, 70001)]


def run_loss(algorithm: str, dtype: str, rows: int, width: int, masked: bool) -> str | None:
    """Runs the loss and its gradient in both ways of the algorithm. Returns "", an error, or None if no way fits."""
    from jaxkern import algorithms
    from jaxkern._core import primitive

    reference = importlib.import_module("jaxkern._ops.cross_entropy.reference")
    kernels = importlib.import_module("jaxkern._ops.cross_entropy.primitive")
    generator = np.random.default_rng(width)
    options = kernels.Options(0.1 if width % 2 else 0.0, 1e-3, -1)
    x = generator.standard_normal((rows, width)).astype(jnp.dtype(dtype))
    wide = np.float64 if dtype == "float64" else np.float32
    labels, g = generator.integers(-1, width, rows).astype(np.int32), generator.standard_normal(rows).astype(wide)
    mask = [generator.random((1, width)) < 0.8] if masked else []
    params = {"axis": 1, "algorithm": algorithm, "options": options}
    with jax.default_device(jax.devices("cpu")[0]):
        want = reference.both(*map(jnp.asarray, (x, labels, g, *mask)), **params)
    x, labels, g, *mask = map(jax.device_put, (x, labels, g, *mask))
    bind = lambda prim: jax.jit(functools.partial(primitive.bind, prim, **params))
    fits = lambda which: algorithms.fits(
        "softmax_cross_entropy", algorithm, rows, width, dtype=dtype, which=which, masked=masked
    )
    found = []
    if fits("loss"):
        loss, *kept = bind(kernels.cross_entropy_p)(x, labels, *mask)
        found.append((loss, want[0]))
        if fits("gradient"):
            found.append((bind(kernels.cross_entropy_grad_p)(x, labels, *kept[:2], g, *kept[2:], *mask), want[-1]))
    if fits("both"):
        both = bind(kernels.cross_entropy_both_p)(x, labels, g, *mask)
        found += [(both[0], want[0]), (both[-1], want[-1])]
    for got, wanted in found:
        got, wanted = (np.asarray(a).astype(np.float64) for a in (got, wanted))
        with np.errstate(invalid="ignore"):
            same = (got == wanted) | (np.abs(got - wanted) <= TOLERANCE[dtype] * np.maximum(1, np.abs(wanted)))
        if not same.all():
            return f"wrong at {np.argwhere(~same)[0].tolist()} of {got.shape}, {int((~same).sum())} elements"
    return "" if found else None


def sanitize_losses(dtypes: list[str]) -> tuple[int, list[str]]:
    """Cross-entropy in every algorithm that can run it."""
    from jaxkern import algorithms

    done, wrong = 0, []
    for algorithm in algorithms.names("softmax_cross_entropy"):
        for dtype, (rows, width), masked in itertools.product(dtypes, LOSSES, (False, True)):
            problem = run_loss(algorithm, dtype, rows, width, masked)
            done += problem is not None
            if problem:
                wrong.append(f"cross_entropy {algorithm} {dtype} {rows}x{width}{' masked' * masked}: {problem}")
        print(f"cross_entropy {algorithm}: {done} problems run so far, {len(wrong)} wrong", flush=True)
    return done, wrong


def sanitize_quantize(dtypes: list[str]) -> tuple[int, list[str]]:
    """Rows in every algorithm, to every type, against the definition on the CPU."""
    from jaxkern import algorithms, quantize_rows
    from jaxkern._definitions.quantize import quantize
    from jaxkern._ops.quantize import plan

    done, wrong = 0, []
    for dtype, to, width in itertools.product(dtypes, plan.TYPES, (1, 7, 24, 128, 130, 513, 1024, 2056, 8200)):
        if dtype not in plan.DTYPES:
            continue
        x = np.random.default_rng(width).standard_normal((71, width)).astype(jnp.dtype(dtype))
        with jax.default_device(jax.devices("cpu")[0]):
            q, scale = (np.asarray(a).astype(np.float64) for a in quantize(jnp.asarray(x), dtype=to))
        for algorithm in algorithms.names("quantize_rows"):
            if width == 1 or not algorithms.fits("quantize_rows", algorithm, *x.shape, dtype=dtype):
                continue
            with algorithms.force(quantize_rows=algorithm):
                found = jax.jit(functools.partial(quantize_rows, dtype=to))(jax.device_put(x))
            other, scales = (np.asarray(a).astype(np.float64) for a in found)
            done += 1
            # If a factor is rounded differently, few elements move to a neighbour.
            if (q != other).mean() > 2e-3 or not np.allclose(scale, scales[:, 0], rtol=1e-6):
                wrong.append(
                    f"quantize {algorithm} {dtype} to {to} 71x{width}: {int((q != other).sum())} elements differ"
                )
    for label, call, operands in _quantize_calls(dtypes):
        with jax.default_device(jax.devices("cpu")[0]):
            want = jax.jit(call)(*map(jnp.asarray, operands))
        found = jax.jit(call)(*map(jax.device_put, operands))
        done += 1
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            narrow = a.dtype.itemsize == 1
            a, b = (np.asarray(v).astype(np.float64) for v in (a, b))
            # Sums in another order move few elements to a neighbour.
            if (a != b).mean() > 5e-3 if narrow else not np.allclose(a, b, rtol=2 * TOLERANCE["float32"], atol=0.0):
                wrong.append(f"{label}: {int((a != b).sum())} elements of {a.shape} differ")
    print(f"quantize: {done} problems run so far, {len(wrong)} wrong", flush=True)
    return done, wrong


def _quantize_calls(dtypes: list[str]) -> Iterator[tuple[str, Callable[..., Any], list[Any]]]:
    """(label, function, operands): norms that quantize, in all algorithms; one scale for all; transposed copies."""
    from jaxkern import Quantization, algorithms, layer_norm, quantize_blocks, quantize_tensor, rms_norm
    from jaxkern._ops.quantize import plan

    def norm(x, scale, residual, *, name, algorithm, how):
        more = {"residual": residual, "quantize": how}
        with algorithms.force(**{name: algorithm}):
            return layer_norm(x, scale, -scale, **more) if name == "layer_norm" else rms_norm(x, scale, **more)

    for n, dtype in enumerate(d for d in dtypes if d in plan.DTYPES):
        to = list(plan.TYPES)[n % 3]
        for width, algorithm in itertools.product(
            (7, 64, 128, 384, 1024, 1032, 8192, 33024), algorithms.names("rms_norm")
        ):
            rows = 67 if width <= 1024 else 5
            generator = np.random.default_rng(width)
            normal = lambda *shape: generator.standard_normal(shape).astype(np.float32)
            x, more = (normal(rows, width).astype(jnp.dtype(dtype)) for _ in range(2))
            name = ("rms_norm", "layer_norm")[width % 3 % 2]
            if not algorithms.fits(name, algorithm, rows, width, 1, dtype, residual=True):
                continue
            for how in (Quantization(to), Quantization(to, scale=0.02), Quantization(to, 32), Quantization(to, 128)):
                if width % (how.block or 1) == 0:
                    label = f"{name} {algorithm} {dtype} {rows}x{width} to {how}"
                    yield (
                        label,
                        functools.partial(norm, name=name, algorithm=algorithm, how=how),
                        [x, normal(width), more],
                    )
        for shape in ((128, 128), (2, 256, 384)):
            x = np.random.default_rng(0).standard_normal(shape).astype(jnp.dtype(dtype))
            yield f"transposed {dtype} {shape}", functools.partial(quantize_blocks, dtype=to, transposed=True), [x]
            tensor = functools.partial(quantize_tensor, dtype=to, scale=0.02, transposed=True)
            yield f"one scale {dtype} {shape}", tensor, [x]


def sanitize_elementwise(dtypes: list[str]) -> tuple[int, list[str]]:
    """A few operations around packs and tiles, with operands that broadcast, in halves, and of mixed types."""
    import jaxkern

    swiglu = lambda x: x[:, : x.shape[1] // 2] * jax.nn.silu(x[:, x.shape[1] // 2 :])
    found = {
        "gelu": lambda x, y: (jaxkern.gelu(x, approximate=False), jax.nn.gelu(x, approximate=False)),
        "less": lambda x, y: (jaxkern.less(x, y), x < y),
        "add, bias": lambda x, y: (jaxkern.add(x, y[:1]), x + y[:1]),
        "where, scale": lambda x, y: (jaxkern.where(x > 0, y[:, :1], x), jnp.where(x > 0, y[:, :1], x)),
        "cast": lambda x, y: (jaxkern.cast(x, "int8"), x.astype("int8")),
        "leaky_relu": lambda x, y: (jaxkern.leaky_relu(x), jax.nn.leaky_relu(x)),
        "swiglu": lambda x, y: (jaxkern.swiglu(x), swiglu(x)),
        "swiglu backward": lambda x, y: tuple(
            jax.vjp(f, x)[1](y[:, : x.shape[1] // 2])[0] for f in (jaxkern.swiglu, swiglu)
        ),
    }
    done, wrong = 0, []
    generator = np.random.default_rng(0)
    for (name, both), dtype, shape in itertools.product(
        found.items(), dtypes, ((1, 2), (3, 34), (5, 130), (67, 1024), (9, 40002), (517, 4096))
    ):
        x, y = (jax.device_put(generator.standard_normal(shape).astype(jnp.dtype(dtype))) for _ in range(2))
        got, want = (np.asarray(a).astype(np.float64) for a in jax.jit(both)(x, y))
        done += 1
        if not (np.abs(got - want) <= 4 * TOLERANCE[dtype] * np.maximum(1, np.abs(want))).all():
            wrong.append(f"elementwise {name} {dtype} {shape}")
    print(f"elementwise: {done} problems run, {len(wrong)} wrong", flush=True)
    return done, wrong


def sanitize_elementwise_kernel(dtypes: list[str]) -> tuple[int, list[str]]:
    """A user function and its gradients, which are summed in the kernel, around packs, tiles and chunks."""
    import jaxkern

    def gate(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
        return jnp.tanh(x * y + z) * jax.nn.sigmoid(x)

    done, wrong = 0, []
    generator = np.random.default_rng(0)
    for dtype, shape, cut in itertools.product(
        dtypes, ((1, 2), (3, 34), (5, 130), (67, 1024), (9, 40002), (517, 4096)), ("none", "bias", "scale", "scalar")
    ):
        x, y, g = (jax.device_put(generator.standard_normal(shape).astype(jnp.dtype(dtype))) for _ in range(3))
        z = {"none": y, "bias": y[0], "scale": y[:, :1], "scalar": y[0, 0]}[cut]
        wide = [a.astype(jnp.float32) for a in (x, y, z, g)]
        both = lambda f, x, y, z, g: (f(x, y, z), *jax.vjp(f, x, y, z)[1](g))
        got = jax.jit(functools.partial(both, jaxkern.elementwise_kernel(gate)))(x, y, z, g)
        want = jax.jit(functools.partial(both, gate))(*wide)
        done += 1
        for k, (a, b) in enumerate(zip(got, want)):
            a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
            terms = np.sqrt(x.size / max(1, b.size))
            if not (np.abs(a - b) <= 4 * TOLERANCE[dtype] * terms * np.maximum(1, np.abs(b))).all():
                wrong.append(f"elementwise_kernel {cut} {dtype} {shape} result {k}")
    print(f"elementwise_kernel: {done} problems run, {len(wrong)} wrong", flush=True)
    return done, wrong


def sanitize_row_kernel(dtypes: list[str], quick: bool) -> tuple[int, list[str]]:
    """A norm with a scale and its gradients, along the last axis and across it, by every algorithm, around packs and tiles.

    quick: one problem for each algorithm and axis, the first that it can run of those that are not tiny.
    """
    import jaxkern

    done, wrong = 0, []
    generator = np.random.default_rng(0)
    shapes = ((1, 2), (3, 34), (101, 700), (37, 130), (67, 1024), (5, 777), (9, 5000), (3, 40002))
    # 101 rows side by side are read in packs, 37 one by one.
    left = {(axis, odd): list(jaxkern.algorithms.names("row_kernel")) for axis in (1, 0) for odd in (True, False)}
    for dtype, shape, axis in itertools.product(dtypes, shapes[2:] if quick else shapes, (1, 0)):

        def norm(x: jax.Array, w: jax.Array, axis: int = axis) -> jax.Array:
            return x * jax.lax.rsqrt(jnp.mean(x * x, axis, keepdims=True) + 1e-3) * jnp.expand_dims(w, 1 - axis)

        own = left[axis, shape[0] == 101]
        shape = shape if axis else shape[::-1]
        x, g = (jax.device_put(generator.standard_normal(shape).astype(jnp.dtype(dtype))) for _ in range(2))
        w = jax.device_put(generator.standard_normal(shape[axis]).astype(jnp.dtype(dtype)))
        both = lambda f, x, w, g: (f(x, w), *jax.vjp(f, x, w)[1](g))
        want = jax.jit(functools.partial(both, norm))(*(a.astype(jnp.float32) for a in (x, w, g)))
        for algorithm in list(own):
            try:
                with jaxkern.algorithms.force(row_kernel=algorithm):
                    got = jax.jit(functools.partial(both, jaxkern.row_kernel(norm, axis=axis)))(x, w, g)
            except ValueError:  # the algorithm cannot run the forward pass or the gradient
                continue
            done += 1
            if quick:
                own.remove(algorithm)
                print(f"  {algorithm} {shape} axis {axis}", flush=True)
            for k, (a, b) in enumerate(zip(got, want)):
                a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
                terms = np.sqrt(x.size / max(1, b.size))
                if not (np.abs(a - b) <= 4 * TOLERANCE[dtype] * terms * np.maximum(1, np.abs(b))).all():
                    wrong.append(f"row_kernel {algorithm} {dtype} {shape} axis {axis} result {k}")
    print(f"row_kernel: {done} problems run, {len(wrong)} wrong", flush=True)
    return done, wrong


def sanitize_score(dtypes: list[str]) -> tuple[int, list[str]]:
    """Softmax and cross-entropy of a score function and all their gradients, with operands of several widths, around the edges of algorithms."""
    import jaxkern
    from jaxkern import algorithms

    def score(s, b, q, k, bias, kind, slope):
        return jnp.where(kind + k > 2, jnp.tanh(s) * 2 + bias + slope * (q - b) / 32, -jnp.inf)

    def plain(x, bias, kind, slope, mask):
        b, q, k = (jax.lax.broadcasted_iota(jnp.int32, x.shape, d) for d in range(3))
        s = jnp.where(mask, score(x, b, q, k, bias, kind, slope), -jnp.inf)
        return jnp.where(s == -jnp.inf, 0, jax.nn.softmax(jnp.where(s == -jnp.inf, -1e30, s)))

    done, wrong = 0, []
    generator = np.random.default_rng(0)
    for algorithm, edges in FUSED.items():
        for dtype, width in itertools.product(dtypes, sorted({e + d for e in edges for d in (-1, 0, 1)})):
            normal = lambda *shape: jax.device_put(generator.standard_normal(shape).astype(jnp.dtype(dtype)))
            x, g, bias, slope = normal(2, 33, width), normal(2, 33, width), normal(33, width), normal(2, 1, 1)
            kind = jax.device_put(generator.integers(0, 5, (2, 1, width)).astype(np.int8))
            mask = jax.device_put(generator.random((33, width)) < 0.8)

            def ours(x, bias, kind, slope, mask):
                return jaxkern.softmax(x, where=mask, score=score, score_args=[bias, kind, slope])

            labels = jax.device_put(generator.integers(0, width, (2, 33)).astype(np.int32))

            def our_loss(x, bias, kind, slope, mask):
                y = jaxkern.softmax_cross_entropy(x, labels, where=mask, score=score, score_args=[bias, kind, slope])
                return jnp.where(jnp.isfinite(y), y, 0)

            def plain_loss(*operands):
                p = jnp.take_along_axis(plain(*operands), labels[..., None], -1)[..., 0]
                return jnp.where(p > 0, -jnp.log(jnp.where(p > 0, p, 1)), 0)

            def both(f, loss, x, g, bias, slope):
                y, pull = jax.vjp(lambda x, bias, slope: f(x, bias, kind, slope, mask), x, bias, slope)
                z, back = jax.vjp(lambda x, bias, slope: loss(x, bias, kind, slope, mask), x, bias, slope)
                return y, *pull(g), z, *back(g[..., 0].astype(z.dtype))

            with algorithms.force(softmax=algorithm):
                got = launched(functools.partial(both, ours, our_loss), x, g, bias, slope)
            if got is None:
                continue
            wide = [a.astype(jnp.float32) for a in (x, g, bias, slope)]
            want = jax.jit(functools.partial(both, plain, plain_loss))(*wide)
            done += 1
            for n, (a, b) in enumerate(zip(got, want)):
                a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
                terms = np.sqrt(x.size / b.size)
                if not (np.abs(a - b) <= 8 * TOLERANCE[dtype] * terms * np.maximum(1, np.abs(b))).all():
                    wrong.append(f"score {algorithm} {dtype} width {width} result {n}")
    print(f"score: {done} problems run, {len(wrong)} wrong", flush=True)
    return done, wrong


# Nodes, edges and features: around vectors, chunks of long rows and rows that one thread has.
MESSAGES = [(1, 1, 1), (7, 40, 3), (33, 1025, 8), (40, 900, 33), (300, 5003, 128), (5, 3000, 260)]


def _messages(name: str, plain: bool, graph, x, y, w):
    """An operation on a graph by this library, or in plain JAX; y: per receiver, w: per edge and head."""
    import jaxkern

    def f(x, y, w):
        return jnp.tanh(x) * w + y

    senders, receivers, nodes = graph.senders, graph.receivers, graph.num_receivers
    valid = (senders >= 0) & (senders < nodes) & (receivers >= 0) & (receivers < nodes)
    ends = jnp.where(valid, receivers, nodes)
    if name == "graph_attention":
        score = lambda a, b: jnp.tanh(a + b)
        a, b = x[:, 0], y[:, 0]
        if not plain:
            return jaxkern.graph_attention(score, graph, x, senders=a, receivers=b)
        e = jnp.where(valid, jnp.exp(score(a[senders], b[receivers])), 0)
        total = jax.ops.segment_sum(e, ends, nodes)
        y = jax.ops.segment_sum(e[:, None] * x[senders], ends, nodes)
        return y / jnp.where(total == 0, 1, total)[:, None]
    if not plain:
        y = getattr(jaxkern, name)(f, graph, senders=x, receivers=y, edges=w)
        return jnp.where(jnp.isfinite(y), y, 0)
    m = jnp.where(valid[:, None], f(x[senders], y[receivers], w), 0)
    if name == "edge_map":
        return m
    reduce = jax.ops.segment_max if name == "edge_max" else jax.ops.segment_sum
    y = reduce(m, ends, nodes)
    return jnp.where(jnp.isfinite(y), y, 0)


def sanitize_messages(dtypes: list[str]) -> tuple[int, list[str]]:
    """Messages and their gradients, of edges that pad and of a node that half of all edges end at; bags and experts."""
    import jaxkern

    done, wrong = 0, []
    generator = np.random.default_rng(0)

    def compare(label, dtype, ours, plain, *operands):
        nonlocal done
        print(f"  {label} {dtype}", flush=True)  # if the sanitizer does not survive it
        wide = [a.astype(jnp.float32) for a in operands]

        def both(f, *operands):
            y, pull = jax.vjp(f, *operands)
            return y, *pull(jnp.ones_like(y) / 2)

        done += 1
        for k, (a, b) in enumerate(zip(jax.jit(functools.partial(both, ours))(*operands), both(plain, *wide))):
            a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
            size = np.maximum(1, np.abs(b).max(initial=0))
            if not (np.abs(a - b) <= 8 * TOLERANCE[dtype] * size).all():
                wrong.append(f"messages {label} {dtype} result {k}")

    names = ("edge_sum", "edge_max", "edge_map", "graph_attention")
    for dtype, (nodes, edges, width), name in itertools.product(dtypes, MESSAGES, names):
        ends = generator.integers(-1, nodes + 1, (2, edges)).astype(np.int32)
        ends[1, ::2] = nodes // 2
        graph = jaxkern.Graph(*ends, num_nodes=nodes)
        normal = lambda *shape: jax.device_put(generator.standard_normal(shape).astype(jnp.dtype(dtype)))
        x, y, w = normal(nodes, width), normal(nodes, width), normal(edges, 1)
        of = lambda plain: functools.partial(_messages, name, plain, graph)
        operands = (x, y, w)
        compare(f"{name} {nodes} {edges} {width}", dtype, of(False), of(True), *operands)
    for dtype, (rows, bags, width) in itertools.product(
        dtypes, ((1, 1, 1), (50, 33, 8), (1000, 259, 65), (40, 21, 4120))
    ):
        table = jax.device_put(generator.standard_normal((rows, width)).astype(jnp.dtype(dtype)))
        ids = generator.integers(-1, rows + 1, (bags, 5)).astype(np.int32)
        weights = jax.device_put(generator.standard_normal((bags, 5)).astype(jnp.dtype(dtype)))
        inside = ((ids >= 0) & (ids < rows))[..., None]
        plain = lambda table, weights: jnp.where(inside, table[ids % rows] * weights[..., None], 0).sum(1)
        label = f"{rows} {bags} {width}"
        bag = lambda table, weights: jaxkern.embedding_bag(table, ids, weights=weights)
        compare(f"embedding_bag {label}", dtype, bag, plain, table, weights)
        combine = lambda table, weights: jaxkern.moe_combine(table, ids, weights)
        compare(f"moe_combine {label}", dtype, combine, plain, table, weights)
        tokens = jax.device_put(generator.standard_normal((bags, width)).astype(jnp.dtype(dtype)))
        spread = lambda x: jnp.zeros((rows, width), x.dtype).at[np.where(inside[..., 0], ids, rows)].add(x[:, None])
        dispatch = lambda x: jaxkern.moe_dispatch(x, ids, rows)
        compare(f"moe_dispatch {label}", dtype, dispatch, spread, tokens)
    print(f"messages: {done} problems run, {len(wrong)} wrong", flush=True)
    return done, wrong


FAMILIES = (
    "softmax",
    "fused",
    "score",
    "elementwise",
    "elementwise_kernel",
    "row_kernel",
    "scan",
    "associative_scan",
    "while_loop",
    "reduction",
    "norm",
    "group_norm",
    "cross_entropy",
    "quantize",
    "index_add",
    "segment_softmax",
    "messages",
    "select",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", default="float32,bfloat16", help="dtypes, from float16,bfloat16,float32,float64")
    parser.add_argument("--algorithms", default=",".join(EDGES), help="algorithms of softmax")
    parser.add_argument("--plans", default="", help="plans of index_add and its family")
    parser.add_argument("--only", default=",".join(FAMILIES), help="families of operations; all: %(default)s")
    parser.add_argument("--indexed", default=",".join(INDEXED_OPERATIONS), help="operations of index_add's family")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few problems of row_kernel, loops and index_add, for racecheck in 40 s each",
    )
    parser.add_argument("--wide", action="store_true", help="rows of 1 MB and more as well")
    parser.add_argument(
        "--honest",
        action="store_true",
        help="only correct hints; for initcheck, since with a wrong hint kernels may read scratch that nothing wrote",
    )
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    if unknown := set(only) - set(FAMILIES):
        parser.error(f"no such family: {', '.join(sorted(unknown))}")
    if arguments.honest:
        LIES.remove(True)
    if "float64" in arguments.dtypes:
        jax.config.update("jax_enable_x64", True)
    from jaxkern import algorithms

    wrong, done, skipped = [], 0, 0
    for algorithm in arguments.algorithms.split(",") if "softmax" in only else ():
        for dtype in arguments.dtypes.split(","):
            for n, width in enumerate(widths(algorithm, jnp.dtype(dtype).itemsize, arguments.wide)):
                shape, axis = shape_of(algorithm, width)
                inner = shape[2] if len(shape) == 3 else 1
                # Hand-written kernels take masks in `sanitize_fused`.
                masks = (False, True) if n % MASK_EVERY == 0 and algorithm != "by_hand" else (False,)
                for direction, masked in itertools.product(("forward", "backward"), masks):
                    backward = direction == "backward"
                    if not algorithms.fits("softmax", algorithm, shape[0], width, inner, dtype, backward=backward):
                        skipped += 1
                        continue
                    problem = run(algorithm, dtype, width, masked, direction)
                    done += 1
                    if problem:
                        wrong.append(f"{algorithm} {dtype} width {width}{' masked' if masked else ''}: {problem}")
        print(
            f"{algorithm}: {done} problems run so far, {skipped} do not fit their algorithm, {len(wrong)} wrong",
            flush=True,
        )
    plans = (
        arguments.plans.split(",")
        if arguments.plans
        else (*algorithms.names("index_add"), *algorithms.names("index_select"))
    )
    others = {
        "fused": sanitize_fused,
        "score": sanitize_score,
        "index_add": lambda dtypes: sanitize_indexed(dtypes, plans, arguments.indexed.split(","), arguments.quick),
        "segment_softmax": sanitize_segment_softmax,
        "select": lambda dtypes: _sanitize_select.sanitize_select(dtypes, arguments.quick),
        "reduction": sanitize_reductions,
        "norm": sanitize_norms,
        "group_norm": sanitize_group_norms,
        "cross_entropy": sanitize_losses,
        "quantize": sanitize_quantize,
        "elementwise": sanitize_elementwise,
        "elementwise_kernel": sanitize_elementwise_kernel,
        "row_kernel": lambda dtypes: sanitize_row_kernel(dtypes, arguments.quick),
        "scan": lambda dtypes: _sanitize_loops.sanitize_scans(dtypes, arguments.quick, TOLERANCE),
        "associative_scan": lambda dtypes: _sanitize_loops.sanitize_associative_scans(
            dtypes, arguments.quick, TOLERANCE
        ),
        "while_loop": lambda dtypes: _sanitize_loops.sanitize_while_loops(dtypes, arguments.quick, TOLERANCE),
        "messages": sanitize_messages,
    }
    for family, sanitize in others.items():
        if family in only:
            more, found = sanitize(arguments.dtypes.split(","))
            done, wrong = done + more, wrong + found
    print(*wrong, sep="\n")
    print(f"sanitize: {done} problems on {jax.devices()[0].device_kind}, {len(wrong)} wrong")
    return int(bool(wrong) or done == 0)


if __name__ == "__main__":
    sys.exit(main())
