"""Loops for `benchmarks.sanitize`: elements per step, steps and lanes around the edges of loads ahead, packs and blocks."""

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


def sanitize(dtypes: list[str], quick: bool, tolerance: dict[str, float]) -> tuple[int, list[str]]:
    """Forward and backward, by threads of one lane and of several. Returns the number of problems, and what went wrong."""
    import jaxkern
    from jaxkern._engines.loops import tuning

    done, wrong = 0, []
    generator = np.random.default_rng(0)
    few = tuning.VECTOR_THREADS
    try:
        for function, dtype, (shape, length), threads in itertools.product(
            (_recurrence, _gated), dtypes[: 1 if quick else None], SHAPES[-2:] if quick else SHAPES, (few, 8)
        ):
            tuning.VECTOR_THREADS = threads
            real = lambda *s: jax.device_put(generator.uniform(0.1, 0.9, s).astype(jnp.dtype(dtype)))
            operands = [real(*shape), real(length, *shape), real(length, *shape)]
            operands += [real(shape[-1])] if function is _gated else []

            def both(scan, *xs, function=function):
                f = functools.partial(function, scan)
                ys, pull = jax.vjp(f, *xs)
                return [*ys, *pull(jax.tree.map(jnp.ones_like, ys))]

            got = jax.jit(functools.partial(both, jaxkern.scan))(*operands)
            want = jax.jit(functools.partial(both, jax.lax.scan))(*(x.astype(jnp.float32) for x in operands))
            done += 1
            for k, (a, b) in enumerate(zip(got, want, strict=True)):
                a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
                if not (np.abs(a - b) <= 16 * tolerance[dtype] * np.maximum(1, np.abs(b).max())).all():
                    wrong.append(f"scan {function.__name__} {dtype} {shape} x {length} result {k}")
    finally:
        tuning.VECTOR_THREADS = few
    print(f"scan: {done} problems run, {len(wrong)} wrong", flush=True)
    return done, wrong
