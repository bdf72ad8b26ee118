"""Elements as kernels of selections, sorts and searches read them: dtypes, their order, and gathers at selected indices."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxkern._core import compat, validate
from jaxkern._core.primitive import has_tangent

DTYPES = (
    *("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"),
    *("int8", "int16", "int32", "uint8", "uint16", "uint32", "bool"),
)


def element(dtype, floats="Float") -> str:
    """An element as kernels read it: its bits, and their order. floats: "Total" where a sort is to have the order of lax.top_k."""
    order = floats if jnp.issubdtype(dtype, jnp.floating) else "Signed" if dtype.kind == "i" else "Unsigned"
    return f"uint{8 * dtype.itemsize}_t, jaxkern::Order::k{order}"


def largest(dtype) -> int:
    """The bits of the largest number that is not NaN; 0 for types without NaN."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return 0
    most = np.array(np.inf, dtype)
    most = most if np.isinf(most) else np.array(jnp.finfo(dtype).max, dtype)
    return int(most.view(f"uint{8 * dtype.itemsize}"))


def gathered(values, tangent, indices):
    """The tangent of values that were selected at these indices."""
    if not has_tangent(tangent):
        return compat.zero_tangent(values)
    return taken_along(tangent, indices, tangent.ndim - 1)


def taken_along(x, indices, axis):
    """`jnp.take_along_axis` of indices that are in bounds. On a mesh with explicit axes the result is split as the indices are."""
    x, whole = validate.whole(x, axis), validate.whole(indices, axis)
    found = jnp.take_along_axis(x, whole, axis, mode="promise_in_bounds")
    return validate.split_like(found, jax.typeof(indices))
