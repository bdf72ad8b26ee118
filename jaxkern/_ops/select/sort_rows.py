"""sort_rows: rows in sorted order, and where their elements were. The kernel is in ffi/kernels/select/sort_rows.cuh.

    sort_rows_p  (x [..., columns])  ->  values like x, indices int32 [..., columns], or one of the two, as `wanted` says

The order is stable, ascending or descending; NaN is the greatest number, and -0 equals 0.
"""

import math
import sys
import typing

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkern._core import algorithms, compat, launch
from jaxkern._core.define import ceil_div
from jaxkern._core.params import Params
from jaxkern._core.primitive import bind, set_jvp
from jaxkern._core.signature import FLAT, Signature, local, primitive
from jaxkern._ops.select.top_k import DTYPES, element, gathered

HEADER = "select/sort_rows.cuh"
ARGS = Params(HEADER, "SortRowsArgs")
ALGORITHMS = ("network",)
WIDTH, THREADS, OWN = 4096, 256, 8


class Problem(typing.NamedTuple):
    """Rows of so many columns."""

    rows: int
    columns: int
    dtype: str = "float32"


def fits(algorithm: str, p: Problem, device=None) -> bool:
    del device
    return algorithm == "network" and p.dtype in DTYPES and 0 < p.columns <= WIDTH and 0 < p.rows < 2**31


def choose(p: Problem, device=None) -> str | None:
    """The algorithm; None: XLA."""
    return "network" if fits("network", p, device) else None


algorithms.register(sys.modules[__name__], "sort")


def plan(device, operands, results, *, descending, wanted) -> launch.Plan | None:
    """The plan for x [..., columns]; None if there is no kernel for it."""
    del results
    (x,) = operands
    *batch, columns = x.shape
    p = Problem(math.prod(batch), columns, x.dtype.name)
    forced = algorithms.forced("sort")
    if forced == "xla" or algorithms.pick("sort", forced, p, device) is None:
        return None
    width = max(OWN, 1 << (columns - 1).bit_length())
    threads = max(THREADS, width // OWN)
    outputs = {n: launch.result(wanted.index(n)) if n in wanted else launch.null for n in ("values", "indices")}
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    args = ARGS(
        x=launch.operand(0),
        **outputs,
        rows=p.rows,
        width=columns,
        largest=_largest(x.dtype) if floating else 0,
        flipped=2**32 - 1 if descending else 0,
    )
    name = f"SortRows<{element(x.dtype)}, {width}, {threads}>"
    return launch.Plan(
        "network", (launch.Launch(HEADER, name, [args], ceil_div(p.rows, threads * OWN // width), threads),)
    )


def _largest(dtype) -> int:
    """The bits of the largest number that is not NaN."""
    most = np.array(np.inf, dtype)
    most = most if np.isinf(most) else np.array(jnp.finfo(dtype).max, dtype)
    return int(most.view(f"uint{8 * dtype.itemsize}"))


# ---- the primitive


def reference(x, *, descending, wanted):
    column = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    if not descending:
        values, indices = lax.sort([x, column], num_keys=1, is_stable=True)
    else:  # the ascending order of the reversed row, from its end: equal elements then come in their own order
        values, indices = (
            a[..., ::-1] for a in lax.sort([x[..., ::-1], column[..., ::-1]], num_keys=1, is_stable=True)
        )
    return [{"values": values, "indices": indices}[n] for n in wanted]


sort_rows_p = primitive(
    "jaxkern_sort_rows",
    Signature(
        {"x": "any *batch columns"},
        lambda operands, params: [{"values": "x", "indices": "int32"}[n] + " *batch columns" for n in params["wanted"]],
        layout=FLAT,
        whole={"columns"},
    ),
    reference,
    shard=local,
    makes_nan=False,
    plan=plan,
    dtypes=DTYPES,
)


def _jvp(primals, tangents, *, descending, wanted):
    values, indices = bind(sort_rows_p, *primals, descending=descending, wanted=("values", "indices"))
    both = {
        "values": (values, gathered(values, tangents[0], indices)),
        "indices": (indices, compat.zero_tangent(indices)),
    }
    return tuple(zip(*(both[n] for n in wanted)))


set_jvp(sort_rows_p, _jvp)
