"""Selection, sorts, searches and counts under compute-sanitizer: every algorithm at the limits of its sizes, compared bit by bit."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np

# Rows, columns and k of top_k: around lanes, tiles, buffers and parts.
SELECTED = ((3, 1, 1), (37, 33, 5), (9, 1000, 32), (5, 4097, 1), (3, 9001, 700), (2, 70000, 1024), (1, 300000, 50))
ROUTED = ((9, 3, 1), (5000, 64, 2), (133, 257, 8))  # tokens, experts, k
SORTED = ((70, 3), (33, 64), (5, 257), (3, 2000), (2, 4096), (2, 6000), (1, 40000))


def sanitize_select(dtypes: list[str], quick: bool) -> tuple[int, list[str]]:
    """The problems that ran, and what was wrong."""
    import jaxkern
    from jaxkern import algorithms

    done, wrong = 0, []

    def compare(label, ours, theirs, *operands):
        nonlocal done
        with jax.default_device(jax.devices("cpu")[0]):
            exact = jax.tree.leaves(jax.jit(theirs)(*map(jnp.asarray, operands)))
        found = jax.tree.leaves(jax.jit(ours)(*map(jax.device_put, operands)))
        done += 1
        same = all((np.asarray(a).view(np.uint8) == np.asarray(b).view(np.uint8)).all() for a, b in zip(found, exact))
        if not same:
            wrong.append(label)

    for dtype in (*dtypes, "int32", "uint8"):
        rows = lambda *shape: np.random.default_rng(len(shape)).integers(0, 200, shape).astype(jnp.dtype(dtype))  # noqa: B023
        for (r, columns, k), algorithm in itertools.product(
            SELECTED[quick * 2 :: 1 + quick], algorithms.names("top_k")
        ):
            if algorithms.fits("top_k", algorithm, r, columns, k, dtype):
                with algorithms.force(top_k=algorithm):
                    of = lambda f: lambda x: f(x, k)  # noqa: B023
                    compare(
                        f"top_k {algorithm} {dtype} {r}x{columns} {k}",
                        of(jaxkern.top_k),
                        of(jax.lax.top_k),
                        rows(r, columns),
                    )
        if dtype in ("float32", "bfloat16", "float16"):
            for (tokens, experts, k), capacity in itertools.product(ROUTED[quick:], (None, 5)):
                f = lambda x: jaxkern.moe_route(x, k, capacity)[1:]  # noqa: B023
                compare(f"route {dtype} {tokens}x{experts} {k}", f, f, rows(tokens, experts))
            for r, columns in ((1, 200000), (3, 140001))[quick:]:
                compare(
                    f"median {dtype} {r}x{columns}",
                    lambda x: jaxkern.median(x, 1),
                    lambda x: jnp.median(x, 1),
                    rows(r, columns),
                )
        for (r, columns), algorithm in itertools.product(SORTED[quick * 2 :: 1 + quick], algorithms.names("sort")):
            f = lambda f: lambda x: f(x, descending=columns % 2 == 0)  # noqa: B023
            if algorithms.fits("sort", algorithm, r, columns, dtype):
                with algorithms.force(sort=algorithm):
                    of = f"{algorithm} {dtype} {r}x{columns}"
                    compare(f"argsort {of}", f(jaxkern.argsort), f(jnp.argsort), rows(r, columns))
                    compare(f"sort {of}", f(jaxkern.sort), f(jnp.sort), rows(r, columns))
                    few = rows(r, columns)
                    few[:, columns // 50 : -columns // 50] = 7
                    compare(f"sort of few {of}", f(jaxkern.sort), f(jnp.sort), few)
                    pairs = lambda x: jaxkern.sort_pairs(x, x[::-1])[1]
                    gathered = lambda x: jnp.take_along_axis(x[::-1], jnp.argsort(x), -1)
                    compare(f"sort_pairs {of}", pairs, gathered, rows(r, columns).astype(jnp.dtype(dtype)))
        for size, side in itertools.product((1, 4096, 50000), ("left", "right")):
            search = lambda f: lambda a, x: f(a, x, side=side)  # noqa: B023
            array = np.sort(rows(size).astype(np.float32)).astype(jnp.dtype(dtype))
            compare(
                f"searchsorted {dtype} {size}",
                search(jaxkern.searchsorted),
                search(jnp.searchsorted),
                array,
                rows(7001),
            )
    for dtype, bins, algorithm in itertools.product(("uint8", "int32"), (1, 300, 20000), algorithms.names("bincount")):
        if algorithms.fits("bincount", algorithm, bins, 100003, dtype):
            x = np.random.default_rng(bins).integers(0, 255 if dtype == "uint8" else 30000, 100003).astype(dtype)
            with algorithms.force(bincount=algorithm):
                ours, theirs = lambda x: jaxkern.bincount(x, bins), lambda x: jnp.bincount(x, length=bins)  # noqa: B023
                compare(f"bincount {algorithm} {dtype} {bins}", ours, theirs, x)
    print(f"select: {done} problems run, {len(wrong)} wrong", flush=True)
    return done, wrong
