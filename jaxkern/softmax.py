"""softmax and log_softmax.

What they compute is in _definitions/softmax.py; a score function selects the primitives of _ops/score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax.typing import ArrayLike, DTypeLike

from jaxkern._core import validate
from jaxkern._core.validate import Axis
from jaxkern._definitions import dropout
from jaxkern._definitions.softmax_calls import called
from jaxkern._ops.score.arguments import given, scored


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
    if score is not None or given(score_args):
        others = {"scale": scale, "bias": bias, "causal": causal, "dropout_rate": dropout_rate}
        y = scored("softmax", x, axis, where, score, score_args, others)
        return y if wanted is None else y.astype(wanted)
    name, causal = "softmax", validate.flag("softmax", "causal", causal)
    threshold = dropout.threshold(name, dropout_rate)
    if dropout_rate != 0 and dropout_key is None:
        raise ValueError(f"jaxkern.{name}: dropout_rate of {dropout_rate} needs a dropout_key")
    if dropout_key is not None:
        validate.check_array(name, "dropout_key", "a key of jax.random", dropout_key, keys=True)
    key = dropout_key if threshold else None
    return called(name, x, axis, where, scale, bias, key, causal=causal, threshold=threshold, dtype=wanted)


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
    if score is not None or given(score_args):
        return scored("log_softmax", x, axis, where, score, score_args, {"scale": scale, "bias": bias})
    return called("log_softmax", x, axis, where, scale, bias)
