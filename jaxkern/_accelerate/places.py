"""Which share of an array of rows a kernel reads, where conditions on places and indices exclude elements (engines/rows/guards.py).

The conditions are evaluated on a sample of places. `key <= query` of a causal softmax leaves half of the scores.
"""

import operator

import numpy as np

from jaxkern._engines.jaxpr import INDICES, MOVES, Constant, Value
from jaxkern._engines.rows.core import Core
from jaxkern._engines.rows.guards import guards

SAMPLE = 64  # places along each dimension
_FUNCTIONS = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "max": np.maximum,
    "min": np.minimum,
    "abs": np.abs,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "convert_element_type": lambda x: x,
    "select_n": lambda c, x, y: np.where(c, y, x),
}


def shares(core) -> dict:
    """{operand: the share of its elements that is read}, for rows that may be read in part."""
    found = {}
    for k, conditions in guards(core).items():
        values = [(_of(core, v, {}), wanted) for v, wanted in conditions]
        if all(x is not None for x, _ in values):
            counts = np.any(np.broadcast_arrays(*(np.asarray(x) == wanted for x, wanted in values)), axis=0)
            found[k] = float(np.mean(counts))
    return found


def _of(core, v, known):
    """A value at the sample of places, with a dimension for each one of the program; None where more than places decides it."""
    if not isinstance(v, Value):
        return v.value if isinstance(v, Constant) else None
    if v not in known:
        known[v] = _computed(core, v, known)
    return known[v]


def _computed(core, v, known):
    step = core.step_of.get(v)
    if step is None:
        return None
    if step.name in INDICES:
        dims = (core.program.row, *core.program.others)
        total = np.zeros((1,) * len(dims), np.int64)
        for dim, stride in Core.index_of(step).items():
            places = np.unique(np.linspace(0, dim.size - 1, min(SAMPLE, dim.size)).round().astype(np.int64))
            total = total + stride * places.reshape([-1 if d is dim else 1 for d in dims])
        return total
    if step.name in MOVES:
        return _of(core, step.operands[0], known)
    operands = [_of(core, x, known) for x in step.operands]
    f = _FUNCTIONS.get(step.name)
    return None if f is None or any(x is None for x in operands) else f(*operands)
