"""Layers of other libraries under `jaxkern.accelerate`, spread over several devices; see test_sharding.py."""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding import mesh, same, several
from test_accelerate_norms import (
    NAMES,
    PLATFORM,
    _stand_ins,  # noqa: F401  a fixture
    stand_in_equinox,
    stand_in_haiku,
    stand_in_nnx,
)

import jaxkern
from jaxkern._core import switch

LIBRARIES = [stand_in_nnx, stand_in_equinox, stand_in_haiku]  # linen has nnx's functions
SPECS = [P("r"), P("r", "c"), P(None, None, "r"), P("r", None, "c"), P(None, None, ("r", "c"))]
SHAPE = (8, 4, 64)
forced = jaxkern.accelerate(only=NAMES, force=True)


def inputs(seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(0.5, 2, SHAPE), jnp.float32)


def spread(m, tree, spec):
    return jax.tree.map(lambda a: jax.device_put(a, NamedSharding(m, spec)), tree)


def sent(text):
    """kind of message -> how many a compiled program sends, and how many elements in all of them."""
    found = collections.defaultdict(lambda: (0, 0))
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    for shapes, kind, start in re.findall(rf"= (\(?[\w\[\],{{}}:() ]*?\)?) ({kinds})(-start)?\(", text):
        dims = re.findall(r"\w\[([\d,]*)\]", shapes)
        elements = sum(math.prod(map(int, d.split(","))) if d else 1 for d in dims)
        count, before = found[kind]
        found[kind] = count + 1, before + elements // (2 if start else 1)
    return found


def step(apply):
    def f(params, x, g):
        y, pull = jax.vjp(apply, params, x)
        return y, pull(g)

    return f


@several
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_sends_no_more_than_before(library, name, spec):
    m = mesh()
    params, apply = library(name, inputs())
    args = spread(m, params, P()), spread(m, inputs(), spec), spread(m, inputs(1), spec)
    whole = jax.tree.map(lambda _: NamedSharding(m, P()), params)
    f = jax.jit(step(apply), out_shardings=(NamedSharding(m, spec), (whole, NamedSharding(m, spec))))
    plain, before = f(*args), sent(f.lower(*args).compile().as_text())
    with forced:
        own, after = f(*args), sent(f.lower(*args).compile().as_text())
        assert [d.operation for d in jaxkern.explain(f, PLATFORM)(*args).taken] == [name] * 2
    same(own, plain, 1e-5)
    assert all(a <= b for kind in after for a, b in zip(after[kind], before[kind])), (dict(after), dict(before))


@several
@pytest.mark.parametrize("spec", [P(None, "r"), P("r", "c"), P(None, ("r", "c")), P(None, "r", "c")])
@pytest.mark.parametrize("name", NAMES)
def test_rows_that_do_not_divide_evenly(name, spec):
    """As where a sequence that is split loses its first element."""
    m, x = mesh(), jnp.concatenate([inputs(), inputs(1)], 1)
    params, apply = stand_in_nnx(name, x)
    f = jax.jit(jax.grad(lambda params, x: jnp.sum(jnp.sin(apply(params, jnp.exp(x[:, 1:])))), (0, 1)))
    args = spread(m, params, P()), spread(m, x, spec)
    plain, before = f(*args), sent(f.lower(*args).compile().as_text())
    with forced:
        own, after = f(*args), sent(f.lower(*args).compile().as_text())
    for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.max(jnp.abs(b))))
    assert all(a <= b for kind in after for a, b in zip(after[kind], before[kind])), (dict(after), dict(before))


@several
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("library, spec", [(stand_in_nnx, P("r", None, "c")), (stand_in_equinox, P("r"))])
def test_transformations(library, name, spec):
    """Derivatives of both modes and of second order, vmap, a scan over layers."""
    m = mesh()
    params, apply = library(name, inputs())
    x = spread(m, inputs(), spec)

    def scanned(params, x):
        run = lambda x, _: (jnp.sin(apply(params, x)), None)
        return jnp.sum(jax.lax.scan(run, x, None, 3)[0] ** 2)

    loss = lambda params, x: jnp.sum(jnp.sin(apply(params, x)) ** 2)
    programs = {
        "scan": jax.grad(scanned, (0, 1)),
        "jvp": lambda p, x: jax.jvp(functools.partial(loss, p), (x,), (jnp.cos(x),)),
        "second": jax.grad(lambda p, x: jnp.vdot(jax.grad(loss, 1)(p, x), jnp.cos(x)), (0, 1)),
        "vmap": lambda p, x: jax.vmap(jax.grad(loss, 1), (None, 1), 1)(p, x),
        "scales": lambda p, x: jax.vmap(jax.grad(loss, (0, 1)))(
            jax.tree.map(lambda a: jnp.stack([a, 2 * a]), p), x[:2]
        ),
    }
    for label, f in programs.items():
        plain = jax.jit(f)(params, x)
        with forced:
            own = jax.jit(f)(params, x)
        for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(plain), strict=True):
            scale = float(jnp.max(jnp.abs(b)))
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * max(scale, 1), err_msg=label)


@several
def test_small_ones_are_left():
    """By the gate, on several devices as on one."""
    params, apply = stand_in_equinox("layer_norm", inputs())
    with switch.using(jaxkern.accelerate(only=NAMES)._settings):
        found = jaxkern.explain(apply)(params, spread(mesh(), inputs(), P("r")))
    assert [d.taken for d in found] == [False]


@several
@pytest.mark.parametrize("spec", [P("r"), P(None, None, "r")])
def test_explicit_axes(spec):
    m = mesh("Explicit", names=("r",))
    params, apply = stand_in_nnx("layer_norm", inputs())
    f = jax.jit(step(apply))
    plain = f(params, inputs(), inputs(1))
    with jax.set_mesh(m), forced:
        own = f(spread(m, params, P()), spread(m, inputs(), spec), spread(m, inputs(1), spec))
    same(own, plain, 1e-5)


@several
@pytest.mark.parametrize("axes", [("r", "c"), ("r",)])
@pytest.mark.parametrize("library", LIBRARIES)
def test_shard_map(library, axes):
    """Over all axes of the mesh and over some: gradients of what all devices share are summed over them."""
    m = mesh()
    params, apply = library("layer_norm", inputs())
    mapped = jax.shard_map(apply, mesh=m, in_specs=(P(), P("r")), out_specs=P("r"), axis_names=set(axes))
    f = jax.jit(jax.grad(lambda p, x: jnp.sum(jnp.sin(mapped(p, x))), (0, 1)))
    plain = f(params, inputs())
    with forced:
        own = f(params, inputs())
    same(own, plain, 1e-4)
