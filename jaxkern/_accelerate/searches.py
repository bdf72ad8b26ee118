"""`jnp.searchsorted` in a jaxpr: a call of JAX's function of this name, with the equations that some version of JAX writes for it.

    search, by_steps = of(equation)

JAX searches by halves in a loop, compares all elements, or sorts elements and queries together (`method`). Which side is wanted
shows in the comparison, or in the order of what is sorted.
"""

import math

from jaxkern._accelerate.calls import Search
from jaxkern._accelerate.equations import is_variable
from jaxkern._core import compat_rewriting
from jaxkern._core.jaxprs import CALLS, called_jaxpr

COMPARISONS = {"lt": False, "lt_to": False, "le": True, "le_to": True}  # whether equal numbers count


def is_named(e) -> bool:
    """Whether an equation calls JAX's function of this name."""
    if e.primitive.name not in CALLS or e.params.get("name") != "searchsorted":
        return False
    return compat_rewriting.is_of_jax(called_jaxpr(e)[0])


def of(e) -> tuple[Search, bool] | None:
    """(the search that an equation is, whether XLA takes more kernels for it than one or two).

    None if it is no search, or one in several arrays.
    """
    if not is_named(e) or not compat_rewriting.is_inlinable(e) or len(e.invars) != 2 or len(e.outvars) != 1:
        return None
    array, queries = (v.aval for v in e.invars)
    if (
        array.ndim != 1
        or array.dtype != queries.dtype
        or e.outvars[0].aval.shape != queries.shape
        or not 0 < array.size < 2**31
    ):
        return None
    jaxpr, consts = called_jaxpr(e)
    equations = [] if consts else _equations(jaxpr)
    right = _is_right(equations, jaxpr.invars[0], array)
    if right is None:
        return None
    by_steps = any(e.primitive.name in ("scan", "sort") for e, _ in equations)
    return Search("right" if right else "left", e.outvars[0].aval.dtype), by_steps


def _equations(jaxpr) -> list:
    """The equations of a jaxpr, of the functions that it calls and of the bodies of its loops; their operands under the names that
    these have in the jaxpr, if they are its arguments."""
    found = []

    def go(inner, names):
        for e in inner.eqns:
            operands = [names.get(v, v) if is_variable(v) else v for v in e.invars]
            found.append((e, operands))
            if e.primitive.name in (*CALLS, "scan"):
                body, _ = called_jaxpr(e)
                go(body, dict(zip(body.invars, operands)))

    go(jaxpr, {})
    return found


def _is_right(equations, array, aval) -> bool | None:
    """Whether the side is the right one; None for equations that are no search."""
    named = lambda *names: [(e, operands) for e, operands in equations if e.primitive.name in names]
    joined, levels = named("concatenate"), math.ceil(math.log2(aval.size + 1))
    if len(joined) == 1 and len(named("sort")) == 2:
        return joined[0][1][0] is array
    compared = {
        e.primitive.name for e, o in named(*COMPARISONS) if all(map(is_variable, o)) and o[0].aval.dtype == aval.dtype
    }
    if len(compared) != 1 or named("sort"):
        return None
    counts_equal = COMPARISONS[compared.pop()]
    if named("reduce_sum") and not named("gather", "scan"):
        return counts_equal
    loops, gathers = named("scan"), named("gather")
    if [e.params["length"] for e, _ in loops] == [levels] and len(gathers) == 1 or not loops and len(gathers) == levels:
        return not counts_equal
    return None
