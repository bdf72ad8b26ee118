"""What the tests of all row operations are given: numbers, masks, and shapes with an axis."""

import jax.numpy as jnp
import numpy as np

from jaxkern._core import compat


def normal(shape, dtype, scale=3.0, seed=0):
    with compat.enable_x64(dtype == "float64"):
        return jnp.asarray(np.random.default_rng(seed).normal(0, scale, shape), dtype)


def random_mask(shape, density=0.7, seed=2):
    return jnp.asarray(np.random.default_rng(seed).random(shape) < density)


ROWS = [  # shape, axis, mask shape
    ((7,), 0, None),
    ((5, 1), -1, None),
    ((1, 9), 0, None),
    ((64, 128), -1, None),
    ((3, 1003), -1, (3, 1003)),
    ((33, 17), 0, (1, 17)),
    ((4, 50, 6), 1, None),
    ((4, 50, 6), 1, (4, 1, 6)),
    ((4, 50, 6), 1, (1, 50, 1)),
    ((2, 3, 5, 64), -1, (2, 1, 5, 64)),
    ((2, 3, 5, 64), -1, (3, 1, 1)),
    ((2, 3, 5, 64), 2, (64,)),
    ((2, 3, 5, 64), 0, ()),
    ((2, 3, 5, 64), (2, 3), (3, 1, 64)),
    ((2, 3, 5, 64), (-1, 0), (2, 1, 5, 1)),
    ((2, 3, 5, 64), (3, 1, 2), None),
    ((2, 1, 5, 1, 3), (0, 2), (1, 5, 1, 3)),
    ((2, 3, 5), None, (3, 1)),
    ((2, 3, 5), (), None),
    ((2, 2, 2, 2, 2, 2, 2, 2, 2, 3), -1, (2, 1, 2, 1, 2, 1, 2, 1, 2, 3)),  # more groups than a kernel takes
    ((2, 2, 2, 3, 2, 2, 2, 2, 2, 2), 3, (2, 2, 2, 3, 1, 2, 1, 2, 1, 2)),
]

# Around the ends of packs (16 bytes) and of the algorithms that rows of so many bytes run in.
WIDTHS = sorted(
    {max(1, w + d) for w in (1, 8, 16, 64, 128, 256, 1024, 2048) for d in (-1, 0, 1)}
    | {4097, 8191, 16384, 16387, 32771, 50257}
)
