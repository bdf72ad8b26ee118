"""The primitives of segment_softmax: shapes, batching, derivatives, what runs them, several devices.

    segment_softmax_p        (data, index)    y = exp(data - max) / sum(exp(data - max)), max and sum over a segment
    segment_softmax_grad_p   (y, g, index)    dx = y * (g - sum(y * g)), likewise; 0 where y is 0, whatever g holds

with data, y, g and the result of shape (*lead, count, *trail) and index of (*batch, count), as in _index.py, whose
`Rules` these take too: batch is the first dimensions of lead, and what is left of lead shares its indices. `rows` is
the number of segments. An element of no segment is 0, as is a segment of nothing but -inf.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxkern import _index, _index_lowering, tiers
from jaxkern._core import compat, lowering, partition, registry
from jaxkern._core.autodiff import deflinear, defvjp
from jaxkern._core.primitive import bind, evaluate
from jaxkern._core.rows import computed

PLANS = ("sorted", "sort")
CUDA_ROWS, CUDA_COUNT = 2**31 - 2, 2**30  # segments, and rows of data under indices of their own, that a launch numbers


def segment_softmax(data, index, *, rows, rules):
    return bind(segment_softmax_p, data, index, rows=rows, rules=rules._replace(plan=tiers.forced(PLANS)))


# ---- shapes


def _shape(name, *operands, rows, rules):
    *arrays, index = operands
    x, axis, k = arrays[0], rules.axis, rules.batch_dims
    if not (0 <= k <= axis < x.ndim and index.shape == (*x.shape[:k], x.shape[axis])
            and all(a.shape == x.shape and a.dtype == x.dtype for a in arrays)):
        raise ValueError(f"{name}: {', '.join(a.str_short() for a in operands)} do not fit along axis {axis}, with "
                         f"{k} batch dimensions")
    return x.update(weak_type=False)


def _primitive(name):
    prim = Primitive(name)
    prim.def_abstract_eval(functools.partial(_shape, name))
    prim.def_impl(functools.partial(evaluate, prim))
    batching.primitive_batchers[prim] = functools.partial(_batch, prim)
    compat.check_nans(prim)
    return prim


def _batch(prim, operands, dims, *, rows, rules):
    """A batch of indices becomes a batch dimension in front; one of arrays alone a dimension anywhere behind those."""
    *arrays, index = operands
    *at, di = dims
    size = _index.size_of(operands, dims)
    if di is not None:
        arrays = [_index.moved(a, d, 0, size) for a, d in zip(arrays, at)]
        return bind(prim, *arrays, _index.moved(index, di, 0, size), rows=rows, rules=_index.outer(rules)), 0
    place = _index.place(next(d for d in at if d is not None), rules)
    arrays = [_index.moved(a, d, place, size) for a, d in zip(arrays, at)]
    return bind(prim, *arrays, index, rows=rows, rules=_index.inner(rules, place)), place


segment_softmax_p = _primitive("jaxkern_segment_softmax")
segment_softmax_grad_p = _primitive("jaxkern_segment_softmax_grad")


# ---- derivatives


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _vjp(data, index, rows, rules):
    return bind(segment_softmax_p, data, index, rows=rows, rules=rules)


def _forward(data, index, rows, rules):
    y = bind(segment_softmax_p, data, index, rows=rows, rules=rules)  # not _vjp, which has no derivative
    return y, (y, index)


def _backward(rows, rules, kept, g):
    y, index = kept
    return bind(segment_softmax_grad_p, y, g, index, rows=rows, rules=rules), None


_vjp.defvjp(_forward, _backward)


def _grad_jvp(y, g, index, dy, *, rows, rules):
    """dy * (g - sum(y * g)) - y * sum(dy * g); an element with y = 0 has no part in it, nor has its dy."""
    dtype, takes_part = y.dtype, y != 0
    y, g, dy = (jnp.where(takes_part, computed(a), 0) for a in (y, g, dy))
    of_segment = _totals(index, rows, rules)
    slope = dy * (g - of_segment(y * g)) - y * of_segment(dy * g)
    return jnp.where(takes_part, slope, 0).astype(dtype)


defvjp(segment_softmax_p, lambda data, index, *, rows, rules: _vjp(data, index, rows, rules), differentiable=(0,))
deflinear(segment_softmax_grad_p, 1, _grad_jvp, transpose=segment_softmax_grad_p)  # self-adjoint


# ---- the same by way of the segments: derivatives of derivatives, where there is no kernel, on several devices


def _totals(index, rows, rules, over=()):
    """x -> the sum over its segment for each element of x; 0 for an element of no segment."""
    rules = rules._replace(plan="auto")

    def of_segment(x):
        total = _index.segment_sum(x, index, rows=rows, rules=rules)
        total = lax.psum(total, over) if over else total
        return _index.index_select(total, index, rules=rules)

    return of_segment


def _reference(data, index, *, rows, rules, over=()):
    if isinstance(rows, int) and rows == 0:
        return jnp.zeros_like(data)
    x = computed(data)
    rules = rules._replace(plan="auto")
    # Any number may be subtracted, and so a constant: the largest has no Taylor series.
    largest = _index.segment(_index.segment_max_p, lax.stop_gradient(x), index, rows=rows, rules=rules)
    if over:
        largest = lax.pmax(largest, over)  # that of a NaN may be any: what it is subtracted from becomes NaN
    base = jnp.where(largest == -jnp.inf, 0, largest)
    exists = _exists(index, rows, rules, x.ndim)
    e = jnp.where(exists, jnp.exp(x - _index.index_select(base, index, rules=rules)), 0)
    total = _totals(index, rows, rules, over)(e)
    return jnp.where(exists, e / jnp.where(total == 0, 1, total), 0).astype(data.dtype)


def _grad_reference(y, g, index, *, rows, rules, over=()):
    if isinstance(rows, int) and rows == 0:
        return jnp.zeros_like(y)
    wide = computed(y)
    takes_part = (wide != 0) & _exists(index, rows, rules, y.ndim)
    g = jnp.where(takes_part, computed(g), 0)
    dot = _totals(index, rows, rules, over)(jnp.where(takes_part, wide * g, 0))
    return jnp.where(takes_part, wide * (g - dot), 0).astype(y.dtype)


def _exists(index, rows, rules, rank):
    """Whether each element is of a segment; of a shape that broadcasts to the arrays'."""
    exists = jnp.ones(index.shape, bool) if rules.clip else index >= 0
    if not rules.clip and not (isinstance(rows, int) and rows > jnp.iinfo(index.dtype).max):  # rows may be symbolic
        index = index.astype(jnp.int32) if index.dtype.itemsize < 4 else index
        exists &= index < jnp.asarray(rows, index.dtype)
    return jnp.expand_dims(exists, [d for d in range(rank) if not (d < rules.batch_dims or d == rules.axis)])


# ---- the kernels


def _register(prim, reference):
    mlir.register_lowering(prim, mlir.lower_fun(reference, multiple_results=False))
    compat.taylor_rule(prim, reference)
    for platform, module in registry.status.items():
        if prim.name in module.targets:
            compat.needs_devices(prim)
            mlir.register_lowering(prim, functools.partial(_lower, prim, reference, platform), platform=platform)


def _lower(prim, reference, platform, ctx, *operands, rows, rules):
    avals, (out,) = ctx.avals_in, ctx.avals_out
    count, axis = out.shape[rules.axis], rules.axis
    static = all(isinstance(d, int) for d in out.shape)
    most = (_index_lowering.LIMIT, _index_lowering.LIMIT) if platform == "cpu" else (CUDA_ROWS - 1, CUDA_COUNT)
    if (out.dtype not in lowering.KERNEL_DTYPES or 0 in out.shape or not isinstance(rows, int) or rows == 0
            or not (static or platform == "cpu") or rows > most[0] or (static and count > most[1])):
        return mlir.lower_fun(reference, multiple_results=False)(ctx, *operands, rows=rows, rules=rules)
    if static and compat.may_partition_itself(ctx):
        return _partitioned(prim, reference, ctx, operands, rows, rules)
    devices = compat.partitioned_devices(ctx)
    if devices > 1 and axis > rules.batch_dims:
        # The dimensions before the axis may be split if all operands have them.
        return mlir.lower_fun(functools.partial(_spread, prim), multiple_results=False)(
            ctx, *operands, rows=rows, rules=rules)
    results = [out]
    if platform == "cuda":
        shape = (*out.shape[:axis], rows, *out.shape[axis + 1 :])
        scratch = _index_lowering.scratch_shape(
            prim.name.removeprefix("jaxkern_"), out.dtype, avals[-1], shape, count, rules, devices)
        if scratch is None:
            return mlir.lower_fun(reference, multiple_results=False)(ctx, *operands, rows=rows, rules=rules)
        results += [jax.core.ShapedArray(scratch, jnp.dtype(jnp.uint8))] if 0 not in scratch else []
    attributes = None
    if devices > 1:
        attributes = partition.attributes([a.shape for a in avals], [a.shape for a in results], rules.batch_dims)
    rule = jax.ffi.ffi_lowering(prim.name, **({"extra_attributes": attributes} if attributes else {}))
    return rule(ctx.replace(avals_out=results), *operands, num_segments=rows, **rules._asdict())[:1]


def _spread(prim, *operands, rows, rules):
    *arrays, index = operands
    axis = rules.axis
    shape = arrays[0].shape[: axis + 1]
    index = jnp.broadcast_to(jnp.expand_dims(index, range(rules.batch_dims, axis)), shape)
    return prim.bind(*arrays, index, rows=rows, rules=rules._replace(batch_dims=axis))


def _partitioned(prim, reference, ctx, operands, rows, rules):
    """Any dimension may be split; if rows of data are, devices tell each other maxima and sums of segments."""
    names = [f"d{d}" for d in range(ctx.avals_out[0].ndim)]
    names[rules.axis] = "count"
    index = [*names[: rules.batch_dims], "count"]
    dims = [names if a.ndim == len(names) and k < len(ctx.avals_in) - 1 else index for k, a in enumerate(ctx.avals_in)]

    def shard(over, *parts, rows, rules):
        if over["count"]:
            return reference(*parts, rows=rows, rules=rules, over=over["count"])
        return prim.bind(*parts, rows=rows, rules=rules)

    return partition.lower(ctx, prim, operands, dict(rows=rows, rules=rules), [*dims, names], shard, exact={"count"})


_register(segment_softmax_p, _reference)
_register(segment_softmax_grad_p, _grad_reference)
