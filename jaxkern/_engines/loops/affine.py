"""Loops that are affine in their carries, as compositions of affine maps.

    found = affine(body, num_consts, stored, num_xs)    None if the body is not affine

A body h' = A h + b, where A and b do not depend on the carries h, can be cut in time: each part of the steps composes its maps
(A, b), the compositions are joined, and then each part runs its own steps from the carries before them. `Affine` has the
functions of scalars that this takes.

The numbers of a map are the entries of A that are neither always 0 nor always 1 in compositions of maps, then the entries of b
that are not always 0.

The body is read by abstract interpretation. A scalar is a `Form`, a sum of coefficients times carries plus an offset, or None if
it depends on carries in another way. Integer carries to which each step adds the same number, counters, and carries that do
not change are known in each step, so a coefficient may depend on them.

Source: Blelloch, "Prefix Sums and Their Applications", 1990, for recurrences as scans.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.sharding import AbstractMesh

from jaxkern._core.jaxprs import CALLS, CUSTOM, IDENTITIES, called_jaxpr, computing, evaluate_equation

MOST_COUPLED = 4  # carries that depend on each other
MOST_BYTES = 96  # of a map: it lies in registers, and passes through shared memory
ONE = "one"  # a coefficient that is known to be 1


@dataclasses.dataclass
class Form:
    """The sum of terms[k] * carry k, plus offset.

    terms: {carry: coefficient, a scalar of `dtype` or ONE}. offset: a scalar of `dtype`, or None for 0. fixed: whether
    coefficients and offset are the same in all steps.
    """

    dtype: np.dtype
    terms: dict
    offset: object
    fixed: bool

    @property
    def value(self):
        return np.zeros((), self.dtype)[()] if self.offset is None else self.offset

    def map(self, f, fixed=True) -> "Form":
        """The Form with f, a linear function, of each coefficient and of the offset."""
        terms = {k: f(self.number(c)) for k, c in self.terms.items()}
        return Form(self.dtype, terms, None if self.offset is None else f(self.offset), self.fixed and fixed)

    @property
    def outline(self) -> "Form":
        """The Form without its scalars: None stands for a coefficient, True for the offset."""
        terms = {k: ONE if c is ONE else None for k, c in self.terms.items()}
        return Form(self.dtype, terms, None if self.offset is None else True, self.fixed)

    def number(self, coefficient):
        """A coefficient as a scalar. None stands for 0."""
        if coefficient is None or coefficient is ONE:
            return np.full((), coefficient is ONE, self.dtype)[()]
        return coefficient


class _Reader:
    """Evaluates a jaxpr of scalars on Forms. selects: whether conditions pick coefficients or offsets."""

    selects = False

    def run(self, jaxpr, consts, args) -> list:
        known = lambda x, v: Form(np.dtype(v.aval.dtype), {}, x, True)
        env = {v: known(c, v) for v, c in zip(jaxpr.constvars, consts)} | dict(zip(jaxpr.invars, args))
        read = lambda v: known(np.asarray(v.val, v.aval.dtype)[()], v) if isinstance(v, Literal) else env[v]
        for e in jaxpr.eqns:
            env.update(zip(e.outvars, self._equation(e, list(map(read, e.invars)))))
        return list(map(read, jaxpr.outvars))

    def _equation(self, e, forms) -> list:
        name = e.primitive.name
        if all(f is not None and not f.terms for f in forms):
            ys = evaluate_equation(e, [f.value for f in forms])
            fixed = all(f.fixed for f in forms)
            return [Form(np.dtype(v.aval.dtype), {}, y, fixed) for v, y in zip(e.outvars, ys)]
        if name in (*CALLS, *CUSTOM):
            return self.run(*called_jaxpr(e), forms)
        if name == "cond":
            branches = [self.run(b.jaxpr, b.consts, forms[1:]) for b in e.params["branches"]]
            return [self._select(forms[0], cases) for cases in zip(*branches)]
        if name == "select_n":
            return [self._select(forms[0], forms[1:])]
        if name == "optimization_barrier":
            return forms
        if None in forms or len(forms) > 2 or len(e.outvars) > 1:
            return [None] * len(e.outvars)
        return [self._linear(e, name, *forms)]

    def _linear(self, e, name, x, y=None):
        """The Form of an equation of Forms that are not all known; None if it is not affine."""
        out = np.dtype(e.outvars[0].aval.dtype)
        if name in ("add", "add_any"):
            return _added(x, y)
        if name == "sub":
            return _added(x, y.map(lax.neg))
        if name == "neg":
            return x.map(lax.neg)
        if name in ("mul", "dot_general") and not (x.terms and y.terms) and x.dtype == y.dtype == out:
            factor, x = (x, y) if y.terms else (y, x)
            return x.map(lambda c: c * factor.value, factor.fixed)
        if name == "div" and not y.terms and jnp.issubdtype(out, jnp.inexact):
            return x.map(lambda c: lax.div(c, y.value), y.fixed)
        if name == "convert_element_type" and (x.dtype == out or _is_part(x.dtype, out)):
            y = x.map(lambda c: lax.convert_element_type(c, out))
            return Form(out, {k: ONE if c is ONE else y.terms[k] for k, c in x.terms.items()}, y.offset, x.fixed)
        if name in ("stop_gradient", *IDENTITIES) or (name == "integer_pow" and e.params["y"] == 1):
            return x if y is None else y
        return None

    def _select(self, which, cases):
        """The Form of cases[which]."""
        if all(c is cases[0] for c in cases):
            return cases[0]
        if None in (which, *cases) or which.terms:
            return None
        self.selects = True
        number = cases[0].number

        def pick(values):
            if all(v is values[0] for v in values):
                return values[0]
            y = number(values[-1])
            for k in reversed(range(len(values) - 1)):
                here = ~which.value if which.dtype == np.bool_ else which.value <= k
                y = lax.select(jnp.asarray(here), jnp.asarray(number(values[k])), jnp.asarray(y))
            return y

        terms = {k: pick([c.terms.get(k) for c in cases]) for k in dict.fromkeys(k for c in cases for k in c.terms)}
        fixed = which.fixed and all(c.fixed for c in cases)
        return Form(cases[0].dtype, terms, pick([c.offset for c in cases]), fixed)


def _is_part(of, to) -> bool:
    """Whether conversion from a dtype of real or complex numbers to another is linear, up to rounding."""
    complex_ = lambda d: jnp.issubdtype(d, jnp.complexfloating)
    return all(jnp.issubdtype(d, jnp.inexact) for d in (of, to)) and (complex_(to) or not complex_(of))


def _added(x, y) -> Form:
    offset = x.value + y.value if None not in (x.offset, y.offset) else x.offset if y.offset is None else y.offset
    terms = x.terms | y.terms | {k: x.number(c) + y.number(y.terms[k]) for k, c in x.terms.items() if k in y.terms}
    return Form(x.dtype, terms, offset, x.fixed and y.fixed)


@dataclasses.dataclass
class Affine:
    """A body that is affine in its carries.

    body: a closed jaxpr: (consts, carries, xs, places of the lane) -> (carries, ys), of scalars in computing types.
    stored: dtypes of the carries in memory.
    counters: positions of the carries that coefficients depend on. They are known in each step.
    entries: {(row, column) of A: ONE, or None for a number}; others are 0. offsets: rows of b that are not always 0.
    selects: whether conditions pick coefficients.
    """

    body: object
    num_consts: int
    stored: list
    num_xs: int
    counters: tuple = ()
    entries: dict = dataclasses.field(default_factory=dict)
    offsets: list = dataclasses.field(default_factory=list)
    selects: bool = False

    @property
    def dtypes(self) -> list:
        """The dtypes of the numbers of a map."""
        own = [computing(d) for d in self.stored]
        return [own[i] for i, _ in self._places()] + [own[i] for i in self.offsets]

    def _places(self) -> list:
        return [at for at, known in self.entries.items() if known is not ONE]

    def _map(self, numbers):
        """A and b of a map: {row: {column: coefficient}}, {row: offset}."""
        at = self._places()
        values = self.entries | dict(zip(at, numbers))
        rows = {i: {} for i in range(len(self.stored))}
        for (i, j), c in values.items():
            rows[i][j] = c
        return rows, dict(zip(self.offsets, numbers[len(at) :]))

    def _times(self, coefficient, x, dtype):
        """coefficient * x. Where a condition picked a coefficient of 0, not even NaN passes."""
        x = lax.convert_element_type(x, dtype)
        if coefficient is ONE:
            return x
        y = coefficient * x
        return jnp.where(coefficient == 0, jnp.zeros((), dtype), y) if self.selects else y

    def _sum(self, row, xs, offset, dtype):
        """The products of a row of A and the numbers xs that there are, plus an offset; None for an empty sum."""
        y = offset
        for j, c in row.items():
            if j in xs:
                term = self._times(c, jnp.ones((), dtype) if xs[j] is ONE else xs[j], dtype)
                y = term if y is None else term + y
        return y

    def element(self, consts, xs, places, starts=(), step=None) -> list:
        """The map of a step. starts, of the counters, and step are needed if there are counters."""
        known = dict(zip(self.counters, starts))
        forms, _ = _forms(self, consts, known, xs, places, step)
        numbers = [(forms[i], forms[i].terms.get(j)) for i, j in self._places()]
        return [f.number(c) for f, c in numbers] + [forms[i].value for i in self.offsets]

    def combine(self, earlier, later) -> list:
        """The map of two consecutive parts."""
        (first, b), (second, c) = self._map(earlier), self._map(later)
        of = [computing(d) for d in self.stored]
        column = lambda j: {k: row[j] for k, row in first.items() if j in row}
        entries = [self._sum(second[i], column(j), None, of[i]) for i, j in self._places()]
        sums = [self._sum(second[i], b, c.get(i), of[i]) for i in self.offsets]
        return [np.zeros((), d)[()] if y is None else y for y, d in zip((*entries, *sums), self.dtypes)]

    def apply(self, state, carries) -> list:
        """The carries after a map, from those before it. Those of 16 bits are rounded, as they are in every step."""
        rows, b = self._map(state)
        found = []
        for i, narrow in enumerate(self.stored):
            dtype = computing(narrow)
            y = self._sum(rows[i], dict(enumerate(carries)), b.get(i), dtype)
            y = np.zeros((), dtype)[()] if y is None else y
            found.append(lax.convert_element_type(lax.convert_element_type(y, narrow), dtype))
        return found


def _forms(loop, consts, known, xs, places, step):
    """(the Forms of all carries after a step, whether conditions pick coefficients or offsets).

    known: {counter: its first value}.
    """
    form = lambda x, fixed: Form(np.dtype(x.dtype), {}, x, fixed)
    jaxpr, count = loop.body.jaxpr, len(loop.stored)
    constant, rest = [form(x, True) for x in consts], [*(form(x, False) for x in xs), *(form(x, True) for x in places)]
    own = [Form(computing(d), {k: ONE}, None, True) for k, d in enumerate(loop.stored)]

    def run(carries):
        reader = _Reader()
        return reader.run(jaxpr, loop.body.consts, [*constant, *carries, *rest])[:count], reader.selects

    forms, selects = run(own)
    if not known:
        return forms, selects
    counted = {}
    for k, start in known.items():
        f = forms[k]
        counted[k] = form(start, True)
        if f.offset is not None:
            counted[k] = form(start + f.offset * lax.convert_element_type(step, f.dtype), False)
    again, selects = run([counted.get(k, f) for k, f in enumerate(own)])
    return [forms[k] if k in known else f for k, f in enumerate(again)], selects


def _counts(form, k) -> bool:
    """Whether a carry is known in each step, from its Form."""
    if form is None or form.terms != {k: ONE} or not form.fixed:
        return False
    return form.offset is None or jnp.issubdtype(form.dtype, jnp.integer)


def affine(body, num_consts, stored, num_xs, most=MOST_COUPLED):
    """The Affine of a body; None if it is not affine in its carries, couples more than `most`, or has maps of many numbers.

    body: a closed jaxpr of scalars in computing types: (consts, carries, xs, places of the lane) -> (carries, ys).
    stored: the dtypes of the carries in memory. num_xs: how many elements of xs it takes.
    """
    n = len(stored)
    loop = Affine(body, num_consts, list(map(np.dtype, stored)), num_xs)
    found = []

    def read(*args):
        consts, starts, rest = args[:num_consts], args[num_consts : num_consts + n], args[num_consts + n :]
        given = consts, rest[:num_xs], rest[num_xs:]
        forms, selects = _forms(loop, given[0], {}, *given[1:], None)
        if None in forms:
            loop.counters = tuple(k for k, f in enumerate(forms) if _counts(f, k))
            known = {k: starts[k] for k in loop.counters}
            forms, selects = _forms(loop, given[0], known, *given[1:], jnp.int32(1))
        found.append(([f and f.outline for f in forms], selects))  # no tracer leaves the trace
        return 0

    shapes = [jax.ShapeDtypeStruct((), v.aval.dtype) for v in body.jaxpr.invars]
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        jax.make_jaxpr(read)(*shapes)
    ((forms, loop.selects),) = found
    if not n or any(f is None or f.dtype == np.bool_ for f in forms):
        return None
    loop.entries = _closed({(i, k): c for i, f in enumerate(forms) for k, c in f.terms.items()}, n)
    offsets = {i for i, f in enumerate(forms) if f.offset is not None}
    while more := {i for i, k in loop.entries if k in offsets} - offsets:
        offsets |= more
    loop.offsets = sorted(offsets)
    if max(_coupled(loop.entries, n)) > most or sum(d.itemsize for d in loop.dtypes) > MOST_BYTES:
        return None
    return loop


def _closed(entries, n) -> dict:
    """The entries of A in compositions of maps, from the entries of one map; each is ONE, or None for a number."""
    known = entries
    while True:
        product = {}
        for i, k in known:
            for j in range(n):
                if (k, j) in known:
                    one = (i, j) not in product and known[i, k] is ONE is known[k, j]
                    product[i, j] = ONE if one else None
        both = {at: ONE if known.get(at) is ONE is product.get(at) else None for at in sorted({*known, *product})}
        if both == known:
            return both
        known = both


def _coupled(entries, n) -> list:
    """For each carry, the number of carries in its part. Two carries are in one part if one depends on the other."""
    parts = [{i} for i in range(n)]
    for i, j in entries:
        joined = parts[i] | parts[j]
        for k in joined:
            parts[k] = joined
    return list(map(len, parts))
