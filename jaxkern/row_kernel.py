"""Row functions: a function in jnp that reduces along one axis, as one kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.core
import jax.numpy as jnp

from jaxkern._core import validate
from jaxkern._engines.rows.function import trace
from jaxkern._engines.rows.primitive import apply

KEPT = 256  # traces of a function, each for other types of its operands


def row_kernel(f: Callable | None = None, *, axis: int = -1, name: str | None = None) -> Callable:
    """y = f(x1, x2, ...) as one kernel, for an f that is elementwise along all axes but one, and reduces along that one.

    Args:
        f: an ordinary function of arrays, or of pytrees of arrays, in terms of `jax.numpy`, `jax.nn` and `jax.lax`. Along
            `axis`, the row, it may reduce (sum, mean, max, min, prod, any, all, argmax, argmin, and `lax.reduce` with a
            function of scalars) and broadcast the results. Along the other axes it is elementwise; only its results may
            be summed over them. It may pick one element of each row (`jnp.take_along_axis`,
            `x[jnp.arange(n), labels]`, `x[..., 0]`, a product with a one-hot array), multiply rows by vectors
            (`jnp.vecdot`, `x @ w`), compare indices (`jnp.arange`), use `lax.cond`, and have derivatives of its own
            (`lax.stop_gradient`, `jax.custom_jvp`, `jax.custom_vjp`). It may close over arrays, traced ones too, and has
            gradients by them. It returns an array or a pytree of arrays. As under `jax.jit`, f is traced once for operands of
            the same types: a Python number or a global that changes afterwards is not seen. If f is left out, the result is a
            decorator.
        axis: the axis of the row in the operand with most dimensions.
        name: how errors name f; its own name by default.

    Returns:
        A function of arrays of any real dtype and of Python numbers, with `row_kernel(f)(*args)` equal to `f(*args)` up to
        rounding. 16-bit types are computed in float32, sums too, and rounded where they are stored. Results may be
        float8_e4m3fn or float8_e5m2, operands may not.

    Raises:
        TypeError: in a call, if f contains an operation that a row function may not use; the error names it and its line in
            f. An operand is not an array, or is given by name. `name` is not a string, `axis` not an int, or f not a function.
        ValueError: in a call, if `axis` is out of bounds, or f returns no array.

    Derivatives: forward and reverse mode, of any order, by all operands and closed-over arrays. They are row functions as
    well, one kernel each, which also sums gradients of operands that broadcast, in the same order in every run.

    Cost: each operand is read once, in place, also if it lacks some axes (a bias, a mask, a label for each row), and each
    result is written once. Rows may have any length; rows that are too long to be kept are read again for each reduction
    that depends on another. XLA runs f on a CPU, and where two operands end in different axes.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> @jaxkern.row_kernel
    ... def scale_norm(x, scale):
    ...     return x * scale / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True))
    >>> x = jnp.array([[3.0, 4.0], [0.0, 2.0]])
    >>> scale_norm(x, 10.0).tolist()
    [[6.0, 8.0], [0.0, 10.0]]
    >>> round(float(jax.grad(lambda scale: scale_norm(x, scale).sum())(1.0)), 6)
    2.4

    Source: a function is cut at its reductions, as in Zheng et al., "AStitch", ASPLOS 2022; its derivatives come from
    `jax.vjp`.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"jaxkern.row_kernel: name must be a string or None, got {validate.shown(name)}")
    if f is None:
        return functools.partial(row_kernel, axis=axis, name=name)
    if not callable(f):
        raise TypeError(f"jaxkern.row_kernel: f must be a function of arrays, got {validate.shown(f)}")
    row = validate.static_axis("row_kernel", axis)
    if not isinstance(row, int):
        raise TypeError(f"jaxkern.row_kernel: axis must be an int, got {validate.shown(axis)}")
    own = name or getattr(f, "__name__", type(f).__name__)
    label = f"jaxkern.row_kernel: {'f' if own == '<lambda>' else own}"
    traces = {}

    def traced(operands, tree):
        key = tree, *((x.shape, x.dtype, x.weak_type) for x in operands), jax.dtypes.canonicalize_dtype(float)
        if key not in traces:
            rank = max(x.ndim for x in operands)
            at = next(k for k, x in enumerate(operands) if x.ndim == rank)
            if not -rank <= row < rank:
                raise ValueError(f"{label}: axis {row} is out of bounds for shape {operands[at].shape}")
            avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in operands]
            flat = lambda *xs: f(*jax.tree.unflatten(tree, xs))
            flat.__wrapped__ = f  # for JAX's errors
            try:
                found = trace(flat, avals, row % rank - rank, label)
            except Exception as error:
                hint = f"{label} is traced with whole arrays, whose rows lie along axis {row % rank - rank}"
                is_branch = isinstance(error, jax.errors.TracerBoolConversionError)
                error.add_note(f"{hint}. Write jnp.where in place of `if`" if is_branch else hint)
                raise
            if not found[2].num_leaves:
                raise ValueError(f"{label} must return at least one array")
            if all(isinstance(n, int) and n > 1 for n in operands[at].shape):
                found[0].check()
            if any(isinstance(c, jax.core.Tracer) for c in found[1]):
                return found
            if len(traces) >= KEPT:  # the oldest
                traces.pop(next(iter(traces)))
            traces[key] = found
        return traces[key]

    def kernel(*operands, **keywords):
        if keywords:
            raise TypeError(f"jaxkern.row_kernel: operands are given by position, got {', '.join(keywords)} by name")
        leaves, tree = jax.tree.flatten(operands)
        if not leaves:
            raise TypeError("jaxkern.row_kernel: at least one operand is needed")
        for k, x in enumerate(leaves):
            validate.check_array("row_kernel", f"operand {k}", "an array or a number", x)
        arrays = list(map(jnp.asarray, leaves))
        function, captured, out = traced(arrays, tree)
        results = apply(function, [*arrays, *captured])
        return jax.tree.unflatten(out, [y if isinstance(y, jax.Array) else jnp.asarray(y) for y in results])

    try:
        return functools.wraps(f)(kernel)
    except AttributeError:
        return kernel
