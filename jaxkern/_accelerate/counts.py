"""Scatter-adds of one number in a jaxpr: `jnp.bincount`, `jnp.histogram`, `jnp.zeros(n).at[ids].add(1)`.

counted = of(equation, made)
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkern._accelerate import layout as layouts
from jaxkern._accelerate.calls import Counted
from jaxkern._accelerate.equations import is_variable

NAMES = ("scatter-add", "scatter_add")
# Sums of ones that a floating-point type holds exactly.
EXACT = {"float32": 1 << 24, "float64": 1 << 31}
_SAME = frozenset("broadcast_in_dim convert_element_type reshape copy copy_p pvary pcast mesh_cast reshard".split())


def of(e, made) -> Counted | None:
    """The counts that a scatter-add is; None if it is something else. made: {variable: the equation that makes it}."""
    if e.invars[2].aval.dtype != e.invars[0].aval.dtype:
        return None
    weight = _number(e.invars[2], made)
    if weight is None:
        return None
    operand, indices, updates = (v.aval for v in e.invars)
    layout = layouts.of(e.params["dimension_numbers"], operand.shape, indices.shape, updates.shape)
    if isinstance(layout, str) or layout.lead or layout.trail or len(layout.indexed) != 1:
        return None
    if jnp.issubdtype(operand.dtype, jnp.integer):
        exact = True
    else:
        exact = weight == 1 and updates.size <= EXACT.get(operand.dtype.name, 0) and _number(e.invars[0], made) == 0
    clip = e.params["mode"] == lax.GatherScatterMode.CLIP
    return Counted(layout, clip, int(weight)) if exact else None


def _number(v, made):
    """The integer that all elements of an array are, or None; also where a type that they pass through does not hold it."""
    types = set()
    while is_variable(v):
        e = made.get(v)
        if e is None or e.primitive.name not in _SAME:
            return None
        types.add(v.aval.dtype)
        v = e.invars[0]
    value = np.asarray(v.val)
    if value.shape or value.dtype.kind not in "iuf" or not np.isfinite(value) or value != np.rint(value):
        return None
    with np.errstate(invalid="ignore"):
        return int(value) if all(value.astype(t) == value for t in types) else None
