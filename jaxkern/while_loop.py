"""While loops that every lane runs on its own, as one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from jaxkern._core import compat, validate
from jaxkern._core.cpp import Unsupported
from jaxkern._engines.loops.plan import TooLarge
from jaxkern._engines.loops.while_lowering import LABEL, check, mark


def while_loop(cond_fun: Callable, body_fun: Callable, init_val: Any) -> Any:
    """While cond_fun(x): x = body_fun(x), in each lane on its own, as `jax.vmap` of `jax.lax.while_loop`.

    While the condition of a lane is true, the lane takes a step; then it keeps its carry. One kernel runs all steps.

    Args:
        cond_fun: carry -> booleans, one for each lane, or a scalar for all.
        body_fun: carry -> carry, a pytree of the same structure and dtypes.
        init_val: the first carry, a pytree of arrays or numbers. Its arrays broadcast against each other and against what
            cond_fun and body_fun return, so a counter that starts with 0 becomes a count for each lane.

            Both functions are elementwise over lanes: no reductions, products of matrices, indexing or other loops. They may
            close over arrays that broadcast. Numbers have any real dtype. 16-bit numbers are computed in float32 and rounded
            in every step.

    Returns:
        The last carry, a pytree like `init_val`, whose arrays have the common shapes.

    Raises:
        TypeError: a function is not elementwise over lanes; the error, which is raised when the loop is traced, names the
            operation and its line. The loop is too large for one kernel, which has at most 31 carries and 2000 operations; the
            error says what is too large. cond_fun returns no booleans, or body_fun another structure or dtype.
        ValueError: shapes do not broadcast, or the loop is differentiated in reverse mode.

    Warns:
        UserWarning: a derivative or a batch of the loop is too large for a kernel, and XLA runs it. This is known when it is
            lowered for a GPU; errors are raised while the loop is traced, and are the same on every machine.

    Derivatives: forward mode, of any order, as kernels too. In reverse mode there are none, as for `jax.lax.while_loop`,
    since the number of steps is not known: use `scan`, `jax.custom_vjp` or `jax.lax.custom_root`.

    Cost: a thread keeps the carry of its lane in registers and stops when its condition is false: the carry is read and
    written once, however many steps there are. Each of several devices runs the loops of its own lanes, and sends nothing.
    On a CPU, which has no kernel, all lanes take steps until the last one is done, and a selection keeps the carries of the
    others.

    >>> import jax.numpy as jnp, jaxkern
    >>> a = jnp.array([1.0, 2.0, 9.0])
    >>> going = lambda c: abs(c[0] * c[0] - a) > 1e-5 * a
    >>> root, steps = jaxkern.while_loop(going, lambda c: ((c[0] + a / c[0]) / 2, c[1] + 1), (jnp.ones(3), 0))
    >>> steps.tolist()
    [0, 3, 5]

    Source: JAX's batching rule of `while_loop` defines the result; Aila and Laine, "Understanding the Efficiency of Ray
    Traversal on GPUs", HPG 2009, discuss loops of different lengths in the threads of a warp.
    """
    validate.function("while_loop", "cond_fun", cond_fun, "a function of the carry")
    validate.function("while_loop", "body_fun", body_fun, "a function of the carry")
    for x in jax.tree.leaves(init_val):
        validate.check_array("while_loop", "init_val", "an array or a pytree of arrays", x, keys=True)
    leaves, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, init_val))
    cond = lambda xs: _condition(cond_fun(jax.tree.unflatten(tree, xs)))
    body = lambda xs: _carry(body_fun(jax.tree.unflatten(tree, xs)), tree)
    init = _broadcast(cond, body, leaves)

    def step(xs):
        going = mark(cond(xs))
        return [jnp.where(going, y, x) for x, y in zip(xs, body(xs))]

    loop = lambda *xs: lax.while_loop(lambda xs: jnp.any(mark(cond(xs))), step, list(xs))
    closed = jax.make_jaxpr(loop)(*init)
    if not any(0 in x.shape for x in init):
        try:
            check(closed)
        except TooLarge as error:
            error.add_note("use smaller carries, several loops, or jax.vmap of jax.lax.while_loop")
            raise
        except Unsupported as error:
            error.add_note("compute it outside of the loop, or use jax.vmap of jax.lax.while_loop")
            raise
    # The loop is made where the user called this function, so that messages about it name that line.
    found = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *init, propagate_source_info=False)
    return jax.tree.unflatten(tree, map(_result, found))


def _condition(going):
    if not isinstance(going, (jax.Array, np.ndarray, np.bool_, bool)) or not jnp.issubdtype(
        jnp.result_type(going), jnp.bool_
    ):
        found = jax.tree.map(lambda x: jax.typeof(x).str_short(), going)
        raise TypeError(f"{LABEL}: cond_fun must return an array of booleans, got {found}")
    return jnp.asarray(going)


def _carry(value, tree):
    leaves, found = jax.tree.flatten(value)
    if found != tree:
        raise TypeError(f"{LABEL}: body_fun must return a pytree like init_val, {tree}, got {found}")
    return list(map(jnp.asarray, leaves))


def _broadcast(cond, body, init):
    """The first carry, of the shapes that conditions and steps give it."""
    promoted = False
    while True:
        like = [jax.typeof(x) for x in init]
        closed = jax.make_jaxpr(lambda *xs: (cond(xs), *body(xs)))(*init)
        avals: list[Any] = [v.aval for v in closed.jaxpr.outvars]
        going, *new = avals
        dtypes = [jnp.promote_types(a.dtype, b.dtype) if a.weak_type else a.dtype for a, b in zip(like, new)]
        if not promoted and any(d != a.dtype for d, a in zip(dtypes, like)):
            init, promoted = [x.astype(d) for x, d in zip(init, dtypes)], True
            continue
        for k, (a, b) in enumerate(zip(like, new)):
            if a.dtype != b.dtype:
                raise TypeError(f"{LABEL}: body_fun must keep dtypes, and returns {b.dtype} for carry {k} of {a.dtype}")
        try:
            shapes = [jnp.broadcast_shapes(a.shape, b.shape, going.shape) for a, b in zip(like, new)]
        except ValueError:
            found = ", ".join(str(x.shape) for x in (*like, *new))
            raise ValueError(
                f"{LABEL}: conditions of shape {going.shape} and carries {found} do not broadcast"
            ) from None
        axes = frozenset().union(*map(compat.varying_axes, (*like, *new, going)))
        specs = [_spec(shape, (a, b, going)) for shape, a, b in zip(shapes, like, new)]
        known = shapes == [a.shape for a in like] and specs == list(map(validate.explicit_spec, like))
        if known and all(compat.varying_axes(a) == axes for a in like):
            return init
        init = [jnp.broadcast_to(x, shape) for x, shape in zip(init, shapes)]
        init = [jax.sharding.reshard(x, PartitionSpec(*s)) if any(s) else x for x, s in zip(init, specs)]
        init = [compat.cast_varying(x, axes - own) if axes - (own := compat.varying_axes(x)) else x for x in init]


def _spec(shape, avals) -> tuple:
    """How an array to which these broadcast is split, on a mesh with explicit axes."""
    found: list = [None] * len(shape)
    for a in avals:
        for k, axes in zip(range(-a.ndim, 0), validate.explicit_spec(a)):
            found[k] = found[k] or (axes if a.shape[k] == shape[k] else None)
    return tuple(found)


# The identity on results, without a derivative in reverse mode.
_result_p = Primitive("jaxkern_while_loop_result")
_result_p.def_impl(lambda x: x)
_result_p.def_abstract_eval(lambda x: x)
batching.defvectorized(_result_p)
mlir.register_lowering(_result_p, lambda ctx, x: [x])


def _transpose(ct, x):
    del ct, x
    raise ValueError(
        "Reverse-mode differentiation does not work for jaxkern.while_loop, as for lax.while_loop: the number of steps is "
        "not known. Use jaxkern.scan with a fixed number of steps, or give the function that calls the loop a rule by "
        "jax.custom_vjp, or jax.lax.custom_root"
    )


ad.deflinear2(_result_p, _transpose)


def _result(x):
    return _result_p.bind(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x
