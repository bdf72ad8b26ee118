"""associative_scan of pytrees: the function of pairs is traced for lanes, and the loops' engine scans its elements."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkern._core import compat, validate
from jaxkern._core.cpp import Unsupported
from jaxkern._core.jaxprs import CUSTOM, computing
from jaxkern._engines.loops import associative, pairs, plan_associative
from jaxkern._engines.loops.generate import Core
from jaxkern._engines.loops.program import Program


def of_pytrees(fn, elems, reverse, axis, replaced=False):
    """`jaxkern.associative_scan`. replaced: whether it stands for a scan of a program that `jaxkern.accelerate` replaced."""
    name = "associative_scan"
    validate.function(name, "fn", fn, "a function of two pytrees like elems")
    leaves, tree = jax.tree.flatten(elems)
    for x in leaves:
        validate.check_array(name, "elems", "an array or a pytree of arrays", x)
    if not leaves:
        raise TypeError(f"jaxkern.{name}: elems must have at least one array")
    reverse = validate.flag(name, "reverse", reverse)
    along = validate.integer(name, "axis", axis)
    leaves = list(map(jnp.asarray, leaves))
    rank = leaves[0].ndim
    if not -rank <= along < rank:
        raise ValueError(f"jaxkern.{name}: axis {axis} is out of bounds for elems of shape {leaves[0].shape}")
    along %= rank
    if any(x.ndim != rank or x.shape[along] != leaves[0].shape[along] for x in leaves):
        shapes = ", ".join(str(x.shape) for x in leaves)
        raise ValueError(
            f"jaxkern.{name}: elems must have one rank and one size along axis {axis}, got shapes {shapes}"
        )

    label = getattr(fn, "__name__", type(fn).__name__)
    label = f"jaxkern.{name}: {'fn' if label == '<lambda>' else label}"
    if not leaves[0].shape[along]:
        return tree.unflatten(leaves)

    def flat(*ab):
        half = len(ab) // 2
        found, structure = jax.tree.flatten(fn(tree.unflatten(ab[:half]), tree.unflatten(ab[half:])))
        if structure != tree:
            raise TypeError(f"jaxkern.{name}: fn must return the structure of elems, {tree}, got {structure}")
        return found

    step = [jax.ShapeDtypeStruct((*x.shape[:along], 2, *x.shape[along + 1 :]), x.dtype) for x in leaves]
    closed, found = jax.make_jaxpr(flat, return_shape=True)(*step, *step)
    for x, y in zip(step, found):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            kinds = f"{y.dtype}{list(y.shape)} for {x.dtype}{list(x.shape)}"
            raise TypeError(f"jaxkern.{name}: fn must return arrays of the types of elems, got {kinds}")
    try:
        core = Core(Program(closed.jaxpr, closed.consts, 0, 0, label))
    except Unsupported as error:
        error.add_note("use jax.lax.associative_scan, or write fn for each lane, the elements of one step")
        raise
    if core.program.sums or any(p is not None for p in core.program.operand_parts):
        raise TypeError(f"{label} combines elements of different lanes, which is not elementwise")
    whole = jnp.broadcast_shapes(*(x.shape for x in leaves))
    given = _given(core, whole, along, label)
    own, others = ([computing(d) for d in pairs.real_types([x.dtype for x in xs])] for xs in (leaves, given))
    words = plan_associative.words_of([*own, *others])
    arrays = 2 * len(own) + len(others)
    if not replaced and (beyond := plan_associative.too_large(arrays, words, core.function.size)):
        raise TypeError(f"{label} {beyond}: use jax.lax.associative_scan")
    options = {"axis": along, "reverse": reverse, "label": f"jaxkern.{name}", "replaced": replaced}
    scan = functools.partial(associative.associative_scan, **options)
    arrays = [jnp.broadcast_to(x, whole) for x in leaves]
    is_complex = any(pairs.is_complex(x.dtype) for x in (*leaves, *given))
    if not is_complex and _is_of_scalars(flat, leaves):
        ys = scan(lambda a, b: flat(*a, *b), arrays)
    else:
        if any(e.primitive.name in CUSTOM for e in closed.jaxpr.eqns):
            closes = "closes over an array or uses places of lanes" if given else "is not a function of scalars"
            closes = "has complex numbers" if is_complex else closes
            why = f"{label} {closes}, and calls a function with a derivative of its own"
            if replaced:
                raise TypeError(why)
            compat.warn_once(f"{why}. XLA runs it as jax.lax.associative_scan")
            return lax.associative_scan(fn, elems, reverse=reverse, axis=along)
        n, places = len(leaves), len(core.indices)

        def combine(a, b):
            own, pairs = b[n:], [*a[:n], *b[:n]]
            read = [pairs[k - core.program.num_consts] for k in core.xs]
            return [*core.function(*own[: len(own) - places], *read, *own[len(own) - places :]), *own]

        # Kernels combine the real and the imaginary parts of complex numbers, which are arrays of their own.
        kinds = [computing(x.dtype) for x in (*leaves, *given)]
        stored, m = pairs.real_types([x.dtype for x in leaves]), len(pairs.real_types(kinds))

        def combine_parts(*ab):
            return pairs.split(combine(pairs.joined(ab[:m], kinds), pairs.joined(ab[m:], kinds)))

        of_parts = pairs.expanded(combine_parts, pairs.real_types(kinds) * 2) if is_complex else combine_parts
        ys = scan(
            lambda a, b: of_parts(*a, *b),
            pairs.split([*arrays, *given]),
            element=lambda xs: [x.astype(computing(x.dtype)) for x in xs],
            finish=lambda state, _: [y.astype(d) for d, y in zip(stored, state)],
        )
        ys = pairs.joined(ys, [x.dtype for x in leaves])
    parts = [tuple(slice(0, n) for n in x.shape) for x in leaves]
    return tree.unflatten([y[part] for y, part in zip(ys, parts)])


def _given(core, shape, axis, label) -> list:
    """What fn closes over, and the places of lanes that it uses, as arrays of the shape of the scan, which has this axis."""
    program = core.program
    axes = {d: at for v in program.operands[program.num_consts :] for at, d in enumerate(v.dims) if d is not None}
    captured = [c for _, c in program.captured.values()]
    arrays = []
    for k in core.consts:
        c, dims = captured[k], program.operands[k].dims
        own = [d for d in dims if d is not None]
        if jnp.issubdtype(c.dtype, jax.dtypes.extended) or any(axes.get(d, axis) == axis for d in own):
            raise TypeError(
                f"{label} closes over an array of {c.dtype}{list(c.shape)}, which has no value for each lane"
            )
        order = sorted(own, key=axes.__getitem__)
        x = jnp.transpose(c.reshape([d.size for d in own]), [own.index(d) for d in order])
        arrays.append(lax.broadcast_in_dim(x, shape, [axes[d] for d in order]))
    for d in core.indices:
        if axes[d] == axis:
            raise TypeError(
                f"{label} uses places along the axis of the scan, where its two arguments have different ones"
            )
        arrays.append(lax.broadcasted_iota(np.int32, shape, axes[d]))
    return arrays


def _is_of_scalars(f, leaves) -> bool:
    """Whether f takes and returns scalars, too."""
    given = [jax.ShapeDtypeStruct((), x.dtype) for x in leaves]
    try:
        return all(y.shape == () for y in jax.eval_shape(f, *given, *given))
    except Exception:  # its type depends on what f does
        return False
