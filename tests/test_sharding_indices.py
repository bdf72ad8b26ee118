"""Operations at indices, of arrays spread over several devices: as in test_sharding.py."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sharding import DEVICES, KERNELS, check, every_mesh, mesh, messages, put, same, several

import jaxkern

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
    """The derivative of a function of x, index, source by operand number `at`, for a cotangent computed from the result."""

    def backward(*operands):
        of_one = lambda v: f(*operands[:at], v, *operands[at + 1 :])
        y, pull = jax.vjp(of_one, operands[at])
        return pull(jnp.sin(jnp.nan_to_num(y)))[0]

    return backward


FUNCTIONS = {
    "index_add": add,
    "index_select": select,
    "segment_sum": segments("sum"),
    "segment_mean": segments("mean"),
    "segment_max": segments("max"),
    "segment_min": segments("min"),
    "segment_prod": segments("prod"),
    "segment_softmax": segments("softmax"),
    "index_add, to source": derivative(add, 2),
    "index_select, to x": derivative(select, 0),
    "segment_sum, to source": derivative(segments("sum"), 2),
    "segment_max, to source": derivative(segments("max"), 2),
    "segment_softmax, to source": derivative(segments("softmax"), 2),
}
AR, RS, AG = "all-reduce", "reduce-scatter", "all-gather"
ROWS_SPLIT = (P("r"), P(), P())
COUNT_SPLIT = (P(), P("r"), P("r"))
BOTH_SPLIT = (P("r"), P("r"), P("r"))
BESIDE = (P("c"), P("r"), P("r"))
INNER = (P(None, ("r", "c")), P(), P(None, ("r", "c")))
# Where nothing is listed nothing is sent. A gather of indices (integers, one per row) is listed where rows and
# indices are split by the same axis of the mesh; of rows never.
SENT = [
    *[(name, (8,), (P("r"), P(), P("r")), P("r"), {}) for name in FUNCTIONS],
    *[
        (name, (8, 4), (P("r", "c"), P(), P("r", "c")), P("r", "c"), {})
        for name in ("index_add", "segment_max", "index_select, to x")
    ],
    *[(name, (), INNER, INNER[0], {}) for name in FUNCTIONS],
    ("index_add", (), ROWS_SPLIT, P("r"), {}),
    ("index_add", (), COUNT_SPLIT, P(), {AR: 1}),
    ("index_add", (), BOTH_SPLIT, P("r"), {RS: 1}),
    ("index_add", (), BESIDE, P("c"), {AR: 1}),
    ("index_add", (), (P(("r", "c")), P("r"), P("r")), P(("r", "c")), {RS: 1}),
    # The updates of the devices along "r" are smaller than their rows.
    ("index_add", (), (P("r"), P(("r", "c")), P(("r", "c"))), P("r"), {AG: 2, AR: 1}),
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
    *[
        (name, (), COUNT_SPLIT, P("r"), {RS: 1} if name == "segment_sum" else {AR: 1})
        for name in ("segment_sum", "segment_min")
    ],
    *[
        (name, (), COUNT_SPLIT, P(("c", "r")), {RS: 1} if name == "segment_sum" else {AR: 1})
        for name in ("segment_sum", "segment_min")
    ],
    ("segment_mean", (), COUNT_SPLIT, P(), {AR: 2}),
    ("segment_prod", (), COUNT_SPLIT, P(), {AG: 1}),  # of the results: XLA has no message that multiplies
    ("segment_prod", (), BOTH_SPLIT, P("r"), {AG: 2}),
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
    most = COUNT * WIDTH // 2 if listed.get(AG) == 2 else COUNT
    assert name == "segment_prod" or all(n <= most for n in gathered), gathered


@several
@pytest.mark.parametrize("spec, by", [(P("r"), P("r")), (P(("r", "c")), P("r")), (P("r"), P(("r", "c")))], ids=str)
@pytest.mark.parametrize("name", ["index_add", "segment_sum", "segment_max", "x.at[].add", "x.at[].max"])
def test_few_updates_are_gathered_in_place_of_the_rows(name, spec, by):
    """Rows and indices are split by one axis. Joined rows would be larger than the updates of all devices."""
    x, rows = jnp.zeros((64 * ROWS, WIDTH)), 64 * ROWS
    _, index, source = indexed()
    index = index * 64
    f = {
        "index_add": add,
        "segment_sum": lambda x, i, s: jaxkern.segment_sum(s, i, rows),
        "segment_max": lambda x, i, s: jaxkern.segment_max(s, i, rows),
        "x.at[].add": lambda x, i, s: x.at[i].add(s),
        "x.at[].max": lambda x, i, s: x.at[i].max(s),
    }[name]
    wanted, m = jax.jit(f)(x, index, source), mesh()
    args = put(m, (x, index, source), (spec, by, by))
    with jaxkern.accelerate(only=("scatter_add", "scatter_max"), force=True):
        compiled = jax.jit(lambda *a: f(*a), out_shardings=args[0].sharding).lower(*args).compile()
    same(compiled(*args), wanted)
    sent = messages(compiled.as_text())
    joined = sum(sent["all-reduce"])  # over axes that split the indices alone, of the rows of one device
    rows_here = x.size // m.shape["r"] if by != P("r") else 0
    assert set(sent) <= {"all-gather", "all-reduce"} and joined <= rows_here, dict(sent)
    assert sum(sent["all-gather"]) <= COUNT * (WIDTH + 1), dict(sent)


@several
@pytest.mark.parametrize(
    "lead, x_spec, index_spec, source_spec",
    [
        ((8,), P("r"), P(), P("r")),
        ((8,), P("r", None, "c"), P(), P("r", None, "c")),
        ((), P(), P("r"), P("r")),
        ((), P("r"), P(), P()),
        ((), P(None, "c"), P("r"), P("r", "c")),
    ],
)
def test_rows_at_indices_on_an_explicit_mesh(lead, x_spec, index_spec, source_spec):
    m = mesh("Explicit")
    everything = lambda *operands: [FUNCTIONS[name](*operands) for name in FUNCTIONS]
    with jax.set_mesh(m):
        found = jax.jit(everything)(*put(m, indexed(lead), (x_spec, index_spec, source_spec)))
    same(found, [indexed_on_one_device(name, lead) for name in FUNCTIONS])


@several
@pytest.mark.parametrize(
    "name, x_spec, index_spec, source_spec",
    [
        ("index_add", P(None, "r"), P(), P("r")),
        ("index_add", P(), P("r"), P(None, "c")),
        *((name, P(), P("c"), P(("r", "c"))) for name in ("segment_sum", "segment_max", "segment_softmax")),
    ],
)
def test_gradients_on_an_explicit_mesh(name, x_spec, index_spec, source_spec):
    """Operands are split in different ways, so rows that are selected meet a source that is split differently."""
    m, operands = mesh("Explicit"), indexed(())
    f = FUNCTIONS[name]
    gradients = lambda *operands: [derivative(f, at)(*operands) for at in (0, 2)]
    with jax.set_mesh(m):
        found = jax.jit(gradients)(*put(m, operands, (x_spec, index_spec, source_spec)))
    same(found, jax.jit(gradients)(*operands))


@several
def test_sharding_of_segments_as_in_jax():
    m, (_, index, source) = mesh("Explicit"), indexed(())
    with jax.set_mesh(m):
        index, source = put(m, (index, source), (P(), P("r")))
        for name in ("segment_sum", "segment_max", "segment_min", "segment_mean"):
            total = functools.partial(getattr(jaxkern, name), source, index, ROWS)
            found = total(out_sharding=P("c", "r"))
            assert found.sharding == NamedSharding(m, P("c", "r"))
            same(found, total())


@several
@pytest.mark.parametrize("index_dtype", ["int8", "uint8", "int32", "uint32", "int64"])
@pytest.mark.parametrize("mode", ["drop", "clip"])
def test_every_type_of_index_into_split_rows(index_dtype, mode, x64):
    """Negative ones, and any out of range, by however much; batches of them, and in order."""
    m = mesh(names=("r",))
    limits = jnp.iinfo(index_dtype)
    rng = np.random.default_rng(0)
    index = np.concatenate([rng.integers(max(limits.min, -20), 20, 12), [limits.min, limits.max, 15, 16]]).astype(
        index_dtype
    )
    x, s = jnp.asarray(rng.normal(size=(16, 4))), jnp.asarray(rng.normal(size=(16, 4)))

    def f(x, index, s):
        ordered, batch = jnp.sort(index), jnp.stack([index, index[::-1]])
        return (
            jaxkern.index_add(x, 0, index, s, mode=mode),
            jaxkern.index_select(x, 0, index, mode=mode),
            jaxkern.segment_sum(s, index, 16, mode=mode),
            jaxkern.segment_max(s, ordered, 16, True, mode=mode),
            jaxkern.segment_sum(s, ordered, 16, indices_are_sorted=True, mode=mode),
            jax.vmap(lambda i: jaxkern.index_add(x, 0, i, s, mode=mode))(batch),
        )

    out = tuple(NamedSharding(m, P("r")) for _ in range(5)) + (NamedSharding(m, P(None, "r")),)
    wanted = jax.jit(f)(x, index, s)
    for specs in ((P("r"), P(), P()), (P("r"), P("r"), P("r"))):
        same(jax.jit(f, out_shardings=out)(*put(m, (x, index, s), specs)), wanted, 1e-12)


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
@pytest.mark.parametrize("alpha", [np.inf, np.nan, -np.inf])
def test_rows_of_no_index_whatever_alpha(alpha):
    m = mesh(names=("r",))
    x, index, source = jnp.arange(8.0), jnp.arange(16) % 5, jnp.arange(16.0) - 3.5
    f = jax.jit(lambda x, i, s, a: jaxkern.index_add(x, 0, i, s, alpha=a))
    found = f(*put(m, (x, index, source), (P(), P("r"), P("r"))), alpha)
    np.testing.assert_array_equal(found, f(x, index, source, alpha))
    np.testing.assert_array_equal(found[5:], x[5:])


@several
@pytest.mark.parametrize("dim, spec", [(0, P(None, "r")), (1, P("r")), (0, P("c", "r"))])
def test_batches_of_split_indices_of_one_array_on_an_explicit_mesh(dim, spec):
    m = mesh("Explicit")
    x, index, source = (
        jnp.arange(32.0).reshape(8, 4),
        jnp.arange(64).reshape(8, 8) % 5,
        jnp.sin(jnp.arange(32.0)).reshape(8, 4),
    )

    def f(x, index, source):
        batch = lambda f: jax.vmap(f, (None, dim))(source, index)
        return [
            jax.vmap(lambda i: jaxkern.index_select(x, 0, i), dim)(index),
            jaxkern.embedding_lookup(x, index),
            batch(lambda s, i: jaxkern.index_add(x, 0, i, s, alpha=2)),
            batch(lambda s, i: jaxkern.segment_max(s, i, 6)),
        ]

    gradient = jax.grad(
        lambda *operands: sum(
            jnp.sin(y).sum() for y in jax.tree.map(lambda y: jnp.where(jnp.isfinite(y), y, 0), f(*operands))
        ),
        (0, 2),
    )
    both = jax.jit(lambda *operands: (f(*operands), gradient(*operands)))
    wanted = both(x, index, source)
    with jax.set_mesh(m):
        for source_spec in (P(), P("r"), P(None, "r")):
            same(both(*put(m, (x, index, source), (P(), spec, source_spec))), wanted)


@jax.jit
def looked_up(table, ids):
    return jax.value_and_grad(lambda t: jnp.nansum(jnp.sin(jaxkern.embedding_lookup(t, ids))))(table)


@several
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("table_spec", [P(), P("r"), P("c")])
@pytest.mark.parametrize("spec", [P(), P("r"), P("r", "c"), P(None, "c")])
def test_lookup_of_split_ids(kind, table_spec, spec):
    m = mesh(kind)
    table, ids = jnp.arange(64.0).reshape(16, 4), jnp.arange(32).reshape(8, 4) % 17
    f = looked_up
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
    mapped = jax.jit(f).lower(*operands).compile()
    same(mapped(*operands), [indexed_on_one_device(name, (8,)) for name in FUNCTIONS])
    check(mapped.as_text(), {}, kernel=manual == {"r", "c"})  # over some of the axes, XLA's operations run


@several
def test_gradient_of_a_replicated_table_in_shard_map():
    """Each device looks up its own ids: the gradient of the table is the sum over devices, whatever is replicated."""
    m = mesh(names=("r",))
    table, ids = jnp.arange(40.0).reshape(10, 4) / 40, jnp.arange(4 * len(DEVICES)).reshape(-1, 4) % 10
    loss = lambda t, i: jnp.sum(
        jnp.sin(jaxkern.embedding_lookup(t, i) * 3) + jnp.sin(jaxkern.segment_sum(t[:4], i.reshape(-1)[:4], 5)).sum()
    )
    mapped = jax.shard_map(lambda t, i: jax.lax.psum(loss(t, i), "r"), mesh=m, in_specs=(P(), P("r")), out_specs=P())
    whole = lambda t, i: sum(loss(t, one[None]) for one in i)
    same(*(jax.jit(jax.value_and_grad(f))(table, ids) for f in (mapped, whole)))


@several
def test_donated_rows_are_updated_in_place():
    """Split or not, index_add onto a donated array needs no second one. Onto another array, a kernel copies rows as it adds."""
    m = mesh()
    x, index, source = put(m, indexed(), (P("r"), P(), P()))
    add = lambda x, i, s: jaxkern.index_add(x, 0, i, s)
    f = jax.jit(add, donate_argnums=0)
    copies = lambda text: re.findall(r"= \S+\[\d+,\d+\]\S* copy\(", text)
    text = f.lower(x, index, source).compile().as_text()
    assert "input_output_alias" in text and not copies(text)
    if KERNELS:
        assert not copies(jax.jit(add).lower(x, index, source).compile().as_text())
        same(jax.jit(add)(x, index, source), add(*indexed()))
    wanted = jaxkern.index_add(*[indexed()[0], 0, *indexed()[1:]])
    same(f(x, index, source), wanted)
    assert x.is_deleted()


@several
def test_exported_programs_run_on_several_devices():
    """One program for all devices of a mesh: rows stay where they are, and arrays that are split differently are gathered."""
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
            check(again.lower(*args).compile().as_text(), {}, kernel=False)


@several
@pytest.mark.parametrize("spec", [P(None, "a"), P("a", None), P()])
def test_a_given_order_on_several_devices(spec):
    """It serves every device where columns are split; where rows are, each device sorts its own."""
    two = Mesh(np.array(jax.devices()[:2]), ("a",))
    ids = jnp.asarray(np.random.default_rng(0).integers(-1, 30, 200))
    data, order = jnp.asarray(np.arange(1600).reshape(200, 8), jnp.float32), jaxkern.sort_indices(ids, 30)
    f = lambda data, order: jaxkern.segment_sum(data, None, order=order)
    loss = lambda data, order: (f(data, order) / 1000).sum()
    split = jax.device_put(data, NamedSharding(two, spec))
    np.testing.assert_array_equal(jax.jit(f)(split, order), f(data, order))
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(split, order), jax.grad(loss)(data, order))
