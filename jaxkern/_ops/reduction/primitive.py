"""The primitives of the row reductions.

    reduce_sum_p              sum(x)
    reduce_mean_p             sum(x) / count
    reduce_max_p              max(x)
    reduce_min_p              min(x)
    logsumexp_p               log(sum(exp(x)))
    logsumexp_statistics_p    logsumexp, the largest element and the sum of exp(x - largest)

along one axis, which the result lacks, each with an optional mask of the elements to reduce.
"""

import functools

from jaxkern._core import algorithms, partition
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind
from jaxkern._core.rows import row_primitive
from jaxkern._ops.reduction import plan, reference, sharding

algorithms.register(plan, "reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "logsumexp")

FLOATS = ("float16", "bfloat16", "float32", "float64")
NUMBERS = tuple(dtype for dtype in plan.DTYPES if dtype != "bool")


def _primitive(name, op, reference, split, dtypes=FLOATS, **options):
    launches = functools.partial(plan.reduce, op)
    return row_primitive(f"jaxkern_{name}", 1, reference, launches, split, dtypes=dtypes, **options)


_maximum, _minimum = (functools.partial(sharding.extreme, found) for found in (partition.largest, partition.smallest))
reduce_sum_p = _primitive("reduce_sum", "sum", reference.reduce_sum, sharding.reduce_sum, plan.DTYPES)
reduce_mean_p = _primitive("reduce_mean", "mean", reference.reduce_mean, sharding.reduce_mean(reduce_sum_p))
reduce_max_p = _primitive("reduce_max", "max", reference.reduce_max, _maximum, NUMBERS)
reduce_min_p = _primitive("reduce_min", "min", reference.reduce_min, _minimum, NUMBERS)
logsumexp_statistics_p = _primitive(
    "logsumexp_statistics", "logsumexp", reference.statistics, sharding.statistics, several=True
)
logsumexp_p = _primitive("logsumexp", "logsumexp", reference.logsumexp, sharding.logsumexp(logsumexp_statistics_p))


def statistics(x, *mask, axis, algorithm, dtype=None):
    """logsumexp of each row in `dtype` (default: of x), the row's largest element, and the sum of exp(x - largest).

    The sum is 0 where the largest element is -inf, and equals it where it is inf or NaN.
    """
    wide = computing(x.dtype)
    return bind(logsumexp_statistics_p, x, *mask, axis=axis, algorithm=algorithm, dtype=(dtype or x.dtype, wide, wide))
