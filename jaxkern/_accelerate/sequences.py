"""Sequences of equations: with other names, in an order in which each follows what it reads, with an array of indices for each use."""

import itertools

from jaxkern._accelerate.equations import is_variable, variables
from jaxkern._core import compat_rewriting
from jaxkern._core.cpp import ELEMENTWISE

MOST_APART = 512  # equations of a region where indices are computed for each use


def with_own_indices(equations) -> list:
    """The equations with an array of indices of its own for each use of one.

    `i[:, None] >= i` with `i = jnp.arange(n)` compares places along two dimensions of a region, which one array cannot name.
    """
    again = {e.outvars[0]: e for e in equations if e.primitive.name == "iota" and len(e.outvars[0].aval.shape) == 1}
    for e in equations:  # and what is computed from places alone
        (out,) = e.outvars
        if e.primitive.name in ELEMENTWISE and len(out.aval.shape) == 1 and variables(e):
            again |= {out: e} if all(v in again for v in variables(e)) else {}
    found: list = []

    def of(v):
        if not is_variable(v) or v not in again or len(found) > MOST_APART:
            return v
        out = compat_rewriting.new_variable(v.aval)
        found.append(again[v].replace(invars=list(map(of, again[v].invars)), outvars=[out]))
        return out

    for e in equations:
        if e.outvars[0] not in again:
            found.append(e.replace(invars=list(map(of, e.invars))))
    return found if len(found) <= MOST_APART else equations


def renamed(e, names):
    """An equation with the values of `names` under their new names."""
    new = lambda v: names.get(v, v) if is_variable(v) else v
    return e.replace(invars=list(map(new, e.invars)), outvars=list(map(new, e.outvars)))


def in_order(equations) -> list:
    """Equations in an order in which each follows those that make its operands, and those with effects keep their order."""
    made = {v: k for k, e in enumerate(equations) for v in e.outvars}
    effects = [k for k, e in enumerate(equations) if e.effects]
    before = dict(itertools.pairwise(reversed(effects)))
    state, found = [0] * len(equations), []
    for start in range(len(equations)):
        pending = [start]
        while pending:
            k = pending[-1]
            if state[k] == 2:
                pending.pop()
                continue
            needs = [made[v] for v in variables(equations[k]) if v in made]
            needs += [before[k]] if k in before else []
            waits = [n for n in needs if state[n] != 2]
            if waits and state[k] == 1:
                raise AssertionError("regions depend on each other")
            state[k] = 1 if waits else 2
            if waits:
                pending += waits
            else:
                found.append(equations[k])
                pending.pop()
    return found
