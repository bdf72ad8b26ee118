"""Losses of integer labels, known by name, of a slice of logits: they read the whole array instead.

XLA would copy the slice `logits[:, :-1]` in front of a kernel, and pad the gradient behind it. So the loss and its gradient are computed for
all rows of the array that is cut. The rows that are left out have a label that is ignored: their gradient is 0, whatever they hold.
"""

import functools

from jax import lax

from jaxkern._accelerate import cuts
from jaxkern._accelerate.equations import is_variable, variables
from jaxkern._core import compat_rewriting, switch
from jaxkern._ops.cross_entropy.primitive import cross_entropy_grad_p, cross_entropy_p

# The label of rows that are left out. No class has it: negative labels of a program count from the end, so the number of classes is added.
NOTHING = -(2**31)
# Rows that are left out, at most, as a part of all: a kernel then moves fewer bytes than the three reads and the write of XLA.
LEFT_OUT = 8

_LOSSES = {cross_entropy_p, cross_entropy_grad_p}


def rewrite(module, jaxpr):
    """The jaxpr that JAX lowers in place of `jaxpr`."""
    del module
    if not {e.primitive for e in jaxpr.eqns} & _LOSSES or not switch.wanted("softmax_cross_entropy"):
        return jaxpr
    return _Losses(jaxpr, switch.current().force).run()


def _is_loss(e) -> bool:
    """Whether an equation is optax's loss of integer labels, or its gradient, which `accelerate` put there."""
    return e.primitive in _LOSSES and e.params["options"].as_written and not e.params.get("given")


class _Losses:
    def __init__(self, jaxpr, force):
        self.jaxpr, self.force = jaxpr, force
        self.made = {v: e for e in jaxpr.eqns for v in e.outvars}
        self.readers: dict = {}
        for e in jaxpr.eqns:
            for v in variables(e):
                self.readers.setdefault(v, []).append(e)
        self.whole: dict = {}  # {(value, rows, what fills it): the value for all rows}
        self.gone: set = set()  # equations that pad a gradient, by their ids
        self.equations: list = []

    def run(self):
        changed = False
        for e in self.jaxpr.eqns:
            found = self._cut(e) if _is_loss(e) else None
            if found is not None:
                changed = True
                self._for_all_rows(e, *found)
            elif id(e) not in self.gone:
                self.equations.append(e)
        return self.jaxpr.replace(eqns=self.equations) if changed else self.jaxpr

    def _cut(self, e):
        """(axis of the logits, rows, whole array, types that it is converted to) of a loss of a slice; None for others."""
        logits = e.invars[0]
        if not is_variable(logits) or any(logits.aval.sharding.spec):
            return None
        cut, x, types = cuts.source(logits, self.made)
        along = cut and cut.of_axis(logits.aval.shape, e.params["axis"])
        if not along or (not self.force and LEFT_OUT * (cut.whole - cut.size) > cut.whole):
            return None
        axis, *sizes = along
        return axis, cuts.Rows(cut, *sizes), x, types

    def _for_all_rows(self, e, axis, rows, x, types):
        logits, *numbers = e.invars
        along = axis - (axis > e.params["axis"])  # of the numbers of rows
        gradient = e.primitive is cross_entropy_grad_p
        traced = functools.partial(cuts.traced, self.equations, e)
        shape = rows.longer(logits.aval.shape, axis)

        def converted(x):
            y = x if x.shape == shape else lax.reshape(x, shape)
            for params in types:
                y = lax.convert_element_type(y, params["new_dtype"])
            return y

        if (logits, rows, None) not in self.whole:
            (self.whole[logits, rows, None],) = traced(converted, x)

        def extended(v, fill=0):
            if not is_variable(v):
                return v
            if (v, rows, fill) not in self.whole:
                (self.whole[v, rows, fill],) = traced(lambda y: rows.extended(y, along, fill), v)
            return self.whole[v, rows, fill]

        operands = [self.whole[logits, rows, None], extended(numbers[0], NOTHING), *map(extended, numbers[1:])]
        typed = lambda v, at: cuts.typed(v.aval, rows.longer(v.aval.shape, at), v.aval.dtype)
        results = [compat_rewriting.new_variable(typed(v, axis if gradient else along)) for v in e.outvars]
        params = e.params | {"options": e.params["options"]._replace(ignore=NOTHING)}
        self.equations.append(e.replace(invars=operands, outvars=results, params=params))
        for v, y in zip(e.outvars, results):
            if compat_rewriting.is_dropped(v):
                continue
            self.whole[v, rows, 0] = y
            chain = cuts.padding(v, rows.cut, self._reader, self.made) if gradient else None
            if chain is None:
                at = axis if gradient else along
                traced(lambda y, at=at: rows.shortened(y, at), y, into=v)
                continue
            self.gone.update(map(id, chain))
            last = chain[-1].outvars[0]
            steps = [c.params["new_dtype"] for c in chain if c.primitive.name == "convert_element_type"]

            def padded(y, last=last, steps=steps):
                for dtype in steps:
                    y = lax.convert_element_type(y, dtype)
                return lax.reshape(y, last.aval.shape)

            if y.aval.shape == last.aval.shape and not steps:
                self.equations[-1] = self.equations[-1].replace(outvars=[last])
            else:
                traced(padded, y, into=last)

    def _reader(self, v):
        """The only equation that reads a value; None if there are several, or if it is a result."""
        readers = self.readers.get(v, ())
        if len(readers) != 1 or any(v is x for x in self.jaxpr.outvars):
            return None
        return readers[0] if len(readers[0].outvars) == 1 else None
