"""Calls of softmax with a score function: their arguments are checked, and become operands of the primitives."""

import functools

import jax
import jax.numpy as jnp

from jaxkern._core import cpp, functor, validate
from jaxkern._core.algorithms import forced
from jaxkern._core.define import FLOAT_BYTES
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind
from jaxkern._core.rows import lowest_for_infinity
from jaxkern._ops.score import derivatives  # noqa: F401  derivatives are registered
from jaxkern._ops.score import primitive as score_primitive


def given(args) -> bool:
    return not isinstance(args, (tuple, list)) or len(args) > 0


def scored(name: str, x, axis, where, score, args, others):
    """The softmax of score(x). The function is traced here, so that the jitted function is not compiled again for it."""
    neutral = {"scale": 1, "bias": None, "causal": False, "dropout_rate": 0}
    for argument, value in others.items():
        if value is not neutral[argument] and not (
            isinstance(value, (bool, int, float)) and value == neutral[argument]
        ):
            hint = "" if argument == "dropout_rate" else f": write the {argument.replace('causal', 'mask')} in score"
            raise TypeError(f"jaxkern.{name}: score does not combine with {argument}{hint}")
    x, operands, static = prepare_scores(name, "x", x, axis, where, score, args)
    return _softmax_of_scores(x, where, operands, name=name, algorithm=forced(name), **static)


def prepare_scores(name: str, argument: str, x, axis, where, score, args):
    """(x, operands, {axis, function, indexed}): the arguments of a softmax of score(x), called `argument` in errors."""
    if score is None:
        raise TypeError(f"jaxkern.{name}: score_args are the arguments of a score function, and score is None")
    validate.function(name, "score", score, "a function of scalars")
    validate.check_array(name, argument, "an array or a number", x)
    if where is not None:
        validate.check_array(name, "where", "a boolean array", where)
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"jaxkern.{name}: score_args must be a list or a tuple of arrays, got {type(args).__name__}")
    for k, a in enumerate(args):
        validate.check_array(name, f"score_args[{k}]", "an array or a number", a)
    x, args = validate.floating(name, jnp.asarray(x), argument), [jnp.asarray(a) for a in args]
    axes = validate.sorted_axes(name, validate.static_axis(name, axis), x.shape, argument)
    if len(axes) != 1:
        raise ValueError(
            f"jaxkern.{name}: score needs axis to be one dimension, got {axis} for {argument} of shape {x.shape}"
        )
    for n in x.shape:
        if isinstance(n, int) and n >= 1 << 31:
            raise ValueError(
                f"jaxkern.{name}: indices of score are int32, and {argument} of shape {x.shape} needs more"
            )
    for k, a in enumerate(args):
        validate.full_rank(name, f"score_args[{k}]", x, a, argument)
        cpp.check_dtype(f"jaxkern.{name}: score_args[{k}]", a.dtype)
    function, captured = _traced(name, score, x, args)
    used = sorted({0, *function.used})
    indexed = tuple(k - 1 for k in used if 0 < k <= x.ndim)
    operands = [*args, *captured]
    operands = tuple(operands[k - 1 - x.ndim] for k in used if k > x.ndim)
    return x, operands, {"axis": axes[0], "function": function.select(used), "indexed": indexed}


def _traced(name, score, x, args):
    """(the Function of an element, the indices, elements of `args` and captured scalars; the captured scalars)."""
    label = getattr(score, "__name__", None) or type(score).__name__
    label = "score" if label == "<lambda>" else f"score {label}"
    scalars = f"an element of x, {x.ndim} indices and an element of each of {len(args)} score_args"
    validate.check_call(name, "score", score, 1 + x.ndim + len(args), scalars)
    dtype = x.dtype if x.dtype.name in FLOAT_BYTES else jnp.dtype(jnp.float32)
    wide = jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)

    dtypes = [dtype, *[jnp.dtype(jnp.int32)] * x.ndim, *(a.dtype for a in args)]
    weak = [False] * (1 + x.ndim) + [a.weak_type for a in args]
    trace = functools.partial(functor.trace, dtypes=dtypes, name=name, weak=weak, results=1, label=label)
    function, captured = trace(score)
    if computing(function.out_dtypes[0]) == wide:
        return function.with_results((wide,)), captured
    function, captured = trace(lambda *scalars: jax.tree.map(_number(wide), score(*scalars)))
    if function.out_dtypes[0] != wide:
        raise TypeError(f"{function.label} must return a real number, and returns {function.out_dtypes[0]}")
    return function, captured


def _number(wide):
    def convert(y):
        y = jnp.asarray(y)
        real = jnp.issubdtype(y.dtype, jnp.floating) or jnp.issubdtype(y.dtype, jnp.integer)
        return y.astype(wide) if real else y

    return convert


@functools.partial(jax.jit, static_argnames=("name", "axis", "algorithm", "function", "indexed"), inline=True)
def _softmax_of_scores(x, where, operands, *, name, axis, algorithm, function, indexed):
    mask = validate.full_rank_mask(name, x, where)
    parts = [validate.full_rank(name, "score_args", x, a) for a in operands]
    dtype = x.dtype
    y = bind(
        score_primitive.softmax_score_p,
        x.astype(function.in_dtypes[0]),
        *parts,
        mask,
        None,
        axis=axis,
        algorithm=algorithm,
        log=name == "log_softmax",
        function=function,
        indexed=indexed,
        unscored=False,
    )
    return lowest_for_infinity(y, dtype) if name == "log_softmax" else y.astype(dtype)
