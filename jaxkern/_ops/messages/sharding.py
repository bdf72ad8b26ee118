"""Messages on several devices: features may be split, and each device computes its part.

The graph and the first dimension of every array are whole on every device. Sums over features that are split are added
up between the devices.
"""

import jax

from jaxkern._core import partition
from jaxkern._core.dtypes import computing
from jaxkern._ops.messages.primitive import WIDTH


def _features(rank):
    return [f"feature{k}" for k in range(rank)]


def of_reduce(operands, results, **params):
    """Names of the dimensions of each result."""
    return [["rows", *_features(r.ndim - 1)] for r in results]


def of_map(operands, results, *, summed, **params):
    return [["count", *_features(r.ndim - 1)] for r in results]


def partitioned(prim, names_of_results):
    """The rule that lowers `prim` to parts; see `define.lower_to_kernels`."""

    def lower(ctx, operands, params):
        arrays = ctx.avals_in[WIDTH:]
        rank = arrays[0].ndim - 1
        summed = _features(rank)[rank - params.get("summed", 0) :]
        first = {"row": "rows", "other": "others", "edge": "count"}
        # Names of their own, so that XLA does not split the graph as it does what is on the edges.
        dims = [["keys"], ["order"], ["other"], ["offsets"]]
        dims += [[first.get(end, f"one{k}"), *_features(rank)] for k, end in enumerate(params["ends"])]
        dims += names_of_results(ctx.avals_in, ctx.avals_out, **params)
        whole = {
            "rows",
            "others",
            "count",
            "keys",
            "order",
            "other",
            "offsets",
            *(f"one{k}" for k in range(len(arrays))),
        }
        # Sums over features that some operands lack, and no operand has, count those features as they are here.
        shard = lambda over, *parts, **params: _shard(prim, summed, over, *parts, **params)
        return partition.lower(ctx, prim, operands, params, dims, shard, exact=set(summed), whole=whole, summed=summed)

    return lower


def _shard(prim, names, over, *parts, dtypes, **params):
    axes = tuple(a for name in names for a in over.get(name, ()))
    if not axes:
        return prim.bind(*parts, dtypes=dtypes, **params)
    wide = tuple(map(computing, dtypes))
    sums = jax.lax.psum(prim.bind(*parts, dtypes=wide, **params), axes)
    return [s.astype(d) for s, d in zip(sums, dtypes)]
