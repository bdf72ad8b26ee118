"""Norms of rows."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxkern._core.validate import Axis
from jaxkern._definitions.operation import operation


@operation(columns=("scale",))
def scale_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    axis: Axis = -1,
    eps: float = 1e-5,
    residual: ArrayLike | None = None,
    dtype: DTypeLike | None = None,
    epilogue: Callable[..., ArrayLike] | None = None,
    epilogue_args: Sequence[ArrayLike] = (),
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """scale * x / |x| along `axis`, with the Euclidean norm |x|: the length of each row becomes `scale`.

    Args:
        scale: the length, an array of one element; or an array that broadcasts to the dimensions of `x` along `axis`, by which
            rows of length 1 are multiplied. Of a floating-point dtype of its own. None: 1.
        eps: the least norm that a row is divided by, a Python number. Rows of zeros stay 0.
        x, axis, residual, dtype, epilogue, epilogue_args: as for `rms_norm`.

    Returns:
        Array of the shape of `x`; with `residual` a pair, that and x + residual. Bitwise reproducible, and so are the
        gradients. A row with NaN contains NaN. A row is 0 if its sum of squares is infinite in the computing type.

    Raises:
        TypeError, ValueError: as `rms_norm`.

    >>> import jax.numpy as jnp, jaxkern
    >>> jaxkern.scale_norm(jnp.array([[3.0, 4.0], [0.0, 0.0]]), 10.0).tolist()
    [[6.0, 8.0], [0.0, 0.0]]

    Source: Nguyen and Salazar, "Transformers without Tears", 2019.
    """
    y = x * lax.rsqrt(jnp.maximum(jnp.sum(x * x, -1, keepdims=True), eps * eps))
    return y if scale is None else y * scale
