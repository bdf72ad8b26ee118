"""Which elements of a row need not be read, because places, indices and numbers of the row decide that they do not count.

In `where(key <= query, x, -inf)`, x counts where the condition is true. A pack without an element that counts is not read.
An element at a place that is known when a row begins is read by itself: the row is not searched for it.
"""

import numpy as np

from jaxkern._engines.jaxpr import INDICES, MOVES, NOT_ELEMENTWISE, REDUCTIONS, Value
from jaxkern._engines.rows.picks import PICKS


def guards(core) -> dict:
    """{operand: [(condition, value)]} of operands that are rows. An element counts where one of the conditions has that value."""
    uses = {}
    for step in core.steps():
        for v in step.operands:
            if isinstance(v, Value):
                uses.setdefault(v, []).append(step)
    search = _Search(core, uses, {o.value for o in core.outputs}, {}, {})
    found = {k: search.of_value(core.program.operands[k]) for k in core.rows}
    return {k: conditions for k, conditions in found.items() if conditions}


def place_of(core, step):
    """The number that is the place of the element that a reduction picks, or None if it is not known when a row begins."""
    if step.origin is None or step.origin.primitive.name not in PICKS or step.name != "reduce_max":
        return None
    made = core.step_of
    select = made.get(_moved(made, step.operands[0]))
    hit = made.get(_moved(made, select.operands[0])) if select is not None and select.name == "select_n" else None
    if hit is None or hit.name != "eq":
        return None
    places, number = (_moved(made, v) for v in hit.operands)
    iota = made.get(places)
    if iota is None or iota.name not in INDICES or core.index_of(iota) != {core.program.row: 1}:
        return None
    if not isinstance(number, Value) or number.is_row or not number.dtype == np.int32 == places.dtype:
        return None
    return number if number in core.members and core.pass_of(number) == 0 else None


def _moved(made, v):
    """The value that v is a copy of, perhaps broadcast, as long as it belongs to an element."""
    while isinstance(v, Value) and v.is_row and (step := made.get(v)) is not None and step.name in MOVES:
        v = step.operands[0]
    return v


class _Search:
    """needs, known: what is found, by value."""

    def __init__(self, core, uses, outputs, needs, known):
        self.core, self.uses, self.outputs, self.needs, self.known = core, uses, outputs, needs, known

    def of_value(self, v):
        """The conditions under which a value counts; None if it may always count."""
        if v not in self.needs:
            self.needs[v] = None
            if v not in self.outputs:
                found = [self._of_use(v, step) for step in self.uses.get(v, ())]
                if all(found):
                    self.needs[v] = list(dict.fromkeys(c for conditions in found for c in conditions))
        return self.needs[v]

    def _of_use(self, v, step):
        if step.name in REDUCTIONS or step.name in NOT_ELEMENTWISE or len(step.results) != 1:
            return None
        condition = None
        if step.name == "select_n" and len(step.operands) == 3 and v is not step.operands[0]:
            if step.operands[1] is not step.operands[2]:
                condition = self._known_part(step.operands[0], v is step.operands[2])
        elif step.name in ("and", "or") and step.result.dtype == bool:
            others = [x for x in step.operands if x is not v]
            condition = self._known_part(others[0], step.name == "and") if others else None
        return [condition] if condition else self.of_value(step.result)

    def _known_part(self, v, value):
        """(condition, value): a condition that has this value wherever `v` has `value`, and is known; or None."""
        while isinstance(v, Value) and (step := self.core.step_of.get(v)) is not None and step.name in MOVES:
            v = step.operands[0]
        if not isinstance(v, Value):
            return None
        if self._is_known(v):
            return v, value
        step = self.core.step_of.get(v)
        if step is not None and step.name == "not":
            return self._known_part(step.operands[0], not value)
        if step is not None and step.name == ("and" if value else "or"):
            return next(filter(None, (self._known_part(x, value) for x in step.operands)), None)
        return None

    def _is_known(self, v) -> bool:
        """Whether a value depends on indices and on numbers that no reduction computes."""
        if not isinstance(v, Value):
            return True
        if v not in self.known:
            step = self.core.step_of.get(v)
            if step is None:
                self.known[v] = not v.is_row
            elif step.name in INDICES:
                self.known[v] = True
            elif step.name == "draw":  # whole packs are rarely dropped
                self.known[v] = False
            else:
                reduces = step.name in REDUCTIONS and self.core.program.over(step)
                self.known[v] = not reduces and all(map(self._is_known, step.operands))
        return self.known[v]
