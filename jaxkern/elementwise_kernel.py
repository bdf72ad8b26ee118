"""A Python function of scalars, applied to arrays by one kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxkern._core import functor, validate
from jaxkern._ops.function.primitive import apply


def elementwise_kernel(f: Callable | None = None, *, name: str | None = None) -> Callable:
    """y = f(x1, x2, ...) for each element of arrays that broadcast: one kernel, and one for all its gradients.

    Args:
        f: function of one or more real scalars that returns a scalar or a pytree of scalars, in terms of `jax.numpy`,
            `jax.lax` and this library's elementwise functions: arithmetic, elementary functions, activations,
            comparisons, `where`, bits, casts, `lax.cond`. Functions with derivatives of their own (`jax.custom_jvp`,
            `jax.custom_vjp`) keep them. f may close over scalars, traced ones too, and has gradients by them. If f is left
            out, the result is a decorator.
        name: how errors name f; its own name by default.

    Returns:
        A function of arrays of any real dtype and of Python numbers, one for each argument of f. They broadcast as in
        `jnp`. The results have the common shape and the dtypes that f returns for scalars of the operands' dtypes. f is
        traced with the operands' dtypes, so limits and constants have the type of the operand, as in `jnp`. The kernel
        computes float16 and bfloat16 in float32 and rounds where it stores; if f converts a float32 number to 16 bits, the
        number is rounded there, too. f is traced once for each combination of dtypes, unless it closes over traced scalars.

    Raises:
        TypeError: in a call, if f contains something that a kernel cannot run: arrays inside f, loops, side effects, complex
            numbers, a primitive without a counterpart; the error names the primitive and the line in f. An operand is not an
            array, or is given by name. `name` is not a string, or f not a function.
        ValueError: in a call, if f returns arrays, or nothing, or shapes do not broadcast.

    Derivatives: forward and reverse mode, of any order, by all operands and closed-over scalars. One kernel computes all
    gradients. If broadcast dimensions lead or trail, it also sums the gradients of the operands that were broadcast, in
    float32 or wider, and in the same order in every run.

    Cost: each operand is read once, in place, and each result is written once. The gradient reads the operands that it
    needs and the cotangents, and writes the gradients. XLA runs functions of more than about 2000 operations (40 of `sin`,
    `pow` and their like), which take minutes to compile as kernels; a warning gives the size.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> @jaxkern.elementwise_kernel
    ... def gate(x, y, bias):
    ...     return jax.nn.sigmoid(x + bias) * y
    >>> x, y, bias = jnp.zeros((2, 3)), jnp.ones((2, 3)), jnp.zeros(3)
    >>> gate(x, y, bias).tolist()
    [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]
    >>> jax.grad(lambda bias: gate(x, y, bias).sum())(bias).tolist()
    [0.5, 0.5, 0.5]

    Source: after CuPy's `ElementwiseKernel`, with derivatives.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"jaxkern.elementwise_kernel: name must be a string or None, got {validate.shown(name)}")
    if f is None:
        return functools.partial(elementwise_kernel, name=name)
    validate.function("elementwise_kernel", "f", f, "a function of scalars")
    traces = {}

    def trace(arrays):
        key = (*((x.dtype, x.weak_type) for x in arrays), jax.dtypes.canonicalize_dtype(float))
        if key not in traces:
            validate.check_call("elementwise_kernel", "f", f, len(arrays), f"elements of {len(arrays)} operands")
            dtypes, weak = [x.dtype for x in arrays], [x.weak_type for x in arrays]
            found = functor.trace(f, dtypes, name="elementwise_kernel", weak=weak, label=name)
            if any(isinstance(c, jax.core.Tracer) for c in found[1]):
                return found
            traces[key] = found
        return traces[key]

    def kernel(*operands, **keywords):
        if keywords:
            raise TypeError(
                f"jaxkern.elementwise_kernel: operands are given by position, got {', '.join(keywords)} by name"
            )
        if not operands:
            raise TypeError("jaxkern.elementwise_kernel: at least one operand is needed")
        for k, x in enumerate(operands):
            validate.check_array("elementwise_kernel", f"operand {k}", "an array or a number", x)
        arrays = list(map(jnp.asarray, operands))
        function, captured = trace(arrays)
        try:
            np.broadcast_shapes(*(tuple(d if isinstance(d, int) else 1 for d in x.shape) for x in arrays))
        except ValueError:
            shapes = ", ".join(str(x.shape) for x in arrays)
            raise ValueError(f"{function.label}: operands of shapes {shapes} do not broadcast") from None
        rank = max(x.ndim for x in arrays)
        arrays = [x if x.ndim == rank else x.reshape((1,) * (rank - x.ndim) + x.shape) for x in (*arrays, *captured)]
        return jax.tree.unflatten(function.out_tree, apply(function, arrays))

    try:
        return functools.wraps(f)(kernel)
    except AttributeError:
        return kernel
