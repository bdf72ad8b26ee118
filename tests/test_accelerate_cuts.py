"""Rows of a slice under `accelerate(only="rows")`: regions that are computed for all rows of the array (jaxkern/_accelerate/cuts.py)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from accelerated import PLATFORM, close

import jaxkern
from jaxkern._core import registry

forced = jaxkern.accelerate(only="rows", force=True)
by_name = jaxkern.accelerate(only="softmax_cross_entropy", force=True)
needs_kernels = pytest.mark.skipif(not registry.kernels_run(), reason="no kernels")
BATCH, LENGTH, CLASSES = 3, 7, 24


def of_log_softmax(logits, labels):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), labels[..., None], axis=-1)
    return -picked.squeeze(-1)


def of_logsumexp(logits, labels):
    logits = logits.astype(jnp.float32)
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], axis=-1).squeeze(-1)


def of_optax(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


def of_one_hot(logits, labels):
    return optax.softmax_cross_entropy(logits.astype(jnp.float32), jax.nn.one_hot(labels, logits.shape[-1]))


def with_z_loss(logits, labels):
    return of_logsumexp(logits, labels) + 1e-2 * jax.nn.logsumexp(logits.astype(jnp.float32), -1) ** 2


OF_ROWS = (of_log_softmax, of_logsumexp, of_optax, of_one_hot, with_z_loss)


def shifted(loss, logits, tokens):
    return loss(logits[:, :-1], tokens[:, 1:]).mean()


def reversed_shift(loss, logits, tokens):
    return loss(logits[:, 1:], tokens[:, :-1]).mean()


def inner_part(loss, logits, tokens):
    return loss(logits[:, 2:-1], tokens[:, 2:-1]).mean()


def fewer_sequences(loss, logits, tokens):
    return loss(logits[:-1], tokens[1:]).mean()


def merged(loss, logits, tokens):
    """As transformers has it."""
    return loss(logits[..., :-1, :].reshape(-1, logits.shape[-1]), tokens[..., 1:].reshape(-1)).mean()


def weighed(loss, logits, tokens):
    weights = (tokens[:, 1:] > 2).astype(jnp.float32)
    return (loss(logits[:, :-1], tokens[:, 1:]) * weights).sum() / jnp.maximum(weights.sum(), 1)


def selected(loss, logits, tokens):
    return jnp.where(tokens[:, 1:] > 2, loss(logits[:, :-1], tokens[:, 1:]), 0).sum()


def converted_first(loss, logits, tokens):
    return loss(logits.astype(jnp.float32)[:, :-1], tokens[:, 1:]).mean()


def both_shifts(loss, logits, tokens):
    return shifted(loss, logits, tokens) + reversed_shift(loss, logits, tokens)


def of_a_product(loss, logits, tokens):
    """Logits that are reshaped from a product's rows."""
    rows = logits.reshape(-1, logits.shape[-1])
    product = rows @ jnp.eye(logits.shape[-1], dtype=logits.dtype)
    return shifted(loss, product.astype(jnp.float32).reshape(logits.shape), tokens)


FORMS = (
    shifted,
    reversed_shift,
    inner_part,
    fewer_sequences,
    merged,
    weighed,
    selected,
    converted_first,
    both_shifts,
    of_a_product,
)


def logits_and_tokens(dtype="float32", batch=BATCH, length=LENGTH, classes=CLASSES):
    rng = np.random.default_rng(length)
    tokens = jnp.asarray(rng.integers(0, classes, (batch, length)), jnp.int32)
    return jnp.asarray(3 * rng.normal(size=(batch, length, classes)), dtype), tokens


def regions(f, *args, platform=PLATFORM):
    return [d for d in jaxkern.explain(f, platform)(*args) if d.operation == "rows"]


def lifted(f, *args, operation="rows", switched=forced) -> bool:
    """Whether all regions or losses of f read whole arrays of logits."""
    with switched:
        found = [d for d in jaxkern.explain(f, PLATFORM)(*args).taken if d.operation == operation]
    whole = (f"[{BATCH},{LENGTH},", f"[{BATCH * LENGTH},")
    return bool(found) and all(any(shape in d.shapes for shape in whole) for d in found)


def equal(f, *args, switched=forced):
    """Compares f under forced regions with plain JAX; NaN and infinities must be in the same places."""
    plain = jax.jit(f)(*args)
    with switched:
        own = jax.jit(f)(*args)
    narrow = any(x.dtype in (jnp.bfloat16, jnp.float16) for x in jax.tree.leaves(plain))
    close(plain, own, rtol=8e-3 if narrow else 2e-5)
    return plain, own


DTYPES = ("float32", "bfloat16", "float16")
CASES = [(loss, shifted, dtype) for loss in OF_ROWS for dtype in DTYPES[:2]]
CASES += [(OF_ROWS[k % 3], form, DTYPES[k % 3]) for k, form in enumerate(FORMS)]


@pytest.mark.parametrize("loss, form, dtype", CASES, ids=lambda x: getattr(x, "__name__", x))
def test_losses(loss, form, dtype):
    f = jax.value_and_grad(functools.partial(form, loss))
    args = logits_and_tokens(dtype)
    equal(f, *args)
    assert lifted(f, *args)


@pytest.mark.parametrize("form", [shifted, reversed_shift, merged], ids=lambda f: f.__name__)
@pytest.mark.parametrize("loss", [of_log_softmax, of_optax], ids=lambda f: f.__name__)
def test_rows_that_are_left_out_influence_nothing(loss, form):
    logits, tokens = logits_and_tokens()
    at = 0 if form is reversed_shift else -1
    f = jax.value_and_grad(functools.partial(form, loss))
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        given = logits.at[:, at].set(bad).at[0, at, 0].set(jnp.nan)
        _, (value, gradient) = equal(f, given, tokens)
        assert jnp.isfinite(value) and not np.any(gradient[:, at]) and not np.any(np.signbit(gradient[:, at]))
        assert np.all(np.isfinite(gradient))
        with jax.debug_nans(True):
            equal(f, given, tokens)


@pytest.mark.parametrize("loss", [of_log_softmax, of_logsumexp, of_optax], ids=lambda f: f.__name__)
def test_special_values(loss):
    logits, tokens = logits_and_tokens()
    f = jax.value_and_grad(functools.partial(shifted, loss))
    equal(f, logits.at[..., ::5].set(-jnp.inf), jnp.ones_like(tokens))
    equal(f, logits.at[1, 2, 3].set(jnp.nan), tokens)
    equal(f, logits.at[1, 2].set(-jnp.inf), tokens)
    for label in (CLASSES, -1, -CLASSES - 1, 2**31 - 1):
        equal(f, logits, tokens.at[0, 3].set(label))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_few_rows(length):
    args = logits_and_tokens(length=length)
    equal(jax.value_and_grad(lambda x, t: of_log_softmax(x[:, :-1], t[:, 1:]).sum()), *args)
    equal(jax.value_and_grad(lambda x, t: of_log_softmax(x[:, 1:], t[:, :-1]).sum()), *args)


def of_rows(x, t):
    return of_log_softmax(x[:, :-1], t[:, 1:])


def loss_of(x, t):
    return of_rows(x, t).mean()


TRANSFORMS = {
    "value": of_rows,
    "vmap": lambda x, t: jax.vmap(jax.value_and_grad(loss_of), (0, None))(jnp.stack([x, 2 * x]), t),
    "vmap over the last axis": lambda x, t: jax.vmap(jax.grad(loss_of), (3, None), 3)(jnp.stack([x, 2 * x], -1), t),
    "vmap over sequences": lambda x, t: jax.vmap(jax.grad(lambda x, t: of_rows(x[None], t[None]).mean()))(x, t),
    "jvp": lambda x, t: jax.jvp(lambda x: of_rows(x, t), (x,), (jnp.sin(x),)),
    "second derivative": lambda x, t: jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(loss_of)(x, t))))(x),
    "remat": lambda x, t: jax.value_and_grad(jax.checkpoint(lambda x, t: loss_of(jnp.tanh(x), t)))(x, t),
    "scan": lambda x, t: jax.lax.scan(lambda c, _: (c - jax.grad(loss_of)(c, t), loss_of(c, t)), x, length=2),
    "nested jit": lambda x, t: jax.value_and_grad(jax.jit(lambda x, t: jax.jit(loss_of)(2 * x, t)))(x, t),
    "one sequence": lambda x, t: jax.value_and_grad(lambda x: of_log_softmax(x[:-1], t[0, 1:]).mean())(x[0]),
    "row by row": lambda x, t: jax.lax.map(
        lambda a: jax.value_and_grad(lambda x: of_rows(x[None], a[1][None]).sum())(a[0]), (x, t)
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name):
    equal(TRANSFORMS[name], *logits_and_tokens())


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


OTHERS = {
    # Sums over rows, which take zeros in the rows that are left out.
    "scale": lambda x, s: jax.value_and_grad(lambda x, s: jnp.sin(rms_norm(x[:, :-1], s)).sum(), (0, 1))(x, s),
    "scale, merged": lambda x, s: jax.grad(
        lambda x, s: jnp.sin(rms_norm(x[:, 2:].reshape(-1, x.shape[-1]), s)).sum(), (0, 1)
    )(x, s),
    "not finite": lambda x, s: jax.grad(lambda x, s: jnp.sin(rms_norm(x[:, :-1], s)).sum(), (0, 1))(
        x.at[:, -1].set(jnp.nan), s
    ),
    "rows are a result": lambda x, s: (rms_norm(x[:, :-1], s), rms_norm(x[:, 1:], s) @ s),
    "padded": lambda x, s: jnp.pad(rms_norm(x[:, 1:-2], s), ((0, 0), (1, 2), (0, 0))),
    "padded by ones": lambda x, s: jnp.pad(rms_norm(x[:, :-1], s), ((0, 0), (0, 1), (0, 0)), constant_values=1),
    "padded by a number": lambda x, s: jax.lax.pad(
        rms_norm(x[:, :-1], s), np.float32(2), ((0, 0, 0), (0, 1, 0), (0, 0, 0))
    ),
    "padded by -0.0": lambda x, s: (
        1 / jax.lax.pad(rms_norm(x[:, :-1], s), np.float32(-0.0), ((0, 0, 0), (0, 1, 0), (0, 0, 0)))
    ),
    "padded elsewhere": lambda x, s: jnp.pad(rms_norm(x[:, :-1], s), ((0, 0), (1, 0), (0, 0))),
    "padded and a result": lambda x, s: (lambda y: (jnp.pad(y, ((0, 0), (0, 1), (0, 0))), y))(rms_norm(x[:, :-1], s)),
    "two arrays": lambda x, s: rms_norm(x[:, :-1] * jnp.tanh(x * 2)[:, :-1], s),
    "two shifts": lambda x, s: rms_norm(x[:, :-1] * x[:, 1:], s),
    "another array": lambda x, s: rms_norm(x[:, :-1] + jnp.cumsum(x, 1)[:, :-1] @ jnp.eye(x.shape[-1]), s),
    "a bias of each row": lambda x, s: rms_norm(x[:, :-1] + x[0, 1:], s),
    "places": lambda x, s: rms_norm(x[:, :-1] + jnp.arange(x.shape[1] - 1.0)[:, None], s),
    "places from the second": lambda x, s: rms_norm(x[:, 1:] + jnp.arange(x.shape[1] - 1.0)[:, None], s),
    "causal": lambda x, s: jax.nn.softmax(
        jnp.where(jnp.arange(x.shape[-1]) <= jnp.arange(x.shape[1] - 1)[:, None], x[:, 1:], -jnp.inf)
    ),
    "every other": lambda x, s: rms_norm(x[:, ::2], s),
    "two axes": lambda x, s: rms_norm(x[1:, :-1], s),
    "the row": lambda x, s: rms_norm(x[..., 3:], s[3:]),
    "the middle axis": lambda x, s: (lambda y: y / (1 + jnp.max(y, 1, keepdims=True)))(jnp.exp(x[1:])),
    "padded, then cut": lambda x, s: (lambda y: rms_norm(y.reshape(x.shape)[:, :-1], 2 * s).astype(jnp.bfloat16))(
        jnp.pad(rms_norm(x[:, :-1], s), ((0, 0), (0, 1), (0, 0))).astype(jnp.bfloat16).reshape(-1, x.shape[-1])
    ),
    "integers": lambda x, s: jnp.pad(
        (lambda y: y - jnp.max(y, -1, keepdims=True))((8 * x).astype(jnp.int32)[:, :-1]), ((0, 0), (0, 1), (0, 0))
    ),
    "booleans": lambda x, s: jnp.pad(
        (lambda y: y >= jnp.max(y, -1, keepdims=True))(x[:, :-1]), ((0, 0), (0, 1), (0, 0))
    ),
    "a window": lambda x, s: rms_norm(jnp.concatenate([x, x], 1)[:, 2:6], s),
    # A kernel that makes signs as bfloat16 and as float32 writes only the latter, so the other one must not read the former.
    "of what another kernel converts": lambda x, s: (lambda y: (y @ jnp.eye(y.shape[-1]), rms_norm(y[:, :-1], s)))(
        jnp.sign(x - x.mean(-1, keepdims=True)).astype(jnp.bfloat16).astype(jnp.float32)
    ),
    "one row": lambda x, s: rms_norm(x[:, 3:4], s),
    "no row": lambda x, s: rms_norm(x[:, 3:3], s),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_slices(name):
    x, _ = logits_and_tokens()
    equal(OTHERS[name], x, 1 + x[0, 0])


SYMBOLIC = {
    "cut": lambda x, y: rms_norm(jax.lax.slice_in_dim(x, 0, 64), 2),
    "padded": lambda x, y: jnp.pad(rms_norm(y[:, :-1], 2), ((0, 0), (0, x.shape[0]), (0, 0))),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_sizes(name):
    """What is cut out of a symbolic size, or padded to one, is exported."""
    y, _ = logits_and_tokens()
    x = jnp.concatenate([y] * 4).reshape(-1, CLASSES)
    plain = jax.jit(SYMBOLIC[name])(x, y)
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape(f"n, {CLASSES}", constraints=["n >= 64"]), x.dtype)
    with forced:
        exported = jax.export.export(jax.jit(lambda x, y: SYMBOLIC[name](x, y)))(rows, y)
    close(plain, exported.call(x, y))


def test_donated():
    f = lambda x, t: jax.value_and_grad(loss_of)(x, t)
    x, t = logits_and_tokens()
    plain = jax.jit(f)(x, t)
    with forced:
        own = jax.jit(f, donate_argnums=0)(x, t)
    close(plain, own)
    assert x.is_deleted()


@needs_kernels
@pytest.mark.parametrize("form", [shifted, reversed_shift, merged, weighed, converted_first], ids=lambda f: f.__name__)
def test_nothing_of_the_size_of_the_logits_is_copied(form):
    """The custom call reads the product and writes the whole gradient."""

    def f(x, w, tokens):
        return jax.value_and_grad(lambda x, w: form(of_log_softmax, x @ w, tokens), (0, 1))(x, w)

    spec = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, dtype)
    args = spec(8, 1024, 256), spec(256, 32000), spec(8, 1024, dtype="int32")
    with jaxkern.accelerate(only="rows"):
        (found,) = regions(f, *args, platform="cuda")
        text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    logits = 8 * 1024 * 32000 * 2
    assert (
        found.taken and "does not store" not in found.reason and found.bytes == pytest.approx(2 * logits, rel=1e-3)
    ), found
    large = [line for line in text.splitlines() if "32000xbf16" in line or "32000xf32" in line]
    assert not any(name in line for line in large for name in ("stablehlo.slice", "stablehlo.pad", "1023x", "8184x")), (
        large
    )


@needs_kernels
@pytest.mark.parametrize("rows, whole", [(1023, True), (700, True), (64, False)])
def test_a_short_part_of_an_array_is_not_computed_whole(rows, whole):
    """The kernel's estimate has all rows of the array, XLA's estimate the rows of the program."""
    f = lambda x, s: jax.value_and_grad(lambda x: jnp.sin(rms_norm(x[:, :rows], s)).sum())(x)
    with jaxkern.accelerate(only="rows"):
        (found,) = regions(
            f,
            jax.ShapeDtypeStruct((64, 1024, 4096), "float32"),
            jax.ShapeDtypeStruct((4096,), "float32"),
            platform="cuda",
        )
    assert ("[64,1024,4096]" in found.shapes) == whole, found


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_losses_by_name(form):
    f, dtype = jax.value_and_grad(functools.partial(form, of_optax)), DTYPES[FORMS.index(form) % 3]
    args = logits_and_tokens(dtype)
    equal(f, *args, switched=by_name)
    assert lifted(f, *args, operation="softmax_cross_entropy", switched=by_name)


@pytest.mark.parametrize("form", [shifted, reversed_shift, merged], ids=lambda f: f.__name__)
def test_rows_that_a_loss_by_name_leaves_out_influence_nothing(form):
    logits, tokens = logits_and_tokens()
    at = 0 if form is reversed_shift else -1
    f = jax.value_and_grad(functools.partial(form, of_optax))
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        given = logits.at[:, at].set(bad).at[0, at, 0].set(jnp.nan)
        _, (value, gradient) = equal(f, given, tokens, switched=by_name)
        assert jnp.isfinite(value) and np.all(np.isfinite(gradient)) and not np.any(gradient[:, at])
    for label in (CLASSES, -1, -CLASSES - 1, 2**31 - 1, -(2**31)):
        equal(f, logits, tokens.at[0, 3].set(label), switched=by_name)


@pytest.mark.parametrize("name", ["value", "vmap", "jvp", "second derivative", "remat", "scan", "one sequence"])
def test_transforms_of_losses_by_name(name, monkeypatch):
    monkeypatch.setitem(globals(), "of_log_softmax", of_optax)
    equal(TRANSFORMS[name], *logits_and_tokens(), switched=by_name)


@needs_kernels
@pytest.mark.parametrize("form", [shifted, reversed_shift, merged, weighed, converted_first], ids=lambda f: f.__name__)
def test_a_loss_by_name_reads_the_whole_array(form):
    f = lambda x, w, tokens: jax.value_and_grad(lambda x, w: form(of_optax, x @ w, tokens), (0, 1))(x, w)
    spec = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, dtype)
    args = spec(8, 1024, 256), spec(256, 32000), spec(8, 1024, dtype="int32")
    with jaxkern.accelerate():
        (found,) = jaxkern.explain(f, platform="cuda")(*args)
    assert found.taken and found.reason == "loss and gradient in one read", found
    assert found.shapes in ("bf16[8,1024,32000]", "bf16[8192,32000]"), found


@needs_kernels
def test_a_loss_by_name_of_a_short_part():
    f = jax.value_and_grad(lambda x, t: of_optax(x[:, :512], t).mean())
    with jaxkern.accelerate(only="softmax_cross_entropy"):
        (found,) = jaxkern.explain(f, platform="cuda")(
            jax.ShapeDtypeStruct((8, 1024, 32000), "bfloat16"), jax.ShapeDtypeStruct((8, 512), "int32")
        )
    assert not found.taken and "slice" in found.reason, found
