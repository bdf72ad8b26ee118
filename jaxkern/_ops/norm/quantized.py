"""RMSNorm and LayerNorm that write 8 bits: the norm, and the quantisation of its result, in one kernel.

    (x[, residual][, scale][, bias], arguments of `function`...[, given])  -> q like x, scales[, s = x + residual]

for both operations: QUANTIZED["rms_norm"]. The result of the norm, and of `function` if there is one, stays in float32 and
is rounded once. scales are float32: [...] for rows, [..., width / block] for blocks; with a scale that is given, float32 [],
max|result| of each row instead. q and scales have no derivative.

Rows that are split over devices are normalised by XLA's operations and a message or two of a number per row, and one more for
the scale; with blocks they are gathered first.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxkern._core import compat, define, launch, partition
from jaxkern._core.algorithms import pick
from jaxkern._core.primitive import bind, set_jvp
from jaxkern._core.rows import without_axis
from jaxkern._ops.norm import plan, primitive, reference
from jaxkern._ops.quantize import plan as quantize_plan
from jaxkern._ops.quantize import reference as quantize_reference

largest = quantize_reference.largest
_WARP = 32
_HEADER = "norm/quantize.cuh"


def _counts(operands, extras, given):
    """(operands that the norm takes, operands in all without the given scale)."""
    return 1 + len(extras.split()), len(operands) - given


def quantized(
    x, *rest, operation, extras, eps, to, block, given, algorithm, function=None, over=(), mark=None, quick=False
):
    """The reference; `over`: the mesh axes that split the rows, if block is None.

    mark, quick: for the CPU, see quantize/reference.py and norm/reference.py.
    """
    *rest, scale = [*rest, None] if not given else rest
    params = {"operation": operation, "extras": extras, "eps": eps, "algorithm": algorithm, "function": function}
    y, *s = reference.norm(x, *rest, dtype=jnp.float32, over=over, quick=quick, **params)
    if mark and function is None:
        mark = _mark(x, *rest, operation=operation, extras=extras, eps=eps)
    if block is None:
        scales = [] if scale is None else [scale]
        return [*quantize_reference.quantize(y, *scales, dtype=to, over=over, mark=mark), *s]
    blocks = y.reshape(*y.shape[:-1], y.shape[-1] // block, block)
    mark = mark if mark is None or mark is True else mark[..., None]
    q, scales = quantize_reference.quantize(blocks, dtype=to, mark=mark)
    return [q.reshape(y.shape), scales, *s]


def _mark(x, *rest, operation, extras, eps):
    """0 for rows whose norm is finite for certain, without another pass over them; otherwise NaN."""
    named = dict(zip(extras.split(), rest))
    _, rstd = reference.statistics(reference.summed(x, named.get("residual")), operation, eps, quick=True)
    mark = 0 * rstd + 0 / rstd
    for parameter in (named[k] for k in ("scale", "bias") if k in named):
        mark = mark + 0 * jnp.sum(jnp.square(parameter.astype(rstd.dtype)))  # of squares, so that no product overflows
    return mark.astype(jnp.float32)


# ---- the plan


class _Kind:
    """A quantisation as template arguments, and what kernels are given for it."""

    def __init__(self, p, to, block, given, at):
        self.p, self.block = p, block
        self.type = f"jaxkern::{quantize_plan.TYPES[to]}"
        self.given = given
        self.args = (launch.operand(at) if given else launch.null, launch.result(1), launch.i64(block or p.width))

    def span(self, algorithm, device) -> int | None:
        """kSpan of NormQuantize; None if its threads cannot share the scales of the blocks."""
        if self.block is None or self.block == self.p.width:
            return -1 if self.given else 0
        lanes = plan._layout(self.p, algorithm, device)[0] or _WARP
        span = self.block // self.p.pack
        # Blocks are aligned groups of lanes, each of which has one pack of its block.
        fits = self.block % self.p.pack == 0 and span & (span - 1) == 0 and lanes % span == 0
        return span if fits else None


def _streaming(n, kind, inner, pack):
    blocks = min(n.p.rows, 4 * n.device.sm_count)
    name = f"NormQuantizeStream<{n.op}, {pack}, {kind.type}, {quantize_plan.cpp(kind.given)}{f', {inner.name}' if inner else ''}>"
    source = inner.source if inner else ""
    return [launch.Launch(_HEADER, name, [n.params(blocks)], blocks, plan._STREAM_THREADS, source=source)]


def launches(device, operands, results, *, operation, extras, eps, to, block, given, algorithm, function=None):
    """The plan for arrays of these types; None if there is no kernel for them."""
    norm_operands, count = _counts(operands, extras, given)
    at = dict(zip(extras.split(), range(1, norm_operands)))
    parameters = [operands[at[name]].dtype.name for name in ("scale", "bias") if name in at]
    x = operands[0]
    p = plan._problem(x, x, operation, at, "bias" in at)
    if p.dtype not in quantize_plan.DTYPES or not set(parameters) <= set(quantize_plan.DTYPES) or p.width >= 1 << 30:
        return None
    if len(set(parameters)) > 1 or (algorithm == "auto" and plan.left_to_xla(p, "block")):
        return None
    inner = None
    if function is not None:
        inner = plan._epilogue(function, x, operands[norm_operands:count], norm_operands)
        if inner is None:
            return None
    pointers = [launch.operand(at[name]) if name in at else launch.null for name in ("residual", "scale", "bias")]
    more = launch.result(2) if "residual" in at else launch.null
    arrays = (launch.operand(0), pointers[0], launch.null, *pointers[1:], launch.result(0), more)
    kind = _Kind(p, to, block, given, count)
    algorithm = pick(operation, algorithm, p, device)
    span = None if algorithm in ("cluster", "streaming") else kind.span(algorithm, device)
    if span is None:
        algorithm = "streaming"
    args = (*(inner.args if inner else ()), *kind.args)
    name = f"jaxkern::NormQuantize<{kind.type}, {span}{f', {inner.name}' if inner else ''}>"
    epilogue = plan._Epilogue(inner.source if inner else "", name, args, _HEADER)
    n = plan._Norm(p, device, (parameters or [p.dtype])[0], (), arrays, eps, epilogue)
    pack = math.gcd(p.pack, block or p.pack)
    found = _streaming(n, kind, inner, pack) if span is None else plan._registers(n, algorithm)[0]
    unaligned = _streaming(n, kind, inner, 1)
    if any(step.grid3()[0] > plan._MOST_GRID_X for step in (*found, *unaligned)):
        return None
    return launch.Plan(algorithm, tuple(found), unaligned=tuple(unaligned))


# ---- the primitives


def _shape(x, *rest, operation, extras, eps, to, block, given, algorithm, function=None):
    norm = {
        "operation": operation,
        "extras": extras,
        "eps": eps,
        "dtype": jnp.dtype(jnp.float32),
        "algorithm": algorithm,
    }
    y, *s = primitive._norm_shape(x, *rest[: len(rest) - given], **norm)
    rows = without_axis(y, y.ndim - 1)
    scales = rows if block is None else y.update(shape=(*y.shape[:-1], y.shape[-1] // block))
    return [y.update(dtype=jnp.dtype(to)), scales, *s]


def _batch(prim, operands, dims, **params):
    extras, given = params["extras"], params["given"]
    wide = 1 + extras.split().count("residual")
    norm_operands, count = _counts(operands, extras, given)
    if any(d is not None for d in (*dims[wide:norm_operands], *dims[count:])):
        return primitive._batch_reference(quantized, operands, dims, params)
    size = next(x.shape[d] for x, d in zip(operands, dims) if d is not None)
    rows = primitive._leading(operands[:wide], dims[:wide], size)
    args = zip(operands[norm_operands:count], dims[norm_operands:count])
    args = [x[None] if d is None else jnp.moveaxis(x, d, 0) for x, d in args]
    ys = bind(prim, *rows, *operands[wide:norm_operands], *args, *operands[count:], **params)
    return ys, [0] * len(ys)


def _partition(prim, ctx, operands, params):
    names = [f"d{d}" for d in range(ctx.avals_in[0].ndim - 1)]
    full, block = [*names, "row"], params["block"]
    norm_operands, count = _counts(operands, params["extras"], params["given"])
    wide = 1 + params["extras"].split().count("residual")
    scales = names if block is None else [*names, "blocks"]
    dims = (
        [full] * wide + [["row"]] * (norm_operands - wide) + [full] * (count - norm_operands) + [[]] * params["given"]
    )
    dims += [full, scales] + [full] * (wide - 1)

    def shard(over, *parts, **params):
        return quantized(*parts, over=over["row"], **params) if over["row"] else prim.bind(*parts, **params)

    whole = () if block is None else {"row", "blocks"}
    return partition.lower(ctx, prim, operands, params, dims, shard, exact={"row"}, whole=whole)


def _jvp(prim, primals, tangents, **params):
    """q and scales have none; x + residual has."""
    found = bind(prim, *primals, **params)
    zeros = [compat.zero_tangent(y) for y in found]
    if "residual" in params["extras"].split():
        given = [t for t in tangents[:2] if type(t) is not ad.Zero]
        if given:
            zeros[2] = functools.reduce(jnp.add, given)
    return found, zeros


def _primitive(name):
    return define.primitive(
        f"jaxkern_{name}_quantize",
        _shape,
        _batch,
        quantized,
        on_cpu=functools.partial(quantize_reference.on_cpu, functools.partial(quantized, quick=True), 1),
        several=True,
        makes_nan=False,
        plan=launches,
        partition=_partition,
        dtypes=quantize_plan.DTYPES,
    )


QUANTIZED = {name: _primitive(name) for name in ("rms_norm", "layer_norm")}

for _prim in QUANTIZED.values():
    set_jvp(_prim, functools.partial(_jvp, _prim))


def masked(x, where, args, *, to, block, given, **params):
    """As `quantized`, with statistics of the elements where `where` is True; left to XLA. given: the scale, or None."""
    y, *s = reference.masked(x, where, args, dtype=jnp.float32, **params)
    y, scale = jax.lax.stop_gradient(y), [] if given is None else [given]
    blocks = y if block is None else y.reshape(*y.shape[:-1], y.shape[-1] // block, block)
    q, scales = quantize_reference.quantize(blocks, *scale, dtype=to)
    return [q.reshape(y.shape), scales, *s]
