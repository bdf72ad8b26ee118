"""Means and variances of rows, along the last dimension, for definitions.

where: None, or a boolean array that broadcasts to x: statistics are of the elements where it is True. All of them are 0 for
a row without such elements.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxkern._definitions.traced import runner


def total(x, where=None):
    return jnp.sum(x if where is None else jnp.where(where, x, 0), -1, keepdims=True)


def count(x, where):
    return jnp.sum(jnp.broadcast_to(where, x.shape), -1, keepdims=True, dtype=x.dtype)


def share(x, where=None):
    """1 / (number of elements), a Python number if no `where` is given and the width is known."""
    if where is not None:
        return 1 / jnp.maximum(count(x, where), 1)
    width = x.shape[-1]
    return 1 / max(width, 1) if isinstance(width, int) else 1 / jnp.asarray(width, x.dtype)


def mean_square(x, where=None, run=None):
    """mean(x^2). Kernels multiply by 1 / width before they add, so that a sum does not overflow where the mean does not.

    XLA:CPU would take a third more time for that, and XLA:GPU would read x twice. run: what runs this, by default `runner`.
    """
    each = share(x, where)
    if (run or runner()) == "kernels":
        return total(x * each * x, where)
    return total(x * x, where) * each


def inverse_root(x, rows, where=None):
    """1 / sqrt(x) of numbers of `rows`."""
    root = lax.rsqrt(x)
    return root if where is None else jnp.where(count(rows, where) == 0, 0, root)


def standardized(x, eps, where=None):
    """(x - mean(x)) / sqrt(var(x) + eps), with the variance from deviations.

    The derivative is written so that its transpose adds up what does not depend on the variance before that is known: two
    dependent reductions in the backward pass in place of JAX's three.
    """
    return _standardized(runner())(x, eps, where)


@functools.cache
def _standardized(run):
    def parts(x, eps, where):
        each = share(x, where)
        mean = total(x, where) * each
        c = x - mean
        r = inverse_root(mean_square(c, where, run) + eps, x, where)
        return c, r, c * r

    @jax.custom_jvp
    def f(x, eps, where):
        return parts(x, eps, where)[2]

    @f.defjvp
    def _(primals, tangents):
        (x, eps, where), t = primals, tangents[0]
        if isinstance(x.shape[-1], int) and x.shape[-1] == 1:  # and not the rounding of t - t, divided by sqrt(eps)
            return parts(x, eps, where)[2], 0 * t
        c, r, z = parts(x, eps, where)
        each = share(x, where)
        of_mean, of_root = total(t, where) * (r * each), total(t * c, where) * (r * r) * (r * each)
        return z, t * r - of_mean - c * of_root

    return f
