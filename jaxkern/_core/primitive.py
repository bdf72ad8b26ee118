"""Making a primitive: what every one needs, and the rules of an operation on rows.

A row operation takes one or more arrays of equal shape, then perhaps a mask (boolean, the same rank,
each dimension 1 or equal), and returns one array of that shape, or, where it reduces rows, of that shape
without the axis. Its parameters are `axis`, the dimension that a row lies along, `tier`, the kernel to use,
and, where it reduces, `dtype`, the type of the result, or the types of several.
"""

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching
from jax.sharding import NamedSharding, PartitionSpec

from jaxkern._core import compat


def bind(prim, *operands, **params):
    """`prim.bind`, with the operands first marked as varying over the same axes of a `shard_map`.

    Bound as they are, a replicated and a varying operand would lose the sum over devices in the
    replicated one's gradient.
    """
    axes = [compat.varying_axes(x) for x in operands]
    union = frozenset().union(*axes)
    operands = [compat.cast_varying(x, union - own) if union - own else x for x, own in zip(operands, axes)]
    return prim.bind(*operands, **params)


def row_primitive(name: str, arrays: int, several: bool = False) -> Primitive:
    """A primitive on `arrays` arrays and an optional mask; its lowering and derivatives come apart.

    several: it reduces rows to several numbers each.
    """
    prim = Primitive(name)
    prim.multiple_results = several
    prim.def_abstract_eval(functools.partial(_abstract_eval, name, arrays))
    prim.def_impl(functools.partial(evaluate, prim))
    batching.primitive_batchers[prim] = functools.partial(_batch, prim, arrays)
    compat.check_nans(prim)
    return prim


def evaluate(prim, *operands, **params):
    """The eager rule of any primitive: compiled, once for each set of (hashable) parameters."""
    params = tuple(params.items())
    nans, infs = jax.config.jax_debug_nans, jax.config.jax_debug_infs
    if not (nans or infs or jax.config.jax_disable_jit):
        return _compiled(prim, params, *operands)
    # A primitive is compiled all the same, like any of JAX's own: with these modes on, a jitted function
    # would be run again operation by operation, and come back here without end.
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        y = _compiled(prim, params, *operands)
        for wanted, what, test in ((nans, "nan", jnp.isnan), (infs, "inf", jnp.isinf)):
            if wanted and any(bool(test(a).any()) for a in jax.tree.leaves(y)):
                raise FloatingPointError(f"invalid value ({what}) encountered in {prim.name}")
    return y


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compiled(prim, params, *operands):
    return prim.bind(*operands, **dict(params))


def _abstract_eval(name, arrays, x, *rest, axis, tier, dtype=None):
    del tier
    others, mask = rest[: arrays - 1], rest[arrays - 1 :]
    if not 0 <= axis < x.ndim:
        raise ValueError(f"{name}: axis {axis} is out of bounds for shape {x.shape}")
    for y in others:
        if y.shape != x.shape or y.dtype != x.dtype:
            raise ValueError(f"{name}: operands differ: {x.str_short()} and {y.str_short()}")
    for m in mask:
        if m.dtype != jnp.bool_ or m.ndim != x.ndim or any(b != 1 and b != a for a, b in zip(x.shape, m.shape)):
            raise ValueError(f"{name}: the mask {m.str_short()} does not fit {x.str_short()}")
    # Updating keeps the sharding and the varying axes that x came with.
    if dtype is None:
        return x.update(weak_type=False)
    y = {"shape": (*x.shape[:axis], *x.shape[axis + 1 :]), "weak_type": False}
    if not x.sharding.mesh.empty:
        spec = [*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec))]
        y["sharding"] = NamedSharding(x.sharding.mesh, PartitionSpec(*spec[:axis], *spec[axis + 1 :]))
    return [x.update(**y, dtype=d) for d in dtype] if isinstance(dtype, tuple) else x.update(**y, dtype=dtype)


def _batch(prim, arrays, operands, dims, *, axis, **params):
    """The batch becomes one more dimension, wherever the first batched operand has it."""
    at = next(d for d in dims if d is not None)
    size = next(x.shape[d] for x, d in zip(operands, dims) if d is not None)

    def place(x, d, broadcasts):
        if d is not None:
            return jnp.moveaxis(x, d, at)  # nothing at all when d == at
        x = jnp.expand_dims(x, at)
        return x if broadcasts else jnp.broadcast_to(x, (*x.shape[:at], size, *x.shape[at + 1 :]))

    # An unbatched mask keeps a dimension of size 1: kernels read it in place.
    operands = [place(x, d, k >= arrays) for k, (x, d) in enumerate(zip(operands, dims))]
    y = bind(prim, *operands, axis=axis + (at <= axis), **params)
    place_of = lambda a: at - (a.ndim < operands[0].ndim and at > axis)
    return y, list(map(place_of, y)) if prim.multiple_results else place_of(y)
