"""Which algorithm runs an operation on CUDA: ask for it, or force one, in tests and benchmarks.

    algorithms.names("softmax")                                   -> ("thread", "lanes", "warp", ...)
    algorithms.choose("softmax", 49152, 512, dtype="bfloat16")         -> "warp"; works without a GPU
    algorithms.choose("index_add", 169343, 1166243, 128)               -> "sort"
    algorithms.choose("reduce_sum", 1, 1 << 26, device=algorithms.A100)     -> "split"
    with algorithms.force(softmax="block"): jaxkern.softmax(x)
    with algorithms.force_xla(): jaxkern.softmax(x)                    -> XLA's own operations

Algorithms differ in speed and, by rounding, in the last bits of the result, never in meaning. `elementwise` stands for all
elementwise operations. `segment_mean` runs as `segment_sum`, and `embedding_lookup` as `index_select`.
"""

from __future__ import annotations

import contextlib
import operator
import typing
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from jaxkern._core import algorithms as _algorithms
from jaxkern._core import package as _package
from jaxkern._core.device import A100, H200, Device, this_device

__all__ = ["A100", "H200", "Device", "choose", "fits", "force", "force_xla", "names", "operations", "this_device"]

_package.publish(__name__, Device, this_device)


def operations() -> tuple[str, ...]:
    """The names of the operations that have algorithms.

    Returns:
        A tuple of names, sorted.

    >>> from jaxkern import algorithms
    >>> "segment_softmax" in algorithms.operations()
    True
    """
    return tuple(sorted(_algorithms.families))


def names(operation: str) -> tuple[str, ...]:
    """The algorithms of an operation.

    Args:
        operation: one of `operations()`.

    Returns:
        A tuple of names.

    Raises:
        ValueError: no operation has this name.

    >>> from jaxkern import algorithms
    >>> algorithms.names("reduce_sum")
    ('thread', 'lanes', 'warp', 'block', 'cluster', 'streaming', 'split', 'strided')
    """
    return tuple(_family("names", operation).plan.ALGORITHMS)


def choose(operation: str, *sizes: int, device: Device | None = None, **problem: object) -> str:
    """The algorithm that runs an operation by default.

    Args:
        operation: one of `operations()`.
        sizes, problem: the sizes and types of the problem, by position or by name; an error lists them. Row operations
            take `rows, width, inner, dtype`: the number of elements before, along and after the axis. Operations at
            indices take `rows, count, inner, dtype`: the rows of the indexed array, the indices, and the elements
            of a row.
        device: H200, A100 or another `Device`; by default the GPU of this machine, or an H200 if there is none.

    Returns:
        The name of an algorithm, one of `names(operation)`.

    Raises:
        ValueError: no such operation, a size is not positive, or there is no kernel for a dtype or the whole problem.
        TypeError: an argument is of the wrong type, missing or unknown.

    >>> from jaxkern import algorithms
    >>> algorithms.choose("softmax", 49152, 512, dtype="bfloat16", device=algorithms.H200)
    'warp'
    """
    family, asked, device = _asked("choose", operation, sizes, problem, device)
    if not any(family.plan.fits(algorithm, asked, device) for algorithm in family.plan.ALGORITHMS):
        raise ValueError(f"jaxkern.algorithms.choose: no algorithm of {operation} can run {asked}")
    return family.plan.choose(asked, device)


def fits(operation: str, algorithm: str, *sizes: int, device: Device | None = None, **problem: object) -> bool:
    """Whether an algorithm can run a problem.

    Args:
        operation: one of `operations()`.
        algorithm: one of `names(operation)`.
        sizes, problem: the sizes and types of the problem, as for `choose`.
        device: H200, A100 or another `Device`, as for `choose`.

    Returns:
        A bool.

    Raises:
        ValueError: no such operation or algorithm, a size is not positive, or there is no kernel for a dtype.
        TypeError: an argument is of the wrong type, missing or unknown.

    >>> from jaxkern import algorithms
    >>> algorithms.fits("softmax", "warp", 49152, 512, dtype="bfloat16")
    True
    """
    _known("fits", operation, algorithm)
    family, asked, device = _asked("fits", operation, sizes, problem, device)
    return family.plan.fits(algorithm, asked, device)


@contextlib.contextmanager
def force(**algorithm: str) -> Iterator[None]:
    """Context manager: the named operations, called by this thread, run the given algorithms on CUDA.

    Args:
        algorithm: operations by name, and for each one of `names(operation)`, or "auto".

    Returns:
        A context manager.

    Jitted calls and gradients too. "auto" ends the force of an enclosing block. An algorithm that cannot run a problem
    (see `fits`) raises a ValueError when the call is lowered for CUDA. Other platforms have no algorithms and ignore it.

    Raises:
        ValueError: no such operation, or it has no such algorithm.

    >>> import jax.numpy as jnp, jaxkern
    >>> with jaxkern.algorithms.force(softmax="streaming"):
    ...     jaxkern.softmax(jnp.zeros(4)).tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    for operation, name in algorithm.items():
        _known("force", operation, name, "auto")
    with _algorithms.force(algorithm):
        yield


@contextlib.contextmanager
def force_xla() -> Iterator[None]:
    """Context manager: every operation of this library, called by this thread, runs as XLA's own operations.

    Returns:
        A context manager.

    Jitted calls and gradients too. It tells whether a difference or an error stems from a kernel. On several devices XLA
    partitions these operations. The environment variable JAXKERN_BACKEND=xla does the same for a whole process.

    >>> import jax.numpy as jnp, jaxkern
    >>> with jaxkern.algorithms.force_xla():
    ...     jaxkern.softmax(jnp.zeros(4)).tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    with _algorithms.force_xla():
        yield


# ---- arguments


def _family(function, operation):
    if operation not in _algorithms.families:
        raise ValueError(
            f"jaxkern.algorithms.{function}: no operation {operation!r}, there are {', '.join(operations())}"
        )
    return _algorithms.families[operation]


def _known(function, operation, algorithm, *others):
    names = _family(function, operation).plan.ALGORITHMS
    if algorithm not in (*names, *others):
        raise ValueError(
            f"jaxkern.algorithms.{function}: {operation} has no algorithm {algorithm!r}, there are {', '.join(names)}"
        )


def _asked(function, operation, sizes, problem, device):
    """(family, problem, device), checked."""
    name = f"jaxkern.algorithms.{function}"
    family = _family(function, operation)
    kinds = {k: t for k, t in typing.get_type_hints(family.plan.Problem).items() if k not in family.fixed}
    given = dict(zip(kinds, sizes))
    if len(sizes) > len(kinds) or given.keys() & problem.keys() or problem.keys() - kinds.keys():
        raise TypeError(f"{name}: {operation} takes {', '.join(kinds)}, got {(*sizes, *problem)}")
    given |= problem
    missing = [k for k in kinds if k not in given and k not in family.plan.Problem._field_defaults]
    if missing:
        raise TypeError(f"{name}: {operation} needs {', '.join(missing)}")
    defaults = family.plan.Problem._field_defaults
    is_default = lambda k, v: k in defaults and type(v) is type(defaults[k]) and v == defaults[k]
    checked = {k: v if is_default(k, v) else _checked(name, k, v, kinds[k], family.plan) for k, v in given.items()}
    device = this_device() if device is None else device
    if not isinstance(device, Device):
        raise TypeError(f"{name}: device must be a jaxkern.algorithms.Device or None, got {type(device).__name__}")
    for field, n in device._asdict().items():
        _positive(name, f"device.{field}", n, 1 << 31)
    return family, family.plan.Problem(**family.fixed, **checked), device


def _checked(name, argument, value, kind, plan):
    """A field of a problem as the plan takes it."""
    if argument.endswith("dtype"):
        dtype = _dtype(name, argument, value)
        known = plan.INDEX_DTYPES if argument == "index_dtype" else plan.DTYPES
        if dtype.name not in known:
            raise ValueError(f"{name}: no kernel for {argument} {dtype}, there are {', '.join(sorted(known))}")
        return dtype if kind is np.dtype else dtype.name
    if kind is bool:
        if not isinstance(value, bool):
            raise TypeError(f"{name}: {argument} must be True or False, got {value!r}")
        return value
    if typing.get_origin(kind) is typing.Literal:
        if value not in typing.get_args(kind):
            raise ValueError(f"{name}: {argument} must be one of {', '.join(typing.get_args(kind))}, got {value!r}")
        return value
    if kind is int:
        return _positive(name, argument, value)
    return tuple(tuple(_positive(name, argument, n) for n in shape) for shape in value)  # shapes


def _positive(name, argument, value, limit=1 << 63) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name}: {argument} must be an int, got {value!r}")
    if not 1 <= number < limit:
        raise ValueError(f"{name}: {argument} must be {'positive' if number < 1 else f'below {limit}'}, got {number}")
    return number


def _dtype(name, argument, value):
    try:
        known = jnp.dtype(value)
    except TypeError:
        raise TypeError(f"{name}: {argument} must be a dtype or the name of one, got {value!r}") from None
    if value is None:  # NumPy reads None as float64
        raise ValueError(f"{name}: no kernel for {argument} None")
    return known
