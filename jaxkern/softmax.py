"""softmax and log_softmax.

What they compute is in _definitions/softmax.py; a score function selects the primitives of _ops/score.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxkern._core import cpp, functor, validate
from jaxkern._core.algorithms import forced
from jaxkern._core.define import FLOAT_BYTES
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind
from jaxkern._core.rows import computed, lowest_for_infinity
from jaxkern._core.validate import Axis
from jaxkern._definitions import dropout
from jaxkern._definitions.softmax import softmax as softmax_of_rows
from jaxkern._ops.score import derivatives as score_derivatives  # noqa: F401  derivatives are registered
from jaxkern._ops.score import primitive as score_primitive


def softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    scale: ArrayLike = 1.0,
    bias: ArrayLike | None = None,
    causal: bool = False,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    score: Callable[..., ArrayLike] | None = None,
    score_args: Sequence[ArrayLike] = (),
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """exp(s) / sum(exp(s)) along `axis`, as `jax.nn.softmax`, for s = scale * x + bias or s = score(x).

    Args:
        x: array of any shape. float16, bfloat16 and float32 are computed in float32, float64 in
            float64, and rounded once; integers promote as in `jax.nn`; other floating-point types
            (float8) run through XLA, in float32.
        axis: an int, a tuple of ints, or None for all axes. Any single axis, and neighbouring ones,
            are read in place. Axes with other dimensions between them are first made neighbours, which costs a copy.
        where: boolean array that broadcasts to the shape of `x`; the kernel reads it without materialising it. Elements
            where it is False are masked: they do not enter the sum, and their result is 0.
        scale: a real number, or a scalar array, which may be traced and is differentiable.
        bias: floating-point array that broadcasts to the shape of `x`; the kernel reads it without materialising it.
            Its gradient is summed over the dimensions that it broadcasts over. It is converted first if its dtype is
            neither the dtype of `x` nor the computing type.
        causal: the last two dimensions of `x` are queries and keys. Query i sees keys 0 .. i + keys - queries, so that
            the last query sees all of them. Requires `axis` to be the last one.
        dropout_rate: a number in [0, 1), rounded to a multiple of 2**-16: the probability that an element of the
            result is set to 0. The other elements are divided by 1 - rate.
        dropout_key: a key of `jax.random`, or its `uint32[2]` words; only the first two words of a longer key count.
        score: function of scalars, applied to each element before the softmax. It is called as
            `score(value, *indices, *args)`: with an element of `x`, its int32 indices along every dimension of `x`, and
            an element of each of `score_args`; it returns the score, a real number. It is compiled into the kernels,
            and may do what a function given to `elementwise_kernel` may do: closed-over scalars can be traced, and have
            gradients. An element with a score of -inf counts as masked. If indices and broadcast operands alone decide
            this, as in `where(query >= key, value, -inf)`, whole vectors of such elements are not read. `score` combines
            with `where`, but not with `scale`, `bias`, `causal` and dropout: write the first three in `score`. `axis` must
            be a single dimension.
        score_args: arrays of any real dtype that broadcast to the shape of `x`; the kernel reads them without
            materialising them. Floating-point ones have gradients, which are summed over the dimensions that they
            broadcast over. Arrays that `score` would index (`slopes[head]`, `document[query]`) are passed here with
            dimensions of size 1 where they do not vary.
        dtype: the floating-point type of the result; by default the type of `x`. If `x` is float32 and `dtype` has 16 bits,
            the kernel rounds once and writes 16 bits, and the gradient is computed from the 16-bit result: use it for
            16-bit matrix products that follow float32 logits. Other combinations convert the result.

    Dropout: which elements are dropped depends only on the key, the number of the row among all rows of `x`, and the
    position in the row. The result is therefore the same on the CPU and on CUDA, under `jit`, `jax.checkpoint` and any
    sharding. Under `vmap` each example numbers its own rows: give each example its own key, or all drop the same elements.
    Inside `shard_map`, `x` is the part on one device.

    Score functions for attention logits `x[batch, head, query, key]`; under `vmap` indices count within each example, inside
    `shard_map` within the part on one device:

        cap = lambda s, b, h, q, k: 30 * jnp.tanh(s / 30)
        window = lambda s, b, h, q, k: jnp.where(abs(q - k) < 256, s, -jnp.inf)
        alibi = lambda s, b, h, q, k, slope: s + slope * (k - q)
        relative = lambda s, b, h, q, k, bias: s + bias
        document = lambda s, b, h, q, k, i, j: jnp.where(i == j, s, -jnp.inf)

    The last three take `score_args`: [slopes[:, None, None]], [bias[head, query, key]], and the documents of queries and keys,
    [ids[:, None, :, None], ids[:, None, None, :]].

    Returns:
        Array of the shape of `x`, of type `dtype`. A row that is entirely masked or -inf is
        zero and has zero gradients. NaN or +inf makes its row NaN, as in `jax.nn`.

    Raises:
        TypeError: `x` is boolean, complex or not an array; `where` is not boolean; `bias` or `dtype` is not
            floating-point; `scale` or `dropout_rate` is not a number; `dropout_key` is not a key; `score` contains an
            operation that a kernel cannot run, does not take these arguments, or is given with an argument that it does
            not combine with.
        ValueError: `axis` is out of bounds or repeats a dimension; `where` or `bias` does not broadcast to `x`; `scale`
            is not a scalar; `causal` is given with an axis other than the last; `dropout_rate` is not in [0, 1), or is
            not 0 without a key; an array of `score_args` does not broadcast to `x`; `score` is given with several axes,
            or does not return one number.

    Derivatives: forward and reverse mode, of any order, by `x`, `scale`, `bias`, `score_args` and scalars that `score`
    closes over. The gradient by `x` is one kernel. Its residual is the result; with dropout or a traced scale, and with
    `score`, the residuals are the arguments, and the kernel computes the softmax again. Gradients of `score_args` and of
    closed-over scalars take one more kernel for the derivative of the scores, and one for all sums.

    Cost: for n elements of e bytes, the call moves 2 n e bytes and the gradient 3 n e, and what masks, biases and
    `score_args` occupy. Rows that are too long to be kept are read twice: 3 n e bytes, and 5 n e for the gradient. The
    arguments `scale`, `bias`, `causal` and dropout select kernels for the last axis (of more than one element); along other
    axes XLA runs them, with the same dropout bits.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> x = jnp.array([[0.0, 0.0, 5.0], [1.0, 1.0, 1.0]])
    >>> jaxkern.softmax(x, where=jnp.array([True, True, False])).tolist()
    [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]
    >>> jaxkern.softmax(jnp.array([[3.0, 9.0], [1.0, 1.0]]), scale=2, causal=True).tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    >>> y = jaxkern.softmax(jnp.zeros((1000, 1000)), dropout_rate=0.25, dropout_key=jax.random.key(0))
    >>> round(float((y == 0).mean()), 2), round(float(y.max()) * 1000, 3)
    (0.25, 1.333)
    >>> last_two = lambda s, q, k: jnp.where((k <= q) & (k > q - 2), s, -jnp.inf)
    >>> jaxkern.softmax(jnp.zeros((3, 3)), score=last_two).tolist()
    [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
    >>> jaxkern.softmax(jnp.zeros((2, 2)), score=lambda s, q, k, b: s + b, score_args=[jnp.array([0.0, 100.0])]).tolist()
    [[0.0, 1.0], [0.0, 1.0]]

    Source: Bridle, "Probabilistic Interpretation of Feedforward Classification Network Outputs", 1990;
    one pass over a row after Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018;
    random bits after Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011 (Philox4x32-7);
    score functions after Dong et al., "Flex Attention", 2024.
    """
    wanted = None if dtype is None else validate.floating_dtype("softmax", "dtype", dtype)
    if score is not None or _given(score_args):
        others = {"scale": scale, "bias": bias, "causal": causal, "dropout_rate": dropout_rate}
        y = _scored("softmax", x, axis, where, score, score_args, others)
        return y if wanted is None else y.astype(wanted)
    name, causal = "softmax", validate.flag("softmax", "causal", causal)
    threshold = dropout.threshold(name, dropout_rate)
    if dropout_rate != 0 and dropout_key is None:
        raise ValueError(f"jaxkern.{name}: dropout_rate of {dropout_rate} needs a dropout_key")
    if dropout_key is not None:
        validate.check_array(name, "dropout_key", "a key of jax.random", dropout_key, keys=True)
    key = dropout_key if threshold else None
    return _called(name, x, axis, where, scale, bias, key, causal=causal, threshold=threshold, dtype=wanted)


def replacement(x, where, scale: float, causal: bool, dtype) -> jax.Array:
    """`softmax` of float rows in place of operations of a plain program, which is exported plain."""
    return _called("softmax", x, -1, where, scale, None, None, causal=causal, dtype=jnp.dtype(dtype), replaces=True)


def log_softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    scale: ArrayLike = 1.0,
    bias: ArrayLike | None = None,
    score: Callable[..., ArrayLike] | None = None,
    score_args: Sequence[ArrayLike] = (),
) -> jax.Array:
    """s - log(sum(exp(s))) along `axis`, as `jax.nn.log_softmax`, for s = scale * x + bias or s = score(x).

    Args:
        x: array of any shape. float16, bfloat16 and float32 are computed in float32, float64 in
            float64, and rounded once; integers promote as in `jax.nn`; other floating-point types
            (float8) run through XLA, in float32.
        axis: an int, a tuple of ints, or None for all axes. Any single axis, and neighbouring ones,
            are read in place. Axes with other dimensions between them are first made neighbours, which costs a copy.
        where: boolean array that broadcasts to the shape of `x`; the kernel reads it without materialising it. Elements
            where it is False are masked: they do not enter the sum, and their result is -inf (the lowest finite
            number of a dtype without infinity, such as some float8 types).
        scale, bias, score, score_args: as for `softmax`.

    Returns:
        Array of the shape of `x`. A row that is entirely masked or -inf is -inf and has zero gradients. NaN or +inf
        makes its row NaN, as in `jax.nn`.

    Raises:
        TypeError: `x` is boolean, complex or not an array; `where` is not boolean; `bias` is not floating-point;
            `scale` is not a number; `score` as for `softmax`.
        ValueError: `axis` is out of bounds or repeats a dimension; `where` or `bias` does not broadcast to `x`;
            `scale` is not a scalar; `score` and `score_args` as for `softmax`.

    Derivatives: forward and reverse mode, of any order, by the same arguments as `softmax`. The gradient by `x` is one
    kernel. Its residual is the result in 16 bits; in wider types, and with other arguments, it is `x`, because the gradient
    would magnify the rounding error of the result.

    Cost: for n elements of e bytes, the call moves 2 n e bytes and the gradient 3 n e, as for `softmax`.

    >>> import jax.numpy as jnp, jaxkern
    >>> y = jaxkern.log_softmax(jnp.array([3.0, 3.0, 7.0]), where=jnp.array([True, True, False]))
    >>> [round(v, 4) for v in y.tolist()]
    [-0.6931, -0.6931, -inf]

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    if score is not None or _given(score_args):
        return _scored("log_softmax", x, axis, where, score, score_args, {"scale": scale, "bias": bias})
    return _called("log_softmax", x, axis, where, scale, bias)


def _called(name, x, axis, where, scale, bias, key=None, **flags):
    # Checked here because an error of jit would not name the operation.
    validate.check_array(name, "x", "an array or a number", x)
    if where is not None:
        validate.check_array(name, "where", "a boolean array", where)
    if isinstance(scale, bool) or not isinstance(scale, (int, float, np.integer, np.floating)):
        validate.check_array(name, "scale", "a real number or a scalar array", scale)
    else:
        scale = None if scale == 1 else float(scale)
    if bias is not None:
        validate.check_array(name, "bias", "an array of floating-point type", bias)
    axis = validate.static_axis(name, axis)
    return _along_axis(x, where, scale, bias, key, name=name, axis=axis, algorithm=forced(name), **flags)


# ---- from arguments to operands


# Inlined, so that a jaxpr holds the primitive alone. Jitted, so that an eager call costs no more than a jnp function.
@functools.partial(
    jax.jit, static_argnames=("name", "axis", "algorithm", "causal", "threshold", "dtype", "replaces"), inline=True
)
def _along_axis(
    x, where, scale, bias, key, *, name, axis, algorithm, causal=False, threshold=0, dtype=None, replaces=False
):
    x = validate.floating(name, x)
    wide = computed(x).dtype
    parts = [
        validate.full_rank(name, "bias", x, _bias(name, bias, x.dtype, wide)),
        validate.full_rank_mask(name, x, where),
    ]
    scale = _scale(name, scale, wide)
    axes = validate.sorted_axes(name, axis, x.shape)
    if causal and (x.ndim < 2 or axes != [x.ndim - 1]):
        raise ValueError(
            f"jaxkern.{name}: causal needs axis to be the last of two or more dimensions, got axis {axis} "
            f"for x of shape {x.shape}"
        )
    words = (None, None) if key is None else dropout.key_words(name, key)

    narrower = dtype is not None and dtype.itemsize == 2 and x.dtype == jnp.float32
    row_operation = functools.partial(
        softmax_of_rows,
        name=name,
        numbers={"scale": scale, "key0": words[0], "key1": words[1]},
        algorithm=algorithm,
        causal=causal,
        threshold=threshold,
        dtype=dtype if narrower else x.dtype,
        replaces=replaces,
    )
    if len(axes) == 1:
        y = row_operation(x, *parts, axis=axes[0])
    else:
        y = validate.along_axes(row_operation, x, parts, axes)
    return y if dtype is None else y.astype(dtype)


def _bias(name, bias, dtype, wide):
    if bias is None:
        return None
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"jaxkern.{name}: bias must be of floating-point type, got {bias.dtype}{list(bias.shape)}")
    return bias if bias.dtype in (dtype, wide) else bias.astype(wide)


def _scale(name, scale, wide):
    if scale is None:
        return None
    scale = jnp.asarray(scale)  # still a Python number if jit is disabled
    if scale.ndim:
        raise ValueError(f"jaxkern.{name}: scale must be a scalar, got shape {scale.shape}")
    if not jnp.issubdtype(scale.dtype, jnp.floating) and not jnp.issubdtype(scale.dtype, jnp.integer):
        raise TypeError(f"jaxkern.{name}: scale must be a real number, got {scale.dtype}")
    return scale.astype(wide)


# ---- scores


def _given(args) -> bool:
    return not isinstance(args, (tuple, list)) or len(args) > 0


def _scored(name: str, x, axis, where, score, args, others):
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
