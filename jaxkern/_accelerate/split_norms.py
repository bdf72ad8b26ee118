"""Norms of plain JAX programs on several devices, which send no message that the plain program does not send.

A plain layer computes the statistics of each row once, and its gradient uses them again. jaxkern's norms compute them
again from x, which is free where a device has whole rows, and takes a message where rows are split over devices. So these
primitives pass the statistics from the norm to its gradient:

    forward    (x[, scale][, bias])                                  -> y
    kept       (x[, scale][, bias])                                  -> y, [mean, ]variance: arrays of x.shape[:-1]
    grad       (s, g[, scale], [mean, ]variance)                     -> ds[, dscale][, dbias]
    jvp        (s[, scale], ds[, dscale][, dbias], [mean, ]variance) -> dy: the transpose of the gradient; left to XLA

Where rows are whole, each device runs the kernel, which does not read the statistics, and XLA removes them. Where rows are
split, XLA's operations use them, with one message for the gradient, of two numbers per row (rms_norm: one).

There are two variants, as there are of plain layers: the variance is mean(x^2) - mean(x)^2 (`fast`), which takes one
message, or the mean of squared deviations, which takes two.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxkern._accelerate import norm_primitives as norms
from jaxkern._accelerate import norm_reference as reference
from jaxkern._accelerate.norm_primitives import Primitives
from jaxkern._core import compat, define, partition, rows, switch, validate
from jaxkern._core.autodiff import defmultilinear, defvjp
from jaxkern._core.primitive import bind, evaluate, set_jvp
from jaxkern._definitions.traced import computing

COUNT = {"layer_norm": 2, "rms_norm": 1}  # of statistics


# ---- references in jnp; `over`: the mesh axes that split rows


def _means(arrays, over):
    """The mean of each row of each array, with one message."""
    width = arrays[0].shape[-1] * (lax.psum(1, over) if over else 1)
    sums = [jnp.sum(a, -1) for a in arrays]
    if over:
        sums = list(lax.psum(jnp.stack(sums), over))
    return [a / width for a in sums]


def statistics(fast, x, *, operation, over=()):
    x = x.astype(computing(x.dtype))
    if operation == "rms_norm":
        return _means([x * x], over)
    if fast:
        mean, square = _means([x, x * x], over)
        return [mean, jnp.maximum(square - mean * mean, 0)]
    (mean,) = _means([x], over)
    deviation = x - mean[..., None]
    return [mean, *_means([deviation * deviation], over)]


def _deviation(x, eps, *found):
    """(x - mean, rstd); rms_norm: (x, rstd)."""
    x = x.astype(computing(x.dtype))
    if len(found) == 2:
        x = x - found[0][..., None]
    rstd = lax.rsqrt(found[-1] + eps)[..., None]
    return x, rstd


def kept(fast, x, *rest, operation, extras, eps, dtype, algorithm, over=()):
    del algorithm
    named, found = dict(zip(extras.split(), rest)), statistics(fast, x, operation=operation, over=over)
    deviation, rstd = _deviation(x, eps, *found)
    y = deviation * rstd
    if "scale" in named:
        y = y * named["scale"].astype(y.dtype)
    if "bias" in named:
        y = y + named["bias"].astype(y.dtype)
    return [y.astype(dtype), *found]


def norm(*operands, **params):
    return kept(*operands, **params)[:1]


def norm_grad(s, g, *rest, operation, extras, eps, sums, algorithm, over=()):
    del algorithm
    count = COUNT[operation]
    deviation, rstd = _deviation(s, eps, *rest[-count:])
    z, g = deviation * rstd, g.astype(rstd.dtype)
    h = g * rest[0].astype(g.dtype) if "scale" in extras else g
    # Without rstd, so that XLA can send it together with the sum of squares.
    of_product, *of_h = _means([h * deviation, h][:count], over)
    ds = h - z * (of_product[..., None] * rstd)
    for mean in of_h:
        ds = ds - mean[..., None]
    along = tuple(range(g.ndim - 1))
    found = [jnp.sum(part, along).astype(d) for part, d in zip((g * z, g), sums) if d is not None]
    return [(ds * rstd).astype(s.dtype), *found]


def _without(f):
    """`f` of _ops/norm, which computes the statistics itself: derivatives by x see them as functions of x."""

    def g(*operands, **params):
        return f(*operands[: -COUNT[params["operation"]]], **params)

    return g


norm_jvp = _without(reference.norm_jvp)


# ---- shapes and batching


def _kept_shape(x, *rest, operation, **params):
    own = rows.without_axis(x, x.ndim - 1).update(dtype=computing(x.dtype))
    return [*norms._norm_shape(x, *rest, operation=operation, **params), *[own] * COUNT[operation]]


def _without_statistics(shape):
    return lambda *avals, **params: shape(*avals[: -COUNT[params["operation"]]], **params)


def _batch(of_rows, f, prim, operands, dims, **params):
    """of_rows(params): how many operands are rows, at the beginning, and have a statistic each, at the end.

    Each example has sums over rows of its own, which XLA computes, as it does where examples have scales of their own.
    """
    first, last = of_rows(params)
    end = len(operands) - last
    if any(d is not None for d in dims[first:end]) or first == 0:
        return norms._batch_reference(f, operands, dims, params)
    size = next(x.shape[d] for x, d in zip(operands, dims) if d is not None)
    at = [*range(first), *range(end, len(operands))]
    moved = list(operands)
    for k, x in zip(at, norms._leading([operands[k] for k in at], [dims[k] for k in at], size)):
        moved[k] = x
    some = any(d is not None for d in params.get("sums", ()))
    ys = bind(prim, *moved, **(params | ({"sums": (None, None)} if some else {})))
    sums = norms._batch_reference(f, operands, dims, params)[0][1:] if some else []
    return [*ys, *sums], [0] * (len(ys) + len(sums))


_ROWS = {
    "forward": lambda params: (1, 0),
    "kept": lambda params: (1, 0),
    "grad": lambda params: (2, COUNT[params["operation"]]),
    "jvp": lambda params: (0, 0),
}


# ---- lowering


def _partition(prim, kind, f, part, of_rows, ctx, operands, params):
    """part: the primitive that each device runs on whole rows. of_rows: the statistics of rows, beside its result."""
    full = [f"d{d}" for d in range(ctx.avals_in[0].ndim - 1)] + ["row"]
    count = COUNT[params["operation"]]
    end = len(operands) - (count if kind == "grad" else 0)
    last = len(ctx.avals_out) - (count if kind == "kept" else 0)
    named = lambda avals: [["row"] if a.ndim == 1 else full for a in avals]
    dims = [
        *named(ctx.avals_in[:end]),
        *[full[:-1]] * (len(operands) - end),
        *named(ctx.avals_out[:last]),
        *[full[:-1]] * (len(ctx.avals_out) - last),
    ]

    def compute(over, *parts, **params):
        if over["row"]:
            return f(*parts, **params, over=over["row"])
        found = part.bind(*parts[:end], **params)
        return [*found, *of_rows(parts[0], operation=params["operation"])] if kind == "kept" else found

    def shard(over, *parts, **params):
        if "sums" not in params:
            return compute(over, *parts, **params)
        wide = tuple(None if d is None else computing(parts[0].dtype) for d in params["sums"])
        inside = _inside(ctx.avals_in[0].shape[:-1], parts[0].shape[:-1], [over[name] for name in full[:-1]])
        if inside is None:
            ds, *sums = compute(over, *parts, **(params | {"sums": wide}))
        else:
            (ds,) = compute(over, *parts, **(params | {"sums": (None, None)}))
            sums = _sums(*parts[:2], inside[..., None], parts[end:], params["eps"], wide)
        along = tuple(axis for name in full[:-1] for axis in over[name])
        sums = lax.psum(sums, along) if along and sums else sums
        return [ds, *(a.astype(d) for a, d in zip(sums, (d for d in params["sums"] if d is not None)))]

    return partition.lower(ctx, prim, operands, params, dims, shard, exact={"row"})


def _inside(shape, part, over):
    """Where rows are not added at the end to divide them evenly; None if they are so nowhere."""
    inside = None
    for d, (whole, own, axes) in enumerate(zip(shape, part, over)):
        if axes and own * lax.psum(1, axes) != whole:
            at = lax.axis_index(axes) * own + lax.broadcasted_iota(jnp.int32, part, d)
            inside = (at < whole) if inside is None else inside & (at < whole)
    return inside


def _sums(s, g, inside, found, eps, dtypes):
    """The gradients of scale and bias that have a dtype, from some rows alone; others may hold anything."""
    deviation, rstd = _deviation(s, eps, *found)
    g, along = g.astype(rstd.dtype), tuple(range(s.ndim - 1))
    terms = [part for part, d in zip((g * (deviation * rstd), g), dtypes) if d is not None]
    return [jnp.sum(jnp.where(inside, term, 0), along) for term in terms]


def _primitive(name, kind, shape, f, inner=None, part=None, left=None, of_rows=None) -> Primitive:
    """inner: the primitive that one device runs. part, of_rows: as for `_partition`. left: as for `define.primitive`."""
    prim = Primitive(f"jaxkern_{name}")
    prim.multiple_results = True
    prim.def_abstract_eval(shape)
    prim.def_impl(functools.partial(evaluate, prim, f))
    batching.primitive_batchers[prim] = functools.partial(_batch, _ROWS[kind], f, prim)
    plain = define.lower_reference(prim, f)
    mlir.register_lowering(prim, plain)
    if kind == "jvp":
        return prim

    def on_one(platform, ctx, operands, params):
        count = COUNT[params["operation"]]
        end = len(operands) - (count if kind == "grad" else 0)
        last = len(ctx.avals_out) - (count if kind == "kept" else 0)
        own = ctx.replace(avals_in=ctx.avals_in[:end], avals_out=ctx.avals_out[:last])
        found = define._lower_on(platform)(inner, own, operands[:end], params)
        if kind != "kept":
            return found
        of_x = ctx.replace(avals_in=ctx.avals_in[:1], avals_out=ctx.avals_out[last:])
        body = mlir.lower_fun(functools.partial(of_rows, operation=params["operation"]), multiple_results=True)
        return [*found, *switch.own_code(body)(of_x, operands[0])]

    def rule(platform, ctx, *operands, **params):
        if compat.partitioned_devices(ctx) == 1:
            return on_one(platform, ctx, operands, params)
        if left(prim, ctx, operands, params) or not compat.may_partition_itself(ctx):
            return plain(ctx, *operands, **params)
        return _partition(prim, kind, f, part, of_rows, ctx, operands, params)

    for platform in ("cuda", "cpu"):
        compat.register_uncached_lowering(prim, functools.partial(rule, platform), platform)
    compat.needs_devices(prim)
    return prim


# ---- derivatives


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _norm(operands, primitives, kept_p, active, params):
    return bind(primitives.forward, *operands, **dict(params))


def _forward(operands, primitives, kept_p, active, params):
    params = dict(params)
    y, *found = bind(kept_p, *operands, **params)
    named = dict(zip(params["extras"].split(), operands[1:]))
    return [y], (operands[0], named, found)


def _backward(primitives, kept_p, active, params, residuals, cotangents):
    (s, named, found), params = residuals, dict(params)
    names = [None, *params["extras"].split()]
    wanted = [names[k] for k in active]
    sums = tuple(named[name].dtype if name in wanted else None for name in ("scale", "bias"))
    scale = [named["scale"]] if "scale" in named else []
    of = {k: params[k] for k in ("operation", "eps", "algorithm")}
    extras = "scale" if scale else ""
    ds, *rest = bind(primitives.grad, s, *cotangents, *scale, *found, extras=extras, sums=sums, **of)
    parts = {None: ds, **dict(zip([k for k, d in zip(("scale", "bias"), sums) if d is not None], rest))}
    split = lambda name: validate.split_like(parts[name], jax.typeof(named[name])) if name else ds
    return (tuple(split(name) if name in parts else None for name in names),)


_norm.defvjp(_forward, _backward)


def _grad_transpose(primitives, operands, cotangents, params):
    g, rest = operands[1], operands[2:]
    dtype = (g.aval if ad.is_undefined_primal(g) else g).dtype
    count, scale = COUNT[params["operation"]], "scale" in params["extras"]
    return bind(primitives.jvp, operands[0], *rest[:scale], *cotangents, *rest[-count:], dtype=dtype, **params)


def _jvp_linear(params):
    first = 1 + ("scale" in params["extras"])
    return range(first, first + 1 + sum(d is not None for d in params["sums"]))


def _jvp_transpose(primitives, operands, cotangents, params):
    scale, found = operands[1 : _jvp_linear(params)[0]], operands[-COUNT[params["operation"]] :]
    params = {k: v for k, v in params.items() if k != "dtype"}
    return bind(primitives.grad, operands[0], *cotangents, *scale, *found, **params)


def variant(name: str, fast: bool, inner: Primitives, left) -> Primitives:
    """The operation `name` as primitives for `norm.norm`. inner: what one device runs."""
    label, own = f"split_{name}{'_fast' if fast else ''}", norms.PARTS[name]
    of_rows, run = functools.partial(statistics, fast), (inner.forward, own.forward, left)
    forward = _primitive(label, "forward", norms._norm_shape, functools.partial(norm, fast), *run)
    kept_p = _primitive(f"{label}_kept", "kept", _kept_shape, functools.partial(kept, fast), *run, of_rows)
    shape = _without_statistics(norms._grad_shape)
    grad = _primitive(f"{label}_grad", "grad", shape, norm_grad, inner.grad, own.grad, left)
    jvp = _primitive(f"{label}_jvp", "jvp", _without_statistics(norms._jvp_shape), norm_jvp)
    found = Primitives(forward, grad, jvp)
    defvjp(
        forward,
        lambda *operands, active, **params: _norm(operands, found, kept_p, active, tuple(params.items())),
        differentiable=(0, 1, 2),
        tell_active=True,
    )

    def kept_jvp(primals, tangents, **params):
        y, *of_x = bind(kept_p, *primals, **params)
        _, (dy,) = ad.primitive_jvps[forward](primals, tangents, **params)
        return [y, *of_x], [dy, *map(compat.zero_tangent, of_x)]

    set_jvp(kept_p, kept_jvp)
    # Statistics are constants: the references by which these are differentiated compute them from s.
    defmultilinear(grad, _without(reference.norm_grad), lambda _: (1,), functools.partial(_grad_transpose, found))
    defmultilinear(jvp, norm_jvp, _jvp_linear, functools.partial(_jvp_transpose, found))
    return found
