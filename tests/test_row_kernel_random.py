"""Random row functions: values and derivatives against plain jnp, and generated kernels, run on the CPU.

`python tests/random_rows.py` runs more of them.
"""

import jax
import numpy as np
import plans
import pytest
import random_rows
from conftest import ON_GPU

from jaxkern._core import device
from jaxkern._engines.rows import plan
from jaxkern._engines.rows.function import trace

needs_compiler = pytest.mark.skipif(random_rows.emulated.COMPILER is None, reason="no C++ compiler")


@pytest.mark.parametrize("number", range(40 if ON_GPU else 2))
def test_values(number):
    random_rows.check_values(3, number)


@needs_compiler
@plans.needs_runtime
@pytest.mark.parametrize("number", range(3))
def test_kernels(number):
    random_rows.check_kernels(3, number)


@needs_compiler
@plans.needs_runtime
def test_indices_of_another_dimension():
    """They are read from the index of the row, by each pass."""
    x = np.random.default_rng().normal(size=(3, 2, 300)).astype(np.float32)
    at = lambda x, k: jax.lax.broadcasted_iota(x.dtype, x.shape, k)
    f = lambda x: (x * at(x, 0), (x * at(x, 1)).sum(-1), at(x, 0).max(-1))
    function, _, _ = trace(f, [x], -1, "f")
    found = plan.plan(device.H200, [x], [jax.ShapeDtypeStruct(*o) for o in plan.outputs(function)], function=function)
    results = random_rows.emulated.run(found, [x], plan.outputs(function))
    for y, wanted in zip(results, f(x), strict=True):
        np.testing.assert_allclose(np.reshape(y, wanted.shape), wanted, rtol=1e-5, atol=1e-4)
