"""segment_softmax in jnp, by maxima and sums of segments; on several devices with messages.

over: the mesh axes that split the rows of data. Maxima and sums of segments are then over all devices.
"""

import jax.numpy as jnp
from jax import lax

from jaxkern._core.rows import computed
from jaxkern._ops.indexing import primitive as indexing


def totals(index, rows, rules, over=(), empty=0):
    """x -> the sum over its segment for each element of x; any number for an element of no segment.

    empty: what stands for a sum of 0.
    """
    rules = rules._replace(plan="auto")

    def of_segment(x):
        total = indexing.segment_sum(x, index, rows=rows, rules=rules)
        total = lax.psum(total, over) if over else total
        total = jnp.where(total == 0, empty, total) if empty else total
        return indexing.index_select(total, index, rules=rules._replace(clip=True))

    return of_segment


def softmax(data, index, keys=None, order=None, *, rows, rules, over=()):
    if isinstance(rows, int) and rows == 0:
        return jnp.zeros_like(data)
    x = computed(data)
    rules = rules._replace(plan="auto")
    # The result does not depend on the number that is subtracted, so it counts as a constant; maxima have no Taylor series.
    largest = indexing.segment(indexing.segment_max_p, lax.stop_gradient(x), index, rows=rows, rules=rules)
    if over:
        largest = lax.pmax(largest, over)  # may be any number beside a NaN: what it is subtracted from becomes NaN
    base = jnp.where(largest == -jnp.inf, 0, largest)
    exists = _exists(index, rows, rules, x.ndim)
    e = jnp.exp(x - indexing.index_select(base, index, rules=rules._replace(clip=True)))
    total = totals(index, rows, rules, over, empty=1)(e)
    return jnp.where(exists, e / total, 0).astype(data.dtype)


def gradient(y, g, index, keys=None, order=None, *, rows, rules, over=()):
    if isinstance(rows, int) and rows == 0:
        return jnp.zeros_like(y)
    wide = computed(y)
    takes_part = (wide != 0) & _exists(index, rows, rules, y.ndim)
    g = jnp.where(takes_part, computed(g), 0)
    dot = totals(index, rows, rules, over)(jnp.where(takes_part, wide * g, 0))
    return jnp.where(takes_part, wide * (g - dot), 0).astype(y.dtype)


def _exists(index, rows, rules, rank):
    """Whether each element belongs to a segment; its shape broadcasts to the shape of the arrays."""
    exists = jnp.ones(index.shape, bool) if rules.clip else index >= 0
    if not rules.clip and not (isinstance(rows, int) and rows > jnp.iinfo(index.dtype).max):  # rows may be symbolic
        index = index.astype(jnp.int32) if index.dtype.itemsize < 4 else index
        exists &= index < jnp.asarray(rows, index.dtype)
    return jnp.expand_dims(exists, [d for d in range(rank) if not (d < rules.batch_dims or d == rules.axis)])
