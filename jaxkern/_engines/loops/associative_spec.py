"""What a scan by an associative operation computes, as Functions of scalars (associative.py), and scans that are made from it."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxkern._core import memo
from jaxkern._core.functor import Function, of_scalars, trace
from jaxkern._core.jaxprs import computing


@dataclasses.dataclass(frozen=True)
class Associative:
    """What a scan computes, as Functions of scalars.

    element: (xs) -> a state. combine: (earlier state, later state) -> a state. finish: (state, xs) -> ys.
    first: the state before the first step if scans are exclusive, one number for each of its members; None if inclusive.
    derivative: a scan with the same results, whose derivatives are used; None: use the derivatives of this scan.
    replaced: whether it replaces a scan of a program under jaxkern.accelerate.
    """

    element: Function
    combine: Function
    finish: Function
    first: tuple | None = None
    derivative: "Associative | None" = None
    replaced: bool = False

    @property
    def states(self) -> tuple:
        """The dtypes of a state, computing types."""
        return self.element.out_dtypes


def functions_of(name, dtypes, combine, exclusive=None, element=None, finish=None):
    """([element, combine, finish] as Functions, the arrays of one number that they close over, the first state)."""
    made, captured = [], []

    def scalars(f, user, dtypes, results=None):
        f.__name__ = getattr(user, "__name__", None) or type(user).__name__
        function, values = trace(f, dtypes, name=name, results=results, coarse=False)
        made.append(function)
        captured.extend(values)
        return function

    start = element or (lambda xs: list(xs))
    states = scalars(lambda *xs: start(list(xs)), element or combine, dtypes).out_dtypes
    n = len(states)
    joined = scalars(lambda *ab: combine(list(ab[:n]), list(ab[n:])), combine, states * 2, n)
    if joined.out_dtypes != states:
        took, gave = (", ".join(d.name for d in dtypes) for dtypes in (states, joined.out_dtypes))
        raise TypeError(f"{joined.label} takes states of {took} and must return the same, not {gave}")
    end = finish or (lambda state, _: state)
    scalars(lambda *sx: end(list(sx[:n]), list(sx[n:])), finish or combine, [*states, *dtypes])
    numbers = None
    if exclusive is not None:
        numbers = tuple(np.asarray(c, d).item() for c, d in zip(exclusive, states, strict=True))
    return made, captured, numbers


def spec_of(functions, first, approximate=False) -> Associative:
    element, combine, finish = functions
    wide, coarse = tuple(map(computing, element.out_dtypes)), "approximate" if approximate else False
    return Associative(
        element.with_results(wide),
        of_scalars(combine.scalars, wide * 2, wide, combine.label, coarse),
        of_scalars(finish.scalars, (*wide, *element.in_dtypes), finish.out_dtypes, finish.label, coarse),
        first,
    )


@memo.remembered(64)
def with_results(spec, kept) -> Associative:
    """The same scan, which stores only the results at the places `kept`."""
    finish = spec.finish
    results = lambda *sx: (lambda ys: [ys[k] for k in kept])(finish.scalars(*sx))
    of_kept = of_scalars(results, finish.in_dtypes, [finish.out_dtypes[k] for k in kept], finish.label, finish.coarse)
    derivative = spec.derivative and with_results(spec.derivative, kept)
    return dataclasses.replace(spec, finish=of_kept, derivative=derivative)


@memo.remembered(64)
def of_states(spec) -> Associative:
    """The scan whose results are the states."""
    n, types = len(spec.states), [*spec.states, *spec.element.in_dtypes]
    finish = of_scalars(lambda *sx: sx[:n], types, spec.states, spec.finish.label, False)
    return dataclasses.replace(spec, finish=finish, first=None)


@memo.remembered(64)
def sums_of(xs, states, ys, first) -> Associative | None:
    """Cumulative sums in the dtypes `states`, of arrays of the dtypes `xs`, stored in the dtypes `ys`."""
    if not len(xs) == len(states) == len(ys) or any(not jnp.issubdtype(d, jnp.inexact) for d in (*xs, *states, *ys)):
        return None
    n, label = len(states), "jaxkern.associative_scan: sum"
    cast = lambda values, dtypes: [x.astype(computing(d)) for x, d in zip(values, dtypes)]
    return Associative(
        of_scalars(lambda *xs: cast(xs, states), xs, states, label, False),
        of_scalars(lambda *ab: [a + b for a, b in zip(ab[:n], ab[n:])], states * 2, states, label, False),
        of_scalars(lambda *sx: cast(sx[:n], ys), (*states, *xs), ys, label, False),
        None if first is None else (0.0,) * n,
    )


def as_sums(spec) -> Associative | None:
    """The derivative of a scan that is a cumulative sum, which is a cumulative sum; None for any other scan."""
    sums = sums_of(spec.element.in_dtypes, spec.states, spec.finish.out_dtypes, spec.first)
    same = sums and all(getattr(sums, k) == getattr(spec, k) for k in ("element", "combine", "finish"))
    return sums if same else None
