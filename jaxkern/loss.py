"""softmax_cross_entropy, softmax_cross_entropy_and_grad and linear_softmax_cross_entropy."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.lax import PrecisionLike
from jax.typing import ArrayLike, DTypeLike

from jaxkern._core import validate
from jaxkern._core.algorithms import forced
from jaxkern._core.dtypes import computing
from jaxkern._core.primitive import bind
from jaxkern._ops.cross_entropy import derivatives  # noqa: F401  registers itself
from jaxkern._ops.cross_entropy.primitive import Options, cross_entropy_both_p, cross_entropy_p
from jaxkern._ops.cross_entropy.reference import classes_of
from jaxkern._ops.indexing.arguments import integers, safe_index
from jaxkern._ops.linear_cross_entropy import derivatives as linear_derivatives  # noqa: F401  registers itself
from jaxkern._ops.linear_cross_entropy import plan as linear_plan
from jaxkern._ops.linear_cross_entropy.primitive import Spec, linear_cross_entropy_p, linear_cross_entropy_sum_p
from jaxkern._ops.linear_cross_entropy.reference import problem as linear_problem
from jaxkern._ops.score import loss as scores
from jaxkern._ops.score.arguments import prepare_scores

_OF_CLASSES = ": one-hot labels have theirs in labels.argmax(-1), and optax.softmax_cross_entropy takes probabilities"


def softmax_cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    axis: int = -1,
    where: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    score: Callable[..., ArrayLike] | None = None,
    score_args: Sequence[ArrayLike] = (),
) -> jax.Array:
    """log(sum(exp(x))) - x[y] for a row of logits x with the label y, as
    `optax.softmax_cross_entropy_with_integer_labels`.

    With label smoothing and a z loss:

        lse = log(sum(exp(x)))
        loss = lse - (1 - label_smoothing) * x[y] - label_smoothing * mean(x) + z_loss * lse**2

    Args:
        logits: array of any shape. float16, bfloat16 and float32 are computed in float32, float64 in float64.
        labels: classes, an array of any integer dtype (64 bits even with x64 off) and of the shape of `logits` without
            `axis`. Negative labels do not count from the end.
        axis: the dimension of the classes, an int.
        where: boolean array that broadcasts to the shape of `logits`; the kernel reads it in place. Classes where it is
            False are masked: they enter neither lse nor the mean, and a label that names one makes the loss infinite.
        label_smoothing: a Python number from 0 to 1: the part of the target that is spread evenly over the classes.
        z_loss: a Python number: the weight of lse**2, a penalty that keeps lse near 0.
        ignore_index: an int. Rows with this label have loss 0 and gradient 0. It may be a class, such as the one that pads.
        score, score_args: as for `softmax`: x above is then `score(logit, *indices, *args)`, a function of scalars that is
            compiled into the kernels. A class with a score of -inf counts as masked.

    Returns:
        Array of the shape of `labels`: the loss of each row in nats; float64 for float64 logits, else float32. The loss
        and the gradient of a row are NaN if its label is neither a class nor `ignore_index`, or if a logit is NaN or
        +inf. They are 0 if all classes are masked or all logits are -inf. An infinite cotangent makes the gradient of the
        label's class NaN and of the others infinite, as in JAX; with label smoothing all of them are NaN.

    Raises:
        TypeError: `logits`, `labels` or `where` is of the wrong type; `label_smoothing` or `z_loss` is not a Python number;
            `score` contains an operation that a kernel cannot run, or does not take these arguments.
        ValueError: the shapes or `axis` do not match; `label_smoothing` is not in [0, 1]; an array of `score_args` does not
            broadcast to the logits.

    Derivatives: forward and reverse mode, of any order, by `logits`, `score_args` and scalars that `score` closes over. The
    residuals are the logits and a few numbers for each row.

    Cost: for n logits of e bytes, the loss reads n e bytes; the gradient reads them again and writes n e bytes: 3 n e in
    all. It overwrites the logits if they are donated or an intermediate result. If the cotangents do not depend on the loss
    (a mean or a weighted sum), a program compiled from `jit(value_and_grad(...))` computes loss and gradient in one read: 2
    n e. For that, the classes are the last axis, and a row fits into registers (2 KB), or on Hopper and newer into the
    shared memory of up to 16 blocks. With `score`, loss and gradient are one kernel each, which compute the scores: 3 n e,
    one read more with label smoothing, and never in place.

    >>> import jax.numpy as jnp, jaxkern
    >>> logits = jnp.array([[1.0, 1.0], [0.0, 50.0], [3.0, 4.0]])
    >>> [round(x, 4) for x in jaxkern.softmax_cross_entropy(logits, jnp.array([0, 1, -1]), ignore_index=-1).tolist()]
    [0.6931, 0.0, 0.0]
    >>> cap = lambda s, row, k, offset: 30 * jnp.tanh(s / 30) + offset
    >>> loss = jaxkern.softmax_cross_entropy(logits, jnp.array([0, 1, 1]), score=cap, score_args=[jnp.array([0.0, 1.0])])
    >>> [round(x, 4) for x in loss.tolist()]
    [1.3133, 0.0, 0.1286]

    Source: label smoothing, Szegedy et al., "Rethinking the Inception Architecture", 2016; z loss, de Brébisson and
    Vincent, "The Z-loss: a shift and scale invariant classification loss", 2016, as in PaLM (2022).
    """
    name = "softmax_cross_entropy"
    options = _checked(name, logits, labels, where, label_smoothing, z_loss, ignore_index)
    axis = validate.integer(name, "axis", axis)
    if score is not None or not isinstance(score_args, (tuple, list)) or len(score_args) > 0:
        x, operands, static = prepare_scores(name, "logits", logits, axis, where, score, score_args)
        # This uses the kernels of softmax.
        return _loss_of_scores(
            x, safe_index(labels), where, operands, algorithm=forced("softmax"), options=options, **static
        )
    return _call(
        _loss,
        logits,
        safe_index(labels),
        where,
        axis=axis,
        algorithm=forced("softmax_cross_entropy"),
        options=options,
    )


def softmax_cross_entropy_and_grad(
    logits: ArrayLike,
    labels: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    axis: int = -1,
    where: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The losses of `softmax_cross_entropy`, and the gradient of their weighted sum, in one read of the logits.

    Args:
        logits: array of any shape, floating-point, as for `softmax_cross_entropy`.
        labels: integer array of the shape of `logits` without `axis`: the class of each row.
        weights: a number for each row, broadcast to the shape of `labels`; ones by default. For a mean: 1 / rows.
        axis: the dimension of the classes, an int.
        where: boolean array that broadcasts to the shape of `logits`: the classes that count.
        label_smoothing: a Python number from 0 to 1.
        z_loss: a Python number: the weight of lse**2.
        ignore_index: an int: rows with this label have loss 0 and gradient 0.

    Returns:
        (loss, gradient): the unweighted losses, and d(sum(weights * loss))/d(logits), of the dtype of the logits. The
        gradient overwrites the logits if they are donated or an intermediate result.

    Raises:
        TypeError: `logits`, `labels` or `where` is of the wrong type; `weights` are not real; `label_smoothing` or `z_loss` is
            not a Python number.
        ValueError: the shapes or `axis` do not match; `weights` do not broadcast; `label_smoothing` is not in [0, 1].

    Derivatives: forward and reverse mode, of any order, of the losses and of the gradient, by `logits` and `weights`.

    Cost: for n logits of e bytes, n e bytes are read and n e are written, in place if the logits may be overwritten. Rows
    that do not fit, as for `softmax_cross_entropy`, are read twice.

    >>> import jax.numpy as jnp, jaxkern
    >>> loss, gradient = jaxkern.softmax_cross_entropy_and_grad(jnp.zeros((1, 4)), jnp.array([1]), 2.0)
    >>> gradient.tolist()
    [[0.5, -1.5, 0.5, 0.5]]

    Source: loss and gradient in one pass, Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024.
    """
    name = "softmax_cross_entropy_and_grad"
    options = _checked(name, logits, labels, where, label_smoothing, z_loss, ignore_index)
    axis = validate.integer(name, "axis", axis)
    if weights is not None:
        validate.check_array(name, "weights", "an array or a number", weights)
    return _call(
        _both,
        logits,
        safe_index(labels),
        weights,
        where,
        axis=axis,
        algorithm=forced("softmax_cross_entropy"),
        options=options,
    )


def linear_softmax_cross_entropy(
    h: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    weights: ArrayLike | None = None,
    reduction: typing.Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    soft_cap: float | None = None,
    transpose_weight: bool = False,
    logits_dtype: DTypeLike | None = None,
    precision: PrecisionLike = None,
    memory: int | None = None,
) -> jax.Array:
    """`softmax_cross_entropy(h @ weight + bias, labels)`, the head of a language model, without its array of logits.

    Memory beside operands and results, for n rows, chunks of r rows, a vocabulary of v and logits of e bytes,
    by algorithm:

    * "whole": n v e bytes, where this is within the budget, in one chunk.
    * "rows": r v e + 4 d v bytes, in chunks of rows. The accumulator in float32, for the gradient of `weight`, is not
      needed if that is float32 itself, or is not asked for.
    * "vocabulary": about the budget, where an accumulator is too large. The gradient of `weight` is computed in chunks of
      columns, and some logits are computed twice (a third more work at most).

    `jaxkern.algorithms.choose("linear_softmax_cross_entropy", rows, d, vocabulary, dtype=..., memory=...)` says which algorithm
    runs, and `jaxkern.algorithms.force` forces one, on every platform. On platforms without kernels, XLA may hold two
    copies of a chunk.

    Args:
        h: activations [..., d]: float16, bfloat16, float32 or float64.
        weight: [d, vocabulary]. It is converted to the type of `h` for the products; its gradient is rounded once, to its own
            type. A float32 weight with bfloat16 activations has a float32 gradient, and needs no accumulator.
        labels: classes, integers of the shape of `h` without the last dimension.
        bias: [vocabulary], added to the logits.
        weights: a number for each row, broadcast to the shape of `labels`; ones by default.
        reduction: "mean": sum(weights * loss) / sum(weights) over the rows that are not ignored, 0 if all are. "sum":
            sum(weights * loss). "none": weights * loss.
        label_smoothing, z_loss, ignore_index: as for `softmax_cross_entropy`.
        soft_cap: a positive Python number. The logits are replaced by soft_cap * tanh(logits / soft_cap).
        transpose_weight: `weight` is [vocabulary, d], as the table of an embedding is (tied embeddings).
        logits_dtype: the type that logits are rounded to: the type of `h` (the default), or float32.
        precision: the precision of the products, as for `jnp.dot`.
        memory: the budget in bytes, per device. The default is 512 MiB of logits and the accumulator.

    Returns:
        The loss in nats: a number, or with "none" an array of the shape of `labels`; float64 for float64 `h`, else float32.

    Raises:
        TypeError: `h`, `weight` or `bias` is boolean, complex or not an array; `labels` are not integers; `weights` are not
            real; an option is of the wrong type.
        ValueError: shapes do not match; `reduction` or `precision` is unknown; `label_smoothing` is not in [0, 1]; `soft_cap`
            is not positive; `logits_dtype` is neither the type of `h` nor its computing type; `memory` is not positive, or
            too little for any algorithm.

    Derivatives: forward and reverse mode, by `h`, `weight`, `bias` and `weights`. Derivatives of higher order use all
    logits at once.

    Cost: chunks of logits are computed, reduced to losses, and turned into their gradients in place, in the memory above.
    With a mean or a sum, the same pass computes the gradients of `h`, `weight` and `bias` if the program differentiates the
    loss: three matrix products, as many as with all logits at once. With "none" the cotangents are not known yet, so that
    the backward pass computes the logits again: four products.

    >>> import jax, jax.numpy as jnp, jaxkern
    >>> h, table = jnp.ones((4, 8)), jnp.zeros((100, 8))
    >>> loss = lambda h, table: jaxkern.linear_softmax_cross_entropy(h, table, jnp.arange(4), transpose_weight=True)
    >>> value, (dh, dtable) = jax.value_and_grad(loss, argnums=(0, 1))(h, table)
    >>> round(float(value), 4), dtable.shape
    (4.6052, (100, 8))

    Source: gradients in the forward pass, chunk by chunk: Hsu et al., "Liger Kernel", 2024; the vocabulary in chunks: Wijmans
    et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024; the cap of logits, "Gemma 2", 2024.
    """
    name = "linear_softmax_cross_entropy"
    options = _checked(name, h, labels, None, label_smoothing, z_loss, ignore_index, "h")
    for argument, value in (("weight", weight), ("bias", bias), ("weights", weights)):
        if value is not None or argument == "weight":
            validate.check_array(name, argument, "an array", value)
    validate.choice(name, "reduction", reduction, ("mean", "sum", "none"))
    transpose_weight = validate.flag(name, "transpose_weight", transpose_weight)
    cap = 0.0 if soft_cap is None else validate.number(name, "soft_cap", soft_cap)
    if soft_cap is not None and cap <= 0:
        raise ValueError(f"jaxkern.{name}: soft_cap must be positive, got {soft_cap}")
    if memory is not None:
        memory = validate.integer(name, "memory", memory, or_none=True)
        if memory < 1:
            raise ValueError(f"jaxkern.{name}: memory must be positive, got {memory}")
    # The products are traced when the primitive is lowered, perhaps outside of a context manager that is active now.
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    else:
        _check_precision(name, precision)
    spec = Spec(
        options,
        cap,
        transpose_weight,
        tuple(precision) if isinstance(precision, list) else precision,
        "" if logits_dtype is None else validate.floating_dtype(name, "logits_dtype", logits_dtype).name,
        int(memory or 0),
        forced(name),
    )
    return _call(_linear, h, weight, safe_index(labels), bias, weights, options=spec, reduction=reduction)


def _check_precision(name, precision):
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    try:
        jax.eval_shape(functools.partial(jnp.dot, precision=precision), one, one)
    except (TypeError, ValueError):
        raise ValueError(
            f"jaxkern.{name}: precision must be one that jnp.dot takes, got {validate.shown(precision)}"
        ) from None


def _call(f, *arrays, **static):
    """Calls f, compiled if the call is eager.

    Under a transformation the primitives of f become part of the surrounding program, which the lowering rules in
    _ops/cross_entropy/primitive.py inspect. A separate jit would hide it from them.
    """
    if not any(isinstance(a, Tracer) for a in arrays):
        return _compiled(f, *arrays, **static)
    return f(*(None if a is None else jnp.asarray(a) for a in arrays), **static)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("axis", "algorithm", "options", "reduction"))
def _compiled(f, *arrays, **static):
    return f(*arrays, **static)


def _checked(name, logits, labels, where, label_smoothing, z_loss, ignore_index, argument="logits") -> Options:
    """Checks the arguments that jit cannot check, and returns the options; errors name `logits` as `argument`."""
    validate.check_array(name, argument, "an array", logits)
    validate.check_array(name, "labels", "an array of integers", labels)
    if where is not None:
        validate.check_array(name, "where", "a boolean array", where)
    values = {}
    for argument, value in (("label_smoothing", label_smoothing), ("z_loss", z_loss)):
        values[argument] = validate.number(name, argument, value)
    if not 0 <= values["label_smoothing"] <= 1:
        raise ValueError(f"jaxkern.{name}: label_smoothing must be from 0 to 1, got {label_smoothing}")
    if ignore_index is not None:
        ignore_index = validate.integer(name, "ignore_index", ignore_index, or_none=True)
    return Options(values["label_smoothing"], values["z_loss"], ignore_index)


def _prepared(name, logits, labels, where, axis, options):
    """Returns (logits, labels, *mask), the axis and the options in the form that the primitives take."""
    logits = validate.floating(name, logits, "logits")
    labels = integers(name, "labels", labels, _OF_CLASSES)
    (axis,) = validate.sorted_axes(name, axis, logits.shape, "logits")
    rows = logits.shape[:axis] + logits.shape[axis + 1 :]
    if labels.shape != rows:
        raise ValueError(
            f"jaxkern.{name}: labels of shape {labels.shape} for logits of shape {logits.shape} and axis {axis}, "
            f"which take labels of shape {rows}"
        )
    options = _representable(options, labels)
    mask = validate.full_rank_mask(name, logits, where, "logits")
    return (logits, labels, *(() if mask is None else (mask,))), axis, options


def _representable(options, labels) -> Options:
    """The options, without an `ignore_index` that no label of this dtype has."""
    if options.ignore is None:
        return options
    info = jnp.iinfo(labels.dtype)
    return options if int(info.min) <= options.ignore <= int(info.max) else options._replace(ignore=None)


def _loss(logits, labels, where, *, axis, algorithm, options):
    operands, axis, options = _prepared("softmax_cross_entropy", logits, labels, where, axis, options)
    return bind(cross_entropy_p, *operands, axis=axis, algorithm=algorithm, options=options)[0]


@functools.partial(jax.jit, static_argnames=("axis", "algorithm", "options", "function", "indexed"), inline=True)
def _loss_of_scores(x, labels, where, operands, *, axis, algorithm, options, function, indexed):
    name = "softmax_cross_entropy"
    (_, labels, *mask), axis, options = _prepared(name, x, labels, where, axis, options)
    parts = [validate.full_rank(name, "score_args", x, a, "logits") for a in operands]
    label, bad, ignored = classes_of(labels, x.shape[axis], axis, options)
    label = jnp.where(bad, scores.BAD, jnp.where(ignored, scores.IGNORED, label.astype(jnp.int32)))
    loss, *_ = bind(
        scores.softmax_score_loss_p,
        x.astype(function.in_dtypes[0]),
        label,
        *parts,
        mask[0] if mask else None,
        axis=axis,
        algorithm=algorithm,
        function=function,
        indexed=indexed,
        options=options._replace(ignore=None),
    )
    return jnp.squeeze(loss, axis)


def _both(logits, labels, weights, where, *, axis, algorithm, options):
    name = "softmax_cross_entropy_and_grad"
    (logits, labels, *mask), axis, options = _prepared(name, logits, labels, where, axis, options)
    dtype = computing(logits.dtype)
    weights = _weights(name, weights, labels, dtype)
    loss, *_, gradient = bind(
        cross_entropy_both_p, logits, labels, weights, *mask, axis=axis, algorithm=algorithm, options=options
    )
    return loss, gradient


def _weights(name, weights, labels, dtype):
    """A number of this type for each row."""
    weights = jnp.ones((), dtype) if weights is None else jnp.asarray(weights)
    if not (jnp.issubdtype(weights.dtype, jnp.floating) or jnp.issubdtype(weights.dtype, jnp.integer)):
        raise TypeError(f"jaxkern.{name}: weights must be real, got {weights.dtype}{list(weights.shape)}")
    whole = labels.shape[labels.ndim - weights.ndim :]
    broadcasts = weights.ndim <= labels.ndim and all(n == 1 or n == m for n, m in zip(weights.shape, whole))
    if not broadcasts:
        raise ValueError(
            f"jaxkern.{name}: weights of shape {weights.shape} do not broadcast to labels of shape {labels.shape}"
        )
    return jnp.broadcast_to(weights.astype(dtype), labels.shape)


def _linear(h, weight, labels, bias, weights, *, options, reduction):
    name, spec = "linear_softmax_cross_entropy", options
    h = validate.floating(name, h, "h")
    weight = validate.floating(name, weight, "weight")
    labels = integers(name, "labels", labels, _OF_CLASSES)
    if h.ndim < 1 or weight.ndim != 2 or weight.shape[1 if spec.transposed else 0] != h.shape[-1]:
        wanted = "[vocabulary, d]" if spec.transposed else "[d, vocabulary]"
        raise ValueError(
            f"jaxkern.{name}: h of shape {h.shape} and weight of shape {weight.shape}; they must be [..., d] and {wanted}"
        )
    if labels.shape != h.shape[:-1]:
        raise ValueError(
            f"jaxkern.{name}: labels of shape {labels.shape} for h of shape {h.shape}, which takes labels of shape "
            f"{h.shape[:-1]}"
        )
    classes = weight.shape[0 if spec.transposed else 1]
    if isinstance(classes, int) and classes == 0:
        raise ValueError(f"jaxkern.{name}: weight of shape {weight.shape} has no classes")
    if bias is not None:
        bias = validate.floating(name, bias, "bias")
        if bias.shape != (classes,):
            raise ValueError(f"jaxkern.{name}: bias of shape {bias.shape} for {classes} classes")
    spec = spec._replace(
        loss=_representable(spec.loss, labels),
        logits_dtype=spec.logits_dtype or h.dtype.name,
    )
    if spec.logits_dtype not in (h.dtype.name, computing(h.dtype).name):
        raise ValueError(
            f"jaxkern.{name}: logits_dtype must be {h.dtype.name} or {computing(h.dtype).name} for h of type {h.dtype}, "
            f"got {spec.logits_dtype}"
        )
    asked = linear_problem(h, weight, spec, "both")
    if asked is not None and spec.memory:
        linear_plan.choose(asked)  # raises if nothing fits
    dtype = computing(h.dtype)
    given = weights
    weights = _weights(name, weights, labels, dtype)
    if reduction == "none":
        loss = bind(linear_cross_entropy_p, h, weight, labels, bias, spec=spec)
        return loss if given is None else weights * loss
    if reduction == "mean":
        counted = weights if spec.loss.ignore is None else jnp.where(labels == spec.loss.ignore, 0, weights)
        total = jnp.sum(counted)
        weights = counted / jnp.where(total == 0, 1, total)
    return bind(linear_cross_entropy_sum_p, h, weight, labels, weights, bias, spec=spec)
