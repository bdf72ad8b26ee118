"""The primitives of cross-entropy: shapes and batching.

    cross_entropy_p        (logits, labels[, mask])                                   -> loss, largest, total[, count]
    cross_entropy_grad_p   (logits, labels, largest, total, weight[, count, mask])    -> gradient
    cross_entropy_both_p   (logits, labels, weight[, mask])                           -> all of these, in one read
    cross_entropy_jvp_p    (logits, labels, largest, total, t[, count, mask])         -> the transpose of the gradient;
                                                                                         left to XLA

The residuals are numbers per row: the largest logit, `total`, the sum of exp(logit - largest), whose logarithms make
logsumexp, and with a mask the count of participants. They are functions of the logits, and so the derivatives treat
them: only those along logits and weight exist.
"""

import functools
import typing

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching
from jax.sharding import NamedSharding, PartitionSpec

from jaxkern._core import compat
from jaxkern._core.primitive import bind, evaluate
from jaxkern._ops.cross_entropy.reference import computing


class Options(typing.NamedTuple):
    """The numbers of a cross-entropy, constants of a compiled program."""

    smoothing: float = 0.0
    z_loss: float = 0.0
    ignore: int | None = None
    # The gradient may overwrite the logits: for the part of an array on one device, whose program does not show it.
    overwrites: bool = False
    # Logits that are arithmetic are left to XLA, which computes them where it reads them: for `jaxkern.accelerate`.
    fusible: bool = False


# The operands of each primitive without a mask and with one, then its results: arrays of logits (x), numbers per row
# (r) and masks (m).
KINDS = {
    "cross_entropy": ("xr", "xrm", "rrr", "rrrr"),
    "cross_entropy_grad": ("xrrrr", "xrrrrrm", "x", "x"),
    "cross_entropy_jvp": ("xrrrx", "xrrrxrm", "r", "r"),
    "cross_entropy_both": ("xrr", "xrrm", "rrrx", "rrrrx"),
}


def kinds(prim, operands):
    """The kinds of the operands and of the results."""
    plain, masked, results, masked_results = KINDS[prim.name.removeprefix("jaxkern_")]
    return (masked, masked_results) if len(operands) == len(masked) else (plain, results)


def _abstract_eval(prim, x, *rest, axis, tier, options):
    del tier, options
    operands, results = kinds(prim, (x, *rest))
    rows = x.shape[:axis] + x.shape[axis + 1 :]
    for kind, a in zip(operands, (x, *rest), strict=True):
        fits = {
            "x": a.shape == x.shape and a.dtype == x.dtype,
            "r": a.shape == rows,
            "m": a.dtype == jnp.bool_ and a.ndim == x.ndim and all(b in (1, d) for d, b in zip(x.shape, a.shape)),
        }
        if not fits[kind]:
            raise ValueError(f"{prim.name}: {a.str_short()} does not fit {x.str_short()} along axis {axis}")
    # Updating keeps the sharding and the varying axes that x came with.
    sharding = {}
    if not x.sharding.mesh.empty:
        spec = [*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec))]
        sharding = {"sharding": NamedSharding(x.sharding.mesh, PartitionSpec(*spec[:axis], *spec[axis + 1 :]))}
    row = x.update(shape=rows, dtype=computing(x.dtype), weak_type=False, **sharding)
    found = [x.update(weak_type=False) if kind == "x" else row for kind in results]
    return found if prim.multiple_results else found[0]


def _batch(prim, operands, dims, *, axis, tier, options):
    """The batch becomes one more dimension of the logits, where they have it, or their first."""
    operand_kinds, results = kinds(prim, operands)
    size = next(x.shape[d] for x, d in zip(operands, dims) if d is not None)
    at = dims[0] if dims[0] is not None else 0
    new_axis = axis + (at <= axis)
    of_rows = at - (at > new_axis)

    def place(x, d, kind):
        where = of_rows if kind == "r" else at
        if d is not None:
            return jnp.moveaxis(x, d, where)  # nothing at all when they are equal
        x = jnp.expand_dims(x, where)
        # A mask keeps a dimension of size 1: kernels read it in place.
        return x if kind == "m" else jnp.broadcast_to(x, (*x.shape[:where], size, *x.shape[where + 1 :]))

    operands = [place(*args) for args in zip(operands, dims, operand_kinds)]
    out = bind(prim, *operands, axis=new_axis, tier=tier, options=options)
    places = [at if kind == "x" else of_rows for kind in results]
    return (out, places) if prim.multiple_results else (out, places[0])


def _primitive(name):
    prim = Primitive(f"jaxkern_{name}")
    prim.multiple_results = len(KINDS[name][2]) > 1
    prim.def_abstract_eval(functools.partial(_abstract_eval, prim))
    prim.def_impl(functools.partial(evaluate, prim))
    batching.primitive_batchers[prim] = functools.partial(_batch, prim)
    compat.check_nans(prim)
    return prim


cross_entropy_p = _primitive("cross_entropy")
cross_entropy_grad_p = _primitive("cross_entropy_grad")
cross_entropy_jvp_p = _primitive("cross_entropy_jvp")
cross_entropy_both_p = _primitive("cross_entropy_both")
