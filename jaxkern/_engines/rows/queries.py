"""The algorithms of an operation of rows, for `jaxkern.algorithms` to ask by the sizes and the type of its operand.

The result is taken to have this type as well, unless it is narrow.
"""

import typing

import jax.numpy as jnp

from jaxkern._engines.rows import layout, tuning
from jaxkern._engines.rows.layout import ALGORITHMS, DTYPES  # noqa: F401  as _core/algorithms.py asks

ORDINARY = {"narrow": False, "kept": (0, 0)}  # what an operation determines


class Problem(typing.NamedTuple):
    """Rows of `width` elements, which lie `inner` elements apart.

    backward: the gradient, from two arrays. narrow: the results have 8 bits. kept: words of an element that live from one stage to
    the next, of the operation and of its gradient.
    """

    rows: int
    width: int
    inner: int = 1
    dtype: str = "float32"
    backward: bool = False
    narrow: bool = ORDINARY["narrow"]
    kept: tuple = ORDINARY["kept"]


def _laid_out(problem) -> layout.Problem:
    """The problem as the engine has it; a plan asks with that itself."""
    if isinstance(problem, layout.Problem):
        return problem
    rows, width, inner, dtype, backward, narrow, kept = problem
    size = jnp.dtype(dtype).itemsize
    words = kept[backward] * max(1, size // 4)
    given = {"bytes": size * (1 + backward), "kept": words, "narrow": narrow, "pivots": words > 0}
    if inner == 1:
        pack = tuning.PACK_BYTES // (2 if narrow else max(2, size))
        return layout.Problem(rows, width, pack=pack, **given)
    numbers = layout.Problem._field_defaults["numbers"]
    pack = layout.strided_pack(inner, size, numbers)
    problem = layout.Problem(rows * inner, width, pack=pack, inner=inner, itemsize=size, **given)
    return layout.shifted(problem, inner, numbers)


def fits(algorithm, problem, device=None) -> bool:
    return layout.fits(algorithm, _laid_out(problem), device)


def choose(problem, device=None) -> str:
    return layout.choose(_laid_out(problem), device)
