"""Cross-entropy of logits spread over several devices: as in test_sharding.py."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding import DEVICES, KERNELS, arrays, check, every_mesh, mesh, put, same, several, split_by

import jaxkern

LOSSES = {  # arguments of softmax_cross_entropy
    "plain": {},
    "smooth": {"label_smoothing": 0.1},
    "spread": {"label_smoothing": 1.0},
    "z": {"z_loss": 0.01, "ignore_index": 0},  # a class
    "all": {"label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": -1},
}


def logits_and_labels(rows, classes, mask_shape, special=True):
    """Every kind of label; rows that are masked or -inf in part or entirely; a NaN and an infinity."""
    x, _, mask = arrays((rows, classes), mask_shape)
    labels = jnp.asarray(np.random.default_rng(1).integers(0, classes, rows), jnp.int32)
    if special:
        labels = labels.at[0].set(-1).at[1].set(-7).at[2].set(classes).at[3].set(classes - 1).at[4].set(0)
        x = x.at[5].set(-jnp.inf).at[6, : classes * 3 // 4].set(-jnp.inf).at[7, labels[7]].set(-jnp.inf)
        x = x.at[8, 3].set(jnp.nan).at[9, classes - 2].set(jnp.inf).at[10, 2].set(5e4)
    return x, labels, mask


def losses_and_pulls(names):
    def f(x, labels, mask):
        def one(options):
            value, pull = jax.vjp(lambda x: jaxkern.softmax_cross_entropy(x, labels, where=mask, **options), x)
            return value, pull(jnp.cos(jnp.arange(value.size, dtype=value.dtype)).reshape(value.shape))[0]

        return {name: one(LOSSES[name]) for name in names}

    return f


@functools.cache
def losses_on_one_device(mask_shape):
    return jax.jit(losses_and_pulls(LOSSES))(*logits_and_labels(16, 64, mask_shape))


SPECS = [P("r"), P(("r", "c")), P(), P("r", "c"), P("c", "r"), P(None, ("r", "c"))]
MASKS = [None, (1, 64), (16, 64)]


@several
@every_mesh
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("mask_shape", MASKS)
def test_loss_of_split_logits(spec, shape_of_mesh, mask_shape):
    """Split rows send nothing, split classes numbers per row for the loss, whichever the labels.

    One message, and one more where loss and gradient are one call, because the losses themselves are results of the program.

    Two losses per case: each with every spec, and with every mask.
    """
    m = mesh(shape=shape_of_mesh)
    names = list(LOSSES) * 2
    at = (2 * MASKS.index(mask_shape) + SPECS.index(spec)) % len(LOSSES)
    names = names[at : at + 2]
    x, labels, mask = logits_and_labels(16, 64, mask_shape)
    args = put(m, (x, labels, mask), (spec, P(*spec[:1]), spec if mask_shape == x.shape else P()))
    cut = split_by(m, spec[1:], ("r", "c"))
    out = (NamedSharding(m, P(*spec[:1])), NamedSharding(m, spec))
    f = jax.jit(losses_and_pulls(names), out_shardings=dict.fromkeys(names, out)).lower(*args).compile()
    wanted = losses_on_one_device(mask_shape)
    same(f(*args), {name: wanted[name] for name in names})
    check(f.as_text(), {"all-gather": 2 * len(names)} if cut else {}, most=5 * 16 * len(DEVICES))


@several
@pytest.mark.parametrize("kind", ["auto", "explicit", "constrained"])
def test_logits_that_were_widened(kind):
    """They stay split as the program says, on every kind of mesh."""
    m = mesh("Explicit" if kind == "explicit" else "Auto", names=("r",))
    h, w = (
        jnp.ones((256, 16), jnp.bfloat16) / 3,
        jnp.asarray(np.random.default_rng(0).normal(size=(16, 512)), jnp.bfloat16),
    )
    labels = jnp.arange(256, dtype=jnp.int32)

    def loss(h, w, labels):
        logits = (h @ w).astype(jnp.float32)
        if kind == "constrained":
            logits = jax.lax.with_sharding_constraint(logits, NamedSharding(m, P("r", None)))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    spec = P() if kind == "constrained" else P("r")
    args = put(m, (h, w, labels), (spec, P(), spec))
    with jax.set_mesh(m):
        for f in (loss, jax.value_and_grad(loss, (0, 1))):
            plain = jax.jit(f)(*args)
            with jaxkern.accelerate(only="softmax_cross_entropy", force=True):
                compiled = jax.jit(f).lower(*args).compile()
            own = compiled(*args)
            for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(own)):
                np.testing.assert_allclose(np.asarray(b, np.float32), np.asarray(a, np.float32), rtol=1e-2, atol=1e-3)
            assert "[256,512]" not in compiled.as_text()  # nobody has all logits


@several
@pytest.mark.parametrize("spec", [P("r"), P("r", "c"), P(None, "c")])
def test_special_rows_of_an_unchanged_program(spec):
    """optax's loss under `jaxkern.accelerate` keeps infinities and NaN, also where classes are split."""
    x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    x[0, 3], x[1], x[2, 1:], x[3, 40] = np.inf, -np.inf, -np.inf, np.nan
    labels = jnp.array([1, 0, 0, 1, 64, -1, -65, 63])

    def f(x, labels):
        losses, pull = jax.vjp(lambda x: optax.softmax_cross_entropy_with_integer_labels(x, labels), x)
        return losses, pull(jnp.arange(1.0, 9.0))[0]

    m = mesh()
    loss, dx = jax.jit(f)(jnp.asarray(x), labels)
    with jaxkern.accelerate(only="softmax_cross_entropy", force=True):
        own_loss, own_dx = jax.jit(f)(*put(m, (x, labels), (spec, P(*spec[:1]))))
    np.testing.assert_allclose(own_loss, loss, rtol=3e-6)
    np.testing.assert_allclose(own_dx[1:], dx[1:], rtol=3e-6, atol=1e-6)
    assert np.isnan(own_dx[0, 3])


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
    check(text, {"all-gather": 1, "all-reduce": 1}, most=5 * 16 * len(DEVICES))
    if KERNELS:
        cut = split_by(m, spec[1:], "c")
        wanted = ["_both"] if not cut else ["", "_grad"]
        assert re.findall(r'custom_call_target="jaxkern_cross_entropy(\w*)"', text) == wanted


@several
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("axis, spec", [(-1, P("r", None, "c")), (1, P(None, "c", "r")), (0, P("c"))])
def test_loss_of_other_types_and_axes_with_split_classes(dtype, axis, spec, x64):
    m = mesh()
    x = (30 * jax.random.normal(jax.random.key(0), (8, 32, 16), jnp.float32)).astype(dtype)
    rows = [d for d in range(3) if d != axis % 3]
    labels = jnp.arange(math.prod(x.shape[d] for d in rows), dtype=jnp.uint8).reshape([x.shape[d] for d in rows]) % 9
    f = jax.jit(
        lambda x: jax.vjp(lambda x: jaxkern.softmax_cross_entropy(x, labels, axis=axis, z_loss=0.01), x)[1](
            jnp.ones(labels.shape, jnp.float64 if dtype == "float64" else jnp.float32)
        )[0]
    )
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
        return (
            jax.jvp(loss, (x,), (t,)),
            hvp(t),
            jax.vmap(hvp)(jnp.stack([t, x])),
            jaxkern.softmax_cross_entropy_and_grad(x, labels, jnp.arange(8.0), label_smoothing=0.1),
        )

    args = put(m, (x, jnp.cos(x)), (P("r", "c"),) * 2)
    same(jax.jit(f)(*args), jax.jit(f)(x, jnp.cos(x)), 1e-5)
    text = jax.jit(lambda x, t: jax.jvp(loss, (x,), (t,))).lower(*args).compile().as_text()
    check(text, {"all-gather": 1, "all-reduce": 1}, most=5 * 8 * len(DEVICES))


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
        f = jax.jit(
            lambda x: jaxkern.softmax_cross_entropy_and_grad(x, labels),
            donate_argnums=0,
            out_shardings=(NamedSharding(m, P("r")), NamedSharding(m, spec)),
        )
        text = f.lower(*put(m, (x,), (spec,))).compile().as_text()
        assert "input_output_alias" in text
        if KERNELS:  # XLA's own operations are free to copy
            assert not re.findall(r"= f32\[\d+,\d+\]\S* copy\(", text)


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
