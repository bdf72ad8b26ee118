"""Values that a reader computes again from others, instead of reading them from memory."""

import itertools
import math

import jax.numpy as jnp

from jaxkern._accelerate.equations import (
    CHEAP,
    COMPARISONS,
    DTYPES,
    FUSED,
    REDUCING,
    bytes_of,
    is_renamed,
    is_variable,
    size_of,
    variables,
)
from jaxkern._core import compat_rewriting

MOST_COPIED = 24  # equations that compute a value again


class Copies:
    """Decides which values a reader computes again from others.

    A value is read from memory, or computed again from values that are, whichever moves fewer bytes: reading an array that is
    in memory anyway moves it once, one that is stored for the reader twice. An array that would be stored for the reader, such as
    the mask of a relu, is computed again at no cost from arrays that the reader reads in any case.
    """

    def __init__(self, equations, results, regions):
        self.place = {v: (i, e) for i, e in enumerate(equations) for v in e.outvars}
        self.owner = {v: region for region in regions for v in region.made}
        # Values that are in memory whatever regions and equations that XLA fuses read.
        self.stored = set(filter(is_variable, results))
        for e in equations:
            if e.primitive.name not in FUSED:
                self.stored.update(variables(e))
        # A value that is compared with another may have to equal it, to the last bit: with the largest of a row, say.
        self.compared = set()
        for e in equations:
            floats = [
                v for v in variables(e) if e.primitive.name in COMPARISONS and jnp.issubdtype(v.aval.dtype, jnp.inexact)
            ]
            self.compared.update(floats if len(floats) > 1 else ())

    def again(self, v, region=None, read=frozenset()):
        """(what is read for v, the equations that compute v from it).

        region: the reader, or None for another equation. read: arrays that it reads in any case.
        """
        memo: dict = {}

        def of(x, depth):
            if x not in memo:
                memo[x] = self._best(x, region, of, depth, read)
            return memo[x]

        leaves, copied = of(v, 0)
        return leaves, [self.place[x][1] for x in sorted(copied, key=lambda x: self.place[x][0])]

    def _best(self, x, region, of, depth, read):
        """(leaves, copied): leaves as a set of values, copied as a set of results of equations."""
        stays = frozenset([x]), frozenset()
        if x not in self.place or depth > MOST_COPIED or (region is not None and x in region.made):
            return stays
        e = self.place[x][1]
        if not self._is_copied(x, e, region):
            return stays
        parts = [of(v, depth + 1) for v in variables(e)]
        leaves = frozenset().union(*(p[0] for p in parts))
        copied = frozenset([x]).union(*(p[1] for p in parts))
        new = leaves if self._exists(x) else leaves - read
        fits = len(copied) <= MOST_COPIED and sum(map(self._moved, new)) < self._moved(x)
        return (leaves, copied) if fits else stays

    def _exists(self, x) -> bool:
        """Whether an array is in memory whatever reads it."""
        known = x in self.stored or x not in self.place
        return known or (x not in self.owner and self.place[x][1].primitive.name not in FUSED)

    def _moved(self, x) -> int:
        return bytes_of(x) * (1 if self._exists(x) else 2)

    def _is_copied(self, x, e, region) -> bool:
        name, owner = e.primitive.name, self.owner.get(x)
        if (
            x in self.compared
            or name not in CHEAP
            or len(e.outvars) != 1
            or e.effects
            or not compat_rewriting.runs_anywhere(e)
        ):
            return False
        if not all(getattr(v.aval, "dtype", None) in DTYPES for v in (*e.invars, *e.outvars)):
            return False
        if owner is not None:  # rows of another region; their numbers are small
            return owner.is_row(x) and (region is None or owner.shape == region.shape)
        if region is None:
            return False
        if region.is_row(x):  # of no region: XLA, too, would compute it where it is read
            reshaped = any(v.aval.shape != region.shape and size_of(v) == size_of(x) for v in variables(e))
            return not (reshaped or self._exists(x))
        renames = name not in ("reshape", "squeeze", "expand_dims") or is_renamed(e.invars[0].aval.shape, x.aval.shape)
        return renames and 2 * size_of(x) <= math.prod(region.shape)

    def complete(self, region):
        """Adds the equations that the region computes again."""
        have = {id(e) for e in region.equations}
        reads = dict.fromkeys(v for e in region.equations for v in variables(e) if v not in region.made)
        read = {v for v in reads if self._exists(v)}
        for v in sorted(reads, key=bytes_of, reverse=True):
            leaves, copied = self.again(v, region, read)
            self.stored.update(leaves)
            read |= leaves
            for e in copied:
                if id(e) not in have:
                    have.add(id(e))
                    region.equations.append(e)
        region.equations.sort(key=lambda e: self.place[e.outvars[0]][0])

    def beside(self, equations) -> list:
        """The equations with copies of what those outside of regions compute again, in front of them."""
        reads = Reads(equations, self.stored, self.owner)
        candidates = [
            (k, e, v) for k, e in enumerate(equations) if reads.is_fused(e) for v in dict.fromkeys(variables(e))
        ]
        candidates = [(k, e, v) for k, e, v in candidates if v in self.owner and self.owner[v].is_row(v)]
        if not candidates:
            return equations
        reads.find(self._exists)
        copies: dict = {}  # {equation, by its id: the equations that compute again what it reads}
        for _, e, v in sorted(candidates, key=lambda c: (-bytes_of(c[2]), c[0])):
            leaves, copied = self.again(v, read=reads.of(e))
            self.stored.update(leaves)
            reads.add(e, leaves)
            copies.setdefault(id(e), []).append(copied)
        found = []
        for e in equations:
            own: dict = {}
            for c in itertools.chain.from_iterable(copies.get(id(e), ())):
                (out,) = c.outvars
                if out not in own:
                    operands = [own.get(x, x) if is_variable(x) else x for x in c.invars]
                    own[out] = compat_rewriting.new_variable(out.aval)
                    found.append(c.replace(invars=operands, outvars=[own[out]]))
            found.append(e.replace(invars=[own.get(x, x) if is_variable(x) else x for x in e.invars]) if own else e)
        return found


class Reads:
    """The arrays that each kernel of XLA reads in any case, by the equations that it fuses.

    An equation outside of regions is computed in the kernels of all results that depend on it, through equations that XLA fuses.
    A kernel ends at a reduction, and at a value that is stored.
    """

    def __init__(self, equations, stored, owner):
        self._equations, self._stored, self._owner = equations, stored, owner
        self._kernels: dict = {}  # {an equation, by its id: the kernels that compute it, as bits}
        self._read: list = []  # of each kernel

    def is_fused(self, e) -> bool:
        return e.primitive.name in FUSED and not any(v in self._owner for v in e.outvars)

    def find(self, exists) -> None:
        """exists: whether an array is in memory whatever reads it."""
        needed: dict = {}  # {value: the kernels that compute what is fused with it, as bits}
        for e in reversed(self._equations):
            if not self.is_fused(e):
                continue
            own = 0
            for v in e.outvars:
                own |= needed.get(v, 0)
            if not own or e.primitive.name in REDUCING or any(v in self._stored for v in e.outvars):
                own = 1 << len(self._read)
                self._read.append(set())
            self._kernels[id(e)] = own
            for v in variables(e):
                needed[v] = needed.get(v, 0) | own
            self.add(e, filter(exists, variables(e)))

    def of(self, e) -> frozenset:
        """What all kernels that compute an equation read."""
        return frozenset.intersection(*(frozenset(self._read[k]) for k in self._bits(e)))

    def add(self, e, values) -> None:
        values = list(values)
        for k in self._bits(e) if values else ():
            self._read[k].update(values)

    def _bits(self, e) -> list:
        bits = self._kernels[id(e)]
        return [k for k in range(bits.bit_length()) if bits >> k & 1]
