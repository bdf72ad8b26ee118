"""From a row primitive to what XLA runs: our kernel on CUDA, the jnp reference elsewhere."""

import jax.numpy as jnp
from jax.interpreters import mlir

from jaxkern._core import compat, define, partition

KERNEL_DTYPES = frozenset(map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)))
INTEGER_DTYPES = frozenset(
    map(jnp.dtype, (jnp.int8, jnp.int16, jnp.int32, jnp.int64, jnp.uint8, jnp.uint16, jnp.uint32, jnp.uint64))
)
MASK_GROUPS = 4  # BroadcastView's limit on alternations of broadcast and other dimensions


def register(prim, arrays: int, reference, dtypes=KERNEL_DTYPES, split=None, plan=None) -> None:
    """Lowers `prim`, a row primitive on `arrays` arrays, to kernels on CUDA and to the reference elsewhere.

    reference(*operands, **params): the same in jnp, for platforms and dtypes without a kernel, and for empty arrays.
    dtypes: those that there is a kernel for.
    split(*parts, over, **params): the same for rows that are split over devices, with a message between those
        along the mesh axes `over`; often the reference, with `partition.row_sums` for what it sums over a row.
        Without it such rows are gathered.
    plan(device, operands, results, **params): the launch list on CUDA, as for `define.lower_to_kernels`. Its mask, if
        there is one, fits a BroadcastView. Without a plan, there is no kernel.
    """
    mlir.register_lowering(prim, mlir.lower_fun(reference, multiple_results=prim.multiple_results))
    compat.taylor_rule(prim, reference)
    if plan is not None:
        _register_kernels(prim, arrays, reference, dtypes, split, plan)


def _register_kernels(prim, arrays, reference, dtypes, split, plan):
    """The lowerings of a row primitive that has a plan."""

    def row_plan(device, operands, results, **params):
        return plan(device, operands, results, **params) if operands[0].dtype in dtypes else None

    def row_partition(ctx, operands, params):
        if ctx.avals_in[0].dtype in dtypes:
            return _partitioned(prim, split, ctx, operands, params)
        return mlir.lower_fun(reference, multiple_results=prim.multiple_results)(ctx, *operands, **params)

    def adapt(*avals, axis, **params):
        mask = avals[arrays:]
        shape = mask_shape(avals[0].shape, mask[0].shape, axis) if mask else None
        return None if not mask or shape == mask[0].shape else with_larger_mask(prim, shape)

    define.lower_to_kernels(prim, row_plan, reference, row_partition, adapt=adapt)


def with_larger_mask(prim, shape):
    """`prim` with its last operand, a mask, broadcast to this shape."""

    def f(*operands, **params):
        return prim.bind(*operands[:-1], jnp.broadcast_to(operands[-1], shape), **params)

    return f


def _partitioned(prim, split, ctx, operands, params):
    """Rows may be anywhere; a row is split as well if there is a `split`."""
    axis = params["axis"]
    names = [f"d{d}" for d in range(ctx.avals_in[0].ndim)]
    names[axis] = "row"
    reduced = names[:axis] + names[axis + 1 :]
    dims = [names if a.ndim == len(names) else reduced for a in (*ctx.avals_in, *ctx.avals_out)]

    def shard(over, *parts, **params):
        if over["row"]:
            return split(*parts, over=over["row"], **params)
        return prim.bind(*parts, **params)

    return partition.lower(
        ctx,
        prim,
        operands,
        params,
        dims,
        shard,
        exact={"row"},
        whole=() if split else {"row"},
        summed=() if dims[-1] is names else ("row",),
    )


def mask_shape(full, part, axis: int):
    """The shape that a mask must be broadcast to before a kernel can read it; mostly its own."""
    if not all(isinstance(d, int) for d in full):
        return full  # nothing is known of a symbolic shape
    if _groups(full[:axis], part[:axis]) > MASK_GROUPS or _groups(full[axis + 1 :], part[axis + 1 :]) > MASK_GROUPS:
        return tuple(full)
    return tuple(part)


def _groups(full, part) -> int:
    """Alternating groups of broadcast and other dimensions, those of size 1 aside."""
    kinds = [b == 1 for a, b in zip(full, part) if a != 1]
    if any(a >= 1 << 32 for a in full):
        return MASK_GROUPS + 1 if len(set(kinds)) > 1 else 1
    return sum(k == 0 or kinds[k] != kinds[k - 1] for k in range(len(kinds)))
