"""The layers of jaxkern.nnx and jaxkern.equinox against the layers of flax and equinox that they replace.

One program computes results and gradients of both layers with the same parameters. The reference is their layer in float32, or in
float64 for float64.
"""

import doctest
import functools
import importlib
import inspect
import io
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxkern
from jaxkern._core import compat

nnx = pytest.importorskip("flax.nnx", reason="the layers need the `layers` extra")
serialization = pytest.importorskip("flax.serialization")
eqx = pytest.importorskip("equinox", reason="the layers need the `layers` extra")
import jaxkern.equinox  # noqa: E402
import jaxkern.nnx  # noqa: E402
import jaxkern.optax  # noqa: E402

LIBRARIES = {"nnx": (jaxkern.nnx, nnx), "equinox": (jaxkern.equinox, eqx.nn)}
IDS = np.array([[0, 3, 3], [9, -1, 4]], np.int32)
CAUSAL = np.tril(np.ones((6, 6), bool))
DECODE = {"decode": False}
MASK = np.random.default_rng(0).normal(size=(2, 6, 16)) > -1


@pytest.mark.parametrize("name", ["equinox", "nnx", "optax"])
def test_modules_are_imported_when_they_are_used(name, monkeypatch):
    module = sys.modules[f"jaxkern.{name}"]
    monkeypatch.delattr(jaxkern, name)
    assert getattr(jaxkern, name) is module
    with pytest.raises(AttributeError, match="module 'jaxkern' has no attribute 'haiku'"):
        print(jaxkern.haiku)


class Types(typing.NamedTuple):
    x: str = "float32"
    parameters: str = "float32"
    dtype: str | None = None


class Layer(typing.NamedTuple):
    name: str
    args: tuple
    options: dict
    x: typing.Any  # the shape of the input, or ids
    call: dict = {}
    types: Types = Types()
    taken: bool = True  # whether jaxkern computes it


def array(*shape, dtype="float32", seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))


def is_array(x):
    return hasattr(x, "dtype")


def inexact(x):
    return is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)


def converted(tree, dtype):
    """The tree with its floating-point arrays converted."""
    return jax.tree.map(lambda a: np.asarray(a, dtype) if inexact(a) else a, tree)


def filled(tree):
    """The tree with numbers in place of its shapes."""
    leaves, structure = jax.tree.flatten(tree)
    made = [(0.4 * array(*a.shape, seed=k)).astype(a.dtype) if is_array(a) else a for k, a in enumerate(leaves)]
    return jax.tree.unflatten(structure, made)


def gradients(f, given):
    """(y, the gradients by floating-point leaves of `given`, more), for a function that returns (y, more)."""
    active, others = eqx.partition(given, inexact)
    y, vjp, more = jax.vjp(lambda a: f(eqx.combine(a, others)), active, has_aux=True)
    return y, vjp(np.round(array(*y.shape, seed=2)).astype(y.dtype))[0], more


def close(ours, theirs, factor=8):
    """Equal up to `factor` roundings of the largest element, in the least precise dtype of ours, in each part of a tuple."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    exact = lambda tree: [np.asarray(a, np.float64) for a in jax.tree.leaves(tree)]
    eps = max(float(jnp.finfo(a.dtype).eps) for a in jax.tree.leaves(ours) if inexact(a))
    for ours, theirs in zip(map(exact, ours), map(exact, theirs)):
        largest = max([np.abs(np.nan_to_num(b)).max() for b in theirs], default=0)
        for a, b in zip(ours, theirs):
            np.testing.assert_allclose(a, b, rtol=0, atol=factor * eps * largest)


def compared(run, given, theirs, reference, taken):
    """Asserts that results and gradients are equal in value, and their dtypes those of theirs.

    given, theirs, reference: (layer, parameters, x), whose layer `run(layer, parameters, x)` runs; it returns (y, more).
    """
    of = lambda layer: lambda given: gradients(lambda given: run(layer, *given), given)
    ours, their, exact = (of(layer) for layer, *_ in (given, theirs, reference))
    if not taken:
        assert str(jax.make_jaxpr(ours)(given[1:])) == str(jax.make_jaxpr(their)(theirs[1:]))
        return
    results, wanted = jax.jit(lambda a, b: (ours(a), exact(b)))(given[1:], reference[1:])
    close(results, wanted)
    dtypes = lambda tree: [a.dtype for a in jax.tree.leaves(tree)]
    assert dtypes(results) == dtypes(jax.eval_shape(their, theirs[1:]))
    assert "jaxkern_" in str(jax.make_jaxpr(lambda *args: run(given[0], *args))(*given[1:]))


# ---- flax.nnx

ROUNDED, NARROW = Types(dtype="bfloat16"), Types(x="bfloat16")
NNX = {
    "RMSNorm, dtype": Layer("RMSNorm", (16,), {"use_scale": False, "epsilon": 0.1}, (2, 6, 16), types=ROUNDED),
    "RMSNorm, mask": Layer("RMSNorm", (16,), {}, (2, 6, 16), {"mask": MASK}, NARROW),
    "RMSNorm, two axes": Layer("RMSNorm", (16,), {"reduction_axes": (1, -1)}, (2, 6, 16)),
    "RMSNorm, other axes": Layer("RMSNorm", (16,), {"reduction_axes": 1}, (2, 6, 16), taken=False),
    "LayerNorm": Layer("LayerNorm", (16,), {}, (2, 6, 16)),
    "LayerNorm, bfloat16": Layer("LayerNorm", (16,), {"use_bias": False}, (2, 6, 16), {"mask": MASK}, NARROW),
    "LayerNorm, two axes": Layer(
        "LayerNorm", (96,), {"reduction_axes": (-1, 1), "feature_axes": (1, 2), "use_scale": False}, (2, 6, 16)
    ),
    "LayerNorm, complex": Layer("LayerNorm", (16,), {}, (2, 16), types=Types(dtype="complex64"), taken=False),
    "GroupNorm": Layer("GroupNorm", (16, 4), {}, (2, 4, 3, 16)),
    "GroupNorm, dtype": Layer("GroupNorm", (16, 4), {"use_bias": False}, (2, 16), types=ROUNDED),
    "GroupNorm, size": Layer("GroupNorm", (16, None, 8), {"use_scale": False, "reduction_axes": (1, 2)}, (2, 3, 16)),
    "GroupNorm, mask": Layer("GroupNorm", (16, 2), {}, (2, 6, 16), {"mask": MASK}, taken=False),
    "BatchNorm": Layer("BatchNorm", (16,), {}, (2, 4, 3, 16)),
    "BatchNorm, axis": Layer(
        "BatchNorm", (6,), {"axis": 1, "momentum": 0.5, "use_bias": False}, (2, 6, 16), {}, NARROW
    ),
    "BatchNorm, running": Layer("BatchNorm", (16,), {"use_running_average": True}, (2, 6, 16), taken=False),
    "Embed": Layer("Embed", (8, 4), {}, IDS),  # 9 is out of range
    "Embed, dtype": Layer("Embed", (10, 4), {}, IDS, types=ROUNDED),
    "Embed, one row": Layer("Embed", (1, 4), {}, IDS, taken=False),
    "MultiHeadAttention": Layer(
        "MultiHeadAttention", (2, 16, 8), {"normalize_qk": True}, (2, 6, 16), DECODE | {"mask": CAUSAL}, ROUNDED
    ),
}


@pytest.mark.parametrize("name", NNX)
def test_nnx(name, highest_precision):
    layer = NNX[name]
    types = layer.types
    x = layer.x if isinstance(layer.x, np.ndarray) else array(*layer.x, dtype=types.x)

    def made(module, dtype, param_dtype):
        options = layer.options | {"dtype": dtype, "param_dtype": param_dtype}
        return nnx.eval_shape(lambda: getattr(module, layer.name)(*layer.args, **options, rngs=nnx.Rngs(0)))

    ours, theirs = (made(module, types.dtype, types.parameters) for module in LIBRARIES["nnx"])
    exact = made(nnx, None, "float32")
    assert isinstance(ours, type(theirs))
    state = filled(nnx.state(theirs))
    for module, given in ((ours, state), (theirs, state), (exact, converted(state, "float32"))):
        nnx.update(module, given)

    def run(definition, state, x):
        module = nnx.merge(definition, state)
        return module(x, **layer.call), nnx.state(module, nnx.BatchStat)

    split = lambda module, x: (*nnx.split(module), x)
    compared(run, split(ours, x), split(theirs, x), split(exact, converted(x, "float32")), layer.taken)


# ---- equinox

LOW, HIGH = (Types(dtype, dtype) for dtype in ("bfloat16", "float64"))
EQUINOX = {
    "RMSNorm": Layer("RMSNorm", (16,), {}, (5, 16)),
    "RMSNorm, bfloat16": Layer("RMSNorm", (16, 0.1), {"use_bias": False}, (5, 16), types=LOW),
    "RMSNorm, matrix": Layer("RMSNorm", ((6, 4),), {"use_weight": False}, (5, 6, 4), types=HIGH),
    "LayerNorm": Layer("LayerNorm", (16,), {}, (5, 16)),
    "LayerNorm, matrix": Layer("LayerNorm", ([6, 4],), {"use_weight": False}, (5, 6, 4), types=LOW),
    "LayerNorm, integers": Layer("LayerNorm", (3,), {}, IDS, taken=False),
    "GroupNorm": Layer("GroupNorm", (4, 16), {}, (5, 16, 3, 2)),
    "GroupNorm, bfloat16": Layer("GroupNorm", (4,), {"channelwise_affine": False, "eps": 0.1}, (5, 16), types=LOW),
    "Embedding": Layer("Embedding", (10, 4), {}, IDS.ravel()),
    "Embedding, bfloat16": Layer("Embedding", (10, 4), {}, IDS.ravel(), types=LOW),
    "MultiheadAttention": Layer("MultiheadAttention", (4, 16), {}, (2, 6, 16), {"mask": CAUSAL}, LOW),
    "MultiheadAttention, sizes": Layer(
        "MultiheadAttention",
        (2, 16),
        {"qk_size": 3, "vo_size": 5, "output_size": 7, "use_query_bias": True, "use_output_bias": True},
        (2, 6, 16),
        {"mask": np.stack([CAUSAL, CAUSAL.T]), "process_heads": lambda q, k, v: (q + 1, k, v)},
        HIGH,
    ),
}


@pytest.mark.parametrize("name", EQUINOX)
def test_equinox(name, highest_precision):
    layer = EQUINOX[name]
    types = layer.types
    key = {} if "Norm" in name else {"key": jax.random.key(0)}
    with compat.enable_x64("float64" in types):
        wide = "float64" if "float64" in types else "float32"
        x = layer.x if isinstance(layer.x, np.ndarray) else array(*layer.x, dtype=types.x)
        ours, theirs = (
            eqx.filter_eval_shape(
                getattr(module, layer.name), *layer.args, **layer.options, dtype=types.parameters, **key
            )
            for module in LIBRARIES["equinox"]
        )
        assert isinstance(ours, type(theirs))
        theirs = filled(theirs)
        ours = eqx.tree_at(jax.tree.leaves, ours, jax.tree.leaves(theirs))

        def run(parts, leaves, x):
            structure, static = parts
            module = eqx.combine(jax.tree.unflatten(structure, leaves), static)
            f = lambda x: module(x, x, x, **layer.call) if "Multihead" in name else module(x)
            return jax.vmap(f)(x), ()

        def split(module, x):
            parameters, static = eqx.partition(module, is_array)
            leaves, structure = jax.tree.flatten(parameters)
            return (structure, static), leaves, x

        exact = converted(theirs, wide)
        compared(run, split(ours, x), split(theirs, x), split(exact, converted(x, wide)), layer.taken)


# ---- attention

ATTENTION = {  # shapes of query and key, options
    "mask": ((2, 6, 4, 8), (2, 7, 4, 8), {"mask": array(2, 4, 6, 7) > -1}),
    "causal": ((2, 6, 4, 8), (2, 7, 2, 8), {"is_causal": True, "bias": array(1, 4, 6, 7)}),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_dot_product_attention(name, highest_precision):
    """Against jax.nn, since the arguments of flax's function are not the same in all versions."""
    query, key, options = ATTENTION[name]
    given = [array(*shape, seed=k) for k, shape in enumerate((query, key, key))]
    f, g = (
        lambda given: (f(*given, **options), ())
        for f in (jaxkern.nnx.dot_product_attention, jax.nn.dot_product_attention)
    )
    close(*jax.jit(lambda given: (gradients(f, given), gradients(g, given)))(given))


def test_queries_without_keys():
    """They give 0, and no NaN in gradients."""
    q, k = array(3, 2, 4), array(3, 2, 4, seed=2)
    mask = np.array([1.0, 0.0, 1.0])[:, None] * np.ones(3)  # a float, as from flax.nnx.make_attention_mask
    f = lambda q: (jaxkern.nnx.dot_product_attention(q, k, k, mask=mask), ())
    for a in jax.jit(lambda q: gradients(f, q)[:2])(q):
        assert not a[1].any() and a[::2].any() and np.isfinite(a).all()


def test_dropout_of_nnx(highest_precision):
    """With the identity as value, the results are the weights."""
    given = array(2, 16, 3, 4), array(2, 16, 3, 4, seed=2), np.broadcast_to(np.eye(16)[:, None], (2, 16, 3, 16))
    options = {"bias": array(1, 3, 1, 16), "mask": np.tri(16) > 0, "dropout_rng": jax.random.key(3)}
    attend = functools.partial(jaxkern.nnx.dot_product_attention, *given, **options)
    names = {"deterministic": {"deterministic": True}, "shared": {}, "own": {"broadcast_dropout": False}}
    found = jax.jit(lambda: {name: attend(dropout_rate=0.25, **more) for name, more in names.items()})()
    weights = np.asarray(found["deterministic"])
    seen = np.broadcast_to(np.tri(16, dtype=bool)[None, :, None], weights.shape)
    for name in ("shared", "own"):
        kept = np.asarray(found[name]) > 0
        np.testing.assert_allclose(found[name], np.where(kept, weights / 0.75, 0), rtol=1e-5)
        assert 0.6 < kept[seen].mean() < 0.9
        assert (kept == kept[:1, :, :1]).all() == (name == "shared")


def test_dropout_of_equinox():
    make = lambda: jaxkern.equinox.MultiheadAttention(2, 8, dropout_p=0.5, key=jax.random.key(0))
    layer, x = filled(eqx.filter_eval_shape(make)), array(6, 8)

    @jax.jit
    def results(keys):
        dropped = jax.vmap(lambda key: layer(x, x, x, key=key))(keys)
        plain = eqx.nn.inference_mode(layer)(x, x, x), layer(x, x, x, inference=True)
        return dropped, plain, (layer(x, x, x, inference=True, causal=True), layer(x, x, x, CAUSAL, inference=True))

    dropped, plain, causal = results(jax.random.split(jax.random.key(1), 1000))
    np.testing.assert_allclose(dropped.mean(0), plain[0], atol=0.1 * np.abs(plain[0]).max())
    np.testing.assert_array_equal(*plain)
    assert np.abs(dropped[0] - dropped[1]).max() > 0.1 * np.abs(plain[0]).max()
    close(*([a] for a in causal))
    with pytest.raises(RuntimeError, match="requires a key"):  # equinox's
        jax.eval_shape(lambda: layer(x, x, x))


# ---- losses

LOSSES = {
    "axis": ((3, 5, 2), {"axis": 1}),
    "rows": ((3, 2, 5), {"where": np.array([[True, False]] * 3)}),
    "two axes": ((5, 3, 2), {"axis": (2, 0), "where": array(5, 3, 2) > -3}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss(name):
    shape, options = LOSSES[name]
    labels = np.random.default_rng(0).integers(0, 5, (3,) if "two" in name else (3, 2))
    f, g = (
        lambda x: (m.softmax_cross_entropy_with_integer_labels(x, labels, **options), ())
        for m in (jaxkern.optax, optax)
    )
    close(*jax.jit(lambda x: (gradients(f, x), gradients(g, x)))(array(*shape)))


# ---- files of models; tests/test_examples.py trains models


def test_files_of_nnx():
    """Of blocks made by nnx.vmap: the bytes are the same, and a model with one library's layers reads the other's file."""

    def made(module):
        attention = lambda rngs: module.MultiHeadAttention(2, 8, normalize_qk=True, dropout_rate=0.1, rngs=rngs)
        blocks = lambda rngs: nnx.split_rngs(splits=2)(nnx.vmap(attention, in_axes=0, out_axes=0))(rngs)
        layers = lambda rngs: [module.Embed(10, 8, rngs=rngs), module.BatchNorm(8, rngs=rngs), blocks(rngs)]
        return nnx.eval_shape(lambda: nnx.Sequential(*layers(nnx.Rngs(0))))

    states = [nnx.to_pure_dict(nnx.state(made(module), nnx.Not(nnx.RngState))) for module in LIBRARIES["nnx"]]
    files = [serialization.to_bytes(filled(state)) for state in states]
    assert files[0] == files[1]
    for state, file in zip(states, files):
        jax.tree.map(np.testing.assert_array_equal, serialization.from_bytes(state, file), filled(states[0]))


def test_files_of_equinox():
    """Of an ensemble made by filter_vmap."""

    def made(module, key):
        layers = [module.LayerNorm(8), module.Embedding(10, 8, key=key), module.GroupNorm(2, 8), module.RMSNorm(8)]
        return eqx.nn.Sequential([*layers, module.MultiheadAttention(2, 8, dropout_p=0.1, key=key)])

    ensemble = lambda module: eqx.filter_vmap(lambda key: made(module, key))(jax.random.split(jax.random.key(0), 2))
    ours, theirs = (filled(eqx.filter_eval_shape(ensemble, module)) for module in LIBRARIES["equinox"])
    files = [io.BytesIO(), io.BytesIO()]
    for model, file in zip((ours, theirs), files):
        eqx.tree_serialise_leaves(file, model)
        file.seek(0)
    assert files[0].getvalue() == files[1].getvalue()
    for model, file in zip((theirs, ours), files):
        read = eqx.tree_deserialise_leaves(file, model)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(read), jax.tree.leaves(ours))


# ---- arguments


@pytest.mark.parametrize("library", LIBRARIES)
def test_arguments_are_theirs(library):
    ours, theirs = LIBRARIES[library]
    for name in ours.__all__:
        more = ["causal"] if name == "MultiheadAttention" else []
        pairs = [(getattr(ours, name), getattr(theirs, name))]
        if inspect.isclass(pairs[0][0]):
            pairs = [(getattr(pairs[0][0], f), getattr(pairs[0][1], f)) for f in ("__init__", "__call__")]
        for own, their in pairs:
            own, their = (inspect.signature(f).parameters for f in (own, their))
            assert [p for p in own if p not in more and p in their] == list(their), name
            assert set(own) - set(their) - set(more) <= {"is_causal", "out_sharding"}, name  # older flax lacks them
            assert all(own[p].kind == their[p].kind for p in their)


KEY = {"key": jax.random.key(0)}
RNGS = lambda: {"rngs": nnx.Rngs(0)}
WRONG = [
    ("nnx", lambda m: m.LayerNorm(4, **RNGS())(np.ones((2, 6)))),
    ("nnx", lambda m: m.GroupNorm(6, 4, **RNGS())),
    ("nnx", lambda m: m.GroupNorm(4, 2, use_scale=False, use_bias=False, **RNGS())(np.ones((2, 8)))),
    ("nnx", lambda m: m.BatchNorm(4, use_running_average=None, **RNGS())(np.ones((2, 4)))),
    ("nnx", lambda m: m.Embed(4, 2, **RNGS())(np.ones(3))),
    ("nnx", lambda m: m.dot_product_attention(*np.ones((3, 2, 2, 4)), dropout_rate=0.5)),
    ("nnx", lambda m: m.dot_product_attention(np.ones((5, 3, 4)), *np.ones((2, 5, 2, 4)))),
    ("equinox", lambda m: m.LayerNorm(4)(np.ones((2, 4)))),
    ("equinox", lambda m: m.RMSNorm(4)(np.ones(3))),
    ("equinox", lambda m: m.GroupNorm(2, 4)(np.ones(6, "float32"))),
    ("equinox", lambda m: m.Embedding(4, 2, **KEY)(np.arange(2))),
    ("equinox", lambda m: m.MultiheadAttention(2, 4, **KEY)(*np.ones((3, 2, 5, 4)))),
    ("equinox", lambda m: m.MultiheadAttention(2, 4, **KEY)(*np.ones((3, 5, 4)), mask=np.ones((5, 1), bool))),
    ("equinox", lambda m: m.MultiheadAttention(2, 4, **KEY)(np.ones((5, 4)), np.ones((5, 4)), np.ones((6, 4)))),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_arguments(number):
    """Both raise an error; its type in flax depends on the version."""
    library, call = WRONG[number]
    ours, theirs = LIBRARIES[library]
    for module, kinds in (
        (ours, (TypeError, ValueError)),
        (theirs, (TypeError, ValueError, IndexError, AssertionError)),
    ):
        with pytest.raises(kinds):
            jax.eval_shape(lambda: (call(module), ())[1])


@pytest.mark.parametrize("name", ["nnx", "equinox", "optax"])
def test_examples_in_docstrings(name):
    module = importlib.import_module(f"jaxkern.{name}")
    found = doctest.testmod(module)
    assert found.attempted >= len(module.__all__) and not found.failed


@pytest.mark.parametrize(("module", "library"), [("nnx", "flax"), ("equinox", "equinox")])
def test_a_missing_library(module, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"jaxkern.{module}")
    with pytest.raises(ImportError, match=f"jaxkern.{module} needs {library}: pip install {library}"):
        importlib.import_module(f"jaxkern.{module}")


@pytest.mark.parametrize("axis", (-1, 0, (1, 2)))
@pytest.mark.parametrize("kept", (False, True))
def test_labels_of_rows_that_are_left_out_may_have_any_value(axis, kept):
    """A mask of the shape of the labels, or of the logits with one class; padding has labels of -1."""
    logits = jax.random.normal(jax.random.key(0), (3, 3, 4))
    labels = jnp.arange(int(np.prod(np.delete(logits.shape, axis)))).reshape(np.delete(logits.shape, axis)) % 3
    where = labels > 0
    labels = jnp.where(where, labels, jnp.array([-1, 99])[labels % 2])
    where = jnp.expand_dims(where, axis) if kept else where
    functions = (
        optax.softmax_cross_entropy_with_integer_labels,
        jaxkern.optax.softmax_cross_entropy_with_integer_labels,
    )
    theirs, ours = (
        jax.value_and_grad(lambda x, f=f: f(x, labels, axis=axis, where=where).sum())(logits) for f in functions
    )
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
    np.testing.assert_allclose(ours[1], theirs[1], atol=1e-6)
