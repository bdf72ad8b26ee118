"""Arrays spread over several devices: right numbers always, and no more communication than is listed here.

Runs on 2, 4 or 8 devices. On a machine with one device the first test runs this file, test_sharding_indices.py and
test_sharding_loss.py again in a process with eight CPU devices, and reports the results.
"""

import functools
import math
import os
import pathlib
import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reference import OPERATIONS
from sharding import (
    DEVICES,
    KERNELS,
    SHAPES,
    arrays,
    check,
    every_mesh,
    mesh,
    messages,
    numbers_of_rows,
    put,
    same,
    several,
    split_by,
)

import jaxkern
from jaxkern._core import compat

every_operation = pytest.mark.parametrize("operation", OPERATIONS)


FILES = sorted(pathlib.Path(__file__).parent.glob("test_sharding*.py"), key=lambda f: f.stat().st_size, reverse=True)


@pytest.mark.process
@pytest.mark.skipif(bool(SHAPES), reason="this process has several devices")
@pytest.mark.parametrize("part", range(2))
def test_eight_cpu_devices(part):
    """All of these files, in processes that have eight devices."""
    environment = {
        **os.environ,
        "XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }  # of what each device runs, not of what is sent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, FILES[part::2])],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and re.search(r"\d+ passed", done.stdout), done.stdout + done.stderr


@functools.cache
def both(operation, axis, scale=1):
    def f(x, g, mask):
        y, pull = jax.vjp(lambda x: getattr(jaxkern, operation)(x, axis, mask, scale=scale), x)
        return y, pull(g)[0]

    return f


@functools.cache
def on_one_device(operation, axis, shape, mask_shape):
    return jax.jit(both(operation, axis))(*arrays(shape, mask_shape))


# ---- rows


@several
@every_mesh
@every_operation
@pytest.mark.parametrize(
    "shape, axis, spec, mask_shape, mask_spec",
    [
        ((16, 64), -1, P("r"), None, None),
        ((16, 64), -1, P(("r", "c")), None, None),
        ((8, 4, 64), -1, P("r", "c"), None, None),
        ((8, 64, 4), 1, P("r"), None, None),
        ((8, 64, 4), 1, P("r", None, "c"), None, None),  # after the row
        ((8, 4, 64), -1, P("r", "c"), (8, 4, 64), P("r", "c")),
        ((8, 4, 64), -1, P("r", "c"), (8, 1, 64), P("r")),  # the mask has a dimension of size 1 where x is split
        ((8, 4, 64), -1, P("r", "c"), (64,), P()),
        ((8, 4, 64), -1, P("r", "c"), (8, 4, 1), P("r", "c")),
        ((7, 64), -1, P(), None, None),
        ((16, 64), -1, P("r", "c"), None, None),  # from here on rows are split
        ((16, 64), -1, P(None, ("c", "r")), None, None),
        ((16, 64), 0, P("r"), None, None),
        ((8, 64, 4), 1, P(None, "r", "c"), None, None),
        ((8, 4, 64), -1, P(None, None, "r"), (8, 1, 64), P()),
        ((8, 4, 64), -1, P("c", None, "r"), (8, 1, 64), P("c", None, "r")),
        ((8, 4, 64), -1, P("c", None, "r"), (1, 4, 1), P()),
    ],
)
def test_rows(shape_of_mesh, operation, shape, axis, spec, mask_shape, mask_spec):
    m = mesh(shape=shape_of_mesh)
    args = put(m, arrays(shape, mask_shape), (spec, spec, mask_spec))
    f = jax.jit(both(operation, axis), out_shardings=NamedSharding(m, spec)).lower(*args).compile()
    same(f(*args), on_one_device(operation, axis, shape, mask_shape))
    cut = (*spec, *[None] * len(shape))[: len(shape)][axis] or ()
    cut = split_by(m, [cut], ("r", "c"))
    # Forward the maximum and the sum of each part; backward a sum for softmax, and both again for log_softmax, which starts
    # from x.
    check(
        f.as_text(),
        ({"all-gather": 1, "all-reduce": 1} if operation == "softmax" else {"all-gather": 2}) if cut else {},
        most=3 * len(DEVICES) * math.prod(shape) // shape[axis],
    )


@several
@every_operation
def test_output_keeps_the_sharding_of_the_rows(operation):
    x = jax.device_put(arrays((16, 64))[0], NamedSharding(mesh(), P("r")))
    for f in (getattr(jaxkern, operation), jax.jit(getattr(jaxkern, operation)), jax.vmap(getattr(jaxkern, operation))):
        assert f(x).sharding.is_equivalent_to(x.sharding, 2)


@several
@every_operation
@pytest.mark.parametrize("scale", [1, 0.5])
def test_special_values_in_split_rows(operation, scale):
    """A NaN, an infinity or a row of nothing on one device is known on all; with a scale, the fused kernels' are as well."""
    m = mesh(names=("r",))
    x, g, mask = arrays((6, 64), (6, 64))
    x = x.at[0, 3].set(jnp.nan).at[1, 40].set(jnp.inf).at[2].set(-jnp.inf).at[3, :60].set(-jnp.inf)
    g, mask = g.at[2, 5].set(jnp.nan), mask.at[4].set(False).at[:4].set(True)
    f = jax.jit(both(operation, -1, scale))
    same(f(*put(m, (x, g, mask), (P(None, "r"),) * 3)), f(x, g, mask))


@several
@every_operation
def test_rows_that_do_not_divide(operation):
    """Rows that are padded to be split, numbers of rows too, and parts of a mesh's axis."""
    m = mesh(names=("r",))
    x, _, _ = arrays((13, 61))
    f = getattr(jaxkern, operation)
    as_split = lambda x, spec: jax.lax.with_sharding_constraint(x, NamedSharding(m, spec))
    for spec in (P("r"), P(None, "r")):
        same(jax.jit(lambda x, spec=spec: jnp.sin(f(as_split(jnp.cos(x), spec))))(x), jnp.sin(f(jnp.cos(x))))
    y, _, _ = arrays((16, 32))
    for axis in (0, 1, 2):
        g = jax.jit(lambda y, axis=axis: f(y.reshape(2, 8, 32), axis), out_shardings=NamedSharding(m, P()))
        same(g(jax.device_put(y, NamedSharding(m, P("r")))), f(y.reshape(2, 8, 32), axis))


@several
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_types_in_split_rows(dtype, x64):
    m = mesh(names=("r",))
    x = jax.random.normal(jax.random.key(0), (8, 64), jnp.float32).astype(dtype)
    f = jax.jit(lambda x: jax.vjp(jaxkern.log_softmax, x)[1](jnp.cos(x))[0])
    assert f(x).dtype == dtype
    as_wide = lambda y: np.asarray(y, np.float64)
    same(
        as_wide(f(jax.device_put(x, NamedSharding(m, P(None, "r"))))),
        as_wide(f(x)),
        float(jnp.finfo(dtype).eps) * (2 if KERNELS else 16),
    )


@several
@every_operation
@pytest.mark.parametrize("spec", [P("r"), P("r", "c"), P(None, "c")])
def test_explicit_mesh(operation, spec):
    """Sharding in types: the result's type says how it is split."""
    m = mesh("Explicit")
    operands = arrays((16, 64), (1, 64))
    with jax.set_mesh(m):
        args = put(m, operands, (spec, spec, P()))
        f = jax.jit(both(operation, -1)).lower(*args).compile()
        found = f(*args)
        assert numbers_of_rows(f.as_text(), 16)
    assert found[0].sharding.is_equivalent_to(NamedSharding(m, spec), 2)
    same(found, on_one_device(operation, -1, (16, 64), (1, 64)))


@several
@every_operation
@pytest.mark.parametrize(
    "axis, spec, mask_shape, mask_spec",
    [
        ((0, 1), P("r"), None, None),
        ((0, 1), P("r", "c"), (8, 4, 6), P("r", "c")),
        ((0, 1), P(None, "r", "c"), (4, 6), P("r", "c")),
        ((1, 2), P("r", None, "c"), (8, 1, 1), P("r")),
        ((0, 2), P(None, "r", "c"), None, None),
        ((0, 2), P("r"), (8, 1, 6), P("r")),
        (None, P(("r", "c")), (8, 4, 6), P()),
        (None, P(), (8, 1, 6), P("r", None, "c")),
    ],
)
def test_explicit_mesh_over_several_axes(operation, axis, spec, mask_shape, mask_spec):
    """Axes that are reduced together may be split: the result still is split like `x`, and its type says so."""
    m = mesh("Explicit")
    x, g, mask = arrays((8, 4, 6), mask_shape)
    wanted = on_one_device(operation, axis, x.shape, mask_shape)
    with jax.set_mesh(m):
        args = put(m, (x, g, mask), (spec, spec, mask_spec))
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
    mapped = mapped.lower(x, g, mask).compile()
    same(mapped(x, g, mask), on_one_device(operation, -1, (16, 64), (1, 64)))
    check(mapped.as_text(), {}, kernel=manual == {"r", "c"})


@several
@every_operation
def test_gradient_of_a_replicated_array_in_shard_map(operation):
    """Each device weighs the same softmax its own way: the gradient is the sum over devices."""
    m = mesh(names=("r",))
    x, _, _ = arrays((3, 20))
    w, _, _ = arrays((len(DEVICES), 3, 20))
    op = getattr(jaxkern, operation)

    def local(x, w):
        return jax.lax.psum(jnp.sum(jnp.sin(op(x + 0 * w[0]) * w[0]) + op(x) * w[0]), "r")

    mapped = jax.shard_map(local, mesh=m, in_specs=(P(), P("r")), out_specs=P())
    whole = lambda x, w: sum(jnp.sum(jnp.sin(op(x) * v) + op(x) * v) for v in w)
    tangent = jnp.cos(x)
    hvp = lambda f: jax.jit(lambda x, w: jax.jvp(jax.grad(f), (x, w), (tangent, w)))(x, w)
    same(hvp(mapped), hvp(whole), 2e-5)


@several
@every_operation
def test_a_mask_of_its_own_on_each_device_in_shard_map(operation):
    """The array is replicated, the mask is not: nor is the result, and the gradient is a sum over devices."""
    m = mesh(names=("r",))
    x, w, mask = arrays((3, 20), (len(DEVICES), 1, 20))
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
    args = put(m, (x, g, mask), (P(None, None, "r"), P(None, None, "r"), P()))
    split = jax.jit(f).lower(*args).compile()
    same(split(*args), jax.jit(f)(x, g, mask))
    check(split.as_text(), {})


@several
def test_every_order_over_split_rows():
    """Hessian products, under vmap and scan, of rows that are split."""
    m = mesh()
    x, t, mask = arrays((4, 16), (1, 16))

    def f(x, t):
        loss = lambda x: (
            jnp.sum(jnp.sin(jaxkern.softmax(x, where=mask)) * t)
            + jnp.sum(jnp.where(mask, jaxkern.log_softmax(x, where=mask), 0) * t)
        )
        hvp = lambda x, v: jax.jvp(jax.grad(loss), (x,), (v,))
        many = jax.vmap(lambda v: hvp(x, v), out_axes=1)(jnp.stack([x, t]))
        return hvp(x, t), many, jax.lax.scan(lambda c, _: (jaxkern.softmax(c), None), x, length=3)[0]

    args = put(m, (x, t), (P("r", "c"),) * 2)
    same(jax.jit(f)(*args), jax.jit(f)(x, t), 1e-5)


# ---- reductions

REDUCTIONS = ("reduce_sum", "reduce_mean", "reduce_max", "logsumexp")


def reduced(operation, axis):
    def f(x, mask):
        y, pull = jax.vjp(lambda x: getattr(jaxkern, operation)(x, axis=axis, where=mask), x)
        return y, pull(jnp.cos(y))[0]

    return f


def all_reduced(axis):
    return lambda x, mask: [reduced(operation, axis)(x, mask) for operation in REDUCTIONS]


@functools.cache
def reduced_on_one_device(axis, masked):
    x, _, mask = arrays((8, 4, 64), (8, 4, 64) if masked else None)
    return jax.jit(all_reduced(axis))(x, mask)


@several
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    "axis, spec, mask_spec, left, silent",
    [
        (-1, P("r"), None, P("r"), True),
        (-1, P("r", "c"), P("r", "c"), P("r", "c"), True),
        (1, P("r"), P("r"), P("r"), True),
        ((1, 2), P("r"), None, P("r"), True),
        (0, P(None, "r", "c"), None, P("r", "c"), False),
        (-1, P("r", None, "c"), P(), P("r"), False),  # rows are cut: they must be brought together
        (None, P("r", "c"), None, P(), False),
    ],
)
def test_reductions(kind, axis, spec, mask_spec, left, silent):
    m = mesh(kind)
    x, _, mask = arrays((8, 4, 64), None if mask_spec is None else (8, 4, 64))
    args = put(m, (x, mask), (spec, mask_spec))
    if kind == "Explicit":
        with jax.set_mesh(m):
            found = jax.jit(all_reduced(axis))(*args)
        for y, _ in found:
            assert y.sharding.is_equivalent_to(NamedSharding(m, left), y.ndim)
    else:
        out = [(NamedSharding(m, left), NamedSharding(m, spec))] * len(REDUCTIONS)
        found = jax.jit(all_reduced(axis), out_shardings=out)(*args)
        forward = jax.jit(lambda x: [getattr(jaxkern, operation)(x, axis) for operation in REDUCTIONS])
        assert not silent or not messages(forward.lower(args[0]).compile().as_text())
    same(found, reduced_on_one_device(axis, mask_spec is not None))


@several
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("masked", [False, True])
def test_reductions_of_split_rows(dtype, masked):
    """Devices exchange one or two numbers per row; NaN and infinity propagate."""
    m = mesh()
    x, _, mask = arrays((8, 64), (8, 64) if masked else None)
    x = x.at[1, 40].set(jnp.nan).at[2, 3].set(jnp.inf).at[3].set(-jnp.inf).astype(dtype)
    mask = None if mask is None else mask.at[:3, 3].set(True).at[1, 40].set(True)
    for operation in (*REDUCTIONS, "reduce_min"):
        f = jax.jit(lambda x, mask: getattr(jaxkern, operation)(x, -1, where=mask))
        for spec in (P("r", "c"), P(None, ("r", "c"))):
            args = put(m, (x, mask), (spec, spec))
            compiled = f.lower(*args).compile()
            found, wanted = (np.asarray(y, np.float32) for y in (compiled(*args), f(x, mask)))
            same(found, wanted, 2e-6 if dtype == "float32" else 2.0**-7)
            check(
                compiled.as_text(),
                {"all-gather" if operation == "logsumexp" else "all-reduce": 1},
                most=16 * len(DEVICES),
            )


@several
@pytest.mark.parametrize("manual", [{"r", "c"}, {"r"}])
def test_reductions_in_shard_map(manual):
    x, _, mask = arrays((16, 64), (1, 64))
    f = all_reduced(-1)
    mapped = jax.shard_map(f, mesh=mesh(), in_specs=(P("r"), P()), out_specs=P("r"), axis_names=manual)
    same(jax.jit(mapped)(x, mask), jax.jit(f)(x, mask))


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

    for axis, spec in (  # noqa: B007  (f reads it)
        (2, P("r", None, None)),
        (2, P("r", "c", None)),
        (2, P(("r", "c"), None, None)),
        (1, P("r", None, "c")),
    ):
        wanted = jax.jit(lambda *a: both(*a))(x, y, bias)  # traced again for each axis
        split = [jax.device_put(a, NamedSharding(grid, spec)) for a in (x, y)] + [
            jax.device_put(bias, NamedSharding(grid, P(spec[-1])))
        ]
        with jax.set_mesh(grid):
            compiled = jax.jit(lambda *a: both(*a)).lower(*split).compile()
        found = compiled(*split)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
            np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), 2e-5, 2e-5)
        collectives = set(messages(compiled.as_text()))
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


@functools.cache
def fused_on_one_device(keys):
    x, g, where = arrays((8, 4, 8, keys), (8, 1, 8, keys))
    return jax.jit(fused)(x, g, arrays((4, 8, keys))[0], where)


@several
@pytest.mark.parametrize(
    "kind, spec, keys",
    [
        *(
            ("Auto", spec, 64)
            for spec in (P("r"), P("r", "c"), P(("r", "c")), P(), P(None, None, "r"), P("c", None, "r"))
        ),
        *(("Explicit", spec, 64) for spec in (P("r", "c"), P(), P(None, None, "r"))),
        # From here on rows are split, into parts that do not begin with a block of eight draws too.
        ("Auto", P(None, None, None, "r"), 64),
        ("Auto", P(None, None, None, ("r", "c")), 24),
        ("Auto", P("r", None, None, "c"), 20),
        ("Explicit", P("c", None, None, "r"), 64),
    ],
)
def test_fused_drops_the_same_elements_however_it_is_split(kind, spec, keys):
    m = mesh(kind)
    x, g, where = arrays((8, 4, 8, keys), (8, 1, 8, keys))
    bias = arrays((4, 8, keys))[0]
    wanted = fused_on_one_device(keys)
    args = put(m, (x, g, bias, where), (spec, spec, P(), P()))
    with jax.set_mesh(m):
        f = jax.jit(fused)
        found = f(*args)
        text = jax.jit(lambda *a: fused(*a)[:2]).lower(*args).compile().as_text()
    np.testing.assert_array_equal(np.asarray(found[0]) == 0, np.asarray(wanted[0]) == 0)
    same(found, wanted)
    cut = len(spec) == 4 and split_by(m, spec[3:], ("r", "c"))
    sent = {"all-gather": 2} if cut else {}
    check(text, sent, kernel=False, most=3 * len(DEVICES) * x.size // keys)
    assert ('custom_call_target="jaxkern_softmax' in text) == KERNELS


@several
def test_fused_in_shard_map():
    """Each device's part is an array by itself; a bias that all share gets the sum of its gradients."""
    m = mesh()
    x, g, where = arrays((8, 4, 8, 64), (8, 1, 8, 64))
    bias = arrays((4, 8, 64))[0]
    parts, rows = m.shape["r"], 8 // m.shape["r"]
    keys = jax.random.split(jax.random.key(0), parts)

    def part(x, g, bias, where, key):
        f = lambda x, bias: jaxkern.softmax(
            x, bias=bias, where=where, causal=True, dropout_rate=0.3, dropout_key=key[0]
        )
        y, pull = jax.vjp(f, x, bias)
        return y, *pull(g)

    split = jax.shard_map(part, mesh=m, in_specs=(P("r"), P("r"), P(), P("r"), P("r")), out_specs=(P("r"), P("r"), P()))
    found = jax.jit(split)(x, g, bias, where, keys)
    of = lambda a, k: a[rows * k : rows * (k + 1)]
    each = [part(of(x, k), of(g, k), bias, of(where, k), keys[k : k + 1]) for k in range(parts)]
    same(
        found,
        (
            np.concatenate([e[0] for e in each]),
            np.concatenate([e[1] for e in each]),
            sum(np.asarray(e[2]) for e in each),
        ),
    )


# ---- where JAX does not call back


@several
def test_exported_for_any_batch_on_several_devices():
    m = mesh()
    (rows,) = jax.export.symbolic_shape("rows")
    f = jax.jit(lambda x: jax.value_and_grad(lambda x: jaxkern.log_softmax(x)[..., 0].sum())(x))
    shape = jax.ShapeDtypeStruct((8 * rows, 12), jnp.float32, sharding=NamedSharding(m, P("r")))
    exported = jax.export.export(f, disabled_checks=jaxkern.export_checks())(shape)
    for n in (1, 3):
        x, _, _ = arrays((8 * n, 12))
        same(jax.jit(exported.call)(jax.device_put(x, NamedSharding(m, P("r")))), f(x))


@several
def test_without_the_hook_rows_are_gathered(monkeypatch):
    """A version of JAX that lacks a private name: said once, and the numbers are right."""
    find = compat._primitives_that_need_devices
    find.cache_clear()
    try:
        with monkeypatch.context() as patch, pytest.warns(UserWarning, match="gathered"):
            patch.delattr("jax._src.dispatch")
            patch.setitem(sys.modules, "jax._src.dispatch", None)
            find()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            m, (x, g, _) = mesh(), arrays((16, 48))  # a shape of its own, which is not compiled yet
            for spec, silent in ((P("r"), True), (P(None, "c"), False)):
                args = put(m, (x, g), (spec, spec))
                f = jax.jit(lambda x, g: both("softmax", -1)(x, g, None)).lower(*args).compile()
                same(f(*args), both("softmax", -1)(x, g, None))
                if silent:
                    check(f.as_text(), {}, kernel=False)  # XLA computes parts that are not gathered
    finally:
        find.cache_clear()
