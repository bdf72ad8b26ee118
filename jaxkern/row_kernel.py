"""Row functions: a function in jnp that reduces along one axis, as one kernel."""

import functools
from collections.abc import Callable

import jax
import jax.core
import jax.numpy as jnp

from jaxkern._core import validate
from jaxkern._engines.rows.function import trace
from jaxkern._engines.rows.primitive import apply


def row_kernel(f: Callable | None = None, *, axis: int = -1, name: str | None = None) -> Callable:
    """Makes one kernel of a function that is elementwise along all axes but one, and reduces along that one.

    Args:
        f: an ordinary function of arrays in terms of `jax.numpy`, `jax.nn` and `jax.lax`. Along `axis`, the row, it may
            reduce (sum, mean, max, min, prod, any, all, argmax, argmin, `lax.reduce` with a function of scalars) and
            broadcast the results. Along all other axes it is elementwise, except that what it returns may be summed
            over them. It may pick one element of each row (`jnp.take_along_axis`, a one-hot product), compare with `jnp.arange`, and use
            functions with derivatives of their own (`jax.custom_jvp`, `jax.custom_vjp`, `jax.lax.stop_gradient`).
            It returns an array or a pytree of arrays. Left out, the result is a decorator.
        axis: the row, an axis of the operand with most dimensions (the first of them).
        name: how errors name f; its own name by default.

    Returns: a function of arrays with `row_kernel(f)(*args) == f(*args)` up to rounding, of any real dtypes. Each operand is
    read once, in place, whether it has all axes, lacks some of the leading ones (a mask, a bias), or has one element for each column or for each
    row; each result is written once. float16, bfloat16 and float32 are computed in float32 and rounded once, at the end.
    Gradients of all orders are row functions, too, and run as one kernel each; gradients of operands that broadcast are summed
    in the same kernel, in the same order in every run. Functions that f closes over arrays of are functions of them.
    Where there is no kernel (on a CPU, where the row is not the last axis, for rows that are too long to sum gradients of columns in
    registers) XLA runs f.

    Raises, in a call:
        TypeError: f does what no row function can. The error names the operation and the line in f.
        ValueError: the axis is out of bounds.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> @jaxkern.row_kernel
    ... def scale_norm(x, scale):
    ...     return x * scale / jnp.linalg.norm(x, axis=-1, keepdims=True)
    >>> x = jnp.array([[3.0, 4.0], [0.0, 2.0]])
    >>> scale_norm(x, jnp.float32(10.0)).tolist()
    [[6.0, 8.0], [0.0, 10.0]]
    >>> jax.grad(lambda scale: scale_norm(x, scale).sum())(1.0).tolist()
    2.4000000953674316

    Source: ...
    """
    if f is None:
        return functools.partial(row_kernel, axis=axis, name=name)
    if not callable(f):
        raise TypeError(f"jaxkern.row_kernel: f must be a function of arrays, got {type(f).__name__}")
    axis = validate.static_axis("row_kernel", axis)
    if not isinstance(axis, int):
        raise TypeError(f"jaxkern.row_kernel: axis must be an int, got {axis!r}")
    own = name or getattr(f, "__name__", type(f).__name__)
    label = f"jaxkern.row_kernel: {'f' if own == '<lambda>' else own}"
    traces = {}

    def traced(operands, tree):
        key = tree, *((x.shape, x.dtype, x.weak_type) for x in operands), jax.dtypes.canonicalize_dtype(float)
        if key not in traces:
            rank = max(x.ndim for x in operands)
            at = next(k for k, x in enumerate(operands) if x.ndim == rank)
            if not -rank <= axis < rank:
                raise ValueError(f"{label}: axis {axis} is out of bounds for shape {operands[at].shape}")
            avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in operands]
            flat = lambda *xs: f(*jax.tree.unflatten(tree, xs))
            found = trace(flat, avals, (at, axis % rank), label)
            if all(n > 1 for n in operands[at].shape):
                found[0].check()
            if any(isinstance(c, jax.core.Tracer) for c in found[1]):
                return found
            traces[key] = found
        return traces[key]

    def kernel(*operands):
        leaves, tree = jax.tree.flatten(operands)
        if not leaves:
            raise TypeError("jaxkern.row_kernel: at least one operand is needed")
        for k, x in enumerate(leaves):
            validate.check_array("row_kernel", f"operand {k}", "an array or a number", x)
        arrays = list(map(jnp.asarray, leaves))
        function, captured, out = traced(arrays, tree)
        return jax.tree.unflatten(out, apply(function, [*arrays, *captured]))

    try:
        return functools.wraps(f)(kernel)
    except AttributeError:
        return kernel
