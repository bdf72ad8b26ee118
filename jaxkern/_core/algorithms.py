"""The algorithms of each operation, and the ones that a thread forces.

The plan module of a family lists its algorithms in `ALGORITHMS` and the dtypes of its kernels in `DTYPES`, and defines
`Problem` (a NamedTuple), `fits(algorithm, problem, device)` and `choose(problem, device)`. `register` makes them known
under the name of an operation; `jaxkern.algorithms` is the public side.
"""

import contextlib
import types
import typing

import jax


class Family(typing.NamedTuple):
    """The module that defines an operation's algorithms. `fixed`: the fields of `Problem` that the operation determines."""

    plan: types.ModuleType
    fixed: dict


families: dict[str, Family] = {}

# (operation, algorithm) pairs, sorted. Part of the key of every cache of traces and programs, and local to a thread.
_forced = jax.make_user_context(())


def register(plan: types.ModuleType, *operations: str, **fixed) -> None:
    """Makes the algorithms of a plan module known under the names of these operations."""
    families.update({operation: Family(plan, fixed) for operation in operations})


@contextlib.contextmanager
def force(algorithms: dict[str, str]):
    """Context manager: operations use these algorithms ("auto" for their own choice); other operations as before."""
    merged = dict(_forced.value) | algorithms
    with _forced(tuple(sorted((k, v) for k, v in merged.items() if v != "auto"))):
        yield


_EVERY = "*"  # the name under which `force_xla` is kept


def force_xla():
    """Context manager: every operation is left to XLA."""
    return force({_EVERY: "xla"})


def xla_forced() -> bool:
    """Whether this thread leaves every operation to XLA."""
    return forced(_EVERY) == "xla"


def forced(operation: str) -> str:
    """The algorithm that this thread forces on an operation, or "auto"."""
    return dict(_forced.value).get(operation, "auto")


def pick(operation: str, algorithm: str, problem, device=None) -> str:
    """The algorithm that runs a problem: the given one, or the plan's choice for "auto".

    Raises:
        ValueError: the given algorithm cannot run the problem.
    """
    plan = families[operation].plan
    if algorithm == "auto":
        return plan.choose(problem, device)
    if algorithm not in plan.ALGORITHMS or not plan.fits(algorithm, problem, device):
        fitting = [a for a in plan.ALGORITHMS if plan.fits(a, problem, device)]
        raise ValueError(
            f"jaxkern.{operation}: the algorithm '{algorithm}' cannot run {problem}; {', '.join(fitting)} can"
        )
    return algorithm
