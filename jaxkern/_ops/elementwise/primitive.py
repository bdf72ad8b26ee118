"""The primitives of the elementwise operations: `jaxkern_<name>`, and `jaxkern_<name>_grad` for its derivative.

A primitive takes arrays of equal rank, each dimension 1 or the result's, then the operation's scalar parameters as
arrays of one element in the dtype that the arithmetic is done in: float64 for float64, else float32. `split` is -1, or
for a gated operation the axis along which one operand holds both halves. `algorithm` may be "auto".
"""

import functools

import jax.numpy as jnp
from jax.interpreters import ad

from jaxkern._core import algorithms, compat
from jaxkern._core.primitive import bind, set_jvp, set_transpose
from jaxkern._core.signature import FLAT, Layout, Signature, local, primitive
from jaxkern._ops.elementwise import derivatives, plan, reference, table

algorithms.register(plan, "elementwise")
ROWS = {row.name: row for row in table.ROWS}


# The parameter `split` is the position of the dimension that holds two halves.
LAYOUT = Layout(
    lambda params: {"lead": params["split"]},
    lambda params, group, at: params | {"split": params["split"] + (group == "lead")},
)


def _sizes(operands, params):
    return {"half": operands[0].shape[params["split"]] // 2} if params["split"] >= 0 else {}


HALVES, HALF = "T *lead two *trail", "T *lead half *trail"


def _primitive(name, row, in_jnp, read, beside=(), gradients=None):
    """A primitive of a row that takes the arrays at the positions `read`, cotangents or tangents, and the parameters.

    beside: the names of the cotangents or tangents; of two tangents, the first holds both if the operation is split.
    gradients: how many results there are; None: one that is no gradient.
    """
    kinds = ["bool" if k == 0 and row.types == "select" else "T" for k in range(len(row.arrays))]
    parameters = dict.fromkeys((parameter for parameter, _ in row.parameters), "wide *all?")

    def declared(params):
        if params["split"] < 0:
            arrays = {row.arrays[k]: f"{kinds[k]} *all?" for k in read}
            return arrays | dict.fromkeys(beside, "T *all") | parameters
        return {"halves": HALVES} | dict.fromkeys(beside[:1], HALF if gradients else HALVES)

    def results(operands, params):
        if gradients:
            return [HALVES] if params["split"] >= 0 else ["T *all"] * gradients
        return HALF if params["split"] >= 0 else "bool *all" if row.types in ("test", "compare") else "T *all"

    return primitive(
        f"jaxkern_{name}",
        Signature(declared, results, LAYOUT, sizes=_sizes, whole={"two", "half"}, single=not gradients),
        functools.partial(in_jnp, row),
        plan=functools.partial(plan.plan, name),
        shard=local,
    )


def _define(row):
    forward_p = _primitive(row.name, row, reference.forward, range(len(row.arrays)))
    gradient_p, count = None, len(row.gradient)
    if count:
        used = reference.used(row)
        gradient_p = tangent_p = _primitive(f"{row.name}_grad", row, reference.gradient, used, ("g",), count)
        if count > 1:  # else the gradient is its own transpose
            tangents = tuple(f"t{k}" for k in range(count))
            tangent_p = _primitive(f"{row.name}_jvp", row, reference.tangent, used, tangents)
        derivatives.gradient_rules(row, gradient_p, tangent_p)
    if row.types in ("test", "compare", "logical"):
        derivatives.no_derivative(forward_p)
    else:
        derivatives.differentiate(row, forward_p, gradient_p)
    return forward_p, gradient_p


PRIMITIVES = {row.name: _define(row) for row in ROWS.values()}


# ---- cast


def _cast_jvp(primals, tangents, *, dtype):
    (x,), (t,) = primals, tangents
    y = bind(cast_p, x, dtype=dtype)
    if type(t) is ad.Zero or not jnp.issubdtype(dtype, jnp.floating):
        return y, compat.zero_tangent(y)
    return y, bind(cast_p, t, dtype=dtype)


def _cast_transpose(ct, x, *, dtype):
    return [ad.Zero(x.aval) if type(ct) is ad.Zero else bind(cast_p, ct, dtype=x.aval.dtype)]


cast_p = primitive(
    "jaxkern_cast",
    Signature({"x": "any *all"}, "dtype *all", FLAT),
    reference.cast,
    plan=functools.partial(plan.plan, "cast"),
    shard=local,
)
set_jvp(cast_p, _cast_jvp)
set_transpose(cast_p, _cast_transpose)
