"""Selections, sorts and searches in plain JAX programs: equations of a jaxpr that JAX lowers become calls of kernels.

    lax.top_k, lax.approx_max_k, lax.approx_min_k    the kernel of `jaxkern.top_k`
    lax.sort of one key, with other operands         the kernels of `jaxkern.sort`; of argsort's indices no operand is read
    ... where few elements are used                  a selection: `jnp.sort(x)[..., :k]`, `jnp.argsort(-x)[:k]`, `jnp.median(x)`
    jnp.searchsorted                                 the kernel of `jaxkern.searchsorted`
    scatter-adds of one number, as in jnp.bincount   the kernel of `jaxkern.bincount`

JAX lowers each jaxpr of a program after derivatives and vmap. The pass looks at the equations of each, and for the uses of a sort
also into the small functions that make it, such as `jnp.sort` and `jnp.median` themselves. What replaces an equation is a call
of a function in jnp, which is lowered in its place (calls.py).
"""

import functools
import math

from jaxkern._accelerate import counts, parts, searches
from jaxkern._accelerate import selection_gate as gate
from jaxkern._accelerate.calls import FLIPPED, INDICES, VALUES, Result, Selected, Sorted, call_p
from jaxkern._accelerate.equations import bytes_of, is_variable
from jaxkern._core import algorithms, compat, compat_lowering, compat_rewriting, decisions, environment, switch
from jaxkern._core.jaxprs import CALLS

TOP_K, SORT, SEARCH, COUNT = "top_k", "sort", "searchsorted", "bincount"
_PRIMITIVES = frozenset(("top_k", "approx_top_k", "sort", *counts.NAMES))


def rewrite(module, jaxpr):
    """The jaxpr that JAX lowers in place of `jaxpr`."""
    candidates, sorts = _candidates(module, jaxpr)
    if not candidates and not sorts:
        return jaxpr
    settings = switch.current()
    if not switch.wanted(TOP_K, SORT, SEARCH, COUNT) or algorithms.xla_forced() or environment.xla_only():
        return jaxpr
    if not (
        settings.force
        or decisions.listened()
        or "cuda" in compat_lowering.platforms(compat_lowering.ModuleOnly(module))
    ):
        return jaxpr
    force, decide = settings.force, functools.partial(_decided, module, settings)
    program = parts.Program(jaxpr) if sorts and switch.wanted(SORT) else None
    for e in program.equations if program else ():
        if _is_sort(e) and (part := program.part(e)) is not None:
            function, operands = _sorted(e, program.made, list(filter(program.is_used, e.outvars)))
            if decide(SORT, e, *gate.part(*_rows(e), part.count, force), only_taken=True):
                program.replace(e, part, function._replace(count=part.count, last=part.last), operands)
    if program and program.replaced:
        jaxpr = jaxpr.replace(eqns=program.equations_now(), outvars=program.results)
        candidates, _ = _candidates(module, jaxpr)
    around = _Around(jaxpr)
    news = {id(e): _replaced(module, decide, force, e, around) for e in candidates}
    if all(news[id(e)] is e for e in candidates):
        return jaxpr
    kept = [e for e in jaxpr.eqns if id(e) not in around.removed]
    return jaxpr.replace(eqns=[news.get(id(e), e) for e in kept])


def _candidates(module, jaxpr) -> tuple:
    """(the equations that may be taken, whether something is sorted). It is asked of every jaxpr, so it calls few functions."""
    called = None  # {id of a jaxpr: (the jaxpr, whether it sorts, whether it searches)}
    found, sorts = [], False
    for e in jaxpr.eqns:
        name = e.primitive.name
        if name in _PRIMITIVES:
            if name not in counts.NAMES or not e.params["dimension_numbers"].update_window_dims:
                found.append(e)
                sorts |= name == "sort"
        elif name in CALLS and "jaxpr" in e.params:
            if called is None:
                called = compat_lowering.of_module(module).setdefault("selections", {})
            inner = e.params["jaxpr"]
            if id(inner) not in called:
                called[id(inner)] = inner, parts.inner(e) is not None, searches.is_named(e)
            _, inner_sorts, is_named = called[id(inner)]
            sorts |= inner_sorts
            if is_named:
                found.append(e)
    return found, sorts


class _Around:
    """What is around an equation of a jaxpr. removed: ids of equations whose results another one has now."""

    def __init__(self, jaxpr):
        self.jaxpr, self.removed = jaxpr, set()
        self.made = {v: e for e in jaxpr.eqns for v in e.outvars}

    @functools.cached_property
    def readers(self) -> dict:
        found: dict = {}
        for e in self.jaxpr.eqns:
            for v in filter(is_variable, e.invars):
                found.setdefault(v, []).append(e)
        return found

    def before_reversal(self, x, axis):
        """What an operand is the reversal of along the axis, or None."""
        e = self.made.get(x) if is_variable(x) else None
        return e.invars[0] if _reverses(e, axis) else None

    def reversal(self, v, axis):
        """The equation that reverses v along the axis, if nothing else reads it; or None."""
        returned = any(v is r for r in self.jaxpr.outvars)
        readers = () if returned else self.readers.get(v, ())
        return readers[0] if len(readers) == 1 and _reverses(readers[0], axis) else None


def _reverses(e, axis) -> bool:
    return e is not None and e.primitive.name == "rev" and tuple(e.params["dimensions"]) == (axis,)


def _replaced(module, decide, force, e, around):
    """The equation, or the one in its place."""
    name, call = e.primitive.name, None
    for v in e.invars:
        for n in v.aval.shape:
            if not isinstance(n, int):
                return e  # symbolic
    if name == "top_k" and switch.wanted(TOP_K):
        axis = e.params.get("axis", -1) % e.invars[0].aval.ndim
        if decide(TOP_K, e, *gate.top_k(*_rows(e, axis), e.params["k"], force)):
            call = Selected(e.params["k"], axis), e.invars, e.outvars
    elif name == "approx_top_k" and switch.wanted(TOP_K) and (exact := _exact(e)) is not None:
        answer = gate.top_k if e.params["is_max_k"] else gate.part
        if decide(TOP_K, e, *answer(*_rows(e, exact.axis), e.params["k"], force)):
            call = exact, e.invars, e.outvars
    elif name == "sort" and switch.wanted(SORT):
        used = [v for v in e.outvars if not compat_rewriting.is_dropped(v)]
        if not used:
            return e
        function, operands = _sorted(e, around.made, used)
        carried = function.carries([v.aval.dtype for v in operands])
        moves = carried is not None and operands[carried].aval.dtype.itemsize == 4  # also in tiles
        answer = gate.sort(*_rows(e), len(e.invars), 0 if moves else len(operands) - 1, force=force)
        if decide(SORT, e, *(answer if _is_sort(e) else (False, f"{e.params['num_keys']} keys"))):
            call = _descending(function, operands, used, around) or (function, operands, used)
    elif name in CALLS and switch.wanted(SEARCH) and (found := searches.of(e)) is not None:
        (search, by_steps), (array, queries) = found, (v.aval for v in e.invars)
        if decide(SEARCH, e, *gate.search(array.dtype, array.size, queries.size, by_steps, force)):
            call = search, e.invars, e.outvars
    elif name in counts.NAMES and switch.wanted(COUNT) and (counted := counts.of(e, around.made)) is not None:
        operand, indices = (v.aval for v in e.invars[:2])
        several = indices.ndim > 2 and compat.partitioned_devices(compat_lowering.ModuleOnly(module)) > 1
        answer = gate.count(indices.dtype, indices.size, operand.size, force)
        if decide(COUNT, e, *((False, "several dimensions of indices on several devices") if several else answer)):
            call = counted, e.invars[:2], e.outvars
    if call is None:
        return e
    function, operands, results = call
    return compat_rewriting.new_equation(e, call_p, operands, results, {"function": function})


def _is_sort(e) -> bool:
    """Whether an equation sorts by one key."""
    return e.primitive.name == "sort" and e.params["num_keys"] == 1


def _rows(e, axis=None) -> tuple:
    """(dtype, rows, columns) of the first operand."""
    x = e.invars[0].aval
    axis = e.params["dimension"] if axis is None else axis
    return x.dtype, math.prod(n for d, n in enumerate(x.shape) if d != axis), x.shape[axis]


def _exact(e):
    """The selection for lax.approx_max_k or approx_min_k, which are exact on GPUs; None where they return more than k."""
    axis = e.params["reduction_dimension"] % e.invars[0].aval.ndim
    if e.outvars[0].aval.shape[axis] != e.params["k"]:
        return None
    if e.params["is_max_k"]:
        return Selected(e.params["k"], axis)
    return Sorted(axis, (Result(VALUES), Result(INDICES, dtype=e.outvars[1].aval.dtype)), count=e.params["k"])


def _sorted(e, made, results) -> tuple:
    """(the function for a sort, the operands that it takes). made: {variable: the equation that makes it}."""
    axis, operands, kinds = e.params["dimension"], [e.invars[0]], []
    for k, (x, v) in enumerate(zip(e.invars, e.outvars)):
        if not any(v is r for r in results):
            continue
        kind = _of_index(x, axis, made) if k else VALUES
        operands += [x] if k and kind == VALUES else []
        kinds.append(
            Result(kind, len(operands) - 1 if k else 0) if kind == VALUES else Result(kind, dtype=x.aval.dtype)
        )
    return Sorted(axis, tuple(kinds)), operands


def _descending(function, operands, results, around):
    """(function, operands, results) of a sort of reversed operands whose results are reversed: it is a sort in descending order.

    None for others. The reversals are not computed any more.
    """
    operands = [around.before_reversal(x, function.axis) for x in operands]
    reversals = [around.reversal(v, function.axis) for v in results]
    if not results or None in (*operands, *reversals):
        return None
    around.removed.update(map(id, reversals))
    other = {VALUES: VALUES, INDICES: FLIPPED, FLIPPED: INDICES}
    kinds = tuple(r._replace(kind=other[r.kind]) for r in function.results)
    return function._replace(results=kinds, descending=True), operands, [e.outvars[0] for e in reversals]


def _of_index(x, axis, made) -> int:
    """Whether an operand has the index of each element along the axis, or the index from the end."""
    flipped = False
    while is_variable(x) and (e := made.get(x)) is not None:
        name = e.primitive.name
        if name == "rev":
            flipped ^= axis in e.params["dimensions"]
        elif name == "broadcast_in_dim" and is_variable(e.invars[0]):
            dims, (x,) = e.params["broadcast_dimensions"], e.invars
            if axis not in dims or x.aval.shape[dims.index(axis)] != e.outvars[0].aval.shape[axis]:
                return VALUES
            axis = dims.index(axis)
            continue
        elif name == "iota":
            return VALUES if e.params["dimension"] != axis else FLIPPED if flipped else INDICES
        else:
            return VALUES
        (x,) = e.invars
    return VALUES


def _decided(module, settings, operation, e, taken, why, only_taken=False) -> bool:
    """Whether an equation is taken; records it. only_taken: nothing is recorded if it is not."""
    avals = [v.aval for v in e.invars]
    ctx = compat_lowering.ModuleOnly(module, tuple(avals), tuple(v.aval for v in e.outvars))
    if not compat_rewriting.runs_anywhere(e):
        taken, why = False, "it runs elsewhere"
    elif not settings.force and "cuda" not in (platforms := compat_lowering.platforms(ctx)):
        taken, why = False, switch.no_kernels(platforms[0])
    elif taken and (refusal := switch.refusal(ctx, settings)):
        taken, why = False, refusal
    if only_taken and not taken:
        return False
    size = sum(map(bytes_of, (*filter(is_variable, e.invars), *e.outvars))) if taken else 0
    return decisions.record(
        operation, taken, why, avals, functools.partial(compat.frames, e.source_info.traceback), size
    )
