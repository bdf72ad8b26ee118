"""The memory of the plain program, from its jaxprs: which arrays XLA stores, and from when to when each of them is there.

    live = Live(equations, results)
    live.most                       bytes of the arrays that are there at once, at most
    live.during[id(e)]              ... while equation e is computed

An array is stored if it is an operand, a result, what an equation makes that XLA does not fuse, or what such an equation reads.
It is there until it is read last. Buffers of XLA's own are not known.
"""

import itertools

from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxkern._accelerate.equations import FUSED, bytes_of, is_variable, variables
from jaxkern._core import compat_lowering
from jaxkern._core.decisions import megabytes
from jaxkern._core.jaxprs import CALLS, CUSTOM, called_jaxpr

LARGER = 1.02  # memory of a program with kernels over the plain program's, at most
SMALL = 256 << 20  # bytes of a program that may need any more: memory is not at stake
# XLA computes the updates and indices of a scatter where it adds them.
SCATTERS = (
    lax.scatter_p,
    lax.scatter_add_p,
    lax.scatter_max_p,
    lax.scatter_min_p,
    lax.scatter_mul_p,
    lax.scatter_sub_p,
)


def fuses(e) -> bool:
    """Whether XLA fuses an equation with those that read its results, or whose operands they make. A call, if it fuses all of it."""
    if e.primitive.name in (*CALLS, *CUSTOM):
        return all(map(fuses, called_jaxpr(e)[0].eqns))
    return e.primitive.name in FUSED


def is_fused(e, v) -> bool:
    """Whether XLA computes the array v where equation e reads it."""
    return fuses(e) or (e.primitive in SCATTERS and v is not e.invars[0])


class Live:
    """See above.

    fused: a function as `is_fused`. inside: {equation, by its id: bytes that its own jaxprs need, beside operands and results}.
    donated: whether operands are there until they are read last, or to the end.
    """

    def __init__(self, equations, results, fused=is_fused, inside=None, donated=True):
        self.during: dict = {}
        made = {v: e for e in equations for v in e.outvars}
        stored = {v for e in equations for v in variables(e) if not fused(e, v)}
        stored.update(v for v, e in made.items() if not fuses(e))
        stored.update(filter(is_variable, results))
        last = dict.fromkeys(filter(is_variable, results), len(equations))
        for k in reversed(range(len(equations))):
            e = equations[k]
            # What is not stored is computed, and its operands are read, where it is read last.
            read = k if any(v in stored for v in e.outvars) else max((last.get(v, k) for v in e.outvars), default=k)
            for v in variables(e):
                last[v] = max(read, last.get(v, read))
        live, ends = sum(bytes_of(v) for v in last if v not in made), {}
        for v in last if donated else ():
            if v not in made:
                ends.setdefault(last[v], []).append(bytes_of(v))
        self.most = live
        for k, e in enumerate(equations):
            for v in e.outvars:
                if v in stored and v in last:
                    live += bytes_of(v)
                    ends.setdefault(last[v], []).append(bytes_of(v))
            self.during[id(e)] = live + (inside or {}).get(id(e), 0)
            self.most = max(self.most, self.during[id(e)])
            live -= sum(ends.pop(k, ()))


def peak(jaxpr, known=None, donated=True) -> int:
    """Bytes that a jaxpr needs, with the jaxprs that its equations run. known: {a jaxpr, by its id: (it, its peak)}; it grows.

    donated: as for `Live`, of the jaxpr's own operands.
    """
    known = {} if known is None else known
    if id(jaxpr) not in known:
        inside = {}
        for e in jaxpr.eqns:
            for inner in _inner(e):
                own = sum(bytes_of(v) for v in {*filter(is_variable, (*inner.invars, *inner.outvars))})
                inside[id(e)] = max(inside.get(id(e), 0), peak(inner, known) - own)
        known[id(jaxpr)] = jaxpr, Live(jaxpr.eqns, jaxpr.outvars, inside=inside, donated=donated).most
    return known[id(jaxpr)][1]


def reason(more: int, plain: int) -> str:
    """Why what stores so many bytes more than the plain program's is left."""
    return f"would need {megabytes(more)} MB more than plain ({megabytes(plain)} MB)"


def _inner(e):
    """The jaxprs that an equation runs."""
    values = itertools.chain.from_iterable(v if isinstance(v, (tuple, list)) else (v,) for v in e.params.values())
    for v in values:
        if isinstance(v, ClosedJaxpr):
            yield v.jaxpr
        elif isinstance(v, Jaxpr):
            yield v


# ---- what a module's kernels need more


class Room:
    """What the kernels of a module store that XLA would not, and how much of that there may be.

    XLA may have all of it at once: a value that the forward pass reads too is kept for the backward pass, where it is not computed
    again [a hash grid with the sums of 16 levels, H100: 1.11 GB for 0.89].
    """

    def __init__(self, jaxpr):
        self._jaxpr, self._plain = jaxpr, None
        self.values: dict = {}  # {what is stored more: its bytes}

    @property
    def plain(self) -> int:
        """Bytes that the plain program needs; 0 if they are not known."""
        if self._plain is None:
            self._plain = peak(self._jaxpr) if self._jaxpr is not None else 0
        return self._plain

    def needed(self, values) -> int:
        """Bytes that the program needs more if these are stored, too."""
        return sum((self.values | values).values())

    def is_there(self, more) -> bool:
        return self.plain < SMALL or more <= (LARGER - 1) * self.plain


def note(module, jaxpr) -> None:
    """Notes the program of a module: the first jaxpr of it that is lowered."""
    known = compat_lowering.of_module(module)
    if "room" not in known:
        known["room"] = Room(jaxpr)


def room(module) -> Room:
    return compat_lowering.of_module(module).setdefault("room", Room(None))
