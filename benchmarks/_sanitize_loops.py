"""Loops for `benchmarks.sanitize`: steps and lanes around the edges of loads ahead, packs, blocks and tiles."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

SHAPES = (((1,), 1), ((37,), 33), ((3, 130), 5), ((4, 1024), 9), ((2, 2056), 17))


def _recurrence(scan, h, a, x):
    """A carry alone, and its last value."""
    return scan(lambda h, ax: (ax[0] * h + ax[1],) * 2, h, (a, x))


def _gated(scan, c, f, x, w):
    """A weight for each feature, whose gradient is a sum over lanes and steps; a counter; xs from their end."""

    def body(carry, fx):
        c, n = carry
        f, x = fx
        keep = jax.nn.sigmoid(f + w * c)
        c = keep * c + (1 - keep) * x
        return (c, n + 1), (c, n)

    (c, n), (cs, ns) = scan(body, (c, jnp.int32(0)), (f, x), reverse=True)
    return c, cs * (1 + ns.astype(cs.dtype).reshape(-1, *[1] * (cs.ndim - 1)) / 64)


def _normalised(scan, c, f, x, w):
    """A row that is normalised in each step; short ones are multiplied by a matrix, whose gradient is a sum over lanes and steps."""
    n = c.shape[-1]
    matrix = w[:, None] * w / n

    def body(c, fx):
        f, x = fx
        c = f * c + x
        if n <= 130:
            c = c + c @ matrix
        c = c / jnp.sqrt(1 + jnp.mean(c * c, -1, keepdims=True))
        return c, c

    return scan(body, c, (f, x))


def sanitize_scans(dtypes: list[str], quick: bool, tolerance: dict[str, float]) -> tuple[int, list[str]]:
    """Forward and backward, by threads of one lane and of several, and by teams. Returns the number of problems, and what went wrong."""
    import jaxkern
    from jaxkern._engines.loops import tuning

    done, wrong = 0, []
    generator = np.random.default_rng(0)
    few = tuning.VECTOR_THREADS
    try:
        for function, dtype, (shape, length), threads in itertools.product(
            (_recurrence, _gated, _normalised),
            dtypes[: 1 if quick else None],
            SHAPES[-1:] if quick else SHAPES,
            (few, 8),
        ):
            tuning.VECTOR_THREADS = threads
            real = lambda *s: jax.device_put(generator.uniform(0.1, 0.9, s).astype(jnp.dtype(dtype)))
            operands = [real(*shape), real(length, *shape), real(length, *shape)]
            operands += [] if function is _recurrence else [real(shape[-1])]

            def both(scan, *xs, function=function):
                f = functools.partial(function, scan)
                ys, pull = jax.vjp(f, *xs)
                return [*ys, *pull(jax.tree.map(jnp.ones_like, ys))]

            got = jax.jit(functools.partial(both, jaxkern.scan))(*operands)
            # The tools slow down XLA's compiler, and its launches for each step.
            with jax.default_device(jax.devices("cpu")[0]):
                xs = [jnp.asarray(np.asarray(x), jnp.float32) for x in operands]
                want = jax.jit(functools.partial(both, jax.lax.scan))(*xs)
            done += 1
            for k, (a, b) in enumerate(zip(got, want, strict=True)):
                a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
                if not (np.abs(a - b) <= 16 * tolerance[dtype] * np.maximum(1, np.abs(b).max())).all():
                    wrong.append(f"scan {function.__name__} {dtype} {shape} x {length} result {k}")
    finally:
        tuning.VECTOR_THREADS = few
    print(f"scan: {done} problems run, {len(wrong)} wrong", flush=True)
    return done, wrong


LENGTHS = {"warp": (7, 260), "block": (1025, 9001), "tiles": (1025, 40_003)}
LENGTHS |= {"lanes": (3, 129), "columns": (65, 1000), "column_tiles": (65, 5001)}


def _affine(a, b):
    return [a[0] * b[0], b[0] * a[1] + b[1]]


def sanitize_associative_scans(dtypes: list[str], quick: bool, tolerance: dict[str, float]) -> tuple[int, list[str]]:
    """Sums and affine maps by every algorithm, in both directions, and recurrences that are cut in time."""
    import jaxkern
    from jaxkern._engines.loops import tuning
    from jaxkern._engines.loops.associative import associative_scan

    done, wrong = 0, []
    generator = np.random.default_rng(0)

    def check(label, dtype, got, a, b, reverse):
        """a, b of (outer, steps, inner): whether `got` is the recurrence h = a h + b."""
        nonlocal done
        a, b, got = (np.asarray(x).astype(np.float64) for x in (a, b, got))
        a, b, got = (x[:, ::-1] if reverse else x for x in (a, b, got))
        h, want = np.zeros_like(b[:, 0]), np.empty_like(b)
        for k in range(b.shape[1]):
            h = want[:, k] = a[:, k] * h + b[:, k]
        done += 1
        if not (np.abs(got - want) <= 16 * tolerance[dtype] * np.maximum(1, np.abs(want).max())).all():
            wrong.append(f"{label} {dtype} {b.shape}{' reversed' if reverse else ''}")

    for dtype, (algorithm, lengths) in itertools.product(dtypes[: 1 if quick else None], LENGTHS.items()):
        inners = (1,) if algorithm in ("warp", "block", "tiles") else (3, 72)
        for length, inner, reverse in itertools.product(lengths, inners, (False, True)):
            if quick and (length == lengths[0]) == reverse:
                continue
            real = lambda: jax.device_put(generator.uniform(0.1, 0.9, (3, length, inner)).astype(jnp.dtype(dtype)))
            a, b = real(), real()
            shape = (3, length) if inner == 1 else a.shape
            scan = lambda f, *xs: associative_scan(f, xs, axis=1, reverse=reverse)[-1]
            with jaxkern.algorithms.force(associative_scan=algorithm):
                sums = jax.jit(functools.partial(scan, lambda x, y: [x[0] + y[0]]))(b.reshape(shape))
                maps = jax.jit(functools.partial(scan, _affine))(a.reshape(shape), b.reshape(shape))
            check(f"sums {algorithm}", dtype, sums.reshape(b.shape), np.ones(b.shape), b, reverse)
            check(f"maps {algorithm}", dtype, maps.reshape(b.shape), a, b, reverse)
    # A ring of small tiles: blocks take several of them in turn.
    smaller = {"RING_TURNS": 0, "RING_BLOCKS": 1, "RING_BYTES": 4096, "RING_WORDS": 2}
    usual = {name: getattr(tuning, name) for name in smaller}
    for dtype, reverse in itertools.product(dtypes[: 1 if quick else None], (False, True)):
        a, b = (jax.device_put(generator.uniform(0.1, 0.9, 100_003).astype(jnp.dtype(dtype))) for _ in range(2))
        try:
            for name, value in smaller.items():
                setattr(tuning, name, value)
            scan = lambda f, *xs: associative_scan(f, xs, axis=0, reverse=reverse)[-1]
            sums = jax.jit(functools.partial(scan, lambda x, y: [x[0] + y[0]]))(b)
            maps = jax.jit(functools.partial(scan, _affine))(a, b)
        finally:
            for name, value in usual.items():
                setattr(tuning, name, value)
        a, b, sums, maps = (x.reshape(1, -1, 1) for x in (a, b, sums, maps))
        check("sums ring", dtype, sums, np.ones(b.shape), b, reverse)
        check("maps ring", dtype, maps, a, b, reverse)
    cuts = {"columns": (1, 1500, 37), "rows": (1, 40_003, 1)}
    for dtype, (algorithm, shape) in itertools.product(dtypes[: 1 if quick else None], cuts.items()):
        a, b = (jax.device_put(generator.uniform(0.1, 0.9, shape).astype(jnp.dtype(dtype))) for _ in range(2))
        steps = [x.reshape(x.shape[:2]) if algorithm == "rows" else x for x in (a, b)]
        with jaxkern.algorithms.force(scan=algorithm):
            h = jax.jit(functools.partial(jaxkern.linear_recurrence, axis=1))(*steps)
        check(f"linear_recurrence {algorithm}", dtype, h.reshape(shape), a, b, False)
    print(f"associative_scan: {done} problems run, {len(wrong)} wrong", flush=True)
    return done, wrong


def sanitize_while_loops(dtypes: list[str], quick: bool, tolerance: dict[str, float]) -> tuple[int, list[str]]:
    """Newton's method per lane, with fewer lanes than threads and with several lanes for each thread."""
    import jaxkern

    done, wrong = 0, []
    generator = np.random.default_rng(0)
    for dtype, lanes in itertools.product(dtypes[: 1 if quick else None], (5, 1000, 100_003)):
        a = jax.device_put(generator.uniform(1, 9, lanes).astype(jnp.dtype(dtype)))

        def root(a):
            cond = lambda s: (s[1] < 30) & (jnp.abs(s[0] * s[0] - a) > 4 * jnp.finfo(a.dtype).eps * a)
            return jaxkern.while_loop(
                cond, lambda s: ((s[0] + a / s[0]) / 2, s[1] + 1), (a, jnp.zeros(a.shape, "int32"))
            )

        x, steps = jax.jit(root)(a)
        done += 1
        error = np.abs(np.asarray(x).astype(np.float64) - np.sqrt(np.asarray(a).astype(np.float64))).max()
        if not (error <= 16 * tolerance[dtype] and np.asarray(steps).max() <= 30):
            wrong.append(f"while_loop {dtype} {lanes} lanes: {error}")
    print(f"while_loop: {done} problems run, {len(wrong)} wrong", flush=True)
    return done, wrong
