"""Products of rows with the matrix of their group, `jax.lax.ragged_dot`, in the layout that XLA's product reads.

XLA for GPUs makes one large product of it. Each row is there once for each group, and is zero but for its own. XLA writes [groups,
rows, k], which it transposes for the product over groups and k where another product, of the gradient, reads it as it is. Here
the rule writes [rows, groups, k]: the same product without the transpose.
Sums over the rows of each group, the gradients of the matrices, stay as they are, behind barriers: see `_alone`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from jaxkern._accelerate import registration
from jaxkern._core import algorithms, compat, compat_lowering, decisions, stablehlo, switch

NAME = "ragged_dot"
BEFORE = (0, 12)  # jaxlibs whose XLA is known to make the transpose; seen in programs that 0.11.2 compiled
UNKNOWN = "group_offset", "out_sharding"  # parameters that are None in products that are taken
SUMS = "sums over the rows of each group"
OTHER = "jax_ragged_dot_use_gpu_pallas_triton_lowering"  # a setting of JAX for kernels of its own


def product(x, matrices, sizes, *, contracted, group, precision, preferred_element_type):
    """The product of rows [rows, k] with the matrix of their group.

    sizes: how many rows each group has; the groups' rows follow each other. contracted: the dimension k of the matrices. group: the
    dimension of the groups.
    """
    sizes = sizes if sizes.dtype.itemsize >= 4 else sizes.astype(jnp.int32)
    ends = jnp.cumsum(sizes)
    row = lax.broadcasted_iota(sizes.dtype, (x.shape[0], sizes.shape[0]), 0)
    own = (ends - sizes <= row) & (row < ends)
    apart = jnp.where(own[:, :, None], x[:, None, :], jnp.zeros((), x.dtype))
    return lax.dot_general(
        apart,
        matrices,
        (((1, 2), (group, contracted)), ((), ())),
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


def _problem(ctx, numbers, params) -> str:
    """Why a product is left to XLA."""
    settings, (rows, matrices, sizes, *more) = switch.current(), ctx.avals_in
    (contracted, _), (batch, _) = numbers.dot_dimension_numbers
    if not settings.force and "cuda" not in (platforms := compat_lowering.platforms(ctx)):
        return switch.no_kernels(platforms[0])
    if more or batch or sizes.ndim != 1 or any(params.get(name) is not None for name in UNKNOWN):
        return "batches of groups"
    if not all(isinstance(n, int) and n for a in ctx.avals_in for n in a.shape):
        return "shapes that are not known"
    if not settings.force and not compat.jaxlib() < BEFORE:
        return f"not known of jaxlib {'.'.join(map(str, compat.jaxlib()))}"
    if getattr(jax.config, OTHER, False):
        return f"JAX's kernels, by {OTHER}"
    if compat.partitioned_devices(ctx) > 1:
        return "a product on several devices"
    if refusal := switch.refusal(ctx, settings):
        return refusal
    if (rows.ndim, matrices.ndim) == (2, 2):
        return SUMS
    is_plain = (rows.ndim, matrices.ndim) == (2, 3) and tuple(numbers.lhs_ragged_dimensions) == (0,)
    return "" if is_plain and tuple(contracted) == (1,) else "another order of dimensions"


@switch.own_promotion
def _ragged_dot(plain, ctx, *operands, ragged_dot_dimension_numbers, **params):
    numbers = ragged_dot_dimension_numbers
    by_jax = lambda *operands: plain(ctx, *operands, ragged_dot_dimension_numbers=numbers, **params)
    if not switch.wanted(NAME) or algorithms.xla_forced():
        return by_jax(*operands)
    problem = _problem(ctx, numbers, params)
    frames = functools.partial(compat.frames, ctx.traceback)
    size = sum(map(stablehlo.size, (*ctx.avals_in, *ctx.avals_out))) if not problem else 0
    why = problem or "rows and groups in the order in which the product reads them"
    if not decisions.record(NAME, not problem, why, list(ctx.avals_in), frames, size):
        return by_jax(*(_alone(*operands) if problem == SUMS else operands))
    body = functools.partial(
        product,
        contracted=numbers.dot_dimension_numbers[0][1][0],
        group=numbers.rhs_group_dimensions[0],
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    return switch.own_code(mlir.lower_fun(body, multiple_results=False))(ctx, *operands)


def _alone(rows, others, sizes) -> list:
    """The operands of a sum over rows behind barriers: XLA computes the masked rows of a sum where it runs.

    Without them it computes all masked rows of a program in one kernel, since all read the sizes, and holds them at once.
    """
    rows, sizes = stablehlo.all_apart([rows, sizes])
    return [rows, stablehlo.apart(others), sizes]


def register(platform: str) -> None:
    """Puts the rule in place. It calls JAX's wherever nothing is switched on."""
    prim = compat.ragged_dot_primitive()
    if prim is not None:
        registration.register(prim, _ragged_dot, platform, lambda *_: switch.wanted(NAME))
