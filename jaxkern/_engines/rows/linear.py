"""Sums along a row that need no pass of their own.

The sum of `r * a + p * d`, in which r and p are numbers of the row, is `r * sum(a) + p * sum(d)`. If r and p depend on reductions and
a and d do not, or on fewer, the sums of a and d are taken together with those reductions. Derivatives have such sums: the
gradient of a layer norm needs two passes over a row, and three as it is written. In the gradient of a softmax, the sum of
`g * (e / z)` is `sum(g * e) / z`; this is done only where e is exp(x - max(x)), so that no product overflows. The sum of a
log-softmax is a sum of x - max(x) less the normalizer, times the number of elements.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkern._core.jaxprs import computing
from jaxkern._engines.jaxpr import MOVES, Value, source

MOST_TERMS = 3  # sums instead of one


def split_sums(program) -> bool:
    """Rewrites the sums of the last pass for which this is possible, and of those before it; False if there is none."""
    along = [s for s in program.steps if program.row in program.over(s)]
    for stage in sorted({s.result.stage for s in along}, reverse=True):
        steps = [s for s in along if s.result.stage == stage]
        found = [_terms_of(program, s) for s in steps]
        if stage > 1 and all(found):
            for step, terms in zip(steps, found):
                _rewrite(program, step, terms, stage - 1)
            return True
    return False


def _terms_of(program, step):
    """[(sign, numbers, divisors, values)] whose quotients of products add up to what a step sums; None if there is no such sum.

    All values are complete one pass before the numbers are.
    """
    value = step.operands[0]
    if step.name != "reduce_sum" or program.over(step) != {program.row} or not isinstance(value, Value):
        return None
    if value.summed or computing(value.dtype).kind != "f":
        return None
    made = {v: s for s in program.steps for v in s.results}
    terms, pending = [], [(1, (), value)]
    while pending:
        sign, numbers, v = pending.pop()
        v = source(made, v)
        if v.is_row and v.stage < value.stage:
            terms.append((sign, numbers, (), (v,)))
            continue
        s = made.get(v) if v.is_row else None
        name, operands = (s.name, s.operands) if s is not None else (None, ())
        if name == "neg":
            pending.append((-sign, numbers, operands[0]))
        elif name == "sub" and _normalizer(made, *operands):
            pending.append((sign, numbers, operands[0]))
            terms.append((-sign, (*numbers, number_of(made, operands[1])), (), ()))
        elif name in ("add", "add_any", "sub"):
            pending += [(sign, numbers, operands[0]), (-sign if name == "sub" else sign, numbers, operands[1])]
        elif name == "mul" and any(number_of(made, x) is not None for x in operands):
            own = int(number_of(made, operands[0]) is None)
            pending.append((sign, (*numbers, number_of(made, operands[own])), operands[1 - own]))
        else:
            found = _products(made, v, value.stage)
            if found is None:
                return None
            terms += [(sign * own, (*numbers, *factors), *rest) for own, factors, *rest in found]
    dims = lambda v: [d.same() for d in v.dims if d is not None]
    values = {v for *_, own in terms for v in own}
    fits = all(v.aval.shape == value.aval.shape and v.dims == value.dims and v.stage < value.stage for v in values)
    numbers = [n for _, factors, divisors, _ in terms for n in (*factors, *divisors) if isinstance(n, Value)]
    same = all(dims(n) in ([], dims(step.result)) for n in numbers)  # not transposed
    return terms if fits and same and len({own for *_, own in terms}) <= MOST_TERMS else None


def _products(made, value, stage):
    """[(sign, numbers, divisors, values)] that add up to a product of rows and numbers; None where a product of the values alone may
    overflow. One of the rows may be a log-softmax, which is a difference, and others its exponential, which is a quotient.
    """
    numbers, divisors, values, differences, pending = [], [], [], [], [value]
    while pending:
        v = source(made, pending.pop())
        s, number = made.get(v), number_of(made, v)
        sub = made.get(source(made, s.operands[0])) if s is not None and s.name == "exp" else s
        normal = sub is not None and sub.name == "sub" and _normalizer(made, *sub.operands)
        if number is not None:
            numbers.append(number)
        elif v.stage < stage:
            values.append(v)
        elif normal and sub is not s:
            exponential, total = normal
            values.append(exponential)
            divisors.append(total)
        elif normal:
            differences.append((source(made, s.operands[0]), number_of(made, s.operands[1])))
        elif s is not None and s.name == "mul":
            pending += s.operands
        elif s is not None and s.name == "div" and (divisor := number_of(made, s.operands[1])) is not None:
            divisors.append(divisor)
            pending.append(s.operands[0])
        else:
            return None
    unbounded = [v for v in values if not _at_most_one(made, v)]
    if not len(values) > len(unbounded) <= 1 - len(differences):
        return None
    found = [(1, (*numbers,), (*divisors,), (*values,))]
    for x, y in differences:
        found = [(1, (*numbers,), (*divisors,), (*values, x)), (-1, (*numbers, y), (*divisors,), (*values,))]
    return found


def _at_most_one(made, v) -> bool:
    """Whether a value is exp(x - max(x))."""
    exp = made.get(v)
    sub = made.get(source(made, exp.operands[0])) if exp is not None and exp.name == "exp" else None
    if sub is None or sub.name != "sub":
        return False
    most, pending = number_of(made, sub.operands[1]), []
    while most is not None and (s := made.get(most)) is not None:
        if s.name == "reduce_max" and source(made, s.operands[0]) is source(made, sub.operands[0]):
            return True
        pending += [x for x in s.operands if isinstance(x, Value) and not x.is_row]
        most = pending.pop() if pending else None
    return False


def _normalizer(made, x, y):
    """(e, z) if x is v - max(v), e is exp(x) and y is log(z), where z is sum(e): x <= 0 <= y, so that no digits are lost if x - y is
    summed term by term. None if it is something else.
    """
    if not isinstance(x, Value) or not isinstance(y, Value):
        return None
    log = made.get(source(made, y))
    total = made.get(source(made, log.operands[0])) if log is not None and log.name == "log" else None
    exp = made.get(source(made, total.operands[0])) if total is not None and total.name == "reduce_sum" else None
    alike = exp is not None and exp.name == "exp" and source(made, exp.operands[0]) is source(made, x)
    return (exp.result, total.result) if alike and _at_most_one(made, exp.result) else None


def number_of(made, v):
    """The number, or constant, that all elements of a row are; None if they differ."""
    while v.is_row and (s := made.get(v)) is not None and s.name in (*MOVES, "convert_element_type"):
        if computing(s.operands[0].aval.dtype) != computing(v.dtype):  # which may round
            return None
        v = s.operands[0]
    return None if v.is_row else v


def _rewrite(program, step, terms, stage):
    """Replaces a sum by sums of terms, which are complete after the passes of `stage`."""
    values = list(dict.fromkeys(v for *_, own in terms for v in own))
    numbers = list(dict.fromkeys(n for _, factors, divisors, _ in terms for n in (*factors, *divisors)))
    shape, axes = step.result.aval.shape, step.params["axes"]
    # Sums that the program has, too.
    before = [
        s for s in program.steps[: program.steps.index(step)] if s.name == "reduce_sum" and s.params["axes"] == axes
    ]
    sums_of = {s.operands[0]: s.result for s in before if s.result.dtype == step.result.dtype}
    known = {own: sums_of[own[0]] for *_, own in terms if len(own) == 1 and own[0] in sums_of}

    def f(*xs):
        given = dict(zip([*values, *numbers, *known.values()], xs))
        sums, total = {own: given[y] for own, y in known.items()}, None
        for sign, factors, divisors, own in terms:
            if not own:
                sums[own] = np.asarray(step.operands[0].aval.shape[axes[0]], step.result.dtype)
            elif own not in sums:
                dtype = functools.reduce(jnp.promote_types, (given[v].dtype for v in own))
                sums[own] = lax.reduce_sum(functools.reduce(lax.mul, (given[v].astype(dtype) for v in own)), axes)
            y = sums[own] if sign > 0 else -sums[own]
            for n, divides in (*((n, False) for n in factors), *((n, True) for n in divisors)):
                x = given[n].astype(y.dtype)
                x = x.reshape(shape if x.size == math.prod(shape) else ())
                y = y / x if divides else y * x
            total = y if total is None else total + y
        return total.astype(step.result.dtype)

    replace(program, step, [*values, *numbers, *known.values()], f, stage)


def replace(program, step, operands, f, stage=0):
    """Puts f, a function in jnp of these Values, in the place of a step. stage: of sums in it, at least."""
    at = program.steps.index(step)
    before, after, program.steps = program.steps[:at], program.steps[at + 1 :], []
    (total,) = program.inlined(step.origin or step.equation, operands, f)
    for s in program.steps:
        s.stage = stage if s.name == "reduce_sum" else 0
        program.unite_step(s)
    for s in program.steps:
        s.results = [step.result if v is total else v for v in s.results]
    program.steps = [*before, *program.steps, *after]
    program.row = program.row.same()
    for v in {*program.operands, *(v for s in program.steps for v in s.results)}:
        v.dims = tuple(d and d.same() for d in v.dims)
