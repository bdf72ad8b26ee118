"""Integers of a loop's body that are known in every step, such as indices: equations on them in NumPy.

    result = number(equation, operands)

The operands and the result are arrays of the values in all steps, one row for each step.
"""

import jax.numpy as jnp
import numpy as np

from jaxkern._engines.loops.indexing import MOST

_COMPUTED = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "lt": np.less,
    "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.bitwise_not, "neg": np.negative,
    "sign": np.sign, "abs": np.abs, "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "rem": np.fmod, "div": lambda x, y: (x - np.fmod(x, y)) // y, "select_n": lambda which, *xs: np.choose(which.astype(int), xs),
    "convert_element_type": lambda x: x, "copy": lambda x: x, "stop_gradient": lambda x: x,
}  # fmt: skip


def is_whole(v) -> bool:
    """Whether a variable holds integers or booleans."""
    return v.aval.dtype == np.bool_ or jnp.issubdtype(v.aval.dtype, jnp.integer)


def number(e, values):
    """The result of an equation on known integers; None if it is not known."""
    name, (out,) = e.primitive.name, e.outvars
    if not is_whole(out) or not values or any(not isinstance(v, np.ndarray) for v in values) or out.aval.size > MOST:
        return None
    x, shape = values[0], (len(values[0]), *out.aval.shape)
    if name == "squeeze" or name == "reshape" and e.params["dimensions"] is None:
        return x.reshape(shape)
    if name == "broadcast_in_dim":
        places = e.params["broadcast_dimensions"]
        own = [x.shape[1 + places.index(d)] if d in places else 1 for d in range(len(out.aval.shape))]
        return np.broadcast_to(x.reshape(len(x), *own), shape)
    if name == "concatenate":
        return np.concatenate(values, 1 + e.params["dimension"])
    # Some operands may be scalars.
    values = [np.broadcast_to(v.reshape(*v.shape, *(1,) * (len(shape) - v.ndim)), shape) for v in values]
    return computed(name, values, out.aval.dtype)


def computed(name, values, dtype):
    """An elementwise operation on known integers; None if it is not known."""
    if name not in _COMPUTED or name in ("rem", "div") and not np.all(values[1]):
        return None
    return np.asarray(_COMPUTED[name](*values)).astype(dtype)
