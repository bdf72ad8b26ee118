"""Results of row functions that kernels write over operands."""

from jaxkern._engines.rows.guards import place_of

# In these, the thread that writes an element of a row is the one that has read this element of the operands, or its block has read
# all of the row before. Elements that are picked are read by other threads, too.
IN_PLACE = ("thread", "lanes", "warp", "block", "cluster", "streaming", "split")


def in_place(function, algorithm) -> dict:
    """{operand: output of the kernel} for the pairs of `function.overwritten` that may share memory with this algorithm."""
    core, program, found = function.core, function.program, {}
    rows = {o.result: k for k, o in enumerate(core.outputs) if o.kind == "row"}
    picks = any(place_of(core, step) is not None for step in core.passes[0]) if core.passes else False
    if algorithm not in IN_PLACE or picks or any(last_of(v) is not program.row for v in views_of(core)):
        return found
    for operand, result in function.overwritten:
        x, y = program.operands[operand], program.results[result]
        same = y in rows and x.dims == y.dims and {*x.dims} == {*program.others, program.row}
        if same and x.dtype == core.outputs[rows[y]].dtype:
            found[operand] = rows[y]
    return found


def views_of(core) -> list:
    """The arrays of rows that a kernel reads and writes."""
    return [*(core.program.operands[k] for k in core.rows), *(o.result for o in core.of_kind("row"))]


def last_of(value):
    """The last dimension of an array."""
    return next(d for d in reversed(value.dims) if d is not None)
