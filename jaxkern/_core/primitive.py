"""Binding a primitive, and evaluating it eagerly."""

import functools

import jax
import jax.numpy as jnp

from jaxkern._core import compat


def bind(prim, *operands, **params):
    """`prim.bind`, with the operands first marked as varying over the same axes of a `shard_map`.

    Without that, the gradient of a replicated operand that is bound together with a varying one would lack the sum over
    devices.
    """
    axes = [compat.varying_axes(x) for x in operands]
    union = frozenset().union(*axes)
    operands = [compat.cast_varying(x, union - own) if union - own else x for x, own in zip(operands, axes)]
    return prim.bind(*operands, **params)


def evaluate(prim, *operands, **params):
    """The eager rule of every primitive: compiles it once for each set of (hashable) parameters."""
    params = tuple(params.items())
    nans, infs = jax.config.jax_debug_nans, jax.config.jax_debug_infs
    if not (nans or infs or jax.config.jax_disable_jit):
        return _compiled(prim, params, *operands)
    # The primitive is compiled in these modes too, like JAX's own. A jitted function would be run again operation by
    # operation, and would call this rule recursively without end.
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        y = _compiled(prim, params, *operands)
        for wanted, what, test in ((nans, "nan", jnp.isnan), (infs, "inf", jnp.isinf)):
            if wanted and any(bool(test(a).any()) for a in jax.tree.leaves(y)):
                raise FloatingPointError(f"invalid value ({what}) encountered in {prim.name}")
    return y


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compiled(prim, params, *operands):
    return prim.bind(*operands, **dict(params))
