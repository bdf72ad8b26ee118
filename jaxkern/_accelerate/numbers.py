"""Integers that are known while a program is lowered: constants, places, and what is computed from them."""

import contextlib

import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir

MOST = 16  # operations from a value to a constant
_COMPUTED = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply, "select": np.where}
_COMPARED = {"EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal}
_COMPARED |= {"GT": np.greater, "GE": np.greater_equal}


def known(value, found, most=MOST):
    """The number or the array of integers that a `program.Value` is; None if it is not known.

    found: {Value: what this function returned}, to which it adds: values that share operands are computed once.
    """
    if value not in found:
        found[value] = _computed(value, found, most) if most else None
    return found[value]


def _computed(value, found, most):
    if value.type is None:
        return None
    shape, dtype = value.type
    if not jnp.issubdtype(dtype, jnp.integer) and dtype != np.bool_:
        return None
    if value.constant is not None:
        return np.full(shape, value.constant).astype(dtype)
    op = value.op
    if op is None:
        return None
    if op.name == "iota":
        place = ir.IntegerAttr(op.ir.attributes["iota_dimension"]).value
        return np.arange(shape[place]).astype(dtype) if len(shape) == 1 else None
    if op.name == "constant":
        with contextlib.suppress(TypeError, ValueError):
            return np.array(ir.DenseElementsAttr(op.ir.attributes["value"])).astype(dtype).reshape(shape)
        return None
    if value.base is not value:  # with dimensions of size 1
        base = known(value.base, found, most - 1)
        return None if base is None else base.reshape(shape)
    f = _COMPARED.get(op.direction) if op.name == "compare" else _COMPUTED.get(op.name)
    if f is None and op.name not in ("concatenate", "convert"):
        return None
    operands = [known(v, found, most - 1) for v in op.operands]
    if any(v is None for v in operands):
        return None
    if op.name == "concatenate":
        return np.concatenate(operands, ir.IntegerAttr(op.ir.attributes["dimension"]).value)
    return operands[0].astype(dtype) if f is None else np.asarray(f(*operands)).astype(dtype)
