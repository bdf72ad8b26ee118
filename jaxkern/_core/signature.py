"""Signatures: the operands and results of a primitive by name, and the rules that follow from them.

    ADD = Signature(
        {
            "x": "T *batch *outer rows *inner",
            "index": "integer *batch count",
            "source": "T *batch! *outer count *inner",
            "alpha?": "wide",
            "keys?": "uint32 positions",
            "order?": "uint32 positions",
        },
        "T *batch *outer rows *inner",
        exact={"rows", "count"}, whole={"positions"},
    )

An operand `name?` is optional. A declaration is a dtype, then the names of the dimensions. Dimensions of one name have one
size; `name?` may have size 1 instead. `*group` stands for any number of dimensions: the layout tells how many from the
parameters, or else the first operand that has the group. The dimensions of `*group!` all have size 1, or all have their
full size. Results have size 1 in dimensions `name-`, over which they are reduced; `name0` is the first dimension of a group.
T is one dtype for all operands, `wide` the dtype that T is computed in, `integer` any integer dtype, `any` any
dtype. The name of an operand stands for its dtype. Other dtypes are NumPy's names or, of results, the names of parameters; so
are the sizes of dimensions that no operand has.

Functions of an operation (reference, plan, shard, derivatives) take all operands in this order, None for an optional one that
is absent. The primitive itself takes those that are present; its parameter `given` names the optional ones among them.
"""

import collections
import dataclasses
import functools
import itertools
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
    grows: the groups that a batch may become a dimension of; None: all.
    first: whether a batch becomes the first dimension of its group, wherever it lies in the operands.
    """

    ranks: typing.Callable
    grown: typing.Callable = lambda params, group, at: params
    grows: tuple | None = None
    first: bool = False


# Operands "*lead row *trail", where the parameter `axis` is the position of the row.
AXIS = Layout(
    lambda params: {"lead": params["axis"]},
    lambda params, group, at: params | {"axis": params["axis"] + (group == "lead")},
)
# At most one group.
FLAT = Layout(lambda params: {})


class Dim(typing.NamedTuple):
    name: str
    group: str  # the name itself for a dimension that is in no group
    mark: str  # "?", "!", "-" or ""


class Word(typing.NamedTuple):
    """A dimension, or a group of them, in a declaration."""

    name: str
    grouped: bool
    mark: str


@functools.cache
def _parsed(text) -> tuple:
    """(dtype, words) of a declaration."""
    dtype, *words = text.split()
    return dtype, [Word(w.strip("*?!-"), w[0] == "*", w[-1] if w[-1] in "?!-" else "") for w in words]


@dataclasses.dataclass(frozen=True, eq=False)
class Signature:
    """The operands and results of a primitive.

    declared: {operand: declaration}, or a function of the parameters that returns it. "name?" is optional.
    results: the declaration of the result, or a list of several, or a function of (operands, params) that returns the list; with
        `single`, a function that returns one declaration.
    dtypes(params): {name in declarations: the dtype that it stands for}.
    sizes(operands, params): sizes of dimensions that are not the size of an operand's dimension or a parameter.
    dropped: {group: optional operands that are not valid if the group grows under vmap}: they are then left out.
    exact, whole: the dimensions, or groups, that several devices split only into equal parts, or never; or functions of
        (operands, params).
    summed: the dimensions that devices sum over if no result has them. By default all that are not `whole`.
    gathered: arrays that are split at a `whole` dimension are gathered, even where another one could be split in its place.
    """

    declared: typing.Any
    results: typing.Any
    layout: Layout = AXIS
    dtypes: typing.Callable = lambda params: {}
    sizes: typing.Callable = lambda operands, params: {}
    dropped: dict = dataclasses.field(default_factory=dict)
    exact: typing.Any = ()
    whole: typing.Any = ()
    summed: typing.Any = None
    single: bool = False
    gathered: bool = False

    @property
    def several(self) -> bool:
        return not (self.single or isinstance(self.results, str))

    @functools.cached_property
    def operands(self) -> dict:
        """{operand: declaration}"""
        return {name.rstrip("?"): text for name, text in self.declared.items()}

    @functools.cached_property
    def named(self) -> type:
        """The NamedTuple of the operands. Optional ones at the end may be left out."""
        trailing = itertools.takewhile(lambda name: name[-1] == "?", reversed(self.declared))
        return collections.namedtuple("Operands", self.operands, defaults=[None] * len(list(trailing)))

    @functools.cached_property
    def optional(self) -> list[str]:
        return [name[:-1] for name in self.declared if name[-1] == "?"]

    def of(self, params) -> "Signature":
        """The signature for these parameters."""
        return _of(self, tuple(params.items())) if callable(self.declared) else self

    def expand(self, flat, params) -> tuple:
        """(all operands by name, the parameters without `given`) of the operands and the parameters of the primitive."""
        given, own = params.get("given", "").split(), {n: value for n, value in params.items() if n != "given"}
        self, remaining = self.of(params), iter(flat)
        absent = set(self.optional) - set(given)
        return self.named(*(None if n in absent else next(remaining) for n in self.operands)), own

    def compress(self, operands, params) -> tuple:
        """The inverse of `expand`."""
        if "given" in params:
            return operands, params
        self = self.of(params)
        if not self.optional:
            return operands, params
        operands = self.named(*operands)
        given = [n for n in self.optional if getattr(operands, n) is not None]
        present = [x for n, x in operands._asdict().items() if x is not None or n not in self.optional]
        return present, params | {"given": " ".join(given)} if given else params

    # ---- dimensions

    @functools.cached_property
    def _words(self) -> dict:
        """{operand: its words}"""
        return {n: _parsed(text)[1] for n, text in self.operands.items()}

    def _ranks(self, counts, params) -> dict:
        """The number of dimensions of each group, and 1 for each other dimension; counts: of dimensions of the operands."""
        ranks = dict(self.layout.ranks(params))
        for words, count in zip(self._words.values(), counts):
            ranks |= {w.name: 1 for w in words if not w.grouped}
            for w in words if count is not None else ():
                if w.name not in ranks:
                    ranks[w.name] = count - sum(ranks.get(v.name, not v.grouped) for v in words)
        return ranks

    def _declared(self, operands, params) -> tuple:
        """[(operand, dtype, dimensions)] of the operands that are present, and [(dtype, dimensions)] of the results."""
        ranks = self._ranks([x if x is None else x.ndim for x in operands], params)

        def declared(text):
            dtype, words = _parsed(text)
            numbered = lambda w: [f"{w.name}{k}" for k in range(ranks[w.name])] if w.grouped else [w.name]
            return dtype, [Dim(name, w.name, w.mark) for w in words for name in numbered(w)]

        present = [(x, *declared(text)) for x, text in zip(operands, self.operands.values()) if x is not None]
        return present, list(map(declared, self._results(operands, params)))

    def _results(self, operands, params) -> list[str]:
        found = self.results(operands, params) if callable(self.results) else self.results
        return found if self.several else [found]

    # ---- types

    def types(self, name, *flat, **given):
        """The types of the results; checks the operands."""
        operands, params = self.expand(flat, given)
        self = self.of(params)
        present, results = self._declared(operands, params)
        dtypes = self.dtypes(params) | {n: x.dtype for n, x in operands._asdict().items() if x is not None}
        for x, kind, _ in present:
            if kind == "T":
                dtypes = {"T": x.dtype, "wide": computing(x.dtype)} | dtypes
        sizes, entries, broadcast = self.sizes(operands, params), {}, {}
        fits = all(len(dims) == x.ndim and _is_of(x.dtype, kind, dtypes) for x, kind, dims in present)
        for x, _, dims in present if fits else ():
            for dim, size, entry in zip(dims, x.shape, validate.explicit_spec(x)):
                if not (dim.mark and _is_one(size)):
                    fits &= sizes.setdefault(dim.name, size) == size
                    if dim.mark:
                        broadcast[dim.name] = broadcast.get(dim.name) or entry
                    else:
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
        # 1 where a result is reduced, and where all operands broadcast.
        sizes = {None: 1} | {dim.name: 1 for *_, dims in present for dim in dims} | sizes
        entries = broadcast | entries
        for kind, dims in results:
            names = [None if dim.mark == "-" else dim.name for dim in dims]
            spec = PartitionSpec(*distinct([entries.get(n) for n in names]))
            more = {} if mesh is None else {"sharding": NamedSharding(mesh, spec)}
            shape = tuple(sizes[n] if n in sizes else params[n] for n in names)
            dtype = jnp.dtype(dtypes[kind] if kind in dtypes else params.get(kind, kind))
            found.append(flat[0].update(shape=shape, dtype=dtype, weak_type=False, **more))
        return found if self.several else found[0]

    # ---- vmap

    def batch(self, prim, flat, flat_dims, **given):
        """The batch becomes one more dimension of a group that all batched operands have: of the group in which it lies in the
        first one, if possible. Operands without the group are shared by the batch."""
        operands, params = self.expand(flat, given)
        dims, _ = self.expand(flat_dims, given)
        self = self.of(params)
        ranks = self._ranks([x if x is None else x.ndim - (d is not None) for x, d in zip(operands, dims)], params)
        before = lambda words, group: itertools.takewhile(lambda w: w.name not in (group, f"{group}0"), words)
        begin = lambda words, group: sum(ranks.get(w.name, 1) for w in before(words, group))
        words = self._words
        groups = {n: [w.name for w in own if w.grouped] for n, own in words.items()}
        batched = [n for n in words if getattr(dims, n) is not None]
        size = getattr(operands, batched[0]).shape[getattr(dims, batched[0])]

        lost = [g for g, names in self.dropped.items() if set(names) & set(batched)]
        leading = [n for n in batched if not any(n in names for names in self.dropped.values())] or list(words)[:1]
        shared = lost or [g for g in groups[leading[0]] if all(g in groups[n] for n in leading)]
        shared = [g for g in shared if self.layout.grows is None or g in self.layout.grows]
        shared = [g for g in shared if g not in self.dropped] or shared
        if not shared:
            raise NotImplementedError(f"{prim.name}: no batching rule for batches of {', '.join(batched)} alone")
        first, at = leading[0], getattr(dims, leading[0]) or 0
        most = {g: 0 if self.layout.first else ranks[g] for g in shared}
        place = {g: min(max(at - begin(words[first], g), 0), most[g]) for g in shared}
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
        whole = next((n for n, own in words.items() if Word(group, True, "") in own), first)
        of = lambda n: slice(begin(words[n], group), begin(words[n], group) + ranks[group] + 1)
        full = getattr(found, whole).shape[of(whole)]
        for n, own in words.items():
            x = getattr(found, n)
            if x is not None and Word(group, True, "!") in own and x.shape[of(n)] not in (full, (1,) * len(full)):
                shape = (*x.shape[: of(n).start], *full, *x.shape[of(n).stop :])
                found = found._replace(**{n: jnp.broadcast_to(x, shape)})
        places = [begin(_parsed(text)[1], group) + at for text in self._results(found, params)]
        params = self.layout.grown(params, group, begin(words[whole], group) + at)
        return bind(prim, *found, **params), places if self.several else places[0]

    # ---- several devices

    def partition(self, shard, prim, ctx, flat, params):
        """Lowers a call to one part per device: shard(prim, over, *operands, **params), see `partition.lower`. `over` has the
        mesh axes of groups, too."""
        operands, own = self.expand(ctx.avals_in, params)
        self = self.of(own)
        present, results = self._declared(operands, own)
        dims = [*(of for *_, of in present), *(of for _, of in results)]
        groups = {dim.name: dim.group for of in dims for dim in of}
        exact, whole = (f(operands, own) if callable(f) else f for f in (self.exact, self.whole))
        of = lambda names: {name for name, group in groups.items() if name in names or group in names}
        summed = set(groups) - of(whole) if self.summed is None else of(self.summed)
        summed -= {dim.name for _, own in results for dim in own if dim.mark != "-"}

        def part(over, *parts, **params):
            along = {w.name: () for words in self._words.values() for w in words}
            for name, group in groups.items():
                along[group] = (*along.get(group, ()), *over.get(name, ()))
            operands, params = self.expand(parts, params)
            return shard(prim, over | along, *operands, **params)

        names = [[dim.name for dim in own] for own in dims]
        return partition.lower(
            ctx,
            prim,
            flat,
            params,
            names,
            part,
            of(exact),
            [n for n in groups if n in summed],
            of(whole),
            self.gathered,
        )


@functools.lru_cache(maxsize=1024)  # eager calls ask for it, too
def _of(signature, params):
    return _declaring(signature, tuple(signature.declared(dict(params)).items()))


@functools.cache
def _declaring(signature, declared):
    return dataclasses.replace(signature, declared=dict(declared))


def numbered(name, count, text) -> dict:
    """So many operands of one declaration."""
    return {f"{name}{k}": text for k in range(count)}


def _is_one(n) -> bool:
    return isinstance(n, int) and n == 1


def _is_of(dtype, kind, dtypes) -> bool:
    if kind in ("any", "integer"):
        return kind == "any" or jnp.issubdtype(dtype, jnp.integer)
    return dtype == jnp.dtype(dtypes.get(kind, kind))


def distinct(entries) -> list:
    """Entries of a PartitionSpec, with None for one that shares a mesh axis with an earlier one that is kept."""
    used, found = set(), []
    for entry in entries:
        axes = {*entry} if isinstance(entry, tuple) else {entry} - {None}
        kept = not axes & used
        found.append(entry if kept else None)
        used |= axes if kept else set()
    return found


def local(prim, over, *parts, **params):
    """The part of one device of an operation that needs no messages."""
    del over
    return bind(prim, *parts, **params)


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
    """A primitive of this signature. Arguments are as for `define.primitive`, but functions take operands by name.

    batch(prim, operands, dims, params): (results, their batch dimensions) where `Signature.batch` does not apply, else None.
    shard: see `Signature.partition`. Without it, XLA partitions the reference.
    plan(device, operands, results, **params), adapt(prim, *operands, **params), prepare(*operands, **params): as for
        `define.primitive`.
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
        """operands: a list of types, or the types of what `prepare` returns, a NamedTuple or a tuple of all operands."""
        named, params = signature.expand(operands, given) if isinstance(operands, list) else (operands, given)
        if not hasattr(named, "_fields"):
            named = signature.of(params).named(*named)
        return plan(device, named, results, **{n: value for n, value in params.items() if n != "given"})

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
