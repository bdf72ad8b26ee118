"""Hand-written kernels of softmax, log_softmax and their gradients, where they are faster than those that the engine generates.

They are one algorithm of the row functions of these operations, `by_hand`: the kernels in plan.py and, with anything fused, those in
fused_plan.py. A caller who forces `by_hand` for other plain rows gets the fused kernels, with nothing fused.
"""

import dataclasses

from jaxkern._core import algorithms, launch
from jaxkern._core.define import FLOAT_BYTES, broadcast_view
from jaxkern._engines.rows import layout, queries
from jaxkern._engines.rows.plan import GENERATED
from jaxkern._ops.softmax import fused_plan, plan, tuning

BY_HAND = "by_hand"
ALGORITHMS = (*queries.ALGORITHMS, BY_HAND)
DTYPES, Problem = tuple(FLOAT_BYTES), queries.Problem
# Words of exponentials that live from one stage to the next, of the operation and of its gradient.
FIXED = {name: queries.ORDINARY | {"kept": kept} for name, kept in (("softmax", (1, 0)), ("log_softmax", (1, 1)))}

EXTRAS = ("bias", "scale", "mask", "key0", "key1")


def fits(algorithm, problem, device=None) -> bool:
    if algorithm != BY_HAND:
        return queries.fits(algorithm, problem, device)
    if isinstance(problem, layout.Problem):  # of the engine, which asks for what it generates itself
        return False
    return _kernel(problem, device) is not None or (problem.inner == 1 and not _from_logarithm(_plain(problem)))


def choose(problem, device=None) -> str:
    return BY_HAND if _kernel(problem, device) is not None else queries.choose(problem, device)


def _kernel(problem, device) -> str | None:
    """The kernel of plan.py that is faster than the generated one."""
    if isinstance(problem, layout.Problem) or device is None:
        return None
    return plan.choose(_plain(problem), device)


def _plain(problem) -> plan.Problem:
    return plan.Problem(*problem[:4], problem.kept == FIXED["log_softmax"]["kept"], problem.backward)


def _from_logarithm(p) -> bool:
    """Whether a gradient starts from the result of log_softmax, as no fused kernel does."""
    return p.log and p.backward and p.itemsize <= 2


def by_hand(device, operands, results, function):
    """The plan of a hand-written kernel for a row function of these operations, or GENERATED."""
    if function.roles is None:
        return GENERATED
    facts, names, outputs = dict(function.roles.facts), function.roles.operands, function.output_roles()
    backward = "d y" in names
    main = [k for k in ("y", "x") if k in names][:1] + ["d y"] * backward
    extras = [k for k in names if k not in (*main, "x", "y")]
    known = (
        outputs == (("d x",) if backward else ("y",)) and set(extras) <= set(EXTRAS) and ("wrt" in facts) == backward
    )
    if not known or len(names) != len(main) + len(extras):
        return GENERATED
    given = _placed(dict(zip(names, operands)), dict(zip(names, function.program.operands)), main[0])
    x, out = operands[names.index(main[0])], results[0]
    same = all(given[k] is not None and given[k].shape == x.shape for k in main) and out.shape == x.shape
    if not same or x.dtype.name not in DTYPES or None in given.values():
        return GENERATED
    dims = function.program.operands[names.index(main[0])].dims
    axis = dims.index(function.program.row)
    forced = algorithms.forced(function.name) if function.algorithm == "auto" else function.algorithm
    if forced not in ("auto", BY_HAND):
        return GENERATED
    ordered = [given[k] for k in (*main, *extras)]
    # Where a mask makes the result 0, the cotangent may be NaN, which the kernels of plain gradients do not exclude.
    plain = not facts["names"] and not facts["causal"] and not facts["threshold"]
    plain = plain and out.dtype == x.dtype == given[main[-1]].dtype
    p = plan.problem_of(x, axis, log=facts["log"], backward=backward)
    kernel = plan.choose(p, device) if plain else None
    if kernel is not None:
        found = plan.plain(kernel, p, device)
    elif plain and forced == "auto":
        return GENERATED
    else:
        from_result = main[0] == "y" and backward
        readable = all(broadcast_view(x.shape, given[k].shape, axis) for k in extras)
        # Under `vmap` each example numbers its own rows and may have its own key.
        own = facts["threshold"] and (x.ndim != facts["rank"] or given["key0"].size > 1)
        # The dimension before the row may be a batch, and not the queries.
        apart = facts["causal"] and dims[axis - 1] is not None and {dims[axis - 1]: 1} not in function.core.indices
        prefers = forced == BY_HAND or _prefers_fused(x, axis, facts, extras, backward, from_result)
        last = axis == x.ndim - 1 and fused_plan.reads(x.shape, axis)
        narrow = given["d y"].dtype if backward else out.dtype
        taken = narrow == x.dtype or not backward or from_result  # kernels that start from x take no narrower cotangent
        taken = taken and not _from_logarithm(p)
        if own or apart or not readable or not last or not prefers or not taken:
            return GENERATED
        found = fused_plan.fused(
            device,
            ordered,
            axis=axis,
            log=facts["log"],
            extras=extras,
            causal=facts["causal"],
            threshold=facts["threshold"],
            dtype=narrow.name,
            backward=backward,
            from_output=from_result,
        )
    return GENERATED if found is None else _renumbered(found, [names.index(k) for k in (*main, *extras)])


def _placed(avals, values, main):
    """The arrays with the dimensions of the array `main`, 1 where they have none; None where these have another order.

    `vmap` leaves operands without the batch, which may be any dimension of the others.
    """
    dims = values[main].dims

    def placed(aval, own):
        own = [d for d in own if d is not None]
        at = [dims.index(d) if d in dims else -1 for d in own]
        if -1 in at or at != sorted(set(at)):
            return None
        return aval.update(shape=tuple(d.size if d in own else 1 for d in dims))

    return {k: placed(a, values[k].dims) for k, a in avals.items()}


def _prefers_fused(x, axis, facts, extras, backward, from_result) -> bool:
    """Measured on an H100, device microseconds, generated and by hand, bfloat16 32 x 16 x 512 x 512 and 8 x 16 x 2048 x 2048; see also
    FUSED_WIDTH.

    Dropout: the gradient 265 and 263, 1224 and 1042; with scale, mask, bias and causal limit 286 and 229, 1328 and 846, the
    gradient 375 and 319, 1879 and 1153. A mask is 1.00 to 1.10 times as fast generated, short and odd rows up to twice.

    With a scale, the hand-written kernels round the product before the maximum is subtracted. In generated ones the compiler joins
    the two, so that the exponent of the largest element is no longer 0, and infinite for a scale of 1e30.
    """
    if "scale" in extras and not from_result:
        return True
    if x.dtype.itemsize == 8:
        return False
    if facts["threshold"]:
        return not from_result
    wide = x.shape[axis] >= tuning.FUSED_WIDTH and x.shape[axis] * x.dtype.itemsize % 16 == 0
    if backward:
        return wide and facts["causal"] and from_result and not facts["log"] and set(extras) <= {"scale"}
    return wide and (facts["causal"] or "bias" in extras)


def _renumbered(found, order):
    """The plan with other numbers of operands: operand k becomes order[k]."""

    def of(arg):
        if isinstance(arg, launch.Struct):
            return arg._replace(members=tuple(map(of, arg.members)))
        if isinstance(arg, launch.Buffer) and arg.kind == "operand":
            return arg._replace(index=order[arg.index])
        return arg

    steps = lambda launches: tuple(dataclasses.replace(step, args=[*map(of, step.args)]) for step in launches)
    unaligned = None if found.unaligned is None else steps(found.unaligned)
    return launch.Plan(found.algorithm, steps(found.launches), found.scratch, unaligned)
