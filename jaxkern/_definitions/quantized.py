"""Operations of rows whose result is written in 8 bits: the operation, and the quantisation of its result, in one kernel.

    (x[, residual][, scale][, bias], arguments of `function`...[, given])  -> q like x, scales[, s = x + residual]

The result of the operation, and of `function` if there is one, stays in float32 and is rounded once. scales are float32: [...]
for rows, [..., width / block] for blocks; with a scale that is given, float32 [], max|result| of each row instead. q and scales
have no derivative. Kernels are written by hand: see _ops/norm/quantized_plan.py.

Rows that are split over devices are computed by XLA's operations and a message or two of a number per row, and one more for
the scale; with blocks they are gathered first.
"""

import functools

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxkern._core import compat, define, partition, validate
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind, set_jvp
from jaxkern._core.rows import without_axis
from jaxkern._definitions.quantize import largest, on_cpu, quantize
from jaxkern._definitions.traced import of_rows, traced, vectors
from jaxkern._engines.rows import primitive as rows_primitive
from jaxkern._ops.norm import quantized_plan
from jaxkern._ops.quantize import plan as quantize_plan


def run(operation, operands, args, given, *, numbers, algorithm, function, to, block):
    """[(q, scale) or (q, scale, max|result|)], then x + residual if there is one. given: the scale, or None.

    operands: by name, with rows along the last dimension. Masks are left to XLA.
    """
    operands = dict(operands)
    params = {"numbers": numbers, "algorithm": algorithm, "function": function}
    if any(k in operands for k in operation.masks):
        y, *total = of_rows(operation, operands, args, dtype=jnp.dtype(jnp.float32), **params)
        found = [*_quantized(jax.lax.stop_gradient(y), given, to, block), *total]
    else:
        x = operands["x"]
        columns = {k: operands[k] for k in operation.columns if k in operands}
        columns = vectors(x.shape[-1:], computing(x.dtype), columns)
        rows = {k: a for k, a in operands.items() if k not in columns}
        if block is not None:
            rows, columns = ({k: validate.whole(a, a.ndim - 1) for k, a in of.items()} for of in (rows, columns))
        x = rows.pop("x")
        params |= {"extras": " ".join((*rows, *columns)), "to": to, "block": block, "given": given is not None}
        scale = [] if given is None else [given]
        found = bind(operation.quantized, x, *rows.values(), *columns.values(), *args, *scale, **params)
    q, second, *total = found
    if given is not None:
        return [(q, given, largest(second)), *total]
    return [(q, second[..., None] if block is None else second), *total]


def _quantized(y, given, to, block, over=(), mark=None):
    """q in the shape of y, and the scales, or with a given one the maxima of rows."""
    blocks = y if block is None else y.reshape(*y.shape[:-1], y.shape[-1] // block, block)
    scales = [] if given is None else [given]
    q, second = quantize(blocks, *scales, dtype=to, over=over, mark=mark)
    return [q.reshape(y.shape), second]


def _split(operands, given):
    """(the operands of the norm, the given scale or None)."""
    return (operands[:-1], operands[-1]) if given else (operands, None)


def _traced(operation, operands, extras, numbers, function, algorithm):
    types = tuple((a.shape, a.dtype) for a in operands)
    params = {"numbers": numbers, "function": function, "algorithm": algorithm, "dtype": jnp.dtype(jnp.float32)}
    return traced(operation, ("x", *extras.split()), types, **params)


def _reference(operation, *operands, extras, numbers, to, block, given, algorithm, function, mark=None, runner="xla"):
    """mark: for the CPU, see _definitions/quantize.py."""
    operands, scale = _split(operands, given)
    f = _traced(operation, operands, extras, numbers, function, algorithm)
    y, *total = f.variant(runner)(*operands)
    return [*_quantized(y, scale, to, block, mark=mark), *total]


# ---- the primitive


def primitive(operation):
    """The primitive of an operation."""
    reference = functools.partial(_reference, operation)
    prim = define.primitive(
        f"jaxkern_{operation.name}_quantize",
        functools.partial(_shape, f"jaxkern_{operation.name}_quantize"),
        functools.partial(_batch, reference),
        reference,
        on_cpu=functools.partial(on_cpu, functools.partial(reference, runner="cpu"), 1),
        several=True,
        makes_nan=False,
        plan=functools.partial(quantized_plan.launches, operation.name),
        partition=functools.partial(_partition, operation),
        dtypes=quantize_plan.DTYPES,
    )
    set_jvp(prim, functools.partial(_jvp, prim))
    return prim


def _counts(operands, extras, given):
    """(operands that are rows, at the beginning; with columns; with arguments of the function)."""
    names = extras.split()
    return 1 + names.count("residual"), 1 + len(names), len(operands) - given


def _shape(name, x, *rest, extras, numbers, to, block, given, algorithm, function):
    rows, columns, args = _counts((x, *rest), extras, given)
    operands = (x, *rest)
    fits = all(a.shape == x.shape for a in operands[:rows]) and all(
        a.shape == x.shape[-1:] for a in operands[rows:columns]
    )
    broadcast = all(
        a.ndim == x.ndim and all(b in (1, n) for n, b in zip(x.shape, a.shape)) for a in operands[columns:args]
    )
    if x.ndim < 1 or not fits or not broadcast:
        raise ValueError(f"{name}: operands do not fit: {', '.join(a.str_short() for a in operands)}")
    y = x.update(weak_type=False)
    scales = without_axis(y, y.ndim - 1) if block is None else y.update(shape=(*y.shape[:-1], y.shape[-1] // block))
    return [y.update(dtype=jnp.dtype(to)), scales.update(dtype=jnp.dtype(jnp.float32)), *[y] * (rows - 1)]


def _batch(reference, prim, operands, dims, **params):
    rows, columns, args = _counts(operands, params["extras"], params["given"])
    if any(d is not None for d in (*dims[rows:columns], *dims[args:])):
        ys = jax.vmap(functools.partial(reference, **params), dims)(*operands)
        return ys, [0] * len(ys)
    size = next(x.shape[d] for x, d in zip(operands, dims) if d is not None)
    first = lambda x, d: x[None] if d is None else jnp.moveaxis(x, d, 0)
    moved = [first(x, d) if k < rows or columns <= k < args else x for k, (x, d) in enumerate(zip(operands, dims))]
    moved[:rows] = [jnp.broadcast_to(x, (size, *x.shape[1:])) for x in moved[:rows]]
    ys = bind(prim, *moved, **params)
    return ys, [0] * len(ys)


def _partition(operation, prim, ctx, operands, params):
    rows, columns, args = _counts(operands, params["extras"], params["given"])
    names, block = [f"d{d}" for d in range(ctx.avals_in[0].ndim - 1)], params["block"]
    full = [*names, "row"]
    dims = [full] * rows + [["row"]] * (columns - rows) + [full] * (args - columns) + [[]] * params["given"]
    dims += [full, names if block is None else [*names, "blocks"]] + [full] * (rows - 1)
    whole = ctx.avals_in[:args]

    def shard(over, *parts, **params):
        if not over["row"]:
            return prim.bind(*parts, **params)
        parts, scale = _split(parts, params["given"])
        chosen = {k: params[k] for k in ("extras", "numbers", "function", "algorithm")}
        f = _traced(operation, whole, **chosen)
        y, *total = rows_primitive.part(f, dict(zip(f.program.operands[0].dims, full)), over, parts)
        return [*_quantized(y, scale, params["to"], None, over["row"]), *total]

    return partition.lower(
        ctx, prim, operands, params, dims, shard, exact={"row"}, whole=() if block is None else {"row", "blocks"}
    )


def _jvp(prim, primals, tangents, **params):
    """q and scales have no derivative; x + residual has one."""
    found = bind(prim, *primals, **params)
    zeros = [compat.zero_tangent(y) for y in found]
    if "residual" in params["extras"].split():
        given = [t for t in tangents[:2] if type(t) is not ad.Zero]
        if given:
            zeros[2] = functools.reduce(jnp.add, given)
    return found, zeros
