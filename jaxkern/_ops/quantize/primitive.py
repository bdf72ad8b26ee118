"""The primitive of the quantisation of a matrix and its transpose; its derivative is zero.

    quantize_tiles_p  (x [..., M, 128, N, 128][, given [] ])   -> q like x, q_t [..., N, 128, M, 128], scale [..., M, 128, N],
                                                                  scale_t [..., N, 128, M]

in float32 except for x, q and q_t. With a scale that is given the scales are replaced by the largest magnitude of each tile,
[..., M, N].
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxkern._core import compat, define, partition, validate
from jaxkern._core.primitive import bind, set_jvp
from jaxkern._definitions.quantize import on_cpu
from jaxkern._ops.quantize import plan, reference


def permuted(x, dims, dtype):
    """The type of x with these dimensions, in this order; keeps its sharding and varying axes."""
    more = {}
    if not x.sharding.mesh.empty:
        spec = validate.explicit_spec(x)
        more["sharding"] = NamedSharding(x.sharding.mesh, PartitionSpec(*(spec[d] for d in dims)))
    return x.update(shape=tuple(x.shape[d] for d in dims), dtype=jnp.dtype(dtype), weak_type=False, **more)


def _shape(x, *given, dtype):
    *batch, m, row, n, column = range(x.ndim)
    if given:
        return [
            permuted(x, (*batch, m, row, n, column), dtype),
            permuted(x, (*batch, n, column, m, row), dtype),
            permuted(x, (*batch, m, n), "float32"),
        ]
    return [
        permuted(x, (*batch, m, row, n, column), dtype),
        permuted(x, (*batch, n, column, m, row), dtype),
        permuted(x, (*batch, m, row, n), "float32"),
        permuted(x, (*batch, n, column, m), "float32"),
    ]


def _batch(f, prim, operands, dims, **params):
    if any(d is not None for d in dims[1:]):  # each example has a scale of its own: left to XLA
        ys = jax.vmap(functools.partial(f, **params), dims)(*operands)
    else:
        ys = bind(prim, jnp.moveaxis(operands[0], dims[0], 0), *operands[1:], **params)
    return ys, [0] * len(ys)


def _partition(prim, ctx, operands, params):
    batch = [f"d{d}" for d in range(ctx.avals_in[0].ndim - 4)]
    given = len(ctx.avals_in) > 1
    results = [("m", "row", "n", "column"), ("n", "column", "m", "row")]
    results += [("m", "n")] if given else [("m", "row", "n"), ("n", "column", "m")]
    dims = [[*batch, "m", "row", "n", "column"], *[[]] * given, *([*batch, *names] for names in results)]
    shard = lambda over, *parts, **params: prim.bind(*parts, **params)
    return partition.lower(ctx, prim, operands, params, dims, shard, whole={"row", "column"})


quantize_tiles_p = define.primitive(
    "jaxkern_quantize_tiles",
    _shape,
    functools.partial(_batch, reference.quantize_tiles),
    reference.quantize_tiles,
    on_cpu=functools.partial(on_cpu, reference.quantize_tiles, -1),
    several=True,
    makes_nan=False,
    plan=plan.tiles,
    partition=_partition,
    dtypes=plan.DTYPES,
)


def _jvp(prim, primals, tangents, **params):
    del tangents
    found = bind(prim, *primals, **params)
    return found, [compat.zero_tangent(y) for y in found]


set_jvp(quantize_tiles_p, functools.partial(_jvp, quantize_tiles_p))
