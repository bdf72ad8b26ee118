"""How a pass of a row function reduces values: the C++ of identities and of what combines two parts."""

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from jaxkern._core import cpp, functor
from jaxkern._core.cpp import cpp_type
from jaxkern._core.jaxprs import computing
from jaxkern._engines.jaxpr import REDUCTIONS

INDEX = np.dtype(np.int32)  # of places along a dimension


class Reduction:
    """How a pass reduces the operands of a step.

    operands: the values of an element that are reduced. parts: (dtype, member) of what threads have reduced, one for each operand,
    and the place for argmax and argmin; members are numbered from `first`. identity: an expression for each part. combine:
    statements that make y, all parts, of p and q.
    """

    def __init__(self, writer, step, number, first):
        kind, count = REDUCTIONS[step.name], len(step.results)
        self.operands = step.operands[:count] if kind == "reduce" else step.operands[:1]
        types = [computing(np.dtype(v.aval.dtype)) for v in self.operands]
        if kind in ("argmax", "argmin"):
            types.append(INDEX)
        self.parts = [(d, f"v{first + k}") for k, d in enumerate(types)]
        self.sums = self.parts
        members = [m for _, m in self.parts]
        p, q, y = ([f"{side}.{m}" for m in members] for side in "pqy")
        if kind == "reduce":
            self.identity = [writer.number(v) for v in step.operands[count:]]
            name = f"{writer.name}Combine{number}_{first}"
            writer.functors.append(_combine(step, types, step.equation.primitive.name).source(name))
            # The functor writes its results in their own types, which may be narrower than parts.
            own = {to: f"t{first + k}" for k, (to, d) in enumerate(zip(y, types)) if part_type(d) != cpp_type(d)}
            declare = [f"{cpp_type(d)} {own[to]};" for to, d in zip(y, types) if to in own]
            call = f"{name}()({', '.join([*p, *q, *(own.get(to, to) for to in y)])});"
            self.combine = [*declare, call, *(f"{to} = {t};" for to, t in own.items())]
        elif kind in ("argmax", "argmin"):
            self.identity = [_least(types[0], kind[3:]), f"{2**31 - 1}"]
            better = ">" if kind == "argmax" else "<"
            same = f"{q[0]} == {p[0]} || ({q[0]} != {q[0]} && {p[0]} != {p[0]})"
            takes = f"{q[0]} {better} {p[0]} || ({q[0]} != {q[0]} && {p[0]} == {p[0]}) || (({same}) && {q[1]} < {p[1]})"
            sets = [f"{to} = takes ? {b} : {a};" for to, a, b in zip(y, p, q)]
            self.combine = [f"{{ const bool takes = {takes};", *sets, "}"]
        else:
            self.identity = [_least(types[0], kind)]
            overload = {"and": "and_", "or": "or_", "xor": "xor_"}.get(kind, kind)
            own = cpp_type(types[0])
            if writer.core.adds_in_float64(step):
                self.sums = [(np.dtype(np.float64), members[0])]
                self.combine = [f"{y[0]} = lax::add({p[0]}, {q[0]});"]
            else:
                self.combine = [f"{y[0]} = lax::{overload}({own}({p[0]}), {own}({q[0]}));"]

    def taken(self, to, p, q) -> str:
        """A statement that makes `to` of the expressions p and q. One of them is the identity, or they are equal."""
        return f"{to}.{self.parts[0][1]} = {q} == {self.identity[0]} ? {p} : {q};"


def part_type(dtype) -> str:
    """The type of a part of a reduction: at least as wide as what lanes exchange."""
    return cpp_type(dtype) if np.dtype(dtype).itemsize >= 4 else "int32_t"


def _least(dtype, kind) -> str:
    """The identity of a reduction."""
    dtype = np.dtype(dtype)
    if kind in ("max", "min"):
        if jnp.issubdtype(dtype, jnp.floating):
            return cpp.literal(np.asarray(-np.inf if kind == "max" else np.inf, dtype), dtype)
        if dtype == np.bool_:
            return "false" if kind == "max" else "true"
        info = jnp.iinfo(dtype)
        return cpp.literal(info.min if kind == "max" else info.max, dtype)
    if kind == "and":
        return "true" if dtype == np.bool_ else cpp.literal(-1 if dtype.kind == "i" else jnp.iinfo(dtype).max, dtype)
    return cpp.literal(np.asarray(1 if kind == "mul" else 0, dtype), dtype)


def check(step, label, line) -> None:
    """Raises Unsupported if the user's function of `lax.reduce`, which is called at this line, has no counterpart in kernels."""
    types = [computing(np.dtype(v.aval.dtype)) for v in step.operands[: len(step.results)]]
    _combine(step, types, f"{label}: the function of lax.reduce{' at ' + line if line else ''}")


def _combine(step, types, label) -> functor.Function:
    """The user's function of `lax.reduce`, which takes two of each part."""
    closed = step.params["jaxpr"]
    closed = closed if hasattr(closed, "consts") else jax.extend.core.ClosedJaxpr(closed, step.params["consts"])
    call = jax.extend.core.jaxpr_as_fun(closed)

    def f(*xs):
        ys = call(*(jax.lax.convert_element_type(x, v.aval.dtype) for x, v in zip(xs, closed.jaxpr.invars)))
        return [jax.lax.convert_element_type(y, d) for y, d in zip(ys, types)]

    return functor.of_scalars(f, [*types, *types], types, label, False)
