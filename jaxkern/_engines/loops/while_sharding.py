"""While loops of arrays that are split over several devices: every device runs the loops of its own lanes.

Nothing is sent, and a device stops when its own lanes are done. The part of a device is JAX's loop under vmap, from the scalar
functions of the kernel's condition and step. On CUDA its lowering rule makes a kernel of it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from jaxkern._core import compat, partition
from jaxkern._core.cpp import Unsupported
from jaxkern._core.jaxprs import computing
from jaxkern._engines.loops.while_plan import WhileCore
from jaxkern._engines.loops.while_program import lanes_p, read

# The whole loop, as XLA sees it before it is partitioned. results: types. loop: its text, for caches.
_whole_p = Primitive("jaxkern_while_loop_lanes")
_whole_p.multiple_results = True
_whole_p.def_abstract_eval(lambda *_, results, loop: list(results))


def lower(ctx, operands, params, label):
    """The results of a loop on several devices, or None where XLA partitions it."""
    counts = params["cond_nconsts"], params["body_nconsts"]
    avals = [*ctx.avals_in, *ctx.avals_out]
    if not all(isinstance(n, int) and n for a in avals for n in a.shape):
        return None
    try:
        program = read(params["cond_jaxpr"], params["body_jaxpr"], *counts, label)
        core = WhileCore(program)
    except Unsupported:
        return None
    if program.captured:
        return None
    lanes = {d: f"d{k}" for k, d in enumerate(program.dims)}
    own = [[d and d.same() for d in v.dims] for v in program.given]
    named = lambda k, dims: [lanes.get(d) or f"own{k}x{j}" for j, d in enumerate(dims)]
    dims = [named(k, v) for k, v in enumerate((*own, *own[sum(counts) :]))]
    results = tuple(jax.core.ShapedArray(a.shape, a.dtype) for a in map(compat.physical, ctx.avals_out))
    whole = {name for names in dims for name in names if name not in lanes.values()}
    given = {"results": results, "loop": f"{params['cond_jaxpr']}\n{params['body_jaxpr']}"}
    inner = ctx.replace(avals_in=list(map(compat.physical, ctx.avals_in)), avals_out=list(results))
    places = {lanes[d] for d in core.indices}

    def shard(over, *parts, results, loop):
        del results, loop
        return part(core, {d: over.get(name, ()) for d, name in lanes.items()}, parts)

    return partition.lower(inner, _whole_p, operands, given, dims, shard, exact=places, whole=whole)


def part(core, axes, parts) -> list:
    """The results of the lanes of a device, from its parts of what the loop captured and of its operands.

    axes: {dimension of the lanes: the mesh axes that split it}.
    """
    program = core.program
    operands = program.split(parts)
    size = {d: d.size for d in program.dims}
    for v, x in zip(program.operands, operands):
        size.update({d: n for d, n in zip(v.dims, x.shape) if d is not None})
    places = []
    for d in core.indices:
        first = lax.axis_index(axes[d]) * size[d] if axes.get(d) else 0
        places.append((first + jnp.arange(size[d], dtype=np.int32), (d,)))
    inits = range(program.num_consts, len(operands))
    consts, carries = ([(operands[k], program.operands[k].dims) for k in ks] for ks in (core.consts, inits))
    types = [v.dtype for v in program.carries]
    wide = lambda xs: [x.astype(computing(x.dtype)) for x in xs]

    def lane(consts, carries, places):
        """The loop of a lane, on scalars. Carries are rounded to their types in every step."""
        condition = lambda c: lanes_p.bind(core.condition.scalars(*consts, *wide(c), *places)[0])

        def step(c):
            ys = core.function.scalars(*consts, *wide(c), *places)
            return [y.astype(t) for y, t in zip(ys, types)]

        return lax.while_loop(condition, step, carries)

    f = lane
    for d in reversed(program.dims):
        along = [[0 if d in dims else None for _, dims in group] for group in (consts, carries, places)]
        f = jax.vmap(f, along, along[1], axis_size=size[d])

    def scalar_last(x, dims):
        """The array with its dimensions in the order of the lanes."""
        x = lax.squeeze(x, [k for k, d in enumerate(dims) if d is None])
        present = [d for d in dims if d is not None]
        return jnp.transpose(x, [present.index(d) for d in program.dims if d in present])

    consts, carries, places = ([(scalar_last(*a), a[1]) for a in group] for group in (consts, carries, places))
    values = lambda group: [x for x, _ in group]
    ys = f(wide(values(consts)), values(carries), values(places))
    found = []
    for y, (_, dims) in zip(ys, carries):
        order = [d for d in program.dims if d in dims]
        y = jnp.transpose(y, [order.index(d) for d in dims if d is not None])
        found.append(jnp.expand_dims(y, [k for k, d in enumerate(dims) if d is None]))
    return program.join(found)
