"""quantize_rows and quantize_blocks of arrays spread over several devices: as in test_sharding.py."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding import arrays, check, mesh, put, same, several, split_by

import jaxkern


@several
@pytest.mark.parametrize("spec", [P("r"), P(("r", "c")), P("r", "c"), P(None, "c")])
@pytest.mark.parametrize("name", ["quantize_rows", "quantize_blocks"])
def test_split_rows(name, spec):
    """A row that is split sends its maximum; blocks of one device send nothing."""
    m = mesh()
    f = getattr(jaxkern, name)
    x = arrays((16, 1024))[0]
    (part,) = put(m, (x,), (spec,))
    compiled = jax.jit(f).lower(part).compile()
    q, scale = compiled(part)
    same([np.asarray(a).astype(np.float32) for a in (q, scale)], [np.asarray(a).astype(np.float32) for a in f(x)])
    assert q.sharding.is_equivalent_to(part.sharding, 2)
    cut = name == "quantize_rows" and split_by(m, spec[1:], "c")
    check(compiled.as_text(), {"all-reduce": 1} if cut else {}, most=16)


@several
def test_explicit_meshes():
    m = mesh("Explicit")
    x = arrays((16, 1024))[0]
    with jax.set_mesh(m):
        part = jax.device_put(x, NamedSharding(m, P("r", None)))
        for f in (jaxkern.quantize_rows, jaxkern.quantize_blocks):
            for a in jax.jit(f)(part):
                assert a.sharding.is_equivalent_to(part.sharding, 2)
        assert jax.jit(jaxkern.fake_quantize)(part).sharding.is_equivalent_to(part.sharding, 2)
