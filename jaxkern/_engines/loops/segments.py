"""Long dimensions of a loop's body that are sliced and concatenated in pieces, such as the gates of a recurrent unit.

    cut, whole = find(program, moved)

A body that reads `x[:, :n]` and `x[:, n:]` of an array `[lanes, 2 n]` computes on two arrays `[lanes, n]`. So the dimension is cut
into segments where a slice, a concatenation or a padding begins or ends. Cuts of an array are cuts of the arrays that it is sliced
from or joined of, and of all arrays that share the dimension. A body that reads neighbours, `x[1:] - x[:-1]`, would cut between
all elements: such a dimension has no segments.
"""

from jaxkern._engines.jaxpr import Dim

MOST = 16  # elements of a dimension that is taken apart into its elements
MOST_PARTS = 36  # of an array that has lanes besides, or is a matrix that acts on a state; of another one MOST
MOVES = ("slice", "concatenate", "pad", "rev")  # operations that move data along the dimensions that they change


def find(program, moved, rigid=()) -> tuple:
    """({dimension: (where its segments start, their dimensions)}, dimensions that are one segment of others).

    moved: (dimension, the step that moves data along it). rigid: dimensions that stay whole. Dimensions that are related to none
    of more than MOST elements are in neither. Dimensions of the same elements are united.
    """
    if all(d.same().size <= MOST for d, _ in moved):
        return {}, frozenset()
    runs, rigid = [], {*rigid, *(d.same() for d, step in moved if step.name not in MOVES)}
    for step in program.steps:
        if step.name in MOVES:
            _relate(step, runs, rigid)
    cuts = {}
    for group in _groups(runs):
        if any(d.size > MOST for d in group) and rigid.isdisjoint(group):
            cuts |= _cuts(group, [r for r in runs if r[0] in group or r[2] in group])
    runs = [r for r in runs if r[0] in cuts or r[2] in cuts]
    segments = {}
    for d, starts in cuts.items():
        sizes = [end - start for start, end in zip(starts, (*starts[1:], d.size))]
        segments[d] = starts, [d] if len(starts) == 1 else [None if n == 1 else Dim(n) for n in sizes]
    for x, first_x, y, first_y, n in runs:
        if x is not None and y is not None:
            a, b = (
                [own for start, own in zip(*segments[d]) if at <= start < at + n]
                for d, at in ((x, first_x), (y, first_y))
            )
            for own, other in zip(a, b, strict=True):
                if own is not None and other is not None:
                    own.unite(other)
    program.refresh()
    cut = {d: (starts, [own and own.same() for own in dims]) for d, (starts, dims) in segments.items() if len(dims) > 1}
    return cut, frozenset(d.same() for d, (_, dims) in segments.items() if len(dims) == 1)


def _relate(step, runs, rigid) -> None:
    """Adds to runs (dimension of x, first element, dimension of y, first element, count) for an operand x of a step and its result y
    that have these elements in common, and to `rigid` dimensions between which single elements move. A dimension of one
    element is None."""
    params, y = step.params, step.result
    if step.name == "concatenate":
        axis, first = params["dimension"], 0
        for x in step.operands:
            runs.append((x.dims[axis], 0, y.dims[axis], first, x.aval.shape[axis]))
            first += x.aval.shape[axis]
        return
    x = step.operands[0]
    for axis, (d, e) in enumerate(zip(x.dims, y.dims)):
        size, first_x, first_y, is_run = x.aval.shape[axis], 0, 0, True
        if step.name == "slice":
            first_x, size = params["start_indices"][axis], y.aval.shape[axis]
            is_run = size == 1 or (params["strides"] or (1,) * len(y.dims))[axis] == 1
        elif step.name == "pad":
            low, high, between = map(int, params["padding_config"][axis])  # negative ones cut elements off
            first_x, first_y, is_run = max(-low, 0), max(low, 0), not between
            size += min(low, 0) + min(high, 0)
        else:
            is_run = axis not in params["dimensions"]
        if not is_run:
            rigid.update(v for v in (d, e) if v is not None)
        elif (d is not e or first_x != first_y) and size > 0:  # a padding may shift elements along one dimension
            runs.append((d, first_x, e, first_y, size))


def _groups(runs) -> list:
    """The sets of dimensions that runs relate."""
    group: dict = {}
    for x, _, y, _, _ in runs:
        own = {d for d in (x, y) if d is not None}
        own = own.union(*(group.get(d, ()) for d in own))
        group.update(dict.fromkeys(own, own))
    return list({id(g): g for g in group.values()}.values())


def _cuts(group, runs) -> dict:
    """{dimension of a group: where its segments start}; empty if there are too many."""
    cuts = {d: {0} for d in group}
    for x, first_x, y, first_y, n in runs:
        for d, first in ((x, first_x), (y, first_y)):
            if d is not None:
                cuts[d] |= {first, first + n} - {d.size}
    count = 0
    while count != (count := sum(map(len, cuts.values()))):
        for x, first_x, y, first_y, n in runs:
            if x is not None and y is not None:
                cuts[y] |= {c - first_x + first_y for c in cuts[x] if first_x < c < first_x + n}
                cuts[x] |= {c - first_y + first_x for c in cuts[y] if first_y < c < first_y + n}
        if any(len(own) > MOST for own in cuts.values()):
            return {}
    return {d: tuple(sorted(own)) for d, own in cuts.items()}
