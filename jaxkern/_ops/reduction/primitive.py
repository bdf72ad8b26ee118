"""The primitives of the row reductions, and how they are lowered.

    reduce_sum_p              sum(x)
    reduce_mean_p             sum(x) / count
    reduce_max_p              max(x)
    reduce_min_p              min(x)
    logsumexp_p               log(sum(exp(x)))
    logsumexp_statistics_p    logsumexp, the largest element and the sum of exp(x - largest)

along one axis, which the result is without, each with an optional mask. A masked-out element takes no part.
"""

import functools

import jax.numpy as jnp
from jax import lax

from jaxkern._core import algorithms, lowering
from jaxkern._core.lowering import INTEGER_DTYPES, KERNEL_DTYPES
from jaxkern._core.primitive import bind, row_primitive
from jaxkern._ops.reduction import plan, reference, sharding

algorithms.register(plan, "reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "logsumexp")

reduce_sum_p = row_primitive("jaxkern_reduce_sum", arrays=1)
reduce_mean_p = row_primitive("jaxkern_reduce_mean", arrays=1)
reduce_max_p = row_primitive("jaxkern_reduce_max", arrays=1)
reduce_min_p = row_primitive("jaxkern_reduce_min", arrays=1)
logsumexp_p = row_primitive("jaxkern_logsumexp", arrays=1)
logsumexp_statistics_p = row_primitive("jaxkern_logsumexp_statistics", arrays=1, several=True)


def statistics(x, *mask, axis, tier, dtype=None):
    """logsumexp of each row in `dtype` (default: of x), the row's largest element, and the sum of exp(x - largest).

    The sum is 0 where the largest element is -inf, and equals it where it is inf or NaN.
    """
    wide = reference.computing(x.dtype)
    return bind(logsumexp_statistics_p, x, *mask, axis=axis, tier=tier, dtype=(dtype or x.dtype, wide, wide))


for _prim, _op, _reference, _split, _dtypes in (
    (
        reduce_sum_p,
        "sum",
        reference.reduce_sum,
        functools.partial(sharding.reduce_sum, reduce_sum_p),
        KERNEL_DTYPES | INTEGER_DTYPES | {jnp.dtype(bool)},
    ),
    (
        reduce_mean_p,
        "mean",
        reference.reduce_mean,
        functools.partial(sharding.reduce_mean, reduce_sum_p),
        KERNEL_DTYPES,
    ),
    (
        reduce_max_p,
        "max",
        reference.reduce_max,
        functools.partial(sharding.extreme, reduce_max_p, 0, lax.pmax),
        KERNEL_DTYPES | INTEGER_DTYPES,
    ),
    (
        reduce_min_p,
        "min",
        reference.reduce_min,
        functools.partial(sharding.extreme, reduce_min_p, 1, lax.pmin),
        KERNEL_DTYPES | INTEGER_DTYPES,
    ),
    (
        logsumexp_p,
        "logsumexp",
        reference.logsumexp,
        functools.partial(sharding.logsumexp, logsumexp_statistics_p),
        KERNEL_DTYPES,
    ),
    (
        logsumexp_statistics_p,
        "logsumexp",
        reference.statistics,
        functools.partial(sharding.statistics, logsumexp_statistics_p),
        KERNEL_DTYPES,
    ),
):
    lowering.register(_prim, 1, _reference, _dtypes, split=_split, plan=functools.partial(plan.reduce, _op))
