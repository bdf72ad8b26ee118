"""Binding a primitive, evaluating it eagerly, and setting its rules of differentiation."""

import functools

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxkern._core import compat, switch

signatures = {}  # of the primitives that have one: see signature.py


def bind(prim, *operands, **params):
    """`prim.bind`, with the operands first marked as varying over the same axes of a `shard_map`.

    Without that, the gradient of a replicated operand that is bound together with a varying one would lack the sum over
    devices. If the primitive has a signature, optional operands may be None.
    """
    if prim in signatures:
        operands, params = signatures[prim].compress(operands, params)
    axes = [compat.varying_axes(x) for x in operands]
    union = frozenset().union(*axes)
    operands = [compat.cast_varying(x, union - own) if union - own else x for x, own in zip(operands, axes)]
    return prim.bind(*operands, **params)


def evaluate(prim, reference, *operands, **params):
    """The eager rule of every primitive: compiles it once for each set of (hashable) parameters.

    reference: the primitive in jnp, or None. If `jax_debug_nans` finds NaN in a program that `accelerate` has changed, the
    error is JAX's own, from the operations of the reference: the user has not called the primitive.
    """
    given, params = params, tuple(params.items())
    tests = (jax.config.jax_debug_nans, "nan", jnp.isnan), (jax.config.jax_debug_infs, "inf", jnp.isinf)
    if not (any(wanted for wanted, *_ in tests) or jax.config.jax_disable_jit):
        return _compiled(prim, params, *operands)
    # The primitive is compiled in these modes too, like JAX's own. A jitted function would be run again operation by
    # operation, and would call this rule recursively without end.
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        y = _compiled(prim, params, *operands)
        what = next((name for wanted, name, test in tests if wanted and _any(test, y)), "")
    if what and reference is not None and switch.current() is not None:
        with jax.disable_jit():
            switch.own_promotion(reference)(*operands, **given)
    if what:
        raise FloatingPointError(f"invalid value ({what}) encountered in {prim.name.replace('_', '.', 1)}")
    return y


def _any(test, arrays) -> bool:
    return any(bool(test(a).any()) for a in jax.tree.leaves(arrays))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compiled(prim, params, *operands):
    return prim.bind(*operands, **dict(params))


def _expand(prim, operands, params):
    return signatures[prim].expand(operands, params) if prim in signatures else (operands, params)


def set_jvp(prim, rule):
    """Makes `rule` the forward derivative of `prim`. It takes all operands of a signature, None for those that are absent."""

    def jvp(primals, tangents, **params):
        tangents, _ = _expand(prim, tangents, params)
        primals, params = _expand(prim, primals, params)
        return rule(primals, tangents, **params)

    ad.primitive_jvps[prim] = switch.own_promotion(jvp)


def set_zero_jvp(prim):
    """Makes the derivative of `prim` zero."""

    def rule(primals, tangents, **params):
        del tangents
        found = bind(prim, *primals, **params)
        return found, jax.tree.map(compat.zero_tangent, found)

    set_jvp(prim, rule)


def set_transpose(prim, rule):
    """Makes `rule` the transpose of `prim`. It takes and returns a value for each operand of a signature, as for `set_jvp`."""

    def transpose(cotangents, *operands, **params):
        operands, params = _expand(prim, operands, params)
        found = rule(cotangents, *operands, **params)
        return [ct for ct, x in zip(found, operands, strict=True) if x is not None]

    ad.primitive_transposes[prim] = switch.own_promotion(transpose)


def has_tangent(t) -> bool:
    """Whether `t` is the tangent or cotangent of an operand that is present, and not a symbolic zero."""
    return t is not None and type(t) is not ad.Zero
