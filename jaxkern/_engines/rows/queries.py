"""The algorithms of an operation of rows, for `jaxkern.algorithms` to ask by the sizes and the type of its operand.

The result is taken to have this type as well, unless it is narrow, and no values of elements to be kept between stages.
"""

import typing

import jax.numpy as jnp

from jaxkern._engines.rows import layout, tuning
from jaxkern._engines.rows.layout import ALGORITHMS, DTYPES  # noqa: F401  as _core/algorithms.py asks


class Problem(typing.NamedTuple):
    """Rows of `width` elements, which lie `inner` elements apart. narrow: the results have 8 bits."""

    rows: int
    width: int
    inner: int = 1
    dtype: str = "float32"
    narrow: bool = False


def _laid_out(problem) -> layout.Problem:
    """The problem as the engine has it; a plan asks with that itself."""
    if isinstance(problem, layout.Problem):
        return problem
    rows, width, inner, dtype, narrow = problem
    size = jnp.dtype(dtype).itemsize
    if inner == 1:
        pack = tuning.PACK_BYTES // (2 if narrow else max(2, size))
        return layout.Problem(rows, width, size, pack, narrow=narrow)
    numbers = layout.Problem._field_defaults["numbers"]
    pack = layout.strided_pack(inner, size, numbers)
    return layout.shifted(layout.Problem(rows * inner, width, size, pack, inner=inner, itemsize=size), inner, numbers)


def fits(algorithm, problem, device=None) -> bool:
    return layout.fits(algorithm, _laid_out(problem), device)


def choose(problem, device=None) -> str:
    return layout.choose(_laid_out(problem), device)
