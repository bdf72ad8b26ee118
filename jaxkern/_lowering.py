"""From a row primitive to what XLA runs: our kernel on CPU and CUDA, a jnp reference elsewhere."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from jaxkern import _partition, _registry, _compat

KERNEL_DTYPES = frozenset(map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)))
MASK_GROUPS = 4  # BroadcastView's limit on alternations of broadcast and other dimensions


def register(prim, arrays: int, reference, split=None) -> None:
    """Lowers `prim`, a row primitive on `arrays` arrays, to the target of its own name.

    reference(*operands, axis, tier): the same in jnp, for platforms and dtypes without a kernel, for
        empty arrays, and where the extension module is missing.
    split(*parts, over, axis, tier): the same for rows that are split over devices, with a message between those
        along the mesh axes `over`; often the reference, with `_partition.row_sums` for what it sums over a row.
        Without it such rows are gathered.
    """
    mlir.register_lowering(prim, mlir.lower_fun(reference, multiple_results=False))
    _compat.taylor_rule(prim, reference)
    for platform, module in _registry.status.items():
        if prim.name in module.targets:
            rule = functools.partial(_lower, prim, arrays, reference, split, platform)
            _compat.needs_devices(prim)
            mlir.register_lowering(prim, rule, platform=platform)


def _lower(prim, arrays, reference, split, platform, ctx, *operands, axis, tier):
    avals = ctx.avals_in
    x, mask = avals[0], avals[arrays:]
    through = functools.partial(mlir.lower_fun, multiple_results=False)
    if x.dtype not in KERNEL_DTYPES or 0 in x.shape:
        return through(reference)(ctx, *operands, axis=axis, tier=tier)
    if _compat.may_partition_itself(ctx) and all(isinstance(d, int) for d in x.shape):
        return _partitioned(prim, split, ctx, operands, dict(axis=axis, tier=tier))
    if mask:
        shape = mask_shape(x.shape, mask[0].shape, axis, _compat.partitioned_devices(ctx) > 1)
        if shape != mask[0].shape:
            def with_larger_mask(*args, **params):
                return prim.bind(*args[:-1], jnp.broadcast_to(args[-1], shape), **params)
            return through(with_larger_mask)(ctx, *operands, axis=axis, tier=tier)

    results = list(ctx.avals_out)
    scratch = scratch_shape(x.shape, x.dtype, axis) if platform == "cuda" else None
    if scratch is not None:
        results.append(jax.core.ShapedArray(scratch, jnp.dtype(jnp.uint8)))
    attributes = _partition.attributes([a.shape for a in avals], [a.shape for a in results], axis)
    rule = jax.ffi.ffi_lowering(prim.name, **({"extra_attributes": attributes} if attributes else {}))
    return rule(ctx.replace(avals_out=results), *operands, axis=axis, tier=tier)[:1]


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

    return _partition.lower(ctx, prim, operands, params, dims, shard, exact={"row"}, whole=() if split else {"row"},
                            summed=() if dims[-1] is names else ("row",))


def mask_shape(full, part, axis: int, sharded: bool):
    """The shape that a mask must be broadcast to before a kernel can read it; mostly its own."""
    if not all(isinstance(d, int) for d in full):
        return full  # nothing is known of a symbolic shape
    if _groups(full[:axis], part[:axis]) > MASK_GROUPS or _groups(full[axis + 1 :], part[axis + 1 :]) > MASK_GROUPS:
        return tuple(full)
    # XLA would split a dimension of size 1 like the array's own: several devices need it in full.
    return (*full[:axis], *part[axis:]) if sharded else tuple(part)


def _groups(full, part) -> int:
    """Alternating groups of broadcast and other dimensions, those of size 1 aside."""
    kinds = [b == 1 for a, b in zip(full, part) if a != 1]
    if any(a >= 1 << 32 for a in full):
        return MASK_GROUPS + 1 if len(set(kinds)) > 1 else 1
    return sum(k == 0 or kinds[k] != kinds[k - 1] for k in range(len(kinds)))


def scratch_shape(shape, dtype, axis: int):
    """CUDA: room for the partial results of few long rows, `24 * max(1, 2048 // rows)` bytes a row.

    >>> scratch_shape((4, 100_000), "float32", 1)
    (4, 12288)
    >>> scratch_shape((4096, 1000), "float32", 1) is None
    True
    """
    if not all(isinstance(d, int) for d in shape) or math.prod(shape[axis + 1 :]) != 1:
        return None
    rows = math.prod(shape[:axis])
    if rows > 512 or shape[axis] * jnp.dtype(dtype).itemsize < 32768:
        return None
    return (*shape[:axis], 24 * max(1, 2048 // rows))
