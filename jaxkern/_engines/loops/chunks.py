"""Loops in chunks of steps, whose gradient recomputes a chunk rather than keeping its residuals."""

import jax
import jax.numpy as jnp
from jax import lax


def checkpointed(loop, init, xs, length, reverse, every):
    """(carry, ys) of loop(init, xs, length), which runs `every` steps at a time under `jax.checkpoint`.

    loop(carry, xs, length): a scan in the direction that `reverse` says. If `every` does not divide the number of steps, the
    chunk with the last elements of xs is shorter; it comes first in a reverse scan.

    Raises: ValueError, if the number of steps is symbolic.
    """
    sizes = [jnp.shape(x)[0] for x in jax.tree.leaves(xs) if jnp.ndim(x)]
    steps = length if length is not None else sizes[0] if sizes else None
    if steps is None or any(n != steps for n in sizes):
        return loop(init, xs, length)  # whose error says what is wrong
    if not isinstance(steps, int):
        raise ValueError(f"jaxkern.scan: checkpoint_every needs a number of steps that is known, got {steps}")
    chunks, rest = divmod(steps, every)
    if chunks + (rest > 0) < 2:
        return loop(init, xs, length)
    of_chunks = jax.tree.map(lambda x: jnp.reshape(x[: chunks * every], (chunks, every, *x.shape[1:])), xs)
    chunk = jax.checkpoint(lambda carry, x: loop(carry, x, every), prevent_cse=False)

    def main(carry):
        carry, ys = lax.scan(chunk, carry, of_chunks, length=chunks, reverse=reverse)
        return carry, jax.tree.map(lambda y: y.reshape(chunks * every, *y.shape[2:]), ys)

    if not rest:
        return main(init)
    last = jax.tree.map(lambda x: x[chunks * every :], xs)
    tail = jax.checkpoint(lambda carry: loop(carry, last, rest))
    carry, first = (tail if reverse else main)(init)
    carry, second = (main if reverse else tail)(carry)
    parts = (second, first) if reverse else (first, second)
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), *parts)
