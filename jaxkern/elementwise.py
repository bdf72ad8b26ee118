"""Elementwise operations: activations, their gated forms, arithmetic, comparisons, casts.

Each is a row of _elementwise_table.py; what is here is the same for all of them: the primitive `jaxkern_<name>` and
that of its derivative, `jaxkern_<name>_grad`, their rules, and the public function. Operands broadcast against each
other as in `jnp`, and are read in place.

A primitive takes arrays of equal rank, each dimension 1 or that of the result, then the operation's scalar parameters
as arrays of one element, in the type that the arithmetic is done in: float32, or float64 for float64. `split` is -1,
or for a gated operation the axis along which one operand holds both halves.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from jaxkern import _elementwise_table
from jaxkern._core import compat, partition, registry, validate
from jaxkern._core.autodiff import defvjp
from jaxkern._core.primitive import bind, evaluate

ROWS = {row.name: row for row in _elementwise_table.ROWS}
TARGET = "jaxkern_elementwise"
_TYPE_NAMES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64", "int8": "s8", "uint8": "u8",
               "int32": "s32", "bool": "pred"}
_SIGNATURES = {platform: module.module.elementwise() if TARGET in module.targets else {}
               for platform, module in registry.status.items()}
GROUPS = 3  # runs of neighbouring dimensions that all operands agree to broadcast over or not


# ---- what an operation means, in jnp


def computing(dtype):
    """What the arithmetic is done in."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype != jnp.float64
    return jnp.dtype(jnp.float32) if narrow else jnp.dtype(dtype)


def _wide(x):
    return x.astype(computing(x.dtype))


@functools.cache
def meaning(row):
    """The row's expression as a function of its operands."""
    names = ", ".join((*row.arrays, *(name for name, _ in row.parameters)))
    return eval(f"lambda {names}: {row.like}", {"jax": jax, "jnp": jnp})


def _halves(row, operands, split):
    """The operands, of which the first may hold the first two along an axis."""
    if split < 0:
        return list(operands)
    return [*jnp.split(operands[0], 2, split), *operands[1:]]


def _element_type(row, arrays):
    """The dtype that the row's T stands for."""
    return arrays[-1].dtype if row.types == "select" else arrays[0].dtype


def _reference(row, *operands, split):
    operands = _halves(row, operands, split)
    y = meaning(row)(*map(_wide, operands))
    return y if y.dtype == jnp.bool_ else y.astype(_element_type(row, operands[: len(row.arrays)]))


def _pullback(row, operands, at, g):
    """Cotangents of the operands at these positions, by JAX's own derivatives of the row's expression."""
    def f(*xs):
        wide = list(map(_wide, operands))
        for k, x in zip(at, xs):
            wide[k] = x
        return meaning(row)(*wide)

    _, pull = jax.vjp(f, *(_wide(operands[k]) for k in at))
    return [d.astype(operands[k].dtype) for k, d in zip(at, pull(_wide(g)))]


def _used(row):
    """The arrays that the derivative's functor reads beside the cotangent."""
    return tuple(range(len(row.arrays))) if row.uses is None else row.uses


def _gradient_reference(row, *operands, split):
    operands = _halves(row, operands, split)
    used = _used(row)
    g, parameters = operands[len(used)], operands[len(used) + 1 :]
    arrays = [jnp.zeros_like(g)] * len(row.arrays)  # what is not used has no influence
    for k, x in zip(used, operands):  # under vmap, what is not mapped has a dimension of size 1 where g's is longer
        arrays[k] = x if split >= 0 else jnp.broadcast_to(x, g.shape)
    ds = _pullback(row, [*arrays, *parameters], row.gradient, g)
    return ds if split < 0 else [jnp.concatenate(ds, split)]


# ---- primitives


def _result(prim, arrays, split, dtype):
    """The type of what arrays of equal rank broadcast to; split dimensions are half as long."""
    first = arrays[0]
    shape, spec = list(first.shape), [*first.sharding.spec, *[None] * (first.ndim - len(first.sharding.spec))]
    if split >= 0:
        shape[split], spec[split] = shape[split] // 2, None
    for x in arrays[1:]:
        other = [*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec))]
        for d in range(len(shape)):
            if x.ndim != len(shape) or (x.shape[d] != shape[d] and 1 not in (x.shape[d], shape[d])):
                raise ValueError(f"{prim}: operands of shapes {', '.join(str(a.shape) for a in arrays)} do not broadcast")
            if isinstance(shape[d], int) and shape[d] == 1:
                shape[d], spec[d] = x.shape[d], other[d]
            elif spec[d] is None and not (isinstance(x.shape[d], int) and x.shape[d] == 1):
                spec[d] = other[d]
    mesh = next((x.sharding.mesh for x in arrays if not x.sharding.mesh.empty), first.sharding.mesh)
    sharding = {} if mesh.empty else {"sharding": NamedSharding(mesh, PartitionSpec(*spec))}
    return first.update(shape=tuple(shape), dtype=dtype, weak_type=False, **sharding)


def _abstract(row, *operands, split):
    arrays = operands[: len(operands) - len(row.parameters)]
    predicate = row.types in ("test", "compare")
    return _result(row.name, arrays, split, jnp.dtype(bool) if predicate else _element_type(row, arrays))


def _abstract_gradient(row, *operands, split):
    g = operands[len(operands) - len(row.parameters) - 1]
    return [operands[0].update(weak_type=False)] if split >= 0 else [g.update(weak_type=False)] * len(row.gradient)


def _batch(prim, whole, operands, dims, *, split):
    at = next(d for d in dims if d is not None)
    # An operand without the batch gets a dimension of size 1: kernels read it in place.
    operands = [jnp.expand_dims(x, at) if d is None else jnp.moveaxis(x, d, at) for x, d in zip(operands, dims)]
    if whole is not None:  # but for those from this position on, cotangents and tangents, and for what is split
        size = next(x.shape[at] for x, d in zip(operands, dims) if d is not None)
        operands = [jnp.broadcast_to(x, (*x.shape[:at], size, *x.shape[at + 1 :]))
                    if k >= whole or (k == 0 and split >= 0) else x for k, x in enumerate(operands)]
    y = bind(prim, *operands, split=split + (0 <= at <= split))
    return (y, [at] * len(y)) if prim.multiple_results else (y, at)


def _primitive(name, row, abstract, reference, several=False, whole=None):
    prim = Primitive(f"jaxkern_{name}")
    prim.multiple_results = several
    prim.def_abstract_eval(functools.partial(abstract, row))
    prim.def_impl(functools.partial(evaluate, prim))
    batching.primitive_batchers[prim] = functools.partial(_batch, prim, whole)
    compat.check_nans(prim)
    reference = functools.partial(reference, row)
    mlir.register_lowering(prim, mlir.lower_fun(reference, multiple_results=several))
    if not several:
        compat.taylor_rule(prim, reference)
    for platform, signatures in _SIGNATURES.items():
        if signatures:
            mlir.register_lowering(prim, functools.partial(_lower, prim, name, row, reference, platform, several), platform=platform)
    return prim


# ---- lowering


def _with_unit(f, several):
    """f on arrays with one more dimension, of size 1: XLA splits any of a target's dimensions but the last."""
    def wrapped(*operands):
        y = f(*(x[..., None] for x in operands))
        return [r[..., 0] for r in y] if several else y[..., 0]

    return mlir.lower_fun(wrapped, multiple_results=several)


def _lower(prim, name, row, reference, platform, several, ctx, *operands, split):
    through = mlir.lower_fun(reference, multiple_results=several)
    avals, results = ctx.avals_in, ctx.avals_out
    parameters = len(row.parameters)
    arrays = avals[: len(avals) - parameters]
    signature = _signature(name, [*arrays[:1] * (split >= 0), *avals], [*results[:1] * (split >= 0 and several), *results])
    flat = split < 0 and all(a.shape == results[0].shape or _is_scalar(a) for a in arrays)
    broadcasts = _SIGNATURES[platform].get(signature)
    if (broadcasts is None or not (flat or broadcasts) or any(0 in a.shape for a in avals)
            or not all(map(_is_scalar, avals[len(arrays) :])) or not _few_groups(arrays, results[0], split)):
        return through(ctx, *operands, split=split)
    extra = {}
    if compat.partitioned_devices(ctx) > 1:
        # XLA splits all operands alike; what it cannot, it computes itself, and nothing is gathered.
        shape = results[0].shape
        if parameters or (split < 0 and (not shape or any(a.shape != shape for a in arrays))) or 0 <= split < len(shape) - 1:
            return through(ctx, *operands, split=split)
        if split < 0 and shape[-1] != 1:
            return _with_unit(functools.partial(bind, prim, split=-1), several)(ctx, *operands)
        depth = len(shape) - 1 if split < 0 else split
        attributes = partition.attributes([a.shape for a in arrays], [a.shape for a in results], depth)
        if attributes is None:
            return through(ctx, *operands, split=split)
        extra["extra_attributes"] = attributes
    rule = jax.ffi.ffi_lowering(TARGET, **extra)
    return rule(ctx, *operands, operation=name, split=np.int64(split))


def _signature(name, operands, results):
    names = [[_TYPE_NAMES.get(a.dtype.name, "none") for a in avals] for avals in (operands, results)]
    return f"{name}({','.join(names[0])})->{','.join(names[1])}"


def _is_scalar(aval):
    return all(isinstance(d, int) and d == 1 for d in aval.shape)


def _few_groups(arrays, result, split):
    """Whether the handler can merge the dimensions into three, each counted in 32 bits."""
    small = [a for a in arrays if a.shape != result.shape and not _is_scalar(a)]
    if split >= 0 or not small:
        return True
    if not all(isinstance(d, int) for d in result.shape):
        return False  # nothing is known of a symbolic shape
    sizes = [(size, tuple(a.shape[d] == 1 for a in small)) for d, size in enumerate(result.shape) if size != 1]
    groups = [math.prod(size for size, _ in group) for _, group in itertools.groupby(sizes, key=lambda pair: pair[1])]
    return len(groups) <= GROUPS and max(groups, default=1) < (1 << 32) - 8


# ---- derivatives


def _differentiate(row, forward_p, gradient_p):
    """All derivatives of `forward_p`, from a custom_vjp that keeps the operands."""
    count = len(row.arrays) + len(row.parameters)

    @functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
    def f(operands, wanted, split):
        return bind(forward_p, *operands, split=split)

    def forward(operands, wanted, split):
        return bind(forward_p, *operands, split=split), operands

    def backward(wanted, split, operands, g):
        ds = [None] * len(operands)
        parameters = operands[len(operands) - len(row.parameters) :]
        if split >= 0:
            (ds[0],) = bind(gradient_p, operands[0], g, *parameters, split=split)
            return (tuple(ds),)
        # One kernel, where it writes nothing that nobody wants; sums over broadcast dimensions are XLA's.
        if gradient_p is not None and all(k in wanted and operands[k].shape == g.shape for k in row.gradient):
            used = [operands[k] for k in _used(row)]
            for k, d in zip(row.gradient, bind(gradient_p, *used, g, *parameters, split=-1)):
                ds[k] = d
        rest = [k for k in wanted if ds[k] is None]
        for k, d in zip(rest, _pullback(row, operands, rest, g)):
            ds[k] = d
        return (tuple(ds),)

    f.defvjp(forward, backward)

    def call(*operands, active=(), split):
        return f(operands, active, split)

    defvjp(forward_p, call, differentiable=tuple(range(count)), tell_active=True)
    return f


def _operand_counts(row, split):
    """How many operands of a derivative come before the cotangent, and how many gradients it has."""
    return (1, 1) if split >= 0 else (len(_used(row)), len(row.gradient))


def _tangent_reference(row, *operands, split):
    """The transpose of the derivative: from a tangent for each gradient to that of the result."""
    k, n = _operand_counts(row, split)
    before, tangents, parameters = operands[:k], operands[k : k + n], operands[k + n :]
    g = tangents[0] if split < 0 else jax.lax.slice_in_dim(tangents[0], 0, tangents[0].shape[split] // 2, axis=split)
    (t,) = jax.linear_transpose(lambda g: _gradient_reference(row, *before, g, *parameters, split=split), g)(list(tangents))
    return t


def _abstract_tangent(row, *operands, split):
    k, _ = _operand_counts(row, split)
    return _result(row.name, operands[k : k + 1], split, operands[k].dtype)


def _gradient_rules(row, gradient_p, tangent_p):
    """The derivative is linear in the cotangent, and tangent_p its transpose; both are differentiated through jnp."""

    def jvp_rule(prim, reference, linear):
        def rule(primals, tangents, *, split):
            out = bind(prim, *primals, split=split)
            active = [k for k, t in enumerate(tangents) if type(t) is not ad.Zero]
            if active == linear(split):
                operands = list(primals)
                for k in active:
                    operands[k] = tangents[k]
                return out, bind(prim, *operands, split=split)

            def f(*xs):
                operands = list(primals)
                for k, x in zip(active, xs):
                    operands[k] = x
                return reference(row, *operands, split=split)

            return out, jax.jvp(f, [primals[k] for k in active], [tangents[k] for k in active])[1]

        return rule

    def transpose_gradient(cts, *operands, split):
        k, _ = _operand_counts(row, split)
        result = [None] * len(operands)
        g = operands[k].aval
        if all(type(ct) is ad.Zero for ct in cts):
            result[k] = ad.Zero(g)
            return result
        cts = [ad.zeros_like_aval(ct.aval) if type(ct) is ad.Zero else ct for ct in cts]
        transposed = [*operands[:k], *cts, *operands[k + 1 :]]
        y = bind(tangent_p, *transposed, split=split)
        result[k] = y[0] if tangent_p.multiple_results else y
        return result

    def transpose_tangent(ct, *operands, split):
        k, n = _operand_counts(row, split)
        result = [None] * len(operands)
        linear = [i for i in range(k, k + n) if ad.is_undefined_primal(operands[i])]
        if type(ct) is ad.Zero:
            ds = [ad.Zero(x.aval) if i in linear else None for i, x in enumerate(operands)][k : k + n]
        else:
            ds = bind(gradient_p, *operands[:k], ct, *operands[k + n :], split=split)
        for i in linear:
            result[i] = ds[i - k]
        return result

    ad.primitive_jvps[gradient_p] = jvp_rule(gradient_p, _gradient_reference, lambda split: [_operand_counts(row, split)[0]])
    ad.primitive_transposes[gradient_p] = transpose_gradient
    if tangent_p is not gradient_p:
        between = lambda split: list(range(_operand_counts(row, split)[0], sum(_operand_counts(row, split))))
        ad.primitive_jvps[tangent_p] = jvp_rule(tangent_p, _tangent_reference, between)
        ad.primitive_transposes[tangent_p] = transpose_tangent


def _no_derivative(prim):
    def rule(primals, tangents, **params):
        y = bind(prim, *primals, **params)
        return y, compat.zero_tangent(y)

    ad.primitive_jvps[prim] = rule


def _define(row):
    forward_p = _primitive(row.name, row, _abstract, _reference)
    gradient_p = None
    if row.gradient:
        whole = len(_used(row))
        gradient_p = tangent_p = _primitive(f"{row.name}_grad", row, _abstract_gradient, _gradient_reference, True, whole)
        if len(row.gradient) > 1:  # else it is its own transpose
            tangent_p = _primitive(f"{row.name}_jvp", row, _abstract_tangent, _tangent_reference, False, whole)
        _gradient_rules(row, gradient_p, tangent_p)
    if row.types in ("test", "compare", "logical"):
        _no_derivative(forward_p)
    else:
        _differentiate(row, forward_p, gradient_p)
    return forward_p, gradient_p


PRIMITIVES = {row.name: _define(row) for row in ROWS.values()}


# ---- what a user calls


def _call(row, arrays, parameters=(), split=-1):
    for name, x in zip(row.arrays, arrays):
        validate.check_array(row.part_of or row.name, name, "an array or a number", x)
    for (name, _), x in zip(row.parameters, parameters):
        validate.check_array(row.name, name, "a number", x)
    return _jitted(*arrays, *parameters, name=row.name, split=split)


# Inlined, so that a jaxpr holds the primitive alone; jitted, so that an eager call costs no more than
# that of a jnp function.
@functools.partial(jax.jit, static_argnames=("name", "split"), inline=True)
def _jitted(*operands, name, split):
    row = ROWS[name]
    count = len(operands) - len(row.parameters)
    arrays, parameters = list(operands[:count]), operands[count:]
    public = row.part_of or row.name
    first = 1 if row.types == "select" else 0
    dtype = _common_type(row, public, arrays[first:])
    arrays[first:] = [x if x.dtype == dtype else x.astype(dtype) if dtype != jnp.bool_ else x != 0 for x in arrays[first:]]
    if first and arrays[0].dtype != jnp.bool_:
        arrays[0] = arrays[0] != 0
    if split >= 0:
        arrays[0] = validate.whole(arrays[0], split)
    rank = max(x.ndim for x in arrays)
    try:
        np.broadcast_shapes(*(tuple(d if isinstance(d, int) else 1 for d in x.shape) for x in arrays))
    except ValueError:
        shapes = ", ".join(f"{a} of shape {x.shape}" for a, x in zip(row.arrays, arrays))
        raise ValueError(f"jaxkern.{public}: {shapes} do not broadcast against each other") from None
    arrays = [x if x.ndim == rank else x.reshape((1,) * (rank - x.ndim) + x.shape) for x in arrays]
    for (argument, _), x in zip(row.parameters, parameters):
        if x.ndim or jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise TypeError(f"jaxkern.{public}: {argument} must be a real scalar, got {x.dtype}{list(x.shape)}")
    parameters = [x.astype(computing(dtype)).reshape((1,) * rank) for x in parameters]
    return bind(PRIMITIVES[name][0], *arrays, *parameters, split=split)


def _common_type(row, public, arrays):
    """The dtype that the arrays promote to; refused where the operation has no meaning in it."""
    dtype = jnp.result_type(*arrays)
    if row.types == "logical":
        return jnp.dtype(bool)
    if row.types in ("select", "compare") and not jnp.issubdtype(dtype, jnp.complexfloating):
        return dtype
    given = ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
    if dtype == jnp.bool_ or not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        raise TypeError(f"jaxkern.{public}: operands must be real numbers, floating-point or integer, got {given}")
    if jnp.issubdtype(dtype, jnp.integer) and row.types in ("float", "test"):
        return jnp.result_type(dtype, jnp.float32 if dtype.itemsize < 8 else jnp.float64)
    return dtype


def _public(row):
    """The function of a row, with the arguments that the row names."""
    arguments = [*row.arrays, *(name if default is None else f"{name}={default!r}" for name, default in row.parameters)]
    parameters = "".join(f"{name}, " for name, _ in row.parameters)
    space = {"_call": _call, "_row": row}
    exec(f"def {row.name}({', '.join(arguments)}):\n    return _call(_row, ({', '.join(row.arrays)},), ({parameters}))", space)
    function = space[row.name]
    function.__module__ = __name__
    function.__doc__ = _documentation(row)
    return function


_OPERANDS = {
    "float": "Floating-point arrays, or integers, which promote to floating-point as in `jnp`.",
    "number": "Floating-point or integer arrays.",
    "test": "Floating-point arrays, or integers, which promote to floating-point as in `jnp`.",
    "compare": "Arrays of real numbers or booleans.",
    "logical": "Boolean arrays; of numbers, what is not 0 is true.",
    "select": "A boolean array, and two arrays of real numbers or booleans.",
}


def _documentation(row):
    names = ", ".join(row.arrays)
    result = "a boolean array" if row.types in ("test", "compare", "logical") else "an array of the type they promote to"
    lines = [f"{row.summary[0].upper()}{row.summary[1:]}, element by element: `{row.like}`.", "", "Args:",
             f"    {names}: {_OPERANDS[row.types]} Several broadcast against each other,"
             if len(row.arrays) > 1 else f"    {names}: {_OPERANDS[row.types]}"]
    if len(row.arrays) > 1:
        lines += ["        and are read in place."]
    lines += [f"    {name}: a real scalar, which may be traced." for name, _ in row.parameters]
    lines += ["", f"Returns: {result}, in their common shape. float16, bfloat16 and float32 are computed in float32 and",
              "    rounded once. NaN and infinities go through as in the expression above.", "",
              "Raises:", "    TypeError: an operand is no array, complex, or of a type without a meaning here."]
    if len(row.arrays) > 1:
        lines += ["    ValueError: the shapes do not broadcast."]
    return "\n    ".join(lines) + "\n    "


globals().update({row.name: _public(row) for row in ROWS.values() if not row.part_of and not row.gated})


def gelu(x, approximate=True):
    """Gaussian error linear unit, as `jax.nn.gelu`: x Phi(x), Phi being the normal distribution function.

    Args:
        x: floating-point array of any shape; integers promote as in `jnp`.
        approximate: whether to use tanh in place of Phi, which differs by up to 5e-4.

    Returns: array of the shape of x, rounded once.

    Raises:
        TypeError: x is boolean, complex or no array.

    >>> import jax.numpy as jnp, jaxkern
    >>> [f"{y:.4f}" for y in jaxkern.gelu(jnp.array([-1.0, 0.0, 1.0]), approximate=False)]
    ['-0.1587', '0.0000', '0.8413']

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
    """
    return _call(ROWS["gelu_tanh" if approximate else "gelu_erf"], (x,))


def glu(x, axis=-1, *, gate=None):
    """Gated linear unit, as `jax.nn.glu`: x sigmoid(gate) in one kernel, and one for both gradients.

    Args:
        x: floating-point array; without a gate, both: the first half along `axis` is x, the second the gate.
            Neither half is copied.
        axis: the dimension that is halved.
        gate: floating-point array that broadcasts against x.

    Returns: array of the shape of x, or of one half of it.

    Raises:
        TypeError: boolean, complex or no arrays. ValueError: an axis that is out of bounds or of odd size.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.glu(jnp.array([2.0, 4.0, 0.0, 0.0])).tolist()
    [1.0, 2.0]

    Source: Dauphin et al., "Language Modeling with Gated Convolutional Networks", 2017.
    """
    return _gated("glu", "glu", x, axis, gate)


def swiglu(x, axis=-1, *, gate=None):
    """x silu(gate) in one kernel, and one for both gradients; arguments as for `jaxkern.glu`.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.swiglu(jnp.array([2.0]), gate=jnp.array([0.0])).tolist()
    [0.0]

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    return _gated("swiglu", "swiglu", x, axis, gate)


def geglu(x, axis=-1, *, gate=None, approximate=True):
    """x gelu(gate, approximate) in one kernel, and one for both gradients; arguments as for `jaxkern.glu`.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.geglu(jnp.array([2.0]), gate=jnp.array([0.0])).tolist()
    [0.0]

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    return _gated("geglu", "geglu_tanh" if approximate else "geglu_erf", x, axis, gate)


def _gated(public, name, x, axis, gate):
    if gate is not None:
        return _call(ROWS[name], (x, gate))
    validate.check_array(public, "x", "an array", x)
    axis = validate.static_axis(public, axis)
    shape = jnp.shape(x)
    if not isinstance(axis, int) or not -len(shape) <= axis < len(shape) or shape[axis] % 2 != 0:
        raise ValueError(f"jaxkern.{public}: x of shape {shape} has no halves along axis {axis}")
    return _call(ROWS[name], (x,), split=axis % len(shape))


# ---- cast


def cast(x, dtype):
    """`x` in another type, as `x.astype(dtype)`: rounded once; to integers towards 0, out of range to the nearest.

    Args:
        x: array of any real type.
        dtype: a real type.

    Returns: array of the shape of x; x itself where it has that type.

    Raises:
        TypeError: x is no array, or a type is complex or not numeric.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.cast(jnp.array([1.0, 2.5, -300.0]), jnp.int8).tolist()
    [1, 2, -128]
    """
    validate.check_array("cast", "x", "an array or a number", x)
    try:
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    except TypeError:
        raise TypeError(f"jaxkern.cast: no type {dtype!r}") from None
    return _cast(x, dtype=dtype)


@functools.partial(jax.jit, static_argnames=("dtype",), inline=True)
def _cast(x, *, dtype):
    for t in (x.dtype, dtype):
        if not any(jnp.issubdtype(t, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
            raise TypeError(f"jaxkern.cast: from {x.dtype} to {dtype}: both must be real")
    return x if x.dtype == dtype else bind(cast_p, x, dtype=dtype)


def _cast_reference(x, *, dtype):
    return x.astype(dtype)


def _lower_cast(platform, ctx, x, *, dtype):
    aval, out = ctx.avals_in[0], ctx.avals_out[0]
    through = mlir.lower_fun(_cast_reference, multiple_results=False)
    if _signature("cast", [aval], [out]) not in _SIGNATURES[platform] or 0 in aval.shape:
        return through(ctx, x, dtype=dtype)
    attributes = None
    if compat.partitioned_devices(ctx) > 1:
        if aval.ndim and aval.shape[-1] != 1:
            return _with_unit(functools.partial(bind, cast_p, dtype=dtype), False)(ctx, x)
        attributes = partition.attributes([aval.shape], [out.shape], aval.ndim - 1) if aval.ndim else None
        if attributes is None:
            return through(ctx, x, dtype=dtype)
    rule = jax.ffi.ffi_lowering(TARGET, **({"extra_attributes": attributes} if attributes else {}))
    return rule(ctx, x, operation="cast", split=np.int64(-1))


def _cast_jvp(primals, tangents, *, dtype):
    (x,), (t,) = primals, tangents
    y = bind(cast_p, x, dtype=dtype)
    if type(t) is ad.Zero or not jnp.issubdtype(dtype, jnp.floating):
        return y, compat.zero_tangent(y)
    return y, bind(cast_p, t, dtype=dtype)


def _cast_transpose(ct, x, *, dtype):
    return [ad.Zero(x.aval) if type(ct) is ad.Zero else bind(cast_p, ct, dtype=x.aval.dtype)]


cast_p = Primitive("jaxkern_cast")
cast_p.def_abstract_eval(lambda x, *, dtype: x.update(dtype=dtype, weak_type=False))
cast_p.def_impl(functools.partial(evaluate, cast_p))
batching.primitive_batchers[cast_p] = lambda xs, ds, *, dtype: (bind(cast_p, *xs, dtype=dtype), ds[0])
compat.check_nans(cast_p)
compat.taylor_rule(cast_p, _cast_reference)
mlir.register_lowering(cast_p, mlir.lower_fun(_cast_reference, multiple_results=False))
for _platform, _signatures in _SIGNATURES.items():
    if _signatures:
        mlir.register_lowering(cast_p, functools.partial(_lower_cast, _platform), platform=_platform)
ad.primitive_jvps[cast_p] = _cast_jvp
ad.primitive_transposes[cast_p] = _cast_transpose

NAMES = tuple(sorted({row.part_of or row.name for row in ROWS.values()} | {"cast"}))
__all__ = list(NAMES)
