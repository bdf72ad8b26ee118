"""quantize_rows and quantize_blocks of arrays spread over several devices: as in test_sharding.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding import arrays, check, every_mesh, mesh, put, same, several, split_by

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


def flat(y):
    return [np.asarray(a).astype(np.float32) for a in jax.tree.leaves(y)]


@several
@every_mesh
@pytest.mark.parametrize("spec", [P("r"), P(("r", "c")), P("r", "c"), P(None, "c")])
@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_norms(shape_of_mesh, name, spec, block):
    """A row that is split sends its statistics and its maximum; with blocks it is gathered."""
    m = mesh(shape=shape_of_mesh)
    f = lambda x, r: getattr(jaxkern, name)(x, residual=r, quantize=jaxkern.Quantization(jnp.int8, block))
    x, r, _ = arrays((16, 1024))[:3]
    parts = put(m, (x, r), (spec, spec))
    compiled = jax.jit(f).lower(*parts).compile()
    found = compiled(*parts)
    # XLA adds in an order that depends on how rows are split.
    for a, b in zip(flat(found), flat(f(x, r)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 if a.shape != x.shape else 1)
    cut = split_by(m, spec[1:], "c")
    if not cut:
        check(compiled.as_text(), {})
        assert found[0][0].sharding.is_equivalent_to(parts[0].sharding, 2)
    elif block is None:
        check(compiled.as_text(), {"all-reduce": 2 + (name == "layer_norm")}, most=16)


@several
@every_mesh
@pytest.mark.parametrize("spec", [P("r"), P("r", "c"), P(None, "c")])
def test_one_scale_and_transposed_copies(shape_of_mesh, spec):
    """Tiles are on one device each; of one scale for all, the maximum is sent along each axis."""
    m = mesh(shape=shape_of_mesh)
    x = arrays((1024, 2048))[0]
    (part,) = put(m, (x,), (spec,))
    blocks = lambda x: jaxkern.quantize_blocks(x, transposed=True)
    tensor = lambda x: jaxkern.quantize_tensor(x, scale=0.01, transposed=True)
    axes = sum(split_by(m, spec, a) for a in "rc")
    for f, sent in ((blocks, {}), (tensor, {"all-reduce": axes})):
        compiled = jax.jit(f).lower(part).compile()
        found = compiled(part)
        same(flat(found), flat(f(x)))
        check(compiled.as_text(), sent, most=16)
    q, q_t = found[0], found[3]
    assert q.sharding.is_equivalent_to(part.sharding, 2)
    turned = NamedSharding(m, P(*(*spec, None)[:2][::-1]))
    assert q_t.sharding.is_equivalent_to(turned, 2)


@several
def test_norms_and_transposed_copies_on_explicit_meshes():
    """Nothing is gathered where devices have whole blocks."""
    m = mesh("Explicit")
    x = arrays((1024, 2048))[0]
    how = jaxkern.Quantization(block=128)
    calls = {
        lambda x: jaxkern.rms_norm(x, residual=x, quantize=how): P("r", None),
        lambda x: jaxkern.rms_norm(x, quantize=jaxkern.Quantization(scale=0.01)): P("r", None),
        lambda x: jaxkern.quantize_blocks(x): P("r", None),
        lambda x: jaxkern.quantize_blocks(x, transposed=True): P("r", None),
        lambda x: jaxkern.quantize_tensor(x, scale=0.01, transposed=True): P("r", None),
        lambda x: jaxkern.quantize_rows(x, transposed=True): P("r", None),
        lambda x: jaxkern.quantize_blocks(x, transposed=True, block=128): P("r", "c"),
        lambda x: jaxkern.quantize_blocks(x, block=256): P(None, ("r", "c")),
        lambda x: jaxkern.quantize_blocks(x[:384, :384], transposed=True): P(None, None),
    }
    for f, spec in calls.items():
        wanted = flat(f(x))
        with jax.set_mesh(m):
            part = jax.device_put(x, NamedSharding(m, spec))
            compiled = jax.jit(f).lower(part).compile()
            for a, b in zip(flat(compiled(part)), wanted, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert "all-gather" not in compiled.as_text()


@several
def test_blocks_that_devices_share_are_gathered():
    m = mesh("Explicit")
    x = arrays((384, 384))[0]
    wanted = flat(jaxkern.quantize_blocks(x, transposed=True))
    with jax.set_mesh(m):
        part = jax.device_put(x, NamedSharding(m, P(("r", "c"), None)))
        same(flat(jax.jit(lambda x: jaxkern.quantize_blocks(x, transposed=True))(part)), wanted)
