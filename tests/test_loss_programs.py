"""softmax_cross_entropy: derivatives, batches, copies and memory of compiled programs, algorithms."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losses import (
    OPERATION,
    OPTIONS,
    assert_near,
    check,
    every_dtype,
    exact,
    needs_kernels,
    needs_runtime,
    problem,
    separate,
    together,
)
from problems import random_mask
from reference import DTYPES

import jaxkern
from jaxkern import algorithms

# ---- derivatives and batches


def plain(x, labels, mask=None, smoothing=0.1, z_loss=1e-2, ignore=-1):
    """The loss in jnp along the last axis, which JAX differentiates."""
    if mask is not None:
        x = jnp.where(mask, x, -jnp.inf)
    lse = jax.nn.logsumexp(x, -1)
    at = jnp.where(labels == ignore, 0, labels)
    kept = jnp.ones(x.shape, bool) if mask is None else jnp.broadcast_to(mask, x.shape)
    mean = jnp.sum(jnp.where(kept, x, 0), -1) / kept.sum(-1)
    value = (
        lse - (1 - smoothing) * jnp.take_along_axis(x, at[..., None], -1)[..., 0] - smoothing * mean + z_loss * lse**2
    )
    return jnp.where(labels == ignore, 0, value)


OURS = functools.partial(jaxkern.softmax_cross_entropy, label_smoothing=0.1, z_loss=1e-2, ignore_index=-1)
TRANSFORMATIONS = {
    "grad": lambda f, x, t: jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))(x),
    "grad of mean": lambda f, x, t: jax.value_and_grad(lambda x: jnp.mean(f(x)))(x),
    "grad of a loss of the loss": lambda f, x, t: jax.value_and_grad(lambda x: jnp.mean(f(x)) ** 2)(x),
    "jvp": lambda f, x, t: jax.jvp(f, (x,), (t,)),
    "linearize": lambda f, x, t: jax.linearize(f, x)[1](t),
    "jacfwd": lambda f, x, t: jax.jacfwd(f)(x),
    "jacrev": lambda f, x, t: jax.jacrev(f)(x),
    "hessian": lambda f, x, t: jax.hessian(lambda x: jnp.sum(jnp.sin(f(x))))(x),
    "reverse over reverse": lambda f, x, t: jax.grad(
        lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))(x) * t)
    )(x),
    "third order": lambda f, x, t: jax.jvp(
        lambda x: jax.jvp(lambda x: jax.jvp(f, (x,), (t,))[1], (x,), (t,))[1], (x,), (t,)
    )[1],
    "third order, reverse": lambda f, x, t: jax.grad(
        lambda x: jnp.sum(jax.grad(lambda x: jax.jvp(lambda x: f(x).sum(), (x,), (t,))[1])(x) * t)
    )(x),
    "gradient in the cotangent": lambda f, x, t: jax.grad(lambda g: jnp.sum(jnp.sin(jax.vjp(f, x)[1](g)[0])))(f(t)),
    "vmap of grad": lambda f, x, t: jax.vmap(jax.grad(lambda x: jnp.sum(f(x))))(jnp.stack([x, t])),
    "grad of vmap": lambda f, x, t: jax.grad(lambda xs: jnp.sum(jnp.sin(jax.vmap(f)(xs))))(jnp.stack([x, t])),
    "remat": lambda f, x, t: jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: f(jnp.sin(x)))(x)))(x),
    "grad of scan": lambda f, x, t: jax.grad(
        lambda x: jax.lax.scan(lambda c, d: (c + f(x * d).sum(), None), 0.0, t[0])[0]
    )(x),
    "symbolic zero": lambda f, x, t: jax.jvp(lambda x, s: f(x) * s, (x, 2.0), (jnp.zeros_like(x), 1.0)),
    "has no tangent": lambda f, x, t: jax.jvp(lambda s: f(x) * s, (2.0,), (1.0,)),
}


@pytest.mark.parametrize("masked", [False, True])
def test_transformations(masked, x64):
    rng = np.random.default_rng(0)
    x, t = (jnp.asarray(rng.normal(0, 2, (4, 5))) for _ in range(2))
    labels = jnp.array([0, 4, -1, 2])
    mask = jnp.asarray(rng.random((1, 5)) < 0.6).at[0, jnp.array([0, 2, 4])].set(True) if masked else None
    fs = lambda x: OURS(x, labels, where=mask), lambda x: plain(x, labels, mask)
    ours, theirs = (
        jax.jit(lambda x, t, f=f: {name: run(f, x, t) for name, run in TRANSFORMATIONS.items()})(x, t) for f in fs
    )
    for name in TRANSFORMATIONS:
        assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(theirs[name])) > 1e-3, name
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-11, err_msg=name),
            ours[name],
            theirs[name],
        )


def test_derivatives_of_the_gradient_that_comes_with_the_loss(x64):
    rng = np.random.default_rng(0)
    x, t = (jnp.asarray(rng.normal(size=(4, 5))) for _ in range(2))
    labels, g = jnp.array([0, 4, 1, 2]), jnp.asarray(rng.normal(size=4))
    both = functools.partial(jaxkern.softmax_cross_entropy_and_grad, label_smoothing=0.1, z_loss=1e-2)
    ours = lambda x, g: both(x, labels, g)
    theirs = lambda x, g: (plain(x, labels), jax.vjp(lambda x: plain(x, labels), x)[1](g)[0])
    for f, h in ((ours, theirs), (jax.jacrev(ours, (0, 1)), jax.jacrev(theirs, (0, 1)))):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-11), jax.jit(f)(x, g), jax.jit(h)(x, g)
        )
    stacked = jax.vmap(ours, in_axes=(1, None), out_axes=(0, 2))(jnp.stack([x, t], 1), g)
    np.testing.assert_allclose(stacked[1][:, :, 1], ours(t, g)[1], rtol=1e-12)


@pytest.mark.parametrize(
    "in_axes", [(0, 0, None), (1, 0, 0), (2, None, 1), (-1, 1, None), (None, 0, None), (None, None, 0)]
)
@pytest.mark.parametrize("axis", [0, 1])
def test_vmap(in_axes, axis):
    """The batch in any place of any operand, the gradient's too."""
    rng = np.random.default_rng(0)
    shapes = (6, 4), (4,) if axis == 0 else (6,), (6, 1)
    values = (
        rng.normal(size=(3, 6, 4)).astype(np.float32),
        rng.integers(0, 4, (3, *shapes[1])),
        rng.random((3, 6, 1)) < 0.8,
    )
    given = [v[0] if a is None else np.moveaxis(v, 0, a) for v, a in zip(values, in_axes)]

    def f(x, labels, mask):
        run = lambda x: jaxkern.softmax_cross_entropy(x, labels, axis=axis, where=mask)
        return run(x), jax.grad(lambda x: jnp.sum(jnp.where(jnp.isfinite(v := run(x)), v, 0)))(x)

    found = jax.jit(jax.vmap(f, in_axes))(*given)
    each = [f(*(v[0 if a is None else k] for v, a in zip(values, in_axes))) for k in range(3)]
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
        found,
        jax.tree.map(lambda *a: jnp.stack(a), *each),
    )


def test_debugging_modes():
    x, labels, _ = problem((3, 5), "float32")
    with jax.debug_nans(True):
        jaxkern.softmax_cross_entropy(x, labels)
        with pytest.raises(FloatingPointError):
            jaxkern.softmax_cross_entropy(x, labels.at[0].set(9)).block_until_ready()


# ---- what is compiled: kernels, copies, memory


def compiled(f, *args, donate=()):
    program = jax.jit(f, donate_argnums=donate).lower(*args).compile()
    text = program.as_text()
    return (
        program,
        re.findall(r'custom_call_target="jaxkern_(\w+)"', text),
        re.findall(r"= \S+ (?:copy|transpose)(?:-start)?\(", text),
    )


def mean_loss(x, labels):
    return jaxkern.softmax_cross_entropy(x, labels).mean()


def masked_mean(x, labels):
    keep = (labels > 3).astype(jnp.float32)
    return jnp.sum(jaxkern.softmax_cross_entropy(x, labels) * keep) / jnp.maximum(keep.sum(), 1)


def squared_mean(x, labels):
    return mean_loss(x, labels) ** 2


SHAPE = (512, 1000)
ROWS = 64 * SHAPE[0] + 65536  # bytes: what is kept, and what XLA rounds up to


@needs_runtime
@pytest.mark.parametrize("f", [mean_loss, squared_mean])
def test_programs_for_cuda_say_when_the_gradient_overwrites_the_logits(f):
    x, labels, _ = problem(SHAPE, "float32")

    def overwrites(f, donate=()):
        traced = jax.jit(jax.grad(f), donate_argnums=donate).trace(x, labels)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        return "output_operand_alias<" in text

    assert not overwrites(f)
    assert overwrites(f, donate=(0,))
    assert overwrites(lambda x, labels: f(jnp.sin(x), labels))


@needs_kernels
@pytest.mark.parametrize("f", [mean_loss, squared_mean])
@pytest.mark.usefixtures("highest_precision")
def test_the_gradient_takes_the_place_of_logits_that_are_an_intermediate_result(f):
    """A step of training: one array of the logits' size at any time."""
    h, w = (
        jnp.asarray(np.random.default_rng(k).normal(size=s), jnp.float32)
        for k, s in enumerate(((SHAPE[0], 16), (16, SHAPE[1])))
    )
    labels = problem(SHAPE, "float32")[1]
    program, _, moves = compiled(jax.grad(lambda w: f(h @ w, labels)), w)
    assert program.memory_analysis().temp_size_in_bytes < 1.5 * 4 * SHAPE[0] * SHAPE[1]
    np.testing.assert_allclose(
        program(w),
        jax.grad(
            lambda w: {mean_loss: lambda v: v.mean(), squared_mean: lambda v: v.mean() ** 2}[f](
                plain(h @ w, labels, None, 0, 0)
            )
        )(w),
        rtol=2e-4,
        atol=2e-6,
    )


@needs_kernels
def test_logits_that_live_on_are_not_overwritten():
    x, labels, _ = problem(SHAPE, "float32")
    f = lambda x: (mean_loss(jnp.sin(x), labels), jnp.sin(x))
    (_, kept), dx = jax.jit(jax.value_and_grad(f, has_aux=True))(x)
    np.testing.assert_allclose(kept, jnp.sin(x), rtol=1e-6)
    np.testing.assert_allclose(dx, jax.grad(lambda x: plain(jnp.sin(x), labels, None, 0, 0).mean())(x), atol=1e-7)
    before = np.asarray(x)
    jax.jit(jax.value_and_grad(mean_loss))(x, labels)
    np.testing.assert_array_equal(before, x)


@needs_kernels
def test_memory_is_a_few_numbers_a_row():
    x, labels, g = problem(SHAPE, "bfloat16")
    for f in (
        lambda x: jaxkern.softmax_cross_entropy(x, labels),
        lambda x: jaxkern.softmax_cross_entropy_and_grad(x, labels),
        lambda x: jax.vjp(lambda x: jaxkern.softmax_cross_entropy(x, labels, label_smoothing=0.1), x)[1](g),
    ):
        program, calls, moves = compiled(f, x)
        assert calls and not moves and program.memory_analysis().temp_size_in_bytes <= ROWS


# ---- algorithms


def test_algorithm_query_needs_no_gpu():
    for device, width, inner, dtype, which, masked, rows in itertools.product(
        (algorithms.H200, algorithms.A100),
        (1, 64, 1000, 4096, 50257, 1 << 20),
        (1, 7),
        DTYPES,
        ("loss", "gradient", "both"),
        (False, True),
        (1, 49152),
    ):
        asked = dict(rows=rows, width=width, inner=inner, dtype=dtype, which=which, masked=masked, device=device)
        algorithm = algorithms.choose(OPERATION, **asked)
        assert algorithms.fits(OPERATION, algorithm, **asked)
        assert (algorithm == "column") == (inner != 1)
        assert device is algorithms.H200 or algorithm != "pipeline"  # Hopper's
    assert algorithms.choose(OPERATION, 32768, 131072, dtype="bfloat16", which="both") == "pipeline"
    assert algorithms.choose(OPERATION, 32768, 4096) == "warp"
    assert algorithms.choose(OPERATION, 1, 1 << 20) == "split"
    with algorithms.force(softmax="cluster"):
        assert "algorithm=auto" in str(
            jax.make_jaxpr(jaxkern.softmax_cross_entropy)(jnp.ones((2, 3)), jnp.zeros(2, int))
        )
    with pytest.raises(ValueError, match="no algorithm 'wrap'"):
        algorithms.fits(OPERATION, "wrap", 1, 1)
    with pytest.raises(ValueError, match="which must be"):
        algorithms.choose(OPERATION, 1, 1, which="backward")


EDGES = (
    1,
    7,
    8,
    9,
    31,
    127,
    129,
    256,
    511,
    513,
    1000,
    1024,
    2049,
    4095,
    4096,
    8193,
    16384,
    16385,
    32768,
    50257,
    131080,
)


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("algorithm", algorithms.names(OPERATION))
def test_every_algorithm(algorithm, dtype):
    """Each kernel where it fits, with every option and with a mask, at widths around every algorithm's edges."""
    ran, rows = 0, 5
    # New functions, not the functions above: a function compiled for one algorithm is not compiled again for another.
    for n, width in enumerate(EDGES):
        fits = lambda which, masked=False: algorithms.fits(
            OPERATION, algorithm, rows, width, dtype=dtype, which=which, masked=masked
        )
        args = problem((rows, width), dtype)
        with algorithms.force(softmax_cross_entropy=algorithm):
            for masked in (False, True):
                runs = [
                    run
                    for run, names in ((separate, ("loss", "gradient")), (together, ("both",)))
                    if all(fits(which, masked) for which in names)
                ]
                if algorithm in ("block", "streaming", "split") and fits("loss", masked):
                    value = jax.jit(functools.partial(jaxkern.softmax_cross_entropy, label_smoothing=0.1))(*args[:2])
                    assert_near(value, *exact(*args, smoothing=0.1)[0], dtype)
                    ran += 1
                check(*args, -1, random_mask((1, width)) if masked else None, runs=runs, **OPTIONS[n % len(OPTIONS)])
                ran += len(runs)
    assert ran or not any(
        algorithms.fits(OPERATION, algorithm, 5, w, dtype=dtype, which=k)
        for w in EDGES
        for k in ("loss", "gradient", "both")
    )


@needs_runtime
def test_an_algorithm_that_does_not_fit_is_an_error():
    with (
        algorithms.force(softmax_cross_entropy="sub_warp"),
        pytest.raises(ValueError, match="jaxkern.softmax_cross_entropy.*sub_warp"),
    ):
        traced = jax.jit(jaxkern.softmax_cross_entropy).trace(jnp.ones((2, 100_003)), jnp.zeros(2, jnp.int32))
        traced.lower(lowering_platforms=("cuda",))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((700, 4096), "bfloat16"),
        ((700, 50257), "bfloat16"),
        ((300, 50257), "float32"),
        ((5000, 257), "float16"),
        ((90000, 64), "float32"),
        ((600, 32768), "float32"),
        ((270, 131080), "bfloat16"),
    ],
)
def test_many_rows(shape, dtype):
    """More rows than the device takes at a time."""
    check(*problem(shape, dtype))
