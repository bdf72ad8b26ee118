"""rms_norm and layer_norm of arrays spread over several devices; see test_sharding.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding import check, every_mesh, mesh, put, same, several, split_by

import jaxkern

SHAPE = (8, 4, 64)


def arrays():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(0.3, 1, s), jnp.float32) for s in (SHAPE, SHAPE, SHAPE, SHAPE, (64,), (64,))]


def step(name):
    """Values and all gradients, with a residual."""

    def f(x, residual, g, g_sum, scale, bias):
        def of(x, residual, scale, bias):
            more = (bias,) if name == "layer_norm" else ()
            return getattr(jaxkern, name)(x, scale, *more, residual=residual)

        ys, pull = jax.vjp(of, x, residual, scale, bias)
        return ys, pull((g, g_sum))

    return f


@several
@every_mesh
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("spec", [P("r"), P("r", "c"), P(("r", "c")), P(None, None, "r"), P("r", None, "c")])
def test_rows(shape_of_mesh, name, spec):
    """Split rows send two numbers each way; other splits the sums of scale and bias alone."""
    m = mesh(shape=shape_of_mesh)
    args = put(m, arrays(), (spec,) * 4 + (P(),) * 2)
    outputs = (NamedSharding(m, spec),) * 2, (*(NamedSharding(m, spec),) * 2, *(NamedSharding(m, P()),) * 2)
    f = jax.jit(step(name), out_shardings=outputs).lower(*args).compile()
    same(f(*args), jax.jit(step(name))(*arrays()))
    cut, centred = split_by(m, spec[2:], ("r", "c")), name == "layer_norm"
    # Forward and backward the statistics, then mean(h * z) and mean(h).
    sent = {"all-reduce": (5 + centred if cut else 0) + 1 + centred}
    if cut:  # scale and bias have the same split, and leave whole
        sent["all-gather"] = 2
    check(f.as_text(), sent, most=2 * 64)


@several
@pytest.mark.parametrize("spec", [P("r"), P("r", None, "c")])
def test_explicit_axes(spec):
    m = mesh("Explicit")
    with jax.sharding.use_mesh(m) if hasattr(jax.sharding, "use_mesh") else jax.set_mesh(m):
        args = put(m, arrays(), (spec,) * 4 + (P(),) * 2)
        found = jax.jit(step("layer_norm"))(*args)
        y = jax.jit(lambda x: jaxkern.rms_norm(x, axis=(1, 2)))(args[0])
    same(found, jax.jit(step("layer_norm"))(*arrays()))
    same(y, jaxkern.rms_norm(arrays()[0], axis=(1, 2)))


@several
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_shard_map_with_replicated_scale(name):
    """The gradient of what all devices share is summed over them."""
    m = mesh(names=("r",))
    x, _, g, _, scale, bias = arrays()

    def f(x, scale, bias):
        more = (bias,) if name == "layer_norm" else ()
        return getattr(jaxkern, name)(x, scale, *more)

    mapped = jax.shard_map(f, mesh=m, in_specs=(P("r"), P(), P()), out_specs=P("r"))
    found, wanted = (
        jax.jit(jax.grad(lambda *a, h=h: (h(*a) * g).sum(), (0, 1, 2)))(x, scale, bias) for h in (mapped, f)
    )
    same(found, wanted)


@several
def test_rows_that_do_not_divide():
    m = mesh(names=("r",))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(13, 61)), jnp.float32)
    f = lambda x, s: jnp.sin(jaxkern.layer_norm(x, s, s))
    for spec in (P("r"), P(None, "r")):
        g = lambda x, s, spec=spec: f(jax.lax.with_sharding_constraint(x, NamedSharding(m, spec)), s).sum()
        found, wanted = (jax.jit(jax.value_and_grad(h, (0, 1)))(x, jnp.ones(61)) for h in (g, lambda *a: f(*a).sum()))
        same(found, wanted)
