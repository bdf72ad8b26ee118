"""Random row functions: values and derivatives against plain jnp, and generated kernels, run on the CPU.

`python tests/random_rows.py` runs more of them.
"""

import plans
import pytest
import random_rows
from conftest import ON_GPU

needs_compiler = pytest.mark.skipif(random_rows.emulated.COMPILER is None, reason="no C++ compiler")


@pytest.mark.parametrize("number", range(40 if ON_GPU else 2))
def test_values(number):
    random_rows.check_values(3, number)


@needs_compiler
@plans.needs_runtime
@pytest.mark.parametrize("number", range(3))
def test_kernels(number):
    random_rows.check_kernels(3, number)
