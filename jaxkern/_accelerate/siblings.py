"""Arrays for matrix products that are computed from the same arrays: regions that reduce nothing.

    regions += find(equations, results, regions, least=1 << 16)

The gradients of a gated unit, `silu(a) * b`, are two arrays that products read, each computed from a, b and the cotangent. XLA stores
what a product reads, and makes a kernel for each of them, which reads all of this again. One kernel reads it once.
"""

import math

import jax.numpy as jnp

from jaxkern._accelerate.equations import DTYPES, RENAMING, SAME, is_variable, size_of, variables
from jaxkern._accelerate.regions import MOST_ROWS, Region
from jaxkern._core import compat_rewriting
from jaxkern._core.cpp import ELEMENTWISE

MOST_EQUATIONS = 64  # that compute one array
PRODUCT = "dot_general"


def possible(equations) -> bool:
    """Whether two arrays may be found that products read."""
    return sum(e.primitive.name == PRODUCT for e in equations) > 1


def find(equations, results, regions, least) -> list:
    """The regions beside those that are there already. least: elements of an array."""
    made = {v: e for e in equations for v in e.outvars}
    taken = {v for region in regions for v in region.made}
    wanted = _of_products(equations)
    stored = {v for e in equations if e.primitive.name == PRODUCT for v in variables(e)} | taken
    bits: dict = {}  # {value: which of the arrays it depends on}
    groups, number = [], 0
    for e in equations:
        depends = 0
        for v in variables(e):
            depends |= bits.get(v, 0)
        root = e.outvars[0]
        if root in wanted and root not in taken and size_of(root) >= least and _is_computed(e):
            own = 1 << number
            number += 1
            tree, leaves = _tree(root, made, stored)
            if len(tree) <= MOST_EQUATIONS:
                _join(groups, _Group(root.aval.shape, own, [root], tree, leaves), bits)
            depends |= own
        if depends:
            bits.update(dict.fromkeys(e.outvars, depends))
    groups = [g for g in groups if len(g.roots) > 1]
    if not groups:
        return []
    order = {v: k for k, e in enumerate(equations) for v in e.outvars}
    readers: dict = {}
    for e in equations:
        for v in variables(e):
            readers.setdefault(v, []).append(e)
    for region in regions:  # what they compute again, too
        for e in region.equations:
            for v in variables(e):
                readers.setdefault(v, []).append(e)
    read = set(filter(is_variable, results))
    found = [g.region(made, order, readers, read) for g in groups]
    return [] if _cyclic(equations, [*regions, *found]) else found


class _Group:
    """roots: arrays of this shape. bits: theirs. tree: what the equations that compute them make. leaves: what these read."""

    def __init__(self, shape, bits, roots, tree, leaves):
        self.shape, self.bits, self.roots, self.tree, self.leaves = shape, bits, roots, tree, leaves

    def rows(self) -> set:
        return {v for v in self.leaves if v.aval.shape == self.shape}

    def region(self, made, order, readers, results) -> Region:
        """The region makes its arrays, and what nothing else reads of what they are computed from. The rest is computed again."""
        own, values = set(self.roots), sorted(self.tree, key=order.__getitem__)
        for v in reversed(values):
            if v not in results and all(e.outvars and e.outvars[0] in own for e in readers.get(v, ())):
                own.add(v)
        return Region(self.shape, len(self.shape) - 1, [made[v] for v in values], own)


def _join(groups, new, bits):
    """Adds a group of one array to the last group that it may join, or to `groups`."""
    depends = 0
    for v in new.leaves:
        depends |= bits.get(v, 0)
    for g in reversed(groups):
        fits = g.shape == new.shape and not g.rows().isdisjoint(new.rows()) and not depends & g.bits
        if fits and len(g.rows() | new.rows()) <= MOST_ROWS:
            g.bits |= new.bits
            g.roots += new.roots
            g.tree |= new.tree
            g.leaves |= new.leaves
            return
    groups.append(new)


def _of_products(equations) -> set:
    """The arrays that products read, under whatever shape."""
    found: set = set()
    for e in reversed(equations):
        renames = e.primitive.name in RENAMING and size_of(e.outvars[0]) == size_of(e.invars[0])
        if e.primitive.name == PRODUCT or (renames and e.outvars[0] in found):
            found.update(variables(e))
    return found


def _is_computed(e) -> bool:
    """Whether an equation computes floating-point numbers element by element."""
    (out, *others), name = e.outvars, e.primitive.name
    shape = out.aval.shape
    own = not others and not e.effects and (name in ELEMENTWISE or name in SAME) and compat_rewriting.runs_anywhere(e)
    types = all(getattr(v.aval, "dtype", None) in DTYPES for v in (*e.invars, *e.outvars))
    sizes = len(shape) > 1 and all(isinstance(n, int) for n in shape) and 1 < shape[-1] < math.prod(shape)
    return own and types and sizes and jnp.issubdtype(out.aval.dtype, jnp.floating)


def _tree(root, made, stored):
    """(values that are computed for root, the values in memory that they are computed from)."""
    tree, leaves, pending, shape = {root}, set(), list(variables(made[root])), root.aval.shape
    while pending and len(tree) <= MOST_EQUATIONS:
        v = pending.pop()
        if v in tree or v in leaves:
            continue
        e = made.get(v)
        inside = v.aval.shape == shape and e is not None and v not in stored and not e.effects and len(e.outvars) == 1
        inside = inside and all(getattr(x.aval, "dtype", None) in DTYPES for x in e.invars)
        spread = inside and e.primitive.name == "broadcast_in_dim" and 2 * size_of(e.invars[0]) <= size_of(v)
        if spread or (inside and (e.primitive.name in ELEMENTWISE or e.primitive.name in SAME)):
            tree.add(v)
            pending += variables(e)
        else:
            leaves.add(v)
    return tree, leaves


def _cyclic(equations, regions) -> bool:
    """Whether regions depend on each other, by way of equations or not."""
    of = {v: region for region in regions for v in region.made}
    nodes = [of.get(e.outvars[0], e) if e.outvars else e for e in equations]
    at: dict = {}
    for e, node in zip(equations, nodes):
        at.update(dict.fromkeys(e.outvars, id(node)))
    needs: dict = {id(node): set() for node in nodes}
    effect = None
    for e, node in zip(equations, nodes):
        own = node.equations if isinstance(node, Region) else [e]
        needs[id(node)].update(at[v] for x in own for v in variables(x) if v in at)
        if e.effects:
            needs[id(node)].update([effect] if effect else ())
            effect = id(node)
    inside = {id(region): {v for x in region.equations for v in x.outvars} for region in regions}
    for region in regions:  # what it computes again it does not wait for
        needs[id(region)] = {
            at[v] for x in region.equations for v in variables(x) if v in at and v not in inside[id(region)]
        }
    readers: dict = {}
    for node, own in needs.items():
        own.discard(node)
        for other in own:
            readers.setdefault(other, []).append(node)
    waits = {node: len(own) for node, own in needs.items()}
    ready, done = [node for node, n in waits.items() if not n], 0
    while ready:
        done += 1
        for node in readers.get(ready.pop(), ()):
            waits[node] -= 1
            ready += [node] if not waits[node] else []
    return done < len(needs)
