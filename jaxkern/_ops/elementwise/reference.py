"""The elementwise operations and their derivatives in jnp: the definition, and the fallback."""

import functools

import jax
import jax.numpy as jnp

from jaxkern._core.dtypes import computing


def wide(x):
    return x.astype(computing(x.dtype))


@jax.custom_jvp
def gelu_tanh(x):
    """x sigmoid(a(x)) = x (1 + tanh(a(x) / 2)) / 2, which loses no digits where the tanh is near -1."""
    return x * jax.nn.sigmoid(_gelu_argument(x)[0])


@gelu_tanh.defjvp
def _gelu_tanh_jvp(primals, tangents):
    # XLA's own derivative of the cube takes 1.4 times as long on a CPU.
    (x,), (t,) = primals, tangents
    a, slope = _gelu_argument(x)
    s = jax.nn.sigmoid(a)
    return x * s, t * (s * (1 + x * slope * (1 - s)))


def _gelu_argument(x):
    """a(x) = sqrt(8 / pi) (x + 0.044715 x^3), and its derivative."""
    first, third, square = 1.5957691216057308, 1.5957691216057308 * 0.044715, x * x
    return x * (first + third * square), first + 3 * third * square


@functools.cache
def meaning(row):
    """The row's expression as a function of its arrays and parameters."""
    names = ", ".join((*row.arrays, *(name for name, _ in row.parameters)))
    return eval(f"lambda {names}: {row.like}", {"jax": jax, "jnp": jnp, "gelu_tanh": gelu_tanh})


def halves(row, operands, split):
    """The operands; with `split` >= 0 the first holds two of them along that axis."""
    if split < 0:
        return list(operands)
    return [*jnp.split(operands[0], 2, split), *operands[1:]]


def element_type(row, arrays):
    """The dtype that the row's T stands for."""
    return arrays[-1].dtype if row.types == "select" else arrays[0].dtype


def forward(row, *operands, split, algorithm="auto"):
    operands = halves(row, operands, split)
    y = meaning(row)(*map(wide, operands))
    return y if y.dtype == jnp.bool_ else y.astype(element_type(row, operands[: len(row.arrays)]))


def pullback(row, operands, at, g):
    """Cotangents of the operands at the positions `at`, by JAX's own derivatives of the row's expression."""

    def f(*xs):
        widened = list(map(wide, operands))
        for k, x in zip(at, xs):
            widened[k] = x
        return meaning(row)(*widened)

    _, pull = jax.vjp(f, *(wide(operands[k]) for k in at))
    return [d.astype(operands[k].dtype) for k, d in zip(at, pull(wide(g)))]


def used(row):
    """The positions of the arrays that the derivative's functor reads beside the cotangent."""
    return tuple(range(len(row.arrays))) if row.uses is None else row.uses


def gradient(row, *operands, split, algorithm="auto"):
    """The derivative: a cotangent for each array in `row.gradient`; with a split, one that holds both."""
    operands = halves(row, operands, split)
    read = used(row)
    g, parameters = operands[len(read)], operands[len(read) + 1 :]
    arrays = [jnp.zeros_like(g)] * len(row.arrays)  # arrays that are not read have no influence
    for k, x in zip(read, operands):  # under vmap, an array that is not mapped has size 1 where g is longer
        arrays[k] = x if split >= 0 else jnp.broadcast_to(x, g.shape)
    ds = pullback(row, [*arrays, *parameters], row.gradient, g)
    return ds if split < 0 else [jnp.concatenate(ds, split)]


def operand_counts(row, split):
    """How many operands of a derivative come before the cotangent, and how many gradients it has."""
    return (1, 1) if split >= 0 else (len(used(row)), len(row.gradient))


def tangent(row, *operands, split, algorithm="auto"):
    """The transpose of the derivative: from a tangent for each gradient to the result's tangent."""
    k, n = operand_counts(row, split)
    before, tangents, parameters = operands[:k], operands[k : k + n], operands[k + n :]
    g = tangents[0] if split < 0 else jax.lax.slice_in_dim(tangents[0], 0, tangents[0].shape[split] // 2, axis=split)
    (t,) = jax.linear_transpose(lambda g: gradient(row, *before, g, *parameters, split=split), g)(list(tangents))
    return t


def cast(x, *, dtype):
    return x.astype(dtype)
