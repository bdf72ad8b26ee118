"""What was taken and what was left, and why: records, and the table that shows them."""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import site
import sys
import sysconfig
import threading

import jax
import numpy as np

from jaxkern._core import compat, environment, stablehlo, switch

WIDTH = 60  # of the column of operands


@dataclasses.dataclass(frozen=True)
class Decision:
    """One operation of a program.

    Attributes:
        operation: its name in `accelerate(only=...)`.
        taken: whether it runs on jaxkern.
        reason: why, or why not. It begins with "on request" if the operation is taken only if it is named.
        shapes: the shapes of its operands.
        source: file:line of the code that made it.
        bytes: the least that a kernel of jaxkern reads and writes for it; 0 if that is unknown.
        dtype: the type of its first operand.
    """

    operation: str
    taken: bool
    reason: str
    shapes: str
    source: str
    bytes: int = 0
    dtype: str = ""


_local = threading.local()


@contextlib.contextmanager
def recorded():
    """Yields a list, to which the decisions of this thread inside the block are added."""
    lists = _local.__dict__.setdefault("lists", [])
    found = []
    lists.append(found)
    try:
        yield found
    finally:
        # By identity: the lists of nested blocks are equal while they have the same decisions.
        del lists[next(k for k, other in enumerate(lists) if other is found)]


@contextlib.contextmanager
def noted():
    """Suppresses records in this thread. For lowering an operation whose decision is recorded already."""
    before, _local.noted = getattr(_local, "noted", False), True
    try:
        yield
    finally:
        _local.noted = before


def printed() -> bool:
    """Whether decisions are printed."""
    return environment.read("JAXKERN_EXPLAIN") == "1"


def listened() -> bool:
    """Whether decisions of this thread are recorded or printed."""
    return not getattr(_local, "noted", False) and bool(_local.__dict__.get("lists") or printed())


def record(operation, taken, reason, avals, frames, bytes=0) -> bool:
    """Notes a decision, prints it if JAXKERN_EXPLAIN=1, and returns whether the operation is taken.

    It is not taken if `explain` only lists it, as an operation on request. frames: a function that returns the stack
    frames of the code that made the operation.
    """
    settings = switch.current()
    if settings is not None and operation in settings.listed:
        taken, reason = False, f"on request: {reason}" if taken else f"on request, but {reason}"
    if getattr(_local, "noted", False):
        return taken
    lists = _local.__dict__.get("lists", ())
    if lists or printed():
        shapes = ", ".join(a.str_short(short_dtypes=True) for a in avals)
        decision = Decision(operation, bool(taken), reason, shapes, source_of(frames()), bytes, avals[0].dtype.name)
        for found in lists:
            found.append(decision)
        if printed():
            print(f"jaxkern: {_line(decision)}", file=sys.stderr)
    return bool(taken)


def record_call(ctx, operation, why, reason, avals, bytes) -> bool:
    """`record`, for a primitive that is being lowered in `ctx`; why: it is left to XLA, "" if it is not."""
    return record(operation, not why, why or reason, avals, functools.partial(compat.frames, ctx.traceback), bytes)


def why_left(ctx, value, what) -> str:
    """Why an operation of a replaced function is left to XLA, "" if it is not; it reads `value`, which messages call `what`."""
    settings = switch.current()
    why = switch.refusal(ctx, settings)
    if not why and not (settings and settings.force) and stablehlo.is_arithmetic(ctx, value):
        why = f"XLA fuses the arithmetic or slice that makes the {what}"
    return why


def megabytes(count: int) -> str:
    return f"{count / 1e6:.3g}" if count < 999.5e6 else f"{count / 1e6:.0f}"


def _short(shapes: str) -> str:
    """Shapes in a column of a table: equal neighbours once, with their number, and as many as have room."""
    runs = [(shape, len(list(run))) for shape, run in itertools.groupby(shapes.split(", "))]
    texts = [shape if n == 1 else f"{n} x {shape}" for shape, n in runs]
    kept = [k for k in range(1, len(texts) + 1) if len(", ".join(texts[:k])) <= WIDTH] or [1]
    return ", ".join(texts[: kept[-1]]) + ", ..." * (kept[-1] < len(texts))


def _line(d: Decision) -> str:
    return f"{'took' if d.taken else 'left'} {d.operation} {d.shapes} at {d.source}: {d.reason}"


_OWN = [str(pathlib.Path(p).parent) + os.sep for p in (jax.__file__, np.__file__, pathlib.Path(__file__).parent)]
_PACKAGES = tuple(
    {
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        sysconfig.get_path("stdlib"),
        *site.getsitepackages(),
    }
)


def source_of(frames) -> str:
    """file:line of the innermost frame outside installed packages, or else outside JAX and this library.

    JAX does not know who called a function that it jits itself, such as jnp.take: that function's name is given then.
    """
    outside = [f for f in frames if not f[0].startswith((*_OWN, "<"))]
    users = [f for f in outside if not f[0].startswith(_PACKAGES)]
    if not outside:
        return f"jax: {frames[-1][2]}" if frames else "?"
    file, line, _ = (users or outside)[0]
    roots = [path + os.sep for path in _PACKAGES] if not users else [os.getcwd() + os.sep]
    inside = max((root for root in roots if file.startswith(root)), key=len, default="")
    return f"{file.removeprefix(inside)}:{line}"


class Explanation(collections.abc.Sequence):
    """What `jaxkern.explain` found: a sequence of `Decision`. As text, it is a table with one line for equal decisions."""

    def __init__(self, decisions, note=""):
        """note: what the text says below the table."""
        self.decisions, self._note = list(decisions), note

    @property
    def taken(self) -> list[Decision]:
        """The operations that run on jaxkern."""
        return [d for d in self.decisions if d.taken]

    @property
    def left(self) -> list[Decision]:
        """The operations that are left to XLA."""
        return [d for d in self.decisions if not d.taken]

    def __getitem__(self, at):
        return self.decisions[at]

    def __len__(self):
        return len(self.decisions)

    def __str__(self) -> str:
        if not self.decisions:
            return (
                "jaxkern: the program has no operation of plain JAX that jaxkern could take. Not listed are rows of arrays with fewer "
                "than 65536 elements, calls of jaxkern's own functions, and what no result of the function needs: return the "
                "gradients, too, if they are missing here"
            )
        head = ("", "operation", "operands", "MB", "why", "where")
        rows = [head]
        for d, count in collections.Counter(self.decisions).items():
            mark, size = "taken" if d.taken else "left", megabytes(d.bytes) if d.bytes else ""
            mark = f"{mark}, {count} times" if count > 1 else mark
            rows.append((mark, d.operation, _short(d.shapes), size, d.reason, d.source))
        widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, *([self._note] if self._note else [])])

    __repr__ = __str__
