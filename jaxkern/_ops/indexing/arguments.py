"""Arguments that public functions of indices have in common."""

import typing

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern._core import validate
from jaxkern._ops.indexing.reference import Rules

Mode = str | jax.lax.GatherScatterMode | None
MODES = ("None", "'fill'", "'drop'", "'clip'", "'promise_in_bounds'")


def safe_index(index: typing.Any) -> typing.Any:
    """Clips 64-bit NumPy indices to int32 if x64 is off, because jit would truncate them.

    An index that does not fit becomes a limit of int32, which is out of range too.
    """
    wide = isinstance(index, (np.ndarray, np.generic)) and index.dtype.kind in "iu" and index.dtype.itemsize == 8
    if wide and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        limits = np.iinfo(np.int32)
        return np.clip(index, max(limits.min, int(np.iinfo(str(index.dtype)).min)), limits.max).astype(np.int32)
    return index


def integers(name: str, argument: str, index: typing.Any, hint: str = "") -> jax.Array:
    """Checks that `index` is an integer array; widens integers of fewer than 8 bits. hint: the end of the error."""
    if not jnp.issubdtype(index.dtype, jnp.integer):
        got = f"{index.dtype}{list(index.shape)}"
        raise TypeError(f"jaxkern.{name}: {argument} must be of an integer type, got {got}{hint}")
    return index.astype(jnp.int8) if jnp.iinfo(index.dtype).bits < 8 else index


def scatter_mode(name, mode):
    try:
        found = jax.lax.GatherScatterMode.from_any(mode)
    except (ValueError, TypeError):
        found = None
    if found is None or found.name not in ("CLIP", "FILL_OR_DROP", "PROMISE_IN_BOUNDS"):
        raise ValueError(f"jaxkern.{name}: mode must be one of {', '.join(MODES)}, got {validate.shown(mode)}")
    return found


def rules_of(name: str, axis: int, mode: Mode, **others) -> Rules:
    """The rules of the public function `name`; others: further fields."""
    return Rules(
        validate.integer(name, "axis", axis), clip=scatter_mode(name, mode) == jax.lax.GatherScatterMode.CLIP, **others
    )
