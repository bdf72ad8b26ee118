"""Selections, sorts, searches and counts of plain JAX programs under `jaxkern.accelerate`: the plain program's bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerated import PLATFORM
from jax import lax

import jaxkern

NAMES = ("top_k", "sort", "searchsorted", "bincount")
forced = jaxkern.accelerate(only=NAMES, force=True)
rng = np.random.default_rng(0)


def numbers(shape, dtype="float32"):
    """Few numbers, so that many are equal; of floats NaN of both signs, infinities and both zeros among them."""
    x = rng.integers(-3, 4, shape).astype(np.float32)
    if jnp.issubdtype(dtype, jnp.floating):
        for special in (np.nan, -np.nan, -0.0, np.inf, -np.inf):
            x[rng.random(shape) < 0.1] = special
    return jnp.asarray(x).astype(dtype)


X, HALF, BYTES, WORDS = (
    numbers((4, 37)),
    numbers((3, 40), "bfloat16"),
    numbers((3, 40), "int8"),
    numbers((5, 9), "uint32"),
)
POSITIVE = jnp.exp(jnp.nan_to_num(X))  # medians sort unstably, so the order of zeros is not known, and compute with NaN
FINITE, ORDER, QUERIES = jnp.nan_to_num(X, posinf=7), jnp.sort(numbers((30,))), numbers((2, 50))
IDS = jnp.asarray(rng.integers(-3, 20, (4, 60)), jnp.int32)
METHODS = ("scan", "scan_unrolled", "sort", "compare_all")


def loop(x):
    return lax.scan(lambda c, row: (c + 1, (jnp.sort(row)[:2], lax.top_k(row, 2)[1])), 0, x)[1]


def of_flipped(x):
    ends = jnp.flip(-jnp.sort(x), 1)
    return ends[:, 1:4], jnp.argsort(-x, axis=0)[-1]


def at_indices(x):
    """Indices whose equations NumPy computes otherwise, or cannot."""
    third = lax.select_n(jnp.int32(2), *map(jnp.int32, (5, 6, 7)))
    rounded = lax.round(jnp.float32(2.5)).astype(int)
    large = (jnp.float32(1e9) * 1e9).astype(int), (jnp.float32(100) * 2.6).astype("uint8")
    return [lax.dynamic_index_in_dim(jnp.sort(x), at, 1) for at in (third, rounded, *large)]


@jax.jit
def searchsorted(array, queries):
    """No search, by the name and with the equations of one."""
    return jnp.searchsorted(array, -queries)


# {name: (f, its operands, what is taken; "part" is a sort that becomes a selection)}
PROGRAMS = {
    "top_k": (lambda x, y: (lax.top_k(x, 5), lax.top_k(y, 3)), (X, HALF), "top_k top_k"),
    "top_k of many": (lambda x: lax.top_k(x, 1030), (numbers((2, 1100), "bfloat16"),), "top_k"),
    "top_k of integers": (lambda x, y: (lax.top_k(x, 5), lax.top_k(y > 1, 3)), (BYTES, WORDS), "top_k top_k"),
    "approx_max_k": (lambda x: (lax.approx_max_k(x, 5)[0], lax.approx_min_k(x, 5)[0]), (FINITE,), "part top_k"),
    "top_k of an axis": (lambda x: jax.vmap(functools.partial(lax.top_k, k=2), 1)(x), (X,), "top_k"),
    "sort": (lambda x: (jnp.sort(x), jnp.sort(x, 0), jnp.sort(x, descending=True)), (X,), "sort sort sort"),
    "argsort": (lambda x: (jnp.argsort(x), jnp.argsort(x, 0, descending=True)), (X,), "sort sort"),
    "sort of integers": (lambda x, y: (jnp.sort(x), jnp.argsort(y)), (BYTES, WORDS), "sort sort"),
    "pairs": (lambda x, y: lax.sort([x, y, x + y], num_keys=1), (X, FINITE), "sort"),
    "an index that is the same": (
        lambda x: lax.sort([x, jnp.broadcast_to(lax.iota(jnp.int32, 1), x.shape)], num_keys=1),
        (X,),
        "sort",
    ),
    "two keys": (lambda x, y: lax.sort([x, y], num_keys=2), (X, FINITE), ""),
    "first": (
        lambda x, y: (jnp.sort(x)[:, :5], jnp.sort(y, 0)[:2], jnp.argsort(x)[:, :3]),
        (X, HALF),
        "part part part",
    ),
    "last": (
        lambda x, y: (jnp.sort(x)[:, -5:], jnp.sort(x)[:, -3], jnp.argsort(y)[:, -4:]),
        (X, HALF),
        "part part part",
    ),
    "ends of integers": (lambda x, y: (jnp.sort(x)[:, -5:], jnp.argsort(y)[:, :3]), (BYTES, WORDS), "part part"),
    "both ends": (lambda x: (lambda s: (s[:, :2], s[:, -2:]))(jnp.sort(x)), (X,), "sort"),
    "flipped": (of_flipped, (X,), "part part"),
    "descending": (
        lambda x: (jnp.argsort(x, descending=True)[:, :5], jnp.sort(x, descending=True)[:, 2]),
        (X,),
        "part part",
    ),
    "known index": (lambda x: lax.dynamic_index_in_dim(jnp.sort(x), 35, 1), (X,), "part"),
    "indices of other functions": (at_indices, (X,), "sort"),
    "bytes": (lambda x: lax.bitcast_convert_type(jnp.sort(x), jnp.uint8)[:, :3], (X,), "sort"),
    "pairs of few": (lambda x, y: [a[:, :3] for a in lax.sort([x, y], num_keys=1)], (X, FINITE), "part"),
    "median": (lambda x: (jnp.median(x, -1), jnp.percentile(x, 90, axis=1)), (POSITIVE,), "part part"),
    "quantile that is traced": (lambda x, q: jnp.quantile(x, q, axis=1), (X, jnp.float32(0.2)), "sort"),
    "gradients": (
        jax.grad(lambda x: (lax.top_k(x, 3)[0] ** 2).sum() + (jnp.sort(x)[:, :3] ** 2).sum()),
        (FINITE,),
        "sort top_k",
    ),
    "vmap": (jax.vmap(lambda x: (jnp.argsort(x)[:3], lax.top_k(x, 2), jnp.median(x))), (POSITIVE,), "part part top_k"),
    "scan": (loop, (X,), "part top_k"),
    "remat": (jax.grad(jax.checkpoint(lambda x: (jnp.sort(x)[:, -2] ** 2).sum())), (FINITE,), "sort"),
    **{
        f"searchsorted {side}": (
            lambda a, q, side=side: [jnp.searchsorted(a, q, side=side, method=method) for method in METHODS],
            (ORDER, QUERIES),
            "searchsorted searchsorted searchsorted searchsorted",
        )
        for side in ("left", "right")
    },
    "searches": (
        lambda a, q, i: (jnp.digitize(q, a), jax.vmap(lambda q: jnp.searchsorted(a, q))(q), jnp.searchsorted(i, i)),
        (ORDER, QUERIES, jnp.sort(IDS[0])),
        "searchsorted searchsorted searchsorted searchsorted",
    ),
    "a function of the same name": (lambda a, q: searchsorted(a, q), (ORDER, QUERIES), "searchsorted"),
    "searches of batches": (jax.vmap(jnp.searchsorted), (jnp.sort(X, 1), X), ""),
    "bincount": (
        lambda i: (jnp.bincount(i[0], length=17), jax.vmap(lambda i: jnp.bincount(i, length=9))(i)),
        (IDS,),
        "bincount bincount",
    ),
    "ones": (
        lambda i: (
            jnp.zeros(11).at[i].add(1),
            jnp.arange(11).at[i].add(3, mode="clip"),
            jnp.zeros(99, "uint8").at[i].add(2),
        ),
        (IDS,),
        "bincount bincount bincount",
    ),
    "small indices": (lambda i: jnp.zeros(99, jnp.int32).at[i].add(1), (IDS.astype(jnp.int8),), "bincount"),
    "histogram": (lambda x: jnp.histogram(x, 7), (FINITE,), "bincount searchsorted"),
    "other numbers": (
        lambda i: [jnp.zeros(11).at[i].add(n) for n in (jnp.nan, jnp.inf, 0.5, 2.0, True)],
        (IDS,),
        "bincount",
    ),
    "numbers that types change": (
        lambda i: [
            jnp.zeros(11, t).at[i].add(jnp.full(i.shape, n).astype(by).astype(t))
            for n, by, t in (
                (2, "bool", "int32"),
                (257, "uint8", "int32"),
                (-1, "uint32", "uint32"),
                (1e30, "int32", "int32"),
            )
        ],
        (IDS,),
        "",
    ),
    "rows of ones": (lambda i: jnp.zeros((11, 3)).at[i].add(1), (IDS,), ""),
    "sums": (lambda i, x: (jnp.ones(11).at[i].add(1), jnp.zeros(11).at[i].add(x[:, 0, None])), (IDS, FINITE), ""),
}


def bits(x):
    return np.atleast_1d(np.asarray(x)).view(np.uint8)


def assert_equal(plain, own):
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(own), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(bits(a), bits(b))


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name):
    f, args, expected = PROGRAMS[name]
    jitted = jax.jit(f)
    plain = jitted(*args)
    with forced:
        own = jitted(*args)
        found = jaxkern.explain(jitted, PLATFORM)(*args)
    assert_equal(plain, own)
    taken = sorted("part" if "in place" in d.reason else d.operation for d in found.taken)
    assert taken == sorted(expected.split()), found


# (f, shape, type, why it is taken or left)
LEFT = ("are few", "are many", "as fast", "XLA ", "no ")
DECIDED = [
    (jnp.sort, (4, 4), "float32", "are few"),
    (jnp.sort, (1024, 32), "float32", "are few"),
    (jnp.sort, (1, 4096), "bfloat16", "rows in one kernel"),
    (jnp.sort, (8, 1024), "float32", "rows in one kernel"),
    (jnp.sort, (1, 1 << 24), "int32", "digit by digit"),
    (lambda x: lax.sort([x, x > 0], num_keys=1), (1, 1 << 24), "int32", "as fast"),
    (jnp.argsort, (64, 16384), "int32", "digit by digit"),
    (jnp.argsort, (1, 1 << 24), "float32", "digit by digit"),
    (lambda x: lax.sort([x, x * x], num_keys=1), (1, 1 << 24), "float32", "digit by digit"),
    (lambda x: lax.sort([x, x * x], num_keys=1), (1024, 1024), "float32", "rows in one kernel"),
    (lambda x: lax.top_k(x, 900), (4096, 1024), "float32", "sorted in one kernel"),
    (lambda x: lax.top_k(x, 100), (4096, 1024), "float32", "a selection"),
    (lambda x: lax.top_k(x, 2), (32768, 8), "float32", "sorted in one kernel"),
    (lambda x: lax.top_k(x, 64), (4096, 256), "bfloat16", "sorted in one kernel"),
    (lambda x: lax.top_k(x, 8), (1024, 64), "bfloat16", "a selection"),
    (jnp.argsort, (1024, 1024), "int8", "no sort of 2 arrays by int8"),
    (lambda x: lax.top_k(x, 10000), (64, 20000), "float32", "digit by digit"),
    (lambda x: lax.top_k(x, 1), (4096, 1024), "float32", "XLA reduces"),
    (lambda x: lax.top_k(x, 50), (128, 128256), "bfloat16", "a selection"),
    (jnp.median, (4096, 1024), "float32", "digit by digit"),
    (lambda x: jnp.sort(x)[:, :50], (128, 128256), "float32", "in place of a sort: 50 of 128256"),
    (lambda x: jnp.sort(x)[:, :500], (1024, 1024), "float32", "rows in one kernel"),
    (lambda x: jnp.sort(x)[:, :30], (1024, 512), "float32", "rows in one kernel"),
    (lambda x: jnp.searchsorted(x[0], x[1, :8]), (2, 1 << 16), "float32", "all steps in one kernel"),
    (lambda x: jnp.searchsorted(x[0], x[1, :8], method="compare_all"), (2, 1 << 16), "float32", "XLA has one"),
    (lambda x: jnp.bincount(x, length=100), (1 << 20,), "int32", "counts in shared memory"),
    (lambda x: jnp.bincount(x, length=1 << 20), (1 << 20,), "int32", "are many"),
]


@pytest.mark.parametrize("f, shape, dtype, why", DECIDED)
def test_the_gate(f, shape, dtype, why):
    decisions = jaxkern.explain(f)(jax.ShapeDtypeStruct(shape, dtype))
    found = next(d for d in decisions if d.operation in NAMES)  # what is left may be listed as a loop or a scatter, too
    assert why in found.reason and found.taken != why.startswith(LEFT), found


def test_switched_off():
    x = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    with jaxkern.accelerate(without="sort"):
        assert not len(jaxkern.explain(jnp.sort)(x))
