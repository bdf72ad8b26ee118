"""Arrays spread over several devices: right numbers always, and no more communication than is listed here.

Runs on the 2, 4 or 8 devices that there are. On a machine with one the file runs itself again in a process
with eight CPU devices, and the first test reports what happened there.
"""

import collections
import functools
import math
import os
import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from reference import OPERATIONS

import jaxkern
from jaxkern import _compat, _registry

DEVICES = jax.devices()[:8]
SHAPES = {2: [(2, 1), (1, 2)], 4: [(2, 2)], 8: [(4, 2)]}.get(len(DEVICES), [])  # of the mesh ("r", "c")
several = pytest.mark.skipif(not SHAPES, reason="needs 2, 4 or 8 devices; run by test_eight_cpu_devices")
every_mesh = pytest.mark.parametrize("shape_of_mesh", SHAPES or [None])
every_operation = pytest.mark.parametrize("operation", OPERATIONS)
KERNELS = _registry.status[{"cpu": "cpu", "gpu": "cuda"}[jax.default_backend()]].module is not None


@pytest.mark.process
@pytest.mark.skipif(bool(SHAPES), reason="this process has several devices")
def test_eight_cpu_devices():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu",
                   "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # of what each device runs, not of what is sent
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
                          env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and re.search(r"\d+ passed", done.stdout), done.stdout + done.stderr


def mesh(kind="Auto", shape=None, names=("r", "c")):
    shape = shape or (SHAPES[0] if len(names) == 2 else (len(DEVICES),))
    return jax.make_mesh(shape, names, axis_types=(getattr(jax.sharding.AxisType, kind),) * len(shape), devices=DEVICES)


def put(m, arrays, specs):
    return [None if a is None else jax.device_put(a, NamedSharding(m, s)) for a, s in zip(arrays, specs)]


def same(found, wanted, tolerance=2e-6):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), found, wanted)


# ---- what is sent


def messages(text):
    """What a compiled program sends: kind of message -> the elements of each."""
    sent = collections.defaultdict(list)
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    for shapes, kind in re.findall(rf"= (\(?[\w\[\],{{}}:() ]*?\)?) ({kinds})(?:-start)?\(", text):
        # The start of a message that is sent beside other work names its operand, then its result.
        sizes = [math.prod(map(int, dims.split(","))) if dims else 1 for dims in re.findall(r"\w\[([\d,]*)\]", shapes)]
        sent[kind].append(max(sizes))
    return sent


def check(text, listed, kernel=True, most=None):
    """Fails on what is not `listed`: kind -> how many, at most.

    A reduce-scatter may stand for an all-reduce, of which each device keeps a part.
    """
    sent = messages(text)
    count = collections.Counter({kind: len(sizes) for kind, sizes in sent.items()})
    surplus = count - collections.Counter(listed)
    spared = max(0, listed.get("all-reduce", 0) - count["all-reduce"])
    surplus -= collections.Counter({"reduce-scatter": spared})
    assert not surplus, f"{dict(sent)}, but {listed} were listed"
    if most is not None:  # elements a message; XLA may combine several into one
        assert sum(n for sizes in sent.values() for n in sizes) <= most * sum(listed.values()), dict(sent)
    if kernel and KERNELS:
        assert "jaxkern_" in text


def split_by(m, specs, axes):
    """Whether one of the axes splits anything."""
    return any(a in str(s) and m.shape[a] > 1 for s in specs for a in axes)


def arrays(shape, mask_shape=None):
    rng = np.random.default_rng(0)
    x, g = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    return x, g, None if mask_shape is None else jnp.asarray(rng.random(mask_shape) < 0.7)


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
@pytest.mark.parametrize("shape, axis, spec, mask_shape, mask_spec", [
    ((16, 64), -1, P("r"), None, None),
    ((16, 64), -1, P(("r", "c")), None, None),
    ((8, 4, 64), -1, P("r", "c"), None, None),
    ((8, 64, 4), 1, P("r"), None, None),
    ((8, 64, 4), 1, P("r", None, "c"), None, None),             # behind the row
    ((8, 4, 64), -1, P("r", "c"), (8, 4, 64), P("r", "c")),
    ((8, 4, 64), -1, P("r", "c"), (8, 1, 64), P("r")),          # the mask has a dimension of size 1 where x is split
    ((8, 4, 64), -1, P("r", "c"), (64,), P()),
    ((8, 4, 64), -1, P("r", "c"), (8, 4, 1), P("r", "c")),
    ((7, 64), -1, P(), None, None),
    ((16, 64), -1, P("r", "c"), None, None),                    # from here on rows are split
    ((16, 64), -1, P(None, ("c", "r")), None, None),
    ((16, 64), 0, P("r"), None, None),
    ((8, 64, 4), 1, P(None, "r", "c"), None, None),
    ((8, 4, 64), -1, P(None, None, "r"), (8, 1, 64), P()),
    ((8, 4, 64), -1, P("c", None, "r"), (8, 1, 64), P("c", None, "r")),
    ((8, 4, 64), -1, P("c", None, "r"), (1, 4, 1), P()),
])
def test_rows(shape_of_mesh, operation, shape, axis, spec, mask_shape, mask_spec):
    m = mesh(shape=shape_of_mesh)
    args = put(m, arrays(shape, mask_shape), (spec, spec, mask_spec))
    f = jax.jit(both(operation, axis), out_shardings=NamedSharding(m, spec)).lower(*args).compile()
    same(f(*args), on_one_device(operation, axis, shape, mask_shape))
    cut = (*spec, *[None] * len(shape))[: len(shape)][axis] or ()
    cut = split_by(m, [cut], ("r", "c"))
    # Forward the maximum, then the sum; backward one for softmax, and both again for log_softmax, which starts from x.
    check(f.as_text(), {"all-reduce": 3 if operation == "softmax" else 4} if cut else {},
          most=2 * math.prod(shape) // shape[axis])


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
    same(as_wide(f(jax.device_put(x, NamedSharding(m, P(None, "r"))))), as_wide(f(x)), float(jnp.finfo(dtype).eps) * 2)


@several
@every_operation
@pytest.mark.parametrize("spec", [P("r"), P("r", "c"), P(None, "c")])
def test_explicit_mesh(operation, spec):
    """Sharding in types: the result's type says how it is split."""
    m = mesh("Explicit")
    operands = arrays((16, 64), (1, 64))
    with jax.set_mesh(m):
        f = jax.jit(both(operation, -1))
        found = f(*put(m, operands, (spec, spec, P())))
        assert not messages(f.lower(*put(m, operands, (spec, spec, P()))).compile().as_text())["all-gather"]
    assert found[0].sharding.is_equivalent_to(NamedSharding(m, spec), 2)
    same(found, on_one_device(operation, -1, (16, 64), (1, 64)))


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
    same(mapped(x, g, mask), f(x, g, mask))
    check(mapped.lower(x, g, mask).compile().as_text(), {})


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
    same(jax.jit(f)(*args), f(x, g, mask))
    check(jax.jit(f).lower(*args).compile().as_text(), {})


@several
def test_every_order_over_split_rows():
    """Hessian products, under vmap and scan, of rows that are split."""
    m = mesh()
    x, t, mask = arrays((4, 16), (1, 16))

    def f(x, t):
        loss = lambda x: jnp.sum(jnp.sin(jaxkern.softmax(x, where=mask)) * t) + jnp.sum(
            jnp.where(mask, jaxkern.log_softmax(x, where=mask), 0) * t)
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
            assert not (silent and messages(text))
        same(found, wanted)


@several
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("masked", [False, True])
def test_reductions_of_split_rows(dtype, masked):
    """Devices tell each other a number or two a row; NaN and infinity come through."""
    m = mesh()
    x, _, mask = arrays((8, 64), (8, 64) if masked else None)
    x = x.at[1, 40].set(jnp.nan).at[2, 3].set(jnp.inf).at[3].set(-jnp.inf).astype(dtype)
    mask = None if mask is None else mask.at[:3, 3].set(True).at[1, 40].set(True)
    for operation in (*REDUCTIONS, "reduce_min"):
        f = jax.jit(lambda x, mask: getattr(jaxkern, operation)(x, where=mask))
        for spec in (P("r", "c"), P(None, ("r", "c"))):
            args = put(m, (x, mask), (spec, spec))
            found, wanted = (np.asarray(f(*a), np.float32) for a in (args, (x, mask)))
            same(found, wanted, 2e-6 if dtype == "float32" else 2.0**-7)
            check(f.lower(*args).compile().as_text(), {"all-reduce": 2}, most=16)


@several
@pytest.mark.parametrize("manual", [{"r", "c"}, {"r"}])
def test_reductions_in_shard_map(manual):
    x, _, mask = arrays((16, 64), (1, 64))
    for operation in REDUCTIONS:
        f = reduced(operation, -1)
        mapped = jax.shard_map(f, mesh=mesh(), in_specs=(P("r"), P()), out_specs=P("r"), axis_names=manual)
        same(jax.jit(mapped)(x, mask), f(x, mask))


# ---- rows at indices


ROWS, COUNT, WIDTH = 16, 24, 32


def indexed(lead=()):
    rng = np.random.default_rng(0)
    x, source = (jnp.asarray(rng.normal(size=(*lead, n, WIDTH)), jnp.float32) for n in (ROWS, COUNT))
    return x, jnp.asarray(rng.integers(-ROWS - 2, ROWS + 3, COUNT), jnp.int32), source


def add(x, index, source):
    return jaxkern.index_add(x, x.ndim - 2, index, source, alpha=0.5)


def select(x, index, _):
    return jaxkern.index_select(x, x.ndim - 2, index)


def segments(name):
    def f(_, index, source):
        reduced = functools.partial(getattr(jaxkern, f"segment_{name}"), segment_ids=index, num_segments=ROWS)
        for _ in range(source.ndim - 2):
            reduced = jax.vmap(reduced)
        return reduced(source)
    return f


def derivative(f, at):
    """Of a function of x, index, source by the operand at `at`, at a cotangent that is made of the result."""
    def backward(*operands):
        of_one = lambda v: f(*operands[:at], v, *operands[at + 1 :])
        y, pull = jax.vjp(of_one, operands[at])
        return pull(jnp.sin(jnp.nan_to_num(y)))[0]
    return backward


FUNCTIONS = {
    "index_add": add, "index_select": select, "segment_sum": segments("sum"), "segment_mean": segments("mean"),
    "segment_max": segments("max"), "segment_min": segments("min"), "segment_softmax": segments("softmax"),
    "index_add, to source": derivative(add, 2), "index_select, to x": derivative(select, 0),
    "segment_sum, to source": derivative(segments("sum"), 2), "segment_max, to source": derivative(segments("max"), 2),
    "segment_softmax, to source": derivative(segments("softmax"), 2),
}
AR, RS, AG = "all-reduce", "reduce-scatter", "all-gather"
ROWS_SPLIT = (P("r"), P(), P())
COUNT_SPLIT = (P(), P("r"), P("r"))
BOTH_SPLIT = (P("r"), P("r"), P("r"))
BESIDE = (P("c"), P("r"), P("r"))
INNER = (P(None, ("r", "c")), P(), P(None, ("r", "c")))
# Where nothing is listed nothing is sent. A gather of indices (integers, one a row) is listed where rows and
# indices are split by the same axis of the mesh; of rows never.
SENT = [
    *[(name, (8,), (P("r"), P(), P("r")), P("r"), {}) for name in FUNCTIONS],
    *[(name, (8, 4), (P("r", "c"), P(), P("r", "c")), P("r", "c"), {}) for name in ("index_add", "segment_max", "index_select, to x")],
    *[(name, (), INNER, INNER[0], {}) for name in FUNCTIONS],
    ("index_add", (), ROWS_SPLIT, P("r"), {}),
    ("index_add", (), COUNT_SPLIT, P(), {AR: 1}),
    ("index_add", (), BOTH_SPLIT, P("r"), {RS: 1}),
    ("index_add", (), BESIDE, P("c"), {AR: 1}),
    ("index_add", (), (P(("r", "c")), P("r"), P("r")), P(("r", "c")), {RS: 1}),
    ("index_add", (), (P("r"), P(("r", "c")), P(("r", "c"))), P("r"), {RS: 1, AR: 1}),
    ("index_add", (8,), (P("c", "r"), P(), P("c")), P("c", "r"), {}),
    ("index_add, to source", (), ROWS_SPLIT, P(), {AR: 1}),
    ("index_add, to source", (), COUNT_SPLIT, P("r"), {AR: 1}),
    ("index_add, to source", (), BESIDE, P("r"), {AR: 2}),
    ("index_select", (), ROWS_SPLIT, P(), {AR: 1}),
    ("index_select", (), COUNT_SPLIT, P("r"), {}),
    ("index_select", (), BOTH_SPLIT, P("r"), {RS: 1, AG: 1}),
    ("index_select", (), BESIDE, P("r"), {AR: 1}),
    ("index_select", (), (P(("r", "c")), P("r"), P("r")), P("r"), {RS: 1, AR: 1, AG: 1}),
    ("index_select, to x", (), ROWS_SPLIT, P("r"), {AR: 1}),
    ("index_select, to x", (), COUNT_SPLIT, P(), {AR: 1}),
    ("index_select, to x", (), BOTH_SPLIT, P("r"), {RS: 2, AG: 1}),
    ("index_select, to x", (), BESIDE, P("c"), {AR: 2}),
    *[(name, (), COUNT_SPLIT, P(), {AR: 1}) for name in ("segment_sum", "segment_max", "segment_min")],
    *[(name, (), (P(), P(), P()), P("r"), {}) for name in ("segment_sum", "segment_max")],
    *[(name, (), COUNT_SPLIT, P("r"), {RS: 1} if name == "segment_sum" else {AR: 1}) for name in ("segment_sum", "segment_min")],
    *[(name, (), COUNT_SPLIT, P(("c", "r")), {RS: 1} if name == "segment_sum" else {AR: 1}) for name in ("segment_sum", "segment_min")],
    ("segment_mean", (), COUNT_SPLIT, P(), {AR: 2}),
    ("segment_sum, to source", (), COUNT_SPLIT, P("r"), {AR: 1}),
    ("segment_max, to source", (), COUNT_SPLIT, P("r"), {AR: 2}),
    ("segment_softmax", (), COUNT_SPLIT, P("r"), {AR: 2}),
    ("segment_softmax", (8,), (P(), P("c"), P("r", "c")), P("r", "c"), {AR: 2}),
    ("segment_softmax, to source", (), COUNT_SPLIT, P("r"), {AR: 3}),
]


@functools.cache
def indexed_on_one_device(name, lead):
    return jax.jit(FUNCTIONS[name])(*indexed(lead))


@several
@every_mesh
@pytest.mark.parametrize("name, lead, specs, out, listed", SENT)
def test_rows_at_indices(shape_of_mesh, name, lead, specs, out, listed):
    m = mesh(shape=shape_of_mesh)
    args = put(m, indexed(lead), specs)
    f = jax.jit(FUNCTIONS[name], out_shardings=NamedSharding(m, out)).lower(*args).compile()
    same(f(*args), indexed_on_one_device(name, lead))
    check(f.as_text(), listed)
    gathered = messages(f.as_text())["all-gather"]
    assert all(n <= COUNT for n in gathered), gathered


@several
@pytest.mark.parametrize("lead, x_spec, index_spec, source_spec", [
    ((8,), P("r"), P(), P("r")), ((8,), P("r", None, "c"), P(), P("r", None, "c")), ((), P(), P("r"), P("r")),
    ((), P("r"), P(), P()), ((), P(None, "c"), P("r"), P("r", "c"))])
def test_rows_at_indices_on_an_explicit_mesh(lead, x_spec, index_spec, source_spec):
    m = mesh("Explicit")
    everything = lambda *operands: [FUNCTIONS[name](*operands) for name in FUNCTIONS]
    with jax.set_mesh(m):
        found = jax.jit(everything)(*put(m, indexed(lead), (x_spec, index_spec, source_spec)))
    same(found, [indexed_on_one_device(name, lead) for name in FUNCTIONS])


@several
@pytest.mark.parametrize("index_dtype", ["int8", "uint8", "int32", "uint32", "int64"])
@pytest.mark.parametrize("mode", ["drop", "clip"])
def test_every_type_of_index_into_split_rows(index_dtype, mode, x64):
    """Negative ones, and any out of range, by however much; batches of them, and in order."""
    m = mesh(names=("r",))
    limits = jnp.iinfo(index_dtype)
    rng = np.random.default_rng(0)
    index = np.concatenate([rng.integers(max(limits.min, -20), 20, 12), [limits.min, limits.max, 15, 16]]).astype(index_dtype)
    x, s = jnp.asarray(rng.normal(size=(16, 4))), jnp.asarray(rng.normal(size=(16, 4)))

    def f(x, index, s):
        ordered, batch = jnp.sort(index), jnp.stack([index, index[::-1]])
        return (jaxkern.index_add(x, 0, index, s, mode=mode), jaxkern.index_select(x, 0, index, mode=mode),
                jaxkern.segment_sum(s, index, 16, mode=mode), jaxkern.segment_max(s, ordered, 16, True, mode=mode),
                jaxkern.segment_sum(s, ordered, 16, indices_are_sorted=True, mode=mode),
                jax.vmap(lambda i: jaxkern.index_add(x, 0, i, s, mode=mode))(batch))

    out = tuple(NamedSharding(m, P("r")) for _ in range(5)) + (NamedSharding(m, P(None, "r")),)
    for specs in ((P("r"), P(), P()), (P("r"), P("r"), P("r"))):
        same(jax.jit(f, out_shardings=out)(*put(m, (x, index, s), specs)), jax.jit(f)(x, index, s), 1e-12)


@several
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int32", "int64", "uint32", "complex64", "int8"])
def test_other_types_at_split_indices(dtype, x64):
    """16 bits are rounded once: the parts of a sum are sent in 32."""
    m = mesh(names=("r",))
    rng = np.random.default_rng(0)
    x, s = (jnp.asarray(rng.normal(0, 4, (n, 8))).astype(dtype) for n in (16, 64))
    index = jnp.asarray(rng.integers(0, 16, 64))
    f = lambda x, i, s: (jaxkern.index_add(x, 0, i, s), jaxkern.segment_sum(s, i, 16), jaxkern.index_select(x, 0, i))
    found = jax.jit(f)(*put(m, (x, index, s), (P(), P("r"), P("r"))))
    # Half a unit each, if float32 sums of 16 bits fall to either side of a tie; else the order of a few additions.
    eps = float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0
    slack = eps if x.itemsize == 2 else 32 * eps
    for y, wanted in zip(found, jax.jit(f)(x, index, s)):
        assert y.dtype == dtype
        wide = np.complex128 if dtype == "complex64" else np.float64
        np.testing.assert_allclose(np.asarray(y, wide), np.asarray(wanted, wide), rtol=slack, atol=slack)


@several
def test_nan_and_infinity_in_split_segments():
    m = mesh(names=("r",))
    s = jnp.asarray(np.random.default_rng(0).normal(size=(32, 4)), jnp.float32)
    s = s.at[3, 0].set(jnp.nan).at[4, 1].set(-jnp.nan).at[5, 2].set(jnp.inf).at[6, 2].set(-jnp.inf).at[7, 3].set(-0.0)
    index = jnp.arange(32) % 6
    for f in (jaxkern.segment_max, jaxkern.segment_min, jaxkern.segment_sum):
        g = jax.jit(lambda s, i, f=f: f(s, i, 7))
        same(g(*put(m, (s, index), (P("r"), P("r")))), g(s, index))
        h = jax.jit(lambda s, i, f=f: f(s.astype(jnp.bfloat16), i, 7).astype(jnp.float32))
        same(h(*put(m, (s, index), (P("r"), P("r")))), h(s, index), 2**-7)


@several
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("table_spec", [P(), P("r"), P("c")])
@pytest.mark.parametrize("spec", [P(), P("r"), P("r", "c")])
def test_lookup_of_split_ids(kind, table_spec, spec):
    m = mesh(kind)
    table, ids = jnp.arange(64.0).reshape(16, 4), jnp.arange(32).reshape(8, 4) % 17
    f = jax.jit(lambda t, i: jax.value_and_grad(lambda t: jnp.nansum(jnp.sin(jaxkern.embedding_lookup(t, i))))(t))
    wanted = f(table, ids)
    if kind == "Explicit" and any(a in str(spec) and a in str(table_spec) for a in "rc"):
        spec = P()  # a type cannot say so
    with jax.set_mesh(m):
        same(f(*put(m, (table, ids), (table_spec, spec))), wanted)


@several
@pytest.mark.parametrize("manual", [{"r", "c"}, {"r"}])
def test_rows_at_indices_in_shard_map(manual):
    m = mesh()
    operands = indexed((8,))
    everything = lambda *operands: [FUNCTIONS[name](*operands) for name in FUNCTIONS]
    f = jax.shard_map(everything, mesh=m, in_specs=(P("r"), P(), P("r")), out_specs=P("r"), axis_names=manual)
    same(jax.jit(f)(*operands), [indexed_on_one_device(name, (8,)) for name in FUNCTIONS])
    check(jax.jit(f).lower(*operands).compile().as_text(), {})


@several
def test_gradient_of_a_replicated_table_in_shard_map():
    """Each device looks up its own ids: the gradient of the table is the sum over devices, whatever is replicated."""
    m = mesh(names=("r",))
    table, ids = jnp.arange(40.0).reshape(10, 4) / 40, jnp.arange(4 * len(DEVICES)).reshape(-1, 4) % 10
    loss = lambda t, i: jnp.sum(jnp.sin(jaxkern.embedding_lookup(t, i) * 3) + jnp.sin(
        jaxkern.segment_sum(t[:4], i.reshape(-1)[:4], 5)).sum())
    mapped = jax.shard_map(lambda t, i: jax.lax.psum(loss(t, i), "r"), mesh=m, in_specs=(P(), P("r")), out_specs=P())
    whole = lambda t, i: sum(loss(t, one[None]) for one in i)
    same(*(jax.jit(jax.value_and_grad(f))(table, ids) for f in (mapped, whole)))


@several
def test_donated_rows_are_updated_in_place():
    """Split or not, index_add onto a donated array needs no second one."""
    m = mesh()
    x, index, source = put(m, indexed(), (P("r"), P(), P()))
    f = jax.jit(lambda x, i, s: jaxkern.index_add(x, 0, i, s), donate_argnums=0)
    text = f.lower(x, index, source).compile().as_text()
    assert "input_output_alias" in text and not re.findall(r"= \S+\[\d+,\d+\]\S* copy\(", text)
    wanted = jaxkern.index_add(*[indexed()[0], 0, *indexed()[1:]])
    same(f(x, index, source), wanted)
    assert x.is_deleted()


# ---- where JAX does not call back


@several
def test_exported_programs_run_on_several_devices():
    """One program for all devices of a mesh: rows stay where they are, and what is split otherwise is gathered."""
    pytest.importorskip("flatbuffers", reason="Exported.serialize needs it")
    m = mesh()
    x, index, source = indexed((8,))
    f = jax.jit(lambda x, i, s: (jaxkern.softmax(x), add(x, i, s), select(x, i, s)))
    for spec, silent in ((P("r"), True), (P(None, None, "c"), False), (P(None, "r"), False)):
        args = put(m, (x, index, source), (spec, P(), P(*spec[:1])))
        exported = jax.export.export(f, disabled_checks=jaxkern.export_checks())(*args)
        again = jax.jit(jax.export.deserialize(exported.serialize()).call)
        same(again(*args), f(x, index, source))
        if silent:
            check(again.lower(*args).compile().as_text(), {})


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
    find = _compat._primitives_that_need_devices
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
                    check(f.as_text(), {})
    finally:
        find.cache_clear()


# ---- cross-entropy


LOSSES = {  # arguments of softmax_cross_entropy
    "plain": {}, "smooth": {"label_smoothing": 0.1}, "spread": {"label_smoothing": 1.0}, "z": {"z_loss": 0.01},
    "all": {"label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": -1},
}


def logits_and_labels(rows, classes, mask_shape, special=True):
    """Every kind of label, and rows that have a part of nothing, or are nothing; of which a NaN and inf."""
    x, _, mask = arrays((rows, classes), mask_shape)
    labels = jnp.asarray(np.random.default_rng(1).integers(0, classes, rows), jnp.int32)
    if special:
        labels = labels.at[0].set(-1).at[1].set(-7).at[2].set(classes).at[3].set(classes - 1).at[4].set(0)
        x = x.at[5].set(-jnp.inf).at[6, : classes * 3 // 4].set(-jnp.inf).at[7, labels[7]].set(-jnp.inf)
        x = x.at[8, 3].set(jnp.nan).at[9, classes - 2].set(jnp.inf).at[10, 2].set(5e4)
    return x, labels, mask


def losses_and_pulls(x, labels, mask):
    def one(options):
        value, pull = jax.vjp(lambda x: jaxkern.softmax_cross_entropy(x, labels, where=mask, **options), x)
        return value, pull(jnp.cos(jnp.arange(value.size, dtype=value.dtype)).reshape(value.shape))[0]
    return {name: one(options) for name, options in LOSSES.items()}


@functools.cache
def losses_on_one_device(mask_shape):
    return jax.jit(losses_and_pulls)(*logits_and_labels(16, 64, mask_shape))


@several
@every_mesh
@pytest.mark.parametrize("spec", [P("r"), P(("r", "c")), P(), P("r", "c"), P("c", "r"), P(None, ("r", "c"))])
@pytest.mark.parametrize("mask_shape", [None, (1, 64), (16, 64)])
def test_loss_of_split_logits(spec, shape_of_mesh, mask_shape):
    """Split rows tell each other nothing, split classes two messages of row scalars for loss and gradient; whichever the labels."""
    m = mesh(shape=shape_of_mesh)
    x, labels, mask = logits_and_labels(16, 64, mask_shape)
    args = put(m, (x, labels, mask), (spec, P(*spec[:1]), spec if mask_shape == x.shape else P()))
    cut = split_by(m, spec[1:], ("r", "c"))
    out = (NamedSharding(m, P(*spec[:1])), NamedSharding(m, spec))
    f = jax.jit(losses_and_pulls, out_shardings=dict.fromkeys(LOSSES, out)).lower(*args).compile()
    same(f(*args), losses_on_one_device(mask_shape))
    check(f.as_text(), {"all-reduce": 2 * len(LOSSES)} if cut else {}, most=4 * 16 * len(LOSSES))  # which may be sent together


@several
@pytest.mark.parametrize("spec", [P("r"), P("r", "c"), P(None, "c")])
def test_a_step_reads_split_logits_once_or_twice(spec):
    """Loss and gradient come from one call where rows are whole; where classes are split, from its two halves."""
    m = mesh()
    x, labels, mask = logits_and_labels(16, 64, (1, 64), special=False)
    f = jax.value_and_grad(lambda x: jaxkern.softmax_cross_entropy(x, labels, where=mask, label_smoothing=0.1).mean())
    args = put(m, (x,), (spec,))
    text = jax.jit(f).lower(*args).compile().as_text()
    same(jax.jit(f)(*args), jax.jit(f)(x))
    check(text, {"all-reduce": 3})
    if KERNELS and _compat.moves_operations():
        cut = split_by(m, spec[1:], "c")
        assert re.findall(r'custom_call_target="(jaxkern_\w+)"', text) == ["jaxkern_cross_entropy" + ("" if cut else "_both")]


@several
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("axis, spec", [(-1, P("r", None, "c")), (1, P(None, "c", "r")), (0, P("c"))])
def test_loss_of_other_types_and_axes_with_split_classes(dtype, axis, spec, x64):
    m = mesh()
    x = (30 * jax.random.normal(jax.random.key(0), (8, 32, 16), jnp.float32)).astype(dtype)
    rows = [d for d in range(3) if d != axis % 3]
    labels = jnp.arange(math.prod(x.shape[d] for d in rows), dtype=jnp.uint8).reshape([x.shape[d] for d in rows]) % 9
    f = jax.jit(lambda x: jax.vjp(lambda x: jaxkern.softmax_cross_entropy(x, labels, axis=axis, z_loss=0.01), x)[1](
        jnp.ones(labels.shape, jnp.float64 if dtype == "float64" else jnp.float32))[0])
    found, wanted = (np.asarray(f(a), np.float64) for a in (*put(m, (x,), (spec,)), x))
    same(found, wanted, float(jnp.finfo(dtype).eps) * 8)


@several
def test_derivatives_of_the_loss_of_split_classes():
    """Forward, second and batched ones, and loss and gradient in one call."""
    m = mesh()
    x, labels, _ = logits_and_labels(8, 64, None, special=False)
    loss = lambda x: jaxkern.softmax_cross_entropy(x, labels, label_smoothing=0.1, z_loss=0.01)
    total = lambda x: jnp.sum(jnp.sin(loss(x)))

    def f(x, t):
        hvp = lambda t: jax.jvp(jax.grad(total), (x,), (t,))[1]
        return (jax.jvp(loss, (x,), (t,)), hvp(t), jax.vmap(hvp)(jnp.stack([t, x])),
                jaxkern.softmax_cross_entropy_and_grad(x, labels, jnp.arange(8.0), label_smoothing=0.1))

    args = put(m, (x, jnp.cos(x)), (P("r", "c"),) * 2)
    same(jax.jit(f)(*args), jax.jit(f)(x, jnp.cos(x)), 1e-5)
    text = jax.jit(lambda x, t: jax.jvp(loss, (x,), (t,))).lower(*args).compile().as_text()
    check(text, {"all-reduce": 3}, most=3 * 8)


@several
def test_a_gradient_that_is_split_otherwise_than_the_loss():
    """What is kept of a row means the same to the kernels and to XLA's operations, in 16 bits of large logits too."""
    m = mesh()
    x, labels, _ = logits_and_labels(16, 64, None, special=False)
    x = (3e4 + 8 * x).astype(jnp.float16)
    f = lambda x: jax.vjp(lambda x: jaxkern.softmax_cross_entropy(x, labels), x)[1](jnp.ones(16))[0]
    wanted = np.asarray(jax.jit(f)(x), np.float32)
    for spec, other in ((P("r"), P(None, "c")), (P(None, "c"), P("r"))):
        g = jax.jit(f, out_shardings=NamedSharding(m, other))
        same(np.asarray(g(*put(m, (x,), (spec,))), np.float32), wanted, 2e-3)


@several
def test_donated_logits_are_overwritten():
    """Their gradient is as large: split or not, it needs no second array."""
    m = mesh()
    x, labels, _ = logits_and_labels(16, 64, None, special=False)
    for spec in (P("r"), P("r", "c")):
        f = jax.jit(lambda x: jaxkern.softmax_cross_entropy_and_grad(x, labels), donate_argnums=0,
                    out_shardings=(NamedSharding(m, P("r")), NamedSharding(m, spec)))
        text = f.lower(*put(m, (x,), (spec,))).compile().as_text()
        assert "input_output_alias" in text and not re.findall(r"= f32\[\d+,\d+\]\S* copy\(", text)


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


@several
@pytest.mark.parametrize("kind, spec, keys", [
    *(("Auto", spec, 64) for spec in (P("r"), P("r", "c"), P(("r", "c")), P(), P(None, None, "r"), P("c", None, "r"))),
    *(("Explicit", spec, 64) for spec in (P("r", "c"), P(), P(None, None, "r"))),
    # From here on rows are split, into parts that do not begin with a block of eight draws too.
    ("Auto", P(None, None, None, "r"), 64), ("Auto", P(None, None, None, ("r", "c")), 24), ("Auto", P("r", None, None, "c"), 20),
    ("Explicit", P("c", None, None, "r"), 64),
])
def test_fused_drops_the_same_elements_however_it_is_split(kind, spec, keys):
    m = mesh(kind)
    x, g, where = arrays((8, 4, 8, keys), (8, 1, 8, keys))
    bias = arrays((4, 8, keys))[0]
    wanted = jax.jit(fused)(x, g, bias, where)
    put = lambda a, s: jax.device_put(a, NamedSharding(m, s))
    args = put(x, spec), put(g, spec), put(bias, P()), put(where, P())
    with jax.set_mesh(m):
        f = jax.jit(fused)
        found = f(*args)
        text = jax.jit(lambda *a: fused(*a)[:2]).lower(*args).compile().as_text()
    np.testing.assert_array_equal(np.asarray(found[0]) == 0, np.asarray(wanted[0]) == 0)
    same(found, wanted)
    cut = len(spec) == 4 and split_by(m, spec[3:], ("r", "c"))
    check(text, {"all-reduce": 4} if cut else {}, kernel=False, most=2 * x.size // keys)
    assert ("custom_call_target=\"jaxkern_softmax_fused" in text) == (KERNELS and not cut and not split_by(m, spec[2:3], ("r", "c")))


@several
def test_fused_in_shard_map():
    """Each device's part is an array by itself; a bias that all share gets the sum of its gradients."""
    m = mesh()
    x, g, where = arrays((8, 4, 8, 64), (8, 1, 8, 64))
    bias = arrays((4, 8, 64))[0]
    parts, rows = m.shape["r"], 8 // m.shape["r"]
    keys = jax.random.split(jax.random.key(0), parts)

    def part(x, g, bias, where, key):
        f = lambda x, bias: jaxkern.softmax(x, bias=bias, where=where, causal=True, dropout_rate=0.3, dropout_key=key[0])
        y, pull = jax.vjp(f, x, bias)
        return y, *pull(g)

    split = jax.shard_map(part, mesh=m, in_specs=(P("r"), P("r"), P(), P("r"), P("r")), out_specs=(P("r"), P("r"), P()))
    found = jax.jit(split)(x, g, bias, where, keys)
    of = lambda a, k: a[rows * k : rows * (k + 1)]
    each = [part(of(x, k), of(g, k), bias, of(where, k), keys[k : k + 1]) for k in range(parts)]
    same(found, (np.concatenate([e[0] for e in each]), np.concatenate([e[1] for e in each]), sum(np.asarray(e[2]) for e in each)))
