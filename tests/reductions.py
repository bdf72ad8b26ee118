"""What the tests of the reductions share: the operations, ours and JAX's."""

import jax
import jax.numpy as jnp
import pytest

import jaxkern

OPERATIONS = ("reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "logsumexp")
SELECTING = ("reduce_max", "reduce_min")
OURS = {name: getattr(jaxkern, name) for name in OPERATIONS}
JAX = {
    "reduce_sum": jnp.sum,
    "reduce_mean": jnp.mean,
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
    "logsumexp": jax.nn.logsumexp,
}

every_operation = pytest.mark.parametrize("operation", OPERATIONS)


def call(operation, x, axis=-1, mask=None, keepdims=False):
    return OURS[operation](x, axis=axis, where=mask, keepdims=keepdims)
