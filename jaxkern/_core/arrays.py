"""Some of the arguments of a function: the arrays among them, or those at some positions."""

import collections.abc

import jax
import numpy as np


def of_arrays(f: collections.abc.Callable, args: tuple, kwargs: dict | None = None):
    """(A function of arrays that calls `f` and returns a list of the arrays in its result, the tuple of these arrays).

    Arrays and `jax.ShapeDtypeStruct` among the arguments, and in pytrees of them, are operands. Everything else is passed to
    `f` as it is. The list ends with the arrays that `f` has put into its arguments, as modules and optimizers of flax.nnx do:
    what computes them is part of the program.
    """
    leaves, tree = jax.tree.flatten((args, kwargs or {}))
    at = [k for k, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))]

    def function(*operands):
        given = list(leaves)
        for k, operand in zip(at, operands):
            given[k] = operand
        args, kwargs = jax.tree.unflatten(tree, given)
        result = f(*args, **kwargs)
        there = {id(operand) for operand in operands}
        put = [x for x in jax.tree.leaves((args, kwargs)) if id(x) not in there]
        return [x for x in (*jax.tree.leaves(result), *put) if isinstance(x, jax.Array)]

    return function, tuple(leaves[k] for k in at)


def of_some(f: collections.abc.Callable, operands: collections.abc.Sequence, at: collections.abc.Iterable[int]):
    """`f(*operands)` as a function of the operands at these positions alone."""

    def g(*xs):
        given = list(operands)
        for k, x in zip(at, xs):
            given[k] = x
        return f(*given)

    return g
