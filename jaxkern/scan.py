"""Loops whose body is elementwise over lanes, or reduces along rows, as one kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jaxkern._core import compat, validate
from jaxkern._core.jaxprs import held
from jaxkern._definitions.scan import along_split_steps, check, loop


def scan(
    f: Callable,
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    checkpoint_every: int | None = None,
) -> tuple[Any, Any]:
    """carry, y[t] = f(carry, x[t]) for all t, as `jax.lax.scan`, in one kernel.

    The body f is elementwise over lanes, the elements of the carry, or it reduces along rows.

    Args:
        f: the body, (carry, x) -> (carry, y), on pytrees of arrays or None, as for `jax.lax.scan`. Between arrays that
            depend on the carry it is elementwise, or it reduces along rows, dimensions of at most 4096 elements: by sums,
            maxima and the like, argmax, and products of at most 2^25 multiplications in a step. Arrays broadcast against
            each other, so a carry may be a scalar counter, and a weight that f closes over may be one number for each
            feature. Dimensions of at most 16 elements may be sliced, concatenated, stacked and reduced: the columns of a
            state, and matrices of at most 36 elements that act on it, such as probabilities of transitions, in sums of
            products. Longer ones may be cut into at most 16 pieces of one size, and joined: the gates of a recurrent unit.
            An index may choose one of at most 64 elements. The body may have branches (`jax.lax.cond`), loops of few steps
            and fixed count, and keys of `jax.random`, which it may split. Numbers are complex, float16, bfloat16, float32,
            float64, boolean, or integers of 8 to 64 bits; convert others, such as float8 and int4, before the loop. 16-bit
            numbers are computed in float32 and rounded where they are stored; a carry is rounded in every step.
        init: the first carry, a pytree of arrays or numbers.
        xs: a pytree of arrays that are scanned along their first axis, or None.
        length: the number of steps; needed if xs has no arrays.
        reverse: scans from the last element to the first.
        unroll: as for `jax.lax.scan`; used where XLA runs the loop. The kernel chooses its own.
        checkpoint_every: how many steps run between two carries that are kept for the gradient. The gradient runs these steps
            again, and needs memory for the residuals of that many steps and for one carry of each chunk, rather than for
            the residuals of all steps. About the square root of the number of steps needs the least. If it does not divide the
            number of steps, xs and ys are copied.

    Returns:
        (carry, ys), equal to the results of `jax.lax.scan` up to rounding.

    Raises:
        TypeError: f is neither elementwise over lanes nor reduces along rows; the error, which is raised when the loop is
            traced, names the operation and the line in f. The loop is too large for one kernel: more than 63 arrays, 2000
            operations, 2^31 - 1 lanes, or rows and matrices beyond 227 KB of shared memory; the error says what is too
            large. An argument is of the wrong type. The carry changes its type, as for `jax.lax.scan`.
        ValueError: length is negative, or checkpoint_every is below 1 or given for a number of steps that is symbolic.
            Sizes of xs differ, as for `jax.lax.scan`.

    Warns:
        UserWarning: XLA runs a derivative or a batch of the loop that is too large for a kernel, or a loop with rows for which
            it is estimated to be faster, or for which the GPU has too little shared memory. The warning names the reason;
            results equal `jax.lax.scan`'s. This is known when the loop is lowered for a GPU. Errors are raised while the
            loop is traced, before any step has run, and are the same on every machine.

    Derivatives: JAX's, in forward and reverse mode, of any order, and kernels too. The gradient stores the carry of each
    step, and computes the rest of a step again, as with `jax.checkpoint`. Gradients of operands that broadcast over lanes
    are added up in each lane, and summed over lanes once, after the loop.

    Cost: a thread keeps the carry of its lanes in registers, loads later elements of xs while it computes, and writes each
    element of ys once: the call moves the bytes of xs and ys, and the gradient these, their cotangents and the carries. If
    the body reduces along rows, a team of threads runs the loop of a row. If there are few lanes and the body is affine in
    the carry, blocks share the steps of a lane (see "Few lanes" in docs/loops.md). Several devices run the loops of their
    own lanes, or their own steps of an affine body. XLA runs the loop on a CPU, and where a warning says so.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> def step(h, x):
    ...     h = 0.5 * h + x
    ...     return h, h
    >>> last, hs = jaxkern.scan(step, jnp.zeros(2), jnp.ones((3, 2)))
    >>> hs.tolist()
    [[1.0, 1.0], [1.5, 1.5], [1.75, 1.75]]

    Source: Lei et al., "Simple Recurrent Units for Highly Parallelizable Recurrence", EMNLP 2018, run a recurrent unit with
    a thread for each lane; here the code comes from the body, and its derivatives from JAX.
    """
    validate.function("scan", "f", f, "a function of (carry, x)")
    for argument, tree in (("init", init), ("xs", xs)):
        for x in jax.tree.leaves(tree):
            validate.check_array("scan", argument, "an array or a pytree of arrays", x, keys=True)
    if length is not None:
        length = validate.integer("scan", "length", length)
        if not 0 <= length < 1 << 63:
            raise ValueError(f"jaxkern.scan: length must be between 0 and 2^63, got {length}")
    reverse = validate.flag("scan", "reverse", reverse)
    if not isinstance(unroll, bool):
        unroll = validate.integer("scan", "unroll", unroll)
    if checkpoint_every is not None:
        checkpoint_every = validate.integer("scan", "checkpoint_every", checkpoint_every)
        if checkpoint_every < 1:
            raise ValueError(f"jaxkern.scan: checkpoint_every must be at least 1, got {checkpoint_every}")

    options = {"length": length, "reverse": reverse, "unroll": unroll, "checkpoint_every": checkpoint_every}
    run = functools.partial(loop, f, **options)
    try:
        if compat.stages():
            carry, ys = run(init, xs)
        else:  # the body has no effect, and takes no time, before it is known to be one of a kernel
            carry, ys = jax.eval_shape(run, init, xs)
    except jax.errors.ConcretizationTypeError as error:
        error.add_note(
            "jaxkern.scan traces f as jax.lax.scan does, and inside jax.checkpoint: write jnp.where in place of `if`"
        )
        raise
    sizes = [jnp.shape(x)[0] for x in jax.tree.leaves(xs)]
    check(f, carry, xs, sizes[0] if sizes else length)
    return (carry, ys) if compat.stages() else run(init, xs)


def linear_recurrence(
    a: ArrayLike, b: ArrayLike, *, axis: int = 0, reverse: bool = False, initial: ArrayLike | None = None
) -> jax.Array:
    """h[t] = a[t] h[t - 1] + b[t] along `axis`, in every lane.

    Args:
        a, b: arrays of real or complex dtype that broadcast against each other.
        axis: the axis of t in their common shape.
        reverse: h[t] = a[t] h[t + 1] + b[t].
        initial: h before the first step; it broadcasts to the common shape without the axis. 0 by default.

    Returns:
        h, of the common shape and dtype. 16-bit numbers are added in 16 bits: convert long sums to float32.

    Raises:
        TypeError: an operand is not an array of numbers, or axis not an int.
        ValueError: shapes do not broadcast, or axis is out of bounds.

    Derivatives: forward and reverse mode, of any order, by `a`, `b` and `initial`. The gradient is a recurrence in the
    other direction, and one kernel where `scan` is one.

    Cost: for n elements of e bytes, the call moves 3 n e bytes, or 2 n e if `a` is the same in all steps, as it is then
    read once. The gradient reads `a`, h and the cotangent and writes two arrays. With few lanes, blocks share the steps of
    a lane. They compute products of successive a, which must not overflow.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.linear_recurrence(0.5, jnp.ones(3)).tolist()
    [1.0, 1.5, 1.75]

    Source: Martin and Cundy, "Parallelizing Linear Recurrent Neural Nets Over Sequence Length", ICLR 2018, for its uses.
    """
    name = "linear_recurrence"
    given = {"a": a, "b": b} | ({} if initial is None else {"initial": initial})
    for argument, x in given.items():
        validate.check_array(name, argument, "an array of numbers", x)
        validate.number_array(name, argument, jnp.asarray(x))
    reverse = validate.flag(name, "reverse", reverse)
    along = validate.static_axis(name, axis)
    if not isinstance(along, int):
        raise TypeError(f"jaxkern.{name}: axis must be an int, got {validate.shown(axis)}")
    dtype = jnp.result_type(*given.values())
    stored = dtype if jnp.issubdtype(dtype, jnp.complexfloating) else held(dtype)
    a, b = (jnp.asarray(x, stored) for x in (a, b))
    try:
        shape = jnp.broadcast_shapes(a.shape, b.shape)
    except ValueError:
        raise ValueError(f"jaxkern.{name}: a of shape {a.shape} and b of shape {b.shape} do not broadcast") from None
    if not -len(shape) <= along < len(shape):
        raise ValueError(f"jaxkern.{name}: axis {axis} is out of bounds for shape {shape}")
    along %= len(shape)
    lanes = shape[:along] + shape[along + 1 :]
    first = jnp.zeros((), stored) if initial is None else jnp.asarray(initial, stored)
    try:
        first = jnp.broadcast_to(first, lanes)
    except ValueError:
        raise ValueError(f"jaxkern.{name}: initial of shape {first.shape} does not broadcast to {lanes}") from None
    operands = [x.reshape((1,) * (len(shape) - x.ndim) + x.shape) for x in (a, b)]
    run = functools.partial(_recurrence, shape[along], along, reverse)
    return along_split_steps(run, operands, first, along).astype(dtype)


def _recurrence(steps, along, reverse, operands, first):
    a, b = (jnp.moveaxis(x, along, 0) for x in operands)
    specs = zip(validate.explicit_spec(first), *(validate.explicit_spec(x)[1:] for x in (a, b)))
    spec = [next(filter(None, axes), None) for axes in specs]
    if any(spec):
        first = jax.sharding.reshard(first, PartitionSpec(*spec))
    constant = a.shape[0] == 1 != steps
    b = jnp.broadcast_to(b, (steps, *b.shape[1:]))

    def step(h, x):
        a, b = x if not constant else (decay, x)
        h = a * h + b
        return h, h

    decay = a[0] if constant else None
    return jnp.moveaxis(loop(step, first, b if constant else (a, b), reverse=reverse)[1], 0, along)
