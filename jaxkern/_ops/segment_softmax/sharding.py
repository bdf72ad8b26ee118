"""segment_softmax on several devices: each computes a part of the result.

Any dimension may be split. If the rows of data are split, devices exchange the maxima and sums of segments.
"""

from jaxkern._core import partition


def partitioned(prim, in_jnp, ctx, operands, rows, rules):
    """Lowers `prim`, whose reference is in_jnp, to parts; operands: the arrays and the index."""
    names = [f"d{d}" for d in range(ctx.avals_out[0].ndim)]
    names[rules.axis] = "count"
    count = len(operands)
    dims = [*[names] * (count - 1), [*names[: rules.batch_dims], "count"], names]

    def shard(over, *parts, rows, rules):
        if over["count"]:
            return in_jnp(*parts, rows=rows, rules=rules, over=over["count"])
        return prim.bind(*parts, rows=rows, rules=rules)

    ctx = ctx.replace(avals_in=ctx.avals_in[:count])
    return partition.lower(ctx, prim, operands, dict(rows=rows, rules=rules), dims, shard, exact={"count"})
