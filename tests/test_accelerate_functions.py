"""Functions that `jaxkern.accelerate` replaces: jax.nn's and optax's results, gradients and errors, special values included.

`force=True` takes every case that kernels can run, so that the CPU runs jaxkern's references.
"""

import contextlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from accelerated import ALL, PLATFORM, both, close, forced
from jax.experimental import checkify

import jaxkern
from jaxkern._accelerate import functions
from jaxkern._core import switch

inf, nan = jnp.inf, jnp.nan
SPECIAL = jnp.array(
    [[1, 2, 3, 4], [-inf, 1, 0, -inf], [-inf] * 4, [inf, 1, 2, -3], [nan, 0, 1, inf], [1e4, 1e4 + 1, -1e4, 0]],
    jnp.float32,
)


def same_pattern(a, b):
    """The same NaN, infinities and numbers."""
    close(
        jax.tree.map(lambda x: jnp.nan_to_num(x, nan=0, posinf=0, neginf=0), a),
        jax.tree.map(lambda x: jnp.nan_to_num(x, nan=0, posinf=0, neginf=0), b),
    )
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_array_equal(np.where(np.isfinite(x), 0, x), np.where(np.isfinite(y), 0, y))


@pytest.mark.parametrize("axis", [-1, 0, None, (0, 1), (1, 2), (0, 2)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_logsumexp(axis, keepdims):
    x = jnp.stack([SPECIAL, SPECIAL[::-1]])
    f = lambda x: jax.nn.logsumexp(x, axis, keepdims=keepdims)
    plain, own, taken = both(f, x)
    assert taken == ([] if axis == (0, 2) else ["logsumexp"])  # axes that are apart stay
    same_pattern(plain, own)
    same_pattern(*both(jax.grad(lambda x: f(x).ravel()[::2].sum()), x)[:2])


def test_softmax_keeps_nan():
    for f in (jax.nn.softmax, jax.nn.log_softmax):
        x = SPECIAL.astype(jnp.bfloat16)
        plain, own, _ = both(f, x)
        np.testing.assert_array_equal(np.asarray(plain, np.float32), np.asarray(own, np.float32))
        plain, own, taken = both(jax.grad(lambda x: f(x)[:, 1].sum()), x)
        assert taken == [f.__name__]
        np.testing.assert_array_equal(np.isnan(plain), np.isnan(own))
        assert np.isnan(own[2]).all()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
def test_labels_out_of_range_that_a_mask_drops(dtype):
    """Their loss is NaN, and their gradient 0: -100 or 255 for padding is common."""
    labels = jnp.array([3, -100, 127, 9, 0]).astype(dtype)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 10)), jnp.float32)

    def loss(x):
        losses = optax.softmax_cross_entropy_with_integer_labels(x, labels)
        return jnp.sum(jnp.where(labels.astype(int) % 128 < 10, losses, 0)), losses

    plain, own, taken = both(jax.value_and_grad(loss, has_aux=True), x)
    assert "softmax_cross_entropy" in taken and np.isnan(plain[0][1]).sum() == 2 and np.isfinite(plain[1]).all()
    close(plain, own)


def test_cross_entropy_keeps_infinities_and_labels():
    """Equal to optax, except for two cases that _accelerate/functions.py documents: gradients of rows that hold +inf, and the loss of
    rows that hold both +inf and NaN."""
    x = jnp.stack([*SPECIAL[:4], SPECIAL[0].at[1].set(jnp.nan), SPECIAL[0]])
    finite = np.array([0, 1, 2, 4, 5])

    def f(x, y):
        losses, pull = jax.vjp(lambda x: optax.softmax_cross_entropy_with_integer_labels(x, y), x)
        return losses, pull(jnp.arange(1, len(y) + 1).astype(losses.dtype))[0]

    for labels in ([0, 1, 2, 3, 2, 1], [-1, -4, -5, 0, 4, 127], [0, 0, 0, 0, -128, -128]):
        for dtype, kind in ((jnp.float32, jnp.int32), (jnp.bfloat16, jnp.int8)):
            (loss, dx), (own_loss, own_dx), taken = both(f, x.astype(dtype), jnp.array(labels, kind))
            assert taken == ["softmax_cross_entropy"] and own_loss.dtype == loss.dtype == dtype
            rtol = 3e-4 if dtype == jnp.float32 else 2e-2
            for plain, own in ((loss, own_loss), (dx[finite], own_dx[finite])):
                plain, own = np.asarray(plain, np.float32), np.asarray(own, np.float32)
                np.testing.assert_allclose(own, plain, rtol=rtol, atol=rtol)  # the same NaN and infinities, too
            assert np.isnan(own_dx[3]).any() and np.isnan(dx[3]).any()


@pytest.mark.parametrize("kind", ["a product", "reshaped", "shifted", "an argument"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_that_were_widened(kind, dtype):
    """Kernels read bfloat16 logits before the conversion. float16 logits stay float32, whose gradients may not fit float16."""
    rng = np.random.default_rng(0)
    h, w = (jnp.asarray(rng.normal(size=s), dtype) for s in ((2, 48, 8), (8, 300)))
    labels = jnp.asarray(rng.integers(0, 300, (2, 48)), jnp.int32)

    def loss(h, w, labels):
        logits = (h if kind == "an argument" else h @ w).astype(jnp.float32)
        if kind == "reshaped":
            logits, labels = logits.reshape(-1, 300), labels.reshape(-1)
        if kind == "shifted":
            logits, labels = logits[:, :-1], labels[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), (losses, logits.argmax(-1))

    h = h @ w if kind == "an argument" else h
    f = jax.value_and_grad(loss, (0, 1), has_aux=True)
    plain, own, taken = both(f, h, w, labels)
    assert taken == ["softmax_cross_entropy"]
    close(plain[0], own[0], 2e-6)  # of float32: the logits lose nothing
    close(plain[1], own[1], 2**-8 if dtype == "bfloat16" else 2**-11)
    with forced:
        text = jax.jit(f).trace(h, w, labels).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @jaxkern_cross_entropy\w*\(.*: \((tensor<[^>]*>)", text)
    assert calls and all(("bf16" if dtype == "bfloat16" else "f32") in c for c in calls), calls
    assert "jaxkern_cross_entropy_both" in text  # one read for loss and gradient, as without the conversion


@pytest.mark.parametrize("kind", ["int8", "uint8", "uint32", "int64", "uint64"])
def test_labels_of_other_types(kind, x64):
    """Labels are read as take_along_axis reads indices: their low 32 bits, negative ones counted from the end."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 10)), jnp.float32)
    in_32_bits = jax.__version_info__ >= (
        0,
        10,
    )  # before, a gather of wide indices was not always one of their low bits
    labels = jnp.array([0, 3, *((2**32 - 1, 2**32 + 3, -1) if in_32_bits else (9, 10, 5)), 99]).astype(kind)
    f = lambda x, y: jax.vjp(lambda x: optax.softmax_cross_entropy_with_integer_labels(x, y), x)[1](
        jnp.ones(6, x.dtype)
    )[0]
    for g in (f, optax.softmax_cross_entropy_with_integer_labels):
        plain, own, taken = both(g, x, labels)
        assert taken == ["softmax_cross_entropy"]
        close(plain, own)


def test_the_loss_is_checked_as_before():
    x = jnp.zeros((4, 8)).at[0, 3].set(np.inf)
    loss = jax.jit(optax.softmax_cross_entropy_with_integer_labels)
    for labels, errors in (
        ([1, 2, 3, 9], checkify.index_checks),
        ([1, 2, 3, 4], checkify.nan_checks | checkify.index_checks),
    ):
        messages = []
        for context in (contextlib.nullcontext(), forced):
            with context:
                messages.append(checkify.checkify(loss, errors=errors)(x, jnp.array(labels))[0].get())
        assert (messages[0] is None) == (messages[1] is None) == (9 not in labels), messages
        assert messages[0] is None or messages[0].splitlines()[0] == messages[1].splitlines()[0]
    with forced, jax.debug_nans(True):
        assert np.isposinf(loss(x, jnp.array([1, 2, 3, 4]))[0])


REPLACED = {
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "logsumexp": lambda x: jax.nn.logsumexp(x, -1),
    "optax": lambda x: optax.softmax_cross_entropy_with_integer_labels(x, jnp.arange(len(x))),
    "attention": lambda x: jax.nn.dot_product_attention(*[jnp.stack([x] * 8)[:, None]] * 3, is_causal=True),
}


@pytest.mark.parametrize(
    "name, derivative", [*((name, False) for name in REPLACED), ("softmax", True), ("logsumexp", True), ("optax", True)]
)
def test_debug_nans_is_as_in_the_plain_program(name, derivative):
    """It finds NaN only where it does in the plain program, and names an operation of JAX."""
    f = REPLACED[name]
    f = jax.jit(jax.grad(lambda x: (REPLACED[name](x) * 2).sum()) if derivative else f)
    found = []
    for row in (*SPECIAL[:5:2], SPECIAL[5] * 1e34):
        messages = []
        for context in (jaxkern.accelerate(only=()), forced):
            with context, jax.debug_nans(True):
                try:
                    f(row[None])
                    messages.append("")
                except FloatingPointError as error:
                    messages.append(str(error))
        assert messages[0] or not messages[1]
        assert not re.search("jaxkern", messages[1]), messages[1]
        found.append(messages[1])
    assert any(found) and not all(found)


@pytest.mark.parametrize("name", REPLACED)
def test_pallas_kernels_stay(name):
    """They stay even if a function under jit is called inside and outside a kernel, in either order."""
    from jax.experimental import pallas

    f, x = REPLACED[name], SPECIAL[:1] + 0.5
    shape = jax.eval_shape(f, x)

    def program(first, g):
        def kernel(x, y):
            y[...] = g(x[...])

        call = pallas.pallas_call(kernel, out_shape=shape, interpret=True)
        return lambda x: (g(x), call(x)) if first else (call(x), g(x))

    for first in (True, False):
        jitted = jax.jit(lambda x: f(x))
        with forced:
            equations = jax.make_jaxpr(program(first, jitted))(x).eqns
            own = jax.jit(program(first, jitted))(x)[first]
        close(jax.jit(f)(x), own)
        inside = [str(e) for e in equations if e.primitive.name == "pallas_call"]
        outside = [str(e) for e in equations if e.primitive.name != "pallas_call"]
        assert inside and not any("jaxkern" in text for text in inside)
        assert any("jaxkern" in text for text in outside)


CALLS = {
    "b": lambda: jax.nn.logsumexp(SPECIAL, 1, b=jnp.ones(4)),
    "return_sign": lambda: jax.nn.logsumexp(SPECIAL, 1, return_sign=True),
    "where": lambda: jax.nn.logsumexp(SPECIAL, 1, where=SPECIAL > 1),
    "a list": lambda: optax.softmax_cross_entropy_with_integer_labels(
        np.ones((2, 3), np.float32), np.zeros(2, np.int32)
    ),
    "softmax, where": lambda: jax.nn.softmax(SPECIAL, where=SPECIAL > 1),
    "softmax, axes": lambda: jax.nn.softmax(SPECIAL, (0, 1)),
    "integers": lambda: jax.nn.softmax(jnp.arange(4)),
    "a number": lambda: jax.nn.logsumexp(2.0),
    "float32 log_softmax stays": lambda: jax.nn.log_softmax(SPECIAL[:2]),
    "optax, where": lambda: optax.softmax_cross_entropy_with_integer_labels(
        SPECIAL[:2], jnp.zeros(2, int), where=SPECIAL[:2] > 1
    ),
    "optax, axes": lambda: optax.softmax_cross_entropy_with_integer_labels(SPECIAL[:2], jnp.array(1), axis=(0, 1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_cannot_be_kept_stays(name):
    plain = CALLS[name]()
    with jaxkern.accelerate(only=set(ALL) - {"softmax", "log_softmax", *switch.SCATTERS}, force=True):
        own = CALLS[name]()
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(own), strict=True):
        assert a.dtype == b.dtype and jax.typeof(a).weak_type == jax.typeof(b).weak_type
        np.testing.assert_array_equal(a, b)


def test_errors_stay():
    for call in (lambda: jax.nn.logsumexp(SPECIAL, 5), lambda: jax.nn.softmax(SPECIAL, 7), lambda: jax.nn.softmax()):
        with pytest.raises((TypeError, ValueError)) as plain:
            call()
        with forced, pytest.raises(plain.type):
            call()


NORMS = {
    "flax.linen": lambda nn: nn.LayerNorm(parent=None).init_with_output(jax.random.key(0), SPECIAL)[0],
    "flax.nnx": lambda nn: nn.RMSNorm(4, rngs=nn.Rngs(0))(SPECIAL),
    "equinox": lambda eqx: jax.vmap(eqx.nn.LayerNorm(4))(SPECIAL),
    "haiku": lambda hk: hk.transform(lambda: hk.RMSNorm(-1)(SPECIAL)).init(jax.random.key(0)),
}


@pytest.mark.parametrize("library", NORMS)
def test_norms_of_other_libraries_stay(library):
    """They are called directly as jaxkern's own functions, or run as they are."""
    nn = pytest.importorskip(library)
    text = lambda: jax.jit(lambda: NORMS[library](nn)).lower().as_text()
    plain = text()
    with forced:
        assert text() == plain and not jaxkern.explain(lambda: NORMS[library](nn), PLATFORM)()


def test_other_signatures_stay(monkeypatch):
    """A function of another version of a library is left, with one warning."""
    module = types.ModuleType("another_version")
    exec("def associative_scan(fn, elems, along): return elems", module.__dict__)
    monkeypatch.setitem(sys.modules, "another_version", module)
    target = next(t for t in functions.TARGETS if t.operation == "associative_scan")
    monkeypatch.setattr(functions, "TARGETS", (target._replace(module="another_version"),))
    code = module.associative_scan.__code__
    with pytest.warns(UserWarning, match=r"another_version\.associative_scan cannot be replaced"), forced:
        assert module.associative_scan.__code__ is code
