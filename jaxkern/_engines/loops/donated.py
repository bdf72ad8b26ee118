"""Last carries of loops that take the memory of donated first ones, where XLA copies nothing for it.

    over = results_over(value)      the results of the equation that is being lowered that may have the memory of its operand `value`

XLA copies an array before a kernel overwrites it if something else reads it. And a result of the program that has the memory of an
argument is copied there if its own kernel reads what is there in another order.
"""

from jaxkern._core import compat_lowering, stablehlo
from jaxkern._core.cpp import ELEMENTWISE

_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod")


def results_over(value) -> set[int]:
    """See the module. Positions of results of the equation; empty if `value` is no donated argument, or something else reads it.

    Such a result is a result of the program that has the memory of the argument, or it is read by elementwise equations that lead to
    one, and by reductions.
    """
    values = stablehlo.chain(value)
    targets = stablehlo.results_over(values[-1])
    # What is lowered already: each value is read by the next.
    if not targets or any(len(list(v.uses)) != (k > 0) for k, v in enumerate(values)):
        return set()
    standing = compat_lowering.standing(values[-1])
    if standing is None:
        return set()
    jaxpr, at, env = standing
    equation, later = jaxpr.eqns[at], jaxpr.eqns[at + 1 :]
    own = {id(v) for v, x in env.items() if x in values}
    reads = [v for e in (equation, *later) for v in e.invars]
    if sum(id(v) in own for v in (*reads, *jaxpr.outvars)) != 1:
        return set()
    return {k for k, v in enumerate(equation.outvars) if targets & _places(v, later, jaxpr.outvars)}


def _places(v, equations, results) -> set[int]:
    """Where `v` is among the results, perhaps with another shape; else where the only result is that it is made into elementwise."""
    shapes = {id(v)}
    for e in equations:
        if e.primitive.name == "reshape" and id(e.invars[0]) in shapes:
            shapes.add(id(e.outvars[0]))
    found = {k for k, y in enumerate(results) if id(y) in shapes}
    return found or _made(v, equations, results)


def _made(v, equations, results) -> set[int]:
    made, reduced = {id(v)}, set()
    for e in equations:
        reads, name = {id(x) for x in e.invars}, e.primitive.name
        if reads & reduced:
            reduced.update(map(id, e.outvars))
        if not reads & made:
            continue
        alike = [y.aval.size == v.aval.size and y.aval.dtype == v.aval.dtype for y in e.outvars]
        if all(alike) and (name == "reshape" or (name in ELEMENTWISE and not reads & reduced)):
            made.update(map(id, e.outvars))
        elif name in _REDUCTIONS:
            reduced.update(map(id, e.outvars))
        else:
            return set()
    found = {k for k, y in enumerate(results) if id(y) in made}
    return found if len(found) == 1 else set()
