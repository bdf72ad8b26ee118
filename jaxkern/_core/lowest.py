"""Where the result of a user's function is -inf whatever some of its arguments are.

A softmax need not read an element that is masked by its indices. What masks it is found in the jaxpr of the score
function: each equation passes on conditions under which its result is true, false or -inf.
"""

import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxkern._core import functor, memo
from jaxkern._core.jaxprs import CALLS, CUSTOM, IDENTITIES, called_jaxpr, evaluate_equation


@memo.remembered(512)
def where_lowest(function, known):
    """The Function of all arguments of `function` that returns whether its first result is -inf, whatever those not in the
    frozenset `known` are.

    None if no equation shows that it can be. It may miss cases, such as a product that is -inf, but is never wrong.
    """
    fact = None

    def f(*xs):
        nonlocal fact
        given = [_Fact.of(x) if k in known else _Fact() for k, x in enumerate(xs)]
        fact = _facts(function.closed.jaxpr, list(map(_Fact.of, function.closed.consts)), given)[0].lowest
        return [jnp.asarray(fact, bool)]

    found = functor.of_scalars(f, function.in_dtypes, [bool], function.label, function.coarse)
    return None if fact is False else found


class _Fact(typing.NamedTuple):
    """What is known of a scalar whatever the unknown arguments are. Conditions are True, False or traced.

    value: the scalar, if it does not depend on them. true, false: conditions under which it is so. lowest: under which it is
    -inf.
    """

    value: Any = None
    true: Any = False
    false: Any = False
    lowest: Any = False

    @classmethod
    def of(cls, value):
        number, dtype = jnp if isinstance(value, jax.core.Tracer) else np, jnp.result_type(value)
        decide = lambda condition: condition if number is jnp else bool(condition)
        if dtype == np.bool_:
            return cls(value, decide(value), decide(number.logical_not(value)))
        return cls(value, lowest=jnp.issubdtype(dtype, jnp.floating) and decide(number.equal(value, -np.inf)))


def _any(*conditions):
    if any(c is True for c in conditions):
        return True
    given = [c for c in conditions if c is not False]
    return functools.reduce(jnp.logical_or, given) if given else False


def _all(*conditions):
    if any(c is False for c in conditions):
        return False
    given = [c for c in conditions if c is not True]
    return functools.reduce(jnp.logical_and, given) if given else True


def _facts(jaxpr, consts, args) -> list:
    """Evaluates a jaxpr on facts: `consts` and `args` are the facts of its inputs, and the results are the facts of its outputs."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args)))
    for e in jaxpr.eqns:
        operands = [_Fact.of(v.val) if isinstance(v, Literal) else env[v] for v in e.invars]
        env.update(zip(e.outvars, _facts_of_equation(e, operands)))
    return [_Fact.of(v.val) if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]


def _facts_of_equation(e, operands) -> list:
    name = e.primitive.name
    if all(fact.value is not None for fact in operands):
        return list(map(_Fact.of, evaluate_equation(e, [fact.value for fact in operands])))
    if name in (*CALLS, *CUSTOM):
        jaxpr, consts = called_jaxpr(e)
        return _facts(jaxpr, list(map(_Fact.of, consts)), operands)
    of, to = (v.aval.dtype for v in (e.invars[-1], e.outvars[0]))
    if name in (*IDENTITIES, "stop_gradient") and len(e.outvars) == 1:
        return operands[-1:]
    if name == "convert_element_type" and all(jnp.issubdtype(d, jnp.floating) for d in (of, to)):
        return [_Fact(lowest=operands[0].lowest)]
    if name == "select_n" and len(operands) == 3 and e.invars[0].aval.dtype == np.bool_:
        which, no, yes = operands
        pick = lambda n, y: _any(_all(which.false, n), _all(which.true, y), _all(n, y))
        return [_Fact(None, *(pick(n, y) for n, y in zip(no[1:], yes[1:])))]
    if name in ("and", "or", "not") and to == np.bool_:
        trues, falses = [fact.true for fact in operands], [fact.false for fact in operands]
        if name == "not":
            return [_Fact(None, *falses, *trues)]
        return [_Fact(None, *((_all(*trues), _any(*falses)) if name == "and" else (_any(*trues), _all(*falses))))]
    return [_Fact()] * len(e.outvars)
