"""Runs every tier and plan at the sizes where kernels break, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python -m benchmarks.sanitize [--dtypes ...] [--wide]

Only kernels of this library run: inputs come from NumPy, and each compiled program is one call. With
XLA_PYTHON_CLIENT_ALLOCATOR=platform every array is an allocation of its own, so that memcheck sees a
step over its edge. Values are checked too.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

# Row bytes at which one tier gives way to the next, and those that each tier is run around.
EDGES = {
    "sub_warp": (16, 64, 128, 256, 512),
    "warp": (512, 1024, 2048),
    "block": (2048, 8192, 16384, 32768, 65536),
    "cluster": (16384, 65536, 131072, 262144),
    "pipeline": (32768, 212992, 425984),
    "streaming": (16, 4096, 65536, 262144),
    "split": (32768, 262144),
    "column": (16, 48, 96, 512, 2048, 4096),
}
WIDE = {"cluster": (1 << 20,), "pipeline": (1 << 20, 2 << 20), "streaming": (2 << 20,), "split": (1 << 20, 4 << 20)}
TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-5, "float64": 1e-12}
MASK_EVERY = 3  # one width in so many is run with a mask as well


def widths(tier: str, itemsize: int, wide: bool) -> list[int]:
    """Row lengths at each edge and one either side of it, and one that no vector width divides."""
    found = set()
    for edge in EDGES[tier] + (WIDE.get(tier, ()) if wide else ()):
        at = edge // itemsize
        found |= {at - 1, at, at + 1}
    found.add(max(found) // 2 + 3 | 1)
    return sorted(w for w in found if w > 0)


def shape_of(tier: str, width: int) -> tuple[tuple[int, ...], int]:
    """A problem for a tier: odd numbers of rows, so that the last block is ragged."""
    if tier == "column":
        return (3, width, 40 if width % 2 else 37), 1  # in vectors, and element by element
    rows = 67 if width <= 2048 else 5 if width <= 65536 else 2
    return (rows, width), 1


def reference(op: str, x: np.ndarray, g: np.ndarray, keep: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """y, and dx as a function of the y given, in float64."""
    x = np.where(keep, x.astype(np.float64), -np.inf)
    e = np.exp(x - x.max(axis, keepdims=True))
    total = e.sum(axis, keepdims=True)
    p, g = e / total, np.where(keep, g.astype(np.float64), 0)
    if op == "softmax":
        return p, p * (g - (p * g).sum(axis, keepdims=True))
    with np.errstate(divide="ignore"):
        return np.log(e) - np.log(total), np.where(keep, g - p * g.sum(axis, keepdims=True), 0)


def run(tier: str, dtype: str, width: int, masked: bool, direction: str) -> str:
    """Runs both operations once; "" or what went wrong."""
    kernels = importlib.import_module("jaxkern.softmax")
    shape, axis = shape_of(tier, width)
    generator = np.random.default_rng(width)
    np_dtype = jnp.dtype(dtype)
    x, g = (generator.standard_normal(shape).astype(np_dtype) for _ in range(2))
    mask = None
    if masked:  # broadcast over the other dimensions, and every row keeps its first element
        mask = generator.random((1, width, 1) if tier == "column" else (1, width)) < 0.8
        mask[:, 0] = True
    keep = np.broadcast_to(True if mask is None else mask, shape)
    operands = [] if mask is None else [jax.device_put(mask)]
    for op in ("softmax", "log_softmax"):
        y, dx = reference(op, x, g, keep, axis)
        name = f"{op}_p" if direction == "forward" else f"{op}_grad_p"
        primitive = getattr(kernels, name)
        given = [x] if direction == "forward" else [y.astype(np_dtype), g]
        call = jax.jit(lambda *a: primitive.bind(*a, axis=axis, tier=tier))
        got = np.asarray(jax.device_get(call(*map(jax.device_put, given), *operands))).astype(np.float64)
        want = y if direction == "forward" else dx
        with np.errstate(invalid="ignore"):  # -inf against -inf is equal, and their difference nothing
            same = (got == want) | (np.abs(got - want) <= TOLERANCE[dtype] * np.maximum(1, np.abs(want)))
        if not same.all():
            return f"{op} {direction}: wrong at {np.argwhere(~same)[0].tolist()} of {shape}, {int((~same).sum())} elements"
    return ""


# Rows, updates and elements of a row: around blocks of 32 and 1024, chunks and bins, aligned and not.
INDEXED = [(rows, count, inner) for rows in (1, 33, 5000) for count in (1, 31, 1025, 9001) for inner in (1, 3, 8, 65, 260)]


def run_indexed(op: str, plan: str, dtype: str, rows: int, count: int, inner: int) -> str | None:
    """Runs an operation at indices once; "" or what went wrong, None where the plan cannot run it."""
    from jaxkern import tiers

    generator = np.random.default_rng(count)
    hints = {"indices_are_sorted": plan == "sorted", "unique_indices": plan == "unique"}
    if (plan == "unique" and count > rows) or not tiers.index_add_fits(
        plan, rows, count, inner, dtype, op=op, deterministic=plan != "atomic", **hints
    ):
        return None
    index = generator.permutation(rows)[:count] if plan == "unique" else generator.integers(-rows, 2 * rows, count)
    index = np.sort(np.abs(index) % rows) if plan == "sorted" else index
    x, source = (generator.standard_normal((n, inner)).astype(jnp.dtype(dtype)) for n in (rows, count))
    primitives, wraps = importlib.import_module("jaxkern._index"), op in ("index_add", "index_select")
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
        want = np.full((rows, inner), -np.inf if op == "segment_max" else 0.0)
        (np.maximum if op == "segment_max" else np.add).at(want, at[kept], source[kept].astype(np.float64))
    got = np.asarray(jax.device_get(jax.jit(call)(*map(jax.device_put, operands)))).astype(np.float64)
    allowed = TOLERANCE[dtype] * np.maximum(1, np.abs(want)) * 4
    if plan == "atomic":  # one after the other, each sum rounded
        size = np.zeros_like(want)
        np.add.at(size, at[kept], np.abs(source[kept]).astype(np.float64))
        allowed += np.finfo(np.float32).eps * size
    with np.errstate(invalid="ignore"):
        same = (got == want) | (np.abs(got - want) <= allowed)
    return "" if same.all() else f"wrong at {np.argwhere(~same)[0].tolist()} of {got.shape}, {int((~same).sum())} elements"


def sanitize_indexed(dtypes: list[str]) -> tuple[int, list[str]]:
    """Every operation at indices in every plan that can run it."""
    from jaxkern import tiers

    done, wrong = 0, []
    for plan in tiers.PLANS:
        for dtype, op, sizes in itertools.product(
            dtypes, ("index_add", "segment_sum", "segment_max", "index_select"), INDEXED
        ):
            problem = run_indexed(op, plan, dtype, *sizes)
            done += problem is not None
            if problem:
                wrong.append(f"{plan} {op} {dtype} {sizes}: {problem}")
        print(f"{plan}: {done} problems run so far, {len(wrong)} wrong", flush=True)
    return done, wrong


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of float16,bfloat16,float32,float64")
    parser.add_argument("--tiers", default=",".join(EDGES), help="of softmax")
    parser.add_argument("--only", choices=("softmax", "index_add", "elementwise"), help="one family of operations")
    parser.add_argument("--wide", action="store_true", help="rows of 1 MB and more as well")
    arguments = parser.parse_args()
    if "float64" in arguments.dtypes:
        jax.config.update("jax_enable_x64", True)
    from jaxkern import tiers

    wrong, done, skipped = [], 0, 0
    for tier in arguments.tiers.split(",") if arguments.only in (None, "softmax") else ():
        for dtype in arguments.dtypes.split(","):
            for n, width in enumerate(widths(tier, jnp.dtype(dtype).itemsize, arguments.wide)):
                shape, axis = shape_of(tier, width)
                inner = shape[2] if len(shape) == 3 else 1
                masks = (False, True) if n % MASK_EVERY == 0 else (False,)
                for direction, masked in itertools.product(("forward", "backward"), masks):
                    backward = direction == "backward"
                    if not tiers.fits(tier, shape[0], width, inner, dtype, backward=backward, masked=masked):
                        skipped += 1
                        continue
                    problem = run(tier, dtype, width, masked, direction)
                    done += 1
                    if problem:
                        wrong.append(f"{tier} {dtype} width {width}{' masked' if masked else ''}: {problem}")
        print(
            f"{tier}: {done} problems run so far, {skipped} do not fit their tier, {len(wrong)} wrong", flush=True
        )
    if arguments.only in (None, "elementwise"):
        more, found = sanitize_elementwise(arguments.dtypes.split(","))
        done, wrong = done + more, wrong + found
    if arguments.only in (None, "index_add"):
        more, found = sanitize_indexed(arguments.dtypes.split(","))
        done, wrong = done + more, wrong + found
    print(*wrong, sep="\n")
    print(f"sanitize: {done} problems on {jax.devices()[0].device_kind}, {len(wrong)} wrong")
    return int(bool(wrong) or done == 0)


if __name__ == "__main__":
    sys.exit(main())
