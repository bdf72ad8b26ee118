"""`jax.nn.dot_product_attention` in accelerate: the same results, gradients and errors, with whatever excludes keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkern
from jaxkern._accelerate import gate
from jaxkern._core import registry

ON_GPU = jax.default_backend() == "gpu" and registry.kernels.module is not None
NAME = "dot_product_attention"


def inputs(queries=12, keys=16, heads=4, groups=4, dtype="bfloat16", batch=2, width=8):
    rng = np.random.default_rng()
    shapes = [(batch, queries, heads, width), *[(batch, keys, groups, width)] * 2]
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]


def lengths(*values):
    return jnp.asarray(values, jnp.int32)


def a_mask(*shape, blind=()):
    """A mask; the rows `blind` exclude every key."""
    mask = np.random.default_rng().random(shape) < 0.7
    for row in blind:
        mask[..., row, :] = False
    return jnp.asarray(mask)


CASES = {
    "nothing": (inputs, {}),
    "scale": (inputs, {"scale": 0.5}),
    "causal": (functools.partial(inputs, 16), {"is_causal": True}),
    "causal, fewer queries": (inputs, {"is_causal": True}),
    "causal, fewer keys": (functools.partial(inputs, 24), {"is_causal": True}),
    "mask": (inputs, {"mask": a_mask(2, 4, 12, 16)}),
    "mask of all heads": (inputs, {"mask": a_mask(2, 1, 12, 16, blind=(0, 7))}),
    "mask of all": (inputs, {"mask": a_mask(12, 16, blind=(3,))}),
    "mask and causal": (functools.partial(inputs, 16), {"mask": a_mask(2, 1, 16, 16, blind=(5,)), "is_causal": True}),
    "window, mask": (inputs, {"local_window_size": 3, "mask": a_mask(12, 16)}),
    "window, causal": (functools.partial(inputs, 16), {"local_window_size": (4, 0), "is_causal": True}),
    "lengths of keys": (inputs, {"key_value_seq_lengths": lengths(5, 0)}),
    "lengths": (inputs, {"query_seq_lengths": lengths(7, 12), "key_value_seq_lengths": lengths(16, 9)}),
    "grouped": (functools.partial(inputs, 16, groups=2), {"is_causal": True}),
    "grouped, masked": (functools.partial(inputs, groups=1), {"mask": a_mask(2, 4, 12, 16, blind=(2,))}),
    "one example": (lambda dtype: [a[0] for a in inputs(16, dtype=dtype)], {"is_causal": True}),
}


def attention(options):
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **options)


def both(f, *args):
    """(plain result, result on jaxkern, decisions)"""
    plain = jax.jit(f)(*args)
    with jaxkern.accelerate(only=NAME, force=True):
        own = jax.jit(f)(*args)
        return plain, own, [d.taken for d in jaxkern.explain(f, "cuda")(*args) if d.operation == NAME]


def close(plain, own, dtype):
    """Products and softmax round to 16 bits in both, at other places."""
    tolerance = {"float32": 2e-5, "bfloat16": 2.0**-6, "float16": 2.0**-9}[dtype]
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(own), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(b, a, rtol=0, atol=tolerance * np.max(np.abs(a), initial=1))


def value_and_gradients(f):
    def of(*args):
        y, pull = jax.vjp(f, *args)
        return y, pull(jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape).astype(y.dtype))

    return of


def dtypes_of(number):
    """On the CPU each case has one type, in turn; in float16 jax.nn's own raises there."""
    return ("bfloat16", "float16", "float32") if ON_GPU else (("bfloat16", "float32")[number % 2],)


@pytest.mark.parametrize("case, dtype", [(case, dtype) for k, case in enumerate(CASES) for dtype in dtypes_of(k)])
@pytest.mark.usefixtures("highest_precision")
def test_values_and_gradients(case, dtype):
    make, options = CASES[case]
    plain, own, taken = both(value_and_gradients(attention(options)), *make(dtype=dtype))
    assert taken == [True]
    close(plain, own, dtype)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": jnp.zeros((1, 1, 12, 16), jnp.float32)},
        {"implementation": "cudnn"},
        {"scale": jnp.float32(0.5)},
        {"local_window_size": 3},
    ],
)
def test_what_is_left_to_jax(options):
    with jaxkern.accelerate(only=NAME, force=True):
        if options.get("implementation") == "cudnn":
            with pytest.raises(Exception, match=r"(?i)cudnn|fp16|sequence|GPU"):
                attention(options)(*inputs(dtype="float32"))
            return
        assert not jaxkern.explain(attention(options), "cuda")(*inputs())


@pytest.mark.parametrize(
    "shapes",
    [
        (
            (2, 12, 4, 8),
            (2, 16, 3, 8),
            (2, 16, 3, 8),
        ),  # the number of heads is no multiple of the number of heads of the keys
        ((2, 12, 4, 8), (2, 16, 4, 8), (2, 15, 4, 8)),
        ((2, 12, 4, 8), (1, 16, 4, 8), (1, 16, 4, 8)),
    ],
)
def test_errors_are_those_of_jax(shapes):
    args = [jnp.zeros(s, jnp.bfloat16) for s in shapes]
    with pytest.raises(ValueError) as plain:
        attention({})(*args)
    with jaxkern.accelerate(only=NAME, force=True), pytest.raises(ValueError) as own:
        attention({})(*args)
    assert str(own.value) == str(plain.value)


@pytest.mark.usefixtures("highest_precision")
def test_transformations():
    f, args = attention({"is_causal": True}), inputs(16, dtype="float32")
    for of in (
        lambda q, k, v: jax.jvp(f, (q, k, v), (k, v, q))[1],
        lambda q, k, v: jax.grad(lambda q: jnp.sum(jax.grad(lambda k: jnp.sum(f(q, k, v) ** 2))(k) ** 2))(q),
        jax.vmap(lambda q, k, v: f(q[None], k[None], v[None])),
        jax.vmap(f),
        jax.checkpoint(value_and_gradients(f)),
    ):
        plain, own, taken = both(of, *args)
        assert taken and all(taken)
        close(plain, own, "float32")


@jax.default_matmul_precision("highest")  # another program's products may round to 10 bits elsewhere
@pytest.mark.parametrize("f", [lambda q: attention({"is_causal": True})(q, q, q), jax.nn.log_softmax])
def test_exported_programs_stay_plain(f):
    (q, _, _), f = inputs(16, dtype="float32"), value_and_gradients(f)
    with jaxkern.accelerate(only=(NAME, "log_softmax"), force=True):
        exported = jax.export.export(jax.jit(f), platforms=["cpu", "cuda"])(q)
    assert "@jaxkern" not in exported.mlir_module()
    close(f(q), exported.call(q), "float32")
    with jaxkern.accelerate(only=(NAME, "log_softmax"), force=True, export=True):
        exported = jax.export.export(jax.jit(f), platforms=["cuda"], disabled_checks=jaxkern.export_checks())(q)
    assert ("@jaxkern" in exported.mlir_module()) == (registry.kernels.module is not None)


def test_a_boolean_is_a_scale():
    plain, own, taken = both(attention({"scale": True}), *inputs(dtype="float32"))
    assert taken == [True]
    close(plain, own, "float32")


def test_gate():
    takes = lambda dtype, *shape: gate.attention(jnp.dtype(dtype), *shape)[0]
    assert takes("bfloat16", 8 * 12 * 1024, 1024) and takes("float16", 8 * 12 * 1024, 1024)
    assert not takes("float32", 8 * 12 * 1024, 1024)
    assert not takes("bfloat16", 8 * 12 * 1024, 1023)
    assert not takes("bfloat16", 16, 1024)


def test_the_softmax_is_one_kernel():
    q, k, v = (jax.ShapeDtypeStruct((8, 1024, 12, 64), jnp.bfloat16),) * 3
    with jaxkern.accelerate():
        text = jax.jit(value_and_gradients(attention({"is_causal": True}))).trace(q, k, v)
        text = text.lower(lowering_platforms=("cuda",)).as_text()
    if not ON_GPU:  # without one the program is not for a GPU
        assert "jaxkern" not in text
        with jaxkern.accelerate(force=True):
            text = jax.jit(value_and_gradients(attention({"is_causal": True}))).trace(q, k, v)
            text = text.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@jaxkern_softmax(") == 2


@pytest.mark.parametrize("error", [ValueError, jax.errors.JaxRuntimeError])
def test_a_precision_that_the_platform_refuses(error, monkeypatch):
    """Outside of jit the refusal comes as the product is called; the product without that precision follows."""
    operands, plain = inputs(16), jnp.einsum
    wanted = attention({"is_causal": True})(*operands)

    def refusing(*args, precision=None, **named):
        if precision is not None:
            raise error("INVALID_ARGUMENT: Unsupported dot precision algorithm")
        return plain(*args, **named)

    monkeypatch.setattr(jnp, "einsum", refusing)
    with jaxkern.accelerate(force=True):
        got = attention({"is_causal": True})(*operands)
    np.testing.assert_allclose(got.astype("float32"), wanted.astype("float32"), 2e-2, 2e-2)
