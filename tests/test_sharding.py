"""Arrays spread over several devices: right numbers always, no communication where rows are split.

On a machine with fewer than eight devices the file runs itself again in a process with eight CPU
devices, and the first test reports what happened there.
"""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from reference import OPERATIONS

import jaxkern
from jaxkern import _registry

several = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices; run by test_eight_cpu_devices")
every_operation = pytest.mark.parametrize("operation", OPERATIONS)
COLLECTIVES = r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


@pytest.mark.skipif(len(jax.devices()) >= 8, reason="this process has eight devices")
def test_eight_cpu_devices():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
                          env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and re.search(r"\d+ passed", done.stdout), done.stdout + done.stderr


def mesh(kind="Auto", shape=(4, 2), names=("r", "c")):
    kinds = (getattr(jax.sharding.AxisType, kind),) * len(shape)
    return jax.make_mesh(shape, names, axis_types=kinds, devices=jax.devices()[:8])


def arrays(shape, mask_shape=None):
    rng = np.random.default_rng(0)
    x, g = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    return x, g, None if mask_shape is None else jnp.asarray(rng.random(mask_shape) < 0.7)


def both(operation, axis):
    def f(x, g, mask):
        y, pull = jax.vjp(lambda x: getattr(jaxkern, operation)(x, axis, mask), x)
        return y, pull(g)[0]
    return f


def same(found, wanted):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6), found, wanted)


@several
@every_operation
@pytest.mark.parametrize("shape, axis, spec, mask_shape, mask_spec, silent", [
    ((16, 64), -1, P("r"), None, None, True),
    ((16, 64), -1, P(("r", "c")), None, None, True),
    ((8, 4, 64), -1, P("r", "c"), None, None, True),
    ((8, 64, 4), 1, P("r"), None, None, True),
    ((8, 4, 64), -1, P("r", "c"), (8, 4, 64), P("r", "c"), True),
    ((8, 4, 64), -1, P("r", "c"), (8, 1, 64), P("r"), True),   # the mask has a dimension of size 1 where x is split
    ((8, 4, 64), -1, P("r", "c"), (64,), P(), True),
    ((8, 4, 64), -1, P("r", "c"), (8, 4, 1), P("r", "c"), True),
    ((7, 64), -1, P(), None, None, True),
    ((16, 64), -1, P("r", "c"), None, None, False),             # rows are cut: they must be brought together
    ((16, 64), 0, P("r"), None, None, False),
    ((8, 64, 4), 1, P(None, "r", "c"), None, None, False),
    ((8, 4, 64), -1, P(None, None, "r"), (8, 1, 64), P(), False),
])
def test_split(operation, shape, axis, spec, mask_shape, mask_spec, silent):
    m = mesh()
    x, g, mask = arrays(shape, mask_shape)
    wanted = both(operation, axis)(x, g, mask)
    put = lambda a, s: None if a is None else jax.device_put(a, NamedSharding(m, s))
    args = put(x, spec), put(g, spec), put(mask, mask_spec)
    f = jax.jit(both(operation, axis), out_shardings=NamedSharding(m, spec))
    same(f(*args), wanted)
    text = f.lower(*args).compile().as_text()
    if _registry.status["cpu"].module is not None and jax.default_backend() == "cpu":
        assert "jaxkern_" in text
    if silent:
        assert not re.findall(COLLECTIVES, text)


@several
@every_operation
def test_output_keeps_the_sharding_of_the_rows(operation):
    x = jax.device_put(arrays((16, 64))[0], NamedSharding(mesh(), P("r")))
    for f in (getattr(jaxkern, operation), jax.jit(getattr(jaxkern, operation)), jax.vmap(getattr(jaxkern, operation))):
        assert f(x).sharding.is_equivalent_to(x.sharding, 2)


@several
@every_operation
@pytest.mark.parametrize("spec", [P("r"), P("r", "c"), P(None, "c")])
def test_explicit_mesh(operation, spec):
    """Sharding in types: the result's type says how it is split."""
    m = mesh("Explicit")
    x, g, mask = arrays((16, 64), (1, 64))
    wanted = both(operation, -1)(x, g, mask)
    put = lambda a, s: jax.device_put(a, NamedSharding(m, s))
    with jax.set_mesh(m):
        found = jax.jit(both(operation, -1))(put(x, spec), put(g, spec), put(mask, P()))
    assert found[0].sharding.is_equivalent_to(NamedSharding(m, spec), 2)
    same(found, wanted)


@several
@every_operation
@pytest.mark.parametrize("axis, spec, mask_shape, mask_spec", [
    ((0, 1), P("r"), None, None),
    ((0, 1), P("r", "c"), (8, 4, 6), P("r", "c")),
    ((0, 1), P(None, "r", "c"), (4, 6), P("r", "c")),
    ((1, 2), P("r", None, "c"), (8, 1, 1), P("r")),
    ((0, 2), P(None, "r", "c"), None, None),
    ((0, 2), P("r"), (8, 1, 6), P("r")),
    (None, P(("r", "c")), (8, 4, 6), P()),
    (None, P(), (8, 1, 6), P("r", None, "c")),
])
def test_explicit_mesh_over_several_axes(operation, axis, spec, mask_shape, mask_spec):
    """Axes that are reduced together may be split: the result still is split like `x`, and its type says so."""
    m = mesh("Explicit")
    x, g, mask = arrays((8, 4, 6), mask_shape)
    wanted = both(operation, axis)(x, g, mask)
    put = lambda a, s: None if a is None else jax.device_put(a, NamedSharding(m, s))
    with jax.set_mesh(m):
        args = put(x, spec), put(g, spec), put(mask, mask_spec)
        f = jax.jit(both(operation, axis))
        types, found = jax.eval_shape(f, *args), f(*args)
    for y, t in zip(found, types):
        assert tuple(t.sharding.spec) == tuple(spec) + (None,) * (3 - len(spec))
        assert y.sharding.is_equivalent_to(NamedSharding(m, spec), 3)
    same(found, wanted)


@several
@every_operation
@pytest.mark.parametrize("manual", [{"r", "c"}, {"r"}])
def test_shard_map(operation, manual):
    """Inside shard_map, over all axes of the mesh or one; the mask is the same on every device."""
    m = mesh()
    x, g, mask = arrays((16, 64), (1, 64))
    f = both(operation, -1)
    mapped = jax.jit(jax.shard_map(f, mesh=m, in_specs=(P("r"), P("r"), P()), out_specs=P("r"), axis_names=manual))
    same(mapped(x, g, mask), f(x, g, mask))


@several
@every_operation
def test_gradient_of_a_replicated_array_in_shard_map(operation):
    """Each device weighs the same softmax its own way: the gradient is the sum over devices."""
    m = mesh(shape=(8,), names=("r",))
    x, _, _ = arrays((3, 20))
    w, _, _ = arrays((8, 3, 20))
    op = getattr(jaxkern, operation)

    def local(x, w):
        return jax.lax.psum(jnp.sum(jnp.sin(op(x + 0 * w[0]) * w[0]) + op(x) * w[0]), "r")

    mapped = jax.shard_map(local, mesh=m, in_specs=(P(), P("r")), out_specs=P())
    whole = lambda x, w: sum(jnp.sum(jnp.sin(op(x) * v) + op(x) * v) for v in w)
    tangent = jnp.cos(x)
    hvp = lambda f: jax.jit(lambda x, w: jax.jvp(jax.grad(f), (x, w), (tangent, w)))(x, w)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), hvp(mapped), hvp(whole))


@several
@every_operation
def test_a_mask_of_its_own_on_each_device_in_shard_map(operation):
    """The array is replicated, the mask is not: nor is the result, and the gradient is a sum over devices."""
    m = mesh(shape=(8,), names=("r",))
    x, w, mask = arrays((3, 20), (8, 1, 20))
    op = getattr(jaxkern, operation)
    one = lambda x, k: jnp.sum(jnp.where(k, jnp.sin(op(x, -1, k)), 0) * w)
    mapped = jax.shard_map(lambda x, k: jax.lax.psum(one(x, k[0]), "r"), mesh=m, in_specs=(P(), P("r")), out_specs=P())
    whole = lambda x, mask: sum(one(x, k) for k in mask)
    same(*(jax.jit(jax.value_and_grad(f))(x, mask) for f in (mapped, whole)))


@several
@every_operation
def test_vmap_over_a_split_axis(operation):
    m = mesh()
    x, g, mask = arrays((8, 6, 32), (6, 32))
    f = jax.vmap(both(operation, 0), (1, 1, 0), 1)
    wanted = f(x, g, mask)
    put = lambda a: jax.device_put(a, NamedSharding(m, P(None, None, "r")))
    same(jax.jit(f)(put(x), put(g), mask), wanted)


# ---- reductions

REDUCTIONS = ("reduce_sum", "reduce_mean", "reduce_max", "logsumexp")


def reduced(operation, axis):
    def f(x, mask):
        y, pull = jax.vjp(lambda x: getattr(jaxkern, operation)(x, axis=axis, where=mask), x)
        return y, pull(jnp.cos(y))[0]
    return f


@several
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("axis, spec, mask_spec, left, silent", [
    (-1, P("r"), None, P("r"), True),
    (-1, P("r", "c"), P("r", "c"), P("r", "c"), True),
    (1, P("r"), P("r"), P("r"), True),
    ((1, 2), P("r"), None, P("r"), True),
    (0, P(None, "r", "c"), None, P("r", "c"), False),
    (-1, P("r", None, "c"), P(), P("r"), False),  # rows are cut: they must be brought together
    (None, P("r", "c"), None, P(), False),
])
def test_reductions(kind, axis, spec, mask_spec, left, silent):
    m = mesh(kind)
    x, _, mask = arrays((8, 4, 64), None if mask_spec is None else (8, 4, 64))
    put = lambda a, s: None if a is None else jax.device_put(a, NamedSharding(m, s))
    for operation in REDUCTIONS:
        f = reduced(operation, axis)
        wanted, args = f(x, mask), (put(x, spec), put(mask, mask_spec))
        if kind == "Explicit":
            with jax.set_mesh(m):
                found = jax.jit(f)(*args)
            assert found[0].sharding.is_equivalent_to(NamedSharding(m, left), found[0].ndim)
        else:
            found = jax.jit(f, out_shardings=(NamedSharding(m, left), NamedSharding(m, spec)))(*args)
            text = jax.jit(getattr(jaxkern, operation), static_argnums=1).lower(args[0], axis).compile().as_text()
            assert not (silent and re.findall(COLLECTIVES, text))
        same(found, wanted)


@several
@pytest.mark.parametrize("manual", [{"r", "c"}, {"r"}])
def test_reductions_in_shard_map(manual):
    x, _, mask = arrays((16, 64), (1, 64))
    for operation in REDUCTIONS:
        f = reduced(operation, -1)
        mapped = jax.shard_map(f, mesh=mesh(), in_specs=(P("r"), P()), out_specs=P("r"), axis_names=manual)
        same(jax.jit(mapped)(x, mask), f(x, mask))


# ---- rows at indices


def indexed(lead, rows=16, count=24, width=32):
    rng = np.random.default_rng(0)
    x, source = (jnp.asarray(rng.normal(size=(*lead, n, width)), jnp.float32) for n in (rows, count))
    return x, jnp.asarray(rng.integers(-rows, rows + 3, count)), source


def all_of(x, index, source):
    """index_add, index_select, segment_sum and segment_max, and gradients, along the dimension before the last."""
    axis, rows = x.ndim - 2, x.shape[-2]
    y, pull = jax.vjp(lambda x, s: jaxkern.index_add(x, axis, index, s, alpha=0.5), x, source)
    z, pull_select = jax.vjp(lambda x: jaxkern.index_select(x, axis, index, mode="clip"), x)
    total, largest = (functools.partial(getattr(jaxkern, f"segment_{n}"), num_segments=rows) for n in ("sum", "max"))
    for _ in range(axis):
        total, largest = (jax.vmap(f, (0, None)) for f in (total, largest))
    return y, *pull(y), z, *pull_select(z), total(source, index), jnp.maximum(largest(source, index), -9)


@several
@pytest.mark.parametrize("lead, x_spec, index_spec, source_spec, silent", [
    ((8,), P("r"), P(), P("r"), True),
    ((8,), P(("r", "c")), P(), P(("r", "c")), True),
    ((8, 4), P("r", "c"), P(), P("r", "c"), True),
    ((), P(), P(), P(), True),
    ((), P("r"), P(), P(), False),            # rows are cut
    ((), P(), P("r"), P("r"), False),         # indices are
    ((), P(None, "c"), P(), P(None, "c"), False),
    ((8,), P(None, "r", "c"), P("r"), P("r", None, "c"), False),
])
def test_rows_at_indices_split(lead, x_spec, index_spec, source_spec, silent):
    m = mesh()
    operands = indexed(lead)
    wanted = all_of(*operands)
    put = [jax.device_put(a, NamedSharding(m, s)) for a, s in zip(operands, (x_spec, index_spec, source_spec))]
    f = jax.jit(all_of, out_shardings=tuple(NamedSharding(m, P(*x_spec)) for _ in wanted) if silent else None)
    same(f(*put), wanted)
    text = f.lower(*put).compile().as_text()
    if _registry.status["cpu"].module is not None and jax.default_backend() == "cpu":
        assert "jaxkern_" in text
    if silent:
        assert not re.findall(COLLECTIVES, text)


@several
@pytest.mark.parametrize("lead, x_spec, index_spec, source_spec", [
    ((8,), P("r"), P(), P("r")), ((8,), P("r", None, "c"), P(), P("r", None, "c")), ((), P(), P("r"), P("r")),
    ((), P("r"), P(), P()), ((), P(None, "c"), P("r"), P("r", "c"))])
def test_rows_at_indices_on_an_explicit_mesh(lead, x_spec, index_spec, source_spec):
    m = mesh("Explicit")
    operands = indexed(lead)
    wanted = all_of(*operands)
    with jax.set_mesh(m):
        put = [jax.device_put(a, NamedSharding(m, s)) for a, s in zip(operands, (x_spec, index_spec, source_spec))]
        same(jax.jit(all_of)(*put), wanted)


@several
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("spec", [P(), P("r"), P("r", "c")])
def test_lookup_of_split_ids(kind, spec):
    m = mesh(kind)
    table, ids = jnp.arange(40.0).reshape(10, 4), jnp.arange(32).reshape(8, 4) % 11
    both = lambda t, i: jax.value_and_grad(lambda t: jnp.nansum(jnp.sin(jaxkern.embedding_lookup(t, i))))(t)
    wanted = both(table, ids)
    with jax.set_mesh(m):
        same(jax.jit(both)(jax.device_put(table, NamedSharding(m, P())), jax.device_put(ids, NamedSharding(m, spec))), wanted)


@several
@pytest.mark.parametrize("manual", [{"r", "c"}, {"r"}])
def test_rows_at_indices_in_shard_map(manual):
    m = mesh()
    operands = indexed((8,))
    f = jax.shard_map(all_of, mesh=m, in_specs=(P("r"), P(), P("r")), out_specs=P("r"), axis_names=manual)
    same(jax.jit(f)(*operands), all_of(*operands))


@several
def test_gradient_of_a_replicated_table_in_shard_map():
    """Each device looks up its own ids: the gradient of the table is the sum over devices, whatever is replicated."""
    m = mesh(shape=(8,), names=("r",))
    table, ids = jnp.arange(40.0).reshape(10, 4) / 40, jnp.arange(32).reshape(8, 4) % 10
    loss = lambda t, i: jnp.sum(jnp.sin(jaxkern.embedding_lookup(t, i) * 3) + jnp.sin(
        jaxkern.segment_sum(t[:4], i.reshape(-1)[:4], 5)).sum())
    mapped = jax.shard_map(lambda t, i: jax.lax.psum(loss(t, i), "r"), mesh=m, in_specs=(P(), P("r")), out_specs=P())
    whole = lambda t, i: sum(loss(t, one[None]) for one in i)
    same(*(jax.jit(jax.value_and_grad(f))(table, ids) for f in (mapped, whole)))


# ---- cross-entropy


@several
@pytest.mark.parametrize("spec, silent", [(P("r"), True), (P(("r", "c")), True), (P("r", "c"), False), (P(), True)])
@pytest.mark.parametrize("mask_shape", [None, (1, 64)])
def test_loss_of_split_rows(spec, silent, mask_shape):
    """Rows stay where they are: of a step, only the mean is summed over devices."""
    m = mesh()
    x, _, mask = arrays((16, 64), mask_shape)
    mask = None if mask is None else mask.at[0, 0].set(True)
    labels = jnp.zeros(16, jnp.int32)

    def both(x, labels, mask):
        value, pull = jax.vjp(lambda x: jaxkern.softmax_cross_entropy(x, labels, where=mask, label_smoothing=0.1), x)
        return value, pull(jnp.cos(value))[0]

    step = jax.value_and_grad(lambda x, labels, mask: jaxkern.softmax_cross_entropy(x, labels, where=mask).mean())
    args = jax.device_put(x, NamedSharding(m, spec)), jax.device_put(labels, NamedSharding(m, P(*spec[:1]))), mask
    for f in (both, step):
        compiled = jax.jit(f).lower(*args).compile()
        same(compiled(*args), f(x, labels, mask))
        found = re.findall(COLLECTIVES, compiled.as_text())
        if silent:
            assert not found or (f is step and set(found) == {"all-reduce"})
        if _registry.status["cpu"].module is not None and jax.default_backend() == "cpu":
            assert "jaxkern_cross_entropy" in compiled.as_text()


@several
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_loss_keeps_the_sharding_of_the_rows(kind):
    m = mesh(kind)
    x = jax.device_put(arrays((16, 64))[0], NamedSharding(m, P("r")))
    labels = jax.device_put(jnp.zeros(16, jnp.int32), NamedSharding(m, P("r")))
    value = jax.jit(jaxkern.softmax_cross_entropy)(x, labels)
    assert value.sharding.is_equivalent_to(labels.sharding, 1)
    dx = jax.jit(jax.grad(lambda x: jaxkern.softmax_cross_entropy(x, labels).sum()))(x)
    assert dx.sharding.is_equivalent_to(x.sharding, 2)


@several
def test_loss_in_shard_map():
    m = mesh()
    x, labels = arrays((16, 64))[0], jnp.arange(16) * 3

    def f(x, labels):
        return jax.lax.psum(jaxkern.softmax_cross_entropy(x, labels).sum(), ("r", "c"))

    mapped = jax.shard_map(f, mesh=m, in_specs=(P(("r", "c")), P(("r", "c"))), out_specs=P())
    found = jax.jit(jax.value_and_grad(mapped))(x, labels)
    same(found, jax.value_and_grad(lambda x: jaxkern.softmax_cross_entropy(x, labels).sum())(x))


# ---- elementwise operations


@several
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_elementwise_stays_where_it_is(kind):
    """Any split of any dimension, operands that broadcast, halves along a dimension that is whole."""
    grid = mesh(kind)
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=(8, 6, 32)), jnp.float32) for _ in range(2))
    bias = y[0, 0]

    def f(x, y, bias):
        hidden = jaxkern.gelu(jaxkern.add(jaxkern.multiply(x, y), bias))
        halves = jaxkern.swiglu(x, axis)
        return jaxkern.leaky_relu(hidden), halves, jaxkern.swiglu(x, gate=y), jaxkern.cast(x, jnp.bfloat16)

    def both(x, y, bias):
        out, pull = jax.vjp(f, x, y, bias)
        return out, pull(jax.tree.map(jnp.ones_like, out))

    for axis, spec in ((2, P("r", None, None)), (2, P("r", "c", None)), (2, P(("r", "c"), None, None)), (1, P("r", None, "c"))):
        wanted = jax.jit(lambda *a: both(*a))(x, y, bias)  # traced anew for each axis
        split = [jax.device_put(a, NamedSharding(grid, spec)) for a in (x, y)] + [
            jax.device_put(bias, NamedSharding(grid, P(spec[-1])))]
        with jax.set_mesh(grid):
            compiled = jax.jit(lambda *a: both(*a)).lower(*split).compile()
        found = compiled(*split)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
            np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), 2e-5, 2e-5)
        collectives = set(re.findall(COLLECTIVES, compiled.as_text()))
        assert collectives <= {"all-reduce"}, collectives  # of the bias' gradient


@several
def test_elementwise_in_shard_map():
    grid = mesh()
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 32)), jnp.float32)
    f = lambda x, a: jaxkern.elu(jaxkern.swiglu(x), a)
    split = jax.shard_map(f, mesh=grid, in_specs=(P("r", None), P()), out_specs=P("r", None))
    same(jax.jit(split)(x, jnp.float32(0.5)), f(x, jnp.float32(0.5)))
    g = jax.grad(lambda x, a: jnp.sum(jnp.sin(split(x, a))), (0, 1))(x, jnp.float32(0.5))
    wanted = jax.grad(lambda x, a: jnp.sum(jnp.sin(f(x, a))), (0, 1))(x, jnp.float32(0.5))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), g, wanted)


# ---- the fused softmax


FUSED = {"scale": 0.5, "causal": True, "dropout_rate": 0.3, "dropout_key": np.array([1, 2], np.uint32)}


def fused(x, g, bias, where):
    def f(x, bias):
        return jaxkern.softmax(x, bias=bias, where=where, **FUSED)
    y, pull = jax.vjp(f, x, bias)
    return y, *pull(g)


@several
@pytest.mark.parametrize("spec, silent", [
    (P("r"), True), (P("r", "c"), True), (P(("r", "c")), True), (P(), True), (P(None, None, "r"), False),
    (P(None, None, None, "r"), False), (P("c", None, "r"), False),
])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_fused_drops_the_same_elements_however_it_is_split(spec, silent, kind):
    m = mesh(kind)
    x, g, where = arrays((8, 4, 8, 64), (8, 1, 8, 64))
    bias = arrays((4, 8, 64))[0]
    wanted = jax.jit(fused)(x, g, bias, where)
    put = lambda a, s: jax.device_put(a, NamedSharding(m, s))
    args = put(x, spec), put(g, spec), put(bias, P()), put(where, P())
    with jax.set_mesh(m):
        f = jax.jit(fused)
        found = f(*args)
        text = jax.jit(lambda *a: fused(*a)[:2]).lower(*args).compile().as_text()
    np.testing.assert_array_equal(np.asarray(found[0]) == 0, np.asarray(wanted[0]) == 0)
    same(found, wanted)
    if silent:
        assert not re.findall(COLLECTIVES, text)


@several
def test_fused_in_shard_map():
    """Each device's part is an array by itself; a bias that all share gets the sum of its gradients."""
    m = mesh()
    x, g, where = arrays((8, 4, 8, 64), (8, 1, 8, 64))
    bias = arrays((4, 8, 64))[0]
    keys = jax.random.split(jax.random.key(0), 4)

    def part(x, g, bias, where, key):
        f = lambda x, bias: jaxkern.softmax(x, bias=bias, where=where, causal=True, dropout_rate=0.3, dropout_key=key[0])
        y, pull = jax.vjp(f, x, bias)
        return y, *pull(g)

    split = jax.shard_map(part, mesh=m, in_specs=(P("r"), P("r"), P(), P("r"), P("r")), out_specs=(P("r"), P("r"), P()))
    found = jax.jit(split)(x, g, bias, where, keys)
    each = [part(*(a[2 * k : 2 * k + 2] for a in (x, g)), bias, where[2 * k : 2 * k + 2], keys[k : k + 1]) for k in range(4)]
    same(found, (np.concatenate([e[0] for e in each]), np.concatenate([e[1] for e in each]), sum(np.asarray(e[2]) for e in each)))
