"""The docstrings of the elementwise functions that are made from rows of the table."""

import re

BOOLEAN = ("test", "compare", "logical")  # the types of rows whose results are boolean
CONSTANT = ("sign", "floor", "ceil", "round")  # between jumps

_DTYPES = {
    "float": "floating-point; integers promote as in `jnp`",
    "number": "floating-point or of integers",
    "test": "floating-point; integers promote as in `jnp`",
    "compare": "of real numbers or booleans",
    "logical": "of booleans; numbers other than 0 count as True",
    "select": "of real numbers or booleans",
}
_VALUES = {
    "condition": "[True, False, True]",
    "x": "[0.25, 1.5, 2.0]",
    "y": "[0.5, 1.5, 3.0]",
    "z": "[1.0, 2.0, 3.0]",
    "weight": "[0.0, 0.5, 1.0]",
    "min": "[0.5, 0.5, 0.5]",
    "max": "[1.0, 2.0, 1.0]",
}
_TRUTHS = {"x": "[True, False, True]", "y": "[True, True, False]"}


def documentation(row) -> str:
    words = re.match(r"[a-z]{3,} ", row.summary)  # not a formula, such as e^x
    summary = row.summary[0].upper() + row.summary[1:] if words else row.summary
    several, boolean = len(row.arrays) > 1, row.types in BOOLEAN
    gap = "\n    " if len(summary) + len(row.like) > 90 else " "
    shape = "their common shape" if several else f"the shape of `{row.arrays[0]}`"
    dtype = "that they promote to" if several else "of `x`"
    lines = [f"{summary}, element by element:{gap}`{row.like}`.", "", "Args:", *_arguments(row), "", "Returns:"]
    if boolean:
        lines += [f"    Boolean array of {shape}."]
    else:
        lines += [
            f"    Array of {shape}, of the dtype {dtype}. float16, bfloat16 and",
            "    float32 are computed in float32 and rounded once. NaN and infinities propagate as in the expression.",
        ]
    lines += [
        "",
        "Raises:",
        "    TypeError: an operand is not an array, is complex, or has a dtype that is not listed.",
    ]
    lines += ["        A scalar argument is not one real number."] if row.parameters else []
    lines += ["    ValueError: the shapes do not broadcast."] if several else []
    lines += ["", _derivatives(row), "", *_cost(row), "", ">>> import jax, jax.numpy as jnp, jaxkern", *_example(row)]
    return "\n    ".join(lines) + "\n    "


def _arguments(row):
    names = row.arrays
    if row.types == "select":
        yield f"    {names[0]}: boolean array; numbers other than 0 count as True."
        names = names[1:]
    if len(row.arrays) == 1:
        yield f"    {names[0]}: an array of any shape, {_DTYPES[row.types]}."
    else:
        yield f"    {', '.join(names)}: arrays, {_DTYPES[row.types]}."
        yield "        Shapes broadcast, and the kernel reads each operand in place."
    yield from (f"    {name}: a real scalar, which may be traced and differentiated." for name, _ in row.parameters)


def _derivatives(row) -> str:
    if row.types in BOOLEAN:
        return "Derivatives: none, as the result is boolean."
    if row.name in CONSTANT:
        return "Derivatives: 0 in forward and reverse mode, as in `jnp`."
    by = "; one kernel computes the gradient" if row.gradient else "; XLA computes the gradient"
    by += f" by {' and '.join(row.arrays[k] for k in row.gradient)}" if row.gradient and len(row.arrays) > 1 else ""
    return f"Derivatives: forward and reverse mode, of any order{by}."


def _cost(row):
    used = range(len(row.arrays)) if row.uses is None else row.uses
    moved = _bytes(row, row.arrays, 1)
    if row.gradient:
        moved += f", its gradient {_bytes(row, [*(row.arrays[k] for k in used), 'cotangent'], len(row.gradient))}"
    size = "n elements" if row.types == "logical" else "n elements of e bytes"
    yield f"Cost: for {size}, the call moves {moved} bytes" + ("," if len(row.arrays) > 1 else ".")
    if len(row.arrays) > 1:
        yield "less where an operand is broadcast."


def _bytes(row, arrays, results) -> str:
    """The bytes of these operands and of the results, as an expression in n and e; booleans have one byte."""
    every = len(arrays) + results
    single = every if row.types == "logical" else ("condition" in arrays) + (row.types in BOOLEAN)
    terms = ((every - single, "n e"), (single, "n"))
    return " + ".join(f"{count} {of}" if count > 1 else of for count, of in terms if count)


def _example(row):
    values = _VALUES
    if row.types == "logical":
        values = _TRUTHS
    elif row.types == "test":
        values = {"x": "[-1.5, jnp.inf, jnp.nan]"}
    elif row.domain[0] <= -1.5:
        values = _VALUES | {"x": "[-1.5, 0.25, 2.0]"}
    given = {name: f"jnp.array({values[name]})" for name in row.arrays}
    given |= {name: "0.5" if default is None else repr(default) for name, default in row.parameters}
    yield f">>> {', '.join(given)} = {', '.join(given.values())}"
    yield f">>> expected = {row.like}"
    yield f">>> jnp.allclose(jaxkern.{row.name}({', '.join(given)}), expected).item()"
    yield "True"
