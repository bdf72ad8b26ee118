"""A reference for scans of 16-bit numbers that says where they are rounded, as XLA's fusions and loops do not."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jaxkern._core import compat

CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


def rounded_where_stored(f):
    """f, whose scans compute 16-bit numbers in float32, and round carries and elements of ys in every step."""

    def run(*operands):
        closed, shapes = jax.make_jaxpr(f, return_shape=True)(*operands)
        results = _evaluate(closed.jaxpr, closed.consts, list(map(jnp.asarray, operands)), _outside)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _evaluate(jaxpr, consts, operands, apply) -> list:
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))
    read = lambda v: v.val if isinstance(v, Literal) else env[v]
    for e in jaxpr.eqns:
        env.update(zip(e.outvars, apply(e, list(map(read, e.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


def _called(e, operands, apply):
    inner = next(e.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in e.params)
    return _evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands, apply)


def _outside(e, operands):
    """An equation outside of scans, by itself: what it returns is rounded."""
    if e.primitive.name == "scan":
        return scan(e, *operands)
    return _called(e, operands, _outside) if e.primitive.name in CALLS else compat.bind_equation(e, *operands)


def scan(e, *operands):
    """The results of an equation that is a scan."""
    return _scan(e, operands, lambda y, dtype: jnp.asarray(y).astype(dtype))


def _scan(e, operands, stored):
    """stored(y, dtype): what the scan has of a result y of its body, which JAX would compute in this dtype."""
    closed, (num_consts, num_carry) = e.params["jaxpr"], compat.counts_of_scan(e.params)
    consts, carry, xs = np.split(np.arange(len(operands)), [num_consts, num_consts + num_carry])
    read = lambda places: [operands[k] for k in places]

    def body(carry, x):
        inner = getattr(closed, "jaxpr", closed)
        ys = _evaluate(inner, getattr(closed, "consts", ()), [*read(consts), *carry, *x], _inside)
        ys = [stored(y, v.aval.dtype) for y, v in zip(ys, inner.outvars)]
        return ys[:num_carry], ys[num_carry:]

    carry, ys = lax.scan(body, read(carry), read(xs), e.params["length"], e.params["reverse"])
    return [*carry, *ys]


def _is_narrow(dtype):
    return dtype in (jnp.float16, jnp.bfloat16)


def _wide(x):
    return jnp.asarray(x, jnp.float32) if _is_narrow(jnp.result_type(x)) else x


def _inside(e, operands):
    """An equation of a body, in float32 in place of 16 bits. A conversion from float32 to 16 bits rounds."""
    operands, name = list(map(_wide, operands)), e.primitive.name
    if name in CALLS:
        return _called(e, operands, _inside)
    if name == "scan":  # a loop in the body, whose carries are in registers
        return _scan(e, operands, lambda y, dtype: _wide(y))
    if name == "cond":
        branches = [lambda *xs, b=b: _evaluate(b.jaxpr, b.consts, xs, _inside) for b in e.params["branches"]]
        return lax.switch(operands[0], branches, *operands[1:])
    if name == "convert_element_type" and _is_narrow(e.outvars[0].aval.dtype):
        (x,), of = operands, e.invars[0].aval.dtype
        rounds = jnp.issubdtype(of, jnp.floating) and not _is_narrow(of)
        return [jnp.asarray(x).astype(e.outvars[0].aval.dtype if rounds else jnp.float32).astype(jnp.float32)]
    if name == "scatter-add":  # its function adds numbers of 16 bits
        kept = {k: e.params[k] for k in ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")}
        return [lax.scatter_add(*operands, **kept)]
    is_narrow = lambda p: isinstance(p, np.dtype) and _is_narrow(p)
    params = {k: np.dtype(np.float32) if is_narrow(p) else p for k, p in e.params.items()}
    return list(map(_wide, compat.bind_equation(e.replace(params=params), *operands)))
