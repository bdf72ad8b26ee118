"""What is quantised with one scale: rows and blocks of them, both of a matrix and its transpose, or a whole tensor."""

import functools
import math
import typing

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxkern._core import validate
from jaxkern._core.primitive import bind
from jaxkern._definitions import quantize as definition
from jaxkern._ops.quantize import plan
from jaxkern._ops.quantize.primitive import quantize_tiles_p


def call(f, *operands, **static) -> typing.Any:
    if any(isinstance(x, Tracer) for x in operands):
        return f(*operands, **static)
    return _compiled(f, *operands, **static)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("dtype", "block", "transposed"))
def _compiled(f, *operands, **static):
    return f(*operands, **static)


def rows(x, *, dtype, block):
    if block == x.shape[-1]:
        q, scale = definition.quantized_rows(x, dtype=dtype)
        return q, scale[..., None]
    q, scale = definition.quantized_rows(_split(x, {x.ndim - 1: block}), dtype=dtype)
    return _merged(q, {x.ndim - 1}), scale


def both(x, *, dtype, block):
    """The quantized x and its quantized transpose; block: None for rows."""
    if block != plan.TILE:
        parts = x, jnp.swapaxes(x, -1, -2)
        return tuple(rows(a, dtype=dtype, block=block or a.shape[-1]) for a in parts)
    first, second = x.ndim - 2, x.ndim - 1
    q, q_t, scale, scale_t = bind(quantize_tiles_p, _tiles(x), dtype=dtype)
    q, q_t = (_merged(a, {first, second}) for a in (q, q_t))
    scale, scale_t = (_merged(a, {first}) for a in (scale, scale_t))
    return (q, scale), (q_t, scale_t)


def tensor(x, scale, *, dtype, transposed):
    amax = None
    if scale is None:
        amax = jax.lax.stop_gradient(definition.largest(x))
        scale = definition.scale_of(amax, dtype)
    if transposed and not (x.shape[-1] % plan.TILE or x.shape[-2] % plan.TILE):
        q, q_t, most = bind(quantize_tiles_p, _tiles(x), scale, dtype=dtype)
        q, q_t = (_merged(a, {x.ndim - 2, x.ndim - 1}) for a in (q, q_t))
    else:
        q, most = definition.quantized_rows(x, scale, dtype=dtype)
        q_t = jnp.swapaxes(q, -1, -2) if transposed else None
    amax = definition.largest(most) if amax is None else amax
    return (q, scale, amax, q_t) if transposed else (q, scale, amax)


def _tiles(x):
    """x as [..., M, 128, N, 128]."""
    return _split(x, {x.ndim - 2: plan.TILE, x.ndim - 1: plan.TILE})


def _split(x, blocks):
    """x with dimension d as two, [n / blocks[d], blocks[d]].

    On a mesh with explicit axes a split dimension is first gathered, if devices do not have whole blocks of it.
    """
    for d, block in blocks.items():
        axes = validate.explicit_spec(x)[d]
        sizes = jax.typeof(x).sharding.mesh.shape if axes else {}
        if axes and x.shape[d] // block % math.prod(sizes[a] for a in (axes if isinstance(axes, tuple) else (axes,))):
            x = validate.whole(x, d)
    shape, spec = [], []
    for d, (n, axes) in enumerate(zip(x.shape, validate.explicit_spec(x))):
        shape += [n // blocks[d], blocks[d]] if d in blocks else [n]
        spec += [axes, None] if d in blocks else [axes]
    return _reshaped(x, shape, spec)


def _merged(x, dims):
    """The inverse of `_split`: each of `dims`, dimensions of the result, is merged from two of x."""
    shape, spec, at = [], [], 0
    axes = validate.explicit_spec(x)
    while at < x.ndim:
        count = 1 + (len(shape) in dims)
        spec.append(axes[at])
        shape.append(math.prod(x.shape[at : at + count]))
        at += count
    return _reshaped(x, shape, spec)


def _reshaped(x, shape, spec):
    if not any(spec):
        return x.reshape(shape)
    return jax.lax.reshape(x, shape, out_sharding=jax.sharding.PartitionSpec(*spec))
