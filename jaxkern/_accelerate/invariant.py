"""Large products in the body of a scan that are the same in every step: they are computed once, before the loop.

XLA computes them in each step, since its own pass leaves what is larger than its operands in the loop. The memory is the same: one
array is there during the loop, which before each step made again.

A product is moved if the body only reduces it, after elementwise arithmetic: XLA stores it in every step and reads it, and then
only reads it. In such a body, reductions that are the same in every step are moved as well. Smaller products stay for kernels of
loops.
"""

import functools
import math

import numpy as np

from jaxkern._accelerate import inlining, loops, memory, rows
from jaxkern._accelerate.equations import CHEAP, REDUCING, bytes_of, is_variable, size_of, variables
from jaxkern._accelerate.functions import MARKS
from jaxkern._core import (
    algorithms,
    compat,
    compat_lowering,
    compat_rewriting,
    decisions,
    environment,
    jaxprs,
    switch,
)
from jaxkern._engines.loops.row_program import MOST_PRODUCT, multiplications
from jaxkern._engines.rows.core import DEAR

# Functions that XLA may store before it sums columns: it does for most of them, but not for exp [4096 x 4096, jaxlib 0.11.2, for an H100].
STORED = (DEAR | {"rem", "erf_inv"}) - {"exp"}
WITHOUT_PRODUCTS = "large products of the body are computed before the loop"


def rewrite(module, jaxpr):
    """The jaxpr that JAX lowers in place of `jaxpr`."""
    settings = switch.current()
    if not switch.wanted(rows.ROWS) or algorithms.xla_forced() or environment.xla_only():
        return jaxpr
    ctx = compat_lowering.ModuleOnly(module)
    if not (settings.force or "cuda" in compat_lowering.platforms(ctx) or decisions.listened()):
        return jaxpr
    scan, refusal, equations = compat.scan_primitive(), None, []
    for e in jaxpr.eqns:
        body = _Body(e) if e.primitive is scan and _may_move(e) else None
        if body is not None and body.products:
            refusal = rows.refusal(ctx, settings) if refusal is None else refusal
            if body.record(refusal or _no_room(jaxpr, body)):
                equations += body.rewritten()
                loops.leave(module, equations[-1], WITHOUT_PRODUCTS)
                continue
        equations.append(e)
    return jaxpr.replace(eqns=equations) if len(equations) > len(jaxpr.eqns) else jaxpr


def _no_room(jaxpr, body) -> str:
    """Why the products of a body are not moved, if the program would need more memory: the loop's constants are there in all of it."""
    new, _ = jaxprs.called_jaxpr(body.rewritten()[-1])
    of_body = functools.partial(memory.peak, donated=False)
    plain, more = memory.peak(jaxpr), of_body(new) - of_body(body.jaxpr)
    return memory.reason(more, plain) if plain >= memory.SMALL and more > (memory.LARGER - 1) * plain else ""


def _may_move(e) -> bool:
    """Whether a scan has several steps, and a large product somewhere in its body."""
    body, consts = jaxprs.called_jaxpr(e)
    length = e.params["length"]
    return (
        isinstance(length, int) and length > 1 and not (body.effects or consts or body.constvars) and _has_product(body)
    )


def _has_product(jaxpr) -> bool:
    return any(
        _is_product(e)
        or (e.primitive.name in (*jaxprs.CALLS, *jaxprs.CUSTOM) and _has_product(jaxprs.called_jaxpr(e)[0]))
        for e in jaxpr.eqns
    )


def _is_product(e) -> bool:
    """Whether an equation is a matrix product, which XLA stores, and which is too large for a kernel of a loop."""
    if e.primitive.name != "dot_general":
        return False
    contracted, batch = e.params["dimension_numbers"]
    for v, own, of_batch in zip(e.invars, contracted, batch):
        shape = v.aval.shape
        free = [n for d, n in enumerate(shape) if d not in (*own, *of_batch)]
        if set(map(type, shape)) - {int} or math.prod(free) < 2 or math.prod(shape[d] for d in own) < 2:
            return False
    return multiplications(e) > MOST_PRODUCT


class _Body:
    """The body of a scan. products: those to move. moved: values that are computed before the loop, where it reads them."""

    def __init__(self, scan):
        self.scan, (self.jaxpr, _) = scan, jaxprs.called_jaxpr(scan)
        self.consts, _ = compat.counts_of_scan(scan.params)
        equations, self.results, _ = inlining.inlined(self.jaxpr, {}, set())
        self._find_fixed(equations)
        self.readers: dict = {}
        for e in self.equations:
            for v in variables(e):
                self.readers.setdefault(v, []).append(e)
        self.made = {v: e for e in self.equations for v in e.outvars}
        fixed_products = [e for e in self.equations if e.outvars[0] in self.fixed and _is_product(e)]
        self.products = [e for e in fixed_products if self._is_only_reduced(e.outvars[0])]
        reduced = [e for e in self.equations if e.primitive.name in REDUCING and e.outvars[0] in self.fixed]
        smaller = [e for e in reduced if size_of(e.outvars[0]) < size_of(e.invars[0])]
        self.moved = [e.outvars[0] for e in (*self.products, *smaller) if self.products]

    def _find_fixed(self, equations):
        """The equations, of which equal ones that are the same in all steps are one; `fixed`: the values that are the same."""
        self.fixed, self.equations = set(self.jaxpr.invars[: self.consts]), []
        names, known = {}, {}
        for e in equations:
            e = e.replace(invars=[names.get(v, v) if is_variable(v) else v for v in e.invars])
            if not e.effects and compat_rewriting.runs_anywhere(e) and all(v in self.fixed for v in variables(e)):
                key = _key(e)
                if key is not None and key in known:
                    names.update(zip(e.outvars, known[key].outvars))
                    continue
                known[key] = e
                self.fixed.update(e.outvars)
            self.equations.append(e)
        self.results = [names.get(v, v) if is_variable(v) else v for v in self.results]

    def record(self, refusal) -> bool:
        """Notes what is moved, or why it is not; returns whether it is."""
        product = self.products[0]
        why = refusal or f"the same in all {self.scan.params['length']} steps: computed before the loop"
        frames = functools.partial(compat.frames, product.source_info.traceback)
        avals = [v.aval for v in product.invars]
        return decisions.record(rows.ROWS, not refusal, why, avals, frames, bytes_of(product.outvars[0]))

    def _is_only_reduced(self, v) -> bool:
        """Whether all that reads a value, after elementwise arithmetic, reduces it, and XLA stores none of this arithmetic.

        Where it reduces columns, XLA may compute a function such as tanh in a kernel of its own, and store it. It computes the same
        function in the kernel of a product that is in the loop.
        """
        seen, pending = set(), [(v, False)]
        while pending:
            v, is_dear = pending.pop()
            if (v, is_dear) in seen:
                continue
            seen.add((v, is_dear))
            if v in self.results:
                return False
            for e in self.readers.get(v, ()):
                if e.primitive.name in REDUCING:
                    if is_dear and v.aval.ndim - 1 not in e.params["axes"]:
                        return False
                    continue
                if e.primitive in MARKS and size_of(e.outvars[0]) < size_of(v):
                    continue
                if e.primitive.name not in CHEAP:
                    return False
                pending += [(w, is_dear or e.primitive.name in STORED) for w in e.outvars]
        return True

    def _remaining(self) -> list:
        """The equations that the loop needs."""
        needed, found = set(filter(is_variable, self.results)), []
        for e in reversed(self.equations):
            if e.effects or any(v in needed and v not in self.moved for v in e.outvars):
                found.append(e)
                needed.update(variables(e))
        return found[::-1]

    def _apart(self, read) -> tuple:
        """(the scan, the equations before it) with a barrier in front of the constants that are `read`, and of the first carries.

        Without it XLA merges equal products of several loops, such as a forward loop and one that computes it again for gradients,
        and holds each product from the first of these loops to the last.
        """
        _, carries = compat.counts_of_scan(self.scan.params)
        inside = self.jaxpr.invars
        at = [k for k in range(self.consts) if inside[k] in read]
        at += range(self.consts, self.consts + carries) if at else ()
        operands = {k: v for k, v in enumerate(self.scan.invars) if k in at and compat_rewriting.is_array(v)}
        if not operands:
            return self.scan, []
        barrier, results = compat_rewriting.barrier(self.scan, operands.values())
        own = dict(zip(operands, results))
        return self.scan.replace(invars=[own.get(k, v) for k, v in enumerate(self.scan.invars)]), [barrier]

    def rewritten(self) -> list:
        """The equations in place of the scan."""
        kept = self._remaining()
        read = {v for e in kept for v in variables(e)}.union(filter(is_variable, self.results))
        moved = [v for v in self.moved if v in read]
        needed, before = set(moved), []
        for e in reversed(self.equations):
            if any(v in needed for v in e.outvars):
                before.append(e)
                needed.update(variables(e))
        scan, found = self._apart(needed)
        outside = dict(zip(self.jaxpr.invars[: self.consts], scan.invars))
        for e in reversed(before):
            operands = [outside[v] if is_variable(v) else v for v in e.invars]
            results = [compat_rewriting.new_variable(v.aval) for v in e.outvars]
            outside.update(zip(e.outvars, results))
            found.append(compat_rewriting.inlined_equation(scan, e, operands, results))
        inner = [compat_rewriting.new_variable(v.aval) for v in moved]
        names = dict(zip(moved, inner))
        new = lambda v: names.get(v, v) if is_variable(v) else v
        body = [e.replace(invars=list(map(new, e.invars))) for e in kept]
        own = self.jaxpr.replace(eqns=body, outvars=list(map(new, self.results)))
        return [
            *found,
            compat_rewriting.with_constants(scan, own, inner, [outside[v] for v in moved]),
        ]


def _key(e):
    """What equal equations share; None if that is not known."""
    try:
        literal = lambda v: (np.asarray(v.val).tobytes(), v.aval)
        operands = tuple(v if is_variable(v) else literal(v) for v in e.invars)
        key = (e.primitive, operands, tuple(sorted(e.params.items(), key=lambda item: item[0])))
        hash(key)
    except TypeError:
        return None
    return key
