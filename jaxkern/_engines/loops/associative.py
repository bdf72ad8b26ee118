"""Scans by an associative operation, and their primitive, `jaxkern_associative_scan`.

    ys = associative_scan(combine, elems, axis=1)

A step has a state: a few numbers, `element(xs)`. The state of a prefix is `combine(state of its front, state of its back)`.
What is stored is `finish(state, xs)`. So the arrays in memory may be smaller than states: a sum of squares, or a logsumexp
whose state is a maximum and a sum.

Kernels hold states in computing types: 16-bit states are float32 until they are stored. `combine` is applied in an order
that depends on shapes alone.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from jaxkern._core import algorithms, compat, decisions, partition, stablehlo, switch, validate
from jaxkern._core.define import primitive
from jaxkern._core.primitive import bind
from jaxkern._engines.loops import plan_associative
from jaxkern._engines.loops.associative_spec import as_sums, functions_of, of_states, spec_of, sums_of, with_results
from jaxkern._engines.loops.lowering import mark


def associative_scan(
    combine,
    elems,
    *,
    axis,
    reverse=False,
    exclusive=None,
    element=None,
    finish=None,
    label="",
    derivative=None,
    replaced=False,
    approximate=False,
) -> list:
    """The states of all prefixes along an axis.

    Args:
        combine: (members of an earlier state, members of a later state) -> members of the combined state, each a list;
            associative, of scalars, or elementwise on arrays. Results have the dtypes of their operands.
        elems: arrays of one shape.
        axis: an int. reverse: prefixes begin at the last element.
        exclusive: a list of numbers, the state before the first step: the result of a step is then the state before it.
        element: (list of elements of elems) -> list of the members of the step's state; by default the elements themselves.
        finish: (list of the members of a state, list of elements of elems) -> list of what is stored; by default the state.
        label: the public function, for errors.
        derivative: the arguments combine, exclusive, element and finish, as a dict, of a scan with the same results that has
            better derivatives. Its functions close over no arrays.
        replaced: see `Associative` (associative_spec.py).
        approximate: whether kernels compute exp2 and log of float32 with relative errors of 2^-22; the logarithm of a number
            between 0.5 and 2 has an absolute error of 2^-22.

    Returns: a list of arrays, of the shape of elems.

    Raises:
        TypeError: combine returns other dtypes than it takes, or a function has no counterpart in kernels.
        ValueError: combine returns another number of results.
    """
    xs, name = [jnp.asarray(x) for x in elems], label.removeprefix("jaxkern.") or "associative_scan"
    axis, dtypes = axis % xs[0].ndim, [x.dtype for x in xs]
    made, captured, first = functions_of(name, dtypes, combine, exclusive, element, finish)
    if captured:  # arrays of one number, which these Functions take as arguments of their own
        if derivative is None and made[1].captured == len(captured):
            options = {
                "axis": axis,
                "reverse": reverse,
                "label": label,
                "replaced": replaced,
                "approximate": approximate,
            }
            return associative_scan(**_of_operands(made, captured, xs, exclusive), **options)
        return _with_captured(made, captured, xs, first, axis, reverse)
    spec = dataclasses.replace(spec_of(made, first, approximate), replaced=replaced)
    if derivative is not None:
        other, _, first = functions_of(name, dtypes, **derivative)
        spec = dataclasses.replace(spec, derivative=spec_of(other, first))
    return bind(associative_p, *xs, spec=spec, axis=axis, reverse=bool(reverse))


def _of_operands(functions, captured, xs, exclusive) -> dict:
    """Arguments of the same scan, whose operands and states have the numbers that `combine` closes over, too."""
    element, combine, finish = functions
    n, m = len(element.out_dtypes), len(xs)
    return {
        "combine": lambda a, b: [*combine.scalars(*a[:n], *b[:n], *b[n:]), *b[n:]],
        "elems": [*xs, *(jnp.broadcast_to(c, xs[0].shape) for c in captured)],
        "exclusive": None if exclusive is None else [*exclusive, *[0] * len(captured)],
        "element": lambda x: [*element.scalars(*x[:m]), *x[m:]],
        "finish": lambda s, x: finish.scalars(*s[:n], *x[:m]),
    }


def _with_captured(functions, captured, xs, first, axis, reverse):
    """The scan in jnp, with functions that close over arrays."""
    parts, rest = [], captured
    for f in functions:
        own, rest = rest[: f.captured], rest[f.captured :]
        parts.append(functools.partial(lambda f, own, *args: f.unrounded(*args, *own), f, own))
    element, combine, finish = parts
    ys = _scanned(element, combine, finish, functions[0].out_dtypes, first, xs, axis, reverse)
    return [y.astype(d) for y, d in zip(ys, functions[2].out_dtypes)]


def _scanned(element, combine, finish, dtypes, first, xs, axis, reverse):
    states = element(*xs)
    n = xs[0].shape[axis]
    join = lambda a, b: combine(*a, *b)
    if not isinstance(n, int):
        states = _in_turn(join, states, axis, reverse)
    elif n:
        states = lax.associative_scan(join, states, reverse=reverse, axis=axis)
    if first is not None:
        states = [_moved(s, c, axis, reverse) for s, c in zip(states, first)]
    return finish(*states, *xs)


def _in_turn(join, states, axis, reverse):
    """The states of a symbolic number of steps, which lax.associative_scan does not take."""
    states = [jnp.moveaxis(s, axis, 0) for s in states]

    def step(carry, own):
        begun, before = carry
        state = [jnp.where(begun, j, s) for j, s in zip(join(before, own), own)]
        return (jnp.bool_(True), state), state

    found = lax.scan(step, (jnp.bool_(False), [s[0] for s in states]), states, reverse=reverse)[1]
    return [jnp.moveaxis(s, 0, axis) for s in found]


def _moved(x, first, axis, reverse):
    """x one step later, with `first` before it: a number, or an array of one step."""
    n = x.shape[axis]
    begin = jnp.full_like(lax.slice_in_dim(x, 0, min(1, n), axis=axis), first)
    rest = lax.slice_in_dim(x, 1, n, axis=axis) if reverse else lax.slice_in_dim(x, 0, max(n - 1, 0), axis=axis)
    return jnp.concatenate([rest, begin] if reverse else [begin, rest], axis) if n else x


# ---- the primitives


@switch.own_code  # under jaxkern.accelerate lax.associative_scan would come back here
def _reference(*xs, spec, axis, reverse):
    ys = _scanned(
        spec.element.unrounded,
        spec.combine.unrounded,
        spec.finish.unrounded,
        spec.states,
        spec.first,
        xs,
        axis,
        reverse,
    )
    return [y.astype(d) for y, d in zip(ys, spec.finish.out_dtypes)]


def _abstract(*xs, spec, axis, reverse):
    del axis, reverse
    for x in xs:
        if x.shape != xs[0].shape:
            raise ValueError(f"{spec.combine.label}: arrays of shapes {xs[0].shape} and {x.shape}")
    return [xs[0].update(dtype=d, weak_type=False) for d in spec.finish.out_dtypes]


def _kept(used, equation):
    """The equation without the results that are not used; see `dce_rules` of JAX."""
    if not any(used):
        return [False] * len(equation.invars), None
    if all(used):
        return [True] * len(equation.invars), equation
    kept = tuple(k for k, own in enumerate(used) if own)
    params = equation.params | {"spec": with_results(equation.params["spec"], kept)}
    return [True] * len(equation.invars), equation.replace(outvars=[equation.outvars[k] for k in kept], params=params)


def _batch(prim, xs, dims, *, spec, axis, reverse):
    size = next(x.shape[d] for x, d in zip(xs, dims) if d is not None)
    xs = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0) if d else x
        for x, d in zip(xs, dims)
    ]
    ys = bind(prim, *xs, spec=spec, axis=axis + 1, reverse=reverse)
    return ys, [0] * len(ys)


def _left(prim, ctx, operands, params) -> bool:
    """Whether a scan that `jaxkern.accelerate` replaced is left to XLA; records the decision."""
    if not params["spec"].replaced:
        return False
    why, x = switch.refusal(ctx, switch.current()), ctx.avals_in[0]
    steps = x.shape[params["axis"]]
    taken = f"{steps} steps of {x.size // max(steps, 1)} lanes in one kernel"
    size = sum(map(stablehlo.size, (*ctx.avals_in, *ctx.avals_out)))
    decisions.record_call(ctx, "associative_scan", why, taken, ctx.avals_in, size)
    return bool(why)


def _instead(ctx, operands, params, lower):
    """The scan with operands that repeat an array for each step as they were before, or None."""
    shape, axis = ctx.avals_in[0].shape, params["axis"]
    if compat.may_partition_itself(ctx) or math.prod(shape[axis + 1 :]) == 1:
        return None
    found = [stablehlo.repeated(operand) for operand in operands]
    fits = lambda dims: dims is not None and axis not in dims and list(dims) == sorted(dims)
    found = [(y, dims) if fits(dims) else (None, None) for y, dims in found]
    dims = tuple(dims for _, dims in found)
    if dims.count(None) in (0, len(dims)):
        return None
    own = [operand if y is None else y for operand, (y, _) in zip(operands, found)]
    avals = [a if d is None else a.update(shape=tuple(a.shape[k] for k in d)) for a, d in zip(ctx.avals_in, dims)]
    return lower(repeated_p, ctx.replace(avals_in=avals), own, params | {"dims": dims})


def _of_repeated(*xs, spec, axis, reverse, dims):
    """The scan in jnp, of operands as `repeated_p` has them."""
    shape = next(x.shape for x, d in zip(xs, dims) if d is None)
    whole = [x if d is None else lax.broadcast_in_dim(x, shape, d) for x, d in zip(xs, dims)]
    return _reference(*whole, spec=spec, axis=axis, reverse=reverse)


def _abstract_of_repeated(*xs, spec, axis, reverse, dims):
    return _abstract(*(x for x, d in zip(xs, dims) if d is None), spec=spec, axis=axis, reverse=reverse)


def _partition(prim, ctx, operands, params):
    """Devices compute the parts of the other dimensions. If the steps are split, they exchange the states of their parts."""
    names = [f"d{k}" for k in range(len(ctx.avals_in[0].shape))]
    dims = [names] * (len(ctx.avals_in) + len(ctx.avals_out))
    steps = names[params["axis"]]

    def shard(over, *parts, **params):
        if over[steps]:
            return _behind_others(*parts, over=over[steps], **params)
        return bind(prim, *parts, **params)

    return partition.lower(ctx, prim, operands, params, dims, shard, exact={steps})


@switch.own_code
def _behind_others(*xs, over, spec, axis, reverse):
    """The scan of the steps of one device, behind the steps of the devices before it. over: the axes of the mesh that split them."""
    states = bind(associative_p, *xs, spec=of_states(spec), axis=axis, reverse=reverse)
    last = [lax.slice_in_dim(s, *((0, 1) if reverse else (s.shape[axis] - 1, None)), axis=axis) for s in states]
    at, end = lax.axis_index(over), lax.axis_size(over) - 1
    is_first, neighbour = (at == end, jnp.minimum(at + 1, end)) if reverse else (at == 0, jnp.maximum(at - 1, 0))
    join = lambda a, b: spec.combine.unrounded(*a, *b)
    wholes = lax.associative_scan(join, _gathered(last, over), reverse=reverse)
    before = [lax.dynamic_index_in_dim(s, neighbour, keepdims=False) for s in wholes]
    joined = join([jnp.broadcast_to(b, s.shape) for b, s in zip(before, states)], states)
    states = [jnp.where(is_first, s, j) for s, j in zip(states, joined)]
    if spec.first is not None:
        edges = [jnp.where(is_first, jnp.full_like(b, c), b) for b, c in zip(before, spec.first)]
        states = [_moved(s, edge, axis, reverse) for s, edge in zip(states, edges)]
    return [y.astype(d) for y, d in zip(spec.finish.unrounded(*states, *xs), spec.finish.out_dtypes)]


def _gathered(states, over) -> list:
    """The members of the states of all devices, with a first dimension for the devices. One message for each dtype."""
    found = {}
    for dtype in dict.fromkeys(s.dtype for s in states):
        own = [k for k, s in enumerate(states) if s.dtype == dtype]
        found |= dict(zip(own, partition.gathered([states[k] for k in own], over)))
    return [found[k] for k in range(len(states))]


# ---- derivatives


def _jvp(primals, tangents, *, spec, axis, reverse):
    ys = bind(associative_p, *primals, spec=spec, axis=axis, reverse=reverse)
    dys = list(map(compat.zero_tangent, ys))
    active = tuple(k for k, t in enumerate(tangents) if type(t) is not ad.Zero)
    if not active or not spec.finish.inexact_results or not primals[0].shape[axis]:
        return ys, dys
    spec = spec.derivative or spec
    sums = as_sums(spec)
    if sums is not None:
        given = [ad.instantiate_zeros(t) for t in tangents]
        return ys, bind(associative_p, *given, spec=sums, axis=axis, reverse=reverse)
    # JAX does not cut a step from a dimension that an explicit mesh splits.
    given = [[validate.whole(x, axis) for x in xs] for xs in (primals, [tangents[k] for k in active])]
    found = _tangents(*given, active, spec, axis, reverse)
    for k, dy in zip(spec.finish.inexact_results, found):
        dys[k] = validate.split_like(dy, jax.typeof(ys[k]))
    return ys, dys


def _tangents(xs, dxs, active, spec, axis, reverse) -> list:
    """The tangents of the results, from a loop whose body is affine in the tangent of the state.

    With states s[t] = combine(s[t - 1], e[t]), their tangents are ds[t] = d combine(s[t - 1], e[t]) (ds[t - 1], de[t]), and
    de[0] in the first step.
    """
    n, real = len(spec.states), spec.element.inexact_results
    states = bind(associative_p, *xs, spec=of_states(spec), axis=axis, reverse=reverse)
    length = xs[0].shape[axis]
    ahead = lambda arrays: [jnp.moveaxis(x, axis, 0) for x in arrays]
    # The first step has no state before it, and its own state stands there: derivatives at other values may be infinite.
    # They are put together where they lie, so that a kernel reads and writes all arrays of steps without transposes.
    part = lambda s, begin, end: lax.slice_in_dim(s, begin, end, axis=axis)
    shifted = lambda s: (
        (part(s, 1, length), part(s, length - 1, length)) if reverse else (part(s, 0, 1), part(s, 0, length - 1))
    )
    before = ahead([jnp.concatenate(shifted(s), axis) for s in states])
    steps = jnp.arange(length)
    is_first = steps == (length - 1 if reverse else 0)
    of_element, of_combine = spec.element.jvp(active), spec.combine.jvp((*real, *(n + k for k in real)))
    zeros = [jnp.zeros_like(before[k][0], dtype=spec.states[k]) for k in real]

    @functools.partial(jax.checkpoint, prevent_cse=False)  # the gradient reads what the body reads, and nothing else
    def step(ds, given):
        first, before, xs, dxs = given
        e, de = spec.element.unrounded(*xs), of_element.unrounded(*xs, *dxs)
        joined = of_combine.unrounded(*before, *e, *ds, *de)
        return [jnp.where(first, a, b) for a, b in zip(de, joined)]

    def body(ds, given):
        ds = mark(step(ds, given))
        return ds, ds

    def loop(*dxs):
        return lax.scan(body, mark(zeros), (is_first, before, ahead(xs), ahead(dxs)), reverse=reverse)[1]

    ds = compat.linear_loop(loop, dxs)
    ds = [jnp.moveaxis(d, 0, axis) for d in ds]
    if spec.first is not None:
        ds = [_moved(d, 0, axis, reverse) for d in ds]
        states = [_moved(s, c, axis, reverse) for s, c in zip(states, spec.first)]
    of_finish = spec.finish.jvp((*real, *(n + k for k in active)))
    return of_finish(*states, *xs, *ds, *dxs)


def _transpose(cts, *xs, spec, axis, reverse):
    """The transpose of cumulative sums, the only scans that are linear."""
    if all(type(ct) is ad.Zero for ct in cts):
        return [ad.Zero(x.aval) for x in xs]
    given = [ad.instantiate_zeros(ct) for ct in cts]
    sums = sums_of(spec.finish.out_dtypes, spec.states, spec.element.in_dtypes, spec.first)
    found = bind(associative_p, *given, spec=sums, axis=axis, reverse=not reverse)
    return [y if ad.is_undefined_primal(x) else None for x, y in zip(xs, found)]


associative_p = primitive(
    "jaxkern_associative_scan",
    _abstract,
    _batch,
    _reference,
    several=True,
    plan=plan_associative.plan,
    partition=_partition,
    left=_left,
    instead=_instead,
    cached=False,
)
# The same, of operands that are repeated: dims has the dimensions of such an operand among those of the others, and else None.
repeated_p = primitive(
    "jaxkern_associative_scan_of_repeated",
    _abstract_of_repeated,
    None,
    _of_repeated,
    several=True,
    plan=plan_associative.plan,
    cached=False,
)
compat.drops_results(associative_p, _kept)
algorithms.register(plan_associative, "associative_scan")
ad.primitive_jvps[associative_p] = _jvp
ad.primitive_transposes[associative_p] = _transpose
