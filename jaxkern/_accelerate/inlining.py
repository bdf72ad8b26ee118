"""Calls in a jaxpr that the pass for rows looks into: small ones are inlined, with the functions that are known by name.

Regions may then begin in one function and end in another, such as `jax.nn.softmax` of a product by a number.
"""

import jax
from jax.extend.core import Literal

from jaxkern._accelerate import regions
from jaxkern._accelerate.equations import FUSED, REDUCING, is_variable
from jaxkern._accelerate.functions import MARKS
from jaxkern._core import compat_rewriting, memo, switch
from jaxkern._core.define import references
from jaxkern._core.jaxprs import CALLS, CUSTOM, called_jaxpr

MOST_INLINED = 64  # equations of a call


def reduces(least, jaxpr) -> bool:
    """Whether a jaxpr, or a call in it that is inlined, reduces an array of so many elements along one axis."""
    for e in jaxpr.eqns:
        name = e.primitive.name
        if name in REDUCING:
            if regions.reduces_rows(e, least):
                return True
        elif name in CALLS or name in CUSTOM or e.primitive in MARKS:
            inner = _inner(e)
            if inner is not None and reduces(least, inner):
                return True
    return False


def _inner(e):
    """The jaxpr that an equation calls, if the call is inlined; of a function that is known by name, the jaxpr of its reference."""
    if e.primitive in MARKS:
        return _reference(e.primitive, tuple((v.aval.shape, v.aval.dtype) for v in e.invars), tuple(e.params.items()))
    if e.primitive.name not in (*CALLS, *CUSTOM) or not compat_rewriting.is_inlinable(e):
        return None
    inner, consts = called_jaxpr(e)
    return inner if not consts and not inner.constvars and len(inner.eqns) <= MOST_INLINED else None


@memo.remembered(256)
@switch.own_promotion
def _reference(prim, types, params):
    arrays = [jax.ShapeDtypeStruct(*t) for t in types]
    return jax.make_jaxpr(lambda *xs: jax.tree.leaves(references[prim](*xs, **dict(params))))(*arrays).jaxpr


def inlined(jaxpr, seen, marks):
    """(equations, results, parts of marks) of a jaxpr, with small calls inlined.

    seen: the jaxprs that are inlined, by their ids; it grows. marks: numbers of the functions by name that are inlined; None: all.
    """
    equations, parts = [], {}

    def go(call, inner, env, mark):
        read = lambda v: env.get(v, v) if is_variable(v) else v
        for e in inner.eqns:
            called, operands, within = _inner(e), list(map(read, e.invars)), mark
            if call is not None:
                own = [
                    v if compat_rewriting.is_dropped(v) else compat_rewriting.new_variable(v.aval) for v in e.outvars
                ]
                env.update(zip(e.outvars, own))
                moved = compat_rewriting.inlined_equation(call, e, operands, own)
            else:
                moved = e.replace(invars=operands)
            if e.primitive in MARKS:
                within = count[0]
                count[0] += 1
                called = called if marks is None or within in marks else None
            if called is None:
                equations.append(moved)
                if within is not None and e.primitive not in MARKS:
                    parts.setdefault(within, []).append(moved)
            else:
                seen[id(called)] = called
                env.update(zip(e.outvars, go(moved, called, dict(zip(called.invars, operands)), within)))
        return list(map(read, inner.outvars))

    count = [0]
    results = go(None, jaxpr, {}, None)
    return equations, results, parts


def note_calls(jaxpr, fused) -> None:
    """Notes which operands of the functions that a jaxpr calls XLA may compute where a function reads them.

    fused: {jaxpr, by its id: (jaxpr, numbers of such operands)}; it grows.
    """
    made = {v: e.primitive.name in FUSED for e in jaxpr.eqns for v in e.outvars}
    own = {jaxpr.invars[k] for k in fused.get(id(jaxpr), (None, ()))[1]}
    for e in jaxpr.eqns:
        if e.primitive.name in (*CALLS, *CUSTOM):
            inner, _ = called_jaxpr(e)
            if len(inner.invars) == len(e.invars):
                numbers = fused.setdefault(id(inner), (inner, set()))[1]
                for k, v in enumerate(e.invars):
                    if not isinstance(v, Literal) and (made.get(v, False) or v in own):
                        numbers.add(k)
