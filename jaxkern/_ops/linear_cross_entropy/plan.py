"""How the linear cross-entropy is cut into chunks, from a budget of memory.

    whole        all logits at once, which the gradient overwrites
    rows         chunks of rows. Each adds its part of the weight's gradient to an accumulator, which is float32 for 16-bit
                 and float32 operands. Without that gradient there is no accumulator
    vocabulary   chunks of rows for the loss and the gradient of h; of each chunk's gradient, the first `kept` columns are
                 stored. The weight's gradient needs them for all rows: the stored columns as they are, the others by
                 computing their logits again, in chunks of columns. No accumulator

Bytes beside operands and results, for rows n, width d, vocabulary v (rounded up to a multiple of 8 for 16-bit h), itemsizes e
of the logits, eh of h and ew of the weight; b = 1, or 2 with a soft cap, or 1 + eh / e if the logits are of another type than h:

    whole        n v e b
    rows         r v e b + 4 d v         r: rows of a chunk. The accumulator, of 8 d v for float64, is the result itself if the
                                         weight is of its type and v has not been rounded
    vocabulary   the larger of r v e b + n k eh,  k (n eh + d ew)  and  n c e b + d c (eh + ew)
                                         k: stored columns, c: columns of a chunk

and in each d v eh for a copy of the weight, if it is not of the type of h or v has been rounded, and 16 bytes per row. One
sixteenth of the budget, up to 32 MiB, is left to cuBLAS as its workspace.
"""

import typing

import numpy as np

from jaxkern._core.define import ceil_div
from jaxkern._core.device import Device
from jaxkern._ops.linear_cross_entropy import tuning

ALGORITHMS = ("whole", "rows", "vocabulary")
DTYPES = ("float16", "bfloat16", "float32", "float64")


class Problem(typing.NamedTuple):
    """h [rows, width] and a weight of `vocabulary` columns. An empty dtype stands for the dtype of h.

    which: what is computed, the loss alone, with the gradient of one operand, or with both.
    memory: the budget in bytes; 0: the default. cap: whether there is a soft cap.
    """

    rows: int
    width: int
    vocabulary: int
    dtype: str = "bfloat16"
    weight_dtype: str = ""
    logits_dtype: str = ""
    which: typing.Literal["loss", "h", "weight", "both"] = "both"
    memory: int = 0
    cap: bool = False


class Chunks(typing.NamedTuple):
    """An algorithm and its chunks. bytes: what the formula says of them.

    rows: the rows of a chunk. kept, columns (of `vocabulary`): the columns that are stored, and the columns of each chunk of
    the others.
    """

    algorithm: str
    rows: int
    kept: int = 0
    columns: int = 0
    bytes: int = 0


class _Sizes(typing.NamedTuple):
    """The terms of the formula, in bytes."""

    vocabulary: int
    logit: int  # one logit with all its copies
    stored: int  # one element of a stored gradient
    column: int  # one column of the weight's gradient
    slices: int  # one column of the weight and of its gradient
    accumulator: int
    fixed: int


def padded(vocabulary: int, dtype) -> int:
    """The columns of a chunk of logits. cuBLAS needs rows of whole 16-byte vectors; XLA would copy others into such rows."""
    return vocabulary if np.dtype(dtype).itemsize != 2 else ceil_div(vocabulary, 8) * 8


def _itemsize(name: str) -> int:
    return 2 if name == "bfloat16" else np.dtype(name).itemsize


def _sizes(p: Problem) -> _Sizes:
    h, weight, logits = (_itemsize(name or p.dtype) for name in (p.dtype, p.weight_dtype, p.logits_dtype))
    v = ceil_div(p.vocabulary, 8) * 8 if h == 2 else p.vocabulary
    other = (p.logits_dtype or p.dtype) != p.dtype
    wide = "float64" if p.dtype == "float64" else "float32"
    in_place = v == p.vocabulary and (p.weight_dtype or p.dtype) == wide
    copied = v != p.vocabulary or (p.weight_dtype or p.dtype) != p.dtype
    return _Sizes(
        vocabulary=v,
        logit=logits * (1 + p.cap) + h * other,
        stored=h,
        column=p.width * weight,
        slices=p.width * (h + weight),
        accumulator=0 if in_place or p.which in ("loss", "h") else p.width * v * (8 if wide == "float64" else 4),
        fixed=16 * p.rows + copied * p.width * v * h,
    )


def budget(p: Problem) -> int:
    """The bytes that a problem may take."""
    s = _sizes(p)
    return p.memory or _with_workspace(tuning.CHUNK + s.accumulator + s.fixed)


def _with_workspace(n: int) -> int:
    """The budget that leaves n bytes beside the workspace."""
    return n + min(tuning.WORKSPACE, ceil_div(n, 15))


def _available(p: Problem) -> int:
    total = budget(p)
    return total - min(tuning.WORKSPACE, total // 16) - _sizes(p).fixed


def _rounded(n: int, unit: int = tuning.COLUMNS) -> int:
    """n rounded down to a multiple of `unit` if it is as large."""
    return n // unit * unit if n >= unit else n


def _by_rows(p: Problem) -> Chunks | None:
    """Chunks of rows within the budget: equal ones if there are few more of these, else as large as possible."""
    s = _sizes(p)
    most = min(p.rows, (_available(p) - s.accumulator) // (s.vocabulary * s.logit))
    if most < 1:
        return None
    most = p.rows if most == p.rows else _rounded(_rounded(most), 8 * tuning.COLUMNS)
    count = ceil_div(p.rows, most)
    equal = (ceil_div(p.rows, n) for n in range(count, 2 * count + 1) if p.rows % n == 0)
    r = next((r for r in equal if r <= most and r % tuning.COLUMNS == 0), most)
    return Chunks("rows", r, bytes=r * s.vocabulary * s.logit + s.accumulator + s.fixed)


def _by_columns(p: Problem) -> Chunks | None:
    s, free = _sizes(p), _available(p)
    row = s.vocabulary * s.logit  # bytes of a row of logits
    r = min(p.rows, tuning.ROWS)
    while r > 1 and 2 * r * row > free:
        r = ceil_div(r, 2)
    most = free // (p.rows * s.logit + s.slices)  # columns of a chunk
    if r * row > free or most < 1:
        return None
    kept = min((free - r * row) // (p.rows * s.stored), free // (p.rows * s.stored + s.column), s.vocabulary)
    kept = kept if kept == s.vocabulary else _rounded(kept)
    left, c = s.vocabulary - kept, 0
    if left:
        most = _rounded(most)
        even = ceil_div(left, ceil_div(left, most))
        c = min(most, ceil_div(even, tuning.COLUMNS) * tuning.COLUMNS)
    phases = (
        r * row + p.rows * kept * s.stored,
        kept * (p.rows * s.stored + s.column),
        c * (p.rows * s.logit + s.slices),
    )
    return Chunks("vocabulary", r, kept, c, max(phases) + s.fixed)


def _found(algorithm: str, p: Problem) -> Chunks | None:
    """The chunks of an algorithm, or None if it does not fit the budget."""
    s = _sizes(p)
    if algorithm == "whole":
        n = p.rows * s.vocabulary * s.logit
        return Chunks("whole", p.rows, bytes=n + s.fixed) if n <= _available(p) else None
    if algorithm == "rows":
        return _by_rows(p)
    return _by_columns(p) if p.which in ("weight", "both") else None


def fits(algorithm: str, problem: Problem, device: Device | None = None) -> bool:
    del device
    return _found(algorithm, problem) is not None


def choose(problem: Problem, device: Device | None = None) -> str:
    """The fastest algorithm within the budget.

    Raises:
        ValueError: no algorithm fits.
    """
    del device
    if fits("whole", problem):
        return "whole"
    rows, columns = _found("rows", problem), _found("vocabulary", problem)
    if rows and (not columns or rows.rows >= min(tuning.ROWS, problem.rows)):
        return "rows"
    if columns:
        return "vocabulary"
    raise ValueError(
        f"jaxkern.linear_softmax_cross_entropy: memory={problem.memory} is too little for rows of "
        f"{problem.vocabulary} logits: {least(problem)} bytes suffice"
    )


def least(problem: Problem) -> int:
    """A small budget that suffices, in bytes."""
    s = _sizes(problem)
    needed = (
        max(s.vocabulary * s.logit, problem.rows * s.logit + s.slices) if problem.which in ("weight", "both") else 0
    )
    return _with_workspace(max(needed, s.vocabulary * s.logit) + s.fixed) + 16


def chunks(problem: Problem, algorithm: str = "auto") -> Chunks:
    """The chunks of a problem, by the given algorithm or by the chosen one.

    Raises:
        ValueError: the algorithm does not fit the budget.
    """
    found = _found(choose(problem) if algorithm == "auto" else algorithm, problem)
    if found is None:
        fitting = [a for a in ALGORITHMS if fits(a, problem)]
        raise ValueError(
            f"jaxkern.linear_softmax_cross_entropy: the algorithm '{algorithm}' cannot run {problem}; "
            f"{', '.join(fitting) or 'none'} can"
        )
    return found
