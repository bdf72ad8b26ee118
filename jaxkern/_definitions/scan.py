"""Loops over steps that definitions share: scans that a kernel is known to run, and steps that a mesh splits."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxkern._core import validate
from jaxkern._core.cpp import Unsupported
from jaxkern._engines.loops import lowering
from jaxkern._engines.loops.chunks import checkpointed
from jaxkern._engines.loops.plan import TooLarge


def loop(f, init, xs, length=None, reverse=False, unroll=1, checkpoint_every=None):
    """`jaxkern.scan` of arguments that are known to be right and a body that is known to be elementwise."""
    # The gradient needs what the body reads, and computes the rest again: to store it in each step would take longer.
    again = jax.checkpoint(f, prevent_cse=False)

    def body(carry, x):
        carry, y = pair(again(lowering.mark(carry), x))
        return lowering.mark(carry), lowering.mark(y)

    body.__wrapped__ = f  # for JAX's errors

    def pair(found):
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise TypeError(
                f"jaxkern.scan: f must return a pair, the carry and the result of a step, got {validate.shown(found)}"
            )
        return found

    run = functools.partial(lax.scan, body, reverse=reverse, unroll=unroll)
    if checkpoint_every is None:
        return run(init, xs, length)
    return checkpointed(run, init, xs, length, reverse, checkpoint_every)


def check(f, carry, xs, length):
    """Raises if no kernel can run a loop of this body."""
    element = lambda x: jax.ShapeDtypeStruct(jnp.shape(x)[1:], jax.typeof(x).dtype)
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    leaves, tree = jax.tree.flatten((jax.tree.map(like, carry), jax.tree.map(element, xs)))
    closed = jax.make_jaxpr(lambda *leaves: f(*jax.tree.unflatten(tree, leaves)))(*leaves)
    name = getattr(f, "__name__", type(f).__name__)
    label = f"jaxkern.scan: {'f' if name == '<lambda>' else name}"
    try:
        lowering.check(closed.jaxpr, closed.consts, len(jax.tree.leaves(carry)), length, label)
    except TooLarge as error:
        error.add_note("use fewer or smaller carries and matrices, several loops, or jax.lax.scan")
        raise
    except Unsupported as error:
        error.add_note("compute it outside of the loop, or use jax.lax.scan")
        raise


def along_split_steps(run, operands, first, axis):
    """run(operands, first carry), of arrays of one rank, on a mesh with explicit axes that may split the axis of the steps.

    JAX's scans refuse explicit axes there, so `run` sees these as automatic ones. Its result is split as the operands are.
    """
    spec = [next(filter(None, entries), None) for entries in zip(*map(validate.explicit_spec, operands))]
    names = lambda entry: entry if isinstance(entry, tuple) else (entry,)
    if spec[axis] is None:
        return run(operands, first)
    own = names(spec[axis])
    if any(name in own for a, entry in enumerate(spec) if a != axis for name in names(entry)):
        return run([validate.whole(x, axis) for x in operands], first)
    automatic: Callable = jax.sharding.auto_axes(run, axes=own, out_sharding=PartitionSpec(*spec))
    return automatic(operands, first)
