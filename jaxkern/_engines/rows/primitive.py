"""The primitives of row functions: arrays, and a `RowFunction` as their parameter.

Each operation has a primitive of its name, such as `jaxkern_row_kernel`. Its derivatives and batches are the same primitive with a
derivative or a batch of the function. Where kernels run, it is a call of a second primitive, such as
`jaxkern_row_kernel_core`, which is one kernel, followed by operations on smaller arrays that complete its results.
"""

import functools
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad
from jax.sharding import NamedSharding, PartitionSpec

from jaxkern._core import algorithms, compat, device, partition, switch, validate
from jaxkern._core.cpp import Unsupported
from jaxkern._core.define import ceil_div, primitive
from jaxkern._core.primitive import bind
from jaxkern._engines.jaxpr import INDICES
from jaxkern._engines.rows import exchange, in_place, layout, plan, queries
from jaxkern._engines.rows.core import Core
from jaxkern._engines.rows.exchange import COLLECTIVES


def apply(function, operands) -> list:
    """The results of a RowFunction on arrays of its types."""
    used = function.used()
    if not used:
        return function(*operands)
    if len(used) < len(operands) and function.tangent is None:
        function, operands = function.select(used), [operands[k] for k in used]
    if function.has_vjp:
        return _with_vjp(function)(*operands)
    return bind(PRIMITIVES[function.name].whole, *operands, function=function)


def _with_vjp(function):
    """The function with the derivative rules of its parts, which need not be linear in cotangents, as one rule."""
    wrt = [k for k, a in enumerate(function.avals) if jnp.issubdtype(a.dtype, jnp.inexact)]

    @jax.custom_vjp
    def call(*operands):
        return bind(PRIMITIVES[function.name].whole, *operands, function=function)

    def backward(operands, cotangents):
        given = [cotangents[k] for k in function.inexact_results]
        found = dict(zip(wrt, apply(function.vjp(wrt), [*operands, *given])))
        return tuple(found.get(k) for k in range(len(operands)))

    call.defvjp(lambda *operands: (apply(function.forward(wrt), operands), operands), backward)
    return call


def _reference(*operands, function, runner="xla"):
    if function.variant is not None:
        return function.variant(runner)(*operands)
    try:
        function.program  # noqa: B018
    except Unsupported:  # a derivative that is no row function
        return function(*operands)
    return function.wide(*operands)


def _abstract(*operands, function):
    for x, own in zip(operands, function.avals, strict=True):
        if x.shape != own.shape or x.dtype != own.dtype:
            raise ValueError(f"{function.label}: operand {x.str_short()} for an argument {own.str_short()}")
    mesh = next((x.sharding.mesh for x in operands if not x.sharding.mesh.empty), None)
    typed = lambda a, **sharding: operands[0].update(shape=a.shape, dtype=a.dtype, weak_type=False, **sharding)
    if mesh is None:
        return list(map(typed, function.results))
    try:
        program = function.program
    except Unsupported:  # XLA computes the function, and its results are whole
        whole = lambda a: NamedSharding(mesh, PartitionSpec(*(None for _ in a.shape)))
        return [typed(a, sharding=whole(a)) for a in function.results]
    split = {}
    for x, v in zip(operands, program.operands):
        for d, axes in zip(v.dims, x.sharding.spec):
            if d is not None and axes:
                split.setdefault(d, axes)
    spec = lambda v: PartitionSpec(*(split.get(d) for d in v.dims))
    return [typed(a, sharding=NamedSharding(mesh, spec(v))) for a, v in zip(function.results, program.results)]


def _abstract_core(*operands, function):
    x = operands[0]
    whole = lambda shape: NamedSharding(x.sharding.mesh, PartitionSpec(*(None for _ in shape)))
    return [
        x.update(shape=shape, dtype=dtype, weak_type=False, sharding=whole(shape))
        for shape, dtype in plan.outputs(function)
    ]


def _batch(prim, operands, dims, *, function):
    # Where all arrays have the same rank, the batch stays where it is in the first of them, and nothing is moved.
    ranks = {len(a.shape) for a in (*function.avals, *function.results)}
    at = next(d for d in dims if d is not None) if len(ranks) == 1 else 0
    operands = [x if d in (None, at) else jnp.moveaxis(x, d, at) for x, d in zip(operands, dims)]
    size = next(x.shape[at] for x, d in zip(operands, dims) if d is not None)
    ys = bind(prim, *operands, function=function.batched([d is not None for d in dims], size, at))
    return ys, [at] * len(ys)


def _jvp(primals, tangents, *, function):
    ys = bind(PRIMITIVES[function.name].whole, *primals, function=function)
    dys = list(map(compat.zero_tangent, ys))
    active = tuple(k for k, t in enumerate(tangents) if type(t) is not ad.Zero)
    if active and function.inexact_results:
        if function.tangent is None:
            of, given = function.jvp(active), primals
        else:
            of, given = function.tangent(active), [*ys, *primals]
        found = apply(of, [*given, *(tangents[k].astype(a.dtype) for k, a in zip(active, of.avals[len(given) :]))])
        for k, dy in zip(function.inexact_results, found):
            dys[k] = dy
    return ys, dys


def _transpose(cts, *operands, function):
    linear = tuple(k for k, x in enumerate(operands) if ad.is_undefined_primal(x))
    result = [None] * len(operands)
    if all(type(ct) is ad.Zero for ct in cts):
        for k in linear:
            result[k] = ad.Zero(operands[k].aval)
        return result
    cts = [ad.zeros_like_aval(ct.aval) if type(ct) is ad.Zero else ct for ct in cts]
    given = [x for k, x in enumerate(operands) if k not in linear]
    found = apply(function.transpose(linear), [*given, *(cts[k] for k in function.inexact_results)])
    for k, y in zip(linear, found):
        result[k] = validate.split_like(y, operands[k].aval)
    return result


def _kept(used, equation):
    """The equation without the results that are not used; see `dce_rules` of JAX.

    Kernels do not write them, and XLA:CPU ends in a crash where it finds a reduction of pairs that nothing uses.
    """
    function, operands = equation.params["function"], equation.invars
    if not any(used):
        return [False] * len(operands), None
    explicit = any(not v.aval.sharding.mesh.empty for v in equation.outvars)
    if all(used) or explicit or function.tangent is not None:
        return [True] * len(operands), equation
    kept = [k for k, own in enumerate(used) if own]
    function = function.keep(kept)
    arguments = function.used() or range(len(operands))
    changed = {
        "invars": [operands[k] for k in arguments],
        "outvars": [equation.outvars[k] for k in kept],
        "params": equation.params | {"function": function.select(arguments)},
    }
    return [k in arguments for k in range(len(operands))], equation.replace(**changed)


# ---- several devices


def _partition(prim, ctx, operands, params):
    function = params["function"]
    try:
        program = function.program
    except Unsupported:
        return None
    names = {d: f"d{k}" for k, d in enumerate((program.row, *program.others))}
    used = _indexed(program)
    dims = [
        [names[d] if d is not None else f"one{k}x{j}" for j, d in enumerate(v.dims)]
        for k, v in enumerate((*program.operands, *program.results))
    ]
    summed = {names[d] for step in program.steps for d in program.over(step)}
    # Dimensions over which devices cannot exchange what they reduced.
    kept = {names[d] for step in program.steps if step.name not in COLLECTIVES for d in program.over(step)}

    def shard(over, *parts, function):
        return part(function, names, over, parts)

    exact = {names[d] for d in used} | summed
    gone = tuple(n for n in names.values() if not any(n in own for own in dims[len(operands) :]))
    return partition.lower(ctx, prim, operands, params, dims, shard, exact=exact, whole=kept, summed=gone)


def _indexed(program) -> set:
    """The dimensions along which indices count."""
    return {d for step in program.steps if step.name in INDICES for d in Core.index_of(step)}


def part(function, names, over, parts):
    """The part of one device. names: {Dim: its name}. over: {name: the mesh axes that split it}.

    Kernels compute it. Devices add up what they summed over rows, and exchange what they reduced of split rows; see exchange.py.
    """
    program, core = function.program, function.core
    axes = {d: over.get(n, ()) for d, n in names.items()}
    split = lambda dims: tuple(a for d in dims for a in axes[d])
    local = {
        "size": lambda d: ceil_div(d.size, lax.psum(1, axes[d])) if axes[d] else d.size,  # the last part may be shorter
        "start": lambda d: lax.axis_index(axes[d]) * (d.size // lax.psum(1, axes[d])) if axes[d] else None,
        "collective": lambda step, ys: (
            [COLLECTIVES[step.name](y, over) for y in ys] if (over := split(program.over(step))) else ys
        ),
    }
    begins = [d for d in (program.row, *program.others) if d in _indexed(program) and axes[d]]
    if axes[program.row]:
        return exchange.of_part(function, apply, parts, axes, local["size"], local["start"], begins)
    kernel = function.of_outputs([x.shape for x in parts], local["size"], begins)
    outputs = apply(kernel, [*parts, *(local["start"](d).astype(jnp.int32) for d in begins)])
    whole = lambda o: split(program.others) if o.kind in ("columns", "total") else ()
    outputs = [lax.psum(y, whole(o)) if whole(o) else y for o, y in zip(core.outputs, outputs)]
    return function.after_core(parts, outputs, local)


def _adapt(prim, *avals, function):
    """The kernel and what follows it, if something does and there is a kernel."""
    del prim
    try:
        if function.core.trivial:
            return None
    except Unsupported:
        return None
    outputs = [jax.core.ShapedArray(shape, dtype) for shape, dtype in plan.outputs(function)]
    if plan.plan(device.this_device(), avals, outputs, function=function) is None:
        return None
    core = PRIMITIVES[function.name].core
    return lambda *operands, function: function.after_core(operands, core.bind(*operands, function=function))


def _left(prim, ctx, operands, params) -> bool:
    """Whether a call that stands for operations of a plain program is left to XLA."""
    del prim, operands
    return params["function"].replaces and bool(switch.refusal(ctx, switch.current()))


def _overwritten(prim, operands, params):
    """{operand: result} that share memory."""
    del prim, operands
    function = params["function"]
    if not function.overwritten:
        return None
    outputs = [jax.core.ShapedArray(shape, dtype) for shape, dtype in plan.outputs(function)]
    found = plan.plan(device.this_device(), function.avals, outputs, function=function)
    return in_place.in_place(function, found.algorithm)


class Primitives(typing.NamedTuple):
    """whole: the row function. core: its kernel alone."""

    whole: Primitive
    core: Primitive


PRIMITIVES: dict[str, Primitives] = {}


def define(name: str, by_hand=None, makes_nan=True, **fixed) -> None:
    """Defines the primitives of the row functions with this name, whose algorithms `jaxkern.algorithms` then knows.

    by_hand: a module of hand-written kernels for some of them; see plan.BY_HAND and _core/algorithms.py. makes_nan: as for
    `define.primitive`. fixed: the fields of the Problem in queries.py that the operation determines.
    """
    core = primitive(
        f"jaxkern_{name}_core",
        _abstract_core,
        several=True,
        makes_nan=makes_nan,
        plan=plan.plan,
        aliases=_overwritten,
    )
    whole = primitive(
        f"jaxkern_{name}",
        _abstract,
        _batch,
        _reference,
        on_cpu=functools.partial(_reference, runner="cpu"),
        several=True,
        makes_nan=makes_nan,
        plan=functools.partial(plan.plan, alone=True),
        aliases=_overwritten,
        adapt=_adapt,
        partition=_partition,
        left=_left,
    )
    ad.primitive_jvps[whole] = _jvp
    ad.primitive_transposes[whole] = _transpose
    compat.drops_results(whole, _kept)
    if by_hand is None:
        if name == "row_kernel":
            algorithms.register(layout, name)
        else:
            algorithms.register(queries, name, **(queries.ORDINARY | fixed))
    else:
        plan.BY_HAND[name] = by_hand
        algorithms.register(by_hand, name, **by_hand.FIXED[name])
    PRIMITIVES[name] = Primitives(whole, core)


define("row_kernel")
