"""Picks of an element along a row that need no pass of their own.

An element of f(x, r), where f is elementwise, x are rows and r are numbers, is f of the elements of x and of r. So a pick of a value
that depends on reductions is a pick of what it is computed from, in the first pass, and arithmetic with numbers. A loss
that picks a label's element of a log-softmax reads its row once for the maximum and the label, and once for the sum.
"""

import jax.numpy as jnp
import numpy as np

from jaxkern._core.cpp import ELEMENTWISE
from jaxkern._core.jaxprs import computing
from jaxkern._engines.jaxpr import Constant, Value, compute, source
from jaxkern._engines.rows.linear import number_of, replace
from jaxkern._engines.rows.picks import PICKS, element_at

MOST_ROWS = 2  # picks instead of one


def early_picks(program) -> bool:
    """Rewrites the first pick for which this is possible; False if there is none."""
    made = {v: s for s in program.steps for v in s.results}
    for step in program.steps:
        found = _parts(program, step, made)
        if found is not None:
            _rewrite(program, step, *found)
            return True
    return False


def _parts(program, step, made):
    """(hit, value, rows, numbers, steps) of a pick: where it is, the value that an element is picked from, the rows and numbers that it
    is computed from, and the steps that compute it from these. None if it is no such pick.
    """
    picks = step.origin is not None and step.origin.primitive.name in PICKS
    if not picks or step.name != "reduce_max" or program.over(step) != {program.row} or step.result.stage < 2:
        return None
    select = made.get(source(made, step.operands[0]))
    if select is None or select.name != "select_n" or len(select.operands) != 3:
        return None
    hit, _, value = select.operands
    rows, numbers, steps, seen, pending = [], [], [], set(), [value]
    if not isinstance(value, Value) or not isinstance(hit, Value) or hit.stage:
        return None
    while pending:
        v = pending.pop()
        if v in seen or isinstance(v, Constant):
            continue
        seen.add(v)
        s = made.get(v)
        if number_of(made, v) is not None:
            numbers.append(v)
        elif v.stage == 0:
            rows.append(v)
        elif s is not None and (s.name in ELEMENTWISE or s.name == "copy") and v.aval.shape == value.aval.shape:
            steps.append(s)
            pending += s.operands
        else:
            return None
    dims = lambda v: [d.same() for d in v.dims if d is not None]
    own = [n for n in (number_of(made, v) for v in numbers) if isinstance(n, Value)]
    alike = all(v.aval.shape == value.aval.shape and v.dims == value.dims for v in rows)
    same = all(dims(n) in ([], dims(step.result)) for n in own)
    order = [s for s in program.steps if s in steps]
    return (hit, value, rows, numbers, order) if alike and same and len(rows) <= MOST_ROWS else None


def _rewrite(program, step, hit, value, rows, numbers, steps):
    made = {v: s for s in program.steps for v in s.results}
    shape, axes = step.result.aval.shape, step.params["axes"]
    own = [number_of(made, v) for v in numbers]
    values = [n for n in dict.fromkeys(own) if isinstance(n, Value)]

    def f(hit, *xs):
        given = dict(zip([*rows, *values], xs))
        wide = lambda x: jnp.broadcast_to(x, shape).astype(computing(x.dtype))
        env = {v: wide(element_at(hit, given[v], axes)) for v in rows}
        for v, n in zip(numbers, own):
            x = given[n] if isinstance(n, Value) else jnp.asarray(n.value)
            env[v] = wide(x.reshape(shape if x.size == np.prod(shape) else ()))
        read = lambda v: wide(jnp.asarray(v.value)) if isinstance(v, Constant) else env[v]
        for s in steps:
            env.update(zip(s.results, compute(s, [read(x) for x in s.operands])))
        return env[value].astype(step.result.dtype)

    replace(program, step, [hit, *rows, *values], f)
