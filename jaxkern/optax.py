"""The loss of optax that jaxkern has a kernel for, with optax's name and arguments. It does not need optax.

from jaxkern.optax import softmax_cross_entropy_with_integer_labels     # in place of optax's
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

import jaxkern

__all__ = ["softmax_cross_entropy_with_integer_labels"]


def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike, labels: ArrayLike, axis: int | tuple[int, ...] = -1, where: ArrayLike | None = None
) -> jax.Array:
    """Cross-entropy of softmax(logits) and labels: `optax.softmax_cross_entropy_with_integer_labels`.

    The loss is `jaxkern.softmax_cross_entropy`, which has more options, such as label smoothing.

    Args:
        logits: array of any shape.
        labels: integers of the shape of `logits` without `axis`. They must not be negative, nor name a masked class. Labels of rows
            that `where` excludes as a whole may have any value, if `where` has one element for each row.
        axis: the dimension of the classes, an int. With a tuple, a label is an index of these dimensions when they are flattened.
        where: boolean array of the shape of `labels` or of `logits`: which rows, or which classes of each row, are included.

    Returns:
        Array of the shape of `labels`: the loss of each row in nats, 0 where nothing is included; float64 for float64 logits, else
        float32. optax's has the dtype of the logits.

    Raises:
        TypeError, ValueError: as `jaxkern.softmax_cross_entropy`.

    Derivatives: as of `jaxkern.softmax_cross_entropy`.

    Cost: as of `jaxkern.softmax_cross_entropy`. A tuple of axes that are not the last ones costs a copy of the logits.

    >>> import jax.numpy as jnp, jaxkern.optax
    >>> logits, labels = jnp.array([[0.0, 0.0], [0.0, 50.0]]), jnp.array([0, 1])
    >>> [round(x, 4) for x in jaxkern.optax.softmax_cross_entropy_with_integer_labels(logits, labels).tolist()]
    [0.6931, 0.0]
    """
    if where is not None and jnp.ndim(where) != jnp.ndim(logits):
        where = jnp.expand_dims(where, axis)
    if where is not None and all(jnp.shape(where)[k] == 1 for k in ([axis] if isinstance(axis, int) else axis)):
        labels = jnp.where(jnp.squeeze(where, axis), labels, 0)  # rows that are left out may have a label of -1
    if isinstance(axis, tuple):
        count = len(axis)
        last = lambda a: jnp.moveaxis(a, axis, range(-count, 0))
        flat = lambda a: last(a).reshape(*last(a).shape[:-count], -1)
        if where is not None:
            where = flat(jnp.broadcast_to(where, jnp.shape(logits)))
        logits, axis = flat(jnp.asarray(logits)), -1
    return jaxkern.softmax_cross_entropy(logits, labels, axis=axis, where=where)
