"""Jaxprs of user functions: how they are evaluated on scalars, and the derivative rules in them.

Kernels compute 16-bit numbers in float32. A jaxpr is traced with the user's dtypes and evaluated here in `computing` types:

- Arithmetic on 16-bit values is arithmetic on float32 values, and nothing is rounded in between.
- Literals and constants keep the value that they have in 16 bits.
- A conversion from another floating-point type to 16 bits rounds. A conversion from 16 bits to float32 does nothing.
- Bitcasts and `nextafter` act on the 16-bit numbers that their operands round to. The bits of a NaN are the bits of some NaN.
- A `custom_jvp` or `custom_vjp` rule sees the 16-bit types that it was written for, and is widened in the same way.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from jaxkern._core import compat
from jaxkern._core.define import CUDA_TYPES, references
from jaxkern._core.dtypes import computing

CALLS = ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "checkpoint", "remat", "remat2")
CUSTOM_JVP = ("custom_jvp_call",)
CUSTOM = (*CUSTOM_JVP, "custom_vjp_call", "custom_vjp_call_jaxpr")
# Equations that return their last operand.
IDENTITIES = ("copy", "copy_p", "optimization_barrier", "tie", "pvary", "pcast", "broadcast_in_dim", "reshape")
IDENTITIES += ("squeeze", "expand_dims", "transpose", "mesh_cast", "reshard", "name")
REDUCTIONS = tuple(f"reduce_{name}" for name in ("sum", "prod", "max", "min", "and", "or", "xor"))  # of one element
CONTEXTS = ("pvary", "pcast", "mesh_cast", "reshard")  # say where a program runs
_ON_BITS = ("bitcast_convert_type", "nextafter")
KERNEL = "jaxkern_elementwise_kernel"


def held(dtype) -> np.dtype:
    """The dtype in which kernels read and write numbers of a real dtype: float32 or int32 for those that they do not have."""
    dtype = np.dtype(dtype)
    wide = np.float32 if jnp.issubdtype(dtype, jnp.floating) else np.int32
    return dtype if dtype.name in CUDA_TYPES else np.dtype(wide)


def _is_narrow(dtype) -> bool:
    return dtype.name in ("float16", "bfloat16")


def is_real(v) -> bool:
    """Whether a variable or a value has a derivative."""
    return jnp.issubdtype(v.dtype if hasattr(v, "dtype") else v.aval.dtype, jnp.inexact)


def called_jaxpr(equation):
    """(jaxpr, consts) of an equation that calls one."""
    params = equation.params
    found = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr" if "call_jaxpr" in params else "fun_jaxpr"]
    return (found.jaxpr, found.consts) if isinstance(found, ClosedJaxpr) else (found, ())


def inner_jaxprs(equation) -> list:
    """The jaxprs that an equation runs, without derivative rules."""
    name = equation.primitive.name
    if name in (*CALLS, *CUSTOM):
        return [called_jaxpr(equation)[0]]
    return [branch.jaxpr for branch in equation.params["branches"]] if name == "cond" else []


def unrolled_size(jaxpr) -> int:
    """How many equations a jaxpr runs if the steps of its scans are written one after the other; of a while loop, one step."""
    sizes: dict = {}  # {id of a jaxpr: its size}

    def size(jaxpr) -> int:
        if id(jaxpr) not in sizes:
            sizes[id(jaxpr)] = sum(map(size_of, jaxpr.eqns))
        return sizes[id(jaxpr)]

    def size_of(e) -> int:
        if e.primitive.name == "scan":
            length = e.params["length"]
            return 1 + size(e.params["jaxpr"].jaxpr) * (length if isinstance(length, int) else 1)
        if e.primitive.name == "while":
            return 1 + size(e.params["body_jaxpr"].jaxpr)
        return 1 + sum(map(size, inner_jaxprs(e)))

    return size(jaxpr)


def has_narrow(jaxpr) -> bool:
    """Whether a jaxpr, or one that it runs, has 16-bit floating-point values."""
    if any(_is_narrow(v.aval.dtype) for v in (*jaxpr.invars, *jaxpr.constvars)):
        return True
    return any(
        any(_is_narrow(v.aval.dtype) for v in (*e.invars, *e.outvars)) or any(map(has_narrow, inner_jaxprs(e)))
        for e in jaxpr.eqns
    )


def without_unused(jaxpr):
    """The jaxpr without the equations that its results do not depend on."""
    needed, kept = {v for v in jaxpr.outvars if not isinstance(v, Literal)}, []
    for e in reversed(jaxpr.eqns):
        if not needed.isdisjoint(e.outvars):
            needed.update(v for v in e.invars if not isinstance(v, Literal))
            kept.append(e)
    return jaxpr.replace(eqns=kept[::-1])


# ---- evaluation


def evaluate(jaxpr, consts, args) -> list:
    """The results of a jaxpr of scalars, in computing types, for arguments in computing types.

    Functions under jit become part of the caller: JAX would tie them to a mesh.
    """
    env = dict(zip(jaxpr.constvars, map(_widened, consts)))
    env.update(zip(jaxpr.invars, args))
    read = lambda v: _widened(v.val) if isinstance(v, Literal) else env[v]
    for e in jaxpr.eqns:
        env.update(zip(e.outvars, evaluate_equation(e, list(map(read, e.invars)))))
    return [read(v) for v in jaxpr.outvars]


def _widened(x):
    dtype = getattr(x, "dtype", None)
    if dtype is None or not _is_narrow(np.dtype(dtype)):
        return x
    if isinstance(x, (jax.Array, jax.core.Tracer)):
        return x.astype(jnp.float32)
    return np.asarray(x).astype(np.float32)[()]


def evaluate_equation(e, operands) -> list:
    """The results of an equation; see `evaluate`."""
    name = e.primitive.name
    if name in CALLS:
        return evaluate(*called_jaxpr(e), operands)
    if name == KERNEL:
        closed = e.params["function"].closed
        return evaluate(closed.jaxpr, closed.consts, operands)
    if references.get(e.primitive) is not None:
        return list(map(_widened, in_jnp(e, *operands)))
    if name in (*CONTEXTS, *REDUCTIONS):
        return operands
    narrow = any(_is_narrow(v.aval.dtype) for v in (*e.invars, *e.outvars))
    if not narrow and not any(map(has_narrow, inner_jaxprs(e))):
        return compat.bind_equation(e, *operands)
    if name == "convert_element_type":
        return [_converted(operands[0], e.invars[0].aval.dtype, e.outvars[0].aval.dtype)]
    if name in CUSTOM:
        return list((_custom_jvp if name in CUSTOM_JVP else _custom_vjp)(e)(*operands))
    if name in _ON_BITS:
        exact = [jnp.asarray(x).astype(v.aval.dtype) for x, v in zip(operands, e.invars)]
        return list(map(_widened, compat.bind_equation(e, *exact)))
    params = {k: _wide_param(p) for k, p in e.params.items()}
    if name == "cond":
        params["branches"] = tuple(map(_wide_jaxpr, e.params["branches"]))
    return list(map(_widened, compat.bind_equation(e.replace(params=params), *operands)))


def _converted(x, of, to):
    """x, which holds a value of dtype `of`, as a value of dtype `to`, in computing types."""
    if of == to:
        return x
    x = jnp.asarray(x)
    rounds = _is_narrow(to) and jnp.issubdtype(of, jnp.floating)
    return x.astype(to).astype(jnp.float32) if rounds else x.astype(computing(to))


def _wide_param(p):
    """A parameter of an equation on 16-bit values, such as the type to sum in, for float32 values."""
    is_dtype = isinstance(p, np.dtype) or (isinstance(p, type) and issubclass(p, np.generic))
    return computing(p) if is_dtype else p


def _wide_jaxpr(closed):
    shapes = [jax.ShapeDtypeStruct((), computing(v.aval.dtype)) for v in closed.jaxpr.invars]
    outs = [computing(v.aval.dtype) for v in closed.jaxpr.outvars]
    f = lambda *xs: [jnp.asarray(y).astype(d) for y, d in zip(evaluate(closed.jaxpr, closed.consts, xs), outs)]
    return jax.make_jaxpr(f)(*shapes)


def in_jnp(e, *operands) -> list:
    """The results of an operation of this library, by its definition in jnp."""
    results = references[e.primitive](*operands, **e.params)
    return list(results) if e.primitive.multiple_results else [results]


# ---- derivative rules


def _custom_jvp(e):
    """The function of an equation with a rule for tangents, in computing types."""
    real = [k for k, v in enumerate(e.invars) if is_real(v)]
    f = jax.custom_jvp(functools.partial(_results, e))

    def rule(primals, tangents):
        closed = jvp_rule(e)
        found = evaluate(closed.jaxpr, closed.consts, [*primals, *(tangents[k] for k in real)])
        ys, dys = found[: len(e.outvars)], iter(found[len(e.outvars) :])
        none = np.zeros((), jax.dtypes.float0)
        return _as_results(e, ys), tuple(jnp.asarray(next(dys)) if is_real(v) else none for v in e.outvars)

    f.defjvp(rule)
    return f


def _custom_vjp(e):
    """The function of an equation with a rule for cotangents, in computing types."""
    f = jax.custom_vjp(functools.partial(_results, e))

    def backward(xs, cts):
        closed = vjp_rule(e)
        found = iter(evaluate(closed.jaxpr, closed.consts, [*xs, *(c for c, v in zip(cts, e.outvars) if is_real(v))]))
        return tuple(jnp.asarray(next(found)) if is_real(v) else None for v in e.invars)

    f.defvjp(lambda *xs: (_results(e, *xs), xs), backward)
    return f


def _results(e, *xs) -> tuple:
    return _as_results(e, evaluate(*called_jaxpr(e), xs))


def _as_results(e, ys) -> tuple:
    return tuple(jnp.asarray(y).astype(computing(v.aval.dtype)) for y, v in zip(ys, e.outvars))


def _shapes(variables) -> list:
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in variables]


def _of_real_operands(e, args):
    """(f, operands): the real results of an equation, and its others, as a function of its real operands."""
    at = [k for k, v in enumerate(e.invars) if is_real(v)]

    def f(*ws):
        given = list(args)
        for k, w in zip(at, ws):
            given[k] = w
        ys = compat.bind_equation(e, *given)
        return [y for y, v in zip(ys, e.outvars) if is_real(v)], ys

    return f, [args[k] for k in at]


def jvp_rule(e) -> ClosedJaxpr:
    """The rule of an equation: a function of its operands, then tangents of the real ones, that returns its results, then
    tangents of the real ones."""

    def rule(*xs):
        args, tangents = xs[: len(e.invars)], xs[len(e.invars) :]
        f, operands = _of_real_operands(e, args)
        _, dys, ys = jax.jvp(f, operands, [t.astype(x.dtype) for t, x in zip(tangents, operands)], has_aux=True)
        return [*ys, *dys]

    return jax.make_jaxpr(rule)(*_shapes(e.invars), *_shapes(filter(is_real, e.invars)))


def vjp_rule(e) -> ClosedJaxpr:
    """The rule of an equation: a function of its operands, then cotangents of its real results, that returns cotangents of its
    real operands."""

    def rule(*xs):
        args, cotangents = xs[: len(e.invars)], xs[len(e.invars) :]
        f, operands = _of_real_operands(e, args)
        ys, pull, _ = jax.vjp(f, *operands, has_aux=True)
        return pull([c.astype(y.dtype) for c, y in zip(cotangents, ys)])

    return jax.make_jaxpr(rule)(*_shapes(e.invars), *_shapes(filter(is_real, e.outvars)))
