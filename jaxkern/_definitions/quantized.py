"""Operations of rows whose result is written in 8 bits: the operation, and the quantisation of its result, in one kernel.

    (x, residual, *columns, *arguments of `function`, given)  -> q like x, scales[, s = x + residual]

The columns belong to the operation, such as scale and bias. They, residual and the scale `given` are optional.

The result of the operation, and of `function` if there is one, stays in float32 and is rounded once. scales are float32: [...]
for rows, [..., width / block] for blocks; with a scale that is given, float32 [], max|result| of each row instead. q and scales
have no derivative. Kernels are written by hand: see _ops/norm/quantized_plan.py.

Rows that are split over devices are computed by XLA's operations and a message or two of a number per row, and one more for
the scale; with blocks they are gathered first.
"""

import functools

import jax
import jax.numpy as jnp

from jaxkern._core import compat, validate
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind, has_tangent, set_jvp
from jaxkern._core.signature import FLAT, Signature, numbered
from jaxkern._core.signature import primitive as define
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
        params |= {"to": to, "block": block}
        given_columns = [columns.get(name) for name in operation.columns]
        found = bind(operation.quantized, x, rows.get("residual"), *given_columns, *args, given, **params)
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


def _traced(operation, operands, numbers, function, algorithm):
    """(the function of rows for these operands, the operands that it takes)"""
    names = ("x", "residual", *operation.columns)
    given = tuple(n for n, a in zip(names, operands) if a is not None)
    operands = [a for a in operands if a is not None]
    params = {"numbers": numbers, "function": function, "algorithm": algorithm, "dtype": jnp.dtype(jnp.float32)}
    return traced(operation, given, tuple((a.shape, a.dtype) for a in operands), **params), operands


def _reference(operation, *operands, numbers, to, block, algorithm, function, mark=None, runner="xla"):
    """mark: for the CPU, see _definitions/quantize.py."""
    *operands, scale = operands
    f, operands = _traced(operation, operands, numbers, function, algorithm)
    y, *total = f.variant(runner)(*operands)
    return [*_quantized(y, scale, to, block, mark=mark), *total]


# ---- the primitive


def primitive(operation):
    """The primitive of an operation."""
    reference = functools.partial(_reference, operation)
    columns = {f"{name}?": "any row" for name in operation.columns}
    signature = Signature(
        lambda params: (
            {"x": ROWS, "residual?": ROWS, **columns}
            | numbered(
                "argument", len(params["function"].in_dtypes) - 1 if params["function"] else 0, "any *rows? row?"
            )
            | {"given?": "float32"}
        ),
        _results,
        layout=FLAT,
        sizes=lambda operands, params: {"blocks": operands.x.shape[-1] // (params["block"] or 1)},
        exact={"row"},
        whole=lambda operands, params: () if params["block"] is None else {"row", "blocks"},
    )
    prim = define(
        f"jaxkern_{operation.name}_quantize",
        signature,
        reference,
        batch=functools.partial(_batch, operation, reference),
        on_cpu=functools.partial(on_cpu, functools.partial(reference, runner="cpu"), 1),
        makes_nan=False,
        plan=functools.partial(_planned, operation),
        partition=functools.partial(_partition, operation, signature),
        dtypes=quantize_plan.DTYPES,
    )
    set_jvp(prim, functools.partial(_jvp, prim))
    return prim


ROWS = "T *rows row"


def _results(operands, params):
    scales = "float32 *rows" if params["block"] is None else "float32 *rows blocks"
    return ["to *rows row", scales, *([] if operands.residual is None else [ROWS])]


def _batch(operation, reference, prim, operands, dims, params):
    """Columns and scales of a batch are left to XLA."""
    if all(d is None for d in (*dims[2 : 2 + len(operation.columns)], dims.given)):
        return None
    ys = jax.vmap(functools.partial(reference, **params), tuple(dims))(*operands)
    return ys, [0] * len(ys)


def _planned(operation, device, operands, results, **params):
    extras = " ".join(n for n in ("residual", *operation.columns) if getattr(operands, n) is not None)
    present = [a for a in operands if a is not None]
    params |= {"extras": extras, "given": operands.given is not None}
    return quantized_plan.launches(operation.name, device, present, results, **params)


def _partition(operation, signature, prim, ctx, operands, params):
    *whole, _ = signature.expand(ctx.avals_in, params)[0]

    def shard(prim, over, *parts, to, block, **params):
        if not over["row"]:
            return bind(prim, *parts, to=to, block=block, **params)
        f, _ = _traced(operation, whole, **params)
        *parts, scale = parts
        names = [*(f"rows{d}" for d in range(parts[0].ndim - 1)), "row"]
        parts = [a for a in parts if a is not None]
        y, *total = rows_primitive.part(f, dict(zip(f.program.operands[0].dims, names)), over, parts)
        return [*_quantized(y, scale, to, None, over["row"]), *total]

    return signature.partition(shard, prim, ctx, operands, params)


def _jvp(prim, primals, tangents, **params):
    """q and scales have no derivative; x + residual has one."""
    found = bind(prim, *primals, **params)
    zeros = [compat.zero_tangent(y) for y in found]
    given = [t for t in tangents[:2] if has_tangent(t)]
    if given and primals.residual is not None:
        zeros[2] = functools.reduce(jnp.add, given)
    return found, zeros
