"""What the tests of `jaxkern.accelerate` share: a function run plainly and on jaxkern, and the comparison of the results."""

import jax
import numpy as np
from conftest import ON_GPU

import jaxkern
from jaxkern._core import registry, switch

PLATFORM = "cuda" if ON_GPU else "cpu"
ALL = tuple(n for n in switch.OPERATIONS if n != "rows")  # these would take what the others leave
forced = jaxkern.accelerate(only=ALL, force=True)


def both(f, *args):
    """The results of f, plain and on jaxkern, and the names of the operations that a GPU takes."""
    jitted, platform = jax.jit(f), "cuda" if registry.kernels_run() else PLATFORM
    plain = jitted(*args)
    with forced:
        own = jitted(*args)
        taken = [d.operation for d in jaxkern.explain(jitted, platform)(*args).taken]
    return plain, own, taken


def close(plain, own, rtol=2e-5):
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(own), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
        scale = np.max(np.abs(a), where=np.isfinite(a), initial=1)
        np.testing.assert_allclose(b, a, rtol=rtol, atol=rtol * scale)
