"""Which region reads an array last, so that its kernel may write a result over it.

    LastReads(equations, results, regions).reads(v, region)

A kernel reads each element before it writes one there. If something else reads the array later, XLA copies it first, which costs more
than a new array: so all other readers must be computed before the region, because it depends on what they make. A reader that XLA
fuses reads the array wherever its own result is read.
"""

from jaxkern._accelerate.equations import FUSED, is_variable, only_names, variables


class LastReads:
    """regions: a list; the first is number 0."""

    def __init__(self, equations, results, regions):
        self.regions, self.results = regions, set(filter(is_variable, results))
        self.made = {v: e for e in equations for v in e.outvars}
        self.readers: dict = {}
        for e in equations:
            for v in variables(e):
                self.readers.setdefault(v, []).append(e)
        self.own = {v: k for k, region in enumerate(regions) for v in region.made}
        self.before: dict = {}  # {value: bits of the regions that depend on it}
        reads: dict = {}  # {what a region reads: its bits}
        for k, region in enumerate(regions):
            for v in region.operands:
                reads[v] = reads.get(v, 0) | 1 << k
        for e in reversed(equations):
            bits = 0
            for v in e.outvars:
                bits |= self.before.setdefault(v, reads.get(v, 0))
            for v in variables(e):
                self.before[v] = self.before.get(v, reads.get(v, 0)) | bits

    def reads(self, v, region) -> bool:
        """Whether a product or a region makes an array that nothing reads after `region` does, under whatever shape."""
        number = self.regions.index(region)
        while v in self.made and v not in self.own and only_names(self.made[v]):
            (v,) = variables(self.made[v])
        computed = v in self.own or (v in self.made and self.made[v].primitive.name == "dot_general")
        return computed and self._ends(v, number, set())

    def _ends(self, v, number, seen) -> bool:
        """Whether all readers of v come before a region, or belong to it."""
        if v in self.results:
            return False
        for k, region in enumerate(self.regions):
            others = k != number and v in region.operands
            if others and not all(self.before.get(w, 0) >> number & 1 for w in region.results):
                return False
        for e in self.readers.get(v, ()):
            if id(e) in seen or any(self.own.get(w) == number for w in e.outvars):
                continue
            seen.add(id(e))
            computed = e.primitive.name not in FUSED or (not only_names(e) and any(map(self._is_stored, e.outvars)))
            before = any(self.before.get(w, 0) >> number & 1 for w in e.outvars)
            if computed and not before:
                return False
            if not computed and not all(self._ends(w, number, seen) for w in e.outvars):
                return False
        return True

    def _is_stored(self, v) -> bool:
        """Whether something reads an array that XLA does not fuse with what makes it."""
        for e in self.readers.get(v, ()):
            if e.primitive.name not in FUSED or (only_names(e) and self._is_stored(e.outvars[0])):
                return True
        return v in self.results
