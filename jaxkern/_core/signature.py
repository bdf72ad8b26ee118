"""Signatures: the operands and results of a primitive by name, and the rules that follow from them.

    ADD = Signature(
        {"x": "T *batch *outer rows *inner", "index": "integer *batch count", "source": "T *batch! *outer count *inner"},
        "T *batch *outer rows *inner",
        optional={"alpha": "wide", "keys": "uint32 positions", "order": "uint32 positions"},
        exact={"rows", "count"}, whole={"positions"},
    )

A declaration is a dtype, then the names of the dimensions. Dimensions of one name have one size; `name?` may have size 1
instead. `*group` stands for any number of dimensions: the layout tells how many from the parameters, and the first operand
how many one more group has. The dimensions of `*group!` all have size 1, or all have their full size. T is one dtype for all
operands, `wide` the dtype that T is computed in, `integer` any integer dtype, `any` any dtype. Other dtypes are NumPy's names
or, of results, the names of parameters; so are the sizes of dimensions that no operand has.

Functions of an operation (reference, plan, shard, derivatives) take all operands in this order, None for an optional one that
is absent. The primitive itself takes those that are present; its parameter `given` names the optional ones among them.
"""

import collections
import functools
import typing

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec

from jaxkern._core import define, partition, validate
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind, signatures


class Layout(typing.NamedTuple):
    """How many dimensions groups have, as the parameters tell.

    ranks(params): {group: its number of dimensions}, for all groups but one.
    grown(params, group, at): the parameters for one more dimension of this group, dimension `at` of the first operand.
    """

    ranks: typing.Callable
    grown: typing.Callable


# Operands "*lead row *trail", where the parameter `axis` is the position of the row.
AXIS = Layout(
    lambda params: {"lead": params["axis"]},
    lambda params, group, at: params | {"axis": params["axis"] + (group == "lead")},
)
# At most one group.
FLAT = Layout(lambda params: {}, lambda params, group, at: params)


class Dim(typing.NamedTuple):
    name: str
    group: str  # the name itself for a dimension that is in no group
    mark: str  # "?", "!" or ""


class Word(typing.NamedTuple):
    """A dimension, or a group of them, in a declaration."""

    name: str
    grouped: bool
    mark: str


def _words(text) -> list[Word]:
    return [Word(w.strip("*?!"), w[0] == "*", w[-1] if w[-1] in "?!" else "") for w in text.split()[1:]]


class Signature:
    """The operands and results of a primitive.

    operands, optional: {name: declaration}.
    results: the declaration of the result, a list of declarations, or a function of (operands, params) that returns a list.
    sizes(operands, params): sizes of dimensions that are not the size of an operand's dimension or a parameter.
    dropped: {group: optional operands that are not valid if the group grows under vmap}: they are then left out.
    exact, whole: the dimensions, or groups, that several devices split only into equal parts, or never.
    summed: the dimensions that devices sum over if no result has them. By default all that are not `whole`.
    """

    def __init__(
        self,
        operands,
        results,
        optional=None,
        *,
        layout=AXIS,
        sizes=lambda operands, params: {},
        dropped=None,
        exact=(),
        whole=(),
        summed=None,
    ):
        self.texts = operands | (optional or {})
        self.operands = {n: (text.split()[0], _words(text)) for n, text in self.texts.items()}
        self.results, self.several = results, not isinstance(results, str)
        self.required, self.optional = len(operands), tuple(optional or ())
        self.named = collections.namedtuple("Operands", self.operands, defaults=[None] * len(self.optional))
        self.layout, self.sizes, self.dropped = layout, sizes, dropped or {}
        self.exact, self.whole, self.summed = exact, whole, summed

    def expand(self, flat, params) -> tuple:
        """(all operands by name, the parameters without `given`) of the operands and the parameters of the primitive."""
        params = dict(params)
        given = params.pop("given", "").split()
        return self.named(*flat[: self.required], **dict(zip(given, flat[self.required :], strict=True))), params

    def compress(self, operands, params) -> tuple:
        """The inverse of `expand`; optional operands at the end may be left out."""
        if "given" in params:
            return operands, params
        operands = self.named(*operands)
        given = " ".join(n for n in self.optional if getattr(operands, n) is not None)
        present = [x for k, x in enumerate(operands) if k < self.required or x is not None]
        return present, params | {"given": given} if given else params

    # ---- dimensions

    def _ranks(self, rank, params) -> dict:
        """The number of dimensions of each group, and 1 for each other dimension; rank: of the first operand."""
        ranks = dict(self.layout.ranks(params))
        for _, words in self.operands.values():
            ranks |= {w.name: 1 for w in words if not w.grouped}
            for w in words:
                if w.name not in ranks:  # in the first operand
                    ranks[w.name] = rank - sum(ranks.get(v.name, not v.grouped) for v in words)
        return ranks

    def _dims(self, words, ranks) -> list[Dim]:
        numbered = lambda w: [f"{w.name}{k}" for k in range(ranks[w.name])] if w.grouped else [w.name]
        return [Dim(name, w.name, w.mark) for w in words for name in numbered(w)]

    def _declared(self, operands, params) -> tuple:
        """[(operand, dtype, dimensions)] of the operands that are present, and [(dtype, dimensions)] of the results."""
        ranks = self._ranks(operands[0].ndim, params)
        found = self.results(operands, params) if callable(self.results) else self.results
        results = [found] if isinstance(found, str) else found
        return (
            [
                (x, dtype, self._dims(words, ranks))
                for x, (dtype, words) in zip(operands, self.operands.values())
                if x is not None
            ],
            [(text.split()[0], self._dims(_words(text), ranks)) for text in results],
        )

    # ---- types

    def types(self, name, *flat, **given):
        """The types of the results; checks the operands."""
        operands, params = self.expand(flat, given)
        present, results = self._declared(operands, params)
        dtype = next((x.dtype for x, kind, _ in present if kind == "T"), None)
        sizes, entries = self.sizes(operands, params), {}
        fits = all(len(dims) == x.ndim and _is_of(x.dtype, kind, dtype) for x, kind, dims in present)
        for x, _, dims in present if fits else ():
            for dim, size, entry in zip(dims, x.shape, validate.explicit_spec(x)):
                if not (dim.mark and _is_one(size)):
                    fits &= sizes.setdefault(dim.name, size) == size
                    entries.setdefault(dim.name, entry)
        for x, _, dims in present if fits else ():
            for group in {dim.group for dim in dims if dim.mark == "!"}:
                own = [(n, sizes.get(dim.name, n)) for dim, n in zip(dims, x.shape) if dim.group == group]
                fits &= all(n == m for n, m in own) or all(_is_one(n) for n, _ in own)
        if not fits:
            types = ", ".join(f"{n} {x.str_short()}" for n, x in operands._asdict().items() if x is not None)
            raise ValueError(
                f"{name}: operands do not fit: {types}, {', '.join(f'{k}={v}' for k, v in params.items())}"
            )
        mesh = next((x.sharding.mesh for x, *_ in present if not x.sharding.mesh.empty), None)
        found = []
        for kind, dims in results:
            names = [dim.name for dim in dims]
            spec = PartitionSpec(*distinct([entries.get(n) for n in names]))
            more = {} if mesh is None else {"sharding": NamedSharding(mesh, spec)}
            shape = tuple(sizes[n] if n in sizes else params[n] for n in names)
            own = dtype if kind == "T" else computing(dtype) if kind == "wide" else params.get(kind, kind)
            found.append(operands[0].update(shape=shape, dtype=jnp.dtype(own), weak_type=False, **more))
        return found if self.several else found[0]

    # ---- vmap

    def batch(self, prim, flat, flat_dims, **given):
        """The batch becomes one more dimension of a group that all batched operands have: of the group in which it lies in the
        first one, if possible. Operands without the group are shared by the batch."""
        operands, params = self.expand(flat, given)
        dims, _ = self.expand(flat_dims, given)
        ranks = self._ranks(operands[0].ndim - (dims[0] is not None), params)
        begin = lambda words, group: sum(ranks.get(w.name, 1) for w in words[: [w.name for w in words].index(group)])
        words = {n: own for n, (_, own) in self.operands.items()}
        groups = {n: [w.name for w in own if w.grouped] for n, own in words.items()}
        batched = [n for n in words if getattr(dims, n) is not None]
        size = getattr(operands, batched[0]).shape[getattr(dims, batched[0])]

        lost = [g for g, names in self.dropped.items() if set(names) & set(batched)]
        leading = [n for n in batched if not any(n in names for names in self.dropped.values())] or list(words)[:1]
        shared = lost or [g for g in groups[leading[0]] if all(g in groups[n] for n in leading)]
        shared = [g for g in shared if g not in self.dropped] or shared
        if not shared:
            raise NotImplementedError(f"{prim.name}: no batching rule for batches of {', '.join(batched)} alone")
        first, at = leading[0], getattr(dims, leading[0]) or 0
        place = {g: min(max(at - begin(words[first], g), 0), ranks[g]) for g in shared}
        group = min(shared, key=lambda g: abs(at - begin(words[first], g) - place[g]))
        at = place[group]

        def placed(n, x, d):
            if x is None or n in self.dropped.get(group, ()):
                return None
            mark = next((w.mark for w in words[n] if w.name == group), None)
            if mark is None:
                return x
            where = begin(words[n], group) + at
            if d is not None:
                return jnp.moveaxis(x, d, where)  # a no-op if d == where
            x = jnp.expand_dims(x, where)
            return x if mark else jnp.broadcast_to(x, (*x.shape[:where], size, *x.shape[where + 1 :]))

        found = self.named(*(placed(n, x, d) for n, x, d in zip(words, operands, dims)))
        whole = next(n for n, own in words.items() if any(w.name == group and not w.mark for w in own))
        of = lambda n: slice(begin(words[n], group), begin(words[n], group) + ranks[group] + 1)
        full = getattr(found, whole).shape[of(whole)]
        for n, own in words.items():
            x = getattr(found, n)
            if x is not None and Word(group, True, "!") in own and x.shape[of(n)] not in (full, (1,) * len(full)):
                shape = (*x.shape[: of(n).start], *full, *x.shape[of(n).stop :])
                found = found._replace(**{n: jnp.broadcast_to(x, shape)})
        results = self.results(found, params) if callable(self.results) else self.results
        params = self.layout.grown(params, group, begin(words[whole], group) + at)
        places = [begin(_words(text), group) + at for text in ([results] if isinstance(results, str) else results)]
        return bind(prim, *found, **params), places if self.several else places[0]

    # ---- several devices

    def partition(self, shard, prim, ctx, flat, params):
        """Lowers a call to one part per device: shard(prim, over, *operands, **params), see `partition.lower`. `over` has the
        mesh axes of groups, too."""
        operands, own = self.expand(ctx.avals_in, params)
        present, results = self._declared(operands, own)
        dims = [*(of for *_, of in present), *(of for _, of in results)]
        groups = {dim.name: dim.group for of in dims for dim in of}
        exact, whole = (f(operands, own) if callable(f) else f for f in (self.exact, self.whole))
        of = lambda names: {name for name, group in groups.items() if name in names or group in names}
        left = {dim.name for _, own in results for dim in own}
        summed = set(groups) - of(whole) if self.summed is None else of(self.summed)

        def part(over, *parts, **params):
            along = {w.name: () for _, words in self.operands.values() for w in words}
            for name, group in groups.items():
                along[group] = (*along.get(group, ()), *over.get(name, ()))
            operands, params = self.expand(parts, params)
            return shard(prim, over | along, *operands, **params)

        names = [[dim.name for dim in own] for own in dims]
        return partition.lower(ctx, prim, flat, params, names, part, of(exact), sorted(summed - left), of(whole))


def _is_one(n) -> bool:
    return isinstance(n, int) and n == 1


def _is_of(dtype, kind, of_all) -> bool:
    if kind in ("T", "wide"):
        return dtype == (of_all if kind == "T" else computing(of_all))
    return kind == "any" or (jnp.issubdtype(dtype, jnp.integer) if kind == "integer" else dtype == jnp.dtype(kind))


def distinct(entries) -> list:
    """Entries of a PartitionSpec, with None for one that shares a mesh axis with an earlier one."""
    used, found = set(), []
    for entry in entries:
        axes = {*entry} if isinstance(entry, tuple) else {entry} - {None}
        found.append(None if axes & used else entry)
        used |= axes
    return found


def primitive(
    name,
    signature,
    reference,
    *,
    batch=None,
    shard=None,
    partition=None,
    plan=None,
    adapt=None,
    prepare=None,
    **options,
) -> Primitive:
    """A primitive of this signature. Arguments are those of `define.primitive`, whose functions take operands by name.

    batch(prim, operands, dims, params): (results, their batch dimensions) where `Signature.batch` does not apply, else None.
    shard: see `Signature.partition`. Without it, XLA partitions the reference.
    plan(device, operands, results, **params), adapt(prim, *operands, **params), prepare(*operands, **params): as for
        `define.lower_to_kernels`.
    """

    def by_name(f):
        def named(*flat, **given):
            operands, params = signature.expand(flat, given)
            return f(*operands, **params)

        return f and named

    def batched(prim, flat, dims, **given):
        operands, params = signature.expand(flat, given)
        found = batch and batch(prim, operands, signature.expand(dims, given)[0], params)
        return found or signature.batch(prim, flat, dims, **given)

    def planned(device, operands, results, **given):
        named, params = signature.expand(operands, given) if isinstance(operands, list) else (operands, dict(given))
        params.pop("given", None)
        return plan(device, named, results, **params)

    prim = define.primitive(
        name,
        functools.partial(signature.types, name),
        batched,
        by_name(reference),
        several=signature.several,
        plan=plan and planned,
        partition=partition or (shard and functools.partial(signature.partition, shard)),
        adapt=adapt and (lambda prim, *flat, **given: by_name(by_name(functools.partial(adapt, prim))(*flat, **given))),
        prepare=prepare and (lambda *flat, **given: by_name(by_name(prepare)(*flat, **given))),
        **options | {key: by_name(options[key]) for key in ("on_cpu", "taylor") if key in options},
    )
    signatures[prim] = signature
    return prim
