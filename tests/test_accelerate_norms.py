"""Layers of flax.linen, flax.nnx, equinox and haiku under `jaxkern.accelerate`: the same results, on the norms of jaxkern.

The stand-ins of layers.py run where these libraries are not installed, such as in CI.
"""

import copy
import gc
import importlib.util
import sys
import types

import jax
import jax.numpy as jnp
import layers
import numpy as np
import pytest
from conftest import ON_GPU

import jaxkern
from jaxkern._accelerate import functions, gate, norms
from jaxkern._core import decisions

PLATFORM = "cuda" if ON_GPU else "cpu"
forced = jaxkern.accelerate(only=("layer_norm", "rms_norm"), force=True)
SHAPE = 3, 5, 16
STAND_INS = {
    "flax.linen.normalization": "_compute_stats _normalize",
    "flax.nnx.nn.normalization": "_normalize_arrays",
    "equinox.nn._normalisation": "LayerNorm.__call__ RMSNorm.__call__",
    "haiku._src.layer_norm": "haiku.LayerNorm.__call__",
    "haiku._src.rms_norm": "haiku.RMSNorm.__call__",
}


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch):
    """Targets in layers.py, beside those of the libraries."""
    more = []
    for target in functions.TARGETS:
        attribute = target.attribute if "nnx" not in target.module else f"{target.attribute}_arrays"
        attribute = f"haiku.{attribute}" if "haiku" in target.module else attribute
        if attribute in STAND_INS.get(target.module, "").split():
            more.append(target._replace(module="layers", attribute=attribute))
    assert len(more) == 7
    monkeypatch.setattr(functions, "TARGETS", (*functions.TARGETS, *more))


def inputs(shape=SHAPE, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 2 + 0.5, dtype)


def random(tree):
    """The same tree with other numbers."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) + 1, a.dtype), tree)


def needs(package):
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed")
    return importlib.import_module(package)


# ---- the layers: (parameters, a function of parameters and x)


def stand_in_linen(name, x, **options):
    layer = layers.Linen(name == "layer_norm", **options)
    return random(layer.init(None, x)), layer.apply


def stand_in_nnx(name, x, dtype=None, param_dtype="float32", use_scale=True, use_bias=True):
    params = {"scale": jnp.ones(x.shape[-1], param_dtype)} if use_scale else {}
    if use_bias and name == "layer_norm":
        params["bias"] = jnp.zeros(x.shape[-1], param_dtype)

    def apply(params, x):
        mean, var = layers._compute_stats(x, -1, dtype, use_mean=name == "layer_norm")
        return layers._normalize_arrays(x, mean, var, params.get("scale"), params.get("bias"), -1, (-1,), dtype, 1e-6)

    return random(params), apply


def stand_in_equinox(name, x, dtype=None, param_dtype="float32", use_scale=True, use_bias=True):
    kind = layers.LayerNorm if name == "layer_norm" else layers.RMSNorm
    layer = kind(x.shape[-1], use_weight=use_scale, use_bias=use_bias, dtype=param_dtype)

    def apply(params, x):
        own = copy.copy(layer)
        own.weight, own.bias = params
        for _ in range(x.ndim - 1):
            own = jax.vmap(own)
        return own(x)

    return random((layer.weight, layer.bias)), apply


def _haiku_layer(hk, name, use_scale, use_bias):
    if name == "layer_norm":
        return hk.LayerNorm(-1, create_scale=use_scale, create_offset=use_bias)
    return hk.RMSNorm(-1, create_scale=use_scale)


def stand_in_haiku(name, x, dtype=None, param_dtype="float32", use_scale=True, use_bias=True):
    names = ["scale"] * use_scale + ["offset"] * (use_bias and name == "layer_norm")

    def apply(params, x):
        layers.hk.made = dict(params)
        try:
            return _haiku_layer(layers.haiku, name, use_scale, use_bias)(x)
        finally:
            layers.hk.made = {}

    return random({k: jnp.ones(x.shape[-1], param_dtype) for k in names}), apply


def haiku(name, x, dtype=None, param_dtype="float32", use_scale=True, use_bias=True):
    hk = needs("haiku")
    f = hk.without_apply_rng(hk.transform(lambda x: _haiku_layer(hk, name, use_scale, use_bias)(x)))
    params = jax.tree.map(lambda a: a.astype(param_dtype), f.init(jax.random.key(0), x))
    return random(params), f.apply


def linen(name, x, use_bias=True, **options):
    nn = needs("flax.linen")
    layer = nn.LayerNorm(use_bias=use_bias, **options) if name == "layer_norm" else nn.RMSNorm(**options)
    return random(layer.init(jax.random.key(0), x)), layer.apply


def nnx(name, x, use_bias=True, **options):
    nn = needs("flax.nnx")
    options |= {"use_bias": use_bias} if name == "layer_norm" else {}
    kind = nn.LayerNorm if name == "layer_norm" else nn.RMSNorm
    definition, state = nn.split(kind(x.shape[-1], rngs=nn.Rngs(0), **options))
    return random(state), lambda state, x: nn.merge(definition, state)(x)


def equinox(name, x, dtype=None, param_dtype="float32", use_scale=True, use_bias=True):
    eqx = needs("equinox")
    kind = eqx.nn.LayerNorm if name == "layer_norm" else eqx.nn.RMSNorm
    layer = kind(x.shape[-1], use_weight=use_scale, use_bias=use_bias, dtype=param_dtype)
    params, rest = eqx.partition(layer, eqx.is_array)

    def apply(params, x):
        f = eqx.combine(params, rest)
        for _ in range(x.ndim - 1):
            f = jax.vmap(f)
        return f(x)

    return random(params), apply


LIBRARIES = [stand_in_linen, stand_in_nnx, stand_in_equinox, stand_in_haiku, linen, nnx, equinox, haiku]
NAMES = ["layer_norm", "rms_norm"]


def both(f, *args):
    """The results of f, plain and on jaxkern, and the names of the operations that were taken."""
    jitted = jax.jit(f)
    plain = jitted(*args)
    with forced:
        own = jitted(*args)
        taken = [d.operation for d in jaxkern.explain(jitted, PLATFORM)(*args).taken]
    return plain, own, taken


def close(plain, own, rtol=2e-5, narrow=2.0**-7):
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(own), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
        tolerance = max(rtol, narrow if plain_16_bit(plain) else 0)
        np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance * np.max(np.abs(a), initial=1))


def plain_16_bit(tree):
    return any(a.dtype.itemsize == 2 for a in jax.tree.leaves(tree))


def loss(apply):
    def f(params, x):
        y = apply(params, x)
        # Linear: XLA may leave out the rounding of y to 16 bits, and a curved function's gradient would show it.
        weights = jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return jnp.sum(weights * y.astype(jnp.float32)), y

    return jax.value_and_grad(f, (0, 1), has_aux=True)


OPTIONS = {
    "float32": ("float32", {}),
    "bfloat16": ("bfloat16", {}),
    "bfloat16 throughout": ("bfloat16", {"dtype": "bfloat16", "param_dtype": "bfloat16"}),
    "float32 to bfloat16": ("float32", {"dtype": "bfloat16"}),
    "bfloat16 to float32": ("bfloat16", {"dtype": "float32", "param_dtype": "bfloat16"}),
    "float16": ("float16", {"dtype": "float16"}),
    "no bias": ("float32", {"use_bias": False}),
    "no scale": ("float32", {"use_scale": False}),
    "neither": ("bfloat16", {"use_scale": False, "use_bias": False}),
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sweep(3)
def test_values_and_gradients(name, options, library):
    dtype, options = OPTIONS[options]
    x = inputs(dtype=dtype)
    params, apply = library(name, x, **options)
    plain, own, taken = both(loss(apply), params, x)
    assert taken == [name, name]
    # haiku rounds the mean, the variance and each product to 16 bits.
    close(plain, own, narrow=2.0**-4 if library in (haiku, stand_in_haiku) else 2.0**-7)


@pytest.mark.parametrize("library", LIBRARIES)
def test_only_what_is_asked_for(library):
    x = inputs()
    found = {}
    for name in NAMES:
        params, apply = library(name, x)
        with jaxkern.accelerate(only=name, force=True):
            for other in NAMES:
                f = jax.jit(library(other, x)[1])
                found[name, other] = [d.operation for d in jaxkern.explain(f, PLATFORM)(library(other, x)[0], x).taken]
    assert found == {(a, b): [a] if a == b else [] for a in NAMES for b in NAMES}


@pytest.mark.parametrize("library", ["layers", "haiku"])
def test_haiku_makes_parameters_of_its_own_shape(library):
    """Rows along other axes, and parameters along other axes than rows, stay; what is made is the same."""
    hk, x = (layers.haiku, inputs()) if library == "layers" else (needs("haiku"), inputs())
    for options in (
        {"axis": (1, 2)},
        {"axis": slice(1, None)},
        {"axis": -1, "param_axis": 1},
        {"axis": slice(2, None)},
    ):
        options = {"create_scale": True, "create_offset": True, "param_axis": -1} | options
        if library == "layers":

            def f(x, options=options):
                layers.hk.made = {}
                return hk.LayerNorm(**options)(x), dict(layers.hk.made)

        else:

            def f(x, options=options):
                transformed = hk.without_apply_rng(hk.transform(lambda x: hk.LayerNorm(**options)(x)))
                params = transformed.init(jax.random.key(0), x)
                return transformed.apply(params, x), params

        plain, own, taken = both(f, x)
        assert set(taken) == ({"layer_norm"} if options["axis"] == slice(2, None) else set())
        assert jax.tree.structure(plain) == jax.tree.structure(own)
        close(plain, own)


# ---- flax: layers that share the two functions

AXES = {
    "two axes": ({"reduction_axes": (-2, -1), "feature_axes": (1, 2)}, True),
    "other order": ({"reduction_axes": (2, 1), "feature_axes": (-2, -1)}, True),
    "other features": ({"reduction_axes": (1, 2), "feature_axes": -1}, False),
    "leading axes": ({"reduction_axes": 1, "feature_axes": 1}, False),
    "exact variance": ({"use_fast_variance": False}, True),
    "reductions in the type of x": ({"force_float32_reductions": False}, False),
    "no real result": ({"dtype": "complex64"}, False),
}


@pytest.mark.parametrize("library", [stand_in_linen, linen])
@pytest.mark.parametrize("case", AXES)
def test_axes_and_reductions(case, library):
    options, taken = AXES[case]
    x = inputs()
    params, apply = library("layer_norm", x, **options)
    plain, own, found = both(apply, params, x)
    assert found == ["layer_norm"] * taken
    close(plain, own) if taken else np.testing.assert_array_equal(plain, own)


@pytest.mark.parametrize("library", [stand_in_linen, linen])
def test_masks_stay(library):
    x, mask = inputs(), inputs(seed=3) > 0
    params, apply = library("layer_norm", x)
    plain, own, found = both(lambda p, x: apply(p, x, mask=mask), params, x)
    assert not found
    np.testing.assert_array_equal(plain, own)
    with forced:
        (left,) = jaxkern.explain(lambda p, x: apply(p, x, mask=mask), PLATFORM)(params, x)
    assert left.operation == "layer_norm" and "mask" in left.reason


@pytest.mark.parametrize("kind", ["BatchNorm", "GroupNorm", "InstanceNorm"])
@pytest.mark.parametrize("package", ["linen", "nnx"])
def test_other_layers_stay(kind, package):
    nn, x = needs(f"flax.{package}"), inputs()
    if package == "linen":
        layer = getattr(nn, kind)(
            **{"GroupNorm": {"num_groups": 4}, "BatchNorm": {"use_running_average": False}}.get(kind, {})
        )
        variables = layer.init(jax.random.key(0), x)
        f = lambda v, x: layer.apply(v, x, mutable=["batch_stats"])
    else:
        if not hasattr(nn, kind):
            pytest.skip(f"this flax.nnx has no {kind}")
        layer = getattr(nn, kind)(16, rngs=nn.Rngs(0), **({"num_groups": 4} if kind == "GroupNorm" else {}))
        definition, variables = nn.split(layer)
        f = lambda v, x: nn.merge(definition, v)(x)
    plain, own, found = both(f, variables, x)
    assert not found
    jax.tree.map(np.testing.assert_array_equal, plain, own)


@pytest.mark.parametrize("library", [stand_in_linen, linen])
def test_parameters_of_other_types_stay(library):
    """They are made once, and the original uses them."""
    x = inputs()
    params, apply = library("layer_norm", x)
    params = jax.tree.map(lambda p: p.astype(jnp.float8_e4m3fn).astype(jnp.int32), params)
    plain, own, found = both(apply, params, x)
    assert not found
    np.testing.assert_array_equal(plain, own)


@pytest.mark.parametrize("library", [stand_in_linen, stand_in_nnx, linen])
def test_integers_stay(library):
    """But in flax.nnx, which converts them to the type of the parameters first."""
    x = jnp.arange(32).reshape(2, 16)
    params, apply = library("layer_norm", x)
    plain, own, found = both(apply, params, x)
    assert not found
    np.testing.assert_array_equal(plain, own)


def test_statistics_of_another_call_stay():
    """Only the results of `_compute_stats` on the same x are known."""
    x, other, one = inputs(), inputs(seed=1), jnp.ones(16)
    normalize = lambda x, mean, var, axes=-1: layers._normalize_arrays(x, mean, var, one, one, axes, axes, None, 1e-6)

    def f(x, other):
        first, second = layers._compute_stats(x, -1, None), layers._compute_stats(other, -1, None)
        late, foreign = normalize(x, *first), normalize(x, *second)
        mean, var = layers._compute_stats(x, -1, None)
        changed = normalize(x, mean, var * 1), normalize(x, mean + 0, var)
        mean, var = layers._compute_stats(x, (-1,), None, axis_index_groups=None, use_mean=False)
        return late, foreign, changed

    plain, own, found = both(f, x, other)
    assert not found
    jax.tree.map(np.testing.assert_array_equal, plain, own)


@pytest.mark.parametrize("library", [stand_in_linen, linen])
@pytest.mark.parametrize("name", NAMES)
def test_init_makes_the_same_parameters(name, library, monkeypatch):
    monkeypatch.setitem(globals(), "random", lambda tree: tree)
    x = inputs((2, 7, 24 if library is linen else 40))  # a shape of its own: programs that are compiled are not noted
    plain, _ = library(name, x)
    with forced, decisions.recorded() as found:
        own, _ = library(name, x)
    assert [d.operation for d in found] == [name]
    assert jax.tree.structure(plain) == jax.tree.structure(own)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(own)):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


# ---- transformations


@pytest.mark.parametrize("library", LIBRARIES)
def test_transformations(library):
    x = inputs((2, *SHAPE))
    params, apply = library("layer_norm", x[0])
    tangent = inputs((2, *SHAPE), seed=4)
    energy = lambda p, x: jnp.sum(jnp.sin(apply(p, x)))

    def f(params, x):
        each = jax.vmap(jax.grad(energy, (0, 1)), (None, 0))(params, x)
        forward = jax.jvp(lambda x: jax.vmap(apply, (None, 0))(params, x), (x,), (tangent,))
        second = jax.jvp(jax.grad(lambda x: energy(params, x)), (x[0],), (tangent[0],))
        again = jax.grad(lambda x: jnp.sum(jax.grad(lambda x: energy(params, x))(x) ** 2))(x[0])
        repeated = jax.lax.scan(lambda c, _: (jax.checkpoint(apply)(params, c), None), x[0], None, 3)[0]
        return each, forward, second, again, repeated

    plain, own, taken = both(f, params, x)
    assert set(taken) == {"layer_norm"} and len(taken) >= 8
    close(plain, own, 2e-4)


def test_vmapped_parameters():
    x = inputs()
    params, apply = stand_in_nnx("layer_norm", x)
    params = jax.tree.map(lambda p: jnp.stack([p, p + 1, p * 2]), params)
    plain, own, _ = both(jax.vmap(loss(apply)), params, x)
    close(plain, own)


def test_nnx_jit():
    nn, x = needs("flax.nnx"), inputs()
    layer = nn.LayerNorm(16, rngs=nn.Rngs(0))
    step = nn.jit(nn.value_and_grad(lambda layer, x: jnp.sum(jnp.sin(layer(x)))))
    plain = step(layer, x)
    with forced, decisions.recorded() as found:
        own = step(layer, x)
    assert [d.operation for d in found if d.taken] == ["layer_norm"] * 2
    close(plain, own)


def test_equinox_state():
    layer, x = layers.LayerNorm(16), inputs((16,))
    with forced:
        y, state = layer(x, "a state", key=None)
        assert state == "a state" and layer(x).shape == (16,)
    close(y, layer(x))


@pytest.mark.parametrize("library", LIBRARIES)
def test_nothing_is_kept(library):
    """Neither tracers nor arrays outlive the call."""
    x = inputs()
    params, apply = library("layer_norm", x)
    with forced, jax.checking_leaks():
        jax.jit(loss(apply))(params, x)
        y = apply(params, x)
    del x, y
    gc.collect()
    last = getattr(norms._local, "last", None)
    assert last is None or last.x() is None


@pytest.mark.parametrize("library", LIBRARIES)
def test_leaving_restores(library):
    x = inputs()
    params, apply = library("rms_norm", x)
    text = lambda: jax.jit(lambda p, x: apply(p, x)).lower(params, x).as_text()
    plain, code = text(), layers._normalize.__code__
    with forced:
        assert text() != plain and layers._normalize.__code__ is not code
    assert text() == plain and layers._normalize.__code__ is code


def test_explicit_mesh():
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = inputs()
    params, apply = stand_in_nnx("layer_norm", x)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a")))
        plain, own, taken = both(loss(apply), params, x)
    assert taken == ["layer_norm"] * 2
    close(plain, own)


# ---- the gate


def test_gate():
    rows = {"bfloat16": 32768, "float16": 32768, "float32": 32768}
    for dtype, n in rows.items():
        assert gate.norm(jnp.dtype(dtype), n, 4096)[0]
        assert not gate.norm(jnp.dtype(dtype), 255, 4096)[0] and gate.norm(jnp.dtype(dtype), 256, 4096)[0]
    assert not gate.norm(jnp.dtype("bfloat16"), n, 4097)[0] and gate.norm(jnp.dtype("float32"), n, 4097)[0]
    assert not gate.norm(jnp.dtype("float64"), n, 4096)[0]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((8, 1024, 768), "bfloat16", ""),
        ((8, 16, 768), "bfloat16", "98304 elements are few"),
        ((8, 1024, 771), "bfloat16", "771 elements of 16 bits"),
        ((8, 1024, 771), "float32", ""),
    ],
)
def test_explain(shape, dtype, reason, library, monkeypatch):
    monkeypatch.setattr("jaxkern._core.registry.kernels_run", lambda: True)
    monkeypatch.setattr("jaxkern._core.define.launch.lower", _no_launch)
    x = jax.ShapeDtypeStruct(shape, dtype)
    params, apply = library("layer_norm", jnp.zeros((1, shape[-1]), dtype), dtype=dtype)
    with jaxkern.accelerate(only="layer_norm"):
        (found,) = jaxkern.explain(apply)(params, x)
    assert found.operation == "layer_norm" and found.taken == (not reason)
    assert found.reason.startswith(reason or "one read")


def _no_launch(ctx, name, launches, operands, **_):
    from jax.interpreters import mlir

    zeros = lambda *_: [jnp.zeros(a.shape, a.dtype) for a in ctx.avals_out]
    return mlir.lower_fun(zeros, multiple_results=True)(ctx, *operands)


def test_other_signatures_stay(monkeypatch):
    """A function of another version of a library is left, with one warning."""
    module = types.ModuleType("another_version")
    exec("def _normalize(x, mean, var, gain): return (x - mean) * var * gain", module.__dict__)
    monkeypatch.setitem(sys.modules, "another_version", module)
    target = next(t for t in functions.TARGETS if t.replacement is norms.nnx)
    monkeypatch.setattr(functions, "TARGETS", (target._replace(module="another_version", attribute="_normalize"),))
    code = module._normalize.__code__
    with pytest.warns(UserWarning, match=r"another_version\._normalize cannot be replaced"), forced:
        assert module._normalize.__code__ is code
