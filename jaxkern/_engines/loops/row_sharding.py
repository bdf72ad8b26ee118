"""Scans whose body reduces along rows, of arrays that are split over several devices; compare scan_sharding.py.

Every device runs the loop of its own lanes, and sends nothing but sums over lanes, once, after the loop. Rows and steps that are
split are gathered. The part of a device is JAX's scan of the same steps on smaller arrays; its lowering rule makes a kernel of it.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkern._core.jaxprs import computing
from jaxkern._engines.jaxpr import REDUCTIONS, RENAMED, Constant, compute, widened


class Part:
    """The part of a device. axes: {dimension of the lanes: the axes of the mesh that split it}. parts: of the operands."""

    def __init__(self, program, axes, parts, length):
        self._p, self._axes, self._parts, self._length = program, axes, parts, length
        first_x = program.num_consts + program.num_carry
        self._size = {d: d.size // (lax.axis_size(axes[d]) if axes[d] else 1) for d in program.dims}
        for k, (v, x) in enumerate(zip(program.operands, parts)):
            self._size.update({d: n for d, n in zip(v.dims, x.shape[k >= first_x :]) if d is not None})

    def run(self, reverse, mark, results) -> list:
        """The results of the scan. results: types, on all devices together. mark(tree): of carries and ys, for kernels."""
        p = self._p
        consts, carries = self._parts[: p.num_consts], self._parts[p.num_consts : p.num_consts + p.num_carry]
        first = [jnp.zeros_like(c) if k in p.accumulators else c for k, c in enumerate(carries)]
        dtypes = [a.dtype for a in results]

        def body(carry, xs):
            ys = self._step([*consts, *carry, *xs])
            ys = mark([y.astype(d) for y, d in zip(ys, dtypes)])
            return ys[: p.num_carry], ys[p.num_carry :]

        xs = self._parts[p.num_consts + p.num_carry :]
        last, ys = lax.scan(body, mark(first), xs, self._length, reverse)
        found = [*last, *ys]
        for k, lanes in (p.accumulators | p.sums).items():
            gone = [d for d in p.dims if d in lanes and d not in p.results[k].dims]
            over = tuple(a for d in gone for a in self._axes[d])
            found[k] = lax.psum(found[k], over) if over else found[k]
            if k in p.accumulators:
                found[k] = carries[k] + found[k]
        return found

    def _shape(self, v) -> tuple:
        return tuple(self._size.get(d, d.size) if d is not None else n for d, n in zip(v.dims, v.aval.shape))

    def _step(self, operands) -> list:
        """The results of a step, in computing types."""
        env = {v: x.astype(computing(x.dtype)) for v, x in zip(self._p.operands, operands)}
        read = lambda v: widened(v)[()] if isinstance(v, Constant) else env[v]
        for step in self._p.steps:
            env.update(zip(step.results, self._computed(step, list(map(read, step.operands)))))
        shape = lambda k, v: self._shape(self._p.carries[k] if k < self._p.num_carry else v)
        return [jnp.broadcast_to(read(v), shape(k, v)) for k, v in enumerate(self._p.results)]

    def _computed(self, step, xs) -> list:
        out, params, shape = step.result, step.params, self._shape(step.result)
        if step.name in RENAMED:
            return [jnp.reshape(xs[0], shape)]
        if step.name == "broadcast_in_dim":
            return [lax.broadcast_in_dim(xs[0], shape, params["broadcast_dimensions"])]
        if step.name == "iota":
            axis = params["dimension"]
            place = lax.broadcasted_iota(np.int32, shape, axis)
            if axes := self._axes.get(out.dims[axis], ()):
                place = place + lax.axis_index(axes) * shape[axis]
            return [place.astype(computing(out.dtype))]
        if step.name == "slice":
            whole, own = step.operands[0].aval.shape, self._shape(step.operands[0])
            limits = [n if end == of else end for n, end, of in zip(own, params["limit_indices"], whole)]
            return [lax.slice(xs[0], params["start_indices"], limits, params["strides"])]
        if step.name in ("transpose", "rev", "pad", "concatenate") or step.name in REDUCTIONS:
            return [y.astype(computing(v.dtype)) for y, v in zip(self._bound(step, xs), step.results)]
        full = math.prod(shape) > 1
        xs = [
            jnp.broadcast_to(x, shape) if full and np.ndim(x) == 0 and v.aval.shape else x
            for x, v in zip(xs, step.operands)
        ]
        return compute(step, xs)

    def _bound(self, step, xs) -> list:
        found = step.equation.primitive.bind(*xs, **step.params)
        return list(found) if step.equation.primitive.multiple_results else [found]
