"""associative_scan: combinations of all elements so far, by an associative function that is elementwise over lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxkern._definitions.associative_scan import of_pytrees


def associative_scan(fn: Callable, elems: Any, reverse: bool = False, axis: int = 0) -> Any:
    """y[t] = fn(y[t - 1], x[t]) for an associative fn that is elementwise over lanes, as `jax.lax.associative_scan`.

    Args:
        fn: an associative function of two pytrees like `elems`, fn(earlier, later), that returns a third. It is elementwise,
            as the body of `scan` is. Arrays that it closes over become operands and broadcast against the arrays of one step.
        elems: a pytree of arrays with the same size along `axis` that broadcast against each other along other axes.
            Numbers of 16 bits are combined in float32 and rounded where they are stored. Complex numbers are combined by
            their parts, with the operations that the body of `scan` may use; XLA copies the parts before and after the kernel.
        reverse: scans from the last element to the first; fn is then called as fn(later, earlier).
        axis: the axis that is scanned, negative from the end.

    Returns:
        A pytree like `elems`: its element t is the combination of the elements up to t. Elements are combined in an order that
        depends on the shapes alone, so results have the same bits in every run.

    Raises:
        TypeError: fn is not elementwise over lanes; the error, which is raised when the scan is traced, names the operation
            and the line in fn. The scan is too large for one kernel: more than 10 arrays, 32 numbers of 32 bits that are
            combined, or 2000 operations. fn returns another structure or other types than it is given. `elems` has no array.
        ValueError: `axis` is out of bounds, or sizes along it differ.

    Warns:
        UserWarning: fn calls a function with a derivative of its own, such as `jnp.logaddexp`, and closes over an array, has
            complex numbers or is a function of arrays alone, as under `jax.vmap`. XLA runs the scan.

    Derivatives: forward and reverse mode, of any order: the derivatives of the loop y[t] = fn(y[t - 1], x[t]), as kernels
    of `scan`.

    Cost: for n elements of e bytes in all arrays together, one kernel reads n e bytes once and writes n e. The gradient
    reads the elements, the results and the cotangents.

    >>> import jax.numpy as jnp, jaxkern
    >>> affine = lambda f, g: (f[0] * g[0], f[1] * g[0] + g[1])  # x -> a x + b, f before g
    >>> a, b = jaxkern.associative_scan(affine, (jnp.full(4, 0.5), jnp.ones(4)))
    >>> b.tolist()
    [1.0, 1.5, 1.75, 1.875]

    Source: Blelloch, "Prefix sums and their applications", 1990; Merrill and Garland, "Single-pass parallel prefix scan with
    decoupled look-back", 2016.
    """
    return of_pytrees(fn, elems, reverse, axis)
