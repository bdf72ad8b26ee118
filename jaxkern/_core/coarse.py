"""Whether 16-bit results allow coarse arithmetic: overloads with relative errors of 2^-13, in namespace `coarse` of functions.h."""

import contextlib
import math

import jax.numpy as jnp
from jax.extend.core import Literal

from jaxkern._core import canonical
from jaxkern._core.define import references
from jaxkern._core.jaxprs import CALLS, CUSTOM, KERNEL, called_jaxpr, vjp_rule

# Primitives with a coarse overload, and those whose results jump where an operand hardly changes.
COARSE = frozenset("cos div erf erfc exp exp2 expm1 log log1p logistic pow sin sqrt tanh".split())
_JUMPS = frozenset("bitcast_convert_type ceil floor ge gt le lt rem round sign".split())


def is_coarse(jaxpr) -> bool:
    """Whether coarse arithmetic is enough for a jaxpr and the derivative rules in it.

    All its real numbers have 16 bits, and no discontinuous operation depends on results of coarse arithmetic: x / y may
    round to a whole number in 16 bits, and coarse arithmetic gives a number just below it, with another floor.
    """
    return _inexact(jaxpr, [False] * len(jaxpr.invars), {}) is not None


def _inexact(jaxpr, given, rules) -> list | None:
    """Which results of a jaxpr depend on coarse arithmetic; None where that is not enough.

    given: which arguments do. rules: the equations by the identity of their derivative rules, of those looked into so far.
    """
    if any(map(_is_wide, (*jaxpr.invars, *jaxpr.constvars, *jaxpr.outvars))):
        return None
    inexact = {v for v, own in zip(jaxpr.invars, given) if own}
    is_inexact = lambda v: not isinstance(v, Literal) and v in inexact
    for e in jaxpr.eqns:
        if any(map(_is_wide, (*e.invars, *e.outvars))):
            return None
        name, own = e.primitive.name, list(map(is_inexact, e.invars))
        results = [name in COARSE or any(own) or references.get(e.primitive) is not None] * len(e.outvars)
        jaxprs = [called_jaxpr(e)[0]] if name in (*CALLS, *CUSTOM) else []
        if name == "cond":
            jaxprs, own = [branch.jaxpr for branch in e.params["branches"]], own[1:]
        elif name == KERNEL:
            if not e.params["function"].coarse:
                return None
            results = [True] * len(e.outvars)
        elif not jaxprs and any(own) and jumps(e):
            return None
        if name in CUSTOM and (identity := canonical.rule_identity(e)) not in rules:
            rules[identity] = e
            if len(rules) > canonical.MOST_RULES:
                return None
            with contextlib.suppress(TypeError, NotImplementedError):  # there is no derivative
                rule = vjp_rule(e).jaxpr
                if _inexact(rule, [False] * len(rule.invars), rules) is None:
                    return None
        if jaxprs:
            of_each = [_inexact(j, own, rules) for j in jaxprs]
            if None in of_each:
                return None
            results = list(map(any, zip(*of_each)))
        inexact.update(v for v, r in zip(e.outvars, results) if r)
    return list(map(is_inexact, jaxpr.outvars))


def _is_wide(v) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.inexact) and v.aval.dtype.itemsize > 2


def jumps(e) -> bool:
    """Whether the result of an equation jumps where an operand hardly changes. NaN and infinities stay what they are."""
    if e.primitive.name == "convert_element_type":
        of, to = e.invars[0].aval.dtype, e.outvars[0].aval.dtype
        return jnp.issubdtype(of, jnp.floating) and not jnp.issubdtype(to, jnp.floating)
    if e.primitive.name in ("eq", "ne"):
        a, b = e.invars
        infinite = any(isinstance(v, Literal) and math.isinf(v.val) for v in (a, b))
        return a is not b and not infinite
    return e.primitive.name in _JUMPS
