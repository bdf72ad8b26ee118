"""Random selections, sorts, searches and counts, compared with NumPy bit by bit.

    python tests/random_selections.py --seed 7 --seconds 100      runs them on JAX's device; on a GPU each with a random algorithm
    python tests/random_selections.py --seed 7 --first 123 --count 1

A case is determined by its seed and number. Shapes are around the sizes at which kernels change, with rows of length 1 and none,
k from 0 to the row, any axis, NaN of both signs and with payloads, infinities, both zeros, subnormal numbers and many equal ones; calls
are also batched, differentiated, and taken from plain JAX under `accelerate`.
"""

import argparse
import sys
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxkern
from jaxkern import algorithms

FLOATS = ("float32", "float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int32", "int32", "uint32", "int8", "uint8", "int16", "uint16", "int64", "uint64", "bool")
WIDTHS = (
    0,
    1,
    2,
    7,
    8,
    9,
    31,
    32,
    33,
    64,
    100,
    255,
    256,
    257,
    511,
    513,
    1000,
    1024,
    1025,
    2048,
    4095,
    4097,
    8192,
    8193,
    20000,
    70001,
)


class Case:
    """One call: `found` runs it, `exact` is the result in NumPy."""

    def __init__(self, seed, number):
        self.rng, self.number = np.random.default_rng((seed, number)), number
        self.label = ""

    def any(self, values):
        return values[int(self.rng.integers(len(values)))]

    def numbers(self, shape, dtype):
        """Bits of all kinds, so that NaN has payloads; or few different numbers; or normal ones."""
        rng, dtype = self.rng, jnp.dtype(dtype)
        kind = self.any(("bits", "few", "normal", "ascending", "equal"))
        if jax.default_backend() == "cpu" and jnp.issubdtype(dtype, jnp.floating):
            kind = "few" if kind == "bits" else kind  # XLA flushes subnormal numbers there, and has one NaN of 8 bits
        self.label += f" {kind}"
        if dtype.kind == "b":
            return rng.random(shape) < 0.5
        if kind == "bits":
            x = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
        elif jnp.issubdtype(dtype, jnp.floating):
            x = (rng.normal(size=shape) if kind == "normal" else rng.integers(-3, 4, shape)).astype(np.float64)
            special = rng.random(shape) < 0.1 * (kind == "few")
            x = np.where(special, rng.choice([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0], shape), x).astype(dtype)
        else:
            info = jnp.iinfo(dtype)
            low, high = (info.min, info.max) if kind == "normal" else (max(info.min, -3), 3)
            x = rng.integers(
                low, high, shape, dtype=np.int64 if dtype.kind == "i" else np.uint64, endpoint=True
            ).astype(dtype)
        if kind == "equal":
            x = np.full(shape, x.flat[0] if x.size else 0, dtype)
        return (
            np.sort(x.astype(np.float32) if dtype.itemsize < 4 and dtype.kind == "V" else x, -1).astype(dtype)
            if (kind == "ascending" and dtype.kind in "fiu")
            else x
        )

    def shape(self):
        width = self.any(WIDTHS)
        rows = int(self.rng.integers(0, max(2, min(40, 100000 // max(width, 1)))))
        return (rows, width)

    def forced(self, operation, **problem):
        """A random algorithm that fits; none for what has no kernels."""
        sizes = all(problem.get(n, 1) for n in ("rows", "columns", "k", "elements", "bins"))
        wide = operation == "top_k" and "64" in problem["dtype"]
        if jax.default_backend() != "gpu" or not sizes or wide:
            return {}
        names = [n for n in algorithms.names(operation) if algorithms.fits(operation, n, **problem)]
        name = self.any([*names, "auto"])
        self.label += f" {name}"
        return {operation: name}


def total_order(x):
    """Integers in the total order of floats."""
    if x.dtype == bool or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    size = 8 * x.dtype.itemsize
    bits = np.ascontiguousarray(x).view(f"int{size}")
    return np.where(bits < 0, bits ^ np.array(2 ** (size - 1) - 1, bits.dtype), bits)


def sorted_order(x, descending):
    """The stable order of a sort: -0 equals 0, and all NaN are equal."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(np.float64)
        x = np.where(np.isnan(x), np.inf, x), np.isnan(x)
        order = lambda a, b: np.lexsort((a, b), -1)
    else:
        x, order = (x,), lambda a: np.argsort(a, -1, kind="stable")
    if not descending:
        return order(*x)
    return x[0].shape[-1] - 1 - order(*(a[..., ::-1] for a in x))[..., ::-1]


def same(found, exact):
    for n, (a, b) in enumerate(zip(found, exact, strict=True)):
        a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
        if jax.default_backend() == "cpu" and a.dtype.name.startswith("float8"):  # XLA has one NaN there
            a, b = (np.where(np.isnan(c.astype(np.float32)), 0, c) for c in (a, b))
        assert a.shape == b.shape, f"result {n}: shape {a.shape} for {b.shape}"
        b = b.astype(a.dtype) if b.dtype.kind in "iu" else b
        assert a.dtype == b.dtype, f"result {n}: {a.dtype} for {b.dtype}"
        np.testing.assert_array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8), err_msg=f"result {n}")


def along(f, x, axis):
    """f of the last axis, for another one."""
    return lambda a: [jnp.moveaxis(r, -1, axis) for r in f(jnp.moveaxis(a, axis, -1))]


def top_k(case):
    dtype = case.any((*FLOATS, *INTEGERS))
    rows, width = case.shape()
    k = int(case.any([0, min(1, width), width, min(width, 2000), *case.rng.integers(0, width + 1, 4)]))
    case.label = f"top_k {dtype} {rows}x{width} {k}"
    x = case.numbers((rows, width), dtype)
    at = np.argsort(~total_order(x), -1, kind="stable")[..., :k]
    exact, how = [np.take_along_axis(x, at, -1), at], case.any(("plain", "axis", "vmap", "accelerate", "gradient"))
    if how == "gradient" and (not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 4):
        how = "plain"
    case.label += f" {how}"
    with algorithms.force(**case.forced("top_k", rows=rows, columns=width, k=k, dtype=dtype)):
        if how == "axis":
            same([a.T for a in jaxkern.top_k(x.T, k, 0)], exact)
        elif how == "vmap":
            same(jax.jit(jax.vmap(lambda x: jaxkern.top_k(x, k)))(x), exact)
        elif how == "accelerate":
            with jaxkern.accelerate(force=True):
                same(jax.jit(lambda x: lax.top_k(x, k))(x), exact)
        elif how == "gradient":
            weights = case.rng.normal(size=at.shape).astype(x.dtype)
            slope = jax.jit(jax.grad(lambda x: jnp.sum(jnp.where(True, jaxkern.top_k(x, k)[0], 0) * weights)))(x)
            expected = np.zeros_like(x)
            np.put_along_axis(expected, at, weights, -1)
            np.testing.assert_array_equal(slope, expected)
        else:
            same(jaxkern.top_k(x, k), exact)


def function(case):
    """top_k of a function: it returns its values, in order, of the elements at the indices."""
    dtype, (rows, width) = case.any(("float32", "bfloat16")), case.shape()
    k = int(case.rng.integers(0, min(width, 2048) + 1))
    case.label = f"function {dtype} {rows}x{width} {k}"
    x = case.rng.normal(size=(rows, width)).astype(dtype)
    f = lambda x: jnp.sin(x * 3.7 + 0.1) * x + 0.25
    values, at = jaxkern.top_k(x, k, function=f)
    every = np.asarray(f(x.astype(np.float64)))
    values, at = np.asarray(values, np.float64), np.asarray(at)
    assert (np.diff(values, axis=-1) <= 0).all(), "values do not descend"
    assert (np.diff(np.sort(at, -1), axis=-1) > 0).all(), "an index occurs twice"
    # The sine's argument is rounded, and its error grows with x.
    most = float(np.abs(x.astype(np.float64)).max(initial=0))
    tolerance = 1e-5 if dtype == "float32" else 2.0**-8 * (1 + 3.7 * most) * most
    np.testing.assert_allclose(values, np.take_along_axis(every, at, -1), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(values, -np.sort(-every, -1)[..., :k], rtol=tolerance, atol=tolerance)


def sort(case):
    dtype, (rows, width) = case.any((*FLOATS, *INTEGERS)), case.shape()
    descending, how = (
        bool(case.rng.integers(2)),
        case.any(("sort", "pairs", "several", "axis", "vmap", "accelerate", "unbatched")),
    )
    case.label = f"sort {dtype} {rows}x{width} {descending} {how}"
    x = case.numbers((rows, width), dtype)
    at = sorted_order(x, descending)
    exact = [np.take_along_axis(x, at, -1), at]
    of = case.any(("float32", "int32", "bfloat16", "int8", "float64", "bool", "complex64", "float8_e5m2"))
    v = case.numbers((rows, width), of) if of != "complex64" else case.numbers((rows, 2 * width), "float32").view(of)
    follow = np.take_along_axis(v, at, -1)
    call = {"descending": descending}
    with algorithms.force(**case.forced("sort", rows=rows, columns=width, dtype=dtype)):
        if how == "pairs":
            same(jaxkern.sort_pairs(x, v, **call), [exact[0], follow])
        elif how == "several":
            keys, (a, b) = jaxkern.sort_pairs(x, (v, x), **call)
            same([keys, a, b], [exact[0], follow, exact[0]])
        elif how == "axis":
            same([a.T for a in jaxkern.sort_pairs(x.T, v.T, 0, **call)], [exact[0], follow])
        elif how == "vmap":
            same(jax.jit(jax.vmap(lambda x, v: jaxkern.sort_pairs(x, v, **call)))(x, v), [exact[0], follow])
        elif how == "accelerate" and not descending:
            with jaxkern.accelerate(force=True):
                same(jax.jit(lambda x, v: lax.sort([x, v], num_keys=1))(x, v), [exact[0], follow])
                same(jax.jit(jnp.argsort)(x)[None], [at])
        elif how == "unbatched" and rows:
            found = jax.jit(lambda x, v: jax.vmap(lambda v: jaxkern.sort_pairs(x, v, **call)[1])(v))(x[0], v)
            same([found], [np.take_along_axis(v, at[:1], -1)])
        else:
            same([jaxkern.sort(x, **call), jaxkern.argsort(x, **call)], exact)


def search(case):
    dtype = case.any(("float32", "bfloat16", "int32", "uint8", "float64", "uint32", "int64"))
    size, count, side = case.any(WIDTHS), case.any(WIDTHS), case.any(("left", "right"))
    case.label = f"searchsorted {dtype} {size} {count} {side}"
    array, x = case.numbers((size,), dtype), case.numbers((count,), dtype)
    array = array[sorted_order(array, False)]
    wide = lambda a: a.astype(np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a
    same([jaxkern.searchsorted(array, x, side)], [np.searchsorted(wide(array), wide(x), side)])


def count(case):
    dtype, size = (
        case.any(("int32", "uint8", "int8", "int64", "uint32", "int16")),
        case.any(WIDTHS) * case.any((1, 1, 5)),
    )
    bins = int(case.any((1, 2, 100, 256, 4096, 12288, 12289, 100000)))
    case.label = f"bincount {dtype} {size} {bins}"
    x = case.numbers((size,), dtype)
    if case.rng.random() < 0.5:
        x = case.rng.integers(0, min(int(jnp.iinfo(dtype).max), 2 * bins), size, endpoint=True).astype(dtype)
    inside = np.maximum(x, 0)
    exact = np.bincount(inside[inside < bins].astype(np.int64), minlength=bins)
    with algorithms.force(**case.forced("bincount", bins=bins, elements=size, dtype=dtype)):
        same([jaxkern.bincount(x, bins)], [exact])


def ranks(case):
    dtype, (rows, width) = case.any(("float32", "bfloat16", "float16")), case.shape()
    width = max(1, width) * case.any((1, 1, 3))
    case.label = f"quantile {dtype} {rows}x{width}"
    x, method = case.numbers((rows, width), dtype), case.any(("lower", "higher", "nearest"))
    q = float(case.any((0.0, 1.0, 0.5, case.rng.random())))
    found = np.asarray(jaxkern.quantile(x, q, -1, method=method), np.float64)
    position = np.float32(q) * np.float32(width - 1)
    at = int({"lower": np.floor, "higher": np.ceil, "nearest": np.round}[method](position))
    ordered = np.sort(x.astype(np.float64), -1)  # NaN last
    np.testing.assert_array_equal(found, np.where(np.isnan(ordered[:, -1]), np.nan, ordered[:, at]))


def unique(case):
    dtype, size = case.any(("float32", "int32", "bfloat16", "uint8", "bool")), max(1, case.any(WIDTHS))
    wanted = int(case.any((0, 1, 5, size)))
    case.label = f"unique {dtype} {size} {wanted}"
    x = case.numbers((size,), dtype)
    every = dict(return_index=True, return_inverse=True, return_counts=True, size=wanted, fill_value=0)
    found, exact = jaxkern.unique(x, **every), jnp.unique(jnp.asarray(x), **every)
    is_left_out = np.asarray(found[2]) >= wanted
    for a, b in zip(found, exact):
        a, b = np.asarray(a), np.asarray(b)
        if a.shape == is_left_out.shape:
            a, b = np.where(is_left_out, 0, a), np.where(is_left_out, 0, b)
        np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))


def route(case):
    dtype, tokens, experts = (
        case.any(("float32", "bfloat16", "float16")),
        case.any(WIDTHS[:-3]),
        case.any((1, 2, 5, 8, 64, 100, 512, 600)),
    )
    k, capacity = int(case.rng.integers(1, min(experts, 20) + 1)), case.any((None, 0, 3, 100))
    case.label = f"route {dtype} {tokens}x{experts} {k} {capacity}"
    x, whole = case.numbers((tokens, experts), dtype), bool(case.rng.integers(2))
    found = jaxkern.moe_route(x, k, capacity, renormalize=whole)
    at = np.argsort(~total_order(x), -1, kind="stable")[..., :k]
    counts, seen, slots = np.bincount(at.ravel(), minlength=experts), np.zeros(experts, int), np.empty(at.size, int)
    first = np.cumsum(counts) - counts
    for i, e in enumerate(at.ravel()):
        slots[i] = first[e] + seen[e] if capacity is None else e * capacity + seen[e] if seen[e] < capacity else -1
        seen[e] += 1
    same(found[1:], [at, slots.reshape(at.shape), counts])
    p = x.astype(np.float64)
    with np.errstate(all="ignore"):
        p = np.take_along_axis(p, at, -1) if whole else p
        p = np.exp(p - p.max(-1, keepdims=True))
        p = p / p.sum(-1, keepdims=True)
    exact = p if whole else np.take_along_axis(p, at, -1)
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(found[0], np.float64), exact, rtol=tolerance * 4, atol=tolerance)


KINDS = (top_k, top_k, top_k, function, sort, sort, sort, search, count, ranks, unique, route)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1 << 60)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    arguments, wrong = parser.parse_args(), 0
    jax.config.update("jax_enable_x64", True)
    start, number = time.monotonic(), arguments.first
    while number < arguments.first + arguments.count and time.monotonic() - start < arguments.seconds:
        case = Case(arguments.seed, number)
        kind = case.any(KINDS)
        try:
            kind(case)
        except Exception as error:
            wrong += 1
            text = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
            print(f"seed {arguments.seed}, number {number}: {case.label}: {text[-600:]}", flush=True)
        number += 1
    print(f"{number - arguments.first} cases, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
