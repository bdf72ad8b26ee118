"""The environment variables of jaxkern: their names, defaults and meanings, and the only place that reads them.

docs/switches.md shows this table, and `python -m jaxkern` prints the variables that are set. An invalid value raises a warning
that names the variable, and the default is used. Only JAXKERN_BACKEND raises an error.
"""

import functools
import os
import typing
import warnings


class Variable(typing.NamedTuple):
    name: str
    default: str
    meaning: str
    read: str  # when the value takes effect
    values: tuple[str, ...] = ()  # which it may have; empty: `read` accepts every value


VARIABLES = {
    v.name: v
    for v in (
        Variable(
            "JAXKERN_BACKEND",
            "kernels",
            "`xla`: every operation runs as XLA's own operations, as on a machine without the runtime",
            "at every compilation",
        ),
        Variable(
            "JAXKERN_CACHE_DIR",
            "$XDG_CACHE_HOME/jaxkern or ~/.cache/jaxkern",
            "folder of compiled kernels; empty: no cache on disk",
            "at import",
        ),
        Variable("JAXKERN_CACHE_MB", "512", "size limit of that folder in MiB", "at import"),
        Variable(
            "JAXKERN_DUMP",
            "",
            "folder for the source, log and cubin of every kernel that is compiled; without a GPU, for the kernels of programs "
            "that are lowered for CUDA",
            "at import",
        ),
        Variable(
            "JAXKERN_EXPLAIN",
            "0",
            "`1`: prints to standard error which operations of each program `accelerate` and `install` take and leave",
            "at every compilation",
            ("0", "1"),
        ),
        Variable(
            "JAXKERN_ONE_READ",
            "1",
            "`0`: cross-entropy computes loss and gradient in two reads of the logits",
            "at every compilation",
            ("0", "1"),
        ),
        Variable(
            "JAXKERN_PARTITION",
            "",
            "`batch`: operations do not partition themselves over devices; XLA partitions its own operations",
            "once, at the first compilation",
            ("batch",),
        ),
    )
}


def read(name: str) -> str | None:
    """The value of a variable of the table, or None if it is not set or its value is invalid."""
    value, allowed = os.environ.get(name), VARIABLES[name].values
    if value and allowed and value not in allowed:
        warn(name, f"it must be {' or '.join(map(repr, allowed))}, and is ignored")
        return None
    return value


def warn(name: str, problem: str) -> None:
    """Warns, once in a process, that the value of a variable cannot be used. `problem` says why and what is used instead."""
    _warn(f"{name} is {os.environ.get(name)!r}: {problem}")


@functools.cache
def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def xla_only() -> bool:
    """Whether JAXKERN_BACKEND leaves every operation to XLA. Raises a ValueError for an unknown value."""
    value = read("JAXKERN_BACKEND") or "kernels"
    if value not in ("kernels", "xla"):
        raise ValueError(f"JAXKERN_BACKEND is {value!r}: it must be 'kernels' or 'xla'")
    return value == "xla"


def xla_is_deterministic() -> bool:
    """Whether XLA's flags ask it for the same bits in every run."""
    return _is_deterministic(os.environ.get("XLA_FLAGS", ""))


@functools.lru_cache(maxsize=8)
def _is_deterministic(flags) -> bool:
    names = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")
    parts = (flag.partition("=") for flag in flags.split())
    return any(name in names and value.lower() in ("", "true", "1") for name, _, value in parts)


def given() -> dict[str, str]:
    """The variables of the table that are set, in characters that can be printed."""
    printable = lambda value: value.encode(errors="backslashreplace").decode()
    return {name: printable(os.environ[name]) for name in VARIABLES if name in os.environ}
